"""Forgetting in pipeline folders: forget and audit, and the method's entry in recipes.

Statistics, threshold, localization and edit in one go. What was found lies in the new folder's record; a call that was
stopped continues prompt by prompt.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from netweight.attacks.embedding_search.folder import prepare
from netweight.attacks.embedding_search.report import search_section, verdict
from netweight.core.names import Units
from netweight.core.progress import QUIET, Progress
from netweight.data.memorized import MemorizedPair, check_pairs, image_files, image_size, read_pairs, read_prompts
from netweight.errors import UsageError
from netweight.hf.load_pipeline import (
    PipelineModel,
    check_lengths,
    check_pipeline,
    open_pipeline,
    trained_prediction,
)
from netweight.job import Job, check_destination
from netweight.methods.forget.detect import Score, Threshold, calibrate, detect_resumably, look_of
from netweight.methods.forget.edit import apply_found_, forget, switch_off
from netweight.methods.forget.edited_folder import write_edited
from netweight.methods.forget.layers import changed_neurons, measure_statistics
from netweight.methods.forget.localize import Localization, localize, union
from netweight.methods.forget.mitigations import Deactivated, neuron_counts, random_units
from netweight.methods.forget.records import FOLDER, EditRecord, read_records
from netweight.methods.forget.report import (
    DETECTION,
    IMAGES,
    NEURONS,
    SEARCH,
    TREATMENT,
    DetectionSubject,
    GeneratedImages,
    ImagesConfig,
    attacked_images,
    detection,
    generate_images,
    images,
    neurons,
    verdicts,
)
from netweight.methods.forget.settings import (
    DetectionConfig,
    FolderAudit,
    FolderForgetting,
    GenerationSettings,
    LocalizationConfig,
)
from netweight.metrics.copies import Clip, Memorized
from netweight.nn.text_to_image import TextToImage
from netweight.registry import CardEntry
from netweight.report.audit import of_treatment
from netweight.report.finding import Finding
from netweight.report.report import Report

# Ordinary prompts that are needed: half of them calibrate, the others are held out.
_LEAST_ORDINARY = 4
_SHOWN = 16  # ordinary prompts whose images are compared
_SEED = 0  # of audits in recipes


def forget_folder(
    source: str | Path, destination: str | Path, settings: FolderForgetting, *, progress: Progress = QUIET
) -> EditRecord:
    """Edit a pipeline so that it forgets, and write it as a folder of its own, whole or not at all."""
    source, destination = Path(source), Path(destination)
    check_destination(destination, overwrite=None)
    prompts, ordinary, anchors = _asked(settings)
    model, earlier = open_pipeline(source, settings.pipeline), read_records(source)
    check_lengths(model, [*prompts, *(anchors or [])])
    with Job.beside(destination, overwrite=None) as job:
        if settings.neurons is not None:
            record = switch_off(model, settings.neurons, earlier, factor=settings.factor)
        elif settings.method == "neurons":
            record = _neurons_off(model, prompts, ordinary, settings, job, progress)
        else:
            record = _led_elsewhere(model, prompts, anchors, ordinary, settings, job, progress)
        return write_edited(job, model, record, destination, other_weights=settings.other_weights, undo=settings.undo)


def _neurons_off(
    model: PipelineModel, prompts: list[str], ordinary: list[str], settings: FolderForgetting, job: Job,
    progress: Progress,
) -> EditRecord:  # fmt: skip
    """Calibrate, measure, localize and switch off; a second call goes on prompt by prompt."""
    config = settings.localization
    found = _found(model, prompts, ordinary, config, job, progress)
    if not any(each.neurons for each in found):
        words = "; ".join(f"{each.prompt!r}: {each.status}" for each in found[:3])
        raise UsageError(
            f"No neurons were found for {len(found)} prompts ({words}).",
            cure="Score them first: netweight forget detect.",
        )
    return apply_found_(model, union(found), found, file="neurons.json", factor=settings.factor)


def _found(
    model: TextToImage, prompts: Sequence[str], ordinary: Sequence[str], config: LocalizationConfig, folder: Path | Job,
    progress: Progress,
) -> list[Localization]:  # fmt: skip
    """The neurons of prompts, with statistics and threshold of ordinary ones; a second call goes on by prompt."""
    threshold, _ = calibrated(model, ordinary, config.detection, folder=folder, progress=progress)
    statistics = measure_statistics(model, ordinary, scope=config.scope, progress=progress)
    return localize(
        model, list(dict.fromkeys(prompts)), statistics, threshold, config, folder=folder,
        progress=progress,
    )  # fmt: skip


def _led_elsewhere(
    model: PipelineModel, prompts: list[str], anchors: list[str] | None, ordinary: list[str],
    settings: FolderForgetting, job: Job, progress: Progress,
) -> EditRecord:  # fmt: skip
    """Give memorized prompts the answers of their anchors, in closed form or by training."""
    chosen: Any = settings.closed_form
    if settings.method != "closed-form":
        chosen = settings.training(trained_prediction(model))
    images = None
    if settings.method == "siss" and settings.targets is not None:
        pairs = {pair.prompt: pair.image for pair in read_pairs(settings.targets, image_size(model))}
        images = torch.stack([pairs[prompt] for prompt in prompts])
    try:
        return forget(
            model, prompts, ordinary, anchors=anchors, images=images, settings=chosen, folder=job, progress=progress
        )
    except torch.OutOfMemoryError as error:
        raise UsageError(
            f"Memory ran out in training with batches of {settings.distil.batch}.",
            cure=f"Lower the batch, or train fewer layers; then remove {job.folder}.",
        ) from error


def _asked(settings: FolderForgetting) -> tuple[list[str], list[str], list[str] | None]:
    """Memorized prompts, those that are not, and anchors if they are given; nothing where neurons are."""
    if settings.neurons is not None:
        return [], [], None
    prompts, ordinary = _prompts(settings.targets, settings.ordinary, settings.column)
    prompts = list(dict.fromkeys(prompts))
    anchors = None if settings.anchors is None else read_prompts(settings.anchors, column=settings.column)
    if anchors is not None and len(anchors) != len(prompts):
        raise UsageError(
            f"{settings.anchors} holds {len(anchors)} prompts for {len(prompts)} memorized ones.",
            cure="Give one for each, in the order of targets.",
        )
    return prompts, ordinary, anchors


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
    others = [] if audit.others is None else read_prompts(audit.others, column=audit.column)
    _check_apart({"memorized": prompts, "ordinary": ordinary, "other": others})
    found = localized(model)
    prepared = prepare(audit.search, model)
    models: dict[str, TextToImage] = {subject.name: subject.model for subject in prepared.subjects}
    _check_edit(model, models["original"].digest())
    if audit.search.unrelated is None:  # these are of the model's own kind
        prepared = dataclasses.replace(prepared, unrelated=tuple(ordinary))
    search = prepared.settings
    config = ImagesConfig(prepared.descriptor if audit.search.sscd is not None else None, search.threshold)
    if audit.clip is not None:
        config = dataclasses.replace(config, alignment=Clip(audit.clip))
    first = DetectionConfig(seeds=tuple(range(audit.look_seeds)), steps=search.generation_steps, timing=audit.timing)
    scores = _scores(models["original"], models["edited"], prompts, ordinary, first, folder, progress)
    settings = GenerationSettings(
        seeds=tuple(range(seed, seed + audit.images)), guidance=search.guidance, steps=search.generation_steps
    )
    made = generate_before_and_after(
        models, prepared.pairs, ordinary[:_SHOWN], _units(model), settings, folder=folder, seed=seed, others=others,
        progress=progress,
    )  # fmt: skip
    comparison = None
    if audit.searched:
        comparison = prepared.compare(range(seed, seed + audit.search.seeds), folder=folder, progress=progress)
    ran = {DETECTION: True, NEURONS: found is not None, IMAGES: True, SEARCH: comparison is not None}
    attacked = None if comparison is None else attacked_images(comparison, "edited", folder)
    shown = images(made, config, seed=seed, attacked=attacked)
    sections = [of_treatment(shown, TREATMENT, [name for name, done in ran.items() if done])]
    searched: dict[str, str] = {}
    if comparison is not None:
        sections.append(search_section(comparison, prepared.targets, prepared.wanted, folder=folder, seed=seed))
        searched = {name: verdict(comparison, name)[1] for name in comparison.subjects}
    sections.append(detection(scores))
    if found is not None:
        sections.append(neurons(found, _changed(models["original"], models["edited"], found)))
    for each in sections:
        report.add(each)
    told = {prompt: words for prompt, (_, words) in verdicts(made, config).items()}
    return Audited(tuple(finding for each in sections for finding in each.findings), told, searched)


def localized(model: str | Path) -> list[Localization] | None:
    """Return what was localized for the edits of a pipeline's folder; None if its records do not say it."""
    found = [each for record in read_records(model) for each in record.thresholds.get("found", [])]
    return [Localization.from_json(each) for each in found] or None


