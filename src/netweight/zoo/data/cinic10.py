"""CINIC-10: 90,000 train and 90,000 test images with the classes of CIFAR-10, 32 × 32, of two sources."""

from __future__ import annotations

from typing import Any

from netweight.zoo.data.cifar10 import CIFAR_CLASSES, decoded, from_rows
from netweight.zoo.data.folder import pictures_below
from netweight.zoo.data.images import Images
from netweight.zoo.data.sources import from_hub, local_folder

__all__ = ["cinic10"]

_MEAN_STD = ((0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587))


def cinic10() -> Images:
    """Return CINIC-10, its train and test splits; the validation split is left out.

    Looked for below `NETWEIGHT_DATA`/cinic10 (the official release, unpacked: train/airplane/….png), then on the hub.
    Decoded pictures are cached.

    Raises:
        MissingExtra: It is in neither place, or Pillow is not installed.
        UsageError: A class folder is missing or a picture is damaged.

    Source: Darlow, Crowley, Antoniou, Storkey, arXiv 1810.03505; mean and deviation are theirs.
    """
    folder = local_folder("cinic10")
    if folder is None or not all((folder / split).is_dir() for split in ("train", "test")):
        holding = "the official release, unpacked: train/airplane/….png"
        splits = from_hub("flwrlabs/cinic10", "train", "test", name="cinic10", folder="cinic10", holding=holding)
        return from_rows("cinic10", splits[0], splits[1], "image", _MEAN_STD)
    key: list[list[list[str | int]]] = []
    parts: list[tuple[list[Any], list[int]]] = []
    for split in ("train", "test"):
        found = pictures_below(folder / split)
        files = [file for own in found.values() for file in own]
        key.append([[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files])
        parts.append((files, [CIFAR_CLASSES.index(name) for name, own in found.items() for _ in own]))
    return decoded("cinic10", key, parts[0], parts[1], _MEAN_STD)
