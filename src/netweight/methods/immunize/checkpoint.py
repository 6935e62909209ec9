"""Training at rest: weights, optimizer states and history in one compressed file. `training.py` writes and reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from netweight.methods.immunize.master_weights import MasterWeights
from netweight.methods.immunize.ranks import ALONE, Ranks
from netweight.methods.immunize.record import StepLog
from netweight.methods.immunize.sharded import put, sharded_like, whole
from netweight.store.checkpoint import open_checkpoint, write_checkpoint

__all__ = ["Checkpoint"]

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@final
@dataclass(frozen=True)
class Checkpoint:
    """All of training between two steps.

    Attributes:
        weights: Trained weights by name, float32 where the model is narrower.
        moments: Adam's, by weight and kind. Shapes are those of the weights.
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
        """Look at training; nothing is copied.

        Args:
            weights: What is trained.
            optimizer: Adam over these weights.
            balance: Weights of balanced terms.
            steps: What is known of the steps so far.
        """
        moments = {
            (name, kind): optimizer.state[master][kind]
            for name, master in weights.masters.items()
            if master in optimizer.state
            for kind in _MOMENTS
        }
        return cls(weights.masters, moments, balance, steps)

    @torch.no_grad()
    def restore(self, weights: MasterWeights, optimizer: torch.optim.Adam, ranks: Ranks = ALONE) -> None:
        """Set weights and optimizer to what they were; the first process has the tensors for all, see `load`."""
        known = ranks.first(lambda: sorted(self.moments))
        for name, master in weights.masters.items():
            put(master, ranks.spread(self.weights.get(name), master))
            optimizer.state.pop(master, None)
            state: dict[str, Tensor] = {}
            for kind in (kind for kind in _MOMENTS if (name, kind) in known):
                like = torch.zeros(()) if kind == "step" else master  # Adam counts its steps on the CPU
                state[kind] = sharded_like(ranks.spread(self.moments.get((name, kind)), like), like)
            if state:
                optimizer.state[master] = state
        weights.write_back()

    def save(self, path: Path, identity: str, ranks: Ranks = ALONE) -> None:
        """Write the checkpoint over the one before it, all or nothing; the first process does, with all others' parts.

        Args:
            path: The file, safetensors with compressed tensors and a digest of each.
            identity: A digest of model, data and settings; only the same may resume it.
            ranks: The processes that train together.

        Raises:
            OutputFailed: The file could not be written; the older one is untouched.
        """
        about = {"identity": identity, "balance": dict(self.balance), "steps": [asdict(step) for step in self.steps]}
        ranks.first_takes(self._tensors(), lambda tensors: write_checkpoint(path, about, tensors))

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in self.weights.items():
            yield f"weight|{name}", whole(value)
        for (name, kind), value in self.moments.items():
            yield f"{kind}|{name}", whole(value)

    @classmethod
    def shared(cls, path: Path, identity: str, ranks: Ranks) -> Checkpoint:
        """Read a checkpoint in the first process; the others get all but its tensors.

        Args:
            path: The file.
            identity: Digest of the training's settings and data.
            ranks: The processes that train together.

        Raises:
            UsageError: It belongs to another training.
            CorruptBlob: It is damaged.
        """
        mine: list[Checkpoint] = []

        def read() -> tuple[Mapping[str, float], list[dict[str, Any]]]:
            mine.append(cls.load(path, identity))
            return mine[0].balance, [asdict(step) for step in mine[0].steps]

        balance, steps = ranks.first(read)
        return mine[0] if mine else cls({}, {}, balance, [StepLog.from_json(step) for step in steps])

    @classmethod
    def load(cls, path: Path, identity: str) -> Checkpoint:
        """Read a checkpoint.

        Args:
            path: The file.
            identity: Digest of the training's settings and data.

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
