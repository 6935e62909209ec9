"""Baking adapters into a model's weights, file by file: some rows in memory at a time, nothing else is touched.

W becomes W + Σ weight · scale · up @ down, in fp32, rounded once to the model's own data type; of DoRA, LoHa and LoKr
the change itself is added, without a singular value decomposition. Other tensors and other files stay byte for byte,
and headers do, except for hashes of the old weights. What is written is read back.
"""

from __future__ import annotations

import math
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, final

import torch

from netweight.codec.header import torch_dtype
from netweight.core.atomic_writes import mode_of, refuse_existing, whole_file, whole_folder
from netweight.core.lazy import lazy
from netweight.core.linked_folders import files_below
from netweight.core.progress import QUIET, Progress
from netweight.core.weight_endings import WEIGHTS
from netweight.errors import NameNotFound, Unsupported, UsageError
from netweight.hf.model_modules import ModelModules, model_modules
from netweight.methods.space.lora_files import NamedModel, with_model
from netweight.store.changed_copy import ChangedCopy
from netweight.store.lora_formats import metadata as headers
from netweight.store.lora_formats.base_weights import CONV1D, BaseWeights, open_weights
from netweight.store.lora_formats.identify import COMPONENTS
from netweight.store.lora_formats.naming import Piece, naming_called
from netweight.store.lora_formats.other_kinds import Conversion
from netweight.store.lora_formats.parts import (
    AdapterPart,
    AdapterPlan,
    VectorPart,
    dense_change,
    load_part,
    take_rows,
)
from netweight.store.lora_formats.reading import plan_adapter, refuse_not_finite
from netweight.store.lora_formats.targets import expert_of, parameter_of
from netweight.store.reader import INDEX_SUFFIX, Store, StoredFile, TensorInfo, open_store, weight_map
from netweight.store.safetensors import KEY, build_header, file_head, read_header

if TYPE_CHECKING:
    from torch import Tensor

_ANY_RANK = 1 << 30
# The prefix of a tensor's name in the files, if an adapter uses this name and not that of a parameter.
_TENSOR = "file:"
# Compression is another method, which is called by its place.
_COMPRESS = lazy("netweight.methods.compress.compress_folder:compress_folder")
_DECOMPRESS = lazy("netweight.methods.compress.compress_folder:decompress_folder")
MANIFEST = "netweight.json"
"""The file that a compressed folder has."""
_FLOATS = ("F64", "F32", "F16", "BF16")
# Far below the largest number of bf16 and fp32, and far above every weight.
_ABSURD = 1e30
# Endings of files with weights of a model in another format or data type, and of their indexes.
_STALE = (*WEIGHTS, ".index.json")


@final
@dataclass(frozen=True)
class BakeResult:
    """A model that adapters were baked into."""

    path: Path
    """The file or folder."""
    changed: Mapping[str, int]
    """Adapter → how many of its modules were added."""
    modules: int
    """Number of changed weights of the model."""
    copied: int
    """Number of tensors that were copied byte for byte."""
    rounded_away: tuple[str, ...] = ()
    """Weights to which a change was added that is smaller than the rounding of their data type."""
    left_out: tuple[str, ...] = ()
    """Files that are not in the result, since they contain the weights before the change."""
    remarks: tuple[str, ...] = ()
    """Remarks on the adapters."""


