"""The hypernetwork: a client's embedding in, all parameters of another network out. Methods and attacks call it."""

from __future__ import annotations

import itertools
from typing import cast, final

import torch
from torch import Tensor, nn

from netweight.errors import UsageError


@final
class Hypernetwork(nn.Module):
    """A multilayer perceptron with one linear head per generated tensor, `θ = W m + b`, `m = trunk(v)`.

    The heads are stacked into one linear layer, `heads`, in the order of the generated tensors: their inputs are the
    same and torch draws each head's weights from the same range, so the stack is the same network.

    Args:
        generated: Number of generated values P, at least 1 (`ParameterLayout.size`).
        embedding: Length E of an embedding.
        hidden: Width of each hidden layer of the trunk, each followed by ReLU; at least one.

    Raises:
        UsageError: A size is below 1, or there is no hidden layer.

    Source: HyperFL (arXiv 2412.07187) section 4.2: embedding 64, one hidden layer of 128.
    """

    def __init__(self, generated: int, *, embedding: int = 64, hidden: tuple[int, ...] = (128,)) -> None:
        super().__init__()
        if generated < 1 or embedding < 1 or not hidden or min(hidden) < 1:
            raise UsageError(f"A hypernetwork cannot have sizes {embedding}, {hidden}, {generated}.")
        widths = (embedding, *hidden)
        self.trunk = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.heads = nn.Linear(widths[-1], generated)

    def hidden_code(self, embedding: Tensor) -> Tensor:
        """Return m, what the heads see: shape `(..., H)` for embeddings of shape `(..., E)`.

        Args:
            embedding: Of the network's dtype, on its device.
        """
        code = embedding
        for layer in self.trunk:
            code = torch.relu(layer(code))
        return code

    def forward(self, embedding: Tensor) -> Tensor:
        """Return the generated vectors, shape `(..., P)`, for embeddings of shape `(..., E)`.

        Args:
            embedding: Of the network's dtype, on its device.
        """
        return cast(Tensor, self.heads(self.hidden_code(embedding)))
