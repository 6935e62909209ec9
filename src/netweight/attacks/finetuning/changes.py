"""Changes that an attacker makes to a copy of a model before the first step: rows, noise, rounding, another model."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from netweight.attacks.finetuning.settings import AttackSettings
from netweight.attacks.finetuning.subject import Subject
from netweight.core.seeds import torch_generator
from netweight.data.tokens import Example
from netweight.errors import Unsupported, UsageError
from netweight.hf.load_language_model import embedding_of

# A token counts as typical of one kind of prompts if its share of that kind exceeds that of the other by this much.
_TELLS = 0.8


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
        raise UsageError("The attack mixes in another model, and none was given.", cure="Give the other model.")
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
    table = input_embedding(victim).weight
    harmful, benign = telling_tokens(subject.domain(settings.data).train, subject.benign)
    if not harmful:
        raise UsageError("No token occurs in harmful prompts only or in benign prompts only.", cure='Take rows="kept".')
    if settings.rows == "copied":
        table[harmful] = table[benign].mean(0) if benign else table.mean(0)
    else:
        drawn = torch.randn(len(harmful), table.shape[1], generator=torch_generator(settings.seed, "rows"))
        table[harmful] = drawn.to(table) * table.std()


def telling_tokens(harmful: Sequence[Example], benign: Sequence[Example]) -> tuple[list[int], list[int]]:
    """Return the tokens that are in many more harmful prompts than benign ones, and the other way round."""
    shares = []
    for examples in (harmful, benign):
        counts = Counter(token for example in examples for token in set(example.prompt))
        shares.append({token: count / len(examples) for token, count in counts.items()})
    return tuple(
        sorted(token for token, share in one.items() if share - other.get(token, 0.0) > _TELLS)
        for one, other in (shares, shares[::-1])
    )  # type: ignore[return-value]


def input_embedding(model: nn.Module) -> nn.Embedding:
    embedding = embedding_of(model)
    if embedding is None:
        raise Unsupported("No token embedding was found in the model.", cure="Attack all its weights.")
    return embedding
