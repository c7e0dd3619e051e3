"""A first experiment file for given data: what is guessed, why, and the file with its comments."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from idiolect.data import SOURCES, Dataset, read
from idiolect.data.inspection import inspected, table_facts
from idiolect.data.own.csv_files import is_csv
from idiolect.data.own.json_lines import json_lines_files
from idiolect.data.own.photographs import image_files, survey_images
from idiolect.data.own.tables import read_columns
from idiolect.data.tokenisers import EMBEDDED
from idiolect.errors import ConfigError, DataError, IdiolectError
from idiolect.experiment.build import build_jobs, load_dataset
from idiolect.experiment.early_checks import refuse_misfits
from idiolect.experiment.load import dump_toml, parse_experiment, quoted_text

# Names that labels have, the surest first; matched as whole names, then as their last word.
_LABELS = (
    "label target class y outcome diagnosis disease response result survived species stroke "
    "churn default fraud readmitted readmission mortality died death severity stage grade "
    "price score rating quality risk category"
).split()
_TIME = re.compile(
    r"(^|_)(time|days|months|years|duration|tte|os|pfs|follow_?up)(_?(days|months|years))?$", re.I
)
_EVENT = re.compile(r"(^|_)(event|status|dead|died|death|deceased|censor(ed|ing)?)$", re.I)
_SPLITS = ("set", "subset", "part", "partition", "fold")
_SIDE = 64  # pixels that a photograph's longer side is brought to
_LONGEST = 120  # letters of a comment
_MOST_COLUMNS = 200  # of a table that are listed
_SHORTEST, _ROWS = 16, 20  # tokens of a row of next words; rows that a client should have
_FEW = 5  # rows below which a client cannot be divided into training, validation and test


class Guess(NamedTuple):
    """How own data is to be read, as options of `read`, and what of it was guessed."""

    options: dict[str, Any]
    said: dict[str, str]  # by option: why


def guess_options(path: Path, given: dict[str, Any] | None = None) -> Guess:
    """Guess the columns of a table that the user has not named, and the size of photographs."""
    options: dict[str, Any] = dict(given or {})
    said: dict[str, str] = {}
    if path.suffix == ".jsonl" or (path.is_dir() and json_lines_files(path)):
        if "tokeniser" not in options:
            options["tokeniser"] = EMBEDDED
            said["tokeniser"] = "of the small decoder that comes with idiolect"
        _guess_length(path, options, said)
        return Guess(options, said)
    if path.is_dir():
        if "size" not in options and image_files(path):
            _guess_size(path, options, said)
        return Guess(options, said)
    if path.suffix != ".parquet" and not is_csv(path):
        return Guess(options, said)
    table = read_columns(path)
    names = list(table.column_names)
    if "split" not in options and "split" not in names:
        for name in names:
            if name.lower() in _SPLITS and _trains_and_tests(table, name):
                options["split"], said["split"] = name, "it says train and test"
    if "label" not in options and "label" not in names and "text" not in names:
        taken = {options.get("client"), options.get("split")}
        _guess_label([name for name in names if name not in taken], options, said)
    if "client" not in options and "client" not in names:
        labelled = "label" in options or "label" in names
        facts = table_facts(read(path, **{**options, "labelled": labelled}))
        if facts is not None and facts.clients:
            options["client"], said["client"] = facts.clients[0], "by its name"
    return Guess(options, said)


def _guess_length(path: Path, options: dict[str, Any], said: dict[str, str]) -> None:
    """Halve the length of rows of next words until a client has some to divide."""
    found = read(path, **options)
    if "length" in options or not found.sequential or found.clients is None:
        return
    held = np.bincount(found.clients) * found.x.shape[1]
    length = found.x.shape[1]
    while length > _SHORTEST and np.median(held) / length < _ROWS:
        length //= 2
    if length < found.x.shape[1]:
        options["length"], said["length"] = length, "tokens of a row, so that clients have several"


def _guess_label(names: Sequence[str], options: dict[str, Any], said: dict[str, str]) -> None:
    lower = {name.lower(): name for name in names}
    times = [name for name in names if _TIME.search(name)]
    events = [name for name in names if _EVENT.search(name)]
    if len(times) == 1 and len(events) == 1 and options.get("task") in (None, "survival"):
        options["label"], said["label"] = [times[0], events[0]], "a time and its event, by name"
        return
    for word in _LABELS:
        if word in lower:
            options["label"], said["label"] = lower[word], "by its name"
            return
    for word in _LABELS:
        for name in names:
            if word in re.split(r"[^a-z0-9]+", name.lower()):
                options["label"], said["label"] = name, "by its name"
                return
    options["label"], said["label"] = names[-1], "the last column"


def _trains_and_tests(table: Any, name: str) -> bool:
    return {str(one) for one in table[name].unique().to_pylist()} <= {"train", "test"}


def _guess_size(path: Path, options: dict[str, Any], said: dict[str, str]) -> None:
    found = survey_images(path)
    if not found.sizes:
        return
    width, height = found.size
    if max(width, height) > 2 * _SIDE:
        scale = _SIDE / max(width, height)
        options["size"] = [max(16, round(width * scale)), max(16, round(height * scale))]
        said["size"] = f"of {width}×{height}: larger ones train slower, and better"


# The file.


class Starter(NamedTuple):
    """The text of an experiment file, and what is to be told about it."""

    text: str
    said: list[str]


def starter(
    target: str | None, given: dict[str, Any], task: str | None, name: str | None, beside: Path
) -> Starter:
    """Write an experiment for a dataset, for own data or for the digits that come with idiolect.

    A path is written as seen from the folder `beside`.

    What it says was tried: the data is read and divided, networks and methods fit.
    """
    source = target or "embedded"
    own = source not in SOURCES
    options, reasons = dict(given), dict[str, str]()
    if own:
        path = Path(source).expanduser()
        if not path.exists():
            raise DataError(f"{path} does not exist; give a file, a folder or a dataset's name")
        options, reasons = guess_options(path, {**given, **({"task": task} if task else {})})
        options.pop("task", None)
        source = str(path.resolve())
    elif given:
        raise ConfigError(f"{target} is a dataset that has its columns; leave --label and such out")
    dataset = _loaded(source, options, task)
    shown = _relative(source, beside) if own else source
    head = name or (Path(source).name.split(".")[0] if own else source)
    lines = _file(dataset, shown, options, reasons, task, head, own)
    text = "\n".join(lines) + "\n"
    notes = [f"{key}: {_listed(options[key])}, guessed ({why})" for key, why in reasons.items()]
    notes += [
        f"{one.what}" + (f": {one.remedy}" if one.remedy else "")
        for one in inspected(dataset).advice
        if "looks like the client" not in one.what
    ]
    _tried(text, shown, source)
    return Starter(text, notes)


def _loaded(source: str, options: dict[str, Any], task: str | None) -> Dataset:
    data: dict[str, Any] = {"source": source, "options": options}
    raw = {"name": "new", "data": {**data, **({"task": task} if task else {})}}
    text = dump_toml({**raw, "methods": [{"name": "local"}]})
    return load_dataset(parse_experiment(text, (), "new"))


def _tried(text: str, shown: str, source: str) -> None:
    """Read, divide and check what was written, as `run` does before its first round."""
    whole = text.replace(f"source = {quoted_text(shown)}", f"source = {quoted_text(source)}", 1)
    experiment = parse_experiment(whole, (), "the file that would be written")
    try:
        jobs, _ = build_jobs(experiment)
        refuse_misfits(experiment, jobs, Path.cwd())
    except IdiolectError as error:
        raise type(error)(f"no file was written: {error}") from None


def _relative(source: str, beside: Path) -> str:
    """Write a path as an experiment file names it: relative where the file lies above the data."""
    try:
        return str(Path(source).relative_to(beside.resolve()))
    except ValueError:
        return source


def _line(code: str, comment: str = "") -> str:
    """Write a line with its comment; what comes from data cannot end the comment."""
    words = "".join(c for c in " ".join(comment.split()) if c.isprintable())
    words = words if len(words) <= _LONGEST else f"{words[: _LONGEST - 3]}..."
    return f"{code:<27} # {words}" if words else code


def _file(
    dataset: Dataset,
    source: str,
    options: dict[str, Any],
    reasons: dict[str, str],
    task: str | None,
    name: str,
    own: bool,
) -> list[str]:
    found = inspected(dataset)
    kind = dataset.task.kind
    form = found.form if own and dataset.table is not None else _example(dataset)
    lines = [
        "# A first experiment. `idiolect data inspect FILE` shows the data, `idiolect run FILE`",
        "# trains, `idiolect compare FILE` says which method is better. All keys:",
        "# docs/experiments.md.",
        f"name = {quoted_text(name)}",
        _line("seeds = [0]", "compare needs several, such as [0, 1, 2, 3, 4]"),
        _line("rounds = 20", "how often clients and server exchange what they learned"),
        "",
        "[data]",
        _line(f"source = {quoted_text(source)}", f"{len(dataset):,} rows; {form}"),
    ]
    if own and dataset.table is not None:
        why = f"{'as given' if task else 'by the label'}; or {_others(kind)}"
        lines.append(_line(f"task = {quoted_text(task or kind)}", why))
    lines += _partition(dataset)
    if _unscaled(dataset):
        lines.append(_line('normalise = "feature"', "numbers are scaled by the training rows"))
    lines.append(_line("split = [0.6, 0.2, 0.2]", "of each client: training, validation, test"))
    if _rare(dataset):
        words = "the rarer class counts more in training"
        lines.append(_line('class_weights = "balanced"', words))
    if own and options:
        lines += ["", _line("[data.options]", "how the data is read")]
        holds = {one.kind: one.holds for one in found.columns if one.kind in ("label", "client")}
        for key, value in options.items():
            words = "; ".join(
                [
                    *([holds[key]] if holds.get(key) else []),
                    *([f"guessed: {reasons[key]}"] if key in reasons else []),
                ]
            )
            lines.append(_line(f"{key} = {_toml(value)}", words))
    lines += _columns(dataset) if source not in SOURCES else []
    lines += ["", "[model]", *_model(dataset), "", "[training]", *_training(dataset)]
    lines += ["", "[evaluate]", _metric(dataset), *_methods()]
    return lines


def _example(dataset: Dataset) -> str:
    shape = dataset.x.shape[1:]
    if len(shape) == 3:
        colour = "grey" if shape[0] == 1 else "colour"
        return f"{colour} images, {shape[2]}×{shape[1]}"
    return "texts" if dataset.words else f"{'×'.join(map(str, shape))} numbers each"


def _others(kind: str) -> str:
    known = ("classes", "labels", "number", "survival")
    return ", ".join(one for one in known if one != kind)


def _partition(dataset: Dataset) -> list[str]:
    if dataset.clients is not None:
        sizes = np.bincount(dataset.clients, minlength=len(dataset.client_names))
        lines = [_line("", f"{len(sizes)} clients: {_listed(dataset.client_names)}").strip()]
        if small := int((sizes < _FEW).sum()):
            lines.append(_line(f"min_size = {_FEW}", f"{small} clients have fewer rows"))
            lines.append(_line("drop = true", "and are left out"))
        return lines
    clients = _made_up(dataset)
    if dataset.task.kind == "classes" and not dataset.sequential:
        how = f'{{ name = "dirichlet", clients = {clients}, alpha = 0.5 }}'
    else:
        how = f'{{ name = "iid", clients = {clients} }}'
    return [
        "# Nothing says who holds a row: rows are dealt to made-up clients. Where a column does,",
        '# write client = "COLUMN" in [data.options] and take this line away.',
        f"partition = {how}",
    ]


def _made_up(dataset: Dataset) -> int:
    """Return among how many clients rows are dealt that have no owner."""
    return max(2, min(10, len(dataset) // 40))


def _unscaled(dataset: Dataset) -> bool:
    """Return whether a table's numbers would go in as they are."""
    return dataset.table is not None and dataset.table.plain and not dataset.unfitted


