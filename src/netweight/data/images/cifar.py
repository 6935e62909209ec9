"""CIFAR-10 and CINIC-10: color images of ten classes, 32 × 32, from files or the hub; and their augmentation.

A JPEG copy of CIFAR-10 is good for training and attacks, but models trained on the original lose accuracy on it; what
is loaded from one is called "cifar10-jpeg".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from netweight.core.files import digest_file
from netweight.data.images.images import Images, pictures_below
from netweight.data.images.sources import cached, decode_splits, from_hub, local_folder, module
from netweight.errors import CorruptBlob, UsageError

CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR_MEAN_STD = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
_RECORD = 1 + 3 * 32 * 32  # a label and the three planes of an image


def cifar10() -> Images:
    """Return CIFAR-10: lossless if a lossless copy is at hand, else as JPEG."""
    # Looked for below `NETWEIGHT_DATA`: cifar10 (the official binary version, `data_batch_1.bin` and so on), then
    # cifar10_jpeg (parquet files with columns img and label); then on the hub. Decoded pictures are cached.
    # Source: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
    mean, std = CIFAR_MEAN_STD
    binary, parquet = local_folder("cifar10"), local_folder("cifar10_jpeg")
    if binary is not None and len(files := sorted(binary.rglob("*_batch*.bin"))) == 6:
        train, test = _binary(files[:5]), _binary(files[5:])
        return Images("cifar10", train, test, CIFAR_CLASSES, mean=mean, std=std)
    if parquet is not None:
        return _parquet(parquet)
    holding = "the official binary version, data_batch_1.bin to data_batch_5.bin and test_batch.bin"
    splits = from_hub("uoft-cs/cifar10", "train", "test", name="cifar10", folder="cifar10", holding=holding)
    return from_rows("cifar10", splits[0], splits[1], "img")


def from_rows(
    name: str,
    train: Any,
    test: Any,
    image_column: str,
    mean_std: tuple[tuple[float, ...], tuple[float, ...]] = CIFAR_MEAN_STD,
) -> Images:
    """Decode splits of the hub with the classes of CIFAR-10, through the cache."""
    # The names of the files of a data set in the hub's cache hold its revision; what lies in memory has none.
    key = [[file["filename"] for file in split.cache_files] for split in (train, test)]
    feature = module("datasets", f"Decoding {name}", "federated").Image(decode=False)
    splits = [split.cast_column(image_column, feature) for split in (train, test)]
    encoded = [(list(split[image_column]), list(split["label"])) for split in splits]
    return decoded(name, key if all(key) else None, encoded[0], encoded[1], mean_std)


def decoded(
    name: str,
    key: Any,
    train: tuple[list[Any], list[int]],
    test: tuple[list[Any], list[int]],
    mean_std: tuple[tuple[float, ...], tuple[float, ...]] = CIFAR_MEAN_STD,
) -> Images:
    """Decode encoded pictures, or take them from the cache."""

    def make() -> dict[str, Tensor]:
        numbered = [[(f"Image {n} of {name}", item) for n, item in enumerate(part[0])] for part in (train, test)]
        images = decode_splits(numbered, of=name)
        return {"train": images[0].contiguous(), "test": images[1].contiguous()}

    tensors = make() if key is None else cached(name, key, make)
    labels = [torch.tensor(part[1], dtype=torch.int64) for part in (train, test)]
    splits = [(tensors["train"], labels[0]), (tensors["test"], labels[1])]
    return Images(name, splits[0], splits[1], CIFAR_CLASSES, mean=mean_std[0], std=mean_std[1])


def _parquet(folder: Path) -> Images:
    """Read the parquet files of a JPEG copy."""
    parquet = module("pyarrow.parquet", "Reading CIFAR-10 from parquet files", "federated")
    files = [sorted(folder.glob(f"{split}-*.parquet")) for split in ("train", "test")]
    if not all(files):
        raise CorruptBlob(f"{folder} lacks train-*.parquet or test-*.parquet.", cure="Put the missing files there.")
    splits = []
    for split in files:
        tables = [parquet.read_table(file, columns=["img", "label"]).to_pydict() for file in split]
        splits.append(([row for t in tables for row in t["img"]], [label for t in tables for label in t["label"]]))
    return decoded("cifar10-jpeg", [[digest_file(file) for file in split] for split in files], splits[0], splits[1])


def _binary(files: list[Path]) -> tuple[Tensor, Tensor]:
    """Read files of the official binary version."""
    for file in files:
        if file.stat().st_size % _RECORD:
            raise CorruptBlob(f"{file} is not made of records of {_RECORD} bytes.", cure="Fetch it again.")
    records = torch.from_numpy(np.concatenate([np.fromfile(file, np.uint8) for file in files]).reshape(-1, _RECORD))
    return records[:, 1:].reshape(-1, 3, 32, 32).contiguous(), records[:, 0].long()


_CINIC_MEAN_STD = ((0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587))


def cinic10() -> Images:
    """Return CINIC-10, its train and test splits; the validation split is left out."""
    # Looked for below `NETWEIGHT_DATA`/cinic10 (the official release, unpacked: train/airplane/….png), then on the hub.
    # Decoded pictures are cached.
    # Source: Darlow, Crowley, Antoniou, Storkey, arXiv 1810.03505; mean and deviation are theirs.
    folder = local_folder("cinic10")
    if folder is None or not all((folder / split).is_dir() for split in ("train", "test")):
        holding = "the official release, unpacked: train/airplane/….png"
        splits = from_hub("flwrlabs/cinic10", "train", "test", name="cinic10", folder="cinic10", holding=holding)
        return from_rows("cinic10", splits[0], splits[1], "image", _CINIC_MEAN_STD)
    key: list[list[list[str | int]]] = []
    parts: list[tuple[list[Any], list[int]]] = []
    for split in ("train", "test"):
        found = pictures_below(folder / split)
        files = [file for own in found.values() for file in own]
        key.append([[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files])
        parts.append((files, [CIFAR_CLASSES.index(name) for name, own in found.items() for _ in own]))
    return decoded("cinic10", key, parts[0], parts[1], _CINIC_MEAN_STD)


def crop_and_flip(
    images: Tensor, generator: torch.Generator, *, padding: int = 4, fill: Tensor | float = 0.0
) -> Tensor:
    """Shift every image at random by up to `padding` pixels each way and mirror every other one, left to right."""
    # Source: HyperFL (arXiv 2412.07187) for CIFAR-10 and CINIC-10; the usual augmentation since ResNet.
    if images.ndim != 4 or padding < 0:
        raise UsageError(
            f"Images of shape {tuple(images.shape)} cannot be cropped with padding {padding}.",
            cure="Give shape (n, channels, height, width) and a padding of at least 0.",
        )
    count, channels, height, width = images.shape
    value = torch.as_tensor(fill, dtype=images.dtype, device=images.device)
    padded = F.pad(images, [padding] * 4)
    if bool((value != 0).any()):
        inside = F.pad(torch.ones(1, 1, height, width, dtype=torch.bool, device=images.device), [padding] * 4)
        padded = torch.where(inside, padded, value.expand(channels, 1, 1))
    draw = torch.randint(0, 2 * padding + 1, (2, count), generator=generator, device=generator.device)
    flip = torch.rand(count, generator=generator, device=generator.device) < 0.5
    draw, flip = draw.to(images.device), flip.to(images.device)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)
    crops = windows[torch.arange(count, device=images.device), :, draw[0], draw[1]]
    return torch.where(flip.view(-1, 1, 1, 1), crops.flip(-1), crops)
