"""Errors a user can act on: each says what was found, what was expected and what to do.

The command line prints their text on one line and exits with `code`; nothing else in the package
decides an exit status.
"""

import difflib
from collections.abc import Iterable


class IdiolectError(Exception):
    """Something the user can mend; the text names the remedy."""

    code = 1


class ConfigError(IdiolectError):
    """An experiment, option or setting that cannot be right."""

    code = 2


class DataError(IdiolectError):
    """Data that is missing, damaged or cannot be divided as asked."""

    code = 3


class ModelError(IdiolectError):
    """A module that cannot be trained correctly here; names the layer and its replacement."""

    code = 4


class MethodError(IdiolectError):
    """A method and a federation that do not fit each other."""

    code = 5


class Diverged(IdiolectError):
    """Training produced NaN or infinity; names the client and the round."""

    code = 6


class DeployError(IdiolectError):
    """A federation that cannot start, or cannot go on; names who is missing or what to mend."""

    code = 8


class ClusterError(IdiolectError):
    """A cluster that cannot be reached, or whose workers are gone."""

    code = 10


class CheckpointError(IdiolectError):
    """A checkpoint that is damaged or belongs to another experiment."""

    code = 7


class MissingExtra(IdiolectError):
    """An optional library that is not installed; names the extra that brings it."""

    code = 9

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what}; install it with: pip install 'idiolect[{extra}]'")


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


def suggest(key: str, known: Iterable[str]) -> str:
    """Quote a wrong name with the nearest right one, or else with all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(key, names, 1, 0.6)
    if _ELSEWHERE.get(key) in names:
        close = [_ELSEWHERE[key]]
    if close:
        return f"{key!r}; did you mean {close[0]!r}?"
    return f"{key!r}; expected one of {', '.join(names) or 'nothing'}"


def shortened(text: str, most: int = 40) -> str:
    """Cut a long name in its middle; control characters and line breaks become spaces."""
    plain = "".join(letter if letter.isprintable() else " " for letter in text)
    if len(plain) <= most:
        return plain
    head = (most - 1) * 2 // 3
    return f"{plain[:head]}…{plain[len(plain) - (most - 1 - head) :]}"
