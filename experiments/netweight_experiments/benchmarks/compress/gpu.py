"""Everything that is measured on a GPU, in ten minutes, the most important first; every result is written as it comes.

    make bench-gpu MODEL=FOLDER
    python -m netweight_experiments.benchmarks compress.gpu --model FOLDER --output RESULT.json

FOLDER is a language model of transformers, dense or compressed, or the parts that `compress.model_parts` makes of one;
without it the measurements on a real model are skipped. The same command goes on where an earlier one stopped: what is
in the result file is kept, and what was skipped or failed there is tried again. `--dry-run` runs everything at tiny
sizes, on a CPU too, and shows that it works; its numbers mean nothing.

Measurements run in a process of their own. One that crashes or takes longer than its limit is recorded as failed, and
the next one begins in a new process. Peers (bitsandbytes, DFloat11, nvCOMP) are measured where they are installed, and
skipped with the reason elsewhere.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from netweight.errors import MissingExtra, Unsupported, UsageError
from netweight_experiments.benchmarks.compress.gpu_cells import (
    BATCHES,
    Visit,
    codec_rates,
    damaged_blob,
    many_rows,
    memory_ends,
    random_inference,
    random_training,
    real_generation,
    real_loading,
    trained_in_every_way,
    unsupported_card,
)

PUBLISHED = {
    "ZipServ": "ASPLOS 2026; lossless fixed-length codes with a fused product; not on a package index",
    "Turbo-Lossless": "12 bits a weight, fused decoding and products up to batch 256; not on a package index",
    "DFloat11": "kernels are measured in `codec` where dfloat11, dahuffman and cupy are installed",
}
"""Peers that are compared by what they publish, or in part."""


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    name: str
    """Its name in the result file."""
    target: str
    """What it is to show, in words."""
    limit: float
    """Seconds after which it counts as failed."""
    measure: Callable[[Visit], dict[str, Any]]
    """The measurement."""


def cells_of(visit: Visit) -> list[Cell]:
    """Return the measurements of a visit, the most important first.

    Args:
        visit: Decides the batches; on a dry run there are two.
    """
    random = "speed over bf16: fixed-length >= 1.0 at batch 1, >= 0.95 at 32; codec >= 0.33 at 1, >= 0.8 at 32"
    training = "peak <= 15.2 GiB, speed >= 0.85 of LOMO's, the same losses"
    return [
        *(
            Cell(f"real model, generation, batch {batch}", "tokens equal; tokens a second beside bf16 and peers", 90,
                 partial(real_generation, batch=batch))
            for batch in (visit.batches[:1] if visit.dry_run else BATCHES)
        ),
        Cell("real model, training", "losses equal to LOMO's to the last bit", 90, trained_in_every_way),
        Cell("random 8B, fixed-length", f"{random}; 24 % saved; window >= 0.95", 120,
             partial(random_inference, way="fixed")),
        Cell("random 8B, codec", f"{random}; 32 % saved; window >= 0.95", 120, partial(random_inference, way="codec")),
        Cell("products of many rows", "fixed-length >= dense at 64 and 256 rows", 60, many_rows),
        Cell("bad input, damaged weight", "named, others as they were", 30, damaged_blob),
        Cell("bad input, memory ends", "named, weights as they were", 30, memory_ends),
        Cell("bad input, unsupported card", "reason named, outputs right", 30, unsupported_card),
        Cell("codec, decode and encode", "decode >= 1,200 GB/s, encode >= 400 GB/s", 60, codec_rates),
        Cell("random 8B, training, LOMO", training, 90, partial(random_training, way="LOMO")),
        Cell("random 8B, training, fixed-length", training, 90, partial(random_training, way="fixed")),
        Cell("random 8B, training, codec", training, 90, partial(random_training, way="codec")),
        Cell("real model, loading", "the default form is the fixed-length one", 60, real_loading),
        Cell("random 8B, NF4", "a peer, lossy", 90, partial(random_inference, way="NF4")),
        Cell("random 8B, INT8", "a peer, lossy", 90, partial(random_inference, way="INT8")),
        Cell("tests", "all pass", 150, _tests),
    ]  # fmt: skip


def _tests(visit: Visit) -> dict[str, Any]:
    """Run the tests that need a GPU, from the root of the source tree."""
    folder = Path("tests") / "unit"
    files = sorted(str(path) for path in (*folder.glob("test_*_on_a_gpu.py"), *folder.glob("test_fixed_on_gpu.py")))
    if not files or visit.dry_run:
        raise Unsupported("a dry run" if visit.dry_run else "not in the root of the source tree")
    command = [sys.executable, "-m", "pytest", "-q", "-x", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return {"exit code": done.returncode, "last line": (done.stdout.strip().splitlines() or [""])[-1]}


def main(
    *,
    output: Path,
    model: Annotated[str | None, "folder of a language model, or of its parts"] = None,
    device: Annotated[str | None, "such as cuda:0; the GPU, or the CPU on a dry run, by default"] = None,
    minutes: Annotated[float, "after which no measurement begins"] = 10.0,
    only: Annotated[tuple[str, ...], "words in the names of measurements, all by default"] = (),
    dry_run: Annotated[bool, "tiny sizes, on the CPU too; the numbers mean nothing"] = False,
) -> Iterator[dict[str, Any]]:
    """Measure what the result file lacks, and yield everything after each measurement."""
    import torch

    name = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    visit = Visit(name, dry_run, model)
    if visit.place.type == "cpu" and not dry_run:
        raise UsageError("torch finds no GPU on this machine.", cure="Run it on one; or add --dry-run to try it out.")
    about = {"card": _card(visit), "driver": _driver(visit), "dry_run": dry_run}
    before = json.loads(output.read_text(encoding="utf-8")) if output.is_file() else {}
    if before and {key: before.get(key) for key in about} != about:
        raise UsageError(f"{output} is of another card, driver or kind of run.", cure="Give another file: --output.")
    results: dict[str, Any] = dict(before.get("cells", {}))
    wanted = [cell for cell in cells_of(visit) if not only or any(word in cell.name for word in only)]
    todo = [cell.name for cell in wanted if "numbers" not in results.get(cell.name, {})]
    limits = {cell.name: cell.limit for cell in wanted}
    for cell, outcome in _in_processes(visit, todo, limits, time.monotonic() + 60 * minutes):
        results[cell] = {"target": next(each.target for each in wanted if each.name == cell), **outcome}
        print(cell, json.dumps(outcome, ensure_ascii=False, default=str)[:500], flush=True)
        yield {**about, "peers by their publications": PUBLISHED, "cells": results, "ratios": _ratios(results)}
    if not todo:
        yield {**about, "peers by their publications": PUBLISHED, "cells": results, "ratios": _ratios(results)}


def _ratios(results: Mapping[str, Any]) -> dict[str, float]:
    """Speeds of training over LOMO's, which other cells measured."""
    seconds = {
        name: cell["numbers"]["seconds a step"]
        for name, cell in results.items()
        if name.startswith("random 8B, training") and "numbers" in cell
    }
    lomo = seconds.pop("random 8B, training, LOMO", None)
    return {} if lomo is None else {f"{name}: speed / LOMO": lomo / own for name, own in seconds.items()}


