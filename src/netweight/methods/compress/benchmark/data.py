"""What the benchmark compresses: sets of tensors of one dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from netweight.core.digest import of_bytes
from netweight.core.seeds import torch_generator
from netweight.errors import UsageError
from netweight.store import open_store

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

__all__ = ["GAUSSIAN", "IN_CACHE", "DataSet", "gaussian", "model_as", "of_files", "pack", "raw_bytes", "tensors_over"]

GAUSSIAN = "N(0, 0.02)"
"""Name of the set of normally distributed weights."""

IN_CACHE = "N(0, 0.02), in cache"
"""Name of the sets of a million such weights, which stay in a core's cache: the code's speed, not the memory's."""

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@final
@dataclass(frozen=True)
class DataSet:
    """Tensors of one dtype, compressed one by one by netweight and joined by its peers; made by `pack`.

    Attributes:
        name: Where they come from.
        dtype: safetensors' name of their dtype.
        tensors: The tensors, on the CPU, none of them empty; they lie one behind the other in `raw`. Any shapes, one
            dtype.
        raw: All their bytes. Shape `(bytes,)`, uint8.
    """

    name: str
    dtype: str
    tensors: tuple[torch.Tensor, ...]
    raw: NDArray[np.uint8] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.raw.nbytes

    def describe(self) -> dict[str, Any]:
        """Say what it is as a JSON value; the digest is that of all bytes."""
        count, digest = len(self.tensors), of_bytes(self.raw.data)
        return {"name": self.name, "dtype": self.dtype, "tensors": count, "nbytes": self.nbytes, "digest": digest}


def pack(name: str, dtype: str, tensors: Sequence[torch.Tensor]) -> DataSet:
    """Copy tensors of one dtype into one piece of memory, so that all contenders read and write memory of one kind.

    Args:
        name: What to call the set.
        dtype: safetensors' name of the dtype.
        tensors: At least one; any shapes, all of this dtype.
    """
    import numpy as np

    raw = np.concatenate([raw_bytes(tensor.contiguous()) for tensor in tensors])
    return DataSet(name, dtype, tuple(tensors_over(raw, tensors)), raw)


def tensors_over(raw: NDArray[np.uint8], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors of the dtypes and shapes of others that lie one behind the other in a piece of memory.

    Args:
        raw: The memory, shape `(bytes,)`, uint8.
        like: Tensors of any shapes and dtypes.
    """
    import torch

    laid, start = [], 0
    for tensor in like:
        part = raw[start : start + tensor.nbytes]
        laid.append(torch.from_numpy(part).view(tensor.dtype).reshape(tensor.shape))
        start += tensor.nbytes
    return laid


def raw_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Return a contiguous tensor's bytes, without a copy.

    Args:
        tensor: Any shape and dtype.
    """
    import torch

    raw: NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return raw


def gaussian(*, seed: int, count: int = 1 << 25, name: str = GAUSSIAN, dtype: str = "BF16") -> DataSet:
    """Draw one tensor from N(0, 0.02²), as freshly initialized weights are.

    Args:
        seed: Seed of the draw.
        count: Number of weights.
        name: What to call the set.
        dtype: "BF16", "F16" or "F32".
    """
    import torch

    drawn = torch.randn(count, generator=torch_generator(seed, "benchmark", "gaussian")).mul_(0.02)
    return pack(name, dtype, [drawn.to(getattr(torch, _DTYPES[dtype]))])


def model_as(file: Path, name: str, dtype: str, *, most: int | None = None) -> DataSet:
    """Read all floating-point tensors of a file, converted to one dtype.

    Args:
        file: A safetensors file, compressed or not.
        name: What to call the model.
        dtype: "BF16", "F16" or "F32".
        most: Take tensors in their order until they hold this many weights; None for all.
    """
    import torch

    kept, count = [], 0
    with open_store(file) as store:
        for tensor_name in store.names():
            tensor = store.get(tensor_name)
            if tensor.is_floating_point() and tensor.numel() and (most is None or count + tensor.numel() <= most):
                kept.append(tensor.to(getattr(torch, _DTYPES[dtype])))
                count += tensor.numel()
        return pack(name, dtype, kept)


def of_files(files: Sequence[Path]) -> list[DataSet]:
    """Read files as they are: one set per file and dtype.

    Args:
        files: safetensors files, compressed or not.

    Returns:
        The sets, in the files' order.

    Raises:
        UsageError: There is no such file, or none of them holds a tensor.
        CorruptBlob: A file is damaged.
    """
    for file in files:
        if not file.is_file():
            raise UsageError(f"There is no file {file}.", cure="Give .safetensors files.")
    sets = [part for file in files for part in _of_file(file)]
    if not sets:
        raise UsageError("The files hold no tensors, so there is nothing to measure.", cure="Give other files.")
    return sets


def _of_file(file: Path) -> list[DataSet]:
    tensors: dict[str, list[torch.Tensor]] = {}
    with open_store(file) as store:
        for name in store.names():
            tensor = store.get(name)
            if tensor.numel():
                tensors.setdefault(store.info(name).dtype, []).append(tensor)
        return [pack(file.name, dtype, group) for dtype, group in tensors.items()]
