"""A matrix over clients as a standalone SVG: who learns from whom, at the end and over time."""

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from idiolect.results.trace import similar_order

_SMALL = 6  # earlier rounds beside the last one; more would not be looked at
_INK = "#1f4e8c"


def as_svg(title: str, names: Sequence[str], rounds: Sequence[int], course: NDArray[Any]) -> str:
    """Draw the last matrix [receiver, sender] large and earlier ones [record, ...] small above.

    Clients stand in the order of the last round's similarity, in every picture alike; darker is
    more, on one scale for all, which starts at zero.
    """
    order = similar_order(course[-1])
    named = [names[place] for place in order]
    drawn = course[:, order][:, :, order]
    top = max(float(drawn[np.isfinite(drawn)].max(initial=0.0)), 1e-12)
    side = max(6, min(18, 720 // max(len(named), 1)))
    left, head = 14 + 6 * max((len(name) for name in named), default=0), 40
    wide = len(named) * side
    small = _chosen(len(rounds))
    edge = max(60.0, (left + wide) / _SMALL - 6)  # a small picture is as wide as its caption
    tiny = edge / max(len(named), 1)
    strip = 0 if not small else edge + 34
    size = (
        max(left + wide + 70, 8 + len(small) * (edge + 6)),
        head + strip + wide + 20 + 6 * max(map(len, named), default=0),
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]:.0f} {size[1]:.0f}" '
        f'width="{size[0]:.0f}" height="{size[1]:.0f}" font-family="sans-serif" font-size="10">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="18" font-size="13">{escape(title)}</text>',
        f'<text x="8" y="32">rows learn from columns; round {rounds[-1]}; darkest {top:.3g}</text>',
    ]
    for number, place in enumerate(small):
        x = 8 + number * (edge + 6)
        lines.append(f'<text x="{x:.1f}" y="{head + 12}">round {rounds[place]}</text>')
        lines += _cells(drawn[place], x, head + 18, tiny, top, None)
    y = head + strip
    lines += _cells(drawn[-1], left, y, side, top, named)
    for place, name in enumerate(named):
        at = y + place * side + side / 2 + 3
        lines.append(f'<text x="{left - 6}" y="{at:.1f}" text-anchor="end">{escape(name)}</text>')
        x, down = left + place * side + side / 2 - 3, y + wide + 8
        lines.append(
            f'<text transform="translate({x:.1f} {down:.1f}) rotate(90)">{escape(name)}</text>'
        )
    lines += _scale(left + wide + 16, y, min(wide, 160), top)
    return "\n".join([*lines, "</svg>", ""])


def _chosen(records: int) -> list[int]:
    """Pick a few earlier records, evenly, the first among them."""
    earlier = max(records - 1, 0)
    return sorted({int(place) for place in np.linspace(0, earlier, _SMALL + 1)[:-1]} - {earlier})


def _cells(
    matrix: NDArray[Any], x: float, y: float, side: float, top: float, names: list[str] | None
) -> list[str]:
    count = len(matrix)
    edge = side * count
    lines = [
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{edge:.1f}" height="{edge:.1f}" fill="none" '
        'stroke="#bbb" stroke-width="0.5"/>'
    ]
    for row in range(count):
        for column in range(count):
            value = float(matrix[row, column])
            shade = min(max(value / top, 0.0), 1.0) if np.isfinite(value) else 0.0
            if round(shade, 3) == 0:
                continue
            told = ""
            if names is not None:
                told = (
                    f"<title>{escape(names[row])} from {escape(names[column])}: {value:.4f}</title>"
                )
            lines.append(
                f'<rect x="{x + column * side:.1f}" y="{y + row * side:.1f}" '
                f'width="{side:.1f}" height="{side:.1f}" fill="{_INK}" '
                f'fill-opacity="{shade:.3f}">{told}</rect>'
            )
    return lines


def _scale(x: float, y: float, height: float, top: float) -> list[str]:
    """Draw the shades beside their numbers."""
    steps = 8
    lines = []
    for step in range(steps):
        share = 1 - step / (steps - 1)
        at = y + step * height / steps
        lines.append(
            f'<rect x="{x:.1f}" y="{at:.1f}" width="10" height="{height / steps:.1f}" '
            f'fill="{_INK}" fill-opacity="{share:.3f}"/>'
        )
    lines.append(f'<text x="{x + 14:.1f}" y="{y + 9:.1f}">{top:.3g}</text>')
    lines.append(f'<text x="{x + 14:.1f}" y="{y + height:.1f}">0</text>')
    return lines
