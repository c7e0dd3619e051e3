"""Fewer bytes: half precision both ways, or only the largest changes of a report.

What is left out of a report is not lost: the node adds it to its next update (error feedback), so
that small changes are sent once they have grown.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from idiolect.core import tree
from idiolect.core.method import Report, Sent
from idiolect.core.tree import Tree
from idiolect.deploy.protocol import UNCOMPRESSED, Codec, Refused
from idiolect.errors import MethodError
from idiolect.experiment.schema import Deployment

_LEFT = "left"  # the name of what was left out, in the node's state


class Half:
    """Floats as 16 bits: half the bytes, three decimal digits."""

    name = "fp16"

    def encode(self, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        """Round; what does not fit is refused, as it would arrive as infinity."""
        made = {}
        for name, leaf in leaves.items():
            made[name] = leaf.half() if leaf.dtype in (torch.float32, torch.float64) else leaf
            if bool((torch.isfinite(leaf) & ~torch.isfinite(made[name])).any()):
                raise Refused(
                    "range", f"{name} holds a number beyond 65504, too large for compress = fp16"
                )
        return made

    def decode(self, leaves: dict[str, Tensor], form: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Widen what was rounded; anything else stays, to be refused by its type."""

        def widened(name: str, leaf: Tensor) -> Tensor:
            wanted = form[name].dtype if name in form else leaf.dtype
            rounded = leaf.dtype == torch.float16
            return leaf.to(wanted) if rounded and wanted.is_floating_point else leaf

        return {name: widened(name, leaf) for name, leaf in leaves.items()}


class TopK:
    """Of a report's change of what was sent, the largest share; the rest waits on the node."""

    name = "topk"

    def __init__(self, keep: float, base: Tree, left: Mapping[str, Tensor] | None = None) -> None:
        """`base`: what the report is a change of; `left`: what was left out before."""
        self._keep = keep
        self._base = _flat(tree.named(base))
        self.left: Mapping[str, Tensor] = left or {_LEFT: torch.zeros_like(self._base)}

    def encode(self, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        """Pick the largest changes, and remember what they leave out."""
        change = _flat(_params(leaves)) - self._base + self.left[_LEFT]
        at = change.abs().topk(self._count).indices.sort().values
        rest = change.clone()
        rest[at] = 0.0
        self.left = {_LEFT: rest}
        return {"at": at.to(torch.int32), "by": change[at], "size": leaves["size"]}

    def decode(self, leaves: dict[str, Tensor], form: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add the changes to what was sent."""
        if set(leaves) != {"at", "by", "size"}:
            raise Refused("structure", f"expected places, changes and size, got {sorted(leaves)}")
        at, by, count = leaves["at"], leaves["by"], self._count
        if at.dtype != torch.int32 or by.dtype != self._base.dtype:
            raise Refused("dtype", f"places are {at.dtype} and changes {by.dtype}")
        if at.shape != (count,) or by.shape != (count,):
            raise Refused("shape", f"{tuple(at.shape)} places, expected {count}")
        place = at.long()
        if bool((place < 0).any() | (place >= len(self._base)).any() | (place.diff() <= 0).any()):
            raise Refused("structure", "places that do not exist, or in another order")
        values, start, made = self._base.clone(), 0, {"size": leaves["size"]}
        values[place] += by
        for name, leaf in sorted(_params(form).items()):
            made[f"params.{name}"] = values[start : start + leaf.numel()].reshape(leaf.shape)
            start += leaf.numel()
        return made

    @property
    def _count(self) -> int:
        return max(1, math.ceil(self._keep * len(self._base)))


def codec_of(deploy: Deployment) -> Codec:
    """Choose what is done to messages both ways; `topk` is for reports alone, by `TopK`."""
    return Half() if deploy.compress == "fp16" else UNCOMPRESSED


def refuse_unfit(label: str, deploy: Deployment, sent: Sent, report: Tree) -> None:
    """Refuse `topk` for reports that are no change of what was sent."""
    if deploy.compress != "topk":
        return
    base = {name: (leaf.shape, leaf.dtype) for name, leaf in tree.named(sent.shared).items()}
    own = tree.named(report.params) if isinstance(report, Report) else {}
    if not own or base != {name: (leaf.shape, leaf.dtype) for name, leaf in own.items()}:
        raise MethodError(
            f"{label} does not report the very parameters it is sent, so compress = 'topk' cannot "
            "tell their change; use compress = 'fp16', or leave it out"
        )
    if len({leaf.dtype for leaf in own.values()}) > 1:
        raise MethodError(f"{label} reports numbers of several types; use compress = 'fp16'")


def _params(leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefix = "params."
    return {n.removeprefix(prefix): leaf for n, leaf in leaves.items() if n.startswith(prefix)}


def _flat(leaves: Mapping[str, Tensor]) -> Tensor:
    """Lay leaves end to end, by name."""
    return torch.cat([leaf.detach().cpu().reshape(-1) for _, leaf in sorted(leaves.items())])
