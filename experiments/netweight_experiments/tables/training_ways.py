"""The ways of training that NeuZip's tables compare: plain, layer by layer in the manner of LOMO, and compressed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netweight.errors import NetweightError

if TYPE_CHECKING:
    import torch
    from torch import nn

VANILLA, LOMO, COMPRESSED = "Vanilla", "LOMO", "LOMO + NeuZip lossless"
# Names of rows, as the paper has them.
WAYS = (VANILLA, LOMO, COMPRESSED)


def arrange(
    way: str, model: nn.Module, optimizer_class: type[torch.optim.Optimizer], **options: Any
) -> torch.optim.Optimizer:
    """Make a dense model ready to be trained one way."""
    import netweight

    if way == VANILLA:
        make: Any = optimizer_class
        plain: torch.optim.Optimizer = make(model.parameters(), **options)
        return plain
    if way == COMPRESSED:
        netweight.compress_(model)
    layerwise: torch.optim.Optimizer = netweight.LayerwiseOptimizer(model, optimizer_class, **options)
    return layerwise


def digests(model: nn.Module) -> dict[str, str]:
    """Return the digest of every parameter's bits, decoded if it is compressed."""
    from netweight.core.digest import of_tensor

    return {
        name: of_tensor(tensor.dense() if hasattr(tensor, "dense") else tensor.detach())
        for name, tensor in model.named_parameters()
    }


def differing_steps(one: Sequence[str], other: Sequence[str]) -> int:
    """Count the steps whose loss differs in any bit; a missing step differs."""
    return sum(a != b for a, b in zip(one, other, strict=False)) + abs(len(one) - len(other))


def differing_weights(one: Mapping[str, str], other: Mapping[str, str]) -> int:
    """Count the parameters that differ in any bit; a missing one differs."""
    return sum(one.get(name) != other.get(name) for name in one.keys() | other.keys())


def seconds_in_turns(time_ways: Callable[[Any], Any], given: Any, out: Path) -> dict[str, list[float]]:
    """Seconds per update by way, measured by a function unless an earlier run in this folder has done so."""
    from netweight.core.engines import in_process
    from netweight.core.runs import map_runs

    (result,) = map_runs(time_ways, [given], ledger=out / "speed.jsonl", engine=in_process)
    if not result.ok:
        raise NetweightError(f"Timing failed: {result.error}", cure="Run it again.")
    seconds: dict[str, list[float]] = result.value
    return seconds
