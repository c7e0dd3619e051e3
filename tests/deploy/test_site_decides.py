"""A site decides for whom it works, when, after whose yes, and how much privacy it spends."""

import dataclasses
import json
from datetime import datetime

import federations as fed
import pytest
from kitmaking import HOST, Maker
from test_keys import revoke
from test_limits import ask, experiment, opening, site

from idiolect.cli import node_commands
from idiolect.deploy import approval, audit, audit_check, limits, node_records, protocol, submission
from idiolect.deploy.approval import NO, YES, Approvals
from idiolect.deploy.identity import Authority
from idiolect.deploy.limits import UNLIMITED, SitePolicy, within
from idiolect.deploy.node import Node
from idiolect.deploy.node_process import InProcess
from idiolect.deploy.protocol import Refused
from idiolect.engine.outcome import Silent
from idiolect.errors import ConfigError
from idiolect.experiment.portable import export_experiment

PRIVATE = """[[methods]]
name = "fedavg"
aggregate = { name = "dp", noise = 40.0, clip = 1.0 }
"""


def code(told):
    return told.head.get("code", "yes")


def asked(folder, policy, wanted=None, **changes):
    node = Node(site(folder, policy=policy))
    return node, ask(node, "open", opening(wanted or experiment(), **changes))


# Who, and when.


def test_only_those_on_the_sites_list_are_worked_for(tmp_path):
    policy = SitePolicy(submitters=("lead@hub.org",))
    assert code(asked(tmp_path, policy, submitter="other@hub.org")[1]) == "submitters"
    assert code(asked(tmp_path, policy, submitter="lead@hub.org")[1]) == "yes"
    node = Node(site(tmp_path, policy=policy))
    head = {**opening(experiment()), "submitter": "other@hub.org"}
    assert code(ask(node, "describe", head)) == "submitters"


@pytest.mark.parametrize(
    ("hours", "when", "inside"),
    [
        ("", "2026-11-18 03:00", True),
        ("Mon-Fri 18:00-06:00", "2026-11-18 18:00", True),  # a Wednesday
        ("Mon-Fri 18:00-06:00", "2026-11-18 17:59", False),
        ("Mon-Fri 18:00-06:00", "2026-11-18 05:59", True),
        ("Mon-Fri 18:00-06:00", "2026-11-18 06:00", False),
        ("Mon-Fri 18:00-06:00", "2026-11-21 05:00", True),  # of Friday's night
        ("Mon-Fri 18:00-06:00", "2026-11-16 05:00", False),  # of Sunday's
        ("Sat-Mon 00:00-24:00", "2026-11-16 23:59", True),
        ("Sat-Mon 00:00-24:00", "2026-11-17 00:00", False),
        ("Tue 08:00-09:00, Wed 10:00-11:00", "2026-11-18 10:30", True),
        ("Tue 08:00-09:00, Wed 10:00-11:00", "2026-11-18 08:30", False),
    ],
)
def test_hours(hours, when, inside):
    assert within(hours, datetime.fromisoformat(when)) is inside


@pytest.mark.parametrize(
    "hours", ["always", "Mon 8:00-9:00", "Foo 08:00-09:00", "Mon 25:00-26:00", "Mon 08:00-08:00"]
)
def test_hours_that_are_none_are_refused_in_words(hours):
    with pytest.raises(ConfigError, match="hours"):
        SitePolicy(hours=hours)


def test_a_node_works_in_its_hours_only_and_goes_on_in_them(tmp_path, monkeypatch):
    node, _ = asked(tmp_path, UNLIMITED)
    now = [False]
    monkeypatch.setattr(limits, "within", lambda hours, when: now[0])
    assert code(ask(node, "open", opening(experiment()))) == "hours"
    head = {"run": "r1", "label": "FedAvg", "seed": 0, "round": 0}
    for kind in ("columns", "step", "keys", "tell", "judge"):
        assert code(ask(node, kind, head)) == "hours"
    now[0] = True
    assert code(ask(node, "step", head)) == "closed"  # it is asked for more by then


# A person's yes.


