"""Model folders compressed and restored, file by file, so that an interrupted run continues."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from netweight.codec import Precision
from netweight.codec.lossy import LOSSLESS_BITS
from netweight.core import quantities
from netweight.core.atomic_writes import mode_of, part_of, whole_file
from netweight.core.digests import digest_bytes, digest_file
from netweight.core.progress import QUIET, Progress, ProgressTask
from netweight.core.threads import usable_cores
from netweight.errors import UsageError
from netweight.job import Job, check_destination
from netweight.methods.compress.folder_format import (
    MANIFEST,
    NOTE,
    FileEntry,
    FolderPlan,
    Manifest,
    PlannedFile,
    make_plan,
    mark_config,
    rewrite_index,
)
from netweight.methods.compress.settings import CompressSettings
from netweight.store.choices import LEAST
from netweight.store.compression import write_compressed
from netweight.store.file_totals import FileTotals
from netweight.store.reader import Base, StoredFile, weight_map
from netweight.store.restoration import check_digest, plain_size, restore_file
from netweight.store.sources import FileSource, TensorSource
from netweight.store.writer import StoredTensors

_FINISHED = "files"  # the job's record of finished files
# An index needs the sizes of its shards, so it comes after the weights.
_WORK_ORDER = {"weights": 0, "index": 1, "config": 1, "carried": 2}


# If copied files take more than this share of the weights' bytes, the summary mentions them.
_MUCH = 0.02
_SHOWN = 3  # files that the sentence names
# Bytes of a tensor beside which its header, of some hundred bytes with its entry, matters.
_SMALL = 4096
_BYTES_ONLY = (
    "its bytes were compressed without loss and its configuration was left as it is. Before use, restore it: "
    "netweight decompress FOLDER NEW_FOLDER."
)


@final
@dataclass(frozen=True)
class Summary:
    """Summary of a run."""

    source: Path
    """Folder or file that was read."""
    target: Path
    """Folder or file that was written."""
    tensors: int
    """Number of tensors."""
    nbytes: int
    """Bytes of the plain weight files."""
    stored_nbytes: int
    """Bytes of the compressed weight files."""
    files: int
    """Number of all files of the plain folder."""
    resumed: int
    """Number of files that an earlier, interrupted run had finished."""
    left_out: tuple[str, ...]
    """Files left out by variant or exclusion."""
    seconds: float
    """Duration in seconds."""
    rounded: int = 0
    """Number of tensors that are rounded."""
    bound: float = 0.0
    """Largest relative change of a weight that rounding may cause; 0 if nothing is rounded."""
    worst_change: float = 0.0
    """Largest relative change of a weight that rounding caused."""
    carried: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Files that were only copied, with their sizes in bytes, the largest first."""
    bytes_only: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Folders of quantized weights that must be decompressed before use; see `Manifest.bytes_only`."""
    base: Path | None = None
    """The base that was given. If `differences` is 0 the result is not bound to it."""
    differences: int = 0
    """Number of tensors that are stored as differences from the base."""
    unlike_base: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Tensors that have no counterpart in the base, counted by the reason."""

    @property
    def ratio(self) -> float:
        """Plain bytes per compressed byte of the weight files; 1 if there are none."""
        return self.nbytes / self.stored_nbytes if self.stored_nbytes else 1.0

    @property
    def folder_nbytes(self) -> int:
        """Bytes of all files of the plain folder, but for small configuration files."""
        return self.nbytes + sum(self.carried.values())

    @property
    def folder_stored_nbytes(self) -> int:
        """Bytes of all files of the compressed folder, but for small configuration files."""
        return self.stored_nbytes + sum(self.carried.values())

    def notes(self) -> list[str]:
        """Say, in sentences for a person, what the sizes of the weights alone do not show.

        Returns:
            A line each for: weights that did not become smaller; parts that must be decompressed before use; files of
            some size that were only copied, with the folder's totals; a base of which few tensors or none made use.
        """
        lines = []
        if self.tensors and self.stored_nbytes >= self.nbytes:
            mean = self.nbytes // self.tensors
            reason = (
                f"the files have {mean:,} bytes for each tensor, and each compressed tensor needs a header of its own"
                if mean < _SMALL else "their bytes can hardly be predicted, as those of quantized weights"
            )  # fmt: skip
            lines.append(f"The weights did not become smaller: {reason}. Keep the original.")
        lines += [f"{_where(self.target, at)} {reason}: {_BYTES_ONLY}" for at, reason in self.bytes_only.items()]
        if self.base is not None and self.unlike_base:
            reasons = "; ".join(
                f"{quantities.many(count, 'tensor')} {reason}" for reason, count in sorted(self.unlike_base.items())
            )
            if self.differences:
                lines.append(f"{self.differences} of {self.tensors} tensors are stored as differences: {reasons}.")
            else:
                lines.append(
                    f"No tensor became smaller as a difference from the base {self.base}, and the result does not need "
                    f"it: {reasons}. Check that the base is the model that was fine-tuned, "
                    "with the same names and dtypes."
                )
        carried = sum(self.carried.values())
        if carried > _MUCH * max(self.nbytes, 1):
            shown = [f"{path} ({quantities.size(size)})" for path, size in [*self.carried.items()][:_SHOWN]]
            others = len(self.carried) - len(shown)
            more = f" and {others} other {'file' if others == 1 else 'files'}" if others else ""
            lines.append(
                f"Only weights in safetensors files are compressed. {quantities.size(carried)} were copied as they "
                f"are: {', '.join(shown)}{more}. The folder as a whole went from "
                f"{quantities.size(self.folder_nbytes)} to {quantities.size(self.folder_stored_nbytes)}."
            )
        return lines


