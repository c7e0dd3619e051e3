"""Named datasets: where each is looked for, in order, and how it is read."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from idiolect.data.arrays import Rows
from idiolect.data.cache import cache_key, cache_root, cached, file_digest
from idiolect.data.dataset import Dataset, default_decoding, normalised
from idiolect.data.download import download as fetch
from idiolect.data.download import hub_url, recorded_digest
from idiolect.data.embedded import load_embedded
from idiolect.data.parquet import (
    class_names,
    decode_images,
    image_column,
    image_shape,
    open_parquet,
)
from idiolect.data.synthetic import synthetic
from idiolect.data.text.files import products, reviews, roles
from idiolect.data.text.generated import generated_text
from idiolect.errors import ConfigError, DataError


@dataclass(frozen=True)
class Source:
    """One named dataset: its folders in a data directory, and its files on the hub, if any."""

    about: str
    folders: dict[str, str]  # folder name -> the sentence of provenance, tried in this order
    repository: str = ""  # on the hub
    files: tuple[str, ...] = ()  # in the repository
    label: str = "label"
    make: Callable[..., Dataset] | None = None  # for data that is not read from files
    read: Callable[..., Dataset] | None = None  # of text: (files, name, provenance, options)

    def options(self) -> dict[str, inspect.Parameter]:
        """Say which options the source has."""
        taker = self.make or self.read
        known = inspect.signature(taker).parameters if taker else {}
        return {name: known[name] for name in known if name not in _GIVEN}


_GIVEN = ("files", "name", "provenance")  # what `load` itself hands to a reader of text


def _hub_files(folder: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{part}-00000-of-00001.parquet" for part in ("train", "test"))


SOURCES: dict[str, Source] = {
    "embedded": Source("6,000 MNIST digits that come with idiolect", {}, make=load_embedded),
    "synthetic": Source("Synthetic(alpha, beta), generated", {}, make=synthetic),
    "generated_text": Source(
        "Next word, any number of users with dialects, generated", {}, make=generated_text
    ),
    "mnist": Source(
        "MNIST, 70,000 digits",
        {"mnist": "MNIST (LeCun, Cortes, Burges; CC BY-SA 3.0 as commonly stated)."},
        "ylecun/mnist",
        _hub_files("mnist"),
    ),
    "fashion_mnist": Source(
        "Fashion-MNIST, 70,000 garments",
        {"fashion_mnist": "Fashion-MNIST (Zalando Research; MIT)."},
        "zalando-datasets/fashion_mnist",
        _hub_files("fashion_mnist"),
    ),
    "emnist": Source(
        "EMNIST letters and digits; from a data directory only",
        {
            "emnist": "EMNIST (Cohen et al. 2017; from NIST SD 19).",
            "emnist_bymerge": "Stand-in for EMNIST: the official ByMerge test split only, split "
            "anew 6:1 and capped at 850 + 140 per class (Cohen et al. 2017; from NIST SD 19).",
        },
    ),
    "cifar10": Source(
        "CIFAR-10, 60,000 photographs",
        {"cifar10": "CIFAR-10 (Krizhevsky 2009; no explicit licence)."},
        "uoft-cs/cifar10",
        _hub_files("plain_text"),
    ),
    "cifar100": Source(
        "CIFAR-100, 60,000 photographs",
        {
            "cifar100": "CIFAR-100 (Krizhevsky 2009; no explicit licence).",
            "cifar100_partial": "Stand-in for CIFAR-100: only the first 1,117 training and 916 "
            "test images (Krizhevsky 2009; no explicit licence).",
        },
        "uoft-cs/cifar100",
        _hub_files("cifar100"),
        label="fine_label",
    ),
    "tiny_imagenet32_public": Source(
        "5,000 Tiny ImageNet photographs at 32x32, a public set; from a data directory only",
        {
            "tiny_imagenet32_public": "Tiny ImageNet training images, 25 per class, halved to "
            "32x32; stand-in for a CIFAR-100 public set (ImageNet terms: research use)."
        },
    ),
    "office_caltech10": Source(
        "Office-Caltech-10, 2,533 photographs, 4 clients; from a data directory only",
        {
            "office_caltech10": "Office-Caltech-10 at 96x96, stand-in for Office-31 (Gong et al. "
            "2012; research use)."
        },
    ),
    "cross_sector": Source(
        "Reviews with stars, text; clients amazon, hotel, yelp; from a data directory only",
        {"cross_sector": "Consumer reviews of three sectors (Kaggle; research use)."},
        read=reviews,
    ),
    "cross_product": Source(
        "Reviews with stars, text; clients are five products; from a data directory only",
        {"cross_product": "Consumer reviews of five products (Kaggle; research use)."},
        read=products,
    ),
    "shakespeare": Source(
        "Next word, clients are 145 roles of Shakespeare; from a data directory only",
        {
            "tinyshakespeare_roles": "Tiny Shakespeare by speaking role (public domain); stand-in "
            "for per-user text of Reddit."
        },
        read=roles,
    ),
}


def load(
    name: str = "embedded",
    data_dir: str | Path | None = None,
    cache_dir: str | Path | None = None,
    download: bool = True,
    standardise: str | None = None,
    **options: Any,
) -> Dataset:
    """Load a named dataset: from data_dir (or IDIOLECT_DATA), else the cache, else the hub."""
    if name not in SOURCES:
        raise ConfigError(f"dataset '{name}' is unknown; expected one of {', '.join(SOURCES)}")
    source = SOURCES[name]
    known = set(source.options())
    wrong = sorted(set(options) - known)
    if wrong:
        raise ConfigError(
            f"dataset '{name}' has no option '{wrong[0]}'; it has "
            f"{', '.join(sorted(known)) or 'none'}"
        )
    if source.make is not None:
        dataset = source.make(**options)
    else:
        dataset = _from_files(name, source, data_dir, cache_root(cache_dir), download, options)
    return dataset if standardise is None else normalised(dataset, standardise)


def _from_files(
    name: str,
    source: Source,
    data_dir: str | Path | None,
    root: Path,
    download: bool,
    options: dict[str, Any],
) -> Dataset:
    where = data_dir or os.environ.get("IDIOLECT_DATA")
    if where is not None:
        base = Path(where).expanduser()
        if not base.is_dir():
            raise DataError(f"the data directory {base} does not exist; correct it or leave it out")
        for folder, provenance in source.folders.items():
            files = sorted((base / folder).rglob("*.parquet"), key=_train_first)
            if files:
                stated = _manifest(base)
                keys = [stated.get(file.relative_to(base).as_posix(), "") for file in files]
                digests = [key or file_digest(file) for key, file in zip(keys, files, strict=True)]
                return _decoded(name, source, files, digests, keys, root, provenance, options)
    files, digests = _from_hub(name, source, root, download, where)
    provenance = next(iter(source.folders.values()))
    return _decoded(name, source, files, digests, [""] * len(files), root, provenance, options)


def _columns(source: Source) -> str:
    if source.read is None:
        return "image {bytes, path} and label"
    return "text and client" if source.read is roles else "text, label and client"


def _train_first(file: Path) -> tuple[bool, str]:
    """Order files so that row numbers of the training file are row numbers of the dataset."""
    return file.name.startswith("test"), file.as_posix()


def _manifest(base: Path) -> dict[str, str]:
    """Read the sha256 of each file from a MANIFEST.json beside the folders, if there is one."""
    path = base / "MANIFEST.json"
    if not path.exists():
        return {}
    try:
        entries = json.loads(path.read_text())["datasets"].values()
        return {n: f["sha256"] for entry in entries for n, f in entry.get("files", {}).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not a manifest ({error!r}); mend or remove it") from error


def _from_hub(
    name: str, source: Source, root: Path, download: bool, where: str | Path | None
) -> tuple[list[Path], list[str]]:
    layout = (
        f"pass --data-dir or set IDIOLECT_DATA to a folder that holds {next(iter(source.folders))}/"
        f"train*.parquet and test*.parquet, with columns {_columns(source)}"
    )
    looked = f"dataset '{name}' is not in {where}" if where else f"dataset '{name}' is not at hand"
    if not source.files:
        raise DataError(f"{looked} and cannot be downloaded; {layout}")
    targets = [root / "downloads" / source.repository / file for file in source.files]
    digests = []
    for file, target in zip(source.files, targets, strict=True):
        digest = recorded_digest(target)
        if digest is None and not download:
            raise DataError(f"{looked} and download is off; {layout}")
        try:
            digests.append(digest or fetch(hub_url(source.repository, file), target))
        except DataError as error:
            raise DataError(f"{looked}, and {error}. Without a network, {layout}") from error
    return targets, digests


def _decoded(
    name: str,
    source: Source,
    files: list[Path],
    digests: list[str],
    verify: list[str],
    root: Path,
    provenance: str,
    options: dict[str, Any],
) -> Dataset:
    def write(folder: Path) -> Dataset:
        # A manifest's digests make the key without reading the files, so they are checked here.
        for file, expected in zip(files, verify, strict=True):
            if expected and file_digest(file) != expected:
                raise DataError(
                    f"{file} does not have the sha256 {expected[:12]}... of MANIFEST.json; it is "
                    "damaged or was replaced: fetch it again or correct the manifest"
                )
        if source.read is not None:
            return source.read(files, name, provenance, **options)
        return _decode(name, source, files, folder, provenance)

    # Text is cut to a length when it is read, so its options are part of what is cached.
    chosen = {key: option.default for key, option in source.options().items()} | options
    marks = [json.dumps(chosen, sort_keys=True)] if chosen else []
    return cached(root, cache_key(name, [*digests, *marks]), write)


def _decode(name: str, source: Source, files: list[Path], folder: Path, provenance: str) -> Dataset:
    opened = [open_parquet(file) for file in files]
    schema = opened[0].schema_arrow
    image = image_column(schema)
    label = source.label if source.label in schema.names else "label"
    if image is None or label not in schema.names:
        raise DataError(
            f"{files[0]} has columns {', '.join(schema.names)}; expected image {{bytes, path}} and "
            f"{source.label}"
        )
    rows = [file.metadata.num_rows for file in opened]
    shape = (sum(rows), *image_shape(files[0], image))
    x = np.lib.format.open_memmap(folder / "x.npy", mode="w+", dtype=np.uint8, shape=shape)
    decode_images(files, image, x)
    tables = [
        file.read(columns=[c for c in (label, "client") if c in schema.names]) for file in opened
    ]
    y = np.concatenate([table[label].to_numpy() for table in tables]).astype(np.int64)
    clients: Rows | None = None
    client_names: tuple[str, ...] = ()
    if "client" in schema.names:
        held = np.array([str(c) for table in tables for c in table["client"].to_pylist()])
        found, codes = np.unique(held, return_inverse=True)
        client_names, clients = tuple(str(c) for c in found), codes.astype(np.int64)
    from_test = np.repeat([int(file.name.startswith("test")) for file in files], rows)
    shift, scale = default_decoding(x)
    return Dataset(
        name=name,
        x=x,
        y=y,
        classes=class_names(schema, label) or tuple(str(i) for i in range(int(y.max()) + 1)),
        shift=shift,
        scale=scale,
        clients=clients,
        client_names=client_names,
        origin=from_test.astype(np.int64) if from_test.any() else None,
        provenance=provenance,
    )
