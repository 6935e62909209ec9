"""Images under each mitigation and what they repeat, one remembered run each; rows of NeMo's tables made of them.

A run generates images of the memorized prompt itself, of ordinary prompts while the mitigation is at work, or of the
other memorized prompts; or it searches the edited model for an image. Images of one prompt have the same seeds under
every mitigation.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from netweight.attacks.embedding_search.search import TargetImage, paired, search, turned
from netweight.core.names import Units
from netweight.core.progress import Progress
from netweight.core.seeds import derive
from netweight.methods.forget.localize import Localization
from netweight.metrics.copies import (
    COPY,
    Kind,
    MemorizedImage,
    PromptCopies,
    copies_of_prompt,
    similarity_to_memorized,
)
from netweight.metrics.images import ssim
from netweight.metrics.intervals import proportion
from netweight.nn.text_to_image import Batches, TextToImage, generated
from netweight.report.finding import Figure, Finding, Table
from netweight.report.plots import image_grid
from netweight_experiments.tables.grid import Cell, T, as_text, grid, interval_finding, picture, run_each, typed
from netweight_experiments.tables.nemo.setup import NONE, Setup, Way, mitigation
from netweight_experiments.tables.registry import Column, MeasuredTable

On = Literal["own", "ordinary", "others"]
_RUNS: tuple[On, ...] = ("own", "ordinary", "others")
_OTHERS, _OTHER_SEEDS = 12, 2
# Pixels of a remembered picture's side, at most.
_SHOWN = 96


@dataclass(frozen=True)
class Images:
    """One run that generates images."""

    way: Way
    """What is done to the model."""
    on: On
    """"own" generates the prompt; "ordinary" the setup's ordinary prompts; "others" other memorized prompts."""
    prompt: str
    """The memorized prompt that the mitigation is told of; "" where it makes no difference."""
    ground: str
    """Digest of the setup."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.on} under {self.way.name} of {self.prompt!r}"


# What runs returned, as JSON values.
Results = Mapping[Images, Mapping[str, Any]]


def images_run(setup: Setup, way: Way, on: On, prompt: str = "") -> Images:
    """Return the run that stands for a mitigation and a prompt; runs that cannot differ are the same."""
    shared = on == "ordinary" and not way.knows_prompts
    return Images(way, on, "" if shared else prompt, setup.digest)


def generate_images(setup: Setup, folder: Path, wanted: Sequence[Images]) -> dict[Images, dict[str, Any]]:
    """Run what is not yet run."""
    runs = sorted(dict.fromkeys(wanted), key=lambda run: run.prompt)  # so that unedited images are made once
    generator = _Generator(setup)
    with Progress("auto").task("images", total=None, unit="runs") as work:

        def one(run: Images) -> dict[str, Any]:
            found = {"own": generator.own, "ordinary": generator.ordinary, "others": generator.others}[run.on](run)
            work.update(1)
            return found

        return dict(zip(runs, run_each(one, runs, folder=folder, name="images"), strict=True))


def kinds_of(setup: Setup, folder: Path) -> dict[str, Kind]:
    """How each prompt is memorized: as is known, or verbatim where an image reaches 0.7 and else as a template."""
    # Source: NeMo's rule for SSCD, over the images of the model as it is.
    if setup.labelled:
        return {each.prompt: each.kind for each in setup.memorized}
    runs = {prompt: images_run(setup, NONE, "own", prompt) for prompt in setup.prompts}
    found = generate_images(setup, folder, list(runs.values()))
    return {
        prompt: "verbatim" if max(found[run]["to_image"]) >= COPY else "template" for prompt, run in runs.items()
    }  # fmt: skip


class _Generator:
    """Generates and compares; the unedited images of the prompt asked for last are at hand."""

    def __init__(self, setup: Setup) -> None:
        self._ground = setup
        self._memorized = {each.prompt: each for each in setup.memorized}
        self._unedited: dict[tuple[str, ...], Tensor] = {}

    def own(self, run: Images) -> dict[str, Any]:
        """Generate a memorized prompt."""
        setup, own, seeds = self._ground, self._memorized[run.prompt], list(range(self._ground.images))
        images, before = self._made(run, [run.prompt] * len(seeds), seeds)
        found = copies_of_prompt(own, images, setup.memorized, descriptor=setup.descriptor, unedited=before)
        follows = None if setup.alignment is None else setup.alignment([run.prompt] * len(images), images)
        picture = shown(images[0])
        return {**found.to_json(), "alignment": follows, "ssim": _ssim(own, images), "picture": picture}

    def ordinary(self, run: Images) -> dict[str, Any]:
        """Generate ordinary prompts, one image each."""
        setup, captions = self._ground, list(self._ground.quality)
        seeds = [derive(0, "ordinary", place) for place in range(len(captions))]
        images, before = self._made(run, captions, seeds)
        tells = setup.faithful or setup.alignment
        nearest = similarity_to_memorized(images, setup.memorized, descriptor=setup.descriptor).amax(1)
        return {
            "faithful": None if tells is None else tells(captions, images),
            "same": paired(setup.descriptor)(images, before).tolist(),
            "copies": int((nearest >= COPY).sum()),
            "distances": {} if setup.distances is None else setup.distances(images),
        }

    def others(self, run: Images) -> dict[str, Any]:
        """Generate other memorized prompts, two images each."""
        setup = self._ground
        others = [each for each in setup.memorized if each.prompt != run.prompt][:_OTHERS]
        seeds = list(range(_OTHER_SEEDS)) * len(others)
        images = self._edited(run, [each.prompt for each in others for _ in range(_OTHER_SEEDS)], seeds)
        found = [
            copies_of_prompt(own, part, setup.memorized, descriptor=setup.descriptor)
            for own, part in zip(others, torch.split(images, _OTHER_SEEDS), strict=True)
        ]
        own_copies, any_copies = sum(each.copies() for each in found), sum(each.any_match() for each in found)
        return {"own copies": own_copies, "any copies": any_copies, "of": len(images)}

    def _made(self, run: Images, prompts: Sequence[str], seeds: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Images under a mitigation, and what the model as it is makes; kept for one prompt and the ordinary ones."""
        key, ordinary = tuple(prompts), tuple(self._ground.quality)
        if key not in self._unedited:
            if key != ordinary:
                self._unedited = {known: images for known, images in self._unedited.items() if known == ordinary}
            self._unedited[key] = _images_of(self._ground, self._ground.model, prompts, seeds)
        before = self._unedited[key]
        return (before if run.way == NONE else self._edited(run, prompts, seeds)), before

    def _edited(self, run: Images, prompts: Sequence[str], seeds: Sequence[int]) -> Tensor:
        with _mitigated(self._ground, run.way, run.prompt) as model:
            return _images_of(self._ground, model, prompts, seeds)


