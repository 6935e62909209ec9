"""Names of modules as data: one table per architecture translates the authors' names to those of diffusers and back.

Tables are the files `namings/*.yaml` (see `namings/README.md`). Everywhere else in netweight, a module of a diffusion
model is called as diffusers calls it, with its component in front: `transformer.transformer_blocks.0.attn.to_q`.

A module that the authors fused (queries, keys and values in one matrix) stands for several modules of diffusers, each
with a share of the rows.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, final

from netweight.core.names import nearest_names
from netweight.errors import UsageError

Names = Literal["authors", "diffusers"]
"""Whose names: the authors' (ComfyUI, musubi-tuner and most trainers use them too), or those of diffusers."""

_NUMBER = re.compile(r"\d+")
# The number of names that a table caches, which is more than any model has modules.
_MATCHES_KEPT = 1 << 14
_REST = "rest"


@final
@dataclass(frozen=True)
class Piece:
    """A module of diffusers within a module of a file."""

    module: str
    """The module as diffusers calls it, with its component."""
    rows: tuple[tuple[int, int], ...] = ()
    """Ranges of the file's rows that make up the module, in order; empty for all of them as they are."""


@final
@dataclass(frozen=True)
class NamingEntry:
    """A line of a table: one module of the authors, and the modules of diffusers that it denotes."""

    authors: str
    """Pattern of the authors' name, with `#` for numbers."""
    diffusers: tuple[str, ...]
    """Patterns of the names in diffusers, in the order of the rows."""
    rows: tuple[float | str, ...] = ()
    """Rows of each piece as multiples of the columns, or `rest`; empty for equal shares."""
    rest: float | None = None
    """Rows of one `rest` piece as a multiple of the columns, where no file says them."""
    swapped: str = ""
    """`always` or `last` where diffusers stores the two halves of the rows in the other order."""

    def shares(self, rows: int, columns: int) -> list[int] | None:
        """Rows of each piece of a fused module, or None where the shape cannot be divided so."""
        count = len(self.diffusers)
        shares = self.rows or (_REST,) * count
        fixed = sum(round(share * columns) for share in shares if not isinstance(share, str))
        remaining, parts = rows - fixed, shares.count(_REST)
        if remaining < parts or (parts and remaining % parts) or (not parts and remaining):
            return None
        return [remaining // parts if isinstance(share, str) else round(share * columns) for share in shares]

    def missing_rows(self, index: int, columns: int, present: Mapping[int, int]) -> int | None:
        """Rows of a piece that a file lacks, from the rows of those that it has; None where they are not known."""
        share = self.rows[index] if self.rows else _REST
        if not isinstance(share, str):
            return round(share * columns)
        alike = [rows for other, rows in present.items() if not self.rows or isinstance(self.rows[other], str)]
        if alike:
            return alike[0]
        return None if self.rest is None else round(self.rest * columns)

    def swaps(self, rows: int, columns: int) -> bool:
        """Return whether the halves of a module of this shape change places."""
        return self.swapped == "always" or (self.swapped == "last" and rows == 2 * columns)


@final
@dataclass(frozen=True)
class Match:
    """A name that a table knows."""

    entry: NamingEntry
    numbers: tuple[str, ...]
    """The number in place of each `#`."""
    names: Names
    """Whose name it is."""
    index: int = 0
    """For a name of diffusers: the number of the piece of the entry."""

    def pieces(self, rows: int, columns: int, component: str) -> list[Piece] | None:
        """The modules of diffusers that a matrix of this shape contains, or None where the shape does not fit."""
        if self.names == "diffusers":
            return [Piece(_located(_filled(self.entry.diffusers[self.index], self.numbers), component))]
        modules = [_located(_filled(each, self.numbers), component) for each in self.entry.diffusers]
        if len(modules) == 1:
            half = rows // 2
            swap = self.entry.swaps(rows, columns) and rows % 2 == 0
            return [Piece(modules[0], ((half, rows), (0, half)) if swap else ())]
        shares = self.entry.shares(rows, columns)
        if shares is None:
            return None
        ends = list(itertools.accumulate(shares))
        return [Piece(module, ((end - share, end),)) for module, share, end in zip(modules, shares, ends, strict=True)]

    @property
    def is_authors(self) -> bool:
        """True if the model's authors use this name for the module, even if others use it, too."""
        return self.names == "authors" or self.entry.authors == self.entry.diffusers[self.index]

    @property
    def authors(self) -> str:
        """The authors' name of the module."""
        return _filled(self.entry.authors, self.numbers)


@final
@dataclass(frozen=True)
class Naming:
    """The names of one architecture."""

    key: str
    """The file's name without its ending, which `--model` takes."""
    title: str
    """The architecture's name in messages."""
    cls: str | None
    """The class of diffusers, if it has one."""
    component: str
    """The component of a pipeline."""
    kohya: Names
    """Whose names kohya's files flatten."""
    families: tuple[str, ...]
    """Regular expressions for what trainers call the architecture in a file's metadata."""
    usual: str
    """Regular expression of how names of this architecture are usually written in files; empty for any."""
    ratios: Mapping[str, tuple[int, int]]
    """The authors' module → rows and columns, in proportion."""
    columns: Mapping[str, tuple[int, ...]]
    """Module of diffusers → columns in the published models."""
    t5: str
    """The component that the T5 text encoder is."""
    unread: tuple[str, ...]
    """Layouts of this architecture of which diffusers loads no module, without an error."""
    entries: tuple[NamingEntry, ...]
    """Entries of the table."""
    _dotted: dict[str, list[tuple[tuple[str, ...], NamingEntry, Names, int]]] = field(default_factory=dict, repr=False)
    _flat: dict[str, list[tuple[tuple[str, ...], NamingEntry, Names, int]]] = field(default_factory=dict, repr=False)
    _matches: dict[tuple[str, bool, Names | None], Match | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Index the entries by their names with every number replaced."""
        for entry in self.entries:
            own: list[tuple[str, Names, int]] = [(entry.authors, "authors", 0)]
            own += [(name.replace(":", "."), "diffusers", index) for index, name in enumerate(entry.diffusers)]
            for pattern, names, index in own:
                for table, spelling in ((self._dotted, pattern), (self._flat, flat(pattern))):
                    literals = tuple(re.findall(r"\d+|#", spelling))
                    table.setdefault(_NUMBER.sub("#", spelling), []).append((literals, entry, names, index))

    def match(self, name: str, *, flattened: bool = False, names: Names | None = None) -> Match | None:
        """Look a name up.

        Args:
            name: A module's name without prefix and component.
            flattened: Whether its dots were replaced by underscores.
            names: Whose name it must be; by default diffusers' are tried first.
        """
        key = name, flattened, names
        # The adapters of a bank have the same names.
        if key not in self._matches:
            if len(self._matches) >= _MATCHES_KEPT:
                self._matches.clear()
            self._matches[key] = self._match(name, flattened, names)
        return self._matches[key]

    def _match(self, name: str, flattened: bool, names: Names | None) -> Match | None:
        table = self._flat if flattened else self._dotted
        given = tuple(_NUMBER.findall(name))
        matches = []
        for literals, entry, whose, index in table.get(_NUMBER.sub("#", name), ()):
            if len(literals) != len(given) or any(
                one not in ("#", two) for one, two in zip(literals, given, strict=True)
            ):
                continue
            numbers = tuple(two for one, two in zip(literals, given, strict=True) if one == "#")
            matches.append(Match(entry, numbers, whose, index))
        if names is not None:
            matches = [match for match in matches if match.names == names]
        return min(matches, key=lambda match: match.names != "diffusers", default=None)

    def of_diffusers(self, module: str) -> Match | None:
        """Look up a module of diffusers, with its component."""
        component, _, rest = module.partition(".")
        if component in (self.component, f"{self.component}_2"):
            return self.match(rest, names="diffusers")
        match = self.match(module, names="diffusers")
        return match if match is not None and ":" in match.entry.diffusers[match.index] else None


def flat(name: str) -> str:
    """A name as kohya writes it, with underscores for dots."""
    return name.replace(".", "_")


@cache
def namings() -> tuple[Naming, ...]:
    """All tables, in the order of their names; those that name an architecture of its own come first."""
    import yaml

    folder = Path(__file__).parent / "namings"
    # The loader in C is used if PyYAML was built with it.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    tables = [_read(path, yaml.load(path.read_text("utf-8"), Loader=loader)) for path in sorted(folder.glob("*.yaml"))]
    order = {key: place for place, key in enumerate(_FIRST)}
    return tuple(sorted(tables, key=lambda each: order.get(each.key, len(order))))


# Of architectures whose names agree, the more common one is taken first.
_FIRST = ("stable-diffusion", "flux", "ltx", "sd3", "qwen-image", "wan")


def naming_called(name: str) -> Naming:
    """The table of an architecture.

    Raises:
        UsageError: There is no such table; the known ones are named.
    """
    by_key = {each.key: each for each in namings()}
    if name not in by_key:
        near = nearest_names(name, by_key)
        raise UsageError(
            f"There is no table of names for {name!r}.",
            cure=f"Choose one of {', '.join(by_key)}. The nearest is {near[0]}.",
        )
    return by_key[name]


def _read(path: Path, values: Mapping[str, Any]) -> Naming:
    rows = {each: tuple(shares) for key, shares in values.get("rows", {}).items() for each in alternatives(key)}
    swapped = {each: how for key, how in values.get("swapped", {}).items() for each in alternatives(key)}

    def entry(authors: str, diffusers: Sequence[str]) -> NamingEntry:
        fused = len(diffusers) > 1
        return NamingEntry(
            authors, tuple(diffusers), rows.get(authors, ()), values.get("rest") if fused else None,
            swapped.get(authors, ""),
        )  # fmt: skip

    lines = list(_lines(values))
    for kind, blocks in values.get("blocks", {}).items():
        parts = list(_lines({"names": {k: v for k, v in values["parts"][kind].items() if k != "same"},
                             "same": values["parts"][kind].get("same", ())}))  # fmt: skip
        for before, after in (pair for key, value in blocks.items() for pair in _parallel(key, value)):
            lines += [(f"{before}.{own}", [f"{after}.{each}" for each in theirs]) for own, theirs in parts]
    return Naming(
        path.stem,
        values["title"],
        values.get("class"),
        values.get("component", "transformer"),
        values.get("kohya", "authors"),
        tuple(values.get("families", ())),
        values.get("usual", ""),
        {each: tuple(ratio) for key, ratio in values.get("ratios", {}).items() for each in alternatives(key)},
        {each: tuple(widths) for key, widths in values.get("columns", {}).items() for each in alternatives(key)},
        values.get("t5", "text_encoder_3"),
        tuple(values.get("unread", ())),
        tuple(entry(own, theirs) for own, theirs in lines),
    )


def _lines(values: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    for key, value in values.get("names", {}).items():
        if isinstance(value, list):
            yield key, [each for pattern in value for each in alternatives(pattern)]
        else:
            yield from ((own, [their]) for own, their in _parallel(key, value))
    for pattern in values.get("same", ()):
        yield from ((each, [each]) for each in alternatives(pattern))


def _parallel(key: str, value: str) -> list[tuple[str, str]]:
    return list(zip(alternatives(key), alternatives(value), strict=True))


def alternatives(pattern: str) -> list[str]:
    """Expand the braces of a pattern, in their order."""
    pieces = [piece.split(",") if number % 2 else [piece] for number, piece in enumerate(re.split(r"[{}]", pattern))]
    return ["".join(choice) for choice in itertools.product(*pieces)]


def _filled(pattern: str, numbers: Sequence[str]) -> str:
    given = iter(numbers)
    return re.sub("#", lambda _: next(given), pattern)


def _located(name: str, component: str) -> str:
    own, _, rest = name.rpartition(":")
    return f"{own or component}.{rest}"
