"""Adam with compact states: the first moment in bfloat16, the second of a matrix by its rows and columns.

Adam keeps eight bytes of state for each weight, this two. A model of half a billion weights saves 3 GB.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import final

import torch
from torch import Tensor, nn

from netweight.errors import Unsupported
from netweight.methods.immunize.distributed import ProcessGroup, is_sharded
from netweight.methods.immunize.settings import TrainingSettings

# The decay rates of torch's Adam.
BETAS = (0.9, 0.999)
_EPSILON = 1e-8
# Above this number of weights, states are compact unless the settings choose another form.
_MANY_WEIGHTS = 200_000_000


def compact_states(model: nn.Module, settings: TrainingSettings, group: ProcessGroup) -> bool:
    """Decide whether the optimizer's states of a training are compact, which needs a training in one process.

    Raises:
        Unsupported: They are asked for, and weights are sharded or several processes share the batch.
    """
    trained = sum(value.numel() for value in model.parameters() if value.requires_grad)
    whole_here = not any(map(is_sharded, model.parameters())) and group.size == 1
    if settings.states == "compact" and not whole_here:
        raise Unsupported(
            "Compact states of the optimizer need a training in one process.", cure="Use --set states=full."
        )
    return settings.states == "compact" or (settings.states is None and whole_here and trained > _MANY_WEIGHTS)


@final
class CompactAdam:
    """Adam's update with compact states.

    Source: Kingma and Ba, Adam (arXiv 1412.6980); Shazeer and Stern, Adafactor (arXiv 1804.04235), section 3, for the
    second moment of a matrix: the product of its row means and column means, over the mean of all.

    Args:
        weights: What is stepped, by name, in float32.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = weights
        self.count = 0
        self._states: dict[str, dict[str, Tensor]] = {}

    def _new(self, weight: Tensor) -> dict[str, Tensor]:
        state = {"first": torch.zeros_like(weight, dtype=torch.bfloat16)}
        if weight.dim() < 2:
            return state | {"second": torch.zeros_like(weight, dtype=torch.float32)}
        rows = weight.flatten(1)
        sizes = {"rows": rows.shape[0], "columns": rows.shape[1]}
        return state | {kind: torch.zeros(size, device=weight.device) for kind, size in sizes.items()}

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], rate: float) -> None:
        """Step all weights that have a gradient.

        Args:
            gradients: By the weights' names, of any floating dtype.
            rate: The learning rate.
        """
        self.count += 1
        corrections = [1 - beta**self.count for beta in BETAS]
        for name, gradient in gradients.items():
            weight = self.weights[name]
            state = self._states.setdefault(name, self._new(weight))
            rows = gradient.reshape(len(gradient), -1) if weight.dim() > 1 else gradient.reshape(1, -1)
            # Whole rows at a time: an embedding's temporary copies would be as large as the states that were saved.
            pieces = max(1, rows.numel() // 2**24)
            if weight.dim() > 1:
                by_row, by_column = _mean_squares(rows, pieces)
                state["rows"].lerp_(by_row, 1 - BETAS[1])
                state["columns"].lerp_(by_column, 1 - BETAS[1])
                whole = state["rows"].mean().clamp(min=torch.finfo(torch.float32).tiny)
            else:
                state["second"].lerp_(rows[0].float().square(), 1 - BETAS[1])
            first, target = (each.view(rows.shape) for each in (state["first"], weight.data))
            for part, grads, own, place in zip(
                first.chunk(pieces), rows.chunk(pieces), target.chunk(pieces), _bounds(len(rows), pieces), strict=True
            ):
                moment = part.float().lerp_(grads.float(), 1 - BETAS[0])
                part.copy_(moment)
                if weight.dim() > 1:
                    second = torch.outer(state["rows"][place] / whole, state["columns"])
                else:
                    second = state["second"][None].clone()
                second.div_(corrections[1]).sqrt_().add_(_EPSILON)
                own.addcdiv_(moment, second, value=-rate / corrections[0])

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the states as `kind|name`, for a checkpoint."""
        for name, state in self._states.items():
            for kind, value in state.items():
                yield f"{kind}|{name}", value

    def restore(self, tensors: Mapping[str, Tensor], count: int) -> None:
        """Take the states of a checkpoint, after so many steps; other entries are left alone."""
        self.count, self._states = count, {}
        for name, weight in self.weights.items():
            new = self._new(weight)
            if all(f"{kind}|{name}" in tensors for kind in new):
                self._states[name] = {kind: tensors[f"{kind}|{name}"].to(like) for kind, like in new.items()}


def _bounds(rows: int, pieces: int) -> list[slice]:
    """The rows of each piece, as `torch.chunk` cuts them."""
    size = -(-rows // pieces)
    return [slice(first, min(rows, first + size)) for first in range(0, rows, size)]


def _mean_squares(rows: Tensor, pieces: int) -> tuple[Tensor, Tensor]:
    """The mean square of each row and of each column."""
    by_row, by_column = [], rows.new_zeros(rows.shape[1]).float()
    for part in rows.chunk(pieces):
        square = part.float().square()
        by_row.append(square.mean(1))
        by_column += square.sum(0)
    return torch.cat(by_row), by_column / len(rows)
