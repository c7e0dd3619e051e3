"""The library in a few lines of Python: load a federation, fit a method, read the results."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from idiolect.analysis.progress import shown
from idiolect.core import tree
from idiolect.core.method import Method
from idiolect.data import SOURCES, Dataset, Federation, load, read
from idiolect.data.federate import federate_by_clients
from idiolect.data.inspection import refuse_unclear
from idiolect.data.own import reading_options
from idiolect.data.preprocessing import Preprocessing
from idiolect.data.sources import cache_root
from idiolect.engine.architecture import Architecture, Build, bound, build_modules
from idiolect.engine.backend import Backend
from idiolect.engine.outcome import Outcome, Several, Watch
from idiolect.engine.personal_model import PersonalModel, Predictions
from idiolect.errors import ConfigError, DataError, MethodError, suggest
from idiolect.experiment.job import Evaluate, SimulatedJob
from idiolect.experiment.train import train
from idiolect.methods import METHODS
from idiolect.models import MODELS
from idiolect.results import document
from idiolect.results.run_files import Deployed
from idiolect.results.statistics import mean, participation_of_seed

Model = str | nn.Module | Callable[..., nn.Module]

Models = Model | Sequence[Model] | Mapping[int | str, Model]
"""One for all, several that are dealt to the clients in turn, or each client's own by number or
name. Clients that are given the very same one are trained together."""


def federation(
    source: Any = "embedded",
    partition: str | None = None,
    seed: int = 0,
    *,
    split: Sequence[float] | str = (0.6, 0.2, 0.2),
    normalise: str | None = None,
    data_dir: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    **partition_options: Any,
) -> Federation:
    """Load a named dataset or own data and divide it; by its own clients where it has them.

    Own data is a path or a DataFrame; its `label`, `client` and the other options of `data.read`
    may be given here or in `options`. See also `Federation.from_frame` and `from_arrays`.
    """
    if isinstance(source, Dataset):
        dataset = source
    elif isinstance(source, str | Path) and str(source) in SOURCES:
        dataset = load(str(source), data_dir, **(options or {}))
    else:
        dataset = read(source, **{**(options or {}), **reading_options(partition_options)})
    refuse_unclear(dataset, partition)
    own = "iid" if dataset.clients is None else "natural"
    return federate_by_clients(
        dataset, partition or own, seed, split, normalise, **partition_options
    )


@dataclass(frozen=True, eq=False)
class Result:
    """A method fitted to one federation, and scored on its test data."""

    outcome: Outcome
    deployed: Deployed
    job: SimulatedJob | None = None

    @property
    def mean(self) -> float:
        """Mean test accuracy of the clients' own models, each client alike."""
        return mean(self.accuracy)

    @property
    def took_part(self) -> np.ndarray:
        """Whether each client took part in some round; the others' models are newcomers'."""
        if not self.outcome.took_part:
            return np.ones(len(self.accuracy), bool)
        return np.asarray(self.outcome.took_part[0], bool)

    @property
    def participation(self) -> dict[str, Any]:
        """Counts and mean accuracies of all clients, those that took part and those that did not.

        `participation["accuracy"]["personal"]["took_part"]`, and the like.
        """
        models = self.outcome.models
        scores = {model: self.outcome.final[f"{model}/accuracy"][0] for model in models}
        return participation_of_seed(scores, self.took_part)

    @property
    def accuracy(self) -> np.ndarray:
        """Test accuracy of each client's own model."""
        scores: np.ndarray = self.outcome.final[f"{self.outcome.headline}/accuracy"][0]
        return scores

    def table(self) -> list[dict[str, Any]]:
        """Return a row per client and model; `pandas.DataFrame(result.table())` works."""
        return document.table(document.build_document({}, [self.outcome], complete=True))

    def curve(self, model: str = "global", metric: str = "accuracy") -> dict[int, float]:
        """Return the validation curve: round -> mean over clients."""
        values = self.outcome.curves[f"val/{model}/{metric}"]
        return {round: mean(values[place, 0]) for place, round in enumerate(self.outcome.evaluated)}

    def model(self, client: int | str) -> PersonalModel:
        """Return a client's own model, by its number or its name, ready to predict.

        It takes examples as they were read (pixels from 0 to 255, a table's own numbers) and scales
        them itself; `.classes` names its outputs. `.network` is the bare network.
        """
        if self.job is None:
            raise MethodError("the result was made without its job, so its models are not known")
        number = self._number(client)
        places = [clients.tolist() for clients, _ in self.deployed]
        place = next((n for n, own in enumerate(places) if number in own), None)
        if place is None:
            raise DataError(f"client {client!r} has no model of its own; it was not scored")
        row, architectures = places[place].index(number), list(self.job.architectures.values())
        deployed = tree.map(lambda leaf: leaf[row].cpu(), self.deployed[place][1])
        own = next(a for a in architectures if a.clients is None or number in a.clients)
        dataset, seed = self.job.federations[0].dataset, self.job.seeds[0]
        modules = build_modules("main", own, seed, dataset.words)
        copies = {role: copy.deepcopy(made) for role, made in modules.items()}
        return PersonalModel(self.job.method, copies, deployed, Preprocessing.of(dataset))

    def _number(self, client: int | str) -> int:
        names = list(self.outcome.members[0].names)
        known = client in names if isinstance(client, str) else 0 <= client < len(names)
        if not known:
            raise DataError(
                f"there is no client {client!r}; the clients are {', '.join(names[:8])}"
                f"{', ...' if len(names) > 8 else ''}"
            )
        return names.index(client) if isinstance(client, str) else int(client)

    def predict(self, client: int | str, x: Any, **options: Any) -> Predictions:
        """Predict with a client's own model: class names and probabilities.

        `x` is an array of examples as they were read, a DataFrame, one or more images, texts, or
        the path of a file or of a folder of images; `options` are those of reading it.
        """
        return self.model(client).predict(x, options)


