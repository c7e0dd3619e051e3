"""Charts as SVG files, drawn without a browser."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

from idiolect.analysis.report.figures import Axis, Chart, Mark, MethodStyle, Number, Panel

_WIDTH = 760
_MOST_STEPS = 8  # of a slider, side by side
_LINE, _INK, _SOFT = "#dddddd", "#111111", "#444444"
_FONT = "Helvetica, Arial, sans-serif"
_TONES = ("#5b3fa3", "#1f9bb8", "#b8860b", "#a8325a", "#3a3a3a")
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
_TURNS = {"cross": (0, 90), "x": (45, 135), "star": (0, 60, 120)}  # of a symbol's strokes, degrees

_LETTER = 6.4  # width of one, in pixels

Styles = Mapping[str, MethodStyle]


def svg(chart: Chart, styles: Styles) -> str:
    """Draw a chart with its title and legend, on white; a slider becomes small multiples."""
    chart = _without_slider(chart) if chart.frames else chart
    panels = chart.panels
    across = min(4, len(panels))
    down = -(-len(panels) // across)
    legend, lines = _legend(chart.marks, styles)
    left = 18 + _LETTER * max([8, *(len(name[:28]) for name in panels[0].y.categories)])
    top = 40 + 20 * lines
    gap = 18 if across > 2 else 70
    each = chart.height if len(panels) <= 2 else min(chart.height, 220)
    wide = (_WIDTH - left - 14 - gap * (across - 1)) / across
    parts = [_text(14, 20, chart.title, size=14, weight="bold", fill=_INK), *legend]
    for place, panel in enumerate(panels):
        column, row = place % across, place // across
        box = (left + column * (wide + gap), top + 18 + row * (each + 30), wide, each - 48)
        own = [mark for mark in chart.marks if mark.panel == place]
        same_axes = [
            m for m in chart.marks if panels[m.panel].y == panel.y and panels[m.panel].x == panel.x
        ]
        parts += _panel(panel, own, same_axes, styles, box, column > 0 and across > 2)
    height = top + 18 + down * (each + 30)
    inside = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" '
        f'width="{_WIDTH}" height="{height:g}" font-family="{_FONT}" font-size="11">\n'
        f"<title>{escape(chart.title)}</title>\n<desc>{escape(chart.caption)}</desc>\n"
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n{inside}\n</svg>\n'
    )


def _without_slider(chart: Chart) -> Chart:
    """Turn the steps of a slider into small multiples, a few of them, evenly chosen."""
    last = len(chart.frames) - 1
    steps = sorted({round(n * last / (_MOST_STEPS - 1)) for n in range(_MOST_STEPS)})
    panels = [replace(chart.panels[0], title=chart.frames[step]) for step in steps]
    shown = [mark for mark in chart.marks if mark.panel in steps]
    marks = [replace(mark, panel=steps.index(mark.panel)) for mark in shown]
    return replace(chart, frames=(), panels=panels, marks=marks)


def _panel(
    panel: Panel,
    marks: Sequence[Mark],
    same_axes: Sequence[Mark],
    styles: Styles,
    box: tuple[float, float, float, float],
    bare: bool,
) -> list[str]:
    """Draw axes and marks; `same_axes` are the marks that share the axes, for an equal scale."""
    left, top, width, height = box
    x = Scale(*extent(panel.x, same_axes, "x"), left, left + width)
    # Named places run downwards, values upwards.
    ends = (top, top + height) if panel.y.categories else (top + height, top)
    y = Scale(*extent(panel.y, same_axes, "y"), *ends)
    parts = [_text(left, top - 7, panel.title, fill=_INK)] if panel.title else []
    for value, name in _named_ticks(panel.x, x, int(width / 45)):
        at = x.at(value)
        if not panel.x.categories:
            parts.append(_rule(at, top, at, top + height))
        parts.append(_text(at, top + height + 15, name, anchor="middle"))
    for value, name in _named_ticks(panel.y, y, 60 if panel.y.categories else int(height / 32) + 1):
        at = y.at(value)
        parts.append(_rule(left, at, left + width, at))
        if not bare:
            parts.append(_text(left - 6, at + 4, name, anchor="end"))
    for mark in marks:
        parts += _mark(mark, x, y, styles.get(mark.method))
    parts.append(_text(left + width / 2, top + height + 32, panel.x.title, anchor="middle"))
    if panel.y.title and not bare:
        names = _named_ticks(panel.y, y, int(height / 32) + 1)
        beside = max(left - 14 - _LETTER * max([0, *(len(name) for _, name in names)]), 10)
        turned = f'transform="rotate(-90 {beside:g} {top + height / 2:g})"'
        middle = (beside, top + height / 2)
        parts.append(_text(*middle, panel.y.title, anchor="middle", more=turned))
    return parts


@dataclass(frozen=True)
class Scale:
    """A direction on paper: values from `first` to `last` lie between `start` and `end`."""

    first: float
    last: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Return the place of a value."""
        share = (value - self.first) / (self.last - self.first)
        return self.start + share * (self.end - self.start)


