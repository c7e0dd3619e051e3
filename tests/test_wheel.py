"""The wheel, built and installed into an empty environment: core dependencies and nothing else."""

import os
import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest

HOME = Path(__file__).resolve().parents[1]
EXTRAS = (
    "sklearn",
    "pandas",
    "scipy",
    "nvflare",
    "onnx",
    "onnxruntime",
    "ray",
    "optuna",
    "IPython",
)

pytest.importorskip("hatchling", reason="the wheel is not built: needs hatchling")
requirements = pytest.importorskip("packaging.requirements", reason="needs packaging")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=HOME, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def told(wheel):
    """Read the wheel's metadata."""
    with zipfile.ZipFile(wheel) as held:
        name = next(one for one in held.namelist() if one.endswith(".dist-info/METADATA"))
        return Parser().parsestr(held.read(name).decode())


def needed(asked, found):
    """Collect distributions and all that they need, without extras."""
    for text in asked:
        wanted = requirements.Requirement(text)
        name = wanted.name.lower().replace("_", "-")
        if name in found or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        found[name] = metadata.distribution(wanted.name)
        needed(found[name].requires or (), found)
    return found


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """An environment that holds the wheel and its core dependencies, which are links to ours."""
    home = tmp_path_factory.mktemp("empty")
    make = [sys.executable, "-m", "venv", "--without-pip", str(home)]
    subprocess.run(make, check=True, capture_output=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = home / "lib" / version / "site-packages"
    core = [text for text in told(wheel).get_all("Requires-Dist") if "extra ==" not in text]
    for held in needed(core, {}).values():
        for file in held.files or ():
            first = file.parts[0]
            if first not in ("..", "__pycache__") and not (site / first).exists():
                (site / first).symlink_to(held.locate_file(first))
    install = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install"]
    options = ["--quiet", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check"]
    subprocess.run([*install, *options, str(wheel)], check=True, capture_output=True)
    return home / "bin"


def run(command, folder, **options):
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env |= {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "80"}
    return subprocess.run(
        [str(one) for one in command], cwd=folder, env=env, capture_output=True, text=True,
        timeout=120, **options,
    )  # fmt: skip


def test_the_wheel_carries_every_file_of_the_package(wheel):
    listed = subprocess.run(
        ["git", "ls-files", "src/idiolect", "experiments"],
        cwd=HOME, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode:
        pytest.skip("files are not compared: no git checkout here")
    wanted = {
        path.removeprefix("src/")
        if path.startswith("src/")
        else path.replace("experiments/", "idiolect/experiment/repro/experiments/", 1)
        for path in listed.stdout.splitlines()
        if (HOME / path).exists()
    }
    with zipfile.ZipFile(wheel) as held:
        names = {one for one in held.namelist() if ".dist-info/" not in one}
    assert wanted <= names
    kinds = {Path(one).suffix for one in names}
    assert {".toml", ".cu", ".css", ".npz"} & kinds >= {".toml", ".cu"}
    assert not [one for one in names if not one.startswith("idiolect/") or "__pycache__" in one]


def test_the_wheel_says_what_it_is(wheel):
    about = told(wheel)
    core = [text for text in about.get_all("Requires-Dist") if "extra ==" not in text]
    assert {requirements.Requirement(text).name for text in core} == {
        "torch", "numpy", "safetensors", "filelock", "pydantic", "typer", "rich", "pyarrow",
        "jinja2", "pillow",
    }  # fmt: skip
    assert about["License-Expression"] == "Apache-2.0" and about["Requires-Python"] == ">=3.11"
    assert about["Description-Content-Type"] == "text/markdown"


TOUR = """
import importlib.util, json, sys
from pathlib import Path

before = set(sys.modules)
import idiolect

assert "torch" not in sys.modules, "import idiolect brings torch"
assert Path(idiolect.__file__).is_relative_to(sys.prefix), idiolect.__file__
extras = sys.argv[1].split(",")
assert not [name for name in extras if importlib.util.find_spec(name)], "extras are here"
from idiolect.cli import main


def call(*words):
    sys.argv = ["idiolect", *words]
    try:
        main()
    except SystemExit as done:
        return done.code or 0
    return 0


small = ["rounds=1", "seeds=[0]", "model.hidden=8", "methods.PersFL.distil_epochs=1"]
assert call("demo", *[word for one in small for word in ("--set", one)]) == 0
assert call("report", "runs/demo", "--out", "report.html") == 0
assert call("show", "runs/demo") == 0
rows = [{"a": n % 7, "b": n * 0.5, "site": "xy"[n % 2], "sick": n % 3 == 0} for n in range(60)]
held = idiolect.Federation.from_frame(rows, client="site", label="sick")
result = idiolect.fit("fedavg", held, "mlr", rounds=2)
assert "FedAvg: 2 clients" in repr(result) and "<svg" in result._repr_html_()
for wanted in (lambda: result.to_pandas(), lambda: idiolect.compare(["local", "fedavg"], held)):
    try:
        wanted()
    except Exception as error:
        assert "pip install 'idiolect[" in str(error), error
    else:
        raise AssertionError("an extra that is not here was not missed")
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & set(extras), loaded & set(extras)
print("toured")
"""


def test_the_tour_runs_without_any_extra(environment, tmp_path):
    done = run([environment / "python", "-W", "error", "-c", TOUR, ",".join(EXTRAS)], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.endswith("toured\n")
    page = (tmp_path / "report.html").read_text()
    assert "PersFL" in page and "<script" in page


def test_the_command_is_there_and_helps(environment, tmp_path):
    done = run([environment / "idiolect", "--help"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "compare" in done.stdout and "predict" in done.stdout
    listed = run([environment / "idiolect", "methods"], tmp_path)
    assert listed.returncode == 0 and "persfl" in listed.stdout.lower(), listed.stderr
