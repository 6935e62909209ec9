"""Baking adapters into a model's weights, file by file: one tensor in memory at a time, nothing else is touched.

W becomes W + Σ weight · scale · up @ down, in fp32, rounded once to the model's own data type; of DoRA, LoHa and LoKr
the change itself is added, without a singular value decomposition. Headers, other tensors and other files stay byte
for byte.
"""

from __future__ import annotations

import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, final

import torch

from netweight.core.files import refuse_existing, whole_file, whole_folder
from netweight.core.lazy import lazy
from netweight.core.progress import QUIET, Progress
from netweight.errors import NameNotFound, Unsupported, UsageError
from netweight.hf.model_modules import ModelModules, model_modules
from netweight.store.lora_formats.base_weights import BaseWeights
from netweight.store.lora_formats.identify import COMPONENTS
from netweight.store.lora_formats.naming import Piece, naming_called
from netweight.store.lora_formats.other_kinds import Conversion
from netweight.store.lora_formats.parts import AdapterPlan, Part, VectorPart, dense_change, load_part, take_rows
from netweight.store.lora_formats.reading import plan_adapter
from netweight.store.lora_formats.targets import expert_of, parameter_of
from netweight.store.reader import Store, open_store
from netweight.store.restoration import plain_head
from netweight.store.safetensors import KEY, read_header

if TYPE_CHECKING:
    from torch import Tensor

_ANY_RANK = 1 << 30
_TENSOR = "file:"  # before the name of a tensor of the files, where an adapter has that name and not a parameter's
# Compression is another method, which is called by its place.
_COMPRESS = lazy("netweight.methods.compress.folder:compress_folder")
_DECOMPRESS = lazy("netweight.methods.compress.folder:decompress_folder")
MANIFEST = "netweight.json"
"""The file that a compressed folder has."""
_BLOCK = 1 << 24  # bytes that are copied at once
_ROWS = 1 << 22  # bytes of a tensor whose rows are changed at once: some that stay in the processor's cache
_FLOATS = ("F64", "F32", "F16", "BF16")


@final
@dataclass(frozen=True)
class Baked:
    """A model that adapters were baked into."""

    path: Path
    """The file or folder."""
    changed: Mapping[str, int]
    """Adapter → how many of its modules were added."""
    modules: int
    """How many modules of the model changed."""
    copied: int
    """How many tensors stayed byte for byte."""
    remarks: tuple[str, ...] = ()
    """What a reader should know of the adapters."""


