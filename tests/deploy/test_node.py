"""A node: joins or says why not, works once for each message, keeps its state, tells no secrets."""

import errno
import json

import federations as fed
import numpy as np
import pytest
import torch

from idiolect.core import checkpoint
from idiolect.deploy import handshake, node_records, protocol
from idiolect.deploy.node import Node
from idiolect.deploy.site import NodeSettings
from idiolect.experiment.components import build_method
from idiolect.experiment.portable import export_experiment
from idiolect.version import VERSION


def ask(node, kind, head=None, content=()):
    return protocol.unpack(node.answer(protocol.pack(kind, head, content)))


def code(message):
    assert message.kind == "no" and set(message.head) == {"code"} and not message.leaves
    return message.head["code"]


def opening(wanted, **changes):
    methods = {t.label: handshake.method_fingerprint(build_method(t)) for t in wanted.methods}
    text = export_experiment(wanted)
    head = {"run": "r1", "version": VERSION, "experiment": text, "methods": methods}
    head["submitter"] = "lead@hub.org"
    return {**head, "clients": 4, "place": 0, "newcomer": False, **changes}


@pytest.fixture
def joined(tmp_path):
    """A node of FedPer (it keeps a head to itself) that has joined, and what a server sends it."""
    wanted = fed.experiment("fedper", sets=("rounds=8",))
    (site,) = fed.sites(tmp_path, 1)
    node = Node(site)
    told = ask(node, "open", opening(wanted))
    assert told.kind == "yes", told
    agreed = ask(node, "agree", {"run": "r1", "classes": told.head["form"]["classes"]}, told.leaves)
    assert agreed.kind == "yes"
    alone, _ = node._made_runtime(node._joined, "FedPer", 3)
    return node, alone.form, tmp_path / "site-0"


def task(round=0, **changes):
    return {"run": "r1", "label": "FedPer", "seed": 3, "round": round, **changes}


def kept(home):
    (path,) = home.glob("state/test/client-0/r1/*.safetensors")
    return path


def test_joining_tells_sizes_and_form_only(joined, tmp_path):
    node, _, _ = joined
    told = ask(node, "open", opening(fed.experiment("fedper"))).head
    assert told["sizes"] == [[12, 4, 4]] and told["form"]["shape"] == [1, 28, 28]
    assert told["client"] == 0 and told["clients"] == 4 and told["form"]["public"] == 12
    # All that there is: docs/deploy.md, "What crosses the network", lists it.
    assert set(told) == {
        *("client", "clients", "name", "source", "descriptions"),  # by which the rows are known
        *("sizes", "form", "features", "table"),
        *("least", "shown"),  # of the site's policy
    }
    assert not any(str(tmp_path) in str(value) for value in told.values())


def test_what_does_not_fit_is_one_word(tmp_path):
    node = Node(fed.sites(tmp_path, 1)[0])
    wanted = fed.experiment("fedper")
    assert code(ask(node, "step", task())) == "closed"
    assert code(ask(node, "open", opening(wanted, version="0.0.0"))) == "version"
    assert code(ask(node, "open", opening(wanted, methods={"FedPer": "f00"}))) == "method"
    assert code(ask(node, "open", opening(wanted, methods={"Other": "f00"}))) == "experiment"
    assert code(ask(node, "open", opening(wanted, experiment="rounds = 'many'"))) == "experiment"
    assert code(ask(node, "open", opening(wanted, run="../../etc"))) == "format"
    assert code(ask(node, "open", opening(wanted, place=True))) == "format"
    assert code(ask(node, "dance")) == "protocol"
    assert code(protocol.unpack(node.answer(b"noise"))) == "format"
    own = NodeSettings(
        "a", "test", tmp_path / "a", str(tmp_path / "absent.csv"), packages=fed.HOST.packages
    )
    assert code(ask(Node(own), "open", opening(wanted))) == "data"


def test_the_same_message_gets_the_same_answer_and_is_trained_once(joined):
    node, sent, home = joined
    blob = protocol.pack("step", task(), sent)
    first = node.answer(blob)
    before = kept(home).read_bytes()
    assert node.answer(blob) == first
    assert kept(home).read_bytes() == before
    # A process of its own that comes after answers alike, out of what the first one kept.
    again = Node(fed.sites(home.parent, 1)[0])
    told = ask(again, "open", opening(fed.experiment("fedper")))
    ask(again, "agree", {"run": "r1", "classes": told.head["form"]["classes"]}, told.leaves)
    assert again.answer(blob) == first
    assert kept(home).read_bytes() == before


