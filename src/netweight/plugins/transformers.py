"""transformers models with weights that stay compressed in memory.

`from_pretrained` loads a folder made by `netweight compress`: the compressed bytes become the model's weights as they
are. With `quantization_config=NetweightConfig()` it compresses a dense folder while loading it, one tensor after
another. Either way the model computes what the dense one does, bit for bit, unless the configuration says to round
weights (`mantissa_bits`), and `save_pretrained` writes a compressed folder. Compressed are the weights that
`netweight.compress_` compresses; others, such as norms, are decoded while loading. Experts that transformers merges
into one weight while it loads them are decoded for that, one layer at a time, and compressed again: if they had been
rounded they keep these values, and the place that others take. `NetweightConfig(prefer="speed")` keeps the bf16 weights
of linear layers in the fixed-length form that GPU kernels multiply with. Needs transformers 5.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, final

import torch

from netweight import autoload, codec
from netweight.autoload import HINT, METHOD
from netweight.codec.header import torch_dtype
from netweight.core.lazy import extra
from netweight.errors import CorruptBlob, UsageError
from netweight.methods.compress.runtime.model import decompress_
from netweight.plugins.loading import NetweightConfig, ParameterLoader, computing, refuse_disk, settings_for
from netweight.plugins.saving import refuse_quantized, save_folder, untied
from netweight.store.reader import StoredFile, weight_map
from netweight.store.safetensors import SUFFIX

with extra("llm", "This plug-in needs transformers 5"):
    from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, revert_weight_conversion
    from transformers.modeling_utils import PreTrainedModel
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING, AutoHfQuantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.hub import cached_file


@final
class NetweightQuantizer(HfQuantizer):
    """Hooks that transformers calls while it loads a model; not for direct use."""

    requires_calibration = False
    quantization_config: NetweightConfig

    def __init__(self, quantization_config: NetweightConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        # A configuration that names no weights came from a model compressed in memory: its folder is dense.
        self.pre_quantized = self.pre_quantized and quantization_config.weights is not None
        self._weights = ParameterLoader(quantization_config, stored=self.pre_quantized)
        self._misfits: set[str] = set()
        self._loading = True
        self._dtype: torch.dtype | None = None
        self._damage: CorruptBlob | UsageError | None = None
        self._taken = False

    # ---- before loading ----

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse what compressed weights cannot do."""
        refuse_disk(device_map)

    def update_attn_implementation(self, config: Any) -> Any:
        """Name the weights, so that they are found."""
        # Called before files are looked for; transformers has no better place. A configuration that names no dtype gets
        # that of the first tensor, since transformers would find that of the compressed bytes.
        weights = self.quantization_config.weights
        if self.pre_quantized and weights is not None:
            config.transformers_weights = weights
            if getattr(config, "dtype", None) is None:
                config.dtype = _first_dtype(getattr(config, "_name_or_path", ""), weights)
        return config

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Refuse dtypes that no layer computes in, that of compressed bytes among them."""
        if dtype == torch.uint8:
            raise UsageError(
                "The config.json of the folder does not name a dtype.",
                cure="Pass it to from_pretrained: dtype=torch.bfloat16.",
            )
        return computing(dtype)

    def _process_model_before_weight_loading(
        self, model: Any, dtype: torch.dtype | None = None, checkpoint_files: Any = None, **kwargs: Any
    ) -> Any:
        """Choose the weights to hold compressed, and check the compressed files before anything is read from them."""
        self._dtype = dtype
        self._weights.choose(model, tied=dict(getattr(model, "all_tied_weights_keys", None) or {}))
        if self.pre_quantized:
            for file in checkpoint_files or ():
                self._weights.check(Path(file))
        else:
            self._weights.refuse_unroundable(model)
        return model

    # ---- while loading ----

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Return whether a dense tensor is compressed as it arrives."""
        if self.pre_quantized or param_name not in self._weights or param_name in self._misfits:
            return False
        return bool(self._dtype is None or model.get_parameter(param_name).dtype == self._dtype)

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        """Bytes to expect per number: for what is compressed a little more than it usually takes."""
        compressed = 0.75 if self.quantization_config.prefer == "memory" else 0.78
        return param.element_size() * (compressed if param_name in self._weights else 1.0)

    def get_quantize_ops(self) -> Any:
        """The operation that compresses a dense tensor."""
        return _Compress(self)

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """Keep transformers from casting compressed bytes; remember the dtype for when they are decoded."""
        operations = getattr(converter, "operations", ())
        if not self._loading or not operations or not isinstance(operations[0], _Take):
            result: torch.dtype | None = super().get_new_dtype(converter, param, dtype)
            return result
        operations[0].dtype = dtype
        # The model's own conversion needs dense tensors. Its results are compressed again.
        if len(operations) > 1:
            converter.quantization_operation = _Compress(self)
        return None

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """Let every tensor of a compressed folder go through `_Take`, under its original name."""
        if not self.pre_quantized or not self._loading:
            return weight_conversions
        changed = [
            conversion.copy(
                conversion._original_source_patterns,
                conversion._original_target_patterns,
                operations=[_Take(self, dense=True), *conversion.operations],
            )
            if isinstance(conversion, WeightConverter)
            else conversion
            for conversion in weight_conversions
        ]
        return [_OriginalName(METHOD, METHOD), *changed, _Everything(METHOD, METHOD, [_Take(self)])]

    # ---- after loading ----

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """Let go of the checkpoint's memory, and leave nothing of the loading behind."""
        if self._damage is not None:
            raise self._damage
        if self.pre_quantized and not self._taken:
            raise UsageError(
                f"None of the weights in {model.config._name_or_path} belongs to a {type(model).__name__}.",
                cure="Load it as the architecture that its config.json names, or by an Auto class.",
            )
        self._loading = False
        self._weights.release(model)
        used = []
        for conversion in getattr(model, "_weight_conversions", None) or []:
            if isinstance(conversion, WeightConverter):
                conversion.operations = [op for op in conversion.operations if not isinstance(op, _Take)]
                if not conversion.operations:
                    continue
            used.append(conversion)
        model._weight_conversions = used
        self.quantization_config.weights = None
        if getattr(model.config, "transformers_weights", None) is not None:
            del model.config.transformers_weights
        return model

    def get_state_dict_and_metadata(self, model: Any) -> Any:
        """Leave it to transformers what to save: adapters, or the weights of a model that is dense by now."""
        return None, {}

    def dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """Make the model dense, for good."""
        decompress_(model)
        self.remove_quantization_config(model)  # type: ignore[no-untyped-call]
        return model if dtype is None else model.to(dtype)

    def is_serializable(self) -> bool:
        """Return whether the model can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True if adapters on the model can be trained."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """True if the weights themselves can be trained."""
        return True


autoload.install()
AUTO_QUANTIZER_MAPPING[METHOD] = NetweightQuantizer
AUTO_QUANTIZATION_CONFIG_MAPPING |= dict.fromkeys((METHOD, HINT), NetweightConfig)
_THEIR_MERGE = AutoHfQuantizer.merge_quantization_configs


def _merge(cls: Any, quantization_config: Any, quantization_config_from_args: Any) -> Any:
    """Let the settings that the user gave win; transformers ignores those of methods that it does not list."""
    return settings_for(quantization_config, quantization_config_from_args, _THEIR_MERGE)


AutoHfQuantizer.merge_quantization_configs = classmethod(_merge)  # type: ignore[method-assign, assignment]


def save_pretrained(
    self: Any,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: Any = None,
    push_to_hub: bool = False,
    max_shard_size: int | str = "50GB",
    variant: str | None = None,
    save_original_format: bool = True,
    **kwargs: Any,
) -> None:
    """Save a compressed model as a compressed folder: what `save_pretrained` of transformers' models does with them."""
    refuse_quantized(self, self.config)
    if not is_main_process:
        return

    def write_rest(folder: Path) -> None:
        quantizer, config = getattr(self, "hf_quantizer", None), self.config.__dict__.pop("quantization_config", None)
        self.hf_quantizer = None
        try:
            theirs: Any = PreTrainedModel.save_pretrained
            theirs.__wrapped__(self, folder, state_dict={})
        finally:
            self.hf_quantizer = quantizer
            if config is not None:
                self.config.quantization_config = config
        (folder / "model.safetensors").unlink(missing_ok=True)

    tensors = dict(self.state_dict() if state_dict is None else state_dict)
    for name in self._keys_to_ignore_on_save or ():
        tensors.pop(name, None)
    tensors = untied(tensors, getattr(self, "all_tied_weights_keys", None) or ())
    if save_original_format:
        tensors = revert_weight_conversion(self, tensors)
    save_folder(
        self, save_directory, tensors, write_rest,
        variant=variant, max_shard_size=max_shard_size, push=kwargs if push_to_hub else None,
    )  # fmt: skip


