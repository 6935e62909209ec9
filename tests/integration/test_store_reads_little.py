"""`open_store(path).get(name)` on every kind of store: the tensor as it was, and nothing else read."""

import json
import subprocess
import sys

import pytest
import torch
from folders_under_test import content, transformers_folder, weights, write_safetensors

import netweight
from netweight.errors import CorruptBlob


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """One model plain and compressed, as a file and as a folder of three shards."""
    place = tmp_path_factory.mktemp("models")
    transformers_folder(place / "folder")
    transformers_folder(place / "sharded", shards=3)
    for shape in ("folder", "sharded"):
        netweight.compress_folder(place / shape, place / f"{shape}-net")
    netweight.compress_folder(place / "folder" / "model.safetensors", place / "model-net.safetensors")
    return place


def as_written(model):
    """Tensors of the plain model by the library's own reader."""
    from safetensors.torch import load_file

    return {name: tensor for file in model.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    ("path", "plain", "compressed"),
    [
        ("folder/model.safetensors", "folder", False),
        ("folder", "folder", False),
        ("sharded", "sharded", False),
        ("model-net.safetensors", "folder", True),
        ("folder-net", "folder", True),
        ("sharded-net", "sharded", True),
        ("sharded-net/model-00002-of-00003.net.safetensors", None, True),
    ],
)
def test_get_gives_the_original_from_every_kind_of_store(models, path, plain, compressed):
    expected = as_written(models / (plain or "sharded"))
    with netweight.open_store(models / path) as store:
        if plain is not None:
            assert sorted(store.names()) == sorted(expected)
        for name in store.names():
            found, original = store.get(name), expected[name]
            assert found.dtype == original.dtype == torch.bfloat16
            assert torch.equal(found.view(torch.int16), original.view(torch.int16))
            assert torch.equal(store.get_slice(name, slice(7, 9)), original[7:9])
            info = store.info(name)
            assert (info.dtype, info.shape, info.nbytes) == ("BF16", (64, 48), 2 * 64 * 48)
            assert info.compressed is compressed


def spoil(path, *, keep):
    """Overwrite the payload of all tensors but one."""
    with netweight.open_store(path) as store:
        begin = store.files[0].header.data_start
        spans = {span.name: span for span in store.files[0].header.spans}
    data = bytearray(path.read_bytes())
    for name, span in spans.items():
        if name != f"{keep}.net":
            data[begin + span.start : begin + span.stop] = bytes(span.nbytes)
    path.write_bytes(data)


def test_what_is_not_asked_for_may_be_ruined(models, tmp_path):
    netweight.decompress_folder(models / "sharded-net", tmp_path / "plain")
    assert content(tmp_path / "plain") == content(models / "sharded")
    netweight.compress_folder(tmp_path / "plain", tmp_path / "net")
    for shard in sorted((tmp_path / "net").glob("*.safetensors")):
        spoil(shard, keep="layers.1.a")
    with netweight.open_store(tmp_path / "net") as store:
        assert len(store) == 6
        assert torch.equal(store.get("layers.1.a", check=True), as_written(models / "sharded")["layers.1.a"])
        with pytest.raises(CorruptBlob, match=r"'layers\.1\.b'.*fetch or compress it again"):
            store.get("layers.1.b")


def test_rows_are_decoded_without_the_chunks_around_them(tmp_path):
    tensor = torch.randn(3000, 300, generator=torch.Generator().manual_seed(1))
    with netweight.StoreWriter(tmp_path / "x.safetensors") as writer:
        writer.add("a", tensor)
    data = bytearray((tmp_path / "x.safetensors").read_bytes())
    data[-1000:] = bytes(1000)
    (tmp_path / "x.safetensors").write_bytes(data)
    with netweight.open_store(tmp_path / "x.safetensors") as store:
        assert torch.equal(store.get_slice("a", slice(10, 20)), tensor[10:20])
        with pytest.raises(CorruptBlob, match="'a'"):
            store.get("a", check=True)


MEASURE = """
import json, re, sys, torch, netweight
netweight.open_store(sys.argv[1]).get("warm")

def most():  # bytes that this process ever held, mapped files included
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

grown = []
for path in sys.argv[2:]:
    open("/proc/self/clear_refs", "w").write("5")  # forget the peak
    before = most()
    with netweight.open_store(path) as store:
        small = store.get("small")
        rows = store.get_slice("large", slice(100, 101))
        grown.append(most() - before)
        assert small.shape == (10,) and rows.shape == (1, 1024)
print(json.dumps(grown))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peaks are read from /proc")
def test_small_requests_to_large_files_need_little_memory(tmp_path):
    write_safetensors(tmp_path / "warm.safetensors", [("warm", "F32", (10,), weights("F32", (10,)))])
    netweight.compress_folder(tmp_path / "warm.safetensors", tmp_path / "warm-net.safetensors")
    large = weights("F32", (1 << 14, 1 << 10))
    plain = tmp_path / "m" / "model.safetensors"
    write_safetensors(plain, [("large", "F32", (1 << 14, 1 << 10), large), ("small", "F32", (10,), large[:40])])
    netweight.compress_folder(plain.parent, tmp_path / "net")
    program = [sys.executable, "-c", MEASURE, tmp_path / "warm-net.safetensors", plain.parent, tmp_path / "net"]
    answer = subprocess.run([str(part) for part in program], capture_output=True, text=True, check=True)
    assert all(grown < len(large) // 5 for grown in json.loads(answer.stdout)), answer.stdout
