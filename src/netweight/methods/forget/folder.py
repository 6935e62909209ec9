"""Forgetting in pipeline folders: forget, harden and audit, and the method's entry in recipes.

Statistics, threshold, localization and edit in one go. What was found lies in the new folder's record; a call that was
stopped continues prompt by prompt.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from netweight.attacks.embedding_search.folder import prepare
from netweight.attacks.embedding_search.report import search_section, verdict
from netweight.core.progress import QUIET, Progress
from netweight.core.units import Units
from netweight.data.memorized_pairs import Pair, check_pairs, image_files, image_size, read_pairs
from netweight.data.prompts import read_prompts
from netweight.errors import UsageError
from netweight.hf.load_pipeline import check_pipeline, load_text_to_image, trained_prediction
from netweight.job import Job, check_destination
from netweight.methods.forget.detect import Score, Threshold, calibrate, detect_resumably, look_of
from netweight.methods.forget.edit import FOLDER, EditRecord, apply_found_, publish, read_records
from netweight.methods.forget.harden import RECORD, HardenRecord, harden
from netweight.methods.forget.images import GeneratedImages, ImagesConfig, generate_images, verdicts
from netweight.methods.forget.layers import measure_statistics
from netweight.methods.forget.localize import Localization, localize, union
from netweight.methods.forget.mitigations import Deactivated, neuron_counts, random_units
from netweight.methods.forget.report import (
    DETECTION,
    IMAGES,
    NEURONS,
    SEARCH,
    TREATMENT,
    DetectionSubject,
    attacked_images,
    detection,
    images,
    neurons,
)
from netweight.methods.forget.settings import (
    DetectionConfig,
    FolderAudit,
    FolderForgetting,
    FolderHardening,
    GenerationSettings,
)
from netweight.metrics.copies import Memorized
from netweight.nn.text_to_image import TextToImage
from netweight.registry import CardEntry, Method
from netweight.report.audit import of_treatment
from netweight.report.finding import Finding
from netweight.report.report import Report, read_report

# Ordinary prompts that are needed: half of them calibrate, the others are held out.
_LEAST_ORDINARY = 4
_SHOWN = 16  # ordinary prompts whose images are compared
_SEED = 0  # of audits in recipes


def forget_folder(
    source: str | Path, destination: str | Path, settings: FolderForgetting, *, progress: Progress = QUIET
) -> EditRecord:
    """Find the neurons of all prompts in a table and switch them off in a folder of its own, whole or not at all."""
    source, destination = Path(source), Path(destination)
    check_destination(destination, overwrite=None)
    prompts, ordinary = _prompts(settings.targets, settings.ordinary, settings.column)
    model, config = load_text_to_image(source, device=settings.device), settings.localization
    with Job.beside(destination, overwrite=None) as job:
        threshold, _ = calibrated(model, ordinary, config.detection, folder=job.folder, progress=progress)
        statistics = measure_statistics(model, ordinary, scope=config.scope, progress=progress)
        found = localize(
            model, list(dict.fromkeys(prompts)), statistics, threshold, config,
            ledger=job.folder / "neurons.jsonl", progress=progress,
        )  # fmt: skip
        if not any(each.neurons for each in found):
            words = "; ".join(f"{each.prompt!r}: {each.status}" for each in found[:3])
            raise UsageError(
                f"No neurons were found for {len(found)} prompts ({words}).",
                cure="Score them first: netweight forget detect.",
            )
        record = apply_found_(model, union(found), found, file="neurons.json", factor=settings.factor)
        publish(job, model, [*read_records(source), record], destination)
    return record


def harden_folder(
    source: str | Path, destination: str | Path, hardening: FolderHardening, *, progress: Progress = QUIET
) -> HardenRecord:
    """Harden a pipeline and write it as a folder of its own, whole or not at all."""
    source, destination = Path(source), Path(destination)
    check_destination(destination, overwrite=None)
    prompts, ordinary = _prompts(hardening.targets, hardening.ordinary, hardening.column)
    if hardening.surrogates is not None and len(check_pairs(hardening.surrogates).rows) != len(prompts):
        raise UsageError(
            f"{hardening.surrogates} has not as many rows as {hardening.targets}.", cure="Give one surrogate for each."
        )
    model = load_text_to_image(source, dtype=torch.float32, device=hardening.device)
    size = image_size(model)
    targets = torch.stack([pair.image for pair in read_pairs(hardening.targets, size)])
    surrogates = None
    if hardening.surrogates is not None:
        surrogates = torch.stack([pair.image for pair in read_pairs(hardening.surrogates, size)])
    settings = hardening.settings.replace(search={"error": trained_prediction(model)})
    with Job.beside(destination, overwrite=None) as job:
        try:
            record = harden(
                model, prompts, targets, ordinary, settings=settings, surrogates=surrogates, folder=job,
                progress=progress,
            )  # fmt: skip
        except torch.OutOfMemoryError as error:
            raise UsageError(
                f"Memory ran out in training with batches of {settings.batch}.",
                cure=f"Lower the batch, or train fewer layers; then remove {job.folder}, which holds rounds of these "
                "settings.",
            ) from error
        shutil.rmtree(job.tree)  # what a run left that was killed here
        model.save(job.tree)
        record.write(job.file(f"{FOLDER}/{RECORD}"))
        job.publish(destination, overwrite=None)
    return record


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
    prompts, ordinary = _prompts(audit.search.targets, audit.ordinary, audit.column)
    found = localized(model)
    prepared = prepare(audit.search, model)
    models: dict[str, TextToImage] = {subject.name: subject.model for subject in prepared.subjects}
    _check_edit(model, models["original"].digest())
    if audit.search.unrelated is None:  # these are of the model's own kind
        prepared = dataclasses.replace(prepared, unrelated=tuple(ordinary))
    search = prepared.settings
    config = ImagesConfig(prepared.descriptor if audit.search.sscd is not None else None, search.threshold)
    if audit.clip is not None:
        from netweight.hf.clip import Clip

        config = dataclasses.replace(config, alignment=Clip(audit.clip))
    first = DetectionConfig(seeds=tuple(range(audit.look_seeds)), steps=search.generation_steps, timing=audit.timing)
    scores = _scores(models["original"], prompts, ordinary, first, folder, progress)
    settings = GenerationSettings(
        seeds=tuple(range(seed, seed + audit.images)), guidance=search.guidance, steps=search.generation_steps
    )
    made, warnings = generate_before_and_after(
        models, prepared.pairs, ordinary[:_SHOWN], _units(model), settings, folder=folder, seed=seed, progress=progress
    )
    comparison = None
    if audit.searched:
        comparison = prepared.compare(range(seed, seed + audit.search.seeds), folder=folder, progress=progress)
    ran = {DETECTION: True, NEURONS: found is not None, IMAGES: True, SEARCH: comparison is not None}
    attacked = None if comparison is None else attacked_images(comparison, "edited", folder)
    section = dataclasses.replace(images(made, config, seed=seed, attacked=attacked), warnings=warnings)
    sections = [of_treatment(section, TREATMENT, [name for name, done in ran.items() if done])]
    searched: dict[str, str] = {}
    if comparison is not None:
        sections.append(search_section(comparison, prepared.targets, prepared.wanted, folder=folder, seed=seed))
        searched = {name: verdict(comparison, name) for name in comparison.subjects}
    sections.append(detection(scores))
    if found is not None:
        sections.append(neurons(found))
    for each in sections:
        report.add(each)
    return Audited(tuple(finding for each in sections for finding in each.findings), verdicts(made, config), searched)


def localized(model: str | Path) -> list[Localization] | None:
    """Return what was localized for the edits of a pipeline's folder; None if its records do not say it."""
    found = [each for record in read_records(model) for each in record.thresholds.get("found", [])]
    return [Localization.from_json(each) for each in found] or None


