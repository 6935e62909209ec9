"""Files and folders made to do harm: each gets a named error before work, little memory, and nothing is lost."""

import base64
import json
import os
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from folders_under_test import content, head, simple_weights, transformers_folder

import netweight
from netweight import codec
from netweight.codec.header import BY_NAME, HeaderWriter
from netweight.core.digests import digest_bytes
from netweight.errors import CorruptBlob, NetweightError, UnsafeInput, UsageError
from netweight.methods.compress.inspect import inspect_tensors
from netweight.plugins.loading import ParameterLoader
from netweight.store.safetensors import KEY, Description, Original

DEEP = b"[" * 200_000 + b"]" * 200_000
F32 = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


def raw_file(path, header, data=b""):
    header += b" " * (-len(header) % 8)
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def entry(**changes):
    return json.dumps({"a": F32 | changes}).encode()


FILES = {
    "nested": b'{"a":' + DEEP + b"}",
    "nested metadata": b'{"__metadata__":{"netweight":' + DEEP + b"}}",
    "twice": b'{"a":%b,"a":%b}' % ((json.dumps(F32).encode(),) * 2),
    "not UTF-8": b'{"\xff\xfe":%b}' % json.dumps(F32).encode(),
    "half a surrogate pair": b'{"\\ud800":%b}' % json.dumps(F32).encode(),
    "a list": b"[]",
    "negative": entry(shape=[-4]),
    "a float": entry(shape=[4.0]),
    "overflow": entry(shape=[1 << 62, 4], data_offsets=[0, 0]),
    "a number of 4000 digits": entry(shape=[10**4000]),
    "beyond the end": entry(shape=[1 << 38], data_offsets=[0, 1 << 40]),
    "unknown dtype": entry(dtype="F99"),
    "dtype as a list": entry(dtype=["F32"]),
}


@pytest.mark.parametrize("name", FILES)
def test_headers(tmp_path, name):
    path = raw_file(tmp_path / "x.safetensors", FILES[name], bytes(16))
    for work in (netweight.open_store, lambda path: netweight.compress_folder(path, tmp_path / "out.safetensors")):
        with pytest.raises(NetweightError, match=r"x\.safetensors"):
            work(path)
    assert [file.name for file in tmp_path.iterdir()] == ["x.safetensors"]


@pytest.fixture(scope="module")
def compressed(tmp_path_factory):
    place = tmp_path_factory.mktemp("compressed")
    simple_weights(place / "plain.safetensors")
    netweight.compress_folder(place / "plain.safetensors", place / "net.safetensors")
    transformers_folder(place / "m")
    (place / "m" / "vocab.txt").write_text("hello")
    netweight.compress_folder(place / "m", place / "net")
    return place


def described(source, target, change):
    """Copy a compressed file with another description."""
    raw = source.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    about = json.loads(header["__metadata__"]["netweight"])
    header["__metadata__"]["netweight"] = change(about) or json.dumps(about)
    return raw_file(target, json.dumps(header).encode(), raw[end:])


def put(key, value):
    return lambda about: about.__setitem__(key, value)


def zipped(text):
    return put("header", base64.b64encode(zlib.compress(text, 9)).decode())


