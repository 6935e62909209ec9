"""The modules of a model from its config alone: built without memory (on torch's device `meta`), nothing is loaded.

Names of tensors in a file and names of modules in a model differ for many models of transformers: multimodal wrappers
move a prefix, mixtures of experts are packed. `checkpoint_names` maps the one to the other as transformers itself does
when it loads a checkpoint.
"""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from netweight.store.lora_formats.identify import COMPONENTS

if TYPE_CHECKING:
    from torch import Tensor, nn


@final
@dataclass(frozen=True)
class ModelModules:
    """The modules of a model that adapters may change."""

    shapes: Mapping[str, tuple[int, int]]
    """Linear layers and convolutions, with a pipeline's component in front → rows and columns of a change."""
    transposed: frozenset[str]
    """Those whose weight is stored as (inputs, outputs): GPT-2's `Conv1D`."""
    embeddings: frozenset[str]
    """Embedding layers."""
    parameters: Mapping[str, tuple[int, ...]]
    """All parameters, in the order in which modules declare them → their shapes."""
    packed: Mapping[str, bool]
    """Parameters that hold one matrix per expert → whether these are stored as (inputs, outputs)."""
    tied: Mapping[str, str]
    """Parameters whose memory is also another parameter's, such as the head's and the embedding's → that other."""
    attentions: frozenset[str]
    """Modules of torch's `MultiheadAttention`, whose parts peft names otherwise than the model."""
    conversions: Mapping[str, CheckpointMapping]
    """Component (or nothing) → how its files' names become parameters."""


@final
class CheckpointMapping:
    """Mapping of the tensors in a model's files to parameters of transformers."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._state = model, model.state_dict()

    @cached_property
    def _mapping(self) -> list[Any]:
        from transformers.conversion_mapping import get_model_conversion_mapping

        return get_model_conversion_mapping(self._model)  # type: ignore[arg-type]

    @cached_property
    def _renamings(self) -> list[Any]:
        from transformers.core_model_loading import WeightRenaming

        return [each for each in self._mapping if isinstance(each, WeightRenaming)]

    @cached_property
    def _converters(self) -> list[Any]:
        from transformers.core_model_loading import WeightConverter

        return [each for each in self._mapping if isinstance(each, WeightConverter)]

    def names(self, tensors: Iterable[str]) -> dict[str, str]:
        """Tensor's name in the files → the parameter that it is, or is a part of."""
        tensors = list(tensors)
        if all(tensor in self._state for tensor in tensors):
            return {tensor: tensor for tensor in tensors}
        return {tensor: self._renamed(tensor)[0] for tensor in tensors}

    def assemble(self, parameter: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """Make a parameter of the tensors that the files hold of it, such as one expert each."""
        converter = None
        for name, tensor in tensors.items():
            renamed, pattern = self._renamed(name)
            if pattern is None:
                return tensor
            if converter is None:
                converter = copy.deepcopy(next(each for each in self._converters if pattern in each.source_patterns))
            held: Any = tensor
            converter.add_tensor(renamed, name, pattern, held)
        # There is at least one tensor, so that a converter was chosen.
        assert converter is not None
        made: Any = converter.convert(parameter, model=self._model, config=getattr(self._model, "config", None))
        made = made.get(parameter, next(iter(made.values())))
        whole: Tensor = made[0] if isinstance(made, list) else made
        return whole

    def _renamed(self, tensor: str) -> tuple[str, str | None]:
        from transformers.core_model_loading import rename_source_key

        prefix = getattr(self._model, "base_model_prefix", None)
        renamed = rename_source_key(tensor, self._renamings, self._converters, prefix, self._state)
        if renamed[0] not in self._state and tensor in self._state:
            renamed = rename_source_key(tensor, [], [], prefix, self._state)
        return renamed


def model_modules(path: Path) -> ModelModules | None:
    """Build the model of a folder without memory and list its modules.

    Args:
        path: A folder of transformers or diffusers with a `config.json`, or a pipeline's with a `model_index.json`.

    Returns:
        The modules; None where the folder says no architecture that is installed here.
    """
    models = _models(path)
    if not models:
        return None
    shapes: dict[str, tuple[int, int]] = {}
    transposed, embeddings, attentions = set(), set(), set()
    parameters: dict[str, tuple[int, ...]] = {}
    conversions = {}
    packed: dict[str, bool] = {}
    tied: dict[str, str] = {}
    for component, model in models.items():
        before = f"{component}." if component else ""
        for name, module in model.named_modules(remove_duplicate=False):
            kind = type(module).__name__
            if kind == "MultiheadAttention" and hasattr(module, "in_proj_weight"):
                attentions.add(before + name)
            weight: Any = getattr(module, "weight", None)
            if kind == "Conv1D" and hasattr(module, "nf"):
                transposed.add(before + name)
                shapes[before + name] = (int(module.nf), int(weight.shape[0]))
            elif kind == "Embedding":
                embeddings.add(before + name)
            elif not _takes_adapters(module):
                for own, parameter in module.named_parameters(recurse=False):
                    if parameter.ndim == 3 and min(parameter.shape) > 1:
                        packed[f"{before}{name}.{own}"] = bool(getattr(module, "is_transposed", False))
            else:
                shapes[before + name] = (int(weight.shape[0]), math.prod(weight.shape[1:]))
        shared: dict[int, list[str]] = {}
        for name, each in model.named_parameters(remove_duplicate=False):
            parameters[before + name] = tuple(each.shape)
            shared.setdefault(id(each), []).append(before + name)
        for names in shared.values():
            tied |= {name: names[name == names[0]] for name in names if len(names) > 1}
        if hasattr(model, "base_model_prefix"):
            conversions[component] = CheckpointMapping(model)
    return ModelModules(shapes, frozenset(transposed), frozenset(embeddings), parameters, packed, tied,
                        frozenset(attentions), conversions)  # fmt: skip


def _takes_adapters(module: nn.Module) -> bool:
    from torch import nn

    return isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))


def _models(path: Path) -> dict[str, nn.Module]:
    if (path / "model_index.json").is_file():
        models = {name: _model(path / name) for name in COMPONENTS if (path / name / "config.json").is_file()}
        return {name: model for name, model in models.items() if model is not None}
    model = _model(path) if (path / "config.json").is_file() else None
    if model is None:
        return {}
    own = path.name if path.name in COMPONENTS else ""
    config = json.loads((path / "config.json").read_text("utf-8"))
    if not own and "_class_name" in config:
        own = "unet" if str(config["_class_name"]).startswith("UNet") else "transformer"
    return {own: model}


def _model(folder: Path) -> nn.Module | None:
    """A model without memory, or None where its class is not installed or needs code of its own."""
    import torch

    config = json.loads((folder / "config.json").read_text("utf-8"))
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        if "_class_name" in config:
            import diffusers

            cls: Any = getattr(diffusers, str(config["_class_name"]), None)
            return None if cls is None else cls.from_config(config)
        if "model_type" not in config or "auto_map" in config:
            return None
        import transformers

        kinds = [kind for name in config.get("architectures") or () if (kind := getattr(transformers, name, None))]
        settings = transformers.AutoConfig.from_pretrained(folder)
        settings.quantization_config = None
        del settings.quantization_config
        if kinds:
            model: nn.Module = kinds[0](settings)
            return model
        build: Any = transformers.AutoModel.from_config
        whole: nn.Module = build(settings)
        return whole
