"""Who is not let in: each attempt is made for real, against a real server or node over TLS."""

import importlib.util
import json
import shutil
import socket
import ssl
import subprocess
import sys
import time

import pytest
import submitting
import unguarding
from running import ADMIN, MEMBER, CommandFailed, Running

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nvflare") is None, reason="nvflare is not installed (extra flare)"
)
HTTP = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def federation(tmp_path):
    running = Running(tmp_path, 2)
    try:
        yield running
    finally:
        running.close()


def waited(what, seconds=90.0):
    """Wait until something is true; say whether it became so."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := what():
            return found
        time.sleep(0.25)
    return None


def port(running):
    toml = (running.folder / "project.toml").read_text()
    return int(toml.split("port = ")[1].split()[0])


def listening(running):
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("localhost", port(running))) == 0


def spoken(running, startup=None, roots=None):
    """Speak TLS with the server, with a kit's certificate or none; return what it answers."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE if roots is None else ssl.CERT_REQUIRED
    if roots is not None:
        context.load_verify_locations(roots)
    if startup is not None:
        context.load_cert_chain(startup / "client.crt", startup / "client.key")
    with (
        socket.create_connection(("localhost", port(running)), timeout=10) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as secured,
    ):
        secured.sendall(HTTP)
        return secured.recv(100)


def refused(running, startup):
    """Say that the server broke off without a word; TLS 1.3 tells so on the first read."""
    try:
        return spoken(running, startup) == b""
    except (ssl.SSLError, ConnectionError):
        return True


def server_log(running):
    path = running.kits / "server" / "log.txt"
    return path.read_text(errors="replace") if path.exists() else ""


UNCHECKED = """
import sys
from idiolect.cli import main
from idiolect.deploy.flare import checkup
checkup.refuse_invalid_certificate = lambda kit: None
sys.argv = ["idiolect", *sys.argv[4:]]
main()
"""


def test_strangers_and_false_names_do_not_get_in(federation, tmp_path):
    """No certificate, one of another authority, and a member under another member's name."""
    federation.start("server")
    assert waited(lambda: listening(federation)), federation.told()
    own = federation.kits / "site-0" / "startup"
    assert spoken(federation, own, own / "rootCA.pem").startswith(b"HTTP/1.1"), "the control"
    assert refused(federation, None)
    (tmp_path / "elsewhere").mkdir()
    foreign = Running(tmp_path / "elsewhere", 1).kits / "site-0" / "startup"
    assert refused(federation, foreign)
    with pytest.raises(ssl.SSLCertVerificationError):  # nor would a node talk to a false server
        spoken(federation, own, foreign / "rootCA.pem")
    # The second site's kit says now that it is the first.
    liar = federation.kits / "site-1" / "idiolect.toml"
    liar.write_text(liar.read_text().replace('name = "site-1"', 'name = "site-0"'))
    # Our own command would not start such a kit; the liar's does.
    before = (sys.executable, "-c", UNCHECKED)
    federation.start("site-1", "--data", "embedded", "--client", "0", before=before)
    words = "authenticated as 'site-1' but claimed endpoint 'site-0"
    assert waited(lambda: words in server_log(federation)), federation.told()
    assert "New client " not in server_log(federation)


def submitted(running, kind, kit=ADMIN):
    """Submit an intruder's job; return how it ended and whether its mark was left."""
    mark = running.folder / f"mark-{kind}"
    job = submitting.written(running.folder / f"job-{kind}-{time.time_ns()}", mark, kind)
    done = subprocess.run(
        [sys.executable, submitting.__file__, str(running.kits / kit), str(job)],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    return done.stdout.strip().splitlines()[-1], mark.exists()


def joined(running, *unguarded):
    for name, words in (("server", ()), ("site-0", ("--data", "embedded", "--client", "0"))):
        before = (sys.executable, unguarding.__file__) if name in unguarded else ()
        running.start(name, *words, before=before)
    assert waited(lambda: "New client " in server_log(running)), running.told()


def refused_job(running, kind, kit=ADMIN):
    """Say that a job came to nothing, and that nothing of it was run."""
    ended, let_in = submitted(running, kind, kit)
    over = ended.startswith(("refused", "FAILED", "FINISHED:")) and "COMPLETED" not in ended
    return over and not let_in


@pytest.mark.faults
def test_jobs_with_code_foreign_classes_or_without_the_right_are_refused(federation, tmp_path):
    joined(federation)
    toml = tmp_path / "any.toml"
    toml.write_text('name = "any"\n[[methods]]\nname = "fedavg"\n')
    with pytest.raises(CommandFailed, match="may not do this in the federation"):
        federation.run(toml, tmp_path / "guest", kit=MEMBER)
    assert submitted(federation, "code", MEMBER)[0].startswith("refused: guest@hub.org may not")
    for kind in ("code", "class", "hub"):
        assert refused_job(federation, kind), kind
    assert not submitted(federation, "network")[1]
    # A module among the settings, under an id of the lead's own choice.
    ended, let_in = submitted(federation, "config")
    assert "a job holds meta.json and two configurations" in ended and not let_in
    assert (federation.kits / "server" / "startup" / "rootCA.pem").is_file()


@pytest.mark.faults
@pytest.mark.parametrize("who", [MEMBER, "site-0"])
def test_nobody_submits_under_an_admins_name(who, federation):
    """A lead's kit, with the key and certificate of a guest or of a node in it."""
    joined(federation)
    false = federation.kits / "false"
    shutil.copytree(federation.kits / ADMIN, false)
    for name in ("client.crt", "client.key"):
        shutil.copy(federation.kits / who / "startup" / name, false / "startup" / name)
    ended, let_in = submitted(federation, "code", "false")
    assert ended.startswith("refused: the server at") and not let_in
    assert "submit_job" not in server_log(federation)


def unguarded(kit):
    """Take a kit's guards away, as a false or careless operator might; `unguarding` the others."""
    local = kit / "local"
    shutil.copy(local / "authorization.json.default", local / "authorization.json")
    settings = json.loads((local / "resources.json").read_text())
    settings.pop("class_list_enforcement_mode")
    (local / "resources.json").write_text(json.dumps(settings))


@pytest.mark.faults
def test_a_node_refuses_code_and_foreign_classes_whatever_its_server_allows(federation):
    unguarded(federation.kits / "server")
    joined(federation, "server")
    for kind in ("code", "class", "config"):
        assert not submitted(federation, kind)[1], kind
    assert "site-0: NVFLARE_ERROR: no job is started on a node" in server_log(federation)


@pytest.mark.faults
def test_the_same_jobs_get_in_where_nobody_guards(federation):
    """The control: it is the guards that the tests above see, not jobs that do not work."""
    unguarded(federation.kits / "server")
    unguarded(federation.kits / "site-0")
    joined(federation, "server", "site-0")
    assert [submitted(federation, kind)[1] for kind in ("code", "class", "hub")] == [True] * 3
    # What a network is called opens nothing even there.
    assert [submitted(federation, kind)[1] for kind in ("config", "network")] == [False] * 2
