"""The library in a few lines of Python: load a federation, fit a method, read the results."""

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from idiolect.analysis import pictures
from idiolect.analysis.comparison import ALPHA, Comparison
from idiolect.analysis.comparison import compare as compare_document
from idiolect.analysis.progress import shown
from idiolect.analysis.significance import stats
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
from idiolect.engine.outcome import THRESHOLD, Outcome, Several, Watch
from idiolect.engine.personal_model import PersonalModel, Predictions
from idiolect.errors import ConfigError, DataError, MethodError, MissingExtra, shortened, suggest
from idiolect.experiment.exported import PEFT, export_folder, export_program
from idiolect.experiment.job import Evaluate, SimulatedJob
from idiolect.experiment.load import resolve
from idiolect.experiment.run import experiment_toml
from idiolect.experiment.stored_models import ModelInfo, StoredModel, findings
from idiolect.experiment.train import Trained, planned_work, train
from idiolect.experiment.untrusted import Permissions, by_digest
from idiolect.methods import METHODS
from idiolect.models import BASED, MODELS
from idiolect.models.adapters import AdaptedNetwork, Adapter, make_adapter
from idiolect.models.bases import base_name
from idiolect.models.peft_files import save_peft
from idiolect.results import document
from idiolect.results.run_files import Deployed, PublicForm
from idiolect.results.statistics import mean, participation_of_seed

Model = str | nn.Module | Callable[..., nn.Module]

AdapterLike = str | Adapter | Mapping[str, Any]
"""An adapter's name, such as "lora", a table with its name and options, or one that is made."""

Models = Model | Sequence[Model] | Mapping[int | str, Model]
"""One for all, several that are dealt to the clients in turn, or each client's own by number or
name. Clients that are given the very same one are trained together."""


def federation(
    source: Any = "embedded",
    partition: str | None = None,
    seed: int = 0,
    *,
    split: Sequence[float] | str | None = None,
    normalise: str | None = None,
    data_dir: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    **partition_options: Any,
) -> Federation:
    """Load a named dataset or own data and divide it; by its own clients where it has them.

    Own data is a path or a DataFrame; its `label`, `client` and the other options of `data.read`
    may be given here or in `options`. See also `Federation.from_frame` and `from_arrays`.
    """
    named = isinstance(source, str | Path) and str(source) in SOURCES
    if isinstance(source, Dataset):
        dataset, named = source, bool(source.source)
    elif named:
        dataset = load(str(source), data_dir, **(options or {}))
    else:
        known = inspect.signature(read).parameters.keys() - {"path"}
        for name in options or {}:
            if name not in known:
                raise ConfigError(f"unknown option {suggest(name, known)}")
        dataset = read(source, **{**(options or {}), **reading_options(partition_options)})
    refuse_unclear(dataset, partition)
    own = "iid" if dataset.clients is None else "natural"
    return federate_by_clients(
        dataset, partition or own, seed, split, normalise, not named, **partition_options
    )


