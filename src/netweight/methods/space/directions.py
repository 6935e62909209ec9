"""Ridge and logistic regression on scores with an intercept, the penalty chosen by leaving out one model at a time.

Both are solved in the axes that the models span, so that more components than models cost nothing; both penalties are
blind to such a rotation. Everything is fp64.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, final

import torch
import torch.nn.functional as F
from torch import Tensor

from netweight.core import digest
from netweight.core.names import nearest_names
from netweight.core.seeds import torch_generator
from netweight.errors import CorruptBlob, NameNotFound, UsageError
from netweight.metrics.prediction import area_under_roc, explained_variance
from netweight.report.finding import Finding

PENALTIES = tuple(10.0**power for power in range(3, -5, -1))
"""Strengths that are tried, the strongest first, as multiples of the mean energy of an axis of the scores."""

_NEWTON_STEPS = 60
_TOLERANCE = 1e-9


@final
@dataclass(frozen=True, eq=False)
class Design:
    """Scores, centered, in axes of the space that they span.

    Attributes:
        center: Shape `(k,)`: the mean of the scores.
        axes: Orthonormal columns, shape `(k, r)`, r the smaller of n and k.
        rows: Shape `(n, r)`: the centered scores in these axes.
    """

    center: Tensor
    axes: Tensor
    rows: Tensor

    @classmethod
    def of(cls, scores: Tensor) -> Design:
        """Make it of scores, shape `(n, k)`, n at least 2.

        Args:
            scores: Any floating dtype.
        """
        scores = scores.detach().double().cpu()
        center = scores.mean(0)
        centered = scores - center
        count, components = scores.shape
        if components <= count:
            return cls(center, torch.eye(components, dtype=torch.float64), centered)
        axes, triangle = torch.linalg.qr(centered.T)
        return cls(center, axes, triangle.T.contiguous())

    def penalty(self, share: float) -> float:
        """Return the penalty that is a multiple of the mean energy of an axis.

        Args:
            share: At least 0.
        """
        energy = float(self.rows.square().sum()) / self.rows.shape[1]
        return share * (energy or 1.0)

    def read_out(self, weights: Tensor, intercept: float, penalty: float, loss: float) -> ReadOut:
        """Return weights of these axes as weights of components.

        Args:
            weights: Of the axes, shape `(r,)`.
            intercept: Of the read-out.
            penalty: What was chosen.
            loss: What it came to on left-out models.
        """
        full = self.axes @ weights
        return ReadOut(full, intercept - float(self.center @ full), penalty, loss)


@final
@dataclass(frozen=True, eq=False)
class ReadOut:
    """A linear read-out of scores.

    Attributes:
        weights: Shape `(k,)`, fp64.
        intercept: What is said of scores of 0.
        penalty: The penalty on the sum of squared weights, times ½ in a logistic regression.
        loss: Mean loss (squared error, or log-loss) of models left out one at a time; approximately so for a
            logistic regression.
    """

    weights: Tensor
    intercept: float
    penalty: float
    loss: float

    def __call__(self, scores: Tensor) -> Tensor:
        """Return what is said of scores `(n, k)`: the label, or the log-odds of the positive class, shape `(n,)`."""
        return scores.double() @ self.weights + self.intercept


def ridge(design: Design, labels: Tensor, weights: Tensor, *, penalty: float | None = None) -> ReadOut:
    """Regress labels on scores: Σ wᵢ (yᵢ − b₀ − b·sᵢ)² + penalty · |b|².

    Args:
        design: The scores of n models.
        labels: Shape `(n,)`, fp64.
        weights: Of each model, shape `(n,)`, at least 0; 0 leaves it out.
        penalty: None chooses among `PENALTIES` by leaving out one model at a time, which needs no refitting.

    Source: leave-one-out residuals are (y − ŷ) / (1 − leverage), exactly (Allen's PRESS).
    """
    total = weights.sum()
    center, mean = weights @ design.rows / total, float(weights @ labels / total)
    rows, wanted = design.rows - center, labels - mean
    energies, axes = torch.linalg.eigh((rows * weights[:, None]).T @ rows)
    turned = rows @ axes
    answers = turned.T @ (weights * wanted)
    floor = float(energies[-1]) * 1e-13 + 1e-300

    def solved(strength: float) -> tuple[Tensor, float]:
        shrunk = 1 / (energies.clamp_min(0) + max(strength, floor))
        coefficients = shrunk * answers
        leverage = weights * (1 / total + turned.square() @ shrunk)
        left_out = (wanted - turned @ coefficients) / (1 - leverage).clamp_min(1e-9)
        return coefficients, float((weights * left_out.square()).sum() / total)

    tried = [penalty] if penalty is not None else [design.penalty(share) for share in PENALTIES]
    found = [(strength, *solved(strength)) for strength in tried]
    strength, coefficients, loss = min(found, key=lambda each: each[2])
    own = axes @ coefficients
    return design.read_out(own, mean - float(center @ own), strength, loss)


def logistic(design: Design, positive: Tensor, weights: Tensor, *, penalty: float | None = None) -> ReadOut:
    """Fit a logistic regression: Σ wᵢ log(1 + exp(−tᵢ (b₀ + b·sᵢ))) + penalty / 2 · |b|², t = ±1.

    Args:
        design: The scores of n models.
        positive: Which are of the positive class, shape `(n,)`, bool; of both classes there must be some.
        weights: Of each model, shape `(n,)`, at least 0; 0 leaves it out.
        penalty: None chooses among `PENALTIES` by leaving out one model at a time, each by a single Newton step.

    Source: the approximate leave-one-out of Rad and Maleki 2018, arXiv 1801.10243, theorem 1.
    """
    rows = torch.cat([design.rows, torch.ones(len(design.rows), 1, dtype=torch.float64)], 1)
    state = torch.zeros(rows.shape[1], dtype=torch.float64)
    tried = [penalty] if penalty is not None else [design.penalty(share) for share in PENALTIES]
    best: tuple[float, float, Tensor] | None = None
    for strength in tried:  # the strongest first, each starting where the one before ended
        state, loss = _newton(rows, positive, weights, strength, state)
        if best is None or loss < best[0]:
            best = (loss, strength, state)
        elif loss > 1.2 * best[0]:
            break  # weaker penalties overfit more still
    assert best is not None
    loss, strength, state = best
    return design.read_out(state[:-1], float(state[-1]), strength, loss)


def _newton(rows: Tensor, positive: Tensor, weights: Tensor, penalty: float, state: Tensor) -> tuple[Tensor, float]:
    """The minimum, and the mean log-loss of each model under the fit to all others."""
    truth = positive.double()
    held = torch.full_like(state, penalty)
    held[-1] = 0.0  # the intercept is free
    ridge_part = torch.diag(held.clamp_min(penalty * 1e-12 + 1e-12))

    def value(at: Tensor) -> float:
        said = rows @ at
        return float((weights * (F.softplus(said) - truth * said)).sum() + 0.5 * (held * at.square()).sum())

    now = value(state)
    for _ in range(_NEWTON_STEPS):
        chance = torch.sigmoid(rows @ state)
        gradient = rows.T @ (weights * (chance - truth)) + held * state
        curvature = (rows * (weights * chance * (1 - chance))[:, None]).T @ rows + ridge_part
        step = torch.cholesky_solve(gradient[:, None], torch.linalg.cholesky(curvature))[:, 0]
        decrease = float(gradient @ step)
        if decrease <= _TOLERANCE * (1 + abs(now)):
            break
        length = 1.0
        while (then := value(state - length * step)) > now - 1e-4 * length * decrease and length > 1e-8:
            length /= 2
        state, now = state - length * step, then
    else:
        raise UsageError("The logistic regression does not settle.", cure="Check the labels, or use kind='encoder'.")
    return state, _left_out(rows, truth, weights, ridge_part, state)


def _left_out(rows: Tensor, truth: Tensor, weights: Tensor, ridge_part: Tensor, state: Tensor) -> float:
    said = rows @ state
    chance = torch.sigmoid(said)
    bend = weights * chance * (1 - chance)
    root = torch.linalg.cholesky((rows * bend[:, None]).T @ rows + ridge_part)
    spread = torch.linalg.solve_triangular(root, rows.T, upper=False).square().sum(0)
    without = said + weights * (chance - truth) * spread / (1 - bend * spread).clamp_min(1e-9)
    return float((weights * (F.softplus(without) - truth * without)).sum() / weights.sum())


Kind: TypeAlias = Literal["binary", "continuous"]

_WORDS = {"true": 1.0, "yes": 1.0, "false": 0.0, "no": 0.0}
_MISSING = {"", "na", "n/a", "nan", "null", "none", "?"}
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_KINDS = ".csv, .tsv, .json or .jsonl"


@final
@dataclass(frozen=True, eq=False)
class Column:
    """One attribute of every model.

    Attributes:
        name: Its name.
        values: Shape `(n,)`, fp64, one per model of the space in its order; NaN where unknown.

    Raises:
        UsageError: A value is infinite, or the values are no list of numbers.
    """

    name: str
    values: Tensor

    def __post_init__(self) -> None:
        """Bring the values to fp64 and refuse what is no number."""
        values = torch.as_tensor(self.values, dtype=torch.float64, device="cpu")
        if values.ndim != 1 or values.isinf().any():
            raise UsageError(
                f"The labels {self.name!r} are of shape {tuple(values.shape)} or hold an infinity.",
                cure="Give one finite number per model, NaN where it is unknown.",
            )
        object.__setattr__(self, "values", values)

    @property
    def known(self) -> Tensor:
        """Where the value is known, shape `(n,)`, bool."""
        return ~self.values.isnan()

    @property
    def levels(self) -> list[float]:
        """The different values, rising."""
        return sorted(set(self.values[self.known].tolist()))

    @property
    def kind(self) -> Kind:
        """Binary where there are two different values or fewer."""
        return "binary" if len(self.levels) <= 2 else "continuous"

    @property
    def positive(self) -> Tensor:
        """Whether the value is the larger of the two, shape `(n,)`, bool; False where unknown.

        Raises:
            UsageError: There are not two values.
        """
        self.check()
        if self.kind != "binary":
            raise UsageError(f"{self.name!r} has {len(self.levels)} values, not two.", cure="It is continuous.")
        return self.known & (self.values == self.levels[1])

    def check(self, least: int = 2) -> None:
        """Refuse labels that no direction can be told from.

        Args:
            least: Models that must be known, of each class if the labels are binary.

        Raises:
            UsageError: All known values are equal (one class), or too few are known.
        """
        count, levels = int(self.known.sum()), self.levels
        if len(levels) < 2:
            what = "no known value" if not levels else f"one value alone, {levels[0]:g}, in {count} models"
            raise UsageError(
                f"The label {self.name!r} has {what}: no direction leads from there to anything else.",
                cure="Label models of both classes.",
            )
        rarest = min(int((self.values == level).sum()) for level in levels) if self.kind == "binary" else count
        if rarest < least:
            what = "of one class" if self.kind == "binary" else "with a known value"
            raise UsageError(
                f"The label {self.name!r} has only {rarest} models {what}, and {least} are needed.",
                cure="Label more models, or cross-validate in fewer folds.",
            )


@final
@dataclass(frozen=True, eq=False)
class Labels:
    """Columns about the models of a space.

    Attributes:
        names: The models, in the space's order.
        columns: Name → column, as many values as models.
    """

    names: tuple[str, ...]
    columns: Mapping[str, Column]

    def __getitem__(self, name: str) -> Column:
        """Return a column.

        Raises:
            NameNotFound: There is none of this name; the nearest are named.
        """
        if name not in self.columns:
            near = ", ".join(map(repr, nearest_names(name, self.columns)))
            raise NameNotFound(f"There is no column {name!r}.", cure=f"The nearest are {near}.")
        return self.columns[name]


def read_labels(
    path: str | Path, names: Sequence[str], *, columns: Sequence[str] | None = None, key: str = "name"
) -> Labels:
    """Read labels of the models of a space.

    Args:
        path: `.csv` or `.tsv` with a row of column names (a `.csv` with semicolons is understood, too); `.jsonl` with
            one object per line; `.json` with a list of such objects, or one object: model → its labels. Values are
            numbers or yes, no, true, false; empty, NA, null and ? are unknown.
        names: The models of the space, in its order.
        columns: Which to read; every one beside `key` by default.
        key: The column that names the model.

    Returns:
        The columns. Models that the file leaves out are unknown.

    Raises:
        NameNotFound: The file names a model that is not in the space, or lacks a column; the nearest are named.
        UsageError: The file cannot be read, names a model twice, or a value is no number.
    """
    path = Path(path)
    rows = _rows(path, key)
    known = {name: number for number, name in enumerate(names)}
    seen: set[str] = set()
    there = list(dict.fromkeys(column for row in rows for column in row if column != key))
    wanted = there if columns is None else list(columns)
    for column in wanted:
        _check_column(path, column, there)
    found = {column: torch.full((len(names),), torch.nan, dtype=torch.float64) for column in wanted}
    for row in rows:
        name = _model(path, row, key, known, seen)
        for column in wanted:
            found[column][known[name]] = _number(path, name, column, row.get(column))
    if not found:
        raise UsageError(f"{path} holds no label.", cure=f"Give at least one column beside {key!r}.")
    return Labels(tuple(names), {name: Column(name, values) for name, values in found.items()})


def check_columns(path: str | Path, columns: Sequence[str], *, key: str = "name") -> None:
    """Check that a file of labels can be read and has columns, where the models are not known yet.

    Args:
        path: As for `read_labels`.
        columns: Which it is to have.
        key: The column that names the model.

    Raises:
        NameNotFound: It lacks one; the nearest are named.
        UsageError: The file cannot be read.
    """
    path = Path(path)
    there = list(dict.fromkeys(column for row in _rows(path, key) for column in row))
    for column in (key, *columns):
        _check_column(path, column, there)


def _rows(path: Path, key: str) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The labels in {path} cannot be read: {error}.", cure="Give a text file in UTF-8.") from None
    if path.suffix in _SEPARATORS:
        rows = _from_table(path, text)
    elif path.suffix in (".json", ".jsonl"):
        rows = _from_json(path, text, key)
    else:
        raise UsageError(f"{path} is no file of labels.", cure=f"Give one that ends in {_KINDS}.")
    if not rows:
        raise UsageError(f"{path} holds no model.", cure="Give at least one row.")
    return rows


def _from_table(path: Path, text: str) -> list[dict[str, Any]]:
    first = text.partition("\n")[0]
    separator = ";" if path.suffix == ".csv" and first.count(";") > first.count(",") else _SEPARATORS[path.suffix]
    table = csv.DictReader(text.splitlines(keepends=True), delimiter=separator)
    rows = []
    for number, row in enumerate(table, start=2):
        if None in row or None in row.values():
            raise UsageError(f"Line {number} of {path} has another number of cells than the first line has names.")
        rows.append({name.strip(): value for name, value in row.items()})
    return rows


def _from_json(path: Path, text: str, key: str) -> list[dict[str, Any]]:
    try:
        if path.suffix == ".jsonl":
            found: Any = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}.", cure="Write it anew.") from None
    if isinstance(found, dict):
        found = [{key: name, **row} if isinstance(row, dict) else row for name, row in found.items()]
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise UsageError(f"{path} does not hold one object per model.", cure='Write {"model": {"column": 1}}.')
    return found


def _model(path: Path, row: Mapping[str, Any], key: str, known: Mapping[str, int], seen: set[str]) -> str:
    """The model that a row is about, checked."""
    _check_column(path, key, list(row))
    name = str(row[key]).strip()
    if name not in known:
        near = ", ".join(map(repr, nearest_names(name, known)))
        raise NameNotFound(
            f"{path} labels {name!r}, which is not in the space.", cure=f"Leave it out; the nearest names are {near}."
        )
    if name in seen:
        raise UsageError(f"{path} labels {name!r} twice.", cure="Leave one of the two out.")
    seen.add(name)
    return name


def _check_column(path: Path, column: str, columns: Sequence[str]) -> None:
    if column not in columns:
        near = ", ".join(map(repr, nearest_names(column, columns))) or "none: there is no column"
        raise NameNotFound(f"{path} has no column {column!r}.", cure=f"The nearest are {near}.")


def _number(path: Path, name: str, column: str, value: object) -> float:
    if value is None or (isinstance(value, str) and value.strip().lower() in _MISSING):
        return float("nan")
    if isinstance(value, bool | int | float):
        return float(value)
    word = str(value).strip().lower()
    try:
        return _WORDS[word] if word in _WORDS else float(word)
    except ValueError:
        raise UsageError(
            f"{path} says {value!r} of {name!r} in {column!r}, which is no number.",
            cure="Write numbers, or 1 and 0 for two classes; leave a cell empty where it is unknown.",
        ) from None


DirectionKind: TypeAlias = Literal["encoder", "decoder", "difference", "reference"]
Unit: TypeAlias = Literal["deviations", "reach", "raw"]

_LEAST_REST = 1e-6


@final
@dataclass(frozen=True, eq=False)
class Direction:
    """A direction of scores, and how far the training models spread along it.

    Attributes:
        name: The attribute.
        kind: How it was found.
        vector: Shape `(k,)`, fp64, of length 1; that of the reference has the length that its code gives it.
        deviation: Standard deviation of the training models along the direction, in scores.
        reach: How far from their mean the farthest training model lies along it, in scores: the paper's strength.
        space: Digest of the first training scores; None if unknown.
        findings: How well held-out models were told apart by it.
    """

    name: str
    kind: DirectionKind
    vector: Tensor
    deviation: float
    reach: float
    space: str | None = None
    findings: tuple[Finding, ...] = field(default=())

    @property
    def length(self) -> float:
        """Length of `vector`."""
        return float(self.vector.norm())

    def step(self, strength: float, unit: Unit = "deviations") -> Tensor:
        """Return what is added to scores, shape `(k,)`, fp64.

        Args:
            strength: How far, negative to go back.
            unit: Standard deviations of the training models along the direction; multiples of `reach`; or of the
                vector as it is, as the reference counts.

        Raises:
            UsageError: There is no such unit.
        """
        lengths = {"deviations": self.deviation / self.length, "reach": self.reach / self.length, "raw": 1.0}
        if unit not in lengths:
            raise UsageError(f"Strengths have no unit {unit!r}.", cure=f"Use one of {', '.join(lengths)}.")
        return strength * lengths[unit] * self.vector

    def cosine(self, other: Direction) -> float:
        """Return the cosine of the angle between two directions of one space.

        Args:
            other: Of the same space.
        """
        return float(self.vector @ other.vector) / (self.length * other.length)

    def check(self, scores: Tensor) -> None:
        """Refuse a direction that was found in another space.

        Args:
            scores: The training scores of the space at hand, shape `(n, k)`.

        Raises:
            UsageError: It was.
        """
        if len(self.vector) != scores.shape[-1] or self.space not in (None, scores_digest(scores)):
            raise UsageError(
                f"The direction {self.name!r} was found in another space, of {len(self.vector)} components.",
                cure="Find it again in this one: netweight space direction.",
            )

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON value; numbers come back bit for bit."""
        return {
            "name": self.name,
            "kind": self.kind,
            "vector": self.vector.tolist(),
            "deviation": self.deviation,
            "reach": self.reach,
            "space": self.space,
            "findings": [finding.to_json() for finding in self.findings],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Direction:
        """Return the direction that `to_json` wrote.

        Args:
            data: JSON values.

        Raises:
            CorruptBlob: It is none.
        """
        try:
            vector = torch.tensor(data["vector"], dtype=torch.float64)
            findings = tuple(Finding.from_json(each) for each in data["findings"])
            found = cls(**{**data, "vector": vector, "findings": findings})
        except (KeyError, TypeError, ValueError, UsageError) as error:
            raise CorruptBlob(f"This is no direction: {error}.", cure="Find it again.") from None
        if vector.ndim != 1 or not vector.isfinite().all() or not found.length > 0:
            raise CorruptBlob("The vector of this direction is no finite vector.", cure="Find it again.")
        return found


def direction_of(
    scores: Tensor, vector: Tensor, *, name: str, kind: DirectionKind, findings: Sequence[Finding] = ()
) -> Direction:
    """Make a direction of a vector of any length, measuring the training models along it.

    Args:
        scores: Of the training models, shape `(n, k)`.
        vector: Shape `(k,)`; scaled to length 1, but for that of the reference.
        name: The attribute.
        kind: How it was found.
        findings: What is known of it.

    Raises:
        UsageError: The vector is 0.
    """
    vector = vector.double()
    length = float(vector.norm())
    if not length > 0:
        raise UsageError(f"The direction {name!r} has length 0: nothing in the scores goes with it.")
    along = (scores.double() - scores.double().mean(0)) @ (vector / length)
    kept = vector if kind == "reference" else vector / length
    return Direction(
        name, kind, kept, float(along.std()), float(along.max()), scores_digest(scores), tuple(findings)
    )  # fmt: skip


def decorrelated(scores: Tensor, direction: Direction, confounders: Sequence[Direction]) -> Direction:
    """Take out of a direction whatever lies along others, by one solve, so that their order does not matter.

    Args:
        scores: Of the training models, shape `(n, k)`.
        direction: The one that is kept.
        confounders: Those it is to be orthogonal to. Give decoders: then what they read stays as it is.

    Returns:
        A direction without findings, for it is another one.

    Raises:
        UsageError: Nothing is left: the direction is a combination of the others.
    """
    if not confounders:
        return direction
    others = torch.stack([each.vector / each.length for each in confounders])
    _, sizes, axes = torch.linalg.svd(others, full_matrices=False)
    axes = axes[sizes > sizes[0] * 1e-10]  # confounders may repeat each other
    rest = direction.vector - axes.T @ (axes @ direction.vector)
    rest = rest - axes.T @ (axes @ rest)  # once more, for what rounding left
    if float(rest.norm()) <= _LEAST_REST * direction.length:
        names = ", ".join(repr(each.name) for each in confounders)
        raise UsageError(
            f"The direction {direction.name!r} is a combination of {names}: without them nothing is left.",
            cure="Name fewer confounders.",
        )
    return direction_of(scores, rest, name=direction.name, kind=direction.kind)


def scores_digest(scores: Tensor) -> str:
    """Return the digest that ties directions to a space: of its first scores, which stay when models are appended.

    Args:
        scores: Shape `(n, k)`.
    """
    return digest.of_config([scores.shape[-1], digest.of_tensor(scores[:8].detach().float())])


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


_TRIES = 20  # draws for one subsample that has both classes of every attribute


@final
@dataclass(frozen=True)
class Entanglement:
    """Directions found from subsamples of one size.

    Attributes:
        models: Size of a subsample.
        each: Of every subsample the mean of |cosine| over all pairs of attributes.
    """

    models: int
    each: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over subsamples."""
        return sum(self.each) / len(self.each)

    @property
    def middle(self) -> tuple[float, float]:
        """The middle 95 % of the subsamples."""
        ends = torch.tensor(self.each).double().quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
        return float(ends[0]), float(ends[1])


def entanglement(
    scores: Tensor,
    labels: Labels,
    columns: Sequence[str],
    sizes: Sequence[int],
    *,
    repeats: int = 20,
    kind: Literal["encoder", "decoder", "difference"] = "difference",
    fidelity: Literal["corrected", "reference"] = "corrected",
    seed: int = 0,
) -> list[Entanglement]:
    """Find directions from subsamples and take the cosines between them.

    The axes stay those of all models: what is seen is how many models directions need, not axes.

    Args:
        scores: Shape `(n, k)`.
        labels: Of the same models.
        columns: At least two attributes.
        sizes: Numbers of models, at most n.
        repeats: Subsamples of each size.
        kind: Of the directions; the joint regression of encoders would take attributes apart that go together.
        fidelity: "reference" for the directions of the authors' code.
        seed: Decides on the subsamples.

    Returns:
        One entry per size, in their order.

    Raises:
        UsageError: There are fewer than two attributes, a size is above n, or subsamples of it lack a class.

    Source: weights2weights, figure 8: mean absolute cosine between pairs of directions.
    """
    if len(columns) < 2 or not sizes or max(sizes) > len(scores) or min(sizes) < 4 or repeats < 1:
        raise UsageError(
            f"{len(columns)} attributes in subsamples of {list(sizes)} of {len(scores)} models cannot be compared.",
            cure="Give two attributes or more, and sizes from 4 to the number of models.",
        )
    found = []
    for size in sizes:
        draws = [_drawn(labels, columns, size, seed, number) for number in range(repeats if size < len(scores) else 1)]
        found.append(Entanglement(size, tuple(_mean_cosine(scores, labels, columns, d, kind, fidelity) for d in draws)))
    return found


def entanglement_findings(found: Sequence[Entanglement], *, attributes: int, seed: int = 0) -> list[Finding]:
    """Return one finding per number of models, the smallest number as their baseline.

    Args:
        found: What `entanglement` returned.
        attributes: Number of attributes compared.
        seed: That it was given.
    """
    first = found[0].mean
    return [
        Finding(
            f"mean |cos| between directions, {each.models} models",
            each.mean,
            ci95=each.middle if len(each.each) > 1 else None,
            n=len(each.each),
            better="lower",
            baseline=first,
            seeds=(seed,),
            detail={"attributes": attributes, "subsamples": len(each.each)},
        )
        for each in found
    ]


def _drawn(labels: Labels, columns: Sequence[str], size: int, seed: int, number: int) -> Tensor:
    """A subsample in which every attribute can be told."""
    generator = torch_generator(seed, "subsample", size, number)
    for _ in range(_TRIES):
        rows = torch.randperm(len(labels.names), generator=generator)[:size]
        parts = [Column(name, labels[name].values[rows]) for name in columns]
        if all(len(part.levels) > 1 and _counts(part) >= 2 for part in parts):
            return rows
    raise UsageError(f"Subsamples of {size} models lack a class of an attribute.", cure="Take larger ones.")


def _counts(column: Column) -> int:
    if column.kind == "continuous":
        return int(column.known.sum())
    return min(int((column.values == level).sum()) for level in column.levels)


def _mean_cosine(
    scores: Tensor,
    labels: Labels,
    columns: Sequence[str],
    rows: Tensor,
    kind: Literal["encoder", "decoder", "difference"],
    fidelity: Literal["corrected", "reference"],
) -> float:
    part = Labels(
        tuple(labels.names[row] for row in rows.tolist()),
        {name: Column(name, labels[name].values[rows]) for name in columns},
    )
    directions = [fit_direction(scores[rows], part, name, kind=kind, fidelity=fidelity, folds=0) for name in columns]
    cosines = [abs(one.cosine(other)) for one, other in itertools.combinations(directions, 2)]
    return sum(cosines) / len(cosines)
