"""Forgetting in pipeline folders: the commands `forget apply` and `forget audit`, and the method's entry in recipes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch

from netweight.attacks.embedding_search.attack_pipelines import prepare
from netweight.attacks.embedding_search.report import search_section, verdict
from netweight.attacks.embedding_search.search import TargetImage, turned
from netweight.core.names import Units
from netweight.core.progress import QUIET, Progress
from netweight.data.images.pairs import MemorizedPair, Pairs, image_files, pair_prompts, read_pairs
from netweight.data.prompts import read_prompts
from netweight.errors import UsageError
from netweight.hf.load_pipeline import (
    PipelineModel,
    check_lengths,
    check_pipeline,
    open_pipeline,
    token_numbers,
    trained_prediction,
)
from netweight.hf.pipeline_prompts import notes_on_unknown_prompts, tokenizers_of
from netweight.job import Job, check_destination
from netweight.methods.forget.check import FEW, check_edit
from netweight.methods.forget.detect import detect_resumably
from netweight.methods.forget.edited_folder import write_edited
from netweight.methods.forget.edits import EDITS
from netweight.methods.forget.edits.edit import EditTask
from netweight.methods.forget.edits.neurons import calibrated, neurons_of_prompts
from netweight.methods.forget.folder_settings import FolderAudit, FolderForgetting
from netweight.methods.forget.forgetting import forget
from netweight.methods.forget.images import generate_before_and_after, generate_images
from netweight.methods.forget.layers import changed_neurons
from netweight.methods.forget.localize import Localization
from netweight.methods.forget.membership import NOISES, Membership, picture_errors
from netweight.methods.forget.records import FOLDER, EditRecord, read_records
from netweight.methods.forget.report import (
    DETECTION,
    IMAGES,
    MEMBERSHIP,
    NEURONS,
    SEARCH,
    TREATMENT,
    DetectionSubject,
    ImagesConfig,
    attacked_images,
    detection,
    images,
    membership,
    neurons,
    verdicts,
)
from netweight.methods.forget.settings import DetectionConfig, GenerationSettings
from netweight.metrics.descriptors import Clip
from netweight.nn.text_to_image import TextToImage
from netweight.registry import CardEntry
from netweight.report.audit import of_treatment
from netweight.report.finding import Finding
from netweight.report.report import Report

# Ordinary prompts that are needed: half of them calibrate, the others are held out.
_LEAST_ORDINARY = 4
_SHOWN = 16  # ordinary prompts whose images are compared
# Seed of audits in recipes.
_SEED = 0


def forget_folder(
    source: str | Path, destination: str | Path, settings: FolderForgetting, *, progress: Progress = QUIET
) -> EditRecord:
    """Edit a pipeline so that it forgets, check the edit, and write the pipeline as a folder of its own.

    Args:
        source: The pipeline's folder, which stays as it is.
        destination: The folder to be made, whole or not at all.
        settings: The edit, and what it is given.
        progress: Reports steps.

    Returns:
        The record of the edit, with the check's counts and what became of the files.

    Raises:
        UsageError: Something that was given does not fit; nothing is written then.
        Unsupported: The pipeline is of a kind that the edit does not work on.
    """
    source, destination = Path(source), Path(destination)
    check_destination(destination, overwrite=None)
    prompts, ordinary, anchors = _asked(settings)
    model, earlier = open_pipeline(source, settings.pipeline), read_records(source)
    check_lengths(model, [*prompts, *(anchors or [])])
    _check_read_apart(model, {"memorized": prompts, "ordinary": ordinary})
    _check_read_apart(model, {"memorized": prompts, "an anchor": anchors or []})
    pairs = _pairs(settings, model)
    with Job.beside(destination, overwrite=None) as job:
        checked = pairs if settings.verify else None
        generation, images_folder = settings.generation(_SEED), job.folder / "checks"
        if checked is not None:
            before = generate_images(model, checked.prompts, generation, folder=images_folder, progress=progress)
        record = _edited(model, prompts, ordinary, anchors, pairs, settings, earlier, job, progress)
        if checked is not None:
            after = generate_images(model, checked.prompts, generation, folder=images_folder, progress=progress)
            record = replace(record, check=check_edit(checked.pairs, before, after).to_json())
        remarks = (*preview(source, settings), *(pairs.remarks if pairs is not None else ()))
        if ordinary and len(ordinary) < FEW:
            remarks += (
                f"{len(ordinary)} ordinary prompts are few: statistics over them are unreliable, and the edit protects "
                "other prompts less. Give 100 or more.",
            )
        if settings.pipeline.embeddings:
            names = ", ".join(path.name for path in settings.pipeline.embeddings)
            remarks += (f"The edit used the words of {names}, which the result does not contain: load the same files "
                "wherever the result is used.",)  # fmt: skip
        record = replace(record, remarks=remarks)
        return write_edited(job, model, record, destination, other_weights=settings.other_weights, undo=settings.undo)


def _edited(
    model: PipelineModel, prompts: list[str], ordinary: list[str], anchors: list[str] | None, pairs: Pairs | None,
    settings: FolderForgetting, earlier: list[EditRecord], job: Job, progress: Progress,
) -> EditRecord:  # fmt: skip
    edit = settings.edit_of(trained_prediction(model))
    pictures = None if pairs is None else [(pair.prompt, pair.image) for pair in pairs.pairs]
    try:
        return forget(
            model, prompts, ordinary, edit=edit, anchors=anchors, pictures=pictures, earlier=earlier, folder=job,
            progress=progress,
        )  # fmt: skip
    except torch.OutOfMemoryError as error:
        raise UsageError(
            "Memory ran out in the training.",
            cure=f"Compute fewer latents at a time, --set {edit.name}.at_once=1, or train fewer layers, such as --set "
            f'{edit.name}.layers="**.attn2"; then remove {job.folder}.',
        ) from error


def _pairs(settings: FolderForgetting, model: PipelineModel) -> Pairs | None:
    """The memorized pairs; None where none were given."""
    return None if settings.targets is None else read_pairs(
        settings.targets, model.image_size, settings.pipeline.fit
    )  # fmt: skip


def _asked(settings: FolderForgetting) -> tuple[list[str], list[str], list[str] | None]:
    """Memorized prompts, those that are not, and anchors if they are given; nothing where neurons are."""
    if not settings.edit.needs_prompts:
        return [], [], None
    prompts, ordinary = _prompts(settings.targets, settings.ordinary, settings.column)
    anchors = None if settings.anchors is None else read_prompts(
        settings.anchors, column=settings.column, distinct=False
    )  # fmt: skip
    if anchors is not None and len(anchors) != len(prompts):
        raise UsageError(
            f"{settings.anchors} contains {len(anchors)} prompts for {len(prompts)} memorized ones.",
            cure="Give one for each, in the order of targets.",
        )
    return prompts, ordinary, anchors


@final
@dataclass(frozen=True)
class AuditResults:
    """Results of the audits."""

    findings: tuple[Finding, ...]
    """Findings of all audits."""
    suppressed: Mapping[str, str]
    """Prompt → description of the edit's effect on its images."""
    searched: Mapping[str, str]
    """Model → description of the searches' results; empty if none were made."""
    remarks: tuple[str, ...] = ()
    """Decisions of the reader of pictures."""