@contextmanager
def _mitigated(setup: Setup, way: Way, prompt: str) -> Iterator[TextToImage]:
    """The setup's model under a mitigation that is told of one prompt, or of none with ""."""
    with mitigation(way, setup)(setup.model, [prompt] if prompt else []) as model:
        yield model


def _images_of(setup: Setup, model: TextToImage, prompts: Sequence[str], seeds: Sequence[int]) -> Tensor:
    """One image per prompt and seed."""
    text, batches = model.embed(list(prompts)), Batches(setup.detection.rows)
    return generated(model, text, seeds, batches, guidance=setup.guidance, steps=setup.steps)


def _ssim(own: MemorizedImage, images: Tensor) -> list[float] | None:
    """Structural similarity to the training image, where sizes allow it."""
    if own.image.shape != images.shape[1:] or min(images.shape[2:]) < 11:
        return None
    found: list[float] = ssim(images, own.image.expand_as(images)).tolist()
    return found


def shown(image: Tensor) -> dict[str, Any]:
    """Return an image of shape `(3, height, width)` as JSON values for a figure, not above 96 pixels."""
    height, width = image.shape[1:]
    if max(height, width) > _SHOWN:
        size = [max(1, round(side * _SHOWN / max(height, width))) for side in (height, width)]
        image = F.interpolate(image[None], size, mode="bilinear", antialias=True)[0].clamp(0, 1)
    return {"shape": list(image.shape), "pixels": as_text(image)}


# ---- rows: medians over prompts of medians over seeds, kind by kind --------------------------------------------------

KINDS = ("verbatim", "template")


