"""Small random decoders of many families, and pairs of answers for them."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from netweight.data.tokens import AnswerPair  # noqa: E402
from netweight.methods.immunize.settings import TrainingSettings  # noqa: E402

VOCABULARY = 37
SHORT = TrainingSettings(lr=1e-2, batch_size=4, epochs=6, warmup=0.2, measure_every=3, checkpoint_every=4)
FAMILIES = ("llama", "qwen3", "gpt2", "neox")
ALL_FAMILIES = (*FAMILIES, "opt", "gemma", "phi", "mixtral", "falcon", "bloom")


def decoder(family="llama", layers=3, hidden=16, seed=0, vocabulary=VOCABULARY):
    shared = {"vocab_size": vocabulary, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    shape = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 32,
    }
    configs = {
        "llama": lambda: transformers.LlamaConfig(**shared, **shape, num_key_value_heads=1),
        "qwen3": lambda: transformers.Qwen3Config(**shared, **shape, num_key_value_heads=1, head_dim=12),
        "gpt2": lambda: transformers.GPT2Config(
            **shared, n_embd=hidden, n_layer=layers, n_head=2, n_positions=32, resid_pdrop=0.1
        ),
        "neox": lambda: transformers.GPTNeoXConfig(**shared, **shape),
        "opt": lambda: transformers.OPTConfig(
            **shared,
            hidden_size=hidden,
            word_embed_proj_dim=hidden,
            num_hidden_layers=layers,
            num_attention_heads=2,
            ffn_dim=24,
            max_position_embeddings=32,
        ),
        "mixtral": lambda: transformers.MixtralConfig(
            **shared, **shape, num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1
        ),
        "gemma": lambda: transformers.GemmaConfig(**shared, **shape, num_key_value_heads=1, head_dim=8),
        "phi": lambda: transformers.PhiConfig(**shared, **shape),
        "falcon": lambda: transformers.FalconConfig(**shared, **shape),
        "bloom": lambda: transformers.BloomConfig(**shared, hidden_size=hidden, n_layer=layers, n_head=2),
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(configs[family]())
        for parameter in model.parameters():  # far from the start, so that no term is nearly 0
            if parameter.dim() > 1:
                parameter.data.mul_(4)
    return model.eval()


def some_pairs(count=4, seed=3, length=5):
    """Prompts and answers of various lengths; the answers of one pair share a token in one place."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(least, most):
        size = int(torch.randint(least, most + 1, (), generator=draw))
        return tuple(torch.randint(1, VOCABULARY, (size,), generator=draw).tolist())

    pairs = []
    for _ in range(count):
        chosen, rejected = tokens(3, length), tokens(3, length + 2)
        rejected = (rejected[0], chosen[1], *rejected[2:])
        pairs.append(AnswerPair(tokens(2, 4), chosen, rejected))
    return pairs


def drawn(seed=5):
    return torch.Generator().manual_seed(seed)
