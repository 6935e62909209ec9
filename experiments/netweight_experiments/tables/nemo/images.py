"""Images under each mitigation and what they repeat, one remembered run each; rows of NeMo's tables made of them.

A run generates images of the memorized prompt itself, of ordinary prompts while the mitigation is at work, or of the
other memorized prompts; or it searches the edited model for an image. Images of one prompt have the same seeds under
every mitigation.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor

from netweight.attacks.embedding_search.compare import Target, turned
from netweight.attacks.embedding_search.search import paired, search
from netweight.core.progress import Progress
from netweight.core.seeds import derive
from netweight.core.units import Units
from netweight.evidence.copy_metrics import (
    COPY,
    Kind,
    Memorized,
    PromptCopies,
    copies_of_prompt,
    similarity_to_memorized,
)
from netweight.evidence.figures import Figure, image_grid
from netweight.evidence.finding import Finding
from netweight.evidence.image_metrics import ssim
from netweight.evidence.report import Table
from netweight.evidence.statistics import proportion
from netweight.methods.forget.localize import Localization
from netweight.nn.batching import Batches
from netweight.nn.text_to_image import TextToImage, generated
from netweight_experiments.tables.grid import as_text, picture, run_each
from netweight_experiments.tables.nemo.setup import NONE, Setup, Way, mitigation
from netweight_experiments.tables.registry import Column, Row

On = Literal["own", "ordinary", "others"]
_OTHERS, _OTHER_SEEDS = 12, 2
# Pixels of a remembered picture's side, at most.
_SHOWN = 96


@final
@dataclass(frozen=True)
class Painting:
    """One run."""

    way: Way  # what is done to the model
    on: On  # "own" paints the prompt; "ordinary" the ground's ordinary prompts; "others" other memorized prompts
    prompt: str  # the memorized prompt that the mitigation is told of; "" where it makes no difference
    ground: str  # digest of the ground

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.on} under {self.way.name} of {self.prompt!r}"


# What `paint` returns.
Results = Mapping[Painting, Mapping[str, Any]]


def painting(ground: Setup, way: Way, on: On, prompt: str) -> Painting:
    """Return the run that stands for a mitigation and a prompt; runs that cannot differ are the same."""
    shared = on == "ordinary" and not way.knows_prompts
    return Painting(way, on, "" if shared else prompt, ground.digest)


def paint(ground: Setup, folder: Path, wanted: Sequence[Painting]) -> dict[Painting, dict[str, Any]]:
    """Run what is not yet run."""
    runs = sorted(dict.fromkeys(wanted), key=lambda run: run.prompt)  # so that unedited images are made once
    with Progress("auto").task("images", total=None, unit="runs") as work:
        job = partial(paint_one, painter=Painter(ground), tell=work.update)
        return {result.config: result.value for result in run_each(job, runs, ledger=folder / "images.jsonl")}


def paint_one(run: Painting, *, painter: Painter, tell: Callable[[int], None]) -> dict[str, Any]:
    """Do one run; return JSON values."""
    found = {"own": painter.own, "ordinary": painter.ordinary, "others": painter.others}[run.on](run.way, run.prompt)
    tell(1)
    return found


def kinds_of(ground: Setup, folder: Path) -> dict[str, Kind]:
    """How each prompt is memorized: as is known, or verbatim where an image reaches 0.7 and else as a template."""
    # Source: NeMo's rule for SSCD, over the images of the model as it is.
    if ground.labelled:
        return {each.prompt: each.kind for each in ground.memorized}
    runs = {prompt: painting(ground, NONE, "own", prompt) for prompt in ground.prompts}
    found = paint(ground, folder, list(runs.values()))
    return {
        prompt: "verbatim" if max(found[run]["to_image"]) >= COPY else "template" for prompt, run in runs.items()
    }  # fmt: skip


def shown(image: Tensor) -> dict[str, Any]:
    """Return an image of shape `(3, height, width)` as JSON values for a figure, not above 96 pixels."""
    height, width = image.shape[1:]
    if max(height, width) > _SHOWN:
        size = [max(1, round(side * _SHOWN / max(height, width))) for side in (height, width)]
        image = F.interpolate(image[None], size, mode="bilinear", antialias=True)[0].clamp(0, 1)
    return {"shape": list(image.shape), "pixels": as_text(image)}


@final
class Painter:
    """Paints and compares; the unedited images of the prompt asked for last are at hand."""

    def __init__(self, ground: Setup) -> None:
        self._ground = ground
        self._memorized = {each.prompt: each for each in ground.memorized}
        self._unedited: dict[tuple[str, ...], Tensor] = {}

    def own(self, way: Way, prompt: str) -> dict[str, Any]:
        """Paint a memorized prompt."""
        ground, own = self._ground, self._memorized[prompt]
        seeds = list(range(ground.images))
        before = self._before([prompt] * len(seeds), seeds)
        images = before if way == NONE else self._painted(way, prompt, [prompt] * len(seeds), seeds)
        found = copies_of_prompt(own, images, ground.memorized, descriptor=ground.descriptor, unedited=before)
        follows = None if ground.alignment is None else ground.alignment([prompt] * len(images), images)
        return {**found.to_json(), "alignment": follows, "ssim": _ssim(own, images), "picture": shown(images[0])}

    def ordinary(self, way: Way, prompt: str) -> dict[str, Any]:
        """Paint ordinary prompts, one image each."""
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
def mitigated(ground: Setup, way: Way, prompt: str) -> Iterator[TextToImage]:
    """Yield the ground's model under a mitigation that is told of one prompt, or of none with ""."""
    with mitigation(way, ground)(ground.model, [prompt] if prompt else []) as model:
        yield model


