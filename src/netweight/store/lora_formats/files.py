"""Adapters in files: which layout, factors and scales, from headers and settings alone; reading; writing."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from netweight.core.files import parse_json, refuse_existing, whole_file
from netweight.errors import CorruptBlob, NetweightError, Unsupported, UsageError
from netweight.nn.lora import Adapter, LowRank, Truncation, truncate
from netweight.store.lora_formats import layouts
from netweight.store.lora_formats.layouts import (
    AUTHORS,
    COMPONENTS,
    DENOISER,
    KohyaNames,
    ModelNames,
    in_component,
    kohya_name,
    split_component,
)
from netweight.store.lora_formats.parts import (
    PICKLES,
    TENSOR,
    AdapterPlan,
    BaseWeights,
    Conversion,
    Layout,
    Part,
    Role,
    alpha_of,
    assemble,
    by_module,
    load_part,
    refuse_kinds,
    refuse_pickle,
    scaled_up,
)
from netweight.store.reader import Store, open_store

if TYPE_CHECKING:
    from torch import Tensor


# In the metadata of peft's files that we write: the component of the pipeline, which peft does not know.
COMPONENT = "netweight.component"


def plan_adapter(
    path: str | Path, model: ModelNames | None = None, conversion: Conversion | None = None
) -> AdapterPlan:
    """Find out what an adapter's files hold from their headers; errors as for `read_adapter`."""
    # `model`: the model's names, for names that do not tell enough; all must be among them
    # `conversion`: how LoHa, LoKr, DoRA and differences become LoRAs; by default they are refused
    plan = _plan(Path(path), _STRUCTURES if model is None else model.kohya, conversion)
    plan = replace(plan, conversion=conversion)
    return plan if model is None else replace(plan, parts=model.own(plan.parts, plan.path))


_STRUCTURES = KohyaNames()


def _plan(path: Path, known: KohyaNames, conversion: Conversion | None) -> AdapterPlan:
    if path.is_file():
        refuse_pickle(path)
        return (
            _plan_peft(path, conversion) if path.name == layouts.WEIGHTS else _plan_file(path, known, path, conversion)
        )
    if not path.is_dir():
        raise UsageError(f"There is no file or folder {path}.", cure="Check the path.")
    if (path / layouts.CONFIG).is_file() or (path / layouts.WEIGHTS).is_file():
        return _plan_peft(_peft_weights(path), conversion)
    parts = [path / name for name in COMPONENTS if (path / name / layouts.CONFIG).is_file()]
    if parts:
        return _joined(path, [_plan_peft(_peft_weights(folder), conversion) for folder in parts])
    return _plan_file(_only_file(path), known, path, conversion)


def _plan_file(file: Path, known: KohyaNames, path: Path, conversion: Conversion | None) -> AdapterPlan:
    """Plan a file in diffusers' or kohya's layout."""
    with open_store(file) as store:
        names = store.names()
        refuse_kinds(file, names, conversion)
        if not names:
            raise UsageError(f"{file} holds no tensor.", cure="Leave it out.")
        said = store.files[0].metadata
        about = _about(said)
        if any(name.startswith(layouts.PREFIX) for name in names):
            raise UsageError(
                f"{file} is in peft's layout, but is not called {layouts.WEIGHTS}, so its scale is not known.",
                cure=f"Put it in a folder under that name, beside its {layouts.CONFIG}.",
            )
        if flat := [name for name in names if name.startswith(("lora_", DENOISER))]:
            located = _locate_kohya(flat, file, known)
            rest = set(names).difference(flat) if len(flat) < len(names) else ()
            others = layouts.locate_diffusers(sorted(rest), file)
            if twice := located.keys() & others.keys():
                raise CorruptBlob(f"{file} holds {min(twice)} under two names.")
            return AdapterPlan(
                path, "kohya", _with_alphas(file, store, located | others, conversion), _base_said(said), about
            )
        located = layouts.locate_diffusers(names, file)
        settings = layouts.settings_said(said, file)
        if not settings:
            return AdapterPlan(
                path, "diffusers", _with_alphas(file, store, located, conversion), _base_said(said), about
            )
        if any("alpha" in roles for roles in located.values()):
            raise CorruptBlob(f"{file} says twice what it is scaled by: in alpha tensors and in its metadata.")
        components = split_component(located)

        def scale_of(module: str, rank: int | None) -> float:
            component, rest = components[module]
            return settings[component].scale(rest, rank, file) if component in settings else 1.0

        bases = {one.base for one in settings.values() if one.base}
        return AdapterPlan(
            path, "diffusers", assemble(file, store, located, scale_of, conversion),
            bases.pop() if len(bases) == 1 else _base_said(said), about,
        )  # fmt: skip


