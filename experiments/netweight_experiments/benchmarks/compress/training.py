"""Training a real language model on the CPU by AdamW: plain, layer by layer, and compressed; peak memory and speed.

    python -m netweight_experiments.benchmarks compress.training MODEL [--ways WAY …]

MODEL is a folder of transformers. Every way makes a few steps on one sequence of 512 tokens, with activations that are
calculated again. Peaks are of tensors that the process held; speeds are of the processor time of all threads. The ways
are plain (always needed), LOMO, fixed, codec, "plain, chunked loss" and "codec, chunked loss".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from netweight_experiments.benchmarks.compress.gpu_cells import Visit, real_training


def main(model: str, /, *, ways: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
    """Train in every way, or those given; yield peaks and speeds, also as ratios to plain training, after each way."""
    visit = Visit("cpu", dry_run=False, model=model)
    for result in real_training(visit, ways):
        plain = result["plain"]
        for name in result:
            if name == "plain" or not isinstance(result[name], dict):
                continue
            result[name]["peak / plain"] = result[name]["peak bytes"] / plain["peak bytes"]
            result[name]["speed / plain"] = plain["seconds a step"] / result[name]["seconds a step"]
        yield result
