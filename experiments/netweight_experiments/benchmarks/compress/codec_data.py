"""What the benchmark compresses: sets of tensors of one dtype."""

from __future__ import annotations

import importlib
import importlib.util
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from netweight.core.digests import digest_bytes
from netweight.core.seeds import torch_generator
from netweight.errors import UsageError
from netweight.store import open_store

if TYPE_CHECKING:
    import torch


# Name of the set of normally distributed weights.
GAUSSIAN = "N(0, 0.02)"

# Name of the sets of a million such weights, which stay in a core's cache: the code's speed, not the memory's.
IN_CACHE = "N(0, 0.02), in cache"

DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}


@dataclass(frozen=True)
class DataSet:
    """Tensors of one dtype, compressed one by one by netweight and joined by its peers; made by `pack`."""

    name: str
    """Where they come from."""
    dtype: str
    """Safetensors' name of their dtype."""
    tensors: tuple[torch.Tensor, ...]
    """The tensors, on the CPU, none of them empty; they lie one behind the other in `raw`. Any shapes, one dtype."""
    raw: NDArray[np.uint8] = field(repr=False)
    """All their bytes; shape `(bytes,)`, uint8."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.raw.nbytes

    def describe(self) -> dict[str, Any]:
        """Say what it is as a JSON value; the digest is that of all bytes."""
        count, digest = len(self.tensors), digest_bytes(self.raw.data)
        return {"name": self.name, "dtype": self.dtype, "tensors": count, "nbytes": self.nbytes, "digest": digest}


def pack(name: str, dtype: str, tensors: Sequence[torch.Tensor]) -> DataSet:
    """Copy tensors of one dtype into one piece of memory, so that all contenders read and write memory of one kind."""
    raw = np.concatenate([raw_bytes(tensor.contiguous()) for tensor in tensors])
    return DataSet(name, dtype, tuple(tensors_over(raw, tensors)), raw)


def tensors_over(raw: NDArray[np.uint8], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors of the dtypes and shapes of others that lie one behind the other in a piece of memory."""
    import torch

    laid, start = [], 0
    for tensor in like:
        part = raw[start : start + tensor.nbytes]
        laid.append(torch.from_numpy(part).view(tensor.dtype).reshape(tensor.shape))
        start += tensor.nbytes
    return laid


def order_0(values: NDArray[Any]) -> float:
    """Return the order-0 entropy of all values together, in bits."""
    counts = np.unique(values, return_counts=True)[1]
    return float(-(counts * np.log2(counts / counts.sum())).sum())


def raw_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Return a contiguous tensor's bytes, without a copy."""
    import torch

    raw: NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return raw


def gaussian(*, seed: int, count: int = 1 << 25, name: str = GAUSSIAN, dtype: str = "BF16") -> DataSet:
    """Draw one tensor from N(0, 0.02²), as freshly initialized weights are."""
    import torch

    drawn = torch.randn(count, generator=torch_generator(seed, "benchmark", "gaussian")).mul_(0.02)
    return pack(name, dtype, [_as(drawn, dtype)])


def model_as(file: Path, name: str, dtype: str, *, most: int | None = None) -> DataSet:
    """Read all floating-point tensors of a file, converted to one dtype."""
    kept, count = [], 0
    with open_store(file) as store:
        for tensor_name in store.names():
            tensor = store.get(tensor_name)
            if tensor.is_floating_point() and tensor.numel() and (most is None or count + tensor.numel() <= most):
                kept.append(_as(tensor, dtype))
                count += tensor.numel()
        return pack(name, dtype, kept)