def audit_folder(
    audit: FolderAudit, model: Path, report: Report, *, folder: Path, seed: int, progress: Progress = QUIET
) -> AuditResults:
    """Run all audits on an edited pipeline's folder and add what they found to a report."""
    prompts, ordinary = _prompts(audit.search.targets, audit.ordinary, audit.column)
    others = [] if audit.others is None else read_prompts(audit.others, column=audit.column)
    _check_apart({"memorized": prompts, "ordinary": ordinary, "other": others})
    localizations = localized(model)
    prepared = prepare(audit.search, model)
    models: dict[str, TextToImage] = {subject.name: subject.model for subject in prepared.subjects}
    before: Any = models["original"]
    _check_read_apart(before, {"memorized": prompts, "ordinary": ordinary, "other": others})
    _check_edit(model, models["original"].digest())
    # The ordinary prompts are of the same kind as those of the model.
    if audit.search.unrelated is None:
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
    errors = _membership(models, prepared.pairs, prepared.controls, seed=seed, noises=audit.noises, progress=progress)
    ran = {
        DETECTION: True,
        MEMBERSHIP: True,
        NEURONS: localizations is not None,
        IMAGES: True,
        SEARCH: comparison is not None,
    }
    attacked = None if comparison is None else attacked_images(comparison, "edited", folder)
    shown = images(made, config, seed=seed, attacked=attacked)
    sections = [of_treatment(shown, TREATMENT, [name for name, done in ran.items() if done])]
    searched: dict[str, str] = {}
    if comparison is not None:
        sections.append(search_section(comparison, prepared.targets, prepared.roles, folder=folder, seed=seed))
        searched = {name: verdict(comparison, name)[1] for name in comparison.subjects}
    sections += [membership(errors, seed=seed), detection(scores)]
    if localizations is not None:
        sections.append(neurons(localizations, _changed(models["original"], models["edited"], localizations)))
    for each in sections:
        report.add(each)
    effects = {prompt: words for prompt, (_, words) in verdicts(made, config).items()}
    results = tuple(finding for each in sections for finding in each.findings)
    return AuditResults(results, effects, searched, prepared.remarks)


