"""Daily work on folders of adapters and on large banks, on simulated files: time of the processor, and memory; as JSON.

    python -m netweight_experiments.benchmarks space.large_folders ingest --work FOLDER [--counts 250 1000 10000]
    python -m netweight_experiments.benchmarks space.large_folders dedupe --work FOLDER [--counts 2000]
    python -m netweight_experiments.benchmarks space.large_folders export --work FOLDER [--counts 2000 8000]

All take --output FILE; torch has one thread (--threads), and each export a process of its own.

ingest  kohya's files of rank 4 for 64 modules (192 tensors, some 65 kB), each with metadata of its own.
dedupe  the same, with near-doubles among them: for each of 4 in 100 a copy in another layout, one of another strength,
        one with noise (cosine .99), one cut at rank 3 of 4 with the rest small (cosine .99), and as a control one of
        cosine .90, which is none at .98.
export  banks of rank 1 for the queries and values of Stable Diffusion 1 (99,648 numbers each, fp32), one point of eight
        components whose weights are random, exported at rank 16. Of 4,000 adapters and more, later shards are links to
        the first ones under other names: what is read and summed is as much as of others.
"""

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
from safetensors.torch import load_file, save_file

from netweight import AdapterBank, write_adapter
from netweight.core.progress import QUIET
from netweight.methods.space.basis import Basis, Combinations
from netweight.methods.space.duplicates import find_duplicates
from netweight.nn.lora import Adapter, LowRank, combined
from netweight.store.bank.published import stable_diffusion_dimensions
from netweight.store.bank.shards import BankWriter, ShardRows, read_bank_record
from netweight.store.lora_formats.reading import read_adapter
from netweight.store.lora_formats.writing import export_adapter
from netweight_experiments.benchmarks.script import load, peak_bytes
from netweight_experiments.memory import in_fresh_process

BLOCKS = [
    f"{side}_blocks.{level}.attentions.{number}" for side in ("down", "up") for level in (0, 1) for number in (0, 1)
]
MODULES = [
    f"unet.{block}.transformer_blocks.0.attn{kind}.to_{part}" for block in BLOCKS for kind in (1, 2)
    for part in ("q", "k", "v", "out.0")
]  # fmt: skip
RANK, SIDE = 4, 32
DOUBLES = ("layout", "strength", "noise", "cut")
EVERY = 25  # one adapter in so many has doubles and a control


def drawn(generator):
    """An adapter whose fourth component is small, as trained ones fall off."""
    falling = torch.tensor([1.0, 0.7, 0.5, 0.1])[:, None]
    return Adapter({
        name: LowRank(
            falling * torch.randn(RANK, SIDE, generator=generator), torch.randn(SIDE, RANK, generator=generator)
        )
        for name in MODULES
    })  # fmt: skip


def mixed(adapter, cosine, generator):
    """An adapter of a cosine with another one, nearly: plus noise that is orthogonal to it but for chance."""
    noise = drawn(generator)
    tangent = (1 / cosine**2 - 1) ** 0.5
    return combined([adapter, noise.scaled(tangent * adapter.norm() / noise.norm())])


