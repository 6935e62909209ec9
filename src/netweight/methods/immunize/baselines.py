"""The defenses that RepNoise is compared with, from plain fine-tuning to those that run an attack as they train.

First those of a loss alone or under disturbed states, then security vectors, those that measure against the original
(distillation, RMU, circuit breaking, TAR), and those that move weights (Booster, TAR, self-destruction).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from netweight.core.seeds import torch_generator
from netweight.data.tokens import IGNORED, Batch
from netweight.errors import Unsupported, UsageError
from netweight.hf.load_language_model import embedding_of, structure_of, vocabulary_of
from netweight.methods.immunize.defense import (
    Defense,
    PairBatch,
    S,
    Side,
    Targets,
    Term,
    answer_loss,
    blank,
    mean_of_all,
    response_loss,
    same_draws_after,
    seen,
)
from netweight.methods.immunize.distributed import ProcessGroup, is_sharded, put
from netweight.methods.immunize.repnoise import harmful_terms
from netweight.methods.immunize.settings import (
    RMU,
    TAR,
    AdversarialLoss,
    Booster,
    CircuitBreaking,
    Distillation,
    GradientAscent,
    LatentAdversarial,
    RandomWeights,
    RepNoise,
    SafetyTraining,
    SecurityVectors,
    SelfDestruction,
    Vaccine,
)
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


class _LooksAhead(Defense[S]):
    """Takes gradients of a decoder as it computes the loss."""

    looks_ahead = True

    @contextmanager
    def prepared(self, model: nn.Module, *, seed: int) -> Iterator[None]:
        structure_of(model)  # refuses what is no decoder
        yield


@final
class VaccineDefense(_LooksAhead[Vaccine]):
    """Trains the harmless side, perturbed along its gradient."""

    name = "vaccine"

    def sides(self, model: nn.Module, batch: PairBatch, generator: torch.Generator) -> Generator[Side, None, None]:
        parts, group = structure_of(model), batch.group
        blocks = list(parts.blocks)

        def slopes(rows: Batch) -> tuple[list[Tensor], Tensor]:
            """Gradients of a loss by the blocks' states, and the norm of each."""
            still = {name: rows.labels.new_zeros((*rows.labels.shape, parts.hidden_size)).float() for name in blocks}
            found = _slopes(model, still, lambda: response_loss(model, rows, group))
            norms = torch.stack([grad.norm() for grad in found])
            if group.size > 1:  # of all rows; their gradients' common factor, see `distributed.py`, is divided out
                norms = group.sum(norms.square()).sqrt()
            return found, norms.clamp(min=torch.finfo(torch.float32).tiny)

        count, chosen = math.ceil(self.settings.share * len(blocks)), torch.arange(len(blocks))
        if count < len(blocks):
            chosen = torch.multinomial(slopes(batch.harmful)[1].cpu(), count, generator=generator)
        grads, norms = slopes(batch.harmless)
        norm = norms[chosen.to(norms.device)].norm()
        # Hooks stay until the loss has gone backward.
        with _disturbed(model, {blocks[one]: self.settings.rho * grads[one] / norm for one in chosen.tolist()}):
            yield {"retain": Term(response_loss(model, batch.harmless, group))}


def _disturbed(model: nn.Module, shifts: Mapping[str, Tensor]) -> AbstractContextManager[None]:
    """Add to what modules put out at the first tokens."""

    def adding(states: Tensor, shift: Tensor) -> Tensor:
        shift = shift[:, : states.shape[1]].to(states.dtype)
        return states + functional.pad(shift, (0, 0, 0, states.shape[1] - shift.shape[1]))

    return edit_outputs(model, {name: partial(adding, shift=shift) for name, shift in shifts.items()})


def _slopes(model: nn.Module, shifts: Mapping[str, Tensor], loss: Callable[[], Tensor]) -> list[Tensor]:
    """Gradients of a loss by what disturbs it, with the dropout that comes next."""
    for shift in shifts.values():
        shift.requires_grad_(True)
    with same_draws_after(model.parameters()), _disturbed(model, shifts):
        return list(torch.autograd.grad(loss(), list(shifts.values())))


