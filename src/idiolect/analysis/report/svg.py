"""Figures as SVG files, drawn here from the same charts; no browser is needed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape

from idiolect.analysis.report.chart import Axis, Chart, Mark, Panel
from idiolect.analysis.report.marks import TONES, drawn, symbol
from idiolect.analysis.report.palette import Look
from idiolect.analysis.report.scale import Scale, label, reach, ticks

_WIDTH = 760
_MOST_STEPS = 8  # of a slider, side by side
_LINE, _INK, _SOFT = "#dddddd", "#111111", "#444444"
_FONT = "Helvetica, Arial, sans-serif"


def svg(chart: Chart, looks: Mapping[str, Look]) -> str:
    """Draw a chart with its title and legend, on white; a slider becomes small multiples."""
    chart = _unrolled(chart) if chart.frames else chart
    panels = chart.panels
    across = _across(len(panels))
    down = -(-len(panels) // across)
    legend, lines = _legend(chart.marks, looks)
    left = 16 + 5.6 * max([8, *(len(name[:28]) for name in panels[0].y.categories)])
    top = 40 + 20 * lines
    gap = 18 if across > 2 else 70
    each = chart.height if len(panels) <= 2 else min(chart.height, 220)
    wide = (_WIDTH - left - 14 - gap * (across - 1)) / across
    parts = [_text(14, 20, chart.title, size=14, weight="bold", fill=_INK), *legend]
    for place, panel in enumerate(panels):
        column, row = place % across, place // across
        x, y = left + column * (wide + gap), top + 18 + row * (each + 30)
        own = [mark for mark in chart.marks if mark.panel == place]
        kin = [
            m for m in chart.marks if panels[m.panel].y == panel.y and panels[m.panel].x == panel.x
        ]
        parts += _panel(panel, own, kin, looks, (x, y, wide, each - 48), column > 0 and across > 2)
    height = top + 18 + down * (each + 30)
    inside = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" '
        f'width="{_WIDTH}" height="{height:g}" font-family="{_FONT}" font-size="11">\n'
        f"<title>{escape(chart.title)}</title>\n<desc>{escape(chart.caption)}</desc>\n"
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n{inside}\n</svg>\n'
    )


def _unrolled(chart: Chart) -> Chart:
    """Turn the steps of a slider into small multiples, a few of them, evenly chosen."""
    last = len(chart.frames) - 1
    steps = sorted({round(n * last / (_MOST_STEPS - 1)) for n in range(_MOST_STEPS)})
    shared = chart.panels[0]
    return replace(
        chart,
        frames=(),
        panels=[Panel(chart.frames[step], shared.x, shared.y) for step in steps],
        marks=[
            replace(mark, panel=steps.index(mark.panel))
            for mark in chart.marks
            if mark.panel in steps
        ],
    )


def _across(panels: int) -> int:
    return panels if panels <= 2 else min(4, panels)


def _panel(
    panel: Panel,
    marks: Sequence[Mark],
    kin: Sequence[Mark],
    looks: Mapping[str, Look],
    box: tuple[float, float, float, float],
    bare: bool,
) -> list[str]:
    """Draw axes and marks; `kin` are the marks that share the axes, for an equal scale."""
    left, top, width, height = box
    x = Scale(*reach(panel.x, kin, "x"), left, left + width)
    # Named places run downwards, values upwards.
    ends = (top, top + height) if panel.y.categories else (top + height, top)
    y = Scale(*reach(panel.y, kin, "y"), *ends)
    parts = [_text(left, top - 7, panel.title, fill=_INK)] if panel.title else []
    for value, name in _named(panel.x, x, int(width / 45)):
        at = x.at(value)
        if not panel.x.categories:
            parts.append(_rule(at, top, at, top + height))
        parts.append(_text(at, top + height + 15, name, anchor="middle"))
    for value, name in _named(panel.y, y, 60 if panel.y.categories else int(height / 32) + 1):
        at = y.at(value)
        parts.append(_rule(left, at, left + width, at))
        if not bare:
            parts.append(_text(left - 6, at + 4, name, anchor="end"))
    for mark in marks:
        parts += drawn(mark, x, y, looks)
    middle = (left + width / 2, top + height + 32)
    parts.append(_text(*middle, panel.x.title, anchor="middle"))
    if panel.y.title and not bare:
        turned = f'transform="rotate(-90 {left - 40:g} {top + height / 2:g})"'
        title = panel.y.title
        parts.append(_text(left - 40, top + height / 2, title, anchor="middle", more=turned))
    return parts


def _named(axis: Axis, scale: Scale, most: int) -> list[tuple[float, str]]:
    if axis.categories:
        step = max(-(-len(axis.categories) // max(most, 1)), 1)
        return [(n, name[:28]) for n, name in enumerate(axis.categories) if n % step == 0]
    found = ticks(scale.first, scale.last, max(most, 2))
    return [(value, label(value, axis.unit)) for value in found]


def _legend(marks: Sequence[Mark], looks: Mapping[str, Look]) -> tuple[list[str], int]:
    """Name every method and every tone once, in as many lines as it takes."""
    named = {mark.method or mark.name: mark for mark in reversed(marks) if mark.method or mark.name}
    parts, x, line = [], 14.0, 0
    for name, mark in reversed(named.items()):
        room = 26 + 6.2 * len(name)
        if x + room > _WIDTH - 10:
            x, line = 14.0, line + 1
        look = looks.get(mark.method)
        colour = look.light if look else TONES[(mark.tone or 0) % len(TONES)]
        kind = look.symbol if look else "circle"
        parts += [
            symbol(kind, x + 5, 38 + 20 * line, 5, colour),
            _text(x + 15, 42 + 20 * line, name),
        ]
        x += room
    return parts, line + 1 if parts else 0


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