def test_nothing_leaves_before_a_person_said_yes_to_exactly_this(tmp_path):
    policy = SitePolicy(require_approval=True)
    node, told = asked(tmp_path, policy, submitter="lead@hub.org")
    assert code(told) == "approval" and set(told.head) == {"code"} and not told.leaves
    home = tmp_path / "hospital"
    known = Approvals(home).find("r1")
    words = "\n".join(known.summary)
    for part in (
        "lead@hub.org asks",
        "'clinics'",
        "with 1 other sites",
        "FedAvg: 2 rounds",
        "at most 2 reports",
        "the server sees each of them",
        "no differential privacy",
        "stays: rows",
    ):
        assert part in words
    assert "rounds = 2" in known.experiment
    assert not (home / "releases.json").exists()  # it counts as no run either
    Approvals(home).decide("r1", YES, "ada")
    assert code(ask(node, "open", opening(experiment(), submitter="lead@hub.org"))) == "yes"
    # Anything else is asked about anew: another experiment, submitter, or number of sites.
    other = experiment("rounds=3")
    assert code(ask(node, "open", opening(other, submitter="lead@hub.org"))) == "approval"
    Approvals(home).decide("r1", YES, "ada")
    again = opening(other, submitter="lead@hub.org", clients=3)
    assert code(ask(node, "open", again)) == "approval"


def test_a_no_reaches_the_lead_in_words_and_holds_amid_a_run(tmp_path):
    policy = dataclasses.replace(UNLIMITED, require_approval=True)
    node, _ = asked(tmp_path, policy)
    home = tmp_path / "hospital"
    Approvals(home).decide("r1", YES, "ada")
    assert code(ask(node, "open", opening(experiment()))) == "yes"
    Approvals(home).decide("r1", NO, "ada", "the ethics\nboard has not met")
    head = {"run": "r1", "label": "FedAvg", "seed": 0, "round": 0}
    for kind in ("step", "judge", "tell", "keys", "columns"):
        assert code(ask(node, kind, head)) == "declined"
    told = ask(node, "open", opening(experiment()))
    with pytest.raises(Refused, match="said no to the run: the ethicsboard has not met") as why:
        protocol.accepted(told)
    assert why.value.reason == "declined"


def test_a_yes_is_to_what_was_shown_whatever_is_asked_meanwhile(tmp_path, monkeypatch):
    """While a person reads, another experiment is asked for under the same name."""
    kit = Maker(tmp_path / "kits").kit("hospital")
    more = 'federation = "t"\norg = "o"\nport = 1\nsites = []\n'
    (kit / "idiolect.toml").write_text((kit / "idiolect.toml").read_text() + more)
    own = dataclasses.replace(
        site(tmp_path, policy=SitePolicy(require_approval=True)), home=kit / "idiolect"
    )
    node, other = Node(own), opening(experiment("rounds=9"))
    assert code(ask(node, "open", opening(experiment()))) == "approval"

    def reads(*_, **__):
        assert code(ask(node, "open", other)) == "approval"

    monkeypatch.setattr("typer.confirm", reads)
    node_commands.approve(kit)
    assert code(ask(node, "open", other)) == "approval"
    node_commands.approve(kit, yes=True)
    assert code(ask(node, "open", other)) == "yes"


def test_a_no_is_not_passed_by_a_question_that_fails(tmp_path):
    """A server asks for something else by the same name, so that the question is another one."""
    policy = dataclasses.replace(UNLIMITED, require_approval=True)
    node, _ = asked(tmp_path, policy)
    home, head = tmp_path / "hospital", {"run": "r1", "label": "FedAvg", "seed": 0, "round": 0}
    Approvals(home).decide("r1", YES, "ada")
    assert code(ask(node, "open", opening(experiment()))) == "yes"
    Approvals(home).decide("r1", NO, "ada")
    assert code(ask(node, "open", opening(experiment(), clients=3, methods={"FedAvg": ""}))) == (
        "method"
    )
    assert code(ask(node, "step", head)) == "declined"
    # Nor is a yes to something else one to what was joined.
    assert code(ask(node, "open", opening(experiment(), clients=3))) == "approval"
    Approvals(home).decide("r1", YES, "ada")
    assert code(ask(node, "step", head)) == "approval"


def test_a_whole_run_waits_for_a_person_and_then_ends_as_ever(tmp_path):
    """The server asks again; the lead is told whom it waits for, once."""
    wanted = fed.experiment("fedavg", sets=("model.name=mlr", "deploy.approval=60"))
    sites = fed.sites(tmp_path / "nodes", 3)
    strict = dataclasses.replace(UNLIMITED, require_approval=True)
    sites[1] = dataclasses.replace(sites[1], policy=strict)
    sites.append(fed.sites(tmp_path / "nodes", 4)[3])
    told = []

    class Watch(Silent):
        def note(self, text):
            told.append(text)
            Approvals(sites[1].home).decide("r1", YES, "ada")

    transport = InProcess({one.name: Node(one) for one in sites})
    content = fed.served(wanted, transport, tmp_path / "served", watch=Watch())
    assert told == [
        "waiting for site-1: a person at its site has not said yes to the run yet "
        "(idiolect node approve)"
    ]
    whole = fed.simulated(wanted, tmp_path / "simulated")
    assert fed.scores(content, "FedAvg") == fed.scores(whole, "FedAvg")


