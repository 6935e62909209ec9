"""The settings of folder compression."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, final

from pydantic import BeforeValidator, Field

from netweight.settings import Cli, Settings


@final
class CompressSettings(Settings):
    """How a file or folder is compressed; what comes back is changed by `mantissa_bits` below 7 alone."""

    level: Literal["fast", "default", "max"] = Field(default="default", description="Ever smaller and slower to write.")
    threads: int | None = Field(
        default=None, ge=1, description="Threads of the codec; by default all cores that may be used."
    )
    base: Annotated[Path | None, Cli(metavar="BASE")] = Field(
        default=None,
        exclude_if=lambda base: base is None,  # records of runs without one stay as they were
        description="Store differences from this model, compressed or not: a file, or a folder laid out alike.",
    )
    variant: str | None = Field(
        default=None, description="Take only weights of this variant, e.g. fp16, where a folder has it."
    )
    exclude: Annotated[tuple[str, ...], Cli(metavar="PATTERN")] = Field(
        default=(),
        description="Leave these files out, by shell patterns of their paths in the folder; may be repeated.",
    )
    mantissa_bits: int = Field(
        default=7, ge=0, le=7,
        description="Lossy below 7: round BF16, F16 and F32 tensors of two and more dimensions to so many bits.",
    )  # fmt: skip
    block_size: Annotated[int | None, BeforeValidator(lambda size: None if size == 0 else size)] = Field(
        default=512, ge=0, description="Weights that share a normalizer when rounded; 0 for no normalizers."
    )
    fidelity: Literal["corrected", "reference"] = Field(default="corrected", description="The arithmetic of rounding.")


class _Compressed(Settings):
    """What commands on compressed models share."""

    base: Annotated[Path | None, Cli(metavar="BASE")] = Field(
        default=None, description="The model that the stored differences are from, if it has moved."
    )
    threads: int | None = Field(
        default=None, ge=1, description="Threads of the codec; by default all cores that may be used."
    )


@final
class DecompressSettings(_Compressed):
    """How the original files of a compressed model are restored."""


@final
class VerifySettings(_Compressed):
    """What a compressed model is compared with."""

    against: Annotated[Path | None, Cli(metavar="SRC")] = Field(
        default=None, description="The original: compare every bit with it."
    )


@final
class InspectSettings(Settings):
    """Which tensors of weight files are shown."""

    tensor: Annotated[str | None, Cli(metavar="PATTERN")] = Field(
        default=None, description="Only tensors whose names match, e.g. '**.attention.**'."
    )
    plot: Annotated[Path | None, Cli(metavar="FILE")] = Field(
        default=None, description="Draw the histograms of sign, exponent and mantissa here."
    )
    base: Annotated[Path | None, Cli(metavar="BASE")] = Field(
        default=None, description="The model that the stored differences are from, if it has moved."
    )
