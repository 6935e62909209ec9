"""Generate answers of language models: greedy, in batches, with a key-value cache, up to any of their ends.

A cache and padding are means to be fast, and must not change an answer. The code of some families in transformers does
change it: positions are counted otherwise with a cache, a window of the configuration cuts the cache and not the
attention, or a recurrent state sees padding. So the logits of two rows of a batch are compared with those without a
cache and padding, unless a row with as many tokens and one with as much padding were compared before. If they differ
by more than rounding, the model generates without padding, or else without a cache.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from netweight.data.chat import ChatTemplate
from netweight.errors import UsageError
from netweight.hf.compare_logits import alike
from netweight.nn.hooks import evaluating

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The most tokens of the prompts of a batch, padding included. Their cache must fit into memory.
_BATCH_TOKENS = 8192
_BATCH_ROWS = 64
# Families whose code in transformers mixes the rows of a batch as soon as a cache is used.
_ALONE = ("rwkv",)
# Families whose attention has chunks or positions that padding shifts.
_SEES_PADDING = ("reformer", "xlnet")
# Layers that a mask hides padding from.
_PADDED = ("full_attention", "sliding_attention", "chunked_attention")


@final
@dataclass(frozen=True)
class _Way:
    """A way to generate."""

    cached: bool
    """True to keep keys and values of earlier tokens."""
    padded: bool
    """True to put prompts of several lengths into a batch."""


_WAYS = (_Way(cached=True, padded=True), _Way(cached=True, padded=False), _Way(cached=False, padded=False))


@final
@dataclass
class _Comparisons:
    """Results of earlier comparisons of a model's logits with those without a cache and padding."""

    first: int = 0
    """Place in `_WAYS` of the first way that has not been found to change answers."""
    most_tokens: int = 0
    """Tokens of the longest row that was the same, its answer included."""
    most_padding: int = 0
    """Padding of the row with most padding that was the same."""

    def cover(self, tokens: int, padding: int) -> bool:
        """Return whether rows with as many tokens and as much padding were compared."""
        return tokens <= self.most_tokens and padding <= self.most_padding

    def add(self, tokens: int, padding: int) -> None:
        """Add a row that was the same."""
        self.most_tokens, self.most_padding = max(tokens, self.most_tokens), max(padding, self.most_padding)

    def drop(self, way: int) -> None:
        """Drop a way that changes answers; what was compared with it says nothing about the next one."""
        self.first, self.most_tokens, self.most_padding = way + 1, 0, 0


_compared: WeakKeyDictionary[nn.Module, _Comparisons] = WeakKeyDictionary()


def end_tokens(model: nn.Module, tokenizer: PreTrainedTokenizerBase | None = None) -> tuple[int, ...]:
    """Return every token that ends an answer: of `generation_config`, of the tokenizer, and of the chat template.

    Args:
        model: A model of transformers; others have no `generation_config`.
        tokenizer: The model's tokenizer.

    Returns:
        Token ids in ascending order; empty where nothing ends an answer.
    """
    tokens: set[int] = set()
    for config in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        ends = getattr(config, "eos_token_id", None)
        tokens |= {ends} if isinstance(ends, int) else {each for each in ends or () if isinstance(each, int)}
    if tokenizer is not None:
        if isinstance(tokenizer.eos_token_id, int):
            tokens.add(tokenizer.eos_token_id)
        if tokenizer.chat_template:
            text = ChatTemplate(tokenizer).end_of_turn()
            ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"] if text.strip() else []
            special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
            tokens |= {ids[0]} if ids and ids[0] in special else set()
    return tuple(sorted(tokens))


def generate_answers(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    ends: Sequence[int] = (),
    pad_id: int | None = None,
) -> list[list[int]]:
    """Generate the most likely token again and again.

    Models of transformers generate in batches padded on the left, with a key-value cache; models with recurrent layers,
    which see padding, in batches of one length. Models whose answers a cache changes, and other modules, called as
    `model(input_ids=..., attention_mask=...)`, generate without a cache. Hooks on the model act in all of these ways.

    Args:
        model: A causal language model.
        prompts: Token ids of each prompt; none may be empty.
        new_tokens: Most tokens of an answer.
        ends: Tokens that end an answer.
        pad_id: The token that fills shorter prompts; any token of the vocabulary will do, as it is masked.

    Returns:
        Token ids of each answer, without the end.

    Raises:
        UsageError: A prompt is empty.
    """
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise UsageError(f"Prompt {row} is empty, so there is nothing to generate from.")
    stops = sorted(set(ends))
    own = hasattr(model, "generate") and hasattr(model, "generation_config")
    compared = _compared.setdefault(model, _Comparisons())
    first = max(compared.first, 2 if not own else 0 if hides_padding(model) else 1)
    with evaluating(model):
        for number, way in enumerate(_WAYS[first:], start=first):
            answers = _by(way, model, prompts, new_tokens, stops, pad_id, compared)
            if answers is not None:
                return answers
            compared.drop(number)
            if not _WAYS[number + 1].cached:
                warnings.warn(
                    f"{type(model).__name__} answers otherwise with a key-value cache than without one, so it "
                    "generates without a cache, which is slower.",
                    stacklevel=2,
                )
    raise AssertionError("Generating without a cache is the last way and gives answers.")


