"""What `compress` says beside sizes: files that were only copied, and bases that bring nothing."""

import json

import numpy
import pytest
from folders_under_test import transformers_folder, weights, write_safetensors

from netweight.methods.compress.compress_folder import compress_folder, decompress_folder
from netweight.store.reader import StoredFile

SHAPE = (256, 192)


def model(path, seed=0, dtype="BF16", names=("a.weight", "b.weight"), change=0):
    """A weights file; `change` alters the last bit of some numbers, as little training does."""
    tensors = []
    for at, name in enumerate(names):
        data = numpy.frombuffer(weights(dtype, SHAPE, seed + at), numpy.uint8).copy()
        data[: 200 * change : 200] ^= 1
        tensors.append((name, dtype, SHAPE, data.tobytes()))
    return write_safetensors(path, tensors, metadata={"format": "pt"})


def bound_to(path):
    file = StoredFile(path)
    return file.description.base


def compressed(tmp_path, tuned, base):
    net = tmp_path / "net.safetensors"
    summary = compress_folder(tuned, net, base=base)
    alone = compress_folder(tuned, tmp_path / "alone.safetensors")
    decompress_folder(net, tmp_path / "back.safetensors", base=base)
    assert (tmp_path / "back.safetensors").read_bytes() == tuned.read_bytes()
    return summary, alone, " ".join(summary.notes())


def test_a_fine_tune_is_stored_as_differences_and_nothing_is_said(tmp_path):
    base, tuned = model(tmp_path / "base.safetensors"), model(tmp_path / "tuned.safetensors", change=50)
    summary, alone, notes = compressed(tmp_path, tuned, base)
    assert summary.differences == 2
    assert summary.stored_nbytes < alone.stored_nbytes / 2
    assert notes == ""


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (dict(seed=77), "not smaller as differences"),
        (dict(dtype="F32"), "in F32 where the base has BF16"),
        (dict(names=("x.weight", "y.weight")), "names that the base lacks"),
    ],
)
def test_a_base_that_brings_nothing_is_said_and_not_needed(tmp_path, how, reason):
    base, tuned = model(tmp_path / "base.safetensors"), model(tmp_path / "tuned.safetensors", **how)
    summary, alone, notes = compressed(tmp_path, tuned, base)
    assert summary.differences == 0
    assert reason in notes
    assert "No tensor became smaller as a difference from the base" in notes
    assert bound_to(tmp_path / "net.safetensors") is None
    assert summary.stored_nbytes <= alone.stored_nbytes
    base.unlink()
    decompress_folder(tmp_path / "net.safetensors", tmp_path / "without.safetensors")
    assert (tmp_path / "without.safetensors").read_bytes() == tuned.read_bytes()


def test_what_of_a_base_is_used_is_counted(tmp_path):
    base = model(tmp_path / "base.safetensors")
    tuned = model(tmp_path / "tuned.safetensors", names=("a.weight", "new.weight"), change=50)
    summary, _, notes = compressed(tmp_path, tuned, base)
    assert summary.differences == 1
    assert "1 of 2 tensors are stored as differences: 1 tensor with names that the base lacks" in notes


def test_a_training_checkpoint_says_what_was_only_copied(tmp_path):
    source = transformers_folder(tmp_path / "checkpoint-10")
    (source / "optimizer.pt").write_bytes(bytes(40_000))
    (source / "rng_state.pth").write_bytes(bytes(2_000))
    summary = compress_folder(source, tmp_path / "net")
    notes = " ".join(summary.notes())
    assert "optimizer.pt (40.0 kB)" in notes
    assert "The folder as a whole went from" in notes
    assert summary.folder_nbytes - summary.nbytes == sum(summary.carried.values()) > 42_000
    assert next(iter(summary.carried)) == "optimizer.pt"
    assert json.loads((tmp_path / "net" / "netweight.json").read_text())["version"] == 1


def test_small_files_beside_weights_are_not_worth_a_word(tmp_path):
    source = transformers_folder(tmp_path / "m")
    assert compress_folder(source, tmp_path / "net").notes() == []
