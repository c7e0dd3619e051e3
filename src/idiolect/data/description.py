"""Statistics of clients' columns before training: each client's, all together, and what is odd.

A description is plain JSON: of every column the rows, gaps, mean, deviation, quantiles or
categories, per site and pooled, with warnings. It is made of sums, so it is the same whether the
rows lie in one place or sums of them were sent.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from idiolect.data.column_sums import ColumnPlan, ColumnSums, RawColumn
from idiolect.data.dataset import Dataset, Rows, moments

Description = dict[str, Any]
Figures = Mapping[str, Any]  # of one column at one site
Sums = Mapping[str, "ToldColumn"]

QUANTILES = (5, 25, 50, 75, 95)

_SPREADS = 2.0  # how many deviations within sites the mean of a site may be away
_BETWEEN = 3.0  # and how many times the others' own distances
_ERRORS = 3.0  # and how many standard errors
_TIMES = 4.0  # a factor between both means and deviations that points to a unit
_MOST_NAMED = 5  # categories in one warning
_GAPS = 0.5  # more gaps than this by share, where the others have few, are worth a word

# Factors between units of one quantity that tables of several sites are often mixed of.
_UNITS = (
    (18.02, "as between mg/dL and mmol/L of glucose"),
    (38.67, "as between mg/dL and mmol/L of cholesterol"),
    (88.42, "as between mg/dL and µmol/L of creatinine"),
    (2.2046, "as between pounds and kilograms"),
    (2.54, "as between inches and centimetres"),
    (1000.0, "as between units with and without milli or kilo"),
    (365.25, "as between days and years"),
    (12.0, "as between months and years"),
    (100.0, "as between shares and per cent"),
    (10.0, "a factor of ten"),
)


def far_from_others(means: Any, deviations: Any, counts: Any) -> np.ndarray:
    """Return which sites are far from the others in which column; arrays are [site, column].

    A mean is far if it is two deviations within sites away, beyond what the others differ among
    themselves and beyond its own standard error; or if mean and deviation both differ by a factor
    of four, as in another unit. NaN stands for a site without the column.
    """
    means, deviations, counts = (
        np.asarray(part, np.float64) for part in (means, deviations, counts)
    )
    far = np.zeros(means.shape, bool)
    with np.errstate(invalid="ignore", divide="ignore"):
        for place in range(len(means)):
            others = np.delete(means, place, axis=0)
            known = np.isfinite(others).any(axis=0) & np.isfinite(means[place])
            others = np.where(np.isfinite(others).any(axis=0), others, 0.0)
            centre = np.nanmedian(others, axis=0)
            spread = np.nan_to_num(_median(np.delete(deviations, place, axis=0)))
            between = np.nanmedian(np.abs(others - centre), axis=0)
            own = np.nan_to_num(deviations[place])
            error = _ERRORS * own / np.sqrt(np.maximum(counts[place], 1))
            apart = np.abs(means[place] - centre)
            moved = apart > _SPREADS * spread + _BETWEEN * between + error
            wider, larger = own / spread, np.abs(means[place]) / np.abs(centre)
            unit = np.minimum(wider, larger) > _TIMES
            unit |= np.maximum(wider, larger) < 1 / _TIMES
            far[place] = known & (spread > 0) & (moved | (unit & (own > 0)))
    return far


def _median(values: np.ndarray) -> np.ndarray:
    """Return the median of each column's finite values; 0 where there are none."""
    usable = np.where(np.isfinite(values).any(axis=0), values, 0.0)
    found: np.ndarray = np.nanmedian(usable, axis=0)
    return found


def far_words(site: str, column: str, mean: float, others: Sequence[float]) -> str:
    """Say in one line how a site's mean differs from the others', and which units might explain."""
    centre = float(np.median(others))
    if len(others) == 1:
        text = f"{column}: the mean of {site} is {mean:.4g} and the other site's {centre:.4g}"
    else:
        text = f"{column}: the mean of {site} is {mean:.4g}, that of the other sites {centre:.4g}"
    if mean * centre > 0:
        ratio = max(mean / centre, centre / mean)
        near = [words for factor, words in _UNITS if abs(np.log(ratio / factor)) < np.log(1.12)]
        if near:
            text += (
                f"; {ratio:.3g} times {'less' if abs(mean) < abs(centre) else 'more'}, {near[0]}"
            )
    return f"{text}; check its units and how it codes gaps"


