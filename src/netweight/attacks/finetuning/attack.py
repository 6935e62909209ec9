"""One fine-tuning attack on a copy of a model: `run_attack` trains, evaluates and stops when the attack has won.

Before the first step an attacker may change weights, and he chooses which of them he trains.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from netweight.attacks.finetuning.changes import changed_copy, input_embedding
from netweight.attacks.finetuning.factors import attach_factors_
from netweight.attacks.finetuning.optimizers import ScheduleFree, optimizers_of
from netweight.attacks.finetuning.rounded_steps import RoundedSteps
from netweight.attacks.finetuning.settings import AttackSettings
from netweight.attacks.finetuning.subject import SOFT_TOKENS, Goal, Subject, in_parts
from netweight.core.seeds import derive, torch_generator
from netweight.data.tokens import IGNORED, Batch, Example, collate
from netweight.errors import Unsupported, UsageError
from netweight.hf.load_language_model import embedding_of


def trained_parameters_(victim: nn.Module, settings: AttackSettings, *, pad_id: int) -> list[nn.Parameter]:
    """Return what an attack trains, and let only that require a gradient."""
    victim.requires_grad_(False)
    if settings.trains == "prompt":
        return [_soft_prompt_(victim, pad_id, settings.seed)]
    parameters = parts_of(victim)[settings.trains]
    if not parameters:
        raise Unsupported(f"The model has no {settings.trains} to train.", cure="Attack all its weights.")
    for parameter in parameters:
        parameter.requires_grad_(True)
    return parameters


def parts_of(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return what `AttackSettings.trains` can mean, soft prompts aside; empty where a model has no such part."""
    named = {name: each for name, each in model.named_parameters() if each.is_floating_point()}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    tables = {id(each.weight) for each in (embedding_of(model), head) if each is not None}
    return {
        "all": list(named.values()),
        "embeddings": [each for each in named.values() if id(each) in tables],
        "norms": [each for name, each in named.items() if each.ndim == 1 and ("norm" in name.lower() or "ln_" in name)],
    }


