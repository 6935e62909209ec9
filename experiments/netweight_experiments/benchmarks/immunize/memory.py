"""What a step of RepNoise costs beside plain fine-tuning, in memory and in time: measured, written as JSON.

    python -m netweight_experiments.benchmarks.immunize.memory

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
import json
import statistics
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from netweight.core.environment import describe
from netweight.data.examples import Pair, collate
from netweight.methods.immunize.settings import ImmunizeSettings, TrainingSettings, named_defense
from netweight.methods.immunize.train import immunize
from netweight.metrics.memory import TensorLedger
from netweight_experiments.benchmarks.script import script, today, write

EVERY = TrainingSettings().measure_every  # steps, of which one measures gradient norms


def decoder(options):
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=options.vocabulary,
            hidden_size=options.hidden,
            intermediate_size=options.hidden * 8 // 3 // 8 * 8,
            num_hidden_layers=options.layers,
            num_attention_heads=4,
            max_position_embeddings=options.tokens,
        )
    )


def pairs_of(options, count):
    """Pairs whose prompts take a quarter of their length."""
    draw = torch.Generator().manual_seed(1)
    prompt = options.tokens // 4
    sizes = (prompt, options.tokens - prompt, options.tokens - prompt)
    return [
        Pair(*(tuple(torch.randint(1, options.vocabulary, (size,), generator=draw).tolist()) for size in sizes))
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


def seconds_of(work):
    started = time.process_time()
    work()
    return time.process_time() - started


def measured(options):
    model, size = decoder(options), options.batch
    few, many = pairs_of(options, 2 * size), pairs_of(options, (EVERY + 1) * size)
    peaks = {
        "plain": peak_of(one := copy.deepcopy(model), lambda: plain_steps(one, few, size)),
        "defense": peak_of(other := copy.deepcopy(model), lambda: defense_steps(other, few, size, options.defense)),
    }
    times = {"plain": [], "defense": []}
    for _ in range(options.rounds):
        fresh = [copy.deepcopy(model) for _ in range(3)]
        times["plain"].append(2 * seconds_of(lambda fresh=fresh: plain_steps(fresh[0], many[size:], size)))
        long = seconds_of(lambda fresh=fresh: defense_steps(fresh[1], many, size, options.defense))
        once = seconds_of(lambda fresh=fresh: defense_steps(fresh[2], many[:size], size, options.defense))
        times["defense"].append(long - once)
    ratios = [ours / plain for ours, plain in zip(times["defense"], times["plain"], strict=True)]
    return {
        "weights": sum(value.numel() for value in model.parameters()),
        "peak_bytes": peaks,
        "memory_ratio": round(peaks["defense"] / peaks["plain"], 4),
        "seconds": times,
        "time_ratio": round(statistics.median(ratios), 4),
    }


def main():
    parser = script(__doc__)
    parser.add_argument("--defense", default="repnoise", choices=list(ImmunizeSettings.presets))
    for name, default in (
        ("layers", 6), ("hidden", 128), ("vocabulary", 1024), ("batch", 4), ("tokens", 128), ("rounds", 3)
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    settings = {name: value for name, value in vars(options).items() if name != "output"}
    result = {"settings": settings, **measured(options), "threads": torch.get_num_threads()}
    print(json.dumps(result, indent=2))
    write(options.output, {"date": today(), **result, "environment": describe()})


if __name__ == "__main__":
    main()