def _as(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """Converted; for e4m3, whose exponents begin at 2^-6, first scaled into its range, as its users do."""
    import torch

    return tensor.mul(16 if dtype == "F8_E4M3" else 1).to(getattr(torch, DTYPES[dtype]))


def of_files(files: Sequence[Path]) -> list[DataSet]:
    """Read files as they are: one set per file and dtype."""
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


Bytes = NDArray[np.uint8]
BLOCK = 1 << 20  # bytes that zstd and lz4 are given at a time
LARGE_BLOCK = 1 << 23  # that peers with tables of their own are given at a time
PLANE_BLOCK = 1 << 18  # so that the planes stay in the cache between splitting and coding
_SHRINKS = 0.98  # a plane is stored coded if its size falls below this share
_WIDTHS = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "F8_E5M2": 1}


@dataclass(frozen=True)
class Ready:
    """A contender made ready for one data set and number of threads."""

    stored_nbytes: int
    """Bytes that it compresses the data to."""
    encode: Callable[[Any], object]
    """Compresses; takes what `prepare` returns."""
    decode: Callable[[], object]
    """Restores; what it returns is dropped."""
    restored: Callable[[], Any]
    """Decodes once and returns all bytes, for the check."""
    prepare: Callable[[], Any] = lambda: None
    """Makes the input of `encode`, untimed."""


@dataclass(frozen=True)
class Peer:
    """A peer."""

    name: str
    """What it is called in tables."""
    module: str | None
    """The module that must be installed; None if nothing is needed."""
    package: str | None
    """The package that brings it."""
    ready: Callable[[Bytes, str, int], Ready]
    """Makes it ready: `(raw bytes, dtype, threads)`."""
    dtypes: tuple[str, ...] | None = None
    """What it can take; None for anything."""


def missing() -> list[Peer]:
    """Return the peers that are not installed."""
    return [peer for peer in PEERS if peer.module is not None and importlib.util.find_spec(peer.module) is None]


def _memcpy(raw: Bytes, dtype: str, threads: int) -> Ready:
    target = np.zeros_like(raw)
    pieces = list(zip(np.array_split(target, threads), np.array_split(raw, threads), strict=True))
    run = _mapper(threads)

    def copy(_: Any = None) -> None:
        run(lambda pair: np.copyto(*pair), pieces)

    def restored() -> Bytes:
        copy()
        return target

    return Ready(raw.nbytes, copy, copy, restored)