def generate_before_and_after(
    models: Mapping[str, TextToImage],
    pairs: Sequence[Pair],
    ordinary: Sequence[str],
    units: Units,
    settings: GenerationSettings,
    *,
    folder: Path,
    seed: int,
    progress: Progress = QUIET,
) -> tuple[GeneratedImages, list[str]]:
    """Generate memorized and ordinary prompts by the original, by its edit, and with as many random neurons off."""
    memorized = [Memorized(pair.prompt, pair.kind, pair.image) for pair in pairs]
    prompts = list(dict.fromkeys(pair.prompt for pair in pairs))
    made = {
        name: generate_images(
            model, [*prompts, *ordinary] if name in ("original", "edited") else prompts, settings, folder=folder,
            progress=progress,
        )
        for name, model in models.items()
    }  # fmt: skip
    original, edited = made.pop("original"), made.pop("edited")
    name, random = _random(models["original"], units, seed)
    if random is not None:
        with Deactivated(random)(models["original"], prompts) as model:
            made[name] = generate_images(
                model, prompts, settings, setting=random.to_json(), folder=folder, progress=progress
            )
    warnings = [] if random is not None else [f"There is no control of random neurons: {name}."]
    return GeneratedImages(memorized, list(ordinary), original, edited, made), warnings


def _random(model: TextToImage, units: Units, seed: int) -> tuple[str, Units | None]:
    """As many other neurons, matched by layer where a layer has enough; or why there are none."""
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


def calibrated(
    model: TextToImage, ordinary: Sequence[str], config: DetectionConfig, *, folder: Path, progress: Progress = QUIET
) -> tuple[Threshold, list[Score]]:
    """Calibrate a threshold on every second ordinary prompt; return it with the scores of the others."""
    scores = detect_resumably(model, ordinary, config, ledger=folder / "scores.jsonl", progress=progress)
    return calibrate(scores[::2], model=model.digest(), look=look_of(model, config)), scores[1::2]