def findings(sites: Mapping[str, Mapping[str, Figures]], roles: Mapping[str, str]) -> list[Figures]:
    """Return warnings about sites that differ from the others, as site, column and text.

    `sites` has the figures of every column that a site has; `roles` names all columns.
    """
    found: list[Figures] = []
    if len(sites) < 2:
        return found
    for column in roles:
        own = {site: columns[column] for site, columns in sites.items() if column in columns}
        for site in sites.keys() - own.keys() if own else ():
            found.append(_warning(site, column, f"{site} has no column {column}"))
        kinds = {site: figures["kind"] for site, figures in own.items()}
        if len(set(kinds.values())) > 1:
            usual = max(set(kinds.values()), key=list(kinds.values()).count)
            for site, kind in kinds.items():
                if kind != usual:
                    text = f"{column} is read as {kind} at {site} and as {usual} elsewhere"
                    found.append(_warning(site, column, f"{text}; say which in [data.columns]"))
            continue
        found += _far(column, own)
        found += _lonely(column, own)
        found += _gaps(column, own)
    return sorted(found, key=lambda one: (list(roles).index(one["column"]), one["site"]))


def _warning(site: str, column: str, text: str) -> Figures:
    return {"site": site, "column": column, "text": text}


def _far(column: str, own: Mapping[str, Figures]) -> list[Figures]:
    numbers = {site: one for site, one in own.items() if one.get("mean") is not None}
    if len(numbers) < 2 or any(one["kind"] in ("boolean", "category") for one in own.values()):
        return []
    parts = [
        [[np.nan if one[key] is None else one[key]] for one in numbers.values()]
        for key in ("mean", "deviation", "count")
    ]
    marked = far_from_others(*parts)[:, 0]
    means = {site: float(one["mean"]) for site, one in numbers.items()}
    found = []
    for site, far in zip(numbers, marked, strict=True):
        if far:
            others = [mean for other, mean in means.items() if other != site]
            found.append(_warning(site, column, far_words(site, column, means[site], others)))
    return found[-1:] if len(numbers) == 2 else found  # of two nobody can say which


def _lonely(column: str, own: Mapping[str, Figures]) -> list[Figures]:
    """Warn of categories that one site alone has, and of spellings that differ from the others'."""
    named = {site: one["categories"] for site, one in own.items() if one.get("categories")}
    if len(named) < 2:
        return []
    holders: dict[str, list[str]] = {}
    for site, categories in named.items():
        for name in categories:
            holders.setdefault(name, []).append(site)
    alike: dict[str, list[str]] = {}
    for name in holders:
        alike.setdefault("".join(name.split()).casefold(), []).append(name)
    found = []
    for site in named:
        alone = [name for name, sites in holders.items() if sites == [site]]
        spelled = {
            name: other
            for name in alone
            for other in alike["".join(name.split()).casefold()]
            if other != name
        }
        for name, other in list(spelled.items())[:_MOST_NAMED]:
            text = f"{column}: {name!r} of {site} is spelled {other!r} elsewhere"
            found.append(_warning(site, column, f"{text}; they count as two categories"))
        rest = [name for name in alone if name not in spelled]
        if rest:
            listed = ", ".join(map(repr, rest[:_MOST_NAMED]))
            more = f" and {len(rest) - _MOST_NAMED} more" if len(rest) > _MOST_NAMED else ""
            text = f"{column}: only {site} has {listed}{more}"
            found.append(_warning(site, column, text))
    return found


def _gaps(column: str, own: Mapping[str, Figures]) -> list[Figures]:
    """Warn of a site with mostly gaps where the others have few."""
    shares = {
        site: one["missing"] / one["rows"]
        for site, one in own.items()
        if one["rows"] and one.get("missing") is not None
    }
    found = []
    for site, share in shares.items():
        others = [one for other, one in shares.items() if other != site]
        if others and share > _GAPS and float(np.median(others)) < share / 2:
            text = f"{column}: {share:.0%} of the rows of {site} have gaps, elsewhere "
            found.append(_warning(site, column, f"{text}{float(np.median(others)):.0%}"))
    return found


class ToldColumn(NamedTuple):
    """What is known of a column: its type, whether it is the target, and sums of its rows."""

    kind: str
    role: str  # feature or target
    sums: ColumnSums
    hidden: bool = False  # the number of gaps is above 0 and too small to be told


