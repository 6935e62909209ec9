"""What is known of how good a fit is."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol, Self, final

import torch
from torch import Tensor

from netweight.core.engines import Engine
from netweight.core.progress import Progress
from netweight.core.runs import map_runs
from netweight.core.seeds import torch_generator
from netweight.errors import NetweightError, UsageError
from netweight.methods.space.gram import (
    Bank,
    block_rows,
    gram_of,
    inner_products,
    make_block_row,
    norms_of,
    stack_of,
    stacks_of,
)
from netweight.methods.space.settings import FitConfig
from netweight.nn.basis import MOST_DUAL, Basis, BasisFit, Halves, fit_gram, fit_matrix, halves_of, orthonormality
from netweight.nn.lora import Adapter, LowRank
from netweight.nn.stacked_lora import AdapterStack
from netweight.nn.streaming_pca import ShardSum, fit_shards, fit_streaming
from netweight.store.bank.bank import AdapterBank


@final
@dataclass(frozen=True)
class Accuracy:
    """A fit's account of itself.

    Attributes:
        solver: "dual" captures all that so many components can; "streaming" nearly.
        captured: Share of the variance along the components.
        orthonormality: The greatest magnitude in C Cᵀ − I of the components C, or by inner products of the eigenvectors
            that they are made of; None through a sketch, where components are orthonormal in the sketch only.
        passes: Streaming: the captured share after each pass; growth that has stopped says that it is near the best.
        halves: How well two halves agree; None where they were not fitted.
        sketch: What the sketch gets wrong; None without one.
    """

    solver: Literal["dual", "streaming"]
    captured: float
    orthonormality: float | None
    passes: tuple[float, ...] = ()
    halves: Halves | None = None
    sketch: SketchError | None = None

    def to_json(self) -> dict[str, Any]:
        """Write it as JSON values.

        Returns:
            JSON values.
        """
        parts = {"halves": self.halves, "sketch": self.sketch}
        return {**vars(self), **{name: None if part is None else vars(part) for name, part in parts.items()}}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Read what `to_json` wrote.

        Args:
            values: JSON values.
        """
        halves, sketch = values["halves"], values["sketch"]
        if halves is not None:
            agreement = {int(number): share for number, share in halves["agreement"].items()}
            halves = Halves(**{**halves, "agreement": agreement})
        return cls(**{
            **values, "passes": tuple(values["passes"]), "halves": halves,
            "sketch": None if sketch is None else SketchError(**sketch),
        })  # fmt: skip


@final
@dataclass(frozen=True)
class Sketch:
    """The maps.

    Attributes:
        shapes: Module name → rows and columns of its change.
        side: Rows and columns that a change is made to; a shorter side stays as it is, exactly.
        seed: Of the maps.

    Source: for R of m independent rows with E[RᵀR] = I, and S alike, E⟨R X Sᵀ, R Y Sᵀ⟩ = ⟨X, Y⟩; of rank 1 the
    relative variance is at most about 2/m + 2/m + 4/m², and modules average it out.
    """

    shapes: Mapping[str, tuple[int, int]]
    side: int
    seed: int

    @property
    def length(self) -> int:
        """Numbers in a row."""
        return sum(min(rows, self.side) * min(columns, self.side) for rows, columns in self.shapes.values())

    @cached_property
    def _maps(self) -> dict[str, tuple[Tensor | None, Tensor | None]]:
        return {
            name: (self._map(name, "rows", rows), self._map(name, "columns", columns))
            for name, (rows, columns) in self.shapes.items()
        }

    def _map(self, name: str, end: str, length: int) -> Tensor | None:
        if length <= self.side:
            return None
        draw = torch_generator(self.seed, "sketch", name, end)
        drawn: Tensor = torch.randn(self.side, length, generator=draw) / self.side**0.5
        return drawn

    def rows(self, stack: AdapterStack) -> Tensor:
        """Write n adapters as rows, shape `(n, length)`, fp32.

        Args:
            stack: The adapters.

        Returns:
            Rows.
        """
        parts = []
        for name in sorted(self.shapes):
            left, right = self._maps[name]
            up, down = stack.up[name].float(), stack.down[name].float()
            up = up if left is None else left @ up
            down = down if right is None else down @ right.T
            parts.append(((up * stack.scale[name].float()[:, None, None]) @ down).flatten(1))
        return torch.cat(parts, dim=1)


