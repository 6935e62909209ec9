"""Settings of adapters by mlx-lm: `adapters.safetensors` with `adapter_config.json` beside it.

A layer computes x Wᵀ + scale · (x a) b, with a of shape (columns, rank) and b of shape (rank, rows). The scale is the
whole factor; it is not divided by the rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

from netweight.core.bounded_json import read_object
from netweight.errors import CorruptBlob, Unsupported, UsageError
from netweight.store.lora_formats.other_kinds import EXTRACT

WEIGHTS = "adapters.safetensors"


@final
@dataclass(frozen=True)
class MlxSettings:
    """Settings of an adapter as mlx-lm records them."""

    scale: float
    """Factor of all changes."""
    base: str | None
    """Name of the model that it was trained on."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read `adapter_config.json`.

        Args:
            path: The file.

        Raises:
            UsageError: There is no such file, so that the scale is not known.
            Unsupported: All weights were trained.
            CorruptBlob: The file states no scale.
        """
        if not path.is_file():
            raise UsageError(
                f"{path} is missing, so the scale of {WEIGHTS} is not known.", cure="Also fetch that file."
            )
        try:
            values = read_object(path)
            if values.get("fine_tune_type", "lora") not in ("lora", "dora"):
                raise Unsupported(
                    f"{path} describes a training of kind {values['fine_tune_type']}, which has no factors.",
                    cure=EXTRACT,
                )
            settings = values["lora_parameters"]
            # Earlier releases recorded an alpha.
            scale = settings["scale"] if "scale" in settings else settings["alpha"] / settings["rank"]
            base = values.get("model")
            return cls(float(scale), base if isinstance(base, str) else None)
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptBlob(
                f"{path} states no scale of the adapter ({error!r}).",
                cure=f"Fetch the file again; it belongs beside {WEIGHTS}.",
            ) from error
