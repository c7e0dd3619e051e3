"""What a site allows: its node refuses what goes beyond, whatever the lead or the server says."""

import dataclasses
import tomllib
from pathlib import Path

import federations as fed
import numpy as np
import pytest
import torch
from inverting import closeness, inverted, patients

from idiolect.core.batches import Request
from idiolect.deploy import handshake, limits, node_records, protocol, secure_sum
from idiolect.deploy.limits import UNLIMITED, SitePolicy, initial_policy, read_site_policy
from idiolect.deploy.node import Node
from idiolect.deploy.node_process import InProcess
from idiolect.deploy.protocol import POLICY_LIMITS, Refused
from idiolect.deploy.secure_aggregation import Participant
from idiolect.deploy.serve_experiment import make_messenger, serve
from idiolect.deploy.site import NodeSettings
from idiolect.errors import ConfigError
from idiolect.experiment.components import build_method
from idiolect.experiment.load import parse_experiment
from idiolect.experiment.portable import export_experiment
from idiolect.version import VERSION

TOML = """
name = "clinics"
seeds = [0]
rounds = 2

[data]
classes = ["healthy", "ill"]
split = [0.6, 0.2, 0.2]

[model]
name = "dnn"
hidden = 16

[training]
batch = 16
lr = 0.1

[backend]
kind = "sequential"
"""
FEDAVG = '[[methods]]\nname = "fedavg"\n'
EXTRACTION = ("training.batch=1", "training.steps=1", "rounds=1")


def experiment(*sets, methods=FEDAVG):
    return parse_experiment(TOML + methods, sets)


def site(folder, rows=100, name="hospital", seed=0, policy=None):
    path = folder / f"{name}.csv"
    patients(path, rows, seed)
    options = {"label": "diagnosis"}
    return NodeSettings(
        name, "test", folder / name, str(path), options, policy=policy or SitePolicy()
    )


def ask(node, kind, head=None, content=()):
    return protocol.unpack(node.answer(protocol.pack(kind, head, content)))


def opening(wanted, **changes):
    methods = {t.label: handshake.method_fingerprint(build_method(t)) for t in wanted.methods}
    head = {
        "run": "r1",
        "version": VERSION,
        "experiment": export_experiment(wanted),
        "methods": methods,
    }
    return {**head, "clients": 2, "place": 0, "newcomer": False, "submitter": "", **changes}


def joined(node, wanted, **changes):
    told = ask(node, "open", opening(wanted, **changes))
    assert told.kind == "yes", told
    head = {"run": changes.get("run", "r1"), "classes": told.head["form"]["classes"]}
    assert ask(node, "agree", head, told.leaves).kind == "yes"
    alone, _ = node._made_runtime(node._joined, "FedAvg", 0)
    return alone


def task(round=0, **changes):
    return {"run": "r1", "label": "FedAvg", "seed": 0, "round": round, **changes}


def code(message):
    assert message.kind == "no" and set(message.head) == {"code"} and not message.leaves
    return message.head["code"]


def test_one_row_and_one_step_show_that_row_and_are_refused_by_default(tmp_path):
    """The attack of the audit: the first layer's change over its bias's change is the patient."""
    wanted = experiment(*EXTRACTION)
    node = Node(site(tmp_path, policy=UNLIMITED))
    alone = joined(node, wanted, clients=1)
    answer = ask(node, "step", task(), alone.form)
    before = {name: leaf.double() for name, leaf in alone.form.shared.items()}
    after = {name.removeprefix("params."): leaf for name, leaf in answer.leaves.items()}
    own = node._joined.data.federations[0]
    rows = torch.from_numpy(np.asarray(own.dataset.x)[own.train[0]]).double()
    shown = closeness(inverted(before, after), rows)
    assert float(shown.max()) > 0.999
    guarded = Node(dataclasses.replace(node._site, policy=SitePolicy(), home=tmp_path / "g"))
    assert code(ask(guarded, "open", opening(wanted, clients=1))) == "min_sites"
    assert code(ask(guarded, "open", opening(wanted, clients=4))) == "min_batch"
    assert ask(guarded, "open", opening(experiment())).kind == "yes"


