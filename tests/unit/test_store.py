"""The store: tensors written compressed and read back, from files and folders, and damage that is named."""

import base64
import json
import os
import struct
import subprocess
import sys

import numpy
import pytest
import safetensors.torch
import torch
from folders_under_test import simple_weights, transformers_folder, weights, write_safetensors

from netweight import codec
from netweight.core.atomic_writes import part_of, whole_file, whole_folder
from netweight.core.file_locks import lock
from netweight.errors import CorruptBlob, NameNotFound, OutputExists, OutputFailed, UnsafeInput, Unsupported, UsageError
from netweight.methods.compress.compress_folder import compress_folder, decompress_folder
from netweight.store import StoreWriter, open_store
from netweight.store.reader import StoredFile
from netweight.store.safetensors import deflate_text, inflate_text


class Twice(dict):
    """A mapping that gives its items twice."""

    def items(self):
        return [*super().items(), *super().items()]


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
          torch.int64, torch.uint8, torch.bool]  # fmt: skip


def same(left, right):
    return left.dtype == right.dtype and left.shape == right.shape and bits(left) == bits(right)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def samples(dtype):
    torch.manual_seed(0)
    many = torch.randn(300, 70).mul(20).to(dtype)
    return {"matrix": many, "scalar": many[0, 0], "empty": many[:0], "transposed": many.t(), "vector": many[0, :7]}


def write(path, tensors, **options):
    with StoreWriter(path, **options) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    return path


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(tmp_path, dtype):
    tensors = samples(dtype)
    path = write(tmp_path / "x.safetensors", tensors)
    with open_store(path) as store:
        assert store.names() == list(tensors)
        for name, tensor in tensors.items():
            assert same(store.get(name, check=True), tensor)
            assert bytes(store.content(name, check=True)) == bits(tensor)
            assert store.info(name).shape == tuple(tensor.shape)
            assert store.info(name).compressed
            assert codec.info(store.raw(name)).digest == store.info(name).digest


def test_a_compressed_file_is_ordinary_safetensors(tmp_path):
    path = write(tmp_path / "x.safetensors", {"a": torch.zeros(100)})
    stored = safetensors.torch.load_file(path)
    assert list(stored) == ["a.net"]
    assert stored["a.net"].dtype == torch.uint8
    assert torch.equal(codec.decode(stored["a.net"]), torch.zeros(100))


def test_numpy_arrays_and_ready_blobs_are_taken(tmp_path):
    array = numpy.arange(12, dtype="<f4").reshape(3, 4)
    with StoreWriter(tmp_path / "x.safetensors", level="fast") as writer:
        writer.add("array", array)
        writer.add_blob("blob", codec.encode(array))
        writer.add_raw("raw", b"\x12\x34", "F4", (4,))
    with open_store(tmp_path / "x.safetensors") as store:
        assert numpy.array_equal(store.get("array").numpy(), array)
        assert numpy.array_equal(store.get("blob").numpy(), array)
        assert bytes(store.content("raw")) == b"\x12\x34"
        assert store.info("raw").dtype == "F4"


def test_an_empty_file_is_a_file(tmp_path):
    path = write(tmp_path / "x.safetensors", {})
    with open_store(path) as store:
        assert store.names() == []
        assert len(store) == 0


def test_plain_files_are_read_as_they_are(tmp_path):
    tensors = samples(torch.bfloat16)
    safetensors.torch.save_file({k: v.clone().contiguous() for k, v in tensors.items()}, tmp_path / "x.safetensors")
    with open_store(tmp_path / "x.safetensors") as store:
        for name, tensor in tensors.items():
            assert same(store.get(name), tensor)
            assert not store.info(name).compressed
            assert bytes(store.raw(name)) == bits(tensor) == bytes(store.content(name))
        assert same(store.get_slice("matrix", slice(3, 8)), tensors["matrix"][3:8])


