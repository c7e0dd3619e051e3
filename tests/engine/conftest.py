"""A stand-in for CUDA's graphs: vectorised rounds on a CPU are recorded and replayed.

It notes every operation of torch with its very tensors, and does them again on replay: a value that
was baked in, or a buffer that is not filled anew, shows. What only a GPU has, such as memory that
is used again, is for `benchmarks/gpu_check.py`.
"""

import contextlib
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from idiolect.core import client, graph_scan
from idiolect.engine import block_runner, local_group
from idiolect.kernels import cuda_graph
from idiolect.kernels.deferred import DeferredTensor

GPU = torch.device("cuda")


class Graph(TorchDispatchMode):
    """Notes operations while it is captured. Unlike CUDA it does them, and undoes what it wrote."""

    capturing, replays = False, 0

    def capture_begin(self, pool, capture_error_mode):
        self.noted, self.before = [], []
        Graph.capturing = True
        self.__enter__()

    def capture_end(self):
        self.__exit__(None, None, None)
        Graph.capturing = False
        for place, value in reversed(self.before):
            place.copy_(value)
        self.before = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if any(isinstance(one, DeferredTensor) for one in tree_leaves((args, kwargs))):
            with self:  # what it is computed of is noted, not what it was
                return DeferredTensor.__torch_dispatch__(op, types, args, kwargs)
        aliases = [own.alias_info for own in op._schema.returns]
        given = tree_map_only(torch.Tensor, torch.detach, (args, kwargs or {}))  # same memory
        takes = op._schema.arguments
        named = [*zip(takes, given[0], strict=False)]
        named += [(own, given[1][own.name]) for own in takes if own.name in given[1]]
        written = [one for name, one in named if name.alias_info and name.alias_info.is_write]
        self.before += [(one, one.clone()) for one in tree_leaves(written)]
        made = op(*args, **(kwargs or {}))
        views = not written and all(own is not None for own in aliases)
        if not views and torch.Tag.inplace_view not in op.tags:
            made_as = tree_map_only(torch.Tensor, torch.detach, made)
            self.noted.append((op, *given, None if written else made_as))
        return made

    def replay(self):
        Graph.replays += 1
        for op, args, kwargs, results in self.noted:
            again = op(*args, **kwargs)
            for old, new in zip(tree_leaves(results), tree_leaves(again), strict=False):
                if isinstance(old, torch.Tensor):
                    old.copy_(new)


class Stream:
    count = 0

    def __init__(self, priority=0):
        Stream.count += 1
        self.stream_id = Stream.count

    def wait_stream(self, other):
        pass


@pytest.fixture
def recorded(monkeypatch):
    """Let vectorised rounds on a CPU be recorded as on CUDA; tell how long pieces are."""
    cuda = {
        "CUDAGraph": Graph,
        "graph_pool_handle": lambda: "a pool",
        "current_stream": Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: Graph.capturing,
        "mem_get_info": lambda: (8, 9),
        "memory_reserved": lambda: 7,
    }
    for name, stand_in in cuda.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    begin, worth = block_runner.BlockRunner.__init__, graph_scan.GraphScan.worth

    def graphed(self, *given, **options):
        begin(self, *given, **options)
        if options["stacked"]:
            self._graphs = graph_scan.GraphScan()

    monkeypatch.setattr(block_runner.BlockRunner, "__init__", graphed)
    monkeypatch.setattr(
        graph_scan.GraphScan,
        "worth",
        lambda self, steps, device, varies=False: worth(self, steps, GPU, varies),
    )
    monkeypatch.setattr(client, "_span", lambda plan: 3)
    monkeypatch.setattr(local_group, "_TINY", 0)  # several blocks of a tiny network
    monkeypatch.setattr(Graph, "replays", 0)
    monkeypatch.setattr(local_group, "BESIDE", [])  # streams of this test are no other's
    monkeypatch.setattr(cuda_graph, "_ALIVE", weakref.WeakSet())

    def pieces(steps, worth):
        monkeypatch.setattr(graph_scan, "PIECE", steps)
        monkeypatch.setattr(graph_scan, "_WORTH", worth)

    return pieces
