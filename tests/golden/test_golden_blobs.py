import hashlib
import json
from pathlib import Path

import pytest

from netweight import codec, errors
from netweight.codec import numpy_planes
from netweight.codec.header import ELEMENT_TYPES

HERE = Path(__file__).parent
MANIFEST = json.loads((HERE / "manifest.json").read_text())
PATHS = [*dict.fromkeys([*codec.available_paths(), "python"])]


def blob_of(folder, name):
    return (HERE / folder / f"{name}.nwt").read_bytes()


def base_of(entry):
    return (HERE / "bases" / entry["base"]).read_bytes() if "base" in entry else None


def test_every_file_is_listed():
    for folder, listed in MANIFEST.items():
        assert {path.stem for path in (HERE / folder).iterdir()} == set(listed)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", MANIFEST["accept"])
def test_what_must_decode(name, path):
    expected = MANIFEST["accept"][name]
    blob = blob_of("accept", name)
    info = codec.info(blob)
    assert (info.dtype, list(info.shape), info.level) == (expected["dtype"], expected["shape"], expected["level"])
    decoded = codec.decode_raw(blob, check=True, path=path, base=base_of(expected))
    assert hashlib.sha256(decoded).hexdigest() == expected["sha256"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", MANIFEST["refuse"])
def test_what_must_be_refused(name, path):
    expected = MANIFEST["refuse"][name]
    with pytest.raises(getattr(errors, expected["error"])) as caught:
        codec.decode_raw(blob_of("refuse", name), check=True, path=path)
    assert expected["message"] in caught.value.reason
    assert caught.value.cure


SKEWED = ("BF16-zeros-", "BF16-palette-default", "BF16-repeated-high", "F32-zeros-default", "F32-one-sign-default")


# All files take the encoder in Python a minute. So here it encodes those of which planes contain planes, and in the
# study all others, too.
@pytest.mark.parametrize(
    ("path", "beginnings"),
    [
        *((path, "") for path in PATHS[:-1]),
        ("python", SKEWED),
        pytest.param("python", "", marks=[pytest.mark.study] if PATHS[1:] else []),
    ],
)
def test_the_encoder_still_writes_the_same_bytes(path, beginnings):
    for name, expected in MANIFEST["accept"].items():
        if name.startswith("unusual") or "source" in expected or not name.startswith(beginnings):
            continue
        blob = blob_of("accept", name)
        info, base = codec.info(blob), base_of(expected)
        data = codec.decode_raw(blob, base=base)
        settings = {"level": expected["level"], "chunk_log2": info.chunk_log2, "path": path, "base": base}
        settings["gpu_modes"] = name.startswith("gpu-")
        assert codec.encode_raw(data, info.dtype, info.shape, **settings) == blob, name


@pytest.mark.parametrize("path", PATHS)
def test_the_encoder_still_rounds_to_the_same_bytes(path):
    rounded = {name: entry for name, entry in MANIFEST["accept"].items() if "source" in entry}
    assert {entry["dtype"] for entry in rounded.values()} == set(codec.ROUNDABLE)
    for name, entry in rounded.items():
        data = codec.decode_raw(blob_of("accept", entry["source"]))
        precision = codec.Precision(**entry["rounding"])
        settings = {"chunk_log2": 10, "precision": precision, "path": path}
        again = codec.encode_raw(data, entry["dtype"], entry["shape"], **settings)
        assert again == blob_of("accept", name), name


def test_everything_that_the_format_has_is_among_them(monkeypatch):
    seen = set()
    original = numpy_planes.read_plane

    def watched(reader, width, count, nesting):
        mode = reader.data[reader.at]
        seen.add(("mode", int(mode)))
        if mode in (numpy_planes.RANS, numpy_planes.STEEP):
            seen.add(("streams", int(reader.data[reader.at + 2])))
        return original(reader, width, count, nesting)

    monkeypatch.setattr(numpy_planes, "read_plane", watched)
    for name in (name for name, entry in MANIFEST["accept"].items() if "source" not in entry):
        codec.decode_raw(blob_of("accept", name), path="python", base=base_of(MANIFEST["accept"][name]))
    assert seen == {("mode", mode) for mode in range(10)} | {("streams", streams) for streams in (1, 2, 4)}
    combinations = {(entry["dtype"], entry["level"]) for entry in MANIFEST["accept"].values()}
    assert combinations >= {(element.name, level) for element in ELEMENT_TYPES for level in codec.LEVELS}
