"""The defenses that RepNoise is compared with, from plain fine-tuning to security vectors and distillation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from netweight.core.seeds import torch_generator
from netweight.data.examples import IGNORED, Batch
from netweight.errors import Unsupported, UsageError
from netweight.methods.immunize.defense import Defense, PairBatch, Side, Term
from netweight.methods.immunize.distributed import ProcessGroup, is_sharded, put
from netweight.methods.immunize.lens import response_loss
from netweight.methods.immunize.settings import (
    AdversarialLoss,
    Distillation,
    GradientAscent,
    RandomWeights,
    SafetyTraining,
    SecurityVectors,
    Vaccine,
)
from netweight.nn.decoder import structure_of, vocabulary_of
from netweight.nn.hooks import capture, edit_outputs
from netweight.nn.lora import AddedLowRank


@final
class SafetyTrainingDefense(Defense[SafetyTraining]):
    """Trains the harmless side."""

    name = "safety-training"

    def sides(self, model: nn.Module, batch: PairBatch, generator: torch.Generator) -> Generator[Side, None, None]:
        yield {"retain": Term(response_loss(model, batch.harmless, batch.group))}


@final
class GradientAscentDefense(Defense[GradientAscent]):
    """Ascends on the harmful side."""

    name = "gradient-ascent"

    def sides(self, model: nn.Module, batch: PairBatch, generator: torch.Generator) -> Generator[Side, None, None]:
        yield {"ascent": Term(response_loss(model, batch.harmful, batch.group), -1.0)}


@final
class AdversarialLossDefense(Defense[AdversarialLoss]):
    """Trains the harmless side, then ascends on the harmful one."""

    name = "adversarial-loss"

    def sides(self, model: nn.Module, batch: PairBatch, generator: torch.Generator) -> Generator[Side, None, None]:
        yield {"retain": Term(response_loss(model, batch.harmless, batch.group))}
        yield {"ascent": Term(response_loss(model, batch.harmful, batch.group), -self.settings.alpha)}


@final
class RandomWeightsDefense(Defense[RandomWeights]):
    """Draws all weights."""

    name = "random-weights"
    trains = False

    @contextmanager
    def prepared(self, model: nn.Module, *, seed: int) -> Iterator[None]:
        for path, module in model.named_modules():
            for name, value in module.named_parameters(recurse=False):
                if value.dim() > 1:
                    drawn = torch.randn(value.shape, generator=torch_generator(seed, path, name)) * self.settings.std
                else:
                    drawn = torch.full(value.shape, 0.0 if name == "bias" else 1.0)
                put(value.data, drawn)
        yield


@final
class VaccineDefense(Defense[Vaccine]):
    """Trains the harmless side, perturbed along its gradient."""

    name = "vaccine"

    @contextmanager
    def prepared(self, model: nn.Module, *, seed: int) -> Iterator[None]:
        structure_of(model)  # refuses what is no decoder
        yield

    def sides(self, model: nn.Module, batch: PairBatch, generator: torch.Generator) -> Generator[Side, None, None]:
        blocks = list(structure_of(model).blocks)
        cuda = sorted({value.device for value in model.parameters() if value.device.type == "cuda"}, key=str)
        with torch.random.fork_rng(devices=cuda), capture(model, blocks, gradients=True) as outputs:
            loss = response_loss(model, batch.harmless, batch.group)  # the same dropout as below
        grads = torch.autograd.grad(loss, [outputs[name] for name in blocks])
        norm = torch.stack([grad.float().norm() for grad in grads]).norm()
        if batch.group.size > 1:  # of all rows; their gradients' common factor, see `distributed.py`, is divided out
            norm = batch.group.sum(norm.square()).sqrt()
        norm = norm.clamp(min=torch.finfo(torch.float32).tiny)
        shifts = [(self.settings.rho * grad.float() / norm).to(grad.dtype) for grad in grads]
        # Hooks stay until the loss has gone backward.
        with edit_outputs(model, {name: _adding(shift) for name, shift in zip(blocks, shifts, strict=True)}):
            yield {"retain": Term(response_loss(model, batch.harmless, batch.group))}


def _adding(shift: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda states: states + shift


@final
class SecurityVectorsDefense(Defense[SecurityVectors]):
    """Trains a low-rank change of weights on harmful answers, all else frozen.

    The change stays in the model, frozen and at work, while others fine-tune it, so that the rest need not learn to
    answer harmfully; `remove_security_vectors` then takes it out, and with it what only it had learned.
    """

    name = "security-vectors"

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
        rank = self.settings.rank
        try:
            for path, block in blocks.items():
                for name, module in list(block.named_modules()):
                    weight = module._parameters.get("weight")
                    if weight is not None and weight.dim() == 2:
                        generator = torch_generator(seed, path, name)
                        vector = AddedLowRank(weight.detach(), rank, generator, self.settings.alpha / rank)
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
        yield {"harmful": Term(response_loss(model, batch.harmful, batch.group))}


def remove_security_vectors(model: nn.Module) -> None:
    """Take a security vector out of a model; the model's own weights stay, with what they learned since."""
    for module in model.modules():
        if parametrize.is_parametrized(module, "weight") and any(
            isinstance(part, AddedLowRank)
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


def _vectors(model: nn.Module) -> list[AddedLowRank]:
    return [part for part in model.modules() if isinstance(part, AddedLowRank)]


@final
class DistillationDefense(Defense[Distillation]):
    """Imitates a frozen copy of the original where it refuses and where it is to stay."""

    name = "distillation"
    original: nn.Module

    @contextmanager
    def prepared(self, model: nn.Module, *, seed: int) -> Iterator[None]:
        structure_of(model)  # refuses what is no decoder
        if any(map(is_sharded, model.parameters())):
            raise Unsupported(
                "A distillation keeps a copy of the model, which cannot be made of sharded weights.",
                cure="Use DistributedDataParallel or one process, or another defense.",
            )
        self.original = copy.deepcopy(model).requires_grad_(False).eval()
        initial = getattr(getattr(model, "config", None), "initializer_range", None)
        for name, value in model.named_parameters():
            if value.requires_grad and value.dim() > 1:
                drawn = torch.randn(value.shape, generator=torch_generator(seed, name))
                std = value.data.std() if initial is None else initial
                value.data.lerp_(drawn.to(value) * std, self.settings.noise)
        try:
            yield
        finally:
            del self.original

    def sides(self, model: nn.Module, batch: PairBatch, generator: torch.Generator) -> Generator[Side, None, None]:
        yield {"retain": Term(self.general(model, batch.harmless, batch.group))}
        rows = round(self.settings.random_rows * len(batch.harmless.input_ids))
        if rows:
            like = batch.harmless.input_ids
            drawn = torch.randint(vocabulary_of(model) or 1, (rows, like.shape[1]), generator=generator).to(like)
            text = Batch(drawn, torch.ones_like(drawn), drawn)
            yield {"random": Term(self.general(model, text, batch.group))}

    def general(self, model: nn.Module, batch: Batch, group: ProcessGroup) -> Tensor:
        """Divergence from the original at every token, those of the prompts included."""
        how: Any = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        seen = batch.attention_mask.bool() & (batch.labels != IGNORED).any(1, keepdim=True)  # none of a blank row
        if not hasattr(self, "original"):
            raise Unsupported(
                "Distillation measures against the original, which is kept while it trains and no longer.",
                cure="Evaluate during training: eval_strategy='steps'.",
            )
        with torch.no_grad():
            wanted = self.original(**how).logits[seen].float().log_softmax(-1)
        found = model(**how).logits[seen].float().log_softmax(-1)
        count = len(found) if group.size == 1 else sum(group.counts(len(found))) / group.size  # see `distributed.py`
        return functional.kl_div(found, wanted, reduction="sum", log_target=True) / max(1, count)
