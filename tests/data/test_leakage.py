"""Test rows are poisoned before anything is fitted to data: no trained number may move by a bit.

The rows are changed in the file that a run reads, so scaling, vocabulary and the size of a network
are made from what was changed, as they would be for a user.
"""

import csv
import dataclasses

import numpy as np
import pytest
import torch

import idiolect
from idiolect.core import tree
from idiolect.data import federate, load, read
from idiolect.data.dataset import normalised
from idiolect.experiment.build import build_jobs
from idiolect.experiment.load import parse_experiment
from idiolect.experiment.train import train
from idiolect.results import run_files

SEEDS = (0, 1)
TOML = """
name = "poisoned"
seeds = {seeds}
rounds = 2
[backend]
width = 8
[data]
source = "{source}"
{data}
[model]
{model}
[training]
batch = 4
lr = 0.05
[[methods]]
name = "fedavg"
[[methods]]
name = "ditto"
"""
TABLE = ('normalise = "{how}"', 'name = "mlr"')
IMAGES = ('normalise = "{how}"', 'name = "mlr"')
WORDS = (
    "options = {{ length = 5, vocabulary = 60 }}",
    'name = "kim-cnn"\nembedding = 4\nfilters = 2',
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("IDIOLECT_CACHE", str(tmp_path / "cache"))


def write_table(path, poison=()):
    draw = np.random.default_rng(3)
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["age", "dose", "label", "client"])
        for row in range(60):
            values = draw.normal(loc=(50, 2), scale=(9, 0.5))
            label = "ab"[int(values[1] > 2)]
            values = values * (1000, -7) if row in poison else values
            out.writerow([*values, label, f"clinic {row % 3}"])
    return path


def write_typed(path, poison=()):
    """Write numbers with gaps, categories, dates: poisoned rows would change all that is fitted."""
    draw = np.random.default_rng(5)
    with path.open("w", newline="") as file:
        out = csv.writer(file, delimiter=";")
        out.writerow(["age", "dose", "ward", "seen", "label", "client"])
        for row in range(60):
            age, dose = draw.normal(loc=(50, 2), scale=(9, 0.5))
            gap, ward, day = draw.random() < 0.3, "abc"[draw.integers(3)], draw.integers(1, 28)
            own = ["NA" if gap else age, dose, ward, f"2020-01-{day:02d}"]
            if row in poison:
                own = [1e6, "?", f"new, ward {row % 2}", f"2031-12-{day:02d}"]
            out.writerow([*own, "ab"[int(dose > 2)], f"clinic {row % 3}"])
    return path


def write_images(path, poison=()):
    draw = np.random.default_rng(4)
    x = draw.integers(0, 90, (60, 1, 4, 4)).astype(np.uint8)
    y, client = np.arange(60) % 2, np.arange(60) // 2 % 3
    x[y == 1, :, :2] += 60
    x[list(poison)] = 255 - x[list(poison)] // 2
    np.savez(path, x=x, y=y, client=client)
    return path


def write_text(path, poison=()):
    lines = ["text,label,client"]
    for row in range(60):
        word = ("good", "bad")[row % 2]
        text = f"{word} thing n{row % 7} {word}"
        if row in poison:  # words that no other row has, and one that would become frequent
            text = f"zebra x{row} y{row} zebra zebra"
        lines.append(f"{text},{row % 2},user {row // 2 % 3}")
    path.write_text("\n".join(lines) + "\n")
    return path


KINDS = {
    "typed": (write_typed, "own.csv", ("", 'name = "mlr"'), ("",)),
    "table": (write_table, "own.csv", TABLE, ("none", "unit", "feature")),
    "images": (write_images, "own.npz", IMAGES, ("none", "unit", "channel", "pixel", "feature")),
    "text": (write_text, "own.csv", WORDS, ("",)),
}
CASES = [(kind, how) for kind, (*_, hows) in KINDS.items() for how in hows]


def trained(path, kind, how, seeds):
    """Train on a file; return each method's models, the personal ones too, and what is scored."""
    data, model = KINDS[kind][2]
    text = TOML.format(
        source=path.as_posix(), data=data.format(how=how), model=model, seeds=list(seeds)
    )
    made, _ = build_jobs(parse_experiment(text))
    done = [train(job) for job in made]
    return (
        [tree.named(one.deployed) for one in done],
        [one.outcome.final["personal/loss"] for one in done],
        made[0].federations,
    )


def assert_equal(left, right):
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        for name, leaf in one.items():
            if isinstance(leaf, torch.Tensor):
                assert torch.equal(leaf, other[name]), name


@pytest.mark.parametrize(("kind", "how"), CASES)
def test_poisoned_test_rows_of_a_file_move_no_weight(tmp_path, kind, how):
    """For each seed alone all its test rows; for both together, those that are test under both."""
    write, name, *_ = KINDS[kind]
    clean = write(tmp_path / name)
    models, _, held = trained(clean, kind, how, SEEDS)
    tests = [np.concatenate(one.test) for one in held]
    assert set(tests[0].tolist()) != set(tests[1].tolist())
    (tmp_path / "foul").mkdir()
    common = np.intersect1d(*tests).tolist()
    assert common
    foul = write(tmp_path / "foul" / name, common)
    assert_equal(models, trained(foul, kind, how, SEEDS)[0])
    for seed, rows in zip(SEEDS, tests, strict=True):
        alone, scores, _ = trained(clean, kind, how, [seed])
        foul = write(tmp_path / "foul" / name, rows.tolist())
        poisoned, other, _ = trained(foul, kind, how, [seed])
        assert_equal(alone, poisoned)
        # The poison was there: what is scored on it has changed.
        assert any((a != b).any() for a, b in zip(scores, other, strict=True))


