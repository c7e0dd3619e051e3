"""What arrives from outside is no code and opens no file: experiments, jobs and run folders."""

import importlib
import inspect
import io
import json
import sys
import tomllib
import zipfile
from dataclasses import replace
from pathlib import Path

import federations as fed
import numpy as np
import pytest
from typer.testing import CliRunner

from idiolect.cli import app
from idiolect.data import PARTITIONS, SOURCES
from idiolect.deploy import handshake, protocol
from idiolect.deploy.flare import job_layout, kits
from idiolect.deploy.limits import UNLIMITED
from idiolect.deploy.node import Node
from idiolect.deploy.node_process import InProcess, NodeProcess
from idiolect.deploy.processes import isolated
from idiolect.deploy.serve_experiment import ServerSettings, make_messenger, serve
from idiolect.deploy.site import NodeSettings
from idiolect.errors import ConfigError, DataError
from idiolect.experiment.adapt import adapt
from idiolect.experiment.components import build_method
from idiolect.experiment.load import parse_experiment
from idiolect.experiment.portable import export_experiment, import_experiment
from idiolect.experiment.run import run
from idiolect.experiment.stored_models import make_model
from idiolect.experiment.untrusted import AGGREGATORS, WORDS, Permissions, refuse_untrusted
from idiolect.methods import METHODS
from idiolect.methods.personalise import Combined
from idiolect.models import MODELS
from idiolect.version import VERSION

GOOD = """
name = "good"
rounds = 1
[data]
partition = { name = "iid", clients = 2, per_client = 20 }
[model]
name = "mlr"
[[methods]]
name = "fedavg"
"""
EVIL = "from pathlib import Path\nPath({mark!r}).touch()\ndef net(shape, classes): pass\n"


def with_line(line, after="[data]"):
    return GOOD.replace(after, f"{after}\n{line}", 1)


def with_model(value):
    return GOOD.replace('[model]\nname = "mlr"', f"[model]\n{value}")


