"""Other contents for the side files of compressed folders, such as a model card, without breaking what proves them.

The manifest keeps the original, so that `netweight decompress` restores it and `netweight verify` knows the new one.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

from netweight.core import digest
from netweight.core.files import part_of, whole_file
from netweight.core.progress import QUIET, Progress, Task
from netweight.errors import UsageError
from netweight.job import Job, check_destination
from netweight.methods.compress.loaders import mark_config, rewrite_index
from netweight.methods.compress.manifest import MANIFEST, FileEntry, Manifest
from netweight.methods.compress.settings import CompressConfig
from netweight.methods.compress.shard import (
    Item,
    Plan,
    ShardResult,
    check_digest,
    compress_shard,
    lies_in_diffusers_model,
    make_plan,
    plain_size,
    restore_shard,
)
from netweight.store.reader import weight_map
from netweight.store.writer import Level


def write_side_file(folder: str | Path, name: str, content: bytes) -> None:
    """Write a file beside weights; in a compressed folder its manifest is told."""
    # What was changed by hand before counts as the original from then on. Writing what is there already changes
    # nothing.
    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        _write(folder / name, content)
        return
    manifest = Manifest.read(folder)
    place = next((number for number, entry in enumerate(manifest.files) if entry.stored == name), None)
    if place is None:  # the original had none: restoring leaves it out
        _write(folder / name, content)
        return
    entry = _retold(manifest.files[place], folder / name, content)
    if entry == manifest.files[place]:
        return
    files = (*manifest.files[:place], entry, *manifest.files[place + 1 :])
    _write(folder / name, content)
    _write(folder / MANIFEST, dataclasses.replace(manifest, files=files).to_json().encode())


def _retold(entry: FileEntry, path: Path, content: bytes) -> FileEntry:
    """The entry of a file after another content was written for it."""
    if path.suffix in (".json", ".safetensors"):
        raise UsageError(f"{path} is needed to open the model.", cure="Change it in the model before compression.")
    found = digest.of_bytes(content)
    if entry.stored_digest == found:
        return entry
    if entry.kind == "rewritten":
        return dataclasses.replace(entry, stored_nbytes=len(content), stored_digest=found)
    original = path.read_bytes()
    digests = digest.of_bytes(original), found
    return FileEntry.rewritten(entry.path, entry.stored, original, digests=digests, size=len(content))


def _write(path: Path, content: bytes) -> None:
    if path.is_file() and path.read_bytes() == content:
        return
    with whole_file(path, overwrite=True) as file:
        file.write(content)


_FINISHED = "files"  # the job's record of finished files
_WORK_ORDER = {"weights": 0, "index": 1, "config": 1, "other": 2}  # an index needs the sizes of its shards


@final
@dataclass(frozen=True)
class Summary:
    """What a run did."""

    source: Path  # what was read
    target: Path  # what was written
    tensors: int  # number of tensors
    nbytes: int  # bytes of the plain weight files
    stored_nbytes: int  # bytes of the compressed weight files
    files: int  # number of all files of the plain folder
    resumed: int  # how many of them an earlier, interrupted run had finished
    left_out: tuple[str, ...]  # files left out by variant or exclusion
    seconds: float  # time taken
    rounded: int = 0  # number of tensors that are rounded
    bound: float = 0.0  # how much rounding may have changed a weight at most, relative to it; 0 if nothing is rounded
    worst_change: float = 0.0  # how much it did change one at most

    @property
    def ratio(self) -> float:
        """Plain bytes per compressed byte; 1 if there are none."""
        return self.nbytes / self.stored_nbytes if self.stored_nbytes else 1.0


def compress_folder(
    source: str | Path,
    target: str | Path,
    *,
    level: Level = "default",
    threads: int | None = None,
    overwrite: bool = False,
    variant: str | None = None,
    exclude: tuple[str, ...] = (),
    mantissa_bits: int = 7,
    block_size: int | None = 512,
    fidelity: str = "corrected",
    ready: Mapping[str, memoryview] = MappingProxyType({}),
    progress: Progress = QUIET,
) -> Summary:
    """Compress a model folder, or a single safetensors file, without losing a bit unless told to round.

    Args:
        source: A `.safetensors` file; or a folder of a transformers or diffusers model, pipeline or adapter. It is only
            read.
        target: Where the compressed file or folder goes. It appears whole or not at all.
        level: `"fast"`, `"default"` or `"max"`, ever smaller and slower to write.
        threads: Threads of the encoder; None takes all cores that the process may use.
        overwrite: Whether an existing target may be replaced.
        variant: Take only the weight files of this variant, e.g. `"fp16"`, where a folder has it.
        exclude: Shell patterns of files to leave out, e.g. `("*.bin",)`.
        mantissa_bits: Bits of the mantissa to keep, 0 to 6, in BF16, F16 and F32 tensors of two and more dimensions; 7
            keeps all bits of everything. What is restored later is the rounded model.
        block_size: Weights that share a normalizer when rounded; None for no normalizers.
        fidelity: The arithmetic of rounding, "corrected" or "reference"; see `netweight.codec.encode_lossy`.
        ready: Blobs to take as they are for tensors whose bytes have these digests.
        progress: Where progress is shown.

    Returns:
        Sizes, counts and time, and what rounding changed.

    Raises:
        Unsupported: There are tensors that cannot be rounded with this fidelity.
        UsageError: The source is not there, holds no weights or is compressed already; or the target lies in it.
        OutputExists: The target exists.
        OutputFailed: The disk is full or the place cannot be written; finished files are kept for the next call.
        UnsafeInput: Weights are pickles, or a link or index leads out of the folder.
        CorruptBlob: A weights file is damaged.
    """
    config = CompressConfig(level, threads, variant, tuple(exclude), mantissa_bits, block_size, fidelity)
    source, target, started = Path(source), Path(target), time.monotonic()
    _check_ends(source, target, overwrite)
    if source.is_file():
        with progress.task(f"compress {source.name}", source.stat().st_size) as task:
            result = compress_shard(
                source,
                target,
                level=level,
                threads=config.workers,
                overwrite=overwrite,
                precision=config.precision,
                ready=ready,
                advance=task.update,
            )
        return _summary_of_file(source, target, result, started)
    plan = make_plan(source, config)
    total = sum(item.size for item in plan.items)
    with _job(target, overwrite) as work, progress.task(f"compress {source.name}", total) as task:
        compression = _Compression(source, plan, config, ready, work, task)
        resumed = compression.run()
        precision = None if config.precision.lossless else config.precision
        files = tuple(compression.done[item.path] for item in plan.items)
        manifest = Manifest(level, files, plan.folders, plan.left_out, precision)
        _write_folder(work.tree / MANIFEST, manifest.to_json().encode())
        _finish(work, [MANIFEST, *(entry.stored for entry in manifest.files)], plan.folders)
        work.publish(target, overwrite=overwrite)
    return _summary(source, target, manifest, resumed, plan.left_out, started)


def decompress_folder(
    source: str | Path,
    target: str | Path,
    *,
    threads: int | None = None,
    overwrite: bool = False,
    progress: Progress = QUIET,
) -> Summary:
    """Restore what `compress_folder` was given: every file byte for byte. All digests are checked.

    Args:
        source: A compressed file or folder. It is only read.
        target: Where the plain file or folder goes. It appears whole or not at all.
        threads: Threads of the decoder; None takes all cores that the process may use.
        overwrite: Whether an existing target may be replaced.
        progress: Where progress is shown.

    Returns:
        Sizes, counts and time.

    Raises:
        UsageError: The source is not there or not compressed, or the target lies in it.
        OutputExists: The target exists.
        OutputFailed: The disk is full or the place cannot be written; finished files are kept for the next call.
        CorruptBlob: A file is damaged; the tensor is named.
        UnsafeInput: The manifest points outside the folder.
    """
    config = CompressConfig(threads=threads)
    source, target, started = Path(source), Path(target), time.monotonic()
    _check_ends(source, target, overwrite)
    if source.is_file():
        with progress.task(f"decompress {source.name}", plain_size(source)) as task:
            result = restore_shard(source, target, threads=config.workers, overwrite=overwrite, advance=task.update)
        return _summary_of_file(source, target, result, started)
    manifest = Manifest.read(source)
    manifest.check_present(source)
    total = sum(entry.nbytes for entry in manifest.files)
    with _job(target, overwrite) as work, progress.task(f"decompress {source.name}", total) as task:
        resumed = 0
        for entry in manifest.files:
            task.describe(entry.path)
            status = (source / entry.stored).stat()
            key = {"path": entry.path, "size": status.st_size, "mtime_ns": status.st_mtime_ns, "digest": entry.digest}
            if _finished(work, key) is not None:
                resumed += 1
                task.update(entry.nbytes)
                continue
            _restore(source / entry.stored, work.file(entry.path), entry, config.workers, task)
            _record(work, key, {}, entry.path)
        _finish(work, [entry.path for entry in manifest.files], manifest.folders)
        work.publish(target, overwrite=overwrite)
    return _summary(source, target, manifest, resumed, (), started)


def _check_ends(source: Path, target: Path, overwrite: bool) -> None:
    """Refuse ends that cannot be before anything is read."""
    if not source.exists():
        raise UsageError(f"There is no file or folder {source}.", cure="Check the path.")
    read, written = source.resolve(), target.resolve()
    if read == written:
        raise UsageError(f"{source} cannot be its own target.", cure="Choose another name.")
    if source.is_dir() and (written.is_relative_to(read) or read.is_relative_to(written)):
        raise UsageError(f"{source} and {target} lie one inside the other.", cure="Choose a place beside it.")
    if target.is_dir() and source.is_file():
        raise UsageError(f"{target} is a folder.", cure=f"Name the file to write, e.g. {target / source.name}.")
    if target.is_file() and source.is_dir():
        raise UsageError(f"{target} is a file, {source} a folder.", cure="Choose another name.")
    check_destination(target, overwrite=overwrite, folder=part_of(target))


def _job(target: Path, overwrite: bool) -> AbstractContextManager[Job]:
    return Job.beside(target, overwrite=overwrite, folder=part_of(target))


def _record(work: Job, key: Mapping[str, Any], entry: Mapping[str, Any], name: str) -> None:
    """Note that a file is finished, by everything that it depends on."""
    size = (work.tree / name).stat().st_size
    work.record(_FINISHED, {"entry": dict(entry), "file": name, "size": size}, key=key)


def _finished(work: Job, key: Mapping[str, Any]) -> dict[str, Any] | None:
    """The entry of a file that an earlier run finished from the same input, if the file is still there."""
    row = work.recorded(_FINISHED, key)
    if row is None:
        return None
    file = work.tree / row["file"]
    if not file.is_file() or file.stat().st_size != row["size"]:
        return None
    entry: dict[str, Any] = row["entry"]
    return entry


def _finish(work: Job, files: Iterable[str], folders: Iterable[str]) -> None:
    """Make empty folders, and remove files of earlier runs that do not belong to the result."""
    for folder in folders:
        (work.tree / folder).mkdir(parents=True, exist_ok=True)
    expected = {work.tree / name for name in files}
    for file in [path for path in work.tree.rglob("*") if not path.is_dir() and path not in expected]:
        file.unlink()


@final
@dataclass(frozen=True)
class _Compression:
    """One run over a folder: what is read, how, and where it goes."""

    source: Path
    plan: Plan
    config: CompressConfig
    ready: Mapping[str, memoryview]
    work: Job
    task: Task
    done: dict[str, FileEntry] = field(default_factory=dict)

    def run(self) -> int:
        """Do every file; return how many an earlier run had done."""
        resumed = 0
        how = {"weights": self.weights, "index": self.index, "config": self.configuration, "other": self.other}
        for item in sorted(self.plan.items, key=lambda item: _WORK_ORDER[item.role]):
            self.task.describe(item.path)
            key = {**vars(item), "level": self.config.level, **_rounding_key(self.config)}
            # Rewritten files depend on all others beside them and cost nothing, so they are always written anew.
            known = _finished(self.work, key) if item.role in ("weights", "other") else None
            if known is None:
                entry = how[item.role](item)
                _record(self.work, key, vars(entry), item.stored)
            else:
                entry = FileEntry(**known)
                resumed += 1
                self.task.update(item.size)
            self.done[item.path] = entry
        return resumed

    def weights(self, item: Item) -> FileEntry:
        """Compress a weights file."""
        result = compress_shard(
            self.source / item.path,
            self.work.file(item.stored),
            level=self.config.level,
            threads=self.config.workers,
            overwrite=True,
            precision=self.config.precision,
            ready=self.ready,
            advance=self.task.update,
        )
        return FileEntry(
            path=item.path,
            kind="compressed",
            stored=item.stored,
            nbytes=result.nbytes,
            digest=result.digest,
            stored_nbytes=result.stored_nbytes,
            tensors=result.tensors,
            payload=result.payload,
            rounded=result.rounded,
            bound=result.bound,
            worst_change=result.worst_change,
        )

    def index(self, item: Item) -> FileEntry:
        """Rewrite an index for the compressed shards."""
        file, parent = self.source / item.path, Path(item.path).parent
        shards = {(parent / name).as_posix() for name in weight_map(file).values()}
        total = sum(entry.payload for path, entry in self.done.items() if path in shards)
        content = file.read_bytes()
        return self.rewrite(
            item, content, rewrite_index(content, diffusers=lies_in_diffusers_model(file), total_size=total)
        )

    def configuration(self, item: Item) -> FileEntry:
        """Mark a configuration, so that loaders that lack netweight refuse the folder."""
        content, parent = (self.source / item.path).read_bytes(), Path(item.path).parent
        weights = [Path(other.path) for other in self.plan.items if other.role in ("weights", "index")]
        beside = [path.name for path in weights if path.parent == parent]
        marked = mark_config(Path(item.path).name, content, beside)
        return self.other(item) if marked is None else self.rewrite(item, content, marked)

    def other(self, item: Item) -> FileEntry:
        """Carry a file over."""
        target = self.work.file(item.stored)
        _copy(self.source / item.path, target)
        self.task.update(item.size)
        found, size = digest.of_file(target), target.stat().st_size
        return FileEntry(item.path, "carried", item.stored, size, found, size, found)

    def rewrite(self, item: Item, content: bytes, stored: bytes) -> FileEntry:
        """Write new content for a file and keep the original in its entry."""
        _write_folder(self.work.file(item.stored), stored)
        self.task.update(len(content))
        digests = digest.of_bytes(content), digest.of_bytes(stored)
        return FileEntry.rewritten(item.path, item.stored, content, digests=digests, size=len(stored))


def _rounding_key(config: CompressConfig) -> dict[str, object]:
    """What an interrupted run's results depend on besides level and inputs."""
    return {} if config.precision.lossless else asdict(config.precision)


