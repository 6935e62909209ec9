"""Parts that the plug-ins for transformers and diffusers share: settings, and loading of stored bytes as weights.

`NetweightConfig` holds the settings, and `ParameterLoader` makes parameters of stored or dense tensors and lets go of
the checkpoint afterwards. Called by `transformers.py` and `diffusers.py` only; users take `NetweightConfig` from there.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, final, get_args

import torch
from torch import nn

from netweight import codec
from netweight.autoload import HINT, METHOD
from netweight.codec import Precision
from netweight.codec.header import dtype_name, refuse_inflated, torch_dtype
from netweight.core.lazy import extra
from netweight.core.mapped_files import mapped_files
from netweight.core.names import Select
from netweight.core.threads import in_order
from netweight.errors import CorruptBlob, Unsupported, UsageError
from netweight.methods.compress.runtime import cuda as device
from netweight.methods.compress.runtime.model import (
    Prefer,
    check_prefer,
    choose_weights,
    linear_weights,
    place,
    takes_fixed,
)
from netweight.methods.compress.runtime.storage import CompressedStorage, damaged, in_file, pack
from netweight.methods.compress.runtime.tensor import CompressedTensor
from netweight.store.choices import Level
from netweight.store.reader import BATCH, StoredFile

with extra("llm", "This plug-in needs transformers 5"):
    from transformers.utils.quantization_config import QuantizationConfigMixin


_VERSION = 1


class _Method(StrEnum):
    """diffusers reads the `value` of a quantization method."""

    NETWEIGHT = METHOD


@final
class NetweightConfig(QuantizationConfigMixin):
    """Settings of the weights that `from_pretrained(folder, quantization_config=NetweightConfig())` loads."""

    # A folder that is compressed already needs none. If one is given, all its settings take the place of the folder's.

    def __init__(
        self,
        include: Select | str | Iterable[str] | None = None,
        exclude: Select | str | Iterable[str] | None = None,
        level: Level = "default",
        version: int = _VERSION,
        weights: str | None = None,
        quant_method: str = METHOD,
        mantissa_bits: int = 7,
        block_size: int | None = 512,
        fidelity: str = "corrected",
        prefer: Prefer | None = None,
    ) -> None:
        if level not in get_args(Level):
            raise UsageError(f"There is no level {level!r}.", cure=f"Choose one of {', '.join(get_args(Level))}.")
        if version != _VERSION:
            raise Unsupported(
                f"The compressed folder is of version {version!r}; this release reads version {_VERSION}.",
                cure="Upgrade netweight: pip install --upgrade netweight.",
            )
        self.quant_method = _Method.NETWEIGHT  # type: ignore[assignment]
        self.version = version
        self.include = _listed(include)
        self.exclude = _listed(exclude)
        self.level = level
        self.weights = weights
        # The constructor of Precision checks the values.
        check_prefer(prefer, Precision(mantissa_bits, block_size, fidelity))
        self.prefer = prefer
        # Bits of the mantissa to keep, 0 to 6, of weights that are compressed while loading; 7 keeps all.
        self.mantissa_bits = mantissa_bits
        self.block_size = block_size
        self.fidelity = fidelity

    @property
    def precision(self) -> Precision:
        """Precision at which weights are kept."""
        return Precision(self.mantissa_bits, self.block_size, self.fidelity)


def settings_for(stored: Any, given: Any, theirs: Callable[[Any, Any], Any]) -> Any:
    """Decide which settings a model is loaded with: those that the user gave, where the folder is compressed by us.

    Args:
        stored: The `quantization_config` of the folder: a mapping or an object.
        given: The one that was given to `from_pretrained`; None if there was none.
        theirs: The library's own decision, for the two.

    Returns:
        The settings to load with.

    Raises:
        UsageError: Another method's settings, or rounding, were given for a folder that is compressed.
    """
    method = stored.get("quant_method") if isinstance(stored, Mapping) else getattr(stored, "quant_method", None)
    if given is None or getattr(method, "value", method) not in (METHOD, HINT):
        return theirs(stored, given)
    folders = NetweightConfig.from_dict(dict(stored)) if isinstance(stored, Mapping) else stored  # type: ignore[no-untyped-call]
    if isinstance(given, Mapping) and given.get("quant_method") in (METHOD, HINT):
        given = NetweightConfig.from_dict(dict(given))  # type: ignore[no-untyped-call]
    if not isinstance(given, NetweightConfig):
        if folders.weights is None:
            return theirs(stored, given)
        raise UsageError(
            f"The folder is compressed by netweight: {type(given).__name__} cannot quantize its weights while they are "
            "loaded.",
            cure="Run netweight decompress FOLDER NEW_FOLDER, and load NEW_FOLDER.",
        )
    if folders.weights is not None and given.precision != Precision():
        raise UsageError(
            "The folder is compressed already: its weights cannot be rounded while they are loaded.",
            cure="Run netweight decompress, then netweight compress with --mantissa-bits; or leave mantissa_bits out.",
        )
    settings = copy.deepcopy(given)
    settings.weights = folders.weights
    return settings


def _listed(patterns: Select | str | Iterable[str] | None) -> list[str] | None:
    return None if patterns is None else list(Select.of(patterns).patterns)


@final
class ParameterLoader:
    """Maker of the parameters of one model that is being loaded."""

    def __init__(self, config: NetweightConfig, *, stored: bool) -> None:
        self.config = config
        self.stored = stored
        self._chunks: dict[str, int | None] = {}
        # Names of weights that may have the fixed-length form.
        self._fixed: frozenset[str] = frozenset()
        self._scratch: torch.Tensor | None = None
        # Addresses at which files are mapped: first and last.
        self._mapped: list[tuple[int, int]] = []
        # Files and names of tensors that are stored as differences, by digest, dtype and shape.
        self._differences: dict[tuple[str, str, tuple[int, ...]], tuple[StoredFile, str]] = {}

    def check(self, path: Path) -> None:
        """Compare what a compressed file says of its tensors with their bytes, before any is decoded; find its base."""
        file = StoredFile(path)
        if file.description is None:
            raise UsageError(
                f"{path} is not compressed, although the config.json of its folder states that it is.",
                cure="Compress the folder again, or remove quantization_config and "
                "transformers_weights from its config.json.",
            )
        for info in map(file.info, file.names()):
            if file.beneath(info.name) is not None:
                self._differences[str(info.digest), info.dtype, info.shape] = file, info.name

    def choose(self, model: nn.Module, *, tied: Mapping[str, str]) -> None:
        """Choose the weights to hold compressed; tied ones both or neither."""
        self._chunks = choose_weights(model, include=self.config.include, exclude=self.config.exclude)
        for target, source in tied.items():
            if target not in self._chunks or source not in self._chunks:
                self._chunks.pop(target, None)
                self._chunks.pop(source, None)
        if self.config.prefer != "memory":
            self._fixed = linear_weights(model)
            self._fixed |= {name for pair in tied.items() if self._fixed.intersection(pair) for name in pair}

    def refuse_unroundable(self, model: nn.Module) -> None:
        """Refuse dtypes that cannot be rounded as asked, before anything is loaded."""
        for dtype in {model.get_parameter(name).dtype for name in self._chunks}:
            self.config.precision.rounding(dtype_name(dtype))

    def __contains__(self, name: str) -> bool:
        """Return whether a weight is to be held compressed."""
        return name in self._chunks

    def take(self, name: str, stored: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """Make a parameter of stored bytes: compressed if it was chosen and gets smaller so, else dense."""
        blob = _bytes(stored)
        info = _reasonable(name, blob)
        own = torch_dtype(info.dtype)
        if name not in self:
            return self.decode(name, stored, dtype)
        if (as_stored := self._as_stored(name, stored, blob, info, dtype)) is not None:
            return as_stored
        dense = self._filled(name, blob, self._scratch_of(info.nbytes).view(own).view(info.shape))
        if dtype not in (None, own) and own.is_floating_point:
            return self.compress(name, dense.to(dtype).to(stored.device))
        level: Any = info.level
        if info.base_digest is not None:
            return self.compress(name, dense.clone().to(stored.device))
        fixed, rows = self._takes_fixed(name, stored.device), self._chunks[name]
        chunks: int | None = info.chunk_log2
        if device.wants_other_chunks(stored, level, chunks):
            chunks = None
        elif rows is not None and stored.is_cpu and level not in ("high", "max") and dense.numel() > 1 << rows:
            # Files have larger chunks, of which one token would need a whole one decoded.
            chunks = min(rows, info.chunk_log2)
        recut = chunks != info.chunk_log2
        if (fixed or recut) and not codec.is_lossy(blob):
            made = CompressedStorage.of(dense.to(stored.device), level=level, chunk_log2=chunks, fixed=fixed)
            if made.fixed or (recut and made.payload.nbytes < info.nbytes):
                return _parameter(made)
        payload = pack(blob)
        if payload.nbytes >= info.nbytes:
            return dense.clone().to(stored.device)
        shape = tuple(info.shape)
        return _parameter(CompressedStorage(payload.to(stored.device), shape, own, level, info.chunk_log2))

    def _as_stored(
        self, name: str, stored: torch.Tensor, blob: memoryview, info: codec.BlobInfo, dtype: torch.dtype | None
    ) -> torch.Tensor | None:
        """A parameter of the stored bytes as they are, where they lie if mapped; None where others are needed."""
        own, rows, level = torch_dtype(info.dtype), self._chunks[name], info.level
        changes = dtype not in (None, own) and own.is_floating_point
        finer = (
            rows is not None and level not in ("high", "max")
            and info.chunk_log2 > rows and math.prod(info.shape) > 1 << rows
        )  # fmt: skip
        if changes or finer or not stored.is_cpu or info.base_digest is not None or codec.is_lossy(blob):
            return None
        if self._takes_fixed(name, stored.device) or len(blob) >= info.nbytes:
            return None
        chosen: Any = level
        if self._is_mapped(stored):
            payload = in_file(stored, name)
        else:
            with _naming(name):
                _check_chunks(blob, threads=torch.get_num_threads())
            payload = pack(blob)
        return _parameter(CompressedStorage(payload, tuple(info.shape), own, chosen, info.chunk_log2))

    def _is_mapped(self, stored: torch.Tensor) -> bool:
        """Return whether stored bytes lie in a mapped file."""
        address = stored.data_ptr()
        if not any(start <= address < end for start, end in self._mapped):
            # Another file of the checkpoint may have been mapped since.
            self._mapped = mapped_files()
        return any(start <= address < end for start, end in self._mapped)

    def decode(self, name: str, stored: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """Make a dense tensor of stored bytes, for a conversion of the model's own; see `take`."""
        blob = _bytes(stored)
        info = _reasonable(name, blob)
        dense = self._filled(name, blob, torch.empty(info.shape, dtype=torch_dtype(info.dtype)))
        if dtype is not None and dense.is_floating_point():
            dense = dense.to(dtype)
        return dense.to(stored.device)

    def compress(self, name: str, dense: torch.Tensor) -> torch.Tensor:
        """Make a compressed parameter of a dense tensor; the tensor itself if it would not get smaller."""
        precision = None if self.stored else self.config.precision
        stored = CompressedStorage.of(
            dense,
            level=self.config.level,
            chunk_log2=self._chunks[name],
            precision=precision,
            fixed=self._takes_fixed(name, dense.device),
        )
        return dense if stored.payload.nbytes >= dense.nbytes else _parameter(stored)

    def _takes_fixed(self, name: str, place: torch.device) -> bool:
        """Return whether a weight takes the fixed-length form on the device that it is loaded to."""
        return name in self._fixed and takes_fixed(self.config.prefer, place)

    def release(self, model: nn.Module) -> None:
        """Let go of memory once all is loaded; put compressed weights in place, and dense ones out of the file."""
        self._scratch = None
        self._mapped.clear()
        self._differences.clear()
        identities: set[int] = set()
        for path, module in model.named_modules():
            for attribute, parameter in module._parameters.items():
                if isinstance(parameter, CompressedTensor):
                    place(module, attribute, parameter, f"{path}.{attribute}")
                elif parameter is not None and id(parameter) not in identities:
                    identities.add(id(parameter))
                    if parameter.device.type == "cpu":
                        # The parameter may lie in the mapped file.
                        parameter.data = parameter.data.clone()
            for attribute, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type == "cpu":
                    module._buffers[attribute] = buffer.clone()

    def _scratch_of(self, nbytes: int) -> torch.Tensor:
        """Memory to decode a weight that is only read; the codec's own pool would keep buffers of each size."""
        if self._scratch is None or self._scratch.numel() < nbytes:
            self._scratch = None
            self._scratch = torch.empty(nbytes, dtype=torch.uint8)
        return self._scratch[:nbytes]

    def _filled(self, name: str, blob: Any, out: torch.Tensor) -> torch.Tensor:
        info = codec.info(blob)
        with _naming(name):
            if info.base_digest is not None:
                file, its_name = self._differences[info.digest, info.dtype, tuple(info.shape)]
                return out.copy_(file.get(its_name, threads=torch.get_num_threads()))
            codec.decode_into(blob, out, threads=torch.get_num_threads(), check=True)
        return out


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Name the tensor in a `CorruptBlob` that passes."""
    try:
        yield
    except CorruptBlob as error:
        raise damaged(f"The stored tensor {name!r}", error) from error


def _check_chunks(blob: memoryview, *, threads: int) -> None:
    """Decode a lossless blob chunk by chunk and compare each with its check, in memory of a few chunks."""
    decoder = codec.ChunkDecoder(blob, len(blob))
    offsets = decoder.info.chunk_offsets
    step = max(BATCH // max(decoder.chunk_bytes, 1), 1)

    def check(first: int) -> None:
        for chunk in range(first, min(first + step, len(offsets) - 1)):
            decoder.decode(chunk, blob[offsets[chunk] : offsets[chunk + 1]])

    for _ in in_order(check, range(0, len(offsets) - 1, step), threads):
        pass


def _parameter(stored: CompressedStorage) -> nn.Parameter:
    return nn.Parameter(CompressedTensor(stored), requires_grad=stored.dtype.is_floating_point)


def _bytes(stored: torch.Tensor) -> Any:
    """A stored tensor's bytes, without a copy if they are on the CPU."""
    content: Any = stored.cpu().numpy()
    return memoryview(content)


def _reasonable(name: str, blob: Any) -> codec.BlobInfo:
    """Return the content of a blob's header if its size is plausible."""
    info = codec.info(blob)
    try:
        refuse_inflated(info.nbytes, blob.nbytes)
    except ValueError as error:
        raise UsageError(f"Cannot load {name!r}: {error}.") from error
    return info


def refuse_disk(device_map: Any) -> None:
    """Refuse to offload compressed weights to disk."""
    if isinstance(device_map, Mapping) and "disk" in device_map.values():
        raise Unsupported("Compressed weights cannot be offloaded to disk.", cure='Leave "disk" out of the device map.')


def computing(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a model is to be loaded as; those that no layer computes in are refused."""
    if dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise Unsupported(
            f"Layers cannot compute in {dtype}, so a model cannot be loaded in it.", cure="Pass dtype=torch.bfloat16."
        )
    return dtype
