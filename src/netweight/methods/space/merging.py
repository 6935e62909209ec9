"""Merging adapters into one: a weighted sum, or TIES and DARE, which trim the changes first."""

# Source: TIES (arXiv 2306.01708) and DARE (2311.03099), on the changes themselves, not on their factors.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from netweight.core.names import Select
from netweight.core.seeds import torch_generator
from netweight.errors import UsageError
from netweight.methods.space.lora_files import checked_modules, named_model, parameters_of, with_model
from netweight.methods.space.settings import MergeSettings
from netweight.nn.lora import Adapter, LowRank, side_by_side, truncate
from netweight.store.lora_formats import metadata as headers
from netweight.store.lora_formats.base_names import base_key
from netweight.store.lora_formats.parts import AdapterPlan
from netweight.store.lora_formats.reading import load_plan, plan_adapter
from netweight.store.lora_formats.writing import (
    ExportResult,
    Style,
    certain_naming,
    layout_for,
    layout_like,
    write_exported,
)

if TYPE_CHECKING:
    from torch import Tensor


def merge_files(adapters: Sequence[Path], path: Path, how: MergeSettings, *, overwrite: bool) -> ExportResult:
    """Merge adapters and write the result.

    Files may be in different namings of one model: they are brought to one. The result is in the layout that all have,
    else in diffusers'.

    Args:
        adapters: The files or folders.
        path: The file or folder to write.
        how: Method, weights, rank and layout.
        overwrite: Whether files may be replaced.

    Returns:
        What was written.

    Raises:
        UsageError: The adapters are of different models, or there are more or fewer weights than adapters.
    """
    model = named_model(how.model)
    plans = [plan_adapter(each, with_model(model), naming=model.naming) for each in adapters]
    _refuse_different_models(plans)
    opened = [load_plan(plan) for plan in plans]
    rank = how.rank
    if how.method != "linear" and rank is None and how.energy == 1:
        rank = max(change.rank for one in opened for change in one.factors.values())
    truncation = truncate(merged(opened, how), rank, how.energy)
    weights = list(how.weights) or [1.0] * len(opened)
    adapter = Adapter(truncation.adapter.factors, _merged_vectors(opened, weights))
    checked_modules(adapter, model)
    layouts = {plan.layout for plan in plans}
    layout = how.layout or (layout_like(plans[0], adapter, path) if len(layouts) == 1 else layout_for(adapter))
    first = plans[0]
    written = write_exported(
        adapter, path, error=truncation.relative_error, layout=layout, overwrite=overwrite,
        base=how.base or next((plan.base for plan in plans if plan.base), None),
        kernels={name: kernel for plan in plans for name, kernel in plan.kernels.items()},
        naming=next((naming for plan in plans if (naming := certain_naming(plan, layout))), None),
        metadata=headers.union([(plan.path, plan.metadata) for plan in plans], weights),
        style=Style(first.kohya_ends, first.has_alphas) if layout == first.layout == "comfyui" else None,
        transposed=any(plan.transposed for plan in plans), parameters=parameters_of(model),
    )  # fmt: skip
    remarks = dict.fromkeys(remark for plan in plans for remark in plan.remarks)
    bases = {base_key(plan.base): plan.base for plan in plans if plan.base}
    if len(bases) > 1:
        remarks[f"The adapters name different base models: {', '.join(bases.values())}."] = None
    return replace(written, remarks=(*remarks, *written.remarks))


def _refuse_different_models(plans: Sequence[AdapterPlan]) -> None:
    """Refuse adapters of two architectures, and those of a known and an unknown one that share no module."""
    first = plans[0]
    for plan in plans[1:]:
        if first.naming and plan.naming and first.naming != plan.naming and not set(first.parts) & set(plan.parts):
            raise UsageError(
                f"{first.path} is of {first.naming.title}, and {plan.path} of {plan.naming.title}.",
                cure="Merge adapters of one model.",
            )
        if (first.naming is None) != (plan.naming is None) and not set(first.parts) & set(plan.parts):
            raise UsageError(
                f"{first.path} changes modules such as {min(first.parts)}, and {plan.path} such as {min(plan.parts)}: "
                "these belong to different models.",
                cure="Merge adapters of one model.",
            )


