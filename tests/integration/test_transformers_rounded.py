"""transformers models whose weights are rounded: loaded, rounded while loading, saved, loaded again, adapted."""

import json

import pytest
import torch

import netweight
from netweight.errors import LossyWrite, Unsupported, UsageError

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from netweight.plugins.transformers import NetweightConfig  # noqa: E402

IDS = torch.arange(1, 13).reshape(2, 6)


def llama():
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=320, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2():
    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=2, n_positions=64, vocab_size=320, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.fixture(scope="module", params=[llama, gpt2], ids=["llama tied", "gpt2"])
def case(request, tmp_path_factory):
    """A tiny model's class, its dense folder (bf16), and the same rounded."""
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("model")
    model = request.param().to(torch.bfloat16)
    model.save_pretrained(place / "dense")
    netweight.compress_folder(place / "dense", place / "net", mantissa_bits=1, block_size=64)
    netweight.decompress_folder(place / "net", place / "rounded")
    return type(model), place / "dense", place / "net", place / "rounded"


def blobs(model):
    """The compressed bytes of each compressed weight."""
    weights = {name: p for name, p in model.named_parameters() if isinstance(p, netweight.CompressedTensor)}
    assert weights
    assert all(weight.stored.lossy for weight in weights.values())
    return {name: bytes(weight.stored.blob) for name, weight in weights.items()}


def answers(model):
    with torch.no_grad():
        return model(IDS).logits, model.generate(IDS, max_new_tokens=6, do_sample=False, pad_token_id=0)


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(answers(ours), answers(theirs), strict=True))


def test_a_rounded_folder_loads_as_it_is(case):
    kind, dense, net, rounded = case
    ours = kind.from_pretrained(net)
    assert same(ours, kind.from_pretrained(rounded))
    assert not same(ours, kind.from_pretrained(dense))
    assert netweight.memory_footprint(ours) < 0.5 * netweight.memory_footprint(kind.from_pretrained(dense))
    blobs(ours)


def test_saving_and_loading_again_changes_nothing(case, tmp_path):
    kind, dense, net, rounded = case
    for folder, options in (
        (net, {}),
        (dense, {"quantization_config": NetweightConfig(mantissa_bits=1, block_size=64)}),
    ):
        model = kind.from_pretrained(folder, **options)
        assert same(model, kind.from_pretrained(rounded))
        before = blobs(model)
        saved = tmp_path / folder.name
        model.save_pretrained(saved)
        again = kind.from_pretrained(saved)
        assert blobs(again) == before
        assert same(again, model)
        findings = {finding.name: finding for finding in netweight.verify(saved, dense)}
        assert findings["rounded tensors beyond their bound"].passed is True
        assert "mantissa_bits" not in json.loads((saved / "config.json").read_text())["quantization_config"]


def test_rounding_while_loading_follows_the_patterns(case):
    kind, dense, _, _ = case
    config = NetweightConfig(exclude="**.mlp.**", mantissa_bits=0, block_size=None)
    model = kind.from_pretrained(dense, quantization_config=config)
    plain = kind.from_pretrained(dense)
    kept = {name for name, p in model.named_parameters() if not isinstance(p, netweight.CompressedTensor)}
    assert any("mlp" in name for name in kept)
    assert all(torch.equal(model.get_parameter(name), plain.get_parameter(name)) for name in kept)
    blobs(model)


def test_a_rounded_folder_in_another_dtype_is_not_rounded_again(case):
    kind, _, net, rounded = case
    model = kind.from_pretrained(net, dtype=torch.float32)
    assert same(model, kind.from_pretrained(rounded, dtype=torch.float32))


def test_training_is_refused_and_adapters_are_not(case):
    kind, _, net, _ = case
    model = kind.from_pretrained(net)
    with pytest.raises(LossyWrite):
        netweight.LayerwiseOptimizer(model, torch.optim.SGD, lr=0.1)
    norms = [p.clone() for p in model.parameters() if p.dim() == 1]
    model(IDS, labels=IDS).loss.backward()
    with pytest.raises(LossyWrite, match=r"\.weight and \d+ more cannot be trained"):  # so does any `Trainer`
        torch.optim.AdamW(model.parameters()).step()
    assert all(map(torch.equal, norms, [p for p in model.parameters() if p.dim() == 1]))
    model.zero_grad()
    peft = pytest.importorskip("peft", reason="peft is not installed")
    transposed = model.config.model_type == "gpt2"
    layers = ["c_attn"] if transposed else ["q_proj", "v_proj"]
    model.add_adapter(peft.LoraConfig(r=4, target_modules=layers, fan_in_fan_out=transposed, task_type="CAUSAL_LM"))
    before = blobs(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] > losses[-1]
    assert blobs(model) == before


def test_bad_settings_are_refused(case):
    kind, dense, _, _ = case
    with pytest.raises(UsageError, match=r"mantissa_bits must be .*, not 8"):
        NetweightConfig(mantissa_bits=8)
    config = NetweightConfig(mantissa_bits=3, fidelity="reference")
    with pytest.raises(Unsupported, match="reference arithmetic"):
        kind.from_pretrained(dense, quantization_config=config, dtype=torch.float32)