@final
class LatentAdversarialDefense(_LooksAhead[LatentAdversarial]):
    """Trains to refuse, and not to answer, under what disturbs the prompt's states the most."""

    name = "latent-adversarial"

    def sides(self, model: nn.Module, batch: PairBatch, generator: torch.Generator) -> Generator[Side, None, None]:
        settings, group, prompts = self.settings, batch.group, batch.harmless
        inside = (prompts.attention_mask.bool() & (prompts.labels == IGNORED))[..., None]
        shape = (*inside.shape[:2], structure_of(model).hidden_size)
        embedding = [name for name, part in model.named_modules() if part is embedding_of(model)]
        places = [*embedding[:1], *_blocks_at(model, 9, 17, 25, 31)]  # the authors count from 0
        shifts = {place: torch.zeros(shape, device=inside.device) for place in places}
        for _ in range(settings.search_steps):
            slopes = _slopes(
                model, shifts,
                lambda: response_loss(model, batch.harmful, group) + self.unlikely(model, prompts, group),
            )  # fmt: skip
            for (place, shift), slope in zip(list(shifts.items()), slopes, strict=True):
                down = slope * inside / (slope * inside).norm(dim=-1, keepdim=True).clamp(min=1e-12)
                moved = shift.detach() - 2.5 * settings.bound / settings.search_steps * down
                shifts[place] = moved * (settings.bound / moved.norm(dim=-1, keepdim=True).clamp(min=settings.bound))
        with _disturbed(model, shifts):  # what is kept besides weighs three times as much
            yield {"retain": Term(response_loss(model, batch.harmless, group), 1 / 3)}
            yield {"harmful": Term(self.unlikely(model, batch.harmful, group), 1 / 3)}

    def unlikely(self, model: nn.Module, batch: Batch, group: ProcessGroup) -> Tensor:
        """Mean of `-log(1 - p)` over the answers' tokens; those with log p below -5 are unlikely enough."""
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits[:, :-1]
        answers = batch.labels[:, 1:] != IGNORED
        logs, own = logits[answers].float().log_softmax(-1), batch.labels[:, 1:][answers][:, None]
        others = logs.scatter(-1, own, -math.inf).logsumexp(-1)
        return mean_of_all(torch.where(logs.gather(-1, own)[:, 0] < -5, 0.0, -others), group)


def _blocks_at(model: nn.Module, *numbers: int) -> list[str]:
    """The blocks at the depths of some of 32, counted from 1."""
    blocks = list(structure_of(model).blocks)
    return list(dict.fromkeys(blocks[math.ceil(number / 32 * len(blocks)) - 1] for number in numbers))


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


class _WithOriginal(Defense[S]):
    """A defense that measures against a frozen copy of the original."""

    _copy: nn.Module | None = None

    @property
    def original(self) -> nn.Module:
        """The copy, which is kept while the model trains."""
        if self._copy is None:
            raise Unsupported(
                f"{self.name} measures against the original, which is kept while it trains and no longer.",
                cure="Evaluate during training: eval_strategy='steps'.",
            )
        return self._copy

    @contextmanager
    def prepared(self, model: nn.Module, *, seed: int) -> Iterator[None]:
        structure_of(model)  # refuses what is no decoder
        _whole_alone(self, model)
        self._copy = copy.deepcopy(model).requires_grad_(False).eval()
        try:
            yield
        finally:
            self._copy = None

    def both(self, model: nn.Module, batch: Batch, **options: Any) -> tuple[Any, Any]:
        """What the original and the model say of a batch."""
        how: Any = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, **options}
        with torch.no_grad():
            original = self.original(**how)
        return original, model(**how)

    def moved(self, model: nn.Module, batch: Batch, group: ProcessGroup) -> tuple[Any, Tensor]:
        """What the model says of a batch, and the mean distance of its states from the original's at every depth."""
        original, found = self.both(model, batch, output_hidden_states=True)
        apart = [
            (one[seen(batch)].float() - other[seen(batch)].float()).norm(dim=-1)
            for one, other in zip(found.hidden_states, original.hidden_states, strict=True)
        ]
        return found, torch.stack([mean_of_all(each, group) for each in apart]).mean()


