"""Reports: a run's results as one page that opens offline, and as files for a paper."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from idiolect.analysis.report.figures import Chart, Table, styles
from idiolect.analysis.report.page import page_content, page_html, sections
from idiolect.analysis.report.report_data import ReportData, read_runs
from idiolect.analysis.report.svg import svg
from idiolect.core.checkpoint import write_whole
from idiolect.errors import ConfigError
from idiolect.results.run_files import folder_name

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

    The page is written to the run's folder, or here where there are several, unless `out` says
    where. With a folder in `files`, every figure is written there as SVG and CSV, every table as
    Markdown, LaTeX and CSV.
    """
    folders = [runs] if isinstance(runs, str | Path) else list(runs)
    if not folders:
        raise ConfigError("no run was given; expected the folder of a run, such as runs/demo")
    found = [read_runs(folder) for folder in folders]
    data = [one for part, _ in found for one in part]
    verdict = " ".join(sentence for _, sentence in found if sentence)
    target = Path(out) if out else (Path(folders[0]) if len(folders) == 1 else Path()) / PAGE
    if target.is_dir():
        target = target / PAGE
    made_by = command or shlex.join(["idiolect", "report", *map(str, folders)])
    write_whole(target, page_html(page_content(data, made_by, title, verdict)).encode())
    return [target, *(_write_files(Path(files), data) if files else [])]


def _write_files(folder: Path, data: Sequence[ReportData]) -> list[Path]:
    looks = styles([pair for one in data for pair in one.labels.items()])
    texts: dict[Path, str] = {}
    for place, one in enumerate(data):
        home = folder / f"{place + 1}-{folder_name(one.name)}" if len(data) > 1 else folder
        for block in (block for section in sections(one) for block in section.blocks):
            if isinstance(block, Chart):
                texts[home / "figures" / f"{block.id}.svg"] = svg(block, looks)
                texts[home / "figures" / f"{block.id}.csv"] = block.csv()
            elif isinstance(block, Table):
                texts[home / "tables" / f"{block.id}.md"] = block.markdown()
                texts[home / "tables" / f"{block.id}.tex"] = block.latex()
                texts[home / "tables" / f"{block.id}.csv"] = block.csv()
    for path, text in texts.items():
        write_whole(path, text.encode())
    return list(texts)
