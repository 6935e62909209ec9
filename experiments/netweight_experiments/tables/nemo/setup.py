"""Where NeMo's tables are measured: a model that has memorized, its prompts, its neurons, and mitigations as data.

`openers` makes the small setup of what comes with the package and the paper's size of a recipe of the user's. All
tables of a scale share one folder, so that what one of them has computed the others take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from torch import Tensor

from netweight.attacks.embedding_search.settings import SearchSettings
from netweight.core.digests import digest_config, digest_tensor
from netweight.core.names import Units
from netweight.core.progress import Progress
from netweight.errors import UsageError
from netweight.methods.forget.detect import MemorizationScore, Threshold, calibrate, detect_resumably
from netweight.methods.forget.layers import Statistics, measure_statistics, value_layers
from netweight.methods.forget.localize import Localization, localize
from netweight.methods.forget.mitigations import (
    AllActive,
    AttentionScaling,
    DeactivatedNeurons,
    EmbeddingAdjustment,
    Mitigation,
    RandomTokens,
    WeightPruning,
    neuron_counts,
    random_units,
)
from netweight.methods.forget.settings import DetectionConfig, LocalizationConfig
from netweight.metrics.copies import MemorizedImage
from netweight.metrics.descriptors import Descriptor

if TYPE_CHECKING:
    from netweight.hf.load_pipeline import PipelineModel


# Noises that a prompt is looked at with: the paper's.
DETECTION_SEEDS = 10

OfImages: TypeAlias = "Callable[[Sequence[str], Tensor], list[float]]"
OfSets: TypeAlias = "Callable[[Tensor], dict[str, float]]"


@dataclass(frozen=True, eq=False)
class Setup:
    """A model and what it is asked."""

    model: PipelineModel
    memorized: tuple[MemorizedImage, ...]
    """Prompts with their training images."""
    labelled: bool
    """Whether it is known which are verbatim; else it is measured, see `images.kinds_of`."""
    usual: tuple[str, ...]
    """Prompts that usual activations are measured on."""
    calibration: tuple[str, ...]
    """Ordinary prompts that the threshold is calibrated on."""
    held_out: tuple[str, ...]
    """Ordinary prompts that tell how well it does."""
    quality: tuple[str, ...]
    """Ordinary prompts whose images tell what an edit costs."""
    statistics: Path | None
    """A file of usual activations in place of measured ones."""
    descriptor: Descriptor | None
    """What compares images; None takes `CenteredPixels`, for a template on the part that stays."""
    measure: str
    """What it is called."""
    alignment: OfImages | None
    """How well each image follows its prompt, planted ones too; None if nothing at hand can tell."""
    alignment_name: str
    """What that is called."""
    faithful: OfImages | None
    faithful_name: str
    """What that is called."""
    distances: OfSets | None
    """How far images of `quality` are from what they should look like, by name; None if nothing can tell."""
    detection: DetectionConfig
    """How prompts are looked at."""
    images: int
    """Images per memorized prompt."""
    guidance: float
    steps: int
    search: SearchSettings
    """How an adversary searches."""
    small: bool
    """Whether this is the miniature."""
    differs: tuple[str, ...]
    """How this differs from the paper's set-up, one sentence each."""
    whole: bool = True
    """Whether nothing is left out; a try meets no targets."""

    @property
    def prompts(self) -> list[str]:
        """The memorized prompts."""
        return [each.prompt for each in self.memorized]

    @cached_property
    def digest(self) -> str:
        """Digest of everything that decides on images and their numbers, but for what is done to the model."""
        pictures = [[each.prompt, each.kind, digest_tensor(each.image)] for each in self.memorized]
        named = [self.measure, self.alignment_name, self.faithful_name, self.images, self.guidance, self.steps]
        return digest_config([self.model.digest(), pictures, self.labelled, self.quality, named, self.search])

    @property
    def inputs(self) -> dict[str, str]:
        """Digests of what is measured."""
        return {"model": self.model.digest()}

    def tried(self, prompts: int | None = None, images: int | None = None) -> Setup:
        """Return a smaller setup, for a try."""
        setup = replace(self, whole=prompts is None and images is None)
        if prompts is not None:
            if not 2 <= prompts <= len(self.memorized):
                raise UsageError(f"{prompts} of {len(self.memorized)} memorized prompts cannot be tried.")
            places = [round(place * (len(self.memorized) - 1) / (prompts - 1)) for place in range(prompts)]
            setup = replace(setup, memorized=tuple(self.memorized[place] for place in places))
        if images is not None:
            if images < 2:
                raise UsageError(f"{images} images per prompt are too few for a try.", cure="Give 2 or more.")
            detection = self.detection.replace(seeds=tuple(range(images)))
            few = 3 * images
            steps = min(self.steps, few)
            search = self.search.replace(steps=few, images=images, generation_steps=steps)
            setup = replace(
                setup, images=images, steps=steps, detection=detection, search=search, quality=self.quality[:few],
                calibration=self.calibration[: 2 * few], held_out=self.held_out[:few],
            )  # fmt: skip
        return setup


Kind = Literal["none", "neurons", "embedding", "attention", "tokens", "pruning"]
# Ordinary prompts that pruning compares a memorized one with, and steps of their generations.
_PRUNED, _PRUNED_STEPS = 6, 5


