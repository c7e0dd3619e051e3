"""Personal models: adapt (for clients that join later), predict, export."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from idiolect.cli import command_base as base
from idiolect.cli.command_base import guarded

if TYPE_CHECKING:
    from idiolect.experiment.stored_models import StoredModel


def _complete_client(context: typer.Context, incomplete: str) -> Iterable[str]:
    """Complete the name of a client in the run that was named before."""
    from idiolect.errors import IdiolectError
    from idiolect.experiment.stored_models import model_names

    named = [context.params.get("folder"), *context.args]
    try:
        folder = next(Path(one) for one in named if one is not None)
        return [name for name in model_names(folder) if name.startswith(incomplete)]
    except (OSError, ValueError, KeyError, TypeError, StopIteration, IdiolectError):
        return []


_FOLDER = typer.Argument(
    help="A folder of run, compare, adapt or export; or a node's kit.", show_default=False
)
_CLIENT = typer.Option(
    "--client", help="Whose model: a name or a number.", autocompletion=_complete_client
)
_METHOD = typer.Option(
    "--method",
    help="The method's label, where there are several; `best` by validation data.",
    autocompletion=base.complete_label,
)
_SEED = typer.Option("--seed", help="A seed of the run; its first.")


_RUN = typer.Option("--run", help="Of a node's kit: the run, where it has models of several.")


def _stored(
    folder: Path,
    client: str | None,
    method: str | None,
    seed: int | None,
    trust: bool,
    run: str | None = None,
) -> "StoredModel":
    """Read a model from whatever kind of folder was given."""
    from idiolect.deploy import personal_models
    from idiolect.errors import ConfigError, DataError
    from idiolect.experiment.exported import is_exported, read_exported
    from idiolect.experiment.stored_models import find_model
    from idiolect.results.run_files import folder_name

    if not folder.is_dir():
        raise DataError(f"{folder} is no folder; give one of run, compare, adapt or export")
    if is_exported(folder):
        return read_exported(folder)
    if personal_models.local_clients(folder):
        return personal_models.local_model(folder, client, method, seed)
    if not personal_models.is_node(folder):
        if below := sorted(p.parent.name for p in folder.glob("*/model.json")):
            if client is not None and folder_name(client) in below:
                return read_exported(folder / folder_name(client))
            some = ", ".join(str(folder / one) for one in below[:6])
            raise ConfigError(f"{folder} holds several models; give one of them: {some}")
        return find_model(folder, client, method, seed, trust=trust)
    home = personal_models.models_home(folder)
    return personal_models.load_personal_model(home, method, seed, run)


def _which(folder: Path, stored: "StoredModel") -> str:
    """Say of a node's model which one it is; nothing of models in other folders."""
    from idiolect.deploy import personal_models

    if not personal_models.is_node(folder):
        return ""
    return personal_models.described(stored, personal_models.models_home(folder))


@guarded
def pin(
    kit: Annotated[Path, typer.Argument(help="A node's kit.", show_default=False)],
    run: Annotated[str, typer.Option("--run", help="The run whose model this site uses.")],
    method: Annotated[str | None, _METHOD] = None,
    seed: Annotated[int | None, _SEED] = None,
) -> None:
    """Choose the model that a site uses.

    `predict` and `export` take it, whatever runs come later, until another is chosen.
    """
    from idiolect.deploy import personal_models

    home = personal_models.models_home(kit)
    base.say(personal_models.described(personal_models.pin(home, run, method, seed), home))


