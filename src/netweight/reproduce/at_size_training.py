"""NeuZip's table 1 at the paper's size: peak memory and speed of three ways to train, on random weights and tokens.

Losses are compared between the ways, never with the paper's: the text is random. `train` is one run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from netweight.core.seeds import torch_generator
from netweight.report.finding import Column, Finding
from netweight.reproduce.at_size import PAPER, SEED, Run, chosen_device, random_model, synchronize
from netweight.reproduce.registry import Measured, Row
from netweight.reproduce.training_ways import COMPRESSED, LOMO, WAYS, arrange, differing_steps

if TYPE_CHECKING:
    import torch

__all__ = ["measured_training", "train"]

_GIB = 1 << 30
_TARGET_PEAK, _TARGET_SPEED = 15.2, 0.85  # of Llama-3 8B on an H200


def train(run: Run) -> dict[str, Any]:
    """Train a few updates by plain SGD with non-reentrant activation checkpointing, as the reference code does.

    Args:
        run: What to train and how.

    Returns:
        losses (hexadecimal), seconds of every update but the first, peak (bytes of tensors on the GPU; on a CPU as the
        tensor ledger counts them), weights (their number); or missing: why it did not run.
    """
    import torch

    extent, device = run.extent, chosen_device(run.device)
    try:
        model: Any = random_model(run.shape, extent, device)
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.train()
        optimizer = arrange(run.way, model, torch.optim.SGD, lr=0.1)
        with _Peak(device, model, optimizer) as peak:
            steps = [_step(model, optimizer, extent.batch, extent.window, number) for number in range(extent.updates)]
    except torch.OutOfMemoryError as error:
        return {"missing": f"out of memory: {str(error).splitlines()[0]}"}
    return {
        "weights": sum(parameter.numel() for parameter in model.parameters()),
        "losses": [loss.hex() for loss, _ in steps],
        "seconds": [seconds for _, seconds in steps[1:]],
        "peak": peak.nbytes,
    }


class _Peak:
    """The most bytes of tensors that a device held within the block."""

    def __init__(self, device: torch.device, model: Any, optimizer: Any) -> None:
        self.device = device
        self.nbytes = 0
        self._ledger: Any = None
        if device.type != "cuda":
            from netweight.metrics.memory import TensorLedger

            self._ledger = TensorLedger(model, optimizer)

    def __enter__(self) -> _Peak:
        import torch

        if self._ledger is not None:
            self._ledger.__enter__()
        else:
            torch.cuda.reset_peak_memory_stats(self.device)
        return self

    def __exit__(self, *raised: Any) -> None:
        import torch

        if self._ledger is not None:
            self._ledger.__exit__(*raised)
            self.nbytes = self._ledger.peak.nbytes
        else:
            self.nbytes = torch.cuda.max_memory_allocated(self.device)


def _step(model: Any, optimizer: Any, batch: int, window: int, number: int) -> tuple[float, float]:
    """One update; its loss, and its seconds between two looks at an idle device."""
    import time

    import torch

    device = next(model.parameters()).device
    generator = torch_generator(SEED, "tokens", number)
    ids = torch.randint(model.config.vocab_size, (batch, window), generator=generator).to(device)
    synchronize(device)
    started = time.perf_counter()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    synchronize(device)
    return float(loss.detach()), time.perf_counter() - started


def measured_training(found: Mapping[Run, Mapping[str, Any]]) -> Measured:
    """Lay runs out as table 1 without its losses.

    Args:
        found: What `train` returned, by run.
    """
    shapes = list(dict.fromkeys(run.shape for run in found))
    columns: list[Column] = []
    rows: dict[str, list[Any]] = {way: [] for way in WAYS}
    findings: list[Finding] = []
    for shape in shapes:
        columns += [Column(f"{shape} memory", "GiB", "lower"), Column(f"{shape} speed", "iterations/s", "higher")]
        of = {run.way: value for run, value in found.items() if run.shape == shape and "missing" not in value}
        for way in WAYS:
            value = of.get(way)
            rows[way] += [value["peak"] / _GIB, 1 / median(value["seconds"])] if value else [None, None]
        findings += _findings(shape, of)
    missing = [
        f"{run.shape}, {run.way} was not measured: {value['missing']}."
        for run, value in found.items()
        if "missing" in value
    ]
    return Measured(
        columns=tuple(columns),
        rows=tuple(Row(way, tuple(values)) for way, values in rows.items()),
        differs=(
            "Weights and tokens are random, so that losses say nothing; a few updates of 8 windows of 1,024 tokens.",
            "Speed is by a clock that waits for the device; the paper's does not.",
        ),
        findings=tuple(findings),
        notes=("Memory is the peak of allocated bytes, as in the paper's code.", *missing),
    )


def _findings(shape: str, of: Mapping[str, Mapping[str, Any]]) -> Sequence[Finding]:
    if COMPRESSED not in of:
        return ()
    compressed, targets = of[COMPRESSED], shape == PAPER.shapes[0]
    findings = [
        Finding(
            f"{shape}, compressed: peak memory",
            compressed["peak"] / _GIB,
            unit="GiB",
            better="lower",
            target=_TARGET_PEAK if targets else None,
            n=1,
            seeds=(SEED,),
        )
    ]
    if LOMO in of:
        dense = of[LOMO]
        ratio = median(dense["seconds"]) / median(compressed["seconds"])
        findings += [
            Finding(
                f"{shape}, compressed against {LOMO}: iterations per second",
                ratio,
                better="higher",
                target=_TARGET_SPEED if targets else None,
                n=len(compressed["seconds"]),
                seeds=(SEED,),
            ),
            Finding(
                f"{shape}, compressed against {LOMO}: updates whose loss differs",
                differing_steps(compressed["losses"], dense["losses"]),
                target=0,
                n=len(dense["losses"]),
                seeds=(SEED,),
            ),
        ]
    return findings
