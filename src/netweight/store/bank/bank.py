"""Banks: many adapters of the same modules in one folder, to be read by rows, grown, and checked.

`AdapterBank.ingest` fills one from a folder of adapters: all headers are checked first, then adapters are read one by
one. Files and `BankWriter` are in `shards`.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, final

from netweight.core.atomic_writes import part_of, refuse_existing
from netweight.core.bounded_json import is_text
from netweight.core.digests import digest_config, digest_file
from netweight.core.names import Select, nearest_names
from netweight.core.progress import QUIET, Progress
from netweight.core.weight_endings import PICKLES
from netweight.errors import CorruptBlob, NameNotFound, NetweightError, OutputFailed, UsageError
from netweight.store.bank.shards import (
    RECORD,
    BankRecord,
    BankWriter,
    ShardReader,
    ShardRecord,
    few,
    find_published,
    joined,
    read_bank_record,
    rows_of_adapter,
)
from netweight.store.lora_formats import peft_settings as peft
from netweight.store.lora_formats.base_names import base_key, is_hub_name
from netweight.store.lora_formats.identify import AUTHORS, COMPONENTS, DENOISERS
from netweight.store.lora_formats.model_names import ModelNames
from netweight.store.lora_formats.other_kinds import Conversion
from netweight.store.lora_formats.parts import AdapterPlan
from netweight.store.lora_formats.reading import load_converted, plan_adapter, refuse_vectors
from netweight.store.safetensors import read_header

if TYPE_CHECKING:
    from netweight.nn.lora import Adapter, AdapterStack

# The key in the provenance of an adapter that was not a plain LoRA; it has the rank and the error.
CONVERTED = "converted"
# Adapters with these endings are found, so that they can be refused by name.
_UNREAD = (".gguf", ".npz")
_FACTOR = re.compile(r"lora|hada_|lokr_|\.diff")
# Plans that are kept, some 20 kB each.
_KEPT = 4096
_SHOWN = 20  # problems named in one message
# A model has denoisers of one kind; that of two stages has `transformer` and `transformer_2`.
_DENOISER_KINDS = {AUTHORS: AUTHORS, **{name: name.removesuffix("_2") for name in DENOISERS}}


@final
class AdapterBank:
    """An open bank. Made by `AdapterBank.open` or `AdapterBank.ingest`.

    Adapters are numbered in the order in which they were added. What is added to the folder later shows when the bank
    is opened again.
    """

    def __init__(self, path: Path, record: BankRecord) -> None:
        self.path = path
        self._record = record
        self._numbers = {name: number for number, name in enumerate(record.names)}
        self._shards: dict[str, ShardReader] = {}

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a bank.

        Args:
            path: Its folder.

        Returns:
            The bank.

        Raises:
            UsageError: The folder contains no bank.
            CorruptBlob: Its record is damaged, or a shard is missing or was cut short.
        """
        path = Path(path)
        record = read_bank_record(path)
        for shard in record.shards:
            file = path / shard.file
            if not file.is_file() or file.stat().st_size != shard.nbytes:
                state = "is missing" if not file.is_file() else f"has {file.stat().st_size:,} bytes"
                raise CorruptBlob(
                    f"{file} {state}; according to {path / RECORD} it has {shard.nbytes:,}.",
                    cure="Copy the bank again, or rebuild it.",
                )
        return cls(path, record)

    @classmethod
    def ingest(
        cls,
        source: str | Path,
        destination: str | Path,
        *,
        modules: Iterable[str] | None = None,
        select: str | None = None,
        base: str | None = None,
        convert: int | None = None,
        weights: str | Path | None = None,
        compress: bool = False,
        skip_bad: bool = False,
        progress: Progress = QUIET,
    ) -> Self:
        """Collect a folder of adapters into a bank, or add them to one that is there.

        Every adapter is named by its path in the folder, and all are added in the order of their names. They may change
        different modules of one model: a module that one of them lacks takes no change from it. What headers and
        settings tell is checked before the work; all problems are said at once. A call that was interrupted goes on
        where it stopped when it is made again, and adapters that the bank has already are not read again.

        Args:
            source: A folder with adapters in the layouts of peft, diffusers and kohya, mixed at will, at any depth; one
                adapter; or the published files of weights2weights (`all_weights.pt` with `weight_dimensions.pt` and
                `adapter_config.json`).
            destination: The bank's folder.
            modules: Names of the model's modules, as for `read_adapter`: then adapters of other models are bad.
            select: A pattern of `Select`: then only these modules are kept.
            base: Name of the model that all were trained on, whatever their files say.
            convert: The highest rank of what becomes of LoHa, LoKr, DoRA and full differences, whose error is kept in
                `provenance`; by default they are bad.
            weights: The base model's files, which DoRA's change depends on.
            compress: Whether to keep new shards compressed, bit for bit.
            skip_bad: Whether to leave out adapters that cannot be used; they are listed in `skipped`.
            progress: Where the work is shown.

        Returns:
            The bank.

        Raises:
            UsageError: Adapters share no module with most, or are of other shapes or bases; two have the same name or
                content; one contains NaN or has rank 0; there is none. Files and cures are named.
            Unsupported: An adapter is not a LoRA.
            UnsafeInput: An adapter is a pickle.
            CorruptBlob: A file is damaged.
            OutputFailed: The disk is full or the place cannot be written.
        """
        if find_published(Path(source)) is not None:
            from netweight.store.bank.published import import_published

            import_published(source, destination, compress=compress, skip_bad=skip_bad, progress=progress)
        else:
            _ingest(
                Path(source),
                Path(destination),
                modules=modules,
                select=select,
                base=base,
                conversion=None if convert is None else Conversion(convert, None if weights is None else Path(weights)),
                compress=compress,
                skip_bad=skip_bad,
                progress=progress,
            )
        return cls.open(destination)

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        """Another process opens the bank anew."""
        return AdapterBank.open, (self.path,)

    def __len__(self) -> int:
        """Number of adapters."""
        return len(self._numbers)

    @property
    def names(self) -> list[str]:
        """Names of the adapters, by number."""
        return list(self._numbers)

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules that adapters change, sorted."""
        return tuple(self._record.modules)

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Module name → rows and columns of its change."""
        return dict(self._record.modules)

    @property
    def kernels(self) -> dict[str, tuple[int, ...]]:
        """Names of convolutions → sides of their kernels, as `write_adapter` takes them."""
        return dict(self._record.kernels)

    @property
    def base(self) -> str | None:
        """Name of the model that the adapters were trained on, if their files state it."""
        return self._record.base

    @property
    def skipped(self) -> Mapping[str, str]:
        """Adapters that were left out, with the reason."""
        return dict(self._record.skipped)

    @property
    def provenance(self) -> Mapping[str, Mapping[str, str]]:
        """Adapter → what its file states about its origin: training, trigger words, licence."""
        return self._record.provenance

    @property
    def nbytes(self) -> int:
        """Bytes of the shards on disk."""
        return sum(shard.nbytes for shard in self._record.shards)

    @property
    def shards(self) -> int:
        """Number of files that the adapters are in."""
        return len(self._record.shards)

    @property
    def ranks(self) -> tuple[int, int]:
        """Lowest and highest rank of any module that an adapter changes."""
        ranks = [rank[rank > 0] for shard in self._record.shards for rank in [self._reader(shard).rank]]
        return min(int(rank.min()) for rank in ranks), max(int(rank.max()) for rank in ranks)

    @property
    def digest(self) -> str:
        """Digest of names and content; the same however the bank is split into shards, and compressed or not."""
        contents = [content for shard in self._record.shards for content in shard.contents]
        return digest_config(
            {
                "modules": self._record.modules,
                "kernels": self._record.kernels,
                "names": self.names,
                "contents": contents,
            }
        )

    def adapter(self, which: str | int) -> Adapter:
        """Read one adapter.

        Args:
            which: Its name or number; negative numbers count from the end.

        Returns:
            The adapter at its own rank; factors, scale and value are as they were, the dtype is that of its shard.

        Raises:
            NameNotFound: There is no such adapter.
        """
        number = self._number(which)
        return self.stack(number, number + 1).adapter(0)

    def stack(self, start: int, stop: int, modules: Collection[str] | None = None) -> AdapterStack:
        """Read adapters `start` to `stop`, and nothing else of the tensors on disk.

        Args:
            start: Number of the first.
            stop: Number after the last.
            modules: Only these; by default all.

        Returns:
            The stack; lower ranks are filled up with zeros to the highest in the range.

        Raises:
            UsageError: The range is empty or reaches beyond the bank.
            CorruptBlob: A shard is damaged.
        """
        if not 0 <= start < stop <= len(self):
            raise UsageError(
                f"A bank of {len(self)} adapters has no range {start} to {stop}.",
                cure="Give a range with 0 <= start < stop.",
            )
        chosen = [name for name in self.modules if modules is None or name in modules]
        pieces, first = [], 0
        for shard in self._record.shards:
            low, high = max(start - first, 0), min(stop - first, len(shard.names))
            if low < high:
                pieces.append(self._reader(shard).rows(low, high, chosen))
            first += len(shard.names)
        return joined(chosen, pieces)

    def verify(self, *, progress: Progress = QUIET) -> None:
        """Compare every shard with its digest.

        Args:
            progress: Where progress is shown.

        Raises:
            CorruptBlob: Shards are damaged; they are named, with the adapters in them.
        """
        bad = []
        with progress.task("Checking shards", self.nbytes) as task:
            for shard in self._record.shards:
                if digest_file(self.path / shard.file) != shard.digest:
                    bad.append(f"{shard.file} (adapters {shard.names[0]} to {shard.names[-1]})")
                task.update(shard.nbytes)
        if bad:
            raise CorruptBlob(
                f"{self.path}: {len(bad)} of {len(self._record.shards)} shards are damaged: {', '.join(bad)}.",
                cure="Copy these files again, or rebuild the bank.",
            )

    def _reader(self, shard: ShardRecord) -> ShardReader:
        file = shard.file
        if file not in self._shards:
            # A writer joined this file to another one after the bank was opened.
            if not (self.path / file).is_file():
                raise CorruptBlob(
                    f"{self.path / file} does not exist any more, because the bank was changed.",
                    cure="Open the bank again.",
                )
            self._shards[file] = ShardReader(self.path / file, self.modules, shard)
        return self._shards[file]

    def _number(self, which: str | int) -> int:
        if isinstance(which, str):
            if which not in self._numbers:
                near = ", ".join(nearest_names(which, self._numbers))
                raise NameNotFound(f"The bank has no adapter {which!r}.", cure=f"The nearest names are {near}.")
            return self._numbers[which]
        if not -len(self) <= which < len(self):
            raise NameNotFound(f"The bank has no adapter {which}: it contains {len(self)}.")
        return which % len(self)


