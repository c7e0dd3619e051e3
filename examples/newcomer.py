"""A client that comes after training gets its own model from the finished run."""

import csv
import random
import tempfile
from pathlib import Path

import idiolect

folder = Path(tempfile.mkdtemp())
draw = random.Random(1)


def write(name: str, hospitals: dict[str, float]) -> Path:
    """Write a table of hospitals, each with its own threshold of what makes a patient ill."""
    path = folder / name
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["age", "dose", "label", "client"])
        for hospital, threshold in hospitals.items():
            for _ in range(150):
                age, dose = draw.random(), draw.random()
                rows.writerow([age, dose, "ill" if dose > threshold else "well", hospital])
    return path


write("visits.csv", {"north": 0.3, "south": 0.7, "east": 0.5})
(folder / "visits.toml").write_text("""
name = "visits"
seeds = [0]
rounds = 20

[data]
source = "visits.csv"

[model]
name = "dnn"

[training]
lr = 0.2

[evaluate]
keep_globals = true   # every round's global model, so that a newcomer can choose its teacher

[[methods]]
name = "persfl"
""")
idiolect.run(folder / "visits.toml", out=folder / "run")

late = write("late.csv", {"west": 0.6})
newcomer = idiolect.adapt(folder / "run", late, method="persfl")["newcomers"][0]
own, common = (newcomer["models"][model]["accuracy"] for model in ("personal", "global"))
print(f"{newcomer['client']}: own model {own:.0%}, global model {common:.0%}")
