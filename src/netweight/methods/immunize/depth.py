"""How deep a defense goes: lens losses, linear probes, representations and weights by depth, and pictures of them.

`analyze_layers` measures one model on pairs of answers, `weight_changes` compares two, `depth_section` shows both.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from netweight.core.lazy import library
from netweight.core.progress import Progress
from netweight.core.seeds import torch_generator
from netweight.data.tokens import IGNORED, Batch, Example, Pair, collate
from netweight.errors import UsageError
from netweight.hf.load_language_model import structure_of
from netweight.methods.immunize.losses import Targets, answer_loss, lens_losses
from netweight.metrics.intervals import t_interval
from netweight.nn.hooks import evaluating
from netweight.report.finding import Column, Figure, Finding, Section, Table
from netweight.report.plots import canvas, series_color, to_figure
from netweight.report.report import read_report
from netweight.report.text import Conclusion, Measured, Words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

KINDS = ("harmful", "harmless")  # the answers of a pair, in the order in which they are shown
LEAST_PAIRS = 8  # fewer leave nothing to train and to test a probe on
_MOST_PAIRS = 200
_AT_ONCE = 8
_HELD_OUT = 0.3  # share of the examples that a probe is tested on
_PENALTY = 1e-2  # on the squares of its weights


@final
@dataclass(frozen=True)
class LayerAnalysis:
    """A model on pairs of answers, depth by depth: the embeddings first, then after each block."""

    # For each kind of answer the mean loss per token if the model ended at a depth: one list per batch of eight pairs,
    # each with one number per depth.
    lens: Mapping[str, Sequence[Sequence[float]]]
    # For each kind the mean hidden state over each answer at every depth, shape `(pairs, hidden)`.
    states: Mapping[str, Sequence[Tensor]]
    # For each depth the accuracies of linear probes that tell the kinds apart, one for each random split.
    probes: Sequence[Sequence[float]]
    vocabulary: int  # how many tokens the model chooses from

    @property
    def pairs(self) -> int:
        """How many pairs were used."""
        return len(self.states[KINDS[0]][0])


@final
@dataclass(frozen=True)
class LayerChange:
    """How far a layer's weights moved."""

    layer: str  # a block's name, or that of a parameter outside the blocks
    distance: float  # Euclidean norm of the change of all its weights together
    relative: float  # that norm over the norm of the weights before; 0 where both are 0
    block: int | None = None  # the block's number from 0; None for what lies outside the blocks


@final
@dataclass(frozen=True)
class DepthAnalysis:
    """A model before and after its defense."""

    changes: Sequence[LayerChange]
    before: LayerAnalysis
    after: LayerAnalysis  # on the same pairs


def analyze_layers(model: nn.Module, pairs: Sequence[Pair], *, pad_id: int = 0, seed: int = 0) -> LayerAnalysis:
    """Analyze a model, which stays as it is."""
    if len(pairs) < LEAST_PAIRS:
        raise UsageError(
            f"{len(pairs)} pairs are too few to look inside of a model.", cure=f"Give at least {LEAST_PAIRS}."
        )
    wanted = min(len(pairs), _MOST_PAIRS)
    chosen = [pairs[row * len(pairs) // wanted] for row in range(wanted)]
    sides = {"harmful": [pair.harmful for pair in chosen], "harmless": [pair.harmless for pair in chosen]}
    device = next(model.parameters()).device
    lens: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    with evaluating(model):
        for kind, examples in sides.items():
            for first in range(0, wanted, _AT_ONCE):
                batch = collate(examples[first : first + _AT_ONCE], pad_id=pad_id).to(device)
                lens[kind].append(lens_by_layer(model, batch))
        states = {
            kind: representations(model, examples, pad_id=pad_id, batch_size=_AT_ONCE)
            for kind, examples in sides.items()
        }
    probes = [probe_accuracies(*both, seed=seed) for both in zip(*(states[kind] for kind in KINDS), strict=True)]
    return LayerAnalysis(lens, states, probes, structure_of(model).vocabulary)


@torch.no_grad()
def lens_by_layer(model: nn.Module, batch: Batch) -> list[float]:
    """The loss on a batch's labeled tokens if the model ended at each depth."""
    parts, targets = structure_of(model), Targets.of_labels(batch.labels)
    result: Any = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, output_hidden_states=True)
    losses: list[float] = lens_losses(result.hidden_states[:-1], targets, parts).tolist()
    return [*losses, float(answer_loss(result.logits, targets))]


@torch.no_grad()
def representations(
    model: nn.Module, examples: Sequence[Example], *, pad_id: int = 0, batch_size: int = 16
) -> list[Tensor]:
    """The mean hidden state over each answer, at every depth."""
    device = next(model.parameters()).device
    found: list[list[Tensor]] = []
    for first in range(0, max(1, len(examples)), batch_size):
        batch = collate(examples[first : first + batch_size], pad_id=pad_id).to(device)
        result: Any = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, output_hidden_states=True)
        answers = (batch.labels != IGNORED)[..., None]
        found.append([((state.float() * answers).sum(1) / answers.sum(1)).cpu() for state in result.hidden_states])
    return [torch.cat(states) for states in zip(*found, strict=True)]


