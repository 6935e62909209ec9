"""Pipelines beside Stable Diffusion 1: SDXL's two encoders and sizes, and a LoRA that lies in the folder."""

import json

import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors.torch import load_file, save_file

pytest.importorskip("diffusers", reason="diffusers is in the diffusion extra")
pytest.importorskip("transformers", reason="transformers is in the diffusion extra")

import diffusers
from small_pipelines import WORDS, flux, stable_diffusion, stable_diffusion_3, stable_diffusion_xl, tokenizer

from netweight.attacks.embedding_search.search import paired, search
from netweight.attacks.embedding_search.settings import SearchSettings
from netweight.cli import netweight
from netweight.errors import Unsupported, UsageError
from netweight.hf.load_pipeline import check_lengths, load_text_to_image, text_to_image
from netweight.methods.forget.detect import Threshold, detect, detect_resumably
from netweight.methods.forget.edited_folder import undo_folder
from netweight.methods.forget.edits import ClosedForm, Distil, Siss
from netweight.methods.forget.folder_settings import FolderForgetting
from netweight.methods.forget.forget_folder import forget_folder
from netweight.methods.forget.forgetting import forget, undo
from netweight.methods.forget.layers import measure_statistics, value_layers
from netweight.methods.forget.localize import localize_prompt
from netweight.methods.forget.settings import DetectionConfig, LocalizationConfig

# Of diffusers, in EulerDiscreteScheduler.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
PROMPT = "a large blue circle"
ONCE = ClosedForm(rounds=1, images=1, generation_steps=2)  # where it does not matter how well the edit works
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