def bake_files(
    model: Path,
    adapters: Sequence[tuple[Path, float]],
    path: Path,
    *,
    architecture: str | None = None,
    overwrite: bool = False,
    progress: Progress = QUIET,
) -> BakeResult:
    """Add adapters to the weights of a model.

    Args:
        model: A safetensors file in the names of diffusers, transformers or its authors; a model's folder; or a
            pipeline's. None of it is compressed.
        adapters: Files or folders of adapters in any known naming, with their weights.
        path: The file or folder to write; it appears whole or not at all.
        architecture: The table of names to read the files by, where they do not tell it.
        overwrite: Whether a file may be replaced.
        progress: Where the work is shown.

    Returns:
        What was written.

    Raises:
        UsageError: An adapter is of another model: it lacks a module, or has it in another shape.
        Unsupported: Weights are stored as codes.
        OutputExists: The path exists.
    """
    if not adapters:
        raise UsageError("No adapter was named.", cure="Name adapters after the model: MODEL LORA=WEIGHT OUT.")
    naming = None if architecture is None else naming_called(architecture)
    modules = model_modules(model) if model.is_dir() else None
    conversions = {} if modules is None else modules.conversions
    left_out: tuple[str, ...] = ()
    with ExitStack() as stack:
        base = stack.enter_context(BaseWeights(model, naming=naming, conversions=conversions))
        plans = [(_plan(each, base, modules), weight) for each, weight in adapters]
        baking = _Baking(base, plans, modules, stack)
        if model.is_file():
            refuse_existing(path, overwrite=overwrite)
            with (
                progress.task("Baking", model.stat().st_size) as task,
                whole_file(path, overwrite=overwrite, mode=mode_of(model)) as out,
            ):
                baking.write(model, out, None, task.update)
                baking.check_all_used()
        else:
            refuse_existing(path, overwrite=None)
            left_out = _bake_folder(model, path, baking, progress)
    changed = {str(plan.path): len(plan.parts) + len(plan.vectors) + len(plan.replacements) for plan, _ in plans}
    remarks = tuple(dict.fromkeys(remark for plan, _ in plans for remark in plan.remarks))
    return BakeResult(path, changed, baking.changed, baking.copied, tuple(baking.rounded_away), left_out, remarks)


def _plan(adapter: Path, base: BaseWeights, modules: ModelModules | None) -> AdapterPlan:
    """Find out what an adapter's files change; flattened names that no table has are looked up in the model itself."""
    conversion = Conversion(_ANY_RANK, base.path, replacements=True)
    try:
        return plan_adapter(adapter, None, conversion, base.naming)
    except Unsupported:
        names = with_model(NamedModel(modules=modules))
        if names is None:
            raise
        return plan_adapter(adapter, names, conversion, base.naming)


def _bake_folder(model: Path, path: Path, baking: _Baking, progress: Progress) -> tuple[str, ...]:
    """Write a folder, and return the files that were left out."""
    files = sorted(file for file in files_below(model) if not _is_hidden(file.relative_to(model)))
    folders = [model / name for name in COMPONENTS if (model / name).is_dir()] or [model]
    weights = {file: None if folder == model else folder.name for folder in folders for file in _weight_files(folder)}
    # Other files of weights beside those that change would still open, as a variant or in another program.
    changing = {model, *(file.parent for file in baking.files)}
    # This is a plain model. Its modules of sentence-transformers are in numbered folders.
    if folders == [model]:
        changing |= {file.parent for file in files if not re.match(r"\d+_", file.relative_to(model).parts[0])}
    stale = [
        file for file in files if file not in weights and file.name.lower().endswith(_STALE) and file.parent in changing
    ]
    stale = [file for file in stale if not _is_index_of(file, weights)]
    total = sum(file.stat().st_size for file in files)
    with whole_folder(path) as target, progress.task("Baking", total) as task:
        for file in files:
            place = target / file.relative_to(model)
            place.parent.mkdir(parents=True, exist_ok=True)
            if file in weights:
                with whole_file(place, mode=mode_of(file)) as out:
                    baking.write(file, out, weights[file], task.update)
            elif file not in stale:
                shutil.copyfile(file, place)
                task.update(file.stat().st_size)
        baking.check_all_used()
    return tuple(file.relative_to(model).as_posix() for file in stale)


def _is_hidden(inside: Path) -> bool:
    """Return whether a file lies in a hidden folder, such as git's."""
    return any(part.startswith(".") for part in inside.parts[:-1])


