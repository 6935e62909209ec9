"""What becomes of each file of a folder, and everything that is refused before work begins."""

import os
import pickle
from pathlib import Path

import pytest
from folders_under_test import diffusers_folder, simple_weights, transformers_folder

from netweight.errors import CorruptBlob, UnsafeInput, Unsupported, UsageError
from netweight.methods.compress.compress_folder import compress_folder
from netweight.methods.compress.folder_format import make_plan
from netweight.methods.compress.settings import CompressSettings

PLAIN = CompressSettings()


def roles(plan):
    return {item.path: (item.role, item.stored) for item in plan.items}


def test_every_file_gets_its_role(tmp_path):
    folder = transformers_folder(tmp_path / "m", shards=2)
    (folder / "empty" / "deep").mkdir(parents=True)
    plan = make_plan(folder, PLAIN)
    assert roles(plan) == {
        "config.json": ("config", "config.json"),
        "model-00001-of-00002.safetensors": ("weights", "model-00001-of-00002.net.safetensors"),
        "model-00002-of-00002.safetensors": ("weights", "model-00002-of-00002.net.safetensors"),
        "model.safetensors.index.json": ("index", "model.net.safetensors.index.json"),
        "tokenizer.json": ("carried", "tokenizer.json"),
    }
    assert plan.folders == ("empty/deep",)


def test_weights_of_diffusers_models_keep_their_names(tmp_path):
    found = roles(make_plan(diffusers_folder(tmp_path / "m"), PLAIN))
    assert found["unet/diffusion_pytorch_model.safetensors"] == ("weights", "unet/diffusion_pytorch_model.safetensors")
    assert found["text_encoder/model.safetensors"] == ("weights", "text_encoder/model.net.safetensors")
    assert found["scheduler/scheduler_config.json"][0] == "carried"
    assert found["model_index.json"][0] == "carried"


def test_a_variant_is_taken_where_there_is_one(tmp_path):
    plan = make_plan(diffusers_folder(tmp_path / "m"), CompressSettings(variant="fp16"))
    weights = {path for path, (role, _) in roles(plan).items() if role == "weights"}
    assert weights == {
        "text_encoder/model.safetensors",
        "unet/diffusion_pytorch_model.fp16.safetensors",
        "vae/diffusion_pytorch_model.fp16.safetensors",
    }
    assert set(plan.left_out) == {f"{part}/diffusion_pytorch_model.safetensors" for part in ("unet", "vae")}
    with pytest.raises(UsageError, match="bf16"):
        make_plan(tmp_path / "m", CompressSettings(variant="bf16"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "v1.ckpt", "unet/weights.PTH", "x.pkl"])
def test_pickled_weights_are_refused_with_the_cure(tmp_path, name):
    folder = transformers_folder(tmp_path / "m")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(UnsafeInput, match="pickle") as caught:
        make_plan(folder, PLAIN)
    assert name in str(caught.value)
    assert "save_pretrained" in caught.value.cure
    plan = make_plan(folder, CompressSettings(exclude=(name,)))
    assert plan.left_out == (name,)


def test_pickles_alone_are_refused_as_pickles(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(UnsafeInput, match=r"pytorch_model\.bin"):
        make_plan(tmp_path, PLAIN)


def test_what_trainers_leave_and_other_binaries_are_carried(tmp_path):
    folder = transformers_folder(tmp_path / "m")
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state_0.pth"):
        (folder / name).write_bytes(pickle.dumps({"a": 1}))
    (folder / "sentencepiece.bin").write_bytes(b"no pickle")
    assert not make_plan(folder, PLAIN).left_out


def test_links_of_a_hub_cache_are_followed(tmp_path):
    repository = tmp_path / "models--a--b"
    real = transformers_folder(repository / "blobs")
    snapshot = repository / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    for file in real.iterdir():
        (snapshot / file.name).symlink_to(os.path.relpath(file, snapshot))
    assert len(make_plan(snapshot, PLAIN).items) == 3
    compress_folder(snapshot, tmp_path / "out")
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


@pytest.mark.parametrize("kind", ["file", "folder", "broken", "fifo"])
def test_links_out_of_the_folder_and_odd_files_are_refused(tmp_path, kind):
    folder = transformers_folder(tmp_path / "m")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("private")
    expected = UnsafeInput
    if kind == "file":
        (folder / "notes.txt").symlink_to(tmp_path / "secret" / "key")
    elif kind == "folder":
        (folder / "notes").symlink_to(tmp_path / "secret")
    elif kind == "broken":
        (folder / "notes.txt").symlink_to("nowhere")
        expected = UsageError
    else:
        os.mkfifo(folder / "pipe")
        expected = Unsupported
    with pytest.raises(expected, match=r"notes|pipe"):
        make_plan(folder, PLAIN)


def test_links_within_the_folder_are_followed(tmp_path):
    folder = transformers_folder(tmp_path / "m")
    (folder / "same.txt").symlink_to("tokenizer.json")
    assert "same.txt" in roles(make_plan(folder, PLAIN))


def test_what_is_compressed_is_not_compressed_again(tmp_path):
    folder = transformers_folder(tmp_path / "m")
    compress_folder(folder, tmp_path / "net")
    with pytest.raises(UsageError, match="compressed already"):
        make_plan(tmp_path / "net", PLAIN)
    (tmp_path / "net" / "netweight.json").unlink()
    with pytest.raises(UsageError, match="compressed already"):
        make_plan(tmp_path / "net", PLAIN)
    with pytest.raises(UsageError, match="compressed already"):
        compress_folder(tmp_path / "net" / "model.net.safetensors", tmp_path / "x.safetensors")


def test_a_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="no safetensors"):
        make_plan(tmp_path, PLAIN)


def test_an_index_that_misleads_is_refused(tmp_path):
    folder = transformers_folder(tmp_path / "m", shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CorruptBlob, match="missing"):
        make_plan(folder, PLAIN)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}')
    with pytest.raises(UnsafeInput, match="outside"):
        make_plan(folder, PLAIN)


def test_all_problems_are_reported_at_once(tmp_path):
    folder = transformers_folder(tmp_path / "m")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(1))
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(UnsafeInput, match="2 problems") as caught:
        make_plan(folder, PLAIN)
    assert "model.safetensors" in str(caught.value)
    assert "pytorch_model.bin" in str(caught.value)


def test_configs_refuse_bad_values():
    with pytest.raises(UsageError, match="level"):
        CompressSettings(level="best")
    with pytest.raises(UsageError, match=r"threads: .*not 0"):
        CompressSettings(threads=0)


def test_paths_are_relative_to_the_folder(tmp_path, monkeypatch):
    simple_weights(tmp_path / "m" / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    assert roles(make_plan(Path("m"), PLAIN)) == {"model.safetensors": ("weights", "model.net.safetensors")}
