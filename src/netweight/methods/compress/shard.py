"""What to do with each file of a model folder, found out, with all problems, before anything is written."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType
from typing import Literal, final

import xxhash

from netweight import codec
from netweight.codec import ROUNDABLE, Precision
from netweight.core.digest import ALGORITHM
from netweight.core.files import whole_file
from netweight.errors import CorruptBlob, NetweightError, UnsafeInput, Unsupported, UsageError
from netweight.methods.compress.loaders import (
    ADAPTER_CONFIG,
    MODEL_CONFIG,
    is_diffusers_config,
    is_index,
    stored_name,
    variant_of,
)
from netweight.methods.compress.manifest import MANIFEST
from netweight.methods.compress.settings import CompressConfig
from netweight.store.reader import StoredFile, weight_map
from netweight.store.safetensors import KEY, ONLY_COMPRESSED, Span, build_header, read_header
from netweight.store.writer import Level, StoreWriter

_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
# What trainers leave beside weights: pickles, but not weights. They are carried over as bytes and never opened.
_NOT_WEIGHTS = ("training_args.bin", "optimizer*", "scheduler*", "scaler*", "rng_state*", "random_states*")


@final
@dataclass(frozen=True)
class Item:
    """One file and what becomes of it."""

    path: str  # its path within the folder, with slashes
    # `"weights"`, `"index"`, `"config"` of weights beside it, or `"other"`.
    role: Literal["weights", "index", "config", "other"]
    stored: str  # its path in the compressed folder
    size: int  # its size in bytes
    mtime_ns: int  # when it was last changed


@final
@dataclass(frozen=True)
class Plan:
    """What becomes of a folder."""

    items: tuple[Item, ...]  # the files to take, in order
    folders: tuple[str, ...]  # its empty folders
    left_out: tuple[str, ...]  # files left out by `variant` or `exclude`


def make_plan(source: Path, config: CompressConfig) -> Plan:
    """Look at every file of a model folder and decide what becomes of it."""
    # All problems are reported at once; the gravest gives the error its type.
    files, folders = _walk(source)
    taken = [path for path in files if not any(fnmatch(path, pattern) for pattern in config.exclude)]
    if config.variant is not None:
        taken = _of_variant(taken, config.variant, source)
    problems = [problem for path in taken if (problem := _problem(source, path)) is not None]
    if not problems and not any(path.endswith(".safetensors") for path in taken):
        problems.append(UsageError(f"{source} holds no safetensors weights.", cure="Check the path."))
    if problems:
        raise _joined(problems)
    left_out = tuple(path for path in files if path not in set(taken))
    return Plan(tuple(_items(source, taken)), tuple(folders), left_out)


def _walk(source: Path) -> tuple[list[str], list[str]]:
    """List all files, and all empty folders, by their paths within `source`."""
    files, folders, problems = [], [], []
    for folder, names, leaves in os.walk(source, onerror=_raise):
        names.sort()
        here = Path(folder)
        if not names and not leaves and here != source:
            folders.append(here.relative_to(source).as_posix())
        links = [here / name for name in names if (here / name).is_symlink()]
        problems += [_outside(path) for path in links]
        files += [(here / leaf).relative_to(source).as_posix() for leaf in sorted(leaves)]
    if problems:
        raise _joined(problems)
    return files, folders


def _raise(error: OSError) -> None:
    raise UsageError(
        f"{error.filename} could not be read ({error.strerror}).", cure="Check its permissions."
    ) from error


def _outside(path: Path) -> NetweightError:
    return UnsafeInput(
        f"{path} is a link that leads out of the folder.", cure="Replace it by what it points to, or exclude it."
    )


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
        _check_place(source, file)
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


def _check_place(source: Path, file: Path) -> None:
    """Refuse what is no regular file, and links that lead out of the folder, except into the blobs of a hub cache."""
    root = source.resolve()
    caches = (at.parent for at in root.parents if at.name == "snapshots" and (at.parent / "blobs").is_dir())
    allowed = next(caches, root)
    if not file.exists():
        raise UsageError(f"{file} is a broken link.", cure="Fetch the file it should point to, or exclude it.")
    if not stat.S_ISREG(file.stat().st_mode):
        raise Unsupported(f"{file} is no regular file.", cure="Remove or exclude it.")
    if not file.resolve().is_relative_to(allowed):
        raise _outside(file)


def _check_index(file: Path) -> None:
    for name in dict.fromkeys(weight_map(file).values()):
        if not (file.parent / name).is_file():
            raise CorruptBlob(f"{file} names the file {name}, which is missing.", cure="Fetch it again.")


def _is_pickled_weights(file: Path) -> bool:
    if file.suffix.lower() not in _PICKLES or any(fnmatch(file.name, pattern) for pattern in _NOT_WEIGHTS):
        return False
    with open(file, "rb") as content:
        start = content.read(4)
    return start == b"PK\x03\x04" or (start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05")


def _joined(problems: list[NetweightError]) -> NetweightError:
    """One error for several problems, of the gravest one's type."""
    gravity = [UnsafeInput, CorruptBlob, Unsupported, UsageError]
    first = min(problems, key=lambda problem: gravity.index(type(problem)) if type(problem) in gravity else 9)
    if len(problems) == 1:
        return first
    others = "".join(f"\n- {problem}" for problem in problems)
    return type(first)(f"{len(problems)} problems:{others}")