def images_of(ground: Setup, model: TextToImage, prompts: Sequence[str], seeds: Sequence[int]) -> Tensor:
    """Return one image per prompt and seed, made as the ground says."""
    text, batches = model.embed(list(prompts)), Batches(ground.detection.rows)
    return generated(model, text, seeds, batches, guidance=ground.guidance, steps=ground.steps)


def _ssim(own: Memorized, images: Tensor) -> list[float] | None:
    """Structural similarity to the training image, where sizes allow it."""
    if own.image.shape != images.shape[1:] or min(images.shape[2:]) < 11:
        return None
    found: list[float] = ssim(images, own.image.expand_as(images)).tolist()
    return found


KINDS = ("verbatim", "template")


@final
@dataclass(frozen=True)
class Line:
    """A mitigation of a table."""

    title: str  # its name
    ways: Mapping[str, Way]  # what is done for each prompt; prompts without a way are left out, and notes must say why
    others: bool = False  # whether other memorized prompts are painted under it


@final
@dataclass(frozen=True)
class Painted:
    """Lines with what was painted under them."""

    ground: Setup  # where
    lines: tuple[Line, ...]
    kinds: Mapping[str, str]  # how each prompt is memorized
    found: Results  # the runs
    spared: bool  # whether ordinary prompts were painted too

    def own(self, line: Line, kind: str | None = None) -> dict[str, Mapping[str, Any]]:
        """Return what a line's prompts painted, by prompt: all, or those of a kind."""
        return self._of(line, "own", kind)

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of `rows`."""
        spared = spared_columns(self.ground) if self.spared else ()
        return (Column("neurons off or scaled, median", "neurons"), *own_columns(self.ground), *spared)

    def rows(self) -> tuple[Row, ...]:
        """Return one row per line and kind."""
        rows = []
        for line in self.lines:
            for kind in KINDS:
                if own := self.own(line, kind):
                    count = statistics.median(_neurons(line.ways[prompt]) for prompt in own)
                    values = [count, *own_values(self.ground, list(own.values()))]
                    if self.spared:
                        ordinary = list(self._of(line, "ordinary", kind).values())
                        others = list(self._of(line, "others", kind).values()) if line.others else []
                        values += spared_values(ordinary, others)
                    rows.append(Row(f"{line.title}, {kind}", tuple(values)))
        return tuple(rows)

    def _of(self, line: Line, on: Any, kind: str | None) -> dict[str, Mapping[str, Any]]:
        return {
            prompt: self.found[painting(self.ground, way, on, prompt)]
            for prompt, way in line.ways.items()
            if kind in (None, self.kinds[prompt])
        }


def painted_lines(ground: Setup, folder: Path, lines: Sequence[Line], *, spared: bool) -> Painted:
    """Paint what lines need, unless the folder remembers it."""
    wanted: list[Painting] = []
    for line in lines:
        for prompt, way in line.ways.items():
            wanted.append(painting(ground, way, "own", prompt))
            if spared:
                wanted.append(painting(ground, way, "ordinary", prompt))
                if line.others:
                    wanted.append(painting(ground, way, "others", prompt))
    kinds = kinds_of(ground, folder)
    return Painted(ground, tuple(lines), kinds, paint(ground, folder, wanted), spared)


def own_columns(ground: Setup) -> tuple[Column, ...]:
    """Return the columns of `own_values`."""
    measured = [
        (f"{ground.measure} to the training image", "lower"),
        (f"{ground.measure} to the unedited generation", "lower"),
        (f"{ground.measure} between seeds", "lower"),
    ]
    columns = [
        Column(f"{name}, {what}", "score", better if what == "median" else None)  # type: ignore[arg-type]
        for name, better in measured
        for what in ("median", "MAD")
    ]
    columns.insert(2, Column(f"{ground.measure} to the training image, median of the largest", "score", "lower"))
    if ground.alignment is not None:
        columns += [
            Column(f"{ground.alignment_name}, median", "score", "higher"),
            Column(f"{ground.alignment_name}, MAD", "score"),
        ]
    return (
        *columns,
        Column("images that copy their own", "%", "lower"),
        Column("images that copy any memorized", "%", "lower"),
        Column("prompts with a copy of their own", "%", "lower"),
    )


def own_values(ground: Setup, found: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Sum up prompts: over seeds first, then over prompts."""
    rows = [copies(each) for each in found]
    images = sum(len(row.to_image) for row in rows)
    values = [*middle([statistics.median(row.to_image) for row in rows])]
    values.append(statistics.median(max(row.to_image) for row in rows))
    values += middle([statistics.median(row.to_unedited) for row in rows if row.to_unedited is not None])
    values += middle([row.diversity for row in rows if row.diversity is not None])
    if ground.alignment is not None:
        values += middle([statistics.median(each["alignment"]) for each in found])
    values.append(percent(sum(row.copies() for row in rows), images))
    values.append(percent(sum(row.any_match() for row in rows), images))
    values.append(percent(sum(row.copies() > 0 for row in rows), len(rows)))
    return values


