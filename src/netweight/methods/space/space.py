"""A space at rest: a folder with `space.json`, what it is, and `space.safetensors`, its numbers. No pickle anywhere.

A space whose components are combinations of adapters needs these to make points: its bank is named by digest and place,
or written along as `adapters.safetensors`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, final

import safetensors.torch
import torch
from torch import Tensor

from netweight.core.digest import of_file
from netweight.core.engines import Engine
from netweight.core.environment import describe
from netweight.core.files import whole_folder
from netweight.core.progress import QUIET, Progress
from netweight.errors import CorruptBlob, UsageError
from netweight.methods.space.export import Exported, export_adapter
from netweight.methods.space.fit import Accuracy, Combinations, Layout, Sketch, SpaceBasis, VectorBasis, Work, fit_bank
from netweight.methods.space.gram import (
    Bank,
    StackBank,
    check_modules,
    fingerprints,
    same_fingerprints,
    stack_of,
    stacks_of,
)
from netweight.methods.space.points import row_of
from netweight.methods.space.sampling import GaussianSampler
from netweight.methods.space.settings import FitConfig, Representation
from netweight.nn.basis import Basis as RowBasis
from netweight.nn.lora import Adapter
from netweight.nn.stacked_lora import AdapterStack
from netweight.nn.streaming_pca import Alone, ShardSum
from netweight.store.bank.bank import AdapterBank
from netweight.store.checkpoint import read_record, write_record

RECORD = "space.json"
_NUMBERS, _ADAPTERS = "space.safetensors", "adapters.safetensors"
_VERSION = 1
_PARTS = ("down", "up", "scale", "ranks")
_OF_SPACE = ("scores", "deviations", "fingerprints")
_Numbers = Mapping[str, Tensor]


def write_space(space: WeightSpace, folder: Path, *, standalone: bool, bank: Path | None) -> None:
    """Write a space; see `WeightSpace.save`."""
    numbers, basis = _of_basis(space.basis)
    with whole_folder(folder) as part:
        part.mkdir()
        numbers |= {name: getattr(space, name) for name in _OF_SPACE}
        digests = {_NUMBERS: _write(part / _NUMBERS, numbers)}
        if standalone and isinstance(space.basis, Combinations):
            digests[_ADAPTERS] = _write(part / _ADAPTERS, _adapters(space.basis))
        record = {
            "config": vars(space.config),
            "accuracy": space.accuracy.to_json(),
            "bank": space.bank_digest,
            "bank_at": None if bank is None else os.path.relpath(bank.resolve(), folder.resolve()),
            "fitted": space.fitted,
            "components": space.components,
            "names": list(space.names),
            "shapes": {name: list(shape) for name, shape in space.shapes.items()},
            "basis": basis,
            "digests": digests,
            "environment": describe(),
        }
        write_record(part / RECORD, record, version=_VERSION)


def read_space(cls: type[WeightSpace], folder: Path, bank: Bank | None) -> WeightSpace:
    """Read a space; see `WeightSpace.open`."""
    values = read_about(folder)
    numbers = _read(folder / _NUMBERS, values["digests"][_NUMBERS])
    shapes = {name: (rows, columns) for name, (rows, columns) in values["shapes"].items()}
    basis: SpaceBasis
    if "layout" in values["basis"]:
        basis = VectorBasis(_layout(values["basis"]["layout"], shapes, numbers), _row_basis(numbers, values["basis"]))
    else:
        basis = _combinations(folder, values, numbers, bank)
    return cls(
        tuple(values["names"]), values["fitted"], numbers["scores"], numbers["deviations"], numbers["fingerprints"],
        shapes, basis,
        FitConfig(**values["config"]), Accuracy.from_json(values["accuracy"]), values["bank"],
    )  # fmt: skip


def read_about(folder: Path) -> dict[str, Any]:
    """Read what a space is, without its numbers: the values of its record.

    Args:
        folder: The space's folder.

    Returns:
        The record's JSON values.

    Raises:
        UsageError: The folder holds no space.
        CorruptBlob: Its record is damaged.
    """
    if not (folder / RECORD).is_file():
        raise UsageError(f"{folder} holds no space: there is no {RECORD}.", cure="Make one with `netweight space fit`.")
    values: dict[str, Any] = read_record(folder / RECORD, dict, version=_VERSION, of="a space")
    return values


def _of_basis(basis: SpaceBasis) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A basis as tensors and JSON values."""
    if isinstance(basis, Combinations):
        numbers = {"weights": basis.weights, "offsets": basis.offsets}
        products = {"mean_square": basis.mean_square}
        if basis.sketch is None:
            return numbers, products
        rows, sketch = basis.sketch
        return {**numbers, **_of_rows(rows)}, {
            **products,
            "total": rows.total,
            "side": sketch.side,
            "seed": sketch.seed,
        }
    assert isinstance(basis, VectorBasis)
    layout = basis.layout
    downs = {f"shared|{name}": down for name, down in layout.downs.items()}
    about = {"kind": layout.kind, "ranks": dict(layout.ranks), "scales": dict(layout.scales)}
    return {**_of_rows(basis.basis), **downs}, {"total": basis.basis.total, "layout": about}


