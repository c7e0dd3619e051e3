"""Partition and split in one call: from a dataset to a federation."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from idiolect.data.arrays import Rows, Seed, extended
from idiolect.data.dataset import Dataset, fitted
from idiolect.data.federation import Federation
from idiolect.data.partition import DEFAULT_POOL, PARTITIONS
from idiolect.data.split import Parts, check_ratios
from idiolect.data.split import split as split_rows
from idiolect.data.text.vocabulary import encoded, encoded_as
from idiolect.errors import ConfigError, DataError

# Stages draw from seeds of their own, so that changing one leaves the other's draws alone.
_PARTITION, _SPLIT = 1, 2


def federate(
    dataset: Dataset,
    partition: str = "iid",
    seed: int = 0,
    split: Sequence[float] | str = (0.6, 0.2, 0.2),
    *,
    pool: str | None = None,
    min_size: int = 1,
    drop: bool = False,
    stratify: bool = False,
    ordered: bool = False,
    val: float = 0.2,
    public: Dataset | None = None,
    first: int = 0,
    **options: Any,
) -> Federation:
    """Divide a dataset among clients, and each client's rows into train, val and test.

    split="file" keeps the rows of the source's test file as test and takes `val`, a share of the
    others, for validation. A client below min_size is an error, or is left out if `drop`. `first`
    is the number of the first client, where these are not all. `ordered` splits each client's rows
    in their order, first train, last test, as time would. Text is coded by the vocabulary of the
    training rows, and a normalisation that needs statistics has theirs; public examples that wait
    for statistics are rows of the same source and get the same.
    """
    known = _check(partition, options)
    _check_sequences(dataset, partition, stratify, public)
    if seed < 0:
        raise ConfigError(f"seed is {seed}; expected 0 or more")
    if "min_size" in known:
        options["min_size"] = min_size
    source = pool or DEFAULT_POOL[partition]
    rows = dataset.pool(source)
    columns = dataset.y if not dataset.sequential else np.zeros(len(dataset), np.int64)
    names = tuple[str, ...]()
    if partition == "natural":
        if dataset.clients is None:
            raise DataError(
                f"dataset '{dataset.name}' has no client column, which partition natural needs; "
                f"choose another partition, such as dirichlet"
            )
        columns, names = dataset.clients, dataset.client_names
    held = PARTITIONS[partition](columns, extended(seed, _PARTITION), rows, **options)
    names = names or tuple(f"client {i}" for i in range(len(held)))
    # A source may name clients that have no row in it (or none in this pool).
    held += [np.empty(0, np.int64)] * (len(names) - len(held))
    held, names, left_out = _without_small(held, names, min_size, drop)
    if isinstance(split, str):
        parts = _split_by_file(
            dataset, held, split, val, extended(seed, _SPLIT), stratify, ordered, first
        )
    else:
        parts = split_rows(
            held,
            dataset.y,
            split,
            seed=extended(seed, _SPLIT),
            stratify=stratify,
            ordered=ordered,
            first=first,
        )
    dataset = fitted(dataset, np.concatenate(parts[0]))
    if public is not None and public.unfitted:
        public = replace(public, shift=dataset.shift, scale=dataset.scale, unfitted="")
    if dataset.vocabulary:
        dataset = encoded(dataset, parts[0])
    if public is not None and public.vocabulary:
        public = encoded_as(public, dataset.words)
    settings = {k: v for k, v in options.items() if k != "min_size" or min_size != 1}
    words = [f"{dataset.name}, {partition}"]
    words += [f"{key}={value}" for key, value in settings.items()]
    words += [f"split={split if isinstance(split, str) else '/'.join(f'{s:g}' for s in split)}"]
    words += ["in order"] * ordered
    words += [f"pool={source}", f"seed={seed}"] + (
        [f"{left_out} clients left out"] * bool(left_out)
    )
    return Federation(dataset, *parts, names, ", ".join(words), public)


def _check(partition: str, options: dict[str, Any]) -> set[str]:
    """Refuse a partition or an option that does not exist; return the options that do."""
    if partition not in PARTITIONS:
        raise ConfigError(
            f"partition '{partition}' is unknown; expected one of {', '.join(PARTITIONS)}"
        )
    known = set(inspect.signature(PARTITIONS[partition]).parameters) - {"seed", "rows"}
    known -= {"labels", "codes"}
    wrong = sorted(set(options) - known)
    if wrong:
        raise ConfigError(
            f"partition '{partition}' has no option '{wrong[0]}'; it has "
            f"{', '.join(sorted(known)) or 'none'}"
        )
    return known


def _check_sequences(
    dataset: Dataset, partition: str, stratify: bool, public: Dataset | None
) -> None:
    """Refuse to divide by label what has a label for each word, or to exchange so many."""
    if dataset.sequential and public is not None:
        raise ConfigError(
            f"dataset '{dataset.name}' has a label for each word, and methods that use public "
            "examples exchange one prediction for each; leave data.public out"
        )
    if dataset.sequential and (partition not in ("iid", "natural") or stratify):
        what = "stratify" if stratify else f"partition {partition}"
        raise ConfigError(
            f"dataset '{dataset.name}' has a label for each word, so there is none to divide rows "
            f"by, which {what} does; use partition natural or iid, without stratify"
        )


def _without_small(
    held: list[Rows], names: tuple[str, ...], min_size: int, drop: bool
) -> tuple[list[Rows], tuple[str, ...], int]:
    small = [client for client, rows in enumerate(held) if len(rows) < max(min_size, 1)]
    if not small:
        return held, names, 0
    if not drop:
        raise DataError(
            f"{names[small[0]]} has {len(held[small[0]])} rows ({len(small)} of {len(held)} "
            f"clients are below min_size={max(min_size, 1)}); use fewer clients, a lower min_size, "
            "or drop=True to leave them out"
        )
    kept = sorted(set(range(len(held))) - set(small))
    if not kept:
        raise DataError(f"no client has min_size={min_size} rows; lower min_size")
    return [held[i] for i in kept], tuple(names[i] for i in kept), len(small)


def _split_by_file(
    dataset: Dataset,
    held: list[Rows],
    split: str,
    val: float,
    seed: Seed,
    stratify: bool,
    ordered: bool,
    first: int,
) -> Parts:
    if split != "file":
        raise ConfigError(f"split '{split}' is unknown; expected three shares, or file")
    if dataset.origin is None:
        raise DataError(
            f"dataset '{dataset.name}' has no test file of its own, which split=file needs; give "
            "three shares, such as (0.6, 0.2, 0.2)"
        )
    ratios = (1 - val, val, 0.0)
    check_ratios(ratios)
    origin = dataset.origin
    lessons = [rows[origin[rows] == 0] for rows in held]
    test = tuple(rows[origin[rows] == 1] for rows in held)
    train, validation, _ = split_rows(
        lessons, dataset.y, ratios, seed=seed, stratify=stratify, ordered=ordered, first=first
    )
    return train, validation, test