def compress_folder(
    source: str | Path,
    target: str | Path,
    settings: CompressSettings | None = None,
    *,
    overwrite: bool = False,
    sources: Mapping[str, TensorSource] | None = None,
    progress: Progress = QUIET,
    **options: Any,
) -> Summary:
    """Compress a model folder, or a single safetensors file, without losing a bit unless `mantissa_bits` is below 7.

    Args:
        source: A `.safetensors` file; or a folder of a transformers or diffusers model, pipeline or adapter. It is only
            read.
        target: Where the compressed file or folder goes. It appears whole or not at all.
        settings: How to compress; None for the defaults.
        overwrite: Whether an existing target may be replaced.
        sources: Weights files that the folder lacks, by their paths within it, such as those of a model in memory that
            is saved; None if all are there.
        progress: Where progress is shown.
        **options: Fields of `CompressSettings`, in place of those in `settings`: `level`, `threads`, `variant`,
            `exclude`, `base`, `mantissa_bits`, `block_size`, `fidelity`.

    Returns:
        Sizes, counts and time, and what rounding changed.

    Raises:
        Unsupported: There are tensors that cannot be rounded with this fidelity.
        UsageError: The source does not exist, contains no weights or is compressed already; or the target lies in it;
            or a setting is out of its range.
        OutputExists: The target exists.
        OutputFailed: The disk is full or the place cannot be written; finished files are kept for the next call.
        UnsafeInput: Weights are pickles, or a link or index leads out of the folder.
        CorruptBlob: A weights file is damaged.
    """
    settings = (settings or CompressSettings()).replace(**options)
    source, target, started = Path(source), Path(target), time.monotonic()
    _check_ends(source, target, overwrite)
    _check_base(settings.base, source, target)
    if source.is_file():
        with progress.task(f"compress {source.name}", source.stat().st_size) as task:
            with FileSource(source) as file:
                result = write_compressed(
                    file,
                    target,
                    level=settings.level,
                    threads=settings.threads or usable_cores(),
                    overwrite=overwrite,
                    precision=_precision(settings),
                    base=None if settings.base is None else Base(settings.base),
                    advance=task.update,
                )
        return dataclasses.replace(_summary(source, target, [result], started), base=settings.base)
    sources = sources or {}
    plan = make_plan(source, settings, sources)
    total = sum(item.size for item in plan.items)
    with _job(target, overwrite) as work, progress.task(f"compress {source.name}", total) as task:
        compression = _Compression(source, plan, settings, sources, work, task)
        resumed = compression.run()
        entries = tuple(compression.done[item.path] for item in plan.items)
        precision = _precision(settings)
        manifest = Manifest(settings.level, entries, plan.folders, plan.left_out, precision, plan.bytes_only)
        _write(work.tree / MANIFEST, manifest.to_json().encode())
        if plan.bytes_only:
            _write(work.tree / NOTE, manifest.note().encode())
        _finish(work, manifest.stored_names, plan.folders)
        work.publish(target, overwrite=overwrite)
    summary = _summary(source, target, entries, started, resumed, plan.left_out)
    return dataclasses.replace(summary, bytes_only=plan.bytes_only, base=settings.base)


