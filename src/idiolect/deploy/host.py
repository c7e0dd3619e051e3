"""What the server's machine has of its own: public examples, for methods that train there."""

import json
from dataclasses import dataclass
from pathlib import Path

from idiolect.data import Dataset
from idiolect.deploy.roster import Entry
from idiolect.errors import DataError
from idiolect.experiment.build import public_alone
from idiolect.experiment.visiting import NOWHERE, source_of, visiting


@dataclass(frozen=True)
class Host:
    """The settings of whoever runs the server."""

    public: str | None = None  # stands for the experiment's public examples
    data_dir: Path | None = None
    packages: tuple[str, ...] = ()  # that an experiment from outside may name a network of

    def to_json(self) -> str:
        """Write the settings for another process of the same machine."""
        folder = None if self.data_dir is None else str(self.data_dir)
        told = {"public": self.public, "data_dir": folder, "packages": self.packages}
        return json.dumps(told)

    @classmethod
    def read(cls, path: Path) -> "Host":
        """Read what `to_json` wrote; a server that was told nothing has nothing."""
        if not path.is_file():
            return cls()
        plain = json.loads(path.read_text())
        folder = plain["data_dir"]
        packages = tuple(plain.get("packages", ()))
        return cls(plain["public"], None if folder is None else Path(folder), packages)

    def public_examples(self, text: str, entry: Entry) -> Dataset | None:
        """Load the examples that the server trains on, in the form of the nodes' own."""
        source = source_of(text) if entry.source else NOWHERE
        try:
            data = visiting(text, source=source, public=self.public, side="server").data
            return public_alone(data, entry.form.blank(1), bool(entry.source), self.data_dir)
        except DataError as error:
            raise DataError(
                f"the server lacks the public examples that it would train on ({error}); start it "
                "with `idiolect server KIT --public PATH` or --data-dir"
            ) from error


HOST = Host()