def _merged_vectors(adapters: Sequence[Adapter], weights: Sequence[float]) -> dict[str, Tensor]:
    """The weighted sums of the changes of biases, norms and other vectors."""
    sums: dict[str, Tensor] = {}
    for adapter, weight in zip(adapters, weights, strict=True):
        for name, change in adapter.vectors.items():
            part = change.double() * weight
            sums[name] = sums[name] + part if name in sums else part
    return {name: change.float() for name, change in sums.items()}


def merged(adapters: Sequence[Adapter], how: MergeSettings) -> Iterator[tuple[str, LowRank]]:
    """Merge adapters, module by module.

    Args:
        adapters: At least one; a module that some of them lack is not changed by these.
        how: Method, weights and density.

    Returns:
        Modules with their changes: exact in factors for a weighted sum, else of full rank.

    Raises:
        UsageError: There are more or fewer weights than adapters, or a module has two shapes.
        NameNotFound: A pattern of blocks matches no module.
    """
    names = sorted({name for adapter in adapters for name in adapter.factors})
    weights = _weights(names, len(adapters), how)
    for name in names:
        summed = side_by_side(name, adapters, weights[name])
        if how.method == "linear":
            yield name, summed
        else:
            parts = [
                (number, _wide(one.factors[name]).dense(), weights[name][number])
                for number, one in enumerate(adapters)
                if name in one.factors
            ]
            changes = [_trimmed(change, how, name, number) for number, change, _ in parts]
            yield name, LowRank.of(_joined(changes, [weight for _, _, weight in parts], how))


def _wide(change: LowRank) -> LowRank:
    """The change with factors in fp32, if they are narrower."""
    return LowRank(change.down.float(), change.up.float(), change.scale) if change.up.itemsize < 4 else change


def _weights(names: Sequence[str], count: int, how: MergeSettings) -> dict[str, list[float]]:
    """The adapters' weights by module."""
    weights = dict.fromkeys(names, _as_many(list(how.weights) or [1.0] * count, count, "--weight"))
    for pattern, written in how.blocks:
        try:
            values = [float(value) for value in written.split(",")]
        except ValueError as error:
            raise UsageError(f"Weights {written!r} of {pattern!r} are not numbers.", cure="Write 1,0.5.") from error
        weights |= dict.fromkeys(
            Select(pattern).keys(list(names)),
            _as_many(values * count if len(values) == 1 else values, count, "--block"),
        )
    return weights


def _as_many(values: list[float], count: int, option: str) -> list[float]:
    if len(values) != count:
        raise UsageError(f"{count} adapters have {len(values)} weights ({option}).", cure="Give one for each.")
    return values


def _trimmed(change: Tensor, how: MergeSettings, name: str, number: int) -> Tensor:
    """TIES keeps the largest entries; DARE random ones, which it enlarges so that their mean stays."""
    if how.method == "ties":
        count = max(1, int(how.density * change.numel()))
        sizes = change.abs().flatten()
        place = change.numel() - count
        least = float(np.partition(sizes.numpy(), place)[place])
        chosen = sizes > least
        # Of equal entries at the threshold, the first ones, so that their number is exact.
        ties = (sizes == least).nonzero().flatten()[: count - int(chosen.sum())]
        chosen[ties] = True
        return change * chosen.view_as(change)
    draw = torch_generator(how.seed, "dare", name, number)
    return change * (torch.rand(change.shape, generator=draw) < how.density) / how.density


def _joined(changes: Sequence[Tensor], weights: Sequence[float], how: MergeSettings) -> Tensor:
    """A weighted sum; with elected signs, each entry is the mean of those that have the sign of their sum."""
    if how.method == "dare":
        return torch.stack([change * weight for change, weight in zip(changes, weights, strict=True)]).sum(0)
    positive = torch.stack(list(changes)).sum(0) >= 0
    total, count = torch.zeros_like(changes[0]), torch.zeros_like(changes[0])
    for change, weight in zip(changes, weights, strict=True):
        agreeing = torch.where(positive, change > 0, change < 0)
        total += change * weight * agreeing
        count += agreeing
    return total / count.clamp_min(1)
