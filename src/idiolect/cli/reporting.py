"""The command that writes reports."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from idiolect.cli.guard import guarded


@guarded
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, one or several.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="The page; report.html in the run's folder.")
    ] = None,
    files: Annotated[
        Path | None,
        typer.Option("--files", help="Also write every figure and table as a file, here."),
    ] = None,
    title: Annotated[str, typer.Option("--title", help="The page's title.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Write a report: one page that opens offline; with --files also SVG, CSV, Markdown, LaTeX."""
    from idiolect.analysis.report import report as write
    from idiolect.cli.screen import print_json

    command = shlex.join(["idiolect", *sys.argv[1:]])
    written = write(list(runs), out, files=files, title=title, command=command)
    if json:
        print_json({"page": str(written[0]), "files": [str(path) for path in written[1:]]})
        return
    print(f"Report: {written[0]}")
    if files:
        print(f"{len(written) - 1} files of figures and tables: {files}")
