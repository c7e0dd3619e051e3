"""A comparison on the screen: figures, costs, pairs, ranks, what was tuned, and the verdict."""

from typing import Any

from idiolect.cli.layout import print_table, print_texts
from idiolect.cli.screen import PlainConsole, percent
from idiolect.core.metrics import Metric, metric

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
        screen.say(found.get("baseline_line", ""))
    if content["overall"] is not None:
        _print_overall(screen, content["overall"], _metric(content["splits"][0]["comparison"]))
        screen.say(f"Over all splits: {content['overall']['sentence']}")
    if not content["complete"]:
        screen.say("Not complete: some methods are not finished yet.")


def _print_methods(screen: PlainConsole, found: dict[str, Any]) -> None:
    """Print a line per method, the best mean first."""
    confidence = f"{100 * (1 - found['alpha']):g}% interval"
    heads = ["mean", confidence, "± clients", "± seeds", "worst tenth", "below local", "Jain"]
    own_metric = _metric(found)
    unit = ", %" if own_metric.percent else ""
    title = (
        f"Test {own_metric.title} of clients' own models{unit}: {found['clients']} clients, "
        f"{len(found['seeds'])} seeds"
    )
    shares = ("std_clients", "std_seeds", "worst_decile")
    rows = [
        [
            label,
            own_metric.cell(own["mean"]),
            _between(own_metric, own["interval"]),
            *(own_metric.cell(own[key]) for key in shares),
            percent(own["below_local"]),
            _number(own["jain"], ".3f"),
            _number(found["ranks"]["average"][label], ".2f"),
        ]
        for label, own in found["methods"].items()
    ]
    if found.get("baseline") is not None:
        guess = [f"guessing: {found['baseline_name']}", own_metric.cell(found["baseline"])]
        rows.append([*guess, *["-"] * (len(heads) - 1), "-"])
    print_table(screen, title, ["method"], [*heads, "rank"], rows)


def _print_costs(screen: PlainConsole, found: dict[str, Any]) -> None:
    """Print what the whole run took, and what had been sent and computed at the target."""
    heads = ["rounds", "MB in all", "seconds in all"]
    if found["target"] is not None:
        target = _metric(found).written(found["target"])
        heads += [f"rounds to {target}", f"MB to {target}", f"seconds to {target}"]
    title = "What it took: MB both ways, mean over seeds; seconds of all seeds together"
    rows = []
    for label, cost in found["costs"].items():
        cells = [str(cost["rounds"]), _mega(cost["bytes"]), _number(cost["seconds"], ".1f")]
        if found["target"] is not None:
            reach = found["reach"].get(label) or {}
            cells += [_number(reach.get("round"), "d"), _mega(reach.get("bytes"))]
            cells.append(_number(reach.get("seconds"), ".1f"))
        rows.append([label, *cells])
    print_table(screen, title, ["method"], heads, rows)


def _print_pairs(screen: PlainConsole, found: dict[str, Any]) -> None:
    """Print the differences between methods; with many, only to the best."""
    pairs, best = found["pairs"], found["verdict"]["best"]
    if not pairs:
        return
    some = pairs if len(pairs) <= _MOST_PAIRS else [p for p in pairs if best == p["better"]]
    tests = {"wilcoxon": "Wilcoxon", "seeds": "over seeds"}
    if found["replication"] == "examples":
        tests = {"examples": "over rows and seeds"}
    own_metric = _metric(found)
    points = " in points" if own_metric.percent else f" of {own_metric.title}"
    title = (
        f"Differences{points}, paired by {found['unit']} ({found['pairs_tested']} pairs); "
        f"p {found['scope']}, by Holm over all pairs of methods"
    )
    head = "points" if own_metric.percent else "difference of means"
    heads = (head, "interval", "p", "difference", "won-lost-level", *tests.values())
    rows = [
        [
            pair["better"],
            pair["worse"],
            own_metric.cell(pair["difference"]),
            _between(own_metric, pair["interval"]),
            _number(pair["p_holm"], ".2g"),
            "different" if pair["different"] else "none found",
            f"{pair['wins']}-{pair['losses']}-{pair['ties']}",
            *(_number(pair[key], ".2g") for key in tests),
        ]
        for pair in some
    ]
    spare = ("won-lost-level", *tests.values())
    print_table(screen, title, ("ahead", "behind"), heads, rows, spare=spare)


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
    title = (
        f"Tuned by {first.get('metric', 'validation')}, {first.get('search', '')}, at most "
        f"{first.get('budget', 0)} settings each"
    )
    rows = []
    for label, record in tuned.items():
        chosen: dict[str, list[str]] = {}
        for one in record["chosen"]:
            words = ", ".join(f"{key}={value}" for key, value in one["settings"].items())
            chosen.setdefault(words, []).append(str(one["seed"]))
        text = "; ".join(f"{words} (seed {', '.join(own)})" for words, own in chosen.items())
        failed = sum(trial["failed"] is not None for trial in record["trials"])
        count = str(len(record["trials"])) + (f", {failed} diverged" if failed else "")
        rows.append([label, count, text or "nothing to tune"])
    print_texts(screen, ("method", "tried", "chosen"), rows, title)


def _print_overall(screen: PlainConsole, found: dict[str, Any], own: Metric) -> None:
    """Print every method's mean on every split, and its rank over splits."""
    splits = list(next(iter(found["means"].values())))
    rows = []
    for label, rank in found["ranks"]["average"].items():
        means = [own.cell(found["means"][label][split]) for split in splits]
        rows.append([label, *means, f"{rank:.2f}"])
    title = f"Mean test {own.title} on every split{', %' if own.percent else ''}"
    print_table(screen, title, ["method"], [*splits, "rank"], rows)


def _metric(found: dict[str, Any]) -> Metric:
    """Return the metric of a comparison; accuracy in older ones."""
    return metric(found.get("metric", "accuracy"))


def _between(own: Metric, ends: list[float | None]) -> str:
    return " to ".join(own.cell(end) for end in ends)


def _mega(value: float | None) -> str:
    return _number(None if value is None else value / 1e6, ",.1f")


def _number(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)
