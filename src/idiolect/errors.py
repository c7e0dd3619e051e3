"""Errors a user can act on: each says what was found, what was expected and what to do.

The command line prints their text on one line and exits with `code`; nothing else in the package
decides an exit status.
"""


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
