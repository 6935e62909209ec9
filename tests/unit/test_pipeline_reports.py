"""Pipelines as public reports describe them, made small: each is opened as its own program means it, or named.

The reports are of diffusers, accelerate, ComfyUI, stable-diffusion-webui, kohya's scripts and the erasing methods.
"""

import json
import shutil

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

pytest.importorskip("diffusers", reason="diffusers is in the diffusion extra")
pytest.importorskip("transformers", reason="transformers is in the diffusion extra")

import diffusers
from small_pipelines import flux, stable_diffusion, stable_diffusion_xl

from netweight.data.images.pairs import read_pairs
from netweight.errors import NetweightError, UnsafeInput, Unsupported, UsageError
from netweight.hf.load_pipeline import load_text_to_image, text_to_image
from netweight.methods.forget.edited_folder import undo_folder
from netweight.methods.forget.edits import ClosedForm
from netweight.methods.forget.folder_settings import FolderForgetting
from netweight.methods.forget.forget_folder import forget_folder
from netweight.methods.forget.forgetting import forget

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of diffusers
ORDINARY = ["a red square", "the green circle", "a small photo", "the blue square", "a circle on a square"]
PROMPT = "a large blue circle"
UNET = "unet/diffusion_pytorch_model"


@pytest.fixture
def folder(tmp_path):
    stable_diffusion().save_pretrained(tmp_path / "pipeline")
    return tmp_path / "pipeline"


def shards(folder, names, ending="safetensors", index=None):
    """Replace the weights of the U-Net by two shards of these names, with an index."""
    weights = load_file(folder / f"{UNET}.safetensors")
    keys = sorted(weights)
    parts = keys[::2], keys[1::2]
    table = {}
    for name, part in zip(names, parts, strict=True):
        own = {key: weights[key].contiguous() for key in part}
        if ending == "bin":
            torch.save(own, folder / "unet" / name)
        else:
            save_file(own, folder / "unet" / name, {"format": "pt"})
        table |= dict.fromkeys(part, name)
    index = index or f"diffusion_pytorch_model.{ending}.index.json"
    (folder / "unet" / index).write_text(json.dumps({"metadata": {}, "weight_map": table}))


@pytest.fixture(autouse=True)
def fast_anchors(two_step_anchors):
    """No test here looks at how well an edit works."""


def edit(folder, tmp_path):
    """Edit a folder, undo it, and return the names of files that the edit changed; undoing restores all."""
    (tmp_path / "ordinary.txt").write_text("\n".join(ORDINARY))
    (tmp_path / "targets.csv").write_text(f"prompt,image\n{PROMPT},one.png\n")
    Image.new("RGB", (16, 16), "red").save(tmp_path / "one.png")
    settings = FolderForgetting(
        targets=tmp_path / "targets.csv", ordinary=tmp_path / "ordinary.txt", verify=False,
        closed_form=ClosedForm(rounds=1, images=1, generation_steps=2),
    )  # fmt: skip
    forget_folder(folder, tmp_path / "edited", settings)
    undone = undo_folder(tmp_path / "edited", tmp_path / "restored")
    assert undone.equal == len(undone.record.files.digests)
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and path.read_bytes() != (tmp_path / "edited" / path.relative_to(folder)).read_bytes()
    }


def test_shards_of_bin_files_are_opened_and_edited(folder, tmp_path):
    """diffusers 14811: no argument opens a whole pipeline with sharded `.bin` weights."""
    plain = load_text_to_image(folder).digest()
    names = [f"diffusion_pytorch_model-0000{place}-of-00002.bin" for place in (1, 2)]
    shards(folder, names, "bin")
    (folder / f"{UNET}.safetensors").unlink()
    assert load_text_to_image(folder).digest() == plain
    changed = edit(folder, tmp_path)
    assert changed
    assert changed <= {f"unet/{name}" for name in names}


@pytest.mark.parametrize("form", ["model-0000{}-of-00002.fp16", "model.fp16-0000{}-of-00002"])
def test_shards_of_a_variant_are_read_by_either_naming(form, folder):
    """accelerate 2946, diffusers 9253: shards of a variant were named in two ways."""
    plain = load_text_to_image(folder).digest()
    shards(
        folder, [f"diffusion_pytorch_{form.format(place)}.safetensors" for place in (1, 2)],
        index="diffusion_pytorch_model.safetensors.fp16.index.json",
    )  # fmt: skip
    assert load_text_to_image(folder, variant="fp16").digest() == plain
    (folder / f"{UNET}.safetensors").unlink()
    assert load_text_to_image(folder).digest() == plain


