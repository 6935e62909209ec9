"""How much memory folder compression needs, and how soon the first byte comes: measured, written to results/ as JSON.

    python -m netweight_experiments.benchmarks compress.memory

A model folder is made in a temporary place: bf16 numbers drawn from N(0, 0.02), in two shards, the largest tensor first
so that whoever waits for the first tensor waits longest. Everything is measured in fresh processes.

peak memory         The largest resident size that the system counted for the process of `netweight compress` (or
                    `decompress`, `verify`): the interpreter, all libraries and mapped pages of the files included. The
                    target for compress is 3 times the largest tensor and 350 MB.
command, first byte Seconds from the start of the process `netweight compress FOLDER OUT` until the first byte of a
                    weights file is seen on disk, watched from outside every millisecond. Start of the interpreter and
                    all imports are included; torch is not among them, which the tests prove, so there is nothing to
                    take off. The target is 1 s.
store, first tensor Seconds of `open_store(FOLDER).get(NAME)`, until all its pages are in memory, in a process that has
                    done its imports: for the first tensor, which is the largest, and for a small one; on the plain and
                    on the compressed folder. What `import torch` costs before is measured beside it, and what it
                    costs to fill as many bytes of fresh memory, below which no copy can come. The target is 1 s.
cold                Before the run the system was asked to forget the cached pages of the files that are read
                    (posix_fadvise); what lies beneath the system, such as a disk's own cache, is as it was.

one tensor          With `--one MB`, instead: a file of one tensor; of each command the peak less that of the same
                    command on a file of 8 kB, which is the interpreter and its libraries, and the processor time that
                    the system spent, with that of `cp` and of the `sync` that netweight does, too, beside it. Targets:
                    200 MB; 1.5 times `cp`.

Times are medians of the runs; all single values are kept. Peaks are the largest of all runs.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy

from netweight.core.atomic_writes import sync

MB = 1_000_000
COLUMNS = 1024
NETWEIGHT = [sys.executable, "-m", "netweight"]
STORE = """
import json, sys, time
start = time.perf_counter()
import torch
torch_imported = time.perf_counter()
import netweight
netweight.open_store
ready = time.perf_counter()
tensor = netweight.open_store(sys.argv[1]).get(sys.argv[2])
tensor.view(torch.uint8).view(-1)[::4096].sum()  # a plain tensor may be mapped: read every page of it
done = time.perf_counter()
fresh = torch.empty(tensor.nbytes, dtype=torch.uint8).fill_(1)
filled = time.perf_counter()
print(json.dumps({"import torch": torch_imported - start, "import netweight": ready - torch_imported,
                  "get": done - ready, "fill": filled - done}))
