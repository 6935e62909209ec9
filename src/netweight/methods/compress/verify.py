"""The audit of compression: decoded tensors are compared with recorded digests, and with the original if given.

Of rounded weights every one must be within its bound; this shares no code with the rounding.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt
import xxhash

from netweight.codec import BlobInfo
from netweight.core.atomic_writes import mode_of
from netweight.core.digests import ALGORITHM, digest_bytes, digest_file
from netweight.core.progress import QUIET, Progress
from netweight.core.threads import usable_cores
from netweight.errors import CorruptBlob, UsageError
from netweight.methods.compress.folder_format import MANIFEST, FileEntry, Manifest
from netweight.methods.compress.settings import CompressSettings
from netweight.report.finding import Finding, Section
from netweight.report.text import by_targets
from netweight.store.reader import StoredFile
from netweight.store.restoration import plain_head, plain_size

TREATMENT = "compress"
_BLOCK = 1 << 20  # numbers compared at a time
_SHOWN = 100  # names kept per finding
# What `--card` and hubs write into a compressed folder: none of it is loaded or run.
_OF_HUBS = re.compile(r"README\.md$|\.gitattributes$|\.(git|cache)/")


@final
@dataclass(frozen=True)
class AuditSubject:
    """Subject of the audit: the compressed file or folder, and its original."""

    path: Path
    """The compressed file or folder."""
    source: Path
    """Its original."""


def verify(
    path: str | Path,
    against: str | Path | None = None,
    *,
    base: str | Path | None = None,
    threads: int | None = None,
    progress: Progress = QUIET,
) -> list[Finding]:
    """Decode everything and compare it with the recorded digests and, if given, with the original.

    Args:
        path: A file or folder, usually compressed.
        against: The file or folder that it was made from, or another one that should hold the same, compressed or not.
        base: What `path` holds differences from, if it does; None looks for it, see `decompress_folder`.
        threads: Threads of the decoder; None takes all cores that the process may use.
        progress: Where progress is shown.

    Returns:
        Findings that each count what is wrong, with target 0 and the names in `detail["which"]`: damaged tensors and
        files, files of a compressed folder that do not belong there, and with `against` tensors that differ, tensors
        and files that only one side has, files that differ, files with other permissions; and the ratio. Where tensors
        are rounded, those of them that differ by more than their bound are counted apart, and the largest relative
        change is given with the largest bound: with `against` as measured now, without as recorded when they were
        rounded.

    Raises:
        UsageError: A path is not there; or one is a file and the other a folder; or `path` is not compressed, so that
            it carries no digests, and `against` is missing.
        CorruptBlob: A file is so damaged that it cannot be opened, or missing.
        UnsafeInput: A manifest points outside its folder.
    """
    workers = usable_cores() if threads is None else threads
    subject = _Side.open(Path(path))
    other = None if against is None else _Side.open(Path(against))
    if other is not None and subject.root.is_file() != other.root.is_file():
        raise UsageError(
            f"{subject.root} and {other.root} are not two files or two folders.",
            cure="Compare a file with a file: name the weights file inside the folder.",
        )
    if not subject.compressed and other is None:
        raise UsageError(
            f"{subject.root} is not compressed and does not contain digests.", cure="Give the original: --against SRC."
        )
    comparison = _Comparison(subject, other, workers, None if base is None else Path(base))
    with progress.task(f"verify {subject.root.name}", subject.nbytes) as task:
        for name in subject.weights:
            task.describe(name)
            comparison.add_weights(name, task.update)
    comparison.add_others()
    return comparison.findings()


@dataclass(frozen=True)
class _Side:
    """The files of one file or folder by the paths they have when it is not compressed."""

    root: Path
    weights: Mapping[str, Path]
    others: Mapping[str, Path] = field(default_factory=dict)
    entries: Mapping[str, FileEntry] = field(default_factory=dict)
    """Entries of the manifest for these files."""
    left_out: tuple[str, ...] = ()
    strays: tuple[str, ...] = ()
    """Files in a compressed folder that its manifest does not name."""

    @classmethod
    def open(cls, path: Path) -> _Side:
        if path.is_file():
            return cls(path, {"": path})
        if not path.is_dir():
            raise UsageError(f"There is no file or folder {path}.", cure="Check the path.")
        paths = [Path(here) / leaf for here, _, leaves in os.walk(path) for leaf in leaves]
        files = {file.relative_to(path).as_posix(): file for file in sorted(paths)}
        entries: dict[str, FileEntry] = {}
        left_out: tuple[str, ...] = ()
        strays: tuple[str, ...] = ()
        # A broken link counts as damage, and not as a missing file.
        if os.path.lexists(path / MANIFEST):
            manifest = Manifest.read(path)
            manifest.check_present(path)
            left_out, entries = manifest.left_out, {entry.path: entry for entry in manifest.files}
            named = manifest.stored_names
            strays = tuple(name for name in files if name not in named and not _OF_HUBS.match(name))
            files = {name: path / entry.stored for name, entry in entries.items()}
            weights = {name: file for name, file in files.items() if entries[name].kind == "compressed"}
        else:
            weights = {name: file for name, file in files.items() if name.endswith(".safetensors")}
        others = {name: file for name, file in files.items() if name not in weights}
        return cls(path, weights, others, entries, left_out, strays)

    @property
    def compressed(self) -> bool:
        """True if anything in it carries digests."""
        return bool(self.entries) or any(map(_is_compressed, self.weights.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of the weight files when not compressed."""
        return sum(map(plain_size, self.weights.values()))

    def digest(self, name: str) -> str:
        """Digest of the original content of a file that contains no weights."""
        entry = self.entries.get(name)
        if entry is not None and entry.kind == "rewritten":
            return digest_bytes(entry.original_content())
        return digest_file(self.others[name])