def _by(
    way: _Way,
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    stops: list[int],
    pad_id: int | None,
    compared: _Comparisons,
) -> list[list[int]] | None:
    """Generate in one way, and add what is the same to `compared`; None if the way changes an answer."""
    answers: list[list[int]] = [[] for _ in prompts]
    alone = way.cached and getattr(getattr(model, "config", None), "model_type", None) in _ALONE
    for rows in _batches(prompts, padded=way.padded, most_rows=1 if alone else _BATCH_ROWS):
        batch = [prompts[row] for row in rows]
        # The first row of a batch is the longest, which shows windows, and the last one has the most padding.
        seen = _Logits((0, len(rows) - 1)) if way.cached else None
        if seen is None:
            made = _without_cache(model, batch, new_tokens, stops)
        else:
            made = _with_cache(model, batch, new_tokens, stops, pad_id, seen)
        for row, tokens in zip(rows, made, strict=True):
            stop = next((place for place, token in enumerate(tokens) if token in stops), len(tokens))
            answers[row] = tokens[:stop]
        if seen is not None:
            for place, logits in seen.by_row().items():
                with_end = made[place][: len(answers[rows[place]]) + 1]
                length, padding = len(batch[place]) + len(with_end), len(batch[0]) - len(batch[place])
                if compared.cover(length, padding):
                    continue
                if not _as_without_cache(model, batch[place], with_end, logits):
                    return None
                compared.add(length, padding)
    return answers


@final
class _Logits:
    """Records the logits of some rows of a batch at each step; in transformers, a processor of logits.

    Args:
        rows: Places of the rows.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        self._rows = sorted(set(rows))
        self._steps: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Record, and change nothing."""
        self._steps.append(scores[self._rows].clone())
        return scores

    def by_row(self) -> dict[int, Tensor]:
        """Return the logits of each row, of shape `(steps, V)`."""
        return {row: torch.stack([step[place] for step in self._steps]) for place, row in enumerate(self._rows)}


def _as_without_cache(model: Any, prompt: Sequence[int], answer: Sequence[int], logits: Tensor) -> bool:
    """Return whether an answer's logits, of shape `(steps, V)`, are those without a cache and padding."""
    ids = torch.tensor([[*prompt, *answer[:-1]]], device=logits.device)
    output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, logits_to_keep=len(answer))
    return alike(output.logits[0, -len(answer) :], logits[: len(answer)])


def _batches(prompts: Sequence[Sequence[int]], *, padded: bool, most_rows: int) -> Iterator[list[int]]:
    """Yield rows of like length, the longest first, so that what does not fit into memory fails at once."""
    batch: list[int] = []
    for row in sorted(range(len(prompts)), key=lambda row: -len(prompts[row])):
        longest = len(prompts[batch[0]]) if batch else len(prompts[row])
        full = len(batch) == most_rows or (len(batch) + 1) * longest > _BATCH_TOKENS
        if batch and (full or (not padded and len(prompts[row]) != longest)):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def hides_padding(model: nn.Module) -> bool:
    """Return whether a mask hides padding from every layer, as attention does and recurrent layers do not."""
    config: Any = getattr(model, "config", None)
    of_text = getattr(config, "get_text_config", None)
    config = of_text() if callable(of_text) else config
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    if getattr(config, "model_type", None) in _SEES_PADDING:
        return False
    recurrent = getattr(model, "_is_stateful", False) or any(
        hasattr(config, name) for name in ("ssm_state_size", "state_size", "conv_kernel", "mamba_d_state")
    )
    return not recurrent and all(kind in _PADDED for kind in kinds)


def _with_cache(
    model: Any, prompts: Sequence[Sequence[int]], new_tokens: int, ends: list[int], pad_id: int | None, seen: _Logits
) -> list[list[int]]:
    from transformers import GenerationConfig, LogitsProcessorList

    length = max(map(len, prompts))
    device = next(model.parameters()).device
    pad = pad_id if pad_id is not None else ends[0] if ends else 0
    ids = torch.full((len(prompts), length), pad, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, length - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, length - len(prompt) :] = 1
    # The model's own generation_config may ask for sampling or penalties, which are not what is measured here.
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=new_tokens, do_sample=False, num_beams=1, use_cache=True, pad_token_id=pad,
        eos_token_id=ends or None, bos_token_id=None,
    )  # fmt: skip
    own, model.generation_config = model.generation_config, config
    try:
        made = model.generate(
            input_ids=ids.to(device), attention_mask=mask.to(device), generation_config=config,
            logits_processor=LogitsProcessorList([seen]),
        )  # fmt: skip
    finally:
        model.generation_config = own
    answers: list[list[int]] = made[:, length:].tolist()
    return answers


def _without_cache(
    model: nn.Module, prompts: Sequence[Sequence[int]], new_tokens: int, ends: list[int]
) -> list[list[int]]:
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    length = len(prompts[0])
    ids = torch.tensor([list(prompt) for prompt in prompts], device=device)
    stops = torch.tensor(ends, device=device)
    for _ in range(new_tokens):
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
        if ends and bool(torch.isin(ids[:, length:], stops).any(1).all()):
            break
    answers: list[list[int]] = ids[:, length:].tolist()
    return answers