def test_a_run_that_nobody_approves_ends_with_words(tmp_path):
    wanted = fed.experiment("fedavg", sets=("model.name=mlr", "deploy.approval=0.2"))
    strict = dataclasses.replace(UNLIMITED, require_approval=True)
    transport = fed.inside(tmp_path / "nodes", 4, policy=strict)
    with pytest.raises(ConfigError, match="has not said yes to the run yet"):
        fed.served(wanted, transport, tmp_path / "served")
    for one in fed.sites(tmp_path / "nodes", 4):
        Approvals(one.home).decide("r1", NO, "ada", "not this year")
    with pytest.raises(ConfigError, match=r"site-0: a person at its site said no.*not this year"):
        fed.served(wanted, transport, tmp_path / "served")


# The submitter's signature.


@pytest.fixture(scope="module")
def kits(tmp_path_factory):
    made = Maker(tmp_path_factory.mktemp("kits"))
    for name, role in ((HOST, "server"), ("hospital", "node"), ("lab", "node")):
        made.kit(name, role)
    for lead in ("lead@hub.org", "other@hub.org"):
        made.kit(lead, "admin")
    return made.folder


def test_a_server_can_neither_invent_a_submitter_nor_change_what_it_submitted(tmp_path, kits):
    own = dataclasses.replace(site(tmp_path), kit=kits / "hospital")
    node, wanted = Node(own), experiment()
    text = export_experiment(wanted)
    good = submission.sign(kits / "lead@hub.org", "r1", "run", text)
    head = opening(wanted, submitter="lead@hub.org", submission=good)
    cases = {
        "no signature": {"submission": ""},
        "rubbish": {"submission": "e30="},
        "another name": {"submitter": "other@hub.org"},
        "another run": {"run": "r2"},
        "another experiment": {"experiment": export_experiment(experiment("rounds=1"))},
        "another kind": {"newcomer": True},
        "another lead's": {
            "submission": submission.sign(kits / "other@hub.org", "r1", "run", text)
        },
    }
    for what, change in cases.items():
        assert code(ask(node, "open", {**head, **change})) == "submitter", what
    # Signed by a member that is no admin: the role is in the certificate.
    lab = submission.sign(kits / "lab", "r1", "run", text)
    told = ask(node, "open", {**head, "submitter": "lab", "submission": lab})
    assert code(told) == "identity"
    assert code(ask(node, "describe", head)) == "submitter"
    assert not (own.home / "releases.json").exists()
    assert code(ask(node, "open", head)) == "yes"
    # What was let in is in the log: who submitted what, and what was promised.
    (entry,) = [
        one
        for line in audit.lines_of(own.home / audit.LOG_FILE)
        if (one := audit.read_entry(line)).kind == audit.RUN
    ]
    assert entry.fields["submitter"] == "lead@hub.org"
    assert entry.fields["promise"]["methods"]["FedAvg"] == {"rounds": 2, "privacy": None}
    authority = Authority.from_kit(kits / HOST)
    assert not audit_check.check([own.home / audit.LOG_FILE], authority).problems


def test_a_revoked_leads_run_is_not_gone_on_with(tmp_path):
    made = Maker(tmp_path / "kits")
    kit, lead = made.kit("hospital"), made.kit("lead@hub.org", "admin")
    node, wanted = Node(dataclasses.replace(site(tmp_path), kit=kit)), experiment()
    signed = submission.sign(lead, "r1", "run", export_experiment(wanted))
    told = ask(node, "open", opening(wanted, submitter="lead@hub.org", submission=signed))
    assert code(told) == "yes"
    head = {"run": "r1", "label": "FedAvg", "seed": 0, "round": 0}
    assert code(ask(node, "step", head)) == "closed"  # until examples are scaled
    revoke(made, kit, "lead@hub.org")
    assert code(ask(node, "step", head)) == "revoked"


# Privacy over all runs.


def private(folder, **policy):
    chosen = {"budget_epsilon": 1.0, "max_epsilon": 1.0, **policy}
    return Node(site(folder, 200, policy=SitePolicy(**chosen)))


def spent(folder):
    return node_records.ReleaseLog(folder / "hospital", SitePolicy()).spent()


def opened(node, run, wanted):
    return code(ask(node, "open", opening(wanted, run=run, clients=40)))


