"""NeuZip's table 1 at the paper's size: peak memory and speed of three ways to train, on random weights and tokens.

Losses are compared between the ways, never with the paper's: the text is random. Torch's kernels are its deterministic
ones: attention going backward has not the same bits twice otherwise.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch

from netweight.core.seeds import torch_generator
from netweight.report.finding import Finding
from netweight_experiments.memory import TensorLedger
from netweight_experiments.tables.neuzip.paper_scale_models import (
    PAPER,
    Found,
    Run,
    by_shape,
    chosen_device,
    let_go,
    random_model,
    synchronize,
)
from netweight_experiments.tables.neuzip.training import (
    COMPRESSED,
    FIXED,
    GIB,
    LOMO,
    SEED,
    WAYS,
    arrange,
    differing_steps,
)
from netweight_experiments.tables.registry import MeasuredTable

_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, float]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-5}),
}
_TARGET_PEAK, _TARGET_SPEED = 15.2, 0.85  # of Llama-3 8B on an H200


def train(run: Run) -> dict[str, Any]:
    """Train a few updates with non-reentrant activation checkpointing, as the reference code does by plain SGD."""
    extent, device = run.extent, chosen_device(run.device)
    let_go(device)
    try:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # what torch asks for with deterministic kernels
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        model: Any = random_model(run.shape, extent, device)
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.train()
        kind, options = _OPTIMIZERS[run.optimizer or "SGD"]
        optimizer = arrange(run.way, model, kind, **options, **_states(run))
        with _Peak(device, model, optimizer) as peak:
            steps = [_step(model, optimizer, extent.batch, extent.window, number) for number in range(extent.updates)]
    except RuntimeError as error:  # out of memory, or a kernel that is not deterministic
        return {"missing": str(error).splitlines()[0].removesuffix(".")}
    finally:
        torch.use_deterministic_algorithms(False)
    return {
        "weights": sum(parameter.numel() for parameter in model.parameters()),
        "losses": [loss.hex() for loss, _ in steps],
        "seconds": [seconds for _, seconds in steps[1:]],
        "peak": peak.nbytes,
    }


def _states(run: Run) -> dict[str, Any]:
    """How states of an optimizer wait: compressed as the weights are."""
    return {"states": "compressed"} if run.optimizer and run.way in (COMPRESSED, FIXED) else {}


class _Peak:
    """The most bytes of tensors that a device held within the block."""

    def __init__(self, device: torch.device, model: Any, optimizer: Any) -> None:
        self.device = device
        self.nbytes = 0
        self._ledger: Any = None
        if device.type != "cuda":
            self._ledger = TensorLedger(model, optimizer)

    def __enter__(self) -> _Peak:
        if self._ledger is not None:
            self._ledger.__enter__()
        else:
            torch.cuda.reset_peak_memory_stats(self.device)
        return self

    def __exit__(self, *raised: Any) -> None:
        if self._ledger is not None:
            self._ledger.__exit__(*raised)
            self.nbytes = self._ledger.peak.nbytes
        else:
            self.nbytes = torch.cuda.max_memory_allocated(self.device)


def _step(model: Any, optimizer: Any, batch: int, window: int, number: int) -> tuple[float, float]:
    """One update; its loss, and its seconds between two looks at an idle device."""
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


def measured_training(found: Found) -> MeasuredTable:
    """Lay runs out as table 1 without its losses."""
    return by_shape(
        found,
        (*WAYS, FIXED),
        lambda value: int(value["peak"]),
        lambda value: value["seconds"],
        lambda shape, of: [one for way in (COMPRESSED, FIXED) if way in of for one in _findings(shape, way, of)],
        differs=(
            "Weights and tokens are random, so that losses say nothing; a few updates of one window of 1,024 tokens.",
            "Speed is by a clock that waits for the device; the paper's does not.",
        ),
        notes=("Memory is the peak of allocated bytes, as in the paper's code.",),
    )


def _findings(shape: str, way: str, of: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    compressed, targets, peak = of[way], shape == PAPER.shapes[0], of[way]["peak"] / GIB
    called = "compressed" if way == COMPRESSED else "fixed length"
    findings = [
        Finding(
            f"{shape}, {called}: peak memory", peak, unit="GiB", better="lower",
            target=_TARGET_PEAK if targets else None, n=1, seeds=(SEED,),
        )
    ]  # fmt: skip
    if LOMO in of:
        dense, what = of[LOMO], f"{shape}, {called} against {LOMO}"
        ratio = median(dense["seconds"]) / median(compressed["seconds"])
        steps = differing_steps(compressed["losses"], dense["losses"])
        findings += [
            Finding(
                f"{what}: iterations per second", ratio, better="higher", target=_TARGET_SPEED if targets else None,
                n=len(compressed["seconds"]), seeds=(SEED,),
            ),
            Finding(f"{what}: updates whose loss differs", steps, target=0, n=len(dense["losses"]), seeds=(SEED,)),
        ]  # fmt: skip
    return findings
