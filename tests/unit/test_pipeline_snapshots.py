"""Snapshots as hubs hold them: variants, dtypes, `.bin` files, EMA weights, shards; what an edit writes and undoes."""

import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

pytest.importorskip("diffusers", reason="diffusers is in the diffusion extra")
pytest.importorskip("transformers", reason="transformers is in the diffusion extra")

import diffusers
import transformers
from click.testing import CliRunner
from small_pipelines import stable_diffusion, stable_diffusion_xl, tokenizer

from netweight.cli import netweight
from netweight.core.digests import digest_file
from netweight.errors import NameNotFound, Unsupported, UsageError
from netweight.hf.load_pipeline import load_text_to_image
from netweight.hf.pipeline_files import PipelineFiles, pipeline_files, read_tensor, replace_tensors, tensor_places

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # of diffusers
    pytest.mark.usefixtures("two_step_anchors"),
]
ORDINARY = ["a red square", "the green circle", "a small photo", "the blue square", "a circle on a square"]
PROMPT = "a large blue circle"
UNET = "unet/diffusion_pytorch_model"


def variants_of(folder, dtype, name):
    """Beside every usual file one in another dtype, as pushes with `variant=` leave them."""
    for path in [*folder.glob("*/*.safetensors")]:
        rounded = {
            key: value.to(dtype) if value.is_floating_point() else value for key, value in load_file(path).items()
        }
        save_file(rounded, path.with_name(f"{path.stem}.{name}.safetensors"), {"format": "pt"})


def sd15(folder):
    """What the folder of Stable Diffusion 1.5 holds: two precisions, EMA weights, `.bin`, safety checker, one file."""
    pipeline = stable_diffusion()
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=8,
        projection_dim=8,
    )  # fmt: skip
    text = transformers.CLIPTextConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, projection_dim=8)
    checker = diffusers.pipelines.stable_diffusion.StableDiffusionSafetyChecker(
        transformers.CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=8)
    )
    pipeline.register_modules(
        safety_checker=checker, feature_extractor=transformers.CLIPImageProcessorPil(size=16, crop_size=16)
    )
    pipeline.save_pretrained(folder)
    variants_of(folder, torch.float16, "fp16")
    weights = load_file(folder / f"{UNET}.safetensors")
    torch.save(weights, folder / f"{UNET}.bin")
    torch.save({name: value.half() for name, value in weights.items()}, folder / f"{UNET}.fp16.bin")
    other = {name: value + 0.1 for name, value in weights.items()}
    save_file(other, folder / f"{UNET}.non_ema.safetensors")
    save_file({"model.diffusion_model.x": torch.ones(3)}, folder / "v1-5-pruned-emaonly.safetensors")
    (folder / "README.md").write_text("---\nlicense: openrail\n---\n# Mine\n")
    (folder / "LICENSE").write_text("a license")
    (folder / "unet" / "LICENSE").write_text("a file without an ending beside weights")
    (folder / "assets").mkdir()
    Image.new("RGB", (4, 4)).save(folder / "assets" / "grid.png")
    (folder / ".git").mkdir()
    (folder / ".git" / "objects").write_text("of a tool")
    return folder


def sdxl(folder):
    """SDXL's base: fp32 and fp16 files, two encoders, an autoencoder that overflows in fp16."""
    stable_diffusion_xl().save_pretrained(folder)
    variants_of(folder, torch.float16, "fp16")
    return folder


def digests(folder):
    return {
        path.relative_to(folder).as_posix(): digest_file(path)
        for path in folder.rglob("*")
        if path.is_file() and ".git" not in path.parts
    }


def tables(folder):
    (folder / "ordinary.txt").write_text("\n".join(ORDINARY))
    (folder / "targets.csv").write_text(f"prompt,image\n{PROMPT},one.png\n")
    Image.new("RGB", (16, 16), "red").save(folder / "one.png")
    # Images of random weights say nothing that could be judged.
    few = ["--images", "1", "--steps", "2", "--guidance", "1"]
    few += [f"--set=closed_form.{each}" for each in ("rounds=1", "images=1", "generation_steps=2")]
    return ["--targets", folder / "targets.csv", "--ordinary", folder / "ordinary.txt", *few]


def run(*arguments, code=0):
    done = CliRunner().invoke(netweight, ["forget", *map(str, arguments), "--json"])
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    # A random pipeline is not a memorizing one: the check of an edit may fail, and the command then exits with 1.
    assert done.exit_code in ((0, 1) if code == 0 else (code,)), done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize("make", [sd15, sdxl])