@dataclass
class _Comparison:
    """A comparison, and the differences found so far: names and reasons."""

    subject: _Side
    other: _Side | None
    threads: int
    base: Path | None = None
    tensors: int = 0
    files: int = 0
    compared_tensors: int = 0
    """Number of compared tensors, without the rounded ones."""
    compared_files: int = 0
    compared_rounded: int = 0
    damaged: list[str] = field(default_factory=list)
    damaged_files: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    different_files: list[str] = field(default_factory=list)
    one_sided: list[str] = field(default_factory=list)
    other_modes: list[str] = field(default_factory=list)
    beyond: list[str] = field(default_factory=list)
    """Names of rounded tensors that changed by more than the bound."""
    rounded: list[BlobInfo] = field(default_factory=list)
    change: float = 0.0
    """The largest that was measured."""

    def add_weights(self, name: str, advance: Callable[[int], None]) -> None:
        """Decode one weights file, compare its digests, and compare it with its peer if there is one."""
        path, entry = self.subject.weights[name], self.subject.entries.get(name)
        peer_path = None if self.other is None else self.other.weights.get(name)
        opened = nullcontext() if peer_path is None else closing(StoredFile(peer_path))
        with closing(StoredFile(path, base=self.base)) as file, opened as peer:
            head = plain_head(file)
            whole = xxhash.xxh3_128(head)
            broken: set[str] = set()
            pair: _ComparedTensor | None = None
            for tensor, start, content in file.blocks(threads=self.threads):
                where = f"{name}: {tensor}" if name else tensor
                if not start:
                    self.tensors += 1
                    pair = None if peer is None or tensor not in peer else _ComparedTensor.of(file, peer, tensor)
                    rounding = None if isinstance(content, CorruptBlob) else file.rounding(tensor)
                    if rounding is not None:
                        self.rounded.append(rounding)
                if isinstance(content, CorruptBlob):
                    self.damaged.append(f"{where}: {_cause(content)}")
                    broken.add(tensor)
                    continue
                whole.update(content.data)
                advance(len(content))
                if pair is not None:
                    pair.add(start, content)
                    if start + len(content) == pair.nbytes:
                        self._judge(pair, where)
            advance(len(head))
            self.files += 1
            if not broken and entry is not None and f"{ALGORITHM}:{whole.hexdigest()}" != entry.digest:
                self.damaged_files.append(f"{name}: its digest is not the recorded one")
            if peer is not None:
                self.one_sided += [f"{name}: {tensor}" for tensor in sorted({*file.names()} ^ {*peer.names()})]
                self.compared_files += 1
                if plain_head(peer) != head:
                    self.different_files.append(f"{name or path.name}: the headers differ (order, metadata or padding)")

    def _judge(self, pair: _ComparedTensor, where: str) -> None:
        """Say what came of comparing two tensors."""
        if pair.bound is None:
            self.compared_tensors += 1
            if pair.difference:
                self.different.append(f"{where}: {pair.difference}")
            return
        if pair.its is not None:
            self.rounded.append(pair.its)
        self.compared_rounded += 1
        self.change = max(self.change, pair.change)
        if pair.change > pair.bound:
            self.beyond.append(
                f"{where}: a weight changed by {pair.change:.6g} of itself, the bound is {pair.bound:.6g}"
            )

    def add_others(self) -> None:
        """Compare the files that contain no weights with their digests and with the other side."""
        subject, other = self.subject, self.other
        for name, file in subject.others.items():
            self.files += 1
            entry = subject.entries.get(name)
            if entry is not None:
                if digest_file(file) != entry.stored_digest:
                    self.damaged_files.append(f"{entry.stored}: its digest is not the recorded one")
                if entry.kind == "rewritten" and subject.digest(name) != entry.digest:
                    self.damaged_files.append(f"{name}: the kept original is damaged")
            if other is not None and name in other.others:
                self.compared_files += 1
                if subject.digest(name) != other.digest(name):
                    self.different_files.append(name)
        if other is not None:
            mine, theirs = ({**side.weights, **side.others} for side in (subject, other))
            self.one_sided += sorted((mine.keys() ^ theirs.keys()) - {*subject.left_out, *other.left_out})
            for name in sorted(mine.keys() & theirs.keys()):
                modes = mode_of(mine[name]), mode_of(theirs[name])
                if modes[0] != modes[1]:
                    self.other_modes.append(f"{name or mine[name].name}: {modes[0]:o} against {modes[1]:o}")

    def findings(self) -> list[Finding]:
        findings = []
        if self.subject.compressed:
            findings.append(_none_of("damaged tensors", self.damaged, self.tensors))
            findings.append(_none_of("damaged files", self.damaged_files, self.files))
            if self.subject.entries:
                findings.append(_none_of("files that do not belong", [*self.subject.strays], None))
        if self.other is not None:
            findings.append(_none_of("tensors that differ", self.different, self.compared_tensors))
            if self.compared_rounded:
                findings.append(_none_of("rounded tensors beyond their bound", self.beyond, self.compared_rounded))
            findings.append(_none_of("files that differ", self.different_files, self.compared_files))
            findings.append(_none_of("tensors and files that only one side has", self.one_sided, None))
            findings.append(_none_of("files with other permissions", self.other_modes, None))
        if self.rounded:
            bound, measured = max(info.bound for info in self.rounded), bool(self.compared_rounded)
            change = self.change if measured else max(info.worst_change for info in self.rounded)
            about = {
                "rounded_tensors": len(self.rounded),
                "bound": bound,
                "measured": measured,
                "mantissa_bits": sorted({info.mantissa_bits or 0 for info in self.rounded}),
            }
            findings.append(Finding("largest relative change", change, better="lower", target=bound, detail=about))
        nbytes = self.subject.nbytes
        stored = sum(os.stat(file).st_size for file in self.subject.weights.values())
        sizes = {"nbytes": nbytes, "stored_nbytes": stored}
        return [*findings, Finding("ratio", nbytes / stored if stored else 1.0, better="higher", detail=sizes)]


