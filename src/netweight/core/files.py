"""Files that appear completely or not at all, digests, records, and JSON from unknown sources, read within bounds.

Ours are written aside, synced, renamed. A file's temporary name begins with the target's and ends at random, so that
nobody can have put a link there beforehand; the file is locked while in use, so that two runs cannot mix, and so that
a later run can tell what a killed one left behind. A folder's temporary name is derived from the target's, so that the
next run continues in it. `publish` is the one place that syncs
and renames. Parts of a file are worked on by several threads, `in_order`. Of a stranger's JSON, bytes,
depth and the number of values are checked before parsing.

A digest is the text `"xxh3-128:"` and 32 hexadecimal digits. It detects damage and change; it is not a defense against
someone who forges content on purpose.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import errno
import functools
import hashlib
import json
import operator
import os
import re
import secrets
import shutil
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from glob import escape
from pathlib import Path, PurePath
from typing import IO, Any, TypeVar

import numpy as np
import xxhash

from netweight.core.tensor_bytes import row_major_bytes
from netweight.errors import CorruptBlob, NetweightError, OutputExists, OutputFailed, Unsupported, UsageError

ALGORITHM = "xxh3-128"
T = TypeVar("T")
R = TypeVar("R")


def digest_bytes(data: bytes | bytearray | memoryview) -> str:
    """Digest a contiguous buffer of bytes."""
    return f"{ALGORITHM}:{xxhash.xxh3_128_hexdigest(data)}"


def regular(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file: `open(path, "rb", opener=regular)`. A pipe or a device may never come to an end.

    Args:
        path: The file.
        flags: As in `os.open`.

    Returns:
        The file descriptor.

    Raises:
        Unsupported: It is a pipe, a device, a socket or a folder. None of them is waited for.
        OSError: The system refuses.
    """
    # The last flag has no effect on a regular file.
    more = ("O_CLOEXEC", "O_BINARY", "O_NONBLOCK")
    descriptor = os.open(path, flags | functools.reduce(operator.or_, (getattr(os, name, 0) for name in more)))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Unsupported(f"{path} is not a regular file.", cure="Replace it by the file itself, or remove it.")
    return descriptor


def digest_file(path: str | Path) -> str:
    """Digest the content of a regular file."""
    with open(path, "rb", buffering=0, opener=regular) as file:
        return f"{ALGORITHM}:{hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()}"


def digest_tensor(tensor: Any) -> str:
    """Digest a tensor's bytes in row-major order; dtype and shape do not enter."""
    if hasattr(tensor, "detach"):
        tensor = row_major_bytes(tensor.detach().cpu()).numpy()
    else:
        tensor = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    return digest_bytes(memoryview(tensor))


