"""A pipeline's folder and a table of memorized prompts in, the same pipeline with their neurons switched off out.

Statistics, threshold, localization and edit in one go, as recipes and the tour do it. What was found lies in the new
folder's record; a call that was stopped goes on prompt by prompt.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal, final

import torch
from pydantic import DirectoryPath, Field, FilePath

from netweight.attacks.embedding_search.compare import Comparison, compare
from netweight.attacks.embedding_search.folder import FolderSearch, Prepared, predicted_error, prepare
from netweight.attacks.embedding_search.report import add_section, verdict
from netweight.core.files import refuse_existing, whole_folder
from netweight.core.progress import QUIET, Progress
from netweight.core.units import Units
from netweight.data.memorized_pairs import Pair, check_pairs, painted_size, read_pairs
from netweight.data.prompts import read_prompts
from netweight.errors import UsageError
from netweight.hf.load_pipeline import load_text_to_image
from netweight.methods.forget.detect import Score, Threshold, calibrate, look_of
from netweight.methods.forget.edit import FOLDER, EditRecord, read_records
from netweight.methods.forget.harden import RECORD, HardenRecord, HardenSettings, harden_
from netweight.methods.forget.images import Alignment, ImagesConfig, Painted, PaintSettings, paint, verdicts
from netweight.methods.forget.localize import Localization, detect_resumably, localize, write_results
from netweight.methods.forget.mitigation import Deactivated, neuron_counts, random_units
from netweight.methods.forget.report import (
    DETECTION,
    IMAGES,
    NEURONS,
    SEARCH,
    DetectionSubject,
    add_finding_sections,
    add_images_section,
    attacked_images,
)
from netweight.methods.forget.settings import DetectionConfig, LocalizationConfig
from netweight.methods.forget.statistics import measure_statistics
from netweight.metrics.copies import Memorized
from netweight.nn.text_to_image import TextToImage
from netweight.report.finding import Finding
from netweight.report.report import Report

Count = Annotated[int, Field(ge=1)]
# Ordinary prompts that are needed: half of them calibrate, the others are held out.
LEAST_ORDINARY = 4


@final
@dataclass(frozen=True)
class FolderForgetting:
    """How prompts are forgotten.

    Attributes:
        targets: Rows with prompt and image: memorized pairs, see `memorized_pairs`. Images are looked at by audits.
        ordinary: Prompts that are not memorized, a file of `read_prompts`; every second one calibrates the threshold,
            the others are held out from it.
        column: Where the latter's prompts are.
        look_seeds: Initial noises per prompt that detection compares.
        look_steps: Of the schedule whose first steps detection looks at.
        timing: Which of them, see `DetectionConfig`.
        scope: Which value layers, see `value_layers`.
        fidelity: See `LocalizationConfig`.
        factor: What neurons are multiplied with.
        images: Images per prompt that audits look at.
        guidance: Of their generation.
        steps: Of their scheduler.
        device: Where the model goes.

    Raises:
        UsageError: A setting cannot be meant.
    """

    targets: FilePath
    ordinary: FilePath
    column: str = "prompt"
    look_seeds: Annotated[int, Field(ge=2)] = 10
    look_steps: Annotated[int, Field(ge=2)] = 50
    timing: Literal["paper", "code"] = "paper"
    scope: Literal["down+mid", "all"] = "down+mid"
    fidelity: Literal["corrected", "reference"] = "corrected"
    factor: float = 0.0
    images: Count = 8
    guidance: float = 7.0
    steps: Count = 50
    device: str = "cpu"

    @property
    def detection(self) -> DetectionConfig:
        """How prompts are looked at."""
        return DetectionConfig(tuple(range(self.look_seeds)), self.look_steps, self.timing)


def forget_folder(
    source: str | Path, destination: str | Path, settings: FolderForgetting, *, progress: Progress = QUIET
) -> EditRecord:
    """Find the neurons of all prompts in a table and switch them off in a folder of its own, whole or not at all."""
    from netweight.hf.load_pipeline import load_text_to_image
    from netweight.methods.forget.edit import edit_folder

    source, destination = Path(source), Path(destination)
    refuse_existing(destination, overwrite=None)
    prompts = [str(row.values["prompt"]) for row in check_pairs(settings.targets).rows]
    ordinary = ordinary_prompts(settings.ordinary, settings.column, prompts)
    work = work_folder(destination)
    model = load_text_to_image(source, device=settings.device)
    config = LocalizationConfig(settings.detection, scope=settings.scope, fidelity=settings.fidelity)
    threshold, _ = calibrated(model, ordinary, settings.detection, folder=work, progress=progress)
    statistics = measure_statistics(model, ordinary, scope=settings.scope, progress=progress)
    found = localize(
        model, list(dict.fromkeys(prompts)), statistics, threshold, config,
        ledger=work / "neurons.jsonl", progress=progress,
    )  # fmt: skip
    if not any(each.neurons for each in found):
        told = "; ".join(f"{each.prompt!r}: {each.status}" for each in found[:3])
        raise UsageError(
            f"No neurons were found for {len(found)} prompts ({told}).",
            cure="Look at them first: netweight forget detect.",
        )
    write_results(work / "neurons.json", found, model=model.digest())
    record = edit_folder(source, destination, work / "neurons.json", factor=settings.factor)
    shutil.rmtree(work)
    return record


def ordinary_prompts(path: Path, column: str, memorized: Sequence[str]) -> list[str]:
    """Read prompts that are not memorized."""
    ordinary = read_prompts(path, column=column)
    both = sorted(set(ordinary) & set(memorized))
    if both:
        raise UsageError(
            f"The prompt {both[0]!r} is among the ordinary and the memorized.", cure="Leave it out of one."
        )
    if len(ordinary) < LEAST_ORDINARY:
        raise UsageError(
            f"{path} holds {len(ordinary)} ordinary prompts; at least {LEAST_ORDINARY} are needed.",
            cure="Half of them calibrate the threshold: give 100 or more.",
        )
    return ordinary


def calibrated(
    model: TextToImage, ordinary: Sequence[str], config: DetectionConfig, *, folder: Path, progress: Progress = QUIET
) -> tuple[Threshold, list[Score]]:
    """Calibrate a threshold on every second ordinary prompt; the scores of the others are returned with it."""
    scores = detect_resumably(model, ordinary, config, ledger=folder / "scores.jsonl", progress=progress)
    return calibrate(scores[::2], model=model.digest(), look=look_of(model, config)), scores[1::2]


def work_folder(destination: Path) -> Path:
    """The folder beside a destination in which unfinished work is kept."""
    return destination.with_name(f".{destination.name}.netweight-work")


@final
@dataclass(frozen=True)
class FolderHardening:
    """How a folder is hardened."""

    targets: FilePath  # rows with prompt and image: memorized pairs, see `memorized_pairs`
    ordinary: FilePath  # prompts whose answers are to stay, a file of `read_prompts`
    column: str = "prompt"  # where they are
    # Rows with prompt and image: what is to be painted instead, row by row as `targets`; None takes the model's own
    # images of ordinary prompts.
    surrogates: FilePath | None = None
    # The error that is descended is chosen by what the model predicts.
    settings: HardenSettings = field(default_factory=HardenSettings)
    device: str = "cpu"  # where the model goes


def harden_folder(
    source: str | Path, destination: str | Path, hardening: FolderHardening, *, progress: Progress = QUIET
) -> HardenRecord:
    """Harden a pipeline and write it as a folder of its own, whole or not at all."""
    source, destination = Path(source), Path(destination)
    refuse_existing(destination, overwrite=None)
    prompts = [str(row.values["prompt"]) for row in check_pairs(hardening.targets).rows]
    ordinary = ordinary_prompts(hardening.ordinary, hardening.column, prompts)
    if hardening.surrogates is not None and len(check_pairs(hardening.surrogates).rows) != len(prompts):
        raise UsageError(
            f"{hardening.surrogates} has not as many rows as {hardening.targets}.", cure="Give one surrogate for each."
        )
    model = load_text_to_image(source, dtype=torch.float32, device=hardening.device)
    size = painted_size(model)
    images = torch.stack([pair.image for pair in read_pairs(hardening.targets, size)])
    surrogates = None
    if hardening.surrogates is not None:
        surrogates = torch.stack([pair.image for pair in read_pairs(hardening.surrogates, size)])
    settings = replace(
        hardening.settings, search=replace(hardening.settings.search, error=predicted_error(model))
    )  # fmt: skip
    work = work_folder(destination)
    try:
        record = harden_(
            model, prompts, images, ordinary, settings=settings, surrogates=surrogates, folder=work, progress=progress
        )
    except torch.OutOfMemoryError as error:
        raise UsageError(
            f"Memory ran out in training with batches of {settings.batch}.",
            cure=f"Lower the batch, or train fewer layers; then remove {work}, which holds rounds of these settings.",
        ) from error
    with whole_folder(destination) as part:
        model.save(part)
        record.write(part / FOLDER / RECORD)
    shutil.rmtree(work)
    return record


# Ordinary prompts that are painted.
_SHOWN = 16


@final
@dataclass(frozen=True)
class FolderAudit:
    """What is asked of an edited pipeline."""

    search: FolderSearch  # the pipeline before its edit, memorized pairs, and how embeddings are searched for
    ordinary: FilePath  # prompts that are not memorized, a file of `read_prompts`
    column: str = "prompt"  # where they are
    images: Count = 8  # images per prompt
    look_seeds: Annotated[int, Field(ge=2)] = 10  # initial noises per prompt that detection compares
    timing: Literal["paper", "code"] = "paper"  # which step detection looks at, see `DetectionConfig`
    # A folder of transformers with a CLIP, for prompt alignment; None leaves that out.
    clip: DirectoryPath | None = None
    searched: bool = True  # whether embeddings are searched for; where not, the report says so in red
    search_seeds: Sequence[int] = field(default=(0,))


@final
@dataclass(frozen=True)
class Audited:
    """What the audits found."""

    findings: tuple[Finding, ...]
    suppressed: Mapping[str, str]  # by prompt, what the edit did to its images, in words
    searched: Mapping[str, str]  # by model, what the searches found, in words; empty if none were made


def audit_folder(
    audit: FolderAudit, model: Path, report: Report, *, folder: Path, seed: int, progress: Progress = QUIET
) -> Audited:
    """Run all audits on an edited pipeline's folder and add what they found to a report."""
    prompts = [str(row.values["prompt"]) for row in check_pairs(audit.search.targets).rows]
    ordinary = ordinary_prompts(audit.ordinary, audit.column, prompts)
    found = localized(model)
    prepared = prepare(audit.search, model)
    _check_edit(model, prepared.subjects[0].model.digest())
    if audit.search.unrelated is None:  # these are of the model's own kind
        prepared = replace(prepared, unrelated=tuple(ordinary))
    config = ImagesConfig(
        prepared.descriptor if audit.search.sscd is not None else None,
        prepared.settings.threshold,
        _clip(audit.clip),
    )
    looks = DetectionConfig(
        tuple(range(audit.look_seeds)), prepared.settings.generation_steps, audit.timing
    )  # fmt: skip
    scores = _scores(prepared.subjects[0].model, prompts, ordinary, looks, folder, progress)
    settings = PaintSettings(
        tuple(range(seed, seed + audit.images)), prepared.settings.guidance, prepared.settings.generation_steps
    )
    painted, warnings = pictured(
        {subject.name: subject.model for subject in prepared.subjects}, prepared.pairs, ordinary[:_SHOWN],
        _units(model), settings, folder=folder, seed=seed, progress=progress,
    )  # fmt: skip
    comparison = _search(audit, prepared, folder, progress) if audit.searched else None
    ran = {DETECTION: True, NEURONS: found is not None, IMAGES: True, SEARCH: comparison is not None}
    findings = add_images_section(
        report, painted, config, seed=seed, warnings=warnings,
        attacked=None if comparison is None else attacked_images(comparison, "edited", folder),
        audits=[name for name, done in ran.items() if done],
    )  # fmt: skip
    told: dict[str, str] = {}
    if comparison is not None:
        findings += add_section(report, comparison, prepared.targets, prepared.wanted, folder=folder, seed=seed)
        told = {name: verdict(comparison, name) for name in comparison.subjects}
    findings += add_finding_sections(report, scores, found)
    return Audited(tuple(findings), verdicts(painted, config), told)


