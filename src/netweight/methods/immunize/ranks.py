"""Processes that share a batch: what they tell each other so that a loss is that of the whole batch.

Every process computes a loss on its own rows such that the mean over the processes of all losses is the loss of the
whole batch, and the mean of all gradients its gradient. So does PyTorch: DDP and FSDP2 average gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from netweight.errors import NetweightError

__all__ = ["ALONE", "Ranks"]

T = TypeVar("T")


@final
@dataclass(frozen=True)
class Ranks:
    """The processes of a group, of which this is one.

    What these methods do, all processes do together and in one order; where one is alone, nothing is sent.

    Attributes:
        size: How many there are.
        rank: Which one this is, from 0.
        device: Where tensors must be that are sent.
        group: Of `torch.distributed`; None stands for all processes.
    """

    size: int = 1
    rank: int = 0
    device: torch.device | str = "cpu"
    group: Any = None

    @classmethod
    def of(cls, group: Any, device: torch.device) -> Ranks:
        """Return this process's place in a group, None for all processes.

        Args:
            group: A process group of `torch.distributed`.
            device: Where this process computes.
        """
        distributed = torch.distributed
        return cls(distributed.get_world_size(group), distributed.get_rank(group), device, group)

    @torch.no_grad()
    def sum(self, value: Tensor) -> Tensor:
        """The sum over all processes of a tensor of one shape, without a gradient.

        Args:
            value: Any shape.
        """
        total = value.detach().to(self.device, copy=True)
        if self.size > 1:
            torch.distributed.all_reduce(total, group=self.group)
        return total

    def mean(self, value: Tensor) -> Tensor:
        """The mean over all processes of a tensor of one shape, without a gradient.

        Args:
            value: Any shape.
        """
        return self.sum(value) / self.size

    def counts(self, count: int) -> list[int]:
        """What number each process has, by rank.

        Args:
            count: This process's number.
        """
        numbers = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        numbers[self.rank] = count
        found: list[int] = self.sum(numbers).tolist()
        return found

    def rows(self, own: Tensor, counts: Sequence[int]) -> Tensor:
        """All processes' rows, by rank, in the graph.

        Every process computes the same loss from all rows. The mean of their gradients is to be the loss's gradient,
        so that of its own rows each process takes as often as there are processes.

        Args:
            own: This process's rows, shape `(n, ...)`, of one dtype and width everywhere.
            counts: How many rows each process has.

        Returns:
            Shape `(sum of counts, ...)`.
        """
        if self.size == 1:
            return own
        rows: Tensor = _Rows.apply(own, tuple(counts), self)  # type: ignore[no-untyped-call]
        return rows

    def average(self, gradients: Iterable[Tensor]) -> None:
        """Replace tensors of one shape everywhere by their means over all processes.

        Args:
            gradients: Of the same shapes in the same order everywhere; changed in place.
        """
        if self.size > 1:
            for gradient in gradients:
                torch.distributed.all_reduce(gradient, group=self.group)
                gradient.div_(self.size)

    def spread(self, value: Tensor | None, like: Tensor) -> Tensor:
        """Give everyone the first process's tensor.

        Args:
            value: The tensor, of the shape and dtype of `like`; None on all other processes.
            like: Of its shape and dtype.

        Returns:
            The tensor, on every process.
        """
        if self.size == 1:
            assert value is not None
            return value
        sent = torch.empty(like.shape, dtype=like.dtype, device=self.device)
        if value is not None:
            sent.copy_(value)
        torch.distributed.broadcast(sent, group=self.group, group_src=0)
        return sent

    def first(self, act: Callable[[], T]) -> T:
        """Do something in the first process only, and give everyone its result, which pickles.

        Args:
            act: What to do.

        Returns:
            What `act` returned.

        Raises:
            NetweightError: What it raised, on all processes.
        """
        return self.first_takes((), lambda _: act())

    def first_takes(self, things: Iterable[Any], take: Callable[[Iterator[Any]], T]) -> T:
        """As `first`, of things that all processes make together, one by one.

        However early the first process is done with them, or fails, all are made everywhere, so that nobody waits.

        Args:
            things: Made on every process.
            take: Called in the first process, with an iterator over them.

        Returns:
            What `take` returned.
        """
        made = iter(things)
        if self.size == 1:
            return take(made)
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                answer[0] = take(made)
            except (NetweightError, OSError) as error:
                answer[1] = error
        for _ in made:
            pass
        failure = answer[1]
        if failure is not None:
            answer[1] = (type(failure), *_words(failure))
        place = torch.device(self.device)
        torch.distributed.broadcast_object_list(answer, group=self.group, group_src=0, device=place)
        if failure is not None:
            raise failure
        if answer[1] is not None:
            kind, message, cure = answer[1]
            raise kind(message, cure=cure) if issubclass(kind, NetweightError) else kind(message)
        result: T = answer[0]
        return result


def _words(error: Exception) -> tuple[str, str | None]:
    return (error.reason, error.cure) if isinstance(error, NetweightError) else (str(error), None)


ALONE = Ranks()
"""One process with the whole batch."""


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, counts: tuple[int, ...], ranks: Ranks) -> Tensor:
        ctx.size, ctx.start, ctx.count = ranks.size, sum(counts[: ranks.rank]), len(own)
        most = max(counts)
        padded = own.new_zeros(most, *own.shape[1:])
        padded[: len(own)] = own
        # As bytes: not every backend knows every narrow dtype.
        sent = padded.view(most, -1).view(torch.uint8)
        received = [torch.empty_like(sent) for _ in counts]
        torch.distributed.all_gather(received, sent, group=ranks.group)
        pieces = [
            piece.view(own.dtype).view(padded.shape)[:count] for piece, count in zip(received, counts, strict=True)
        ]
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad[ctx.start : ctx.start + ctx.count] * ctx.size, None, None