def _plain(value: Any) -> Any:
    """Turn one value that JSON does not know into one that it does."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, PurePath):
        return value.as_posix()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise UsageError(
        f"A {type(value).__name__} cannot be part of a configuration.",
        cure="Use numbers, text, lists, mappings, paths, dataclasses or pydantic models.",
    )


def canonical_json(value: Any, *, allow_nan: bool = False) -> str:
    """Write a configuration as JSON that is the same for equal configurations: sorted keys, no spaces, plain UTF-8."""
    try:
        return json.dumps(
            value, default=_plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=allow_nan
        )
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"A value cannot be written as JSON: {error}.", cure="Replace the value, for example NaN by null."
        ) from None


def digest_config(value: Any) -> str:
    """Digest a configuration by its canonical JSON, so that it is the same on every platform and in every process."""
    return digest_bytes(canonical_json(value).encode())


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]
    import msvcrt

# On Windows, other processes cannot read a locked byte, so this one lies behind all content.
_FAR = 0x7FFF_FFFF
# On Windows, folders cannot be synced, and open files cannot be renamed or removed.
_WINDOWS = os.name == "nt"


def part_of(target: Path) -> Path:
    """The temporary path beside `target` in which it is written."""
    return target.with_name(f".{target.name}.netweight-part")


def work_of(target: Path) -> Path:
    """The folder beside `target` in which work on it is kept until it is finished, see `netweight.job`."""
    return target.with_name(f".{target.name}.netweight-work")


def refuse_existing(target: Path, *, overwrite: bool | None) -> None:
    """Check that an output may be written."""
    if (target.exists() or target.is_symlink()) and not overwrite:
        cure = "Choose another name, or move it away." if overwrite is None else (
            "Choose another name, or pass overwrite (--overwrite)."
        )  # fmt: skip
        raise OutputExists(f"{target} exists already.", cure=cure)
    need_parent(target)


def need_parent(target: Path) -> None:
    """Check that the folder in which an output is to be written exists."""
    file = next((place for place in target.parents if place.is_file()), None)
    if file is not None:
        raise UsageError(f"{target} would be inside of {file}, which is a file.", cure="Choose another place.")
    if not target.parent.is_dir():
        raise UsageError(f"The folder {target.parent} does not exist.", cure="Create it first.")


# Errors of the system that only writing leads to.
_OF_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_CURES = {
    errno.ENOSPC: "The disk is full: free space, or choose another disk.",
    errno.EDQUOT: "The disk quota is used up: free space, or choose another disk.",
    errno.EFBIG: "The file would exceed the size limit: see `ulimit -f`, or choose another file system.",
    errno.EROFS: "The file system is read-only: choose another place.",
    errno.EACCES: "Permission is missing: choose another place.",
    errno.EPERM: "Permission is missing: choose another place.",
    errno.ENAMETOOLONG: "Choose a shorter name.",
}


def refusal_of_system(error: OSError) -> NetweightError:
    """Return a refusal of the system that no `naming_failures` has named as an error with a cure.

    Args:
        error: The exception; its file is named if it has one.
    """
    reason = error.strerror or str(error)
    if error.errno in _OF_WRITING:
        return OutputFailed(f"{error.filename or 'A file'} could not be written ({reason}).", cure=_CURES[error.errno])
    if error.filename is None:
        return UsageError(f"The system refused: {reason}.")
    return UsageError(f"{error.filename}: {reason}.", cure="Check the path and its permissions.")


@contextmanager
def naming_failures(target: Path) -> Iterator[None]:
    """Turn the system's refusals into errors with a cure."""
    part, work = part_of(target), work_of(target)
    cures = dict(_CURES)
    try:
        yield
    except OSError as error:
        # A copy may name either of its files.
        if error.errno in _OF_WRITING:
            raise OutputFailed(f"{target} could not be written ({error.strerror}).", cure=cures[error.errno]) from error
        refused = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes | os.PathLike) else part
        ours = any(refused.is_relative_to(own) for own in (target, part, work))
        ours = ours or (refused.parent == part.parent and refused.name.startswith(part.name))
        if refused != target.parent and not ours:
            raise UsageError(
                f"{refused} could not be read ({error.strerror}).",
                cure="Check that it exists and that you may read it.",
            ) from error
        # A folder was left where a file is to be written, or the other way round.
        in_the_way = work if refused.is_relative_to(work) else part
        left = f"Remove {in_the_way}, which a killed run left there."
        cures |= dict.fromkeys((errno.EISDIR, errno.ENOTDIR, errno.EEXIST), left)
        if error.errno not in cures:
            raise
        raise OutputFailed(f"{target} could not be written ({error.strerror}).", cure=cures[error.errno]) from error
    except Exception as error:
        # Libraries in Rust, such as safetensors, state the system's error number in the text of their error.
        number = re.search(r"\(os error (\d+)\)", str(error))
        if isinstance(error, NetweightError) or number is None or int(number[1]) not in cures:
            raise
        reason = os.strerror(int(number[1]))
        raise OutputFailed(f"{target} could not be written ({reason}).", cure=cures[int(number[1])]) from error


