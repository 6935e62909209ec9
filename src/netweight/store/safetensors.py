"""The head of a safetensors file: eight bytes of length, JSON, then tensor data without gaps. Used by the store only.

The safetensors library decides what a valid file is. This module adds what the library does not tell: the exact bytes
of the header, the order of the data, and refusal of names given twice, so that a file can be restored byte for byte.
What differences are differences from, the tensors of another model, is found by name and told by digest.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import os
import pickletools
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, final

from safetensors import SafetensorError, safe_open

from netweight.autoload import HOME
from netweight.core.bounded_json import parse_json
from netweight.core.regular_files import regular
from netweight.errors import CorruptBlob, UnsafeInput, Unsupported, UsageError

# Longest chain of differences.
MOST_LINKS = 8
# The base of a file is searched beside this many folders above it.
_UP = 4
_GIVEN = "NETWEIGHT_BASE"


@final
@dataclass(frozen=True)
class BaseNote:
    """Note of a file about its base."""

    name: str
    """Name of the base's file or folder without the path to it, or the id of a model on the hub."""
    within: str
    """Folder within the base that contains the tensors: a path with slashes, or "."."""
    links: int
    """Length of the chain of bases: 1 if the base has none itself."""
    digest: str
    """Digest of the names and digests of the tensors that are stored as differences."""

    @classmethod
    def from_json(cls, values: Any) -> BaseNote:
        """Read and check what is kept; every refusal is a `ValueError`."""
        if not isinstance(values, dict) or values.keys() != cls.__dataclass_fields__.keys():
            raise ValueError("the record of its base is malformed")
        note = cls(**values)
        for text, most_parts in ((note.name, 2), (note.within, _UP)):
            # If the value is not a text, this raises a TypeError, which is handled like the ValueErrors.
            path = PurePosixPath(text)
            if path.is_absolute() or ".." in path.parts or "\0" in text or len(path.parts) > most_parts:
                raise ValueError(f"the name {text!r} of its base is malformed")
        if not PurePosixPath(note.name).name or not isinstance(note.digest, str):
            raise ValueError("the record of its base is malformed")
        if type(note.links) is not int or not 1 <= note.links <= MOST_LINKS:
            raise ValueError(f"it has {note.links!r} bases, one behind the other, more than {MOST_LINKS}")
        return note


def find_base(file: Path, note: BaseNote) -> Path:
    """Find a file's base by its name: as NETWEIGHT_BASE says, beside the file or its folder, in the hub's cache."""
    for path in _candidates(file, note.name):
        if path.is_file() or (path / note.within).is_dir():
            return path
    raise UsageError(
        f"{file} contains differences from {note.name} (digest {note.digest}), which cannot be found.",
        cure=f"Give it (base=, --base, or the variable {_GIVEN}), or put it beside the folder.",
    )


def _candidates(file: Path, name: str) -> Iterator[Path]:
    for given in filter(None, os.environ.get(_GIVEN, "").split(os.pathsep)):
        yield from (Path(given) / name, Path(given)) if Path(given).name != name else (Path(given),)
    own = PurePosixPath(name).name
    yield from (folder / own for folder in list(file.absolute().parents)[:_UP])
    if "/" in name:
        yield from _in_hub_cache(name)


def _in_hub_cache(name: str) -> Iterator[Path]:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return
    try:
        yield Path(snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):
        # The file does not exist, or the name is not valid.
        return


def name_of(path: Path) -> str:
    """The name by which a base is found again: its own, or its id if it lies in the hub's cache."""
    path = path.resolve()
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
    return path.name


# The safetensors library has the same bound, in bytes.
MAX_HEADER = 100_000_000
# Bytes of a header that is read or written here. Parsing takes four times its size, so that this bounds the memory that
# a file can take; 65,536 tensors have headers of some 8 MB.
LONGEST_HEADER = 20_000_000
# Bounds of what one file may declare, checked before anything is allocated for it. The largest mixtures of experts have
# fewer than 1,000 tensors in a shard.
MOST_TENSORS = 1 << 16
# The largest number of dimensions in numpy.
_MOST_DIMENSIONS = 64
# The largest product of a shape's sizes other than 0, because torch computes strides with such products.
_MOST_NUMBERS = 1 << 60
METADATA = "__metadata__"

