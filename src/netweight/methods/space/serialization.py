"""A space in a folder: `space.json`, what it is, and `space.safetensors`, its numbers. No pickle anywhere.

A space whose components are combinations of adapters needs these to make points: its bank is named by digest and place,
or written along as `adapters.safetensors`. The space that weights2weights published is read, too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import safetensors.torch
import torch
from torch import Tensor

from netweight.core.environment import describe
from netweight.core.files import digest_config, digest_file, read_record, write_record
from netweight.errors import CorruptBlob, UsageError
from netweight.methods.space.basis import Basis, Combinations, RowLayout, Sketch
from netweight.methods.space.fit import Accuracy
from netweight.methods.space.gram import (
    Bank,
    NormalizedBank,
    StackBank,
    fingerprints,
    same_fingerprints,
    stack_of,
)
from netweight.methods.space.settings import FitSettings
from netweight.nn.lora import AdapterStack
from netweight.nn.pca import RowBasis, orthonormality
from netweight.store.bank.bank import AdapterBank
from netweight.store.bank.published import Published, model_names, published_layout, published_tensor

RECORD = "space.json"
_NUMBERS, _ADAPTERS = "space.safetensors", "adapters.safetensors"
_VERSION = 1
_Tensors: TypeAlias = Mapping[str, Tensor]
_PARTS = ("down", "up", "scale", "ranks")
_ROWS = ("mean", "deviation", "components", "variances")


def write_space(fields: Mapping[str, Any], part: Path, folder: Path, *, standalone: bool, bank: Path | None) -> None:
    """Write the fields of a `WeightSpace` into an empty folder, from where it will be moved to its place."""
    numbers, basis = _of_basis(fields["basis"])
    numbers |= {name: fields[name] for name in ("scores", "deviations", "fingerprints")}
    digests = {_NUMBERS: _write(part / _NUMBERS, numbers)}
    if standalone and fields["basis"].combinations is not None:
        digests[_ADAPTERS] = _write(part / _ADAPTERS, _adapters(fields["basis"].combinations))
    record = {
        "config": fields["config"].to_json(),
        "accuracy": fields["accuracy"].to_json(),
        "bank": fields["bank_digest"],
        "origin": dict(fields["origin"]),
        "bank_at": None if bank is None else os.path.relpath(bank.resolve(), folder.resolve()),
        "fitted": fields["fitted"],
        "components": fields["scores"].shape[1],
        "names": list(fields["names"]),
        "shapes": {name: list(shape) for name, shape in fields["shapes"].items()},
        "basis": basis,
        "digests": digests,
        "environment": describe(),
    }
    write_record(part / RECORD, record, version=_VERSION)


def read_space(folder: Path, bank: Bank | None) -> dict[str, Any]:
    """Read the fields of a `WeightSpace`."""
    values = read_about(folder)
    numbers = _read(folder / _NUMBERS, values["digests"][_NUMBERS])
    shapes = {name: (rows, columns) for name, (rows, columns) in values["shapes"].items()}
    about = values["basis"]
    combinations = _combinations(folder, values, numbers, bank) if "weights" in numbers else None
    rows: RowBasis | None = None
    writer: RowLayout | Sketch | None = None
    if "components" in numbers:
        found = (numbers.get(name) for name in _ROWS)
        rows = RowBasis(**dict(zip(_ROWS, found, strict=True)), total=about["total"])  # type: ignore[arg-type]
    if "layout" in about:
        writer = RowLayout(dict(sorted(shapes.items())), about["layout"]["ranks"], about["layout"]["scales"])
    elif "side" in about:
        writer = Sketch(shapes, about["side"], about["seed"])
    basis = Basis(combinations, rows, writer)
    return {
        **{name: numbers[name] for name in ("scores", "deviations", "fingerprints")},
        "names": tuple(values["names"]), "fitted": values["fitted"], "shapes": shapes, "basis": basis,
        "config": FitSettings(**values["config"]), "accuracy": Accuracy.from_json(values["accuracy"]),
        "bank_digest": values["bank"], "origin": values.get("origin", {}),
    }  # fmt: skip


def read_about(folder: Path) -> dict[str, Any]:
    """Read what a space is, without its numbers: the values of its record."""
    if not (folder / RECORD).is_file():
        raise UsageError(f"{folder} holds no space: there is no {RECORD}.", cure="Make one with `netweight space fit`.")
    values: dict[str, Any] = read_record(folder / RECORD, dict, version=_VERSION, of="a space")
    return values


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
    where = "" if place is None else f", which lay at {place} as seen from it"
    raise UsageError(
        f"The components of {folder} are combinations of the adapters of its bank{where}.",
        cure="Name the bank (--bank), or write the space standalone.",
    )


def _check_bank(bank: Bank, digest: str, fitted: Sequence[str], known: Tensor) -> None:
    """Refuse a bank that is neither the one of the fit nor that one grown."""
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
        raise CorruptBlob(f"{path} is not the file that was written: its digest is another.")
    return safetensors.torch.load_file(path)


# Source: weights2weights (arXiv 2406.09413) and the card of its data: row = (V s) · std + mean, where s are the scores,
# and columns of V are components of rows that were centered and divided by std.
_SCORES = "proj_*pc.pt"
_UNIT = 1e-3  # how far from orthonormal components may be


def read_published(folder: Path, *, components: int | None = None, stable_diffusion: bool = False) -> dict[str, Any]:
    """Read the fields of a published space, without executing anything.

    Args:
        folder: With `V.pt`, `mean.pt`, `std.pt`, `proj_1000pc.pt`, `adapter_config.json` and `weight_dimensions.pt`.
        components: How many to take; by default as many as models have scores of.
        stable_diffusion: Whether to take Stable Diffusion 1's order of weights in place of `weight_dimensions.pt`.

    Returns:
        Fields of a `WeightSpace` in the representation "factors"; its models are called `model-000000` and so on.

    Raises:
        UsageError: A file is missing, or shapes contradict each other.
        UnsafeInput: A file holds objects that only its code could make.
        CorruptBlob: A file is damaged, or holds NaN.
    """
    scores_files = sorted(folder.glob(_SCORES))
    if len(scores_files) != 1:
        raise UsageError(f"{folder} holds {len(scores_files)} files {_SCORES}.", cure="It holds the models' scores.")
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
    found = vectors[:, :count].T.float()[:, order].contiguous()
    scores, mean, std = scores[:, :count].float().contiguous(), mean[order], std[order]
    for name, value in (("V.pt", found), (scores_files[0].name, scores), ("mean.pt", mean), ("std.pt", std)):
        if not value.isfinite().all():
            raise CorruptBlob(f"{folder / name} holds NaN or infinity.", cure="Fetch the file again.")
    error = orthonormality(found)
    if error > _UNIT:
        raise CorruptBlob(
            f"{folder / 'V.pt'}: its components are not orthonormal, by {error:.1e}.", cure="Fetch the file again."
        )
    variances = scores.double().var(0)
    total = float(length)  # every number was divided by its deviation
    return {
        "names": tuple(model_names(len(scores))), "fitted": len(scores), "scores": scores,
        "deviations": variances.sqrt().float(), "shapes": dict(rows.shapes),
        "basis": Basis(None, RowBasis(mean, std, found, variances, total), rows),
        "fingerprints": torch.zeros(len(scores), dtype=torch.float64),  # no adapter is there to be known again
        "config": FitSettings(components=count, representation="factors"),
        "accuracy": Accuracy("published", min(1.0, float(variances.sum()) / total), error),
        "bank_digest": digest_config({"published": str(folder)}), "origin": {"base": layout.base, "kernels": {}},
    }  # fmt: skip


def _in_our_order(layout: Published) -> tuple[Tensor, RowLayout]:
    """Where each number of our rows stands in a published one, and what our rows are."""
    names = sorted(layout.modules)
    modules = {name: layout.modules[name] for name in names}
    places = [torch.arange(part.start, part.stop) for one in modules.values() for part in (one.down, one.up)]
    order = torch.cat(places)
    ranks = {name: one.rank for name, one in modules.items()}
    scales = {name: one.scale for name, one in modules.items()}
    shapes = {name: one.shape for name, one in modules.items()}
    return order, RowLayout(shapes, ranks, scales)
