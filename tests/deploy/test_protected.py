"""Rules, privacy and personalisation on a real federation: the server's step is the simulator's."""

import dataclasses
import hashlib
import json
from typing import ClassVar

import federations as fed
import numpy as np
import pytest

from idiolect.aggregation import accounting, guarantee
from idiolect.aggregation.accounting import PrivacyTerms
from idiolect.core import checkpoint, tree
from idiolect.deploy import protocol
from idiolect.deploy.limits import UNLIMITED
from idiolect.deploy.messenger import FaultLog, Messenger, Stopped, Transport, WaitPolicy
from idiolect.deploy.protocol import Refused
from idiolect.deploy.serve_experiment import make_messenger, serve, served_methods
from idiolect.engine import sampling
from idiolect.errors import ConfigError, MethodError
from idiolect.experiment.portable import export_experiment

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


def test_informations_too_large_for_a_message_stay_with_the_nodes(tmp_path, monkeypatch):
    """Then a node goes by its own, as if that had been asked for, and the result says so."""
    parts = 'personalise = [["fb", "ewc"]]\ntune_epochs = 1\newc_weight = 500.0\n'
    all_, alone = (wanted(parts + more) for more in ("", 'ewc_fisher = "client"\n'))
    mean = fed.scores(fed.simulated(all_, tmp_path / "mean"), "own")
    own = fed.scores(fed.simulated(alone, tmp_path / "own"), "own")
    monkeypatch.setattr("idiolect.deploy.server.MOST_EXCHANGED", 10)
    found = fed.served(all_, fed.inside(tmp_path / "nodes"), tmp_path / "served")
    assert fed.scores(found, "own") == own != mean
    assert "numbers, above 10, so each went by its own" in json.dumps(found)


def test_the_hubs_noise_is_nobodys_and_its_promise_is_in_the_result(tmp_path):
    """Nodes know the seed of the run; noise that they could draw themselves would hide nobody.

    Nothing on the hub could draw it again, and its files are for its own account alone.
    """
    experiment = wanted(
        'aggregate = { name = "dp", noise = 1.0, noise_source = "seed", force = true }'
    )
    states = []
    for place in ("one", "two"):
        folder = tmp_path / place
        found = fed.served(experiment, fed.inside(folder / "nodes"), folder / "served")
        method = found["methods"]["own"]
        assert method["settings"]["aggregated"]["noise_source"] == "system"
        assert not method["privacy"]["meaningful"]  # four nodes hide nobody
        states.append(fed.server_state(folder / "served", "own"))
        kept = {
            name.split(".memory.")[1]: leaf for name, leaf in states[-1].items() if "memory" in name
        }
        assert {name: float(leaf) for name, leaf in kept.items()} == {
            "clip": 1,
            "round": 2,
            "seed": -1,
        }
        own = folder / "served"
        assert own.stat().st_mode & 0o777 == 0o700
        for path in (own / "checkpoints").iterdir():
            assert path.stat().st_mode & 0o777 == 0o600
        assert (own / "checkpoints").stat().st_mode & 0o777 == 0o700
    assert all(not one.equal(states[1][n]) for n, one in states[0].items() if "memory" not in n)


class Listening(Transport):
    """Passes calls on, and notes who was asked to train, and to be heard, in which round."""

    def __init__(self, inner):
        self._inner, self.sites = inner, inner.sites
        self.heard, self.asked = {}, {}

    def call(self, site, blob, seconds):
        message = protocol.unpack(blob)
        if message.kind == "step":
            self.asked.setdefault(message.head["round"], set()).add(site)
            if message.head["heard"]:
                self.heard.setdefault(message.head["round"], set()).add(site)
        return self._inner.call(site, blob, seconds)