def _of_rows(basis: RowBasis) -> dict[str, Tensor]:
    found = {"mean": basis.mean, "components": basis.components, "variances": basis.variances}
    return found if basis.deviation is None else {**found, "deviation": basis.deviation}


def _row_basis(numbers: _Numbers, about: Mapping[str, Any]) -> RowBasis:
    return RowBasis(
        numbers["mean"], numbers.get("deviation"), numbers["components"], numbers["variances"], about["total"]
    )  # fmt: skip


def _layout(about: Mapping[str, Any], shapes: Mapping[str, tuple[int, int]], numbers: _Numbers) -> Layout:
    downs = {name.removeprefix("shared|"): value for name, value in numbers.items() if name.startswith("shared|")}
    return Layout(
        about["kind"], {name: shapes[name] for name in sorted(shapes)}, about["ranks"], about["scales"], downs
    )


def _combinations(folder: Path, values: Mapping[str, Any], numbers: _Numbers, bank: Bank | None) -> Combinations:
    fitted = values["names"][: values["fitted"]]
    if bank is not None:
        _check_bank(bank, values["bank"], fitted, numbers["fingerprints"][: len(fitted)])
    elif _ADAPTERS in values["digests"]:
        bank = _bank(_read(folder / _ADAPTERS, values["digests"][_ADAPTERS]), fitted)
    else:
        bank = _bank_at(folder, values["bank_at"])
        _check_bank(bank, values["bank"], fitted, numbers["fingerprints"][: len(fitted)])
    sketch = None
    if "side" in values["basis"]:
        maps = Sketch(dict(bank.shapes), values["basis"]["side"], values["basis"]["seed"])
        sketch = _row_basis(numbers, values["basis"]), maps
    return Combinations(bank, numbers["weights"], numbers["offsets"], values["basis"]["mean_square"], sketch)


def _bank_at(folder: Path, place: str | None) -> AdapterBank:
    """The bank where it lay when the space was written, seen from the space's folder."""
    if place is not None and (folder.resolve() / place).is_dir():
        return AdapterBank.open(folder.resolve() / place)
    where = "" if place is None else f", which lay at {place} as seen from it"
    raise UsageError(
        f"The components of {folder} are combinations of the adapters of its bank{where}.",
        cure="Name the bank (--bank), or write the space standalone.",
    )


def _check_bank(bank: Bank, digest: str, fitted: Sequence[str], known: Tensor) -> None:
    """Refuse a bank that is neither the one of the fit nor that one grown.

    A grown bank has another digest; its first adapters are compared by name and fingerprint.
    """
    if bank.digest == digest:
        return
    if list(bank.names[: len(fitted)]) == list(fitted):
        if same_fingerprints(fingerprints(bank, len(fitted)), known):
            return
    raise UsageError(
        f"This is another bank than the space was fitted to: its digest is {bank.digest}, not {digest}, and its first "
        "adapters are others.",
        cure="Open the space with its own bank, or fit a new one.",
    )


