"""NeMo's figures on telling memorized prompts: noise differences, activations, and scores by kind of memorization."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

from netweight.methods.forget.detect import Score, roc
from netweight.methods.forget.layers import text_activations, value_layers
from netweight.methods.forget.report import DetectionSubject, detection
from netweight.report.finding import Figure
from netweight.report.plots import histogram
from netweight_experiments.tables.grid import Cell, grid
from netweight_experiments.tables.nemo.images import (
    KINDS,
    generate_images,
    images_run,
    kinds_of,
    middle_cells,
    percent,
)
from netweight_experiments.tables.nemo.setup import NONE, Setup, scores_of, statistics_of, threshold_of
from netweight_experiments.tables.registry import Column, Measured
from netweight_experiments.tables.setups import setup_table

_ORDINARY = "ordinary, held out"
_AUC = 0.98


@dataclass(frozen=True, eq=False)
class _Group:
    """Prompts of a kind and what was seen of each."""

    scores: tuple[Score, ...]
    ssim: tuple[float, ...] = ()  # the greatest to the training image
    copied: tuple[float, ...] = ()  # the greatest similarity to the training image

    def similar(self) -> list[float]:
        """Similarities of noise differences."""
        return [each.similarity for each in self.scores]

    def norms(self) -> list[float]:
        """Wen's norms."""
        return [each.wen for each in self.scores]


_PROMPTS: Cell[_Group] = (Column("prompts", "count"), lambda group: len(group.scores))
_SIMILARITY = "similarity of noise differences"


@setup_table("nemo-fig3")
def figure3(setup: Setup, folder: Path) -> Measured:
    """Draw how alike noise differences are, and how far activations lie out, of memorized and of other prompts."""
    limit, groups = threshold_of(setup, folder), _by_kind(setup, folder)
    others = groups[_ORDINARY]
    farthest = {name: _outliers(setup, folder, group) for name, group in groups.items()}
    far = dict(zip(groups.values(), farthest.values(), strict=True))

    def auc(values: Callable[[_Group], list[float]]) -> Callable[[_Group], float | None]:
        return lambda group: None if group is others else roc(values(group), values(others)).auc

    memorized = [score for group in groups.values() if group is not others for score in group.scores]
    found = detection(DetectionSubject(memorized, list(others.scores), limit)).findings
    first = replace(found[0], target=_AUC if setup.small and setup.whole else None)
    return grid(
        groups,
        [
            _PROMPTS,
            *middle_cells(_SIMILARITY, _Group.similar),
            (Column(f"{_SIMILARITY}, least", "score"), lambda group: min(group.similar())),
            (Column(f"{_SIMILARITY}, most", "score"), lambda group: max(group.similar())),
            (
                Column("above the threshold", "%"),
                lambda group: percent(sum(value > limit.value for value in group.similar()), len(group.scores)),
            ),
            (Column("AUC against ordinary prompts", "", "higher"), auc(_Group.similar)),
            (Column("Wen's norm, median"), lambda group: median(group.norms())),
            (Column("AUC of Wen's norm", "", "higher"), auc(_Group.norms)),
            (
                Column("greatest deviation in the first value layer, median", "standard deviations"),
                lambda group: median(far[group]),
            ),
        ],
        differs=setup.differs,
        findings=(first, *found[1:]),
        figures=(
            _similarities(
                {name: group.similar() for name, group in groups.items()},
                f"(a) Similarity of noise differences, the mean over {len(setup.detection.seeds)} seeds of each "
                f"prompt; the threshold is {limit.value:.3f} ({limit.rule}).",
            ),
            _activations(farthest),
        ),
        notes=(
            f"Threshold {limit.value:.4f} ({limit.rule}), calibrated on {limit.prompts} other ordinary prompts. The "
            "released code has 0.428 for Stable Diffusion 1.4, made by another protocol.",
        ),
    )


@setup_table("nemo-ssim-by-type")
def ssim_by_type(setup: Setup, folder: Path) -> Measured:
    """Draw the greatest similarity of images to their training image, and that of noise differences, by kind."""
    runs = {prompt: images_run(setup, NONE, "own", prompt) for prompt in setup.prompts}
    found = generate_images(setup, folder, list(runs.values()))
    groups = {}
    for name, group in _by_kind(setup, folder).items():
        own = [found[runs[each.prompt]] for each in group.scores if each.prompt in runs]
        ssim = tuple(max(each["ssim"]) for each in own if each["ssim"] is not None)
        groups[name] = replace(group, ssim=ssim, copied=tuple(max(each["to_image"]) for each in own))
    figures = [_similarities({name: group.similar() for name, group in groups.items()},
                             "Similarity of noise differences by kind of prompt.")]  # fmt: skip
    if any(group.ssim for group in groups.values()):
        caption = f"Greatest structural similarity of {setup.images} images to their training image, by kind."
        figures.insert(0, _similarities({name: group.ssim for name, group in groups.items()}, caption))
    greatest = "greatest SSIM to the training image"

    def end(of: Any) -> Callable[[_Group], float | None]:
        return lambda group: of(group.ssim, default=None)

    return grid(
        groups,
        [
            _PROMPTS,
            *middle_cells(greatest, attrgetter("ssim")),
            (Column(f"{greatest}, least", "score"), end(min)),
            (Column(f"{greatest}, most", "score"), end(max)),
            *middle_cells(f"greatest {setup.measure} to the training image", attrgetter("copied")),
            *middle_cells(_SIMILARITY, _Group.similar),
        ],
        differs=setup.differs,
        figures=tuple(figures),
        notes=(
            "Ordinary prompts have no training image. SSIM looks at whole images, a template's changing part too.",
            "Kinds are those that were planted." if setup.labelled else
            f"Verbatim are prompts with an image of {setup.measure} 0.7 or more to the training image.",
        ),
    )  # fmt: skip


def _by_kind(setup: Setup, folder: Path) -> dict[str, _Group]:
    kinds, scores = kinds_of(setup, folder), scores_of(setup, folder, setup.prompts)
    groups = {kind: tuple(each for each in scores if kinds[each.prompt] == kind) for kind in KINDS}
    groups[_ORDINARY] = tuple(scores_of(setup, folder, setup.held_out))
    return {name: _Group(group) for name, group in groups.items() if group}


def _outliers(setup: Setup, folder: Path, group: _Group) -> list[float]:
    """How many deviations the neuron of the first layer that lies farthest out is from its mean, prompt by prompt."""
    layers = value_layers(setup.model.denoiser)
    usual, first = statistics_of(setup, folder), next(iter(layers))
    found = []
    for score in group.scores:
        z = usual.z(text_activations(setup.model, layers, setup.model.embed([score.prompt])))
        found.append(float(z[first][0].max()))
    return found


def _similarities(groups: Mapping[str, Sequence[float]], caption: str) -> Figure:
    words = "; ".join(f"{name}: median {median(values):.2f}" for name, values in groups.items() if values)
    return histogram(groups, alt=f"Histogram of similarities. {words}.", caption=caption, xlabel="similarity",
                     ylabel="prompts")  # fmt: skip


def _activations(farthest: Mapping[str, Sequence[float]]) -> Figure:
    """One neuron of each prompt; all neurons would hide it among hundreds."""
    words = "; ".join(f"{name}: median {median(values):.1f}" for name, values in farthest.items())
    return histogram(
        farthest,
        alt=f"Histogram of the greatest deviation of an activation in the first value layer. {words}.",
        caption="(b) Neurons of the first value layer: how many standard deviations the farthest one of each prompt "
        "lies from its usual activation.",
        xlabel="standard deviations from the mean",
        ylabel="prompts",
    )
