"""Rows of an evaluation (verkv_lab eval --json), and how their numbers are written.

A row is a dict with the fields of eval_row.hpp; a field that does not apply is None.
"""
import json
import math
import pathlib

RESULTS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "results"

_WORDS = ("model", "text", "task", "method", "importance", "sketch")
_COUNTS = ("context_tokens", "samples", "prompts", "draws")
_NUMBERS = (
    "keep", "epsilon", "delta", "risk", "probability", "resident_fraction", "fetching_share", "moved_fraction",
    "moved_tokens", "moved_bytes", "read_fraction", "fast_bytes", "cache_bytes", "kl_mean", "kl_low", "kl_high",
    "kl_median", "kl_p95", "kl_worst", "agreement", "agreement_low", "agreement_high", "perplexity",
    "perplexity_dense", "score", "score_low", "score_high", "score_dense", "score_dense_low", "score_dense_high",
    "certificate_median", "certificate_p95", "certified_share", "seconds")


class BadReport(Exception):
    """A file that is no report of verkv_lab: the text names file, row and field."""


def _check(place, row):
    if not isinstance(row, dict):
        raise BadReport(f"{place} is not an object")
    for field in _WORDS + _COUNTS + _NUMBERS:
        if field not in row:
            raise BadReport(f"{place}.{field} is missing")
        value = row[field]
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if field in _WORDS and not isinstance(value, str):
            raise BadReport(f"{place}.{field} is not a string")
        if field in _COUNTS and not (isinstance(value, int) and number and 0 <= value < 2**63):
            raise BadReport(f"{place}.{field} is not a count")
        if field in _NUMBERS and value is not None and not (number and math.isfinite(value)):
            raise BadReport(f"{place}.{field} is neither a number nor null")
    if bool(row["text"]) == bool(row["task"]):
        raise BadReport(f"{place}.text and task are both {'set' if row['text'] else 'empty'}")
    if not row["method"]:
        raise BadReport(f"{place}.method is empty")


def read(path):
    """The rows of one report, checked."""
    try:
        report = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadReport(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise BadReport(f"{path}: is not JSON: {error}") from None
    rows = report.get("rows") if isinstance(report, dict) else None
    if rows is None:
        raise BadReport(f"{path}: rows is missing")
    if not isinstance(rows, list):
        raise BadReport(f"{path}: rows is not an array")
    for number, row in enumerate(rows):
        _check(f"{path}: rows[{number}]", row)
    return rows


def results(*names):
    """The rows of files in docs/results, one after the other."""
    return [row for name in names for row in read(RESULTS / name)]


def short(value, digits=2):
    """`value` to so many significant digits, "-" for None: 0.031, 1.0e-6, 22."""
    if value is None:
        return "-"
    text = f"{value:.{digits}g}"
    if "e" not in text:
        return text
    if abs(value) >= 1:
        return f"{float(text):.0f}"
    if abs(float(text)) >= 1e-4:
        return f"{float(text):.6f}".rstrip("0")
    factor, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{factor}e{int(exponent)}"


def percent(share):
    """A share as whole percent."""
    return "-" if share is None else f"{100 * share:.0f}"


def price(value):
    """A risk or probability: 1e-4, 3e-4."""
    factor, exponent = f"{value:.0e}".split("e")
    return f"{factor}e{int(exponent)}"


def rate(row):
    """16x for 1/16 of the tokens resident."""
    return f"{1 / row['keep']:.0f}x"


def model(row):
    """The short name of the model, as the pages call it."""
    for part, name in (("gemma-3", "Gemma 3"), ("SmolLM2", "SmolLM2")):
        if part in row["model"]:
            return name
    return row["model"]


def method(row):
    """What fetches in this row, with its parameter, and what estimates if that is not the default."""
    if row.get("estimator") == "plain" and not row["method"].startswith("top_k"):
        return _method(row) + ", plain"
    return _method(row)


def _method(row):
    name = row["method"]
    if name == "risk":
        return "risk " + price(row["risk"])
    if name == "risk_and_epsilon":
        return f"risk {price(row['risk'])} and eps {row['epsilon']:g}"
    if name == "paper":
        return f"paper, eps {row['epsilon']:g}"
    if name == "few_bits":
        return row["sketch"]
    if name == "top_k_clusters":
        return "top-k and clusters, p > " + price(row["probability"])
    if name == "top_k_fetch":
        return "top-k, fetch p > " + price(row["probability"])
    names = {
        "dense": "dense",
        "dense_offload": "dense, offloaded",
        "full_budget": "budget for everything",
        "poisson": "PoissonComp, no fetch",
        "top_k": "top-k, no fetch",
        "top_k_gate": "top-k of the gate, no fetch",
    }
    return names.get(name, name)
