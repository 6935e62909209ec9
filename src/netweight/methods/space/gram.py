"""Banks of adapters as points: inner products ⟨ΔW, ΔW'⟩ summed over modules, from the factors; ΔW is never formed.

The inner product does not depend on how a change is written as up @ down, nor on ranks, so principal components of it
do not either.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from netweight.core.digests import digest_config, digest_tensor
from netweight.core.names import nearest_names
from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import torch_generator
from netweight.errors import CorruptBlob, NameNotFound, UsageError
from netweight.nn.lora import AdapterStack
from netweight.store.bank.bank import AdapterBank
from netweight.store.checkpoint import open_checkpoint, write_checkpoint

# The most adapters that are read at a time, and the most bytes of them if they are large.
_READ, _READ_BYTES = 256, 1 << 25
# The most rows of products in memory at a time, each of n × rank numbers.
_ROWS = 2048
# The bytes of adapters in a block of the Gram matrix; memory contains two blocks.
_BYTES = 1 << 28


@final
class StackBank:
    """A bank in memory."""

    def __init__(self, names: Sequence[str], adapters: AdapterStack) -> None:
        if len(names) != len(adapters) or len(set(names)) != len(names):
            raise UsageError(f"There are {len(set(names))} different names for {len(adapters)} adapters.")
        self.names = list(names)
        self._parts = adapters.down, adapters.up, adapters.scale, adapters.ranks
        self.shapes = adapters.shapes
        self.base: str | None = None
        self.kernels: dict[str, tuple[int, ...]] = {}

    @property
    def digest(self) -> str:
        """Digest of names and tensors."""
        tensors = [{name: digest_tensor(value) for name, value in part.items()} for part in self._parts]
        return digest_config({"names": self.names, "tensors": tensors})

    def __len__(self) -> int:
        return len(self.names)

    @property
    def nbytes(self) -> int:
        """Bytes of the factors."""
        return sum(value.nbytes for part in self._parts[:2] for value in part.values())

    def stack(self, start: int, stop: int, modules: Collection[str] | None = None) -> AdapterStack:
        """The adapters from number `start` up to `stop`; views."""
        return AdapterStack(*(
            {name: value[start:stop] for name, value in part.items() if modules is None or name in modules}
            for part in self._parts
        ))  # fmt: skip


@final
class NormalizedBank:
    """A bank whose adapters are all as strong as their median: each change times a strength of its own."""

    def __init__(self, bank: AdapterBank | StackBank, strengths: Tensor) -> None:
        # `strengths` are of the first n adapters, shape `(n,)`, fp64.
        self.bank, self.strengths = bank, strengths
        self.names, self.shapes, self.digest, self.nbytes = bank.names, bank.shapes, bank.digest, bank.nbytes
        self.base, self.kernels = bank.base, bank.kernels

    def __len__(self) -> int:
        return len(self.strengths)

    def stack(self, start: int, stop: int, modules: Collection[str] | None = None) -> AdapterStack:
        """The adapters from number `start` up to `stop`, normalized."""
        return scaled(self.bank.stack(start, stop, modules), self.strengths[start:stop])


Bank: TypeAlias = AdapterBank | StackBank | NormalizedBank


def normalized(bank: AdapterBank | StackBank, progress: Progress = QUIET) -> tuple[NormalizedBank, float]:
    """A bank with all adapters at their median strength, and that strength, the norm of a change."""
    stacks = read_blocks(bank, len(bank), description="Strengths", progress=progress)
    norms = torch.cat([norms_of(stack) for _, stack in stacks]).sqrt()
    strength = float(norms.median())
    return NormalizedBank(bank, normalizing(norms, strength)), strength


def normalizing(norms: Tensor, strength: float) -> Tensor:
    """Return the factors that bring changes of these norms to a strength; 1 for a change of norm 0."""
    return torch.where(norms > 0, strength / norms.clamp_min(1e-300), 1.0)


def scaled(stack: AdapterStack, strengths: Tensor) -> AdapterStack:
    """Adapters times a strength each."""
    scale = {name: value * strengths for name, value in stack.scale.items()}
    return AdapterStack(stack.down, stack.up, scale, stack.ranks)


def stack_of(bank: Bank, start: int, stop: int, modules: Collection[str] | None = None) -> AdapterStack:
    """Read adapters, and refuse NaN and infinity."""
    stack = bank.stack(start, stop, modules)
    for part in (stack.down, stack.up, stack.scale):
        for module, values in part.items():
            good = torch.isfinite(values.reshape(len(values), -1)).all(dim=1)
            if not good.all():
                name = bank.names[start + int((~good).nonzero()[0])]
                raise UsageError(
                    f"The adapter {name!r} contains NaN or infinity in {module}.",
                    cure="Leave it out of the bank; its training has diverged.",
                )
    return stack


def read_blocks(
    bank: Bank,
    count: int,
    *,
    description: str,
    progress: Progress = QUIET,
    first: int = 0,
    modules: Collection[str] | None = None,
) -> Iterator[tuple[int, AdapterStack]]:
    """Read the adapters from number `first` up to `count` in blocks, each with the number of its first."""
    step = max(1, min(_READ, _READ_BYTES * len(bank) // max(bank.nbytes, 1)))
    with progress.task(description, count - first, unit="adapters") as task:
        for start in range(first, count, step):
            stack = stack_of(bank, start, min(start + step, count), modules)
            yield start, stack
            task.update(len(stack))


def check_modules(shapes: Mapping[str, tuple[int, int]], expected: Mapping[str, tuple[int, int]], *, what: str) -> None:
    """Refuse an adapter of other modules than a space's."""
    for module in sorted(set(expected) - set(shapes)):
        raise NameNotFound(f"{what} lacks {module!r}, which the space changes.", cure="Train it on the same modules.")
    for module in sorted(set(shapes) - set(expected)):
        near = nearest_names(module, list(expected), 1)[0]
        raise NameNotFound(
            f"{what} changes {module!r}, which the space does not change.", cure=f"The nearest is {near!r}."
        )
    for module, shape in shapes.items():
        if tuple(shape) != tuple(expected[module]):
            raise UsageError(
                f"{what} changes {module} in shape {tuple(shape)}, but the space changes it in shape "
                f"{tuple(expected[module])}.",
                cure="Use adapters of the base model of the space.",
            )


