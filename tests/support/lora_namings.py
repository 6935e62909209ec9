"""LoRA files in the names of every trainer, made from the tables, and what diffusers reads of them."""

from __future__ import annotations

import re
import zlib
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file

from netweight.store.lora_formats.naming import Naming, flat

RANK = 4
# Widths of the published models, which diffusers' conversions expect.
WIDTHS = {"flux": 3072, "chroma": 3072, "hunyuan-video": 3072, "lumina2": 2304, "flux2": 64, "minimax-h3": 384}
ROWS = {"lumina2": {"attention.qkv": 3840}}


def generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def numbers(pattern: str) -> str:
    return pattern.replace("#", "0")


def size(naming: Naming, authors: str, pieces: int) -> tuple[int, int]:
    """Rows and columns of a module of a small model, in the proportions of the published one."""
    width = WIDTHS.get(naming.key, 24)
    pattern = next((each.authors for each in naming.entries if numbers(each.authors) == authors), authors)
    if pattern in naming.ratios:
        rows, columns = naming.ratios[pattern]
        return (width * rows // columns, width) if rows >= columns else (width, width * columns // rows)
    rows = next((rows for end, rows in ROWS.get(naming.key, {}).items() if authors.endswith(end)), width * pieces)
    return rows, width


def factors(name: str, rows: int, columns: int, rank: int = RANK) -> tuple[torch.Tensor, torch.Tensor]:
    draw = generator(name)
    return torch.randn(rank, columns, generator=draw), torch.randn(rows, rank, generator=draw)


def authors_modules(naming: Naming) -> dict[str, tuple[int, int]]:
    """One module of each kind that the authors name, with its shape; the first line of a table for each."""
    modules: dict[str, tuple[int, int]] = {}
    taken: set[str] = set()
    for entry in naming.entries:
        if set(entry.diffusers) & taken or any(":" in each for each in entry.diffusers):
            continue
        taken |= set(entry.diffusers)
        name = numbers(entry.authors)
        modules[name] = size(naming, name, len(entry.diffusers))
    return modules


def write(path: Path, modules: dict[str, tuple[int, int]], start: str, *, kohya: bool, alpha: float | None) -> Path:
    """Write a file in a trainer's way."""
    tensors = {}
    down, up = ("lora_down", "lora_up") if kohya else ("lora_A", "lora_B")
    for name, (rows, columns) in modules.items():
        a, b = factors(name, rows, columns)
        key = f"{start}{flat(name) if start.endswith('_') else name}"
        tensors[f"{key}.{down}.weight"], tensors[f"{key}.{up}.weight"] = a, b
        if alpha is not None:
            tensors[f"{key}.alpha"] = torch.tensor(alpha)
    save_file(tensors, path)
    return path


def in_diffusers(mixin: str, path: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Module → factors that diffusers loads, scale multiplied in."""
    from diffusers import UNet2DConditionModel
    from diffusers.loaders import lora_pipeline

    cls = getattr(lora_pipeline, mixin)
    how = {"return_alphas": True} if mixin == "FluxLoraLoaderMixin" else {}
    if mixin == "StableDiffusionXLLoraLoaderMixin":
        how["unet_config"] = type("Config", (), {"layers_per_block": 2})()
    out = cls.lora_state_dict(str(path.parent), weight_name=path.name, local_files_only=True,
                              return_lora_metadata=True, **how)  # fmt: skip
    state, alphas = out[0], dict(out[1] or {}) if len(out) == 3 else {}
    assert UNet2DConditionModel is not None
    modules = {}
    for key in state:
        match = re.fullmatch(r"(.+?)(\.lora_A\.weight|(?:\.lora|_lora|\.lora_linear_layer)\.down\.weight)", key)
        if match is None:
            continue
        a = state[key].double().flatten(1)
        end = match[2].replace("lora_A", "lora_B").replace(".down.", ".up.")
        b = state[f"{match[1]}{end}"].double().flatten(1)
        scale = 1.0
        for name in (f"{match[1]}.alpha", f"{key.split('.lora.')[0]}.alpha"):
            if name in alphas:
                scale = float(alphas[name]) / a.shape[0]
        name = match[1].replace(".processor", "")
        if match[2].startswith("_lora"):
            name = name.removesuffix("to_out") + "to_out.0" if name.endswith("to_out") else name
        modules[name] = (a, b * scale)
    return modules


def probe(factors: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The change applied to fixed vectors, which a change of low rank cannot pass unless it is the same."""
    down, up = (each.double() for each in factors)
    return up @ (down @ vectors(down.shape[1]))


@cache
def vectors(width: int) -> torch.Tensor:
    return torch.randn(width, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