def generate_before_and_after(
    models: Mapping[str, TextToImage],
    pairs: Sequence[MemorizedPair],
    ordinary: Sequence[str],
    units: Units,
    settings: GenerationSettings,
    *,
    folder: Path,
    seed: int,
    others: Sequence[str] = (),
    progress: Progress = QUIET,
) -> GeneratedImages:
    """Generate memorized and ordinary prompts by the original, by its edit, and with as many random neurons off."""
    memorized = [Memorized(pair.prompt, pair.kind, pair.image) for pair in pairs]
    prompts = list(dict.fromkeys(pair.prompt for pair in pairs))
    made = {
        name: generate_images(
            model, [*prompts, *ordinary, *others] if name in ("original", "edited") else prompts, settings,
            folder=folder, progress=progress,
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
    warnings = () if random is not None else (f"There is no control of random neurons: {name}.",)
    return GeneratedImages(memorized, list(ordinary), original, edited, made, warnings, list(others))


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
    model: TextToImage,
    ordinary: Sequence[str],
    config: DetectionConfig,
    *,
    folder: Path | Job,
    progress: Progress = QUIET,
) -> tuple[Threshold, list[Score]]:
    """Calibrate a threshold on every second ordinary prompt; return it with the scores of the others."""
    scores = detect_resumably(model, ordinary, config, folder=folder, progress=progress)
    return calibrate(scores[::2], model=model.digest(), look=look_of(model, config)), scores[1::2]


def _scores(
    original: TextToImage, edited: TextToImage, prompts: Sequence[str], ordinary: Sequence[str],
    config: DetectionConfig, folder: Path, progress: Progress,
) -> DetectionSubject:  # fmt: skip
    """Scores of memorized and ordinary prompts before the edit, and of memorized ones after it."""
    threshold, held_out = calibrated(original, ordinary, config, folder=folder, progress=progress)
    before, after = (
        detect_resumably(model, list(dict.fromkeys(prompts)), config, folder=folder, progress=progress)
        for model in (original, edited)
    )
    return DetectionSubject(before, held_out, threshold, after)


def _changed(original: TextToImage, edited: TextToImage, found: Sequence[Localization]) -> dict[str, float]:
    return changed_neurons(original, edited, {each.prompt: each.neurons for each in found})


def _prompts(targets: Path | None, ordinary: Path | None, column: str) -> tuple[list[str], list[str]]:
    """Memorized prompts, and those that are not."""
    if targets is None or ordinary is None:
        raise UsageError("Audits need targets and ordinary.", cure="Give both beside the neurons.")
    memorized = [str(row.values["prompt"]) for row in check_pairs(targets).rows]
    others = read_prompts(ordinary, column=column)
    _check_apart({"ordinary": others, "memorized": memorized})
    if len(others) < _LEAST_ORDINARY:
        raise UsageError(
            f"{ordinary} holds {len(others)} ordinary prompts; at least {_LEAST_ORDINARY} are needed.",
            cure="Half of them calibrate the threshold: give 100 or more.",
        )
    return memorized, others


def _check_apart(groups: Mapping[str, Sequence[str]]) -> None:
    """Refuse a prompt in two groups."""
    for (one, first), (two, second) in itertools.combinations(groups.items(), 2):
        if both := sorted(set(first) & set(second)):
            raise UsageError(f"The prompt {both[0]!r} is among the {one} and the {two}.", cure="Leave it out of one.")


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


def apply(source: Path, destination: Path, settings: FolderForgetting, progress: Progress) -> None:
    forget_folder(source, destination, settings, progress=progress)


def examine(
    audit: str, destination: Path, source: Path, settings: FolderForgetting, progress: Progress
) -> tuple[Any, Any]:
    """Gather the subject of an audit; generated images stay beside the folder."""
    beside = _beside(destination)
    models = {
        name: open_pipeline(folder, settings.pipeline, name=name)
        for name, folder in (("original", source), ("edited", destination))
    }
    if audit == DETECTION:
        prompts, ordinary = _prompts(settings.targets, settings.ordinary, settings.column)
        return _scores(
            models["original"], models["edited"], prompts, ordinary, settings.localization.detection, beside, progress
        ), None
    if audit == NEURONS:
        prompts, ordinary = _prompts(settings.targets, settings.ordinary, settings.column)
        found = localized(destination) or _found(
            models["original"], prompts, ordinary, settings.localization, beside, progress
        )
        return found, _changed(models["original"], models["edited"], found)
    assert settings.targets is not None  # checked
    pairs = read_pairs(settings.targets, image_size(models["original"]))
    _, ordinary = _prompts(settings.targets, settings.ordinary, settings.column)
    made = generate_before_and_after(
        models, pairs, ordinary[:_SHOWN], _units(destination), settings.generation(_SEED), folder=beside, seed=_SEED,
        progress=progress,
    )  # fmt: skip
    return made, ImagesConfig()


def _beside(destination: Path) -> Path:
    return destination.with_name(f"{destination.name}-images")


def check(source: Path | None, settings: FolderForgetting) -> None:
    if source is not None:
        check_pipeline(source)
    _prompts(settings.targets, settings.ordinary, settings.column)


def card(folder: Path) -> CardEntry | None:
    if not (folder / FOLDER).exists():
        return None
    records = read_records(folder)
    methods = {
        "neurons": "neurons on which they hang were switched off in the weights",
        "closed-form": "keys and values of their prompts were led elsewhere, in closed form",
        "distil": "noise was added to the weights, and the rest was distilled from the model before",
        "esd": "cross-attention was trained away from their prompts",
        "siss": "the weights were trained away from their images",
    }
    done = "; ".join(dict.fromkeys(methods[record.method] for record in records))
    text = (
        f"Memorized training images are suppressed under their prompts: {done}. Other text embeddings may still bring "
        "them back."
    )
    if all(record.undoable for record in records):
        text += (
            " The folder keeps what was changed: `netweight forget undo FOLDER NEW` takes the last edit back to the "
            "last bit, and so can everybody who has it."
        )
    units = {unit for record in records for unit in record.units}
    facts = (
        ("edits", str(len(records))),
        ("methods", ", ".join(dict.fromkeys(record.method for record in records))),
        *([("neurons", str(len(units)))] if units else []),
        ("prompts", str(sum(len(record.prompts) for record in records))),
    )
    return CardEntry("Memorization switched off", text, facts, ("unlearning",))


def read_files(settings: FolderForgetting) -> list[Path]:
    """The images that the table of targets names."""
    return list(image_files(*([settings.targets] if settings.targets else [])))
