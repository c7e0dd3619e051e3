"""The benchmark's tables as lines of text."""

from collections.abc import Iterator, Mapping
from typing import Any

_ROW = "  {:<22}{:>12}{:>14}{:>9}{:>11}{:>9}"


def heading(about: Mapping[str, Any]) -> Iterator[str]:
    """Say what it runs on, and name the columns."""
    where = about.get("gpu") or f"{about['processor']}, {about['threads']} threads"
    yield f"idiolect {about['idiolect']}, torch {about['torch']}, {where}"
    yield _ROW.format("", "ms a round", "samples/s", "ratio", "peak MiB", "padding")


def workload(row: Mapping[str, Any]) -> Iterator[str]:
    """Tell one workload, a line a side."""
    yield f"{row['name']}: {row['about']}" + _difference(row)
    for side, own in row["sides"].items():
        stacked = side in ("vectorised", "graph")
        wide = f" (width {row['width']})" if stacked and row["width"] else ""
        yield _ROW.format(
            side + wide,
            _ms(own["ms"]),
            f"{own['samples_per_second']:,.0f}",
            f"{own['ratio']:.2f}×",
            "" if own["peak_mib"] is None else f"{own['peak_mib']:,.0f}",
            f"{row['padding']:.1%}" if stacked else "",
        )
    for peer, found in row["peers"].items():
        if "ms" in found:
            pace = f"{found['samples_per_second']:,.0f}"
            yield _ROW.format(f"{peer} {found['version']}", _ms(found["ms"]), pace, "", "", "")
        else:
            yield f"  {peer:<22}{found['why']}"
    for peer, ms in row["published_ms"].items():
        yield _ROW.format(f"{peer}, on an H200", _ms(ms), "", "", "", "")


def _difference(row: Mapping[str, Any]) -> str:
    if "difference" not in row:
        return ""
    own = row["difference"]
    return f"  [off by {own['float64']:.0e} in float64, {own['float32']:.0e} in float32]"


def _ms(value: float) -> str:
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def whole(found: Mapping[str, Any]) -> Iterator[str]:
    """Tell a whole experiment."""
    peak = f", {found['peak_mib']:,.0f} MiB" if found["peak_mib"] else ""
    yield (
        f"persfl: {found['about']}; {found['data']}: {found['seconds']:.1f} s "
        f"({found['rounds_seconds']:.1f} rounds, {found['distillation_seconds']:.1f} "
        f"distillation{peak})"
    )


def padding(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Tell what share of the work is padding."""
    yield "padding, share of the examples in an epoch"
    form = "  {:<18}{:>9}{:>9}{:>14}{:>12}{:>12}"
    yield form.format("", "smallest", "largest", "as one block", "cut", "5 runs, cut")
    for row in rows:
        shares = [f"{row[key]:.1%}" for key in ("one_block", "one_run", "five_runs")]
        yield form.format(row["name"], row["smallest"], row["largest"], *shares)


def precision(found: Mapping[str, Any]) -> Iterator[str]:
    """Tell what coarser products do."""
    yield f"precision: {found['about']}"
    for name, scores in found["accuracy"].items():
        mean, change = sum(scores) / len(scores), found["change"][name]
        times = "  ".join(f"{work} {own[name]:.2f} ms" for work, own in found["ms"].items())
        yield f"  {name:<6} accuracy {mean:.2f} % ({change:+.2f})  {times}"


def curve(found: Mapping[str, Any]) -> Iterator[str]:
    """Tell how time grows along an axis."""
    yield f"growth, {found['axis']}"
    for point in found["points"]:
        yield (
            f"  {point['at']:>9,.0f}{_ms(point['ms']):>12} ms"
            f"{point['samples_per_second']:>14,.0f} samples/s"
        )
