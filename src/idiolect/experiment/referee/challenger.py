"""The method that is judged: found by its name, as `module:Class`, or in a file of its user's."""

import ast
import inspect
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from idiolect.core.method import Method
from idiolect.errors import ConfigError
from idiolect.experiment.referee.suite import SAME_FOR_ALL, Contestant, Suite, code_digest
from idiolect.experiment.untrusted import Permissions, import_factory, import_method


def find_challenger(text: str, suite: Suite) -> Contestant:
    """Find a method by what the user typed: a file, `module:Class`, or a registered name.

    A user's module is imported, which runs it, as in `idiolect run` of an experiment that names it.
    """
    for own in suite.baselines:
        if text in (own.name, own.label):
            return own
    base = Path.cwd()
    if text.endswith(".py") or Path(text).is_file():
        path = Path(text).resolve()
        text, base = _in_file(path), path.parent
    kind = import_method(text, "the challenger", Permissions(base))
    _refuse_odd(kind)
    label = kind.title or kind.__name__
    if any(own.label == label for own in suite.baselines):
        label = f"{label} ({text.partition(':')[0]})"
    return Contestant(
        text, label, code_digest(kind), search=kind.search, untuned=kind.unused, base=base
    )


def _refuse_odd(kind: type[Method]) -> None:
    """Refuse what would be found out only after the training: a title or a search that is none."""
    own = kind.__name__
    if not isinstance(kind.title, str) or not kind.title.isprintable():
        raise ConfigError(f"{own}: its title is {kind.title!r}, expected one line of text")
    if not isinstance(kind.search, Mapping):
        raise ConfigError(f"{own}: `search` is {kind.search!r}, expected values by setting")
    for name, values in kind.search.items():
        if name in SAME_FOR_ALL:
            raise ConfigError(
                f"{own}: `search` lists {name}, which is the problem's and the same for every "
                "method; take it out"
            )
        if not isinstance(values, tuple | list) or not all(map(_plain, values)):
            raise ConfigError(
                f"{own}: `search` has {values!r} for {name}, expected a tuple of numbers, words or "
                "truth values, such as (0.1, 1.0)"
            )
        if len(set(values)) != len(values):
            raise ConfigError(f"{own}: `search` lists a value of {name} twice: {values!r}")


def _plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_plain, value))
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _in_file(path: Path) -> str:
    """Return `module:Class` of the one method that a file defines."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; give a file with a method, or a method's name")
    if not path.stem.isidentifier():
        raise ConfigError(
            f"{path.name} cannot be imported by that name; use letters, digits and _, such as "
            "my_method.py"
        )
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"{path} is no Python file: {error}") from None
    reach = Permissions(path.parent)
    names = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    found = []
    for name in names:
        kind = import_factory(f"{path.stem}:{name}", str(path), reach, "method")
        if inspect.isclass(kind) and issubclass(kind, Method):
            found.append(name)
    held = sys.modules.get(path.stem)
    if held is not None and Path(held.__file__ or "").resolve() != path:
        raise ConfigError(
            f"{path.name} has the name of another module, {held.__file__}; rename the file"
        )
    if len(found) != 1:
        said = f"several methods, {', '.join(found)}" if found else "no class derived from Method"
        raise ConfigError(
            f"{path} holds {said}; expected one, or name it as {path.stem}:CLASS (see "
            "docs/method.md)"
        )
    return f"{path.stem}:{found[0]}"