# Bits of one element by safetensors dtype name.
BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
# Bits of dtypes that safetensors lacks: tensors of torch that can be kept compressed, but not in a plain file.
ONLY_COMPRESSED = {"C32": 32, "C128": 128}
_WIDTHS = BITS | ONLY_COMPRESSED


@final
@dataclass(frozen=True)
class Span:
    """One tensor of a safetensors file."""

    name: str
    """The tensor's name in the file."""
    dtype: str
    """Safetensors dtype, e.g. `"BF16"`."""
    shape: tuple[int, ...]
    """Shape; empty for a scalar."""
    start: int
    """Offset of its first byte within the data section."""
    stop: int
    """Offset after its last byte."""

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes in the file."""
        return self.stop - self.start


@final
@dataclass(frozen=True)
class Header:
    """The parsed head of a safetensors file."""

    raw: bytes
    """The header's bytes as stored, padding included, the eight length bytes excluded."""
    metadata: Mapping[str, str]
    """The entries of `__metadata__`; empty if it has none."""
    spans: tuple[Span, ...]
    """The tensors in the order of their data."""

    @property
    def data_start(self) -> int:
        """Offset of the data section in the file."""
        return 8 + len(self.raw)

    @property
    def data_size(self) -> int:
        """Bytes of the data section."""
        return max((span.stop for span in self.spans), default=0)


def nbytes_of(dtype: str, shape: Iterable[int]) -> int:
    """Count the bytes that a tensor takes.

    Args:
        dtype: Its safetensors dtype, e.g. `"BF16"`.
        shape: Its shape.

    Returns:
        The number of bytes.

    Raises:
        Unsupported: The dtype is not known, or the tensor does not end on a whole byte.
    """
    width = _WIDTHS.get(dtype)
    if width is None:
        raise Unsupported(
            f"The dtype {dtype} is not known to this release.", cure=f"Known are {', '.join(sorted(BITS))}."
        )
    bits = math.prod(shape) * width
    if bits % 8:
        raise Unsupported(f"A {dtype} tensor of shape {tuple(shape)} does not end on a whole byte.")
    return bits // 8


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file."""
    with open(path, "rb", opener=regular) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(prefix := file.read(8), "little")
        if length > min(MAX_HEADER, size - 8) or len(prefix) < 8:
            raise _not_safetensors(path, prefix + file.read(56), size)
        if length > LONGEST_HEADER and length <= size - 8:
            raise Unsupported(
                f"{path}: the header has {length:,} bytes; this release reads headers of up to {LONGEST_HEADER:,}.",
                cure="Shorten its metadata or the names of its tensors, or split the tensors over several files.",
            )
        raw = file.read(length)
    try:
        header = _checked(path, raw, size)
    except Unsupported as error:
        raise Unsupported(f"{path}: {error.reason}", cure=error.cure) from error
    except (SafetensorError, ValueError) as error:
        raise CorruptBlob(
            f"{path}: the header is damaged ({error}).", cure="Fetch the file again; its size or content was altered."
        ) from error
    if header.data_start + header.data_size != size:
        raise CorruptBlob(
            f"{path}: the header describes {header.data_start + header.data_size:,} bytes, but the file has {size:,}.",
            cure="The file was cut short or extended; fetch it again.",
        )
    return header


# Entries of tensors that files of one kind repeat to the byte, after metadata of their own; each was checked once.
_REPEATED: dict[bytes, tuple[Span, ...]] = {}
_MOST_REPEATED, _LONGEST_REPEATED = 64, 1 << 18
_APART = re.compile(rb'\{"__metadata__":(\{(?:[^"{}]|"(?:[^"\\]|\\.)*")*\})(?:,(?!\s*\})|(?=\s*\}))', re.DOTALL)


def _apart(raw: bytes) -> tuple[bytes, bytes]:
    """A header's metadata, and its entries as a header without any."""
    match = _APART.match(raw) if len(raw) <= _LONGEST_REPEATED else None
    if match is None or raw.find(b"__metadata__", match.end(1)) >= 0:
        return b"{}", raw
    return match[1], b"{" + raw[match.end() :]


