"""Format of a compressed folder: its manifest, its files, and how it refuses to be loaded without netweight.

`netweight.json` says what the folder holds and what it was made from, enough to restore every file:

{"format": "netweight-folder", "version": 1, "level": "default",
 "files": [{"path": "model.safetensors", "kind": "compressed", "stored": "model.net.safetensors", ...},
           {"path": "config.json", "kind": "rewritten", "stored": "config.json", "original": "...", ...},
           {"path": "vocab.txt", "kind": "carried", "stored": "vocab.txt", ...}],
 "folders": ["empty"], "left_out": [], "bytes_only": {}}

Where tensors are rounded, their files' entries say by how much, and "rounding" says how. "bytes_only" names folders of
weights that another method had quantized, with the reason: they must be decompressed before use.

Loaders in the wild warn about keys that they miss and go on with random weights. So that none of them does so with a
compressed folder, three things are changed, each of which alone stops a loader that heeds it (all tried, see
`tests/integration/test_without_netweight.py`):

1. **The weights go by another name**, `model.net.safetensors` for `model.safetensors`: a loader that looks for the
   usual name finds no weights and says so. Only inside a diffusers model's folder the names stay, since diffusers has
   no setting for another one, and stops at 2.
2. **The configuration says what to install.** The method that it names is a sentence, in `quant_method` of
   `quantization_config`, or in an adapter's `peft_type`. diffusers and peft refuse it and show it. transformers
   shows it in a warning, and fails on the weights that it does not find under their usual name;
   `quantization_config.weights` holds the real one, which the registered quantizer puts back in
   `update_attn_implementation`, before files are looked for.
3. **The weights' own metadata** hold what transformers up to 4.57 and diffusers' LoRA loader refuse and show (see
   `store/safetensors.py`).

Weights that another method has quantized (see `quantized.py`) are compressed as bytes alone. Their configuration stays
as it is, since it describes the model that comes back, all weights go by the other name, in diffusers models, too, so
that no loader finds them, and `DECOMPRESS_BEFORE_USE.txt` says what to do.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, Literal, Self, final

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from netweight.autoload import HINT
from netweight.codec import Precision
from netweight.codec.lossy import LOSSLESS_BITS
from netweight.core.bounded_json import MOST_INDEX, is_text, parse_json, read_object
from netweight.core.weight_endings import PICKLES
from netweight.errors import CorruptBlob, NetweightError, UnsafeInput, Unsupported, UsageError
from netweight.methods.compress.quantized import quantization_of
from netweight.methods.compress.settings import CompressSettings
from netweight.store.file_totals import Count, WeightTotals
from netweight.store.reader import weight_map
from netweight.store.safetensors import (
    KEY,
    Header,
    deflate_text,
    inflate_text,
    is_pickle,
    most_inflated,
    read_header,
)
from netweight.store.shards import refuse_missing_shards
from netweight.store.sources import TensorSource

MANIFEST = "netweight.json"
MODEL_CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
Kind = Literal["compressed", "rewritten", "carried"]

# What a person reads in a folder of which a part is of no use before it is decompressed.
NOTE = "DECOMPRESS_BEFORE_USE.txt"

_FORMAT, _VERSION = "netweight-folder", 1

_INDEX = re.compile(r"^(?P<stem>.+)\.safetensors\.index(?:\.(?P<variant>\w+))?\.json$")
_SHARD = r"-\d{5}-of-\d{5}"
_WEIGHTS = re.compile(rf"^.+?(?:\.(?P<before>\w+))?(?:{_SHARD})?(?:\.(?P<after>\w+))?\.safetensors$")


# ---- netweight.json --------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class FileEntry(WeightTotals):
    """One file of the original folder."""

    path: str
    """Path in the original folder, with slashes."""
    kind: Kind
    """`"compressed"` weights, a `"rewritten"` index or configuration, or `"carried"` over unchanged."""
    stored: str
    """Path in the compressed folder."""
    nbytes: Count
    """Size in the original folder, in bytes."""
    digest: str
    """Digest of its original content; of weights with rounded tensors, that of the decompressed file."""
    stored_nbytes: Count
    """Size in the compressed folder, in bytes."""
    stored_digest: str | None = None
    """Digest of its content in the compressed folder; None for compressed weights, which carry a digest per tensor."""
    original: str | None = None
    """The original content of a rewritten file, deflated, as base64; else None."""

    @classmethod
    def rewritten(cls, path: str, stored: str, original: bytes, *, digests: tuple[str, str], size: int) -> Self:
        """An entry for a file whose original content is kept."""
        return cls(path, "rewritten", stored, len(original), digests[0], size, digests[1], deflate_text(original))

    def to_json(self) -> dict[str, Any]:
        """Return what is not empty, the totals of weights last."""
        values = asdict(self)
        totals = {each.name for each in dataclasses.fields(WeightTotals)}
        ordered = sorted(values, key=lambda name: name in totals)
        return {name: values[name] for name in ordered if values[name]}

    def original_content(self) -> bytes:
        """The original content of a rewritten file."""
        try:
            return inflate_text(self.original or "", limit=min(self.nbytes + 1, most_inflated(self.original or "")))
        except ValueError as error:
            raise CorruptBlob(
                f"{MANIFEST}: the stored original content of {self.path} is damaged ({error}).",
                cure="Fetch the file again.",
            ) from error


@final
@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of `netweight.json`."""

    level: str
    """The codec's level."""
    files: tuple[FileEntry, ...]
    """All files of the original folder."""
    folders: tuple[str, ...] = ()
    """Empty folders of the original folder."""
    left_out: tuple[str, ...] = ()
    """Files of the original folder that were left out on request."""
    precision: Precision | None = None
    """Precision that tensors were rounded to; None if none was rounded, or if they had been rounded before."""
    bytes_only: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Folders, as paths within this one, whose weights another method quantized → evidence of the quantization. They
    are compressed as bytes, not as numbers.
    """

    def to_json(self) -> str:
        """Write the manifest."""
        fields = {
            "format": _FORMAT,
            "version": _VERSION,
            "level": self.level,
            "files": [file.to_json() for file in self.files],
            "folders": list(self.folders),
            "left_out": list(self.left_out),
            "bytes_only": dict(self.bytes_only),
            **({} if self.precision is None else {"rounding": asdict(self.precision)}),
        }
        return json.dumps(fields, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read and check the manifest of a compressed folder."""
        path = folder / MANIFEST
        if not path.is_file():
            raise UsageError(
                f"{folder} has no {MANIFEST}: it is not a folder that netweight compressed.", cure="Check the path."
            )
        try:
            fields = read_object(path, limit=MOST_INDEX)
            if fields["format"] != _FORMAT:
                raise ValueError(f"its format is {fields['format']!r}")
            if type(fields["version"]) is not int or fields["version"] != _VERSION:
                raise Unsupported(
                    f"{path} is of version {fields['version']!r}; this release reads version {_VERSION}.",
                    cure="Install a newer release of netweight.",
                )
            files = tuple(FileEntry(**{"stored_nbytes": 0, "nbytes": 0, **entry}) for entry in fields["files"])
            folders, left_out = (tuple(map(str, fields[key])) for key in ("folders", "left_out"))
            precision = Precision(**fields["rounding"]) if "rounding" in fields else None
            bytes_only = {str(at): str(reason) for at, reason in fields["bytes_only"].items()}
            manifest = cls(str(fields["level"]), files, folders, left_out, precision, bytes_only)
        except (UsageError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptBlob(f"{path} is damaged ({error!r}).", cure="Fetch the file again.") from error
        for name in (
            *manifest.folders,
            *(at for at in manifest.bytes_only if at != "."),
            *(name for file in files for name in (file.path, file.stored)),
        ):
            if not _inside(name):
                raise UnsafeInput(f"{path} points outside its folder: {name!r}.", cure="Do not use this model.")
        for names in (
            [*manifest.folders, *(file.path for file in files)],
            [MANIFEST, *(file.stored for file in files)],
        ):
            if clash := clashing(names):
                raise CorruptBlob(f"{path} has the path {clash!r} for several files.", cure="Fetch the file again.")
        return manifest

    @property
    def stored_names(self) -> set[str]:
        """The paths of all files that belong in the compressed folder."""
        return {MANIFEST, *(entry.stored for entry in self.files), *([NOTE] if self.bytes_only else [])}

    def note(self) -> str:
        """Say, for a person who opens the folder, which parts must be decompressed before use, and how."""
        parts = "\n".join(f"- {_part(at)} {reason}." for at, reason in self.bytes_only.items())
        return (
            "Decompress this folder before use\n\n"
            "netweight compressed the bytes of these quantized weights without loss. No program can open them in this "
            f"form:\n\n{parts}\n\n"
            "This command restores every file byte for byte:\n\n"
            "    netweight decompress THIS_FOLDER NEW_FOLDER\n"
        )

    def check_present(self, folder: Path) -> None:
        """Check that all stored files are there, and that none is a link to a place outside."""
        missing = [entry.stored for entry in self.files if not (folder / entry.stored).is_file()]
        if missing:
            raise CorruptBlob(
                f"{folder} is incomplete: {len(missing)} of its files are missing: {', '.join(missing[:5])}.",
                cure="Fetch them again.",
            )
        for entry in self.files:
            check_place(folder, folder / entry.stored)


def _part(at: str) -> str:
    return "The model" if at == "." else at


def clashing(names: Iterable[str]) -> str | None:
    """A path that occurs twice, or that is a folder of another one; None if there is none."""
    paths: set[str] = set()
    for name in names:
        if name in paths:
            return name
        paths.add(name)
    parents = {parent.as_posix() for name in paths for parent in PurePosixPath(name).parents}
    return min(paths & parents, default=None)


def check_place(root: Path, file: Path) -> None:
    """Refuse what is not a regular file, and links out of the folder, except into the blobs of a hub cache."""
    if not file.exists():
        raise UsageError(
            f"{file} is a broken link.", cure="Fetch the file to which it should point, or leave it out (--exclude)."
        )
    if not stat.S_ISREG(file.stat().st_mode):
        raise Unsupported(f"{file} is not a regular file.", cure="Remove or exclude it.")
    root = root.resolve()
    caches = (at.parent for at in root.parents if at.name == "snapshots" and (at.parent / "blobs").is_dir())
    if not file.resolve().is_relative_to(next(caches, root)):
        raise leads_out(file)


def leads_out(path: Path) -> UnsafeInput:
    """The error for a link to a place outside."""
    return UnsafeInput(
        f"{path} is a link that leads out of the folder.",
        cure="Replace it by the file to which it points, or leave it out (--exclude).",
    )


def _inside(name: str) -> bool:
    path = PurePosixPath(name)
    odd = path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name
    return bool(path.parts) and not odd


# ---- names and configurations ----------------------------------------------------------------------------------------


def is_index(name: str) -> bool:
    """Return whether a file name is that of an index of weights, e.g. `model.safetensors.index.json`."""
    return _INDEX.match(name) is not None


def variant_of(name: str) -> str | None:
    """The variant in the name of a weights file or index, `"fp16"` for `model.fp16.safetensors`, or None."""
    if (index := _INDEX.match(name)) is not None:
        return index["variant"]
    weights = _WEIGHTS.match(name)
    return None if weights is None else weights["before"] or weights["after"]


def stored_name(name: str, *, keeps_name: bool) -> str:
    """The name under which a weights file or an index is stored; `keeps_name` where diffusers is to find it."""
    if keeps_name:
        return name
    if (index := _INDEX.match(name)) is not None:
        variant = f".{index['variant']}" if index["variant"] else ""
        return f"{index['stem']}{variant}.net.safetensors.index.json"
    return f"{name.removesuffix('.safetensors')}.net.safetensors"


def lies_in_diffusers_model(file: Path) -> bool:
    """Return whether a weights file or index lies in a diffusers model's folder."""
    config = file.parent / MODEL_CONFIG
    return config.is_file() and is_diffusers_config(config.read_bytes())


def is_diffusers_config(content: bytes) -> bool:
    """Return whether the bytes are the `config.json` of a diffusers model."""
    return "_class_name" in (_json_object(content) or ())


def mark_config(name: str, content: bytes, weights: Iterable[str]) -> bytes | None:
    """Make a configuration refuse loaders that lack netweight; None if it is not a JSON object."""
    config = _json_object(content)
    if config is None:
        return None
    if name == ADAPTER_CONFIG:
        config["peft_type"] = HINT
        return _json_bytes(config)
    stored = stored_name(_main_weights(config, list(weights)), keeps_name="_class_name" in config)
    # A configuration of ours, of a model that was compressed in memory, holds settings for loading, which stay.
    own = config.get("quantization_config") or {}
    config["quantization_config"] = {**own, "quant_method": HINT, "version": 1, "weights": stored}
    # The plug-in puts this entry back.
    config.pop("transformers_weights", None)
    return _json_bytes(config)


def rewrite_index(content: bytes, *, keeps_names: bool, total_size: int) -> bytes:
    """Write the index of the compressed shards."""
    index = parse_json(content)
    about = index.get("metadata")
    index["metadata"] = {**(about if isinstance(about, dict) else {}), "total_size": total_size}
    index["weight_map"] = {
        f"{name}.net": stored_name(file, keeps_name=keeps_names) for name, file in index["weight_map"].items()
    }
    return _json_bytes(index)


def _main_weights(config: dict[str, Any], weights: list[str]) -> str:
    """The file or index that transformers would load: the configured one, else the usual ones, else the first."""
    usual = [config.get("transformers_weights"), "model.safetensors", "model.safetensors.index.json"]
    first = sorted(weights, key=lambda name: (not is_index(name), name))
    return next(name for name in [*usual, *first] if name in weights)


def _json_object(content: bytes) -> dict[str, Any] | None:
    # The file is a configuration or an index.
    if len(content) > MOST_INDEX:
        return None
    try:
        config = parse_json(content, most_values=0)
    except ValueError:
        return None
    return config if isinstance(config, dict) else None


def _json_bytes(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


# ---- what becomes of each file, found out, with all problems, before anything is written -----------------------------

Role = Literal["weights", "index", "config", "carried"]
# What trainers leave beside weights: pickles, but not weights. They are carried over as bytes and never opened.
_NOT_WEIGHTS = ("training_args.bin", "optimizer*", "scheduler*", "scaler*", "rng_state*", "random_states*")


@final
@dataclasses.dataclass(frozen=True)
class PlannedFile:
    """One file and what becomes of it."""

    path: str
    """Path within the folder, with slashes."""
    role: Role
    """"config" is the configuration of weights beside it."""
    stored: str
    """Path in the compressed folder."""
    size: int
    """Size in bytes."""
    mtime_ns: int
    """Time of the last change in nanoseconds since 1970."""


@final
@dataclasses.dataclass(frozen=True)
class FolderPlan:
    """Plan of a folder's compression."""

    items: tuple[PlannedFile, ...]
    """Files to compress or carry over, in order."""
    folders: tuple[str, ...]
    """Empty folders, as paths within the folder."""
    left_out: tuple[str, ...]
    """Files left out by `variant` or `exclude`."""
    bytes_only: Mapping[str, str]
    """Folders of quantized weights; see `Manifest.bytes_only`."""


def make_plan(
    source: Path, settings: CompressSettings, sources: Mapping[str, TensorSource] = MappingProxyType({})
) -> FolderPlan:
    """Decide what becomes of every file of a model folder, and of weights files that it lacks, which `sources` give."""
    # All problems are reported at once; the gravest gives the error its type.
    files, folders = _walk(source)
    files = sorted({*files, *sources})
    taken = [path for path in files if not any(fnmatch(path, pattern) for pattern in settings.exclude)]
    if settings.variant is not None:
        taken = _of_variant(taken, settings.variant, source)
    # Folder → headers of its files of weights.
    headers: dict[str, dict[str, Header]] = {}
    problems = [problem for path in taken if (problem := _problem(source, path, headers, sources)) is not None]
    problems += _missing_shards(source, files, taken)
    if not problems and not any(path.endswith(".safetensors") for path in taken):
        problems.append(UsageError(f"{source} contains no safetensors weights.", cure="Check the path."))
    if problems:
        raise _joined(problems)
    bytes_only = {
        at: reason for at, its in headers.items() if (reason := quantization_of(source / at, its)) is not None
    }
    if bytes_only and settings.mantissa_bits != LOSSLESS_BITS:
        at, reason = next(iter(bytes_only.items()))
        raise Unsupported(
            f"{source if at == '.' else source / at} {reason}: rounding would change the scales of all its weights.",
            cure="Leave mantissa_bits (--mantissa-bits) out: the bytes are then compressed without loss.",
        )
    items, planned = tuple(_items(source, taken, bytes_only, sources)), set(taken)
    stored = [*folders, *(item.stored for item in items), *([NOTE] if bytes_only else [])]
    if clash := clashing(stored):
        raise UsageError(f"Several files of {source} would be stored as {clash}.", cure="Exclude one of them.")
    return FolderPlan(items, tuple(folders), tuple(path for path in files if path not in planned), bytes_only)


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
        variants = sorted({other for path in weights if (other := variant_of(Path(path).name)) is not None})
        raise UsageError(
            f"{source} contains no weights of variant {variant!r}.",
            cure=f"It has {', '.join(variants)}." if variants else "It has no variants: leave the variant out.",
        )
    dropped = {p for p in weights if Path(p).parent in having and variant_of(Path(p).name) != variant}
    return [path for path in paths if path not in dropped]


def _problem(
    source: Path, path: str, headers: dict[str, dict[str, Header]], sources: Mapping[str, TensorSource]
) -> NetweightError | None:
    """Say why a file cannot be taken; None if it can. The header of a weights file is added to those of its folder."""
    file = source / path
    try:
        if path in sources:
            headers.setdefault(Path(path).parent.as_posix(), {})[file.name] = sources[path].header
            return None
        check_place(source, file)
        if not is_text(path):
            raise UsageError(f"{file!r} has a name that is not UTF-8.", cure="Rename or exclude it.")
        if path == MANIFEST:
            raise UsageError(f"{source} is compressed already.", cure="Decompress it first.")
        if path.endswith(".safetensors"):
            header = read_header(file)
            if KEY in header.metadata:
                raise UsageError(f"{file} is compressed already.", cure="Decompress it first.")
            headers.setdefault(Path(path).parent.as_posix(), {})[file.name] = header
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


def _missing_shards(source: Path, files: Iterable[str], taken: Iterable[str]) -> Iterator[NetweightError]:
    """Say of each folder whose weights are taken that it lacks shards, where it does."""
    names: dict[Path, set[str]] = defaultdict(set)
    for path in map(Path, files):
        names[path.parent].add(path.name)
    indexes: dict[Path, list[Path]] = defaultdict(list)
    for path in map(Path, taken):
        if path.suffix == ".safetensors" or is_index(path.name):
            indexes[path.parent] += [source / path] if is_index(path.name) else []
    for parent, own in indexes.items():
        try:
            indexed = [name for index in own for name in weight_map(index).values()]
            weights = [name for name in names[parent] if name.endswith(".safetensors")]
            refuse_missing_shards(source / parent, weights, indexed=indexed)
        except NetweightError as error:
            yield error


def _is_pickled_weights(file: Path) -> bool:
    if file.suffix.lower() not in PICKLES or any(fnmatch(file.name, pattern) for pattern in _NOT_WEIGHTS):
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


def _items(
    source: Path, paths: list[str], bytes_only: Mapping[str, str], sources: Mapping[str, TensorSource]
) -> Iterator[PlannedFile]:
    with_weights = {Path(path).parent for path in paths if path.endswith(".safetensors")}
    for path in paths:
        file, parent = source / path, Path(path).parent
        opens = parent.as_posix() not in bytes_only
        role: Role = "carried"
        stored = path
        if path.endswith(".safetensors") or is_index(file.name):
            role = "index" if is_index(file.name) else "weights"
            keeps_name = opens and lies_in_diffusers_model(file)
            stored = (parent / stored_name(file.name, keeps_name=keeps_name)).as_posix()
        elif file.name in (MODEL_CONFIG, ADAPTER_CONFIG) and parent in with_weights and opens:
            role = "config"
        if path in sources:
            header = sources[path].header
            yield PlannedFile(path, role, stored, header.data_start + header.data_size, 0)
            continue
        status = file.stat()
        yield PlannedFile(path, role, stored, status.st_size, status.st_mtime_ns)
