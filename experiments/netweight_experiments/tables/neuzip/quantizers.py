"""The quantizers that compressed models are measured against: torchao and bitsandbytes, weights only, on the CPU.

`quantizers` lists them, `quantize_` applies one in place, `missing` says why one does not run here. Both libraries are
optional. Used by the tables that lay netweight beside them.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from netweight.core.progress import quiet_imports
from netweight.errors import MissingExtra, NameNotFound, Unsupported

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Quantizer:
    """One way of quantizing weights."""

    name: str
    """Its name in tables; those of the papers where they have it."""
    package: str
    """The library that does it."""
    setting: str
    """Type of number and size of the groups that share a scale, in words."""


_BITSANDBYTES_4BIT = {
    "Quant FP4": ("fp4", False),
    "Quant NF4": ("nf4", False),
    "Quant FP4^2": ("fp4", True),
    "Quant NF4^2": ("nf4", True),
}
# Activations above it stay out of int8, by the default of transformers.
_OUTLIER = 6.0
_TORCHAO_INT4 = {"torchao INT4, groups of 32": 32, "torchao INT4, groups of 128": 128}


def quantizers() -> tuple[Quantizer, ...]:
    """Return all quantizers, installed or not, in the order of the papers' tables."""
    doubled = {False: "fp32 scales", True: "scales quantized too"}
    return (
        Quantizer("Quant INT8", "bitsandbytes", "int8, one scale per row; activations too, but for outliers"),
        *(
            Quantizer(name, "bitsandbytes", f"{kind}, groups of 64, {doubled[double]}")
            for name, (kind, double) in _BITSANDBYTES_4BIT.items()
        ),
        Quantizer("torchao INT8", "torchao", "int8, one scale per row"),
        *(
            Quantizer(name, "torchao", f"int4 with zero point, groups of {size}")
            for name, size in _TORCHAO_INT4.items()
        ),
    )


def missing(quantizer: Quantizer) -> str:
    """Return why a quantizer cannot run here, or an empty text."""
    if importlib.util.find_spec(quantizer.package) is None:
        return f'{quantizer.package} is not installed (pip install "netweight[bench]")'
    try:
        with quiet_imports():
            importlib.import_module(quantizer.package)
    except Exception as error:  # a library that was built for another torch fails in ways of its own
        return f"{quantizer.package} cannot be imported: {type(error).__name__}: {error}"
    return ""


def linear_layers(model: nn.Module, *, keep: tuple[str, ...] = ("lm_head",)) -> list[str]:
    """Return the names of the layers that quantizers convert: linear ones, the output layer excepted."""
    from torch import nn

    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rsplit(".", 1)[-1] not in keep
    ]


def quantize_(model: nn.Module, quantizer: Quantizer, layers: list[str]) -> None:
    """Quantize the weights of some linear layers in place."""
    reason = missing(quantizer)
    if reason:
        raise MissingExtra(f"{quantizer.name} cannot be measured: {reason}.")
    known: dict[str, Callable[[nn.Module, str, set[str]], None]] = {
        "Quant INT8": _bitsandbytes,
        **dict.fromkeys(_BITSANDBYTES_4BIT, _bitsandbytes),
        "torchao INT8": _torchao,
        **dict.fromkeys(_TORCHAO_INT4, _torchao),
    }
    if quantizer.name not in known:
        raise NameNotFound(f"There is no quantizer {quantizer.name!r}.", cure=f"There are: {', '.join(known)}.")
    before = {path: held_bytes(model.get_submodule(path)) for path in layers}
    try:
        with quiet_imports():
            known[quantizer.name](model, quantizer.name, set(layers))
    except (RuntimeError, ValueError, AssertionError) as error:  # shapes or machines that its kernels do not take
        raise Unsupported(
            f"{quantizer.package} cannot quantize this model: {error}", cure="Load the model again: it is half changed."
        ) from error
    skipped = [path for path, count in before.items() if held_bytes(model.get_submodule(path)) >= count]
    if skipped:  # torchao passes over layers whose rows its groups do not divide
        raise Unsupported(
            f"{quantizer.package} left {len(skipped)} of {len(layers)} layers as they are, {skipped[0]} for one",
            cure="Take other groups, or a model whose rows they divide.",
        )


