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
from netweight.store.lora_formats.naming import naming_called
from netweight.store.lora_formats.other_kinds import Conversion
from netweight.store.lora_formats.parts import AdapterPlan, Part, VectorPart, dense_change, load_part, take_rows
from netweight.store.lora_formats.reading import plan_adapter
from netweight.store.reader import Store, open_store
from netweight.store.restoration import plain_head
from netweight.store.safetensors import KEY, read_header

if TYPE_CHECKING:
    from torch import Tensor

    from netweight.store.lora_formats.naming import Piece

_ANY_RANK = 1 << 30
# Compression is another method, which is called by its place.
_COMPRESS = lazy("netweight.methods.compress.folder:compress_folder")
_DECOMPRESS = lazy("netweight.methods.compress.folder:decompress_folder")
MANIFEST = "netweight.json"
"""The file that a compressed folder has."""
_BLOCK = 1 << 24  # bytes that are copied at once
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


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
            for name in (*(f"{module}.weight" for module in plan.parts), *plan.vectors):
                self._changes.setdefault(self._find(plan, name), []).append((plan, weight, name))

    def _find(self, plan: AdapterPlan, name: str) -> str:
        try:
            found = self._base.find(name)
        except NameNotFound as error:
            raise UsageError(
                f"{plan.path} changes {name.rpartition('.')[0]}, which {self._base.path} does not hold.",
                cure="Name the model that it was trained on; or say the architecture of both (--model NAME).",
            ) from error
        if len(self._base.places[found]) > 1:
            raise Unsupported(
                f"{found} is stored in {len(self._base.places[found])} tensors of {self._base.path}, which are not "
                "rows of it.",
                cure="Merge with peft: model.merge_and_unload(), then save_pretrained.",
            )
        return found

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
                if wanted:
                    out.write(_bytes(self._baked(store, name, wanted)))
                else:
                    self.copied += 1
                    _copy(store, name, out)
                update(store.info(name).nbytes)

    def _baked(self, store: Store, name: str, pieces: Sequence[Piece]) -> Tensor:
        """A tensor with the changes of all adapters."""
        weight = store.get(name)
        if weight.dtype not in _FLOATS:
            raise Unsupported(
                f"{store.info(name).file}: {name} is stored as {weight.dtype}, into which no change can be added.",
                cure="Name the model in bf16, fp16 or fp32.",
            )
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        result = weight.to(wide, copy=True)
        for piece in pieces:
            self.used.add(piece.module)
            for plan, factor, own in self._changes[piece.module]:
                rows = piece.rows or ((0, len(weight)),)
                current = take_rows(weight, piece.rows)
                self._add(result, rows, plan, factor, own, current)
        return result.to(weight.dtype)

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
        module = name.removesuffix(".weight")
        part = plan.parts[module]
        transposed = current.ndim == 2 and self._is_transposed(plan, module, part.shape, current)
        shape = tuple(current.T.shape) if transposed else (len(current), math.prod(current.shape[1:]))
        if shape != part.shape:
            raise UsageError(
                f"{plan.path}: the change of {module} is {part.shape[0]} × {part.shape[1]}, the model's weight "
                f"{shape[0]} × {shape[1]}.",
                cure="Name the model that the adapter was trained on.",
            )
        if not part.converts:
            down, up, scale = self._factors(part)
            if len(rows) == 1 and not transposed:
                start, stop = rows[0]
                result[start:stop].flatten(1).addmm_(up.to(result), down.to(result), alpha=scale * factor)
                return
            change = (up.to(result) @ down.to(result)) * scale
        else:
            weight = current.T if transposed else current
            change = dense_change(self._stores[part.file], module, part, weight.to(torch.float64)).to(result)
        change = change.T if transposed else change
        _add_rows(result, rows, change.reshape(current.shape), factor)

    def _factors(self, part: Part) -> tuple[Tensor, Tensor, float]:
        change, _ = load_part(self._stores[part.file], "", part, None)
        return change.down, change.up, change.scale

    def _is_transposed(self, plan: AdapterPlan, module: str, shape: tuple[int, int], current: Tensor) -> bool:
        """Return whether the model stores the weight as (inputs, outputs)."""
        if self._modules is not None:
            return module in self._modules.transposed or any(
                name.endswith(f".{module}") for name in self._modules.transposed
            )
        return plan.transposed or (shape[0] != shape[1] and tuple(current.shape) == (shape[1], shape[0]))


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
