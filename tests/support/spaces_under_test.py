"""Small banks of random adapters, and the dense algebra that a space is compared with."""

import torch

from netweight.methods.space.gram import StackBank
from netweight.nn.lora import Adapter, AdapterStack, LowRank

SHAPES = {"unet.mid.to_q": (7, 5), "unet.mid.to_v": (6, 9), "unet.up.to_q": (4, 4)}


def random_adapters(count, *, seed=0, ranks=(1, 2, 3), dtype=torch.float64, shapes=SHAPES):
    """Adapters of mixed ranks and scales, around a common mean."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    common = {name: (normal(1, columns), normal(rows, 1)) for name, (rows, columns) in shapes.items()}
    made = []
    for number in range(count):
        rank = ranks[number % len(ranks)]
        factors = {}
        for name, (rows, columns) in shapes.items():
            down, up = common[name]
            down = down.repeat(rank, 1) + normal(rank, columns)
            up = up.repeat(1, rank) + normal(rows, rank)
            factors[name] = LowRank(down.to(dtype), up.to(dtype), 0.5 + number % 3)
        made.append(Adapter(factors))
    return made


def sharing_adapters(count, *, seed=0, rank=2, shapes=SHAPES, same_scale=False):
    """Adapters whose down factors have the same rows, each turned in its own way; fp32, of one rank."""
    draw = torch.Generator().manual_seed(seed)
    shared = {name: torch.randn(rank, columns, generator=draw) for name, (_, columns) in shapes.items()}
    made = []
    for number in range(count):
        factors = {}
        for name, (rows, _) in shapes.items():
            turn = torch.randn(rank, rank, generator=draw) + 3 * torch.eye(rank)
            up = torch.randn(rows, rank, generator=draw) + 1
            factors[name] = LowRank(turn @ shared[name], up, 1.0 if same_scale else 0.5 + number % 3)
        made.append(Adapter(factors))
    return made


def bank_of(adapters):
    return StackBank([f"person-{number}" for number in range(len(adapters))], AdapterStack.of(adapters))


def dense(adapters):
    """Changes as rows of a matrix, modules in sorted order."""
    rows = [torch.cat([one.factors[name].dense().flatten() for name in one.modules]) for one in adapters]
    return torch.stack(rows).double()


def flat(changes):
    """Changes by module as one row, or as rows."""
    parts = [changes[name].flatten(-2) for name in sorted(changes)]
    return torch.cat(parts, dim=-1)


def regauged(adapters, *, seed=1):
    """The same changes, written otherwise: down → G down, up → up G⁻¹."""
    draw = torch.Generator().manual_seed(seed)

    def written(change):
        gauge = torch.randn(change.rank, change.rank, generator=draw, dtype=torch.float64)
        gauge += 3 * torch.eye(change.rank)
        return LowRank(gauge @ change.down, change.up @ gauge.inverse(), change.scale)

    return [Adapter({name: written(change) for name, change in one.factors.items()}) for one in adapters]