# ---- what transformers' loader runs on names and tensors -------------------------------------------------------------


class _OriginalName(WeightRenaming):
    """Renames `layer.weight.net` to `layer.weight`; leaves no trace in the model."""

    __slots__ = ()

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        return source_key.removesuffix(SUFFIX), None


class _Everything(WeightConverter):
    """Matches each tensor that no conversion of the model's own has matched."""

    __slots__ = ()

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        return source_key, METHOD


class _Take(ConversionOps):
    """Makes parameters of stored bytes: compressed ones where the model can run so, else dense ones."""

    def __init__(self, quantizer: NetweightQuantizer, *, dense: bool = False) -> None:
        self.quantizer = quantizer
        self.dense = dense
        self.dtype: torch.dtype | None = None

    def __deepcopy__(self, memo: Any) -> _Take:
        """Each parameter has its own operation, with its own dtype; all share the quantizer."""
        return _Take(self.quantizer, dense=self.dense)

    def convert(self, input_dict: dict[str, Any], *args: Any, full_layer_name: str = "", **kwargs: Any) -> Any:
        weights = self.quantizer._weights
        if self.dense:
            return {
                key: [self._tried(weights.decode, key, blob) for blob in _several(blobs)]
                for key, blobs in input_dict.items()
            }
        (blobs,) = input_dict.values()
        (blob,) = _several(blobs)
        return {full_layer_name: self._tried(weights.take, full_layer_name, blob)}

    def _tried(self, make: Callable[..., torch.Tensor], name: str, stored: torch.Tensor) -> torch.Tensor:
        """Keep damage for the end: transformers would log it, and raise an error that names nothing."""
        self.quantizer._taken = True
        try:
            return make(name, stored, self.dtype)
        except (CorruptBlob, UsageError) as error:
            self.quantizer._damage = self.quantizer._damage or error
            about = codec.info(stored.cpu())
            return torch.zeros(about.shape, dtype=torch_dtype(about.dtype), device=stored.device)


