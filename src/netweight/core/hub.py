"""Models by path or by their id on the Hugging Face hub: the one place that fetches."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from netweight.core.lazy import extra
from netweight.core.weight_endings import FOREIGN, PICKLES
from netweight.errors import UsageError

_ID = re.compile(r"^[\w.-]+/[\w.-]+(@[\w./-]+)?$")
# Weights in formats that are never read here, often larger than all the rest.
_FOREIGN_WEIGHTS = [f"*{ending}" for ending in FOREIGN]
_PICKLES = [f"*{ending}" for ending in PICKLES]
_SHOWN = 3  # files that a message names


def is_hub_id(source: str) -> bool:
    """Return whether a text that is not a path here looks like a model's id: `owner/name`, or `owner/name@revision`."""
    return _ID.match(source) is not None and not Path(source).exists()


def fetch(model: str, *, exclude: Iterable[str] = (), pickles: bool = False) -> Path:
    """Fetch a model's safetensors weights and its other files into the hub's cache, or find them there.

    Args:
        model: Its id: "owner/name" or "owner/name@revision".
        exclude: Patterns of files that are not fetched.
        pickles: Fetch PyTorch checkpoints of a model that has no safetensors files, for a caller that opens them
            without running their code.

    Returns:
        The folder in the cache.

    Raises:
        UsageError: There is no such model or revision, it may not be read, the hub cannot be reached, or the model has
            no weights that can be read here.
    """
    with extra("llm", "Models on the hub need huggingface_hub"):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    name, _, revision = model.partition("@")
    ignored = [*_FOREIGN_WEIGHTS, *exclude]
    try:
        folder = Path(snapshot_download(name, revision=revision or None, ignore_patterns=[*ignored, *_PICKLES]))
        if not _matches(folder, ["*.safetensors"]) and pickles:
            snapshot_download(name, revision=revision or None, ignore_patterns=ignored)
    except HFValidationError as error:
        raise UsageError(
            f"{model} is not an existing path, and no model on the hub can have this id.", cure="Check the path."
        ) from error
    except GatedRepoError as error:
        raise UsageError(
            f"The model {name} is gated: its authors ask you to accept their terms.",
            cure="Accept the terms on the model's page, then run `hf auth login`.",
        ) from error
    except RepositoryNotFoundError as error:
        raise UsageError(
            f"There is no model {name} on the hub, or it is private.",
            cure="Check the id. If the model is private, run `hf auth login`.",
        ) from error
    except RevisionNotFoundError as error:
        raise UsageError(
            f"The model {name} on the hub has no revision {revision}.", cure="Give the name of a branch or a tag, or a "
            "commit."
        ) from error  # fmt: skip
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise UsageError(
            f"{model} is not an existing path, and the hub could not be reached ({type(error).__name__}).",
            cure="Check the path. If it is an id on the hub, connect to the network and unset HF_HUB_OFFLINE.",
        ) from error
    if not _matches(folder, ["*.safetensors", *(_PICKLES if pickles else [])]):
        raise _no_weights(name, revision or None, pickles=pickles)
    return folder


def _matches(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return [file for pattern in patterns for file in folder.rglob(pattern)]


def _no_weights(name: str, revision: str | None, *, pickles: bool) -> UsageError:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    patterns = [*_FOREIGN_WEIGHTS, *_PICKLES]
    try:
        files = [
            file for file in HfApi().list_repo_files(name, revision=revision)
            if any(fnmatch(file, pattern) for pattern in patterns)
        ]  # fmt: skip
    except (HfHubHTTPError, OSError):
        # The list of files only adds detail to the message.
        files = []
    other = f", but {', '.join(files[:_SHOWN])}" if files else ""
    formats = "safetensors files" + (" and no PyTorch checkpoints" if pickles else "")
    return UsageError(
        f"The model {name} on the hub has no {formats}{other}.",
        cure=f"Give a model or a revision ({name}@REVISION) that has safetensors files.",
    )


def local_model(given: str, *, exclude: Iterable[str] = (), pickles: bool = False) -> Path:
    """Return the file or folder of a model that is named by its path, or by its id on the Hugging Face hub.

    Args:
        given: A path, or an id such as "owner/name" or "owner/name@revision", whose files are fetched into the hub's
            cache or found there. What exists as a path is never looked up on the hub.
        exclude: Patterns of files that need not be fetched.
        pickles: Fetch PyTorch checkpoints of a model on the hub that has no safetensors files.

    Raises:
        UsageError: There is no such path, and it is not an id of a model on the hub that can be had from here.
    """
    path = Path(given).expanduser()
    if path.exists():
        return path
    if is_hub_id(given):
        return fetch(given, exclude=exclude, pickles=pickles)
    raise UsageError(
        f"There is no file or folder {given}.",
        cure="Give a folder or a file, or the id of a model on the hub: owner/name.",
    )