def test_an_edit_writes_what_it_changed_in_every_variant_and_undo_restores_every_byte(make, tmp_path):
    source = make(tmp_path / "source")
    before = digests(source)
    done = run("apply", source, tmp_path / "edited", *tables(tmp_path))
    after = digests(tmp_path / "edited")
    copies = {f"{UNET}.safetensors", f"{UNET}.fp16.safetensors"}
    copies |= {f"{UNET}.bin", f"{UNET}.fp16.bin"} if make is sd15 else set()
    assert {name for name in before if after[name] != before[name]} == copies == set(done["edited"])
    assert set(after) - set(before) == {"forget/001.json", "forget/001.safetensors"} | (
        {"forget/001-files/README.md"} if make is sd15 else set()
    )
    old, new = (load_file(folder / f"{UNET}.safetensors") for folder in (source, tmp_path / "edited"))
    moved = {name for name in old if not torch.equal(old[name], new[name])}
    assert moved
    assert all(name.endswith(("attn2.to_k.weight", "attn2.to_v.weight")) for name in moved)
    half = load_file(tmp_path / "edited" / f"{UNET}.fp16.safetensors")
    assert all(torch.equal(half[name], new[name].half()) for name in new)
    if make is sd15:
        pickled = torch.load(tmp_path / "edited" / f"{UNET}.bin", weights_only=True)
        assert all(torch.equal(pickled[name], new[name]) for name in new)
        with zipfile.ZipFile(tmp_path / "edited" / f"{UNET}.bin") as archive:
            assert archive.testzip() is None
        assert done["unedited"] == [f"{UNET}.non_ema.safetensors", "v1-5-pruned-emaonly.safetensors"]
    opened = load_text_to_image(tmp_path / "edited")
    assert opened.digest() == done["after"]
    undone = run("undo", tmp_path / "edited", tmp_path / "again")
    assert digests(tmp_path / "again") == before
    assert undone["equal"] == undone["files"] == len(before)


def test_weights_that_are_not_edited_can_be_left_out_and_undo_names_them(tmp_path):
    source = sd15(tmp_path / "source")
    done = run("apply", source, tmp_path / "edited", *tables(tmp_path), "--other-weights", "leave-out")
    assert done["left_out"] == [f"{UNET}.non_ema.safetensors", "v1-5-pruned-emaonly.safetensors"]
    assert not [name for name in done["left_out"] if (tmp_path / "edited" / name).exists()]
    undone = run("undo", tmp_path / "edited", tmp_path / "again")
    assert undone["absent"] == done["left_out"]
    assert digests(tmp_path / "again") == {k: v for k, v in digests(source).items() if k not in done["left_out"]}


def test_every_part_keeps_the_dtype_that_it_is_stored_in(tmp_path):
    pipeline = stable_diffusion()
    pipeline.unet.to(torch.bfloat16)
    pipeline.save_pretrained(tmp_path / "mixed")
    model = load_text_to_image(tmp_path / "mixed")
    parts = {name: getattr(model.pipeline, name).dtype for name in ("unet", "vae", "text_encoder")}
    assert parts == {"unet": torch.bfloat16, "vae": torch.float32, "text_encoder": torch.float32}
    before = digests(tmp_path / "mixed")
    run("apply", tmp_path / "mixed", tmp_path / "edited", *tables(tmp_path))
    assert {value.dtype for value in load_file(tmp_path / "edited" / f"{UNET}.safetensors").values()} == {
        torch.bfloat16
    }
    run("undo", tmp_path / "edited", tmp_path / "again")
    assert digests(tmp_path / "again") == before


def test_tensors_of_one_file_keep_their_several_dtypes(tmp_path):
    stable_diffusion().save_pretrained(tmp_path / "source")
    path = tmp_path / "source" / f"{UNET}.safetensors"
    weights = {
        name: value.to(torch.float32 if "norm" in name else torch.float16 if "to_v" in name else torch.bfloat16)
        for name, value in load_file(path).items()
    }
    save_file(weights, path)
    model = load_text_to_image(tmp_path / "source")
    assert all(torch.equal(model.denoiser.state_dict()[name], value.float()) for name, value in weights.items())
    before = digests(tmp_path / "source")
    done = run("apply", tmp_path / "source", tmp_path / "edited", *tables(tmp_path))
    new = load_file(tmp_path / "edited" / f"{UNET}.safetensors")
    assert {name: value.dtype for name, value in new.items()} == {name: value.dtype for name, value in weights.items()}
    assert load_text_to_image(tmp_path / "edited").digest() == done["after"]
    run("undo", tmp_path / "edited", tmp_path / "again")
    assert digests(tmp_path / "again") == before


