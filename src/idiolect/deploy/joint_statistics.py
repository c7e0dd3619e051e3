"""Sites' statistics of their columns, joined so that one site cannot move them at will.

They are told before any robust rule is at work: one mean of 1e12 would scale everyone's examples to
nothing. So what cannot be is refused, and a column in which a site is far from the others is scaled
by medians over the sites instead of by all rows together.
"""

from collections.abc import Mapping

import numpy as np

from idiolect.data.dataset import Moments
from idiolect.deploy.example_form import Form
from idiolect.deploy.refusals import Refused

_MOST = 1e15  # no measurement; squared and summed it still fits
_FAR = 10.0  # times the typical spread within and between sites
_FEWEST = 3  # sites: of two that differ nobody can say which one is wrong


def refuse_impossible(site: str, seen: Moments, rows: int, form: Form) -> None:
    """Refuse statistics that no data of this form has, `rows` being the training rows told."""
    shape = tuple(form.shape)
    mean, squares = np.asarray(seen.mean), np.asarray(seen.squares)
    fits = mean.shape == squares.shape and len(mean.shape) == len(shape)
    if not fits or any(own not in (1, size) for own, size in zip(mean.shape, shape, strict=True)):
        raise Refused("statistics", f"{site} told statistics of shape {mean.shape}, not {shape}")
    numbers = rows * (int(np.prod(shape)) // max(1, mean.size))
    if seen.seen != numbers:
        raise Refused(
            "statistics", f"{site} told statistics of {seen.seen:g} numbers, and has {numbers}"
        )
    low, high = (0.0, 255.0) if form.dtype == "uint8" else (-_MOST, _MOST)
    if mean.min() < low or mean.max() > high:
        raise Refused("statistics", f"{site} told a mean of {_worst(mean):g}")
    widest = squares.max() / numbers
    # Of numbers between two bounds the variance is at most a quarter of their distance squared.
    if squares.min() < 0 or widest > ((high - low) / 2) ** 2 * (1 + 1e-6):
        raise Refused("statistics", f"{site} told a variance of {widest:g}")


def joined(told: Mapping[str, Moments], robust: bool) -> tuple[Moments, list[str]]:
    """Return everyone's statistics as one, and the sites that are far from the others in a column.

    As if all rows lay in one place; but medians over the sites in columns where one is far, and in
    all columns where the experiment is to be `robust`.
    """
    sites = sorted(told)
    total = told[sites[0]]
    for site in sites[1:]:
        total = total.merged(told[site])
    mean = np.stack([told[site].mean for site in sites])
    spread = np.sqrt(np.stack([told[site].squares / told[site].seen for site in sites]))
    centre = np.median(mean, axis=0)
    apart = np.abs(mean - centre)
    bound = _FAR * (np.median(spread, axis=0) + np.median(apart, axis=0))
    # Where most sites have one and the same number, whatever another has spoils nothing for them.
    far = (bound > 0) & ((apart > bound) | (spread > bound))
    if len(sites) < _FEWEST:
        far = np.zeros_like(far)
    names = [site for site, own in zip(sites, far, strict=True) if own.any()]
    columns = far.any(axis=0) if not robust or len(sites) < _FEWEST else np.ones_like(far[0])
    typical = np.median(spread**2 + apart**2, axis=0)
    return Moments(
        total.seen,
        np.where(columns, centre, total.mean),
        np.where(columns, typical * total.seen, total.squares),
    ), names


def _worst(values: np.ndarray) -> float:
    return float(values.flat[np.abs(values).argmax()])
