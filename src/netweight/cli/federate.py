"""`netweight federate`: train across clients, and ask what the server could have seen."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netweight.cli.output import Output, output_option
from netweight.core.progress import Progress

if TYPE_CHECKING:
    from netweight.methods.federate import Run

__all__ = ["federate"]


@click.group()
def federate() -> None:
    """Train a personalized model across clients, and audit what a server could see of their data."""


@federate.command("run")
@click.option("--data", default="digits", show_default=True, help="A data set by name, or a folder of images.")
@click.option("--method", default="hyperfl", show_default=True, help="How clients train; see --help of the docs.")
@click.option("--clients", default=20, show_default=True, help="Number of clients.")
@click.option("--rounds", default=20, show_default=True, help="Number of rounds.")
@click.option("--fraction", default=1.0, show_default=True, help="Share of clients asked in each round.")
@click.option(
    "--partition",
    type=click.Choice(["dominant-groups", "dirichlet", "by-writer"]),
    default="dominant-groups",
    show_default=True,
    help="How data is split among clients.",
)
@click.option("--alpha", default=0.5, show_default=True, help="Concentration of the Dirichlet partition.")
@click.option("--epochs", default=5, show_default=True, help="Local epochs per round.")
@click.option("--batch-size", default=50, show_default=True, help="Examples per local step.")
@click.option("--lr", default=0.02, show_default=True, help="Learning rate of what is shared.")
@click.option("--epsilon", default=4.0, show_default=True, help="Budget of differentially private methods, all rounds.")
@click.option("--delta", default=1e-5, show_default=True, help="Its delta.")
@click.option(
    "--drop-out", default=0.0, show_default=True, help="Share of clients lost from each round, to rehearse it."
)
@click.option("--min-clients", default=1, show_default=True, help="A round with fewer sound updates is tried again.")
@click.option("--evaluate-every", default=1, show_default=True, help="Rounds between measurements of accuracy.")
@click.option("--model", help='Your own network, "module:factory": (channels, size, classes) to (body, head).')
@click.option("--seed", default=520, show_default=True, help="Seed of everything but the split of the data.")
@click.option("--workers", type=int, help="Threads; by default one per core.")
@click.option("--device", default="cpu", show_default=True, help="Where to train: cpu or cuda.")
@click.option("--audit/--no-audit", default=True, show_default=True, help="Attack what was trained at the end.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("federation"),
    show_default=True,
    help="Folder for the checkpoint and the report; a run that was stopped goes on from there.",
)
@output_option
def run_command(out: Path, workers: int | None, device: str, audit: bool, output: Output, **settings: Any) -> None:
    """Train a federation in this process and audit it.

    Nothing is downloaded for the default data, scikit-learn's handwritten digits. The same command resumes a run that
    was stopped. For clients on other machines see docs/flower.md: the same methods run under Flower.
    """
    from netweight.methods.federate import train
    from netweight.zoo.federation import FederationPlan

    plan = FederationPlan(**settings)
    task = plan.task()
    method = plan.make_method(task)
    done = train(task, method, plan.settings(), folder=out, workers=workers, device=device, progress=Progress())
    plan.save(out)
    _show_rounds(output, done)