def _checked(path: Path, raw: bytes, size: int) -> Header:
    """Parse a header, and let the safetensors library check the file, unless its entries were seen before."""
    metadata, entries = _apart(raw)
    if (spans := _REPEATED.get(entries)) is not None:
        return Header(raw, _text_map(parse_json(metadata)) or {}, spans)
    header = parse_header(raw)
    if header.data_start + header.data_size != size:
        # The caller reports files that are cut short.
        return header
    with safe_open(path, framework="numpy"):
        pass
    if len(entries) <= _LONGEST_REPEATED and not (entries is raw and header.metadata):
        if len(_REPEATED) >= _MOST_REPEATED:
            _REPEATED.clear()
        _REPEATED[entries] = header.spans
    return header


def parse_header(raw: bytes, *, most_values: int | None = None) -> Header:
    """Parse header bytes and check that the tensors lie side by side from offset 0.

    Args:
        raw: The JSON, without the eight bytes of its length.
        most_values: See `parse_json`.
    """
    tensors = raw.count(b'"dtype"')
    # This is checked before the header is parsed, which takes a hundred times its size in memory.
    refuse_many(tensors)
    fields = parse_json(
        raw, most_values=_VALUES_OF_TENSOR * tensors if most_values is None else most_values, allowance=_OTHER_VALUES
    )
    if not isinstance(fields, dict):
        raise ValueError("it is not a JSON object")
    refuse_many(len(fields))
    metadata = _text_map(fields.pop(METADATA, None)) or {}
    # Empty tensors share an offset with their successor, so the end decides between equal starts.
    spans = sorted((_span(name, entry) for name, entry in fields.items()), key=lambda span: (span.start, span.stop))
    end = 0
    for span in spans:
        if span.start != end:
            raise ValueError(f"the data of tensor {span.name!r} starts at {span.start}, not at {end}")
        end = span.stop
    return Header(raw, metadata, tuple(spans))


# Values of a tensor in a header: name, dtype, two offsets, and a shape of several sizes.
_VALUES_OF_TENSOR = 16
# Largest number of other values in a header, such as metadata.
_OTHER_VALUES = 100_000


def refuse_many(tensors: int) -> None:
    """Refuse more tensors than one file may hold.

    Args:
        tensors: How many it would hold.

    Raises:
        Unsupported: There are more than `MOST_TENSORS`.
    """
    # The metadata are an entry like a tensor's.
    if tensors > MOST_TENSORS + 1:
        raise Unsupported(
            f"the header lists {tensors:,} tensors; one file may contain {MOST_TENSORS:,}.",
            cure="Split the tensors over several files.",
        )


