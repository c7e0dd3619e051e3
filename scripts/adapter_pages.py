"""The pages of the adapters' studies: tables from results/adapters.json."""

import argparse
import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from reproduction import fill

METHODS = {
    "No training": "no training: the base as it is (its head of stars drawn)",
    "FedAvg": "one shared adapter: FedAvg, which is FedIT",
    "Local": "personal from scratch: Local",
    "FedAvg + FT": "shared, then personal: FedAvg + FT",
    "FedSA-LoRA": "A shared, B personal: FedSA-LoRA",
    "pFedLoRA": "a shared and a personal one, mixed: pFedLoRA",
    "Portfolio": "chosen by each client: portfolio",
}
METRICS = {"roles": -1, "reviews": 1}  # 1 where more is better
Figures = dict[str, Any]


def read_json(path: Path | None) -> Figures:
    """Read a file; no file is one without figures."""
    held: Figures = json.loads(path.read_text()) if path else {}
    return held


def write_json(path: Path, content: Figures) -> None:
    """Write a file whole."""
    path.with_suffix(".new").write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    path.with_suffix(".new").replace(path)


def write(args: argparse.Namespace) -> None:
    """Keep the figures in results/, and put the tables into the pages."""
    kept = args.into / "results" / "adapters.json"
    found = read_json(args.figures)
    found = merged(read_json(kept), found) if kept.exists() else found
    write_json(kept, found)
    docs = args.into / "docs"
    fill(docs / "adapters-studies.md", study_tables(found))
    fill(docs / "adapters.md", {"private": private_table(found)})
    print("\n".join(line for name in METRICS for line in to_be_said(found.get(name, {}), name)))


def merged(known: Figures, found: Figures) -> Figures:
    """Add figures to those that are kept; methods that were not run again are named `earlier`."""
    whole = {**known, **found}
    for name in set(known) & set(found):
        before, now = known[name], found[name]
        earlier = [label for label in before["methods"] if label not in now["methods"]]
        earlier += [one for one in now.get("earlier", []) if one not in earlier]
        whole[name] = {**before, **now, "methods": {**before["methods"], **now["methods"]}}
        if earlier:
            whole[name]["earlier"] = earlier
    return whole


def study_tables(found: Figures) -> dict[str, list[str]]:
    """Make the tables of the two studies, and say what was chosen and concluded."""
    columns = [(s, part) for s in ("roles", "reviews") for part in ("clients", "newcomers")]
    heads = [_head(found, name, part) for name, part in columns]
    lines = ["| | " + " | ".join(heads) + " |", "|---" * 5 + "|"]
    guesses = [_number(found, name, None, part) for name, part in columns]
    lines.append("| guessing (own shares of words, majority class) | " + " | ".join(guesses) + " |")
    for label, words in METHODS.items():
        cells = [_number(found, name, label, part) for name, part in columns]
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    words = []
    for name, part in columns:
        own = _part(found, name, part)
        if own:
            words += [f"> {name.capitalize()}, {part}: {own['verdict']}", ""]
        if part == "clients" and own.get("earlier"):
            listed = ", ".join(own["earlier"])
            words += [f"> Of a run before, on a base pretrained alike: {listed}.", ""]
    return {"base": _base(found), "studies": lines, "verdicts": words[:-1], "rates": _rates(found)}


def _part(found: Figures, name: str, part: str) -> Figures:
    own: Figures = found.get(name, {})
    return own if part == "clients" else own.get("newcomers", {})


def _head(found: Figures, name: str, part: str) -> str:
    count = _part(found, name, part).get("clients", "?")
    what = {"roles": "roles: perplexity ↓", "reviews": "reviews: accuracy ↑"}[name]
    return f"{what} ({count} clients)" if part == "clients" else f"{count} newcomers"


def _number(found: Figures, name: str, label: str | None, part: str = "clients") -> str:
    """Write a method's mean and its deviation over seeds; the best of its column is bold."""
    own = _part(found, name, part)
    percent = name == "reviews"
    if label is None:
        guess = own.get("baseline")
        return "" if guess is None else f"{100 * guess:.1f} %" if percent else f"{guess:.0f}"
    scores = own.get("methods", {}).get(label)
    if scores is None:
        return "not measured"
    means = [(100 if percent else 1) * mean(row) for row in scores["scores"]]
    spread = f" ± {stdev(means):.1f}" if len(means) > 1 and stdev(means) > 0.005 else ""
    text = f"{mean(means):.1f}{spread}{' %' if percent else ''}"
    every = [one["mean"] for one in own["methods"].values()]
    best = max(every) if percent else min(every)
    return f"**{text}**" if scores["mean"] == best else text