def _is_index_of(file: Path, weights: Mapping[Path, str | None]) -> bool:
    """Return whether a file is the index of shards that are written."""
    if not file.name.endswith(INDEX_SUFFIX):
        return False
    return {file.parent / name for name in weight_map(file).values()} <= weights.keys()


def _weight_files(folder: Path) -> set[Path]:
    if not any(folder.glob("*.safetensors")):
        return set()
    with open_weights(folder) as store:
        return {file.path for file in store.files}


def bake_model(
    model: Path,
    adapters: Sequence[str],
    path: Path,
    *,
    architecture: str | None = None,
    compress: bool | None = None,
    overwrite: bool = False,
    progress: Progress = QUIET,
) -> BakeResult:
    """Add adapters to a model that may be compressed; see `bake_files`.

    Args:
        model: The file or folder.
        adapters: Adapters as the command line writes them: a path, with `=WEIGHT` behind it if it is not 1.
        path: The file or folder to write.
        architecture: The table of names to read the files by, where they do not tell it.
        compress: Whether the result is compressed; None for the form of the model.
        overwrite: Whether a file may be replaced.
        progress: Where the work is shown.

    Returns:
        What was written.
    """
    chosen = [adapter_and_weight(each) for each in adapters]
    packed = (model / MANIFEST).is_file() if model.is_dir() else KEY in read_header(model).metadata
    packs = packed if compress is None else compress
    if not packed and not packs:
        return bake_files(model, chosen, path, architecture=architecture, overwrite=overwrite, progress=progress)
    refuse_existing(path, overwrite=overwrite)
    with tempfile.TemporaryDirectory(dir=path.absolute().parent, prefix=".bake-") as work:
        source, place = model, path
        if packed:
            source = Path(work) / "source" / (model.name if model.is_dir() else "model.safetensors")
            source.parent.mkdir()
            _DECOMPRESS(model, source, progress=progress)
        if packs:
            place = Path(work) / ("baked" if model.is_dir() else "baked.safetensors")
        made = bake_files(source, chosen, place, architecture=architecture, overwrite=overwrite, progress=progress)
        if packs:
            _COMPRESS(place, path, overwrite=overwrite, progress=progress)
    return replace(made, path=path)