def inner_products(one: AdapterStack, other: AdapterStack) -> Tensor:
    """Inner products of every adapter of one stack with every one of another, shape `(n, m)`, fp64.

    Source: ⟨BA, B'A'⟩ = ⟨BᵀB', AA'ᵀ⟩; over n and m adapters two matrix products of n·rank × m·rank per module, in fp32
    (fp64 where factors are), summed over modules in fp64.
    """
    if one.shapes != other.shapes:
        raise UsageError("The adapters are of different modules or shapes: they belong to different models.")
    dtype = torch.promote_types(_precision(one), _precision(other))
    total = torch.zeros(len(one), len(other), dtype=torch.float64)
    for name in one.modules:
        scales = one.scale[name][:, None] * other.scale[name]
        total += scales * _unscaled_products(_factors(one, name, dtype), _factors(other, name, dtype))
    return total


def norms_of(stack: AdapterStack) -> Tensor:
    """Inner product of every adapter with itself, shape `(n,)`, fp64."""
    total = torch.zeros(len(stack), dtype=torch.float64)
    for name in stack.modules:
        ups, downs = _factors(stack, name, _precision(stack))
        total += stack.scale[name] ** 2 * ((ups @ ups.mT) * (downs @ downs.mT)).sum(dim=(1, 2))
    return total


def _precision(stack: AdapterStack) -> torch.dtype:
    wide = any(factor.dtype == torch.float64 for part in (stack.down, stack.up) for factor in part.values())
    return torch.float64 if wide else torch.float32


