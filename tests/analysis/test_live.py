"""The page of a run that goes on: served for real, to a real browser."""

import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest
from typer.testing import CliRunner

import idiolect
import tiny
from idiolect.analysis import live as live_page
from idiolect.analysis.live import Address, LiveRun, PageUpdates, address, serving
from idiolect.cli import app
from idiolect.errors import ConfigError
from pages import Opened, until


def asked(url, **headers):
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code


def small():
    return idiolect.federation("embedded", "iid", clients=3, per_client=20)


@pytest.mark.parametrize(
    ("text", "host", "port", "chosen"),
    [
        ("", "127.0.0.1", 8484, False),
        ("9000", "127.0.0.1", 9000, True),
        (":9000", "127.0.0.1", 9000, True),
        ("localhost", "localhost", 8484, False),
        ("localhost:1", "localhost", 1, True),
        ("[::1]:80", "::1", 80, True),
        ("::1", "::1", 8484, False),
    ],
)
def test_an_address_is_read(text, host, port, chosen):
    assert address(text) == Address(host, port, chosen)


@pytest.mark.parametrize(
    "text", ["0.0.0.0", "0.0.0.0:80", "192.168.0.1:80", "example.org:80", "::"]
)
def test_what_others_could_reach_is_refused_unless_meant(text):
    with pytest.raises(ConfigError, match="--serve-anyone"):
        address(text)
    assert not address(text, anyone=True).loopback


@pytest.mark.parametrize("text", ["localhost:http", "127.0.0.1:70000", "[::1]:x"])
def test_what_is_no_address_is_told(text):
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        address(text)


def test_a_taken_port_is_one_line_and_nothing_is_begun(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.write(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        done = CliRunner().invoke(app, ["run", "tiny.toml", "--serve-at", at, "--out", "out"])
    assert done.exit_code == 1
    assert f"cannot serve at {at}" in done.stderr and "--serve-at" in done.stderr
    assert done.stderr.count("\n") == 1 and not (tmp_path / "out").exists()
    refused = CliRunner().invoke(app, ["run", "tiny.toml", "--serve-at", "0.0.0.0:1"])
    assert refused.exit_code == 2 and "--serve-anyone" in refused.stderr


def test_the_default_port_gives_way(tmp_path):
    with serving(tmp_path) as one, serving(tmp_path) as other:
        assert one.url != other.url
        assert asked(one.url) == asked(other.url) == 200


def test_only_its_own_address_is_answered(tmp_path):
    """A foreign name that leads here (DNS rebinding) gets nothing; nor does any other path."""
    with serving(tmp_path, Address("127.0.0.1", 0, True)) as live:
        assert asked(live.url, Host="evil.example") == 403
        assert asked(live.url, Host="evil.example:80") == 403
        assert asked(live.url + "../../etc/passwd") == 404
        assert asked(live.url, Host="localhost:80") == 200


def test_news_come_as_the_run_goes_on_and_it_says_goodbye(tmp_path):
    """A reader that is quick hears of rounds; the last words follow the last picture."""
    with serving(tmp_path, Address("127.0.0.1", 0, True)) as live:
        stream = urllib.request.urlopen(live.url + "events", timeout=20)
        idiolect.fit("fedavg", small(), model="mlr", rounds=3, watch=live)
    with stream:
        events = re.findall(r"event: (\w+)\ndata: (.*)\n\n", stream.read().decode())
    assert [name for name, _ in events][-1] == "over" and {"content", "over"} == {
        n for n, _ in events
    }
    shown = json.loads([text for name, text in events if name == "content"][-1])
    assert [method["label"] for method in shown["content"]["methods"]] == ["FedAvg"]
    assert "done in" in shown["main"] and "Learning curves" in shown["main"]


def test_a_run_is_the_same_whoever_watches(tmp_path):
    class Vanishing:
        """A browser that connects, and is gone without a word."""

        def __init__(self, url):
            self.line = socket.create_connection(("127.0.0.1", int(url.split(":")[2][:-1])))
            self.line.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")

    alone = idiolect.fit("fedavg", small(), model="mlr", rounds=4)
    with serving(tmp_path, Address("127.0.0.1", 0, True)) as live:
        gone = Vanishing(live.url)
        stays = Vanishing(live.url)  # and never reads
        gone.line.close()
        watched = idiolect.fit("fedavg", small(), model="mlr", rounds=4, watch=live)
        stays.line.close()
    assert (alone.accuracy == watched.accuracy).all()
    assert alone.curve() == watched.curve()


def test_a_page_that_cannot_be_drawn_is_told_to_those_who_look_alone(tmp_path):
    def broken():
        raise RuntimeError("no scores")

    run = LiveRun(tmp_path)
    updates = PageUpdates(run, "")
    run.begin("FedAvg", 0, 3)
    run.scored(broken)
    updates.update()
    assert json.loads(updates.next(-1, 0)[1]) == {"trouble": "no scores"}


def test_nothing_is_drawn_while_nobody_looks(tmp_path):
    with serving(tmp_path, Address("127.0.0.1", 0, True)) as live:
        calls = []
        live.begin("FedAvg", 0, 3)
        live.scored(lambda: calls.append(1))
        time.sleep(1.2)
        assert calls == []


def test_a_browser_sees_a_real_run_grow_to_its_end(browser, tmp_path):
    """Opened while the first method trains, the page gains methods, curves and at last results."""
    tiny.write(tmp_path)
    process = tiny.started(
        *("run", "tiny.toml", "--out", "out", "--serve-at", "127.0.0.1:0"),
        *("--set", "rounds=60", "--set", "backend.checkpoint_every=0"),
        cwd=tmp_path,
    )
    try:
        url = re.search(r"http://\S+", process.stdout.readline()).group()
        with Opened(browser, url, viewport={"width": 1000, "height": 800}) as opened:
            page = opened.page
            assert page.locator("#live").inner_text().startswith("Running")
            until(page, "document.querySelectorAll('#plot-curves .scatterlayer .trace').length > 0")
            page.locator("#theme").click()
            page.locator("[data-switch='Local']").click()  # kept, whatever news come
            until(page, "document.getElementById('live').textContent.startsWith('Finished')")
            assert page.locator("#headline tbody tr").count() == 3
            assert page.locator("#headline tbody tr:visible").count() == 2
            assert page.locator(".standing li").count() == 0
            drawn = page.locator("[data-chart]").count()
            assert drawn == page.locator(".plot.js-plotly-plot").count() > 4
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    finally:
        process.kill()
        process.communicate()
    assert (tmp_path / "out" / "report.html").is_file()


def test_silent_connections_neither_pile_up_nor_keep_others_out(tmp_path, monkeypatch):
    monkeypatch.setattr(live_page, "_CONNECTIONS", 4)
    monkeypatch.setattr(live_page._Handler, "timeout", 0.3)
    with serving(tmp_path, Address(port=0, chosen=True)) as live:
        port = int(re.search(r":(\d+)", live.url)[1])
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
        threads = [one.name for one in threading.enumerate()]
        assert sum("process_request_thread" in name for name in threads) <= 4
        for one in silent:  # closed by the server, at once or when its patience ends
            one.settimeout(5)
            assert one.recv(1) == b""
            one.close()
        assert asked(live.url) == 200