def _in_processes(
    visit: Visit, names: Sequence[str], limits: Mapping[str, float], until: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run cells one after the other in a process; where it dies or hangs, go on in a new one."""
    context = multiprocessing.get_context("spawn")
    waiting = list(names)
    while waiting:
        if time.monotonic() > until:
            yield from ((name, {"skipped": "no time was left; run the same command again"}) for name in waiting)
            return
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(visit, waiting, theirs), daemon=False)
        process.start()
        theirs.close()
        try:
            while waiting and time.monotonic() <= until:
                started = time.monotonic()
                try:
                    outcome = ours.recv() if ours.poll(limits[waiting[0]]) else None
                except EOFError:
                    process.join()
                    outcome = {"failed": f"the process ended with {process.exitcode}"}
                late = outcome is None
                outcome = {"failed": f"not done in {limits[waiting[0]]:.0f} s"} if outcome is None else outcome
                yield waiting.pop(0), {**outcome, "seconds": round(time.monotonic() - started, 1)}
                if late or not process.is_alive():
                    break
        finally:
            process.kill()
            process.join()


def _work(visit: Visit, names: Sequence[str], results: Any) -> None:
    """Measure cells in this process and send each result."""
    import torch

    torch.set_num_threads(1 if visit.dry_run else torch.get_num_threads())
    cells = {cell.name: cell for cell in cells_of(visit)}
    for name in names:
        outcome: dict[str, Any]
        try:
            outcome = {"numbers": cells[name].measure(visit)}
        except (Unsupported, MissingExtra) as error:
            outcome = {"skipped": error.reason}
        except Exception as error:  # the other measurements are made all the same
            outcome = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
        results.send(outcome)
        if visit.place.type == "cuda" and "failed" in outcome:
            return  # a device that reported an error reports it again; the next one begins in a new process


def _card(visit: Visit) -> str:
    import torch

    return torch.cuda.get_device_name(visit.place) if visit.place.type == "cuda" else "CPU"


def _driver(visit: Visit) -> str | None:
    """NVIDIA's driver, as the kernel names it."""
    place = Path("/proc/driver/nvidia/version")
    on_gpu = visit.place.type == "cuda" and place.is_file()
    return place.read_text(encoding="utf-8").splitlines()[0] if on_gpu else None