@final
@dataclass(frozen=True)
class _Kind:
    """Shapes and kernels, which many adapters share."""

    shapes: tuple[tuple[str, tuple[int, int]], ...]
    kernels: tuple[tuple[str, tuple[int, ...]], ...]


@final
@dataclass(frozen=True)
class _AdapterHeader:
    """The little that is kept of a checked adapter until it is read, as there may be many."""

    path: Path
    kind: _Kind
    base: str | None
    plan: AdapterPlan | None
    """Plan of the first few thousand adapters, which are not inspected again."""


@final
@dataclass(frozen=True)
class _Reader:
    """Planner of adapters: with the model's names of modules, and only the modules that are wanted."""

    model: ModelNames | None
    select: Select | None
    base: str | None
    conversion: Conversion | None

    def plan(self, path: Path) -> AdapterPlan:
        plan = plan_adapter(path, self.model, self.conversion)
        refuse_vectors(plan)
        base = plan.base if self.base is None else self.base
        if self.select is None:
            return replace(plan, base=base)
        try:
            names = self.select.keys(sorted(plan.parts))
        except NetweightError as error:
            raise type(error)(f"{path}: {error.reason}", cure=error.cure) from error
        return replace(plan, parts={name: plan.parts[name] for name in names}, base=base)


def _ingest(
    source: Path,
    destination: Path,
    *,
    modules: Iterable[str] | None,
    select: str | None,
    base: str | None,
    conversion: Conversion | None,
    compress: bool,
    skip_bad: bool,
    progress: Progress,
) -> None:
    """Collect adapters into a bank; see `AdapterBank.ingest`."""
    paths, bad = find_adapters(source)
    there = _there(destination, paths)
    reader = _Reader(
        None if modules is None else ModelNames(modules), None if select is None else Select(select), base, conversion
    )
    old = dict(zip(there.names, (stamp for shard in there.shards for stamp in shard.stamps), strict=True))
    stamps = {name: _stamp(path) for name, path in paths.items()}
    new = {name: path for name, path in paths.items() if old.get(name) != stamps[name]}
    headers = _checked(new, reader, bad, progress)
    expected = there if there.modules else _usual(list(headers.values()))
    bad |= _misfits(headers, expected)
    good = sorted(headers.keys() - bad.keys())
    if bad and (not skip_bad or not (old or good)):
        raise _refusal(source, bad, len(paths))
    if not old and not good:
        raise UsageError(f"{source} contains no adapter.", cure="Name a folder with files of peft, diffusers or kohya.")
    with BankWriter(
        destination, compress=compress, kernels=expected.kernels, base=expected.base, modules=expected.modules
    ) as writer:
        for name, reason in bad.items():
            writer.skip(name, str(reason))
        holders = {writer.content(name): name for name in writer.names}
        bases: Counter[str] = Counter()
        for name in progress.track(good, "Adding adapters", len(good), unit="adapters"):
            try:
                plan = headers[name].plan or reader.plan(headers[name].path)
                _add(writer, expected.modules, holders, name, plan, stamps[name])
                bases.update([plan.base] if plan.base else [])
            except OutputFailed:
                raise
            except NetweightError as error:
                if not skip_bad:
                    raise _refusal(source, {name: error}, len(paths)) from error
                writer.skip(name, str(error))
                progress.note(f"Skipped {name}: {error}")
        if not there.base:
            writer.base = _spelling(bases)


