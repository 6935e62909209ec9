"""Writing adapters: to the files of peft, diffusers, kohya or ComfyUI, each whole or not at all, and read back.

Modules are called as in diffusers in memory. The names of kohya and ComfyUI are the authors', whose fused modules are
joined of their pieces: with one down factor where the pieces share it, else block by block, both exactly.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from netweight.core.atomic_writes import refuse_existing, whole_file
from netweight.errors import CorruptBlob, NetweightError, UsageError
from netweight.nn.lora import Adapter, LowRank, truncate
from netweight.store.lora_formats import metadata as headers
from netweight.store.lora_formats import peft_settings as peft
from netweight.store.lora_formats.identify import (
    ARCHITECTURE,
    AUTHORS,
    COMPONENTS,
    DENOISERS,
    component_of,
    identify,
    identify_modules,
)
from netweight.store.lora_formats.model_names import ModelNames
from netweight.store.lora_formats.naming import Match, Naming, flat, namings
from netweight.store.lora_formats.parts import AdapterPlan, Layout, take_rows
from netweight.store.lora_formats.reading import load_plan, plan_adapter
from netweight.store.lora_formats.scales import alpha_of, scaled_up
from netweight.store.lora_formats.targets import EMBEDDING, expert_of, experts_joined, in_order, module_of, nested_names

if TYPE_CHECKING:
    from torch import Tensor

_ENCODERS = {"text_encoder": "clip_l", "text_encoder_2": "clip_g", "text_encoder_3": "t5xxl"}
_ENDS = {"weight": "diff", "bias": "diff_b", "modulation": "diff_m"}
# Largest error of the change as it is read back, as a share of the change.
_TOLERANCE = 1e-5


@final
@dataclass(frozen=True)
class Style:
    """Names of factors in a file of the authors' names."""

    kohya_ends: bool = False
    """True if factors are called `lora_down` and `lora_up`; False for `lora_A` and `lora_B`."""
    alphas: bool = False
    """True if alphas are stored as tensors; if False, scales are multiplied into the up factors."""


@final
@dataclass(frozen=True)
class ExportResult:
    """An adapter that was written."""

    path: Path
    """The file or folder."""
    layout: Layout
    """Layout of the files."""
    ranks: tuple[int, int]
    """The least and the greatest rank of a module."""
    relative_error: float
    """Norm of everything that changed and was left out, divided by the norm of the whole change."""
    modules: int = 0
    """Number of modules in the files, as they were read back."""
    changed: int = 0
    """Number of changed tensors; 0 if it equals the number of modules."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Changed tensor that the files do not contain → reason."""
    remarks: tuple[str, ...] = ()
    """Remarks for the reader: the architecture, and names that were not translated."""


