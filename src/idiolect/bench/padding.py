"""How much of the work is padding on ragged data, where a block is as wide as it can be."""

from typing import Any

from idiolect.bench.random_images import like_cifar10
from idiolect.data import federate
from idiolect.engine.batch_plan import narrowed
from idiolect.engine.blocks import cut

SEEDS, BATCH = 5, 128  # as in experiments/persfl

CASES: dict[str, dict[str, Any]] = {
    "CIFAR-10 DS-1": {"partition": "persfl-ds1"},
    "CIFAR-10 DS-2": {"partition": "persfl-ds2"},
    "CIFAR-10 DS-3": {"partition": "persfl-ds3", "kind": "cifar"},
}


def shares() -> list[dict[str, Any]]:
    """Return the padded share of each partition, of one run and of five trained together."""
    dataset = like_cifar10((1, 1, 1))  # partitions look at labels alone
    told = []
    for name, options in CASES.items():
        runs = [federate(dataset, seed=seed, **options) for seed in range(SEEDS)]
        sizes = [[len(rows) for rows in run.train] for run in runs]
        told.append(
            {
                "name": name,
                "batch": BATCH,
                "smallest": min(map(min, sizes)),
                "largest": max(map(max, sizes)),
                "one_block": share(sizes[0], BATCH, blocks=False),
                "one_run": share(sizes[0], BATCH),
                "five_runs": share([size for run in sizes for size in run], BATCH),
            }
        )
    return told


def share(sizes: list[int], batch: int, blocks: bool = True) -> float:
    """Return the share of an epoch's places that hold no example; `blocks`: cut by length."""
    line = sorted(sizes, reverse=True)
    cuts = cut(line, len(line)) if blocks else [(0, len(line))]
    planned = sum(
        (last - first) * -(-line[first] // batch) * narrowed(batch, line[first])
        for first, last in cuts
    )
    return 1 - sum(line) / planned
