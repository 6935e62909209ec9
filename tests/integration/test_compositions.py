"""Methods on top of each other: what one makes the next takes, with the same numbers, to the last bit."""

import copy

import pytest
import torch
from spaces_under_test import random_adapters

import netweight
from netweight.hf.adapted_backbones import IMAGENET_MEAN_STD
from netweight.methods import federate
from netweight.methods.compress.runtime.tensor import CompressedTensor
from netweight.methods.space.space import WeightSpace
from netweight.store.bank.bank import AdapterBank
from netweight.store.lora_formats.reading import read_adapter
from netweight.store.lora_formats.writing import write_adapter

transformers = pytest.importorskip("transformers", reason="transformers is in the llm extra")
IMAGES = torch.randn(12, 3, 32, 32, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(12) % 7


@pytest.fixture(scope="module")
def backbones(tmp_path_factory):
    """Random backbones, and the same as compressed folders."""
    root = tmp_path_factory.mktemp("backbones")
    torch.manual_seed(0)
    resnet = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 16, 24], depths=[1, 1, 1, 1], layer_type="basic"
    )
    transformers.ResNetModel(resnet).save_pretrained(root / "resnet")
    vit = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=16, patch_size=8
    )
    transformers.ViTModel(vit, add_pooling_layer=False).save_pretrained(root / "vit")
    for name in ("resnet", "vit"):
        netweight.compress_folder(root / name, root / f"{name}-net")
    return root


def adapted(kind, folder):
    from netweight.hf.adapted_backbones import adapted_resnet, adapted_vit

    make = adapted_vit if kind == "vit" else adapted_resnet
    return make(folder, 7, normalized_by=IMAGENET_MEAN_STD)


def trained(body, head, method):
    data = [federate.ClientData((IMAGES[i::2], LABELS[i::2]), (IMAGES[i::2], LABELS[i::2])) for i in range(2)]
    return federate.train(
        federate.Task(body, head, data),
        method(federate.LocalTraining(epochs=2, batch_size=3)),
        federate.Federation(rounds=2),
        workers=1,
    )


def told(run):
    return [(each.loss, each.before, each.after, each.refusals) for each in run.rounds]


def compressed_weights(body):
    return {name for name, value in body.named_parameters() if isinstance(value, CompressedTensor)}


@pytest.mark.parametrize("kind", ["vit", "resnet"])
@pytest.mark.parametrize("how", ["in memory", "from a compressed folder"])
@pytest.mark.parametrize("method", [federate.HyperFL, federate.fedavg], ids=["hyperfl", "fedavg"])
def test_adapters_are_federated_on_a_compressed_backbone(backbones, kind, how, method):
    body, head = adapted(kind, backbones / kind)
    expected = trained(body, head, method)
    assert not compressed_weights(body)
    if how == "in memory":
        packed, packed_head = adapted(kind, backbones / kind)
        netweight.compress_(packed, exclude="**.adapter*.**")
    else:
        packed, packed_head = adapted(kind, backbones / f"{kind}-net")
    names = compressed_weights(packed)
    assert len(names) >= 10
    assert not any("adapter" in name for name in names)
    found = trained(packed, packed_head, method)
    assert compressed_weights(packed) == names
    assert told(found) == told(expected)
    for name, value in expected.state.items():
        assert torch.equal(found.state[name], value), name
    for client in (0, 1):
        ours, theirs = found.weights(client), expected.weights(client)
        assert torch.equal(ours.body, theirs.body)
        assert torch.equal(ours.head, theirs.head)


@pytest.fixture(scope="module")
def banks(tmp_path_factory):
    """A bank of bf16 adapters and the same kept compressed."""
    folder = tmp_path_factory.mktemp("banks")
    (folder / "loras").mkdir()
    shapes = {"unet.mid.to_q": (48, 40), "unet.mid.to_v": (40, 64)}
    for number, adapter in enumerate(random_adapters(16, ranks=(2,), dtype=torch.bfloat16, shapes=shapes)):
        write_adapter(adapter, folder / "loras" / f"person-{number:02d}.safetensors")
    plain = AdapterBank.ingest(folder / "loras", folder / "plain")
    packed = AdapterBank.ingest(folder / "loras", folder / "packed", compress=True)
    size = {name: sum(file.stat().st_size for file in (folder / name).iterdir()) for name in ("plain", "packed")}
    assert size["packed"] < 0.9 * size["plain"]
    return plain, packed


