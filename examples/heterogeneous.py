"""Different networks for different clients, who teach each other by predictions on public data."""

import tempfile
from pathlib import Path

import idiolect

folder = Path(tempfile.mkdtemp())
(folder / "unequal.toml").write_text("""
name = "unequal"
seeds = [0]
rounds = 6

[data]
source = "embedded"
partition = { name = "ktpfl-all", clients = 8 }
public = { source = "embedded", size = 600 }   # held out of the private digits

[model]
architectures = ["mlr", { name = "dnn", hidden = 50 }]   # dealt in turn

[training]
batch = 20
lr = 0.05
sample = 200

[[methods]]
name = "local"

[[methods]]
name = "ktpfl"
""")
result = idiolect.run(folder / "unequal.toml", out=folder / "run")
for label, own in result["methods"].items():
    seed = own["seeds"][0]
    two = [f"{c['network']} {c['personal']['accuracy']:.0%}" for c in seed["clients"][:2]]
    mean, sent = seed["models"]["personal"]["mean"], seed["traffic"]["bytes_up"] / 1e6
    print(f"{label}: {', '.join(two)}, mean of 8 {mean:.1%}; {sent:.2f} MB of predictions sent up")
