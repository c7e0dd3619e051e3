"""A private run whose server is killed amid a round, over the real engine. `make test-faults`."""

import hashlib
import importlib.util
import json

import delaying
import pytest
from running import Running
from test_late_masks import patched

from idiolect.core import checkpoint

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(
        importlib.util.find_spec("nvflare") is None, reason="nvflare is not installed (extra flare)"
    ),
]
TOML = """name = "private"
rounds = 2
cohort = 3
[data]
partition = { name = "iid", clients = 4, per_client = 40 }
[model]
name = "dnn"
hidden = 8
[evaluate]
every = 1
[backend]
kind = "sequential"
checkpoint_every = 1
[deploy]
timeout = 60
minimum = 2
[[methods]]
name = "fedavg"
label = "DP"
aggregate = { name = "dp", noise = 1.0, noise_source = "seed", force = true }
"""


@pytest.mark.parametrize("moment", [("judge", 1), ("step", 1)], ids=["shown", "reported"])
def test_no_round_is_seen_twice_and_the_lead_fetches_no_secret(moment, tmp_path):
    """Killed when all nodes had seen the first round's model; or before the second's was saved."""
    running = Running(tmp_path, 4)
    path, out = tmp_path / "private.toml", tmp_path / "out"
    path.write_text(TOML)
    call = f"note()\n    import dying\n\n    dying.die{moment}"
    try:
        running.start("server", environment=patched(tmp_path / "view", "runner_process", call))
        for number, site in enumerate(running.sites):
            running.start(site, "--data", "embedded", "--client", str(number))
        printed = running.run(path, out)
    finally:
        running.close()
    assert (tmp_path / "view" / "view.killed").exists(), printed
    seen = {}
    for _, asked, _ in delaying.noted(tmp_path / "view" / "view"):
        if asked.kind in ("step", "judge"):
            blob = b"".join(leaf.numpy().tobytes() for _, leaf in sorted(asked.leaves.items()))
            seen.setdefault(asked.head["round"], set()).add(hashlib.sha256(blob).hexdigest())
    assert {round: len(models) for round, models in seen.items()} == {0: 1, 1: 1, 2: 1}
    found = json.loads((out / "result.json").read_text())["methods"]["DP"]
    assert found["rounds"] == 2 and found["privacy"]["noise_source"] == "system"
    # What the lead has: no key, no draw. What the server has is its own.
    for folder in (out, *running.kits.glob("server/idiolect/runs/*")):
        named, _ = checkpoint.read(folder / "checkpoints" / "DP.safetensors")
        kept = {name: float(leaf) for name, leaf in named.items() if ".memory." in name}
        assert sorted(name.rsplit(".")[-1] for name in kept) == ["clip", "round", "seed"]
        assert [value for name, value in kept.items() if name.endswith("seed")] == [-1]
    (home,) = running.kits.glob("server/idiolect/runs/*")
    assert home.stat().st_mode & 0o777 == 0o700
    own = home / "checkpoints" / "DP.safetensors"
    assert own.stat().st_mode & 0o777 == 0o600