def _factors(stack: AdapterStack, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Factors of one module, each as `(n, rank, length)`."""
    return stack.up[name].to(dtype).mT, stack.down[name].to(dtype)


def _unscaled_products(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """Inner products of one module's changes without their scales, shape `(n, m)`."""
    (ups, downs), (count, rank) = one, one[0].shape[:2]
    others, other_rank = [factor.flatten(0, 1).T for factor in other], other[0].shape[1]
    step = max(1, _ROWS // rank)
    parts = []
    for start in range(0, count, step):
        stop = min(start + step, count)
        products = ups[start:stop].flatten(0, 1) @ others[0]
        products *= downs[start:stop].flatten(0, 1) @ others[1]
        parts.append(products.view(stop - start, rank, -1, other_rank).sum(dim=(1, 3)))
    return torch.cat(parts)


def fingerprints(bank: Bank, count: int | None = None) -> Tensor:
    """A number per adapter, to know it again by: its inner product with a random adapter; shape `(count,)`, fp64."""
    stacks = read_blocks(bank, len(bank) if count is None else count, description="Fingerprints")
    return torch.cat([_fingerprints(stack) for _, stack in stacks])


def _fingerprints(stack: AdapterStack) -> Tensor:
    total = torch.zeros(len(stack), dtype=torch.float64)
    for name, (rows, columns) in stack.shapes.items():
        draw = torch_generator(0, "fingerprint", name)
        left, right = (torch.randn(length, generator=draw, dtype=torch.float64) for length in (rows, columns))
        total += stack.scale[name] * ((left @ stack.up[name].double()) * (stack.down[name].double() @ right)).sum(dim=1)
    return total


def same_fingerprints(first: Tensor, second: Tensor) -> bool:
    """Return whether they are of the same adapters."""
    return torch.allclose(first, second, rtol=0, atol=1e-7 * float(second.abs().max()))


def gram_of(bank: Bank, *, folder: Path | None = None, progress: Progress = QUIET) -> tuple[Tensor, float]:
    """Inner products of all pairs, shape `(n, n)`, fp64, and the relative rounding error of the products."""
    # Reads each block of adapters once for every block after it; memory holds the matrix and two blocks.
    # `folder` keeps block rows; those of a bank that has grown since are used again: its names must begin with the
    # same ones, and adapters are compared by fingerprint.
    count, block = len(bank), _block(bank)
    gram = torch.zeros(count, count, dtype=torch.float64)
    precision = 0.0
    marks = None if folder is None else fingerprints(bank)
    with progress.task("Inner products", count * (count + 1) // 2, unit="pairs") as task:
        for start in block_rows(bank):
            later = stack_of(bank, start, min(start + block, count))
            rows = _block_row(bank, later, start, folder, marks)
            gram[start : start + len(later), : start + len(later)] = rows
            gram[:start, start : start + len(later)] = rows[:, :start].T
            precision += torch.finfo(_precision(later)).eps * len(later) / count
            task.update(len(later) * start + len(later) * (len(later) + 1) // 2)
    return gram, precision


def block_rows(bank: Bank) -> list[int]:
    """The first adapter of every block row."""
    return list(range(0, len(bank), _block(bank)))


def keep_block_row(bank: Bank, start: int, folder: Path) -> None:
    """Make one block row and keep it, unless it is there, in a worker; `gram_of` with the same folder takes it up."""
    stop = min(start + _block(bank), len(bank))
    _block_row(bank, stack_of(bank, start, stop), start, folder, fingerprints(bank, stop))


def _block_row(bank: Bank, later: AdapterStack, start: int, folder: Path | None, marks: Tensor | None) -> Tensor:
    """Inner products of a block with itself and everything before it, shape `(m, start + m)`; kept in the folder."""
    stop, step = start + len(later), _block(bank)
    if folder is not None and marks is not None:
        file = folder / f"gram-{start}-{stop}.safetensors"
        about = {"names": digest_config(list(bank.names[:stop]))}
        if file.exists():
            record, tensors = read_tensors(file)
            if record == about and same_fingerprints(marks[:stop], tensors["fingerprints"]):
                return tensors["products"]
    earlier = [inner_products(later, stack_of(bank, first, first + step)) for first in range(0, start, step)]
    products = torch.cat([*earlier, inner_products(later, later)], dim=1)
    if folder is not None and marks is not None:
        write_checkpoint(file, about, {"products": products, "fingerprints": marks[:stop]}.items())
    return products


def _block(bank: Bank) -> int:
    """Adapters that are read at a time: as many as memory should hold, since earlier ones are read again."""
    one = bank.stack(0, 1)
    size = sum(factor.nbytes for part in (one.down, one.up) for factor in part.values())
    return max(16, min(2048, _BYTES // size))


def read_tensors(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a part of a fit: its account, and its tensors."""
    try:
        with open_checkpoint(path) as (about, store, names):
            return about, {name: store.get(name, check=True) for name in names}
    except CorruptBlob as error:
        raise CorruptBlob(
            f"{error.reason} The file belongs to an interrupted fit.",
            cure=f"Delete {path.parent} to start again from the beginning.",
        ) from error