def localized(model: str | Path) -> list[Localization] | None:
    """Return what was localized for the edits of a pipeline's folder; None if its records do not say it."""
    found = [each for record in read_records(model) for each in record.thresholds.get("found", [])]
    return [Localization.from_json(each) for each in found] or None


def pictured(
    models: Mapping[str, TextToImage],
    pairs: Sequence[Pair],
    ordinary: Sequence[str],
    units: Units,
    settings: PaintSettings,
    *,
    folder: Path,
    seed: int,
    progress: Progress = QUIET,
) -> tuple[Painted, list[str]]:
    """Paint memorized and ordinary prompts by the original, by its edit, and with as many random neurons off."""
    memorized = [Memorized(pair.prompt, pair.kind, pair.image) for pair in pairs]
    prompts = list(dict.fromkeys(pair.prompt for pair in pairs))
    both = {
        name: paint(models[name], [*prompts, *ordinary], settings, folder=folder, progress=progress)
        for name in ("original", "edited")
    }
    controls = {
        name: paint(model, prompts, settings, folder=folder, progress=progress)
        for name, model in models.items()
        if name not in both
    }
    name, random = _random(models["original"], units, seed)
    if random is not None:
        with Deactivated(random)(models["original"], prompts) as model:
            controls[name] = paint(
                model, prompts, settings, setting=random.to_json(), folder=folder, progress=progress
            )  # fmt: skip
    warnings = [] if random is not None else [f"There is no control of random neurons: {name}."]
    return Painted(memorized, list(ordinary), both["original"], both["edited"], controls), warnings


