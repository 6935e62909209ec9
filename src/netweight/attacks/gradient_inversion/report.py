"""Results of an attack beside the true images if they are known: findings, PNG files and a report page."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from netweight.attacks.gradient_inversion.client import Reconstruction
from netweight.errors import UsageError
from netweight.metrics.images import image_findings, match_images, write_png
from netweight.report.finding import Figure, Finding, Section
from netweight.report.plots import image_grid, lines
from netweight.report.report import make_folder
from netweight.report.text import Conclusion, HasValue, Words

# Images in the picture of a report; all are written as files.
_SHOWN = 12


def in_order(images: Tensor, reference: Tensor) -> Tensor:
    """Return the order in which reconstructed images lie beside the true ones."""
    return torch.zeros(1, dtype=torch.int64) if len(images) == 1 else match_images(_grayed(images), reference)


def findings_of(
    reconstruction: Reconstruction,
    images: Tensor,
    reference: Tensor | None = None,
    *,
    max_psnr: float | None = None,
    backbone: str | os.PathLike[str] | None = None,
    heads: Path | None = None,
    seed: int,
) -> list[Finding]:
    """Return what an attack reached, as findings."""
    if reference is None and max_psnr is not None:
        raise UsageError("A limit on PSNR needs the true images.", cure="Give the reference.")
    ends = list(reconstruction.objectives_by_restart)
    detail = {"restarts": ends, "steps": reconstruction.steps, "attack": reconstruction.attack}
    findings = [Finding("objective at the end", reconstruction.objective, better="lower", seeds=(seed,), detail=detail)]
    if reference is None:
        return findings
    missing = int(images.isnan().flatten(1).any(1).sum())
    if missing:
        findings.append(Finding("images not reconstructed", missing, n=len(images), better="lower"))
    measured = image_findings(_grayed(images), reference, backbone=backbone, heads=heads, seed=seed)
    # The limit is set by the defender, for whom a lower PSNR is better.
    if max_psnr is not None:
        measured[0] = replace(measured[0], better="lower", target=max_psnr)
    return findings + measured


def write_images(folder: Path, images: Tensor) -> None:
    """Write reconstructed images `(n, c, h, w)` as PNG files, `image-0.png` and so on."""
    make_folder(folder)
    for number, image in enumerate(images):
        write_png(folder / f"image-{number}.png", image)


def inversion_section(
    reconstruction: Reconstruction, images: Tensor, reference: Tensor | None, findings: list[Finding]
) -> Section:
    """Return what an attack reconstructed as a section of a report."""
    measured = {finding.name: finding.value or 0.0 for finding in findings}
    facts = {"db": f"{measured.get('PSNR', 0.0):.1f}", "alike": f"{measured.get('SSIM', 0.0):.2f}"}
    return Section(
        "Reconstruction from the update", findings, figures=_figures(reconstruction, images, reference),
        question="Can the private images be reconstructed from what the client sent?",
        conclusion=_CONCLUSION(findings, **facts)[1],
        intro="A better value means a better attack, unless a limit was set. PSNR and SSIM compare with the "
        "true images.",
    )  # fmt: skip


def _words(psnr: bool, ssim: bool, *, db: str, alike: str) -> Words:
    if not psnr:
        return "told", "Images were reconstructed; without the true images their similarity cannot be measured."
    return "told", f"The reconstruction has a PSNR of {db} dB{f' and an SSIM of {alike}' if ssim else ''}."


_CONCLUSION = Conclusion("attack: gradient inversion", [HasValue("PSNR"), HasValue("SSIM")], _words)


def _figures(reconstruction: Reconstruction, images: Tensor, reference: Tensor | None) -> list[Figure]:
    batches = {"found": images} if reference is None else {"true": reference, "found": images}
    shown = min(len(images), _SHOWN)
    below = "" if reference is None else ", below the true ones"
    grid = image_grid(
        [[_pixels(image) for image in batch[:shown]] for batch in batches.values()], rows=list(batches),
        columns=[str(number) for number in range(shown)], caption=f"Attack: {reconstruction.attack}.",
        alt=f"{shown} of {len(images)} images that the attack {reconstruction.attack} found{below}",
    )  # fmt: skip
    if not reconstruction.history:
        return [grid]
    every = [
        reconstruction.steps * point / (len(reconstruction.history) - 1) for point in range(len(reconstruction.history))
    ]
    curve = lines(
        {"objective": (every, reconstruction.history)}, xlabel="steps", ylabel="objective",
        alt=f"The objective went from {reconstruction.history[0]:.3g} to {reconstruction.history[-1]:.3g}",
        log="y" if min(reconstruction.history) > 0 else "",
    )  # fmt: skip
    return [grid, curve]


def _grayed(images: Tensor) -> Tensor:
    lost = images.isnan().flatten(1).any(1).reshape(-1, 1, 1, 1)
    return torch.where(lost, torch.full_like(images, 0.5), images)


def _pixels(image: Tensor) -> object:
    """An image as matplotlib has it: `(h, w, c)` in numpy."""
    return image.detach().cpu().nan_to_num(0.5).permute(1, 2, 0).numpy()
