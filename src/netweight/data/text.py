"""Read prompts with answers out of rows: pairs of a harmless and a harmful answer, single responses, prompts alone.

A text is a string or a conversation, which is a list of messages with a role and content, as chat templates take it.
`row_layouts` says which layouts of published data are recognized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, final

from netweight.core.names import not_found
from netweight.data.row_layouts import (
    PARTS,
    PromptColumns,
    Text,
    UnusableText,
    layout_of,
    like_turns,
    text_of,
    with_shared_prompt,
    without_prompt,
)
from netweight.data.rows import DataRow, DataRows, Report, RowErrors, Unusable, read_rows, warn
from netweight.errors import NameNotFound, UsageError


@final
@dataclass(frozen=True)
class TextPair:
    """A prompt with a harmless and a harmful answer."""

    prompt: Text
    """Prompt, as text or as a conversation."""
    chosen: Text
    """The harmless answer."""
    rejected: Text
    """The harmful answer."""
    categories: tuple[str, ...] = ()
    """Categories of harm; may be empty."""
    source: str = "the pairs"
    """Source of the pair, for messages."""
    where: str = "a pair"
    """The place within the source, for messages."""


@final
@dataclass(frozen=True)
class TextExample:
    """A prompt with a response."""

    prompt: Text
    """Prompt, as text or as a conversation."""
    response: Text
    """The answer; an empty string where only the prompt is known."""
    categories: tuple[str, ...] = ()
    """Categories of harm; may be empty."""
    source: str = "the examples"
    """Source of the example, for messages."""
    where: str = "an example"
    """The place within the source, for messages."""


# Columns of truth values in data for KTO, as TRL and LLaMA-Factory name them.
# Columns that call an answer desirable: of data for KTO (TRL's and LLaMA-Factory's), and of BeaverTails.
_RATINGS = ("label", "kto_tag", "is_safe")
_TRUTH = {True: True, False: False, "true": True, "false": False}
# These begin an answer in conversations that are one text: in Anthropic's preference data, and in the chat templates of
# ChatML, Llama 3, Llama 2, Gemma, GLM and Zephyr, Phi, DeepSeek, Alpaca and Vicuna.
_TURNS = (
    "\n\nAssistant:", "<|im_start|>assistant\n", "<|start_header_id|>assistant<|end_header_id|>\n\n", "[/INST]",
    "<start_of_turn>model\n", "<|assistant|>\n", "<|assistant|>", "<|Assistant|>", "<｜Assistant｜>", "### Response:\n",
    "### Response:", "\nASSISTANT:", " ASSISTANT:",
)  # fmt: skip
# These begin a further turn of the user in such texts.
_QUESTIONS = (
    "\n\nHuman:", "<|im_start|>user", "<|start_header_id|>user", "[INST]", "<start_of_turn>user", "<|user|>",
    "<|User|>", "<｜User｜>", "\nUSER:",
)  # fmt: skip
_Given = TypeVar("_Given", TextPair, TextExample)


def text_pairs(
    source: str | Path | Any,
    *,
    columns: Mapping[str, str] | None = None,
    unusable: Unusable = "refuse",
    report: Report = warn,
) -> list[TextPair]:
    """Read prompts with a harmless and a harmful answer, in any layout of preference data.

    Where there are chosen and rejected answers alone, what both begin with is the prompt, as TRL has it.

    Args:
        source: A file, `hub:NAME` or `hub:NAME:SPLIT`, a `datasets.Dataset`, or rows.
        columns: Part (`prompt`, `chosen`, `rejected`) → column, where the names differ.
        unusable: Whether rows without usable text are refused or left out.
        report: Receives how many rows were left out, and which.

    Returns:
        The pairs, at least one.

    Raises:
        UsageError: The source cannot be read, or rows cannot be used.
        NameNotFound: A column is missing.
    """
    rows = read_rows(source)
    layout = _layout(rows, columns)
    implicit = not layout.has("prompt") and _are_implicit(rows, layout)
    _need(rows, layout, ("prompt", "chosen", "rejected")[implicit:])
    errors = RowErrors(rows.name)
    pairs = []
    for row in rows.rows:
        try:
            prompt, chosen, rejected = _pair_of(row.values, layout, implicit=implicit)
        except UnusableText as error:
            for reason in error.reasons:
                errors.add(row.where, reason)
            continue
        if visible_text(chosen) == visible_text(rejected):
            errors.add(row.where, "both answers are the same")
        labels = categories(row, errors)
        if row.where not in errors.by_row:
            pairs.append(TextPair(prompt, chosen, rejected, labels, rows.name, row.where))
    errors.refuse_or_report(unusable, len(rows.rows), report)
    different = len({(visible_text(each.prompt), visible_text(each.rejected)) for each in pairs})
    if 2 * different < len(pairs):
        report(
            f"Only {different} of the {len(pairs)} pairs of {rows.name} differ in prompt or harmful answer. The rest "
            "repeat them, so they teach a defense little."
        )
    return pairs


def visible_text(text: Text) -> str:
    """Return a text, or the turns of a conversation as one text, without differences of white space.

    Args:
        text: A text or a conversation.
    """
    turns = [text] if isinstance(text, str) else [f"{turn['role']} {turn['content']}" for turn in text]
    return " ".join(" ".join(turns).split())


def _layout(rows: DataRows, columns: Mapping[str, str] | None) -> PromptColumns:
    """Return the layout of rows, by the names of their columns and by the conversations in them."""
    layout = layout_of(rows.columns, _given_columns(PARTS, columns))
    return with_shared_prompt(layout, rows.columns, (row.values for row in rows.rows))


def _pair_of(values: Mapping[str, Any], layout: PromptColumns, *, implicit: bool) -> tuple[Text, Text, Text]:
    """Return the prompt and both answers of a row; the error of a row has all reasons."""
    readers: list[Callable[[], Text]] = [] if implicit else [lambda: layout.prompt(values)]
    for part in ("chosen", "rejected"):
        column = layout.columns[part]
        readers.append(lambda column=column: text_of(values.get(column), column))  # type: ignore[misc]
    texts: list[Text] = []
    reasons: list[str] = []
    for read in readers:
        try:
            texts.append(read())
        except UnusableText as error:
            reasons += error.reasons
    if reasons:
        raise UnusableText(*reasons)
    prompt, chosen, rejected = _parted(texts[0], texts[1]) if implicit else texts
    answers = (without_prompt(chosen, prompt), without_prompt(rejected, prompt))
    if isinstance(answers[0], str) != isinstance(answers[1], str):
        raise UnusableText("some of it is a conversation and some is not")
    prompt, chosen, rejected = like_turns(prompt, *answers)
    return prompt, chosen, rejected


def _are_implicit(rows: DataRows, layout: PromptColumns) -> bool:
    """Return whether no column can be the prompt: a misspelled one must not be taken for none."""
    own = {*layout.columns.values(), "category"}
    others = (value for row in rows.rows for name, value in row.values.items() if name not in own)
    return not any(isinstance(value, str) for value in others)


def _parted(chosen: Text, rejected: Text) -> tuple[Text, Text, Text]:
    """Take what both answers begin with for their prompt: letters, or whole messages."""
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise UnusableText("some of it is a conversation and some is not")
    same = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), len(chosen))
    if isinstance(chosen, str) and isinstance(rejected, str):
        same = _before_answer(chosen, rejected, same)
    if not 0 < same < min(len(chosen), len(rejected)):
        raise UnusableText("chosen and rejected do not begin with a common prompt")
    if any(map(_asks, (chosen[same:], rejected[same:]))):
        raise UnusableText("chosen and rejected differ before their last answer, so that a question would be learned")
    return chosen[:same], chosen[same:], rejected[same:]


def _asks(answer: Text) -> bool:
    """Return whether an answer goes on with a further turn of the user."""
    if isinstance(answer, str):
        return any(mark in answer for mark in _QUESTIONS)
    return any(turn["role"] == "user" for turn in answer)


def _before_answer(chosen: str, rejected: str, same: int) -> int:
    """Return where answers begin that share so many letters: at the mark of the last turn, or between words."""
    marks = [chosen.rindex(mark, 0, same) + len(mark) for mark in _TURNS if mark in chosen[:same]]
    if marks:
        return max(marks)
    while same and chosen[same - 1].isalnum() and (chosen[same : same + 1] + rejected[same : same + 1]).isalnum():
        same -= 1
    # A space before the answer belongs to the answer.
    return same - 1 if chosen[:same].endswith(" ") else same


def text_examples(
    source: str | Path | Any,
    *,
    columns: Mapping[str, str] | None = None,
    pairs: Literal["chosen", "rejected"] | None = None,
    unusable: Unusable = "refuse",
    report: Report = warn,
) -> list[TextExample]:
    """Read prompts with responses, in any layout that `row_layouts` names.

    Args:
        source: As of `text_pairs`.
        columns: Part (`prompt`, `response`) → column, where the names differ.
        pairs: Which answer of preference data is the response; None refuses such data. Of rows with one answer each
            and a column `label`, `kto_tag` (KTO) or `is_safe` of truth values, those labeled true are the chosen ones.
        unusable: As of `text_pairs`.
        report: As of `text_pairs`.

    Returns:
        The examples, at least one.

    Raises:
        UsageError: The source cannot be read, or rows cannot be used.
        NameNotFound: A column is missing.
    """
    rows = read_rows(source)
    layout = _layout(rows, columns)
    if pairs is not None and not layout.has("response") and layout.has(pairs):
        if layout.has("chosen") and layout.has("rejected"):
            both = text_pairs(rows, columns=columns, unusable=unusable, report=report)
            return [TextExample(e.prompt, getattr(e, pairs), e.categories, e.source, e.where) for e in both]
        layout = replace(layout, columns={**layout.columns, "response": layout.columns[pairs]})
    _need(rows, layout, ("prompt", "response"))
    errors = RowErrors(rows.name)
    examples = []
    rating = None if pairs is None else _rating(rows)
    unwanted = 0
    for row in rows.rows:
        if rating is not None and _truth(row.values.get(rating)) is not (pairs == "chosen"):
            unwanted += 1
            continue
        try:
            prompt, response = layout.prompt_and_response(row.values)
            prompt, response = like_turns(prompt, without_prompt(response, prompt))
        except UnusableText as error:
            errors.add(row.where, str(error))
            continue
        labels = categories(row, errors)
        if row.where not in errors.by_row:
            examples.append(TextExample(prompt, response, labels, rows.name, row.where))
    errors.refuse_or_report(unusable, len(rows.rows) - unwanted, report)
    if unwanted:
        kind = "undesirable" if pairs == "chosen" else "desirable"
        report(f"{rows.name}: {unwanted} of {len(rows.rows)} answers are labeled {kind} and were left out.")
    if not examples:
        raise UsageError(f"{rows.name} has no answer with the label that is needed here.", cure="Give other rows.")
    return examples


def _rating(rows: DataRows) -> str | None:
    """Return the column that calls each row's answer desirable or not; None without one.

    Raises:
        UsageError: A column of this name has the numbers 0 and 1, of which either may be meant.
    """
    for name in _RATINGS:
        if name not in rows.columns:
            continue
        values = [row.values.get(name) for row in rows.rows]
        if all(_truth(value) is not None for value in values):
            return name
        if all(type(value) in (int, float) and value in (0, 1) for value in values):
            raise UsageError(
                f"The column {name!r} of {rows.name} has the numbers 0 and 1, and it is not stated which of them "
                "means a harmless answer.",
                cure="Write true for harmless and false for harmful answers, or remove the column.",
            )
    return None


def _truth(value: Any) -> bool | None:
    """Return a truth value, which tables such as CSV hold as text; None for any other value."""
    key = value.strip().lower() if isinstance(value, str) else value
    return _TRUTH.get(key) if isinstance(key, str | bool) else None


def text_prompts(
    source: str | Path | Any,
    *,
    columns: Mapping[str, str] | None = None,
    unusable: Unusable = "refuse",
    report: Report = warn,
) -> tuple[list[TextExample], bool]:
    """Read prompts, with the response where the source has responses.

    Args:
        source: As of `text_pairs`; rows may have any layout, also `prompt` alone.
        columns: As of `text_examples`.
        unusable: As of `text_pairs`.
        report: As of `text_pairs`.

    Returns:
        Prompts in their order, and whether all have responses; if not, each response is an empty string.

    Raises:
        UsageError: The source cannot be read, or rows cannot be used.
        NameNotFound: A column is missing.
    """
    rows = read_rows(source)
    layout = _layout(rows, columns)
    if layout.has("response") and layout.conversation is None:
        column = layout.columns["response"]
        without = sum(row.values.get(column) in (None, "") for row in rows.rows)
        if not without:
            return text_examples(rows, columns=columns, unusable=unusable, report=report), True
        report(f"{rows.name}: {without} of {len(rows.rows)} rows have no {column}, so that no {column} is used.")
    _need(rows, layout, ("prompt",))
    errors = RowErrors(rows.name)
    prompts = []
    for row in rows.rows:
        try:
            prompts.append(TextExample(layout.question(row.values), "", (), rows.name, row.where))
        except UnusableText as error:
            errors.add(row.where, str(error))
    errors.refuse_or_report(unusable, len(rows.rows), report)
    return prompts, False


def withhold(texts: Sequence[_Given], names: Iterable[str]) -> tuple[list[_Given], list[_Given]]:
    """Part rows by category, for the question whether a defense reaches harm that it never saw."""
    categories = list(names)
    existing = sorted({name for text in texts for name in text.categories})
    for name in categories:
        if name not in existing:
            raise not_found(f"No row has the category {name!r}.", name, existing)
    remaining = [text for text in texts if not set(categories) & set(text.categories)]
    withheld = [text for text in texts if set(categories) & set(text.categories)]
    if not remaining or not withheld:
        raise UsageError(
            f"Withholding {categories} leaves {len(remaining)} rows and withholds {len(withheld)}.",
            cure="Withhold at least one category, and not all of them.",
        )
    return remaining, withheld


def categories(row: DataRow, errors: RowErrors) -> tuple[str, ...]:
    """Read a row's column "category": a name, a list of names, or names with true and false as in BeaverTails."""
    value = row.values.get("category")
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, Mapping) and all(isinstance(is_so, bool) for is_so in value.values()):
        return tuple(name for name, is_so in value.items() if is_so)
    if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
        return tuple(value)
    errors.add(row.where, f"its category is of a kind that is not supported ({type(value).__name__})")
    return ()


