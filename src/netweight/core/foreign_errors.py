"""Failures of code of others, as errors that name the thing, the reason and a cure.

transformers, diffusers and tokenizers raise exceptions of any class for files that they did not expect, and they draw
weights at random that a checkpoint lacks. Whoever opens a model through them does it within `opening` and calls
`refuse_missing_weights`. Networks and judges that a user writes raise anything, too: they run within `running`.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from netweight.errors import MissingExtra, NetweightError, UnsafeInput, UsageError

# Largest length of another library's message within ours.
_MOST_LETTERS = 300


@contextmanager
def opening(path: str | Path, what: str, *, cure: str) -> Iterator[None]:
    """Turn any exception of another library in the block into an error of netweight.

    Args:
        path: The folder or file that is opened.
        what: The kind of thing that it should be, such as "a causal language model".
        cure: The advice to a person.

    Raises:
        UnsafeInput: The files need code of their own.
        MissingExtra: A library is missing that these files need.
        UsageError: They cannot be opened for another reason.
    """
    try:
        yield
    except NetweightError:
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise UnsafeInput(
                f"{path} cannot be opened as {what}: it needs program code beside its weights, and such code is not "
                "run here.",
                cure="Give a model of a family that the installed transformers or diffusers has itself, or install a "
                "newer version that has it.",
            ) from error
        if isinstance(error, ImportError):
            raise MissingExtra(
                f"{path} cannot be opened as {what}: {_reason(error)}", cure="Install the library that is named."
            ) from error
        raise UsageError(f"{path} cannot be opened as {what}: {_reason(error)}", cure=cure) from error


def refuse_missing_weights(path: str | Path, report: Mapping[str, Any], what: str, *, unused: bool = True) -> None:
    """Refuse a model of which the files lack weights: transformers draws these at random. Warn of unused ones.

    Args:
        path: The model's folder.
        report: What `from_pretrained` returns with `output_loading_info=True`.
        what: The kind of model that was opened.
        unused: Whether tensors are named that the model does not use.

    Raises:
        UsageError: A weight was not among the files, or had another shape.
    """
    missing = sorted(report.get("missing_keys", ()))
    others = sorted(report.get("unexpected_keys", ()))
    shapes = sorted(report.get("mismatched_keys", ()), key=str)
    cure = (
        "Fetch the model again, or save it once as transformers does (model.save_pretrained), with adapters merged and "
        "without wrappers such as torch.compile."
    )
    if shapes:
        name, stored, expected = shapes[0][:3]
        raise UsageError(
            f"The weight {name!r} of {path} has the shape {tuple(stored)} in the files, but "
            f"{tuple(expected)} according to its configuration.",
            cure=cure,
        )
    if missing:
        named = f"{missing[0]!r}" + (f" and {len(missing) - 1} others" if len(missing) > 1 else "")
        instead = f" The files contain {others[0]!r} and others instead, which {what} does not have." if others else ""
        raise UsageError(
            f"The files of {path} lack the weight {named}, without which a part of the model would have random "
            f"weights.{instead}",
            cure=cure,
        )
    if unused and others:
        warnings.warn(
            f"{path} contains {len(others)} tensors that {what} of its kind does not use, such as {others[0]!r}; a "
            "model that is written from it does not contain them.",
            stacklevel=3,
        )


@contextmanager
def running(what: str, *, cure: str = "Correct it; called in Python, it shows the whole reason.") -> Iterator[None]:
    """Turn any exception of a user's or another library's code in the block into an error that says where it arose.

    Args:
        what: What runs, such as "The judge 'mine:judge' of --judge".
        cure: The advice to a person.

    Raises:
        UsageError: The code raised an exception.
    """
    try:
        yield
    except (NetweightError, KeyboardInterrupt):
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise UsageError(
            f"{what} fails: {_reason(error)} ({Path(last.filename).name}, line {last.lineno}, in {last.name})",
            cure=cure,
        ) from error


def _reason(error: Exception) -> str:
    """Return the message of an error in one line, with its class where the message alone says little."""
    text = " ".join(str(error).split())
    plain = isinstance(error, OSError | ValueError | ImportError | RuntimeError) and " " in text
    text = text if plain else f"{type(error).__name__}: {text}"
    if len(text) > _MOST_LETTERS:
        return f"{text[:_MOST_LETTERS]} …"
    return text if text.endswith((".", "!", "?")) else f"{text}."
