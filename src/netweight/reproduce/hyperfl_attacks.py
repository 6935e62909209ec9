"""HyperFL's tables 3 and 5: IG and ROG on what clients send, and the analytic attack that the paper did not try."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, final

from netweight.errors import UsageError
from netweight.report.finding import Column, Finding
from netweight.reproduce.inversion_run import AttackRun, attack_all
from netweight.reproduce.registry import Measured, Row, Scale, table
from netweight.reproduce.resumed import chosen, finished

__all__ = ["DATA", "IG", "ROG", "TAILORED", "Line", "attacked", "measured", "runs_of", "table3", "table5"]

DATA = {"emnist-letters": "EMNIST", "cifar10": "CIFAR-10", "digits": "digits"}
_SMALL_STEPS = {"ig": 150, "rog": 100, "tailored": 20, "analytic": 3}
_IMAGES = {"small": 2, "paper": 16}


@final
@dataclass(frozen=True)
class Line:
    """A row of a table, or of a figure.

    Attributes:
        title: Its name.
        method: The attacked method.
        attack: The attack.
    """

    title: str
    method: str
    attack: str


_ANALYTIC = Line("HyperFL, analytic attack", "hyperfl", "analytic")
IG = (
    Line("FedAvg", "fedavg", "ig"),
    Line("pFedHN", "pfedhn", "ig"),
    Line("pFedHN-PC", "pfedhn-pc", "ig"),
    Line("DP-FedAvg", "dp-fedavg", "ig"),
    Line("CENTAUR", "centaur", "ig"),
    Line("PPSGD", "ppsgd", "ig"),
    Line("HyperFL", "hyperfl", "ig"),
    _ANALYTIC,
)
"""Rows of table 3 and figure 5."""
ROG = (Line("FedAvg", "fedavg", "rog"), Line("HyperFL", "hyperfl", "rog"))
"""Rows of table 5 and figure 6."""
TAILORED = (Line("HyperFL, tailored attack", "hyperfl", "tailored"), _ANALYTIC)
"""Rows of figure 7."""
_TARGETS = {
    ("FedAvg", "psnr"): 30.0,
    ("FedAvg", "ssim"): 0.88,
    (_ANALYTIC.title, "psnr"): 20.0,
    (_ANALYTIC.title, "ssim"): 0.8,
}
_COSINE = 0.999


def runs_of(lines: Sequence[Line], scale: Scale) -> list[AttackRun]:
    """Return the attacks of a table or figure, image by image.

    Args:
        lines: Its rows.
        scale: "small" takes 2 images and few steps, EMNIST letters or scikit-learn's digits; "paper" 16 of each set.
    """
    data = ["emnist-letters", "cifar10"] if scale == "paper" else [_at_hand()]
    return [
        AttackRun(name, line.method, line.attack, image, _SMALL_STEPS[line.attack] if scale == "small" else None)
        for name in data
        for image in range(_IMAGES[scale])
        for line in lines
    ]


def _at_hand() -> str:
    root = os.environ.get("NETWEIGHT_DATA")
    return "emnist-letters" if root and (Path(root) / "emnist_letters").is_dir() else "digits"


def attacked(
    lines: Sequence[Line], scale: Scale, out: Path, only: str | None = None
) -> dict[AttackRun, dict[str, Any]]:
    """Run what is not yet run and return all that is finished, image by image.

    Tables and figures share their runs, in a folder beside theirs.

    Args:
        lines: Rows.
        scale: "small" or "paper".
        out: The folder of the table or figure.
        only: A pattern of the runs' names; the others are taken only if they are finished.

    Raises:
        UsageError: The pattern fits nothing, or nothing is finished.
        NetweightError: A run failed.
    """
    runs, folder = runs_of(lines, scale), out.parent / f"hyperfl-attacks-{scale}"
    attack_all(chosen(runs, only), folder)
    known = finished(folder, AttackRun)
    found = {run: known[run] for run in runs if run in known}
    if not found:
        raise UsageError("No attack of the table is finished.", cure="Leave --only out, or give another pattern.")
    return found


@table("hyperfl-table3", needs=("evidence", "dp"), paper_needs=("EMNIST letters, CIFAR-10, hours",), stand_in=True)
def table3(scale: Scale, out: Path, *, only: str | None = None) -> Measured:
    """Attack one client's first update under seven methods by IG, and HyperFL's analytically.

    Args:
        scale: "small" attacks 2 images by few steps; "paper" 16 of each data set by all steps.
        out: Attacks are kept in a folder beside it, which figures 5 and 7 share.
        only: Run only attacks whose name, `DATA-METHOD-ATTACK-IMAGE`, fits this pattern, or none with "none".

    Raises:
        UsageError: The pattern fits no run, or nothing is finished.
        NetweightError: A run failed.
    """
    return measured(attacked(IG, scale, out, only), IG, scale)


@table("hyperfl-table5", needs=("evidence",), paper_needs=("EMNIST letters and CIFAR-10",), stand_in=True)
def table5(scale: Scale, out: Path, *, only: str | None = None) -> Measured:
    """Attack one client's first update under FedAvg and HyperFL by ROG's first stage.

    Args:
        scale: "small" attacks 2 images; "paper" 16 of each data set.
        out: Attacks are kept in a folder beside it, which figure 6 shares.
        only: Run only attacks whose name, `DATA-METHOD-ATTACK-IMAGE`, fits this pattern, or none with "none".

    Raises:
        UsageError: The pattern fits no run, or nothing is finished.
        NetweightError: A run failed.
    """
    return measured(attacked(ROG, scale, out, only), ROG, scale)


def measured(found: Mapping[AttackRun, Mapping[str, Any]], lines: Sequence[Line], scale: Scale) -> Measured:
    """Return means over images as rows, intervals and targets as findings.

    Args:
        found: Attacks.
        lines: Rows of the table.
        scale: Targets hold at "paper" alone, but for what is exact at any.
    """
    names = [name for name in DATA if any(run.data == name for run in found)]
    columns = [
        column
        for name in names
        for column in (
            Column(f"{DATA[name]} PSNR", "dB", "lower"),
            Column(f"{DATA[name]} SSIM", "score", "lower"),
            Column(f"{DATA[name]} LPIPS", "score", "higher"),
        )
    ]
    rows, findings = [], []
    for line in lines:
        values: list[float | None] = []
        for name in names:
            one = [
                v for run, v in found.items() if (run.data, run.method, run.attack) == (name, line.method, line.attack)
            ]
            values += [_mean(one, "psnr"), _mean(one, "ssim"), None]
            findings += _findings(one, line, name, scale)
        rows.append(Row(line.title, tuple(values)))
    return Measured(tuple(columns), tuple(rows), differs=_differs(lines, names, scale), findings=tuple(findings),
                    notes=_notes(lines, found))  # fmt: skip


def _mean(values: Sequence[Mapping[str, Any]], metric: str) -> float | None:
    return mean(value[metric] for value in values) if values else None


def _findings(values: Sequence[Mapping[str, Any]], line: Line, data: str, scale: Scale) -> list[Finding]:
    """Return PSNR and SSIM with intervals over images, and the recovered gradient's cosine; the attacker's view."""
    found = []
    for metric, unit in (("cosine", ""), ("psnr", "dB"), ("ssim", "")):
        each = [value[metric] for value in values if value[metric] is not None]
        if each:
            wanted = line.attack in ("ig", "analytic") and data == "emnist-letters" and scale == "paper"
            target = _COSINE if metric == "cosine" else _TARGETS.get((line.title, metric)) if wanted else None
            label = {"cosine": "cosine of the recovered gradient", "psnr": "PSNR", "ssim": "SSIM"}[metric]
            found.append(
                Finding(
                    f"{label}, {line.title}, {DATA[data]}",
                    mean(each),
                    ci95=_interval(each),
                    n=len(each),
                    unit=unit,
                    better="higher",
                    target=target,
                    seeds=tuple(range(len(each))),
                    detail={"each": each, "attack": values[0]["attack"]},
                )
            )
    return found


def _interval(values: Sequence[float]) -> tuple[float, float] | None:
    from netweight.metrics.intervals import MINIMUM_FOR_BOOTSTRAP, bootstrap, t_interval

    if len(values) < 2:
        return None
    return (bootstrap(values, seed=0) if len(values) >= MINIMUM_FOR_BOOTSTRAP else t_interval(values)).ci95


def _differs(lines: Sequence[Line], names: Sequence[str], scale: Scale) -> tuple[str, ...]:
    sentences = [
        "One image, one step from the initial state, label known to the server: the paper states none of these."
    ]
    if scale == "small":
        sentences.append("A miniature: 2 images, and few steps of each attack.")
    if "emnist-letters" in names:
        sentences.append("EMNIST letters stand in for EMNIST byclass.")
    if "cifar10" in names:
        sentences.append("CIFAR-10 comes as JPEG pictures, a stand-in for the lossless ones.")
    if "digits" in names:
        sentences.append("scikit-learn's digits stand in for EMNIST, as NETWEIGHT_DATA holds no EMNIST letters.")
    if any(line.attack == "rog" for line in lines):
        sentences.append("ROG without post-processing: its second stage is a trained network that is not at hand.")
    if any(line.attack == "tailored" for line in lines):
        sentences.append("The tailored attack is a reconstruction of the idea; the paper does not say how it works.")
    return tuple(sentences)


def _notes(lines: Sequence[Line], found: Mapping[AttackRun, Mapping[str, Any]]) -> tuple[str, ...]:
    notes = [
        f"Means over {len({run.image for run in found})} images of each data set, each with an untrained network of its"
        " own. LPIPS is not measured: its backbone is not part of this library.",
    ]
    attacks = {line.attack for line in lines}
    if attacks & {"ig", "rog"}:
        notes.append(
            "HyperFL: embedding and classifier are guessed, and the update of the hypernetwork's heads is matched,"
            " which is what the paper must have done."
        )
    if "analytic" in attacks:
        notes.append(
            "HyperFL, analytic attack: the same update, whose biases give the gradient away; no label, embedding or"
            " classifier is used. Not in the paper, and it refutes its claim for one step."
        )
    if any(line.method in ("dp-fedavg", "centaur", "ppsgd") for line in lines):
        notes.append(
            "Private methods have the noise of ε = 4, δ = 1e-5 over 200 rounds of 5 epochs with batches of 50."
        )
    if any(line.method in ("pfedhn-pc", "centaur", "ppsgd") for line in lines):
        notes.append(
            "A head that stays with the client is taken to be the initial one, as every client begins with it;"
            " CENTAUR's own phase of the head is left out, which favors the attacker."
        )
    return tuple(notes)