@dataclass(frozen=True, eq=False)
class Result:
    """A method fitted to one federation, and scored on its test data."""

    outcome: Outcome
    deployed: Deployed
    job: SimulatedJob | None = None

    def __repr__(self) -> str:
        more = "  .plot(), .table(), .to_pandas(), .predict(client, x), .model(client)"
        return f"{pictures.outcome_text(self.outcome)}\n{more}"

    def _repr_html_(self) -> str:
        return pictures.outcome_html(self.outcome)

    def plot(self) -> pictures.Picture:
        """Draw each client's score and the curve over the rounds; `.save(path)` writes an SVG."""
        return pictures.picture_of([self.outcome])

    def to_pandas(self) -> Any:
        """Return `table` as a DataFrame of pandas."""
        return _frame(self.table())

    def compare(self, *others: "Result") -> "ComparedResults":
        """Compare with other results on the same federation: a verdict, a table, pictures."""
        return _compare_results([self, *others])

    @property
    def metric(self) -> str:
        """The name of the metric that the result is told by."""
        return self.outcome.metric

    @property
    def scores(self) -> np.ndarray:
        """The metric of each client's own model on its test data, [client]."""
        found: np.ndarray = self.outcome.final[f"{self.outcome.headline}/{self.metric}"][0]
        return found

    @property
    def mean(self) -> float:
        """Mean of `scores`, each client alike: test accuracy unless another metric was chosen."""
        return mean(self.scores)

    @property
    def took_part(self) -> np.ndarray:
        """Whether each client took part in some round; the others' models are newcomers'."""
        if not self.outcome.took_part:
            return np.ones(len(self.scores), bool)
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
        key = f"{self.outcome.headline}/accuracy"
        if key not in self.outcome.final:
            raise DataError(
                f"there is no accuracy of the task {self.outcome.task}; use `scores`, which is "
                f"{self.metric}, or `table()`"
            )
        scores: np.ndarray = self.outcome.final[key][0]
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
        cuts = self.outcome.final.get(f"personal/{THRESHOLD}")
        cut = None if cuts is None or np.isnan(cuts[0][number]) else float(cuts[0][number])
        return PersonalModel(self.job.method, copies, deployed, Preprocessing.of(dataset), cut)

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

    def export(self, client: int | str, out: str | Path, formats: Sequence[str] = ()) -> Path:
        """Write a client's own model for others, as `idiolect export` does; return where.

        A name ending in .onnx or .pt2 is one program; else it is a folder with a model card, and a
        program for each of `formats`. A folder needs a method and a network that idiolect knows,
        unless `formats` is ["peft"] alone: an adapter of whatever network.
        """
        target, model = Path(out), self.model(client)
        if list(formats) == [PEFT]:
            return save_peft(model.network, target)
        if target.suffix in (".onnx", ".pt2"):
            target.parent.mkdir(parents=True, exist_ok=True)
            export_program(model, target)
            return target
        return export_folder(self._stored(self._number(client), model), target, formats)

    def _stored(self, number: int, model: PersonalModel) -> StoredModel:
        """Describe a client's model so that others can make it again."""
        job = self.job
        assert job is not None
        names, label = self.outcome.members[0].names, self.outcome.label
        networks = [n for n, a in job.architectures.items() if number in (a.clients or (number,))]
        name, _, folder = networks[0].partition(":")
        known = type(job.method) is METHODS.get(job.name) and name in MODELS
        if not known or any(a.auxiliary for a in job.architectures.values()):
            raise ConfigError(
                "a folder that others load holds no code, and this model's network or method is "
                "your own; export it to a .onnx or .pt2 file"
            )
        raw = {
            "name": "fit",
            "rounds": job.rounds,
            "methods": [{"name": job.name, "label": label, **job.method.settings()}],
            "model": {"name": name, **({"weights": base_name(folder)} if folder else {})},
        }
        around = job.architectures[networks[0]].main
        if isinstance(around, AdaptedNetwork):
            raw["adapter"] = {"name": around.adapter.kind, **around.adapter.settings()}
        text = experiment_toml(resolve(raw, "the method", Permissions(Path.cwd())), by_digest)
        held = job.federations[0]
        about = {
            "name": held.dataset.name,
            "data": {"source": held.dataset.name, "provenance": held.dataset.provenance},
        }
        content = document.build_document(about, [self.outcome], complete=True)
        found = findings(Path(), document.plain(content), label, job.seeds[0], number)
        reason = str(found.get("reason", ""))
        info = ModelInfo("fit", label, job.seeds[0], job.rounds, number, text, False, reason)
        public = held.public
        size = 0 if public is None else len(public)
        same = public is not None and public.classes == held.dataset.classes
        form = model.preprocessing
        shape = PublicForm(size, same)
        return StoredModel(info, model.leaves, form, len(names), shape, names[number], found)


