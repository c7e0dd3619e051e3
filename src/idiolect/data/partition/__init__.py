"""Partitions: pure functions (candidates, options) -> the rows of each client."""

from collections.abc import Callable

from idiolect.data.dataset import Rows
from idiolect.data.partition.general import classes, dirichlet, iid, natural, shards
from idiolect.data.partition.papers import (
    ktpfl_all,
    ktpfl_two,
    persfl_ds1,
    persfl_ds2,
    persfl_ds3,
    pfml_pairs,
    pfml_three,
)
from idiolect.data.partition.pfllib_generators import pfllib

Partition = Callable[..., list[Rows]]

PARTITIONS: dict[str, Partition] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "shards": shards,
    "natural": natural,
    "classes": classes,
    "persfl-ds1": persfl_ds1,
    "persfl-ds2": persfl_ds2,
    "persfl-ds3": persfl_ds3,
    "pfml-pairs": pfml_pairs,
    "pfml-three": pfml_three,
    "ktpfl-two": ktpfl_two,
    "ktpfl-all": ktpfl_all,
    "pfllib": pfllib,
}

# Which rows are assigned unless `pool` says otherwise: all, in PersFL those of the training file.
DEFAULT_POOL: dict[str, str] = {
    **dict.fromkeys(PARTITIONS, "all"),
    "persfl-ds1": "train",
    "persfl-ds2": "train",
}

# The shares of train, val and test unless `split` says otherwise.
USUAL_SPLIT = (0.6, 0.2, 0.2)
DEFAULT_SPLIT: dict[str, tuple[float, float, float]] = {
    **dict.fromkeys(PARTITIONS, USUAL_SPLIT),
    "pfllib": (0.75, 0.0, 0.25),
}

# These draw the order of a client's rows themselves: training rows first, test rows last.
DRAWN_IN_ORDER = frozenset({"pfllib"})


def describe(name: str) -> str:
    """Take the first line of a partition's docstring."""
    return (PARTITIONS[name].__doc__ or "").strip().splitlines()[0]