@pytest.mark.parametrize("rows", [slice(0, 0), slice(0, 300), slice(299, 400), slice(-5, None), slice(120, 121)])
def test_rows_are_those_of_the_whole(tmp_path, rows):
    tensor = samples(torch.bfloat16)["matrix"]
    path = write(tmp_path / "x.safetensors", {"a": tensor})
    with open_store(path) as store:
        assert same(store.get_slice("a", rows), tensor[rows])


def test_rows_that_cannot_be(tmp_path):
    path = write(tmp_path / "x.safetensors", {"a": torch.zeros(4, 4), "s": torch.tensor(1.0)})
    with open_store(path) as store:
        with pytest.raises(UsageError, match="step 2"):
            store.get_slice("a", slice(0, 4, 2))
        with pytest.raises(UsageError, match="scalar"):
            store.get_slice("s", slice(0, 1))


def test_a_wrong_name_is_answered_with_the_nearest(tmp_path):
    path = write(tmp_path / "x.safetensors", {"layer.weight": torch.zeros(4), "layer.bias": torch.zeros(4)})
    with open_store(path) as store:
        assert "layer.bias" in store
        with pytest.raises(NameNotFound, match=r"layer\.weight"):
            store.get("layer.weigth")


def test_views_outlive_the_store(tmp_path):
    path = write(tmp_path / "x.safetensors", {"a": torch.zeros(4)})
    with open_store(path) as store:
        view = store.raw("a")
    assert codec.info(view).shape == (4,)


def test_a_writer_that_fails_leaves_the_old_file(tmp_path):
    path = write(tmp_path / "x.safetensors", {"a": torch.zeros(4)})
    before = path.read_bytes()
    with pytest.raises(UsageError, match="added before"):
        write(path, Twice({"b": torch.ones(4)}), overwrite=True)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_an_existing_file_is_kept_unless_told_otherwise(tmp_path):
    path = write(tmp_path / "x.safetensors", {"a": torch.zeros(4)})
    with pytest.raises(OutputExists, match="overwrite"):
        write(path, {})
    write(path, {"b": torch.zeros(4)}, overwrite=True)
    with open_store(path) as store:
        assert store.names() == ["b"]


