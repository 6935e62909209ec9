"""A space at rest: a folder with `space.json`, what it is, and `space.safetensors`, its numbers. No pickle anywhere.

A space whose components are combinations of adapters needs these to make points: its bank is named by digest and place,
or written along as `adapters.safetensors`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
from torch import Tensor

from netweight.core.digest import of_file
from netweight.core.environment import describe
from netweight.errors import CorruptBlob, UsageError
from netweight.generate.basis import Basis as RowBasis
from netweight.generate.stack import AdapterStack
from netweight.methods.space.accuracy import Accuracy
from netweight.methods.space.bank import Bank, StackBank, stack_of
from netweight.methods.space.combinations import Combinations
from netweight.methods.space.config import FitConfig
from netweight.methods.space.fitting import Basis
from netweight.methods.space.gram import fingerprints, same_fingerprints
from netweight.methods.space.sketch import Sketch
from netweight.methods.space.vector_basis import VectorBasis
from netweight.methods.space.vectors import Layout
from netweight.store.adapter_bank import AdapterBank
from netweight.store.atomic import whole_folder
from netweight.store.record import read_record, write_record

if TYPE_CHECKING:
    from netweight.methods.space.method import WeightSpace

__all__ = ["RECORD", "read_about", "read_space", "write_space"]

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
    basis: Basis
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


def _of_basis(basis: Basis) -> tuple[dict[str, Tensor], dict[str, Any]]:
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
