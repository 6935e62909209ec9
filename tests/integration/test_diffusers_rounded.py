"""diffusers models whose weights are rounded: loaded, rounded while loading, saved, loaded again."""

import pytest
import torch

import netweight
from netweight.errors import LossyWrite, UsageError

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from netweight.plugins.diffusers import NetweightConfig  # noqa: E402

LATENT = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(3)).bfloat16()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny model's dense folder (bf16), the same rounded, and what is restored of that."""
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("model")
    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)}
    model = diffusers.UNet2DModel(sample_size=8, block_out_channels=(64,), norm_num_groups=8, **blocks)
    model.to(torch.bfloat16).save_pretrained(place / "dense")
    netweight.compress_folder(place / "dense", place / "net", mantissa_bits=2, block_size=64)
    netweight.decompress_folder(place / "net", place / "rounded")
    return place


def load(folder, **options):
    return diffusers.UNet2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16, **options)


def answer(model):
    with torch.no_grad():
        return model(LATENT, 3).sample


def blobs(model):
    weights = {name: p for name, p in model.named_parameters() if isinstance(p, netweight.CompressedTensor)}
    assert weights
    assert all(weight.stored.lossy for weight in weights.values())
    return {name: bytes(weight.stored.blob) for name, weight in weights.items()}


@pytest.mark.parametrize("stored", [True, False], ids=["rounded folder", "dense folder"])
def test_rounded_models_are_loaded_saved_and_loaded_again(folders, tmp_path, stored):
    options = {} if stored else {"quantization_config": NetweightConfig(mantissa_bits=2, block_size=64)}
    model = load(folders / ("net" if stored else "dense"), **options)
    before = blobs(model)
    assert torch.equal(answer(model), answer(load(folders / "rounded")))
    assert not torch.equal(answer(model), answer(load(folders / "dense")))
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert blobs(again) == before
    assert torch.equal(answer(again), answer(model))
    with pytest.raises(LossyWrite):
        netweight.LayerwiseOptimizer(again.requires_grad_(True), torch.optim.SGD, lr=0.1)


@pytest.mark.filterwarnings("ignore:.*The `quantization_config` from the model will be used:UserWarning")
def test_a_configuration_does_not_round_what_was_rounded_before(folders):
    with pytest.raises(UsageError, match="cannot be rounded while they are loaded"):
        load(folders / "net", quantization_config=NetweightConfig(mantissa_bits=0))