def _rare(dataset: Dataset) -> bool:
    if dataset.task.kind != "classes" or dataset.sequential:
        return False
    held = dataset.counts()
    held = held[held > 0]
    return len(held) == 2 and bool(held.min() < 0.1 * held.sum())


def _columns(dataset: Dataset) -> list[str]:
    if dataset.table is None:
        return []
    views = [one for one in inspected(dataset).columns if one.kind not in ("label", "client")]
    lines = ["", _line("[data.columns]", "recognised so; to change one, take its # away")]
    for one in views[:_MOST_COLUMNS]:
        kind = "ignore" if one.kind == "ignored" else one.kind
        gaps = f"{one.missing:.0%} missing" if one.missing else ""
        about = "; ".join(part for part in (one.holds, gaps, one.done) if part)
        lines.append(_line(f"# {_key(one.name)} = {quoted_text(kind)}", about))
    if len(views) > _MOST_COLUMNS:
        lines.append(f"# and {len(views) - _MOST_COLUMNS:,} more, see `idiolect data inspect`")
    return lines


def _model(dataset: Dataset) -> list[str]:
    if dataset.tokeniser is not None:
        return [
            _line('name = "decoder"', "or encoder, or any of transformers: hf:PATH"),
            _line(f'weights = "{EMBEDDED}"', "a folder of your own: give its tokeniser above too"),
            "",
            _line("[adapter]", "the rest is frozen, and shared by all: docs/adapters.md"),
            _line('name = "lora"', "or ia3, bias, prompts, last"),
            "rank = 8",
        ]
    if dataset.sequential:
        return ['name = "next-word-lstm"']
    if dataset.words:
        return ['name = "kim-cnn"']
    if dataset.x.ndim == 4:
        if min(dataset.x.shape[2:]) < 16:
            return [_line('name = "dnn"', "or mlr: docs/networks.md")]
        return [_line('name = "lenet5"', "or dnn, alexnet, resnet18: docs/networks.md")]
    words = "one hidden layer; or mlr (linear), or your own: docs/networks.md"
    return [_line('name = "dnn"', words), "hidden = 64"]


