"""How sure a mean over clients and seeds is, when both are a sample of those there could be."""

import math
from typing import NamedTuple

import numpy as np

from idiolect.analysis.scores import Floats


class Sampled(NamedTuple):
    """A mean, the variance of that mean, and the degrees of freedom the variance is known with."""

    mean: float
    variance: float
    freedom: float


def sampled(values: Floats, same_clients: bool) -> Sampled:
    """Estimate the mean of [seed, client].

    Clients of one seed share a model, so their scores rise and fall together: however many clients
    there are, a mean is only as sure as its seeds let it be. With other clients under every seed,
    the seeds' means are the sample. With the same clients, the layout is crossed with both effects
    random: the variance is (MS of clients + MS of seeds - MS of the rest) / cells, with
    Satterthwaite's degrees of freedom. With one seed only clients are a sample, and the mean is one
    of that run. Without enough to tell, the variance is NaN.
    """
    held = np.asarray(values, np.float64)
    if len(held) == 1 or not same_clients:
        each = held[0] if len(held) == 1 else _row_means(held)
        each = each[~np.isnan(each)]
        if len(each) < 2:
            return Sampled(float(each.mean()) if len(each) else math.nan, math.nan, math.nan)
        return Sampled(float(each.mean()), float(each.var(ddof=1)) / len(each), len(each) - 1.0)
    held = held[:, ~np.isnan(held).any(axis=0)]
    if held.shape[1] < 2:
        return Sampled(float(held.mean()) if held.size else math.nan, math.nan, math.nan)
    return Sampled(float(held.mean()), *_crossed(held))


def _row_means(held: Floats) -> Floats:
    scored = [row[~np.isnan(row)] for row in held]
    return np.array([row.mean() if len(row) else math.nan for row in scored])


def _crossed(held: Floats) -> tuple[float, float]:
    """Return the variance of the grand mean of [seed, client], and its degrees of freedom."""
    seeds, clients = held.shape
    grand, by_seed, by_client = held.mean(), held.mean(axis=1), held.mean(axis=0)
    rest = held - by_seed[:, None] - by_client[None, :] + grand
    ms_seeds = clients * float(by_seed.var(ddof=1))
    ms_clients = seeds * float(by_client.var(ddof=1))
    ms_rest = float((rest**2).sum()) / ((seeds - 1) * (clients - 1))
    # An effect whose estimate is not positive is taken as none, and the other is left alone.
    if ms_clients <= ms_rest or ms_seeds <= ms_rest:
        largest, freedom = max((ms_seeds, seeds - 1.0), (ms_clients, clients - 1.0))
        return largest / held.size, freedom
    total = ms_seeds + ms_clients - ms_rest
    freedom = total**2 / (
        ms_seeds**2 / (seeds - 1)
        + ms_clients**2 / (clients - 1)
        + ms_rest**2 / ((seeds - 1) * (clients - 1))
    )
    return total / held.size, freedom
