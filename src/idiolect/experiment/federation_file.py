"""A federation's members: a TOML file from which everyone's kit is made."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field, model_validator

from idiolect.experiment.load import read_toml
from idiolect.experiment.schema import STRICT, validate

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,62}")
_ORG = re.compile(r"[A-Za-z0-9_]{1,63}")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252}[A-Za-z0-9])?")
_EMAIL = re.compile(r"[A-Za-z0-9_.+-]+@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*")

_TAKEN = ("server", "authority", "renewed")


def _like(pattern: re.Pattern[str], expected: str) -> AfterValidator:
    """Make what refuses a word that is not like a pattern."""

    def checked(value: str) -> str:
        if not pattern.fullmatch(value):
            raise ValueError(f"{value!r} is no name for it; expected {expected}")
        return value

    return AfterValidator(checked)


Name = Annotated[str, _like(_NAME, "letters, digits and -")]
Host = Annotated[str, _like(_HOST, "a host name such as hub.example.org")]
Org = Annotated[str, _like(_ORG, "letters, digits and _")]
Email = Annotated[str, _like(_EMAIL, "an address such as lead@example.org")]


class ServerTable(BaseModel):
    """Where nodes and admins connect to; the only address that must be reachable."""

    model_config = STRICT

    host: Host
    port: Annotated[int, Field(ge=1, le=65535)] = 8002
    org: Org = "hub"
    own_key: bool = False  # its key is made on its machine: `federation request`


class Site(BaseModel):
    """A site that holds data."""

    model_config = STRICT

    name: Name
    org: Org | None = None
    own_key: bool = False


class Admin(BaseModel):
    """Someone who may look, submit or manage, by role."""

    model_config = STRICT

    email: Email
    role: Literal["project_admin", "org_admin", "lead", "member"] = "lead"
    org: str | None = None
    own_key: bool = False


class Project(BaseModel):
    """Who takes part in a federation."""

    model_config = STRICT

    name: Name
    server: ServerTable
    sites: Annotated[tuple[Site, ...], Field(min_length=1)]
    admins: Annotated[tuple[Admin, ...], Field(min_length=1)]
    valid_days: Annotated[int, Field(ge=1, le=7300)] = 1825  # of the federation's own authority

    @model_validator(mode="after")
    def _distinct(self) -> "Project":
        names = [site.name for site in self.sites] + [admin.email for admin in self.admins]
        for name in names:
            if name in _TAKEN:
                raise ValueError(f"{name!r} is what a folder beside the kits is called; rename it")
        names.append(self.server.host)
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name!r} stands twice; everyone needs a name of their own")
        return self


def load_project(path: str | Path) -> Project:
    """Read and check a project file."""
    return validate(Project, read_toml(Path(path), "a project file"), str(path))
