"""Findings, table and figure of an audit of what the server of a federation observes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from netweight.core.progress import QUIET, Progress
from netweight.methods.federate.engine import TrainedFederation
from netweight.methods.federate.exposure import (
    MARGIN_COSINE,
    MARGIN_PSNR,
    MARGIN_TOKENS,
    AuditConfig,
    Exposure,
    audit,
    mean_of,
)
from netweight.metrics.intervals import ends_if_enough
from netweight.report.finding import Column, Figure, Finding, Section, Table
from netweight.report.plots import image_grid


def exposure_findings(exposures: Sequence[Exposure], *, seed: int) -> list[Finding]:
    """Return findings of each threat model; those of the run's own schedule have targets, the others are reported."""
    findings: list[Finding] = []
    for one in exposures:
        if not one.cosines:
            name = f"gradient recovered, {one.threat.label}"
            findings.append(Finding(name, None, unit="cosine", detail={"reason": one.why_no_images}))
            continue
        anyway, label = mean_of(one.aggregate), one.label
        detail = {"verdict": one.verdict[1], "movement": list(one.movements), "aggregate": list(one.aggregate)}
        target = round(anyway + MARGIN_COSINE, 4) if one.is_own else None
        name = f"gradient recovered, {label}"
        findings.append(mean_finding(name, one.cosines, "cosine", seed, target=target, baseline=anyway, detail=detail))
        if one.tokens:
            guess = mean_of(one.frequent)
            target = round(guess + MARGIN_TOKENS, 4) if one.is_own else None
            findings.append(
                mean_finding(f"tokens recovered, {label}", one.tokens, "", seed, target=target, baseline=guess)
            )
            continue
        if not one.psnr:
            reason = one.why_no_images or "no image was attacked"
            findings.append(Finding(f"PSNR, {label}", None, unit="dB", detail={"reason": reason}))
            continue
        target = round(one.guess + MARGIN_PSNR, 2) if one.is_own else None
        guesses = {
            "random images": list(one.random_psnr), "average images": list(one.average_psnr),
            "attacks": list(one.image_attacks), "best": list(one.best_attacks), "not searched": list(one.not_searched),
            "processor seconds": round(one.seconds, 1),
        }  # fmt: skip
        findings += [
            mean_finding(f"PSNR, {label}", one.psnr, "dB", seed, target=target, baseline=one.guess, detail=guesses),
            *([mean_finding(f"SSIM, {label}", one.ssim, "", seed)] if one.ssim else []),
        ]
    return findings


def mean_finding(
    name: str, values: Sequence[float], unit: str, seed: int, *, target: float | None = None,
    baseline: float | None = None, detail: Mapping[str, Any] | None = None,
) -> Finding:  # fmt: skip
    """Return the finding of a mean over clients, with an interval where there are enough of them."""
    return Finding(
        name, mean_of(values), ci95=ends_if_enough(values, seed=seed), n=len(values), unit=unit, better="lower",
        target=target, baseline=baseline, seeds=(seed,), detail={**(detail or {}), "values": list(values)},
    )  # fmt: skip


def exposure_table(exposures: Sequence[Exposure]) -> Table:
    """Return one row per threat model, with its verdict."""
    text = any(one.tokens for one in exposures)
    measures = (Column("tokens recovered", "", "lower"), Column("frequent tokens")) if text else (
        Column("PSNR", "dB", "lower"), Column("random image", "dB"), Column("average image", "dB"),
        Column("SSIM", "", "lower"),
    )  # fmt: skip
    cosines = (Column("gradient, cosine", "", "lower"), Column("published average, cosine"))
    columns = ("threat model", "calculation", *cosines, *measures, "verdict")
    rows = []
    for one in exposures:
        images = (one.psnr, one.random_psnr, one.average_psnr, one.ssim)
        measured = (one.cosines, one.aggregate, *((one.tokens, one.frequent) if text else images))
        rows.append(
            (one.label, one.attack, *(mean_of(values) if values else None for values in measured), one.verdict[1])
        )
    notes = ("The server knows the model, the settings and the initial state, and no label.",)
    return Table("Exposure to the server", columns, rows, notes)


def exposure_figure(exposures: Sequence[Exposure]) -> Figure | None:
    """Draw originals above reconstructions, threat model by threat model; None if there are none."""
    shown = [one for one in exposures if one.reconstructions]
    if not shown:
        return None
    rows, names = [], []
    for one in shown:
        for name, images in (("original", one.originals), (one.threat.label, one.reconstructions)):
            rows.append([image.permute(1, 2, 0).float() for image in images[:8]])
            names.append(name)
    return image_grid(
        rows, rows=names, columns=[str(index + 1) for index in range(len(rows[0]))],
        alt="Originals and what the server reconstructs from one client's update, by threat model.",
        caption="Each reconstruction is shown below the client's image that it resembles most.",
    )  # fmt: skip


def gradient_inversion(
    run: TrainedFederation, config: AuditConfig, *, seed: int, progress: Progress = QUIET
) -> Section:
    """Attack the run's updates under its own schedule and other threat models."""
    return exposure_section(audit(run, config, seed=seed, progress=progress), seed=seed)


def exposure_section(exposures: Sequence[Exposure], *, seed: int) -> Section:
    """Return what an audit found."""
    figure, own = exposure_figure(exposures), next(one for one in exposures if one.is_own)
    return Section(
        "Exposure to the server", exposure_findings(exposures, seed=seed), figures=[figure] if figure else [],
        tables=[exposure_table(exposures)], question="What could the server reconstruct?",
        conclusion=f"This run's schedule: {own.verdict[1]}", outcome=own.verdict[0],
        intro="One client's update is attacked as an honest but curious server would: it knows the model, the settings "
        "and what it sent, and no label. Findings about the schedule of this run have targets; shorter schedules are "
        "reported to show what protects and what does not.",
    )  # fmt: skip
