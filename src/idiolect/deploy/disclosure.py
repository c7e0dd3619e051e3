"""What a site tells of its columns: no small counts, no extremes, and noise if it wants some.

Sums of columns leave a site in two cases: for a description (`idiolect describe`), and when a run
on a table begins, for the encoder that all sites share. In both no count of fewer than `min_cell`
rows leaves. What that does and does not protect: docs/describe.md.
"""

import dataclasses
import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from idiolect.aggregation import noise
from idiolect.core.checkpoint import write_whole
from idiolect.data import Dataset
from idiolect.data.column_sums import ColumnSums, bin_numbers
from idiolect.data.dataset import Rows
from idiolect.data.description import SiteSums, ToldColumn, column_sums
from idiolect.deploy import node_records, protocol
from idiolect.deploy.limits import SitePolicy, refuse_over_budget
from idiolect.deploy.node_records import ReleaseLog
from idiolect.deploy.processes import REMARK as REMARK
from idiolect.deploy.protocol import Message, Refused
from idiolect.deploy.site import NodeSettings, load_node_data
from idiolect.errors import DataError
from idiolect.version import VERSION

log = logging.getLogger("idiolect.node")

DELTA = 1e-6
_MOST_REMARKS = 20
_MOST_APART = 500  # numbers of an example that are compared one by one
_COARSE = 1024  # bins of a histogram that noise takes together: four in an octave
_MOST_CATEGORIES = 1000  # of a column that are told
_MOST_COLUMNS = 20_000
_LONGEST = 400  # characters of a name
_LARGEST = 1e15  # no measurement


def protected(column: ToldColumn, least: int) -> ToldColumn:
    """Return what may be told of a column where no count of under `least` rows may.

    Rare categories are left out, and the smallest other one with them if their number could be
    worked out from the rest; values of a number are told in groups; a number of gaps under `least`
    is told as `least`, at the cost of the most frequent value. Where under `least` rows hold a
    value at all, the column is told as empty.
    """
    sums = column.sums
    if least <= 1:
        return column
    if sums.present < least:
        return column._replace(sums=ColumnSums(sums.rows, sums.rows))
    few = 0 < sums.missing < least
    spare = least - sums.missing if few else 0
    if spare >= sums.present:
        return column._replace(sums=ColumnSums(sums.rows, sums.rows))
    counts, bins = dict(sums.counts), dict(sums.bins)
    if column.kind == "category":
        counts = _common(counts, sums.present, least)
        _take(counts, spare)
        told = dataclasses.replace(sums, missing=sums.missing + spare, counts=counts)
        return column._replace(sums=told, hidden=few)
    if column.kind == "boolean":
        rare = bool(bins) and min(bins.values()) < least
        if not rare and not spare:
            return column
        if rare:  # under `least` rows are told as `least`, of neither value
            usual = max(bins, key=lambda key: bins[key])
            bins = {usual: sums.present - least} if sums.present >= 2 * least else {}
        _take(bins, spare)
        return column._replace(sums=_of_bins(sums, sums.missing + spare, bins), hidden=few)
    bins = _grouped(sums, least)
    _take(bins, spare)
    present = sums.present - spare
    told = dataclasses.replace(
        sums,
        missing=sums.missing + spare,
        squares=sums.squares * present / sums.present,
        bins=bins,
    )
    return column._replace(sums=told, hidden=few)


def _common(counts: Mapping[str, int], present: int, least: int) -> dict[str, int]:
    """Keep categories of at least so many rows; what is left out must be as many in all, or none.

    Else the one that was left out could be worked out from the number of rows.
    """
    order = sorted(counts, key=lambda name: (-counts[name], name))
    kept = [name for name in order if counts[name] >= least][:_MOST_CATEGORIES]
    while kept and 0 < present - sum(counts[name] for name in kept) < least:
        kept.pop()
    return {name: counts[name] for name in sorted(kept)}


