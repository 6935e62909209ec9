"""Whether sampled points spread as the training models do, without copying them: arrays in, findings out.

Works on scores and on what readers say of the images of points; `audit` puts both under one name.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from netweight.core.seeds import numpy_generator
from netweight.errors import UsageError
from netweight.methods.space.neighbors import nearest_distances
from netweight.report.finding import Finding

__all__ = ["SPREAD_TARGET", "neighbor_findings", "spread_findings"]

SPREAD_TARGET = 0.9
"""Least standard deviation of samples' attributes, as a share of that of the training models."""

_RESAMPLES = 500
_NEIGHBORHOOD = 3  # as in the paper of precision and recall


def spread_findings(
    samples: Tensor, training: Tensor, names: Sequence[str], *, seed: int = 0, what: str = "attribute"
) -> list[Finding]:
    """Return how far samples spread, as shares of how far the training models do.

    Args:
        samples: Attributes of samples, read from their images, shape `(b, a)`, b at least 5.
        training: Attributes of training models, read in the same way, shape `(n, a)`, n at least 5.
        names: Of the attributes.
        seed: Of the bootstrap, which draws samples and training models anew.
        what: What the columns are.

    Returns:
        The mean ratio of standard deviations over attributes, with the target, and one ratio per attribute.

    Raises:
        UsageError: There are too few, or an attribute of the training models does not vary.
    """
    ours, theirs = _checked(samples, training, names)
    ratios = _ratios(ours, theirs)
    generator = numpy_generator(seed, "spread")
    drawn = torch.stack(
        [
            _ratios(*(part[generator.integers(0, len(part), len(part))] for part in (ours, theirs)))
            for _ in range(_RESAMPLES)
        ]
    )
    limits = torch.tensor([0.025, 0.975], dtype=torch.float64)
    each, mean = drawn.nanquantile(limits, 0).T.tolist(), drawn.mean(1).nanquantile(limits).tolist()
    about = {"training models": len(theirs), "least": float(ratios.min()), "least of": names[int(ratios.argmin())]}
    return [
        Finding(
            f"{what} spread of samples against training, mean",
            float(ratios.mean()),
            ci95=(mean[0], mean[1]),
            n=len(ours),
            better="higher",
            target=SPREAD_TARGET,
            seeds=(seed,),
            detail=about,
        ),
        *(
            Finding(f"spread of {name}", float(ratio), ci95=(low, high), n=len(ours), seeds=(seed,))
            for name, ratio, (low, high) in zip(names, ratios, each, strict=True)
        ),
    ]


def neighbor_findings(samples: Tensor, training: Tensor) -> list[Finding]:
    """Return whether samples lie where training models lie, reach all of them, and are not copies of them.

    Args:
        samples: Scores (or other features) of samples, shape `(b, k)`, b at least 5.
        training: Those of the training models, shape `(n, k)`, n at least 5.

    Returns:
        Distance to the nearest training model over that between training models (medians); copies, nearer to a training
        model than half of what lies between training models in the median; precision, the share of samples within the
        neighborhood of a training model; recall, the share of training models within that of a sample.

    Raises:
        UsageError: Most training models have a twin.

    Source: precision and recall of Kynkäänniemi et al. 2019, with the third neighbor.
    """
    ours, theirs = _checked(samples, training, None)
    own = nearest_distances(theirs)
    middle = float(own.median())
    near = nearest_distances(ours, theirs)
    if not middle > 0:
        raise UsageError("Most training models have a twin: distances tell nothing.", cure="Take the copies out.")
    precision = _within(ours, theirs)
    recall = _within(theirs, ours)
    return [
        Finding("distance to the nearest training model, relative", float(near.median()) / middle, n=len(ours),
                baseline=1.0, detail={"between training models": middle}),
        Finding("samples that copy a training model", float((near < middle / 2).double().mean()), n=len(ours),
                better="lower", baseline=float((own < middle / 2).double().mean())),
        Finding("precision of samples", precision, n=len(ours), better="higher"),
        Finding("recall of samples", recall, n=len(theirs), better="higher"),
    ]  # fmt: skip


def _within(points: Tensor, others: Tensor) -> float:
    """Share of points that lie within the neighborhood of one of the others."""
    reach = nearest_distances(others, rank=min(_NEIGHBORHOOD, len(others) - 1))
    inside = [
        (torch.cdist(part, others, compute_mode="donot_use_mm_for_euclid_dist") <= reach).any(1)
        for part in torch.split(points, 1024)
    ]
    return float(torch.cat(inside).double().mean())


def _ratios(samples: Tensor, training: Tensor) -> Tensor:
    return samples.std(0) / training.std(0)


def _checked(samples: Tensor, training: Tensor, names: Sequence[str] | None) -> tuple[Tensor, Tensor]:
    ours, theirs = samples.detach().double().cpu(), training.detach().double().cpu()
    wrong = ours.ndim != 2 or theirs.ndim != 2 or ours.shape[1:] != theirs.shape[1:] or min(len(ours), len(theirs)) < 5
    if wrong or (names is not None and len(names) != ours.shape[1]):
        raise UsageError(
            f"Samples of shape {tuple(ours.shape)} cannot be held against training models of {tuple(theirs.shape)}.",
            cure="Give at least 5 of each, with the same columns, and a name for each.",
        )
    if not (ours.isfinite().all() and theirs.isfinite().all()):
        raise UsageError("Samples or training models hold NaN or infinity.")
    if names is not None and not (theirs.std(0) > 0).all():
        still = names[int((theirs.std(0) > 0).int().argmin())]
        raise UsageError(f"The training models do not differ in {still!r}.", cure="Leave it out.")
    return ours, theirs