def _checked(
    paths: Mapping[str, Path], reader: _Reader, bad: dict[str, NetweightError], progress: Progress
) -> dict[str, _AdapterHeader]:
    """Look at all headers and settings; what is wrong with an adapter by itself goes into `bad`."""
    headers: dict[str, _AdapterHeader] = {}
    kinds: dict[_Kind, _Kind] = {}
    for name, path in progress.track(paths.items(), "Checking adapters", len(paths), unit="adapters"):
        try:
            plan = reader.plan(path)
        except NetweightError as error:
            bad[name] = error
            continue
        kind = _Kind(tuple(plan.shapes.items()), tuple(plan.kernels.items()))
        headers[name] = _AdapterHeader(
            path, kinds.setdefault(kind, kind), plan.base, plan if len(headers) < _KEPT else None
        )
    return headers


def _add(
    writer: BankWriter,
    modules: Mapping[str, tuple[int, int]],
    holders: dict[str, str],
    name: str,
    plan: AdapterPlan,
    stamp: str,
) -> None:
    """Read one adapter and add it, unless the bank has it already."""
    loaded = load_converted(plan)
    rows = rows_of_adapter(loaded.adapter, modules)
    content = rows.digests()[0]
    if name in writer and writer.content(name) == content:
        return
    if name in writer:
        raise UsageError(
            f"{plan.path}: the bank has another adapter {name!r} already.", cure="Rename it, or make another bank."
        )
    if content in holders:
        raise UsageError(f"{plan.path} contains the same adapter as {holders[content]!r}.", cure="Remove one.")
    writer.add_rows([name], rows, modules, stamps=[stamp], contents=[content])
    converted = {}
    if plan.conversion and any(part.converts for part in plan.parts.values()):
        converted = {CONVERTED: f"at most rank {plan.conversion.rank}, relative error {loaded.relative_error:.2e}"}
    writer.tell(name, {**plan.about, **converted})
    holders[content] = name


