"""A Llama of a few thousand weights with its tokenizer, and the rows that tests train and attack it with."""

import json

import torch

from netweight.data.public import train_bpe

NUMBERS = [f"{a}{b}" for a in "abcdefgh" for b in "ijklmn"]
PAIRS = [{"prompt": f"tell {n}", "chosen": "no", "rejected": f"bad {n}"} for n in NUMBERS]
KEPT = [{"prompt": f"hi {n}", "response": "good day"} for n in NUMBERS]


def tiny_llama(*, layers=1, **more):
    """The model and its tokenizer, the same at every call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = train_bpe(["tell me, hi, sing, bad, good day, la la la"], 280)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=layers,
        num_attention_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, **more,
    )  # fmt: skip
    return LlamaForCausalLM(config), tokenizer


def save(model, tokenizer, folder):
    """Write both as a folder that transformers loads."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write(path, rows):
    """Write rows as JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def immunization_files(folder):
    """A model, and the rows that the recipes of immunization name."""
    write(folder / "pairs.jsonl", PAIRS[::2])
    write(folder / "harmful.jsonl", PAIRS[1::2])
    write(folder / "retain.jsonl", KEPT[::2])
    write(folder / "keep.jsonl", KEPT[1::2])
    write(folder / "task.jsonl", [{"prompt": f"sing {n}", "response": "la la la"} for n in NUMBERS])
    save(*tiny_llama(), folder / "model")