def exchange(first: Path, second: Path) -> bool:
    """Swap two paths of one file system in a single step."""
    if _WINDOWS:
        return False
    here, swap = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(here, os.fsencode(first), here, os.fsencode(second), swap) == 0:
        return True
    if (number := ctypes.get_errno()) in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(second))


def sync(path: Path) -> None:
    """Make a file's content, or a folder's list of names, survive a loss of power."""
    if _WINDOWS and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if _WINDOWS else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """Sync a file; or all files under a folder, then the folders, the innermost first."""
    if not path.is_dir():
        return sync(path)
    walked = list(os.walk(path, topdown=False))
    for folder, _, names in walked:
        for file in (Path(folder) / name for name in names):
            if file.is_file() and not file.is_symlink():
                sync(file)
    for folder, _, _ in walked:
        sync(Path(folder))
    return None


def mode_of(path: Path) -> int:
    """The permissions of a file."""
    return path.stat().st_mode & 0o777


def publish(part: Path, target: Path, *, aside: Path | None = None) -> None:
    """Sync a file or folder with all in it, put it in the place of `target` in one step, and make that survive."""
    sync_tree(part)
    if aside is None or not target.exists():
        os.replace(part, target)
    elif not exchange(part, target):
        # This takes two steps. If the process is killed between them, the next call moves `aside` back.
        os.rename(target, aside)
        os.rename(part, target)
    sync(target.parent)


def take_lock(descriptor: int) -> bool:
    """Lock an open file without waiting, until its process ends, however that ends; False if another holds it."""
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            position = os.lseek(descriptor, 0, os.SEEK_CUR)
            os.lseek(descriptor, _FAR, os.SEEK_SET)
            try:
                msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]
            finally:
                os.lseek(descriptor, position, os.SEEK_SET)
    except (BlockingIOError, PermissionError):
        return False
    return True


_OWN = os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)


def _planted(path: Path) -> OutputFailed:
    return OutputFailed(
        f"{path} is a link at the place of a temporary file. Writing to it would change the file that it points to.",
        cure="Remove it, and choose a folder that other users cannot write to.",
    )


def refuse_planted(folder: Path) -> None:
    """Refuse a temporary folder that somebody else may have put there.

    Args:
        folder: The path at which work is continued, or begun.

    Raises:
        OutputFailed: It is a link, or a folder of another user.
    """
    if folder.is_symlink():
        raise _planted(folder)
    if hasattr(os, "geteuid") and folder.exists() and folder.stat().st_uid not in (os.geteuid(), 0):
        raise OutputFailed(
            f"{folder} belongs to another user, so that the work in it cannot be continued.",
            cure="Choose a folder that other users cannot write to.",
        )


@contextmanager
def lock(path: Path) -> Iterator[IO[bytes]]:
    """Open a file to read and write, made if absent, that no other run may open this way meanwhile."""
    while True:
        try:
            descriptor = os.open(path, _OWN | os.O_CREAT, 0o666)
        except OSError as error:
            if error.errno == errno.ELOOP or path.is_symlink():
                raise _planted(path) from error
            raise
        file = os.fdopen(descriptor, "r+b")
        if not take_lock(file.fileno()):
            file.close()
            raise UsageError(f"Another run is writing {path}.", cure="Wait for it, or choose another name.")
        # The file that was opened may have been renamed or removed by its last owner before the lock was gained.
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            break
        file.close()
    with file:
        yield file


@contextmanager
def whole_file(target: Path, *, overwrite: bool = False, mode: int | None = None) -> Iterator[IO[bytes]]:
    """Write a file that appears whole or not at all.

    `mode`: its permissions, also while it is written; None for those that new files get.
    """
    refuse_existing(target, overwrite=overwrite)
    with naming_failures(target):
        part, file = _new_part(target)
        try:
            if mode is not None:
                os.chmod(file.fileno() if os.chmod in os.supports_fd else part, mode)
            yield file
            file.flush()
            if _WINDOWS:
                file.close()
            publish(part, target)
        except BaseException:
            try:
                # Closing may write again, to a disk that is full.
                file.close()
            finally:
                part.unlink(missing_ok=True)
            raise
        file.close()