@dataclass(frozen=True)
class SiteSums:
    """What one site tells: rows of training, validation and test, and sums of its columns."""

    site: str
    rows: Mapping[str, int] = field(default_factory=dict)
    columns: Sums = field(default_factory=dict)
    tells: str = "all"  # all, pooled or none: what the site lets others see
    why: str = ""  # in words, where it tells nothing
    least: int = 1  # rows behind a count
    epsilon: float = 0.0  # of noise in the counts


_MOST_COLUMNS = 500  # numbers of an example that are described one by one
_YES, _NO = "yes", "no"


def column_sums(dataset: Dataset, rows: Rows) -> dict[str, ToldColumn]:
    """Sum up the columns of some rows, the target's last: of tables, images and text alike."""
    found: dict[str, ToldColumn] = {}
    for name, column in _features(dataset, rows).items():
        found[name] = ToldColumn(column.plan.kind, "feature", ColumnSums.of(column))
    if dataset.x.dtype == np.uint8 and dataset.x.ndim == 4 and len(rows):
        seen = moments(dataset, "channel", rows)
        each = zip(np.ravel(seen.mean), np.ravel(seen.squares), strict=True)
        for place, (mean, squares) in enumerate(each, 1):
            whole = ColumnSums(
                len(rows), 0, float(mean), float(squares) * len(rows) / seen.seen, False
            )
            found[f"channel {place}"] = ToldColumn("number", "feature", whole)
    for name, column in _targets(dataset, rows).items():
        free = name if name not in found else f"{name} (target)"
        found[free] = ToldColumn(column.plan.kind, "target", ColumnSums.of(column))
    return found


def _features(dataset: Dataset, rows: Rows) -> dict[str, RawColumn]:
    table = dataset.table
    if table is not None:
        return dict(table.taken(np.sort(rows)).columns)
    if dataset.x.ndim != 2 or not dataset.decodes or dataset.x.shape[1] > _MOST_COLUMNS:
        return {}
    names = dataset.features or tuple(f"feature {n}" for n in range(1, dataset.x.shape[1] + 1))
    own = np.asarray(dataset.x[np.sort(rows)]).astype(np.float64)
    return {name: RawColumn(ColumnPlan("number"), own[:, n]) for n, name in enumerate(names)}


def _targets(dataset: Dataset, rows: Rows) -> dict[str, RawColumn]:
    """Return the target's columns: classes, each label, the number, or time and event."""
    own = dataset.y[np.sort(rows)]
    kind = dataset.task.kind
    if dataset.sequential:
        return {}
    if kind == "classes":
        return {"label": RawColumn(ColumnPlan("category"), own, dataset.classes)}
    own = own.astype(np.float64)
    if kind == "labels":
        pairs = zip(dataset.classes, own.T, strict=True)
        return {name: RawColumn(ColumnPlan("boolean"), column) for name, column in pairs}
    if kind == "survival":
        return {
            "time": RawColumn(ColumnPlan("number"), own[:, 0]),
            "event": RawColumn(ColumnPlan("boolean"), own[:, 1]),
        }
    name = dataset.classes[0] if len(dataset.classes) == 1 else "target"
    return {name: RawColumn(ColumnPlan("number"), own)}


def column_figures(told: ToldColumn, least: int = 1) -> dict[str, Any]:
    """Return what is shown of a column: rows, gaps, and mean and quantiles or categories."""
    sums = told.sums
    found: dict[str, Any] = {
        "kind": told.kind,
        "rows": sums.rows,
        "count": sums.present,
        "missing": None if told.hidden else sums.missing,
        "least": least,
    }
    if told.kind in ("category", "boolean"):
        counts = dict(sums.counts)
        if told.kind == "boolean":
            zeros = sums.bins.get(0, 0)
            ones = sum(n for key, n in sums.bins.items() if key != 0)
            counts = {name: n for name, n in ((_NO, zeros), (_YES, ones)) if n}
        found["categories"] = dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))
        found["other"] = sums.present - sum(counts.values())
        return found
    known = sums.present > 0
    found["mean"] = sums.mean if known else None
    found["deviation"] = sums.deviation if known else None
    if sums.bins:
        found["quantiles"] = {str(key): sums.quantile(key / 100) for key in QUANTILES}
    return found