def write_adapter(
    adapter: Adapter,
    path: str | Path,
    *,
    layout: Layout | None = None,
    kernels: Mapping[str, tuple[int, ...]] | None = None,
    base: str | None = None,
    overwrite: bool = False,
    naming: Naming | None = None,
    metadata: Mapping[str, str] | None = None,
    style: Style | None = None,
    transposed: bool = False,
    parameters: Sequence[str] | None = None,
    check: bool = True,
) -> Path:
    """Write one adapter, each file whole or not at all, and read it back.

    Args:
        adapter: What to write. For all layouts but peft's, names of modules must begin with a component.
        path: A folder, made if it is not there; for all layouts but peft's also a `.safetensors` file. peft keeps one
            model per folder: an adapter of several components gets a folder for each inside.
        layout: Whose files to write; by default diffusers' for modules of a pipeline's components, ComfyUI's for those
            of an unknown architecture, else peft's. peft's keeps factors and scales; the others keep the change, with
            scales multiplied into the up factors, rounded to fp32 where they must be.
        kernels: Names of convolutions → sides of their kernels, (1, 1) for those of one point.
        base: Name of the model it was trained on, to be said in the files.
        overwrite: Whether files may be replaced.
        naming: The architecture's names, for kohya and ComfyUI; by default told from the modules.
        metadata: Entries of the file's header, such as trigger words.
        style: How ComfyUI's layout writes factors; by default `lora_A`, `lora_B` and no alphas.
        transposed: Whether the model stores these weights as (inputs, outputs), for peft.
        parameters: The model's parameters in their order, which decides on how peft nests adapters of packed ones.
        check: Whether to read the files back and compare them with the adapter. Of many adapters with the same modules
            and shapes, checking one is enough, because names and layout do not depend on the weights.

    Returns:
        The file, or peft's folder.

    Raises:
        UsageError: The layout cannot say the modules' names, or the kernels do not fit.
        OutputExists: A file exists already.
        OutputFailed: The place cannot be written.
        CorruptBlob: What is read back is not what was written.
    """
    path, kernels, metadata = Path(path), dict(kernels or {}), dict(metadata or {})
    _check_kernels(adapter, kernels)
    adapter, naming = _in_names_of_diffusers(adapter, naming)
    layout = layout or layout_for(adapter)
    if layout == "peft":
        written = _write_peft(adapter, path, kernels, base, overwrite, metadata, transposed, parameters)
        if check:
            _read_back(adapter, written, None, parameters)
        return written
    if special := next((name for name in adapter.factors if name.endswith("]")), None):
        kind = "an expert of a packed parameter" if expert_of(special) else "an embedding"
        raise UsageError(
            f"{special.partition('[')[0]} is {kind}, which the layout {layout} cannot store.",
            cure="Choose --layout peft, or bake the adapter into the model (netweight space bake).",
        )
    file = path if path.suffix == ".safetensors" else path / peft.DIFFUSERS_WEIGHTS
    if layout == "diffusers":
        tensors, own = _diffusers_content(adapter, kernels, base)
    elif layout in ("kohya", "comfyui"):
        unknown = [name for name in adapter.factors if component_of(name)[0] == AUTHORS]
        if layout == "kohya" and unknown:
            raise UsageError(
                f"{component_of(unknown[0])[1]} is not in any table of names, so its dots could not be recovered "
                "from kohya's flattened names.",
                cure="Keep its name (--layout comfyui), or name the architecture (--model NAME).",
            )
        style = style or Style(layout == "kohya", layout == "kohya")
        naming = naming or _naming_for(adapter, layout)
        tensors = _authors_tensors(adapter, kernels, naming, flattened=layout == "kohya", style=style)
        own = {"ss_sd_model_name": base} if base and layout == "kohya" and "ss_sd_model_name" not in metadata else {}
        own |= {ARCHITECTURE: naming.key} if naming is not None else {}
    else:
        raise UsageError(f"There is no layout {layout!r}.", cure="Layouts are diffusers, peft, kohya and comfyui.")
    if file != path:
        path.mkdir(parents=True, exist_ok=True)
    _write_safetensors(file, tensors, {"format": "pt"} | metadata | own, overwrite)
    try:
        if check:
            _read_back(adapter, file, naming if layout != "diffusers" else None)
    except NetweightError:
        # A file with another meaning is worse than no file.
        file.unlink()
        raise
    return file


def is_known(module: str, naming: Naming | None) -> bool:
    """Return whether a table contains a module of a pipeline, so that its flattened name can be parsed again."""
    component, rest = component_of(module)
    if component.startswith("text_encoder"):
        table = next(each for each in namings() if each.component == "text_encoder")
        return table.match(rest) is not None
    return naming is not None and naming.of_diffusers(module) is not None


def _in_names_of_diffusers(adapter: Adapter, naming: Naming | None) -> tuple[Adapter, Naming | None]:
    """Rename and split modules that are in their authors' names, where a table knows them, and name that table."""
    own = {name: change.shape for name, change in adapter.factors.items() if component_of(name)[0] == AUTHORS}
    if naming is not None:
        own = {name: shape for name, shape in own.items() if naming.match(component_of(name)[1]) is not None}
    elif any(component_of(name)[0] in DENOISERS for name in adapter.factors):
        # The remaining names are not in any table.
        own = {}
    if not own:
        return adapter, naming
    identity = identify(own, Path("adapter"), naming=naming)
    factors = {name: change for name, change in adapter.factors.items() if name not in own}
    for name in own:
        change = adapter.factors[name]
        for piece in identity.pieces[name]:
            factors[piece.module] = LowRank(change.down, take_rows(change.up, piece.rows), change.scale)
    return Adapter(factors, adapter.vectors), identity.naming