# Each with `FILE` for a file's path without its ending: the three ways that were seen, and others.
FORBIDDEN = {
    "a module of the job's folder": with_model('name = "0a1b.app_server.config.evil:net"'),
    "a module": with_model('name = "evil:net"'),
    "a module of Python": with_model('name = "os:system"'),
    "a module by relative dots": with_model('name = "..evil:net"'),
    "a module by path": with_model('name = "FILE:net"'),
    "an assigned module": with_model('name = "mlr"\nassign = { 0 = "evil:net" }'),
    "a counted module": with_model('each = { mlr = 1, "evil:net" = 1 }'),
    "a listed module": with_model('architectures = [{ name = "mlr" }, { name = "evil:net" }]'),
    "an auxiliary module": with_model('name = "mlr"\nauxiliary = { name = "evil:net" }'),
    "pickles": with_line('public = { source = "FILE", options = { allow_pickle = true } }'),
    "public by path": with_line('public = { source = "FILE.npz" }'),
    "public by name in this folder": with_line('public = { source = "evil.npz" }'),
    "public by URL": with_line('public = { source = "file://FILE.npz" }'),
    "public by the hub's name": with_line('public = { source = "ylecun/mnist" }'),
    "public under a home": with_line('public = { source = "~/evil.npz" }'),
    "words by path": with_line('text = { words = "FILE.txt" }'),
    "words by name": with_line('text = { words = "evil.txt" }'),
    "a source by path": with_line('source = "FILE.npz"'),
    "a source in a zip": with_line('source = "FILE.zip/evil.npz"'),
    "a source upwards": with_line('source = "../evil.npz"'),
    "word vectors": with_model('name = "kim-cnn"\nvectors = "FILE.txt"'),
    "word vectors by name": with_model('name = "kim-cnn"\nvectors = "evil"'),
    "another division": GOOD + '[[splits]]\nname = "a"\ntext = { words = "FILE.txt" }\n',
    "a logger's folder": GOOD + '[logging]\ntensorboard = "FILE"\n',
    "a logger's server": GOOD + '[logging]\nmlflow = "http://127.0.0.1:9"\n',
    "a cluster": GOOD + '[backend]\nkind = "ray"\nray = { address = "127.0.0.1:9" }\n',
    "a search": GOOD + '[tune]\nsearch = "optuna"\n',
    "a partition": GOOD.replace('"iid"', '"FILE"'),
    "a partition's option": with_line("x = 1")
    .replace("x = 1\n", "")
    .replace("per_client = 20", 'per_client = 20, file = "FILE"'),
    "a source's option": with_line('options = { path = "FILE" }'),
    "a method": GOOD.replace('"fedavg"', '"evil:Method"'),
    "a method's option": GOOD + 'start_from = "FILE"\n',
    "a method's known option": GOOD + 'optimiser = "FILE"\n',
    "a rule": GOOD + 'aggregate = "evil:Rule"\n',
    "a rule's option": GOOD + 'aggregate = { name = "median", middle = "FILE" }\n',
    "everyone's rule": GOOD.replace("rounds = 1", 'rounds = 1\naggregate = { name = "FILE" }'),
    "a preset": GOOD + 'preset = "FILE"\n',
    "a table nested in a method": GOOD + "aggregate = { name = { name = 'FILE' } }\n",
    "training": GOOD.replace("[model]", '[training]\nteacher = "FILE"\n[model]'),
    "evaluation": GOOD + '[evaluate]\npersonal = "FILE"\n',
    "an unknown table": GOOD + '[plugins]\nevil = "FILE"\n',
    "a label that colours a terminal": GOOD + 'label = "\\u001b[31m"\n',
}


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """A folder where commands are given and jobs lie, full of what must not be opened."""
    mark = tmp_path / "mark"
    code = EVIL.format(mark=str(mark))
    for folder in (tmp_path, tmp_path / "0a1b" / "app_server" / "config"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "evil.py").write_text(code)
    np.savez(tmp_path / "evil.npz", x=np.zeros((9, 28, 28), np.uint8), y=np.arange(9))
    (tmp_path / "evil").symlink_to(tmp_path / "evil.npz")
    (tmp_path / "evil.txt").write_text("secret\nwords\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # as `python -m` does
    monkeypatch.setenv("HOME", str(tmp_path))
    yield mark
    sys.modules.pop("evil", None)
    assert not mark.exists()


def opened(site, text, methods=()):
    head = {"run": "r1", "version": VERSION, "experiment": text, "methods": dict(methods)}
    blob = protocol.pack(
        "open", {**head, "clients": 2, "place": 0, "newcomer": False, "submitter": "lead"}
    )
    return protocol.unpack(Node(site).answer(blob))


def test_an_experiment_from_outside_names_built_in_things_only(evil, tmp_path):
    """On a node with a share, on one with data of its own, and on the server."""
    for name in MODELS:  # with every option written out
        weights = 'weights = "embedded"' if name == "hf" else ""
        assert export_experiment(parse_experiment(with_model(f'name = "{name}"\n{weights}')))
    share = NodeSettings("a", "test", tmp_path / "a", "embedded", client=0, policy=UNLIMITED)
    own = NodeSettings("b", "test", tmp_path / "b", str(tmp_path / "evil.npz"), policy=UNLIMITED)
    assert opened(share, GOOD).kind == "yes"
    for what, text in FORBIDDEN.items():
        text = text.replace("FILE", str(tmp_path / "evil"))
        for site in (share, own):
            told = opened(site, text)
            assert (told.kind, told.head) == ("no", {"code": "experiment"}), what
        for act in (make_messenger, lambda *args: serve(None, args[1], "r1", args[2])):
            with pytest.raises(ConfigError, match="the hub's experiment"):
                act(InProcess({}), text, tmp_path / "hub")
    assert not (tmp_path / "hub").exists()


def test_a_mark_for_a_file_opens_none(evil, tmp_path):
    """Where `own` stands for a file, a file of that name is not meant."""
    (tmp_path / "own").write_bytes((tmp_path / "evil.npz").read_bytes())
    share = NodeSettings("a", "test", tmp_path / "a", "embedded", client=0, policy=UNLIMITED)
    public = with_line('public = { source = "own", size = 4 }').replace("fedavg", "fedmd")
    for text in (public, with_line('source = "own"')):
        assert opened(share, text).head == {"code": "data"}
    with pytest.raises(DataError, match="no path from outside is opened"):
        import_experiment(with_line('source = "own"'), source="own")


def texty(option):
    """Say whether an option is text, or a list of texts."""
    default = option.default if isinstance(option.default, tuple) else (option.default,)
    kind = str(option.annotation)
    return "str" in kind or "Literal" in kind or any(isinstance(own, str) for own in default)


def test_every_option_that_is_text_is_listed_or_closed():
    """An option that a new method has by text is refused from outside until it is looked at."""
    takers = [*MODELS.values(), *METHODS.values(), *AGGREGATORS.values(), *PARTITIONS.values()]
    takers += [Combined, *(source.make or source.read for source in SOURCES.values())]
    texts = {
        name
        for taker in takers
        for name, option in inspect.signature(taker).parameters.items()
        if texty(option) and name not in ("words", "title", "combinations")
    }
    # A path of a file, or of a base, which from outside is named by its digest alone.
    assert texts - WORDS == {"vectors", "tokeniser", "weights", "digest"}


def test_options_that_are_words_open_nothing():
    assert {"optimiser", "schedule", "stem", "leave_out"} <= WORDS
    marks = ("path", "file", "dir", "folder", "url", "vector", "address", "module", "host")
    assert not [name for name in WORDS for mark in marks if mark in name]
    # The loader itself gives a reader its files; they are no option.
    assert not [source for source in SOURCES.values() if "files" in source.options()]


def test_names_of_classes_are_taken_as_the_data_have_them():
    """With blanks and slashes; what is chosen by a word stays one, and no terminal is coloured."""
    public = 'public = {{ source = "fashion_mnist", size = 4, options = {{ {} }} }}'
    for good in ('only = ["T-shirt/top", "Ankle boot"]', 'augmented = "once"', 'users = "study"'):
        refuse_untrusted(tomllib.loads(with_line(public.format(good))), "here")
    for bad in ('only = ["\\u001b[31m"]', 'augmented = "../once"', 'users = "a/b"'):
        with pytest.raises(ConfigError, match=r"here: data\.public\.options"):
            refuse_untrusted(tomllib.loads(with_line(public.format(bad))), "here")


def test_no_dataset_is_fetched_because_an_experiment_names_it(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setenv("IDIOLECT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("IDIOLECT_DATA", raising=False)
    monkeypatch.setattr("idiolect.data.sources.download_file", lambda *args: asked.append(args))
    text = with_line('public = { source = "cifar100", size = 4 }').replace("fedavg", "fedmd")
    own = np.savez(tmp_path / "own.npz", x=np.zeros((9, 4), np.float32), y=np.arange(9) % 2)
    assert own is None
    for data, client in (("embedded", 0), (str(tmp_path / "own.npz"), None)):
        site = NodeSettings("a", "test", tmp_path / "a", data, client=client, policy=UNLIMITED)
        told = opened(site, with_classes(text) if client is None else text)
        assert told.head == {"code": "data"}
    assert not asked


def with_classes(text):
    return text.replace("[data]", '[data]\nclasses = ["0", "1"]')


# Packages that an operator allows.

NETS = """
import subprocess
from subprocess import run as ready
from torch import nn
def net(shape, classes, depth=1):
    return nn.Sequential(nn.Flatten(), nn.Linear(784, classes))
def _hidden(shape, classes):
    return net(shape, classes)
"""


def test_a_package_counts_that_the_operator_installed_and_named(tmp_path, monkeypatch):
    """Not one in the kit of the same name, not what it imports, and only where it is named."""
    home = tmp_path / "kit" / "idiolect"
    (tmp_path / "installed" / "lab_nets").mkdir(parents=True)
    (tmp_path / "installed" / "lab_nets" / "__init__.py").write_text(NETS)
    (tmp_path / "kit").mkdir()
    mark = tmp_path / "mark"
    (tmp_path / "kit" / "lab_nets.py").write_text(EVIL.format(mark=str(mark)))
    for folder in (tmp_path / "installed", tmp_path / "kit"):  # the kit is found first
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setitem(sys.modules, "lab_nets", None)
    del sys.modules["lab_nets"]
    sites = {
        name: NodeSettings(
            name, "test", home, "embedded", client=0, policy=replace(UNLIMITED, packages=packages)
        )
        for name, packages in (("a", ("lab_nets",)), ("b", ("lab",)), ("c", ()))
    }
    text = with_model('name = "lab_nets:net"\ndepth = 2')
    answers = [opened(site, text).kind for site in sites.values()]
    assert answers == ["yes", "no", "no"] and not mark.exists()
    for name in ("lab_nets:ready", "lab_nets:subprocess", "lab_nets:_hidden", "lab_nets.x:net"):
        assert opened(sites["a"], with_model(f'name = "{name}"')).kind == "no"
    host = ServerSettings(packages=("lab_nets",))
    assert import_experiment(text, reach=host.reach).model.name == "lab_nets:net"
    with pytest.raises(ConfigError, match="of a package that is allowed here; this list has other"):
        import_experiment(text, reach=Permissions(packages=("other",)))
    assert NodeSettings.from_json(sites["a"].to_json()).reach == sites["a"].reach


def test_the_lead_is_told_before_anyone_is_asked(evil, tmp_path):
    (tmp_path / "mine.py").write_text(NETS)
    wanted = parse_experiment(with_model('name = "mine:net"'))
    with pytest.raises(ConfigError, match=r"sites and server would refuse .* deploy\.packages"):
        export_experiment(wanted)
    known = wanted.deploy.model_copy(update={"packages": ("mine",)})
    assert "mine:net" in export_experiment(wanted.model_copy(update={"deploy": known}))
    text = export_experiment(
        parse_experiment(with_line('source = "evil.npz"\nclasses = ["0", "1"]'))
    )
    assert "evil" not in text and 'source = "own"' in text
    sys.modules.pop("mine", None)


# Processes.


def test_a_nodes_process_imports_nothing_from_where_it_works(tmp_path, monkeypatch):
    home = tmp_path / "kit" / "idiolect"
    home.mkdir(parents=True)
    mark = tmp_path / "mark"
    for folder in (home, home.parent):
        for name in ("tomllib", "queue", "idiolect"):
            (folder / f"{name}.py").write_text(EVIL.format(mark=str(mark)))
    monkeypatch.chdir(home)
    monkeypatch.setenv("PYTHONPATH", f":{home.parent}:.")
    child = NodeProcess(NodeSettings("a", "test", home, "embedded", client=0, policy=UNLIMITED))
    try:
        assert protocol.unpack(child.answer(b"noise")).head == {"code": "format"}
    finally:
        child.close()
    assert not mark.exists()


def test_paths_that_an_operator_gave_are_kept(tmp_path):
    kit = tmp_path / "kit"
    given = ["", ".", "lib", str(kit), str(kit / "job" / "custom"), "/opt/lib"]
    made = isolated({"PYTHONPATH": ":".join(given), "LANG": "C"}, kit)
    assert made == {"PYTHONPATH": "/opt/lib", "LANG": "C", "PYTHONSAFEPATH": "1"}
    assert "PYTHONPATH" not in isolated({"PYTHONPATH": ":."}, kit)


# Run folders.


def test_a_run_folders_module_is_imported_only_if_the_user_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(NETS)
    (tmp_path / "e.toml").write_text(with_model('name = "mine:net"'))
    run("e.toml", out="theirs")
    sys.modules.pop("mine")
    mark = tmp_path / "mark"
    (tmp_path / "mine.py").write_text(f"open({str(mark)!r}, 'w').close()\n{NETS}")
    words = ["adapt", "theirs", "--data", "embedded"]
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == ConfigError.code and not mark.exists()
    told = " ".join(refused.output.split())
    assert "'mine:net', which is code" in told and "--trust-code" in told
    assert str(tmp_path / "mine.py") in told.replace(" ", "")
    # Nor is a file opened, or a cluster joined, that the folder names.
    path = tmp_path / "theirs" / "experiment.toml"
    text = path.read_text()
    path.write_text(
        text.replace('"mine:net"', '"kim-cnn"\nvectors = "e.toml"').replace("depth = 1", "")
    )
    with pytest.raises(ConfigError, match=r"no path opened.*--trust-code"):
        adapt("theirs", "embedded")
    path.write_text(text)
    assert adapt("theirs", "embedded", trust_code=True)["newcomers"] and mark.exists()
    sys.modules.pop("mine")


def test_a_stored_models_module_is_imported_only_if_the_user_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wanted = parse_experiment(GOOD)
    text = export_experiment(wanted)
    site = NodeSettings("a", "test", tmp_path / "a", "embedded", client=0, policy=UNLIMITED)
    digests = {"FedAvg": handshake.method_fingerprint(build_method(wanted.methods[0]))}
    fed.served(wanted, InProcess({"a": Node(site), "b": Node(site_of(tmp_path))}), tmp_path / "hub")
    from idiolect.deploy.personal_models import load_personal_model

    kept = load_personal_model(site.home)
    assert kept.about.experiment == text and digests
    false = kept._replace(about=kept.about._replace(experiment=with_model('name = "evil:net"')))
    (tmp_path / "evil.py").write_text(EVIL.format(mark=str(tmp_path / "mark")))
    with pytest.raises(ConfigError, match=r"evil\.py.*--trust-code"):
        make_model(false)
    assert not (tmp_path / "mark").exists()


def site_of(folder):
    return NodeSettings("b", "test", folder / "b", "embedded", client=1, policy=UNLIMITED)


# Jobs.

guard = pytest.importorskip("idiolect.deploy.flare.job_guard", reason="nvflare is not installed")


@pytest.fixture
def job(tmp_path):
    from idiolect.deploy.flare.admin import FlareTask

    folder = job_layout.write(tmp_path / "job", FlareTask("abc", ("site-0",), 1, 60, GOOD))
    assert guard.foreign(folder / "app") == ""
    return folder


def changed(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def argument(**changes):
    return lambda content: content["workflows"][0]["args"].update(changes)


MORE = {
    "config/evil.py": "code",
    "config/d/train/0.npz": "pickle",
    "custom/evil.py": "code",
    "config/config_fed_server.conf": 'include "/etc/passwd"',
    "config/config_fed_server.json.default": "{}",
    "config/__pycache__/evil.pyc": "code",
    ".__nvfl_sig.json/evil.py": "code",
    "evil.pth": "import evil",
}
CHANGES = {
    "another class": lambda c: c["components"].append({"id": "e", "path": "subprocess.Popen"}),
    "another path": lambda c: c["workflows"][0].update(
        path="idiolect.deploy.flare.flare_job.Other"
    ),
    "a filter": lambda c: c["task_data_filters"].append({"tasks": ["*"]}),
    "another argument": argument(more=1),
    "FLARE's variables": argument(only=["{workspace}"]),
    "a secret": argument(sites=["${secret:x}"]),
    "a table": argument(wanted=[{"path": "subprocess.Popen"}]),
    "no text": argument(experiment=["x"]),
}


@pytest.mark.parametrize("name", MORE)
def test_a_job_with_another_file_is_refused(name, job):
    path = job / "app" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(MORE[name])
    assert guard.foreign(job / "app")
    with pytest.raises(ValueError, match="a job h"):
        guard.refuse_strange("job", zipped(job))


@pytest.mark.parametrize("name", CHANGES)
def test_a_job_with_other_settings_is_refused(name, job):
    changed(job / "app" / "config" / "config_fed_server.json", CHANGES[name])
    assert "not those of idiolect" in guard.foreign(job / "app")


def zipped(folder):
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as out:
        for path in sorted(folder.rglob("*")):
            out.write(path, f"job/{path.relative_to(folder).as_posix()}")
    return zipfile.ZipFile(held)


def test_links_size_and_what_is_said_of_a_job_are_checked(job, monkeypatch):
    guard.refuse_strange("job", zipped(job))
    for change in ({"job_id": "startup"}, {"launcher_spec": {}}, {"resource_spec": {"site-0": {}}}):
        meta = json.loads((job / "meta.json").read_text())
        changed(job / "meta.json", lambda content, more=change: content.update(more))
        with pytest.raises(ValueError, match="nothing else"):
            guard.refuse_strange("job", zipped(job))
        (job / "meta.json").write_text(json.dumps(meta))
    with monkeypatch.context() as limited:
        limited.setattr(guard.job_layout, "LARGEST", 100)
        assert "at most 100 bytes" in guard.foreign(job / "app")
        with pytest.raises(ValueError, match="more than 100 bytes"):
            guard.refuse_strange("job", zipped(job))
    config = job / "app" / "config" / "config_fed_client.json"
    elsewhere = job / "elsewhere.json"
    config.rename(elsewhere)
    config.symlink_to(elsewhere)
    assert "is no file" in guard.foreign(job / "app")


@pytest.mark.parametrize("name", ["startup", "local", "idiolect", "../x", "a b", "", None, 7])
def test_a_jobs_id_is_one_that_a_server_draws(name):
    guard.refuse_id("0c7fd2c9-3f36-4a02-9d2b-5a8b1b1f7c11")
    with pytest.raises(ValueError, match="drawn by the server"):
        guard.refuse_id(name)


def test_engine_and_kits_name_the_same_guard():

    module, _, name = kits.GUARD.rpartition(".")
    assert (module, getattr(guard, name)) == (guard.__name__, guard.JobGuard)
    assert Path(guard.__file__).name == "job_guard.py"


def test_a_jobs_configurations_name_classes_that_exist():
    """And the settings of kits those of the engine's long-running processes."""
    arguments = dict(run="r", experiment="", sites=[], only=[], wanted=None)
    (part,) = job_layout.server(arguments)["workflows"]
    own = [path for _, path in kits._OWN.values()]
    for path in (part["path"], kits._QUEUE, kits.NODE_GUARD, *own):
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name)
        assert path.startswith(kits.ALLOWED)
