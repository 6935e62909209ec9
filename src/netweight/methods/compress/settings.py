"""The settings of folder compression."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import final, get_args

from netweight.codec import Precision
from netweight.errors import UsageError
from netweight.store.writer import Level


@final
@dataclass(frozen=True)
class CompressConfig:
    """How a file or folder is compressed; what comes back is changed by `mantissa_bits` below 7 alone.

    Attributes:
        level: The codec's level: `"fast"`, `"default"` or `"max"`, ever smaller and slower to write.
        threads: Threads of the encoder, at least 1; None takes the processor cores that this process may use.
        variant: Take only the weight files of this variant (e.g. `"fp16"`) where a folder has it; None takes all.
        exclude: Shell patterns of files to leave out, matched against the path within the folder, e.g. `"*.bin"`.
        mantissa_bits: Bits of the mantissa to keep, 0 to 6, of floats of up to 32 bits in tensors of two and more
            dimensions; 7 keeps all bits of everything.
        block_size: Weights that share a normalizer when rounded; None for no normalizers.
        fidelity: The arithmetic of rounding, "corrected" or "reference"; see `netweight.codec.encode_lossy`.

    Raises:
        UsageError: A value is out of its range.
    """

    level: Level = "default"
    threads: int | None = None
    variant: str | None = None
    exclude: tuple[str, ...] = ()
    mantissa_bits: int = 7
    block_size: int | None = 512
    fidelity: str = "corrected"

    def __post_init__(self) -> None:
        """Check the values."""
        if self.level not in get_args(Level):
            raise UsageError(f"There is no level {self.level!r}.", cure=f"Levels are {', '.join(get_args(Level))}.")
        Precision(self.mantissa_bits, self.block_size, self.fidelity)  # checks them
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"{self.threads} threads cannot work.", cure="Give 1 or more, or none for all cores.")

    @property
    def precision(self) -> Precision:
        """How much of weights to keep."""
        return Precision(self.mantissa_bits, self.block_size, self.fidelity)

    @property
    def workers(self) -> int:
        """The number of threads to use."""
        return self.threads if self.threads is not None else len(os.sched_getaffinity(0))
