"""Keys made at the site, revocation that holds at once, expiry, renewal without a stop."""

import dataclasses
import importlib.util
import json
import shutil
import time
from datetime import UTC, datetime, timedelta

import pytest
from auditing import SITES, Federation, Members
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from kitmaking import HOST, Maker

from idiolect.deploy import audit_check, protocol, revocation, signing
from idiolect.deploy.identity import Authority, Identity
from idiolect.deploy.protocol import Refused
from idiolect.deploy.revocation import REVOKED_FILE, RevocationList, Revoked, read_list
from idiolect.deploy.signing import NodeChannel, ServerChannel
from idiolect.errors import ConfigError, DeployError, IdiolectError

STEP = protocol.pack("step", {"run": "r1", "round": 0})
FLARE = pytest.mark.skipif(
    importlib.util.find_spec("nvflare") is None, reason="nvflare is not installed (extra flare)"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    maker = Maker(tmp_path_factory.mktemp("kits"))
    for site in SITES:
        maker.kit(site)
    maker.kit(HOST, "server")
    maker.kit("lead@hub.org", "admin")
    return maker


@pytest.fixture
def kits(made, tmp_path):
    """A copy of the kits, each with its own list."""
    shutil.copytree(made.folder, tmp_path / "kits")
    return tmp_path / "kits"


def pem(made):
    form = Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()
    return made.root.public_bytes(Encoding.PEM).decode(), made._key.private_bytes(*form).decode()


def revoke(made, kit, *names, before=None):
    """Let the authority revoke members, and put the list into a kit."""
    kit.joinpath("idiolect").mkdir(exist_ok=True)
    return revocation.revoke(kit / "idiolect" / REVOKED_FILE, pem(made), names, "lost", before)


class Wires(Federation):
    """Nodes and a server whose authorities are those of their own kits."""

    def __init__(self, folder, kits):
        super().__init__(folder, Members.__new__(Members))
        self.kits = kits
        self.members.identities = {name: Identity.from_kit(kits / name) for name in (HOST, *SITES)}
        self.members.authority = Authority.from_kit(kits / HOST)

    def start(self, name):
        own, authority = self.members.identities[name], Authority.from_kit(self.kits / name)
        if name == HOST:
            self.hub = ServerChannel(self, own, authority, self.log(name))
        else:
            self.channels[name] = NodeChannel(own, authority, self.log(name))


@pytest.fixture
def wires(tmp_path, kits):
    running = Wires(tmp_path / "logs", kits)
    running.rounds(1)
    return running


def reason(call):
    with pytest.raises(Refused) as told:
        call()
    return told.value.reason


def test_a_revoked_site_is_cut_off_amid_a_session_and_its_peers_learn_it(made, kits, wires):
    seen = []
    honest = wires._work
    wires._work = lambda site, body: (seen.append(site), honest(site, body))[1]
    revoke(made, kits / HOST, "site-0")  # the server's operator puts the list in place
    assert reason(lambda: wires.hub.call("site-0", STEP, 1.0)) == "revoked"
    assert reason(lambda: wires.hub.call("site-0", STEP, 1.0)) == "revoked"
    assert not seen  # nothing was sent to it
    wires.hub.call("site-1", STEP, 1.0)
    assert (kits / "site-1" / "idiolect" / REVOKED_FILE).exists()  # with the server's next message
    peer = Authority.from_kit(kits / "site-1")
    signed = wires.members.identities["site-0"].sign(b"keys of a secure sum")
    assert (
        reason(lambda: peer.verify(signed, b"keys of a secure sum", name="site-0", role="node"))
        == "revoked"
    )
    assert not audit_check.check(wires.paths(), wires.members.authority).problems


def test_a_stolen_server_key_is_worth_nothing_to_a_node_that_has_the_list(made, kits, wires):
    revoke(made, kits / "site-0", HOST)
    wires.hub.call("site-1", STEP, 1.0)  # which has heard of nothing
    assert reason(lambda: wires.hub.call("site-0", STEP, 1.0)) == "revoked"


def test_a_new_certificate_of_a_revoked_member_holds(made, kits, wires, tmp_path):
    revoke(made, kits / HOST, "site-0", before=time.time() - 1)
    assert reason(lambda: wires.hub.call("site-0", STEP, 1.0)) == "revoked"
    again = Maker.__new__(Maker)
    again.folder, again._name, again._key, again.root = (
        tmp_path / "new",
        made._name,
        made._key,
        made.root,
    )
    new = again.kit("site-0", start=0)
    for name in ("client.key", "client.crt"):
        shutil.copy(new / "startup" / name, kits / "site-0" / "startup" / name)
    wires.hub.call("site-0", STEP, 1.0)  # the running node took the new pair up by itself


def test_a_revoked_lead_signs_nothing(made, kits):
    lead, authority = Identity.from_kit(kits / "lead@hub.org"), Authority.from_kit(kits / "site-0")
    known = {"name": "lead@hub.org", "role": "admin"}
    authority.verify(lead.sign(b"run"), b"run", **known)
    revoke(made, kits / "site-0", "lead@hub.org")
    assert reason(lambda: authority.verify(lead.sign(b"run"), b"run", **known)) == "revoked"


def test_lists_are_the_authoritys_and_an_old_one_revives_nobody(made, kits, tmp_path):
    path = kits / "site-0" / "idiolect" / REVOKED_FILE
    first = revoke(made, kits / "site-0", "site-1")
    old = path.read_bytes()
    second = revoke(made, kits / "site-0", "site-2")
    assert (first.number, second.number) == (1, 2)
    assert {one.name for one in second.entries} == {"site-1", "site-2"}
    authority = Authority.from_kit(kits / "site-0")
    assert authority.revocations.number == 2
    assert not authority.revocations.take(old) and authority.revocations.number == 2
    path.write_bytes(old)  # the file itself is replaced under a running process
    assert authority.revocations.number == 2
    false = Maker(tmp_path / "false")
    forged = RevocationList(9, (Revoked(HOST, 2**40),)).signed(pem(false)[1])
    with pytest.raises(DeployError, match="has not signed"):
        authority.revocations.take(forged)
    whole = json.loads(second.signed(pem(made)[1]))
    whole["list"] = whole["list"].replace("site-2", "site-9")
    for rubbish in (json.dumps(whole).encode(), b"", b"[]", b'{"list":1}', b"\xff"):
        with pytest.raises(DeployError):
            read_list(rubbish, made.root)
    path.write_bytes(b"rubbish")  # then nobody is trusted
    lead = Identity.from_kit(kits / HOST).sign(b"x")
    fresh = Authority.from_kit(kits / "site-0")
    assert reason(lambda: fresh.verify(lead, b"x", name=HOST, role="server")) == "identity"


def test_a_list_of_the_past_takes_nothing_back(made, kits):
    """Revoking again with an earlier moment does not revive what was revoked before."""
    revoke(made, kits / "site-0", "site-1", before=2_000_000_000)
    again = revoke(made, kits / "site-0", "site-1", before=5)
    assert again.entries == (Revoked("site-1", 2_000_000_000, "lost"),)


def test_a_pair_that_is_half_replaced_is_not_used(made, kits, tmp_path):
    own = Identity.from_kit(kits / "site-0")
    before = own.certificate
    shutil.copy(kits / "site-1" / "startup" / "client.key", kits / "site-0" / "startup")
    signed = own.sign(b"x")
    assert signed.certificate == before
    Authority.from_kit(kits / HOST).verify(signed, b"x", name="site-0", role="node")


def test_the_server_tells_until_when_sites_certificates_are_valid(wires):
    until = {site: datetime.fromisoformat(end) for site, end in wires.hub.expiries().items()}
    assert set(until) == set(SITES)
    assert all(timedelta(358) < end - datetime.now(UTC) < timedelta(360) for end in until.values())


def test_what_is_signed_in_an_envelope_cannot_be_swapped_for_a_longer_message(wires):
    """The size is signed too: it is what the audit log says left."""
    question = wires.hub._question("site-0", "", b"abc")
    longer = dataclasses.replace(question.header, size=4)
    sealed = signing._signed(wires.members.identities[HOST], longer, b"abc").blob
    answer = signing._opened(wires.channels["site-0"].answer(sealed, lambda body: b""))
    assert protocol.unpack(answer.body).head == {"code": "identity"}


# Over the engine's own provisioning.

PROJECT = """name = "clinics"
server = { host = "localhost", port = 8802 }
sites = [{ name = "hospital", own_key = true }, { name = "practice" }]
admins = [{ email = "lead@example.org", own_key = true }]
"""


@pytest.fixture
def federation(tmp_path):
    from idiolect.deploy.flare import kits as made
    from idiolect.experiment.federation_file import load_project

    path = tmp_path / "p.toml"
    path.write_text(PROJECT)
    project = load_project(path)
    made.init(project, tmp_path / "out")
    return project, tmp_path / "out"


@FLARE
def test_a_sites_key_is_made_at_the_site_and_never_leaves(federation, tmp_path):
    from idiolect.deploy.flare import site_keys

    project, out = federation
    assert not (out / "hospital").exists() and not (out / "lead@example.org").exists()
    site = tmp_path / "hospital"
    path, print_ = site_keys.request("hospital", site)
    key = (site / "startup" / "own.key").read_bytes()
    assert (site / "startup" / "own.key").stat().st_mode & 0o777 == 0o600
    asked = site_keys.read_request(path)
    assert asked.name == "hospital" and asked.fingerprint == print_
    back = site_keys.approve(project, out, asked)
    assert back == out / "hospital"
    secret = key.split(b"\n")[3]
    for file in out.rglob("*"):
        assert not (file.is_file() and secret in file.read_bytes()), file
    assert not list(back.rglob("*.key"))
    done = site_keys.install(site, back)
    own = Identity.from_kit(site)
    assert (own.name, own.role) == ("hospital", "node")
    practice = Authority.from_kit(out / "practice")
    practice.verify(own.sign(b"x"), b"x", name="hospital", role="node")
    assert done.authority.count(" ") == 15
    # An admin's certificate has the project's role, whatever a request says.
    lead = tmp_path / "lead"
    path, _ = site_keys.request("lead@example.org", lead)
    site_keys.install(lead, site_keys.approve(project, out, site_keys.read_request(path)))
    signed = Identity.from_kit(lead).sign(b"x")
    practice.verify(signed, b"x", name="lead@example.org", role="admin")
    # Renewal: a new key beside the old, which signs until the new certificate is there.
    path, new = site_keys.request("", site)
    assert Identity.from_kit(site).certificate == own.certificate
    renewed = site_keys.approve(project, out, site_keys.read_request(path))
    assert renewed == out / "renewed" / "hospital" and not list(renewed.rglob("*.key"))
    before = own.certificate
    site_keys.install(site, renewed)
    assert own.certificate != before and not (site / "startup" / "next.key").exists()
    practice.verify(own.sign(b"x"), b"x", name="hospital", role="node")
    # What was signed is written down; a revoked member is not believed, its new certificate is.
    site_keys.revoke_members(project, out, ["hospital"], "a lost laptop", None)
    states = {one.fingerprint: one.state for one in site_keys.issued(project, out)}
    assert [states[one] for one in (print_, new)] == ["revoked", "revoked"]
    assert len(states) == 5 and list(states.values()).count("valid") == 3
    assert (
        reason(lambda: practice.verify(own.sign(b"x"), b"x", name="hospital", role="node"))
        == "revoked"
    )
    shutil.rmtree(renewed)
    path, _ = site_keys.request("", site)
    site_keys.install(site, site_keys.approve(project, out, site_keys.read_request(path)))
    practice.verify(own.sign(b"x"), b"x", name="hospital", role="node")


@FLARE
def test_requests_and_answers_that_do_not_fit_are_refused_in_words(federation, tmp_path):
    from idiolect.deploy.flare import site_keys

    project, out = federation
    stranger, _ = site_keys.request("stranger", tmp_path / "stranger")
    with pytest.raises(ConfigError, match="'stranger', and the project has"):
        site_keys.approve(project, out, site_keys.read_request(stranger))
    with pytest.raises(ConfigError, match="a request was made"):
        site_keys.request("stranger", tmp_path / "stranger")
    for rubbish in (b"", b"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n", b"x" * 70000):
        stranger.write_bytes(rubbish)
        with pytest.raises(ConfigError, match="no certificate request"):
            site_keys.read_request(stranger)
    site, thief = tmp_path / "hospital", tmp_path / "thief"
    path, _ = site_keys.request("hospital", site)
    site_keys.request("hospital", thief)
    back = site_keys.approve(project, out, site_keys.read_request(path))
    with pytest.raises(ConfigError, match="of another key"):
        site_keys.install(thief, back)
    with pytest.raises(ConfigError, match="not the one given"):
        site_keys.install(site, back, "00 11")
    with pytest.raises(ConfigError, match="neither a kit nor holds a key"):
        site_keys.install(tmp_path / "nobody", back)
    # Whoever carries the answer changes what is started, or what the site allows; or adds to it.
    policy = back / "policy.toml"
    honest = policy.read_bytes()
    policy.write_text("min_cohort = 1\n")
    with pytest.raises(ConfigError, match=r"policy.toml is not what the authority signed"):
        site_keys.install(site, back)
    policy.write_bytes(honest)
    listed = json.loads((back / "signed-files.json").read_text())
    for text in ("{}", json.dumps({**listed, "files": "{}"})):
        (back / "signed-files.json").write_text(text)
        with pytest.raises(ConfigError, match="not what the authority signed"):
            site_keys.install(site, back)
    (back / "signed-files.json").write_text(json.dumps(listed))
    (back / "local" / "more.json").write_text("{}")
    second = tmp_path / "second"
    shutil.copytree(site, second)
    site_keys.install(second, back)
    assert not (second / "local" / "more.json").exists() and (second / "policy.toml").exists()
    shutil.copy(tmp_path / "p.toml", back / "startup" / "client.crt")
    with pytest.raises(ConfigError, match="no certificate"):
        site_keys.install(site, back)


@FLARE
def test_expiry_is_said_ahead_of_time(federation):
    from idiolect.deploy.flare import site_keys

    _, out = federation
    words, soon = site_keys.expiry_words(out / "practice")
    assert "is valid until" in words and not soon
    later = datetime.now(UTC) + timedelta(days=340)
    words, soon = site_keys.expiry_words(out / "practice", later)
    assert soon and "days from now" in words and "federation request" in words
    words, soon = site_keys.expiry_words(out / "practice", later + timedelta(days=30))
    assert soon and "expired on" in words
    line = site_keys.expiry_line("practice", (datetime.now(UTC) + timedelta(9)).isoformat())
    assert "8 days; renew it" in line


@FLARE
def test_the_engine_lets_no_revoked_member_in_or_stay(federation, tmp_path, monkeypatch):
    from idiolect.deploy.flare import job_guard, site_keys

    project, out = federation
    monkeypatch.chdir(out / "server")
    door = job_guard._Doorkeeper(job_guard.kit_revocations())
    own = site_keys.read_certificate(out / "practice" / "startup" / "client.crt")
    assert not door.refuses("practice", own) and not door.refuses("practice")
    app = tmp_path / "app"
    app.mkdir()
    shutil.copy(out / "practice" / "startup" / "client.crt", app / ".__nvfl_submitter.crt")
    assert job_guard.of_revoked(app) == ""
    site_keys.revoke_members(project, out, ["practice"], "", None)
    assert door.refuses("practice", own) and door.refuses("practice")
    assert "was revoked" in job_guard.of_revoked(app)
    fresh = job_guard._Doorkeeper(job_guard.kit_revocations())  # after a restart
    assert fresh.refuses("practice") and not fresh.refuses("server")
    with pytest.raises(IdiolectError, match="none of"):
        site_keys.revoke_members(project, out, ["nobody"], "", None)
