"""vLLM with a folder that netweight compressed, beside the dense one; run where vLLM is installed, a CPU build too.

python -m pytest vllm-netweight/test_plugin.py
"""

import json

import pytest
import torch

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: its plug-in is tested in an environment of its own")

import netweight  # noqa: E402
from netweight.errors import UsageError  # noqa: E402

PROMPTS = [{"prompt_token_ids": ids} for ids in ([1, 2, 3, 4], [5, 90, 7], list(range(40)))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A small Llama in bf16, by whether its head is tied: dense, and compressed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    found = {}
    for tied in (False, True):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=300, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=tied, eos_token_id=299,
        )  # fmt: skip
        plain = tmp_path_factory.mktemp("models") / "plain"
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(plain)
        netweight.compress_folder(plain, plain.with_name("net"))
        found[tied] = plain, plain.with_name("net")
    return found


def answers(folder, **options):
    """Tokens and their logarithms of probability, and of each weight its name and bytes."""
    llm = vllm.LLM(
        str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=64, enforce_eager=True,
        kv_cache_memory_bytes=64 << 20, seed=0, **options,
    )  # fmt: skip
    sampling = vllm.SamplingParams(temperature=0, max_tokens=8, logprobs=1, detokenize=False, ignore_eos=True)
    given = llm.generate(PROMPTS, sampling)
    weights = llm.collective_rpc(decoded)
    del llm
    return [(one.outputs[0].token_ids, one.outputs[0].cumulative_logprob) for one in given], weights


def decoded(worker):
    """The weights of a process, decoded, as their bytes' digests."""
    import hashlib

    found, fixed = {}, set()
    for name, module in worker.model_runner.get_model().named_modules():
        weight, stored = getattr(module, "weight", None), getattr(module, "netweight", None)
        if isinstance(weight, torch.Tensor):
            dense = weight.data if stored is None else stored.dense()
            found[name] = hashlib.sha256(dense.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
            if stored is not None and stored.fixed:
                fixed.add(name)
    return found, sorted(fixed)


def unpacked(weights):
    """Without the matrices that vLLM packs anew for a CPU when they are dense: what these compute is compared."""
    return {name: found for name, found in weights.items() if not name.endswith("_proj")}


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_equal_to_the_last_bit(folders, tied, processes, monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # a function is sent to the workers
    plain, net = folders[tied]
    wanted, of_dense = answers(plain, tensor_parallel_size=processes)
    for prefer in ("speed", "memory"):
        config = {**json.loads((net / "config.json").read_text())["quantization_config"], "prefer": prefer}
        options = {"load_format": "netweight", "hf_overrides": {"quantization_config": config}}
        given, of_ours = answers(net, tensor_parallel_size=processes, **options)
        assert [tokens for tokens, _ in given] == [tokens for tokens, _ in wanted]
        # A tied head is multiplied by another kernel than vLLM's own on a CPU.
        assert [total for _, total in given] == pytest.approx([total for _, total in wanted], rel=1e-6)
        assert [unpacked(weights) for weights, _ in of_ours] == [unpacked(weights) for weights, _ in of_dense]
        for _, fixed in of_ours:
            assert ("lm_head" in fixed) == (prefer == "speed")
            assert ("model.embed_tokens" in fixed) == (prefer == "speed" and tied)


def test_another_load_format_is_refused(folders):
    with pytest.raises((UsageError, RuntimeError), match=r"--load-format netweight|Engine core initialization failed"):
        answers(folders[False][1])
