"""Reading adapters: a plan of the files' content from headers and settings (`plan_adapter`), and the factors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, final

from netweight.core.weight_endings import PICKLES
from netweight.errors import CorruptBlob, NameNotFound, Unsupported, UsageError
from netweight.nn.lora import Adapter, LowRank
from netweight.store.lora_formats import metadata as headers
from netweight.store.lora_formats import mlx
from netweight.store.lora_formats import peft_settings as peft
from netweight.store.lora_formats.base_weights import BaseWeights
from netweight.store.lora_formats.identify import COMPONENTS, Identity, identify, written_as_usual
from netweight.store.lora_formats.model_names import ModelNames
from netweight.store.lora_formats.naming import Naming, Piece
from netweight.store.lora_formats.other_kinds import BAKE, EXTRACT, ChangeStructure, Conversion, refuse_kinds
from netweight.store.lora_formats.parts import (
    AdapterPart,
    AdapterPlan,
    VectorPart,
    load_part,
    plan_part,
    refuse_pickle,
    structure_of,
    take_rows,
    with_rows,
)
from netweight.store.lora_formats.targets import (
    EMBEDDING,
    expert_name,
    expert_of,
    in_order,
    module_of,
    nested_names,
    targeted,
)
from netweight.store.lora_formats.tensor_names import Role, take_all_apart, take_apart
from netweight.store.reader import Store, open_store

if TYPE_CHECKING:
    from torch import Tensor

# The ending of the base model's own weight in a module that has an adapter.
_OF_THE_BASE = ".base_layer.weight"
# What a tensor that is not a matrix changes → the parameter's name after its module.
_VECTORS = {"diff_b": "bias", "b_norm": "bias", "up_bias": "bias", "diff": "weight", "w_norm": "weight",
            "diff_m": "modulation"}  # fmt: skip


def plan_adapter(
    path: str | Path,
    model: ModelNames | None = None,
    conversion: Conversion | None = None,
    naming: Naming | None = None,
) -> AdapterPlan:
    """Find out what an adapter's files hold, from their headers.

    Args:
        path: A `.safetensors` file, a folder with one, or a folder of peft, or with one such folder per component.
        model: The model's names: all modules must be among them, and flattened names are looked up in them.
        conversion: How LoHa, LoKr, DoRA and differences become LoRAs; by default they are refused.
        naming: The architecture's table, whatever the file looks like.

    Returns:
        The plan: modules are called as in diffusers, with components, where a table knows them.

    Raises:
        UsageError: There is no adapter, its rank is 0, or it may be of several architectures.
        NameNotFound: The model has no such module.
        Unsupported: It is of a kind that is to be converted, or no adapter.
        UnsafeInput: It is a pickle.
        CorruptBlob: A file is damaged, incomplete or contradicts itself.
    """
    plan = replace(_Planner(model, conversion, naming).plan(Path(path)), conversion=conversion)
    if model is None:
        return plan
    return replace(plan, parts={_own(model, name, plan.path): part for name, part in plan.parts.items()})


def read_adapter(path: str | Path, *, modules: Iterable[str] | None = None, architecture: str | None = None) -> Adapter:
    """Read one adapter.

    Args:
        path: A `.safetensors` file of any trainer whose names are known, or with the names of diffusers; or a folder
            with one; or a folder of peft (`adapter_model.safetensors` and `adapter_config.json`), or with one such
            folder per component.
        modules: Names of the model's modules, with components: then an adapter of others is refused, names in kohya's
            layout may have any structure, and text encoders are called as in the model, with or without `text_model`.
        architecture: The name of its table of names (`flux`, `wan`, …), where the file does not tell it.

    Returns:
        The adapter: factors as stored, with their exact scale. Modules of known architectures are called as diffusers
        calls them, with the component in front; modules that the authors fused are split.

    Raises:
        UsageError: There is no adapter, its rank is 0, it contains NaN or infinity, or may be of several architectures.
        NameNotFound: The model has no such module.
        Unsupported: It is not a LoRA of linear layers and convolutions (DoRA, LoHa, LoKr, biases and so on).
        UnsafeInput: It is a pickle.
        CorruptBlob: A file is damaged, incomplete or contradicts itself.
    """
    from netweight.store.lora_formats.naming import naming_called

    naming = None if architecture is None else naming_called(architecture)
    plan = plan_adapter(path, None if modules is None else ModelNames(modules), naming=naming)
    refuse_vectors(plan)
    return load_plan(plan)


def refuse_vectors(plan: AdapterPlan) -> None:
    """Refuse changes of biases, norms and other vectors, which low-rank factors do not express."""
    if plan.vectors:
        first = next(iter(plan.vectors))
        raise Unsupported(
            f"{plan.path} changes {len(plan.vectors)} biases or other vectors, which have no low rank, such as "
            f"{first} (tensor {plan.vectors[first].tensor!r}).",
            cure="Keep the file as it is: netweight space convert and netweight space merge keep these changes.",
        )


def load_plan(plan: AdapterPlan) -> Adapter:
    """Read the adapter that was planned."""
    return load_converted(plan).adapter


@final
class LoadedAdapter(NamedTuple):
    """An adapter as it was read, and the error of its conversion."""

    adapter: Adapter
    """The adapter."""
    relative_error: float
    """Norm of what the conversion to LoRA lost, divided by the norm of the whole; 0 for a plain LoRA."""


def load_converted(plan: AdapterPlan) -> LoadedAdapter:
    """Read the adapter that was planned, and the error of an adapter that is not a plain LoRA."""
    factors: dict[str, LowRank] = {}
    lost = 0.0
    weights = None if plan.conversion is None else plan.conversion.weights
    with ExitStack() as stack:
        base = None
        if weights is not None and any(part.converts for part in plan.parts.values()):
            base = stack.enter_context(BaseWeights(weights, naming=plan.naming))
        for file in dict.fromkeys(part.file for part in plan.parts.values()):
            with open_store(file) as store:
                for name, part in plan.parts.items():
                    if part.file == file:
                        factors[name], left_out = load_part(store, name, part, base, transposed=plan.transposed)
                        refuse_not_finite(file, name, factors[name])
                        lost += left_out
    adapter = Adapter(dict(sorted(factors.items())), _vectors(plan))
    return LoadedAdapter(adapter, math.sqrt(lost / (lost + adapter.norm() ** 2)) if lost else 0.0)


def _vectors(plan: AdapterPlan) -> dict[str, Tensor]:
    vectors = {}
    for name, part in sorted(plan.vectors.items()):
        with open_store(part.file) as store:
            change = take_rows(store.get(part.tensor), part.rows)
            vectors[name] = change if part.scale == 1 else change.double().mul(part.scale).to(change.dtype)
    return vectors


@final
@dataclass(frozen=True)
class _Planner:
    """Planner of adapters, of whatever program wrote them."""

    model: ModelNames | None
    """Names of the model that the adapter is for; None if they are not known."""
    conversion: Conversion | None
    """Conversion of other kinds of adapters to LoRAs; None refuses them."""
    naming: Naming | None
    """Table of names of the architecture; None determines it from the file."""

    def plan(self, path: Path) -> AdapterPlan:
        """Plan a file, or a folder with one file, of peft, of mlx-lm, or with a folder of peft per component."""
        if path.is_file():
            refuse_pickle(path)
            planned = {peft.WEIGHTS: self._peft, mlx.WEIGHTS: self._mlx}.get(path.name)
            return self._file(path, path) if planned is None else planned(path)
        if not path.is_dir():
            raise UsageError(f"There is no file or folder {path}.", cure="Check the path.")
        if (path / mlx.WEIGHTS).is_file() and not (path / peft.WEIGHTS).is_file():
            return self._mlx(path / mlx.WEIGHTS)
        if (path / peft.CONFIG).is_file() or (path / peft.WEIGHTS).is_file():
            return self._peft(_peft_weights(path))
        parts = [path / name for name in COMPONENTS if (path / name / peft.CONFIG).is_file()]
        if parts:
            return _joined(path, [self._peft(_peft_weights(folder)) for folder in parts])
        return self._file(_only_file(path), path)

    def _file(self, file: Path, path: Path) -> AdapterPlan:
        """Plan a file that states its scales itself."""
        with open_store(file) as store:
            names = store.names()
            if not names:
                raise UsageError(f"{file} contains no tensor.", cure="Leave it out.")
            header = store.files[0].metadata
            located, remarks, kohya_ends = _locate(file, store, names, self.conversion)
            if turned := next((roles for roles in located.values() if "lora_a" in roles), None):
                raise UsageError(
                    f"{file}: {turned['lora_a']} is a factor in the layout of mlx-lm, whose scale is in {peft.CONFIG}.",
                    cure=f"Rename the file to {mlx.WEIGHTS}, and put it beside {peft.CONFIG}.",
                )
            modules = _modules(file, store, located)
            identity = identify(
                {name: module.shape for name, module in modules.items()},
                file,
                notes=header,
                naming=self.naming,
                model=self.model,
            )
            # Some trainers write peft's prefix into files of scale 1; their tables say so.
            usual = identity.naming is not None and written_as_usual(identity.naming, list(located))
            without_scale = identity.spelling != "comfyui" and not usual
            if without_scale and any(name.startswith(peft.PREFIX) for name in names):
                raise UsageError(
                    f"{file} is in peft's layout, but is not called {peft.WEIGHTS}, so its scale is not known.",
                    cure=f"Put it in a folder under that name, beside its {peft.CONFIG}.",
                )
            settings = peft.settings_said(header, file, self.conversion)
            has_alphas = any("alpha" in roles for roles in located.values())
            network = None if has_alphas or settings else headers.network_alpha(header, file)
            scales = _Scales(file, store, settings, network, header)
            parts, vectors = _parts(file, modules, identity, scales, self.conversion)
            bases = {one.base for one in settings.values() if one.base}
            layout = identity.spelling if identity.spelling != "peft" else "diffusers"
            if vectors:
                remarks.append(
                    f"{len(vectors)} changes of biases, norms or other vectors, such as {next(iter(vectors))}, are "
                    "carried along as they are."
                )
            bare = {name for name, module in modules.items() if module.vectors.keys() == module.roles.keys()}
            noted = headers.number(header, "ss_network_alpha"), headers.number(header, "ss_network_dim")
            if all(noted) and noted[0] != noted[1] and not (has_alphas or settings or network):
                remarks.append(
                    f"The header notes alpha {noted[0]:g} for rank {noted[1]:g}, but the file has no alphas; it is "
                    "read with scale 1, as other programs do."
                )
            identity = replace(identity, unknown=tuple(name for name in identity.unknown if name not in bare))
            return AdapterPlan(
                path, layout, parts, bases.pop() if len(bases) == 1 else headers.base_model(header),
                headers.summary(header), None, vectors, {}, identity.naming, identity.others, header,
                tuple(each for each in (identity.sentence(), *remarks) if each), kohya_ends, has_alphas,
            )  # fmt: skip

    def _peft(self, file: Path) -> AdapterPlan:
        """Plan peft's weights, with the settings beside them."""
        config = file.with_name(peft.CONFIG)
        if not config.is_file():
            raise UsageError(
                f"{config} is missing, so the scale of {file.name} is not known.", cure="Also fetch that file."
            )
        settings = peft.LoraSettings.read(config, conversion=self.conversion)
        with open_store(file) as store:
            whole = _replacements(file, store, self.conversion)
            names = [name for name in store.names() if name not in {each.tensor for each in whole.values()}]
            located, remarks, kohya_ends = _locate(file, store, names, self.conversion)
            header = store.files[0].metadata
            inside = header.get(headers.COMPONENT)
            component = inside or (file.parent.name if file.parent.name in COMPONENTS else None)
            experts = _experts(file, store, located, settings, self.model)
            identity = Identity(None, {}, "peft")
            vectors: dict[str, VectorPart] = {}
            parts: dict[str, AdapterPart] = {}
            if located:
                modules = _modules(file, store, located)
                identity = identify(
                    {name: module.shape for name, module in modules.items()},
                    file,
                    notes=header,
                    naming=self.naming,
                    model=self.model,
                    component=component,
                )
                scales = _PeftScales(config, settings, {piece.module: name for name, pieces in identity.pieces.items()
                                                        for piece in pieces})  # fmt: skip
                parts, vectors = _parts(file, modules, identity, scales, self.conversion)
            parts |= experts
            if experts and settings.unsloth:
                remarks.append(
                    "Unsloth trained this adapter of experts. It is read as peft defines the file; releases of Unsloth "
                    "that arrange lora_B by experts mean another change, and the file does not state the release."
                )
        return AdapterPlan(
            file.parent, "peft", parts, settings.base, {}, None, vectors,
            {f"{component}.{name}" if component else name: each for name, each in whole.items()}, identity.naming,
            identity.others, header, tuple(each for each in (identity.sentence(), *remarks) if each), kohya_ends,
            transposed=settings.transposed,
        )  # fmt: skip

    def _mlx(self, file: Path) -> AdapterPlan:
        """Plan an adapter of mlx-lm, with the settings beside it."""
        settings = mlx.MlxSettings.read(file.with_name(peft.CONFIG))
        with open_store(file) as store:
            located, remarks, _ = _locate(file, store, store.names(), self.conversion)
            modules = _modules(file, store, located)
            shapes = {name: module.shape for name, module in modules.items()}
            identity = identify(shapes, file, naming=self.naming, model=self.model)
            parts, _ = _parts(file, modules, identity, _OneScale(settings.scale), self.conversion)
        return AdapterPlan(file.parent, "peft", parts, settings.base, naming=identity.naming, remarks=tuple(remarks))


