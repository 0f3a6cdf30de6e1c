#!/usr/bin/env python3
"""The tables and pictures of docs/ agree with their JSON, and the scripts that make them refuse bad input.

pages_test.py SOURCE    SOURCE: the top of the tree
"""
import json
import pathlib
import re
import sys
import tempfile
import unittest
import xml.etree.ElementTree

SOURCE = pathlib.Path(sys.argv.pop())
sys.dont_write_bytecode = True
sys.path.insert(0, str(SOURCE / "bench" / "text_quality"))

import pictures  # noqa: E402
import rows as report  # noqa: E402
import tables  # noqa: E402
from svg import COLOURS, LogAxis, Svg, number  # noqa: E402

DOCS = SOURCE / "docs"
PAGES = ("results.md", "lab.md")


def a_row(**fields):
    row = dict.fromkeys(report._NUMBERS)
    row.update(dict.fromkeys(report._COUNTS, 1))
    row.update(dict.fromkeys(report._WORDS, ""))
    row.update(model="tiny", text="prose", method="risk", risk=1e-4, keep=1 / 16, moved_fraction=0.01, kl_mean=0.02)
    row.update(fields)
    return row


class Pages(unittest.TestCase):
    def test_tables_are_as_the_json_has_them(self):
        for name in PAGES:
            text = (DOCS / name).read_text(encoding="ascii")
            self.assertEqual(tables.filled(text, name)[1], [], f"{name}: run ./cmake/run pictures")

    def test_a_changed_number_is_noticed_and_mended(self):
        for name in PAGES:
            text = (DOCS / name).read_text(encoding="ascii")
            at = text.index("|---", text.index("<!-- table:"))
            digit = re.compile(r"\d").search(text, at)
            spoilt = text[:digit.start()] + str((int(digit.group()) + 1) % 10) + text[digit.end():]
            made, changed = tables.filled(spoilt, name)
            self.assertEqual(len(changed), 1)
            self.assertEqual(made, text)

    def test_every_table_has_a_place(self):
        places = [name for page in PAGES
                  for name in re.findall(r"<!-- table: (\S+) -->", (DOCS / page).read_text(encoding="ascii"))]
        self.assertEqual(sorted(places), sorted(tables.TABLES))

    def test_a_table_that_nobody_makes_is_refused(self):
        with self.assertRaisesRegex(report.BadReport, "page.md: there is no table nowhere"):
            tables.filled("<!-- table: nowhere -->\n<!-- end -->", "page.md")

    def test_pictures_are_as_the_json_has_them(self):
        for name, draw in pictures.PICTURES.items():
            drawn = (report.RESULTS / name).read_text(encoding="ascii")
            self.assertTrue(drawn == draw(), f"{name}: run ./cmake/run pictures")

    def test_every_picture_and_file_of_results_is_named_by_a_page(self):
        text = "".join(page.read_text(encoding="ascii") for page in [SOURCE / "README.md", *DOCS.rglob("*.md")])
        code = "".join((SOURCE / "bench" / "text_quality" / f).read_text() for f in ("pictures.py", "tables.py"))
        for path in report.RESULTS.iterdir():
            place = text if path.suffix == ".svg" else text + code
            self.assertTrue(path.name in place, f"{path.name} is named by no page and no script")


class Pictures(unittest.TestCase):
    def test_pictures_are_well_formed_and_whole(self):
        for name, draw in pictures.PICTURES.items():
            drawn = draw()
            root = xml.etree.ElementTree.fromstring(drawn)
            self.assertTrue(drawn.isascii())
            self.assertNotRegex(drawn, r"\b(nan|inf)\b", name)
            width, height = float(root.get("width")), float(root.get("height"))
            for element in root.iter():
                for field, limit in (("x", width), ("cx", width), ("y", height), ("cy", height)):
                    if element.get(field) is not None:
                        self.assertTrue(0 <= float(element.get(field)) <= limit, f"{name}: {element.attrib}")

    def test_colours_are_readable_on_their_card(self):
        def light(colour):
            parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
            linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055)**2.4 for p in parts]
            return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

        for name, shades in COLOURS.items():
            for shade, card in zip(shades, COLOURS["card"]):
                low, high = sorted((light(shade), light(card)))
                contrast = (high + 0.05) / (low + 0.05)
                # 3 is what WCAG asks of graphics, 4.5 of text.
                least = {"card": 1, "grid": 1.1, "ink": 4.5, "faint": 4.5}.get(name, 3)
                self.assertGreaterEqual(contrast, least, f"{name} {shade}")

    def test_words_are_escaped(self):
        svg = Svg()
        svg.text(1, 2, 'a<b>&"c"\x01')
        root = xml.etree.ElementTree.fromstring(svg.finish(10, "<t>"))
        self.assertEqual(root[-1].text, 'a<b>&"c"?')

    def test_a_logarithmic_axis(self):
        axis = LogAxis(0.01, 100, 0, 400)
        self.assertAlmostEqual(axis.place(1), 200)
        self.assertEqual(axis.place(1e-9), 0)
        self.assertAlmostEqual(axis.place(1e9), 400)
        self.assertEqual([number(value) for value in axis.powers()], ["0.01", "0.1", "1", "10", "100"])


