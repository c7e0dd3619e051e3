"""Write reports: the page, and beside it every figure and table as a file of its own."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from idiolect.analysis.report import material, page, palette
from idiolect.analysis.report.chart import Chart, csv
from idiolect.analysis.report.sections import sections
from idiolect.analysis.report.sheet import Sheet
from idiolect.analysis.report.svg import svg
from idiolect.core.checkpoint import write_whole
from idiolect.errors import ConfigError
from idiolect.results.models import folder_name

PAGE = "report.html"


def report(
    runs: Sequence[str | Path] | str | Path,
    out: str | Path | None = None,
    *,
    files: str | Path | None = None,
    title: str = "",
    command: str = "",
) -> list[Path]:
    """Write a report of one or several run folders and return what was written, the page first.

    The page stands in the run's folder, or here where there are several, unless `out` says where.
    With a folder in `files`, every figure is written there as SVG and CSV, every table as Markdown,
    LaTeX and CSV.
    """
    folders = [runs] if isinstance(runs, str | Path) else list(runs)
    if not folders:
        raise ConfigError("no run was given; expected the folder of a run, such as runs/demo")
    read = [material.read(one) for folder in folders for one in material.folders(folder)]
    target = Path(out) if out else (Path(folders[0]) if len(folders) == 1 else Path()) / PAGE
    if target.is_dir():
        target = target / PAGE
    told = command or shlex.join(["idiolect", "report", *map(str, folders)])
    verdict = " ".join(filter(None, (material.overall(folder) for folder in folders)))
    write_whole(target, page.html(page.content(read, told, title, verdict)).encode())
    return [target, *(_files(Path(files), read) if files else [])]


def _files(folder: Path, read: Sequence[material.Material]) -> list[Path]:
    looks = palette.looks([pair for one in read for pair in one.labels.items()])
    written: list[Path] = []

    def put(path: Path, text: str) -> None:
        write_whole(path, text.encode())
        written.append(path)

    for place, one in enumerate(read):
        home = folder / f"{place + 1}-{folder_name(one.name)}" if len(read) > 1 else folder
        for section in sections(one):
            for block in section.blocks:
                if isinstance(block, Chart):
                    put(home / "figures" / f"{block.id}.svg", svg(block, looks))
                    put(home / "figures" / f"{block.id}.csv", csv(block.header, block.rows))
                elif isinstance(block, Sheet):
                    put(home / "tables" / f"{block.id}.md", block.markdown())
                    put(home / "tables" / f"{block.id}.tex", block.latex())
                    put(home / "tables" / f"{block.id}.csv", block.csv())
    return written