class _Scales:
    """Scales of modules: from alphas in tensors, settings in the header, one alpha for all, or none."""

    def __init__(
        self,
        file: Path,
        store: Store,
        settings: Mapping[str, peft.LoraSettings],
        network: float | None,
        header: Mapping[str, str],
    ) -> None:
        self._file, self._store, self._settings, self._network = file, store, settings, network
        self._noted = tuple(headers.number(header, key) for key in ("ss_network_alpha", "ss_network_dim"))

    def _without_rank(self, alpha: float) -> float:
        """The scale of a LoKr of two whole factors.

        LyCORIS writes the layer's dimension as its alpha, for a scale of 1. Trainers that divide the network's alpha
        by its dimension nevertheless write that alpha.
        """
        network, dimension = self._noted
        return alpha / dimension if network and dimension and alpha == network else 1.0

    def of(self, module: str, roles: Mapping[Role, str], rank: int | None) -> float:
        """The scale of a module, called as in diffusers."""
        component, _, rest = module.partition(".")
        stated = None
        if component in self._settings:
            stated = self._settings[component].scale(rest, rank, self._file)
        name = roles.get("alpha")
        if name is None:
            if stated is not None:
                return stated
            return 1.0 if self._network is None or rank is None else self._network / rank
        alpha = self._store.get(name)
        if alpha.numel() != 1:
            raise CorruptBlob(f"{self._file}: {name} has shape {tuple(alpha.shape)} and is not an alpha.")
        scale = self._without_rank(float(alpha)) if rank is None else float(alpha) / rank
        if stated is not None and not math.isclose(stated, scale, rel_tol=1e-6):
            raise CorruptBlob(
                f"{self._file} has two scales for {module}: {scale:g} in the tensor {name}, and {stated:g} in "
                f"{peft.DIFFUSERS_METADATA} in its header.",
                cure="Remove one of the two: the tensor, or the entry of the header.",
            )
        return scale


