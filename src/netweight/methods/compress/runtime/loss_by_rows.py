"""The loss of a large vocabulary by blocks of rows of the head, none of which exists whole: neither head nor gradient.

Where a `LayerwiseOptimizer` updates the head by tiles, a block of its rows is decoded, multiplied and dropped; twice,
since the gradients need the sum of all logits' exponentials first. The head's gradient is the product of the logits'
gradient and the head's inputs, of which the update asks for some rows at a time. What exists whole are the logits, in
the dtype of the head: of 512 tokens they take half a head of width 1,024, and nothing is calculated twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import torch
import torch.nn.functional as F
from torch.autograd import Function

from netweight.errors import UsageError
from netweight.methods.compress.runtime.gradient_parts import Collector, collector_of, placeholder
from netweight.methods.compress.runtime.storage import fill
from netweight.methods.compress.runtime.tensor import CompressedTensor

_NUMBERS = 1 << 22  # of the head in a block


def collector_for(weight: torch.Tensor, tokens: int) -> Collector | None:
    """The collector of the head's gradient, if its loss is to be calculated by blocks of rows.

    That is so if the head is updated by tiles, can be decoded by rows, and takes no less memory than the logits of so
    many tokens.
    """
    if isinstance(weight, CompressedTensor) and weight.stored.fixed:
        return None
    return collector_of(weight) if weight.requires_grad and tokens <= weight.shape[1] else None


@final
class LossByRows(Function):
    """The sum of the cross-entropies of all tokens, with the gradient of the head's inputs ready."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        ignored: int,
        dtype: torch.dtype,
        collector: Collector,
    ) -> torch.Tensor:
        inputs, blocks = hidden.detach().to(dtype), _blocks(weight)
        has_loss = labels != ignored
        places = labels.where(has_loss, 0)
        logits: list[torch.Tensor] = []
        own = torch.zeros(len(hidden), 1)
        with torch.autocast("cpu", enabled=False):
            for first, last in blocks:
                added = None if bias is None else bias.detach()[first:last].to(dtype)
                block = F.linear(inputs, _rows(weight, first, last).to(dtype), added)
                inside = ((places >= first) & (places < last))[:, None]
                own += block.gather(1, (places - first).clamp(0, last - first - 1)[:, None]).float().where(inside, 0)
                logits.append(block)
            sums = torch.stack([block.float().logsumexp(1) for block in logits], 1).logsumexp(1, keepdim=True)
            to_hidden = torch.zeros(hidden.shape)
            to_bias = None if bias is None else torch.zeros(len(bias))
            for (first, last), block in zip(blocks, logits, strict=True):
                # The gradients of the tokens' losses are the probabilities, minus 1 at the label.
                slopes = block.float().sub_(sums).exp_()
                inside = ((places >= first) & (places < last))[:, None]
                at = (places - first).clamp(0, last - first - 1)[:, None]
                slopes.scatter_add_(1, at, inside.float().neg_())
                slopes *= has_loss[:, None]
                if to_bias is not None:
                    to_bias[first:last] = slopes.sum(0)
                block.copy_(slopes)
                to_hidden += block @ _rows(weight, first, last).to(dtype)
        ctx.rest = weight, hidden.dtype, None if bias is None else bias.dtype, collector
        ctx.gradients = to_hidden, logits, inputs, to_bias
        return (sums - own)[:, 0].where(has_loss, 0).sum()

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise UsageError(
                "The backward pass of a chunked loss can run only once, because its gradients are used up.",
                cure="Call the model again, or train without chunk_loss.",
            )
        to_hidden, slopes, inputs, to_bias = gradients
        weight, dtype, dtype_of_bias, collector = ctx.rest
        to_hidden *= slope
        part = ProductPart(slopes, inputs, slope, weight, finite=bool(torch.isfinite(to_hidden).all()))
        to_weight = placeholder(weight, part, collector)
        if to_weight is None:
            to_weight = part.whole()
        to_bias = None if to_bias is None else to_bias.mul_(slope).to(dtype_of_bias)
        return to_hidden.to(dtype), to_weight, to_bias, None, None, None, None


@final
class ProductPart:
    """The gradient of a head: a product of the logits' gradient and the head's inputs, calculated when asked for.

    Args:
        slopes: The gradient of the logits, in blocks of columns, of shapes (tokens, rows of the block).
        inputs: The head's inputs, of shape (tokens, width).
        scale: A factor of the gradient, a number.
        weight: The head's weight.
        finite: False if a number of `slopes` may be NaN or infinite.
    """

    def __init__(
        self,
        slopes: Sequence[torch.Tensor],
        inputs: torch.Tensor,
        scale: torch.Tensor,
        weight: torch.Tensor,
        *,
        finite: bool,
    ) -> None:
        self._slopes, self._inputs, self._scale, self._finite = slopes, inputs, scale, finite
        self._shape, self._dtype = weight.shape, weight.dtype
        self._blocks = _blocks(weight)
        # The number and the gradient of the block that was requested last.
        self._last: tuple[int, torch.Tensor] | None = None

    def numbers(self, first: int, last: int) -> torch.Tensor | None:
        """Numbers `first` to `last`."""
        tiles = []
        for at, (start, stop) in enumerate(self._blocks):
            begin, end = start * self._shape[1], stop * self._shape[1]
            if begin < last and end > first:
                tiles.append(self._block(at)[max(first, begin) - begin : min(last, end) - begin])
        return tiles[0] if len(tiles) == 1 else torch.cat(tiles)

    def _block(self, at: int) -> torch.Tensor:
        if self._last is None or self._last[0] != at:
            # The memory of the last block is free for the next one.
            self._last = None
            product = (self._slopes[at].t() @ self._inputs).to(self._dtype)
            self._last = at, product.mul_(self._scale).view(-1)
        return self._last[1]

    def whole(self) -> torch.Tensor:
        """The gradient as a tensor."""
        return torch.cat([self._block(at) for at in range(len(self._blocks))]).view(self._shape)

    def is_finite(self) -> bool:
        """Return whether every number is finite."""
        largest = float(self._inputs.abs().max()) * abs(float(self._scale)) if self._inputs.numel() else 0.0
        if self._finite and math.isfinite(largest):
            # A probability less a label is at most 1, so that no sum is larger than this.
            if largest * len(self._inputs) < torch.finfo(self._dtype).max / 2:
                return True
            return all(bool(torch.isfinite(self._block(at)).all()) for at in range(len(self._blocks)))
        return False

    def zero_chunks(self, chunk: int) -> float:
        """Return None, because every token changes every row."""
        return 0.0


def _blocks(weight: torch.Tensor) -> list[tuple[int, int]]:
    """First and last row (exclusive) of each block."""
    rows, step = weight.shape[0], max(1, _NUMBERS // weight.shape[1])
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]


def _rows(weight: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Rows of a weight on the CPU, dense, of which nothing else is decoded."""
    if not isinstance(weight, CompressedTensor):
        return weight.detach()[first:last]
    width = weight.shape[1]
    out = torch.empty(last - first, width, dtype=weight.dtype)
    return fill(out, weight.payload, first * width, last * width, threads=torch.get_num_threads())
