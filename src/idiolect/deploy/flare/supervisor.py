"""From an operator's command to the process that lasts: settings are written, then handed over.

What has to be imported to check them is heavy; what watches the engine is not (`watchdog`), so this
process becomes that one.
"""

import os
import sys

from idiolect.core.checkpoint import write_whole
from idiolect.deploy.flare import require
from idiolect.deploy.flare.kits import HOST_FILE, NODE_FILE, MemberKit, settle
from idiolect.deploy.serve_experiment import ServerSettings
from idiolect.deploy.site import NodeSettings


def keep_running(
    kit: MemberKit, own: NodeSettings | ServerSettings, log: str = "text", metrics: int = 0
) -> None:
    """Become the process that runs a kit until interrupted. `own`: what the operator says of it."""
    require()
    settle(kit)
    name = NODE_FILE if isinstance(own, NodeSettings) else HOST_FILE
    write_whole(kit.home / name, own.to_json().encode())
    become([str(kit.folder), "--log", log, "--metrics", str(metrics)])


def become(words: list[str]) -> None:
    """Replace this process by the one that watches."""
    sys.stdout.flush()
    python = [sys.executable, "-P", "-m", "idiolect.deploy.flare.watchdog"]
    os.execv(sys.executable, [*python, *words])
