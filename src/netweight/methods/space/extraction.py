"""Extracting a LoRA from a model and its fine-tune: the best low-rank changes of the matrices that training changed.

What cannot be in the LoRA (norms, added tokens, packed experts outside of peft's layout) and embeddings that were not
chosen are left out by name, with the reason, and
the error is over everything that changed, what was left out included.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, final

import torch

from netweight.core.names import Select, nearest_names
from netweight.core.progress import QUIET, Progress
from netweight.errors import UsageError
from netweight.hf.model_modules import ModelModules, model_modules
from netweight.methods.space.lora_files import NamedModel, checked_modules, named_model
from netweight.methods.space.settings import ExtractSettings
from netweight.nn.lora import Adapter, LowRank
from netweight.store.lora_formats.base_weights import CONV1D, BaseWeights
from netweight.store.lora_formats.identify import component_of
from netweight.store.lora_formats.parts import Layout, take_rows
from netweight.store.lora_formats.scales import scaled_up
from netweight.store.lora_formats.targets import EMBEDDING, expert_name
from netweight.store.lora_formats.writing import ExportResult, write_exported

if TYPE_CHECKING:
    from torch import Tensor

    from netweight.store.lora_formats.naming import Piece

_EMBEDDING = re.compile(
    r"(^|.*[._])(embed|embedding|embeddings|embed_tokens|tokens|wte|wpe|shared|relative_attention_bias"
    r"|position_embedding|token_embedding)"
)
# This is an embedding of distances, not of tokens.
_POSITION = re.compile(r"relative_attention_bias$")
_HEAD = re.compile(r"(^|.*\.)(lm_head|embed_out|output_projection)")
# The base must have at least this share of the tuned model's matrices under the same names.
_LEAST_SHARED = 0.5


@final
@dataclass(frozen=True)
class _Change:
    """One parameter's change."""

    module: str
    """The module, called as adapters call it."""
    change: Tensor
    """Rows × columns, fp32."""
    kernel: tuple[int, ...]
    """Sides of a convolution's kernel."""
    dtype: torch.dtype
    """The tuned model's."""
    pieces: tuple[Piece, ...] = ()
    """The modules of diffusers that a module fused by the model's authors combines."""


def extract_files(
    base: Path, tuned: Path, path: Path, how: ExtractSettings, *, overwrite: bool, progress: Progress = QUIET
) -> ExportResult:
    """Write what training changed from one model to another as a LoRA.

    Args:
        base: The model before: a file in the names of diffusers, transformers or its authors; a model's folder; or a
            pipeline's.
        tuned: The model after, likewise; its naming may be another one.
        path: The file or folder to write.
        how: Rank, modules, data type, alpha and layout.
        overwrite: Whether files may be replaced.
        progress: Where the work is shown.

    Returns:
        What was written: how many of the changed tensors are in it, what was left out and why, and the error over all.

    Raises:
        UsageError: The models are of different kinds, or nothing changed.
        Unsupported: A model is stored as codes other than fp8 with scales.
    """
    model = named_model(how.model)
    modules = model.modules or _modules(base) or _modules(tuned)
    conversions = {} if modules is None else modules.conversions
    with (
        BaseWeights(base, naming=model.naming, conversions=conversions) as before,
        BaseWeights(tuned, naming=model.naming, conversions=conversions) as after,
    ):
        layout = how.layout or _layout(after, path)
        task = _Extraction(before, after, modules, how, layout)
        adapter, kernels = task.run(progress)
        transposed = any(task.is_transposed(name) for name in adapter.factors)
        checked_modules(adapter, NamedModel(modules=modules))
        changed = Adapter(adapter.factors, adapter.vectors)
        written = write_exported(
            changed, path, error=task.error(adapter), layout=layout, overwrite=overwrite, kernels=kernels,
            base=how.base or str(base), naming=after.naming or before.naming, transposed=transposed,
            parameters=None if modules is None else tuple(modules.parameters),
        )  # fmt: skip
    left_out = {**task.left_out, **written.left_out}
    remarks = [f"Architecture: {after.naming.title}."] if after.naming else []
    if task.uncovered:
        remarks.append(
            f"The error does not cover {len(task.uncovered)} tensors that only one of the models has: "
            f"{', '.join(task.uncovered[:3])}{' and others' if len(task.uncovered) > 3 else ''}."
        )
    for place, weights in ((base, before), (tuned, after)):
        if narrow := sum(places[0].info.dtype.startswith("F8_") for places in weights.places.values()):
            remarks.append(f"{narrow} weights of {place} are stored in fp8, whose rounding is part of the change.")
    if modules is None:
        remarks.append(
            "There is no config beside the weights, so modules were not checked against the model's own names."
        )
    count = task.changed
    return replace(written, changed=count, modules=task.taken, left_out=left_out, remarks=(*remarks, *written.remarks))


