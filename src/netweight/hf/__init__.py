"""Loaders of transformers and diffusers models, below the methods that work on them.

`fetch` is the only door to the Hugging Face hub: a model's id becomes a folder on this machine.
"""

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
    """Whether a text that is no path here looks like a model's id: `owner/name`, or `owner/name@revision`."""
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
        raise UsageError(f"{model} is no path here, and no model can have this id.", cure="Check the path.") from error
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
            f"{model} is no path here, and the hub could not be reached to fetch it ({type(error).__name__}).",
            cure="Check the path; or connect to the network (and unset HF_HUB_OFFLINE) to fetch it from the hub.",
        ) from error
