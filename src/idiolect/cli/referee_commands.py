"""Judge a method beside the field's baselines, and check what others have found: referee."""

import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from idiolect.cli import command_base as base
from idiolect.cli.command_base import CommandGroup, guarded

if TYPE_CHECKING:
    from idiolect.cli.screen import PlainConsole
    from idiolect.results.document import Document

_FAULTY = 13  # exit status: a file that does not hold what it says


class JudgeByDefault(CommandGroup):
    """A group whose first word is a method, unless it is one of the commands."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Take `referee my_method.py` for `referee judge my_method.py`."""
        known = args and (self.get_command(ctx, args[0]) or args[0].startswith("-"))
        return super().resolve_command(ctx, args if known else ["judge", *args])


app = typer.Typer(
    help="Judge a method: `idiolect referee my_method.py`, or check such a judgement.",
    no_args_is_help=True,
    cls=JudgeByDefault,
    rich_markup_mode=None,
)

SIZE = typer.Option(
    "--size",
    help="small (minutes on two cores) or whole (minutes on a GPU).",
    autocompletion=base.completing("small", "whole"),
)


@app.callback()
def _referee() -> None:
    """Judge a method beside twenty baselines on a fixed suite, or check such a judgement."""


@app.command()
@guarded
def judge(
    method: Annotated[
        str, typer.Argument(help="A file with one Method class, module:Class, or a method's name.")
    ],
    size: Annotated[str, SIZE] = "small",
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder; runs/referee/METHOD by default.")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Train the baselines too, instead of stored results.")
    ] = False,
    problem: Annotated[
        list[str] | None, typer.Option("--problem", help="Only this problem; may be repeated.")
    ] = None,
    device: Annotated[str | None, base.DEVICE] = None,
    data_dir: Annotated[Path | None, base.DATA] = None,
    json: Annotated[bool, base.JSON] = False,
) -> None:
    """Train a method on every problem of the suite and compare it with the baselines.

    Goes on by itself where it was stopped. Your file is imported, which runs it.
    """
    from idiolect.analysis.significance import stats
    from idiolect.cli.screen import console, print_json, progress
    from idiolect.experiment.referee.challenger import find_challenger
    from idiolect.experiment.referee.referee_page import write_page
    from idiolect.experiment.referee.referee_run import referee
    from idiolect.experiment.referee.suite import load_suite
    from idiolect.results.run_files import folder_name

    stats()  # missing at the end, it would cost the user the wait
    suite = load_suite(size)
    challenger = find_challenger(method, suite)
    folder = out or Path("runs") / "referee" / folder_name(f"{challenger.label}-{size}")
    saved = "interrupted; finished cells are kept: go on with the same command"
    with base.interruptible(saved), progress(console(stderr=json)) as watch:
        content, path = referee(
            suite, challenger, folder, watch,
            again=again, only=problem or (), device=device, data_dir=data_dir,
        )  # fmt: skip
        page = write_page(content, folder, shlex.join(["idiolect", *sys.argv[1:]]))
    if json:
        print_json(content)
        return
    screen = console()
    _print(screen, content)
    screen.say(f"Report: {page}\nFor others to check: {path} (idiolect referee verify FILE)")


def _print(screen: "PlainConsole", content: "Document") -> None:
    from idiolect.cli.layout import print_table
    from idiolect.core.metrics import metric
    from idiolect.experiment.referee.referee_page import baseline_rows, gaps, problem_rows

    heads = [
        "score", "best baseline", "its score", "beside it", "better/level/worse",
        "best test round*", "worst tenth", "newcomers", "MB", "s",
    ]  # fmt: skip
    rows = []
    for one in problem_rows(content):
        own = metric(one["metric"])
        rows.append(
            [
                one["problem"],
                own.cell(one["mean"]),
                one["best"] or "-",
                own.cell(one["best_mean"]),
                one["outcome"].removesuffix(" found") or "-",
                "/".join(map(str, one["counts"])),
                own.cell(one["best_test_round"]),
                own.cell(one["worst_decile"]),
                own.cell(one["newcomers"]),
                f"{one['bytes'] / 1e6:.3g}",
                f"{one['seconds']:.0f}",
            ]
        )
    suite = content["suite"]
    title = f"{content['challenger']} on the {suite['size']} suite, version {suite['version']}"
    print_table(screen, title, ["problem"], heads, rows)
    screen.say(
        "Scores: test data, last round, each client alike. * chosen on test data, weighed by test "
        "rows: how the field scores, and no result."
    )
    lines = [[label, *map(str, counts)] for label, *counts in baseline_rows(content)]
    print_table(
        screen, "Problems on which it is", ["baseline"], ["better", "level", "worse"], lines
    )
    for line in gaps(content):
        screen.say(line)
    screen.say(f"Verdict: {content['findings']['verdict']['sentence']}")


