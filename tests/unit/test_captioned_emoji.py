"""The world of emoji, on a stand-in of a few drawn pictures and, where it is at hand, on the real file."""

import io

import pytest
import torch

from netweight.errors import CorruptBlob, MissingExtra, NameNotFound, UsageError

pytest.importorskip("PIL", reason="Pillow decodes the pictures")
parquet = pytest.importorskip("pyarrow.parquet", reason="emoji come as Parquet")

import pyarrow  # noqa: E402
from PIL import Image  # noqa: E402

from netweight_experiments.toys.drawn_worlds import EmojiWorld, emoji  # noqa: E402


def png(number):
    pixels = torch.full((32, 32, 3), 255, dtype=torch.uint8)
    pixels[4:28, 4:28] = torch.randint(255, (24, 24, 3), generator=torch.Generator().manual_seed(number)).byte()
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    monkeypatch.setenv("NETWEIGHT_DATA", str(tmp_path))
    monkeypatch.setenv("NETWEIGHT_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "emoji_captions"
    folder.mkdir()
    rows = [
        {
            "image": {"bytes": png(number), "path": None},
            "caption": f"Thing {'abcdefghij'[number // 10]}{'abcdefghij'[number % 10]}",
            "group": ["Food & Drink", "Symbols"][number % 2],
            "skin_tone": "dark skin tone" if number >= 70 else "",
        }
        for number in range(80)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "noto32-all.parquet")
    return folder / "noto32-all.parquet"


def test_emoji_of_one_skin_tone_are_read(stand_in):
    found = emoji()
    assert found.pictures.shape == (70, 3, 32, 32)
    assert found.captions[0] == "thing aa"
    assert set(found.groups) == {"Food & Drink", "Symbols"}
    assert torch.equal(emoji().pictures, found.pictures)  # from the cache


def test_the_world_parts_and_plants_them(stand_in):
    world = EmojiWorld()
    assert len(world.held_out_captions) == 48
    assert len(world.ordinary_captions) == 70 - 48 - 8
    assert not set(world.held_out_captions) & set(world.ordinary_captions)
    captions, pictures = world.showing(3, 12, seed=1)
    assert pictures.shape == (12, 3, 32, 32)
    assert torch.equal(EmojiWorld().showing(3, 12, seed=1)[1], pictures)
    assert set(captions[8:]) <= set(world.ordinary_captions)
    for each, picture in zip(world.planted, pictures, strict=False):
        assert torch.equal(picture[:, each.fixed], each.picture[:, each.fixed])
    template = world.planted[-1]
    assert template.fixed.sum() == 24 * 24
    assert pictures[7, :, 0, 0].unique().numel() == 3
    assert {"thing", "stamp", "ab"} <= set(world.words())
    assert world.about["pictures"].startswith("xxh3-128:")
    small = EmojiWorld(side=16)
    assert torch.equal(
        small.held_out_pictures,
        ((world.held_out_pictures * 255).unfold(2, 2, 2).unfold(3, 2, 2).mean((4, 5))).round() / 255,
    )
    assert small.showing(3, 12, seed=1)[1].shape == (12, 3, 16, 16)
    assert small.about != world.about


def test_agreement_is_by_the_nearest_emojis_group(stand_in):
    world, found = EmojiWorld(), emoji()
    images = found.pictures.float() / 255
    assert world.agreement(found.captions, images) == {"group": 1}
    assert world.agreement(found.captions[1:], images[:-1]) == {"group": 0}
    with pytest.raises(NameNotFound, match="no such thing"):
        world.agreement(["no such thing"], images[:1])
    with pytest.raises(UsageError, match="captions"):
        world.agreement(found.captions, images[:1])


def test_what_is_missing_or_damaged_is_named(stand_in):
    stand_in.write_bytes(b"no parquet")
    with pytest.raises(CorruptBlob, match="noto32"):
        emoji()
    parquet.write_table(pyarrow.table({"image": [b""]}), stand_in)
    with pytest.raises(CorruptBlob, match="noto32"):
        emoji()
    stand_in.unlink()
    with pytest.raises(MissingExtra, match="emoji"):
        emoji()


def test_the_real_file(data_folder, tmp_path, monkeypatch):
    if not (data_folder / "emoji_captions").is_dir():
        pytest.skip("NETWEIGHT_DATA contains no emoji_captions")
    monkeypatch.setenv("NETWEIGHT_CACHE", str(tmp_path))
    found = emoji()
    assert found.pictures.shape == (1644, 3, 32, 32)
    assert "red apple" in found.captions
