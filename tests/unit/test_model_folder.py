"""Model folders: kept once, found again, opened dense with their tokenizer, refused with the reason."""

import pytest
import torch

import netweight
from netweight.data.public import train_bpe
from netweight.errors import UsageError
from netweight.hf.load_language_model import ABOUT, language_model
from netweight_experiments.toys.fitting import finished, keep

transformers = pytest.importorskip("transformers", reason="transformers is in the llm extra")


@pytest.fixture
def kept(tmp_path):
    torch.manual_seed(0)
    tokenizer = train_bpe(["a cat sat on a mat"], 280)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).bfloat16()
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "training.safetensors").write_bytes(b"a checkpoint")
    assert finished(folder, {"seed": 1}) is None
    assert keep(folder, model, tokenizer, {"seed": 1}, {"loss": 2.5}) == {"loss": 2.5}
    return folder, model


def same(first, second):
    pairs = zip(first.state_dict().items(), second.state_dict().items(), strict=True)
    return all(a == b and torch.equal(left, right) for (a, left), (b, right) in pairs)


def test_what_was_trained_is_found_again(kept):
    folder, model = kept
    assert finished(folder, {"seed": 1}) == {"loss": 2.5}
    assert sorted(path.name for path in folder.glob("*.safetensors")) == ["model.safetensors"]
    with pytest.raises(UsageError, match="trained otherwise"):
        finished(folder, {"seed": 2})
    opened, tokenizer = language_model(folder, "decoder")
    assert same(opened, model)
    assert not opened.training
    assert tokenizer.decode(tokenizer("a mat")["input_ids"]) == "a mat"


def test_a_compressed_folder_is_opened_dense(kept, tmp_path):
    folder, model = kept
    netweight.compress_folder(folder, tmp_path / "net")
    opened, _ = language_model(tmp_path / "net", "decoder")
    assert same(opened, model)
    assert not any(isinstance(parameter, netweight.CompressedTensor) for parameter in opened.parameters())


def test_what_cannot_be_opened_is_named(kept, tmp_path):
    folder, _ = kept
    with pytest.raises(UsageError, match=r"contains no config\.json"):
        language_model(tmp_path, "decoder")
    with pytest.raises(UsageError, match="cannot be opened as an encoder-decoder"):
        language_model(folder, "encoder-decoder")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="cannot be opened as a decoder"):
        language_model(folder, "decoder")
    assert (folder / ABOUT).exists()
