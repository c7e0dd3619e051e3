"""Idiolect: personalised federated learning, one model per client, trained together.

Names are imported when they are first used, so that `import idiolect` costs next to nothing.
"""

import sys
import warnings
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

from idiolect.version import VERSION as __version__

if TYPE_CHECKING:
    from idiolect.api import Result as Result
    from idiolect.api import compare as compare
    from idiolect.api import federation as federation
    from idiolect.api import fit as fit
    from idiolect.core import losses as losses
    from idiolect.core import optim as optim
    from idiolect.core import tree as tree
    from idiolect.core.method import Method as Method
    from idiolect.core.method import Report as Report
    from idiolect.core.method import Sent as Sent
    from idiolect.core.method import Setup as Setup
    from idiolect.core.method import setting as setting
    from idiolect.data.federation import Federation as Federation
    from idiolect.experiment.adapt import adapt as adapt
    from idiolect.experiment.exported import client_model as client_model
    from idiolect.experiment.exported import load_exported as load_exported
    from idiolect.experiment.load import load_experiment as load_experiment
    from idiolect.experiment.run import run as run
    from idiolect.methods import METHODS as METHODS
    from idiolect.models import MODELS as MODELS
    from idiolect.models.adapters import ADAPTERS as ADAPTERS
    from idiolect.models.adapters import IA3 as IA3
    from idiolect.models.adapters import Bias as Bias
    from idiolect.models.adapters import Last as Last
    from idiolect.models.adapters import LoRA as LoRA
    from idiolect.models.adapters import Prompts as Prompts
    from idiolect.results.document import table as table
    from idiolect.results.run_files import load_model as load_model

_HOMES = {  # in the order in which one meets them
    "federation": "api",
    "fit": "api",
    "run": "experiment.run",
    "compare": "api",
    "adapt": "experiment.adapt",
    "table": "results.document",
    "load_model": "results.run_files",
    "client_model": "experiment.exported",
    "load_exported": "experiment.exported",
    "load_experiment": "experiment.load",
    "Result": "api",
    "Federation": "data.federation",
    "METHODS": "methods",
    "MODELS": "models",
    "ADAPTERS": "models.adapters",
    **dict.fromkeys(("LoRA", "IA3", "Bias", "Prompts", "Last"), "models.adapters"),
    "Method": "core.method",
    "Report": "core.method",
    "Sent": "core.method",
    "Setup": "core.method",
    "setting": "core.method",
}
_MODULES = ("tree", "optim", "losses")  # of core: the tools of a method's author

__all__ = [*_HOMES, *_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"idiolect.core.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'idiolect' has no attribute {name!r}")
    return getattr(import_module(f"idiolect.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


_MOVED = {
    **{name: f"core.{name}" for name in ("method", *_MODULES)},
    "local": "core.client",
    **dict.fromkeys(("aggregate", "robust", "privacy"), "aggregation"),
}


class _Moved(MetaPathFinder, Loader):
    """Imports modules by the names they had in version 0.1, with a warning."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        return ModuleSpec(fullname, self) if package == "idiolect" and name in _MOVED else None

    def exec_module(self, module: Any) -> None:
        old, new = module.__name__, f"idiolect.{_MOVED[module.__name__.partition('.')[2]]}"
        message = f"{old} is now {new}; the old name goes with the next version"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        sys.modules[old] = import_module(new)


sys.meta_path.append(_Moved())
