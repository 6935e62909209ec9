"""Neurons of feed-forward layers switched off that differ most between refused and ordinary prompts.

Source: Wei et al., arXiv 2402.05162, with the difference of mean activations times the norm of what a neuron writes as
its score.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, final

from pydantic import Field

from netweight.attacks.refusal.edits.edit import EditMaterial, RefusalEdit, RefusalEditSettings
from netweight.settings import Cli

if TYPE_CHECKING:
    from torch import Tensor, nn


@final
class Pruning(RefusalEditSettings):
    """Removal of the feed-forward neurons that differ most between refused and ordinary prompts."""

    shares: Annotated[tuple[Annotated[float, Field(gt=0, lt=1)], ...], Cli(own=False)] = Field(
        (0.01, 0.03, 0.1), min_length=1, description="Shares of the feed-forward neurons that are switched off."
    )

    def candidates(self, material: EditMaterial) -> Iterator[RefusalEdit]:
        """Yield one edit for each share; none where experts are merged into one tensor."""
        import torch

        layers = {
            name: layer
            for name, module in material.structure.feed_forwards.items()
            if (layer := _output_layer(module, material.structure.hidden_size)) is not None
        }
        if not layers:
            return
        means = [_mean_inputs(material, layers, prompts) for prompts in (material.refused, material.ordinary)]
        scores = {
            name: (means[0][name] - means[1][name]).abs() * _columns(layer).norm(dim=0)
            for name, layer in layers.items()
        }
        pooled = torch.cat(list(scores.values()))
        for share in self.shares:
            bound = pooled.kthvalue(max(1, round((1 - share) * len(pooled)))).values
            off = {name: score > bound for name, score in scores.items()}
            yield RefusalEdit("pruning", f"{share:.0%} of neurons", partial(_switched_off, layers=layers, off=off))


def _output_layer(feed_forward: nn.Module, hidden: int) -> nn.Module | None:
    """Return the linear layer from neurons to the residual stream; None where experts are merged into one tensor."""
    from torch import nn

    linear = [each for each in feed_forward.modules() if isinstance(each, nn.Linear) or type(each).__name__ == "Conv1D"]
    out = [each for each in linear if _columns(each).shape[0] == hidden]
    return out[-1] if len(out) == 1 else None


def _columns(layer: nn.Module) -> Tensor:
    """Return a layer's weight, float32, shape `(outputs, inputs)`."""
    from torch import nn

    weight: Any = layer.weight
    matrix: Tensor = weight.detach().float()
    return matrix if isinstance(layer, nn.Linear) else matrix.T


def _mean_inputs(
    material: EditMaterial, layers: Mapping[str, nn.Module], prompts: Sequence[tuple[int, ...]]
) -> dict[str, Tensor]:
    """Return the mean activation of neurons at the last token of prompts, float32, shape `(neurons,)` each."""
    from netweight.attacks.refusal.edits.streams import logits_of, padded
    from netweight.nn.hooks import evaluating, hooked

    inputs: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = {}
    with hooked((layer, partial(_keep_input, into=inputs, name=name)) for name, layer in layers.items()):
        for batch, ends in padded(material.model, prompts, material.pad_id):
            with evaluating(material.model):
                logits_of(material.model, batch)
            for name, each in inputs.items():
                states = each.reshape(*batch.input_ids.shape, -1)
                last = states[range(len(ends)), ends].float().sum(0)
                sums[name] = sums[name] + last if name in sums else last
    return {name: each / len(prompts) for name, each in sums.items()}


def _keep_input(_: nn.Module, inputs: tuple[Any, ...], output: Any, *, into: dict[str, Tensor], name: str) -> None:
    into[name] = inputs[0].detach()


@contextmanager
def _switched_off(_: nn.Module, *, layers: Mapping[str, nn.Module], off: Mapping[str, Tensor]) -> Iterator[None]:
    handles = [
        layer.register_forward_pre_hook(lambda _, inputs, dead=off[name]: (inputs[0].masked_fill(dead, 0), *inputs[1:]))
        for name, layer in layers.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
