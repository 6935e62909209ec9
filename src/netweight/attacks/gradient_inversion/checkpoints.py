"""Checkpoints of searches by gradient matching, from which a search that was killed continues to the same bits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from netweight.job import Job

# Checkpoints of a search: a kill loses at most this share of it.
_CHECKPOINTS = 50
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
# Relative difference of two objectives at one point up to which they count as the same, on other hardware too.
_SAME = 1e-3


@contextmanager
def checkpointed(folder: Path | None, name: str) -> Iterator[Job | None]:
    """Open the job of a search in a folder, whose state is `NAME.safetensors`; None where nothing is to be kept."""
    if folder is None:
        yield None
    else:
        with Job.open(folder, state=f"{name}.safetensors", of="a search") as job:
            yield job


def is_due(step: int, steps: int) -> bool:
    """Return whether a search of so many steps writes a checkpoint after this one, counted from 1."""
    return step == steps or step % max(1, steps // _CHECKPOINTS) == 0


def same_objectives(stored: Sequence[float], present: Sequence[float]) -> bool:
    """Return whether the objectives at the starting points are those of the stored search.

    They differ if the code of the model has changed, which no digest of its weights shows.
    """
    return len(stored) == len(present) and all(
        math.isclose(one, other, rel_tol=_SAME) or (math.isnan(one) and math.isnan(other))
        for one, other in zip(stored, present, strict=True)
    )


def adam_tensors(optimizer: torch.optim.Optimizer, variables: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the variables of a search by Adam and the optimizer's moments, by name."""
    tensors = {f"variable|{number}": variable.detach() for number, variable in enumerate(variables)}
    for number, variable in enumerate(variables):
        tensors |= {f"{kind}|{number}": optimizer.state[variable][kind] for kind in _MOMENTS}
    return tensors


@torch.no_grad()
def restore_adam(optimizer: torch.optim.Optimizer, variables: Sequence[Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Set variables and moments to those that `adam_tensors` returned."""
    for number, variable in enumerate(variables):
        variable.copy_(tensors[f"variable|{number}"])
        moments = {kind: tensors[f"{kind}|{number}"] for kind in _MOMENTS}
        # Adam counts its steps on the CPU.
        optimizer.state[variable] = {
            kind: value if kind == "step" else value.to(variable) for kind, value in moments.items()
        }


def lbfgs_state(optimizer: torch.optim.LBFGS, variables: Sequence[Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the state of a search by L-BFGS: its numbers as JSON values, and its tensors by name."""
    tensors = {f"variable|{number}": variable.detach() for number, variable in enumerate(variables)}
    numbers: dict[str, Any] = {}
    for name, value in optimizer.state[variables[0]].items():
        # This value is computed again in every step before it is read.
        if name == "al":
            continue
        if isinstance(value, list):
            numbers[name] = len(value)
            tensors |= {f"{name}|{place}": each for place, each in enumerate(value)}
        elif isinstance(value, Tensor):
            tensors[name] = value
        else:
            numbers[name] = value
    return numbers, tensors


@torch.no_grad()
def restore_lbfgs(
    optimizer: torch.optim.LBFGS, variables: Sequence[Tensor], numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Set variables and state to those that `lbfgs_state` returned."""
    for number, variable in enumerate(variables):
        variable.copy_(tensors[f"variable|{number}"])
    state = optimizer.state[variables[0]]
    state.update({name: value.to(variables[0]) for name, value in tensors.items() if "|" not in name})
    for name, value in numbers.items():
        lists = f"{name}|0" in tensors or name in ("old_dirs", "old_stps", "ro")
        state[name] = [tensors[f"{name}|{place}"].to(variables[0]) for place in range(value)] if lists else value