def _whole_alone(defense: Defense[Any], model: nn.Module) -> None:
    if any(map(is_sharded, model.parameters())):
        raise Unsupported(
            f"The defense {defense.name} copies weights, which it cannot where they are sharded.",
            cure="Use DistributedDataParallel or one process, or another defense.",
        )


def _rows(batch: Batch, chosen: Tensor) -> Batch:
    """Some rows of a batch; where there are none, the batch with nothing to be predicted."""
    parts = (batch.input_ids, batch.attention_mask, batch.labels)
    return Batch(*(part[chosen] for part in parts)) if chosen.any() else blank(batch)


@final
class DistillationDefense(_WithOriginal[Distillation]):
    """Imitates a frozen copy of the original where it refuses and where it is to stay."""

    name = "distillation"

    @contextmanager
    def prepared(self, model: nn.Module, *, seed: int) -> Iterator[None]:
        with super().prepared(model, seed=seed):
            initial = getattr(getattr(model, "config", None), "initializer_range", None)
            for name, value in model.named_parameters():
                if value.requires_grad and value.dim() > 1:
                    drawn = torch.randn(value.shape, generator=torch_generator(seed, name))
                    std = value.data.std() if initial is None else initial
                    value.data.lerp_(drawn.to(value) * std, self.settings.noise)
            yield

    def sides(self, model: nn.Module, batch: PairBatch, generator: torch.Generator) -> Generator[Side, None, None]:
        yield self.kept(model, batch.harmless, batch.group, "retain")
        rows = round(self.settings.random_rows * len(batch.harmless.input_ids))
        if rows:
            like = batch.harmless.input_ids
            drawn = torch.randint(vocabulary_of(model) or 1, (rows, like.shape[1]), generator=generator).to(like)
            yield self.kept(model, Batch(drawn, torch.ones_like(drawn), drawn), batch.group, "random")

    def kept(self, model: nn.Module, batch: Batch, group: ProcessGroup, name: str = "general") -> Side:
        """Divergence from the original at every token."""
        wanted, found = (each.logits[seen(batch)].float().log_softmax(-1) for each in self.both(model, batch))
        return {
            name: Term(mean_of_all(functional.kl_div(found, wanted, reduction="none", log_target=True).sum(-1), group))
        }


@final
class RMUDefense(_WithOriginal[RMU]):
    """Steers states of harmful answers to a random direction, and holds all others where the original has them."""

    name = "rmu"

    @contextmanager
    def prepared(self, model: nn.Module, *, seed: int) -> Iterator[None]:
        parts = structure_of(model)
        number = self.settings.block or math.ceil(len(parts.blocks) / 4)
        if number > len(parts.blocks):
            raise UsageError(
                f"There is no block {number}: {type(model).__name__} has {len(parts.blocks)}.",
                cure="Give a lower block (--set rmu.block=).",
            )
        self.place = list(parts.blocks)[number - 1]
        drawn = torch.rand(parts.hidden_size, generator=torch_generator(seed, "direction"))
        self.wanted = self.settings.coefficient * drawn / drawn.norm()
        with super().prepared(model, seed=seed):
            yield

    def sides(self, model: nn.Module, batch: PairBatch, generator: torch.Generator) -> Generator[Side, None, None]:
        with capture(model, [self.place], gradients=True) as outputs:
            model(input_ids=batch.harmful.input_ids, attention_mask=batch.harmful.attention_mask)
        found = outputs[self.place][batch.harmful.labels != IGNORED].float()
        yield {"steering": Term(mean_of_all((found - self.wanted.to(found)).square().mean(-1), batch.group))}
        yield self.kept(model, batch.harmless, batch.group, "retain")

    def kept(self, model: nn.Module, batch: Batch, group: ProcessGroup, name: str = "general") -> Side:
        """Squared distance from the original's states at every token."""
        with capture(model, [self.place], gradients=True) as found, capture(self.original, [self.place]) as wanted:
            self.both(model, batch)
        apart = found[self.place][seen(batch)].float() - wanted[self.place][seen(batch)].float()
        return {name: Term(mean_of_all(apart.square().mean(-1), group), self.settings.alpha)}