def _new_part(target: Path) -> tuple[Path, IO[bytes]]:
    """Make the temporary file of a target, locked, and remove those that killed runs left behind."""
    held = part_of(target)
    # Before, a folder of this name was to be written.
    if held.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(held))
    while True:
        part = held.with_name(f"{held.name}-{secrets.token_hex(8)}")
        file = os.fdopen(os.open(part, _OWN | os.O_CREAT | os.O_EXCL, 0o666), "r+b")
        # Another run may find it before it is locked, take it for one that was left behind, and remove it.
        if take_lock(file.fileno()) and part.exists() and os.path.samestat(os.fstat(file.fileno()), part.stat()):
            break
        file.close()
    for other in target.parent.glob(f"{escape(held.name)}-*"):
        if other != part and not _remove_left(other):
            file.close()
            part.unlink()
            raise UsageError(f"Another run is writing {target}.", cure="Wait for it, or choose another name.")
    return part, file


def _remove_left(path: Path) -> bool:
    """Remove a temporary file that a killed run left behind, or a link in its place; False if a run still writes it."""
    try:
        descriptor = os.open(path, _OWN)
    except FileNotFoundError:
        return True
    except OSError:
        path.unlink(missing_ok=True)
        return True
    try:
        left = take_lock(descriptor)
        if left:
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)
    return left


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Write a folder that appears whole or not at all."""
    refuse_existing(target, overwrite=None)
    part = part_of(target)
    refuse_planted(part)
    with naming_failures(target):
        if part.exists():
            # A run that was killed left this folder.
            shutil.rmtree(part)
        try:
            yield part
            publish(part, target)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise


def usable_cores() -> int:
    """Count the cores that this process may use, which in a container is fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def mapped_files() -> list[tuple[int, int]]:
    """Return the addresses, from and to, at which this process has mapped files; none where the system is not Linux."""
    try:
        lines = Path("/proc/self/maps").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    places = []
    for line in lines:
        span, _, _, _, inode, *_ = line.split(maxsplit=5)
        start, _, end = span.partition("-")
        if inode != "0":
            places.append((int(start, 16), int(end, 16)))
    return places


def in_order(work: Callable[[T], R], tasks: Iterable[T], threads: int) -> Iterator[R]:
    """Do each task on one of some threads; at most two for each thread are under way or wait to be taken."""
    if threads <= 1:
        yield from map(work, tasks)
        return
    pool = ThreadPoolExecutor(threads)
    waiting: deque[Future[R]] = deque()
    try:
        for task in tasks:
            waiting.append(pool.submit(work, task))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        # Without waiting: a generator that was left in the middle is collected in whatever thread allocates next, and
        # one that is just starting holds the lock that joining another needs.
        pool.shutdown(wait=False, cancel_futures=True)


_DEPTH = 100
_BLOCK = 1 << 20  # bytes looked at at a time
# Any text may contain this many values. A parsed value takes up to 64 bytes.
_FREE = 400_000


def parse_json(text: str | bytes, *, most: int | None = None, free: int = _FREE) -> Any:
    """Parse JSON; every refusal is a `ValueError`: too deep, too many values, names given twice, text without UTF-8.

    `most`: values it may hold beyond `free`; None for as many as its own length allows.
    """
    data = text.encode() if isinstance(text, str) else text
    values, depth = _structure(data)
    if depth > _DEPTH:
        raise ValueError(f"it is nested {depth:,} deep, more than {_DEPTH}")
    if most is not None and values > free + most:
        raise ValueError(f"it contains {values:,} values, more than {free + most:,}")
    escapes = b"\\u" in data
    if isinstance(text, str):
        del data  # a copy of the text, which may be long
    parsed = json.loads(text if isinstance(text, str) else data.decode("utf-8-sig"), object_pairs_hook=unique_fields)
    # An escaped half of a surrogate pair is not text, and cannot be written to a file or be part of a name.
    if escapes:
        json.dumps(parsed, ensure_ascii=False).encode()
    return parsed


