"""One adapter in the files of peft, diffusers or kohya, read and written; nothing is unpickled.

`adapter_planning.py` tells from headers alone what files hold and refuses what is no low-rank change.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netweight.errors import UsageError
from netweight.generate.adapter import Adapter, LowRank
from netweight.store.adapter_layouts import diffusers, kohya, peft
from netweight.store.adapter_layouts.components import COMPONENTS, split_component
from netweight.store.adapter_layouts.model_names import ModelNames
from netweight.store.adapter_layouts.parts import Layout, Plan, load_part, scaled_up
from netweight.store.adapter_planning import COMPONENT, plan_adapter
from netweight.store.atomic import refuse_existing, whole_file
from netweight.store.reading import open_store

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["load_plan", "read_adapter", "write_adapter"]


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


def load_plan(plan: Plan) -> Adapter:
    """Read the adapter that was planned.

    Args:
        plan: What `plan_adapter` found.

    Returns:
        The adapter.

    Raises:
        UsageError: It holds NaN or infinity; file and module are named.
        CorruptBlob: A file is damaged.
    """
    factors: dict[str, LowRank] = {}
    for file in dict.fromkeys(part.file for part in plan.parts.values()):
        with open_store(file) as store:
            for name, part in plan.parts.items():
                if part.file == file:
                    factors[name] = load_part(store, part)
                    _refuse_not_finite(file, name, factors[name])
    return Adapter(dict(sorted(factors.items())))


def write_adapter(
    adapter: Adapter,
    path: str | Path,
    *,
    layout: Layout = "diffusers",
    kernels: Mapping[str, tuple[int, ...]] | None = None,
    base: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write one adapter, each file whole or not at all.

    Args:
        adapter: What to write. For diffusers and kohya, names of modules must begin with a component.
        path: A folder, made if it is not there; for diffusers and kohya also a `.safetensors` file. peft keeps one
            model per folder: an adapter of several components gets a folder for each inside.
        layout: Whose files to write. peft's keeps factors and scales; diffusers' and kohya's keep the change, with
            scales multiplied into the up factors, rounded to fp32 where they must be.
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
    if layout == "peft":
        return _write_peft(adapter, path, kernels, base, overwrite)
    file = path if path.suffix == ".safetensors" else path / diffusers.WEIGHTS
    if layout == "kohya":
        tensors, metadata = kohya.kohya_tensors(adapter.factors, kernels), {"format": "pt"}
    elif layout == "diffusers":
        tensors, metadata = _diffusers_content(adapter, kernels, base)
    else:
        raise UsageError(f"There is no layout {layout!r}.", cure="Layouts are diffusers, peft and kohya.")
    if file != path:
        path.mkdir(parents=True, exist_ok=True)
    _write_safetensors(file, tensors, metadata, overwrite)
    return file


def _refuse_not_finite(file: Path, name: str, change: LowRank) -> None:
    if not (change.down.isfinite().all() and change.up.isfinite().all()):
        raise UsageError(f"{file}: {name} holds NaN or infinity.", cure="Train it again, or leave it out.")


def _check_kernels(adapter: Adapter, kernels: Mapping[str, tuple[int, ...]]) -> None:
    for name, kernel in kernels.items():
        points = 1
        for side in kernel:
            points *= side
        if name in adapter.factors and (points < 1 or adapter.factors[name].shape[1] % points):
            raise UsageError(
                f"A kernel of {kernel} does not fit {name}, whose change has {adapter.factors[name].shape[1]} columns.",
                cure="Give the sides of the convolution's kernel.",
            )


def _shaped(change: LowRank, kernel: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The factors in the shapes that a convolution's have."""
    ones = [1] * len(kernel)
    return change.down.reshape(change.rank, -1, *kernel), change.up.reshape(*change.up.shape, *ones)


def _diffusers_content(
    adapter: Adapter, kernels: Mapping[str, tuple[int, ...]], base: str | None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata with scale 1, which is what programs assume that look at no metadata."""
    tensors: dict[str, Tensor] = {}
    names = diffusers.tensor_names(list(adapter.factors))
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
        values = peft.settings_for(scales, base).to_json(sorted(scales))
        fields |= {f"{component}.{key}": value for key, value in values.items()}
    return tensors, {"format": "pt", diffusers.METADATA: json.dumps(fields, sort_keys=True)}


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
        for name in (peft.WEIGHTS, peft.CONFIG):
            refuse_existing(folder / name, overwrite=overwrite)
    parts = split_component(adapter.factors)
    for component, folder in folders.items():
        tensors: dict[str, Tensor] = {}
        for module, change in adapter.factors.items():
            if parts[module][0] == component:
                name = f"{peft.PREFIX}{parts[module][1]}"
                down, up = _shaped(change, kernels.get(module, ()))
                tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = down, up
        metadata = {"format": "pt"} | ({COMPONENT: component} if component else {})
        _write_safetensors(folder / peft.WEIGHTS, tensors, metadata, overwrite)
        values = peft.settings_for(scales[component], base).to_json(sorted(scales[component]))
        with whole_file(folder / peft.CONFIG, overwrite=overwrite) as file:
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