@dataclass(frozen=True)
class Way:
    """A way of generating."""

    kind: Kind
    """Which mitigation."""
    units: str = ""
    """Neurons, as JSON, for "neurons"."""
    factor: float = 0.0
    """What their outputs are multiplied by."""
    count: int = 0
    """Tokens, for "tokens"."""

    @property
    def name(self) -> str:
        """For messages."""
        digest = digest_config(self.units).rpartition(":")[2][:8]
        return f"neurons-{digest}x{self.factor:g}" if self.kind == "neurons" else self.kind + str(self.count or "")

    @property
    def knows_prompts(self) -> bool:
        """Whether what it does depends on which prompts it is told are memorized."""
        return self.kind in ("embedding", "attention", "pruning")


NONE, EMBEDDING, ATTENTION, PRUNING = Way("none"), Way("embedding"), Way("attention"), Way("pruning")


def tokens(count: int) -> Way:
    """Return the way of so many random tokens."""
    return Way("tokens", count=count)


def off(units: Units, factor: float = 0.0) -> Way:
    """Return the way of switching neurons off, or of scaling them."""
    return Way("neurons", units.to_json(), factor)


def whole(setup: Setup, layer: str | None = None) -> Way:
    """Return the way of switching off all neurons of the down and middle blocks, or of one layer."""
    counts = neuron_counts(setup.model.denoiser)
    return off(Units({name: range(count) for name, count in counts.items() if layer in (None, name)}))


def random_off(setup: Setup, like: Units, *, layer_matched: bool, seed: int) -> Way | None:
    """Return the way of switching off as many other neurons; None where there are not so many."""
    try:
        counts = neuron_counts(setup.model.denoiser)
        return off(random_units(like, counts, layer_matched=layer_matched, seed=seed))
    except UsageError:
        return None


def mitigation(way: Way, setup: Setup) -> Mitigation:
    """Return what a way does, on a setup."""
    from netweight.hf.load_pipeline import one_token_words, padding_masks

    if way.kind == "neurons":
        return DeactivatedNeurons(Units.from_json(way.units), factor=way.factor)
    if way.kind == "embedding":
        return EmbeddingAdjustment(steps=setup.detection.steps)
    if way.kind == "attention":
        return AttentionScaling(padding_masks(setup.model))
    if way.kind == "tokens":
        return RandomTokens(way.count, one_token_words(setup.model))
    if way.kind == "pruning":
        return WeightPruning(setup.calibration[:_PRUNED], steps=_PRUNED_STEPS)
    return AllActive()


def scores_of(setup: Setup, folder: Path, prompts: Sequence[str]) -> list[MemorizationScore]:
    """Score prompts by how alike their noise differences are; what the folder remembers is not scored again."""
    return detect_resumably(setup.model, prompts, setup.detection, folder=folder, progress=Progress("auto"))


def threshold_of(setup: Setup, folder: Path) -> Threshold:
    """Calibrate the threshold on the setup's ordinary prompts by the paper's rule."""
    return calibrate(scores_of(setup, folder, setup.calibration), model=setup.model.identity())


def statistics_of(setup: Setup, folder: Path) -> Statistics:
    """Return usual activations: read from the user's file, or measured once and kept in the folder."""
    given = setup.statistics
    if given is not None:
        layers = value_layers(setup.model.denoiser)
        return Statistics.read_published(given, layers) if given.suffix == ".pt" else Statistics.read(given)
    named = digest_config([setup.model.digest(), setup.usual]).rpartition(":")[2][:16]
    kept = folder / f"statistics-{named}.safetensors"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        measure_statistics(setup.model, setup.usual, progress=Progress("auto")).write(kept)
    return Statistics.read(kept)


def neurons_of(
    setup: Setup, folder: Path, config: LocalizationConfig | None = None, *, threshold: Threshold | None = None
) -> dict[str, Localization]:
    """Find every memorized prompt's neurons; what the folder remembers is not searched again."""
    found = localize(
        setup.model,
        setup.prompts,
        statistics_of(setup, folder),
        threshold or threshold_of(setup, folder),
        config or LocalizationConfig(detection=setup.detection),
        folder=folder,
        progress=Progress("auto"),
    )
    return {each.prompt: each for each in found}


def searched(found: Mapping[str, Localization]) -> dict[str, Localization]:
    """Return those prompts whose neurons were looked for to the end: memorized ones whose search did not fail."""
    return {prompt: each for prompt, each in found.items() if each.status in ("resolved", "unresolved")}


def union(found: Sequence[Localization]) -> Units:
    """Return the neurons of several prompts together, each once."""
    together = Units()
    for each in found:
        together = together | each.neurons
    return together


def status_notes(found: Mapping[str, Localization]) -> tuple[str, ...]:
    """Name the prompts for which neurons do not suffice, were not looked for, or could not be."""
    words = {
        "unresolved": "Unresolved, as even the last stage of the search did not reach the threshold",
        "not memorized": "Not taken for memorized, so that nothing was looked for",
        "failed": "The search failed and is tried again by the next call; left out of what follows from neurons",
    }
    notes = []
    for status, saying in words.items():
        prompts = [prompt for prompt, each in found.items() if each.status == status]
        if prompts:
            notes.append(f"{saying} ({len(prompts)} of {len(found)} prompts): {'; '.join(prompts)}.")
    return tuple(notes)