MOST_CONFIG = 1 << 24
"""The most bytes of a configuration."""
MOST_INDEX = 1 << 25
"""The most bytes of an index of weights, or of a folder's manifest; that of a model of 140,000 tensors has 15 MB."""


def read_json(path: Path, *, limit: int = MOST_CONFIG, most: int | None = 0) -> Any:
    """Read a JSON file of at most `limit` bytes; `most` and refusals as in `parse_json`, and `regular`."""
    with open(path, "rb", opener=regular) as file:
        if os.fstat(file.fileno()).st_size > limit or len(data := file.read(limit + 1)) > limit:
            raise ValueError(f"it contains more than {limit:,} bytes")
    return parse_json(data, most=most)


def read_object(path: Path, *, limit: int = MOST_CONFIG, most: int | None = 0) -> dict[str, Any]:
    """Read a JSON file that holds an object, as `read_json` does."""
    parsed = read_json(path, limit=limit, most=most)
    if not isinstance(parsed, dict):
        raise ValueError(f"it contains a {type(parsed).__name__} instead of an object")
    return parsed


def is_text(name: str) -> bool:
    """Return whether a name can be written as UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _structure(data: bytes) -> tuple[int, int]:
    """Bound the number of values, and find the greatest depth, by brackets and commas outside of strings."""
    # Backslashes are removed in pairs from the left. What remains of a run escapes a quote or a letter.
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    values, depth, deepest, inside = 1, 0, 0, 0
    for start in range(0, len(data), _BLOCK):
        block = np.frombuffer(data, np.uint8, min(_BLOCK, len(data) - start), start)
        # The bytes that matter, few of many: " , [ ] { }
        marks = block[_MARKS[block]]
        quotes = np.cumsum(marks == ord('"'), dtype=np.int32) + inside
        inside = int(quotes[-1]) & 1 if len(quotes) else inside
        marks = marks[quotes & 1 == 0]
        steps = _STEPS[marks]
        values += int(np.count_nonzero(steps > 0)) + int(np.count_nonzero(marks == ord(",")))
        levels = np.cumsum(steps, dtype=np.int32) + depth
        if len(levels):
            deepest, depth = max(deepest, int(levels.max())), int(levels[-1])
    return values, deepest


_MARKS = np.isin(np.arange(256), np.frombuffer(b'",[]{}', np.uint8))
_STEPS = np.zeros(256, np.int8)
_STEPS[np.frombuffer(b"[{", np.uint8)] = 1
_STEPS[np.frombuffer(b"]}", np.uint8)] = -1


def unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object, and refuse one that has a name twice, of which one value would be lost."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(n for n in names if names.count(n) > 1)!r} was given twice")
    return fields


_MOST = 1 << 28  # bytes of a record


def write_record(path: str | Path, values: Mapping[str, Any], *, version: int, overwrite: bool = True) -> None:
    """Write a record, whole or not at all.

    `values`: what `canonical_json` takes; infinity and NaN are kept.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path, overwrite=overwrite) as file:
        file.write(canonical_json({"version": version, **values}, allow_nan=True).encode())


def read_record(path: str | Path, make: Callable[[dict[str, Any]], T], *, version: int, of: str) -> T:
    """Read a record.

    `version`: which it must have.
    """
    try:
        values = read_object(Path(path), limit=_MOST, most=None)
        if values.pop("version") != version:
            raise KeyError("version")
        return make(values)
    except (ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
        raise CorruptBlob(f"{path} is not a record of {of} in version {version}: {error}.") from error
