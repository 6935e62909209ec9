"""Speed of the generation that attacks and audits use, against `transformers.generate`, and whether answers agree.

    python -m netweight_experiments.benchmarks language.generation MODEL --output RESULT

MODEL is a folder of a decoder language model. Prompts of different lengths are answered greedily in one batch that is
padded on the left, with a key-value cache: by `generate_answers`, and by `generate` of transformers. Both are timed in
turns in one process, so that other work on the machine affects both alike. In a second measurement one prompt is
longer than the model's sliding window, if it has one. Its answers are compared with those to each prompt alone, which
need no padding; in bf16 two nearly equal logits may change their order. Every measurement is written as soon as it is
made, and a second call makes those that are missing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from netweight.hf.generate_answers import generate_answers
from netweight.hf.load_language_model import context_of, load_causal_lm
from netweight_experiments.benchmarks.language.models import beginning, description
from netweight_experiments.benchmarks.language.questions import ordinary
from netweight_experiments.benchmarks.script import fill

_SHORTEST = 8  # tokens of the shortest prompt


def _prompts(tokenizer: Any, lengths: Sequence[int]) -> list[list[int]]:
    """Return prompts of these lengths, each the beginning of ordinary questions in a row of its own."""
    questions = ordinary()
    prompts = []
    for row, length in enumerate(lengths):
        ids: list[int] = []
        while len(ids) < length:
            ids += tokenizer(questions[(row + len(ids)) % len(questions)], add_special_tokens=False)["input_ids"]
        prompts.append([*beginning(tokenizer), *ids][:length])
    return prompts


def _by_transformers(model: Any, prompts: Sequence[Sequence[int]], new_tokens: int, pad: int) -> list[list[int]]:
    from transformers import GenerationConfig

    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, pad_token_id=pad)
    own, model.generation_config = model.generation_config, config
    try:
        with torch.no_grad():
            made = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    finally:
        model.generation_config = own
    return [row[longest:].tolist() for row in made]


def _speed(model: Any, tokenizer: Any, *, batch: int, tokens: int, turns: int) -> dict[str, Any]:
    prompts = _prompts(tokenizer, [_SHORTEST + 2 * row for row in range(batch)])
    pad = tokenizer.pad_token_id
    ways: dict[str, Callable[[], list[list[int]]]] = {
        "netweight": lambda: generate_answers(model, prompts, new_tokens=tokens, pad_id=pad),
        "transformers": lambda: _by_transformers(model, prompts, tokens, pad),
    }
    answers = {name: way() for name, way in ways.items()}  # also warms up
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, way in ways.items():
            started = time.process_time()
            way()
            seconds[name].append(time.process_time() - started)
    speeds = {name: [batch * tokens / each for each in values] for name, values in seconds.items()}
    ratios = [own / other for own, other in zip(speeds["netweight"], speeds["transformers"], strict=True)]
    return {
        "tokens equal": answers["netweight"] == answers["transformers"],
        "tokens per processor second": {name: statistics.median(values) for name, values in speeds.items()},
        "speed / transformers": {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)},
    }


def _window(model: Any, tokenizer: Any, *, tokens: int) -> dict[str, Any]:
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    longest = min((window or 32) + 16, context_of(model, tokenizer) - tokens)
    prompts = _prompts(tokenizer, [longest, _SHORTEST, longest // 2])
    pad = tokenizer.pad_token_id
    together = generate_answers(model, prompts, new_tokens=tokens, pad_id=pad)
    alone = [_by_transformers(model, [prompt], tokens, pad)[0] for prompt in prompts]
    same = [a == b for one, other in zip(together, alone, strict=True) for a, b in zip(one, other, strict=True)]
    return {
        "sliding window": window, "prompt tokens": [len(prompt) for prompt in prompts], "answers": len(prompts),
        "answers equal": sum(one == other for one, other in zip(together, alone, strict=True)),
        "tokens equal": sum(same), "tokens": len(same),
    }  # fmt: skip


def main(
    model: Path, /, *, output: Path, threads: int = 2, batch: int = 8, tokens: int = 32, turns: int = 3
) -> Iterator[dict[str, Any]]:
    """Measure what an earlier run has not: speed in batches, and agreement where prompts exceed the window."""
    network, tokenizer = load_causal_lm(model)
    cells: list[tuple[str, Callable[[], Any]]] = [
        ("speed", lambda: _speed(network, tokenizer, batch=batch, tokens=tokens, turns=turns)),
        ("window", lambda: _window(network, tokenizer, tokens=min(tokens, 8))),
    ]
    for measured in fill(output, "measured", cells):
        yield {"model": description(model), "vocabulary": network.config.get_text_config().vocab_size, **measured}


def page(result: dict[str, Any]) -> str:
    """Return what a page says of a result, as far as it was measured."""
    measured, options = result["measured"], result["options"]
    sentences = []
    if (speed := measured.get("speed")) is not None:
        ratio = speed["speed / transformers"]
        sentences.append(
            f"On {result['model']}, `generate_answers` generates at {ratio['median']:.2f} times the speed of "
            f"`transformers.generate` with a cache ({ratio['least']:.2f} to {ratio['most']:.2f} in {options['turns']} "
            f"turns; batches of {options['batch']} prompts, {options['tokens']} new tokens, processor time), and "
            f"{'all' if speed['tokens equal'] else 'not all'} tokens are equal."
        )
    if (window := measured.get("window")) is not None:
        has = f"one of them longer than the sliding window of {window['sliding window']} tokens, "
        sentences.append(
            f"In a batch of {window['answers']} prompts of different lengths, "
            f"{has if window['sliding window'] else ''}{window['tokens equal']} of {window['tokens']} tokens are those "
            "that each prompt gets alone."
        )
    return " ".join(sentences)
