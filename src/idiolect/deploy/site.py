"""What a node is told by whoever runs it: whose data, where it stands, where state is kept."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from idiolect.deploy.site_policy import SitePolicy
from idiolect.deploy.wire import LIMIT
from idiolect.errors import DeployError
from idiolect.experiment.untrusted import Permissions


@dataclass(frozen=True)
class Site:
    """A node's own settings; nothing of it leaves the node but its name."""

    name: str
    federation: str
    home: Path  # personal state, models and the log
    data: str  # a path, or the experiment's own source, of which the node takes one client's share
    options: Mapping[str, Any] = field(default_factory=dict)  # of reading own data
    client: int | None = None  # which client of the experiment's own partition; None: own data
    data_dir: Path | None = None
    public: str | None = None  # stands for the experiment's public examples
    device: str = "auto"
    limit: int = LIMIT  # bytes of a message
    secure: bool = False  # take part only where the server sees the sum and no single report
    policy: SitePolicy = field(default_factory=SitePolicy)  # what this site allows
    kit: Path | None = None  # whose key and authority sign and check; None: nobody's (local, tests)
    packages: tuple[str, ...] = ()  # beside the policy's; for tries on one's own machine
    folders: tuple[str, ...] = ()  # where these may lie besides; the same

    @property
    def reach(self) -> Permissions:
        """What an experiment may have imported here; nothing that lies beside this node's files."""
        packages = (*self.policy.packages, *self.packages)
        closed = (str(self.home.resolve().parent),)
        return Permissions(packages=packages, folders=self.folders, closed=closed)

    def to_json(self) -> str:
        """Write the settings for another process of the same machine."""
        plain = dataclasses.asdict(self)
        for key in ("home", "data_dir", "kit"):
            plain[key] = None if plain[key] is None else str(plain[key].resolve())
        return json.dumps(plain)

    @classmethod
    def from_json(cls, text: str) -> "Site":
        """Read what `to_json` wrote."""
        try:
            plain = json.loads(text)
            policy = SitePolicy.of(plain.pop("policy"))
            lists: Any = {key: tuple(plain.pop(key, ())) for key in ("packages", "folders")}
            for key in ("data_dir", "kit"):
                plain[key] = None if plain.get(key) is None else Path(plain[key])
            return cls(
                policy=policy,
                home=Path(plain.pop("home")),
                **lists,
                **{**plain, "options": {k: _tuples(v) for k, v in plain.pop("options").items()}},
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DeployError(
                f"a node's settings cannot be read ({type(error).__name__}); start it again with "
                "`idiolect node KIT --data ...`"
            ) from error


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
