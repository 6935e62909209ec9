"""NeuZip's figure 4: how fast matrices are packed and unpacked, by size and by codec, on a GPU or a CPU.

A codec packs a dense bf16 matrix that lies on the device, and unpacks it there again. Exact ones are checked bit for
bit before anything is timed. DFloat11's package packs symbol by symbol in Python; here the same bytes are made with
numpy, by its tables, for its kernel (needs dfloat11, dahuffman and cupy).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from netweight import codec
from netweight.codec.cuda import fixed_products
from netweight.codec.fixed import encode_fixed
from netweight.core.seeds import derive
from netweight.errors import MissingExtra, NetweightError, Unsupported
from netweight.methods.compress.runtime.storage import CompressedStorage
from netweight.report.finding import Finding
from netweight.report.plots import lines
from netweight_experiments.tables.neuzip.paper_scale_models import PAPER, chosen_device, in_turns, synchronize
from netweight_experiments.tables.neuzip.quantizers import nf4
from netweight_experiments.tables.neuzip.training import GIB, SEED
from netweight_experiments.tables.registry import Column, MeasuredTable, Row, Scale, table

_THREADS, _BYTES_EACH = 512, 8  # of a block, and of the stream for each thread: the package's own


@dataclass(frozen=True)
class _Packed:
    """What the kernel takes."""

    luts: torch.Tensor
    exponents: torch.Tensor
    others: torch.Tensor
    positions: torch.Tensor
    gaps: torch.Tensor
    shape: torch.Size
    shared: int
    """Bytes of shared memory."""

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(part.nbytes for part in (self.luts, self.exponents, self.others, self.positions, self.gaps))


def _pack(weight: torch.Tensor) -> _Packed:
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
    return _Packed(luts.to(device), there[0], others, there[1], there[2], weight.shape, shared)


def _unpack(kept: _Packed) -> torch.Tensor:
    """Decode by the package's kernel, which returns at once."""
    cupy: Any = importlib.import_module("cupy")
    out = torch.empty(kept.shape, dtype=torch.bfloat16, device=kept.others.device)
    parts = (kept.luts, kept.exponents, kept.others, kept.positions, kept.gaps, out)
    sizes = (kept.luts.shape[0], kept.exponents.numel(), kept.others.numel())
    blocks = -(-kept.exponents.numel() // (_THREADS * _BYTES_EACH))
    with cupy.cuda.ExternalStream(torch.cuda.current_stream(out.device).cuda_stream):
        _kernel()((blocks,), (_THREADS,), (*(part.data_ptr() for part in parts), *sizes), shared_mem=kept.shared)
    return out


@cache
def _kernel() -> Any:
    spec = importlib.util.find_spec("dfloat11")
    if spec is None or spec.origin is None or importlib.util.find_spec("cupy") is None:
        raise Unsupported("dfloat11 or cupy is not installed")
    cupy: Any = importlib.import_module("cupy")
    return cupy.RawModule(path=str(Path(spec.origin).parent / "decode.ptx")).get_function("decode")


_LOSSLESS = "netweight, lossless"
_SMALL = (256, 512, 1024, 2048)
# Bytes of matrices that a round goes through, one after the other: more than the caches of a GPU hold.
_WORK = 1 << 29
_TARGETS = {"unpacking": 1.2e12, "packing": 0.4e12}  # bytes a second on an H100 or H200, for sides from _LARGE on
_LARGE = 4096


@dataclass(frozen=True)
class _Way:
    """How a matrix is packed and unpacked."""

    name: str
    """Its name in tables."""
    pack: Callable[[torch.Tensor], Any]
    """Dense matrix → what is kept."""
    unpack: Callable[[Any], torch.Tensor]
    """What is kept → dense matrix."""
    stored: Callable[[Any], int]
    """What is kept → its bytes on the device."""
    exact: bool = True
    """Whether every bit comes back."""
    slow: bool = False
    """Whether the host packs; then checking is timed with it."""
    largest: int | None = None
    """The side of the largest matrices that it packs in seconds."""


@table("neuzip-fig4", needs=("evidence",), paper_needs=("a GPU",), stand_in=True)
def figure4(scale: Scale, out: Path) -> MeasuredTable:
    """Bytes of weights packed and unpacked per second, by matrix size: offloading, quantizing, compressing."""
    device = chosen_device(None if scale == "paper" or torch.cuda.is_available() else "cpu")
    sides = PAPER.sides if scale == "paper" else _SMALL
    found = joined([throughput(device, side, rounds=PAPER.rounds) for side in sides])
    return measured_throughput(found, device)


def throughput(device: torch.device, side: int, *, rounds: int) -> dict[str, Any]:
    """Time every way on matrices of one size; what packs slowly packs one of them, once."""
    ways, missing = _ways(device)
    ways = [way for way in ways if way.largest is None or side <= way.largest]
    count = max(1, min(64, _WORK // (2 * side**2) // (1 if device.type == "cuda" else 128)))
    weights = [_matrix(side, device, number) for number in range(count)]
    fast = [way for way in ways if not way.slow]
    kept = {way.name: [_checked(way, weight) for weight in weights] for way in fast}
    timed = in_turns({way.name: _each(way.pack, weights) for way in fast}, device, rounds=rounds)
    packing = {name: tuple(taken / count for taken in times) for name, times in timed.items()}
    for way in ways:
        if way.slow:
            synchronize(device)
            started = time.perf_counter()
            kept[way.name] = [_checked(way, weights[0])]
            synchronize(device)
            packing[way.name] = (time.perf_counter() - started,)
    timed = in_turns({way.name: _each(way.unpack, kept[way.name]) for way in ways}, device, rounds=rounds)
    unpacking = {name: tuple(taken / len(kept[name]) for taken in times) for name, times in timed.items()}
    found = {}
    for way in ways:
        share = way.stored(kept[way.name][0]) / weights[0].nbytes
        found[way.name] = [{"side": side, "share": share, "pack": packing[way.name], "unpack": unpacking[way.name]}]
    return {"ways": found, "missing": missing}


def joined(sizes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What was found for several sizes of matrices, as one."""
    names = [name for of in sizes for name in of["ways"]]
    ways = {name: [point for of in sizes for point in of["ways"].get(name, [])] for name in dict.fromkeys(names)}
    return {"ways": ways, "missing": {name: why for of in sizes for name, why in of["missing"].items()}}


def measured_throughput(found: dict[str, Any], device: torch.device) -> MeasuredTable:
    """Lay timings out as figure 4: one row per way and matrix size."""
    columns = (
        Column("packing", "GiB/s", "higher"),
        Column("unpacking", "GiB/s", "higher"),
        Column("share of bytes kept on the device", "", "lower"),
    )
    rows, series = [], {}  # type: list[Row], dict[str, dict[str, Any]]
    for name, points in found["ways"].items():
        for point in points:
            rates = [2 * point["side"] ** 2 / GIB / median(point[what]) for what in ("pack", "unpack")]
            rows.append(Row(f"{name}, {point['side']} × {point['side']}", (*rates, point["share"])))
            for what, rate in zip(("packing", "unpacking"), rates, strict=True):
                xs, ys = series.setdefault(what, {}).setdefault(name, ([], []))
                xs.append(point["side"])
                ys.append(rate)
    figures = tuple(
        lines(
            of,
            alt=f"Rates of {what} by matrix size, one line for each way; the table has the numbers.",
            caption=f"{what.capitalize()}, by rows of a square bf16 matrix.",
            xlabel="rows",
            ylabel="GiB of weights a second",
            log="xy",
        )
        for what, of in series.items()
    )
    where = "a GPU" if device.type == "cuda" else "a CPU: nothing is offloaded there"
    return MeasuredTable(
        columns=columns,
        rows=tuple(rows),
        findings=_findings(found["ways"][_LOSSLESS]) if device.type == "cuda" else (),
        differs=(
            f"Measured on {where}; the paper's device and sizes are not recorded.",
            "Weights are drawn from N(0, 0.02²), rounded to bf16.",
        ),
        figures=figures,
        notes=(
            "Medians of rounds in which the ways take turns; bytes are those of the dense matrix.",
            *(f"{name} was not measured: {reason}." for name, reason in found["missing"].items()),
        ),
    )


def _findings(points: list[dict[str, Any]]) -> tuple[Finding, ...]:
    """The codec's rates for large matrices, in bytes of dense weights a second."""
    return tuple(
        Finding(
            f"{_LOSSLESS}, {point['side']} × {point['side']}: {what}", 2 * point["side"] ** 2 / median(point[key]),
            unit="bytes/s", better="higher", target=_TARGETS[what], n=len(point[key]), seeds=(SEED,),
        )
        for what, key in (("packing", "pack"), ("unpacking", "unpack"))
        for point in points
        if point["side"] >= _LARGE
    )  # fmt: skip


def _matrix(side: int, device: torch.device, number: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(derive(SEED, "matrix", number))
    return (torch.randn(side, side, generator=generator, device=device) * 0.02).bfloat16()


def _each(function: Callable[[Any], Any], arguments: list[Any]) -> Callable[[], object]:
    """Apply a function to one argument after the other; results are let go of."""

    def run() -> None:
        for argument in arguments:
            function(argument)

    return run


def _checked(way: _Way, weight: torch.Tensor) -> Any:
    """What a way keeps, after a look at whether it gives back what it should."""
    kept = way.pack(weight)
    again = way.unpack(kept)
    as_is = not way.exact or torch.equal(again.view(torch.int16), weight.view(torch.int16))
    if again.shape != weight.shape or not as_is:
        raise NetweightError(
            f"{way.name} did not restore a matrix of shape {tuple(weight.shape)}, so its times mean nothing.",
            cure="Report it.",
        )
    return kept


def _ways(device: torch.device) -> tuple[list[_Way], dict[str, str]]:
    """The ways that run here, and why the others do not."""

    def boxed(precision: codec.Precision | None) -> Callable[[torch.Tensor], Any]:
        return lambda weight: CompressedStorage.of(weight, precision=precision)

    ways = [
        _Way(_LOSSLESS, boxed(None), CompressedStorage.dense, _payload),
        _Way(
            "netweight, 3 bits",
            boxed(codec.Precision(3, 512)),
            CompressedStorage.dense,
            _payload,
            exact=False,
            slow=True,
        ),
        _Way(
            "netweight, fixed length",
            lambda weight: (encode_fixed(weight), weight.shape),
            lambda kept: fixed_products.decode(kept[0], *kept[1]),
            lambda kept: int(kept[0].nbytes),
        ),
    ]
    missing = {}
    for name, maker in (
        ("offload and reload", _offloading),
        ("bitsandbytes NF4", _nf4),
        ("nvCOMP ANS on exponents", _nvcomp),
        ("DFloat11", _dfloat11),
    ):
        try:
            ways.append(maker(name, device))
        except (Unsupported, MissingExtra) as error:
            missing[name] = error.reason.removesuffix(".")
    return ways, missing


def _payload(kept: CompressedStorage) -> int:
    return kept.payload.nbytes


def _offloading(name: str, device: torch.device) -> _Way:
    """The matrix waits in pinned memory of the host and comes back over the bus."""
    if device.type != "cuda":
        raise Unsupported("there is no host to offload to from a CPU")

    def offload(weight: torch.Tensor) -> torch.Tensor:
        there = torch.empty(weight.shape, dtype=weight.dtype, pin_memory=True)
        return there.copy_(weight)

    return _Way(name, offload, lambda there: there.to(device, non_blocking=True), lambda there: 0, slow=True)


def _nf4(name: str, device: torch.device) -> _Way:
    pack, unpack = nf4()
    return _Way(name, pack, unpack, lambda kept: int(kept[0].nbytes + kept[1].absmax.nbytes), exact=False)


def _dfloat11(name: str, device: torch.device) -> _Way:
    if device.type != "cuda":
        raise Unsupported("it needs a GPU")
    _kernel()
    return _Way(name, _pack, _unpack, lambda kept: int(kept.nbytes), slow=True, largest=4096)


def _nvcomp(name: str, device: torch.device) -> _Way:
    """The paper's arrangement: NVIDIA's coder on the exponents, sign and mantissa beside them as they are."""
    if device.type != "cuda":
        raise Unsupported("it needs a GPU")
    if importlib.util.find_spec("nvidia.nvcomp") is None:
        raise Unsupported("nvidia-nvcomp-cu13 is not installed")
    nvcomp: Any = importlib.import_module("nvidia.nvcomp")
    stream = torch.cuda.current_stream(device).cuda_stream
    coder = nvcomp.Codec(algorithm="ANS", device_id=torch.cuda.current_device(), cuda_stream=stream)

    def pack(weight: torch.Tensor) -> Any:
        bits = weight.view(torch.int16)
        exponents = (bits >> 7).to(torch.uint8)
        rest = (bits & 0x7F | (bits >> 8) & 0x80).to(torch.uint8)
        return coder.encode(nvcomp.as_array(exponents.flatten())), rest

    def unpack(kept: Any) -> torch.Tensor:
        coded, rest = kept
        exponents = torch.as_tensor(coder.decode(coded), device=device).view(torch.uint8).view(rest.shape).short()
        bits = (rest.short() & 0x80) << 8 | exponents << 7 | rest.short() & 0x7F
        weight: torch.Tensor = bits.view(torch.bfloat16)
        return weight

    return _Way(name, pack, unpack, lambda kept: int(kept[0].buffer_size) + kept[1].nbytes)
