"""RepNoise: keep harmless answers, raise the loss on harmful ones at every depth, turn their states to noise."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, final

from pydantic import Field

from netweight.core.lazy import lazy_modules
from netweight.core.seeds import torch_generator
from netweight.data.tokens import IGNORED, Batch
from netweight.errors import Unsupported, UsageError
from netweight.methods.immunize.defense import Defense, DefenseSettings, Term, TermGroup

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from netweight.hf import load_language_model as language_model
    from netweight.hf.load_language_model import DecoderStructure
    from netweight.methods.immunize import distributed, losses, noise
    from netweight.methods.immunize.distributed import ProcessGroup
    from netweight.methods.immunize.pairs import PairBatch
    from netweight.nn import hooks
else:
    losses, hooks, language_model, distributed, noise, torch, nn = lazy_modules(
        "netweight.methods.immunize.losses",
        "netweight.nn.hooks",
        "netweight.hf.load_language_model",
        "netweight.methods.immunize.distributed",
        "netweight.methods.immunize.noise",
        "torch",
        "torch.nn",
    )


class RepNoise(DefenseSettings):
    """Keep harmless answers, unlearn harmful ones at every layer, and turn their representations to noise.

    Source: RepNoise (arXiv 2405.14577), algorithm 1; appendix B: alpha 1 and beta 0.001, as in the authors' code.
    Equation 5 of the paper exchanges the two names.
    """

    fidelity: Literal["corrected", "reference"] = Field(
        "corrected", description="`reference` reproduces the published code, including its defects."
    )
    alpha: float = Field(1.0, ge=0, description="Weight of the ascent on harmful answers.")
    # The values of the two terms say nothing of how hard they pull, hence gradient norms. 2 was chosen on a miniature.
    beta: float = Field(
        2.0, ge=0,
        description="Weight of the noise: the norm of its gradient as a multiple of that of the weighted ascent; with "
        "fidelity `reference` a factor of its value. 0 leaves it out.",
    )  # fmt: skip
    lens_layers: int | None = Field(None, ge=0)
    """Number of depths below the last one, drawn anew at each step, at which the loss on harmful answers is raised.
    0 leaves the model's own logits alone. By default all, or two where the vocabulary has more than 65,536 tokens,
    since each costs a product with the whole vocabulary. Corrected only."""
    noise_tokens: int | None = Field(
        256, ge=2,
        description="Number of tokens that enter the noise term, drawn anew at each step and layer; null for all. "
        "Corrected only.",
    )  # fmt: skip
    norms: float | None = Field(
        None, gt=0,
        description="Bound on the norms of states on harmful rows, as a multiple of those of random tokens before the "
        "defense: larger norms are lowered. Null for no bound.",
    )  # fmt: skip
    chunk: int = Field(512, ge=1, description="Number of tokens whose logits are in memory at a time.")

    def check(self) -> None:
        """Refuse what the published loss does not do."""
        super().check()
        if self.fidelity == "reference" and self.lens_layers is not None:
            raise UsageError("The published loss uses all layers.", cure="Leave lens_layers out.")

    def build(self) -> RepNoiseDefense:
        """Return the defense of these settings."""
        return RepNoiseDefense(self)


class RepNoiseReference(RepNoise, defaults={"fidelity": "reference", "beta": 0.001, "noise_tokens": None}):
    """The published loss with its published weights."""


# With more tokens than these, only so many depths are drawn at each step unless `lens_layers` says otherwise.
LARGE_VOCABULARY, LENS_LAYERS = 65_536, 2


@final
class RepNoiseDefense(Defense[RepNoise]):
    """The harmful side, whose states take most room, goes backward while there are no gradients yet."""

    def __init__(self, settings: RepNoise) -> None:
        super().__init__(settings)
        # The published loss compares the two sides position by position.
        self.aligned = settings.fidelity == "reference"
        self.name = "repnoise-reference" if self.aligned else "repnoise"
        # The norms of states before the defense, where they are bounded.
        self.usual: dict[str, Tensor] = {}

    @property
    def options(self) -> dict[str, Any]:
        # Records of version 0.1.0 store these settings under `config`.
        return {"config": super().options}

    @contextmanager
    def preparation(self, model: nn.Module, *, seed: int) -> Iterator[None]:
        # This call refuses models that are not decoders.
        blocks = list(language_model.structure_of(model).blocks)
        if self.settings.norms is not None:
            if any(map(distributed.is_sharded, model.parameters())):
                raise Unsupported(
                    "Norms cannot be bounded where weights are sharded.",
                    cure="Leave norms out, or use DistributedDataParallel or one process.",
                )
            drawn = torch.randint(
                language_model.vocabulary_of(model) or 1, (8, 16), generator=torch_generator(seed, "norms")
            )
            with torch.no_grad(), hooks.in_mode(model, training=False), hooks.capture(model, blocks) as states:
                model(input_ids=drawn.to(next(model.parameters()).device))
            self.usual = {name: states[name].float().norm(dim=-1).mean() for name in blocks}
        yield

    def term_groups(
        self, model: nn.Module, batch: PairBatch, generator: torch.Generator
    ) -> Generator[TermGroup, None, None]:
        settings = self.settings
        looked_at: Any = hooks.capture(model, list(self.usual), gradients=True) if self.usual else nullcontext()
        with looked_at as states:
            noise_term, ascent = harmful_terms(model, batch, settings, generator=generator)
        group = {"ascent": Term(ascent, -settings.alpha)}
        if settings.norms is not None and self.usual:
            lengths = [
                states[name][losses.token_mask(batch.harmful)].float().norm(dim=-1) / usual
                for name, usual in self.usual.items()
            ]
            over = (torch.stack(lengths, -1) / settings.norms - 1).relu().square().mean(-1)
            group["norms"] = Term(losses.mean_of_all(over, batch.group))
        if settings.beta > 0:
            balanced = settings.fidelity == "corrected" and settings.alpha > 0
            group["noise"] = Term(noise_term, settings.beta, settings.beta if balanced else None)
        yield group
        # The graph is freed with these tensors.
        del noise_term, ascent, group, states
        yield {"harmless": Term(harmless_term(model, batch, settings))}


def harmless_term(model: nn.Module, batch: PairBatch, settings: RepNoise) -> Tensor:
    """Cross-entropy of the harmless answers."""
    side = batch.harmless
    targets = _targets(batch, side, settings)
    return losses.answer_loss(_run(model, side).logits, targets)


def harmful_terms(
    model: nn.Module, batch: PairBatch, settings: RepNoise, *, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """The two terms on the harmful answers, from one forward pass: noise and `log(1 + A)`, without weights."""
    side, parts, group = batch.harmful, language_model.structure_of(model), batch.group
    reference = settings.fidelity == "reference"
    targets = _targets(batch, side, settings)
    with hooks.capture(model, list(parts.feed_forwards), gradients=True) as outputs:
        result = _run(model, side, output_hidden_states=True)
    final = losses.answer_loss(result.logits, targets)
    depths = _states(model, result, parts)
    # OPT's feed-forward layers see all tokens in one row.
    states = [output.reshape(*side.labels.shape, -1) for output in outputs.values()]
    if reference:
        mask = batch.harmful.input_ids != batch.harmless.input_ids
        # A process without rows has one row that does not count.
        if group.size > 1:
            real = (side.labels != IGNORED).any(1)
            states, mask = [output[real] for output in states], mask[real]
        noise_term = noise.published_noise(states, mask, generator, group)
        lens = losses.mean_lens_loss(depths, targets, parts, chunk=settings.chunk)
        average = final / len(depths) + lens
    else:
        answers = side.labels != IGNORED
        noise_term = (
            noise.corrected_noise(states, answers, settings.noise_tokens, generator, group)
            if settings.beta
            else final * 0
        )
        average = final
        if settings.lens_layers != 0:
            layers = settings.lens_layers
            if layers is None and parts.vocabulary > LARGE_VOCABULARY:
                layers = LENS_LAYERS
            chosen = losses.sampled_layers(len(depths) - 1, layers, generator)
            lens = losses.mean_lens_loss([depths[index] for index in chosen], targets, parts, chunk=settings.chunk)
            average = (final + lens * (len(depths) - 1)) / len(depths)
    if distributed.units(model):
        # FSDP gathers a block's weights when the gradient of its output arrives: so one of zeros does, for the noise.
        noise_term = noise_term + (depths[-1] * 0).sum()
    return noise_term, log1p_of_mean(average, group)


def log1p_of_mean(average: Tensor, group: ProcessGroup) -> Tensor:
    """`log(1 + A)` of the mean over all processes, and of this process's value the gradient of that."""
    if group.size == 1:
        return torch.log1p(average)
    common = group.mean(average)
    return torch.log1p(common) + (average - average.detach()) / (1 + common)