def _adapters(basis: Combinations) -> dict[str, Tensor]:
    """The factors of all adapters, by part and module."""
    whole = stack_of(basis.bank, 0, len(basis.weights))
    parts = zip(_PARTS, (whole.down, whole.up, whole.scale, whole.ranks), strict=True)
    return {f"{part}|{name}": value for part, values in parts for name, value in values.items()}


def _bank(tensors: _Numbers, names: Sequence[str]) -> StackBank:
    parts: dict[str, dict[str, Tensor]] = {part: {} for part in _PARTS}
    for name, value in tensors.items():
        part, _, module = name.partition("|")
        parts[part][module] = value
    return StackBank(names, AdapterStack(**parts))


def _write(path: Path, tensors: _Numbers) -> str:
    """Write tensors and return the file's digest."""
    safetensors.torch.save_file({name: value.contiguous() for name, value in tensors.items()}, path)
    return of_file(path)


def _read(path: Path, digest: str) -> dict[str, Tensor]:
    if not path.is_file():
        raise CorruptBlob(f"{path} is missing.")
    if of_file(path) != digest:
        raise CorruptBlob(f"{path} is not the file that was written: its digest is another.")
    return safetensors.torch.load_file(path)


@final
@dataclass(frozen=True, eq=False)
class Point:
    """A point of a space.

    Attributes:
        space: The space.
        scores: Shape `(k,)`, fp32.
    """

    space: WeightSpace
    scores: Tensor

    @property
    def adapter(self) -> Adapter:
        """The point as an adapter, exactly; see `WeightSpace.adapter`."""
        return self.space.adapter(self.scores)

    def export(
        self,
        path: str | Path,
        *,
        rank: int | None = None,
        layout: Literal["diffusers", "peft", "kohya"] = "diffusers",
        base: str | None = None,
        overwrite: bool = False,
    ) -> Exported:
        """Write the point as an adapter; arguments, result and errors are those of `exporting.export_adapter`."""
        return export_adapter(self.adapter, path, rank=rank, layout=layout, base=base, overwrite=overwrite)


_ALONE = Alone()


