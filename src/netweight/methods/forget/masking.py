"""Value neurons switched off row by row: every row of a batch may be another trial, of another prompt.

Keys and values of a prompt depend on its text alone, and are computed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    seed: int  # number of the noise that it starts from


@final
class RowMasks:
    """What every row of the next run blocks."""

    # `denoiser`: the network; while rows are blocked it must be run with their texts

    def __init__(self, denoiser: nn.Module, layers: Mapping[str, ValueLayer]) -> None:
        self._denoiser, self._layers = denoiser, layers
        self._every = value_layers(denoiser, scope="all")
        self._prompts: list[PromptText] = []
        self._places = torch.zeros(0, dtype=torch.long)
        self._factors: dict[str, Tensor] = {}

    def read(self, text: Text) -> PromptText:
        """Compute keys and values of a prompt, one row; not while rows are blocked."""
        values = text_values(self._denoiser, self._every, text)
        return PromptText(text, values, text_values(self._denoiser, self._every, text, keys=True))

    @contextmanager
    def blocking(self, rows: Sequence[MaskedRow]) -> Iterator[Text]:
        """Block neurons row by row for the runs in a block."""
        places = {prompt: place for place, prompt in enumerate(dict.fromkeys(row.prompt for row in rows))}
        self._prompts, self._places = list(places), torch.tensor([places[row.prompt] for row in rows])
        self._factors = self._factors_of([row.blocked for row in rows])
        replaced: list[tuple[Any, Any]] = []
        try:
            for name, layer in self._every.items():
                _replace(replaced, layer.module, self._values(name))
                _replace(replaced, layer.attention.to_k, self._values(name, keys=True))
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
            values = found[self._places.to(found.device)]
            factors = None if keys else self._factors.get(name)
            return values if factors is None else values * factors[:, None].to(values)

        return forward

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


def _replace(replaced: list[tuple[Any, Any]], module: Any, forward: Any) -> None:
    """Put another forward before a module's own, and remember what was there."""
    replaced.append((module, vars(module).get("forward")))
    module.forward = forward
