"""Pictures as clinics, phones and hubs have them; the oracle is the 8-bit picture that each file was made of."""

import io
import json
from contextlib import suppress

import numpy as np
import pytest
import torch

from netweight.data import images as data
from netweight.data.images.pairs import read_pairs
from netweight.data.images.pictures import decode_pictures, picture_files
from netweight.data.prompts import read_prompts
from netweight.errors import UsageError

Image = pytest.importorskip("PIL.Image", reason="Pillow is in the federated extra")
from PIL import ImageCms, features  # noqa: E402


def plain(square, side=28):
    """A ramp from left to right with a bright square, whose place says the class."""
    ramp = np.tile(np.linspace(0, 200, side), (side, 1)).astype(np.uint8)
    ramp[4 + 6 * square : 10 + 6 * square, 4:10] = 255
    return ramp


def folder(root, write, count=5):
    for square in range(2):
        (root / f"class{square}").mkdir(parents=True)
        for number in range(count):
            write(root / f"class{square}" / f"{number}", plain(square))
    return root


def loaded(root, **how):
    found = data.load_folder(root, test_share=0.2, **how)
    pixels, labels = (torch.cat(part) for part in zip(found.train, found.test, strict=True))
    return found, pixels, labels


def assert_same(pixels, labels, *, within=0, color=False):
    assert pixels.shape[1] == (3 if color else 1)
    for picture, label in zip(pixels, labels, strict=True):
        wanted = torch.from_numpy(plain(int(label))).expand_as(picture)
        assert int((picture.int() - wanted.int()).abs().max()) <= within


def tiff_fractions(path, array):
    Image.fromarray(array.astype(np.float32) / 255).save(f"{path}.tif")


def white_is_zero(path, array):
    """As scanners and clinics write: a viewer shows the picture, whose numbers are turned around."""
    Image.fromarray(array).save(f"{path}.tif", tiffinfo={262: 0})


def turned(path, array):
    picture, exif = Image.fromarray(np.rot90(array, 1)).convert("RGB"), Image.Exif()
    exif[0x0112] = 6
    picture.save(f"{path}.jpg", exif=exif, quality=100, subsampling=0)


