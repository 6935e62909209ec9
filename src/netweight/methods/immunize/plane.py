"""The plane in which representations differ most: their first principal components."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from netweight.core.lazy import library
from netweight.errors import UsageError


@final
@dataclass(frozen=True)
class PrincipalPlane:
    """The directions along which representations differ most, to draw others in too: fit before, place after."""

    center: Tensor
    """Mean of what was fitted, shape `(D,)`."""
    axes: Tensor
    """Orthonormal, the longest first, shape `(k, D)`; of either sign the one whose largest entry is positive."""
    shares: Tensor
    """Share of the variance along each axis, shape `(k,)`."""

    @classmethod
    def fit(cls, points: Tensor, *, axes: int = 2) -> PrincipalPlane:
        """Find the principal components."""
        if not 1 <= axes <= min(points.shape):
            raise UsageError(f"{axes} axes cannot be drawn through points of shape {tuple(points.shape)}.")
        decomposition = library("sklearn.decomposition", "Principal components", "evidence")
        pca = decomposition.PCA(axes, svd_solver="full").fit(points.double().numpy())
        center, directions = torch.from_numpy(pca.mean_), torch.from_numpy(pca.components_)
        largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
        # The shares are 0 / 0 where all points are the same.
        shares = torch.from_numpy(pca.explained_variance_ratio_).nan_to_num()
        return cls(center, directions * largest.sign(), shares)

    def place(self, points: Tensor) -> Tensor:
        """Coordinates of points, shape `(n, k)`, float64."""
        return (points.double() - self.center) @ self.axes.T
