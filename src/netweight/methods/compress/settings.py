"""The settings of folder compression."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, final

from pydantic import BeforeValidator, Field

from netweight.settings import Cli, ModelPath, Settings


@final
class CompressSettings(Settings):
    """Settings of the compression of a file or folder; lossless unless `mantissa_bits` is below 7."""

    option_groups: ClassVar = {
        "Files": ("base", "variant", "exclude"),
        "Compression": ("level", "threads"),
        "Rounding (lossy)": ("mantissa_bits", "block_size", "fidelity"),
    }

    level: Literal["fast", "default", "high", "max"] = Field(
        default="default",
        description="Compression level. Higher levels produce smaller files and take longer to write.",
    )
    threads: int | None = Field(
        default=None, ge=1, description="Threads of the codec; by default one for each available core."
    )
    base: Annotated[ModelPath | None, Cli(metavar="BASE")] = Field(
        default=None,
        description="Base model from which differences are stored: a file, a folder or an id on the hub, compressed "
        "or not. Whoever opens the result needs the same base.",
    )
    variant: str | None = Field(
        default=None, description="Variant of the weights to compress, such as fp16, where a folder has several."
    )
    exclude: Annotated[tuple[str, ...], Cli(metavar="PATTERN")] = Field(
        default=(),
        description="Shell pattern of paths that are not written to the result; may be given several times.",
    )
    mantissa_bits: int = Field(
        default=7, ge=0, le=7,
        description="Number of mantissa bits that rounding keeps in BF16, F16 and F32 tensors of two and more "
        "dimensions, 0 to 6. The default, 7, turns rounding off for all types.",
    )  # fmt: skip
    block_size: Annotated[int | None, BeforeValidator(lambda size: None if size == 0 else size)] = Field(
        default=512,
        ge=0,
        description="Number of weights that are scaled together, as a block, before rounding. 0 turns "
        "scaling off. Without rounding, this has no effect.",
    )
    fidelity: Literal["corrected", "reference"] = Field(
        default="corrected",
        description="Rounding implementation: `corrected`, or `reference` to repeat the paper's code with its errors.",
    )


class _Compressed(Settings):
    """Settings that commands on compressed models share."""

    base: Annotated[ModelPath | None, Cli(metavar="BASE")] = Field(
        default=None, description="Path of the base model from which the differences were stored, if it has moved."
    )
    threads: int | None = Field(
        default=None, ge=1, description="Threads of the codec; by default one for each available core."
    )


@final
class DecompressSettings(_Compressed):
    """Settings of the restoration of a compressed model's original files."""


@final
class VerifySettings(_Compressed):
    """Settings of the verification of a compressed model."""

    against: Annotated[ModelPath | None, Cli(metavar="SRC")] = Field(
        default=None, description="The original model, with which every bit is compared."
    )


@final
class InspectSettings(Settings):
    """Settings of the inspection of weight files."""

    tensor: Annotated[str | None, Cli(metavar="PATTERN")] = Field(
        default=None, description="Pattern of the names of tensors to show, such as '**.attention.**'."
    )
    plot: Annotated[Path | None, Cli(metavar="FILE")] = Field(
        default=None, description="File for a plot of the histograms of sign, exponent and mantissa."
    )
    base: Annotated[ModelPath | None, Cli(metavar="BASE")] = Field(
        default=None, description="Path of the base model from which the differences were stored, if it has moved."
    )
