"""What one unit of the large jobs of docs/scale.md costs where no other benchmark says it: written to results/ as JSON.

    python -m netweight_experiments.benchmarks compress.scale_units

ledger      `Job.map` over runs that do nothing, in this process, each with a result of 2 kB, as an attack's is:
            seconds per run (making the digest, writing and syncing the record), bytes per record, and seconds to open
            the ledger and take all results from it.
bank        The record of a bank (`bank.json`) of so many adapters: bytes per adapter, seconds to write and to read it.
average     `federate.aggregate` of dense updates of a million fp32 numbers: seconds per update, and the largest
            resident size of a process that does nothing else, with 20 and with 100 updates.
checkpoint  A federation's checkpoint with two small private tensors per client: seconds, bytes.
sketch      Rows of 1,024 numbers per module from adapters of rank 1 on 64 modules of 640 × 640: seconds per adapter.
statistics  `ratio_of_times` of two groups, by the number of runs: seconds and the largest resident size.

Every part runs in a process of its own, once, with one thread; the load of the machine is written beside.
"""

import resource
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Annotated

from netweight_experiments.memory import in_fresh_process


def ledger(work, sizes):
    from netweight.core.engines import in_process
    from netweight.job import Job

    give = partial(
        same,
        {"curve": [{"step": step, "score": 0.123456789, "utility": None, "loss": 2.3456789} for step in range(26)]},
    )
    rows = []
    for count in sizes:
        name, items = f"ledger-{count}", [{"attack": number} for number in range(count)]
        with Job.open(work, shared=True) as job:
            first, again = (timed(all_of, partial(job.map, give, items, name=name, engine=in_process)) for _ in "12")
        size = (Path(work) / f"{name}.jsonl").stat().st_size
        rows.append({"runs": count, "s": first, "s per run": first / count, "bytes": size, "s to take up": again})
    return rows


def bank(work, sizes):
    from netweight.store.bank.shards import BankRecord, ShardRecord, read_bank_record

    rows = []
    for count in sizes:
        names = [f"people/person-{number:07d}" for number in range(count)]
        shards = tuple(
            ShardRecord(f"shard-{start // 1000:05d}.safetensors", 2**28, "0" * 32, tuple(names[start : start + 1000]),
                        tuple(f"{number:032x}" for number in range(start, min(start + 1000, count))),
                        tuple("204800-1763836800123456789" for _ in names[start : start + 1000]))
            for start in range(0, count, 1000)
        )  # fmt: skip
        record = BankRecord({f"block.{number}.to_q": (320, 320) for number in range(64)}, shards=shards)
        folder = Path(work) / f"bank-{count}"
        folder.mkdir()
        written, read = timed(record.write, folder), timed(read_bank_record, folder)
        size = (folder / "bank.json").stat().st_size
        rows.append({"adapters": count, "bytes": size, "s to write": written, "s to read": read})
    return rows


def average(work, sizes):
    import torch

    from netweight.methods.federate.updates import Update, aggregate

    rows = []
    for count in sizes:
        state = {"weights": torch.zeros(10**6)}
        updates = [Update(number, 600, {"weights": torch.randn(10**6)}) for number in range(count)]
        aggregate(state, updates[:2])
        seconds = timed(aggregate, state, updates)
        rows.append({"updates": count, "s per update": seconds / count, "peak bytes": peak()})
    return rows


def checkpoint(work, sizes):
    import torch

    from netweight.methods.federate.engine import Checkpoint

    rows = []
    for count in sizes:
        private = {number: {"embedding": torch.randn(64), "head": torch.randn(850)} for number in range(count)}
        file = Path(work) / f"checkpoint-{count}.safetensors"
        seconds = timed(Checkpoint({"weights": torch.randn(10**5)}, private, []).save, file, "settings")
        rows.append({"clients": count, "s": seconds, "bytes": file.stat().st_size})
    return rows


def statistics(work, sizes):
    from netweight.metrics.survival import Times, ratio_of_times

    rows = []
    for count in sizes:
        half = count // 2
        groups = [Times(tuple(float(10 * k + n % 97) for n in range(half)), (True,) * half) for k in (1, 2)]
        seconds = timed(partial(ratio_of_times, *groups, seed=0))
        rows.append({"runs": count, "s": seconds, "peak bytes": peak()})
    return rows


def sketch(work, sizes):
    import torch

    from netweight.methods.space.basis import Sketch
    from netweight.nn import Adapter, AdapterStack, LowRank

    modules = [f"block.{number}.to_q" for number in range(64)]
    one = Adapter({module: LowRank(torch.randn(1, 640), torch.randn(640, 1)) for module in modules})
    drawn = Sketch({module: (640, 640) for module in modules}, 32, 0)
    drawn.rows(AdapterStack.of([one]))
    rows = []
    for count in sizes:
        seconds = timed(drawn.rows, AdapterStack.of([one] * count))
        rows.append({"adapters": count, "s per adapter": seconds / count})
    return rows


PARTS = {
    "ledger": (ledger, (100, 10_000)),
    "bank": (bank, (10_000, 100_000, 1_000_000)),
    "average": (average, (20, 100)),
    "checkpoint": (checkpoint, (100, 10_000)),
    "sketch": (sketch, (100, 1_000)),
    "statistics": (statistics, (100, 1_000, 10_000)),
}


def same(value, item):
    return value


def all_of(make):
    return len(list(make()))


def timed(act, *arguments):
    start = time.perf_counter()
    act(*arguments)
    return round(time.perf_counter() - start, 6)


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(given):
    """One part, in a process of its own."""
    part, work, small = given
    act, sizes = PARTS[part]
    return act(work, sizes[:1] if small else sizes)


def main(
    *,
    work: Annotated[Path | None, "a folder on the disk to be measured; by default a temporary one"] = None,
    small: Annotated[bool, "the least sizes only, to see that it works"] = False,
):
    found = {}
    with tempfile.TemporaryDirectory(dir=work) as place:
        for part in PARTS:
            found[part] = in_fresh_process(measure, [part, place, small])
            print(part, found[part], flush=True)
            yield found
