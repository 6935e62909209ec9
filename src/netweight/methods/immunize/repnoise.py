"""RepNoise: keep harmless answers, unlearn harmful ones at every layer, turn their representations to noise.

The retain term is `retain_term`, the ascent and the noise are `harmful_terms`; the noise is a maximum mean discrepancy
(MMD), as published and corrected, and the ascent's loss of each layer is in `defense.py`. Source: RepNoise (arXiv
2405.14577), algorithm 1, and the loss of its authors' code.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from netweight.core.seeds import torch_generator
from netweight.data.tokens import IGNORED, Batch
from netweight.errors import Unsupported, UsageError
from netweight.hf.load_language_model import Structure, structure_of, vocabulary_of
from netweight.methods.immunize.defense import (
    Defense,
    PairBatch,
    Side,
    Targets,
    Term,
    answer_loss,
    mean_lens_loss,
    mean_of_all,
    sampled_layers,
    seen,
    with_gradients,
)
from netweight.methods.immunize.distributed import ProcessGroup, is_sharded, units
from netweight.methods.immunize.settings import RepNoise
from netweight.nn.hooks import capture, in_mode

# With more tokens than these, only so many depths are drawn at each step unless `lens_layers` says otherwise.
LARGE_VOCABULARY, LENS_LAYERS = 65_536, 2


@final
class RepNoiseDefense(Defense[RepNoise]):
    """The harmful side, whose states take most room, goes backward while there are no gradients yet."""

    def __init__(self, settings: RepNoise) -> None:
        super().__init__(settings)
        self.aligned = settings.fidelity == "reference"  # the published loss compares sides position by position
        self.name = "repnoise-reference" if self.aligned else "repnoise"
        self.usual: dict[str, Tensor] = {}  # norms of states before the defense, where they are bounded

    @property
    def options(self) -> dict[str, Any]:
        return {"config": super().options}  # records of 0.1.0 have these settings under `config`

    @contextmanager
    def prepared(self, model: nn.Module, *, seed: int) -> Iterator[None]:
        blocks = list(structure_of(model).blocks)  # refuses what is no decoder
        if self.settings.norms is not None:
            if any(map(is_sharded, model.parameters())):
                raise Unsupported(
                    "Norms cannot be bounded where weights are sharded.",
                    cure="Leave norms out, or use DistributedDataParallel or one process.",
                )
            drawn = torch.randint(vocabulary_of(model) or 1, (8, 16), generator=torch_generator(seed, "norms"))
            with torch.no_grad(), in_mode(model, training=False), capture(model, blocks) as states:
                model(input_ids=drawn.to(next(model.parameters()).device))
            self.usual = {name: states[name].float().norm(dim=-1).mean() for name in blocks}
        yield

    def sides(self, model: nn.Module, batch: PairBatch, generator: torch.Generator) -> Generator[Side, None, None]:
        settings = self.settings
        looked_at: Any = capture(model, list(self.usual), gradients=True) if self.usual else nullcontext()
        with looked_at as states:
            noise, ascent = harmful_terms(model, batch, settings, generator=generator)
        side = {"ascent": Term(ascent, -settings.alpha)}
        if settings.norms is not None and self.usual:
            lengths = [
                states[name][seen(batch.harmful)].float().norm(dim=-1) / usual for name, usual in self.usual.items()
            ]
            over = (torch.stack(lengths, -1) / settings.norms - 1).relu().square().mean(-1)
            side["norms"] = Term(mean_of_all(over, batch.group))
        if settings.beta > 0:
            balanced = settings.fidelity == "corrected" and settings.alpha > 0
            side["noise"] = Term(noise, settings.beta, settings.beta if balanced else None)
        yield side
        del noise, ascent, side, states  # with them goes the graph
        yield {"retain": Term(retain_term(model, batch, settings))}


def retain_term(model: nn.Module, batch: PairBatch, settings: RepNoise) -> Tensor:
    """Cross-entropy of the harmless answers."""
    side = batch.harmless
    targets = _targets(batch, side, settings)
    return answer_loss(_run(model, side).logits, targets)


def harmful_terms(
    model: nn.Module, batch: PairBatch, settings: RepNoise, *, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """The two terms on the harmful answers, from one forward pass: noise and `log(1 + A)`, without weights."""
    side, parts, group = batch.harmful, structure_of(model), batch.group
    reference = settings.fidelity == "reference"
    targets = _targets(batch, side, settings)
    with capture(model, list(parts.feed_forwards), gradients=True) as outputs:
        result = _run(model, side, output_hidden_states=True)
    final = answer_loss(result.logits, targets)
    depths = _states(model, result, parts)
    # OPT's feed-forward layers see all tokens in one row.
    found = [output.reshape(*side.labels.shape, -1) for output in outputs.values()]
    if reference:
        mask = batch.harmful.input_ids != batch.harmless.input_ids
        if group.size > 1:  # a process without rows of its own has one that counts nowhere
            real = (side.labels != IGNORED).any(1)
            found, mask = [output[real] for output in found], mask[real]
        noise = _published_noise(found, mask, generator, group)
        lens = mean_lens_loss(depths, targets, parts, chunk=settings.chunk)
        average = final / len(depths) + lens
    else:
        answers = side.labels != IGNORED
        noise = _corrected_noise(found, answers, settings, generator, group) if settings.beta else final * 0
        average = final
        if settings.lens_layers != 0:
            wanted = settings.lens_layers
            if wanted is None and parts.vocabulary > LARGE_VOCABULARY:
                wanted = LENS_LAYERS
            chosen = sampled_layers(len(depths) - 1, wanted, generator)
            lens = mean_lens_loss([depths[index] for index in chosen], targets, parts, chunk=settings.chunk)
            average = (final + lens * (len(depths) - 1)) / len(depths)
    if units(model):
        # FSDP gathers a block's weights when the gradient of its output arrives: so one of zeros does, for the noise.
        noise = noise + (depths[-1] * 0).sum()
    return noise, log1p_of_mean(average, group)


def log1p_of_mean(average: Tensor, group: ProcessGroup) -> Tensor:
    """`log(1 + A)` of the mean over all processes, and of this process's value the gradient of that."""
    if group.size == 1:
        return torch.log1p(average)
    common = group.mean(average)
    return torch.log1p(common) + (average - average.detach()) / (1 + common)


