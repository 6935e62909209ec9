"""Chains of convolutions, with which many networks begin: undone block by block, or chosen so that they print images.

A block is a convolution with max pooling and an activation; `read_chain` finds the blocks that a body begins with, and
a `Peel` undoes one of them for one image, given its weights and its gradient.

A malicious server can choose them, too: with `θ = W m + b`, a server that sets W to zero writes θ itself into b. Here θ
becomes a network whose convolutions pass the image on, as greatest and least values of small windows, and whose first
linear layer is a row of traps: each row has a direction of its own and a threshold that about one image of a batch
exceeds. The gradient of such a row, divided by that of its bias, is that image's features. The client's classifier
stays private and is not needed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import functional_call

from netweight.attacks.gradient_inversion.analytic import recover_gradient
from netweight.attacks.gradient_inversion.client import Tensors
from netweight.core import seeds
from netweight.errors import Unsupported, UsageError
from netweight.nn.hypernetwork import ParameterLayout

_CURE = "Peeling needs convolutions, max pooling and (leaky) ReLU in a chain; match gradients by descent instead."


@final
@dataclass(frozen=True)
class Block:
    """One convolution with what follows it, up to the next."""

    name: str
    """Module name of the convolution."""
    stride: int
    padding: int
    """Zero padding of the convolution."""
    pool: int
    """Side of the square, non-overlapping windows of max pooling; 1 without pooling."""
    slope: float
    """Slope of the activation below zero; 1 without activation."""


@final
@dataclass(frozen=True)
class Chain:
    """The blocks in order, and the name of the first linear layer, which sees their flattened result."""

    blocks: tuple[Block, ...]
    """The convolutional blocks."""
    linear: str
    """Full name of the layer."""


def read_chain(body: nn.Module) -> Chain:
    """Return the chain that a body begins with, up to its first linear layer."""
    try:
        graph = fx.symbolic_trace(body)
    except Exception as reason:
        # The forward method of a user's module may raise any error when its values are symbols.
        raise Unsupported(f"The body could not be traced: {reason}.", cure=_CURE) from reason
    modules = dict(graph.named_modules())
    blocks: list[Block] = []
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output") or _is(node, modules, nn.Identity, nn.Flatten, "flatten"):
            continue
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, nn.Linear):
            if not blocks or module.bias is None:
                raise Unsupported(f"The layer {node.target!r} has no convolution before it or no bias.", cure=_CURE)
            return Chain(tuple(blocks), str(node.target))
        if isinstance(module, nn.Conv2d):
            blocks.append(_convolution(str(node.target), module))
        elif not blocks:
            raise Unsupported(f"{node.name!r} comes before the first convolution.", cure=_CURE)
        elif _is(node, modules, nn.ReLU, "relu"):
            blocks[-1] = _with(blocks[-1], slope=0.0)
        elif _is(node, modules, nn.LeakyReLU, "leaky_relu"):
            slope = module.negative_slope if isinstance(module, nn.LeakyReLU) else _argument(node, 1, 0.01)
            blocks[-1] = _with(blocks[-1], slope=float(slope))
        elif _is(node, modules, nn.MaxPool2d, "max_pool2d", "boolean_dispatch"):
            blocks[-1] = _with(blocks[-1], pool=_window(node, module))
        else:
            raise Unsupported(f"{node.name!r} is not a part of a chain.", cure=_CURE)
    raise Unsupported("The body has no linear layer.", cure=_CURE)


def _is(node: fx.Node, modules: dict[str, nn.Module], *kinds: type[nn.Module] | str) -> bool:
    if node.op == "call_module":
        return isinstance(modules[str(node.target)], tuple(kind for kind in kinds if isinstance(kind, type)))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name in kinds and (name != "boolean_dispatch" or node.target is F.max_pool2d)


def _argument(node: fx.Node, index: int, default: Any) -> Any:
    names = ("input", "negative_slope")
    return node.args[index] if len(node.args) > index else node.kwargs.get(names[index], default)


def _convolution(name: str, layer: nn.Conv2d) -> Block:
    square = all(len(set(pair)) == 1 for pair in (layer.stride, layer.dilation)) and not isinstance(layer.padding, str)
    if not square or layer.dilation[0] != 1 or layer.groups != 1 or layer.bias is None:
        raise Unsupported(f"The convolution {name!r} is dilated, grouped, without bias or not square.", cure=_CURE)
    if len(set(layer.padding)) != 1 or layer.padding_mode != "zeros":
        raise Unsupported(f"The convolution {name!r} pads unevenly or not with zeros.", cure=_CURE)
    return Block(name, int(layer.stride[0]), int(layer.padding[0]), 1, 1.0)


def _window(node: fx.Node, module: nn.Module | None) -> int:
    kernel: Any
    stride: Any
    padding: Any
    dilation: Any
    if isinstance(module, nn.MaxPool2d):
        kernel, stride, padding, dilation = module.kernel_size, module.stride, module.padding, module.dilation
    else:
        kernel = node.args[1] if len(node.args) > 1 else node.kwargs["kernel_size"]
        stride = node.kwargs.get("stride") or kernel
        padding, dilation = node.kwargs.get("padding", 0), node.kwargs.get("dilation", 1)
    if not isinstance(kernel, int) or stride != kernel or padding != 0 or dilation != 1:
        raise Unsupported(f"The windows of {node.name!r} overlap, are padded or not square.", cure=_CURE)
    return kernel


def _with(block: Block, *, pool: int | None = None, slope: float | None = None) -> Block:
    """The block with pooling or an activation, which may come in either order: leaky ReLU is monotone."""
    if (pool is not None and block.pool != 1) or (slope is not None and block.slope != 1):
        raise Unsupported(f"Two poolings or two activations follow {block.name!r}.", cure=_CURE)
    return replace(block, pool=block.pool if pool is None else pool, slope=block.slope if slope is None else slope)


def undone(block: Block, output: Tensor, back: Tensor) -> tuple[Tensor, Tensor]:
    """Return a block's pooled values as far as its output fixes them, 0 below zero for ReLU, and their gradient."""
    below = output / block.slope if block.slope > 0 else torch.zeros_like(output)
    return torch.where(output > 0, output, below), torch.where(output > 0, back, back * block.slope)


