"""How directions are found from labels, with what held-out models and resampled ones say of them.

`fidelity="reference"` is what the authors' code computes: the pseudo-inverse of the scores times the labels, without
intercept or unit length, and confounders taken out one after another, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor

from netweight.core.seeds import torch_generator
from netweight.errors import UsageError
from netweight.methods.space.directions import Direction, DirectionKind, decorrelated, direction_of
from netweight.methods.space.labels import Column, Labels
from netweight.methods.space.linear import Design, ReadOut, logistic, ridge
from netweight.metrics.prediction import area_under_roc, explained_variance
from netweight.report.finding import Finding

__all__ = ["bootstrap_cosine", "fit_direction"]

_FOLDS = 5


def fit_direction(
    scores: Tensor,
    labels: Labels,
    column: str,
    *,
    kind: Literal["encoder", "decoder", "difference"] = "encoder",
    confounders: Sequence[str] = (),
    fidelity: Literal["corrected", "reference"] = "corrected",
    folds: int = _FOLDS,
    seed: int = 0,
) -> Direction:
    """Find the direction that changes one attribute.

    Args:
        scores: Of the training models, shape `(n, k)`.
        labels: Of the same models. Those of unknown attribute or confounder are left out.
        column: The attribute. Two values make two classes; with more it is continuous.
        kind: See this module's neighbor `directions`. Decoders are ridge regressions of a continuous attribute and
            logistic ones of classes, both classes weighing the same; the penalty is chosen by leaving out one model at
            a time.
        confounders: Attributes that should stay as they are. An encoder regresses on them jointly; others are made
            orthogonal to their decoders by one solve.
        fidelity: "reference" for the numbers of the authors' code, whatever `kind`.
        folds: That held-out models are told apart in: the whole fit, penalty included, is made again without each; 0
            leaves this out.
        seed: Decides on the folds.

    Returns:
        The direction, with the held-out AUC (classes) or R² (continuous) as its finding.

    Raises:
        NameNotFound: There is no such column.
        UsageError: There is one class, too few models are labeled, or scores and labels differ in number.

    Source: weights2weights (arXiv 2406.09413), linear classifiers of attributes; the other kinds are this library's.
    """
    task = _task(scores, labels, column, confounders, 2 if fidelity == "reference" else max(2, folds))
    if fidelity == "reference":
        return _reference(scores, labels, task)
    vector = _solved(task, kind).vector
    findings = [_held_out(task, kind, folds, seed)] if folds else []
    return direction_of(scores, vector, name=column, kind=kind, findings=findings)


def bootstrap_cosine(
    scores: Tensor,
    labels: Labels,
    column: str,
    *,
    kind: Literal["encoder", "decoder", "difference"] = "encoder",
    confounders: Sequence[str] = (),
    resamples: int = 100,
    seed: int = 0,
) -> Finding:
    """Return how far a direction depends on which models happened to be labeled.

    Args:
        scores: Shape `(n, k)`, as for `fit_direction`.
        labels: As for `fit_direction`.
        column: The attribute.
        kind: As for `fit_direction`.
        confounders: As for `fit_direction`.
        resamples: Draws of as many models with replacement; at least 20. The penalty stays as it was chosen.
        seed: Decides on the draws.

    Returns:
        The mean cosine between the direction and those of the draws, with the interval of the middle 95 % of them. It
        tells stability, not truth: a direction that is wrong every time in the same way is stable.

    Raises:
        UsageError: There are fewer than 20 resamples.
    """
    if resamples < 20:
        raise UsageError(f"{resamples} resamples make no interval.", cure="Draw 20 or more.")
    task = _task(scores, labels, column, confounders, 2)
    whole = _solved(task, kind)
    generator = torch_generator(seed, "bootstrap", column)
    found: list[float] = []
    while len(found) < resamples:
        drawn = torch.randint(len(task.values), (len(task.values),), generator=generator)
        again = replace(task, counts=torch.bincount(drawn, minlength=len(task.values)).double())
        if again.varies:
            vector = _solved(again, kind, whole.penalty).vector
            found.append(float(F.cosine_similarity(whole.vector, vector, dim=0)))
    ends = torch.tensor(found).double().quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Finding(
        f"cosine of {column} under resampling",
        sum(found) / len(found),
        ci95=(ends[0], ends[1]),
        n=len(task.values),
        better="higher",
        seeds=(seed,),
        detail={"kind": kind, "resamples": resamples},
    )


@final
@dataclass(frozen=True, eq=False)
class _Task:
    """Models whose attribute and confounders are known.

    Attributes:
        column: The attribute's name.
        scores: Shape `(n, k)`, fp64.
        values: Shape `(n,)`, the attribute; 0 and 1 for classes.
        binary: Whether it has classes.
        others: The confounders' columns of these models.
        counts: How often each model counts, shape `(n,)`.
    """

    column: str
    scores: Tensor
    values: Tensor
    binary: bool
    others: tuple[Column, ...]
    counts: Tensor

    @property
    def varies(self) -> bool:
        """Whether the models that count differ in the attribute and in every confounder."""
        present = self.counts > 0
        columns = [self.values, *(each.values for each in self.others)]
        return all(float(values[present].min()) < float(values[present].max()) for values in columns)

    def part(self, rows: Tensor) -> _Task:
        """Return the task of some of the models."""
        others = tuple(Column(each.name, each.values[rows]) for each in self.others)
        return replace(
            self, scores=self.scores[rows], values=self.values[rows], counts=self.counts[rows], others=others
        )  # fmt: skip


def _task(scores: Tensor, labels: Labels, column: str, confounders: Sequence[str], least: int) -> _Task:
    """Collect what is known, checked."""
    if scores.ndim != 2 or len(scores) != len(labels.names):
        raise UsageError(
            f"Scores of shape {tuple(scores.shape)} came with labels of {len(labels.names)} models.",
            cure="Read the labels with the names of this space.",
        )
    if column in confounders:
        raise UsageError(f"{column!r} cannot be its own confounder.", cure="Leave it out of the confounders.")
    chosen, others = labels[column], [labels[name] for name in dict.fromkeys(confounders)]
    known = torch.stack([each.known for each in (chosen, *others)]).all(0)
    kept = [Column(each.name, each.values[known]) for each in (chosen, *others)]
    for each in kept:
        each.check(least)
    binary = kept[0].kind == "binary"
    values = kept[0].positive.double() if binary else kept[0].values
    ours = scores.detach().cpu().double()[known]
    if not ours.isfinite().all():
        raise UsageError("The scores hold NaN or infinity.", cure="Fit the space again.")
    counts = torch.ones(len(values), dtype=torch.float64)
    return _Task(column, ours, values, binary, tuple(kept[1:]), counts)


@final
@dataclass(frozen=True, eq=False)
class _Solution:
    """A direction's vector, of any length; of a decoder also its penalty, and itself if it is as it was fitted."""

    vector: Tensor
    penalty: float | None = None
    read_out: ReadOut | None = None


