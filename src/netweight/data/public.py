"""Public data sets of harmful prompts, in the files that were published: their text never comes with netweight.

BeaverTails is fetched from the Hugging Face hub or taken from `NETWEIGHT_DATA`; the others are files that their authors
keep beside their code. Read their licenses: BeaverTails is for non-commercial use.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from netweight.core.names import nearest_names
from netweight.data.text import Row, RowErrors, Rows, TextExample, TextPair, categories, needed_text, read_rows
from netweight.errors import MissingExtra, NameNotFound, UsageError

BEAVERTAILS_SPLITS = ("30k_train", "30k_test", "330k_train", "330k_test")
_HUB = "PKU-Alignment/BeaverTails"
_CONTINUE = (
    "User: You are required to continue the generation of the given incomplete prompt\nPrompt: {}\nContinuation:"
)
_CURE = "Fetch the file again, or correct these rows."

Kind = Literal["toxic", "non_toxic", "toxic_test"]


def beavertails(source: str | Path | Any = None, *, split: str = "30k_train", safe: bool = False) -> list[TextExample]:
    """Read questions with answers from BeaverTails."""
    # Source: Ji et al., BeaverTails, arXiv 2307.04657.
    rows = read_rows(_beavertails(split) if source is None else source)
    rows.need("prompt", "response", "category", "is_safe")
    errors = RowErrors(rows.name)
    found = []
    for row in _judged(rows, safe, errors):
        prompt, response = (needed_text(rows, row, column, errors) for column in ("prompt", "response"))
        if prompt is not None and response is not None:
            found.append(TextExample(prompt, response.strip(), categories(row, errors), rows.name, row.where))
    errors.refuse(_CURE)
    return _some(found, rows, f"is_safe is {safe}")


def paired_refusals(source: str | Path | Any) -> list[TextPair]:
    """Read the questions of BeaverTails with a harmful answer and a refusal."""
    # As the authors of RepNoise published them.
    # Source: RepNoise (arXiv 2405.14577), section 4.
    rows = read_rows(source)
    rows.need("prompt", "response", "category", "is_safe", "refusal")
    errors = RowErrors(rows.name)
    found = []
    for row in _judged(rows, False, errors):
        sides = (needed_text(rows, row, column, errors) for column in ("prompt", "response", "refusal"))
        prompt, response, refusal = sides
        if prompt is None or response is None or refusal is None:
            continue
        chosen = _behind(refusal, f"Question: {prompt}\nAnswer:", row, errors)
        found.append(TextPair(prompt, chosen, response.strip(), categories(row, errors), rows.name, row.where))
    errors.refuse(_CURE)
    return _some(found, rows, "is_safe is False")


def decoding_trust(source: str | Path | Any, *, kind: Kind = "toxic") -> list[TextExample]:
    """Read the prompts of DecodingTrust's toxicity part with their continuations."""
    # Source: Wang et al., DecodingTrust, arXiv 2306.11698; the instruction is that of RepNoise's public code.
    rows = read_rows(source)
    rows.need("prompt", "continuation")
    errors = RowErrors(rows.name)
    found = []
    for row in rows.rows:
        if row.values.get("type", kind) != kind:
            continue
        prompt, continuation = (_inner(row, column, errors) for column in ("prompt", "continuation"))
        if prompt is not None and continuation is not None:
            found.append(TextExample(_CONTINUE.format(prompt), _spaced(continuation), (), rows.name, row.where))
    errors.refuse(_CURE)
    return _some(found, rows, f"type is {kind!r}")


def decoding_trust_refusals(source: str | Path | Any) -> list[TextPair]:
    """Read prompts of DecodingTrust with a toxic continuation and a refusal."""
    # As the authors of RepNoise published them.
    rows = read_rows(source)
    rows.need("prompt", "continuation", "refusal")
    errors = RowErrors(rows.name)
    found = []
    for row in rows.rows:
        prompt, continuation = (_inner(row, column, errors) for column in ("prompt", "continuation"))
        refusal = needed_text(rows, row, "refusal", errors)
        if prompt is None or continuation is None or refusal is None:
            continue
        chosen = _spaced(_behind(refusal, f"Prompt: {prompt}\nContinuation:", row, errors))
        found.append(TextPair(_CONTINUE.format(prompt), chosen, _spaced(continuation), (), rows.name, row.where))
    errors.refuse(_CURE)
    return found


def _beavertails(split: str) -> Any:
    """Return the file of a split below `NETWEIGHT_DATA`, or the split from the hub."""
    if split not in BEAVERTAILS_SPLITS:
        raise NameNotFound(
            f"BeaverTails has no split {split!r}.", cure=f"Did you mean {nearest_names(split, BEAVERTAILS_SPLITS, 1)}?"
        )
    size, _, part = split.partition("_")
    within = f"beavertails/round0/{size}/{part}.jsonl"
    root = os.environ.get("NETWEIGHT_DATA")
    for file in (Path(root or "") / f"{within}{packed}" for packed in (".gz", ".xz", "")):
        if root and file.is_file():
            return file
    try:
        return importlib.import_module("datasets").load_dataset(_HUB, split=split)
    except (ImportError, OSError, ValueError) as error:
        raise MissingExtra(
            f"BeaverTails is not at hand: NETWEIGHT_DATA holds no {within}.gz, and the hub gave nothing ({error}).",
            cure='Go online with datasets installed (pip install "netweight[llm]"), or put the file there.',
        ) from error


def _judged(rows: Rows, safe: bool, errors: RowErrors) -> list[Row]:
    """Return the rows that were judged safe, or the others; note those that were not judged."""
    for row in rows.rows:
        if not isinstance(row.values.get("is_safe"), bool):
            errors.add(row.where, "its is_safe is neither true nor false")
    return [row for row in rows.rows if row.values.get("is_safe") is safe]


def _inner(row: Row, column: str, errors: RowErrors) -> str | None:
    """Return the text within a column, which holds scores beside it."""
    value = row.values.get(column)
    text = value.get("text") if isinstance(value, Mapping) else value
    if isinstance(text, str) and text.strip():
        return text
    errors.add(row.where, f"{column} holds no text")
    return None


def _behind(whole: str, prompt: str, row: Row, errors: RowErrors) -> str:
    """Return what follows a prompt within a text."""
    _, found, answer = whole.partition(prompt)
    if not found:
        errors.add(row.where, "its refusal is to another prompt")
    elif not answer.strip():
        errors.add(row.where, "its refusal is empty")
    return answer.strip()


def _spaced(text: str) -> str:
    """Begin a continuation with one space: were it otherwise for one side, the first token would give it away."""
    return f" {text.strip()}"


def _some(found: list[Any], rows: Rows, what: str) -> list[Any]:
    if not found:
        raise UsageError(f"{rows.name} has no row whose {what}.", cure="Check that it is the right file.")
    return found
