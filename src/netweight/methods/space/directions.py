"""Directions of attributes: regressions of scores on labels or of labels on scores, with confounders held.

Ridge and logistic regression are solved in the axes that the models span, so more components than models cost nothing;
both penalties are blind to such a rotation, and chosen by leaving out one model at a time. Everything is fp64.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor

from netweight.core.lazy import library
from netweight.core.seeds import torch_generator
from netweight.errors import UsageError
from netweight.methods.space.labels import LabelColumn, Labels
from netweight.methods.space.points import Direction, DirectionKind, scores_digest
from netweight.methods.space.settings import FittedKind
from netweight.metrics.intervals import area_under_roc, explained_variance
from netweight.report.finding import Finding

# Penalties that are tried, the strongest first, as multiples of the mean energy of an axis of the scores.
PENALTIES = tuple(10.0**power for power in range(3, -5, -1))

_LEAST_REST = 1e-6


def fit_direction(
    scores: Tensor,
    labels: Labels,
    column: str,
    *,
    kind: FittedKind = "encoder",
    confounders: Sequence[str] = (),
    fidelity: Literal["corrected", "reference"] = "corrected",
    folds: int = 5,
    seed: int = 0,
) -> Direction:
    """Find the direction that changes one attribute.

    Args:
        scores: Scores of the models, shape `(n, k)`.
        labels: What is known of them, as `read_labels` returns it.
        column: The attribute.
        kind: "encoder" is how scores change with the attribute, "difference" the same without regard to confounders,
            "decoder" how the attribute is predicted from scores.
        confounders: Attributes that should stay as they are.
        fidelity: "reference" computes the numbers of the authors' code.
        folds: Folds of the held-out score in the direction's findings: the whole fit, penalty included, is made again
            without each; 0 for none.
        seed: Seed of the folds.

    Returns:
        The direction, of length 1 unless it is the reference's.

    Raises:
        NameNotFound: There is no such column.
        UsageError: Too few models are labeled, or the attribute is a combination of its confounders.

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
    kind: FittedKind = "encoder",
    confounders: Sequence[str] = (),
    resamples: int = 100,
    seed: int = 0,
) -> Finding:
    """Return the stability of a direction: its mean cosine with the directions of resampled models."""
    # Stability, not truth: a direction that is wrong every time in the same way is stable. The penalty stays as it was
    # chosen.
    if resamples < 20:
        raise UsageError(f"{resamples} resamples are too few for an interval.", cure="Draw 20 or more.")
    task = _task(scores, labels, column, confounders, 2)
    whole = _solved(task, kind)
    generator = torch_generator(seed, "bootstrap", column)
    cosines: list[float] = []
    while len(cosines) < resamples:
        drawn = torch.randint(len(task.values), (len(task.values),), generator=generator)
        again = replace(task, counts=torch.bincount(drawn, minlength=len(task.values)).double())
        if again.varies:
            vector = _solved(again, kind, whole.penalty).vector
            cosines.append(float(F.cosine_similarity(whole.vector, vector, dim=0)))
    return Finding(
        f"cosine of {column} under resampling", sum(cosines) / len(cosines), ci95=middle(cosines), n=len(task.values),
        better="higher", seeds=(seed,), detail={"kind": kind, "resamples": resamples},
    )  # fmt: skip


def direction_of(
    scores: Tensor, vector: Tensor, *, name: str, kind: DirectionKind, findings: Sequence[Finding] = ()
) -> Direction:
    """The direction of a vector `(k,)` of any length, with the spread of the training models `(n, k)` along it."""
    vector = vector.double()
    length = float(vector.norm())
    if not length > 0:
        raise UsageError(f"The direction {name!r} has length 0: the scores do not depend on the label.")
    along = (scores.double() - scores.double().mean(0)) @ (vector / length)
    scaled = vector if kind in ("reference", "corrected") else vector / length
    return Direction(
        name, kind, scaled, float(along.std()), float(along.max()), scores_digest(scores), tuple(findings)
    )  # fmt: skip


