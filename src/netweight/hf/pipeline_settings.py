"""Settings of how a pipeline's folder is opened; torch is not imported."""

from __future__ import annotations

import re
from typing import Annotated, Literal, final

from pydantic import Field, FilePath

from netweight.errors import UsageError
from netweight.settings import Cli, Settings

_PIXELS = re.compile(r"(\d+)(?:\s*[x×,]\s*(\d+))?")


@final
class PipelineSettings(Settings):
    """Settings for opening a pipeline's folder."""

    device: str = Field("cpu", description="Device of the pipeline, such as cuda.")
    variant: str | None = Field(
        None,
        description="Variant of the weights to read where a part has several, such as fp16; by default the "
        "files without a variant in their names.",
    )
    size: Annotated[str | None, Cli(metavar="SIDE|HEIGHTxWIDTH")] = Field(
        None, description="Size of the images in pixels; by default that of the denoiser's configuration."
    )
    fit: Literal["crop", "stretch", "pad"] = Field(
        "crop",
        description="Conversion of pictures of another shape to that size: crop cuts out the middle, as in "
        "the training of most models; stretch distorts; pad adds black bars.",
    )

    embeddings: Annotated[tuple[FilePath, ...], Cli(name="--embedding")] = Field(
        (),
        description="Textual inversion (learned_embeds.safetensors, or a file of AUTOMATIC1111 or kohya) whose word "
        "the prompts contain; may be given several times.",
    )

    def check(self) -> None:
        """Refuse a size that is none."""
        if self.size is not None:
            parsed_size(self.size)

    @property
    def pixels(self) -> tuple[int, int] | None:
        """Height and width in pixels, or None."""
        return None if self.size is None else parsed_size(self.size)


def parsed_size(text: str) -> tuple[int, int]:
    """Return height and width of a size such as `512` or `512x768`."""
    match = _PIXELS.fullmatch(text.strip().lower())
    if match is None or not int(match[1]) or match[2] == "0":
        raise UsageError(f"{text!r} is not a size.", cure="Write pixels, such as 512, or HEIGHTxWIDTH: 512x768.")
    return int(match[1]), int(match[2] or match[1])