@final
@dataclass(frozen=True, eq=False)
class SketchRows:
    """A bank's adapters as a matrix of sketches that is read by rows.

    Attributes:
        bank: The adapters.
        sketch: How they are written.
        start: Number of the first.
        stop: Number after the last.
    """

    bank: Bank
    sketch: Sketch
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, int]:
        """Adapters and numbers of each."""
        return self.stop - self.start, self.sketch.length

    def rows(self, start: int, stop: int) -> Tensor:
        """Read adapters as rows, fp32."""
        return self.sketch.rows(stack_of(self.bank, self.start + start, self.start + stop))


@final
@dataclass(frozen=True)
class SketchError:
    """What the sketch gets wrong, measured against exact inner products on some adapters.

    Attributes:
        adapters: How many.
        products: Root mean squared error of their inner products about the mean, relative to the root mean square.
        captured: Variance along the leading components by the sketch, relative to that along the exact ones.
        components: How many of them.
    """

    adapters: int
    products: float
    captured: float
    components: int


def sketch_error(bank: Bank, sketch: Sketch, components: int, *, most: int = 512) -> SketchError:
    """Compare a sketch with exact inner products on adapters evenly taken from a bank.

    Args:
        bank: The adapters.
        sketch: The maps.
        components: Of the fit; at most half of the adapters that are compared.
        most: Adapters to compare.
    """
    step = -(-len(bank) // most)
    taken = AdapterStack.of([stack_of(bank, number, number + 1).adapter(0) for number in range(0, len(bank), step)])
    exact, rows = inner_products(taken, taken), sketch.rows(taken).double()
    center = torch.eye(len(taken), dtype=torch.float64) - 1 / len(taken)
    exact, drawn = center @ exact @ center, center @ (rows @ rows.T) @ center
    error = float((drawn - exact).norm() / exact.norm())
    wanted = min(components, len(taken) // 2)
    best = fit_gram(exact.clone(), wanted, precision=1e-7)
    own = fit_gram(drawn, wanted, precision=1e-7)
    vectors = torch.linalg.qr(own.scores).Q  # of the adapters, in which both Gram matrices are written
    share = float((vectors * (exact @ vectors)).sum() / (best.variances.sum() * (len(taken) - 1)))
    return SketchError(len(taken), error, share, wanted)


@final
@dataclass(frozen=True, eq=False)
class VectorBasis:
    """Principal components of rows.

    Attributes:
        layout: What the numbers of a row are.
        basis: Mean, deviations and components of rows.
    """

    layout: Layout
    basis: Basis

    def project(self, stack: AdapterStack) -> tuple[Tensor, Tensor]:
        """Return m adapters' scores, and their squared distances from the mean; see `fitting.Basis`."""
        rows = self.layout.rows(stack, [f"number {number}" for number in range(len(stack))])
        return self.basis.project(rows), self.basis.squares(rows)

    def changes(self, scores: Tensor) -> dict[str, Tensor]:
        """Return the changes at points; see `WeightSpace.changes`."""
        return self.layout.changes(self.basis.point(scores.to(torch.promote_types(scores.dtype, torch.float32))))

    def adapter(self, scores: Tensor) -> Adapter:
        """Return a point as an adapter; see `WeightSpace.adapter`."""
        return self.layout.adapter(self.basis.point(scores.float()))


_TOLERANCE = 1e-5  # of what a down factor may have outside of the shared rows, relative to its norm


@final
@dataclass(frozen=True, eq=False)
class Layout:
    """How adapters of one bank are written as rows.

    Attributes:
        kind: "factors": per module down then up, row by row, modules sorted, as the reference; "shared-down": per
            module the up factor over an orthonormal basis of the shared down factor's rows, so that inner products of
            rows are those of the changes.
        shapes: Module name → rows and columns of its change.
        ranks: Module name → rank.
        scales: Module name → what changes are multiplied with; 1 in "shared-down", whose rows hold it.
        downs: "shared-down": module name → orthonormal rows, shape `(rank, columns)`, fp32; else empty.
    """

    kind: Literal["factors", "shared-down"]
    shapes: Mapping[str, tuple[int, int]]
    ranks: Mapping[str, int]
    scales: Mapping[str, float]
    downs: Mapping[str, Tensor]

    @classmethod
    def of(cls, kind: Literal["factors", "shared-down"], bank: Bank) -> Layout:
        """Make the layout of a bank from its first adapter.

        Args:
            kind: What rows hold.
            bank: At least one adapter.
        """
        first = stack_of(bank, 0, 1).adapter(0)
        shapes = {name: bank.shapes[name] for name in sorted(bank.shapes)}
        ranks = {name: first.factors[name].rank for name in shapes}
        if kind == "factors":
            return cls(kind, shapes, ranks, {name: first.factors[name].scale for name in shapes}, {})
        downs = {name: _row_space(name, first.factors[name].down) for name in shapes}
        return cls(kind, shapes, ranks, dict.fromkeys(shapes, 1.0), downs)

    @property
    def length(self) -> int:
        """Numbers in a row."""
        return sum(self._sizes(name)[0] + self._sizes(name)[1] for name in self.shapes)

    def _sizes(self, name: str) -> tuple[int, int]:
        """Numbers of a module's down and up factor in a row."""
        rows, columns = self.shapes[name]
        rank = self.ranks[name]
        return (0 if self.downs else rank * columns), rows * rank

    def rows(self, stack: AdapterStack, names: list[str]) -> Tensor:
        """Write adapters as rows, shape `(n, length)`, fp32.

        Args:
            stack: n adapters.
            names: What to call them in messages.

        Returns:
            Rows.

        Raises:
            UsageError: An adapter has another rank, or another down factor than the shared one.
        """
        parts = []
        for name in self.shapes:
            other = (stack.ranks[name] != self.ranks[name]).nonzero()
            if len(other):
                number = int(other[0])
                raise UsageError(
                    f"The adapter {names[number]!r} has rank {int(stack.ranks[name][number])} in {name}, others "
                    f"{self.ranks[name]}: as rows of numbers they cannot be compared.",
                    cure='Use representation="delta", which takes any ranks.',
                )
            down, up = stack.down[name][:, : self.ranks[name]], stack.up[name][:, :, : self.ranks[name]]
            scale = stack.scale[name] / self.scales[name]
            if self.downs:
                up = self._over_shared(name, down, up, names)
            else:
                parts.append(down.float().flatten(1))
            scaled = up.float() if (scale == 1).all() else (up * scale[:, None, None]).float()
            parts.append(scaled.flatten(1))
        return torch.cat(parts, dim=1)

    def _over_shared(self, name: str, down: Tensor, up: Tensor, names: list[str]) -> Tensor:
        """Write up @ down as (up @ turn) @ shared rows."""
        shared, down = self.downs[name].double(), down.double()
        turn = down @ shared.T
        outside = (down - turn @ shared).flatten(1).norm(dim=1)
        bad = (outside > _TOLERANCE * down.flatten(1).norm(dim=1)).nonzero()
        if len(bad):
            raise UsageError(
                f"The adapter {names[int(bad[0])]!r} does not share the down factor of {name} with {names[0]!r}.",
                cure='Use representation="delta", or train with frozen down factors from one seed.',
            )
        return up.double() @ turn

    def factors(self, row: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Read down and up factors from rows, shape `(…, length)`; views, differentiable.

        Args:
            row: Any floating dtype.

        Returns:
            Module → down and up factor, shapes `(…, rank, columns)` and `(…, rows, rank)`.
        """
        found, place = {}, 0
        for name, (rows, columns) in self.shapes.items():
            of_down, of_up = self._sizes(name)
            rank = self.ranks[name]
            if self.downs:
                down = self.downs[name].to(row)
            else:
                down = row[..., place : place + of_down].reshape(*row.shape[:-1], rank, columns)
            up = row[..., place + of_down : place + of_down + of_up].reshape(*row.shape[:-1], rows, rank)
            found[name] = down, up
            place += of_down + of_up
        return found

    def changes(self, row: Tensor) -> dict[str, Tensor]:
        """Return the changes of rows, shape `(…, rows, columns)` per module.

        Args:
            row: Shape `(…, length)`.
        """
        return {name: self.scales[name] * (up @ down) for name, (down, up) in self.factors(row).items()}

    def adapter(self, row: Tensor) -> Adapter:
        """Return the adapter of a row, shape `(length,)`.

        Args:
            row: Shape `(length,)`.
        """
        found = self.factors(row).items()
        return Adapter({name: LowRank(down.clone(), up.clone(), self.scales[name]) for name, (down, up) in found})


@final
@dataclass(frozen=True, eq=False)
class AdapterRows:
    """A bank's adapters as a matrix that is read by rows.

    Attributes:
        bank: The adapters.
        layout: How they are written.
        start: Number of the first.
        stop: Number after the last.
    """

    bank: Bank
    layout: Layout
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, int]:
        """Adapters and numbers of each."""
        return self.stop - self.start, self.layout.length

    def rows(self, start: int, stop: int) -> Tensor:
        """Read adapters as rows, fp32."""
        first, last = self.start + start, self.start + stop
        return self.layout.rows(stack_of(self.bank, first, last), list(self.bank.names[first:last]))


def _row_space(name: str, down: Tensor) -> Tensor:
    """Orthonormal rows with the span of a down factor's."""
    basis = torch.linalg.qr(down.double().T)
    diagonal = basis.R.diagonal().abs()
    if len(down) > down.shape[1] or not (diagonal > 1e-9 * diagonal.max()).all():
        raise UsageError(f"The down factor of {name} has dependent rows.", cure='Use representation="delta".')
    rows: Tensor = basis.Q.T.float().contiguous()
    return rows


_DENSE_BYTES = 1 << 28  # of components that may be kept as matrices
_Place = tuple[torch.dtype, torch.device]


@final
@dataclass(frozen=True, eq=False)
class _Module:
    """All changes of one module side by side: `ups @ (w[owner] ⊙ downs)`."""

    ups: Tensor  # (rows, N), scales multiplied in
    downs: Tensor  # (N, columns)
    owner: Tensor  # (N,): the adapter that each came with


@final
@dataclass(frozen=True, eq=False)
class Combinations:
    """Principal components of the changes ΔW.

    Attributes:
        bank: The adapters, or more than those: the first n count.
        weights: Shape `(n, k)`, fp64; component j is Σ_i weights[i, j] ΔW_i.
        offsets: Shape `(k,)`, fp64: ⟨mean, component j⟩; unused with a sketch.
        mean_square: ⟨mean, mean⟩; unused with a sketch.
        sketch: Where the fit was made through one: components of sketches, and the sketch. Adapters are then measured
            by it, else by their inner products with all adapters of the bank.
    """

    bank: Bank
    weights: Tensor
    offsets: Tensor
    mean_square: float
    sketch: tuple[Basis, Sketch] | None = None
    _factors: dict[_Place, dict[str, _Module]] = field(default_factory=dict, init=False, repr=False)
    _matrices: dict[_Place, dict[str, tuple[Tensor, Tensor]]] = field(default_factory=dict, init=False, repr=False)

    def project(self, stack: AdapterStack) -> tuple[Tensor, Tensor]:
        """Return m adapters' scores, and their squared distances from the mean; see `fitting.Basis`."""
        if self.sketch is not None:
            basis, sketch = self.sketch
            return basis.project(rows := sketch.rows(stack)), basis.squares(rows)
        found = torch.zeros(len(stack), self.weights.shape[1], dtype=torch.float64)
        with_mean = torch.zeros(len(stack), dtype=torch.float64)
        for start, some in stacks_of(self.bank, len(self.weights), description="Projecting"):
            products = inner_products(stack, some)
            found += products @ self.weights[start : start + len(some)]
            with_mean += products.sum(dim=1) / len(self.weights)
        squares = norms_of(stack) - 2 * with_mean + self.mean_square
        return (found - self.offsets).float(), squares.clamp_min(0).float()

    def changes(self, scores: Tensor) -> dict[str, Tensor]:
        """Return the changes at points; see `WeightSpace.changes`."""
        dtype = torch.promote_types(scores.dtype, torch.float32)
        scores = scores.to(dtype)
        if self.dense:
            return {
                name: mean + (scores @ components.flatten(1)).view(*scores.shape[:-1], *mean.shape)
                for name, (mean, components) in self._components(dtype, scores.device).items()
            }
        found = scores @ self.weights.T.to(scores) + 1 / len(self.weights)
        modules = self._modules(dtype, scores.device)
        return {name: (one.ups * found[..., None, one.owner]) @ one.downs for name, one in modules.items()}

    def adapter(self, scores: Tensor) -> Adapter:
        """Return a point as an adapter, exactly; see `WeightSpace.adapter`."""
        found = self.weights @ scores.double() + 1 / len(self.weights)
        changes = {}
        for name, one in self._modules(torch.float32, torch.device("cpu")).items():
            ups = (one.ups * found[one.owner]).float()
            rows, columns = len(ups), one.downs.shape[1]
            if len(one.owner) <= min(rows, columns):
                changes[name] = LowRank(one.downs, ups)
            elif columns <= rows:
                changes[name] = LowRank(torch.eye(columns), ups @ one.downs)
            else:
                changes[name] = LowRank(ups @ one.downs, torch.eye(rows))
        return Adapter(changes)

    @property
    def dense(self) -> bool:
        """Whether components as matrices are small, and fewer than factors by enough to be worth making."""
        size = sum(rows * columns for rows, columns in self.bank.shapes.values())
        components = self.weights.shape[1]
        return 4 * components <= len(self.weights) and 4 * size * components <= _DENSE_BYTES

    def _modules(self, dtype: torch.dtype, device: torch.device) -> dict[str, _Module]:
        """Factors of all adapters, kept after the first call."""
        if (dtype, device) not in self._factors:
            self._factors[dtype, device] = self._read(dtype, device)
        return self._factors[dtype, device]

    def _read(self, dtype: torch.dtype, device: torch.device) -> dict[str, _Module]:
        parts: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {name: [] for name in self.bank.shapes}
        for start, stack in stacks_of(self.bank, len(self.weights), description="Reading adapters"):
            for name, found in parts.items():
                rank = stack.down[name].shape[1]
                real = torch.arange(rank) < stack.ranks[name][:, None]  # (n, rank): not the zeros of filling up
                ups = stack.up[name].to(torch.float64) * stack.scale[name][:, None, None]
                owner = start + torch.arange(len(stack))[:, None].expand(-1, rank)
                found.append((
                    ups.mT[real].to(device, dtype), stack.down[name][real].to(device, dtype), owner[real].to(device),
                ))  # fmt: skip
        return {
            name: _Module(torch.cat(ups).T.contiguous(), torch.cat(downs), torch.cat(owners))
            for name, found in parts.items()
            for ups, downs, owners in [zip(*found, strict=True)]
        }

    def _components(self, dtype: torch.dtype, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
        """Mean and components as matrices, kept after the first call."""
        if (dtype, device) not in self._matrices:
            weights = torch.cat([torch.full_like(self.weights[:, :1], 1 / len(self.weights)), self.weights], dim=1)
            made = {}
            for name, one in self._read(dtype, device).items():
                found = torch.stack([
                    (one.ups * column[one.owner]) @ one.downs for column in weights.T.to(device, dtype)
                ])  # fmt: skip
                made[name] = found[0], found[1:]
            self._matrices[dtype, device] = made
        return self._matrices[dtype, device]


RowKind = Literal["sketch", "factors", "shared-down"]
"""What the rows of a shard are."""


@final
@dataclass(frozen=True)
class BankShard:
    """Some adapters of a bank on disk, as rows.

    Attributes:
        path: The bank's folder.
        digest: Of the bank.
        start: Number of the first adapter.
        stop: Number after the last.
        kind: "sketch", or a representation of `Layout`.
        side: Of the sketch.
        seed: Of the sketch.
    """

    path: str
    digest: str
    start: int
    stop: int
    kind: RowKind
    side: int
    seed: int

    def open(self) -> AdapterRows | SketchRows:
        """Open the rows.

        Raises:
            UsageError: The bank has changed since.
        """
        bank = AdapterBank.open(self.path)
        if bank.digest != self.digest:
            raise UsageError(f"The bank {self.path} has changed since the fit began.", cure="Begin in another folder.")
        if self.kind == "sketch":
            return SketchRows(bank, Sketch(dict(bank.shapes), self.side, self.seed), self.start, self.stop)
        return AdapterRows(bank, Layout.of(self.kind, bank), self.start, self.stop)


def bank_shards(bank: Bank, kind: RowKind, *, side: int, seed: int) -> list[BankShard]:
    """Divide a bank into shards, of 4,096 adapters at most and 8 at least.

    Args:
        bank: A bank on disk.
        kind: What rows are made of adapters.
        side: Width of a sketch's rows, where `kind` is one.
        seed: Where a sketch is drawn from.

    Returns:
        The shards, in the adapters' order.

    Raises:
        UsageError: It is not on disk.
    """
    opened, count = _on_disk(bank), len(bank)
    parts = min(count, max(8, -(-count // 4096)))
    edges = [count * number // parts for number in range(parts + 1)]
    return [
        BankShard(str(opened.path.resolve()), bank.digest, start, stop, kind, side, seed)
        for start, stop in itertools.pairwise(edges)
    ]


@final
@dataclass(frozen=True)
class _BlockRow:
    """A block row to make: of which bank, from which adapter, and where it is kept."""

    path: str
    digest: str
    start: int
    folder: str


def make_block_rows(bank: Bank, folder: Path, engine: Engine, progress: Progress) -> None:
    """Make the block rows of a Gram matrix, to be kept in a folder.

    Args:
        bank: A bank on disk.
        folder: Where they are kept.
        engine: Where the work is done.
        progress: Where it is shown.

    Raises:
        UsageError: The bank is not on disk.
        NetweightError: A task failed.
    """
    path = str(_on_disk(bank).path.resolve())
    folder.mkdir(parents=True, exist_ok=True)
    longest_first = reversed(block_rows(bank))
    tasks = [_BlockRow(path, bank.digest, start, str(folder.resolve())) for start in longest_first]
    runs = map_runs(_make, tasks, ledger=folder / "gram.jsonl", engine=engine)
    for run in progress.track(runs, "Block rows", len(tasks), unit="rows"):
        if run.error is not None:
            raise NetweightError(
                f"The inner products from adapter {run.config.start} on failed: {run.error.strip().splitlines()[-1]}",
                cure="Once the reason is gone, the same call goes on from there.",
            )


def _make(task: _BlockRow) -> int:
    make_block_row(AdapterBank.open(task.path), task.start, Path(task.folder))
    return task.start


def _on_disk(bank: Bank) -> AdapterBank:
    if not isinstance(bank, AdapterBank):
        raise UsageError("Only a bank on disk can be shared with other processes.", cure="Write it with BankWriter.")
    return bank


class SpaceBasis(Protocol):
    """Mean and components of a space, in one of the representations."""

    def project(self, stack: AdapterStack) -> tuple[Tensor, Tensor]:
        """Scores of m adapters, shape `(m, k)`, and squared distances from the mean, shape `(m,)`; both fp32.

        What lies outside of the space is in the distances alone.

        Args:
            stack: The adapters.

        Returns:
            Scores and squared distances.
        """
        ...

    def changes(self, scores: Tensor) -> dict[str, Tensor]:
        """Changes at points.

        Args:
            scores: Shape `(m, k)`.

        Returns:
            Module name → ΔW, shape `(m, rows, columns)`.
        """
        ...

    def adapter(self, scores: Tensor) -> Adapter:
        """A point as an adapter.

        Args:
            scores: Shape `(k,)`.
        """
        ...


@final
@dataclass(frozen=True)
class Work:
    """How a fit is carried out; it does not change what is found.

    Attributes:
        folder: Where to keep what was done, to go on after a kill; None for nowhere.
        workers: Who else takes part.
        engine: Where tasks run, for a bank on disk and with a folder; None for in this process.
        progress: Where to show it.

    Raises:
        UsageError: There is an engine and no folder.
    """

    folder: Path | None
    workers: ShardSum
    engine: Engine | None
    progress: Progress

    def __post_init__(self) -> None:
        """Refuse an engine that has nowhere to put what it makes."""
        if self.engine is not None and self.folder is None:
            raise UsageError("Work that is shared with other processes needs a folder.", cure="Name one, or --work.")


@final
@dataclass(frozen=True, eq=False)
class Fitted:
    """What was found: see `WeightSpace` for `scores`; `variances` are theirs."""

    basis: SpaceBasis
    scores: Tensor
    variances: Tensor
    accuracy: Accuracy


def fit_bank(bank: Bank, config: FitConfig, work: Work) -> Fitted:
    """Fit a bank as a configuration says.

    Raises:
        UsageError: See `WeightSpace.fit`.
    """
    if config.representation != "delta":
        return _fit_vectors(bank, config, work)
    return _fit_products(bank, config, work) if _is_dual(bank, config) else _fit_sketch(bank, config, work)


def _is_dual(bank: Bank, config: FitConfig) -> bool:
    return config.solver == "dual" or (config.solver == "auto" and len(bank) <= MOST_DUAL)


def _fit_products(bank: Bank, config: FitConfig, work: Work) -> Fitted:
    if work.engine is not None and work.folder is not None:
        make_block_rows(bank, work.folder, work.engine, work.progress)
    gram, precision = gram_of(bank, folder=work.folder, workers=work.workers, progress=work.progress)
    halves = None
    if config.halves:
        halves = halves_of(gram, config.components, precision=precision, seed=config.seed)
    found = fit_gram(gram, config.components, precision=precision)
    directions = found.scores / found.scores.norm(dim=0)
    error = directions.T @ directions
    error.diagonal().sub_(1)
    accuracy = Accuracy("dual", float(found.variances.sum()) / found.total, float(error.abs().max()), halves=halves)
    basis = Combinations(bank, found.weights, found.offsets, found.mean_square)
    return Fitted(basis, found.scores.float(), found.variances, accuracy)


def _fit_sketch(bank: Bank, config: FitConfig, work: Work) -> Fitted:
    sketch = Sketch(dict(bank.shapes), config.sketch, config.seed)
    start, stop = _share(len(bank), work.workers)
    fit, scores = _streamed(SketchRows(bank, sketch, start, stop), "sketch", config, work)
    weights = scores.double() / (fit.basis.variances * (len(bank) - 1))
    basis = Combinations(bank, weights, weights.new_zeros(weights.shape[1]), 0.0, (fit.basis, sketch))
    accuracy = Accuracy(
        "streaming", fit.captured, None, fit.passes, sketch=sketch_error(bank, sketch, weights.shape[1])
    )  # fmt: skip
    return Fitted(basis, scores, fit.basis.variances, accuracy)


def _fit_vectors(bank: Bank, config: FitConfig, work: Work) -> Fitted:
    assert config.representation != "delta"
    layout = Layout.of(config.representation, bank)
    standardize = config.standardize and config.representation == "factors"
    start, stop = (0, len(bank)) if _is_dual(bank, config) else _share(len(bank), work.workers)
    rows = AdapterRows(bank, layout, start, stop)
    if _is_dual(bank, config):
        fit = fit_matrix(
            rows, config.components, standardize=standardize, solver="dual", halves=config.halves,
            progress=work.progress,
        )  # fmt: skip
        scores = fit.scores
    else:
        fit, scores = _streamed(rows, config.representation, config, work, standardize=standardize)
    accuracy = Accuracy(fit.solver, fit.captured, orthonormality(fit.basis.components), fit.passes, fit.halves)
    return Fitted(VectorBasis(layout, fit.basis), scores, fit.basis.variances, accuracy)


def _streamed(
    rows: AdapterRows | SketchRows, kind: RowKind, config: FitConfig, work: Work, *, standardize: bool = False
) -> tuple[BasisFit, Tensor]:
    """The streaming fit, and the scores of all adapters."""
    bank = rows.bank
    how: dict[str, Any] = {
        "standardize": standardize, "most": config.passes, "tolerance": config.tolerance, "seed": config.seed,
        "progress": work.progress,
    }  # fmt: skip
    if work.engine is not None and work.folder is not None:
        shards = bank_shards(bank, kind, side=config.sketch, seed=config.seed)
        fit = fit_shards(shards, config.components, folder=work.folder, engine=work.engine, **how)
        return fit, fit.scores
    digest = f"{bank.digest} {kind} {config.sketch}"
    fit = fit_streaming(rows, config.components, workers=work.workers, folder=work.folder, digest=digest, **how)
    return fit, _gathered(fit.scores, rows.start, len(bank), work.workers)


def _share(count: int, workers: ShardSum) -> tuple[int, int]:
    """A worker's range of adapters."""
    return count * workers.number // workers.count, count * (workers.number + 1) // workers.count


def _gathered(own: Tensor, start: int, count: int, workers: ShardSum) -> Tensor:
    """Scores of all workers' adapters."""
    whole = own.new_zeros(count, own.shape[1])
    whole[start : start + len(own)] = own
    workers.add([whole])
    return whole
