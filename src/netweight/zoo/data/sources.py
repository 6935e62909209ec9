"""Where data sets come from: folders below `NETWEIGHT_DATA`, else the Hugging Face hub; and the errors when neither is.

Called by the loaders of single data sets.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from netweight.errors import MissingExtra

__all__ = ["from_hub", "local_folder", "missing", "module"]


def local_folder(*names: str) -> Path | None:
    """Return the first of some folders that exists below `NETWEIGHT_DATA`; None if the variable is not set or none is.

    Args:
        names: Folder names, the preferred one first.
    """
    root = os.environ.get("NETWEIGHT_DATA")
    folders = [Path(root) / name for name in names] if root else []
    return next((folder for folder in folders if folder.is_dir()), None)


def missing(name: str, folder: str, holding: str, because: str = "") -> MissingExtra:
    """Make the error for a data set that is nowhere.

    Args:
        name: The data set.
        folder: Its folder below `NETWEIGHT_DATA`.
        holding: The files that the folder should hold.
        because: Why another source failed, as a sentence.
    """
    root = os.environ.get("NETWEIGHT_DATA")
    where = f"NETWEIGHT_DATA ({root}) holds no {folder}/" if root else "NETWEIGHT_DATA is not set"
    return MissingExtra(
        f"The data set {name} is not at hand: {where}." + (f" {because}" if because else ""),
        cure=f'Set NETWEIGHT_DATA to a folder with {folder}/ ({holding}), go online, or use load("digits").',
    )


def module(name: str, purpose: str, extra: str) -> ModuleType:
    """Import an optional library.

    Args:
        name: Its import name.
        purpose: What it is needed for, as the beginning of a sentence.
        extra: The extra of netweight that it comes with.

    Raises:
        MissingExtra: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtra(
            f"{purpose} needs {name.partition('.')[0]}, which is not installed.",
            cure=f'Run: pip install "netweight[{extra}]"',
        ) from error


def from_hub(repository: str, *splits: str, name: str, folder: str, holding: str) -> list[Any]:
    """Fetch splits of a data set from the Hugging Face hub, or from its cache on this machine.

    Args:
        repository: For example "zalando-datasets/fashion_mnist".
        splits: Names of its splits.
        name: Our name of the data set, for the error.
        folder: Its folder below `NETWEIGHT_DATA`, for the error.
        holding: The files that the folder should hold, for the error.

    Returns:
        One `datasets.Dataset` per split.

    Raises:
        MissingExtra: `datasets` is not installed, or the hub is out of reach and its cache is empty.
    """
    datasets = module("datasets", f"Fetching {name} from the Hugging Face hub", "federated")
    try:
        return [datasets.load_dataset(repository, split=split) for split in splits]
    except (OSError, ValueError) as error:
        because = f"The hub's {repository} could not be fetched either ({error})."
        raise missing(name, folder, holding, because) from error
