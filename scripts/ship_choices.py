"""Take measured choices of kernels into the package, for the chip that they were measured on.

    python scripts/ship_choices.py KERNELS.json [MORE.json ...]

KERNELS.json is the cache that runs on a GPU leave beside `widths.json`, or what
`benchmarks/first_rounds.py --keep` wrote. `kernels/choices.json` is read where a run has no choice
of its own; each is compared with the plain form before it is used. Choices among other kernels than
those of this checkout, or by another rule, are left out.
"""

import json
import sys
from pathlib import Path

from idiolect.kernels import autotune

TABLE = Path(__file__).parents[1] / "src/idiolect/kernels/choices.json"


def shipped(
    caches: list[dict[str, str]], before: dict[str, dict[str, str]], version: str
) -> tuple[dict[str, dict[str, str]], int]:
    """Add the entries of caches, "chip | torch | version | problem": later ones count.

    Also return how many were left out, since they are of another version.
    """
    table = {chip: dict(choices) for chip, choices in before.items()}
    stale = 0
    for cache in caches:
        for line, name in cache.items():
            chip, _, made_by, problem = line.split(" | ")
            if made_by == version:
                table.setdefault(chip, {})[problem] = name
            else:
                stale += 1
    return table, stale


def main() -> None:
    before = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    caches = [json.loads(Path(path).read_text()) for path in sys.argv[1:]]
    table, stale = shipped(caches, before, autotune.version())
    TABLE.write_text(json.dumps(table, indent=0, sort_keys=True) + "\n")
    print({chip: len(choices) for chip, choices in table.items()}, f"{stale} stale, left out")


if __name__ == "__main__":
    main()
