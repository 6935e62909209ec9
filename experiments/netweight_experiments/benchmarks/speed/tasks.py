"""Tasks that `checkouts` times in two source trees: a program of its own, which imports that tree's netweight.

It reads names of tasks from standard input, one a line, and answers each with the seconds that one call took. Only
public names are used, and from `tests/support` the toys that both trees have.
"""

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

Calls = Callable[[], Any]
_GENERATOR = torch.Generator().manual_seed(0)


def _weights() -> torch.Tensor:
    return (0.02 * torch.randn(4096, 2048, generator=_GENERATOR)).bfloat16()


def encode() -> Calls:
    """Compress 16 MiB of bf16 weights."""
    import netweight.codec

    return partial(netweight.codec.encode, _weights())


def decode() -> Calls:
    """Decompress 16 MiB of bf16 weights, 50 times."""
    import netweight.codec

    blob = netweight.codec.encode(_weights())

    def run() -> None:
        for _ in range(50):
            netweight.codec.decode(blob)

    return run


def _llama(width: int, layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=512, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=256,
    ))  # fmt: skip


def forward() -> Calls:
    """Run a compressed Llama of 4 blocks, width 512, on one sequence of 64 tokens."""
    import netweight

    model = _llama(512, 4).bfloat16().eval()
    netweight.compress_(model)
    tokens = torch.arange(64)[None]

    def run() -> None:
        with torch.no_grad():
            model(input_ids=tokens)

    return run


def federated_round() -> Calls:
    """Train one HyperFL round of 4 clients with 100 pictures each, in one thread."""
    from netweight.methods.federate import ClientData, Federation, HyperFL, LocalTraining, Task, train

    def data() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(100, 1, 12, 12, generator=_GENERATOR), torch.randint(4, (100,), generator=_GENERATOR)

    torch.manual_seed(0)
    body = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 5), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(512, 32), torch.nn.ReLU()
    )
    task = Task(body, torch.nn.Linear(32, 4), [ClientData(data(), data()) for _ in range(4)])
    method = HyperFL(training=LocalTraining(epochs=2, batch_size=20))
    return partial(train, task, method, Federation(rounds=1), workers=1)


def localization() -> Calls:
    """Find the neurons of one prompt of a model with planted memorization."""
    from planted_diffusion import Planted

    from netweight.methods.forget.detect import Threshold
    from netweight.methods.forget.layers import measure_statistics
    from netweight.methods.forget.localize import localize_prompt

    model = Planted(5, neurons=40)
    statistics = measure_statistics(model, [f"ordinary {number}" for number in range(40)])
    return partial(localize_prompt, model, "prompt 0", statistics, Threshold(0.3, "given"))


def space_fit() -> Calls:
    """Fit a space to 128 adapters of two matrices, 320 × 320."""
    from spaces_under_test import bank_of, random_adapters

    from netweight.methods.space.space import WeightSpace

    shapes = {"unet.mid.to_q": (320, 320), "unet.mid.to_v": (320, 320)}
    return partial(WeightSpace.fit, bank_of(random_adapters(128, dtype=torch.float32, shapes=shapes)))


def defense_steps() -> Calls:
    """Train 4 steps of RepNoise on a Llama of 2 blocks, width 128, 8 pairs of 40 tokens each."""
    import copy

    from netweight.data.tokens import AnswerPair
    from netweight.methods.immunize import TrainingSettings, immunize

    model, row = _llama(128, 2), partial(torch.randint, 512, generator=_GENERATOR)
    tokens = [[tuple(row((size,)).tolist()) for size in (20, 20, 20)] for _ in range(32)]
    pairs = [AnswerPair(prompt, chosen, rejected) for prompt, chosen, rejected in tokens]

    def run() -> None:
        immunize(copy.deepcopy(model), pairs, settings=TrainingSettings(batch_size=8, seed=0))

    return run


TASKS: dict[str, Callable[[], Calls]] = {
    task.__name__: task for task in (encode, decode, forward, federated_round, localization, space_fit, defense_steps)
}


def serve() -> None:
    """Answer names with seconds until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print does not mix with the answers
    torch.set_num_threads(1)
    import netweight

    here = Path(sys.argv[1]).resolve()
    if not Path(netweight.__file__).resolve().is_relative_to(here):
        raise SystemExit(f"netweight comes from {netweight.__file__}, not from {here}.")
    ready: dict[str, Calls] = {}
    for line in sys.stdin:
        name = line.strip()
        if name not in ready:
            ready[name] = TASKS[name]()
            ready[name]()  # the first call imports and compiles
        began = time.perf_counter()
        ready[name]()
        print(time.perf_counter() - began, file=answers)


if __name__ == "__main__":
    serve()
