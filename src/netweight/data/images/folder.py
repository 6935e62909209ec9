"""A user's folder of pictures as `Images`: one subfolder per class, below `train` and `test` or without a split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from netweight.core.names import nearest_names
from netweight.core.seeds import torch_generator
from netweight.data.images.images import Images, measured_mean_std
from netweight.data.images.sources import decode_splits
from netweight.errors import NameNotFound, UsageError

_ENDINGS = {".png", ".jpg", ".jpeg"}


def load_folder(
    path: str | Path, *, size: tuple[int, int] | None = None, test_share: float = 0.2, seed: int = 0
) -> Images:
    """Load PNG and JPEG pictures, each from the subfolder of its class."""
    root = Path(path)
    if not root.is_dir():
        raise UsageError(f"{root} is no folder.", cure="Name a folder that holds a subfolder per class.")
    tested = next((root / name for name in ("test", "val", "valid", "validation") if (root / name).is_dir()), None)
    given = [root / "train", tested] if (root / "train").is_dir() and tested else [root]
    found = [pictures_below(part) for part in given if part is not None]
    classes = tuple(found[0])
    only_tested = sorted(set(found[-1]) - set(classes))
    if only_tested:
        raise UsageError(
            f"{given[-1]} has classes that {given[0]} has not: {only_tested[:5]}.", cure="Add them, or remove them."
        )
    files = [[file for own in part.values() for file in own] for part in found]
    labels = [torch.tensor([classes.index(name) for name, own in part.items() for _ in own]) for part in found]
    images = decode_splits([[(str(file), file) for file in part] for part in files], of=str(root), size=size)
    if len(found) == 1:
        kept, taken = split_off(labels[0], test_share, seed=seed)
        images, labels = [images[0][kept], images[0][taken]], [labels[0][kept], labels[0][taken]]
    mean, std = measured_mean_std(images[0])
    return Images(root.name, (images[0], labels[0]), (images[1], labels[1]), classes, mean=mean, std=std)


def pictures_below(folder: Path) -> dict[str, list[Path]]:
    """List the pictures of each class, in sorted order."""
    classes = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    found = {
        entry.name: sorted(file for file in entry.rglob("*") if file.suffix.lower() in _ENDINGS) for entry in classes
    }
    empty = [name for name, files in found.items() if not files]
    if not found or empty:
        what = f"holds no picture in {empty[:5]}" if empty else "holds no subfolder"
        raise UsageError(f"{folder} {what}.", cure="Put PNG or JPEG files into one subfolder per class.")
    return found


MeanStd = tuple[tuple[float, ...], tuple[float, ...]]


def from_dataset(
    train: Any,
    test: Any = None,
    image_column: str = "image",
    label_column: str = "label",
    *,
    writer_column: str | None = None,
    name: str = "dataset",
    size: tuple[int, int] | None = None,
    classes: Sequence[str] | None = None,
    mean_std: MeanStd | None = None,
    test_share: float = 0.2,
    seed: int = 0,
) -> Images:
    """Turn a `datasets.Dataset`, or anything with rows that are mappings, into plain tensors."""
    splits = [rows for rows in (train, test) if rows is not None]
    for rows in splits:
        _check_columns(rows, (image_column, label_column, *((writer_column,) if writer_column else ())), name)
    labels = [list(rows[label_column]) for rows in splits]
    names = tuple(classes) if classes is not None else _class_names(train, label_column, labels[0])
    targets = [_targets(found, names, name) for found in labels]
    pictures = [
        [(f"Row {row} of {name}", picture) for row, picture in enumerate(_undecoded(rows, image_column))]
        for rows in splits
    ]
    images = decode_splits(pictures, of=name, size=size)
    writers = _writers([list(rows[writer_column]) for rows in splits]) if writer_column else None
    if test is None:
        kept, taken = split_off(targets[0], test_share, seed=seed)
        images, targets = [images[0][kept], images[0][taken]], [targets[0][kept], targets[0][taken]]
        writers = [writers[0][kept], writers[0][taken]] if writers else None
    mean, std = mean_std or measured_mean_std(images[0])
    split = [(images[part], targets[part]) for part in (0, 1)]
    wrote = (writers[0], writers[1]) if writers else None
    return Images(name, split[0], split[1], names, writers=wrote, mean=mean, std=std)


def split_off(labels: Tensor, share: float, *, seed: int) -> tuple[Tensor, Tensor]:
    """Choose test images at random, of every class the same share, at least one where a class has two."""
    if not 0 < share < 1:
        raise UsageError(
            f"The share of test images must lie between 0 and 1, not {share}.", cure="Use for example 0.2."
        )
    tests = torch.zeros(len(labels), dtype=torch.bool)
    generator = torch_generator(seed, "split")
    for label in torch.unique(labels):
        own = (labels == label).nonzero().flatten()
        count = min(max(round(share * len(own)), 1), len(own) - 1)
        tests[own[torch.randperm(len(own), generator=generator)[:count]]] = True
    return (~tests).nonzero().flatten(), tests.nonzero().flatten()


def _undecoded(rows: Any, column: str) -> Any:
    """Return a column of pictures, encoded as they are stored where the rows allow that."""
    feature: Any = getattr(rows, "features", {}).get(column)
    if getattr(feature, "decode", False):
        rows = rows.cast_column(column, type(feature)(decode=False))
    return rows[column]


def _check_columns(rows: Any, wanted: Sequence[str], name: str) -> None:
    """Check that rows have the columns and are not empty."""
    known = list(getattr(rows, "column_names", ()))
    for column in wanted:
        if column not in known:
            raise NameNotFound(
                f"{name} has no column {column!r}.",
                cure=f"The nearest are {nearest_names(column, known)}." if known else "Pass a datasets.Dataset.",
            )
    if not len(rows):
        raise UsageError(f"A split of {name} has no rows.", cure="Give at least one row.")


def _class_names(rows: Any, column: str, labels: list[Any]) -> tuple[str, ...]:
    """Name the classes: by the column's feature where that knows, else by the labels that occur."""
    known = getattr(getattr(rows, "features", {}).get(column), "names", None)
    if known:
        return tuple(known)
    if all(isinstance(label, int) for label in labels):
        return tuple(str(label) for label in range(max(labels) + 1))
    return tuple(sorted({str(label) for label in labels}))


def _targets(labels: list[Any], names: tuple[str, ...], name: str) -> Tensor:
    """Turn labels into class numbers."""
    if all(isinstance(label, int) for label in labels):
        return torch.tensor(labels, dtype=torch.int64)
    numbers = {label: number for number, label in enumerate(names)}
    unknown = sorted({str(label) for label in labels} - set(names))
    if unknown:
        raise UsageError(
            f"{name} has labels without a class: {unknown[:5]}.", cure=f"The classes are {list(names[:20])}."
        )
    return torch.tensor([numbers[str(label)] for label in labels], dtype=torch.int64)


def _writers(columns: list[list[Any]]) -> list[Tensor]:
    """Number the writers of all splits, in sorted order."""
    numbers = {writer: number for number, writer in enumerate(sorted({str(w) for column in columns for w in column}))}
    return [torch.tensor([numbers[str(writer)] for writer in column], dtype=torch.int64) for column in columns]