def extent(axis: Axis, marks: Sequence[Mark], direction: str) -> tuple[float, float]:
    """Return the ends of an axis: those it names, else those of its marks and a little room."""
    if axis.categories:
        return -0.5, len(axis.categories) - 0.5
    values = [value for mark in marks for value in _values(mark, direction)]
    low = min(values, default=0.0) if axis.low is None else min([axis.low, *values])
    high = max(values, default=1.0) if axis.high is None else max([axis.high, *values])
    room = (high - low) * 0.04 or 0.5
    return (low - (0 if axis.low == low else room), high + room)


def _values(mark: Mark, direction: str) -> list[float]:
    """Return the values a mark occupies: bands extend up and down, spans and bars to the sides."""
    own: list[float | None] = list(mark.x if direction == "x" else mark.y)
    if (mark.kind, direction) in (("band", "y"), ("span", "x")):
        own += [*mark.low, *mark.high]
    if mark.kind == "bars" and direction == "x":
        own.append(0.0)
    return [value for value in own if value is not None]


def ticks(first: float, last: float, most: int = 6) -> list[float]:
    """Choose round values within an axis."""
    span = abs(last - first)
    if not span:
        return [first]
    raw = span / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw)
    low = math.ceil(min(first, last) / step - 1e-9)
    high = math.floor(max(first, last) / step + 1e-9)
    return [number * step for number in range(low, high + 1)]


def tick_label(value: float, unit: str) -> str:
    """Write a tick."""
    if unit == "%":
        return f"{round(100 * value, 6):g}%"
    return f"{value:,g}" if abs(value) < 1e5 else f"{value:.3g}"