def test_shards_that_an_earlier_save_left_are_named(folder):
    """diffusers 14719, 8898: a stale index beside a newer whole file; diffusers reads the old shards."""
    shards(folder, [f"diffusion_pytorch_model-0000{place}-of-00002.safetensors" for place in (1, 2)])
    with pytest.raises(UsageError, match=r"unet contains weights twice, as .*-00001-of-00002.* and ") as caught:
        load_text_to_image(folder)
    assert "Remove the files that are out of date" in caught.value.cure


def test_shards_of_which_one_is_missing_are_named(folder):
    """diffusers 8443 and others: a download that ended early."""
    shards(folder, [f"diffusion_pytorch_model-0000{place}-of-00002.safetensors" for place in (1, 2)])
    (folder / f"{UNET}.safetensors").unlink()
    (folder / f"{UNET}-00002-of-00002.safetensors").unlink()
    with pytest.raises(UsageError, match="unet contains 1 of 2 shards"):
        load_text_to_image(folder)


@pytest.mark.parametrize("fused", [True, False])
def test_a_lora_that_was_saved_inside_the_network_is_named(fused, folder):
    """diffusers 6602, 9420: saved after fuse_lora, without unload_lora_weights; or with the adapter loaded."""
    weights = load_file(folder / f"{UNET}.safetensors")
    name = next(name for name in weights if name.endswith("attn2.to_v.weight"))
    layer, value = name.removesuffix(".weight"), weights.pop(name)
    weights[f"{layer}.base_layer.weight"] = value
    if not fused:
        weights[f"{layer}.lora_A.default.weight"] = torch.zeros(1, value.shape[1])
    save_file(weights, folder / f"{UNET}.safetensors", {"format": "pt"})
    with pytest.raises(Unsupported, match=r"unet of .* was saved with an adapter inside.*base_layer") as caught:
        load_text_to_image(folder)
    assert "unload_lora_weights" in caught.value.cure


@pytest.mark.parametrize("number", ["", "_2"])
def test_a_word_that_was_added_to_a_tokenizer_alone_is_named(number):
    """diffusers 4903, 9010: textual inversion for SDXL must be loaded into both encoders."""
    pipeline = stable_diffusion_xl()
    getattr(pipeline, f"tokenizer{number}").add_tokens(["<cat-toy>"])
    with pytest.raises(UsageError, match=rf"tokenizer{number} has the token '<cat-toy>'.*text_encoder{number} has"):
        text_to_image(pipeline)
    for each in ("", "_2"):
        words, encoder = getattr(pipeline, f"tokenizer{each}"), getattr(pipeline, f"text_encoder{each}")
        words.add_tokens(["<cat-toy>"])
        encoder.resize_token_embeddings(len(words))
    assert text_to_image(pipeline).embed(["a <cat-toy>"]).states.isfinite().all()


def test_a_quantized_part_is_named(folder):
    """Files of nf4 and GGUF: weights that are codes of numbers."""
    config = folder / "unet" / "config.json"
    about = json.loads(config.read_text()) | {"quantization_config": {"quant_method": "bitsandbytes"}}
    config.write_text(json.dumps(about))
    with pytest.raises(Unsupported, match=r"unet of .* is quantized \(bitsandbytes\)"):
        load_text_to_image(folder)
    config.write_text(json.dumps({key: value for key, value in about.items() if key != "quantization_config"}))
    (folder / f"{UNET}.safetensors").rename(folder / f"{UNET}.gguf")
    with pytest.raises(UsageError, match="cannot be opened"):
        load_text_to_image(folder)


def test_weights_of_whole_numbers_are_named(folder):
    """Codes of 8 bits would be read as if they were the weights."""
    file = folder / f"{UNET}.safetensors"
    state = load_file(file)
    name = next(name for name in state if name.endswith("attn1.to_q.weight"))
    save_file(state | {name: (100 * state[name]).to(torch.int8)}, file, {"format": "pt"})
    with pytest.raises(Unsupported, match=r"attn1\.to_q\.weight' of .* is stored as int8: it is quantized"):
        load_text_to_image(folder)


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("tokenizer/tokenizer_config.json", {"model_max_length": None}, "returns any number of tokens"),
        ("tokenizer/tokenizer_config.json", {"model_max_length": 777}, "returns 777 tokens"),
        ("vae/config.json", {"scaling_factor": None}, "scaling_factor of the autoencoder is None"),
        ("vae/config.json", {"latents_mean": [0.0] * 9, "latents_std": [1.0] * 9}, "latents_mean .* has 9 numbers"),
    ],
)
def test_configurations_of_parts_that_do_not_fit_are_named(file, change, words, folder):
    about = json.loads((folder / file).read_text()) | change
    (folder / file).write_text(
        json.dumps({key: value for key, value in about.items() if value is not None or "vae" in file})
    )
    with pytest.raises(UsageError, match=words):
        load_text_to_image(folder)


