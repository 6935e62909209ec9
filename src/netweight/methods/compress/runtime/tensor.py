"""The parameter of a compressed weight: shape, dtype and gradients of a dense one in fewer bytes.

`__torch_function__` sends layers to `functional.py`. Any other operator decodes, runs, and encodes what it wrote, so
that dense code stays right, if slow. A view of a compressed weight is lazy: it remembers how it is cut and decodes when
it is read; a write through it reaches the weight.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, NoReturn, final

import safetensors.torch
import torch
import torch.nn.functional as F

from netweight.errors import DenseOnly
from netweight.methods.compress.runtime import fsdp, functional
from netweight.methods.compress.runtime.functional import decode, gather_rows
from netweight.methods.compress.runtime.storage import CompressedStorage, layout_of, moved
from netweight.store.choices import Level

aten = torch.ops.aten
# The entries are: operator, arguments, named arguments, number of the result.
_View = tuple[Any, tuple[Any, ...], tuple[tuple[str, Any], ...], int | None]

_mapped, _traced = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state
_FORWARD = torch.autograd.forward_ad
# function of torch -> what stands in for it, where in its arguments the weight is, and whether it may be fixed
_LAYERS: dict[Any, tuple[Callable[..., torch.Tensor | None], int, bool]] = {
    F.linear: (functional.linear, 1, True),
    F.embedding: (functional.embedding, 1, True),
    F.conv1d: (partial(functional.conv, 1), 1, False),
    F.conv2d: (partial(functional.conv, 2), 1, False),
    torch.addmm: (functional.addmm, 2, False),
}
_ALIASES = (aten.detach.default, aten.alias.default)
_LIKE = frozenset(
    getattr(aten, name).default
    for name in (
        "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
        "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided",
    )
)  # fmt: skip
_RESHAPING = frozenset({"aten::set_", "aten::resize_", "aten::resize_as_"})
# In inference mode these come as they are, elsewhere as the operators they are made of.
_TO = (aten.to.dtype_layout, aten.to.device, aten.to.dtype, aten.to.other)


@final
class CompressedTensor(torch.Tensor):
    """A weight whose bytes are compressed; usually wrapped into an `nn.Parameter`.

    It has the shape, dtype and device of the dense weight and takes part in autograd: gradients are dense. `detach`,
    `.data` and views share the weight, as with dense tensors; writes through any of them change it.

    Attributes:
        stored: The compressed bytes.
        views: How this tensor is cut out of the stored weight; empty for the weight itself.
        stand_in: A tensor on the meta device with this tensor's shape and strides; needed with `views`.
        requires_grad: As for any tensor.

    Raises:
        DenseOnly: On use, when code asks for memory that is not there (`numpy()`, `data_ptr()`), or would change shape
            or storage in place.
    """

    stored: CompressedStorage
    views: tuple[_View, ...]

    @staticmethod
    def __new__(
        cls,
        stored: CompressedStorage | torch.Tensor,
        views: tuple[_View, ...] = (),
        stand_in: torch.Tensor | None = None,
        *,
        requires_grad: bool = False,
    ) -> CompressedTensor:
        # accelerate calls `type(parameter)(tensor)`, which must return a parameter.
        if isinstance(stored, torch.Tensor):
            return torch.nn.Parameter(stored, requires_grad=requires_grad)  # type: ignore[return-value]
        like = _meta(stored) if stand_in is None else stand_in
        tensor: CompressedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=stored.payload.device,
        )
        tensor.stored, tensor.views = stored, views
        return tensor

    @classmethod
    def of(cls, weight: torch.Tensor, *, level: Level = "default", chunk_log2: int | None = None) -> CompressedTensor:
        """Compress a dense tensor; see `CompressedStorage.of`."""
        return cls(CompressedStorage.of(weight, level=level, chunk_log2=chunk_log2))

    @property
    def payload(self) -> torch.Tensor:
        """The U8 tensor that contains the bytes."""
        return self.stored.payload

    def dense(self) -> torch.Tensor:
        """Return the decoded values: a dense tensor of the same shape and dtype, without history.

        Returns:
            The dense tensor, on the weight's device.
        """
        return _read(self.stored, self.views)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Describe the tensor without its values, which would have to be decoded."""
        kind = "view of a compressed weight" if self.views else f"{self.payload.numel()} bytes"
        return f"CompressedTensor({tuple(self.shape)}, {self.dtype}, {kind})"

    # ---- torch's protocols for wrapper subclasses ----

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Name the inner tensor and describe the rest, for the compiler."""
        its = self.stored
        return ["payload"], (its.shape, its.dtype, its.level, its.chunk_log2, its.stride, its.fixed, self.views)

    def _stable_hash_for_caching(self) -> str:
        """Return what compiled code depends on, equal in all processes: the key of torch's compiled graphs on disk."""
        return hashlib.sha256(repr(self.__tensor_flatten__()[1]).encode()).hexdigest()

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], description: Any, size: Any, stride: Any) -> Any:
        """Put a tensor together again from what `__tensor_flatten__` gave."""
        *rest, views = description
        stand_in = torch.empty_strided(size, stride, dtype=rest[1], device="meta") if views else None
        return CompressedTensor(CompressedStorage(inner["payload"], *rest), views, stand_in)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the compressed bytes; tensors that share them share them afterwards, tied weights included."""
        rows = _rows_of_shard(self)
        if self.views and rows is None:
            return self.dense().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        return _rebuild, (self.stored, self.requires_grad, isinstance(self, torch.nn.Parameter), rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the bytes, not the decoded weight; tied weights stay tied."""
        if id(self) in memo:
            return memo[id(self)]
        if self.views:
            copied: Any = self.dense()
        else:
            if id(self.stored) not in memo:
                memo[id(self.stored)] = self.stored.like(self.payload.clone())
            copied = _rebuild(memo[id(self.stored)], self.requires_grad, isinstance(self, torch.nn.Parameter))
            if self.grad is not None:
                copied.grad = self.grad.clone()
        memo[id(self)] = copied
        return copied

    @property
    def _fsdp_flattened(self) -> bool:
        """Asked for by FSDP's first version alone, of every weight that it would flatten."""
        return fsdp.refuse_flattening()

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        """Return what FSDP2 gathers of this shard; see `fsdp.py`."""
        return fsdp.before_gather(self.stored, self.shape[0], mesh)

    def fsdp_post_all_gather(
        self, gathered: tuple[torch.Tensor], sent: Any, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        """Return the weight of the gathered shards.

        Args:
            gathered: U8 of shape `(processes * capacity,)`: what all processes sent.
            sent: What was kept when the shard was sent.
            param_dtype: To calculate in.
            out: The dense weight of an earlier gather, of its shape and dtype, to be filled again; None makes one.

        Returns:
            The dense weight, and what FSDP2 frees after the pass; None if `out` was filled.
        """
        return fsdp.after_gather(self.stored, gathered[0], sent, param_dtype, out)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Send the layers' functions to `functional.py`, and stop what would be lost without a word."""
        kwargs = kwargs or {}
        layer_function = _LAYERS.get(func)
        if layer_function is not None:
            layer, place, fixed = layer_function
            if _is_plain(args[place] if len(args) > place else kwargs.get("weight"), fixed):
                result = layer(*args, **kwargs)
                if result is not None:
                    return result
        elif func in _WITHOUT_OPERATOR and not torch.compiler.is_compiling():
            result = _WITHOUT_OPERATOR[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator for which the weight must be decoded, or need not."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, cls):
            if func in _ALIASES:
                return _alias(first, first.views, _stand_in(first))
            if func is aten.new_zeros.default and not any(kwargs.values()):
                zeros = fsdp.zeros(first.stored, first.shape, args[1])
                if zeros is not None:
                    return cls(zeros)
            if func in _LIKE:
                plain = torch.empty((), dtype=first.dtype, device=first.device).expand(first.shape)
                return func(plain, *args[1:], **kwargs)
            if func in _TO:
                return func.decompose(*args, **kwargs)
            if func.is_view:
                return _view(func, first, args[1:], kwargs)
            if not first.views or first.stored.wire is not None:
                if func is aten.clone.default:
                    own = _own_storage(first)
                    return cls(_laid_out(own.like(own.payload.clone()), **kwargs))
                if func is aten._to_copy.default:
                    return _to_copy(first, **kwargs)
            if func is aten.copy_.default and not first.views:
                return _copy_whole(first, args[1])
        if func.namespace == "c10d":
            fsdp.refuse_sending(func)
        if torch.Tag.inplace_view in func.tags or func._schema.name in _RESHAPING:
            name = func._schema.name.removeprefix("aten::")
            _no_memory(f"{name}, which changes a tensor's shape or storage in place")
        return _decoded(func, args, kwargs)


# ---- operators -------------------------------------------------------------------------------------------------------


def _whole(stored: CompressedStorage) -> torch.Tensor:
    # torch.jit.trace cannot record these operators, so the weights are constants.
    if _traced() is not None:
        weight = stored.dense()
    else:
        functional.make_room(stored.payload, math.prod(stored.shape) * stored.dtype.itemsize)
        weight = decode(stored.payload, *stored.form)
    return weight if stored.stride is None else torch.empty_like(_meta(stored), device=weight.device).copy_(weight)


def _meta(stored: CompressedStorage) -> torch.Tensor:
    """A tensor on the meta device with the weight's shape, dtype and strides."""
    if stored.stride is None:
        return torch.empty(stored.shape, dtype=stored.dtype, device="meta")
    return torch.empty_strided(stored.shape, stored.stride, dtype=stored.dtype, device="meta")


def _laid_out(stored: CompressedStorage, memory_format: Any = None, **_: Any) -> CompressedStorage:
    """Have the weight decoded into another memory format."""
    if memory_format not in (None, torch.preserve_format):
        stored.stride = layout_of(_meta(stored), memory_format)
    return stored


def _cut(weight: torch.Tensor, views: tuple[_View, ...]) -> torch.Tensor:
    for func, args, kwargs, which in views:
        weight = func(weight, *args, **dict(kwargs))
        if which is not None:
            # The operator returned several tensors.
            weight = weight[which]
    return weight


def _read(stored: CompressedStorage, views: tuple[_View, ...]) -> torch.Tensor:
    """Decode a view; of one row, such as one expert of many, no more than the chunks that it touches."""
    one_row = views and views[0][0] is aten.select.int and views[0][1][0] == 0 and stored.stride is None
    if not one_row or torch.compiler.is_compiling() or _traced() is not None:
        return _cut(_whole(stored), views)
    row = torch.full((), views[0][1][1] % stored.shape[0], device=stored.payload.device)
    return _cut(gather_rows(stored.payload, *stored.form, row), views[1:])


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _view(func: Any, tensor: CompressedTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shapes = func(_stand_in(tensor), *args, **kwargs)
    named = tuple(kwargs.items())
    if func in (aten.slice.Tensor, aten.view.default) and shapes.shape == tensor.shape:
        return _alias(tensor, tensor.views, shapes)  # all of it
    if isinstance(shapes, torch.Tensor):
        return _alias(tensor, (*tensor.views, (func, args, named, None)), shapes)
    return [_alias(tensor, (*tensor.views, (func, args, named, which)), shape) for which, shape in enumerate(shapes)]


def _alias(tensor: CompressedTensor, views: tuple[_View, ...], stand_in: torch.Tensor) -> CompressedTensor:
    """Another tensor for the same weight; as torch has it, of a tensor's own kind where inference mode has another."""
    if torch.is_inference_mode_enabled() and not tensor.is_inference():
        with torch.inference_mode(False):
            return CompressedTensor(tensor.stored, views, stand_in)
    return CompressedTensor(tensor.stored, views, stand_in)


def _own_storage(tensor: CompressedTensor) -> CompressedStorage:
    """Return the storage of a tensor alone: its own, or for a shard with padding rows one without them."""
    its = tensor.stored
    if not tensor.views:
        return its
    own = CompressedStorage.of(tensor.dense(), level=its.level, chunk_log2=its.chunk_log2)
    own.wire = its.wire
    return own


def _to_copy(tensor: CompressedTensor, **kwargs: Any) -> torch.Tensor:
    dtype, to = kwargs.get("dtype") or tensor.dtype, torch.device(kwargs.get("device") or tensor.device)
    if to.type == "meta":
        return torch.empty(tensor.shape, dtype=dtype, device=to)
    stored = _own_storage(tensor)
    if dtype == tensor.dtype:
        payload = moved(stored.payload, to, non_blocking=bool(kwargs.get("non_blocking")))
        return CompressedTensor(_laid_out(stored.like(payload), **kwargs))
    dense = tensor.dense().to(to, dtype)
    changed = CompressedStorage.of(dense, level=stored.level, chunk_log2=stored.chunk_log2, fixed=stored.fixed)
    changed.wire = stored.wire
    return CompressedTensor(_laid_out(changed, **kwargs))


def _copy_whole(tensor: CompressedTensor, source: torch.Tensor) -> CompressedTensor:
    if isinstance(source, CompressedTensor):
        if source.dtype == tensor.dtype and source.shape == tensor.shape and not source.views:
            if source.stored is not tensor.stored:
                tensor.stored.adopt(source.stored.blob)
            return tensor
        source = source.dense()
    tensor.stored.write(source.to(device=tensor.device, dtype=tensor.dtype).expand(tensor.shape))
    return tensor


def _decoded(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator on decoded weights, and encode those that it wrote."""
    # The decoded weights by storage: two views of one weight must see each other's writes.
    wholes: dict[int, torch.Tensor] = {}
    parts: dict[int, torch.Tensor] = {}
    written = [value for value in _written(func, args, kwargs) if isinstance(value, CompressedTensor)]

    def dense(value: Any) -> Any:
        if not isinstance(value, CompressedTensor):
            return value
        if id(value) not in parts and not written:
            parts[id(value)] = _read(value.stored, value.views)
        elif id(value) not in parts:
            if id(value.stored) not in wholes:
                wholes[id(value.stored)] = _whole(value.stored)
            parts[id(value)] = _cut(wholes[id(value.stored)], value.views)
        return parts[id(value)]

    result = func(*_map(dense, args), **_map(dense, kwargs))
    for stored in {id(value.stored): value.stored for value in written}.values():
        stored.write(wholes[id(stored)])
    given = {id(parts[id(value)]): value for value in written}
    return _map(lambda value: given.get(id(value), value), result) if given else result


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    """Change every element of nested lists, tuples and dictionaries; much faster here than torch's tree functions."""
    if isinstance(value, (list, tuple)):
        return type(value)([_map(change, element) for element in value])
    if isinstance(value, dict):
        return {key: _map(change, element) for key, element in value.items()}
    return change(value)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from value if isinstance(value, (list, tuple)) else [value]


# ---- what has no operator --------------------------------------------------------------------------------------------


def _is_plain(weight: Any, fixed: bool) -> bool:
    """Return whether the weight is whole and contiguous, and the call not mapped, traced or differentiated forward."""
    if type(weight) is not CompressedTensor or weight.views:
        return False
    stored = weight.stored
    if stored.stride is not None or (stored.fixed and not fixed):
        return False
    plain = _mapped() is None and _FORWARD._current_level < 0 and _traced() is None
    return plain or torch.compiler.is_compiling()


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """`tensor.data = value`, of whatever shape and dtype: code that resizes or converts a model does this."""
    if not isinstance(tensor, CompressedTensor) or tensor.views:
        raise DenseOnly(
            "A dense parameter, or a part of a compressed one, cannot take another tensor as its .data.",
            cure="Assign a new nn.Parameter to the module, or decompress_ the layer first.",
        )
    with torch.no_grad():
        if tensor.shape == value.shape and tensor.dtype == value.dtype and tensor.device == value.device:
            _copy_whole(tensor, value.detach())
            return
        its = tensor.stored
        if isinstance(value, CompressedTensor) and not value.views:
            new = CompressedTensor(value.stored)
        else:
            dense = value.dense() if isinstance(value, CompressedTensor) else value
            new = CompressedTensor(CompressedStorage.of(dense, level=its.level, chunk_log2=its.chunk_log2))
        with torch._C.DisableTorchFunctionSubclass():
            _SET_DATA(tensor, new)
        tensor.stored = new.stored


def _share_memory(tensor: CompressedTensor) -> CompressedTensor:
    # A pickle, by which processes share weights, contains only this form.
    tensor.stored.transcode(fixed=False)
    tensor.stored.own()
    tensor.payload.share_memory_()  # type: ignore[no-untyped-call]
    # Writes of other processes are not noticed here, so that no decoded values may be kept.
    tensor.stored.decoded = None
    return tensor


def _address(tensor: CompressedTensor) -> int:
    # Libraries recognize tied weights by their addresses. A compressed weight has one of its own, at which no processor
    # and no device has memory: whoever reads there anyway is stopped, and does not take compressed bytes for numbers.
    return 1 << 62 | tensor.payload.data_ptr()


@final
class _StoragePlaceholder:
    """Placeholder of a weight's storage for libraries that search for tied weights: an address without bytes."""

    def __init__(self, tensor: CompressedTensor) -> None:
        self._tensor = tensor

    def data_ptr(self) -> int:
        return _address(self._tensor)

    def size(self) -> int:
        return self._tensor.numel()

    def nbytes(self) -> int:
        return self.size() * self._tensor.dtype.itemsize

    def __getattr__(self, name: str) -> Any:
        _no_memory(f"storage().{name}")

    def __getitem__(self, index: Any) -> Any:
        _no_memory("storage()[...]")


def _no_memory(what: str, *_: Any, **__: Any) -> NoReturn:
    raise DenseOnly(
        f"A compressed weight has no dense memory for {what}.",
        cure="Use `weight.dense()` for a decoded copy, netweight.dense_state_dict(model) for all of them, or "
        "netweight.decompress_(model) for good.",
    )


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
# function of torch -> what is done in its place; torch's own runs where that gives NotImplemented
_WITHOUT_OPERATOR: dict[Any, Callable[..., Any]] = {
    _SET_DATA: _set_data,
    torch.Tensor.data_ptr: _address,
    torch.Tensor.share_memory_: _share_memory,
    torch.Tensor.is_shared: lambda tensor: tensor.payload.is_shared(),
    torch.Tensor.numpy: partial(_no_memory, "numpy()"),
    torch.Tensor.__array__: partial(_no_memory, "numpy.asarray"),
    torch.Tensor.storage: _StoragePlaceholder,
    torch.Tensor.__dlpack__: partial(_no_memory, "__dlpack__()"),
    torch.Tensor.narrow: fsdp.refuse_columns,
    torch.Tensor.pin_memory: fsdp.refuse_pinning,
}


def _serialize_dense(flatten: Callable[..., Any]) -> Callable[..., Any]:
    """Let safetensors write compressed weights as it writes dense ones; tied weights are tied to it."""

    @wraps(flatten)
    def flattened(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensors, dict) and any(isinstance(value, CompressedTensor) for value in tensors.values()):
            wholes: dict[int, torch.Tensor] = {}
            dense: dict[str, torch.Tensor] = {}
            for name, value in tensors.items():
                if isinstance(value, CompressedTensor):
                    whole = wholes.get(id(value.stored))
                    whole = wholes.setdefault(id(value.stored), _whole(value.stored) if whole is None else whole)
                    dense[name] = _cut(whole, value.views)
            tensors = tensors | dense
        return flatten(tensors, *args, **kwargs)

    return flattened


# All functions of safetensors that save, under whatever name they were imported, call this one for the bytes; up to
# safetensors 0.7 it had the shorter name.
for _name in {"_flatten", "_flatten_as_ptr"} & vars(safetensors.torch).keys():
    setattr(safetensors.torch, _name, _serialize_dense(getattr(safetensors.torch, _name)))


def _rows_of_shard(tensor: CompressedTensor) -> int | None:
    """The first rows of a storage of FSDP's, if that is all that a view of it is."""
    if tensor.stored.wire is None or len(tensor.views) != 1:
        return None
    func, args, _, _ = tensor.views[0]
    return len(tensor) if func is aten.slice.Tensor and args[:2] == (0, 0) and args[3:] in ((), (1,)) else None


def _rebuild(stored: CompressedStorage, requires_grad: bool, parameter: bool, rows: int | None = None) -> torch.Tensor:
    tensor: torch.Tensor = CompressedTensor(stored) if rows is None else CompressedTensor(stored)[:rows]
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)


torch.serialization.add_safe_globals([CompressedStorage, CompressedTensor, _rebuild])
