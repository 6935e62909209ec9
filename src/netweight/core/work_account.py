"""The account of a command's stored work: results of an earlier call that it used, and what it left for the next call.

Whoever stores results that a later call can use reports here; commands open an account and print it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import final


@final
@dataclass
class WorkAccount:
    """Stored work that was used, and stored work that was added."""

    used: dict[str, set[tuple[Path, str]]] = field(default_factory=dict)
    """Kind of result, such as "scores" → the file and the key of each result that an earlier call had stored."""
    totals: dict[str, int] = field(default_factory=dict)
    """Kind of result → number of results that were needed, where that is known."""
    stored: set[tuple[Path, str]] = field(default_factory=set)
    """File and key of each result that this call stored."""
    announce: Callable[[str], object] = lambda text: None
    """Receives a sentence when the first result of a kind is used, so that a reader need not wait for the end."""
    unannounced: Container[str] = ()
    """Kinds of results about which it receives nothing."""

    def use(self, kind: str, file: Path, key: str) -> None:
        """Note a result of an earlier call."""
        if (file, key) in self.stored:
            return
        if kind not in self.used and kind not in self.unannounced:
            what = f"from the checkpoint {file}" if kind == _CHECKPOINT else f"with the {kind} in {file}"
            self.announce(f"Continuing an earlier run {what}.")
        self.used.setdefault(kind, set()).add((file, key))

    def sentences(self) -> list[str]:
        """Return what was continued, in words: one phrase for each kind of result."""
        phrases = []
        for kind, keys in self.used.items():
            if kind == _CHECKPOINT:
                phrases.append("a checkpoint" if len(keys) == 1 else f"{len(keys)} checkpoints")
            elif kind in self.totals:
                phrases.append(f"{len(keys)} of {self.totals[kind]} {kind}")
            else:
                phrases.append(f"{len(keys)} {kind}" if len(keys) > 1 else f"1 {kind.removesuffix('s')}")
        return phrases

    @property
    def folders(self) -> list[Path]:
        """The folders in which this call stored work or found it, that are still there."""
        found = {file.parent for file, _ in self.stored} | {
            file.parent for keys in self.used.values() for file, _ in keys
        }
        return sorted(folder for folder in found if folder.is_dir())


_CHECKPOINT = "checkpoint"
_OPEN: list[WorkAccount] = []


@contextmanager
def work_account(
    announce: Callable[[str], object] = lambda text: None, *, unannounced: Container[str] = ()
) -> Iterator[WorkAccount]:
    """Yield an account of what is used and stored within the block, in all threads.

    Args:
        announce: As the field of `WorkAccount`; by default nothing is announced.
        unannounced: As the field of `WorkAccount`.
    """
    account = WorkAccount(announce=announce, unannounced=unannounced)
    _OPEN.append(account)
    try:
        yield account
    finally:
        _OPEN.remove(account)


def note_stored(file: Path, key: str = "") -> None:
    """Report that a result was stored.

    Args:
        file: File that holds it.
        key: Name of the result within the file; empty for a file that holds one state.
    """
    for account in _OPEN:
        account.stored.add((file, key))


def note_used(kind: str, file: Path, key: str = "") -> None:
    """Report that a result of an earlier call is used; one that this call stored itself is not counted.

    Args:
        kind: Plural noun for results of this kind.
        file: File that holds it.
        key: Name of the result within the file.
    """
    for account in _OPEN:
        account.use(kind, file, key)


def note_checkpoint(file: Path) -> None:
    """Report that a state of an earlier call is continued."""
    note_used(_CHECKPOINT, file)


def note_needed(kind: str, count: int) -> None:
    """Report that so many further results of a kind are needed in all."""
    for account in _OPEN:
        account.totals[kind] = account.totals.get(kind, 0) + count
