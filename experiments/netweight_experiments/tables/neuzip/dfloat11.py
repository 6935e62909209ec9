"""DFloat11's coder beside ours: its Huffman tables and its kernel.

The package packs symbol by symbol in Python; here the same bytes are made with numpy. Needs dfloat11, dahuffman and
cupy.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from netweight.errors import Unsupported

_THREADS, _BYTES_EACH = 512, 8  # of a block, and of the stream for each thread: the package's own


@final
@dataclass(frozen=True)
class Packed:
    """What the kernel takes."""

    luts: torch.Tensor
    exponents: torch.Tensor
    others: torch.Tensor
    positions: torch.Tensor
    gaps: torch.Tensor
    shape: torch.Size
    shared: int  # bytes of shared memory

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(part.nbytes for part in (self.luts, self.exponents, self.others, self.positions, self.gaps))


def pack(weight: torch.Tensor) -> Packed:
    """Pack a bf16 matrix; on the host, and slowly."""
    utils: Any = importlib.import_module("dfloat11.dfloat11_utils")
    flat = weight.flatten().view(torch.int16)
    with contextlib.redirect_stdout(io.StringIO()):  # the package prints its tables
        _, counter = utils.get_codec(flat.cpu().view(torch.bfloat16))
        codec, _, table = utils.get_32bit_codec(counter)
        luts = utils.get_luts(table)
    exponents = (flat >> 7 & 0xFF).to(torch.uint8).cpu().numpy()
    lengths, codes = np.zeros(256, np.int64), np.zeros(256, np.int64)
    for symbol, (bits, code) in codec.get_code_table().items():
        if isinstance(symbol, int):
            lengths[symbol], codes[symbol] = bits, code
    taken = lengths[exponents]
    ends = np.cumsum(taken)
    starts = ends - taken
    # Bit `at` of a code, from its highest on, for every bit of the stream.
    whose = np.repeat(np.arange(len(exponents), dtype=np.int32), taken)
    below = (ends[whose] - 1 - np.arange(int(ends[-1]))).astype(np.int8)
    stream = np.packbits((codes.astype(np.int32)[exponents[whose]] >> below & 1).astype(np.uint8))
    units = -(-len(stream) // (_THREADS * _BYTES_EACH)) * _THREADS
    first = np.searchsorted(starts, np.arange(units) * 8 * _BYTES_EACH)
    gaps = np.where(first < len(starts), starts[np.minimum(first, len(starts) - 1)] - np.arange(units) * 64, 0)
    gap_bits = (gaps[:, None] >> np.arange(4, -1, -1) & 1).astype(np.uint8)
    positions = np.append(np.searchsorted(starts, np.arange(units // _THREADS) * 64 * _THREADS), len(exponents))
    others = (flat >> 8 & 0x80 | flat & 0x7F).to(torch.uint8)
    device = weight.device
    there = [torch.from_numpy(part).to(device) for part in (stream, positions.astype(np.uint32), np.packbits(gap_bits))]
    shared = _THREADS * 4 + 4 + int(np.diff(positions).max()) * 2
    return Packed(luts.to(device), there[0], others, there[1], there[2], weight.shape, shared)


def unpack(kept: Packed) -> torch.Tensor:
    """Decode by the package's kernel, which returns at once."""
    cupy: Any = importlib.import_module("cupy")
    out = torch.empty(kept.shape, dtype=torch.bfloat16, device=kept.others.device)
    parts = (kept.luts, kept.exponents, kept.others, kept.positions, kept.gaps, out)
    sizes = (kept.luts.shape[0], kept.exponents.numel(), kept.others.numel())
    blocks = -(-kept.exponents.numel() // (_THREADS * _BYTES_EACH))
    with cupy.cuda.ExternalStream(torch.cuda.current_stream(out.device).cuda_stream):
        _kernel()((blocks,), (_THREADS,), (*(part.data_ptr() for part in parts), *sizes), shared_mem=kept.shared)
    return out


_loaded: list[Any] = []


def _kernel() -> Any:
    if not _loaded:
        spec = importlib.util.find_spec("dfloat11")
        if spec is None or spec.origin is None or importlib.util.find_spec("cupy") is None:
            raise Unsupported("dfloat11 or cupy is not installed")
        cupy: Any = importlib.import_module("cupy")
        module = cupy.RawModule(path=str(Path(spec.origin).parent / "decode.ptx"))
        _loaded.append(module.get_function("decode"))
    return _loaded[0]


def require() -> None:
    """Raise `Unsupported` unless the package and its kernel are there."""
    _kernel()
