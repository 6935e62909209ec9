"""Single clients out of a sum over clients: what secure aggregation does not hide when heads are linear.

The sum of the clients' changes is `Σ gᵢ mᵢᵀ`. Codes of different clients are different keys: with more hidden units
than clients and the codes known, each gᵢ is solved for. A client's code follows from its embedding, which one round
without secure aggregation gives away. A malicious server needs no such round: a trunk of thresholds along one direction
makes codes that the sum's columns can be told apart by.
"""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from netweight.attacks.gradient_inversion.analytic import heads_gradient
from netweight.attacks.gradient_inversion.client import Tensors
from netweight.attacks.gradient_inversion.matching import Block
from netweight.core import seeds
from netweight.errors import UsageError


def separate_clients(before: Tensors, after: Tensors, codes: Tensor, *, lr: float, weight_decay: float = 0.0) -> Tensor:
    """Return each client's gradient from the sum or average of their updates."""
    weight, bias = heads_gradient(before, after, lr=lr, weight_decay=weight_decay)
    if codes.ndim != 2 or codes.shape[1] != weight.shape[1] or len(codes) > weight.shape[1] + 1:
        raise UsageError(f"Codes of shape {tuple(codes.shape)} do not separate a sum over {weight.shape[1]} units.")
    keys = torch.cat([codes.double(), torch.ones(len(codes), 1, dtype=torch.float64)], dim=1)
    opened: Tensor = torch.cat([weight, bias[:, None]], dim=1) @ torch.linalg.pinv(keys)
    return opened.T


def threshold_trunk(state: Tensors, *, seed: int) -> dict[str, Tensor]:
    """Return a state whose trunk makes hidden unit j the part of `u · v` above the j-th of H thresholds."""
    # The thresholds are quantiles of the standard normal distribution, from which embeddings are drawn. The heads stay
    # honest, so no check of generated weights sees anything.
    if any(name.endswith("trunk.1.weight") for name in state):
        raise UsageError("Thresholds are written into trunks of one layer; this one has more.")
    malicious = {name: tensor.detach().clone() for name, tensor in state.items()}
    for name, tensor in malicious.items():
        if name.endswith("trunk.0.weight"):
            direction = torch.randn(tensor.shape[1], generator=seeds.torch_generator(seed, "direction"))
            tensor.copy_((direction / direction.norm()).expand_as(tensor))
        elif name.endswith("trunk.0.bias"):
            tensor.copy_(-_thresholds(len(tensor)))
    return malicious


def read_thresholds(before: Tensors, after: Tensors, *, lr: float, weight_decay: float = 0.0) -> Tensor:
    """What the clients between neighboring thresholds sent, `(H - 2, P)`: single gradients where there is one."""
    # A unit's column of the sum is `Σ gᵢ max(u · vᵢ - tⱼ, 0)`, piecewise linear in tⱼ with a bend at every client. So
    # second differences are zero but at the clients. A client between two thresholds bends two of them, both in its
    # direction.
    columns = heads_gradient(before, after, lr=lr, weight_decay=weight_decay)[0].T
    slopes = (columns[:-1] - columns[1:]) / _thresholds(len(columns)).double().diff()[:, None]
    return slopes[:-1] - slopes[1:]


def _thresholds(count: int) -> Tensor:
    quantiles: Tensor = torch.special.ndtri((torch.arange(count) + 0.5) / count)
    return quantiles


