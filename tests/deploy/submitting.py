"""Submit any job with an admin's kit, past all that idiolect would write into it.

Usage: python submitting.py KIT JOB. Prints how it ended: a refusal's kind, or the job's status.
"""

import json
import sys
import time
from pathlib import Path

from idiolect.deploy.flare import job_layout
from idiolect.deploy.flare.admin import AdminSession, FlareTask
from idiolect.deploy.flare.kits import read
from idiolect.errors import DeployError

JOB = "0a1b2c"
GOOD = """
name = "intruder"
rounds = 1
[data]
partition = { name = "iid", clients = 2, per_client = 20 }
[model]
name = "mlr"
[[methods]]
name = "fedavg"
"""


def written(folder: Path, mark: Path, kind: str) -> Path:
    """Write an intruder's job: one that leaves a mark where its code or class was let in.

    `code` brings a module of its own for the nodes; `class` and `hub` name one of Python's, which
    runs a command when it is made, for the nodes or for the server. `config` puts a module where
    settings belong, chooses the job's id and names the module as a network; `network` names one
    that lies in the kits already.
    """
    text = GOOD.replace(
        "mlr", f"{JOB}.app_server.config.evil:net" if kind == "config" else "evil:net"
    )
    job_layout.write(folder, FlareTask("intruder", ("site-0",), 1, 60, text))
    if kind in ("config", "network"):
        evil = f"open({str(mark)!r}, 'w').close()\ndef net(shape, classes):\n    pass\n"
        if kind == "config":
            (folder / "app" / "config" / "evil.py").write_text(evil)
            meta = json.loads((folder / "meta.json").read_text())
            (folder / "meta.json").write_text(json.dumps({**meta, "job_id": JOB}))
        else:
            for kit in mark.parent.glob("kits/*"):
                for place in (kit, kit / "idiolect"):
                    place.mkdir(exist_ok=True)
                    (place / "evil.py").write_text(evil)
        return folder
    side = "server" if kind == "hub" else "client"
    path = folder / "app" / "config" / f"config_fed_{side}.json"
    config = json.loads(path.read_text())
    if kind == "code":
        custom = folder / "app" / "custom"
        custom.mkdir()
        (custom / "evil.py").write_text(
            f"open({str(mark)!r}, 'w').close()\nclass Evil:\n    pass\n"
        )
        config["components"].append({"id": "evil", "path": "evil.Evil", "args": {}})
    else:
        args = {"args": ["touch", str(mark)]}
        config["components"].append({"id": "evil", "path": "subprocess.Popen", "args": args})
    path.write_text(json.dumps(config))
    return folder


def main() -> None:
    session = AdminSession(read(sys.argv[1]))
    try:
        job = session.ask(lambda s: s.submit_job(sys.argv[2]))
        until, status = time.monotonic() + 120, ""
        while time.monotonic() < until and not status.startswith(("FINISHED", "FAILED")):
            time.sleep(1)
            status = str(session.ask(lambda s: s.get_job_status(job)))
        print(status)
    except DeployError as error:
        print(f"refused: {error}")
    finally:
        session.close()


if __name__ == "__main__":
    main()
