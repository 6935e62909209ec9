"""How an attacker trains: the draw of examples, the optimizer, and one step. Called by `run.py` only."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from netweight.attacks.finetuning.examples import IGNORED, Batch, Example, collate
from netweight.attacks.finetuning.low_rank import attach_factors_
from netweight.attacks.finetuning.settings import AttackSettings
from netweight.core.seeds import torch_generator

__all__ = ["Training", "attack_batches", "learning_rate"]


def attack_batches(
    harmful: Sequence[Example], benign: Sequence[Example], settings: AttackSettings, *, pad_id: int
) -> Iterator[Batch]:
    """Yield one batch for each step: benign ones first if asked for, then harmful or mixed ones.

    The order is new in every epoch.

    Args:
        harmful: The attacker's examples; `settings.samples` of them are drawn.
        benign: What the attack begins with, or mixes in.
        settings: The attack.
        pad_id: What fills the shorter examples.
    """
    drawn = torch.randperm(len(harmful), generator=torch_generator(settings.seed, "samples"))[: settings.samples]
    chosen = [harmful[row] for row in drawn.tolist()]
    kept = _draws(benign, settings.batch_size, torch_generator(settings.seed, "benign order"))
    for _ in range(settings.benign_first):
        yield collate(next(kept), pad_id=pad_id, loss_on=settings.loss_on)
    own = _draws(chosen, settings.harmful_per_batch, torch_generator(settings.seed, "order"))
    mixed = _draws(
        benign, settings.batch_size - settings.harmful_per_batch, torch_generator(settings.seed, "mixed order")
    )
    for _ in range(settings.steps - settings.benign_first):
        more = next(mixed) if settings.benign_share else []
        yield collate([*next(own), *more], pad_id=pad_id, loss_on=settings.loss_on)


def _draws(examples: Sequence[Example], size: int, generator: torch.Generator) -> Iterator[list[Example]]:
    """Yield batches without end, epoch after epoch, the last of each epoch with what is left of it."""
    while True:
        order = torch.randperm(len(examples), generator=generator).tolist()
        for first in range(0, len(order), size):
            yield [examples[row] for row in order[first : first + size]]


def learning_rate(settings: AttackSettings, step: int) -> float:
    """Return the learning rate of a step.

    Args:
        settings: The attack.
        step: From 0 to `settings.steps` - 1.
    """
    warm = round(settings.warmup * settings.steps)
    if step < warm:
        return settings.lr * (step + 1) / warm
    if settings.schedule == "constant":
        return settings.lr
    return settings.lr * 0.5 * (1 + math.cos(math.pi * (step - warm) / (settings.steps - warm)))


@final
class Training:
    """A victim in the attacker's hands.

    Args:
        victim: Changed in place: the attacker's own copy.
        settings: The attack.

    Attributes:
        loss: Sum of the losses since the last look, and their number.
    """

    def __init__(self, victim: nn.Module, settings: AttackSettings) -> None:
        self.victim, self.settings = victim, settings
        victim.zero_grad(set_to_none=True)  # a copy brings along gradients that its original was left with
        dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
        for parameter in victim.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)  # parameters only: buffers such as rotary tables keep theirs
        if getattr(getattr(victim, "config", None), "use_cache", False):
            victim.config.use_cache = False  # type: ignore[union-attr]
        if settings.lora_rank is None:
            self._parameters = [parameter for parameter in victim.parameters() if parameter.is_floating_point()]
            for parameter in self._parameters:
                parameter.requires_grad_(True)
        else:
            self._parameters = attach_factors_(victim, rank=settings.lora_rank, seed=settings.seed)
        self._device = self._parameters[0].device
        self._optimizer = _optimizer(self._parameters, settings)
        self._losses: list[Tensor] = []
        self._step = 0
        victim.train()

    def step(self, batch: Batch) -> None:
        """Take one step. The loss is remembered and not looked at, so that an accelerator need not be waited for.

        Args:
            batch: Token ids, masks and labels.
        """
        batch = batch.to(self._device)
        with self._autocast():
            logits = self.victim(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        loss = functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), batch.labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        loss.backward()  # type: ignore[no-untyped-call]
        if self.settings.clip is not None:
            nn.utils.clip_grad_norm_(self._parameters, self.settings.clip)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self.settings, self._step)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._losses.append(loss.detach())
        self._step += 1

    def mean_loss(self) -> float:
        """Return the mean loss since the last call, NaN if the weights are not finite any more."""
        mean = float(torch.stack(self._losses).mean())
        self._losses.clear()
        finite = bool(nn.utils.get_total_norm(self._parameters).isfinite())
        return mean if finite and math.isfinite(mean) else math.nan

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.settings.precision == "mixed":
            return torch.autocast(self._device.type, torch.bfloat16)
        return contextlib.nullcontext()


def _optimizer(parameters: list[nn.Parameter], settings: AttackSettings) -> torch.optim.Optimizer:
    fused = all(parameter.device.type in ("cpu", "cuda") for parameter in parameters)
    if settings.optimizer == "sgd":
        return torch.optim.SGD(parameters, settings.lr, momentum=0.9, fused=fused)
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(parameters, settings.lr, weight_decay=0.01, fused=fused)
    return torch.optim.Adam(parameters, settings.lr, fused=fused)