def decorrelated(scores: Tensor, direction: Direction, confounders: Sequence[Direction]) -> Direction:
    """Project a direction onto the complement of others, by one solve, so that their order does not matter."""
    if not confounders:
        return direction
    others = torch.stack([each.vector / each.length for each in confounders])
    _, sizes, axes = torch.linalg.svd(others, full_matrices=False)
    # Confounders may be combinations of each other.
    axes = axes[sizes > sizes[0] * 1e-10]
    rest = direction.vector - axes.T @ (axes @ direction.vector)
    # A second projection removes what rounding left.
    rest = rest - axes.T @ (axes @ rest)
    if float(rest.norm()) <= _LEAST_REST * direction.length:
        names = ", ".join(repr(each.name) for each in confounders)
        raise UsageError(
            f"The direction {direction.name!r} is a combination of {names}: without them nothing is left.",
            cure="Name fewer confounders.",
        )
    return direction_of(scores, rest, name=direction.name, kind=direction.kind)


@final
@dataclass(frozen=True, eq=False)
class _LabelledScores:
    """Models whose attribute and confounders are known."""

    column: str
    """Name of the attribute."""
    scores: Tensor
    """Scores of the models, shape `(n, k)`, fp64."""
    values: Tensor
    """Values of the attribute, shape `(n,)`; 0 and 1 for classes."""
    binary: bool
    """True if the attribute is a class."""
    others: tuple[LabelColumn, ...]
    """Columns of the confounders of these models."""
    counts: Tensor
    """Weight of each model in the fit, shape `(n,)`."""

    @property
    def varies(self) -> bool:
        """True if the models that count differ in the attribute and in every confounder."""
        present = self.counts > 0
        columns = [self.values, *(each.values for each in self.others)]
        return all(float(values[present].min()) < float(values[present].max()) for values in columns)

    def part(self, rows: Tensor) -> _LabelledScores:
        """The task of some of the models."""
        others = tuple(LabelColumn(each.name, each.values[rows]) for each in self.others)
        rows_of_fields = {name: getattr(self, name)[rows] for name in ("scores", "values", "counts")}
        return replace(self, others=others, **rows_of_fields)


def _task(scores: Tensor, labels: Labels, column: str, confounders: Sequence[str], least: int) -> _LabelledScores:
    """Collect what is known, checked."""
    if scores.ndim != 2 or len(scores) != len(labels.names):
        raise UsageError(
            f"Scores of shape {tuple(scores.shape)} came with labels of {len(labels.names)} models.",
            cure="Read the labels with the names of this space.",
        )
    if column in confounders:
        raise UsageError(f"{column!r} cannot be its own confounder.", cure="Leave it out of the confounders.")
    chosen, others = labels[column], [labels[name] for name in dict.fromkeys(confounders)]
    labeled = torch.stack([each.known for each in (chosen, *others)]).all(0)
    columns = [LabelColumn(each.name, each.values[labeled]) for each in (chosen, *others)]
    for each in columns:
        each.check(least)
    binary = columns[0].kind == "binary"
    values = columns[0].positive.double() if binary else columns[0].values
    ours = scores.detach().cpu().double()[labeled]
    if not ours.isfinite().all():
        raise UsageError("The scores contain NaN or infinity.", cure="Fit the space again.")
    counts = torch.ones(len(values), dtype=torch.float64)
    return _LabelledScores(column, ours, values, binary, tuple(columns[1:]), counts)


@final
@dataclass(frozen=True, eq=False)
class _Solution:
    """A direction's vector, of any length; of a decoder also its penalty, and itself if it is as it was fitted."""

    vector: Tensor
    penalty: float | None = None
    """Penalty on the sum of squared weights; a logistic regression takes half of it."""
    read_out: ReadOut | None = None