def layout_for(adapter: Adapter) -> Layout:
    """The layout whose programs open an adapter: diffusers' for components of a pipeline, peft's for other models."""
    components = {component_of(name)[0] for name in adapter.factors}
    if AUTHORS in components:
        return "comfyui"
    return "peft" if "" in components else "diffusers"


def certain_naming(plan: AdapterPlan, layout: Layout) -> Naming | None:
    """The table for what is made of a file, where a layout in the authors' names needs one that is certain.

    Raises:
        UsageError: The file may be of two architectures, whose authors call these modules differently.
    """
    naming = plan.naming
    if naming is None or layout not in ("comfyui", "kohya") or layout == plan.layout or naming.component == "unet":
        return naming
    for other in plan.alike:
        for module in plan.parts:
            one, two = naming.of_diffusers(module), other.of_diffusers(module)
            written = flat if layout == "kohya" else str
            if one is not None and two is not None and written(one.authors) != written(two.authors):
                raise UsageError(
                    f"{plan.path} may be of {naming.title} or of {other.title}: both call its modules alike in "
                    f"diffusers, and their authors call {module} {one.authors} and {two.authors}.",
                    cure=f"Choose one (--model {naming.key} or --model {other.key}).",
                )
    return naming


def layout_like(plan: AdapterPlan, adapter: Adapter, path: Path) -> Layout:
    """The layout for what is made of a file: its own for another file; for a folder, peft's or diffusers'."""
    if path.suffix == ".safetensors" and plan.layout != "peft":
        unknown = plan.naming is None and any(component_of(name)[0] in DENOISERS for name in adapter.factors)
        return "diffusers" if unknown and plan.layout == "kohya" else plan.layout
    if plan.layout == "peft" and path.suffix != ".safetensors":
        return "peft"
    return layout_for(adapter)


def export_adapter(
    adapter: Adapter | Iterable[tuple[str, LowRank]],
    path: str | Path,
    *,
    rank: int | None = None,
    energy: float = 1.0,
    **how: Any,
) -> ExportResult:
    """Write an adapter at most at a rank, its own by default.

    Args:
        adapter: The adapter, whose factors are kept bit for bit where the rank does not reduce them; or its changes one
            by one, each of which is freed when its factors of the rank exist.
        path: As for `write_adapter`.
        rank: The highest rank of a module; None for each one's own.
        energy: The share of each module's square that is enough.
        how: Further arguments of `write_adapter`.

    Returns:
        What was written, with the error of the rank.
    """
    if isinstance(adapter, Adapter):
        vectors, truncation = adapter.vectors, truncate(_finite(adapter.factors.items()), rank, energy, keep=True)
    else:
        vectors, truncation = {}, truncate(_finite(adapter), rank, energy)
    return write_exported(Adapter(truncation.adapter.factors, vectors), path, error=truncation.relative_error, **how)


def write_exported(adapter: Adapter, path: str | Path, *, error: float, **how: Any) -> ExportResult:
    """Write an adapter and say what was written; `how` are arguments of `write_adapter`."""
    adapter, naming = _in_names_of_diffusers(adapter, how.get("naming"))
    layout = how.get("layout") or layout_for(adapter)
    naming = naming or (_naming_for(adapter, layout) if layout == "kohya" else None)
    every = adapter.vectors
    adapter, left_out = _without_unsaid(adapter, layout, naming)
    written = write_adapter(adapter, path, **{**how, "layout": layout, "naming": naming})
    error = _with_left_out(adapter, error, [every[name] for name in left_out])
    ranks = [change.rank for change in adapter.factors.values()]
    changed = len(adapter.factors) + len(adapter.vectors) + len(left_out)
    return ExportResult(
        written, layout, (min(ranks), max(ranks)), error, len(adapter.factors), changed if left_out else 0, left_out,
        _unread(naming or _naming_of(adapter), layout),
    )  # fmt: skip


def _with_left_out(written: Adapter, error: float, left_out: Sequence[Tensor]) -> float:
    """The relative error of the factors, with that of vectors that are not in the file."""
    lost = sum(float(change.double().square().sum()) for change in left_out)
    if not lost or not math.isfinite(error):
        return error
    written_square = sum(float(change.double().square().sum()) for change in written.vectors.values())
    factors = written.norm() ** 2
    # The omitted part is orthogonal to the stored part.
    whole = factors / (1 - error**2) if error < 1 else factors
    return math.sqrt((whole * error**2 + lost) / (whole + written_square + lost))


