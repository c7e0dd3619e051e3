"""Tables of a result: rows for a DataFrame, and columns of text."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from idiolect.results import document
from idiolect.results.document import Document

Row = dict[str, Any]


def table(result: str | Path | Document) -> list[Row]:
    """Give one row per method, seed, client and model; `pandas.DataFrame(table(...))` works."""
    content = result if isinstance(result, dict) else document.read_document(result)
    return [
        {
            "method": label,
            "seed": seed["seed"],
            "client": client["client"],
            **({"network": client["network"]} if "network" in client else {}),
            "model": model,
            **client[model],
            "train": client["train"],
            "test": client["test"],
            **({"took_part": client["took_part"]} if "took_part" in client else {}),
            **client["facts"],
        }
        for label, method in content["methods"].items()
        for seed in method["seeds"]
        for client in seed["clients"]
        for model in seed["models"]
    ]


def summary(content: Document) -> list[Row]:
    """Give one row per method and model: the figures a paper's table has."""
    rows = []
    for label, method in content["methods"].items():
        traffic = [seed["traffic"] for seed in method["seeds"]]
        for model, figures in method["headline"].items():
            per_seed = [seed["models"][model] for seed in method["seeds"]]
            rows.append(
                {
                    "method": label,
                    "model": model,
                    "mean": figures["seeds"]["mean"],
                    "std_seeds": figures["seeds"]["std"],
                    "std_clients": figures["clients"]["std"],
                    "weighted_mean": _mean([seed["weighted_mean"] for seed in per_seed]),
                    "worst_client": _worst(method, model),
                    "rounds": method["rounds"],
                    "megabytes": _mean([t["bytes_down"] + t["bytes_up"] for t in traffic], 1e6),
                    "seconds": method["speed"]["seconds"],
                }
            )
    return rows


def per_client(content: Document) -> tuple[list[str], list[tuple[str, list[float | None]]]]:
    """Give the clients' names, and per method their personal accuracy, mean over seeds.

    Where names differ from seed to seed, the place in the list stands for the client.
    """
    columns = []
    names: list[str] = []
    for label, method in content["methods"].items():
        listed = [[client["client"] for client in seed["clients"]] for seed in method["seeds"]]
        same = all(one == listed[0] for one in listed)
        names = listed[0] if same else [f"client {place}" for place in range(len(listed[0]))]
        columns.append((label, _client_means(method, _headline(method))))
    return names, columns


def _client_means(method: Mapping[str, Any], model: str) -> list[float | None]:
    scores = [[c[model]["accuracy"] for c in seed["clients"]] for seed in method["seeds"]]
    return [_mean(values) for values in zip(*scores, strict=True)]


def _headline(method: Mapping[str, Any]) -> str:
    return str(next(iter(method["headline"])))


def _worst(method: Mapping[str, Any], model: str) -> float | None:
    seen = [value for value in _client_means(method, model) if value is not None]
    return min(seen) if seen else None


def _mean(values: Sequence[float | None], unit: float = 1.0) -> float | None:
    seen = [value for value in values if value is not None]
    return sum(seen) / len(seen) / unit if seen else None