class Reports(unittest.TestCase):
    def message(self, text):
        with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            try:
                report.read(file.name)
            except report.BadReport as error:
                self.assertIn(file.name, str(error))
                return str(error)
        return ""

    def test_a_damaged_report_is_refused_by_file_and_field(self):
        good = json.dumps({"rows": [a_row(), a_row()]})

        def spoilt(field, value):
            report_ = json.loads(good)
            report_["rows"][1][field] = value
            return self.message(json.dumps(report_))

        self.assertEqual(self.message(good), "")
        self.assertIn("is not JSON", self.message(good[:len(good) // 2]))
        self.assertIn("is not JSON", self.message(""))
        self.assertIn("rows is missing", self.message("[]"))
        self.assertIn("rows is not an array", self.message('{"rows": {}}'))
        self.assertIn("rows[0] is not an object", self.message('{"rows": [7]}'))
        self.assertIn("rows[1].kl_mean is neither a number nor null", spoilt("kl_mean", "0.1"))
        self.assertIn("rows[1].kl_mean is neither", spoilt("kl_mean", float("nan")))
        self.assertIn("rows[1].kl_mean is neither", spoilt("kl_mean", True))
        self.assertIn("rows[1].model is not a string", spoilt("model", 3))
        self.assertIn("rows[1].samples is not a count", spoilt("samples", 1.5))
        self.assertIn("rows[1].samples is not a count", spoilt("samples", -1))
        self.assertIn("rows[1].draws is not a count", spoilt("draws", 2**64))
        self.assertIn("rows[1].draws is not a count", spoilt("draws", None))
        self.assertIn("rows[1].method is empty", spoilt("method", ""))
        self.assertIn("rows[1].text and task are both set", spoilt("task", "needle"))
        self.assertIn("rows[1].text and task are both empty", spoilt("text", ""))
        self.assertEqual(spoilt("of a later version", 1), "")
        missing = json.loads(good)
        del missing["rows"][0]["kl_p95"]
        self.assertIn("rows[0].kl_p95 is missing", self.message(json.dumps(missing)))
        with self.assertRaisesRegex(report.BadReport, "cannot be read"):
            report.read("/nonexistent/report.json")
        with self.assertRaisesRegex(report.BadReport, "cannot be read"):
            report.read("/")

    def test_numbers_in_two_digits(self):
        for value, text in ((None, "-"), (0, "0"), (0.0312, "0.031"), (1.04e-6, "1.0e-6"), (4.8e-4, "0.00048"),
                            (21.6, "22"), (123.4, "120"), (0.5, "0.5"), (9.6e-5, "9.6e-5")):
            self.assertEqual(report.short(value), text)
        self.assertEqual(report.price(1e-4), "1e-4")
        self.assertEqual(report.rate(a_row()), "16x")

    def test_methods_are_named_with_their_parameter(self):
        self.assertEqual(report.method(a_row()), "risk 1e-4")
        self.assertEqual(report.method(a_row(method="paper", epsilon=0.05)), "paper, eps 0.05")
        self.assertEqual(report.method(a_row(method="top_k_fetch", probability=1e-3)), "top-k, fetch p > 1e-3")
        self.assertEqual(report.method(a_row(method="risk_and_epsilon", epsilon=0.3)), "risk 1e-4 and eps 0.3")
        self.assertEqual(report.method(a_row(method="new one")), "new one")

    def test_a_grid_has_as_many_cells_in_each_line(self):
        made = tables.grid([a_row(), a_row(text="code", risk=1e-3)], ["prose", "code"], lambda row: row["text"],
                           tables.moved_for)
        self.assertEqual({line.count("|") for line in made.split("\n")}, {4})
        self.assertIn("| risk 1e-4 | 1 for 0.02 | - |", made)


if __name__ == "__main__":
    unittest.main()
