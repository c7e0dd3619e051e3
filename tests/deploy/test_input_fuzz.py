"""Text and messages from outside: whatever they hold, they are read or refused in words."""

import json
from dataclasses import asdict

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from idiolect.core import checkpoint
from idiolect.deploy import compression, node, protocol
from idiolect.deploy.data_summary import ExampleForm
from idiolect.deploy.flare import kits
from idiolect.deploy.protocol import Refused
from idiolect.errors import IdiolectError
from idiolect.experiment.federation_file import load_project
from idiolect.experiment.load import parse_experiment
from idiolect.results import document

quick = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
DEEP = "[" * 20_000

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
EXPERIMENT = (
    'name = "tiny"\nrounds = 2\nseeds = [0, 1]\n[data]\nsource = "embedded"\n'
    'partition = { name = "iid", clients = 3 }\n[model]\nname = "mlr"\n[training]\nlr = 0.1\n'
    '[deploy]\nsecure = false\n[[methods]]\nname = "fedavg"\n'
    'aggregate = { name = "median" }\n'
)
PROJECT = (
    'name = "demo"\n[server]\nhost = "localhost"\nport = 8002\n[[sites]]\nname = "a"\n'
    '[[admins]]\nemail = "lead@example.org"\nrole = "lead"\n'
)


def changed(data, text: str) -> str:
    """Change a text in a few places, as slips and malice would."""
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(text)))
        cut = data.draw(st.integers(0, 6))
        more = data.draw(
            st.sampled_from(["[", "]", "=", '"', "\n", "1e999", "-1", "nan", "{}", "[[", "\x00"])
            | st.text(max_size=4)
        )
        text = text[:place] + more + text[place + cut :]
    return text


def accepted_or_refused(call, *arguments) -> None:
    try:
        call(*arguments)
    except IdiolectError as error:
        assert str(error)


@quick
@given(data=st.data())
def test_any_experiment_is_read_or_refused(data):
    accepted_or_refused(parse_experiment, changed(data, EXPERIMENT))


@quick
@given(key=st.sampled_from(EXPERIMENT.split()), value=values)
def test_an_experiment_with_any_value_is_read_or_refused(key, value):
    text = json.dumps(value)
    accepted_or_refused(parse_experiment, EXPERIMENT, [f"{key.strip('[]')}={text}"])


def test_a_deep_experiment_is_refused():
    for text in (f"name = {DEEP}", "a" + ".a" * 5_000 + " = 1"):
        with pytest.raises(IdiolectError):
            parse_experiment(text)
    accepted_or_refused(parse_experiment, EXPERIMENT, [f"name={DEEP}"])


@quick
@given(data=st.data())
def test_any_project_is_read_or_refused(data, tmp_path):
    path = tmp_path / "project.toml"
    path.write_text(changed(data, PROJECT), encoding="utf-8", errors="replace")
    accepted_or_refused(load_project, path)


@quick
@given(content=st.binary(max_size=80) | values.map(lambda v: json.dumps(v).encode()))
def test_any_kit_result_or_checkpoint_is_read_or_refused(content, tmp_path):
    for name, read in (
        (kits.FILE, kits.read),
        (document.FILE, document.read_document),
        ("one.safetensors", lambda folder: checkpoint.read(folder / "one.safetensors")),
    ):
        (tmp_path / name).write_bytes(content)
        accepted_or_refused(read, tmp_path)


def test_deep_files_of_a_run_are_refused(tmp_path):
    (tmp_path / kits.FILE).write_text(f"role = {DEEP}")
    (tmp_path / document.FILE).write_text(DEEP)
    (tmp_path / "project.toml").write_text(f"name = {DEEP}")
    for read, path in (
        (kits.read, tmp_path),
        (document.read_document, tmp_path),
        (load_project, tmp_path / "project.toml"),
    ):
        with pytest.raises(IdiolectError):
            read(path)


dtypes = st.sampled_from([torch.float32, torch.float16, torch.int32, torch.int64, torch.bool])
shapes = st.lists(st.integers(0, 4), max_size=3)
names = st.sampled_from(["at", "by", "size", "params.w", "params.b", "x"])


@quick
@given(
    leaves=st.dictionaries(names, st.tuples(shapes, dtypes), max_size=4),
    fill=st.integers(-3, 40),
)
def test_any_tensors_are_decoded_or_refused(leaves, fill):
    told = {name: torch.full(shape, fill).to(dtype) for name, (shape, dtype) in leaves.items()}
    params = {"w": torch.zeros(2, 3), "b": torch.zeros(2)}
    form = {"params.w": params["w"], "params.b": params["b"], "size": torch.zeros(())}
    for codec in (compression.Half(), compression.TopK(0.3, params), protocol.UNCOMPRESSED):
        try:
            protocol.fitted(form, protocol.unpack(save(told, {"m": '[1,"yes",{}]'})).leaves, codec)
        except Refused:
            pass


@quick
@given(told=values, key=st.sampled_from(sorted(ExampleForm.__dataclass_fields__)))
def test_any_form_and_any_sums_are_read_or_refused(told, key):
    good = asdict(ExampleForm([2], "float32", ["a", "b"], False, [], None, False))
    for one in (told, {**good, key: told}):
        try:
            ExampleForm.read(one).blank(4)
        except Refused:
            pass
    for one in (told, {"x": told}):
        try:
            node._read_sums(one)
        except Refused:
            pass


def test_a_form_cannot_ask_for_much_memory():
    good = asdict(ExampleForm([2], "float32", ["a", "b"], False, [], None, False))
    for bad in ({"shape": [1 << 23] * 3}, {"dtype": "V1000000000"}, {"dtype": "O"}):
        with pytest.raises(Refused):
            ExampleForm.read({**good, **bad})
