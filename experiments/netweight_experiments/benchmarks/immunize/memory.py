"""What a step of RepNoise costs beside plain fine-tuning, in memory and in time: measured, written as JSON.

    python -m netweight_experiments.benchmarks immunize.memory

A random Llama is trained by Adam on the CPU, in float32. Its vocabulary is eight times its width, as is that of Llama-2
7B; the larger it is, the more the unembedding of every layer costs.

memory  Most bytes of tensors held at once (weights, gradients, Adam's states, activations), counted tensor by tensor:
        `immunize` on batches of B pairs, over B plain sequences of the same length. Steps at which gradient norms are
        measured are among them. The target is at most 1.3.
time    Processor seconds of as many steps of `immunize` as one measurement of norms is made in, over those of twice
        as many plain steps; the median of the rounds, in each of which both run. What `immunize` does once, such as
        digests, is taken off by a run of a single batch fewer. The target is at most 1.5.

A plain step is that of transformers: the model's own loss on all tokens of B sequences, clipped, then Adam.
"""

import copy
from functools import partial
from typing import Annotated

import torch

from netweight.data.tokens import Pair, collate
from netweight.methods.immunize.settings import ImmunizeSettings, TrainingSettings, named_defense
from netweight.methods.immunize.train import immunize
from netweight.toys.language import LlamaShape, initialized
from netweight_experiments.benchmarks.script import seconds
from netweight_experiments.memory import TensorLedger
from netweight_experiments.timing import median_ratio

EVERY = TrainingSettings().measure_every  # steps, of which one measures gradient norms


def pairs_of(vocabulary, tokens, count):
    """Pairs whose prompts take a quarter of their length."""
    draw = torch.Generator().manual_seed(1)
    prompt = tokens // 4
    sizes = (prompt, tokens - prompt, tokens - prompt)
    return [
        Pair(*(tuple(torch.randint(1, vocabulary, (size,), generator=draw).tolist()) for size in sizes))
        for _ in range(count)
    ]


def plain_steps(model, pairs, size):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    model.train()
    for first in range(0, len(pairs), size):
        batch = collate([pair.harmful for pair in pairs[first : first + size]], pad_id=0, loss_on="full")
        model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def defense_steps(model, pairs, size, defense):
    settings = TrainingSettings(lr=1e-4, batch_size=size, measure_every=EVERY)
    immunize(model, pairs, defense=named_defense(defense)[0], settings=settings)


def peak_of(model, work):
    ledger = TensorLedger(model)
    with ledger:
        work()
    return ledger.peak.nbytes


def main(
    *,
    defense: Annotated[str, ImmunizeSettings.presets] = "repnoise",
    layers: int = 6,
    hidden: int = 128,
    vocabulary: int = 1024,
    batch: int = 4,
    tokens: int = 128,
    rounds: int = 3,
):
    model = initialized(LlamaShape(vocabulary, hidden, hidden * 8 // 3 // 8 * 8, layers, 4, tokens, 0, 1), seed=0)
    few, many = (pairs_of(vocabulary, tokens, count * batch) for count in (2, EVERY + 1))
    peaks = {
        "plain": peak_of(one := copy.deepcopy(model), lambda: plain_steps(one, few, batch)),
        "defense": peak_of(other := copy.deepcopy(model), lambda: defense_steps(other, few, batch, defense)),
    }
    times: dict[str, list[float]] = {"plain": [], "defense": []}
    for _ in range(rounds):
        fresh = [copy.deepcopy(model) for _ in range(3)]
        times["plain"].append(2 * seconds(partial(plain_steps, fresh[0], many[batch:], batch)))
        long = seconds(partial(defense_steps, fresh[1], many, batch, defense))
        times["defense"].append(long - seconds(partial(defense_steps, fresh[2], many[:batch], batch, defense)))
    return {
        "weights": sum(value.numel() for value in model.parameters()),
        "peak_bytes": peaks,
        "memory_ratio": round(peaks["defense"] / peaks["plain"], 4),
        "seconds": times,
        "time_ratio": median_ratio(times, "defense", "plain"),
    }