def _named_ticks(axis: Axis, scale: Scale, most: int) -> list[tuple[float, str]]:
    if axis.categories:
        step = max(-(-len(axis.categories) // max(most, 1)), 1)
        return [(n, name[:28]) for n, name in enumerate(axis.categories) if n % step == 0]
    if axis.step:
        last = int(max(scale.first, scale.last))
        return [(n, tick_label(n, axis.unit)) for n in range(0, last + 1, axis.step)]
    found = ticks(scale.first, scale.last, max(most, 2))
    return [(value, tick_label(value, axis.unit)) for value in found]


def _legend(marks: Sequence[Mark], styles: Styles) -> tuple[list[str], int]:
    """Name every method and every tone once; return the elements and the number of lines."""
    named = {mark.method or mark.name: mark for mark in reversed(marks) if mark.method or mark.name}
    parts, x, line = [], 14.0, 0
    for name, mark in reversed(named.items()):
        room = 26 + 6.2 * len(name)
        if x + room > _WIDTH - 10:
            x, line = 14.0, line + 1
        style = styles.get(mark.method)
        colour = style.light if style else _TONES[(mark.tone or 0) % len(_TONES)]
        kind = style.symbol if style else "circle"
        parts += [
            _symbol(kind, x + 5, 38 + 20 * line, 5, colour),
            _text(x + 15, 42 + 20 * line, name),
        ]
        x += room
    return parts, line + 1 if parts else 0


def _mark(mark: Mark, x: Scale, y: Scale, style: MethodStyle | None) -> list[str]:
    """Draw a mark on two scales."""
    colour = _GREY if mark.tone is None else _TONES[mark.tone % len(_TONES)]
    colour = style.light if style else colour
    match mark.kind:
        case "line":
            return _line(mark, x, y, colour, style)
        case "dots":
            return _dots(mark, x, y, colour, style.symbol if style else "circle")
        case "band":
            there = _points(mark.x, mark.high, x, y)
            back = _points(mark.x, mark.low, x, y)[::-1]
            corners = " ".join(f"{a:.1f},{b:.1f}" for a, b in filter(None, [*there, *back]))
            return [f'<polygon points="{corners}" fill="{colour}" fill-opacity="0.16"/>']
        case "span":
            return _spans(mark, x, y, colour)
        case "bars":
            return _bars(mark, x, y, colour)
        case "heat":
            return _heat(mark, x, y)
    raise ValueError(f"unknown mark {mark.kind!r}")


def _symbol(kind: str, x: float, y: float, size: float, colour: str, more: str = "") -> str:
    """Draw a method's symbol."""
    if kind in _CORNERS:
        corners = " ".join(f"{x + size * a:.1f},{y + size * b:.1f}" for a, b in _CORNERS[kind])
        return f'<polygon points="{corners}" fill="{colour}" {more}/>'
    if kind in _TURNS:
        strokes = ""
        for turn in map(math.radians, _TURNS[kind]):
            a, b = size * math.cos(turn), size * math.sin(turn)
            strokes += f"M{x - a:.1f} {y - b:.1f}L{x + a:.1f} {y + b:.1f}"
        width = f'stroke-width="{size * 0.6:.1f}"'
        return f'<path d="{strokes}" stroke="{colour}" {width} fill="none" {more}/>'
    hollow = f'fill="none" stroke="{colour}" stroke-width="1.8"'
    paint = hollow if kind.endswith("open") else f'fill="{colour}"'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}" {paint} {more}/>'


def _line(mark: Mark, x: Scale, y: Scale, colour: str, style: MethodStyle | None) -> list[str]:
    tone = mark.tone or 0
    dash = _DASHES[style.dash if style else _TONE_DASHES[tone % len(_TONE_DASHES)]]
    points = _points(mark.x, mark.y, x, y)
    path, pen = "", "M"
    for point in points:  # one that is missing leaves a gap
        path += f"{pen}{point[0]:.1f} {point[1]:.1f}" if point else ""
        pen = "L" if point else "M"
    parts = [
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.8" '
        f'stroke-dasharray="{dash}" stroke-linejoin="round"/>'
    ]
    if len(points) <= 14:
        kind = style.symbol if style else _TONE_SYMBOLS[tone % len(_TONE_SYMBOLS)]
        parts += [_symbol(kind, *point, 3, colour) for point in points if point]
    return parts


def _dots(mark: Mark, x: Scale, y: Scale, colour: str, kind: str) -> list[str]:
    faded = 'opacity="0.5"' if mark.faint else ""
    size = 6.5 if mark.big else 4.2
    parts = []
    for place, point in enumerate(_points(mark.x, mark.y, x, y)):
        if point:
            text = escape(mark.text[place].replace("<br>", ", ") if mark.text else "")
            drawn = _symbol(kind, *point, size, colour, faded)
            parts.append(f"<g><title>{text}</title>{drawn}</g>")
    return parts


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
            parts.append(_rectangle(left, top, right - left, bottom - top, colour))
    return parts


def _heat(mark: Mark, x: Scale, y: Scale) -> list[str]:
    wide, tall = abs(x.at(1) - x.at(0)), abs(y.at(1) - y.at(0))
    gap = 1 if min(wide, tall) > 6 else 0
    bottom, top = mark.bottom or 0.0, mark.top or 1.0
    return [
        _rectangle(
            x.at(column) - wide / 2,
            y.at(row) - tall / 2,
            wide - gap,
            tall - gap,
            _heat_colour((value - bottom) / (top - bottom) if top > bottom else 1.0),
        )
        for row, values in enumerate(mark.z)
        for column, value in enumerate(values)
        if value is not None
    ]


def _heat_colour(share: float) -> str:
    """Mix the two neighbouring colours of the ramp."""
    at = min(max(share, 0.0), 1.0) * (len(_HEAT) - 1)
    low = min(int(at), len(_HEAT) - 2)
    pairs = zip(_HEAT[low], _HEAT[low + 1], strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (at - low)):02x}" for a, b in pairs)


def _points(
    xs: Sequence[Number], ys: Sequence[Number], x: Scale, y: Scale
) -> list[tuple[float, float] | None]:
    return [
        None if a is None or b is None else (x.at(a), y.at(b)) for a, b in zip(xs, ys, strict=True)
    ]


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: float = 11,
    anchor: str = "start",
    weight: str = "normal",
    fill: str = _SOFT,
    more: str = "",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" text-anchor="{anchor}" '
        f'font-weight="{weight}" fill="{fill}" {more}>{escape(text)}</text>'
    )


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{_LINE}"/>'


def _rectangle(x: float, y: float, width: float, height: float, fill: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"/>'
    )