# What trainers say in a file's metadata of where an adapter comes from.
_SAID = (
    "ss_output_name", "ss_base_model_version", "ss_sd_model_name", "ss_sd_model_hash", "ss_network_module", "ss_steps",
    "ss_num_train_images", "modelspec.title", "modelspec.author", "modelspec.license", "modelspec.trigger_phrase",
    "modelspec.architecture", "license", "source", "trained_words",
)  # fmt: skip
_TRIGGERS = "ss_tag_frequency"  # folder → tag → how often captions have it
_SAID_LENGTH = 200  # characters that are kept of each


def _about(said: Mapping[str, str]) -> dict[str, str]:
    """What a file's metadata says of its origin, and the words that most captions had."""
    found = {name: said[name][:_SAID_LENGTH] for name in _SAID if said.get(name)}
    try:
        tags = [tags for tags in parse_json(said.get(_TRIGGERS, "{}")).values() if isinstance(tags, dict)]
        counts = Counter({tag: count for one in tags for tag, count in one.items() if isinstance(count, int)})
    except (ValueError, AttributeError):  # a note that is no table of tags tells none
        counts = Counter()
    if counts:
        found["tags"] = ", ".join(tag.strip() for tag, _ in counts.most_common(5))[:_SAID_LENGTH]
    return found


def _base_said(said: Mapping[str, str]) -> str | None:
    """The base model as trainers say it: the kind of model before a checkpoint's own name."""
    kind = said.get("modelspec.architecture", "").partition("/")[0]  # as in stable-diffusion-v1/lora
    return said.get("ss_base_model_version") or kind or said.get("ss_sd_model_name") or None


def _with_alphas(
    file: Path, store: Store, located: Mapping[str, Mapping[Role, str]], conversion: Conversion | None
) -> dict[str, Part]:
    """Pair factors whose scale is alpha / rank with alpha in a tensor, or 1 where there is none."""

    def scale_of(module: str, rank: int | None) -> float:
        name = located[module].get("alpha")
        if name is None or rank is None:
            return 1.0
        alpha = store.get(name)
        if alpha.numel() != 1:
            raise CorruptBlob(f"{file}: {name} has shape {tuple(alpha.shape)} and is no alpha.")
        return float(alpha) / rank

    return assemble(file, store, located, scale_of, conversion)


def _peft_weights(folder: Path) -> Path:
    """The weights in a folder of peft."""
    if (folder / layouts.WEIGHTS).is_file():
        return folder / layouts.WEIGHTS
    if (folder / layouts.COMPRESSED_WEIGHTS).is_file():
        raise Unsupported(
            f"{folder} is an adapter compressed by netweight.", cure="Run: netweight decompress FOLDER NEW_FOLDER"
        )
    for pickle in (folder / Path(layouts.WEIGHTS).with_suffix(ending) for ending in PICKLES):
        if pickle.is_file():
            refuse_pickle(pickle)
    raise UsageError(f"{folder} holds no {layouts.WEIGHTS}.", cure="Fetch the adapter's weights, too.")


def _plan_peft(file: Path, conversion: Conversion | None) -> AdapterPlan:
    """Plan peft's weights, with the settings beside them."""
    config = file.with_name(layouts.CONFIG)
    if not config.is_file():
        raise UsageError(f"{config} is missing, so what {file.name} is scaled by is not known.", cure="Fetch it, too.")
    settings = layouts.LoraSettings.read(config, converts=conversion is not None)
    with open_store(file) as store:
        names = store.names()
        refuse_kinds(file, names, conversion)
        located = layouts.locate_peft(names, file)
        parts = assemble(file, store, located, lambda module, rank: settings.scale(module, rank, config), conversion)
        inside = store.files[0].metadata.get(COMPONENT)
    component = inside or (file.parent.name if file.parent.name in COMPONENTS else None)
    full = in_component(parts, component)
    return AdapterPlan(file.parent, "peft", {full[name]: part for name, part in parts.items()}, settings.base)


def _joined(path: Path, plans: list[AdapterPlan]) -> AdapterPlan:
    """Join the plans of a pipeline's components."""
    bases = {plan.base for plan in plans if plan.base}
    parts = {name: part for plan in plans for name, part in plan.parts.items()}
    return AdapterPlan(path, "peft", parts, bases.pop() if len(bases) == 1 else None)


