"""Read prompts, and tables of the prompts and images that a model is known or suspected to repeat.

Rows of memorized pairs have `prompt` and `image`, a file whose path starts at the table's folder, and may have `kind`:
verbatim, or template where only the layout comes back.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast, final, get_args

from netweight.data.rows import Row, RowErrors, Rows, read_rows, read_text
from netweight.errors import NameNotFound, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from netweight.metrics.copies import Kind
    from netweight.nn.text_to_image import TextToImage


def read_prompts(path: str | Path, *, column: str = "prompt") -> list[str]:
    """Read prompts, each once: the lines of a .txt, or of what `read_rows` takes the first column of those named."""
    path = Path(path)
    if path.suffix == ".txt" and path.is_file():
        found = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    else:
        rows = read_rows(path)
        named = [name.strip() for name in column.split(",")]
        column = next((name for name in named if name in rows.columns), named[0])
        rows.need(column, by="--column")
        errors, found = RowErrors(rows.name), []
        for row in rows.rows:
            value = row.values.get(column)
            if isinstance(value, str) and value.strip():
                found.append(value.strip())
            else:
                errors.add(row.where, "no prompt")
        errors.refuse("Fill them in, or leave the rows out.")
    if not found:
        raise UsageError(f"{path} holds no prompt.", cure="Give at least one.")
    return list(dict.fromkeys(found))


@final
@dataclass(frozen=True, eq=False)
class MemorizedPair:
    """A prompt and its training image."""

    name: str  # the prompt, numbered where it comes several times
    prompt: str
    image: Tensor  # shape `(3, height, width)`, within 0 and 1
    kind: Kind = "verbatim"  # how the image is repeated


def check_pairs(path: str | Path) -> Rows:
    """Read a table and check that every row has a prompt, and an image file that is there; no image is opened."""
    rows = read_rows(path)
    try:
        rows.need("prompt", "image")
    except NameNotFound as error:
        known = ", ".join(dict.fromkeys(name for row in rows.rows for name in row.values))
        raise NameNotFound(error.reason, cure=f"Rename one in the table; it has: {known}.") from None
    errors = RowErrors(rows.name)
    for row in rows.rows:
        for problem in _wrong(row, Path(path).parent):
            errors.add(row.where, problem)
    errors.refuse("Name a prompt and an image file in every row; paths start at the table's folder.")
    return rows


def read_pairs(path: str | Path, size: tuple[int, int]) -> list[MemorizedPair]:
    """Read pairs, at least one."""
    from netweight.data.images.images import decode_splits

    rows, folder = check_pairs(path), Path(path).parent
    named = [(f"{rows.name}, {row.where}", str(folder / row.values["image"])) for row in rows.rows]
    pictures = decode_splits([named], of=rows.name, size=size)[0]
    images = (pictures.float() / 255).expand(-1, 3, -1, -1)
    prompts = [str(row.values["prompt"]) for row in rows.rows]
    kinds = [cast("Kind", row.values.get("kind") or "verbatim") for row in rows.rows]
    return [MemorizedPair(*each) for each in zip(_names(prompts), prompts, images, kinds, strict=True)]


def image_size(model: TextToImage) -> tuple[int, int]:
    """Return height and width of the images that a model makes."""
    import torch

    with torch.no_grad():
        made = model.generate(model.embed([""]), [0], guidance=1.0, steps=1)
    return int(made.shape[2]), int(made.shape[3])


def _wrong(row: Row, folder: Path) -> list[str]:
    """What is wrong with a row."""
    from netweight.metrics.copies import Kind

    prompt, image, kind = (row.values.get(name) for name in ("prompt", "image", "kind"))
    wrong = []
    if not isinstance(prompt, str) or not prompt.strip():
        wrong.append("no prompt")
    if not isinstance(image, str) or not image:
        wrong.append("no image")
    elif not (folder / image).is_file():
        wrong.append(f"there is no file {folder / image}")
    if kind and kind not in get_args(Kind):
        wrong.append(f"kind is {kind!r}, not {' or '.join(get_args(Kind))}")
    return wrong


def _names(prompts: list[str]) -> list[str]:
    counted = [(prompt, prompts[:place].count(prompt)) for place, prompt in enumerate(prompts)]
    return [prompt if not before else f"{prompt} ({before + 1})" for prompt, before in counted]


def image_files(*tables: Path) -> list[Path]:
    """The images that tables name: another content of them is another step."""
    return [table.parent / str(row.values["image"]) for table in tables for row in check_pairs(table).rows]
