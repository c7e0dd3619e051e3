"""Folders of photographs: sizes, orientation, colour, damage and what lies beside them."""

import numpy as np
import pytest
from PIL import Image

from idiolect.data import read
from idiolect.data.own.photographs import survey_images
from idiolect.errors import DataError


def picture(width=8, height=6, seed=0):
    draw = np.random.default_rng(seed)
    return Image.fromarray(draw.integers(0, 255, (height, width, 3)).astype(np.uint8))


@pytest.fixture
def folder(tmp_path):
    """Two classes of six equal photographs."""
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for n in range(6):
            picture(seed=n).save(tmp_path / name / f"{n}.png")
    return tmp_path


def test_the_most_common_size_wins_wherever_the_odd_one_stands(folder):
    picture(200, 133).save(folder / "cat" / "!.png")  # the first by name
    made = read(folder)
    assert made.x.shape == (13, 3, 6, 8)
    assert made.remarks[0].startswith("1 of 13 images are resized to 8×6, the most common size")
    assert np.array_equal(made.x[1], np.asarray(picture(seed=0)).transpose(2, 0, 1))
    assert read(folder, size=(4, 4)).x.shape == (13, 3, 4, 4)


def test_a_photograph_is_turned_as_its_camera_was_held(folder):
    seen = picture(seed=9)
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned by 90 degrees clockwise
    sideways = seen.transpose(Image.Transpose.ROTATE_90)
    sideways.save(folder / "cat" / "t.jpg", exif=exif, quality=100, subsampling=0)
    made = read(folder)
    assert made.x.shape[2:] == (6, 8) and "1 images were turned upright" in made.remarks[0]
    turned = made.x[6].astype(int)
    assert np.abs(turned - np.asarray(seen).transpose(2, 0, 1)).mean() < 6


def test_transparent_parts_become_white_and_sixteen_bits_eight(folder):
    clear = Image.new("RGBA", (8, 6), (255, 0, 0, 0))
    clear.putpixel((0, 0), (255, 0, 0, 255))
    clear.save(folder / "cat" / "a.png")
    deep = np.full((6, 8), 40_000, np.uint16)
    Image.fromarray(deep).save(folder / "cat" / "b.png")
    made = read(folder)
    assert made.x[6, :, 0, 0].tolist() == [255, 0, 0] and (made.x[6, :, 1:] == 255).all()
    assert (made.x[7] == 40_000 >> 8).all()
    said = " ".join(made.remarks)
    assert "transparent parts, which become white" in said and "16 bits a pixel" in said
    assert "1 of 14 images are grey and become colour" in said


def test_damaged_files_are_all_named(folder):
    (folder / "cat" / "x.jpg").write_bytes(b"no image")
    (folder / "dog" / "y.png").write_bytes((folder / "dog" / "0.png").read_bytes()[:60])
    (folder / "dog" / "z.jpg").write_bytes(b"")
    with pytest.raises(DataError, match="of 15 images cannot be decoded: ") as caught:
        read(folder)
    said = str(caught.value)
    assert "cat/x.jpg (it is no image)" in said and "dog/z.jpg (it is empty)" in said
    assert "BytesIO" not in said


def test_other_files_are_counted_and_hidden_ones_passed_over(folder):
    (folder / "readme.txt").write_text("x")
    (folder / "cat" / "phone.heic").write_bytes(b"x")
    (folder / "cat" / "._0.png").write_bytes(b"x")
    (folder / ".DS_Store").write_bytes(b"x")
    made = read(folder)
    assert len(made) == 12
    assert "2 files are no images and are ignored (1 .heic, 1 .txt); save .heic" in made.remarks[0]


def test_folders_train_and_test_are_no_clients(tmp_path):
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            picture().save(tmp_path / part / name / "0.png")
    made = read(tmp_path)
    assert made.clients is None and made.origin is not None and made.origin.sum() == 2
    (tmp_path / "test").rename(tmp_path / "south")
    assert read(tmp_path).client_names == ("south", "train")


def test_a_survey_counts_without_decoding(folder):
    picture(5, 5).convert("L").save(folder / "cat" / "g.png")
    found = survey_images(folder)
    assert found.sizes == {(8, 6): 12, (5, 5): 1} and found.modes == {"colour": 12, "grey": 1}
    assert found.size == (8, 6) and not found.grey