def _solved(task: _Task, kind: DirectionKind, penalty: float | None = None) -> _Solution:
    if kind == "encoder":
        return _Solution(_encoder(task, [each.values for each in task.others]))
    if kind == "difference":
        return _Solution(_apart(task, _encoder(task, [])))
    if kind != "decoder":
        raise UsageError(f"There is no kind of direction {kind!r}.", cure="Use encoder, decoder or difference.")
    found = _decoder(Design.of(task.scores), task.values, task.binary, task.counts, penalty)
    return _Solution(_apart(task, found.weights), found.penalty, None if task.others else found)


def _encoder(task: _Task, others: Sequence[Tensor]) -> Tensor:
    """Regress scores on labels, jointly and with an intercept; the first label's row."""
    columns = torch.stack([task.values, *others], 1)
    total = task.counts.sum()
    centered = columns - task.counts @ columns / total
    sides = centered.T @ (task.counts[:, None] * (task.scores - task.counts @ task.scores / total))
    moments = centered.T @ (task.counts[:, None] * centered)
    scale = moments.diagonal().clamp_min(1e-300).rsqrt()
    correlations = moments * scale[:, None] * scale
    if float(torch.linalg.eigvalsh(correlations)[0]) < 1e-10:
        names = ", ".join(repr(each.name) for each in task.others)
        raise UsageError(
            f"The label {task.column!r} is a combination of {names}: they cannot be told apart.",
            cure="Name fewer confounders.",
        )
    found: Tensor = (torch.linalg.solve(correlations, sides * scale[:, None]) * scale[:, None])[0]
    return found


