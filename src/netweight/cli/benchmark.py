"""`netweight benchmark`: speed and size against peers, measured on this machine."""

from __future__ import annotations

import datetime
import json
import shlex
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import click

from netweight.cli.output import Output, output_option

if TYPE_CHECKING:
    from netweight_experiments.benchmarks.codec import Result
    from netweight_experiments.benchmarks.codec_data import DataSet

    from netweight.report.finding import Finding

RESULTS = Path("benchmarks") / "results"
QUICK_WEIGHTS = 1 << 20
QUICK_REPEATS = 5


@click.group()
def benchmark() -> None:
    """Measure speed and size against peers on this machine."""


@benchmark.command()
@click.argument("files", nargs=-1, metavar="[FILE]...", type=click.Path(path_type=Path))
@click.option("--repeats", type=click.IntRange(min=1), help="Timed rounds.  [default: 15; 5 with --quick]")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the data drawn and of the order of runs.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Where the JSON goes.  [default: "
    "benchmarks/results/codec-DATE.json; nowhere with --quick]")  # fmt: skip
@click.option("--quick", is_flag=True, help="Little data and few rounds: shows that it runs; the times mean nothing.")
@output_option
def codec(
    files: tuple[Path, ...], repeats: int | None, seed: int, out: Path | None, quick: bool, output: Output
) -> None:
    """Measure the codec against zipnn, zstd, lz4, blosc2 and memcpy.

    Without FILE the model MiniLM as fp32, bf16 and fp16 and normally distributed bf16 weights are compressed; with
    .safetensors files, their tensors as they are. Everything runs in one process, round by round, and every ratio is
    taken within a round. Let nothing else run meanwhile.
    """
    from netweight_experiments.benchmarks.codec import run_benchmark, write_result

    from netweight.core.progress import Progress

    rounds = repeats or (QUICK_REPEATS if quick else 15)
    result = run_benchmark(
        _sets(files, quick, seed),
        repeats=rounds,
        seed=seed,
        command=shlex.join(["netweight", *sys.argv[1:]]),
        quick=quick,
        progress=Progress(every=5.0),
    )
    if out is None and not quick:
        out = _unused(RESULTS, f"codec-{datetime.datetime.now(datetime.UTC):%Y-%m-%d}")
    if out is not None:
        write_result(result, out)
    _show(result, output, standard=not files)
    if out is not None:
        output.line(f"\nWritten: {out}")
    output.result({**result.to_json(), "file": None if out is None else str(out)})


