"""The digest of a model's weights: the same however they are stored, another one for any other number or name."""

import shutil

import pytest
import torch
from folders_under_test import transformers_folder
from safetensors.torch import load_file, save_file

from netweight import compress_folder
from netweight.store.weights_digest import weights_digest


@pytest.fixture
def model(tmp_path):
    return transformers_folder(tmp_path / "model", shards=2)


def test_sharding_compression_and_other_files_do_not_enter(model, tmp_path):
    digest = weights_digest(model)
    compress_folder(model, tmp_path / "net")
    assert weights_digest(tmp_path / "net") == digest
    whole = {name: value for file in model.glob("*.safetensors") for name, value in load_file(file).items()}
    (tmp_path / "whole").mkdir()
    save_file(whole, tmp_path / "whole" / "model.safetensors")
    assert weights_digest(tmp_path / "whole") == weights_digest(tmp_path / "whole" / "model.safetensors") == digest
    (model / "README.md").write_text("another card")
    assert weights_digest(model) == digest


@pytest.mark.parametrize("change", ["value", "name", "dtype", "shape"])
def test_any_change_of_a_tensor_enters(change, model):
    digest, file = weights_digest(model), sorted(model.glob("*.safetensors"))[0]
    tensors = load_file(file)
    name, value = next((name, value) for name, value in tensors.items() if value.ndim == 2)
    other = {
        "value": {name: value + 1},
        "name": {name: None, f"{name}2": value},
        "dtype": {name: value.view(torch.int16) if value.element_size() == 2 else value.view(torch.int32)},
        "shape": {name: value.t().contiguous() if value.shape[0] != value.shape[1] else value.reshape(-1)},
    }[change]
    save_file({each: tensor for each, tensor in {**tensors, **other}.items() if tensor is not None}, file)
    assert weights_digest(model) != digest


def test_the_parts_of_a_pipeline_enter_and_records_do_not(model, tmp_path):
    pipeline = tmp_path / "pipeline"
    shutil.copytree(model, pipeline / "unet")
    digest = weights_digest(pipeline)
    assert digest != weights_digest(model)
    (pipeline / "forget").mkdir()
    shutil.copy(next(model.glob("*.safetensors")), pipeline / "forget" / "001.safetensors")
    assert weights_digest(pipeline) == digest
    (pipeline / "unet").rename(pipeline / "transformer")
    assert weights_digest(pipeline) != digest


def test_without_weights_there_is_no_digest(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"")
    assert weights_digest(tmp_path) is None
    assert weights_digest(tmp_path / "model.bin") is None
    assert weights_digest(tmp_path / "nowhere") is None