TWO = FEDAVG + '[[methods]]\nname = "fedper"\n'
BEYOND = {
    "min_sites": (opening(experiment(), clients=1), {}),
    "min_cohort": (opening(experiment("cohort=1"), clients=4), {}),
    "min_batch": (opening(experiment("training.batch=4")), {}),
    "min_steps": (opening(experiment()), {"min_steps": 9}),
    "min_examples": (opening(experiment("training.steps=1")), {}),
    "min_scored": (opening(experiment("data.split=[0.96, 0.02, 0.02]")), {}),
    "require_privacy": (opening(experiment()), {"require_privacy": True}),
    "methods": (opening(experiment()), {"methods": ("fedper", "local")}),
    "max_rounds": (opening(experiment("rounds=501")), {}),
    "max_seeds": (opening(experiment("seeds=[0,1,2,3,4,5,6,7,8,9]")), {}),
    "max_reports": (opening(experiment("rounds=400", "seeds=[0,1,2]", methods=TWO)), {}),
}
"""Of each limit a run that goes beyond it, and the policy where it is not the default."""


@pytest.mark.parametrize("limit", BEYOND)
def test_a_run_beyond_a_limit_is_refused_by_its_name(limit, tmp_path, caplog):
    head, changes = BEYOND[limit]
    node = Node(site(tmp_path, policy=SitePolicy(**changes)))
    assert code(ask(node, "open", head)) == limit
    assert limit in caplog.text  # with the figures, for the site itself
    assert limit in POLICY_LIMITS


def test_coins_that_may_leave_a_site_alone_are_refused(tmp_path):
    node = Node(site(tmp_path))
    few = experiment("draw=poisson", "cohort=2")
    assert code(ask(node, "open", opening(few, clients=8))) == "min_cohort"
    many = experiment("draw=poisson", "cohort=100")
    assert ask(node, "open", opening(many, clients=200)).kind == "yes"


@pytest.mark.parametrize("buffer", ["1", "0.25"])
def test_a_buffer_of_fewer_reports_than_a_round_needs_is_refused(tmp_path, buffer):
    """The difference of two models would be one site's report."""
    wanted = experiment(f"deploy.buffer={buffer}")
    assert code(ask(Node(site(tmp_path)), "open", opening(wanted, clients=4))) == "min_cohort"
    enough = experiment("deploy.buffer=2")
    assert ask(Node(site(tmp_path)), "open", opening(enough, clients=4)).kind == "yes"


def test_too_few_rows_for_any_report_or_statistics(tmp_path):
    node = Node(site(tmp_path, rows=50))  # 30 to train on
    assert code(ask(node, "open", opening(experiment("training.batch=64")))) == "min_examples"
    none = '[[methods]]\nname = "local"\n'
    scaled = experiment('data.normalise="feature"', methods=none)
    assert code(ask(node, "open", opening(scaled))) == "min_examples"


def test_every_training_is_looked_at_whatever_was_let_in(tmp_path, monkeypatch):
    """A method whose own settings ask for fewer rows than its table says is seen at its work."""
    monkeypatch.setattr(limits, "refuse_run", lambda *_: None)
    for number, sets in enumerate((EXTRACTION, ("training.batch=64", "training.steps=1"))):
        own = site(tmp_path, rows=100 if number == 0 else 50, name=f"h{number}")
        node = Node(own)
        alone = joined(node, experiment(*sets))
        refused = code(ask(node, "step", task(), alone.form))
        assert refused == ("min_batch", "min_examples")[number]
        assert not list(own.home.glob("state/**/*.safetensors"))


def test_no_more_rounds_are_reported_than_the_run_was_let_in_for(tmp_path):
    node = Node(site(tmp_path))
    alone = joined(node, experiment("rounds=2"))
    assert code(ask(node, "step", task(2), alone.form)) == "max_rounds"
    assert ask(node, "step", task(1), alone.form).kind == "yes"


