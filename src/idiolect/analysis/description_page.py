"""A description of clients' data as a page, and the rows that the page and the screen share."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from idiolect.analysis.report.figures import (
    Axis,
    Block,
    Chart,
    Column,
    Mark,
    Panel,
    Section,
    Table,
    paragraph,
    styles,
)
from idiolect.analysis.report.page import page_html

Description = Mapping[str, Any]

ALL = "all sites"
_MOST_PANELS = 24  # columns that are drawn
_MOST_ROWS = 4000  # of a table
_MOST_CATEGORIES = 30  # of a column in the table; JSON has them all
HEADS = ("rows", "gaps", "mean", "deviation", "5 %", "25 %", "median", "75 %", "95 %")


def description_html(content: Description, command: str) -> str:
    """Return the page of a description."""
    sites = [one["site"] for one in content["sites"]]
    made = [part for part in _sections(content) if part is not None]
    looks = styles([(name, name) for name in (ALL, *sites)][:30])
    run = {
        "name": content["title"],
        "facts": _facts(content),
        "verdict": "",
        "status": {},
        "sections": made,
    }
    return page_html(
        {
            "title": f"{content['title']}: data before training",
            "methods": [{"label": label, **style._asdict()} for label, style in looks.items()],
            "runs": [run],
            "command": command,
        }
    )


def _facts(content: Description) -> list[str]:
    told = len(content["pooled"]["sites"])
    facts = [f"{told} of {len(content['sites'])} sites", f"{content['pooled']['rows']:,} rows"]
    facts.append(rows_words(content))
    return [*facts, f"{len(content['columns'])} columns"]


def rows_words(content: Description) -> str:
    """Say which rows the figures are of."""
    words = {"train": "training rows", "val": "validation rows", "test": "test rows"}
    return words.get(content["part"], "rows")


def parts_of(content: Description) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each site's figures by column, and those of all together."""
    yield ALL, content["pooled"]["columns"]
    for one in content["sites"]:
        if one["columns"]:
            yield one["site"], one["columns"]


def number_rows(content: Description, names: Sequence[str]) -> list[list[Any]]:
    """Return a row for each column of numbers and each site, as `HEADS` has them."""
    found = []
    for name in names:
        for site, columns in parts_of(content):
            if name in columns:
                found.append([name, site, *_numbers(columns[name])])
    return found


def _numbers(figures: Mapping[str, Any]) -> list[Any]:
    quantiles = figures.get("quantiles") or {}
    return [
        figures["count"],
        gaps(figures),
        _value(figures["kind"], figures.get("mean")),
        figures.get("deviation"),
        *(_value(figures["kind"], quantiles.get(str(key))) for key in (5, 25, 50, 75, 95)),
    ]


def _value(kind: str, value: Any) -> Any:
    """Return a date in words, and any other number as it is."""
    if kind != "date" or value is None:
        return value
    try:
        return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=float(value))).date().isoformat()
    except OverflowError:
        return value


def gaps(figures: Mapping[str, Any]) -> Any:
    """Return the number of gaps; where it is too small to be told, below what it is."""
    if figures["missing"] is None:
        return f"< {figures['least']}" if figures.get("least") else None
    return figures["missing"]


def category_rows(content: Description, names: Sequence[str]) -> list[list[Any]]:
    """Return a row for each category: column, category, and its share at all and at each site."""
    parts = dict(parts_of(content))
    found: list[list[Any]] = []
    for name in names:
        own = [columns.get(name, {}) for columns in parts.values()]
        counts = {key: 0 for figures in own for key in figures.get("categories", {})}
        counts.update(own[0].get("categories", {}))
        order = sorted(counts, key=lambda key: (-counts[key], key))
        for key in order[:_MOST_CATEGORIES]:
            found.append(
                [name, key, *(_of(one, one.get("categories", {}).get(key)) for one in own)]
            )
        if len(order) > _MOST_CATEGORIES:
            more = f"{len(order) - _MOST_CATEGORIES} more"
            found.append([name, more, *(None for _ in parts)])
        for key, words in (("other", "(rare)"), ("missing", "(gap)")):
            if any(figures.get(key) for figures in own):
                found.append([name, words, *(_of(one, one.get(key)) for one in own)])
    return found


def _of(figures: Mapping[str, Any], count: int | None) -> float | None:
    return count / figures["rows"] if count and figures["rows"] else None


def columns_of(content: Description, *roles: str, numbers: bool) -> list[str]:
    """Return the columns of these roles that are numbers, or those that are not."""
    return [
        one["name"]
        for one in content["columns"]
        if one["role"] in roles and (one["kind"] in ("number", "date")) == numbers
    ]


