#!/usr/bin/env python3
"""Makes the table of docs/performance.md: step_table.py FILE.json [PAGE.md]

FILE.json is what step_bench wrote with --benchmark_out=FILE.json --benchmark_out_format=json. The table
goes to standard output, or into PAGE.md between the lines "<!-- table: step -->" and "<!-- end -->".
"""
import json
import re
import statistics
import sys

HEAD = ["case", "rule", "dense / step", "range", "step, ns", "dense, ns", "bytes / dense", "moved, %",
        "error of D", "error of output"]


def cells(name, runs):
    # step/n:32768/heads:1/f16/threads:1/risk:1e-4/manual_time, or step/recorded/f16/...
    parts = [part for part in name.split("/") if part not in ("step", "manual_time")]
    rule = parts.pop().replace(":", " ").replace("+", ", ")
    fields = dict(part.split(":") for part in parts if ":" in part)
    case = f"{int(fields['n']) // 1024}K" if "n" in fields else "recorded"
    case += ", " + ("f16" if "f16" in parts else "f32")
    if fields.get("heads", "1") != "1":
        case += f", {fields['heads']} KV heads"
    if fields.get("threads", "1") != "1":
        case += f", {fields['threads']} threads"

    def middle(counter):
        return statistics.median(run[counter] for run in runs)

    ratios = [run["ratio"] for run in runs]
    return [case, rule, f"**{middle('ratio'):.2f}**", f"{min(ratios):.2f} - {max(ratios):.2f}",
            f"{middle('step_ns_per_token'):.1f}", f"{middle('dense_ns_per_token'):.1f}",
            f"{middle('step_bytes') / middle('dense_bytes'):.3f}", f"{middle('moved_percent'):.3f}",
            f"{middle('denominator_error'):.4f}", f"{middle('output_error'):.4f}"]


def table(path):
    with open(path, encoding="utf-8") as file:
        data = json.load(file)
    cases = {}
    for run in data["benchmarks"]:
        if run.get("run_type") == "iteration" and "ratio" in run:
            cases.setdefault(run["run_name"], []).append(run)
    if not cases:
        sys.exit(f"{path} has no case of step_bench")
    lines = ["| " + " | ".join(HEAD) + " |", "|---|---|" + "---:|" * (len(HEAD) - 2)]
    latest = None
    for name, runs in cases.items():
        row = cells(name, runs)
        # A case stands in its first row only.
        row[0], latest = ("" if row[0] == latest else row[0]), row[0]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    text = table(sys.argv[1])
    if len(sys.argv) == 2:
        print(text)
        return
    with open(sys.argv[2], encoding="utf-8") as file:
        page = file.read()
    page, count = re.subn(r"(<!-- table: step -->\n).*?(<!-- end -->)", rf"\1\n{text}\n\n\2", page, flags=re.S)
    if count != 1:
        sys.exit(f"{sys.argv[2]} has {count} places for the table, not one")
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        file.write(page)


if __name__ == "__main__":
    main()