def _check_edit(model: Path, base: str) -> None:
    """Refuse a base that the edited folder was not made of, where its records tell."""
    known = [record.before for record in read_records(model)]
    if known and base not in known:
        raise UsageError(
            f"{model} was not made of this base: of {known[0]}, not {base}.",
            cure="Name the pipeline before its edit as --base.",
        )


def _random(model: TextToImage, units: Units, seed: int) -> tuple[str, Units | None]:
    """As many other neurons, matched by layer where a layer has so many; or why there are none."""
    if not units:
        return "the edited folder holds no record of its neurons", None
    counts = neuron_counts(model.denoiser, scope="all")
    reason = ""
    for matched, name in ((True, "random neurons, matched by layer"), (False, "random neurons")):
        try:
            return name, random_units(units, counts, layer_matched=matched, seed=seed)
        except UsageError as error:  # more than half of a layer cannot be matched by others
            reason = error.reason.rstrip(".")
    return reason, None


def _units(model: Path) -> Units:
    found = Units()
    for record in read_records(model):
        found = found | record.units
    return found


def scored(
    source: str | Path, settings: FolderForgetting, *, folder: Path, progress: Progress = QUIET
) -> DetectionSubject:
    """Score the prompts of a forgetting by the model before it."""
    from netweight.hf.load_pipeline import load_text_to_image

    prompts = [str(row.values["prompt"]) for row in check_pairs(settings.targets).rows]
    ordinary = ordinary_prompts(settings.ordinary, settings.column, prompts)
    model = load_text_to_image(source, device=settings.device)
    return _scores(model, prompts, ordinary, settings.detection, folder, progress)


