"""Value neurons switched off row by row: every row of a batch may be another trial, of another prompt.

What rows have in common is computed once. Keys and values of a prompt depend on its text alone. And trials of a prompt
that block the same in the first parts of a U-Net, from the same noise, share what these compute, from batch to batch
too.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from netweight.methods.forget.layers import ValueLayer, text_values, value_layers
from netweight.nn.text_to_image import Text

Blocked: TypeAlias = dict[str, set[int]]


@final
@dataclass(frozen=True, eq=False)
class PromptText:
    """A prompt with what the text alone decides; made by `RowMasks.read`."""

    text: Text  # the prompt, one row
    values: Mapping[str, Tensor]  # for each layer its values, shape `(1, tokens, width)`
    keys: Mapping[str, Tensor]  # for each layer the keys beside them, shape `(1, tokens, width)`


@final
@dataclass(frozen=True)
class MaskedRow:
    """A row of a batch."""

    prompt: PromptText
    blocked: Blocked  # neurons by layer
    # Which noise it starts from: rows of one number start from the same, in this batch and in every later one.
    seed: int


@final
class RowMasks:
    """What every row of the next run blocks."""

    # `denoiser`: the network; while rows are blocked it must be run with their texts, always at the same timestep

    def __init__(self, denoiser: nn.Module, layers: Mapping[str, ValueLayer]) -> None:
        self._denoiser, self._layers = denoiser, layers
        self._every = value_layers(denoiser, scope="all")
        self._parts = _first_parts(denoiser)
        # For each part of the network whose outputs rows may share, the layers that lie in it.
        self._stages = [[name for name in layers if name.startswith(f"{part}.")] for part in self._parts]
        self._known = [_Known() for _ in self._parts]
        self._prompts: list[PromptText] = []
        self._places = torch.zeros(0, dtype=torch.long)
        self._factors: dict[str, Tensor] = {}
        self._keys: list[list[Hashable]] = []
        self._rows: Tensor | None = None

    def read(self, text: Text) -> PromptText:
        """Compute keys and values of a prompt, one row; not while rows are blocked."""
        values = text_values(self._denoiser, self._every, text)
        return PromptText(text, values, text_values(self._denoiser, self._every, text, keys=True))

    @contextmanager
    def blocking(self, rows: Sequence[MaskedRow]) -> Iterator[Text]:
        """Block neurons row by row for the runs in a block."""
        places = {prompt: place for place, prompt in enumerate(dict.fromkeys(row.prompt for row in rows))}
        self._prompts, self._places = list(places), torch.tensor([places[row.prompt] for row in rows])
        self._factors, self._keys = self._factors_of([row.blocked for row in rows]), self._keys_of(rows)
        replaced: list[tuple[Any, Any]] = []
        try:
            for name, layer in self._every.items():
                _replace(replaced, layer.module, self._values(name))
                _replace(replaced, layer.attention.to_k, self._values(name, keys=True))
            for stage, part in enumerate(self._parts.values()):
                _replace(replaced, part, self._sharing(stage, part.forward))
            yield Text.joined([prompt.text for prompt in self._prompts]).rows(self._places)
        finally:
            for module, before in replaced:
                if before is None:
                    del module.forward
                else:
                    module.forward = before

    def _values(self, name: str, *, keys: bool = False) -> Any:
        """What stands in for a layer: values of each row's prompt, less what is blocked, or keys."""

        def forward(*_: Any, **__: Any) -> Tensor:
            found = torch.cat([(prompt.keys if keys else prompt.values)[name] for prompt in self._prompts])
            now = slice(None) if self._rows is None else self._rows
            values = found[self._places[now].to(found.device)]
            factors = None if keys else self._factors.get(name)
            return values if factors is None else values * factors[now][:, None].to(values)

        return forward

    def _sharing(self, stage: int, own: Any) -> Any:
        def forward(*arguments: Any, **named: Any) -> Any:
            return self._shared(stage, own, arguments, named)

        return forward

    def _shared(self, stage: int, forward: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Compute a part for the rows that need it, and hand its outputs to the rows that share them."""
        keys, known, outer = self._keys[stage], self._known[stage], self._rows
        if outer is not None:  # a part of a part
            keys = [keys[row] for row in outer.tolist()]
        new = {key: row for row, key in reversed(list(enumerate(keys))) if key not in known.places}
        if len(new) == len(keys):  # nothing in common
            output = forward(*arguments, **named)
            known.add(keys, output, keys)
            return output
        if new:
            first = torch.tensor(list(new.values()))
            self._rows = first if outer is None else outer[first]
            try:
                part = forward(*_take(arguments, first, len(keys)), **_take(named, first, len(keys)))
            finally:
                self._rows = outer
            known.add(list(new), part, keys)
        return known.rows(keys)

    def _factors_of(self, trials: Sequence[Blocked]) -> dict[str, Tensor]:
        factors: dict[str, Tensor] = {}
        for name, layer in self._layers.items():
            sets = [frozenset(trial.get(name, ())) for trial in trials]
            places = {indices: place for place, indices in enumerate(dict.fromkeys(sets))}
            if any(places):
                table = torch.ones(len(places), layer.width)
                for indices, place in places.items():
                    table[place, list(indices)] = 0
                factors[name] = table[[places[indices] for indices in sets]]
        return factors

    def _keys_of(self, rows: Sequence[MaskedRow]) -> list[list[Hashable]]:
        """For each part, what decides its output in each row: the prompt, the noise, and all that is blocked so far."""
        keys: list[list[Hashable]] = []
        before: list[Hashable] = [(row.prompt, row.seed) for row in rows]
        for names in self._stages:
            sets = [tuple(frozenset(row.blocked.get(name, ())) for name in names) for row in rows]
            before = list(zip(before, sets, strict=True))
            keys.append(before)
        return keys


@final
class _Known:
    """Rows of a part's outputs that were computed before, by what decides them; about two batches of them are kept."""

    def __init__(self) -> None:
        self.places: dict[Hashable, int] = {}
        self._outputs: Any = None
        self._most = 0

    def add(self, new: Sequence[Hashable], outputs: Any, wanted: Sequence[Hashable]) -> None:
        """Take in rows, and forget those not wanted now where there would be too many."""
        self._most = max(self._most, len(wanted))
        if len(self.places) + len(new) > 2 * self._most:
            kept = [key for key in dict.fromkeys(wanted) if key in self.places]
            self._outputs = self.rows(kept) if kept else None
            self.places = {key: place for place, key in enumerate(kept)}
        self._outputs = outputs if not self.places else _joined(self._outputs, outputs)
        self.places |= {key: place for place, key in enumerate(new, start=len(self.places))}

    def rows(self, keys: Sequence[Hashable]) -> Any:
        """Return the rows of these keys as a batch."""
        return _take(self._outputs, torch.tensor([self.places[key] for key in keys]), len(self.places))


def _first_parts(denoiser: Any) -> dict[str, Any]:
    """Parts of a U-Net whose outputs rows may share: down blocks, and in each (and the middle one) all before text."""
    # Those of one block come before it, so that what decides on them is what is blocked before it. Other networks have
    # no such parts.
    down = getattr(denoiser, "down_blocks", None)
    if not isinstance(down, nn.ModuleList):
        return {}
    blocks = {f"down_blocks.{place}": block for place, block in enumerate(down)}
    middle = {"mid_block": getattr(denoiser, "mid_block", None)}
    parts: dict[str, Any] = {}
    for name, block in (blocks | middle).items():
        first = next(iter(getattr(block, "resnets", None) or ()), None)
        if first is not None:
            parts[f"{name}.resnets.0"] = first
        if name in blocks:
            parts[name] = block
    return parts


def _replace(replaced: list[tuple[Any, Any]], module: Any, forward: Any) -> None:
    """Put another forward before a module's own, and remember what was there."""
    replaced.append((module, vars(module).get("forward")))
    module.forward = forward


def _take(values: Any, rows: Tensor, count: int) -> Any:
    """Those rows of all tensors that have one per row."""
    if isinstance(values, Tensor):
        return values[rows.to(values.device)] if values.ndim and len(values) == count else values
    if isinstance(values, tuple | list):
        return type(values)(_take(value, rows, count) for value in values)
    if isinstance(values, dict):
        return {name: _take(value, rows, count) for name, value in values.items()}
    return values


def _joined(first: Any, second: Any) -> Any:
    """Nested outputs of two batches as those of one."""
    if isinstance(first, Tensor):
        return torch.cat([first, second])
    return tuple(_joined(*parts) for parts in zip(first, second, strict=True))