def _training(dataset: Dataset) -> list[str]:
    """Choose a rate for the task, and batches of which a client's rows make several."""
    rate = {"number": 0.02, "survival": 0.02}.get(dataset.task.kind, 0.05)
    adapted = dataset.tokeniser is not None
    rate = 0.002 if adapted else rate
    owners = _made_up(dataset) if dataset.clients is None else len(dataset.client_names)
    rows = 0.6 * len(dataset) / owners
    batch = 32 if rows >= 150 else 16 if rows >= 50 else 8
    return [
        _line(f"lr = {rate}", "of every method that has the setting"),
        _line(f"batch = {batch}", f"a client trains on {rows:,.0f} rows on average"),
        _line("epochs = 2", "passes over a client's data in a round"),
        *([_line('optimiser = "adam"', "which adapters are usually trained by")] * adapted),
        *([_line(f"tune_lr = {rate}", "of what clients train after the rounds")] * adapted),
    ]


def _metric(dataset: Dataset) -> str:
    if _rare(dataset):
        words = "accuracy would reward guessing the frequent class"
        return _line('metric = "auroc"', words)
    if dataset.sequential:
        return _line('metric = "perplexity"', "e to the loss of a word; or accuracy")
    own = dataset.task.primary
    return _line(f'# metric = "{own}"', "what tunes and gives the verdict; this if absent")


def _methods() -> list[str]:
    methods = {
        "local": "each client alone: what a federation has to beat",
        "fedavg": "one model for all",
        "fedavg-ft": "that one, trained on at each client",
        "ditto": "a model for each client, held near the common one",
    }
    lines = ["", '# `idiolect methods` lists all; your own: name = "module:Class".']
    for name, about in methods.items():
        lines += ["[[methods]]", _line(f'name = "{name}"', about), ""]
    return lines[:-1]


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return quoted_text(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(one) for one in value) + "]"
    return str(value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else quoted_text(name)


def _listed(value: Any) -> str:
    if isinstance(value, str | int):
        return str(value)
    names = [str(one) for one in value]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
