"""A space at rest: a folder with `space.json`, what it is, and `space.safetensors`, its numbers. No pickle anywhere.

A space whose components are combinations of adapters needs these to make points: its bank is named by digest, and may
be written along as `adapters.safetensors`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from netweight.core.digest import of_file
from netweight.errors import CorruptBlob, UsageError
from netweight.generate.stack import AdapterStack
from netweight.methods.space.bank import Bank, StackBank, stack_of, stacks_of
from netweight.methods.space.combinations import Combinations
from netweight.methods.space.config import FitConfig
from netweight.methods.space.inner_product import norms_of
from netweight.store.atomic import whole_folder
from netweight.store.record import read_record, write_record

if TYPE_CHECKING:
    from netweight.methods.space.method import WeightSpace

__all__ = ["RECORD", "read_space", "write_space"]

RECORD = "space.json"
_NUMBERS, _ADAPTERS = "space.safetensors", "adapters.safetensors"
_VERSION = 1
_PARTS = ("down", "up", "scale", "ranks")


def write_space(space: WeightSpace, folder: Path, *, standalone: bool) -> None:
    """Write a space; see `WeightSpace.save`."""
    with whole_folder(folder) as part:
        part.mkdir()
        numbers = {"scores": space.scores, "deviations": space.deviations, **_numbers(space.basis)}
        digests = {_NUMBERS: _write(part / _NUMBERS, numbers)}
        if standalone and isinstance(space.basis, Combinations):
            digests[_ADAPTERS] = _write(part / _ADAPTERS, _adapters(space.basis))
        record = {
            "kind": type(space.basis).__name__,
            "config": vars(space.config),
            "bank": {"digest": space.bank_digest},
            "names": list(space.names),
            "shapes": {name: list(shape) for name, shape in space.shapes.items()},
            "digests": digests,
        }
        write_record(part / RECORD, record, version=_VERSION)


def read_space(cls: type[WeightSpace], folder: Path, bank: Bank | None) -> WeightSpace:
    """Read a space; see `WeightSpace.open`."""
    if not (folder / RECORD).is_file():
        raise UsageError(f"{folder} holds no space: there is no {RECORD}.", cure="Make one with `netweight space fit`.")
    values: dict[str, Any] = read_record(folder / RECORD, dict, version=_VERSION, of="a space")
    numbers = _read(folder / _NUMBERS, values["digests"][_NUMBERS])
    fitted = values["names"][: len(numbers["weights"])]
    if bank is None and _ADAPTERS in values["digests"]:
        bank = _bank(_read(folder / _ADAPTERS, values["digests"][_ADAPTERS]), fitted)
    elif bank is None:
        raise UsageError(
            f"The components of {folder} are combinations of the adapters of its bank.",
            cure="Open it with that bank, or save the space standalone.",
        )
    else:
        _check_bank(bank, values, fitted, numbers["norms"])
    basis = Combinations(bank, numbers["weights"], numbers["offsets"], numbers["norms"])
    shapes = {name: (rows, columns) for name, (rows, columns) in values["shapes"].items()}
    return cls(
        tuple(values["names"]), numbers["scores"], numbers["deviations"], shapes, basis,
        FitConfig(**values["config"]), values["bank"]["digest"],
    )  # fmt: skip


def _numbers(basis: object) -> dict[str, Tensor]:
    assert isinstance(basis, Combinations)
    return {"weights": basis.weights, "offsets": basis.offsets, "norms": basis.norms}


def _check_bank(bank: Bank, values: Mapping[str, Any], fitted: Sequence[str], norms: Tensor) -> None:
    """Refuse a bank that is neither the one of the fit nor that one grown.

    A grown bank has another digest; its first adapters are compared by name and norm.
    """
    if bank.digest == values["bank"]["digest"]:
        return
    if list(bank.names[: len(fitted)]) == list(fitted):
        found = torch.cat([norms_of(stack) for _, stack in stacks_of(bank, len(fitted), description="Checking")])
        if torch.allclose(found, norms, rtol=1e-5, atol=0):
            return
    raise UsageError(
        f"This is another bank than the space was fitted to: its digest is {bank.digest}, not "
        f"{values['bank']['digest']}, and its first adapters are others.",
        cure="Open the space with its own bank, or fit a new one.",
    )


def _adapters(basis: Combinations) -> dict[str, Tensor]:
    """The factors of all adapters, by part and module."""
    whole = stack_of(basis.bank, 0, len(basis.weights))
    parts = zip(_PARTS, (whole.down, whole.up, whole.scale, whole.ranks), strict=True)
    return {f"{part}|{name}": value for part, values in parts for name, value in values.items()}


def _bank(tensors: Mapping[str, Tensor], names: Sequence[str]) -> StackBank:
    parts: dict[str, dict[str, Tensor]] = {part: {} for part in _PARTS}
    for name, value in tensors.items():
        part, _, module = name.partition("|")
        parts[part][module] = value
    return StackBank(names, AdapterStack(**parts))


def _write(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors and return the file's digest."""
    safetensors.torch.save_file({name: value.contiguous() for name, value in tensors.items()}, path)
    return of_file(path)


def _read(path: Path, digest: str) -> dict[str, Tensor]:
    if not path.is_file():
        raise CorruptBlob(f"{path} is missing.")
    if of_file(path) != digest:
        raise CorruptBlob(f"{path} is not the file that was written: its digest is another.")
    return safetensors.torch.load_file(path)