def _grouped(sums: ColumnSums, least: int) -> dict[int, int]:
    """Put the values of neighbouring bins together until each group has so many, at their mean.

    A bin that has enough by itself stays. So no extreme is told, and no value of few.
    """
    if not sums.bins:
        return {}
    groups: list[list[int]] = [[]]
    held = 0  # rows of the last group
    for key in sorted(sums.bins):
        if held >= least:
            groups.append([])
            held = 0
        groups[-1].append(key)
        held += sums.bins[key]
    if len(groups) > 1 and held < least:
        last = groups.pop()
        groups[-1] += last
    counts = [sum(sums.bins[key] for key in group) for group in groups]
    means = [
        sum(_bin_value(key, sums.whole) * sums.bins[key] for key in group) / count
        if len(group) > 1
        else 0.0
        for group, count in zip(groups, counts, strict=True)
    ]
    middles = bin_numbers(np.array(means)).tolist()
    told: dict[int, int] = {}
    for group, count, middle in zip(groups, counts, middles, strict=True):
        key = group[0] if len(group) == 1 else int(middle)
        told[key] = told.get(key, 0) + count
    return told


def _bin_value(key: int, whole: bool) -> float:
    """Return the number that stands for a bin of a histogram."""
    return ColumnSums(1, 0, whole=whole, bins={key: 1}).quantile(0.5)


def _take(counts: "dict[Any, int]", spare: int) -> None:
    """Take some rows from the largest count."""
    while spare > 0 and counts:
        largest = max(counts, key=lambda key: counts[key])
        taken = min(spare, counts[largest])
        counts[largest] -= taken
        spare -= taken
        if not counts[largest]:
            del counts[largest]


def _of_bins(sums: ColumnSums, missing: int, bins: Mapping[int, int]) -> ColumnSums:
    """Return sums whose mean and deviation come from the bins alone."""
    counts = np.array(list(bins.values()), np.float64)
    values = np.array([_bin_value(key, sums.whole) for key in bins], np.float64)
    total = max(float(counts.sum()), 1.0)
    mean = float((counts * values).sum() / total)
    squares = float((counts * (values - mean) ** 2).sum())
    present = sums.rows - missing
    return ColumnSums(
        sums.rows, missing, mean, squares * present / total, sums.whole, dict(bins), {}
    )


# Noise.


def noisy(
    columns: Mapping[str, ToldColumn], epsilon: float, stream: noise.NoiseStream
) -> dict[str, ToldColumn]:
    """Return columns whose counts carry noise, and whose means come from these counts.

    One row more or less of a value changes two counts of each of the C columns by one, so whole
    numbers of a discrete Laplace distribution of scale 2C / epsilon hide it. Which categories and
    bins there are would tell of rows too: those are told whose noisy count is above
    1 + scale ln(C / delta), but for the two values of a boolean and gaps, which anyone knows.
    """
    scale = 2 * max(1, len(columns)) / epsilon
    least = 1 + scale * math.log(max(1, len(columns)) / DELTA)
    return {name: _noisy(column, scale, least, stream) for name, column in columns.items()}


