"""Read off PersFL's result files how many shards of one class its users of CIFAR-10 DS-1 have.

    python scripts/recover_persfl_users.py CHECKOUT  # of the paper's repository; needs h5py

A model that predicts a single class has, at a user, the accuracy of that class's share of the
user's 1,000 test images, round after round. So accuracies that stand still early in a run, near
one, two or three quarters, tell shares. Beside them is how often ten users of four random shards,
of the 40 of ten classes, have as many shards of one class as these.
"""

import re
import sys
from collections import defaultdict
from importlib import import_module
from pathlib import Path

import numpy as np

from idiolect.data.partition.papers import DS1_USERS

TEST = 1000  # images of a user
EARLY, STILL = 100, 4  # rounds that are read, rounds in a row that make a share
NEAR = 35  # a quarter's share of 1,000 of 5,000 images deviates by 12
RUNS = range(len(DS1_USERS))

Shares = dict[tuple[int, int], dict[int, int]]


def shares(checkout: Path) -> Shares:
    """Find what each user of each run shows: a share in images of 1,000, rounds it stood still."""
    found: Shares = defaultdict(dict)
    for path in sorted(checkout.rglob("Cifar10*.h5")):
        run = re.search(r"roundNum_(\d)", path.name)
        if run is None or ("Split_1" not in path.name and "Datasplit-1" not in str(path)):
            continue
        with import_module("h5py").File(path) as file:
            scores = np.array(file["perUserAccs"]) if "perUserAccs" in file else np.zeros(0)
        if scores.shape[-1:] != (10,):
            continue
        right = np.rint(scores.reshape(-1, 10)[:EARLY] * TEST).astype(int)
        for user, column in enumerate(right.T):
            seen, cuts = found[int(run[1]), user], np.flatnonzero(np.diff(column, prepend=-1))
            for share, rounds in zip(column[cuts], np.diff(cuts, append=len(column)), strict=True):
                if rounds >= STILL and min(abs(share - TEST * n / 4) for n in (1, 2, 3)) <= NEAR:
                    seen[int(share)] = max(int(rounds), seen.get(int(share), 0))
    return found


def by_chance(shown: list[int], tries: int = 20_000) -> list[float]:
    """Say how often random deals have as many users with two, and with three, of a class."""
    draw, classes = np.random.default_rng(0), np.repeat(np.arange(10), 4)
    deals = np.array([draw.permutation(classes) for _ in range(tries * len(RUNS))])
    held = (deals.reshape(-1, 10, 4, 1) == np.arange(10)).sum(2).max(2).reshape(tries, -1)
    return [
        float(((held >= least).sum(1) >= sum(n >= least for n in shown)).mean()) for least in (2, 3)
    ]


def main(checkout: Path) -> None:
    """Print what is shown of all users, what is taken, and what chance would give."""
    found = shares(checkout)
    for (run, user), seen in sorted(found.items()):
        told = (f"{share} ({rounds} rounds)" for share, rounds in sorted(seen.items()))
        print(f"run {run}, user {user}: {', '.join(told)}")
    taken = [[int(user[0]) for user in run.split()] for run in DS1_USERS]
    for run, largest in zip(RUNS, taken, strict=True):
        print(f"run {run}, most shards of one class, as taken: {largest}")
    shown = [n for run in taken for n in run]
    for least, share in zip((2, 3), by_chance(shown), strict=True):
        many = sum(n >= least for n in shown)
        print(
            f"{many} of {len(shown)} users have {least} or more, as in {share:.2%} of random deals"
        )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