def probe_accuracies(first: Tensor, second: Tensor, *, seeds: int = 10, seed: int = 0) -> list[float]:
    """How well a logistic regression tells two kinds of representations apart on examples that it has not seen."""
    # Features are standardized by the training examples. Both kinds are split alike; with unequal numbers the larger
    # kind is thinned out to the smaller, so that 0.5 is chance.
    # Source: Alain and Bengio, "Understanding intermediate layers using linear classifier probes", 2016.
    count = min(len(first), len(second))
    test = round(count * _HELD_OUT)
    if test < 1:
        raise UsageError(
            f"{len(first)} and {len(second)} examples cannot be split.", cure="Give at least two examples of each kind."
        )
    return [_one_split(first, second, count, test, torch_generator(seed, "split", i)) for i in range(seeds)]


def _one_split(first: Tensor, second: Tensor, count: int, test: int, generator: torch.Generator) -> float:
    drawn = [kind[torch.randperm(len(kind), generator=generator)[:count]].double() for kind in (first, second)]
    features = torch.cat([kind[test:] for kind in drawn])
    labels = torch.cat([features.new_zeros(count - test), features.new_ones(count - test)])
    center, scale = features.mean(0), features.std(0, correction=0).clamp(min=1e-12)
    weights = _fit((features - center) / scale, labels, _PENALTY)
    scores = [(kind[:test] - center) / scale @ weights[1:] + weights[0] for kind in drawn]
    right = (scores[0] < 0).sum() + (scores[1] > 0).sum()
    return int(right) / (2 * test)


def _fit(features: Tensor, labels: Tensor, penalty: float) -> Tensor:
    """Weights of the regression, the constant first. The penalty is on the mean loss of an example."""
    linear = library("sklearn.linear_model", "The probe of a representation", "evidence")
    model = linear.LogisticRegression(C=1 / (penalty * len(labels)), tol=1e-10, max_iter=1000)
    model.fit(features.numpy(), labels.numpy())
    return torch.cat([torch.from_numpy(model.intercept_.copy()), torch.from_numpy(model.coef_[0].copy())])


@final
@dataclass(frozen=True)
class Plane:
    """The directions along which representations differ most, to draw others in too: fit before, place after."""

    center: Tensor  # mean of what was fitted, shape `(D,)`
    # Orthonormal, the longest first, shape `(k, D)`; of either sign the one whose largest entry is positive.
    axes: Tensor
    shares: Tensor  # share of the variance along each axis, shape `(k,)`

    @classmethod
    def fit(cls, points: Tensor, *, axes: int = 2) -> Plane:
        """Find the principal components."""
        if not 1 <= axes <= min(points.shape):
            raise UsageError(f"{axes} axes cannot be drawn through points of shape {tuple(points.shape)}.")
        decomposition = library("sklearn.decomposition", "Principal components", "evidence")
        found = decomposition.PCA(axes, svd_solver="full").fit(points.double().numpy())
        center, directions = torch.from_numpy(found.mean_), torch.from_numpy(found.components_)
        largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
        shares = torch.from_numpy(found.explained_variance_ratio_).nan_to_num()  # 0 / 0 where all points are the same
        return cls(center, directions * largest.sign(), shares)

    def place(self, points: Tensor) -> Tensor:
        """Coordinates of points, shape `(n, k)`, float64."""
        return (points.double() - self.center) @ self.axes.T


