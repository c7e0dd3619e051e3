"""What watches the engine: light, alone, and in words."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest

from idiolect.deploy.flare import prometheus, watchdog
from idiolect.deploy.flare.watchdog import Console, WatchedKit

ABOUT = 'federation = "t"\nrole = "{role}"\nname = "{name}"\norg = "o"\nhost = "hub"\nport = 1\n'


def made(folder, role="node", name="ward"):
    folder.mkdir(exist_ok=True)
    (folder / "idiolect.toml").write_text(ABOUT.format(role=role, name=name) + "sites = []\n")
    return WatchedKit.read(folder)


@pytest.fixture
def kit(tmp_path):
    return made(tmp_path / "kit")


def test_it_is_light_and_knows_neither_torch_nor_the_engine():
    """Under 60 MB, as it stays for months beside processes that work."""
    program = (
        "import sys, idiolect.deploy.flare.watchdog, idiolect.deploy.flare.prometheus\n"
        "print(open('/proc/self/status').read().split('VmRSS:')[1].split()[0],"
        " *({'torch', 'numpy', 'nvflare'} & set(sys.modules)))"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    (size,) = told.stdout.split()
    assert int(size) < 60 << 10  # kB


def test_the_engine_ends_with_what_watches_it_however_that_ends(kit, tmp_path):
    """Kill -9: no orphan is left, and another one may begin at once."""
    program = tmp_path / "run.py"
    program.write_text(
        "import sys\nfrom idiolect.deploy.flare import watchdog\n"
        "watchdog.command = lambda kit: [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "watchdog.main(sys.argv[1:])\n"
    )
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, str(program), str(kit.folder)], stdout=subprocess.PIPE, text=True
        )
        line = process.stdout.readline()
        assert "node ward started (process " in line
        engine = int(line.split("(process ")[1].split(")")[0])
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        until = time.monotonic() + 5
        while alive(engine) and time.monotonic() < until:
            time.sleep(0.02)
        assert not alive(engine)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


TROUBLE = {
    "certificate verify failed: self-signed certificate": "is not this federation's server",
    "certificate verify failed: certificate has expired": "server's certificate has expired",
    "[SSL: TLSV1_ALERT_UNKNOWN_CA] tlsv1 alert unknown ca": "refuses this kit's certificate",
    "sslv3 alert certificate expired": "this kit's certificate, which has expired",
    "certificate verify failed: certificate is not yet valid": "check this machine's clock",
    "[Connect call failed ('10.0.0.1', 1)]": "the server is down, or a firewall is shut",
    "getaddrinfo failed": "the name hub does not resolve",
}


@pytest.mark.parametrize("why", TROUBLE)
def test_what_keeps_a_node_from_its_server_is_said_once_in_words(why, kit, capsys):
    """Every few minutes, not with every attempt; nothing of it in a healthy log."""
    console = Console(kit, as_json=False)
    line = f"2026 - conn_manager - ERROR - Connector [CH1] failed with exception X: {why}"
    for _ in range(3):
        watchdog.tell(kit, line, console)
    (said,) = capsys.readouterr().out.splitlines()
    assert TROUBLE[why] in said
    watchdog.tell(kit, "2026 - CoreCell - INFO - alert: nothing", console)
    assert not capsys.readouterr().out


def test_another_members_words_do_not_steer_the_operators_terminal(kit, capsys):
    Console(kit, as_json=False).say("refused: the server runs \x1b[2J9")
    assert capsys.readouterr().out == "refused: the server runs \\x1b[2J9\n"


def test_events_are_json_if_asked(kit, capsys):
    Console(kit, as_json=True).say("a run has started: r1")
    told = json.loads(capsys.readouterr().out)
    assert told.pop("time").endswith("Z")
    assert told == {"role": "node", "name": "ward", "event": "a run has started: r1"}


def test_a_taken_port_is_said_before_anything_starts(tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        kit = made(tmp_path / "server", "server", "hub")
        kit = WatchedKit(kit.folder, "server", "hub", "o", "hub", taken.getsockname()[1])
        assert watchdog.watch(kit, Console(kit, False)) == 8
    assert "cannot be used (Address already in use): stop the process" in capsys.readouterr().err


def test_logs_that_were_rotated_are_read_from_their_beginning(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text("one\n" * 100)
    places = {path: 0}
    assert len(watchdog._new_lines(path, places)) == 100
    path.write_text("two\n")
    assert watchdog._new_lines(path, places) == ["two"]


def test_health_and_metrics_are_read_from_files_when_asked_for(kit):
    """Ill without a sign, fine with one; numbers as Prometheus reads them; this machine only."""
    server = prometheus.serve_metrics(kit, Console(kit, False), 0)
    host, port = server.server_address[:2]
    assert host == "127.0.0.1"

    def asked(path):
        with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=5) as answer:
            return answer.read().decode()

    kit.home.mkdir()
    try:
        with pytest.raises(urllib.error.HTTPError, match="503"):
            asked("/health")
        prometheus.write_status(kit.home, reached=True, answered=7)
        doing = kit.home / "doing" / "r1"
        doing.mkdir(parents=True)
        told = {"label": 'Fed"Avg', "round": 3, "rounds": 9, "absent": ["x"]}
        (doing / "progress.json").write_text(json.dumps(told))
        assert asked("/health") == "ok\n"
        lines = asked("/metrics").splitlines()
        assert "idiolect_up 1" in lines and "idiolect_messages_total 7" in lines
        assert 'idiolect_run_round{run="r1",method="Fed\\"Avg"} 3' in lines
        assert 'idiolect_run_sites_absent{run="r1",method="Fed\\"Avg"} 1' in lines
        prometheus.write_status(kit.home, reached=False, answered=7)
        with pytest.raises(urllib.error.HTTPError, match="503"):
            asked("/health")
    finally:
        server.shutdown()
        server.server_close()


def test_a_connection_that_asks_nothing_is_closed(kit, monkeypatch):
    monkeypatch.setattr(prometheus, "_PATIENCE", 0.2)
    server = prometheus.serve_metrics(kit, Console(kit, False), 0)
    with socket.create_connection(server.server_address) as silent:
        silent.settimeout(20)
        assert silent.recv(1) == b""
    server.shutdown()
    server.server_close()


def test_a_new_certificate_is_noticed_when_all_of_it_is_there(kit, monkeypatch):
    """A folder that is being replaced is not used half-way."""
    monkeypatch.setattr(watchdog, "_SETTLED", 0.2)
    startup = kit.folder / "startup"
    startup.mkdir()
    for name in ("client.crt", "client.key", "rootCA.pem"):
        (startup / name).write_text("old")
    time.sleep(0.3)

    def replace():
        time.sleep(0.3)
        (startup / "client.key").unlink()
        (startup / "client.crt").write_text("new")
        time.sleep(0.8)
        (startup / "client.key").write_text("new")

    engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    thread = threading.Thread(target=replace)
    thread.start()
    began = time.monotonic()
    try:
        assert watchdog._follow(kit, engine, Console(kit, False)) == "there is a new certificate"
        assert time.monotonic() - began > 1.1
    finally:
        thread.join()
        engine.kill()
        engine.wait()
