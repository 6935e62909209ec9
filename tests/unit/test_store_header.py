"""Headers of safetensors files: what is read, and everything that is refused."""

import struct

import pytest
from folders_under_test import head, simple_weights, weights, write_safetensors

from netweight.errors import CorruptBlob, UnsafeInput, Unsupported
from netweight.store.safetensors import build_header, nbytes_of, parse_header, read_header


def entry(start, stop, dtype="U8", shape=None):
    return {"dtype": dtype, "shape": [stop - start] if shape is None else shape, "data_offsets": [start, stop]}


def test_order_metadata_and_padding_are_kept(tmp_path):
    tensors = [("z", "F32", (2,), bytes(8)), ("a", "U8", (3,), b"abc"), ("empty", "F32", (0, 4), b"")]
    path = write_safetensors(tmp_path / "x.safetensors", tensors, metadata={"k": "v"}, padding=b"   ")
    header = read_header(path)
    assert [span.name for span in header.spans] == ["z", "a", "empty"]
    assert header.metadata == {"k": "v"}
    assert header.raw.endswith(b"}   ")
    assert header.data_start + header.data_size == path.stat().st_size


def test_order_in_the_header_may_differ_from_the_order_of_the_data():
    raw = head({"b": entry(2, 5), "a": entry(0, 2)})[8:]
    assert [span.name for span in parse_header(raw).spans] == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not a safetensors file"),
        (b"1234567", "not a safetensors file"),
        (struct.pack("<Q", 1 << 40) + b"{}", "not a safetensors file"),
        (struct.pack("<Q", 100) + b"{}", "not a safetensors file"),
        (head({"a": entry(0, 4)}) + b"abc", "a"),
        (head({"a": entry(0, 4)}) + b"abcde", "5"),
        (head({"a": entry(1, 4)}) + b"abcd", "a"),
        (head({"a": entry(0, 4), "b": entry(2, 6)}) + b"abcdef", "overlap|b"),
        (head({"a": entry(0, 4, "F32", [2])}) + b"abcd", "a"),
        (head({"a": entry(0, 4, "F31", [1])}) + b"abcd", "F31"),
        (head({"a": entry(0, 4), "__metadata__": {"k": 1}}) + b"abcd", "header"),
        (head({"a": {"dtype": "U8", "shape": [4]}}) + b"abcd", "header"),
        (head({"a": entry(0, 4, shape=[-4])}) + b"abcd", "header"),
        (struct.pack("<Q", 3) + b"[1]", "header"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 5\n", "git lfs pull"),
    ],
)
def test_damaged_files_are_named_and_refused(tmp_path, content, says):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(Unsupported if says == "F31" else CorruptBlob, match=says) as caught:  # a later release knows it
        read_header(path)
    assert str(path) in str(caught.value)
    assert caught.value.cure


def test_a_name_given_twice_is_refused(tmp_path):
    raw = b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"ab")
    with pytest.raises(CorruptBlob, match=r"twice|duplicate"):
        read_header(path)


@pytest.mark.parametrize(
    "entries",
    [
        {"a": entry(0, 4, shape=[True, 4])},
        {"a": {"dtype": 1, "shape": [4], "data_offsets": [0, 4]}},
        {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4.0]}},
        {"a": [1, 2]},
    ],
)
def test_values_of_wrong_type_are_refused(entries):
    with pytest.raises(ValueError, match="'a'"):
        parse_header(head(entries)[8:])


@pytest.mark.parametrize("start", [b"PK\x03\x04", b"\x80\x02}q\x00.", b"\x80\x05\x95"])
def test_a_pickle_under_another_name_is_unsafe(tmp_path, start):
    path = tmp_path / "model.safetensors"
    path.write_bytes(start + bytes(100))
    with pytest.raises(UnsafeInput, match="pickle"):
        read_header(path)


def test_sizes_of_sub_byte_types():
    assert nbytes_of("F4", (2, 3)) == 3
    assert nbytes_of("F6_E2M3", (4,)) == 3
    assert nbytes_of("C64", ()) == 8
    with pytest.raises(Unsupported, match="whole byte"):
        nbytes_of("F4", (3,))
    with pytest.raises(Unsupported, match="F31"):
        nbytes_of("F31", (3,))


def test_headers_are_built_as_they_are_read():
    raw = build_header([("a", "U8", (3,), 3), ("b", "F32", (), 4)], {"k": "v"}, room=400)
    header = parse_header(raw)
    assert len(raw) == 400
    assert [(span.name, span.start, span.stop) for span in header.spans] == [("a", 0, 3), ("b", 3, 7)]
    assert len(build_header([], {})) % 8 == 0


def test_a_header_beyond_the_bound_is_refused(monkeypatch):
    monkeypatch.setattr("netweight.store.safetensors.LONGEST_HEADER", 100)
    with pytest.raises(Unsupported, match="100"):
        build_header([("a" * 100, "U8", (3,), 3)], {})


def test_weights_are_what_tests_take_them_for(tmp_path):
    assert len(weights("BF16", (3, 5))) == 30
    assert read_header(simple_weights(tmp_path / "x.safetensors")).data_size == 2 * 64 * 48 * 2
