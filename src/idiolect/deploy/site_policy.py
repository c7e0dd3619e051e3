"""Limits that a site sets for itself, and that its own node enforces whatever a run asks for.

Whoever submits an experiment, or runs the server, cannot change them: they are read from a file of
the site (`policy.toml` in its kit, or `idiolect node --policy FILE`).
"""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from idiolect.errors import ConfigError
from idiolect.experiment.checked import checked, signature_model
from idiolect.experiment.reading import read_toml

FILE = "policy.toml"  # in a kit


@dataclass(frozen=True, kw_only=True)
class SitePolicy:
    """What a site allows; the defaults are what `idiolect federation init` writes."""

    packages: tuple[str, ...] = ()  # that an experiment from outside may name a network of

    def plain(self) -> dict[str, Any]:
        """Return the limits as JSON has them."""
        return asdict(self)

    @classmethod
    def of(cls, plain: dict[str, Any]) -> "SitePolicy":
        """Read what `plain` wrote."""
        return cls(**{key: tuple(v) if isinstance(v, list) else v for key, v in plain.items()})


@dataclass(frozen=True, kw_only=True)
class ServerPolicy:
    """What the operator of a server allows."""

    packages: tuple[str, ...] = ()  # that an experiment from outside may name a network of


def read_site(path: Path) -> SitePolicy:
    """Read a site's policy; what the file leaves out has its default."""
    return SitePolicy(**_values(SitePolicy, path))


def read_server(path: Path) -> ServerPolicy:
    """Read the policy of a server's operator."""
    return ServerPolicy(**_values(ServerPolicy, path))


def in_kit(folder: Path, given: Path | None) -> Path | None:
    """Say where a kit's policy stands: in the file that was given, or in the kit, if there."""
    if given is not None:
        if not given.is_file():
            raise ConfigError(f"--policy: {given} is no file; give a TOML file of limits")
        return given
    return folder / FILE if (folder / FILE).is_file() else None


def _values(kind: type[SitePolicy] | type[ServerPolicy], path: Path) -> dict[str, Any]:
    raw = read_toml(path, "a policy")
    values = checked(signature_model(kind, ()), raw, str(path))
    return {spec.name: getattr(values, spec.name) for spec in fields(kind)}


SERVER_TEXT = """\
# What the operator of this server allows, whatever a run asks for.

# Python packages, installed on this machine, that an experiment from outside may name a network of
# (model.name = "package.module:factory"). Naming one runs its code. None by default.
packages = []
"""
"""What a server's kit starts with."""