@guarded
def adapt(
    folder: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    data: Annotated[
        str | None, typer.Option("--data", help="The newcomers' data: a path or a source.")
    ] = None,
    on: Annotated[
        str | None,
        typer.Option("--on", help="An admin's kit: the newcomers are nodes of its federation."),
    ] = None,
    site: Annotated[
        list[str] | None, typer.Option("--site", help="With --on: a newcomer; may be repeated.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help="The method's label in the run.", autocompletion=base.complete_label),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="A seed of the run; its first.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder; RUN/newcomers/DATA by default.")] = None,
    split: Annotated[
        str, typer.Option(help="Shares of train, val, test; `file`: as the data says.")
    ] = "0.6,0.2,0.2",
    label: Annotated[str | None, base.LABEL_COLUMN] = None,
    client: Annotated[str | None, typer.Option(help="The client column.")] = None,
    split_column: Annotated[str | None, base.SPLIT_COLUMN] = None,
    size: Annotated[str | None, base.SIZE] = None,
    network: Annotated[
        str | None, typer.Option(help="The newcomers' network, where the run had several.")
    ] = None,
    device: Annotated[str | None, base.DEVICE] = None,
    data_dir: Annotated[Path | None, base.DATA] = None,
    trust_code: Annotated[bool, base.TRUST] = False,
    json: Annotated[bool, base.JSON] = False,
) -> None:
    """Make personal models for clients that join after training.

    The run itself is not trained further.
    """
    from idiolect.errors import ConfigError
    from idiolect.experiment.adapt import adapt as adapt_to

    if on is not None:
        from idiolect.cli.federation_commands import adapt_on

        echo = base.say_aside if json else base.say
        content = adapt_on(on, folder, site or [], out, method, seed, network, echo)
        where = f"Each model is on its node; scores: {content['folder']}"
    elif data is None:
        raise ConfigError("give the newcomers' --data, or --on KIT --site NAME where it is a node")
    else:
        content = adapt_to(
            folder,
            data,
            method,
            seed,
            out=out,
            split=split if split == "file" else base.numbers("--split", split, float, 3),
            network=network,
            device=device,
            data_dir=data_dir,
            options=base.reading_options(size, label=label, client=client, split=split_column),
            trust_code=trust_code,
        )
        where = f"Models: {content['folder']}"
    if json:
        from idiolect.cli.screen import print_json

        print_json(content)
    else:
        _print_newcomers(content, where)


def _print_newcomers(content: dict[str, Any], where: str) -> None:
    """Print what every newcomer holds, how its models score, and what its method chose."""
    from idiolect.cli.layout import print_table
    from idiolect.cli.screen import console
    from idiolect.core.metrics import PRIMARY
    from idiolect.core.metrics import metric as named_metric

    first = content["newcomers"][0]
    known: dict[str, Any] = next(iter(first["models"].values()), {})
    wanted = [content.get("metric"), *PRIMARY.values()]
    some = [name for name in wanted if name and {name, f"val_{name}"} & set(known)]
    metric = named_metric(some[0] if some else "loss")
    facts = [name for name, value in first["facts"].items() if not isinstance(value, list)]
    models = [f"{model}, {part}" for model in first["models"] for part in ("test", "val")]
    rows = []
    for one in content["newcomers"]:
        scores = [
            metric.written(own.get(name)).removesuffix("%")
            for own in one["models"].values()
            for name in (metric.name, f"val_{metric.name}")
        ]
        told = [one["facts"][name] for name in facts]  # None: without validation rows, say
        chosen = ["-" if value is None else f"{value:g}" for value in told]
        sizes = [str(one[part]) for part in ("train", "val", "test")]
        rows.append([one["client"], *sizes, *scores, *chosen])
    screen = console()
    print_table(
        screen,
        f"Newcomers to {content['label']} of {content['run']}, seed {content['seed']}: "
        f"{metric.title}{', %' if metric.percent else ''}",
        ["newcomer"],
        ["train", "val", "test", *models, *(name.replace("_", " ") for name in facts)],
        rows,
    )
    for one in content["newcomers"]:
        screen.say(f"  {one['client']}: {one['reason']}" if one.get("reason") else "")
    for text in content["notices"]:
        screen.say(f"note: {text}")
    screen.say(where)


@guarded
def predict(
    folder: Annotated[Path, _FOLDER],
    data: Annotated[
        Path,
        typer.Option(
            "--data", help="Rows to predict, labelled or not: a table, an image, a folder of them."
        ),
    ],
    client: Annotated[str | None, _CLIENT] = None,
    out: Annotated[Path | None, typer.Option("--out", help="A CSV file; else the screen.")] = None,
    method: Annotated[str | None, _METHOD] = None,
    seed: Annotated[int | None, _SEED] = None,
    run: Annotated[str | None, _RUN] = None,
    label: Annotated[str | None, typer.Option(help="The label column, if there is one.")] = None,
    size: Annotated[str | None, base.SIZE] = None,
    text: Annotated[str | None, base.TEXT_COLUMN] = None,
    every: Annotated[
        bool, typer.Option("--probabilities", help="A column for each class's probability.")
    ] = False,
    trust_code: Annotated[bool, base.TRUST] = False,
) -> None:
    """Predict with a client's own model; nothing is trained or sent."""
    from idiolect.core.checkpoint import write_whole
    from idiolect.experiment.stored_models import make_model

    options = base.reading_options(size, label=label, text=text)
    stored = _stored(folder, client, method, seed, trust_code, run)
    found = make_model(stored, trust_code).predict(data, options)
    csv = found.to_csv(every=every)
    if out is None:
        print(csv, end="")
    else:
        write_whole(out, csv.encode())
        base.say(f"{len(found)} predictions: {out}")
    aside = base.say if out is not None else base.say_aside
    if which := _which(folder, stored):
        aside(which)
    elif stored.name and (client or method):
        aside(f"model of {stored.name}, {stored.about.label}, seed {stored.about.seed}")
    if stored.about.reason:
        aside(f"this client's model: {stored.about.reason}")
    if found.told:
        aside(found.told)
    for text in found.remarks:
        aside(f"note: {text}")


@guarded
def export(
    folder: Annotated[Path, _FOLDER],
    out: Annotated[
        Path,
        typer.Option("--out", help="A folder; or one .safetensors, .pt2 or .onnx file."),
    ],
    client: Annotated[str | None, _CLIENT] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every client's model, a folder each in --out.")
    ] = False,
    format: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            help="pt2, onnx, or peft for an adapter, beside the safetensors; may be repeated.",
        ),
    ] = None,
    method: Annotated[str | None, _METHOD] = None,
    seed: Annotated[int | None, _SEED] = None,
    run: Annotated[str | None, _RUN] = None,
    trust_code: Annotated[bool, base.TRUST] = False,
) -> None:
    """Write a client's own model for other people and programs.

    The folder has tensors, how rows are read, a model card and, if asked for, ONNX or a
    torch.export program. It holds no code; `idiolect predict` takes it.
    """
    from idiolect.deploy.personal_models import local_clients
    from idiolect.errors import ConfigError
    from idiolect.experiment.exported import FORMATS, export_file, export_folder
    from idiolect.experiment.stored_models import model_names
    from idiolect.results.run_files import folder_name

    formats = [part for one in format or () for part in one.split(",")]
    single = out.suffix.removeprefix(".") in FORMATS or (out.suffix != "" and not formats)
    if every and client is not None:
        raise ConfigError("--all and --client were both given; choose one")
    if every and single:
        raise ConfigError(f"--all writes a folder for each client, and --out is {out}; name one")
    names: list[str | None] = [client]
    if every:
        names = [*(local_clients(folder) or model_names(folder))] or [None]
    for name in names:
        stored = _stored(folder, name, method, seed, trust_code, run)
        if which := _which(folder, stored):
            base.say_aside(which)
        if single and out.suffix:
            export_file(stored, out, trust_code)
            print(out)
            if stored.form.encoder is not None and out.suffix in (".onnx", ".pt2"):
                base.say_aside(
                    f"note: {out.name} takes a row's {stored.form.shape[0]} scaled and encoded "
                    "numbers, not its columns; how they are made is in the folder that --out "
                    "without an ending writes"
                )
            continue
        target = out / folder_name(stored.name or "model") if every else out
        base.say(str(export_folder(stored, target, formats, trust_code)))
