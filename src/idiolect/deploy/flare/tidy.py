"""What keeps the engine's processes from growing with every message.

FLARE 2.9 ties each message it has sent into a reference cycle, which only Python's collector
undoes, and that counts objects, not bytes: a few hundred of them may hold gigabytes. It also keeps
a thread for each answer that arrived, until no retry of it can come any more; and each of many
threads gets a heap of its own, where what is freed stays.
"""

import gc
import os
from collections.abc import Mapping

_SETTINGS = {
    # Seconds in which an answer is sent again where no receipt came, and between two attempts. The
    # engine's own minute leaves thousands of waiting threads where rounds are short.
    "NVFLARE_STREAMING_RETRY_TIMEOUT": "10",
    "NVFLARE_STREAMING_RETRY_WAIT": "1",
    "MALLOC_ARENA_MAX": "2",  # heaps
}


def environment() -> Mapping[str, str]:
    """Return the environment of the engine's processes; what the operator has set is kept."""
    return {**_SETTINGS, **os.environ}


class Tidy:
    """Collects what the engine dropped; cheap, as all that was there at the start is left out."""

    def __init__(self) -> None:
        self._begun = False

    def __call__(self) -> None:
        """Tidy up, once a message or a round."""
        gc.collect()
        if not self._begun:
            self._begun = True
            gc.freeze()