"""


def write_tensors(path, tensors):
    """Write bf16 tensors given as name -> rows, a block of rows at a time; return the bytes of the largest."""
    entries, offset = {}, 0
    for name, rows in tensors.items():
        size = rows * COLUMNS * 2
        entries[name] = {"dtype": "BF16", "shape": [rows, COLUMNS], "data_offsets": [offset, offset + size]}
        offset += size
    head = json.dumps(entries).encode()
    generator = numpy.random.default_rng(0)
    with open(path, "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for rows in tensors.values():
            for start in range(0, rows, 4096):
                shape = min(4096, rows - start), COLUMNS
                values = generator.standard_normal(shape, dtype=numpy.float32) * numpy.float32(0.02)
                file.write((values.view(numpy.uint32) >> 16).astype(numpy.uint16).tobytes())
    return max(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in entries.values())


def make_model(folder, largest_mb):
    """Make the folder; return the bytes of its largest tensor and of all tensors."""
    folder.mkdir()
    rows = largest_mb * MB // (2 * COLUMNS)
    shards = {
        "model-00001-of-00002.safetensors": {"a.embedding": rows, **{f"layers.{i}": rows // 8 for i in range(6)}},
        "model-00002-of-00002.safetensors": {f"layers.{i}": rows // 8 for i in range(6, 12)} | {"z.small": 4},
    }
    largest = max(write_tensors(folder / name, tensors) for name, tensors in shards.items())
    places = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    total = sum(2 * COLUMNS * count for tensors in shards.values() for count in tensors.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": places})
    )
    (folder / "config.json").write_text('{"model_type": "none"}')
    return largest, total


def forget(folder):
    """Ask the system to drop the cached pages of all files of a folder."""
    for path in folder.iterdir():
        sync(path)
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def first_byte_seen(target):
    """Whether a byte of a weights file of the growing folder is on disk."""
    tree = target.with_name(f".{target.name}.netweight-part") / "tree"
    try:
        return any(entry.stat().st_size > 0 for entry in os.scandir(tree) if "safetensors" in entry.name)
    except FileNotFoundError:
        return False


def run(command, watch=None):
    """Run a command; return its seconds, those that the system worked for it, its peak, and those to its first byte."""
    started, first = time.perf_counter(), None
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL)
    while watch is not None and first is None and process.returncode is None:
        if first_byte_seen(watch):
            first = time.perf_counter() - started
        time.sleep(0.001)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{command} failed")
    return time.perf_counter() - started, usage.ru_stime, usage.ru_maxrss * 1024, first


def measure_one(place, megabytes, runs, threads):
    """One tensor of a file: memory of every command above that of its libraries, and the system's time."""
    found = {}
    for label, rows in (("small", 4), ("large", megabytes * MB // (2 * COLUMNS))):
        source, net, back = (place / f"{label}-{name}.safetensors" for name in ("plain", "net", "back"))
        write_tensors(source, {"weight": rows})
        options = ["--threads", threads]
        commands = {
            "cp": ["sh", "-c", 'cp --reflink=never "$0" "$1" && sync "$1"', source, back],
            "compress": [*NETWEIGHT, "compress", source, net, "--overwrite", *options],
            "decompress": [*NETWEIGHT, "decompress", net, back, "--overwrite", *options],
            "verify": [*NETWEIGHT, "verify", net, *options],
            "verify --against": [*NETWEIGHT, "verify", net, "--against", source, *options],
            "inspect": [*NETWEIGHT, "inspect", net],
        }
        found[label] = {name: [run(command)[1:3] for _ in range(runs)] for name, command in commands.items()}
    copied = statistics.median(seconds for seconds, _ in found["large"]["cp"])
    result = {}
    for name, measured in found["large"].items():
        above = max(most for _, most in measured) - min(most for _, most in found["small"][name])
        spent = statistics.median(seconds for seconds, _ in measured)
        start = statistics.median(seconds for seconds, _ in found["small"][name])
        result[name] = {
            "peak_above_libraries_bytes": above,
            "memory_met": above <= 200 * MB,
            "system_s": round(spent, 3),
            "system_s_of_start": round(start, 3),
            "system_per_cp_without_start": round((spent - start) / copied, 2) if copied else None,
        }
    return {"one_tensor_bytes": megabytes * MB, "commands": result}


def get_first(folder, name):
    answer = subprocess.run(
        [sys.executable, "-c", STORE, str(folder), name], capture_output=True, text=True, check=True
    )
    return json.loads(answer.stdout)


def times(values, target=None):
    median = statistics.median(values)
    return {
        "median_s": round(median, 4),
        "all_s": [round(value, 4) for value in values],
        "target_s": target,
        "met": None if target is None else median <= target,
    }


def peak(values, target=None):
    highest = max(values)
    return {"peak_bytes": highest, "target_bytes": target, "met": None if target is None else highest <= target}


def measure(place, largest_mb, runs, threads):
    model, net, back = place / "model", place / "net", place / "back"
    largest, total = make_model(model, largest_mb)
    options = ["--threads", threads]
    bound = 3 * largest + 350 * MB
    memory, seconds = {}, {}
    for label, cold in (("warm", False), ("cold", True)):
        found = []
        for _ in range(runs):
            shutil.rmtree(net, ignore_errors=True)
            if cold:
                forget(model)
            found.append(run([*NETWEIGHT, "compress", model, net, *options], watch=net))
        seconds[f"compress, {label}, first byte"] = times([first for *_, first in found], 1.0)
        seconds[f"compress, {label}, everything"] = times([whole for whole, *_ in found])
        memory[f"compress, {label}"] = peak([most for *_, most, _ in found], bound)
    whole, _, most, _ = run([*NETWEIGHT, "decompress", net, back, *options])
    memory["decompress"], seconds["decompress, everything"] = peak([most]), times([whole])
    whole, _, most, _ = run([*NETWEIGHT, "verify", net, "--against", model, *options])
    memory["verify --against"], seconds["verify --against, everything"] = peak([most]), times([whole])
    torch_seconds, fill_seconds = [], []
    for kind, folder in (("plain", model), ("compressed", net)):
        for which, name in (("largest", "a.embedding"), ("small", "z.small")):
            for label, cold in (("warm", False), ("cold", True)):
                found = []
                for _ in range(runs):
                    if cold:
                        forget(folder)
                    found.append(get_first(folder, name))
                key = f"open_store(...).get, {kind}, {which} tensor, {label}"
                seconds[key] = times([one["get"] for one in found], 1.0)
                torch_seconds += [one["import torch"] for one in found]
                fill_seconds += [one["fill"] for one in found if which == "largest"]
    seconds["import torch, before any get"] = times(torch_seconds)
    seconds["fill fresh memory of the largest tensor's size"] = times(fill_seconds)
    stored = sum(path.stat().st_size for path in net.glob("*.safetensors"))
    sizes = {"largest_tensor_bytes": largest, "tensors_bytes": total, "compressed_bytes": stored}
    return {"model": sizes, "memory": memory, "seconds": seconds}


def main(
    *,
    largest: Annotated[int, "MB of the largest tensor"] = 256,
    one: Annotated[int | None, "MB of a file of one tensor, which is measured instead"] = None,
    runs: int = 5,
    jobs: Annotated[int, "threads of each command"] = 1,
):
    with tempfile.TemporaryDirectory() as place:
        if one is not None:
            return measure_one(Path(place), one, runs, jobs)
        return measure(Path(place), largest, runs, jobs)
