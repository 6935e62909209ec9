"""What stops have found and made, kept in the tour's folder until it has finished, so that an interrupted one goes on.

Every stop has a folder of its own, with its result in it once it is done. A result is taken over only where the stop's
key, the digest of all that decides it, is still the same. `run.py` alone calls this.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import final

from pydantic import BaseModel, ConfigDict, ValidationError

from netweight.core.files import lock
from netweight.errors import UsageError
from netweight.report.report import make_folder, write_text
from netweight.tour.stop import Stop

# A file in the folder, which is emptied only where it lies; locked while a tour is under way.
MARK = ".made-by-the-tour"
_RESULT = "stop.json"


@final
class _Result(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str
    stop: Stop


@final
class Kept:
    """The folder of a tour under way; made by `kept_in`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def taken_over(self, name: str, key: str) -> Stop | None:
        """Return what a stop has found in a tour that was interrupted; None if it is to be made."""
        try:
            result = _Result.model_validate_json((self.folder / name / _RESULT).read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError:  # of another version: its key would differ as well
            return None
        whole = all((self.folder / name / place).exists() for place in result.stop.models.values())
        return result.stop if whole and result.key == key else None

    def begin(self, name: str) -> Path:
        """Return an empty folder for a stop; what an interrupted one has left is removed."""
        folder = self.folder / name
        if folder.exists():
            shutil.rmtree(folder)
        make_folder(folder)
        return folder

    def finish(self, name: str, key: str, stop: Stop) -> None:
        """Keep what a stop has found, whole or not at all."""
        write_text(self.folder / name / _RESULT, _Result(key=key, stop=stop).model_dump_json())

    def clear(self, names: Iterable[str], *, models: bool) -> None:
        """Forget what stops have found, since the report holds it."""
        for name in names:
            if models:
                shutil.rmtree(self.folder / name, ignore_errors=True)
            else:
                (self.folder / name / _RESULT).unlink(missing_ok=True)
        if {path.name for path in self.folder.iterdir()} == {MARK}:
            shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def kept_in(folder: Path) -> Iterator[Kept]:
    """Open the folder of a tour, for one tour at a time; made when missing."""
    if folder.exists() and not (folder / MARK).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} was not made by the tour, which would empty it.", cure="Choose another --out.")
    make_folder(folder)
    with lock(folder / MARK):
        yield Kept(folder)
