"""`netweight reproduce` and `netweight benchmark`: the papers' tables measured again, and speed and size measured.

The command `netweight` finds these two here, by name, where this package is installed.
"""

from __future__ import annotations

import datetime
import shlex
import sys
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import click

from netweight.cli import FINDING_FAILED, Output, output_option
from netweight.report.verdict import mark_of
from netweight_experiments.benchmarks.script import RESULTS, about, scripts, write
from netweight_experiments.benchmarks.script import run as run_script

if TYPE_CHECKING:
    from collections.abc import Callable

    from netweight.report.finding import Finding
    from netweight_experiments.benchmarks.compress.codec import Result
    from netweight_experiments.benchmarks.compress.codec_data import DataSet
    from netweight_experiments.tables.compare import Item, Reproduction

F = TypeVar("F", bound="Callable[..., Any]")
QUICK_WEIGHTS = 1 << 20
QUICK_REPEATS = 5


@click.command()
@click.argument("table", required=False)
@click.option("--list", "list_all", is_flag=True, help="Show what can be measured, with its state.")
@click.option(
    "--scale",
    type=click.Choice(["small", "paper"]),
    default="small",
    show_default=True,
    help="small: minutes on a laptop, often on a stand-in; paper: the paper's size.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("reproductions"),
    show_default=True,
    help="Folder for results; each table gets its own in it.",
)
@click.option("--model", help="A .safetensors file or model folder, for the tables that can use one.")
@click.option(
    "--judge", metavar="MODULE:FUNCTION", help="Your judge, texts to numbers, for the tables that can use one."
)
@click.option("--only", metavar="PATTERN", help="Measure only these rows, for the tables that run row by row.")
@click.option("--overwrite", is_flag=True, help="Measure again although a result is there.")
@output_option
@click.pass_context
def reproduce(
    context: click.Context,
    /,
    table: str | None,
    list_all: bool,
    scale: Any,
    out: Path,
    overwrite: bool,
    output: Output,
    **options: Any,
) -> None:
    """Measure TABLE again and lay it beside what was published.

    A finished result in the output folder is reused. Ends with exit code 1 when a finding failed.
    """
    from netweight_experiments.tables.compare import run_table

    if list_all or table is None:
        if table is not None or not list_all:
            raise click.UsageError("Name one table, or ask for --list.", context)
        _list(output)
        return
    words = ["netweight", "reproduce", table, "--scale", scale]
    for name in ("model", "judge", "only"):
        words += [f"--{name}", str(options[name])] if options[name] else []
    result = run_table(table, scale=scale, out=out, overwrite=overwrite, options=options, command=shlex.join(words))
    _show_table(result, output)
    output.result(result.to_json())
    if any(mark_of(finding) in ("missed", "control failed") for finding in result.measured.findings):
        context.exit(FINDING_FAILED)


def _list(output: Output) -> None:
    from netweight_experiments.tables.compare import PAPERS, items

    everything = items()
    for paper in PAPERS.values():
        output.line(paper, bold=True)
        rows = [(item.id, item.state, _summary(item)) for item in everything if item.paper == paper]
        output.table([], rows, indent=2)
        output.line()
    counts = {state: sum(item.state == state for item in everything) for state in {item.state for item in everything}}
    output.line("; ".join(f"{count} {state}" for state, count in sorted(counts.items())) + ".")
    output.line("A small stand-in is measured by: netweight reproduce ID")
    keys = ("id", "paper", "title", "state", "reason", "numbers", "command")
    output.result({"tables": [{key: getattr(item, key) for key in keys} for item in everything]})


def _summary(item: Item) -> str:
    """What it shows, what is missing, and the command for where it is not."""
    if not item.reason:
        return item.title
    return f"{item.title} ({item.reason}{': ' + item.command if item.command else ''})"


def _show_table(result: Reproduction, output: Output) -> None:
    from netweight.report.text import format_number

    numbers = result.published
    where = f"{numbers.table}, {numbers.title}" if numbers else "no published numbers"
    output.line(f"{result.id} ({result.scale}): {where}", bold=True)
    headers = ["row", "column", "unit", result.published_name, "measured", "difference"]
    output.table(headers, [
        (c.row, c.column, c.unit, *(format_number(value) for value in (c.published, c.measured, c.difference)))
        for c in result.comparisons
    ])  # fmt: skip
    for sentence in result.measured.differs:
        output.line(f"Differs: {sentence}")
    output.findings(result.measured.findings)
    output.line(f"{'Reused' if result.reused else 'Written'}: {result.folder / 'report.html'}")


