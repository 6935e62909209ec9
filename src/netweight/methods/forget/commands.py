"""Commands of `netweight forget`, and their output."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from netweight.core.atomic_writes import refuse_existing, whole_file
from netweight.core.digests import digest_file
from netweight.data.prompts import read_prompts
from netweight.errors import UsageError
from netweight.hf.load_pipeline import open_pipeline
from netweight.hf.pipeline_settings import PipelineSettings
from netweight.methods.forget.check import EditCheck
from netweight.methods.forget.detect import Threshold, calibrate, check_threshold, detect_resumably, detection_settings
from netweight.methods.forget.edited_folder import undo_folder
from netweight.methods.forget.folder_settings import FolderAudit, FolderForgetting
from netweight.methods.forget.forget_folder import audit_folder, forget_folder
from netweight.methods.forget.layers import Statistics, measure_statistics, value_layers
from netweight.methods.forget.localize import localize as find_neurons
from netweight.methods.forget.localize import write_published, write_results
from netweight.methods.forget.plan import (
    plan_apply,
    plan_audit,
    plan_detect,
    plan_localize,
    plan_statistics,
    plan_undo,
)
from netweight.methods.forget.records import FOLDER
from netweight.methods.forget.report import DetectionSubject, check_section, detection
from netweight.methods.forget.settings import FolderDetection, FolderLocalization, FolderStatistics
from netweight.registry import Context, PrintedTable, Result, conditions_of, shell_line, with_conditions
from netweight.report.finding import Finding, Section
from netweight.report.report import Report
from netweight.store.weights_digest import weights_digest


def statistics(
    settings: FolderStatistics, context: Context, pipeline: Path, out: Path, overwrite: bool, plan: bool
) -> Result:
    """Measure how active value neurons are on ordinary prompts, and write it."""
    if plan:
        return plan_statistics(settings, pipeline)
    refuse_existing(out, overwrite=overwrite)
    texts = read_prompts(settings.prompts, column=settings.column)
    model = open_pipeline(pipeline, settings.pipeline)
    measured = measure_statistics(model, texts, scope=settings.scope, progress=context.progress)
    measured.write(out, overwrite=overwrite)
    widths = {name: mean.numel() for name, mean in measured.means.items()}
    neurons = sum(widths.values())
    return Result(
        [f"{neurons} neurons of {len(widths)} layers, measured over {measured.prompts} prompts."],
        payload={"statistics": str(out), "model": measured.model, "prompts": measured.prompts, "neurons": neurons,
                 "layers": widths},
        written=(out,),
    )  # fmt: skip


def detect(settings: FolderDetection, context: Context, pipeline: Path, out: Path, plan: bool) -> Result:
    """Score prompts, and flag those whose score is above the threshold."""
    if plan:
        return plan_detect(settings, pipeline)
    files = {"prompts": settings.prompts, "ordinary": settings.ordinary, "held_out": settings.held_out}
    texts = {name: read_prompts(path, column=settings.column) for name, path in files.items() if path is not None}
    both = sorted(set(texts.get("ordinary", [])) & set(texts.get("held_out", [])))
    if both:
        raise UsageError(f"The prompt {both[0]!r} is in --ordinary and in --held-out.", cure="Leave it out of one.")
    given = None if settings.threshold is None else _threshold(settings.threshold)
    model, config = open_pipeline(pipeline, settings.pipeline), settings.detection
    identity, score_settings = model.identity(), detection_settings(model, config)
    if given is not None:
        check_threshold(given, identity, score_settings)
    scores = {
        name: detect_resumably(model, part, config, folder=out, progress=context.progress)
        for name, part in texts.items()
    }
    rule: Any = {} if settings.quantile is None else {"rule": "quantile", "quantile": settings.quantile}
    limit = given or calibrate(scores["ordinary"], model=identity, detection=score_settings, **rule)
    rows = [{"prompt": each.prompt, "similarity": each.similarity, "highest": each.highest, "wen": each.wen,
             "memorized": each.similarity > limit.value} for each in scores["prompts"]]  # fmt: skip
    sections: list[Section] = []
    if "held_out" in scores:
        sections.append(detection(DetectionSubject(scores["prompts"], scores["held_out"], limit)))
    findings = [finding.to_json() for section in sections for finding in section.findings]
    payload = {"model": identity, "threshold": limit.to_json(), "prompts": rows}
    _write(out / "threshold.json", limit.to_json())
    _write(out / "detection.json", {**payload, "findings": findings})
    cells = [(f"{row['similarity']:.3f}", f"{row['highest']:.3f}", f"{row['wen']:.3g}",
              "memorized" if row["memorized"] else "", row["prompt"]) for row in rows]  # fmt: skip
    below = "" if limit.prompts_below is None else f"; {limit.prompts_below:.0%} of the ordinary prompts are below it"
    return Result(
        [
            PrintedTable(("similarity", "highest", "Wen's norm", "", "prompt"), cells),
            f"Threshold {limit.value:.3f} ({limit.rule}){below}.",
        ],
        sections, payload, written=(out,), advises=False,
    )  # fmt: skip


def localize(settings: FolderLocalization, context: Context, pipeline: Path, out: Path, plan: bool) -> Result:
    """Find the neurons in which prompts are memorized."""
    if plan:
        return plan_localize(settings, pipeline)
    texts, limit = read_prompts(settings.prompts, column=settings.column), _threshold(settings.threshold)
    model = open_pipeline(pipeline, settings.pipeline)
    config, file = settings.localization, settings.statistics
    layers = value_layers(model.denoiser, scope=config.scope)
    usual = Statistics.read_published(file, layers) if file.suffix == ".pt" else Statistics.read(file)
    localized = find_neurons(model, texts, usual, limit, config, folder=out, progress=context.progress)
    write_results(out / "neurons.json", localized, model=model.digest())
    write_published(out / "neurons.csv", localized, layers)
    rows = [
        (len(each.neurons), "–" if each.refined_similarity is None else f"{each.refined_similarity:.3f}", each.status,
         each.prompt) for each in localized
    ]  # fmt: skip
    left = [each.prompt for each in localized if each.status in ("unresolved", "failed")]
    finding = Finding(
        "prompts whose neurons were not found", len(left), better="lower", target=0, detail={"prompts": left}
    )
    return Result(
        [PrintedTable(("neurons", "similarity left", "", "prompt"), rows)], [Section("Localization", [finding])],
        payload={"results": str(out / "neurons.json"), "table": str(out / "neurons.csv"),
                 "prompts": [each.to_json() for each in localized]},
        written=(out,), warnings=[f"{len(left)} prompts are not resolved, such as {left[0]!r}."] if left else [],
        next=(shell_line("netweight", "forget", "apply", pipeline, "edited", "--neurons", out / "neurons.json",
                         *_pipeline_options(settings.pipeline)),),
        advises=False,
    )  # fmt: skip


def apply(settings: FolderForgetting, context: Context, pipeline: Path, destination: Path, plan: bool) -> Result:
    """Edit a pipeline so that it forgets."""
    if plan:
        return plan_apply(settings, pipeline)
    record = forget_folder(pipeline, destination, settings, progress=context.progress)
    if record.method == "neurons":
        what = (
            f"{len(record.units)} neurons of {len(record.units.modules)} layers were multiplied by {record.factor:g}."
        )
    else:
        what = f"Edited prompts: {len(record.prompts)} ({record.method})."
    files = record.files
    variants = sorted({variant or "the usual files" for variant in files.read.values()})
    warnings = []
    if files.unedited:
        warnings.append(
            f"{', '.join(files.unedited)} may contain the weights from before the edit and were not edited. "
            "Leave them out of the folder that is published: --other-weights leave-out."
        )
    warnings += record.remarks
    edited = ", ".join(files.edited)
    lines = [what, f"Files read: {', '.join(variants)}. Files edited: {edited}. All other files were copied."]
    if settings.undo:
        lines.append(
            f"{destination / FOLDER} contains the original weights, so that `netweight forget undo` can undo the edit."
        )
    sections = []
    if record.check:
        check = EditCheck.from_json(record.check)
        sections.append(check_section(check))
    elif record.prompts:
        warnings.append("It was not checked whether pictures are still reproduced.")
    audit = shell_line(
        "netweight", "forget", "audit", destination, "--base", pipeline, "--targets", settings.targets or "targets.csv",
        "--ordinary", settings.ordinary or "ordinary.txt", *_pipeline_options(settings.pipeline), "--out", "audit",
    )  # fmt: skip
    return Result(
        lines, sections, written=(destination,), next=(audit,), warnings=warnings,
        payload={"pipeline": str(destination), "method": record.method, "neurons": len(record.units),
                 "factor": record.factor, "before": record.before, "after": record.after,
                 "unresolved": record.settings.get("unresolved", []), "check": dict(record.check),
                 "remarks": list(record.remarks), "edited": list(files.edited), "read": dict(files.read),
                 "unedited": list(files.unedited), "left_out": list(files.left_out)},
    )  # fmt: skip


def undo(context: Context, pipeline: Path, destination: Path, plan: bool) -> Result:
    """Undo the last edit of a pipeline, and compare every file with the one from before the edit."""
    if plan:
        return plan_undo(pipeline)
    done = undo_folder(pipeline, destination)
    record = done.record
    lines = [f"{done.equal} of {len(record.files.digests)} files are as they were before the edit, byte for byte."]
    if done.newer:
        lines.append(f"Copied unchanged, because they were added or changed after the edit: {', '.join(done.newer)}.")
    warnings = [f"The edit left out {', '.join(done.absent)}, which cannot be restored."] if done.absent else []
    return Result(
        lines, written=(destination,), warnings=warnings,
        payload={"pipeline": str(destination), "method": record.method, "neurons": len(record.units),
                 "model": record.before, "equal": done.equal, "files": len(record.files.digests),
                 "absent": list(done.absent), "newer": list(done.newer)},
    )  # fmt: skip


def audit(settings: FolderAudit, context: Context, edited: Path, out: Path, seed: int, plan: bool) -> Result:
    """Compare an edited pipeline with the one before its edit, and write the report."""
    if plan:
        return plan_audit(settings, edited)
    conditions, weights = conditions_of(edited), weights_digest(edited, context.progress)
    report = Report(
        f"{edited.name}: comparison with the pipeline before its edit",
        summary="Suppressed means that no image of the seeds compared copies the training image. The search tests "
        "whether it can still be recovered.",
        command=context.command, seeds=(seed,), inputs={path.name: digest_file(path) for path in settings.files},
        weights={} if weights is None else {edited.name: weights},
    )  # fmt: skip
    done = audit_folder(settings, edited, report, folder=out, seed=seed, progress=context.progress)
    report.sections = tuple(with_conditions(report.sections, conditions))
    lines = [f"{name}: {each}" for name, each in (*done.suppressed.items(), *done.searched.items())]
    return Result(
        lines, report.sections, report=report.write(out), written=(out,), warnings=done.remarks,
        payload={"suppressed": dict(done.suppressed), "searched": dict(done.searched)},
    )  # fmt: skip


def _pipeline_options(settings: PipelineSettings) -> list[str]:
    """The options with which a further command opens a pipeline as this one did."""
    words = []
    for name, value in settings.given.items():
        several, option = isinstance(value, tuple), "embedding" if name == "embeddings" else name
        words += [word for each in (value if several else (value,)) for word in (f"--{option}", str(each))]
    return words


def _threshold(text: str) -> Threshold:
    try:
        value = float(text)
    except ValueError:
        # The text is not a number, so it names a file.
        value = None
    if value is not None:
        if not math.isfinite(value):
            raise UsageError(f"--threshold {text} is not a finite number.", cure="Give a similarity, such as 0.5.")
        return Threshold(value, "given")
    try:
        return Threshold.from_json(json.loads(Path(text).read_text()))
    except OSError as error:
        raise UsageError(
            f"--threshold {text!r} is not a number, and cannot be read as a file: {error.strerror}.",
            cure="Give a similarity, such as 0.5, or threshold.json from netweight forget detect.",
        ) from None
    except ValueError as error:
        raise UsageError(
            f"--threshold {text!r} is neither a number nor a file with a threshold: {error}.",
            cure="Give threshold.json from netweight forget detect.",
        ) from None


def _write(path: Path, value: Any) -> None:
    with whole_file(path, overwrite=True) as file:
        file.write(json.dumps(value, indent=1, ensure_ascii=False).encode())
