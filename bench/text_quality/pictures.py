#!/usr/bin/env python3
"""Draws the pictures of docs/results from the JSON files beside them.

  pictures.py                    draws all of them
  pictures.py --check            changes nothing; fails and names the pictures that do not agree
  pictures.py --pooled FILE OUT  copies what verkv_replay --promise wrote without the rows of each recording,
                                 of which no picture is made
"""
import json
import pathlib
import sys

import rows as report
from svg import FONT, WIDTH, LogAxis, Svg, number

TEXTS = ("prose", "code", "uuids")
LEFT = 78  # of the first panel; the axis and its words are before it
RIGHT = 16  # beside the last panel
GAP = 18  # between panels


def panel_edges(count):
    """The left and right edge of each panel in a row of so many."""
    width = (WIDTH - LEFT - RIGHT - GAP * (count - 1)) / count
    return [(LEFT + i * (width + GAP), LEFT + i * (width + GAP) + width) for i in range(count)]


def legend(svg, y, entries):
    """entries: (words, shape or None for a line alone, colour, dash, hollow), from left to right."""
    x = LEFT
    for words, shape, colour, dash, hollow in entries:
        svg.line(x, y - 4, x + 26, y - 4, colour, 2.2 if not dash else 1.6, dash)
        if shape:
            svg.marker(x + 13, y - 4, shape, colour, 4.4, hollow)
        svg.text(x + 33, y, words)
        x += 33 + 7.0 * len(words) + 22


def log_grid(svg, x, y, labelled):
    """Lines at the powers of ten; the words of the vertical axis only at the first panel."""
    for value in y.powers():
        at = y.place(value)
        svg.line(x.start, at, x.end, at, "grid")
        if labelled:
            svg.text(x.start - 8, at + 4, number(value), "faint", "end", FONT - 1)
    for value in x.powers():
        at = x.place(value)
        svg.line(at, y.start, at, y.end, "grid")
        svg.text(at, y.start + 17, number(value), "faint", "middle", FONT - 1)


def curve(svg, x, y, rows, shape, colour, width, dash="", whiskers=True):
    """Mean KL against the moved share, with the 95 % interval of the KL."""
    points = []
    for row in sorted(rows, key=lambda row: row["moved_fraction"]):
        at = x.place(100 * row["moved_fraction"])
        if whiskers and row["kl_low"] is not None:
            svg.line(at, y.place(row["kl_low"]), at, y.place(row["kl_high"]), colour, 1)
        points.append((at, y.place(row["kl_mean"])))
    svg.polyline(points, colour, width, dash)
    for place in points:
        svg.marker(*place, shape, colour, 4.6 if width > 2 else 4)
    return points


# ---- What ships: error against traffic ----


def tradeoff():
    """Gemma: KL against what moves, for clusters, the plain estimate and top-k."""
    measured = report.results("gemma-clusters.json", "gemma-plain.json")
    # Without fetching there is no sketch in use, so the rows of an older one are the same.
    unfetched = [row for row in report.results("gemma-16x.json") if row["method"] == "top_k"]
    curves = (("top_k_fetch", "plain", "square", "grey", 1.6), ("top_k_clusters", "clusters", "square", "green", 1.6),
              ("risk", "plain", "circle", "blue", 1.6), ("risk", "clusters", "circle", "orange", 2.8))
    svg = Svg()
    legend(svg, 26, [("VERKV", "circle", "orange", "", False), ("plain estimate", "circle", "blue", "", False),
                     ("top-k", "square", "grey", "", False), ("top-k and clusters", "square", "green", "", False),
                     ("nothing fetched", None, "grey", "5 4", False)])
    top, bottom = 66, 300
    for i, (text, (left, right)) in enumerate(zip(TEXTS, panel_edges(3))):
        x, y = LogAxis(0.05, 5, left, right), LogAxis(1e-4, 1.5, bottom, top)
        svg.text(left, top - 10, text, bold=True)
        log_grid(svg, x, y, i == 0)
        lost = [row for row in unfetched if row["text"] == text][0]
        svg.line(left, y.place(lost["kl_mean"]), right, y.place(lost["kl_mean"]), "grey", 1.6, "5 4")
        for method, estimator, shape, colour, width in curves:
            rows = [row for row in measured
                    if (row["text"], row["method"], row["estimator"]) == (text, method, estimator)]
            points = curve(svg, x, y, rows, shape, colour, width)
            if (method, estimator) == ("risk", "clusters") and i == 0:
                svg.text(points[1][0] - 8, points[1][1] + 17, "default", colour, "end", FONT - 1, bold=True)
    svg.text(16, (top + bottom) / 2, "mean KL to the dense model, nats", anchor="middle", upright=True)
    svg.text((LEFT + WIDTH - RIGHT) / 2, bottom + 40, "moved to the fast tier in a step, % of the cache", anchor="middle")
    svg.text(WIDTH - RIGHT, bottom + 40, "lower left is better", "faint", "end", FONT - 1)
    return svg.finish(bottom + 54, "Mean KL to the dense model against the share of the cache that a step moves")


