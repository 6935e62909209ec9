"""Pipes, devices, loops of links, and JSON and archives made to do harm, in the place of a model's files."""

import json
import os
import pickle
import re
import signal
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import warm
from folders_under_test import simple_weights, transformers_folder

import netweight
from netweight.core.bounded_json import MOST_CONFIG, MOST_INDEX, read_json
from netweight.core.regular_files import regular
from netweight.errors import NetweightError, UnsafeInput, Unsupported
from netweight.labels.identify_subject import identify
from netweight.labels.measure import label
from netweight.methods.compress.inspect import inspect_tensors
from netweight.store.bank.bank import AdapterBank
from netweight.store.bank.published import published_tensor
from netweight.store.torch_archive import refuse_inflated

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pipes and /dev/zero as Linux has them")
DEEP = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
INDEX = "model.safetensors.index.json"


@pytest.fixture(autouse=True)
def _no_waiting():
    """Fail instead of waiting for a pipe."""

    def fail(*_):
        raise TimeoutError("something waited")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def pipe(path):
    os.mkfifo(path)


def zeros(path):
    path.symlink_to("/dev/zero")


def folder(path):
    path.mkdir()


def loop(path):
    path.symlink_to(path.name)


KINDS = {"a pipe": pipe, "a device": zeros, "a folder": folder, "a link to itself": loop}


@pytest.fixture
def compressed(tmp_path):
    netweight.compress_folder(transformers_folder(tmp_path / "m"), tmp_path / "net")
    return tmp_path


def replaced(path, kind):
    if path.exists():
        path.unlink()
    KINDS[kind](path)


def works(path, beside):
    """What reads a folder, and a folder beside it that is sound."""
    return {
        "compress": lambda: netweight.compress_folder(path, beside.parent / "out"),
        "compress to a base": lambda: netweight.compress_folder(beside, beside.parent / "out", base=path),
        "verify": lambda: netweight.verify(path),
        "verify against": lambda: netweight.verify(beside.parent / "net", path),
        "decompress": lambda: netweight.decompress_folder(path, beside.parent / "out"),
        "inspect": lambda: list(inspect_tensors(path)),
        "open": lambda: netweight.open_store(path),
        "label": lambda: label(path),
        "ingest": lambda: AdapterBank.ingest(path, beside.parent / "bank"),
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("work", works(Path(), Path()))
def test_weights_that_are_no_file_are_refused_by_name(compressed, tmp_path, kind, work):
    bad = transformers_folder(tmp_path / "bad")
    replaced(bad / "model.safetensors", kind)
    if work == "verify against" and kind == "a folder":
        missed = {finding.name for finding in works(bad, tmp_path / "m")[work]() if finding.passed is False}
        assert "tensors and files that only one side has" in missed
        return
    # Of a loop of links the system's own error names the file; commands report it as they report any such error.
    with pytest.raises((NetweightError, OSError), match=r"bad|regular|folder"):
        works(bad, tmp_path / "m")[work]()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["netweight.json", "model.net.safetensors", "config.json"])
@pytest.mark.parametrize("work", ["verify", "decompress"])
def test_files_of_a_compressed_folder_that_are_none_are_refused_by_name(compressed, tmp_path, kind, name, work):
    replaced(tmp_path / "net" / name, kind)
    with pytest.raises((NetweightError, OSError), match="net"):
        works(tmp_path / "net", tmp_path / "m")[work]()
    assert not (tmp_path / "out").exists()


def test_a_link_to_the_folder_itself_is_followed_once(tmp_path):
    lora = tmp_path / "loras"
    lora.mkdir()
    (lora / "again").symlink_to(lora)
    (lora / "loop").symlink_to("loop")
    with pytest.raises(NetweightError, match="no weights"):
        identify(lora)


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a folder"])
def test_only_regular_files_are_opened(tmp_path, kind):
    KINDS[kind](tmp_path / "x")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Unsupported, match=r"x is not a regular file"):
        regular(tmp_path / "x")
    assert len(os.listdir("/proc/self/fd")) == before
    (tmp_path / "y").write_bytes(b"1")
    os.close(regular(tmp_path / "y"))


JSON = {
    "deep": lambda: DEEP,
    "long": lambda: b'{"a":"' + b"x" * (MOST_INDEX + 1) + b'"}',
    "of many values": lambda: b'{"a":[' + b"0," * 3_000_000 + b"0]}",
    "no text": lambda: b"\xff\xfe",
    "a list": lambda: b"[1]",
    "twice": lambda: b'{"a":1,"a":2}',
}

