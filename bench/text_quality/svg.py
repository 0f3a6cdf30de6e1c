"""The few shapes that a chart needs, as SVG text: for light and for dark pages, about 800 pixels wide."""
import math

WIDTH = 800
FONT = 13  # pixels; a page shows the picture at its own size

# Name: colour on a light card, colour on a dark one. The hues of Okabe and Ito, which people who
# confuse red and green can tell apart.
COLOURS = {
    "ink": ("#1f2328", "#e6edf3"),
    "faint": ("#59636e", "#9198a1"),
    "grid": ("#e3e6ea", "#2a3038"),
    "card": ("#ffffff", "#0d1117"),
    "orange": ("#d55e00", "#ff8c3b"),
    "blue": ("#0072b2", "#58a6e0"),
    "green": ("#00805f", "#2fbf95"),
    "violet": ("#a0568a", "#d98fc1"),
    "grey": ("#7a828b", "#8b949e"),
}


def escaped(text):
    entities = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}
    return "".join(entities.get(c, c) if " " <= c <= "~" else "?" for c in text)


class Svg:
    """Coordinates are pixels from the top left; a colour is a name of COLOURS."""

    def __init__(self):
        self._body = []

    def line(self, x1, y1, x2, y2, colour, width=1.0, dash=""):
        self._body.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
                          f'class="s-{colour}" stroke-width="{width:g}"{_dash(dash)}/>')

    def polyline(self, points, colour, width=2.0, dash=""):
        if len(points) > 1:
            places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            self._body.append(f'<polyline points="{places}" fill="none" class="s-{colour}" '
                              f'stroke-width="{width:g}" stroke-linejoin="round"{_dash(dash)}/>')

    def marker(self, x, y, shape, colour, size=4.0, hollow=False):
        """A circle, square, diamond or triangle around (x, y)."""
        classes = f"f-card s-{colour}" if hollow else f"f-{colour} s-card"
        stroke = 1.6 if hollow else 1.0
        if shape == "circle":
            self._body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:g}" class="{classes}" '
                              f'stroke-width="{stroke:g}"/>')
            return
        corners = {
            "square": ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
            "diamond": ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
            "triangle": ((0, -1.3), (1.2, 0.9), (-1.2, 0.9)),
        }[shape]
        places = " ".join(f"{x + size * dx:.1f},{y + size * dy:.1f}" for dx, dy in corners)
        self._body.append(f'<polygon points="{places}" class="{classes}" stroke-width="{stroke:g}"/>')

    def text(self, x, y, words, colour="ink", anchor="start", size=FONT, bold=False, upright=False):
        turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if upright else ""
        weight = ' font-weight="600"' if bold else ""
        self._body.append(f'<text x="{x:.1f}" y="{y:.1f}" class="f-{colour}" text-anchor="{anchor}" '
                          f'font-size="{size:g}"{weight}{turn}>{escaped(words)}</text>')

    def finish(self, height, title):
        """The whole picture on a card of its own, so that no page shines through."""
        styles = []
        for dark in (0, 1):
            rules = "".join(f".f-{name}{{fill:{shades[dark]}}}.s-{name}{{stroke:{shades[dark]}}}"
                            for name, shades in COLOURS.items())
            styles.append(f"@media (prefers-color-scheme:dark){{{rules}}}" if dark else rules)
        family = "system-ui,-apple-system,Segoe UI,Helvetica,Arial,DejaVu Sans,sans-serif"
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
            f'height="{height:.0f}" font-family="{family}" role="img">',
            f"<title>{escaped(title)}</title>",
            f"<style>{''.join(styles)}</style>",
            f'<rect width="{WIDTH}" height="{height:.0f}" rx="6" class="f-card"/>',
        ]
        return "\n".join(head + self._body + ["</svg>", ""])


def _dash(dash):
    return f' stroke-dasharray="{dash}"' if dash else ""


class LogAxis:
    """A logarithmic axis over [low, high] between two pixels."""

    def __init__(self, low, high, start, end):
        self.low, self.high, self.start, self.end = low, high, start, end

    def place(self, value):
        """Values beyond the ends are put on them."""
        value = min(max(value, self.low), self.high)
        return self.start + math.log(value / self.low) / math.log(self.high / self.low) * (self.end - self.start)

    def powers(self):
        """The powers of ten on the axis."""
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        return [10.0**power for power in range(first, last + 1)]


def number(value):
    """0.001, 0.1, 10: as people write it."""
    return f"{value:.10f}".rstrip("0").rstrip(".") if value < 1 else f"{value:g}"
