"""The version, in one place; the package's metadata are made from it."""

VERSION = "0.5.0"


def series(version: str) -> str:
    """Return what two versions that work together share: all but the last number, as 1.4 of 1.4.2.

    Servers and nodes of one series may differ in the last: methods are compared by their code.
    """
    return version.rpartition(".")[0]
