"""Sets of neurons by module name. Any layer may use them; torch is loaded when tensors are asked for."""

from __future__ import annotations

import json
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, final

from netweight.core.names import not_found
from netweight.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


@final
class Units:
    """A set of neurons: output indices by module name.

    A unit is a pair of a module's name and an index into its output; `len`, `in`, iteration and the operators
    `|` (either), `&` (both) and `-` (this, not that) work on such pairs. Immutable.

    Args:
        indices: For each module name a LongTensor of shape `(units,)`, or any sequence, of indices from 0 up; order and
            repetition do not matter, and modules without an index are left out.

    Raises:
        UsageError: An index is negative or not an integer.
    """

    def __init__(self, indices: Mapping[str, Tensor | Sequence[int]] | None = None) -> None:
        self._sets = {
            name: frozen for name, given in sorted((indices or {}).items()) if (frozen := self._checked(name, given))
        }

    @staticmethod
    def _checked(name: str, given: Any) -> frozenset[int]:
        values = given.tolist() if hasattr(given, "tolist") else given
        if not isinstance(values, Iterable) or isinstance(values, str):
            raise UsageError(f"The neurons of {name!r} must be a one-dimensional list of indices, not {values!r}.")
        frozen = frozenset(values)
        wrong = [index for index in frozen if isinstance(index, bool) or not isinstance(index, int) or index < 0]
        if wrong:
            raise UsageError(
                f"The neurons of {name!r} hold {wrong[0]!r}.", cure="Give indices as integers from 0 up, in one list."
            )
        return frozen

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        import torch

        return {name: torch.tensor(sorted(found), dtype=torch.int64) for name, found in self._sets.items()}

    def __getitem__(self, name: str) -> Tensor:
        """Return a module's neurons as a sorted LongTensor of shape `(neurons,)` on the CPU.

        Raises:
            NameNotFound: The set holds no neuron of that module.
        """
        if name not in self._sets:
            raise not_found(f"No neuron of module {name!r} is in the set.", name, self._sets)
        return self._tensors[name]

    @property
    def modules(self) -> list[str]:
        """The names of the modules with at least one neuron in the set, sorted."""
        return list(self._sets)

    def items(self) -> ItemsView[str, Tensor]:
        """Return pairs of module name and sorted LongTensor."""
        return self._tensors.items()

    def __len__(self) -> int:
        """Count the neurons of all modules."""
        return sum(map(len, self._sets.values()))

    def __iter__(self) -> Iterator[tuple[str, int]]:
        """Yield `(module name, index)`, sorted."""
        return ((name, index) for name, found in self._sets.items() for index in sorted(found))

    def __contains__(self, unit: object) -> bool:
        """Tell whether the pair `(module name, index)` is in the set."""
        if not isinstance(unit, tuple) or len(unit) != 2:
            return False
        return unit[1] in self._sets.get(unit[0], ())

    def __eq__(self, other: object) -> bool:
        """Compare as sets."""
        return isinstance(other, Units) and self._sets == other._sets

    def __hash__(self) -> int:
        """Hash as a set."""
        return hash(tuple(self._sets.items()))

    def __repr__(self) -> str:
        """Say how many neurons of how many modules there are."""
        return f"<Units: {len(self)} in {len(self._sets)} modules>"

    @classmethod
    def _of_sets(cls, sets: Mapping[str, frozenset[int]]) -> Self:
        return cls({name: sorted(found) for name, found in sets.items()})

    def __or__(self, other: Units) -> Units:
        """Return the neurons that are in either set."""
        none: frozenset[int] = frozenset()
        names = self._sets.keys() | other._sets.keys()
        return self._of_sets({name: self._sets.get(name, none) | other._sets.get(name, none) for name in names})

    def __and__(self, other: Units) -> Units:
        """Return the neurons that are in both sets."""
        names = self._sets.keys() & other._sets.keys()
        return self._of_sets({name: self._sets[name] & other._sets[name] for name in names})

    def __sub__(self, other: Units) -> Units:
        """Return the neurons of this set that are not in the other."""
        none: frozenset[int] = frozenset()
        return self._of_sets({name: found - other._sets.get(name, none) for name, found in self._sets.items()})

    def to_json(self) -> str:
        """Write the set as JSON: `{"version": 1, "units": {module name: [indices]}}`, sorted.

        Returns:
            The JSON text.
        """
        return json.dumps({"version": 1, "units": {name: sorted(found) for name, found in self._sets.items()}})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote.

        Args:
            text: The JSON text.

        Returns:
            The set.

        Raises:
            UsageError: The text is not JSON of this form and version.
        """
        try:
            content = json.loads(text)
        except ValueError as error:
            raise UsageError(f"The neurons are not valid JSON: {error}.") from None
        if not isinstance(content, dict) or content.get("version") != 1 or not isinstance(content.get("units"), dict):
            raise UsageError(
                "The JSON holds no neurons of version 1.",
                cure='It must read {"version": 1, "units": {name: [indices]}}.',
            )
        return cls(content["units"])