@final
@dataclass(frozen=True, eq=False)
class WeightSpace:
    """A space of adapters.

    Attributes:
        names: Names of the n adapters that it was fitted to, then of those appended.
        fitted: How many it was fitted to.
        scores: Shape `(n, k)`, fp32: their coordinates.
        deviations: Shape `(k,)`, fp32, falling: standard deviations of the scores that the space was fitted to.
        fingerprints: Shape `(n,)`, fp64: a number per adapter, to know it again by.
        shapes: Module name → rows and columns of its change.
        basis: Mean and components.
        config: How it was fitted.
        accuracy: What is known of how good the fit is.
        bank_digest: Digest of the bank that it was fitted to.

    Source: weights2weights (arXiv 2406.09413); see docs/differences.md for what departs from it.
    """

    names: Sequence[str]
    fitted: int
    scores: Tensor
    deviations: Tensor
    fingerprints: Tensor
    shapes: Mapping[str, tuple[int, int]]
    basis: SpaceBasis
    config: FitConfig
    accuracy: Accuracy
    bank_digest: str

    @classmethod
    def fit(
        cls,
        bank: Bank,
        *,
        components: int | None = None,
        representation: Representation = "delta",
        folder: str | Path | None = None,
        workers: ShardSum = _ALONE,
        engine: Engine | None = None,
        progress: Progress = QUIET,
        **settings: Any,
    ) -> Self:
        """Find the principal components of a bank's adapters.

        Args:
            bank: At least 2 adapters.
            components: How many; None for as many as there are, at most 1,000.
            representation: See `FitConfig`.
            folder: Where to keep what was done, so that the same call goes on after a kill, and so that a bank that
                has grown is fitted again without the inner products that are known.
            workers: Who shares the work: `ProcessGroup()` under torch.distributed, in all processes of which this is
                called; each reads its part of the bank, and all end with the same space.
            engine: Where parts of the work run instead, for a bank on disk and with a folder: `local_processes`, or
                that of `integrations.ray.ray_cluster`. "shared-down" and "factors" use it only where they stream.
            progress: Where to show it.
            settings: Further fields of `FitConfig`.

        Raises:
            UsageError: The bank holds fewer than 2 adapters, NaN, or has fewer components than asked for; or its
                adapters do not fit the representation: they do not share their down factors, or ranks differ.

        Source: arXiv 2406.09413, section 3; the inner product of changes in place of raw factors.
        """
        config = FitConfig(components, representation, **settings)
        if len(bank) < 2 or (components is not None and components >= len(bank)):
            raise UsageError(
                f"A bank of {len(bank)} has at most {max(len(bank) - 1, 0)} principal components.",
                cure="Ask for fewer, or add adapters." if len(bank) > 1 else "Add adapters: hundreds to be of use.",
            )
        found = fit_bank(bank, config, Work(None if folder is None else Path(folder), workers, engine, progress))
        deviations = found.variances.sqrt().float()
        return cls(
            tuple(bank.names), len(bank), found.scores, deviations, fingerprints(bank), dict(bank.shapes), found.basis,
            config, found.accuracy, bank.digest,
        )  # fmt: skip

    def __repr__(self) -> str:
        """Say what it is in a line, not all of its numbers."""
        kind = self.config.representation
        return f"WeightSpace({len(self.names)} adapters, {self.components} components, representation {kind!r})"

    @property
    def components(self) -> int:
        """Number of components, k."""
        return self.scores.shape[1]

    @property
    def mean_adapter(self) -> Adapter:
        """The mean of the adapters, exactly."""
        return self.basis.adapter(self.scores.new_zeros(self.components))

    def point(self, which: str | Tensor) -> Point:
        """Return a point: that of an adapter of the space by its name, or that of scores.

        Args:
            which: A name, or scores of shape `(k,)`.

        Raises:
            NameNotFound: There is no such adapter; the nearest names are in the message.
            UsageError: The scores have another length.
        """
        scores = self.scores[row_of(which, self.names)] if isinstance(which, str) else which
        self._check(scores, (1,))
        return Point(self, scores)

    def sample(self, *, seed: int = 0) -> Point:
        """Draw a new point as the paper does: from a Gaussian per component. See `sampling` for other ways.

        Source: weights2weights, section 4.1.
        """
        return Point(self, GaussianSampler.fit(self.scores).draw(1, seed=seed)[0])

    def project(self, adapter: Adapter) -> Tensor:
        """Return an adapter's scores, shape `(k,)`, fp32: the nearest point of the space.

        Args:
            adapter: Adapter of the same modules, of any rank.

        Raises:
            NameNotFound: It has other modules than the space.
            UsageError: It has other shapes.
        """
        stack = AdapterStack.of([adapter])
        check_modules(stack.shapes, self.shapes, what="The adapter")
        return self.basis.project(stack)[0][0]

    def changes(self, scores: Tensor) -> dict[str, Tensor]:
        """Return what a point changes in a model; differentiable in the scores.

        Args:
            scores: Shape `(k,)`, or `(b, k)` for b points; on any device, where the changes are made.

        Returns:
            Module name → ΔW, shape `(rows, columns)` or `(b, rows, columns)`, fp32 (fp64 for fp64 scores).

        Raises:
            UsageError: The scores have another length.
        """
        self._check(scores, (1, 2))
        return self.basis.changes(scores)

    def adapter(self, scores: Tensor) -> Adapter:
        """Return a point as an adapter, exactly: mean + Σ scores_j component_j.

        Args:
            scores: Shape `(k,)`.

        Returns:
            In "delta" its rank is the sum of the ranks in the bank, or the module's smaller side; `truncated` makes it
            smaller and says what that costs. In the other representations it has the adapters' own rank.

        Raises:
            UsageError: The scores have another length.
        """
        self._check(scores, (1,))
        return self.basis.adapter(scores.detach().cpu())

    def append(self, bank: Bank, *, progress: Progress = QUIET) -> Appended:
        """Give scores to the adapters that a bank has got since, without fitting again.

        Args:
            bank: It begins with the adapters of this space, in their order.
            progress: Where to show it.

        Returns:
            The space with their names and scores, and how well it describes them.

        Raises:
            UsageError: The bank begins with others, changes other modules, or has none that are new.
        """
        known = len(self.names)
        check_modules(bank.shapes, self.shapes, what="The bank")
        if (
            len(bank) <= known
            or list(bank.names[:known]) != list(self.names)
            or not same_fingerprints((marks := fingerprints(bank))[:known], self.fingerprints)
        ):
            raise UsageError(
                f"The bank is not that of the space with more adapters: the space has {known}, the bank {len(bank)}.",
                cure="Append to the bank that the space was fitted to, or fit a new one.",
            )
        found = [
            self.basis.project(stack)
            for _, stack in stacks_of(bank, len(bank), description="New adapters", progress=progress, first=known)
        ]
        scores, squares = (torch.cat(parts) for parts in zip(*found, strict=True))
        scores = torch.cat([self.scores, scores])
        space = replace(self, names=tuple(bank.names), scores=scores, fingerprints=marks)
        return Appended(space, len(bank) - known, float(scores[known:].square().sum() / squares.sum()))

    def _check(self, scores: Tensor, dimensions: tuple[int, ...]) -> None:
        if scores.ndim not in dimensions or scores.shape[-1] != self.components:
            raise UsageError(
                f"Scores of shape {tuple(scores.shape)} are no points of a space of {self.components} components.",
                cure=f"Give one row of {self.components} numbers per point.",
            )

    def save(self, folder: str | Path, *, standalone: bool = False, bank: str | Path | None = None) -> None:
        """Write the space as a folder of ordinary safetensors and JSON, which must not exist.

        Args:
            folder: The folder.
            standalone: Also write the factors of the adapters that components are combinations of, so that the space
                opens without its bank; "delta" only, the others need none.
            bank: Where its bank lies, to open the space with; kept as seen from the folder, so both may move together.

        Raises:
            OutputExists: The folder exists already.
            OutputFailed: The place cannot be written.
        """
        write_space(self, Path(folder), standalone=standalone, bank=None if bank is None else Path(bank))

    @classmethod
    def open(cls, folder: str | Path, bank: Bank | None = None) -> Self:
        """Open a saved space.

        Args:
            folder: The folder.
            bank: The bank that it was fitted to, or that bank grown; "delta" needs it, unless the space stands alone or
                knows where it lies.

        Raises:
            UsageError: The bank is missing, or another.
            CorruptBlob: The folder is damaged.
        """
        return read_space(cls, Path(folder), bank)


@final
@dataclass(frozen=True)
class Appended:
    """A space with more adapters.

    Attributes:
        space: The space: components as they were, names and scores with the new ones.
        added: Number of new adapters.
        captured: Share of their squared distance from the mean that lies along the components.
    """

    space: WeightSpace
    added: int
    captured: float

    @property
    def expected(self) -> float:
        """The same share of adapters that a fit had not seen, where two halves were fitted; else of those it had."""
        halves = self.space.accuracy.halves
        return self.space.accuracy.captured if halves is None else halves.held_out

    @property
    def refit(self) -> str | None:
        """Why a new fit is advised; None if it is not."""
        since = len(self.space.names) - self.space.fitted
        if self.captured < 0.9 * self.expected:
            return f"The components capture {self.captured:.0%} of the new adapters, {self.expected:.0%} of known ones."
        if 4 * since > self.space.fitted:
            return f"{since} adapters have been added to the {self.space.fitted} that the space was fitted to."
        return None
