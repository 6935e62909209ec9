"""`netweight space fit`: the principal components of a bank of adapters; and what `space info` says of a space."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netweight.cli.output import Output, output_option
from netweight.cli.paths import FOLDER, NEW
from netweight.core.progress import QUIET, Progress

if TYPE_CHECKING:
    from netweight.methods.space.fit import Accuracy


@click.command()
@click.argument("bank", type=FOLDER)
@click.argument("space", type=NEW)
@click.option("--components", type=click.IntRange(1), help="How many; as many as there are, at most 1,000, by default.")
@click.option("--representation", type=click.Choice(["delta", "shared-down", "factors"]), default="delta",
              show_default=True, help="Changes, up factors over a shared down factor, or raw numbers.")  # fmt: skip
@click.option("--solver", type=click.Choice(["auto", "dual", "streaming"]), default="auto", show_default=True,
              help="Exactly from inner products, or by passes over the bank; by number of adapters.")  # fmt: skip
@click.option("--standardize/--no-standardize", default=True, help="Of factors: divide by standard deviations first.")
@click.option("--halves/--no-halves", default=True, help="Fit two halves, too, to see what comes back.")
@click.option("--sketch", type=click.IntRange(1), help="Side of the sketch of a module's change; 32 by default.")
@click.option("--passes", type=click.IntRange(1), help="Of streaming iteration at most; 6 by default.")
@click.option("--tolerance", type=click.FloatRange(0), help="Least growth of a pass worth another; 0.002 by default.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of everything random.")
@click.option("--work", type=NEW, help="Where to keep what was done, to go on after a kill and to fit a grown bank.")
@click.option("--processes", type=click.IntRange(2), help="That share the work; needs --work.")
@click.option("--standalone", is_flag=True, help="Copy the adapters into SPACE, so that it opens without BANK.")
@output_option
def fit(
    bank: Path, space: Path, work: Path | None, processes: int | None, standalone: bool, output: Output, **settings: Any
) -> None:
    """Find the principal components of the adapters in BANK and write them to SPACE, a new folder.

    The default, --representation delta, looks at what adapters change, however their factors are written. SPACE holds
    every adapter's scores; how good the fit is, and what of it would come back from other adapters, is printed and kept
    in SPACE/space.json.
    """
    from netweight.core.engines import local_processes
    from netweight.core.files import refuse_existing
    from netweight.methods.space.space import WeightSpace
    from netweight.store.bank.bank import AdapterBank

    refuse_existing(space, overwrite=None)
    engine = None if processes is None else functools.partial(local_processes, workers=processes)
    fitted = WeightSpace.fit(
        AdapterBank.open(bank), folder=work, engine=engine, progress=QUIET if output.as_json else Progress(),
        **{name: value for name, value in settings.items() if value is not None},
    )  # fmt: skip
    fitted.save(space, standalone=standalone, bank=bank)
    show_space(space, output)


def show_space(folder: Path, output: Output) -> None:
    """Say what a fitted space is and how good its fit is; its bank is not needed."""
    from netweight.methods.space.fit import Accuracy
    from netweight.methods.space.space import read_about

    about = read_about(folder)
    accuracy = Accuracy.from_json(about["accuracy"])
    how = "exactly" if accuracy.solver == "dual" else f"by {len(accuracy.passes)} passes"
    output.line(
        f"{folder}: {about['components']} components of {about['fitted']} adapters capture {accuracy.captured:.1%} of "
        f"their variance, found {how}",
        bold=True,
    )
    appended = len(about["names"]) - about["fitted"]
    output.line(f"Representation {about['config']['representation']}, {len(about['shapes'])} modules"
                + (f", {appended} more adapters appended" if appended else ""))  # fmt: skip
    for text in _remarks(accuracy):
        output.line(text)
    output.result({
        "space": str(folder), "adapters": len(about["names"]), "fitted": about["fitted"],
        "components": about["components"], "representation": about["config"]["representation"],
        "config": about["config"], "bank": about["bank"], "accuracy": accuracy.to_json(),
    })  # fmt: skip


def _remarks(accuracy: Accuracy) -> list[str]:
    """What is to be known of a fit besides."""
    found = []
    if len(accuracy.passes) > 1:
        found.append("Captured pass by pass: " + ", ".join(f"{share:.2%}" for share in accuracy.passes))
    if accuracy.halves is not None:
        halves = accuracy.halves
        agreement = ", ".join(f"{number}: {share:.2f}" for number, share in halves.agreement.items())
        found.append(
            f"Half of the adapters, with {halves.components} components, capture {halves.held_out:.1%} of the other "
            f"half's variance, {halves.fitted:.1%} of their own."
        )
        found.append(f"Agreement of the halves by leading components (1 for the same): {agreement}")
    if accuracy.sketch is not None:
        sketch = accuracy.sketch
        found.append(
            f"Through a sketch: inner products of {sketch.adapters} adapters have an error of {sketch.products:.1%}, "
            f"{sketch.components} components capture {sketch.captured:.1%} of what exact ones do."
        )
    return found
