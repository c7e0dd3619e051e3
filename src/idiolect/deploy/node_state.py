"""A node's personal state on its disk: whole or not at all, with the round it belongs to.

Beside the state stands the last report and a digest of the message it answered, so that the same
message gets the same answer and nothing is trained twice.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from idiolect.core import checkpoint, tree
from idiolect.core.tree import Tree
from idiolect.deploy.refusals import Refused
from idiolect.errors import CheckpointError, IdiolectError
from idiolect.results.models import folder_name


class Owner(NamedTuple):
    """Whose state it is."""

    federation: str
    client: int
    run: str
    label: str
    seed: int

    def folder(self, home: Path) -> Path:
        """Say where a run's state of this client stands."""
        return home / "state" / folder_name(self.federation) / f"client-{self.client}" / self.run


class Kept(NamedTuple):
    """The state after `round` rounds, and the answer that led to it."""

    round: int
    request: str  # digest of the message that was answered last; empty before the first
    personal: Tree
    report: dict[str, Tensor]
    left: dict[str, Tensor]  # what a compressed report left out, for the next one


class Drawer:
    """Where one method's personal state of one seed is kept."""

    def __init__(self, home: Path, owner: Owner, personal: Tree) -> None:
        """Open what is there, or start with the given state."""
        self._owner = owner
        name = f"{folder_name(owner.label)}-seed-{owner.seed}.safetensors"
        self.path = owner.folder(home) / name
        self.kept = Kept(0, "", personal, {}, {})
        if self.path.exists():
            self.kept = self._read(personal)

    def _read(self, template: Tree) -> Kept:
        try:
            named, meta = checkpoint.read(self.path)
            parts: dict[str, dict[str, Tensor]] = {"personal": {}, "report": {}, "left": {}}
            for name, leaf in named.items():
                part, _, rest = name.partition(".")
                parts[part][rest] = leaf
            if meta["owner"] != list(self._owner):
                raise CheckpointError(f"{self.path} belongs to {meta['owner']}")
            # A tree that is a single tensor has no name of its own.
            own = {name or "value": leaf for name, leaf in parts["personal"].items()}
            personal = checkpoint.fitted(template, own, self.path)
            kept = int(meta["round"]), str(meta["request"]), personal
            return Kept(*kept, parts["report"], parts["left"])
        except (CheckpointError, KeyError, ValueError, TypeError) as error:
            raise Refused("state", f"{self.path}: {error}") from error

    def put(
        self,
        round: int,
        request: str,
        personal: Tree,
        report: Tree,
        left: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Replace the state; if the disk is full, the old one stays."""
        kept = Kept(round, request, personal, tree.named(report), dict(left or {}))
        meta = {"owner": list(self._owner), "round": round, "request": request}
        try:
            parts = {"personal": personal, "report": kept.report, "left": kept.left}
            checkpoint.save(self.path, parts, meta)
        except CheckpointError as error:
            raise Refused("state", str(error)) from error
        except IdiolectError as error:
            raise Refused("disk", str(error)) from error
        self.kept = kept
