"""A table of your own with a `client` column, from the CSV to every client's accuracy."""

import csv
import random
import tempfile
from pathlib import Path

import idiolect

draw = random.Random(0)
path = Path(tempfile.mkdtemp()) / "visits.csv"
with path.open("w", newline="") as file:
    rows = csv.writer(file)
    rows.writerow(["age", "dose", "label", "client"])
    for hospital, threshold in (("north", 0.3), ("south", 0.7), ("east", 0.5)):
        for _ in range(200):
            age, dose = draw.random(), draw.random()
            rows.writerow([age, dose, "ill" if dose > threshold else "well", hospital])

federation = idiolect.federation(path, seed=0)
for method in ("fedavg", "fedavg-ft"):
    result = idiolect.fit(method, federation, model="mlr", rounds=30, lr=0.5)
    own = [row for row in result.table() if row["model"] == "personal"]
    print(method, {row["client"]: f"{row['accuracy']:.0%}" for row in own})
