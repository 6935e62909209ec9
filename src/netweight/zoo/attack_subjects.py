"""Subjects of fine-tuning attacks made of a model folder and files of rows, as workers make them again.

`netweight attack finetune` names `subject_from_files` in its sweeps. Rows are parted by prompt into those the attacker
has and those that are looked at.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from netweight.attacks.finetuning.examples import Example
from netweight.attacks.finetuning.scores import distinct_share, token_accuracy
from netweight.attacks.finetuning.subject import Domain, Subject
from netweight.core.seeds import torch_generator
from netweight.errors import UsageError
from netweight.integrations.causal_lm import context_of, load_causal_lm
from netweight.zoo.language import BELOW, Template, padding_of, text_examples, tokenized_examples
from netweight.zoo.language.rows import read_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["MOST_HELD_OUT", "part_by_prompt", "subject_from_files"]

MOST_HELD_OUT = 200
"""Rows that are looked at, at most: each look costs a forward pass over all of them."""
_FLUENCY_PROMPTS, _FLUENCY_TOKENS = 8, 24


def subject_from_files(
    model: str,
    harmful: str,
    *,
    benign: str | None = None,
    task: str | None = None,
    held_out: float = 0.2,
    chat: bool = False,
    reference_utility: float | None = None,
    task_threshold: float | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Subject:
    """Make a subject of a model folder.

    Args:
        model: A folder that `load_causal_lm` opens.
        harmful: A file with columns "prompt" and "response", or "prompt" and "rejected": the domain "harmful".
        benign: A file with "prompt" and "response", or "prompt" and "chosen": what the model is to keep. The part that
            is looked at makes the utility, the other part begins benign-then-harmful attacks.
        task: A file likewise: a benign task that the model has to learn, the domain "task".
        held_out: Share of prompts that are looked at, above 0 and below 1; at most `MOST_HELD_OUT` rows.
        chat: Whether prompts go through the tokenizer's chat template; else the answer follows on a line of its own.
        reference_utility: See `Subject`.
        task_threshold: Threshold of the domain "task".
        device: Where the model goes.
        seed: Of the parting.

    Returns:
        A subject with domains "harmful" and, if there is a file, "task". The recovery score is token accuracy on the
        rows held out; fluency is the share of different trigrams in greedy answers to a few of their prompts.

    Raises:
        UsageError: A file or folder cannot be used; rows with trouble are named.
        NameNotFound: A file has neither of the columns.
        MissingExtra: transformers is not installed.
    """
    network, tokenizer = load_causal_lm(model, device=device)
    context, pad = context_of(network, tokenizer), padding_of(tokenizer)

    def parts(file: str, other: str, name: str) -> tuple[list[Example], list[Example]]:
        examples = _examples(file, other, tokenizer, context, chat)
        return part_by_prompt(examples, held_out, seed=seed, name=f"{name} file {file}")

    train, look = parts(harmful, "rejected", "harmful")
    domains = {"harmful": Domain(train, look)}
    if task is not None:
        domains["task"] = Domain(*parts(task, "chosen", "task"), threshold=task_threshold)
    kept: tuple[list[Example], list[Example]] = ([], [])
    if benign is not None:
        kept = parts(benign, "chosen", "benign")
    prompts = list(dict.fromkeys(example.prompt for example in look if example.prompt))[:_FLUENCY_PROMPTS]
    end = tokenizer.eos_token_id
    return Subject(
        network,
        domains,
        pad,
        benign=kept[0],
        utility=token_accuracy(kept[1], pad_id=pad) if kept[1] else None,
        fluency=distinct_share(prompts, new_tokens=_FLUENCY_TOKENS, end_id=end) if prompts else None,
        reference_utility=reference_utility,
    )


def part_by_prompt(
    examples: Sequence[Example], share: float, *, seed: int, name: str = "the data"
) -> tuple[list[Example], list[Example]]:
    """Part examples into those to train on and those to look at; all with one prompt stay together.

    Args:
        examples: Examples.
        share: Share of different prompts to look at, above 0 and below 1; at least one, at most `MOST_HELD_OUT` rows.
        seed: Of the choice.
        name: For messages.

    Returns:
        Both parts, each in the order of `examples`.

    Raises:
        UsageError: There are fewer than two different prompts, or the share leaves nothing.
    """
    if not 0 < share < 1:
        raise UsageError(f"The share held out must be above 0 and below 1, not {share}.")
    groups: dict[Hashable, list[int]] = {}
    for row, example in enumerate(examples):
        groups.setdefault(example.prompt or (example.prompt, example.response), []).append(row)
    if len(groups) < 2:
        raise UsageError(
            f"The {name} has one prompt, so nothing could be held out of the attack.", cure="Bring more rows."
        )
    order = torch.randperm(len(groups), generator=torch_generator(seed, "held out")).tolist()
    wanted = min(max(1, round(share * len(groups))), len(groups) - 1)
    keys = list(groups)
    looked: set[int] = set()
    for place in order[:wanted]:
        looked.update(groups[keys[place]])
        if len(looked) >= MOST_HELD_OUT:
            break
    return (
        [example for row, example in enumerate(examples) if row not in looked],
        [example for row, example in enumerate(examples) if row in looked],
    )


def _examples(file: str, other: str, tokenizer: PreTrainedTokenizerBase, context: int, chat: bool) -> list[Example]:
    """Read a file whose answers are called "response", or `other` as in files of pairs."""
    found = {name for row in read_rows(Path(file)).rows for name in row.values}
    columns = {"response": other} if "response" not in found and other in found else None
    template: Template | Literal["chat"] = "chat" if chat else BELOW
    return tokenized_examples(text_examples(file, columns=columns), tokenizer, context=context, template=template)
