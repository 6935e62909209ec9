"""The names of one model's modules, by which the names in files are told and checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar, final

from netweight.core.names import nearest_names
from netweight.errors import NameNotFound
from netweight.store.adapter_layouts.kohya_names import KohyaNames

__all__ = ["ModelNames"]

_TEXT_MODEL = ".text_model."  # a level of CLIP's text encoder that older files have, and newer models may lack
T = TypeVar("T")


@final
class ModelNames:
    """The names of a model's modules.

    Args:
        modules: With components.

    Attributes:
        kohya: The way back from kohya's names.
    """

    def __init__(self, modules: Iterable[str]) -> None:
        self._names = set(modules)
        self._older = {name.replace(_TEXT_MODEL, ".", 1): name for name in self._names}
        self.kohya = KohyaNames(self._names)

    def own(self, parts: Mapping[str, T], where: Path) -> dict[str, T]:
        """Rename modules as the model calls them.

        Args:
            parts: By the names that files say.
            where: The file, for messages.

        Returns:
            The same parts, by the model's names.

        Raises:
            NameNotFound: The model has no such module.
        """
        return {self._own(name, where): part for name, part in parts.items()}

    def _own(self, name: str, where: Path) -> str:
        if name in self._names:
            return name
        plain = name.replace(_TEXT_MODEL, ".", 1)
        if plain in self._older:
            return self._older[plain]
        near = ", ".join(nearest_names(name, self._names))
        raise NameNotFound(
            f"{where}: the model has no module {name!r}.", cure=f"It is of another model; the nearest names are {near}."
        )
