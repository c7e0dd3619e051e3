"""Named tables: four real hospitals that come with idiolect, and two more from a data directory."""

import io
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from idiolect.data.dataset import Dataset, check_value
from idiolect.data.own import read
from idiolect.errors import ConfigError, DataError

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


def heart(folds: str = "drawn", features: str = "all", scaling: str = "hospital") -> Dataset:
    """Load the heart hospitals, where the question is whether there is disease.

    `folds = "flamby"` keeps the patients of FLamby's Fed-Heart-Disease (740 without gaps in the ten
    columns that it uses) and its test rows; `features = "flamby"` also its 13 features and its
    scaling, which every hospital takes from its own training rows (`scaling = "joint"`: from all).
    """
    check_value("folds", folds, ("drawn", "flamby"))
    check_value("features", features, ("all", "flamby"))
    check_value("scaling", scaling, ("hospital", "joint"))
    table = _csv(resources.files("idiolect.data").joinpath("embedded/heart.csv").read_bytes())
    table = table.append_column("disease", [np.where(np.asarray(table["target"]) > 0, "yes", "no")])
    if folds == "flamby":
        table = table.filter(np.asarray(table["flamby"]) != "incomplete")
        table = table.append_column("split", table["flamby"])
    if features == "flamby":
        return _flamby(table, scaling == "joint")
    import pyarrow

    # A pressure or cholesterol of 0 was not measured; in Switzerland that is everyone's.
    for place, name in enumerate(table.column_names):
        if name in _NEVER_ZERO:
            values = np.asarray(table[name], np.float64)
            known = pyarrow.array(np.where(values == 0, np.nan, values), from_pandas=True)
            table = table.set_column(place, name, known)
    table = table.drop_columns(["target", "flamby"])
    coded = dict.fromkeys(("cp", "restecg", "slope", "thal"), "category")
    return _named("heart", read(table, label="disease", client="hospital", columns=coded), HEART)


def _flamby(table: Any, joint: bool) -> Dataset:
    """Take FLamby's features, scaled by training rows: of the patient's own hospital, or of all."""
    if "split" not in table.column_names:
        raise ConfigError('features = "flamby" are scaled by FLamby\'s folds; add folds = "flamby"')
    import pyarrow

    hospital, train = np.asarray(table["hospital"]), np.asarray(table["split"]) == "train"
    columns: dict[str, Any] = {name: np.asarray(table[name], np.float64) for name in _NUMBERS}
    for name, codes in (("cp", (2, 3, 4)), ("restecg", (1, 2))):
        given = np.asarray(table[name], np.float64)
        columns |= {f"{name} {code}": (given == code).astype(np.float64) for code in codes}
    for name, values in columns.items():
        scaled = np.zeros(len(values), np.float32)
        for own in np.unique(hospital):
            rows = (hospital == own) | joint
            seen = values[rows & train]
            scaled[rows] = (values[rows] - seen.mean()) / (seen.std(ddof=1) + 1e-9)
        columns[name] = scaled
    beside = {name: table[name] for name in ("disease", "hospital", "split")}
    unscaled = {"*": {"type": "number", "scale": False}}
    dataset = read(
        pyarrow.table({**columns, **beside}), label="disease", client="hospital", columns=unscaled
    )
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
        return csv.read_csv(io.BytesIO(content))
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"the table is damaged ({error}); fetch it again") from error


def _named(name: str, dataset: Dataset, provenance: str) -> Dataset:
    return replace(dataset, name=name, provenance=provenance)