def test_what_a_writer_refuses(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        write(tmp_path / "none" / "x.safetensors", {})
    with pytest.raises(UsageError, match="added before"):
        write(tmp_path / "x.safetensors", Twice({"a": torch.zeros(1)}))
    with pytest.raises(UsageError, match="not open"):
        StoreWriter(tmp_path / "x.safetensors").add("a", torch.zeros(1))
    with pytest.raises(CorruptBlob), StoreWriter(tmp_path / "x.safetensors") as writer:
        writer.add_blob("a", b"no blob at all")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("room", [8, 1 << 12, 1 << 23])
def test_the_payload_moves_where_the_header_needs_it(tmp_path, monkeypatch, room):
    monkeypatch.setattr("netweight.store.writer._ROOM", room)
    monkeypatch.setattr("netweight.store.writer._BLOCK", 1000)
    tensors = {f"t{i}": torch.randn(50, 50) for i in range(8)}
    path = write(tmp_path / "x.safetensors", tensors)
    with open_store(path) as store:
        assert all(same(store.get(name, check=True), tensor) for name, tensor in tensors.items())
    length = struct.unpack("<Q", path.read_bytes()[:8])[0]
    assert length < 4096


def test_two_writers_do_not_mix(tmp_path):
    path = tmp_path / "x.safetensors"
    with whole_file(path) as file:
        file.write(b"first")
        with pytest.raises(UsageError, match="Another run"), whole_file(path):
            pass
    assert path.read_bytes() == b"first"


def test_the_leftover_of_a_killed_writer_is_taken_over(tmp_path):
    path = tmp_path / "x.safetensors"
    left = part_of(path).with_name(f"{part_of(path).name}-0123")
    left.write_bytes(b"left by a killed run")
    with whole_file(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_planted_links_are_neither_followed_nor_published(tmp_path):
    path, victim = tmp_path / "x.safetensors", tmp_path / "victim"
    victim.write_bytes(b"precious")
    part_of(path).symlink_to(victim)
    part_of(path).with_name(f"{part_of(path).name}-0123").symlink_to(victim)
    with whole_file(path) as file:
        file.write(b"new")
    assert victim.read_bytes() == b"precious"
    assert path.read_bytes() == b"new"
    assert not path.is_symlink()
    with pytest.raises(OutputFailed, match="is a link"), lock(part_of(path)):
        pass
    folder = tmp_path / "made"
    part_of(folder).symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    with pytest.raises(OutputFailed, match="is a link"), whole_folder(folder):
        pass


def test_temporary_names_cannot_be_foreseen(tmp_path):
    names = set()
    for _ in range(2):
        with whole_file(tmp_path / "x", overwrite=True):
            names |= {name for name in os.listdir(tmp_path) if name != "x"}
    assert len(names) == 2


def test_a_lock_taken_on_a_file_that_moved_away_is_taken_again(tmp_path):
    path = tmp_path / "lock"
    with lock(path):
        program = (
            f"from netweight.core.file_locks import lock\nwith lock(__import__('pathlib').Path({str(path)!r})): pass"
        )
        answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert "Another run" in answer.stderr
    with lock(path):
        assert path.exists()


def test_shards_by_index_and_without(tmp_path):
    folder = transformers_folder(tmp_path / "m", shards=3)
    with open_store(folder) as store:
        assert sorted(store.names()) == sorted(f"layers.{i}.{k}" for i in range(3) for k in "ab")
        assert len(store.files) == 3
    (folder / "model.safetensors.index.json").unlink()
    with open_store(folder) as store:
        assert store.info("layers.2.b").file.name == "model-00003-of-00003.safetensors"


def test_a_mixed_folder_is_one_store(tmp_path):
    simple_weights(tmp_path / "plain.safetensors", ("p",))
    write(tmp_path / "small.safetensors", {"c": torch.zeros(3)})
    with open_store(tmp_path) as store:
        assert [store.info(name).compressed for name in ("p", "c")] == [False, True]


def test_variants_are_chosen_by_name(tmp_path):
    simple_weights(tmp_path / "model.safetensors", seed=1)
    simple_weights(tmp_path / "model.fp16.safetensors", seed=2)
    with pytest.raises(UsageError, match="Both"):
        open_store(tmp_path)
    with open_store(tmp_path, variant="fp16") as store:
        assert store.info("a.weight").file.name == "model.fp16.safetensors"


@pytest.mark.parametrize(
    ("index", "error", "says"),
    [
        ({"weight_map": {"a": "../secret.safetensors"}}, UnsafeInput, "outside"),
        ({"weight_map": {"a": "/etc/passwd"}}, UnsafeInput, "outside"),
        ({"weight_map": {"a": "gone.safetensors"}}, CorruptBlob, "missing"),
        ({"weight_map": {"other": "model.safetensors"}}, CorruptBlob, "does not contain"),
        ({"weight_map": ["a"]}, CorruptBlob, "not an index"),
        ({}, CorruptBlob, "not an index"),
    ],
)
def test_indexes_that_mislead(tmp_path, index, error, says):
    simple_weights(tmp_path / "model.safetensors", ("a",))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(error, match=says):
        open_store(tmp_path)


def test_paths_that_hold_nothing(tmp_path):
    with pytest.raises(UsageError, match="no file or folder"):
        open_store(tmp_path / "none")
    with pytest.raises(UsageError, match="no safetensors"):
        open_store(tmp_path)
    for name in "ab":
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    with pytest.raises(UsageError, match="several indexes"):
        open_store(tmp_path)


def payload_start(path):
    return 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]


def test_a_damaged_payload_names_file_tensor_and_cure(tmp_path):
    path = write(tmp_path / "x.safetensors", {"a": torch.randn(1000), "b": torch.randn(1000)})
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)
    with open_store(path) as store:
        assert store.get("a", check=True).shape == (1000,)
        with pytest.raises(CorruptBlob) as caught:
            store.get("b", check=True)
    assert str(path) in str(caught.value)
    assert "'b'" in str(caught.value)
    assert "again" in str(caught.value)


