"""Fewer bytes on the wire: what is rounded or left out, and that nothing left out is lost."""

import federations as fed
import pytest
import torch

from idiolect.core import checkpoint
from idiolect.deploy import protocol
from idiolect.deploy.compression import Half, TopK
from idiolect.deploy.node_process import InProcess
from idiolect.deploy.protocol import Refused
from idiolect.errors import ConfigError, MethodError


def test_half_precision_keeps_eleven_bits_and_refuses_what_does_not_fit():
    leaves = {"x": torch.tensor([1.0, -3.14159, 65504.0, float("inf")]), "n": torch.tensor([7])}
    sent = Half().encode(leaves)
    assert sent["x"].dtype == torch.float16 and sent["n"] is leaves["n"]
    back = Half().decode(sent, leaves)
    assert back["x"].dtype == torch.float32
    assert (back["x"][:3] / leaves["x"][:3] - 1).abs().max() <= 2.0**-11
    with pytest.raises(Refused) as caught:
        Half().encode({"x": torch.tensor(70000.0)})
    assert caught.value.reason == "range"


def report(*values):
    return {"params.w": torch.tensor(values), "size": torch.tensor(5.0)}


BASE = {"w": torch.tensor([10.0, 10.0, 10.0, 10.0])}


def test_the_largest_changes_are_sent_and_the_rest_comes_later():
    """Changes 3, -1, 0.5, -4: half of them is 3 and -4; then -1 and 0.5 + 0.25 wait no longer."""
    first = TopK(0.5, BASE)
    sent = first.encode(report(13.0, 9.0, 10.5, 6.0))
    assert sent["at"].tolist() == [0, 3] and sent["by"].tolist() == [3.0, -4.0]
    assert first.left["left"].tolist() == [0.0, -1.0, 0.5, 0.0]
    seen = TopK(0.5, BASE).decode(sent, report(0.0, 0.0, 0.0, 0.0))
    assert seen["params.w"].tolist() == [13.0, 10.0, 10.0, 6.0] and float(seen["size"]) == 5
    second = TopK(0.5, BASE, first.left)
    sent = second.encode(report(10.0, 10.0, 10.25, 10.0))
    assert sent["at"].tolist() == [1, 2] and sent["by"].tolist() == [-1.0, 0.75]
    assert second.left["left"].tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("structure", {"at": torch.tensor([0, 4], dtype=torch.int32)}),
        ("structure", {"at": torch.tensor([-1, 2], dtype=torch.int32)}),
        ("structure", {"at": torch.tensor([2, 2], dtype=torch.int32)}),
        ("structure", {"more": torch.ones(1)}),
        ("shape", {"at": torch.tensor([0], dtype=torch.int32)}),
        ("dtype", {"at": torch.tensor([0, 1])}),
        ("dtype", {"by": torch.ones(2, dtype=torch.float64)}),
    ],
)
def test_places_that_do_not_fit_are_refused(reason, change):
    sent = {**TopK(0.5, BASE).encode(report(13.0, 9.0, 10.5, 6.0)), **change}
    with pytest.raises(Refused) as caught:
        TopK(0.5, BASE).decode(sent, report(0.0, 0.0, 0.0, 0.0))
    assert caught.value.reason == reason


def traffic(found):
    return found["methods"]["FedAvg"]["seeds"][0]["traffic"]


def test_bytes_shrink_and_results_stay_near(tmp_path):
    """A place and a change weigh 8 bytes, a number 4: a tenth of the changes is a fifth of them."""
    found, states = {}, {}
    for name, sets in {
        "plain": (),
        "fp16": ("deploy.compress=fp16",),
        "all": ("deploy.compress=topk", "deploy.keep=1.0"),
        "tenth": ("deploy.compress=topk",),
    }.items():
        wanted = fed.experiment("fedavg", sets=sets)
        found[name] = fed.served(wanted, fed.inside(tmp_path / name / "n"), tmp_path / name)
        states[name] = fed.server_state(tmp_path / name, "FedAvg")
    up, down = (
        {name: traffic(one)[way] / traffic(found["plain"])[way] for name, one in found.items()}
        for way in ("bytes_up", "bytes_down")
    )
    assert 0.5 < up["fp16"] < 0.53 and 0.5 < down["fp16"] < 0.53
    assert 0.2 < up["tenth"] < 0.23 and down["tenth"] == 1
    assert fed.largest_gap(states["plain"], states["fp16"]) < 2e-3
    assert fed.largest_gap(states["plain"], states["all"]) < 1e-6
    assert fed.largest_gap(states["plain"], states["tenth"]) > 1e-4  # it is another run
    (path,) = (tmp_path / "tenth" / "n" / "site-0").glob("state/**/*.safetensors")
    named, _ = checkpoint.read(path)
    assert float(named["left.left"].abs().max()) > 0


PUBLIC = fed.TOML.replace("size = 12", "size = 480")


@pytest.mark.parametrize(
    ("name", "sets", "factor"),
    [
        ("fedper", ("deploy.compress=fp16",), (0.5, 0.5)),
        ("ktpfl", ("deploy.compress=fp16", "methods.KT-pFL.sample=480"), (0.5, 0.5)),
        ("fedper", ("deploy.compress=topk", "deploy.keep=0.3"), (1.0, 0.6)),
    ],
)
def test_bytes_are_the_simulators_times_what_a_codec_promises(name, sets, factor, tmp_path):
    """Half of each float; of a report's change three in ten, with their places as heavy again."""
    wanted = fed.experiment(name, sets=sets, toml=PUBLIC)
    content = fed.simulated(wanted, tmp_path / "simulated")
    found = fed.served(wanted, fed.inside(tmp_path / "nodes"), tmp_path / "served")
    beside = fed.bytes_beside(found, content, wanted.methods[0].label, factor)
    assert len(beside) == 2 and max(beside) < 0.05


class Twice(InProcess):
    """Asks for every step twice, as after a lost answer."""

    def call(self, site, blob, seconds):
        first = super().call(site, blob, seconds)
        if protocol.unpack(blob).kind == "step":
            assert super().call(site, blob, seconds) == first
        return first


def test_a_repeated_message_leaves_nothing_out_twice(tmp_path):
    wanted = fed.experiment("fedavg", sets=("deploy.compress=topk",))
    fed.served(wanted, Twice(fed.inside(tmp_path / "a")._nodes), tmp_path / "twice")
    fed.served(wanted, fed.inside(tmp_path / "b"), tmp_path / "once")
    states = [fed.server_state(tmp_path / kind, "FedAvg") for kind in ("once", "twice")]
    assert fed.largest_gap(*states) == 0


def test_what_cannot_be_compressed_is_refused(tmp_path):
    wanted = fed.experiment("ktpfl", sets=("deploy.compress=topk",))
    with pytest.raises(MethodError, match="does not report the very parameters it is sent"):
        fed.served(wanted, fed.inside(tmp_path / "n"), tmp_path / "served")
    with pytest.raises(ConfigError, match="exclude each other"):
        fed.experiment("fedavg", sets=("deploy.compress=fp16", "deploy.secure=true"))
