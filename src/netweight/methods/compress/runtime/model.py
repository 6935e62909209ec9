"""Conversion of whole models in place: dense to compressed and back, and from one form of payloads to the other."""

from __future__ import annotations

import gc
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, NamedTuple, final, get_args

import torch
from torch import nn

from netweight import codec
from netweight.codec import Precision
from netweight.codec.header import dtype_name
from netweight.codec.lossy import LOSSLESS_BITS
from netweight.core.names import Select
from netweight.errors import AlreadyCompressed, OutOfMemory, Unsupported, UsageError
from netweight.methods.compress.runtime import cuda as device
from netweight.methods.compress.runtime.fsdp import dense_shard, local_part
from netweight.methods.compress.runtime.incompatible import refuse_rounded_steps
from netweight.methods.compress.runtime.storage import CompressedStorage
from netweight.methods.compress.runtime.tensor import CompressedTensor
from netweight.store.choices import Level

Prefer = Literal["memory", "speed"]
Patterns = Select | str | Iterable[str] | None
# An embedding reads few rows at a time, so its chunks are small: 16,384 numbers.
_ROW_CHUNKS = 14
# Bytes of payloads that share a segment of a GPU's memory.
_TOGETHER = 256 << 20
# Addresses are multiples of so many bytes, as in torch.
_ALIGNMENT = 512


@final
@dataclass(frozen=True)
class Compression:
    """Result of `compress_`."""

    compressed: tuple[str, ...]
    """Names of the compressed weights; a tied weight is listed under each of its names."""
    left_dense: dict[str, str] = field(repr=False)
    """Weights of two and more dimensions that were left as they are, with the reason."""
    before: int
    """Size in bytes of the compressed weights as dense tensors; a tied weight counts once."""
    after: int
    """Present size in bytes of the compressed weights, spare capacity included."""
    bound: float = 0.0
    """Largest relative change of a number that rounding may cause; 0 if nothing was rounded."""
    changes: dict[str, float] = field(default_factory=dict, repr=False)
    """Name of a rounded weight, under each of its names → the largest relative change that was measured."""
    fixed: tuple[str, ...] = field(default=(), repr=False)
    """Names of those of the compressed weights that are in the fixed-length form."""

    @property
    def worst_change(self) -> float:
        """The largest relative change that was measured; 0 if nothing was rounded."""
        return max(self.changes.values(), default=0.0)

    @property
    def share(self) -> float:
        """Compressed size as a share of the dense size, `after / before`; 1 if nothing was compressed."""
        return self.after / self.before if self.before else 1.0


