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
from netweight.store.lora_formats.targets import EMBEDDING, expert_of, parameter_of


@final
@dataclass(frozen=True)
class NamedModel:
    """The model that adapters belong to, as far as it was named."""

    naming: Naming | None = None
    """The names of its architecture."""
    modules: ModelModules | None = None
    """Modules of the model."""


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
            f"{model} does not name an architecture that is installed here.",
            cure="Name a folder with config.json or model_index.json, or one of "
            f"{', '.join(table.key for table in namings())}.",
        )
    return NamedModel(modules=modules)


def with_model(model: NamedModel) -> ModelNames | None:
    """The model's names of modules, for reading files whose names do not say enough."""
    if model.modules is None:
        return None
    owners = dict.fromkeys(name.rpartition(".")[0] for name in model.modules.parameters)
    return ModelNames([*model.modules.shapes, *owners], tuple(model.modules.parameters))


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
        if (stored := _stored_otherwise(name, model.modules)) is not None:
            if stored != change.shape:
                raise _other_shape(name, change.shape, stored)
            continue
        if name not in shapes:
            near = ", ".join(nearest_names(name, shapes))
            raise NameNotFound(
                f"The model has no module {name!r}.",
                cure=f"Name the model that the adapter was trained on; the nearest names are {near}.",
            )
        if shapes[name] != change.shape:
            raise _other_shape(name, change.shape, shapes[name])


def parameters_of(model: NamedModel) -> tuple[str, ...] | None:
    """The model's parameters in their order, or None where no model was named."""
    return None if model.modules is None else tuple(model.modules.parameters)


def _stored_otherwise(name: str, modules: ModelModules) -> tuple[int, int] | None:
    """Rows and columns of an embedding, or of an expert of a packed parameter; None for other names."""
    parameter, expert = parameter_of(name), expert_of(name)
    if expert is None and not name.endswith(EMBEDDING):
        return None
    shape = modules.parameters.get(parameter)
    if shape is not None and len(shape) == 2 and expert and expert[1:] == (0, 1):
        return shape[0], shape[1]
    if shape is None or (expert and (parameter not in modules.packed or shape[0] != expert[2])):
        near = ", ".join(nearest_names(parameter, modules.parameters))
        raise NameNotFound(
            f"The model has no {name}.",
            cure=f"Name the model that the adapter was trained on; the nearest names are {near}.",
        )
    if expert and modules.packed[parameter]:
        return shape[2], shape[1]
    return shape[-2], shape[-1]


def _other_shape(name: str, own: tuple[int, int], model: tuple[int, int]) -> UsageError:
    return UsageError(
        f"The change of {name} is {own[0]} × {own[1]}, but the module of the model is {model[0]} × {model[1]}.",
        cure="Name the model that the adapter was trained on (--model).",
    )
