"""Generation of a real language model on the CPU: dense, compressed, and in the fixed-length form, in one process.

    make bench-generation MODEL=FOLDER

MODEL is a folder of transformers, such as `netweight_experiments.benchmarks.language.models` makes. The three models
take turns, and every ratio is of processor time within one turn, so that what else the machine does weighs less. All
must generate the same tokens. README.md and docs/compress.md take their figures from the result file by `make figures`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Annotated, Any

PROMPT = "def fibonacci(n):"
"""What every sequence begins with."""
FORMS = ("dense", "codec", "fixed")
"""The forms of the weights that take turns."""


def main(
    model: str,
    /,
    *,
    cores: Annotated[tuple[int, ...], "numbers of threads, one after the other"] = (1, 2),
    batches: Annotated[tuple[int, ...], "sequences at once"] = (1, 8),
    tokens: Annotated[int, "generated for each sequence"] = 16,
    turns: Annotated[int, "of the three models, after one that is not counted"] = 5,
) -> Iterator[dict[str, Any]]:
    """Generate with the three forms in turns; yield their speeds as ratios to the dense model's after each setting."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    import netweight

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model)
    models = {name: AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval() for name in FORMS}
    netweight.compress_(models["codec"], prefer="memory")
    netweight.compress_(models["fixed"], prefer="speed")
    footprints = {name: netweight.memory_footprint(each) for name, each in models.items()}
    results: dict[str, Any] = {}
    for threads in cores:
        torch.set_num_threads(threads)
        for batch in batches:
            inputs = tokenizer([PROMPT] * batch, return_tensors="pt")
            seconds: dict[str, list[float]] = {name: [] for name in FORMS}
            answers = {}
            for _ in range(turns + 1):
                for name, each in models.items():
                    start = time.process_time()
                    with torch.inference_mode():
                        answers[name] = each.generate(
                            **inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
                        )
                    seconds[name].append(time.process_time() - start)
            results[f"batch {batch}, threads {threads}"] = {
                "tokens equal": all(torch.equal(answers["dense"], each) for each in answers.values()),
                "dense ms a step": 1e3 * statistics.median(seconds["dense"][1:]) / tokens,
                **{f"{name}, speed / dense": _ratios(seconds, name) for name in ("codec", "fixed")},
            }
            yield {"tokens": tokens, "turns": turns, "footprints": footprints, "settings": results}


def _ratios(seconds: dict[str, list[float]], name: str) -> dict[str, float]:
    """Speed over the dense model's, turn by turn, the first left out."""
    own = [dense / each for dense, each in zip(seconds["dense"][1:], seconds[name][1:], strict=True)]
    return {"median": statistics.median(own), "least": min(own), "most": max(own)}
