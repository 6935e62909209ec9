"""Totals of one weights file that was compressed or restored: tensors, bytes, digest, and what rounding changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, final

import xxhash
from pydantic import Field, NonNegativeFloat

from netweight.codec import BlobInfo
from netweight.core.digests import ALGORITHM

Count = Annotated[int, Field(ge=0, lt=1 << 62)]
"""A number of things, or of bytes; records that are read are checked for it."""


@dataclass(frozen=True, kw_only=True)
class WeightTotals:
    """Totals of the tensors in one compressed file; all are 0 for a file without weights."""

    tensors: Count = 0
    """Number of tensors."""
    payload: Count = 0
    """Bytes of all compressed tensors."""
    rounded: Count = 0
    """Number of tensors that are rounded."""
    bound: NonNegativeFloat = 0.0
    """Largest relative change of a weight that rounding may cause; 0 if nothing is rounded."""
    worst_change: NonNegativeFloat = 0.0
    """Largest relative change of a weight that rounding caused."""
    differences: Count = 0
    """Number of tensors that are stored as differences from a base."""
    unlike_base: Mapping[str, Count] = field(default_factory=dict)
    """Reason → number of tensors that are not stored as differences although a base was given."""


@final
@dataclass(frozen=True, kw_only=True)
class FileTotals(WeightTotals):
    """Totals of one file: of its tensors, and its sizes."""

    nbytes: int
    """Size of the plain file in bytes."""
    digest: str
    """Digest of the plain file; if tensors were rounded, of the file that is restored."""
    stored_nbytes: int
    """Size of the compressed file in bytes."""


class Tally:
    """Sums over the tensors of one plain file while they are read.

    Args:
        head: The plain file's bytes before its data.
    """

    def __init__(self, head: bytes) -> None:
        self._whole = xxhash.xxh3_128(head)
        self._tensors = self._payload = self._rounded = 0
        self._bound = self._worst = 0.0

    def update(self, content: Any) -> None:
        """Add bytes of the plain file's data, in order, to its digest.

        Args:
            content: A contiguous buffer.
        """
        self._whole.update(content)

    def add(self, payload: int, rounding: BlobInfo | None) -> None:
        """Count a tensor.

        Args:
            payload: Bytes that it takes compressed.
            rounding: The codec's description of it if it is rounded, else None.
        """
        self._tensors += 1
        self._payload += payload
        if rounding is not None:
            self._rounded += 1
            self._bound = max(self._bound, rounding.bound)
            self._worst = max(self._worst, rounding.worst_change)

    def result(self, *, plain: int, stored: int) -> FileTotals:
        """Return the totals.

        Args:
            plain: Size of the plain file in bytes.
            stored: Size of the compressed file in bytes.
        """
        digest = f"{ALGORITHM}:{self._whole.hexdigest()}"
        return FileTotals(
            nbytes=plain, digest=digest, stored_nbytes=stored, tensors=self._tensors, payload=self._payload,
            rounded=self._rounded, bound=self._bound, worst_change=self._worst,
        )  # fmt: skip
