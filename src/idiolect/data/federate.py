"""Partition and split in one call: from a dataset to a federation."""

import hashlib
import inspect
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

import numpy as np

from idiolect.data.dataset import (
    Dataset,
    Rows,
    check_options,
    check_value,
    encoded_by,
    fitted,
    normalised,
)
from idiolect.data.federation import Federation
from idiolect.data.partition import DEFAULT_POOL, DEFAULT_SPLIT, DRAWN_IN_ORDER, PARTITIONS
from idiolect.data.partition.general import Candidates, Seed
from idiolect.data.text import encoded, encoded_as
from idiolect.errors import ConfigError, DataError

# Stages draw from seeds of their own, so that changing one leaves the other's draws alone.
_PARTITION, _SPLIT = 1, 2

_UNLABELLED = ("iid", "natural")  # partitions that look at no label

Parts = tuple[tuple[Rows, ...], tuple[Rows, ...], tuple[Rows, ...]]


def federate(
    dataset: Dataset,
    partition: str = "iid",
    seed: int = 0,
    split: Sequence[float] | str | None = None,
    *,
    pool: str | None = None,
    min_size: int = 1,
    drop: bool = False,
    stratify: bool = False,
    ordered: bool = False,
    val: float = 0.2,
    public: Dataset | None = None,
    first: int = 0,
    by_name: bool = False,
    **options: Any,
) -> Federation:
    """Divide a dataset among clients, and each client's rows into train, val and test.

    Without `split` they are the partition's shares, for most 0.6, 0.2 and 0.2.
    split="file" keeps the rows of the source's test file as test and takes `val`, a share of the
    others, for validation. A client below min_size is an error, or is left out if `drop`. `first`
    is the number of the first client, where these are not all; with `by_name` rows are drawn by a
    client's name instead of its number. `ordered` splits each client's rows
    in their order, first train, last test, as time would. Text is encoded by the vocabulary of the
    training rows, and a normalisation that needs statistics takes them from these rows; public
    examples without statistics yet are rows of the same source and get the same.
    """
    check_value("partition", partition, PARTITIONS)
    parameters = inspect.signature(PARTITIONS[partition]).parameters.values()
    known = {option.name for option in parameters if option.kind is option.KEYWORD_ONLY}
    check_options(f"partition '{partition}'", options, known)
    _check_sequences(dataset, partition, stratify, public)
    if not isinstance(seed, Integral) or seed < 0:
        raise ConfigError(f"seed is {seed!r}; expected a whole number, 0 or more")
    if "min_size" in known:
        options["min_size"] = min_size
    source = pool or DEFAULT_POOL[partition]
    split = DEFAULT_SPLIT[partition] if split is None else split
    if partition in DRAWN_IN_ORDER:
        if stratify:
            raise ConfigError(f"partition {partition} draws who tests what itself; drop stratify")
        ordered = True
    rows = dataset.pool(source)
    column = column_of(dataset)
    names = tuple[str, ...]()
    if partition == "natural":
        if dataset.clients is None:
            raise DataError(
                f"dataset '{dataset.name}' has no client column, which partition natural needs; "
                f"choose another partition, such as dirichlet"
            )
        column, names = dataset.clients, dataset.client_names
    held = PARTITIONS[partition](Candidates(column, rows, (seed, _PARTITION)), **options)
    names = names or tuple(f"client {i}" for i in range(len(held)))
    # A source may name clients that have no row in it (or none in this pool).
    held += [np.empty(0, np.int64)] * (len(names) - len(held))
    held, names, left_out = _without_small(held, names, min_size, drop)
    draws = (seed, _SPLIT)
    keys = [_name_key(name) if by_name else first + n for n, name in enumerate(names)]
    if isinstance(split, str):
        parts = _split_by_file(dataset, held, split, val, draws, stratify, ordered, keys)
    else:
        parts = split_rows(held, column_of(dataset), split, draws, stratify, ordered, keys)
    dataset = fitted(dataset, np.concatenate(parts[0]))
    if public is not None and public.unfitted:
        if dataset.encoder is not None:
            public = encoded_by(public, dataset.encoder)
        else:
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
    words += [f"pool={source}", f"seed={seed}"]
    words += [f"{left_out} clients left out"] * bool(left_out)
    return Federation(dataset, *parts, names, ", ".join(words), public)