@dataclass(frozen=True)
class Line:
    """A mitigation of a table."""

    title: str
    """Its name."""
    ways: Mapping[str, Way]
    """What is done for each prompt; prompts without a way are left out, and notes must say why."""
    others: bool = False
    """Whether other memorized prompts are generated under it."""


@dataclass(frozen=True)
class Part:
    """What one line gave for the prompts of one kind."""

    ways: tuple[Way, ...]
    own: tuple[Mapping[str, Any], ...]
    ordinary: tuple[Mapping[str, Any], ...] = ()
    others: tuple[Mapping[str, Any], ...] = ()

    @property
    def copies(self) -> list[PromptCopies]:
        """The own runs, prompt by prompt."""
        return [copies(each) for each in self.own]


@dataclass(frozen=True)
class Lines:
    """Lines with the images that were generated under them."""

    setup: Setup
    lines: tuple[Line, ...]
    kinds: Mapping[str, str]
    """How each prompt is memorized."""
    found: Results
    """The runs."""
    spared: bool
    """Whether ordinary prompts were generated too."""

    def own(self, line: Line, kind: str | None = None) -> dict[str, Mapping[str, Any]]:
        """Return the own runs of a line by prompt: all, or those of a kind."""
        return self._of(line, "own", kind)

    def grid(self, **more: Any) -> MeasuredTable:
        """Return one row per line and kind; `more` are the other fields of `MeasuredTable`."""
        parts = {f"{line.title}, {kind}": self.part(line, kind) for line in self.lines for kind in KINDS}
        cells: list[Cell[Part]] = [
            (Column("neurons off or scaled, median", "neurons"), lambda part: middle(map(_neurons, part.ways))[0]),
            *own_cells(self.setup),
            *(spared_cells(self.setup) if self.spared else ()),
        ]
        return grid({name: part for name, part in parts.items() if part.own}, cells, **more)

    def part(self, line: Line, kind: str) -> Part:
        """Return what a line gave for a kind."""
        own = self.own(line, kind)
        part = Part(tuple(line.ways[prompt] for prompt in own), tuple(own.values()))
        if not self.spared:
            return part
        others = self._of(line, "others", kind).values() if line.others else ()
        return replace(part, ordinary=tuple(self._of(line, "ordinary", kind).values()), others=tuple(others))

    def _of(self, line: Line, on: On, kind: str | None) -> dict[str, Mapping[str, Any]]:
        return {
            prompt: self.found[images_run(self.setup, way, on, prompt)]
            for prompt, way in line.ways.items()
            if kind in (None, self.kinds[prompt])
        }


def images_of_lines(setup: Setup, folder: Path, lines: Sequence[Line], *, spared: bool) -> Lines:
    """Generate what lines need, unless the folder remembers it."""
    wanted = [
        images_run(setup, way, on, prompt)
        for line in lines
        for prompt, way in line.ways.items()
        for on in _RUNS[: 1 + spared + (spared and line.others)]
    ]
    kinds = kinds_of(setup, folder)
    return Lines(setup, tuple(lines), kinds, generate_images(setup, folder, wanted), spared)


def own_cells(setup: Setup) -> list[Cell[Part]]:
    """Return columns of memorized prompts: over seeds first, then over prompts."""
    measure = setup.measure
    to_image = f"{measure} to the training image"

    def share(of: Callable[[PromptCopies], int]) -> Callable[[Part], float]:
        def value(part: Part) -> float:
            rows = part.copies
            return percent(sum(of(row) for row in rows), sum(len(row.to_image) for row in rows))

        return value

    def aligned(part: Part) -> list[float]:
        return [statistics.median(each["alignment"]) for each in part.own]

    named: list[tuple[str, str, Callable[[Part], list[float]]]] = [
        (to_image, "lower", lambda part: [statistics.median(row.to_image) for row in part.copies]),
        (
            f"{measure} to the unedited generation",
            "lower",
            lambda part: [statistics.median(row.to_unedited) for row in part.copies if row.to_unedited is not None],
        ),
        (
            f"{measure} between seeds",
            "lower",
            lambda part: [row.diversity for row in part.copies if row.diversity is not None],
        ),
    ]
    if setup.alignment is not None:
        named.append((setup.alignment_name, "higher", aligned))
    cells = [cell for name, better, values in named for cell in middle_cells(name, values, better)]
    largest = Column(f"{to_image}, median of the largest", "score", "lower")
    cells.insert(2, (largest, lambda part: statistics.median(max(row.to_image) for row in part.copies)))
    return [
        *cells,
        (Column("images that copy their own", "%", "lower"), share(PromptCopies.copies)),
        (Column("images that copy any memorized", "%", "lower"), share(PromptCopies.any_match)),
        (
            Column("prompts with a copy of their own", "%", "lower"),
            lambda part: percent(sum(row.copies() > 0 for row in part.copies), len(part.own)),
        ),
    ]


