"""Collecting a folder of adapters into a bank: all headers are checked first, then adapters are read one by one."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from netweight.core.files import is_text, part_of, refuse_existing
from netweight.core.names import Select
from netweight.core.progress import Progress
from netweight.errors import NetweightError, OutputFailed, UsageError
from netweight.store.bank.shard import RECORD, BankRecord, read_bank_record, rows_of_adapter
from netweight.store.bank.write import BankWriter, few
from netweight.store.lora_formats import layouts
from netweight.store.lora_formats.files import load_converted, plan_adapter
from netweight.store.lora_formats.names import AUTHORS, COMPONENTS, ModelNames, base_key, is_hub_name
from netweight.store.lora_formats.parts import PICKLES, AdapterPlan, Conversion

CONVERTED = "converted"  # in the provenance of what was no plain LoRA: its rank and error
MATRIX = "*_weights.pt"  # what weights2weights published: all_weights.pt of people, dog_weights.pt of dogs
_UNREAD = (".gguf", ".npz")  # endings of adapters that are found to be refused by name
_KEPT = 4096  # plans that are kept, some 20 kB each
_SHOWN = 20  # problems named in one message
_DENOISERS = {"unet", "transformer", AUTHORS}  # of which one model has one


@final
@dataclass(frozen=True)
class _Kind:
    """Shapes and kernels, which many adapters share."""

    shapes: tuple[tuple[str, tuple[int, int]], ...]
    kernels: tuple[tuple[str, tuple[int, ...]], ...]


@final
@dataclass(frozen=True)
class _Seen:
    """The little that is kept of a checked adapter until it is read, as there may be many."""

    path: Path
    kind: _Kind
    base: str | None
    plan: AdapterPlan | None  # of the first some thousands, which are not looked at again


@final
@dataclass(frozen=True)
class _Reader:
    """How adapters are planned: with the model's names of modules, and only those modules that are wanted."""

    model: ModelNames | None
    select: Select | None
    base: str | None
    conversion: Conversion | None

    def plan(self, path: Path) -> AdapterPlan:
        plan = plan_adapter(path, self.model, self.conversion)
        base = plan.base if self.base is None else self.base
        if self.select is None:
            return replace(plan, base=base)
        try:
            kept = self.select.keys(sorted(plan.parts))
        except NetweightError as error:
            raise type(error)(f"{path}: {error.reason}", cure=error.cure) from error
        return replace(plan, parts={name: plan.parts[name] for name in kept}, base=base)


