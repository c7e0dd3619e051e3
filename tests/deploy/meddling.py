"""Nodes that send rubbish: on the way within this process, or as a real node's false program."""

import itertools

import torch

from idiolect.deploy import protocol
from idiolect.deploy.node_process import InProcess


def leaf(change):
    """Change a report's first tensor."""

    def changed(answer):
        told = protocol.unpack(answer)
        name = next(n for n, x in told.leaves.items() if n.startswith("params.") and x.dim())
        return protocol.pack("yes", told.head, {**told.leaves, name: change(told.leaves[name])})

    return changed


def head(**changes):
    """Change what an answer says it answers."""

    def changed(answer):
        told = protocol.unpack(answer)
        return protocol.pack("yes", {**told.head, **changes}, told.leaves)

    return changed


RUBBISH = {
    "NaN": ("nonfinite", leaf(lambda x: x * float("nan"))),
    "infinity": ("nonfinite", leaf(lambda x: x + float("inf"))),
    "another shape": ("shape", leaf(lambda x: x[:-1])),
    "another type": ("dtype", leaf(lambda x: x.double())),
    "a tensor too many": (
        "structure",
        lambda answer: protocol.pack(
            "yes",
            protocol.unpack(answer).head,
            {**protocol.unpack(answer).leaves, "more": torch.ones(1)},
        ),
    ),
    "cut short": ("format", lambda answer: answer[:-7]),
    "another round": ("round", head(round=77)),
    "another run": ("round", head(run="r2")),
    "oversized": ("size", leaf(lambda x: torch.ones(1 << 19))),  # 2 MB
}
"""What a node may send instead of its report: the code it must be refused with, and the change."""


class Meddler(InProcess):
    """Nodes, one of whose answers to `step` is tampered with on the way."""

    def __init__(self, nodes, site, change, rounds=()):
        super().__init__(nodes)
        self._site, self._change, self._rounds = site, change, rounds
        self.asked = []

    def call(self, site, blob, seconds):
        message = protocol.unpack(blob)
        if message.kind == "step":
            self.asked.append((site, message.head["round"]))
        answer = super().call(site, blob, seconds)
        wanted = not self._rounds or message.head.get("round") in self._rounds
        if site == self._site and message.kind == "step" and wanted:
            return self._change(answer)
        return answer


class Replay:
    """Answers every question after the first with the answer to the first."""

    def __init__(self):
        self._first = None

    def __call__(self, answer):
        self._first = self._first or answer
        return self._first


def install():
    """Make this process, a real node's, a liar: after one honest answer, one of each kind."""
    from idiolect.deploy.node_process import NodeProcess

    honest, replay = NodeProcess.answer, Replay()
    lies = itertools.chain(
        [replay],
        (change for _, change in RUBBISH.values()),
        [replay, lambda answer: {"no": "bytes"}],
        itertools.repeat(lambda answer: answer),
    )

    def answer(self, blob):
        told = honest(self, blob)
        return next(lies)(told) if protocol.unpack(blob).kind == "step" else told

    NodeProcess.answer = answer
