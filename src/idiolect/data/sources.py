"""Named datasets: where each is looked for, in order, and how it is read."""

import inspect
import json
import lzma
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from idiolect.data.cache import (
    cache_key,
    cached,
    download_file,
    file_digest,
    hub_url,
    recorded_digest,
)
from idiolect.data.dataset import Dataset, check_options, check_value, normalised
from idiolect.data.generated import generated_text, synthetic
from idiolect.data.named_tables import BRCA, SCHOOL, heart, read_brca, read_school
from idiolect.data.parquet import SourceFiles, read_images, read_products, read_reviews, read_users
from idiolect.data.tokenisers import as_tokeniser
from idiolect.errors import DataError

_DIGITS, _SIDE = 6000, 28  # of the embedded images


@dataclass(frozen=True)
class Source:
    """One named dataset: its folders in a data directory, and its files on the hub, if any."""

    about: str
    folders: dict[str, str]  # folder name -> the sentence of provenance, tried in this order
    repository: str = ""  # on the hub
    files: tuple[str, ...] = ()  # in the repository
    label: str = "label"
    columns: str = "image {bytes, path} and label"
    read: Callable[..., Dataset] = read_images  # (SourceFiles, options)
    make: Callable[..., Dataset] | None = None  # (options), for data that is not read from files
    table: Callable[[Path], Dataset] | None = None  # (file), for a small table that is not cached

    def options(self) -> dict[str, inspect.Parameter]:
        """List the options of the source."""
        if self.table is not None:
            return {}
        parameters = dict(inspect.signature(self.make or self.read).parameters)
        parameters.pop("files", None)
        return parameters


def load_embedded() -> Dataset:
    """Load the embedded digits; no network, no cache, well under a second."""
    packed = resources.files("idiolect.data").joinpath("embedded/digits.xz").read_bytes()
    raw = np.frombuffer(lzma.decompress(packed), np.uint8)
    pixels = _DIGITS * _SIDE * _SIDE
    if len(raw) != pixels + _DIGITS:
        raise DataError(f"the embedded digits are damaged ({len(raw)} bytes); reinstall idiolect")
    x = raw[:pixels].reshape(_DIGITS, 1, _SIDE, _SIDE)
    return Dataset(
        name="embedded",
        x=x,
        y=raw[pixels:].astype(np.int64),
        classes=tuple("0123456789"),
        provenance=(
            "First 600 images of each digit in MNIST's training file (LeCun, Cortes, Burges; "
            "CC BY-SA 3.0), shipped with idiolect."
        ),
    )


def _hub_files(folder: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{part}-00000-of-00001.parquet" for part in ("train", "test"))


SOURCES: dict[str, Source] = {
    "embedded": Source("6,000 MNIST digits that come with idiolect", {}, make=load_embedded),
    "heart": Source("Heart disease in four real hospitals, comes with idiolect", {}, make=heart),
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
        columns="text, label and client",
        read=read_reviews,
    ),
    "cross_product": Source(
        "Reviews with stars, text; clients are five products; from a data directory only",
        {"cross_product": "Consumer reviews of five products (Kaggle; research use)."},
        columns="text, label and client",
        read=read_products,
    ),
    "shakespeare": Source(
        "Next word, clients are 145 roles of Shakespeare; from a data directory only",
        {
            "tinyshakespeare_roles": "Tiny Shakespeare by speaking role (public domain); stand-in "
            "for per-user text of Reddit."
        },
        columns="text and client",
        read=read_users,
    ),
    "tcga_brca": Source(
        "Survival with breast cancer, clients are six regions; from a data directory only",
        {"tcga_brca": BRCA},
        table=read_brca,
    ),
    "school": Source(
        "Examination scores, clients are 139 schools; from a data directory only",
        {"school": SCHOOL},
        table=read_school,
    ),
}


def cache_root(cache_dir: str | Path | None) -> Path:
    """Where decoded data lives: the argument, IDIOLECT_CACHE, or ~/.cache/idiolect."""
    chosen = cache_dir or os.environ.get("IDIOLECT_CACHE") or Path.home() / ".cache" / "idiolect"
    return Path(chosen).expanduser()


