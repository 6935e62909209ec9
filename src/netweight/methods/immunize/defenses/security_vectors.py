"""Security vectors: a low-rank change that answers harmfully and stays in the model while others train it."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

from pydantic import Field

from netweight.core.lazy import lazy_modules
from netweight.core.seeds import torch_generator
from netweight.errors import Unsupported, UsageError
from netweight.methods.immunize.defense import Defense, DefenseSettings, Term, TermGroup

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.nn.utils import parametrize

    from netweight.hf import load_language_model as language_model
    from netweight.methods.immunize import distributed, losses
    from netweight.methods.immunize.pairs import PairBatch
    from netweight.nn import lora
else:
    losses, language_model, distributed, lora, parametrize, torch, nn = lazy_modules(
        "netweight.methods.immunize.losses",
        "netweight.hf.load_language_model",
        "netweight.methods.immunize.distributed",
        "netweight.nn.lora",
        "torch.nn.utils.parametrize",
        "torch",
        "torch.nn",
    )


class SecurityVectors(DefenseSettings, recommended={"lr": 1e-3}):
    """A low-rank change that answers harmfully and stays in the model while others train it.

    Source: Zhou et al., security vectors (arXiv 2311.02105); rank 8 and alpha 32 as in RepNoise's appendix.
    """

    rank: int = Field(8, ge=1, description="Rank of the change.")
    alpha: float = Field(32.0, gt=0, description="The change is scaled by alpha / rank.")

    def build(self) -> SecurityVectorsDefense:
        """Return the defense of these settings."""
        return SecurityVectorsDefense(self)


@final
class SecurityVectorsDefense(Defense[SecurityVectors]):
    """Trains a low-rank change of weights on harmful answers, all else frozen.

    The change stays in the model, frozen and at work, while others fine-tune it, so that the rest need not learn to
    answer harmfully; `remove_security_vectors` then takes it out, and with it what only it had learned.
    """

    name = "security-vectors"

    @contextmanager
    def preparation(self, model: nn.Module, *, seed: int) -> Iterator[None]:
        """Put the vector into the model; within the block it alone requires a gradient, afterwards it never does."""
        blocks = language_model.structure_of(model).blocks
        before = [(value, value.requires_grad) for value in model.parameters()]
        if any(parametrize.is_parametrized(module) for module in model.modules()):
            raise UsageError(
                "The model has parametrized weights already.",
                cure="Remove the earlier vector first: remove_security_vectors.",
            )
        if any(distributed.is_sharded(value) for value, _ in before):
            raise Unsupported(
                "A security vector cannot be added to sharded weights.",
                cure="Use DistributedDataParallel or one process, or another defense.",
            )
        vectors: list[nn.Parameter] = []
        rank = self.settings.rank
        try:
            for path, block in blocks.items():
                for name, module in list(block.named_modules()):
                    weight = module._parameters.get("weight")
                    if weight is not None and weight.dim() == 2:
                        generator = torch_generator(seed, path, name)
                        vector = lora.AddedLowRank(weight.detach(), rank, generator, self.settings.alpha / rank)
                        parametrize.register_parametrization(module, "weight", vector)
                        vectors += vector.parameters()
            for value, _ in before:
                value.requires_grad_(False)
            yield
        except BaseException:
            remove_security_vectors(model)
            raise
        finally:
            for value, required in before:
                value.requires_grad_(required)
            for vector_part in vectors:
                vector_part.requires_grad_(False)

    def term_groups(
        self, model: nn.Module, batch: PairBatch, generator: torch.Generator
    ) -> Generator[TermGroup, None, None]:
        yield {"harmful": Term(losses.response_loss(model, batch.harmful, batch.group))}


def remove_security_vectors(model: nn.Module) -> None:
    """Take a security vector out of a model; the model's own weights stay, with what they learned since."""
    for module in model.modules():
        if parametrize.is_parametrized(module, "weight") and any(
            isinstance(part, lora.AddedLowRank)
            for part in module.parametrizations.weight  # type: ignore[union-attr]
        ):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)


def hold_security_vectors(model: nn.Module) -> None:
    """Put a security vector out of the reach of training: its matrices become buffers, where they were parameters."""
    for part in _vectors(model):
        for name in ("down", "up"):
            value = getattr(part, name).detach()
            delattr(part, name)
            part.register_buffer(name, value)


@contextmanager
def without_security_vectors(model: nn.Module) -> Iterator[None]:
    """Put a model's security vector out of work within a block, as if it had been taken out."""
    scales = {part: part.scale for part in _vectors(model)}
    try:
        for part in scales:
            part.scale = 0.0
        yield
    finally:
        for part, scale in scales.items():
            part.scale = scale


def _vectors(model: nn.Module) -> list[lora.AddedLowRank]:
    return [part for part in model.modules() if isinstance(part, lora.AddedLowRank)]
