"""diffusers models with weights that stay compressed in memory.

`from_pretrained` of a model or of a whole pipeline loads a folder made by `netweight compress`: the compressed bytes
become the model's weights as they are. With `quantization_config=NetweightConfig()` it compresses a dense folder while
loading it; for pipelines diffusers wraps that into a `PipelineQuantizationConfig`. Either way the model computes what
the dense one does, bit for bit, and `save_pretrained` writes compressed folders. The parts of a pipeline that come from
transformers, such as text encoders, go through the plug-in for transformers. Needs diffusers 0.42, transformers 5 and
accelerate.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

import netweight.plugins.transformers  # noqa: F401  a pipeline's text encoders come from transformers
from netweight import autoload, codec
from netweight.autoload import HINT, METHOD
from netweight.core.lazy import extra
from netweight.errors import MissingExtra, Unsupported, UsageError
from netweight.methods.compress.runtime.model import decompress_, place
from netweight.methods.compress.runtime.tensor import CompressedTensor
from netweight.plugins.loading import NetweightConfig, ParameterLoader, computing, refuse_disk, settings_for
from netweight.plugins.saving import refuse_quantized, save_folder, untied
from netweight.store.reader import StoredFile
from netweight.store.safetensors import SUFFIX

with extra("diffusion", "This plug-in needs diffusers 0.42 or newer"):
    from diffusers.configuration_utils import FrozenDict
    from diffusers.quantizers.auto import (
        AUTO_QUANTIZATION_CONFIG_MAPPING,
        AUTO_QUANTIZER_MAPPING,
        DiffusersAutoQuantizer,
    )
    from diffusers.quantizers.base import DiffusersQuantizer
    from diffusers.utils.import_utils import is_accelerate_available


@final
class NetweightDiffusersQuantizer(DiffusersQuantizer):
    """Hooks that diffusers calls while it loads a model; not for direct use."""

    use_keep_in_fp32_modules = True
    quantization_config: Any
    """A NetweightConfig, which is not a configuration class of diffusers."""

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        # A configuration that names no weights came from a model compressed in memory: its folder is dense.
        self.pre_quantized = self.pre_quantized and quantization_config.weights is not None
        self._weights = ParameterLoader(quantization_config, stored=self.pre_quantized)
        self._names: list[str] = []
        self._taken: set[str] = set()
        self._in_fp32: list[str] = []
        self._model: Any = None

    # ---- before loading ----

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse what compressed weights cannot do."""
        if not is_accelerate_available():  # type: ignore[no-untyped-call]
            raise MissingExtra(
                "Loading into compressed memory needs accelerate.",
                cure="Install it: pip install 'netweight[diffusion]'.",
            )
        refuse_disk(device_map)

    def update_torch_dtype(self, torch_dtype: torch.dtype | None) -> torch.dtype:
        """The dtype that diffusers gives a model by default; it would cast stored bytes to it."""
        return computing(torch_dtype if torch_dtype is not None else torch.get_default_dtype())

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: list[Any]) -> list[str]:
        """Check the files before anything is read from them, and give the original names."""
        compressed = [_is_compressed(Path(file)) for file in checkpoint_files]
        if self.pre_quantized or any(compressed):
            self.pre_quantized = self._weights.stored = True
            for file in checkpoint_files:
                self._weights.check(Path(file))
        # Kept, since names are known only in part before the model is.
        self._names = [name.removesuffix(SUFFIX) for name in loaded_keys] if self.pre_quantized else loaded_keys
        return self._names

    def _process_model_before_weight_loading(
        self, model: Any, keep_in_fp32_modules: list[str] | None = None, **kwargs: Any
    ) -> Any:
        """Choose the weights to hold compressed."""
        self._model, self._in_fp32 = model, list(keep_in_fp32_modules or [])
        self._weights.choose(model, tied={})
        if self.pre_quantized:
            self._names[:] = _renamed(model, dict.fromkeys(self._names))
        return model

    # ---- while loading ----

    @property
    def supports_parallel_loading(self) -> bool:
        """False: shards are loaded one after the other, so that the memory of only one further layer is needed."""
        return False

    def maybe_update_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Give stored tensors their original names, and what of these is old its new name."""
        if not self.pre_quantized:
            return state_dict
        return _renamed(self._model, {name.removesuffix(SUFFIX): value for name, value in state_dict.items()})

    def check_if_quantized_param(
        self, model: Any, param_value: torch.Tensor, param_name: str, state_dict: dict[str, Any], **kwargs: Any
    ) -> bool:
        """Return whether a tensor goes through `create_quantized_param`: stored bytes, or weights to compress."""
        return self.pre_quantized or param_name in self._weights

    def check_quantized_param_shape(self, param_name: str, current_param: torch.Tensor, loaded_param: Any) -> bool:
        """Leave shapes for later: those of stored bytes say nothing."""
        return True

    def create_quantized_param(  # type: ignore[override]
        self,
        model: nn.Module,
        param_value: torch.Tensor,
        param_name: str,
        target_device: Any,
        *args: Any,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        """Put one weight into the model."""
        value: Any = param_value.to(target_device)
        path, _, attribute = param_name.rpartition(".")
        module = model.get_submodule(path)
        old = getattr(module, attribute)
        if self.pre_quantized:
            shape = codec.info(param_value.cpu()).shape
            if shape != tuple(old.shape):
                raise UsageError(
                    f"{param_name} is of shape {shape} in the folder, and {tuple(old.shape)} in the model.",
                    cure="Load it with the configuration that it was saved with.",
                )
            in_fp32 = any(part in self._in_fp32 for part in param_name.split("."))
            value = self._weights.take(param_name, value, torch.float32 if in_fp32 else dtype)
        else:
            value = self._weights.compress(param_name, value)
        self._taken.add(param_name)
        if attribute in module._buffers:
            module._buffers[attribute] = value
        elif isinstance(value, CompressedTensor):
            parameter: Any = value.requires_grad_(old.requires_grad)
            place(module, attribute, parameter, param_name)
        else:
            module._parameters[attribute] = nn.Parameter(value, requires_grad=old.requires_grad)

    # ---- after loading ----

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """Let go of the checkpoint's memory, and leave nothing of the loading behind."""
        expected = model.state_dict().keys()
        lost = [name for name in self._names if name in expected and name not in self._taken]
        if self.pre_quantized and lost:
            raise UsageError(
                f"{len(lost)} stored weights were left out, such as {lost[0]}.",
                cure="Do not pass ignore_mismatched_sizes or offload_state_dict with compressed folders.",
            )
        self._weights.release(model)
        self._model, self._names, self._taken = None, [], set()
        self.quantization_config.weights = None
        # Otherwise diffusers refuses conversions, which compressed weights support.
        model.is_quantized = False
        return model

    def _dequantize(self, model: Any) -> Any:
        decompress_(model)
        return model

    @property
    def is_serializable(self) -> bool:
        """True if the model can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True if the weights, and adapters on them, can be trained."""
        return True

    @property
    def is_compileable(self) -> bool:
        """True if the model can be compiled."""
        return True


