"""Commands `compress`, `decompress`, `inspect` and `verify`, and their output."""

from __future__ import annotations

import math
from pathlib import Path

from netweight.core import quantities
from netweight.methods.compress.compress_folder import Summary, compress_folder, decompress_folder
from netweight.methods.compress.inspect import TensorReport, inspect_tensors, plot_bits
from netweight.methods.compress.settings import CompressSettings, DecompressSettings, InspectSettings, VerifySettings
from netweight.methods.compress.verify import verify as compare
from netweight.registry import Context, PrintedTable, Result, shell_line
from netweight.report.finding import Finding, Section

_SHOWN = 20  # names written for each failed finding


def compress(settings: CompressSettings, context: Context, source: Path, destination: Path, overwrite: bool) -> Result:
    """Compress a file or folder, and say how much smaller it became."""
    summary = compress_folder(source, destination, settings, overwrite=overwrite, progress=context.progress)
    lines = _lines(summary, f"{quantities.size(summary.nbytes)} -> {quantities.size(summary.stored_nbytes)}")
    warnings = list(summary.notes())
    if summary.rounded:
        warnings.append(
            f"Lossy: {summary.rounded} of {summary.tensors} tensors are rounded to "
            f"{quantities.many(settings.mantissa_bits, 'mantissa bit')}. {_changed(summary)} "
            "The others are kept bit for bit."
        )
    elif settings.mantissa_bits < 7:
        lines.append("Nothing was rounded: no tensor has two dimensions and a dtype that can be rounded.")
    return Result(
        lines, payload=_payload(summary), written=(destination,), warnings=warnings,
        next=(shell_line("netweight", "verify", destination, "--against", source),),
    )  # fmt: skip


def decompress(
    settings: DecompressSettings, context: Context, source: Path, destination: Path, overwrite: bool
) -> Result:
    """Restore the original files of a compressed model."""
    summary = decompress_folder(
        source, destination, base=settings.base, threads=settings.threads, overwrite=overwrite,
        progress=context.progress,
    )  # fmt: skip
    warnings = []
    if summary.rounded:
        warnings.append(
            f"These are not the original weights: {summary.rounded} of {summary.tensors} tensors were rounded when the "
            f"model was compressed. {_changed(summary)}"
        )
    lines = _lines(summary, f"{quantities.size(summary.stored_nbytes)} -> {quantities.size(summary.nbytes)}")
    return Result(lines, payload=_payload(summary), written=(destination,), warnings=warnings)


def verify(settings: VerifySettings, context: Context, path: Path) -> Result:
    """Compare a compressed model with its digests and, if it is given, with its original."""
    findings = compare(
        path, settings.against, base=settings.base, threads=settings.threads, progress=context.progress
    )  # fmt: skip
    lines: list[str | PrintedTable] = []
    for finding in findings:
        word = {True: "met", False: "MISSED", None: ""}[finding.passed]
        value = finding.value if isinstance(finding.value, int) else f"{finding.value:.4f}"
        among = f" of {finding.detail['among']}" if finding.detail.get("among") is not None else ""
        among = _within(finding) if "bound" in finding.detail else among
        lines.append(f"{word:7}{finding.name}: {value}{among}")
        names = finding.detail.get("which", ())
        lines += [f"         {name}" for name in names[:_SHOWN]]
        if len(names) > _SHOWN:
            lines.append("         … (all are in the output of --json)")
    passed = all(finding.passed is not False for finding in findings)
    return Result(lines, [Section("Identity", findings)], payload={"path": str(path), "passed": passed}, shown=True)