@pytest.mark.parametrize("settings", [{}, {"solver": "streaming"}, {"representation": "factors"}], ids=str)
def test_a_space_of_a_compressed_bank_is_that_of_the_bank(banks, settings):
    one, other = (WeightSpace.fit(bank, components=6, **settings) for bank in banks)
    assert one.names == other.names
    assert torch.equal(one.scores, other.scores)
    assert torch.equal(one.deviations, other.deviations)
    assert torch.equal(one.fingerprints, other.fingerprints)
    ours, theirs = one.sample(seed=3).adapter, other.sample(seed=3).adapter
    for name, change in ours.factors.items():
        assert torch.equal(change.up, theirs.factors[name].up)
        assert torch.equal(change.down, theirs.factors[name].down)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """A pipeline, and points of a space of its adapters, written for diffusers and for peft."""
    pytest.importorskip("diffusers", reason="diffusers is in the diffusion extra")
    pytest.importorskip("peft", reason="peft is in the diffusion extra")
    import small_pipelines

    from netweight.nn.apply_lora import linear_layers

    folder = tmp_path_factory.mktemp("sampled")
    pipeline = small_pipelines.stable_diffusion()
    pipeline.save_pretrained(folder / "pipeline")
    shapes = linear_layers(pipeline.unet, ("**.attn2.to_q", "**.attn2.to_v"), component="unet")
    (folder / "loras").mkdir()
    for number, adapter in enumerate(random_adapters(10, ranks=(1,), dtype=torch.float32, shapes=shapes)):
        write_adapter(adapter, folder / "loras" / f"{number}.safetensors")
    space = WeightSpace.fit(AdapterBank.ingest(folder / "loras", folder / "bank", compress=True), components=5)
    point = space.sample(seed=0)
    for layout in ("diffusers", "peft"):
        assert point.export(folder / layout, rank=4, layout=layout).relative_error < 1
    netweight.compress_folder(folder / "pipeline", folder / "pipeline-net")
    return folder


def painted(pipeline):
    pipeline.set_progress_bar_config(disable=True)
    stream = torch.Generator().manual_seed(0)
    options = {"num_inference_steps": 3, "guidance_scale": 2.0, "output_type": "np"}
    return torch.from_numpy(pipeline("a red circle", generator=stream, **options).images)


@pytest.mark.parametrize("how", ["in memory", "from a compressed folder"])
def test_a_sampled_adapter_on_a_compressed_pipeline_paints_as_on_the_dense_one(sampled, how):
    import diffusers

    import netweight.plugins.diffusers

    dense = diffusers.StableDiffusionPipeline.from_pretrained(sampled / "pipeline")
    plain = painted(dense)
    if how == "in memory":
        packed = copy.deepcopy(dense)
        netweight.compress_(packed.unet)
        netweight.compress_(packed.text_encoder)
    else:
        packed = diffusers.StableDiffusionPipeline.from_pretrained(sampled / "pipeline-net")
    for pipeline in (dense, packed):
        pipeline.load_lora_weights(sampled / "diffusers")
    expected = painted(dense)
    assert compressed_weights(packed.unet)
    assert torch.equal(painted(packed), expected)
    assert not torch.equal(expected, plain)
    packed.unload_lora_weights()
    assert torch.equal(painted(packed), plain)


def test_a_sampled_adapter_of_peft_on_a_compressed_model(sampled):
    import diffusers
    import peft

    latents, states = torch.randn(2, 4, 8, 8), torch.randn(2, 10, 24)
    outputs = []
    for packed in (False, True):
        unet = diffusers.UNet2DConditionModel.from_pretrained(sampled / "pipeline" / "unet")
        if packed:
            netweight.compress_(unet)
        model = peft.PeftModel.from_pretrained(unet, sampled / "peft")
        with torch.no_grad():
            outputs.append(model(latents, 500, states).sample)
        back = read_adapter(sampled / "peft")
        model.save_pretrained(sampled / f"again-{packed}")
        again = read_adapter(sampled / f"again-{packed}")
        assert all(torch.equal(again.factors[name].up, back.factors[name].up) for name in again.factors)
    assert torch.equal(*outputs)


# ---- what libraries do to a compressed language model ----------------------------------------------------------------


def language_models(tied):
    """A small Llama, dense and compressed."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=300,
        tie_word_embeddings=tied,
    )  # fmt: skip
    dense = transformers.LlamaForCausalLM(config).bfloat16()
    compressed = copy.deepcopy(dense)
    netweight.compress_(compressed)
    return dense, compressed


def merged(model):
    peft = pytest.importorskip("peft", reason="peft is in the llm extra")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(model, config).merge_and_unload()


def decomposed(model):
    peft = pytest.importorskip("peft", reason="peft is in the llm extra")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True, init_lora_weights=False)
    return peft.get_peft_model(model, config)


def prepared(model):
    peft = pytest.importorskip("peft", reason="peft is in the llm extra")
    model.is_loaded_in_8bit = True
    return peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def resized(model):
    torch.manual_seed(2)
    model.resize_token_embeddings(310, mean_resizing=False)
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("change", [merged, decomposed, prepared, resized])
def test_libraries_change_a_compressed_model_as_they_change_a_dense_one(change, tied):
    ids = torch.arange(14).view(2, 7)
    dense, compressed = (change(model)(ids).logits for model in language_models(tied))
    assert torch.equal(dense, compressed)
