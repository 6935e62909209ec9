"""Saving models with compressed weights as compressed folders, for transformers, diffusers and Trainer."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from netweight.core.atomic_writes import publish
from netweight.core.lazy import extra
from netweight.errors import Unsupported, UsageError
from netweight.methods.compress.compress_folder import compress_folder
from netweight.methods.compress.quantized import foreign_method
from netweight.methods.compress.runtime.model_source import ModelSource
from netweight.methods.compress.runtime.tensor import CompressedTensor
from netweight.plugins.loading import NetweightConfig
from netweight.store.choices import Level

with extra("llm", "This plug-in needs transformers 5"):
    from huggingface_hub import HfApi, split_torch_state_dict_into_shards


def save_folder(
    model: nn.Module,
    target: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    write_rest: Callable[[Path], object],
    *,
    name: str = "model.safetensors",
    variant: str | None = None,
    max_shard_size: int | str = "50GB",
    push: Mapping[str, Any] | None = None,
) -> None:
    """Write what `compress_folder` makes of the folder that the dense model would save, one tensor after another."""
    # `write_rest` writes the files beside the weights; `push` holds options for the hub, if the folder goes there, too.
    target = Path(target)
    if target.is_file():
        raise UsageError(f"{target} is a file.", cure="Name a folder.")
    target.parent.mkdir(parents=True, exist_ok=True)
    weights: Iterable[torch.Tensor] = model.parameters()
    levels = (weight.stored.level for weight in weights if isinstance(weight, CompressedTensor))
    level: Level = next(levels, "default")
    files, indexes = _sources(tensors, level, name, variant, max_shard_size)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as beside:
        plain, compressed = Path(beside) / "plain", Path(beside) / "net"
        plain.mkdir()
        write_rest(plain)
        for file, content in indexes.items():
            (plain / file).write_text(content, encoding="utf-8")
        compress_folder(plain, compressed, level=level, sources=files)
        _move_into(compressed, target, f"{name.removesuffix('.safetensors')}*.safetensors*")
    if push is not None:
        _push(target, **push)


def refuse_quantized(model: nn.Module, config: Any) -> None:
    """Refuse to save a model of which another library holds weights quantized, which only that library can save."""
    settings = getattr(config, "quantization_config", None)
    if settings is None or isinstance(settings, NetweightConfig):
        return
    method = foreign_method({"quantization_config": settings if isinstance(settings, Mapping) else settings.to_dict()})
    if method is not None:
        raise Unsupported(
            f"This {type(model).__name__} is quantized by {method}, and some of its other weights are compressed: a "
            "compressed folder cannot contain both.",
            cure="Call netweight.decompress_(model) before save_pretrained.",
        )


def untied(tensors: Mapping[str, torch.Tensor], tied: Container[str] = ()) -> dict[str, torch.Tensor]:
    """Each tensor once, if it can be under a name that is not among the `tied`."""
    names: dict[Any, str] = {}
    for name in sorted(tensors, key=lambda name: name in tied):
        names.setdefault(identity(tensors[name]), name)
    chosen = set(names.values())
    return {name: tensor for name, tensor in tensors.items() if name in chosen}


def identity(tensor: torch.Tensor) -> Any:
    """The same for tied weights, and only for them."""
    if isinstance(tensor, CompressedTensor):
        return id(tensor) if tensor.views else id(tensor.stored)
    return (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else id(tensor)


def _sources(
    tensors: Mapping[str, torch.Tensor], level: Level, name: str, variant: str | None, max_shard_size: int | str
) -> tuple[dict[str, ModelSource], dict[str, str]]:
    """The weights files that a dense model would have, by name, and the index by its name if there are several."""
    sizes = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    stem = name.removesuffix(".safetensors") + (f".{variant}" if variant else "")
    split = split_torch_state_dict_into_shards(
        sizes, filename_pattern=stem + "{suffix}.safetensors", max_shard_size=max_shard_size
    )
    files = {
        file: ModelSource({one: tensors[one] for one in names}, level)
        for file, names in split.filename_to_tensors.items()
    }
    if not split.is_sharded:
        return files, {}
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    file = f"{name}.index.{variant}.json" if variant else f"{name}.index.json"
    return files, {file: json.dumps(index, indent=2, sort_keys=True) + "\n"}


def _push(
    folder: Path,
    repo_id: str | None = None,
    private: bool | None = None,
    token: Any = None,
    commit_message: str = "Upload model",
    create_pr: bool = False,
    **_: Any,
) -> None:
    api = HfApi(token=token)
    made = api.create_repo(repo_id or folder.name, exist_ok=True, private=private).repo_id
    api.upload_folder(repo_id=made, folder_path=folder, commit_message=commit_message, create_pr=create_pr)


def _move_into(folder: Path, target: Path, replaced: str) -> None:
    """Put a compressed folder's files into a folder that may hold others, the configuration last."""
    if not target.exists():
        publish(folder, target)
        return
    files = sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.name == "config.json")
    for old in target.glob(replaced):
        old.unlink()
    for file in files:
        place_of = target / file.relative_to(folder)
        place_of.parent.mkdir(parents=True, exist_ok=True)
        publish(file, place_of)
