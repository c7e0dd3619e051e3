"""`python -m idiolect.bench`: the benchmark where only torch and numpy are installed."""

import argparse
import dataclasses
import sys
from pathlib import Path

from idiolect.bench.run_benchmark import Options, bench
from idiolect.errors import IdiolectError


def main() -> int:
    """Parse, measure, print; 1 where something was wrong."""
    parser = argparse.ArgumentParser(prog="python -m idiolect.bench", description=__doc__)
    parser.add_argument("only", nargs="*", help="workloads; none: those meant for the device")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--grow", action="store_true", help="also how time grows")
    parser.add_argument("--precision", action="store_true", help="also TF32 and bfloat16")
    parser.add_argument("--no-peers", dest="peers", action="store_false")
    parser.add_argument("--no-check", dest="check", action="store_false")
    parser.add_argument("--seconds", type=float, default=Options.seconds, help="for each workload")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, help="write everything to this file, as JSON")
    given = vars(parser.parse_args())
    path: Path | None = given.pop("out")
    try:
        options = dataclasses.replace(Options(), **{**given, "only": tuple(given["only"])})
        found = bench(options, lambda line: print(line, flush=True), path)
    except IdiolectError as error:
        print(error, file=sys.stderr)
        return error.code
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