def decompress_folder(
    source: str | Path,
    target: str | Path,
    *,
    base: str | Path | None = None,
    threads: int | None = None,
    overwrite: bool = False,
    progress: Progress = QUIET,
) -> Summary:
    """Restore what `compress_folder` was given: every file byte for byte. All digests are checked.

    Args:
        source: A compressed file or folder. It is only read.
        target: Where the plain file or folder goes. It appears whole or not at all.
        base: What it holds differences from, if it does; None looks beside it, in the hub's cache, and where the
            variable NETWEIGHT_BASE says.
        threads: Threads of the decoder; None takes all cores that the process may use.
        overwrite: Whether an existing target may be replaced.
        progress: Where progress is shown.

    Returns:
        Sizes, counts and time.

    Raises:
        UsageError: The source is not there or not compressed, or the target lies in it, or its base is not at hand or
            another one.
        OutputExists: The target exists.
        OutputFailed: The disk is full or the place cannot be written; finished files are kept for the next call.
        CorruptBlob: A file is damaged; the tensor is named.
        UnsafeInput: The manifest points outside the folder.
    """
    workers = usable_cores() if threads is None else threads
    source, target, started = Path(source), Path(target), time.monotonic()
    base = None if base is None else Path(base)
    _check_ends(source, target, overwrite)
    _check_base(base, source, target)
    if source.is_file():
        with progress.task(f"decompress {source.name}", plain_size(source)) as task:
            result = restore_file(source, target, threads=workers, overwrite=overwrite, base=base, advance=task.update)
        return _summary(source, target, [result], started)
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
            _restore(source / entry.stored, work.file(entry.path), entry, workers, base, task)
            _record(work, key, {}, entry.path)
        _finish(work, [entry.path for entry in manifest.files], manifest.folders)
        work.publish(target, overwrite=overwrite)
    return _summary(source, target, manifest.files, started, resumed)


def _check_ends(source: Path, target: Path, overwrite: bool) -> None:
    """Refuse ends that cannot be before anything is read."""
    if not source.exists():
        raise UsageError(f"There is no file or folder {source}.", cure="Check the path.")
    read, written = source.resolve(), target.resolve()
    if read == written:
        raise UsageError(f"{source} cannot be its own target.", cure="Choose another name.")
    if source.is_dir() and (written.is_relative_to(read) or read.is_relative_to(written)):
        raise UsageError(f"One of {source} and {target} is inside the other.", cure="Choose a place outside of it.")
    if target.is_dir() and source.is_file():
        raise UsageError(f"{target} is a folder.", cure=f"Name the file to write, e.g. {target / source.name}.")
    if target.is_file() and source.is_dir():
        raise UsageError(f"{target} is a file, but {source} is a folder.", cure="Choose another name.")
    check_destination(target, overwrite=overwrite, folder=part_of(target))


def _check_base(base: Path | None, source: Path, target: Path) -> None:
    """Refuse a base that is not there, or is what is read or written."""
    if base is None:
        return
    if not base.exists():
        raise UsageError(f"There is no file or folder {base}.", cure="Check the path of the base.")
    if base.resolve() in (source.resolve(), target.resolve()):
        raise UsageError(f"{base} cannot be its own base.", cure="Give another one.")


def _precision(settings: CompressSettings) -> Precision | None:
    """Return the precision of the weights; None for lossless."""
    exact = settings.mantissa_bits == LOSSLESS_BITS
    return None if exact else Precision(settings.mantissa_bits, settings.block_size, settings.fidelity)


def _summary(
    source: Path,
    target: Path,
    files: Sequence[FileEntry | FileTotals],
    started: float,
    resumed: int = 0,
    left_out: tuple[str, ...] = (),
) -> Summary:
    weights = [file for file in files if isinstance(file, FileTotals) or file.kind == "compressed"]
    unlike: Counter[str] = Counter()
    for file in weights:
        unlike.update(file.unlike_base)
    return Summary(
        source,
        target,
        tensors=sum(file.tensors for file in weights),
        nbytes=sum(file.nbytes for file in weights),
        stored_nbytes=sum(file.stored_nbytes for file in weights),
        files=len(files),
        resumed=resumed,
        left_out=left_out,
        seconds=time.monotonic() - started,
        rounded=sum(file.rounded for file in weights),
        bound=max((file.bound for file in weights), default=0.0),
        worst_change=max((file.worst_change for file in weights), default=0.0),
        differences=sum(file.differences for file in weights),
        unlike_base=dict(unlike),
        carried=_by_size(file for file in files if isinstance(file, FileEntry) and file.kind == "carried"),
    )


