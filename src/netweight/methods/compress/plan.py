"""What to do with each file of a model folder, found out, with all problems, before anything is written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal, final

from netweight.core.bounded_json import is_text
from netweight.errors import CorruptBlob, NetweightError, UnsafeInput, Unsupported, UsageError
from netweight.methods.compress.folder_format import (
    ADAPTER_CONFIG,
    MANIFEST,
    MODEL_CONFIG,
    check_place,
    clashing,
    is_index,
    leads_out,
    lies_in_diffusers_model,
    stored_name,
    variant_of,
)
from netweight.methods.compress.settings import CompressSettings
from netweight.store.reader import weight_map
from netweight.store.safetensors import KEY, is_pickle, read_header

Role = Literal["weights", "index", "config", "other"]
_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
# What trainers leave beside weights: pickles, but not weights. They are carried over as bytes and never opened.
_NOT_WEIGHTS = ("training_args.bin", "optimizer*", "scheduler*", "scaler*", "rng_state*", "random_states*")


@final
@dataclass(frozen=True)
class PlannedFile:
    """One file and what becomes of it."""

    path: str  # its path within the folder, with slashes
    role: Role  # "config" is the configuration of weights beside it
    stored: str  # its path in the compressed folder
    size: int  # its size in bytes
    mtime_ns: int  # when it was last changed


@final
@dataclass(frozen=True)
class FolderPlan:
    """What becomes of a folder."""

    items: tuple[PlannedFile, ...]  # the files to take, in order
    folders: tuple[str, ...]  # its empty folders
    left_out: tuple[str, ...]  # files left out by `variant` or `exclude`


def make_plan(source: Path, settings: CompressSettings) -> FolderPlan:
    """Look at every file of a model folder and decide what becomes of it."""
    # All problems are reported at once; the gravest gives the error its type.
    files, folders = _walk(source)
    taken = [path for path in files if not any(fnmatch(path, pattern) for pattern in settings.exclude)]
    if settings.variant is not None:
        taken = _of_variant(taken, settings.variant, source)
    problems = [problem for path in taken if (problem := _problem(source, path)) is not None]
    if not problems and not any(path.endswith(".safetensors") for path in taken):
        problems.append(UsageError(f"{source} holds no safetensors weights.", cure="Check the path."))
    if problems:
        raise _joined(problems)
    items, kept = tuple(_items(source, taken)), set(taken)
    if clash := clashing([*folders, *(item.stored for item in items)]):
        raise UsageError(f"Several files of {source} would be stored as {clash}.", cure="Exclude one of them.")
    return FolderPlan(items, tuple(folders), tuple(path for path in files if path not in kept))


def _walk(source: Path) -> tuple[list[str], list[str]]:
    """List all files, and all empty folders, by their paths within `source`."""
    files, folders, problems = [], [], []
    for folder, names, leaves in os.walk(source, onerror=_raise):
        names.sort()
        here = Path(folder)
        if not names and not leaves and here != source:
            folders.append(here.relative_to(source).as_posix())
        links = [here / name for name in names if (here / name).is_symlink()]
        problems += [leads_out(path) for path in links]
        files += [(here / leaf).relative_to(source).as_posix() for leaf in sorted(leaves)]
    if problems:
        raise _joined(problems)
    return files, folders


def _raise(error: OSError) -> None:
    raise UsageError(
        f"{error.filename} could not be read ({error.strerror}).", cure="Check its permissions."
    ) from error


def _of_variant(paths: list[str], variant: str, source: Path) -> list[str]:
    """Drop weights and indexes of other variants from each folder that has this one."""
    weights = [path for path in paths if path.endswith(".safetensors") or is_index(Path(path).name)]
    having = {Path(path).parent for path in weights if variant_of(Path(path).name) == variant}
    if not having:
        known = sorted({found for path in weights if (found := variant_of(Path(path).name)) is not None})
        raise UsageError(
            f"{source} holds no weights of variant {variant!r}.",
            cure=f"It has {', '.join(known)}." if known else "It has no variants: leave the variant out.",
        )
    dropped = {p for p in weights if Path(p).parent in having and variant_of(Path(p).name) != variant}
    return [path for path in paths if path not in dropped]


def _problem(source: Path, path: str) -> NetweightError | None:
    """Say why a file cannot be taken; None if it can."""
    file = source / path
    try:
        check_place(source, file)
        if not is_text(path):
            raise UsageError(f"{file!r} has a name that is not UTF-8.", cure="Rename or exclude it.")
        if path == MANIFEST:
            raise UsageError(f"{source} is compressed already.", cure="Decompress it first.")
        if path.endswith(".safetensors"):
            if KEY in read_header(file).metadata:
                raise UsageError(f"{file} is compressed already.", cure="Decompress it first.")
        elif is_index(file.name):
            _check_index(file)
        elif _is_pickled_weights(file):
            raise UnsafeInput(
                f"{file} is a pickle, which can run code when opened.",
                cure="If safetensors weights lie beside it, leave it out (--exclude); else load it where you trust it "
                "and save it again: model.save_pretrained(folder), or safetensors.torch.save_file(tensors, path).",
            )
    except NetweightError as error:
        return error
    except OSError as error:
        return UsageError(f"{file} could not be read ({error.strerror}).", cure="Check its permissions.")
    return None


def _check_index(file: Path) -> None:
    for name in dict.fromkeys(weight_map(file).values()):
        if not (file.parent / name).is_file():
            raise CorruptBlob(f"{file} names the file {name}, which is missing.", cure="Fetch it again.")


def _is_pickled_weights(file: Path) -> bool:
    if file.suffix.lower() not in _PICKLES or any(fnmatch(file.name, pattern) for pattern in _NOT_WEIGHTS):
        return False
    with open(file, "rb") as content:
        return is_pickle(content.read(4096))


def _joined(problems: Sequence[NetweightError]) -> NetweightError:
    """One error for several problems, of the gravest one's type."""
    gravity = [UnsafeInput, CorruptBlob, Unsupported, UsageError]
    first = min(problems, key=lambda problem: gravity.index(type(problem)) if type(problem) in gravity else 9)
    if len(problems) == 1:
        return first
    others = "".join(f"\n- {problem}" for problem in problems)
    return type(first)(f"{len(problems)} problems:{others}")


def _items(source: Path, paths: list[str]) -> Iterator[PlannedFile]:
    with_weights = {Path(path).parent for path in paths if path.endswith(".safetensors")}
    for path in paths:
        file, parent = source / path, Path(path).parent
        role: Role = "other"
        stored = path
        if path.endswith(".safetensors") or is_index(file.name):
            role = "index" if is_index(file.name) else "weights"
            stored = (parent / stored_name(file.name, diffusers=lies_in_diffusers_model(file))).as_posix()
        elif file.name in (MODEL_CONFIG, ADAPTER_CONFIG) and parent in with_weights:
            role = "config"
        status = file.stat()
        yield PlannedFile(path, role, stored, status.st_size, status.st_mtime_ns)