@app.command(name="verify")
@guarded
def verify_file(
    file: Annotated[Path, typer.Argument(help="referee.json, or a line of the board.")],
    method: Annotated[
        str | None,
        typer.Option("--method", help="The challenger's file, whose digest is compared."),
    ] = None,
    rerun: Annotated[
        list[str] | None,
        typer.Option("--rerun", help="Train PROBLEM/METHOD again and compare; may be repeated."),
    ] = None,
    device: Annotated[str | None, base.DEVICE] = None,
    data_dir: Annotated[Path | None, base.DATA] = None,
    json: Annotated[bool, base.JSON] = False,
) -> None:
    """Check a file of the referee: compute everything again from its stored scores.

    Nothing of the file is run. Your copy of the challenger's code is, if you give it with --method.
    """
    from idiolect.cli.screen import console, print_json, progress
    from idiolect.errors import ConfigError
    from idiolect.experiment.referee.challenger import find_challenger
    from idiolect.experiment.referee.referee_run import read_json
    from idiolect.experiment.referee.suite import SIZES, load_suite
    from idiolect.experiment.referee.verify import FAULT, verify
    from idiolect.experiment.referee.verify import rerun as train_again

    content = read_json(file)
    told = content.get("suite")
    size = told.get("size") if isinstance(told, dict) else None
    challenger = None
    if method is not None:
        challenger = find_challenger(method, load_suite(size if size in SIZES else "small"))
    checks = verify(content, challenger)
    faulty = any(check.kind == FAULT for check in checks)
    if rerun and faulty:
        raise ConfigError(
            f"{file} has faults, so nothing of it is trained again; leave --rerun out"
        )
    for cell in rerun or ():
        with progress(console(stderr=json)) as watch, tempfile.TemporaryDirectory() as folder:
            how: dict[str, Any] = {"device": device, "data_dir": data_dir}
            checks.append(train_again(content, cell, Path(folder), watch, challenger, **how))
    faulty = any(check.kind == FAULT for check in checks)
    if json:
        print_json({"passed": not faulty, "checks": [check._asdict() for check in checks]})
    else:
        screen = console()
        for check in checks:
            # One line each, whatever names the file has: none may look like another check.
            screen.say(f"{check.kind:<5} {' '.join(check.text.split())}")
        screen.say("Faults were found." if faulty else "No fault was found.")
    if faulty:
        raise typer.Exit(_FAULTY)


@app.command(name="suite")
@guarded
def show_suite(
    size: Annotated[str, SIZE] = "small", json: Annotated[bool, base.JSON] = False
) -> None:
    """List the suite: its problems, its baselines and what is tried for each."""
    from idiolect.cli.layout import print_texts
    from idiolect.cli.screen import console, print_json
    from idiolect.experiment.referee.suite import load_suite

    suite = load_suite(size)
    listed = {
        name: {
            "source": one.raw["data"]["source"],
            "partition": one.raw["data"]["partition"],
            "rounds": one.raw["rounds"],
            "cohort": one.raw.get("cohort"),
            "instead": one.instead,
            "budget": one.budget,
            "lr": one.raw["tune"]["space"]["lr"],
        }
        for name, one in suite.problems.items()
    }
    baselines = {own.label: dict(own.search) for own in suite.baselines}
    if json:
        head = {"size": suite.size, "version": suite.version, "digest": suite.digest}
        print_json({**head, "problems": listed, "baselines": baselines})
        return
    screen = console()
    screen.say(f"Suite {suite.size}, version {suite.version}, digest {suite.digest}")
    rows = []
    for name, own in listed.items():
        part = own["partition"]
        how = part if isinstance(part, str) else ", ".join(map(str, part.values()))
        some = f"{own['cohort']} clients a round" if own["cohort"] else "all clients"
        rates = ", ".join(map(str, own["lr"]))
        rows.append([name, f"{own['source']}, {how}; {own['rounds']} rounds, {some}; lr {rates}"])
    print_texts(screen, ("problem", "what it is"), rows)
    tried = [
        [label, "; ".join(f"{k}: {', '.join(map(str, v))}" for k, v in own.items())]
        for label, own in baselines.items()
    ]
    print_texts(screen, ("baseline", "tried beside learning rates"), tried)