def build_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str], *, room: int | None = None
) -> bytes:
    """Write a header.

    `tensors`: name, dtype, shape and bytes of each tensor, in the order of the data. `room`: bytes to fill with
    trailing spaces, or None for the next multiple of 8.

    Returns:
        The header's bytes without the eight length bytes; longer than `room` if it does not fit.
    """
    fields: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for name, dtype, shape, nbytes in tensors:
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    raw = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    if len(raw) > LONGEST_HEADER:
        raise Unsupported(
            f"The header would have {len(raw):,} bytes; this release writes headers of up to {LONGEST_HEADER:,}.",
            cure="Split the tensors over several files.",
        )
    return raw.ljust(room if room is not None else -(-len(raw) // 8) * 8)


def file_head(raw: bytes) -> bytes:
    """Return the bytes of a safetensors file before its data.

    Args:
        raw: The header's JSON.
    """
    return len(raw).to_bytes(8, "little") + raw


def _natural(value: Any) -> bool:
    # isinstance would accept True, which is not a length.
    return type(value) is int and 0 <= value < 1 << 62


def _span(name: str, entry: Any) -> Span:
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        valid = all(map(_natural, (*shape, start, stop))) and isinstance(dtype, str)
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"the entry of tensor {name!r} is malformed") from error
    if not valid:
        raise ValueError(f"the shape and offsets of tensor {name!r} contradict each other")
    if len(shape) > _MOST_DIMENSIONS or math.prod(size or 1 for size in shape) > _MOST_NUMBERS:
        raise ValueError(f"the shape of tensor {name!r} is larger than any tensor")
    if stop - start != nbytes_of(dtype, shape):
        raise ValueError(f"the shape and offsets of tensor {name!r} contradict each other")
    return Span(name, dtype, tuple(shape), start, stop)


def is_pickle(start: bytes) -> bool:
    """Return whether a file that starts so is a pickle, of any protocol, or torch's archive of one."""
    if start.startswith((b"PK\x03\x04", *(b"\x80" + bytes([protocol]) for protocol in range(2, 6)))):
        return True
    # Protocols 0 and 1 have no marker. Their opcodes are read without running any.
    opcodes = 0
    try:
        for opcode, _, _ in pickletools.genops(start):
            opcodes += 1
            if opcode.name == "STOP":
                return True
    except Exception:
        return opcodes >= _OPCODES
    return False


# So many opcodes in a row are no coincidence.
_OPCODES = 8


def _not_safetensors(path: Path, start: bytes, size: int) -> CorruptBlob | UnsafeInput:
    """Say what a file is that is not a safetensors file, from its first bytes."""
    if start.startswith(b"version https://git-lfs"):
        return CorruptBlob(
            f"{path} is a Git LFS pointer, not the file with the weights.", cure="Run `git lfs pull` first."
        )
    if is_pickle(start):
        return UnsafeInput(
            f"{path} is a pickle, which can run code when opened, and not a safetensors file.",
            cure="Load it where you trust it and save it again: model.save_pretrained(folder), or "
            "safetensors.torch.save_file(tensors, path).",
        )
    if path.suffix != ".safetensors":
        return CorruptBlob(f"{path} is not a safetensors file.", cure="Name a .safetensors file or a model's folder.")
    return CorruptBlob(
        f"{path} is not a safetensors file or is cut short ({size:,} bytes).", cure="Fetch the file again."
    )


KEY = "netweight"
SUFFIX = ".net"
VERSION = 1
_SENTENCE = f"these weights are compressed by netweight{HOME and f' ({HOME})'}: netweight decompress restores them"
# Further entries of `__metadata__`, there to stop loaders that know nothing of netweight and would find none of the
# names they look for. transformers up to 4.57 refuses a `format` that it does not know, and shows it. diffusers makes a
# LoRA's config of `lora_adapter_metadata`, refuses names that it does not know, and shows them.
REFUSALS = {
    "format": _SENTENCE,
    "lora_adapter_metadata": json.dumps({f"{part}.{_SENTENCE}": 1 for part in ("unet", "transformer", "text_encoder")}),
}
_KEPT_DIGITS = 8  # hexadecimal ones of each tensor's digest


@final
@dataclass(frozen=True)
class Original:
    """One tensor as it was before compression."""

    dtype: str
    """Safetensors dtype, e.g. `"BF16"`."""
    shape: tuple[int, ...]
    """Shape; empty for a scalar."""
    digest: str
    """Digest of its bytes, with the name of the algorithm."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return nbytes_of(self.dtype, self.shape)


@final
@dataclass(frozen=True)
class Description:
    """Everything that a compressed file says about what it holds, beside what the tensors' own bytes say.

    It keeps the start of each tensor's digest, which tells a tensor from another one in its place, and the original
    file's header only where it is not the usual one.
    """

    header: Header | None = None
    """The header of the file that was compressed, if it is not the usual one."""
    metadata: Mapping[str, str] | None = None
    """Metadata of the compressed file, if its header is the usual one."""
    starts: tuple[str, ...] = ()
    """Beginning of each tensor's digest, in the order of the data."""
    base: BaseNote | None = None
    """The base of tensors that are stored as differences; None without one."""
    same: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Name of a tensor that equals another one of the folder → the file beside this one that contains the other (""
    for this file), and the other's name.
    """

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Original],
        header: Header | None,
        base: BaseNote | None = None,
        same: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    ) -> Description:
        """Describe tensors in the order of their data, and the file that they come from."""
        starts = tuple(_start_of(tensor.digest) for tensor in tensors.values())
        usual = False
        if header is not None:
            spans = [(span.name, span.dtype, span.shape, span.nbytes) for span in header.spans]
            usual = build_header(spans, header.metadata) == header.raw
        metadata = header.metadata if header is not None and usual else None
        return cls(None if usual else header, metadata, starts, base, same)

    def to_json(self) -> str:
        """Write the description."""
        fields: dict[str, Any] = {
            "version": VERSION,
            "digests": base64.b64encode(bytes.fromhex("".join(self.starts))).decode("ascii"),
        }
        if self.header is not None:
            fields["header"] = deflate_text(self.header.raw)
        if self.metadata is not None:
            fields["metadata"] = dict(self.metadata)
        if self.base is not None:
            fields["base"] = asdict(self.base)
        if self.same:
            fields["same"] = dict(self.same)
        return json.dumps(fields, separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str, *, where: str) -> Description:
        """Read and check a description."""
        try:
            fields = parse_json(text)
            version = fields["version"]
            if type(version) is not int or version != VERSION:
                raise Unsupported(
                    f"the format version is {version!r}; this release reads version {VERSION}.",
                    cure="Install a newer release of netweight.",
                )
            header = None
            if "header" in fields:
                header = parse_header(inflate_text(fields["header"], limit=LONGEST_HEADER), most_values=len(text))
            if len(fields["digests"]) > 8 * MOST_TENSORS:
                raise ValueError("it contains more digests than a file has tensors")
            digests = base64.b64decode(fields["digests"], validate=True).hex()
            starts = tuple(digests[at : at + _KEPT_DIGITS] for at in range(0, len(digests), _KEPT_DIGITS))
            base = BaseNote.from_json(fields["base"]) if "base" in fields else None
            same = {name: _place(place) for name, place in fields.get("same", {}).items()}
            return cls(header, _text_map(fields.get("metadata")), starts, base, same)
        except Unsupported as error:
            raise Unsupported(f"{where}: {error.reason}", cure=error.cure) from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptBlob(
                f"{where}: netweight's description is damaged ({error}).", cure="Fetch the file again."
            ) from error

    def fits(self, at: int, digest: str) -> bool:
        """Return whether the tensor at this place of the file may have this digest."""
        return at < len(self.starts) and self.starts[at] == _start_of(digest)


def _place(value: Any) -> tuple[str, str]:
    file, name = value
    if not isinstance(name, str) or "/" in file or "\\" in file or "\0" in file or file in (".", ".."):
        raise ValueError("the place of an equal tensor is malformed")
    return file, name


def _start_of(digest: str) -> str:
    return digest.rpartition(":")[2][:_KEPT_DIGITS]


def _text_map(value: Any) -> Mapping[str, str] | None:
    if value is None or (isinstance(value, dict) and all(isinstance(text, str) for text in value.values())):
        return value
    raise ValueError("its metadata is not a mapping of text to text")


def most_inflated(text: str) -> int:
    """Bytes that a deflated part of a text may hold: metadata of 32 MB, and names that the text has, too."""
    return min(MAX_HEADER, (32 << 20) + 8 * len(text))


def deflate_text(data: bytes) -> str:
    """Deflate bytes and write them as base64, to be kept in JSON.

    Args:
        data: Any bytes.
    """
    return base64.b64encode(zlib.compress(data, 9)).decode("ascii")


def inflate_text(text: str, *, limit: int) -> bytes:
    """Undo `deflate_text`.

    `limit`: most bytes to accept, so that hostile input cannot fill the memory.

    Returns:
        The bytes.
    """
    try:
        inflater = zlib.decompressobj()
        data = inflater.decompress(base64.b64decode(text, validate=True), limit)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(str(error)) from error
    if not inflater.eof:
        raise ValueError(f"the deflated text is incomplete or contains more than {limit:,} bytes")
    return data
