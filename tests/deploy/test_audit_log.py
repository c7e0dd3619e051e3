"""Audit logs: tampering is found where it can be, and crashes of honest members raise no alarm."""

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from random import Random

import auditing
import pytest
from auditing import FACTS, SITES, Clock, Federation, Members, entries, rewrite, write
from kitmaking import HOST

from idiolect.deploy import audit, audit_check
from idiolect.deploy.audit import AuditLog, lines_of
from idiolect.deploy.audit_check import check
from idiolect.errors import DeployError


@pytest.fixture(scope="module")
def members(tmp_path_factory):
    return Members(tmp_path_factory.mktemp("kits"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Another federation, of the same names."""
    return Members(tmp_path_factory.mktemp("other"))


@pytest.fixture(scope="module")
def honest(members, tmp_path_factory):
    """The logs after four rounds, and a copy as they were after one."""
    folder = tmp_path_factory.mktemp("honest")
    made = Federation(folder / "now", members)
    made.rounds(1)
    shutil.copytree(folder / "now", folder / "before")
    made.rounds(3, 1)
    made.hub.leave_heads(folder / "now")
    return folder


@pytest.fixture
def logs(honest, members, tmp_path):
    """A copy of the logs to tamper with."""
    shutil.copytree(honest / "now", tmp_path / "logs")
    return Federation(tmp_path / "logs", members)


def found(logs, *names):
    paths = [logs.path(name) for name in names] if names else logs.paths()
    return check(paths, logs.members.authority)


def kinds(findings):
    return {one.kind for one in findings.problems}


def test_honest_logs_agree_and_say_what_was_exchanged(logs):
    told = found(logs)
    assert not told.problems and not told.notes
    assert set(told.logs) == {HOST, *SITES}
    assert told.exchanges == 3 * 6  # a first contact, an opening and four rounds with each
    first, *rest = entries(logs.path("site-0"))
    assert first["kind"] == "begin" and first["owner"] == "site-0"
    run = next(one for one in rest if one["kind"] == "run")
    assert run["experiment"] == FACTS["experiment"] and run["submitter"] == "lead@hub.org"
    last = rest[-1]
    header = json.loads(last["answer"]["header"])
    assert last["about"] == {"what": "step", "run": "r1", "round": 3} and header["size"] > 50
    assert logs.path("site-0").stat().st_mode & 0o777 == 0o600


def test_a_log_and_the_heads_that_a_lead_keeps_need_no_other_log(logs):
    heads = logs.folder / audit.HEADS_FILE
    given = [logs.path("site-0"), heads]
    assert not check(given, logs.members.authority).problems
    write(logs.path("site-0"), entries(logs.path("site-0"))[:-2])
    assert kinds(check(given, logs.members.authority)) == {"rewritten"}


# Tampering: by someone with write access to the file (and, as "chained", a computer), by the log's
# owner (with its key), by several together.


def _middle(found, kind="answered"):
    places = [place for place, one in enumerate(found) if one["kind"] == kind]
    return places[len(places) // 2]


def edited(logs, chain=False):
    path = logs.path("site-0")
    content = entries(path)
    content[_middle(content)]["told"]["round"] = 77
    write(path, content, chain)


def edited_chained(logs):
    edited(logs, True)


def deleted(logs, chain=False):
    path = logs.path("site-1")
    content = entries(path)
    del content[_middle(content)]
    write(path, content, chain)


def deleted_chained(logs):
    deleted(logs, True)


def inserted(logs, chain=False):
    """An entry that allows something afterwards."""
    path = logs.path("site-1")
    content = entries(path)
    content.insert(3, {**content[3], "kind": "approved", "by": "the DPO"})
    write(path, content, chain)


def inserted_chained(logs):
    inserted(logs, True)


def reordered(logs, chain=False):
    path = logs.path(HOST)
    content = entries(path)
    place = _middle(content, "asked")
    content[place : place + 2] = reversed(content[place : place + 2])
    write(path, content, chain)


def reordered_chained(logs):
    reordered(logs, True)


def repeated(logs):
    """An exchange that stands in it twice."""
    path = logs.path("site-0")
    content = entries(path)
    write(path, [*content, content[-1]])


def truncated(logs):
    path = logs.path("site-0")
    write(path, entries(path)[:-3])


def truncated_by_one(logs):
    path = logs.path("site-0")
    write(path, entries(path)[:-1])


def torn_on_purpose(logs):
    """The last entry made to look like one that a crash tore, with an honest repair after it."""
    path = logs.path("site-0")
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.rstrip(b"\n").rindex(b"\n") + 40])
    logs.log("site-0").append("started")


def torn_amid(logs):
    path = logs.path("site-2")
    lines = path.read_bytes().splitlines(keepends=True)
    lines[4] = lines[4][:60] + b"\n"
    path.write_bytes(b"".join(lines))


def old_copy(logs):
    shutil.copy(logs.folder.parent / "before" / "site-2" / audit.LOG_FILE, logs.path("site-2"))


def forked(logs):
    """A node goes back to an old copy and carries on from it, signing as it should."""
    old_copy(logs)
    logs.rounds(2, 4)


def swapped(logs):
    shutil.copy(logs.path("site-0"), logs.path("site-1"))


def beginning_lost(logs):
    path = logs.path("site-0")
    write(path, entries(path)[1:])


def fewer_bytes(logs):
    path = logs.path("site-0")
    content = entries(path)
    proof = content[-1]["answer"]
    header = json.loads(proof["header"])
    proof["header"] = json.dumps({**header, "size": 5}, sort_keys=True, separators=(",", ":"))
    write(path, content)


def fewer_bytes_signed(logs):
    rewrite(logs.path("site-0"), entries(logs.path("site-0")), logs.members, "site-0", size=5)


def forged(logs):
    path = logs.path("site-0")
    content = entries(path)
    content[-1]["answer"]["signature"] = base64.b64encode(bytes(256)).decode()
    write(path, content)


def signed_by_another(logs):
    """The question of an exchange that never was, signed by another site."""
    path = logs.path("site-0")
    content = entries(path)
    header = auditing.signing.Header.read(content[-1]["question"]["header"].encode())
    made = auditing.signing._signed(logs.members.identities["site-1"], header, b"")
    content[-1]["question"] = made.evidence
    write(path, content)


def clock_back(logs):
    Clock.off = -3600.0
    logs.rounds(1, 4)


def clock_forward_at_one_site(logs):
    logs.rounds(1, 4)
    logs.start("site-1")
    honest_ask, node = logs._ask, "site-1"

    class Late(AuditLog):
        def append_signed(self, *words, **more):
            Clock.off = 7200.0
            try:
                return super().append_signed(*words, **more)
            finally:
                Clock.off = 0.0

    logs.channels[node]._audit = Late(logs.folder / node, node, "node")
    honest_ask(node, auditing.protocol.pack("step", {"run": "r1", "round": 9}))
    honest_ask(node, auditing.protocol.pack("step", {"run": "r1", "round": 9}))


def site_denies(logs, name="site-0"):
    """A site takes an exchange out of its log and signs all that follows anew."""
    path = logs.path(name)
    content = entries(path)
    del content[_middle(content)]
    rewrite(path, content, logs.members, name)


def site_denies_the_newest(logs):
    path = logs.path("site-0")
    rewrite(path, entries(path)[:-1], logs.members, "site-0")


def server_denies_a_question(logs):
    path = logs.path(HOST)
    content = entries(path)
    place = _middle(content, "asked")
    del content[place : place + 2]  # with its answer
    write(path, content)


def server_denies_the_newest(logs):
    path = logs.path(HOST)
    write(path, entries(path)[:-2])


def server_denies_an_answer(logs):
    """The answer was never had, says the server; it signed otherwise in its next question."""
    path = logs.path(HOST)
    content = entries(path)
    del content[_middle(content, "got")]
    write(path, content)


def server_never_records_an_answer(logs):
    """It uses an answer and leaves it out of its log from the start; its next question says so."""
    logs.rounds(1, 4)
    honest = logs.hub._note
    logs.hub._note = lambda kind, *rest, **more: kind == audit.GOT or honest(kind, *rest, **more)
    logs.rounds(1, 5)
    logs.hub._note = honest
    logs.rounds(1, 6)


def sites_collude(logs):
    """Two sites deny the same round."""
    site_denies(logs, "site-0")
    site_denies(logs, "site-1")


def site_and_server_collude(logs):
    """Both sides take out one exchange; the other sites hold what the server signed since."""
    content = entries(logs.path(HOST))
    mine = [place for place, one in enumerate(content) if "site-0" in json.dumps(one)]
    pair = [place for place in mine if content[place]["kind"] in ("asked", "got")][4:6]
    rewrite(
        logs.path(HOST), [o for n, o in enumerate(content) if n not in pair], logs.members, HOST
    )
    site_denies(logs, "site-0")


def another_experiment(logs):
    """The server shows a site another experiment than it names in its own log."""
    path = logs.path("site-2")
    content = entries(path)
    for one in content:
        if one["kind"] == "run":
            one["experiment"] = "f" * 64
    rewrite(path, content, logs.members, "site-2")


def another_word_for_the_newest(logs):
    path = logs.path("site-0")
    content = entries(path)
    content[-1]["about"]["what"] = "judge"
    write(path, content)


TAMPERINGS = {
    edited: "chain",
    edited_chained: "rewritten",
    deleted: "chain",
    deleted_chained: "denied",
    inserted: "chain",
    inserted_chained: "rewritten",
    reordered: "chain",
    reordered_chained: "rewritten",
    repeated: "signature",
    truncated: "rewritten",
    truncated_by_one: "denied",
    torn_on_purpose: "denied",
    torn_amid: "torn",
    old_copy: "rewritten",
    forked: "rewritten",
    swapped: "twice",
    beginning_lost: "begin",
    fewer_bytes: "signature",
    fewer_bytes_signed: "denied",
    forged: "signature",
    signed_by_another: "signature",
    clock_back: "clock",
    clock_forward_at_one_site: "clock",
    site_denies: "denied",
    site_denies_the_newest: "denied",
    server_denies_a_question: "denied",
    server_denies_the_newest: "denied",
    server_denies_an_answer: "denied",
    server_never_records_an_answer: "denied",
    sites_collude: "denied",
    site_and_server_collude: "rewritten",
    another_experiment: "run",
    another_word_for_the_newest: "denied",
}


@pytest.mark.parametrize("tamper", TAMPERINGS, ids=lambda one: one.__name__)
def test_tampering_is_found(logs, honest, tamper, monkeypatch):
    monkeypatch.setattr(audit, "datetime", Clock)
    monkeypatch.setattr(Clock, "off", 0.0)
    if not (logs.folder.parent / "before").exists():
        shutil.copytree(honest / "before", logs.folder.parent / "before")
    assert not found(logs).problems
    tamper(logs)
    assert TAMPERINGS[tamper] in kinds(found(logs)), found(logs).problems


def test_a_message_tells_a_site_nothing_of_what_the_server_does_with_others(tmp_path, members):
    """Else nodes together could tell who else was drawn in a private round."""
    run = Federation(tmp_path, members)
    run.rounds(1)
    seen = []
    honest = run.channels["site-0"].answer
    run.channels["site-0"].answer = lambda blob, ask: (
        seen.append(auditing.signing._opened(blob).header),
        honest(blob, ask),
    )[1]
    for others in (0, 3):
        for _ in range(others):
            run._ask("site-1", auditing.protocol.pack("step", {"run": "r1"}))
        run._ask("site-0", auditing.protocol.pack("step", {"run": "r1"}))
    first, second = seen
    assert second.number == first.number + 1
    assert len(second.head) == 64 == len(first.head)  # a hash, and no number beside it


def test_a_log_of_another_federation_is_found(logs, other):
    assert {"signature"} == kinds(check([logs.path("site-0")], other.authority))


def test_what_cannot_be_found_is_not(logs, tmp_path):
    """As docs/audit.md says: nobody else holds a later word of whoever tampers."""
    write(logs.path("site-0"), entries(logs.path("site-0"))[:-1])
    assert not found(logs, "site-0").problems  # the newest entry, with no other log
    assert "denied" in kinds(found(logs))
    # The server and every site it speaks of rewrite all their logs alike.
    content = {name: entries(logs.path(name))[:2] for name in (HOST, *SITES)}
    for name, own in content.items():
        rewrite(logs.path(name), own, logs.members, name)
    assert not found(logs).problems


@pytest.mark.parametrize("lines", [b"", b"\n", b"{}\n", b"\xff\xfe\n", b'[1]\n"a"\n', b"{" * 9999])
def test_rubbish_is_no_log_and_no_crash(tmp_path, members, lines):
    path = tmp_path / audit.LOG_FILE
    path.write_bytes(lines)
    assert check([path], members.authority).problems


def test_a_hundred_honest_runs_with_crashes_raise_no_alarm(tmp_path, members, monkeypatch):
    """Kill -9 at random points: before, amid and after writing, on both sides."""
    monkeypatch.setattr(audit.os, "fsync", lambda number: None)
    crashes, torn, lost = 0, 0, 0
    for seed in range(100):
        run = Federation(tmp_path / str(seed), members, 0.03, seed)
        monkeypatch.setattr(audit, "_write", run.write)
        run.rounds(2)
        monkeypatch.undo()
        monkeypatch.setattr(audit.os, "fsync", lambda number: None)
        told = check(run.paths(), members.authority)
        assert not told.problems, (seed, told.problems)
        crashes += run.crashes
        torn += sum("tore" in note for note in told.notes)
        lost += sum("answers left" in note for note in told.notes)
    assert crashes > 100 and torn > 20 and lost > 10


WRITER = """
import sys
from pathlib import Path
from idiolect.deploy.audit import AuditLog, lines_of
log = AuditLog(Path(sys.argv[1]), "site-0", "node")
while True:
    print(log.append("note", text="x" * 20000).number, flush=True)
"""


def test_kill_9_amid_a_write_loses_nothing_that_was_said_to_be_kept(tmp_path, members):
    said = -1
    for attempt in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE
        )
        with process.stdout as told:
            told.readline()
            time.sleep(0.05 + 0.03 * attempt)
            os.kill(process.pid, signal.SIGKILL)
            rest = told.read().split()
        process.wait()
        said = max([said, *map(int, rest)])
    path = tmp_path / audit.LOG_FILE
    with path.open("ab") as file:
        file.write(b'{"kind":"note","n":')  # and one that the loop may not have hit
    AuditLog(tmp_path, "site-0", "node").append("note")
    told = check([path], members.authority)
    # The last kill may have torn a line as well: the 19 bytes are then the end of it.
    torn = [int(note.split()[-2]) for note in told.notes if "a crash tore" in note]
    assert not told.problems and torn and torn[-1] >= 19
    assert told.logs["site-0"] > said


def test_what_cannot_be_recorded_is_not_said(tmp_path, members, monkeypatch):
    """A full disk: the node refuses outside of its session, and no log contradicts another."""
    run = Federation(tmp_path, members)
    run.rounds(1)
    full = AuditLog.append_signed

    def fails(self, kind, *words, **more):
        if kind == audit.ANSWERED:
            raise DeployError("no space left")
        return full(self, kind, *words, **more)

    monkeypatch.setattr(AuditLog, "append_signed", fails)
    with pytest.raises(auditing.Refused) as told:
        run.hub.call("site-0", auditing.protocol.pack("step", {"round": 5}), 1.0)
    assert told.value.reason == "disk"
    monkeypatch.setattr(AuditLog, "append_signed", full)
    run.rounds(1, 1)
    assert not found(run).problems


def test_two_processes_write_one_chain(tmp_path, members):
    left, right = (AuditLog(tmp_path, "site-0", "node") for _ in range(2))
    for number in range(6):
        (left, right)[number % 2].append("note", number=number)
    told = check([left.path], members.authority)
    assert not told.problems and told.logs == {"site-0": 7}
    assert AuditLog(tmp_path, "site-0", "node").head() == right.head()
    assert right.head().number == 6 and left.head().number == 5  # as far as each one knows


def test_paths_of_kits_and_run_folders(tmp_path, logs):
    (tmp_path / "kit" / "idiolect").mkdir(parents=True)
    shutil.copy(logs.path("site-0"), tmp_path / "kit" / "idiolect")
    given = [tmp_path / "kit", logs.folder, logs.path("site-1")]
    names = [path.name for path in audit_check.log_paths(given)]
    assert names == [audit.LOG_FILE, audit.HEADS_FILE, audit.LOG_FILE]


def test_a_question_that_was_changed_frames_nobody(tmp_path, members):
    """A server signs a question wrongly and keeps the answer: the node's log must not lack it."""
    run = Federation(tmp_path, members)
    run.rounds(1)
    made = run.hub._question("site-0", run.hub._sessions["site-0"], b"abc")
    answer = auditing.signing._opened(
        run.channels["site-0"].answer(made._replace(body=b"abd").blob, lambda body: b"")
    )
    assert answer.header.session == ""  # outside of the session: it proves nothing
    with pytest.raises(auditing.Refused):
        run.hub._inner = type(
            "Wire", (), {"call": lambda self, site, blob, seconds: answer.blob, "sites": SITES}
        )()
        run.hub.call("site-0", b"abc", 1.0)
    assert not found(run).problems


def test_whoever_repeats_a_message_adds_nothing_to_the_log(tmp_path, members):
    run = Federation(tmp_path, members)
    run.rounds(1)
    seen = []
    honest = run.call
    run.call = lambda site, blob, seconds: (seen.append(blob), honest(site, blob, seconds))[1]
    run._ask("site-0", auditing.protocol.pack("step", {"run": "r1"}))
    before = run.path("site-0").stat().st_size
    for _ in range(3):
        run.channels["site-0"].answer(seen[-1], lambda body: b"")
    assert run.path("site-0").stat().st_size == before and not found(run).problems


_ANYTHING = (None, 0, -1, 1e308, [], {}, [1], True, "", "\ud800", "2026-01-01", "[" * 100_000)


def _places(part):
    """Return every place of a JSON value: what it is in, and by which key."""
    found = []
    for key, inner in part.items() if isinstance(part, dict) else enumerate(part):
        found.append((part, key))
        found += _places(inner) if isinstance(inner, dict | list) else []
    return found


@pytest.mark.parametrize("seed", range(40))
def test_whatever_a_member_writes_into_its_log_is_named_and_ends_no_check(logs, seed):
    """A traceback in place of a finding would hide the finding, and whose it is."""
    random = Random(seed)
    heads = logs.folder / audit.HEADS_FILE
    path = random.choice([*logs.paths(), heads])
    lines = path.read_bytes().splitlines()
    entry = json.loads(lines[place := random.randrange(len(lines))])
    within, key = random.choice(_places(entry))
    inner = within[key]
    if key == "header" and random.random() < 0.5:
        changed = json.loads(inner)
        changed[random.choice(list(changed))] = random.choice(_ANYTHING)
        within[key] = json.dumps(changed)
    else:
        within[key] = random.choice([one for one in _ANYTHING if one != inner])
    raw = "[" * 100_000 if random.random() < 0.1 else json.dumps(entry)
    path.write_bytes(b"\n".join([*lines[:place], raw.encode(), *lines[place + 1 :]]) + b"\n")
    found = check([*logs.paths(), heads], logs.members.authority)
    used = key in ("header", "signature", "der") or raw[0] == "["
    assert found.problems or (path == heads and not used)
    for line in lines_of(path):
        if (read := audit.read_entry(line)) is not None:
            assert audit.told(read)
