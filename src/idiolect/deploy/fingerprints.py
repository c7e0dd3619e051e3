"""Fingerprints by which hub and nodes find out, before the first round, that they differ."""

import dataclasses
import hashlib
import inspect
import json
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from idiolect.core import client, losses, optim, tree
from idiolect.core import method as contract
from idiolect.core.method import Method
from idiolect.data import Federation
from idiolect.engine import batch_plan, block_runner


def of_bytes(*parts: bytes) -> str:
    """Shorten bytes to a digest."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:32]


def of_method(method: Method) -> str:
    """Digest a method: its settings, and the source that its steps and batches are made of."""
    modules = {contract, client, losses, optim, tree, block_runner, batch_plan, *_modules(method)}
    # A module without source (frozen into an executable) is told apart by its name alone.
    sources = [_source(module).encode() for module in sorted(modules, key=lambda m: m.__name__)]
    return of_bytes(repr(method).encode(), *sources)


def of_form(federations: Sequence[Federation]) -> str:
    """Digest what the numbers of an example mean, under each seed: columns' names, tokens' words.

    It tells whether two nodes mean the same, and nothing of what.
    """
    meant = [[list(held.dataset.features), list(held.dataset.words)] for held in federations]
    return " ".join(of_bytes(json.dumps(one).encode()) for one in meant)


def _modules(part: Any) -> set[ModuleType]:
    """List where a method's classes are written, and those of the methods and rules inside it."""
    found = {sys.modules[kind.__module__] for kind in type(part).__mro__ if kind is not object}
    for spec in dataclasses.fields(part):
        inner = getattr(part, spec.name)
        if dataclasses.is_dataclass(inner):
            found |= _modules(inner)
    return found


def _source(module: Any) -> str:
    try:
        return inspect.getsource(module)
    except OSError:
        return str(module.__name__)
