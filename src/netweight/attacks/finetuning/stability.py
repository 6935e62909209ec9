"""Stability: what a defense costs before any attack. Each number compares a model with its base on the very same rows.

Rows are resampled in pairs for the intervals, so that a hard row is hard for both. Judges of harm, toxicity or fluency
are functions that users bring.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import torch
from torch import nn
from torch.nn import functional

from netweight.attacks.finetuning.examples import IGNORED, Example, collate
from netweight.attacks.finetuning.scores import Generate, Judge, evaluating
from netweight.errors import UsageError
from netweight.metrics.intervals import MINIMUM_FOR_BOOTSTRAP, Interval, bootstrap
from netweight.metrics.perplexity import Losses, compare, perplexity
from netweight.report.finding import Finding

__all__ = ["Judged", "Kept", "measure_kept", "stability_findings"]

Judges: TypeAlias = Mapping[str, Judge]


@final
@dataclass(frozen=True)
class Judged:
    """What a model is asked and who judges its answers.

    Attributes:
        generate: Answers of a model, one for each prompt.
        prompts: At least 5, of which nothing is trained on.
        judges: Name such as "harm" → a number for each answer.
    """

    generate: Generate
    prompts: Sequence[str]
    judges: Judges


@final
@dataclass(frozen=True)
class Kept:
    """How a model does on what is to be kept, row by row.

    Attributes:
        right: Response tokens that are the model's first choice.
        tokens: Response tokens.
        nats: Negative log-likelihood of the responses.
        judged: Name of a judge → its number for each answer.
    """

    right: tuple[int, ...]
    tokens: tuple[int, ...]
    nats: tuple[float, ...]
    judged: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


def measure_kept(
    model: nn.Module, examples: Sequence[Example], *, pad_id: int, judged: Judged | None = None, batch_size: int = 16
) -> Kept:
    """Measure a model, which stays as it is.

    Args:
        model: Called as `model(input_ids=..., attention_mask=...)`.
        examples: What is to be kept; at least one. Neither defense nor attack trains on them.
        pad_id: What fills the shorter ones.
        judged: What it is asked besides, and by whom that is judged.
        batch_size: Examples per forward pass.

    Raises:
        UsageError: There is no example, or a judge does not give one number per answer.
    """
    if not examples:
        raise UsageError("Stability needs at least one example of what is to be kept.")
    right: list[int] = []
    tokens: list[int] = []
    nats: list[float] = []
    device = next(model.parameters()).device
    with evaluating(model):
        for first in range(0, len(examples), batch_size):
            batch = collate(examples[first : first + batch_size], pad_id=pad_id).to(device)
            logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits[:, :-1]
            labels = batch.labels[:, 1:]
            losses = functional.cross_entropy(
                logits.transpose(1, 2).float(), labels, ignore_index=IGNORED, reduction="none"
            )
            right += (logits.argmax(-1) == labels).sum(1).tolist()
            tokens += (labels != IGNORED).sum(1).tolist()
            nats += losses.sum(1).tolist()
        verdicts = {} if judged is None else _verdicts(model, judged)
    return Kept(tuple(right), tuple(tokens), tuple(nats), verdicts)


def _verdicts(model: nn.Module, judged: Judged) -> dict[str, tuple[float, ...]]:
    answers = judged.generate(model, list(judged.prompts))
    found = {}
    for name, judge in judged.judges.items():
        numbers = torch.as_tensor(judge(answers))
        if numbers.shape != (len(judged.prompts),) or len(answers) != len(judged.prompts):
            raise UsageError(
                f"The judge {name!r} gave numbers of shape {tuple(numbers.shape)} for {len(judged.prompts)} prompts.",
                cure="Return one answer for each prompt, and one number for each answer.",
            )
        found[name] = tuple(numbers.double().tolist())
    return found


def stability_findings(name: str, before: Kept, after: Kept, *, least_kept: float = 0.98, seed: int) -> list[Finding]:
    """Compare a defended model with its base.

    Args:
        name: What reports call the defended one.
        before: The model before its defense.
        after: The same after it, on the same rows.
        least_kept: Least share of the base's token accuracy.
        seed: Of the bootstraps.

    Returns:
        Kept ability as a share of the base's, perplexity with the base's beside it, their ratio, and for each judge the
        mean of its numbers.

    Raises:
        UsageError: The rows or the judges are not the same.
        MissingExtra: scipy is not installed.
    """
    if before.tokens != after.tokens or before.judged.keys() != after.judged.keys():
        raise UsageError("Stability is a comparison on the same rows by the same judges.", cure="Measure both alike.")
    return [
        _ability(name, before, after, least_kept, seed),
        *_perplexity(name, before, after, seed),
        *(_judged(name, judge, before.judged[judge], after.judged[judge], seed) for judge in before.judged),
    ]


def _ability(name: str, before: Kept, after: Kept, least: float, seed: int) -> Finding:
    title = f"kept ability, {name}"
    if not sum(before.right):
        return Finding(title, None, better="higher", target=least, detail={"reason": "the base gets no token right"})

    found = _ratio_over_rows(after.right, before.right, seed)
    return _finding(title, found, seed, better="higher", target=least, detail={
        "what": "token accuracy on rows to keep, as a share of the base's",
        "token accuracy": sum(after.right) / sum(after.tokens),
        "of the base": sum(before.right) / sum(before.tokens),
    })  # fmt: skip


def _perplexity(name: str, before: Kept, after: Kept, seed: int) -> list[Finding]:
    losses = [Losses(look.nats, look.tokens) for look in (before, after)]
    if len(before.tokens) < MINIMUM_FOR_BOOTSTRAP:
        ratio = math.exp(losses[1].mean - losses[0].mean)
        few = {"reason": f"no interval: {len(before.tokens)} rows are fewer than {MINIMUM_FOR_BOOTSTRAP}"}
        return [Finding(f"perplexity by the base's, {name}", ratio, unit="×", better="lower", detail=few)]
    base, own = (perplexity(one, seed=seed) for one in losses)
    return [
        _finding(f"perplexity, {name}", own, seed, better="lower", baseline=base.estimate, unit="per token"),
        _finding(f"perplexity by the base's, {name}", compare(losses[1], losses[0], seed=seed), seed,
                 better="lower", unit="×"),
    ]  # fmt: skip


def _judged(name: str, judge: str, before: Sequence[float], after: Sequence[float], seed: int) -> Finding:
    ones = [1.0] * len(after)
    found = _ratio_over_rows(after, ones, seed)
    gap = _ratio_over_rows([a - b for a, b in zip(after, before, strict=True)], ones, seed)
    return _finding(f"{judge} by its judge, {name}", found, seed, baseline=sum(before) / len(before), detail={
        "after less before, same prompts": [gap.estimate, gap.low, gap.high],
    })  # fmt: skip


def _ratio_over_rows(top: Sequence[float], bottom: Sequence[float], seed: int) -> Interval:
    """A ratio of sums with its interval over resampled rows; no interval for fewer than five."""
    import numpy as np

    tops, bottoms, count = np.asarray(top, np.float64), np.asarray(bottom, np.float64), len(top)
    if count < MINIMUM_FOR_BOOTSTRAP:
        few = f"no interval: {count} rows are fewer than {MINIMUM_FOR_BOOTSTRAP}"
        return Interval(float(tops.sum() / bottoms.sum()), math.nan, math.nan, count, 0.95, few)

    def ratio(rows: Any, axis: int = -1) -> Any:
        chosen = rows.astype(np.int64)
        with np.errstate(divide="ignore", invalid="ignore"):  # a resample may hold no row that the base gets right
            return tops[chosen].sum(axis) / bottoms[chosen].sum(axis)

    return bootstrap(np.arange(count, dtype=np.float64), ratio, seed=seed, resamples=1999, method="percentile")


def _finding(title: str, found: Interval, seed: int, **more: Any) -> Finding:
    detail = {**more.pop("detail", {}), "method": found.method}
    ends = None if math.isnan(found.low) else found.ci95
    return Finding(title, found.estimate, ci95=ends, n=found.n, seeds=(seed,), detail=detail, **more)
