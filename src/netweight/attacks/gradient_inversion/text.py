"""Text read off the gradient of a transformer's body: which token stands where, from the first product with weights.

The gradient of a linear layer's weight lies in the span of its inputs. Before the first such layer of a transformer
every place sees its own token alone, so that each token can be tried at each place: those that were there lie in the
span, others do not, as long as there are fewer places than the layer is wide. Neither labels nor the classifier are
needed, and no server has to lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from netweight.errors import Unsupported

_ABSENT = 1e-5  # share of the longest row, or the largest singular value, below which there is rounding alone


@torch.no_grad()
def read_text(body: nn.Module, params: Mapping[str, Tensor], gradient: Mapping[str, Tensor], length: int) -> Tensor:
    """Return the likeliest token at each place by the gradient of a body that begins with an embedding of tokens."""
    # Of a batch, one of the tokens that stand there. The gradient is known up to one factor.
    # Source: Petrov et al., DAGER (arXiv 2405.15586), its first layer; that an embedding's rows name the tokens is
    # older (Melis et al., arXiv 1805.04049).
    seen = _calls(body, params, torch.ones(1, length, dtype=torch.long))
    tokens = next((f"{name}.weight" for name, given in seen.items() if given.shape == (1, length)), None)
    layer = next((name for name, given in seen.items() if given.ndim == 3 and _weight(body, name) in gradient), None)
    if tokens is None or tokens not in gradient or layer is None:
        raise Unsupported("The body does not begin with tokens that are embedded and multiplied with weights.")
    lengths = gradient[tokens].norm(dim=1)
    present = torch.nonzero(lengths > _ABSENT * lengths.max()).flatten()
    tried = _calls(body, params, present[:, None].expand(-1, length))[layer].double()
    slope = gradient[_weight(body, layer)].double()
    slope = slope if slope.shape[1] == tried.shape[2] else slope.T
    _, values, right = torch.linalg.svd(slope, full_matrices=False)
    span = right[values > _ABSENT * values[0]]
    outside = (tried - tried @ span.T @ span).norm(dim=2) / tried.norm(dim=2).clamp_min(1e-30)
    found: Tensor = present[outside.argmin(0)]
    return found


def _weight(body: nn.Module, layer: str) -> str:
    """Return the name of the weight that a layer's input is multiplied with."""
    own = "in_proj_weight" if isinstance(body.get_submodule(layer), nn.MultiheadAttention) else "weight"
    return f"{layer}.{own}" if layer else own


def _calls(body: nn.Module, params: Mapping[str, Tensor], tokens: Tensor) -> dict[str, Tensor]:
    """Return the first input of each layer with a matrix, by the layer's name, in the order of calls."""
    called: dict[str, Tensor] = {}
    layers = {
        name: module for name, module in body.named_modules()
        if isinstance(module, nn.MultiheadAttention) or getattr(getattr(module, "weight", None), "ndim", 0) == 2
    }  # fmt: skip

    def note(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _module, given: None if name in called else called.update({name: given[0]})

    handles = [module.register_forward_pre_hook(note(name)) for name, module in layers.items()]
    try:
        functional_call(body, dict(params), (tokens,))
    finally:
        for handle in handles:
            handle.remove()
    return called