def _decoder(design: Design, values: Tensor, binary: bool, counts: Tensor, penalty: float | None) -> ReadOut:
    if not binary:
        return ridge(design, values, counts, penalty=penalty)
    positive = values > 0
    share = float((counts * values).sum() / counts.sum())
    weights = counts * torch.where(positive, 0.5 / share, 0.5 / (1 - share))
    return logistic(design, positive, weights, penalty=penalty)


def _apart(task: _Task, vector: Tensor) -> Tensor:
    """Make a vector orthogonal to the confounders' decoders."""
    if not task.others:
        return vector
    design, others = Design.of(task.scores), []
    for each in task.others:
        binary = each.kind == "binary"
        values = each.positive.double() if binary else each.values
        weights = _decoder(design, values, binary, task.counts, None).weights
        others.append(direction_of(task.scores, weights, name=each.name, kind="decoder"))
    whole = direction_of(task.scores, vector, name=task.column, kind="decoder")
    return decorrelated(task.scores, whole, others).vector


def _held_out(task: _Task, kind: DirectionKind, folds: int, seed: int) -> Finding:
    """How well models are told apart that the direction has not seen, over folds of about equal classes."""
    told: list[tuple[Tensor, Tensor, float]] = []
    for number in range(folds):
        inside = _fold_of(task, folds, seed) == number
        there, here = task.part((~inside).nonzero()[:, 0]), task.part(inside.nonzero()[:, 0])
        solution = _solved(there, kind)
        told.append((_read(there, here.scores, solution), here.values, float(there.values.mean())))
    about = {"kind": kind, "folds": folds, "confounders": [each.name for each in task.others]}
    if task.binary:
        interval = area_under_roc([(said.numpy(), truth.numpy() > 0) for said, truth, _ in told])
    else:
        baseline = torch.cat([torch.full_like(truth, mean) for _, truth, mean in told])
        interval = explained_variance(
            torch.cat([said for said, _, _ in told]).numpy(),
            torch.cat([truth for _, truth, _ in told]).numpy(),
            baseline.numpy(),
        )
    return Finding(
        f"held-out {'AUC' if task.binary else 'R²'} of {task.column}",
        interval.estimate,
        ci95=interval.ci95,
        n=interval.n,
        better="higher",
        baseline=0.5 if task.binary else 0.0,
        seeds=(seed,),
        detail=about,
    )


def _fold_of(task: _Task, folds: int, seed: int) -> Tensor:
    """The fold of each model: classes, or levels of a continuous attribute, are spread evenly."""
    generator = torch_generator(seed, "folds", task.column)
    shuffled = torch.randperm(len(task.values), generator=generator)
    order = shuffled[task.values[shuffled].argsort(stable=True)]
    if not task.binary:  # neighbors in rank go to different folds, in an order drawn for each group
        draws = torch.rand(-(-len(order) // folds), folds, generator=generator).argsort(1).flatten()[: len(order)]
        return torch.empty_like(order).scatter_(0, order, draws)
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)) % folds)


def _read(task: _Task, scores: Tensor, solution: _Solution) -> Tensor:
    """Read the attribute off other models' places along a vector, on the scale that the task's own models give it."""
    if solution.read_out is not None:
        return solution.read_out(scores)
    vector = solution.vector
    own = task.scores @ vector
    slope = torch.cov(torch.stack([own, task.values]))
    return task.values.mean() + (slope[0, 1] / slope[0, 0]) * (scores @ vector - own.mean())


def _reference(scores: Tensor, labels: Labels, task: _Task) -> Direction:
    """What the authors' code computes, in fp64 rather than bfloat16."""
    missing = len(labels.names) - len(task.values)
    if missing:
        raise UsageError(
            f"{missing} models lack a label, which the reference does not consider.",
            cure="Label them, or leave out fidelity='reference'.",
        )
    inverse = torch.linalg.pinv(scores.double())
    vector = inverse @ labels[task.column].values
    for other in task.others:
        along = inverse @ other.values
        vector = vector - (vector @ along) / (along @ along) * along
    return direction_of(scores, vector, name=task.column, kind="reference")
