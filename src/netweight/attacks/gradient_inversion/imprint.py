"""A malicious server: chosen head biases dictate every client's network, which prints images into its update.

With `θ = W m + b`, a server that sets W to zero writes θ itself into b. Here θ becomes a network whose convolutions
pass the image on, as greatest and least values of small windows, and whose first linear layer is a row of traps: each
row has a direction of its own and a threshold that about one image of a batch exceeds. The gradient of such a row,
divided by that of its bias, is that image's features. The client's classifier stays private and is not needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from netweight.attacks.gradient_inversion.analytic import recover_gradient
from netweight.attacks.gradient_inversion.client import Tensors
from netweight.attacks.gradient_inversion.peeling import Chain, read_chain
from netweight.core import seeds
from netweight.errors import UsageError
from netweight.nn.hypernetwork import ParameterLayout


@final
@dataclass(frozen=True)
class Imprinted:
    """What a malicious server sends, and what it keeps to read the answer."""

    state: dict[str, Tensor]  # the hypernetwork's state with chosen heads; names and shapes as given
    # The network that every client will generate from it, whatever its embedding (with `share` 1). Tensors by name.
    parameters: dict[str, Tensor]
    decoder: Tensor  # from features and a one to pixels, `(features + 1, c·h·w)`, fitted to the public images
    traps: int  # how many rows of the first linear layer are traps; they come first


def imprint(
    state: Tensors,
    body: nn.Module,
    *,
    public: Tensor,
    images: int,
    bounds: tuple[float, float] = (0.0, 1.0),
    share: float = 1.0,
    quiet: float | None = None,
    code: Tensor | None = None,
    seed: int,
) -> Imprinted:
    """Choose the heads of a hypernetwork so that clients print their images into their updates.

    Args:
        state: The honest shared state; the trunk is left as it is. Tensors by name.
        body: The feature extractor: a chain as `read_chain` takes it.
        public: Images like the clients', `(n, c, h, w)`, as the body sees them; thresholds are set with them.
        images: How many images each client (or each sum of clients) puts into one step.
        bounds: Least and greatest value of a pixel.
        share: How much of the dictated network is put in: 1 replaces the heads (W = 0), less mixes it with the honest
            heads, as a server would that fears to be noticed.
        quiet: Keep the honest network and make traps of this share of its rows by their biases alone. Convolutions
            that were not chosen pass less on, but there is little to notice.
        code: The client's hidden code, shape `(H,)`, with which it generates; needed for `quiet` unless the heads'
            weights are zero.
        seed: Seed of the directions.

    Raises:
        Unsupported: The body is no such chain.
        UsageError: There are fewer public images than `images`, or a share is not in (0, 1].

    Source: traps as in Boenisch et al. 2023 ("When the curious abandon honesty"), in the place of the bins of Fowl et
        al. (arXiv 2110.13057), which need the layer after; dictating θ through the head biases is this library's own.
    """
    if not (0 < share <= 1 and (quiet is None or 0 < quiet <= 1)):
        raise UsageError(
            f"A share of {share if quiet is None else quiet} of the network cannot be dictated.",
            cure="Choose more than 0, up to 1.",
        )
    if len(public) < images or images < 1:
        raise UsageError(f"Thresholds for {images} images cannot be set with {len(public)} public ones.")
    chain, layout = read_chain(body), ParameterLayout.of(body)
    names = {part: next(name for name in state if name.endswith(part)) for part in ("heads.weight", "heads.bias")}
    weight, bias = (state[name].detach().clone() for name in names.values())
    if quiet is None:
        chosen = {name: parameter.detach().clone() for name, parameter in body.named_parameters()}
        _pass_on(chain, chosen, bounds)
        traps = _set_traps(chain, body, chosen, public, images, 1.0, seed)
        weight, bias = weight * (1 - share), bias * (1 - share) + layout.join(chosen) * share
    else:
        honest = bias if code is None else bias + weight @ code.to(weight)
        chosen = {name: part.clone() for name, part in layout.split(honest).items()}
        traps = _set_traps(chain, body, chosen, public, images, quiet, None)
        bias = bias + layout.join(chosen) - honest
    malicious = {name: tensor.detach().clone() for name, tensor in state.items()}
    malicious |= {names["heads.weight"]: weight, names["heads.bias"]: bias}
    with torch.no_grad():
        features = _features(chain, body, chosen, public)
    return Imprinted(malicious, chosen, _decoder(features, public), traps)


def read_imprint(
    sent: Imprinted,
    after: Tensors,
    body: nn.Module,
    *,
    shape: tuple[int, int, int],
    bounds: tuple[float, float] = (0.0, 1.0),
    lr: float,
    weight_decay: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Read the images that an update, or the average of clients', carries; and how badly each is explained."""
    # At most one `(c, h, w)` for each row of the first linear layer, in color only as far as the public images tell it
    # from gray. The same image may come more than once.
    chain, layout = read_chain(body), ParameterLayout.of(body)
    gradient = layout.split(recover_gradient(sent.state, after, lr=lr, weight_decay=weight_decay).gradient)
    rows, biases = gradient[f"{chain.linear}.weight"], gradient[f"{chain.linear}.bias"]
    features = (rows / torch.where(biases == 0, torch.ones_like(biases), biases)[:, None]).float()
    weight, bias = sent.parameters[f"{chain.linear}.weight"], sent.parameters[f"{chain.linear}.bias"]
    # A trap that one image sprang shows features that spring it; mixtures of silent images do not.
    sprung = (weight * features).sum(1) + bias > 0
    features = features[: sent.traps][sprung[: sent.traps]]
    if not len(features):
        return torch.empty(0, *shape), torch.empty(0)
    pixels = F.pad(features, (0, 1), value=1.0) @ sent.decoder
    found = pixels.view(-1, *shape).clamp(*bounds)
    with torch.no_grad():
        seen = _features(chain, body, sent.parameters, found)
    return found, (seen - features).abs().mean(1) / (bounds[1] - bounds[0])


