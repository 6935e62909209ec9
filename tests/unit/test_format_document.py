"""The blobs that docs/format.md and tests/golden/examples.md explain byte by byte are real."""

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import netweight
from netweight import codec
from netweight.codec import lossy
from netweight.codec.header import ELEMENT_TYPES
from netweight.codec.numpy_tables import Slots

DOCUMENT = Path(__file__).parents[2] / "docs" / "format.md"
EXAMPLES = Path(__file__).parents[1] / "golden" / "examples.md"


@pytest.fixture(scope="module")
def text():
    return DOCUMENT.read_text() + EXAMPLES.read_text()


def dump(text, name):
    lines = re.search(rf"```{name}\n(.*?)```", text, re.S)[1].splitlines()
    assert [line.split()[0] for line in lines] == [f"{16 * i:04x}" for i in range(len(lines))]
    return bytes.fromhex("".join("".join(line.split()[1:]) for line in lines))


def squares():
    return codec.encode((np.arange(512) ** 2 % 5).astype(np.uint8))


def test_the_difference_is_what_the_encoder_writes(text):
    blob, base = dump(text, "difference"), np.arange(64, dtype=np.float16)
    tensor = base.copy()
    tensor.view("<u2")[[3, 10]] += np.array([1, -2], np.int16).view(np.uint16)
    assert codec.encode(tensor, base=base) == blob
    for path in ("auto", "python"):
        assert codec.decode_raw(blob, check=True, base=base, path=path).tobytes() == tensor.tobytes()
    assert blob[0x1D:0x2D].hex() == codec.digest_of(base, "F16").split(":")[1]


def test_the_file_is_what_compression_writes(text, tmp_path):
    tensors = {"a": np.array([1.0, -2.0, 0.5], np.float32), "b": np.zeros(1000, np.int16)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    netweight.compress_folder(tmp_path / "x.safetensors", tmp_path / "net.safetensors")
    raw = (tmp_path / "net.safetensors").read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header, told = json.loads(raw[8:end]), json.loads(re.search(r"```description\n(.*?)```", text, re.S)[1])
    header["__metadata__"] = {"netweight": header["__metadata__"]["netweight"]}
    assert header == told
    assert raw[end:] == codec.encode(tensors["a"]) + dump(text, "zeros")
    original = (tmp_path / "x.safetensors").read_bytes()
    assert original == from_file(raw)


def from_file(raw):
    """The original of a compressed file without bases, as the page says; only blobs are decoded by the library."""
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    about = json.loads(header.pop("__metadata__")["netweight"])
    fields, data = {"__metadata__": about["metadata"]} if about["metadata"] else {}, b""
    starts = base64.b64decode(about["digests"])
    for at, (name, entry) in enumerate(sorted(header.items(), key=lambda item: item[1]["data_offsets"])):
        first, last = entry["data_offsets"]
        blob = raw[end + first : end + last]
        assert blob[8:12] == starts[4 * at : 4 * at + 4]
        info, tensor = codec.info(blob), codec.decode_raw(blob, check=True).tobytes()
        place = [len(data), len(data := data + tensor)]
        fields[name.removesuffix(".net")] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": place}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def test_the_words_of_the_rounded_example_are_what_the_encoder_writes(text):
    tensor = torch.tensor([1.5, -2.8125, 0.400390625, 1.0], dtype=torch.bfloat16)
    blob = codec.encode_lossy(tensor, mantissa_bits=1, block_size=2)
    assert codec.decode(blob, check=True).tolist() == [1.40625, -2.8125, 0.375, 1.0]
    header = lossy.read_header(blob)
    words = codec.decode_raw(header.words, path="python").view("<u2")
    assert f"the words are `{' '.join(f'{word:04x}' for word in words)}`" in text
    assert lossy.normalizers_of(header, 0, 4, "python").tolist() == [104, 0]
    assert header.worst == pytest.approx(0.0634, abs=1e-4)


@pytest.mark.parametrize("name", ["squares", "difference", "zeros"])
def test_the_tables_quote_the_blobs(text, name):
    blob = squares() if name == "squares" else dump(text, name)
    table = text[text.index("numpy.arange(512)" if name == "squares" else f"```{name}") :].split("## ")[0]
    rows = re.findall(r"^\| ([0-9a-f]{2})(?:, ([0-9a-f]{2}))? \| (.*?) \|", table, re.M)
    assert len(rows) >= 8
    for first, second, quoted in rows:
        parts = quoted.split(", ") if second else [quoted]
        for offset, part in zip((first, second), parts, strict=False):
            start = bytes.fromhex("".join(re.findall(r"\b[0-9a-f]{2}\b", part.split("…")[0])))
            assert blob[int(offset, 16) :].startswith(start), (offset, part)


def test_the_steps_are_as_told(text):
    blob = squares()
    symbols, frequencies = [1, 4, 0], [102, 102, 52]
    slots = Slots.of(symbols, frequencies)
    rows = re.findall(r"^\| (\d) \| ([0-9a-f]{4}) \| (\d+) \| (\d) \| .* = (\d+) \|", text, re.M)
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    for lane, state, slot, symbol, following in rows:
        lane, x = int(lane), int(state, 16)
        assert (blob[0x3D + lane], blob[0x7D + lane]) == (x & 255, x >> 8)
        assert x & 255 == int(slot)
        assert slots.symbol[x & 255] == int(symbol) == lane * lane % 5
        assert slots.frequency[x & 255] * (x >> 8) + slots.rank[x & 255] == int(following)


def test_the_element_types_are_listed(text):
    rows = re.search(r"```types\n(.*?)```", text, re.S)[1]
    listed = {
        (int(code), name, *map(int, f"{widths} 0 0".split()[:4]))
        for code, name, widths in re.findall(
            r"(\d+) ([A-Z]\w+) +((?:\d+ +){2}(?:\d+ \d+)?)", rows.replace("\n", "   \n")
        )
    }
    assert listed == {(e.code, e.name, e.bits, e.number_bytes, e.exponent_bits, e.mantissa_bits) for e in ELEMENT_TYPES}


def test_the_native_table_of_types_is_the_same():
    source = (DOCUMENT.parents[1] / "native" / "format.cpp").read_text()
    listed = {
        (int(code), name, *map(int, rest.split(",")))
        for code, name, rest in re.findall(r'\{(\d+), "(\w+)", ([\d, ]+)\}', source)
    }
    assert listed == {(e.code, e.name, e.bits, e.number_bytes, e.exponent_bits, e.mantissa_bits) for e in ELEMENT_TYPES}
