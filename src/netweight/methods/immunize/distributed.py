"""Processes that share a batch: the messages by which a loss is that of the whole batch.

Every process computes a loss on its own rows such that the mean over the processes of all losses is the loss of the
whole batch, and the mean of all gradients its gradient. So does PyTorch: DDP and FSDP2 average gradients.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from netweight.errors import NetweightError, Unsupported

T = TypeVar("T")


@final
@dataclass(frozen=True)
class ProcessGroup:
    """The processes of a group, of which this is one."""

    # What these methods do, all processes do together and in one order; where one is alone, nothing is sent.

    size: int = 1
    """Number of processes."""
    rank: int = 0
    """Number of this process, from 0."""
    device: torch.device | str = "cpu"
    """Device of tensors that are sent."""
    handle: Any = None
    """Torch's own; None for all processes."""

    @classmethod
    def of(cls, handle: Any, device: torch.device) -> ProcessGroup:
        """Return this process's place in a group of torch, None for all processes."""
        distributed = torch.distributed
        return cls(distributed.get_world_size(handle), distributed.get_rank(handle), device, handle)

    def part(self, rows: Sequence[int]) -> list[int]:
        """This process's part of a batch's rows: neighbors, as many as others have or one fewer; may be none."""
        start, end = (len(rows) * rank // self.size for rank in (self.rank, self.rank + 1))
        return list(rows[start:end])

    @torch.no_grad()
    def sum(self, value: Tensor) -> Tensor:
        """The sum over all processes of a tensor of one shape, without a gradient."""
        total = value.detach().to(self.device, copy=True)
        if self.size > 1:
            torch.distributed.all_reduce(total, group=self.handle)
        return total

    def mean(self, value: Tensor) -> Tensor:
        """The mean over all processes of a tensor of one shape, without a gradient."""
        return self.sum(value) / self.size

    def counts(self, count: int) -> list[int]:
        """Return the number of each process, by rank."""
        numbers = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        numbers[self.rank] = count
        counts: list[int] = self.sum(numbers).tolist()
        return counts

    def rows(self, own: Tensor, counts: Sequence[int]) -> Tensor:
        """All processes' rows, by rank, in the graph."""
        # Every process computes the same loss from all rows. The mean of their gradients is to be the loss's gradient,
        # so that of its own rows each process takes as often as there are processes.
        if self.size == 1:
            return own
        rows: Tensor = _GatherRows.apply(own, tuple(counts), self)  # type: ignore[no-untyped-call]
        return rows

    def average(self, gradients: Iterable[Tensor]) -> None:
        """Replace tensors of one shape everywhere by their means over all processes."""
        if self.size > 1:
            for gradient in gradients:
                torch.distributed.all_reduce(gradient, group=self.handle)
                gradient.div_(self.size)

    def spread(self, value: Tensor | None, like: Tensor) -> Tensor:
        """Give everyone the first process's tensor."""
        if self.size == 1:
            assert value is not None
            return value
        sent = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        if value is not None:
            sent.copy_(value)
        torch.distributed.broadcast(sent, group=self.handle, group_src=0)
        return sent

    def first(self, act: Callable[[], T]) -> T:
        """Do something in the first process only, and give everyone its result, which pickles."""
        return self.first_consuming((), lambda _: act())

    def first_consuming(self, things: Iterable[Any], consume: Callable[[Iterator[Any]], T]) -> T:
        """As `first`, of things that all processes make together, one by one."""
        # However early the first process is done with them, or fails, all are made everywhere, so that nobody waits.
        made = iter(things)
        if self.size == 1:
            return consume(made)
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                answer[0] = consume(made)
            except (NetweightError, OSError) as error:
                answer[1] = error
        for _ in made:
            pass
        failure = answer[1]
        answer[1] = _sendable(failure)
        place = torch.device(self.device)
        torch.distributed.broadcast_object_list(answer, group=self.handle, group_src=0, device=place)
        _raise(failure, answer[1])
        result: T = answer[0]
        return result

    def check(self, inspect: Callable[[], None]) -> None:
        """Look at what each process has; an error of one is raised by all."""
        failure, failures = None, [None] * self.size
        try:
            inspect()
        except NetweightError as error:
            failure = error
        if self.size > 1:
            torch.distributed.all_gather_object(failures, _sendable(failure), group=self.handle)
        _raise(failure, next(filter(None, failures), None))


_Sent = tuple[type[Exception], str, str | None]


def _sendable(error: Exception | None) -> _Sent | None:
    if isinstance(error, NetweightError):
        return type(error), error.reason, error.cure
    return None if error is None else (type(error), str(error), None)


def _raise(own: Exception | None, sent: _Sent | None) -> None:
    """Raise this process's error, or else another's."""
    if own is not None:
        raise own
    if sent is not None:
        kind, message, cure = sent
        raise kind(message, cure=cure) if issubclass(kind, NetweightError) else kind(message)


# One process with the whole batch.
ALONE = ProcessGroup()


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, counts: tuple[int, ...], group: ProcessGroup) -> Tensor:
        ctx.size, ctx.start, ctx.count = group.size, sum(counts[: group.rank]), len(own)
        most = max(counts)
        padded = own.new_zeros(most, *own.shape[1:])
        padded[: len(own)] = own
        # As bytes: not every backend knows every narrow dtype.
        sent = padded.view(most, -1).view(torch.uint8)
        received = [torch.empty_like(sent) for _ in counts]
        torch.distributed.all_gather(received, sent, group=group.handle)
        pieces = [
            piece.view(own.dtype).view(padded.shape)[:count] for piece, count in zip(received, counts, strict=True)
        ]
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad[ctx.start : ctx.start + ctx.count] * ctx.size, None, None