def load(
    name: str = "embedded",
    data_dir: str | Path | None = None,
    cache_dir: str | Path | None = None,
    download: bool = True,
    standardise: str | None = None,
    **options: Any,
) -> Dataset:
    """Load a named dataset: from data_dir (or IDIOLECT_DATA), else the cache, else the hub."""
    check_value("dataset", name, SOURCES)
    source = SOURCES[name]
    check_options(f"dataset '{name}'", options, source.options())
    if source.make is not None:
        dataset = source.make(**options)
    else:
        root = cache_root(cache_dir)
        where = data_dir or os.environ.get("IDIOLECT_DATA")
        found = _in_folder(source, where)
        found = found or _from_hub(name, source, root, download, where)
        if source.table is not None:
            _verify(found)
            dataset = source.table(found.paths[0])
        else:
            dataset = _read_cached(name, source, found, root, options)
    object.__setattr__(dataset, "source", name)  # made just now
    return dataset if standardise is None else normalised(dataset, standardise)


class _Found(NamedTuple):
    """Files of a source, with the digests that name them in the cache."""

    paths: list[Path]
    digests: list[str]
    stated: list[str]  # digests by MANIFEST.json, not verified yet; "" where it has none
    provenance: str


def _in_folder(source: Source, where: str | Path | None) -> _Found | None:
    """Find the source's files in a data directory, if one is given and has them."""
    if where is None:
        return None
    base = Path(where).expanduser()
    if not base.is_dir():
        raise DataError(f"the data directory {base} does not exist; correct it or leave it out")
    for folder, provenance in source.folders.items():
        # Test files last, so that row numbers of the training file are those of the dataset.
        pattern = "*.parquet" if source.table is None else "*.csv*"
        paths = sorted(
            (base / folder).rglob(pattern),
            key=lambda path: (path.name.startswith("test"), path.as_posix()),
        )
        if paths:
            manifest = _manifest(base)
            stated = [manifest.get(path.relative_to(base).as_posix(), "") for path in paths]
            digests = [s or file_digest(path) for s, path in zip(stated, paths, strict=True)]
            return _Found(paths, digests, stated, provenance)
    return None


def _manifest(base: Path) -> dict[str, str]:
    """Read the sha256 of each file from a MANIFEST.json beside the folders, if there is one."""
    path = base / "MANIFEST.json"
    if not path.exists():
        return {}
    try:
        entries = json.loads(path.read_text())["datasets"].values()
        return {n: f["sha256"] for entry in entries for n, f in entry.get("files", {}).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is not a manifest ({type(error).__name__}: {error}); mend or remove it"
        ) from error


def _from_hub(
    name: str, source: Source, root: Path, download: bool, where: str | Path | None
) -> _Found:
    """Return the source's files in the cache, downloading those that are missing."""
    # Of some, such as office_caltech10, all rows stand in one file.
    files = "train*.parquet and test*.parquet" + ("" if source.files else ", or one *.parquet")
    layout = (
        f"pass --data-dir or set IDIOLECT_DATA to a folder that holds {next(iter(source.folders))}/"
        + (f"{files}, with columns {source.columns}" if source.table is None else "*.csv")
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
            digests.append(digest or download_file(hub_url(source.repository, file), target))
        except DataError as error:
            raise DataError(f"{looked}, and {error}. Without a network, {layout}") from error
    return _Found(targets, digests, [""] * len(targets), next(iter(source.folders.values())))


def _read_cached(
    name: str, source: Source, found: _Found, root: Path, options: dict[str, Any]
) -> Dataset:
    """Map the decoded dataset from the cache, reading the files first if it is not there."""

    def write(folder: Path) -> Dataset:
        # A manifest's digests make the key without reading the files, so they are verified here.
        _verify(found)
        files = SourceFiles(name, found.paths, source.label, found.provenance, folder)
        return source.read(files, **options)

    # Text is cut to a length when it is read, so its options are part of what is cached.
    chosen = {key: option.default for key, option in source.options().items()} | options
    tokeniser = as_tokeniser(chosen.get("tokeniser", ""))
    if tokeniser is not None:  # what it does, not where it lies
        chosen["tokeniser"] = tokeniser.digest
    plain = source.read is read_images and not options  # as before images had options
    marks = [] if plain or not chosen else [json.dumps(chosen, sort_keys=True)]
    made = cached(root, cache_key(name, [*found.digests, *marks]), write)
    return replace(made, tokeniser=tokeniser)


def _verify(found: _Found) -> None:
    """Refuse files that are not what MANIFEST.json states."""
    for path, expected in zip(found.paths, found.stated, strict=True):
        if expected and file_digest(path) != expected:
            raise DataError(
                f"{path} does not have the sha256 {expected[:12]}... of MANIFEST.json; it is "
                "damaged or was replaced: fetch it again or correct the manifest"
            )
