"""A personal model in someone's hands: a folder with tensors, scaling, programs and a card."""

import json
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from idiolect.core import checkpoint
from idiolect.core.checkpoint import write_whole
from idiolect.data.preprocessing import Preprocessing
from idiolect.engine.outcome import EFFECTIVE, THRESHOLD
from idiolect.engine.personal_model import PersonalModel
from idiolect.errors import ConfigError, DataError, MissingExtra
from idiolect.experiment.load import parse_toml
from idiolect.experiment.stored_models import (
    ModelInfo,
    StoredModel,
    find_model,
    make_model,
)
from idiolect.models.peft_files import save_peft
from idiolect.results.document import plain, versions
from idiolect.results.run_files import PublicForm

FORMATS = ("safetensors", "pt2", "onnx")  # also ends of a file's name
PEFT = "peft"  # of a model with an adapter: files beside the others
MODEL, ABOUT, PREPROCESSING, CARD = (
    "model.safetensors",
    "model.json",
    "preprocessing.json",
    "README.md",
)
VERSION = 1
_CLIENTS = 10_000_000
_NUMBERS = 1 << 31  # the most numbers of blank public examples
_LONGEST = 1 << 23  # characters of model.json


def export_folder(
    stored: StoredModel, out: Path, formats: Sequence[str] = (), trust: bool = False
) -> Path:
    """Write a model for others: tensors, scaling and a card; as a program where that is asked."""
    for one in formats:
        if one not in (*FORMATS, PEFT):
            raise ConfigError(f"--format is {one!r}; expected one of {', '.join((*FORMATS, PEFT))}")
    if out.is_file():
        raise ConfigError(f"{out} is a file; give --out a folder, or a name ending in .onnx")
    model = make_model(stored, trust)  # refused before anything is written
    out.mkdir(parents=True, exist_ok=True)
    export_file(stored, out / MODEL, trust)
    for kind in formats:
        if kind == PEFT:
            save_peft(model.network, out)
        elif kind != "safetensors":
            export_program(model, out / f"model.{kind}")
    about = _description(stored)
    for name, content in ((ABOUT, about), (PREPROCESSING, stored.form.to_json())):
        text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)
        write_whole(out / name, (text + "\n").encode())
    write_whole(out / CARD, _card(stored, about, formats).encode())
    return out