def _naming_of(adapter: Adapter) -> Naming | None:
    return identify_modules({name: change.shape for name, change in adapter.factors.items()})


def _unread(naming: Naming | None, layout: Layout) -> tuple[str, ...]:
    """Say that diffusers loads nothing of a file, where that is known."""
    if naming is None or layout not in naming.unread:
        return ()
    return (
        f"diffusers loads no module of a {naming.title} file in this layout, and only warns of it; "
        "for diffusers, choose --layout diffusers.",
    )


def _without_unsaid(adapter: Adapter, layout: Layout, naming: Naming | None) -> tuple[Adapter, dict[str, str]]:
    """Leave out vectors that a layout has no names for: all of peft's, and those of no module in diffusers'."""
    if not adapter.vectors or layout == "comfyui":
        return adapter, {}
    if layout == "kohya":
        # Behind flattened names, dots are found again only for names in a table.
        unsaid = {name for name in adapter.vectors if not is_known(name.rpartition(".")[0], naming)}
        reason = "no table knows its module, so its flattened name could not be read again"
        written = {name: change for name, change in adapter.vectors.items() if name not in unsaid}
        return Adapter(adapter.factors, written), dict.fromkeys(sorted(unsaid), reason)
    written = {}
    if layout == "diffusers":
        biases = {name for name in adapter.vectors if name.endswith(".bias")}
        written = {name: adapter.vectors[name] for name in biases if name.removesuffix(".bias") in adapter.factors}
    reason = f"the layout {layout} cannot store the change of a vector of this kind"
    return Adapter(adapter.factors, written), {name: reason for name in adapter.vectors if name not in written}


def _finite(changes: Iterable[tuple[str, LowRank]]) -> Iterable[tuple[str, LowRank]]:
    for name, change in changes:
        if not (change.down.isfinite().all() and change.up.isfinite().all()):
            raise UsageError(f"The change of {name} contains NaN or infinity.", cure="Check the point's scores.")
        yield name, change


def _check_kernels(adapter: Adapter, kernels: Mapping[str, tuple[int, ...]]) -> None:
    for name, kernel in kernels.items():
        points = math.prod(kernel)
        if name in adapter.factors and (points < 1 or adapter.factors[name].shape[1] % points):
            raise UsageError(
                f"A kernel of {kernel} does not fit {name}, whose change has {adapter.factors[name].shape[1]} columns.",
                cure="Give the sides of the convolution's kernel.",
            )


