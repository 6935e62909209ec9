"""The folder beside a target in which it grows, with a journal, so that a killed run can be continued.

.NAME.netweight-part/lock            held by the run that works here
.NAME.netweight-part/journal.jsonl   one line per finished file
.NAME.netweight-part/tree/           the folder to be, while it grows
.NAME.netweight-part/ready/          the same when it is complete; after it was swapped with an older target, that
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from netweight.store.atomic import exchange, lock, naming_failures, part_of, refuse_existing, sync

__all__ = ["Workplace", "settle", "workplace"]


@final
class Workplace:
    """An unfinished folder and the journal of its finished files; made by `workplace`.

    Args:
        target: The folder to be.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.root = part_of(target)
        self.tree = self.root / "tree"
        self.tree.mkdir(exist_ok=True)
        self._journal = self.root / "journal.jsonl"
        self._done = self._read_journal()

    def place(self, path: str) -> Path:
        """The path at which a file is to be written; its folder is made.

        Args:
            path: Relative to the target.
        """
        place = self.tree / path
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def finished(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """What was recorded of a file that an earlier run finished from the same input, if it is still there.

        Args:
            key: Everything that the file depends on, as JSON values.
        """
        line = self._done.get(_text(key))
        if line is None:
            return None
        file = self.tree / line["file"]
        if not file.is_file() or file.stat().st_size != line["size"]:
            return None
        entry: dict[str, Any] = line["entry"]
        return entry

    def record(self, key: Mapping[str, Any], entry: Mapping[str, Any], file: Path) -> None:
        """Note that a file is finished.

        Args:
            key: Everything that it depends on, as JSON values.
            entry: What to remember of it, as JSON values.
            file: Where it was written.
        """
        name = file.relative_to(self.tree).as_posix()
        line = {"key": dict(key), "entry": dict(entry), "file": name, "size": file.stat().st_size}
        with open(self._journal, "a", encoding="utf-8") as journal:
            journal.write(json.dumps(line) + "\n")
            journal.flush()
            os.fsync(journal.fileno())

    def finish(self, files: Iterable[str], folders: Iterable[str]) -> None:
        """Put the folder in its place, and remove what is left over.

        Args:
            files: Paths of all files that belong to it; others, from earlier runs, are removed.
            folders: Paths of its empty folders.
        """
        for folder in folders:
            (self.tree / folder).mkdir(parents=True, exist_ok=True)
        expected = set(files)
        for folder, _, leaves in os.walk(self.tree, topdown=False):
            here = Path(folder)
            for leaf in leaves:
                if (here / leaf).relative_to(self.tree).as_posix() not in expected:
                    (here / leaf).unlink()
            sync(here)
        # From here on there is no tree, and no later run takes anything from here: it could not tell old from new.
        ready, old = self.root / "ready", self.root / "old"
        os.rename(self.tree, ready)
        if not self.target.exists():
            os.rename(ready, self.target)
        elif not exchange(ready, self.target):  # two steps; a kill in between is mended by `settle`
            os.rename(self.target, old)
            os.rename(ready, self.target)
        sync(self.target.parent)
        shutil.rmtree(self.root)

    def _read_journal(self) -> dict[str, dict[str, Any]]:
        """Read what earlier runs finished; a line that a kill cut short is dropped from the file."""
        done: dict[str, dict[str, Any]] = {}
        if not self._journal.exists():
            return done
        whole = 0
        for line in self._journal.read_bytes().splitlines(keepends=True):
            try:
                fields = json.loads(line)
            except ValueError:
                break
            if not line.endswith(b"\n"):
                break
            done[_text(fields["key"])] = fields
            whole += len(line)
        os.truncate(self._journal, whole)
        return done


def settle(target: Path) -> None:
    """Clear away what a run left that was killed while it put its finished folder in place.

    Args:
        target: The folder that was to be made.

    Raises:
        UsageError: Another run is making the same folder.
    """
    root = part_of(target)
    if not root.is_dir() or (root / "tree").exists():
        return
    with naming_failures(target), lock(root / "lock"):
        if (root / "old").exists() and not target.exists():
            os.rename(root / "old", target)
        shutil.rmtree(root)


@contextmanager
def workplace(target: Path, *, overwrite: bool) -> Iterator[Workplace]:
    """Open the workplace of a target, continuing what an interrupted run left.

    It is kept if the block is interrupted (Ctrl-C, a kill), and removed if the block fails.

    Args:
        target: The folder to be made.
        overwrite: Whether an existing one may be replaced.

    Yields:
        The workplace; its folder takes the target's place when the block ends well.

    Raises:
        OutputExists: The target exists.
        OutputFailed: The disk is full or the place cannot be written.
        UsageError: Another run is making the same folder.
    """
    refuse_existing(target, overwrite=overwrite)
    root = part_of(target)
    with naming_failures(target):
        root.mkdir(exist_ok=True)
        with lock(root / "lock"):
            try:
                yield Workplace(target)
            except Exception:
                shutil.rmtree(root, ignore_errors=True)
                raise


def _text(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)