def zipnn(dtype: str, threads: int = 1) -> Any:
    """Return zipnn's codec for a dtype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it compiles functions with torch.jit when imported
        return importlib.import_module("zipnn").ZipNN(bytearray_dtype=DTYPES[dtype], threads=threads)


def _zipnn(raw: Bytes, dtype: str, threads: int) -> Ready:
    codec = zipnn(dtype, threads)
    stored = codec.compress(bytearray(raw))

    def decode() -> Any:
        return codec.decompress(stored)

    return Ready(len(stored), codec.compress, decode, decode, prepare=lambda: bytearray(raw))


def _zstd(level: int) -> Callable[[Bytes, str, int], Ready]:
    return lambda raw, dtype, threads: _in_blocks(_blocks(raw, BLOCK), *_zstd_functions(level), threads)


def _lz4(raw: Bytes, dtype: str, threads: int) -> Ready:
    block = importlib.import_module("lz4.block")
    return _in_blocks(_blocks(raw, BLOCK), block.compress, block.decompress, threads)


def _zstd_planes(raw: Bytes, dtype: str, threads: int) -> Ready:
    encode, decode = _zstd_functions(1)
    width = _WIDTHS[dtype]

    def encode_planes(block: Bytes) -> list[tuple[bool, bytes]]:
        planes = [(plane.tobytes(), encode(plane)) for plane in _split(block, width)]
        return [(len(c) < _SHRINKS * len(p), c if len(c) < _SHRINKS * len(p) else p) for p, c in planes]

    def decode_planes(stored: list[tuple[bool, bytes]]) -> Bytes:
        return _merge([decode(part) if coded else part for coded, part in stored], width)

    def size(stored: list[tuple[bool, bytes]]) -> int:
        return sum(1 + len(part) for _, part in stored)

    return _in_blocks(_blocks(raw, PLANE_BLOCK), encode_planes, decode_planes, threads, size)


def _blosc2(codec: str, level: int) -> Callable[[Bytes, str, int], Ready]:
    def ready(raw: Bytes, dtype: str, threads: int) -> Ready:
        blosc2 = importlib.import_module("blosc2")
        settings = {
            "codec": getattr(blosc2.Codec, codec),
            "clevel": level,
            "filters": [blosc2.Filter.BITSHUFFLE],
            "filters_meta": [0],
            "typesize": _WIDTHS.get(dtype, 1),
            "nthreads": threads,
        }

        def encode(_: Any = None) -> bytes:
            stored: bytes = blosc2.compress2(raw, **settings)
            return stored

        stored, target = encode(), np.zeros_like(raw)

        def decode() -> Bytes:
            blosc2.decompress2(stored, dst=target, nthreads=threads)
            return target

        return Ready(len(stored), encode, decode, decode)

    return ready


def _openzl(raw: Bytes, dtype: str, threads: int) -> Ready:
    """OpenZL with exponents apart from signs and mantissas, where it has such a node, and order-0 entropy coding."""
    zl = importlib.import_module("openzl.ext")
    node = {"BF16": "BFloat16Deconstruct", "F16": "Float16Deconstruct", "F32": "Float32Deconstruct"}.get(dtype)
    compressor = zl.Compressor()
    compressor.set_parameter(zl.CParam.FormatVersion, zl.MAX_FORMAT_VERSION)
    entropy = zl.graphs.Entropy()
    graph = getattr(zl.nodes, node)()(compressor, zl.graphs.Store(), entropy) if node else entropy(compressor)
    compressor.select_starting_graph(graph)

    def encode(block: Bytes) -> bytes:
        context = zl.CCtx()
        context.ref_compressor(compressor)
        context.set_parameter(zl.CParam.FormatVersion, zl.MAX_FORMAT_VERSION)
        numbers = block.view(f"<u{_WIDTHS[dtype]}")
        stored: bytes = context.compress([zl.Input(zl.Type.Numeric, numbers)])
        return stored

    def decode(stored: bytes) -> Any:
        return zl.DCtx().decompress(stored)[0].content.as_nparray()

    return _in_blocks(_blocks(raw, LARGE_BLOCK), encode, decode, threads)


def _lmzip(raw: Bytes, dtype: str, threads: int) -> Ready:
    """The coder of lmzip, given what lmzip gives it: eight megabytes at a time, of a known type."""
    codec = importlib.import_module("lmz.codec")
    kind = int(importlib.import_module("lmz.planner").KIND_BF16) if dtype == "BF16" else 0

    def encode(block: Bytes) -> tuple[bytes, int, int, int, int]:
        parts, number, flags, check = codec.encode_chunk(block, _WIDTHS[dtype], kind=kind)
        return b"".join(map(bytes, parts)) if isinstance(parts, list) else parts, number, flags, check, block.nbytes

    def decode(stored: tuple[bytes, int, int, int, int]) -> Any:
        part, number, flags, check, size = stored
        return codec.decode_chunk(part, number, _WIDTHS[dtype], flags, size, check)

    return _in_blocks(_blocks(raw, LARGE_BLOCK), encode, decode, threads, lambda stored: len(stored[0]))


def _glyd(raw: Bytes, dtype: str, threads: int) -> Ready:
    glyd = importlib.import_module("glyd")

    def encode(block: Bytes) -> bytes:
        stored: bytes = glyd.compress(block, level="max", threads=1)
        return stored

    return _in_blocks(_blocks(raw, LARGE_BLOCK), encode, glyd.decompress, threads)


def _pcodec(raw: Bytes, dtype: str, threads: int) -> Ready:
    package, standalone = importlib.import_module("pcodec"), importlib.import_module("pcodec.standalone")
    kind = {"F16": "<f2", "F32": "<f4"}.get(dtype, f"<u{_WIDTHS[dtype]}")

    def encode(block: Bytes) -> bytes:
        stored: bytes = standalone.simple_compress(block.view(kind), package.ChunkConfig())
        return stored

    return _in_blocks(_blocks(raw, LARGE_BLOCK), encode, standalone.simple_decompress, threads)


# All peers, in the order of tables.
PEERS = (
    Peer("memcpy", None, None, _memcpy),
    Peer("zipnn", "zipnn", "zipnn", _zipnn, tuple(DTYPES)),
    Peer("zstd -1", "zstandard", "zstandard", _zstd(1)),
    Peer("zstd -3", "zstandard", "zstandard", _zstd(3)),
    Peer("zstd -1, planes", "zstandard", "zstandard", _zstd_planes, tuple(_WIDTHS)),
    Peer("lz4", "lz4", "lz4", _lz4),
    Peer("blosc2 bitshuffle + zstd", "blosc2", "blosc2", _blosc2("ZSTD", 1)),
    Peer("blosc2 bitshuffle + lz4", "blosc2", "blosc2", _blosc2("LZ4", 5)),
    Peer("OpenZL", "openzl", "openzl", _openzl, tuple(_WIDTHS)),
    Peer("lmzip", "lmz", "lmzip", _lmzip, tuple(_WIDTHS)),
    Peer("glyd max", "glyd", "glyd", _glyd),
    Peer("pcodec", "pcodec", "pcodec", _pcodec, ("BF16", "F16", "F32")),  # it advises against types of one byte
)


def _zstd_functions(level: int) -> tuple[Callable[[Any], bytes], Callable[[Any], bytes]]:
    """Zstd's two directions; its objects serve one thread each."""
    zstandard = importlib.import_module("zstandard")
    own = threading.local()

    def encode(block: Any) -> bytes:
        if not hasattr(own, "compressor"):
            own.compressor = zstandard.ZstdCompressor(level=level)
        stored: bytes = own.compressor.compress(block)
        return stored

    def decode(stored: Any) -> bytes:
        if not hasattr(own, "decompressor"):
            own.decompressor = zstandard.ZstdDecompressor()
        plain: bytes = own.decompressor.decompress(stored)
        return plain

    return encode, decode