class _Extraction:
    """The comparison of two models, with what was left out."""

    def __init__(
        self,
        before: BaseWeights,
        after: BaseWeights,
        modules: ModelModules | None,
        how: ExtractSettings,
        layout: Layout,
    ) -> None:
        self._before, self._after, self._modules, self._how, self._layout = before, after, modules, how, layout
        self.left_out: dict[str, str] = {}
        self.uncovered: list[str] = []
        self.changed = self.taken = 0
        self._whole = self._lost = 0.0
        self._fused = layout in ("kohya", "comfyui") and after.authors and before.authors
        self._conv1d = modules is None and after.stores_inputs_first
        candidates = [name.rpartition(".")[0] for name, places in after.places.items() if len(places[0].info.shape) > 1]
        chosen = None if how.modules is None else Select(how.modules).keys(list(dict.fromkeys(candidates)))
        self._chosen = None if chosen is None else set(chosen)

    def run(self, progress: Progress) -> tuple[Adapter, dict[str, tuple[int, ...]]]:
        """Compare all parameters and return the adapter and the kernels of its convolutions."""
        self._check_names()
        factors: dict[str, LowRank] = {}
        vectors: dict[str, Tensor] = {}
        kernels: dict[str, tuple[int, ...]] = {}
        for each in self._changes(vectors, progress):
            self.taken += 1
            self._whole += float(each.change.double().square().sum())
            if each.pieces:
                leading = self._kept(each, each.change)
                for piece in each.pieces:
                    rows = LowRank(leading.down, take_rows(leading.up, piece.rows), leading.scale)
                    factors[piece.module.removesuffix(".weight")] = rows
            else:
                factors[each.module] = self._kept(each, each.change)
                if each.kernel:
                    kernels[each.module] = each.kernel
        if not factors:
            why = f": {next(iter(self.left_out.values()))}" if self.left_out else ", or the two are the same"
            raise UsageError(
                f"No matrix that a LoRA could change differs between {self._before.path} and {self._after.path}{why}.",
                cure="Name a model and its fine-tune; or choose other modules (--modules).",
            )
        return Adapter(factors, vectors), kernels

    def error(self, adapter: Adapter) -> float:
        """Norm of everything that changed and is not in the adapter, divided by the norm of everything that changed."""
        return math.sqrt(self._lost / self._whole) if self._whole else 0.0

    def is_transposed(self, module: str) -> bool:
        """Return whether the model stores a module's weight as (inputs, outputs)."""
        if self._modules is not None:
            return module in self._modules.transposed
        return self._conv1d and CONV1D.fullmatch(module) is not None

    def _check_names(self) -> None:
        """Refuse models whose names do not agree; list tensors that only one of them has."""
        before, after = self._before.places, self._after.places
        only = [name for name in after if name not in before]
        matrices = [name for name in after if len(after[name][0].info.shape) >= 2]
        lacking = [name for name in only if len(after[name][0].info.shape) >= 2]
        if len(lacking) > _LEAST_SHARED * len(matrices) or (lacking and len(lacking) == len(matrices)):
            near = nearest_names(lacking[0], before, 1)[0] if before else "none"
            raise UsageError(
                f"{self._after.path} has {len(lacking)} of {len(matrices)} matrices under names that "
                f"{self._before.path} lacks, such as {lacking[0]}; the nearest there is {near}.",
                cure="Name two models of one kind, or give the architecture of single files (--model NAME).",
            )
        missing = [name for name in before if name not in after and len(before[name][0].info.shape) >= 2]
        if lacking and missing:
            raise UsageError(
                f"{self._before.path} contains {missing[0]}, and {self._after.path} contains {lacking[0]}; each is "
                f"missing in the other. Names differ for {max(len(lacking), len(missing))} of {len(matrices)} "
                "matrices.",
                cure="Save both models with the same library, so that they have the same names.",
            )
        for name in only:
            self.left_out[name] = "the base has no such tensor"
            self.uncovered.append(name)
        present = {component_of(name)[0] for name in after}
        for name in before:
            if name not in after and component_of(name)[0] in present and not self._is_tied(name):
                self.left_out[name] = "the tuned model has no such tensor"
                self.uncovered.append(name)

    def _is_tied(self, name: str) -> bool:
        """Return whether a parameter is another one's memory, so that files need not have it."""
        return self._modules is not None and name in self._modules.tied

    def _changes(self, vectors: dict[str, Tensor], progress: Progress) -> Iterator[_Change]:
        """Read both models parameter by parameter, or, for fused modules, tensor by tensor."""
        names = [name for name in self._after.places if name in self._before.places]
        fused: dict[str, str] = {}
        if self._fused:
            for whole, (_, pieces) in self._after.tensors.items():
                if len(pieces) > 1 and whole in self._before.tensors:
                    fused |= {piece.module: whole for piece in pieces}
        done: set[str] = set()
        for name in progress.track(names, "Comparing tensors", len(names), unit="tensors"):
            if (tensor := fused.get(name)) is not None and name.endswith(".weight"):
                if tensor not in done:
                    done.add(tensor)
                    yield from self._of_fused(tensor)
                continue
            yield from self._of_parameter(name, vectors)

    def _of_fused(self, tensor: str) -> Iterator[_Change]:
        store, pieces = self._after.tensors[tensor]
        change = self._difference(tensor, self._before.read(tensor), self._after.read(tensor))
        if change is None:
            return
        module = pieces[0].module.removesuffix(".weight")
        if self._unwanted(module, tensor, change):
            return
        dtype = self._dtype(store.get_slice(tensor.rpartition("/")[2], slice(0, 1)).dtype)
        yield _Change(module, change, (), dtype, pieces)

    def _of_parameter(self, name: str, vectors: dict[str, Tensor]) -> Iterator[_Change]:
        module, _, kind = name.rpartition(".")
        after = self._after.parameter(name)
        change = self._difference(name, self._before.parameter(name), after)
        if change is None:
            return
        if reason := self._reason(name, module, kind, change):
            self._leave_out(name, reason, change)
            return
        if change.ndim < 2:
            if self._unwanted(module, name, change):
                return
            vectors[name] = change
            self.taken += 1
            self._whole += float(change.double().square().sum())
            return
        if self._unwanted(module, name, change):
            return
        if self._is_packed(name):
            yield from self._of_experts(name, change, self._dtype(after.dtype))
            return
        if self._is_own_embedding(name, module):
            yield _Change(module + EMBEDDING, change, (), self._dtype(after.dtype))
            return
        if self._is_own_parameter(name, module):
            yield _Change(expert_name(name, 0, 1), change, (), self._dtype(after.dtype))
            return
        kernel = tuple(change.shape[2:])
        change = change.T if self.is_transposed(module) else change.flatten(1)
        yield _Change(module, change, kernel, self._dtype(after.dtype))

    def _of_experts(self, name: str, change: Tensor, dtype: torch.dtype) -> Iterator[_Change]:
        """The experts of a packed parameter that changed, one by one."""
        # The modules say which parameters are packed.
        assert self._modules is not None
        numbers = [number for number, one in enumerate(change) if one.any()]
        self.changed += len(numbers) - 1
        for number in numbers:
            one = change[number].T if self._modules.packed[name] else change[number]
            yield _Change(expert_name(name, number, len(change)), one, (), dtype)

    def _is_packed(self, name: str) -> bool:
        """Return True if a parameter contains experts that peft's layout can store."""
        return self._layout == "peft" and self._modules is not None and name in self._modules.packed

    def _is_own_parameter(self, name: str, module: str) -> bool:
        """Return True if a matrix belongs to a module that is not a linear layer, such as a router of experts."""
        if self._layout != "peft" or self._modules is None or module in self._modules.shapes:
            return False
        return len(self._modules.parameters.get(name, ())) == 2 and not self._is_embedding(name)

    def _is_own_embedding(self, name: str, module: str) -> bool:
        """Return True if an embedding belongs in the LoRA: attention's own, such as T5's, or a chosen one."""
        if self._layout != "peft" or not self._is_embedding(name) or not name.endswith(".weight"):
            return False
        return _POSITION.search(module) is not None or (self._chosen is not None and module in self._chosen)

    def _difference(self, name: str, before: Tensor, after: Tensor) -> Tensor | None:
        """Return the change, or None without one; added rows are left out and listed."""
        if before.shape != after.shape:
            rows = min(len(before), len(after)) if before.ndim and after.ndim else 0
            grown = before.shape[1:] == after.shape[1:] and (
                _EMBEDDING.search(name.removesuffix(".weight")) or _HEAD.search(name) or self._is_embedding(name)
            )
            if not grown:
                raise UsageError(
                    f"{name} has shape {tuple(before.shape)} in {self._before.path} and {tuple(after.shape)} in "
                    f"{self._after.path}.",
                    cure="Name two models of one kind; or leave the module out (--modules '!PATTERN').",
                )
            if len(after) > rows:
                self.left_out[f"{name}[{rows}:{len(after)}]"] = "rows of tokens that were added to the tuned model"
                self.uncovered.append(f"{name}[{rows}:{len(after)}]")
                self.changed += 1
            before, after = before[:rows], after[:rows]
        change = after.float() - before.float()
        if not change.isfinite().all():
            raise UsageError(f"The change of {name} contains NaN or infinity.", cure="Save the tuned model again.")
        if not change.any():
            return None
        self.changed += 1
        return change

    def _is_embedding(self, name: str) -> bool:
        return self._modules is not None and name.removesuffix(".weight") in self._modules.embeddings

    def _reason(self, name: str, module: str, kind: str, change: Tensor) -> str | None:
        """Return why a change cannot be in the LoRA; None where it can."""
        if self._modules is None:
            embeds = _EMBEDDING.fullmatch(module) is not None
        else:
            embeds = module in self._modules.embeddings
        if embeds and not self._is_own_embedding(name, module):
            peft = self._layout == "peft" and self._modules is not None
            chosen = "; --modules with its name would include it" if peft else ""
            return f"an embedding, which no linear LoRA changes{chosen}"
        if self._modules is not None and {module, module.rpartition(".")[0]} & self._modules.attentions:
            return "a part of torch's MultiheadAttention, which peft gives another name"
        if embeds or self._is_packed(name) or (change.ndim == 2 and self._is_own_parameter(name, module)):
            return None
        if change.ndim < 2:
            if kind != "bias" or self._layout == "peft":
                return "a norm or another vector" if kind != "bias" else "a bias, which peft's LoRA cannot store"
            beside = f"{module}.weight"
            if beside not in self._after.places or len(self._after.places[beside][0].info.shape) < 2:
                return "a norm or another vector"
            return None
        if self._modules is not None and module not in self._modules.shapes:
            packed = name in self._modules.packed
            if packed:
                return "experts packed into one tensor, which only peft's layout can store"
            return "not the weight of a linear layer or convolution"
        if kind != "weight" or (self._modules is None and change.ndim == 3 and "conv" not in name):
            return "experts packed into one tensor" if change.ndim == 3 else "not the weight of a module"
        return None

    def _unwanted(self, module: str, name: str, change: Tensor) -> bool:
        if self._chosen is None or module in self._chosen:
            return False
        self._leave_out(name, "not chosen by --modules", change)
        return True

    def _leave_out(self, name: str, reason: str, change: Tensor) -> None:
        square = float(change.double().square().sum())
        self.left_out[name] = reason
        self._whole += square
        self._lost += square

    def _dtype(self, dtype: torch.dtype) -> torch.dtype:
        if self._how.dtype is not None:
            return {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[self._how.dtype]
        return dtype if dtype in (torch.float16, torch.bfloat16) else torch.float32

    def _kept(self, each: _Change, change: Tensor) -> LowRank:
        """The leading components, in the data type and with the alpha that are wanted."""
        how = self._how
        full = min(change.shape)
        factors, lost = LowRank.of(change).truncated(full if how.rank is None else how.rank, how.energy)
        self._lost += lost
        if how.alpha is not None:
            scale = how.alpha / factors.rank
            factors = LowRank(factors.down, scaled_up(factors.up, factors.scale / scale).to(factors.up.dtype), scale)
        rounded = LowRank(factors.down.to(each.dtype), factors.up.to(each.dtype), factors.scale)
        if each.dtype != torch.float32:
            exact, near = factors, LowRank(rounded.down.float(), rounded.up.float(), rounded.scale)
            self._lost += max(0.0, exact.inner(exact) + near.inner(near) - 2 * exact.inner(near))
        return rounded


def _layout(after: BaseWeights, path: Path) -> Layout:
    """The layout of the program that reads the model: ComfyUI for the authors' names, else diffusers or peft."""
    if after.authors:
        return "comfyui" if path.suffix == ".safetensors" or after.naming is None else "diffusers"
    return "diffusers" if all(component_of(name)[0] for name in after.places) else "peft"


def _modules(path: Path) -> ModelModules | None:
    """The modules of a folder's model, where its config is at hand."""
    return model_modules(path) if path.is_dir() else None
