"""Named tables: four real hospitals that come with idiolect, and two more from a data directory."""

from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from idiolect.data.dataset import Dataset, check_value
from idiolect.data.own import read
from idiolect.errors import DataError

HEART = (
    "Heart disease of 920 patients of four hospitals: Cleveland, Budapest, Zurich and Basel, Long "
    "Beach (Janosi, Steinbrunn, Pfisterer, Detrano 1988; UCI; CC BY 4.0), shipped with idiolect."
)
BRCA = (
    "Survival of 1,088 patients with breast cancer in six regions (The Cancer Genome Atlas; "
    "unrestricted clinical data, features and folds of FLamby)."
)
SCHOOL = (
    "Examination scores of 15,362 pupils of 139 London schools (Inner London Education Authority; "
    "licence not stated, research use)."
)

_NUMBERS = ("age", "sex", "trestbps", "chol", "fbs", "thalach", "exang", "oldpeak")
_NEVER_ZERO = ("trestbps", "chol")


def heart(folds: str = "drawn") -> Dataset:
    """Load the heart hospitals: is there disease, and who was asked.

    `folds = "flamby"` is FLamby's Fed-Heart-Disease instead: its patients (740 without gaps in the
    ten columns that it keeps), 13 features, fixed test rows, and its scaling, which every hospital
    takes from its own training rows.
    """
    check_value("folds", folds, ("drawn", "flamby"))
    table = _csv(resources.files("idiolect.data").joinpath("embedded/heart.csv").read_bytes())
    sick = np.asarray(table["target"]) > 0
    disease = np.where(sick, "yes", "no")
    if folds == "flamby":
        return _flamby(table, disease)
    import pyarrow.compute

    # A pressure or cholesterol of 0 was not measured; in Switzerland that is everyone's.
    for name in _NEVER_ZERO:
        found = table[name]
        known = pyarrow.compute.if_else(pyarrow.compute.equal(found, 0), None, found)
        table = table.set_column(table.column_names.index(name), name, known)
    table = table.drop_columns(["target", "flamby"]).append_column("disease", [disease])
    coded = dict.fromkeys(("cp", "restecg", "slope", "thal"), "category")
    return _named("heart", read(table, label="disease", client="hospital", columns=coded), HEART)


def _flamby(table: Any, disease: Any) -> Dataset:
    fold = np.asarray(table["flamby"])
    kept = fold != "incomplete"
    hospital = np.asarray(table["hospital"])[kept]
    columns = {name: np.asarray(table[name], np.float64)[kept] for name in _NUMBERS}
    for name, codes in (("cp", (2, 3, 4)), ("restecg", (1, 2))):
        given = np.asarray(table[name], np.float64)[kept]
        columns |= {f"{name} {code}": (given == code).astype(np.float64) for code in codes}
    train = fold[kept] == "train"
    for name, values in columns.items():
        for own in np.unique(hospital):
            rows = hospital == own
            seen = values[rows & train]
            values[rows] = (values[rows] - seen.mean()) / (seen.std(ddof=1) + 1e-9)
        columns[name] = values.astype(np.float32)
    import pyarrow

    laid = {**columns, "disease": disease[kept], "hospital": hospital, "split": fold[kept]}
    unscaled = {"*": {"type": "number", "scale": False}}
    dataset = read(pyarrow.table(laid), label="disease", client="hospital", columns=unscaled)
    return _named("heart", dataset, f"{HEART} Patients, features and folds of FLamby.")


def read_brca(path: Path) -> Dataset:
    """Read TCGA-BRCA: days to death or to when a patient was last seen, FLamby's folds."""
    table = _csv(path.read_bytes())
    table = table.filter(np.asarray(table["fold"]) != "unused")
    dataset = read(
        table.rename_columns({"fold": "split"}),
        label=("days", "event"),
        client="region",
        task="survival",
    )
    return _named("tcga_brca", dataset, BRCA)


def read_school(path: Path) -> Dataset:
    """Read the examination scores: a number to predict for each pupil."""
    dataset = read(path, label="score", client="school", task="number")
    return _named("school", dataset, SCHOOL)


def _csv(content: bytes) -> Any:
    import pyarrow
    from pyarrow import csv

    try:
        return csv.read_csv(pyarrow.BufferReader(content))
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"the table is damaged ({error}); fetch it again") from error


def _named(name: str, dataset: Dataset, provenance: str) -> Dataset:
    return replace(dataset, name=name, provenance=provenance)
