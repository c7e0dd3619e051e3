"""A node's record of which reports were in a sum, and with whom: on disk, over all runs.

The same report in two sums of different members would be the difference of the two. So a report
that was masked once enters no other sum, unless that is of the very members of the first.
"""

import hashlib
import os
from collections.abc import Collection
from pathlib import Path

import numpy as np

from idiolect.core.checkpoint import write_whole
from idiolect.deploy.refusals import Refused
from idiolect.errors import IdiolectError

_PENDING = "-"  # masked, and nobody has said yet who survived


class SumLog:
    """One node's record; a line is added before anything leaves the node."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, str] = {}  # digest of a report: digest of the survivors' names
        if path.exists():
            for line in path.read_text(errors="replace").splitlines():
                report, _, survivors = line.partition(" ")
                self._known[report] = survivors or _PENDING  # the end of it may be torn off

    def check(self, report: str, members: Collection[str] | None = None) -> None:
        """Refuse a report that was in another sum; `members` are those of the one at hand."""
        known = self._known.get(report)
        if known is None:
            return
        if known == _PENDING:
            raise Refused("summed", "this report was masked before, for a sum that was not ended")
        if members is not None and known != _names(members):
            raise Refused("summed", "this report was in a sum of other members before")

    def masked(self, report: str) -> None:
        """Note that a masked report is about to leave."""
        if report not in self._known:
            self._add(report, _PENDING)

    def survived(self, report: str, survivors: Collection[str]) -> None:
        """Settle whose sum a report is in; refuse if that was settled otherwise."""
        known = self._known.get(report, _PENDING)
        if known == _PENDING:
            self._add(report, _names(survivors))
        elif known != _names(survivors):
            raise Refused("summed", "this report was in a sum of other members before")

    def _add(self, report: str, survivors: str) -> None:
        try:
            if not self._path.exists():
                write_whole(self._path, b"")  # after this a power cut leaves the name too
                self._path.chmod(0o600)
            with self._path.open("ab") as file:
                file.write(f"\n{report} {survivors}".encode())
                file.flush()
                os.fsync(file.fileno())
        except (OSError, IdiolectError) as error:
            raise Refused("disk", f"{self._path}: {error}") from error
        self._known[report] = survivors


def digest_of(values: np.ndarray) -> str:
    """Name a report by what it holds."""
    return hashlib.sha256(values.tobytes()).hexdigest()


def _names(names: Collection[str]) -> str:
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()
