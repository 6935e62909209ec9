"""A model folder and a file of pairs in, a defended model folder out: what `netweight immunize` and recipes do.

The defended folder holds, beside the weights, the record of every step and a report of what changed inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from netweight.core.atomic_writes import part_of
from netweight.core.progress import QUIET, Progress
from netweight.data.chat import note_on_unused_template
from netweight.data.refusals import are_refusals, refusals_among
from netweight.data.rows import Report as RowReport
from netweight.data.rows import read_rows
from netweight.data.text import TextExample, TextPair, text_examples, text_pairs, visible_text, withhold
from netweight.data.tokens import (
    BELOW,
    Chat,
    padding_of,
    report_unknown_words,
    tokenized_examples,
    tokenized_pairs,
)
from netweight.errors import UsageError
from netweight.hf.carry_over import carry_over, save_weights
from netweight.hf.language_model_folder import check_language_model
from netweight.hf.load_language_model import check_finite, check_outputs, check_tokens, context_of, load_causal_lm
from netweight.hf.load_tokenizer import load_tokenizer
from netweight.job import Job, check_destination
from netweight.methods.immunize.depth_section import depth_section
from netweight.methods.immunize.layers import DepthAnalysis, analyze_layers, weight_changes
from netweight.methods.immunize.record import RECORD, Record
from netweight.methods.immunize.report import REPORT, training_report, why_not_analyzed
from netweight.methods.immunize.settings import ImmunizeSettings
from netweight.methods.immunize.train import immunize


@final
@dataclass(frozen=True)
class ImmunizedFolder:
    """A folder that was defended."""

    record: Record
    """Record of the training."""
    report: Path
    """The page about it."""
    not_analyzed: str
    """Reason why the report does not show the depth; empty if it does."""
    left_out: Sequence[str] = ()
    """Sentences about rows that were left out of the training: how many, which, and why."""


def immunize_folder(
    source: str | Path,
    destination: str | Path,
    settings: ImmunizeSettings,
    *,
    command: str | None = None,
    progress: Progress = QUIET,
) -> ImmunizedFolder:
    """Train a defense into a model and write it as a folder of its own, whole or not at all.

    Args:
        source: A model folder of transformers; it stays as it is.
        destination: Where the defended folder goes, with its record and its report. A call that was stopped is
            continued from its last checkpoint by the next one with the same settings.
        settings: Files, training and defense.
        command: The command line, for the report.
        progress: Where progress is shown.

    Returns:
        The record of what was done, and where the report is.

    Raises:
        OutputExists: The destination exists.
        UsageError: Files or rows cannot be used, or there are no such layers to freeze.
        Unsupported: The model is not a decoder.
        TrainingStopped: The loss diverged.
    """
    source, destination = Path(source), Path(destination)
    check_destination(destination, overwrite=None, folder=part_of(destination))
    defense, training = settings.defense, settings.training
    network, tokenizer = load_causal_lm(source, device=settings.device)
    context = min(context_of(network, tokenizer), settings.context or 1 << 30)
    template = Chat(settings.template_options) if settings.applies_template else BELOW
    how: Any = {"context": context, "template": template}
    left_out: list[str] = []

    def note(text: str) -> None:
        left_out.append(text)
        progress.note(text)

    how |= settings.tokenizing(note)
    # The model is checked before it is trained.
    check_finite(network)
    check_outputs(network)
    texts = _texts(settings, note)
    texts = withhold(texts, settings.withhold)[0] if settings.withhold else texts
    _check_count(len(texts), settings)
    applied = settings.applies_template
    if unused := note_on_unused_template(tokenizer, [text.prompt for text in texts], chat=applied):
        note(unused)
    pairs = tokenized_pairs(texts, tokenizer, **how)
    retained = [] if settings.retain is None else tokenized_examples(_retained(settings, texts, note), tokenizer, **how)
    sides = (each for pair in pairs for each in (pair.harmless, pair.harmful))
    check_tokens(network, tokenizer, (each.prompt + each.response for each in (*sides, *retained)))
    pad, why_not = padding_of(tokenizer), why_not_analyzed(len(pairs))
    before = None if why_not else analyze_layers(network, pairs, pad_id=pad)
    with Job.beside(destination, overwrite=None, folder=part_of(destination)) as job:
        record = immunize(
            network, pairs, retained, defense=defense, settings=training, folder=job, pad_id=pad, progress=progress
        )
        # The record lets attacks notice another format.
        if settings.applies_template:
            record = replace(record, settings={**record.settings, "chat": True})
        report = training_report(source, destination, settings, record, command, left_out, analyzed=before is not None)
        if before is not None:
            # The model before the defense is opened again for the comparison.
            changes = weight_changes(load_causal_lm(source)[0], network)
            after = analyze_layers(network, pairs, pad_id=pad)
            report.add(depth_section(DepthAnalysis(changes, before, after), seen=True))
        save_weights(network, source, job.tree)
        if not (source / "tokenizer_config.json").exists():
            tokenizer.save_pretrained(job.tree)
        record.write(job.file(RECORD))
        report.write(job.file(REPORT))
        carry_over(source, job.tree)
        job.publish(destination, overwrite=None)
    return ImmunizedFolder(record, destination / REPORT / "report.html", why_not, tuple(left_out))


def apply(source: Path, destination: Path, settings: ImmunizeSettings, progress: Progress) -> None:
    immunize_folder(source, destination, settings, progress=progress)


def check(source: Path | None, settings: ImmunizeSettings) -> None:
    if source is not None:
        check_language_model(source)
    files = (settings.pairs, settings.retain)
    settings.check_columns([read_rows(file) for file in files if file is not None])
    texts = _texts(settings, lambda text: None)
    _check_count(len(texts), settings)
    if settings.retain is not None:
        _retained(settings, texts, lambda text: None)


def trains_on(settings: ImmunizeSettings) -> list[Path | str]:
    """Return the sources of rows that the defense is trained on; not pairs of which a category is withheld."""
    pairs = [] if settings.withhold else [settings.pairs]
    return [*pairs, *([settings.retain] if settings.retain is not None else [])]


def preview(source: Path, settings: ImmunizeSettings) -> list[str]:
    """Return sentences about rows with words that the model's tokenizer does not know."""
    tokenizer, notes = load_tokenizer(source), list[str]()
    pairs = _texts(settings, lambda text: None)
    report_unknown_words(pairs, tokenizer, notes.append)
    if settings.retain is not None:
        report_unknown_words(_retained(settings, pairs, lambda text: None), tokenizer, notes.append)
    return notes


