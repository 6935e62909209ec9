"""What is painted under each mitigation, and what it repeats: one remembered run per mitigation and prompt.

A run paints the memorized prompt itself, ordinary prompts while the mitigation is at work, or the other memorized
prompts. Images of one prompt have the same seeds under every mitigation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

from netweight.core.seeds import derive
from netweight.reproduce.kept_pictures import as_text
from netweight.reproduce.nemo_ground import Ground
from netweight.reproduce.nemo_ways import NONE, Way, mitigation
from netweight.reproduce.resumed import run_each

if TYPE_CHECKING:
    from torch import Tensor

    from netweight.metrics.copies import Kind, Memorized
    from netweight.nn.text_to_image import TextToImage

__all__ = ["Painting", "Results", "kinds_of", "paint", "painting", "shown"]

On = Literal["own", "ordinary", "others"]
_OTHERS, _OTHER_SEEDS = 12, 2
_SHOWN = 96
"""Pixels of a remembered picture's side, at most."""


@final
@dataclass(frozen=True)
class Painting:
    """One run.

    Attributes:
        way: What is done to the model.
        on: "own" paints the prompt; "ordinary" the ground's ordinary prompts; "others" other memorized prompts.
        prompt: The memorized prompt that the mitigation is told of; "" where it makes no difference.
        ground: Digest of the ground.
    """

    way: Way
    on: On
    prompt: str
    ground: str

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.on} under {self.way.name} of {self.prompt!r}"


Results = Mapping[Painting, Mapping[str, Any]]
"""What `paint` returns."""


def painting(ground: Ground, way: Way, on: On, prompt: str) -> Painting:
    """Return the run that stands for a mitigation and a prompt; runs that cannot differ are the same."""
    shared = on == "ordinary" and not way.knows_prompts
    return Painting(way, on, "" if shared else prompt, ground.digest)


def paint(ground: Ground, folder: Path, wanted: Sequence[Painting]) -> dict[Painting, dict[str, Any]]:
    """Run what is not yet run.

    Args:
        ground: Where.
        folder: Of `folder_of`; the ledger is in it.
        wanted: Runs; one may come several times.

    Returns:
        Of an own run, the fields of `PromptCopies`, with "alignment" and "ssim" to the training image per seed, where
        they can be measured, and a "picture" of the first seed. Of an ordinary one, "faithful" and "same", the
        similarity to what the unedited model paints from the same seed, per prompt; "copies" of memorized images;
        "distances". Of others, "own copies", "any copies" and "of", counted over images.

    Raises:
        NetweightError: A run failed.
    """
    from netweight.core.progress import Progress

    runs = sorted(dict.fromkeys(wanted), key=lambda run: run.prompt)  # so that unedited images are made once
    with Progress("auto").task("images", total=None, unit="runs") as work:
        job = partial(paint_one, painter=Painter(ground), tell=work.update)
        return {result.config: result.value for result in run_each(job, runs, ledger=folder / "images.jsonl")}


def paint_one(run: Painting, *, painter: Painter, tell: Callable[[int], None]) -> dict[str, Any]:
    """Do one run; return JSON values."""
    found = {"own": painter.own, "ordinary": painter.ordinary, "others": painter.others}[run.on](run.way, run.prompt)
    tell(1)
    return found


def kinds_of(ground: Ground, folder: Path) -> dict[str, Kind]:
    """Return how each prompt is memorized: as is known, or verbatim where an image reaches 0.7 and else as a template.

    Source: NeMo's rule for SSCD, over the images of the model as it is.
    """
    from netweight.metrics.copies import COPY

    if ground.labelled:
        return {each.prompt: each.kind for each in ground.memorized}
    runs = {prompt: painting(ground, NONE, "own", prompt) for prompt in ground.prompts}
    found = paint(ground, folder, list(runs.values()))
    return {
        prompt: "verbatim" if max(found[run]["to_image"]) >= COPY else "template" for prompt, run in runs.items()
    }  # fmt: skip


def shown(image: Tensor) -> dict[str, Any]:
    """Return an image of shape `(3, height, width)` as JSON values for a figure, not above 96 pixels."""
    import torch.nn.functional as F

    height, width = image.shape[1:]
    if max(height, width) > _SHOWN:
        size = [max(1, round(side * _SHOWN / max(height, width))) for side in (height, width)]
        image = F.interpolate(image[None], size, mode="bilinear", antialias=True)[0].clamp(0, 1)
    return {"shape": list(image.shape), "pixels": as_text(image)}


