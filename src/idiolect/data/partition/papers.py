"""The partitions of the papers that are reproduced.

The client sizes of pFedMe's generators are recomputed, with private `random` and `numpy.random`
generators in place of its global ones; which rows of a class a client gets follows our own seed.
"""

import random

import numpy as np

from idiolect.data.dataset import AnyArray, Rows, check_positive, check_value
from idiolect.data.partition.general import (
    Candidates,
    apportion,
    check_least,
    classes,
    divide,
    shards,
)
from idiolect.errors import ConfigError, DataError

# The seeds under which the MNIST generator gives PersFL's client sizes of runs 0..4.
PERSFL_MNIST_SEEDS = (7975, 5044, 8858, 3229, 9462)

_FIRST = 10  # images of each label that every user gets before the ragged rest


# PersFL's DS-1: shards of a user, and rows of a shard. Recovered from its result files, where a
# model that predicts one class shows how many test images of it each user has.
_DS1 = {"mnist": (2, 300), "cifar": (4, 1250)}

# How many shards of one class its ten users of CIFAR-10 have, run by run: as many as the same files
# show (scripts/recover_persfl_users.py); who shows less has four classes. Run 4 shows one user.
DS1_USERS = (
    "211 211 211 31 211 211 1111 211 31 22",
    "211 1111 211 1111 1111 1111 1111 1111 211 211",
    "22 211 31 211 211 1111 211 1111 211 31",
    "211 211 1111 1111 211 1111 1111 31 1111 211",
)


def persfl_ds1(
    candidates: Candidates,
    *,
    kind: str = "classes",
    clients: int = 10,
    classes_per_client: int = 4,
    per_client: int | None = None,
    imbalance: float = 0.6,
) -> list[Rows]:
    """PersFL DS-1: kind mnist, two label shards of 300 each, or cifar, four of 1,250.

    kind "cifar-users" deals the latter so that users have as many shards of one class as the
    paper's had in four of its runs, more than a random deal gives; the seed decides which run.
    kind "classes" is ours, from before the paper's shards were known, and good for examples: equal
    totals, a few classes each, the j-th of weight imbalance**j. They form a Latin rectangle: at
    each rank every class is held equally often, so all classes give out the same total and none
    runs short. By default the total is as large as the smallest class allows.
    """
    check_value("kind", kind, ("classes", *_DS1, "cifar-users"))
    if kind == "cifar-users":
        return candidates.assign(_DS1["cifar"][1] * _shards_of_users(candidates))
    if kind in _DS1:
        each, rows = _DS1[kind]
        return shards(candidates, clients=clients, shards_per_client=each, shard_rows=rows)
    check_positive(clients=clients, classes_per_client=classes_per_client, imbalance=imbalance)
    everything = candidates.class_sizes()
    present = np.flatnonzero(everything)  # a class nobody has is passed over
    available, width = everything[present], len(present)
    if not width or clients % width or classes_per_client > width:
        raise DataError(
            f"persfl-ds1 has {clients} clients with {classes_per_client} of {width} classes; it "
            f"needs a multiple of {width} clients and at most {width} classes per client"
        )
    groups = clients // width
    most = int(available.min()) // groups
    total = most if per_client is None else per_client
    if not classes_per_client <= total <= most:
        raise DataError(
            f"persfl-ds1 asks for {total} rows per client; the smallest class has "
            f"{int(available.min())} rows, so expected {classes_per_client}..{most} for "
            f"{clients} clients"
        )
    sizes = apportion(total, imbalance ** np.arange(classes_per_client, dtype=float))
    rng = candidates.draws(0)
    counts = np.zeros((clients, len(everything)), np.int64)
    for group in range(groups):
        name, start = rng.permutation(width), rng.permutation(width)
        step = rng.permutation(width)[:classes_per_client]
        held = present[name[(start[:, None] + step[None, :]) % width]]
        counts[group * width + np.arange(width)[:, None], held] = sizes
    return candidates.assign(counts)


