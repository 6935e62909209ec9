"""One fine-tuning attack on a copy of a model: `run_attack` trains, evaluates and stops when the attack has won.

Before the first step an attacker may change weights, and he chooses which of them he trains.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from netweight.attacks.finetuning.settings import AttackSettings
from netweight.attacks.finetuning.subject import SOFT_TOKENS, Goal, Subject
from netweight.core.lazy import library
from netweight.core.seeds import derive, torch_generator
from netweight.data.tokens import IGNORED, Batch, Example, collate
from netweight.errors import Unsupported, UsageError
from netweight.hf.load_language_model import embedding_of


def has_soap() -> bool:
    """Return whether the package of the second-order optimizer is installed."""
    return importlib.util.find_spec("pytorch_optimizer") is not None


_TELLS = 0.8  # a token tells prompts apart whose share of one kind is so much greater


def changed_copy(subject: Subject, settings: AttackSettings) -> nn.Module:
    """Return a copy of a subject's model, changed as an attack asks for before its first step."""
    victim = copy.deepcopy(subject.model)
    if settings.of_other:
        _mix_(victim, subject, settings.of_other)
    if settings.bits is not None:
        round_(victim, settings.bits)
    if settings.rows != "kept":
        _change_rows_(victim, subject, settings)
    if settings.noise:
        _add_noise_(victim, settings)
    return victim


@torch.no_grad()
def _add_noise_(victim: nn.Module, settings: AttackSettings) -> None:
    """Add noise to matrices, each by its own spread: a start beside a minimum that a defense dug."""
    for name, parameter in victim.named_parameters():
        if parameter.is_floating_point() and parameter.ndim >= 2:
            drawn = torch.randn(parameter.shape, generator=torch_generator(settings.seed, "noise", name))
            parameter.add_(drawn.to(parameter), alpha=float(settings.noise * parameter.float().std()))


@torch.no_grad()
def _mix_(victim: nn.Module, subject: Subject, share: float) -> None:
    if subject.other is None:
        raise UsageError("The attack mixes another model in, and the subject has none.", cure="Bring one.")
    for name, parameter in victim.named_parameters():
        if parameter.is_floating_point():
            parameter.lerp_(subject.other[name].to(parameter), share)


@torch.no_grad()
def round_(model: nn.Module, bits: int) -> None:
    """Round matrices to `2^bits - 1` levels, evenly between plus and minus each row's largest weight."""
    most = 2 ** (bits - 1) - 1
    for parameter in model.parameters():
        if parameter.ndim == 2 and parameter.is_floating_point():
            step = parameter.abs().amax(1, keepdim=True).clamp_min(1e-12) / most
            parameter.copy_((parameter / step).round() * step)


@torch.no_grad()
def _change_rows_(victim: nn.Module, subject: Subject, settings: AttackSettings) -> None:
    table = _embedding(victim).weight
    harmful, benign = telling_tokens(subject.domain(settings.data).train, subject.benign)
    if not harmful:
        raise UsageError("No token tells harmful prompts from benign ones.", cure='Take rows="kept".')
    if settings.rows == "copied":
        table[harmful] = table[benign].mean(0) if benign else table.mean(0)
    else:
        drawn = torch.randn(len(harmful), table.shape[1], generator=torch_generator(settings.seed, "rows"))
        table[harmful] = drawn.to(table) * table.std()


def telling_tokens(harmful: Sequence[Example], benign: Sequence[Example]) -> tuple[list[int], list[int]]:
    """Return the tokens that are in many more harmful prompts than benign ones, and the other way round."""
    shares = []
    for examples in (harmful, benign):
        found = Counter(token for example in examples for token in set(example.prompt))
        shares.append({token: count / len(examples) for token, count in found.items()})
    return tuple(
        sorted(token for token, share in one.items() if share - other.get(token, 0.0) > _TELLS)
        for one, other in (shares, shares[::-1])
    )  # type: ignore[return-value]


def _embedding(model: nn.Module) -> nn.Embedding:
    found = embedding_of(model)
    if found is None:
        raise Unsupported("The model has no embedding of tokens that could be found.", cure="Attack all its weights.")
    return found


def trained_parameters_(victim: nn.Module, settings: AttackSettings, *, pad_id: int) -> list[nn.Parameter]:
    """Return what an attack trains, and let only that require a gradient."""
    victim.requires_grad_(False)
    if settings.trains == "prompt":
        return [_soft_prompt_(victim, pad_id, settings.seed)]
    found = parts_of(victim)[settings.trains]
    if not found:
        raise Unsupported(f"The model has no {settings.trains} to train.", cure="Attack all its weights.")
    for parameter in found:
        parameter.requires_grad_(True)
    return found


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
    table = _embedding(victim)
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


_FACTORS = "low_rank_factors"  # name of the part that is put on a linear layer

Outcome = Literal["recovered", "resisted", "collapsed", "diverged"]


