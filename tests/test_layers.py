"""The layers of the package, read from its imports: a row may import only rows above it."""

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import idiolect

HOME = Path(idiolect.__file__).parent

# The table of CONTRIBUTING.md, from the bottom up.
TABLE = Path(__file__).parents[1].joinpath("CONTRIBUTING.md").read_text().split("|---|---|\n")[1]
ROWS = [
    re.findall(r"`([a-z_]+)(?:/|\.py)`", line.split("|")[1])
    for line in TABLE.split("\n\n")[0].splitlines()
]
FOR_ALL = {"errors", "version"}
ABOVE = {
    name: {name, *FOR_ALL, *(lower for row in ROWS[:place] for lower in row)}
    for place, row in enumerate(ROWS)
    for name in row
} | {"errors": FOR_ALL, "version": FOR_ALL, "__main__": {"cli"}}
# Apart from the order: what a folder has no business with although it stands above.
ABOVE["methods"] -= {"models", "data"}
ABOVE["data"] = {"data", "core", *FOR_ALL}  # of core only the task, see below
ABOVE["analysis"] = {"analysis", "results", "core", "engine", *FOR_ALL}

# Third parties that may be imported with the module; elsewhere only inside the function that needs
# them, so that the core needs torch and numpy alone.
CORE = {"torch", "numpy"}
FOREIGN = {
    "analysis": {"markupsafe"},  # light, and a part of Jinja2
    "experiment": {"pydantic", "filelock"},
    "cli": {"typer", "rich"},
    "deploy": {"filelock", "nvflare"},  # and FLARE only in its adapter: see below
}

FILES = sorted(HOME.rglob("*.py"))


@functools.cache
def parsed(path):
    return ast.parse(path.read_text())


@functools.cache
def imports(path, everywhere=True):
    """Return (line, module) of a file's imports; at module level only unless `everywhere`."""
    return list(_imports(path, everywhere))


def _imports(path, everywhere):
    package = list(path.relative_to(HOME.parent).with_suffix("").parts[:-1])
    top = parsed(path)
    nodes = ast.walk(top) if everywhere else _run_on_import(top.body)
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def _run_on_import(body):
    """Walk statements that run when a module is imported: not functions, not type checking."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, (ast.If, ast.Try, ast.With, ast.ClassDef)):
            inner = [node.body, getattr(node, "orelse", []), getattr(node, "finalbody", [])]
            inner += [handler.body for handler in getattr(node, "handlers", [])]
            for part in inner:
                yield from _run_on_import(part)


def row_of(path):
    first = path.relative_to(HOME).parts[0].removesuffix(".py")
    return "idiolect" if first == "__init__" else first


def where(path, line):
    return f"src/idiolect/{path.relative_to(HOME)}:{line}"


def test_every_file_has_a_row():
    assert {row_of(path) for path in FILES} - {"idiolect"} == set(ABOVE)


def test_a_row_imports_only_rows_above_it():
    wrong = []
    for path in FILES:
        if row_of(path) == "idiolect":
            continue  # the front door, which opens every room, but only when asked
        for line, module in imports(path):
            own = module.split(".")
            if own[0] == "idiolect" and len(own) > 1 and own[1] not in ABOVE[row_of(path)]:
                wrong.append(f"{where(path, line)} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_data_knows_of_core_the_task_and_the_vocabulary_alone():
    found = {m for path in FILES if row_of(path) == "data" for _, m in imports(path)}
    known = ("idiolect.core.task", "idiolect.core.survival", "idiolect.core.vocabulary")
    assert not [m for m in found if m.startswith("idiolect.core") and not m.startswith(known)]


def test_the_front_door_imports_nothing_until_asked():
    loaded = [m for _, m in imports(HOME / "__init__.py", False) if m.startswith("idiolect")]
    assert set(loaded) <= {"idiolect.version.VERSION"}


def test_methods_reuse_one_method_at_most_one_level_deep():
    """A file of methods/ may build on another; what it builds on builds on FedAvg at most."""
    reused = {}
    for path in FILES:
        if path.parent != HOME / "methods" or path.name == "__init__.py":
            continue
        found = {m.split(".")[2] for _, m in imports(path) if m.startswith("idiolect.methods.")}
        reused[path.stem] = found - {"fedavg", "personalise"}
    assert reused["fedavg"] == set()
    for name, others in reused.items():
        assert len(others) <= 1, (name, others)
        for other in others:
            assert not reused[other], f"{name} builds on {other}, which builds on {reused[other]}"


def test_third_parties_are_imported_where_they_are_allowed():
    wrong = []
    for path in FILES:
        allowed = CORE | FOREIGN.get(row_of(path), set())
        for line, module in imports(path, everywhere=False):
            first = module.split(".")[0]
            if first not in sys.stdlib_module_names | {"idiolect"} | allowed:
                wrong.append(f"{where(path, line)} imports {module} with the module")
    assert not wrong, "\n".join(wrong)


def test_commands_and_schemas_are_known_to_one_layer_each():
    """Not even inside a function: pydantic belongs to experiment, typer to the cli."""
    owners = {"pydantic": {"experiment"}, "typer": {"cli"}, "click": {"cli"}}
    wrong = [
        f"{where(path, line)} imports {module}"
        for path in FILES
        for line, module in imports(path)
        if row_of(path) not in owners.get(module.split(".")[0], {row_of(path)})
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_adapter_knows_the_engine():
    known = {
        path.relative_to(HOME).parts[:2]
        for path in FILES
        for _, m in imports(path)
        if m.startswith("nvflare")
    }
    assert known == {("deploy", "flare")}
    # What a site needs to say that the engine is missing must load without it.
    for path in (HOME / "deploy" / "flare").glob("*.py"):
        loaded = [m for _, m in imports(path, everywhere=False) if m.startswith("nvflare")]
        engine = {"flare_job", "job_guard", "node_side", "run_queue", "requested_certificates"}
        assert path.stem in engine or not loaded


def test_only_tree_knows_torchs_pytree():
    found = {path.stem for path in FILES for _, m in imports(path) if "pytree" in m}
    assert found == {"tree"}


def test_the_core_runs_without_what_only_screens_and_files_need():
    """Import all that trains in a process where the third parties cannot be found."""
    code = """
import sys
for name in ("pydantic", "typer", "rich", "pyarrow", "safetensors", "PIL", "pandas", "scipy"):
    sys.modules[name] = None
import idiolect.methods, idiolect.models, idiolect.engine.rounds, idiolect.data
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_name_stands_for_one_thing():
    """No two classes, and no two files, have the same name."""
    names = [("file", path.stem) for path in FILES if not path.stem.startswith("__")]
    for path in FILES:
        kinds = [node for node in ast.walk(parsed(path)) if hasattr(node, "bases")]
        names += [("class", node.name) for node in kinds]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    assert not twice, twice


def test_files_that_the_pages_for_engineers_name_are_there():
    root = HOME.parents[1]
    for page in ("docs/first-hour.md", "CONTRIBUTING.md"):
        for named in re.findall(
            r"`([a-z_/]+\.(?:py|md)|[a-z_]+/[a-z_]+/)`", (root / page).read_text()
        ):
            places = (HOME / named, root / named, root / "docs" / named)
            assert any(place.exists() for place in places), f"{page} names {named}"
