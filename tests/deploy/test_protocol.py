"""Messages: exact, and refused where anything is not as expected."""

import json
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from idiolect.core import tree
from idiolect.deploy import protocol
from idiolect.deploy.protocol import CODES, Refused


class Pair(NamedTuple):
    left: torch.Tensor
    right: dict[str, torch.Tensor]


def sample():
    weights = {"fc.weight": torch.randn(3, 4), "fc.bias": torch.tensor(0.5)}
    return Pair(torch.arange(6).reshape(2, 3), weights)


def refused(reason, call):
    with pytest.raises(Refused) as caught:
        call()
    assert caught.value.reason == reason
    return str(caught.value)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool]
)
def test_trees_come_back_bit_for_bit(dtype):
    content = {"a": sample(), "b": (torch.ones(2, 0), torch.eye(3).to(dtype)), "c": ()}
    message = protocol.unpack(protocol.pack("yes", {"round": 3}, content))
    back = protocol.fitted(tree.zeros_like(content), message.leaves)
    assert message.kind == "yes" and message.head == {"round": 3}
    for there, here in zip(tree.leaves(back), tree.leaves(content), strict=True):
        assert there.dtype == here.dtype and there.equal(here)


def test_nan_and_infinity_travel_but_are_found():
    content = {"x": torch.tensor([1.0, float("inf")])}
    message = protocol.unpack(protocol.pack("yes", {}, content))
    assert message.leaves["x"].equal(content["x"])
    assert "x" in refused("nonfinite", lambda: protocol.refuse_nonfinite(message.leaves))
    refused("nonfinite", lambda: protocol.refuse_nonfinite({"x": torch.tensor(float("nan"))}))
    protocol.refuse_nonfinite(content, content)  # where a method starts with it, it means "not yet"


def test_equal_messages_are_equal_bytes():
    content = sample()
    view = Pair(content.left.T.contiguous().T, content.right)
    assert protocol.pack("step", {"a": 1, "b": 2}, content) == protocol.pack(
        "step", {"b": 2, "a": 1}, view
    )


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("structure", lambda x: {**x, "more": torch.ones(1)}),
        ("structure", lambda x: {"left": x["left"]}),
        ("shape", lambda x: {**x, "left": x["left"].T.contiguous()}),
        ("dtype", lambda x: {**x, "left": x["left"].float()}),
    ],
)
def test_another_form_is_refused(reason, change):
    form = {"left": torch.zeros(2, 3, dtype=torch.int64), "right": torch.zeros(())}
    message = protocol.unpack(protocol.pack("yes", {}, change(form)))
    refused(reason, lambda: protocol.fitted(form, message.leaves))


def test_size_protocol_and_damage_are_refused():
    blob = protocol.pack("step", {"round": 1}, sample())
    refused("size", lambda: protocol.unpack(blob, len(blob) - 1))
    refused("format", lambda: protocol.unpack(blob[:-1]))
    refused("format", lambda: protocol.unpack("text"))  # type: ignore[arg-type]
    refused("format", lambda: protocol.unpack((1 << 60).to_bytes(8, "little") + blob[8:]))
    other = blob.replace(b"[1,", b"[2,", 1)
    assert other != blob
    refused("protocol", lambda: protocol.unpack(other))


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(noise):
    for blob in (noise, len(noise).to_bytes(8, "little") + noise):
        try:
            protocol.unpack(blob)
        except Refused as error:
            assert error.reason in CODES


def test_an_answer_of_no_carries_one_known_word():
    refused("disk", lambda: protocol.accepted(protocol.unpack(protocol.refusal("disk"))))
    for code in ("secret = 42", ["disk"], None):
        message = protocol.unpack(protocol.pack("no", {"code": code}))
        assert "secret" not in refused("format", lambda m=message: protocol.accepted(m))


def test_a_header_alone_cannot_ask_for_much_memory():
    claim = {"x": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}
    head = json.dumps({"__metadata__": {"m": '[1,"yes",{}]'}, **claim}).encode()
    refused("format", lambda: protocol.unpack(len(head).to_bytes(8, "little") + head))