def _solved(task: _LabelledScores, kind: DirectionKind, penalty: float | None = None) -> _Solution:
    if kind == "encoder":
        return _Solution(_encoder(task, [each.values for each in task.others]))
    if kind == "difference":
        return _Solution(_apart(task, _encoder(task, [])))
    if kind != "decoder":
        raise UsageError(f"There is no kind of direction {kind!r}.", cure="Use encoder, decoder or difference.")
    decoder = _decoder(Design.of(task.scores), task.values, task.binary, task.counts, penalty)
    return _Solution(_apart(task, decoder.weights), decoder.penalty, None if task.others else decoder)


def _encoder(task: _LabelledScores, others: Sequence[Tensor]) -> Tensor:
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
            f"The label {task.column!r} is a combination of {names}: they cannot be separated.",
            cure="Name fewer confounders.",
        )
    coefficients: Tensor = (torch.linalg.solve(correlations, sides * scale[:, None]) * scale[:, None])[0]
    return coefficients


def _decoder(design: Design, values: Tensor, binary: bool, counts: Tensor, penalty: float | None) -> ReadOut:
    if not binary:
        return ridge(design, values, counts, penalty=penalty)
    positive = values > 0
    share = float((counts * values).sum() / counts.sum())
    weights = counts * torch.where(positive, 0.5 / share, 0.5 / (1 - share))
    return logistic(design, positive, weights, penalty=penalty)


def _apart(task: _LabelledScores, vector: Tensor) -> Tensor:
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


def _held_out(task: _LabelledScores, kind: DirectionKind, folds: int, seed: int) -> Finding:
    """Return how well the direction predicts held-out models, over folds of about equal classes."""
    said, among = torch.empty_like(task.values), folds_of(task.column, task.values, task.binary, folds, seed)
    for fold in range(folds):
        inside = among == fold
        there, here = task.part((~inside).nonzero()[:, 0]), inside.nonzero()[:, 0]
        said[here] = _read(there, task.scores[here], _solved(there, kind))
    detail = {"kind": kind, "folds": folds, "confounders": [each.name for each in task.others]}
    return held_out_score(task.column, task.values, said, among, binary=task.binary, seed=seed, detail=detail)


def held_out_score(
    what: str, values: Tensor, said: Tensor, among: Tensor, *, binary: bool, seed: int, detail: Mapping[str, Any]
) -> Finding:
    """AUC or R² of what fits to all other folds said of each fold's models; all of shape `(n,)`."""
    parts = [among == fold for fold in range(int(among.max()) + 1)]
    if binary:
        interval = area_under_roc([(said[part].numpy(), values[part].numpy() > 0) for part in parts])
    else:
        baseline = sum(part * values[~part].mean() for part in parts)
        interval = explained_variance(said.numpy(), values.numpy(), torch.as_tensor(baseline).numpy())
    return Finding(
        f"held-out {'AUC' if binary else 'R²'} of {what}", interval.estimate, ci95=interval.ci95, n=interval.n,
        better="higher", baseline=0.5 if binary else 0.0, seeds=(seed,), detail=dict(detail),
    )  # fmt: skip


def folds_of(what: str, values: Tensor, binary: bool, folds: int, seed: int) -> Tensor:
    """The fold of each model: classes, or levels of a continuous attribute, are spread evenly."""
    generator = torch_generator(seed, "folds", what)
    shuffled = torch.randperm(len(values), generator=generator)
    order = shuffled[values[shuffled].argsort(stable=True)]
    # Neighbors in rank are put into different folds, in an order drawn for each group.
    if not binary:
        draws = torch.rand(-(-len(order) // folds), folds, generator=generator).argsort(1).flatten()[: len(order)]
        return torch.empty_like(order).scatter_(0, order, draws)
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)) % folds)