class _Baking:
    """The changes of all adapters, found by the tensor that they change."""

    def __init__(
        self,
        base: BaseWeights,
        plans: Sequence[tuple[AdapterPlan, float]],
        modules: ModelModules | None,
        stack: ExitStack,
    ) -> None:
        self._base, self._plans, self._modules = base, plans, modules
        self._stores: dict[Path, Store] = {}
        self._used: set[str] = set()
        self.changed = self.copied = 0
        self.rounded_away: list[str] = []
        for plan, _ in plans:
            parts: list[AdapterPart | VectorPart] = [
                *plan.parts.values(), *plan.vectors.values(), *plan.replacements.values(),
            ]  # fmt: skip
            for file in dict.fromkeys(part.file for part in parts):
                if file not in self._stores:
                    self._stores[file] = stack.enter_context(open_store(file))
        # Parameter of the model → (adapter, its weight, the adapter's name of it).
        self._changes: dict[str, list[tuple[AdapterPlan, float, str]]] = {}
        for plan, weight in plans:
            for name in plan.parts:
                self._changes.setdefault(self._find(plan, name), []).append((plan, weight, name))
            for name in plan.vectors:
                self._changes.setdefault(self._found(plan, name, name), []).append((plan, weight, name))
            for name in plan.replacements:
                if not self._is_same_as_tied(plan, name):
                    self._changes.setdefault(self._found(plan, name, name), []).append((plan, weight, name))
        # Parameter that several tensors make up → tensor → expert and first row that it holds.
        self._places = {name: self._places_of(name) for name in self._changes if len(base.places.get(name, ())) > 1}
        # Tensor of the files → what of it changes.
        self._wanted: dict[str, list[Piece]] = {}
        self.files: set[Path] = set()
        for key, (store, pieces) in base.tensors.items():
            changed = [piece for piece in pieces if piece.module in self._changes]
            if _TENSOR + key in self._changes:
                changed.append(Piece(_TENSOR + key))
            if changed:
                self._wanted[key] = changed
                self.files.add(store.info(key.rpartition("/")[2]).file)

    def _find(self, plan: AdapterPlan, name: str) -> str:
        """The model's parameter that one part of an adapter changes."""
        return self._found(plan, parameter_of(name), name)

    def _found(self, plan: AdapterPlan, parameter: str, name: str) -> str:
        self._refuse_tied(plan, parameter, name)
        try:
            return self._base.find(parameter)
        except NameNotFound as error:
            # Adapters of earlier releases of transformers are in the names that files still have.
            if (tensor := self._base.tensor_called(parameter)) is not None:
                return _TENSOR + tensor
            raise UsageError(
                f"{plan.path} changes {name}, which {self._base.path} does not contain.",
                cure="Name the model that it was trained on; or give the architecture of both (--model NAME).",
            ) from error

    def _is_same_as_tied(self, plan: AdapterPlan, name: str) -> bool:
        """Return whether a whole weight belongs to a tied head and equals the embedding's weight in the adapter."""
        other = None if self._modules is None else self._tied(name)
        if other is None or other not in plan.replacements:
            return False
        one, two = (self._replacement(plan, each) for each in (name, other))
        if not torch.equal(one, two):
            raise UsageError(
                f"{plan.path} contains {name} and {other}, which differ, and the model has one weight for both.",
                cure="Save the model untied first (tie_word_embeddings=False, with a copy of the embedding as the "
                "head), and name that one.",
            )
        return name not in self._base.places

    def _replacement(self, plan: AdapterPlan, name: str) -> Tensor:
        part = plan.replacements[name]
        return self._stores[part.file].get(part.tensor)

    def _tied(self, parameter: str) -> str | None:
        """The parameter that a parameter shares its memory with."""
        tied = {} if self._modules is None else self._modules.tied
        return next((other for own, other in tied.items() if own == parameter or own.endswith(f".{parameter}")), None)

    def _refuse_tied(self, plan: AdapterPlan, parameter: str, name: str) -> None:
        """Refuse to change one of two layers that share their weight."""
        other = self._tied(parameter)
        if other is not None and not (name in plan.replacements and other in plan.replacements):
            raise UsageError(
                f"{plan.path} changes {name} alone, and the model has one weight for it and for "
                f"{other.removesuffix('.weight')}; added to the weight, the change would be in both.",
                cure="Keep the adapter beside the model; or save the model untied first (tie_word_embeddings=False, "
                "with a copy of the embedding as the head).",
            )

    def _places_of(self, parameter: str) -> dict[str, tuple[int, int]]:
        """Return the places of tensors in the parameter that they make up: expert and block of rows of each."""
        places = self._base.blocks(parameter)
        experts = all(expert_of(name) for _, _, name in self._changes[parameter])
        if places is None or not experts:
            count = len(self._base.places[parameter])
            raise Unsupported(
                f"{parameter} is stored in {count} tensors of {self._base.path}, which are not rows of it.",
                cure="Merge with peft: model.merge_and_unload(), then save_pretrained.",
            )
        count = 1 + max(expert for expert, _ in places.values())
        for plan, _, name in self._changes[parameter]:
            expert = expert_of(name)
            if expert is None or expert[2] != count:
                raise UsageError(
                    f"{plan.path} changes {name}, and the model has {count} experts there.",
                    cure="Name the model that the adapter was trained on.",
                )
        return places

    def check_all_used(self) -> None:
        """Refuse to have left a change out."""
        if left := sorted(self._changes.keys() - self._used):
            raise UsageError(f"{left[0]} was not found in any file.", cure="Name the whole model.")

    def write(self, source: Path, out: IO[bytes], component: str | None, advance: Callable[[int], None]) -> None:
        """Write one file, tensor by tensor, and read it back."""
        with closing(StoredFile(source)) as file:
            if file.description is not None:
                raise UsageError(f"{source} is compressed, and its folder has no {MANIFEST}.",
                                 cure="Decompress it first (netweight decompress).")  # fmt: skip
            copy = ChangedCopy(file, out)
            copy.head(_head(file))
            for name in file.names():
                key = f"{component}/{name}" if component else name
                changed = self._wanted.get(key)
                if changed is None:
                    self.copied += 1
                    copy.copy(name)
                elif self._write_changed(copy, file.info(name), changed):
                    self.changed += 1
                else:
                    self.rounded_away.append(name)
                advance(file.info(name).nbytes)
            copy.check(source)

    def _write_changed(self, copy: ChangedCopy, info: TensorInfo, pieces: Sequence[Piece]) -> bool:
        """Write a tensor with the changes of all adapters, some rows at a time where the changes allow that."""
        if info.dtype not in _FLOATS:
            raise Unsupported(
                f"{info.file}: {info.name} is stored as {info.dtype}, into which no change can be added.",
                cure="Use the model in bf16, fp16 or fp32.",
            )
        self._used.update(piece.module for piece in pieces)
        wide = torch.float64 if info.dtype == "F64" else torch.float32
        sums = self._sums(info, pieces, wide)
        if sums is None:
            whole = self._changed_whole(info, pieces, wide)
            _refuse_overflow(info, whole)
            return copy.replace(info.name, whole.to(torch_dtype(info.dtype)))

        # Only fp16 has a largest number that weights come near to, unless the change itself is absurd.
        bound = sum(abs(alpha) * up.shape[1] * float(up.abs().max() * down.abs().max()) for _, up, down, alpha in sums)
        watched = info.dtype == "F16" or bound > _ABSURD

        def change(start: int, values: Tensor) -> None:
            stop = start + len(values)
            for first, up, down, alpha in sums:
                begin, end = max(start, first), min(stop, first + len(up))
                if begin < end:
                    rows = values[begin - start : end - start].flatten(1)
                    rows.addmm_(up[begin - first : end - first], down, alpha=alpha)
            if watched:
                _refuse_overflow(info, values)

        return copy.change(info.name, wide, change)

    def _sums(
        self, info: TensorInfo, pieces: Sequence[Piece], wide: torch.dtype
    ) -> list[tuple[int, Tensor, Tensor, float]] | None:
        """The products that are added to a tensor: first row, up, down, factor; None for changes of other kinds."""
        shape, sums = info.shape, []
        for piece in pieces:
            rows = piece.rows or ((0, shape[0]),)
            stored = (sum(stop - start for start, stop in rows), *shape[1:])
            for plan, factor, own in self._changes[piece.module]:
                part = plan.parts.get(own)
                if (
                    part is None
                    or part.converts
                    or expert_of(own)
                    or self._is_transposed(plan, own, part.shape, stored)
                ):
                    return None
                if (stored[0], math.prod(stored[1:])) != part.shape:
                    raise _other_shape(plan, own, part.shape, stored)
                down, up, scale = self._factors(own, part)
                up, down, done = up.to(wide), down.to(wide), 0
                for start, stop in rows:
                    sums.append((start, up[done : done + stop - start], down, scale * factor))
                    done += stop - start
        return sums

    def _changed_whole(self, info: TensorInfo, pieces: Sequence[Piece], wide: torch.dtype) -> Tensor:
        """A tensor with the changes of all adapters, of whatever kind they are."""
        with closing(StoredFile(info.file)) as file:
            weight = file.get(info.name)
        result = weight.to(wide, copy=True)
        for piece in pieces:
            for plan, factor, own in self._changes[piece.module]:
                if (expert := expert_of(own)) is not None:
                    place = self._places.get(piece.module, {}).get(info.name)
                    self._add_expert(result, plan, factor, own, expert[1:], place)
                    continue
                rows = piece.rows or ((0, len(weight)),)
                current = take_rows(weight, piece.rows)
                self._add(result, rows, plan, factor, own, current)
        return result

    def _add_expert(
        self,
        result: Tensor,
        plan: AdapterPlan,
        factor: float,
        name: str,
        expert: tuple[int, int],
        place: tuple[int, int] | None,
    ) -> None:
        """Add one adapter's change of one expert to the tensor that holds all experts, or one block of one of them."""
        number, count = expert
        part = plan.parts[name]
        if place is not None:
            if place[0] != number:
                return
            down, up, scale = self._factors(name, part)
            start = place[1] * len(result)
            up = up[start : start + len(result)]
            if up.shape[0] != len(result) or down.shape[1] != result.shape[1]:
                raise _other_shape(plan, name, part.shape, tuple(result.shape))
            result.addmm_(up.to(result), down.to(result), alpha=scale * factor)
            return
        if result.ndim == 2 and count == 1 and tuple(result.shape) == part.shape:
            down, up, scale = self._factors(name, part)
            result.addmm_(up.to(result), down.to(result), alpha=scale * factor)
            return
        if result.ndim != 3 or len(result) != count:
            raise _other_shape(plan, name, part.shape, tuple(result.shape))
        stored = (result.shape[1], result.shape[2])
        down, up, scale = self._factors(name, part)
        left, right = (down.T, up.T) if self._is_packed_transposed(plan, name, stored) else (up, down)
        if (left.shape[0], right.shape[1]) != stored:
            raise _other_shape(plan, name, part.shape, stored)
        result[number].addmm_(left.to(result), right.to(result), alpha=scale * factor)

    def _is_packed_transposed(self, plan: AdapterPlan, name: str, stored: tuple[int, ...]) -> bool:
        """Return True if the model stores experts as (inputs, outputs)."""
        parameter = self._find(plan, name)
        if self._modules is not None and parameter in self._modules.packed:
            return self._modules.packed[parameter]
        if stored[0] == stored[1]:
            raise UsageError(
                f"{parameter} consists of square matrices, and no config beside {self._base.path} states whether "
                "their rows are inputs or outputs.",
                cure="Name the model's folder, with its config.json.",
            )
        return stored != plan.parts[name].shape

    def _add(
        self,
        result: Tensor,
        rows: Sequence[tuple[int, int]],
        plan: AdapterPlan,
        factor: float,
        name: str,
        current: Tensor,
    ) -> None:
        """Add one adapter's change of one parameter to its rows."""
        if name in plan.replacements:
            whole = self._replacement(plan, name).to(result)
            if tuple(whole.shape) != tuple(current.shape):
                raise UsageError(
                    f"{plan.path} contains {name} of shape {tuple(whole.shape)}, but the model contains it in shape "
                    f"{tuple(current.shape)}.",
                    cure="Name the model that it was trained on; if tokens were added, resize its embeddings first "
                    "(model.resize_token_embeddings, save_pretrained).",
                )
            if factor == 1 and len(self._changes[self._found(plan, name, name)]) == 1:
                # If nothing else is added, the values are copied exactly.
                result.copy_(whole)
            else:
                result.add_(whole - current.to(result), alpha=factor)
            return
        if name in plan.vectors:
            vector = plan.vectors[name]
            change = take_rows(self._stores[vector.file].get(vector.tensor), vector.rows).to(result) * vector.scale
            if change.numel() != current.numel():
                raise UsageError(
                    f"{plan.path}: {name} has {change.numel()} entries, but {current.numel()} entries in the model."
                )
            _add_rows(result, rows, change.reshape(current.shape), factor)
            return
        module = name
        part = plan.parts[module]
        transposed = self._is_transposed(plan, module, part.shape, tuple(current.shape))
        shape = tuple(current.T.shape) if transposed else (len(current), math.prod(current.shape[1:]))
        if shape != part.shape:
            raise _other_shape(plan, module, part.shape, shape)
        if not part.converts:
            down, up, scale = self._factors(name, part)
            change = (up.to(result) @ down.to(result)) * scale
        else:
            weight = current.T if transposed else current
            change = dense_change(self._stores[part.file], module, part, weight.to(torch.float64)).to(result)
        change = change.T if transposed else change
        _add_rows(result, rows, change.reshape(current.shape), factor)

    def _factors(self, name: str, part: AdapterPart) -> tuple[Tensor, Tensor, float]:
        change, _ = load_part(self._stores[part.file], name, part, None)
        refuse_not_finite(part.file, name, change)
        return change.down, change.up, change.scale

    def _is_transposed(self, plan: AdapterPlan, module: str, shape: tuple[int, int], stored: tuple[int, ...]) -> bool:
        """Return whether the model stores the weight as (inputs, outputs)."""
        if len(stored) != 2:
            return False
        if self._modules is not None:
            return module in self._modules.transposed or any(
                name.endswith(f".{module}") for name in self._modules.transposed
            )
        if shape[0] != shape[1]:
            return stored == (shape[1], shape[0])
        return plan.transposed or (self._base.stores_inputs_first and CONV1D.fullmatch(module) is not None)