def _shards_of_users(candidates: Candidates) -> Rows:
    """Count each user's shards of each class [user, class]: four of every class, all dealt."""
    users = [[int(n) for n in user] for user in DS1_USERS[candidates.seed[0] % 4].split()]
    groups = [(size, user) for user, sizes in enumerate(users) for size in sizes]
    groups.sort(reverse=True)  # large ones first, while classes have room for them
    rng = candidates.draws(0)
    while True:  # every second try places all; else a class is left for a user who has it already
        counts = np.zeros((10, 10), np.int64)
        for size, user in groups:
            room = (counts.sum(0) + size <= 4) & (counts[user] == 0)
            if not room.any():
                break
            counts[user, rng.choice(np.flatnonzero(room))] = size
        else:
            return counts


def persfl_ds2(
    candidates: Candidates, *, clients: int = 10, alpha: float = 0.9, variant: str = "code"
) -> list[Rows]:
    """PersFL DS-2: Dirichlet over clients per class, filled in order until a class is empty.

    variant "code" measures every class by class 0, as the released code does, so larger classes are
    cut to its size (58,570 of MNIST's 60,000); "paper" gives out all rows.
    """
    check_positive(clients=clients, alpha=alpha)
    check_value("variant", variant, ("code", "paper"))
    available = candidates.class_sizes()
    if variant == "code" and not available[0]:
        raise DataError("persfl-ds2 measures classes by class 0, which has no rows; use 'paper'")
    rng = candidates.draws(0)
    columns = []
    for size in available:
        shares = rng.dirichlet(np.full(clients, alpha))
        if variant == "paper":
            columns.append(apportion(int(size), shares))
            continue
        filled = np.cumsum(np.round(available[0] * shares).astype(np.int64))
        filled = np.minimum(filled, min(size, available[0]))
        columns.append(np.diff(filled, prepend=0))
    return candidates.assign(np.stack(columns, axis=1))


def persfl_ds3(
    candidates: Candidates,
    *,
    kind: str = "cifar",
    variant: str = "code",
    generator_seed: int | None = None,
    keep: float = 0.75,
) -> list[Rows]:
    """PersFL DS-3: ten clients, few labels, ragged sizes; kind cifar or mnist, source files merged.

    variant "code": pFedMe's generators, of whose training share (75%) PersFL used nothing but that;
    cifar has three labels each (generator seed 1), mnist two (seeds of runs 0..4:
    7975, 5044, 8858, 3229, 9462). variant "paper": two labels, log-normal(0, 2) sizes, all rows.
    """
    check_value("kind", kind, ("cifar", "mnist"))
    check_value("variant", variant, ("code", "paper"))
    if not 0 < keep <= 1:
        raise ConfigError(f"keep is {keep}; expected a share above 0 and up to 1")
    if variant == "paper":
        return classes(candidates, clients=10, classes_per_client=2, sizes="lognormal")
    available = candidates.class_sizes()
    if kind == "cifar":
        drawn = 1 if generator_seed is None else generator_seed
        counts = _ragged_counts(available, 10, 3, drawn, "2020")
    else:
        drawn = PERSFL_MNIST_SEEDS[0] if generator_seed is None else generator_seed
        counts = _halved_counts(available, drawn)
    held = candidates.assign(counts)
    return [
        candidates.draws(3, client).permutation(mine)[: int(keep * len(mine))]
        for client, mine in enumerate(held)
    ]


def pfml_pairs(
    candidates: Candidates,
    *,
    clients: int = 20,
    sizes: str = "lognormal",
    sigma: float = 2.0,
    least: int = 10,
) -> list[Rows]:
    """PFML MNIST: client u holds labels (2u, 2u + 1) % 10, sizes log-normal, all rows used."""
    return classes(
        candidates,
        clients=clients,
        classes_per_client=2,
        scheme="pairs",
        sizes=sizes,
        sigma=sigma,
        least=least,
    )


def pfml_three(candidates: Candidates, *, clients: int = 20, generator_seed: int = 1) -> list[Rows]:
    """PFML CIFAR-10: labels (u + j) % 10, j < 3, with the sizes of pFedMe's generator since 2021.

    Its offsets are made for 6,000 rows per class; a smaller class gives most clients ten rows.
    """
    check_positive(clients=clients)
    available = candidates.class_sizes()
    return candidates.assign(_ragged_counts(available, clients, 3, generator_seed, "2021"))


def ktpfl_two(
    candidates: Candidates,
    *,
    clients: int = 20,
    scheme: str = "cyclic",
    sizes: str = "equal",
    sigma: float = 1.0,
) -> list[Rows]:
    """KT-pFL, two classes per client; rows disjoint, sizes equal or lognormal."""
    return classes(
        candidates, clients=clients, classes_per_client=2, scheme=scheme, sizes=sizes, sigma=sigma
    )


