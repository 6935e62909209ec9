"""Pipeline folders under the audits of forgetting: detection, neurons, images before and after, and the search.

`netweight forget audit` and recipes call it. Everything is read and checked before the first image is painted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal, final

from pydantic import DirectoryPath, Field, FilePath

from netweight.attacks.embedding_search.comparison import Comparison, compare
from netweight.attacks.embedding_search.findings import verdict
from netweight.attacks.embedding_search.showing import add_section
from netweight.core.progress import QUIET, Progress
from netweight.core.units import Units
from netweight.errors import UsageError
from netweight.methods.forget.audit import DETECTION, IMAGES, NEURONS, SEARCH, DetectionSubject
from netweight.methods.forget.config import DetectionConfig
from netweight.methods.forget.edit_record import read_records
from netweight.methods.forget.images import Alignment, ImagesConfig, verdicts
from netweight.methods.forget.method import detect_resumably
from netweight.methods.forget.mitigation import Deactivated, neuron_counts, random_units
from netweight.methods.forget.painting import Painted, PaintSettings, paint
from netweight.methods.forget.results import Localization
from netweight.methods.forget.showing import add_finding_sections, add_images_section, attacked_images
from netweight.metrics.copies import Memorized
from netweight.probe.diffusion import TextToImage
from netweight.report.finding import Finding
from netweight.report.report import Report
from netweight.zoo.embedding_attack import FolderSearch, Prepared, prepare
from netweight.zoo.forgotten_pipeline import FolderForgetting, calibrated, ordinary_prompts
from netweight.zoo.memorized_pairs import Pair, check_pairs, painted_size, read_pairs

__all__ = ["Audited", "FolderAudit", "audit_folder", "localized", "pictured", "scored", "shown"]

_SHOWN = 16
"""Ordinary prompts that are painted."""
Count = Annotated[int, Field(ge=1)]


@final
@dataclass(frozen=True)
class FolderAudit:
    """What is asked of an edited pipeline.

    Attributes:
        search: The pipeline before its edit, memorized pairs, and how embeddings are searched for. Its guidance and
            steps of generation hold for all images.
        ordinary: Prompts that are not memorized, a file of `read_prompts`.
        column: Where they are.
        images: Images per prompt.
        look_seeds: Initial noises per prompt that detection compares.
        timing: Which step detection looks at, see `DetectionConfig`.
        clip: A folder of transformers with a CLIP, for prompt alignment; None leaves that out.
        searched: Whether embeddings are searched for; where not, the report says so in red.
        search_seeds: Seeds of every search.
    """

    search: FolderSearch
    ordinary: FilePath
    column: str = "prompt"
    images: Count = 8
    look_seeds: Annotated[int, Field(ge=2)] = 10
    timing: Literal["paper", "code"] = "paper"
    clip: DirectoryPath | None = None
    searched: bool = True
    search_seeds: Sequence[int] = field(default=(0,))


@final
@dataclass(frozen=True)
class Audited:
    """What the audits found.

    Attributes:
        findings: All of them.
        suppressed: By prompt, what the edit did to its images, in words.
        searched: By model, what the searches found, in words; empty if none were made.
    """

    findings: tuple[Finding, ...]
    suppressed: Mapping[str, str]
    searched: Mapping[str, str]


def audit_folder(
    audit: FolderAudit, model: Path, report: Report, *, folder: Path, seed: int, progress: Progress = QUIET
) -> Audited:
    """Run all audits on an edited pipeline's folder and add what they found to a report.

    Args:
        audit: What is asked.
        model: The edited pipeline's folder.
        report: The report.
        folder: Where scores, images and searches are remembered: a second call continues there.
        seed: Of the first image, of random neurons and of intervals.
        progress: Told of every prompt and step.

    Raises:
        UsageError: A file or folder cannot be used; see `prepare` too.
        Unsupported: A pipeline is of a kind that is not known.
        MissingExtra: Something that is asked for is not installed.
    """
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
    """Return what was localized for the edits of a pipeline's folder; None if its records do not say it.

    Raises:
        CorruptBlob: A record is damaged.
    """
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
    """Paint memorized and ordinary prompts by the original, by its edit, and with as many random neurons off.

    Args:
        models: "original", "edited" and further ones by name.
        pairs: Memorized pairs.
        ordinary: Prompts that are not memorized.
        units: The neurons that were switched off; with none there is no random control.
        settings: How images are made.
        folder: Where images are remembered.
        seed: Of the random neurons.
        progress: Told of every prompt.

    Returns:
        The images, and what is to be said in red.
    """
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
    """Score the prompts of a forgetting by the model before it.

    Args:
        source: The pipeline's folder before its edit.
        settings: The forgetting.
        folder: Where scores are remembered.
        progress: Told of every prompt.
    """
    from netweight.integrations.diffusion_pipeline import load_text_to_image

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
    """Paint what a forgetting came to, and write a report of the images.

    Args:
        source: The pipeline's folder before its edit.
        destination: The folder after it.
        settings: The forgetting.
        folder: Where images are remembered and the report is written.
        seed: Of the first image and of the random neurons.
        progress: Told of every prompt.
    """
    from netweight.integrations.diffusion_pipeline import load_text_to_image

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
    from netweight.integrations.clip import Clip

    return Clip(folder)
