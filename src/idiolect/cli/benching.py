"""The command that measures: bench."""

from pathlib import Path
from typing import Annotated

import typer

from idiolect.cli.guard import guarded
from idiolect.cli.options import DATA, DEVICE, JSON


@guarded
def bench(
    only: Annotated[
        list[str] | None, typer.Argument(help="Workloads; none: those meant for the device.")
    ] = None,
    device: Annotated[str, DEVICE] = "auto",
    grow: Annotated[
        bool, typer.Option("--grow", help="Also how time grows with clients, batch, network.")
    ] = False,
    precision: Annotated[
        bool, typer.Option("--precision", help="Also what TF32 and bfloat16 do.")
    ] = False,
    peers: Annotated[bool, typer.Option(help="Time pfl and flwr where installed.")] = True,
    check: Annotated[bool, typer.Option(help="First compare with sequential float64.")] = True,
    seconds: Annotated[float, typer.Option(help="Timed turns of each workload.")] = 6.0,
    out: Annotated[Path | None, typer.Option("--out", help="Write the JSON here too.")] = None,
    data_dir: Annotated[Path | None, DATA] = None,
    json: Annotated[bool, JSON] = False,
) -> None:
    """Time plain loops, every backend and installed peers on the same workloads."""
    from idiolect.bench.run_benchmark import Options, bench
    from idiolect.cli.screen import print_json

    chosen = Options(
        device=device,
        only=tuple(only or ()),
        grow=grow,
        precision=precision,
        peers=peers,
        check=check,
        seconds=seconds,
        data_dir=data_dir,
    )
    found = bench(chosen, lambda line: typer.echo(line, err=json), out)
    if json:
        print_json(found)
    if found["faults"]:
        raise typer.Exit(1)