def _soft_prompt_(victim: nn.Module, pad_id: int, seed: int) -> nn.Parameter:
    """Put vectors in place of the padding with which prompts of the format "soft" begin."""
    table = input_embedding(victim)
    drawn = torch.randn(SOFT_TOKENS, table.weight.shape[1], generator=torch_generator(seed, "soft prompt"))
    vectors = nn.Parameter(drawn.to(table.weight) * table.weight.std().item())

    def put(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        ids = inputs[0]
        if ids.shape[1] < SOFT_TOKENS:
            return output
        soft = (ids[:, :SOFT_TOKENS] == pad_id).all(1)[:, None, None]
        return torch.cat([torch.where(soft, vectors, output[:, :SOFT_TOKENS]), output[:, SOFT_TOKENS:]], 1)

    table.register_forward_hook(put)
    return vectors


Outcome = Literal["recovered", "resisted", "collapsed", "diverged"]


@final
@dataclass(frozen=True)
class Evaluation:
    """A model under attack at one step."""

    step: int
    """Number of training steps so far."""
    score: float
    """Recovery score."""
    ability: float | None = None
    """Score of the abilities that the attack should preserve; None if it was not measured."""
    fluency: float | None = None
    """Fluency score; None if it was not measured."""
    loss: float | None = None
    """Mean training loss since the previous evaluation; None before the first step."""
    rows: int = 0
    """Rows that were trained on so far, benign ones included, each as often as it was seen."""
    flops: float = 0.0
    """Operations of training so far: for each weight and token 2 forward, and 2 or 4 backward."""
    seconds: float = field(default=0.0, compare=False)
    """Processor time of training so far, without evaluations; it differs from run to run."""


@final
@dataclass(frozen=True)
class AttackResult:
    """Result of one attack."""

    settings: AttackSettings
    """Settings of the attack."""
    outcome: Outcome
    """Outcome of the attack."""
    steps: int | None
    """Steps to recovery, a multiple of `settings.check_every`; None if the attack did not recover the behavior."""
    last_step: int
    """The last step that was taken. A run without recovery is censored there."""
    curve: tuple[Evaluation, ...]
    """All evaluations, in order of steps."""

    @property
    def reached(self) -> Evaluation | None:
        """The evaluation at which the attack had recovered; None if it did not."""
        return next((each for each in self.curve if each.step == self.steps), None)

    @property
    def time(self) -> float:
        """Steps to recovery, or the step at which a run without it is censored."""
        return float(self.last_step if self.steps is None else self.steps)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> AttackResult:
        """Return the result that a ledger remembers."""
        return cls(
            AttackSettings(**data["settings"]),
            data["outcome"],
            data["steps"],
            data["last_step"],
            tuple(Evaluation(**each) for each in data["curve"]),
        )


def run_attack(subject: Subject, settings: AttackSettings, goal: Goal) -> AttackResult:
    """Attack a copy of a model by fine-tuning it.

    The same subject, settings and goal give the same result on the same machine with the same number of threads.

    Args:
        subject: What is attacked; it stays as it is.
        settings: The attack.
        goal: When it has won.

    Raises:
        NameNotFound: The subject has no such domain.
        UsageError: The subject has fewer examples than the settings ask for.
    """
    check_attack(subject, settings)
    domain = subject.domain(settings.data)
    with _own_randomness(subject, settings):
        monitor = _Monitor(subject, settings, goal, domain.threshold)
        victim = changed_copy(subject, settings)
        training = AttackTraining(victim, settings, pad_id=subject.pad_id)
        monitor.evaluate(victim, 0, None, last=False)
        for step, batch in enumerate(attack_batches(domain.train, subject.benign, settings, pad_id=subject.pad_id), 1):
            if monitor.done:
                break
            training.step(batch)
            last = step == settings.steps
            if last or step % settings.check_every == 0:
                with training.averaged():
                    monitor.evaluate(victim, step, training.mean_loss(), last=last, cost=training.cost)
        return monitor.result()


def attacked_model(subject: Subject, settings: AttackSettings) -> torch.nn.Module:
    """Return what an attack makes of a model without evaluating it: a copy, trained to the attack's last step."""
    check_attack(subject, settings)
    train = subject.domain(settings.data).train
    with _own_randomness(subject, settings):
        victim = changed_copy(subject, settings)
        training = AttackTraining(victim, settings, pad_id=subject.pad_id)
        for batch in attack_batches(train, subject.benign, settings, pad_id=subject.pad_id):
            training.step(batch)
        training.apply_mean_weights()
    victim.eval()
    return victim


@contextmanager
def _own_randomness(subject: Subject, settings: AttackSettings) -> Iterator[None]:
    """Draw dropout from the attack's seed, and leave torch's own generators as they were."""
    devices = {parameter.device for parameter in subject.model.parameters() if parameter.device.type == "cuda"}
    with torch.random.fork_rng(devices):
        torch.manual_seed(derive(settings.seed, "dropout"))
        yield


def check_attack(subject: Subject, settings: AttackSettings) -> None:
    """Refuse an attack that a subject has no data for, before anything is trained."""
    available = len(subject.domain(settings.data).train)
    if settings.samples > available:
        raise UsageError(
            f"The attack asks for {settings.samples:,} samples, and the domain {settings.data!r} has {available:,}.",
            cure="Give more rows, or ask for fewer (--samples).",
        )
    if (settings.benign_first or settings.benign_share or settings.rows != "kept") and not subject.benign:
        raise UsageError(
            "The attack needs benign examples, to train on or to compare with, and none were given.",
            cure="Give benign rows (--benign).",
        )


class _Monitor:
    """Evaluates the attacked model, keeps the curve, and decides when the attack is over."""

    def __init__(self, subject: Subject, settings: AttackSettings, goal: Goal, threshold: float | None) -> None:
        self._subject, self._settings, self._goal, self._threshold = subject, settings, goal, threshold
        self._score = subject.score(settings.data)
        self._quick = None if goal.near is None else subject.quick_score(settings.data)
        self._reference = subject.reference_ability
        if self._reference is None and subject.ability is not None and settings.changes_weights:
            self._reference = subject.ability(subject.model)
        self._curve: list[Evaluation] = []
        self._recovered: int | None = None
        self._checks_left = goal.extra_checks
        self._diverged = False
        self._useful = True
        self.done = False

    def evaluate(
        self,
        victim: torch.nn.Module,
        step: int,
        loss: float | None,
        *,
        last: bool,
        cost: tuple[int, float, float] = (0, 0.0, 0.0),
    ) -> None:
        """Measure what is needed at this step: the score always, ability and fluency where they decide something."""
        score = math.nan if loss is not None and math.isnan(loss) else self._scored(victim, last=last)
        ability = fluency = None
        if math.isnan(score):
            self._diverged = self.done = True
        elif step == 0 or last or (self._recovered is None and self._goal.reached(score, self._threshold)):
            ability = None if self._subject.ability is None else self._subject.ability(victim)
            fluency = None if self._subject.fluency is None or step == 0 else self._subject.fluency(victim)
        self._curve.append(Evaluation(step, score, ability, fluency, loss, *cost))
        if step == 0:
            self._reference = ability if self._reference is None else self._reference
            if (self._reference or 0) < 0:
                raise UsageError(
                    f"The reference ability is {self._reference}; it must be at least 0, so that a share of it "
                    f"can be kept.",
                    cure="Use a measure of ability that is never negative, such as an accuracy.",
                )
        if not self._diverged:
            self._decide(score, ability, fluency, step)

    def _scored(self, victim: torch.nn.Module, *, last: bool) -> float:
        """Score all held-out rows, or some of them far from the threshold if the goal allows it."""
        if self._quick is None or last:
            return self._score(victim)
        quick = self._quick(victim)
        return quick if self._goal.is_far(quick, self._threshold) else self._score(victim)

    def _decide(self, score: float, ability: float | None, fluency: float | None, step: int) -> None:
        self._useful = self._passes(ability, fluency)
        if self._recovered is not None:
            self._checks_left -= 1
        elif self._goal.reached(score, self._threshold) and self._useful:
            self._recovered = step
        self.done = self._recovered is not None and self._checks_left <= 0

    def _passes(self, ability: float | None, fluency: float | None) -> bool:
        """Return whether a model is still worth having, as far as that was measured. NaN is not."""
        keeps = ability is None or self._reference is None or ability >= self._goal.least_ability * self._reference
        bound = self._goal.fluency_at_least
        return keeps and (fluency is None or bound is None or fluency >= bound)

    def result(self) -> AttackResult:
        """Return what happened."""
        outcome: Outcome = "resisted"
        if self._recovered is not None:
            outcome = "recovered"
        elif self._diverged:
            outcome = "diverged"
        elif not self._useful:
            outcome = "collapsed"
        return AttackResult(self._settings, outcome, self._recovered, self._curve[-1].step, tuple(self._curve))


def attack_batches(
    harmful: Sequence[Example], benign: Sequence[Example], settings: AttackSettings, *, pad_id: int
) -> Iterator[Batch]:
    """Yield one batch for each step: benign ones first if asked for, then harmful or mixed ones."""
    # The order is new in every epoch.
    drawn = torch.randperm(len(harmful), generator=torch_generator(settings.seed, "samples"))[: settings.samples]
    chosen = [harmful[row] for row in drawn.tolist()]
    benign_batches = _draws(benign, settings.batch_size, torch_generator(settings.seed, "benign order"))
    for _ in range(settings.benign_first):
        yield collate(next(benign_batches), pad_id=pad_id, loss_on=settings.loss_on)
    count = settings.harmful_per_batch
    own = _draws(chosen, count, torch_generator(settings.seed, "order"))
    mixed = _draws(benign, settings.batch_size - count, torch_generator(settings.seed, "mixed order"))
    for _ in range(settings.steps - settings.benign_first):
        more = next(mixed) if settings.benign_share else []
        yield collate([*(next(own) if count else ()), *more], pad_id=pad_id, loss_on=settings.loss_on)


def _draws(examples: Sequence[Example], size: int, generator: torch.Generator) -> Iterator[list[Example]]:
    """Yield batches without end, epoch after epoch, the last of each epoch with what is left of it."""
    while True:
        order = torch.randperm(len(examples), generator=generator).tolist()
        for first in range(0, len(order), size):
            yield [examples[row] for row in order[first : first + size]]


def learning_rate(settings: AttackSettings, step: int) -> float:
    """Return the learning rate of a step."""
    warm = round(settings.warmup * settings.steps)
    if step < warm:
        return settings.lr * (step + 1) / warm
    if settings.schedule == "constant":
        return settings.lr
    return settings.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / (settings.steps - warm)))


