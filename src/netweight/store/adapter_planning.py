"""What an adapter's files hold, told from headers and settings alone: which layout, which factors, which scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from netweight.errors import CorruptBlob, Unsupported, UsageError
from netweight.store.adapter_layouts import diffusers, kohya, peft
from netweight.store.adapter_layouts.components import COMPONENTS, in_component, split_component
from netweight.store.adapter_layouts.kohya_names import KohyaNames
from netweight.store.adapter_layouts.model_names import ModelNames
from netweight.store.adapter_layouts.parts import Part, Plan, Role, assemble
from netweight.store.adapter_layouts.refusals import PICKLES, refuse_kinds, refuse_pickle
from netweight.store.reading import Store, open_store

__all__ = ["COMPONENT", "plan_adapter"]

COMPONENT = "netweight.component"
"""In the metadata of peft's files that we write: the component of the pipeline, which peft does not know."""


def plan_adapter(path: str | Path, model: ModelNames | None = None) -> Plan:
    """Find out what an adapter's files hold from their headers; errors as for `read_adapter`.

    Args:
        path: As for `read_adapter`.
        model: The model's names, for names that do not tell enough; all must be among them.

    Returns:
        What is to be read, and from where.
    """
    plan = _plan(Path(path), KohyaNames() if model is None else model.kohya)
    return plan if model is None else replace(plan, parts=model.own(plan.parts, plan.path))


def _plan(path: Path, known: KohyaNames) -> Plan:
    if path.is_file():
        refuse_pickle(path)
        return _plan_peft(path) if path.name == peft.WEIGHTS else _plan_file(path, known, path)
    if not path.is_dir():
        raise UsageError(f"There is no file or folder {path}.", cure="Check the path.")
    if (path / peft.CONFIG).is_file() or (path / peft.WEIGHTS).is_file():
        return _plan_peft(_peft_weights(path))
    parts = [path / name for name in COMPONENTS if (path / name / peft.CONFIG).is_file()]
    if parts:
        return _joined(path, [_plan_peft(_peft_weights(folder)) for folder in parts])
    return _plan_file(_only_file(path), known, path)


def _plan_file(file: Path, known: KohyaNames, path: Path) -> Plan:
    """Plan a file in diffusers' or kohya's layout."""
    with open_store(file) as store:
        names = store.names()
        refuse_kinds(file, names)
        if not names:
            raise UsageError(f"{file} holds no tensor.", cure="Leave it out.")
        if any(name.startswith(peft.PREFIX) for name in names):
            raise UsageError(
                f"{file} is in peft's layout, but is not called {peft.WEIGHTS}, so its scale is not known.",
                cure=f"Put it in a folder under that name, beside its {peft.CONFIG}.",
            )
        if kohya.is_kohya(names):
            return Plan(path, "kohya", _with_alphas(file, store, kohya.locate(names, file, known)), None)
        located = diffusers.locate(names, file)
        settings = diffusers.settings(store.files[0].metadata, file)
        if not settings:
            return Plan(path, "diffusers", _with_alphas(file, store, located), None)
        if any("alpha" in roles for roles in located.values()):
            raise CorruptBlob(f"{file} says twice what it is scaled by: in alpha tensors and in its metadata.")
        components = split_component(located)

        def scale_of(module: str, rank: int) -> float:
            component, rest = components[module]
            return settings[component].scale(rest, rank, file) if component in settings else 1.0

        bases = {one.base for one in settings.values() if one.base}
        return Plan(
            path, "diffusers", assemble(file, store, located, scale_of), bases.pop() if len(bases) == 1 else None
        )


def _with_alphas(file: Path, store: Store, located: Mapping[str, Mapping[Role, str]]) -> dict[str, Part]:
    """Pair factors whose scale is alpha / rank with alpha in a tensor, or 1 where there is none."""

    def scale_of(module: str, rank: int) -> float:
        name = located[module].get("alpha")
        if name is None:
            return 1.0
        alpha = store.get(name)
        if alpha.numel() != 1:
            raise CorruptBlob(f"{file}: {name} has shape {tuple(alpha.shape)} and is no alpha.")
        return float(alpha) / rank

    return assemble(file, store, located, scale_of)


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
    raise UsageError(f"{folder} holds no {peft.WEIGHTS}.", cure="Fetch the adapter's weights, too.")


def _plan_peft(file: Path) -> Plan:
    """Plan peft's weights, with the settings beside them."""
    config = file.with_name(peft.CONFIG)
    if not config.is_file():
        raise UsageError(f"{config} is missing, so what {file.name} is scaled by is not known.", cure="Fetch it, too.")
    settings = peft.LoraSettings.read(config)
    with open_store(file) as store:
        names = store.names()
        refuse_kinds(file, names)
        located = peft.locate(names, file)
        parts = assemble(file, store, located, lambda module, rank: settings.scale(module, rank, config))
        inside = store.files[0].metadata.get(COMPONENT)
    component = inside or (file.parent.name if file.parent.name in COMPONENTS else None)
    full = in_component(parts, component)
    return Plan(file.parent, "peft", {full[name]: part for name, part in parts.items()}, settings.base)


def _joined(path: Path, plans: list[Plan]) -> Plan:
    """Join the plans of a pipeline's components."""
    bases = {plan.base for plan in plans if plan.base}
    parts = {name: part for plan in plans for name, part in plan.parts.items()}
    return Plan(path, "peft", parts, bases.pop() if len(bases) == 1 else None)


def _only_file(folder: Path) -> Path:
    """The file that diffusers would take, or the one safetensors file of a folder."""
    if (folder / diffusers.WEIGHTS).is_file():
        return folder / diffusers.WEIGHTS
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
