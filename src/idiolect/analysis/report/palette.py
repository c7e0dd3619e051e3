"""A look for every method, the same in all figures: colour, symbol and dash.

The colours differ in lightness as well as in hue, so that they are told apart with any colour
vision; symbols and dashes say the same once more. Local training, which everything is measured
against, is grey.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

_GREY = ("#6b7280", "#9ca3af")
# On white, and on a dark page; Okabe and Ito's hues, darkened or lightened until text is readable.
_COLOURS = (
    ("#0067a5", "#4ea8e6"),  # blue
    ("#c4570a", "#f08a3c"),  # vermilion
    ("#00805d", "#2bbd92"),  # green
    ("#a83a78", "#e383b8"),  # purple
    ("#9a7400", "#e6b422"),  # gold
    ("#1f9bb8", "#6fd0ea"),  # sky
    ("#5b3fa3", "#a993ea"),  # violet
    ("#8c2f39", "#e5737e"),  # wine
    ("#4d7326", "#9ccb5f"),  # olive
)
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "x", "star")
_DASHES = ("solid", "dash", "dot", "dashdot")


class Look(NamedTuple):
    """How a method is drawn."""

    light: str
    dark: str
    symbol: str
    dash: str


def looks(methods: Iterable[tuple[str, str]]) -> dict[str, Look]:
    """Give each label a look, in order; a pair is a label and the method's registered name."""
    given: dict[str, Look] = {}
    coloured = 0
    for label, name in methods:
        if label in given:
            continue
        if name == "local" and not any(look.light == _GREY[0] for look in given.values()):
            given[label] = Look(*_GREY, "circle-open", "dot")
            continue
        # Nine colours, then the same again with the next dash; symbols go their own way.
        lap, place = divmod(coloured, len(_COLOURS))
        symbol = _SYMBOLS[coloured % len(_SYMBOLS)]
        given[label] = Look(*_COLOURS[place], symbol, _DASHES[lap % len(_DASHES)])
        coloured += 1
    return given


def plain(given: Mapping[str, Look]) -> list[dict[str, Any]]:
    """Give the looks as JSON, in order."""
    return [{"label": label, **look._asdict()} for label, look in given.items()]
