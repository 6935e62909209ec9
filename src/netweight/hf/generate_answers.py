"""Generate answers of language models: greedy, in batches, with a key-value cache, up to any of their ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from netweight.data.chat import ChatTemplate
from netweight.errors import UsageError
from netweight.nn.hooks import evaluating

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The most tokens of the prompts of a batch, padding included. Their cache must fit into memory.
_BATCH_TOKENS = 8192
_BATCH_ROWS = 64
_ALONE = ("rwkv",)  # families whose code in transformers mixes the rows of a batch as soon as a cache is used
_SEES_PADDING = ("reformer", "xlnet")  # families whose attention has chunks or positions that padding shifts
_PADDED = ("full_attention", "sliding_attention", "chunked_attention")  # layers that a mask hides padding from


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
    which see padding, in batches of one length. Other modules, called as `model(input_ids=..., attention_mask=...)`,
    generate without a cache. Hooks on the model act in both.

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
    answers: list[list[int]] = [[] for _ in prompts]
    cached = hasattr(model, "generate") and hasattr(model, "generation_config")
    generate = _with_cache if cached else _without_cache
    stops = set(ends)
    with evaluating(model):
        alone = getattr(getattr(model, "config", None), "model_type", None) in _ALONE
        for rows in _batches(prompts, padded=cached and hides_padding(model), most=1 if alone else _BATCH_ROWS):
            made = generate(model, [prompts[row] for row in rows], new_tokens, sorted(stops), pad_id)
            for row, tokens in zip(rows, made, strict=True):
                stop = next((place for place, token in enumerate(tokens) if token in stops), len(tokens))
                answers[row] = tokens[:stop]
    return answers


def _batches(prompts: Sequence[Sequence[int]], *, padded: bool, most: int) -> Iterator[list[int]]:
    """Yield rows of like length, the longest first, so that what does not fit into memory fails at once."""
    batch: list[int] = []
    for row in sorted(range(len(prompts)), key=lambda row: -len(prompts[row])):
        longest = len(prompts[batch[0]]) if batch else len(prompts[row])
        full = len(batch) == most or (len(batch) + 1) * longest > _BATCH_TOKENS
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
    model: Any, prompts: Sequence[Sequence[int]], new_tokens: int, ends: list[int], pad_id: int | None
) -> list[list[int]]:
    from transformers import GenerationConfig

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
        made = model.generate(input_ids=ids.to(device), attention_mask=mask.to(device), generation_config=config)
    finally:
        model.generation_config = own
    answers: list[list[int]] = made[:, length:].tolist()
    return answers


def _without_cache(
    model: nn.Module, prompts: Sequence[Sequence[int]], new_tokens: int, ends: list[int], pad_id: int | None
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
