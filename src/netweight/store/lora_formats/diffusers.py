"""diffusers' layout: one file for all components of a pipeline, as `pipeline.load_lora_weights` reads it.

    unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q.lora_A.weight
    text_encoder.text_model.encoder.layers.0.self_attn.q_proj.lora_linear_layer.down.weight

Older files say `….attn1.processor.to_q_lora.down.weight`, or leave the component out. What factors are scaled by stands
in the metadata (peft's settings by component, `lora_adapter_metadata`), or in `.alpha` tensors, or it is 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from netweight.core.files import parse_json
from netweight.errors import CorruptBlob, Unsupported
from netweight.store.lora_formats import other_kinds
from netweight.store.lora_formats.names import dotted, in_component, split_component
from netweight.store.lora_formats.parts import Role, by_module
from netweight.store.lora_formats.peft import LoraSettings

METADATA = "lora_adapter_metadata"
WEIGHTS = "pytorch_lora_weights.safetensors"

_TENSOR = re.compile(
    r"(?P<module>.+?)(?:\.lora_(?P<side>[AB])(?:\.[^.]+)?"
    r"|(?:\.lora|\.lora_linear_layer|(?P<joined>_lora))\.(?P<way>down|up)"
    r"|\.lora_(?P<kohya>down|up))\.weight"
)
_ALPHA = re.compile(
    r"(?P<module>.+?)(?:\.lora|\.lora_linear_layer|(?P<joined>_lora))?(?:\.(?:down|up)\.weight)?\.alpha"
)
_ROLES: dict[str, Role] = {"A": "down", "B": "up", "down": "down", "up": "up"}
_UNET_NAMES = {"to_out": "to_out.0"}
_TEXT_NAMES = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}


def locate(names: list[str], where: Path) -> dict[str, dict[Role, str]]:
    """Find the factors and alphas of each module."""
    found: dict[str, tuple[str, Role]] = {}
    for name in names:
        plain = _xlabs(name).replace(".processor.", ".")
        if (other := other_kinds.TENSOR.fullmatch(plain)) is not None:
            found[name] = (other["module"], other["role"])
            continue
        match = _ALPHA.fullmatch(plain) or _TENSOR.fullmatch(plain)
        if match is None:
            raise Unsupported(
                f"{where}: tensor {name!r} is no factor of a LoRA.", cure="Save the adapter without other weights."
            )
        fields = match.groupdict()
        written = fields.get("side") or fields.get("way") or fields.get("kohya")
        module = _current(fields["module"]) if fields["joined"] else fields["module"]
        found[name] = (module, _ROLES[written] if written else "alpha")
    owners = {module for module, role in found.values() if role != "alpha"}
    for name, (module, role) in found.items():
        if role == "alpha" and module not in owners:
            found[name] = (_current(module), role)
    own = {module: dotted(module) for module, _ in found.values()}
    full = in_component(own.values())
    return by_module(((name, full[own[module]], role) for name, (module, role) in found.items()), where)


_XLABS = re.compile(r"(diffusion_model\.)?(double_blocks\.\d+)\.processor\.(qkv|proj)_lora([12])\.(down|up)\.weight")


def _xlabs(name: str) -> str:
    """The name that ComfyUI has for a tensor of XLabs' trainer; other names stay."""
    if (match := _XLABS.fullmatch(name)) is None:
        return name
    stream = "img" if match[4] == "1" else "txt"
    return f"diffusion_model.{match[2]}.{stream}_attn.{match[3]}.lora_{match[5]}.weight"


def settings(metadata: Mapping[str, str], where: Path) -> dict[str, LoraSettings]:
    """Read the settings of each component from a file's metadata; empty if it has none."""
    if METADATA not in metadata:
        return {}
    try:
        fields = parse_json(metadata[METADATA])
        parts = {component: rest for component, rest in (key.split(".", 1) for key in fields)}
    except (ValueError, TypeError) as error:
        raise CorruptBlob(f"{where}: its {METADATA} cannot be read ({error}).", cure="Fetch the file again.") from error
    return {component: LoraSettings.of(_fields_of(component, fields), where) for component in parts}


def tensor_names(modules: list[str]) -> dict[str, tuple[str, str]]:
    """Return the names of the down and up factors by module name, as diffusers writes them today."""
    names = {}
    for module, (component, _) in split_component(modules).items():
        text = component.startswith("text_encoder")
        down, up = ("lora_linear_layer.down", "lora_linear_layer.up") if text else ("lora_A", "lora_B")
        names[module] = (f"{module}.{down}.weight", f"{module}.{up}.weight")
    return names


def _fields_of(component: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    head = f"{component}."
    return {key.removeprefix(head): value for key, value in fields.items() if key.startswith(head)}


def _current(module: str) -> str:
    """Today's name of a module that older files write as `to_q_lora`."""
    parent, _, last = module.rpartition(".")
    names = _TEXT_NAMES if parent.endswith("self_attn") else _UNET_NAMES
    return f"{parent}.{names.get(last, last)}"
