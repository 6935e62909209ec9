"""`netweight space sample`: new points, drawn as the models of a space lie in it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netweight.cli.finding_row import finding_row
from netweight.cli.opened_space import opened, space_argument
from netweight.cli.output import Output, output_option
from netweight.cli.paths import FILE, NEW

if TYPE_CHECKING:
    from torch import Tensor

    from netweight.methods.space.method import WeightSpace

__all__ = ["sample"]

_LEAST_AUDITED = 5


@click.command()
@space_argument
@click.option("--count", type=click.IntRange(1), default=1, show_default=True, help="How many points.")
@click.option("--sampler", type=click.Choice(["gaussian", "kernel", "mixture", "conditional"]), default="gaussian",
              show_default=True, help="How they are drawn; conditional needs --labels.")  # fmt: skip
@click.option("--factor", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True,
              help="Of the gaussian's standard deviations.")  # fmt: skip
@click.option("--bandwidth", type=click.FloatRange(0, 1),
              help="Of the kernel, and of conditional's rest; by default the likeliest.")  # fmt: skip
@click.option(
    "--clusters", type=click.IntRange(1), help="Of the mixture; by default as many as held-out models ask for."
)
@click.option("--labels", "labels_file", type=FILE, help="Attributes of models, for conditional.")
@click.option("--name-column", default="name", show_default=True, help="The column that names the model.")
@click.option("--emphasis", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True,
              help="Of attributes, for conditional; images of new combinations show less of them.")  # fmt: skip
@click.option("--given", multiple=True, metavar="COLUMN=VALUE", help="An attribute that all points have.")
@click.option("--seed", default=0, show_default=True, help="Of the draw.")
@click.option("--overwrite", is_flag=True, help="Replace the file if it is there.")
@click.option("--out", required=True, type=NEW, help="The .json file of points to write.")
@output_option
def sample(
    folder: Path, bank: Path | None, count: int, seed: int, overwrite: bool, out: Path, output: Output, **options: Any
) -> None:
    """Draw points. From five on, it says whether they lie where models lie without being copies of them."""
    from netweight.methods.space.directions import scores_digest
    from netweight.methods.space.diversity import neighbor_findings
    from netweight.methods.space.points import Points, write_points
    from netweight.store.atomic import refuse_existing

    refuse_existing(out, overwrite=overwrite)
    space = opened(folder, bank)
    drawn = _drawn(space, count, seed, options)
    names = tuple(f"sample-{seed}-{number}" for number in range(count))
    origin = {"sampler": options["sampler"], "seed": seed, "given": list(options["given"])}
    write_points(Points(names, drawn, scores_digest(space.scores), origin), out, overwrite=overwrite)
    findings = neighbor_findings(drawn, space.scores) if min(count, len(space.names)) >= _LEAST_AUDITED else []
    output.line(f"{count} {'point' if count == 1 else 'points'} by {options['sampler']}: {out}")
    output.table((), [finding_row(each) for each in findings], indent=2)
    output.result({"points": str(out), "names": list(names), "findings": [each.to_json() for each in findings]})


def _drawn(space: WeightSpace, count: int, seed: int, options: dict[str, Any]) -> Tensor:
    from netweight.errors import UsageError
    from netweight.methods.space.labels import read_labels
    from netweight.methods.space.mixture import MixtureSampler
    from netweight.methods.space.sampling import ConditionalSampler, GaussianSampler, KernelSampler

    kind, given = options["sampler"], dict(_pair(text) for text in options["given"])
    if (kind == "conditional") != (options["labels_file"] is not None) or (given and kind != "conditional"):
        raise UsageError(
            f"--labels and --given belong to the conditional sampler, not to {kind}."
            if kind != "conditional" else "The conditional sampler needs labels.",
            cure="Give --sampler conditional and --labels together.",
        )  # fmt: skip
    if kind == "gaussian":
        return GaussianSampler.fit(space.scores, factor=options["factor"]).draw(count, seed=seed)
    if kind == "kernel":
        return KernelSampler.fit(space.scores, bandwidth=options["bandwidth"]).draw(count, seed=seed)
    if kind == "mixture":
        return MixtureSampler.fit(space.scores, clusters=options["clusters"], seed=seed).draw(count, seed=seed)
    labels = read_labels(options["labels_file"], space.names, key=options["name_column"])
    fitted = ConditionalSampler.fit(space.scores, labels, bandwidth=options["bandwidth"], emphasis=options["emphasis"])
    return fitted.draw(count, seed=seed, given=given)


def _pair(text: str) -> tuple[str, float]:
    from netweight.errors import UsageError

    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise UsageError(f"--given {text} gives no number.", cure="Write COLUMN=VALUE, such as beard=1.") from None
