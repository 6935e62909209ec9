"""Textual inversions in every form that programs write: loaded as diffusers loads them, or refused by name."""

import json
import shutil

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

pytest.importorskip("diffusers", reason="diffusers is in the diffusion extra")
pytest.importorskip("transformers", reason="transformers is in the diffusion extra")

import diffusers
from small_pipelines import flux, pixart, stable_diffusion, stable_diffusion_3, stable_diffusion_xl

from netweight.cli import netweight
from netweight.errors import CorruptBlob, Unsupported, UsageError
from netweight.hf.load_pipeline import load_text_to_image
from netweight.hf.textual_inversion import has_word, read_textual_inversion

WIDTH = 24
TWO = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0))
# By file name, what a program writes, and the word that it stands for.
FORMS = {
    "learned_embeds.safetensors": ({"<cat-toy>": TWO[0]}, "<cat-toy>"),
    "learned_embeds.bin": ({"<cat-toy>": TWO[:1]}, "<cat-toy>"),
    "bad-hands.pt": ({"string_to_param": {"*": TWO}, "string_to_token": {"*": 265}, "name": "old"}, "bad-hands"),
    "style.safetensors": ({"emb_params": TWO}, "style"),
    "face.bin": (TWO, "face"),
}


def written(path, content):
    if path.suffix == ".safetensors":
        save_file(content, path)
    else:
        torch.save(content, path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inversions") / "pipeline"
    stable_diffusion().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", FORMS)
def test_a_word_is_read_as_diffusers_reads_it(name, folder, tmp_path):
    content, word = FORMS[name]
    path = written(tmp_path / name, content)
    own = diffusers.StableDiffusionPipeline.from_pretrained(folder)
    own.load_textual_inversion({word: read_textual_inversion(path).vectors[""]}, token=word)
    prompt = f"a photo of {word}"
    wanted = own.encode_prompt([prompt], "cpu", 1, False)[0]
    model = load_text_to_image(folder, embeddings=[path])
    assert torch.equal(model.embed([prompt]).states, wanted)
    plain = load_text_to_image(folder)
    assert not torch.equal(plain.embed([prompt]).states, wanted)
    assert model.digest() == plain.digest()
    assert model.identity() != plain.identity()


def test_vectors_for_two_encoders_go_to_their_own(tmp_path):
    stable_diffusion_xl().save_pretrained(tmp_path / "xl")
    vectors = {"clip_l": torch.randn(2, 16), "clip_g": torch.randn(2, 16)}
    path = written(tmp_path / "neg.safetensors", vectors)
    model = load_text_to_image(tmp_path / "xl", embeddings=[path])
    for part, name in (("text_encoder", "clip_l"), ("text_encoder_2", "clip_g")):
        rows = getattr(model.pipeline, part).get_input_embeddings().weight
        assert torch.equal(rows[-2:], vectors[name])
    assert model.embed(["a photo of neg"]).states.isfinite().all()
    # diffusers 5327: an embedding for one encoder alone is of another model.
    single = written(tmp_path / "one.safetensors", {"<one>": torch.randn(16)})
    with pytest.raises(UsageError, match="vectors of another model: their widths are 16 for its only text encoder"):
        load_text_to_image(tmp_path / "xl", embeddings=[single])


def test_what_is_no_embedding_of_a_word_is_refused_by_name(folder, tmp_path):
    # diffusers 7511: the text encoder itself, which training wrote beside the embedding.
    shutil.copy(folder / "text_encoder" / "model.safetensors", tmp_path / "model.safetensors")
    with pytest.raises(Unsupported, match=r"is not the embedding of one word: it contains 'embeddings\.position"):
        read_textual_inversion(tmp_path / "model.safetensors")
    (tmp_path / "cut.pt").write_bytes(b"PK\3\4")
    with pytest.raises(CorruptBlob, match=r"cut\.pt cannot be read"):
        read_textual_inversion(tmp_path / "cut.pt")
    wide = written(tmp_path / "wide.safetensors", {"<wide>": torch.randn(32)})
    with pytest.raises(UsageError, match="their widths are 32 for text_encoder, and this pipeline needs 24"):
        load_text_to_image(folder, embeddings=[wide])
    known = written(tmp_path / "red.pt", {"string_to_param": {"*": TWO}})
    (tmp_path / "red<.pt").write_bytes(known.read_bytes())
    again = written(tmp_path / "again.safetensors", {"red</w>": TWO[0]})
    with pytest.raises(UsageError, match="is in the vocabulary of the tokenizer already"):
        load_text_to_image(folder, embeddings=[again])


@pytest.mark.parametrize("make", [pixart, stable_diffusion_3])
def test_pipelines_that_take_no_words_say_so(make, tmp_path):
    make().save_pretrained(tmp_path / "pipeline")
    path = written(tmp_path / "word.safetensors", {"<word>": TWO[0]})
    with pytest.raises(Unsupported, match="does not take textual inversions"):
        load_text_to_image(tmp_path / "pipeline", size=(16, 16), embeddings=[path])


def test_the_word_of_flux_goes_to_its_clip(tmp_path):
    flux().save_pretrained(tmp_path / "pipeline")
    path = written(tmp_path / "word.safetensors", {"<word>": torch.ones(16)})
    model = load_text_to_image(tmp_path / "pipeline", size=(16, 16), embeddings=[path])
    assert torch.equal(model.pipeline.text_encoder.get_input_embeddings().weight[-1], torch.ones(16))


def test_a_word_that_lies_in_the_folder_unloaded_is_asked_for_and_not_called_weights(folder, tmp_path):
    pipeline = tmp_path / "pipeline"
    shutil.copytree(folder, pipeline)
    file = written(pipeline / "learned_embeds.safetensors", {"<cat-toy>": TWO[0]})
    (pipeline / "embeddings").mkdir()
    written(pipeline / "embeddings" / "bad-hands.pt", {"string_to_param": {"*": TWO}, "name": "x"})
    (tmp_path / "prompts.txt").write_text("a red square\na photo of <cat-toy>\n")
    (tmp_path / "ordinary.txt").write_text("a green circle\na small square\n")

    def detect(*more):
        words = [
            "forget", "detect", str(pipeline), "--prompts", str(tmp_path / "prompts.txt"), "--ordinary",
            str(tmp_path / "ordinary.txt"), "--seeds", "2", "--steps", "2", "--out", str(tmp_path / "out"), "--json",
        ]  # fmt: skip
        return CliRunner().invoke(netweight, [*words, *more])

    refused = detect()
    assert refused.exit_code == 2
    assert f"--embedding {file}" in json.loads(refused.stdout)["error"]["message"]
    taken = detect("--embedding", str(file))
    assert taken.exit_code == 0, taken.output
    assert [row["prompt"] for row in json.loads(taken.stdout)["prompts"]] == ["a red square", "a photo of <cat-toy>"]
    model = load_text_to_image(pipeline)
    assert set(model.unread_words) == {"<cat-toy>", "bad-hands"}
    with pytest.raises(UsageError, match="contains 'bad-hands'"):
        model.embed(["a photo with bad-hands, red"])
    assert len(model.embed(["a photo with bad-handsome"])) == 1


@pytest.mark.parametrize(
    ("prompt", "word", "found"),
    [("a <cat> on", "<cat>", True), ("catalog", "cat", False), ("cat, red", "cat", True), ("a.b", "a*b", False)],
)
def test_words_are_whole_words(prompt, word, found):
    assert has_word(prompt, word) == found
