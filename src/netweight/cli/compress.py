"""The commands compress, decompress, inspect and verify: arguments in, words or JSON out; the work is elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from netweight.cli import FINDING_FAILED, Output, card_option, output_option, write_card
from netweight.methods.compress.settings import CompressSettings
from netweight.settings import options

if TYPE_CHECKING:
    from netweight.methods.compress.folder import Summary
    from netweight.methods.compress.inspect import TensorReport
    from netweight.report.finding import Finding

_PATH = click.Path(path_type=Path)
_SHOWN = 20  # names written per failed finding


_threads = click.option(
    "--threads", type=click.IntRange(min=1), help=CompressSettings.model_fields["threads"].description
)
_base = click.option("--base", type=_PATH, metavar="BASE", help="What it holds differences from, if it lies elsewhere.")
_overwrite = click.option("--overwrite", is_flag=True, help="Replace DST if it exists.")


@click.command()
@click.argument("src")
@click.argument("dst", type=_PATH)
@options(CompressSettings)
@_overwrite
@card_option
@output_option
def compress(src: str, dst: Path, settings: CompressSettings, overwrite: bool, card: bool, output: Output) -> None:
    """Make a model's files smaller: bit for bit, or with --mantissa-bits rounded.

    SRC is a .safetensors file, the folder of a transformers or diffusers model, pipeline or adapter, or a model's id on
    the Hugging Face hub (owner/name). All other files are carried over. A run that was interrupted continues where it
    stopped when it is started again.
    """
    from netweight.errors import UsageError
    from netweight.methods.compress.folder import compress_folder

    source = _source(src, settings.exclude)
    if settings.base is not None:
        settings = settings.replace(base=_source(str(settings.base)))
    if card and source.is_file():
        raise UsageError("A single file has no card.", cure="Compress its folder, or leave --card out.")
    with _interruptible(source, dst, output):
        summary = compress_folder(source, dst, settings, overwrite=overwrite, progress=output.progress)
    if card:
        write_card(dst, output)
    _show(output, summary, f"{_size(summary.nbytes)} -> {_size(summary.stored_nbytes)}")
    for line in summary.notes():
        output.line(line, fg="yellow")
    if summary.rounded:
        output.line(
            f"Lossy: {summary.rounded} of {summary.tensors} tensors are rounded to "
            f"{_counted(settings.mantissa_bits, 'mantissa bit')}. {_changed(summary)} The others are kept bit for bit.",
            fg="yellow",
        )
    elif settings.mantissa_bits < 7:
        output.line("Nothing was rounded: no tensor of two dimensions and a dtype that can be.")


@click.command()
@click.argument("src")
@click.argument("dst", type=_PATH)
@_base
@_threads
@_overwrite
@output_option
def decompress(src: str, dst: Path, base: Path | None, threads: int | None, overwrite: bool, output: Output) -> None:
    """Restore the original files of a compressed model, byte for byte; all digests are checked.

    What was rounded when it was compressed stays rounded; that is said.

    SRC is a compressed .safetensors file or folder, or its id on the Hugging Face hub. A run that was interrupted
    continues where it stopped when it is started again.
    """
    from netweight.methods.compress.folder import decompress_folder

    source = _source(src)
    with _interruptible(source, dst, output):
        summary = decompress_folder(
            source, dst, base=base, threads=threads, overwrite=overwrite, progress=output.progress
        )
    _show(output, summary, f"{_size(summary.stored_nbytes)} -> {_size(summary.nbytes)}")
    if summary.rounded:
        output.line(
            f"These are not the original weights: {summary.rounded} of {summary.tensors} tensors were rounded before. "
            f"{_changed(summary)}",
            fg="yellow",
        )


@click.command()
@click.argument("path", type=_PATH)
@click.option("--against", type=_PATH, metavar="SRC", help="The original: compare every bit with it.")
@_base
@_threads
@output_option
@click.pass_context
def verify(
    context: click.Context, path: Path, against: Path | None, base: Path | None, threads: int | None, output: Output
) -> None:
    """Prove that a compressed model is intact, and identical to its original if that is given.

    Of rounded tensors it proves that they are intact, and that every weight is within its bound of the original.
    Exits with 1 if anything is damaged or differs.
    """
    from netweight.methods.compress.verify import verify as run_audit

    findings = run_audit(path, against, base=base, threads=threads, progress=output.progress)
    passed = all(finding.passed is not False for finding in findings)
    for finding in findings:
        word, color = {True: ("ok", "green"), False: ("FAILED", "red"), None: ("", None)}[finding.passed]
        value = finding.value if isinstance(finding.value, int) else f"{finding.value:.4f}"
        among = f" of {finding.detail['among']}" if finding.detail.get("among") is not None else ""
        among = _within(finding) if "bound" in finding.detail else among
        output.line(f"{word:7}{finding.name}: {value}{among}", fg=color)
        names = finding.detail.get("which", ())
        for name in names[:_SHOWN]:
            output.line(f"         {name}")
        if len(names) > _SHOWN:
            output.line("         ... --json names more")
    output.result({"path": str(path), "passed": passed, "findings": [finding.to_json() for finding in findings]})
    if not passed:
        context.exit(FINDING_FAILED)


@click.command()
@click.argument("path", type=_PATH)
@click.option("--tensor", metavar="PATTERN", help="Only tensors whose names match, e.g. '**.attention.**'.")
@click.option("--plot", type=_PATH, metavar="FILE", help="Draw the histograms of sign, exponent and mantissa here.")
@_base
@output_option
def inspect(path: Path, tensor: str | None, plot: Path | None, base: Path | None, output: Output) -> None:
    """Show what is in weight files, tensor by tensor.

    PATH is a .safetensors file or a folder, compressed or not. "stored bits" are the bits that the file spends on each
    weight. Entropies are in bits per weight, too; the shares of sign, exponent and mantissa are those of the total
    entropy. A tensor of few values shows less entropy than its kind has: no part can show more than log2(values) bits.
    """
    from netweight.methods.compress.inspect import inspect_tensors

    reports = list(inspect_tensors(path, tensor=tensor, base=base, progress=output.progress))
    files = {report.info.file for report in reports}
    headers = ["tensor", "dtype", "shape", "stored bits", "entropy", "sign", "exponent", "mantissa"]
    rows = [_row(report) for report in reports]
    if len(files) > 1:
        headers.append("file")
        rows = [[*row, report.info.file.relative_to(path)] for row, report in zip(rows, reports, strict=True)]
    if any(report.rounding for report in reports):
        headers += ["kept", "bound", "largest change"]
        rows = [[*row, *_rounding_of(report)] for row, report in zip(rows, reports, strict=True)]
    output.table(headers, rows)
    plain, stored = (sum(getattr(report.info, size) for report in reports) for size in ("nbytes", "stored_nbytes"))
    weights = sum(math.prod(report.info.shape) for report in reports)
    output.line(
        f"{len(reports)} tensors in {len(files)} {'file' if len(files) == 1 else 'files'}, {weights:,} weights: "
        f"{_size(plain)} of values in {_size(stored)} of file, {8 * stored / max(weights, 1):.2f} bits per weight"
    )
    if plot is not None:
        _plot(reports, path, plot)
        output.line(f"Histograms drawn in {plot}.")
    tensors = [report.to_json() for report in reports]
    output.result({"path": str(path), "nbytes": plain, "stored_nbytes": stored, "tensors": tensors})


def _source(src: str, exclude: tuple[str, ...] = ()) -> Path:
    """A path as it is; the id of a model on the hub as the folder it is fetched to, without the excluded files."""
    path = Path(src)
    if path.exists():
        return path
    from netweight.hf import fetch, is_hub_id

    return fetch(src, exclude=exclude) if is_hub_id(src) else path


@contextmanager
def _interruptible(source: Path, target: Path, output: Output) -> Iterator[None]:
    """Say after Ctrl-C what became of the work."""
    try:
        yield
    except KeyboardInterrupt:
        if source.is_dir():
            from netweight.core.files import part_of

            output.warn(f"The same command continues where this one stopped; to give up, remove {part_of(target)}.")
        else:
            output.warn("Nothing was written.")
        raise


def _show(output: Output, summary: Summary, sizes: str) -> None:
    rate = summary.nbytes / max(summary.seconds, 1e-9)
    output.line(
        f"{summary.target}: {summary.tensors} tensors, {sizes} (ratio {summary.ratio:.4f}), "
        f"{summary.seconds:.2f} s, {_size(rate)}/s"
    )
    if summary.resumed:
        output.line(f"{summary.resumed} files were done by an earlier, interrupted run.")
    for path in summary.left_out:
        output.line(f"Left out: {path}")
    paths = {"source": str(summary.source), "target": str(summary.target), "base": summary.base and str(summary.base)}
    values = {**vars(summary), **paths, "ratio": summary.ratio, "notes": summary.notes()}
    output.result(values)


def _size(nbytes: float) -> str:
    from tqdm import tqdm

    return tqdm.format_sizeof(nbytes, "B", 1000)


def _row(report: TensorReport) -> list[object]:
    info, bits = report.info, report.bits
    start = [info.name, info.dtype, "x".join(map(str, info.shape)) or "scalar", f"{report.stored_bits:.2f}"]
    if bits is None:
        return [*start, "-", "-", "-", "-"]
    shares = bits.shares
    parts = [f"{shares[part]:.1%}" for part in ("sign", "exponent", "mantissa")]
    return [*start, f"{bits.bits_per_weight:.2f}", *parts]


def _rounding_of(report: TensorReport) -> list[object]:
    """How many mantissa bits are kept, and what that changed."""
    found = report.rounding
    if found is None:
        return ["all bits", "-", "-"]
    block = f", blocks of {found.block_size}" if found.block_size else ""
    return [_counted(found.mantissa_bits or 0, "bit") + block, f"{found.bound:.4f}", f"{found.worst_change:.4f}"]


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _changed(summary: Summary) -> str:
    change = _beside_bound(summary.worst_change, summary.bound)
    return f"The largest change of a weight is {summary.worst_change:.4f} of itself, {change}."


def _within(finding: Finding) -> str:
    """What is said after the largest change of rounded weights."""
    detail = finding.detail
    how = "compared with the original" if detail["measured"] else "as recorded"
    change = _beside_bound(float(finding.value or 0), detail["bound"])
    return f" of a weight, {change} ({how}; {detail['rounded_tensors']} tensors are rounded)"


def _beside_bound(change: float, bound: float) -> str:
    return f"{'within' if change <= bound else 'beyond'} the bound of {bound:.4f}"


def _plot(reports: list[TensorReport], path: Path, plot: Path) -> None:
    """Draw one row of histograms per dtype, all its tensors taken together; integers only if there is nothing else."""
    from netweight.methods.compress.bits import merge
    from netweight.methods.compress.inspect import plot_bits

    known = [report.bits for report in reports if report.bits is not None and report.bits.count]
    known = [bits for bits in known if bits.layout.exponent] or known
    dtypes = dict.fromkeys(bits.dtype for bits in known)
    plot_bits({f"{path.name}, {dtype}": merge(bits for bits in known if bits.dtype == dtype) for dtype in dtypes}, plot)
