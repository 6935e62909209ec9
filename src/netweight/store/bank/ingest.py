"""Collecting a folder of adapters into a bank: all headers are checked first, then adapters are read one by one."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from netweight.core.files import part_of, refuse_existing
from netweight.core.progress import Progress
from netweight.errors import NetweightError, OutputFailed, UsageError
from netweight.nn.lora import AdapterStack
from netweight.store.bank.record import RECORD, BankRecord, read_bank_record
from netweight.store.bank.shard import rows_of
from netweight.store.bank.write import BankWriter, difference
from netweight.store.lora_formats import diffusers, peft
from netweight.store.lora_formats.files import load_plan, plan_adapter
from netweight.store.lora_formats.names import COMPONENTS, ModelNames
from netweight.store.lora_formats.parts import PICKLES, Plan

_SHOWN = 20  # problems named in one message


@final
@dataclass(frozen=True)
class _Kind:
    """Shapes and kernels, which all adapters of a bank share."""

    shapes: tuple[tuple[str, tuple[int, int]], ...]
    kernels: tuple[tuple[str, tuple[int, ...]], ...]


@final
@dataclass(frozen=True)
class _Seen:
    """The little that is kept of a checked adapter until it is read, as there may be many."""

    path: Path
    kind: _Kind
    base: str | None


def ingest(
    source: Path,
    destination: Path,
    *,
    modules: Iterable[str] | None,
    compress: bool,
    skip_bad: bool,
    progress: Progress,
) -> None:
    """Collect adapters into a bank; see `AdapterBank.ingest`."""
    found, bad = _find(source)
    there = _there(destination, found)
    model = None if modules is None else ModelNames(modules)
    old = dict(zip(there.names, (stamp for shard in there.shards for stamp in shard.stamps), strict=True))
    stamps = {name: _stamp(path) for name, path in found.items()}
    new = {name: path for name, path in found.items() if old.get(name) != stamps[name]}
    seen = _checked(new, model, bad, progress)
    expected = there if there.modules else _usual(list(seen.values()))
    bad |= _misfits(seen, expected)
    good = sorted(seen.keys() - bad.keys())
    if bad and (not skip_bad or not (old or good)):
        raise _refusal(source, bad, len(found))
    if not old and not good:
        raise UsageError(f"{source} holds no adapter.", cure="Name a folder with files of peft, diffusers or kohya.")
    with BankWriter(destination, compress=compress, kernels=expected.kernels, base=expected.base) as writer:
        for name, reason in bad.items():
            writer.skip(name, str(reason))
        holders = {writer.content(name): name for name in writer.names}
        for name in progress.track(good, "Adding adapters", len(good), unit="adapters"):
            try:
                _add(writer, holders, name, plan_adapter(seen[name].path, model), stamps[name])
            except OutputFailed:
                raise
            except NetweightError as error:
                if not skip_bad:
                    raise _refusal(source, {name: error}, len(found)) from error
                writer.skip(name, str(error))
                progress.note(f"Skipped {name}: {error}")


def _checked(
    paths: Mapping[str, Path], model: ModelNames | None, bad: dict[str, NetweightError], progress: Progress
) -> dict[str, _Seen]:
    """Look at all headers and settings; what is wrong with an adapter by itself goes into `bad`."""
    seen: dict[str, _Seen] = {}
    kinds: dict[_Kind, _Kind] = {}
    for name, path in progress.track(paths.items(), "Checking adapters", len(paths), unit="adapters"):
        try:
            plan = plan_adapter(path, model)
        except NetweightError as error:
            bad[name] = error
            continue
        kind = _Kind(tuple(plan.shapes.items()), tuple(plan.kernels.items()))
        seen[name] = _Seen(path, kinds.setdefault(kind, kind), plan.base)
    return seen


def _add(writer: BankWriter, holders: dict[str, str], name: str, plan: Plan, stamp: str) -> None:
    """Read one adapter and add it, unless the bank has it already."""
    stack = AdapterStack.of([load_plan(plan)])
    rows = rows_of(stack)
    content = rows.digests()[0]
    if name in writer and writer.content(name) == content:
        return
    if name in writer:
        raise UsageError(
            f"{plan.path}: the bank has another adapter {name!r} already.", cure="Rename it, or make another bank."
        )
    if content in holders:
        raise UsageError(f"{plan.path} holds the same adapter as {holders[content]!r}.", cure="Remove one.")
    writer.add_rows([name], rows, stack.shapes, stamps=[stamp], contents=[content])
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


def _find(source: Path) -> tuple[dict[str, Path], dict[str, NetweightError]]:
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
        if name in found:
            bad[path.relative_to(source).as_posix()] = UsageError(
                f"{path} would have the same name as {found[name]}.", cure="Rename one."
            )
        else:
            found[name] = path
    return found, bad


def _adapters_below(folder: Path) -> Iterator[Path]:
    for entry in os.scandir(folder):
        path = Path(entry.path)
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            if _is_adapter(path):
                yield path
            else:
                yield from _adapters_below(path)
        elif path.suffix.lower() in (".safetensors", *PICKLES):
            yield path


def _is_adapter(folder: Path) -> bool:
    """Whether a folder is one adapter: peft's, a pipeline's of peft, or diffusers' with the file it names."""
    if any((folder / name).is_file() for name in (peft.CONFIG, peft.WEIGHTS, diffusers.WEIGHTS)):
        return True
    return any((folder / name / peft.CONFIG).is_file() for name in COMPONENTS)


def _stamp(path: Path) -> str:
    """Size and time of a file, or of all files of an adapter's folder."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return " ".join(f"{status.st_size}-{status.st_mtime_ns}" for status in (file.stat() for file in files))


def _usual(seen: list[_Seen]) -> BankRecord:
    """Modules, shapes, kernels and base of most adapters."""
    if not seen:
        return BankRecord({})
    kind = Counter(one.kind for one in seen).most_common(1)[0][0]
    bases = Counter(one.base for one in seen if one.base).most_common(1)
    return BankRecord(dict(kind.shapes), dict(kind.kernels), bases[0][0] if bases else None)


def _misfits(seen: Mapping[str, _Seen], expected: BankRecord) -> dict[str, NetweightError]:
    """Adapters of other modules, shapes, kernels or bases than expected."""
    bad: dict[str, NetweightError] = {}
    for name, one in seen.items():
        if (shapes := dict(one.kind.shapes)) != dict(expected.modules):
            bad[name] = UsageError(
                f"{one.path} {difference(expected.modules, shapes)}.",
                cure="All adapters of a bank change the same modules: make another bank of it, or leave it out.",
            )
        elif dict(one.kind.kernels) != dict(expected.kernels):
            bad[name] = UsageError(f"{one.path} has other convolutions than the others.", cure="Leave it out.")
        elif one.base and expected.base and one.base != expected.base:
            bad[name] = UsageError(
                f"{one.path} was trained on {one.base}, the others on {expected.base}.",
                cure="Make another bank of it, or leave it out.",
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
