"""The overhead as a picture: one panel a model, one line a tool, a dot at the median and a bar over the quartiles."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any
from xml.sax.saxutils import escape

LEFT, RIGHT, LINE, HEAD, GAP = 300, 90, 20, 34, 26
WIDTH = 860
TICKS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0)
BEGIN = 0.95  # of the axis; what lies beyond its end stands at the end, with an arrow
COLOURS = {"nanhunt": "#1f77b4", "floor": "#2ca02c", "peer": "#888888"}
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f }
.head { font-weight: 600; font-size: 13px }
.grid { stroke: #d0d7de; stroke-width: 1 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .grid { stroke: #484f58 } }
"""


def svg(panels: Iterable[tuple[str, list[dict[str, Any]]]]) -> str:
    """An SVG of `(caption, rows of the overhead)`; rows without a ratio are left out. The axis is logarithmic."""
    legend = "Time of a training step, watched over bare. Dot: median; bar: quartiles. "
    legend += "Blue: nanhunt; green: floors and noise; grey: others."
    shown = [(caption, [row for row in rows if row["ratio"]]) for caption, rows in panels]
    shown = [(caption, rows) for caption, rows in shown if rows]
    most = max((row["ratio"]["high"] for _, rows in shown for row in rows), default=1.0)
    end = next((tick for tick in TICKS if tick >= most), TICKS[-1])
    parts = [f'<text x="10" y="18">{legend}</text>']
    top = 36.0
    for caption, rows in shown:
        bottom = top + HEAD + LINE * len(rows)
        parts.append(f'<text class="head" x="10" y="{top + 16:.0f}">{escape(caption)}</text>')
        for tick in (t for t in TICKS if t <= end):
            x = _x(tick, end)
            parts.append(f'<line class="grid" x1="{x:.1f}" y1="{top + HEAD - 8:.0f}" x2="{x:.1f}" y2="{bottom:.0f}"/>')
            parts.append(f'<text x="{x:.1f}" y="{bottom + 14:.0f}" text-anchor="middle">{tick:g}</text>')
        for n, row in enumerate(rows):
            parts += _line(row, top + HEAD + LINE * n + 8, end)
        top = bottom + GAP
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:.0f}" width="{WIDTH}" role="img" '
        f'aria-label="Time of a training step, watched over bare">\n<style>{STYLE}</style>\n{body}\n</svg>\n'
    )


def _x(ratio: float, end: float) -> float:
    inside = min(max(ratio, BEGIN), end)
    return LEFT + (WIDTH - LEFT - RIGHT) * math.log(inside / BEGIN) / math.log(max(end, 1.1) / BEGIN)


def _line(row: dict[str, Any], y: float, end: float) -> list[str]:
    ratio, colour = row["ratio"], COLOURS[row["kind"]]
    weight = ' font-weight="600"' if row["kind"] == "nanhunt" else ""
    beyond = " \N{RIGHTWARDS ARROW}" if ratio["median"] > end else ""
    low, middle, high = (_x(ratio[key], end) for key in ("low", "median", "high"))
    return [
        f'<text x="{LEFT - 12}" y="{y + 4:.0f}" text-anchor="end"{weight}>{escape(row["tool"])}</text>',
        f'<line x1="{low:.1f}" y1="{y:.0f}" x2="{high:.1f}" y2="{y:.0f}" stroke="{colour}" stroke-width="3"/>',
        f'<circle cx="{middle:.1f}" cy="{y:.0f}" r="4.5" fill="{colour}"/>',
        f'<text x="{max(high, middle) + 10:.1f}" y="{y + 4:.0f}">{ratio["median"]:.2f}{beyond}</text>',
    ]