@final
class CircuitBreakingDefense(_WithOriginal[CircuitBreaking]):
    """Lowers how alike states of harmful answers and the original's are, and holds all others."""

    name = "circuit-breaking"

    def sides(self, model: nn.Module, batch: PairBatch, generator: torch.Generator) -> Generator[Side, None, None]:
        places, answers = _blocks_at(model, 10, 20), batch.harmful.labels != IGNORED
        with capture(model, places, gradients=True) as found, capture(self.original, places) as wanted:
            self.both(model, batch.harmful)
        alike = [
            functional.cosine_similarity(found[place][answers].float(), wanted[place][answers].float(), dim=-1).relu()
            for place in places
        ]
        yield {"rerouting": Term(mean_of_all(torch.stack(alike, -1).mean(-1), batch.group), self.settings.rerouting)}
        yield self.kept(model, batch.harmless, batch.group, "retain")

    def kept(self, model: nn.Module, batch: Batch, group: ProcessGroup, name: str = "general") -> Side:
        """How far states moved at every depth."""
        return {name: Term(self.moved(model, batch, group)[1], self.settings.held)}


@contextmanager
def _returning(weights: Sequence[Tensor]) -> Iterator[None]:
    """Put weights back after a block in which they change; gradients that it left stay."""
    before = [value.detach().clone() for value in weights]
    try:
        yield
    finally:
        with torch.no_grad():
            for value, old in zip(weights, before, strict=True):
                value.copy_(old)


def _gradients(loss: Tensor, weights: Sequence[Tensor], group: ProcessGroup, *, keep: bool = False) -> list[Tensor]:
    """The gradients by all weights of all processes' loss; no weight's `grad` changes."""
    found = torch.autograd.grad(loss, weights, retain_graph=keep, allow_unused=True, materialize_grads=True)
    group.average(found)
    return list(found)


class _MovesWeights(_LooksAhead[S]):
    """Looks ahead by gradients at other weights."""

    @contextmanager
    def prepared(self, model: nn.Module, *, seed: int) -> Iterator[None]:
        _whole_alone(self, model)
        with super().prepared(model, seed=seed):
            yield


@final
class BoosterDefense(_MovesWeights[Booster]):
    """Trains the harmless side, and lowers what a step down the harmful loss would gain."""

    name = "booster"

    def sides(self, model: nn.Module, batch: PairBatch, generator: torch.Generator) -> Generator[Side, None, None]:
        yield self.kept(model, batch.harmless, batch.group, "retain")
        weights = [value for value in model.parameters() if value.requires_grad]
        with same_draws_after(weights):
            loss = response_loss(model, batch.harmful, batch.group)  # the same dropout as below
        gradients = _gradients(loss, weights, batch.group, keep=True)
        length = self.settings.step / max(1e-12, float(nn.utils.get_total_norm(gradients)))
        yield {"harmful": Term(loss, self.settings.strength)}
        del loss
        with _returning(weights):
            with torch.no_grad():
                for value, gradient in zip(weights, gradients, strict=True):
                    value.sub_(gradient, alpha=length)
            # Its gradient is taken as one by the weights before the step.
            yield {"attacked": Term(response_loss(model, batch.harmful, batch.group), -self.settings.strength)}


