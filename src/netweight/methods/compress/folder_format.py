"""What a compressed folder looks like: its manifest, and how it refuses to be loaded without netweight.

`netweight.json` says what the folder holds and what it was made from, enough to restore every file:

{"format": "netweight-folder", "version": 1, "level": "default",
 "files": [{"path": "model.safetensors", "kind": "compressed", "stored": "model.net.safetensors", ...},
           {"path": "config.json", "kind": "rewritten", "stored": "config.json", "original": "...", ...},
           {"path": "vocab.txt", "kind": "carried", "stored": "vocab.txt", ...}],
 "folders": ["empty"], "left_out": []}

Where tensors are rounded, "version" is 2, their files' entries say by how much, and "rounding" says how.

Loaders in the wild warn about keys that they miss and go on with random weights. So that none of them does so with a
compressed folder, three things are changed, each of which alone stops a loader that heeds it (all tried, see
`tests/integration/test_without_netweight.py`):

1. **The weights go by another name**, `model.net.safetensors` for `model.safetensors`: a loader that looks for the
   usual name finds no weights and says so. Only inside a diffusers model's folder the names stay, since diffusers has
   no setting for another one, and stops at 2.
2. **The configuration says what to install.**
   transformers (`config.json`): an unknown `quant_method` makes it warn only; but it refuses a `transformers_weights`
   that is no file name, and shows it. So that entry holds the sentence to be read. `quantization_config.weights` holds
   the real name, which a registered quantizer puts back in `update_attn_implementation`, before files are looked for.
   diffusers (`config.json` with `_class_name`): refuses an unknown `quant_method` and shows it. The sentence in it is
   what a quantizer is registered under; it must stay as it is, so that folders stay readable.
   peft (`adapter_config.json`): refuses an unknown `peft_type` and shows it.
3. **The weights' own metadata** hold what transformers up to 4.57 and diffusers' LoRA loader refuse and show (see
   `store/safetensors.py`).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Self, final

from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt
from pydantic.dataclasses import dataclass

from netweight.codec import Precision
from netweight.errors import CorruptBlob, UnsafeInput, Unsupported, UsageError
from netweight.store.safetensors import deflate_text, inflate_text

MANIFEST = "netweight.json"
MODEL_CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
Kind = Literal["compressed", "rewritten", "carried"]

_FORMAT, _VERSION = "netweight-folder", 1
_ROUNDED = 2  # version of manifests of rounded weights, which older releases cannot read
_CURE = "`pip install netweight`, then restore them: `netweight decompress FOLDER NEW_FOLDER`"
TRANSFORMERS_SENTENCE = f"these weights are compressed by netweight: {_CURE}"
DIFFUSERS_METHOD = f"netweight (these weights are compressed: {_CURE})"
PEFT_TYPE = f"netweight (these weights are compressed: {_CURE})"

_INDEX = re.compile(r"^(?P<stem>.+)\.safetensors\.index(?:\.(?P<variant>\w+))?\.json$")
_SHARD = r"-\d{5}-of-\d{5}"
_WEIGHTS = re.compile(rf"^.+?(?:\.(?P<before>\w+))?(?:{_SHARD})?(?:\.(?P<after>\w+))?\.safetensors$")


# ---- netweight.json --------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class FileEntry:
    """One file of the original folder."""

    path: str  # its path in the original folder, with slashes
    kind: Kind  # `"compressed"` weights, a `"rewritten"` index or configuration, or `"carried"` over unchanged
    stored: str  # its path in the compressed folder
    nbytes: NonNegativeInt  # its size in the original folder
    digest: str  # digest of its original content
    stored_nbytes: NonNegativeInt  # its size in the compressed folder
    # Digest of its content in the compressed folder; None for compressed weights, which carry a digest per tensor.
    stored_digest: str | None = None
    original: str | None = None  # the original content of a rewritten file, deflated, as base64; else None
    tensors: NonNegativeInt = 0  # number of tensors of compressed weights; else 0
    payload: NonNegativeInt = 0  # bytes of all compressed tensors; else 0
    rounded: NonNegativeInt = 0  # how many tensors are rounded; `digest` is then that of the file that comes back
    bound: NonNegativeFloat = 0.0  # how much rounding may have changed a weight at most, relative to it
    worst_change: NonNegativeFloat = 0.0  # how much it did change one at most

    @classmethod
    def rewritten(cls, path: str, stored: str, original: bytes, *, digests: tuple[str, str], size: int) -> Self:
        """An entry for a file whose original content is kept."""
        return cls(path, "rewritten", stored, len(original), digests[0], size, digests[1], deflate_text(original))

    def original_content(self) -> bytes:
        """The original content of a rewritten file."""
        try:
            return inflate_text(self.original or "", limit=self.nbytes + 1)
        except ValueError as error:
            raise CorruptBlob(
                f"{MANIFEST}: the kept content of {self.path} is damaged ({error}).", cure="Fetch the file again."
            ) from error


@final
@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of `netweight.json`."""

    level: str  # the codec's level
    files: tuple[FileEntry, ...]  # all files of the original folder
    folders: tuple[str, ...] = ()  # its empty folders
    left_out: tuple[str, ...] = ()  # its files that were left out on request
    precision: Precision | None = None  # how tensors were rounded; None if none was, or if they had been rounded before

    def to_json(self) -> str:
        """Write the manifest."""
        fields = {
            "format": _FORMAT,
            "version": _ROUNDED if any(file.rounded for file in self.files) else _VERSION,
            "level": self.level,
            "files": [{key: value for key, value in asdict(file).items() if value} for file in self.files],
            "folders": list(self.folders),
            "left_out": list(self.left_out),
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
            fields = json.loads(path.read_bytes())
            if fields["format"] != _FORMAT:
                raise ValueError(f"its format is {fields['format']!r}")
            if fields["version"] not in (_VERSION, _ROUNDED):
                raise Unsupported(
                    f"{path} is of version {fields['version']!r}; this release reads up to version {_ROUNDED}.",
                    cure="Upgrade netweight: pip install --upgrade netweight.",
                )
            files = tuple(FileEntry(**{"stored_nbytes": 0, "nbytes": 0, **entry}) for entry in fields["files"])
            folders, left_out = (tuple(map(str, fields[key])) for key in ("folders", "left_out"))
            precision = Precision(**fields["rounding"]) if "rounding" in fields else None
            manifest = cls(str(fields["level"]), files, folders, left_out, precision)
        except (UsageError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptBlob(f"{path} is damaged ({error!r}).", cure="Fetch the file again.") from error
        for name in (*manifest.folders, *(name for file in files for name in (file.path, file.stored))):
            if not _inside(name):
                raise UnsafeInput(f"{path} points outside its folder: {name!r}.", cure="Do not use this model.")
        return manifest

    def check_present(self, folder: Path) -> None:
        """Check that all stored files are there."""
        missing = [entry.stored for entry in self.files if not (folder / entry.stored).is_file()]
        if missing:
            raise CorruptBlob(
                f"{folder} lacks {len(missing)} of its files: {', '.join(missing[:5])}.", cure="Fetch them again."
            )


def _inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\\" not in name


# ---- names and configurations ----------------------------------------------------------------------------------------


def is_index(name: str) -> bool:
    """Whether a file name is that of an index of weights, e.g. `model.safetensors.index.json`."""
    return _INDEX.match(name) is not None


def variant_of(name: str) -> str | None:
    """The variant in the name of a weights file or index, `"fp16"` for `model.fp16.safetensors`, or None."""
    if (index := _INDEX.match(name)) is not None:
        return index["variant"]
    weights = _WEIGHTS.match(name)
    return None if weights is None else weights["before"] or weights["after"]


def stored_name(name: str, *, diffusers: bool) -> str:
    """The name under which a weights file or an index is stored."""
    if diffusers:
        return name
    if (index := _INDEX.match(name)) is not None:
        variant = f".{index['variant']}" if index["variant"] else ""
        return f"{index['stem']}{variant}.net.safetensors.index.json"
    return f"{name.removesuffix('.safetensors')}.net.safetensors"


def lies_in_diffusers_model(file: Path) -> bool:
    """Whether a weights file or index lies in a diffusers model's folder."""
    config = file.parent / MODEL_CONFIG
    return config.is_file() and is_diffusers_config(config.read_bytes())


def is_diffusers_config(content: bytes) -> bool:
    """Whether the bytes are the `config.json` of a diffusers model."""
    return "_class_name" in (_json_object(content) or ())


def mark_config(name: str, content: bytes, weights: Iterable[str]) -> bytes | None:
    """Make a configuration refuse loaders that lack netweight; None if it is no JSON object."""
    config = _json_object(content)
    if config is None:
        return None
    if name == ADAPTER_CONFIG:
        config["peft_type"] = PEFT_TYPE
        return _json_bytes(config)
    main = _main_weights(config, list(weights))
    if "_class_name" in config:
        config["quantization_config"] = {"quant_method": DIFFUSERS_METHOD, "version": 1, "weights": main}
    else:
        stored = stored_name(main, diffusers=False)
        config["quantization_config"] = {"quant_method": "netweight", "version": 1, "weights": stored}
        config["transformers_weights"] = TRANSFORMERS_SENTENCE
    return _json_bytes(config)


def rewrite_index(content: bytes, *, diffusers: bool, total_size: int) -> bytes:
    """Write the index of the compressed shards."""
    index = json.loads(content)
    index["metadata"] = {**(index.get("metadata") or {}), "total_size": total_size}
    index["weight_map"] = {
        f"{name}.net": stored_name(file, diffusers=diffusers) for name, file in index["weight_map"].items()
    }
    return _json_bytes(index)


def _main_weights(config: dict[str, Any], weights: list[str]) -> str:
    """The file or index that transformers would load: the configured one, else the usual ones, else the first."""
    usual = [config.get("transformers_weights"), "model.safetensors", "model.safetensors.index.json"]
    first = sorted(weights, key=lambda name: (not is_index(name), name))
    return next(name for name in [*usual, *first] if name in weights)


def _json_object(content: bytes) -> dict[str, Any] | None:
    try:
        config = json.loads(content)
    except ValueError:
        return None
    return config if isinstance(config, dict) else None


def _json_bytes(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
