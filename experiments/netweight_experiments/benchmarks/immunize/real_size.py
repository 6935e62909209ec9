"""Memory and time of a defense on a real chat model of half a billion weights, against plain training.

    python -m netweight_experiments.benchmarks immunize.real_size MODEL --threads 2

MODEL is the folder that `netweight_experiments.benchmarks.language.models` makes. Rows are innocuous and of one length:
4 pairs of 128 tokens a step. Every training runs in a process of its own, whose largest resident memory is reported.
The time of a step is the processor time of a training of three steps less that of one step, over two, so that other
work on the machine does not count; a plain step is a step of safety training (one side, the same optimizer). Every
training that ended is kept in the result, and a second call measures what is missing. The targets: at most 9 GB, and at
most 1.6 times two plain steps.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RUNS = [(defense, steps) for defense in ("safety-training", "repnoise", "gradient-ascent") for steps in (1, 3)]


def train(model: str, defense: str, steps: int, threads: int) -> dict[str, Any]:
    """Train so many steps of a defense in this process; return seconds and the largest resident memory."""
    import torch

    from netweight.data.tokens import AnswerPair
    from netweight.hf.load_language_model import load_causal_lm
    from netweight.methods.immunize.settings import TrainingSettings
    from netweight.methods.immunize.train import immunize

    torch.set_num_threads(threads)
    network, _ = load_causal_lm(Path(model))
    drawn = torch.randint(1000, 50_000, (4 * steps, 3, 64), generator=torch.Generator().manual_seed(0)).tolist()
    pairs = [AnswerPair(*map(tuple, row)) for row in drawn]
    settings = TrainingSettings(batch_size=4, lr=1e-6, measure_every=1000, warmup=0.0)
    begun, processor = time.perf_counter(), time.process_time()
    immunize(network, pairs, defense=defense, settings=settings)
    seconds, processor = time.perf_counter() - begun, time.process_time() - processor
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    times = {"seconds": round(seconds, 2), "processor_seconds": round(processor, 2)}
    return {**times, "resident_bytes": peak, "dtype": str(network.dtype)}


def main(model: Path, /, *, output: Path, threads: int = 2) -> Iterator[dict[str, Any]]:
    """Measure what an earlier run has not."""
    measured: dict[str, Any] = json.loads(output.read_text()).get("trainings", {}) if output.exists() else {}
    for defense, steps in RUNS:
        name = f"{defense}, {steps} steps"
        if name not in measured:
            arguments = (str(model), defense, steps, threads)
            call = f"import json; from {__name__} import train; print(json.dumps(train(*{arguments!r})))"
            made = subprocess.run([sys.executable, "-c", call], stdout=subprocess.PIPE, text=True, check=True)
            measured[name] = json.loads(made.stdout.splitlines()[-1])
        yield {"trainings": measured, **_summary(measured)}


def _processor(measured: dict[str, Any], defense: str, steps: int) -> float:
    return float(measured[f"{defense}, {steps} steps"]["processor_seconds"])


def _summary(measured: dict[str, Any]) -> dict[str, Any]:
    steps = {
        defense: (_processor(measured, defense, 3) - _processor(measured, defense, 1)) / 2
        for defense, _ in RUNS
        if f"{defense}, 3 steps" in measured
    }
    plain = steps.get("safety-training")
    return {
        "processor_seconds_per_step": steps,
        "step_against_two_plain_steps": {name: value / (2 * plain) for name, value in steps.items() if plain},
        "resident_gb": {name: run["resident_bytes"] / 1e9 for name, run in measured.items()},
    }


def page(result: dict[str, Any]) -> str:
    """Return what the page on immunization says of a result."""
    ratios, resident = result["step_against_two_plain_steps"], result["resident_gb"]
    lines = [
        "| training | processor time of a step, divided by that of two plain steps | largest resident memory |",
        "|---|---|---|",
    ]
    for name, ratio in ratios.items():
        memory = max(value for run, value in resident.items() if run.startswith(f"{name},"))
        lines.append(f"| `{name}` | {ratio:.2f} | {memory:.1f} GB |")
    return "\n".join(lines)
