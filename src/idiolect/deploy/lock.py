"""One process at a time works with a node's personal state."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PATIENCE = 15.0  # seconds for a process of a job that was aborted to end


@contextmanager
def held(home: Path, patience: float = _PATIENCE) -> Iterator[bool]:
    """Hold a node's folder for this process; False where another one will not let go."""
    home.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # no such locks on this system: the operator starts one node only
        yield True
        return
    with (home / ".lock").open("w") as lock:
        until = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() > until:
                    yield False
                    return
                time.sleep(0.1)
            else:
                yield True
                return