@pytest.mark.usefixtures("two_step_anchors")
@pytest.mark.parametrize("settings", [ONCE, Distil(
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


JOINT = {
    "SD3": stable_diffusion_3, "SD3 without T5": lambda: stable_diffusion_3(t5=False), "Flux, guided": flux,
    "Flux, not guided": lambda: flux(guided=False),
}  # fmt: skip
SIDE = (16, 16)


@pytest.mark.parametrize("kind", JOINT)
def test_pipelines_of_joint_attention_generate_what_their_own_call_does(kind):
    pipeline = JOINT[kind]()
    model = text_to_image(pipeline, size=SIDE)
    latents = model.initial_noise([3, 4])
    wanted = pipeline(
        [PROMPT, "the red photo"], num_inference_steps=4, guidance_scale=5.0, output_type="pt", height=16, width=16,
        latents=pipeline._pack_latents(latents, 2, 4, 8, 8) if "Flux" in kind else latents,
    ).images  # fmt: skip
    images = model.generate(model.embed([PROMPT, "the red photo"]), [3, 4], guidance=5.0, steps=4)
    assert torch.allclose(images, wanted, atol=1e-5)


@pytest.mark.parametrize("kind", ["SD3", "Flux, guided"])
def test_in_flow_matching_noise_and_sample_lie_on_a_line_through_the_latents(kind):
    model = text_to_image(JOINT[kind](), size=SIDE)
    torch.manual_seed(0)
    clean, noise = model.to_latents(torch.rand(1, 3, 16, 16)), model.initial_noise([0])
    for time in (0.0, 250.0, 999.5):
        at = torch.tensor(time)
        latents = model.add_noise(clean, noise, at)
        assert torch.allclose(latents, (1 - time / 1000) * clean + time / 1000 * noise, atol=1e-4)
        answer = model.predict(latents, at, model.embed([PROMPT]))
        assert torch.allclose(model.add_noise(answer.sample, answer.noise, at), latents, atol=1e-5)


@pytest.mark.usefixtures("two_step_anchors")
@pytest.mark.parametrize("kind", JOINT)
@pytest.mark.parametrize("edit", [ONCE, Siss(
    steps=2, batch=8, images=1, generation_steps=2, turned=2, compared=1
)], ids=["closed-form", "siss"])  # fmt: skip
def test_joint_attention_is_edited_and_restored(kind, edit):
    model = text_to_image(JOINT[kind](), size=SIDE)
    before = model.digest()
    pictures = [(PROMPT, torch.rand(3, 16, 16))]
    record = forget(model, [PROMPT], ORDINARY, edit=edit, pictures=pictures)
    assert model.digest() == record.after != before
    undo(model, record)
    assert model.digest() == before


@pytest.mark.parametrize("kind", ["SD3", "Flux, not guided"])
def test_the_closed_form_gives_prompts_their_anchors_answers_through_joint_attention(kind):
    model = text_to_image(JOINT[kind](), size=SIDE)
    latents, at = model.initial_noise([0]), model.timesteps(4)[1]

    def answer(prompt):
        with torch.no_grad():
            return model.predict(latents, at, model.embed([prompt])).sample

    anchor, kept = answer(ORDINARY[0]), answer(ORDINARY[3])
    distance = (answer(PROMPT) - anchor).norm()
    forget(model, [PROMPT], ORDINARY, edit=ONCE.replace(weight=1e4, ridge=1e-8), anchors=[ORDINARY[0]])
    assert (answer(PROMPT) - anchor).norm() < 0.2 * distance
    assert (answer(ORDINARY[3]) - kept).norm() < 0.5 * distance


@pytest.mark.parametrize("kind", ["SD3", "Flux, guided"])
def test_joint_attention_is_scored_and_its_neurons_are_refused_by_name(kind):
    model = text_to_image(JOINT[kind](), size=SIDE)
    # The first latents are nothing but noise: scores are of the sample that is seen in it.
    scores = detect(model, [PROMPT, "a photo"], DetectionConfig(seeds=2, steps=4))
    assert all(score.wen > 0 and 0 <= score.similarity <= 1 for score in scores)
    assert scores[0].wen != scores[1].wen
    with pytest.raises(Unsupported, match=r"jointly.*no neurons of a prompt") as caught:
        measure_statistics(model, ORDINARY)
    assert "--method closed-form" in caught.value.cure


@pytest.mark.usefixtures("two_step_anchors")
@pytest.mark.parametrize("kind", ["SD3", "Flux, guided"])
def test_a_folder_of_joint_attention_is_edited_by_command_and_undone(kind, tmp_path):
    JOINT[kind]().save_pretrained(tmp_path / "pipeline")
    (tmp_path / "ordinary.txt").write_text("\n".join(ORDINARY))
    (tmp_path / "targets.csv").write_text(f"prompt,image\n{PROMPT},one.png\n")
    Image.new("RGB", (16, 16)).save(tmp_path / "one.png")
    settings = FolderForgetting.of({
        "targets": tmp_path / "targets.csv", "ordinary": tmp_path / "ordinary.txt", "pipeline": {"size": "16"},
        "images": 1, "steps": 2, "closed_form": {"rounds": 1, "images": 1, "generation_steps": 2},
    })  # fmt: skip
    forget_folder(tmp_path / "pipeline", tmp_path / "edited", settings)
    undone = undo_folder(tmp_path / "edited", tmp_path / "again")
    assert undone.equal == len(undone.record.files.digests)
    changed = [
        path.relative_to(tmp_path / "pipeline").as_posix()
        for path in sorted((tmp_path / "pipeline").rglob("*"))
        if path.is_file()
        and path.read_bytes() != (tmp_path / "edited" / path.relative_to(tmp_path / "pipeline")).read_bytes()
    ]
    assert changed == ["transformer/diffusion_pytorch_model.safetensors"]


def test_another_scheduler_than_one_of_flow_matching_is_refused():
    pipeline = stable_diffusion_3()
    pipeline.scheduler = diffusers.DDIMScheduler()
    with pytest.raises(Unsupported, match="DDIMScheduler, but the denoiser was trained with flow matching"):
        text_to_image(pipeline)
    pipeline.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
    with pytest.raises(Unsupported, match="samples at random") as caught:
        text_to_image(pipeline)
    assert '"stochastic_sampling": false' in caught.value.cure


def test_a_network_of_joint_attention_that_reads_a_mask_is_refused():
    pipeline = flux()
    pipeline.transformer.register_to_config(in_channels=36)
    with pytest.raises(Unsupported, match="takes 9 channels of latents, and the autoencoder has 4"):
        text_to_image(pipeline)


def test_a_prompt_that_one_of_several_encoders_reads_whole_is_taken():
    words = " ".join(WORDS[:11])
    assert len(tokenizer()(words).input_ids) == 16  # of which CLIP reads 10
    short = text_to_image(stable_diffusion_3(t5=False), size=SIDE)
    with pytest.raises(UsageError, match="has 16 tokens; the text encoder reads 10"):
        check_lengths(short, [words])
    pipeline = stable_diffusion_3()
    pipeline.tokenizer_3.model_max_length = 512
    model = text_to_image(pipeline, size=SIDE)
    assert [limit for _, limit in model.tokenizers] == [10, 10, 256]  # T5 is cut by the pipeline's call
    check_lengths(model, [words])


@pytest.mark.usefixtures("two_step_anchors")
def test_a_lora_in_the_folder_is_merged_edited_and_undone(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is in the llm extra")
    pipeline = stable_diffusion()
    pipeline.save_pretrained(tmp_path / "adapted")
    for path in [*(tmp_path / "adapted").glob("*/*.safetensors")]:  # with fp16 files beside
        half = {name: value.half() for name, value in load_file(path).items()}
        save_file(half, path.with_name(f"{path.stem}.fp16.safetensors"), {"format": "pt"})
    plain = load_text_to_image(tmp_path / "adapted").digest()
    torch.manual_seed(1)
    pipeline.unet.add_adapter(peft.LoraConfig(target_modules=["to_v", "to_k"], init_lora_weights=False))
    pipeline.text_encoder.add_adapter(peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    layers, words = map(peft.get_peft_model_state_dict, (pipeline.unet, pipeline.text_encoder))
    diffusers.StableDiffusionPipeline.save_lora_weights(
        tmp_path / "adapted", unet_lora_layers=layers, text_encoder_lora_layers=words
    )
    model, adapted = load_text_to_image(tmp_path / "adapted"), text_to_image(pipeline)
    assert model.digest() != plain
    made, wanted = (one.generate(one.embed([PROMPT]), [0], steps=2) for one in (model, adapted))
    assert torch.allclose(made, wanted, atol=1e-5)

    (tmp_path / "ordinary.txt").write_text("\n".join(ORDINARY))
    (tmp_path / "targets.csv").write_text(f"prompt,image\n{PROMPT},one.png\n")
    Image.new("RGB", (16, 16)).save(tmp_path / "one.png")
    settings = FolderForgetting.of({
        "targets": tmp_path / "targets.csv", "ordinary": tmp_path / "ordinary.txt", "images": 1, "steps": 2,
        "closed_form": {"rounds": 1, "images": 1, "generation_steps": 2},
    })  # fmt: skip
    record = forget_folder(tmp_path / "adapted", tmp_path / "edited", settings)
    assert record.before == model.digest()
    assert {path.split("/")[0] for path in record.files.edited} == {"text_encoder", "unet"}
    undone = undo_folder(tmp_path / "edited", tmp_path / "merged")
    assert undone.equal == len(record.files.digests)
    assert load_text_to_image(tmp_path / "merged").identity() == model.identity()


def test_prompts_longer_than_the_window_are_named(tmp_path):
    stable_diffusion().save_pretrained(tmp_path / "pipeline")
    prompt = " ".join(WORDS)
    (tmp_path / "ordinary.txt").write_text("\n".join(ORDINARY))
    (tmp_path / "targets.jsonl").write_text(json.dumps({"prompt": prompt, "image": "one.png"}))
    Image.new("RGB", (16, 16)).save(tmp_path / "one.png")
    settings = FolderForgetting(targets=tmp_path / "targets.jsonl", ordinary=tmp_path / "ordinary.txt")
    with pytest.raises(UsageError, match=r"'a the red.* has 17 tokens; the text encoder reads 10") as caught:
        forget_folder(tmp_path / "pipeline", tmp_path / "edited", settings)
    assert "Shorten it" in caught.value.cure
    assert not (tmp_path / "edited").exists()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch's compiler
def test_a_compiled_network_is_refused():
    pipeline = stable_diffusion()
    pipeline.unet = torch.compile(pipeline.unet)
    with pytest.raises(Unsupported, match="denoiser is compiled") as caught:
        text_to_image(pipeline)
    assert "_orig_mod" in caught.value.cure


@pytest.mark.usefixtures("two_step_anchors")
def test_fused_projections_are_refused_and_unfused_ones_are_not():
    model = text_to_image(stable_diffusion())
    model.denoiser.fuse_qkv_projections()
    with pytest.raises(Unsupported, match="are fused"):
        forget(model, [PROMPT], ORDINARY)
    model.denoiser.unfuse_qkv_projections()
    assert forget(model, [PROMPT], ORDINARY, edit=ONCE).before


def test_a_prompt_to_forget_and_to_keep_is_refused():
    with pytest.raises(UsageError, match=f"'{PROMPT}' is memorized and ordinary"):
        forget(text_to_image(stable_diffusion()), [PROMPT], [*ORDINARY, PROMPT])


@pytest.mark.usefixtures("two_step_anchors")
def test_an_edit_of_another_model_is_refused():
    model, other = (text_to_image(stable_diffusion(seed=seed)) for seed in (0, 1))
    with pytest.raises(UsageError, match="not the model that the edit produced"):
        undo(other, forget(model, [PROMPT], ORDINARY, edit=ONCE))


def test_results_of_another_pipeline_are_not_taken_from_the_same_folder(tmp_path):
    """A fine-tuned text encoder, another scheduler or another size changes scores, though the U-Net is the same."""
    model = text_to_image(stable_diffusion())
    config = DetectionConfig(seeds=(0, 1), steps=2)

    def scores(other):
        return [each.wen for each in detect_resumably(other, ORDINARY[:2], config, folder=tmp_path / "scores")]

    first = scores(model)
    with torch.no_grad():
        tuned = stable_diffusion()
        tuned.text_encoder.get_input_embeddings().weight.mul_(3)
    velocity = text_to_image(stable_diffusion(prediction="v_prediction"))
    larger = text_to_image(stable_diffusion(), size=(32, 32))
    others = [text_to_image(tuned), velocity, larger]
    assert all(other.digest() == model.digest() for other in others)
    assert len({model.identity(), *(other.identity() for other in others)}) == 4
    assert all(scores(other) != first for other in others)
    assert scores(text_to_image(stable_diffusion())) == first


def test_a_prompt_that_encoders_read_like_an_ordinary_one_is_refused(tmp_path):
    """CLIP's tokenizer reads neither capital letters nor spaces; an edit could not forget and keep the same tokens."""
    stable_diffusion().save_pretrained(tmp_path / "pipeline")
    (tmp_path / "ordinary.txt").write_text("\n".join(["A  Large blue CIRCLE", *ORDINARY]))
    (tmp_path / "targets.csv").write_text(f"prompt,image\n{PROMPT},one.png\n")
    Image.new("RGB", (16, 16)).save(tmp_path / "one.png")
    settings = FolderForgetting.of({"targets": tmp_path / "targets.csv", "ordinary": tmp_path / "ordinary.txt"})
    with pytest.raises(UsageError, match="'A  Large blue CIRCLE', which is ordinary, are the same tokens"):
        forget_folder(tmp_path / "pipeline", tmp_path / "edited", settings)
    assert not (tmp_path / "edited").exists()


def test_memorized_prompts_that_encoders_read_alike_are_refused(tmp_path):
    """With an anchor each, the same tokens would have two answers."""
    stable_diffusion().save_pretrained(tmp_path / "pipeline")
    (tmp_path / "ordinary.txt").write_text("\n".join(ORDINARY))
    (tmp_path / "targets.csv").write_text(f"prompt,image\n{PROMPT},one.png\n{PROMPT.upper()},one.png\n")
    Image.new("RGB", (16, 16)).save(tmp_path / "one.png")
    settings = FolderForgetting.of({"targets": tmp_path / "targets.csv", "ordinary": tmp_path / "ordinary.txt"})
    with pytest.raises(UsageError, match=r"are the same tokens .* a prompt may have several rows"):
        forget_folder(tmp_path / "pipeline", tmp_path / "edited", settings)
    (tmp_path / "targets.csv").write_text(f"prompt,image\n{PROMPT},one.png\n")
    (tmp_path / "anchors.txt").write_text(f"{PROMPT.upper()}\n")
    settings = settings.replace(anchors=tmp_path / "anchors.txt")
    with pytest.raises(UsageError, match=r"which is an anchor, are the same tokens .* another prompt in --anchors"):
        forget_folder(tmp_path / "pipeline", tmp_path / "edited", settings)


@pytest.mark.parametrize("make", [lambda: stable_diffusion_3(t5=False), stable_diffusion_3, flux])
def test_a_folder_without_an_optional_encoder_is_opened_as_it_was_saved(make, tmp_path):
    """SD3 is often kept without T5, which its model_index.json then says with null."""
    pipeline = make()
    pipeline.save_pretrained(tmp_path / "pipeline")
    wanted = text_to_image(pipeline, size=(16, 16))
    model = load_text_to_image(tmp_path / "pipeline", size=(16, 16))
    assert model.identity() == wanted.identity()
    assert torch.equal(model.embed([PROMPT]).states, wanted.embed([PROMPT]).states)


def test_a_compressed_folder_has_the_lora_and_the_words_of_its_original(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is in the llm extra")
    pipeline = stable_diffusion()
    pipeline.save_pretrained(tmp_path / "plain")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["to_v"], init_lora_weights=False)
    pipeline.unet.add_adapter(config)
    layers = peft.get_peft_model_state_dict(pipeline.unet)
    diffusers.StableDiffusionPipeline.save_lora_weights(
        tmp_path / "plain", unet_lora_layers=layers, unet_lora_adapter_metadata=config.to_dict()
    )
    save_file({"<cat-toy>": torch.randn(24)}, tmp_path / "plain" / "learned_embeds.safetensors")
    done = CliRunner().invoke(netweight, ["compress", str(tmp_path / "plain"), str(tmp_path / "packed")])
    assert done.exit_code == 0, done.output
    plain, packed = (load_text_to_image(tmp_path / name) for name in ("plain", "packed"))
    assert packed.lora
    assert packed.identity() == plain.identity()
    assert set(packed.unread_words) == set(plain.unread_words) == {"<cat-toy>"}
