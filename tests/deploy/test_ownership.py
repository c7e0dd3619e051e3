"""A run belongs to whoever submitted it: its name alone gets nobody in, and nothing is changed."""

import importlib.util
import json

import federations as fed
import pytest

from idiolect.deploy import node_records, protocol
from idiolect.deploy.newcomer_nodes import WantedModel
from idiolect.errors import CheckpointError, ConfigError, DeployError
from idiolect.experiment.portable import export_experiment

FIRST, SECOND = "first@hub.org", "second@hub.org"
SETS = ("model.name=mlr", "rounds=1", "evaluate.every=1")


def test_the_first_to_name_a_run_owns_it(tmp_path):
    node_records.claim_run(tmp_path, "r1", FIRST, tmp_path / "runs" / "r1")
    (tmp_path / "runs" / "r1").mkdir(parents=True)
    node_records.claim_run(tmp_path, "r1", FIRST, tmp_path / "runs" / "r1")
    for touch in (node_records.claim_run, node_records.check_owner):
        for other in (SECOND, "", FIRST.upper()):
            with pytest.raises(node_records.NotOwner, match="was not started by"):
                touch(tmp_path, "r1", other)
    node_records.check_owner(tmp_path, "r1", FIRST)
    with pytest.raises(node_records.NotOwner, match="holds no run r2"):
        node_records.check_owner(tmp_path, "r2", FIRST)


def test_what_has_no_owner_is_nobodys_to_take(tmp_path):
    """State of an older version, or a record that was damaged."""
    with pytest.raises(node_records.NotOwner, match="nobody is known to own run r1"):
        node_records.claim_run(tmp_path, "r1", FIRST, tmp_path)
    assert not (tmp_path / node_records._OWNERS).exists()
    node_records.claim_run(tmp_path, "r1", FIRST)
    (record,) = (tmp_path / node_records._OWNERS).iterdir()
    for damaged in ("", "[]", "{}"):
        record.write_text(damaged)
        with pytest.raises(DeployError, match="is damaged"):
            node_records.claim_run(tmp_path, "r1", FIRST)


@pytest.mark.parametrize("run", ["", "..", "a/b", "a.b", "r" * 65, "é", "r\n"])
def test_names_that_lead_elsewhere_are_refused(tmp_path, run):
    with pytest.raises(ConfigError, match="letters and digits"):
        node_records.claim_run(tmp_path, run, FIRST)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Server:
    """The server's side of jobs, in this process."""

    def __init__(self, folder):
        self.home, self._jobs = folder / "server", folder / "jobs"
        self.nodes = fed.inside(folder / "nodes", 4)

    def job(self, submitter, *methods, run="r1", wanted=None, sets=SETS):
        """Do a job; return how it ended and what its submitter can fetch."""
        from idiolect.deploy.flare.flare_job import ServerSide, base64

        text = export_experiment(fed.experiment(*methods, sets=sets)) if methods else ""
        coded = base64.b64encode(text.encode()).decode()
        told = None if wanted is None else list(wanted)
        hub = ServerSide(run, coded, list(self.nodes.sites), [], told)
        folder = self._jobs / str(len(list(self._jobs.glob("*"))))
        folder.mkdir(parents=True)
        return hub.done(self.nodes, self.home, folder, submitter), contents(folder)


needs_flare = pytest.mark.skipif(
    importlib.util.find_spec("nvflare") is None, reason="nvflare is not installed (extra flare)"
)


@needs_flare
def test_another_lead_gets_and_changes_nothing_by_a_runs_name(tmp_path):
    """It resumes the run, adds a method, changes it, adapts to it, or visits under its name."""
    server = Server(tmp_path)
    outcome, fetched = server.job(FIRST, "fedper")
    assert outcome == {"state": "done"} and any(path.name == "result.json" for path in fetched)
    before = {**contents(server.home), **contents(tmp_path / "nodes")}
    attempts = [
        {"methods": ("fedper",)},
        {"methods": ("fedper", "fedavg")},
        {"methods": ("fedavg",)},
        {"methods": ("fedper",), "sets": (*SETS, "rounds=3")},
        {"methods": (), "run": "v1", "wanted": WantedModel("r1")},
        {"methods": (), "wanted": WantedModel("r1")},
    ]
    for attempt in attempts:
        outcome, fetched = server.job(SECOND, *attempt.pop("methods"), **attempt)
        assert (
            outcome["state"] == "error" and "was not started by second@hub.org" in outcome["text"]
        )
        assert not fetched and FIRST not in outcome["text"]
        assert {**contents(server.home), **contents(tmp_path / "nodes")} == before
    # Its own visit cannot be put where another's run is either.
    assert server.job(SECOND, "fedper", run="r2")[0] == {"state": "done"}
    before = contents(server.home / "runs" / "r1")
    outcome, fetched = server.job(SECOND, run="r1", wanted=WantedModel("r2"))
    assert "run r1 was not started by" in outcome["text"] and not fetched
    assert contents(server.home / "runs" / "r1") == before
    # The control: whoever started it goes on and adds to it.
    outcome, fetched = server.job(FIRST, "fedper", "fedavg")
    assert outcome == {"state": "done"}
    (path,) = (path for path in fetched if path.name == "result.json")
    assert list(json.loads(fetched[path])["methods"]) == ["FedPer", "FedAvg"]