def _targets(batch: PairBatch, side: Batch, settings: RepNoise) -> losses.Targets:
    reference = settings.fidelity == "reference"
    return _differing(batch, side) if reference else losses.Targets.of_labels(side.labels, batch.group)


def _run(model: nn.Module, side: Batch, **options: Any) -> Any:
    return model(input_ids=side.input_ids, attention_mask=side.attention_mask, **options)


def _states(model: nn.Module, result: Any, parts: DecoderStructure) -> list[Tensor]:
    """The residual stream at every depth: the embeddings, after each block, the last one normalized by the model."""
    states = getattr(result, "hidden_states", None)
    if states is None or len(states) != len(parts.blocks) + 1:
        raise Unsupported(
            f"{type(model).__name__} gives {len(states) if states else 'no'} hidden states for {len(parts.blocks)} "
            "blocks.",
            cure="Its forward must take output_hidden_states=True and return the embeddings and each block's states.",
        )
    return list(states)


def _differing(batch: PairBatch, side: Batch) -> losses.Targets:
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
    targets = losses.Targets(rows, side.input_ids[:, 1:][rows], blanked).among(batch.group)
    if not targets.count:
        raise UsageError(
            "The two sides of the batch do not differ in any token.", cure="Leave pairs of equal answers out."
        )
    return targets