def fill(folder, count, *, doubles):
    """Files of adapters; returns the near-doubles by name, with what they are doubles of."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    generator, planted, number = torch.Generator().manual_seed(count), {}, 0
    while number < count:
        adapter = drawn(generator)
        names = [f"{number:06d}"]
        written = {names[0]: (adapter, "kohya")}
        if doubles and number % EVERY == 0:
            for kind in DOUBLES:
                planted[f"{number:06d}-{kind}"] = names[0]
            written |= {
                f"{number:06d}-layout": (adapter, "diffusers"),
                f"{number:06d}-strength": (adapter.scaled(0.1), "kohya"),
                f"{number:06d}-noise": (mixed(adapter, 0.99, generator), "kohya"),
                f"{number:06d}-cut": (adapter.truncated(RANK - 1).adapter, "diffusers"),
                f"{number:06d}-control": (mixed(adapter, 0.9, generator), "kohya"),
            }
        for name, (value, layout) in written.items():
            path = folder / f"{name}.safetensors"
            write_adapter(value, path, layout=layout)
            if layout == "kohya" and not doubles:
                retold(path, name)
            number += 1
    return planted


def retold(path, name):
    """Give a file metadata of its own, as trainers do."""
    said = {"ss_output_name": name, "ss_base_model_version": "sd_1.5", "ss_tag_frequency": json.dumps({"a": {name: 3}})}
    save_file({key: value.half() for key, value in load_file(path).items()}, path, said)


def ingest(folder, count):
    """Processor time of one ingest, in milliseconds a file."""
    fill(folder / "loras", count, doubles=False)
    shutil.rmtree(folder / "bank", ignore_errors=True)
    return measured(lambda: AdapterBank.ingest(folder / "loras", folder / "bank"), count)


def measured(work, count):
    started, wall = time.process_time(), time.perf_counter()
    work()
    spent, wall = time.process_time() - started, time.perf_counter() - wall
    each = 1e3 * spent / count
    return {"count": count, "processor_s": spent, "wall_s": wall, "ms_each": each, "peak_gb": peak_bytes() / 1e9}


def dedupe(folder, count):
    """Time of finding near-doubles, and which were found, missed and invented."""
    planted, kept = fill(folder / "loras", count, doubles=True), {}
    row = measured(lambda: kept.update(found=find_duplicates(folder / "loras", 0.98, QUIET)), count)
    found, bad = kept["found"]
    # Doubles of one adapter are doubles of each other: what counts is the family.
    right = {one.name for one in found if one.name[:6] == one.of[:6] and "control" not in one.name + one.of}
    families = {name[:6] for name in planted}
    missed = 4 * len(families) - len(right)
    return row | {"planted": len(planted), "found": len(right), "missed": missed,
                  "invented": len(found) - len(right), "unread": len(bad)}  # fmt: skip


def export(folder, count):
    """Peak memory of exporting a point of a simulated bank."""
    shapes = stable_diffusion_dimensions()
    modules = {}
    for name, shape in shapes.items():
        module, _, part = name.removeprefix("base_model.model.").rpartition(".lora_")
        modules.setdefault(f"unet.{module}", {})[part[0]] = shape
    shutil.rmtree(folder / "large", ignore_errors=True)
    generator = torch.Generator().manual_seed(0)
    names = sorted(modules)
    sizes = {name: (modules[name]["B"][0], modules[name]["A"][1]) for name in names}
    with BankWriter(folder / "large") as writer:
        for start in range(0, drawn := min(count, 4000), 500):
            n = min(500, drawn - start)
            down = {name: torch.randn(n, sizes[name][1], generator=generator) for name in names}
            up = {name: torch.randn(n, sizes[name][0], generator=generator) for name in names}
            rows = ShardRows(
                down, up, torch.ones(n, len(names), dtype=torch.float64), torch.ones(n, len(names), dtype=torch.int64)
            )
            contents = [f"simulated:{start + row}" for row in range(n)]
            writer.add_rows([f"model-{start + row:06d}" for row in range(n)], rows, sizes, contents=contents)
    del rows, down, up
    _linked(folder / "large", count)
    found = in_fresh_process(exported, [str(folder), count], threads=torch.get_num_threads())
    shutil.rmtree(folder / "large")
    return found


def _linked(bank, count):
    """Fill a bank up with links to its own shards, whose adapters have other names."""
    record = read_bank_record(bank)
    shards = list(record.shards)
    while sum(len(one.names) for one in shards) < count:
        one, copy = shards[len(shards) % len(record.shards)], len(shards)
        shards.append(replace(one, file=f"again-{copy}-{one.file}", names=tuple(f"{n}-{copy}" for n in one.names)))
        os.link(bank / one.file, bank / shards[-1].file)
    replace(record, shards=tuple(shards)).write(bank)


def exported(given):
    """Export a point, alone in its process."""
    folder, count = given
    bank = AdapterBank.open(Path(folder) / "large")
    weights = torch.randn(count, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64) / count**0.5
    basis = Basis(Combinations(bank, weights, torch.zeros(8), 1.0))
    before = peak_bytes() / 1e9
    row = measured(
        lambda: export_adapter(basis.factors(torch.ones(8)), Path(folder) / "point", rank=16, overwrite=True), count
    )
    assert len(read_adapter(Path(folder) / "point").factors) == len(bank.modules)
    return row | {"before_gb": before, "bank_gb": bank.nbytes / 1e9, "shards": bank.shards}


WORK = {"ingest": (ingest, (250, 1000, 10_000)), "dedupe": (dedupe, (2000,)), "export": (export, (2000, 8000))}


def main(job: Annotated[str, WORK], /, *, work: Path, counts: tuple[int, ...] = (), threads: int = 1):
    measure, usual = WORK[job]
    torch.set_num_threads(threads)
    rows = []
    for count in counts or usual:
        rows.append(measure(work, count) | {"load": load()})
        print(rows[-1], flush=True)
        yield {"rows": rows}  # the last may take long
