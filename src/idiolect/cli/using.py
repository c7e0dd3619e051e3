"""The commands for a node's finished model: predict, export."""

from pathlib import Path
from typing import Annotated, Any

import typer

from idiolect.cli.guard import guarded
from idiolect.cli.options import TRUST
from idiolect.deploy import personal_models

_NODE = typer.Argument(help="A node's kit, or a node's folder of a local run.")
_METHOD = typer.Option("--method", help="The method's label, where a run had several.")
_SEED = typer.Option("--seed", help="A seed of the run; its first.")


@guarded
def predict(
    node: Annotated[Path, _NODE],
    data: Annotated[Path, typer.Option("--data", help="Rows to predict; labels are not needed.")],
    out: Annotated[Path | None, typer.Option("--out", help="A CSV file; else the screen.")] = None,
    method: Annotated[str | None, _METHOD] = None,
    seed: Annotated[int | None, _SEED] = None,
    label: Annotated[str | None, typer.Option(help="The label column, if there is one.")] = None,
    size: Annotated[str | None, typer.Option(help="Width,height of a folder's images.")] = None,
    text: Annotated[str | None, typer.Option(help="The column of words, where it is text.")] = None,
    every: Annotated[
        bool, typer.Option("--probabilities", help="A column for each class's probability.")
    ] = False,
    trust_code: Annotated[bool, TRUST] = False,
) -> None:
    """Predict with this node's own model, on this node; nothing is sent anywhere."""
    from idiolect.cli.adapting import numbers
    from idiolect.core.checkpoint import write_whole
    from idiolect.deploy.personal_models import load_personal_model, models_home

    given: dict[str, Any] = {"label": label, "text": text}
    given["size"] = None if size is None else numbers("--size", size, int, 2)
    options = {key: value for key, value in given.items() if value is not None}
    model = load_personal_model(models_home(node), method, seed)
    found = personal_models.predict(model, data, options, trust_code)
    text = personal_models.as_csv(found, model.form.classes, every)
    if out is None:
        print(text, end="")
    else:
        write_whole(out, text.encode())
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
    trust_code: Annotated[bool, TRUST] = False,
) -> None:
    """Write this node's own model for other programs: tensors, a torch.export program, or ONNX."""
    from idiolect.deploy.personal_models import load_personal_model, models_home

    personal_models.export(load_personal_model(models_home(node), method, seed), out, trust_code)
    print(out)
