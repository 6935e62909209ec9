"""Tables 2, 4 and 5 of weights2weights: identity kept when a person who is in no bank is put into the model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from netweight.attacks.embedding_search.descent import weights_fixed
from netweight.methods.space.inversion import DenoisingLoss, invert_loss
from netweight.metrics.intervals import Interval, bootstrap
from netweight.nn.apply_lora import applied
from netweight.nn.lora import AdapterStack
from netweight.report.finding import Finding
from netweight_experiments.tables.grid import Cell, grid, interval_finding, run_each, typed
from netweight_experiments.tables.registry import Column, Measured
from netweight_experiments.tables.setups import setup_table
from netweight_experiments.tables.w2w.edits import painted
from netweight_experiments.tables.w2w.setup import Setup, Stranger
from netweight_experiments.toys.drawn_worlds import r_squared

MANY, ONE = "DreamBooth LoRA, several images", "DreamBooth LoRA, one image"
SPACE = "w2w inversion, one image"


@final
@dataclass(frozen=True)
class Fit:
    """A way."""

    way: str  # one of this module's names
    components: int | None = None  # none for all


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
    """What came of a way."""

    identity: tuple[float, ...]  # scores of people against photographs that nothing was learned from
    parameters: int  # numbers that were optimized for a person
    seconds: float  # processor time for a person
    attributes: tuple[tuple[float, ...], ...]  # read off the images of each person, empty where nothing reads them
    explained: float | None  # R² of attributes, mean over these; None where truth is not known


def met(setup: Setup, folder: Path, fits: Sequence[Fit]) -> dict[Fit, Met]:
    """Put all strangers into the model in each way; what the folder remembers is not done again."""
    runs = [_Run(fit.way, fit.components, setup.digest) for fit in fits]
    values = run_each(lambda run: _run(setup, Fit(run.fit, run.components)), runs, folder=folder, name="strangers")
    return {fit: typed(Met, value) for fit, value in zip(fits, values, strict=True)}


def _run(setup: Setup, fit: Fit) -> dict[str, Any]:
    together, seconds, images, parameters = setup.fitting.together, 0.0, [], 0
    for start in range(0, len(setup.strangers), together):
        strangers = setup.strangers[start : start + together]
        began = time.process_time()
        if fit.way == SPACE:
            scores = _inverted(setup, fit, strangers)
            seconds += time.process_time() - began
            parameters = fit.components or setup.space.components
            images.append(painted(setup, scores))
        else:
            stack = _trained(setup, strangers, many=fit.way == MANY)
            seconds += time.process_time() - began
            parameters = sum(factor[0].numel() for part in (stack.down, stack.up) for factor in part.values())
            images.append(_painted(setup, stack))
    seen = _seen(setup, torch.cat(images))
    return {"parameters": parameters, "seconds": seconds / len(setup.strangers), **seen}


def _inverted(setup: Setup, fit: Fit, strangers: Sequence[Stranger]) -> Tensor:
    """Points of strangers from one image each."""
    how = setup.fitting
    loss = DenoisingLoss(
        setup.model, torch.stack([each.images[0] for each in strangers]), [each.prompts[0] for each in strangers],
        draws=how.draws, said=how.said,
    )  # fmt: skip
    settings = how.inversion.replace(components=fit.components)
    with weights_fixed(setup.model.denoiser):
        return invert_loss(setup.space, loss, len(strangers), settings, device=setup.model.device).scores


def _trained(setup: Setup, strangers: Sequence[Stranger], *, many: bool) -> AdapterStack:
    from netweight.hf.adapters import Subject, train_pictures

    how = setup.fitting
    subjects = [
        Subject(each.name, *((each.images, each.prompts) if many else (each.images[:1], each.prompts[:1])))
        for each in strangers
    ]
    return train_pictures(setup.model, subjects, how.recipe, layers=how.layers, each=how.each).stack


def _painted(setup: Setup, stack: AdapterStack) -> Tensor:
    """Images by adapters as they are."""
    model, prompts, seeds = setup.model, list(setup.prompts), list(setup.seeds)
    text = model.embed(prompts * (len(seeds) // len(prompts)))
    found = []
    for number in range(len(stack)):
        with torch.no_grad(), applied(model.denoiser, stack.adapter(number), component=model.component):
            found.append(model.generate(text, seeds, guidance=setup.guidance, steps=setup.steps))
    return torch.stack(found)


def _seen(setup: Setup, images: Tensor) -> dict[str, Any]:
    """Identity of each person's images against other photographs, and attributes."""
    describe = setup.identity(None)
    people, each = images.shape[:2]
    made = describe(images.flatten(0, 1)).double().view(people, each, -1)
    meant = torch.stack([describe(one.others).double().mean(0) for one in setup.strangers])
    identity = cosine_similarity(made, meant[:, None], dim=2).mean(1)
    if setup.read is None:
        return {"identity": identity.tolist(), "attributes": [], "explained": None}
    said = setup.read(images.flatten(0, 1)).double().view(people, each, -1).mean(1)
    truths = [one.truth for one in setup.strangers if one.truth is not None]
    explained = None
    if len(truths) == people:
        explained = float(r_squared(torch.stack(truths), said).mean())
    return {"identity": identity.tolist(), "attributes": said.tolist(), "explained": explained}


