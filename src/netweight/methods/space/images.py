"""What the points of a recipe look like: images by a pipeline, read by a reader, as an attack in recipes.

Images are of the points that the steps before have made, beside the training models nearest to them. A reader measures
attributes in images: how far points spread in them, what the directions of an edit change and what else, and how near
the point of one image comes to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from pydantic import Field, FilePath
from torch import Tensor

from netweight.core.lazy import import_named
from netweight.core.progress import Progress
from netweight.errors import UsageError
from netweight.hf.load_pipeline import load_text_to_image
from netweight.methods.space.audits import LEAST_AUDITED, spread_findings
from netweight.methods.space.edits import EditCurve, curve_findings, edit_curve
from netweight.methods.space.folder import invert_files
from netweight.methods.space.inversion import generate_images
from netweight.methods.space.points import Direction, NamedPoints, nearest
from netweight.methods.space.settings import FolderInversion
from netweight.methods.space.space import WeightSpace
from netweight.methods.space.steps import directions_in, points_in
from netweight.nn.text_to_image import TextToImage
from netweight.registry import Target
from netweight.report.finding import Figure, Finding, Section
from netweight.report.plots import image_grid
from netweight.report.text import Conclusion, Criterion, Words, worst
from netweight.settings import ModelPath, Settings

_SHOWN = 5  # points in the picture
_STRENGTHS = (1.0, 2.0, 3.0)  # of edits, in multiples of the farthest model


class PointImages(Settings):
    """What the points of a space look like."""

    pipeline: ModelPath = Field(description="The base model: a folder of a diffusers pipeline.")
    prompts: tuple[str, ...] = Field(("",), min_length=1, description="Prompts, an image of each with its own noise.")
    reader: str | None = Field(None, description='What measures attributes in images, "module:function".')
    models: int = Field(24, ge=5, description="Training models that are read to compare with.")
    edited: int = Field(8, ge=1, description="Training models that are moved along each direction.")
    guidance: float = Field(3.0, description="Scale of classifier-free guidance.")
    steps: int = Field(50, ge=1, description="Steps of the scheduler.")
    image: FilePath | None = Field(None, description="An image whose point is sought.")
    inversion_steps: int = Field(400, ge=1, description="Steps of that search.")
    device: str = Field("cpu", description="Where the pipeline goes, such as cuda.")


@final
@dataclass(frozen=True, eq=False)
class _World:
    model: TextToImage
    space: WeightSpace
    settings: PointImages
    names: tuple[str, ...]  # of the reader's attributes

    def generate(self, scores: Tensor) -> Tensor:
        seeds = range(len(self.settings.prompts))
        how: Any = {"guidance": self.settings.guidance, "steps": self.settings.steps}
        return generate_images(self.model, self.space, scores, self.settings.prompts, seeds, **how)

    def read(self, images: Tensor) -> Tensor:
        """Attributes of images `(n, 3, height, width)`, shape `(n, attributes)`."""
        found = import_named(str(self.settings.reader), "The reader")(images)
        return torch.stack([found[name] for name in self.names], 1)

    def of(self, scores: Tensor) -> Tensor:
        """Attributes of points, the mean over their images."""
        images = self.generate(scores)
        return self.read(images.flatten(0, 1)).view(len(scores), len(self.settings.prompts), -1).mean(1)


def attack(target: Target, settings: PointImages, progress: Progress) -> Section:
    space, _, points = points_in(target.model, "mean")
    model = load_text_to_image(settings.pipeline, dtype=torch.float32, device=settings.device)
    world = _World(model, space, settings, ())
    findings, told, figures = [], [], [_neighbors(world, points)]
    if settings.reader is not None:
        first = import_named(settings.reader, "The reader")(world.generate(space.scores[:1]).flatten(0, 1))
        world = replace(world, names=tuple(first))
        trained = world.of(space.scores[: settings.models])
        if min(len(points.scores), len(trained)) >= LEAST_AUDITED:
            findings += spread_findings(world.of(points.scores), trained, world.names, seed=target.seed)
        ranges = (trained.max(0).values - trained.min(0).values).tolist()
        for direction in directions_in(target.model):
            if direction.name in world.names:
                found, words = _edited(world, direction, ranges, target.seed)
                findings += found
                told.append(words)
        if settings.image is not None:
            figure, finding, words = _inverted(world, ranges, target, progress)
            figures.append(figure)
            findings.append(finding)
            told.append(words)
    # Targets are for banks of a thousand models, and for more images than these.
    return Section(
        "Images", [replace(each, target=None) for each in findings], figures=figures,
        question="What do points look like, and what do edits change?",
        intro="Images of each point, from the same noise. Attributes are read from images; edits move training models "
        "along a direction, by multiples of the farthest model.",
        conclusion=" ".join(words for _, words in told), outcome=worst(outcome for outcome, _ in told),
    )  # fmt: skip


def _neighbors(world: _World, points: NamedPoints) -> Figure:
    scores = points.scores[:_SHOWN]
    near = [found[0] for found in nearest(scores, world.space.scores, world.space.names, count=1)]
    both = world.generate(torch.cat([scores, world.space.scores[[each.number for each in near]]]))
    rows = [[each[0].permute(1, 2, 0) for each in part] for part in (both[: len(scores)], both[len(scores) :])]
    return image_grid(
        rows, rows=["the point", "nearest model"], columns=[f"cosine {each.cosine:.2f}" for each in near],
        alt="Images of points above those of the training models nearest to them.",
        caption="Points, and the training models nearest to them.", pixels=64,
    )  # fmt: skip


def _edited(world: _World, direction: Direction, ranges: Sequence[float], seed: int) -> tuple[list[Finding], Words]:
    curve: EditCurve = edit_curve(
        world.generate, world.read, world.space.scores[: world.settings.edited], direction, names=world.names,
        ranges=list(ranges), strengths=_STRENGTHS,
    )  # fmt: skip
    effect, cost = float(curve.effects[-1].mean()), float(curve.costs[-1].mean())
    found = [Finding("effect of the edit", effect, baseline=cost)]
    words = _EDIT(found, column=direction.name, effect=f"{effect:.2f}", cost=f"{cost:.2f}")
    return curve_findings(curve, seed=seed), words


def _moves(moved: bool, *, column: str, effect: str, cost: str) -> Words:
    numbers = f"{effect} of its range, others by {cost} of theirs"
    if moved:
        return "holds", f"An edit along {column} moves it by {numbers}."
    return "partly", f"An edit along {column} does not move it most: by {numbers}."


_EDIT = Conclusion("space: edit", [Criterion("effect of the edit", "higher", strict=True)], _moves)


def _inverted(
    world: _World, ranges: Sequence[float], target: Target, progress: Progress
) -> tuple[Figure, Finding, Words]:
    """The point of one image; how far off what it draws is, and what the mean model draws."""
    settings = world.settings
    assert settings.image is not None
    how = FolderInversion(
        pipeline=settings.pipeline, prompt=settings.prompts[0], steps=settings.inversion_steps, draws=4,
        device=settings.device, seed=target.seed,
    )  # fmt: skip
    found = invert_files(
        [settings.image], how, lambda: world.space, out=target.output / "inversions", progress=progress
    )
    from netweight.data.images.pictures import decode_pictures

    images = world.generate(torch.cat([found.scores, torch.zeros_like(found.scores)]))
    size = (int(images.shape[3]), int(images.shape[4]))
    decoded = decode_pictures([[("the image", str(settings.image))]], of="the image", size=size, fit="crop")
    image = decoded.splits[0].float() / 255
    truth = world.read(image)
    spans = torch.tensor(ranges)
    apart, usual = (float(((world.read(each) - truth).abs().mean(0) / spans).mean()) for each in images)
    finding = Finding(_INVERTED, apart, n=1, better="lower", baseline=usual, seeds=(target.seed,),
                      detail={"steps": settings.inversion_steps})  # fmt: skip
    words = _FOUND([finding], apart=f"{apart:.2f}", usual=f"{usual:.2f}")
    figure = image_grid(
        [[each.permute(1, 2, 0) for each in (image[0], *images[0])]], rows=["inverted"],
        columns=["the image", *(f"image {number}" for number in range(1, len(images[0]) + 1))],
        alt="An image, and images of the point that it was inverted into.",
        caption="The image that was inverted, and what its point draws under each prompt.", pixels=64,
    )  # fmt: skip
    return figure, finding, words


def _inversion(nearer: bool, *, apart: str, usual: str) -> Words:
    numbers = f"off by {apart} of attributes' ranges, the mean model by {usual}"
    if nearer:
        return "holds", f"One image is inverted into somebody more alike than the mean: {numbers}."
    return "partly", f"Inversion of one image is no better than the mean model: {numbers}."


_INVERTED = "attributes of the inverted image, mean error as a share of their range"
_FOUND = Conclusion("space: inversion", [Criterion(_INVERTED, "lower", strict=True)], _inversion)


def check(model: Path | None, settings: PointImages) -> None:
    if settings.reader is not None:
        import_named(settings.reader, "The reader")
    elif settings.image is not None:
        raise UsageError("An image is inverted, and nothing reads what comes of it.", cure="Name a reader.")