def test_private_cohorts_are_drawn_in_secret_and_nothing_tells_of_them(tmp_path):
    """From the seed, which every node knows, anyone could draw the cohorts of all rounds.

    Two of four in six rounds, drawn twice: alike by chance once in 6⁶ times.
    """
    rule = 'aggregate = { name = "dp", noise = 1.0, force = true }'
    sets = ("cohort=2", "rounds=6", "evaluate.every=6", "bystanders=train")
    experiment = wanted(rule, "fedper", sets)
    drawn = []
    for place in ("one", "two"):
        calls = Listening(fed.inside(tmp_path / place / "nodes"))
        found = fed.served(experiment, calls, tmp_path / place / "served")
        assert all(len(sites) == 2 for sites in calls.heard.values())
        assert all(len(sites) == 4 for sites in calls.asked.values())
        drawn.append(calls.heard)
        method = found["methods"]["own"]
        assert not any("took part in no round" in text for text in method["notices"])
        assert method["seeds"][0]["traffic"]["participations"] == 12  # in all, not by round
        # Nothing the lead fetches lists a cohort: whatever is said of sites is of all or none.
        _, meta = checkpoint.read(tmp_path / place / "served/checkpoints/own.safetensors")
        assert "cohorts" not in str(sorted(meta)) and meta["left_out"] == [{}]
    public = sampling.Attendance(experiment.seeds[0], np.arange(4), 2, "fixed", False)
    seeds = {round: {f"site-{n}" for n in public.reporting(round)} for round in range(6)}
    assert drawn[0] != drawn[1] and seeds not in drawn


@pytest.mark.parametrize("noise", [60.0, 0.01])
def test_a_private_round_of_one_that_was_drawn_ends_no_run(noise, tmp_path, monkeypatch):
    """Sites ask for two in a round; where the noise means something, one may be drawn alone."""
    monkeypatch.setattr(guarantee, "LEAST_CLIENTS", 3)
    drawn = {"poisson": lambda clients, size: clients[:1]}
    monkeypatch.setattr(sampling, "_SECRET", drawn)
    rule = f'aggregate = {{ name = "dp", noise = {noise}, force = true }}'
    experiment = wanted(rule, sets=("rounds=2", "draw=poisson", "cohort=2"))
    policy = dataclasses.replace(UNLIMITED, min_cohort=2)
    nodes = fed.inside(tmp_path / "nodes", policy=policy)
    if noise < 1:
        with pytest.raises(ConfigError, match="min_cohort"):
            fed.served(experiment, nodes, tmp_path / "served")
        return
    found = fed.served(experiment, nodes, tmp_path / "served")["methods"]["own"]
    assert found["privacy"]["meaningful"]
    assert found["seeds"][0]["traffic"]["participations"] == 2


class Late(Transport):
    """One site is away at first; the server is stopped in a round, as if to begin again."""

    def __init__(self, inner, away=(), until=99):
        self._inner, self.sites = inner, inner.sites
        self._away, self._until, self._over = away, until, False

    def call(self, site, blob, seconds):
        if site in self._away:
            raise Refused("unreachable")
        message = protocol.unpack(blob)
        self._over |= message.kind == "step" and message.head["round"] >= self._until
        return self._inner.call(site, blob, seconds)

    def stopped(self):
        return self._over


@pytest.mark.parametrize("cohort", ["cohort=2", "rounds=4"])
def test_a_site_that_comes_late_makes_no_round_before_it_cheaper(cohort, tmp_path):
    """Two of three were drawn for three rounds of four: not one round cost what two of four do."""
    rule = 'aggregate = { name = "dp", noise = 1.0, force = true }'
    experiment = wanted(rule, sets=("rounds=4", "draw=poisson", cohort))
    folder = tmp_path / "served"
    with pytest.raises(Stopped):
        fed.served(experiment, Late(fed.inside(tmp_path / "nodes"), {"site-2"}, 3), folder)
    found = fed.served(experiment, Late(fed.inside(tmp_path / "nodes")), folder)
    told = found["methods"]["own"]["privacy"]
    terms = PrivacyTerms(1.0, 3, told["cohort"], "poisson", told["delta"], "rdp")
    assert told["clients"] == 3 and told["epsilon"] == accounting.epsilon(terms, 4)
    assert len(found["methods"]["own"]["seeds"][0]["clients"]) == 4  # it took part all the same