def test_a_budget_over_all_runs_is_kept_and_refused_when_used_up(tmp_path):
    wanted = experiment("rounds=1", "cohort=20", methods=PRIVATE)
    assert opened(private(tmp_path), "r1", wanted) == "yes"
    one = spent(tmp_path)
    assert 0.02 < one < 0.5
    assert opened(private(tmp_path), "r1", wanted) == "yes"  # the same again, after a restart
    assert spent(tmp_path) == one
    runs, budget = 1, 3.5 * one
    while opened(private(tmp_path, budget_epsilon=budget), f"r{runs + 1}", wanted) == "yes":
        runs += 1
        assert spent(tmp_path) == pytest.approx(runs * one)
    assert runs == 3
    told = ask(
        private(tmp_path, budget_epsilon=budget), "open", opening(wanted, run="r9", clients=40)
    )
    assert code(told) == "budget_epsilon"
    assert spent(tmp_path) == pytest.approx(3 * one)
    # Runs without privacy have no epsilon that a budget could count.
    assert opened(private(tmp_path), "r8", experiment()) == "require_privacy"


def test_what_a_run_has_spent_is_never_lowered(tmp_path):
    """The same method under settings that promise more later, in the same run."""
    costly = experiment("rounds=1", "cohort=20", methods=PRIVATE)
    cheap = experiment("rounds=1", "cohort=30", "draw=poisson", methods=PRIVATE)
    told = ask(private(tmp_path), "open", opening(cheap, run="r2", clients=40))
    assert code(told) == "yes"
    less = spent(tmp_path)
    assert opened(private(tmp_path), "r1", costly) == "yes"
    more = spent(tmp_path) - less
    assert less < more
    told = ask(private(tmp_path), "open", opening(cheap, run="r1", clients=40))
    assert code(told) == "yes"
    assert spent(tmp_path) == pytest.approx(2 * less + more)


def test_what_is_spent_is_on_the_disk_before_anything_leaves(tmp_path, monkeypatch):
    """The node dies when it would answer."""

    class Killed(BaseException):
        pass

    node, wanted = private(tmp_path), experiment("rounds=1", "cohort=20", methods=PRIVATE)
    pack = protocol.pack

    def dies(kind, *rest, **more):
        if kind == "yes":
            raise Killed
        return pack(kind, *rest, **more)

    head = pack("open", opening(wanted, clients=40))
    monkeypatch.setattr(protocol, "pack", dies)
    node.answer(head)
    assert spent(tmp_path) > 0.02


def test_a_summary_says_what_is_promised_and_what_is_left_of_the_budget(tmp_path):
    wanted = experiment("rounds=1", "cohort=20", methods=PRIVATE)
    node = private(tmp_path, require_approval=True)
    assert opened(node, "r1", wanted) == "approval"
    words = "\n".join(Approvals(tmp_path / "hospital").find("r1").summary)
    assert "epsilon = " in words and "delta = " in words and "of 1 over all runs" in words
    assert spent(tmp_path) == 0.0  # nothing is spent on a question


def test_a_damaged_record_is_no_yes(tmp_path):
    node, _ = asked(tmp_path, SitePolicy(require_approval=True))
    path = tmp_path / "hospital" / "approvals" / "r1.json"
    path.write_text("rubbish")
    assert code(ask(node, "open", opening(experiment()))) == "state"
    path.write_text(json.dumps({"run": "r1", "decision": "yes", "summary": []}))
    assert code(ask(node, "open", opening(experiment()))) == "state"
    with pytest.raises(ConfigError, match="no run r7 was asked for"):
        Approvals(tmp_path / "elsewhere").decide("r7", YES, "ada")


def test_a_lead_cannot_ask_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(approval, "_MOST", 2)
    known = Approvals(tmp_path)
    for run, reason in (("a", "approval"), ("b", "approval"), ("c", "max_runs")):
        with pytest.raises(Refused) as told:
            known.require(run, "digest", ["words"], "toml")
        assert told.value.reason == reason
    known.decide("a", NO, "ada")
    with pytest.raises(Refused) as told:
        known.require("c", "digest", ["words"], "toml")
    assert told.value.reason == "approval"


def test_names_in_a_summary_cannot_steer_a_terminal():
    asked = approval.RunTerms("r1", "lead\x1b[2J@hub.org", "describe", 3, "x\ny")
    assert all(line.isprintable() for line in approval.summary(asked))


def test_a_name_in_a_summary_does_not_pass_for_a_promise():
    """Nor is it so long that what is said after it is cut off."""
    label = f"FedAvg: epsilon = 0.1, delta = 1e-05, by noise that the server adds{' ' * 400}"
    methods = {label: {"rounds": 2, "privacy": None}}
    promise = {"secure": False, "methods": methods, "seeds": 1}
    terms = approval.RunTerms("r1", "lead@hub.org", "run", 2, label * 9, 60, promise)
    first, *_, told, _ = approval.summary(terms)
    assert told.startswith("promise for 'FedAvg: ") and "': no differential privacy" in told
    assert len(first) < 200
