"""A space of adapters: fitted, sampled, projected into, extended, and kept in a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, final

import torch
from torch import Tensor

from netweight.core.engines import Engine
from netweight.core.files import whole_folder
from netweight.core.progress import QUIET, Progress
from netweight.errors import UsageError
from netweight.methods.space.basis import Basis
from netweight.methods.space.fit import Accuracy, Work, fit_bank
from netweight.methods.space.gram import (
    Bank,
    NormalizedBank,
    check_modules,
    fingerprints,
    normalized,
    normalizing,
    norms_of,
    read_blocks,
    same_fingerprints,
    scaled,
)
from netweight.methods.space.points import row_of
from netweight.methods.space.sampling import GaussianSampler
from netweight.methods.space.serialization import read_space, write_space
from netweight.methods.space.settings import FitSettings, Representation
from netweight.nn.lora import Adapter, AdapterStack
from netweight.store.bank.shards import stacked
from netweight.store.lora_formats.files import Exported, export_adapter
from netweight.store.lora_formats.parts import Layout


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
        origin: What the bank said of its adapters, for exports: the model's name, "base", and "kernels".

    Source: weights2weights (arXiv 2406.09413); see docs/differences.md for what departs from it.
    """

    names: Sequence[str]
    fitted: int
    scores: Tensor
    deviations: Tensor
    fingerprints: Tensor
    shapes: Mapping[str, tuple[int, int]]
    basis: Basis
    config: FitSettings
    accuracy: Accuracy
    bank_digest: str
    origin: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def fit(
        cls,
        bank: Bank,
        *,
        components: int | None = None,
        representation: Representation = "delta",
        folder: str | Path | None = None,
        engine: Engine | None = None,
        progress: Progress = QUIET,
        **settings: Any,
    ) -> Self:
        """Find the principal components of a bank's adapters.

        Args:
            bank: At least 2 adapters.
            components: How many; None for as many as there are, at most 1,000.
            representation: See `FitSettings`.
            folder: Where to keep what was done, so that the same call goes on after a kill, and so that a bank that
                has grown is fitted again without the inner products that are known.
            engine: Where parts of the work run instead, for a bank on disk and with a folder: `local_processes`, or
                that of `integrations.ray.ray_cluster`. "factors" uses it only where it streams.
            progress: Where to show it.
            settings: Further fields of `FitSettings`.

        Raises:
            UsageError: The bank holds fewer than 2 adapters, NaN, or has fewer components than asked for; or its
                adapters do not fit the representation: they do not share their down factors, or ranks differ.

        Source: arXiv 2406.09413, section 3; the inner product of changes in place of raw factors.
        """
        config = FitSettings(components=components, representation=representation, **settings)
        if len(bank) < 2 or (components is not None and components >= len(bank)):
            raise UsageError(
                f"A bank of {len(bank)} has at most {max(len(bank) - 1, 0)} principal components.",
                cure="Ask for fewer, or add adapters." if len(bank) > 1 else "Add adapters: hundreds to be of use.",
            )
        origin: dict[str, Any] = {"base": bank.base, "kernels": dict(bank.kernels)}
        fitted = bank
        if config.strengths == "normalized" and not isinstance(bank, NormalizedBank):
            fitted, origin["strength"] = normalized(bank, progress)
        found = fit_bank(fitted, config, Work(None if folder is None else Path(folder), engine, progress))
        deviations = found.variances.sqrt().float()
        return cls(
            tuple(bank.names), len(bank), found.scores, deviations, fingerprints(bank), dict(bank.shapes), found.basis,
            config, found.accuracy, bank.digest, origin,
        )  # fmt: skip

    def __repr__(self) -> str:
        kind = self.config.representation
        return f"WeightSpace({len(self.names)} adapters, {self.components} components, representation {kind!r})"

    @property
    def components(self) -> int:
        """Number of components, k."""
        return self.scores.shape[1]

    @property
    def mean_adapter(self) -> Adapter:
        """The mean of the adapters, exactly."""
        return self.adapter(self.scores.new_zeros(self.components))

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
            adapter: Adapter of the same modules, or in "delta" of some of them, of any rank. In a space of normalized
                strengths it is brought to theirs first.

        Raises:
            NameNotFound: It has other modules than the space.
            UsageError: It has other shapes.
        """
        own = {name: change.shape for name, change in adapter.factors.items()}
        partly = self.config.representation == "delta" and own.keys() & self.shapes.keys()
        check_modules({**self.shapes, **own} if partly else own, self.shapes, what="The adapter")
        return self.basis.project(self._normalized(stacked(adapter, self.shapes)))[0][0]

    def _normalized(self, stack: AdapterStack) -> AdapterStack:
        """Adapters at the strength of those that the space was fitted to, if they had been brought to one."""
        if (strength := self.origin.get("strength")) is None:
            return stack
        return scaled(stack, normalizing(norms_of(stack).sqrt(), strength))

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
        return Adapter(dict(self.basis.factors(scores.detach().cpu())))

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
            self.basis.project(self._normalized(stack))
            for _, stack in read_blocks(bank, len(bank), description="New adapters", progress=progress, first=known)
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
        place = Path(folder)
        with whole_folder(place) as part:
            part.mkdir()
            write_space(vars(self), part, place, standalone=standalone, bank=None if bank is None else Path(bank))

    @staticmethod
    def open(folder: str | Path, bank: Bank | None = None) -> WeightSpace:
        """Open a saved space.

        Args:
            folder: The folder.
            bank: The bank that it was fitted to, or that bank grown; "delta" needs it, unless the space stands alone or
                knows where it lies.

        Raises:
            UsageError: The bank is missing, or another.
            CorruptBlob: The folder is damaged.
        """
        return WeightSpace(**read_space(Path(folder), bank))


@final
@dataclass(frozen=True)
class Appended:
    """A space with more adapters."""

    space: WeightSpace  # the space: components as they were, names and scores with the new ones
    added: int  # number of new adapters
    captured: float  # share of their squared distance from the mean that lies along the components

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
        energy: float = 1.0,
        layout: Layout | None = None,
        base: str | None = None,
        overwrite: bool = False,
    ) -> Exported:
        """Write the point as an adapter; see `export_adapter`. The base is the bank's, where none is given."""
        origin = self.space.origin
        kernels = {name: tuple(sides) for name, sides in origin.get("kernels", {}).items()}
        return export_adapter(
            self.space.basis.factors(self.scores.detach().cpu()), path, rank=rank, energy=energy, layout=layout,
            base=base or origin.get("base"), kernels=kernels, overwrite=overwrite,
        )  # fmt: skip
