"""Idiolect: personalised federated learning, one model per client, trained together.

Names are imported when they are first used, so that `import idiolect` costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from idiolect.version import VERSION as __version__

if TYPE_CHECKING:
    from idiolect.api import Result as Result
    from idiolect.api import federation as federation
    from idiolect.api import fit as fit
    from idiolect.core.method import Method as Method
    from idiolect.experiment.adapt import adapt
    from idiolect.experiment.compare import compare
    from idiolect.experiment.load import load_experiment
    from idiolect.experiment.run import run
    from idiolect.methods import METHODS as METHODS
    from idiolect.models import MODELS as MODELS
    from idiolect.results.models import load_model as load_model
    from idiolect.results.tables import table as table

_HOMES = {
    "METHODS": "idiolect.methods",
    "MODELS": "idiolect.models",
    "Method": "idiolect.core.method",
    "Result": "idiolect.api",
    "adapt": "idiolect.experiment.adapt",
    "compare": "idiolect.experiment.compare",
    "federation": "idiolect.api",
    "fit": "idiolect.api",
    "load_experiment": "idiolect.experiment.load",
    "load_model": "idiolect.results.models",
    "run": "idiolect.experiment.run",
    "table": "idiolect.results.tables",
}

__all__ = [  # noqa: RUF022 - the order in which one meets them
    "federation",
    "fit",
    "run",
    "compare",
    "adapt",
    "table",
    "load_model",
    "load_experiment",
    "Method",
    "METHODS",
    "MODELS",
    "Result",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'idiolect' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
