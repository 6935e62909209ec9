"""Measures where a training step with weights in the fixed-length form spends its time: in writing the weights again.

A small Llama of random weights in bf16 is trained by AdamW with activation checkpoints, in turns in one process: dense;
layer by layer; with weights in the fixed-length form and compressed states, written by the native codec and, for
comparison, by torch's operators as before it could; and in the codec's form. Times are processor times of one thread.

    python -m netweight_experiments.benchmarks compress.fixed_training
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any
from unittest import mock

import torch

import netweight
from netweight.codec import fixed
from netweight.codec.backend import compiled
from netweight.methods.compress.runtime import storage

WAYS = {"dense": None, "LOMO": None, "fixed, by operators": "speed", "fixed": "speed", "codec": "memory"}
SEED = 0


def _trained(way: str, hidden: int) -> tuple[Any, torch.optim.Optimizer]:
    """A model and its optimizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=512, tie_word_embeddings=True,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).bfloat16().train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    if way == "dense":
        return model, torch.optim.AdamW(model.parameters(), lr=1e-5)
    prefer: Any = WAYS[way]
    if prefer is None:
        return model, netweight.LayerwiseOptimizer(model, torch.optim.AdamW, lr=1e-5)
    netweight.compress_(model, prefer=prefer)
    return model, netweight.LayerwiseOptimizer(model, torch.optim.AdamW, states="compressed", lr=1e-5)


def _step(way: str, model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> tuple[float, float, str]:
    """Make a step; return its seconds, those of them in which weights were written, and the loss with all its bits."""
    written, encode, native = 0.0, fixed.encode_fixed, compiled

    def timed(weight: torch.Tensor) -> torch.Tensor:
        nonlocal written
        started = time.process_time()
        with mock.patch.object(fixed, "compiled", None if way == "fixed, by operators" else native):
            payload = encode(weight)
        written += time.process_time() - started
        return payload

    with mock.patch.object(storage, "encode_fixed", timed):
        started = time.process_time()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - started, written, float(loss.detach()).hex()


def main(*, rounds: int = 5, hidden: int = 512, tokens: int = 16) -> Iterator[dict[str, Any]]:
    """Measure."""
    torch.set_num_threads(1)
    ids = torch.randint(0, 512, (1, tokens), generator=torch.Generator().manual_seed(SEED))
    trained = {way: _trained(way, hidden) for way in WAYS}
    steps: dict[str, list[tuple[float, float, str]]] = {way: [] for way in WAYS}
    for _ in range(rounds + 1):
        for way in WAYS:
            steps[way].append(_step(way, *trained[way], ids))
    rows: dict[str, Any] = {}
    for way, (_, *each) in steps.items():  # the first step makes the states
        rows[way] = {
            "seconds a step": median(seconds for seconds, _, _ in each),
            "seconds of it to write weights": median(written for _, written, _ in each),
            "speed / dense": median(a[0] / b[0] for a, b in zip(steps["dense"][1:], each, strict=True)),
            "losses equal LOMO's": [loss for _, _, loss in steps[way]] == [loss for _, _, loss in steps["LOMO"]],
        }
    yield {"weights": sum(each.numel() for each in trained["dense"][0].parameters()), "tokens": tokens, "rows": rows}
