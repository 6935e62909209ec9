"""Banks of adapters: what goes in comes out, by rows; what is bad is named; nothing is lost to a kill."""

import functools
import json
import math
import os
import pickle
import re
import signal
import sys

import pytest
import torch
from adapters_under_test import PROJ_IN, SHAPES, TO_OUT, TO_Q, close, random_adapter, same
from safetensors.torch import save_file

import netweight
from netweight import AdapterBank, WeightSpace, read_adapter, write_adapter
from netweight.core.progress import Progress
from netweight.errors import (
    CorruptBlob,
    NameNotFound,
    NetweightError,
    OutputExists,
    OutputFailed,
    UnsafeInput,
    UsageError,
)
from netweight.nn.lora import Adapter, AdapterStack, LowRank
from netweight.store.bank import bank as adapter_bank
from netweight.store.bank import shards
from netweight.store.bank.shards import BankWriter
from netweight.store.lora_formats import reading as formats

KERNELS = {PROJ_IN: (2, 2)}
LAYOUTS = ("diffusers", "peft", "kohya")


def mixed(seed):
    """Ranks change from adapter to adapter; one scale, so that kohya's layout holds it exactly."""
    return random_adapter(seed, ranks=(1 + seed % 3, 1 + seed % 2, 2), scales=(0.5,))


@pytest.fixture
def folder(tmp_path):
    """Nine adapters in three layouts and mixed ranks, at several depths."""
    source = tmp_path / "loras"
    for number in range(9):
        layout = LAYOUTS[number % 3]
        name = f"deep/{number}" if number % 2 else str(number)
        path = source / (name if layout == "peft" or number == 0 else f"{name}.safetensors")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_adapter(mixed(number), path, layout=layout, kernels=KERNELS)
    return source


NAMES = ["0", "2", "4", "6", "8", "deep/1", "deep/3", "deep/5", "deep/7"]


def number_of(name):
    return int(name.rpartition("/")[2])