def test_no_round_is_done_again_under_another_number(tmp_path):
    """Personal state is kept by the client's number: of another one no round has been done."""
    own = site(tmp_path)
    alone = joined(Node(own), experiment(), clients=4)
    node = Node(own)  # started anew
    joined(node, experiment(), clients=4)
    assert ask(node, "step", task(), alone.form).kind == "yes"
    assert code(ask(node, "open", opening(experiment(), clients=4, place=1))) == "data"
    assert code(ask(Node(own), "open", opening(experiment(), clients=4, place=3))) == "data"
    assert len(list(own.home.glob("state/test/*"))) == 1
    later = opening(experiment(), clients=4, place=1, newcomer=True)
    assert ask(node, "open", later).kind == "yes"  # who tells nothing but scores


def test_a_newcomer_gives_no_report(tmp_path):
    """Also where it insists on masks: a run that is over is no way around them."""
    policy = SitePolicy(require_secure=True)
    node = Node(site(tmp_path, policy=policy))
    assert code(ask(node, "open", opening(experiment()))) == "open"
    alone = joined(node, experiment(), newcomer=True)
    assert code(ask(node, "step", task(), alone.form)) == "newcomer"
    assert code(ask(node, "tell", task(), alone.form)) == "newcomer"


def test_reports_scorings_rounds_and_runs_are_counted_over_restarts(tmp_path):
    policy = SitePolicy(max_reports=2, max_rounds=6, max_runs=2)
    own = site(tmp_path, policy=policy)
    node = Node(own)
    alone = joined(node, experiment("rounds=2"))
    first = ask(node, "step", task(0), alone.form)
    assert first.kind == "yes"
    node = Node(own)  # started anew
    alone = joined(node, experiment("rounds=2"))
    assert ask(node, "step", task(0), alone.form) is not None  # the same again is no new report
    assert code(ask(node, "step", task(6), alone.form)) == "max_rounds"
    assert ask(node, "step", task(1), alone.form).kind == "yes"
    alone = joined(node, experiment("rounds=1", "seeds=[0,1]"))  # of the same run
    assert code(ask(node, "step", task(0, seed=1), alone.form)) == "max_reports"
    flags = {"tested": True, "only_global": True, "keep": False, "newcomers": False}
    judged = [ask(node, "judge", task(n, **flags), alone.form) for n in range(3)]
    assert [one.kind for one in judged] == ["yes", "yes", "no"] and code(
        judged[-1]
    ) == "max_reports"
    assert ask(node, "open", opening(experiment(), run="r2")).kind == "yes"
    assert code(ask(Node(own), "open", opening(experiment(), run="r3"))) == "max_runs"


@pytest.mark.parametrize(
    ("held", "batch", "epochs", "steps", "expected"),
    [
        (1, 1, 1, 1, (1, 1)),
        (100, 8, 1, 1, (1, 8)),
        (100, 8, 1, 4, (4, 32)),
        (10, 10, 1, 500, (500, 10)),
        (10, 64, 3, 0, (3, 10)),
        (64, 32, 1, 0, (2, 64)),
        (33, 32, 1, 0, (1, 32)),  # the last row by itself is left out
        (49, 32, 2, 0, (4, 34)),  # 17 rows weigh as much as 32
        (0, 8, 1, 0, (0, 0)),
    ],
)
def test_rows_behind_a_report(held, batch, epochs, steps, expected):
    found = limits.behind(Request("train", batch, epochs, steps, True, 0), held)
    assert (found.steps, found.rows) == pytest.approx(expected)


def test_a_last_batch_of_under_half_the_rows_is_left_out(tmp_path):
    """33 rows in batches of 32: what is learnt is what the first 32 of the round's order teach."""
    wanted = experiment("training.batch=32", "data.split=[0.6, 0.2, 0.2]")
    found = {}
    for short in (False, True):
        policy = SitePolicy(short_batches=short)
        (home := tmp_path / f"s{short}").mkdir()  # rows are divided by name, which is the same
        node = Node(site(home, rows=55, name="clinic", policy=policy))
        alone = joined(node, wanted)
        assert len(node._joined.data.federations[0].train[0]) == 33
        found[short] = ask(node, "step", task(), alone.form).leaves
    one = Node(site(tmp_path, rows=55, name="clinic", policy=UNLIMITED))
    alone = joined(one, experiment("training.batch=32", "training.steps=1"))
    first = ask(one, "step", task(), alone.form).leaves
    assert all(found[False][name].equal(first[name]) for name in first)
    assert any(not found[True][name].equal(first[name]) for name in first)