def _there(destination: Path, paths: Mapping[str, Path]) -> BankRecord:
    """The record of the bank, or of what an interrupted call left beside its place."""
    if (destination / RECORD).is_file():
        return read_bank_record(destination)
    refuse_existing(destination, overwrite=None)
    part = part_of(destination)
    if not (part / RECORD).is_file():
        return BankRecord({})
    record = read_bank_record(part)
    if others := [name for name in record.names if name not in paths]:
        raise UsageError(
            f"An interrupted call left {others[0]!r} in {part}, which this source does not contain.",
            cure=f"Repeat that call, or remove {part}.",
        )
    return record


def find_adapters(source: Path) -> tuple[dict[str, Path], dict[str, NetweightError]]:
    """Find adapters below a folder, by name, sorted; and those whose name is taken."""
    if not source.exists():
        raise UsageError(f"There is no file or folder {source}.", cure="Check the path.")
    if source.is_file() or _is_adapter(source):
        return {source.stem if source.is_file() else source.resolve().name: source}, {}
    adapters: dict[str, Path] = {}
    bad: dict[str, NetweightError] = {}
    for path in sorted(_adapters_below(source)):
        name = path.relative_to(source).as_posix()
        name = name.removesuffix(".safetensors") if path.is_file() else name
        if not is_text(name):
            shown = os.fsencode(path).decode(errors="backslashreplace")
            bad[shown] = UsageError(f"The name of {shown} is not a text.", cure="Rename it.")
        elif name in adapters:
            bad[path.relative_to(source).as_posix()] = UsageError(
                f"{path} would have the same name as {adapters[name]}.", cure="Rename one."
            )
        else:
            adapters[name] = path
    return adapters, bad


