"""A space of adapters: fitted, sampled, projected into, extended, and kept in a folder.

The folder holds `space.json`, what it is, and `space.safetensors`, its numbers; no pickle anywhere. A space whose
components are combinations of adapters needs these to make points: its bank is named by digest and place, or written
along as `adapters.safetensors`. The space that weights2weights published is read, too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeAlias, final

import safetensors.torch
import torch
from torch import Tensor

from netweight.core.atomic_writes import whole_folder
from netweight.core.digests import digest_config, digest_file
from netweight.core.engines import Engine
from netweight.core.environment import describe
from netweight.core.progress import QUIET, Progress
from netweight.core.records import read_record, write_record
from netweight.errors import CorruptBlob, UsageError
from netweight.methods.space.basis import Basis, Combinations, RowLayout, Sketch
from netweight.methods.space.fit import Accuracy, Work, fit_bank
from netweight.methods.space.gram import (
    Bank,
    NormalizedBank,
    StackBank,
    check_modules,
    fingerprints,
    normalized,
    normalizing,
    norms_of,
    read_blocks,
    same_fingerprints,
    scaled,
    stack_of,
)
from netweight.methods.space.points import GaussianSampler, row_of
from netweight.methods.space.settings import FitSettings, Representation
from netweight.nn.lora import Adapter, AdapterStack
from netweight.nn.pca import RowBasis, orthonormality
from netweight.store.bank.bank import AdapterBank
from netweight.store.bank.published import PublishedLayout, model_names, published_layout, published_tensor
from netweight.store.bank.shards import stacked
from netweight.store.lora_formats.parts import Layout
from netweight.store.lora_formats.writing import ExportResult, export_adapter

RECORD = "space.json"
_NUMBERS, _ADAPTERS = "space.safetensors", "adapters.safetensors"
_VERSION = 1
_Tensors: TypeAlias = Mapping[str, Tensor]
_SCORED = ("scores", "deviations", "fingerprints")
_PARTS = ("down", "up", "scale", "ranks")
_ROWS = ("mean", "deviation", "components", "variances")


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
                that of `core.engines.ray_cluster`. "factors" uses it only where it streams.
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
        result = fit_bank(fitted, config, Work(None if folder is None else Path(folder), engine, progress))
        deviations = result.variances.sqrt().float()
        return cls(
            tuple(bank.names), len(bank), result.scores, deviations, fingerprints(bank), dict(bank.shapes),
            result.basis, config, result.accuracy, bank.digest, origin,
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

    def append(self, bank: Bank, *, progress: Progress = QUIET) -> AppendResult:
        """Give scores to the adapters that a bank has got since, without fitting again.

        Args:
            bank: It begins with the adapters of this space, in their order.
            progress: Where to show it.

        Returns:
            The space with their names and scores, and how well it describes them.

        Raises:
            UsageError: The bank begins with others, changes other modules, or has none that are new.
        """
        count = len(self.names)
        check_modules(bank.shapes, self.shapes, what="The bank")
        if (
            len(bank) <= count
            or list(bank.names[:count]) != list(self.names)
            or not same_fingerprints((marks := fingerprints(bank))[:count], self.fingerprints)
        ):
            raise UsageError(
                f"The bank is not that of the space with more adapters: the space has {count}, the bank {len(bank)}.",
                cure="Append to the bank that the space was fitted to, or fit a new one.",
            )
        projections = [
            self.basis.project(self._normalized(stack))
            for _, stack in read_blocks(bank, len(bank), description="New adapters", progress=progress, first=count)
        ]
        scores, squares = (torch.cat(parts) for parts in zip(*projections, strict=True))
        scores = torch.cat([self.scores, scores])
        space = replace(self, names=tuple(bank.names), scores=scores, fingerprints=marks)
        return AppendResult(space, len(bank) - count, float(scores[count:].square().sum() / squares.sum()))

    def _check(self, scores: Tensor, dimensions: tuple[int, ...]) -> None:
        if scores.ndim not in dimensions or scores.shape[-1] != self.components:
            raise UsageError(
                f"Scores of shape {tuple(scores.shape)} are not points of a space of {self.components} components.",
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
            write_space(self, part, place, standalone=standalone, bank=None if bank is None else Path(bank))

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
        return _read_space(Path(folder), bank)


@final
@dataclass(frozen=True)
class AppendResult:
    """A space with more adapters."""

    space: WeightSpace
    """The space with its old components, and the names and scores of the new adapters added."""
    added: int
    """Number of new adapters."""
    captured: float
    """Share of the new adapters' squared distance from the mean that lies along the components."""

    @property
    def expected(self) -> float:
        """Captured share of held-out adapters, if two halves were fitted; otherwise of the fitted ones."""
        halves = self.space.accuracy.halves
        return self.space.accuracy.captured if halves is None else halves.held_out

    @property
    def refit(self) -> str | None:
        """Reason for which a new fit is advised; None without one."""
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
    """The space that contains the point."""
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
    ) -> ExportResult:
        """Write the point as an adapter; see `export_adapter`. The base is the bank's, where none is given."""
        origin = self.space.origin
        kernels = {name: tuple(sides) for name, sides in origin.get("kernels", {}).items()}
        return export_adapter(
            self.space.basis.factors(self.scores.detach().cpu()), path, rank=rank, energy=energy, layout=layout,
            base=base or origin.get("base"), kernels=kernels, overwrite=overwrite,
        )  # fmt: skip


