"""Where the tables of weights2weights are measured: a model, a space of its adapters, people, and what reads images.

`space_miniature` makes the small ground of drawn faces that come with the package, `space_files` the paper's size of a
recipe of the user's. All tables of a scale share one folder, so that what one has computed the others take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, final

from netweight.core.digest import of_config, of_tensor
from netweight.errors import UsageError
from netweight.reproduce.registry import Measured, Scale, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from netweight.hf.load_pipeline import PipelineModel
    from netweight.methods.space.edits import Compare
    from netweight.methods.space.labels import Labels
    from netweight.methods.space.settings import InversionSettings
    from netweight.methods.space.space import WeightSpace
    from netweight.metrics.copies import Descriptor
    from netweight.nn.lora import Adapter
    from netweight.nn.train_lora import AdapterRecipe

__all__ = ["PAPER_NEEDS", "Fitting", "Ground", "Stranger", "Wanted", "folder_of", "ground_of", "space_table"]

NEEDS = ("diffusion", "evidence")
PAPER_NEEDS = (
    "a recipe that names Stable Diffusion, a bank of the published adapters, labels, photographs and a face "
    "recognition network (recipes/space-tables.yaml), a GPU",
)

Match: TypeAlias = "Callable[[Wanted, Tensor], Tensor]"


@final
@dataclass(frozen=True)
class Wanted:
    """An edit.

    Attributes:
        title: What the paper calls it.
        column: The label that it raises.
        prompt: What asks for it in words; None where no words at hand do.
        confounders: Labels that are to stay as they are.
        text: What images should show after it, for CLIP.
        slider: Whether there is a Concept Slider for it.
    """

    title: str
    column: str
    prompt: str | None = None
    confounders: tuple[str, ...] = ()
    text: str = ""
    slider: bool = True


@final
@dataclass(frozen=True, eq=False)
class Stranger:
    """Somebody who is in no bank.

    Attributes:
        name: Of the person.
        images: Photographs to learn from, shape `(m, 3, height, width)`, within 0 and 1; the first alone stands for
            "one image".
        prompts: One for each.
        others: Photographs that nothing learns from, which tell whether the person is met.
        truth: The person's attributes, where they are known, shape `(a,)`.
    """

    name: str
    images: Tensor
    prompts: tuple[str, ...]
    others: Tensor
    truth: Tensor | None = None


@final
@dataclass(frozen=True)
class Fitting:
    """How people are put into the model.

    Attributes:
        recipe: Of adapters.
        layers: That adapters change.
        each: Noisy images of a person at a step, of adapters.
        draws: The same of inversion.
        inversion: Settings of the descent.
        said: The prediction that its error is counted in.
        together: People at a time.
    """

    recipe: AdapterRecipe
    layers: str
    each: int
    draws: int
    inversion: InversionSettings
    said: Literal["velocity", "noise", "sample"]
    together: int = 32


@final
@dataclass(frozen=True, eq=False)
class Ground:
    """A space and what is asked of it.

    Attributes:
        model: The model.
        space: Of its adapters.
        labels: Of the same adapters.
        wanted: Edits of table 1.
        held: Rows of the adapters that no direction is found from; edits are tuned and measured on them.
        people: How many of them are edited.
        strangers: People who are in no bank.
        prompts: One for all images of a person, or one for each seed.
        seeds: Of a person's images.
        guidance: Of generations.
        steps: Of their scheduler.
        identity: Attribute that is edited, or None → descriptor of the person.
        identity_name: What the score is called.
        distance: How far images of an edit are from those before, and its name.
        match: How well images show an edit, one number per image.
        match_name: What that is called.
        effect: Edits are made so strong that the match grows by so much on people who are not measured; None for each
            way's own strength.
        read: Reads all attributes of images, shape `(n, a)`; None if nothing at hand can.
        attributes: Their names; each reaches from -1 to 1.
        sliders: Title of an edit → its Concept Slider; trained or opened when it is called.
        fitting: How people are put into the model.
        small: Whether this is the miniature.
        differs: How this differs from the paper's set-up, one sentence each.
        rows: Most images that are painted at a time.
    """

    model: PipelineModel
    space: WeightSpace
    labels: Labels
    wanted: tuple[Wanted, ...]
    held: tuple[int, ...]
    people: int
    strangers: tuple[Stranger, ...]
    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    guidance: float
    steps: int
    identity: Callable[[str | None], Descriptor]
    identity_name: str
    distance: tuple[str, Compare]
    match: Match
    match_name: str
    effect: float | None
    read: Callable[[Tensor], Tensor] | None
    attributes: tuple[str, ...]
    sliders: Callable[[], Mapping[str, Adapter]]
    fitting: Fitting
    small: bool
    differs: tuple[str, ...]
    rows: int = 64

    @cached_property
    def digest(self) -> str:
        """Digest of everything that decides on numbers."""
        strangers = [[one.name, of_tensor(one.images), of_tensor(one.others)] for one in self.strangers]
        labels = {name: of_tensor(column.values) for name, column in self.labels.columns.items()}
        drawn = [self.prompts, self.seeds, self.guidance, self.steps, self.held, self.people]
        named = [self.identity_name, self.distance[0], self.match_name, self.effect]
        return of_config([
            self.model.digest(), of_tensor(self.space.scores), labels, strangers, drawn, named, self.wanted,
            self.fitting,
        ])  # fmt: skip

    @cached_property
    def learned(self) -> tuple[int, ...]:
        """Rows of the adapters that directions are found from."""
        held = set(self.held)
        return tuple(row for row in range(len(self.space.names)) if row not in held)

    def part(self, rows: Sequence[int] | None = None) -> tuple[Tensor, Labels]:
        """Return scores and labels of some rows; by default of `learned`."""
        from netweight.methods.space.labels import Column, Labels

        chosen = list(self.learned if rows is None else rows)
        columns = {name: Column(name, column.values[chosen]) for name, column in self.labels.columns.items()}
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

    def tried(self, people: int | None) -> Ground:
        """Return a smaller ground, for a try.

        Args:
            people: So many people are edited and so many strangers met, 5 or more.

        Raises:
            UsageError: They are fewer, or more than there are.
        """
        if people is None:
            return self
        if not 5 <= people <= len(self.strangers):
            raise UsageError(f"{people} people cannot be tried.", cure=f"Give 5 to {len(self.strangers)}.")
        fitting = replace(
            self.fitting, recipe=replace(self.fitting.recipe, steps=10),
            inversion=self.fitting.inversion.replace(steps=10),
        )  # fmt: skip
        return replace(self, people=people, strangers=self.strangers[:people], fitting=fitting)


def space_table(table_id: str) -> Callable[[Callable[[Ground, Path], Measured]], Callable[..., Measured]]:
    """Register a table of weights2weights: a function of the ground and of the folder that all of them share.

    As a table it takes `recipe` (see `recipes/space-tables.yaml`), and for a try `people`, see `Ground.tried`. It
    raises `UsageError` if the recipe is missing or wrong, and `NetweightError` if a run failed.

    Args:
        table_id: Its name.
    """

    def register(measure: Callable[[Ground, Path], Measured]) -> Callable[..., Measured]:
        def run(scale: Scale, out: Path, *, recipe: Path | None = None, people: int | None = None) -> Measured:
            ground = ground_of(scale, recipe).tried(people)
            inputs = {"model": ground.model.digest(), "bank": ground.space.bank_digest}
            return replace(measure(ground, folder_of(out, scale)), inputs=inputs)

        run.__doc__ = measure.__doc__
        return table(table_id, needs=NEEDS, paper_needs=PAPER_NEEDS, stand_in=True)(run)

    return register


def ground_of(scale: Scale, recipe: Path | str | None = None) -> Ground:
    """Open the ground of a scale.

    Args:
        scale: "small" for the miniature, "paper" for what a recipe names.
        recipe: The recipe's file, for "paper".

    Raises:
        UsageError: The recipe is missing at "paper" or given at "small", or something in it is wrong.
    """
    if scale == "small":
        if recipe is not None:
            raise UsageError(
                "The small scale of these tables has a bank of its own.",
                cure="Give --recipe together with --scale paper.",
            )
        from netweight.reproduce.space_miniature import miniature

        return miniature()
    if recipe is None:
        raise UsageError(
            "These tables at the paper's scale are measured on a pipeline and adapters that you have.",
            cure="Copy recipes/space-tables.yaml, fill it in, and give it with --recipe FILE.",
        )
    from netweight.reproduce.space_files import ground_of_recipe

    return ground_of_recipe(Path(recipe))


def folder_of(out: Path, scale: Scale) -> Path:
    """Return the folder that all of these tables of a scale share, beside a table's own."""
    return out.parent / f"w2w-runs-{scale}"
