"""Training at rest: weights, optimizer states and history in one compressed file. `training.py` writes and reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from netweight.methods.immunize.master_weights import MasterWeights
from netweight.methods.immunize.record import StepLog
from netweight.store.checkpoint import open_checkpoint, write_checkpoint

__all__ = ["Checkpoint"]

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@final
@dataclass(frozen=True)
class Checkpoint:
    """All of training between two steps.

    Attributes:
        weights: Trained weights by name, float32 where the model is narrower.
        moments: Adam's, by weight and kind.
        balance: Weights of balanced terms.
        steps: What is known of the steps so far.
    """

    weights: Mapping[str, Tensor]
    moments: Mapping[tuple[str, str], Tensor]
    balance: Mapping[str, float]
    steps: Sequence[StepLog]

    @classmethod
    def take(
        cls,
        weights: MasterWeights,
        optimizer: torch.optim.Adam,
        balance: Mapping[str, float],
        steps: Sequence[StepLog],
    ) -> Checkpoint:
        """Look at training; nothing is copied."""
        moments = {
            (name, kind): optimizer.state[master][kind]
            for name, master in weights.masters.items()
            if master in optimizer.state
            for kind in _MOMENTS
        }
        return cls(weights.masters, moments, balance, steps)

    def restore(self, weights: MasterWeights, optimizer: torch.optim.Adam) -> None:
        """Set weights and optimizer to what they were."""
        weights.load(dict(self.weights))
        for name, master in weights.masters.items():
            optimizer.state.pop(master, None)
            state = {kind: self.moments[name, kind] for kind in _MOMENTS if (name, kind) in self.moments}
            if state:  # Adam counts its steps on the CPU
                device = {"step": torch.device("cpu")}
                optimizer.state[master] = {
                    kind: value.to(device.get(kind, master.device)) for kind, value in state.items()
                }

    def save(self, path: Path, identity: str) -> None:
        """Write the checkpoint over the one before it, all or nothing.

        Args:
            path: The file, safetensors with compressed tensors and a digest of each.
            identity: A digest of model, data and settings; only the same may resume it.
        """
        about = {"identity": identity, "balance": dict(self.balance), "steps": [asdict(step) for step in self.steps]}
        write_checkpoint(path, about, self._tensors())

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in self.weights.items():
            yield f"weight|{name}", value
        for (name, kind), value in self.moments.items():
            yield f"{kind}|{name}", value

    @classmethod
    def load(cls, path: Path, identity: str) -> Checkpoint:
        """Read a checkpoint.

        Raises:
            UsageError: It belongs to another training.
            CorruptBlob: It is damaged.
        """
        weights: dict[str, Tensor] = {}
        moments: dict[tuple[str, str], Tensor] = {}
        refusal = "holds a training of another model, defense, data or settings"
        with open_checkpoint(path, {"identity": identity}, refusal=refusal) as (about, store, names):
            for stored in names:
                kind, _, name = stored.partition("|")
                if kind == "weight":
                    weights[name] = store.get(stored)
                elif kind in _MOMENTS:
                    moments[name, kind] = store.get(stored)
        return cls(weights, moments, about["balance"], [StepLog.from_json(values) for values in about["steps"]])