@final
class Peel:
    """A block with known weights and a known gradient, ready to be undone for one image."""

    def __init__(
        self, block: Block, weight: Tensor, bias: Tensor, gradient: Tensor, size: tuple[int, int, int]
    ) -> None:
        # size: shape `(c, h, w)` of the input
        self.block, self.weight, self.bias, self.size = block, weight, bias, size  # weight: shape `(C, c, k, k)`
        channels, self.kernel = weight.shape[1], weight.shape[-1]
        self.unknowns = size[0] * size[1] * size[2]
        basis = torch.eye(self.unknowns, dtype=weight.dtype, device=weight.device).view(-1, *size)
        full = self._convolve(basis)
        self.full = full.shape[1:]
        self.response = self._windows(full)
        plane = basis[: size[1] * size[2], :1]
        self.patches = F.unfold(plane, self.kernel, padding=block.padding, stride=block.stride)
        self.wanted = gradient.view(len(weight), channels, -1).permute(0, 2, 1).reshape(-1, channels)

    @property
    def out(self) -> tuple[int, int, int]:
        """Shape of the output."""
        _, channels, height, width, _ = self.response.shape
        return channels, height, width

    def _convolve(self, inputs: Tensor) -> Tensor:
        return F.conv2d(inputs, self.weight, stride=self.block.stride, padding=self.block.padding)

    def _windows(self, maps: Tensor) -> Tensor:
        """Cut `(n, C, H, W)` into pooling windows, `(n, C, h, w, pool²)`; what no window covers is dropped."""
        n, c, height, width = maps.shape
        p, h, w = self.block.pool, height // self.block.pool, width // self.block.pool
        cut = maps[..., : h * p, : w * p].reshape(n, c, h, p, w, p)
        return cut.permute(0, 1, 2, 4, 3, 5).reshape(n, c, h, w, p * p)

    def _spread(self, windows: Tensor) -> Tensor:
        """The reverse of `_windows` for one image: `(C, h, w, pool²)` to `(C, H, W)`, zero where nothing is."""
        c, h, w, _ = windows.shape
        p = self.block.pool
        maps = windows.new_zeros(self.full)
        maps[..., : h * p, : w * p] = windows.view(c, h, w, p, p).permute(0, 1, 3, 2, 4).reshape(c, h * p, w * p)
        return maps

    def winners(self, inputs: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return how likely each value of a window is its greatest, and the values pooled with these weights."""
        values = self._windows(self._convolve(inputs[None]))[0] + self.bias.view(-1, 1, 1, 1)
        if temperature > 0:
            shares = torch.softmax(values / (temperature * values.std()), dim=-1)
        else:
            shares = F.one_hot(values.argmax(-1), values.shape[-1]).to(values)
        return shares, (values * shares).sum(-1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the block's output, `(C, h, w)`."""
        pooled = self.winners(inputs, 0)[1]
        return pooled * self.slopes(pooled)

    def slopes(self, pooled: Tensor) -> Tensor:
        """Return the activation's slope at each pooled value."""
        return torch.where(pooled > 0, 1.0, self.block.slope).to(pooled)

    def delta(self, shares: Tensor, cotangent: Tensor) -> Tensor:
        """Return the gradient by the convolution's result, `(C, H, W)`, given that by the pooled values."""
        return self._spread(cotangent[..., None] * shares)

    def pull(self, delta: Tensor) -> Tensor:
        """Return the gradient by the block's input."""
        block, short = self.block, 2 * self.block.padding - self.kernel
        missed = [
            size - (reached - 1) * block.stride + short
            for size, reached in zip(self.size[1:], delta.shape[1:], strict=True)
        ]
        return F.conv_transpose2d(
            delta[None], self.weight, stride=block.stride, padding=block.padding, output_padding=missed
        )[0]

    def gradient_rows(self, delta: Tensor) -> Tensor:
        """Return the convolution's gradient as rows over one input channel: `(h·w, C·k²)`, the same for each."""
        return torch.einsum("cp,ikp->ick", delta.flatten(1), self.patches).flatten(1)

    def misfit(self, inputs: Tensor, delta: Tensor) -> float:
        """Return how far the gradient is from the wanted one, relative to it."""
        rows = self.gradient_rows(delta)
        found = rows.T @ inputs.reshape(self.size[0], -1).T
        return float((found - self.wanted).norm() / self.wanted.norm())

    def output_equations(
        self, inputs: Tensor, temperature: float, target: Tensor, *, activated: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return `A` and `y` of the equations `Aᵀ inputs = y` of the block's output, and the winners held still."""
        # Both are divided by the norm of the target, so that least squares count relative errors.
        shares, pooled = self.winners(inputs, temperature)
        scale = self.slopes(pooled) if activated else torch.ones_like(pooled)
        rows = torch.einsum("icabk,cabk->icab", self.response, shares * scale[..., None]).flatten(1)
        rest = (target - self.bias.view(-1, 1, 1) * scale).flatten()
        if not activated and self.block.slope == 0:  # below zero, ReLU has kept nothing to compare with
            seen = (target > 0).flatten()
            rows, rest = rows[:, seen], rest[seen]
        return rows / target.norm(), rest / target.norm(), shares

    def solve(
        self, expected: Tensor, temperature: float, target: Tensor, cotangent: Tensor, *, activated: bool, weight: float
    ) -> Tensor:
        """Return the input by the equations of the output and of the convolution's gradient, near the expected one."""
        # The gradient's equations are the same for every input channel, so their matrix is small and inverted first;
        # the output's come in as a change of low rank (Woodbury), which takes a fifth of the time of one large system.
        rows, rest, shares = self.output_equations(expected, temperature, target, activated=activated)
        steps = self.gradient_rows(self.delta(shares, cotangent)) / self.wanted.norm()
        block = steps @ steps.T
        pull = weight * (rows.square().sum() / self.unknowns + block.diagonal().mean())
        block.diagonal().add_(pull)
        factor, channels = torch.linalg.cholesky(block), self.size[0]

        def undo(values: Tensor) -> Tensor:
            """Divide by the gradient's part of the matrix, one channel like another."""
            columns = values.view(channels, len(block), -1).transpose(0, 1).reshape(len(block), -1)
            solved = torch.cholesky_solve(columns, factor).view(len(block), channels, -1)
            return solved.transpose(0, 1).reshape(values.shape)

        right = rows @ rest + pull * expected.flatten()
        right = right + (steps @ (self.wanted / self.wanted.norm())).T.reshape(-1)
        first, spread = undo(right), undo(rows)
        small = rows.T @ spread
        small.diagonal().add_(1)
        correction: Tensor = torch.linalg.solve(small, rows.T @ first)
        return (first - spread @ correction).view(expected.shape)


def solve_in_box(
    matrix: Tensor, right: Tensor, start: Tensor, low: Tensor, high: Tensor, *, rounds: int = 12
) -> Tensor:
    """Minimize `½ xᵀMx - rᵀx` with `low ≤ x ≤ high`: values at a bound are held and the others solved, in turns."""
    found, free = start, torch.ones_like(start, dtype=torch.bool)
    for _ in range(rounds):
        held = right[free] - matrix[free][:, ~free] @ found[~free]
        found = found.clone()
        found[free] = torch.linalg.solve(matrix[free][:, free], held)
        found = found.clamp(low, high)
        slope = matrix @ found - right
        now_free = ~(((found <= low) & (slope > 0)) | ((found >= high) & (slope < 0)))
        if bool((now_free == free).all()) or not bool(now_free.any()):
            break
        free = now_free
    return found