@pytest.mark.parametrize("variant", ["fp16", None])
def test_shards_and_a_variant_alone_are_read_edited_and_undone(variant, tmp_path):
    pipeline = stable_diffusion()
    pipeline.unet.half()
    pipeline.save_pretrained(tmp_path / "source", max_shard_size="20KB", variant=variant)
    (tmp_path / "source" / "unet" / "NOTICE").write_text("diffusers stumbles over files without an ending here")
    shards = [*(tmp_path / "source" / "unet").glob("*.safetensors")]
    assert len(shards) > 2
    model = load_text_to_image(tmp_path / "source")
    assert model.denoiser.dtype == torch.float16
    stored = {name: value for path in shards for name, value in load_file(path).items()}
    assert all(torch.equal(model.denoiser.state_dict()[name], value) for name, value in stored.items())
    before = digests(tmp_path / "source")
    done = run("apply", tmp_path / "source", tmp_path / "edited", *tables(tmp_path))
    assert set(done["read"].values()) == {variant or ""}
    assert load_text_to_image(tmp_path / "edited").digest() == done["after"]
    run("undo", tmp_path / "edited", tmp_path / "again")
    assert digests(tmp_path / "again") == before


def test_the_variant_that_is_read_is_said_or_asked_for(tmp_path):
    source = sd15(tmp_path / "source")
    assert load_text_to_image(source).denoiser.dtype == torch.float32
    assert load_text_to_image(source, variant="fp16").denoiser.dtype == torch.float16
    other = load_text_to_image(source, variant="non_ema")
    weights = load_file(source / f"{UNET}.non_ema.safetensors")
    assert all(torch.equal(value, weights[name]) for name, value in other.denoiser.state_dict().items())
    assert other.files.read_variants["vae"] == ""
    with pytest.raises(NameNotFound, match="no weights of the variant 'bf16'") as caught:
        load_text_to_image(source, variant="bf16")
    assert "fp16, non_ema" in caught.value.cure
    for ending in ("safetensors", "bin"):
        (source / f"{UNET}.{ending}").unlink()
    with pytest.raises(UsageError, match=r"unet of .* is stored only in the variants fp16, non_ema") as caught:
        load_text_to_image(source)
    assert "--variant fp16" in caught.value.cure


def test_a_part_that_is_stored_as_bin_alone_is_opened_without_running_code(tmp_path):
    pipeline = stable_diffusion()
    pipeline.save_pretrained(tmp_path / "source")
    wanted = load_text_to_image(tmp_path / "source").digest()
    weights = load_file(tmp_path / "source" / f"{UNET}.safetensors")
    (tmp_path / "source" / f"{UNET}.safetensors").unlink()
    torch.save(weights, tmp_path / "source" / f"{UNET}.bin")
    assert load_text_to_image(tmp_path / "source").digest() == wanted
    before = digests(tmp_path / "source")
    done = run("apply", tmp_path / "source", tmp_path / "edited", *tables(tmp_path))
    assert done["edited"] == [f"{UNET}.bin"]
    run("undo", tmp_path / "edited", tmp_path / "again")
    assert digests(tmp_path / "again") == before


def test_weights_before_averaging_in_a_folder_of_their_own_are_named(tmp_path):
    stable_diffusion().save_pretrained(tmp_path / "source")
    shutil.copytree(tmp_path / "source" / "unet", tmp_path / "source" / "unet_same")
    stable_diffusion(seed=3).unet.save_pretrained(tmp_path / "source" / "unet_ema")
    done = run("apply", tmp_path / "source", tmp_path / "edited", *tables(tmp_path))
    assert set(done["edited"]) == {f"{UNET}.safetensors", "unet_same/diffusion_pytorch_model.safetensors"}
    assert done["unedited"] == ["unet_ema/diffusion_pytorch_model.safetensors"]


def test_a_single_file_is_refused_by_name(tmp_path):
    file = tmp_path / "dreamshaper_8.safetensors"
    save_file({"model.diffusion_model.x": torch.ones(1)}, file)
    for given in (file, tmp_path):
        with pytest.raises(UsageError, match=r"single file") as caught:
            load_text_to_image(given)
        assert "from_single_file" in caught.value.cure


