"""Measures the codec on zeros, palettes, masks, positions, and dense weights.

Beside it zipnn and zstd -3 on byte planes, one thread; every decoded byte is compared.

    python -m netweight_experiments.benchmarks compress.skewed
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import numpy as np
import torch

from netweight import codec
from netweight.codec.header import dtype_name
from netweight.core.seeds import torch_generator
from netweight_experiments.benchmarks.compress.codec_data import DTYPES, order_0, zipnn
from netweight_experiments.timing import in_turns, median_ratio

_COUNT = 1 << 20


def kinds(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of skewed data."""
    generator = torch_generator(seed, "benchmark", "skewed")
    weights = torch.randn(_COUNT, generator=generator) * 0.02

    def share(part: float) -> torch.Tensor:
        return torch.rand(_COUNT, generator=generator) < part

    def one_of(values: torch.Tensor) -> torch.Tensor:
        return values[torch.randint(0, len(values), (_COUNT,), generator=generator)]

    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        for zeros in (50, 90, 99):
            yield f"{name}, {zeros} % zeros", torch.where(share(zeros / 100), 0.0, weights).to(dtype)
    yield "bf16 ternary", one_of(torch.tensor([-0.013, 0, 0.013])).bfloat16()
    yield "bf16 ±1", one_of(torch.tensor([-1.0, 1.0])).bfloat16()
    yield "bf16 of 8 values", one_of(torch.randn(8, generator=generator)).bfloat16()
    yield "fp8 of 16 values", one_of(torch.arange(16) * 0.125 - 1).to(torch.float8_e4m3fn)
    yield "mask, 1 % true", share(0.01)
    yield "causal mask", torch.tril(torch.ones(1024, 1024, dtype=torch.bool))
    yield "int64 positions", torch.arange(_COUNT)
    yield "int64 positions of 512", torch.arange(512).repeat(_COUNT // 512)
    words = torch.rand(_COUNT, generator=generator).pow(-1 / 1.1).clamp(max=30_000)
    yield "int64 token ids", words.long()
    yield "int32 ids below 30,000", torch.randint(0, 30_000, (_COUNT,), generator=generator, dtype=torch.int32)
    for name, moment in _moments(words.long(), weights[: 30_001 * 32].view(-1, 32)).items():
        yield f"AdamW's {name}, an embedding's", moment
    moved = (weights + 1e-5 * torch.randn(_COUNT, generator=generator)).bfloat16()
    yield "XOR of bf16 checkpoints", moved.view(torch.int16) ^ weights.bfloat16().view(torch.int16)


def _moments(tokens: torch.Tensor, start: torch.Tensor) -> dict[str, torch.Tensor]:
    """AdamW's states of an embedding after ten steps on texts, whose tokens leave most rows alone."""
    embedding = torch.nn.Embedding.from_pretrained(start.clone(), freeze=False)
    optimizer = torch.optim.AdamW(embedding.parameters())
    for batch in tokens[: 10 * 2048].view(10, -1):
        optimizer.zero_grad()
        embedding(batch).square().sum().backward()
        optimizer.step()
    return {name: optimizer.state[embedding.weight][name] for name in ("exp_avg", "exp_avg_sq")}


def dense(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of weights as they come."""
    weights = torch.randn(4 * _COUNT, generator=torch_generator(seed, "benchmark", "dense")) * 0.02
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2):
        scale = 16 if dtype == torch.float8_e4m3fn else 1
        yield f"dense {dtype_name(dtype)}", (weights * scale).to(dtype)


def measure(tensor: torch.Tensor, rounds: int) -> dict[str, Any]:
    """Sizes, and medians of paired processor times, of netweight and its peers on one tensor."""
    raw, width = tensor.contiguous().view(-1).view(torch.uint8).numpy(), tensor.element_size()
    zstd = importlib.import_module("zstandard")
    blob, for_gpus = codec.encode(tensor), codec.encode(tensor, gpu_modes=True)
    planes = [zstd.ZstdCompressor(level=3).compress(raw[i::width].tobytes()) for i in range(width)]
    out, joined = np.empty_like(raw), np.empty((len(raw) // width, width), np.uint8)

    def of_planes() -> None:
        for i, plane in enumerate(planes):
            joined[:, i] = np.frombuffer(zstd.ZstdDecompressor().decompress(plane), np.uint8)

    def ours(**options: Any) -> None:
        codec.decode_into(blob, out, **options)

    work: dict[str, Callable[[], Any]] = {
        "decode": ours,
        "decode, checked": lambda: ours(check=True),
        "decode, GPU modes": lambda: codec.decode_into(for_gpus, out),
        "decode, portable": lambda: ours(path="portable"),
        "encode": lambda: codec.encode(tensor),
        "encode, GPU modes": lambda: codec.encode(tensor, gpu_modes=True),
        "decode, zstd": of_planes,
    }
    sizes = {"netweight": len(blob), "GPU modes": len(for_gpus), "zstd -3, planes": sum(map(len, planes))}
    if dtype_name(tensor.dtype) in DTYPES:
        peer = zipnn(dtype_name(tensor.dtype))
        stored = peer.compress(bytearray(raw))
        sizes["zipnn"] = len(stored)
        work["decode, zipnn"] = lambda: peer.decompress(stored)
        work["encode, zipnn"] = lambda: peer.compress(bytearray(raw))
    for check in (work["decode"], work["decode, checked"]):
        out.fill(0xA5)
        check()
        assert (out == raw).all()
    times = in_turns(work, rounds, steady=0.02)
    entropy = order_0(raw.view(f"<u{width}")) / 8
    speeds = {name: round(raw.nbytes / statistics.median(seconds) / 1e9, 3) for name, seconds in times.items()}
    ratios = {name: round(raw.nbytes / size, 3) for name, size in sizes.items()}
    ratios["order 0"] = round(raw.nbytes / max(entropy, 1), 3)
    checked = median_ratio(times, "decode", "decode, checked")
    return {"nbytes": raw.nbytes, "ratio": ratios, "GB/s": speeds, "checked per unchecked decode": checked}


def main(
    *,
    rounds: int = 3,
    seed: int = 0,
    only: Annotated[tuple[str, ...], "rows whose names contain one of these"] = ("",),
) -> dict[str, Any]:
    """Measure."""
    rows = {}
    for name, tensor in (*kinds(seed), *dense(seed)):
        if any(text in name for text in only):
            rows[name] = measure(tensor, rounds)
            print(name, {key: value for key, value in rows[name].items() if key != "nbytes"}, flush=True)
    return {"rows": rows}