def _locate(
    file: Path, store: Store, names: list[str], conversion: Conversion | None
) -> tuple[dict[str, dict[Role, str]], list[str], bool]:
    """Find the tensors of each module: module as the file writes it → role → tensor."""
    left_out = [name for name in names if name.endswith(_OF_THE_BASE) or name.startswith("bundle_emb.")]
    names = [name for name in names if name not in left_out]
    refuse_kinds(file, {name: len(store.info(name).shape) for name in names}, conversion)
    apart = take_all_apart(names)
    located: dict[str, dict[Role, str]] = {}
    for name, each in apart.items():
        if each is None:
            raise _no_part(file, name)
        roles = located.setdefault(each.module, {})
        if each.role in roles:
            raise CorruptBlob(f"{file}: both {roles[each.role]!r} and {name!r} are the same part of {each.module}.")
        roles[each.role] = name
    remarks = []
    if base := [name for name in left_out if name.endswith(_OF_THE_BASE)]:
        remarks.append(
            f"Left out: {', '.join(base)}, the base model's own weight, which peft saves beside the adapter of a head "
            "or embedding."
        )
    if bundled := [name for name in left_out if name.startswith("bundle_emb.")]:
        remarks.append(
            f"Left out: {len(bundled)} bundled text embeddings (such as {bundled[0]}), which are not part of the LoRA."
        )
    return located, remarks, any(each is not None and each.kohya for each in apart.values())


