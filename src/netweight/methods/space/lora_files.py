"""Parts that commands on LoRA files share: the model that `--model` names, and the check of modules against it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from netweight.core.names import nearest_names
from netweight.errors import NameNotFound, UsageError
from netweight.hf.model_modules import ModelModules, model_modules
from netweight.nn.lora import Adapter
from netweight.store.lora_formats.model_names import ModelNames
from netweight.store.lora_formats.naming import Naming, naming_called, namings


@final
@dataclass(frozen=True)
class NamedModel:
    """The model that adapters belong to, as far as it was named."""

    naming: Naming | None = None
    """The names of its architecture."""
    modules: ModelModules | None = None
    """Its modules."""


def named_model(model: str | None) -> NamedModel:
    """Find the model that `--model` names: an architecture of a table, or a model's folder.

    Args:
        model: A table's name (`flux`, `wan`, …), or the folder of a model or pipeline with its config.

    Raises:
        UsageError: It is neither.
    """
    if model is None:
        return NamedModel()
    if not Path(model).exists():
        return NamedModel(naming_called(model))
    modules = model_modules(Path(model)) if Path(model).is_dir() else None
    if modules is None:
        raise UsageError(
            f"{model} says no architecture that is installed here.",
            cure="Name a folder with config.json or model_index.json, or one of "
            f"{', '.join(table.key for table in namings())}.",
        )
    return NamedModel(modules=modules)


def with_model(model: NamedModel) -> ModelNames | None:
    """The model's names of modules, for reading files whose names do not say enough."""
    return (
        None
        if model.modules is None
        else ModelNames([*model.modules.shapes, *(name.rpartition(".")[0] for name in model.modules.parameters)])
    )


def checked_modules(adapter: Adapter, model: NamedModel) -> None:
    """Compare an adapter's modules with the model's own.

    Raises:
        NameNotFound: The model lacks a module.
        UsageError: A module has another shape.
    """
    if model.modules is None:
        return
    shapes: Mapping[str, tuple[int, int]] = model.modules.shapes
    for name, change in adapter.factors.items():
        if name not in shapes:
            near = ", ".join(nearest_names(name, shapes))
            raise NameNotFound(
                f"The model has no module {name!r}.", cure=f"It is of another model; the nearest names are {near}."
            )
        if shapes[name] != change.shape:
            raise UsageError(
                f"The change of {name} is {change.shape[0]} × {change.shape[1]}, the model's module "
                f"{shapes[name][0]} × {shapes[name][1]}.",
                cure="Name the model that the adapter was trained on (--model).",
            )