def _by_size(files: Iterable[FileEntry]) -> dict[str, int]:
    return {file.path: file.nbytes for file in sorted(files, key=lambda file: -file.nbytes)}


def _where(target: Path, at: str) -> str:
    return str(target if at == "." else target / at)


@dataclass
class _Compression:
    """One run over a folder: what is read, how, and where it goes."""

    source: Path
    plan: FolderPlan
    settings: CompressSettings
    sources: Mapping[str, TensorSource]
    work: Job
    task: ProgressTask
    done: dict[str, FileEntry] = dataclasses.field(default_factory=dict)
    stored_tensors: dict[Path, StoredTensors] = dataclasses.field(default_factory=dict)
    """Folder → tensors of its files."""
    bases: dict[Path, Base] = dataclasses.field(default_factory=dict)
    """Folder whose tensors are differences → its base."""

    def run(self) -> int:
        """Do every file; return how many an earlier run had done."""
        resumed = 0
        precision = _precision(self.settings)
        how = {"level": self.settings.level} | ({} if precision is None else dataclasses.asdict(precision))
        if self.settings.base is not None:
            how["base"] = _state_of(self.settings.base)
        for item in sorted(self.plan.items, key=lambda item: _WORK_ORDER[item.role]):
            self.task.describe(item.path)
            key = {**vars(item), **how}
            # Rewritten files depend on all others beside them and cost nothing, so they are always written anew.
            finished = _finished(self.work, key) if item.role in ("weights", "carried") else None
            if finished is None:
                entry: FileEntry = getattr(self, f"_{item.role}")(item)
                _record(self.work, key, vars(entry), item.stored)
            else:
                entry = FileEntry(**finished)
                resumed += 1
                if item.role == "weights":
                    self._remember(item)
                self.task.update(item.size)
            self.done[item.path] = entry
        return resumed

    def _weights(self, item: PlannedFile) -> FileEntry:
        """Compress a weights file."""
        given = self.sources.get(item.path)
        with FileSource(self.source / item.path) if given is None else nullcontext(given) as source:
            result = write_compressed(
                source,
                self.work.file(item.stored),
                level=self.settings.level,
                threads=self.settings.threads or usable_cores(),
                overwrite=True,
                precision=_precision(self.settings),
                base=self._base(item),
                stored_tensors=self.stored_tensors.setdefault(Path(item.stored).parent, {}),
                advance=self.task.update,
            )
        return FileEntry(path=item.path, kind="compressed", stored=item.stored, **vars(result))

    def _base(self, item: PlannedFile) -> Base | None:
        """Return the base of the tensors in a folder of the model."""
        if self.settings.base is None:
            return None
        within = Path(item.path).parent
        return self.bases.setdefault(within, Base(self.settings.base, within.as_posix()))

    def _remember(self, item: PlannedFile) -> None:
        """Note the tensors of a file that an earlier run finished, as if they had been written now."""
        tensors = self.stored_tensors.setdefault(Path(item.stored).parent, {})
        with closing(StoredFile(self.work.tree / item.stored)) as file:
            same = {} if file.description is None else file.description.same
            for info in (file.info(name) for name in file.names() if name not in same):
                if info.nbytes >= LEAST and info.digest is not None and file.rounding(info.name) is None:
                    tensors.setdefault((info.digest, info.dtype, info.shape), (Path(item.stored).name, info.name))

    def _index(self, item: PlannedFile) -> FileEntry:
        """Rewrite an index for the compressed shards."""
        file, parent = self.source / item.path, Path(item.path).parent
        shards = {(parent / name).as_posix() for name in weight_map(file).values()}
        total = sum(entry.payload for path, entry in self.done.items() if path in shards)
        content = file.read_bytes()
        return self._rewrite(
            item, content, rewrite_index(content, keeps_names=item.stored == item.path, total_size=total)
        )

    def _config(self, item: PlannedFile) -> FileEntry:
        """Mark a configuration, so that loaders that lack netweight refuse the folder."""
        content, parent = (self.source / item.path).read_bytes(), Path(item.path).parent
        weights = [Path(other.path) for other in self.plan.items if other.role in ("weights", "index")]
        beside = [path.name for path in weights if path.parent == parent]
        marked = mark_config(Path(item.path).name, content, beside)
        return self._carried(item) if marked is None else self._rewrite(item, content, marked)

    def _carried(self, item: PlannedFile) -> FileEntry:
        """Carry a file over."""
        target = self.work.file(item.stored)
        _copy(self.source / item.path, target)
        self.task.update(item.size)
        digest, size = digest_file(target), target.stat().st_size
        return FileEntry(item.path, "carried", item.stored, size, digest, size, digest)

    def _rewrite(self, item: PlannedFile, content: bytes, stored: bytes) -> FileEntry:
        """Write new content for a file and keep the original in its entry."""
        _write(self.work.file(item.stored), stored, mode_of(self.source / item.path))
        self.task.update(len(content))
        digests = digest_bytes(content), digest_bytes(stored)
        return FileEntry.rewritten(item.path, item.stored, content, digests=digests, size=len(stored))


