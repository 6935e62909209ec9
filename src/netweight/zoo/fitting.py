"""Training of small models on the spot: from a seed, resumable after a kill, stopped when held-out loss stops falling.

Batches are a function of the step alone, so a resumed run sees what an uninterrupted one would have seen. Used by the
tables that need a trained language model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netweight.core.digest import of_config
from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import derive
from netweight.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Fit", "Schedule", "fit"]


@dataclass(frozen=True)
class Schedule:
    """How to train.

    Attributes:
        steps: Most optimizer steps; the learning rate falls to a tenth along a half cosine over all of them.
        learning_rate: AdamW's, after warm-up.
        warmup: Steps over which it rises from 0.
        weight_decay: AdamW's, for matrices; norms and biases decay by nothing.
        check_every: Steps between two looks at the held-out loss, each with a checkpoint.
        patience: Looks in a row without a new best after which training stops.
        seed: Seed of dropout; initialization and batches have their own.
    """

    steps: int
    learning_rate: float = 1e-3
    warmup: int = 100
    weight_decay: float = 0.1
    check_every: int = 100
    patience: int = 4
    seed: int = 0


@dataclass(frozen=True)
class Fit:
    """What training came to; the model holds the weights of the best look.

    Attributes:
        steps: Steps that were made.
        best_step: The step whose weights were kept.
        held_out: Held-out loss there, in nats.
        curve: Step, mean training loss since the look before, held-out loss; one entry per look.
        overfits: Whether held-out loss rose again before the end.
    """

    steps: int
    best_step: int
    held_out: float
    curve: tuple[tuple[int, float, float], ...] = field(repr=False)

    @property
    def overfits(self) -> bool:
        """Whether the last look was worse than the best one."""
        return self.curve[-1][2] > self.held_out

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return asdict(self) | {"overfits": self.overfits}


def fit(
    model: nn.Module,
    batch_of: Callable[[int], Mapping[str, torch.Tensor]],
    held_out: Callable[[nn.Module], float],
    schedule: Schedule,
    folder: Path,
    *,
    progress: Progress = QUIET,
    description: str = "train",
) -> Fit:
    """Train a model of transformers that returns a `loss`, by AdamW in fp32 under bf16 autocast.

    Args:
        model: fp32, freshly initialized; trained in place.
        batch_of: Step → keyword arguments of the model.
        held_out: Model, in evaluation mode → its loss on data that no batch holds.
        schedule: How to train.
        folder: For checkpoints, which are taken up again when they are of the same schedule and removed at the end.
        progress: Where progress is shown.
        description: What the progress bar says.

    Returns:
        What training came to.

    Raises:
        UsageError: The loss became NaN or infinite, or the folder holds the checkpoint of another training.
    """
    import torch

    import netweight

    optimizer = torch.optim.AdamW(_groups(model, schedule.weight_decay), lr=1.0, betas=(0.9, 0.95), fused=True)
    latest, best = folder / "training.safetensors", folder / "best.safetensors"
    state: dict[str, Any] = {"of": of_config(schedule), "step": 0, "curve": [], "losses": 0.0}
    if latest.exists():
        saved = netweight.load_checkpoint(latest, model, optimizer)
        if saved["of"] != state["of"]:
            raise UsageError(
                f"{latest} is of a training by another schedule.", cure="Remove it, or use another folder."
            )
        state = saved
    with progress.task(description, schedule.steps, unit="steps") as task, torch.random.fork_rng(devices=[]):
        task.update(state["step"])
        while state["step"] < schedule.steps and not _finished(state["curve"], schedule):
            state["losses"] += _step(model, optimizer, batch_of(state["step"]), state["step"], schedule)
            state["step"] += 1
            task.update()
            if state["step"] % schedule.check_every == 0 or state["step"] == schedule.steps:
                model.eval()
                _look(state, held_out(model))
                if min(entry[2] for entry in state["curve"]) == state["curve"][-1][2]:
                    netweight.save_checkpoint(best, model)
                netweight.save_checkpoint(latest, model, optimizer, extra=state)
                task.describe(f"{description}, held-out loss {state['curve'][-1][2]:.3f}")
    netweight.load_checkpoint(best, model)
    model.eval()
    curve = tuple((int(step), float(loss), float(out)) for step, loss, out in state["curve"])
    best_step, _, least = min(curve, key=lambda entry: entry[2])
    return Fit(state["step"], best_step, least, curve)


def _groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Mapping[str, torch.Tensor],
    step: int,
    schedule: Schedule,
) -> float:
    import torch

    model.train()
    torch.manual_seed(derive(schedule.seed, "dropout", step))
    for group in optimizer.param_groups:
        group["lr"] = _rate(step, schedule)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    value = float(loss.detach())
    if not math.isfinite(value):
        raise UsageError(f"Training diverged at step {step}.", cure="Choose a lower learning rate.")
    return value


def _rate(step: int, schedule: Schedule) -> float:
    if step < schedule.warmup:
        return schedule.learning_rate * (step + 1) / schedule.warmup
    done = (step - schedule.warmup) / max(schedule.steps - schedule.warmup, 1)
    return schedule.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def _look(state: dict[str, Any], held_out: float) -> None:
    since = state["step"] - (state["curve"][-1][0] if state["curve"] else 0)
    state["curve"].append([state["step"], state["losses"] / since, held_out])
    state["losses"] = 0.0


def _finished(curve: list[list[float]], schedule: Schedule) -> bool:
    looks = [entry[2] for entry in curve]
    return bool(looks) and len(looks) - 1 - looks.index(min(looks)) >= schedule.patience
