"""Only the server is answered: every false message differs from the true one in a single way."""

import dataclasses
import json

import federations as fed
import pytest
from kitmaking import HOST, Maker

from idiolect.deploy import protocol, signing
from idiolect.deploy.handshake import NodeRegistry
from idiolect.deploy.identity import Authority, Identity
from idiolect.deploy.node_process import InProcess
from idiolect.deploy.protocol import Refused
from idiolect.deploy.signing import NodeChannel, ServerChannel

SITES = [f"site-{n}" for n in range(4)]


class Kits:
    """Everyone's identity; making keys takes a while, so there is one of it."""

    def __init__(self, folder):
        made = Maker(folder)
        kits = {site: made.kit(site) for site in SITES}
        kits |= {"server": made.kit(HOST, "server"), "lead": made.kit("lead@hub.org", "admin")}
        self.identities = {name: Identity.from_kit(kit) for name, kit in kits.items()}
        self.authority = Authority.from_kit(kits["site-0"])

    def node(self, site):
        return NodeChannel(self.identities[site], self.authority)

    def server(self, transport):
        return ServerChannel(transport, self.identities["server"], self.authority)


@pytest.fixture(scope="module")
def kits(tmp_path_factory):
    return Kits(tmp_path_factory.mktemp("kits"))


class Network(InProcess):
    """Nodes behind their channels; keeps all that went over it."""

    def __init__(self, kits, nodes):
        super().__init__(nodes)
        self.kits, self.channels = kits, {site: kits.node(site) for site in nodes}
        self.seen = []

    def call(self, site, blob, seconds):
        answer = self.deliver(site, blob)
        self.seen.append((site, blob, answer))
        return answer

    def deliver(self, site, blob):
        return self.channels[site].answer(blob, lambda body: InProcess.call(self, site, body, 1.0))

    def restart(self, site):
        self.channels[site] = self.kits.node(site)


class Echo:
    """A node that answers everything and counts it."""

    def __init__(self):
        self.asked = []

    def answer(self, blob):
        self.asked.append(blob)
        return protocol.pack("yes", {"report": len(self.asked)})


@pytest.fixture
def echoing(kits):
    network = Network(kits, {site: Echo() for site in SITES})
    return network, kits.server(network)


def body(answer):
    return protocol.unpack(signing._opened(answer).body)


def code(answer):
    told = body(answer)
    assert told.kind == "no" and set(told.head) == {"code"} and not told.leaves
    return told.head["code"]


def forged(kits, question, signer="server", **changes):
    """Sign a question's header again, changed in one way."""
    found = signing._opened(question)
    header = dataclasses.replace(found.header, **changes)
    return signing._signed(kits.identities[signer], header, found.body).blob


def test_the_server_is_answered_and_its_messages_work_once_and_for_their_addressee(kits, echoing):
    network, server = echoing
    words = protocol.pack("step", {"run": "r1", "round": 3})
    assert protocol.unpack(server.call("site-0", words, 1.0)).head == {"report": 1}
    _, question, _ = network.seen[-1]
    assert network._nodes["site-0"].asked == [words]
    assert code(network.deliver("site-0", question)) == "replay"
    assert code(network.deliver("site-1", question)) == "identity"
    network.restart("site-0")  # it knows no numbers, and no session of before
    assert code(network.deliver("site-0", question)) == "closed"
    assert [len(network._nodes[site].asked) for site in SITES] == [1, 0, 0, 0]
    # A retry of the server's own is a new message around the same words.
    with pytest.raises(Refused) as told:
        server.call("site-0", words, 1.0)
    assert told.value.reason == "closed"  # then the hub tells a node everything again
    assert protocol.unpack(server.call("site-0", words, 1.0)).head == {"report": 2}


def later(question):
    """A number that the node has not seen."""
    return signing._opened(question).header.number + 99


@pytest.mark.parametrize("signer", ["site-1", "lead"])
def test_nobody_else_is_answered(kits, echoing, signer):
    """A node or a lead with a true certificate, under its own name and under the server's."""
    network, server = echoing
    server.call("site-0", b"first", 1.0)
    _, question, _ = network.seen[-1]
    own = kits.identities[signer].name
    for sender in (own, HOST):
        asked = forged(kits, question, signer, sender=sender, number=later(question))
        assert code(network.deliver("site-0", asked)) == "identity"
    for rubbish in (b"", b"idi", protocol.pack("step"), question[:90], question[:-1], None):
        assert code(network.deliver("site-0", rubbish)) == "identity"
    changed = question[:-1] + bytes([question[-1] ^ 1])
    assert code(network.deliver("site-0", changed)) == "identity"
    assert len(network._nodes["site-0"].asked) == 1
    # The control: the server's own words under a new number.
    assert (
        body(network.deliver("site-0", forged(kits, question, number=later(question)))).kind
        == "yes"
    )


