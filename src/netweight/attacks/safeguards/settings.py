"""Settings of the battery of attacks on safeguards: those of both attacks, declared there; torch is not imported."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, final

from pydantic import DirectoryPath, Field

from netweight.attacks.finetuning.settings import FolderAttack
from netweight.attacks.refusal.settings import RefusalSettings
from netweight.errors import UsageError
from netweight.settings import Cli


@final
class SafeguardSettings(RefusalSettings, FolderAttack):
    """How a release is attacked, and what is asked of it."""

    refused: Annotated[str, Cli(metavar="ROWS")] = Field(
        "", description="Rows with a prompt that the model refuses; without them refusal is not attacked."
    )
    ordinary: Annotated[str, Cli(metavar="ROWS")] = Field(
        "", description="Rows with a prompt that it answers, needed with `refused`."
    )
    base: DirectoryPath | None = Field(
        None, description="The model before its safeguards: steps are compared with its own, and it is mixed in."
    )

    @property
    def files(self) -> list[Path]:
        """The files of rows and prompts."""
        return [*FolderAttack.files.fget(self), *(RefusalSettings.files.fget(self) if self.refused else ())]  # type: ignore[attr-defined]

    def check(self) -> None:
        """Refuse what either attack refuses, and prompts of one kind alone."""
        FolderAttack.check(self)
        if bool(self.refused) != bool(self.ordinary):
            raise UsageError("Refused prompts are compared with ordinary ones.", cure="Give both, or neither.")
        if self.refused:
            RefusalSettings.check(self)