def localized(model: str | Path) -> list[Localization] | None:
    """Return what was localized for the edits of a pipeline's folder; None if its records do not say it."""
    records = [each for record in read_records(model) for each in record.thresholds.get("found", [])]
    return [Localization.from_json(each) for each in records] or None


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
    others = detect_resumably(edited, [each.prompt for each in held_out], config, folder=folder, progress=progress)
    return DetectionSubject(before, held_out, threshold, after, others)


def _membership(
    models: Mapping[str, TextToImage], pairs: Sequence[MemorizedPair], controls: Sequence[MemorizedPair],
    *, seed: int, progress: Progress, noises: int = NOISES,
) -> Membership:  # fmt: skip
    """Errors on memorized pictures and on others, by the model before the edit and by the edited one."""
    memorized = [(pair.name, pair.prompt, pair.image) for pair in pairs]
    others = [(pair.name, pair.prompt, pair.image) for pair in controls]
    if not controls:
        copies = [turned(TargetImage(pair.name, pair.prompt, pair.image)) for pair in pairs]
        others = [(copy.name, copy.prompt, copy.image) for copy in copies]
    before, after, controls_before, controls_after = (
        picture_errors(models[name], pictures, seed=seed, noises=noises, progress=progress)
        for pictures in (memorized, others)
        for name in ("original", "edited")
    )
    return Membership(before, after, controls_before, controls_after, own_controls=bool(controls))


def _changed(original: TextToImage, edited: TextToImage, localizations: Sequence[Localization]) -> dict[str, float]:
    return changed_neurons(original, edited, {each.prompt: each.neurons for each in localizations})


def _prompts(targets: Path | None, ordinary: Path | None, column: str) -> tuple[list[str], list[str]]:
    """Memorized prompts, and those that are not."""
    if targets is None or ordinary is None:
        raise UsageError("Audits need --targets and --ordinary.", cure="Give both beside the neurons.")
    memorized = pair_prompts([targets])
    others = read_prompts(ordinary, column=column)
    _check_apart({"ordinary": others, "memorized": memorized})
    if len(others) < _LEAST_ORDINARY:
        raise UsageError(
            f"{ordinary} contains {len(others)} ordinary prompts; at least {_LEAST_ORDINARY} are needed.",
            cure="Half of them calibrate the threshold: give 100 or more.",
        )
    return memorized, others


def _check_apart(groups: Mapping[str, Sequence[str]]) -> None:
    """Refuse a prompt in two groups."""
    for (one, first), (two, second) in itertools.combinations(groups.items(), 2):
        if both := sorted(set(first) & set(second)):
            raise UsageError(f"The prompt {both[0]!r} is among the {one} and the {two}.", cure="Leave it out of one.")