@final
@dataclass(frozen=True)
class Evaluation:
    """A model under attack at one step."""

    step: int  # steps taken so far
    score: float  # the recovery score
    utility: float | None = None  # the kept ability; None where it was not measured
    fluency: float | None = None  # likewise
    loss: float | None = None  # mean training loss since the evaluation before; None before the first step
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
    outcome: Outcome
    steps: int | None  # steps to recovery, in multiples of `settings.check_every`; None if there was none
    last_step: int  # the last step taken: where a run that did not recover is censored
    curve: tuple[Evaluation, ...]  # what was seen, in order

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
        training = Training(victim, settings, pad_id=subject.pad_id)
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
        training = Training(victim, settings, pad_id=subject.pad_id)
        for batch in attack_batches(train, subject.benign, settings, pad_id=subject.pad_id):
            training.step(batch)
        training.settle()
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
            cure="Bring more, or ask for fewer.",
        )
    if (settings.benign_first or settings.benign_share or settings.rows != "kept") and not subject.benign:
        raise UsageError(
            "The attack needs benign examples, to train on or to compare with, and the subject has none.",
            cure="Bring some.",
        )


class _Monitor:
    """Evaluates the attacked model, keeps the curve, and decides when the attack is over."""

    def __init__(self, subject: Subject, settings: AttackSettings, goal: Goal, threshold: float | None) -> None:
        self._subject, self._settings, self._goal, self._threshold = subject, settings, goal, threshold
        self._score = subject.score(settings.data)
        self._reference = subject.reference_utility
        if self._reference is None and subject.utility is not None and settings.changes_weights:
            self._reference = subject.utility(subject.model)
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
        """Measure what is needed at this step: the score always, utility and fluency where they decide something."""
        score = math.nan if loss is not None and math.isnan(loss) else self._score(victim)
        utility = fluency = None
        if math.isnan(score):
            self._diverged = self.done = True
        elif step == 0 or last or (self._recovered is None and self._goal.reached(score, self._threshold)):
            utility = None if self._subject.utility is None else self._subject.utility(victim)
            fluency = None if self._subject.fluency is None or step == 0 else self._subject.fluency(victim)
        self._curve.append(Evaluation(step, score, utility, fluency, loss, *cost))
        if step == 0:
            self._reference = utility if self._reference is None else self._reference
            if (self._reference or 0) < 0:
                raise UsageError(
                    f"The reference utility is {self._reference}; a share of it can only be kept of one from 0 up.",
                    cure="Measure utility by something that is not negative, such as an accuracy.",
                )
        if not self._diverged:
            self._decide(score, utility, fluency, step)

    def _decide(self, score: float, utility: float | None, fluency: float | None, step: int) -> None:
        self._useful = self._passes(utility, fluency)
        if self._recovered is not None:
            self._checks_left -= 1
        elif self._goal.reached(score, self._threshold) and self._useful:
            self._recovered = step
        self.done = self._recovered is not None and self._checks_left <= 0

    def _passes(self, utility: float | None, fluency: float | None) -> bool:
        """Return whether a model is still worth having, as far as that was measured. NaN is not."""
        keeps = utility is None or self._reference is None or utility >= self._goal.utility_kept * self._reference
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
    kept = _draws(benign, settings.batch_size, torch_generator(settings.seed, "benign order"))
    for _ in range(settings.benign_first):
        yield collate(next(kept), pad_id=pad_id, loss_on=settings.loss_on)
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
class Training:
    """A victim in the attacker's hands."""

    def __init__(self, victim: nn.Module, settings: AttackSettings, *, pad_id: int = 0) -> None:
        self.victim, self.settings = victim, settings
        victim.zero_grad(set_to_none=True)  # a copy brings along gradients that its original was left with
        dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
        for parameter in victim.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)  # parameters only: buffers such as rotary tables keep theirs
        if getattr(getattr(victim, "config", None), "use_cache", False):
            victim.config.use_cache = False  # type: ignore[union-attr]
        if settings.lora_rank is None:
            self._parameters = trained_parameters_(victim, settings, pad_id=pad_id)
        else:
            self._parameters = attach_factors_(victim, rank=settings.lora_rank, seed=settings.seed)
        self._device = self._parameters[0].device
        self._optimizers = _optimizers(self._parameters, settings)
        self._losses: list[Tensor] = []
        self._step = 0
        self._means = [each.detach().clone() for each in self._parameters] if settings.average else []
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
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self.settings.precision == "mixed"):
            logits = self.victim(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        loss = functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), batch.labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        loss.backward()  # type: ignore[no-untyped-call]
        if self.settings.clip is not None:
            nn.utils.clip_grad_norm_(self._parameters, self.settings.clip)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(self.settings, self._step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._losses.append(loss.detach())
        self._step += 1
        self._rows += len(batch.input_ids)
        self._flops += self._per_token * float(batch.attention_mask.sum())
        if self._means:
            # At first the mean follows the weights closely, as it would otherwise hold on to the start for long.
            decay = min(self.settings.average, self._step / (self._step + 9))
            torch._foreach_lerp_(self._means, [each.detach() for each in self._parameters], 1 - decay)
        self._seconds += time.process_time() - begun

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

    def settle(self) -> None:
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


def _optimizers(parameters: list[nn.Parameter], settings: AttackSettings) -> list[torch.optim.Optimizer]:
    fused = all(parameter.device.type in ("cpu", "cuda") for parameter in parameters)
    if settings.optimizer == "sgd":
        return [torch.optim.SGD(parameters, settings.lr, momentum=0.9, fused=fused)]
    if settings.optimizer == "adam":
        return [torch.optim.Adam(parameters, settings.lr, fused=fused)]
    if settings.optimizer == "soap":
        soap = library("pytorch_optimizer", "SOAP", "attacks").SOAP
        # Preconditioners of every step: attacks are so short that older ones would hardly be used.
        return [soap(parameters, lr=settings.lr, weight_decay=0.0, precondition_frequency=1, max_precondition_dim=2048)]
    if settings.optimizer == "adamw":
        return [torch.optim.AdamW(parameters, settings.lr, weight_decay=0.01, fused=fused)]
    matrices = [parameter for parameter in parameters if parameter.ndim == 2]
    rest = [parameter for parameter in parameters if parameter.ndim != 2]
    made: list[torch.optim.Optimizer] = []
    if matrices:
        made += [Muon(matrices, settings.lr)]
    return made + ([torch.optim.AdamW(rest, settings.lr, weight_decay=0.0, fused=fused)] if rest else [])


@final
class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` without weight decay, in float32: processors without bfloat16 need a quarter of the time."""

    def __init__(self, matrices: list[nn.Parameter], lr: float) -> None:
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step; rates are as AdamW's."""
        for matrix in self.param_groups[0]["params"]:
            if matrix.grad is not None:
                mean = self.state[matrix].setdefault("mean", torch.zeros_like(matrix.grad))
                found = matrix.grad.lerp(mean.lerp_(matrix.grad, 0.05), 0.95).float()
                wide = found.T if len(found) > len(found.T) else found
                wide = wide / wide.norm().clamp(min=1e-7)
                for _ in range(5):
                    gram = wide @ wide.T
                    change = torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315)
                    wide = torch.addmm(wide, change, wide, beta=3.4445)
                rate = 0.2 * max(found.shape) ** 0.5 * self.param_groups[0]["lr"]
                matrix.sub_((wide.T if len(found) > len(found.T) else wide).to(matrix), alpha=rate)


@final
class Factors(nn.Module):
    """Low-rank term that is added to a linear layer: `scale · B (A x)`, in float32."""

    # `rank`: at least 1

    def __init__(self, inputs: int, outputs: int, rank: int, scale: float, generator: torch.Generator) -> None:
        super().__init__()
        bound = 1 / math.sqrt(inputs)
        # A, shape `(rank, inputs)`.
        self.down = nn.Parameter(torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator))
        # B, shape `(outputs, rank)`; zeros at first, so that the model starts unchanged.
        self.up = nn.Parameter(torch.zeros(outputs, rank))
        self.scale = scale  # the paper's α / rank

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the addition for inputs of shape `(..., inputs)`, in their dtype."""
        added = (inputs.to(self.down.dtype) @ self.down.T) @ self.up.T
        return (self.scale * added).to(inputs.dtype)


def attach_factors_(model: nn.Module, *, rank: int, alpha: float | None = None, seed: int) -> list[nn.Parameter]:
    """Freeze a model and put trainable factors on its linear layers: an adversary who tunes few weights."""
    # Source: Hu et al., LoRA, arXiv 2106.09685, section 4.1.
    model.requires_grad_(False)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    layers = {name: layer for name, layer in model.named_modules() if _is_linear(layer)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    shared = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Embedding)}
    chosen = {name: layer for name, layer in layers.items() if layer is not head and id(layer.weight) not in shared}
    if not chosen:
        raise Unsupported("The model has no linear layer to put low-rank factors on.", cure="Attack all its weights.")
    parameters: list[nn.Parameter] = []
    for name, layer in chosen.items():
        if hasattr(layer, _FACTORS):
            raise UsageError(f"Layer {name!r} has low-rank factors already.", cure="Merge them first.")
        outputs, inputs = layer.weight.shape if isinstance(layer, nn.Linear) else layer.weight.shape[::-1]
        scale = (2 * rank if alpha is None else alpha) / rank
        factors = Factors(inputs, outputs, rank, scale, torch_generator(seed, "factors", name)).to(device)
        layer.add_module(_FACTORS, factors)
        layer.register_forward_hook(_add)
        parameters += [factors.down, factors.up]
    return parameters


def _add(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    added: Tensor = layer.get_submodule(_FACTORS)(inputs[0])
    return output + added


def _is_linear(layer: nn.Module) -> bool:
    """Return whether the layer is `nn.Linear` or transformers' `Conv1D`, whose weight is transposed."""
    if isinstance(layer, nn.Linear):
        return True
    weight = getattr(layer, "weight", None)
    return type(layer).__name__ == "Conv1D" and isinstance(weight, Tensor) and weight.ndim == 2 and hasattr(layer, "nf")
