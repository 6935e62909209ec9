"""People who are in no bank put into the model in several ways, measured and remembered way by way."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from netweight.reproduce.resumed import run_each
from netweight.reproduce.space_edits import painted
from netweight.reproduce.space_ground import Ground, Stranger

if TYPE_CHECKING:
    from torch import Tensor

    from netweight.nn.lora import AdapterStack

__all__ = ["MANY", "ONE", "SPACE", "Fit", "Met", "met"]

MANY, ONE = "DreamBooth LoRA, several images", "DreamBooth LoRA, one image"
SPACE = "w2w inversion, one image"


@final
@dataclass(frozen=True)
class Fit:
    """A way.

    Attributes:
        way: One of this module's names.
        components: Of an inversion, how many move; None for all.
    """

    way: str
    components: int | None = None


@final
@dataclass(frozen=True)
class _Run:
    fit: str
    components: int | None
    ground: str

    @property
    def name(self) -> str:
        return self.fit if self.components is None else f"{self.fit}, {self.components} components"


@final
@dataclass(frozen=True)
class Met:
    """What came of a way.

    Attributes:
        identity: Scores of people against photographs that nothing was learned from.
        parameters: Numbers that were optimized for a person.
        seconds: Processor time for a person.
        attributes: Read off the images of each person, empty where nothing reads them.
        explained: R² of attributes, mean over these; None where truth is not known.
    """

    identity: tuple[float, ...]
    parameters: int
    seconds: float
    attributes: tuple[tuple[float, ...], ...]
    explained: float | None


def met(ground: Ground, folder: Path, fits: Sequence[Fit]) -> dict[Fit, Met]:
    """Put all strangers into the model in each way; what the folder remembers is not done again."""
    runs = [_Run(fit.way, fit.components, ground.digest) for fit in fits]
    results = run_each(lambda run: _run(ground, Fit(run.fit, run.components)), runs, ledger=folder / "strangers.jsonl")
    return {fit: _read(each.value) for fit, each in zip(fits, results, strict=True)}


def _run(ground: Ground, fit: Fit) -> dict[str, Any]:
    import torch

    together, seconds, images, parameters = ground.fitting.together, 0.0, [], 0
    for start in range(0, len(ground.strangers), together):
        strangers = ground.strangers[start : start + together]
        began = time.process_time()
        if fit.way == SPACE:
            scores = _inverted(ground, fit, strangers)
            seconds += time.process_time() - began
            parameters = fit.components or ground.space.components
            images.append(painted(ground, scores))
        else:
            stack = _trained(ground, strangers, many=fit.way == MANY)
            seconds += time.process_time() - began
            parameters = _size(stack)
            images.append(_painted(ground, stack))
    seen = _seen(ground, torch.cat(images))
    return {"parameters": parameters, "seconds": seconds / len(ground.strangers), **seen}


def _inverted(ground: Ground, fit: Fit, strangers: Sequence[Stranger]) -> Tensor:
    """Points of strangers from one image each."""
    import torch

    from netweight.attacks.embedding_search.search import weights_fixed
    from netweight.methods.space.inversion import DenoisingLoss, invert

    how = ground.fitting
    loss = DenoisingLoss(
        ground.model, torch.stack([each.images[0] for each in strangers]), [each.prompts[0] for each in strangers],
        draws=how.draws, said=how.said,
    )  # fmt: skip
    settings = how.inversion.replace(components=fit.components)
    with weights_fixed(ground.model.denoiser):
        return invert(ground.space, loss, len(strangers), settings, device=ground.model.device).scores


def _trained(ground: Ground, strangers: Sequence[Stranger], *, many: bool) -> AdapterStack:
    from netweight.hf.train_adapters import Subject, train_pictures

    how = ground.fitting
    subjects = [
        Subject(each.name, *((each.images, each.prompts) if many else (each.images[:1], each.prompts[:1])))
        for each in strangers
    ]
    return train_pictures(ground.model, subjects, how.recipe, layers=how.layers, each=how.each).stack


def _painted(ground: Ground, stack: AdapterStack) -> Tensor:
    """Images by adapters as they are."""
    import torch

    from netweight.nn.apply_lora import applied

    model, prompts, seeds = ground.model, list(ground.prompts), list(ground.seeds)
    text = model.embed(prompts * (len(seeds) // len(prompts)))
    found = []
    for number in range(len(stack)):
        with torch.no_grad(), applied(model.denoiser, stack.adapter(number), component=model.component):
            found.append(model.generate(text, seeds, guidance=ground.guidance, steps=ground.steps))
    return torch.stack(found)


def _seen(ground: Ground, images: Tensor) -> dict[str, Any]:
    """Identity of each person's images against other photographs, and attributes."""
    import torch
    from torch.nn.functional import cosine_similarity

    describe = ground.identity(None)
    people, each = images.shape[:2]
    made = describe(images.flatten(0, 1)).double().view(people, each, -1)
    meant = torch.stack([describe(one.others).double().mean(0) for one in ground.strangers])
    identity = cosine_similarity(made, meant[:, None], dim=2).mean(1)
    if ground.read is None:
        return {"identity": identity.tolist(), "attributes": [], "explained": None}
    said = ground.read(images.flatten(0, 1)).double().view(people, each, -1).mean(1)
    truths = [one.truth for one in ground.strangers if one.truth is not None]
    explained = None
    if len(truths) == people:
        truth = torch.stack(truths).double()
        shares = 1 - (said - truth).square().sum(0) / (truth - truth.mean(0)).square().sum(0)
        explained = float(shares.mean())
    return {"identity": identity.tolist(), "attributes": said.tolist(), "explained": explained}


def _size(stack: AdapterStack) -> int:
    return sum(part[name][0].numel() for part in (stack.down, stack.up) for name in part)


def _read(value: dict[str, Any]) -> Met:
    attributes = tuple(map(tuple, value["attributes"]))
    return Met(tuple(value["identity"]), value["parameters"], value["seconds"], attributes, value["explained"])