def _decoder(features: Tensor, images: Tensor) -> Tensor:
    """Ridge regression from features to pixels."""
    rows, pixels = F.pad(features, (0, 1), value=1.0).double(), images.flatten(1).double()
    matrix = rows.T @ rows
    matrix.diagonal().add_(1e-3 * matrix.diagonal().mean())
    solved: Tensor = torch.linalg.solve(matrix, rows.T @ pixels)
    return solved.to(images)


def _features(chain: Chain, body: nn.Module, parameters: Tensors, images: Tensor) -> Tensor:
    """What the first linear layer sees."""
    seen: list[Tensor] = []
    handle = body.get_submodule(chain.linear).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        functional_call(body, dict(parameters), (images,), strict=True)
    finally:
        handle.remove()
    return seen[0]


def _pass_on(chain: Chain, chosen: dict[str, Tensor], bounds: tuple[float, float]) -> None:
    """Write convolutions that keep, for shifted windows, the greatest value and the least, both as positive numbers."""
    span, stride, taps = bounds[1] - bounds[0], 1, [(0, 0)]
    for index, block in enumerate(chain.blocks):
        weight, bias = chosen[f"{block.name}.weight"].zero_(), chosen[f"{block.name}.bias"].zero_()
        # The middle of the kernel, so that what no window covers is shared by both ends of the image.
        base = (weight.shape[-1] - block.pool + (index == 0)) // 2
        wanted = [
            (y + stride * i, x + stride * j, source, i, j)
            for i in range(block.pool)
            for j in range(block.pool)
            for source, (y, x) in enumerate(taps)
        ]
        # Where there are too few channels for every shift, a checkerboard of shifts spreads them evenly.
        wanted.sort(key=lambda tap: ((tap[0] + tap[1]) % 2, tap[0], tap[1]))
        wanted = wanted[: len(bias) // 2]
        for number, (_, _, source, i, j) in enumerate(wanted):
            value, complement = 2 * number, 2 * number + 1
            if index == 0:
                weight[value, :, base + i, base + j] = 1 / weight.shape[1]
                bias[value], bias[complement] = -bounds[0], bounds[1]
            else:
                weight[value, 2 * source : 2 * source + 2, base + i, base + j] = torch.tensor([0.5, -0.5])
                bias[value], bias[complement] = span / 2, span / 2
            weight[complement] = -weight[value]
        taps, stride = [(y, x) for y, x, *_ in wanted], stride * block.pool


def _set_traps(
    chain: Chain,
    body: nn.Module,
    chosen: dict[str, Tensor],
    public: Tensor,
    images: int,
    share: float,
    seed: int | None,
) -> int:
    """Set the biases of the first rows to thresholds, and their directions at random if there is a seed."""
    weight, bias = chosen[f"{chain.linear}.weight"], chosen[f"{chain.linear}.bias"]
    traps = max(1, round(share * len(bias)))
    with torch.no_grad():
        features = _features(chain, body, chosen, public)
        if seed is not None:
            directions = torch.randn(weight.shape, generator=seeds.torch_generator(seed, "traps")).to(weight)
            weight.copy_(directions / F.linear(features, directions).std(0).clamp_min(1e-6)[:, None])
        heights = F.linear(features, weight)
        bias[:traps] = -torch.quantile(heights, 1 - 1 / images, dim=0)[:traps]
    return traps