@final
class TARDefense(_WithOriginal[TAR]):
    """Attacks with some rows' harmful answers, and raises the uncertainty of others' on the attack's way."""

    name = "tar"
    looks_ahead = True

    def sides(self, model: nn.Module, batch: PairBatch, generator: torch.Generator) -> Generator[Side, None, None]:
        settings, group = self.settings, batch.group
        yield self.kept(model, batch.harmless, group, "retain")
        weights = [value for value in model.parameters() if value.requires_grad]
        drawn = (0.1, 1.0, 2.0)[int(torch.randint(3, (), generator=generator))]
        attack = torch.optim.AdamW(weights, lr=settings.attack_lr * drawn)
        real = (batch.harmful.labels != IGNORED).any(1)  # a process without rows of its own has one that counts nowhere
        numbers = real.cumsum(0) + sum(group.counts(int(real.sum()))[: group.rank])
        used, others = (_rows(batch.harmful, numbers % 2 == odd) for odd in (1, 0))
        with _returning(weights):
            for step in range(1, settings.attack_steps + 1):
                found = _gradients(response_loss(model, used, group), weights, group)
                held = [value.grad for value in weights]
                for value, gradient in zip(weights, found, strict=True):
                    value.grad = gradient
                attack.step()
                for value, former in zip(weights, held, strict=True):
                    value.grad = former
                if step % settings.look_every == 0 or step == settings.attack_steps:
                    # Its gradient, too, is taken as one by the weights before the attack; later looks weigh more.
                    weight = settings.strength * math.exp((step - settings.attack_steps) / 16)
                    yield {"uncertainty": Term(self.uncertainty(model, others, group), -weight)}

    def kept(self, model: nn.Module, batch: Batch, group: ProcessGroup, name: str = "general") -> Side:
        """Cross-entropy of the answers, and how far states moved at every depth."""
        found, moved = self.moved(model, batch, group)
        return {
            name: Term(answer_loss(found.logits, Targets.of_labels(batch.labels, group))),
            f"{name} moved": Term(moved),
        }

    def uncertainty(self, model: nn.Module, batch: Batch, group: ProcessGroup) -> Tensor:
        """Mean entropy of what is predicted for the answers' tokens."""
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        found = logits[:, :-1][batch.labels[:, 1:] != IGNORED].float().log_softmax(-1)
        return mean_of_all(-(found.exp() * found).sum(-1), group)


@final
class SelfDestructionDefense(_MovesWeights[SelfDestruction]):
    """Trains the harmless side, ascends on the harmful one, and turns its gradient against that of what is kept."""

    ascent = RepNoise(beta=0.0)  # at every depth, through the unembedding

    name = "self-destruction"
    needs_kept = True

    def sides(self, model: nn.Module, batch: PairBatch, generator: torch.Generator) -> Generator[Side, None, None]:
        self._harmful = batch.harmful
        yield {"retain": Term(response_loss(model, batch.harmless, batch.group))}
        yield {"ascent": Term(harmful_terms(model, batch, self.ascent, generator=generator)[1], -1.0)}

    def kept(self, model: nn.Module, batch: Batch, group: ProcessGroup, name: str = "general") -> Side:
        """Cross-entropy of the answers, and the cosine of its gradient with that of the step's harmful answers."""
        weights = [value for value in model.parameters() if value.requires_grad]

        def slopes(rows: Batch) -> list[Tensor]:
            with same_draws_after(weights):
                return _gradients(response_loss(model, rows, group), weights, group)

        both = [(rows, slopes(rows)) for rows in (batch, self._harmful)]
        lengths = [max(1e-12, float(nn.utils.get_total_norm(own))) for _, own in both]
        alike = sum(float((one * other).sum()) for one, other in zip(both[0][1], both[1][1], strict=True))
        alike /= lengths[0] * lengths[1]
        pulls = [torch.zeros_like(value) for value in weights]
        for here, there in ((0, 1), (1, 0)):
            rows, own = both[here]
            with _returning(weights):
                with torch.no_grad():
                    for value, one, other in zip(weights, own, both[there][1], strict=True):
                        value.add_(other / lengths[there] - alike * one / lengths[here], alpha=self.settings.distance)
                moved = slopes(rows)
            for pull, new, old in zip(pulls, moved, own, strict=True):
                pull.add_(new - old, alpha=1 / (self.settings.distance * lengths[here]))
        # A sum whose value is the cosine and whose gradient is what was measured.
        linear = torch.stack([(value * pull).sum() for value, pull in zip(weights, pulls, strict=True)]).sum()
        return {
            **super().kept(model, batch, group, name),
            "cosine": Term(linear - linear.detach() + alike, self.settings.coupling),
        }
