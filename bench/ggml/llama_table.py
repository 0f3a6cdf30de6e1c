#!/usr/bin/env python3
"""Measures the plug-in for llama.cpp beside llama.cpp alone, with llama.cpp's own programs.

  llama_table.py speed --model FILE --out FILE.json [--depths 4096,16384,32768] [--rows f16,16x]
  llama_table.py text  --model FILE --text FILE --out FILE.json [--context 4096] [--chunks 2]

`./cmake/run ggml` builds what it needs. speed: tokens a second of llama-bench after so many tokens; each row is
a process of its own, because llama-bench restores what a depth left behind, and a restored cache has no queries of
its prompt. `tokens_per_second` is llama-bench's and has the compression of the prompt in it, `steady` has not.
text: llama-perplexity's KL divergence from the f16 cache without the plug-in, eight tokens at a time, so that every
row is a decode row. Rows that cannot be measured stand in the file with what the program said.
"""
import argparse
import json
import os
import re
import subprocess
import sys
import tempfile

root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
ggml = os.path.join(root, "build", "ggml")

STOCK = [
    ("f16", ["-ctk", "f16", "-ctv", "f16"], None),
    ("q8_0", ["-ctk", "q8_0", "-ctv", "q8_0"], None),
    ("q4_0", ["-ctk", "q4_0", "-ctv", "q4_0"], None),
]
OURS = [
    ("exact", [], {"VERKV_GGML_FROM": "1000000000"}),
    ("16x", [], {"VERKV_GGML_KEEP": "0.0625"}),
    ("16x risk 1e-4", [], {"VERKV_GGML_KEEP": "0.0625", "VERKV_GGML_EPSILON": "off"}),
    ("8x", [], {"VERKV_GGML_KEEP": "0.125"}),
    ("8x risk 1e-4", [], {"VERKV_GGML_KEEP": "0.125", "VERKV_GGML_EPSILON": "off"}),
]

ALL = {row[0]: row for row in STOCK + OURS}


def run(program, words, settings):
    """What a program printed, and the plug-in's report."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("VERKV_GGML", "GGML_BACKEND_PATH"))}
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    report = tempfile.NamedTemporaryFile(mode="r", suffix=".jsonl")
    if settings is not None:
        environment["GGML_BACKEND_PATH"] = os.path.join(ggml, "bin", "libggml-verkv.so")
        environment["VERKV_GGML_REPORT"] = report.name
        environment.update(settings)
    done = subprocess.run([os.path.join(ggml, "llama.cpp", "bin", program), *words], env=environment,
                          capture_output=True, text=True, errors="replace")
    lines = [json.loads(line) for line in report.read().splitlines()]
    # Of several contexts (llama-bench warms up with one) the one that did the most.
    best = max(lines, key=lambda line: line["compressed_rows"] + line["dense_rows"], default=None)
    return done, best


def speed(options):
    rows = []
    for depth in options.depths:
        for name, words, settings in options.rows:
            command = ["-m", options.model, "-p", "0", "-n", str(options.tokens), "-d", str(depth), "-fa", "on",
                       "-t", str(options.threads), "-r", "1", "-o", "json", *words]
            done, report = run("llama-bench", command, settings)
            row = {"name": name, "plugin": settings is not None, "depth": depth, "command": " ".join(command)}
            try:
                result = json.loads(done.stdout)[0]
                seconds = result["avg_ns"] * 1e-9
                row["tokens_per_second"] = result["avg_ts"]
                row["report"] = report
                compressing = report["compress_seconds"] if report else 0
                row["steady"] = options.tokens / (seconds - compressing)
            except (ValueError, LookupError):
                row["error"] = done.stderr[-2000:]
            rows.append(row)
            print(row["name"], depth, row.get("tokens_per_second"), row.get("steady"), file=sys.stderr, flush=True)
    return rows


def numbers(text):
    """The numbers of llama-perplexity's table that are compared."""
    found = {}
    for name, pattern in {
        "mean_kl": r"Mean\s+KLD:\s*([-\d.e]+)",
        "median_kl": r"Median\s+KLD:\s*([-\d.e]+)",
        "kl_99_9": r"99\.9%\s+KLD:\s*([-\d.e]+)",
        "largest_kl": r"Maximum KLD:\s*([-\d.e]+)",
        "same_top_percent": r"Same top p:\s*([\d.]+)",
        "perplexity": r"Mean PPL\(Q\)\s*:\s*([\d.]+)",
    }.items():
        match = re.search(pattern, text)
        if match:
            found[name] = float(match.group(1))
    return found


def text(options):
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        base = os.path.join(folder, "base.kld")
        common = ["-m", options.model, "-f", options.text, "-c", str(options.context), "-b", "8", "-ub", "8",
                  "--chunks", str(options.chunks), "-fa", "on", "-t", str(options.threads)]
        done, _ = run("llama-perplexity", [*common, "--kl-divergence-base", base], None)
        if done.returncode != 0:
            sys.exit(done.stderr[-2000:])
        for name, words, settings in options.rows:
            command = [*common, "--kl-divergence-base", base, "--kl-divergence", *words]
            done, report = run("llama-perplexity", command, settings)
            row = {"name": name, "plugin": settings is not None, "report": report,
                   **numbers(done.stdout + done.stderr)}
            if "mean_kl" not in row:
                row["error"] = done.stderr[-2000:]
            rows.append(row)
            print(name, row.get("mean_kl"), row.get("same_top_percent"), file=sys.stderr, flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "text"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--depths", type=lambda words: [int(word) for word in words.split(",")],
                        default=[4096, 16384, 32768])
    parser.add_argument("--rows", default=",".join(ALL), help="only these, in this order (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--text")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--chunks", type=int, default=2)
    options = parser.parse_args()
    if options.what == "text" and not options.text:
        parser.error("text needs --text FILE")
    unknown = [name for name in options.rows.split(",") if name not in ALL]
    if unknown:
        parser.error(f"--rows: there is no {unknown[0]}; there are {', '.join(ALL)}")
    options.rows = [ALL[name] for name in options.rows.split(",")]
    rows = speed(options) if options.what == "speed" else text(options)
    with open(options.out, "w", encoding="utf-8") as file:
        json.dump({"what": options.what, "model": os.path.basename(options.model), "threads": options.threads,
                   "context": options.context, "rows": rows}, file, indent=1)
        file.write("\n")


main()
