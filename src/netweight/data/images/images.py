"""`Images`: a labelled image data set as plain tensors, and the way from pixels to what a model sees and back.

Every loader of `netweight.data.images` returns one; `netweight.methods.federate.partition` splits it among clients. A
user's folder has one subfolder per class, below `train` and `test` or without a split. Public
ones come from folders below `NETWEIGHT_DATA`, else from the Hugging Face hub.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, final

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from netweight.core.atomic_writes import whole_file
from netweight.core.digests import digest_config, digest_tensor
from netweight.core.environment import cache_folder
from netweight.core.lazy import library
from netweight.core.names import not_found
from netweight.core.seeds import torch_generator
from netweight.data.images.pictures import Fit, decode_pictures, picture_files
from netweight.data.images.repeated_pictures import repeated_pictures
from netweight.errors import MissingExtra, NetweightError, UsageError


def local_folder(*names: str) -> Path | None:
    """The first of some folders that exists below `NETWEIGHT_DATA`; None if the variable is not set or none is."""
    root = os.environ.get("NETWEIGHT_DATA")
    folders = [Path(root) / name for name in names] if root else []
    return next((folder for folder in folders if folder.is_dir()), None)


def missing(name: str, folder: str, holding: str, because: str = "") -> MissingExtra:
    """Make the error for a data set that is nowhere."""
    root = os.environ.get("NETWEIGHT_DATA")
    where = f"NETWEIGHT_DATA ({root}) contains no {folder}/" if root else "NETWEIGHT_DATA is not set"
    return MissingExtra(
        f"The data set {name} was not found: {where}." + (f" {because}" if because else ""),
        cure=f'Set NETWEIGHT_DATA to a folder with {folder}/ ({holding}), go online, or use load("digits").',
    )


def from_hub(repository: str, *splits: str, name: str, folder: str, holding: str) -> list[Any]:
    """Fetch splits of a data set from the Hugging Face hub, or from its cache on this machine."""
    datasets = library("datasets", f"Fetching {name} from the Hugging Face hub", "federated")
    try:
        return [datasets.load_dataset(repository, split=split) for split in splits]
    except (OSError, ValueError) as error:
        because = f"The hub's {repository} could not be fetched either ({error})."
        raise missing(name, folder, holding, because) from error


def cached(name: str, key: Any, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return tensors from the cache, or make them and keep them there."""
    pillow = library("PIL", "Decoding pictures", "federated").__version__
    file = cache_folder() / f"{name}-{digest_config([key, pillow]).partition(':')[2]}.safetensors"
    if file.is_file():
        try:
            return safetensors.torch.load_file(file)
        except (OSError, safetensors.SafetensorError) as error:
            warnings.warn(f"{file} is damaged and is written again: {error}", stacklevel=2)
    tensors = make()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(file, overwrite=True) as output:
            output.write(safetensors.torch.save(tensors))
    except (OSError, NetweightError) as error:
        # The disk may be full or read-only, or another process may write the same file.
        warnings.warn(f"Decoded pictures could not be stored in {file.parent}: {error}", stacklevel=2)
    return tensors


# Mean and standard deviation of MNIST's pixels, with which HyperFL normalizes Fashion-MNIST and EMNIST too.
MNIST_MEAN_STD = ((0.1307,), (0.3081,))

# Names of folders of splits, in any case.
_TRAIN = ("train", "training")
_TEST = ("test", "testing", "val", "valid", "validation")

# Images converted to floating point at a time when statistics are taken.
_BLOCK = 8192


