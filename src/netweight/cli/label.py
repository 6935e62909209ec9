"""`netweight label`: one label for any model, in the form of a nutrition label."""

from __future__ import annotations

import re
from pathlib import Path

import click

from netweight.cli import OUTPUT_FOLDER, Output, output_option
from netweight.errors import NetweightError, UsageError

_EXISTING = click.Path(path_type=Path, exists=True)


@click.command()
@click.argument("model", type=_EXISTING)
@click.option("--base", type=_EXISTING, metavar="MODEL", help="The model it was made from: what changed, by layer.")
@click.option("--against", type=_EXISTING, metavar="MODEL", help="Another model, whose label is set beside this one.")
@click.option("--all", "every", is_flag=True, help="One table for all models or adapters in the folder MODEL.")
@click.option("--card", is_flag=True, help="Put the label into the README.md of the model's folder, too.")
@click.option("--out", type=OUTPUT_FOLDER, help="Folder for the files of the label.  [default: NAME-label]")
@click.option("--threads", type=click.IntRange(1), help="Threads that read and compress.  [default: one per core]")
@output_option
def label(
    model: Path, base: Path | None, against: Path | None, every: bool, card: bool, out: Path | None,
    threads: int | None, output: Output,
) -> None:  # fmt: skip
    """Show what is in a model's files: weight, where its bits go, ingredients, and what was not measured.

    MODEL is a file or folder of weights, a language model, a pipeline of diffusers, a LoRA, a folder of LoRAs, or a
    federation's folder. It is read once, and never loaded or run. The label is printed and written as label.svg,
    label.html, label.json and label-badge.json.

    Example: netweight label Qwen2.5-0.5B --card
    """
    from netweight.labels.comparison import comparison_lines
    from netweight.labels.files import write_label
    from netweight.labels.measure import label as measured
    from netweight.labels.terminal import lines

    if every:
        _label_all(model, out, threads, output, given={"--base": base, "--against": against, "--card": card or None})
        return
    if card and not model.is_dir():
        raise UsageError(f"{model} is a file; a card lies in a model's folder.", cure="Leave out --card.")
    made = measured(model, base=base, threads=threads, progress=output.progress)
    other = None if against is None else measured(against, threads=threads, progress=output.progress)
    shown = lines(made) if other is None else comparison_lines(made, other)
    for line in shown:
        output.line(line)
    folder = out or Path(f"{re.sub(r'[^A-Za-z0-9._-]+', '-', made.name)}-label")
    files = write_label(made, folder, against=other)
    if card:
        output.line(f"Card: {_add_to_card(made, model)}")
    output.line(f"Written to {folder}: {', '.join(file.name for file in files)}.", bold=True)
    output.result({"label": made.to_json(), "files": [str(file) for file in files],
                   **({} if other is None else {"against": other.to_json()})})  # fmt: skip


def _add_to_card(made: object, folder: Path) -> Path:
    from netweight.labels.files import PICTURE, card_lines
    from netweight.labels.label import Label
    from netweight.labels.picture import svg
    from netweight.methods.compress.folder import write_side_file
    from netweight.plugins.model_card import add_section

    assert isinstance(made, Label)
    write_side_file(folder, PICTURE, svg(made).encode())
    return add_section(folder, "label", list(card_lines(made)))


def _label_all(
    folder: Path, out: Path | None, threads: int | None, output: Output, *, given: dict[str, object]
) -> None:
    from netweight.core.files import whole_file
    from netweight.labels.kinds import labelled_below
    from netweight.labels.measure import label as measured
    from netweight.labels.page import folder_page

    if not folder.is_dir():
        raise UsageError(f"{folder} is a file; --all takes a folder of models or adapters.", cure="Leave out --all.")
    if excluded := [name for name, value in given.items() if value is not None]:
        raise UsageError(f"--all makes one table and takes no {excluded[0]}.", cure=f"Leave out {excluded[0]}.")
    labels, failures = [], []
    for path in labelled_below(folder):
        try:
            labels.append(measured(path, threads=threads, progress=output.progress))
        except NetweightError as error:
            failures.append((path, str(error)))
    if not labels and not failures:
        raise UsageError(f"{folder} holds no models and no adapters.", cure="Give a folder that holds some.")
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
