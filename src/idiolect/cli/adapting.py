"""The command for clients that come after training: adapt."""

from pathlib import Path
from typing import Annotated, Any

import typer

from idiolect.cli.guard import guarded
from idiolect.cli.options import DATA, DEVICE, JSON, TRUST, complete_label


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
        typer.Option(help="The method's label in the run.", autocompletion=complete_label),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="A seed of the run; its first.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder; RUN/newcomers/DATA by default.")] = None,
    split: Annotated[str, typer.Option(help="Shares, or `file` for own split.")] = "0.6,0.2,0.2",
    label: Annotated[str | None, typer.Option(help="The label column.")] = None,
    client: Annotated[str | None, typer.Option(help="The client column.")] = None,
    split_column: Annotated[str | None, typer.Option(help="The column of train or test.")] = None,
    size: Annotated[str | None, typer.Option(help="Width,height of a folder's images.")] = None,
    network: Annotated[
        str | None, typer.Option(help="The newcomers' network, where the run had several.")
    ] = None,
    device: Annotated[str | None, DEVICE] = None,
    data_dir: Annotated[Path | None, DATA] = None,
    trust_code: Annotated[bool, TRUST] = False,
    json: Annotated[bool, JSON] = False,
) -> None:
    """Give clients that were not in training their personal models, without training anew."""
    if on is not None:
        from idiolect.cli.federating import adapt_on, say, say_aside

        tell = say_aside if json else say
        found = adapt_on(on, folder, site or [], out, method, seed, network, tell)
        _print(found, json, f"Each model is on its node; scores: {found['folder']}")
        return
    from idiolect.errors import ConfigError
    from idiolect.experiment.adapt import adapt as adapt_to

    if data is None:
        raise ConfigError("give the newcomers' --data, or --on KIT --site NAME where it is a node")
    given: dict[str, Any] = {"label": label, "client": client, "split": split_column}
    given["size"] = None if size is None else numbers("--size", size, int, 2)
    content = adapt_to(
        folder,
        data,
        method,
        seed,
        out=out,
        split=split if split == "file" else numbers("--split", split, float, 3),
        network=network,
        device=device,
        data_dir=data_dir,
        options={key: value for key, value in given.items() if value is not None},
        trust_code=trust_code,
    )
    _print(content, json, f"Models: {content['folder']}")


def _print(content: dict[str, Any], json: bool, where: str) -> None:
    from idiolect.cli.screen import console, print_json, print_newcomers

    if json:
        print_json(content)
        return
    screen = console()
    print_newcomers(screen, content)
    for text in [*content["notices"], where]:
        note = "" if text == where else "note: "
        screen.print(f"{note}{text}", markup=False, soft_wrap=True)


def numbers(option: str, text: str, kind: type[int] | type[float], count: int) -> tuple[Any, ...]:
    """Read an option of so many numbers with commas between them."""
    from idiolect.errors import ConfigError

    try:
        numbers = tuple(kind(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) != count:
        raise ConfigError(f"{option} is {text!r}; expected {count} numbers with commas between")
    return numbers
