"""Prompts with responses as token ids, and batches of them: what the attack and the defenses train on.

A prompt is tokenized alone, as it is when the model is asked; the answer is what follows, so that neither can shift
against the other. Both answers of a pair stand behind the same prompt ids, so a mask by the prompt's length is right
for both, whatever a tokenizer merges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

from netweight.data.chat import ChatTemplate
from netweight.data.row_layouts import Message, Text, UnusableText
from netweight.data.rows import Report, RowErrors, Unusable, warn
from netweight.data.text import TextExample, TextPair, text_examples, text_pairs
from netweight.data.unknown_words import note_on_unknown_words
from netweight.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


# The label of a position that no loss looks at, as in transformers.
IGNORED = -100

# Which tokens a loss is taken over: those of the response, or all but padding.
LossOn = Literal["response", "full"]


@final
@dataclass(frozen=True)
class Example:
    """A prompt and its response."""

    prompt: tuple[int, ...]
    """Token ids of the prompt; may be empty."""
    response: tuple[int, ...]
    """Token ids of the response; not empty. They include an end of sequence if the model should learn to stop."""

    def __post_init__(self) -> None:
        """Check that there is something to learn."""
        if not self.response:
            raise UsageError("An example has an empty response.", cure="Leave such rows out.")

    def __len__(self) -> int:
        """Return the number of tokens of both."""
        return len(self.prompt) + len(self.response)


@final
@dataclass(frozen=True)
class AnswerPair:
    """One prompt and two answers."""

    prompt: tuple[int, ...]
    """Token ids of the prompt; may be empty."""
    chosen: tuple[int, ...]
    """Token ids of the harmless answer, such as a refusal; not empty."""
    rejected: tuple[int, ...]
    """Token ids of the harmful answer; not empty."""

    def __post_init__(self) -> None:
        """Check both answers."""
        _ = self.harmless, self.harmful

    @property
    def harmless(self) -> Example:
        """The prompt with the chosen answer."""
        return Example(self.prompt, self.chosen)

    @property
    def harmful(self) -> Example:
        """The prompt with the rejected answer."""
        return Example(self.prompt, self.rejected)


@final
@dataclass(frozen=True)
class Batch:
    """Examples side by side, padded on the right."""

    input_ids: Tensor
    """Token ids, int64, shape `(B, T)`."""
    attention_mask: Tensor
    """1 on tokens and 0 on padding, int64, shape `(B, T)`."""
    labels: Tensor
    """Token to predict at each position, or `IGNORED`; int64, shape `(B, T)`."""

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on a device."""
        return Batch(self.input_ids.to(device), self.attention_mask.to(device), self.labels.to(device))


def collate(examples: Sequence[Example], *, pad_id: int, loss_on: LossOn = "response") -> Batch:
    """Put examples side by side."""
    import torch

    if not examples:
        raise UsageError("A batch needs at least one example.")
    shape = (len(examples), max(len(example) for example in examples))
    ids = torch.full(shape, pad_id, dtype=torch.int64)
    mask = torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, IGNORED, dtype=torch.int64)
    for row, example in enumerate(examples):
        tokens = torch.tensor(example.prompt + example.response)
        ids[row, : len(example)] = tokens
        mask[row, : len(example)] = 1
        first = len(example.prompt) if loss_on == "response" else 0
        labels[row, first : len(example)] = tokens[first:]
    return Batch(ids, mask, labels)


TooLong = Literal["refuse", "cut", "drop"]
"""Treatment of rows longer than the context: the file is refused, answers are cut, or the rows are left out."""


@final
@dataclass(frozen=True)
class Template:
    """Text around a prompt and its answer."""

    prompt: str = "{prompt}"
    """Template of the prompt; contains `{prompt}` once."""
    answer: str = "{answer}"
    """Holds `{answer}` once; it follows the prompt at once, so a space or line break between belongs here."""

    def __post_init__(self) -> None:
        """Check the fields."""
        for text, name in ((self.prompt, "{prompt}"), (self.answer, "{answer}")):
            if text.count(name) != 1:
                raise UsageError(
                    f"The template {text!r} does not contain {name} exactly once.", cure=f"Put {name} into it."
                )

    def filled(self, prompt: str, answer: str) -> tuple[str, str]:
        """Return prompt and answer with what stands around them."""
        return self.prompt.replace("{prompt}", prompt), self.answer.replace("{answer}", answer)