def test_another_message_of_a_done_round_and_an_older_round_are_refused(joined):
    node, sent, home = joined
    assert ask(node, "step", task(4), sent).kind == "yes"
    before = kept(home).read_bytes()
    other = sent._replace(shared={name: 2 * leaf for name, leaf in sent.shared.items()})
    assert code(ask(node, "step", task(4), other)) == "conflict"
    assert code(ask(node, "step", task(2), sent)) == "ahead"
    assert code(ask(node, "step", task(5, run="r2"), sent)) == "closed"
    assert kept(home).read_bytes() == before
    assert ask(node, "step", task(7), other).kind == "yes"  # rounds it was not asked in


def test_messages_of_another_form_leave_the_state_alone(joined):
    node, sent, home = joined
    name = next(iter(sent.shared))
    wrong = {
        "structure": {k: v for k, v in sent.shared.items() if k != name},
        "shape": {**sent.shared, name: sent.shared[name][:1]},
        "dtype": {**sent.shared, name: sent.shared[name].double()},
        "nonfinite": {**sent.shared, name: sent.shared[name] * float("nan")},
    }
    for reason, shared in wrong.items():
        assert code(ask(node, "step", task(), sent._replace(shared=shared))) == reason
    assert not list(home.glob("state/**/*.safetensors"))
    assert code(ask(node, "step", task(label="Other"), sent)) == "experiment"
    assert code(ask(node, "step", task(seed=9), sent)) == "experiment"


def test_divergence_is_told_and_nothing_is_kept(joined):
    node, sent, home = joined
    huge = {name: leaf * 0 + 3e38 for name, leaf in sent.shared.items()}
    assert code(ask(node, "step", task(), sent._replace(shared=huge))) == "diverged"
    assert not list(home.glob("state/**/*.safetensors"))


def test_a_disk_that_is_full_keeps_the_old_state(joined, monkeypatch):
    """Only the last step of writing fails here; test_node_process.py lets the kernel refuse."""
    node, sent, home = joined
    ask(node, "step", task(), sent)
    before = kept(home).read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "replace", full)
        assert code(ask(node, "step", task(1), sent)) == "disk"
    assert kept(home).read_bytes() == before
    assert ask(node, "step", task(1), sent).kind == "yes"


def test_damaged_or_foreign_state_is_refused(joined):
    node, sent, home = joined
    ask(node, "step", task(), sent)
    content = kept(home).read_bytes()
    for damaged in (content[: len(content) // 2], b""):
        kept(home).write_bytes(damaged)
        node._joined.runtimes.clear()
        assert code(ask(node, "step", task(1), sent)) == "state"
    kept(home).write_bytes(content)
    foreign = node_records.StateOwner("test", 1, "r1", "FedPer", 3)
    path = foreign.folder(home) / kept(home).name
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(Exception, match="belongs to"):
        node_records.PersonalState(
            home, foreign, node._made_runtime(node._joined, "FedPer", 3)[0].personal
        )


def test_scores_leave_and_the_model_stays(joined):
    node, sent, home = joined
    flags = {"tested": True, "only_global": False, "keep": True, "newcomers": False}
    answer = ask(node, "judge", task(2, **flags), sent)
    assert answer.kind == "yes"
    assert all(leaf.numel() == 1 for leaf in answer.leaves.values())
    assert {name.split(".")[0] for name in answer.leaves} <= {"marks", "facts"}
    (path,) = home.glob("models/r1/FedPer/seed-3.safetensors")
    named, meta = checkpoint.read(path)
    assert meta["about"]["round"] == 2 and meta["preprocessing"]["classes"] == [
        str(n) for n in range(10)
    ]
    assert sum(leaf.numel() for leaf in named.values()) > 8 * 784
    (index,) = home.glob("models/*/index.json")
    assert json.loads(index.read_text())["labels"] == {"FedPer": [3]}


def test_a_single_tensor_and_nothing_are_kept_too(tmp_path):
    owner = node_records.StateOwner("f", 0, "r", "m", 0)
    for personal in (torch.tensor([1.0, 2.0]), ()):
        own = owner._replace(label=type(personal).__name__)
        node_records.PersonalState(tmp_path, own, personal).put(
            1, "q", personal, {"report": torch.ones(2)}
        )
        back = node_records.PersonalState(tmp_path, own, personal).kept
        assert back.round == 1 and np.array_equal(back.personal, personal)
        assert back.report["report"].equal(torch.ones(2))
