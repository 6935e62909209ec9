"""transformers models with weights that stay compressed in memory. Importing this module registers the plug-in.

    import netweight.integrations.transformers

After that `from_pretrained` loads a folder made by `netweight compress`: the compressed bytes become the model's
weights as they are. With `quantization_config=NetweightConfig()` it compresses a dense folder while loading it, one
tensor after another. Either way the model computes what the dense one does, bit for bit, unless the configuration says
to round weights (`mantissa_bits`), and `save_pretrained` writes a compressed folder. Compressed are the weights that
`netweight.compress_` compresses; others, such as norms and the merged experts of a mixture, are decoded while loading.
Needs transformers 5.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MethodType
from typing import Any, final, get_args

import torch
from torch import nn

from netweight import codec
from netweight.codec import Precision
from netweight.codec.dtypes import dtype_name, torch_dtype
from netweight.core.names import Select
from netweight.errors import CorruptBlob, MissingExtra, Unsupported, UsageError
from netweight.methods.compress.folder import compress_folder
from netweight.methods.compress.manifest import MANIFEST
from netweight.methods.compress.memory.box import Box, pack
from netweight.methods.compress.memory.model import choose, dense_state_dict, place
from netweight.methods.compress.memory.tensor import CompressedTensor
from netweight.store.description import SUFFIX
from netweight.store.reading import StoredFile, weight_map
from netweight.store.writing import Level

try:
    from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise MissingExtra(
        "This plug-in needs transformers 5, which is not installed.", cure="Install it: pip install 'netweight[llm]'."
    ) from error

__all__ = ["NetweightConfig", "NetweightQuantizer", "save_pretrained"]

_METHOD = "netweight"
_VERSION = 1


@register_quantization_config(_METHOD)
@final
class NetweightConfig(QuantizationConfigMixin):
    """How `from_pretrained` keeps weights: `from_pretrained(folder, quantization_config=NetweightConfig())`.

    A folder that is compressed already needs none: it loads with its own, and transformers warns if it ignores another.

    Args:
        include: Patterns of modules to compress (see `netweight.Select`); a module stands for everything below it.
            None takes all that `netweight.compress_` knows.
        exclude: Patterns of modules to leave dense.
        level: The codec's level, also for later changes of a weight and for `save_pretrained`.
        mantissa_bits: Bits of the mantissa to keep, 0 to 6, of weights that are compressed while loading; 7 keeps all.
        block_size: Weights that share a normalizer when rounded; None for no normalizers.
        fidelity: The arithmetic of rounding, "corrected" or "reference"; see `netweight.codec.encode_lossy`.
        version: Version of the compressed folder; written by `netweight compress`.
        weights: Its weights file or index; written by `netweight compress`.
        quant_method: Always `"netweight"`.

    Raises:
        UsageError: There is no such level, or a setting of rounding is out of its range.
        Unsupported: A newer release wrote the folder.
    """

    def __init__(
        self,
        include: Select | str | Iterable[str] | None = None,
        exclude: Select | str | Iterable[str] | None = None,
        level: Level = "default",
        version: int = _VERSION,
        weights: str | None = None,
        quant_method: str = _METHOD,
        mantissa_bits: int = 7,
        block_size: int | None = 512,
        fidelity: str = "corrected",
    ) -> None:
        if level not in get_args(Level):
            raise UsageError(f"There is no level {level!r}.", cure=f"Choose one of {', '.join(get_args(Level))}.")
        if version != _VERSION:
            raise Unsupported(
                f"The compressed folder is of version {version!r}; this release reads version {_VERSION}.",
                cure="Upgrade netweight: pip install --upgrade netweight.",
            )
        self.quant_method = quant_method  # type: ignore[assignment]
        self.version = version
        self.include = _listed(include)
        self.exclude = _listed(exclude)
        self.level = level
        self.weights = weights
        Precision(mantissa_bits, block_size, fidelity)  # checks them
        self.mantissa_bits = mantissa_bits
        self.block_size = block_size
        self.fidelity = fidelity

    @property
    def precision(self) -> Precision:
        """How much of weights to keep."""
        return Precision(self.mantissa_bits, self.block_size, self.fidelity)


@register_quantizer(_METHOD)
@final
class NetweightQuantizer(HfQuantizer):
    """What transformers calls while it loads a model; not for direct use.

    Args:
        quantization_config: The settings.
        kwargs: `pre_quantized`, whether the folder says that it is compressed.
    """

    requires_calibration = False
    quantization_config: NetweightConfig

    def __init__(self, quantization_config: NetweightConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        # A configuration that names no weights came from a model compressed in memory: its folder is dense.
        self.pre_quantized = self.pre_quantized and quantization_config.weights is not None
        self._chosen: dict[str, int | None] = {}
        self._misfits: set[str] = set()
        self._loading = True
        self._dtype: torch.dtype | None = None

    # ---- before loading ----

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse what compressed weights cannot do.

        Raises:
            Unsupported: Weights would be offloaded to disk.
        """
        if isinstance(device_map, Mapping) and "disk" in device_map.values():
            raise Unsupported(
                "Compressed weights cannot be offloaded to disk.", cure='Leave "disk" out of the device map.'
            )

    def update_attn_implementation(self, config: Any) -> Any:
        """Put the name of the weights back where `netweight compress` wrote a sentence for loaders without netweight.

        Called before files are looked for; transformers has no better place. A configuration that names no dtype gets
        that of the first tensor, since transformers would find that of the compressed bytes.
        """
        weights = self.quantization_config.weights
        if self.pre_quantized and weights is not None:
            config.transformers_weights = weights
            if getattr(config, "dtype", None) is None:
                config.dtype = _first_dtype(Path(getattr(config, "_name_or_path", "")), weights)
        return config

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Refuse the dtype of compressed bytes.

        Raises:
            UsageError: The folder's configuration names no dtype, and the weights lie in a subfolder or on the hub.
        """
        if not dtype.is_floating_point:
            raise UsageError(
                "The folder's config.json names no dtype.", cure="Pass it to from_pretrained: dtype=torch.bfloat16."
            )
        return dtype

    def _process_model_before_weight_loading(
        self, model: Any, dtype: torch.dtype | None = None, checkpoint_files: Any = None, **kwargs: Any
    ) -> Any:
        """Choose the weights to hold compressed, and check the compressed files before anything is read from them."""
        self._dtype = dtype
        config = self.quantization_config
        self._chosen = choose(model, include=config.include, exclude=config.exclude)
        tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
        for target, source in tied.items():
            if target not in self._chosen or source not in self._chosen:
                self._chosen.pop(target, None)
                self._chosen.pop(source, None)
        if self.pre_quantized:
            for file in checkpoint_files or ():
                _check(Path(file))
        else:
            for name in {dtype_name(model.get_parameter(name).dtype) for name in self._chosen}:
                config.precision.rounding(name)  # refuses dtypes that cannot be rounded, before anything is loaded
        return model

    # ---- while loading ----

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Whether a dense tensor is compressed as it arrives."""
        if self.pre_quantized or param_name not in self._chosen or param_name in self._misfits:
            return False
        return bool(self._dtype is None or model.get_parameter(param_name).dtype == self._dtype)

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        """Bytes to expect per number: for what is compressed a little more than it usually takes."""
        return param.element_size() * (0.75 if param_name in self._chosen else 1.0)

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
        if len(operations) > 1:  # the model's own conversion needs dense tensors; what comes out is compressed again
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
        return [_OriginalName(_METHOD, _METHOD), *changed, _Everything(_METHOD, _METHOD, [_Take(self)])]

    # ---- after loading ----

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """Let go of the checkpoint's memory, and leave nothing of the loading behind."""
        self._loading = False
        seen: set[int] = set()
        for module in model.modules():
            for attribute, parameter in module._parameters.items():
                compressed = isinstance(parameter, CompressedTensor)
                if compressed:
                    place(module, attribute, parameter)
                elif parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    if parameter.device.type == "cpu":
                        parameter.data = parameter.data.clone()  # it may lie in the mapped file
            for attribute, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type == "cpu":
                    module._buffers[attribute] = buffer.clone()
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
        model.save_pretrained = MethodType(save_pretrained, model)
        return model

    def get_state_dict_and_metadata(self, model: Any) -> Any:
        """Refuse transformers' own way of saving, which cannot write compressed weights; adapters it saves itself.

        Raises:
            UsageError: The model was pickled, and so came to lack its own `save_pretrained`.
        """
        if not getattr(model, "_hf_peft_config_loaded", False):
            raise UsageError(
                "transformers' own save_pretrained cannot write compressed weights.",
                cure="Call netweight.integrations.transformers.save_pretrained(model, FOLDER).",
            )
        return None, {}

    def is_serializable(self) -> bool:
        """Whether the model can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether adapters on the model can be trained."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """Whether the weights themselves can be trained."""
        return True


def save_pretrained(
    self: Any,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: Any = None,
    push_to_hub: bool = False,
    **kwargs: Any,
) -> None:
    """Save a model that this plug-in loaded as a compressed folder: the `save_pretrained` of such models.

    The folder is what `netweight compress` makes of the folder that the dense model would save: it loads again exactly,
    and `netweight verify` and `netweight decompress` take it. To get there the dense folder is written for a while,
    beside the target: this needs the memory and the disk space of the dense model. Where adapters are attached, only
    these are saved, as transformers does.

    Args:
        self: The model.
        save_directory: The folder. It appears whole if there was none. Else an older compressed model in it is
            replaced file by file, and other files stay.
        is_main_process: Whether this process writes; the others do nothing.
        state_dict: Not used: what is saved is the model.
        push_to_hub: Not supported here.
        kwargs: Whatever else transformers takes, e.g. `max_shard_size` (of the dense shards) or `variant`.

    Raises:
        Unsupported: `push_to_hub` was asked for.
        UsageError: The target is a file.
    """
    if getattr(self, "_hf_peft_config_loaded", False):
        type(self).save_pretrained(self, save_directory, is_main_process, None, push_to_hub, **kwargs)
        return
    if push_to_hub:
        raise Unsupported(
            "A compressed model cannot be saved and pushed in one step.",
            cure="Save it to a folder, then: hf upload NAME FOLDER.",
        )
    target = Path(save_directory)
    if target.is_file():
        raise UsageError(f"{target} is a file.", cure="Name a folder.")
    if not is_main_process:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as beside:
        plain, compressed = Path(beside) / "plain", Path(beside) / "net"
        quantizer, config = self.hf_quantizer, self.config.quantization_config
        self.hf_quantizer = None
        del self.config.quantization_config
        try:
            type(self).save_pretrained(self, plain, state_dict=dense_state_dict(self), **kwargs)
        finally:
            self.hf_quantizer, self.config.quantization_config = quantizer, config
        compress_folder(plain, compressed, level=config.level, ready=_rounded(self))
        _move_into(compressed, target)


def _rounded(model: nn.Module) -> dict[str, memoryview]:
    """The blobs of a model's rounded weights, by the digests of what they decode to."""
    weights: Iterable[torch.Tensor] = model.parameters()  # each once, however often it is tied
    boxes = [weight.box for weight in weights if isinstance(weight, CompressedTensor)]
    blobs = [box.blob for box in boxes if box.lossy]
    return {codec.info(blob).digest: blob for blob in blobs}


