"""Fill the table of docs/robust.md: every rule under every attack, on the embedded digits.

python scripts/attack_table.py     # about a minute on two cores
"""

import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from reproduction import fill, table

import idiolect

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "robust.md"
FILE = ROOT / "experiments" / "robust" / "digits.toml"
ATTACKS = {
    "none": [],
    "label-flip": ["attack.name=label-flip"],
    "replace": ["attack.name=replace"],
    "sign-flip × 5": ["attack.name=sign-flip", "attack.scale=5.0"],
    "gaussian": ["attack.name=gaussian"],
    "broken": ["attack.name=broken"],
    "backdoor × 4": ["attack.name=backdoor", "attack.target=7", "attack.scale=4.0"],
}


def main() -> None:
    columns: dict[str, dict[str, str]] = {}
    for name, overrides in ATTACKS.items():
        chosen = [*overrides, "attack.fraction=0.3"] if overrides else []
        with tempfile.TemporaryDirectory() as folder:
            result = idiolect.run(FILE, [*chosen, "backend.device=cpu"], out=Path(folder) / "run")
        columns[name] = {label: cell(method) for label, method in result["methods"].items()}
    rules = list(columns["none"])
    rows = [[rule, *(columns[name][rule] for name in columns)] for rule in rules]
    fill(PAGE, {"attacks": table(["rule", *columns], rows)})


def cell(method: dict[str, Any]) -> str:
    models = [seed["models"]["global"] for seed in method["seeds"]]
    words = f"{100 * mean(model['mean'] for model in models):.1f}"
    if "attack_success" in models[0]:
        words += f" / {100 * mean(model['attack_success'] for model in models):.0f}"
    return words


if __name__ == "__main__":
    main()
