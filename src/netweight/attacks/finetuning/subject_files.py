"""A subject made of a model folder and files of rows; workers make it again by the name of `subject_from_files`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from netweight.attacks.finetuning.subject import Domain, Subject, distinct_share
from netweight.core.seeds import derive, torch_generator
from netweight.data.answers import normalized
from netweight.data.chat import note_on_unused_template
from netweight.data.rows import Report, read_rows
from netweight.data.text import TextExample, text_examples, visible_text
from netweight.data.text import withhold as apart
from netweight.data.text_options import TextOptions
from netweight.data.tokens import (
    BELOW,
    QUESTION_AND_ANSWER,
    AnyTemplate,
    Chat,
    Example,
    padding_of,
    rows_and_examples,
    tokenized_examples,
)
from netweight.errors import UsageError
from netweight.hf.generate_answers import end_tokens
from netweight.hf.load_language_model import (
    check_finite,
    check_outputs,
    check_tokens,
    context_of,
    load_causal_lm,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Rows that are evaluated, at most: each evaluation costs a forward pass over all of them.
MOST_HELD_OUT = 200
# With fewer rows, a report states that its scores are coarse.
_FEW_HELD_OUT = 5
_FLUENCY_PROMPTS, _FLUENCY_TOKENS = 8, 24
# Files of rows, and what their answers are called where they are pairs.
ANSWER_COLUMNS = {
    "harmful": "rejected", "other": "rejected", "never_learned": "rejected", "benign": "chosen", "task": "chosen"
}  # fmt: skip
_TEMPLATES: Mapping[str, AnyTemplate] = {"chat": "chat", "question": QUESTION_AND_ANSWER}


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
    reference_ability: float | None = None,
    thresholds: Mapping[str, float] | None = None,
    formats: bool = False,
    random_weights: bool = False,
    other_model: str | None = None,
    text: Mapping[str, Any] | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Subject:
    """Make a subject of a model folder and files of rows.

    Args:
        model: A folder of transformers.
        harmful: Rows that are attacked with, as `FolderAttack` takes them; the other sources likewise.
        benign: Rows of what is to be kept.
        task: Rows of a benign task.
        other: Rows of another kind of harm.
        withhold: Categories of harmful rows that become a domain of their own.
        held_out: Share of the prompts that is evaluated.
        chat: Whether plain rows go through the chat template; conversations always do.
        reference_ability: The base's ability.
        thresholds: Domain → score that counts as recovered.
        formats: Whether other prompt formats are domains, too.
        random_weights: Whether the model is made anew from its configuration.
        other_model: A folder of a model of this shape that the attacker has.
        text: How rows are read: the fields of `TextOptions`.
        device: Where the model goes.
        seed: Seed of the parts and of random weights.

    Returns:
        The subject; its `left_out` names the rows that were left out.

    Raises:
        UsageError: Files or rows cannot be used.
    """
    options, left_out = TextOptions.of(text or {}), list[str]()
    # Options of the chat template require the template as well.
    applied = chat or bool(options.template)
    network, tokenizer = load_causal_lm(model, device=device)
    check_finite(network)
    check_outputs(network)
    if random_weights:
        with torch.random.fork_rng():
            torch.manual_seed(derive(seed, "random weights"))
            kind: Any = type(network)
            network = kind(network.config).to(device=device, dtype=network.dtype).eval()
    context, pad = context_of(network, tokenizer), padding_of(tokenizer)

    alike: dict[tuple[int, ...], str] = {}

    def tokens(texts: list[TextExample]) -> list[Example]:
        template: AnyTemplate = Chat(options.template_options) if applied else BELOW
        rows = rows_and_examples(
            texts, tokenizer, context=context, template=template, **options.tokenizing(left_out.append)
        )
        examples = [example for _, example in rows]
        alike.update({example.prompt: normalized(visible_text(text.prompt)) for text, example in rows})
        check_tokens(network, tokenizer, (each.prompt + each.response for each in examples))
        return examples

    def read(source: str, name: str) -> list[TextExample]:
        return examples_of(source, ANSWER_COLUMNS[name], options, left_out.append)

    def part(examples: list[Example], name: str) -> tuple[list[Example], list[Example]]:
        train, evaluated = part_by_prompt(examples, held_out, seed=seed, name=name, alike=alike)
        if len(evaluated) < _FEW_HELD_OUT:
            left_out.append(
                f"Scores on the {name} are measured on {len(evaluated)} held-out rows alone. They are coarse: give "
                "more rows."
            )
        return train, evaluated

    sources = {"harmful": read(harmful, "harmful")}
    if withhold:
        sources["harmful"], sources["withheld"] = apart(sources["harmful"], withhold)
    if other is not None:
        sources["other"] = read(other, "other")
    if task is not None:
        sources["task"] = read(task, "task")
    # A search tries the template by itself.
    through = applied or formats
    if unused := note_on_unused_template(tokenizer, [text.prompt for text in sources["harmful"]], chat=through):
        left_out.append(unused)
    plain_rows = {name: tokens(texts) for name, texts in sources.items()}
    domains = {
        name: Domain(*part(plain_rows[name], f"{name} file {texts[0].source}"), threshold=(thresholds or {}).get(name))
        for name, texts in sources.items()
    }
    for name, template in _TEMPLATES.items() if formats and not applied else ():
        for domain, texts in sources.items():
            put = _reformatted(texts, plain_rows[domain], network, tokenizer, context, template)
            if put is not None:
                plain = domains[domain]
                own, evaluated = ([put[each] for each in rows] for rows in (plain.train, plain.held_out))
                domains[f"{domain}@{name}"] = replace(plain, train=own, held_out=evaluated)
    held = domains["harmful"].held_out
    parts: tuple[list[Example], list[Example]] = ([], [])
    if benign is not None:
        parts = part(tokens(read(benign, "benign")), f"benign file {benign}")
    prompts = list(dict.fromkeys(example.prompt for example in held if example.prompt))[:_FLUENCY_PROMPTS]
    ends = end_tokens(network, tokenizer)
    return Subject(
        network,
        domains,
        pad,
        benign=parts[0],
        fluency=distinct_share(prompts, new_tokens=_FLUENCY_TOKENS, ends=ends, pad_id=pad) if prompts else None,
        reference_ability=reference_ability,
        ordinary=parts[1],
        other=None if other_model is None else load_causal_lm(other_model, device=device)[0].state_dict(),
        left_out=tuple(left_out),
    )


def _reformatted(
    texts: list[TextExample],
    plain: list[Example],
    network: Any,
    tokenizer: PreTrainedTokenizerBase,
    context: int,
    template: AnyTemplate,
) -> dict[Example, Example] | None:
    """Each row as another template has it; None where the tokenizer has no such template, or rows do not fit it."""
    try:
        # What the tokenizer does not know was reported of the plain rows.
        formatted = tokenized_examples(texts, tokenizer, context=context, template=template, report=lambda text: None)
        check_tokens(network, tokenizer, (each.prompt + each.response for each in formatted))
    except UsageError:
        return None
    if len(formatted) != len(plain):
        return None
    unknown = {tokenizer.unk_token_id} - {token for each in plain for token in each.prompt}
    spoiled = any(token in unknown for each in formatted for token in each.prompt)
    return None if spoiled or formatted == plain else dict(zip(plain, formatted, strict=True))


def part_by_prompt(
    examples: Sequence[Example],
    share: float,
    *,
    seed: int,
    name: str = "the data",
    alike: Mapping[tuple[int, ...], Hashable] | None = None,
) -> tuple[list[Example], list[Example]]:
    """Part examples into those to train on and those to evaluate on; all with one prompt stay together.

    Args:
        examples: Examples with at least two different prompts.
        share: Share of the prompts that is evaluated.
        seed: Seed of the choice.
        name: What the examples are, for errors.
        alike: Prompt → a value that is the same for prompts that differ in nothing but case, spaces or marks, which
            must stay together, too. A prompt that is missing is alike none.

    Returns:
        Examples to train on, and examples to evaluate on.
    """
    if not 0 < share < 1:
        raise UsageError(f"The share held out must be above 0 and below 1, not {share}.")
    groups: dict[Hashable, list[int]] = {}
    for row, example in enumerate(examples):
        same = (alike or {}).get(example.prompt, example.prompt)
        groups.setdefault(same if example.prompt else (example.prompt, example.response), []).append(row)
    if len(groups) < 2:
        raise UsageError(
            f"All {len(examples)} rows of {name} have the same prompt for the model's tokenizer, so none could be held "
            "out of the attack.",
            cure="Give rows whose prompts differ in tokens; unknown words are all alike to a tokenizer.",
        )
    order = torch.randperm(len(groups), generator=torch_generator(seed, "held out")).tolist()
    count = min(max(1, round(share * len(groups))), len(groups) - 1)
    keys = list(groups)
    held: set[int] = set()
    for place in order[:count]:
        held.update(groups[keys[place]])
        if len(held) >= MOST_HELD_OUT:
            break
    return (
        [example for row, example in enumerate(examples) if row not in held],
        [example for row, example in enumerate(examples) if row in held],
    )


def examples_of(source: str, pairs: Any, options: TextOptions, report: Report) -> list[TextExample]:
    """Read prompts with responses; of preference data the chosen or the rejected answer."""
    rows = read_rows(source)
    return text_examples(rows, pairs=pairs, **options.reading(rows, report))
