"""Adapters that we write load in diffusers and peft, and do there what adding ΔW to the weights does."""

import pytest
import torch
from adapters_under_test import change_size, close, merge, random_adapter, same

from netweight import Adapter, read_adapter, write_adapter
from netweight.nn.lora import LowRank
from netweight.store.lora_formats.reading import plan_adapter
from netweight.store.lora_formats.writing import export_adapter

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

from netweight.store.bank.published import stable_diffusion_dimensions  # noqa: E402
from netweight.toys.diffusion import shapes_pipeline  # noqa: E402

UNET = [
    "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q",
    "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_out.0",
    "down_blocks.1.attentions.0.proj_in",
    "down_blocks.1.resnets.0.conv1",
    "down_blocks.1.resnets.0.time_emb_proj",
    "mid_block.attentions.0.transformer_blocks.0.ff.net.0.proj",
    "mid_block.attentions.0.transformer_blocks.0.attn2.to_v",
    "up_blocks.1.resnets.0.conv2",
    "time_embedding.linear_1",
]
PROMPT = "a large red circle on a gray ground"


@pytest.fixture(scope="module")
def pipeline():
    return shapes_pipeline()


@pytest.fixture(scope="module")
def text_layers(pipeline):
    return [
        name for name, module in pipeline.text_encoder.named_modules()
        if name.endswith(("layers.0.self_attn.q_proj", "layers.0.self_attn.out_proj", "layers.0.mlp.fc1"))
    ]  # fmt: skip


@pytest.fixture(scope="module")
def adapter(pipeline, text_layers):
    """Mixed ranks and scales, linear layers and convolutions, U-Net and text encoder; and its kernels."""
    shapes, kernels = change_size(pipeline.unet, UNET)
    texts, _ = change_size(pipeline.text_encoder, text_layers)
    shapes = {f"unet.{name}": shape for name, shape in shapes.items()}
    shapes |= {f"text_encoder.{name}": shape for name, shape in texts.items()}
    made = random_adapter(3, shapes=shapes, ranks=(2, 1, 4), scales=(0.01, 0.02, 0.01, 0.004))
    return made, {f"unet.{name}": kernel for name, kernel in kernels.items()}


def picture(pipeline, prompt=PROMPT):
    stream = torch.Generator().manual_seed(0)
    return torch.from_numpy(
        pipeline(prompt, num_inference_steps=4, guidance_scale=3.0, generator=stream, output_type="np").images
    )


@pytest.fixture(scope="module")
def pictures(pipeline, adapter):
    """Without the adapter, and with its changes added to the weights."""
    merged = shapes_pipeline()
    for component in ("unet", "text_encoder"):
        merge(getattr(merged, component), adapter[0], f"{component}.")
    return picture(pipeline), picture(merged)


@pytest.mark.parametrize("layout", ["diffusers", "kohya"])
def test_a_pipeline_paints_as_with_merged_weights(tmp_path, pipeline, adapter, pictures, layout):
    before, expected = pictures
    assert (before - expected).abs().max() > 0.05
    write_adapter(adapter[0], tmp_path, layout=layout, kernels=adapter[1])
    pipeline.load_lora_weights(tmp_path)
    try:
        found = picture(pipeline)
    finally:
        pipeline.unload_lora_weights()
    assert (found - expected).abs().max() < 2e-4
    assert torch.equal(picture(pipeline), before)


def test_what_was_written_reads_the_same(tmp_path, pipeline, adapter):
    for layout in ("diffusers", "peft"):
        found = read_adapter(write_adapter(adapter[0], tmp_path / layout, layout=layout, kernels=adapter[1]))
        assert close(found, adapter[0])
    modules = [f"{part}.{name}" for part in ("unet", "text_encoder")
               for name, _ in getattr(pipeline, part).named_modules() if name]  # fmt: skip
    back = read_adapter(write_adapter(adapter[0], tmp_path / "kohya", layout="kohya", kernels=adapter[1]),
                        modules=modules)  # fmt: skip
    assert back.modules == adapter[0].modules
    assert close(back, adapter[0])


def test_peft_loads_a_component(tmp_path, adapter):
    unet = random_adapter(5, shapes={n: c.shape for n, c in adapter[0].factors.items() if n.startswith("unet.")},
                          ranks=(2, 1), scales=(0.05, 0.1, 0.03))  # fmt: skip
    write_adapter(unet, tmp_path / "adapter", layout="peft", kernels=adapter[1])
    latents, states = torch.randn(1, 3, 16, 16), torch.randn(1, 24, 64)
    merged = shapes_pipeline().unet
    merge(merged, unet, "unet.")
    with torch.no_grad():
        expected = merged(latents, 500, states).sample
        adapted = peft.PeftModel.from_pretrained(shapes_pipeline().unet, tmp_path / "adapter")
        found = adapted(latents, 500, states).sample
    assert (found - expected).abs().max() < 1e-4
    adapted.save_pretrained(tmp_path / "again")
    assert same(read_adapter(tmp_path / "again"), unet)