@torch.no_grad()
def weight_changes(before: nn.Module, after: nn.Module) -> list[LayerChange]:
    """Compare the weights of two models layer by layer."""
    old, new = dict(before.named_parameters()), dict(after.named_parameters())
    differ = sorted(name for name in old.keys() | new.keys() if name not in old or name not in new)
    differ += [name for name in old.keys() & new.keys() if old[name].shape != new[name].shape]
    if differ:
        raise UsageError(
            f"The models differ in {len(differ)} parameters, such as {differ[0]!r}.",
            cure="Compare a model with its own later self; merge or remove adapters first.",
        )
    blocks = list(structure_of(before).blocks)
    groups: dict[str, list[str]] = {block: [] for block in blocks}
    for name in old:
        inside = next((block for block in blocks if name.startswith(f"{block}.")), name)
        groups.setdefault(inside, []).append(name)
    numbers = {block: number for number, block in enumerate(blocks)}
    return [
        _change(layer, [(old[name], new[name]) for name in names], numbers.get(layer))
        for layer, names in groups.items()
    ]


def _change(layer: str, pairs: Sequence[tuple[Tensor, Tensor]], block: int | None) -> LayerChange:
    moved = sum(float((new.double().cpu() - old.double().cpu()).square().sum()) for old, new in pairs) ** 0.5
    size = sum(float(old.double().square().sum()) for old, _ in pairs) ** 0.5
    return LayerChange(layer, moved, moved / size if size else 0.0, block)


# ---- the report -----------------------------------------------------------------------------------------------------

_DASHES = ("-", "--", "-.", ":")
_MARKS = {"harmful": "o", "harmless": "D"}
_DEPTH = "depth: 0 is the embedding, then after each block"


def distance_figure(changes: Mapping[str, Sequence[LayerChange]]) -> Figure:
    """Draw how far the blocks' weights moved: the distance of each, and relative to the size of its weights."""
    blocks = {name: [change for change in found if change.block is not None] for name, found in changes.items()}
    most = {name: max(found, key=lambda change: change.relative) for name, found in blocks.items() if found}
    told = {name: f"most in block {change.block}, by {change.relative:.1%}" for name, change in most.items()}
    words = "; ".join(told[name] if len(told) == 1 else f"{name} {told[name]}" for name in told)
    with canvas(2) as (drawing, axes):
        for place, (name, found) in enumerate(blocks.items()):
            x = [change.block or 0 for change in found]
            for panel, values in zip(
                axes, ([c.distance for c in found], [100 * c.relative for c in found]), strict=True
            ):
                _line(panel, x, values, name, place)
        _dress(axes[0], "block", "L2 distance")
        _dress(axes[1], "block", "of the weights' norm, %")
        if len(blocks) > 1:
            _legend(axes[0], drawing)
        return to_figure(
            drawing,
            alt=f"How far the weights of each block moved: {words}.",
            caption=f"How far the weights of each block moved, and relative to their own norm: {words}.",
        )


def lens_figure(before: LayerAnalysis, after: LayerAnalysis) -> Figure:
    """Draw the loss on answers if the model ended at each depth."""
    with canvas(2) as (drawing, axes):
        for panel, kind in zip(axes, KINDS, strict=True):
            for place, (name, look) in enumerate((("before", before), ("after", after))):
                batches = torch.tensor(look.lens[kind], dtype=torch.float64)
                _line(panel, range(batches.shape[1]), batches.mean(0).tolist(), name, place)
            _dress(panel, "depth", "nats per token")
            panel.set_title(f"{kind} answers")
        _legend(axes[0], drawing)
        ends = [torch.tensor(look.lens["harmful"], dtype=torch.float64).mean(0) for look in (before, after)]
        words = f"mean over depths on harmful answers: {ends[0].mean():.1f} before, {ends[1].mean():.1f} after"
        return to_figure(
            drawing,
            alt=f"Loss on answers through the final norm and the unembedding at each depth; {words}.",
            caption=f"Loss on answers if the model ended at a depth ({_DEPTH}); {words}. A guess has "
            f"{torch.tensor(float(before.vocabulary)).log():.1f}.",
        )


def probe_figure(before: LayerAnalysis, after: LayerAnalysis) -> Figure:
    """Draw how well a linear probe tells harmful from harmless answers, by depth, with the spread over splits."""
    with canvas(1) as (drawing, (axes,)):
        words = []
        for place, (name, look) in enumerate((("before", before), ("after", after))):
            table = torch.tensor(look.probes, dtype=torch.float64)
            _line(axes, range(len(table)), table.mean(1).tolist(), name, place)
            low, high = table.min(1).values.tolist(), table.max(1).values.tolist()
            axes.fill_between(range(len(table)), low, high, color=series_color(place), alpha=0.18, linewidth=0)
            words.append(f"{name} {table.mean():.2f}")
        _dress(axes, _DEPTH, "accuracy")
        worst = min(min(splits) for look in (before, after) for splits in look.probes)
        axes.set_ylim(min(0.45, worst - 0.05), 1.02)
        _legend(axes, drawing)
        told = f"mean over depths: {', '.join(words)}"
        return to_figure(
            drawing,
            alt=f"Accuracy of linear probes that tell harmful from harmless answers; {told}.",
            caption=f"Linear probes on mean representations of answers; bands reach from the worst to the best split; "
            f"0.5 is chance; {told}.",
        )