class _Compress(ConversionOps):
    """Compresses dense tensors as they arrive."""

    def __init__(self, quantizer: NetweightQuantizer) -> None:
        self.quantizer = quantizer

    def __deepcopy__(self, memo: Any) -> _Compress:
        return self

    def convert(
        self, input_dict: dict[str, Any], *args: Any, full_layer_name: str = "", model: Any = None, **kwargs: Any
    ) -> Any:
        result = {}
        for key, tensors in input_dict.items():
            tensor = _several(tensors)[0]
            if key not in self.quantizer._weights:
                result[key] = tensor
            elif tensor.shape != model.get_parameter(key).shape:
                # Transformers then treats the key as it treats any other.
                self.quantizer._misfits.add(key)
                result[key] = tensor
            else:
                result[key] = self.quantizer._weights.compress(key, tensor)
        return result


def _several(tensors: Any) -> list[Any]:
    return tensors if isinstance(tensors, list) else [tensors]


def _first_dtype(model: str, weights: str) -> torch.dtype | None:
    """The dtype of the first floating point tensor that is stored."""

    def find(name: str) -> Any:
        return cached_file(model, name, _raise_exceptions_for_missing_entries=False)

    path = find(weights)
    if path is not None and weights.endswith(".json"):
        path = find(min(weight_map(Path(path)).values()))
    if path is None:
        return None
    with closing(StoredFile(Path(path))) as file:
        dtypes = [file.info(name).dtype for name in sorted(file.names())]
    return next((torch_dtype(name) for name in dtypes if name in ("BF16", "F16", "F32", "F64")), None)