def test_a_truncated_file_is_refused_at_once(tmp_path):
    path = write(tmp_path / "x.safetensors", {"a": torch.randn(1000)})
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptBlob, match=r"x\.safetensors"):
        open_store(path)


def rewrite_description(path, change):
    """Let `change` edit the description of a compressed file in place."""
    raw = path.read_bytes()
    start = payload_start(path)
    header = json.loads(raw[8:start])
    fields = json.loads(header["__metadata__"]["netweight"])
    header["__metadata__"]["netweight"] = json.dumps(change(fields) or fields)
    new = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(new)) + new + raw[start:])


def swap(fields):
    digests = base64.b64decode(fields["digests"])
    fields["digests"] = base64.b64encode(digests[4:] + digests[:4]).decode()


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (swap, CorruptBlob, "another tensor"),
        (lambda fields: fields.update(digests="AAAA"), CorruptBlob, "not both"),
        (lambda fields: fields.update(digests="A" * 1_000_000), CorruptBlob, "more digests"),
        (lambda fields: fields.update(version=99), Unsupported, "99"),
        (lambda fields: fields.pop("digests"), CorruptBlob, "damaged"),
        (lambda fields: fields.update(header="!!"), CorruptBlob, "damaged"),
        (lambda fields: fields.update(header=deflate_text(b"{}")), CorruptBlob, "not both"),
        (lambda fields: [1, 2], CorruptBlob, "damaged"),
    ],
)
def test_false_descriptions_are_refused(tmp_path, change, error, says):
    path = write(tmp_path / "x.safetensors", {"a": torch.zeros(10), "b": torch.zeros(20)})

    def edited(fields):
        replaced = change(fields)
        return replaced if isinstance(replaced, list) else fields

    rewrite_description(path, edited)
    with pytest.raises(error, match=says), open_store(path) as store:
        store.get("a")


def test_deflated_text_is_bounded():
    assert inflate_text(deflate_text(b"x" * 1000), limit=1000) == b"x" * 1000
    with pytest.raises(ValueError, match="more than"):
        inflate_text(deflate_text(bytes(10_000_000)), limit=1000)
    with pytest.raises(ValueError, match="incomplete"):
        inflate_text(deflate_text(b"x" * 1000)[:-8], limit=1000)


def test_what_is_described_comes_back_the_usual_header_in_few_bytes(tmp_path):
    names = [f"model.layers.{i}.self_attn.k_proj.weight" for i in range(300)]
    usual = tmp_path / "usual.safetensors"
    safetensors.torch.save_file({name: torch.full((4, 4), len(name) / 7) for name in names}, usual, {"format": "pt"})
    tensors = [(name, "BF16", (4, 4), weights("BF16", (4, 4))) for name in names]
    odd = write_safetensors(tmp_path / "odd.safetensors", tensors, metadata={"ä": "b"}, padding=b" " * 13)
    for source, kept in ((usual, 10), (odd, 60)):
        compress_folder(source, tmp_path / "net.safetensors", overwrite=True)
        with open_store(tmp_path / "net.safetensors") as store:
            file = store.files[0]
            assert len(file.header.metadata["netweight"]) < kept * len(names)
            assert file.original_header.raw == StoredFile(source).header.raw
            assert sorted(store.names()) == sorted(names)
        decompress_folder(tmp_path / "net.safetensors", tmp_path / "back.safetensors", overwrite=True)
        assert (tmp_path / "back.safetensors").read_bytes() == source.read_bytes()
