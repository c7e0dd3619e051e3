"""A comparison on the screen: figures, costs, pairs, ranks, what was tuned, and the verdict."""

from typing import Any

from idiolect.cli.screen import PlainConsole, new_table, percent

_MOST_PAIRS = 10  # more make a table that nobody reads; --json has them all


def print_comparison(screen: PlainConsole, content: dict[str, Any]) -> None:
    """Print every split in turn, then all of them together."""
    for split in content["splits"]:
        if split["name"]:
            screen.say(f"\nSplit {split['name']}")
        found = split["comparison"]
        _print_methods(screen, found)
        _print_costs(screen, found)
        for text in split.get("participation", ()):
            screen.say(text)
        _print_pairs(screen, found)
        screen.say(_ranked(found["ranks"]))
        _print_tuned(screen, split["tuned"])
        screen.say(f"Verdict: {found['verdict']['sentence']}")
    if content["overall"] is not None:
        _print_overall(screen, content["overall"])
        screen.say(f"Over all splits: {content['overall']['sentence']}")
    if not content["complete"]:
        screen.say("Not complete: some methods are not finished yet.")


def _print_methods(screen: PlainConsole, found: dict[str, Any]) -> None:
    """Print a line per method, the best mean first."""
    confidence = f"{100 * (1 - found['alpha']):g}% interval"
    heads = ["mean", confidence, "± clients", "± seeds", "worst tenth", "below local", "Jain"]
    table = new_table(
        f"Test accuracy of clients' own models, %: {found['clients']} clients, "
        f"{len(found['seeds'])} seeds",
        ["method"],
        [*heads, "rank"],
    )
    for label, own in found["methods"].items():
        shares = ("std_clients", "std_seeds", "worst_decile", "below_local")
        table.add_row(
            label,
            percent(own["mean"]),
            _between(own["interval"]),
            *(percent(own[key]) for key in shares),
            _number(own["jain"], ".3f"),
            _number(found["ranks"]["average"][label], ".2f"),
        )
    screen.print(table)


def _print_costs(screen: PlainConsole, found: dict[str, Any]) -> None:
    """Print what the whole run took, and what had been sent and computed at the target."""
    heads = ["rounds", "MB in all", "seconds in all"]
    if found["target"] is not None:
        target = f"{percent(found['target'])}%"
        heads += [f"rounds to {target}", f"MB to {target}", f"seconds to {target}"]
    title = "What it took: MB both ways, mean over seeds; seconds of all seeds together"
    table = new_table(title, ["method"], heads)
    for label, cost in found["costs"].items():
        cells = [str(cost["rounds"]), _mega(cost["bytes"]), _number(cost["seconds"], ".1f")]
        if found["target"] is not None:
            reach = found["reach"].get(label) or {}
            cells += [_number(reach.get("round"), "d"), _mega(reach.get("bytes"))]
            cells.append(_number(reach.get("seconds"), ".1f"))
        table.add_row(label, *cells)
    screen.print(table)


def _print_pairs(screen: PlainConsole, found: dict[str, Any]) -> None:
    """Print the differences between methods; with many, only to the best."""
    pairs, best = found["pairs"], found["verdict"]["best"]
    if not pairs:
        return
    some = pairs if len(pairs) <= _MOST_PAIRS else [p for p in pairs if best == p["better"]]
    tests = {"wilcoxon": "Wilcoxon", "seeds": "over seeds"}
    if found["replication"] == "examples":
        tests = {"examples": "over rows and seeds"}
    table = new_table(
        f"Differences in points, paired by {found['unit']} ({found['pairs_tested']} pairs); "
        f"p {found['scope']}, by Holm over all pairs of methods",
        ("ahead", "behind"),
        ("points", "interval", "won-lost-level", *tests.values(), "p"),
    )
    table.add_column("")
    for pair in some:
        table.add_row(
            pair["better"],
            pair["worse"],
            percent(pair["difference"]),
            _between(pair["interval"]),
            f"{pair['wins']}-{pair['losses']}-{pair['ties']}",
            *(_number(pair[key], ".2g") for key in (*tests, "p_holm")),
            "different" if pair["different"] else "no difference found",
        )
    screen.print(table)


def _ranked(ranks: dict[str, Any]) -> str:
    """Say in a line which methods do not differ by average rank."""
    if ranks["critical_difference"] is None:
        return ""
    groups = "; ".join(" = ".join(group) for group in ranks["cliques"]) or "none"
    return (
        f"Average ranks over {ranks['blocks']} pairs, critical difference "
        f"{ranks['critical_difference']:.2f} (Nemenyi); not told apart by rank: {groups}."
    )


def _print_tuned(screen: PlainConsole, tuned: dict[str, Any]) -> None:
    """Print what each method tried and what its seeds chose."""
    if not tuned:
        return
    first = next(iter(tuned.values()))
    table = new_table(
        f"Tuned by {first.get('metric', 'validation')}, {first.get('search', '')}, at most "
        f"{first.get('budget', 0)} settings each",
        ("method", "tried", "chosen"),
    )
    for label, record in tuned.items():
        chosen: dict[str, list[str]] = {}
        for one in record["chosen"]:
            words = ", ".join(f"{key}={value}" for key, value in one["settings"].items())
            chosen.setdefault(words, []).append(str(one["seed"]))
        text = "; ".join(f"{words} (seed {', '.join(own)})" for words, own in chosen.items())
        failed = sum(trial["failed"] is not None for trial in record["trials"])
        count = str(len(record["trials"])) + (f", {failed} diverged" if failed else "")
        table.add_row(label, count, text or "nothing to tune")
    screen.print(table)


def _print_overall(screen: PlainConsole, found: dict[str, Any]) -> None:
    """Print every method's mean on every split, and its rank over splits."""
    splits = list(next(iter(found["means"].values())))
    table = new_table("Mean test accuracy on every split, %", ["method"], [*splits, "rank"])
    for label, rank in found["ranks"]["average"].items():
        means = [percent(found["means"][label][split]) for split in splits]
        table.add_row(label, *means, f"{rank:.2f}")
    screen.print(table)


def _between(ends: list[float | None]) -> str:
    return " to ".join(percent(end) for end in ends)


def _mega(value: float | None) -> str:
    return _number(None if value is None else value / 1e6, ",.1f")


def _number(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)