def _targets(batch: PairBatch, side: Batch, settings: RepNoise) -> Targets:
    reference = settings.fidelity == "reference"
    return _differing(batch, side) if reference else Targets.of_labels(side.labels, batch.group)


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
    """The published mask: tokens that differ between the sides, except token 0, which it leaves out."""
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
    targets = Targets(rows, side.input_ids[:, 1:][rows], blanked).among(batch.group)
    if not targets.count:
        raise UsageError("The sides of the batch differ in no token.", cure="Leave pairs of equal answers out.")
    return targets


def _published_noise(
    outputs: list[Tensor], mask: Tensor, generator: torch.Generator | None, group: ProcessGroup
) -> Tensor:
    """The noise term as the released code has it: biased MMD between masked states and unscaled noise, over layers."""
    counts = group.counts(len(mask)) if group.size > 1 else [len(mask)]
    if group.size > 1:  # rows of one width; what is added is masked
        added = max(group.counts(mask.shape[1])) - mask.shape[1]
        outputs = [functional.pad(output, (0, 0, 0, added)) for output in outputs]
        mask = functional.pad(mask, (0, added))
    everywhere = group.rows(mask, counts)[..., None]
    found = []
    for output in outputs:
        sample = group.rows(output * mask[..., None], counts)
        found.append(biased_mmd(sample, scaled_noise(sample, generator, scaled=False) * everywhere))
    return torch.stack(found).mean()


def _corrected_noise(
    outputs: list[Tensor], answers: Tensor, settings: RepNoise, generator: torch.Generator | None, group: ProcessGroup
) -> Tensor:
    """The noise term: unbiased MMD between states of harmful answers and noise of their scale, mean over layers."""
    found = []
    counts = group.counts(int(answers.sum())) if group.size > 1 else []
    for output in outputs:
        points = output[answers]
        if group.size > 1:
            points = _drawn_everywhere(points, counts, settings.noise_tokens, generator, group)
        else:
            points = random_rows(points, settings.noise_tokens, generator)
        if len(points) < 2:  # one token says nothing of a distribution
            found.append(points.float().sum() * 0)
        else:
            found.append(unbiased_mmd(points, scaled_noise(points, generator)))
    return torch.stack(found).mean()


def _drawn_everywhere(
    own: Tensor, counts: list[int], most: int | None, generator: torch.Generator | None, group: ProcessGroup
) -> Tensor:
    """At most so many of all processes' points; only those that were drawn are sent."""
    total, start = sum(counts), sum(counts[: group.rank])
    drawn = random_rows(torch.arange(total, device=own.device), most, generator)
    bounds = [sum(counts[:rank]) for rank in range(group.size + 1)]
    sent = [int(((drawn >= low) & (drawn < high)).sum()) for low, high in pairwise(bounds)]
    mine = drawn[(drawn >= start) & (drawn < start + len(own))] - start
    return group.rows(own[mine], sent) if sum(sent) else own[mine]


# All distances come from a Gram matrix, so that n points in D dimensions need n² numbers and not n² D, of which none
# waits for the backward pass.