GROWTH = """
import re, sys, time
from pathlib import Path
from netweight.core.bounded_json import read_json
from netweight.errors import NetweightError
from netweight.labels.measure import label
from netweight.methods.compress.compress_folder import compress_folder, decompress_folder
from netweight.methods.compress.verify import verify
import netweight.methods.compress.quantized

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

good, bad, out = sys.argv[1:]
label(good)
compress_folder(good, out + "-0")
for at, work in enumerate((label, lambda path: compress_folder(path, out))):
    Path("/proc/self/clear_refs").write_text("5")
    before, started = peak(), time.process_time()
    try:
        work(bad)
        error = ""
    except NetweightError as refusal:
        error = str(refusal)
    print(at, peak() - before, time.process_time() - started, error.replace("\\n", " "))
"""


def mixed(names, kinds, usual):
    """All pairs; those that are not usual, each a process, in the study."""
    return [
        pytest.param(name, kind, marks=() if (name, kind) in usual else pytest.mark.study)
        for name in names
        for kind in kinds
    ]


USUAL = [("config.json", "deep"), ("tokenizer.json", "of many values"), (INDEX, "deep")]


@pytest.mark.parametrize(
    ("name", "kind"), mixed(["config.json", "generation_config.json", "tokenizer.json", INDEX], JSON, USUAL)
)
def test_json_takes_little_memory_and_work(tmp_path, name, kind):
    good, bad = transformers_folder(tmp_path / "good"), transformers_folder(tmp_path / "bad")
    (bad / name).write_bytes(JSON[kind]())
    size = (bad / name).stat().st_size
    done = warm.run("-c", GROWTH, good, bad, tmp_path / "out", libraries=warm.COMPRESSION)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split(maxsplit=3) for line in done.stdout.splitlines()]
    for _, memory, _, *error in rows:
        assert int(memory) <= 2 * size + (64 << 20)
        assert not error or re.search(r"json", error[0])
    if kind == "no text" and name in ("config.json", INDEX):
        assert len(rows[0]) == 4
    if name == INDEX:
        assert all(len(row) == 4 for row in rows)


def test_json_is_bounded(tmp_path):
    file = tmp_path / "x.json"
    for content, reason in (
        (JSON["long"](), f"more than {MOST_CONFIG:,} bytes"),
        (JSON["of many values"](), "3,000,0.. values"),
        (DEEP, "deep"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=reason):
            read_json(file)
    file.write_bytes(b"[" + b"0," * 300_000 + b"0]")
    assert len(read_json(file)) == 300_001


def archive(path, entries, *, how):
    with zipfile.ZipFile(path, "w", how) as file:
        for name, data in entries.items():
            file.writestr(name, data)
    return path


def test_archives_that_inflate_are_refused_before_they_are_read(tmp_path):
    bomb = {"archive/data.pkl": b"\x80\x02" + b"N0" * 5_000_000 + b"N.", "archive/version": b"3\n"}
    path = archive(tmp_path / "all_weights.pt", bomb, how=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 100_000
    for work in (refuse_inflated, label, published_tensor):
        with pytest.raises(UnsafeInput, match=r"data\.pkl.* is compressed"):
            work(path)
    torch.save({"a": torch.zeros(3)}, tmp_path / "sound.pt")
    refuse_inflated(tmp_path / "sound.pt")
    (tmp_path / "no-archive.pt").write_bytes(b"PK\x03\x04" + bytes(50))
    refuse_inflated(tmp_path / "no-archive.pt")
    assert label(tmp_path / "sound.pt")


class Harm:
    """Unpickled, it makes a folder."""

    def __init__(self, where):
        self.where = where

    def __reduce__(self):
        return os.mkdir, (str(self.where),)


@pytest.mark.parametrize("how", ["pickle", "archive"])
def test_nothing_in_a_pickle_is_run(tmp_path, how):
    harm = pickle.dumps({"a": Harm(tmp_path / "ran")}, protocol=2)
    for name in ("pytorch_model.bin", "all_weights.pt"):
        place = tmp_path / name.split(".")[0]
        place.mkdir()
        (place / "config.json").write_text(json.dumps({"model_type": "llama"}))
        if how == "pickle":
            (place / name).write_bytes(harm)
        else:
            archive(place / name, {"archive/data.pkl": harm, "archive/version": b"3\n"}, how=zipfile.ZIP_STORED)
        for work in (
            label,
            lambda path: netweight.compress_folder(path, tmp_path / "out"),
            lambda path: AdapterBank.ingest(path, tmp_path / "bank"),
            lambda path: list(inspect_tensors(path)),
            lambda path: netweight.compress_folder(
                simple_weights(tmp_path / "s.safetensors"), tmp_path / "o", base=path
            ),
        ):
            with pytest.raises(NetweightError):
                work(place)
    assert not (tmp_path / "ran").exists()
