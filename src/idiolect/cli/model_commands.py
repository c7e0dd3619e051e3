"""Personal models: adapt (for clients that join later), predict, export."""

from pathlib import Path
from typing import Annotated, Any

import typer

from idiolect.cli import command_base as base
from idiolect.cli.command_base import guarded

_NODE = typer.Argument(help="A node's kit, or a node's folder of a local run.")
_METHOD = typer.Option("--method", help="The method's label, where a run had several.")
_SEED = typer.Option("--seed", help="A seed of the run; its first.")


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
    from idiolect.cli.screen import console, new_table, percent

    first = content["newcomers"][0]
    facts = [name for name, value in first["facts"].items() if not isinstance(value, list)]
    models = [f"{model}, {part}" for model in first["models"] for part in ("test", "val")]
    table = new_table(
        f"Newcomers to {content['label']} of {content['run']}, seed {content['seed']}: accuracy, %",
        ["newcomer"],
        ["train", "val", "test", *models, *(name.replace("_", " ") for name in facts)],
    )
    for one in content["newcomers"]:
        scores = [
            percent(own.get(metric))
            for own in one["models"].values()
            for metric in ("accuracy", "val_accuracy")
        ]
        chosen = [f"{one['facts'][name]:g}" for name in facts]
        sizes = [str(one[part]) for part in ("train", "val", "test")]
        table.add_row(one["client"], *sizes, *scores, *chosen)
    screen = console()
    screen.print(table)
    for one in content["newcomers"]:
        screen.say(f"  {one['client']}: {one['reason']}" if one.get("reason") else "")
    for text in content["notices"]:
        screen.say(f"note: {text}")
    screen.say(where)


@guarded
def predict(
    node: Annotated[Path, _NODE],
    data: Annotated[Path, typer.Option("--data", help="Rows to predict; labels are not needed.")],
    out: Annotated[Path | None, typer.Option("--out", help="A CSV file; else the screen.")] = None,
    method: Annotated[str | None, _METHOD] = None,
    seed: Annotated[int | None, _SEED] = None,
    label: Annotated[str | None, typer.Option(help="The label column, if there is one.")] = None,
    size: Annotated[str | None, base.SIZE] = None,
    text: Annotated[str | None, base.TEXT_COLUMN] = None,
    every: Annotated[
        bool, typer.Option("--probabilities", help="A column for each class's probability.")
    ] = False,
    trust_code: Annotated[bool, base.TRUST] = False,
) -> None:
    """Predict with this node's own model; nothing is sent."""
    from idiolect.core.checkpoint import write_whole
    from idiolect.deploy import personal_models

    options = base.reading_options(size, label=label, text=text)
    home = personal_models.models_home(node)
    model = personal_models.load_personal_model(home, method, seed)
    found = personal_models.predict(model, data, options, trust_code)
    csv = personal_models.as_csv(found, model.form.classes, every)
    if out is None:
        print(csv, end="")
    else:
        write_whole(out, csv.encode())
        print(f"{len(found.classes)} predictions: {out}")
    if model.about.reason:
        typer.echo(f"this node's model: {model.about.reason}", err=out is None)
    if found.accuracy is not None:
        typer.echo(f"accuracy on the labels given: {100 * found.accuracy:.2f} %", err=out is None)


@guarded
def export(
    node: Annotated[Path, _NODE],
    out: Annotated[Path, typer.Option("--out", help="A .safetensors, .pt2 or .onnx file.")],
    method: Annotated[str | None, _METHOD] = None,
    seed: Annotated[int | None, _SEED] = None,
    trust_code: Annotated[bool, base.TRUST] = False,
) -> None:
    """Write this node's own model for other programs.

    The name's end chooses: tensors (.safetensors), a torch.export program (.pt2), or ONNX.
    """
    from idiolect.deploy import personal_models

    home = personal_models.models_home(node)
    personal_models.export(personal_models.load_personal_model(home, method, seed), out, trust_code)
    print(out)