def _in_blocks(
    blocks: Sequence[Bytes],
    encode: Callable[[Any], Any],
    decode: Callable[[Any], Any],
    threads: int,
    size: Callable[[Any], int] = len,
) -> Ready:
    """Make a codec of blocks ready: a loop, or a pool of threads."""
    run = _mapper(threads)
    stored = [encode(block) for block in blocks]
    return Ready(
        sum(size(part) for part in stored),
        lambda _: run(encode, blocks),
        lambda: run(decode, stored),
        lambda: b"".join(bytes(part) for part in run(decode, stored)),
    )


def _mapper(threads: int) -> Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]:
    """A function like `map` that runs in so many threads; they live as long as it."""
    if threads == 1:
        return lambda function, items: [function(item) for item in items]
    pool = ThreadPoolExecutor(threads)
    return lambda function, items: list(pool.map(function, items))


def _blocks(raw: Bytes, size: int) -> list[Bytes]:
    return [raw[start : start + size] for start in range(0, raw.nbytes, size)]


def _split(block: Bytes, width: int) -> list[Bytes]:
    """Rotate each number left by a bit, which moves its sign to the end, and take its bytes apart, highest first."""
    numbers = block.view(f"<u{width}")
    turned = (numbers << 1) | (numbers >> (8 * width - 1))
    return [(turned >> (8 * position)).astype(np.uint8) for position in reversed(range(width))]


def _merge(planes: Sequence[bytes], width: int) -> Bytes:
    """Undo `_split`."""
    turned = np.frombuffer(planes[0], np.uint8).astype(f"<u{width}")
    for plane in planes[1:]:
        turned <<= 8
        turned |= np.frombuffer(plane, np.uint8)
    merged: Bytes = ((turned >> 1) | (turned << (8 * width - 1))).view(np.uint8)
    return merged
