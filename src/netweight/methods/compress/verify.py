"""How far rounded weights are from those they were made of. Used by the audit; it shares no code with the rounding."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt
import xxhash

from netweight.codec import BlobInfo
from netweight.core import digest
from netweight.core.progress import QUIET, Progress
from netweight.errors import CorruptBlob, UsageError
from netweight.methods.compress.manifest import MANIFEST, FileEntry, Manifest
from netweight.methods.compress.settings import CompressConfig
from netweight.methods.compress.shard import plain_head, plain_size
from netweight.report.audit import register_audit, register_treatment
from netweight.report.finding import Finding
from netweight.store.reader import StoredFile

_BLOCK = 1 << 20  # numbers compared at a time


def largest_change(rounded: Any, original: Any, dtype: str) -> float:
    """Find the largest relative change |rounded - original| / |original|."""
    worst = 0.0
    stored = np.dtype("<u4" if dtype == "F32" else "<u2")
    mine, theirs = np.frombuffer(rounded, stored), np.frombuffer(original, stored)
    for start in range(0, len(mine), _BLOCK):
        left, right = mine[start : start + _BLOCK], theirs[start : start + _BLOCK]
        differ = left != right
        before, after = _values(right[differ], dtype), _values(left[differ], dtype)
        if not np.isfinite(before).all() or not np.isfinite(after).all() or not before.all():
            return math.inf
        worst = max(worst, float((np.abs(after - before) / np.abs(before)).max(initial=0.0)))
    return worst


def _values(stored: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float64]:
    """Numbers as float64, which holds each of them and each difference of two that are close."""
    with np.errstate(invalid="ignore"):  # signaling NaNs
        if dtype == "BF16":
            return (stored.astype("<u4") << 16).view("<f4").astype(np.float64)
        return stored.view("<f4" if dtype == "F32" else "<f2").astype(np.float64)


TREATMENT = "compress"
_SHOWN = 100  # names kept per finding


@final
@dataclass(frozen=True)
class Compressed:
    """What the audit looks at: the compressed file or folder, and the one that it was made from."""

    path: Path  # what was made
    source: Path  # what it was made from


def verify(
    path: str | Path,
    against: str | Path | None = None,
    *,
    threads: int | None = None,
    progress: Progress = QUIET,
) -> list[Finding]:
    """Decode everything and compare it with the recorded digests and, if given, with the original.

    Args:
        path: A file or folder, usually compressed.
        against: The file or folder that it was made from, or another one that should hold the same, compressed or not.
        threads: Threads of the decoder; None takes all cores that the process may use.
        progress: Where progress is shown.

    Returns:
        Findings that each count what is wrong, with target 0 and the names in `detail["which"]`: damaged tensors and
        files, and with `against` tensors that differ, tensors and files that only one side has, and files that differ;
        at last the ratio. Where tensors are rounded, those of them that differ by more than their bound are counted
        apart, and the largest relative change is told with the largest bound: with `against` as measured now, without
        as recorded when they were rounded.

    Raises:
        UsageError: A path is not there; or one is a file and the other a folder; or `path` is not compressed, so that
            it carries no digests, and `against` is missing.
        CorruptBlob: A file is so damaged that it cannot be opened, or missing.
        UnsafeInput: A manifest points outside its folder.
    """
    config = CompressConfig(threads=threads)
    subject = _Side.open(Path(path))
    other = None if against is None else _Side.open(Path(against))
    if other is not None and subject.root.is_file() != other.root.is_file():
        raise UsageError(
            f"{subject.root} and {other.root} are not two files or two folders.",
            cure="Compare a file with a file: name the weights file inside the folder.",
        )
    if not subject.compressed and other is None:
        raise UsageError(
            f"{subject.root} is not compressed and carries no digests.", cure="Name the original: --against SRC."
        )
    tally = _Tally()
    with progress.task(f"verify {subject.root.name}", subject.nbytes()) as task:
        for name, file in subject.weights.items():
            task.describe(name)
            peer = None if other is None else other.weights.get(name)
            _check_weights(subject, name, file, peer, config.workers, tally, task.update)
    _check_others(subject, other, tally)
    return tally.findings(subject, other)


@final
@dataclass(frozen=True)
class _Side:
    """The files of one file or folder by the paths they have when it is not compressed."""

    root: Path
    manifest: Manifest | None
    weights: dict[str, Path]
    others: dict[str, Path]

    @classmethod
    def open(cls, path: Path) -> _Side:
        if path.is_file():
            return cls(path, None, {"": path}, {})
        if not path.is_dir():
            raise UsageError(f"There is no file or folder {path}.", cure="Check the path.")
        if (path / MANIFEST).exists():
            manifest = Manifest.read(path)
            manifest.check_present(path)
            places = {entry.path: (entry.kind, path / entry.stored) for entry in manifest.files}
            weights = {name: file for name, (kind, file) in places.items() if kind == "compressed"}
            return cls(
                path, manifest, weights, {name: file for name, (_, file) in places.items() if name not in weights}
            )
        files = {file.relative_to(path).as_posix(): file for file in sorted(_files(path))}
        weights = {name: file for name, file in files.items() if name.endswith(".safetensors")}
        return cls(path, None, weights, {name: file for name, file in files.items() if name not in weights})

    @property
    def compressed(self) -> bool:
        """Whether anything in it carries digests."""
        return self.manifest is not None or any(_is_compressed(file) for file in self.weights.values())

    def entry(self, name: str) -> FileEntry | None:
        """What the manifest says of a file."""
        if self.manifest is None:
            return None
        return next(entry for entry in self.manifest.files if entry.path == name)

    def nbytes(self) -> int:
        """Bytes of the weight files when not compressed."""
        return sum(map(plain_size, self.weights.values()))

    def stored_nbytes(self) -> int:
        """Bytes of the weight files as they are."""
        return sum(os.stat(file).st_size for file in self.weights.values())

    def digest(self, name: str) -> str:
        """Digest of the original content of a file that holds no weights."""
        entry = self.entry(name)
        if entry is not None and entry.kind == "rewritten":
            return digest.of_bytes(entry.original_content())
        return digest.of_file(self.others[name])


@final
@dataclass
class _Tally:
    """What was found wrong so far: names and reasons."""

    tensors: int = 0
    files: int = 0
    compared_tensors: int = 0
    compared_files: int = 0
    damaged: list[str] = field(default_factory=list)
    damaged_files: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    different_files: list[str] = field(default_factory=list)
    one_sided: list[str] = field(default_factory=list)
    rounded: list[BlobInfo] = field(default_factory=list)
    compared_rounded: int = 0
    beyond: list[str] = field(default_factory=list)
    change: float = 0.0

    def findings(self, subject: _Side, other: _Side | None) -> list[Finding]:
        found = []
        if subject.compressed:
            found.append(_none_of("damaged tensors", self.damaged, self.tensors))
            found.append(_none_of("damaged files", self.damaged_files, self.files))
        if other is not None:
            among = self.compared_tensors - self.compared_rounded
            found.append(_none_of("tensors that differ", self.different, among))
            if self.compared_rounded:
                found.append(_none_of("rounded tensors beyond their bound", self.beyond, self.compared_rounded))
            found.append(_none_of("files that differ", self.different_files, self.compared_files))
            found.append(_none_of("tensors and files that only one side has", self.one_sided, None))
        if self.rounded:
            found.append(self._largest_change())
        nbytes, stored = subject.nbytes(), subject.stored_nbytes()
        detail = {"nbytes": nbytes, "stored_nbytes": stored}
        found.append(Finding("ratio", nbytes / stored if stored else 1.0, better="higher", detail=detail))
        return found

    def _largest_change(self) -> Finding:
        bound = max(info.bound for info in self.rounded)
        measured = bool(self.compared_rounded)
        change = self.change if measured else max(info.worst_change for info in self.rounded)
        detail = {
            "rounded_tensors": len(self.rounded),
            "bound": bound,
            "measured": measured,
            "mantissa_bits": sorted({info.mantissa_bits or 0 for info in self.rounded}),
        }
        return Finding("largest relative change", change, better="lower", target=bound, detail=detail)


def _none_of(name: str, which: list[str], among: int | None) -> Finding:
    detail = {"which": which[:_SHOWN], "among": among}
    return Finding(name, len(which), n=among or None, better="lower", target=0, detail=detail)


def _check_weights(
    side: _Side,
    name: str,
    path: Path,
    peer_path: Path | None,
    threads: int,
    tally: _Tally,
    advance: Callable[[int], None],
) -> None:
    """Decode one weights file, compare its digests, and compare it with its peer if there is one."""
    file = StoredFile(path)
    peer = None if peer_path is None else StoredFile(peer_path)
    head = plain_head(file)
    whole = xxhash.xxh3_128(head)
    broken = False
    for tensor in file.names():
        where = f"{name}: {tensor}" if name else tensor
        tally.tensors += 1
        try:
            content = file.content(tensor, threads=threads, check=True)
        except CorruptBlob as error:
            tally.damaged.append(f"{where}: {_cause(error)}")
            broken = True
        else:
            whole.update(content)
            rounding = file.rounding(tensor)
            if rounding is not None:
                tally.rounded.append(rounding)
            if peer is not None:
                _compare(file, peer, tensor, where, content, threads, tally)
        file.release(tensor)
        advance(file.info(tensor).nbytes)
    advance(len(head))
    tally.files += 1
    entry = side.entry(name)
    recorded = None if entry is None else entry.digest
    if not broken and recorded is not None and f"{digest.ALGORITHM}:{whole.hexdigest()}" != recorded:
        tally.damaged_files.append(f"{name}: its digest is not the recorded one")
    if peer is not None:
        held = set(file.names())
        tally.one_sided += [f"{name}: {tensor}" for tensor in sorted(held ^ set(peer.names()))]
        tally.compared_files += 1
        if plain_head(peer) != head:
            tally.different_files.append(f"{name or path.name}: the headers differ (order, metadata or padding)")
        peer.close()
    file.close()


def _compare(
    file: StoredFile, peer: StoredFile, tensor: str, where: str, content: Any, threads: int, tally: _Tally
) -> None:
    """Compare one tensor with its peer: dtype, shape and every bit, or every weight if one of the two is rounded."""
    if tensor not in peer.names():
        return
    tally.compared_tensors += 1
    mine, theirs = file.info(tensor), peer.info(tensor)
    if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
        tally.different.append(f"{where}: {mine.dtype} {mine.shape} against {theirs.dtype} {theirs.shape}")
    else:
        theirs_content = peer.content(tensor, threads=threads)
        roundings = [found for found in (file.rounding(tensor), peer.rounding(tensor)) if found is not None]
        if len(roundings) == 1:
            _compare_rounded(roundings[0], file.rounding(tensor) is not None, where, content, theirs_content, tally)
        elif not _same_bytes(content, theirs_content):
            tally.different.append(f"{where}: the bits differ")
    peer.release(tensor)


def _compare_rounded(rounding: BlobInfo, mine: bool, where: str, content: Any, other: Any, tally: _Tally) -> None:
    """Compare a tensor of which one side is rounded: every weight must be within the bound."""
    rounded, original = (content, other) if mine else (other, content)
    change = largest_change(rounded, original, rounding.dtype)
    if not mine:
        tally.rounded.append(rounding)
    tally.compared_rounded += 1
    tally.change = max(tally.change, change)
    if change > rounding.bound:
        tally.beyond.append(f"{where}: a weight changed by {change:.6g} of itself, the bound is {rounding.bound:.6g}")


def _same_bytes(left: Any, right: Any) -> bool:
    mine, theirs = (np.frombuffer(buffer, np.uint8) for buffer in (left, right))
    blocks = (slice(start, start + _BLOCK) for start in range(0, len(mine), _BLOCK))
    return len(mine) == len(theirs) and all(bool((mine[block] == theirs[block]).all()) for block in blocks)


def _cause(error: CorruptBlob) -> str:
    """The innermost reason: file and tensor, which the outer ones add, are named beside it already."""
    while isinstance(error.__cause__, CorruptBlob):
        error = error.__cause__
    return error.reason


def _check_others(subject: _Side, other: _Side | None, tally: _Tally) -> None:
    """Compare the files that hold no weights with their digests and with the other side."""
    for name, file in subject.others.items():
        tally.files += 1
        entry = subject.entry(name)
        if entry is not None:
            if digest.of_file(file) != entry.stored_digest:
                tally.damaged_files.append(f"{entry.stored}: its digest is not the recorded one")
            if entry.kind == "rewritten" and subject.digest(name) != entry.digest:
                tally.damaged_files.append(f"{name}: the kept original is damaged")
        if other is not None and name in other.others:
            tally.compared_files += 1
            if subject.digest(name) != other.digest(name):
                tally.different_files.append(name)
    if other is not None:
        mine, theirs = ({*side.weights, *side.others} for side in (subject, other))
        known = {path for side in (subject, other) if side.manifest for path in side.manifest.left_out}
        tally.one_sided += sorted((mine ^ theirs) - known)


def _files(folder: Path) -> Iterator[Path]:
    for here, _, leaves in os.walk(folder):
        yield from (Path(here) / leaf for leaf in leaves)


def _is_compressed(path: Path) -> bool:
    file = StoredFile(path)
    file.close()
    return file.description is not None


register_treatment(TREATMENT, audits=("identity",))


@register_audit(TREATMENT, "identity")
def _identity(subject: Compressed, config: CompressConfig, *, seed: int, progress: Progress) -> list[Finding]:
    """Compare bit by bit; nothing is left to chance, so the seed is not used."""
    return verify(subject.path, subject.source, threads=config.threads, progress=progress)
