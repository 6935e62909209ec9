"""Hooks on compressed parameters survive `module.to()`.

torch converts a dense parameter by writing to its `.data`, which keeps hooks, but a parameter of a tensor subclass by
exchanging its inside, which loses them without a word. A layer that holds compressed weights therefore gets an
`_apply` of its own that puts them back. Used by `model.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final, get_args

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from netweight import codec
from netweight.codec import Precision
from netweight.codec.dtypes import dtype_name
from netweight.codec.lossy import LOSSLESS_BITS
from netweight.core.names import Select
from netweight.errors import AlreadyCompressed, LayerwiseConflict, LossyWrite, Unsupported, UsageError
from netweight.methods.compress.runtime.fsdp import dense_shard, local_part
from netweight.methods.compress.runtime.storage import Box
from netweight.methods.compress.runtime.tensor import CompressedTensor
from netweight.store.writer import Level


@final
class _Apply:
    """`module._apply` that keeps what hangs on the module's compressed parameters. Can be copied and pickled."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        module = self.module
        result: nn.Module = type(module)._apply(module, fn, recurse)  # type: ignore[no-untyped-call]
        for parameter in module._parameters.values():
            if isinstance(parameter, CompressedTensor):
                # Python still knows the hooks; setting them again tells the exchanged inside.
                after, before = parameter._post_accumulate_grad_hooks, parameter._backward_hooks
                if after is not None:
                    parameter._post_accumulate_grad_hooks = None
                    parameter._post_accumulate_grad_hooks = after
                if before is not None:
                    parameter._backward_hooks = None
                    parameter._backward_hooks = before
        return result


def keep_hooks(module: nn.Module) -> None:
    """Let a module's conversions (`to`, `half`, `cuda`, ...) keep hooks on its compressed parameters."""
    module.__dict__["_apply"] = _Apply(module)


def forget_hooks(module: nn.Module) -> None:
    """Undo `keep_hooks` once no parameter of the module is compressed."""
    if not any(isinstance(parameter, CompressedTensor) for parameter in module._parameters.values()):
        module.__dict__.pop("_apply", None)


def hooks_of(parameter: Any) -> list[Any]:
    """The hooks that run when the parameter's gradient is ready."""
    return list((parameter._post_accumulate_grad_hooks or {}).values())


def average_gradient(gradient: torch.Tensor) -> None:
    """Average a gradient over all processes of the default group, in place: `LayerwiseOptimizer(..., reduce=this)`.

    It is scaled first and then summed, as `DistributedDataParallel` does: two processes train to the same bits as with
    that. With more, the order of a sum may depend on how gradients are put together.

    Args:
        gradient: A dense gradient; every process must train the same parameters in the same order.
    """
    gradient.mul_(1.0 / torch.distributed.get_world_size())
    torch.distributed.all_reduce(gradient)


def refuse_wrapped_model(model: nn.Module) -> None:
    """Refuse a model whose wrapper reduces gradients itself; called before and within its first forward pass."""
    around = nn.parallel.DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    if isinstance(model, nn.parallel.DistributedDataParallel) or around is not None:
        raise LayerwiseConflict(
            "DistributedDataParallel reduces gradients after they would have been used up.",
            cure="Leave the model unwrapped, start it equal everywhere, and pass reduce=average_gradient.",
        )


def refuse_unreduced_gradients(reduce: Callable[[torch.Tensor], None] | None) -> None:
    """Refuse to step on gradients of one process among several."""
    distributed = torch.distributed
    if reduce is None and distributed.is_available() and distributed.is_initialized():
        size = distributed.get_world_size()
        if size > 1:
            raise LayerwiseConflict(
                f"Each of {size} processes would step on unreduced gradients, its own. Nothing was updated.",
                cure="Pass reduce=average_gradient, or reduce=lambda gradient: None to train replicas apart.",
            )