# The kernels' bandwidths as multiples of a typical squared distance: each half of the one before.
_WIDTHS = (4.0, 2.0, 1.0, 0.5, 0.25)


def _centered(points: Tensor) -> Tensor:
    """The points around their mean: nearer to the origin less is lost where large numbers cancel."""
    points = points if points.dtype == torch.float64 else points.float()
    return points - points.mean(0)


@torch.no_grad()
def squared_distances(points: Tensor) -> Tensor:
    """Squared Euclidean distances between all pairs of points, without a gradient."""
    centered = _centered(points)
    gram = centered @ centered.T
    norms = gram.diagonal()
    distances = (norms[:, None] + norms[None, :] - 2 * gram).clamp_(min=0)
    return distances.fill_diagonal_(0)


def _apart(distances: Tensor) -> Tensor:
    """The distances between different points, each pair once."""
    return distances[torch.ones_like(distances, dtype=torch.bool).triu_(1)]


def _statistic(sample: Tensor, target: Tensor, distances: Tensor, typical: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of the kernels of all pairs."""
    # With W the weights times the kernels' derivative by the squared distance, and P = W + Wᵀ, the gradient of the sum
    # by point i is 2 Σ_j P_ij (x_i - x_j).
    with torch.no_grad():
        typical = typical.clamp(min=torch.finfo(distances.dtype).tiny ** 0.5)  # equal points
        kernel = torch.exp(distances / (-typical * _WIDTHS[0]))
        kernels, slopes = kernel.clone(), kernel / (-typical * _WIDTHS[0])
        for width in _WIDTHS[1:]:
            kernel.square_()  # half the bandwidth
            kernels += kernel
            slopes.addcdiv_(kernel, -typical * width)
        value = kernels.mul_(weights).sum()
        pulls = slopes.mul_(weights)
        pulls = pulls + pulls.T
        points = _centered(torch.cat([sample, target]))
        gradient = 2 * (pulls.sum(1, keepdim=True) * points - pulls @ points)
    count = len(sample)
    return with_gradients(value, [sample, target], [gradient[:count], gradient[count:]])


def biased_mmd(sample: Tensor, target: Tensor) -> Tensor:
    """The published estimator: each example is one point, a biased V-statistic."""
    # Five Gaussian kernels are summed, their bandwidths 1/4 to 4 times the mean squared distance of the joint sample.
    # The pairs of a point with itself count, so that the value does not vanish for equal distributions.
    # Source: RepNoise (arXiv 2405.14577), section 3, as its authors' code computes it.
    count = len(sample)
    sample, target = sample.flatten(1), target.flatten(1)
    distances = squared_distances(torch.cat([sample, target]))
    signs = distances.new_ones(2 * count)
    signs[count:] = -1
    typical = _apart(distances).mean()
    return _statistic(sample, target, distances, typical, signs[:, None] * signs[None, :] / count**2)


def unbiased_mmd(sample: Tensor, target: Tensor) -> Tensor:
    """The corrected estimator: a U-statistic that is 0 on average for equal distributions, and may be negative."""
    # Five Gaussian kernels are summed, their bandwidths 1/4 to 4 times the median squared distance of the joint sample.
    # Source: Gretton et al., "A kernel two-sample test", 2012, lemma 6.
    count, other = len(sample), len(target)
    if min(count, other) < 2:
        raise UsageError(f"An unbiased MMD needs two points on each side, not {count} and {other}.")
    distances = squared_distances(torch.cat([sample, target]))
    weights = torch.full_like(distances, -1 / (count * other))
    weights[:count, :count] = 1 / (count * (count - 1))
    weights[count:, count:] = 1 / (other * (other - 1))
    weights.fill_diagonal_(0)
    return _statistic(sample, target, distances, _apart(distances).median(), weights)


def _normal(shape: torch.Size, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers, drawn where the generator lives."""
    device = like.device if generator is None else generator.device
    return torch.randn(shape, generator=generator, device=device, dtype=like.dtype).to(like.device)


def scaled_noise(points: Tensor, generator: torch.Generator | None, *, scaled: bool = True) -> Tensor:
    """Gaussian noise of the shape of `points`."""
    noise = _normal(points.shape, points, generator)
    return noise * points.detach().float().square().mean().sqrt().to(points.dtype) if scaled else noise


def random_rows(points: Tensor, most: int | None, generator: torch.Generator | None) -> Tensor:
    """At most so many rows of `points`, drawn without replacement; all of them if there are no more."""
    if most is None or len(points) <= most:
        return points
    device = points.device if generator is None else generator.device
    return points[torch.randperm(len(points), generator=generator, device=device)[:most].to(points.device)]
