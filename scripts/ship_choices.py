"""Take measured choices of kernels into the package, for the chip that they were measured on.

    python scripts/ship_choices.py KERNELS.json [MORE.json ...]

KERNELS.json is the cache that runs on a GPU leave beside `widths.json`. `kernels/choices.json` is
read where a run has no choice of its own; each is compared with the plain form before it is used.
"""

import json
import sys
from pathlib import Path

TABLE = Path(__file__).parents[1] / "src/idiolect/kernels/choices.json"


def shipped(caches: list[dict[str, str]], before: dict[str, dict[str, str]]) -> dict:
    """Add the entries of caches, "chip | torch | rule | problem": later ones count."""
    table = {chip: dict(choices) for chip, choices in before.items()}
    for cache in caches:
        for line, name in cache.items():
            chip, _, _, problem = line.split(" | ")
            table.setdefault(chip, {})[problem] = name
    return table


def main() -> None:
    before = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    caches = [json.loads(Path(path).read_text()) for path in sys.argv[1:]]
    table = shipped(caches, before)
    TABLE.write_text(json.dumps(table, indent=0, sort_keys=True) + "\n")
    print({chip: len(choices) for chip, choices in table.items()})


if __name__ == "__main__":
    main()
