"""One grammar for the names of parameters and modules, and sets of neurons by them. Any layer may use it; no torch.

A pattern is a dotted name whose segments may hold wildcards:

- `*` stands for any text inside one segment; alone it is exactly one segment,
- `**`, alone in its segment, stands for any number of segments, none included,
- `{a,b}` stands for either; it may hold dots and further braces,
- a leading `!` takes out what the pattern matches.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, final

from netweight.errors import NameNotFound, UsageError

if TYPE_CHECKING:
    from torch import Tensor

# The largest number of alternatives to which the braces of one pattern may expand.
_MOST_ALTERNATIVES = 4096


def nearest_names(pattern: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Find the names most like a name or pattern that was not found."""
    unique = list(dict.fromkeys(names))
    literal = [part for part in re.split(r"[.{},]", pattern.lstrip("!")) if part.strip("*")]
    ratios: dict[tuple[str, str], float] = {}

    def likeness(part: str, segment: str) -> float:
        if (part, segment) not in ratios:
            ratios[part, segment] = difflib.SequenceMatcher(None, part.strip("*"), segment).ratio()
        return ratios[part, segment]

    def score(name: str) -> tuple[float, int]:
        segments = name.split(".")
        total = sum(max(likeness(part, segment) for segment in segments) for part in literal)
        return total, -abs(len(segments) - pattern.count(".") - 1)

    return sorted(unique, key=score, reverse=True)[:count]


def nearest(name: str, names: Iterable[str], count: int = 3) -> str:
    """Say which names are most like one that was not found, as messages end."""
    return f"Nearest: {', '.join(nearest_names(name, names, count)) or 'none'}."


def not_found(message: str, name: str, names: Iterable[str], more: str = "") -> NameNotFound:
    """Make the error for a name that is not there; its cure are the nearest names, and `more`."""
    return NameNotFound(message, cure=f"{nearest(name, names)} {more}".rstrip())


def expand(pattern: str) -> list[str]:
    """Expand the braces of a pattern into all its alternatives."""
    waiting = [pattern]
    done: list[str] = []
    while waiting:
        if len(waiting) + len(done) > _MOST_ALTERNATIVES:
            raise UsageError(
                f"The braces of pattern {pattern!r} expand to more than {_MOST_ALTERNATIVES} alternatives.",
                cure="Use several patterns, or wildcards.",
            )
        text = waiting.pop()
        group = re.search(r"\{([^{}]*)\}", text)  # an innermost pair
        if group is None:
            done.append(text)
        else:
            waiting += [text[: group.start()] + choice + text[group.end() :] for choice in group[1].split(",")]
    if any("{" in text or "}" in text for text in done):
        raise UsageError(f"The braces of pattern {pattern!r} are not balanced.", cure="Write alternatives as {a,b}.")
    return done


def _expression(plain: str, pattern: str) -> str:
    """Write a pattern without braces as a regular expression for a name with a dot after every segment."""
    pieces: list[str] = []
    for segment in plain.split("."):
        if segment == "**":
            piece = r"(?:[^.]+\.)*"
        elif not segment or "**" in segment:
            reason = "an empty segment" if not segment else f"'**' inside the segment {segment!r}"
            raise UsageError(
                f"Pattern {pattern!r} has {reason}.",
                cure="Put one dot between segments, and write '**' as a segment of its own.",
            )
        else:
            inner = re.escape(segment).replace(r"\*", "[^.]*")
            piece = rf"(?=[^.]){inner}\."
        # The pattern '**.**' matches the same as '**'.
        if not (pieces and segment == "**" and pieces[-1] == piece):
            pieces.append(piece)
    return "".join(pieces)


def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{_expression(plain, pattern)})" for plain in expand(pattern)))


