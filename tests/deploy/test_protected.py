"""Rules, privacy and personalisation on a real federation: the server's step is the simulator's."""

import federations as fed
import pytest

from idiolect.errors import ConfigError

PARTS = 'personalise = [["ft"], ["fb", "ewc", "moe"]]\ntune_epochs = 1\nexpert_epochs = 1\n'


def wanted(extra, method="fedavg"):
    return fed.experiment(toml=fed.TOML + f'[[methods]]\nname = "{method}"\nlabel = "own"\n{extra}')


@pytest.mark.parametrize(
    "extra", ['aggregate = "median"\n' + PARTS, 'aggregate = { name = "trimmed-mean", trim = 0.3 }']
)
def test_rules_and_parts_give_the_simulators_result(extra, tmp_path):
    experiment = wanted(extra)
    content = fed.simulated(experiment, tmp_path / "simulated")
    found = fed.served(experiment, fed.inside(tmp_path / "nodes"), tmp_path / "served")
    assert fed.scores(found, "own") == fed.scores(content, "own")
    there, here = (fed.server_state(tmp_path / kind, "own") for kind in ("served", "simulated"))
    assert there.keys() == here.keys() and all(there[n].equal(here[n]) for n in there)


def test_the_hubs_noise_is_not_the_runs_and_its_promise_is_in_the_result(tmp_path):
    """Nodes know the seed of the run; noise that they could draw themselves would hide nobody."""
    experiment = wanted('aggregate = { name = "dp", noise = 1.0, force = true }')
    keys = []
    for place in ("one", "two"):
        folder = tmp_path / place
        found = fed.served(experiment, fed.inside(folder / "nodes"), folder / "served")
        state = fed.server_state(folder / "served", "own")
        keys += [int(leaf) for name, leaf in state.items() if name.endswith("memory.key")]
        assert not found["methods"]["own"]["privacy"]["meaningful"]  # four nodes hide nobody
    assert len({*keys, *experiment.seeds}) == 3


def test_fewer_nodes_than_one_can_hide_among_are_refused(tmp_path):
    experiment = wanted('aggregate = { name = "dp", noise = 5.0 }')
    with pytest.raises(ConfigError, match="hides one client among others, and there are 4"):
        fed.served(experiment, fed.inside(tmp_path / "nodes"), tmp_path / "served")