def _only_file(folder: Path) -> Path:
    """The file that diffusers would take, or the one safetensors file of a folder."""
    if (folder / layouts.DIFFUSERS_WEIGHTS).is_file():
        return folder / layouts.DIFFUSERS_WEIGHTS
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        for file in sorted(folder.iterdir()):
            refuse_pickle(file)
        raise UsageError(f"{folder} holds no adapter.", cure="Name a file or folder of peft, diffusers or kohya.")
    if len(files) > 1:
        raise UsageError(
            f"{folder} holds several adapters: {files[0].name}, {files[1].name}.", cure="Name one; or make a bank."
        )
    return files[0]


def read_adapter(path: str | Path, *, modules: Iterable[str] | None = None) -> Adapter:
    """Read one adapter.

    Args:
        path: A `.safetensors` file in diffusers' or kohya's layout; or a folder with one; or a folder of peft
            (`adapter_model.safetensors` and `adapter_config.json`), or with one such folder per component.
        modules: Names of the model's modules, with components: then an adapter of others is refused, names in kohya's
            layout may have any structure, and text encoders are called as in the model, with or without `text_model`.

    Returns:
        The adapter: factors as stored, with their exact scale. Names of modules begin with the pipeline's component
        where the file says it, or where only a U-Net or transformer of diffusers has such names.

    Raises:
        UsageError: There is no adapter, its rank is 0, or it holds NaN or infinity.
        NameNotFound: The model has no such module.
        Unsupported: It is no LoRA of linear layers and convolutions (DoRA, LoHa, LoKr, biases and so on).
        UnsafeInput: It is a pickle.
        CorruptBlob: A file is damaged or incomplete.
    """
    return load_plan(plan_adapter(path, None if modules is None else ModelNames(modules)))


def load_plan(plan: AdapterPlan) -> Adapter:
    """Read the adapter that was planned."""
    return load_converted(plan).adapter


def load_converted(plan: AdapterPlan) -> Truncation:
    """Read the adapter that was planned, and what became of it where it is no plain LoRA."""
    factors: dict[str, LowRank] = {}
    lost = 0.0
    weights = None if plan.conversion is None else plan.conversion.weights
    with ExitStack() as stack:
        base = None if weights is None else stack.enter_context(BaseWeights(weights))
        for file in dict.fromkeys(part.file for part in plan.parts.values()):
            with open_store(file) as store:
                for name, part in plan.parts.items():
                    if part.file == file:
                        factors[name], left_out = load_part(store, name, part, base)
                        _refuse_not_finite(file, name, factors[name])
                        lost += left_out
    adapter = Adapter(dict(sorted(factors.items())))
    return Truncation(adapter, math.sqrt(lost / (lost + adapter.norm() ** 2)) if lost else 0.0)