def needed_text(rows: DataRows, row: DataRow, column: str, errors: RowErrors) -> str | None:
    """Read a column that must be a string; `rows` is only there to be named."""
    try:
        value = text_of(row.values.get(column), column)
    except UnusableText as error:
        errors.add(row.where, str(error))
        return None
    if not isinstance(value, str):
        errors.add(row.where, f"{column} is a conversation, which {rows.name} must not contain")
        return None
    return value


def _given_columns(names: Sequence[str], given: Mapping[str, str] | None) -> dict[str, str]:
    """Return the columns that a person named, each for a part that is asked for."""
    for part in given or {}:
        if part not in names:
            raise NameNotFound(f"There is no {part!r} to give a column for.", cure=f"There are {', '.join(names)}.")
    return dict(given or {})


_TOKENS = ("input_ids", "prompt_ids", "chosen_ids", "rejected_ids")  # columns of rows without text


def _need(rows: DataRows, layout: PromptColumns, parts: Iterable[str]) -> None:
    """Refuse a source that lacks the column of a part; the cure is an option of commands, and Python's."""
    for part in parts:
        by = f"--columns {part}=NAME, or columns={{{{{part!r}: ...}}}} in Python"
        if not layout.has(part):
            if tokens := [name for name in rows.columns if name in _TOKENS]:
                raise UsageError(
                    f"{rows.name} contains token ids ({', '.join(tokens)}) and no column {part!r}.",
                    cure="Give the rows as text, as they were before they were tokenized.",
                )
            rows.need(part, by=by)
        elif part in layout.columns:
            rows.need(layout.columns[part], by=by)
