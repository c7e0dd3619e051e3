"""Outputs of methods on rows where the truth is known, for any metric and few clients.

A row is easy or hard for all methods alike to some degree, and each training moves a method on all
clients, on each client and on single rows, as in `planted_rows`.
"""

import numpy as np

from idiolect.analysis.scores import ComparedScores
from idiolect.core import metrics

GROUPS = 64


def planted(
    draw,
    name,
    clients=4,
    methods=2,
    gain=0.0,
    seeds=5,
    rows=60,
    redrawn=True,
    share=0.3,
    noise=1.0,
    wobble=0.25,
):
    """Plant results of a metric; `gain` is how much stronger the first method's signal is."""
    own = metrics.METRICS[name]
    kind = own.kinds[0]
    pool = 5 * rows if redrawn else rows
    truth = draw.normal(size=(clients, pool))
    hard = draw.normal(size=(clients, pool))  # the same for all methods
    mine = draw.normal(size=(methods, clients, pool))
    cut = np.quantile(truth, 1 - share, axis=1, keepdims=True)
    values = np.zeros((methods, seeds, clients))
    left = np.full((methods, seeds, clients, min(GROUPS, rows)), np.nan)
    effective = np.zeros((seeds, clients))
    tilt = draw.normal(0, 0.1, (methods, seeds, 1)) * wobble  # of a training, on all clients
    tilt = tilt + draw.normal(0, 0.3, (methods, seeds, clients)) * wobble
    for seed in range(seeds):
        for client in range(clients):
            chosen = draw.permutation(pool)[:rows] if redrawn else np.arange(rows)
            t = truth[client, chosen]
            y = (t > cut[client]).astype(int)
            for method in range(methods):
                strength = 1 + tilt[method, seed, client] + (gain if method == 0 else 0)
                off = 0.9 * hard[client, chosen] + 0.3 * mine[method, client, chosen]
                off = noise * (off + 0.2 * draw.normal(size=rows))
                said = strength * t + off
                if kind == "classes":
                    logits = np.stack([-said + cut[client], said - cut[client]], 1)
                    one = metrics.answers(kind, logits, y)
                elif kind == "number":
                    one = metrics.answers(kind, (t + off / strength)[:, None], t)
                else:
                    times = np.exp(-t + 0.5 * hard[client, chosen])
                    seen = np.stack([times, (hard[client, chosen] < 0.8) * 1.0], 1)
                    one = metrics.answers(kind, said[:, None], seen)
                values[method, seed, client] = own(one)
                left[method, seed, client] = metrics.without_groups(one, own, GROUPS)[:rows]
                rare = np.bincount(y, minlength=2).min()
                effective[seed, client] = rare if kind == "classes" and own.rows is None else rows
    shape = (seeds, clients)
    return ComparedScores(
        tuple("ABCDEFG"[:methods]),
        values,
        tuple(range(seeds)),
        True,
        np.full(shape, float(rows)),
        np.full(shape, 3.0 * rows if redrawn else 0.0),
        None,
        not redrawn,
        own,
        left,
        effective,
    ).turned
