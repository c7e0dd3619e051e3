"""Results in which the truth is known: right answers of methods on rows that are easy or hard.

A row is easy or hard for all methods alike to some degree, as in real data, so methods often err on
the same rows. Each training moves a method on all clients (a seed effect) and on each client.
"""

import math
from statistics import NormalDist

import numpy as np

from idiolect.analysis.scores import ComparedScores
from idiolect.engine.outcome import RIGHT

GROUPS = 64
_ALIKE = 0.8  # how alike rows are hard for two methods, as a correlation


def planted(
    draw,
    clients,
    methods=2,
    gain=0.0,
    seeds=5,
    rows=200,
    redrawn=True,
    seed_effect=0.005,
    client_effect=0.01,
    groups=True,
    level=0.85,
):
    """Plant results; `gain` is how much better the first method is than the others, all equal.

    `redrawn`: every seed draws test rows from five times as many; else they stay the same.
    """
    pool = 5 * rows if redrawn else rows
    hard = draw.normal(size=(clients, pool))
    own = draw.normal(size=(methods, clients, pool))  # what a row is for one method
    levels = level + draw.normal(0, 0.03, clients)
    right = np.zeros((methods, seeds, clients, GROUPS))
    accuracy = np.zeros((methods, seeds, clients))
    for seed in range(seeds):
        chosen = np.stack([draw.permutation(pool)[:rows] for _ in range(clients)])
        for method in range(methods):
            moved = draw.normal(0, seed_effect) + draw.normal(0, client_effect, clients)
            goal = np.clip(levels + moved + (gain if method == 0 else 0), 0.02, 0.98)
            # Training differs from seed to seed on single rows too.
            anew = draw.normal(size=(clients, pool))
            latent = math.sqrt(_ALIKE) * hard + math.sqrt(1 - _ALIKE) * (
                math.sqrt(0.5) * own[method] + math.sqrt(0.5) * anew
            )
            bound = np.array([NormalDist().inv_cdf(p) for p in goal])
            good = (latent < bound[:, None])[np.arange(clients)[:, None], chosen]
            accuracy[method, seed] = good.mean(1)
            padded = np.pad(good, ((0, 0), (0, -rows % GROUPS)))
            right[method, seed] = padded.reshape(clients, -1, GROUPS).sum(1)
    shape = (seeds, clients)
    return ComparedScores(
        tuple("ABCDEFG"[:methods]),
        accuracy,
        tuple(range(seeds)),
        True,
        np.full(shape, float(rows)),
        np.full(shape, 3.0 * rows if redrawn else 0.0),
        right if groups else None,
        not redrawn,
    )


def result(held, counts_only=False):
    """Lay scores out as a result.json has them."""
    methods = {}
    for place, label in enumerate(held.labels):
        seeds = []
        for number, seed in enumerate(held.seeds):
            clients = []
            for client in range(held.accuracy.shape[2]):
                own = {"accuracy": float(held.accuracy[place, number, client])}
                if held.right is not None and not counts_only:
                    counts = held.right[place, number, client]
                    own[RIGHT] = " ".join(str(int(count)) for count in counts)
                clients.append(
                    {
                        "personal": own,
                        "test": int(held.tested[number, client]),
                        "train": int(held.train[number, client]),
                    }
                )
            traffic = {"bytes_down": 100, "bytes_up": 50}
            seeds.append({"seed": seed, "traffic": traffic, "clients": clients})
        methods[label] = {
            "method": label.lower(),
            "headline": {"personal": {}},
            "rounds": 10,
            "curves": None,
            "speed": {"train_seconds": 20.0, "seconds": 25.0},
            "seeds": seeds,
        }
    data = {"same_clients": held.same_clients, "same_test": held.same_test}
    return {"data": data, "methods": methods}
