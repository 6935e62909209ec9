"""The space that weights2weights published, `V.pt`, `mean.pt`, `std.pt` and `proj_1000pc.pt`, as a `WeightSpace`."""

# Source: weights2weights (arXiv 2406.09413) and the card of its data: row = (V s) · std + mean, where s are the scores,
# and columns of V are components of rows that were centered and divided by std.

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from netweight.core.digest import of_config
from netweight.errors import CorruptBlob, UsageError
from netweight.methods.space.fitting.basis import RowBasis, RowLayout
from netweight.methods.space.fitting.fit import Accuracy
from netweight.methods.space.settings import FitSettings
from netweight.methods.space.space import WeightSpace
from netweight.nn.pca import Basis, orthonormality
from netweight.store.bank.published import Published, model_names, published_layout, published_tensor

_SCORES = "proj_*pc.pt"
_UNIT = 1e-3  # how far from orthonormal components may be


def published_space(folder: Path, *, components: int | None = None, stable_diffusion: bool = False) -> WeightSpace:
    """Open a published space, without executing anything.

    Args:
        folder: With `V.pt`, `mean.pt`, `std.pt`, `proj_1000pc.pt`, `adapter_config.json` and `weight_dimensions.pt`.
        components: How many to take; by default as many as models have scores of.
        stable_diffusion: Whether to take Stable Diffusion 1's order of weights in place of `weight_dimensions.pt`.

    Returns:
        The space, in the representation "factors"; its models are called `model-000000` and so on.

    Raises:
        UsageError: A file is missing, or shapes contradict each other.
        UnsafeInput: A file holds objects that only its code could make.
        CorruptBlob: A file is damaged, or holds NaN.
    """
    scores_files = sorted(folder.glob(_SCORES))
    if len(scores_files) != 1:
        raise UsageError(f"{folder} holds {len(scores_files)} files {_SCORES}.", cure="It holds the models' scores.")
    vectors, scores = published_tensor(folder / "V.pt"), published_tensor(scores_files[0])
    mean, std = (published_tensor(folder / name).flatten().float() for name in ("mean.pt", "std.pt"))
    length = len(mean)
    if vectors.ndim != 2 or len(vectors) != length or len(std) != length or scores.ndim != 2 or len(scores) < 2:
        raise UsageError(
            f"{folder}: V is {tuple(vectors.shape)}, mean {tuple(mean.shape)}, std {tuple(std.shape)} and "
            f"{scores_files[0].name} {tuple(scores.shape)}: they are not of one space.",
            cure="Fetch the files again.",
        )
    most = min(vectors.shape[1], scores.shape[1])
    count = most if components is None else components
    if not 1 <= count <= most:
        raise UsageError(f"{folder} has scores of {most} components, not of {count}.", cure=f"Ask for 1 to {most}.")
    layout = published_layout(folder / "V.pt", length, stable_diffusion=stable_diffusion)
    order, rows = _in_our_order(layout)
    found = vectors[:, :count].T.float()[:, order].contiguous()
    scores, mean, std = scores[:, :count].float().contiguous(), mean[order], std[order]
    for name, value in (("V.pt", found), (scores_files[0].name, scores), ("mean.pt", mean), ("std.pt", std)):
        if not value.isfinite().all():
            raise CorruptBlob(f"{folder / name} holds NaN or infinity.", cure="Fetch the file again.")
    error = orthonormality(found)
    if error > _UNIT:
        raise CorruptBlob(
            f"{folder / 'V.pt'}: its components are not orthonormal, by {error:.1e}.", cure="Fetch the file again."
        )
    variances = scores.double().var(0)
    total = float(length)  # every number was divided by its deviation
    basis = Basis(mean, std, found, variances, total)
    return WeightSpace(
        tuple(model_names(len(scores))), len(scores), scores, variances.sqrt().float(),
        torch.zeros(len(scores), dtype=torch.float64),  # no adapter is there to be known again
        dict(rows.shapes), RowBasis(rows, basis), FitSettings(components=count, representation="factors"),
        Accuracy("published", min(1.0, float(variances.sum()) / total), error), of_config({"published": str(folder)}),
        {"base": layout.base, "kernels": {}},
    )  # fmt: skip


def _in_our_order(layout: Published) -> tuple[Tensor, RowLayout]:
    """Where each number of our rows stands in a published one, and what our rows are."""
    names = sorted(layout.modules)
    modules = {name: layout.modules[name] for name in names}
    places = [torch.arange(part.start, part.stop) for one in modules.values() for part in (one.down, one.up)]
    order = torch.cat(places)
    ranks = {name: one.rank for name, one in modules.items()}
    scales = {name: one.scale for name, one in modules.items()}
    shapes = {name: one.shape for name, one in modules.items()}
    return order, RowLayout(shapes, ranks, scales)
