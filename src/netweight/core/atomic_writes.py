"""Files and folders that appear completely or not at all.

Ours are written aside, synced, renamed. A file's temporary name begins with the target's and ends at random, so that
nobody can have put a link there beforehand; the file is locked while in use, so that two runs cannot mix, and so that
a later run can tell what a killed one left behind. A folder's temporary name is derived from the target's, so that the
next run continues in it. `publish` is the one place that syncs and renames.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import IO

from netweight.core.file_locks import OPEN_OWN, refuse_planted, take_lock
from netweight.errors import NetweightError, OutputExists, OutputFailed, UsageError

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
    # These are AT_FDCWD and RENAME_EXCHANGE of Linux.
    here, swap = -100, 2
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
        file = os.fdopen(os.open(part, OPEN_OWN | os.O_CREAT | os.O_EXCL, 0o666), "r+b")
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
        descriptor = os.open(path, OPEN_OWN)
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
