"""A hardening at rest: the checkpoint it resumes from, and the record of what was done. `robust.py` writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from netweight.probe.diffusion import Text
from netweight.store.checkpoint import open_checkpoint, write_checkpoint
from netweight.store.record import read_record, write_record

__all__ = ["HardenRecord", "HardenState", "RoundLog"]

_VERSION = 1
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@final
@dataclass(frozen=True)
class RoundLog:
    """One round.

    Attributes:
        number: Counted from 0.
        searched: Mean denoising error that the round's searches came to: low where images are still easy to find.
        surrogate: Error towards surrogates under found embeddings, at the last training step.
        kept: Difference from the original under ordinary prompts, at the last training step.
    """

    number: int
    searched: float
    surrogate: float
    kept: float


@final
@dataclass(frozen=True)
class HardenRecord:
    """What was done to a model.

    Attributes:
        settings: Of the hardening.
        digests: Of the model `before` and `after`, of `prompts`, `images` and `surrogates`.
        trained: How many weights were trained.
        rounds: What each round was.
        environment: Versions and machine.
    """

    settings: Mapping[str, Any]
    digests: Mapping[str, str]
    trained: int
    rounds: tuple[RoundLog, ...]
    environment: Mapping[str, Any]

    def write(self, path: str | Path) -> None:
        """Write the record as JSON, over one that is there.

        Args:
            path: The file.

        Raises:
            OutputFailed: The place cannot be written.
        """
        write_record(path, asdict(self), version=_VERSION)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a record.

        Args:
            path: The file.

        Raises:
            CorruptBlob: The file holds none of this version.
            OSError: It cannot be read.
        """

        def made(values: dict[str, Any]) -> Self:
            return cls(rounds=tuple(RoundLog(**entry) for entry in values.pop("rounds")), **values)

        return read_record(path, made, version=_VERSION, of="a hardened model")


@final
@dataclass(frozen=True)
class HardenState:
    """All of a hardening between two rounds.

    Attributes:
        tensors: Trained weights (`weight|name`), Adam's moments (`exp_avg|name` and so on), and the `pool` of
            embeddings with its `mask` if it has one.
        owners: Which memorized prompt each embedding of the pool belongs to.
        logs: Of the rounds so far.
    """

    tensors: Mapping[str, Tensor]
    owners: Sequence[int]
    logs: Sequence[RoundLog]

    @classmethod
    def take(
        cls,
        weights: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Adam,
        pool: Text,
        owners: Sequence[int],
        logs: Sequence[RoundLog],
    ) -> Self:
        """Look at a hardening; nothing is copied.

        Args:
            weights: What is trained, by name.
            optimizer: Adam over these weights.
            pool: Embeddings that were found so far.
            owners: For each of them, which prompt it belongs to.
            logs: What is known of the rounds so far.
        """
        tensors = {f"weight|{name}": weight.detach() for name, weight in weights.items()}
        for name, weight in weights.items():
            tensors |= {f"{kind}|{name}": optimizer.state[weight][kind] for kind in _MOMENTS}
        tensors["pool"] = pool.states
        if pool.mask is not None:
            tensors["mask"] = pool.mask
        return cls(tensors, owners, logs)

    @torch.no_grad()
    def restore(self, weights: Mapping[str, nn.Parameter], optimizer: torch.optim.Adam) -> None:
        """Set weights and optimizer to what they were.

        Args:
            weights: What is trained, by name; changed in place.
            optimizer: Adam over these weights; changed in place.
        """
        for name, weight in weights.items():
            weight.copy_(self.tensors[f"weight|{name}"])
            moments = {kind: self.tensors[f"{kind}|{name}"] for kind in _MOMENTS}
            # Adam counts its steps on the CPU.
            optimizer.state[weight] = {
                kind: value if kind == "step" else value.to(weight) for kind, value in moments.items()
            }

    def pool_like(self, text: Text) -> Text:
        """Return the pool, on the device of some embeddings.

        Args:
            text: Embeddings of the same model.
        """
        mask = self.tensors.get("mask")
        return Text(self.tensors["pool"].to(text.states), None if mask is None else mask.to(text.states.device))

    def save(self, path: Path, identity: str) -> None:
        """Write the state over the one before it, all or nothing.

        Args:
            path: The file.
            identity: A digest of model, images and settings; only the same may resume it.

        Raises:
            OutputFailed: The file could not be written; the older one is untouched.
        """
        about = {"identity": identity, "owners": list(self.owners), "rounds": [asdict(log) for log in self.logs]}
        write_checkpoint(path, about, self.tensors.items())

    @classmethod
    def load(cls, path: Path, identity: str) -> Self:
        """Read a state.

        Args:
            path: The file.
            identity: Digest of the hardening's settings and prompts.

        Raises:
            UsageError: It belongs to another hardening.
            CorruptBlob: It is damaged.
        """
        refusal = "holds a hardening of another model, other images or settings"
        with open_checkpoint(path, {"identity": identity}, refusal=refusal) as (about, store, names):
            tensors = {name: store.get(name) for name in names}
        return cls(tensors, about["owners"], [RoundLog(**log) for log in about["rounds"]])