def inspect(settings: InspectSettings, context: Context, path: Path) -> Result:
    """List the tensors in weight files, with their size and entropy."""
    reports = list(inspect_tensors(path, tensor=settings.tensor, base=settings.base, progress=context.progress))
    files = {report.info.file for report in reports}
    headers = ["tensor", "dtype", "shape", "stored bits", "entropy", "sign", "exponent", "mantissa"]
    rows = [_row(report) for report in reports]
    if len(files) > 1:
        headers.append("file")
        rows = [[*row, report.info.file.relative_to(path)] for row, report in zip(rows, reports, strict=True)]
    if any(report.rounding for report in reports):
        headers += ["kept", "bound", "largest change"]
        rows = [[*row, *_rounding_of(report)] for row, report in zip(rows, reports, strict=True)]
    plain, stored = (sum(getattr(report.info, size) for report in reports) for size in ("nbytes", "stored_nbytes"))
    weights = sum(math.prod(report.info.shape) for report in reports)
    lines: list[str | PrintedTable] = [
        PrintedTable(headers, rows),
        f"{len(reports)} tensors in {quantities.many(len(files), 'file')}, {weights:,} weights: "
        f"{quantities.size(plain)} of values in {quantities.size(stored)} of file, "
        f"{8 * stored / max(weights, 1):.2f} bits per weight",
    ]
    written: tuple[Path, ...] = ()
    if settings.plot is not None:
        _plot(reports, path, settings.plot)
        written = (settings.plot,)
    tensors = [report.to_json() for report in reports]
    payload = {"path": str(path), "nbytes": plain, "stored_nbytes": stored, "tensors": tensors}
    return Result(lines, payload=payload, written=written)


def _lines(summary: Summary, sizes: str) -> list[str | PrintedTable]:
    rate = summary.nbytes / max(summary.seconds, 1e-9)
    lines: list[str | PrintedTable] = [
        f"{summary.target}: {summary.tensors} tensors, {sizes} (ratio {summary.ratio:.4f}), "
        f"{summary.seconds:.2f} s, {quantities.size(rate)}/s"
    ]
    return lines + [f"Left out: {path}" for path in summary.left_out]


def _payload(summary: Summary) -> dict[str, object]:
    paths = {"source": str(summary.source), "target": str(summary.target), "base": summary.base and str(summary.base)}
    return {**vars(summary), **paths, "ratio": summary.ratio, "notes": summary.notes()}


def _row(report: TensorReport) -> list[object]:
    info, bits = report.info, report.bits
    start = [info.name, info.dtype, "x".join(map(str, info.shape)) or "scalar", f"{report.stored_bits:.2f}"]
    if bits is None:
        return [*start, "-", "-", "-", "-"]
    shares = bits.shares
    parts = [f"{shares[part]:.1%}" for part in ("sign", "exponent", "mantissa")]
    return [*start, f"{bits.bits_per_weight:.2f}", *parts]


def _rounding_of(report: TensorReport) -> list[object]:
    """Return the kept mantissa bits and the changes by rounding."""
    rounding = report.rounding
    if rounding is None:
        return ["all bits", "-", "-"]
    block = f", blocks of {rounding.block_size}" if rounding.block_size else ""
    return [
        quantities.many(rounding.mantissa_bits or 0, "bit") + block,
        f"{rounding.bound:.4f}",
        f"{rounding.worst_change:.4f}",
    ]


def _changed(summary: Summary) -> str:
    change = _beside_bound(summary.worst_change, summary.bound)
    return f"The largest change of a weight is {summary.worst_change:.4f} of itself, {change}."


def _within(finding: Finding) -> str:
    """Return the sentence about the largest change of rounded weights."""
    detail = finding.detail
    how = "compared with the original" if detail["measured"] else "as recorded"
    change = _beside_bound(float(finding.value or 0), detail["bound"])
    return f" of a weight, {change} ({how}; {detail['rounded_tensors']} tensors are rounded)"


def _beside_bound(change: float, bound: float) -> str:
    return f"{'within' if change <= bound else 'beyond'} the bound of {bound:.4f}"


def _plot(reports: list[TensorReport], path: Path, plot: Path) -> None:
    """Draw one row of histograms per dtype, all its tensors taken together; integers only if there is nothing else."""
    from netweight.methods.compress.bits import merge

    statistics = [report.bits for report in reports if report.bits is not None and report.bits.count]
    statistics = [bits for bits in statistics if bits.layout.exponent] or statistics
    dtypes = dict.fromkeys(bits.dtype for bits in statistics)
    plot_bits(
        {f"{path.name}, {dtype}": merge(bits for bits in statistics if bits.dtype == dtype) for dtype in dtypes}, plot
    )
