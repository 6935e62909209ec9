"""Records: what was done to a model, as JSON of a version, beside its weights. Methods keep theirs this way."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from netweight.core.digest import canonical_json
from netweight.errors import CorruptBlob, UsageError
from netweight.store.atomic import whole_file

__all__ = ["read_record", "write_record"]

T = TypeVar("T")


def write_record(path: str | Path, values: Mapping[str, Any], *, version: int, overwrite: bool = True) -> None:
    """Write a record, whole or not at all.

    Args:
        path: The file; its folder is made if it is not there.
        values: What `canonical_json` takes; infinity and NaN are kept.
        version: Of the record's fields.
        overwrite: Whether one that is there may be replaced.

    Raises:
        OutputExists: There is one that may not be replaced.
        OutputFailed: The place cannot be written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path, overwrite=overwrite) as file:
        file.write(canonical_json({"version": version, **values}, allow_nan=True).encode())


def read_record(path: str | Path, make: Callable[[dict[str, Any]], T], *, version: int, of: str) -> T:
    """Read a record.

    Args:
        path: The file.
        make: Makes something of its values.
        version: Which it must have.
        of: What it is a record of, for messages: "an edit".

    Returns:
        What `make` made.

    Raises:
        CorruptBlob: The file holds none of this version, or `make` cannot use its values.
        OSError: It cannot be read.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        if values.pop("version") != version:
            raise KeyError("version")
        return make(values)
    except (ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
        raise CorruptBlob(f"{path} holds no record of version {version} of {of}: {error}.") from error