def test_an_admin_is_not_told_who_is_waited_for_in_a_private_run(tmp_path):
    for rule, seen in (
        ("", True),
        ('aggregate = { name = "dp", noise = 1.0, force = true }', False),
    ):
        calls, told = Listening(fed.inside(tmp_path / str(seen) / "nodes")), []
        experiment = wanted(rule, sets=("rounds=1", "evaluate.every=1"))
        text = export_experiment(experiment)
        own = make_messenger(calls, text, tmp_path / str(seen), fed.HOST)
        real = calls._inner.call

        def call(site, blob, seconds, own=own, told=told, real=real):
            if protocol.unpack(blob).kind == "step":
                told.append(own.waiting())
            return real(site, blob, seconds)

        calls._inner.call = call
        serve(own, text, "r1", tmp_path / str(seen), host=fed.HOST)
        assert any(told) is seen


class Killed(BaseException):
    """The process ends here: nothing is saved, nothing is caught."""


class Fragile(Messenger):
    """A post that notes every global model that leaves, and dies as one is about to or has left."""

    at: tuple[str, int] | None = None  # the kind of letter, and the round
    sent: ClassVar[dict[int, set[str]]] = {}  # digests of models by the rounds behind them

    def ask(self, letters, seconds, read):
        messages = {site: protocol.unpack(blob) for site, blob in letters.items()}
        for message in messages.values():
            if message.kind in ("step", "judge"):
                blob = b"".join(
                    leaf.numpy().tobytes() for _, leaf in sorted(message.leaves.items())
                )
                digest = hashlib.sha256(blob).hexdigest()
                self.sent.setdefault(message.head["round"], set()).add(digest)
        first = next(iter(messages.values()), None)
        found = super().ask(letters, seconds, read)
        if first is not None and (first.kind, first.head.get("round")) == self.at:
            raise Killed
        return found


@pytest.mark.parametrize("moment", [("judge", 1), "checkpoint"])
def test_a_round_done_again_after_a_crash_shows_nobody_a_second_noisy_model(
    moment, tmp_path, monkeypatch
):
    """Killed when a model was just shown, or before it was saved; a node is then away.

    Were it shown before it is saved, the round would be done again with other reports: under the
    same noise the difference of the two would be the absent node's update, under fresh noise two
    releases would be seen where one was accounted for.
    """
    monkeypatch.setattr(Fragile, "sent", {})
    experiment = wanted(
        'aggregate = { name = "dp", noise = 1.0, force = true }',
        sets=("rounds=2", "evaluate.every=1", "deploy.minimum=2"),
    )
    text, folder = export_experiment(experiment), tmp_path / "served"
    lost, real = [], checkpoint.save

    def crash(path, kept, meta, **more):
        if meta.get("round") == 1 and path.parent.name == "checkpoints" and not lost:
            lost.append(kept["state"]["server"][0].inner)
            raise Killed
        real(path, kept, meta, **more)

    if moment == "checkpoint":
        monkeypatch.setattr(checkpoint, "save", crash)
    policy = WaitPolicy(300, 300, 2)
    nodes = fed.inside(tmp_path / "nodes")
    first = Fragile(nodes, policy, FaultLog(folder / "faults.json"))
    first.at = None if moment == "checkpoint" else moment
    with pytest.raises(Killed):
        serve(first, text, "r1", folder, host=fed.HOST)
    second = Fragile(nodes, policy, FaultLog(folder / "faults.json"))
    second.there = lambda site: site != "site-3"
    found = serve(second, text, "r1", folder, host=fed.HOST)
    assert found["methods"]["own"]["rounds"] == 2 and found["complete"]
    assert found["methods"]["own"]["curves"]["rounds"] == [1, 2]
    assert {round: len(seen) for round, seen in Fragile.sent.items()} == {0: 1, 1: 1, 2: 1}
    if lost:  # the outcome that nobody saw is not what they saw: noise was drawn afresh
        (seen,) = Fragile.sent[1]
        blob = b"".join(leaf.numpy().tobytes() for _, leaf in sorted(tree.named(lost[0]).items()))
        assert hashlib.sha256(blob).hexdigest() != seen


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
        return fed.server_state(folder / "served", "own")

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