def _read(task: _LabelledScores, scores: Tensor, solution: _Solution) -> Tensor:
    """Read the attribute off other models' places along a vector, on the scale that the task's own models give it."""
    if solution.read_out is not None:
        return solution.read_out(scores)
    vector = solution.vector
    own = task.scores @ vector
    slope = torch.cov(torch.stack([own, task.values]))
    return task.values.mean() + (slope[0, 1] / slope[0, 0]) * (scores @ vector - own.mean())


def _reference(scores: Tensor, labels: Labels, task: _LabelledScores) -> Direction:
    """Compute what the authors' code does, in fp64 rather than bfloat16."""
    missing = len(labels.names) - len(task.values)
    if missing:
        raise UsageError(
            f"{missing} models lack a label, and the reference does not support missing labels.",
            cure="Label them, or leave out fidelity='reference'.",
        )
    inverse = torch.linalg.pinv(scores.double())
    vector = inverse @ labels[task.column].values
    for other in task.others:
        along = inverse @ other.values
        vector = vector - (vector @ along) / (along @ along) * along
    return direction_of(scores, vector, name=task.column, kind="reference")


def middle(values: Sequence[float]) -> tuple[float, float]:
    """The middle 95 % of values."""
    ends = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return float(ends[0]), float(ends[1])


def ridge(design: Design, labels: Tensor, weights: Tensor, *, penalty: float | None = None) -> ReadOut:
    """Regress labels on scores: Σ wᵢ (yᵢ − b₀ − b·sᵢ)² + penalty · |b|².

    `labels`: shape `(n,)`, fp64. `weights`: shape `(n,)`, at least 0; 0 leaves a model out.

    Source: leave-one-out residuals are (y − ŷ) / (1 − leverage), exactly (Allen's PRESS).
    """
    total = weights.sum()
    center, mean = weights @ design.rows / total, float(weights @ labels / total)
    rows, targets = design.rows - center, labels - mean
    energies, axes = torch.linalg.eigh((rows * weights[:, None]).T @ rows)
    turned = rows @ axes
    answers = turned.T @ (weights * targets)
    floor = float(energies[-1]) * 1e-13 + 1e-300

    def solved(strength: float) -> tuple[Tensor, float]:
        shrunk = 1 / (energies.clamp_min(0) + max(strength, floor))
        coefficients = shrunk * answers
        leverage = weights * (1 / total + turned.square() @ shrunk)
        left_out = (targets - turned @ coefficients) / (1 - leverage).clamp_min(1e-9)
        return coefficients, float((weights * left_out.square()).sum() / total)

    tried = [penalty] if penalty is not None else [design.penalty(share) for share in PENALTIES]
    solutions = [(strength, *solved(strength)) for strength in tried]
    strength, coefficients, loss = min(solutions, key=lambda each: each[2])
    own = axes @ coefficients
    return design.read_out(own, mean - float(center @ own), strength, loss)


def logistic(design: Design, positive: Tensor, weights: Tensor, *, penalty: float | None = None) -> ReadOut:
    """Fit a logistic regression: Σ wᵢ log(1 + exp(−tᵢ (b₀ + b·sᵢ))) + penalty / 2 · |b|², t = ±1.

    `positive`: which are of the positive class, shape `(n,)`, bool; of both classes there must be some. `weights`:
    shape `(n,)`, at least 0; 0 leaves a model out.

    Source: The approximate leave-one-out of Rad and Maleki 2018, arXiv 1801.10243, theorem 1.
    """
    tried = [penalty] if penalty is not None else [design.penalty(share) for share in PENALTIES]
    best: tuple[float, float, Tensor] | None = None
    for strength in tried:  # the strongest first
        state, loss = _minimum(design.rows, positive, weights, strength)
        if best is None or loss < best[0]:
            best = (loss, strength, state)
        elif loss > 1.2 * best[0]:
            # Weaker penalties overfit even more.
            break
    assert best is not None
    loss, strength, state = best
    return design.read_out(state[:-1], float(state[-1]), strength, loss)