@dataclass
class _ComparedTensor:
    """A tensor and its peer, compared piece by piece: every bit, or every weight if one of the two is rounded."""

    peer: StoredFile
    name: str
    dtype: str
    nbytes: int
    bound: float | None
    """Bound of the rounded tensor, if one of the two is rounded."""
    its: BlobInfo | None
    """Effect of rounding on the peer, if the peer is the rounded one."""
    difference: str = ""
    """The first difference; empty if there is none."""
    change: float = 0.0
    """The largest so far."""

    @classmethod
    def of(cls, file: StoredFile, peer: StoredFile, name: str) -> _ComparedTensor:
        mine, theirs = file.info(name), peer.info(name)
        rounding, its = file.rounding(name), peer.rounding(name)
        if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            difference = f"{mine.dtype} {mine.shape} against {theirs.dtype} {theirs.shape}"
            return cls(peer, name, mine.dtype, mine.nbytes, None, None, difference)
        one = rounding or its if (rounding is None) != (its is None) else None
        return cls(peer, name, mine.dtype, mine.nbytes, one.bound if one else None, its if one is its else None)

    def add(self, start: int, content: Any) -> None:
        """Compare the next piece."""
        if self.difference or not len(content):
            return
        other = self.peer.part(self.name, start, start + len(content))
        if self.bound is None:
            self.difference = "" if np.array_equal(content, other) else "the bits differ"
        else:
            rounded, original = (other, content) if self.its is not None else (content, other)
            self.change = max(self.change, largest_change(rounded, original, self.dtype))


def _none_of(name: str, which: list[str], among: int | None) -> Finding:
    detail = {"which": which[:_SHOWN], "among": among}
    return Finding(name, len(which), n=among or None, better="lower", target=0, detail=detail)


def _cause(error: CorruptBlob) -> str:
    """The innermost reason: file and tensor, which the outer ones add, are named beside it already."""
    while isinstance(error.__cause__, CorruptBlob):
        error = error.__cause__
    return error.reason


def _is_compressed(path: Path) -> bool:
    with closing(StoredFile(path)) as file:
        return file.description is not None


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


_CONCLUSION = by_targets(
    "compress: identity",
    met="Every tensor is equal to the original bit for bit, or within its bound where it was rounded.",
    missed="The compressed model differs from its original.",
)


def _identity(subject: AuditSubject, config: CompressSettings, *, seed: int, progress: Progress) -> Section:
    """Compare bit by bit; nothing is left to chance, so the seed is not used."""
    findings = verify(subject.path, subject.source, threads=config.threads, progress=progress)
    outcome, words = _CONCLUSION(findings)
    return Section(
        "Bit for bit", findings, question="Is the compressed model equal to its original?",
        conclusion=words, outcome=outcome,
        intro="Every tensor of the compressed model is decoded and compared with the original, and with its own "
        "recorded digest.",
    )  # fmt: skip
