"""One side of a loss goes backward: gradient norms term by term without room for them, and balanced weights.

Used by `training.py`.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from netweight.data.examples import IGNORED, Batch
from netweight.errors import Unsupported, UsageError
from netweight.methods.immunize.decoder import Structure, structure_of
from netweight.methods.immunize.defense import PairBatch, Side, Term
from netweight.methods.immunize.distributed import ALONE, Ranks, is_sharded, trained_weights, units
from netweight.methods.immunize.lens import Targets, answer_loss, mean_lens_loss, sampled_layers
from netweight.methods.immunize.mmd import biased_mmd, random_rows, scaled_noise, unbiased_mmd
from netweight.methods.immunize.precomputed_gradient import gradient_norm
from netweight.methods.immunize.settings import RepNoiseConfig
from netweight.nn.hooks import capture


@final
@dataclass(frozen=True)
class TermLog:
    """What a term was at one step."""

    value: float  # its value, without weight
    weight: float  # what it was multiplied by
    # Norm of its gradient by all trained weights, without weight; None where it was not measured.
    norm: float | None = None


@contextmanager
def _measured(parameters: Sequence[nn.Parameter], *, keep: bool) -> Iterator[list[Tensor]]:
    """Sum the squares of each gradient as it arrives; without `keep` nothing of it is added to `grad`."""
    squares: list[Tensor] = []

    def hook(grad: Tensor) -> Tensor | None:
        squares.append(grad.detach().float().square().sum())
        return None if keep else torch.zeros_like(grad)

    handles = [parameter.register_hook(hook) for parameter in parameters]  # type: ignore[no-untyped-call]
    try:
        yield squares
    finally:
        for handle in handles:
            handle.remove()


def _norm(value: Tensor, parameters: Sequence[nn.Parameter], ranks: Ranks, *, keep: bool) -> float:
    if ranks.size > 1 or any(map(is_sharded, parameters)):  # hooks see gradients before they are averaged, or nothing
        norm = gradient_norm(value, parameters, ranks)
        if keep:
            value.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        return norm
    with _measured(parameters, keep=keep) as squares:
        value.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def backward(
    side: Side,
    parameters: Sequence[nn.Parameter],
    weights: MutableMapping[str, float],
    *,
    measure: bool,
    ranks: Ranks = ALONE,
) -> dict[str, TermLog]:
    """Add the gradients of a side's terms to `grad`."""
    # Where processes share the batch, values and norms are those of the whole batch, and what is measured needs room
    # for one more gradient.
    unknown = any(term.share is not None and name not in weights for name, term in side.items())
    if measure or unknown:
        return _one_by_one(side, parameters, weights, ranks)
    used = {name: term.weight if term.share is None else weights[name] for name, term in side.items()}
    total = torch.stack([used[name] * term.value for name, term in side.items()]).sum()
    total.backward()  # type: ignore[no-untyped-call]
    values = _values(side, ranks)
    return {name: TermLog(values[name], used[name]) for name in side}


def _values(side: Side, ranks: Ranks) -> dict[str, float]:
    """The terms of the whole batch."""
    values = [term.value.detach().item() for term in side.values()]
    if ranks.size > 1:
        values = ranks.mean(torch.tensor(values, dtype=torch.float64)).tolist()
    return dict(zip(side, values, strict=True))


def _one_by_one(
    side: Side, parameters: Sequence[nn.Parameter], weights: MutableMapping[str, float], ranks: Ranks
) -> dict[str, TermLog]:
    logs: dict[str, TermLog] = {}
    values = _values(side, ranks)
    pull = 0.0
    for name, term in side.items():
        if term.share is None:
            weighted = _norm(term.weight * term.value, parameters, ranks, keep=True)
            norm = weighted / abs(term.weight) if term.weight else 0.0
            logs[name] = TermLog(values[name], term.weight, norm)
            pull += weighted
    for name, term in side.items():
        if term.share is not None:
            norm = _norm(term.value, parameters, ranks, keep=False)
            weight = 0.0
            if (
                0 < norm < math.inf and pull < math.inf
            ):  # else there is nothing to balance by; the next step tries again
                found = term.share * pull / norm
                weight = weights[name] = min(found, weights.get(name, found))
            (weight * term.value).backward(retain_graph=True)  # type: ignore[no-untyped-call]
            logs[name] = TermLog(values[name], weight, norm)
    return {name: logs[name] for name in side}


@final
@dataclass(frozen=True)
class LossParts:
    """The terms of the loss, each a scalar in the graph."""

    retain: Tensor  # cross-entropy of the harmless answers; a scalar
    noise: Tensor  # discrepancy between the feed-forward outputs on harmful answers and noise, the mean over layers
    ascent: Tensor  # `log(1 + A)`, which is to grow; a scalar
    alpha: float  # weight of the ascent
    noise_weight: float

    @property
    def total(self) -> Tensor:
        """What is to be minimized."""
        return self.retain + self.noise_weight * self.noise - self.alpha * self.ascent