def test_no_gradient_step_is_of_fewer_rows_than_the_site_allows(tmp_path):
    """72 rows in batches of 16: half a batch is left, which is too few where 9 are asked for."""
    wanted = experiment("training.batch=16")
    found = {}
    for least in (8, 9):
        (home := tmp_path / f"m{least}").mkdir()
        node = Node(site(home, rows=120, name="clinic", policy=SitePolicy(min_batch=least)))
        alone = joined(node, wanted)
        assert len(node._joined.data.federations[0].train[0]) == 72
        found[least] = ask(node, "step", task(), alone.form).leaves
    few = Node(site(tmp_path, rows=120, name="clinic", policy=UNLIMITED))
    alone = joined(few, experiment("training.batch=16", "training.steps=4"))
    whole = ask(few, "step", task(), alone.form).leaves  # the last 8 rows are the fifth step
    assert all(found[9][name].equal(whole[name]) for name in whole)
    assert any(not found[8][name].equal(whole[name]) for name in whole)
    request = Request("train", 16, 1, 0, True, 0)
    assert limits.behind(request, 72, 8).steps == 5 and limits.behind(request, 72, 9).steps == 4


def served(folder, nodes, *sets, methods=FEDAVG):
    text = export_experiment(experiment(*sets, methods=methods))
    inside = InProcess({node._site.name: node for node in nodes})
    return serve(make_messenger(inside, text, folder), text, "r1", folder)


def test_an_ordinary_federation_runs_at_the_default_limits(tmp_path):
    nodes = [Node(site(tmp_path, 90 + n, f"clinic-{n}", n)) for n in range(3)]
    content = served(tmp_path / "run", nodes, "seeds=[0,1]", 'data.normalise="feature"')
    assert len(content["methods"]["FedAvg"]["seeds"]) == 2
    assert not (tmp_path / "run" / "faults.json").exists()


def test_the_lead_is_told_the_limit_in_one_line(tmp_path):
    nodes = [Node(site(tmp_path, 90, f"clinic-{n}", n)) for n in range(2)]
    with pytest.raises(
        ConfigError, match=r"clinic-0: its site's policy .* \(min_batch\)"
    ) as caught:
        served(tmp_path / "run", nodes, *EXTRACTION)
    assert "\n" not in str(caught.value)


class Silent(InProcess):
    """Nodes one of which no message reaches any more after it joined."""

    def call(self, site, blob, seconds):
        if site == "clinic-1" and protocol.unpack(blob).kind == "step":
            return protocol.refusal("memory")
        return super().call(site, blob, seconds)


def test_a_round_with_fewer_sites_than_one_allows_does_not_count(tmp_path):
    """Whatever deploy.minimum says."""
    nodes = {f"clinic-{n}": Node(site(tmp_path, 90, f"clinic-{n}", n)) for n in range(2)}
    text = export_experiment(experiment("deploy.minimum=1"))
    with pytest.raises(Exception, match="1 of 2 nodes reported, 2 needed"):
        serve(make_messenger(Silent(nodes), text, tmp_path / "run"), text, "r1", tmp_path / "run")


def test_a_site_without_training_rows_is_nobody_to_hide_among(tmp_path):
    full, empty = (site(tmp_path, 90, name, policy=UNLIMITED) for name in ("full", "empty"))
    for own, training in ((full, 60), (empty, 0)):
        head, *rows = Path(own.data).read_text().splitlines()
        parts = ["train"] * training + ["test"] * (90 - training)
        lines = [f"{head},part", *(f"{row},{one}" for row, one in zip(rows, parts, strict=True))]
        Path(own.data).write_text("\n".join(lines) + "\n")
    options = {"label": "diagnosis", "split": "part"}
    nodes = [
        Node(dataclasses.replace(full, options=options, policy=SitePolicy())),
        Node(dataclasses.replace(empty, options=options)),
    ]
    with pytest.raises(ConfigError, match=r"1 sites joined .* full: .* \(min_sites\)"):
        served(tmp_path / "run", nodes, 'data.split="file"')


