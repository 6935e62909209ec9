"""What an attacker does to weights before the first step, and which of them he trains."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from netweight.attacks.finetuning.settings import AttackSettings
from netweight.attacks.finetuning.subject import SOFT_TOKENS, Subject
from netweight.core.seeds import torch_generator
from netweight.data.tokens import Example
from netweight.errors import Unsupported, UsageError
from netweight.hf.load_language_model import embedding_of

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
    return victim


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