def _minimum(rows: Tensor, positive: Tensor, weights: Tensor, penalty: float) -> tuple[Tensor, float]:
    """The coefficients, the intercept last, and the mean log-loss of each model under the fit to all others."""
    linear = library("sklearn.linear_model", "Logistic regression", "evidence")
    warning = library("sklearn.exceptions", "Logistic regression", "evidence").ConvergenceWarning
    model = linear.LogisticRegression(C=1 / penalty, solver="newton-cholesky", tol=1e-10, max_iter=200)
    with warnings.catch_warnings():
        warnings.simplefilter("error", warning)
        try:
            model.fit(rows.numpy(), positive.numpy(), sample_weight=weights.numpy())
        except warning as error:
            reason = "The logistic regression does not converge."
            raise UsageError(reason, cure="Check the labels, or use kind='encoder'.") from error
    coefficients = torch.from_numpy(model.coef_[0].copy())
    state = torch.cat([coefficients, torch.from_numpy(model.intercept_.copy())])
    whole = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
    held = torch.full_like(state, penalty)
    # The intercept is hardly penalized.
    held[-1] = penalty * 1e-12 + 1e-12
    return state, _left_out(whole, positive.double(), weights, torch.diag(held), state)


def _left_out(rows: Tensor, truth: Tensor, weights: Tensor, ridge_part: Tensor, state: Tensor) -> float:
    said = rows @ state
    chance = torch.sigmoid(said)
    bend = weights * chance * (1 - chance)
    root = torch.linalg.cholesky((rows * bend[:, None]).T @ rows + ridge_part)
    spread = torch.linalg.solve_triangular(root, rows.T, upper=False).square().sum(0)
    without = said + weights * (chance - truth) * spread / (1 - bend * spread).clamp_min(1e-9)
    return float((weights * (F.softplus(without) - truth * without)).sum() / weights.sum())


@final
@dataclass(frozen=True, eq=False)
class Design:
    """Scores, centered, in axes of the space that they span."""

    center: Tensor
    """Mean of the scores, shape `(k,)`."""
    axes: Tensor
    """Orthonormal columns, shape `(k, r)`, r the smaller of n and k."""
    rows: Tensor
    """Centered scores in these axes, shape `(n, r)`."""

    @classmethod
    def of(cls, scores: Tensor) -> Design:
        """The design of scores, shape `(n, k)`, n at least 2."""
        scores = scores.detach().double().cpu()
        center = scores.mean(0)
        centered = scores - center
        count, components = scores.shape
        if components <= count:
            return cls(center, torch.eye(components, dtype=torch.float64), centered)
        axes, triangle = torch.linalg.qr(centered.T)
        return cls(center, axes, triangle.T.contiguous())

    def penalty(self, share: float) -> float:
        """The penalty that is a multiple of the mean energy of an axis."""
        energy = float(self.rows.square().sum()) / self.rows.shape[1]
        return share * (energy or 1.0)

    def read_out(self, weights: Tensor, intercept: float, penalty: float, loss: float) -> ReadOut:
        """Weights of these axes, shape `(r,)`, as weights of components."""
        full = self.axes @ weights
        return ReadOut(full, intercept - float(self.center @ full), penalty, loss)


@final
@dataclass(frozen=True, eq=False)
class ReadOut:
    """A linear predictor on scores."""

    weights: Tensor
    """Coefficients of the scores, shape `(k,)`, fp64."""
    intercept: float
    """The prediction from scores of 0."""
    penalty: float
    """Penalty on the sum of squared weights; a logistic regression takes half of it."""
    loss: float
    """Mean loss (squared error, or log-loss) of models left out one at a time; approximately so for a logistic
    regression.
    """

    def __call__(self, scores: Tensor) -> Tensor:
        """The prediction from scores `(n, k)`: the label, or the log-odds of the positive class, shape `(n,)`."""
        return scores.double() @ self.weights + self.intercept
