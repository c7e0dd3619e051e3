"""The tables and keys of an experiment file, and how raw TOML values are checked against them.

Fields are in the order that a run writes them.
"""

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, Union

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from idiolect.core.metrics import metric
from idiolect.errors import ConfigError, suggest

Model = TypeVar("Model", bound=BaseModel)

STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)
"""Nothing unknown, nothing changed later, no "5" for 5."""

Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Parts = tuple[str, ...]  # of `idiolect.methods.personalise`, such as ("ft", "kd")
Share = Annotated[float, Field(gt=0, lt=1)]


class WithOptions(BaseModel):
    """A table with options beside its own keys; they are validated where they belong."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    @property
    def options(self) -> dict[str, Any]:
        """The options as written."""
        return dict(self.model_extra or {})


class Named(WithOptions):
    """A thing by name, with its options beside the name; a bare string is a name."""

    name: str

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        return _from_folder({"name": value} if isinstance(value, str) else value)


def _from_folder(value: Any) -> Any:
    """Read name = "hf:PATH" as the network hf with the weights of a folder."""
    name = value.get("name") if isinstance(value, Mapping) else None
    if not isinstance(name, str) or not name.startswith("hf:"):
        return value
    return {**value, "name": "hf", "weights": name.removeprefix("hf:")}


class Public(BaseModel):
    """Unlabelled data that all clients hold."""

    model_config = STRICT

    source: str
    size: Count | None = None  # examples drawn; absent: all
    options: dict[str, Any] = {}


class Text(BaseModel):
    """How words are numbered, so that holders of different texts encode them alike."""

    model_config = STRICT

    # A file with a word a line, the words themselves, or to how many numbers words are hashed.
    words: int | str | tuple[str, ...]
    length: Whole = 0  # words in an example of own text; 0: 200, or 20 for the next word
    next_word: bool = False  # own text has no labels but the words

    @field_validator("words")
    @classmethod
    def _some(cls, words: int | str | tuple[str, ...]) -> int | str | tuple[str, ...]:
        if isinstance(words, int) and words < 8:
            raise ValueError(f"{words} is too few numbers to hash words to; expected 8 or more")
        return words


class TaskTable(WithOptions):
    """What a label is, with options of the task beside its name; a bare string is a name."""

    name: Literal["classes", "labels", "number", "survival"]

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class ColumnTable(BaseModel):
    """What is done with one column of a table; a bare string is its type."""

    model_config = STRICT

    type: Literal["number", "boolean", "category", "date", "ignore"]
    encode: Literal["one-hot", "embedding"] = "one-hot"  # of a category
    # For a missing value; absent: the median of numbers and dates, no value but a flag otherwise.
    impute: Literal["median", "mean", "mode", "none"] | None = None
    scale: bool = True  # to mean 0 and deviation 1
    missing: tuple[str, ...] = ()  # spellings of a missing cell beside the usual
    format: str | None = None  # of a date, such as "%d/%m/%Y"; absent: recognised

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        return {"type": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fits(self) -> "ColumnTable":
        if self.type == "category" and self.impute in ("median", "mean"):
            raise ValueError(f"impute {self.impute!r} is for numbers; use mode or none")
        if self.type in ("number", "date", "boolean") and self.impute == "none":
            raise ValueError("impute 'none' is for categories; use median, mean or mode")
        return self


class Data(BaseModel):
    """Where examples come from and who holds them."""

    model_config = STRICT

    source: str = "embedded"
    options: dict[str, Any] = {}  # of the source
    task: TaskTable | None = None  # absent: the source's own; of an own table, by its label
    columns: dict[str, ColumnTable] | None = None  # of an own table; absent ones are recognised
    # In training: "balanced" by the training rows of all clients, or a weight for each class.
    class_weights: Literal["balanced"] | dict[str, float] | None = None
    normalise: str | None = None
    classes: Annotated[tuple[str, ...], Field(min_length=2)] | None = None  # names, in order
    partition: Named | None = None  # absent: the data's own clients, else iid
    split: tuple[float, float, float] | Literal["file"] | None = None  # absent: the partition's
    val: Annotated[float, Field(ge=0, lt=1)] = 0.2  # of the training file, where split = "file"
    stratify: bool = False
    ordered: bool = False  # split each client's rows in their order instead of at random
    pool: Literal["train", "test", "all"] | None = None
    min_size: Count = 1
    drop: bool = False
    seed: Whole | None = None  # absent: each run's own seed
    public: Public | None = None
    text: Text | None = None  # absent: words are numbered by the training rows of everyone
    # Score on the source's test file too, or on so many of its rows, weighed by a client's classes.
    common_test: bool | Count = False


class Labelled(Named):
    """A network among several; a label distinguishes two of one name."""

    label: str | None = None

    @property
    def label_or_name(self) -> str:
        """What the network is called."""
        return self.label or self.name


class SplitTable(Data):
    """One of the divisions of data that an experiment compares on: [data] with what differs."""

    name: str


class ModelTable(WithOptions):
    """Which network the clients run: one for all, by counts, in turn, or assigned."""

    name: str | None = None
    each: dict[str, Count] | None = None  # so many clients, one after the other
    architectures: Annotated[tuple[Labelled, ...], Field(min_length=1)] | None = None  # in turn
    assign: dict[str, Labelled] | None = None  # by a client's name or number, over all of these
    auxiliary: Named | None = None

    @model_validator(mode="before")
    @classmethod
    def _folder(cls, value: Any) -> Any:
        return _from_folder(value)

    @model_validator(mode="after")
    def _one_of_three(self) -> "ModelTable":
        ways = (self.name, self.each, self.architectures)
        if sum(way is not None for way in ways) != 1:
            raise ValueError("give one of name, each and architectures, such as name = 'dnn'")
        return self


class MethodTable(WithOptions):
    """One method, with the settings that differ from [training]."""

    name: str
    label: str | None = None
    rounds: Count | None = None
    preset: str | None = None  # named settings of the method, under the ones given here
    personalise: Parts | tuple[Parts, ...] | None = None  # after the rounds; several: all of them
    aggregate: Named | None = None  # how the server joins reports; absent: the method's own mean
    refit: bool = False  # train on validation rows too, when they have chosen all there is

    @property
    def combinations(self) -> tuple[Parts, ...]:
        """The combinations of parts, one or many."""
        given = self.personalise or ()
        return (given,) if given and isinstance(given[0], str) else given  # type: ignore[return-value]

    @property
    def label_or_name(self) -> str:
        """What results call the method."""
        return self.label or self.name

    @property
    def settings(self) -> dict[str, Any]:
        """The hyper-parameters as written."""
        return self.options


class AttackTable(WithOptions):
    """A simulated attack: which, by whom, with its options beside them."""

    name: str
    fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of the clients; or `clients`
    clients: tuple[int | str, ...] = ()  # by number or name
    seed: Whole = 0  # of who is drawn


class Evaluation(BaseModel):
    """When models are evaluated during training, and what is kept."""

    model_config = STRICT

    every: Count = 1
    personal: Literal["auto", "always", "never"] = "auto"
    test_curve: bool = False
    train_curve: bool = False
    clients: Count | None = None  # how many are scored along the way; absent: all
    final_clients: Count | None = None  # how many are scored at the end; absent: all
    keep_globals: bool = False
    save_models: bool = True
    trace: Whole = 0  # rounds between records of the server's trace; 0: as every
    metric: str | None = None  # what tunes and gives the verdict; absent: the task's own
    precision: Share = 0.9  # of the metric recall_at_precision
    # The probability from which a row is called positive, for two classes and for labels; or
    # "validation": each client's best on its validation rows. Absent: the likelier answer.
    threshold: Share | Literal["validation"] | None = None
    # What a client would use instead, trained by scikit-learn on its rows alone, beside the methods
    # of `compare`: "boosting", "logistic". Absent: both for a table of few clients; []: none.
    references: tuple[str, ...] | None = None

    def of_job(self) -> dict[str, Any]:
        """Return what concerns the training of one method."""
        return self.model_dump(exclude={"references"})

    @field_validator("metric")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        if name is not None:
            try:
                metric(name)
            except ConfigError as error:
                raise ValueError(str(error)) from None
        return name


class Range(BaseModel):
    """Numbers to draw from; whole ones where both ends are."""

    model_config = STRICT

    low: int | float
    high: int | float
    log: bool = False  # draw the logarithm evenly

    @model_validator(mode="after")
    def _ordered(self) -> "Range":
        if not self.low < self.high or (self.log and self.low <= 0):
            above = "0 < low < high" if self.log else "low < high"
            raise ValueError(f"low is {self.low} and high is {self.high}; expected {above}")
        return self


class Tune(BaseModel):
    """How `compare` chooses settings on validation data, with the same budget for every method."""

    model_config = STRICT

    search: Literal["grid", "random", "optuna"] = "grid"
    budget: Count | None = None  # trials a method; absent: the largest grid, or 10
    rounds: Count | None = None  # of a trial; absent: as many as the method's own
    # On validation data, of the personal models; absent: that of [evaluate].
    metric: str | None = None
    choose: Literal["seed", "all"] = "seed"  # each seed for itself, or one choice by the mean
    seed: Whole = 0  # of the draws
    space: dict[str, Any] = {}  # for every method that has the setting
    methods: dict[str, dict[str, Any]] = {}  # by label: settings of that method alone

    @field_validator("metric")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        return Evaluation._known(name)


class Workers(BaseModel):
    """Where the ray backend finds its workers."""

    model_config = STRICT

    address: str = ""  # of the cluster's head; absent: RAY_ADDRESS, or a cluster on this machine
    workers: Whole = 0  # 0: as many as fit
    cpus: Annotated[float, Field(ge=0)] = 1.0  # of each; whole ones are its threads
    gpus: Annotated[float, Field(ge=0)] = 0.0  # of each; 0.5: two workers share one


class BackendTable(BaseModel):
    """Where and how clients are run."""

    model_config = STRICT

    kind: Literal["vectorised", "sequential", "ray"] = "vectorised"
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    width: Whole = 0  # clients in a block; 0: measured
    checkpoint_every: Whole = 0  # rounds; 0: every few seconds
    personal: Literal["auto", "memory", "disk"] = "auto"  # where personal state is kept
    personal_mb: Whole = 256  # of personal state on disk, so much is kept in memory
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"  # of products
    graph: bool = True  # on CUDA: capture rounds and replay them
    kernels: Literal["first", "meanwhile"] = "meanwhile"  # on CUDA: when the fastest are chosen
    ray: Workers = Workers()  # for the kind of that name


class Deployment(BaseModel):
    """How a real federation waits for its nodes; a simulation ignores it."""

    model_config = STRICT

    timeout: Annotated[float, Field(gt=0)] = 600.0  # seconds a node has for a round
    join: Annotated[float, Field(gt=0)] = 120.0  # seconds a node has to read its data
    minimum: int | float = 0.5  # nodes that must report: how many, or a share of the cohort
    # Reports that end a round, a number or a share of the sites; later ones count when they come.
    # 0: a round waits for all.
    buffer: int | float = 0
    patience: Count = 3  # refused reports after which a node is left out for good
    approval: Annotated[float, Field(gt=0)] = 86400.0  # seconds people at the sites have to say yes
    limit_mb: Count = 256  # the largest message
    secure: bool = False  # the server sees the sum of reports only
    compress: Literal["none", "fp16", "topk"] = "none"  # half precision, or the largest changes
    keep: Annotated[float, Field(gt=0, le=1)] = 0.1  # of topk: the share of numbers that is sent
    packages: tuple[str, ...] = ()  # of networks, on the lists of all sites' operators

    @model_validator(mode="after")
    def _apart(self) -> "Deployment":
        if self.secure and self.compress != "none":
            raise ValueError(
                f"secure and compress = {self.compress!r} exclude each other: masks are whole "
                "numbers of 64 bits, and places of the largest changes would be no secret"
            )
        if self.buffer and (self.secure or self.compress == "topk"):
            raise ValueError(
                "buffer is for reports that the server sees one by one and whole; leave out secure "
                "and compress = 'topk', or buffer"
            )
        return self

    @field_validator("buffer")
    @classmethod
    def _full(cls, buffer: int | float) -> int | float:
        if (isinstance(buffer, int) and buffer >= 0) or 0 < buffer <= 1:
            return buffer
        raise ValueError(f"{buffer!r} is no buffer; expected a number of sites, or 0 < share <= 1")

    @field_validator("minimum")
    @classmethod
    def _some(cls, minimum: int | float) -> int | float:
        if (isinstance(minimum, int) and minimum >= 1) or 0 < minimum <= 1:
            return minimum
        raise ValueError(f"{minimum!r} is no minimum; expected 1 or more nodes, or 0 < share <= 1")


class Logging(BaseModel):
    """Loggers that also get the scores: true, or where to."""

    model_config = STRICT

    tensorboard: bool | str = False  # a folder; true: `tensorboard` in the run's folder
    mlflow: bool | str = False  # a tracking URI; true: `mlflow.db` in the run's folder
    wandb: bool | str = False  # a project; true: `idiolect`


class Experiment(BaseModel):
    """Everything that decides a result."""

    model_config = STRICT

    name: str
    seeds: Annotated[tuple[Whole, ...], Field(min_length=1)] = (0,)
    rounds: Count = 100
    cohort: int | float | None = None  # clients a round: how many, or a share; absent: everyone
    draw: Literal["fixed", "poisson"] = "fixed"  # as many every round, or each by its own coin
    bystanders: Literal["rest", "train"] = "rest"  # outside the cohort; who trains is not heard
    unseen: int | float | None = None  # clients kept out of all rounds: how many, or a share
    data: Data = Data()
    model: ModelTable = ModelTable(name="dnn")
    adapter: Named | None = None  # what of the network is trained; absent: all of it
    training: dict[str, Any] = {}
    aggregate: Named | None = None  # for every method that averages
    attack: AttackTable | None = None  # simulated, to see what a rule of aggregation withstands
    evaluate: Evaluation = Evaluation()
    backend: BackendTable = BackendTable()
    logging: Logging = Logging()
    deploy: Deployment = Deployment()
    tune: Tune | None = None  # for `compare`
    methods: Annotated[tuple[MethodTable, ...], Field(min_length=1)]
    splits: tuple[SplitTable, ...] = ()  # for `compare`; absent: [data] alone
    _notes: tuple[str, ...] = PrivateAttr(())

    @property
    def notes(self) -> tuple[str, ...]:
        """What is noteworthy about how the file was read."""
        return self._notes

    @field_validator("cohort", "unseen", mode="before")
    @classmethod
    def _some(cls, some: object, info: ValidationInfo) -> object:
        least = 0 if info.field_name == "unseen" else 1
        share = isinstance(some, float) and 0 < some < 1
        if some is None or share or (type(some) is int and some >= least):
            return some
        raise ValueError(f"expected {least} or more clients, or 0 < share < 1, not {some!r}")

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) != len(seeds):
            raise ValueError(f"{list(seeds)} names a seed twice; expected distinct seeds")
        return seeds


# Check raw values against a pydantic model, or against what a function's signature says.


def validate(model: type[Model], raw: Any, where: str, path: Sequence[str | int] = ()) -> Model:
    """Validate, or raise one line about the first key that is wrong."""
    if not isinstance(raw, Mapping):
        raise ConfigError(
            f"{where}: {key_path(path)} is {_shown(raw)}, expected a table of "
            f"{', '.join(model.model_fields)}"
        )
    try:
        return model.model_validate(as_tuples(raw))
    except ValidationError as error:
        raise ConfigError(_line(model, error, where, path)) from None


def validate_options(
    model: type[Model],
    options: Mapping[str, Any],
    where: str,
    path: Sequence[str | int],
    beside: Iterable[str],
) -> Model:
    """Validate options that are written beside the keys `beside` of their table."""
    for key in options:
        if key not in model.model_fields:
            known = [*model.model_fields, *beside]
            raise ConfigError(
                f"{where}: unknown key {key_path([*path, key])}: {suggest(key, known)}"
            )
    return validate(model, options, where, path)


def signature_model(function: Callable[..., Any], without: Sequence[str]) -> type[BaseModel]:
    """Make a model of a function's options: their names, types and defaults."""
    fields: dict[str, Any] = {}
    for name, option in inspect.signature(function, eval_str=True).parameters.items():
        if name in without or option.kind in (option.VAR_KEYWORD, option.VAR_POSITIONAL):
            continue
        default = ... if option.default is option.empty else option.default
        fields[name] = (Any if option.annotation is option.empty else option.annotation, default)
    return create_model("Options", __config__=STRICT, **fields)


