"""Value neurons switched off row by row: every row of a batch may be another trial of the same prompt.

What rows have in common is computed once. Keys and values of a prompt depend on its text alone. And trials that block
the same in the first parts of a U-Net, from the same noise, share what these compute, from batch to batch too.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from netweight.methods.forget.layers import ValueLayer, text_values, value_layers
from netweight.probe.diffusion import Text

__all__ = ["Blocked", "RowMasks", "row_masks"]

Blocked: TypeAlias = dict[str, set[int]]


@final
class RowMasks:
    """What every row of the next run blocks; made by `row_masks`.

    Args:
        layers: Value layers whose neurons may be blocked.
        stages: For each part of the network whose outputs rows may share, in the order of their runs, the layers that
            lie in it and in none before.
    """

    def __init__(self, layers: Mapping[str, ValueLayer], stages: Sequence[Sequence[str]]) -> None:
        self._layers, self._stages = layers, stages
        self._factors: dict[str, Tensor] = {}
        self._rows: Tensor | None = None
        self._keys: list[list[Hashable]] | None = None
        self._known = [_Known() for _ in stages]

    @contextmanager
    def blocking(self, trials: Sequence[Blocked], sources: Sequence[int] | None = None) -> Iterator[None]:
        """Block neurons row by row for the runs in a block.

        Args:
            trials: For each row, neurons by layer.
            sources: For each row, which noise it starts from: rows of one number start from the same, now and in
                every later block. None shares nothing.
        """
        self._factors = self._factors_of(trials)
        self._keys = None if sources is None else self._keys_of(trials, sources)
        try:
            yield
        finally:
            self._factors, self._keys = {}, None

    def mask(self, name: str, values: Tensor, rows: int) -> Tensor:
        """Return a prompt's values of a layer, shape `(1, tokens, width)`, for all rows that are being computed."""
        factors = self._factors.get(name)
        if factors is None:
            return values.expand(rows, -1, -1)
        factors = factors if self._rows is None else factors[self._rows]
        return values * factors[:, None].to(values)

    def shared(self, stage: int, forward: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Compute a part for the rows that need it, and hand its outputs to the rows that share them."""
        if self._keys is None:
            return forward(*arguments, **named)
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

    def _keys_of(self, trials: Sequence[Blocked], sources: Sequence[int]) -> list[list[Hashable]]:
        """For each part, what decides its output in each row: the noise, and all that is blocked so far."""
        keys: list[list[Hashable]] = []
        before: list[Hashable] = list(sources)
        for names in self._stages:
            sets = [tuple(frozenset(trial.get(name, ())) for name in names) for trial in trials]
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


@contextmanager
def row_masks(denoiser: nn.Module, layers: Mapping[str, ValueLayer], text: Text) -> Iterator[RowMasks]:
    """Prepare trials of one prompt.

    Args:
        denoiser: The network; in the block it must be run with this prompt alone in every row, always at the same
            timestep.
        layers: Of which neurons may be switched off.
        text: The prompt; only the first row is looked at.

    Yields:
        Where it is said what to block before each run.
    """
    every = value_layers(denoiser, scope="all")
    parts = _first_parts(denoiser)
    masks = RowMasks(layers, [[name for name in layers if name.startswith(f"{part}.")] for part in parts])
    values = text_values(denoiser, every, text.rows([0]))
    keys = text_values(denoiser, every, text.rows([0]), keys=True)
    replaced: list[tuple[Any, Any]] = []
    try:
        for name, layer in every.items():
            _replace(replaced, layer.module, _masked(name, values[name], masks))
            _replace(replaced, layer.attention.to_k, _masked("", keys[name], masks))
        for stage, part in enumerate(parts.values()):
            _replace(replaced, part, _sharing(stage, part.forward, masks))
        yield masks
    finally:
        for module, before in replaced:
            if before is None:
                del module.forward
            else:
                module.forward = before


def _first_parts(denoiser: Any) -> dict[str, Any]:
    """What of a U-Net rows may share: blocks on the way down, and before each, and the middle one, what precedes text.

    Those of one block come before it, so that what decides on them is what is blocked before it. Other networks have
    no such parts.
    """
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


def _masked(name: str, value: Tensor, masks: RowMasks) -> Any:
    def forward(states: Tensor, *_: Any, **__: Any) -> Tensor:
        return masks.mask(name, value, len(states))

    return forward


def _sharing(stage: int, own: Any, masks: RowMasks) -> Any:
    def forward(*arguments: Any, **named: Any) -> Any:
        return masks.shared(stage, own, arguments, named)

    return forward


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
