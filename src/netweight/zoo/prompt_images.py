"""Tables of prompts and image files, read for a model: images of the size that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from netweight.errors import UsageError
from netweight.probe.diffusion import TextToImage
from netweight.zoo.data.pictures import decode_splits
from netweight.zoo.language.rows import read_rows

__all__ = ["PromptImage", "made_size", "read_prompt_images"]


@final
@dataclass(frozen=True, eq=False)
class PromptImage:
    """One row.

    Attributes:
        where: Its table and line, for messages.
        prompt: The prompt.
        image: Shape `(3, height, width)`, within 0 and 1.
        values: The row, by column.
    """

    where: str
    prompt: str
    image: Tensor
    values: Mapping[str, Any]


def read_prompt_images(path: Path, size: tuple[int, int]) -> list[PromptImage]:
    """Read a table with the columns prompt and image; image files are named from where the table lies.

    Args:
        path: See `read_rows`.
        size: Height and width that images are resized to.

    Raises:
        UsageError: A prompt or a file is missing, or a file is no picture.
        NameNotFound: A column is missing.
        MissingExtra: Pillow is not installed.
    """
    rows = read_rows(path)
    rows.need("prompt", "image")
    named = []
    for row in rows.rows:
        where, prompt, image = f"{rows.name}, {row.where}", row.values.get("prompt"), row.values.get("image")
        if not isinstance(prompt, str) or not isinstance(image, str) or not image:
            raise UsageError(f"{where}: a prompt or an image file is missing.", cure="Name both.")
        file = path.parent / image
        if not file.is_file():
            raise UsageError(f"{where}: there is no file {file}.", cure="Paths start at the table.")
        named.append((where, prompt, file, row.values))
    pictures = decode_splits([[(where, str(file)) for where, _, file, _ in named]], of=rows.name, size=size)[0]
    images = (pictures.float() / 255).expand(-1, 3, -1, -1)
    return [
        PromptImage(where, prompt, image, values)
        for (where, prompt, _, values), image in zip(named, images, strict=True)
    ]


def made_size(model: TextToImage) -> tuple[int, int]:
    """Return height and width of the images that a model makes."""
    with torch.no_grad():
        made = model.generate(model.embed([""]), [0], guidance=1.0, steps=1)
    return int(made.shape[2]), int(made.shape[3])
