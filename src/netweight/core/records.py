"""Records: JSON files with a version that are written whole and read within bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from netweight.core.atomic_writes import whole_file
from netweight.core.bounded_json import read_object
from netweight.core.digests import canonical_json
from netweight.errors import CorruptBlob, UsageError

T = TypeVar("T")
_MOST_RECORD = 1 << 28  # bytes of a record


def write_record(path: str | Path, values: Mapping[str, Any], *, version: int, overwrite: bool = True) -> None:
    """Write a record, whole or not at all.

    `values`: what `canonical_json` takes; infinity and NaN are kept.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path, overwrite=overwrite) as file:
        file.write(canonical_json({"version": version, **values}, allow_nan=True).encode())


def read_record(path: str | Path, make: Callable[[dict[str, Any]], T], *, version: int, of: str) -> T:
    """Read a record.

    `version`: which it must have.
    """
    try:
        values = read_object(Path(path), limit=_MOST_RECORD, most_values=None)
        if values.pop("version") != version:
            raise KeyError("version")
        return make(values)
    except (ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
        raise CorruptBlob(f"{path} is not a record of {of} in version {version}: {error}.") from error
