"""Prompts with responses as token ids, and batches of them: what the attack and the defenses train on.

A prompt is tokenized alone, as it is when the model is asked; the answer is what follows, so that neither can shift
against the other. Both answers of a pair stand behind the same prompt ids, so a mask by the prompt's length is right
for both, whatever a tokenizer merges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

from netweight.data.text import RowErrors, Text, TextExample, TextPair, text_examples, text_pairs
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

    prompt: tuple[int, ...]  # token ids; may be empty
    response: tuple[int, ...]  # token ids, an end of sequence among them where the model is to learn to stop; not empty

    def __post_init__(self) -> None:
        """Check that there is something to learn."""
        if not self.response:
            raise UsageError("An example has an empty response.", cure="Leave such rows out.")

    def __len__(self) -> int:
        """Return the number of tokens of both."""
        return len(self.prompt) + len(self.response)


@final
@dataclass(frozen=True)
class Pair:
    """One prompt and two answers."""

    prompt: tuple[int, ...]  # token ids; may be empty
    chosen: tuple[int, ...]  # token ids of the harmless answer, such as a refusal; not empty
    rejected: tuple[int, ...]  # token ids of the harmful answer; not empty

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

    input_ids: Tensor  # token ids, int64, shape `(B, T)`
    attention_mask: Tensor  # 1 on tokens and 0 on padding, int64, shape `(B, T)`
    labels: Tensor  # the token at each position where it is to be predicted, else `IGNORED`; int64, shape `(B, T)`

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


TooLong = Literal["refuse", "cut"]


@final
@dataclass(frozen=True)
class Template:
    """What stands around plain text."""

    prompt: str = "{prompt}"  # holds `{prompt}` once
    # Holds `{answer}` once; it follows the prompt at once, so a space or line break between belongs here.
    answer: str = "{answer}"

    def __post_init__(self) -> None:
        """Check the fields."""
        for text, name in ((self.prompt, "{prompt}"), (self.answer, "{answer}")):
            if text.count(name) != 1:
                raise UsageError(f"The template {text!r} does not hold {name} once.", cure=f"Put {name} into it.")

    def filled(self, prompt: str, answer: str) -> tuple[str, str]:
        """Return prompt and answer with what stands around them."""
        return self.prompt.replace("{prompt}", prompt), self.answer.replace("{answer}", answer)


PLAIN = Template()  # the answer follows the prompt at once, as TRL has it
BELOW = Template("{prompt}\n", "{answer}")  # the answer begins a line of its own: what commands put around plain rows
QUESTION_AND_ANSWER = Template("Question: {prompt}\nAnswer:", "\n{answer}")  # RepNoise's code around BeaverTails


def padding_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of padding, for `collate` and `collate_pairs`."""
    pad = tokenizer.pad_token_id
    if not isinstance(pad, int):
        raise UsageError(
            "The tokenizer has no token for padding.",
            cure="Set tokenizer.pad_token = tokenizer.eos_token; padding is masked, so any token will do.",
        )
    return pad


def tokenized_pairs(
    texts: Sequence[TextPair],
    tokenizer: PreTrainedTokenizerBase,
    *,
    context: int,
    template: Template | Literal["chat"] = PLAIN,
    too_long: TooLong = "refuse",
) -> list[Pair]:
    """Turn pairs of text into token ids."""
    chosen = [(text.prompt, text.chosen) for text in texts]
    rejected = [(text.prompt, text.rejected) for text in texts]
    errors = _row_errors(texts)
    sides = []
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        whole = _ids(side, texts, tokenizer, template, errors, name)
        sides.append(_fitted(whole, texts, context, too_long, errors, name))
    for text, first, second in zip(texts, *sides, strict=True):
        if first is not None and second is not None and first[1] == second[1]:
            errors.add(text.where, f"both answers are the same within the context of {context} tokens")
    _refuse(errors, too_long)
    return [Pair(a[0], a[1], b[1]) for a, b in zip(*sides, strict=True) if a is not None and b is not None]


def tokenized_examples(
    texts: Sequence[TextExample],
    tokenizer: PreTrainedTokenizerBase,
    *,
    context: int,
    template: Template | Literal["chat"] = PLAIN,
    too_long: TooLong = "refuse",
) -> list[Example]:
    """Turn prompts with responses into token ids."""
    errors = _row_errors(texts)
    whole = _ids([(text.prompt, text.response) for text in texts], texts, tokenizer, template, errors, "response")
    found = _fitted(whole, texts, context, too_long, errors, "response")
    _refuse(errors, too_long)
    return [Example(*ids) for ids in found if ids is not None]


Ids = tuple[tuple[int, ...], tuple[int, ...]]


def _ids(
    rows: list[tuple[Text, Text]],
    texts: Sequence[TextPair | TextExample],
    tokenizer: PreTrainedTokenizerBase,
    template: Template | Literal["chat"],
    errors: RowErrors,
    name: str,
) -> list[Ids | None]:
    """Tokenize prompts with answers; None where a row cannot be used."""
    padding_of(tokenizer)
    rendered = [_rendered(prompt, answer, tokenizer, template) for prompt, answer in rows]
    prompts = _tokens([prompt for prompt, _, _ in rendered], tokenizer)
    joint = _tokens([prompt + (answer or "") for prompt, answer, _ in rendered], tokenizer)
    alone = _tokens([answer or "" for _, answer, _ in rendered], tokenizer)
    begins, ends = _beginning(tokenizer), _end(tokenizer, rendered)
    found: list[Ids | None] = []
    for text, (_, answer, chat), prompt, both, separate in zip(texts, rendered, prompts, joint, alone, strict=True):
        follows = both[len(prompt) :] if both[: len(prompt)] == prompt else separate
        if answer is None:
            errors.add(text.where, f"the chat template renders the prompt otherwise when {name} follows")
        elif not follows:
            errors.add(text.where, f"{name} has no token")
        whole = (tuple(prompt), tuple(follows)) if chat else ((*begins, *prompt), (*follows, *ends))
        found.append(None if answer is None or not follows else whole)
    return found


