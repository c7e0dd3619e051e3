"""Four methods compared on a CSV with a `client` column: verdict, table, and a page to open."""

import shutil
import tempfile
from pathlib import Path

import idiolect
from idiolect.analysis.report import report

folder = Path(tempfile.mkdtemp())
for name in ("visits.csv", "visits.toml"):
    shutil.copy(Path(__file__).parent / name, folder)

# Fewer seeds and rounds than the file asks for, so that this takes seconds.
changes = ["seeds=[0, 1]", "rounds=10"]
found = idiolect.compare(folder / "visits.toml", changes, out=folder / "run")
print(found["splits"][0]["comparison"]["verdict"]["sentence"])

page, *_ = report(folder / "run")
print(f"report of {page.stat().st_size // 1024} kB: {page.name}")