def _check_read_apart(model: PipelineModel, groups: Mapping[str, Sequence[str]]) -> None:
    """Refuse prompts of two groups, and two memorized ones, that the text encoders read alike."""
    once: dict[tuple[tuple[int, ...], ...], str] = {}
    for prompt in groups["memorized"]:
        other = once.setdefault(token_numbers(model, prompt), prompt)
        if other != prompt:
            raise UsageError(
                f"The memorized prompts {other!r} and {prompt!r} are the same tokens to the text encoders.",
                cure="Write one of them in the rows of both pictures: a prompt may have several rows.",
            )
    numbers = {name: {token_numbers(model, prompt): prompt for prompt in prompts} for name, prompts in groups.items()}
    for (one, first), (two, second) in itertools.combinations(numbers.items(), 2):
        if both := sorted(first.keys() & second.keys()):
            raise UsageError(
                f"The prompt {first[both[0]]!r}, which is {one}, and the prompt {second[both[0]]!r}, which is {two}, "
                "are the same tokens to the text encoders.",
                cure="Give another prompt in --anchors." if two == "an anchor" else "Leave one of them out.",
            )


def _check_edit(model: Path, base: str) -> None:
    """Refuse a base that the edited folder was not made of, where its records name it."""
    bases = [record.before for record in read_records(model)]
    if bases and base not in bases:
        raise UsageError(
            f"{model} was made from another base: {bases[0]}, not {base}.",
            cure="Name the pipeline before its edit as --base.",
        )


def _units(model: Path) -> Units:
    """The neurons of all edits of a folder."""
    units = Units()
    for record in read_records(model):
        units = units | record.units
    return units


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
            models["original"],
            models["edited"],
            prompts,
            ordinary,
            settings.localization.detection,
            beside,
            progress,
        ), None
    if audit == NEURONS:
        prompts, ordinary = _prompts(settings.targets, settings.ordinary, settings.column)
        config = settings.localization
        task = EditTask(models["original"], prompts, ordinary, job=beside, progress=progress)
        localizations = localized(destination) or neurons_of_prompts(task, config)
        return localizations, _changed(models["original"], models["edited"], localizations)
    assert settings.targets is not None  # checked
    pairs = read_pairs(settings.targets, models["original"].image_size, settings.pipeline.fit).pairs
    if audit == MEMBERSHIP:
        return _membership(models, pairs, (), seed=_SEED, progress=progress), None
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
    if settings.edit.needs_prompts or settings.targets is not None or settings.ordinary is not None:
        # An edit of given neurons does not need these prompts, but the audits do.
        _prompts(settings.targets, settings.ordinary, settings.column)


def preview(source: Path, settings: FolderForgetting) -> list[str]:
    """Return sentences about prompts with words that a tokenizer of the pipeline does not know."""
    prompts: dict[str, list[str]] = {}
    if settings.targets is not None:
        prompts[settings.targets.name] = pair_prompts([settings.targets])
    for file in (settings.ordinary, settings.anchors):
        if file is not None:
            prompts[file.name] = read_prompts(file, column=settings.column)
    return notes_on_unknown_prompts(tokenizers_of(source), prompts)


def tested(audit: str, settings: FolderForgetting) -> list[tuple[str, str]]:
    """Return how many noises, prompts and images an audit compares, and from which similarity an image is a copy."""
    if audit in (DETECTION, NEURONS):
        noises = len(settings.localization.detection.seeds)
        return [("initial noises that are compared for each prompt", str(noises))]
    if audit != IMAGES:
        return []
    return [
        ("images of each prompt, before and after the edit", str(settings.images)),
        ("ordinary prompts whose images are compared", f"up to {_SHOWN}"),
        ("guidance scale", f"{settings.guidance:g}"),
        ("steps of the scheduler", str(settings.steps)),
        ("an image counts as a copy", f"from a similarity ({ImagesConfig().measure}) of {ImagesConfig().threshold:g}"),
    ]


def card(folder: Path) -> CardEntry | None:
    if not (folder / FOLDER).exists():
        return None
    records = read_records(folder)
    done = "; ".join(dict.fromkeys(EDITS[record.method].card for record in records))
    text = (
        f"Memorized training images are suppressed under their prompts: {done}. Other text embeddings may still bring "
        "them back."
    )
    if all(record.undoable for record in records):
        text += (
            " The folder contains the original weights: `netweight forget undo FOLDER NEW` undoes the last edit to "
            "the last bit, and everybody who has the folder can do so."
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