def _torchao(model: nn.Module, name: str, layers: set[str]) -> None:
    """Int8 by its stable part; int4 on CPUs is in the part that it calls prototype."""
    quantization = importlib.import_module("torchao.quantization")
    if name in _TORCHAO_INT4:
        workflow = importlib.import_module("torchao.prototype.quantization.int4.inference_workflow")
        config = workflow.PrototypeInt4WeightOnlyConfig(group_size=_TORCHAO_INT4[name], set_inductor_config=False)
    else:
        config = quantization.Int8WeightOnlyConfig(set_inductor_config=False)
    quantization.quantize_(model, config, lambda module, path: path in layers)


def _bitsandbytes(model: nn.Module, name: str, layers: set[str]) -> None:
    """Layers of bitsandbytes around the same weights; they quantize when they are told to be on a device."""
    import torch

    bnb: Any = importlib.import_module("bitsandbytes")
    for path in layers:
        dense: Any = model.get_submodule(path)
        weight, bias = dense.weight, dense.bias
        sizes = (weight.shape[1], weight.shape[0], bias is not None)
        with torch.device("meta"):
            if name == "Quant INT8":
                layer = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=_OUTLIER)
            else:
                layer = bnb.nn.Linear4bit(*sizes, compute_dtype=weight.dtype, quant_storage=weight.dtype)
        if name == "Quant INT8":
            layer.weight = bnb.nn.Int8Params(weight.data, requires_grad=False, has_fp16_weights=False)
        else:
            kind, double = _BITSANDBYTES_4BIT[name]
            layer.weight = bnb.nn.Params4bit(
                weight.data,
                requires_grad=False,
                quant_type=kind,
                compress_statistics=double,
                # Bytes that call themselves bf16: T5 casts activations to the dtype of the weight that follows.
                quant_storage=weight.dtype,
                module=layer,
            )
        layer.bias = bias
        model.set_submodule(path, layer.to(weight.device))


def nf4() -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
    """Return bitsandbytes' functions that quantize a matrix to NF4, groups of 64, and give a dense one again."""
    reason = missing(Quantizer("Quant NF4", "bitsandbytes", ""))
    if reason:
        raise MissingExtra(f"NF4 cannot be measured: {reason}.")
    functional: Any = importlib.import_module("bitsandbytes.functional")
    return (
        lambda weight: functional.quantize_4bit(weight, quant_type="nf4"),
        lambda kept: functional.dequantize_4bit(*kept),
    )


def held_bytes(module: nn.Module) -> int:
    """Count the bytes that parameters and buffers hold, quantized and compressed ones with everything they need."""
    # Scales, zero points and tables count, also where a library keeps them beside the parameter. Memory that several
    # tensors share counts once.
    storages: dict[int, int] = {}
    for tensor in _tensors(module):
        if not tensor.is_meta:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    for part in module.modules():
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None:
                yield from _parts(tensor)
        # bitsandbytes keeps the scales of int8 in the layer's state or in the parameter, of 4 bit in a quant_state.
        yield from _values(getattr(part, "state", None), ("CB", "SCB"))


def _parts(tensor: Any) -> Iterator[torch.Tensor]:
    """A tensor, or the plain tensors that a wrapper is made of."""
    if hasattr(tensor, "payload"):
        yield tensor.payload
    elif hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _parts(getattr(tensor, name))
    else:
        yield tensor
        yield from _values(tensor, ("CB", "SCB"))
        state = getattr(tensor, "quant_state", None)
        while state is not None:
            yield from _values(state, ("absmax", "code", "offset"))
            state = getattr(state, "state2", None)


def _values(holder: Any, names: tuple[str, ...]) -> Iterator[torch.Tensor]:
    import torch

    for name in names:
        value = getattr(holder, name, None)
        if isinstance(value, torch.Tensor):
            yield value