def _move_into(folder: Path, target: Path) -> None:
    """Put a compressed folder's files into a folder that may hold others, the configuration last."""
    if not target.exists():
        os.replace(folder, target)
        return
    files = sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.name == "config.json")
    if (target / MANIFEST).is_file():
        for old in target.glob("*.net.safetensors*"):
            old.unlink()
    for file in files:
        place_of = target / file.relative_to(folder)
        place_of.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, place_of)


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
        return source_key, _METHOD


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
        if self.dense:
            return {key: [self._decoded(blob) for blob in _several(blobs)] for key, blobs in input_dict.items()}
        (blobs,) = input_dict.values()
        (blob,) = _several(blobs)
        return {full_layer_name: self._parameter(blob, full_layer_name)}

    def _parameter(self, stored: torch.Tensor, name: str) -> torch.Tensor:
        if name not in self.quantizer._chosen:
            return self._decoded(stored)
        blob = _bytes(stored)
        info = codec.info(blob)
        dtype = torch_dtype(info.dtype)
        if self._cast(dtype) != dtype:
            return _compressed(self.quantizer, name, self._decoded(stored))
        payload = pack(blob)
        if payload.nbytes >= info.nbytes:
            return self._decoded(stored)
        level: Any = info.level
        box = Box(payload.to(stored.device), tuple(info.shape), dtype, level, info.chunk_log2)
        return nn.Parameter(CompressedTensor(box), requires_grad=dtype.is_floating_point)

    def _decoded(self, stored: torch.Tensor) -> torch.Tensor:
        # Cloned, since the codec's own memory is for tensors that come and go.
        tensor = codec.decode(_bytes(stored), threads=torch.get_num_threads(), check=True)
        dtype = self._cast(tensor.dtype)
        return (tensor.clone() if dtype == tensor.dtype else tensor.to(dtype)).to(stored.device)

    def _cast(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that a stored tensor of some dtype gets in the model."""
        return self.dtype if self.dtype is not None and dtype.is_floating_point else dtype


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
            if key not in self.quantizer._chosen:
                result[key] = tensor
            elif tensor.shape != model.get_parameter(key).shape:
                self.quantizer._misfits.add(key)  # transformers then treats it as it treats any other
                result[key] = tensor
            else:
                result[key] = _compressed(self.quantizer, key, tensor)
        return result


def _compressed(quantizer: NetweightQuantizer, name: str, dense: torch.Tensor) -> torch.Tensor:
    config = quantizer.quantization_config
    # What was rounded before it was stored is not rounded again.
    precision = None if quantizer.pre_quantized else config.precision
    box = Box.of(dense, level=config.level, chunk_log2=quantizer._chosen[name], precision=precision)
    if box.payload.nbytes >= dense.nbytes:
        return dense
    return nn.Parameter(CompressedTensor(box), requires_grad=dense.is_floating_point())


def _several(tensors: Any) -> list[Any]:
    return tensors if isinstance(tensors, list) else [tensors]


def _bytes(stored: torch.Tensor) -> Any:
    """A stored tensor's bytes, without a copy if they are on the CPU."""
    content: Any = stored.cpu().numpy()
    return memoryview(content)


def _first_dtype(folder: Path, weights: str) -> torch.dtype | None:
    """The dtype of the first floating point tensor that is stored, if the folder is on this machine."""
    path = folder / weights
    if not path.is_file():
        return None
    if path.suffix == ".json":
        path = folder / min(weight_map(path).values())
    file = StoredFile(path)
    try:
        dtypes = [file.info(name).dtype for name in sorted(file.names())]
    finally:
        file.close()
    return next((torch_dtype(name) for name in dtypes if name in ("BF16", "F16", "F32", "F64")), None)


def _check(path: Path) -> None:
    """Compare what a compressed file says of its tensors with what their bytes say, without decoding any.

    Raises:
        CorruptBlob: They differ, or the file is damaged.
        UsageError: The file is not compressed.
    """
    file = StoredFile(path)
    try:
        if file.description is None:
            raise UsageError(
                f"{path} is not compressed, though its folder's config.json says so.",
                cure="Compress the folder anew, or remove quantization_config and transformers_weights there.",
            )
        for name in file.names():
            told = file.info(name)
            try:
                found = codec.info(file.raw(name))
            except CorruptBlob as error:
                raise CorruptBlob(
                    f"{path}, tensor {name!r}: {error.reason}", cure="Fetch or compress it again."
                ) from error
            if (found.dtype, tuple(found.shape), found.digest) != (told.dtype, told.shape, told.digest):
                raise CorruptBlob(
                    f"{path}, tensor {name!r}: its bytes are those of another tensor.",
                    cure="Fetch or compress it again.",
                )
    finally:
        file.close()


def _listed(patterns: Select | str | Iterable[str] | None) -> list[str] | None:
    return None if patterns is None else list(Select.of(patterns).patterns)