class Toy(torch.nn.Module):
    """Names of which one ends in another, as patterns of peft must tell apart."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.proj = torch.nn.Linear(6, 6)
        self.block = torch.nn.ModuleDict({"proj": torch.nn.Linear(6, 6), "out": torch.nn.Linear(6, 4)})

    def forward(self, x):
        return self.block["out"](self.block["proj"](self.proj(x)).tanh())


def trained(rslora, **patterns):
    """A toy model with peft's adapter, its factors random."""
    config = peft.LoraConfig(
        r=4, lora_alpha=10, use_rslora=rslora, target_modules=["proj", "block.proj", "block.out"], **patterns
    )
    model = peft.get_peft_model(Toy(), config)
    stream = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=stream)
    return model


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize(
    "patterns",
    [{}, {"alpha_pattern": {"block.proj": 3, "out": 7}}, {"rank_pattern": {"^proj": 2}, "alpha_pattern": {"^proj": 5}}],
)
def test_what_peft_saves_means_here_what_it_means_there(tmp_path, rslora, patterns):
    model = trained(rslora, **patterns)
    model.save_pretrained(tmp_path / "theirs")
    adapter = read_adapter(tmp_path / "theirs")
    x = torch.randn(5, 6)
    merged = Toy()
    merge(merged, adapter)
    torch.testing.assert_close(merged(x), model(x), rtol=1e-4, atol=1e-4)

    write_adapter(adapter, tmp_path / "ours", layout="peft")
    assert same(read_adapter(tmp_path / "ours"), adapter)
    again = peft.PeftModel.from_pretrained(Toy(), tmp_path / "ours")
    torch.testing.assert_close(again(x), model(x), rtol=1e-5, atol=1e-5)


def test_what_diffusers_saves_is_read(tmp_path):
    pipeline = shapes_pipeline()
    pipeline.unet.add_adapter(peft.LoraConfig(r=3, lora_alpha=6, target_modules=["to_q", "proj_in"],
                                              alpha_pattern={"mid_block.attentions.0.proj_in": 2}))  # fmt: skip
    stream = torch.Generator().manual_seed(2)
    for name, parameter in pipeline.unet.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=stream) * 0.1
    layers = peft.utils.get_peft_model_state_dict(pipeline.unet)
    expected = picture(pipeline)
    metadata = {"r": 3, "lora_alpha": 6, "alpha_pattern": {"mid_block.attentions.0.proj_in": 2}}
    diffusers.StableDiffusionPipeline.save_lora_weights(
        tmp_path, unet_lora_layers=layers, unet_lora_adapter_metadata=metadata
    )
    adapter = read_adapter(tmp_path)
    assert all(name.startswith("unet.") for name in adapter.modules)
    merged = shapes_pipeline()
    merge(merged.unet, adapter, "unet.")
    assert (picture(merged) - expected).abs().max() < 2e-4


def test_the_published_order_is_that_of_stable_diffusions_unet():
    """On a U-Net of the same blocks and a tenth of the width."""
    with torch.device("meta"):
        unet = diffusers.UNet2DConditionModel(
            block_out_channels=(32, 64, 128, 128), cross_attention_dim=24, attention_head_dim=8
        )
    wide = {32: 320, 64: 640, 128: 1280, 24: 768}
    expected = {}
    for name, module in unet.named_modules():
        if name.endswith((".to_q", ".to_v")):
            expected[f"base_model.model.{name}.lora_A.weight"] = (2, wide[module.in_features])
            expected[f"base_model.model.{name}.lora_B.weight"] = (wide[module.out_features], 2)
    assert stable_diffusion_dimensions(rank=2) == expected


def small_xl():
    """A pipeline of SDXL's kind, random: two text encoders, the second with a projection."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=50,
                 max_position_embeddings=10, projection_dim=16)  # fmt: skip
    config = transformers.CLIPTextConfig(**sizes)
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(16, 32), layers_per_block=1, sample_size=8, cross_attention_dim=32,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4), use_linear_projection=True, addition_embed_type="text_time", norm_num_groups=4,
        addition_time_embed_dim=8, transformer_layers_per_block=(1, 2), projection_class_embeddings_input_dim=64,
    )  # fmt: skip
    return diffusers.StableDiffusionXLPipeline(
        vae=None, text_encoder=transformers.CLIPTextModel(config), tokenizer=None, tokenizer_2=None,
        text_encoder_2=transformers.CLIPTextModelWithProjection(config), unet=unet,
        scheduler=diffusers.EulerDiscreteScheduler(), add_watermarker=False,
    )  # fmt: skip


def loaded_changes(model, prefix):
    """The change that each of peft's layers in a model makes, by the adapter's name for it."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, peft.tuners.lora.LoraLayer)}
    return {f"{prefix}{name}": module.get_delta_weight(module.active_adapters[0]) for name, module in layers.items()}


