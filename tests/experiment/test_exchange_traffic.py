"""A run of Portfolio: what its clients told is kept for newcomers and counted as traffic, once."""

import tiny
from idiolect.core import checkpoint
from idiolect.experiment.load import parse_experiment
from idiolect.experiment.run import run_experiment

METHODS = """
[[methods]]
name = "fedavg"
[[methods]]
name = "portfolio"
label = "one"
tune_epochs = 1
[[methods]]
name = "portfolio"
label = "two"
tune_epochs = 1
margin = 0.0
"""


def traffic(content, label, way):
    return [seed["traffic"][way] for seed in content["methods"][label]["seeds"]]


def took_part(content, label):
    seeds = content["methods"][label]["seeds"]
    return [seed["participation"]["clients"]["took_part"] for seed in seeds]


def test_an_exchange_is_counted_once_whoever_shares_the_rounds(tmp_path):
    """Who took part tells and hears 15 weights and 4 numbers: in 4 bytes up, in 8 down.

    In two rounds of four clients of six, one client is drawn in none: it hears the others as a
    newcomer does, and tells nothing.
    The second takes the rounds of the first over; what the first exchanged is none of its own. When
    rounds are added, there is another exchange in place of the first.
    """
    toml = tiny.TOML.split("[[methods]]")[0] + METHODS
    content, _ = run_experiment(parse_experiment(toml, ("rounds=2",)), tmp_path)
    assert "shares the rounds of one" in " ".join(content["methods"]["two"]["notices"])
    for label in ("one", "two"):
        told = took_part(content, label)
        assert told == [5, 6]
        for way, each in (("bytes_up", 19 * 4), ("bytes_down", 19 * 8)):
            plain = traffic(content, "FedAvg", way)
            expected = [own + each * n for own, n in zip(plain, told, strict=True)]
            assert traffic(content, label, way) == expected
        assert traffic(content, label, "participations") == [8, 8]
        named, _ = checkpoint.read(tmp_path / "checkpoints" / f"{label}.safetensors")
        assert [float(named[f"told.{n}.voices"]) for n in (0, 1)] == told
    longer, _ = run_experiment(parse_experiment(toml, ("rounds=4",)), tmp_path, resume=True)
    plain = traffic(longer, "FedAvg", "bytes_up")
    assert took_part(longer, "two") == [6, 6]
    assert traffic(longer, "two", "bytes_up") == [own + 6 * 19 * 4 for own in plain]
    assert traffic(longer, "two", "participations") == [16, 16]