def _base(found: Figures) -> list[str]:
    study = found.get("roles") or found.get("reviews")
    if not study:
        return []
    own, device = study["base"], study["device"]
    lost = ", ".join(f"{value:.2f} of {kind}" for kind, value in own["held_back_loss"].items())
    rest = f" The studies are in {study['precision'].upper()}." if "precision" in study else ""
    return [
        f"The base: {own['parameters']:,} parameters, {own['vocabulary']:,} tokens, "
        f"{own['seconds']:.0f} s of pretraining ({device}), {own['tokens_read'] / 1e6:.0f} million "
        f"tokens read; held-back loss in nats a token: {lost}.{rest} ± is the deviation over seeds."
    ]


def _rates(found: Figures) -> list[str]:
    """Say what validation rows chose."""
    words = []
    for name in ("roles", "reviews"):
        for label, own in found.get(name, {}).get("methods", {}).items():
            settings = own["chosen"][0].get("settings") if own["chosen"] else None
            if settings:
                said = " and ".join(f"{key} {value:g}" for key, value in settings.items())
                words.append((name, f"{label} {said}"))
    return [
        f"Chosen on validation rows, {name}: " + "; ".join(t for n, t in words if n == name) + "."
        for name in ("roles", "reviews")
    ]


def to_be_said(study: Figures, name: str) -> list[str]:
    """List what words about a study need: who is ahead for how many, trials, clients' means."""
    lines = []
    for part in ("clients", "newcomers"):
        own = study if part == "clients" else study.get("newcomers", {})
        means = {
            label: [mean(seeds) for seeds in zip(*held["scores"], strict=True)]
            for label, held in own.get("methods", {}).items()
        }
        lines.append(f"{name}, {part}: {own.get('verdict', 'not measured')}")
        for label, mine in means.items():
            few = f" ({' '.join(f'{one:.4g}' for one in mine)})" if len(mine) < 11 else ""
            ahead = [
                f"{sum(METRICS[name] * (a - b) > 0 for a, b in zip(mine, theirs, strict=True))}"
                f" of {len(mine)} ahead of {other}"
                for other, theirs in means.items()
                if other != label
            ]
            lines.append(f"  {label} {mean(mine):.4g}{few}: {', '.join(ahead)}")
    for label, held in study.get("methods", {}).items():
        for trial in held["trials"]:
            scores = [row["score"] for row in trial["validation"]]
            said = " ".join(f"{key} {value:g}" for key, value in trial["settings"].items())
            chosen = trial["settings"] == held["chosen"][0].get("settings")
            value = "failed" if None in scores else f"{mean(scores):.4g} on validation rows"
            lines.append(f"  {name}, {label} with {said}: {value}{', chosen' * chosen}")
        lines.append(f"  {name}, {label}: {held['numbers_sent']:,} numbers sent")
        if held.get("weights"):
            lines.append(f"  {name}, {label}, mean weights of its candidates: {held['weights']}")
    return lines


def private_table(found: Figures) -> list[str]:
    """Lay adapters beside the whole network; of the clips each takes its best by validation."""
    head = ("perplexity ↓", "numbers sent", "no training", "no noise", "ε = 8", "clip and rate")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, words in (("lora", "LoRA"), ("whole", "the whole network")):
        methods = found.get(name, {}).get("methods", {})
        hidden = {label: own for label, own in methods.items() if own["privacy"]}
        if not hidden:
            lines.append(f"| {words} |" + " not measured |" * (len(head) - 1))
            continue
        label = min(hidden, key=lambda one: validation(hidden[one]))
        rate = hidden[label]["chosen"][0]["settings"]["lr"]
        cells = [f"{hidden[label]['numbers_sent']:,}"]
        cells += [_private(methods.get(one)) for one in ("No training", "no noise", label)]
        lines.append(f"| {words} | " + " | ".join(cells) + f" | {label.split()[-1]}, {rate:g} |")
    return lines


def validation(method: Figures) -> float:
    """Return the best mean over seeds of a method's trials, on validation rows."""
    trials = [[row["score"] for row in one["validation"]] for one in method["trials"]]
    return min(mean(scores) for scores in trials if None not in scores)


def _private(own: Figures | None) -> str:
    if own is None:
        return "not measured"
    means = [mean(row) for row in own["scores"]]
    spread = f" ± {stdev(means):.1f}" if len(means) > 1 and stdev(means) > 0.005 else ""
    return f"{mean(means):.1f}{spread}"