def repnoise_loss(
    model: nn.Module,
    batch: PairBatch,
    config: RepNoiseConfig = RepNoiseConfig(),
    *,
    generator: torch.Generator | None = None,
    noise_weight: float | None = None,
) -> LossParts:
    """Compute RepNoise's loss on a batch of pairs, both sides in one graph."""
    # `immunize` does the same one side after the other, in less memory. Where processes share the batch, values and
    # gradients are such that their means over the processes are those of the whole batch: see `ranks.py`.
    # Source: RepNoise (arXiv 2405.14577), algorithm 1, and the loss of its authors' code.
    parameters = trained_weights(model)
    retain = retain_term(model, batch, config)
    noise, ascent = harmful_terms(model, batch, config, generator=generator)
    if noise_weight is None:
        noise_weight = config.beta
        if config.fidelity == "corrected" and noise.requires_grad and config.beta > 0:
            pull = gradient_norm(noise, parameters, batch.ranks)
            noise_weight *= config.alpha * gradient_norm(ascent, parameters, batch.ranks) / pull if pull > 0 else 0.0
    return LossParts(retain, noise, ascent, config.alpha, noise_weight)


def retain_term(model: nn.Module, batch: PairBatch, config: RepNoiseConfig) -> Tensor:
    """Cross-entropy of the harmless answers."""
    side = batch.harmless
    targets = _targets(batch, side, config)
    return answer_loss(_run(model, side).logits, targets)


