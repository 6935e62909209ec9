"""What a stop of the tour hands over to the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

from netweight.evidence.report import Report

__all__ = ["Stop"]


@final
@dataclass(frozen=True)
class Stop:
    """What a stop adds to the report.

    Attributes:
        sections: Functions that each add a section.
        inputs: Name of each input → its digest.
    """

    sections: tuple[Callable[[Report], object], ...]
    inputs: Mapping[str, str]