def spared_cells(setup: Setup, others: str = "other memorized prompts") -> list[Cell[Part]]:
    """Return columns of what edits do beside: the median over edits, and shares of all images."""
    tells = setup.faithful_name if setup.faithful is not None else f"ordinary captions: {setup.alignment_name}"
    same = f"ordinary captions: {setup.measure} to the unedited generation, median"

    def followed(part: Part) -> float | None:
        return middle([statistics.mean(each["faithful"]) for each in part.ordinary if each["faithful"] is not None])[0]

    def copied(part: Part) -> float:
        images = sum(len(each["same"]) for each in part.ordinary)
        return percent(sum(each["copies"] for each in part.ordinary), images)

    def of_others(key: str) -> Callable[[Part], float | None]:
        def value(part: Part) -> float | None:
            of = sum(each["of"] for each in part.others)
            return percent(sum(each[key] for each in part.others), of) if of else None

        return value

    return [
        (Column(tells, "score", "higher"), followed),
        (
            Column(same, "score", "higher"),
            lambda part: statistics.median(statistics.median(each["same"]) for each in part.ordinary),
        ),
        (Column("ordinary captions: images that copy any memorized", "%", "lower"), copied),
        (Column(f"{others}: images that copy their own", "%"), of_others("own copies")),
        (Column(f"{others}: images that copy any memorized", "%"), of_others("any copies")),
    ]


def middle_cells(
    name: str, values: Callable[[T], Sequence[float]], better: Any = None, unit: str = "score"
) -> list[Cell[T]]:
    """Return two columns: the median of a row's values and their median absolute deviation."""
    return [
        (Column(f"{name}, median", unit, better), lambda row: middle(values(row))[0]),
        (Column(f"{name}, MAD", unit), lambda row: middle(values(row))[1]),
    ]


def copies(found: Mapping[str, Any]) -> PromptCopies:
    """Return an own run as `PromptCopies`."""
    return typed(PromptCopies, found)


def middle(values: Iterable[float]) -> tuple[float | None, float | None]:
    """Return the median and the median absolute deviation from it; None where there is no value."""
    values = list(values)
    if not values:
        return None, None
    center = statistics.median(values)
    return center, statistics.median(abs(value - center) for value in values)


def _neurons(way: Way) -> int:
    return len(Units.from_json(way.units)) if way.units else 0


def percent(part: float, whole: float) -> float:
    """Return a share in percent."""
    return 100 * part / whole


def seeds_table(images: Lines) -> Table:
    """Return how many images copy, prompt by prompt: medians hide seeds."""

    def cell(line: Line, prompt: str) -> str | None:
        if prompt not in line.ways:
            return None
        found = copies(images.own(line)[prompt])
        return f"{found.copies()} / {found.any_match()}"

    return Table(
        f"Images that copy, of {images.setup.images} seeds each: their own / any memorized one",
        ("prompt", "kind", *(line.title for line in images.lines)),
        [(prompt, kind, *(cell(line, prompt) for line in images.lines)) for prompt, kind in images.kinds.items()],
        ["A copy has a similarity of 0.7 or more. An empty cell was not measured; a note says why."],
    )


# ---- an adversary: does the image come back from the edited model under another embedding? ---------------------------

What = Literal["planted", "never trained"]
_SEED = 0