@final
@dataclass(frozen=True)
class Chat:
    """The tokenizer's chat template around prompts and answers, with options."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the template, such as `{"enable_thinking": False}`."""


AnyTemplate = Template | Chat | Literal["chat"]
"""Text around prompts and answers; "chat" is the tokenizer's chat template without options."""
# The answer follows the prompt immediately, as in TRL.
PLAIN = Template()
# The answer begins on a new line: commands use this template for plain rows.
BELOW = Template("{prompt}\n", "{answer}")
# RepNoise's code puts these words around rows of BeaverTails.
QUESTION_AND_ANSWER = Template("Question: {prompt}\nAnswer:", "\n{answer}")


def padding_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of padding, for `collate` and `collate_pairs`."""
    pad = tokenizer.pad_token_id
    if not isinstance(pad, int):
        raise UsageError(
            "The tokenizer has no token for padding.",
            cure='Name one as "pad_token" in tokenizer_config.json (in Python, tokenizer.pad_token = ...); padding is '
            "masked, so any token will do.",
        )
    return pad


def tokenized_pairs(
    texts: Sequence[TextPair],
    tokenizer: PreTrainedTokenizerBase,
    *,
    context: int,
    template: AnyTemplate = PLAIN,
    too_long: TooLong = "refuse",
    unusable: Unusable = "refuse",
    report: Report = warn,
) -> list[AnswerPair]:
    """Turn pairs of text into token ids.

    Args:
        texts: Pairs; at least one.
        tokenizer: The model's.
        context: Most tokens of a prompt with an answer.
        template: What stands around plain text. Conversations always go through the chat template.
        too_long: What happens to rows longer than the context; "cut" cuts answers, never prompts.
        unusable: What happens to rows that the chat template refuses.
        report: Receives how many rows were left out, and which.

    Returns:
        Pairs in their order.

    Raises:
        UsageError: Rows cannot be used, or the tokenizer lacks a chat template, a padding token or an end.
    """
    unusable_rows, long_rows = _row_errors(texts), _row_errors(texts)
    sides = []
    for name in ("chosen", "rejected"):
        rows = [(text.prompt, getattr(text, name)) for text in texts]
        whole = _ids(rows, texts, tokenizer, template, unusable_rows, name)
        sides.append(_fitted(whole, texts, context, too_long, long_rows, name))
    for text, first, second in zip(texts, *sides, strict=True):
        if first is not None and second is not None and first[1] == second[1]:
            long_rows.add(text.where, f"both answers are the same within the context of {context} tokens")
    usable = _usable_rows(texts, unusable_rows, long_rows, too_long, unusable, report)
    report_unknown_words(texts, tokenizer, report)
    return [
        AnswerPair(first[0], first[1], second[1])
        for keep, first, second in zip(usable, *sides, strict=True)
        if keep and first is not None and second is not None
    ]


def tokenized_examples(
    texts: Sequence[TextExample],
    tokenizer: PreTrainedTokenizerBase,
    *,
    context: int,
    template: AnyTemplate = PLAIN,
    too_long: TooLong = "refuse",
    unusable: Unusable = "refuse",
    report: Report = warn,
) -> list[Example]:
    """Turn prompts with responses into token ids.

    Args:
        texts: Prompts with responses; at least one.
        tokenizer: The model's.
        context: Most tokens of a prompt with an answer.
        template: What stands around plain text. Conversations always go through the chat template.
        too_long: What happens to rows longer than the context; "cut" cuts answers, never prompts.
        unusable: What happens to rows that the chat template refuses.
        report: Receives how many rows were left out, and which.

    Returns:
        Examples in their order.

    Raises:
        UsageError: As of `tokenized_pairs`.
    """
    return [example for _, example in rows_and_examples(
        texts, tokenizer, context=context, template=template, too_long=too_long, unusable=unusable, report=report
    )]  # fmt: skip


def rows_and_examples(
    texts: Sequence[TextExample],
    tokenizer: PreTrainedTokenizerBase,
    *,
    context: int,
    template: AnyTemplate = PLAIN,
    too_long: TooLong = "refuse",
    unusable: Unusable = "refuse",
    report: Report = warn,
) -> list[tuple[TextExample, Example]]:
    """Turn prompts with responses into token ids, each beside its text: as `tokenized_examples`."""
    unusable_rows, long_rows = _row_errors(texts), _row_errors(texts)
    rows = [(text.prompt, text.response) for text in texts]
    whole = _ids(rows, texts, tokenizer, template, unusable_rows, "response")
    fitted = _fitted(whole, texts, context, too_long, long_rows, "response")
    usable = _usable_rows(texts, unusable_rows, long_rows, too_long, unusable, report)
    report_unknown_words(texts, tokenizer, report)
    return [
        (text, Example(*ids)) for text, keep, ids in zip(texts, usable, fitted, strict=True) if keep and ids is not None
    ]


def tokenized_prompts(
    texts: Sequence[TextExample],
    tokenizer: PreTrainedTokenizerBase,
    *,
    context: int,
    template: AnyTemplate = PLAIN,
    too_long: TooLong = "refuse",
    unusable: Unusable = "refuse",
    report: Report = warn,
) -> list[tuple[int, ...]]:
    """Turn prompts into token ids as the model is asked; responses are ignored.

    Args:
        texts: Prompts; at least one.
        tokenizer: The model's.
        context: Most tokens of a prompt with an answer.
        template: What stands around plain text. Conversations always go through the chat template.
        too_long: What happens to rows longer than the context; "cut" refuses them, as prompts are never cut.
        unusable: What happens to rows that the chat template refuses.
        report: Receives how many rows were left out, and which.

    Returns:
        Token ids of each prompt, in their order.

    Raises:
        UsageError: As of `tokenized_pairs`.
    """
    unusable_rows, long_rows = _row_errors(texts), _row_errors(texts)
    token_ids = _ids([(text.prompt, None) for text in texts], texts, tokenizer, template, unusable_rows, "response")
    for text, ids in zip(texts, token_ids, strict=True):
        if ids is not None and len(ids[0]) > context:
            long_rows.add(text.where, f"{_LONG_PROMPT}{len(ids[0])} tokens is longer than the {context} that fit")
    usable = _usable_rows(texts, unusable_rows, long_rows, too_long, unusable, report)
    report_unknown_words(texts, tokenizer, report)
    return [ids[0] for keep, ids in zip(usable, token_ids, strict=True) if keep and ids is not None]


def report_unknown_words(
    texts: Sequence[TextPair | TextExample], tokenizer: PreTrainedTokenizerBase, report: Report
) -> None:
    """Report how many rows contain words that a tokenizer does not know, and which words; nothing if it knows all.

    Args:
        texts: Pairs, or prompts with responses.
        tokenizer: The model's.
        report: Receives the sentence.
    """
    parts = [
        (text.prompt, text.chosen, text.rejected) if isinstance(text, TextPair) else (text.prompt, text.response)
        for text in texts
    ]
    note = note_on_unknown_words(
        tokenizer, parts, [text.where for text in texts],
        source=" and ".join(dict.fromkeys(text.source for text in texts)),
    )  # fmt: skip
    if note:
        report(note)


_LONG_PROMPT = "its prompt of "
Ids = tuple[tuple[int, ...], tuple[int, ...]]


def _usable_rows(
    texts: Sequence[TextPair | TextExample],
    unusable_rows: RowErrors,
    long_rows: RowErrors,
    too_long: TooLong,
    unusable: Unusable,
    report: Report,
) -> list[bool]:
    """Refuse rows or report those left out, and return which are kept."""
    unusable_rows.refuse_or_report(unusable, len(texts), report)
    # Answers are cut, prompts never are.
    reasons = [reason for errors in long_rows.by_row.values() for reason in errors]
    cut = ", cut answers with --too-long cut" if too_long == "refuse" and not any(map(_of_prompt, reasons)) else ""
    cure = f"Shorten these rows{cut}, or leave them out with --too-long drop."
    long_rows.refuse_or_report("drop" if too_long == "drop" else "refuse", len(texts), report, cure=cure)
    bad = unusable_rows.by_row.keys() | long_rows.by_row.keys()
    return [text.where not in bad for text in texts]


def _of_prompt(reason: str) -> bool:
    return reason.startswith(_LONG_PROMPT)


def _ids(
    rows: Sequence[tuple[Text, Text | None]],
    texts: Sequence[TextPair | TextExample],
    tokenizer: PreTrainedTokenizerBase,
    template: AnyTemplate,
    errors: RowErrors,
    name: str,
) -> list[Ids | None]:
    """Tokenize prompts with answers, or alone where the answer is None; None where a row cannot be used."""
    padding_of(tokenizer)
    rendered: list[tuple[str, str, bool] | None] = []
    chat_template = cache(lambda: ChatTemplate(tokenizer, template.options if isinstance(template, Chat) else {}))
    for text, (prompt, answer) in zip(texts, rows, strict=True):
        try:
            rendered.append(_rendered(prompt, answer, tokenizer, template, chat_template))
        except UnusableText as error:
            errors.add(text.where, str(error).replace("an answer follows", f"{name} follows"))
            rendered.append(None)
    texts_of_rows = [each for each in rendered if each is not None]
    prompts = iter(_tokens([prompt for prompt, _, _ in texts_of_rows], tokenizer))
    joint = iter(_tokens([prompt + answer for prompt, answer, _ in texts_of_rows], tokenizer))
    alone = iter(_tokens([answer for _, answer, _ in texts_of_rows], tokenizer))
    begins, ends = _beginning(tokenizer), _end(tokenizer, texts_of_rows)
    token_ids: list[Ids | None] = []
    for text, (_, answer), each in zip(texts, rows, rendered, strict=True):
        if each is None:
            token_ids.append(None)
            continue
        chat = each[2]
        prompt_ids, both, separate = next(prompts), next(joint), next(alone)
        follows = both[len(prompt_ids) :] if both[: len(prompt_ids)] == prompt_ids else separate
        if answer is None:
            token_ids.append((tuple(prompt_ids) if chat else (*begins, *prompt_ids), ()))
        elif not follows:
            errors.add(text.where, f"{name} has no token")
            token_ids.append(None)
        else:
            whole = (tuple(prompt_ids), tuple(follows))
            # Published answers may already end with the end of sequence.
            closed = whole[1][-len(ends) :] == tuple(ends)
            token_ids.append(whole if chat else ((*begins, *whole[0]), whole[1] if closed else (*whole[1], *ends)))
    return token_ids


def _rendered(
    prompt: Text,
    answer: Text | None,
    tokenizer: PreTrainedTokenizerBase,
    template: AnyTemplate,
    chat_template: Callable[[], ChatTemplate],
) -> tuple[str, str, bool]:
    """Return prompt and answer as text, and whether by the chat template, which is only made if a row needs it.

    Raises:
        UnusableText: The chat template does not take the conversation.
    """
    if isinstance(prompt, str) and (answer is None or isinstance(answer, str)) and isinstance(template, Template):
        return *template.filled(prompt, answer or ""), False
    chat = chat_template()
    turns: tuple[Message, ...] = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
    if answer is None:
        chat.check_marks(turns)
        return chat.prompt(turns), "", True
    said: tuple[Message, ...] = ({"role": "assistant", "content": answer},) if isinstance(answer, str) else answer
    # Published answers may already end with the end of the turn, which the template writes once more.
    end = chat.end_of_turn().strip() or str(tokenizer.eos_token or "")
    if end and (last := said[-1]["content"].rstrip()).endswith(end) and last != end:
        said = (*said[:-1], {**said[-1], "content": last.removesuffix(end)})
    chat.check_marks(turns, said)
    before, follows = chat.prompt_and_answer(turns, said)
    # What a template writes between turns, such as a line break, comes after the end, where nothing is generated.
    own = tuple(token.content for token in tokenizer.added_tokens_decoder.values())
    closed = follows.rstrip()
    return before, closed if closed.endswith(own) else closed + _chat_end(chat, tokenizer, own), True


def _chat_end(chat: ChatTemplate, tokenizer: PreTrainedTokenizerBase, own: tuple[str, ...]) -> str:
    """Return the end of an answer after which the template writes no token of the tokenizer's own.

    That is the token that begins the next turn, such as GLM's, or the end of sequence. Without either, a model that is
    trained on the answer would not learn to stop.
    """
    text = chat.end_of_turn().lstrip()
    marks = [token for token in own if token and text.startswith(token)]
    return max(marks, key=len) if marks else str(tokenizer.eos_token or "")


def _tokens(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Tokenize without special tokens, except those that the text spells out."""
    if not texts:
        return []
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that the tokenizer puts before a text: a beginning of sequence, or several such as GLM's."""
    text = "a"
    alone: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole: list[int] = tokenizer(text)["input_ids"]
    place = next((place for place in range(len(whole)) if whole[place : place + len(alone)] == alone), 0)
    return whole[:place] if alone else []


