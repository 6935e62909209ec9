"""HyperFL's figures 5, 6 and 7: images that the attacks of tables 3 and 5, and the tailored attack, reconstruct."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from netweight.report.finding import Figure
from netweight.reproduce.hyperfl_attacks import DATA, IG, ROG, TAILORED, Line, attacked, measured
from netweight.reproduce.inversion_run import AttackRun
from netweight.reproduce.kept_pictures import picture
from netweight.reproduce.registry import Measured, Scale, table

__all__ = ["figure5", "figure6", "figure7"]

_SHOWN = 8
_SHAPES = {"emnist-letters": (1, 28, 28), "cifar10": (3, 32, 32), "digits": (1, 28, 28)}


@table("hyperfl-fig5", needs=("evidence", "dp"), paper_needs=("EMNIST letters, CIFAR-10, hours",), stand_in=True)
def figure5(scale: Scale, out: Path) -> Measured:
    """Draw what IG makes of one client's update under seven methods, and the analytic attack of HyperFL's.

    Args:
        scale: As of table 3.
        out: The attacks are table 3's, in a folder beside it.
    """
    return _drawn(IG, scale, out, "IG")


@table("hyperfl-fig6", needs=("evidence",), paper_needs=("EMNIST letters and CIFAR-10",), stand_in=True)
def figure6(scale: Scale, out: Path) -> Measured:
    """Draw what ROG's first stage makes of one client's update under FedAvg and HyperFL.

    Args:
        scale: As of table 5.
        out: The attacks are table 5's, in a folder beside it.
    """
    return _drawn(ROG, scale, out, "ROG without post-processing")


@table("hyperfl-fig7", needs=("evidence",), paper_needs=("EMNIST letters, CIFAR-10, hours",), stand_in=True)
def figure7(scale: Scale, out: Path) -> Measured:
    """Draw what the tailored attack makes of one client's update under HyperFL, and what the analytic one does.

    Args:
        scale: "small" attacks 2 images by few steps; "paper" 16 of each data set.
        out: The attacks lie in a folder beside it; the analytic ones are table 3's.
    """
    return _drawn(TAILORED, scale, out, "the tailored attack")


def _drawn(lines: Sequence[Line], scale: Scale, out: Path, attack: str) -> Measured:
    found = attacked(lines, scale, out)
    names = [name for name in DATA if any(run.data == name for run in found)]
    return dataclasses.replace(
        measured(found, lines, scale), figures=tuple(_grid(found, lines, name, attack) for name in names)
    )


def _grid(found: Mapping[AttackRun, Mapping[str, Any]], lines: Sequence[Line], data: str, attack: str) -> Figure:
    from netweight.report.plots import image_grid

    here = {(run.image, run.method, run.attack): value for run, value in found.items() if run.data == data}
    shown = sorted({image for image, _, _ in here})[:_SHOWN]
    shape = _SHAPES[data]
    truth = [picture(here[image, lines[0].method, lines[0].attack]["truth"], shape) for image in shown]
    made = [[picture(here[image, line.method, line.attack]["made"], shape) for image in shown] for line in lines]
    return image_grid(
        [truth, *made],
        rows=["original", *(line.title.replace(", ", ",\n") for line in lines)],
        columns=[str(image + 1) for image in shown],
        alt=f"Test images of {DATA[data]} above what {attack} reconstructs from one client's update, method by method.",
        caption=f"{DATA[data]}: images and their reconstructions by {attack}.",
    )