def _rendered(
    prompt: Text, answer: Text, tokenizer: PreTrainedTokenizerBase, template: Template | Literal["chat"]
) -> tuple[str, str | None, bool]:
    """Return prompt and answer as text, and whether by a chat template; None for an answer that changes its prompt."""
    if isinstance(prompt, str) and isinstance(answer, str):
        if template != "chat":
            return *template.filled(prompt, answer), False
        prompt = ({"role": "user", "content": prompt},)
        answer = ({"role": "assistant", "content": answer},)
    if isinstance(prompt, str) or isinstance(answer, str):
        raise UsageError("A prompt is plain text and its answer a conversation, or the other way round.")
    if not tokenizer.chat_template:
        raise UsageError(
            "The tokenizer has no chat template, which conversations need.",
            cure="Use the tokenizer of a chat model, set tokenizer.chat_template, or give plain text.",
        )
    before = str(tokenizer.apply_chat_template(_messages(prompt), tokenize=False, add_generation_prompt=True))
    whole = str(tokenizer.apply_chat_template(_messages(prompt + answer), tokenize=False))
    return before, whole[len(before) :] if whole.startswith(before) else None, True


def _messages(text: tuple[Mapping[str, str], ...]) -> list[dict[str, str]]:
    return [dict(message) for message in text]


def _tokens(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Tokenize without special tokens, except those that the text spells out."""
    if not texts:
        return []
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token with which the tokenizer begins a text, if it does."""
    own: list[int] = tokenizer("")["input_ids"]
    return own[:1] if own and own[0] == tokenizer.bos_token_id else []


def _end(tokenizer: PreTrainedTokenizerBase, rendered: list[tuple[str, str | None, bool]]) -> list[int]:
    """Return the end of a plain answer; a chat template has one of its own."""
    if all(chat for _, _, chat in rendered):
        return []
    end = tokenizer.eos_token_id
    if not isinstance(end, int):
        raise UsageError(
            "The tokenizer has no end of sequence, so a model could not learn to stop.",
            cure="Set tokenizer.eos_token to the token with which the model ends an answer.",
        )
    return [end]


def _fitted(
    found: list[Ids | None],
    texts: Sequence[TextPair | TextExample],
    context: int,
    too_long: TooLong,
    errors: RowErrors,
    name: str,
) -> list[Ids | None]:
    """Cut answers to the context, or note those that are too long."""
    fitted: list[Ids | None] = []
    for text, ids in zip(texts, found, strict=True):
        if ids is not None and len(ids[0]) >= context:
            errors.add(text.where, f"its prompt of {len(ids[0])} tokens fills the context of {context}")
        elif ids is not None and len(ids[0]) + len(ids[1]) > context:
            if too_long == "refuse":
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


def _refuse(errors: RowErrors, too_long: TooLong) -> None:
    cut = ', or cut answers with too_long="cut"' if too_long == "refuse" else ""
    errors.refuse(f"Correct these rows or take them out, use a larger context{cut}.")


def load_pairs(
    source: str | Path | Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    context: int,
    columns: Mapping[str, str] | None = None,
    template: Template | Literal["chat"] = PLAIN,
    too_long: TooLong = "refuse",
) -> list[Pair]:
    """Read rows with prompt, chosen and rejected, as token ids."""
    texts = text_pairs(source, columns=columns)
    return tokenized_pairs(texts, tokenizer, context=context, template=template, too_long=too_long)


def load_examples(
    source: str | Path | Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    context: int,
    columns: Mapping[str, str] | None = None,
    template: Template | Literal["chat"] = PLAIN,
    too_long: TooLong = "refuse",
) -> list[Example]:
    """Read rows with prompt and response, as token ids."""
    texts = text_examples(source, columns=columns)
    return tokenized_examples(texts, tokenizer, context=context, template=template, too_long=too_long)


_PARTS = ("prompt", "chosen", "rejected")


def any_pairs(
    rows: Iterable[Pair | Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    context: int = 1 << 30,
) -> list[Pair]:
    """Take rows of a data set for pairs: of token ids as they are, of text, as TRL has it, by a tokenizer."""
    rows = list(rows)
    if all(isinstance(row, Pair) for row in rows):
        return rows  # type: ignore[return-value]
    texts = [row for row in rows if isinstance(row, Mapping) and _is_text(row.get("chosen"))]
    if tokenizer is not None and texts:
        return load_pairs(rows, tokenizer, context=context)
    return [row if isinstance(row, Pair) else _of_ids(row) for row in rows]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list | tuple) and any(isinstance(each, Mapping) for each in value)
    )


def _of_ids(row: Mapping[str, Any]) -> Pair:
    missing = [name for name in _PARTS if name not in row]
    if missing:
        raise UsageError(f"A row lacks {', '.join(missing)}.", cure="Rows hold prompt, chosen and rejected.")
    tokens = [value.tolist() if hasattr(value := row[name], "tolist") else value for name in _PARTS]
    for name, value in zip(_PARTS, tokens, strict=True):
        if isinstance(value, str) or not all(isinstance(token, int) for token in value):
            raise UsageError(f"{name!r} of a row holds no token ids.", cure="Tokenize it, or pass a tokenizer.")
    return Pair(*map(tuple, tokens))
