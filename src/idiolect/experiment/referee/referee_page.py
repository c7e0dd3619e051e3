"""The referee's report: a page that opens offline, as `idiolect report` makes it."""

from pathlib import Path
from typing import Any

from idiolect.analysis.comparison import compare
from idiolect.analysis.report.figures import Column, Section, Table, paragraph
from idiolect.analysis.report.page import page_content, page_html
from idiolect.analysis.report.report_data import ReportData, curves_of
from idiolect.core.checkpoint import write_whole
from idiolect.core.metrics import metric
from idiolect.experiment.referee.cells import document_of, outcome_of
from idiolect.experiment.referee.suite import load_suite
from idiolect.results.document import Document

PAGE = "referee.html"


def write_page(content: Document, folder: Path, command: str) -> Path:
    """Write the page of a referee's file."""
    data = []
    for name in content["findings"]["problems"]:
        records = {
            label: own["cells"][name]
            for label, own in content["methods"].items()
            if "failed" not in own["cells"].get(name, {"failed": ""})
        }
        made = document_of(name, records)
        curves = [
            one for label, own in records.items() for one in curves_of(outcome_of(label, own))
        ]
        data.append(ReportData(made, curves, folder=name, comparison=compare(made)))
    title = f"{content['challenger']}, judged on the {content['suite']['size']} suite"
    shown = page_content(data, command, title, content["findings"]["verdict"]["sentence"])
    shown["runs"][0]["sections"].insert(0, _section(content))
    path = folder / PAGE
    write_whole(path, page_html(shown).encode())
    return path


def problem_rows(content: Document) -> list[dict[str, Any]]:
    """Return a row for each problem: the challenger beside the best baseline, and its costs."""
    rows = []
    challenger = content["challenger"]
    for name, own in content["findings"]["problems"].items():
        if challenger not in own["methods"]:
            continue
        mine, against = own["methods"][challenger], own.get("against", {})
        others = {one: own["methods"][one]["mean"] for one in against}
        choose = max if own["higher"] else min
        best = choose(others, key=lambda one: others[one]) if others else ""
        taken = mine.get("participation", {})
        newcomers: dict[str, Any] = next((v for k, v in taken.items() if k != "clients"), {})
        rows.append(
            {
                "problem": name,
                "metric": own["metric"],
                "mean": mine["mean"],
                "interval": mine["interval"],
                "best": best,
                "best_mean": others.get(best),
                "outcome": against[best]["outcome"] if best else "",
                "counts": [
                    sum(one["outcome"] == kind for one in against.values())
                    for kind in ("better", "no difference found", "worse")
                ],
                "weighted_mean": mine["weighted_mean"],
                "best_test_round": mine["best_test_round"]["weighted_mean"],
                "worst_decile": mine["worst_decile"],
                "std_clients": mine["std_clients"],
                "below_local": mine["below_local"],
                "newcomers": next(iter(newcomers.values()))["never"] if newcomers else None,
                "bytes": mine["bytes"],
                "seconds": mine["seconds"],
            }
        )
    return rows


def baseline_rows(content: Document) -> list[tuple[str, int, int, int]]:
    """Return for each baseline on how many problems the challenger is better, level and worse."""
    counts: dict[str, dict[str, int]] = {}
    for own in content["findings"]["problems"].values():
        for label, one in own.get("against", {}).items():
            kept = counts.setdefault(label, {})
            kept[one["outcome"]] = kept.get(one["outcome"], 0) + 1
    kinds = ("better", "no difference found", "worse")
    return [
        (label, *(kept.get(kind, 0) for kind in kinds))  # type: ignore[misc]
        for label, kept in counts.items()
    ]


def gaps(content: Document) -> list[str]:
    """Say in a line each what the file lacks: problems, and stored baselines."""
    reasons: dict[str, list[str]] = {}
    for name, why in content["left_out"].items():
        reasons.setdefault(why, []).append(name)
    lines = [f"Left out: {', '.join(names)} ({why})." for why, names in reasons.items()]
    own = content["methods"][content["challenger"]]
    lines += [f"{name}: it cannot: {why}." for name, why in own["unable"].items()]
    missing: dict[str, list[str]] = {}
    for baseline in load_suite(content["suite"]["size"]).baselines:
        line = content["methods"].get(baseline.label, {"cells": {}, "unable": {}})
        for name in content["problems"]:
            if name not in line["cells"] and name not in line["unable"]:
                missing.setdefault(name, []).append(baseline.label)
    lines += [
        f"{name}: no stored result of {len(labels)} baselines ({', '.join(labels)}); --again "
        "trains them."
        for name, labels in missing.items()
    ]
    return lines


def _section(content: Document) -> Section:
    suite = content["suite"]
    blocks = [
        paragraph(content["findings"]["verdict"]["sentence"], "Verdict."),
        *map(paragraph, gaps(content)),
    ]
    heads = (
        "problem", "score", "interval", "best baseline", "its score", "beside it",
        "better / level / worse", "by test rows", "best test round", "worst tenth",
        "below local", "newcomers", "MB", "seconds",
    )  # fmt: skip
    rows = []
    for one in problem_rows(content):
        own = metric(one["metric"])
        low, high = one["interval"]
        rows.append(
            (
                one["problem"] if own.name == "accuracy" else f"{one['problem']}, {own.title}",
                own.cell(one["mean"]),
                f"{own.cell(low)} to {own.cell(high)}",
                one["best"],
                own.cell(one["best_mean"]),
                one["outcome"],
                " / ".join(map(str, one["counts"])),
                own.cell(one["weighted_mean"]),
                own.cell(one["best_test_round"]),
                own.cell(one["worst_decile"]),
                "–" if one["below_local"] is None else f"{100 * one['below_local']:.0f}%",
                own.cell(one["newcomers"]),
                f"{one['bytes'] / 1e6:,.1f}",
                f"{one['seconds']:,.0f}",
            )
        )
    problems = Table(
        "referee-problems",
        f"{content['challenger']} on every problem",
        "Scores are of the last round, each client alike. “By test rows” is the same round weighed "
        "by test rows; “best test round” is how the field scores, weighed the same, of the round "
        "that is best on test data: it is chosen on test data and no result. Newcomers took part "
        "in no round. Better, level and worse count baselines, after Holm's correction.",
        [Column(head) for head in heads],
        rows,
    )
    baselines = Table(
        "referee-baselines",
        "Beside each baseline: on how many problems",
        "Level: no difference found.",
        [Column("baseline"), *(Column(head, "whole") for head in ("better", "level", "worse"))],
        baseline_rows(content),
    )
    lead = (
        f"Suite {suite['size']}, version {suite['version']}, digest {suite['digest'][:12]}; check "
        "the figures with “idiolect referee verify referee.json”."
    )
    return Section("referee", "What the referee found", lead, [*blocks, problems, baselines])