def write_space(space: WeightSpace, part: Path, folder: Path, *, standalone: bool, bank: Path | None) -> None:
    """Write a space into an empty folder, from where it will be moved to its place."""
    numbers, basis = _of_basis(space.basis)
    numbers |= {name: getattr(space, name) for name in _SCORED}
    digests = {_NUMBERS: _write(part / _NUMBERS, numbers)}
    if standalone and space.basis.combinations is not None:
        digests[_ADAPTERS] = _write(part / _ADAPTERS, _adapters(space.basis.combinations))
    record = {
        "config": space.config.to_json(),
        "accuracy": space.accuracy.to_json(),
        "bank": space.bank_digest,
        "origin": dict(space.origin),
        "bank_at": None if bank is None else os.path.relpath(bank.resolve(), folder.resolve()),
        "fitted": space.fitted,
        "components": space.scores.shape[1],
        "names": list(space.names),
        "shapes": {name: list(shape) for name, shape in space.shapes.items()},
        "basis": basis,
        "digests": digests,
        "environment": describe(),
    }
    write_record(part / RECORD, record, version=_VERSION)


def _read_space(folder: Path, bank: Bank | None) -> WeightSpace:
    values = read_about(folder)
    numbers = _read(folder / _NUMBERS, values["digests"][_NUMBERS])
    shapes = {name: (rows, columns) for name, (rows, columns) in values["shapes"].items()}
    about = values["basis"]
    combinations = _combinations(folder, values, numbers, bank) if "weights" in numbers else None
    rows: RowBasis | None = None
    writer: RowLayout | Sketch | None = None
    if "components" in numbers:
        tensors = (numbers.get(name) for name in _ROWS)
        rows = RowBasis(**dict(zip(_ROWS, tensors, strict=True)), total=about["total"])  # type: ignore[arg-type]
    if "layout" in about:
        writer = RowLayout(dict(sorted(shapes.items())), about["layout"]["ranks"], about["layout"]["scales"])
    elif "side" in about:
        writer = Sketch(shapes, about["side"], about["seed"])
    return WeightSpace(
        names=tuple(values["names"]), fitted=values["fitted"], shapes=shapes, basis=Basis(combinations, rows, writer),
        config=FitSettings(**values["config"]), accuracy=Accuracy.from_json(values["accuracy"]),
        bank_digest=values["bank"], origin=values.get("origin", {}), **{name: numbers[name] for name in _SCORED},
    )  # fmt: skip


def read_about(folder: Path) -> dict[str, Any]:
    """Read what a space is, without its numbers: the values of its record."""
    if not (folder / RECORD).is_file():
        raise UsageError(
            f"{folder} contains no space: there is no {RECORD}.", cure="Make one with `netweight space fit`."
        )
    values: dict[str, Any] = read_record(folder / RECORD, dict, version=_VERSION, of="a space")
    return values