def test_a_pipeline_of_code_of_its_own_is_not_run(folder, tmp_path):
    """diffusers' custom pipelines: a class in a file of the folder."""
    marker = tmp_path / "ran"
    (folder / "mine.py").write_text(f"open({str(marker)!r}, 'w')\n")
    index = folder / "model_index.json"
    about = json.loads(index.read_text())
    index.write_text(json.dumps(about | {"_class_name": ["mine", "Mine"]}))
    with pytest.raises(UnsafeInput, match=r"needs program code .* is not run here"):
        load_text_to_image(folder)
    index.write_text(json.dumps(about | {"unet": ["mine", "Mine"]}))
    with pytest.raises(UnsafeInput, match=r"needs program code .* is not run here"):
        load_text_to_image(folder)
    assert not marker.exists()
    index.write_text(json.dumps(about | {"_class_name": "OwnPipeline"}))
    with pytest.raises(Unsupported, match=r"a OwnPipeline, a class of pipelines that diffusers .* does not have"):
        load_text_to_image(folder)


@pytest.mark.parametrize("part", ["unet", "text_encoder", "vae"])
def test_no_weight_of_a_pipeline_is_drawn_at_random(part, folder):
    (file,) = (folder / part).glob("*.safetensors")
    weights = load_file(file)
    name = next(name for name in weights if name.endswith((".fc1.weight", "conv_out.weight")))
    save_file({n: w for n, w in weights.items() if n != name}, file)
    with pytest.raises(UsageError, match=f"The files of .*{part} lack the weight '.*{name.rpartition('.')[0][-7:]}"):
        load_text_to_image(folder)
    save_file(weights | {name: torch.full_like(weights[name], torch.nan)}, file)
    with pytest.raises(UsageError, match="contains NaN or infinity"):
        load_text_to_image(folder)


@pytest.mark.parametrize("part", ["unet", "tokenizer", "scheduler"])
def test_a_pipeline_without_a_folder_of_its_parts_is_named(part, folder):
    shutil.rmtree(folder / part)
    with pytest.raises(UsageError, match=f"has no folder {part}, which its model_index.json names"):
        load_text_to_image(folder)
    (folder / part).mkdir()
    with pytest.raises(NetweightError):
        load_text_to_image(folder)


@pytest.mark.parametrize("kind", ["EDMEulerScheduler", "FlowMatchEulerDiscreteScheduler"])
def test_a_scheduler_of_another_kind_of_diffusion_is_named(kind, folder):
    """EDM's noise levels, as of Playground 2.5, have no table of products."""
    getattr(diffusers, kind)().save_pretrained(folder / "scheduler")
    index = folder / "model_index.json"
    about = json.loads(index.read_text())
    index.write_text(json.dumps(about | {"scheduler": ["diffusers", kind]}))
    with pytest.raises(Unsupported, match=f"The scheduler is a {kind}"):
        load_text_to_image(folder)


def test_a_network_of_latent_consistency_is_named():
    """LCM's U-Net takes guidance as an embedding."""
    pipeline = stable_diffusion()
    pipeline.unet.register_to_config(time_cond_proj_dim=8)
    with pytest.raises(Unsupported, match="time_cond_proj_dim"):
        text_to_image(pipeline)


def test_images_by_a_tiny_autoencoder_are_the_pipelines_own():
    """TAESD, which people put in for previews: latents without a distribution."""
    pipeline = stable_diffusion()
    torch.manual_seed(0)
    pipeline.vae = diffusers.AutoencoderTiny(
        encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8), num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1), latent_channels=4,
    )  # fmt: skip
    pipeline.vae_scale_factor = 2
    model = text_to_image(pipeline)
    wanted = pipeline(
        [PROMPT], latents=model.initial_noise([0]), num_inference_steps=2, guidance_scale=3.0, output_type="pt",
        height=16, width=16,
    ).images  # fmt: skip
    assert torch.allclose(model.generate(model.embed([PROMPT]), [0], guidance=3.0, steps=2), wanted, atol=1e-5)
    assert model.to_latents(wanted).shape == (1, 4, 8, 8)


