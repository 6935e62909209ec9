"""How a model is spread over processes: replicated by DDP, sharded by FSDP2, or in one process. `training.py` asks."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from netweight.errors import Unsupported
from netweight.methods.immunize.ranks import Ranks
from netweight.methods.immunize.sharded import is_sharded, trained_weights, units

__all__ = ["Spread", "spread_of"]


@final
@dataclass(frozen=True)
class Spread:
    """A model and who shares it.

    Attributes:
        model: Without DDP's wrapper. Its gradients are to be averaged by who trains it; those of sharded weights
            already are.
        ranks: The processes that train it together.
        device: Where it computes.
    """

    model: nn.Module
    ranks: Ranks
    device: torch.device


def spread_of(model: nn.Module) -> Spread:
    """Find out how a model is spread.

    A model that is neither wrapped by `DistributedDataParallel` nor sharded by `fully_shard` is this process's own,
    also where `torch.distributed` runs.

    Args:
        model: As it is trained.

    Raises:
        Unsupported: It is spread in another way.
    """
    _refuse_other_ways(model)
    if isinstance(model, DistributedDataParallel):
        device = next(model.parameters()).device
        return Spread(model.module, Ranks.of(model.process_group, device), device)
    trained_weights(model)  # from here on parts are parts
    shards = [value for value in model.parameters() if is_sharded(value)]
    if not shards:
        first = next(model.parameters(), None)
        device = torch.device("cpu") if first is None else first.device
        return Spread(model, Ranks(device=device), device)
    return _sharded(model, shards)


def _sharded(model: nn.Module, shards: list[Any]) -> Spread:
    if model not in units(model):
        raise Unsupported(
            f"Weights of {type(model).__name__} are sharded, but not by fully_shard on the whole model.",
            cure="Call fully_shard on every block and then on the model; tensor parallelism is not supported.",
        )
    meshes = {value.device_mesh for value in shards}
    mesh = meshes.pop()
    if meshes or mesh.ndim != 1:
        raise Unsupported(
            "The model is sharded over several meshes of processes, or one of several dimensions.",
            cure="Shard it over one mesh of one dimension, the default of fully_shard.",
        )
    device = shards[0].to_local().device
    if device.type != mesh.device_type:
        raise Unsupported(
            f"The model's parts are kept on {device.type} and computed on {mesh.device_type}.",
            cure="Leave fully_shard's offload_policy out.",
        )
    return Spread(model, Ranks.of(mesh.get_group(), device), device)


def _refuse_other_ways(model: nn.Module) -> None:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for name, module in model.named_modules():
        where = f"at {name!r}" if name else "around the model"
        if isinstance(module, nn.DataParallel) or (isinstance(module, DistributedDataParallel) and name):
            raise Unsupported(
                f"There is a {type(module).__name__} {where}.",
                cure="Wrap the whole model by DistributedDataParallel, or shard it by fully_shard.",
            )
        if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
            raise Unsupported(
                f"There is a FullyShardedDataParallel {where}, FSDP's first version.",
                cure="Use torch.distributed.fsdp.fully_shard.",
            )