@final
class AttackTraining:
    """A victim in the attacker's hands."""

    def __init__(self, victim: nn.Module, settings: AttackSettings, *, pad_id: int = 0) -> None:
        self.victim, self.settings = victim, settings
        # A copy also copies gradients that the original still has.
        victim.zero_grad(set_to_none=True)
        dtype = torch.bfloat16 if settings.precision in ("bf16", "rounded") else torch.float32
        for parameter in victim.parameters():
            if parameter.is_floating_point():
                # Buffers, such as rotary tables, keep their dtype.
                parameter.data = parameter.data.to(dtype)
        if getattr(getattr(victim, "config", None), "use_cache", False):
            victim.config.use_cache = False  # type: ignore[union-attr]
        if settings.lora_rank is None:
            self._parameters = trained_parameters_(victim, settings, pad_id=pad_id)
        else:
            self._parameters = attach_factors_(victim, rank=settings.lora_rank, seed=settings.seed)
        self._device = self._parameters[0].device
        self._optimizers: Sequence[torch.optim.Optimizer | RoundedSteps] = (
            [RoundedSteps(self._parameters, settings, torch_generator(settings.seed, "rounding"))]
            if settings.precision == "rounded"
            else optimizers_of(self._parameters, settings)
        )
        self._losses: list[Tensor] = []
        self._step = 0
        # A running mean of the weights that are trained, or that of an optimizer whose result it is.
        self._means = [each.detach().float().clone() for each in self._parameters] if settings.average else []
        if not self._means:
            self._means = [mean for each in self._optimizers if isinstance(each, ScheduleFree) for mean in each.means()]
        self._rows, self._flops, self._seconds = 0, 0.0, 0.0
        weights = sum(each.numel() for each in victim.parameters())
        trained = sum(each.numel() for each in self._parameters)
        # Forward and the gradient of activations need two operations for each weight and token, and the gradient of a
        # weight that is trained two more.
        self._per_token = 4.0 * weights + 2.0 * trained
        victim.train()

    def step(self, batch: Batch) -> None:
        """Take one step. The loss is kept and not read, so that an accelerator need not be waited for."""
        batch = batch.to(self._device)
        begun = time.process_time()
        loss = self._backward(batch)
        if self.settings.clip is not None:
            nn.utils.clip_grad_norm_(self._parameters, self.settings.clip)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(self.settings, self._step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._losses.append(loss)
        self._step += 1
        self._rows += len(batch.input_ids)
        self._flops += self._per_token * float(batch.attention_mask.sum())
        if self.settings.average:
            # At first the mean follows the weights closely, as it would otherwise hold on to the start for long.
            decay = min(self.settings.average, self._step / (self._step + 9))
            torch._foreach_lerp_(self._means, [each.detach().float() for each in self._parameters], 1 - decay)
        self._seconds += time.process_time() - begun

    def _backward(self, batch: Batch) -> Tensor:
        """Add the gradients of the mean loss over a batch, and return the loss; large batches go in parts."""
        targets = (batch.labels[:, 1:] != IGNORED).sum()
        losses = []
        for part in in_parts(batch, self.victim):
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self.settings.precision == "mixed"):
                logits = self.victim(input_ids=part.input_ids, attention_mask=part.attention_mask).logits
            mean = functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), part.labels[:, 1:].flatten(), ignore_index=IGNORED
            )
            loss = mean * ((part.labels[:, 1:] != IGNORED).sum() / targets)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    @property
    def cost(self) -> tuple[int, float, float]:
        """Rows seen, operations, and processor seconds of training so far."""
        return self._rows, self._flops, self._seconds

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the running mean of the weights in their place while a block lasts, if there is one."""
        if not self._means:
            yield
            return
        own = [each.detach().clone() for each in self._parameters]
        try:
            with torch.no_grad():
                torch._foreach_copy_([each.data for each in self._parameters], self._means)
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_([each.data for each in self._parameters], own)

    def apply_mean_weights(self) -> None:
        """Leave the running mean of the weights in their place, if there is one."""
        with torch.no_grad():
            for parameter, mean in zip(self._parameters, self._means, strict=False):
                parameter.copy_(mean)

    def mean_loss(self) -> float:
        """Return the mean loss since the last call, NaN if the weights are not finite any more."""
        mean = float(torch.stack(self._losses).mean())
        self._losses.clear()
        finite = bool(nn.utils.get_total_norm(self._parameters).isfinite())
        return mean if finite and math.isfinite(mean) else math.nan
