"""A client's private tensors between rounds: in Flower's state and on the client's own disk, and out of and into it.

A node's state is memory only and a run's own, so that the file is what survives. It holds the tensors after the last
round that the server took and after the newest one: which of them counts, the server says with its next order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import safetensors
import safetensors.torch
import torch
from flwr.app import ConfigRecord, RecordDict
from torch import Tensor

from netweight.errors import UsageError
from netweight.integrations.flower.records import from_record, to_record
from netweight.methods.federate.updates import Tensors
from netweight.store.atomic import whole_file
from netweight.store.checkpoint import open_checkpoint, write_checkpoint

__all__ = ["Kept", "export_private", "import_private", "private_file"]

_KEY = "netweight.private"


def private_file(folder: str | Path, client: int) -> Path:
    """Return where a client's private tensors are.

    Args:
        folder: Where a node keeps such files.
        client: Its number.
    """
    return Path(folder) / f"client-{client}.safetensors"


@final
@dataclass(frozen=True)
class Kept:
    """A client's private tensors after some rounds.

    Attributes:
        client: Whose they are.
        federation: Digest of the federation's settings; empty for tensors that may begin any.
        after: Round → the private tensors after it; 0 for those before the first. By name.
    """

    client: int
    federation: str
    after: Mapping[int, Tensors]

    def at(self, federation: str, round: int) -> Tensors | None:
        """Return the tensors after a round, or None if there are none yet and the round is 0.

        Args:
            federation: Digest of the federation's settings.
            round: From 0, before the first.

        Raises:
            UsageError: They belong to another federation, or the server goes on from a round that is not here.
        """
        if self.after and self.federation not in ("", federation):
            raise UsageError(
                f"The private tensors of client {self.client} belong to another federation.",
                cure="Give this federation a folder of its own, or export them and import them with start=True.",
            )
        if round not in self.after and (round or self.after):
            raise UsageError(
                f"Client {self.client} keeps its private tensors after the rounds {sorted(self.after)}; the server "
                f"goes on from round {round}.",
                cure="Put the server's checkpoint or the client's file back, or begin anew without both.",
            )
        return self.after.get(round)

    def to_state(self, state: RecordDict) -> None:
        """Put them into a context's state.

        Args:
            state: Of the node's context; changed in place.
        """
        for name in [name for name in state if name.startswith(_KEY)]:
            del state[name]
        state[_KEY] = ConfigRecord({"client": self.client, "federation": self.federation, "rounds": list(self.after)})
        for round, tensors in self.after.items():
            state[f"{_KEY}.{round}"] = to_record(tensors)

    @classmethod
    def of_state(cls, state: RecordDict, client: int) -> Kept:
        """Return what a context's state holds for a client.

        Args:
            state: Of the node's context.
            client: Its number.
        """
        about = state.config_records.get(_KEY)
        if about is None or about["client"] != client:
            return cls(client, "", {})
        rounds = about["rounds"]
        assert isinstance(rounds, list)
        after = {int(round): from_record(state.array_records[f"{_KEY}.{int(round)}"]) for round in rounds}
        return cls(client, str(about["federation"]), after)

    def save(self, path: Path) -> None:
        """Write them over what is there, all or nothing.

        Args:
            path: The file.
        """
        write_checkpoint(path, {"client": self.client, "federation": self.federation}, self._tensors())

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for round, tensors in self.after.items():
            yield f"{round}|", torch.empty(0)  # a round without private tensors is a round, too
            for name, value in tensors.items():
                yield f"{round}|{name}", value

    @classmethod
    def load(cls, path: Path) -> Kept:
        """Read a file that `save` wrote.

        Args:
            path: The file.

        Raises:
            CorruptBlob: It is damaged.
        """
        after: dict[int, dict[str, Tensor]] = {}
        with open_checkpoint(path) as (about, store, names):
            for stored in names:
                round, _, name = stored.partition("|")
                tensors = after.setdefault(int(round), {})
                if name:
                    tensors[name] = store.get(stored, check=True).clone()
        return cls(about["client"], about["federation"], after)


def export_private(folder: str | Path, client: int, target: str | Path) -> Path:
    """Write a client's newest private tensors, such as its head, to an ordinary safetensors file.

    Args:
        folder: The client's folder of private tensors.
        client: Its number.
        target: The file to write; it must not be there.

    Returns:
        The file.

    Raises:
        UsageError: The client has no private tensors there.
        OutputExists: The file exists.
    """
    source = private_file(folder, client)
    if not source.exists():
        raise UsageError(f"There are no private tensors of client {client} in {folder}.", cure="Check the folder.")
    kept = Kept.load(source)
    newest = max(kept.after)
    about = {"client": client, "federation": kept.federation, "round": newest}
    data = safetensors.torch.save(dict(kept.after[newest]), metadata={_KEY: json.dumps(about)})
    with whole_file(Path(target)) as file:
        file.write(data)
    return Path(target)


def import_private(source: str | Path, folder: str | Path, *, start: bool = False) -> Path:
    """Put private tensors that were exported where a client looks for them.

    Args:
        source: A file that `export_private` wrote.
        folder: The client's folder of private tensors; it must hold none of this client.
        start: Begin a new federation from these tensors, instead of going on with the one that they are from.

    Returns:
        The client's file.

    Raises:
        UsageError: The file was not exported from a client, or the client has private tensors already.
    """
    with safetensors.safe_open(str(source), framework="pt") as file:
        metadata = file.metadata() or {}
        if _KEY not in metadata:
            raise UsageError(f"{source} was not written by export_private.", cure="Export the tensors again.")
        about = json.loads(metadata[_KEY])
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    target = private_file(folder, about["client"])
    if target.exists():
        raise UsageError(
            f"{target} holds private tensors of client {about['client']} already.", cure="Move the file away."
        )
    federation, round = ("", 0) if start else (about["federation"], about["round"])
    Kept(about["client"], federation, {round: tensors}).save(target)
    return target