DESCRIPTIONS = {
    "nested": lambda about: DEEP.decode(),
    "a list": lambda about: "[]",
    "version 99": put("version", 99),
    "version true": put("version", True),
    "version 0": put("version", 0),
    "digests of other tensors": put("digests", base64.b64encode(bytes(8)).decode()),
    "too few digests": put("digests", ""),
    "digests as a number": put("digests", 5),
    "metadata as a list": put("metadata", [1]),
    "a header of 90 MB": zipped(b"{}" + b" " * 90_000_000),
    "a header of lists": zipped(b'{"a":[' + b"[]," * 10_000_000 + b"[]]}"),
    "a nested header": zipped(b'{"a":' + DEEP + b"}"),
    "a header that is no base64": put("header", "!!!"),
    "a header that is a number": put("header", 5),
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_descriptions(compressed, tmp_path, name):
    path = described(compressed / "net.safetensors", tmp_path / "x.safetensors", DESCRIPTIONS[name])
    with pytest.raises(NetweightError, match=r"x\.safetensors"):
        netweight.decompress_folder(path, tmp_path / "out.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == ["x.safetensors"]


def index_of(**places):
    return json.dumps({"metadata": {}, "weight_map": places}).encode()


INDEX = "model.safetensors.index.json"
FOLDERS = {
    "index above": ({INDEX: index_of(a="../../x.safetensors")}, UnsafeInput),
    "index elsewhere": ({INDEX: index_of(a="/etc/passwd")}, UnsafeInput),
    "index nested": ({INDEX: b'{"weight_map":' + DEEP + b"}"}, CorruptBlob),
    "index with NUL": ({INDEX: index_of(a="a\0b.safetensors")}, CorruptBlob),
    "index with half a pair": ({INDEX: b'{"weight_map":{"\\ud800":"model.safetensors"}}'}, CorruptBlob),
    "index of numbers": ({INDEX: index_of(a=5)}, CorruptBlob),
    "index that is a list": ({INDEX: b"[]"}, CorruptBlob),
    "pickle beside": ({"pytorch_model.bin": b"PK\x03\x04" + bytes(50)}, UnsafeInput),
    "pickle of protocol 2": ({"pytorch_model.bin": b"\x80\x02}q\x00."}, UnsafeInput),
    "pickle of protocol 0": ({"pytorch_model.bin": b"cos\nsystem\n(S'id'\ntR."}, UnsafeInput),
    "pickle of protocol 0, long": ({"pytorch_model.bin": b"(dp0\n" + b"S'weight'\np1\nF0.5\ns" * 500}, UnsafeInput),
    "manifest already": ({"netweight.json": b"{}"}, UsageError),
    "one name for two": ({"model.safetensors.index.fp16.json": index_of(), "model.fp16.safetensors.index.json":
                          index_of()}, UsageError),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_folders(tmp_path, name):
    files, error = FOLDERS[name]
    folder = transformers_folder(tmp_path / "m")
    for file, data in files.items():
        (folder / file).write_bytes(data)
    with pytest.raises(error):
        netweight.compress_folder(folder, tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize(
    "config",
    [b'{"a":' + DEEP + b"}", b"\xff\xfe", b"[1]", b'{"_class_name":5,"quantization_config":7}', b'\xef\xbb\xbf{"a":1}'],
    ids=["nested", "no text", "a list", "lies", "with a mark"],
)
def test_configurations_that_are_none_are_carried_over(tmp_path, config):
    folder = transformers_folder(tmp_path / "m")
    (folder / "config.json").write_bytes(config)
    netweight.compress_folder(folder, tmp_path / "net")
    netweight.decompress_folder(tmp_path / "net", tmp_path / "back")
    assert content(tmp_path / "back") == content(folder)


def test_an_index_whose_metadata_is_a_list_comes_back(tmp_path):
    folder = transformers_folder(tmp_path / "m", shards=2)
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps(index | {"metadata": [1]}))
    netweight.compress_folder(folder, tmp_path / "net")
    netweight.decompress_folder(tmp_path / "net", tmp_path / "back")
    assert content(tmp_path / "back") == content(folder)


def test_a_name_that_is_not_utf_8_is_refused_before_work(tmp_path):
    folder = transformers_folder(tmp_path / "m")
    with open(os.fsencode(folder) + b"/\xff.txt", "w"):
        pass
    with pytest.raises(UsageError, match="not UTF-8"):
        netweight.compress_folder(folder, tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["m"]


def of(about, path):
    return next(entry for entry in about["files"] if entry["path"] == path)


def bomb(about):
    packed = base64.b64encode(zlib.compress(b" " * 300_000_000, 9)).decode()
    of(about, "config.json").update(nbytes=10**12, original=packed)


MANIFESTS = {
    "nested": lambda about: DEEP,
    "a list": lambda about: b"[]",
    "files as numbers": lambda about: about.update(files=[1]),
    "version as text": lambda about: about.update(version="1"),
    "version true": lambda about: about.update(version=True),
    "path above": lambda about: of(about, "vocab.txt").update(path="../../evil"),
    "stored elsewhere": lambda about: of(about, "vocab.txt").update(stored="/etc/passwd"),
    "path with NUL": lambda about: of(about, "vocab.txt").update(path="a\0b"),
    "path twice": lambda about: of(about, "vocab.txt").update(path="config.json"),
    "stored twice": lambda about: of(about, "vocab.txt").update(stored="config.json"),
    "a file as a folder": lambda about: of(about, "vocab.txt").update(path="config.json/x"),
    "a folder as a file": lambda about: about.update(folders=["vocab.txt"]),
    "path of a dot": lambda about: of(about, "vocab.txt").update(path="."),
    "path of 5000 letters": lambda about: of(about, "vocab.txt").update(path="a" * 5000),
    "an original of 300 MB": bomb,
    "a size of 4000 digits": lambda about: of(about, "vocab.txt").update(nbytes=10**4000),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests(compressed, tmp_path, name):
    folder = shutil.copytree(compressed / "net", tmp_path / "net")
    about = json.loads((folder / "netweight.json").read_text())
    written = MANIFESTS[name](about)
    (folder / "netweight.json").write_bytes(written if written is not None else json.dumps(about).encode())
    with pytest.raises(NetweightError):
        netweight.decompress_folder(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_links_out_of_a_compressed_folder_are_not_followed(compressed, tmp_path):
    folder = shutil.copytree(compressed / "net", tmp_path / "net")
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    (folder / "vocab.txt").unlink()
    (folder / "vocab.txt").symlink_to(secret)
    about = json.loads((folder / "netweight.json").read_text())
    of(about, "vocab.txt").update(digest=digest_bytes(b"secret"), stored_digest=digest_bytes(b"secret"), nbytes=6)
    (folder / "netweight.json").write_text(json.dumps(about))
    for work in (lambda: netweight.decompress_folder(folder, tmp_path / "out"), lambda: netweight.verify(folder)):
        with pytest.raises(UnsafeInput, match=r"vocab\.txt is a link"):
            work()
    assert not (tmp_path / "out").exists()


def test_permissions_come_back(tmp_path):
    folder = transformers_folder(tmp_path / "m")
    modes = {"model.safetensors": 0o600, "config.json": 0o640, "tokenizer.json": 0o755}
    for name, mode in modes.items():
        (folder / name).chmod(mode)
    netweight.compress_folder(folder, tmp_path / "net")
    assert (tmp_path / "net" / "model.net.safetensors").stat().st_mode & 0o777 == 0o600
    netweight.decompress_folder(tmp_path / "net", tmp_path / "back")
    assert {name: (tmp_path / "back" / name).stat().st_mode & 0o777 for name in modes} == modes
    netweight.compress_folder(folder / "model.safetensors", tmp_path / "one.safetensors")
    assert (tmp_path / "one.safetensors").stat().st_mode & 0o777 == 0o600


def failed(*arguments):
    found = netweight.verify(*arguments)
    return {finding.name: finding.detail["which"] for finding in found if finding.passed is False}


def test_verify_names_what_was_added_or_changed(compressed, tmp_path):
    folder = shutil.copytree(compressed / "net", tmp_path / "net")
    (folder / "README.md").write_text("a card")
    assert failed(folder) == failed(folder, compressed / "m") == {}
    simple_weights(folder / "model.safetensors")
    (folder / "modeling_x.py").write_text("import os")
    (folder / "config.json").chmod(0o600)
    strays = ["model.safetensors", "modeling_x.py"]
    assert failed(folder) == {"files that do not belong": strays}
    assert failed(folder, compressed / "m") == {
        "files that do not belong": strays,
        "files with other permissions": ["config.json: 600 against 644"],
    }


def test_a_source_that_shrinks_while_it_is_read_is_named(tmp_path):
    path = simple_weights(tmp_path / "x.safetensors")
    with netweight.open_store(path) as store:
        os.truncate(path, path.stat().st_size - 1000)
        assert store.get("a.weight").shape == (64, 48)
        with pytest.raises(CorruptBlob, match=r"x\.safetensors became shorter"):
            store.get("b.weight")


GROWTH = """
import re, sys, netweight
from netweight.errors import NetweightError
import netweight.methods.compress.compress_folder

def most():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])

def run():
    try:
        netweight.decompress_folder(sys.argv[1], sys.argv[2])
    except NetweightError:
        return
    raise SystemExit("not refused")

before = most()
run()
print((most() - before) // 1024)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peaks are read from /proc")
@pytest.mark.parametrize("name", ["a header of 90 MB", "a header of lists", "an original of 300 MB"])
def test_refusals_take_little_memory(compressed, tmp_path, name):
    if name in DESCRIPTIONS:
        path = described(compressed / "net.safetensors", tmp_path / "x.safetensors", DESCRIPTIONS[name])
    else:
        path = shutil.copytree(compressed / "net", tmp_path / "net")
        about = json.loads((path / "netweight.json").read_text())
        MANIFESTS[name](about)
        (path / "netweight.json").write_text(json.dumps(about))
    program = [sys.executable, "-c", GROWTH, str(path), str(tmp_path / "out")]
    answer = subprocess.run(program, capture_output=True, text=True, check=True)
    assert int(answer.stdout) <= 100  # MB, what the first call imports included


def peak():
    """Most memory that this process ever took, or has taken since it was set back, in MB."""
    return (
        int(next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM")).split()[1])
        // 1024
    )


@pytest.fixture(scope="module")
def inflated():
    """A blob of 16 GiB of zeros, in the largest chunks there are."""
    writer = HeaderWriter(BY_NAME["U64"], (1 << 31,), 1, 22)
    chunk = codec.ChunkEncoder("U64", (1 << 22,), chunk_log2=22).prepare(bytes(8 << 22))[1]
    chunks = [writer.add(chunk) for _ in range(512)]
    blob = b"".join((writer.header(), *chunks))
    assert len(blob) < 25_000
    return blob


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peaks are read from /proc")
@pytest.mark.parametrize("work", ["decode", "in numpy", "rows", "queue", "get", "loading"])
def test_a_small_file_that_declares_16_gib_is_refused(inflated, tmp_path, work):
    blob = inflated
    about = Description.of({"a": Original("U64", (1 << 31,), codec.info(blob).digest)}, None).to_json()
    stored = {"dtype": "U8", "shape": [len(blob)], "data_offsets": [0, len(blob)]}
    header = json.dumps({"__metadata__": {KEY: about}, "a.net": stored}).encode()
    store = netweight.open_store(raw_file(tmp_path / "x.safetensors", header, blob))
    loader = ParameterLoader.__new__(ParameterLoader)  # of which decode() needs nothing
    works = {
        "decode": lambda: codec.decode(blob),
        "in numpy": lambda: codec.decode_raw(blob, path="python"),
        "rows": lambda: codec.decode_rows(blob, 0, 1 << 31),
        "queue": lambda: codec.DecodeQueue().add(blob),
        "get": lambda: store.get("a"),
        "loading": lambda: loader.decode("a", torch.frombuffer(bytearray(blob), dtype=torch.uint8), None),
    }
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak()
    with pytest.raises(NetweightError, match="declare 17179869184"):
        works[work]()
    assert peak() - before <= 64


def test_deep_nesting_is_refused_whatever_the_limit_of_recursion(tmp_path):
    path = raw_file(tmp_path / "x.safetensors", FILES["nested"], bytes(16))
    program = f"import sys, netweight; sys.setrecursionlimit(10**6); netweight.open_store({str(path)!r})"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "CorruptBlob" in answer.stderr
    assert "nested 200,001 deep" in answer.stderr


def test_inspection_refuses_what_opening_refuses(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(head({"a": F32}) + b"short")
    with pytest.raises(CorruptBlob, match=r"x\.safetensors"):
        list(inspect_tensors(path))