def _no_part(file: Path, name: str) -> Unsupported:
    if name.endswith((".bias", ".weight")):
        kind = "bias" if name.endswith(".bias") else "weight"
        return Unsupported(
            f"{file}: tensor {name!r} is a whole {kind}, not a factor of a LoRA.",
            cure=f"{BAKE} Or: {EXTRACT}"
            if file.name == peft.WEIGHTS
            else "If the file is a whole model, extract a LoRA of it: netweight space extract BASE FILE NEW.",
        )
    return Unsupported(
        f"{file}: tensor {name!r} is not a factor of a LoRA.", cure=f"Its kind of adapter is not known. {EXTRACT}"
    )


@final
@dataclass(frozen=True)
class _ModuleTensors:
    """Tensors of one module, under the name that the file gives it."""

    roles: Mapping[Role, str]
    """Role → tensor, of all tensors."""
    factors: Mapping[Role, str]
    """Role → tensor, of those that change a matrix, and of the alpha."""
    vectors: Mapping[Role, str]
    """Role → tensor, of those that change a bias, a norm or another parameter that is not a matrix."""
    structure: ChangeStructure | None
    """Rank, shape and kernel of the change of the matrix; None where only vectors change."""
    shape: tuple[int, int]
    """Rows and columns of the change, by which architectures are told apart."""


