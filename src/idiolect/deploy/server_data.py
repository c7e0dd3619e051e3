"""What the server's machine has of its own: public examples, for methods that train there."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from idiolect.data import Dataset
from idiolect.deploy.handshake import Entry
from idiolect.errors import DataError
from idiolect.experiment.build import load_public
from idiolect.experiment.portable import NOWHERE, import_experiment, source_of
from idiolect.experiment.untrusted import Permissions


@dataclass(frozen=True)
class Host:
    """The settings of whoever runs the server."""

    public: str | None = None  # stands for the experiment's public examples
    data_dir: Path | None = None
    packages: tuple[str, ...] = ()  # installed ones that an experiment may take networks from
    closed: tuple[str, ...] = ()  # folders that nothing is imported from: the kit
    folders: tuple[str, ...] = ()  # where packages may lie besides; for tries on one's own machine

    @property
    def reach(self) -> Permissions:
        """What an experiment may have imported here."""
        return Permissions(packages=self.packages, closed=self.closed, folders=self.folders)

    def to_json(self) -> str:
        """Write the settings for another process of the same machine."""
        folder = None if self.data_dir is None else str(self.data_dir)
        plain = {"public": self.public, "data_dir": folder, "packages": self.packages}
        return json.dumps(plain)

    @classmethod
    def read(cls, path: Path) -> "Host":
        """Read what `to_json` wrote; a server that was told nothing has nothing."""
        closed = (str(path.resolve().parents[1]),)  # the kit, with every job's folder
        if not path.is_file():
            return cls(closed=closed)
        plain = json.loads(path.read_text())
        folder = plain["data_dir"]
        packages = tuple(plain.get("packages", ()))
        return cls(plain["public"], None if folder is None else Path(folder), packages, closed)

    def public_examples(self, text: str, entry: Entry) -> Dataset | None:
        """Load the examples that the server trains on, in the form of the nodes' own."""
        source = source_of(text) if entry.source else NOWHERE
        try:
            own: dict[str, Any] = {"public": self.public, "side": "server", "reach": self.reach}
            data = import_experiment(text, source=source, **own).data
            fetched = () if self.public is None else (self.public,)
            blank = entry.form.blank(1)
            return load_public(data, blank, bool(entry.source), self.data_dir, fetched)
        except DataError as error:
            raise DataError(
                f"the server lacks the public examples that it would train on ({error}); start it "
                "with `idiolect server KIT --public PATH` or --data-dir"
            ) from error


HOST = Host()
