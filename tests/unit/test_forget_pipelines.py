"""Pipelines beside Stable Diffusion 1: SDXL's two encoders and sizes, and a LoRA that lies in the folder."""

import json

import pytest
import torch
from PIL import Image

pytest.importorskip("diffusers", reason="diffusers is in the diffusion extra")
pytest.importorskip("transformers", reason="transformers is in the diffusion extra")

import diffusers
from small_pipelines import WORDS, stable_diffusion, stable_diffusion_xl

from netweight.attacks.embedding_search.search import paired, search
from netweight.attacks.embedding_search.settings import SearchSettings
from netweight.errors import Unsupported, UsageError
from netweight.hf.load_pipeline import load_text_to_image, text_to_image
from netweight.methods.forget.detect import Threshold, detect
from netweight.methods.forget.edited_folder import undo_folder
from netweight.methods.forget.edits import ClosedForm, Distil
from netweight.methods.forget.folder import forget_folder
from netweight.methods.forget.folder_settings import FolderForgetting
from netweight.methods.forget.forgetting import forget, undo
from netweight.methods.forget.layers import measure_statistics, value_layers
from netweight.methods.forget.localize import localize_prompt
from netweight.methods.forget.settings import DetectionConfig, LocalizationConfig

# Of diffusers, in EulerDiscreteScheduler.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
PROMPT = "a large blue circle"
ORDINARY = [f"a {word} photo" for word in WORDS[1:]]


def test_sdxl_generates_what_its_own_pipeline_does():
    pipeline = stable_diffusion_xl()
    model = text_to_image(pipeline)
    wanted = pipeline(
        [PROMPT, "the red photo"], latents=model.initial_noise([3, 4]), num_inference_steps=4, guidance_scale=5.0,
        output_type="pt",
    ).images  # fmt: skip
    found = model.generate(model.embed([PROMPT, "the red photo"]), [3, 4], guidance=5.0, steps=4)
    assert torch.allclose(found, wanted, atol=1e-5)
    assert not model.embed([""]).states.any()  # as it answers the empty prompt
    text = model.embed([PROMPT, ""])
    assert torch.equal(text.rows([1, 0]).pooled[1], text.pooled[0])


@pytest.mark.parametrize("settings", [ClosedForm(), Distil(
    steps=2, batch=4, images=1, generation_steps=2, error="noise"
)], ids=["closed-form", "distil"])  # fmt: skip
def test_sdxl_is_edited_and_restored(settings):
    model = text_to_image(stable_diffusion_xl())
    before = model.digest()
    record = forget(model, [PROMPT], ORDINARY, edit=settings)
    assert model.digest() == record.after != before
    undo(model, record)
    assert model.digest() == before


def test_sdxl_is_scored_localized_and_searched():
    model = text_to_image(stable_diffusion_xl())
    look = DetectionConfig(seeds=2, steps=4)
    assert len(detect(model, [PROMPT, "a photo"], look)) == 2
    usual = measure_statistics(model, ORDINARY)
    found = localize_prompt(model, PROMPT, usual, Threshold(-0.5, "given"), LocalizationConfig(detection=look))
    assert set(found.initial) == set(value_layers(model.denoiser))
    settings = SearchSettings(steps=1, draws=2, images=1, generation_steps=2, error="noise")
    found = search(model, PROMPT, torch.rand(3, 16, 16), ORDINARY, settings, similarity=paired(), seed=0)
    assert [trial.start for trial in found.trials] == ["original", "unrelated", "noise"]
    assert found.text.pooled.shape == (3, 16)
    with pytest.raises(Unsupported, match="two text encoders"):
        search(model, PROMPT, torch.rand(3, 16, 16), ORDINARY, settings.replace(starts=("soft",)),
               similarity=paired(), seed=0)  # fmt: skip


def test_an_autoencoder_that_overflows_in_half_is_widened_and_narrowed_again():
    pipeline = stable_diffusion_xl().to(torch.float16)
    model = text_to_image(pipeline)
    seen = []
    pipeline.vae.decoder.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    assert model.to_images(torch.randn(1, 4, 8, 8)).isfinite().all()
    assert seen == [torch.float32]
    assert {value.dtype for value in pipeline.vae.state_dict().values()} == {torch.float16}


def test_a_refiner_is_refused_by_what_it_takes():
    pipeline = stable_diffusion_xl()
    pipeline.register_to_config(requires_aesthetics_score=True)
    with pytest.raises(Unsupported, match="addition_embed_type"):
        text_to_image(pipeline)


