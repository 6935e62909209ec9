"""Where data sets come from: folders below `NETWEIGHT_DATA`, else the Hugging Face hub; and the errors when neither is.

Called by the loaders of single data sets.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from netweight.core.environment import cache_folder
from netweight.core.files import digest_config, whole_file
from netweight.core.lazy import library
from netweight.errors import MissingExtra, NetweightError, UsageError


def local_folder(*names: str) -> Path | None:
    """The first of some folders that exists below `NETWEIGHT_DATA`; None if the variable is not set or none is."""
    root = os.environ.get("NETWEIGHT_DATA")
    folders = [Path(root) / name for name in names] if root else []
    return next((folder for folder in folders if folder.is_dir()), None)


def missing(name: str, folder: str, holding: str, because: str = "") -> MissingExtra:
    """Make the error for a data set that is nowhere."""
    root = os.environ.get("NETWEIGHT_DATA")
    where = f"NETWEIGHT_DATA ({root}) holds no {folder}/" if root else "NETWEIGHT_DATA is not set"
    return MissingExtra(
        f"The data set {name} is not at hand: {where}." + (f" {because}" if because else ""),
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


def decode_splits(
    splits: Sequence[Sequence[tuple[str, Any]]], *, of: str, size: tuple[int, int] | None = None
) -> list[Tensor]:
    """Decode the pictures of one data set: all in gray if each of them is gray, else all in color."""
    # Two passes, since opening reads a header only and decoded pictures may be large.
    gray = all(_open(source, name).mode in ("1", "L") for split in splits for name, source in split)
    decoded = [[_decode(source, name, gray, size) for name, source in split] for split in splits]
    shapes = sorted({tuple(picture.shape[1:]) for split in decoded for picture in split})
    if len(shapes) > 1:
        sizes = ", ".join(f"{height}×{width}" for height, width in shapes[:4])
        raise UsageError(
            f"The pictures of {of} have {len(shapes)} sizes ({sizes}{', …' if len(shapes) > 4 else ''}).",
            cure="Pass size=(height, width) to resize them.",
        )
    if not all(decoded):
        raise UsageError(f"{of} has a split without pictures.", cure="Check what was passed.")
    return [torch.stack(split) for split in decoded]


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Turn what Pillow raises into an error that names the picture."""
    try:
        yield
    except (OSError, TypeError, ValueError, SyntaxError) as error:
        reason = str(error).rstrip(".")
        if "BytesIO" in reason:  # Pillow names what it was given, not what it is
            reason = "its bytes are of no known format"
        raise UsageError(
            f"{name} is no picture that Pillow can read: {reason}.", cure="Remove or repair it."
        ) from error


def _open(source: Any, name: str) -> Any:
    """Open a picture without decoding it."""
    image = library("PIL.Image", "Decoding pictures", "federated")
    if isinstance(source, Mapping):
        source = source.get("bytes") or source.get("path")
    with _naming(name):
        if isinstance(source, bytes):
            return image.open(io.BytesIO(source))
        if isinstance(source, str | Path):
            return image.open(io.BytesIO(Path(source).read_bytes()))
        return source if isinstance(source, image.Image) else image.fromarray(np.asarray(source, dtype=np.uint8))


def _decode(source: Any, name: str, gray: bool, size: tuple[int, int] | None) -> Tensor:
    """Decode a picture as uint8 of shape `(channels, height, width)`."""
    image = library("PIL.Image", "Decoding pictures", "federated")
    picture = _open(source, name)
    with _naming(name):
        if "A" in picture.getbands() or "transparency" in picture.info:
            picture = picture.convert("RGBA")
            picture = image.alpha_composite(image.new("RGBA", picture.size, "white"), picture)
        picture = picture.convert("L" if gray else "RGB")
        if size is not None and picture.size != size[::-1]:
            picture = picture.resize(size[::-1], image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(picture, dtype=np.uint8))
    return pixels.unsqueeze(0) if gray else pixels.permute(2, 0, 1)


def cached(name: str, key: Any, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return tensors from the cache, or make them and keep them there."""
    pillow = library("PIL", "Decoding pictures", "federated").__version__
    file = cache_folder() / f"{name}-{digest_config([key, pillow]).partition(':')[2]}.safetensors"
    if file.is_file():
        try:
            return safetensors.torch.load_file(file)
        except (OSError, safetensors.SafetensorError) as error:
            warnings.warn(f"{file} is damaged and is made again: {error}", stacklevel=2)
    tensors = make()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(file, overwrite=True) as output:
            output.write(safetensors.torch.save(tensors))
    except (OSError, NetweightError) as error:  # a full disk, no permission, another process that writes the same file
        warnings.warn(f"Decoded pictures could not be kept in {file.parent}: {error}", stacklevel=2)
    return tensors
