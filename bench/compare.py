#!/usr/bin/env python3
"""Compares two JSON files of Google Benchmark: compare.py OLD NEW [COUNTER]

For every benchmark in both files prints the median over its repetitions in OLD and in NEW, the ratio
OLD / NEW (above 1: NEW is smaller, that is, faster) and the spread, the larger (max - min) / median of the
two files in percent. A ratio that differs from 1 by less than the spread says nothing. COUNTER names what is
compared: real_time (the default), cpu_time or a counter such as per_token or step_ns_per_token.

Write the files with --benchmark_out=FILE --benchmark_out_format=json --benchmark_repetitions=9
--benchmark_enable_random_interleaving=true (step_bench interleaves by itself).
"""
import json
import statistics
import sys


def load(path, counter):
    with open(path, encoding="utf-8") as file:
        data = json.load(file)
    values = {}
    for run in data["benchmarks"]:
        if run.get("run_type") == "iteration" and counter in run:
            values.setdefault(run["run_name"], []).append(run[counter])
    return data.get("context", {}).get("instruction_set", "?"), values


def spread(values):
    middle = statistics.median(values)
    return (max(values) - min(values)) / middle if middle else 0.0


def main():
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    counter = sys.argv[3] if len(sys.argv) == 4 else "real_time"
    (old_set, old), (new_set, new) = load(sys.argv[1], counter), load(sys.argv[2], counter)
    print(f"{counter}; instruction sets: {old_set}, {new_set}")
    print(f"{'old':>12} {'new':>12} {'old/new':>8} {'spread %':>8}  benchmark")
    for name in (n for n in old if n in new):
        a, b = statistics.median(old[name]), statistics.median(new[name])
        ratio = a / b if b else float("nan")
        worst = 100 * max(spread(old[name]), spread(new[name]))
        print(f"{a:12.4g} {b:12.4g} {ratio:8.3f} {worst:8.1f}  {name}")


if __name__ == "__main__":
    main()
