"""`netweight forget`: what a text-to-image pipeline has memorized, in which neurons, and edits against it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netweight.cli import (
    FINDING_FAILED,
    FOLDER,
    NEW,
    OUTPUT_FOLDER,
    Output,
    card_option,
    end_attack,
    new_report,
    output_option,
    write_card,
)
from netweight.methods.forget.settings import (
    FolderAudit,
    FolderDetection,
    FolderForgetting,
    FolderLocalization,
    FolderStatistics,
)
from netweight.settings import options

if TYPE_CHECKING:
    from netweight.hf.load_pipeline import PipelineModel
    from netweight.hf.pipeline_settings import PipelineSettings
    from netweight.methods.forget.detect import Threshold

_results = click.option(
    "--out", required=True, type=OUTPUT_FOLDER, help="Folder for results, continued if it is there."
)


@click.group()
def forget() -> None:
    """Find what a text-to-image pipeline has memorized, switch it off, and take that back.

    PIPELINE is a folder of a diffusers pipeline and stays as it is. Prompts come from .txt (one per line), .csv, .tsv
    or .jsonl.
    """


@forget.command()
@click.argument("pipeline", type=FOLDER)
@options(FolderStatistics)
@click.option("--overwrite", is_flag=True, help="Replace the file if it is there.")
@click.option("--out", required=True, type=NEW, help="The safetensors file to write.")
@output_option
def statistics(pipeline: Path, settings: FolderStatistics, overwrite: bool, out: Path, output: Output) -> None:
    """Measure how active value neurons usually are; no image is made."""
    from netweight.core.files import refuse_existing
    from netweight.data.text import read_prompts
    from netweight.methods.forget.layers import measure_statistics

    refuse_existing(out, overwrite=overwrite)
    texts = read_prompts(settings.prompts, column=settings.column)
    model = _load(pipeline, settings.pipeline)
    found = measure_statistics(model, texts, scope=settings.scope, progress=output.progress)
    found.write(out, overwrite=overwrite)
    widths = {name: mean.numel() for name, mean in found.means.items()}
    neurons = sum(widths.values())
    output.line(f"{neurons} neurons of {len(widths)} layers over {found.prompts} prompts: {out}")
    output.result({"statistics": str(out), "model": found.model, "prompts": found.prompts, "neurons": neurons,
                   "layers": widths})  # fmt: skip


@forget.command()
@click.argument("pipeline", type=FOLDER)
@options(FolderDetection)
@_results
@output_option
def detect(pipeline: Path, settings: FolderDetection, out: Path, output: Output) -> None:
    """Score prompts by how alike first predictions are over seeds, and say which are memorized.

    OUT receives scores.jsonl, threshold.json, which `netweight forget localize` takes, and detection.json.
    """
    from netweight.data.text import read_prompts
    from netweight.errors import UsageError
    from netweight.methods.forget.detect import calibrate, check_threshold, detect_resumably, look_of

    files = {"prompts": settings.prompts, "ordinary": settings.ordinary, "held_out": settings.held_out}
    texts = {name: read_prompts(path, column=settings.column) for name, path in files.items() if path is not None}
    both = sorted(set(texts.get("ordinary", [])) & set(texts.get("held_out", [])))
    if both:
        raise UsageError(f"The prompt {both[0]!r} is in --ordinary and in --held-out.", cure="Leave it out of one.")
    given = None if settings.threshold is None else _threshold(settings.threshold)
    model, config = _load(pipeline, settings.pipeline), settings.detection
    identity, look = model.digest(), look_of(model, config)
    if given is not None:
        check_threshold(given, identity, look)
    progress = output.progress
    scores = {name: detect_resumably(model, part, config, folder=out, progress=progress)
              for name, part in texts.items()}  # fmt: skip
    rule: Any = {} if settings.quantile is None else {"rule": "quantile", "quantile": settings.quantile}
    limit = given or calibrate(scores["ordinary"], model=identity, look=look, **rule)
    rows = [{"prompt": each.prompt, "similarity": each.similarity, "highest": each.highest, "wen": each.wen,
             "memorized": each.similarity > limit.value} for each in scores["prompts"]]  # fmt: skip
    findings: list[Any] = []
    if "held_out" in scores:
        from netweight.methods.forget.report import DetectionSubject, detection

        findings = list(detection(DetectionSubject(scores["prompts"], scores["held_out"], limit)).findings)
    result = {"model": identity, "threshold": limit.to_json(), "prompts": rows,
              "findings": [finding.to_json() for finding in findings]}  # fmt: skip
    _write(out / "threshold.json", limit.to_json())
    _write(out / "detection.json", result)
    cells = [(f"{row['similarity']:.3f}", f"{row['highest']:.3f}", f"{row['wen']:.3g}",
              "memorized" if row["memorized"] else "", row["prompt"]) for row in rows]  # fmt: skip
    output.table(("similarity", "highest", "Wen's norm", "", "prompt"), cells)
    below = "" if limit.prompts_below is None else f"; {limit.prompts_below:.0%} of ordinary prompts lie below"
    output.line(f"Threshold {limit.value:.3f} ({limit.rule}){below}.", bold=True)
    output.table((), [(finding.name, f"{finding.value:.3f}") for finding in findings], indent=2)
    output.result(result)


@forget.command()
@click.argument("pipeline", type=FOLDER)
@options(FolderLocalization)
@_results
@output_option
@click.pass_context
def localize(
    context: click.Context, /, pipeline: Path, settings: FolderLocalization, out: Path, output: Output
) -> None:
    """Find the neurons that prompts are memorized in.

    OUT receives neurons.jsonl, which a second call continues, neurons.json for `netweight forget apply`, and
    neurons.csv in the format of the paper's code. Exits with 1 if the threshold was not reached for some prompt.
    """
    from netweight.data.text import read_prompts
    from netweight.methods.forget.layers import Statistics, value_layers
    from netweight.methods.forget.localize import localize as find
    from netweight.methods.forget.localize import write_published, write_results

    texts, limit = read_prompts(settings.prompts, column=settings.column), _threshold(settings.threshold)
    model, config, file = _load(pipeline, settings.pipeline), settings.localization, settings.statistics
    layers = value_layers(model.denoiser, scope=config.scope)
    usual = Statistics.read_published(file, layers) if file.suffix == ".pt" else Statistics.read(file)
    found = find(model, texts, usual, limit, config, folder=out, progress=output.progress)
    write_results(out / "neurons.json", found, model=model.digest())
    write_published(out / "neurons.csv", found, layers)
    output.table(("neurons", "similarity left", "", "prompt"), [
        (len(each.neurons), "–" if each.refined_similarity is None else f"{each.refined_similarity:.3f}", each.status,
         each.prompt) for each in found
    ])  # fmt: skip
    output.line(f"Results: {out / 'neurons.json'}")
    output.result({"results": str(out / "neurons.json"), "table": str(out / "neurons.csv"),
                   "prompts": [each.to_json() for each in found]})  # fmt: skip
    left = [each.prompt for each in found if each.status in ("unresolved", "failed")]
    if left:
        output.warn(f"{len(left)} prompts are not resolved, such as {left[0]!r}.")
        context.exit(FINDING_FAILED)


@forget.command()
@click.argument("pipeline", type=FOLDER)
@click.argument("destination", type=NEW)
@options(FolderForgetting, skip=("images", "guidance", "steps"))
@card_option
@output_option
def apply(pipeline: Path, destination: Path, settings: FolderForgetting, card: bool, output: Output) -> None:
    """Make PIPELINE forget memorized prompts and write it to DESTINATION, an ordinary folder.

    All prompts go together. What was done lies in DESTINATION/forget. The same command continues where an earlier one
    was stopped.
    """
    from netweight.methods.forget.folder import forget_folder

    record = forget_folder(pipeline, destination, settings, progress=output.progress)
    if card:
        write_card(destination, output)
    if record.method == "neurons":
        what = f"{len(record.units)} neurons of {len(record.units.modules)} layers, factor {record.factor:g}"
    else:
        what = f"{len(record.prompts)} prompts led elsewhere"
    output.line(f"{what}: {destination}", bold=True)
    files = record.files
    variants = sorted({variant or "the usual files" for variant in files.read.values()})
    output.line(f"Read: {', '.join(variants)}. Edited: {', '.join(files.edited)}. All other files are copies.")
    if files.unedited:
        output.warn(
            f"{', '.join(files.unedited)} hold or may hold the weights from before the edit and are not edited. "
            "Leave them out of the folder that is published: --other-weights leave-out."
        )
    left = record.settings.get("unresolved", [])
    for prompt in left:
        output.line(f"Images like the memorized one still come for: {prompt}")
    output.line(
        f"Audit it: netweight forget audit {destination} --base {pipeline} --targets "
        f"{settings.targets or 'targets.csv'} --ordinary {settings.ordinary or 'ordinary.txt'} --out audit"
    )
    output.result({"pipeline": str(destination), "method": record.method, "neurons": len(record.units),
                   "factor": record.factor, "before": record.before, "after": record.after,
                   "unresolved": left, "edited": list(files.edited), "read": dict(files.read),
                   "unedited": list(files.unedited), "left_out": list(files.left_out)})  # fmt: skip


@forget.command()
@click.argument("pipeline", type=FOLDER)
@click.argument("destination", type=NEW)
@output_option
def undo(pipeline: Path, destination: Path, output: Output) -> None:
    """Undo the last edit of PIPELINE and write the pipeline as it was before to DESTINATION.

    The digest of every file is compared with the one from before the edit.
    """
    from netweight.methods.forget.edited_folder import undo_folder

    done = undo_folder(pipeline, destination)
    record = done.record
    output.line(
        f"{done.equal} of {len(record.files.digests)} files are as they were before the edit, byte for byte: "
        f"{destination}",
        bold=True,
    )
    if done.absent:
        output.warn(f"The edit left out {', '.join(done.absent)}, which cannot be restored.")
    if done.newer:
        output.line(f"Copied as found, since they came or changed after the edit: {', '.join(done.newer)}.")
    output.result({
        "pipeline": str(destination), "method": record.method, "neurons": len(record.units), "model": record.before,
        "equal": done.equal, "files": len(record.files.digests), "absent": list(done.absent),
        "newer": list(done.newer),
    })  # fmt: skip


@forget.command()
@click.argument("edited", type=FOLDER)
@options(FolderAudit)
@click.option("--seed", default=0, show_default=True, help="First seed of images and searches, and of intervals.")
@_results
@output_option
@click.pass_context
def audit(context: click.Context, /, edited: Path, settings: FolderAudit, out: Path, seed: int, output: Output) -> None:
    """Compare EDITED with the pipeline before its edit, on memorized prompts and on others.

    Four audits: how well detection tells prompts apart, which neurons were found, images of the same seeds before and
    after the edit and with as many random neurons off, and whether a search for embeddings brings images back. OUT
    receives the report, and scores, images and searches, from which a second call continues.

    Exits with 1 if a finding fails.
    """
    from netweight.methods.forget.folder import audit_folder

    report = new_report(
        f"{edited.name}: what was forgotten",
        "Suppressed means that no image of the seeds compared copies the training image; whether it can still be "
        "found is what the search asks.",
        seed=seed, files=settings.files,
    )  # fmt: skip
    done = audit_folder(settings, edited, report, folder=out, seed=seed, progress=output.progress)
    words = [f"{name}: {each}" for name, each in (*done.suppressed.items(), *done.searched.items())]
    end_attack(
        context, output, report, done.findings, out=out, verdicts=words,
        result={"suppressed": dict(done.suppressed), "searched": dict(done.searched)},
    )  # fmt: skip


def _load(folder: Path, settings: PipelineSettings) -> PipelineModel:
    from netweight.hf.load_pipeline import open_pipeline

    return open_pipeline(folder, settings)


def _threshold(text: str) -> Threshold:
    from netweight.errors import UsageError
    from netweight.methods.forget.detect import Threshold

    try:
        return Threshold(float(text), "given")
    except ValueError:
        pass  # so it names a file
    try:
        return Threshold.from_json(json.loads(Path(text).read_text()))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--threshold {text!r} is neither a number nor a file of one: {error}.",
            cure="Give threshold.json from netweight forget detect.",
        ) from None


def _write(path: Path, value: Any) -> None:
    from netweight.core.files import whole_file

    with whole_file(path, overwrite=True) as file:
        file.write(json.dumps(value, indent=1, ensure_ascii=False).encode())
