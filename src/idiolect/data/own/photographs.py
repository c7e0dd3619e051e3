"""Own folders of images: what their headers say, how they are brought to one form, and read."""

import io
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from idiolect.data.dataset import AnyArray, Dataset, Rows
from idiolect.data.own.tables import assembled
from idiolect.data.parquet import IMAGE_FORMATS, MOST_PIXELS, picture
from idiolect.errors import DataError

IMAGE_FILES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
_OTHERS = {".heic", ".heif", ".avif", ".dcm", ".dicom", ".nii", ".svs", ".raw", ".cr2", ".nef"}
_TRAIN, _TEST = {"train", "training", "val", "valid", "validation"}, {"test", "testing"}
_ORIENTATION = 0x0112  # EXIF's tag: how a camera was held
_COLOURS = {"L": "grey", "RGB": "colour", "P": "palette", "1": "black and white", "CMYK": "CMYK"}
_GREY = ("grey", "black", "16-bit")
_LARGE = 1 << 30  # bytes of pixels beyond which a smaller size is recommended

Size = tuple[int, int]  # width, height


class ImageSurvey(NamedTuple):
    """What the headers of a folder's images say, before a pixel is decoded."""

    files: tuple[Path, ...]
    sizes: Counter[Size]  # as they are looked at, with the camera upright
    modes: Counter[str]  # grey, colour, palette, 16-bit grey; "with transparency" behind
    turned: int  # that a camera held sideways, by EXIF
    damaged: tuple[tuple[Path, str], ...]
    ignored: Counter[str]  # files that are no images, by their ending

    @property
    def size(self) -> Size:
        """The most common size; of equally common ones that of the first file by name."""
        return self.sizes.most_common(1)[0][0]

    @property
    def grey(self) -> bool:
        """Whether no image has colour."""
        return all(mode.startswith(_GREY) for mode in self.modes)

    def remarks(self, size: Size | None) -> list[str]:
        """Say what reading changes about the images, and what to do where it is not meant."""
        wanted = size or self.size
        found = []
        others = self.sizes.total() - self.sizes[wanted]
        if others:
            found.append(
                f"{others} of {len(self.files)} images are resized to {_by(wanted)}"
                + (", the most common size" if size is None else "")
                + f": {len(self.sizes)} sizes from {_by(min(self.sizes))} to "
                f"{_by(max(self.sizes))} (another: data.options.size = [WIDTH, HEIGHT])"
            )
        if squeezed := sum(n for one, n in self.sizes.items() if _squeezed(one, wanted)):
            found.append(
                f"{squeezed} of {len(self.files)} images change their shape by more than a tenth "
                "when resized; crop them first if that matters"
            )
        if self.turned:
            found.append(f"{self.turned} images were turned upright, as their EXIF says")
        grey = sum(n for mode, n in self.modes.items() if mode.startswith(_GREY))
        if grey and not self.grey:
            found.append(f"{grey} of {len(self.files)} images are grey and become colour images")
        clear = sum(n for mode, n in self.modes.items() if "transparency" in mode)
        if clear:
            found.append(f"{clear} images have transparent parts, which become white")
        deep = sum(n for mode, n in self.modes.items() if "16-bit" in mode)
        if deep:
            found.append(f"{deep} images have 16 bits a pixel, of which the upper 8 are used")
        if self.ignored:
            total = self.ignored.total()
            kinds = ", ".join(f"{n} {end or 'without ending'}" for end, n in self.ignored.items())
            more = sorted(_OTHERS & self.ignored.keys())
            hint = f"; save {', '.join(more)} as .png or .jpg to use them" if more else ""
            found.append(f"{total} files are no images and are ignored ({kinds}){hint}")
        pixels = len(self.files) * wanted[0] * wanted[1] * (1 if self.grey else 3)
        if pixels > _LARGE:
            found.append(
                f"{pixels / 1e9:.1f} GB of pixels are held in memory; a smaller "
                "data.options.size, such as [128, 128], trains far quicker"
            )
        return found


def image_files(folder: Path) -> list[Path]:
    """List every image below a folder, in the order of their names."""
    return _listed(folder)[0]


def _listed(folder: Path) -> tuple[list[Path], Counter[str]]:
    """List images, and count other files by their ending; what systems hide is passed over."""
    images, others = [], Counter[str]()
    for file in sorted(folder.rglob("*")):
        parts = file.relative_to(folder).parts
        hidden = any(part.startswith((".", "__MACOSX")) or part == "Thumbs.db" for part in parts)
        if hidden or not file.is_file():
            continue
        if file.suffix.lower() in IMAGE_FILES:
            images.append(file)
        else:
            others[file.suffix.lower()] += 1
    return images, others


def survey_images(folder: Path) -> ImageSurvey:
    """Read the headers of every image below a folder."""
    files, ignored = _listed(folder)
    sizes, modes, turned, damaged = Counter[Size](), Counter[str](), 0, []
    for file, found in zip(files, _threaded(_header, files), strict=True):
        if isinstance(found, str):
            damaged.append((file, found))
            continue
        size, mode, sideways = found
        sizes[size] += 1
        modes[mode] += 1
        turned += sideways
    return ImageSurvey(tuple(files), sizes, modes, turned, tuple(damaged), ignored)


def _threaded(function: Any, files: list[Path]) -> list[Any]:
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(function, files))