def pool_softly(maps: Tensor, pool: int, temperature: float) -> Tensor:
    """Return for every window of maps, `(1, C, H, W)`, a mean that leans to its greatest value."""
    height, width = maps.shape[-2] // pool, maps.shape[-1] // pool
    cut = maps[..., : height * pool, : width * pool].reshape(*maps.shape[:-2], height, pool, width, pool)
    values = cut.transpose(-3, -2).flatten(-2)
    shares = torch.softmax(values / (temperature * values.detach().std()), -1)
    return (shares * values).sum(-1)


@final
class Peel:
    """A block with known weights and a known gradient, ready to be undone for one image."""

    def __init__(
        self, block: Block, weight: Tensor, bias: Tensor, gradient: Tensor, size: tuple[int, int, int]
    ) -> None:
        # size: shape `(c, h, w)` of the input
        # `weight` has shape `(C, c, k, k)`.
        self.block, self.weight, self.bias, self.size = block, weight, bias, size
        channels, self.kernel = weight.shape[1], weight.shape[-1]
        self.unknowns = size[0] * size[1] * size[2]
        basis = torch.eye(self.unknowns, dtype=weight.dtype, device=weight.device).view(-1, *size)
        full = self._convolve(basis)
        self.full = full.shape[1:]
        self.response = self._windows(full)
        plane = basis[: size[1] * size[2], :1]
        self.patches = F.unfold(plane, self.kernel, padding=block.padding, stride=block.stride)
        self.observed = gradient.view(len(weight), channels, -1).permute(0, 2, 1).reshape(-1, channels)

    @property
    def out(self) -> tuple[int, int, int]:
        """Shape of the output."""
        _, channels, height, width, _ = self.response.shape
        return channels, height, width

    def _convolve(self, inputs: Tensor) -> Tensor:
        return F.conv2d(inputs, self.weight, stride=self.block.stride, padding=self.block.padding)

    def _windows(self, maps: Tensor) -> Tensor:
        """Cut `(n, C, H, W)` into pooling windows, `(n, C, h, w, pool²)`; what no window covers is dropped."""
        n, c, height, width = maps.shape
        p, h, w = self.block.pool, height // self.block.pool, width // self.block.pool
        cut = maps[..., : h * p, : w * p].reshape(n, c, h, p, w, p)
        return cut.permute(0, 1, 2, 4, 3, 5).reshape(n, c, h, w, p * p)

    def _spread(self, windows: Tensor) -> Tensor:
        """The reverse of `_windows` for one image: `(C, h, w, pool²)` to `(C, H, W)`, zero where nothing is."""
        c, h, w, _ = windows.shape
        p = self.block.pool
        maps = windows.new_zeros(self.full)
        maps[..., : h * p, : w * p] = windows.view(c, h, w, p, p).permute(0, 1, 3, 2, 4).reshape(c, h * p, w * p)
        return maps

    def winners(self, inputs: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return how likely each value of a window is its greatest, and the values pooled with these weights."""
        values = self._windows(self._convolve(inputs[None]))[0] + self.bias.view(-1, 1, 1, 1)
        if temperature > 0:
            shares = torch.softmax(values / (temperature * values.std()), dim=-1)
        else:
            shares = F.one_hot(values.argmax(-1), values.shape[-1]).to(values)
        return shares, (values * shares).sum(-1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the block's output, `(C, h, w)`."""
        pooled = self.winners(inputs, 0)[1]
        return pooled * self.slopes(pooled)

    def slopes(self, pooled: Tensor) -> Tensor:
        """Return the activation's slope at each pooled value."""
        return torch.where(pooled > 0, 1.0, self.block.slope).to(pooled)

    def delta(self, shares: Tensor, cotangent: Tensor) -> Tensor:
        """Return the gradient by the convolution's result, `(C, H, W)`, given that by the pooled values."""
        return self._spread(cotangent[..., None] * shares)

    def pull(self, delta: Tensor) -> Tensor:
        """Return the gradient by the block's input."""
        block, short = self.block, 2 * self.block.padding - self.kernel
        missed = [
            size - (reached - 1) * block.stride + short
            for size, reached in zip(self.size[1:], delta.shape[1:], strict=True)
        ]
        return F.conv_transpose2d(
            delta[None], self.weight, stride=block.stride, padding=block.padding, output_padding=missed
        )[0]

    def gradient_rows(self, delta: Tensor) -> Tensor:
        """Return the convolution's gradient as rows over one input channel: `(h·w, C·k²)`, the same for each."""
        return torch.einsum("cp,ikp->ick", delta.flatten(1), self.patches).flatten(1)

    def misfit(self, inputs: Tensor, delta: Tensor) -> float:
        """Return how far the gradient is from the wanted one, relative to it."""
        rows = self.gradient_rows(delta)
        gradient = rows.T @ inputs.reshape(self.size[0], -1).T
        return float((gradient - self.observed).norm() / self.observed.norm())

    def output_equations(
        self, inputs: Tensor, temperature: float, target: Tensor, *, activated: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return `A` and `y` of the equations `Aᵀ inputs = y` of the block's output, and the winners held still."""
        # Both are divided by the norm of the target, so that least squares count relative errors.
        shares, pooled = self.winners(inputs, temperature)
        scale = self.slopes(pooled) if activated else torch.ones_like(pooled)
        rows = torch.einsum("icabk,cabk->icab", self.response, shares * scale[..., None]).flatten(1)
        rest = (target - self.bias.view(-1, 1, 1) * scale).flatten()
        # Below zero, ReLU removes the values that could be compared.
        if not activated and self.block.slope == 0:
            positive = (target > 0).flatten()
            rows, rest = rows[:, positive], rest[positive]
        return rows / target.norm(), rest / target.norm(), shares

    def by_span(self, target: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the exact input and its gradient, from the pooled values and theirs; None if these do not fix it.

        Source: for sequences DAGER (arXiv 2405.15586); for convolutions this library's own.
        """
        # A channel's gradient is a sum of patches of the input. With as many channels as places every patch lies in
        # the span of these sums, and but for its scale, which the output tells, one map alone has all of its there.
        places, channels, shift = self.patches.shape[-1], self.size[0], self.bias.view(-1, 1, 1)
        if places > len(self.weight):
            return None
        sums = self.observed.view(len(self.weight), -1, channels)
        span = torch.linalg.svd(sums.flatten(1), full_matrices=False).Vh[:places].view(places, -1, channels)
        inside = torch.einsum("rkc,ikp->rpci", span, self.patches).reshape(-1, self.unknowns)
        whole = torch.einsum("ikp,jkp->ij", self.patches, self.patches)
        values, maps = torch.linalg.eigh(torch.kron(torch.eye(channels).to(whole), whole) - inside.T @ inside)
        # The equations have no solution, or many.
        if values[0] > 1e-6 * values[1] or values[1] < 1e-6 * values[-1]:
            return None
        positive = target > 0 if self.block.slope == 0 else torch.ones_like(target, dtype=torch.bool)
        fits: list[tuple[float, Tensor]] = []
        for one in (maps[:, 0].view(self.size), -maps[:, 0].view(self.size)):
            got, goal = (self.winners(one, 0)[1] - shift)[positive], (target - shift)[positive]
            scale = got @ goal / (got @ got)
            fits.append((float((scale * got - goal).norm()), scale * one))
        solution = min(fits, key=lambda fit: fit[0])[1]
        return solution, self.pull(self.delta(self.winners(solution, 0)[0], cotangent))

    def solve(
        self, expected: Tensor, temperature: float, target: Tensor, cotangent: Tensor, *, activated: bool, weight: float
    ) -> Tensor:
        """Return the input by the equations of the output and of the convolution's gradient, near the expected one."""
        # The gradient's equations are the same for every input channel, so their matrix is small and inverted first;
        # the output's come in as a change of low rank (Woodbury), which takes a fifth of the time of one large system.
        rows, rest, shares = self.output_equations(expected, temperature, target, activated=activated)
        steps = self.gradient_rows(self.delta(shares, cotangent)) / self.observed.norm()
        block = steps @ steps.T
        pull = weight * (rows.square().sum() / self.unknowns + block.diagonal().mean())
        block.diagonal().add_(pull)
        factor, channels = torch.linalg.cholesky(block), self.size[0]

        def undo(values: Tensor) -> Tensor:
            """Divide by the gradient's part of the matrix, one channel like another."""
            columns = values.view(channels, len(block), -1).transpose(0, 1).reshape(len(block), -1)
            solved = torch.cholesky_solve(columns, factor).view(len(block), channels, -1)
            return solved.transpose(0, 1).reshape(values.shape)

        right = rows @ rest + pull * expected.flatten()
        right = right + (steps @ (self.observed / self.observed.norm())).T.reshape(-1)
        first, spread = undo(right), undo(rows)
        small = rows.T @ spread
        small.diagonal().add_(1)
        correction: Tensor = torch.linalg.solve(small, rows.T @ first)
        return (first - spread @ correction).view(expected.shape)


def solve_in_box(
    matrix: Tensor, right: Tensor, start: Tensor, low: Tensor, high: Tensor, *, rounds: int = 12
) -> Tensor:
    """Minimize `½ xᵀMx - rᵀx` with `low ≤ x ≤ high`: values at a bound are held and the others solved, in turns."""
    solution, free = start, torch.ones_like(start, dtype=torch.bool)
    for _ in range(rounds):
        held = right[free] - matrix[free][:, ~free] @ solution[~free]
        solution = solution.clone()
        solution[free] = torch.linalg.solve(matrix[free][:, free], held)
        solution = solution.clamp(low, high)
        slope = matrix @ solution - right
        now_free = ~(((solution <= low) & (slope > 0)) | ((solution >= high) & (slope < 0)))
        if bool((now_free == free).all()) or not bool(now_free.any()):
            break
        free = now_free
    return solution


# ---- a malicious server's choice -------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Imprint:
    """Parameters that a malicious server sends, and what it keeps to read the reply."""

    state: dict[str, Tensor]
    """The hypernetwork's state with chosen heads; names and shapes as given."""
    parameters: dict[str, Tensor]
    """The network that every client will generate from it, whatever its embedding (with `share` 1). Tensors by name."""
    decoder: Tensor
    """Linear map from features and a constant 1 to pixels, shape `(features + 1, c·h·w)`, fitted to the public images.
    """
    traps: int
    """Number of rows of the first linear layer that are traps; they come first."""


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
) -> Imprint:
    """Choose the heads of a hypernetwork so that the clients' updates contain copies of their images.

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
            f"A share of {share if quiet is None else quiet} of the network cannot be set by the server.",
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
    return Imprint(malicious, chosen, _decoder(features, public), traps)


def read_imprint(
    sent: Imprint,
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
    images = pixels.view(-1, *shape).clamp(*bounds)
    with torch.no_grad():
        explained = _features(chain, body, sent.parameters, images)
    return images, (explained - features).abs().mean(1) / (bounds[1] - bounds[0])


def _decoder(features: Tensor, images: Tensor) -> Tensor:
    """Ridge regression from features to pixels."""
    rows, pixels = F.pad(features, (0, 1), value=1.0).double(), images.flatten(1).double()
    matrix = rows.T @ rows
    matrix.diagonal().add_(1e-3 * matrix.diagonal().mean())
    solved: Tensor = torch.linalg.solve(matrix, rows.T @ pixels)
    return solved.to(images)


def _features(chain: Chain, body: nn.Module, parameters: Tensors, images: Tensor) -> Tensor:
    """Return the input of the first linear layer."""
    inputs_of_layer: list[Tensor] = []
    handle = body.get_submodule(chain.linear).register_forward_pre_hook(
        lambda _, inputs: inputs_of_layer.append(inputs[0])
    )
    try:
        functional_call(body, dict(parameters), (images,), strict=True)
    finally:
        handle.remove()
    return inputs_of_layer[0]


def _pass_on(chain: Chain, chosen: dict[str, Tensor], bounds: tuple[float, float]) -> None:
    """Write convolutions that keep, for shifted windows, the greatest value and the least, both as positive numbers."""
    span, stride, taps = bounds[1] - bounds[0], 1, [(0, 0)]
    for index, block in enumerate(chain.blocks):
        weight, bias = chosen[f"{block.name}.weight"].zero_(), chosen[f"{block.name}.bias"].zero_()
        # The middle of the kernel, so that what no window covers is shared by both ends of the image.
        base = (weight.shape[-1] - block.pool + (index == 0)) // 2
        windows = [
            (y + stride * i, x + stride * j, source, i, j)
            for i in range(block.pool)
            for j in range(block.pool)
            for source, (y, x) in enumerate(taps)
        ]
        # Where there are too few channels for every shift, a checkerboard of shifts spreads them evenly.
        windows.sort(key=lambda tap: ((tap[0] + tap[1]) % 2, tap[0], tap[1]))
        windows = windows[: len(bias) // 2]
        for number, (_, _, source, i, j) in enumerate(windows):
            value, complement = 2 * number, 2 * number + 1
            if index == 0:
                weight[value, :, base + i, base + j] = 1 / weight.shape[1]
                bias[value], bias[complement] = -bounds[0], bounds[1]
            else:
                weight[value, 2 * source : 2 * source + 2, base + i, base + j] = torch.tensor([0.5, -0.5])
                bias[value], bias[complement] = span / 2, span / 2
            weight[complement] = -weight[value]
        taps, stride = [(y, x) for y, x, *_ in windows], stride * block.pool


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
