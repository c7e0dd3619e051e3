"""Too little memory for a block makes narrower blocks, not a crash: tried with a real limit."""

import json
import subprocess
import sys

CODE = """
import json, resource, sys
import numpy as np, torch
from torch import nn
from idiolect.bench.workloads import federation
from idiolect.methods import FedAvg
from idiolect.engine.architecture import Architecture
from idiolect.engine.backend import Backend
from idiolect.engine.rounds import SeededRun, Simulation

torch.set_num_threads(1)
fed = federation([16] * 32, (1, 16, 16))
class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(256, 256), nn.Linear(256, 10)

    def forward(self, x):
        h = self.into(x.flatten(1))
        return self.out((h.unsqueeze(2) * h.unsqueeze(1)).relu().mean(1))

sim = Simulation(FedAvg(batch=16, lr=0.1), [SeededRun(0, fed.train_data)],
                 {"a": Architecture(Outer)},
                 backend=Backend("vectorised", "cpu", width=int(sys.argv[1])))
# The outer products of a batch are 134 MB for 32 clients, and a step holds that several times over;
# parameters and reports are small.
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
if spare := int(sys.argv[2]):
    resource.setrlimit(resource.RLIMIT_AS, (used + (spare << 20), resource.RLIM_INFINITY))
for _ in range(2):
    sim.advance()
wide = [own._train_plans.clients for own in sim.groups[0]._active["step"]]
total = float(sum(leaf.double().abs().sum() for leaf in sim.states[0].values()))
print(json.dumps({"wide": wide, "total": total}))
"""


def run(width, spare):
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(width), str(spare)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-800:]
    return json.loads(done.stdout)


def test_a_block_that_does_not_fit_is_halved_until_it_does():
    free, tight = run(32, 0), run(32, 300)
    assert free["wide"] == [32]
    assert max(tight["wide"]) < 32
    assert abs(free["total"] - tight["total"]) < 1e-5 * free["total"]