def test_the_server_takes_an_answer_of_that_site_to_that_question_only(kits, echoing):
    network, server = echoing
    server.call("site-0", b"first", 1.0)
    server.call("site-1", b"first", 1.0)
    before = [answer for _, _, answer in network.seen]

    def refused(change):
        network.call = lambda site, blob, seconds: change(network.deliver(site, blob))
        with pytest.raises(Refused) as told:
            server.call("site-0", b"second", 1.0)
        return told.value.reason

    assert refused(lambda answer: before[1]) == "identity"  # an earlier answer of the same site
    assert refused(lambda answer: before[3]) == "identity"  # another site's
    assert refused(lambda answer: protocol.pack("yes")) == "identity"
    assert refused(lambda answer: answer[:-1] + b"\0") == "identity"
    assert refused(lambda answer: forged(kits, answer, "site-1")) == "identity"
    assert refused(lambda answer: forged(kits, answer, "site-1", sender="site-1")) == "identity"
    assert refused(lambda answer: forged(kits, answer, "site-0", session="")) == "identity"


def test_forged_messages_take_no_place_of_the_servers(tmp_path):
    """Neither of its sessions with a node, nor of an answer that it has not fetched yet."""
    pytest.importorskip("nvflare")
    from idiolect.deploy.flare.job_layout import DONE
    from idiolect.deploy.flare.node_side import NodeSide, mark_of

    made, side = Maker(tmp_path), NodeSide()
    side._root = made.kit("site-0")
    server, peer = (
        Identity.from_kit(made.kit(*who)) for who in ((HOST, "server"), ("site-1", "node"))
    )

    def question(signer, number):
        header = signing.Header(HOST, "site-0", "", number, "", signing._sha256(b""))
        return signing._signed(signer, header, b"").blob

    first = question(server, 1)
    state, answer = side._answer("server.job", mark_of(first), first)
    assert state == DONE and signing._opened(answer).header.session
    channels = dict(side._channels)
    for number in range(20):
        for forged in (question(peer, number), b"rubbish"):
            state, told = side._answer(f"server.job{number}", mark_of(forged), forged)
            body = protocol.unpack(signing._opened(told).body)
            assert (state, body.head["code"]) == (DONE, "identity")
    assert dict(side._channels) == channels
    assert side._answer("server.job", mark_of(first), b"") == (DONE, answer)


def test_kits_of_another_role_have_no_end_of_a_channel(kits):
    with pytest.raises(Refused, match="expected a node's"):
        kits.node("lead")
    with pytest.raises(Refused, match="expected the server's"):
        ServerChannel(InProcess({}), kits.identities["site-0"], kits.authority)


def _step_at(network, site, round):
    """Return the envelope in which a node was asked to train."""
    for to, question, answer in network.seen:
        told = signing._opened(question).body
        message = protocol.unpack(told) if told else None
        if to == site and message and message.kind == "step" and message.head["round"] == round:
            return question, answer
    raise AssertionError(f"{site} was never asked")


@pytest.mark.parametrize("secure", [False, True])
def test_a_node_gets_no_report_of_another_by_the_hubs_messages_or_its_own(
    kits, tmp_path, secure, monkeypatch
):
    """A whole run; then one node has the hub's message to another, and its keys, and asks anew."""
    monkeypatch.setattr(NodeRegistry, "close", lambda self: None)  # it is not over for them
    sets = ("model.name=mlr", f"deploy.secure={json.dumps(secure)}")
    wanted = fed.experiment("fedavg", sets=sets)
    plain = fed.inside(tmp_path / "nodes", 4, secure=secure)
    network = Network(kits, plain._nodes)
    found = fed.served(wanted, kits.server(network), tmp_path / "served")
    content = fed.simulated(wanted, tmp_path / "simulated")
    if not secure:
        assert fed.scores(found, "FedAvg") == fed.scores(content, "FedAvg")
    question, _ = _step_at(network, "site-0", 1)
    state = sorted((tmp_path / "nodes" / "site-0").rglob("*.safetensors"))
    before = [path.read_bytes() for path in state]
    assert code(network.deliver("site-0", question)) == "replay"
    words = signing._opened(question).body
    # Without the channel this is answered with the report: the attack that was seen.
    again = protocol.unpack(plain._nodes["site-0"].answer(words))
    assert again.kind == "yes" and bool(again.leaves) is not secure
    head = protocol.unpack(words).head
    of = {key: head[key] for key in ("run", "label", "seed", "round")} | {"of": "step"}
    asked = [
        words,
        protocol.pack("keys", {**of, "attempt": 9}),
        protocol.pack("mask", {**of, "attempt": 9}),
    ]
    for letter in asked:
        for signer in ("site-1", "lead"):
            false = signing.Header(HOST, "site-0", "", 1000, "", signing._sha256(letter))
            for session in ("", signing._opened(question).header.session):
                header = dataclasses.replace(false, session=session)
                sealed = signing._signed(kits.identities[signer], header, letter).blob
                assert code(network.deliver("site-0", sealed)) == "identity"
    assert [path.read_bytes() for path in state] == before