def _items(source: Path, paths: list[str]) -> Iterator[Item]:
    with_weights = {Path(path).parent for path in paths if path.endswith(".safetensors")}
    for path in paths:
        file, parent = source / path, Path(path).parent
        role: Literal["weights", "index", "config", "other"] = "other"
        stored = path
        if path.endswith(".safetensors") or is_index(file.name):
            role = "index" if is_index(file.name) else "weights"
            stored = (parent / stored_name(file.name, diffusers=lies_in_diffusers_model(file))).as_posix()
        elif file.name in (MODEL_CONFIG, ADAPTER_CONFIG) and parent in with_weights:
            role = "config"
        status = file.stat()
        yield Item(path, role, stored, status.st_size, status.st_mtime_ns)


def lies_in_diffusers_model(file: Path) -> bool:
    """Whether a weights file or index lies in a diffusers model's folder."""
    config = file.parent / MODEL_CONFIG
    return config.is_file() and is_diffusers_config(config.read_bytes())


@final
@dataclass(frozen=True)
class ShardResult:
    """What one file gave."""

    tensors: int  # number of tensors
    nbytes: int  # size of the plain file in bytes
    digest: str  # digest of the plain file; of the one that comes back if tensors were rounded
    stored_nbytes: int  # size of the compressed file in bytes
    payload: int  # bytes of the compressed tensors alone
    rounded: int = 0  # number of tensors that are rounded
    bound: float = 0.0  # how much rounding may have changed a weight at most, relative to it; 0 if nothing is rounded
    worst_change: float = 0.0  # how much it did change one at most


def compress_shard(
    source: Path,
    target: Path,
    *,
    level: Level,
    threads: int,
    overwrite: bool = False,
    precision: Precision | None = None,
    ready: Mapping[str, memoryview] = MappingProxyType({}),
    advance: Callable[[int], None] = lambda nbytes: None,
) -> ShardResult:
    """Compress a safetensors file."""
    file = StoredFile(source)
    before = os.stat(source)
    if file.description is not None:
        raise UsageError(f"{source} is compressed already.", cure="Decompress it first.")
    whole = xxhash.xxh3_128(_head(file.header.raw))
    payload = rounded = 0
    bound = worst = 0.0
    try:
        with StoreWriter(target, level=level, overwrite=overwrite, threads=threads, original=file.header) as writer:
            advance(file.header.data_start)
            for span in file.header.spans:
                content = file.raw(span.name)
                blob = _encoded(content, span, level, threads, precision, ready)
                payload += writer.add_blob(span.name, blob)
                if codec.is_lossy(blob):
                    found = codec.info(blob)
                    rounded += 1
                    bound, worst = max(bound, found.bound), max(worst, found.worst_change)
                    whole.update(codec.decode_raw(blob, threads=threads).data)
                else:
                    whole.update(content)
                del blob
                content.release()
                file.release(span.name)
                advance(span.nbytes)
            after = os.stat(source)
            if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                raise UsageError(f"{source} changed while it was read.", cure="Wait until it is complete; try again.")
    finally:
        file.close()
    digest = f"{ALGORITHM}:{whole.hexdigest()}"
    stored = target.stat().st_size
    return ShardResult(len(file.header.spans), before.st_size, digest, stored, payload, rounded, bound, worst)