def _noisy(column: ToldColumn, scale: float, least: float, stream: noise.NoiseStream) -> ToldColumn:
    sums = dataclasses.replace(column.sums, whole=False)  # which is a fact about every row
    cells: dict[Any, int] = dict(sums.counts)
    if column.kind == "boolean":
        one = int(bin_numbers(np.ones(1))[0])
        cells, least = {0: sums.bins.get(0, 0), one: sums.bins.get(one, 0)}, 1.0
    elif column.kind != "category":
        cells = {}
        for key, count in sums.bins.items():
            wide = (
                int(math.copysign(abs(key) // _COARSE * _COARSE + _COARSE // 2, key)) if key else 0
            )
            cells[wide] = cells.get(wide, 0) + count
    drawn = stream.laplaces(len(cells) + 1, scale).astype(np.int64).tolist()
    missing = min(max(0, sums.missing + drawn[-1]), sums.rows)
    noised = {key: count + own for (key, count), own in zip(cells.items(), drawn, strict=False)}
    told = {key: count for key, count in noised.items() if count >= least}
    over = sum(told.values()) / max(1, sums.rows - missing)
    if over > 1:  # no more than there are
        told = {key: int(count / over) for key, count in told.items() if int(count / over)}
    if column.kind == "category":
        return column._replace(sums=ColumnSums(sums.rows, missing, counts=told), hidden=False)
    if not told:
        return column._replace(sums=ColumnSums(sums.rows, sums.rows), hidden=False)
    return column._replace(sums=_of_bins(sums, missing, told), hidden=False)


class DescriptionLog:
    """What descriptions a site has given, on its own disk: the same rows get the same answer."""

    def __init__(self, home: Path, policy: SitePolicy) -> None:
        self._folder = home / "descriptions"
        self._policy = policy

    def refuse_difference(self, dataset: Dataset, rows: Rows) -> None:
        """Refuse statistics of rows that were told of before, of which few cells differ now.

        The difference of the two would tell of these cells: values that were changed, or that an
        experiment's columns call gaps this time. Other sets of rows: `ReleaseLog.divide`.
        """
        held = np.zeros(int(rows.max(initial=-1)) + 1, bool)
        held[rows] = True
        folder = self._folder / protocol.digest(np.packbits(held).tobytes())
        new: dict[Path, bytes] = {}
        for name, own in cell_digests(dataset, np.sort(rows)).items():
            column = protocol.digest(name.encode())
            for path in sorted(folder.glob(f"{column}-*.cells")):
                other = np.frombuffer(path.read_bytes(), np.uint16)
                changed = _changed(own, other)
                if 0 < changed < self._policy.min_examples:
                    raise self._policy.refusal(
                        "min_examples",
                        f"statistics of rows told of before, {changed} of whose cells in column "
                        f"{name!r} differ now (if that is no secret, remove {folder})",
                    )
            new[folder / f"{column}-{protocol.digest(own.tobytes())}.cells"] = own.tobytes()
        for path, content in new.items():
            if not path.exists():
                write_whole(path, content, private=True)

    def answer(
        self, columns: Mapping[str, ToldColumn], elsewhere: float = 0.0
    ) -> dict[str, ToldColumn]:
        """Return what is told of these columns by the site's policy; noise is drawn once.

        `elsewhere`: the epsilon that was spent over all runs and descriptions so far.
        """
        policy = self._policy
        if not policy.describe_epsilon:
            return {name: protected(own, policy.min_cell) for name, own in columns.items()}
        exact = json.dumps(_plain(columns), sort_keys=True).encode()
        epsilon = policy.describe_epsilon
        path = self._folder / f"{protocol.digest(exact, str(epsilon).encode())}.noisy"
        if path.exists():
            return read_columns(json.loads(path.read_text())["columns"])
        spent = epsilon + sum(
            json.loads(other.read_text())["epsilon"] for other in self._folder.glob("*.noisy")
        )
        if spent > policy.max_epsilon:
            raise policy.refusal("max_epsilon", f"descriptions would spend epsilon = {spent:.4g}")
        refuse_over_budget(policy, elsewhere, epsilon)
        told = noisy(columns, epsilon, noise.from_system())
        told = {name: protected(own, policy.min_cell) for name, own in told.items()}
        kept = json.dumps({"epsilon": epsilon, "columns": _plain(told)}).encode()
        write_whole(path, kept, private=True)
        return told


def _changed(one: np.ndarray, two: np.ndarray) -> int:
    """Count the cells that differ, wherever they stand if there are many different ones."""
    moved = int((one != two).sum()) if len(one) == len(two) else max(len(one), len(two))
    if 4 * len(np.unique(one)) < len(one):
        return moved  # such columns are nearly alike by chance, in any order
    counts = [np.bincount(part, minlength=1 << 16) for part in (one, two)]
    return min(moved, int(np.abs(counts[0] - counts[1]).sum()))


def cell_digests(dataset: Dataset, rows: Rows) -> dict[str, np.ndarray]:
    """Return 16 bits of a digest of every cell by column, the same whatever its column's type."""
    found: dict[str, np.ndarray] = {}
    flat = np.asarray(dataset.x[rows]).reshape(len(rows), -1)
    if dataset.table is not None:
        for name, column in dataset.table.columns.items():
            values = column.values[rows]
            found[name] = (
                _digests(_codes(column.names)[values])  # a missing cell has code -1: the last
                if column.plan.kind == "category"
                else _digests(_bits(values))
            )
    elif flat.shape[1] <= _MOST_APART:
        for place in range(flat.shape[1]):
            found[str(place)] = _digests(_bits(flat[:, place]))
    else:
        whole = np.zeros(len(rows), np.uint64)
        for place in range(flat.shape[1]):
            whole = _mixed(whole, _bits(flat[:, place]))
        found["x"] = _digests(whole)
    y = dataset.y[rows].reshape(len(rows), -1)
    for place in range(y.shape[1]):
        classed = dataset.task.kind == "classes"
        own = _codes(dataset.classes)[y[:, place]] if classed else _bits(y[:, place])
        found[f"label {place}"] = _digests(own)
    return found


def _codes(names: Sequence[str]) -> np.ndarray:
    """Return a number for each name, and one for a gap; a name that is a number is that number."""
    found = []
    for name in names:
        try:
            found.append(int(_bits(np.array([float(name)]))[0]))
        except ValueError:
            found.append(int(protocol.digest(name.encode())[:16], 16))
    return np.array([*found, int(_bits(np.array([np.nan]))[0])], np.uint64)


def _bits(values: np.ndarray) -> np.ndarray:
    """Return numbers as bits, all gaps alike."""
    plain = np.asarray(values, np.float64) + 0.0  # -0 is 0
    return np.where(np.isnan(plain), np.nan, plain).view(np.uint64)


def _digests(bits: np.ndarray) -> np.ndarray:
    return (_mixed(np.zeros(len(bits), np.uint64), bits) >> np.uint64(48)).astype(np.uint16)


def _mixed(found: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Mix a column into digests (splitmix64's finaliser)."""
    with np.errstate(over="ignore"):
        state = found * np.uint64(0x9E3779B97F4A7C15) + own + np.uint64(1)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: np.ndarray = state ^ (state >> np.uint64(31))
    return mixed


# A node's answer.


def described(site: NodeSettings, message: Message, releases: ReleaseLog) -> bytes:
    """Answer a question for statistics by the site's policy, or refuse it."""
    if message.field("version", str) != VERSION:
        raise Refused("version", f"the server runs {message.head['version']}, this node {VERSION}")
    policy = site.policy
    if policy.describe == "none":
        raise Refused("describe", "describe is 'none' in this site's policy")
    if message.field("clients", int) < policy.min_sites:
        raise policy.refusal("min_sites", f"a description of {message.head['clients']} sites")
    run = node_records.run_name(message.field("run", str))
    text, place = message.field("experiment", str), message.field("place", int)
    held = load_node_data(site, text, place, describing=True).federations[0]
    rows = held.train[0]
    if len(rows) < max(policy.min_examples, policy.min_cell):
        raise policy.refusal("min_examples", f"a description of {len(rows)} rows")
    node_records.claim_run(site.home, run, message.field("submitter", str))
    releases.begin(run)
    releases.divide([rows])
    log_of = DescriptionLog(site.home, policy)
    log_of.refuse_difference(held.dataset, rows)
    told = log_of.answer(column_sums(held.dataset, rows), releases.spent())
    sizes = {name: len(getattr(held, name)[0]) for name in ("train", "val", "test")}
    sums = SiteSums(
        site.name, sizes, told, policy.describe, "", policy.min_cell, policy.describe_epsilon
    )
    log.info("described %d columns of %d rows in run %s", len(told), len(rows), run)
    return protocol.pack("yes", site_head(sums), pack_columns(told))


def log_remarks(to: logging.Logger, given: Any) -> None:
    """Log what the server says about this site's data; a few lines, of letters only."""
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise Refused("format", "remarks of another form")
    for one in given[:_MOST_REMARKS]:
        words = "".join(letter if letter.isprintable() else "?" for letter in one[:_LONGEST])
        to.warning("%s%s", REMARK, words)


# Messages.


def _plain(columns: Mapping[str, ToldColumn]) -> dict[str, Any]:
    return {
        name: {"kind": own.kind, "role": own.role, "hidden": own.hidden, **own.sums.to_json()}
        for name, own in columns.items()
    }


def pack_columns(columns: Mapping[str, ToldColumn]) -> dict[str, Any]:
    """Write the sums of columns as a tensor: the text may be longer than a message's head."""
    import torch

    text = json.dumps(_plain(columns), separators=(",", ":")).encode()
    return {"columns": torch.frombuffer(bytearray(text or b" "), dtype=torch.uint8)}


def unpack_columns(message: Message) -> dict[str, ToldColumn]:
    """Read what `pack_columns` wrote, trusting nothing in it."""
    import torch

    found = message.leaves.get("columns")
    if found is None or found.dtype != torch.uint8 or found.dim() != 1:
        raise Refused("statistics", "sums of columns are missing")
    try:
        return read_columns(json.loads(found.numpy().tobytes()))
    except (ValueError, RecursionError) as error:
        raise Refused("statistics", f"sums of columns cannot be read: {error}") from error


def read_columns(given: Any) -> dict[str, ToldColumn]:
    """Read sums of columns; refuse what no table has."""
    if not isinstance(given, dict) or len(given) > _MOST_COLUMNS:
        raise Refused("statistics", "sums of columns are of another form, or of too many")
    return {name: _read_column(name, own) for name, own in given.items()}


def _read_column(name: str, given: Any) -> ToldColumn:
    if not isinstance(given, dict) or not 0 < len(name) <= _LONGEST:
        raise Refused("statistics", "a column of another form")
    own = dict(given)
    kind, role, hidden = own.pop("kind", None), own.pop("role", None), own.pop("hidden", None)
    if (
        kind not in ("number", "boolean", "category", "date")
        or role not in ("feature", "target")
        or not isinstance(hidden, bool)
    ):
        raise Refused("statistics", f"column {name[:40]!r} is of an unknown type")
    try:
        sums = ColumnSums.from_json(own)
    except DataError as error:
        raise Refused("statistics", f"column {name[:40]!r}: {error}") from error
    if (
        too_large(sums)
        or len(sums.counts) > _MOST_CATEGORIES
        or len(sums.bins) > 2 * max(1, sums.rows)
    ):
        raise Refused("statistics", f"column {name[:40]!r} has impossible sums")
    if any(len(one) > _LONGEST for one in sums.counts):
        raise Refused("statistics", f"column {name[:40]!r} has a category of too many letters")
    return ToldColumn(kind, role, sums, hidden)


def too_large(sums: ColumnSums) -> bool:
    """Say whether numbers are such that a server takes their sums for a forgery."""
    return abs(sums.mean) > _LARGEST or sums.squares > sums.rows * _LARGEST**2


def site_head(sums: SiteSums) -> dict[str, Any]:
    """Return what stands beside the columns in a site's answer."""
    return {
        "rows": dict(sums.rows),
        "tells": sums.tells,
        "least": sums.least,
        "epsilon": float(sums.epsilon),
    }


def read_site(site: str, message: Message) -> SiteSums:
    """Read a site's answer, trusting nothing in it."""
    rows: Any = message.head.get("rows")
    least, epsilon = message.field("least", int), message.field("epsilon", float)
    tells = message.field("tells", str)
    good = (
        isinstance(rows, dict)
        and set(rows) == {"train", "val", "test"}
        and all(type(n) is int and 0 <= n < 1 << 53 for n in rows.values())
        and tells in ("all", "pooled")
        and least >= 1
        and 0 <= epsilon < math.inf
    )
    if not good:
        raise Refused("statistics", f"{site} described its rows in another form")
    columns = unpack_columns(message)
    for name, column in columns.items():
        if column.sums.rows != rows["train"]:
            raise Refused("statistics", f"{site}: {name[:40]!r} has other rows than it stated")
    return SiteSums(site, rows, columns, tells, "", least, epsilon)
