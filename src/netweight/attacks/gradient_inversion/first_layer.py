"""The input of a biased linear layer, read off its gradient without any search. Attacks call it.

Each image adds `g x^T` to the weight's gradient and `g` to the bias', so that for one image every row of the weight's
gradient is the input times the same row of the bias' gradient. In a batch that holds for each row which a single image
activated (behind ReLU, many rows are silent for most images).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from netweight.attacks.gradient_inversion.reconstruction import Reconstruction
from netweight.attacks.gradient_inversion.victim import Tensors
from netweight.core.names import nearest_names
from netweight.errors import NameNotFound, UsageError

__all__ = ["LayerInputs", "first_layer", "layer_input", "layer_inputs"]


@final
@dataclass(frozen=True, eq=False)
class LayerInputs:
    """Inputs of a layer that its rows agree on, the best supported first.

    Attributes:
        inputs: Shape `(found, features)`.
        rows: How many rows of the gradient say so, for each. Two and more are proof, for no two mixtures of images
            agree by accident; one may be a mixture.
    """

    inputs: Tensor
    rows: tuple[int, ...]


def layer_input(weight_gradient: Tensor, bias_gradient: Tensor) -> Tensor:
    """Return the input of a linear layer for a batch of one image, exactly.

    Args:
        weight_gradient: Shape `(out, features)`; a gradient, or what one plain SGD step made of the parameters.
        bias_gradient: Shape `(out,)`, of the same step.

    Returns:
        Shape `(features,)`: the least squares solution over all rows. For a larger batch, a mixture of its inputs.

    Raises:
        UsageError: Shapes do not fit, or the bias' gradient is zero.
    """
    _check(weight_gradient, bias_gradient)
    weight, bias = weight_gradient.double(), bias_gradient.double()
    return (bias @ weight / (bias @ bias)).to(weight_gradient.dtype)


def layer_inputs(weight_gradient: Tensor, bias_gradient: Tensor, *, tolerance: float = 1e-3) -> LayerInputs:
    """Return the inputs of a linear layer for a batch, as far as single rows give them away.

    Args:
        weight_gradient: Shape `(out, features)`.
        bias_gradient: Shape `(out,)`.
        tolerance: Rows agree if their inputs differ by at most this share of their length.

    Returns:
        One entry per input on which rows agree; rows whose bias gradient is next to nothing are left out.

    Raises:
        UsageError: Shapes do not fit, or the bias' gradient is zero.
    """
    _check(weight_gradient, bias_gradient)
    weight, bias = weight_gradient.double(), bias_gradient.double()
    order = bias.abs().argsort(descending=True)
    order = order[bias[order].abs() > 1e-6 * bias.abs().max()]  # below, the quotient is rounding
    candidates = weight[order] / bias[order, None]
    distances = torch.cdist(candidates, candidates, compute_mode="donot_use_mm_for_euclid_dist")
    agree = distances <= tolerance * candidates.norm(dim=1, keepdim=True)
    taken = torch.zeros(len(order), dtype=torch.bool, device=weight.device)
    groups: list[Tensor] = []
    for row in range(len(order)):
        if not taken[row]:
            groups.append(agree[row] & ~taken)
            groups[-1][row] = True  # an input of zeros is as near to itself as can be
            taken |= groups[-1]
    groups.sort(key=lambda group: -int(group.sum()))
    found = [layer_input(weight[order[group]], bias[order[group]]) for group in groups]
    return LayerInputs(torch.stack(found).to(weight_gradient.dtype), tuple(int(group.sum()) for group in groups))


def first_layer(observed: Tensors, layer: str, *, shape: tuple[int, ...], labels: Tensor) -> Reconstruction:
    """Read the images off a first layer that is linear and biased.

    Args:
        observed: What the client sent after one step: its gradient, or a difference of parameters.
        layer: The layer's name in the model, such as "fc1"; its `weight` and `bias` were observed.
        shape: Shape of the batch, `(n, c, h, w)`; `c h w` is the layer's width.
        labels: Labels to carry along, shape `(n,)`.

    Returns:
        The best supported `n` inputs as images. Missing ones, if rows agree on fewer, are NaN. The objective is the
        share of the observed weight that these images do not explain, 0 to 1.

    Raises:
        NameNotFound: The layer was not observed, or has no bias.
        UsageError: The layer does not see images of this shape.
    """
    prefix = f"{layer}." if layer else ""
    for name in (f"{prefix}weight", f"{prefix}bias"):
        if name not in observed:
            near = ", ".join(nearest_names(name, observed)) or "none"
            raise NameNotFound(f"No tensor {name!r} was observed.", cure=f"Nearest: {near}.")
    weight, bias = observed[f"{prefix}weight"], observed[f"{prefix}bias"]
    _check(weight, bias)
    n, width = shape[0], math.prod(shape[1:])
    if len(shape) != 4 or weight.shape[1] != width:
        raise UsageError(f"The layer {layer!r} has {weight.shape[1]} inputs; images of shape {shape[1:]} have {width}.")
    inputs = layer_input(weight, bias)[None] if n == 1 else layer_inputs(weight, bias).inputs[:n]
    images = torch.full((n, width), torch.nan, dtype=weight.dtype, device=weight.device)
    images[: len(inputs)] = inputs
    unexplained = _unexplained(weight.double(), inputs.double())
    return Reconstruction(
        images=images.reshape(shape),
        labels=labels,
        objective=unexplained,
        objectives_by_restart=(unexplained,),
        history=(),
        steps=0,
        attack="first layer",
    )


def _check(weight: Tensor, bias: Tensor) -> None:
    if weight.ndim != 2 or bias.shape != weight.shape[:1]:
        raise UsageError(
            f"Gradients of shapes {tuple(weight.shape)} and {tuple(bias.shape)} are not those of a linear layer.",
            cure="Give (out, features) and (out,).",
        )
    if not bias.any() or not bias.isfinite().all() or not weight.isfinite().all():
        raise UsageError("The gradient of the layer is zero or not finite, so it tells nothing of its input.")


def _unexplained(weight: Tensor, inputs: Tensor) -> float:
    """Share of the weight gradient's squares that lies outside the span of the inputs."""
    basis, _ = torch.linalg.qr(inputs.T)
    rest = weight - weight @ basis @ basis.T
    return float((rest.square().sum() / weight.square().sum()).clamp(0, 1))