def shown(
    source: str | Path,
    destination: str | Path,
    settings: FolderForgetting,
    *,
    folder: Path,
    seed: int,
    progress: Progress = QUIET,
) -> tuple[Painted, ImagesConfig]:
    """Paint what a forgetting came to, and write a report of the images."""
    from netweight.hf.load_pipeline import load_text_to_image

    folders = {"original": Path(source), "edited": Path(destination)}
    models = {
        name: load_text_to_image(place, device=settings.device, name=name) for name, place in folders.items()
    }  # fmt: skip
    pairs = read_pairs(settings.targets, painted_size(models["original"]))
    ordinary = ordinary_prompts(settings.ordinary, settings.column, [pair.prompt for pair in pairs])
    how = PaintSettings(tuple(range(seed, seed + settings.images)), settings.guidance, settings.steps)
    painted, warnings = pictured(
        models, pairs, ordinary[:_SHOWN], _units(Path(destination)), how, folder=folder, seed=seed, progress=progress
    )
    report, config = Report(f"Images of {Path(destination).name}"), ImagesConfig()
    add_images_section(report, painted, config, seed=seed, warnings=warnings)
    report.write(folder)
    return painted, config


def _scores(
    model: TextToImage,
    prompts: Sequence[str],
    ordinary: Sequence[str],
    config: DetectionConfig,
    folder: Path,
    progress: Progress,
) -> DetectionSubject:
    """How the model before its edit looks at prompts."""
    threshold, held_out = calibrated(model, ordinary, config, folder=folder, progress=progress)
    scores = detect_resumably(
        model, list(dict.fromkeys(prompts)), config, ledger=folder / "scores.jsonl", progress=progress
    )
    return DetectionSubject(scores, held_out, threshold)


def _search(audit: FolderAudit, prepared: Prepared, folder: Path, progress: Progress) -> Comparison:
    return compare(
        prepared.subjects, prepared.targets, prepared.unrelated, prepared.settings, seeds=audit.search_seeds,
        similarity=prepared.similarity, measure=prepared.measure, folder=folder, progress=progress,
    )  # fmt: skip


def _clip(folder: Path | None) -> Alignment | None:
    if folder is None:
        return None
    from netweight.hf.clip import Clip

    return Clip(folder)