def _adapters_below(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    above = (*above, folder.resolve())
    for entry in os.scandir(folder):
        path = Path(entry.path)
        if entry.name.startswith("."):
            continue
        if path.is_dir() if entry.is_symlink() else entry.is_dir():
            if _is_adapter(path):
                yield path
            elif path.resolve() not in above:
                # A link may lead back to a folder above.
                yield from _adapters_below(path, above)
        elif path.suffix.lower() in (".safetensors", *PICKLES, *_UNREAD):
            yield path


def _is_adapter(folder: Path) -> bool:
    """Return whether a folder is one adapter: peft's, a pipeline's of peft, or diffusers' with the file it names."""
    if (folder / peft.CONFIG).is_file():
        return True
    own = [path for name in (peft.WEIGHTS, peft.DIFFUSERS_WEIGHTS) if (path := folder / name).is_file()]
    if own:
        # A folder of downloads may hold other adapters beside a file of this name.
        return not any(_holds_factors(path) for path in folder.glob("*.safetensors") if path not in own)
    return any((folder / name / peft.CONFIG).is_file() for name in COMPONENTS)


def _holds_factors(path: Path) -> bool:
    """Return whether a file has tensors of an adapter, by their names."""
    try:
        return any(_FACTOR.search(span.name) for span in read_header(path).spans)
    except NetweightError:
        # The function that reads the file reports what is wrong.
        return True


def _stamp(path: Path) -> str:
    """Size and time of a file, or of all files of an adapter's folder."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return " ".join(f"{status.st_size}-{status.st_mtime_ns}" for status in (file.stat() for file in files))


def _usual(headers: list[_AdapterHeader]) -> BankRecord:
    """Return the base of most adapters, and the modules of all of that base that fit together.

    A base is that of adapters which name it, and of others only where they change modules of these: never of modules
    that no adapter of the base changes.
    """
    counts = Counter(base_key(one.base) for one in headers if one.base)
    key = counts.most_common(1)[0][0] if counts else None
    headers = [one for one in headers if not one.base or base_key(one.base) == key]
    shapes: dict[str, tuple[int, int]] = {}
    kernels: dict[str, tuple[int, ...]] = {}
    left = [kind for kind, _ in Counter(one.kind for one in headers).most_common()]
    said = {one.kind for one in headers if one.base}
    joined: set[_Kind] = set()

    def fits(kind: _Kind) -> bool:
        both_say = kind in said and bool(joined & said)
        return not shapes or _fits(kind, shapes, kernels, both_say) is None

    while (joins := next((kind for kind in left if fits(kind)), None)) is not None:
        left.remove(joins)
        joined.add(joins)
        shapes |= joins.shapes
        kernels |= joins.kernels
    bases = Counter(one.base for one in headers if one.base and one.kind in joined)
    return BankRecord(dict(sorted(shapes.items())), dict(sorted(kernels.items())), _spelling(bases))


def _spelling(bases: Mapping[str, int]) -> str | None:
    """The name of a base that loaders know best: one of a hub before a path, then the most usual."""
    return max(bases, key=lambda base: (is_hub_name(base), bases[base]), default=None)


def _fits(
    kind: _Kind, shapes: Mapping[str, tuple[int, int]], kernels: Mapping[str, tuple[int, ...]], said: bool
) -> str | None:
    """Return why adapters do not fit others: no module is the same, or one has another shape; else None.

    `said`: whether they name the others' base; then they may change other parts of it, in one spelling.
    """
    shared = [(name, shape) for name, shape in kind.shapes if name in shapes]
    components = {name.partition(".")[0] for name in (*shapes, *dict(kind.shapes))}
    denoisers = {_DENOISER_KINDS[name] for name in components if name in _DENOISER_KINDS}
    if not shared and not (said and len(denoisers) < 2):
        return f"does not change any module that the others change, but {kind.shapes[0][0]} and others"
    own = dict(kind.kernels)
    for name, shape in shared:
        if tuple(shapes[name]) != shape:
            return f"changes {name} in shape {shape}, the others in {tuple(shapes[name])}"
        if own.get(name) != (tuple(kernels[name]) if name in kernels else None):
            return f"has other convolutions than the others: the kernel of {name} is {own.get(name)}"
    return None


def _misfits(headers: Mapping[str, _AdapterHeader], expected: BankRecord) -> dict[str, NetweightError]:
    """Adapters of other modules, shapes, kernels or bases than expected."""
    bad: dict[str, NetweightError] = {}
    for name, one in headers.items():
        if one.base and expected.base and base_key(one.base) != base_key(expected.base):
            bad[name] = UsageError(
                f"{one.path} was trained on {one.base}, and the others on {expected.base}.",
                cure="Put it into another bank, leave it out, or name the base of all adapters (--base).",
            )
        elif reason := _fits(one.kind, expected.modules, expected.kernels, bool(one.base and expected.base)):
            bad[name] = UsageError(f"{one.path} {reason}.", cure="Put it into another bank, or leave it out.")
        elif extra := sorted(dict(one.kind.shapes).keys() - expected.modules.keys()):
            bad[name] = UsageError(
                f"{one.path} also changes {few(extra)}, which the bank does not change.",
                cure="Choose the bank's modules (--modules PATTERN), or make another bank of both.",
            )
    return bad


def _refusal(source: Path, bad: Mapping[str, NetweightError], among: int) -> NetweightError:
    """One error for all problems; of their kind if they have one."""
    errors = list(bad.values())
    if len(errors) == 1:
        or_skip = " Or leave it out (--skip-bad, in Python skip_bad)." if among > 1 else ""
        return type(errors[0])(errors[0].reason, cure=f"{errors[0].cure or ''}{or_skip}".strip())
    lines = "\n".join(f"  {error}" for error in errors[:_SHOWN])
    more = f"\n  and {len(errors) - _SHOWN} more." if len(errors) > _SHOWN else ""
    kinds = {type(error) for error in errors}
    kind = kinds.pop() if len(kinds) == 1 else UsageError
    return kind(
        f"{len(errors)} of {among} adapters in {source} cannot be used:\n{lines}{more}\n",
        cure="Repair or remove them, or leave them out (--skip-bad, in Python skip_bad).",
    )