@needs_flare
def test_another_leads_job_by_a_runs_name_does_not_keep_it_from_going_on(tmp_path):
    """It would wait for a site that never comes, and hold the run while it does."""
    from idiolect.deploy.flare.flare_job import ServerSide

    home = tmp_path / "server"
    node_records.claim_run(home, "r1", FIRST)
    before = contents(home)
    nodes = fed.inside(tmp_path / "nodes", 4)
    for wanted in (None, ["r1"]):
        job = ServerSide("r1" if wanted is None else "v1", "", ["nobody"], [], wanted)
        with pytest.raises(node_records.NotOwner, match="was not started by"):
            job.finished(nodes, home, tmp_path, SECOND)
    assert contents(home) == before


def test_a_node_keeps_a_runs_state_for_its_submitter(tmp_path):
    """Whatever its server lets through: the same name, submitted by another, is another run."""
    nodes, wanted = fed.inside(tmp_path / "nodes", 4), fed.experiment("fedper", sets=SETS)
    fed.served(wanted, nodes, tmp_path / "first", submitter=FIRST)
    before = contents(tmp_path / "nodes")
    assert any("models" in str(path) for path in before)
    again = fed.experiment("fedper", "fedavg", sets=SETS)
    with pytest.raises(DeployError, match="for someone else than who submitted it"):
        fed.served(again, nodes, tmp_path / "second", submitter=SECOND)
    assert contents(tmp_path / "nodes") == before
    # Nor is it worked for, having said no.
    step = protocol.pack("step", {"run": "r1", "label": "FedAvg", "seed": 3, "round": 0})
    assert (
        protocol.unpack(fed.inside(tmp_path / "nodes")._nodes["site-0"].answer(step)).kind == "no"
    )
    fed.served(again, nodes, tmp_path / "first", submitter=FIRST)


def test_an_experiment_that_does_not_fit_the_run_replaces_nothing(tmp_path):
    """Of the owner's own: what the folder holds is checked before any of it is written."""
    nodes = fed.inside(tmp_path / "nodes", 4)
    fed.served(fed.experiment("fedper", sets=SETS), nodes, tmp_path / "served")
    before = contents(tmp_path / "served")
    other = fed.experiment("fedper", sets=(*SETS, "training.lr=0.01"))
    with pytest.raises(CheckpointError, match="belongs to another experiment"):
        fed.served(other, nodes, tmp_path / "served")
    assert contents(tmp_path / "served") == before


@needs_flare
def test_the_submitter_is_read_from_the_engines_record(tmp_path):
    from idiolect.deploy.flare.flare_job import submitter_of

    meta = tmp_path / "meta.json"
    meta.write_text(json.dumps({"submitter_name": FIRST}))
    assert submitter_of(meta) == FIRST
    for text in ("{}", "[]", "", '{"submitter_name": ""}', '{"submitter_name": 3}'):
        meta.write_text(text)
        with pytest.raises(ConfigError, match="does not say who submitted"):
            submitter_of(meta)


@needs_flare
def test_anothers_run_does_not_keep_a_lead_from_stopping_its_own(monkeypatch):
    from idiolect.deploy.flare import admin

    class Session:
        def __init__(self, kit):
            pass

        def ask(self, call):
            return call(self)

        def abort_job(self, job):
            if job == "1":
                raise DeployError("second@hub.org may not do this")

        def close(self):
            pass

    jobs = [{"job_id": str(n), "job_name": f"idiolect-r{n}", "status": "RUNNING"} for n in (1, 2)]
    monkeypatch.setattr(admin, "AdminSession", Session)
    monkeypatch.setattr(admin, "look", lambda session: admin.State(None, [], jobs))
    said = []
    assert admin.stop(None, said.append) == 2
    assert said == ["r1 goes on: second@hub.org may not do this", "stopped r2"]
    del jobs[1]
    with pytest.raises(DeployError, match="may not do this"):  # who stopped nothing is told so
        admin.stop(None, said.append)