def restore_shard(
    source: Path,
    target: Path,
    *,
    threads: int,
    overwrite: bool = False,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> ShardResult:
    """Restore the safetensors file that a compressed one was made from; every tensor's digest is checked."""
    file = StoredFile(source)
    if file.description is None:
        raise UsageError(f"{source} is not compressed.", cure="Check the path.")
    head = plain_head(file)
    whole = xxhash.xxh3_128(head)
    payload = rounded = 0
    bound = worst = 0.0
    try:
        with whole_file(target, overwrite=overwrite) as output:
            output.write(head)
            advance(len(head))
            for name in file.names():
                content = file.content(name, threads=threads, check=True)
                output.write(content)
                whole.update(content)
                found = file.rounding(name)
                if found is not None:
                    rounded += 1
                    bound, worst = max(bound, found.bound), max(worst, found.worst_change)
                payload += file.info(name).stored_nbytes
                file.release(name)
                advance(file.info(name).nbytes)
    finally:
        file.close()
    digest = f"{ALGORITHM}:{whole.hexdigest()}"
    sizes = target.stat().st_size, digest, source.stat().st_size
    return ShardResult(len(file.names()), *sizes, payload, rounded, bound, worst)


def plain_size(source: Path) -> int:
    """Bytes of the plain file that a weights file holds or is."""
    file = StoredFile(source)
    try:
        return len(plain_head(file)) + sum(file.info(name).nbytes for name in file.names())
    finally:
        file.close()


def check_digest(path: Path, found: str, recorded: str) -> None:
    """Compare a restored file with what was recorded of the original."""
    if found != recorded:
        raise CorruptBlob(
            f"{path}: the restored content has digest {found}, recorded is {recorded}.",
            cure="The compressed folder is damaged: fetch or make it again.",
        )


def plain_head(file: StoredFile) -> bytes:
    """The bytes before the data of the plain file: the original's if there was one, else new ones."""
    if file.original_header is not None:
        return _head(file.original_header.raw)
    infos = [file.info(name) for name in file.names()]
    if lacking := [info for info in infos if info.dtype in ONLY_COMPRESSED]:
        raise Unsupported(
            f"{file.path}: safetensors has no dtype {lacking[0].dtype}, which tensor {lacking[0].name!r} has.",
            cure="Read it with netweight.open_store.",
        )
    return _head(build_header([(i.name, i.dtype, i.shape, i.nbytes) for i in infos], {"format": "pt"}))


def _encoded(
    content: memoryview,
    span: Span,
    level: Level,
    threads: int,
    precision: Precision | None,
    ready: Mapping[str, memoryview],
) -> bytes | memoryview:
    """A tensor's blob: one that is ready, or a new one, rounded if it is to be."""
    if ready:
        known = ready.get(f"{ALGORITHM}:{xxhash.xxh3_128_hexdigest(content)}")
        if known is not None:
            return known
    if len(span.shape) < 2 or span.dtype not in ROUNDABLE:  # biases, norms, indices
        precision = None
    return codec.encode_raw(content, span.dtype, span.shape, level=level, threads=threads, precision=precision)


def _head(raw: bytes) -> bytes:
    return len(raw).to_bytes(8, "little") + raw
