"""Value neurons switched off row by row: every row of a batch may be another trial of the same prompt.

Keys and values of a prompt depend on its text alone. They are computed once and handed to every row, so that a trial
costs the rest of the network only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from netweight.methods.forget.layers import ValueLayer, text_values
from netweight.probe.diffusion import Text

__all__ = ["RowMasks", "row_masks"]


@final
class RowMasks:
    """What is multiplied with values while a block of `row_masks` lasts.

    Attributes:
        factors: For each masked layer, shape `(rows, width)`; a layer without any is as it is.
    """

    def __init__(self) -> None:
        self.factors: dict[str, Tensor] = {}


@contextmanager
def row_masks(denoiser: nn.Module, layers: Mapping[str, ValueLayer], text: Text) -> Iterator[RowMasks]:
    """Prepare trials of one prompt.

    Args:
        denoiser: The network; in the block it must be run with this prompt alone, in every row.
        layers: Of which neurons may be switched off.
        text: One prompt, as often as wanted later: only the first row is looked at.

    Yields:
        Where factors are set before each run.
    """
    masks = RowMasks()
    values = text_values(denoiser, layers, text.rows([0]))
    replaced: list[tuple[Any, Any]] = []
    try:
        for name, layer in layers.items():
            _replace(replaced, layer.module, _masked(name, values[name], masks))
        yield masks
    finally:
        for module, before in replaced:
            if before is None:
                del module.forward
            else:
                module.forward = before


def _replace(replaced: list[tuple[Any, Any]], module: Any, forward: Any) -> None:
    """Put another forward before a module's own, and remember what was there."""
    replaced.append((module, vars(module).get("forward")))
    module.forward = forward


def _masked(name: str, value: Tensor, masks: RowMasks) -> Any:
    def forward(states: Tensor, *_: Any, **__: Any) -> Tensor:
        rows = value.expand(len(states), -1, -1)
        factors = masks.factors.get(name)
        return rows if factors is None else rows * factors[:, None].to(rows)

    return forward


def factors_of(layers: Mapping[str, ValueLayer], blocked: list[dict[str, set[int]]]) -> dict[str, Tensor]:
    """Write sets of blocked neurons as factors.

    Args:
        layers: All layers.
        blocked: For each row, neurons by layer.

    Returns:
        For each layer that any row blocks something of, shape `(rows, width)`, 0 or 1.
    """
    factors: dict[str, Tensor] = {}
    for row, sets in enumerate(blocked):
        for name, indices in sets.items():
            if indices:
                if name not in factors:
                    factors[name] = torch.ones(len(blocked), layers[name].width)
                factors[name][row, list(indices)] = 0
    return factors
