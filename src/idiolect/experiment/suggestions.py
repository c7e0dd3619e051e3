"""Errors about keys, in one line: the file, the key, what was found, what was meant."""

import difflib
from collections.abc import Iterable
from typing import Any

from idiolect.errors import ConfigError

# Names that other libraries use for the same thing, too far from ours to be found by spelling.
_ELSEWHERE = {
    "learning_rate": "lr",
    "eta": "lr",
    "batch_size": "batch",
    "minibatch": "batch",
    "local_epochs": "epochs",
    "num_clients": "clients",
    "num_users": "clients",
    "n_clients": "clients",
    "num_rounds": "rounds",
    "global_rounds": "rounds",
    "communication_rounds": "rounds",
    "fraction": "cohort",
    "participation": "cohort",
    "clients_per_round": "cohort",
    "optimizer": "optimiser",
    "wd": "weight_decay",
    "dataset": "source",
    "normalize": "normalise",
    "algorithm": "methods",
    "mu": "pull",
    "seed": "seeds",
}


def unknown(where: str, key: str, known: Iterable[str], what: str = "key") -> ConfigError:
    """Say that a name does not exist here, and which one was probably meant."""
    return ConfigError(f"{where}: unknown {what} {meant(key, known)}")


def meant(key: str, known: Iterable[str]) -> str:
    """Quote a wrong name with the nearest right one, or else with all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(key, names, 1, 0.6)
    if _ELSEWHERE.get(key) in names:
        close = [_ELSEWHERE[key]]
    if close:
        return f"{key!r}; did you mean {close[0]!r}?"
    return f"{key!r}; expected one of {', '.join(names) or 'nothing'}"


def dotted(path: Iterable[Any]) -> str:
    """Write a path of keys and places as one types it: methods[1].lr."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}"
    return text.removeprefix(".")