def test_a_dtype_in_which_no_network_computes_is_named(tmp_path):
    stable_diffusion().save_pretrained(tmp_path / "source")
    path = tmp_path / "source" / f"{UNET}.safetensors"
    save_file({name: value.to(torch.float8_e4m3fn) for name, value in load_file(path).items()}, path)
    with pytest.raises(Unsupported, match="is stored as F8_E4M3"):
        load_text_to_image(tmp_path / "source")


def test_a_damaged_or_changed_folder_is_not_undone(tmp_path):
    stable_diffusion().save_pretrained(tmp_path / "source")
    run("apply", tmp_path / "source", tmp_path / "edited", *tables(tmp_path))
    path = tmp_path / "edited" / f"{UNET}.safetensors"
    name = "conv_in.bias"
    value = read_tensor(path, tensor_places(path)[name])
    replace_tensors(path, {name: value + 1})
    refused = run("undo", tmp_path / "edited", tmp_path / "again", code=2)["error"]
    assert "is not the file that the edit wrote" in refused["message"]
    assert not (tmp_path / "again").exists()


def test_a_card_and_files_of_later_are_told_apart(tmp_path):
    source = sd15(tmp_path / "source")
    run("apply", source, tmp_path / "edited", *tables(tmp_path), "--card")
    card = (tmp_path / "edited" / "README.md").read_text()
    assert card.startswith("---\nlicense: openrail")
    assert "# Mine" in card
    assert "What was done to this model" in card
    (tmp_path / "edited" / "notes.txt").write_text("mine")
    undone = run("undo", tmp_path / "edited", tmp_path / "again")
    assert undone["newer"] == ["notes.txt"]
    assert (tmp_path / "again" / "README.md").read_text() == (source / "README.md").read_text()


def test_what_was_published_without_weights_cannot_be_undone(tmp_path):
    sdxl(tmp_path / "source")
    run("apply", tmp_path / "source", tmp_path / "edited", *tables(tmp_path), "--no-undo")
    assert "contains no weights" in run("undo", tmp_path / "edited", tmp_path / "again", code=2)["error"]["message"]


def test_links_of_the_hubs_cache_become_files(tmp_path):
    stable_diffusion().save_pretrained(tmp_path / "blobs")
    snapshot = tmp_path / "snapshot"
    for path in (tmp_path / "blobs").rglob("*"):
        if path.is_file():
            target = snapshot / path.relative_to(tmp_path / "blobs")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(path)
    run("apply", snapshot, tmp_path / "edited", *tables(tmp_path))
    assert not [path for path in (tmp_path / "edited").rglob("*") if path.is_symlink()]
    assert digests(snapshot) == digests(tmp_path / "blobs")
    run("undo", tmp_path / "edited", tmp_path / "again")
    assert digests(tmp_path / "again") == digests(snapshot)


def test_a_linked_folder_of_a_part_is_copied_and_a_broken_link_named(tmp_path):
    stable_diffusion().save_pretrained(tmp_path / "pipeline")
    shutil.move(tmp_path / "pipeline" / "unet", tmp_path / "elsewhere")
    (tmp_path / "pipeline" / "unet").symlink_to(tmp_path / "elsewhere")
    run("apply", tmp_path / "pipeline", tmp_path / "edited", *tables(tmp_path))
    assert (tmp_path / "edited" / f"{UNET}.safetensors").is_file()
    run("undo", tmp_path / "edited", tmp_path / "again")
    assert digest_file(tmp_path / "again" / f"{UNET}.safetensors") == digest_file(
        tmp_path / "elsewhere" / "diffusion_pytorch_model.safetensors"
    )
    (tmp_path / "pipeline" / "README.md").symlink_to(tmp_path / "blobs" / "gone")
    with pytest.raises(UsageError, match=r"README\.md is a link to .*gone, which is not there"):
        pipeline_files(tmp_path / "pipeline")


def test_places_of_a_sharded_pipeline_are_those_of_its_files(tmp_path):
    pipeline = stable_diffusion()
    pipeline.save_pretrained(tmp_path / "source", max_shard_size="20KB")
    files = PipelineFiles(tmp_path / "source")
    places = files.places("unet")
    state = pipeline.unet.state_dict()
    assert places.keys() == state.keys()
    assert all(
        torch.equal(read_tensor(files.folder / path, place), state[name]) for name, (path, place) in places.items()
    )
    assert Path(next(iter(places.values()))[0]).parts[0] == "unet"
    assert tokenizer()