@benchmark.command()
@click.option("--clients", type=click.IntRange(min=1), default=20, show_default=True, help="Clients per round.")
@click.option("--images", type=click.IntRange(min=1), default=600, show_default=True, help="Images of each client.")
@click.option(
    "--repeats", type=click.IntRange(min=5), default=5, show_default=True, help="Timed rounds of each method."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the data and of the order of runs.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Where the JSON goes.  [default: "
    "benchmarks/results/federate-DATE.json; nowhere with --quick]")  # fmt: skip
@click.option("--quick", is_flag=True, help="Two clients with 50 images: shows that it runs; the times mean nothing.")
@output_option
def federate(clients: int, images: int, repeats: int, seed: int, out: Path | None, quick: bool, output: Output) -> None:
    """Measure rounds of federated methods, and the engine against dense training.

    Random images of Fashion-MNIST's size; one round of each method in turn, in one process, on one worker and on two.
    Every ratio is taken between rounds side by side. Let nothing else run meanwhile.
    """
    from dataclasses import asdict

    from netweight_experiments.benchmarks.federate import speed_findings, time_rounds
    from netweight_experiments.toys.random_federation import random_federation

    from netweight.core.environment import describe, usable_cores
    from netweight.core.progress import Progress
    from netweight.methods.federate import LocalTraining
    from netweight.report.report import write_text

    clients, images, training = (2, 50, LocalTraining(epochs=1)) if quick else (clients, images, LocalTraining())
    times = time_rounds(
        random_federation(clients, images, seed=seed),
        training,
        workers=(1, 2) if usable_cores() > 1 and not quick else (1,),
        repeats=repeats,
        seed=seed,
        progress=Progress(every=5.0),
    )
    findings = speed_findings(times, seed=seed, targets=not quick)
    if out is None and not quick:
        out = _unused(RESULTS, f"federate-{datetime.datetime.now(datetime.UTC):%Y-%m-%d}")
    result = {
        "benchmark": "federate",
        "command": shlex.join(["netweight", *sys.argv[1:]]),
        "quick": quick,
        "clients": clients,
        "images": images,
        "training": asdict(training),
        "seed": seed,
        "environment": describe(),
        "rounds": [{**asdict(one), **asdict(taken)} for one, taken in times.items()],
        "findings": [finding.to_json() for finding in findings],
    }
    if out is not None:
        write_text(out, json.dumps(result, indent=1) + "\n")
    headers = ["round of", "wall, s", "CPU, s"]
    output.table(headers, [
        (one.label, f"{median(taken.wall):.3g}", f"{median(taken.cpu):.3g}") for one, taken in times.items()
    ])  # fmt: skip
    output.line()
    headers = ["ratio", "target", "measured", "95 % interval", ""]
    output.table(headers, [_ratio_line(finding) for finding in findings])
    if quick:
        output.line("A trial run: the times mean nothing.", fg="yellow")
    if out is not None:
        output.line(f"\nWritten: {out}")
    output.result({**result, "file": None if out is None else str(out)})


@benchmark.command()
@click.option("--device", help="Where to measure, such as cuda:1.  [default: the GPU; the CPU with --trial]")
@click.option("--minutes", type=click.FloatRange(min=0), default=9.0, show_default=True, help="No run is begun later.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("reproductions") / "at-size",
    show_default=True,
    help="Keeps finished runs, so that the next call goes on, and the report.",
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Where the JSON goes.  [default: "
    "benchmarks/results/gpu-DATE.json; nowhere with --trial]")  # fmt: skip
@click.option("--trial", is_flag=True, help="Tiny models, on the CPU: shows that it runs; the numbers mean nothing.")
@output_option
def gpu(device: str | None, minutes: float, folder: Path, out: Path | None, trial: bool, output: Output) -> None:
    """Measure NeuZip's figure 4 and tables 1 and 3(a) on a GPU, at the paper's size.

    Models have the shapes of Llama-3 8B, GPT-Neo 2.7B and Llama-2 13B and random weights, which compress like trained
    ones. Beside netweight stand bf16, offloading, bitsandbytes and nvCOMP where they are installed.
    """
    from netweight.core.progress import Progress
    from netweight.report.report import write_text
    from netweight.report.text import format_number
    from netweight.reproduce.at_size_run import measure_at_size

    command = shlex.join(["netweight", *sys.argv[1:]])
    done = measure_at_size(
        folder, device=device, trial=trial, minutes=minutes, command=command, progress=Progress(every=5.0)
    )
    if out is None and not trial:
        out = _unused(RESULTS, f"gpu-{datetime.datetime.now(datetime.UTC):%Y-%m-%d}")
    result = {**done.to_json(), "command": command, "trial": trial}
    if out is not None:
        write_text(out, json.dumps(result, indent=1) + "\n")
    for table_id in done.tables:
        output.line(f"\n{table_id}, on {done.device}", bold=True)
        numbers = [one for one in done.comparisons(table_id) if one.measured is not None]
        output.table(["row", "column", "unit", "published", "measured"], [
            (one.row, one.column, one.unit, format_number(one.published), format_number(one.measured))
            for one in numbers
        ])  # fmt: skip
        for finding in done.tables[table_id].findings:
            mark = {True: "met", False: "MISSED", None: "reported"}[finding.passed]
            output.line(f"{mark}: {finding.name} = {format_number(finding.value)} {finding.unit}".rstrip())
    for run in done.left_out:
        output.line(f"No time was left for: {run}. Run it again to go on.", fg="yellow")
    if trial:
        output.line("A trial run: the numbers mean nothing.", fg="yellow")
    output.line(f"\nReport: {done.report}" + ("" if out is None else f". Written: {out}"))
    output.result({**result, "report": str(done.report), "file": None if out is None else str(out)})


def _ratio_line(finding: Finding) -> tuple[str, ...]:
    low, high = finding.ci95 or (float("nan"), float("nan"))
    target = "" if finding.target is None else f"{'≤' if finding.better == 'lower' else '≥'} {finding.target}"
    verdict = {True: "met", False: "MISSED", None: ""}[finding.passed]
    return finding.name, target, f"{finding.value:.3g}", f"{low:.3g} to {high:.3g}", verdict


def _sets(files: tuple[Path, ...], quick: bool, seed: int) -> list[DataSet]:
    """The data sets asked for; the model comes from the zoo."""
    from netweight_experiments.benchmarks import codec as targets
    from netweight_experiments.benchmarks import codec_data as data

    from netweight.toys import minilm

    if files:
        return data.of_files(files)
    most = QUICK_WEIGHTS if quick else None
    file = minilm.weights_file()
    sets = [data.model_as(file, targets.MINILM, dtype, most=most) for dtype in ("BF16", "F16", "F32")]
    small = [
        data.gaussian(seed=seed, count=most or 1 << 20, name=data.IN_CACHE, dtype=dtype) for dtype in ("BF16", "F32")
    ]
    return [*small, *sets, data.gaussian(seed=seed, count=most or 1 << 25)]


def _unused(folder: Path, name: str) -> Path:
    """A file name that is not taken: results are kept, not replaced."""
    candidates = (folder / f"{name}{suffix}.json" for suffix in ["", *(f"-{number}" for number in range(2, 1000))])
    return next(path for path in candidates if not path.exists())


def _show(result: Result, output: Output, *, standard: bool) -> None:
    from netweight_experiments.benchmarks.codec import speed_tables, target_table

    for table in speed_tables(result):
        output.line(f"\n{table.title}", bold=True)
        output.table(table.headers, table.lines, indent=2)
    if standard and not result.quick:
        output.line("\nTargets", bold=True)
        output.table(["", "target", "measured", "95 % interval", ""], target_table(result), indent=2)
    for name, cure in result.missing.items():
        output.line(f"Not installed: {name}. Run: {cure}")
    for text in result.left_out:
        output.line(f"Left out: {text}.")
    if result.quick:
        output.line("A trial run: the times mean nothing.", fg="yellow")
