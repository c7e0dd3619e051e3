"""The marks of a chart as SVG elements."""

import math
from collections.abc import Mapping
from html import escape

from idiolect.analysis.report.chart import Mark, Number
from idiolect.analysis.report.palette import Look
from idiolect.analysis.report.scale import Scale

TONES = ("#5b3fa3", "#1f9bb8", "#b8860b", "#a8325a", "#3a3a3a")
_GREY = "#9aa0a8"
_DASHES = {"solid": "", "dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3"}
_TONE_DASHES = ("solid", "dash", "dot", "dashdot")
_TONE_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross")
_HEAT = ((238, 244, 250), (156, 196, 228), (59, 133, 189), (8, 58, 102))

# Corners of each symbol about its middle, for a radius of one.
_CORNERS = {
    "square": ((-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)),
    "diamond": ((0, -1.2), (1.2, 0), (0, 1.2), (-1.2, 0)),
    "triangle-up": ((0, -1.1), (1.05, 0.8), (-1.05, 0.8)),
    "triangle-down": ((0, 1.1), (1.05, -0.8), (-1.05, -0.8)),
}


def drawn(mark: Mark, x: Scale, y: Scale, looks: Mapping[str, Look]) -> list[str]:
    """Draw a mark on two scales."""
    look = looks.get(mark.method)
    colour = look.light if look else _GREY if mark.tone is None else TONES[mark.tone % len(TONES)]
    match mark.kind:
        case "line":
            return _line(mark, x, y, colour, look)
        case "dots":
            return _dots(mark, x, y, colour, look)
        case "band":
            return _band(mark, x, y, colour)
        case "span":
            return _spans(mark, x, y, colour)
        case "bars":
            return _bars(mark, x, y, colour)
        case "heat":
            return _heat(mark, x, y)
    raise ValueError(f"unknown mark {mark.kind!r}")


def symbol(kind: str, x: float, y: float, size: float, colour: str, more: str = "") -> str:
    """Draw a method's symbol."""
    if kind in _CORNERS:
        corners = " ".join(f"{x + size * a:.1f},{y + size * b:.1f}" for a, b in _CORNERS[kind])
        return f'<polygon points="{corners}" fill="{colour}" {more}/>'
    if kind in ("cross", "x", "star"):
        turns = {"cross": (0, 90), "x": (45, 135), "star": (0, 60, 120)}[kind]
        strokes = "".join(_stroke(x, y, size, turn) for turn in turns)
        width = f'stroke-width="{size * 0.6:.1f}"'
        return f'<path d="{strokes}" stroke="{colour}" {width} fill="none" {more}/>'
    hollow = f'fill="none" stroke="{colour}" stroke-width="1.8"'
    paint = hollow if kind.endswith("open") else f'fill="{colour}"'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}" {paint} {more}/>'


def _stroke(x: float, y: float, size: float, turn: float) -> str:
    a, b = size * math.cos(math.radians(turn)), size * math.sin(math.radians(turn))
    return f"M{x - a:.1f} {y - b:.1f}L{x + a:.1f} {y + b:.1f}"


def _line(mark: Mark, x: Scale, y: Scale, colour: str, look: Look | None) -> list[str]:
    tone = mark.tone or 0
    dash = _DASHES[look.dash if look else _TONE_DASHES[tone % len(_TONE_DASHES)]]
    points = [_point(a, b, x, y) for a, b in zip(mark.x, mark.y, strict=True)]
    path = _path(points)
    parts = [
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.8" '
        f'stroke-dasharray="{dash}" stroke-linejoin="round"/>'
    ]
    if len(points) <= 14:
        kind = look.symbol if look else _TONE_SYMBOLS[tone % len(_TONE_SYMBOLS)]
        parts += [symbol(kind, *point, 3, colour) for point in points if point]
    return parts