def bake_files(
    model: Path,
    adapters: Sequence[tuple[Path, float]],
    path: Path,
    *,
    architecture: str | None = None,
    overwrite: bool = False,
    progress: Progress = QUIET,
) -> Baked:
    """Add adapters to the weights of a model.

    Args:
        model: A safetensors file in the names of diffusers, transformers or its authors; a model's folder; or a
            pipeline's. It may be compressed, but then only a single file.
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
    with ExitStack() as stack:
        base = stack.enter_context(BaseWeights(model, naming=naming, conversions=conversions))
        plans = [(plan_adapter(each, None, Conversion(_ANY_RANK, model), base.naming), weight)
                 for each, weight in adapters]  # fmt: skip
        baking = _Baking(base, plans, modules, stack)
        if model.is_file():
            refuse_existing(path, overwrite=overwrite)
            with progress.task("Baking", model.stat().st_size) as task:
                baking.write(model, path, None, overwrite, task.update)
        else:
            refuse_existing(path, overwrite=None)
            _bake_folder(model, path, baking, progress)
    baking.check_all_used()
    changed = {str(plan.path): len(plan.parts) + len(plan.vectors) for plan, _ in plans}
    remarks = tuple(dict.fromkeys(remark for plan, _ in plans for remark in plan.remarks))
    return Baked(path, changed, len(baking.used), baking.copied, remarks)


def _bake_folder(model: Path, path: Path, baking: _Baking, progress: Progress) -> None:
    files = sorted(file for file in model.rglob("*") if file.is_file())
    components = [model / name for name in COMPONENTS if (model / name).is_dir()] or [model]
    weights = {file for folder in components for file in _weight_files(folder)}
    total = sum(file.stat().st_size for file in files)
    with whole_folder(path) as target, progress.task("Baking", total) as task:
        for file in files:
            place = target / file.relative_to(model)
            place.parent.mkdir(parents=True, exist_ok=True)
            if file in weights:
                component = file.parent.name if file.parent != model else None
                baking.write(file, place, component, False, task.update)
            else:
                shutil.copyfile(file, place)
                task.update(file.stat().st_size)


def _weight_files(folder: Path) -> set[Path]:
    if not any(folder.glob("*.safetensors")):
        return set()
    with open_store(folder) as store:
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
) -> Baked:
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
        self.used: set[str] = set()
        self.copied = 0
        for plan, _ in plans:
            parts: list[Part | VectorPart] = [*plan.parts.values(), *plan.vectors.values()]
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
        # Parameter that several tensors make up → tensor → expert and first row that it holds.
        self._places = {name: self._places_of(name) for name in self._changes if len(base.places.get(name, ())) > 1}

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
                cure="Name the model that it was trained on; or say the architecture of both (--model NAME).",
            ) from error

    def _refuse_tied(self, plan: AdapterPlan, parameter: str, name: str) -> None:
        """Refuse to change one of two layers that share their weight."""
        tied = {} if self._modules is None else self._modules.tied
        if other := next(
            (other for own, other in tied.items() if own == parameter or own.endswith(f".{parameter}")), None
        ):
            raise UsageError(
                f"{plan.path} changes {name} alone, and the model has one weight for it and for "
                f"{other.removesuffix('.weight')}; added to the weight, the change would be in both.",
                cure="Keep the adapter beside the model; or save the model untied first (tie_word_embeddings=False, "
                "with a copy of the embedding as the head).",
            )

    def _places_of(self, parameter: str) -> dict[str, tuple[int, int]]:
        """Where the tensors of files lie in the parameter that they make up: expert and block of rows of each."""
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
        if left := sorted(self._changes.keys() - self.used):
            raise UsageError(f"{left[0]} was not found in any file.", cure="Name the whole model.")

    def write(self, source: Path, target: Path, component: str | None, overwrite: bool, advance: object) -> None:
        """Write one file, tensor by tensor."""
        update = advance if callable(advance) else lambda _: None
        with open_store(source) as store, whole_file(target, overwrite=overwrite) as out:
            file = store.files[0]
            out.write(plain_head(file))
            for name in _in_order(store):
                key = f"{component}/{name}" if component else name
                pieces = self._base.tensors[key][1] if key in self._base.tensors else ()
                wanted = [piece for piece in pieces if piece.module in self._changes]
                if _TENSOR + key in self._changes:
                    wanted.append(Piece(_TENSOR + key))
                if wanted:
                    for block in self._baked(store, name, wanted):
                        out.write(_bytes(block))
                else:
                    self.copied += 1
                    _copy(store, name, out)
                update(store.info(name).nbytes)

    def _baked(self, store: Store, name: str, pieces: Sequence[Piece]) -> Iterator[Tensor]:
        """A tensor with the changes of all adapters, a block of rows at a time where changes allow that."""
        info = store.info(name)
        if info.dtype not in _FLOATS:
            raise Unsupported(
                f"{info.file}: {name} is stored as {info.dtype}, into which no change can be added.",
                cure="Name the model in bf16, fp16 or fp32.",
            )
        sums = self._sums(name, info.shape, pieces, info.dtype)
        if sums is None:
            yield self._baked_whole(store, name, pieces)
            return
        self.used.update(piece.module for piece in pieces)
        step = max(1, _ROWS * info.shape[0] // max(info.nbytes, 1))
        wide = torch.float64 if info.dtype == "F64" else torch.float32
        for start in range(0, info.shape[0], step):
            weight = store.get_slice(name, slice(start, start + step))
            result = weight.to(wide, copy=True)
            for first, up, down, alpha in sums:
                begin, end = max(start, first), min(start + step, first + len(up))
                if begin < end:
                    rows = result[begin - start : end - start].flatten(1)
                    rows.addmm_(up[begin - first : end - first], down, alpha=alpha)
            yield result.to(weight.dtype)

    def _sums(
        self, name: str, shape: tuple[int, ...], pieces: Sequence[Piece], dtype: str
    ) -> list[tuple[int, Tensor, Tensor, float]] | None:
        """The products that are added to a tensor: first row, up, down, factor; None for changes of other kinds."""
        wide = torch.float64 if dtype == "F64" else torch.float32
        sums = []
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
                down, up, scale = self._factors(part)
                up, down, done = up.to(wide), down.to(wide), 0
                for start, stop in rows:
                    sums.append((start, up[done : done + stop - start], down, scale * factor))
                    done += stop - start
        return sums

    def _baked_whole(self, store: Store, name: str, pieces: Sequence[Piece]) -> Tensor:
        """A tensor with the changes of all adapters, of whatever kind they are."""
        weight = store.get(name)
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        result = weight.to(wide, copy=True)
        for piece in pieces:
            self.used.add(piece.module)
            for plan, factor, own in self._changes[piece.module]:
                if (expert := expert_of(own)) is not None:
                    place = self._places.get(piece.module, {}).get(name)
                    self._add_expert(result, plan, factor, own, expert[1:], place)
                    continue
                rows = piece.rows or ((0, len(weight)),)
                current = take_rows(weight, piece.rows)
                self._add(result, rows, plan, factor, own, current)
        return result.to(weight.dtype)

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
            down, up, scale = self._factors(part)
            start = place[1] * len(result)
            up = up[start : start + len(result)]
            if up.shape[0] != len(result) or down.shape[1] != result.shape[1]:
                raise _other_shape(plan, name, part.shape, tuple(result.shape))
            result.addmm_(up.to(result), down.to(result), alpha=scale * factor)
            return
        if result.ndim == 2 and count == 1 and tuple(result.shape) == part.shape:
            down, up, scale = self._factors(part)
            result.addmm_(up.to(result), down.to(result), alpha=scale * factor)
            return
        if result.ndim != 3 or len(result) != count:
            raise _other_shape(plan, name, part.shape, tuple(result.shape))
        stored = (result.shape[1], result.shape[2])
        down, up, scale = self._factors(part)
        left, right = (down.T, up.T) if self._is_packed_transposed(plan, name, stored) else (up, down)
        if (left.shape[0], right.shape[1]) != stored:
            raise _other_shape(plan, name, part.shape, stored)
        result[number].addmm_(left.to(result), right.to(result), alpha=scale * factor)

    def _is_packed_transposed(self, plan: AdapterPlan, name: str, stored: tuple[int, ...]) -> bool:
        """Whether the model stores experts as (inputs, outputs)."""
        parameter = self._find(plan, name)
        if self._modules is not None and parameter in self._modules.packed:
            return self._modules.packed[parameter]
        if stored[0] == stored[1]:
            raise UsageError(
                f"{parameter} holds square matrices, and no config beside {self._base.path} says whether their rows "
                "are inputs or outputs.",
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
        if name in plan.vectors:
            vector = plan.vectors[name]
            change = take_rows(self._stores[vector.file].get(vector.tensor), vector.rows).to(result) * vector.scale
            if change.numel() != current.numel():
                raise UsageError(f"{plan.path}: {name} has {change.numel()} entries, the model {current.numel()}.")
            _add_rows(result, rows, change.reshape(current.shape), factor)
            return
        module = name
        part = plan.parts[module]
        transposed = self._is_transposed(plan, module, part.shape, tuple(current.shape))
        shape = tuple(current.T.shape) if transposed else (len(current), math.prod(current.shape[1:]))
        if shape != part.shape:
            raise _other_shape(plan, module, part.shape, shape)
        if not part.converts:
            down, up, scale = self._factors(part)
            change = (up.to(result) @ down.to(result)) * scale
        else:
            weight = current.T if transposed else current
            change = dense_change(self._stores[part.file], module, part, weight.to(torch.float64)).to(result)
        change = change.T if transposed else change
        _add_rows(result, rows, change.reshape(current.shape), factor)

    def _factors(self, part: Part) -> tuple[Tensor, Tensor, float]:
        change, _ = load_part(self._stores[part.file], "", part, None)
        return change.down, change.up, change.scale

    def _is_transposed(self, plan: AdapterPlan, module: str, shape: tuple[int, int], stored: tuple[int, ...]) -> bool:
        """Return whether the model stores the weight as (inputs, outputs)."""
        if len(stored) != 2:
            return False
        if self._modules is not None:
            return module in self._modules.transposed or any(
                name.endswith(f".{module}") for name in self._modules.transposed
            )
        return plan.transposed or (shape[0] != shape[1] and stored == (shape[1], shape[0]))


def _other_shape(plan: AdapterPlan, name: str, own: tuple[int, int], model: tuple[int, ...]) -> UsageError:
    return UsageError(
        f"{plan.path}: the change of {name} is {own[0]} × {own[1]}, the model's weight {' × '.join(map(str, model))}.",
        cure="Name the model that the adapter was trained on.",
    )


def _add_rows(result: Tensor, rows: Sequence[tuple[int, int]], change: Tensor, factor: float) -> None:
    done = 0
    for start, stop in rows:
        result[start:stop].add_(change[done : done + stop - start], alpha=factor)
        done += stop - start


def _in_order(store: Store) -> Iterator[str]:
    """Names in the order of the data, as the header says."""
    yield from store.names()


def _bytes(tensor: Tensor) -> memoryview:
    whole: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(whole)


def _copy(store: Store, name: str, out: IO[bytes]) -> None:
    if not store.info(name).compressed:
        raw = store.raw(name)
        for start in range(0, len(raw), _BLOCK):
            out.write(raw[start : start + _BLOCK])
        return
    tensor = store.get(name)
    out.write(_bytes(tensor) if tensor.numel() else b"")


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
        return Path(match[1]), float(match[2])
    except ValueError as error:
        raise UsageError(f"The weight of {match[1]} is {match[2]!r}, no number.", cure="Write LORA=0.8.") from error
