"""A user's folder of pictures as `Images`: one subfolder per class, below `train` and `test` or without a split."""

from __future__ import annotations

from pathlib import Path

import torch

from netweight.errors import UsageError
from netweight.zoo.data.dataset import split_off
from netweight.zoo.data.images import Images, measured_mean_std
from netweight.zoo.data.pictures import decode_splits

__all__ = ["load_folder", "pictures_below"]

_ENDINGS = {".png", ".jpg", ".jpeg"}


def load_folder(
    path: str | Path, *, size: tuple[int, int] | None = None, test_share: float = 0.2, seed: int = 0
) -> Images:
    """Load PNG and JPEG pictures, each from the subfolder of its class.

    Args:
        path: Holds a folder per class, or `train` and `test` (or `val`, `valid`, `validation`) that do.
        size: Height and width to resize to; without it all pictures must have one size.
        test_share: Share of each class that becomes test images where the folder has no split.
        seed: Seed of that split.

    Returns:
        The data set, named for the folder. Gray if every picture is; normalized by what its train images measure.

    Raises:
        UsageError: There is no such folder, no class, no picture in a class, a picture that cannot be read, several
            sizes, or a class that is only tested.
        MissingExtra: Pillow is not installed.
    """
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
    """List the pictures of each class, in sorted order.

    Args:
        folder: Holds a subfolder per class; names that begin with a dot do not count.

    Raises:
        UsageError: There is no class, or one without a picture.
    """
    classes = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    found = {
        entry.name: sorted(file for file in entry.rglob("*") if file.suffix.lower() in _ENDINGS) for entry in classes
    }
    empty = [name for name, files in found.items() if not files]
    if not found or empty:
        what = f"holds no picture in {empty[:5]}" if empty else "holds no subfolder"
        raise UsageError(f"{folder} {what}.", cure="Put PNG or JPEG files into one subfolder per class.")
    return found
