"""Write docs/board.md from the stored results of methods: `make docs`."""

from pathlib import Path
from typing import Any

from idiolect.core.metrics import metric
from idiolect.experiment.referee.judgement import judge
from idiolect.experiment.referee.referee_run import described, read_lines, stored_folder
from idiolect.experiment.referee.suite import SIZES, Suite, load_suite

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "board.md"

HEAD = """\
# The board

Methods on the [referee's](referee.md) suite: test data, last round, five seeds, settings tuned on
validation data with the same budget for each. Made by `make docs` from the files of
`experiments/referee/results`, and checked against them. In the small suite data is little and
rounds are few: it orders methods under such conditions, and nothing else. Seconds are of machines
that did other work beside, and measure no speed.

**How to read it.** *Rank* is the average over problems, 1 the best. A method whose rank is within
Nemenyi's critical difference of the first is marked =: its rank is **not different from the best**.
In the table of a problem, = marks methods to which no difference from that problem's best was found
(paired tests, Holm over all pairs). Intervals are of 95 % ([statistics](statistics.md)).
*Newcomers* are clients that took part in no round. *Best test round* is how the field scores: the
round that is best on test data, weighed by test rows. It is chosen on test data, so it is no
result; it stands here to be compared with other people's tables, beside the last round with the
same weights (*by test rows*). `digits-...` stand in for problems whose data somebody lacks: they
are in no rank or sum.

## Add a line

1. `idiolect referee my_method.py --size small` (or `whole`), on all problems.
2. `idiolect referee verify runs/referee/.../METHOD.json --method my_method.py` must find no fault.
3. Send that file as a pull request into `experiments/referee/results/SIZE/`, with the method's own
   file or where it is published; then `make docs`. The tests verify every file of the folder, and
   that this page is made of them.
"""


def page() -> str:
    """Return the page."""
    return HEAD + "".join(_size(load_suite(size)) for size in SIZES)


def _size(suite: Suite) -> str:
    lines = {
        label: own
        for label, own in read_lines(stored_folder(suite.size)).items()
        if own["suite"] == described(suite)
    }
    title = f"\n## {suite.size.capitalize()} suite, version {suite.version}\n\n"
    if len(lines) < 2:
        return f"{title}No two methods have results yet.\n"
    cells = {label: own["cells"] for label, own in lines.items()}
    first = [one.name for one in suite.first]
    found = judge(cells, first)
    stand_ins = [name for name in suite.problems if name not in first]
    others = judge(cells, stand_ins)["problems"] if stand_ins else {}
    trained = [one for own in cells.values() for one in own.values() if "device" in one]
    devices = ", ".join(sorted({one["device"] for one in trained}))
    words = f"{len(lines)} methods; digest `{suite.digest[:16]}`; trained on {devices}.\n"
    return (
        title
        + words
        + _overall(found)
        + "".join(_problem(name, own) for name, own in (found["problems"] | others).items())
    )


def _overall(found: dict[str, Any]) -> str:
    ranks = found["overall"]["ranks"]
    if ranks is None:
        return "\nToo few problems are shared by all methods to rank them.\n"
    near = {*found["overall"]["not_different_from_best"], next(iter(ranks["average"]))}
    rows = []
    for label, rank in ranks["average"].items():
        own = [one for one in found["problems"].values() if label in one["methods"]]
        level = sum(label == one["best"] or label in one["not_different_from_best"] for one in own)
        sent = sum(one["methods"][label]["bytes"] for one in own)
        seconds = sum(one["methods"][label]["seconds"] for one in own)
        rows.append(
            f"| {label} | {rank:.1f}{' =' if label in near else ''} | {level} of {len(own)} "
            f"| {sent / 1e6:,.1f} | {seconds:,.0f} |"
        )
    return "\n".join(
        [
            "",
            f"Ranks over {len(found['overall']['problems'])} problems that all have "
            f"({', '.join(found['overall']['problems'])}); critical difference "
            f"{ranks['critical_difference']:.1f}, Friedman p {ranks['friedman']:.2g}.",
            "",
            "| method | rank | not different from the best on | MB | s, final training |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _problem(name: str, found: dict[str, Any]) -> str:
    own = metric(found["metric"])
    unit = "%" if own.percent else own.title
    level = {found["best"], *found["not_different_from_best"]}
    rows = []
    for label, one in found["methods"].items():
        taken = one.get("participation", {})
        new = next((value for key, value in taken.items() if key != "clients"), None)
        newcomers = own.cell(next(iter(new.values()))["never"]) if new else "–"
        low, high = (own.cell(value) for value in one["interval"])
        below = "–" if one["below_local"] is None else f"{100 * one['below_local']:.0f} %"
        rows.append(
            f"| {label} | {own.cell(one['mean'])}{' =' if label in level else ''} "
            f"| {low} to {high} | {own.cell(one['worst_decile'])} "
            f"| {own.cell(one['std_clients'])} | {below} | {newcomers} "
            f"| {own.cell(one['weighted_mean'])} "
            f"| {own.cell(one['best_test_round']['weighted_mean'])} |"
        )
    guess = "" if found["guess"] is None else f" Guessing scores {own.written(found['guess'])}."
    return "\n".join(
        [
            f"\n### {name}, {unit}",
            "",
            f"{found['sentence']}{guess}",
            "",
            "| method | mean | interval | worst tenth | ± clients | below local | newcomers "
            "| by test rows | best test round |",
            "|---|---|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