# Weights made in inference mode could not be trained afterwards.
@torch.inference_mode(False)
def compress_(
    model: nn.Module,
    *,
    include: Patterns = None,
    exclude: Patterns = None,
    level: Level = "default",
    mantissa_bits: int = 7,
    block_size: int | None = 512,
    fidelity: str = "corrected",
    prefer: Prefer | None = None,
) -> Compression:
    """Compress a model's weights in memory, in place; unless they are rounded, outputs stay the same bit for bit.

    Weights of Linear, Embedding, Conv1d, Conv2d, transformers' Conv1D and its merged experts are compressed, of any
    dtype; biases and norms stay dense. Tied weights are compressed once and stay tied; one is left dense if any of its
    layers is left out. A weight that would not get smaller stays dense. Parameters are replaced: shard (`fully_shard`)
    and make optimizers afterwards. Memory formats such as torch.channels_last stay.

    With fewer than 7 `mantissa_bits` weights are rounded first, for inference and for adapters on a frozen base: the
    report says by how much at most. Nothing can be written into rounded weights, since each write would round again. A
    conversion to another dtype keeps the rounded values as that dtype has them, compressed without a further loss.

    With `prefer="speed"`, and by default on GPUs, bf16 weights of Linear layers, tied to an embedding or not, take the
    fixed-length form, three quarters of the dense size instead of two thirds, which products of up to 256 rows of
    inputs read without decoding all of it first. The weights are the same, bit for bit. Outputs are so on the CPU; on a
    GPU such products are summed in another order than torch's (see docs/gpus.md).

    Args:
        model: Any module. Its own forward runs unchanged.
        include: Patterns of modules (see `Select`); a module stands for everything below it. None takes all.
        exclude: Patterns of modules to leave dense.
        level: The codec's level, also for every later change of a weight.
        mantissa_bits: Bits of the mantissa to keep, 0 to 6; 7 keeps all bits of any dtype.
        block_size: Weights that share a normalizer when rounded; None for no normalizers.
        fidelity: The arithmetic of rounding, "corrected" or "reference"; see `netweight.codec.encode_lossy`.
        prefer: "memory" for the codec's form for all weights; "speed" for the fixed-length form where there is one;
            None for "speed" on GPUs on which netweight's kernels run, and "memory" elsewhere and for rounded weights.

    Returns:
        What was compressed, what was left dense and why, the bytes, and what rounding changed.

    Raises:
        AlreadyCompressed: A chosen weight is compressed already.
        Unsupported: A layer asked for by name cannot run compressed, or a weight contains no values, or one is to be
            rounded whose dtype cannot be. All are listed.
        NameNotFound: A pattern matches no module.
        UsageError: There is no such level or preference, a setting of rounding is out of its range, rounded weights
            were to have the fixed-length form, or an optimizer steps one of the dense weights. In this case as in those
            above nothing was changed.
        OutOfMemory: The memory of the device ended. The weights before the named one are compressed, the
            others are dense; all have their values.

    Source: NeuZip (arXiv 2410.20650), section 3.1; there for bf16 and linear layers, here for all dtypes.
    """
    if level not in get_args(Level):
        raise UsageError(f"There is no level {level!r}.", cure=f"Choose one of {', '.join(get_args(Level))}.")
    precision = Precision(mantissa_bits, block_size, fidelity)
    check_prefer(prefer, precision)
    linear = linear_weights(model)
    weights, left = _plan(model, include, exclude)
    _refuse_unroundable(weights, precision)
    _refuse_live_optimizers(
        {id(places[0].parameter): places[0].name for places in weights},
        "Create the optimizer after compress_, which replaces these parameters.",
    )
    names: list[str] = []
    fixed: list[str] = []
    changes: dict[str, float] = {}
    before = after = 0
    bound = 0.0
    on_gpus: dict[torch.device, list[torch.Tensor]] = {}
    while weights:
        # The reference is removed, so that the dense memory is freed at once.
        places = weights.pop(0)
        dense, chunks, its_names = places[0].parameter, _row_chunks(places), [at.name for at in places]
        try:
            stored = CompressedStorage.of(
                dense.data,
                level=level,
                chunk_log2=chunks,
                precision=precision,
                fixed=its_names[0] in linear and takes_fixed(prefer, dense.device),
            )
        except (torch.OutOfMemoryError, OutOfMemory) as error:
            raise OutOfMemory(
                f"The memory of {dense.device} ended while {its_names[0]} was compressed ({error}). {len(names)} "
                "weights are compressed and the others are dense, all with their values.",
                cure="Compress the model on the CPU and move it afterwards; or free memory and compress the rest.",
            ) from error
        if stored.payload.nbytes >= dense.nbytes:
            left.update(dict.fromkeys(its_names, "would not get smaller"))
            continue
        parameter = nn.Parameter(CompressedTensor(stored), requires_grad=dense.requires_grad)
        for at in places:
            place(at.module, at.attribute, parameter, at.name)
        names += its_names
        fixed += its_names * stored.fixed
        if stored.lossy:
            info = codec.info(stored.blob)
            bound = max(bound, info.bound)
            changes.update(dict.fromkeys(its_names, info.worst_change))
        before, after = before + dense.nbytes, after + stored.payload.nbytes
        if device.handles(stored.payload):
            on_gpus.setdefault(stored.payload.device, []).append(stored.payload)
        del dense, places, at
    for payloads in on_gpus.values():
        _put_side_by_side(payloads)
    return Compression(tuple(names), left, before, after, bound, changes, tuple(fixed))