def refuse_reentrant_checkpoint(function: type[torch.autograd.Function]) -> None:
    """Refuse a backward pass that runs within another one: gradients would be taken for complete too early."""
    code = function.backward.__code__
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            raise _reentrant()
        frame = frame.f_back


def refuse_reentrant_graph(output: Any, function: type[torch.autograd.Function]) -> bool:
    """Refuse a model whose forward pass used reentrant checkpointing, before anything goes backward."""
    waiting = [t.grad_fn for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == f"{function.__name__}Backward":
            raise _reentrant()
        waiting += [before for before, _ in node.next_functions if before is not None]
    return bool(seen)


def _reentrant() -> LayerwiseConflict:
    return LayerwiseConflict(
        "The model uses reentrant checkpointing, which goes backward one segment at a time.",
        cure="Pass use_reentrant=False to torch.utils.checkpoint; in transformers, "
        'gradient_checkpointing_kwargs={"use_reentrant": False}.',
    )


def refuse_second_optimizer(names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
    """Refuse parameters that another layer by layer optimizer steps."""
    for name, parameter in zip(names, parameters, strict=True):
        if any(hasattr(hook, "optimizer") for hook in hooks_of(parameter)):
            raise LayerwiseConflict(
                f"{name} is stepped by another LayerwiseOptimizer.", cure="Call close() on that one first."
            )


def refuse_shards(names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
    """Refuse parameters whose gradients FSDP reduces and cuts, after the backward pass of a whole group of layers."""
    shards = [name for name, value in zip(names, parameters, strict=True) if local_part(value) is not value]
    if shards:
        raise LayerwiseConflict(
            f"{shards[0]} is sharded, and its gradient is reduced by FSDP, not in a hook.",
            cure="Use an ordinary torch optimizer: each process steps its own shards.",
        )


def refuse_rounded_weights(names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
    """Refuse to train weights that are kept rounded."""
    rounded = [
        name
        for name, parameter in zip(names, parameters, strict=True)
        if isinstance(parameter, CompressedTensor) and parameter.box.lossy
    ]
    if rounded:
        others = f" and {len(rounded) - 1} more" if len(rounded) > 1 else ""
        raise LossyWrite(
            f"{rounded[0]}{others} cannot be trained: each step would round the weight again.",
            cure="Call requires_grad_(False) on them and train adapters, or compress_ the model without mantissa_bits.",
        )


Prefer = Literal["memory", "speed"]
Patterns = Select | str | Iterable[str] | None
_ROW_CHUNKS = 15  # an embedding reads few rows: small chunks, of 32768 numbers


@final
@dataclass(frozen=True)
class Compression:
    """What `compress_` did."""

    compressed: tuple[str, ...]  # names of the weights that are compressed now; a tied weight under each of its names
    # Weights of two and more dimensions that were left as they are, with the reason.
    left_dense: dict[str, str] = field(repr=False)
    before: int  # bytes that the compressed weights held as dense tensors, a tied weight counted once
    after: int  # bytes that they hold now, capacity included
    # How much rounding may have changed any number at most, relative to it; 0 if nothing was rounded.
    bound: float = 0.0
    # For each rounded weight, under each of its names, the largest relative change that was measured.
    changes: dict[str, float] = field(default_factory=dict, repr=False)
    # Names of those of the compressed weights that are in the fixed-length form.
    fixed: tuple[str, ...] = field(default=(), repr=False)

    @property
    def worst_change(self) -> float:
        """The largest relative change that was measured; 0 if nothing was rounded."""
        return max(self.changes.values(), default=0.0)

    @property
    def ratio(self) -> float:
        """`after / before`; 1 if nothing was compressed."""
        return self.after / self.before if self.before else 1.0


@dataclass
class _Weight:
    """One weight and the places that hold it."""

    parameter: nn.Parameter
    holders: list[tuple[nn.Module, str, str]]  # module, attribute, full name
    chunk_log2: int | None = None


def _kind(module: nn.Module, attribute: str, parameter: torch.Tensor) -> str | None:
    """The kind of layer if `compress_` knows it and this is its weight, else None."""
    # transformers' merged experts, all of a layer in one weight, marked so that their computation can be exchanged.
    if parameter.dim() == 3 and hasattr(module, "has_gate") and hasattr(module, "_apply_gate"):
        return "experts"
    if attribute != "weight":
        return None
    for kind in (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d):
        if isinstance(module, kind):
            return kind.__name__
    # transformers' Conv1D, without importing transformers: a linear layer with its weight transposed.
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return "Conv1D"
    return None


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


def _owned(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    for name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                yield name, module, attribute, parameter


def _plan(
    model: nn.Module, include: Patterns, exclude: Patterns, *, loaded: bool = True
) -> tuple[list[_Weight], dict[str, str]]:
    """What to compress, and what to leave for which reason; `loaded` says whether weights hold their values yet."""
    matched, included = _chosen(model, include)
    _, excluded = _chosen(model, exclude)
    weights: dict[int, _Weight] = {}
    reasons: dict[int, str] = {}
    refused: list[str] = []
    twice: list[str] = []
    for name, module, attribute, parameter in _owned(model):
        if parameter.dim() < 2:
            continue  # biases and norms
        full = f"{name}.{attribute}" if name else attribute
        weight = weights.setdefault(id(parameter), _Weight(parameter, []))
        weight.holders.append((module, attribute, full))
        kind = _kind(module, attribute, parameter)
        if kind == "Embedding":
            weight.chunk_log2 = _ROW_CHUNKS
        if include is not None and name not in included:
            reasons.setdefault(id(parameter), "not included")
        elif name in excluded:
            reasons[id(parameter)] = "excluded"
        elif isinstance(parameter, CompressedTensor):
            twice.append(full)
        elif kind is None:
            reasons[id(parameter)] = f"{type(module).__name__} is not a layer that can run compressed"
            if name in matched:
                refused.append(f"{full} of {type(module).__name__}")
        elif local_part(parameter) is not parameter:
            refused.append(f"{full}, which is sharded already: compress_ goes before fully_shard")
        elif (loaded and parameter.is_meta) or parameter.layout != torch.strided:
            refused.append(f"{full}, which holds no plain values ({parameter.device}, {parameter.layout})")
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
    left = {full: reasons[key] for key, weight in weights.items() if key in reasons for _, _, full in weight.holders}
    return [weight for key, weight in weights.items() if key not in reasons], left


def _few(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 5 else f"{', '.join(names[:4])} and {len(names) - 4} others"


def compress_(
    model: nn.Module,
    *,
    include: Patterns = None,
    exclude: Patterns = None,
    level: Level = "default",
    mantissa_bits: int = 7,
    block_size: int | None = 512,
    fidelity: str = "corrected",
    prefer: Prefer = "memory",
) -> Compression:
    """Compress a model's weights in memory, in place; unless told to round, it computes the same numbers, bit for bit.

    Weights of Linear, Embedding, Conv1d, Conv2d, transformers' Conv1D and its merged experts are compressed, of any
    dtype; biases and norms stay dense. Tied weights are compressed once and stay tied; one is left dense if any of its
    layers is left out. A weight that would not get smaller stays dense. Parameters are replaced: shard (`fully_shard`)
    and make optimizers afterwards. Memory formats such as torch.channels_last stay.

    With fewer than 7 `mantissa_bits` weights are rounded first, for inference and for adapters on a frozen base: the
    report says by how much at most. Nothing can be written into rounded weights, since each write would round again. A
    conversion to another dtype keeps the rounded values as that dtype has them, compressed without a further loss.

    With `prefer="speed"` bf16 weights that only Linear layers use take the fixed-length form, three quarters of the
    dense size instead of two thirds, which GPU kernels multiply with for inputs of up to 256 rows without decoding it
    first. The weights are the same, bit for bit. Outputs are so on the CPU, where this form is the slower one; on a GPU
    such products are summed in another order than torch's (see docs/formats-on-gpus.md).

    Args:
        model: Any module. Its own forward runs unchanged.
        include: Patterns of modules (see `Select`); a module stands for everything below it. None takes all.
        exclude: Patterns of modules to leave dense.
        level: The codec's level, also for every later change of a weight.
        mantissa_bits: Bits of the mantissa to keep, 0 to 6; 7 keeps all bits of any dtype.
        block_size: Weights that share a normalizer when rounded; None for no normalizers.
        fidelity: The arithmetic of rounding, "corrected" or "reference"; see `netweight.codec.encode_lossy`.
        prefer: "memory" for the codec's form for all weights; "speed" for the fixed-length form where there is one.

    Returns:
        What was compressed, what was left dense and why, the bytes, and what rounding changed.

    Raises:
        AlreadyCompressed: A chosen weight is compressed already.
        Unsupported: A layer asked for by name cannot run compressed, or a weight holds no values, or one is to be
            rounded whose dtype cannot be. All are listed.
        NameNotFound: A pattern matches no module.
        UsageError: There is no such level or preference, a setting of rounding is out of its range, or rounded weights
            were to have the fixed-length form. In this case as in all others nothing was changed.

    Source: NeuZip (arXiv 2410.20650), section 3.1; there for bf16 and linear layers, here for all dtypes.
    """
    if level not in get_args(Level):
        raise UsageError(f"There is no level {level!r}.", cure=f"Choose one of {', '.join(get_args(Level))}.")
    precision = Precision(mantissa_bits, block_size, fidelity)
    check_prefer(prefer, precision)
    linear = linear_weights(model) if prefer == "speed" else frozenset()
    weights, left = _plan(model, include, exclude)
    _refuse_unroundable(weights, precision)
    names: list[str] = []
    fixed: list[str] = []
    changes: dict[str, float] = {}
    before = after = 0
    bound = 0.0
    while weights:
        weight = weights.pop(0)  # let go of it, so that its dense memory is freed at once
        dense = weight.parameter
        suits = weight.holders[0][2] in linear
        box = Box.of(dense.data, level=level, chunk_log2=weight.chunk_log2, precision=precision, fixed=suits)
        if box.payload.nbytes >= dense.nbytes:
            left.update({full: "would not get smaller" for _, _, full in weight.holders})
            continue
        tensor = CompressedTensor(box)
        parameter = nn.Parameter(tensor, requires_grad=dense.requires_grad)
        for module, attribute, full in weight.holders:
            place(module, attribute, parameter)
            names.append(full)
            fixed += [full] * box.fixed
        if box.lossy:
            found = codec.info(box.blob)
            bound = max(bound, found.bound)
            changes.update({full: found.worst_change for _, _, full in weight.holders})
        before, after = before + dense.nbytes, after + box.payload.nbytes
        del dense
    return Compression(tuple(names), left, before, after, bound, changes, tuple(fixed))


def check_prefer(prefer: str, precision: Precision) -> None:
    """Refuse a preference that there is not, or that cannot be together with rounding."""
    if prefer not in get_args(Prefer):
        raise UsageError(f"There is no preference {prefer!r}.", cure=f"Choose one of {', '.join(get_args(Prefer))}.")
    if prefer == "speed" and precision.mantissa_bits != LOSSLESS_BITS:
        raise UsageError(
            "Rounded weights have no fixed-length form.", cure='Leave mantissa_bits=7, or prefer="memory" there.'
        )


def linear_weights(model: nn.Module) -> frozenset[str]:
    """Names of the weights that Linear layers use and no others, tied ones under each name: those that can be fixed."""
    names: dict[int, list[str]] = {}
    others: set[int] = set()
    for name, module, attribute, parameter in _owned(model):
        if _kind(module, attribute, parameter) != "Linear":
            others.add(id(parameter))
        names.setdefault(id(parameter), []).append(f"{name}.{attribute}" if name else attribute)
    return frozenset(full for key, of_one in names.items() if key not in others for full in of_one)


def prefer_(model: nn.Module, prefer: Prefer) -> tuple[str, ...]:
    """Change the form of a compressed model's weights in memory, in place, one after the other; values stay the same.

    For models that were loaded from compressed folders; see `compress_` for the two forms. What was rounded stays in
    the codec's form. Files hold that form whatever a model prefers.

    Args:
        model: A model that `compress_` or an integration has compressed.
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
    for name, _, attribute, parameter in _owned(model):
        full = f"{name}.{attribute}" if name else attribute
        if isinstance(parameter, CompressedTensor):
            parameter.box.transcode(fixed=prefer == "speed" and full in linear)
            fixed += [full] * parameter.box.fixed
    return tuple(fixed)


def _refuse_unroundable(weights: list[_Weight], precision: Precision) -> None:
    """Refuse before anything changes what cannot be rounded as asked."""
    refused: list[str] = []
    reason: Unsupported | None = None
    for weight in weights:
        try:
            precision.rounding(dtype_name(weight.parameter.dtype))
        except Unsupported as error:
            refused.append(weight.holders[0][2])
            reason = error
    if reason is not None:
        raise Unsupported(f"{_few(refused)}: {reason.reason} Nothing was changed.", cure=reason.cure) from reason


def choose(model: nn.Module, *, include: Patterns = None, exclude: Patterns = None) -> dict[str, int | None]:
    """Choose the weights that `compress_` would take, before they are loaded; for integrations that load them."""
    weights, _ = _plan(model, include, exclude, loaded=False)
    return {full: weight.chunk_log2 for weight in weights for _, _, full in weight.holders}


def place(module: nn.Module, attribute: str, parameter: nn.Parameter) -> None:
    """Give a module a parameter that is compressed; integrations that load weights call it too."""
    module._parameters[attribute] = parameter
    keep_hooks(module)


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
    """
    _, included = _chosen(model, include)
    _, excluded = _chosen(model, exclude)
    places: dict[int, list[tuple[str, nn.Module, str, Any]]] = {}
    for name, module, attribute, parameter in _owned(model):
        if local_part(parameter) is not parameter and isinstance(local_part(parameter), CompressedTensor):
            raise Unsupported(
                f"{name}.{attribute} is a shard, and shards stay compressed. Nothing was changed.",
                cure="Use netweight.dense_state_dict(model), and load that into a dense model.",
            )
        if isinstance(parameter, CompressedTensor):
            places.setdefault(id(parameter), []).append((name, module, attribute, parameter))
    done: list[str] = []
    for holders in places.values():
        names = [name for name, *_ in holders]
        if any(name in excluded for name in names) or not (include is None or any(name in included for name in names)):
            continue
        parameter = holders[0][3]
        # A copy of its own: memory of the codec's pool is for weights that come and go.
        dense = nn.Parameter(parameter.dense().clone(), requires_grad=parameter.requires_grad)
        for name, module, attribute, _ in holders:
            module._parameters[attribute] = dense
            forget_hooks(module)
            done.append(f"{name}.{attribute}" if name else attribute)
    return tuple(done)


def dense_state_dict(model: nn.Module) -> dict[str, Any]:
    """A state dict of dense tensors, for code that knows nothing of compressed ones (safetensors, other libraries).

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
            if id(value.box) not in decoded:
                decoded[id(value.box)] = value.dense()
            value = decoded[id(value.box)].view(value.shape)
        elif isinstance(local_part(value), CompressedTensor):
            value = dense_shard(value)
        result[name] = value
    return result


def memory_footprint(model: nn.Module) -> int:
    """Count the bytes that a model's parameters and buffers hold.

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
