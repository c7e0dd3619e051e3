"""Fill docs/performance.md with the figures kept in benchmarks/results: `make docs`.

A table stands between `<!-- NAME -->` and `<!-- end -->`. NAME is a file of results, `cpu` or
`h200` (what `idiolect bench --out` wrote), and a table of it.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"
Found = dict[str, Any]


def page(text: str) -> str:
    """Return the page with its tables made anew."""
    return re.sub(r"<!-- (\w+) (\w+) -->\n.*?<!-- end -->", _filled, text, flags=re.DOTALL)


def _filled(place: "re.Match[str]") -> str:
    file, table = place.groups()
    path = RESULTS / f"{file}.json"
    if not path.exists():
        return place.group(0)  # what was not measured yet, or not again, stays
    found = json.loads(path.read_text(encoding="utf-8"))
    if not found.get(table if table != "differences" else "workloads"):
        return place.group(0)
    lines = "\n".join(TABLES[table](found))
    return f"<!-- {file} {table} -->\n{lines}\n<!-- end -->"


def workloads(found: Found) -> Iterator[str]:
    """Every workload, a row a side."""
    heads = ("workload", "side", "ms a round", "samples/s", "ratio", "peak memory, MiB", "padding")
    yield _row([*heads, "round 1, s"])
    yield "|---|---|---|---|---|---|---|---|"
    for row in found["workloads"]:
        fastest = list(row["sides"])[-1]
        about = row["about"]
        for side, own in row["sides"].items():
            stacked = side in ("vectorised", "graph")
            wide = f", width {row['width']}" if stacked and row["width"] else ""
            ratio = f"{own['ratio']:.2f}×"
            cells = [
                about,
                side + wide,
                _ms(own["ms"]),
                f"{own['samples_per_second']:,.0f}",
                f"**{ratio}**" if side == fastest else ratio,
                "" if own["peak_mib"] is None else f"{own['peak_mib']:,.0f}",
                f"{row['padding']:.1%}" if stacked else "",
                f"{own['first_seconds']:.1f}" if "first_seconds" in own else "",
            ]
            yield _row(cells)
            about = ""
        for peer, own in row["peers"].items():
            if "ms" in own:
                pace = f"{own['samples_per_second']:,.0f}"
                yield _row(["", f"{peer} {own['version']}", _ms(own["ms"]), pace, "", "", "", ""])
        for peer, ms in row["published_ms"].items():
            yield _row(["", f"{peer}, measured on an H200", _ms(ms), "", "", "", "", ""])
    yield ""
    yield _where(found["about"])


def differences(found: Found) -> Iterator[str]:
    """How far the workloads are from the sequential backend, at most."""
    own = [row["difference"] for row in found["workloads"]]
    double, single = ([one[kind] for one in own] for kind in ("float64", "float32"))
    yield (
        f"Difference from the sequential backend in float64: at most {max(double):.0e}; of float32 "
        f"from float64: {min(single):.0e} to {max(single):.0e}."
    )


def padding(found: Found) -> Iterator[str]:
    """What share of the work is padding."""
    yield "| partition | smallest client | largest | as one block | cut by length | five seeds |"
    yield "|---|---|---|---|---|---|"
    for row in found["padding"]:
        shares = [f"{row[key]:.1%}" for key in ("one_block", "one_run", "five_runs")]
        yield _row([row["name"], f"{row['smallest']:,}", f"{row['largest']:,}", *shares])


def growth(found: Found) -> Iterator[str]:
    """How a round's time grows, a row a curve."""
    yield "| what grows | its value: ms a round |"
    yield "|---|---|"
    for curve in found["growth"]:
        points = [f"{point['at']:,.0f}: {_ms(point['ms'])}" for point in curve["points"]]
        yield _row([curve["axis"], "; ".join(points)])


def precision(found: Found) -> Iterator[str]:
    """What coarser products do to accuracy and speed."""
    own = found["precision"]
    works = list(own["ms"])
    yield _row(["products", "accuracy, %", "change", *[f"{work}, ms a round" for work in works]])
    yield _row(["---"] * (3 + len(works)))
    for name, scores in own["accuracy"].items():
        mean = sum(scores) / len(scores)
        times = [_ms(own["ms"][work][name]) for work in works]
        yield _row([name, f"{mean:.2f}", f"{own['change'][name]:+.2f}", *times])
    yield ""
    yield f"{own['about']}; the mean of the seeds' means over clients, on test data."


def persfl(found: Found) -> Iterator[str]:
    """A whole experiment."""
    own = found["persfl"]
    yield (
        f"{own['about']} ({own['data']}): **{own['seconds']:.1f} s**, of which the rounds "
        f"{own['rounds_seconds']:.1f} and distillation {own['distillation_seconds']:.1f}."
    )


TABLES: dict[str, Callable[[Found], Iterator[str]]] = {
    table.__name__: table for table in (workloads, differences, padding, growth, precision, persfl)
}


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _ms(value: float) -> str:
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def _where(about: Found) -> str:
    where = about.get("gpu") or f"{about['processor']}, {about['threads']} threads"
    busy = about.get("load_before")
    loaded = f", load {busy} before" if busy is not None and busy > 1 else ""
    return f"{where}, torch {about['torch']}, Python {about['python']}, {about['date']}{loaded}."


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
