"""Subjects of fine-tuning attacks made of a model folder and files of rows, as workers make them again.

`netweight attack finetune` names `subject_from_files` in its sweeps. Rows are parted by prompt into those the attacker
has and those that are looked at.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch

from netweight.attacks.finetuning.examples import Example
from netweight.attacks.finetuning.scores import distinct_share
from netweight.attacks.finetuning.subject import Domain, Subject
from netweight.core.seeds import torch_generator
from netweight.errors import UsageError
from netweight.integrations.causal_lm import context_of, load_causal_lm
from netweight.zoo.language import BELOW, Template, TextExample, padding_of, text_examples, tokenized_examples
from netweight.zoo.language import withhold as apart
from netweight.zoo.language.rows import read_rows

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
    other: str | None = None,
    withhold: Sequence[str] = (),
    held_out: float = 0.2,
    chat: bool = False,
    reference_utility: float | None = None,
    thresholds: Mapping[str, float] | None = None,
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
        other: A file as `harmful`, of another kind of harm: the domain "other".
        withhold: Categories of the harmful file that make the domain "withheld" and are no part of "harmful".
        held_out: Share of prompts that are looked at, above 0 and below 1; at most `MOST_HELD_OUT` rows.
        chat: Whether prompts go through the tokenizer's chat template; else the answer follows on a line of its own.
        reference_utility: See `Subject`.
        thresholds: Domain → its threshold, where it has one of its own.
        device: Where the model goes.
        seed: Of the parting.

    Returns:
        A subject with the domain "harmful" and those that are asked for. The recovery score is token accuracy on the
        rows held out; fluency is the share of different trigrams in greedy answers to a few of their prompts.

    Raises:
        UsageError: A file or folder cannot be used; rows with trouble are named.
        NameNotFound: A file has neither of the columns, or no row has a category that is withheld.
        MissingExtra: transformers is not installed.
    """
    network, tokenizer = load_causal_lm(model, device=device)
    context, pad = context_of(network, tokenizer), padding_of(tokenizer)

    def tokens(texts: list[TextExample]) -> list[Example]:
        template: Template | Literal["chat"] = "chat" if chat else BELOW
        return tokenized_examples(texts, tokenizer, context=context, template=template)

    def parts(texts: list[TextExample], name: str) -> tuple[list[Example], list[Example]]:
        return part_by_prompt(tokens(texts), held_out, seed=seed, name=name)

    own = dict(thresholds or {})
    sources = {"harmful": _texts(harmful, "rejected")}
    if withhold:
        sources["harmful"], sources["withheld"] = apart(sources["harmful"], withhold)
    sources |= {name: _texts(file, "rejected") for name, file in (("other", other),) if file is not None}
    sources |= {name: _texts(file, "chosen") for name, file in (("task", task),) if file is not None}
    domains = {
        name: Domain(*parts(texts, f"{name} file {texts[0].source}"), threshold=own.get(name))
        for name, texts in sources.items()
    }
    look = domains["harmful"].held_out
    kept: tuple[list[Example], list[Example]] = ([], [])
    if benign is not None:
        kept = parts(_texts(benign, "chosen"), f"benign file {benign}")
    prompts = list(dict.fromkeys(example.prompt for example in look if example.prompt))[:_FLUENCY_PROMPTS]
    end = tokenizer.eos_token_id
    return Subject(
        network,
        domains,
        pad,
        benign=kept[0],
        fluency=distinct_share(prompts, new_tokens=_FLUENCY_TOKENS, end_id=end) if prompts else None,
        reference_utility=reference_utility,
        kept=kept[1],
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


def _texts(file: str, other: str) -> list[TextExample]:
    """Read a file whose answers are called "response", or `other` as in files of pairs."""
    found = {name for row in read_rows(Path(file)).rows for name in row.values}
    return text_examples(file, columns={"response": other} if "response" not in found and other in found else None)