def files(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("compress", [False, True])
def test_a_folder_becomes_a_bank(folder, tmp_path, compress):
    bank = AdapterBank.ingest(folder, tmp_path / "bank", compress=compress)
    assert bank.names == NAMES
    assert len(bank) == 9
    assert bank.shapes == dict(sorted(SHAPES.items()))
    assert bank.kernels == KERNELS
    assert bank.ranks == (1, 3)
    assert bank.skipped == {}
    assert bank.base is None
    bank.verify()
    for number, name in enumerate(NAMES):
        assert close(bank.adapter(name), mixed(number_of(name)))
        assert same(bank.adapter(name), bank.adapter(number))
        assert bank.adapter(name).factors[TO_Q].rank == 1 + number_of(name) % 3
    assert same(bank.adapter("0"), read_adapter(folder / "0"))
    stack = bank.stack(2, 7)
    assert stack.down[TO_Q].shape == (5, 3, 5)
    assert stack.up[TO_Q].shape == (5, 6, 3)
    for position in range(5):
        assert same(stack.adapter(position), bank.adapter(2 + position))
    written = write_adapter(bank.adapter("4"), tmp_path / "again.safetensors", kernels=bank.kernels)
    assert close(read_adapter(written), bank.adapter("4"))


def test_the_digest_is_of_the_content(folder, tmp_path):
    digests = {AdapterBank.ingest(folder, tmp_path / f"bank{c}", compress=c).digest for c in (False, True)}
    with BankWriter(tmp_path / "small", kernels=KERNELS, shard_bytes=1) as writer:
        for name in NAMES:
            writer.add(name, AdapterBank.open(tmp_path / "bankTrue").adapter(name))
    small = AdapterBank.open(tmp_path / "small")
    assert small.shards > 1
    assert digests == {small.digest}
    with BankWriter(tmp_path / "other", kernels=KERNELS) as writer:
        for name in [*NAMES[1:], NAMES[0]]:
            writer.add(name, small.adapter(name))
    assert AdapterBank.open(tmp_path / "other").digest != small.digest


def test_only_the_rows_asked_for_are_read(tmp_path, monkeypatch):
    for compress in (False, True):
        with BankWriter(tmp_path / f"bank{compress}", compress=compress) as writer:
            for number in range(20):
                writer.add(str(number), mixed(number))
    ranks = sum(1 + number % 3 for number in (4, 5))
    bank, read, taken = AdapterBank.open(tmp_path / "bankTrue"), [], netweight.store.Store.get_slice

    def counted(self, name, rows):
        read.append((name, rows.stop - rows.start))
        return taken(self, name, rows)

    monkeypatch.setattr(netweight.store.Store, "get_slice", counted)
    bank.stack(4, 6)
    assert (f"{TO_Q}.down", ranks) in read
    assert len(read) == 2 * len(SHAPES)

    # Without compression, a shard whose other rows are overwritten gives the same.
    shard = next((tmp_path / "bankFalse").glob("shard-*"))
    with netweight.open_store(shard) as store:
        file = store.files[0]
        span = next(span for span in file.header.spans if span.name == f"{TO_Q}.down")
    before = sum(1 + number % 3 for number in range(4))
    start = file.header.data_start + span.start + before * 5 * 4
    content = shard.read_bytes()
    end = file.header.data_start + span.stop
    kept = content[start : start + ranks * 5 * 4]
    shard.write_bytes(
        content[: file.header.data_start + span.start] + b"\xff" * (before * 5 * 4) + kept
        + b"\xff" * (end - start - len(kept)) + content[end:]
    )  # fmt: skip
    stack = AdapterBank.open(tmp_path / "bankFalse").stack(4, 6)
    assert all(same(stack.adapter(number), mixed(4 + number)) for number in range(2))


def test_a_bank_grows(folder, tmp_path):
    first = AdapterBank.ingest(folder, tmp_path / "bank", compress=True)
    more = tmp_path / "more"
    more.mkdir()
    for number in range(20, 25):
        write_adapter(mixed(number), more / f"{number}.safetensors", kernels=KERNELS)
    before = first.adapter("4")
    second = AdapterBank.ingest(more, tmp_path / "bank")
    assert second.names == [*NAMES, "20", "21", "22", "23", "24"]
    assert same(second.adapter("4"), before)
    assert close(second.adapter("22"), mixed(22))
    second.verify()
    content = files(tmp_path / "bank")
    again = AdapterBank.ingest(more, tmp_path / "bank")
    assert again.names == second.names
    assert files(tmp_path / "bank") == content


def test_many_small_additions_make_few_shards(tmp_path):
    for number in range(40):
        with BankWriter(tmp_path / "bank") as writer:
            writer.add(str(number), mixed(number))
    bank = AdapterBank.open(tmp_path / "bank")
    assert bank.names == [str(number) for number in range(40)]
    assert bank.shards <= 6
    assert len(list((tmp_path / "bank").iterdir())) == bank.shards + 1
    bank.verify()
    assert same(bank.stack(11, 35).adapter(20), mixed(31))


def test_a_bank_that_grew_under_a_reader_says_so(tmp_path):
    for number in range(2):
        with BankWriter(tmp_path / "bank") as writer:
            writer.add(str(number), mixed(number))
        if number == 0:
            early, late = (AdapterBank.open(tmp_path / "bank") for _ in range(2))
            early.stack(0, 1)
    assert same(early.adapter(0), mixed(0))  # what was opened stays readable
    with pytest.raises(CorruptBlob, match=r"the bank was changed\. Open the bank again"):
        late.adapter(0)


def test_a_stack_is_added_whole_or_not_at_all(tmp_path):
    stack = AdapterStack.of([mixed(number) for number in range(4)])
    with BankWriter(tmp_path / "bank") as writer:
        writer.add_stack(["a", "b", "c", "d"], stack)
        assert writer.names == ["a", "b", "c", "d"]
        for names, message in ((["e", "a", "f", "g"], "'a' was added before"), (["e", "e", "f", "g"], "'e'"),
                               (["e"], "1 names")):  # fmt: skip
            with pytest.raises(UsageError, match=message):
                writer.add_stack(names, stack)
        stack.down[TO_Q].zero_()  # the bank holds a copy
    bank = AdapterBank.open(tmp_path / "bank")
    assert bank.names == ["a", "b", "c", "d"]
    assert same(bank.adapter("c"), mixed(2))


def test_dtypes_widen_within_a_shard_and_values_stay(tmp_path):
    narrow, wide = (random_adapter(1, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    with BankWriter(tmp_path / "bank") as writer:
        writer.add("narrow", narrow)
        writer.add("wide", wide)
    found = AdapterBank.open(tmp_path / "bank").adapter("narrow")
    assert found.factors[TO_Q].down.dtype == torch.float32
    assert torch.equal(found.factors[TO_Q].down, narrow.factors[TO_Q].down.float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.pop(TO_Q), f"lacks {TO_Q}"),
        (lambda f: f.update(extra=f[TO_Q]), "changes also extra"),
        (lambda f: f.update({TO_Q: LowRank(torch.ones(1, 7), torch.ones(6, 1))}), r"in shape \(6, 7\), the others"),
        (lambda f: f.update({TO_OUT: LowRank(f[TO_OUT].down / 0, f[TO_OUT].up)}), f"NaN or infinity in {TO_OUT}"),
        (lambda f: f.update({TO_OUT: LowRank(f[TO_OUT].down, f[TO_OUT].up, math.inf)}), f"NaN or infinity in {TO_OUT}"),
    ],
)  # fmt: skip
def test_bad_additions_are_named_and_change_nothing(tmp_path, change, message):
    factors = dict(mixed(1).factors)
    change(factors)
    with BankWriter(tmp_path / "bank") as writer:
        writer.add("good", mixed(0))
        with pytest.raises(UsageError, match=message) as caught:
            writer.add("bad", Adapter(factors))
        assert "'bad'" in str(caught.value)
    assert AdapterBank.open(tmp_path / "bank").names == ["good"]


def spoil(source, kind):
    """Put one bad adapter among the good ones; return its name and a part of what is said."""
    bad, good = source / "bad.safetensors", dict(mixed(50).factors)
    if kind == "pickle":
        torch.save({}, source / "bad.bin")
        return UnsafeInput, "bad.bin is a pickle"
    if kind == "other base":
        write_adapter(mixed(51), source / "9a.safetensors", kernels=KERNELS, base="sd-1-5")
        write_adapter(mixed(52), source / "9b.safetensors", kernels=KERNELS, base="sd-1-5")
        write_adapter(mixed(50), bad, kernels=KERNELS, base="sdxl")
        return UsageError, "was trained on sdxl, and the others on sd-1-5"
    if kind == "same name":
        write_adapter(mixed(50), source / "8", layout="peft", kernels=KERNELS)
        return UsageError, "the same name as"
    if kind == "same content":
        bad.write_bytes((source / "6.safetensors").read_bytes())
        return UsageError, "contains the same adapter as '6'"
    if kind == "truncated":
        bad.write_bytes((source / "6.safetensors").read_bytes()[:-1])
        return CorruptBlob, "cut short"
    if kind == "other shape":
        good[TO_Q] = LowRank(torch.ones(1, 7), torch.ones(6, 1))
    if kind == "other modules":
        good = {"unet.conv_in": LowRank(torch.ones(1, 3), torch.ones(2, 1))}
    if kind == "NaN":
        good[TO_Q] = LowRank(good[TO_Q].down / 0, good[TO_Q].up)
    write_adapter(Adapter(good), bad, kernels={} if kind == "kernels" else KERNELS)
    return {
        "other shape": (UsageError, f"changes {TO_Q} in shape (6, 7), the others in (6, 5)"),
        "other modules": (UsageError, "does not change any module that the others change, but unet.conv_in"),
        "NaN": (UsageError, f"bad.safetensors: {TO_Q} contains NaN"),
        "kernels": (UsageError, "other convolutions"),
    }[kind]


KINDS = [
    "pickle",
    "other base",
    "same name",
    "same content",
    "truncated",
    "other shape",
    "other modules",
    "NaN",
    "kernels",
]


@pytest.mark.parametrize("kind", KINDS)
def test_one_bad_adapter_is_named_and_skipped_only_if_asked(folder, tmp_path, kind):
    error, message = spoil(folder, kind)
    with pytest.raises(error, match=re.escape(message)) as caught:
        AdapterBank.ingest(folder, tmp_path / "bank")
    assert "skip_bad" in str(caught.value)
    assert not (tmp_path / "bank").exists()
    bank = AdapterBank.ingest(folder, tmp_path / "bank", skip_bad=True)
    assert bank.names[:5] == NAMES[:5]
    assert len(bank) == 9 + 2 * (kind == "other base")
    assert len(bank.skipped) == 1
    assert message in next(iter(bank.skipped.values()))


def test_all_problems_are_said_at_once(folder, tmp_path):
    for kind in ("other shape", "pickle"):
        spoil(folder, kind)
    with pytest.raises(NetweightError, match="2 of 11 adapters") as caught:
        AdapterBank.ingest(folder, tmp_path / "bank")
    assert f"changes {TO_Q} in shape" in str(caught.value)
    assert "is a pickle" in str(caught.value)


def folder_of(tmp_path, adapters, layout="diffusers", **options):
    """A folder with an adapter of each name."""
    for name, adapter in adapters.items():
        path = tmp_path / "mixed" / (name if layout == "peft" else f"{name}.safetensors")
        path.parent.mkdir(exist_ok=True)
        write_adapter(adapter, path, layout=layout, kernels=KERNELS, **options)
    return tmp_path / "mixed"


@pytest.mark.parametrize("compress", [False, True])
def test_adapters_of_different_modules_are_joined(tmp_path, compress):
    whole, other = mixed(0), LowRank(torch.ones(1, 3), torch.ones(2, 1))
    part = Adapter({TO_Q: mixed(1).factors[TO_Q]})
    more = Adapter({TO_Q: mixed(2).factors[TO_Q], "text_encoder.encoder.layers.0.mlp.fc1": other})
    source = folder_of(tmp_path, {"a": whole, "b": part, "c": more})
    bank = AdapterBank.ingest(source, tmp_path / "bank", compress=compress)
    assert bank.modules == tuple(sorted({*SHAPES, "text_encoder.encoder.layers.0.mlp.fc1"}))
    assert bank.ranks == (1, 3)
    for name, adapter in {"a": whole, "b": part, "c": more}.items():
        assert bank.adapter(name).modules == adapter.modules
        assert close(bank.adapter(name), adapter)
    space = WeightSpace.fit(bank)
    assert space.project(part).shape == (2,)
    for name, adapter in {"a": whole, "b": part, "c": more}.items():
        found = space.point(name).adapter.factors
        for module, (rows, columns) in bank.shapes.items():
            dense = adapter.factors[module].dense() if module in adapter.factors else torch.zeros(rows, columns)
            torch.testing.assert_close(found[module].dense(), dense, rtol=0, atol=1e-5)
    chosen = AdapterBank.ingest(source, tmp_path / "chosen", select="unet.mid_block.**")
    assert chosen.modules == tuple(sorted(name for name in SHAPES if name.startswith("unet.mid_block")))
    with pytest.raises(NameNotFound, match=r"a\.safetensors: Pattern .* matches none"):
        AdapterBank.ingest(source, tmp_path / "none", select="text_encoder.**")


def two_of_one_base(tmp_path, *modules):
    """Adapters of one module each, in a file of peft's kind that names the base."""
    for number, module in enumerate(modules):
        (tmp_path / "two" / str(number)).mkdir(parents=True)
        tensors = {f"{module}.lora_A.weight": torch.ones(1, 4), f"{module}.lora_B.weight": torch.ones(4, 1)}
        about = {"format": "pt", "ss_base_model_version": "somebody/video"}
        save_file(tensors, tmp_path / "two" / str(number) / "lora.safetensors", about)
    return tmp_path / "two"


def test_adapters_of_the_two_stages_of_one_base_are_in_one_bank_and_two_spellings_are_not(tmp_path):
    stages = two_of_one_base(tmp_path / "stages", "transformer.first.own", "transformer_2.first.own")
    assert len(AdapterBank.ingest(stages, tmp_path / "bank").shapes) == 2
    spellings = two_of_one_base(tmp_path / "spellings", "transformer_2.first.own", "diffusion_model.first.own")
    with pytest.raises(UsageError, match="does not change any module that the others change"):
        AdapterBank.ingest(spellings, tmp_path / "other")


def test_a_pickle_is_refused_whatever_its_ending(folder, tmp_path):
    (folder / "lora.pickle").write_bytes(pickle.dumps({}))
    with pytest.raises(UnsafeInput, match=r"lora\.pickle is a pickle"):
        AdapterBank.ingest(folder, tmp_path / "bank")


def test_mirrors_and_paths_of_one_base_are_one_base(tmp_path):
    bases = ["runwayml/stable-diffusion-v1-5", "/models/stable-diffusion-v1-5", "sd1.5",
             "stable-diffusion-v1-5/stable-diffusion-v1-5"]  # fmt: skip
    for number, base in enumerate([*bases, "stabilityai/stable-diffusion-xl-base-1.0"]):
        source = folder_of(tmp_path, {str(number): mixed(number)}, layout="peft", base=base)
    with pytest.raises(UsageError, match=r"4 was trained on .*xl-base-1.0, and the others on .*--base"):
        AdapterBank.ingest(source, tmp_path / "bank")
    bank = AdapterBank.ingest(source, tmp_path / "bank", skip_bad=True)
    assert (len(bank), bank.base, list(bank.skipped)) == (4, bases[0], ["4"])
    said = AdapterBank.ingest(source, tmp_path / "said", base="somebody/merged")
    assert (len(said), said.base) == (5, "somebody/merged")


def test_the_base_is_that_of_what_was_added(folder, tmp_path):
    """Most files name one model, but none of these can be used."""
    for number in range(3):
        bad = dict(mixed(number).factors)
        bad[TO_Q] = LowRank(bad[TO_Q].down / 0, bad[TO_Q].up)
        write_adapter(Adapter(bad), folder / f"bad{number}", layout="peft", kernels=KERNELS, base="somebody/else")
    bank = AdapterBank.ingest(folder, tmp_path / "bank", skip_bad=True)
    assert (len(bank), bank.base, len(bank.skipped)) == (9, None, 3)


def test_what_a_trainer_says_is_kept(tmp_path):
    import safetensors.torch

    (tmp_path / "loras").mkdir()
    tags = json.dumps({"10_person": {"sks person": 12, "smile": 3}})
    for number in range(2):
        file = write_adapter(mixed(number), tmp_path / "loras" / f"{number}.safetensors", layout="kohya")
        said = {"ss_base_model_version": "sdxl_base_v1-0", "ss_tag_frequency": tags, "modelspec.license": "MIT"}
        safetensors.torch.save_file(safetensors.torch.load_file(file), file, said)
    bank = AdapterBank.ingest(tmp_path / "loras", tmp_path / "bank")
    assert bank.base == "sdxl_base_v1-0"
    assert bank.provenance["0"]["modelspec.license"] == "MIT"
    assert bank.provenance["1"]["tags"] == "sks person, smile"


def test_a_file_that_changed_under_its_name_is_refused(folder, tmp_path):
    AdapterBank.ingest(folder, tmp_path / "bank")
    os.utime(folder / "6.safetensors")
    assert len(AdapterBank.ingest(folder, tmp_path / "bank")) == 9  # touched, but the same
    write_adapter(mixed(60), folder / "6.safetensors", kernels=KERNELS, overwrite=True)
    with pytest.raises(UsageError, match="the bank has another adapter '6' already"):
        AdapterBank.ingest(folder, tmp_path / "bank")


def test_one_adapter_is_a_bank_of_one(folder, tmp_path):
    assert AdapterBank.ingest(folder / "0", tmp_path / "a").names == ["0"]
    assert AdapterBank.ingest(folder / "6.safetensors", tmp_path / "b").names == ["6"]
    assert len(AdapterBank.ingest(folder / "deep", tmp_path / "a")) == 5


def test_a_folder_of_downloads_is_not_taken_for_the_one_of_the_usual_name(tmp_path):
    """Trainers of diffusers write pytorch_lora_weights.safetensors, and people keep other adapters beside it."""
    source = tmp_path / "loras"
    source.mkdir()
    for number, name in enumerate(("pytorch_lora_weights", "style", "face")):
        write_adapter(mixed(number), source / f"{name}.safetensors", layout="diffusers", kernels=KERNELS)
    assert AdapterBank.ingest(source, tmp_path / "a").names == ["face", "pytorch_lora_weights", "style"]
    # A folder of training has the embedding of a word beside its adapter, and earlier steps below.
    (source / "style.safetensors").unlink()
    save_file({"clip_l": torch.ones(2, 8)}, source / "face.safetensors")
    (source / "checkpoint-500").mkdir()
    write_adapter(
        mixed(1), source / "checkpoint-500" / "pytorch_lora_weights.safetensors", layout="diffusers", kernels=KERNELS
    )
    assert AdapterBank.ingest(source, tmp_path / "b").names == ["loras"]


def test_what_cannot_be_opened_or_made(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for call, error, message in [
        (lambda: AdapterBank.open(tmp_path / "empty"), UsageError, "is not a bank of adapters.*netweight space ingest"),
        (lambda: AdapterBank.ingest(tmp_path / "absent", tmp_path / "bank"), UsageError, "no file or folder"),
        (lambda: AdapterBank.ingest(tmp_path / "empty", tmp_path / "bank"), UsageError, "contains no adapter"),
        (lambda: AdapterBank.ingest(folder, tmp_path / "empty"), OutputExists, "exists already"),
        (lambda: AdapterBank.ingest(folder, tmp_path / "no" / "bank"), UsageError, "no does not exist"),
        (lambda: AdapterBank.ingest(folder, tmp_path / "file" / "bank"), UsageError, "inside of .*file, which"),
        (lambda: BankWriter(tmp_path / "bank").add("a", mixed(0)), UsageError, "is not open"),
    ]:
        with pytest.raises(error, match=message):
            call()
    with pytest.raises(UsageError, match="no adapter was added"), BankWriter(tmp_path / "bank"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "loras"]


def test_what_a_bank_does_not_have(folder, tmp_path):
    bank = AdapterBank.ingest(folder, tmp_path / "bank")
    assert same(bank.adapter(-1), bank.adapter("deep/7"))
    with pytest.raises(NameNotFound, match=r"no adapter 'deep/2'. The nearest names are deep/"):
        bank.adapter("deep/2")
    with pytest.raises(NameNotFound, match="contains 9"):
        bank.adapter(9)
    for start, stop in ((3, 3), (-1, 2), (5, 10)):
        with pytest.raises(UsageError, match="no range"):
            bank.stack(start, stop)


@pytest.mark.parametrize("compress", [False, True])
def test_damage_is_found(folder, tmp_path, compress):
    bank = AdapterBank.ingest(folder, tmp_path / "bank", compress=compress)
    shard = next((tmp_path / "bank").glob("shard-*"))
    whole = shard.read_bytes()
    for position in (len(whole) - 100, len(whole) // 2):
        shard.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        with pytest.raises(CorruptBlob, match=rf"{shard.name} \(adapters 0 to deep/7\)"):
            bank.verify()
        with pytest.raises(CorruptBlob, match=shard.name):
            WeightSpace.fit(AdapterBank.open(tmp_path / "bank"))
    shard.write_bytes(whole[:-1])
    with pytest.raises(CorruptBlob, match=f"{shard.name} has"):
        AdapterBank.open(tmp_path / "bank")
    shard.unlink()
    with pytest.raises(CorruptBlob, match=f"{shard.name} is missing"):
        AdapterBank.open(tmp_path / "bank")
    record = tmp_path / "bank" / "bank.json"
    values = json.loads(record.read_text())
    values["shards"][0]["names"][0] = "2"
    for text in ("{", "[]", json.dumps(values)):
        record.write_text(text)
        with pytest.raises(CorruptBlob, match="not a record of a bank of adapters in version 1"):
            AdapterBank.open(tmp_path / "bank")


def test_a_shard_that_changes_while_it_is_read_is_named(folder, tmp_path):
    bank = AdapterBank.ingest(folder, tmp_path / "bank")
    assert close(mixed(2), bank.adapter("2"))
    shard = next((tmp_path / "bank").glob("shard-*"))
    data = bytearray(shard.read_bytes())
    with open(shard, "r+b") as file:
        file.seek(len(data) // 3)
        file.write(bytes(byte ^ 8 for byte in data[len(data) // 3 :]))
    with pytest.raises(CorruptBlob, match=f"{shard.name} is damaged, or has changed while it was read") as caught:
        bank.stack(0, len(bank))
    assert "Copy this file again" in caught.value.cure


def test_work_grows_with_the_number_of_files_alone(tmp_path, monkeypatch):
    """Every file is opened once to be checked and once to be read, and what was written is not written again."""
    opened, written = [], []
    whole, shard = formats.open_store, shards.write_shard
    monkeypatch.setattr(formats, "open_store", lambda path: opened.append(path) or whole(path))
    monkeypatch.setattr(
        shards, "write_shard",
        lambda path, pieces, **how: written.append(sum(map(len, pieces))) or shard(path, pieces, **how),
    )  # fmt: skip
    counts = []
    for count in (12, 48):
        (tmp_path / str(count)).mkdir()
        source = folder_of(tmp_path / str(count), {str(number): mixed(number) for number in range(count)})
        opened.clear()
        written.clear()
        assert len(AdapterBank.ingest(source, tmp_path / f"bank-{count}")) == count
        counts.append((len(opened) / count, sum(written) / count))
    assert counts == [(2, 1), (2, 1)]


def test_what_an_interrupted_call_left_of_another_source_is_not_mixed_in(folder, tmp_path):
    with pytest.raises(KeyboardInterrupt), BankWriter(tmp_path / "bank") as writer:
        add_and_interrupt(writer)
    with pytest.raises(UsageError, match=r"interrupted call left 'foreign' in .*netweight-part"):
        AdapterBank.ingest(folder, tmp_path / "bank")


def add_and_interrupt(writer):
    writer.add("foreign", mixed(0))
    raise KeyboardInterrupt


def test_names_of_the_model_are_taken_and_checked(tmp_path):
    older = random_adapter(0, shapes={"text_encoder.text_model.encoder.layers.0.mlp.fc1": (3, 4)}, ranks=(2,))
    for name, layout in (("a", "diffusers"), ("b", "kohya")):
        write_adapter(older, tmp_path / "loras" / f"{name}.safetensors", layout=layout) if layout == "kohya" else (
            write_adapter(older.scaled(2.0), tmp_path / "loras" / name, layout=layout))  # fmt: skip
    model = ["text_encoder.encoder.layers.0.mlp.fc1", "unet.conv_in"]
    bank = AdapterBank.ingest(tmp_path / "loras", tmp_path / "bank", modules=model)
    assert bank.modules == ("text_encoder.encoder.layers.0.mlp.fc1",)
    with pytest.raises(NameNotFound, match=r"the model has no module .*the adapter was trained on"):
        AdapterBank.ingest(tmp_path / "loras" / "a", tmp_path / "other", modules=["unet.conv_in"])


def test_a_bank_goes_to_other_processes(folder, tmp_path):
    bank = AdapterBank.ingest(folder, tmp_path / "bank")
    bank.stack(0, 1)
    assert same(pickle.loads(pickle.dumps(bank)).adapter(3), bank.adapter(3))


def test_two_writers_do_not_meet(tmp_path):
    with BankWriter(tmp_path / "bank") as writer:
        writer.add("a", mixed(0))
        with pytest.raises(UsageError, match="Another run is writing"), BankWriter(tmp_path / "bank"):
            pass
    assert AdapterBank.open(tmp_path / "bank").names == ["a"]


def test_what_was_added_before_an_error_is_taken_up_by_the_next_writer(tmp_path):
    with pytest.raises(KeyboardInterrupt), BankWriter(tmp_path / "bank") as writer:
        add_and_interrupt(writer)
    assert not (tmp_path / "bank").exists()
    with BankWriter(tmp_path / "bank") as writer:
        assert writer.names == ["foreign"]
        assert "foreign" in writer
        writer.add("b", mixed(1))
    assert [path.name for path in tmp_path.iterdir()] == ["bank"]
    assert same(AdapterBank.open(tmp_path / "bank").adapter("foreign"), mixed(0))


def killed_ingest(folder, target, moment):
    """Ingest in a fork that is killed before or after its so manieth step on the file system; whether it was killed."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or status == 0
        return os.WIFSIGNALED(status)
    left = [moment]

    def counting(function):
        def counted(*arguments, **options):
            for step in (lambda: function(*arguments, **options), lambda: None):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                step()

        return counted

    try:
        for name in ("replace", "fsync", "rename", "mkdir", "unlink"):
            setattr(os, name, counting(getattr(os, name)))
        adapter_bank.BankWriter = functools.partial(BankWriter, shard_bytes=600)
        AdapterBank.ingest(folder, target)
    except BaseException:
        os._exit(1)
    os._exit(0)


@pytest.mark.skipif(sys.platform == "win32", reason="kills and forks are POSIX")
def test_a_killed_ingest_goes_on(folder, tmp_path):
    expected = AdapterBank.ingest(folder, tmp_path / "whole").digest
    kept = []
    for moment in range(2, 80, 6):
        target = tmp_path / f"bank{moment}"
        killed = killed_ingest(folder, target, moment)
        part = tmp_path / f".bank{moment}.netweight-part" / "bank.json"
        assert killed or target.exists()
        if target.exists():
            kept.append("whole")
            assert AdapterBank.open(target).digest == expected
        else:
            kept.append(len(json.loads(part.read_text())["shards"]) if part.is_file() else None)
        bank = AdapterBank.ingest(folder, target)
        assert bank.digest == expected
        bank.verify()
        assert not part.parent.exists()
        assert len(list(target.iterdir())) == bank.shards + 1
    assert len(set(kept)) >= 4  # the kills came at different stages


def test_a_full_disk_is_no_bad_adapter(folder, tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OutputFailed("The disk is full.")

    monkeypatch.setattr(adapter_bank, "BankWriter", functools.partial(BankWriter, shard_bytes=600))
    monkeypatch.setattr(shards, "write_shard", full)
    with pytest.raises(OutputFailed):
        AdapterBank.ingest(folder, tmp_path / "bank", skip_bad=True)
    monkeypatch.undo()
    assert AdapterBank.ingest(folder, tmp_path / "bank").names == NAMES


def test_progress_is_shown(folder, tmp_path, capsys):
    AdapterBank.ingest(folder, tmp_path / "bank", progress=Progress("plain", every=0.0))
    shown = capsys.readouterr().err
    assert "Checking adapters: 9 of 9 adapters" in shown
    assert "Adding adapters: 9 of 9 adapters" in shown