def harmful_terms(
    model: nn.Module, batch: PairBatch, config: RepNoiseConfig, *, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """The two terms on the harmful answers, from one forward pass: noise and `log(1 + A)`, without weights."""
    side, parts, ranks = batch.harmful, structure_of(model), batch.ranks
    reference = config.fidelity == "reference"
    targets = _targets(batch, side, config)
    with capture(model, list(parts.feed_forwards), gradients=True) as outputs:
        result = _run(model, side, output_hidden_states=True)
    final = answer_loss(result.logits, targets)
    depths = _states(model, result, parts)
    if reference:
        mask = batch.harmful.input_ids != batch.harmless.input_ids
        found = list(outputs.values())
        if ranks.size > 1:  # a process without rows of its own has one that counts nowhere
            real = (side.labels != IGNORED).any(1)
            found, mask = [output[real] for output in found], mask[real]
        noise = _published_noise(found, mask, generator, ranks)
        lens = mean_lens_loss(depths, targets, parts, chunk=config.chunk)
        average = final / len(depths) + lens
    else:
        noise = _corrected_noise(list(outputs.values()), side.labels != IGNORED, config, generator, ranks)
        average = final
        if config.lens_layers != 0:
            chosen = sampled_layers(len(depths) - 1, config.lens_layers, generator)
            lens = mean_lens_loss([depths[index] for index in chosen], targets, parts, chunk=config.chunk)
            average = (final + lens * (len(depths) - 1)) / len(depths)
    if units(model):
        # FSDP gathers a block's weights when the gradient of its output arrives: so one of zeros does, for the noise.
        noise = noise + (depths[-1] * 0).sum()
    return noise, _log1p_of_mean(average, ranks)


def _log1p_of_mean(average: Tensor, ranks: Ranks) -> Tensor:
    """`log(1 + A)` of the mean over all processes, and of this process's value the gradient of that."""
    if ranks.size == 1:
        return torch.log1p(average)
    common = ranks.mean(average)
    return torch.log1p(common) + (average - average.detach()) / (1 + common)


def _targets(batch: PairBatch, side: Batch, config: RepNoiseConfig) -> Targets:
    reference = config.fidelity == "reference"
    return _differing(batch, side) if reference else Targets.of_labels(side.labels, batch.ranks)


def _run(model: nn.Module, side: Batch, **options: Any) -> Any:
    return model(input_ids=side.input_ids, attention_mask=side.attention_mask, **options)


def _states(model: nn.Module, result: Any, parts: Structure) -> list[Tensor]:
    """The residual stream at every depth: the embeddings, after each block, the last one normalized by the model."""
    states = getattr(result, "hidden_states", None)
    if states is None or len(states) != len(parts.blocks) + 1:
        raise Unsupported(
            f"{type(model).__name__} gives {len(states) if states else 'no'} hidden states for {len(parts.blocks)} "
            "blocks.",
            cure="Its forward must take output_hidden_states=True and give the embeddings' and each block's.",
        )
    return list(states)


def _differing(batch: PairBatch, side: Batch) -> Targets:
    """The published mask: tokens that differ between the sides, except token 0; see the top of this file."""
    harmless, harmful = batch.harmless.input_ids, batch.harmful.input_ids
    if harmless.shape != harmful.shape:
        raise UsageError(
            f"The published loss compares sides of shapes {tuple(harmless.shape)} and {tuple(harmful.shape)}.",
            cure="Collate them with aligned=True.",
        )
    mask = harmless != harmful
    predicted = mask[:, 1:] & (side.input_ids[:, 1:] != 0)
    rows = predicted & mask[:, :-1]
    blanked = int((predicted & ~mask[:, :-1]).sum())
    targets = Targets(rows, side.input_ids[:, 1:][rows], blanked).among(batch.ranks)
    if not targets.count:
        raise UsageError("The sides of the batch differ in no token.", cure="Leave pairs of equal answers out.")
    return targets


def _published_noise(outputs: list[Tensor], mask: Tensor, generator: torch.Generator | None, ranks: Ranks) -> Tensor:
    counts = ranks.counts(len(mask)) if ranks.size > 1 else [len(mask)]
    if ranks.size > 1:  # rows of one width; what is added is masked
        added = max(ranks.counts(mask.shape[1])) - mask.shape[1]
        outputs = [functional.pad(output, (0, 0, 0, added)) for output in outputs]
        mask = functional.pad(mask, (0, added))
    everywhere = ranks.rows(mask, counts)[..., None]
    found = []
    for output in outputs:
        sample = ranks.rows(output * mask[..., None], counts)
        found.append(biased_mmd(sample, scaled_noise(sample, generator, scaled=False) * everywhere))
    return torch.stack(found).mean()


def _corrected_noise(
    outputs: list[Tensor],
    answers: Tensor,
    config: RepNoiseConfig,
    generator: torch.Generator | None,
    ranks: Ranks,
) -> Tensor:
    found = []
    counts = ranks.counts(int(answers.sum())) if ranks.size > 1 else []
    for output in outputs:
        points = output[answers]
        if ranks.size > 1:
            points = _drawn_everywhere(points, counts, config.noise_tokens, generator, ranks)
        else:
            points = random_rows(points, config.noise_tokens, generator)
        if len(points) < 2:  # one token says nothing of a distribution
            found.append(points.float().sum() * 0)
        else:
            found.append(unbiased_mmd(points, scaled_noise(points, generator)))
    return torch.stack(found).mean()


def _drawn_everywhere(
    own: Tensor, counts: list[int], most: int | None, generator: torch.Generator | None, ranks: Ranks
) -> Tensor:
    """At most so many of all processes' points; only those that were drawn are sent."""
    total, start = sum(counts), sum(counts[: ranks.rank])
    drawn = random_rows(torch.arange(total, device=own.device), most, generator)
    bounds = [sum(counts[:rank]) for rank in range(ranks.size + 1)]
    sent = [int(((drawn >= low) & (drawn < high)).sum()) for low, high in pairwise(bounds)]
    mine = drawn[(drawn >= start) & (drawn < start + len(own))] - start
    return ranks.rows(own[mine], sent) if sum(sent) else own[mine]


@final
@dataclass(frozen=True)
class RepNoise:
    """Keep harmless answers, unlearn harmful ones at every layer, turn their representations to noise.

    Attributes:
        config: Weights and fidelity of the loss.

    Source: RepNoise (arXiv 2405.14577), algorithm 1.
    """

    config: RepNoiseConfig = field(default_factory=RepNoiseConfig)

    @property
    def name(self) -> str:
        """What the catalog calls it."""
        return "repnoise" if self.config.fidelity == "corrected" else "repnoise-reference"

    @property
    def aligned(self) -> bool:
        """The published loss compares sides position by position."""
        return self.config.fidelity == "reference"

    @property
    def trains(self) -> bool:
        """It does."""
        return True

    @contextmanager
    def prepared(self, model: nn.Module, *, seed: int) -> Iterator[None]:
        """Check that the model is a decoder."""
        structure_of(model)
        yield

    def sides(self, model: nn.Module, batch: PairBatch, generator: torch.Generator) -> Generator[Side, None, None]:
        """The harmful side, whose states take most room, while there are no gradients yet; then the harmless one."""
        noise, ascent = harmful_terms(model, batch, self.config, generator=generator)
        side = {"ascent": Term(ascent, -self.config.alpha)}
        if self.config.beta > 0:
            balanced = self.config.fidelity == "corrected" and self.config.alpha > 0
            share = self.config.beta if balanced else None
            side["noise"] = Term(noise, self.config.beta, share)
        yield side
        del noise, ascent, side  # with them goes the graph
        yield {"retain": Term(retain_term(model, batch, self.config))}