def check_space(folder: Path, bank: Path | None) -> None:
    """Refuse a folder that contains no space, and a space that needs its bank where there is none; no numbers are read.

    Args:
        folder: The folder of a space.
        bank: The bank that the space was fitted to, if it has moved.
    """
    values = read_about(folder)
    if "mean_square" in values["basis"] and bank is None and _ADAPTERS not in values["digests"]:
        _bank_at(folder, values["bank_at"])


def _of_basis(basis: Basis) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A basis as tensors and JSON values."""
    numbers: dict[str, Tensor | None] = {}
    about: dict[str, Any] = {}
    if (made := basis.combinations) is not None:
        numbers |= {
            "weights": made.weights,
            "offsets": made.offsets,
            "strengths": getattr(made.bank, "strengths", None),
        }
        about["mean_square"] = made.mean_square
    if (rows := basis.rows) is not None:
        numbers |= {name: getattr(rows, name) for name in _ROWS}
        about["total"] = rows.total
    if isinstance(basis.writer, Sketch):
        about |= {"side": basis.writer.side, "seed": basis.writer.seed}
    elif basis.writer is not None:
        about["layout"] = {"ranks": dict(basis.writer.ranks), "scales": dict(basis.writer.scales)}
    return {name: value for name, value in numbers.items() if value is not None}, about


def _combinations(folder: Path, values: Mapping[str, Any], numbers: _Tensors, bank: Bank | None) -> Combinations:
    fitted = values["names"][: values["fitted"]]
    standalone = False
    if bank is not None:
        _check_bank(bank, values["bank"], fitted, numbers["fingerprints"][: len(fitted)])
    elif standalone := _ADAPTERS in values["digests"]:
        bank = _bank(_read(folder / _ADAPTERS, values["digests"][_ADAPTERS]), fitted)
    else:
        bank = _bank_at(folder, values["bank_at"])
        _check_bank(bank, values["bank"], fitted, numbers["fingerprints"][: len(fitted)])
    if "strengths" in numbers and not standalone and not isinstance(bank, NormalizedBank):
        bank = NormalizedBank(bank, numbers["strengths"])
    return Combinations(bank, numbers["weights"], numbers["offsets"], values["basis"]["mean_square"])


def _bank_at(folder: Path, place: str | None) -> AdapterBank:
    """The bank where it lay when the space was written, seen from the space's folder."""
    if place is not None and (folder.resolve() / place).is_dir():
        return AdapterBank.open(folder.resolve() / place)
    where = "" if place is None else f", which was at {place} relative to it"
    raise UsageError(
        f"The components of {folder} are combinations of the adapters of its bank{where}.",
        cure="Name the bank (--bank), or write the space standalone.",
    )


def _check_bank(bank: Bank, digest: str, fitted: Sequence[str], marks: Tensor) -> None:
    """Refuse a bank that is neither the one of the fit nor that one grown."""
    if bank.digest == digest:
        return
    if list(bank.names[: len(fitted)]) == list(fitted):
        if same_fingerprints(fingerprints(bank, len(fitted)), marks):
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


def _bank(tensors: _Tensors, names: Sequence[str]) -> StackBank:
    parts: dict[str, dict[str, Tensor]] = {part: {} for part in _PARTS}
    for name, value in tensors.items():
        part, _, module = name.partition("|")
        parts[part][module] = value
    return StackBank(names, AdapterStack(**parts))


def _write(path: Path, tensors: _Tensors) -> str:
    """Write tensors and return the file's digest."""
    safetensors.torch.save_file({name: value.contiguous() for name, value in tensors.items()}, path)
    return digest_file(path)


def _read(path: Path, digest: str) -> dict[str, Tensor]:
    if not path.is_file():
        raise CorruptBlob(f"{path} is missing.")
    if digest_file(path) != digest:
        raise CorruptBlob(f"{path} is not the file that was written: its digest differs.")
    return safetensors.torch.load_file(path)


# Source: weights2weights (arXiv 2406.09413) and the card of its data: row = (V s) · std + mean, where s are the scores,
# and columns of V are components of rows that were centered and divided by std.
_SCORES = "proj_*pc.pt"
# The largest error at which components count as orthonormal.
_UNIT = 1e-3


