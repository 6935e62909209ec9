"""RepNoise's loss: keep harmless answers, unlearn harmful ones at every layer, and turn their representations to noise.

    loss = retain + weight · noise - alpha · log(1 + A)

where `A` is the mean cross-entropy of the harmful answer at every depth. `fidelity="reference"` gives the numbers of
the published code; in it a token counts where the two sides differ position by position, and so

- tokens that both answers have in one place are not looked at, nor is token 0,
- padding counts as text: that of the shorter answer is to be predicted, or unlearned,
- logits are multiplied by the mask of their own position, so that the first answer token has no gradient,
- the last state is normalized twice for the ascent, and counts once more by the model's own logits,
- each example is one point of the discrepancy, and every pair of a point with itself counts.

The corrected loss looks at the tokens of the answers and at nothing else, each depth once, and takes tokens as points.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from netweight.attacks.finetuning.examples import IGNORED, Batch
from netweight.errors import Unsupported, UsageError
from netweight.methods.immunize.config import RepNoiseConfig
from netweight.methods.immunize.lens import Targets, answer_loss, mean_lens_loss, sampled_layers
from netweight.methods.immunize.mmd import biased_mmd, random_rows, scaled_noise, unbiased_mmd
from netweight.methods.immunize.pairs import PairBatch
from netweight.methods.immunize.structure import Structure, structure_of
from netweight.probe import capture

__all__ = ["LossParts", "gradient_norm", "harmful_terms", "repnoise_loss", "retain_term"]


@final
@dataclass(frozen=True)
class LossParts:
    """The terms of the loss, each a scalar in the graph.

    Attributes:
        retain: Cross-entropy of the harmless answers.
        noise: Discrepancy between the feed-forward outputs on harmful answers and noise, the mean over layers.
        ascent: `log(1 + A)`, which is to grow.
        alpha: Weight of the ascent.
        noise_weight: Weight of the noise.
    """

    retain: Tensor
    noise: Tensor
    ascent: Tensor
    alpha: float
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
    """Compute RepNoise's loss on a batch of pairs, both sides in one graph.

    `immunize` does the same one side after the other, in less memory.

    Args:
        model: A causal language model that is called as those of transformers.
        batch: Pairs; for `fidelity="reference"` both sides have one width, see `collate_pairs`.
        config: Weights and fidelity.
        generator: Where the noise comes from; None for torch's global one.
        noise_weight: Weight of the noise term. None takes `config.beta` for the reference, and for the corrected loss
            balances by the gradients, for which it goes backward twice more; where gradients are off, `config.beta`.

    Raises:
        Unsupported: The model has no decoder's structure or gives no hidden states.
        UsageError: Nothing is to be predicted, or the widths differ.

    Source: RepNoise (arXiv 2405.14577), algorithm 1, and the loss of its authors' code.
    """
    retain = retain_term(model, batch, config)
    noise, ascent = harmful_terms(model, batch, config, generator=generator)
    if noise_weight is None:
        noise_weight = config.beta
        if config.fidelity == "corrected" and noise.requires_grad and config.beta > 0:
            parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
            pull = gradient_norm(noise, parameters)
            noise_weight *= config.alpha * gradient_norm(ascent, parameters) / pull if pull > 0 else 0.0
    return LossParts(retain, noise, ascent, config.alpha, noise_weight)


def gradient_norm(value: Tensor, parameters: Iterable[nn.Parameter]) -> float:
    """The norm of a scalar's gradient by all parameters; the graph is kept, no parameter's `grad` changes."""
    grads = torch.autograd.grad(value, list(parameters), retain_graph=True, allow_unused=True)
    norms = [grad.float().norm() for grad in grads if grad is not None]
    return float(torch.stack(norms).norm()) if norms else 0.0


def retain_term(model: nn.Module, batch: PairBatch, config: RepNoiseConfig) -> Tensor:
    """Cross-entropy of the harmless answers.

    Raises:
        UsageError: Nothing is to be predicted, or the widths differ.
    """
    side = batch.harmless
    targets = _differing(batch, side) if config.fidelity == "reference" else Targets.of_labels(side.labels)
    return answer_loss(_run(model, side).logits, targets)


def harmful_terms(
    model: nn.Module, batch: PairBatch, config: RepNoiseConfig, *, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """The two terms on the harmful answers, from one forward pass: noise and `log(1 + A)`, without weights.

    Raises:
        Unsupported: The model has no decoder's structure or gives no hidden states.
        UsageError: Nothing is to be predicted, or the widths differ.
    """
    side, parts = batch.harmful, structure_of(model)
    reference = config.fidelity == "reference"
    targets = _differing(batch, side) if reference else Targets.of_labels(side.labels)
    with capture(model, list(parts.feed_forwards), gradients=True) as outputs:
        result = _run(model, side, output_hidden_states=True)
    final = answer_loss(result.logits, targets)
    depths = _states(model, result, parts)
    if reference:
        mask = batch.harmful.input_ids != batch.harmless.input_ids
        noise = _published_noise(list(outputs.values()), mask, generator)
        lens = mean_lens_loss(depths, targets, parts, chunk=config.chunk)
        average = final / len(depths) + lens
    else:
        noise = _corrected_noise(list(outputs.values()), side.labels != IGNORED, config, generator)
        average = final
        if config.lens_layers != 0:
            chosen = sampled_layers(len(depths) - 1, config.lens_layers, generator)
            lens = mean_lens_loss([depths[index] for index in chosen], targets, parts, chunk=config.chunk)
            average = (final + lens * (len(depths) - 1)) / len(depths)
    return noise, torch.log1p(average)


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
    if not predicted.any():
        raise UsageError("The sides of the batch differ in no token.", cure="Leave pairs of equal answers out.")
    rows = predicted & mask[:, :-1]
    return Targets(rows, side.input_ids[:, 1:][rows], blanked=int((predicted & ~mask[:, :-1]).sum()))


def _published_noise(outputs: list[Tensor], mask: Tensor, generator: torch.Generator | None) -> Tensor:
    factor = mask[..., None]
    found = [biased_mmd(output * factor, scaled_noise(output, generator, scaled=False) * factor) for output in outputs]
    return torch.stack(found).mean()


def _corrected_noise(
    outputs: list[Tensor], answers: Tensor, config: RepNoiseConfig, generator: torch.Generator | None
) -> Tensor:
    found = []
    for output in outputs:
        points = random_rows(output[answers], config.noise_tokens, generator)
        if len(points) < 2:  # one token says nothing of a distribution
            found.append(points.float().sum() * 0)
        else:
            found.append(unbiased_mmd(points, scaled_noise(points, generator)))
    return torch.stack(found).mean()
