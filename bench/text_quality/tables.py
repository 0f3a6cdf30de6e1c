#!/usr/bin/env python3
"""Fills the tables of docs/results.md and docs/lab.md from the JSON files of docs/results.

  tables.py                writes each page anew where a table has changed
  tables.py --check        changes nothing; fails and names the tables that do not agree
  tables.py --show FILE... prints all rows of reports (verkv_lab eval --json) as one table each

A page holds a table between two comments, of which the first names it:

  <!-- table: NAME -->
  ...
  <!-- end -->
"""
import math
import pathlib
import re
import sys

import rows as report

PAGES = pathlib.Path(__file__).resolve().parents[2] / "docs"
TEXTS = ("prose", "code", "uuids")


def markdown(heads, left, lines):
    """The first `left` columns are words, the others numbers."""
    marks = ["---"] * left + ["---:"] * (len(heads) - left)
    head = [f"| {' | '.join(heads)} |", f"|{'|'.join(marks)}|"]
    return "\n".join(head + [f"| {' | '.join(line)} |" for line in lines])


def by_text(rows):
    """One row for each method, all its numbers; the text is named once."""
    lines = []
    named = None
    for row in rows:
        lines.append([
            row["text"] if row["text"] != named else "",
            report.method(row),
            report.short(100 * row["moved_fraction"]),
            report.short(row["kl_mean"]),
            f"{report.short(row['kl_low'])} - {report.short(row['kl_high'])}",
            report.short(row["kl_worst"]),
            report.percent(row["agreement"]),
        ])
        named = row["text"]
    heads = ["text", "method", "moved, %", "mean KL", "95 % of the KL", "worst step", "same token, %"]
    return markdown(heads, 2, lines)


def moved_for(row):
    """0.24 % of the cache moved for a mean KL of 0.014: "0.24 for 0.014"."""
    moved = "0" if row["moved_fraction"] is None else report.short(100 * row["moved_fraction"])
    return f"{moved} for {report.short(row['kl_mean'])}"


def moved_for_worst(row):
    return f"{moved_for(row)}, worst {report.short(row['kl_worst'])}"


def grid(rows, columns, column, cell, line=report.method, head="method"):
    """Lines in the order of their first rows; `column` and `line` say where the cell of a row stands."""
    lines = {}
    for row in rows:
        lines.setdefault(line(row), {})[column(row)] = cell(row)
    body = [[name] + [cells.get(at, "-") for at in columns] for name, cells in lines.items()]
    return markdown([head, *columns], 1, body)


def model_and_text(row):
    return f"{report.model(row)}, {row['text']}"


def text_and_sketch(row):
    return f"{row['text']}, {row['sketch']}"


def bits(row):
    return row["sketch"].replace(" rotated", "")


# ---- The tables of results.md: what ships ----


def by_clusters(names, keep):
    rows = [row for row in report.results(*names) if row["keep"] == keep]
    order = {"risk": 0, "paper": 1, "top_k_clusters": 2, "top_k_fetch": 3}

    def key(row):
        parameter = row["risk"] or row["probability"] or row["epsilon"]
        plain = row["estimator"] == "plain"
        return TEXTS.index(row["text"]), order[row["method"]], plain, -parameter

    return by_text(sorted(rows, key=key))


def clusters_smollm2():
    return by_clusters(("smol-clusters.json", "smol-plain.json"), 1 / 16)


def clusters_gemma():
    return by_clusters(("gemma-clusters.json", "gemma-plain.json"), 1 / 16)


def clusters_32x():
    return by_clusters(("smol-clusters.json", "smol-plain-32x.json"), 1 / 32)


def equal_bytes():
    """What the fast tier takes beside the KL, for caches in few bits and ours."""
    files = [f"{model}-{part}.json" for model in ("gemma", "smol") for part in ("few-bits", "clusters")]
    lines = {}
    for row in report.results(*files):
        few = row["method"] == "few_bits"
        if not few and not (row["method"] == "risk" and row["risk"] in (1e-4, 1e-5)):
            continue
        name = report.method(row) if few else f"{report.rate(row)}, {report.method(row)}"
        line = lines.setdefault((report.model(row), name), {"fast": row["fast_bytes"] / row["cache_bytes"]})
        moved = "" if few else f" ({report.short(100 * row['moved_fraction'])})"
        line[row["text"]] = f"{report.short(row['kl_mean'])}{moved}"
    order = sorted(lines.items(), key=lambda item: (item[0][0], item[1]["fast"], item[0][1]))
    body = [[model, name, report.short(100 * line["fast"])] + [line.get(text, "-") for text in TEXTS]
            for (model, name), line in order]
    return markdown(["model", "cache", "fast tier, %", *TEXTS], 2, body)