def read_published(folder: Path, *, components: int | None = None, stable_diffusion: bool = False) -> WeightSpace:
    """Read a published space, without executing anything.

    Args:
        folder: With `V.pt`, `mean.pt`, `std.pt`, `proj_1000pc.pt`, `adapter_config.json` and `weight_dimensions.pt`.
        components: How many to take; by default as many as models have scores of.
        stable_diffusion: Whether to take Stable Diffusion 1's order of weights in place of `weight_dimensions.pt`.

    Returns:
        The space, in the representation "factors"; its models are called `model-000000` and so on.

    Raises:
        UsageError: A file is missing, or shapes contradict each other.
        UnsafeInput: A file holds objects that only its code could make.
        CorruptBlob: A file is damaged, or contains NaN.
    """
    scores_files = sorted(folder.glob(_SCORES))
    if len(scores_files) != 1:
        raise UsageError(
            f"{folder} contains {len(scores_files)} files {_SCORES}, not one.",
            cure="Leave one of them in the folder, with the scores of the models.",
        )
    vectors, scores = published_tensor(folder / "V.pt"), published_tensor(scores_files[0])
    mean, std = (published_tensor(folder / name).flatten().float() for name in ("mean.pt", "std.pt"))
    length = len(mean)
    if vectors.ndim != 2 or len(vectors) != length or len(std) != length or scores.ndim != 2 or len(scores) < 2:
        raise UsageError(
            f"{folder}: V is {tuple(vectors.shape)}, mean {tuple(mean.shape)}, std {tuple(std.shape)} and "
            f"{scores_files[0].name} {tuple(scores.shape)}: they are not of one space.",
            cure="Fetch the files again.",
        )
    most = min(vectors.shape[1], scores.shape[1])
    count = most if components is None else components
    if not 1 <= count <= most:
        raise UsageError(f"{folder} has scores of {most} components, not of {count}.", cure=f"Ask for 1 to {most}.")
    layout = published_layout(folder / "V.pt", length, stable_diffusion=stable_diffusion)
    order, rows = _in_our_order(layout)
    components_by_variance = vectors[:, :count].T.float()[:, order].contiguous()
    scores, mean, std = scores[:, :count].float().contiguous(), mean[order], std[order]
    for name, value in (
        ("V.pt", components_by_variance),
        (scores_files[0].name, scores),
        ("mean.pt", mean),
        ("std.pt", std),
    ):
        if not value.isfinite().all():
            raise CorruptBlob(f"{folder / name} contains NaN or infinity.", cure="Fetch the file again.")
    error = orthonormality(components_by_variance)
    if error > _UNIT:
        raise CorruptBlob(
            f"{folder / 'V.pt'}: its components are not orthonormal; their error is {error:.1e}.",
            cure="Fetch the file again.",
        )
    variances = scores.double().var(0)
    # Each number was divided by its standard deviation, so its variance is 1.
    total = float(length)
    return WeightSpace(
        names=tuple(model_names(len(scores))), fitted=len(scores), scores=scores,
        deviations=variances.sqrt().float(), shapes=dict(rows.shapes),
        basis=Basis(None, RowBasis(mean, std, components_by_variance, variances, total), rows),
        # The adapters themselves are not available, so they cannot be recognized.
        fingerprints=torch.zeros(len(scores), dtype=torch.float64),
        config=FitSettings(components=count, representation="factors"),
        accuracy=Accuracy("published", min(1.0, float(variances.sum()) / total), error),
        bank_digest=digest_config({"published": str(folder)}), origin={"base": layout.base, "kernels": {}},
    )  # fmt: skip


def _in_our_order(layout: PublishedLayout) -> tuple[Tensor, RowLayout]:
    """Return the position of each number of our rows in a published row, and the modules of our rows."""
    names = sorted(layout.modules)
    modules = {name: layout.modules[name] for name in names}
    places = [torch.arange(part.start, part.stop) for one in modules.values() for part in (one.down, one.up)]
    order = torch.cat(places)
    ranks = {name: one.rank for name, one in modules.items()}
    scales = {name: one.scale for name, one in modules.items()}
    shapes = {name: one.shape for name, one in modules.items()}
    return order, RowLayout(shapes, ranks, scales)