def _modules(file: Path, store: Store, located: Mapping[str, Mapping[Role, str]]) -> dict[str, _ModuleTensors]:
    """Find the structure of each module's change from the shapes of its tensors."""
    modules = {}
    for written, roles in located.items():
        vectors = {role: name for role, name in roles.items() if _is_vector(store, role, name)}
        factors = {role: name for role, name in roles.items() if role not in vectors}
        structure = None
        if factors.keys() - {"alpha"}:
            structure = structure_of(file, store, written, factors)
            shape = structure.shape
        elif vectors:
            shape = _shape_of_vectors(store, vectors)
        else:
            raise CorruptBlob(
                f"{file}: {written} has {roles['alpha']!r}, but neither a down (lora_A) factor nor an up (lora_B) "
                "factor.",
                cure="The file is incomplete: fetch it again.",
            )
        modules[written] = _ModuleTensors(roles, factors, vectors, structure, shape)
    return modules


def _shape_of_vectors(store: Store, vectors: Mapping[Role, str]) -> tuple[int, int]:
    """Rows and columns of a module of which only vectors change; 1 and 1 where no vector has a side of the module."""
    for role in ("diff", "diff_b", "up_bias", "w_norm", "b_norm"):
        if role in vectors and (shape := store.info(vectors[role]).shape):
            return shape[0], math.prod(shape[1:])
    return 1, 1


