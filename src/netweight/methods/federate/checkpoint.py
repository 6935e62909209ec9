"""A federation at rest: the server's state, every client's private tensors and the history, in one compressed file.

The engine in this process calls it. A Flower server and its clients keep theirs apart, see `integrations/flower`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from torch import Tensor

from netweight.methods.federate.rounds import Round
from netweight.methods.federate.updates import Tensors
from netweight.store.checkpoint import open_checkpoint, write_checkpoint

__all__ = ["Checkpoint"]


@final
@dataclass(frozen=True)
class Checkpoint:
    """All of a federation between two rounds.

    Attributes:
        state: The server's tensors. By name.
        private: Each client's private tensors by name, for those that took part so far.
        rounds: What is known of the rounds so far.
    """

    state: Tensors
    private: Mapping[int, Tensors]
    rounds: Sequence[Round]

    def save(self, path: Path, settings: str) -> None:
        """Write the checkpoint over the one before it, all or nothing.

        Args:
            path: The file, safetensors with compressed tensors and a digest of each.
            settings: A digest of what the federation was asked for; only the same may resume it.
        """
        about = {"settings": settings, "rounds": [round.to_json() for round in self.rounds]}
        write_checkpoint(path, about, self._tensors())

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in self.state.items():
            yield f"state|{name}", value
        for client, tensors in self.private.items():
            for name, value in tensors.items():
                yield f"private|{client}|{name}", value

    @classmethod
    def load(cls, path: Path, settings: str) -> Checkpoint:
        """Read a checkpoint.

        Args:
            path: The file.
            settings: Digest of the federation's settings.

        Raises:
            UsageError: It belongs to a federation with other settings.
            CorruptBlob: It is damaged.
        """
        state: dict[str, Tensor] = {}
        private: dict[int, dict[str, Tensor]] = {}
        refusal = "holds a federation with other settings, data or model"
        with open_checkpoint(path, {"settings": settings}, refusal=refusal) as (about, store, names):
            for name in names:
                kind, _, rest = name.partition("|")
                if kind == "state":
                    state[rest] = store.get(name)
                elif kind == "private":
                    client, _, own = rest.partition("|")
                    private.setdefault(int(client), {})[own] = store.get(name)
        return cls(state, private, [Round.from_json(values) for values in about["rounds"]])