@final
@dataclass(frozen=True)
class Images:
    """A labelled image data set."""

    name: str
    """Name of the data set, for example "fashion-mnist". The name of a substitute shows that it is one, as
    "cifar10-jpeg" does.
    """
    train: tuple[Tensor, Tensor]
    """Images, uint8 of shape `(n, channels, height, width)`, and their labels, int64 of shape `(n,)`."""
    test: tuple[Tensor, Tensor]
    """The same of the test images."""
    classes: tuple[str, ...]
    """Name of each class; labels count from 0."""
    _: KW_ONLY
    writers: tuple[Tensor, Tensor] | None = None
    """Writers of the train and the test images, int64 of shape `(n,)`, where they are known."""
    mean: tuple[float, ...]
    """Per channel, of pixels in [0, 1]: what `normalized` takes away."""
    std: tuple[float, ...]
    """Per channel, of pixels in [0, 1]: what `normalized` divides by."""
    digest: str = ""
    """Digest of all images, labels and writers; made when it is not given."""
    remarks: tuple[str, ...] = ()
    """Decisions of the reader of pictures, and oddities of some, in whole sentences."""

    def __post_init__(self) -> None:
        """Check the parts and take the digest."""
        for part, (pixels, labels) in (("train", self.train), ("test", self.test)):
            self._check(part, pixels, labels)
        if self.train[0].shape[1:] != self.test[0].shape[1:]:
            shapes = " and ".join(str(tuple(pixels.shape[1:])) for pixels, _ in (self.train, self.test))
            raise UsageError(f"The train and test images of {self.name} have shapes {shapes}.", cure="Resize them.")
        if not len(self.mean) == len(self.std) == self.shape[0] or min(self.std) <= 0:
            raise UsageError(
                f"{self.name} has {self.shape[0]} channels; mean {self.mean} and std {self.std} do not fit.",
                cure="Give one mean and one positive std per channel.",
            )
        if self.writers is not None and [len(part) for part in self.writers] != [len(self.train[1]), len(self.test[1])]:
            raise UsageError(f"{self.name} does not have one writer for each image.", cure="Give one per image.")
        if not self.digest:
            tensors = (*self.train, *self.test, *(self.writers or ()))
            object.__setattr__(self, "digest", digest_config([[list(t.shape), digest_tensor(t)] for t in tensors]))

    def _check(self, part: str, pixels: Tensor, labels: Tensor) -> None:
        """Check one split's dtypes, shapes and labels."""
        where = f"The {part} split of {self.name}"
        if pixels.dtype != torch.uint8 or pixels.ndim != 4:
            raise UsageError(
                f"{where} has images of {pixels.dtype} and shape {tuple(pixels.shape)}.",
                cure="Give uint8 of shape (n, channels, height, width).",
            )
        if labels.dtype != torch.int64 or labels.shape != pixels.shape[:1]:
            raise UsageError(
                f"{where} has labels of {labels.dtype} and shape {tuple(labels.shape)} for {len(pixels)} images.",
                cure="Give int64 of shape (n,).",
            )
        if not len(labels):
            raise UsageError(f"{where} is empty.", cure="Give at least one image.")
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= len(self.classes):
            raise UsageError(
                f"{where} has labels from {low} to {high} and there are {len(self.classes)} classes.",
                cure="Count labels from 0, and name every class.",
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        channels, height, width = self.train[0].shape[1:]
        return channels, height, width

    @property
    def black(self) -> Tensor:
        """Normalized value of black, float32 of shape `(channels, 1, 1)`, with which `crop_and_flip` pads."""
        return self.normalized(torch.zeros(1, self.shape[0], 1, 1, dtype=torch.uint8))[0]

    def normalized(self, pixels: Tensor) -> Tensor:
        """Return what a model sees of some images: `(pixels / 255 − mean) / std`, float32, same shape."""
        mean, std = self._channel(self.mean, pixels), self._channel(self.std, pixels)
        return pixels.to(torch.float32).div_(255).sub_(mean).div_(std)

    def pixels(self, inputs: Tensor) -> Tensor:
        """Return the images in [0, 1] behind normalized inputs: the inverse of `normalized`, differentiable."""
        return inputs * self._channel(self.std, inputs) + self._channel(self.mean, inputs)

    @staticmethod
    def _channel(values: tuple[float, ...], like: Tensor) -> Tensor:
        dtype = like.dtype if like.is_floating_point() else torch.float32
        return torch.tensor(values, dtype=dtype, device=like.device).view(-1, 1, 1)


def measured_mean_std(pixels: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Measure mean and standard deviation per channel of pixels in [0, 1], rounded to four places."""
    count = pixels.numel() / pixels.shape[1]
    total = torch.zeros(2, pixels.shape[1], dtype=torch.float64)
    for block in torch.split(pixels, _BLOCK):
        values = block.double().div_(255)
        total += torch.stack([values.sum((0, 2, 3)), values.square().sum((0, 2, 3))])
    mean, square = total / count
    deviation = (square - mean.square()).clamp_min(0).sqrt()
    rounded = [round(value, 4) for value in deviation.tolist()]
    return tuple(round(value, 4) for value in mean.tolist()), tuple(value or 1.0 for value in rounded)


def load_folder(
    path: str | Path,
    *,
    size: tuple[int, int] | None = None,
    fit: Fit = "stretch",
    test_share: float = 0.2,
    seed: int = 0,
) -> Images:
    """Load pictures, each from the subfolder of its class.

    Args:
        path: A folder with a subfolder for each class, or with `train` and `test` (or `val`) that have them; without
            `test`, pictures of `train` are held out.
        size: Height and width that all pictures are brought to; without it they must have one size.
        fit: How pictures of another shape are brought to that size; see `pictures`.
        test_share: Share of the pictures of each class that are test pictures where the folder has no split.
        seed: Seed of that choice.

    Returns:
        The data set; what was decided in reading it is in its `remarks`.

    Raises:
        UsageError: The folder is not of this form, or a picture cannot be read.
    """
    root = Path(path)
    if not root.is_dir():
        raise UsageError(f"{root} is not a folder.", cure="Give a folder with a subfolder for each class.")
    given, remarks = _splits(root)
    splits = []
    for part in dict.fromkeys((root, *given)):
        if strays := picture_files(part, below=False)[0]:
            remarks.append(
                f"{part} contains pictures outside of the folders of its classes, which were left out: {len(strays)}, "
                f"such as {strays[0].name}."
            )
    for part in given:
        pictures, others = pictures_below(part)
        splits.append(pictures)
        if others:
            remarks.append(f"{len(others)} files of {part} are not pictures and were left out, such as {others[0]}.")
    classes = tuple(splits[0])
    only_tested = sorted(set(splits[-1]) - set(classes))
    if only_tested:
        raise UsageError(
            f"{given[-1]} has classes that {given[0]} does not have: {only_tested[:5]}.",
            cure="Add them, or remove them.",
        )
    files = [[file for own in part.values() for file in own] for part in splits]
    labels = [torch.tensor([classes.index(name) for name, own in part.items() for _ in own]) for part in splits]
    named = [[(str(file), file) for file in part] for part in files]
    decoded = decode_pictures(named, of=str(root), size=size, fit=fit)
    images, remarks, names = list(decoded.splits), [*remarks, *decoded.remarks], [[*map(str, own)] for own in files]
    if len(splits) == 1:
        rows = split_off(labels[0], test_share, seed=seed)
        if not len(rows[1]):
            raise UsageError(
                f"Each class of {root} has one picture, so that none can be held out to measure the accuracy.",
                cure="Add pictures, or put pictures for the test into a folder `test` beside a folder `train`.",
            )
        images, labels = [images[0][own] for own in rows], [labels[0][own] for own in rows]
        names = [[names[0][row] for row in own.tolist()] for own in rows]
    untested = [name for number, name in enumerate(classes) if not bool((labels[1] == number).any())]
    if untested:
        remarks.append(
            f"{len(untested)} of {len(classes)} classes have no test picture, such as {untested[0]!r}: the accuracy "
            "does not cover them."
        )
    remarks += repeated_pictures(images, labels, names, classes)
    mean, std = measured_mean_std(images[0])
    # The whole path is never the name of a public data set, some of which are divided as in a paper.
    return Images(
        str(root.resolve()), (images[0], labels[0]), (images[1], labels[1]), classes, mean=mean, std=std,
        remarks=tuple(remarks),
    )  # fmt: skip


def _splits(root: Path) -> tuple[list[Path], list[str]]:
    """Return the folders of train and test pictures, or one folder to be split, and remarks on what was not read.

    A folder "train" beside folders of other names is a class like them.
    """
    entries = {entry.name.lower(): entry for entry in _folders(root)}
    train = next((entries[name] for name in _TRAIN if name in entries), None)
    tests = [entries[name] for name in _TEST if name in entries]
    if set(entries) <= {*_TRAIN, *_TEST} and tests and train is None:
        raise UsageError(
            f"{root} has {tests[0].name} and no folder of training pictures.",
            cure=f"Add {root / 'train'}, or name a folder with a subfolder for each class.",
        )
    if train is None or (not tests and len(entries) > 1):
        return [root], []
    unread = [entry.name for entry in entries.values() if entry not in (train, *tests[:1])]
    remarks = [f"Read were {' and '.join(each.name for each in (train, *tests[:1]))} of {root}, and not "
               f"{', '.join(unread)}."] if unread else []  # fmt: skip
    return [train, *tests[:1]], remarks


def refuse_one_class(root: Path, classes: Sequence[str]) -> None:
    """Refuse a folder with pictures of one class, which nothing could be learned from; it may lie around the classes.

    Args:
        root: The folder, as `load_folder` takes it.
        classes: The classes that were found in it.

    Raises:
        UsageError: There is one class.
    """
    if len(classes) > 1:
        return
    folder = _splits(root)[0][0] / classes[0]
    inner = [entry.name for entry in _folders(folder)]
    held = f", with the subfolders {', '.join(inner[:3])}" if inner else ""
    raise UsageError(
        f"{folder.parent} has one subfolder, {classes[0]!r}{held}: a classifier needs at least two classes.",
        cure=f"Name the folder with a subfolder for each class{f': {folder}' if inner else ''}.",
    )


def _folders(folder: Path) -> list[Path]:
    """List the folders in a folder, in the order of their names, but for hidden ones."""
    return sorted(
        entry for entry in folder.iterdir()
        if entry.is_dir() and not entry.name.startswith(".") and entry.name != "__MACOSX"
    )  # fmt: skip


def pictures_below(folder: Path) -> tuple[dict[str, list[Path]], list[Path]]:
    """List the pictures of each class, in sorted order, and files among them that are none."""
    classes = _folders(folder)
    listed = {entry.name: picture_files(entry) for entry in classes}
    by_class = {name: pictures for name, (pictures, _) in listed.items()}
    empty = [name for name, files in by_class.items() if not files]
    if not by_class or empty:
        what = f"contains no picture in {empty[:5]}" if empty else "contains no subfolder"
        raise UsageError(f"{folder} {what}.", cure="Put pictures, such as PNG or JPEG, into one subfolder per class.")
    return by_class, [file for _, others in listed.values() for file in others]


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
    fit: Fit = "stretch",
    classes: Sequence[str] | None = None,
    mean_std: MeanStd | None = None,
    test_share: float = 0.2,
    seed: int = 0,
) -> Images:
    """Turn a `datasets.Dataset`, or anything with rows that are mappings, into plain tensors."""
    splits = [rows for rows in (train, test) if rows is not None]
    for rows in splits:
        _check_columns(rows, (image_column, label_column, *((writer_column,) if writer_column else ())), name)
    labels = [_labels(rows, label_column, name, named=classes is None) for rows in splits]
    names = tuple(classes) if classes is not None else _class_names(train, label_column, labels[0])
    targets = [_targets(own, names, name) for own in labels]
    pictures = [
        [(f"Row {row} of {part}", picture) for row, picture in enumerate(_undecoded(rows, image_column))]
        for rows, part in zip(splits, (name, f"the test rows of {name}"), strict=False)
    ]
    decoded = decode_pictures(pictures, of=name, size=size, fit=fit)
    images = list(decoded.splits)
    writers = _writers([list(rows[writer_column]) for rows in splits]) if writer_column else None
    called = [[row for row, _ in own] for own in pictures]
    if test is None:
        rows = split_off(targets[0], test_share, seed=seed)
        images, targets = [images[0][own] for own in rows], [targets[0][own] for own in rows]
        writers = [writers[0][own] for own in rows] if writers else None
        called = [[called[0][row] for row in own.tolist()] for own in rows]
    remarks = (*decoded.remarks, *repeated_pictures(images, targets, called, names))
    mean, std = mean_std or measured_mean_std(images[0])
    split = [(images[part], targets[part]) for part in (0, 1)]
    wrote = (writers[0], writers[1]) if writers else None
    return Images(name, split[0], split[1], names, writers=wrote, mean=mean, std=std, remarks=remarks)


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


def _check_columns(rows: Any, columns: Sequence[str], name: str) -> None:
    """Check that rows have the columns and are not empty."""
    names = list(getattr(rows, "column_names", ()))
    for column in columns:
        if column not in names:
            more = "" if names else "Pass a datasets.Dataset."
            raise not_found(f"{name} has no column {column!r}.", column, names, more)
    if not len(rows):
        raise UsageError(f"A split of {name} has no rows.", cure="Give at least one row.")


def _named_labels(rows: Any, column: str) -> tuple[str, ...]:
    """The names that rows give to their class numbers, in order; none if they do not name them."""
    return tuple(getattr(getattr(rows, "features", {}).get(column), "names", None) or ())


def _labels(rows: Any, column: str, name: str, *, named: bool) -> list[Any]:
    """The labels of rows; `named`: as names where the rows know them, since splits may number classes differently."""
    labels, names = list(rows[column]), _named_labels(rows, column) if named else ()
    odd = next((label for label in labels if not isinstance(label, str | int | float)), ...)
    if odd is not ...:
        raise UsageError(
            f"{name} has a row whose label, in the column {column!r}, is {odd!r}.",
            cure="Give each row one class, as text or a number, or leave the row out.",
        )
    return [names[label] if 0 <= label < len(names) else label for label in labels] if names else labels


def _class_names(rows: Any, column: str, labels: list[Any]) -> tuple[str, ...]:
    """Name the classes: by the column's feature where that knows, else by the labels that occur."""
    if names := _named_labels(rows, column):
        return names
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