@final
class Select:
    """A choice of parameters or modules by the model's own names.

    Args:
        *patterns: Patterns in the grammar of this module. The choice is everything that some plain pattern matches
            and no `!` pattern does, whatever their order. With `!` patterns alone it is everything else.

    Raises:
        UsageError: There is no pattern, or one is malformed.

    Examples:
        >>> Select("**.attn.{q,v}", "!layers.0.**").keys(["layers.0.attn.q", "layers.1.attn.q", "layers.1.attn.k"])
        ['layers.1.attn.q']
    """

    def __init__(self, *patterns: str) -> None:
        if not patterns:
            raise UsageError("Select needs at least one pattern.", cure='Select("**") selects everything.')
        self.patterns = patterns
        self._wanted = [(text, _compile(text)) for text in patterns if not text.startswith("!")]
        self._unwanted = [(text, _compile(text[1:])) for text in patterns if text.startswith("!")]

    @classmethod
    def of(cls, choice: Select | str | Iterable[str]) -> Select:
        """Return a `Select` made from one pattern or several; a `Select` is returned as it is.

        Args:
            choice: A `Select` is returned as it is; patterns as for `Select`.

        Returns:
            The `Select`.
        """
        if isinstance(choice, Select):
            return choice
        return cls(choice) if isinstance(choice, str) else cls(*choice)

    def __repr__(self) -> str:
        """Write the call that makes this choice."""
        return f"Select({', '.join(map(repr, self.patterns))})"

    def __eq__(self, other: object) -> bool:
        """Compare patterns, not what they would match."""
        return isinstance(other, Select) and self.patterns == other.patterns

    def __hash__(self) -> int:
        """Hash the patterns."""
        return hash(self.patterns)

    def _choose(self, names: Sequence[str], kind: str) -> list[str]:
        chosen = set() if self._wanted else set(names)
        taken_out: set[str] = set()
        for patterns, matched in ((self._wanted, chosen), (self._unwanted, taken_out)):
            for text, expression in patterns:
                hits = [name for name in names if expression.fullmatch(f"{name}.")]
                if not hits:
                    raise self._not_found(text, names, kind)
                matched.update(hits)
        return [name for name in names if name in chosen and name not in taken_out]

    def _not_found(self, pattern: str, names: Sequence[str], kind: str) -> NameNotFound:
        if not names:
            return NameNotFound(f"Pattern {pattern!r} matches nothing: there are no {kind}s to choose from.")
        return not_found(f"Pattern {pattern!r} matches none of the {len(names)} {kind}s.", pattern, names)

    def keys(self, names: Iterable[str]) -> list[str]:
        """Choose among names.

        Args:
            names: Dotted names, such as the keys of a state dict.

        Returns:
            The chosen names in the order given.

        Raises:
            NameNotFound: Some pattern, `!` patterns included, matches no name: a misspelling must not pass unseen.
        """
        return self._choose(list(names), "name")

    def _objects(self, named: Iterable[tuple[str, Any]], kind: str) -> dict[str, Any]:
        # The model itself has no name.
        everything = {name: thing for name, thing in named if name}
        chosen: dict[str, Any] = {}
        identities: set[int] = set()
        for name in self._choose(list(everything), kind):
            if id(everything[name]) not in identities:
                identities.add(id(everything[name]))
                chosen[name] = everything[name]
        return chosen

    def modules(self, model: Any) -> dict[str, Any]:
        """Return the modules of a model that the patterns choose.

        Args:
            model: Anything with torch's `named_modules`. The model itself is not among its modules.

        Returns:
            Modules by name in the model's order; a module known by several chosen names appears under the first.

        Raises:
            NameNotFound: Some pattern matches no module.
        """
        return self._objects(model.named_modules(remove_duplicate=False), "module")

    def parameters(self, model: Any) -> dict[str, Any]:
        """Return the parameters of a model that the patterns choose.

        Args:
            model: Anything with torch's `named_parameters`.

        Returns:
            Parameters by name in the model's order; a tied parameter appears once, under its first chosen name.

        Raises:
            NameNotFound: Some pattern matches no parameter.
        """
        return self._objects(model.named_parameters(remove_duplicate=False), "parameter")


# ---- neurons by module name ------------------------------------------------------------------------------------------


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
                f"The neurons of {name!r} contain {wrong[0]!r}, which is not an index.",
                cure="Give indices as integers from 0 up, in one list.",
            )
        return frozen

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        import torch

        return {name: torch.tensor(sorted(indices), dtype=torch.int64) for name, indices in self._sets.items()}

    def __getitem__(self, name: str) -> Tensor:
        """Return a module's neurons as a sorted LongTensor of shape `(neurons,)` on the CPU.

        Raises:
            NameNotFound: The set contains no neuron of that module.
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
        return ((name, index) for name, indices in self._sets.items() for index in sorted(indices))

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
        return cls({name: sorted(indices) for name, indices in sets.items()})

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
        return self._of_sets({name: indices - other._sets.get(name, none) for name, indices in self._sets.items()})

    def to_json(self) -> str:
        """Write the set as JSON: `{"version": 1, "units": {module name: [indices]}}`, sorted.

        Returns:
            The JSON text.
        """
        return json.dumps({"version": 1, "units": {name: sorted(indices) for name, indices in self._sets.items()}})

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
                "The JSON contains no neurons of version 1.",
                cure='It must have the form {"version": 1, "units": {name: [indices]}}.',
            )
        return cls(content["units"])