def _header(file: Path) -> tuple[Size, str, bool] | str:
    """Return size as seen, kind and whether it is turned; or why it cannot be opened."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(file, formats=IMAGE_FORMATS) as image:
            if image.width * image.height > MOST_PIXELS:
                return f"{image.width} x {image.height} pixels, at most {MOST_PIXELS:,}"
            turn = image.getexif().get(_ORIENTATION, 1) if file.suffix.lower() != ".png" else 1
            size = image.size[::-1] if turn in (5, 6, 7, 8) else image.size
            mode = _COLOURS.get(image.mode, "grey" if image.mode in ("LA", "La") else "colour")
            if image.mode.startswith(("I", "F")):
                mode = "16-bit grey"
            if "A" in image.mode or "a" in image.mode or "transparency" in image.info:
                mode += " with transparency"
            return size, mode, turn not in (0, 1)
    except UnidentifiedImageError:
        return "it is no image" if file.stat().st_size else "it is empty"
    except Exception as error:  # a damaged file makes Pillow raise anything
        return str(error).splitlines()[0] if str(error) else type(error).__name__


def read_image_folder(folder: Path, size: Size | None) -> Dataset:
    """Read a folder of images; `size` (width, height) defaults to the most common one.

    One colour image makes all of them RGB. Folders `train` and `test` above the classes are the
    parts of a dataset; any other folders above them are clients.
    """
    found = survey_images(folder)
    _refuse_damaged(folder, found.files, found.damaged)
    places = [file.relative_to(folder).parts for file in found.files]
    depths = {len(parts): file for parts, file in zip(places, found.files, strict=True)}
    if len(depths) != 1 or not depths.keys() <= {2, 3}:
        shown = ", ".join(str(file.relative_to(folder)) for file in depths.values())
        raise DataError(
            f"{folder} holds {shown}; expected class/image or client/class/image throughout"
        )
    wanted = size or found.size

    def decode(file: Path) -> AnyArray | str:
        try:
            return picture(upright(file), str(file), wanted)
        except DataError as error:
            return str(error)

    pictures = _threaded(decode, list(found.files))
    wrong = [(f, p) for f, p in zip(found.files, pictures, strict=True) if isinstance(p, str)]
    _refuse_damaged(folder, found.files, tuple((file, "cut off") for file, _ in wrong))
    channels = max(len(pixels) for pixels in pictures)
    x = np.stack([np.broadcast_to(p, (channels, *p.shape[1:])) for p in pictures])
    labels = np.array([parts[-2] for parts in places])
    tops = np.array([parts[0] for parts in places]) if len(places[0]) == 3 else None
    clients, origin = (tops, None) if tops is None or not _is_split(tops) else (None, _origin(tops))
    made = assembled(folder, x, labels, clients, origin, "image folder")
    return made.with_remarks(found.remarks(size))


def _is_split(tops: AnyArray) -> bool:
    """Return whether the uppermost folders are parts of a dataset and no clients."""
    names = {str(name).casefold() for name in tops}
    return bool(names & _TRAIN) and bool(names & _TEST) and names <= _TRAIN | _TEST


def _origin(tops: AnyArray) -> Rows:
    return np.array([int(str(name).casefold() in _TEST) for name in tops], np.int64)


def _refuse_damaged(
    folder: Path, files: tuple[Path, ...], damaged: tuple[tuple[Path, str], ...]
) -> None:
    """Name the files that cannot be decoded."""
    if not damaged:
        return
    named = ", ".join(f"{file.relative_to(folder)} ({why})" for file, why in damaged[:5])
    more = f" and {len(damaged) - 5} more" if len(damaged) > 5 else ""
    raise DataError(
        f"{folder}: {len(damaged)} of {len(files)} images cannot be decoded: {named}{more}; "
        "replace or remove them"
    )


def upright(file: Path) -> bytes:
    """Return the image of a file as a camera saw it."""
    return upright_image(file.read_bytes(), str(file))


def upright_image(content: bytes, where: str) -> bytes:
    """Turn an encoded image by its EXIF, put it on white, with 8 bits a pixel.

    Most images are all that already, and their bytes are returned as they are.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(content), formats=IMAGE_FORMATS) as image:
            plain = image.mode in ("L", "RGB") and "transparency" not in image.info
            png = image.format == "PNG"
            if plain and (png or image.getexif().get(_ORIENTATION, 1) in (0, 1)):
                return content
            made: Any = ImageOps.exif_transpose(image)
            if made.mode.startswith("I"):
                pixels = np.asarray(made).astype(np.int64)
                shift = 8 if pixels.max(initial=0) > 255 else 0
                made = Image.fromarray((pixels >> shift).clip(0, 255).astype(np.uint8))
            elif "A" in made.mode or "a" in made.mode or "transparency" in made.info:
                grey = made.mode in ("LA", "La")
                made = made.convert("RGBA")
                white = Image.new("RGBA", made.size, "white")
                made = Image.alpha_composite(white, made).convert("L" if grey else "RGB")
            elif made.mode not in ("L", "RGB"):
                made = made.convert("L" if made.mode in ("1", "F") else "RGB")
            held = io.BytesIO()
            made.save(held, "BMP")
            return held.getvalue()
    except Exception as error:
        raise DataError(f"{where}: the image cannot be decoded ({error}); replace it") from error


def _by(size: Size) -> str:
    return f"{size[0]}×{size[1]}"


def _squeezed(size: Size, wanted: Size) -> bool:
    ratio = (size[0] / size[1]) / (wanted[0] / wanted[1])
    return not 0.9 < ratio < 1 / 0.9
