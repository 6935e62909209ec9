"""Checkpoints of training in one compressed file, to resume exactly after a kill.

The file is a safetensors file as `netweight.store` writes it: weights go in as they are in memory, without being
decoded, dense tensors and optimizer states are encoded, the rest is JSON. It appears whole or not at all. Used by
training loops.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from netweight import codec
from netweight.codec.header import torch_dtype
from netweight.errors import Unsupported, UsageError
from netweight.methods.compress.runtime.fsdp import local_part
from netweight.methods.compress.runtime.tensor import CompressedTensor
from netweight.store import StoreWriter, open_store

_ABOUT = "netweight.checkpoint"


def save_checkpoint(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: dict[str, Any] | None = None,
    base: str | Path | None = None,
) -> None:
    """Save a model and an optimizer; an older checkpoint at the same path is replaced when the new one is complete.

    Args:
        path: The file, usually `*.safetensors`.
        model: Any module, compressed or dense or both.
        optimizer: `LayerwiseOptimizer` or any torch optimizer whose state dict holds tensors, numbers, text and lists.
        extra: What else to keep, such as the step and a scheduler's state dict: anything that JSON can hold.
        base: An earlier checkpoint of the run, from which differences are stored; it is needed to load this one, beside
            it or where the variable NETWEIGHT_BASE says.

    Raises:
        OutputFailed: The file could not be written; the older one is untouched.
        LayerwiseConflict: Gradients are being accumulated.
        UsageError: `extra` or the optimizer's state holds something that JSON cannot.
        Unsupported: The model is sharded: no process has all of it.
    """
    _refuse_shards(model)
    written: dict[int, str] = {}
    tied: dict[str, str] = {}
    with StoreWriter(path, overwrite=True, base=base) as writer:
        for name, value in model.state_dict().items():
            if isinstance(value, CompressedTensor):
                if id(value.stored) in written:
                    tied[name] = written[id(value.stored)]
                    continue
                written[id(value.stored)] = name
                writer.add_blob(f"model.{name}", value.stored.blob)
            else:
                writer.add(f"model.{name}", value)

        def plain(value: Any, place: str) -> Any:
            if isinstance(value, torch.Tensor):
                if isinstance(value, CompressedTensor):
                    writer.add_blob(place, value.stored.blob)
                else:
                    writer.add(place, value)
                return {"tensor": place}
            if isinstance(value, dict):
                return {"items": [[key, plain(element, f"{place}.{key}")] for key, element in value.items()]}
            if isinstance(value, (list, tuple)):
                kind = "tuple" if isinstance(value, tuple) else "list"
                return {kind: [plain(element, f"{place}.{i}") for i, element in enumerate(value)]}
            return {"value": value}

        state = plain(optimizer.state_dict(), "optimizer") if optimizer is not None else None
        try:
            about = json.dumps({"tied": tied, "optimizer": state, "extra": extra or {}})
        except TypeError as error:
            raise UsageError(f"The checkpoint {path} cannot contain this: {error}.") from error
        writer.add(_ABOUT, numpy.frombuffer(about.encode(), numpy.uint8))


def load_checkpoint(
    path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Load what `save_checkpoint` wrote into a model and an optimizer of the same structure.

    Args:
        path: The file.
        model: Module with the same parameters and buffers; whether they are compressed need not be the same.
        optimizer: Made for this model as the saved one was made for its own; None leaves the optimizer's state.

    Returns:
        What was saved as `extra`.

    Raises:
        UsageError: The file is not a checkpoint, or contains no optimizer.
        CorruptBlob: A tensor does not match its digest.
        RuntimeError: The model has other parameters, from `load_state_dict`.
        Unsupported: The model is sharded.
    """
    _refuse_shards(model)
    with open_store(path) as store:
        if _ABOUT not in store.names():
            raise UsageError(f"{path} is not a checkpoint of training.", cure="Load model folders with their library.")
        about = json.loads(bytes(store.get(_ABOUT, check=True).numpy()))
        if optimizer is not None and about["optimizer"] is None:
            raise UsageError(
                f"The checkpoint {path} contains no optimizer.", cure="Load without an optimizer, and create a new one."
            )
        prefix = "model."
        own = model.state_dict()
        names = {name.removeprefix(prefix) for name in store.names() if name.startswith(prefix)} | set(about["tied"])
        missing, surplus = sorted(own.keys() - names), sorted(names - own.keys())
        if missing or surplus:
            raise UsageError(
                f"The checkpoint {path} is of another model: it does not have {missing[:5]}, but it has {surplus[:5]}.",
                cure="Create the model with the configuration with which the checkpoint was saved.",
            )
        places = {name: prefix + about["tied"].get(name, name) for name in own}
        # All tensors are checked before the first weight changes.
        for name, target in own.items():
            saved = store.info(places[name])
            if saved.shape != tuple(target.shape) or torch_dtype(saved.dtype) != target.dtype:
                raise UsageError(
                    f"{name} is {torch_dtype(saved.dtype)} of shape {saved.shape} in {path}, and {target.dtype} of "
                    f"shape {tuple(target.shape)} in the model. Nothing was loaded.",
                    cure="Create the model with the configuration with which the checkpoint was saved.",
                )
        with torch.no_grad():
            # Tensors are loaded one at a time, which needs the memory of one dense weight.
            for name, target in own.items():
                dense, raw = store.get(places[name], check=True), store.raw(places[name])
                if isinstance(target, CompressedTensor) and codec.is_lossy(raw):
                    # The stored bytes are used as they are, because rounded values cannot be encoded to the same bytes
                    # again.
                    target.stored.adopt(raw)
                else:
                    target.copy_(dense)

        def tensors(value: Any) -> Any:
            ((kind, content),) = value.items()
            if kind == "tensor":
                return store.get(content, check=True).clone()
            if kind == "items":
                return {key: tensors(element) for key, element in content}
            if kind in ("list", "tuple"):
                return (tuple if kind == "tuple" else list)(tensors(element) for element in content)
            return content

        if optimizer is not None:
            optimizer.load_state_dict(tensors(about["optimizer"]))
    extra: dict[str, Any] = about["extra"]
    return extra


def _refuse_shards(model: nn.Module) -> None:
    for name, value in model.state_dict().items():
        if local_part(value) is not value:
            raise Unsupported(
                f"{name} is a shard, but a checkpoint in one file contains whole weights.",
                cure="Use torch.distributed.checkpoint for sharded models, or gather the weights first.",
            )