@pytest.mark.parametrize("how", ["channel", "pixel"])
def test_seeds_trained_together_are_scaled_as_each_alone(tmp_path, how):
    """Stacked seeds whose scaling differs give what each gives by itself."""
    path = write_images(tmp_path / "own.npz")
    together, _, held = trained(path, "images", how, SEEDS)
    assert not np.array_equal(held[0].dataset.shift, held[1].dataset.shift)
    assert held[0].dataset.x is held[1].dataset.x  # one copy of the examples
    for place, seed in enumerate(SEEDS):
        alone = trained(path, "images", how, [seed])[0]
        for one, both in zip(alone, together, strict=True):
            own = {name: leaf for name, leaf in both.items() if name.startswith(f"{place}.")}
            assert len(own) == len(one)
            for name, leaf in one.items():
                if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                    assert torch.allclose(leaf, own[f"{place}{name[1:]}"], atol=1e-6), name


SOURCES = [
    ("embedded", {}, "iid", {"clients": 5}, ("channel", "pixel", "feature")),
    ("synthetic", {"clients": 5, "max_size": 60}, "natural", {}, ("feature",)),
]


@pytest.mark.parametrize(
    ("source", "options", "partition", "more", "how"),
    [(*case, how) for *case, hows in SOURCES for how in hows],
)
@pytest.mark.parametrize("split", [(0.6, 0.2, 0.2), (0.5, 0.0, 0.5)])
def test_the_scaling_of_a_source_is_of_training_rows(source, options, partition, more, how, split):
    raw = load(source, **options)
    scalings = []
    for seed in SEEDS:
        held = federate(normalised(raw, how), partition, seed, split, **more)
        others = np.concatenate([*held.val, *held.test])
        x = np.array(raw.x)
        x[others] = 255 - x[others] if x.dtype == np.uint8 else 1000 * x[others] + 7
        foul = dataclasses.replace(raw, x=x)
        again = federate(normalised(foul, how), partition, seed, split, **more)
        assert np.array_equal(held.dataset.shift, again.dataset.shift)
        assert np.array_equal(held.dataset.scale, again.dataset.scale)
        train = np.concatenate(held.train)
        axes = (0, 2, 3) if how == "channel" else (0,)
        mean = np.asarray(raw.x[train], np.float64).mean(axes)
        np.testing.assert_allclose(held.dataset.shift.ravel(), mean.ravel(), rtol=1e-5)
        scalings.append(held.dataset.shift)
    assert not np.array_equal(*scalings)


def test_public_rows_of_the_same_source_are_scaled_by_the_private_training_rows():
    text = """
name = "public"
seeds = [0, 1]
rounds = 1
[data]
source = "embedded"
normalise = "channel"
partition = {{ name = "iid", clients = 4 }}
[data.public]
source = "{public}"
size = 40
[model]
name = "mlr"
[[methods]]
name = "fedmd"
"""
    made, _ = build_jobs(parse_experiment(text.format(public="embedded")))
    for held in made[0].federations:
        train = np.asarray(held.dataset.x[np.concatenate(held.train)], np.float64)
        assert np.allclose(held.dataset.shift.ravel(), train.mean((0, 2, 3)))
        assert np.array_equal(held.public.shift, held.dataset.shift)
    one, other = (held.public.shift for held in made[0].federations)
    assert not np.array_equal(one, other)


def test_newcomers_are_scaled_as_the_run_was_under_their_seed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path / "own.csv")
    text = TOML.format(
        source="own.csv", data='normalise = "feature"', model='name = "mlr"', seeds=[0, 1]
    )
    (tmp_path / "e.toml").write_text(text)
    idiolect.run("e.toml", out="out")
    made, _ = build_jobs(parse_experiment(text))
    for seed, held in zip(SEEDS, made[0].federations, strict=True):
        found = run_files.read_scaling(tmp_path / "out", seed)
        assert np.array_equal(found.shift, held.dataset.shift)
        late = found.matched(normalised(read(tmp_path / "own.csv"), "feature"))
        assert np.array_equal(late.scale, held.dataset.scale) and not late.unfitted


def test_an_encoder_of_a_table_is_of_training_rows(tmp_path):
    """Two seeds have encoders of their own, brought to one shape; each only knows its rows."""
    held = trained(write_typed(tmp_path / "own.csv"), "typed", "", SEEDS)[2]
    encoders = [one.dataset.encoder for one in held]
    assert encoders[0] != encoders[1] and encoders[0].width == encoders[1].width
    for one in held:
        raw, train = one.dataset.table.columns["age"].values, np.sort(np.concatenate(one.train))
        age = one.dataset.encoder.columns[0]
        assert age.shift == pytest.approx(np.nanmean(raw[train]), rel=1e-12)
        assert age.scale == pytest.approx(np.nanstd(raw[train]), rel=1e-12)
        assert age.fill == pytest.approx(np.nanmedian(raw[train]), rel=2e-4)
