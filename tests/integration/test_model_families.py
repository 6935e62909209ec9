"""Model families that other tests do not meet, method by method; docs/model-families.md names these tests."""

import importlib

import pytest
import torch
from small_pipelines import stable_diffusion

import netweight
from netweight.errors import Unsupported
from netweight.hf.load_language_model import structure_of
from netweight.methods import federate

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def vit():
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = transformers.ViTConfig(**shape, image_size=32, patch_size=8, num_labels=5)
    return transformers.ViTForImageClassification(config)


def resnet():
    config = transformers.ResNetConfig(embedding_size=32, hidden_sizes=[64, 128], depths=[1, 1], num_labels=5)
    return transformers.ResNetForImageClassification(config)


def t5():
    shape = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=64, **shape))


def bert():
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=64, **shape))


@pytest.mark.parametrize("make", [vit, resnet])
def test_vision_models_run_compressed(make, tmp_path):
    torch.manual_seed(0)
    model, images = make().bfloat16().eval(), torch.randn(2, 3, 32, 32, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "dense")
    expected = model(images).logits
    assert netweight.compress_(model).share < 0.7
    assert torch.equal(model(images).logits, expected)

    netweight.compress_folder(tmp_path / "dense", tmp_path / "net")
    importlib.import_module("netweight.plugins.transformers")  # registers the plug-in

    loaded = type(model).from_pretrained(tmp_path / "net").eval()
    assert netweight.memory_footprint(loaded) < 0.75 * sum(p.numel() * 2 for p in loaded.parameters())
    assert torch.equal(loaded(images).logits, expected)


@pytest.mark.parametrize(
    ("make", "reason"), [(t5, "an encoder beside"), (bert, "BertForMaskedLM"), (vit, "vocabulary")]
)
def test_only_decoders_are_immunized(make, reason):
    with pytest.raises(Unsupported, match=reason):
        structure_of(make())


def test_a_u_net_is_not_immunized():
    with pytest.raises(Unsupported, match="UNet2DConditionModel"):
        structure_of(stable_diffusion().unet)


@pytest.mark.parametrize("method", [federate.fedavg(), federate.HyperFL()])
def test_token_classifiers_are_federated(method):
    class Body(torch.nn.Module):
        def __init__(self):
            super().__init__()
            shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
            config = transformers.BertConfig(vocab_size=32, max_position_embeddings=16, **shape)
            config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
            self.encoder = transformers.BertModel(config, add_pooling_layer=False)

        def forward(self, ids):
            return self.encoder(input_ids=ids).last_hidden_state[:, 0]

    torch.manual_seed(0)
    ids = torch.randint(0, 32, (24, 8))
    part = (ids[:8], ids[:8, 0] % 3)
    data = [federate.ClientData(part, part) for _ in range(2)]
    task = federate.Task(Body(), torch.nn.Linear(16, 3), data)
    run = federate.train(task, method, federate.Federation(rounds=1))
    assert 0 <= run.rounds[-1].mean_after <= 1