def _other_shape(plan: AdapterPlan, name: str, own: tuple[int, int], model: tuple[int, ...]) -> UsageError:
    return UsageError(
        f"{plan.path}: the change of {name} is {own[0]} × {own[1]}, but the weight of the model is "
        f"{' × '.join(map(str, model))}.",
        cure="Name the model that the adapter was trained on.",
    )


def _add_rows(result: Tensor, rows: Sequence[tuple[int, int]], change: Tensor, factor: float) -> None:
    done = 0
    for start, stop in rows:
        result[start:stop].add_(change[done : done + stop - start], alpha=factor)
        done += stop - start


def _head(file: StoredFile) -> bytes:
    """The bytes before the data: those of the source, without hashes of its weights."""
    if not (stale := headers.HASHES & file.metadata.keys()):
        return file_head(file.header.raw)
    metadata = {key: value for key, value in file.metadata.items() if key not in stale}
    return file_head(build_header([(s.name, s.dtype, s.shape, s.nbytes) for s in file.header.spans], metadata))


def _refuse_overflow(info: TensorInfo, values: Tensor) -> None:
    """Refuse values that the tensor's data type does not hold."""
    if not values.numel():
        return
    limit = torch.finfo(torch_dtype(info.dtype)).max
    low, high = values.aminmax()
    if -limit <= float(low) and float(high) <= limit:
        return
    raise UsageError(
        f"{info.file}: with the change, {info.name} has values that {info.dtype} cannot represent "
        f"({float(low):g} to {float(high):g}; the largest is {limit:g}).",
        cure="Choose a smaller weight (LORA=0.5), or name a model in bf16 or fp32 without NaN.",
    )


def adapter_and_weight(text: str) -> tuple[Path, float]:
    """Read LORA or LORA=WEIGHT as the command line writes it.

    Raises:
        UsageError: There is no such file, or the weight is not a number.
    """
    if Path(text).exists():
        return Path(text), 1.0
    match = re.fullmatch(r"(.+)=([^=]+)", text)
    if match is None or not Path(match[1]).exists():
        raise UsageError(f"There is no file or folder {text}.", cure="Check the path; a weight follows it as =0.8.")
    try:
        weight = float(match[2])
        if not math.isfinite(weight):
            raise ValueError(match[2])
    except ValueError as error:
        raise UsageError(
            f"The weight of {match[1]} is {match[2]!r}, not a finite number.", cure="Write LORA=0.8."
        ) from error
    return Path(match[1]), weight
