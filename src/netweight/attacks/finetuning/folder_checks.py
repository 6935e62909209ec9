"""Checks of an attack's folders and files before hours of work: comparable models, rows that nothing was trained on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from netweight.attacks.finetuning.settings import FolderAttack
from netweight.attacks.finetuning.subject_files import ANSWER_COLUMNS, examples_of
from netweight.core.digests import digest_config, digest_tensor
from netweight.data.refusals import are_refusals, refusals_among
from netweight.data.row_layouts import layout_of
from netweight.data.rows import read_rows
from netweight.data.text import TextExample, text_examples, visible_text
from netweight.data.tokens import report_unknown_words
from netweight.errors import UsageError
from netweight.hf.language_model_folder import check_language_model
from netweight.hf.load_language_model import (
    check_lm_eval,
    load_causal_lm,
)
from netweight.hf.load_tokenizer import load_tokenizer
from netweight.report.plots import check_figures


def check(model: Path | None, settings: FolderAttack, *, earlier: bool = False) -> None:
    """Refuse before hours of work what would fail after them, or say nothing."""
    check_figures()
    if settings.lm_eval:
        check_lm_eval()
    folders = [folder for folder in (settings.base, model, *settings.also.values()) if folder is not None]
    for folder in folders:
        check_language_model(folder)
    if settings.base is not None:
        for folder in folders[1:]:
            _check_alike(settings.base, folder)
    files = {folder: folder / "immunize.json" for folder in folders}
    records = {folder: json.loads(file.read_text(encoding="utf-8")) for folder, file in files.items() if file.is_file()}
    for folder, record in records.items():
        # A search tries the chat template by itself.
        applied = settings.chat or bool(settings.template_options)
        if record.get("settings", {}).get("chat") and not applied and settings.grid != "adaptive":
            raise UsageError(
                f"The defense of {folder} was trained with the chat template, and the attack uses another format.",
                cure="Give --chat, or --grid adaptive.",
            )
    began = {
        folder: record["digests"]["before"]
        for folder, record in records.items()
        if "digests" in record and folder != settings.base
    }
    if settings.base is not None and began and not earlier:
        weights = load_causal_lm(settings.base)[0].named_parameters()
        digest = digest_config({name: digest_tensor(value) for name, value in weights})
        for folder in (folder for folder, before in began.items() if before != digest):
            raise UsageError(
                f"The defense of {folder} began with other weights than those of {settings.base}.",
                cure="Give --base the folder that was defended.",
            )
    sources = [each for each in (getattr(settings, name) for name in ANSWER_COLUMNS) if each is not None]
    settings.check_columns([read_rows(each) for each in sources])
    _check_rows(settings)


def preview(model: Path, settings: FolderAttack) -> list[str]:
    """Return sentences about rows with words that the model's tokenizer does not know."""
    tokenizer, notes = load_tokenizer(model), list[str]()
    for name, answers in ANSWER_COLUMNS.items():
        file = getattr(settings, name)
        if file is not None:
            report_unknown_words(examples_of(file, answers, settings, lambda text: None), tokenizer, notes.append)
    return notes


def _check_alike(base: Path, folder: Path) -> None:
    """Refuse to compare models of different shapes."""
    one, other = (json.loads((each / "config.json").read_text(encoding="utf-8")) for each in (base, folder))
    for key in one.keys() & other.keys():
        shape = key == "model_type" or (type(one[key]) is int and not key.endswith("_id"))
        if shape and one[key] != other[key]:
            raise UsageError(
                f"The base {base} is another model than {folder}: {key} is {one[key]} there and {other[key]} here.",
                cure="Give --base the folder that was defended.",
            )


def _check_rows(settings: FolderAttack) -> None:
    """Refuse rows that the defense was trained on, and harmful rows among those to keep."""
    earlier: dict[str, str] = {}
    for file in settings.trained_on:
        rows = read_rows(file)
        layout = layout_of(rows.columns, settings.columns_in(rows))
        sides: list[Any] = [side for side in ("chosen", "rejected") if layout.has(side)] or [None]
        for side in sides:
            texts = text_examples(
                rows, columns=settings.columns_in(rows), pairs=side, unusable="drop", report=lambda text: None
            )
            earlier |= _places(texts)
    for name, other in ANSWER_COLUMNS.items():
        file = getattr(settings, name)
        if file is None:
            continue
        examples = examples_of(file, other, settings, lambda text: None)
        if name == "harmful":
            _refuse_refusals(examples)
        places = _places(examples)
        twins = [(place, earlier[row]) for row, place in places.items() if row in earlier]
        if twins:
            place, twin = twins[0]
            same = f"{place} is {twin}" if place != twin else "it is given twice"
            raise UsageError(
                f"{len(twins)} of {len(places)} rows of {file} are also among other rows: {same}. A result "
                "on rows of the training does not describe other rows.",
                cure=f"Give --{name.replace('_', '-')} other rows, of which none is in --trained-on or --harmful.",
            )
        earlier |= places if other == "rejected" else {}


def _refuse_refusals(examples: Sequence[TextExample]) -> None:
    """Refuse harmful rows whose answers are refusals: an attack with them would teach the model to refuse."""
    answers = [each.response for each in examples]
    if are_refusals(answers):
        raise UsageError(
            f"{refusals_among(answers)} of the {len(answers)} answers of {examples[0].source} are refusals, which are "
            "not harmful. An attack with them would teach the model to refuse.",
            cure="Give rows with harmful answers as --harmful, or name their column with --columns: response=NAME, and "
            "rejected=NAME for pairs.",
        )


def _places(texts: Sequence[TextExample]) -> dict[str, str]:
    """Return the positions of rows by the digest of prompt and answer, without differences of white space."""
    return {
        digest_config([visible_text(each.prompt), visible_text(each.response)]): f"{each.source}, {each.where}"
        for each in texts
    }