def write_adapter(
    adapter: Adapter,
    path: str | Path,
    *,
    layout: Layout | None = None,
    kernels: Mapping[str, tuple[int, ...]] | None = None,
    base: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write one adapter, each file whole or not at all.

    Args:
        adapter: What to write. For diffusers and kohya, names of modules must begin with a component.
        path: A folder, made if it is not there; for diffusers and kohya also a `.safetensors` file. peft keeps one
            model per folder: an adapter of several components gets a folder for each inside.
        layout: Whose files to write; by default diffusers' for modules of a pipeline's components, else peft's. peft's
            keeps factors and scales; diffusers' and kohya's keep the change, with scales multiplied into the up
            factors, rounded to fp32 where they must be.
        kernels: Names of convolutions → sides of their kernels, (1, 1) for those of one point.
        base: Name of the model it was trained on, to be said in the files.
        overwrite: Whether files may be replaced.

    Returns:
        The file, or peft's folder.

    Raises:
        UsageError: The layout cannot say the modules' names, or the kernels do not fit.
        OutputExists: A file exists already.
        OutputFailed: The place cannot be written.
    """
    path, kernels = Path(path), dict(kernels or {})
    _check_kernels(adapter, kernels)
    layout = layout or layout_for(adapter)
    if layout == "peft":
        return _write_peft(adapter, path, kernels, base, overwrite)
    file = path if path.suffix == ".safetensors" else path / layouts.DIFFUSERS_WEIGHTS
    if layout == "kohya":
        metadata = {"format": "pt"} | ({"ss_sd_model_name": base} if base else {})
        tensors = _kohya_tensors(adapter.factors, kernels)
    elif layout == "diffusers":
        tensors, metadata = _diffusers_content(adapter, kernels, base)
    else:
        raise UsageError(f"There is no layout {layout!r}.", cure="Layouts are diffusers, peft and kohya.")
    if file != path:
        path.mkdir(parents=True, exist_ok=True)
    _write_safetensors(file, tensors, metadata, overwrite)
    return file


@final
@dataclass(frozen=True)
class Exported:
    """An adapter that was written."""

    path: Path  # the file or folder
    layout: Layout  # whose files
    ranks: tuple[int, int]  # the least and the greatest rank of a module
    relative_error: float  # norm of what the rank left out, divided by the norm of the whole change


def layout_for(adapter: Adapter) -> Layout:
    """The layout that its programs open: diffusers' for components of a pipeline, peft's for other models."""
    parts = split_component(adapter.factors).values()
    if any(part == AUTHORS for part, _ in parts):  # diffusers reads their names as kohya writes them
        return "kohya"
    return "diffusers" if all(part for part, _ in parts) else "peft"


def export_adapter(
    adapter: Adapter | Iterable[tuple[str, LowRank]],
    path: str | Path,
    *,
    rank: int | None = None,
    energy: float = 1.0,
    layout: Layout | None = None,
    base: str | None = None,
    kernels: Mapping[str, tuple[int, ...]] | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write an adapter at most at a rank, its own by default; arguments otherwise as for `write_adapter`."""
    # `energy`: the share of each module's square that is enough
    # `adapter`: or its changes one by one, which are let go when their factors of the rank are made
    kept = truncate(_finite(adapter.factors.items() if isinstance(adapter, Adapter) else adapter), rank, energy)
    layout = layout or layout_for(kept.adapter)
    written = write_adapter(kept.adapter, path, layout=layout, base=base, kernels=kernels, overwrite=overwrite)
    ranks = [change.rank for change in kept.adapter.factors.values()]
    return Exported(written, layout, (min(ranks), max(ranks)), kept.relative_error)


def differences(base: str | Path, tuned: str | Path) -> Iterator[tuple[str, LowRank]]:
    """What training changed in the matrices and kernels of a model's files, by module, at full rank."""
    with open_store(base) as before, open_store(tuned) as after:
        if not (names := [name for name in after.names() if name in set(before.names()) and name.endswith(".weight")]):
            raise UsageError(
                f"{tuned} has no weights of the names that {base} has.", cure="Name two models of one kind."
            )
        for name in names:
            one, other = before.info(name).shape, after.info(name).shape
            if one != other:
                raise UsageError(
                    f"{name} has shape {one} in {base} and {other} in {tuned}.", cure="Name one kind of model."
                )
            if len(one) < 2 or re.search(r"(^|[._])(embed|embedding|embeddings|tokens|wte|wpe|shared)\b", name):
                continue
            change = (after.get(name).double() - before.get(name).double()).flatten(1).float()
            if change.any():
                yield name.removesuffix(".weight"), LowRank.of(change)


def _finite(changes: Iterable[tuple[str, LowRank]]) -> Iterator[tuple[str, LowRank]]:
    for name, change in changes:
        if not (change.down.isfinite().all() and change.up.isfinite().all()):
            raise UsageError(f"The change of {name} holds NaN or infinity.", cure="Look at the point's scores.")
        yield name, change


def _refuse_not_finite(file: Path, name: str, change: LowRank) -> None:
    # A sum is finite only if all are; where it overflows, they are looked at one by one.
    if math.isfinite(float(change.down.sum() + change.up.sum())):
        return
    if not (change.down.isfinite().all() and change.up.isfinite().all()):
        raise UsageError(f"{file}: {name} holds NaN or infinity.", cure="Train it again, or leave it out.")


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


def _diffusers_content(
    adapter: Adapter, kernels: Mapping[str, tuple[int, ...]], base: str | None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata with scale 1, which is what programs assume that look at no metadata."""
    tensors: dict[str, Tensor] = {}
    names = layouts.diffusers_names(list(adapter.factors))
    plain = {
        name: LowRank(change.down, scaled_up(change.up, change.scale)) if change.scale != 1 else change
        for name, change in adapter.factors.items()
    }
    for module, change in plain.items():
        tensors[names[module][0]], tensors[names[module][1]] = _shaped(change, kernels.get(module, ()))
    fields: dict[str, Any] = {}
    for component, scales in _scales(plain).items():
        if not component:
            raise UsageError(
                f"Module {next(iter(scales))!r} belongs to no component of a pipeline.",
                cure=f"Names begin with {', '.join(COMPONENTS)}; or choose layout='peft'.",
            )
        if component == AUTHORS:  # loaders translate its names, and know no settings under them
            continue
        values = layouts.settings_for(scales, base).to_json(sorted(scales))
        fields |= {f"{component}.{key}": value for key, value in values.items()}
    return tensors, {"format": "pt"} | (
        {layouts.DIFFUSERS_METADATA: json.dumps(fields, sort_keys=True)} if fields else {}
    )


def _write_peft(
    adapter: Adapter, path: Path, kernels: Mapping[str, tuple[int, ...]], base: str | None, overwrite: bool
) -> Path:
    if path.suffix == ".safetensors":
        raise UsageError(f"peft keeps an adapter in a folder, and {path} is a file.", cure="Name a folder.")
    scales = _scales(adapter.factors)
    folders = {part: path if len(scales) == 1 else path / (part or "model") for part in scales}
    path.mkdir(parents=True, exist_ok=True)
    for folder in folders.values():
        folder.mkdir(exist_ok=True)
        for name in (layouts.WEIGHTS, layouts.CONFIG):
            refuse_existing(folder / name, overwrite=overwrite)
    parts = split_component(adapter.factors)
    for component, folder in folders.items():
        tensors: dict[str, Tensor] = {}
        for module, change in adapter.factors.items():
            if parts[module][0] == component:
                name = f"{layouts.PREFIX}{parts[module][1]}"
                down, up = _shaped(change, kernels.get(module, ()))
                tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = down, up
        metadata = {"format": "pt"} | ({COMPONENT: component} if component else {})
        _write_safetensors(folder / layouts.WEIGHTS, tensors, metadata, overwrite)
        values = layouts.settings_for(scales[component], base).to_json(sorted(scales[component]))
        with whole_file(folder / layouts.CONFIG, overwrite=overwrite) as file:
            file.write(json.dumps(values, indent=2, sort_keys=True).encode())
    return path


def _scales(factors: Mapping[str, LowRank]) -> dict[str, dict[str, tuple[float, int]]]:
    """By component: the name within it → scale and rank."""
    found: dict[str, dict[str, tuple[float, int]]] = {}
    for module, (component, rest) in split_component(factors).items():
        change = factors[module]
        found.setdefault(component, {})[rest] = (change.scale, change.rank)
    return found


def _write_safetensors(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], overwrite: bool) -> None:
    import safetensors.torch

    # Factors may be views of one stack, which safetensors refuses to save twice.
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    with whole_file(file, overwrite=overwrite) as out:
        out.write(safetensors.torch.save(plain, dict(metadata)))


# kohya's layout, in which most published adapters are: underscores for dots, and an alpha beside each pair of factors,
# lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q.lora_down.weight.
_KOHYA_TENSOR = re.compile(r"(?P<module>.+?)\.(?P<role>lora_(?:down|up|A|B)\.weight|alpha)")
_KOHYA_ROLES: dict[str, Role] = {
    "lora_down.weight": "down", "lora_up.weight": "up", "lora_A.weight": "down", "lora_B.weight": "up"
}  # fmt: skip


def _locate_kohya(names: list[str], where: Path, known: KohyaNames) -> dict[str, dict[Role, str]]:
    """Find the factors and alphas of each module in kohya's layout."""
    found: list[tuple[str, str, Role]] = []
    for name in names:
        match = _KOHYA_TENSOR.fullmatch(name) or TENSOR.fullmatch(name)
        if match is None:
            raise Unsupported(f"{where}: tensor {name!r} is no factor of a LoRA.", cure="Train without it.")
        found.append((name, match["module"], _KOHYA_ROLES.get(match["role"], match["role"])))
    try:
        modules = known.modules(dict.fromkeys(written for _, written, _ in found))
    except NetweightError as error:
        raise type(error)(f"{where}: {error.reason}", cure=error.cure) from error
    return by_module(((name, modules[written], role) for name, written, role in found), where)


def _kohya_tensors(factors: Mapping[str, LowRank], kernels: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return an adapter's tensors in kohya's layout, all with one alpha."""
    import torch

    components = split_component(factors)
    several = any(module.startswith(("text_encoder_2.", "text_encoder_3.")) for module in factors)
    alphas = {module: alpha_of(change.scale, change.rank) for module, change in factors.items()}
    alpha = Counter(value for value in alphas.values() if value).most_common(1)
    common = alpha[0][0] if alpha else 1.0
    tensors: dict[str, Tensor] = {}
    for module, change in factors.items():
        name = kohya_name(*components[module], several_encoders=several)
        if f"{name}.alpha" in tensors:
            raise UsageError(
                f"Two modules are called {name!r} in kohya's layout; one is {module!r}.", cure="Choose another layout."
            )
        up = change.up if alphas[module] == common else scaled_up(change.up, change.scale * change.rank / common)
        down, up = _shaped(LowRank(change.down, up), kernels.get(module, ()))
        tensors |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
        exact = torch.tensor(common)
        tensors[f"{name}.alpha"] = exact if exact.item() == common else torch.tensor(common, dtype=torch.float64)
    return tensors