def _shaped(change: LowRank, kernel: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The factors in the shapes that a convolution's have."""
    return change.down.reshape(change.rank, -1, *kernel), change.up.reshape(*change.up.shape, *(1 for _ in kernel))


def _plain(change: LowRank) -> LowRank:
    """The same change with scale 1, which programs assume that do not read metadata."""
    return LowRank(change.down, scaled_up(change.up, change.scale)) if change.scale != 1 else change


def _diffusers_content(
    adapter: Adapter, kernels: Mapping[str, tuple[int, ...]], base: str | None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata, with scale 1."""
    tensors: dict[str, Tensor] = {}
    plain = {name: _plain(change) for name, change in adapter.factors.items()}
    scales: dict[str, dict[str, tuple[float, int]]] = {}
    for module, change in plain.items():
        component, rest = component_of(module)
        if component == AUTHORS:
            raise UsageError(
                f"{rest} is not in any table of names, so the name that diffusers uses is not known.",
                cure="Keep its name (--layout comfyui), or name the architecture (--model NAME).",
            )
        if not component:
            raise UsageError(
                f"Module {module!r} does not belong to a component of a pipeline.",
                cure=f"Names begin with {', '.join(COMPONENTS)}; or choose --layout peft.",
            )
        text = component.startswith("text_encoder")
        down, up = ("lora_linear_layer.down", "lora_linear_layer.up") if text else ("lora_A", "lora_B")
        tensors[f"{module}.{down}.weight"], tensors[f"{module}.{up}.weight"] = _shaped(change, kernels.get(module, ()))
        scales.setdefault(component, {})[rest] = (change.scale, change.rank)
    fields: dict[str, Any] = {}
    biased = {name.partition(".")[0] for name in adapter.vectors}
    for component, own in scales.items():
        values = peft.settings_for(own, base).to_json(sorted(own))
        if component in biased:
            values["lora_bias"] = True
        fields |= {f"{component}.{key}": value for key, value in values.items()}
    # peft gives every adapted module a bias or none.
    for module, change in plain.items():
        if module.partition(".")[0] in biased:
            bias = adapter.vectors.get(f"{module}.bias")
            tensors[f"{module}.lora_B.bias"] = change.up.new_zeros(change.shape[0]) if bias is None else bias
    return tensors, {peft.DIFFUSERS_METADATA: json.dumps(fields, sort_keys=True)} if fields else {}


def _naming_for(adapter: Adapter, layout: Layout) -> Naming | None:
    """The names of an adapter's architecture, which kohya's and ComfyUI's layouts need."""
    shapes = {name: change.shape for name, change in adapter.factors.items()}
    naming = identify_modules(shapes)
    if naming is None and (own := [name for name in shapes if component_of(name)[0] in DENOISERS]):
        raise UsageError(
            f"{own[0]} is not in any table of names, so the name that its authors use is not known.",
            cure=f"Choose --layout diffusers, or name the architecture (--model NAME) for --layout {layout}.",
        )
    return naming


def _authors_tensors(
    adapter: Adapter, kernels: Mapping[str, tuple[int, ...]], naming: Naming | None, *, flattened: bool, style: Style
) -> dict[str, Tensor]:
    """The tensors of a file in the authors' names."""
    joined, places = _join(adapter, naming, flattened=flattened)
    common = _common_alpha(joined) if style.alphas and flattened else None
    several = any(name.startswith(("text_encoder_2.", "text_encoder_3.")) for name in adapter.factors)
    down_end, up_end = ("lora_down", "lora_up") if style.kohya_ends else ("lora_A", "lora_B")
    tensors: dict[str, Tensor] = {}
    for (component, rest), change in joined.items():
        name = _written(component, rest, naming, flattened=flattened, several=several)
        if f"{name}.{down_end}.weight" in tensors:
            raise UsageError(
                f"Two modules are called {name!r} in this layout; one is {component}.{rest}.",
                cure="Choose another layout.",
            )
        own, alpha = _plain(change), None
        if style.alphas:
            alpha = alpha_of(change.scale, change.rank)
            own = change
            if common is not None and alpha != common:
                own, alpha = LowRank(change.down, scaled_up(change.up, change.scale * change.rank / common)), common
        kernel = kernels.get(places[component, rest], ())
        tensors[f"{name}.{down_end}.weight"], tensors[f"{name}.{up_end}.weight"] = _shaped(own, kernel)
        if alpha is not None:
            tensors[f"{name}.alpha"] = _exact(alpha)
    for (component, rest), (kind, vector) in _joined_vectors(adapter, naming, flattened=flattened).items():
        name = _written(component, rest.rpartition(".")[0], naming, flattened=flattened, several=several)
        tensors[f"{name}.{_ENDS[kind]}"] = vector
    return tensors


def _exact(alpha: float) -> Tensor:
    import torch

    exact = torch.tensor(alpha)
    return exact if exact.item() == alpha else torch.tensor(alpha, dtype=torch.float64)


def _common_alpha(changes: Mapping[Any, LowRank]) -> float:
    """The alpha that most modules have, as programs expect one of the whole file."""
    alphas = Counter(value for each in changes.values() if (value := alpha_of(each.scale, each.rank)))
    return alphas.most_common(1)[0][0] if alphas else 1.0


def _written(component: str, rest: str, naming: Naming | None, *, flattened: bool, several: bool) -> str:
    """A module's name in the file."""
    if component.startswith("text_encoder"):
        kind = _ENCODERS[component]
        if naming is not None and component == naming.t5 and naming.t5 != "text_encoder_3":
            kind = "t5xxl"
        if not flattened:
            return f"text_encoders.{kind}.transformer.{rest}"
        if rest.startswith("encoder.layers."):
            # Programs that use the older structure of CLIP expect this level.
            rest = f"text_model.{rest}"
        start = {"clip_l": "lora_te1_", "clip_g": "lora_te2_", "t5xxl": "lora_te3_"}[kind]
        single = kind == "clip_l" and not several and (naming is None or naming.key == "stable-diffusion")
        return f"{'lora_te_' if single else start}{flat(rest)}"
    if component not in (*DENOISERS, AUTHORS):
        raise UsageError(
            f"Module {rest!r} of component {component!r} has no name in this layout.",
            cure="Choose --layout diffusers, or --layout peft for a plain model.",
        )
    return f"lora_unet_{flat(rest)}" if flattened else f"{AUTHORS}.{rest}"


def _join(
    adapter: Adapter, naming: Naming | None, *, flattened: bool
) -> tuple[dict[tuple[str, str], LowRank], dict[tuple[str, str], str]]:
    """Bring modules to the authors' names: (component, name) → change; and which module of the adapter each was."""
    published = naming is None or naming.component != "unet" or _is_published(adapter, naming)
    changes: dict[tuple[str, str], LowRank] = {}
    places: dict[tuple[str, str], str] = {}
    fused: dict[tuple[str, str], dict[int, tuple[str, LowRank]]] = {}
    matches: dict[tuple[str, str], Match] = {}
    for name, change in adapter.factors.items():
        component, key, match = _place(name, naming, flattened=flattened, published=published)
        if match is None or len(match.entry.diffusers) == 1:
            if match is not None and match.entry.swaps(*change.shape):
                change = LowRank(change.down, _halves_swapped(change.up), change.scale)
            changes[component, key], places[component, key] = change, name
        else:
            fused.setdefault((component, key), {})[match.index] = (name, change)
            matches[component, key] = match
    for place, pieces in fused.items():
        changes[place] = _fuse(matches[place], pieces)
        places[place] = next(iter(pieces.values()))[0]
    return dict(sorted(changes.items())), places


def _place(
    name: str, naming: Naming | None, *, flattened: bool, published: bool = True
) -> tuple[str, str, Match | None]:
    """Component and authors' name of a module of diffusers, with the line of the table."""
    component, rest = component_of(name)
    if naming is None or component.startswith("text_encoder") or component == AUTHORS:
        return component, rest, None
    match = naming.of_diffusers(name)
    if component == f"{naming.component}_2":
        raise UsageError(
            f"{name} belongs to the pipeline's second denoiser, but a file in the authors' names contains one model.",
            cure="Choose --layout diffusers, which keeps both.",
        )
    if match is None:
        raise UsageError(
            f"{name} is not in the table of {naming.title}, so the name that its authors use is not known.",
            cure="Choose --layout diffusers, which keeps its name.",
        )
    if flattened and (naming.kohya == "diffusers" or not published):
        return component, rest, None
    own = match.entry.diffusers[match.index].partition(":")
    if own[1] and flattened:
        raise UsageError(f"{name} has no name in kohya's layout.", cure="Choose --layout diffusers or comfyui.")
    return naming.component, match.authors, match


def _is_published(adapter: Adapter, naming: Naming) -> bool:
    """Return whether a U-Net is of the published structure, whose authors' names count the blocks through.

    Those of another structure, such as small ones, are flattened in the names of diffusers, which programs read, too.
    """
    for name, change in adapter.factors.items():
        match = naming.of_diffusers(name)
        pattern = "" if match is None else match.entry.diffusers[match.index]
        if re.search(r"transformer_blocks\.[2-9]", name) or change.shape[1] in naming.columns.get(pattern, ()):
            return True
    return False


def _halves_swapped(tensor: Tensor) -> Tensor:
    import torch

    one, other = tensor.chunk(2)
    return torch.cat([other, one])


def _fuse(match: Match, pieces: Mapping[int, tuple[str, LowRank]]) -> LowRank:
    """Join the pieces of a fused module exactly: below each other if they share a down factor, else block by block."""
    import torch

    columns = {change.shape[1] for _, change in pieces.values()}
    if len(columns) > 1:
        first = next(iter(pieces.values()))[0]
        raise UsageError(
            f"{first} and others of {match.authors} have {sorted(columns)} columns: they belong to two models."
        )
    present = {index: change.shape[0] for index, (_, change) in pieces.items()}
    rows = []
    for index in range(len(match.entry.diffusers)):
        count = present.get(index) or match.entry.missing_rows(index, min(columns), present)
        if count is None:
            raise UsageError(
                f"{match.authors} joins {len(match.entry.diffusers)} modules. The adapter lacks one of them, "
                f"{match.entry.diffusers[index]}, whose number of rows is not known.",
                cure="Choose --layout diffusers, which keeps them apart.",
            )
        rows.append(count)
    changes = [change for _, change in pieces.values()]
    dtype = changes[0].up.dtype
    for change in changes[1:]:
        dtype = torch.promote_types(dtype, change.up.dtype)
    shared = all(
        change.scale == changes[0].scale and torch.equal(change.down, changes[0].down) for change in changes[1:]
    )
    if not shared and len({change.scale for change in changes}) > 1:
        changes = [_plain(change) for change in changes]
        for change in changes:
            dtype = torch.promote_types(dtype, change.up.dtype)
    by_index = dict(zip(pieces, changes, strict=True))
    rank = changes[0].rank if shared else sum(change.rank for change in changes)
    up = torch.zeros(sum(rows), rank, dtype=dtype)
    row = column = 0
    for index, count in enumerate(rows):
        if (piece := by_index.get(index)) is not None:
            start = 0 if shared else column
            up[row : row + count, start : start + piece.rank] = piece.up.to(dtype)
            column += piece.rank
        row += count
    ordered = [by_index[index] for index in sorted(by_index)]
    down = changes[0].down if shared else torch.cat([change.down.to(dtype) for change in ordered])
    return LowRank(down.to(dtype), up, changes[0].scale)


def _joined_vectors(
    adapter: Adapter, naming: Naming | None, *, flattened: bool
) -> dict[tuple[str, str], tuple[str, Tensor]]:
    """Changes of vectors in the authors' names: (component, parameter) → kind and change."""
    import torch

    changes: dict[tuple[str, str], tuple[str, Tensor]] = {}
    fused: dict[tuple[str, str], tuple[Match, dict[int, Tensor]]] = {}
    for name, change in adapter.vectors.items():
        module, _, kind = name.rpartition(".")
        try:
            component, key, match = _place(module, naming, flattened=flattened)
        except UsageError:
            # Norms are not in any table. If the authors use the same name, they keep it.
            component, _, key = module.partition(".")
            match = None
        if match is not None and len(match.entry.diffusers) > 1:
            fused.setdefault((component, f"{key}.{kind}"), (match, {}))[1][match.index] = change
            continue
        if match is not None and match.entry.swapped == "always" and change.numel() % 2 == 0:
            change = _halves_swapped(change)
        changes[component, f"{key}.{kind}"] = (kind, change)
    for place, (match, pieces) in fused.items():
        size = next(iter(pieces.values()))
        parts = [pieces.get(index, torch.zeros_like(size)) for index in range(len(match.entry.diffusers))]
        changes[place] = (place[1].rpartition(".")[2], torch.cat(parts))
    return changes


def _write_peft(
    adapter: Adapter,
    path: Path,
    kernels: Mapping[str, tuple[int, ...]],
    base: str | None,
    overwrite: bool,
    metadata: Mapping[str, str],
    transposed: bool,
    parameters: Sequence[str] | None,
) -> Path:
    if path.suffix == ".safetensors":
        raise UsageError(f"peft keeps an adapter in a folder, and {path} is a file.", cure="Name a folder.")
    scales: dict[str, dict[str, tuple[float, int]]] = {}
    parts: dict[str, tuple[str, str]] = {}
    packed = experts_joined({name: change for name, change in adapter.factors.items() if expert_of(name)})
    plain = {name: change for name, change in adapter.factors.items() if not expert_of(name)}
    for name, change in plain.items():
        parts[name] = component_of(name.removesuffix(EMBEDDING))
        scales.setdefault(parts[name][0], {})[parts[name][1]] = (change.scale, change.rank)
    for name, (change, rank) in packed.items():
        parts[name] = component_of(name)
        scales.setdefault(parts[name][0], {})[parts[name][1]] = (change.scale, rank)
    folders = {part: path if len(scales) == 1 else path / (part or "model") for part in scales}
    path.mkdir(parents=True, exist_ok=True)
    for folder in folders.values():
        folder.mkdir(exist_ok=True)
        for name in (peft.WEIGHTS, peft.CONFIG):
            refuse_existing(folder / name, overwrite=overwrite)
    for component, folder in folders.items():
        tensors: dict[str, Tensor] = {}
        for module, change in plain.items():
            if parts[module][0] == component:
                name = f"{peft.PREFIX}{parts[module][1]}"
                if module.endswith(EMBEDDING):
                    tensors[f"{name}.lora_embedding_A"], tensors[f"{name}.lora_embedding_B"] = (
                        change.up.T,
                        change.down.T,
                    )
                    continue
                down, up = _shaped(change, kernels.get(module, ()))
                tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = down, up
        own_packed = [parts[name][1] for name in packed if parts[name][0] == component]
        for name, (change, _) in packed.items():
            if parts[name][0] == component:
                same = [each for each in own_packed if each.rpartition(".")[0] == parts[name][1].rpartition(".")[0]]
                nested = nested_names(in_order(same, parameters, path))[parts[name][1]]
                tensors[f"{peft.PREFIX}{nested}.lora_A.weight"] = change.down
                tensors[f"{peft.PREFIX}{nested}.lora_B.weight"] = change.up
        own = {headers.COMPONENT: component} if component else {}
        _write_safetensors(folder / peft.WEIGHTS, tensors, {"format": "pt"} | dict(metadata) | own, overwrite)
        settings = peft.settings_for(scales[component], base, transposed=transposed, parameters=tuple(own_packed))
        values = settings.to_json(sorted(scales[component]))
        with whole_file(folder / peft.CONFIG, overwrite=overwrite) as file:
            file.write(json.dumps(values, indent=2, sort_keys=True).encode())
    return path


def _write_safetensors(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], overwrite: bool) -> None:
    import safetensors.torch

    # Factors may be views of one stack, which safetensors refuses to save twice.
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    with whole_file(file, overwrite=overwrite) as out:
        out.write(safetensors.torch.save(plain, dict(metadata)))


def _read_back(adapter: Adapter, written: Path, naming: Naming | None, parameters: Sequence[str] | None = None) -> None:
    """Read what was written and compare every module, so that no file is left that means something else."""
    nested = parameters is not None and any(expert_of(name) for name in adapter.factors)
    model = ModelNames(map(module_of, adapter.factors), parameters) if nested else None
    try:
        plan = plan_adapter(written, model)
    except UsageError:
        # Several architectures have such names, and the file was written for the one that was given.
        plan = plan_adapter(written, naming=naming)
    if not all(change.down.isfinite().all() and change.up.isfinite().all() for change in adapter.factors.values()):
        # No reader takes such a file.
        return
    again = load_plan(plan)
    # Kohya's names of CLIP have a level that newer models lack.
    factors = {_plain_name(name): change for name, change in again.factors.items()}
    present = {*factors, *map(_plain_name, again.vectors)}
    missing = sorted(name for name in (*adapter.factors, *adapter.vectors) if _plain_name(name) not in present)
    if missing:
        raise CorruptBlob(
            f"{written} cannot store this adapter: what was written lacks {missing[0]} when it is read back"
            + (f", and {len(missing) - 1} others." if len(missing) > 1 else "."),
            cure="Choose another layout (--layout diffusers).",
        )
    for name, change in adapter.factors.items():
        _compare(written, name, change, factors[_plain_name(name)])


def _plain_name(name: str) -> str:
    return name.replace(".text_model.", ".", 1) if name.startswith("text_encoder") else name


def _same(change: LowRank, again: LowRank) -> bool:
    """True if two changes have equal factors, which is much cheaper to find out than the distance of the changes."""
    import torch

    if change.scale != again.scale or (change.down.dtype, change.up.dtype) != (again.down.dtype, again.up.dtype):
        return False
    return torch.equal(change.down, again.down) and torch.equal(change.up, again.up)


def _compare(written: Path, name: str, change: LowRank, again: LowRank) -> None:
    if _same(change, again):
        return
    square = change.inner(change)
    difference = square + again.inner(again) - 2 * change.inner(again) if change.shape == again.shape else math.inf
    if difference > max(_TOLERANCE**2 * square, 1e-12 * square):
        raise CorruptBlob(
            f"{written} cannot store this adapter: what was written has another change of {name} when it is read back.",
            cure="Choose another layout (--layout diffusers).",
        )