def test_an_edit_of_a_network_in_half_precision_stays_finite():
    """Least squares in fp16 would give black images."""
    pipeline = stable_diffusion().to(torch.float16)
    model = text_to_image(pipeline)
    forget(model, [PROMPT], ORDINARY, edit=ClosedForm(rounds=1, images=1, generation_steps=2))
    assert all(weight.isfinite().all() and weight.dtype == torch.float16 for weight in model.denoiser.parameters())


def test_a_flux_pipeline_is_edited_in_the_shards_that_changed(tmp_path):
    """erasing 32: Flux, whose transformer comes in shards."""
    flux().save_pretrained(tmp_path / "pipeline")
    part = tmp_path / "pipeline" / "transformer"
    weights = load_file(part / "diffusion_pytorch_model.safetensors")
    text = {name for name in weights if name.startswith(("context_embedder", "time_text_embed.text_embedder"))}
    table = {}
    for number, names in enumerate((text, weights.keys() - text), start=1):
        file = f"diffusion_pytorch_model-0000{number}-of-00002.safetensors"
        save_file({name: weights[name].contiguous() for name in names}, part / file, {"format": "pt"})
        table |= dict.fromkeys(names, file)
    (part / "diffusion_pytorch_model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": table})
    )
    (part / "diffusion_pytorch_model.safetensors").unlink()
    config = part / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"sample_size": 8}))
    assert edit(tmp_path / "pipeline", tmp_path) == {"transformer/diffusion_pytorch_model-00001-of-00002.safetensors"}


def test_pictures_of_targets_are_read_as_a_viewer_shows_them(tmp_path):
    """Pillow 3011, kohya 2179, webui: CMYK of Adobe, transparent palettes, EXIF turns; frames are refused."""
    colors = Image.new("RGB", (16, 16), (200, 40, 40))
    colors.paste((40, 40, 200), (0, 0, 16, 8))
    colors.convert("CMYK").save(tmp_path / "print.jpg", quality=100)
    exif = Image.Exif()
    exif[0x0112] = 3
    colors.rotate(180).save(tmp_path / "phone.png", exif=exif)
    palette = colors.quantize(4)
    palette.info["transparency"] = palette.getpixel((0, 0))
    palette.save(tmp_path / "palette.png")
    names = ("print.jpg", "phone.png", "palette.png")
    (tmp_path / "targets.csv").write_text("prompt,image\n" + "".join(f"{name[:-4]},{name}\n" for name in names))
    shown = {pair.prompt: pair.image for pair in read_pairs(tmp_path / "targets.csv", (16, 16), "crop").pairs}
    wanted = torch.tensor([[40, 40, 200], [200, 40, 40]]) / 255
    for name in ("print", "phone"):
        assert torch.allclose(shown[name][:, 4, 8], wanted[0], atol=0.06), name
        assert torch.allclose(shown[name][:, 12, 8], wanted[1], atol=0.06), name
    assert torch.allclose(shown["palette"][:, 4, 8], torch.ones(3))  # transparency is white
    colors.save(tmp_path / "moving.gif", save_all=True, append_images=[colors.rotate(90)])
    (tmp_path / "targets.csv").write_text("prompt,image\nmoving,moving.gif\n")
    with pytest.raises(UsageError, match=r"moving\.gif \(.*, line 2\) has 2 frames"):
        read_pairs(tmp_path / "targets.csv", (16, 16), "crop")


def test_a_folder_copied_without_its_index_is_named(folder, tmp_path):
    """ComfyUI's `diffusers` folders of models: the parts without model_index.json."""
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "model_index.json").unlink()
    with pytest.raises(UsageError, match=r"not a pipeline's folder: it contains no model_index.json"):
        load_text_to_image(tmp_path / "copy")


@pytest.mark.parametrize(
    ("name", "more", "reason"),
    [
        ("DDPMScheduler", {"variance_type": "learned_range"}, r"The DDPMScheduler of .* fails: TypeError"),
        ("LCMScheduler", {"original_inference_steps": 2}, r"The LCMScheduler of .* fails: .*another number of --steps"),
        ("DDIMInverseScheduler", {}, "adds noise to images"),
    ],
)
def test_schedulers_that_cannot_make_images_are_named(name, more, reason, folder):
    """Configurations that do not fit the network, and schedulers of inversion, which add noise."""
    index = folder / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"scheduler": ["diffusers", name]}))
    about = {"_class_name": name, "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear",
             "steps_offset": 1, "clip_sample": False, **more}  # fmt: skip
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(about))
    model = load_text_to_image(folder)
    with pytest.raises(NetweightError, match=reason):
        model.generate(model.embed(["a red square"]), [0], steps=3)
