"""A module's parameters as one flat vector and back, differentiably. Hypernetworks, methods and attacks call it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from netweight.errors import NameNotFound, UsageError


@final
@dataclass(frozen=True)
class ParameterLayout:
    """Where each named tensor lies within a flat vector."""

    names: tuple[str, ...]  # names of the tensors, in the order of the vector
    shapes: tuple[torch.Size, ...]

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
        """Return the named tensors as views of a vector."""
        # `vector`: shape `(..., size)`; leading dimensions are kept
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
