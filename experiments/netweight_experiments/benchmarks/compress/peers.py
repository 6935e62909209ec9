"""Measures netweight's levels beside general and specialized compressors: whole sets of tensors, and tensor by tensor.

One thread, processor time, all contenders in turns in one process; every decoded byte is compared. Of `--models`,
files of safetensors, the tensors are taken in the order of the file, up to `--most` bytes of each; then MiniLM in bf16,
fp32 and fp8, and the moments of AdamW for one of its matrices follow.

    python -m netweight_experiments.benchmarks compress.peers --models FILE …
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from netweight import codec
from netweight.core.environment import installed_version
from netweight.core.seeds import torch_generator
from netweight.store import open_store
from netweight.toys import minilm
from netweight_experiments.benchmarks.compress.codec_data import (
    DTYPES,
    PEERS,
    DataSet,
    Peer,
    Ready,
    missing,
    model_as,
    pack,
)
from netweight_experiments.timing import in_turns, median_ratio

LEFT_OUT = ("memcpy", "zstd -1", "zstd -1, planes", "lz4", "blosc2 bitshuffle + lz4")  # others stand for them
BASE = "netweight default"
PACKAGES = ("zipnn", "zstandard", "blosc2", "openzl", "lmzip", "glyd", "pcodec")


def file_sets(file: Path, most: int) -> Iterator[DataSet]:
    """Yield the float tensors of a file, up to so many bytes, by their dtypes."""
    tensors: dict[str, list[torch.Tensor]] = {}
    with open_store(file) as store:
        for name in store.names():
            size, dtype = store.info(name).nbytes, store.info(name).dtype
            if dtype in DTYPES and 0 < size <= most:
                tensors.setdefault(dtype, []).append(store.get(name))
                most -= size
    for dtype, group in tensors.items():
        yield pack(f"{file.parent.name}, {sum(t.nbytes for t in group) / 1e6:,.0f} MB", dtype, group)


def moments(file: Path, seed: int) -> Iterator[DataSet]:
    """Yield AdamW's moments of a matrix after twenty steps on random inputs, which a model's own matrix answers."""
    generator = torch_generator(seed, "benchmark", "moments")
    with open_store(file) as store:
        weight = store.get("encoder.layer.3.intermediate.dense.weight").float()
    trained = torch.nn.Parameter(weight + 1e-3 * torch.randn(weight.shape, generator=generator))
    optimizer = torch.optim.AdamW([trained], lr=1e-4)
    for _ in range(20):
        inputs = torch.randn(64, weight.shape[1], generator=generator)
        optimizer.zero_grad()
        (inputs @ (trained - weight).T).square().mean().backward()
        optimizer.step()
    for name in ("exp_avg", "exp_avg_sq"):
        yield pack(f"AdamW's {name}", "F32", [optimizer.state[trained][name]])


def sets(models: Sequence[Path], most: int, seed: int) -> Iterator[DataSet]:
    """Yield what is compressed."""
    for file in models:
        yield from file_sets(file, most)
    file = minilm.weights_file()
    for dtype in ("BF16", "F32", "F8_E4M3", "F8_E5M2"):
        yield model_as(file, "MiniLM", dtype, most=most // 4)
    yield from moments(file, seed)


def _ours(data: DataSet, level: str) -> Ready:
    blobs = [codec.encode(tensor, level=level) for tensor in data.tensors]

    def encode(_: Any = None) -> list[bytes]:
        return [codec.encode(tensor, level=level) for tensor in data.tensors]

    def decode() -> list[Any]:
        return [codec.decode_raw(blob) for blob in blobs]

    return Ready(sum(map(len, blobs)), encode, decode, lambda: np.concatenate(decode()))


def _encoded(way: Any) -> Any:
    return way.encode(way.prepare())


def _one_by_one(peer: Peer, data: DataSet) -> Ready:
    """A peer that is given one tensor after the other."""
    ends = np.cumsum([tensor.nbytes for tensor in data.tensors])
    parts = [peer.ready(part, data.dtype, 1) for part in np.split(data.raw, ends[:-1])]

    def encode(_: Any = None) -> None:
        for part in parts:
            part.encode(part.prepare())

    def decode() -> None:
        for part in parts:
            part.decode()

    return Ready(
        sum(p.stored_nbytes for p in parts), encode, decode, lambda: b"".join(bytes(p.restored()) for p in parts)
    )


def measure(data: DataSet, rounds: int) -> dict[str, Any]:
    """Sizes, and medians of paired processor times."""
    absent = missing()
    taken = [
        p for p in PEERS if p.name not in LEFT_OUT and p not in absent and (p.dtypes is None or data.dtype in p.dtypes)
    ]
    ready: dict[str, Ready] = {f"netweight {level}": _ours(data, level) for level in codec.LEVELS}
    for peer in taken:
        ready[peer.name] = peer.ready(data.raw, data.dtype, 1)
        if len(data.tensors) > 1:
            ready[f"{peer.name}, tensor by tensor"] = _one_by_one(peer, data)
    return _in_turns(data, ready, rounds)


def measure_levels(data: DataSet, levels: Sequence[str], rounds: int) -> dict[str, Any]:
    """The same of netweight's levels alone; `default` must be among them."""
    return _in_turns(data, {f"netweight {level}": _ours(data, level) for level in levels}, rounds)


def _in_turns(data: DataSet, ready: dict[str, Ready], rounds: int) -> dict[str, Any]:
    work: dict[str, Callable[[], Any]] = {}
    for name, each in ready.items():
        if memoryview(each.restored()).cast("B") != data.raw.data:
            raise AssertionError(f"{name} does not restore {data.name}")
        work[f"encode, {name}"] = partial(_encoded, each)
        work[f"decode, {name}"] = each.decode
    times = in_turns(work, rounds)
    rows = {}
    for name, each in ready.items():
        row: dict[str, Any] = {"stored_nbytes": each.stored_nbytes, "ratio": round(data.nbytes / each.stored_nbytes, 4)}
        for way in ("encode", "decode"):
            row[f"{way} GB/s"] = round(data.nbytes / statistics.median(times[f"{way}, {name}"]) / 1e9, 3)
            row[f"{way}, times of {BASE}"] = round(median_ratio(times, f"{way}, {name}", f"{way}, {BASE}"), 2)
        rows[name] = row
    return {**data.describe(), "rows": rows}


def main(
    *, models: tuple[Path, ...] = (), most: int = 64 << 20, rounds: int = 3, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Measure."""
    versions = {name: version for name in PACKAGES if (version := installed_version(name)) is not None}
    found: dict[str, Any] = {"versions": versions, "not installed": [p.name for p in missing()], "sets": []}
    for data in sets(models, most, seed):
        found["sets"].append(measure(data, rounds))
        for name, row in found["sets"][-1]["rows"].items():
            print(f"{data.name} {data.dtype}: {name}: {row}", flush=True)
        yield found