def with_defaults(values: BaseModel) -> dict[str, Any]:
    """Return every option that has a value, defaults too."""
    named = {name: getattr(values, name) for name in type(values).model_fields}
    return {name: value for name, value in named.items() if value is not None}


def as_tuples(value: Any) -> Any:
    """Turn lists into tuples, all the way down: what is frozen holds no list."""
    if isinstance(value, Mapping):
        return {key: as_tuples(inner) for key, inner in value.items()}
    return tuple(as_tuples(inner) for inner in value) if isinstance(value, list) else value


def _line(
    model: type[BaseModel], error: ValidationError, where: str, path: Sequence[str | int]
) -> str:
    # Unknown keys first: a misspelt required key gives two errors, and this one explains both.
    problems = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    problem = problems[0]
    steps = [step for step in problem["loc"] if not _is_branch(step)]
    key = key_path([*path, *steps])
    kind = problem["type"]
    if kind == "extra_forbidden":
        known = _fields_at(model, steps[:-1])
        return f"{where}: unknown key {key}: {suggest(str(steps[-1]), known)}"
    if kind == "missing":
        return f"{where}: {key} is missing; add it"
    said = problem["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if kind == "tuple_type":
        said = "a list in [ ]"
    if kind == "too_short":
        said = f"a list of {problem['ctx']['min_length']} or more"
    if kind == "value_error":
        return f"{where}: {key or 'the experiment'}: {said}"
    return f"{where}: {key} is {_shown(problem['input'])}, expected {said}"


def _is_branch(step: str | int) -> bool:
    """Return whether a step is pydantic's name for a member of a union, and no key of the file."""
    return isinstance(step, str) and (step in {"int", "float", "str", "bool"} or "[" in step)


def _fields_at(model: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """List the keys that exist where a path leads."""
    here: Any = model
    for step in path:
        if isinstance(step, str) and _is_model(here) and step in here.model_fields:
            here = here.model_fields[step].annotation
        models = [part for part in _parts(here) if _is_model(part)]
        here = models[0] if models else here
    return list(here.model_fields) if _is_model(here) else []


def _parts(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) in (Union, types.UnionType, tuple):
        return [inner for part in typing.get_args(annotation) for inner in _parts(part)]
    return [annotation]


def _is_model(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, BaseModel)


def _shown(value: Any) -> str:
    shown = repr(list(value) if isinstance(value, tuple) else value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def key_path(path: Iterable[Any]) -> str:
    """Write a path of keys and places as one types it: methods[1].lr."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}"
    return text.removeprefix(".")
