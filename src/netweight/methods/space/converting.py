"""Bringing one adapter to another layout, naming, rank or kind."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from netweight.methods.space.lora_files import checked_modules, named_model, parameters_of, with_model
from netweight.methods.space.settings import ConvertSettings
from netweight.store.lora_formats import metadata as headers
from netweight.store.lora_formats.other_kinds import Conversion
from netweight.store.lora_formats.reading import load_converted, plan_adapter
from netweight.store.lora_formats.writing import ExportResult, Style, certain_naming, export_adapter, layout_like

_ANY_RANK = 1 << 30


def convert_file(adapter: Path, path: Path, how: ConvertSettings, *, overwrite: bool) -> ExportResult:
    """Bring an adapter to another layout, rank or kind.

    Args:
        adapter: The file or folder.
        path: The file or folder to write.
        how: Layout, rank and the rest.
        overwrite: Whether files may be replaced.

    Returns:
        What was written, with the error of all steps.

    Raises:
        UsageError: The layout cannot say the modules' names.
        Unsupported: The adapter is of a kind that needs a rank or a base model, or is none.
        NameNotFound: The named model lacks a module.
    """
    model = named_model(how.model)
    any_rank = None if how.energy == 1 else _ANY_RANK
    rank = how.rank or any_rank
    conversion = None if rank is None else Conversion(rank, how.weights)
    plan = plan_adapter(adapter, with_model(model), conversion, model.naming)
    converted = load_converted(plan)
    checked_modules(converted.adapter, model)
    layout = how.layout or layout_like(plan, converted.adapter, path)
    same_style = layout == plan.layout == "comfyui"
    written = export_adapter(
        converted.adapter, path, rank=how.rank, energy=how.energy, layout=layout, overwrite=overwrite,
        base=how.base or plan.base, kernels=plan.kernels, naming=certain_naming(plan, layout),
        metadata=headers.kept(plan.metadata, how.rank, converted=any(part.converts for part in plan.parts.values())),
        transposed=plan.transposed,
        parameters=parameters_of(model),
        style=Style(plan.kohya_ends, plan.has_alphas) if same_style else None,
    )  # fmt: skip
    # What the two steps leave out is orthogonal, and the second's share is of what the first has kept.
    first, second = converted.relative_error**2, written.relative_error**2
    error = math.sqrt(first + second * (1 - first))
    return replace(written, relative_error=error, remarks=(*plan.remarks, *written.remarks))