def at_same_traffic(row, defaults):
    """The row's mean KL, over that of the defaults where they move as much: between their prices, on
    logarithmic scales."""
    points = sorted((math.log(r["moved_fraction"]), math.log(r["kl_mean"])) for r in defaults)
    x = math.log(row["moved_fraction"])
    place = min(max(sum(p[0] < x for p in points), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[place - 1], points[place]
    return row["kl_mean"] / math.exp(y0 + (y1 - y0) * (x - x0) / (x1 - x0))


def drawings():
    """Risk with other draws, beside the defaults at the same traffic."""
    def draw(row):
        if row["exponent"] != 1:
            return f"importance^{row['exponent']:g}"
        if row["inclusion_floor"] > 0:
            return f"r at least {row['inclusion_floor'] / row['keep']:g} keep"
        if row["cap"] != 2:
            return f"cap {row['cap']:g}" if row["cap"] else "no cap"
        return "defaults"

    def line(row):
        return f"risk {report.price(row['risk'])}, {draw(row)}"

    def cell(row):
        if draw(row) == "defaults" or len(defaults[model_and_text(row)]) < 2:
            return moved_for(row)
        return f"{moved_for(row)} ({report.short(at_same_traffic(row, defaults[model_and_text(row)]))})"

    files = ("smol-risks.json", "smol-drawings.json", "gemma-drawings.json")
    rows = sorted(report.results(*files), key=lambda row: (draw(row) != "defaults", -row["risk"]))
    defaults = {}
    for row in rows:
        if draw(row) == "defaults":
            defaults.setdefault(model_and_text(row), []).append(row)
    columns = [f"{model}, {text}" for model in ("SmolLM2", "Gemma 3") for text in TEXTS]
    return grid(rows, columns, model_and_text, cell, line, "rule and draw")


def lengths():
    rows = report.results(*(f"gemma-long-{tokens}.json" for tokens in (4000, 8000, 16000, 32000)))
    body = [[f"{row['context_tokens']:,}", report.rate(row), report.method(row), report.short(row["moved_tokens"]),
             report.short(100 * row["moved_fraction"]), report.short(100 * row["fast_bytes"] / row["cache_bytes"]),
             report.short(row["kl_mean"]), report.short(row["kl_worst"])]
            for row in sorted(rows, key=lambda row: (-row["keep"], row["context_tokens"]))]
    heads = ["tokens", "rate", "rule", "moved, tokens", "moved, %", "fast tier, %", "mean KL", "worst step"]
    return markdown(heads, 3, body)


def tasks_of(*files):
    """Scores relative to dense; of the dense model its own."""
    rows = report.results(*files)

    def column(row):
        return f"{report.model(row)} {row['task']}"

    def line(row):
        if row["method"] == "dense":
            return "dense, score in % (instances)"
        return f"{report.rate(row)}, {report.method(row)}"

    def cell(row):
        if row["method"] == "dense":
            return f"{report.percent(row['score'])} ({row['samples']})"
        if not row["score_dense"]:
            return "-"
        return f"{report.percent(row['score'] / row['score_dense'])} ({report.short(100 * row['moved_fraction'])})"

    columns = list(dict.fromkeys(column(row) for row in rows))
    rows.sort(key=lambda row: -(row["keep"] or 1))
    return grid(rows, columns, column, cell, line)


def clusters_tasks():
    return tasks_of("smol-clusters-tasks.json")


# ---- The tables of lab.md ----


def gemma():
    shipped = [row for row in report.results("gemma-calibrated.json") if row["sketch"] == "2 bits"]
    return by_text(row for text in TEXTS for row in shipped if row["text"] == text)


def smollm2():
    files = [f"smol-calibrated-{part}.json" for part in ("prose", "code-risks", "code", "uuids")]
    shipped = [row for row in report.results(*files) if row["sketch"] == "2 bits"]
    return by_text(sorted(shipped, key=lambda row: (TEXTS.index(row["text"]), -row["risk"])))


def all_methods():
    rows = [row for row in report.results("smol-16x.json", "gemma-16x.json") if not row["method"].startswith("dense")]
    columns = [f"{model}, {text}" for model in ("SmolLM2", "Gemma 3") for text in TEXTS]
    return grid(rows, columns, model_and_text, moved_for)


def rates():
    rows = sorted(report.results("smol-rates.json", "gemma-rates.json"), key=lambda row: -row["keep"])
    columns = ["SmolLM2, prose", "SmolLM2, uuids", "Gemma 3, prose", "Gemma 3, code"]
    return grid(rows, columns, model_and_text, moved_for, lambda row: f"{report.rate(row)}, {report.method(row)}")


def tasks():
    return tasks_of("smol-tasks.json", "smol-tasks-qa1.json", "smol-tasks-mv.json", "gemma-tasks.json")


def scores():
    def cell(row):
        return moved_for(row) if row["moved_fraction"] else report.short(row["kl_mean"])

    columns = ["top-k, no fetch", "PoissonComp, no fetch", "risk 1e-4"]
    return grid(report.results("smol-scores.json"), columns, report.method, cell,
                lambda row: f"`{row['importance']}`", "score")


def sketches_gemma():
    columns = [f"{text}, {sketch}" for text in TEXTS for sketch in ("2 bits", "2 bits rotated", "exact")]
    return grid(report.results("gemma-calibrated.json"), columns, text_and_sketch, moved_for)


def sketches_smollm2():
    rows = report.results(*(f"smol-calibrated-{text}.json" for text in TEXTS))
    # The rotated sketch on code was measured with all the other methods.
    rows += [row for row in report.results("smol-16x.json")
             if row["text"] == "code" and report.method(row) in ("risk 1e-4", "risk 1e-5")]
    columns = [f"{text}, {sketch}" for text in TEXTS for sketch in ("2 bits", "3 bits", "2 bits rotated")]
    return grid(rows, columns, text_and_sketch, moved_for_worst)


def bits_gemma():
    rows = [row for row in report.results("gemma-study.json") if row["method"] != "full_budget"]
    return grid(rows, ["2 bits", "3 bits", "4 bits", "exact"], bits, moved_for,
                lambda row: f"{row['text']}, {report.method(row)}")


def bits_uuids():
    return grid(report.results("smol-uuids.json"), ["2 bits", "3 bits", "exact"], bits, moved_for_worst,
                lambda row: f"{report.method(row)}, {row['importance']}")


TABLES = {
    "clusters-gemma": clusters_gemma,
    "clusters-smollm2": clusters_smollm2,
    "clusters-32x": clusters_32x,
    "equal-bytes": equal_bytes,
    "clusters-tasks": clusters_tasks,
    "drawings": drawings,
    "lengths": lengths,
    "gemma": gemma,
    "smollm2": smollm2,
    "16x": all_methods,
    "rates": rates,
    "tasks": tasks,
    "scores": scores,
    "sketches-gemma": sketches_gemma,
    "sketches-smollm2": sketches_smollm2,
    "bits-gemma": bits_gemma,
    "bits-uuids": bits_uuids,
}


def filled(text, page):
    """The page with each table as the JSON has it, and the names of those that changed."""
    changed = []

    def fill(match):
        name = match.group(1)
        if name not in TABLES:
            raise report.BadReport(f"{page}: there is no table {name}; there are {', '.join(TABLES)}")
        made = f"<!-- table: {name} -->\n\n{TABLES[name]()}\n\n<!-- end -->"
        if made != match.group(0):
            changed.append(name)
        return made

    return re.sub(r"<!-- table: (\S+) -->.*?<!-- end -->", fill, text, flags=re.S), changed


def show(path):
    """Every row, the columns that have a number in any."""
    rows = report.read(path)
    fields = [field for field in (rows[0] if rows else []) if any(row[field] not in (None, "") for row in rows)]
    cells = [[value if isinstance(value, str) else report.short(value, 3) for value in (row[f] for f in fields)]
             for row in rows]
    return markdown(fields, 1, cells) if rows else "nothing was measured"


def main(arguments):
    if arguments[:1] == ["--show"] and len(arguments) > 1:
        for path in arguments[1:]:
            print(f"{path}\n\n{show(path)}\n")
        return 0
    if arguments not in ([], ["--check"]):
        sys.exit(__doc__)
    status = 0
    for name in ("results.md", "lab.md"):
        page = PAGES / name
        text = page.read_text(encoding="ascii")
        made, changed = filled(text, name)
        if changed and arguments:
            print(f"docs/{name}: not as the JSON has it: {', '.join(changed)}")
            status = 1
        elif changed:
            page.write_text(made, encoding="ascii")
            print(f"docs/{name}: made {', '.join(changed)}")
    return status


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except report.BadReport as error:
        sys.exit(str(error))