# ---- The notebook ----


def sketches():
    """Gemma: the risk rule with three sketches."""
    curves = (("2 bits rotated", "square", "grey", "", 1.6), ("exact", "diamond", "blue", "", 1.6),
              ("2 bits", "circle", "orange", "", 2.8))
    rows = [row for row in report.results("gemma-calibrated.json") if row["method"] == "risk"]
    svg = Svg()
    legend(svg, 26, [("2 bits, calibrated", "circle", "orange", "", False), ("2 bits, rotated", "square", "grey", "", False),
                     ("exact keys", "diamond", "blue", "", False)])
    top, bottom = 66, 270
    for i, (text, (left, right)) in enumerate(zip(TEXTS, panel_edges(3))):
        x, y = LogAxis(0.05, 5, left, right), LogAxis(1e-4, 0.3, bottom, top)
        svg.text(left, top - 10, text, bold=True)
        log_grid(svg, x, y, i == 0)
        for sketch, shape, colour, dash, width in curves:
            chosen = [row for row in rows if row["text"] == text and row["sketch"] == sketch]
            curve(svg, x, y, chosen, shape, colour, width, dash)
    svg.text(16, (top + bottom) / 2, "mean KL, nats", anchor="middle", upright=True)
    svg.text((LEFT + WIDTH - RIGHT) / 2, bottom + 40, "moved in a step, % of the cache", anchor="middle")
    return svg.finish(bottom + 54, "The risk rule with three sketches: mean KL against what a step moves")


def solved(rows):
    """Mean over the tasks that the dense model solves at least half of: score relative to dense."""
    shares = [row["score"] / row["score_dense"] for row in rows if row["score_dense"] >= 0.5]
    return sum(shares) / len(shares) if shares else None


def tasks():
    """Score relative to dense at three rates, for what fetches and for what does not."""
    rows = report.results("smol-tasks.json", "smol-tasks-mv.json", "gemma-tasks.json")
    curves = (("top-k, no fetch", "square", "grey", "4 3"), ("PoissonComp, no fetch", "triangle", "violet", "4 3"),
              ("top-k, fetch p > 1e-3", "square", "blue", ""), ("paper, eps 0.05", "diamond", "green", ""),
              ("risk 1e-4", "circle", "orange", ""))
    keeps = (1 / 8, 1 / 16, 1 / 32)
    svg = Svg()
    legend(svg, 26, [(name, shape, colour, dash, False) for name, shape, colour, dash in curves[2:]])
    legend(svg, 48, [(name, shape, colour, dash, False) for name, shape, colour, dash in curves[:2]])
    top, bottom = 92, 260
    for i, (name, (left, right)) in enumerate(zip(("SmolLM2", "Gemma 3"), panel_edges(2))):
        def height(share):
            return bottom - share / 1.15 * (bottom - top)

        svg.text(left, top - 10, name, bold=True)
        for share in (0, 0.25, 0.5, 0.75, 1):
            svg.line(left, height(share), right, height(share), "faint" if share == 1 else "grid")
            if i == 0:
                svg.text(left - 8, height(share) + 4, f"{100 * share:g}", "faint", "end", FONT - 1)
        places = [left + (right - left) * (0.17 + 0.33 * k) for k in range(3)]
        for at, keep in zip(places, keeps):
            svg.text(at, bottom + 17, f"{1 / keep:.0f}x", "faint", "middle", FONT - 1)
        for shift, (label, shape, colour, dash) in enumerate(curves):
            points = []
            for at, keep in zip(places, keeps):
                mean = solved([row for row in rows if report.model(row) == name and row["keep"] == keep and
                               report.method(row) == label])
                if mean is not None:
                    points.append((at + 9 * (shift - 2), height(mean)))
            svg.polyline(points, colour, 1.8, dash)
            for place in points:
                svg.marker(*place, shape, colour)
    svg.text(16, (top + bottom) / 2, "score, % of dense", anchor="middle", upright=True)
    svg.text((LEFT + WIDTH - RIGHT) / 2, bottom + 40, "compression of the fast tier", anchor="middle")
    return svg.finish(bottom + 54, "Score of tasks relative to the dense model at three rates of compression")


