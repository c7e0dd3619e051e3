"""A part of the page: words, tables and figures, in the order they are read."""

from collections.abc import Sequence
from dataclasses import dataclass

from idiolect.analysis.report.chart import Chart
from idiolect.analysis.report.sheet import Sheet


@dataclass(frozen=True)
class Words:
    """HTML of our own making; whatever came from outside is escaped in it."""

    html: str


Block = Chart | Sheet | Words


@dataclass(frozen=True)
class Section:
    """A heading, a sentence on what follows, and the blocks."""

    id: str
    title: str
    lead: str
    blocks: Sequence[Block]
    short: str = ""  # for the list of sections, where the title is long
