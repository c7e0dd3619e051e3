"""FLARE's lasting process, with our checks in place before it starts.

Usage: python -P -m idiolect.deploy.flare.engine MODULE ARGUMENTS..., where MODULE is FLARE's own.
"""

import os
import runpy
import sys

from idiolect.deploy.flare.guard import watch
from idiolect.deploy.flare.layout import MODULES


def main() -> None:
    """Be the process."""
    module = sys.argv[1]
    if module not in MODULES.values():
        raise SystemExit(f"{module} is none of {', '.join(MODULES.values())}")
    os.umask(0o077)  # what the engine stores of a run is for its owner alone
    watch()
    sys.argv[:] = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
