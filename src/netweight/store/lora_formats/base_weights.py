"""The weights of a model's files under the names that adapters use for its modules.

A file may be in the names of diffusers, of transformers, or of the model's authors (a single file as ComfyUI loads it);
a pipeline is a folder with a folder for each component. Modules that the authors fused are found by their rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, final

from netweight.core.bounded_json import read_object
from netweight.core.weight_endings import PICKLES
from netweight.errors import NameNotFound
from netweight.store.lora_formats.identify import COMPONENTS, DENOISERS, component_of, identify
from netweight.store.lora_formats.model_names import other_spellings
from netweight.store.lora_formats.naming import Naming, Piece, namings
from netweight.store.lora_formats.quantized import dequantized, is_scale, refuse_codes
from netweight.store.reader import INDEX_SUFFIX, Store, TensorInfo, open_store

if TYPE_CHECKING:
    from torch import Tensor

# Where single files keep other components than the denoiser, and what these are called in a pipeline.
_WITHIN = (
    ("cond_stage_model.transformer.", "text_encoder"), ("conditioner.embedders.0.transformer.", "text_encoder"),
    ("text_encoders.clip_l.transformer.", "text_encoder"), ("text_encoders.clip_g.transformer.", "text_encoder_2"),
    ("text_encoders.t5xxl.transformer.", "text_encoder_3"), ("first_stage_model.", "vae"), ("vae.", "vae"),
)  # fmt: skip
_DENOISER = "model.diffusion_model."
# GPT-2's Conv1D stores (inputs, outputs); these names are known where no config says so.
CONV1D = re.compile(r"(^|.*\.)h\.\d+\.(attn|crossattention|mlp)\.(c_attn|q_attn|c_proj|c_fc)")
_WIDER = re.compile(r"(.*\.)?h\.\d+\.(attn\.c_attn|mlp\.c_fc)\.weight")
_PARAMETER = re.compile(r"(?P<module>.+)\.(?P<kind>weight|bias)")


@final
@dataclass(frozen=True)
class Place:
    """Position of a parameter."""

    store: Store
    """The file that contains the weight."""
    tensor: str
    """The tensor's name."""
    rows: tuple[tuple[int, int], ...] = ()
    """Ranges of rows that are the parameter's, in order; empty for all."""

    @property
    def info(self) -> TensorInfo:
        """Description of the tensor, which is not read."""
        return self.store.info(self.tensor)