def fit(
    method: str | Method,
    federation: Federation,
    model: Models = "dnn",
    *,
    rounds: int = 50,
    seed: int = 0,
    cohort: int | None = None,
    auxiliary: Model | None = None,
    adapter: AdapterLike | None = None,
    device: str = "auto",
    backend: str | Backend = "vectorised",
    every: int = 1,
    metric: str | None = None,
    watch: Watch | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> Result:
    """Train a method on a federation; further arguments are the method's settings.

    `adapter` says what of the network is trained (docs/adapters.md); by default all of it.
    `backend` is the name of a kind, or a `Backend` with settings of its own. `metric` is what the
    result is told by, such as "auroc"; by default the task's own. `progress` shows a bar; by
    default in a notebook and on a terminal.
    """
    job = _job(
        method,
        federation,
        model,
        settings,
        rounds=rounds,
        seeds=(seed,),
        cohort=cohort,
        auxiliary=auxiliary,
        adapter=adapter,
        backend=_machine(backend, device),
        evaluate=Evaluate(every=_whole("every", every, 1), metric=metric),
    )
    with shown(progress) as screen:
        trained = train(job, watch=Several([screen, *([watch] if watch else [])]))
    return Result(trained.outcome, trained.deployed[0], job)


def _job(
    method: str | Method,
    federation: Federation,
    model: Models,
    settings: Mapping[str, Any],
    *,
    rounds: int,
    seeds: Sequence[int],
    cohort: int | None,
    auxiliary: Model | None,
    adapter: AdapterLike | None,
    backend: Backend,
    evaluate: Evaluate,
    label: str = "",
) -> SimulatedJob:
    """Check what was given and make a job of it."""
    _refuse_no_federation(federation)
    seeds = tuple(_whole("seed", seed) for seed in seeds)
    chosen = _method(method, settings)
    if cohort is not None and not 1 <= cohort <= federation.clients:
        raise ConfigError(
            f"cohort is {cohort}, and there are {federation.clients} clients; expected "
            f"1..{federation.clients}"
        )
    second = None if auxiliary is None else _build(auxiliary, federation)
    architectures = _assigned(model, second, federation)
    if adapter is not None:
        around = make_adapter(adapter)
        architectures = {
            label: own._replace(main=AdaptedNetwork(own.main, around))
            for label, own in architectures.items()
        }
    name = method if isinstance(method, str) else type(method).__name__
    return SimulatedJob(
        label=label or chosen.title or name,
        name=name,
        method=chosen,
        seeds=seeds,
        federations=(federation,) * len(seeds),
        architectures=architectures,
        rounds=_whole("rounds", rounds),
        cohort=cohort,
        backend=backend,
        evaluate=evaluate,
    ).settled()


def _refuse_no_federation(federation: Any) -> None:
    if not isinstance(federation, Federation):
        raise ConfigError(
            f"the data is of type {type(federation).__name__}; expected a federation, such as "
            "idiolect.federation(data, client=..., label=...) makes of a file or a DataFrame"
        )


def _whole(name: str, value: Any, least: int = 0) -> int:
    """Refuse what is no whole number, or too small."""
    if not isinstance(value, Integral) or value < least:
        raise ConfigError(f"{name} is {value!r}; expected a whole number, {least} or more")
    return int(value)


@dataclass(frozen=True, eq=False)
class ComparedResults:
    """Several methods on one federation: their results by label, and which is better."""

    results: Mapping[str, Result]
    comparison: Comparison

    @property
    def verdict(self) -> str:
        """What can be said about which is better, in a sentence or two."""
        return self.comparison.verdict.sentence

    def __getitem__(self, label: str) -> Result:
        if label not in self.results:
            raise ConfigError(f"there is no result {suggest(label, self.results)}")
        return self.results[label]

    def __repr__(self) -> str:
        own = pictures.chosen(self._outcomes[0])
        lines = [shortened(self.verdict, 250), f"  test {own.title}, mean over clients:"]
        for label, figures in list(self.comparison.methods.items())[:4]:
            lines.append(f"  {shortened(label, 24):24} {own.written(figures.mean)}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return pictures.comparison_html(self._outcomes, self.comparison)

    def plot(self) -> pictures.Picture:
        """Draw each client's score by method, and the curves over the rounds."""
        return pictures.picture_of(self._outcomes)

    def table(self) -> list[dict[str, Any]]:
        """Return a row per method, seed, client and model."""
        return document.table(document.build_document({}, self._outcomes, complete=True))

    def to_pandas(self) -> Any:
        """Return `table` as a DataFrame of pandas."""
        return _frame(self.table())

    @property
    def _outcomes(self) -> list[Outcome]:
        return [result.outcome for result in self.results.values()]


def compare(what: Any, federation: Any = None, model: Models = "dnn", **options: Any) -> Any:
    """Compare methods: of an experiment file, of a folder of results, or given here.

    `compare("experiment.toml", ...)` does as `idiolect compare` and returns comparison.json.
    `compare(["local", "fedavg", FedPer(lr=0.1)], federation, model, rounds=..., seeds=(0, 1))`
    trains the methods and returns `ComparedResults`; so does `compare([result, other])` of results
    that are there. Methods are names, made methods, or either by label in a dict; `seeds` are
    numbers, or how many; further options are those of `fit`, and settings of the named methods.
    """
    if isinstance(what, str | Path):
        from idiolect.experiment.compare import compare as compare_file

        return compare_file(what, *([] if federation is None else [federation]), **options)
    if isinstance(what, Sequence) and what and all(isinstance(one, Result) for one in what):
        return _compare_results(what)
    return _compare_methods(what, federation, model, **options)


def _compare_results(results: Sequence[Result]) -> ComparedResults:
    labels = [_free(one.outcome.label, results[:n]) for n, one in enumerate(results)]
    return _compared(dict(zip(labels, results, strict=True)))


def _free(label: str, before: Sequence[Result]) -> str:
    """Number a label that occurs again."""
    same = sum(one.outcome.label == label for one in before)
    return f"{label} {same + 1}" if same else label


def _compared(results: Mapping[str, Result], alpha: float = ALPHA) -> ComparedResults:
    if len(results) < 2:
        raise ConfigError("there is one result; a comparison needs two or more")
    named = {
        label: replace(one, outcome=replace(one.outcome, label=label))
        for label, one in results.items()
    }
    outcomes = [one.outcome for one in named.values()]
    first = outcomes[0]
    for other in outcomes[1:]:
        same = [(m.names, m.test) for m in first.members] == [
            (m.names, m.test) for m in other.members
        ]
        if not same or other.metric != first.metric:
            raise ConfigError(
                f"{other.label} and {first.label} are not of the same clients, test rows, seeds "
                "and metric; fit both to one federation"
            )
    content = document.build_document({}, outcomes, complete=True)
    return ComparedResults(named, compare_document(content, alpha=alpha))


def _compare_methods(
    methods: Any,
    federation: Federation | None,
    model: Models,
    *,
    rounds: int = 50,
    seeds: int | Sequence[int] = (0, 1, 2),
    cohort: int | None = None,
    auxiliary: Model | None = None,
    adapter: AdapterLike | None = None,
    device: str = "auto",
    backend: str | Backend = "vectorised",
    every: int = 1,
    metric: str | None = None,
    alpha: float = ALPHA,
    progress: bool | None = None,
    **settings: Any,
) -> ComparedResults:
    stats()  # missing at the end, it would cost the user the wait
    if isinstance(methods, Mapping):
        listed = list(methods.items())
    elif isinstance(methods, Sequence):
        listed = [("", one) for one in methods]
    else:
        raise ConfigError(
            f"the methods are of type {type(methods).__name__}; expected a list such as "
            "['local', 'fedavg'], or a dict of labels and methods"
        )
    if len(listed) < 2:
        raise ConfigError(f"{len(listed)} methods were given; a comparison needs two or more")
    if federation is None:
        raise ConfigError("the federation is missing: compare(methods, federation, ...)")
    jobs: list[SimulatedJob] = []
    known = {name for _, one in listed for name in _settings_of(one)}
    if unknown := sorted(settings.keys() - known):
        raise ConfigError(f"none of the methods has a setting {suggest(unknown[0], known)}")
    for label, one in listed:
        own = {name: value for name, value in settings.items() if name in _settings_of(one)}
        jobs.append(
            _job(
                one,
                federation,
                model,
                own if isinstance(one, str) else {},
                rounds=rounds,
                seeds=tuple(range(_whole("seeds", seeds, 1)))
                if isinstance(seeds, int)
                else tuple(seeds),
                cohort=cohort,
                auxiliary=auxiliary,
                adapter=adapter,
                backend=_machine(backend, device),
                evaluate=Evaluate(every=_whole("every", every, 1), metric=metric),
                label=label,
            )
        )
    labels = [job.label for job in jobs]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise ConfigError(
            f"two methods are called {twice[0]!r}; give them labels: {{'one': ..., 'other': ...}}"
        )
    done: list[Trained] = []
    with shown(progress) as screen:
        screen.plan([planned_work(job) for job in jobs])
        for job in jobs:
            done.append(train(job, watch=screen, earlier=done))
    results = {
        job.label: Result(one.outcome, one.deployed[0], job)
        for job, one in zip(jobs, done, strict=True)
    }
    return _compared(results, alpha)


def _settings_of(method: Any) -> set[str]:
    kind = METHODS.get(method) if isinstance(method, str) else None
    return set(inspect.signature(kind).parameters) if kind is not None else set()


def _frame(rows: list[dict[str, Any]]) -> Any:
    try:
        return import_module("pandas").DataFrame(rows)
    except ImportError as error:
        raise MissingExtra("a DataFrame needs pandas; table() does not", "pandas") from error


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
    return METHODS[method](**settings)


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
    return (
        model if isinstance(model, str) else str(getattr(model, "__name__", type(model).__name__))
    )


def _build(model: Model, federation: Federation) -> Build:
    """Bind a network to the data: by name, a module as it is, or a factory of (shape, classes)."""
    if isinstance(model, nn.Module):
        return lambda: model
    if isinstance(model, str):
        name, colon, folder = model.partition(":")
        if name not in MODELS or (colon and name not in BASED):
            raise ConfigError(f"unknown model {suggest(model, MODELS)}")
        factory: Callable[..., nn.Module] = MODELS[name]
        if colon:
            factory = functools.partial(factory, weights=folder)
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
    return bound(factory, shape, len(dataset.classes), dataset.words, {}, dataset.embedded)
