"""Measures folders end to end: compression by one and two threads and by zipnn's API; files of many small tensors.

    python -m netweight_experiments.benchmarks compress.end_to_end

Contenders take turns, round by round. A folder of bf16 numbers drawn from N(0, 0.02) in two files is compressed: by
`netweight.compress_folder`, which syncs what it writes, checks included, and by zipnn's API, tensor by tensor, into
files that are synced at the end. Then all tensors of a plain file of many small ones are read by `open_store` and by
safetensors, and what the compressed file has beyond its tensors' blobs is counted.

Threads are compared by wall time, the others by processor time, too; only a quiet machine says anything of threads.
"""

import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import netweight
from netweight.core.atomic_writes import sync
from netweight.core.seeds import torch_generator
from netweight_experiments.benchmarks.compress.codec_data import zipnn
from netweight_experiments.timing import Case, interleave, ratios


def make_folder(folder, megabytes, generator):
    """A folder of two files of 16 tensors each."""
    folder.mkdir()
    side = round((megabytes * 1e6 / 32 / 2) ** 0.5)
    for part in range(2):
        weights = {f"{part}.{i}": (torch.randn(side, side, generator=generator) * 0.02).bfloat16() for i in range(16)}
        save_file(weights, folder / f"model-{part}.safetensors")
    (folder / "config.json").write_text('{"model_type": "none"}')


def by_netweight(folder, target, threads):
    """Bytes that a folder takes, compressed."""
    netweight.compress_folder(folder, target, threads=threads, overwrite=True)
    return sum(path.stat().st_size for path in target.rglob("*.safetensors"))


def by_zipnn(folder, target):
    """The same by zipnn's API."""
    target.mkdir(exist_ok=True)
    peer, total = zipnn("BF16"), 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file, (target / path.name).open("wb") as out:
            for name in file.keys():
                raw = bytearray(file.get_tensor(name).view(torch.uint8).numpy().tobytes())
                total += out.write(peer.compress(raw))
        sync(target / path.name)
    return total


def read_by_netweight(path):
    with netweight.open_store(path) as store:
        return [store.get(name) for name in store.names()]


def read_by_safetensors(path):
    with safe_open(path, "pt") as file:
        return [file.get_tensor(name) for name in file.keys()]


def timed(work, rounds):
    """Wall and processor seconds of every round, and what the work returned; the contenders take turns."""
    results = {}

    def run(name):
        results[name] = work[name]()

    cases = [Case(name, lambda _, name=name: run(name)) for name in work]
    samples = interleave(cases, repeats=rounds, seed=0, warmup=0, again_below=0, steady=0)
    return {name: asdict(taken) for name, taken in samples.items()}, results


def ratio(seconds, slow, fast, clock):
    """The median of how many times as fast, round by round; and the rounds."""
    each = ratios({name: taken[clock] for name, taken in seconds.items()}, slow, fast)
    return {"median": round(statistics.median(each), 3), "rounds": [round(value, 3) for value in each]}


def end_to_end(place, megabytes, rounds, generator):
    folder = place / "model"
    make_folder(folder, megabytes, generator)
    names = ("one thread", "two threads", "zipnn")
    work = {
        names[0]: lambda: by_netweight(folder, place / "one", 1),
        names[1]: lambda: by_netweight(folder, place / "two", 2),
        names[2]: lambda: by_zipnn(folder, place / "zipnn"),
    }
    seconds, sizes = timed(work, rounds)
    return {
        "bytes": sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        "compressed_bytes": sizes,
        "two threads against one, wall": ratio(seconds, names[0], names[1], "wall"),
        "one thread against zipnn, wall": ratio(seconds, names[2], names[0], "wall"),
        "one thread against zipnn, processor": ratio(seconds, names[2], names[0], "cpu"),
        "seconds": seconds,
    }


def many_tensors(place, count, rounds, generator):
    plain, net = place / "many.safetensors", place / "many-net.safetensors"
    weights = {f"layers.{i}.weight": (torch.randn(64, 64, generator=generator) * 0.02).bfloat16() for i in range(count)}
    save_file(weights, plain)
    work = {"netweight": lambda: read_by_netweight(plain), "safetensors": lambda: read_by_safetensors(plain)}
    seconds, read = timed(work, rounds)
    assert all(torch.equal(a, b) for a, b in zip(*read.values(), strict=True))
    netweight.compress_folder(plain, net)
    with netweight.open_store(net) as store:
        blobs = sum(store.info(name).stored_nbytes for name in store.names())
    return {
        "tensors": count,
        "bytes": plain.stat().st_size,
        "netweight against safetensors, processor": ratio(seconds, "netweight", "safetensors", "cpu"),
        "beyond the blobs": round(net.stat().st_size / blobs - 1, 5),
        "seconds": seconds,
    }


def main(*, megabytes: int = 256, tensors: int = 10_000, rounds: int = 5, seed: int = 0):
    generator = torch_generator(seed, "benchmark", "end to end")
    memory = Path("/dev/shm")  # a disk's speed would be measured otherwise
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as place:
        return {
            "folder": end_to_end(Path(place), megabytes, rounds, generator),
            "many small tensors": many_tensors(Path(place), tensors, rounds, generator),
        }