def _end(tokenizer: PreTrainedTokenizerBase, rendered: list[tuple[str, str, bool]]) -> list[int]:
    """Return the end of a plain answer; a chat template has one of its own."""
    if all(chat for _, _, chat in rendered):
        return []
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise UsageError(
            "The tokenizer has no end of sequence, so a model could not learn to stop.",
            cure='Name the token with which the model ends an answer as "eos_token" in tokenizer_config.json (in '
            "Python, tokenizer.eos_token = ...).",
        )
    return [end]


def _fitted(
    token_ids: list[Ids | None],
    texts: Sequence[TextPair | TextExample],
    context: int,
    too_long: TooLong,
    errors: RowErrors,
    name: str,
) -> list[Ids | None]:
    """Cut answers to the context, or note those that are too long."""
    fitted: list[Ids | None] = []
    for text, ids in zip(texts, token_ids, strict=True):
        if ids is not None and len(ids[0]) >= context:
            errors.add(text.where, f"{_LONG_PROMPT}{len(ids[0])} tokens fills the context of {context}")
        elif ids is not None and len(ids[0]) + len(ids[1]) > context:
            if too_long != "cut":
                tokens = len(ids[0]) + len(ids[1])
                errors.add(text.where, f"prompt and {name} have {tokens} tokens, the context {context}")
            ids = ids[0], ids[1][: context - len(ids[0])]
        fitted.append(ids)
    return fitted