class Benchmarks(click.Group):
    """The benchmarks that are commands, and those that are scripts, by the names of their modules."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, or one that hands its arguments to a script."""
        command = super().get_command(ctx, cmd_name)
        if command is not None or cmd_name not in scripts():
            return command
        return click.Command(
            cmd_name, callback=partial(run_script, cmd_name), add_help_option=False,
            params=[click.Argument(["words"], nargs=-1, type=click.UNPROCESSED)],
            context_settings={"ignore_unknown_options": True},
        )  # fmt: skip

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the scripts."""
        with formatter.section("Scripts, each with options of its own (--help)"):
            formatter.write_dl(list(scripts().items()))


@click.group(cls=Benchmarks)
def benchmark() -> None:
    """Measure speed and size on this machine, in comparison with other programs."""


def _out_option(name: str, unless: str) -> Callable[[F], F]:
    return click.option(
        "--out",
        type=click.Path(path_type=Path, dir_okay=False),
        help=f"Where the JSON goes.  [default: benchmarks/results/{name}-DATE.json; nowhere with {unless}]",
    )


def _dated(out: Path | None, name: str, trial: bool) -> Path | None:
    """The file named, or one of today's that is not taken: results are kept, not replaced. None for trials."""
    if out is not None or trial:
        return out
    stem = f"{name}-{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    candidates = (RESULTS / f"{stem}{suffix}.json" for suffix in ["", *(f"-{number}" for number in range(2, 1000))])
    return next(path for path in candidates if not path.exists())


@benchmark.command()
@click.argument("files", nargs=-1, metavar="[FILE]...", type=click.Path(path_type=Path))
@click.option("--repeats", type=click.IntRange(min=1), help="Timed rounds.  [default: 15; 5 with --quick]")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the data drawn and of the order of runs.")
@_out_option("codec", "--quick")
@click.option("--quick", is_flag=True, help="Little data and few rounds: shows that it runs; the times mean nothing.")
@output_option
def codec(
    files: tuple[Path, ...], repeats: int | None, seed: int, out: Path | None, quick: bool, output: Output
) -> None:
    """Measure the codec against zipnn, zstd, lz4, blosc2 and memcpy.

    Without FILE the model MiniLM as fp32, bf16, fp16 and fp8 and normally distributed bf16 weights are compressed; with
    .safetensors files, their tensors as they are. Everything runs in one process, round by round, and every ratio is
    taken within a round. Let nothing else run meanwhile.
    """
    from netweight.core.progress import Progress
    from netweight_experiments.benchmarks.compress.codec import run_benchmark, write_result

    result = run_benchmark(
        _sets(files, quick, seed),
        repeats=repeats or (QUICK_REPEATS if quick else 15),
        seed=seed,
        command=shlex.join(["netweight", *sys.argv[1:]]),
        quick=quick,
        progress=Progress(every=5.0),
    )
    file = _dated(out, "codec", quick)
    if file is not None:
        write_result(result, file)
    _show_codec(result, output, standard=not files)
    _end(output, result.to_json(), file)


def _end(output: Output, result: dict[str, Any], file: Path | None) -> None:
    if file is not None:
        output.line(f"\nWritten: {file}")
    output.result({**result, "file": None if file is None else str(file)})


def _sets(files: tuple[Path, ...], quick: bool, seed: int) -> list[DataSet]:
    """The data sets asked for; without files, MiniLM and drawn weights."""
    from netweight.toys import minilm
    from netweight_experiments.benchmarks.compress import codec as targets
    from netweight_experiments.benchmarks.compress import codec_data as data

    if files:
        return data.of_files(files)
    most = QUICK_WEIGHTS if quick else None
    file = minilm.weights_file()
    sets = [
        data.model_as(file, targets.MINILM, dtype, most=most) for dtype in ("BF16", "F16", "F32", "F8_E4M3", "F8_E5M2")
    ]
    small = [
        data.gaussian(seed=seed, count=most or 1 << 20, name=data.IN_CACHE, dtype=dtype) for dtype in ("BF16", "F32")
    ]
    return [*small, *sets, data.gaussian(seed=seed, count=most or 1 << 25)]


def _show_codec(result: Result, output: Output, *, standard: bool) -> None:
    from netweight_experiments.benchmarks.compress.codec import speed_tables, target_table

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


