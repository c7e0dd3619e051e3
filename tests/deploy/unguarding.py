"""A server or a node whose operator has taken our guards out of the program itself.

Usage: python unguarding.py PYTHON -m idiolect VERB KIT ...: runs `idiolect VERB KIT ...` that way.
"""

import json
import sys

from idiolect.cli import main
from idiolect.deploy.flare import supervisor, watchdog
from idiolect.deploy.flare.job_layout import MODULES


def settle(kit, settle=supervisor.settle):
    settle(kit)
    path = kit.folder / "local" / "resources.json"
    settings = json.loads(path.read_text())
    settings.pop("app_validator")
    settings["class_allow_list"] += ["evil.", "subprocess."]
    # Nor is a job that fails tried again, as a run of ours is.
    keeper = "idiolect_keeper"
    settings["components"] = [one for one in settings["components"] if one["id"] != keeper]
    for component in settings["components"]:
        if component["id"] == "job_scheduler":  # which brings jobs to nodes too
            module = "nvflare.app_common.job_schedulers.job_scheduler"
            component["path"] = f"{module}.DefaultJobScheduler"
    path.write_text(json.dumps(settings))


def command(kit, command=watchdog.command):
    words = command(kit)
    return [sys.executable, "-u", "-m", *words[words.index(MODULES[kit.role]) :]]


if __name__ == "__main__":
    supervisor.settle, watchdog.command = settle, command
    watchdog.isolated = lambda environment, folder: dict(environment)
    supervisor.become = lambda words: sys.exit(watchdog.main(words))
    sys.argv = ["idiolect", *sys.argv[4:]]
    main()