def test_the_file_that_a_kit_starts_with_is_the_defaults(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_bytes(initial_policy("node"))
    assert read_site_policy(path) == SitePolicy()
    assert set(tomllib.loads(initial_policy("node").decode())) == {
        f.name for f in dataclasses.fields(SitePolicy)
    }
    path.write_text("")
    assert read_site_policy(path) == SitePolicy()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("min_batches = 8", "unknown key min_batches: did you mean min_batch"),
        ("min_batch = 0", "min_batch is 0, expected a number of 1 or more"),
        ("min_batch = '8'", "min_batch is '8'"),
        ("max_epsilon = nan", "max_epsilon is nan"),
        ("methods = ['fedavgg']", "unknown method"),
        ("packages = ['a b']", "'a b' is no name"),
        ("min_batch = ", "not valid TOML"),
    ],
)
def test_a_policy_that_cannot_be_right_is_told(line, told, tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text(line)
    with pytest.raises(ConfigError, match=r"policy\.toml") as caught:
        read_site_policy(path)
    assert told.split(":")[0] in str(caught.value)


def test_a_policy_reaches_the_training_process(tmp_path):
    policy = SitePolicy(min_batch=99, methods=("fedavg",), packages=("clinic_nets",))
    own = site(tmp_path, policy=policy)
    assert NodeSettings.from_json(own.to_json()) == own
    assert fed.sites(tmp_path, 1)[0].policy == UNLIMITED


def test_under_masks_a_node_counts_the_members_itself(tmp_path):
    """The server says that ten sites take part, and makes a sum of three."""
    policy = dataclasses.replace(UNLIMITED, min_cohort=4)
    nodes = fed.inside(tmp_path / "nodes", 3, policy=policy)
    sets = ("deploy.secure=true", "data.partition.clients=3")
    with pytest.raises(ConfigError, match="min_cohort"):
        fed.served(fed.experiment("fedavg", sets=sets), nodes, tmp_path / "open")

    class Boasting(InProcess):
        def call(self, site, blob, seconds):
            message = protocol.unpack(blob)
            if message.kind == "open":
                blob = protocol.pack("open", {**message.head, "clients": 10})
            answer = super().call(site, blob, seconds)
            if message.kind == "open":  # nor does it tell the hub what the site asks for
                told = protocol.unpack(answer)
                answer = protocol.pack("yes", {**told.head, "least": [1, 1]}, told.leaves)
            return answer

    cheated = Boasting(fed.inside(tmp_path / "more", 3, policy=policy)._nodes)
    with pytest.raises(ConfigError, match="min_cohort"):
        fed.served(fed.experiment("fedavg", sets=sets), cheated, tmp_path / "run")


@pytest.mark.parametrize("stage", ["confirm", "unmask"])
def test_a_site_counts_the_survivors_of_a_sum_too(tmp_path, stage):
    """Of four members one may be lost: then the sum is of three, where the site asks for four."""
    names = {"run": "r1", "label": "FedAvg", "of": "step", "sum": "s", "seed": 0, "round": 0}
    four = [Participant(protocol.Message("keys", names, {}).sum_id(), name) for name in "abcd"]
    keys = {one.name: one.keys() for one in four}
    boxes = {one.name: one.shares(keys) for one in four}
    sums = secure_sum.NodeSums("a", None, tmp_path, least=4)
    four[0].masked(np.zeros(1, np.uint64), {name: boxes[name]["a"] for name in "bcd"})
    sums._sum = secure_sum._Sum(four[0], None, "digest")
    with pytest.raises(Refused, match="3 sites; min_cohort is 4"):
        sums.stage(protocol.Message(stage, {**names, "survivors": list("abc")}, {}))
    if stage == "unmask":
        _, fields = sums.stage(protocol.Message(stage, {**names, "survivors": list("abcd")}, {}))
        assert not fields


def test_epsilon_of_all_seeds_and_methods_counts(tmp_path):
    pytest.importorskip("dp_accounting")
    method = FEDAVG + 'aggregate = {name = "dp", noise = 60.0}\n'
    forced = FEDAVG + 'aggregate = {name = "dp", noise = 60.0, delta = 0.9, force = true}\n'
    node = Node(site(tmp_path, name="forced", policy=SitePolicy(require_privacy=True)))
    told = ask(node, "open", opening(experiment(methods=forced), clients=40))
    assert code(told) == "require_privacy"
    for number, (seeds, times, allowed) in enumerate(((1, 1, True), (3, 1, False), (1, 2, False))):
        policy = SitePolicy(require_privacy=True, max_epsilon=0.4)
        node = Node(site(tmp_path, name=f"h{number}", policy=policy))
        labels = "".join(f'{method}label = "m{n}"\n' for n in range(times))
        sets = (f"seeds={list(range(seeds))}", "rounds=20", "draw=fixed")
        told = ask(node, "open", opening(experiment(*sets, methods=labels), clients=40))
        assert told.kind == "yes" if allowed else code(told) == "max_epsilon"


def test_all_starts_of_a_run_share_its_limits(tmp_path):
    """A run that is resumed with other seeds or methods does not start counting anew."""
    kept = node_records.ReleaseLog(tmp_path, SitePolicy(max_seeds=3, max_epsilon=8.0))
    kept.begin("r1", (0, 1, 2), "a", {"dp, seeds 0,1,2": 5.0})
    kept.begin("r1", (0, 1), "a", {"dp, seeds 0,1,2": 5.0})
    for start, limit in (
        (((3,), "a", {}), "max_seeds"),
        (((0,), "b", {}), "data"),
        (((0,), "a", {"other": 4.0}), "max_epsilon"),
    ):
        with pytest.raises(Refused) as caught:
            node_records.ReleaseLog(tmp_path, kept.policy).begin("r1", *start)
        assert caught.value.reason == limit


def test_statistics_of_nearly_the_same_rows_are_not_told_twice(tmp_path):
    """The difference of two sums over rows that differ in one is that row."""
    kept = node_records.ReleaseLog(tmp_path, SitePolicy())
    rows = np.random.default_rng(0).permutation(1000)
    kept.divide([rows[:600], rows[300:900]])
    kept.divide([rows[:600][::-1]])  # the very same rows
    for few in (rows[:601], rows[:590], np.append(rows[:600], 5000)):
        with pytest.raises(Refused, match="differ in"):
            node_records.ReleaseLog(tmp_path, kept.policy).divide([few])
    with pytest.raises(Refused, match="differ in 1 "):  # of two seeds of one run
        kept.divide([rows[100:700], rows[100:701]])
    assert len(list((tmp_path / "divisions").iterdir())) == 2  # nothing that was not told
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "divisions").iterdir()} == {0o600}


def test_force_does_not_pass_for_privacy():
    dp = 'aggregate = { name = "dp", noise = 0.8, clip = 1.0, force = true }\n'
    wanted = experiment(methods=FEDAVG + dp)
    with pytest.raises(Refused, match="force = true"):
        limits.refuse_run(SitePolicy(require_privacy=True), wanted, 1003, [[900, 90, 90]])


def test_a_newcomer_tells_no_statistics(tmp_path):
    """A server that calls a run over must not get means of few rows, seed by seed."""
    node = Node(site(tmp_path))
    fitted = experiment("data.normalise=feature", "seeds=[0, 1, 2, 3, 4]")
    assert code(ask(node, "open", opening(fitted, newcomer=True))) == "newcomer"
    many = experiment("seeds=[0, 1, 2, 3, 4]")
    assert code(ask(node, "open", opening(many, newcomer=True))) == "max_seeds"


def test_a_method_that_tells_nothing_is_not_asked_at_the_end(tmp_path):
    node = Node(site(tmp_path))
    alone = joined(node, experiment())
    assert code(ask(node, "tell", task(), alone.form)) == "protocol"
