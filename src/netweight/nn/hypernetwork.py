"""The hypernetwork: a client's embedding in, all parameters of another network out. Methods and attacks call it."""

from __future__ import annotations

import itertools
from typing import cast, final

import torch
from torch import Tensor, nn

from netweight.errors import UsageError


@final
class Hypernetwork(nn.Module):
    """A multilayer perceptron with one linear head per generated tensor, `θ = W m + b`, `m = trunk(v)`."""

    # Source: HyperFL (arXiv 2412.07187) section 4.2: embedding 64, one hidden layer of 128.
    # `generated`: number of generated values P, at least 1 (`ParameterLayout.size`)
    # `hidden`: width of each hidden layer of the trunk, each followed by ReLU; at least one

    def __init__(self, generated: int, *, embedding: int = 64, hidden: tuple[int, ...] = (128,)) -> None:
        super().__init__()
        if generated < 1 or embedding < 1 or not hidden or min(hidden) < 1:
            raise UsageError(f"A hypernetwork cannot have sizes {embedding}, {hidden}, {generated}.")
        widths = (embedding, *hidden)
        self.trunk = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.heads = nn.Linear(widths[-1], generated)

    def hidden_code(self, embedding: Tensor) -> Tensor:
        """Return m, what the heads see: shape `(..., H)` for embeddings of shape `(..., E)`."""
        code = embedding
        for layer in self.trunk:
            code = torch.relu(layer(code))
        return code

    def forward(self, embedding: Tensor) -> Tensor:
        """Return the generated vectors, shape `(..., P)`, for embeddings of shape `(..., E)`."""
        return cast(Tensor, self.heads(self.hidden_code(embedding)))