def _path(points: list[tuple[float, float] | None]) -> str:
    """Join points; one that is missing leaves a gap."""
    steps, pen = [], False
    for point in points:
        if point:
            steps.append(f"{'L' if pen else 'M'}{point[0]:.1f} {point[1]:.1f}")
        pen = point is not None
    return "".join(steps)


def _dots(mark: Mark, x: Scale, y: Scale, colour: str, look: Look | None) -> list[str]:
    kind = look.symbol if look else "circle"
    faded = 'opacity="0.5"' if mark.faint else ""
    size = 6.5 if mark.big else 4.2
    parts = []
    for place, (a, b) in enumerate(zip(mark.x, mark.y, strict=True)):
        if point := _point(a, b, x, y):
            told = mark.text[place].replace("<br>", ", ") if mark.text else ""
            parts.append(
                f"<g><title>{escape(told)}</title>{symbol(kind, *point, size, colour, faded)}</g>"
            )
    return parts


def _band(mark: Mark, x: Scale, y: Scale, colour: str) -> list[str]:
    there = [_point(a, b, x, y) for a, b in zip(mark.x, mark.high, strict=True)]
    back = [_point(a, b, x, y) for a, b in zip(mark.x, mark.low, strict=True)][::-1]
    corners = " ".join(f"{a:.1f},{b:.1f}" for a, b in filter(None, [*there, *back]))
    return [f'<polygon points="{corners}" fill="{colour}" fill-opacity="0.16"/>']


def _spans(mark: Mark, x: Scale, y: Scale, colour: str) -> list[str]:
    paint = f'stroke="{colour}" stroke-width="{2 if mark.faint else 4}"'
    faded = 'stroke-opacity="0.45"' if mark.faint else ""
    parts = []
    for at, low, high in zip(mark.y, mark.low, mark.high, strict=True):
        if at is not None and low is not None and high is not None:
            ends = f'x1="{x.at(low):.1f}" x2="{x.at(high):.1f}"'
            height = f'y1="{y.at(at):.1f}" y2="{y.at(at):.1f}"'
            parts.append(f"<line {ends} {height} {paint} {faded}/>")
    return parts


def _bars(mark: Mark, x: Scale, y: Scale, colour: str) -> list[str]:
    parts = []
    for value, at in zip(mark.x, mark.y, strict=True):
        if value is not None and at is not None:
            top, bottom = sorted((y.at(at - 0.27), y.at(at + 0.27)))
            left, right = sorted((x.at(0), x.at(value)))
            parts.append(
                f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" '
                f'height="{bottom - top:.1f}" fill="{colour}"/>'
            )
    return parts


def _heat(mark: Mark, x: Scale, y: Scale) -> list[str]:
    parts = []
    wide, tall = abs(x.at(1) - x.at(0)), abs(y.at(1) - y.at(0))
    gap = 1 if min(wide, tall) > 6 else 0
    for row, values in enumerate(mark.z):
        for column, value in enumerate(values):
            if value is not None:
                parts.append(
                    f'<rect x="{x.at(column) - wide / 2:.1f}" y="{y.at(row) - tall / 2:.1f}" '
                    f'width="{wide - gap:.1f}" height="{tall - gap:.1f}" '
                    f'fill="{_shade(value, mark.bottom or 0.0, mark.top or 1.0)}"/>'
                )
    return parts


def _shade(value: float, bottom: float, top: float) -> str:
    """Mix the two neighbouring colours of the ramp."""
    share = (value - bottom) / (top - bottom) if top > bottom else 1.0
    at = min(max(share, 0.0), 1.0) * (len(_HEAT) - 1)
    low = min(int(at), len(_HEAT) - 2)
    mixed = [
        round(a + (b - a) * (at - low)) for a, b in zip(_HEAT[low], _HEAT[low + 1], strict=True)
    ]
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _point(a: Number, b: Number, x: Scale, y: Scale) -> tuple[float, float] | None:
    return None if a is None or b is None else (x.at(a), y.at(b))