def fit(
    method: str | Method,
    federation: Federation,
    model: Models = "dnn",
    *,
    rounds: int = 50,
    seed: int = 0,
    cohort: int | None = None,
    auxiliary: Model | None = None,
    device: str = "auto",
    backend: str | Backend = "vectorised",
    every: int = 1,
    watch: Watch | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> Result:
    """Train a method on a federation; further arguments are the method's settings.

    `backend` is the name of a kind, or a `Backend` with settings of its own. `progress` shows a
    bar; by default in a notebook and on a terminal.
    """
    _check_arguments(federation, rounds=rounds, seed=seed, every=every)
    chosen = _method(method, settings)
    if cohort is not None and not 1 <= cohort <= federation.clients:
        raise ConfigError(
            f"cohort is {cohort}, and there are {federation.clients} clients; expected "
            f"1..{federation.clients}"
        )
    second = None if auxiliary is None else _build(auxiliary, federation)
    architectures = _assigned(model, second, federation)
    name = method if isinstance(method, str) else type(method).__name__
    job = SimulatedJob(
        label=chosen.title or name,
        name=name,
        method=chosen,
        seeds=(seed,),
        federations=(federation,),
        architectures=architectures,
        rounds=rounds,
        cohort=cohort,
        backend=_machine(backend, device),
        evaluate=Evaluate(every=every),
    ).settled()
    with shown(progress) as screen:
        trained = train(job, watch=Several([screen, *([watch] if watch else [])]))
    return Result(trained.outcome, trained.deployed[0], job)


def _check_arguments(federation: Any, **numbers: Any) -> None:
    """Refuse what is no federation, and what is no whole number."""
    if not isinstance(federation, Federation):
        raise ConfigError(
            f"the data is of type {type(federation).__name__}; expected a federation, such as "
            "idiolect.federation(data, client=..., label=...) makes of a file or a DataFrame"
        )
    for name, value in numbers.items():
        least = 1 if name == "every" else 0
        if not isinstance(value, Integral) or value < least:
            raise ConfigError(f"{name} is {value!r}; expected a whole number, {least} or more")


def _machine(backend: str | Backend, device: str) -> Backend:
    if isinstance(backend, str):
        return Backend(backend, device, cache=cache_root(None) / "widths.json")
    if device not in ("auto", backend.device):
        raise ConfigError(f"device is {device!r} beside a backend that is made; set it there")
    return backend


def _method(method: str | Method, settings: Mapping[str, Any]) -> Method:
    if isinstance(method, Method):
        if settings:
            raise ConfigError(
                f"{next(iter(settings))!r} was given beside a method that is already made; set it "
                f"there: {type(method).__name__}({next(iter(settings))}=...)"
            )
        return method
    if not isinstance(method, str):
        raise ConfigError(
            f"the method is of type {type(method).__name__}; expected a name such as 'fedavg' "
            "(idiolect.METHODS lists them), or a method that is made, such as FedAvg(lr=0.1)"
        )
    if method not in METHODS:
        raise ConfigError(f"unknown method {suggest(method, METHODS)}")
    known = inspect.signature(METHODS[method]).parameters
    for name in settings:
        if name not in known:
            raise ConfigError(f"{method} has no setting {name!r}; it has {', '.join(known)}")
    try:
        return METHODS[method](**settings)
    except TypeError as error:  # a value of another kind cannot be compared with its bounds
        shown = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        raise ConfigError(
            f"{method} cannot be made of {shown} ({error}); `idiolect methods {method}` lists its "
            "settings"
        ) from error


def _assigned(
    model: Models, second: Build | None, federation: Federation
) -> dict[str, Architecture]:
    """Group the clients by the network they are given."""
    if isinstance(model, Mapping):
        each = _by_client(model, federation)
    elif isinstance(model, Sequence) and not isinstance(model, str):
        if not 1 <= len(model) <= federation.clients:
            raise ConfigError(
                f"{len(model)} networks were given for {federation.clients} clients; give one for "
                "each, or fewer to be dealt in turn"
            )
        each = [model[n % len(model)] for n in range(federation.clients)]
    else:
        return {_called(model): Architecture(_build(model, federation), second)}
    groups: dict[int | str, list[int]] = {}
    for client, own in enumerate(each):
        groups.setdefault(own if isinstance(own, str) else id(own), []).append(client)
    found: dict[str, Architecture] = {}
    for clients in groups.values():
        own, name = each[clients[0]], _called(each[clients[0]])
        label = f"{name} {len(found)}" if name in found else name
        found[label] = Architecture(_build(own, federation), second, tuple(clients))
    return found


def _by_client(model: Mapping[int | str, Model], federation: Federation) -> list[Model]:
    names = list(federation.names)
    each: dict[int, Model] = {}
    for key, own in model.items():
        place = names.index(key) if key in names else key
        if not isinstance(place, int) or not 0 <= place < len(names) or place in each:
            raise ConfigError(
                f"networks are given to client {key!r}, who does not exist or has one already; "
                f"expected 0..{len(names) - 1} or names such as {names[0]!r}, each once"
            )
        each[place] = own
    if missing := sorted(set(range(len(names))) - each.keys()):
        raise ConfigError(
            f"{names[missing[0]]} has no network ({len(missing)} of {len(names)} clients); give "
            "every client one"
        )
    return [each[n] for n in range(len(names))]


def _called(model: Model) -> str:
    """Name a network for messages and results."""
    if isinstance(model, str):
        return model
    return type(model).__name__ if isinstance(model, nn.Module) else _name_of(model)


def _name_of(factory: Callable[..., nn.Module]) -> str:
    return str(getattr(factory, "__name__", type(factory).__name__))


def _build(model: Model, federation: Federation) -> Build:
    """Bind a network to the data: by name, a module as it is, or a factory of (shape, classes)."""
    if isinstance(model, nn.Module):
        return lambda: model
    if isinstance(model, str):
        if model not in MODELS:
            raise ConfigError(f"unknown model {suggest(model, MODELS)}")
        factory: Callable[..., nn.Module] = MODELS[model]
    elif not callable(model):
        raise ConfigError(
            f"the model is of type {type(model).__name__}; expected a name such as 'dnn' "
            "(idiolect.MODELS lists them), an nn.Module, or a function of (shape, classes) "
            "that makes one"
        )
    else:
        factory = model
        parameters = inspect.signature(factory).parameters.values()
        if all(parameter.default is not parameter.empty for parameter in parameters):
            return factory
    dataset = federation.dataset
    shape = tuple(dataset.x.shape[1:])
    return bound(factory, shape, len(dataset.classes), dataset.words, {})