def _parts(
    file: Path,
    modules: Mapping[str, _ModuleTensors],
    identity: Identity,
    scales: _Scales,
    conversion: Conversion | None,
) -> tuple[dict[str, AdapterPart], dict[str, VectorPart]]:
    """Divide the changes of modules that the authors fused, and give each module its scale."""
    parts: dict[str, AdapterPart] = {}
    vectors: dict[str, VectorPart] = {}
    for written, module in modules.items():
        pieces = identity.pieces[written]
        scale = 1.0
        if module.structure is not None:
            scale = scales.of(pieces[0].module, module.roles, module.structure.rank)
            whole = plan_part(file, written, module.factors, module.structure, scale, conversion)
            embeds = EMBEDDING if "embedding_A" in module.factors else ""
            for piece in pieces:
                if piece.module in parts:
                    other = next(iter(parts[piece.module].tensors.values()))
                    raise CorruptBlob(
                        f"{file} contains {piece.module} under two names: {other} and "
                        f"{next(iter(module.factors.values()))}.",
                        cure="Fetch the file again, or remove one of the two.",
                    )
                parts[piece.module + embeds] = with_rows(whole, piece.rows)
        for role, name in module.vectors.items():
            for piece in pieces:
                vectors[f"{piece.module}.{_VECTORS[role]}"] = _vector(file, name, role, scale, piece)
    if not parts:
        raise UsageError(f"{file} contains no low-rank change.", cure="Leave it out.")
    return parts, vectors


def _is_vector(store: Store, role: Role, name: str) -> bool:
    """Return whether a tensor changes a parameter that is not a matrix."""
    return role in _VECTORS and (role != "diff" or len(store.info(name).shape) < 2)


def _vector(file: Path, name: str, role: Role, scale: float, piece: Piece) -> VectorPart:
    return VectorPart(file, name, scale if role == "up_bias" else 1.0, piece.rows)


def _peft_weights(folder: Path) -> Path:
    """The weights in a folder of peft."""
    if (folder / peft.WEIGHTS).is_file():
        return folder / peft.WEIGHTS
    if (folder / peft.COMPRESSED_WEIGHTS).is_file():
        raise Unsupported(
            f"{folder} is an adapter compressed by netweight.", cure="Run: netweight decompress FOLDER NEW_FOLDER"
        )
    for pickle in (folder / Path(peft.WEIGHTS).with_suffix(ending) for ending in PICKLES):
        if pickle.is_file():
            refuse_pickle(pickle)
    raise UsageError(f"{folder} contains no {peft.WEIGHTS}.", cure="Also fetch the adapter's weights.")


def _replacements(file: Path, store: Store, conversion: Conversion | None) -> dict[str, VectorPart]:
    """Parameters that take the place of the model's own, where such are wanted: parameter's name → where it lies."""
    if conversion is None or not conversion.replacements:
        return {}
    replacements = {}
    for name in store.names():
        if take_apart(name) is None and name.endswith((".weight", ".bias")) and not name.endswith(_OF_THE_BASE):
            own = re.sub(r"\.(modules_to_save\.[^.]+|base_layer)\.", ".", name.removeprefix(peft.PREFIX))
            replacements[own] = VectorPart(file, name)
    return replacements


def _experts(
    file: Path,
    store: Store,
    located: dict[str, dict[Role, str]],
    settings: peft.LoraSettings,
    model: ModelNames | None,
) -> dict[str, AdapterPart]:
    """Plan the experts of packed parameters (`target_parameters`), and take their tensors out of `located`."""
    owners: dict[str, list[str]] = {}
    for written in located:
        if target := targeted(written.removeprefix(peft.PREFIX), settings.parameters):
            owners.setdefault(target[0], []).append(written)
    lacking = [pattern for pattern in settings.parameters
               if not any(targeted(owner, [pattern]) for owner in owners)]  # fmt: skip
    if lacking:
        raise CorruptBlob(
            f"{file} contains no factors of {lacking[0]}, which its settings name among target_parameters.",
            cure=f"Fetch {peft.CONFIG} and {peft.WEIGHTS} again.",
        )
    order = None if model is None else model.parameters
    parts: dict[str, AdapterPart] = {}
    for owner, names in owners.items():
        target = targeted(owner, settings.parameters)
        # The target was checked above.
        assert target is not None
        parameters = list(target[2])
        if len(names) != len(parameters):
            raise CorruptBlob(
                f"{file}: {owner} has {len(names)} pairs of factors for {len(parameters)} parameters: "
                f"{', '.join(parameters)}.",
                cure=f"Fetch {peft.CONFIG} and {peft.WEIGHTS} again.",
            )
        nested = nested_names(in_order(parameters, order, file.parent))
        for parameter in parameters:
            written = next(name for name in names if name.removeprefix(peft.PREFIX) == nested[parameter])
            roles = located.pop(written)
            rank = settings.rank_of(parameter)
            whole = plan_part(file, parameter, roles, structure_of(file, store, parameter, roles), 1.0, None)
            if whole.rank % rank:
                raise CorruptBlob(
                    f"{file}: {parameter} has factors of {whole.rank} ranks, which its rank {rank} does not divide.",
                    cure=f"Fetch {peft.CONFIG} and {peft.WEIGHTS} again.",
                )
            count, scale = whole.rank // rank, settings.scale(parameter, rank, file)
            for number in range(count):
                one = replace(whole, scale=scale, rank=rank, expert=(number, count))
                parts[expert_name(parameter, number, count)] = one
    return parts