# ---- The promise ----

DELTAS = ((0.2, "blue"), (0.1, "orange"), (0.05, "violet"))
FLOOR = 26  # pixels of the strip for rates of zero


def promise(name):
    """Failures of D beside the delta that was promised, from the JSON of verkv_replay --promise."""
    pooled = json.loads((report.RESULTS / name).read_text(encoding="ascii"))["pooled"]
    cells = [row for row in pooled if row["promise"] == "epsilon" and row["sketch"] == "2"]
    epsilons = sorted({row["tolerance"] for row in cells})
    keeps = sorted({row["keep"] for row in cells}, reverse=True)
    svg = Svg()
    legend(svg, 26, [(f"delta {delta:g}", "circle", colour, "", False) for delta, colour in DELTAS] +
           [("what is promised", None, "faint", "5 4", False)])
    svg.marker(LEFT + 13, 44, "circle", "faint", 4.4)
    svg.text(LEFT + 33, 48, "fixed queries, drawn again and again")
    svg.marker(LEFT + 315, 44, "circle", "faint", 4.4, hollow=True)
    svg.text(LEFT + 335, 48, "one draw, all steps")
    top, bottom = 88, 290
    for i, (keep, (left, right)) in enumerate(zip(keeps, panel_edges(3))):
        y = LogAxis(1e-4, 1, bottom - FLOOR, top)

        def height(rate):
            return y.place(rate) if rate else bottom - FLOOR / 3

        svg.text(left, top - 10, f"{1 / keep:.0f}x", bold=True)
        for value in y.powers():
            svg.line(left, height(value), right, height(value), "grid")
            if i == 0:
                svg.text(left - 8, height(value) + 4, number(100 * value), "faint", "end", FONT - 1)
        svg.line(left, height(0), right, height(0), "grid")
        if i == 0:
            svg.text(left - 8, height(0) + 4, "0", "faint", "end", FONT - 1)
        for delta, colour in DELTAS:
            svg.line(left, height(delta), right, height(delta), colour, 1.6, "5 4")
        step = (right - left) / len(epsilons)
        for k, epsilon in enumerate(epsilons):
            svg.text(left + (k + 0.5) * step, bottom + 17, f"{epsilon:g}", "faint", "middle", FONT - 1)
        for shift, (delta, colour) in enumerate(DELTAS):
            for row in cells:
                if row["keep"] != keep or row["delta"] != delta:
                    continue
                at = left + (epsilons.index(row["tolerance"]) + 0.5) * step + 13 * (shift - 1)
                for field, offset, hollow in (("failure_redraws", -2.8, False), ("failure_steps", 2.8, True)):
                    rate, low, high = (row[field + end] for end in ("", "_low", "_high"))
                    if rate is None:
                        continue
                    svg.line(at + offset, height(low), at + offset, height(high), colour, 1 if rate else 0.5)
                    svg.marker(at + offset, height(rate), "circle", colour, 3.2, hollow)
    svg.text(16, (top + bottom) / 2, "failures, % of decisions", anchor="middle", upright=True)
    svg.text((LEFT + WIDTH - RIGHT) / 2, bottom + 40, "eps: the error of D that is allowed", anchor="middle")
    return svg.finish(bottom + 54, "Failures of the softmax denominator beside the delta that was promised")


PICTURES = {
    "tradeoff.svg": tradeoff,
    "gemma-calibrated-kl.svg": sketches,
    "tasks-rate.svg": tasks,
    "promise-shipped.svg": lambda: promise("promise-shipped.json"),
}


def keep_pooled(path, out):
    whole = json.loads(pathlib.Path(path).read_text(encoding="ascii"))
    for file in whole["files"]:
        del file["rows"]
    pathlib.Path(out).write_text(json.dumps(whole, indent=1) + "\n", encoding="ascii")


def main(arguments):
    if arguments[:1] == ["--pooled"] and len(arguments) == 3:
        keep_pooled(*arguments[1:])
        return 0
    if arguments not in ([], ["--check"]):
        sys.exit(__doc__)
    status = 0
    for name, draw in PICTURES.items():
        path = report.RESULTS / name
        made = draw()
        if path.exists() and path.read_text(encoding="ascii") == made:
            continue
        if arguments:
            print(f"docs/results/{name}: not as the JSON has it")
            status = 1
        else:
            path.write_text(made, encoding="ascii")
            print(f"docs/results/{name}: drawn")
    return status


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except report.BadReport as error:
        sys.exit(str(error))