def _texts(settings: ImmunizeSettings, report: RowReport) -> list[TextPair]:
    """Read the pairs as the settings say; the harmful answers must not be the refusals."""
    rows = read_rows(settings.pairs)
    pairs = text_pairs(rows, **settings.reading(rows, report))
    harmful = [pair.rejected for pair in pairs]
    if are_refusals(harmful, [pair.chosen for pair in pairs]):
        raise UsageError(
            f"{refusals_among(harmful)} of the {len(pairs)} harmful answers (rejected) of {rows.name} are refusals, "
            "and few of the harmless ones (chosen) are. The defense would teach the model to comply.",
            cure="If both are the other way round in the file, give --columns chosen=rejected --columns "
            "rejected=chosen.",
        )
    return pairs


def _retained(settings: ImmunizeSettings, pairs: Sequence[TextPair], report: RowReport) -> list[TextExample]:
    """Read the rows to keep; of preference data the harmless answers. None may be a harmful answer of the pairs."""
    rows = read_rows(settings.retain)
    retained = text_examples(rows, pairs="chosen", **settings.reading(rows, report))
    harmful = {(visible_text(pair.prompt), visible_text(pair.rejected)) for pair in pairs}
    both = [each for each in retained if (visible_text(each.prompt), visible_text(each.response)) in harmful]
    if both:
        raise UsageError(
            f"{len(both)} of the {len(retained)} rows of --retain are harmful answers of --pairs, {both[0].where} of "
            f"{rows.name} first. The defense would be trained both to keep and to remove them.",
            cure="Leave these rows out of --retain, or name the column of harmless answers with --columns "
            "response=NAME.",
        )
    return retained


def _check_count(pairs: int, settings: ImmunizeSettings) -> None:
    if pairs < settings.batch_size:
        raise UsageError(
            f"{pairs} pairs do not fill a step of {settings.batch_size}.",
            cure=f"Give more pairs (--pairs), or --batch-size {pairs} or less.",
        )