def ingest(
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
    found, bad = find_adapters(source)
    there = _there(destination, found)
    reader = _Reader(
        None if modules is None else ModelNames(modules), None if select is None else Select(select), base, conversion
    )
    old = dict(zip(there.names, (stamp for shard in there.shards for stamp in shard.stamps), strict=True))
    stamps = {name: _stamp(path) for name, path in found.items()}
    new = {name: path for name, path in found.items() if old.get(name) != stamps[name]}
    seen = _checked(new, reader, bad, progress)
    expected = there if there.modules else _usual(list(seen.values()))
    bad |= _misfits(seen, expected)
    good = sorted(seen.keys() - bad.keys())
    if bad and (not skip_bad or not (old or good)):
        raise _refusal(source, bad, len(found))
    if not old and not good:
        raise UsageError(f"{source} holds no adapter.", cure="Name a folder with files of peft, diffusers or kohya.")
    with BankWriter(
        destination, compress=compress, kernels=expected.kernels, base=expected.base, modules=expected.modules
    ) as writer:
        for name, reason in bad.items():
            writer.skip(name, str(reason))
        holders = {writer.content(name): name for name in writer.names}
        bases: Counter[str] = Counter()
        for name in progress.track(good, "Adding adapters", len(good), unit="adapters"):
            try:
                plan = seen[name].plan or reader.plan(seen[name].path)
                _add(writer, expected.modules, holders, name, plan, stamps[name])
                bases.update([plan.base] if plan.base else [])
            except OutputFailed:
                raise
            except NetweightError as error:
                if not skip_bad:
                    raise _refusal(source, {name: error}, len(found)) from error
                writer.skip(name, str(error))
                progress.note(f"Skipped {name}: {error}")
        if not there.base:
            writer.base = _spelling(bases)


def _checked(
    paths: Mapping[str, Path], reader: _Reader, bad: dict[str, NetweightError], progress: Progress
) -> dict[str, _Seen]:
    """Look at all headers and settings; what is wrong with an adapter by itself goes into `bad`."""
    seen: dict[str, _Seen] = {}
    kinds: dict[_Kind, _Kind] = {}
    for name, path in progress.track(paths.items(), "Checking adapters", len(paths), unit="adapters"):
        try:
            plan = reader.plan(path)
        except NetweightError as error:
            bad[name] = error
            continue
        kind = _Kind(tuple(plan.shapes.items()), tuple(plan.kernels.items()))
        seen[name] = _Seen(path, kinds.setdefault(kind, kind), plan.base, plan if len(seen) < _KEPT else None)
    return seen


def _add(
    writer: BankWriter,
    modules: Mapping[str, tuple[int, int]],
    holders: dict[str, str],
    name: str,
    plan: AdapterPlan,
    stamp: str,
) -> None:
    """Read one adapter and add it, unless the bank has it already."""
    found = load_converted(plan)
    rows = rows_of_adapter(found.adapter, modules)
    content = rows.digests()[0]
    if name in writer and writer.content(name) == content:
        return
    if name in writer:
        raise UsageError(
            f"{plan.path}: the bank has another adapter {name!r} already.", cure="Rename it, or make another bank."
        )
    if content in holders:
        raise UsageError(f"{plan.path} holds the same adapter as {holders[content]!r}.", cure="Remove one.")
    writer.add_rows([name], rows, modules, stamps=[stamp], contents=[content])
    converted = {}
    if plan.conversion and any(part.converts for part in plan.parts.values()):
        converted = {CONVERTED: f"at most rank {plan.conversion.rank}, relative error {found.relative_error:.2e}"}
    writer.tell(name, {**plan.about, **converted})
    holders[content] = name


def _there(destination: Path, found: Mapping[str, Path]) -> BankRecord:
    """The record of the bank, or of what an interrupted call left beside its place."""
    if (destination / RECORD).is_file():
        return read_bank_record(destination)
    refuse_existing(destination, overwrite=None)
    part = part_of(destination)
    if not (part / RECORD).is_file():
        return BankRecord({})
    record = read_bank_record(part)
    if others := [name for name in record.names if name not in found]:
        raise UsageError(
            f"An interrupted call left {others[0]!r} in {part}, which this source does not hold.",
            cure=f"Repeat that call, or remove {part}.",
        )
    return record


def find_adapters(source: Path) -> tuple[dict[str, Path], dict[str, NetweightError]]:
    """Find adapters below a folder, by name, sorted; and those whose name is taken."""
    if not source.exists():
        raise UsageError(f"There is no file or folder {source}.", cure="Check the path.")
    if source.is_file() or _is_adapter(source):
        return {source.stem if source.is_file() else source.resolve().name: source}, {}
    found: dict[str, Path] = {}
    bad: dict[str, NetweightError] = {}
    for path in sorted(_adapters_below(source)):
        name = path.relative_to(source).as_posix()
        name = name.removesuffix(".safetensors") if path.is_file() else name
        if not is_text(name):
            shown = os.fsencode(path).decode(errors="backslashreplace")
            bad[shown] = UsageError(f"The name of {shown} is no text.", cure="Rename it.")
        elif name in found:
            bad[path.relative_to(source).as_posix()] = UsageError(
                f"{path} would have the same name as {found[name]}.", cure="Rename one."
            )
        else:
            found[name] = path
    return found, bad


def find_published(source: Path) -> Path | None:
    """Return the matrix of adapters if a path is one, or a folder with one; else None."""
    if source.is_file():
        return source if source.match(MATRIX) else None
    found = sorted(source.glob(MATRIX))
    return found[0] if len(found) == 1 else None


def _adapters_below(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    above = (*above, folder.resolve())
    for entry in os.scandir(folder):
        path = Path(entry.path)
        if entry.name.startswith("."):
            continue
        if path.is_dir() if entry.is_symlink() else entry.is_dir():
            if _is_adapter(path):
                yield path
            elif path.resolve() not in above:  # a link may lead back
                yield from _adapters_below(path, above)
        elif path.suffix.lower() in (".safetensors", *PICKLES, *_UNREAD):
            yield path


def _is_adapter(folder: Path) -> bool:
    """Whether a folder is one adapter: peft's, a pipeline's of peft, or diffusers' with the file it names."""
    if any((folder / name).is_file() for name in (layouts.CONFIG, layouts.WEIGHTS, layouts.DIFFUSERS_WEIGHTS)):
        return True
    return any((folder / name / layouts.CONFIG).is_file() for name in COMPONENTS)


def _stamp(path: Path) -> str:
    """Size and time of a file, or of all files of an adapter's folder."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return " ".join(f"{status.st_size}-{status.st_mtime_ns}" for status in (file.stat() for file in files))


def _usual(seen: list[_Seen]) -> BankRecord:
    """What most adapters are of: the base, and the modules of all of that base that fit together."""
    counts = Counter(base_key(one.base) for one in seen if one.base)
    key = counts.most_common(1)[0][0] if counts else None
    seen = [one for one in seen if not one.base or base_key(one.base) == key]
    shapes: dict[str, tuple[int, int]] = {}
    kernels: dict[str, tuple[int, ...]] = {}
    left = [kind for kind, _ in Counter(one.kind for one in seen).most_common()]
    said = {one.kind for one in seen if one.base}
    while joins := next((one for one in left if not shapes or _fits(one, shapes, kernels, one in said) is None), None):
        left.remove(joins)
        shapes |= joins.shapes
        kernels |= joins.kernels
    bases = Counter(one.base for one in seen if one.base)
    return BankRecord(dict(sorted(shapes.items())), dict(sorted(kernels.items())), _spelling(bases))


def _spelling(bases: Mapping[str, int]) -> str | None:
    """The name of a base that loaders know best: one of a hub before a path, then the most usual."""
    return max(bases, key=lambda base: (is_hub_name(base), bases[base]), default=None)


def _fits(
    kind: _Kind, shapes: Mapping[str, tuple[int, int]], kernels: Mapping[str, tuple[int, ...]], said: bool
) -> str | None:
    """Why adapters do not fit others: none of their modules is the same, or one is of another shape; else None."""
    # `said`: whether they name the others' base; then they may change other parts of it, in one spelling
    shared = [(name, shape) for name, shape in kind.shapes if name in shapes]
    denoisers = {name.partition(".")[0] for name in (*shapes, *dict(kind.shapes))} & _DENOISERS
    if not shared and not (said and len(denoisers) < 2):
        return f"changes none of the others' modules, but {kind.shapes[0][0]} and such"
    own = dict(kind.kernels)
    for name, shape in shared:
        if tuple(shapes[name]) != shape:
            return f"changes {name} in shape {shape}, the others in {tuple(shapes[name])}"
        if own.get(name) != (tuple(kernels[name]) if name in kernels else None):
            return f"has other convolutions than the others: the kernel of {name} is {own.get(name)}"
    return None


def _misfits(seen: Mapping[str, _Seen], expected: BankRecord) -> dict[str, NetweightError]:
    """Adapters of other modules, shapes, kernels or bases than expected."""
    bad: dict[str, NetweightError] = {}
    for name, one in seen.items():
        if one.base and expected.base and base_key(one.base) != base_key(expected.base):
            bad[name] = UsageError(
                f"{one.path} was trained on {one.base}, the others on {expected.base}.",
                cure="Make another bank of it, leave it out, or say what the base of all is (--base).",
            )
        elif reason := _fits(one.kind, expected.modules, expected.kernels, bool(one.base and expected.base)):
            bad[name] = UsageError(f"{one.path} {reason}.", cure="Make another bank of it, or leave it out.")
        elif extra := sorted(dict(one.kind.shapes).keys() - expected.modules.keys()):
            bad[name] = UsageError(
                f"{one.path} changes also {few(extra)}, which the bank does not.",
                cure="Choose the bank's modules (--modules PATTERN), or make another bank of both.",
            )
    return bad


def _refusal(source: Path, bad: Mapping[str, NetweightError], among: int) -> NetweightError:
    """One error for all problems; of their kind if they have one."""
    errors = list(bad.values())
    if len(errors) == 1:
        or_skip = " Or pass skip_bad (--skip-bad) to leave it out." if among > 1 else ""
        return type(errors[0])(errors[0].reason, cure=f"{errors[0].cure or ''}{or_skip}".strip())
    lines = "\n".join(f"  {error}" for error in errors[:_SHOWN])
    more = f"\n  and {len(errors) - _SHOWN} more." if len(errors) > _SHOWN else ""
    kinds = {type(error) for error in errors}
    kind = kinds.pop() if len(kinds) == 1 else UsageError
    return kind(
        f"{len(errors)} of {among} adapters in {source} cannot be used:\n{lines}{more}\n",
        cure="Mend or remove them, or pass skip_bad (--skip-bad) to leave them out.",
    )