def federate_by_clients(
    dataset: Dataset,
    partition: str | None = None,
    seed: int = 0,
    split: Sequence[float] | str | None = None,
    normalise: str | None = None,
    own: bool = True,
    **options: Any,
) -> Federation:
    """Divide a dataset by its own clients; where it has none, a partition has to be named.

    Clients of somebody's `own` data are divided by their names, as an experiment file does it: the
    rows that train there must not test here.
    """
    if partition is None and dataset.clients is None:
        raise ConfigError(
            f"{dataset.name} does not say whose a row is; name the column with client=..., or "
            'divide it yourself, such as partition="iid", clients=5'
        )
    if normalise is not None:
        dataset = normalised(dataset, normalise)
    chosen = partition or "natural"
    options.setdefault("by_name", own and chosen == "natural")
    return federate(dataset, chosen, seed, split, **options)


def column_of(dataset: Dataset) -> Rows:
    """Return a class for each row, the same for all where rows have none."""
    found = dataset.strata
    return np.zeros(len(dataset), np.int64) if found is None else found


def _check_sequences(
    dataset: Dataset, partition: str, stratify: bool, public: Dataset | None
) -> None:
    """Refuse partitions by label and public examples where each word has a label."""
    if dataset.sequential and public is not None:
        raise ConfigError(
            f"dataset '{dataset.name}' has a label for each word, and methods that use public "
            "examples exchange one prediction for each; leave data.public out"
        )
    if partition in _UNLABELLED and not stratify:
        return
    what = "stratify" if stratify else f"partition {partition}"
    if dataset.strata is None:
        why = "a label for each word" if dataset.sequential else "numbers as labels"
        raise ConfigError(
            f"dataset '{dataset.name}' has {why}, so there is no class to divide rows by, which "
            f"{what} does; use partition natural or iid, without stratify"
        )
    if dataset.task.kind != "classes" and partition not in _UNLABELLED:
        raise ConfigError(
            f"dataset '{dataset.name}' has task {dataset.task.kind}, and {what} divides rows by "
            "class; use partition natural or iid"
        )


def _without_small(
    held: list[Rows], names: tuple[str, ...], min_size: int, drop: bool
) -> tuple[list[Rows], tuple[str, ...], int]:
    """Leave out clients below min_size, or refuse them; return also how many there were."""
    least = max(min_size, 1)
    kept = [client for client, rows in enumerate(held) if len(rows) >= least]
    left_out = len(held) - len(kept)
    if left_out and not drop:
        small = next(client for client, rows in enumerate(held) if len(rows) < least)
        raise DataError(
            f"{names[small]} has {len(held[small])} rows ({left_out} of {len(held)} clients are "
            f"below min_size={least}); use fewer clients, a lower min_size, or drop=True to leave "
            "them out"
        )
    if not kept:
        raise DataError(f"no client has min_size={min_size} rows; lower min_size")
    return [held[i] for i in kept], tuple(names[i] for i in kept), left_out


def part_sizes(total: int, ratios: Sequence[float]) -> tuple[int, int, int]:
    """Compute the exact sizes of train, val and test for this many rows.

    Test rounds up, as in the splits PersFL was run with (its DS-3 has a test size of 415 for 2071
    rows, which the largest remainder misses), but never takes a client's only row; train and val
    share the rest by the largest remainder, train first.
    """
    train, val, test = ratios
    # A product such as 0.2 * 15 may exceed its true value in the last bit: no row may follow it.
    for_test = min(math.ceil(total * test - 1e-9), max(total - 1, 0)) if test > 0 else 0
    rest = total - for_test
    for_train = math.floor(rest * train / (train + val) + 0.5 + 1e-9)
    return for_train, rest - for_train, for_test