def _scores(
    model: TextToImage,
    prompts: Sequence[str],
    ordinary: Sequence[str],
    config: DetectionConfig,
    folder: Path,
    progress: Progress,
) -> DetectionSubject:
    """Scores of memorized and ordinary prompts by the model before its edit."""
    threshold, held_out = calibrated(model, ordinary, config, folder=folder, progress=progress)
    scores = detect_resumably(
        model, list(dict.fromkeys(prompts)), config, ledger=folder / "scores.jsonl", progress=progress
    )
    return DetectionSubject(scores, held_out, threshold)


def _prompts(targets: Path, ordinary: Path, column: str) -> tuple[list[str], list[str]]:
    """Memorized prompts, and those that are not."""
    memorized = [str(row.values["prompt"]) for row in check_pairs(targets).rows]
    others = read_prompts(ordinary, column=column)
    both = sorted(set(others) & set(memorized))
    if both:
        raise UsageError(
            f"The prompt {both[0]!r} is among the ordinary and the memorized.", cure="Leave it out of one."
        )
    if len(others) < _LEAST_ORDINARY:
        raise UsageError(
            f"{ordinary} holds {len(others)} ordinary prompts; at least {_LEAST_ORDINARY} are needed.",
            cure="Half of them calibrate the threshold: give 100 or more.",
        )
    return memorized, others


def _check_edit(model: Path, base: str) -> None:
    """Refuse a base that the edited folder was not made of, where its records name it."""
    known = [record.before for record in read_records(model)]
    if known and base not in known:
        raise UsageError(
            f"{model} was not made of this base: of {known[0]}, not {base}.",
            cure="Name the pipeline before its edit as --base.",
        )


def _units(model: Path) -> Units:
    """The neurons of all edits of a folder."""
    found = Units()
    for record in read_records(model):
        found = found | record.units
    return found


def _apply(source: Path, destination: Path, settings: FolderForgetting, progress: Progress) -> None:
    forget_folder(source, destination, settings, progress=progress)


def _examine(
    audit: str, destination: Path, source: Path, settings: FolderForgetting, progress: Progress
) -> tuple[Any, Any]:
    """Gather the subject of an audit; generated images and their section of the report stay beside the folder."""
    beside = _beside(destination)
    if audit == DETECTION:
        prompts, ordinary = _prompts(settings.targets, settings.ordinary, settings.column)
        model = load_text_to_image(source, device=settings.device)
        return _scores(model, prompts, ordinary, settings.localization.detection, beside, progress), None
    if audit == NEURONS:
        found = localized(destination)
        if found is None:
            raise UsageError(f"{destination} holds no record of what was localized.", cure="Make it again.")
        return found, None
    models = {
        name: load_text_to_image(folder, device=settings.device, name=name)
        for name, folder in (("original", source), ("edited", destination))
    }
    pairs = read_pairs(settings.targets, image_size(models["original"]))
    _, ordinary = _prompts(settings.targets, settings.ordinary, settings.column)
    made, warnings = generate_before_and_after(
        models, pairs, ordinary[:_SHOWN], _units(destination), settings.generation(_SEED), folder=beside, seed=_SEED,
        progress=progress,
    )  # fmt: skip
    section = dataclasses.replace(images(made, ImagesConfig(), seed=_SEED), warnings=warnings)
    Report(f"Images of {destination.name}").add(section).write(beside)
    return made, ImagesConfig()


def _illustrate(destination: Path, number: int, report: Report) -> None:
    """Show the images of the audit; its findings stand in the step's section."""
    folder = _beside(destination)
    if (folder / "report.json").is_file():
        for section in read_report(folder).sections:
            title = f"{number}. {section.title}"
            report.add(dataclasses.replace(section, title=title, findings=(), treatment=None, missing_audits=()))


def _beside(destination: Path) -> Path:
    return destination.with_name(f"{destination.name}-images")


def _check(source: Path | None, settings: FolderForgetting) -> None:
    if source is not None:
        check_pipeline(source)
    _prompts(settings.targets, settings.ordinary, settings.column)


def _card(folder: Path) -> CardEntry | None:
    if not (folder / FOLDER).exists():
        return None
    records = read_records(folder)
    text = (
        "Neurons on which memorized training images hang were switched off in the weights. That suppresses these "
        "images under their prompts; other text embeddings may still bring them back. "
        "`netweight forget undo FOLDER NEW` takes the last edit back to the last bit."
    )
    facts = (
        ("edits", str(len(records))),
        ("neurons", str(sum(len(record.units) for record in records))),
        ("layers", str(len({module for record in records for module in record.units.modules}))),
        ("prompts", str(sum(len(record.prompts) for record in records))),
    )
    return CardEntry("Memorization switched off", text, facts, ("unlearning",))


FORGET = Method(
    TREATMENT, FolderForgetting, home="netweight.methods.forget.report", apply=_apply, examine=_examine,
    by_attack={SEARCH: "embedding"}, illustrate=_illustrate, check=_check,
    reads=lambda settings: image_files(settings.targets), card=_card,
)  # fmt: skip
