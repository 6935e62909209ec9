"""Models by path or by their id on the Hugging Face hub: the one place that fetches."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from netweight.core.lazy import extra
from netweight.errors import UsageError

_ID = re.compile(r"^[\w.-]+/[\w.-]+(@[\w./-]+)?$")
# Weights in other formats than safetensors: never used here, often larger than all the rest.
_OTHER_WEIGHTS = ["*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.ot", "*.onnx", "*.onnx_data", "*.gguf"]


def is_hub_id(source: str) -> bool:
    """Return whether a text that is not a path here looks like a model's id: `owner/name`, or `owner/name@revision`."""
    return _ID.match(source) is not None and not Path(source).exists()


def fetch(model: str, *, exclude: Iterable[str] = ()) -> Path:
    """Fetch a model's safetensors weights and its other files into the hub's cache, or find them there."""
    with extra("llm", "Models on the hub need huggingface_hub"):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )
    name, _, revision = model.partition("@")
    try:
        ignored = [*_OTHER_WEIGHTS, *exclude]
        return Path(snapshot_download(name, revision=revision or None, ignore_patterns=ignored))
    except HFValidationError as error:
        raise UsageError(f"{model} is not a path here, and no model has such an id.", cure="Check the path.") from error
    except GatedRepoError as error:
        raise UsageError(
            f"The model {name} is gated.", cure="Accept its terms on the hub, then `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise UsageError(
            f"There is no model {name} on the hub that you may see.", cure="Check its id; log in if it is private."
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise UsageError(
            f"{model} is not a path here, and the hub could not be reached to fetch it ({type(error).__name__}).",
            cure="Check the path; or connect to the network (and unset HF_HUB_OFFLINE) to fetch it from the hub.",
        ) from error


def local_model(given: str, *, exclude: Iterable[str] = ()) -> Path:
    """Return the file or folder of a model that is named by its path, or by its id on the Hugging Face hub.

    Args:
        given: A path, or an id such as "owner/name" or "owner/name@revision", whose files are fetched into the hub's
            cache or found there. What exists as a path is never looked up on the hub.
        exclude: Patterns of files that need not be fetched.

    Raises:
        UsageError: There is no such path, and it is not an id of a model on the hub that can be had from here.
    """
    path = Path(given).expanduser()
    if path.exists():
        return path
    if is_hub_id(given):
        return fetch(given, exclude=exclude)
    raise UsageError(
        f"There is no file or folder {given}.",
        cure="Give a folder or a file, or the id of a model on the hub: owner/name.",
    )