def _put_side_by_side(payloads: list[torch.Tensor]) -> None:
    """Give the driver the GPU memory that dense weights, scratch and the ends of payloads take."""
    # Torch takes memory from the driver in pieces of 2 MiB: with a segment for each payload, half of one is lost.
    while payloads:
        torch.cuda.empty_cache()
        sizes = list(accumulate(-(-payload.numel() // _ALIGNMENT) * _ALIGNMENT for payload in payloads))
        together = payloads[: bisect(sizes, _TOGETHER)]
        if together:
            room = payloads[0].new_empty(sizes[len(together) - 1])
            for payload, start in zip(together, [0, *sizes], strict=False):
                payload.data = room[start : start + payload.numel()].copy_(payload)
            del room, payload
        # A payload that is larger than a segment stays where it is.
        payloads = payloads[max(1, len(together)) :]
    torch.cuda.empty_cache()


def decompress_(model: nn.Module, *, include: Patterns = None, exclude: Patterns = None) -> tuple[str, ...]:
    """Make compressed weights dense again, in place; tied weights stay tied.

    Args:
        model: A model that `compress_` or an integration has compressed.
        include: Patterns of modules; None takes all.
        exclude: Patterns of modules to leave compressed.

    Returns:
        Names of the weights that are dense now. Of tied weights all, if any of them is chosen and none excluded.

    Raises:
        NameNotFound: A pattern matches no module.
        CorruptBlob: A weight is damaged; it and those after it stay compressed.
        Unsupported: The model is sharded; nothing was changed.
        UsageError: An optimizer still steps a compressed weight, and would step it on, unseen; nothing was changed.
    """
    _, included = _chosen(model, include)
    _, excluded = _chosen(model, exclude)
    weights = [places for places in _weights(model) if isinstance(local_part(places[0].parameter), CompressedTensor)]
    for at in [places[0] for places in weights]:
        if not isinstance(at.parameter, CompressedTensor):
            raise Unsupported(
                f"{at.name} is a shard, and shards stay compressed. Nothing was changed.",
                cure="Use netweight.dense_state_dict(model), and load that into a dense model.",
            )
    _refuse_live_optimizers(
        {id(places[0].parameter): places[0].name for places in weights},
        "Delete it first (`del optimizer`, or `close()` if it is a LayerwiseOptimizer), then make a new one for "
        "the dense weights and load its state_dict.",
    )
    done: list[str] = []
    for places in weights:
        paths = {at.path for at in places}
        if paths & excluded or not (include is None or paths & included):
            continue
        compressed: Any = places[0].parameter
        # A copy of its own: memory of the codec's pool is for weights that come and go.
        dense = nn.Parameter(compressed.dense().clone(), requires_grad=compressed.requires_grad)
        for at in places:
            at.module._parameters[at.attribute] = dense
            _forget_hooks(at.module)
            done.append(at.name)
    return tuple(done)


def _refuse_live_optimizers(names: dict[int, str], cure: str) -> None:
    """Refuse to replace parameters, given by id, that an optimizer holds and would step on, unseen."""
    # The search inspects all objects of the process, which takes long.
    if not names:
        return
    held = _held_by_optimizers(names)
    if held:
        # An optimizer without references does not count.
        gc.collect()
        held = _held_by_optimizers(names)
    for kind, stepped in held.items():
        raise UsageError(f"An optimizer ({kind}) has the parameters {_few(stepped)}. Nothing was changed.", cure=cure)


def _held_by_optimizers(names: dict[int, str]) -> dict[str, list[str]]:
    """By class of optimizer which of the named parameters it steps."""
    held: dict[str, list[str]] = {}
    for optimizer in [thing for thing in gc.get_objects() if issubclass(type(thing), torch.optim.Optimizer)]:
        stepped = getattr(optimizer, "parameters_stepped", None)
        groups = getattr(optimizer, "param_groups", ()) if stepped is None else [{"params": stepped}]
        stepped_names = [names[id(each)] for group in groups for each in group["params"] if id(each) in names]
        if stepped_names:
            held[type(optimizer).__name__] = stepped_names
    return held


@torch.inference_mode(False)
def set_layout_(model: nn.Module, prefer: Prefer) -> tuple[str, ...]:
    """Change the form of a compressed model's weights in memory, in place, one after the other; values stay the same.

    For models that were loaded from compressed folders; see `compress_` for the two forms. What was rounded stays in
    the codec's form. Files hold that form whatever a model prefers.

    Args:
        model: A model that `compress_` or a plug-in has compressed.
        prefer: "memory" or "speed".

    Returns:
        Names of the weights that are in the fixed-length form now.

    Raises:
        UsageError: There is no such preference, or other processes share a weight.
        CorruptBlob: A weight is damaged; it and those after it stay as they are.
    """
    check_prefer(prefer, Precision())
    linear = linear_weights(model)
    fixed: list[str] = []
    for at in _places(model):
        if isinstance(at.parameter, CompressedTensor):
            at.parameter.stored.transcode(fixed=prefer == "speed" and at.name in linear)
            fixed += [at.name] * at.parameter.stored.fixed
    return tuple(fixed)


def dense_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return a state dict of dense tensors, for code that does not support compressed ones (other libraries).

    `model.state_dict()` gives the compressed form, which torch.save, torch.load and load_state_dict take as it is.
    Dense and compressed models load both forms.

    Args:
        model: Any module. Its memory is needed a second time, dense.

    Returns:
        Tensors by name; tied weights share memory as they do in a dense model. Of a sharded model they are DTensors,
        each process's part dense.
    """
    decoded: dict[int, torch.Tensor] = {}
    result: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        if isinstance(value, CompressedTensor):
            if id(value.stored) not in decoded:
                decoded[id(value.stored)] = value.dense()
            value = decoded[id(value.stored)].view(value.shape)
        elif isinstance(local_part(value), CompressedTensor):
            value = dense_shard(value)
        result[name] = value
    return result


def memory_footprint(model: nn.Module) -> int:
    """Return the number of bytes of a model's parameters and buffers.

    Args:
        model: Any module; dense weights count with their storage, compressed ones with their payload. Memory that
            several tensors share counts once; tensors on the meta device count nothing. Of a sharded model this
            process's shards count, and where it is gathered just now the dense weights.

    Returns:
        Bytes. Gradients, optimizer states and activations are not among them.
    """
    storages: dict[int, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        held = local_part(tensor)
        held = held.payload if isinstance(held, CompressedTensor) else held
        if not held.is_meta:
            storage = held.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


# ---- which weights ---------------------------------------------------------------------------------------------------


class _ParameterPlace(NamedTuple):
    """A parameter where a module holds it."""

    path: str
    """Name of the module."""
    module: nn.Module
    attribute: str
    parameter: nn.Parameter

    @property
    def name(self) -> str:
        return f"{self.path}.{self.attribute}" if self.path else self.attribute


def _places(model: nn.Module) -> Iterator[_ParameterPlace]:
    for path, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                yield _ParameterPlace(path, module, attribute, parameter)


def _weights(model: nn.Module) -> list[list[_ParameterPlace]]:
    """Every parameter, in all its places."""
    weights: dict[int, list[_ParameterPlace]] = {}
    for at in _places(model):
        weights.setdefault(id(at.parameter), []).append(at)
    return [*weights.values()]


def _row_chunks(places: list[_ParameterPlace]) -> int | None:
    return _ROW_CHUNKS if any(_kind(at) == "Embedding" for at in places) else None


def choose_weights(model: nn.Module, *, include: Patterns = None, exclude: Patterns = None) -> dict[str, int | None]:
    """Choose the weights that `compress_` would take, before they are loaded; for plug-ins that load them."""
    weights, _ = _plan(model, include, exclude, loaded=False)
    return {at.name: _row_chunks(places) for places in weights for at in places}


def linear_weights(model: nn.Module) -> frozenset[str]:
    """Names of the weights that can be fixed: those of Linear layers, tied to an embedding or not, under each name."""
    fitting = [{"Linear"}, {"Linear", "Embedding"}]
    return frozenset(
        at.name for places in _weights(model) if {_kind(each) for each in places} in fitting for at in places
    )


def takes_fixed(prefer: Prefer | None, place: torch.device) -> bool:
    """Decide whether weights that are multiplied take the fixed-length form.

    Args:
        prefer: What the user prefers; None if nothing was said.
        place: The device of the weights.

    Returns:
        Whether they do. Without a preference they do on GPUs on which netweight's kernels run, where products are then
        faster than dense ones, and not on the CPU, where people compress to save memory.
    """
    return prefer == "speed" or (prefer is None and device.multiplies_fixed(place))


def default_forms() -> dict[str, str]:
    """Describe the form that weights take on each kind of device if no preference is given.

    Returns:
        A sentence for "cpu" and one for "cuda", each with the form and the reason.
    """
    reason = device.no_fixed_because()
    cuda = (
        'the fixed-length form (prefer="speed") for weights that are multiplied (12 of '
        "16 bits; faster than dense weights "
        "at batch 1 to 32), the codec's form for others"
        if reason is None
        else f"the codec's form, decoded on the CPU: {reason}"
    )
    cpu = (
        'the codec\'s form (prefer="memory"): the least memory; with AVX-512 it generates about as fast as the dense '
        'model, and more slowly without AVX-512; prefer="speed" is faster, and takes a tenth more memory'
    )
    return {"cpu": cpu, "cuda": cuda}


def check_prefer(prefer: str | None, precision: Precision) -> None:
    """Refuse a preference that there is not, or that cannot be together with rounding."""
    if prefer is None:
        return
    if prefer not in get_args(Prefer):
        raise UsageError(f"There is no preference {prefer!r}.", cure=f"Choose one of {', '.join(get_args(Prefer))}.")
    if prefer == "speed" and precision.mantissa_bits != LOSSLESS_BITS:
        raise UsageError(
            "Rounded weights have no fixed-length form.", cure='Leave mantissa_bits=7, or prefer="memory" there.'
        )


def _plan(
    model: nn.Module, include: Patterns, exclude: Patterns, *, loaded: bool = True
) -> tuple[list[list[_ParameterPlace]], dict[str, str]]:
    """Return what to compress and what to leave, with reasons; `loaded` says whether weights hold their values yet."""
    matched, included = _chosen(model, include)
    _, excluded = _chosen(model, exclude)
    chosen: list[list[_ParameterPlace]] = []
    left: dict[str, str] = {}
    refused: list[str] = []
    twice: list[str] = []
    for places in _weights(model):
        parameter, reason = places[0].parameter, ""
        if parameter.dim() < 2:
            continue  # biases and norms
        for at in places:
            layer = type(at.module).__name__
            if include is not None and at.path not in included:
                reason = reason or "not included"
            elif at.path in excluded:
                reason = "excluded"
            elif isinstance(parameter, CompressedTensor):
                twice.append(at.name)
            elif (method := _quantized_by(at)) is not None:
                reason = f"{layer} has a weight that {method} has quantized"
                if at.path in matched:
                    refused.append(f"{at.name} of {layer}, which {method} has quantized")
            elif _kind(at) is None:
                reason = f"{layer} is not a layer that can run compressed"
                if at.path in matched:
                    refused.append(f"{at.name} of {layer}")
            elif local_part(parameter) is not parameter:
                refused.append(f"{at.name}, which is sharded already: compress_ goes before fully_shard")
            elif (loaded and parameter.is_meta) or parameter.layout != torch.strided:
                refused.append(f"{at.name}, which contains no plain values ({parameter.device}, {parameter.layout})")
        if reason:
            left.update((at.name, reason) for at in places)
        else:
            chosen.append(places)
    if refused:
        raise Unsupported(
            f"{len(refused)} weights cannot be compressed: {'; '.join(refused)}. Nothing was changed.",
            cure="Leave them out with `exclude`, or load their values first.",
        )
    if twice:
        raise AlreadyCompressed(
            f"{_few(twice)} {'is' if len(twice) == 1 else 'are'} compressed already. Nothing was changed.",
            cure="Call compress_ once, leave these out with `exclude`, or decompress_ them first.",
        )
    return chosen, left


def _refuse_unroundable(weights: list[list[_ParameterPlace]], precision: Precision) -> None:
    """Refuse before anything changes what cannot be rounded as asked."""
    refused: list[str] = []
    reason: Unsupported | None = None
    for places in weights:
        try:
            precision.rounding(dtype_name(places[0].parameter.dtype))
        except Unsupported as error:
            refused.append(places[0].name)
            reason = error
    if reason is not None:
        raise Unsupported(f"{_few(refused)}: {reason.reason} Nothing was changed.", cure=reason.cure) from reason


def _few(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 5 else f"{', '.join(names[:4])} and {len(names) - 4} others"


def _quantized_by(at: _ParameterPlace) -> str | None:
    """By what a weight was quantized: codes mean nothing without the scales beside them, which change with them."""
    kind: type = type(at.parameter)
    if kind is not nn.Parameter and kind is not CompressedTensor and kind.__module__.partition(".")[0] != "torch":
        # The quantized layers of bitsandbytes, torchao and others are subclasses of torch's layers.
        return kind.__name__
    names = (*at.module._parameters, *at.module._buffers)
    if at.parameter.dtype.itemsize == 1 and any("scale" in name.lower() or name == "SCB" for name in names):
        return type(at.module).__name__
    return None


def _kind(at: _ParameterPlace) -> str | None:
    """The kind of layer if `compress_` knows it and this is its weight, else None."""
    # transformers' merged experts, all of a layer in one weight, marked so that their computation can be exchanged.
    module = at.module
    if at.parameter.dim() == 3 and hasattr(module, "has_gate") and hasattr(module, "_apply_gate"):
        return "experts"
    if at.attribute != "weight":
        return None
    for kind in (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d):
        if isinstance(module, kind):
            return kind.__name__
    # transformers' Conv1D, without importing transformers: a linear layer with its weight transposed.
    return "Conv1D" if type(module).__name__ == "Conv1D" and hasattr(module, "nf") else None


def _chosen(model: nn.Module, patterns: Patterns) -> tuple[set[str], set[str]]:
    """Modules that patterns match, and these with everything below them, by name."""
    if patterns is None:
        return set(), set()
    matched = set(Select.of(patterns).modules(model))
    same = {id(module) for name, module in model.named_modules() if name in matched}
    matched = {name for name, module in model.named_modules(remove_duplicate=False) if id(module) in same}
    below = {
        name
        for name, _ in model.named_modules(remove_duplicate=False)
        if any(name == top or name.startswith(f"{top}.") for top in matched)
    }
    return matched, below


# ---- hooks -----------------------------------------------------------------------------------------------------------


def place(module: nn.Module, attribute: str, parameter: Any, name: str) -> None:
    """Give a module a parameter that is compressed, and let its conversions (`to`, `half`, ...) keep hooks on it."""
    parameter.stored.name = parameter.stored.name or name
    if parameter.stored.lossy:
        refuse_rounded_steps()
    module._parameters[attribute] = parameter
    module.__dict__["_apply"] = _Apply(module)


def _forget_hooks(module: nn.Module) -> None:
    """Undo what `place` did besides, once no parameter of the module is compressed."""
    if not any(isinstance(parameter, CompressedTensor) for parameter in module._parameters.values()):
        module.__dict__.pop("_apply", None)


class _Apply:
    """`module._apply` that keeps what hangs on the module's compressed parameters. Can be copied and pickled."""

    # torch converts a dense parameter by writing to its `.data`, which keeps hooks, but a parameter of a tensor
    # subclass by exchanging the tensor behind it, which silently loses them.

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        result: nn.Module = type(self.module)._apply(self.module, fn, recurse)  # type: ignore[no-untyped-call]
        for parameter in self.module._parameters.values():
            if isinstance(parameter, CompressedTensor):
                # The Python attribute still holds the hooks; setting it again registers them in the exchanged tensor.
                for kind in ("_post_accumulate_grad_hooks", "_backward_hooks"):
                    hooks = getattr(parameter, kind)
                    if hooks is not None:
                        setattr(parameter, kind, None)
                        setattr(parameter, kind, hooks)
        return result
