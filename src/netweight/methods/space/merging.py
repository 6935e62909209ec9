"""Merges of adapters: weighted sums, and sums of trimmed changes, with weights that may differ by module."""

# Source: TIES (arXiv 2306.01708) and DARE (2311.03099), on the changes themselves, not on their factors.

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from netweight.core.names import Select
from netweight.core.seeds import torch_generator
from netweight.errors import UsageError
from netweight.methods.space.settings import MergeSettings
from netweight.nn.lora import Adapter, LowRank, side_by_side


def merged(adapters: Sequence[Adapter], how: MergeSettings) -> Iterator[tuple[str, LowRank]]:
    """Merge adapters, module by module.

    Args:
        adapters: At least one; a module that some of them lack is not changed by these.
        how: Method, weights and density.

    Returns:
        Modules with their changes: exact in factors for a weighted sum, else of full rank.

    Raises:
        UsageError: There are more or fewer weights than adapters, or a module has two shapes.
        NameNotFound: A pattern of blocks matches no module.
    """
    names = sorted({name for adapter in adapters for name in adapter.factors})
    weights = _weights(names, len(adapters), how)
    for name in names:
        summed = side_by_side(name, adapters, weights[name])
        if how.method == "linear":
            yield name, summed
        else:
            parts = [
                (number, one.factors[name].dense(), weights[name][number])
                for number, one in enumerate(adapters)
                if name in one.factors
            ]
            changes = [_trimmed(change.double(), how, name, number) for number, change, _ in parts]
            yield name, LowRank.of(_joined(changes, [weight for _, _, weight in parts], how).float())


def _weights(names: Sequence[str], count: int, how: MergeSettings) -> dict[str, list[float]]:
    """The adapters' weights by module."""
    weights = dict.fromkeys(names, _as_many(list(how.weights) or [1.0] * count, count, "--weight"))
    for pattern, written in how.blocks:
        try:
            values = [float(value) for value in written.split(",")]
        except ValueError as error:
            raise UsageError(f"Weights {written!r} of {pattern!r} are no numbers.", cure="Write 1,0.5.") from error
        weights |= dict.fromkeys(
            Select(pattern).keys(list(names)),
            _as_many(values * count if len(values) == 1 else values, count, "--block"),
        )
    return weights


def _as_many(values: list[float], count: int, option: str) -> list[float]:
    if len(values) != count:
        raise UsageError(f"{count} adapters have {len(values)} weights ({option}).", cure="Give one for each.")
    return values


def _trimmed(change: Tensor, how: MergeSettings, name: str, number: int) -> Tensor:
    """TIES keeps the largest entries; DARE random ones, which it enlarges so that their mean stays."""
    if how.method == "ties":
        kept = max(1, int(how.density * change.numel()))
        flat = torch.zeros(change.numel(), dtype=change.dtype)
        largest = change.abs().flatten().topk(kept).indices
        flat[largest] = change.flatten()[largest]
        return flat.view_as(change)
    draw = torch_generator(how.seed, "dare", name, number)
    return change * (torch.rand(change.shape, generator=draw) < how.density) / how.density


def _joined(changes: Sequence[Tensor], weights: Sequence[float], how: MergeSettings) -> Tensor:
    """A weighted sum; with elected signs, each entry is the mean of those that have the sign of their sum."""
    weighted = torch.stack(list(changes)) * torch.tensor(weights, dtype=torch.float64)[:, None, None]
    if how.method == "dare":
        return weighted.sum(0)
    elected = torch.where(torch.stack(list(changes)).sum(0) >= 0, 1.0, -1.0)
    agreeing = torch.stack(list(changes)).sign() == elected
    return (weighted * agreeing).sum(0) / agreeing.sum(0).clamp_min(1)