def assert_all_loaded(model, prefix, adapter):
    found = loaded_changes(model, prefix)
    assert found.keys() == {name for name in adapter.factors if name.startswith(prefix)}
    for name, change in found.items():
        dense = adapter.factors[name].dense()
        torch.testing.assert_close(change.reshape(dense.shape), dense, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", ["diffusers", "kohya"])
def test_a_pipeline_of_two_text_encoders(tmp_path, layout):
    pipeline = small_xl()
    endings = ("to_q", "to_out.0", "net.2", "proj_in", "conv_shortcut", "linear_1", "fc2", "k_proj", "out_proj")
    shapes, kernels = {}, {}
    for part in ("unet", "text_encoder", "text_encoder_2"):
        model = getattr(pipeline, part)
        names = [name for name, _ in model.named_modules() if name.endswith(endings) and "add_embedding" not in name]
        found, sides = change_size(model, names)
        shapes |= {f"{part}.{name}": shape for name, shape in found.items()}
        kernels |= {f"{part}.{name}": kernel for name, kernel in sides.items()}
    adapter = random_adapter(1, shapes=shapes, ranks=(2, 3, 2), scales=(0.5, 0.3, 1.0, 1.0))
    path = write_adapter(adapter, tmp_path / "out", layout=layout, kernels=kernels)
    pipeline.load_lora_weights(tmp_path / "out")
    for part in ("unet", "text_encoder", "text_encoder_2"):
        assert_all_loaded(getattr(pipeline, part), f"{part}.", adapter)
    assert read_adapter(path, modules=shapes).modules == adapter.modules


@pytest.mark.parametrize("layout", ["diffusers", "peft"])
def test_a_transformer_of_diffusers(tmp_path, layout):
    torch.manual_seed(0)
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=(2, 2, 4),
    )  # fmt: skip
    names = [name for name, _ in transformer.named_modules() if name.endswith(("to_q", "to_add_out", "proj_out"))]
    shapes, _ = change_size(transformer, names)
    adapter = random_adapter(2, shapes={f"transformer.{n}": s for n, s in shapes.items()}, scales=(0.5, 2.0))
    path = write_adapter(adapter, tmp_path / "out", layout=layout)
    if layout == "peft":
        model = peft.PeftModel.from_pretrained(transformer, path).base_model.model
        assert_all_loaded(model, "", Adapter({n.partition(".")[2]: c for n, c in adapter.factors.items()}))
    else:
        transformer.load_lora_adapter(path, prefix="transformer")
        assert_all_loaded(transformer, "transformer.", adapter)
    assert close(read_adapter(path), adapter)


def test_what_authors_name_otherwise_is_exported_so_that_diffusers_loads_it(tmp_path):
    torch.manual_seed(0)
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=(2, 2, 4),
    )  # fmt: skip
    head, own = "diffusion_model.double_blocks.0", "transformer.transformer_blocks.0"
    adapter = random_adapter(5, shapes={f"{head}.img_attn.qkv": (48, 16), f"{head}.txt_attn.proj": (16, 16)})
    export_adapter(adapter, tmp_path / "flux")
    state = diffusers.loaders.FluxLoraLoaderMixin.lora_state_dict(tmp_path / "flux")
    transformer.load_lora_adapter(state, prefix="transformer")
    fused, other = (adapter.factors[f"{head}.{name}"] for name in ("img_attn.qkv", "txt_attn.proj"))
    parts = zip("qkv", fused.up.split(16), strict=True)
    expected = {f"{own}.attn.to_{part}": LowRank(fused.down, up, fused.scale) for part, up in parts}
    assert_all_loaded(transformer, "transformer.", Adapter(expected | {f"{own}.attn.to_add_out": other}))
    shapes = {f"diffusion_model.blocks.0.{attn}_attn.{part}": (8, 8) for attn in ("self", "cross") for part in "qkvo"}
    shapes |= {f"diffusion_model.blocks.0.ffn.{part}": (8, 8) for part in (0, 2)}
    export_adapter(random_adapter(6, shapes=shapes), tmp_path / "wan", base="Wan-AI/Wan2.1-T2V-14B")
    state = diffusers.loaders.WanLoraLoaderMixin.lora_state_dict(tmp_path / "wan")
    assert {name.partition(".lora")[0].rpartition("0.")[2] for name in state} > {"attn1.to_q", "attn2.to_v"}
    assert plan_adapter(tmp_path / "wan").base == "Wan-AI/Wan2.1-T2V-14B"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # which peft asks for
def test_a_language_model_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=32
    )

    def model():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).eval()

    shapes, _ = change_size(
        model(), [name for name, _ in model().named_modules() if name.endswith(("q_proj", "up_proj"))]
    )
    adapter = random_adapter(4, shapes=shapes, ranks=(2, 1, 3), scales=(0.5, 2.0, 0.25))
    path = write_adapter(adapter, tmp_path / "adapter", layout="peft", base="tiny")
    tokens = torch.arange(8)[None]
    merged = model()
    merge(merged, adapter)
    expected = merged(tokens).logits
    torch.testing.assert_close(
        peft.PeftModel.from_pretrained(model(), path)(tokens).logits, expected, rtol=1e-4, atol=1e-4
    )
    loaded = model()
    loaded.load_adapter(path)
    torch.testing.assert_close(loaded(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    assert (expected - model()(tokens).logits).abs().max() > 0.01
