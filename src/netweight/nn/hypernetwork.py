"""A module's parameters as one flat vector and back, and the hypernetwork that makes such vectors of embeddings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from netweight.errors import NameNotFound, UsageError


@final
@dataclass(frozen=True)
class ParameterLayout:
    """Positions of named tensors within a flat vector."""

    names: tuple[str, ...]
    """Names of the tensors, in the order of the vector."""
    shapes: tuple[torch.Size, ...]
    """Their shapes."""

    @classmethod
    def of(cls, source: nn.Module | Mapping[str, Tensor]) -> ParameterLayout:
        """Return the layout of a module's parameters, or of a mapping's tensors, in their order."""
        named = dict(source.named_parameters()) if isinstance(source, nn.Module) else dict(source)
        return cls(tuple(named), tuple(tensor.shape for tensor in named.values()))

    @property
    def sizes(self) -> list[int]:
        """Number of values of each tensor."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def size(self) -> int:
        """Number of values of the vector."""
        return sum(self.sizes)

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the named tensors as views of a vector.

        Args:
            vector: Shape `(..., size)`; leading dimensions are kept.
        """
        if vector.shape[-1] != self.size:
            raise UsageError(f"A vector of {vector.shape[-1]} values was given; the layout has {self.size}.")
        parts = torch.split(vector, self.sizes, dim=-1)
        shapes = (vector.shape[:-1] + shape for shape in self.shapes)
        return {name: part.view(shape) for name, part, shape in zip(self.names, parts, shapes, strict=True)}

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the tensors as one vector, shape `(size,)`; other names in the mapping are left out."""
        for name, shape in zip(self.names, self.shapes, strict=True):
            if name not in tensors:
                raise NameNotFound(f"The tensor {name!r} is missing.", cure=f"Give all of: {', '.join(self.names)}.")
            if tensors[name].shape != shape:
                raise UsageError(f"The tensor {name!r} has shape {tuple(tensors[name].shape)}, not {tuple(shape)}.")
        return torch.cat([tensors[name].reshape(-1) for name in self.names])


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
        return hidden_code(dict(self.named_parameters()), embedding)

    def forward(self, embedding: Tensor) -> Tensor:
        """Return the generated vectors, shape `(..., P)`, for embeddings of shape `(..., E)`."""
        return cast(Tensor, self.heads(self.hidden_code(embedding)))


def hidden_code(state: Mapping[str, Tensor], embedding: Tensor) -> Tensor:
    """Return what the trunk of a hypernetwork makes of embeddings, shape `(..., E)`, given its tensors by name."""
    code, layer = embedding, 0
    while f"trunk.{layer}.weight" in state:
        code = torch.relu(F.linear(code, state[f"trunk.{layer}.weight"], state[f"trunk.{layer}.bias"]))
        layer += 1
    return code
