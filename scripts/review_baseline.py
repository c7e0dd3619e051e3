"""Tell what a linear model makes of the reviews of Combinations' Table 3.

    python scripts/review_baseline.py DATA_DIR                           # some minutes on one core
    python scripts/review_baseline.py DATA_DIR --amazon CSV [--write TO] # Amazon's whole file
    python scripts/reproduce_combinations.py write                       # puts it into the page

Each client alone: logistic regression on the weighted counts of words and pairs of words. Its
strength is chosen on an eighth of the training rows, as many as validate the networks' runs, which
then train nothing. Scored on the test rows after training on a part of the others; and after
copies of some test rows were put into training, as happens where the same review stands in a file
several times and rows are divided at random: **no result of a method**, but what that would be
worth. Needs scikit-learn and pandas (the `dev` extra).

DATA_DIR has 9,950 of Amazon's reviews; CSV is all of them, as Kaggle has them
(datafiniti/consumer-reviews-of-amazon-products, 1429_1.csv). `--write` puts cross_sector with them
in the place of the 9,950 into a folder for IDIOLECT_DATA, for networks to train on.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import pandas
import sklearn
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

RESULTS = Path(__file__).resolve().parent.parent / "results" / "reviews.json"
SETS = {"cross_sector": (), "cross_product": ("phones_in",)}  # without these clients
STRENGTHS = (0.3, 1.0, 3.0, 10.0)
PARTS = (0.125, 0.25, 0.5, 1.0)
COPIES = (0.1, 0.25, 0.5)
WHOLE = "cross_sector_whole_amazon"
SEED = 0  # of one draw of validation rows, parts and copies; the fit itself draws nothing
VALIDATION = 0.125


def accuracy(train: pandas.DataFrame, test: pandas.DataFrame, strength: float) -> float:
    """Train on some reviews, score on others."""
    words = TfidfVectorizer(ngram_range=(1, 2), min_df=2, sublinear_tf=True)
    model = LogisticRegression(C=strength, max_iter=300)
    model.fit(words.fit_transform(train.text), train.label)
    return float((model.predict(words.transform(test.text)) == test.label.to_numpy()).mean())


def client(rows: pandas.DataFrame, test: pandas.DataFrame, seed: int) -> dict[str, Any]:
    """Find all figures of one client, for one draw of validation rows, parts and copies."""
    val = rows.sample(frac=VALIDATION, random_state=seed)
    train = rows.drop(val.index)
    tried = {strength: accuracy(train, val, strength) for strength in STRENGTHS}
    best = max(tried, key=lambda strength: tried[strength])
    return {
        "majority": float((test.label == rows.label.mode()[0]).mean()),
        "strength": best,
        "parts": {
            str(part): accuracy(train.sample(frac=part, random_state=seed), test, best)
            for part in PARTS
        },
        "copies": {
            str(share): accuracy(
                pandas.concat([train, test.sample(frac=share, random_state=seed)]), test, best
            )
            for share in COPIES
        },
    }


def whole_amazon(csv: Path) -> tuple[pandas.DataFrame, pandas.DataFrame]:
    """Divide all of Amazon's reviews as DATA_DIR's are: a fifth of each label is for tests."""
    rows = pandas.read_csv(csv, low_memory=False).dropna(subset=["reviews.text", "reviews.rating"])
    labels = rows["reviews.rating"].astype("int64") - 1
    all_ = pandas.DataFrame({"text": rows["reviews.text"], "label": labels, "client": "amazon"})
    test = all_.groupby("label", group_keys=False).sample(frac=0.2, random_state=SEED)
    return all_.drop(test.index), test


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--amazon", type=Path, metavar="CSV")
    parser.add_argument("--write", type=Path, metavar="TO")
    args = parser.parse_args()
    found: dict[str, Any] = json.loads(RESULTS.read_text())
    about = {"seeds": [SEED], "versions": {"sklearn": sklearn.__version__}}
    if args.amazon:
        parts = whole_amazon(args.amazon)
        clients = {**found["cross_sector"]["clients"], "amazon": client(*parts, SEED)}
        found[WHOLE] = {**about, "clients": clients}
        for part, own in zip(("train", "test"), parts, strict=True) if args.write else ():
            rows = pandas.read_parquet(args.data / "cross_sector" / f"{part}.parquet")
            (to := args.write / "cross_sector").mkdir(parents=True, exist_ok=True)
            both = pandas.concat([own, rows[rows.client != "amazon"]], ignore_index=True)
            both.to_parquet(to / f"{part}.parquet", index=False)
    else:
        _all(args.data, found, about)
    RESULTS.write_text(json.dumps(found, sort_keys=True) + "\n")


def _all(data: Path, found: dict[str, Any], about: dict[str, Any]) -> None:
    """Find the figures of every client of both sets."""
    for name, left_out in SETS.items():
        train, test = (pandas.read_parquet(data / name / f"{p}.parquet") for p in ("train", "test"))
        found[name] = {**about, "clients": {}}
        for one in sorted(set(train.client) - set(left_out)):
            rows, own = train[train.client == one], test[test.client == one]
            found[name]["clients"][one] = figures = client(rows, own, SEED)
            print(name, one, figures, flush=True)


if __name__ == "__main__":
    main()