class _PeftScales(_Scales):
    """Scales of peft's modules, from its settings, whose patterns match the names as peft writes them."""

    def __init__(self, config: Path, settings: peft.LoraSettings, written: Mapping[str, str]) -> None:
        self._config, self._one, self._written = config, settings, written

    def of(self, module: str, roles: Mapping[Role, str], rank: int | None) -> float:
        """The scale of a module, called as in diffusers."""
        return self._one.scale(self._written[module].removeprefix(peft.PREFIX), rank, self._config)


class _OneScale(_Scales):
    """One scale for all modules."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def of(self, module: str, roles: Mapping[Role, str], rank: int | None) -> float:
        """The scale of a module."""
        return self._scale


def _joined(path: Path, plans: list[AdapterPlan]) -> AdapterPlan:
    """Join the plans of a pipeline's components."""
    bases = {plan.base for plan in plans if plan.base}
    return AdapterPlan(
        path,
        "peft",
        {name: part for plan in plans for name, part in plan.parts.items()},
        bases.pop() if len(bases) == 1 else None,
        vectors={name: part for plan in plans for name, part in plan.vectors.items()},
        replacements={name: part for plan in plans for name, part in plan.replacements.items()},
        naming=next((plan.naming for plan in plans if plan.naming), None),
        metadata={key: value for plan in plans for key, value in plan.metadata.items()},
        remarks=tuple(dict.fromkeys(remark for plan in plans for remark in plan.remarks)),
    )


def _only_file(folder: Path) -> Path:
    """The file that diffusers would take, or the one safetensors file of a folder."""
    if (folder / peft.DIFFUSERS_WEIGHTS).is_file():
        return folder / peft.DIFFUSERS_WEIGHTS
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        for file in sorted(folder.iterdir()):
            refuse_pickle(file)
        raise UsageError(f"{folder} contains no adapter.", cure="Name a file or folder of peft, diffusers or kohya.")
    if len(files) > 1:
        raise UsageError(
            f"{folder} contains several adapters: {files[0].name}, {files[1].name}.",
            cure="Name one of them, or collect all in a bank (netweight space ingest).",
        )
    return files[0]


def _own(model: ModelNames, name: str, where: Path) -> str:
    if expert_of(name) or name.endswith(EMBEDDING):
        module = module_of(name)
        if (own := model.own(module)) is not None:
            return own + name.removeprefix(module)
    own = model.own(name)
    if own is None:
        error = model.not_found(name)
        raise NameNotFound(f"{where}: the model has no module {name!r}.", cure=error.cure)
    return own


def refuse_not_finite(file: Path, name: str, change: LowRank) -> None:
    """Refuse factors that contain NaN or infinity.

    Args:
        file: The file, for the message.
        name: The module.
        change: Its factors.
    """
    # A sum is finite only if all are; where it overflows, they are looked at one by one.
    if math.isfinite(float(change.down.sum() + change.up.sum())):
        return
    if not (change.down.isfinite().all() and change.up.isfinite().all()):
        raise UsageError(f"{file}: {name} contains NaN or infinity.", cure="Train it again, or leave it out.")