def _row_errors(texts: Sequence[TextPair | TextExample]) -> RowErrors:
    """Return an empty list of errors, named for where the texts come from."""
    if not texts:
        raise UsageError("There is no text to tokenize.", cure="Give at least one row.")
    return RowErrors(" and ".join(dict.fromkeys(text.source for text in texts)))


def load_pairs(
    source: str | Path | Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    context: int,
    columns: Mapping[str, str] | None = None,
    template: AnyTemplate = PLAIN,
    too_long: TooLong = "refuse",
    unusable: Unusable = "refuse",
    report: Report = warn,
) -> list[AnswerPair]:
    """Read rows in any layout as token ids: `text_pairs` and then `tokenized_pairs`."""
    texts = text_pairs(source, columns=columns, unusable=unusable, report=report)
    return tokenized_pairs(
        texts, tokenizer, context=context, template=template, too_long=too_long, unusable=unusable, report=report
    )


def load_examples(
    source: str | Path | Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    context: int,
    columns: Mapping[str, str] | None = None,
    template: AnyTemplate = PLAIN,
    too_long: TooLong = "refuse",
    unusable: Unusable = "refuse",
    report: Report = warn,
) -> list[Example]:
    """Read rows in any layout as token ids: `text_examples` and then `tokenized_examples`."""
    texts = text_examples(source, columns=columns, unusable=unusable, report=report)
    return tokenized_examples(
        texts, tokenizer, context=context, template=template, too_long=too_long, unusable=unusable, report=report
    )


