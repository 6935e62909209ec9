"""Fine-tuning as an attack: how many steps until a language model does again what was taken out of it."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from netweight.attacks.finetuning.attack import run_attack
    from netweight.attacks.finetuning.settings import AttackSettings, FolderAttack, grid, named_grid
    from netweight.attacks.finetuning.subject import Domain, Goal, Subject
    from netweight.attacks.finetuning.sweep import SubjectName, calibrate

_HOMES = {
    "attack": ("run_attack",),
    "settings": ("AttackSettings", "FolderAttack", "grid", "named_grid"),
    "subject": ("Domain", "Goal", "Subject"),
    "sweep": ("SubjectName", "calibrate"),
}
__all__ = [
    "AttackSettings", "Domain", "FolderAttack", "Goal", "Subject", "SubjectName", "calibrate", "grid", "named_grid",
    "run_attack",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name on first use: settings load without torch."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