def plane_figure(before: LayerAnalysis, after: LayerAnalysis, depths: Sequence[int]) -> Figure:
    """Draw representations of answers before and after, in the plane in which they differed most before."""
    with canvas(2 * len(depths), height=2.5 * len(depths), across=2) as (drawing, axes):
        for row, depth in enumerate(depths):
            plane = Plane.fit(_both(before, depth))
            for panel, (name, look) in zip(axes[2 * row :], (("before", before), ("after", after)), strict=False):
                for place, kind in enumerate(KINDS):
                    x, y = plane.place(look.states[kind][depth]).T.tolist()
                    panel.scatter(x, y, s=9, marker=_MARKS[kind], color=series_color(place), alpha=0.6, label=kind)
                share = _share(plane, _both(look, depth))
                panel.set_title(f"depth {depth}, {name}: {share:.0%} of the variance")
                panel.tick_params(length=3)
                panel.locator_params(nbins=5)
                panel.margins(0.08)
        _legend(axes[0], drawing)
        return to_figure(
            drawing,
            alt="Mean representations of harmful and harmless answers, before and after the defense, in the plane of "
            "the first two principal components before.",
            caption="Mean representations of answers in the plane of the first two principal components before the "
            "defense. What of the variance a plane does not hold is not seen in it. Scales differ between pictures.",
        )


def _both(look: LayerAnalysis, depth: int) -> Tensor:
    return torch.cat([look.states[kind][depth] for kind in KINDS])


def _share(plane: Plane, points: Tensor) -> float:
    """Share of the variance of points that a plane holds; 0 if they do not vary."""
    whole = float(points.double().var(0, correction=0).sum())
    return float(plane.place(points).var(0, correction=0).sum()) / whole if whole else 0.0


def _line(axes: Axes, x: Sequence[float], y: Sequence[float], name: str, place: int) -> None:
    axes.plot(
        x, y, _DASHES[place % 4], color=series_color(place), label=name, linewidth=1.8,
        marker="o" if len(x) <= 12 else None, markersize=3.5,
    )  # fmt: skip


def _dress(axes: Axes, xlabel: str, ylabel: str) -> None:
    axes.grid(axis="y")
    axes.tick_params(length=3)
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))


def _legend(axes: Axes, drawing: Canvas) -> None:
    """Name the lines above the whole picture, where no panel is covered."""
    handles, labels = axes.get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside upper left", ncols=4, fontsize=8.5)


# Heading of the section.
TITLE = "Depth of the defense"

_INTRO = (
    "How deep a defense goes decides how much an attacker has to undo. Weights: how far each block moved. Lens: the "
    "loss on answers if the model ended at a depth, through its own final norm and unembedding. Probes: whether a "
    "logistic regression still tells representations of harmful from those of harmless answers; it is trained and "
    "tested on different pairs. None of this says how long the model resists; attacks do."
)


def depth_section(analysis: DepthAnalysis, *, seen: bool) -> Section:
    """Return what a defense did inside of a model; `seen` says whether it was trained on the pairs."""
    before, after = analysis.before, analysis.after
    depths = len(before.states[KINDS[0]])
    if (depths, before.pairs) != (len(after.states[KINDS[0]]), after.pairs):
        raise UsageError("The two analyses are of different pairs or models.", cure="Analyze the same pairs twice.")
    findings = [_weights(analysis), *(_lens(before, after, kind) for kind in KINDS), _probes(before, after)]
    halves, harmful, _, probes = findings
    facts = {
        "halves": f"{halves.value or 0:.2f}",
        "lens": f"from {harmful.baseline:.3g} to {harmful.value:.3g}",
        "probes": f"from {probes.baseline:.2f} to {probes.value:.2f}",
    }
    middle = (depths - 1) // 2
    return Section(
        TITLE,
        findings,
        figures=[
            distance_figure({"after the defense": analysis.changes}),
            lens_figure(before, after),
            probe_figure(before, after),
            plane_figure(before, after, sorted({middle, depths - 1})),
        ],
        tables=[_layers(analysis), _depths(before, after)],
        intro=f"{_INTRO}\n\nLooked at: {before.pairs} pairs "
        f"{'that the defense was trained on' if seen else 'that were kept from this defense'}.",
        question="How deep does the defense go?",
        conclusion=_CONCLUSION(findings, **facts)[1],
    )