@final
class Painter:
    """Paints and compares; the unedited images of the prompt asked for last are at hand."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._memorized = {each.prompt: each for each in ground.memorized}
        self._unedited: dict[tuple[str, ...], Tensor] = {}

    def own(self, way: Way, prompt: str) -> dict[str, Any]:
        """Paint a memorized prompt."""
        from netweight.metrics.copies import copies_of_prompt

        ground, own = self._ground, self._memorized[prompt]
        seeds = list(range(ground.images))
        before = self._before([prompt] * len(seeds), seeds)
        images = before if way == NONE else self._painted(way, prompt, [prompt] * len(seeds), seeds)
        found = copies_of_prompt(own, images, ground.memorized, descriptor=ground.descriptor, unedited=before)
        follows = None if ground.alignment is None else ground.alignment([prompt] * len(images), images)
        return {
            **found.to_json(),
            "alignment": follows,
            "ssim": _ssim(own, images),
            "picture": shown(images[0]),
        }

    def ordinary(self, way: Way, prompt: str) -> dict[str, Any]:
        """Paint ordinary prompts, one image each."""
        from netweight.attacks.embedding_search.search import paired
        from netweight.metrics.copies import COPY, similarity_to_memorized

        ground = self._ground
        captions = list(ground.quality)
        seeds = [derive(0, "ordinary", place) for place in range(len(captions))]
        before = self._before(captions, seeds)
        images = before if way == NONE else self._painted(way, prompt, captions, seeds)
        tells = ground.faithful or ground.alignment
        nearest = similarity_to_memorized(images, ground.memorized, descriptor=ground.descriptor).amax(1)
        return {
            "faithful": None if tells is None else tells(captions, images),
            "same": paired(ground.descriptor)(images, before).tolist(),
            "copies": int((nearest >= COPY).sum()),
            "distances": {} if ground.distances is None else ground.distances(images),
        }

    def others(self, way: Way, prompt: str) -> dict[str, Any]:
        """Paint other memorized prompts, two images each."""
        import torch

        from netweight.metrics.copies import copies_of_prompt

        ground = self._ground
        others = [each for each in ground.memorized if each.prompt != prompt][:_OTHERS]
        seeds = list(range(_OTHER_SEEDS)) * len(others)
        images = self._painted(way, prompt, [each.prompt for each in others for _ in range(_OTHER_SEEDS)], seeds)
        found = [
            copies_of_prompt(own, part, ground.memorized, descriptor=ground.descriptor)
            for own, part in zip(others, torch.split(images, _OTHER_SEEDS), strict=True)
        ]
        return {
            "own copies": sum(each.copies() for each in found),
            "any copies": sum(each.any_match() for each in found),
            "of": len(images),
        }

    def _before(self, prompts: Sequence[str], seeds: Sequence[int]) -> Tensor:
        """What the model as it is paints; kept for one prompt and for the ordinary ones."""
        key, ordinary = tuple(prompts), tuple(self._ground.quality)
        if key not in self._unedited:
            if key != ordinary:
                self._unedited = {known: images for known, images in self._unedited.items() if known == ordinary}
            self._unedited[key] = images_of(self._ground, self._ground.model, prompts, seeds)
        return self._unedited[key]

    def _painted(self, way: Way, prompt: str, prompts: Sequence[str], seeds: Sequence[int]) -> Tensor:
        with mitigated(self._ground, way, prompt) as model:
            return images_of(self._ground, model, prompts, seeds)


@contextmanager
def mitigated(ground: Ground, way: Way, prompt: str) -> Iterator[TextToImage]:
    """Yield the ground's model under a mitigation that is told of one prompt, or of none with ""."""
    with mitigation(way, ground)(ground.model, [prompt] if prompt else []) as model:
        yield model


def images_of(ground: Ground, model: TextToImage, prompts: Sequence[str], seeds: Sequence[int]) -> Tensor:
    """Return one image per prompt and seed, made as the ground says."""
    from netweight.nn.batching import Batches
    from netweight.nn.text_to_image import generated

    text, batches = model.embed(list(prompts)), Batches(ground.detection.rows)
    return generated(model, text, seeds, batches, guidance=ground.guidance, steps=ground.steps)


def _ssim(own: Memorized, images: Tensor) -> list[float] | None:
    """Structural similarity to the training image, where sizes allow it."""
    from netweight.metrics.images import ssim

    if own.image.shape != images.shape[1:] or min(images.shape[2:]) < 11:
        return None
    found: list[float] = ssim(images, own.image.expand_as(images)).tolist()
    return found
