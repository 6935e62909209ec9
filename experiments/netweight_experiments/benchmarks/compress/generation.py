"""Generation of a real language model on the CPU: dense, compressed, and in the fixed-length form, in one process.

MODEL is a folder of transformers, such as `netweight_experiments.benchmarks.language.models` makes. The three models
take turns, and every ratio is of processor time within one turn, so that what else the machine does weighs less. All
must generate the same tokens.

    python -m netweight_experiments.benchmarks compress.generation MODEL --threads 2
"""

from __future__ import annotations

import statistics
import time
from typing import Any

PROMPT = "def fibonacci(n):"
"""What every sequence begins with."""


def main(model: str, /, threads: int = 1, batches: tuple[int, ...] = (1, 8), tokens: int = 16, turns: int = 5) -> Any:
    """Generate with the three forms in turns and return their speed as a ratio to the dense model's."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    import netweight

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(model)
    models = {name: AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval() for name in FORMS}
    netweight.compress_(models["codec"], prefer="memory")
    netweight.compress_(models["fixed"], prefer="speed")
    footprints = {name: netweight.memory_footprint(each) for name, each in models.items()}
    results = {}
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
        ratios = {
            name: [dense / own for dense, own in zip(seconds["dense"][1:], seconds[name][1:], strict=True)]
            for name in ("codec", "fixed")
        }
        results[f"batch {batch}"] = {
            "tokens equal": all(torch.equal(answers["dense"], each) for each in answers.values()),
            "dense ms a step": 1e3 * statistics.median(seconds["dense"][1:]) / tokens,
            **{f"{name}, speed / dense": {"median": statistics.median(own), "least": min(own), "most": max(own)}
               for name, own in ratios.items()},
        }  # fmt: skip
    return {"threads": threads, "tokens": tokens, "turns": turns, "footprints": footprints, "batches": results}


FORMS = ("dense", "codec", "fixed")