def description(title: str, part: str, sites: Sequence[SiteSums]) -> Description:
    """Return the statistics of each site and of all together, with warnings.

    Sites that are shown in sums only are in the pooled figures if there are at least two of them:
    of a single one the rest would give the figures by subtraction. No warning names them.
    """
    roles = _roles(sites)
    shown = [one for one in sites if one.tells == "all"]
    hidden = [one for one in sites if one.tells == "pooled"]
    counted = [*shown, *(hidden if len(hidden) > 1 else ())]
    warnings = site_warnings(shown)
    if len(hidden) == 1:
        text = f"{hidden[0].site} is shown in sums only, and is the only such site"
        warnings.append(_warning(hidden[0].site, "", f"{text}: it is in no figure"))
    return {
        "title": title,
        "part": part,
        "columns": [
            {"name": name, "role": role, "kind": _usual([one.columns for one in sites], name)}
            for name, role in roles.items()
        ],
        "sites": [
            {
                "site": one.site,
                "tells": one.tells,
                "why": one.why,
                "rows": dict(one.rows),
                "min_cell": one.least,
                "epsilon": one.epsilon,
                "columns": _site_figures(one) if one.tells == "all" else {},
            }
            for one in sites
        ],
        "pooled": {
            "sites": [one.site for one in counted],
            "rows": sum(_counted(one.rows, part) for one in counted),
            "columns": _pooled(
                [*(one.columns for one in shown), *_shared([one.columns for one in hidden])], roles
            ),
        },
        "warnings": warnings,
    }


def site_warnings(sites: Sequence[SiteSums]) -> list[Figures]:
    """Return all warnings, also about sites that are shown in sums only: for these sites alone.

    A warning compares with sites that are shown, so that it tells of no other.
    """
    shown = [one for one in sites if one.tells == "all"]
    found = _warnings_of(shown)
    for one in sites:
        if one.tells == "pooled":
            found += [own for own in _warnings_of([*shown, one]) if own["site"] == one.site]
    return found


def _warnings_of(sites: Sequence[SiteSums]) -> list[Figures]:
    return findings({one.site: _site_figures(one) for one in sites}, _roles(sites))


def _roles(sites: Sequence[SiteSums]) -> dict[str, str]:
    """Return all columns with their roles, features first."""
    roles: dict[str, str] = {}
    for one in sites:
        for name, column in one.columns.items():
            roles.setdefault(name, column.role)
    return {name: roles[name] for name in sorted(roles, key=lambda name: roles[name])}


def _site_figures(one: SiteSums) -> dict[str, Any]:
    return {name: column_figures(own, one.least) for name, own in one.columns.items()}


def _counted(rows: Mapping[str, int], part: str) -> int:
    return sum(n for name, n in rows.items() if part in (name, "all"))


def _shared(hidden: Sequence[Sums]) -> list[Sums]:
    """Keep columns and categories that at least two of these sites have.

    Of another the sum over them would be one site's own figure.
    """
    columns = Counter(name for own in hidden for name in own)
    names = Counter(
        (name, one) for own in hidden for name, column in own.items() for one in column.sums.counts
    )
    found: list[Sums] = []
    for own in hidden if len(hidden) > 1 else ():
        kept = {}
        for name, column in own.items():
            if columns[name] < 2:
                continue
            counts = {one: n for one, n in column.sums.counts.items() if names[name, one] > 1}
            kept[name] = column._replace(sums=replace(column.sums, counts=counts))
        found.append(kept)
    return found


def _usual(sites: Sequence[Sums], name: str) -> str:
    kinds = [columns[name].kind for columns in sites if name in columns]
    return max(dict.fromkeys(kinds), key=kinds.count)


def _pooled(sites: Sequence[Sums], names: Mapping[str, str]) -> dict[str, Any]:
    """Merge the sums of the sites in which a column is of its usual type."""
    found = {}
    for name in names:
        usual = _usual(sites, name) if any(name in own for own in sites) else ""
        held = [columns[name] for columns in sites if name in columns]
        own = [column for column in held if column.kind == usual]
        if not own:
            continue
        total = own[0].sums
        for other in own[1:]:
            total = total.merged(other.sums)
        found[name] = column_figures(own[0]._replace(sums=total, hidden=False))
    return found