@benchmark.command()
@click.option("--clients", type=click.IntRange(min=1), default=20, show_default=True, help="Clients per round.")
@click.option("--images", type=click.IntRange(min=1), default=600, show_default=True, help="Images of each client.")
@click.option(
    "--repeats", type=click.IntRange(min=5), default=5, show_default=True, help="Timed rounds of each method."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the data and of the order of runs.")
@_out_option("federate", "--quick")
@click.option("--quick", is_flag=True, help="Two clients with 50 images: shows that it runs; the times mean nothing.")
@output_option
def federate(clients: int, images: int, repeats: int, seed: int, out: Path | None, quick: bool, output: Output) -> None:
    """Measure rounds of federated methods, and the engine against dense training.

    Random images of Fashion-MNIST's size; one round of each method in turn, in one process, on one worker and on two.
    Every ratio is taken between rounds side by side. Let nothing else run meanwhile.
    """
    from dataclasses import asdict

    from netweight.core.environment import describe
    from netweight.core.progress import Progress
    from netweight.core.threads import usable_cores
    from netweight.methods.federate import LocalTraining
    from netweight_experiments.federated_rounds import random_federation, speed_findings, time_rounds

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
    result = {
        "benchmark": "federate",
        "command": shlex.join(["netweight", *sys.argv[1:]]),
        "quick": quick,
        "clients": clients,
        "images": images,
        "training": training.to_json(),
        "seed": seed,
        "environment": describe(),
        "rounds": [{**asdict(one), **asdict(taken)} for one, taken in times.items()],
        "findings": [finding.to_json() for finding in findings],
    }
    file = _dated(out, "federate", quick)
    write(file, result)
    headers = ["round of", "wall, s", "CPU, s"]
    output.table(headers, [
        (one.label, f"{median(taken.wall):.3g}", f"{median(taken.cpu):.3g}") for one, taken in times.items()
    ])  # fmt: skip
    output.line()
    headers = ["ratio", "target", "measured", "95 % interval", ""]
    output.table(headers, [_ratio_line(finding) for finding in findings])
    if quick:
        output.line("A trial run: the times mean nothing.", fg="yellow")
    _end(output, result, file)


def _ratio_line(finding: Finding) -> tuple[str, ...]:
    low, high = finding.ci95 or (float("nan"), float("nan"))
    target = "" if finding.target is None else f"{'≤' if finding.better == 'lower' else '≥'} {finding.target}"
    verdict = "" if finding.target is None else mark_of(finding)
    return finding.name, target, f"{finding.value:.3g}", f"{low:.3g} to {high:.3g}", verdict


@benchmark.command()
@click.option("--layers", type=click.IntRange(min=1), default=7, show_default=True, help="Layers of the Llama trained.")
@click.option("--batch", type=click.IntRange(min=1), default=8, show_default=True, help="Sequences per step.")
@click.option("--length", type=click.IntRange(min=2), default=256, show_default=True, help="Tokens per sequence.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Timed steps of each way.")
@_out_option("training-memory", "--trial")
@click.option("--trial", is_flag=True, help="One layer, few tokens: shows that it runs; the numbers mean nothing.")
@output_option
def memory(layers: int, batch: int, length: int, rounds: int, out: Path | None, trial: bool, output: Output) -> None:
    """Measure memory and speed of training: plain, checkpointed, layer by layer and compressed, by SGD and AdamW.

    A Llama of random bf16 weights is trained on the CPU, on one thread. Each row states the bytes of tensors counted,
    the bytes resident and the steps per second of one way, all against one baseline. Let nothing else run meanwhile.
    """
    import torch

    from netweight_experiments.benchmarks.compress import models

    torch.set_num_threads(1)
    size: dict[str, Any] = {"layers": layers, "batch": batch, "length": length, "rounds": rounds}
    size |= {"layers": 1, "batch": 1, "length": 16, "rounds": 1} if trial else {}
    measured = models.main(**size, parts=("memory", "training"))
    result = about("training-memory", str(models.__doc__), size) | measured
    write(_dated(out, "training-memory", trial), result)
    output.table(["way", "baseline", "counted", "resident", "steps/s", "counted / baseline", "resident / baseline",
                  "speed / baseline"], [
        (row["way"], row["baseline"], row["counted"], row["resident"], row["steps per second"],
         row["counted / baseline"]["value"], row["resident / baseline"], row["speed / baseline"]["median"])
        for row in result["rows"]
    ])  # fmt: skip
    output.result(result)


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
@_out_option("gpu", "--trial")
@click.option("--trial", is_flag=True, help="Tiny models, on the CPU: shows that it runs; the numbers mean nothing.")
@output_option
def gpu(device: str | None, minutes: float, folder: Path, out: Path | None, trial: bool, output: Output) -> None:
    """Measure NeuZip's figure 4 and tables 1 and 3(a) on a GPU, at the paper's size.

    Models have the shapes of Llama-3 8B, GPT-Neo 2.7B and Llama-2 13B and random weights, which compress like trained
    ones. Beside netweight stand bf16, offloading, bitsandbytes and nvCOMP where they are installed.
    """
    from netweight.core.progress import Progress
    from netweight.report.text import format_number
    from netweight_experiments.tables.neuzip.paper_scale import measure_at_size

    command = shlex.join(["netweight", *sys.argv[1:]])
    done = measure_at_size(
        folder, device=device, trial=trial, minutes=minutes, command=command, progress=Progress(every=5.0)
    )
    result = {**done.to_json(), "command": command, "trial": trial}
    file = _dated(out, "gpu", trial)
    write(file, result)
    for table_id in done.tables:
        output.line(f"\n{table_id}, on {done.device}", bold=True)
        numbers = [one for one in done.comparisons(table_id) if one.measured is not None]
        output.table(["row", "column", "unit", "published", "measured"], [
            (one.row, one.column, one.unit, format_number(one.published), format_number(one.measured))
            for one in numbers
        ])  # fmt: skip
        output.findings(done.tables[table_id].findings)
    for run in done.left_out:
        output.line(f"No time was left for: {run}. Run it again to go on.", fg="yellow")
    if trial:
        output.line("A trial run: the numbers mean nothing.", fg="yellow")
    output.line(f"\nReport: {done.report}" + ("" if file is None else f". Written: {file}"))
    output.result({**result, "report": str(done.report), "file": None if file is None else str(file)})
