"""`netweight forget`: what a text-to-image pipeline has memorized, in which neurons, and an edit against it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netweight.cli import FINDING_FAILED
from netweight.cli.card import card_option, write_card
from netweight.cli.forget_audit import audit
from netweight.cli.forget_harden import harden
from netweight.cli.output import Output, output_option
from netweight.cli.paths import FILE, FOLDER, NEW, OUTPUT_FOLDER
from netweight.core.progress import QUIET, Progress

if TYPE_CHECKING:
    from netweight.hf.load_pipeline import PipelineModel
    from netweight.methods.forget.detect import Score, Threshold
    from netweight.methods.forget.settings import DetectionConfig

_column = click.option("--column", default="prompt", show_default=True, help="Column of prompts in .csv and .jsonl.")
_device = click.option("--device", default="cpu", show_default=True, help="Where the pipeline goes, such as cuda.")
_scope = click.option("--scope", type=click.Choice(["down+mid", "all"]), default="down+mid", show_default=True,
                      help="Which value layers of a U-Net: without or with those on the way up.")  # fmt: skip
_seeds = click.option("--seeds", type=click.IntRange(2), default=10, show_default=True,
                      help="Initial noises per prompt: seeds 0, 1 and so on.")  # fmt: skip
_steps = click.option("--steps", type=click.IntRange(2), default=50, show_default=True, help="Of the schedule.")
_rows = click.option("--rows", type=click.IntRange(1), default=64, show_default=True,
                     help="Most images at a time; halved where memory runs out.")  # fmt: skip
_timing = click.option("--timing", type=click.Choice(["paper", "code"]), default="paper", show_default=True,
                       help="Look at the first timestep, or at the second as the released code does.")  # fmt: skip


@click.group()
def forget() -> None:
    """Find what a text-to-image pipeline has memorized, switch it off, and take that back.

    PIPELINE is a folder of a diffusers pipeline and stays as it is. Prompts come from .txt (one per line), .csv, .tsv
    or .jsonl.
    """


forget.add_command(audit)
forget.add_command(harden)


@forget.command()
@click.argument("pipeline", type=FOLDER)
@click.option("--prompts", required=True, type=FILE, help="Ordinary prompts, 1,000 or more.")
@_column
@_scope
@_device
@click.option("--overwrite", is_flag=True, help="Replace the file if it is there.")
@click.option("--out", required=True, type=NEW, help="The safetensors file to write.")
@output_option
def statistics(
    pipeline: Path, prompts: Path, column: str, scope: Any, device: str, overwrite: bool, out: Path, output: Output
) -> None:
    """Measure how active value neurons usually are; no image is made."""
    from netweight.core.files import refuse_existing
    from netweight.data.prompts import read_prompts
    from netweight.methods.forget.statistics import measure_statistics

    refuse_existing(out, overwrite=overwrite)
    texts = read_prompts(prompts, column=column)
    model = _load(pipeline, device)
    found = measure_statistics(model, texts, scope=scope, progress=_progress(output))
    found.write(out, overwrite=overwrite)
    neurons = sum(mean.numel() for mean in found.means.values())
    output.line(f"{neurons} neurons of {len(found.means)} layers over {found.prompts} prompts: {out}")
    output.result({"statistics": str(out), "model": found.model, "prompts": found.prompts, "neurons": neurons,
                   "layers": {name: mean.numel() for name, mean in found.means.items()}})  # fmt: skip


@forget.command()
@click.argument("pipeline", type=FOLDER)
@click.option("--prompts", required=True, type=FILE, help="Prompts to look at.")
@click.option("--ordinary", type=FILE, help="Prompts that are not memorized, to calibrate the threshold on.")
@click.option("--held-out", type=FILE, help="Further such prompts: how well are the two told apart?")
@click.option("--threshold", metavar="FILE|NUMBER",
              help="In place of a calibrated one: threshold.json of an earlier call, or a number.")  # fmt: skip
@click.option("--quantile", type=click.FloatRange(0, 1, min_open=True),
              help="Calibrate at this quantile of ordinary prompts, not at mean + 1 standard deviation.")  # fmt: skip
@_column
@_seeds
@_steps
@_timing
@_rows
@_device
@click.option("--out", required=True, type=OUTPUT_FOLDER, help="Folder for scores; a second call continues there.")
@output_option
def detect(
    pipeline: Path, prompts: Path, ordinary: Path | None, held_out: Path | None, threshold: str | None,
    quantile: float | None, column: str, device: str, out: Path, output: Output, **options: Any,
) -> None:  # fmt: skip
    """Score PROMPTS by how alike first predictions are over seeds, and say which are memorized.

    OUT receives scores.jsonl, threshold.json, which `netweight forget localize` takes, and detection.json.
    """
    from netweight.data.prompts import read_prompts
    from netweight.errors import UsageError
    from netweight.methods.forget.detect import look_of
    from netweight.methods.forget.localize import check_threshold, detect_resumably
    from netweight.methods.forget.settings import DetectionConfig

    if (ordinary is None) == (threshold is None):
        raise UsageError("A threshold is needed, once.", cure="Give --ordinary to calibrate one, or --threshold.")
    files = {"prompts": prompts, "ordinary": ordinary, "held_out": held_out}
    texts = {name: read_prompts(path, column=column) for name, path in files.items() if path is not None}
    both = sorted(set(texts.get("ordinary", [])) & set(texts.get("held_out", [])))
    if both:
        raise UsageError(f"The prompt {both[0]!r} is in --ordinary and in --held-out.", cure="Leave it out of one.")
    given = None if threshold is None else _given_threshold(threshold)
    config = DetectionConfig(**_detection(options))
    model = _load(pipeline, device)
    if given is not None:
        check_threshold(given, model.digest(), look_of(model, config))
    how = {"ledger": out / "scores.jsonl", "progress": _progress(output)}
    scores = {name: detect_resumably(model, part, config, **how) for name, part in texts.items()}  # type: ignore[arg-type]
    limit = given or _threshold(scores["ordinary"], quantile, model, config)
    rows = [{"prompt": each.prompt, "similarity": each.similarity, "highest": each.highest, "wen": each.wen,
             "memorized": each.similarity > limit.value} for each in scores["prompts"]]  # fmt: skip
    findings = [] if "held_out" not in scores else _findings(scores["prompts"], scores["held_out"], limit)
    result = {"model": model.digest(), "threshold": limit.to_json(), "prompts": rows, "findings": findings}
    _write(out / "threshold.json", limit.to_json())
    _write(out / "detection.json", result)
    cells = [(f"{row['similarity']:.3f}", f"{row['highest']:.3f}", f"{row['wen']:.3g}",
              "memorized" if row["memorized"] else "", row["prompt"]) for row in rows]  # fmt: skip
    output.table(("similarity", "highest", "Wen's norm", "", "prompt"), cells)
    below = "" if limit.prompts_below is None else f"; {limit.prompts_below:.0%} of ordinary prompts lie below"
    output.line(f"Threshold {limit.value:.3f} ({limit.rule}){below}.", bold=True)
    output.table((), [(finding["name"], f"{finding['value']:.3f}") for finding in findings], indent=2)
    output.result(result)


@forget.command()
@click.argument("pipeline", type=FOLDER)
@click.option("--prompts", required=True, type=FILE, help="Memorized prompts.")
@click.option("--statistics", "statistics_file", required=True, type=FILE,
              help="From netweight forget statistics, or the .pt file of the paper's code.")  # fmt: skip
@click.option("--threshold", required=True, metavar="FILE|NUMBER", help="threshold.json of detect, or a number.")
@click.option("--fidelity", type=click.Choice(["corrected", "reference"]), default="corrected", show_default=True,
              help="The released code's order and quirks, or without them; see docs/differences.md.")  # fmt: skip
@_column
@_scope
@_seeds
@_steps
@_timing
@_rows
@_device
@click.option("--out", required=True, type=OUTPUT_FOLDER, help="Folder for results; a second call continues there.")
@output_option
@click.pass_context
def localize(
    context: click.Context, /, pipeline: Path, prompts: Path, statistics_file: Path, threshold: str, fidelity: Any,
    column: str, scope: Any, device: str, out: Path, output: Output, **options: Any,
) -> None:  # fmt: skip
    """Find the neurons that PROMPTS are memorized in.

    OUT receives neurons.jsonl, which a second call continues, neurons.json for `netweight forget apply`, and
    neurons.csv in the format of the paper's code. Exits with 1 if the threshold was not reached for some prompt.
    """
    from netweight.data.prompts import read_prompts
    from netweight.methods.forget.layers import value_layers
    from netweight.methods.forget.localize import localize as find
    from netweight.methods.forget.localize import write_published, write_results
    from netweight.methods.forget.settings import DetectionConfig, LocalizationConfig
    from netweight.methods.forget.statistics import Statistics

    texts, limit = read_prompts(prompts, column=column), _given_threshold(threshold)
    model = _load(pipeline, device)
    layers = value_layers(model.denoiser, scope=scope)
    usual = (Statistics.read_published(statistics_file, layers) if statistics_file.suffix == ".pt"
             else Statistics.read(statistics_file))  # fmt: skip
    config = LocalizationConfig(DetectionConfig(**_detection(options)), scope=scope, fidelity=fidelity)
    found = find(model, texts, usual, limit, config, ledger=out / "neurons.jsonl", progress=_progress(output))
    write_results(out / "neurons.json", found, model=model.digest())
    write_published(out / "neurons.csv", found, layers)
    output.table(("neurons", "similarity left", "", "prompt"), [
        (len(each.neurons), "–" if each.refined_similarity is None else f"{each.refined_similarity:.3f}", each.status,
         each.prompt) for each in found
    ])  # fmt: skip
    output.line(f"Results: {out / 'neurons.json'}")
    output.result({"results": str(out / "neurons.json"), "table": str(out / "neurons.csv"),
                   "prompts": [each.to_json() for each in found]})  # fmt: skip
    if any(each.status in ("unresolved", "failed") for each in found):
        left = [each.prompt for each in found if each.status in ("unresolved", "failed")]
        output.warn(f"{len(left)} prompts are not resolved, such as {left[0]!r}.")
        context.exit(FINDING_FAILED)


@forget.command()
@click.argument("pipeline", type=FOLDER)
@click.argument("destination", type=NEW)
@click.option("--neurons", required=True, type=FILE, help="neurons.json or neurons.csv of localize.")
@click.option("--factor", default=0.0, show_default=True, help="What the neurons are multiplied with.")
@card_option
@output_option
def apply(pipeline: Path, destination: Path, neurons: Path, factor: float, card: bool, output: Output) -> None:
    """Switch neurons off in the weights and write the pipeline to DESTINATION, an ordinary folder.

    The neurons of all prompts in the file go together. What was done lies in DESTINATION/forget.
    """
    from netweight.methods.forget.edit import edit_folder

    record = edit_folder(pipeline, destination, neurons, factor=factor)
    if card:
        write_card(destination, output)
    output.line(f"{len(record.units)} neurons of {len(record.units.modules)} layers, factor {factor:g}: {destination}",
                bold=True)  # fmt: skip
    output.line(
        f"See what it came to: netweight forget audit {destination} --base {pipeline} --targets targets.csv --ordinary "
        "ordinary.txt --out audit"
    )
    output.result({"pipeline": str(destination), "neurons": len(record.units), "factor": factor,
                   "before": record.before, "after": record.after})  # fmt: skip


@forget.command()
@click.argument("pipeline", type=FOLDER)
@click.argument("destination", type=NEW)
@output_option
def undo(pipeline: Path, destination: Path, output: Output) -> None:
    """Take back the last edit of PIPELINE, bit for bit, and write the result to DESTINATION."""
    from netweight.methods.forget.edit import undo_folder

    record = undo_folder(pipeline, destination)
    output.line(f"{len(record.units)} neurons are as they were: {destination}", bold=True)
    output.result({"pipeline": str(destination), "neurons": len(record.units), "model": record.before})


def _load(folder: Path, device: str) -> PipelineModel:
    from netweight.hf.load_pipeline import load_text_to_image

    return load_text_to_image(folder, device=device)


def _progress(output: Output) -> Progress:
    return QUIET if output.as_json else Progress()


def _detection(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "seeds": tuple(range(options["seeds"]))}


def _threshold(scores: list[Score], quantile: float | None, model: PipelineModel, config: DetectionConfig) -> Threshold:
    from netweight.methods.forget.detect import calibrate, look_of

    about: Any = {"model": model.digest(), "look": look_of(model, config)}
    if quantile is None:
        return calibrate(scores, **about)
    return calibrate(scores, rule="quantile", quantile=quantile, **about)


def _given_threshold(text: str) -> Threshold:
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


def _findings(memorized: list[Score], ordinary: list[Score], limit: Threshold) -> list[dict[str, Any]]:
    from netweight.methods.forget.report import DetectionSubject, detection_findings

    subject = DetectionSubject(memorized, ordinary, limit)
    return [finding.to_json() for finding in detection_findings(subject, None, seed=0, progress=QUIET)]


def _write(path: Path, value: Any) -> None:
    from netweight.core.files import whole_file

    with whole_file(path, overwrite=True) as file:
        file.write(json.dumps(value, indent=1, ensure_ascii=False).encode())