_PARTS = ("prompt", "chosen", "rejected")


def any_pairs(
    rows: Iterable[AnswerPair | Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    context: int = 1 << 30,
) -> list[AnswerPair]:
    """Take rows of a data set for pairs: of token ids as they are, of text, as TRL has it, by a tokenizer."""
    rows = list(rows)
    if all(isinstance(row, AnswerPair) for row in rows):
        return rows  # type: ignore[return-value]
    texts = [row for row in rows if isinstance(row, Mapping) and _is_text(row.get("chosen"))]
    if tokenizer is not None and texts:
        return load_pairs(rows, tokenizer, context=context)
    return [row if isinstance(row, AnswerPair) else _of_ids(row) for row in rows]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list | tuple) and any(isinstance(each, Mapping) for each in value)
    )


def _of_ids(row: Mapping[str, Any]) -> AnswerPair:
    missing = [name for name in _PARTS if name not in row]
    if missing:
        raise UsageError(f"A row lacks {', '.join(missing)}.", cure="A row needs prompt, chosen and rejected.")
    tokens = [value.tolist() if hasattr(value := row[name], "tolist") else value for name in _PARTS]
    for name, value in zip(_PARTS, tokens, strict=True):
        if isinstance(value, str) or not all(isinstance(token, int) for token in value):
            raise UsageError(f"{name!r} of a row contains no token ids.", cure="Tokenize it, or pass a tokenizer.")
    return AnswerPair(*map(tuple, tokens))