@pytest.mark.parametrize("name", ["SD3Transformer2DModel", "FluxTransformer2DModel"])
def test_networks_of_joint_attention_are_refused_by_name(name):
    pipeline = stable_diffusion()
    sizes = {"num_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2, "joint_attention_dim": 16}
    if name.startswith("Flux"):
        sizes |= {"num_single_layers": 1, "axes_dims_rope": (2, 2, 4), "pooled_projection_dim": 16}
    transformer = getattr(diffusers, name)(**sizes)
    pipeline.unet, pipeline.transformer = None, transformer
    with pytest.raises(Unsupported, match=f"denoiser is a {name}") as caught:
        text_to_image(pipeline)
    assert "joint attention" in caught.value.cure


def test_a_lora_in_the_folder_is_merged_edited_and_undone(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is in the llm extra")
    pipeline = stable_diffusion()
    pipeline.save_pretrained(tmp_path / "adapted")
    plain = load_text_to_image(tmp_path / "adapted").digest()
    torch.manual_seed(1)
    pipeline.unet.add_adapter(peft.LoraConfig(target_modules=["to_v", "to_k"], init_lora_weights=False))
    layers = peft.get_peft_model_state_dict(pipeline.unet)
    diffusers.StableDiffusionPipeline.save_lora_weights(tmp_path / "adapted", unet_lora_layers=layers)
    model, adapted = load_text_to_image(tmp_path / "adapted"), text_to_image(pipeline)
    assert model.digest() != plain
    made, wanted = (one.generate(one.embed([PROMPT]), [0], steps=2) for one in (model, adapted))
    assert torch.allclose(made, wanted, atol=1e-5)

    (tmp_path / "ordinary.txt").write_text("\n".join(ORDINARY))
    (tmp_path / "targets.csv").write_text(f"prompt,image\n{PROMPT},one.png\n")
    Image.new("RGB", (16, 16)).save(tmp_path / "one.png")
    settings = FolderForgetting(targets=tmp_path / "targets.csv", ordinary=tmp_path / "ordinary.txt")
    record = forget_folder(tmp_path / "adapted", tmp_path / "edited", settings)
    assert record.before == model.digest()
    undo_folder(tmp_path / "edited", tmp_path / "merged")
    assert load_text_to_image(tmp_path / "merged").digest() == model.digest()


def test_prompts_longer_than_the_window_are_named(tmp_path):
    stable_diffusion().save_pretrained(tmp_path / "pipeline")
    prompt = " ".join(WORDS)
    (tmp_path / "ordinary.txt").write_text("\n".join(ORDINARY))
    (tmp_path / "targets.jsonl").write_text(json.dumps({"prompt": prompt, "image": "one.png"}))
    Image.new("RGB", (16, 16)).save(tmp_path / "one.png")
    settings = FolderForgetting(targets=tmp_path / "targets.jsonl", ordinary=tmp_path / "ordinary.txt")
    with pytest.raises(UsageError, match=r"'a the red.* has 17 tokens; the text encoder reads 10") as caught:
        forget_folder(tmp_path / "pipeline", tmp_path / "edited", settings)
    assert "Cut it" in caught.value.cure
    assert not (tmp_path / "edited").exists()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch's compiler
def test_a_compiled_network_is_refused():
    pipeline = stable_diffusion()
    pipeline.unet = torch.compile(pipeline.unet)
    with pytest.raises(Unsupported, match="denoiser is compiled") as caught:
        text_to_image(pipeline)
    assert "_orig_mod" in caught.value.cure


def test_fused_projections_are_refused_and_unfused_ones_are_not():
    model = text_to_image(stable_diffusion())
    model.denoiser.fuse_qkv_projections()
    with pytest.raises(Unsupported, match="are fused"):
        forget(model, [PROMPT], ORDINARY)
    model.denoiser.unfuse_qkv_projections()
    assert forget(model, [PROMPT], ORDINARY).before


def test_a_prompt_to_forget_and_to_keep_is_refused():
    with pytest.raises(UsageError, match=f"'{PROMPT}' is memorized and ordinary"):
        forget(text_to_image(stable_diffusion()), [PROMPT], [*ORDINARY, PROMPT])


def test_an_edit_of_another_model_is_refused():
    model, other = (text_to_image(stable_diffusion(seed=seed)) for seed in (0, 1))
    with pytest.raises(UsageError, match="not the model that the edit left"):
        undo(other, forget(model, [PROMPT], ORDINARY))
