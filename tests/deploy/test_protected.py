"""Rules, privacy and personalisation on a real federation: the server's step is the simulator's."""

import federations as fed
import pytest

from idiolect.deploy.serve import served_methods
from idiolect.errors import ConfigError, MethodError

PARTS = 'personalise = [["ft"], ["fb", "ewc", "moe"]]\ntune_epochs = 1\nexpert_epochs = 1\n'


def wanted(extra, method="fedavg", sets=()):
    table = f'[[methods]]\nname = "{method}"\nlabel = "own"\n{extra}'
    return fed.experiment(toml=fed.TOML + table, sets=sets)


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


@pytest.mark.parametrize("parts", ["", PARTS], ids=["alone", "personalised"])
def test_private_and_under_masks_is_what_the_server_would_have_clipped_itself(parts, tmp_path):
    """Nodes shorten their updates to the S they are told, and the server sees but their sum.

    Without noise the states are those of an open run, S too, which adapts to how many were longer.
    With it they differ by as much as the noise is: after one round (S is then still 0.05, where a
    second round's would have been moved by noise) a spread of z' · S over four clients, where of
    z = 2 the noise on the count, 2 too, leaves z' = (1/2² - 1/4²)^-½ to the update.
    """
    rule = "adaptive = true, clip = 0.05, clip_lr = 1.0, force = true"

    def ended(kind, noise, secure, rounds):
        given = f'aggregate = {{ name = "dp", noise = {noise}, {rule} }}\n{parts}'
        sets = (f"rounds={rounds}", f"deploy.secure={secure}".lower())
        private = wanted(given, "ditto" if not parts else "fedavg", sets)
        folder = tmp_path / kind
        found = fed.served(private, fed.inside(folder / "nodes"), folder / "served")
        assert found["methods"]["own"]["privacy"]
        state = fed.server_state(folder / "served", "own")
        return {name: leaf for name, leaf in state.items() if not name.endswith("memory.key")}

    plain, hidden = ended("open", 0.0, False, 2), ended("secure", 0.0, True, 2)
    clip = next(leaf for name, leaf in plain.items() if name.endswith("clip"))
    assert clip != 0.05 and fed.largest_gap(plain, hidden) < 1e-6
    first, noisy = ended("first", 0.0, True, 1), ended("noisy", 2.0, True, 1)
    weight = next(name for name in first if name.endswith("1.weight"))
    spread = (noisy[weight] - first[weight]).std() / (0.1875**-0.5 * 0.05 / 4)
    assert spread == pytest.approx(1, abs=5 / (2 * first[weight].numel()) ** 0.5)


def test_a_robust_rule_behind_personal_parts_is_not_overlooked_under_masks(tmp_path):
    """The median of one sum would be the mean: no protection at all, and nobody would notice."""
    hidden = wanted('aggregate = "median"\n' + PARTS)
    deploy = hidden.deploy.model_copy(update={"secure": True})
    with pytest.raises(MethodError, match=r"own: its rule .* looks at each report by itself"):
        served_methods(hidden.model_copy(update={"deploy": deploy}))


def test_fewer_nodes_than_one_can_hide_among_are_refused(tmp_path):
    experiment = wanted('aggregate = { name = "dp", noise = 5.0 }')
    with pytest.raises(ConfigError, match="hides one client among others, and there are 4"):
        fed.served(experiment, fed.inside(tmp_path / "nodes"), tmp_path / "served")