@final
@dataclass(frozen=True)
class Spread:
    """A model and who shares it."""

    model: nn.Module
    """Without DDP's wrapper."""
    group: ProcessGroup
    """The processes that train it together."""
    device: torch.device
    """Device of the computation."""


def spread_of(model: nn.Module) -> Spread:
    """Find out how a model is spread."""
    # A model that is neither wrapped by `DistributedDataParallel` nor sharded by `fully_shard` is this process's own,
    # also where `torch.distributed` runs.
    _refuse_other_ways(model)
    if isinstance(model, DistributedDataParallel):
        device = next(model.parameters()).device
        return Spread(model.module, ProcessGroup.of(model.process_group, device), device)
    # The call reshards weights that a forward pass gathered, so that their parts are found below.
    trained_weights(model)
    shards = [value for value in model.parameters() if is_sharded(value)]
    if not shards:
        first = next(model.parameters(), None)
        device = torch.device("cpu") if first is None else first.device
        return Spread(model, ProcessGroup(device=device), device)
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
    return Spread(model, ProcessGroup.of(mesh.get_group(), device), device)


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


def is_sharded(value: Tensor) -> bool:
    """Return whether a tensor is a part of one that is spread over processes."""
    # A program that has not imported the module has no such tensor.
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(value, tensors.DTensor)


def units(model: nn.Module) -> list[Any]:
    """The modules that FSDP2 shards, each of which gathers its weights when it runs."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def trained_weights(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that require a gradient; of sharded ones the parts."""
    # To be asked before the model runs: FSDP2 leaves the outermost weights gathered after a forward pass, and these are
    # other tensors.
    for unit in units(model):
        unit.reshard()
    return [value for value in model.parameters() if value.requires_grad]


@torch.no_grad()
def local(value: Tensor) -> Tensor:
    """This process's part, in the same memory."""
    part: Tensor = value.to_local() if is_sharded(value) else value  # type: ignore[attr-defined]
    return part


@torch.no_grad()
def whole(value: Tensor) -> Tensor:
    """The whole, without a gradient."""
    value = value.detach()
    full: Tensor = value.full_tensor() if is_sharded(value) else value  # type: ignore[attr-defined]
    return full


@torch.no_grad()
def sharded_like(full: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, equal on all processes, as the part of it that `like` holds of its own."""
    full = full.to(like.device)
    if not is_sharded(like):
        return full
    from torch.distributed.tensor import distribute_tensor

    spread: Any = like
    return distribute_tensor(full, spread.device_mesh, spread.placements, src_data_rank=None)


@torch.no_grad()
def put(target: Tensor, full: Tensor) -> None:
    """Copy a whole tensor, equal on all processes, into one that may be sharded."""
    target.copy_(sharded_like(full, target))


def average_gradients(parameters: Iterable[Tensor], group: ProcessGroup) -> None:
    """Average gradients over all processes; FSDP has averaged those of its shards."""
    if group.size > 1:
        complete = [value for value in parameters if not is_sharded(value)]
        for value in complete:
            # Other processes may have a gradient of this weight.
            if value.grad is None:
                value.grad = torch.zeros_like(value)
        group.average(value.grad for value in complete)  # type: ignore[misc]


def common_norm(values: Sequence[Tensor], group: ProcessGroup) -> float:
    """The Euclidean norm of all values together; parts are added up over the processes."""
    complete = [value for value in values if not is_sharded(value)]
    norm = float(nn.utils.get_total_norm(complete)) if complete else 0.0
    if len(complete) == len(values):
        return norm
    parts = [local(value).float().square().sum() for value in values if is_sharded(value)]
    return math.hypot(norm, float(group.sum(torch.stack(parts).sum()).sqrt()))


@contextmanager
def gathered(modules: Iterable[nn.Module], dtype: torch.dtype) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Let modules compute with whole weights, although their own are parts."""
    # Within the block call them by `run`.
    used: dict[Tensor, tuple[Tensor, Tensor]] = {}
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for owner in (inner for module in modules for inner in module.modules()):
            for name, value in list(owner._parameters.items()):
                if value is None:
                    continue
                if value not in used:
                    used[value] = _gather(value, dtype) if is_sharded(value) else (value, value)
                if is_sharded(value):
                    replaced.append((owner, name, value))
                    owner._parameters[name] = used[value][0]  # type: ignore[assignment]  # as FSDP itself does it
        trained = [pair for value, pair in used.items() if value.requires_grad]
        yield [leaf for leaf, _ in trained], [graph for _, graph in trained]
    finally:
        for owner, name, value in replaced:
            owner._parameters[name] = value


def run_gathered(module: nn.Module, given: Tensor) -> Tensor:
    """Call a module; one that FSDP takes for a unit of its own without FSDP's hooks, which would put the parts back."""
    result: Tensor = module.forward(given) if module in units(module) else module(given)
    return result


def _gather(value: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    from torch.distributed.tensor import Partial

    # Each process has a gradient of its own by the whole; FSDP takes their mean, and so does this. The sum is divided
    # beforehand, because not every backend knows means.
    graph: Tensor = _Divided.apply(value.full_tensor(grad_placements=[Partial()]), value.device_mesh.size())  # type: ignore[no-untyped-call]
    narrow = value.dtype == torch.float32 and dtype.itemsize < 4
    leaf = graph.detach().to(dtype) if narrow else graph.detach()
    return leaf.requires_grad_(value.requires_grad), graph


class _Divided(torch.autograd.Function):
    """The same tensor, with a part of the gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, by: int) -> Tensor:
        ctx.by = by
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad / ctx.by, None
