"""Shards: the files that one model's weights are spread over, by an index or by the numbers in their names."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path

from netweight.errors import CorruptBlob

_NUMBERED = re.compile(r"(?P<start>.*?)(?P<number>\d+)-of-(?P<total>\d+)(?P<end>\..+)", re.DOTALL)
# At most this many missing shards are listed, whatever total a name states.
_MOST_NAMED = 10_000


def refuse_missing_shards(folder: Path, names: Collection[str], *, indexed: Iterable[str] = ()) -> None:
    """Refuse a model of which a shard is missing.

    Args:
        folder: The folder of the files, which the error names.
        names: The names of the weights' files that are there.
        indexed: The names of the files that an index lists.

    Raises:
        CorruptBlob: A file that the index lists is not among `names`, or files are numbered as in
            `model-00001-of-00003.safetensors` and numbers are missing.
    """
    missing = missing_shards(names, indexed=indexed)
    if missing:
        lacks = f"{missing[0]}, which belongs to the same model"
        if len(missing) > 1:
            lacks = f"{missing[0]} and {len(missing) - 1} more, which belong to the same model"
        raise CorruptBlob(f"{folder} is incomplete: it lacks {lacks}.", cure="Fetch the missing files.")


def missing_shards(names: Collection[str], *, indexed: Iterable[str] = ()) -> list[str]:
    """List the files that an index or the numbers in file names ask for and that are not there; arguments as above."""
    present = set(names)
    missing = dict.fromkeys(name for name in indexed if name not in present)
    numbers: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for name in names:
        if numbered := _NUMBERED.fullmatch(name):
            numbers[numbered["start"], numbered["total"], numbered["end"]].add(numbered["number"])
    for (start, total, end), there in sorted(numbers.items()):
        # Some programs count from 0.
        first = min(1, *map(int, there))
        width = len(min(there))
        for number in range(first, first + min(int(total), _MOST_NAMED)):
            name = f"{start}{number:0{width}}-of-{total}{end}"
            if name not in present:
                missing[name] = None
    return list(missing)
