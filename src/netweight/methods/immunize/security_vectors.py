"""Security vectors: a low-rank change of weights that already answers harmfully, so that the rest need not learn to.

The vector is trained on harmful answers with all else frozen. It stays in the model, frozen and at work, while others
fine-tune it; `remove_security_vectors` then takes it out, and with it what only it had learned.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from netweight.core.seeds import torch_generator
from netweight.errors import Unsupported, UsageError
from netweight.methods.immunize.baselines import response_loss
from netweight.methods.immunize.decoder import structure_of
from netweight.methods.immunize.defense import PairBatch, Side, Term
from netweight.methods.immunize.distributed import is_sharded


@final
class _LowRank(nn.Module):
    """A weight plus a product of two thin matrices, the second of which starts at 0."""

    def __init__(self, weight: Tensor, rank: int, scale: float, generator: torch.Generator) -> None:
        super().__init__()
        rows, columns = weight.shape
        down = torch.randn(rank, columns, generator=generator) / columns**0.5
        self.down = nn.Parameter(down.to(weight))
        self.up = nn.Parameter(weight.new_zeros(rows, rank))
        self.scale = scale

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * (self.up @ self.down)


@final
@dataclass(frozen=True)
class SecurityVectors:
    """Train a security vector; afterwards the model's own weights are as they were and trainable as before."""

    # Source: Zhou et al., security vectors (arXiv 2311.02105); rank 8 and alpha 32 as in RepNoise's appendix.

    rank: int = 8
    alpha: float = 32.0  # the change is scaled by `alpha / rank`
    name = "security-vectors"
    aligned = False
    trains = True

    def __post_init__(self) -> None:
        """Check the rank."""
        if self.rank < 1 or not self.alpha > 0:
            raise UsageError(f"Rank {self.rank} and alpha {self.alpha} cannot be.", cure="Give 1 or more, above 0.")

    @contextmanager
    def prepared(self, model: nn.Module, *, seed: int) -> Iterator[None]:
        """Put the vector into the model; within the block it alone requires a gradient, afterwards it never does."""
        blocks = structure_of(model).blocks
        before = [(value, value.requires_grad) for value in model.parameters()]
        if any(parametrize.is_parametrized(module) for module in model.modules()):
            raise UsageError(
                "The model has parametrized weights already.",
                cure="Take an earlier vector out: remove_security_vectors.",
            )
        if any(is_sharded(value) for value, _ in before):
            raise Unsupported(
                "A security vector cannot be put into weights that are sharded.",
                cure="Use DistributedDataParallel or one process, or another defense.",
            )
        vectors: list[nn.Parameter] = []
        try:
            for path, block in blocks.items():
                for name, module in list(block.named_modules()):
                    weight = module._parameters.get("weight")
                    if weight is not None and weight.dim() == 2:
                        generator = torch_generator(seed, path, name)
                        vector = _LowRank(weight.detach(), self.rank, self.alpha / self.rank, generator)
                        parametrize.register_parametrization(module, "weight", vector)
                        vectors += vector.parameters()
            for value, _ in before:
                value.requires_grad_(False)
            yield
        except BaseException:
            remove_security_vectors(model)
            raise
        finally:
            for value, wanted in before:
                value.requires_grad_(wanted)
            for vector_part in vectors:
                vector_part.requires_grad_(False)

    def sides(self, model: nn.Module, batch: PairBatch, generator: torch.Generator) -> Generator[Side, None, None]:
        """The harmful side, which is to be learned."""
        yield {"harmful": Term(response_loss(model, batch.harmful, batch.ranks))}


def remove_security_vectors(model: nn.Module) -> None:
    """Take a security vector out of a model; the model's own weights stay, with what they learned since."""
    for module in model.modules():
        if parametrize.is_parametrized(module, "weight") and any(
            isinstance(part, _LowRank)
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


def _vectors(model: nn.Module) -> list[_LowRank]:
    return [part for part in model.modules() if isinstance(part, _LowRank)]
