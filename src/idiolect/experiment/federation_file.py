"""A federation's members: a TOML file from which everyone's kit is made."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from idiolect.experiment.load import read_toml
from idiolect.experiment.schema import STRICT, validate

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,62}")
_ORG = re.compile(r"[A-Za-z0-9_]{1,63}")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252}[A-Za-z0-9])?")
_EMAIL = re.compile(r"[A-Za-z0-9_.+-]+@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*")

_TAKEN = ("server", "authority", "renewed")


def _checked(pattern: re.Pattern[str], value: str, expected: str) -> str:
    if not pattern.fullmatch(value):
        raise ValueError(f"{value!r} is no name for it; expected {expected}")
    return value


class ServerTable(BaseModel):
    """Where nodes and admins connect to; the only address that must be reachable."""

    model_config = STRICT

    host: str
    port: Annotated[int, Field(ge=1, le=65535)] = 8002
    org: str = "hub"
    own_key: bool = False  # its key is made on its machine: `federation request`

    @field_validator("host")
    @classmethod
    def _host(cls, value: str) -> str:
        return _checked(_HOST, value, "a host name such as hub.example.org")

    @field_validator("org")
    @classmethod
    def _org(cls, value: str) -> str:
        return _checked(_ORG, value, "letters, digits and _")


class Site(BaseModel):
    """A site that holds data."""

    model_config = STRICT

    name: str
    org: str | None = None
    own_key: bool = False

    @field_validator("name")
    @classmethod
    def _plain(cls, value: str) -> str:
        return _checked(_NAME, value, "letters, digits and -")

    @field_validator("org")
    @classmethod
    def _org(cls, value: str | None) -> str | None:
        return None if value is None else _checked(_ORG, value, "letters, digits and _")


class Admin(BaseModel):
    """Someone who may look, submit or manage, by role."""

    model_config = STRICT

    email: str
    role: Literal["project_admin", "org_admin", "lead", "member"] = "lead"
    org: str | None = None
    own_key: bool = False

    @field_validator("email")
    @classmethod
    def _email(cls, value: str) -> str:
        return _checked(_EMAIL, value, "an address such as lead@example.org")


class Project(BaseModel):
    """Who takes part in a federation."""

    model_config = STRICT

    name: str
    server: ServerTable
    sites: Annotated[tuple[Site, ...], Field(min_length=1)]
    admins: Annotated[tuple[Admin, ...], Field(min_length=1)]
    valid_days: Annotated[int, Field(ge=1, le=7300)] = 1825  # of the federation's own authority

    @field_validator("name")
    @classmethod
    def _plain(cls, value: str) -> str:
        return _checked(_NAME, value, "letters, digits and -")

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