def _name_key(name: str) -> int:
    """Return a number for a name; above all numbers of clients."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) | 1 << 63


def split_rows(
    rows_per_client: Sequence[Rows],
    labels: Rows,
    ratios: Sequence[float],
    seed: Seed,
    stratify: bool = False,
    ordered: bool = False,
    keys: Sequence[int] | None = None,
) -> Parts:
    """Draw train, val and test rows of each client with a seed of the client's own.

    Because the seed is (seed, key), a client's parts do not change when others come or go; its key
    is its number unless `keys` are given. With `ordered` nothing is drawn: a client's first rows
    are its train, its last ones its test rows.
    """
    _check_ratios(ratios)
    if ordered and stratify:
        raise ConfigError("ordered and stratify were both asked for; a split can be one of them")
    cut = []
    for key, rows in zip(keys or range(len(rows_per_client)), rows_per_client, strict=True):
        shuffled = rows if ordered else np.random.default_rng((*seed, key)).permutation(rows)
        a, b, c = part_sizes(len(rows), ratios)
        if stratify:
            cut.append(_stratified(shuffled, labels, (a, b, c)))
        else:
            cut.append([shuffled[:a], shuffled[a : a + b], shuffled[a + b :]])
    train, val, test = (tuple(parts[i] for parts in cut) for i in range(3))
    return train, val, test


def _check_ratios(ratios: Sequence[float]) -> None:
    """Refuse ratios that are not three shares of one whole."""
    shares = list(ratios) if isinstance(ratios, Iterable) else [ratios]
    numbers = all(isinstance(r, Real) and math.isfinite(r) and 0 <= r <= 1 for r in shares)
    if len(shares) != 3 or not numbers or abs(sum(shares) - 1) > 1e-6:
        raise ConfigError(
            f"split {tuple(shares)} is not a division; expected three shares (train, val, test) "
            "that sum to 1, such as (0.6, 0.2, 0.2) or (0.75, 0, 0.25)"
        )
    if ratios[0] <= 0:
        raise ConfigError(
            f"split {tuple(ratios)} leaves nothing to train on; raise the first share"
        )


def _stratified(shuffled: Rows, labels: Rows, wanted: tuple[int, int, int]) -> list[Rows]:
    """Order the rows by class and assign parts in an evenly mixed order.

    Any stretch of that order, so any class, holds each part in its share give or take one or two,
    and the totals stay exact, which rounding class by class would not give.
    """
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    place = np.concatenate([(np.arange(n) + 0.5) / max(n, 1) for n in wanted])
    part = np.repeat(np.arange(3), wanted)[np.argsort(place, kind="stable")]
    return [by_class[part == which] for which in range(3)]


def _split_by_file(
    dataset: Dataset,
    held: list[Rows],
    split: str,
    val: float,
    seed: Seed,
    stratify: bool,
    ordered: bool,
    keys: Sequence[int],
) -> Parts:
    """Keep the rows of the test file as test rows; split the others into train and val."""
    if split != "file":
        raise ConfigError(f"split '{split}' is unknown; expected three shares, or file")
    origin = dataset.origin
    if origin is None:
        raise DataError(
            f"dataset '{dataset.name}' has no test file of its own, which split=file needs; give "
            "three shares, such as (0.6, 0.2, 0.2)"
        )
    not_test = [rows[origin[rows] == 0] for rows in held]
    ratios = (1 - val, val, 0.0)
    labels = column_of(dataset)
    train, validation, _ = split_rows(not_test, labels, ratios, seed, stratify, ordered, keys)
    return train, validation, tuple(rows[origin[rows] == 1] for rows in held)
