"""A comparison on the screen: figures, pairs, ranks, what was tuned, and the verdict."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from idiolect.cli.screen import percent

_MOST_PAIRS = 10  # more make a table that nobody reads; --json has them all


def print_comparison(screen: Console, content: dict[str, Any]) -> None:
    """Print every split in turn, then all of them together."""
    for split in content["splits"]:
        if split["name"]:
            _say(screen, f"\nSplit {split['name']}")
        told = split["comparison"]
        print_methods(screen, told)
        print_costs(screen, told)
        for text in split.get("participation", ()):
            _say(screen, text)
        print_pairs(screen, told)
        _say(screen, ranked(told))
        print_tuned(screen, split["tuned"])
        _say(screen, f"Verdict: {told['verdict']['sentence']}")
    if content["overall"] is not None:
        print_overall(screen, content["overall"])
        _say(screen, f"Over all splits: {content['overall']['sentence']}")
    if not content["complete"]:
        _say(screen, "Not complete: some methods are not finished yet.")


def print_methods(screen: Console, told: dict[str, Any]) -> None:
    """Print a line per method, the best mean first."""
    confidence = f"{100 * (1 - told['alpha']):g}% interval"
    table = Table(
        title=f"Test accuracy of clients' own models, %: {told['clients']} clients, "
        f"{len(told['seeds'])} seeds",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("method")
    heads = ["mean", confidence, "± clients", "± seeds", "worst tenth", "below local", "Jain"]
    heads += ["rank"]
    for head in heads:
        table.add_column(head, justify="right")
    for label, own in told["methods"].items():
        table.add_row(
            label,
            percent(own["mean"]),
            _between(own["interval"]),
            percent(own["std_clients"]),
            percent(own["std_seeds"]),
            percent(own["worst_decile"]),
            percent(own["below_local"]),
            _number(own["jain"], ".3f"),
            _number(told["ranks"]["average"][label], ".2f"),
        )
    screen.print(table)


def print_costs(screen: Console, told: dict[str, Any]) -> None:
    """Print what the whole run took, and what had been sent and computed at the target."""
    table = Table(
        title="What it took: MB both ways, mean over seeds; seconds of all seeds together",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("method")
    heads = ["rounds", "MB in all", "seconds in all"]
    if told["target"] is not None:
        target = f"{percent(told['target'])}%"
        heads += [f"rounds to {target}", f"MB to {target}", f"seconds to {target}"]
    for head in heads:
        table.add_column(head, justify="right")
    for label, cost in told["costs"].items():
        cells = [str(cost["rounds"]), _mega(cost["bytes"]), _number(cost["seconds"], ".1f")]
        if told["target"] is not None:
            reach = told["reach"].get(label) or {}
            cells.append(_number(reach.get("round"), "d"))
            cells.append(_mega(reach.get("bytes")))
            cells.append(_number(reach.get("seconds"), ".1f"))
        table.add_row(label, *cells)
    screen.print(table)


def print_pairs(screen: Console, told: dict[str, Any]) -> None:
    """Print how methods stand to each other; with many, only to the best."""
    pairs, best = told["pairs"], told["verdict"]["best"]
    if not pairs:
        return
    some = pairs if len(pairs) <= _MOST_PAIRS else [p for p in pairs if best == p["better"]]
    table = Table(
        title=f"Differences in points, paired by {told['unit']} ({told['pairs_tested']} pairs); "
        f"p {told['scope']}, by Holm over all pairs of methods",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("ahead")
    table.add_column("behind")
    fixed = told["replication"] == "examples"
    over = ("over rows and seeds",) if fixed else ("Wilcoxon", "over seeds")
    for head in ("points", "interval", "won-lost-level", *over, "p"):
        table.add_column(head, justify="right")
    table.add_column("")
    keys = ("examples",) if fixed else ("wilcoxon", "seeds")
    for pair in some:
        table.add_row(
            pair["better"],
            pair["worse"],
            percent(pair["difference"]),
            _between(pair["interval"]),
            f"{pair['wins']}-{pair['losses']}-{pair['ties']}",
            *(_number(pair[key], ".2g") for key in keys),
            _number(pair["p_holm"], ".2g"),
            "different" if pair["different"] else "no difference found",
        )
    screen.print(table)


def ranked(told: dict[str, Any]) -> str:
    """Say in a line which methods average ranks do not tell apart."""
    ranks = told["ranks"]
    if ranks["critical_difference"] is None:
        return ""
    groups = "; ".join(" = ".join(group) for group in ranks["cliques"]) or "none"
    return (
        f"Average ranks over {ranks['blocks']} pairs, critical difference "
        f"{ranks['critical_difference']:.2f} (Nemenyi); not told apart by rank: {groups}."
    )


def print_tuned(screen: Console, tuned: dict[str, Any]) -> None:
    """Print what each method tried and what its seeds chose."""
    if not tuned:
        return
    first = next(iter(tuned.values()))
    table = Table(
        title=f"Tuned by {first.get('metric', 'validation')}, {first.get('search', '')}, at most "
        f"{first.get('budget', 0)} settings each",
        box=box.SIMPLE_HEAD,
    )
    for head in ("method", "tried", "chosen"):
        table.add_column(head)
    for label, record in tuned.items():
        chosen: dict[str, list[str]] = {}
        for one in record["chosen"]:
            words = ", ".join(f"{key}={value}" for key, value in one["settings"].items())
            chosen.setdefault(words, []).append(str(one["seed"]))
        told = "; ".join(f"{words} (seed {', '.join(own)})" for words, own in chosen.items())
        failed = sum(trial["failed"] is not None for trial in record["trials"])
        count = str(len(record["trials"])) + (f", {failed} diverged" if failed else "")
        table.add_row(label, count, told or "nothing to tune")
    screen.print(table)


def print_overall(screen: Console, told: dict[str, Any]) -> None:
    """Print every method's mean on every split, and its rank over splits."""
    splits = list(next(iter(told["means"].values())))
    table = Table(title="Mean test accuracy on every split, %", box=box.SIMPLE_HEAD)
    table.add_column("method")
    for split in [*splits, "rank"]:
        table.add_column(split, justify="right")
    for label, rank in told["ranks"]["average"].items():
        means = [percent(told["means"][label][split]) for split in splits]
        table.add_row(label, *means, f"{rank:.2f}")
    screen.print(table)


def _between(ends: list[float | None]) -> str:
    return " to ".join(percent(end) for end in ends)


def _mega(value: float | None) -> str:
    return _number(None if value is None else value / 1e6, ",.1f")


def _number(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def _say(screen: Console, text: str) -> None:
    if text:
        screen.print(text, markup=False, soft_wrap=True)
