"""Models stored as differences from another one: every bit comes back, from the right base only."""

import os
import random
import shutil
import time

import numpy
import pytest
import torch
import warm
from click.testing import CliRunner
from folders_under_test import content, transformers_folder, weights, write_safetensors
from safetensors.torch import load_file

import netweight
from netweight import cli
from netweight.core.atomic_writes import part_of
from netweight.errors import CorruptBlob, NetweightError, UsageError
from netweight.store import StoreWriter, open_store
from netweight.store.reader import StoredFile

SHAPE = (700, 512)


def moved(data, seed, share=0.3):
    """Weights after a little training: some of them one step of bf16 up or down."""
    draw = numpy.random.default_rng(seed)
    numbers = numpy.frombuffer(data, "<u2").astype(numpy.int32)
    step = draw.choice([-1, 0, 1], len(numbers), p=[share / 2, 1 - share, share / 2])
    return (numbers + step).astype("<u2").tobytes()


def model(folder, tensors, config='{"model_type": "bert"}'):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config)
    write_safetensors(folder / "model.safetensors", tensors, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A base, plain and compressed, and three checkpoints of training from it."""
    place = tmp_path_factory.mktemp("models")
    first, second = (weights("BF16", SHAPE, seed) for seed in (1, 2))
    tuned = [(first, second)]
    for step in range(3):
        tuned.append(tuple(moved(data, 10 * step + at) for at, data in enumerate(tuned[-1])))
    small = weights("F32", (40,), 5)
    for name, (a, b) in zip(("base", "one", "two", "three"), tuned, strict=True):
        tensors = [("a", "BF16", SHAPE, a), ("b", "BF16", SHAPE, b), ("bias", "F32", (40,), small)]
        if name != "base":
            new = weights("BF16", (300, 64), 9)
            tensors += [("new", "BF16", (300, 64), new), ("reshaped", "BF16", (64, 300), new)]
            tensors += [
                ("tied", "BF16", SHAPE, a),
                ("tied to new", "BF16", (300, 64), new),
                ("none", "F32", (0, 4), b""),
            ]
        model(place / name, tensors)
    netweight.compress_folder(place / "base", place / "base-net")
    return place


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


def same(store, expected):
    return sorted(store.names()) == sorted(expected) and all(
        torch.equal(store.get(name).view(torch.uint8), value.view(torch.uint8)) for name, value in expected.items()
    )


@pytest.mark.parametrize("form", ["base", "base-net", "base/model.safetensors", "base-net/model.net.safetensors"])
def test_there_and_back(place, tmp_path, form):
    base = place / form
    alone = netweight.compress_folder(place / "one", tmp_path / "alone")
    packed = netweight.compress_folder(place / "one", tmp_path / "net", base=base)
    assert packed.stored_nbytes < 0.5 * alone.stored_nbytes
    with open_store(tmp_path / "net", base=base) as store:
        expected = tensors_of(place / "one")
        assert same(store, expected)
        assert torch.equal(store.get_slice("a", slice(500, 510)), expected["a"][500:510])
        assert torch.equal(store.get_slice("tied", slice(500, 510)), expected["a"][500:510])
        assert store.info("bias").stored_nbytes < 200
        assert store.info("tied").stored_nbytes < store.info("tied").nbytes // 500
    netweight.decompress_folder(tmp_path / "net", tmp_path / "back", base=base)
    assert content(tmp_path / "back") == content(place / "one")
    found = netweight.verify(tmp_path / "net", place / "one", base=base)
    assert not [finding for finding in found if finding.passed is False]


def test_equal_tensors_of_a_folder_are_stored_once_without_a_base(place, tmp_path):
    netweight.compress_folder(place / "one", tmp_path / "net")
    with open_store(tmp_path / "net") as store:
        assert same(store, tensors_of(place / "one"))
        sizes = {name: store.info(name).stored_nbytes for name in store.names()}
    assert sizes["tied"] < sizes["a"] // 100
    assert sizes["tied to new"] < sizes["new"] // 50
    assert sizes["reshaped"] > 0.5 * sizes["new"]


def test_equal_tensors_of_two_files_are_stored_once(tmp_path):
    source = transformers_folder(tmp_path / "m", shards=3)
    shutil.copy(source / "model-00001-of-00003.safetensors", source / "model-00009-of-00003.safetensors")
    netweight.compress_folder(source, tmp_path / "net")
    second = tmp_path / "net" / "model-00009-of-00003.net.safetensors"
    assert second.stat().st_size < 0.5 * (tmp_path / "net" / "model-00001-of-00003.net.safetensors").stat().st_size
    netweight.decompress_folder(tmp_path / "net", tmp_path / "back")
    assert content(tmp_path / "back") == content(source)
    (tmp_path / "net" / "model-00001-of-00003.net.safetensors").unlink()
    with open_store(second) as store, pytest.raises(CorruptBlob, match=r"00001-of-00003.* missing"):
        store.get("layers.0.a")


def test_the_base_is_found_beside_the_folder_and_by_the_variable(place, tmp_path, monkeypatch):
    netweight.compress_folder(place / "one", place / "beside", base=place / "base-net")
    netweight.decompress_folder(place / "beside", tmp_path / "back")
    assert content(tmp_path / "back") == content(place / "one")
    shutil.copytree(place / "beside", tmp_path / "far")
    with open_store(tmp_path / "far") as store:
        assert store.get("new").shape == (300, 64)  # it needs no base
        with pytest.raises(UsageError, match=r"differences from base-net .*cannot be found"):
            store.get("a")
    monkeypatch.setenv("NETWEIGHT_BASE", str(place))
    with open_store(tmp_path / "far") as store:
        assert same(store, tensors_of(place / "one"))
    shutil.rmtree(place / "beside")


def test_the_base_is_found_in_the_cache_of_the_hub(place, tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    kept = tmp_path / "hub" / "models--someone--base"
    snapshot = kept / "snapshots" / ("0" * 40)
    shutil.copytree(place / "base", snapshot)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("0" * 40)
    netweight.compress_folder(place / "one", tmp_path / "net", base=snapshot)
    with open_store(tmp_path / "net") as store:
        assert torch.equal(store.get("a"), tensors_of(place / "one")["a"])
    netweight.decompress_folder(tmp_path / "net", tmp_path / "back")
    assert content(tmp_path / "back") == content(place / "one")
    shutil.rmtree(kept)
    with pytest.raises(UsageError, match="someone/base"):
        netweight.decompress_folder(tmp_path / "net", tmp_path / "again")


@pytest.mark.parametrize(
    "work",
    [
        lambda net, base: open_store(net, base=base).get("a"),
        lambda net, base: open_store(net, base=base).get_slice("a", slice(0, 1)),
        lambda net, base: netweight.verify(net, base=base),
        lambda net, base: netweight.decompress_folder(net, net.with_name("back"), base=base),
    ],
    ids=["get", "rows", "verify", "decompress"],
)
def test_another_base_is_refused_by_name(place, tmp_path, work):
    netweight.compress_folder(place / "one", tmp_path / "net", base=place / "base")
    with pytest.raises(UsageError, match=r"not made from .*two.*tensor 'a'"):
        work(tmp_path / "net", place / "two")
    assert not (tmp_path / "back").exists()


def test_a_base_that_lacks_a_tensor_is_refused_by_name(place, tmp_path):
    netweight.compress_folder(place / "one", tmp_path / "net", base=place / "base")
    other = model(tmp_path / "other", [("a", "F32", (4,), bytes(16))])
    with pytest.raises(UsageError, match=r"other has no BF16 tensor 'a'"):
        netweight.decompress_folder(tmp_path / "net", tmp_path / "back", base=other)
    for wrong in (tmp_path / "nowhere", tmp_path / "net"):
        with pytest.raises(UsageError):
            netweight.decompress_folder(tmp_path / "net", tmp_path / "back", base=wrong)


def test_chains_of_checkpoints(place, tmp_path):
    last = shutil.copytree(place / "base-net", tmp_path / "link0")
    for number in range(1, 9):
        source = place / ("one", "two", "three")[number % 3]
        packed = netweight.compress_folder(source, tmp_path / f"link{number}", base=last)
        assert packed.tensors == 8
        last = tmp_path / f"link{number}"
    netweight.decompress_folder(last, tmp_path / "back")
    assert content(tmp_path / "back") == content(place / "three")
    with pytest.raises(UsageError, match="the end of a chain of 8 models"):
        netweight.compress_folder(place / "one", tmp_path / "link9", base=last)
    shutil.rmtree(tmp_path / "link4")
    with pytest.raises(UsageError, match=r"differences from link4 .*cannot be found"):
        netweight.decompress_folder(last, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_chain_in_a_circle_is_refused(place, tmp_path):
    netweight.compress_folder(place / "one", tmp_path / "x", base=place / "base-net")
    (tmp_path / "y").mkdir()
    shutil.copytree(tmp_path / "x", tmp_path / "y" / "base-net")
    with open_store(tmp_path / "y" / "base-net") as store, pytest.raises(NetweightError):
        store.get("a")


def test_damage_is_named_and_not_taken_for_another_base(place, tmp_path):
    netweight.compress_folder(place / "one", tmp_path / "net", base=place / "base")
    path = tmp_path / "net" / "model.net.safetensors"
    file = StoredFile(path)
    (span,) = (span for span in file.header.spans if span.name == "b.net")
    data = bytearray(path.read_bytes())
    data[file.header.data_start + span.stop - 5] ^= 4
    path.write_bytes(data)
    with open_store(path, base=place / "base") as store:
        assert store.get("a").shape == SHAPE
        for read in (lambda: store.get("b"), lambda: store.get_slice("b", slice(690, 700))):
            with pytest.raises(CorruptBlob, match="tensor 'b'"):
                read()


def test_tensors_in_memory_are_written_as_differences(place, tmp_path):
    expected = tensors_of(place / "one")
    sizes = {}
    for base in (None, place / "base"):
        with StoreWriter(tmp_path / "x.safetensors", overwrite=True, base=base) as writer:
            sizes[base] = {name: writer.add(name, tensor) for name, tensor in expected.items()}
    assert sizes[place / "base"]["a"] < 0.6 * sizes[None]["a"]
    with open_store(tmp_path / "x.safetensors", base=place / "base") as store:
        assert same(store, expected)


def test_checkpoints_of_training_are_differences_from_an_earlier_one(tmp_path):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)).bfloat16()
    netweight.compress_(net, include="0")
    netweight.save_checkpoint(tmp_path / "first.safetensors", net)
    before = {name: value.clone() for name, value in netweight.dense_state_dict(net).items()}
    netweight.save_checkpoint(tmp_path / "second.safetensors", net, base=tmp_path / "first.safetensors")
    assert (tmp_path / "second.safetensors").stat().st_size < 10_000
    with torch.no_grad():
        net[1].weight.zero_()
    netweight.load_checkpoint(tmp_path / "second.safetensors", net)
    assert all(torch.equal(value, before[name]) for name, value in netweight.dense_state_dict(net).items())
    with pytest.raises(UsageError, match="own base"):
        netweight.save_checkpoint(tmp_path / "first.safetensors", net, base=tmp_path / "first.safetensors")


def test_models_open_with_their_base(tmp_path):
    transformers = pytest.importorskip("transformers", reason="models are opened: the extra llm")
    import netweight.plugins.transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256
    )
    base = transformers.LlamaForCausalLM(config).bfloat16()
    base.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        for number, value in enumerate(base.parameters()):
            if number % 3:
                value.mul_(1 + 0.004 * torch.randn_like(value))
    base.save_pretrained(tmp_path / "tuned")
    packed = netweight.compress_folder(tmp_path / "tuned", tmp_path / "net", base=tmp_path / "base")
    assert packed.ratio > 1.8
    found = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "net")
    dense = netweight.dense_state_dict(found)
    assert all(torch.equal(dense[name], value) for name, value in base.state_dict().items())
    (tmp_path / "base").rename(tmp_path / "gone")
    with pytest.raises(UsageError, match="cannot be found"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / "net")


def run(*arguments):
    return CliRunner().invoke(cli.netweight, [str(argument) for argument in arguments], catch_exceptions=False)


def test_the_commands(place, tmp_path):
    base = place / "base"
    assert run("compress", place / "one", tmp_path / "net", "--base", base).exit_code == 0
    assert run("verify", tmp_path / "net", "--base", base, "--against", place / "one").exit_code == 0
    assert run("inspect", tmp_path / "net", "--base", base).exit_code == 0
    assert run("decompress", tmp_path / "net", tmp_path / "back", "--base", base).exit_code == 0
    assert content(tmp_path / "back") == content(place / "one")


def killed_at_random(place, target, verb, source, expected, moments, times):
    """Kill the command at random moments; what is there is nothing or all of it, and the last run completes."""

    def command(target):
        words = "-m", "netweight", verb, source, target, "--base", place / "base", "--threads", "1"
        return warm.start(*words, libraries=warm.COMPRESSION)

    def completed(running):
        out, errors = running.communicate(timeout=300)
        assert running.returncode == 0, out + errors

    begin = time.monotonic()
    completed(command(f"{target}-timed"))
    whole = time.monotonic() - begin
    for _ in range(times):
        process = command(target)
        time.sleep(moments.uniform(0.1, 1.1) * whole)
        process.kill()
        process.wait(60)
        if target.exists():
            assert content(target) == expected
            shutil.rmtree(target)
    completed(command(target))
    assert content(target) == expected
    assert not part_of(target).exists()


@pytest.mark.parametrize("times", [2, pytest.param(40, marks=pytest.mark.study)])
def test_killed_at_random_moments(place, tmp_path, times):
    moments = random.Random(7)
    netweight.compress_folder(place / "one", tmp_path / "expected", base=place / "base")
    expected = content(tmp_path / "expected")
    killed_at_random(place, tmp_path / "net", "compress", place / "one", expected, moments, times)
    killed_at_random(place, tmp_path / "back", "decompress", tmp_path / "net", content(place / "one"), moments, times)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_a_run_that_continues_takes_another_base_as_other_work(place, tmp_path):
    source = transformers_folder(tmp_path / "m", shards=2)
    shutil.copytree(source, tmp_path / "base")
    netweight.compress_folder(source, tmp_path / "net", base=tmp_path / "base")
    with open_store(tmp_path / "net", base=tmp_path / "base") as store:
        assert all(store.info(name).stored_nbytes < 200 for name in store.names())
    netweight.compress_folder(source, tmp_path / "alone")
    with open_store(tmp_path / "alone") as store:
        assert all(store.info(name).stored_nbytes > 2000 for name in store.names())
