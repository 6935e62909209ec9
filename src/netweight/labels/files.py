"""Files of `netweight label`: a picture, a page, data, a badge, and a section of the model's card."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from netweight.core.atomic_writes import whole_file
from netweight.labels.badge import badge
from netweight.labels.label import Label
from netweight.labels.page import label_page
from netweight.labels.picture import svg

PICTURE, PAGE, DATA, BADGE = "label.svg", "label.html", "label.json", "label-badge.json"


def write_label(label: Label, folder: str | Path, *, against: Label | None = None) -> list[Path]:
    """Write a label into a folder as picture, page, data and badge, and read the data back.

    Args:
        label: The label.
        folder: Where the files go; made if it is not there. Labels that lie there are replaced.
        against: A label to set beside it on the page.

    Returns:
        The files.

    Raises:
        OutputFailed: The folder cannot be written.
        UsageError: What was written does not read back as it was.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        PICTURE: svg(label),
        PAGE: label_page(label, against=against),
        DATA: json.dumps(label.to_json(), indent=2, ensure_ascii=False) + "\n",
        BADGE: json.dumps(badge(label), ensure_ascii=False) + "\n",
    }
    for name, text in contents.items():
        with whole_file(folder / name, overwrite=True) as file:
            file.write(text.encode())
    if Label.read(folder / DATA) != label:
        from netweight.errors import UsageError

        raise UsageError(f"{folder / DATA} does not read back as it was written.", cure="Write the label again.")
    return [folder / name for name in contents]


def card_lines(label: Label) -> Iterator[str]:
    """Yield the lines of a model card's section about the label, in Markdown.

    Args:
        label: The label, whose picture lies beside the card.
    """
    yield "## Net weight facts"
    yield ""
    yield f"![Net weight facts of {label.name}]({PICTURE})"
    yield ""
    yield "| | |"
    yield "| --- | --- |"
    for group in label.groups:
        for row in group.rows:
            value = f"not measured: `{row.value}`" if row.state == "not measured" else row.value
            yield f"| {row.title} | {value} |".replace("\n", " ")