def export_file(stored: StoredModel, path: Path, trust: bool = False) -> None:
    """Write the model as one file: its tensors, a `torch.export` program, or ONNX."""
    if path.suffix.removeprefix(".") not in FORMATS:
        known = ", ".join(f".{one}" for one in FORMATS)
        raise ConfigError(
            f"{path} ends in {path.suffix!r}; expected one of {known}, or a folder's name without "
            "an end"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".safetensors":
        export_program(make_model(stored, trust), path)
        return
    scaling = {
        "shift": torch.from_numpy(stored.form.shift),
        "scale": torch.from_numpy(stored.form.scale),
    }
    meta = {"about": stored.about._asdict(), "form": stored.form.to_json()}
    checkpoint.save(path, {"model": stored.leaves, "scaling": scaling}, meta, private=False)


def export_program(model: PersonalModel, path: Path) -> None:
    """Write the module as a `torch.export` program or as ONNX, by the end of the name."""
    form = model.preprocessing
    rows = torch.zeros((2, *form.shape), dtype=getattr(torch, form.dtype))
    batch = torch.export.Dim("batch", min=1, max=1 << 20)
    if path.suffix == ".onnx":
        try:
            import onnxscript  # noqa: F401
        except ImportError:
            raise MissingExtra("ONNX needs onnxscript (or export to pt2)", "onnx") from None
    with _quiet():
        program = torch.export.export(model, (rows,), dynamic_shapes=({0: batch},))
        if path.suffix == ".pt2":
            torch.export.save(program, path)
            return
        torch.onnx.export(
            program,
            (rows,),
            str(path),
            dynamo=True,
            verbose=False,
            external_data=False,  # one file
            input_names=["examples"],
            output_names=["outputs"],
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's exporters from telling users about libraries that nobody asked for."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


# Reading it back, trusting nothing in it.


def is_exported(folder: Path) -> bool:
    """Say whether a folder is one that `export_folder` wrote."""
    return (folder / ABOUT).is_file() and (folder / PREPROCESSING).is_file()


def load_exported(folder: str | Path, trust_code: bool = False) -> PersonalModel:
    """Return the model of an exported folder, ready to predict.

    Nothing in the folder is run. A model of an own network names its module, which is imported only
    with `trust_code`.
    """
    return make_model(read_exported(Path(folder)), trust_code)


def client_model(
    folder: str | Path,
    client: int | str | None = None,
    method: str | None = None,
    seed: int | None = None,
    trust_code: bool = False,
) -> PersonalModel:
    """Return a client's own model from the folder of a run, a comparison, newcomers or an export.

    Names and numbers are as those of `idiolect predict`; `method="best"` is by validation data.
    """
    if is_exported(Path(folder)):
        return load_exported(folder, trust_code)
    return make_model(find_model(folder, client, method, seed, trust=trust_code), trust_code)


def read_exported(folder: Path) -> StoredModel:
    """Read what `export_folder` wrote."""
    if not is_exported(folder):
        raise DataError(
            f"{folder} holds no {ABOUT} and {PREPROCESSING}; give a folder that `idiolect export` "
            "wrote"
        )
    about, form = _read_json(folder / ABOUT), _read_json(folder / PREPROCESSING)
    where = str(folder / ABOUT)
    preprocessing = Preprocessing.from_json(form, str(folder / PREPROCESSING))
    _check_about(about, preprocessing, where)
    named, _ = checkpoint.read(folder / MODEL)
    info = ModelInfo(
        about["run"],
        about["method"]["label"],
        about["seed"],
        about["round"],
        about["client"]["number"],
        about["experiment"],
        about["newcomer"],
        about["reason"],
    )
    return StoredModel(
        info,
        {n.removeprefix("model."): leaf for n, leaf in named.items() if n.startswith("model.")},
        preprocessing,
        about["clients"],
        PublicForm(about["public"]["size"], about["public"]["labels"]),
        about["client"]["name"],
        {"run": about["run"], "client": {"personal": {THRESHOLD: about["threshold"]}}},
    )


def _read_json(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
        if len(text) > _LONGEST * 16:
            raise ValueError(f"{len(text)} characters")
        return json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({error}); export the model again") from None


def _check_about(about: Any, form: Preprocessing, where: str) -> None:
    """Refuse a model.json of another make."""

    def whole(value: Any, most: int) -> bool:
        return type(value) is int and 0 <= value < most

    try:
        public = about["public"]
        good = (
            about["version"] == VERSION
            and all(isinstance(about[key], str) for key in ("run", "experiment", "reason"))
            and isinstance(about["method"]["label"], str)
            and isinstance(about["client"]["name"], str)
            and type(about["newcomer"]) is bool
            and whole(about["seed"], 1 << 63)
            and whole(about["round"], 1 << 31)
            and whole(about["clients"], _CLIENTS)
            and whole(about["client"]["number"], about["clients"])
            and whole(public["size"], _NUMBERS // math.prod(form.shape))
            and type(public["labels"]) is bool
            and (about["threshold"] is None or isinstance(about["threshold"], float | int))
        )
    except (KeyError, TypeError):
        good = False
    if not good:
        raise DataError(
            f"{where} is no description of a model that this idiolect reads; export it again"
        )


# The card.


def _description(stored: StoredModel) -> dict[str, Any]:
    """Lay out what a model is: how it was made, of what, and how well it did."""
    about, found = stored.about, stored.found
    own = found.get("client", {})
    data = found.get("data", {})
    described = {
        "version": VERSION,
        "run": str(found.get("run", about.run)),
        "client": {
            "name": stored.name,
            "number": about.client,
            "train": own.get("train"),
            "test": own.get("test"),
        },
        "clients": stored.clients,
        "newcomer": about.newcomer,
        "reason": about.reason,
        "method": {"label": about.label, "settings": found.get("settings") or _told(about)},
        "seed": about.seed,
        "round": about.round,
        "data": {
            "source": data.get("source", ""),
            "provenance": data.get("provenance", ""),
            "licence": _licence(str(data.get("provenance", ""))),
        },
        "scores": {
            "client": _own_scores(own, stored.form),
            "all clients": _mean_scores(found.get("headline", {}), found.get("metric", "accuracy")),
        },
        "privacy": found.get("privacy") or "none",
        "threshold": stored.threshold,
        "public": stored.public._asdict(),
        "experiment": about.experiment,
        "versions": versions(),
    }
    laid: dict[str, Any] = plain(described)
    return laid


def _told(about: ModelInfo) -> dict[str, Any]:
    """Return the settings that a model's experiment names."""
    tables = parse_toml(about.experiment, "the model's experiment").get("methods", [])
    own = [one for one in tables if about.label in (one.get("label"), one.get("name"))]
    return {k: v for k, v in (own or [{}])[0].items() if k not in ("label", "rounds", "preset")}


def _licence(provenance: str) -> str:
    """Find the licence that a dataset's provenance names."""
    import re

    named = re.search(
        r"CC[ -]BY[-A-Z]*(?: \d\.\d)?|CC0(?: \d\.\d)?|MIT|Apache[- ]2\.0|public domain"
        r"|no explicit licence",
        provenance,
    )
    if named:
        return named.group(0)
    if "own data" in provenance or "own text" in provenance:
        return "the user's own data"
    return "not known"


def _count(rows: int | None) -> str:
    return "?" if rows is None else str(rows)


def _own_scores(client: Mapping[str, Any], form: Preprocessing) -> dict[str, Any]:
    """Return the client's own scores on its test rows, a share of right rows with its interval."""
    scores = client.get("personal") or client.get("global") or {}
    kept: dict[str, Any] = {
        name: value
        for name, value in scores.items()
        if isinstance(value, int | float)
        and not name.startswith("val_")
        and name not in (THRESHOLD, EFFECTIVE)
    }
    rows, accuracy = client.get("test"), kept.get("accuracy")
    if rows and accuracy is not None and form.task.kind == "classes" and not form.sequential:
        kept["accuracy_interval"] = wilson(accuracy, rows)
    return kept


def _mean_scores(headline: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """Return the mean over clients, its deviation over clients, and over seeds."""
    model = "personal" if "personal" in headline else next(iter(headline), "")
    figures = headline.get(model)
    if not figures:
        return {}
    both = {"over_seeds": figures["seeds"]["std"], "over_clients": figures["clients"]["std"]}
    return {"model": model, "metric": metric, "mean": figures["seeds"]["mean"], **both}


def wilson(share: float, rows: int, z: float = 1.959964) -> list[float]:
    """Return Wilson's 95 % interval of a share of so many rows."""
    centre = (share + z * z / (2 * rows)) / (1 + z * z / rows)
    half = z * math.sqrt(share * (1 - share) / rows + z * z / (4 * rows**2)) / (1 + z * z / rows)
    return [max(0.0, centre - half), min(1.0, centre + half)]


def _card(stored: StoredModel, about: Mapping[str, Any], formats: Sequence[str]) -> str:
    """Write the model card, for people."""
    form = stored.form
    data, client = about["data"], about["client"]
    lines = [
        f"# {_cell(stored.name or 'A personal model')}: {_cell(about['method']['label'])}",
        "",
        (
            "A personal model of a client that joined after training"
            if about["newcomer"]
            else f"A personal model of one of {stored.clients} clients that learned together"
        )
        + f" in the run {_cell(about['run'])}, made by idiolect {about['versions']['idiolect']}.",
    ]
    if about["reason"]:
        lines += ["", f"The method chose for this client: {_cell(about['reason'])}"]
    lines += [
        "",
        "| | |",
        "|---|---|",
        f"| input | {_input(form)} |",
        f"| output | {_output(form)} |",
        *(
            [f"| called positive | from a probability of {about['threshold']:.4g} |"]
            if about["threshold"] is not None
            else []
        ),
        f"| data | {_cell(data['source'])}. {_cell(data['provenance'])} |",
        f"| licence of the data | {_cell(data['licence'])} |",
        f"| rows of this client | {_count(client['train'])} trained, "
        f"{_count(client['test'])} test |",
        f"| method | {_cell(about['method']['label'])}, {about['round']} rounds, seed "
        f"{about['seed']} |",
        f"| settings | {_cell(_settings(about['method']['settings']))} |",
        f"| privacy | {_cell(_privacy(about['privacy']))} |",
        "",
        "## Scores on test rows",
        "",
        *_score_lines(about["scores"]),
        "",
        "They are of the client's own kind of rows; on others' rows it may do worse.",
        "",
        "## Use",
        "",
        "```python",
        "import idiolect",
        "",
        'model = idiolect.load_exported(".")  # this folder',
        f"print(model.predict({_example(form)}).to_csv())",
        "```",
        "",
        "or `idiolect predict THIS_FOLDER --data new.csv`. "
        f"`{MODEL}` holds the tensors, `{PREPROCESSING}` how rows become the network's input, "
        f"`{ABOUT}` this card for programs. Nothing in this folder is code.",
    ]
    if "onnx" in formats:
        lines += ["", *_onnx_lines(form)]
    if PEFT in formats:
        lines += [
            "",
            "`adapter_config.json`, `adapter_model.safetensors`: "
            '`peft.PeftModel.from_pretrained(base, ".")`, on the base that the first names.',
        ]
    if "pt2" in formats:
        lines += [
            "",
            '`model.pt2`: `torch.export.load("model.pt2").module()(x)`, x as the input above.',
        ]
    return "\n".join(lines) + "\n"


def _cell(text: Any) -> str:
    """Make a text fit for one cell of a table."""
    return " ".join(str(text).replace("|", "/").split()) or "not known"


def _input(form: Preprocessing) -> str:
    if form.kind == "images":
        channels, height, width = form.shape
        return (
            f"images, uint8 [example, {channels}, {height}, {width}], 0 to 255 as read; the model "
            "scales them"
        )
    if form.kind == "text":
        return f"{form.shape[0]} tokens of a vocabulary of {len(form.words)} words"
    if form.encoder is not None:
        taken = list(form.encoder.plans)
        columns = _cell(", ".join(taken[:40]) + (", ..." if len(taken) > 40 else ""))
        return (
            f"a table with the columns {columns}; `{PREPROCESSING}` says how they become the "
            f"{form.shape[0]} numbers, float32 [example, {form.shape[0]}], that the network (and "
            "`model.onnx`, `model.pt2`) takes"
        )
    names = ", ".join(form.features[:12]) + (", ..." if len(form.features) > 12 else "")
    shape = ", ".join(map(str, form.shape))
    return f"numbers, {form.dtype} [example, {shape}], not scaled: {_cell(names or 'no names')}"


def _output(form: Preprocessing) -> str:
    shown = _cell(", ".join(form.classes[:12]) + (", ..." if len(form.classes) > 12 else ""))
    kind = form.task.kind
    if kind == "labels":
        return f"a logit for each label (sigmoid gives its probability): {shown}"
    if kind == "number":
        return f"a number in the unit of the data: {shown}"
    if kind == "survival" and form.task.form == "discrete":
        return f"a logit of the hazard for each interval: {shown}"
    if kind == "survival":
        return "the log of the relative risk: the higher, the sooner"
    return f"a logit for each class (softmax gives probabilities): {shown}"


def _example(form: Preprocessing) -> str:
    if form.kind == "images":
        return '"photo.png"'
    return '["some text"]' if form.kind == "text" and not form.sequential else '"new.csv"'


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in settings.items())


def _privacy(found: Any) -> str:
    if isinstance(found, str) and found != "none":
        return found
    if not isinstance(found, Mapping):
        return "none: the model was trained without noise, and may reveal rows it was trained on"
    if "statement" in found:
        return str(found["statement"])
    return ", ".join(f"{key} = {value}" for key, value in found.items())


def _score_lines(scores: Mapping[str, Any]) -> list[str]:
    lines = ["| | |", "|---|---|"]
    own = dict(scores["client"])
    interval = own.pop("accuracy_interval", None)
    for name, value in own.items():
        said = f"{value:.4f}"
        if name == "accuracy" and interval:
            said += f" (95 % interval {interval[0]:.4f} to {interval[1]:.4f}, Wilson's)"
        lines.append(f"| this client, {name} | {said} |")
    mean = scores["all clients"]
    if mean.get("mean") is not None:
        spread = ", ".join(
            f"± {mean[key]:.4f} {key.replace('_', ' ')}"
            for key in ("over_clients", "over_seeds")
            if mean.get(key) is not None
        )
        lines.append(f"| mean over all clients, {mean['metric']} | {mean['mean']:.4f} {spread} |")
    return lines if len(lines) > 2 else ["The run left no scores beside the model."]


def _onnx_lines(form: Preprocessing) -> list[str]:
    kind = {"uint8": "uint8", "int32": "int32", "int64": "int64"}.get(form.dtype, form.dtype)
    if form.encoder is not None:
        return [
            "`model.onnx` takes scaled and encoded numbers, not the columns as they are:",
            "",
            "```python",
            "import onnxruntime",
            "",
            'session = onnxruntime.InferenceSession("model.onnx")',
            'x = idiolect.load_exported(".").preprocessing.rows("new.csv").x',
            'outputs = session.run(None, {"examples": x})[0]',
            "```",
        ]
    return [
        "```python",
        "import numpy as np",
        "import onnxruntime",
        "",
        'session = onnxruntime.InferenceSession("model.onnx")',
        f"x = np.zeros((1, {', '.join(map(str, form.shape))}), np.{kind})  # as the input above",
        'outputs = session.run(None, {"examples": x})[0]',
        "```",
    ]