def ktpfl_all(
    candidates: Candidates,
    *,
    clients: int = 20,
    sizes: str = "lognormal",
    sigma: float = 1.0,
    alpha: float = 1.0,
    least: int = 1,
) -> list[Rows]:
    """KT-pFL, all classes at every client, in uneven shares: sizes lognormal or dirichlet."""
    check_positive(clients=clients, least=least, alpha=alpha)
    available = candidates.class_sizes()
    # A class without rows cannot be held by everyone; it is left out rather than refused.
    held = np.repeat((available > 0)[None, :].astype(np.int64), clients, axis=0)
    if sizes != "dirichlet":
        return candidates.assign(divide(candidates, held, sizes, sigma, least))
    check_least(available, held.sum(axis=0), least)
    counts = held * least
    spare = available - counts.sum(axis=0)
    rng = candidates.draws(2)
    for label, size in enumerate(spare):
        shares: AnyArray = rng.dirichlet(np.full(clients, alpha))
        counts[:, label] += apportion(int(size), shares)
    return candidates.assign(counts)


def _ragged_counts(available: Rows, clients: int, each: int, generator_seed: int, era: str) -> Rows:
    """Log-normal sizes of the CIFAR-10 generator, [client, class].

    era "2020" (PersFL's DS-3) draws per cell first the offset in 10..200, then the factor in 1..10;
    swapped, other sizes come out. era "2021" draws one offset in 300..600. A share that would
    exhaust its class is skipped, so that client keeps ten images of the label.
    """
    width = len(available)
    if clients % 10:
        raise DataError(f"clients is {clients}; this generator needs a multiple of 10")
    if width < clients // 10 or each > width:
        raise DataError(
            f"this generator needs at least {max(each, clients // 10)} classes; there are {width}"
        )
    draws = random.Random(generator_seed)
    shares = np.random.RandomState(generator_seed).lognormal(0, 2.0, (width, clients, each))
    shares *= (available - clients)[:, None, None] / shares.sum((1, 2), keepdims=True)
    counts = np.zeros((clients, width), np.int64)
    cells = [
        (user, place, (user + place) % width) for user in range(clients) for place in range(each)
    ]
    for user, _, label in cells:
        counts[user, label] += _FIRST
    short = np.flatnonzero(counts.sum(axis=0) > available)
    if len(short):
        label = int(short[0])
        raise DataError(
            f"class {label} has {int(available[label])} rows and this generator gives out "
            f"{int(counts[:, label].sum())} to begin with; use fewer clients or a larger dataset"
        )
    used = counts.sum(axis=0)
    for user, place, label in cells:
        share = int(shares[label, user // (clients // 10), place])
        if era == "2020":
            offset, factor = draws.randint(10, 200), draws.randint(1, 10)
            wanted = share * factor + offset + 200
        else:
            wanted = share + draws.randint(300, 600)
        if clients <= 20:
            wanted *= 2
        if used[label] + wanted < available[label]:
            counts[user, label] += wanted
            used[label] += wanted
    return counts


def _halved_counts(available: Rows, generator_seed: int) -> Rows:
    """Sizes of the early MNIST generator, two labels a user, [client, class].

    Each class is cut at v = randint(n // 3, n // 2); first pieces of all classes, then second ones,
    are handed out two by two. The script labelled them (u + j) % 10 with overlapping slices, and no
    disjoint slices can have both those labels and those sizes: each piece here is of its own class,
    so the sizes stand, every image is used once, and the labels are (2u, 2u + 1) % 10.
    """
    width = len(available)
    if width != 10 or int(available.min()) < 6:
        raise DataError(
            f"this generator halves ten classes for ten clients; there are {width} classes, the "
            f"smallest of {int(available.min())} rows: expected 10, of 6 rows or more"
        )
    draws = np.random.RandomState(generator_seed)
    first = np.array([draws.randint(n // 3, n // 2) for n in available])
    pieces = np.concatenate([first, available - first])
    counts = np.zeros((width, width), np.int64)
    piece = np.arange(2 * width)
    counts[piece // 2, piece % width] = pieces
    return counts
