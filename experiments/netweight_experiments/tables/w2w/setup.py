"""Where the tables of weights2weights are measured: a model, a space of its adapters, people, and what reads images.

`openers` makes the small setup of drawn faces that come with the package and the paper's size of a recipe of the
user's. All tables of a scale share one folder, so that what one has computed the others take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeAlias, final

from torch import Tensor

from netweight.core.digests import digest_config, digest_tensor
from netweight.errors import UsageError
from netweight.methods.space.edits import Compare
from netweight.methods.space.labels import LabelColumn, Labels
from netweight.methods.space.settings import InversionSettings
from netweight.methods.space.space import WeightSpace
from netweight.metrics.descriptors import Descriptor
from netweight.nn.lora import Adapter
from netweight.nn.train_lora import AdapterRecipe

if TYPE_CHECKING:
    from netweight.hf.load_pipeline import PipelineModel


Match: TypeAlias = "Callable[[Wanted, Tensor], Tensor]"


@final
@dataclass(frozen=True)
class Wanted:
    """An edit."""

    title: str
    """What the paper calls it."""
    column: str
    """The label that it raises."""
    prompt: str | None = None
    """What asks for it in words; None where no words at hand do."""
    confounders: tuple[str, ...] = ()
    """Labels that are to stay as they are."""
    text: str = ""
    """What images should show after it, for CLIP."""
    slider: bool = True
    """Whether there is a Concept Slider for it."""


@final
@dataclass(frozen=True, eq=False)
class Stranger:
    """Somebody who is in no bank."""

    name: str
    images: Tensor
    """Photographs to learn from, shape `(m, 3, height, width)`, within 0 and 1; the first alone stands for "one
    image".
    """
    prompts: tuple[str, ...]
    others: Tensor
    """Photographs that nothing learns from, which tell whether the person is met."""
    truth: Tensor | None = None
    """The person's attributes, where they are known, shape `(a,)`."""


@final
@dataclass(frozen=True)
class Fitting:
    """How people are put into the model."""

    recipe: AdapterRecipe
    layers: str
    """That adapters change."""
    each: int
    """Noisy images of a person at a step, of adapters."""
    draws: int
    inversion: InversionSettings
    """Settings of the descent."""
    said: Literal["velocity", "noise", "sample"]
    """The prediction that its error is counted in."""
    together: int = 32
    """People at a time."""


@final
@dataclass(frozen=True, eq=False)
class Setup:
    """A space and what is asked of it."""

    model: PipelineModel
    space: WeightSpace
    labels: Labels
    wanted: tuple[Wanted, ...]
    """Edits of table 1."""
    held: tuple[int, ...]
    """Rows of the adapters that no direction is found from; edits are tuned and measured on them."""
    people: int
    """How many of them are edited."""
    strangers: tuple[Stranger, ...]
    """People who are in no bank."""
    prompts: tuple[str, ...]
    """One for all images of a person, or one for each seed."""
    seeds: tuple[int, ...]
    guidance: float
    steps: int
    identity: Callable[[str | None], Descriptor]
    """Attribute that is edited, or None → descriptor of the person."""
    identity_name: str
    """What the score is called."""
    distance: tuple[str, Compare]
    """How far images of an edit are from those before, and its name."""
    match: Match
    """How well images show an edit, one number per image."""
    match_name: str
    """What that is called."""
    effect: float | None
    """Edits are made so strong that the match grows by so much on people who are not measured; None for each way's
    own strength.
    """
    read: Callable[[Tensor], Tensor] | None
    """Reads all attributes of images, shape `(n, a)`; None if nothing at hand can."""
    attributes: tuple[str, ...]
    """Their names; each reaches from -1 to 1."""
    sliders: Callable[[], Mapping[str, Adapter]]
    """Title of an edit → its Concept Slider; trained or opened when it is called."""
    fitting: Fitting
    """How people are put into the model."""
    small: bool
    """Whether this is the miniature."""
    differs: tuple[str, ...]
    """How this differs from the paper's set-up, one sentence each."""
    rows: int = 64
    """Most images that are painted at a time."""

    @cached_property
    def digest(self) -> str:
        """Digest of everything that decides on numbers."""
        strangers = [[one.name, digest_tensor(one.images), digest_tensor(one.others)] for one in self.strangers]
        labels = {name: digest_tensor(column.values) for name, column in self.labels.columns.items()}
        drawn = [self.prompts, self.seeds, self.guidance, self.steps, self.held, self.people]
        named = [self.identity_name, self.distance[0], self.match_name, self.effect]
        return digest_config([
            self.model.digest(), digest_tensor(self.space.scores), labels, strangers, drawn, named, self.wanted,
            self.fitting,
        ])  # fmt: skip

    @cached_property
    def learned(self) -> tuple[int, ...]:
        """Rows of the adapters that directions are found from."""
        held = set(self.held)
        return tuple(row for row in range(len(self.space.names)) if row not in held)

    def part(self, rows: Sequence[int] | None = None) -> tuple[Tensor, Labels]:
        """Return scores and labels of some rows; by default of `learned`."""
        chosen = list(self.learned if rows is None else rows)
        columns = {name: LabelColumn(name, column.values[chosen]) for name, column in self.labels.columns.items()}
        return self.space.scores[chosen], Labels(tuple(self.labels.names[row] for row in chosen), columns)

    def without(self, wanted: Wanted) -> tuple[list[int], list[int]]:
        """Return rows of held people who have little of an attribute: those to measure, and those to tune on."""
        values = self.labels[wanted.column].values
        middle = float(values[values.isfinite()].median()) if self.labels[wanted.column].kind == "continuous" else None
        low = min(self.labels[wanted.column].levels)
        rows = [row for row in self.held if (values[row] < middle if middle is not None else values[row] == low)]
        if len(rows) < 5:
            raise UsageError(
                f"{len(rows)} of {len(self.held)} held people have little of {wanted.column!r}, which is too few.",
                cure="Give more adapters.",
            )
        measured = min(self.people, 2 * len(rows) // 3)
        return rows[:measured], rows[measured:][: max(measured // 2, 2)]

    @property
    def inputs(self) -> dict[str, str]:
        """Digests of what is measured."""
        return {"model": self.model.digest(), "bank": self.space.bank_digest}

    def tried(self, people: int | None = None) -> Setup:
        """Return a smaller setup, for a try."""
        if people is None:
            return self
        if not 5 <= people <= len(self.strangers):
            raise UsageError(f"{people} people cannot be tried.", cure=f"Give 5 to {len(self.strangers)}.")
        fitting = replace(
            self.fitting, recipe=replace(self.fitting.recipe, steps=10),
            inversion=self.fitting.inversion.replace(steps=10),
        )  # fmt: skip
        return replace(self, people=people, strangers=self.strangers[:people], fitting=fitting)
