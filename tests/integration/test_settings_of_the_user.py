"""Settings that a user gives to `from_pretrained` win over those of a compressed folder, or are refused by name."""

import pytest
import torch

import netweight
from netweight.errors import UsageError
from netweight.methods.compress.runtime import cuda as device
from netweight.methods.compress.runtime.model import default_forms, takes_fixed
from netweight.plugins.transformers import NetweightConfig

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
SIZES = dict(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).bfloat16().save_pretrained(root / "dense")
    netweight.compress_folder(root / "dense", root / "net")
    return root


def opened(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def forms(model):
    return {
        name: weight.stored.fixed
        for name, weight in model.named_parameters()
        if isinstance(weight, netweight.CompressedTensor)
    }


@pytest.mark.parametrize("as_mapping", [False, True])
def test_speed_wins_in_transformers(folders, as_mapping):
    settings = {"quant_method": "netweight", "prefer": "speed"} if as_mapping else NetweightConfig(prefer="speed")
    model = opened(folders / "net", quantization_config=settings)
    assert forms(model)["model.layers.0.mlp.up_proj.weight"]
    assert not any(forms(opened(folders / "net")).values())
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, opened(folders / "dense")(ids).logits)


def test_what_is_excluded_stays_dense(folders):
    model = opened(folders / "net", quantization_config=NetweightConfig(exclude="lm_head"))
    assert "lm_head.weight" not in forms(model)
    assert "lm_head.weight" in forms(opened(folders / "net"))
    assert torch.equal(model.lm_head.weight, opened(folders / "dense").lm_head.weight)


def test_the_settings_object_is_not_changed_and_serves_again(folders):
    settings = NetweightConfig(prefer="speed")
    for folder in ("net", "dense", "net"):
        assert any(forms(opened(folders / folder, quantization_config=settings)).values())
        assert settings.weights is None


def test_rounding_and_other_methods_are_refused_by_name(folders):
    with pytest.raises(UsageError, match="cannot be rounded"):
        opened(folders / "net", quantization_config=NetweightConfig(mantissa_bits=3))
    with pytest.raises(UsageError, match="BitsAndBytesConfig"):
        opened(folders / "net", quantization_config=transformers.BitsAndBytesConfig(load_in_8bit=True))


def test_settings_win_in_diffusers(tmp_path):
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    from netweight.plugins.diffusers import NetweightConfig as Settings

    torch.manual_seed(0)
    sizes = dict(sample_size=8, in_channels=4, out_channels=4, down_block_types=("CrossAttnDownBlock2D",),
                 up_block_types=("CrossAttnUpBlock2D",), block_out_channels=(32,), layers_per_block=1,
                 cross_attention_dim=32, attention_head_dim=8)  # fmt: skip
    diffusers.UNet2DConditionModel(**sizes).bfloat16().save_pretrained(tmp_path / "dense")
    netweight.compress_folder(tmp_path / "dense", tmp_path / "net")
    load = diffusers.UNet2DConditionModel.from_pretrained
    model = load(tmp_path / "net", quantization_config=Settings(prefer="speed"), torch_dtype=torch.bfloat16)
    assert any(forms(model).values())
    assert not any(forms(load(tmp_path / "net", torch_dtype=torch.bfloat16)).values())
    with pytest.raises(UsageError, match="BitsAndBytesConfig"):
        load(tmp_path / "net", quantization_config=diffusers.BitsAndBytesConfig(load_in_8bit=True))


def test_the_default_form_follows_the_device(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    for runs in (True, False):
        monkeypatch.setattr(device, "_kernels_run", lambda runs=runs: runs)
        assert takes_fixed(None, gpu) is runs
        assert not takes_fixed(None, cpu)
        assert all(takes_fixed("speed", place) for place in (cpu, gpu))
        assert not any(takes_fixed("memory", place) for place in (cpu, gpu))


def test_models_take_the_default_form_of_their_device(folders, monkeypatch):
    # The rule is the device's; here the CPU stands in for one that multiplies.
    monkeypatch.setattr(device, "multiplies_fixed", lambda place: True)
    assert forms(opened(folders / "net"))["model.layers.0.mlp.up_proj.weight"]
    assert not any(forms(opened(folders / "net", quantization_config=NetweightConfig(prefer="memory"))).values())
    model = opened(folders / "dense")
    assert "model.layers.0.mlp.up_proj.weight" in netweight.compress_(model).fixed
    rounded = opened(folders / "dense")
    assert netweight.compress_(rounded, mantissa_bits=3).fixed == ()


def test_the_forms_are_described_with_their_reason(monkeypatch):
    monkeypatch.setattr(device, "no_fixed_because", lambda: "No GPU.")
    assert "memory" in default_forms()["cpu"]
    assert "No GPU." in default_forms()["cuda"]
    monkeypatch.setattr(device, "no_fixed_because", lambda: None)
    assert "fixed-length form" in default_forms()["cuda"]
