"""diffusers models and pipelines loaded into compressed memory: what they compute, hold and save."""

import copy
from pathlib import Path

import pytest
import torch
from folders_under_test import flip_a_bit

import netweight
from netweight.errors import CorruptBlob, NameNotFound, Unsupported, UsageError

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from loading_memory import measured  # noqa: E402

from netweight.plugins.diffusers import NetweightConfig  # noqa: E402

BF16 = torch.bfloat16


def unet():
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        norm_num_groups=8,
        attention_head_dim=8,
    )


def vae():
    return diffusers.AutoencoderKL(block_out_channels=(32, 64), norm_num_groups=8, sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2)  # fmt: skip


def dit():
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=8, num_layers=2, sample_size=8,
        norm_num_groups=4, num_embeds_ada_norm=10,
    )  # fmt: skip


def text_encoder():
    return transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=400,
            max_position_embeddings=77, bos_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip


def drawn(*shape, dtype=BF16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(dtype)


MODELS = {
    "unet": (unet, lambda m: m(drawn(2, 4, 8, 8, dtype=m.dtype), 3, drawn(2, 5, 32, dtype=m.dtype)).sample),
    "vae": (vae, lambda m: m(drawn(2, 3, 16, 16, dtype=m.dtype)).sample),
    "dit": (
        dit,
        lambda m: m(drawn(2, 4, 8, 8, dtype=m.dtype), torch.tensor([3, 500]), class_labels=torch.tensor([1, 2])).sample,
    ),
}


def kept_compressed(model):
    return {name for name, p in model.named_parameters() if isinstance(p, netweight.CompressedTensor)}


def checked(folder):
    return [finding.name for finding in netweight.verify(folder) if finding.passed is False]


@pytest.fixture(scope="module", params=list(MODELS))
def case(request, tmp_path_factory):
    """A tiny model's class, what it computes, its dense folder (bf16) and the same compressed."""
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("model")
    make, answer = MODELS[request.param]
    model = make().to(BF16)
    model.save_pretrained(place / "dense")
    netweight.compress_folder(place / "dense", place / "net")

    def same(ours, theirs):
        with torch.no_grad():
            one, other = answer(ours), answer(theirs)
        return one.dtype == other.dtype and bool(torch.isfinite(one).all()) and torch.equal(one, other)

    return type(model), same, place / "dense", place / "net"


def test_compressed_folders_load_into_compressed_memory(case):
    kind, same, dense, net = case
    ours, theirs = kind.from_pretrained(net, dtype=BF16), kind.from_pretrained(dense, dtype=BF16)
    assert same(ours, theirs)
    by_hand = kind.from_pretrained(dense, dtype=BF16)
    netweight.compress_(by_hand)
    assert kept_compressed(ours) == kept_compressed(by_hand) != set()
    assert netweight.memory_footprint(ours) < 0.8 * netweight.memory_footprint(theirs)
    stored = netweight.open_store(net)
    blobs = {bytes(stored.raw(name)) for name in stored.names()}
    assert all(bytes(p.stored.blob) in blobs for name, p in ours.named_parameters() if name in kept_compressed(ours))
    for name, value in netweight.dense_state_dict(ours).items():
        assert torch.equal(value, theirs.state_dict()[name]), name


def test_dense_folders_are_compressed_while_loading(case):
    kind, same, dense, _ = case
    ours = kind.from_pretrained(dense, dtype=BF16, quantization_config=NetweightConfig())
    theirs = kind.from_pretrained(dense, dtype=BF16)
    assert same(ours, theirs)
    netweight.compress_(theirs)
    assert kept_compressed(ours) == kept_compressed(theirs)


@pytest.mark.parametrize("source", ["net", "dense"])
def test_saved_models_load_again_exactly(case, tmp_path, source):
    kind, same, dense, net = case
    settings = {"quantization_config": NetweightConfig()} if source == "dense" else {}
    ours = kind.from_pretrained(net if source == "net" else dense, dtype=BF16, **settings)
    ours.save_pretrained(tmp_path / "saved")
    again, theirs = (kind.from_pretrained(f, dtype=BF16) for f in (tmp_path / "saved", dense))
    assert same(again, theirs)
    assert same(ours, theirs)
    assert kept_compressed(again) == kept_compressed(ours)
    assert checked(tmp_path / "saved") == []
    netweight.decompress_folder(tmp_path / "saved", tmp_path / "back")
    back = kind.from_pretrained(tmp_path / "back", dtype=BF16)
    assert same(back, theirs)
    assert kept_compressed(back) == set()


@pytest.mark.parametrize("dtype", [None, torch.float16])
@pytest.mark.parametrize("folder", ["net", "dense"])
def test_another_dtype_is_that_of_the_dense_model(case, dtype, folder):
    kind, same, dense, net = case
    settings = {"quantization_config": NetweightConfig()} if folder == "dense" else {}
    ours = kind.from_pretrained(net if folder == "net" else dense, dtype=dtype, **settings)
    theirs = kind.from_pretrained(dense, dtype=dtype)
    assert ours.dtype == theirs.dtype == (dtype or torch.float32)
    assert kept_compressed(ours)
    assert same(ours, theirs)
    if dtype is None:
        assert same(ours.to(torch.float64), theirs.to(torch.float64))


# ---- a UNet --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    torch.manual_seed(1)
    place = tmp_path_factory.mktemp("sharded")
    unet().to(BF16).save_pretrained(place / "dense", max_shard_size="200KB", variant="fp16")
    netweight.compress_folder(place / "dense", place / "net")
    return place


def load(folder, **settings):
    return diffusers.UNet2DConditionModel.from_pretrained(folder, dtype=BF16, variant="fp16", **settings)


def same(ours, theirs):
    with torch.no_grad():
        return torch.equal(MODELS["unet"][1](ours), MODELS["unet"][1](theirs))


def test_shards_and_variants(sharded, tmp_path):
    ours, theirs = load(sharded / "net"), load(sharded / "dense")
    assert kept_compressed(ours)
    assert same(ours, theirs)
    ours.save_pretrained(tmp_path / "saved", max_shard_size="200KB", variant="fp16")
    assert len(list((tmp_path / "saved").glob("*.safetensors*"))) > 3
    ours.save_pretrained(tmp_path / "saved", variant="fp16")  # fewer files: none of the old ones may be left
    assert len(list((tmp_path / "saved").glob("*.safetensors*"))) == 1
    assert checked(tmp_path / "saved") == []
    assert same(load(tmp_path / "saved"), theirs)


def test_include_and_exclude(sharded):
    settings = NetweightConfig(include="mid_block", exclude="**.to_v", level="fast")
    ours = load(sharded / "dense", quantization_config=settings)
    assert {name.split(".")[0] for name in kept_compressed(ours)} == {"mid_block"}
    assert not any("to_v" in name for name in kept_compressed(ours))
    assert same(ours, load(sharded / "dense"))
    with pytest.raises(NameNotFound):
        load(sharded / "dense", quantization_config=NetweightConfig(include="nowhere"))


def test_device_map(sharded):
    ours = load(sharded / "net", device_map="cpu")
    assert kept_compressed(ours)
    assert same(ours, load(sharded / "dense"))


def test_loaded_models_train_copy_and_convert(sharded, tmp_path):
    ours, theirs = load(sharded / "net"), load(sharded / "dense")
    for model in (ours, theirs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        MODELS["unet"][1](model).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert kept_compressed(ours)
    assert same(ours, theirs)
    copied = copy.deepcopy(ours)
    copied.save_pretrained(tmp_path / "copied", variant="fp16")
    assert same(load(tmp_path / "copied"), theirs)
    assert same(ours.half(), theirs.half())


def test_pickled_models_compute_the_same_and_are_saved(sharded, tmp_path):
    ours, theirs = load(sharded / "net"), load(sharded / "dense")
    torch.save(ours, tmp_path / "pickled")
    again = torch.load(tmp_path / "pickled", weights_only=False)
    assert same(again, theirs)
    again.save_pretrained(tmp_path / "saved", variant="fp16")
    assert same(load(tmp_path / "saved"), theirs)


def test_modules_that_stay_in_fp32(tmp_path):
    torch.manual_seed(2)
    kind = diffusers.WanTransformer3DModel
    kind(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=64, ffn_dim=32, num_layers=1, rope_max_seq_len=32,
    ).to(BF16).save_pretrained(tmp_path / "dense")  # fmt: skip
    netweight.compress_folder(tmp_path / "dense", tmp_path / "net")
    ours, theirs = (kind.from_pretrained(tmp_path / folder, dtype=BF16) for folder in ("net", "dense"))
    assert [p.dtype for p in ours.parameters()] == [p.dtype for p in theirs.parameters()]
    assert {p.dtype for p in ours.parameters() if isinstance(p, netweight.CompressedTensor)} == {BF16, torch.float32}
    with torch.no_grad():
        results = [m(drawn(1, 4, 2, 8, 8), torch.tensor([3]), drawn(1, 12, 16)).sample for m in (ours, theirs)]
    assert torch.equal(*results)


def test_old_names_of_attention_get_their_new_ones(tmp_path):
    """As in the autoencoders of early Stable Diffusion releases."""
    from safetensors.torch import load_file, save_file

    torch.manual_seed(2)
    vae().save_pretrained(tmp_path / "dense")
    file = tmp_path / "dense" / "diffusion_pytorch_model.safetensors"
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    state = load_file(file)
    for new, name in old.items():
        state = {key.replace(f".{new}.", f".{name}."): value.clone() for key, value in state.items()}
    save_file(state, file, {"format": "pt"})
    netweight.compress_folder(tmp_path / "dense", tmp_path / "net")
    ours, info = diffusers.AutoencoderKL.from_pretrained(tmp_path / "net", output_loading_info=True)
    theirs = diffusers.AutoencoderKL.from_pretrained(tmp_path / "dense")
    assert info["missing_keys"] == info["unexpected_keys"] == []
    assert any("to_q" in name for name in kept_compressed(ours))
    with torch.no_grad():
        assert torch.equal(MODELS["vae"][1](ours), MODELS["vae"][1](theirs))


def test_adapters_on_top(sharded, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    made = load(sharded / "dense")
    made.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q", "to_v", "conv1"], init_lora_weights=False))
    made.save_lora_adapter(tmp_path / "lora")
    ours, theirs = load(sharded / "net"), load(sharded / "dense")
    for model in (ours, theirs):
        model.load_lora_adapter(tmp_path / "lora", prefix=None, use_safetensors=True)
    assert same(ours, theirs)
    assert not same(ours, load(sharded / "net"))
    assert any("conv1" in name for name in kept_compressed(ours))
    for model in (ours, theirs):
        model.fuse_lora()
    assert same(ours, theirs)
    assert kept_compressed(ours)


# ---- damage and refusals ---------------------------------------------------------------------------------------------


def test_damage_is_named(sharded, tmp_path):
    name = flip_a_bit(sharded / "net", tmp_path / "net")
    with pytest.raises(CorruptBlob, match=name):  # when it is loaded, or first used
        load(tmp_path / "net").save_pretrained(tmp_path / "saved")


def test_what_cannot_be_is_refused(sharded, tmp_path):
    with pytest.raises(Unsupported, match="disk"):
        load(sharded / "net", device_map={"": "disk"})
    with pytest.raises(UsageError, match=r"is of shape .* in the folder"):
        load(sharded / "net", cross_attention_dim=16)
    with pytest.raises(UsageError, match="ignore_mismatched_sizes"):
        load(sharded / "net", ignore_mismatched_sizes=True)
    with pytest.raises(Unsupported, match=r"cannot compute in torch\.float8_e4m3fn"):
        diffusers.UNet2DConditionModel.from_pretrained(sharded / "net", dtype=torch.float8_e4m3fn, variant="fp16")
    with pytest.raises(Unsupported, match=r"version 9.*Upgrade"):
        NetweightConfig(version=9)
    ours = load(sharded / "net")
    with pytest.raises(Unsupported, match="pickles"):
        ours.save_pretrained(tmp_path / "saved", safe_serialization=False)
    assert not (tmp_path / "saved").exists()
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "config.json").write_bytes((sharded / "net" / "config.json").read_bytes())
    for file in (sharded / "dense").glob("*.safetensors*"):
        (tmp_path / "mixed" / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UsageError, match="not compressed, although"):
        load(tmp_path / "mixed")


# ---- pipelines -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory):
    """A whole Stable Diffusion pipeline, tiny, without a tokenizer: dense, and compressed."""
    torch.manual_seed(3)
    place = tmp_path_factory.mktemp("pipeline")
    pipeline = diffusers.StableDiffusionPipeline(
        unet=unet(),
        vae=vae(),
        text_encoder=text_encoder(),
        scheduler=diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),
        tokenizer=None,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).to(BF16)
    for part in ("unet", "vae", "text_encoder", "scheduler"):
        getattr(pipeline, part).save_pretrained(place / "dense" / part)
    pipeline.save_config(place / "dense")
    netweight.compress_folder(place / "dense", place / "net")
    return place


def pipeline_of(folder, **settings):
    result = diffusers.DiffusionPipeline.from_pretrained(
        folder, tokenizer=None, safety_checker=None, feature_extractor=None, dtype=BF16, **settings
    )
    result.set_progress_bar_config(disable=True)
    return result


def picture(pipeline):
    ids = torch.arange(1, 78)[None]
    with torch.no_grad():
        embeddings = pipeline.text_encoder(ids)[0]
    return pipeline(
        prompt_embeds=embeddings,
        negative_prompt_embeds=torch.zeros_like(embeddings),
        num_inference_steps=2,
        height=16,
        width=16,
        generator=torch.Generator().manual_seed(5),
        output_type="pt",
    ).images


def parts(pipeline):
    return {name: kept_compressed(getattr(pipeline, name)) for name in ("unet", "vae", "text_encoder")}


def test_a_whole_pipeline(pipelines, tmp_path):
    ours, theirs = pipeline_of(pipelines / "net"), pipeline_of(pipelines / "dense")
    assert all(parts(ours).values())
    assert not any(parts(theirs).values())
    assert torch.equal(picture(ours), picture(theirs))
    for alone in (diffusers.UNet2DConditionModel, diffusers.AutoModel):
        assert same(alone.from_pretrained(str(pipelines / "net"), subfolder="unet", dtype=BF16), theirs.unet)
    ours.save_pretrained(tmp_path / "saved")
    again = pipeline_of(tmp_path / "saved")
    assert parts(again) == parts(ours)
    assert torch.equal(picture(again), picture(theirs))
    for part in parts(ours):
        assert checked(tmp_path / "saved" / part) == []


def test_a_pipeline_compressed_while_loading(pipelines):
    whole = diffusers.PipelineQuantizationConfig(quant_backend="netweight", quant_kwargs={"level": "fast"})
    ours, theirs = pipeline_of(pipelines / "dense", quantization_config=whole), pipeline_of(pipelines / "dense")
    assert all(parts(ours).values())
    assert torch.equal(picture(ours), picture(theirs))
    some = diffusers.PipelineQuantizationConfig(quant_mapping={"unet": NetweightConfig(exclude="**.to_q")})
    ours = pipeline_of(pipelines / "dense", quantization_config=some)
    assert [name for name, kept in parts(ours).items() if kept] == ["unet"]


def test_adapters_on_a_pipeline(pipelines, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    made = pipeline_of(pipelines / "dense")
    made.unet.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False))
    made.text_encoder.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    states = [peft.utils.get_peft_model_state_dict(part) for part in (made.unet, made.text_encoder)]
    made.save_lora_weights(tmp_path, *states)
    ours, theirs = pipeline_of(pipelines / "net"), pipeline_of(pipelines / "dense")
    plain = picture(theirs)
    for pipeline in (ours, theirs):
        pipeline.load_lora_weights(tmp_path)
    assert not torch.equal(picture(theirs), plain)
    assert torch.equal(picture(ours), picture(theirs))
    for pipeline in (ours, theirs):
        pipeline.unload_lora_weights()
    assert torch.equal(picture(ours), plain)
    assert all(parts(ours).values())


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def middling(tmp_path_factory):
    """A UNet of some 70 MB (bf16), dense and compressed, and its largest weight's bytes."""
    torch.manual_seed(2)
    place = tmp_path_factory.mktemp("middling")
    model = diffusers.UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(192, 384),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=256,
    ).to(BF16)
    largest = max(p.nbytes for p in model.parameters())
    model.save_pretrained(place / "dense")
    netweight.compress_folder(place / "dense", place / "net")
    return place, largest


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="memory is measured by /proc/self/status")
def test_private_memory(middling):
    place, largest = middling
    both = measured("diffusers", place)
    assert len(both) == 2
    for found in both:
        assert found["held"] < 0.7 * found["dense"]
        assert found["peak"] < 1.1 * (found["held"] + largest) + 4e6, found
        assert found["mapped"] <= found["held"] + 1e6, found