def site_rows(content: Description) -> list[list[Any]]:
    """Return a row for each site: its rows, what it tells, and by which rules."""
    found = []
    for one in content["sites"]:
        rows = one.get("rows") or {}
        rule = f"counts below {one['min_cell']} hidden" if one.get("min_cell", 1) > 1 else ""
        noise = f"noise, ε = {one['epsilon']:g}" if one.get("epsilon") else ""
        words = one["why"] or "; ".join(part for part in (one["tells"], rule, noise) if part)
        found.append([one["site"], rows.get("train"), rows.get("val"), rows.get("test"), words])
    return found


def _sections(content: Description) -> list[Section | None]:
    which = rows_words(content)
    only = "; validation and test rows are only counted" if content["part"] == "train" else ""
    lead = f"Who holds how many rows, and what each site tells. Figures are of {which}{only}."
    caption = "Rows by the split of the first seed. What a site tells is its own decision."
    heads = [Column(head, "whole") for head in ("train", "validation", "test")]
    heads = [Column("site"), *heads, Column("tells")]
    sites = Table("site-rows", "Rows of each site", caption, heads, site_rows(content))
    targets, names = (columns_of(content, "target", numbers=kind) for kind in (True, False))
    number, words = (columns_of(content, "feature", numbers=kind) for kind in (True, False))
    figures = "Mean, deviation and quantiles."
    return [
        _warnings(content),
        Section("sites", "Sites", lead, [sites]),
        _part(content, "target", "Target", "What is to be predicted.", targets, names),
        _part(content, "numbers", "Columns of numbers", figures, number, []),
        _part(content, "categories", "Categories", "Shares of all rows.", [], words),
    ]


def _warnings(content: Description) -> Section | None:
    if not content["warnings"]:
        return None
    words: list[Block] = [paragraph(one["text"]) for one in content["warnings"]]
    lead = "Sites that differ from the others in a way that training does not mend."
    return Section("warnings", "Warnings", lead, words)


def _part(
    content: Description,
    ident: str,
    title: str,
    lead: str,
    numbers: Sequence[str],
    names: Sequence[str],
) -> Section | None:
    blocks: list[Block] = []
    if numbers:
        blocks.append(_quantile_chart(content, f"{ident}-quantiles", numbers[:_MOST_PANELS]))
        rows = number_rows(content, numbers)
        caption = (
            "Quantiles are read from merged histograms, to within a bin. Minimum and maximum are "
            "nobody's to tell."
        )
        heads = [Column("column"), Column("site"), Column("rows", "number")]
        heads += [Column(head, "number") for head in HEADS[1:]]
        blocks.append(Table(f"{ident}-figures", title, caption, heads, rows[:_MOST_ROWS]))
    if names:
        rows = category_rows(content, names)
        heads = [Column("column"), Column("category")]
        heads += [Column(site, "percent") for site, _ in parts_of(content)]
        caption = (
            "Per cent of a site's rows. A dash: none, or too few to be told; (rare): all those "
            "that are too rare to be told one by one."
        )
        blocks.append(Table(f"{ident}-shares", title, caption, heads, rows[:_MOST_ROWS]))
    return Section(ident, title, lead, blocks) if blocks else None


def _quantile_chart(content: Description, ident: str, names: Sequence[str]) -> Chart:
    """Draw for each column a row per site: from 5 to 95 %, the middle half, and the median."""
    sites = [site for site, _ in parts_of(content)][:30]
    panels, marks, table = [], [], []
    for place, name in enumerate(names):
        ends = [
            columns[name]["quantiles"][str(key)]
            for _, columns in parts_of(content)
            for key in (5, 95)
            if (columns.get(name) or {}).get("quantiles")
        ]
        reach = Axis(low=min(ends), high=max(ends)) if ends else Axis(low=0.0, high=1.0)
        panels.append(Panel(name, reach, Axis(categories=tuple(sites))))
        for height, (site, columns) in enumerate(parts_of(content)):
            quantiles = (columns.get(name) or {}).get("quantiles")
            if height >= len(sites) or not quantiles:
                continue
            low, first, middle, third, high = (quantiles[str(key)] for key in (5, 25, 50, 75, 95))
            own: dict[str, Any] = {"panel": place, "method": site, "y": [height]}
            marks.append(Mark("span", low=[low], high=[high], faint=True, **own))
            marks.append(Mark("span", low=[first], high=[third], **own))
            words = f"{site}<br>{name}: median {_short(columns[name]['kind'], middle)}"
            marks.append(Mark("dots", x=[middle], text=[words], **own))
            table.append((name, site, low, first, middle, third, high))
    return Chart(
        ident,
        "How numbers lie at each site",
        "Thin: from 5 to 95 per cent of the rows. Thick: the middle half. Dot: the median.",
        panels,
        marks,
        ("column", "site", "5 %", "25 %", "median", "75 %", "95 %"),
        table,
        height=max(140, 22 * len(sites) + 70),
    )


def _short(kind: str, value: Any) -> str:
    value = _value(kind, value)
    return f"{value:.4g}" if isinstance(value, float | int) else str(value)
