"""Gradient inversion of a first dense layer: what a report shows of single training rows.

The gradient of a hidden unit's weights is the sum over rows of (slope at the unit) x (row), that of
its bias the sum of the slopes. So their ratio is an average of rows, and a row itself where one row
only reaches the unit. It needs nothing but the report and what was sent.
"""

import csv

import numpy as np
import torch


def patients(path, rows, seed=0, columns=12):
    """Write a table of made-up patients, whose diagnosis depends on what was measured."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(rows, columns))
    ill = x[:, :4].sum(1) + 0.5 * draw.normal(size=rows) > 0
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow([*(f"m{n}" for n in range(columns)), "diagnosis"])
        for row, one in zip(x, ill, strict=True):
            out.writerow([*(f"{value:.6f}" for value in row), "ill" if one else "healthy"])


def inverted(before, after):
    """Return an estimate of a row, or of a mean of rows, for each unit of the first layer."""
    weights = next(name for name, leaf in before.items() if leaf.dim() == 2)
    bias = weights.replace("weight", "bias")
    change = {name: before[name].double() - after[name].double() for name in (weights, bias)}
    moved = change[bias].abs() > 1e-9 * change[bias].abs().max()
    return change[weights][moved] / change[bias][moved][:, None]


def closeness(estimates, rows, centre=0.0):
    """Return for each row the largest correlation of an estimate with it."""
    estimates, rows = estimates - centre, rows - centre
    lengths = estimates.norm(dim=1)[:, None] * rows.norm(dim=1)[None]
    return (estimates @ rows.T / lengths.clamp(min=1e-30)).amax(0)


def exact(estimates, rows):
    """Return for each row whether an estimate is it, to a hundredth of its length."""
    apart = torch.cdist(estimates, rows).amin(0)
    return apart < 0.01 * rows.norm(dim=1)