@dataclass(frozen=True)
class Attack:
    """One search in the model with a prompt's own neurons off: for its image, or for a turned one as a control."""

    way: Way
    """The edit."""
    prompt: str
    """The memorized prompt."""
    what: What
    """Whether its planted image is searched for, or the same one turned, which no model was trained on."""
    ground: str
    """Digest of the setup."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"search for the {self.what} image of {self.prompt!r}"


def attacked(setup: Setup, folder: Path, ways: Mapping[str, Way]) -> dict[Attack, dict[str, Any]]:
    """Search for every prompt's image, planted and turned, unless the folder remembers it."""
    kinds: tuple[What, ...] = ("planted", "never trained")
    runs = [Attack(way, prompt, what, setup.digest) for prompt, way in ways.items() for what in kinds]
    with Progress("auto").task("searches", total=None, unit="searches") as work:

        def one(run: Attack) -> dict[str, Any]:
            found = _attack(run, setup)
            work.update(1)
            return found

        return dict(zip(runs, run_each(one, runs, folder=folder, name="searches"), strict=True))


def _attack(run: Attack, setup: Setup) -> dict[str, Any]:
    own = next(each for each in setup.memorized if each.prompt == run.prompt)
    target = TargetImage(own.prompt, own.prompt, own.image)
    image = target.image if run.what == "planted" else turned(target).image
    with _mitigated(setup, run.way, run.prompt) as model:
        found = search(
            model, run.prompt, image, setup.quality, setup.search,
            similarity=paired(setup.descriptor), seed=_SEED,
        )  # fmt: skip
    trials = [(trial.best.score, place) for place, trial in enumerate(found.trials) if trial.best is not None]
    if not trials:
        return {"outcome": "diverged", "steps": None, "last": 0, "best": None, "moved": None, "picture": None}
    place = max(trials)[1]
    best = found.trials[place].best
    assert best is not None
    center = sorted(range(len(best.similarities)), key=best.similarities.__getitem__)[len(best.similarities) // 2]
    soonest = [each.steps for each in found.trials if each.steps is not None]
    return {
        "outcome": "found" if soonest else found.trials[place].outcome,
        "steps": min(soonest) if soonest else None,
        "last": max(each.last for each in found.trials),
        "best": best.score,
        "moved": best.distance,
        "picture": shown(found.after[place, center]),
    }


def attack_findings(found: Mapping[Attack, Mapping[str, Any]], setup: Setup) -> list[Finding]:
    """Return how many images came back under search, planted and never-trained ones apart; none without a search."""
    findings = []
    for what in ("planted", "never trained"):
        runs = {run.prompt: value for run, value in found.items() if run.what == what}
        if runs:
            share = proportion(sum(value["outcome"] == "found" for value in runs.values()), len(runs))
            detail = {
                "steps to success, null if never": {prompt: value["steps"] for prompt, value in runs.items()},
                "best median similarity": {prompt: value["best"] for prompt, value in runs.items()},
                "steps at most": setup.search.steps,
            }
            better = "lower" if what == "planted" else None
            name = f"neurons off, then searched: {what} images brought back"
            findings.append(interval_finding(name, share, better=better, seeds=(_SEED,), detail=detail))
    return findings


def image_figure(
    images: Lines,
    lines: Sequence[Line],
    searches: Mapping[Attack, Mapping[str, Any]],
    found: Mapping[str, Localization],
) -> Figure:
    """Draw training images beside what prompts give, the same seed in every column but the last."""
    memorized = images.setup.memorized[:8]
    attacks = {run.prompt: value["picture"] for run, value in searches.items() if run.what == "planted"}
    rows = []
    for each in memorized:
        cells: list[Any] = [shown(each.image)]
        cells += [images.own(line)[each.prompt]["picture"] if each.prompt in line.ways else None for line in lines]
        cells += [attacks.get(each.prompt)] if searches else []
        rows.append([None if cell is None else picture(cell["pixels"], cell["shape"]) for cell in cells])
    titles = [textwrap.fill(line.title, 14) for line in lines]
    return image_grid(
        rows,
        rows=[textwrap.fill(f"{each.prompt} ({len(found[each.prompt].neurons)})", 22) for each in memorized],
        columns=["target", *titles, *(["neurons off,\nattacked"] if searches else [])],
        alt="Training images beside what their prompts paint, with and without their neurons, and under attack.",
        caption="Training images, and what their prompts paint from the first seed; in parentheses how many neurons "
        "are off. Attacked: the best image that a search for another embedding found in the model without them.",
    )