WRITERS = {
    "16 bits": (lambda path, a: Image.fromarray(a.astype(np.uint16) * 257).save(f"{path}.png"), 0, False),
    "12 bits in 16": (lambda path, a: Image.fromarray(a.astype(np.uint16) * 16 + 15).save(f"{path}.png"), 1, False),
    "8 bits in 16": (lambda path, a: Image.fromarray(a.astype(np.uint16)).save(f"{path}.png"), 0, False),
    "16 bits in tif": (lambda path, a: Image.fromarray(a.astype(np.uint16) * 257).save(f"{path}.TIF"), 0, False),
    "32 bits in tif": (lambda path, a: Image.fromarray(a.astype(np.int32) * 257).save(f"{path}.tiff"), 0, False),
    "fractions": (tiff_fractions, 0, False),
    "white is 0, 16 bits": (lambda path, a: white_is_zero(path, 65535 - a.astype(np.uint16) * 257), 0, False),
    "white is 0, fractions": (lambda path, a: white_is_zero(path, 1 - a.astype(np.float32) / 255), 0, False),
    "white is 0, bytes": (white_is_zero, 0, False),
    "bmp": (lambda path, a: Image.fromarray(a).save(f"{path}.bmp"), 0, False),
    "webp": (lambda path, a: Image.fromarray(a).convert("RGB").save(f"{path}.webp", lossless=True), 1, True),
    "gray palette": (lambda path, a: Image.fromarray(a).convert("P").save(f"{path}.png"), 0, False),
    "gray and alpha": (lambda path, a: Image.fromarray(a).convert("LA").save(f"{path}.png"), 0, False),
    "upper case": (lambda path, a: Image.fromarray(a).save(f"{path}.PNG"), 0, False),
    "EXIF": (turned, 3, True),
    "CMYK": (lambda path, a: Image.fromarray(a).convert("CMYK").save(f"{path}.jpg", quality=100), 3, True),
    "no ending": (lambda path, a: Image.fromarray(a).save(path, format="PNG"), 0, False),
    "another ending": (lambda path, a: Image.fromarray(a).save(f"{path}.jpg", format="PNG"), 0, False),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_folder_is_what_a_viewer_shows(kind, tmp_path):
    write, within, color = WRITERS[kind]
    found, pixels, labels = loaded(folder(tmp_path / "pictures", write))
    assert_same(pixels, labels, within=within, color=color)
    if "bits" in kind:
        assert found.remarks[0].startswith("Gray of more than 8 bits, read as")
        assert ": 10 pictures (" in found.remarks[0]


def test_all_pictures_of_a_set_have_one_scale(tmp_path):
    """A dark picture of 16 bits stays dark beside a bright one."""
    (tmp_path / "a").mkdir()
    for name, factor in (("dark", 1), ("bright", 257)):
        Image.fromarray(plain(0).astype(np.uint16) * factor).save(tmp_path / "a" / f"{name}.png")
    bright, dark = loaded(tmp_path)[1].sort(0).values[[1, 0]]
    assert int(dark.max()) == 1
    assert int(bright.max()) == 255


def test_one_bit_is_black_and_white_and_not_called_clipped(tmp_path):
    found, pixels, _ = loaded(folder(tmp_path, lambda path, a: Image.fromarray(a > 200).save(f"{path}.png")))
    assert pixels.unique().tolist() == [0, 255]
    assert not any("clipped" in remark for remark in found.remarks)


def test_a_palette_of_colors_and_a_transparent_one(tmp_path):
    (tmp_path / "a").mkdir()
    color = Image.fromarray(np.stack([plain(0), plain(1), plain(0)], 2)).quantize(64)
    color.save(tmp_path / "a" / "1.png")
    see = Image.new("RGBA", (28, 28), (255, 0, 0, 0))
    see.save(tmp_path / "a" / "2.png")
    found, pixels, _ = loaded(tmp_path)
    assert pixels.shape[1] == 3
    assert any(bool((each == 255).all()) for each in pixels)
    assert any("partly transparent: 1 picture (" in each for each in found.remarks)


def test_a_color_profile_is_applied(tmp_path):
    (tmp_path / "a").mkdir()
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    picture = Image.fromarray(np.stack([plain(0)] * 3, 2))
    picture.save(tmp_path / "a" / "srgb.png", icc_profile=srgb)
    picture.save(tmp_path / "a" / "broken.png", icc_profile=b"no profile")
    found, pixels, _ = loaded(tmp_path)
    assert torch.equal(pixels[0], pixels[1])
    assert ["which cannot be applied" in each for each in found.remarks].count(True) == 1


def another_profile():
    """The profile sRGB with red and green exchanged, under another name."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    for wide in ("sRGB".encode("utf-16-be"), b"sRGB"):
        profile = profile.replace(wide, wide.replace(b"s", b"w").replace(b"R", b"G"))
    count = int.from_bytes(profile[128:132], "big")
    tags = {bytes(profile[at : at + 4]): at for at in range(132, 132 + 12 * count, 12)}
    red, green = tags[b"rXYZ"], tags[b"gXYZ"]
    profile[red : red + 4], profile[green : green + 4] = b"gXYZ", b"rXYZ"
    return bytes(profile)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "P, transparent"])
def test_a_profile_is_applied_to_every_kind_of_colors(mode, tmp_path):
    (tmp_path / "a").mkdir()
    red = Image.new("RGBA", (28, 28), (200, 0, 0, 255))
    for number in range(2):
        red.convert(mode[:4].split(",")[0]).save(
            tmp_path / "a" / f"{number}.png", icc_profile=another_profile(),
            **({"transparency": 255} if "transparent" in mode else {}),
        )  # fmt: skip
    found, pixels, _ = loaded(tmp_path)
    assert pixels[0, 1].float().mean() > 150 > 50 > pixels[0, 0].float().mean()
    assert found.remarks[0].startswith("Converted from their color profile to sRGB: 2 pictures")
    assert not any("transparent" in remark for remark in found.remarks), "every pixel is opaque"


def test_gray_of_16_bits_may_have_a_transparent_value(tmp_path):
    (tmp_path / "a").mkdir()
    for number in range(2):
        Image.fromarray(plain(0).astype(np.uint16) * 257).save(tmp_path / "a" / f"{number}.png", transparency=0)
    _, pixels, _ = loaded(tmp_path)
    assert torch.equal(pixels[0, 0] == 255, torch.from_numpy((plain(0) == 255) | (plain(0) == 0)))


def test_bytes_with_a_sign_are_refused(tmp_path):
    Image.fromarray(plain(0)).save(tmp_path / "a.tif", tiffinfo={339: 2})
    with pytest.raises(UsageError, match=r"a\.tif contains numbers of 8 bits with a sign"):
        decode_pictures([[("a.tif", tmp_path / "a.tif")]], of="set")


def test_links_are_followed_and_broken_ones_named(tmp_path):
    folder(tmp_path / "elsewhere", lambda path, a: Image.fromarray(a).save(f"{path}.png"))
    inner = tmp_path / "pictures" / "class0"
    inner.mkdir(parents=True)
    (inner / "more").symlink_to(tmp_path / "elsewhere" / "class0")
    (inner / "again").symlink_to(inner)
    assert len(picture_files(inner)[0]) == 5
    (inner / "gone.png").symlink_to(tmp_path / "annex" / "gone.png")
    with pytest.raises(UsageError, match=r"gone\.png is a link to .*annex/gone\.png, which is not there"):
        picture_files(inner)


def test_sizes_are_asked_for_and_what_was_done_is_said(tmp_path):
    def mixed(path, array):
        side = 28 + int(path.name) % 3
        Image.fromarray(array).resize((side, 28)).save(f"{path}.png")

    folder(tmp_path, mixed)
    with pytest.raises(UsageError, match=r"3 sizes .*--size"):
        data.load_folder(tmp_path)
    for fit, words in (("stretch", "changed their shape"), ("crop", "cut in the middle"), ("pad", "black bars")):
        found, pixels, _ = loaded(tmp_path, size=(28, 28), fit=fit)
        assert pixels.shape[2:] == (28, 28)
        assert any(words in each and ": 6 pictures (" in each for each in found.remarks)


def test_odd_pictures_are_named(tmp_path):
    folder(tmp_path, lambda path, a: Image.fromarray(a).save(f"{path}.png"))
    Image.new("L", (28, 28), 7).save(tmp_path / "class0" / "flat.png")
    white = np.full((28, 28), 255, np.uint8)
    white[0, :2] = 100, 0
    Image.fromarray(white).save(tmp_path / "class0" / "white.png")
    remarks = " ".join(data.load_folder(tmp_path).remarks)
    assert "Of one value everywhere" in remarks
    assert "flat.png" in remarks
    assert "remove their files, or replace them" in remarks
    assert "clipped" in remarks
    assert "white.png). Save them again from the original, with its whole range of values" in remarks


def frames(path, ending):
    first, second = (Image.fromarray(plain(each)) for each in (0, 1))
    first.save(path.with_suffix(ending), save_all=True, append_images=[second])


@pytest.mark.parametrize("ending", [".gif", ".tif", ".webp", ".png"])
def test_animations_and_stacks_are_refused_by_name(ending, tmp_path):
    folder(tmp_path, lambda path, a: Image.fromarray(a).save(f"{path}.png"))
    frames(tmp_path / "class0" / "stack", ending)
    with pytest.raises(UsageError, match=rf"stack\{ending} has 2 frames"):
        data.load_folder(tmp_path)


def test_a_photo_of_a_phone_with_a_second_picture_is_read(tmp_path):
    folder(tmp_path, lambda path, a: Image.fromarray(a).convert("RGB").save(f"{path}.png"))
    first, second = (Image.fromarray(plain(each)).convert("RGB") for each in (0, 1))
    first.save(tmp_path / "class0" / "phone.jpg", format="MPO", save_all=True, append_images=[second], quality=100)
    assert len(loaded(tmp_path)[1]) == 11


def test_warnings_of_pillow_become_remarks(tmp_path):
    def cut(path, array):
        exif = Image.Exif()
        exif[0x0112] = 6
        Image.fromarray(array).convert("RGB").save(f"{path}.jpg", exif=exif.tobytes()[:-5])

    found, _, _ = loaded(folder(tmp_path, cut))
    assert any(each.startswith("Read although Pillow warns (Corrupt EXIF data") for each in found.remarks)


@pytest.mark.parametrize("ending", ["avif", "tif"])
def test_no_error_of_a_decoder_leaks(ending, tmp_path):
    if ending == "avif" and not features.check("avif"):
        pytest.skip("this Pillow reads no AVIF")
    buffer = io.BytesIO()
    Image.fromarray(plain(0)).convert("RGB").save(buffer, ending.replace("tif", "tiff"))
    whole = buffer.getvalue()
    for at in range(0, len(whole), 3):
        for change in (0, 255):
            damaged = bytearray(whole)
            damaged[at] = change
            with suppress(UsageError):
                decode_pictures([[("the picture", bytes(damaged))]], of="set")


@pytest.mark.parametrize("content", [b"", b"not a picture", "cut"])
def test_what_cannot_be_read_is_named(content, tmp_path):
    folder(tmp_path, lambda path, a: Image.fromarray(a).save(f"{path}.png"))
    if content == "cut":
        whole = io.BytesIO()
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64), np.uint8)).save(whole, format="JPEG")
        content = whole.getvalue()[:-700]
    for name in ("bad.jpg", "without_ending"):
        (tmp_path / "class1" / name).write_bytes(content)
        with pytest.raises(UsageError, match=rf"{name} is not a picture"):
            data.load_folder(tmp_path, size=(28, 28))
        (tmp_path / "class1" / name).unlink()


@pytest.mark.parametrize("name", ["scan.dcm", "IMG_1.HEIC"])
def test_files_of_other_programs_are_named_with_a_cure(name, tmp_path):
    folder(tmp_path, lambda path, a: Image.fromarray(a).save(f"{path}.png"))
    (tmp_path / "class0" / name).write_bytes(b"x")
    with pytest.raises(UsageError, match=f"{name} is a .* which is not supported"):
        data.load_folder(tmp_path)


def test_hidden_files_are_left_and_tables_are_said(tmp_path):
    folder(tmp_path, lambda path, a: Image.fromarray(a).save(f"{path}.png"))
    for name in (".DS_Store", "._0.png", "labels.csv", "Thumbs.db"):
        (tmp_path / "class0" / name).write_bytes(b"x")
    (tmp_path / "__MACOSX").mkdir()
    (tmp_path / ".ipynb_checkpoints").mkdir()
    found, pixels, _ = loaded(tmp_path)
    assert len(pixels) == 10
    assert "2 files of" in found.remarks[0]
    assert [path.name for path in picture_files(tmp_path / "class0")[1]] == ["Thumbs.db", "labels.csv"]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.linspace(-1000, 3000, 784).reshape(28, 28).astype(np.int32), "gray values from -1000 to 3000"),
        (np.linspace(0, 90_000, 784).reshape(28, 28).astype(np.int32), "gray values from 0 to 90000"),
        (np.linspace(0, 255, 784).reshape(28, 28).astype(np.float32), "fractions up to 255"),
        (np.full((28, 28), np.nan, np.float32), "NaN"),
    ],
)
def test_numbers_whose_range_is_unknown_are_refused(array, message, tmp_path):
    Image.fromarray(array).save(tmp_path / "scan.tif")
    with pytest.raises(UsageError, match=message):
        decode_pictures([[("scan.tif", tmp_path / "scan.tif")]], of="scans")


def test_a_picture_beyond_all_bounds_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    Image.fromarray(plain(0)).save(tmp_path / "huge.png")
    with pytest.raises(UsageError, match=r"huge\.png is larger than 200 pixels"):
        decode_pictures([[("huge.png", tmp_path / "huge.png")]], of="scans")


def test_pairs_keep_every_picture_of_a_caption_and_every_caption_of_a_picture(tmp_path):
    Image.fromarray(plain(0)).save(tmp_path / "a.png")
    Image.fromarray(plain(1).astype(np.uint16) * 257).save(tmp_path / "b.png")
    (tmp_path / "t.csv").write_text("prompt,image\nharbor,a.png\nharbor,b.png\nlights,a.png\nharbor,a.png\n")
    found = read_pairs(tmp_path / "t.csv", (28, 28))
    assert [pair.name for pair in found.pairs] == ["harbor", "harbor (2)", "lights"]
    assert found.prompts == ["harbor", "lights"]
    for pair, square in zip(found.pairs, (0, 1, 0), strict=True):
        assert torch.equal((pair.image * 255).round().byte(), torch.from_numpy(plain(square)).expand(3, -1, -1))
    assert "16 bits" in found.remarks[0]


@pytest.mark.parametrize("columns", [("text", "file_name"), ("caption", "path"), ("prompt", "image_path")])
def test_tables_of_picture_folders_are_pairs(tmp_path, columns):
    Image.fromarray(plain(0)).save(tmp_path / "a.png")
    (tmp_path / "metadata.csv").write_text(f"{columns[1]},{columns[0]}\na.png,harbor\n")
    assert read_pairs(tmp_path / "metadata.csv", (28, 28)).prompts == ["harbor"]
    assert read_prompts(tmp_path / "metadata.csv") == ["harbor"]
    (tmp_path / "odd.csv").write_text("url,TEXT\na.png,harbor\n")
    with pytest.raises(UsageError, match=r"no column .prompt.*url, TEXT\. The names that are read are prompt"):
        read_pairs(tmp_path / "odd.csv", (28, 28))
    long = "x" * 5000
    (tmp_path / "long.csv").write_text(f"image,prompt\n{long},harbor\n")
    with pytest.raises(UsageError, match="there is no file"):
        read_pairs(tmp_path / "long.csv", (28, 28))


def test_pairs_are_read_as_carefully_as_prompts(tmp_path):
    (tmp_path / "images").mkdir()
    Image.fromarray(plain(0)).save(tmp_path / "images" / "a b.png")
    rows = ['" harbor ","images/a b.png "', '"lights",images\\a b.png']
    (tmp_path / "t.csv").write_text("\n".join(["prompt,image", *rows]))
    found = read_pairs(tmp_path / "t.csv", (28, 28))
    assert [pair.prompt for pair in found.pairs] == ["harbor", "lights"]
    odd = [{"prompt": "\ud83d", "image": "images/a b.png"}, {"prompt": "\u200b", "image": "x" * 300},
           {"prompt": 7, "image": "\ud83d.png"}, {"prompt": "a", "image": "a\0b"}]  # fmt: skip
    (tmp_path / "odd.json").write_text(json.dumps(odd))
    with pytest.raises(UsageError) as refusal:
        read_pairs(tmp_path / "odd.json", (28, 28))
    for part in (
        "row 0: prompt contains half of a character", "row 1: prompt is empty, there is no file", "(300 characters)",
        "row 2: prompt is neither text nor messages", "row 3: there is no file",
    ):  # fmt: skip
        assert part in str(refusal.value)


def test_pairs_of_another_shape_are_cut_in_the_middle_as_in_training(tmp_path):
    wide = np.concatenate([np.zeros((28, 14), np.uint8), plain(0), np.zeros((28, 14), np.uint8)], 1)
    Image.fromarray(wide).save(tmp_path / "a.png")
    (tmp_path / "t.csv").write_text("prompt,image\nharbor,a.png\n")
    found = read_pairs(tmp_path / "t.csv", (28, 28))
    assert torch.equal((found.pairs[0].image[0] * 255).round().byte(), torch.from_numpy(plain(0)))
    assert "cut in the middle" in found.remarks[0]
