"""`netweight label`: one label for any model, in the form of a nutrition label."""

from __future__ import annotations

from pathlib import Path

import click

from netweight.cli import FINDING_FAILED, OUTPUT_FOLDER, GroupedCommand, Output, output_option
from netweight.errors import NetweightError, UsageError

_ROWS = "ROWS"


@click.command(
    cls=GroupedCommand,
    groups={
        "Comparisons": ("base", "against", "every"),
        "Audits, which run the model": ("minutes", "refused", "ordinary", "harmful", "benign", "prompts"),
        "Output": ("card", "out", "output"),
    },
    example="netweight label my-model --base my-base --card",
)
@click.argument("model")
@click.option(
    "--base", metavar="MODEL", help="Model from which MODEL was made; the label shows the change of each layer."
)
@click.option("--against", metavar="MODEL", help="Another model, whose label is printed beside this one.")
@click.option("--all", "every", is_flag=True, help="Make one table of all models or adapters in the folder MODEL.")
@click.option(
    "--minutes",
    type=click.FloatRange(0, min_open=True),
    metavar="N",
    help="Time for all audits together, in minutes. The audits need data: see the next options.",
)
@click.option("--refused", metavar=_ROWS, help="Prompts that a language model should refuse; needs --ordinary.")
@click.option(
    "--harmful",
    metavar=_ROWS,
    help="Harmful rows on which a language model is fine-tuned; needs --base, for comparison.",
)
@click.option(
    "--benign", metavar=_ROWS, help="Rows that measure whether this fine-tuning keeps the model's other abilities."
)
@click.option(
    "--prompts", metavar=_ROWS, help="Prompts whose pictures a pipeline may have memorized; needs --ordinary."
)
@click.option(
    "--ordinary", metavar=_ROWS, help="Ordinary prompts, for comparison with those of --refused or --prompts."
)
@click.option("--card", is_flag=True, help="Also insert the label into the README.md of the model's folder.")
@click.option("--out", type=OUTPUT_FOLDER, help="Folder for the files of the label.  [default: NAME-label]")
@click.option("--threads", type=click.IntRange(1), help="Threads that read and compress.  [default: one per core]")
@output_option
@click.pass_context
def label(
    context: click.Context, /, model: str, base: str | None, against: str | None, every: bool, minutes: float | None,
    card: bool, out: Path | None, threads: int | None, output: Output, **rows: str | None,
) -> None:  # fmt: skip
    """Show what is in a model's files: the size of the weights, their ingredients, and what was not measured.

    MODEL is a file or folder of weights, a language model, a pipeline of diffusers, a LoRA, a folder of LoRAs, the
    folder of a federation, or the id of a model on the Hugging Face hub. The command reads the files once. It runs the
    model only for audits, which need --minutes and data. The label is printed, and written as label.svg, label.html,
    label.json and label-badge.json. Exits with 1 if an audit missed a target or did not end in time.
    """
    from netweight.core.hub import local_model
    from netweight.labels.comparison import comparison_lines
    from netweight.labels.files import write_label
    from netweight.labels.measure import file_name
    from netweight.labels.measure import label as measured
    from netweight.labels.terminal import lines

    folder = local_model(model, pickles=True)
    if every:
        given = {"--base": base, "--against": against, "--card": card or None, "--minutes": minutes}
        _label_all(folder, out, threads, output, given={**given, **{f"--{name}": each for name, each in rows.items()}})
        return
    if card and not folder.is_dir():
        raise UsageError(f"{model} is a single file, which cannot have a model card.", cure="Leave out --card.")
    made = measured(
        folder, base=base, minutes=minutes, out=None if out is None else out / "audits", threads=threads,
        progress=output.progress, **rows,
    )  # fmt: skip
    other = None if against is None else measured(against, threads=threads, progress=output.progress)
    shown = lines(made) if other is None else comparison_lines(made, other)
    for line in shown:
        output.line(line)
    target = out or Path(f"{file_name(made.name)}-label")
    files = write_label(made, target, against=other)
    if card:
        output.line(f"Card: {_add_to_card(made, folder)}")
    output.line(f"Written to {target}: {', '.join(file.name for file in files)}.", bold=True)
    output.result({"label": made.to_json(), "files": [str(file) for file in files],
                   **({} if other is None else {"against": other.to_json()})})  # fmt: skip
    if minutes is not None and any(row.detail.get("outcome") == "failed" for row in made.rows if row.key == "verdict"):
        context.exit(FINDING_FAILED)


def _add_to_card(made: object, folder: Path) -> Path:
    from netweight.labels.files import PICTURE, card_lines
    from netweight.labels.label import Label
    from netweight.labels.picture import svg
    from netweight.methods.compress.compress_folder import write_side_file
    from netweight.plugins.model_card import add_section

    assert isinstance(made, Label)
    write_side_file(folder, PICTURE, svg(made).encode())
    return add_section(folder, "label", list(card_lines(made)))


def _label_all(
    folder: Path, out: Path | None, threads: int | None, output: Output, *, given: dict[str, object]
) -> None:
    from netweight.core.atomic_writes import whole_file
    from netweight.labels.identify_subject import labelled_below
    from netweight.labels.measure import label as measured
    from netweight.labels.page import folder_page

    if not folder.is_dir():
        raise UsageError(f"{folder} is a file; --all takes a folder of models or adapters.", cure="Leave out --all.")
    if excluded := [name for name, value in given.items() if value is not None]:
        raise UsageError(
            f"--all makes one table and cannot be combined with {excluded[0]}.", cure=f"Leave out {excluded[0]}."
        )
    labels, failures = [], []
    for path in labelled_below(folder):
        try:
            labels.append(measured(path, threads=threads, progress=output.progress))
        except NetweightError as error:
            failures.append((path, str(error)))
    if not labels and not failures:
        raise UsageError(f"{folder} contains no models and no adapters.", cure="Give a folder with models or adapters.")
    weights = [{row.key: row.value for row in each.rows} for each in labels]
    output.table(
        ("name", "kind", "gross", "net", "tare"),
        [(each.name, each.kind, *(values.get(key, "–") for key in ("gross_weight", "net_weight", "tare")))
         for each, values in zip(labels, weights, strict=True)],
    )  # fmt: skip
    for path, reason in failures:
        output.warn(f"{path.name}: {reason}")
    target = out or Path(f"{folder.resolve().name}-labels")
    target.mkdir(parents=True, exist_ok=True)
    page = target / "labels.html"
    with whole_file(page, overwrite=True) as file:
        file.write(folder_page(folder.resolve().name, labels, failures).encode())
    output.line(f"{len(labels)} of {len(labels) + len(failures)} labels: {page}", bold=True)
    output.result({"labels": [each.to_json() for each in labels], "page": str(page),
                   "failures": {str(path): reason for path, reason in failures}})  # fmt: skip