def _restore(stored: Path, target: Path, entry: FileEntry, threads: int, task: Task) -> None:
    """Restore one file and compare it with what was recorded."""
    if entry.kind == "compressed":
        found = restore_shard(stored, target, threads=threads, overwrite=True, advance=task.update).digest
    else:
        if entry.kind == "rewritten":
            _write_folder(target, entry.original_content())
        else:
            _copy(stored, target)
        found = digest.of_file(target)
        task.update(entry.nbytes)
    check_digest(stored, found, entry.digest)


def _write_folder(target: Path, content: bytes) -> None:
    with whole_file(target, overwrite=True) as file:
        file.write(content)


def _copy(source: Path, target: Path) -> None:
    """Copy content and permissions, so that the copy appears whole or not at all."""
    with whole_file(target, overwrite=True) as output, open(source, "rb") as content:
        shutil.copyfileobj(content, output, 1 << 22)
        os.fchmod(output.fileno(), source.stat().st_mode & 0o777 | 0o200)


def _summary_of_file(source: Path, target: Path, result: ShardResult, started: float) -> Summary:
    return Summary(
        source,
        target,
        result.tensors,
        result.nbytes,
        result.stored_nbytes,
        1,
        0,
        (),
        time.monotonic() - started,
        result.rounded,
        result.bound,
        result.worst_change,
    )


def _summary(
    source: Path, target: Path, manifest: Manifest, resumed: int, left_out: tuple[str, ...], started: float
) -> Summary:
    weights = [entry for entry in manifest.files if entry.kind == "compressed"]
    return Summary(
        source,
        target,
        sum(entry.tensors for entry in weights),
        sum(entry.nbytes for entry in weights),
        sum(entry.stored_nbytes for entry in weights),
        len(manifest.files),
        resumed,
        left_out,
        time.monotonic() - started,
        sum(entry.rounded for entry in weights),
        max((entry.bound for entry in weights), default=0.0),
        max((entry.worst_change for entry in weights), default=0.0),
    )