def _weights(analysis: DepthAnalysis) -> Finding:
    moved = [change.relative for change in analysis.changes if change.block is not None]
    half = len(moved) // 2
    halves = [statistics.fmean(part) if part else 0.0 for part in (moved[:half], moved[len(moved) - half :])]
    return Finding(
        _HALVES,
        halves[0] / halves[1] if halves[1] else None,
        unit="×",
        detail={
            "mean change relative to the weights' norm": dict(zip(("first half", "second half"), halves, strict=True)),
            "note": "1 is uniform; near 0, the defense sits in the last blocks alone",
            **({} if halves[1] else {"reason": "the second half did not move" if half else "there is one block"}),
        },
    )


def _lens(before: LayerAnalysis, after: LayerAnalysis, kind: str) -> Finding:
    means = [[statistics.fmean(batch) for batch in look.lens[kind]] for look in (before, after)]
    return Finding(
        f"lens loss on {kind} answers, mean over depths",
        statistics.fmean(means[1]),
        ci95=t_interval(means[1]).ci95 if len(means[1]) > 1 else None,
        n=len(means[1]),
        unit="nats/token",
        baseline=statistics.fmean(means[0]),
        detail={"note": "n counts batches of eight pairs; the baseline is the model before its defense"},
    )


def _probes(before: LayerAnalysis, after: LayerAnalysis) -> Finding:
    """Mean accuracy over depths, one value per split."""
    means = [[statistics.fmean(split) for split in zip(*look.probes, strict=True)] for look in (before, after)]
    gap = t_interval([a - b for b, a in zip(*means, strict=True)])
    return Finding(
        "linear probes, harmful from harmless answers, mean over depths",
        statistics.fmean(means[1]),
        ci95=t_interval(means[1]).ci95,
        n=len(means[1]),
        unit="accuracy",
        baseline=statistics.fmean(means[0]),
        detail={
            "after less before, same splits": [gap.estimate, gap.low, gap.high],
            "note": "n counts random splits of the same pairs, which overlap: the interval is of the split alone",
        },
    )


def _words(moved: bool, *, halves: str, lens: str, probes: str) -> Words:
    where = f"The first half of the blocks moved {halves} times as far as the second. " if moved else ""
    return "told", (
        f"{where}The lens loss on harmful answers went {lens} nats per token, mean over depths; probes {probes}."
    )


_HALVES = "change of the weights, first half of the blocks by second"
_CONCLUSION = Conclusion("immunize: depth", [Measured(_HALVES)], _words)


def _layers(analysis: DepthAnalysis) -> Table:
    rows = [(change.layer, change.distance, 100 * change.relative) for change in analysis.changes]
    return Table("Change of weights by layer", ("layer", Column("L2 distance"), Column("relative", "%")), rows)


def _depths(before: LayerAnalysis, after: LayerAnalysis) -> Table:
    columns: list[Column | str] = ["depth"]
    columns += [Column(f"{kind}, {when}", "nats/token") for kind in KINDS for when in ("before", "after")]
    columns += [Column(f"probe, {when}", "accuracy") for when in ("before", "after")]
    lens = [
        [statistics.fmean(batch) for batch in zip(*look.lens[kind], strict=True)]
        for kind in KINDS
        for look in (before, after)
    ]
    found = [[statistics.fmean(splits) for splits in look.probes] for look in (before, after)]
    rows = [(depth, *values) for depth, values in enumerate(zip(*lens, *found, strict=True))]
    return Table("Lens and probes by depth", columns, rows, ("Depth 0 is the embedding, then after each block.",))


TREATMENT = "immunize"
# Names of the audits.
DEPTH, ATTACKED = "depth", "fine-tuning attack"
# The folder in a defended model's folder that holds the report of its making.
REPORT = "immunize-report"


def depth_audit(run: tuple[Path, Path], settings: object, *, seed: int, progress: Progress) -> Section:
    """Return what was found inside of a defended model, as its folder keeps it."""
    for section in read_report(run[0] / REPORT).sections:
        if section.title == TITLE:
            return section
    return Section(TITLE, [Finding(DEPTH, None, detail={"reason": "the layers were not analyzed when it was made"})])