# ---- tables 2, 4 and 5 -----------------------------------------------------------------------------------------------

# Least R² of inversion from one image, as a share of that of an adapter trained on several.
_TARGET = 0.9
_SEED = 0
_LABELS = {"ID score, half of the interval": "ID score, plus-minus"}
_ELSEWHERE = (
    "Celeb-Basis cannot be run here: its basis is made of the text embeddings of celebrities' names, which a model "
    "must have learned; the miniature knows no names, and the published basis fits Stable Diffusion alone.",
    "IP-Adapter FaceID cannot be run here: it needs its published weights for Stable Diffusion and the face "
    "recognition of insightface, whose models are for non-commercial use only.",
)


def _score(one: Met | None) -> Interval | None:
    return None if one is None else bootstrap(one.identity, seed=_SEED)


def _half(one: Met | None) -> float | None:
    interval = _score(one)
    return None if interval is None else (interval.high - interval.low) / 2


_ID: tuple[Cell[Met | None], ...] = (
    (Column("ID score", "score", "higher"), lambda one: None if (score := _score(one)) is None else score.estimate),
    (Column("ID score, half of the interval", "score"), _half),
)


@setup_table("w2w-table2-4")
def table2_4(setup: Setup, folder: Path) -> Measured:
    """Put strangers into the model by adapters of several images and of one, and by inversion into the space."""
    rows = {fit.way: one for fit, one in met(setup, folder, [Fit(way) for way in (MANY, ONE, SPACE)]).items()}
    return grid(
        rows,
        [
            *_ID,
            (Column("parameters optimised", "count", "lower"), attrgetter("parameters")),
            (Column("time", "s", "lower"), attrgetter("seconds")),
            (Column("R² of attributes", "", "higher"), attrgetter("explained")),
        ],
        labels=_LABELS,
        differs=(*setup.differs, *_differs(setup)),
        findings=(*_findings(setup, rows), *_shares(rows)),
        notes=("R² of attributes does not punish copying the one image.",),
    )


@setup_table("w2w-table5")
def table5(setup: Setup, folder: Path) -> Measured:
    """Personalize from one image by inversion into the space; what it was compared with cannot be run here."""
    found = met(setup, folder, [Fit(ONE), Fit(SPACE)])
    rows = {"w2w": found[Fit(SPACE)], ONE: found[Fit(ONE)]}
    return grid(
        {"Celeb-Basis": None, "IP-Adapter FaceID": None, **rows},
        _ID,
        labels=_LABELS,
        differs=(*setup.differs, *_differs(setup)),
        findings=_findings(setup, rows),
        notes=_ELSEWHERE,
    )


def _findings(setup: Setup, rows: Mapping[str, Met]) -> tuple[Finding, ...]:
    scores = {way: bootstrap(one.identity, seed=_SEED) for way, one in rows.items()}
    return tuple(
        interval_finding(f"{way}: ID score", score, better="higher", seeds=setup.seeds) for way, score in scores.items()
    )


def _shares(rows: Mapping[str, Met]) -> list[Finding]:
    """Inversion from one image against adapters, by attributes and by identity."""
    ours, many, alone = rows[SPACE], rows[MANY], rows[ONE].explained
    found = []
    for other in (MANY, ONE):
        gap = bootstrap([a - b for a, b in zip(ours.identity, rows[other].identity, strict=True)], seed=_SEED)
        found.append(interval_finding(f"ID score of {SPACE} less that of {other}", gap, better="higher"))
    if ours.explained is not None and many.explained is not None and many.explained > 0:
        name = "R² of attributes: inversion from one image as a share of several images' adapters"
        found.append(
            Finding(
                name, ours.explained / many.explained, n=len(ours.identity), better="higher", target=_TARGET,
                baseline=None if alone is None else alone / many.explained, detail={"baseline": ONE},
            )
        )  # fmt: skip
    return found


def _differs(setup: Setup) -> tuple[str, ...]:
    where = "one core" if setup.model.device.type == "cpu" else str(setup.model.device)
    return (
        f"{len(setup.strangers)} people who are in no bank; the score is the mean cosine of a person's images with "
        f"other photographs, ± half of the 95 % interval over people (the paper does not say what its ± is: "
        f"{setup.identity_name}).",
        f"Time is processor time for a person on {where}, many people at once; the paper's is an A100's for one.",
    )