class Conversions(Protocol):
    """Protocol of mappings from tensors of files to parameters; `hf.model_modules.Checkpoint` is one."""

    def names(self, tensors: Iterable[str]) -> dict[str, str]:
        """Tensor's name in the files → the parameter that it is, or is a part of."""

    def assemble(self, parameter: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """Make a parameter of its tensors."""


@final
class BaseWeights:
    """The weights of a model's files: a file, a model's folder, or a pipeline with a folder for each component.

    Args:
        path: The file or folder.
        naming: The table of names to take, whatever the file looks like.
        conversions: Component, or nothing for a plain model → how transformers names what it loads.
    """

    def __init__(
        self, path: Path, *, naming: Naming | None = None, conversions: Mapping[str, Conversions] | None = None
    ) -> None:
        self.path = path
        self.naming = naming
        self._conversions = dict(conversions or {})
        self._stack = ExitStack()
        self.places: dict[str, list[Place]] = {}
        """Parameter, with its component → its place in the files; several places if it consists of several tensors."""
        self.tensors: dict[str, tuple[Store, tuple[Piece, ...]]] = {}
        """Tensor's name in the files, with the component's folder → its file, and the parameters that it contains."""
        self.authors = False
        """True if the denoiser is in its authors' names."""
        self._names: dict[int, set[str]] = {}

    def __enter__(self) -> Self:
        """Open the files and find the names."""
        folders = [self.path / name for name in COMPONENTS if (self.path / name).is_dir()] if self.path.is_dir() else []
        for folder in folders:
            if any(folder.glob("*.safetensors")):
                self._add(folder, folder.name)
        if not folders:
            self._add(self.path, None)
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        self._stack.close()

    def weight(self, module: str) -> Tensor:
        """Read a module's weight.

        Raises:
            NameNotFound: The files hold no such weight, or several whose names end so.
        """
        return self.parameter(self.find(f"{module}.weight"))

    def find(self, name: str) -> str:
        """The full name of a parameter, which may be given with or without the component or a wrapper's prefix."""
        if name in self.places:
            return name
        component, rest = component_of(name)
        ends = [name, rest] if component else [name]
        places = [each for end in ends for each in self.places if each == end]
        places = places or [each for end in ends for each in self.places if each.endswith(f".{end}")]
        if not places:
            others = [*other_spellings(rest), *_with_or_without_wrapper(component, rest)]
            places = [each for each in others if each in self.places]
        if len(set(places)) != 1:
            shown = name.removesuffix(".weight")
            raise NameNotFound(
                f"{self.path} contains {len(places) or 'no'} weight{'s' if places else ''} of {shown}.",
                cure="Name the base model that it was trained on, as diffusers, transformers or ComfyUI keep it.",
            )
        return places[0]

    @cached_property
    def stores_inputs_first(self) -> bool:
        """True if GPT-2's layers are stored as (inputs, outputs), by the shapes of those that are not square."""
        for name, places in self.places.items():
            if _WIDER.fullmatch(name) and len(places[0].info.shape) == 2:
                return places[0].info.shape[0] < places[0].info.shape[1]
        return False

    def tensor_called(self, name: str) -> str | None:
        """The one tensor of the files that has this name, or one that ends in it; None if there is none."""
        ends = [tensor for tensor in self.tensors if tensor == name or tensor.endswith(f".{name}")]
        return ends[0] if len(ends) == 1 else None

    def parameter(self, name: str) -> Tensor:
        """Read a parameter as the values that it means; fp8 with scales becomes fp32."""
        import torch

        places = self.places[name]
        component, own = component_of(name)
        conversion = self._conversions.get(component)
        if conversion is not None and len(places) > 1:
            read = {each.tensor: dequantized(each.store, each.tensor, self._names[id(each.store)]) for each in places}
            return conversion.assemble(own, read)
        pieces = []
        for place in places:
            whole = dequantized(place.store, place.tensor, self._names[id(place.store)])
            pieces += [whole[start:stop] for start, stop in place.rows] if place.rows else [whole]
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def blocks(self, parameter: str) -> dict[str, tuple[int, int]] | None:
        """Find where the tensors of files lie in a parameter that several of them make up, such as one expert each.

        Args:
            parameter: The parameter, with its component.

        Returns:
            Tensor → expert, and number of the block of rows that it is there; None where tensors are no such blocks.
        """
        import torch

        component, own = component_of(parameter)
        conversion = self._conversions.get(component)
        names = [place.tensor for place in self.places[parameter]]
        if conversion is None:
            return None
        # Small tensors of numbers that occur once are assembled as the large ones would be.
        probes = {name: torch.arange(6.0).view(2, 3) + 6 * number for number, name in enumerate(names)}
        try:
            whole = conversion.assemble(own, probes)
        except (RuntimeError, ValueError, IndexError):
            return None
        if whole.ndim != 3 or whole.numel() != 6 * len(names) or whole.shape[1] % 2 or whole.shape[2] != 3:
            return None
        experts: dict[str, tuple[int, int]] = {}
        for expert, matrix in enumerate(whole):
            for block, rows in enumerate(matrix.split(2)):
                name = names[int(rows[0, 0]) // 6]
                if not torch.equal(rows, probes[name]):
                    return None
                experts[name] = expert, block
        return experts if len(experts) == len(names) else None

    def read(self, tensor: str) -> Tensor:
        """Read a tensor of the files as the values that it means."""
        store, _ = self.tensors[tensor]
        name = tensor.rpartition("/")[2]
        return dequantized(store, name, self._names[id(store)])

    def _add(self, path: Path, component: str | None) -> None:
        store = self._stack.enter_context(open_weights(path))
        refuse_codes(path, store)
        names = [name for name in store.names() if not is_scale(name)]
        self._names[id(store)] = set(store.names())
        pieces = self._pieces(store, names, path, component)
        for name in names:
            self.tensors[f"{component}/{name}" if component else name] = store, pieces[name]
            for piece in pieces[name]:
                self.places.setdefault(piece.module, []).append(Place(store, name, piece.rows))

    def _pieces(
        self, store: Store, names: list[str], path: Path, component: str | None
    ) -> dict[str, tuple[Piece, ...]]:
        """The parameters that each tensor holds."""
        config = _config(path)
        if "_class_name" in config or component in DENOISERS:
            cls = config.get("_class_name")
            self.naming = self.naming or next((each for each in namings() if each.cls == cls and cls), None)
            own = component or ("unet" if str(cls).startswith("UNet") else "transformer")
            return {name: (Piece(f"{own}.{name}"),) for name in names}
        conversion = self._conversions.get(component or "")
        renamed = {} if conversion is None else conversion.names(names)
        if component is not None:
            return {name: (Piece(f"{component}.{renamed.get(name, name)}"),) for name in names}
        if "model_type" in config or renamed:
            return {name: (Piece(renamed.get(name, name)),) for name in names}
        return self._told(store, names, path)

    def _told(self, store: Store, names: list[str], path: Path) -> dict[str, tuple[Piece, ...]]:
        """Tell names of a file that says nothing of its architecture."""
        whole = [name for name in names if name.startswith(_DENOISER)]
        within = {name: f"{part}.{name.removeprefix(start)}" for start, part in _WITHIN for name in names
                  if name.startswith(start)}  # fmt: skip
        denoiser = whole or [name for name in names if name not in within]
        shapes: dict[str, tuple[int, int]] = {}
        for name in denoiser:
            match, shape = _PARAMETER.fullmatch(name), store.info(name).shape
            if match and match["kind"] == "weight" and len(shape) >= 2:
                columns = 1
                for side in shape[1:]:
                    columns *= side
                shapes[match["module"]] = (shape[0], columns)
        # A module that is not in the table keeps its name; what such a name is called matters to nobody else.
        identity = identify(shapes, path, naming=self.naming, whole_model=True) if shapes else None
        self.naming = self.naming or (identity.naming if identity else None)
        self.authors = bool(identity and identity.spelling == "comfyui")
        pieces: dict[str, tuple[Piece, ...]] = {}
        for name in names:
            match = _PARAMETER.fullmatch(name)
            if name in within and name not in denoiser:
                pieces[name] = (Piece(within[name]),)
            elif identity and match and match["module"] in identity.pieces:
                own = identity.pieces[match["module"]]
                pieces[name] = tuple(Piece(f"{each.module}.{match['kind']}", each.rows) for each in own)
            else:
                pieces[name] = (Piece(name),)
        return pieces


def _with_or_without_wrapper(component: str, name: str) -> list[str]:
    """The other spelling of a text encoder's parameter: releases of transformers write `text_model` or leave it out."""
    if not component.startswith("text_encoder"):
        return []
    wrapped = name.startswith("text_model.")
    return [f"{component}.{name.removeprefix('text_model.')}" if wrapped else f"{component}.text_model.{name}"]


def open_weights(path: Path) -> Store:
    """Open a model's weights as its library loads them: of several sets in a folder, the one of no variant.

    Args:
        path: A file, or a folder of transformers or of a pipeline's component.

    Returns:
        The tensors.
    """
    for name in ("diffusion_pytorch_model", "model"):
        for ending in (".safetensors", INDEX_SUFFIX):
            if (path / f"{name}{ending}").is_file():
                return open_store(path / f"{name}{ending}")
    if path.is_dir() and not any(path.glob("*.safetensors")):
        for file in sorted(path.iterdir()):
            if file.suffix.lower() in PICKLES:
                # The error of the reader names the cure.
                return open_store(file)
    return open_store(path)


def _config(path: Path) -> dict[str, Any]:
    """The config beside a model's weights, if there is one."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    if path.is_file() and path.name not in ("model.safetensors", "diffusion_pytorch_model.safetensors"):
        return {}
    return read_object(file) if file.is_file() else {}