autoload.install()
AUTO_QUANTIZER_MAPPING[METHOD] = NetweightDiffusersQuantizer
AUTO_QUANTIZATION_CONFIG_MAPPING |= dict.fromkeys((METHOD, HINT), NetweightConfig)
_THEIR_MERGE = DiffusersAutoQuantizer.merge_quantization_configs


def _merge(cls: Any, quantization_config: Any, quantization_config_from_args: Any) -> Any:
    """Let the settings that the user gave win; diffusers ignores them."""
    return settings_for(quantization_config, quantization_config_from_args, _THEIR_MERGE)


DiffusersAutoQuantizer.merge_quantization_configs = classmethod(_merge)  # type: ignore[method-assign, assignment]


def save_pretrained(
    self: Any,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    save_function: Callable[..., Any] | None = None,
    safe_serialization: bool = True,
    variant: str | None = None,
    max_shard_size: int | str = "10GB",
    push_to_hub: bool = False,
    **kwargs: Any,
) -> None:
    """Save a compressed model as a compressed folder: what `save_pretrained` of diffusers' models does with them."""
    # A pipeline's `save_pretrained` calls this for each of its models; each of their folders is then a compressed
    # folder of its own.
    if not safe_serialization:
        raise Unsupported("Compressed models are not saved as pickles.", cure="Leave safe_serialization=True.")
    refuse_quantized(self, self.config)
    if not is_main_process:
        return

    def write_rest(folder: Path) -> None:
        config = self._internal_dict
        plain = {key: value for key, value in config.items() if key != "quantization_config"}
        self._internal_dict = FrozenDict(plain)  # type: ignore[no-untyped-call]
        try:
            self.save_config(folder)
        finally:
            self._internal_dict = config

    save_folder(
        self, save_directory, untied(self.state_dict()), write_rest,
        name="diffusion_pytorch_model.safetensors", variant=variant, max_shard_size=max_shard_size,
        push=kwargs if push_to_hub else None,
    )  # fmt: skip


def _is_compressed(path: Path) -> bool:
    if path.suffix != ".safetensors":
        return False
    with closing(StoredFile(path)) as file:
        return file.description is not None


def _renamed(model: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Give weights of old attention blocks their new names, as diffusers does where names are plain."""
    renamed: dict[str, Any] = model._fix_state_dict_keys_on_load(state_dict)
    return renamed