def _restore(stored: Path, target: Path, entry: FileEntry, threads: int, base: Path | None, task: ProgressTask) -> None:
    """Restore one file and compare it with what was recorded."""
    if entry.kind == "compressed":
        digest = restore_file(stored, target, threads=threads, overwrite=True, base=base, advance=task.update).digest
    else:
        if entry.kind == "rewritten":
            _write(target, entry.original_content(), mode_of(stored))
        else:
            _copy(stored, target)
        digest = digest_file(target)
        task.update(entry.nbytes)
    check_digest(stored, digest, entry.digest)


def _state_of(base: Path) -> list[tuple[str, int, int]]:
    """The files of a base, by which a change of it is noticed."""
    files = [base] if base.is_file() else sorted(base.rglob("*.safetensors"))
    return [(str(file), (status := file.stat()).st_size, status.st_mtime_ns) for file in files]


def _write(target: Path, content: bytes, mode: int | None = None) -> None:
    with whole_file(target, overwrite=True, mode=mode) as file:
        file.write(content)


def _copy(source: Path, target: Path) -> None:
    """Copy content and permissions, so that the copy appears whole or not at all."""
    with whole_file(target, overwrite=True, mode=mode_of(source)) as output, open(source, "rb") as content:
        shutil.copyfileobj(content, output, 1 << 22)


# ---- the job ---------------------------------------------------------------------------------------------------------


def _job(target: Path, overwrite: bool) -> AbstractContextManager[Job]:
    """The job that makes a folder: finished files are continued after a kill, a full disk or any other failure."""
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


# ---- files beside weights --------------------------------------------------------------------------------------------


def write_side_file(folder: str | Path, name: str, content: bytes) -> None:
    """Write a file beside weights; in a compressed folder its entry in the manifest follows."""
    # What was changed by hand before counts as the original from then on. Writing what is there already changes
    # nothing.
    folder, path = Path(folder), Path(folder) / name
    manifest = Manifest.read(folder) if (folder / MANIFEST).is_file() else None
    entry = None if manifest is None else next((file for file in manifest.files if file.stored == name), None)
    # Without an entry the original had no such file: restoring leaves it out.
    again = None if entry is None else _with_content(entry, path, content)
    if entry is not None and again == entry:
        return
    if not (path.is_file() and path.read_bytes() == content):
        _write(path, content)
    if manifest is not None and again is not None:
        files = tuple(again if file is entry else file for file in manifest.files)
        _write(folder / MANIFEST, dataclasses.replace(manifest, files=files).to_json().encode())


def _with_content(entry: FileEntry, path: Path, content: bytes) -> FileEntry:
    """The entry of a file after another content was written for it."""
    if path.suffix in (".json", ".safetensors") and not path.parent.name.endswith("-report"):
        raise UsageError(
            f"{path} is needed to open the compressed model, so it is not replaced.",
            cure="Change it in the model before compression.",
        )
    digest = digest_bytes(content)
    if entry.stored_digest == digest:
        return entry
    if entry.kind == "rewritten":
        return dataclasses.replace(entry, stored_nbytes=len(content), stored_digest=digest)
    original = path.read_bytes()
    digests = digest_bytes(original), digest
    return FileEntry.rewritten(entry.path, entry.stored, original, digests=digests, size=len(content))