def spared_columns(ground: Setup, others: str = "other memorized prompts") -> tuple[Column, ...]:
    """Return the columns of `spared_values`."""
    tells = ground.faithful_name if ground.faithful is not None else f"ordinary captions: {ground.alignment_name}"
    return (
        Column(tells, "score", "higher"),
        Column(f"ordinary captions: {ground.measure} to the unedited generation, median", "score", "higher"),
        Column("ordinary captions: images that copy any memorized", "%", "lower"),
        Column(f"{others}: images that copy their own", "%"),
        Column(f"{others}: images that copy any memorized", "%"),
    )


def spared_values(ordinary: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Sum up what edits do beside: the median over edits, and shares of all images."""
    told = [statistics.mean(each["faithful"]) for each in ordinary if each["faithful"] is not None]
    of = sum(each["of"] for each in others)
    return [
        statistics.median(told) if told else None,
        statistics.median(statistics.median(each["same"]) for each in ordinary),
        percent(sum(each["copies"] for each in ordinary), sum(len(each["same"]) for each in ordinary)),
        percent(sum(each["own copies"] for each in others), of) if of else None,
        percent(sum(each["any copies"] for each in others), of) if of else None,
    ]


def copies(found: Mapping[str, Any]) -> PromptCopies:
    """Return an own run as `PromptCopies`."""
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value := found[name], list) else value
        for name in PromptCopies.__dataclass_fields__
    }
    return PromptCopies(**fields)


def middle(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the median and the median absolute deviation from it; None where there is no value."""
    if not values:
        return None, None
    center = statistics.median(values)
    return center, statistics.median(abs(value - center) for value in values)


def _neurons(way: Way) -> int:
    return len(Units.from_json(way.units)) if way.units else 0


def percent(part: float, whole: float) -> float:
    """Return a share in percent."""
    return 100 * part / whole


def seeds_table(painted: Painted) -> Table:
    """Return how many images copy, prompt by prompt: medians hide seeds."""
    prompts = list(painted.kinds)
    rows = []
    for prompt in prompts:
        cells: list[str | None] = []
        for line in painted.lines:
            if prompt not in line.ways:
                cells.append(None)
                continue
            found = copies(painted.own(line)[prompt])
            cells.append(f"{found.copies()} / {found.any_match()}")
        rows.append((prompt, painted.kinds[prompt], *cells))
    return Table(
        f"Images that copy, of {painted.ground.images} seeds each: their own / any memorized one",
        ("prompt", "kind", *(line.title for line in painted.lines)),
        rows,
        ["A copy has a similarity of 0.7 or more. An empty cell was not measured; a note says why."],
    )


What = Literal["planted", "never trained"]
_SEED = 0


@final
@dataclass(frozen=True)
class Attack:
    """One search."""

    way: Way  # the edit
    prompt: str  # the memorized prompt
    what: What  # whether its planted image is searched for, or the same one turned
    ground: str  # digest of the ground

    @property
    def name(self) -> str:
        """For messages."""
        return f"search for the {self.what} image of {self.prompt!r}"


def attacked(ground: Setup, folder: Path, ways: Mapping[str, Way]) -> dict[Attack, dict[str, Any]]:
    """Search for every prompt's image, planted and turned, unless the folder remembers it."""
    kinds: tuple[What, ...] = ("planted", "never trained")
    runs = [Attack(way, prompt, what, ground.digest) for prompt, way in ways.items() for what in kinds]
    with Progress("auto").task("searches", total=None, unit="searches") as work:
        job = partial(attack_one, ground=ground, tell=work.update)
        return {result.config: result.value for result in run_each(job, runs, ledger=folder / "searches.jsonl")}


def attack_one(run: Attack, *, ground: Setup, tell: Callable[[int], None]) -> dict[str, Any]:
    """Search once; return JSON values."""
    own = next(each for each in ground.memorized if each.prompt == run.prompt)
    target = Target(own.prompt, own.prompt, own.image)
    image = target.image if run.what == "planted" else turned(target).image
    with mitigated(ground, run.way, run.prompt) as model:
        found = search(
            model, run.prompt, image, ground.quality, ground.search,
            similarity=paired(ground.descriptor), seed=_SEED,
        )  # fmt: skip
    tell(1)
    trials = [(trial.best.score, place) for place, trial in enumerate(found.trials) if trial.best is not None]
    if not trials:
        return {"outcome": "diverged", "steps": None, "last": 0, "best": None, "moved": None, "picture": None}
    place = max(trials)[1]
    trial, best = found.trials[place], found.trials[place].best
    assert best is not None
    middle = sorted(range(len(best.similarities)), key=best.similarities.__getitem__)[len(best.similarities) // 2]
    soonest = [each.steps for each in found.trials if each.steps is not None]
    return {
        "outcome": "found" if soonest else trial.outcome,
        "steps": min(soonest) if soonest else None,
        "last": max(each.last for each in found.trials),
        "best": best.score,
        "moved": best.moved,
        "picture": shown(found.after[place, middle]),
    }


def attack_findings(found: Mapping[Attack, Mapping[str, Any]], ground: Setup) -> list[Finding]:
    """Return how many images came back under search, planted and never-trained ones apart; none without a search."""
    findings = []
    for what in ("planted", "never trained"):
        runs = {run.prompt: value for run, value in found.items() if run.what == what}
        if not runs:
            continue
        back = sum(value["outcome"] == "found" for value in runs.values())
        share = proportion(back, len(runs))
        findings.append(
            Finding(
                f"neurons off, then searched: {what} images brought back",
                share.estimate,
                ci95=share.ci95,
                n=len(runs),
                better="lower" if what == "planted" else None,
                seeds=(_SEED,),
                detail={
                    "steps to success, null if never": {prompt: value["steps"] for prompt, value in runs.items()},
                    "best median similarity": {prompt: value["best"] for prompt, value in runs.items()},
                    "steps at most": ground.search.steps,
                },
            )
        )
    return findings


_ROWS = 8


def image_figure(
    painted: Painted,
    lines: Sequence[Line],
    searches: Mapping[Attack, Mapping[str, Any]],
    found: Mapping[str, Localization],
) -> Figure:
    """Draw training images beside what prompts paint, the same seed in every column but the last."""
    memorized = painted.ground.memorized[:_ROWS]
    attacks = {run.prompt: value["picture"] for run, value in searches.items() if run.what == "planted"}
    rows = []
    for each in memorized:
        cells = [_pixels(shown(each.image))]
        for line in lines:
            way = each.prompt in line.ways
            cells.append(_pixels(painted.own(line)[each.prompt]["picture"]) if way else None)
        rows.append([*cells, *([_pixels(attacks.get(each.prompt))] if searches else [])])
    titles = [textwrap.fill(line.title, 14) for line in lines]
    return image_grid(
        rows,
        rows=[textwrap.fill(f"{each.prompt} ({len(found[each.prompt].neurons)})", 22) for each in memorized],
        columns=["target", *titles, *(["neurons off,\nattacked"] if searches else [])],
        alt="Training images beside what their prompts paint, with and without their neurons, and under attack.",
        caption="Training images, and what their prompts paint from the first seed; in parentheses how many neurons "
        "are off. Attacked: the best image that a search for another embedding found in the model without them.",
    )


def _pixels(kept: Mapping[str, Any] | None) -> Any:
    if kept is None:
        return None
    channels, height, width = kept["shape"]
    return picture(kept["pixels"], (channels, height, width))
