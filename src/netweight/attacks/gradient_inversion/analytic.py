"""Reconstruction from an update without a search: a layer's inputs, a hypernetwork's gradient, clients out of a sum.

Each image adds `g x^T` to the gradient of a biased linear layer's weight and `g` to the bias', so that for one image
every row of the weight's gradient is the input times the same row of the bias' gradient. In a batch that holds for each
row which a single image activated (behind ReLU, many rows are silent for most images).

The gradient of a linear layer's weight lies in the span of its inputs. Before the first such layer of a transformer
every place sees its own token alone, so that each token can be tried at each place: those that were there lie in the
span, others do not, as long as there are fewer places than the layer is wide. Neither labels nor the classifier are
needed, and no server has to lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from netweight.attacks.gradient_inversion.client import LocalUpdate, Reconstruction, Tensors
from netweight.core import seeds
from netweight.core.names import not_found
from netweight.errors import NameNotFound, Unsupported, UsageError
from netweight.nn.hypernetwork import hidden_code


@final
@dataclass(frozen=True, eq=False)
class LayerInputs:
    """Inputs of a layer that its rows agree on, the best supported first."""

    inputs: Tensor
    """Shape `(found, features)`."""
    rows: tuple[int, ...]
    """Number of rows of the gradient that agree, for each. Two and more are proof, for no two mixtures of images agree
    by accident; one may be a mixture.
    """


def layer_input(weight_gradient: Tensor, bias_gradient: Tensor) -> Tensor:
    """Return the input of a linear layer for a batch of one image, exactly."""
    _check(weight_gradient, bias_gradient)
    weight, bias = weight_gradient.double(), bias_gradient.double()
    return (bias @ weight / (bias @ bias)).to(weight_gradient.dtype)


def layer_inputs(weight_gradient: Tensor, bias_gradient: Tensor, *, tolerance: float = 1e-3) -> LayerInputs:
    """Return the inputs of a linear layer for a batch, as far as single rows give them away."""
    _check(weight_gradient, bias_gradient)
    weight, bias = weight_gradient.double(), bias_gradient.double()
    order = bias.abs().argsort(descending=True)
    # Below this, the quotient consists of rounding errors.
    order = order[bias[order].abs() > 1e-6 * bias.abs().max()]
    candidates = weight[order] / bias[order, None]
    distances = torch.cdist(candidates, candidates, compute_mode="donot_use_mm_for_euclid_dist")
    agree = distances <= tolerance * candidates.norm(dim=1, keepdim=True)
    taken = torch.zeros(len(order), dtype=torch.bool, device=weight.device)
    groups: list[Tensor] = []
    for row in range(len(order)):
        if not taken[row]:
            groups.append(agree[row] & ~taken)
            # An input of zeros equals itself, although its cosine is not defined.
            groups[-1][row] = True
            taken |= groups[-1]
    groups.sort(key=lambda group: -int(group.sum()))
    inputs = [layer_input(weight[order[group]], bias[order[group]]) for group in groups]
    return LayerInputs(torch.stack(inputs).to(weight_gradient.dtype), tuple(int(group.sum()) for group in groups))


def first_layer(observed: Tensors, layer: str, *, shape: tuple[int, ...], labels: Tensor) -> Reconstruction:
    """Read the images off a first layer that is linear and biased."""
    prefix = f"{layer}." if layer else ""
    for name in (f"{prefix}weight", f"{prefix}bias"):
        if name not in observed:
            raise not_found(f"No tensor {name!r} was observed.", name, observed)
    weight, bias = observed[f"{prefix}weight"], observed[f"{prefix}bias"]
    _check(weight, bias)
    n, width = shape[0], math.prod(shape[1:])
    if len(shape) != 4 or weight.shape[1] != width:
        raise UsageError(f"The layer {layer!r} has {weight.shape[1]} inputs; images of shape {shape[1:]} have {width}.")
    inputs = layer_input(weight, bias)[None] if n == 1 else layer_inputs(weight, bias).inputs[:n]
    images = torch.full((n, width), torch.nan, dtype=weight.dtype, device=weight.device)
    images[: len(inputs)] = inputs
    unexplained = _unexplained(weight.double(), inputs.double())
    return Reconstruction(images.reshape(shape), labels, unexplained, (unexplained,), (), 0, "first layer")


def _check(weight: Tensor, bias: Tensor) -> None:
    if weight.ndim != 2 or bias.shape != weight.shape[:1]:
        raise UsageError(
            f"Gradients of shapes {tuple(weight.shape)} and {tuple(bias.shape)} are not those of a linear layer.",
            cure="Give (out, features) and (out,).",
        )
    if not bias.any() or not bias.isfinite().all() or not weight.isfinite().all():
        raise UsageError("The gradient of the layer is zero or not finite, so it reveals nothing about its input.")


def _unexplained(weight: Tensor, inputs: Tensor) -> float:
    """Share of the weight gradient's squares that lies outside the span of the inputs."""
    basis, _ = torch.linalg.qr(inputs.T)
    rest = weight - weight @ basis @ basis.T
    return float((rest.square().sum() / weight.square().sum()).clamp(0, 1))


_HEADS = ("heads.weight", "heads.bias")
_TRUNK = ("trunk.0.weight", "trunk.0.bias")
# A change counts as rank one if this share of it is; the rest is rounding.
_ONE = 1 - 1e-4


@final
@dataclass(frozen=True)
class RecoveredGradient:
    """Gradient recovered from one client's change of the hypernetwork; all vectors are float64."""

    gradient: Tensor
    """The loss's gradient by the generated vector θ, shape `(P,)`: exact up to a positive factor (the client's
    clipping) after one step; after several, the weighted sum of the steps' gradients.
    """
    first: Tensor
    """The best estimate of the first step's gradient, shape `(P,)`: `gradient` after one step; after several, what
    belongs to the code at the start and not to that at the end.
    """
    code: Tensor
    """The hidden code m at the start, shape `(H,)`, exact after one step."""
    embedding: Tensor
    """The private embedding, shape `(E,)`; after several steps, an average."""
    generated: Tensor
    """Θ as the client generated it from the state it received, shape `(P,)`."""
    movement: Tensor
    """Change of θ, `θ after - θ before`, shape `(P,)`."""
    energies: Tensor
    """Share of the change's energy in each of its singular values, shape `(k,)`, largest first; after one step all
    of it is in the first, and the spread over the others is what further steps hide.
    """

    @property
    def rank_one(self) -> bool:
        """True if one code explains the change: after one step, or when all hidden units stayed silent."""
        return float(self.energies[0]) > _ONE


def recover_gradient(before: Tensors, after: Tensors, *, lr: float, weight_decay: float = 0.0) -> RecoveredGradient:
    """Read a client's gradient, hidden code, embedding and generated weights from two states of its hypernetwork.

    Args:
        before: The shared state that the client received: `heads.weight` `(P, H)`, `heads.bias` `(P,)`,
            `trunk.0.weight` `(H₁, E)` and `trunk.0.bias`, under any common prefix; other tensors are not read.
        after: The state that it sent back, the same names and shapes.
        lr: The client's learning rate; a wrong one changes the scale of `gradient` only.
        weight_decay: The client's weight decay. It is removed exactly for one step.

    Raises:
        NameNotFound: A tensor is missing.
        UsageError: Shapes differ, a value is not finite, the rate is not positive, or nothing has changed.

    Source: follows from HyperFL (arXiv 2412.07187) equation 4, `θ = h(v; φ)`, with linear heads; not in the paper.
    """
    return HypernetworkChange(before, after, lr=lr, weight_decay=weight_decay).recovered()


@final
class HypernetworkChange:
    """A hypernetwork before and after, and the gradient of one step between: what several attacks read."""

    def __init__(self, before: Tensors, after: Tensors, *, lr: float, weight_decay: float = 0.0) -> None:
        if not lr > 0:
            raise UsageError(f"A learning rate of {lr} is not valid.", cure="Give the client's rate, such as 0.02.")
        self.before, self.after = hypernetwork_tensors(before), hypernetwork_tensors(after)
        # The gradient is in float64, because differences of float32 numbers lose digits.
        self.gradient: dict[str, Tensor] = {}
        for name, old in self.before.items():
            new = self.after.get(name)
            if new is None or new.shape != old.shape:
                raise UsageError(
                    f"{name!r} is missing after the training, or no longer has the shape {tuple(old.shape)}."
                )
            slope = old.to(torch.float64, copy=True).sub_(new).div_(lr).sub_(old, alpha=weight_decay)
            if not slope.sum().isfinite():
                raise UsageError(
                    f"The tensor {name!r} contains NaN or infinity.", cure="Leave this client's update out."
                )
            self.gradient[name] = slope

    @cached_property
    def heads(self) -> Tensor:
        """The gradient by the heads' weights and, in the last column, their biases; shape `(P, H + 1)`."""
        weight, bias = (self.gradient[name] for name in _HEADS)
        return torch.cat([weight, bias[:, None]], dim=1)

    @cached_property
    def gram(self) -> Tensor:
        """Products of the columns of `heads`."""
        return self.heads.T @ self.heads

    def recovered(self) -> RecoveredGradient:
        """Return what one client's change gives away; see `recover_gradient`."""
        weight, bias = self.heads[:, :-1], self.heads[:, -1]
        trunk = [self.gradient[name] for name in _TRUNK]
        if not bias.any():
            raise UsageError("The heads' biases have not changed, so there is no gradient to read.")
        energies: Tensor = torch.linalg.eigvalsh(self.gram).flip(0).clamp_min(0)
        energies = energies / energies.sum()
        # The input of a linear layer from its gradients g xᵀ and g: least squares over all rows.
        average = self.gram[:-1, -1] / self.gram[-1, -1].clamp_min(torch.finfo(torch.float64).tiny)
        embedding = trunk[0].T @ trunk[1] / (trunk[1] @ trunk[1]).clamp_min(torch.finfo(torch.float64).tiny)
        single = float(energies[0]) > _ONE
        # Heads whose weights are zero do not pass a gradient to the trunk.
        still = not bool(trunk[1].any())
        end = average if still else _code(self.after, embedding)
        start = average if still or single else _code(self.before, embedding)
        # From g mᵀ and g together, which averages the rounding of H + 1 stored numbers for each value.
        gradient = (weight @ average + bias) / (average @ average + 1)
        first = gradient if still or single else weight @ torch.linalg.pinv(torch.stack([start, end], dim=1))[0]
        generated = _generated(self.before, start)
        movement = _generated(self.after, end) - generated
        return RecoveredGradient(gradient, first, start, embedding, generated, movement, energies)


def _generated(state: Tensors, code: Tensor) -> Tensor:
    weight, bias = (state[name].double() for name in _HEADS)
    return weight @ code + bias


def _code(state: Tensors, embedding: Tensor) -> Tensor:
    trunk = {name: tensor.double() for name, tensor in state.items() if name.startswith("trunk.")}
    return hidden_code(trunk, embedding)


def hypernetwork_tensors(state: Tensors) -> dict[str, Tensor]:
    """Return a hypernetwork's tensors without their prefix."""
    prefixes = {name.removesuffix("heads.weight") for name in state if name.endswith("heads.weight")}
    if len(prefixes) != 1:
        raise not_found(f"{len(prefixes)} tensors are called 'heads.weight', not one.", "heads.weight", state)
    prefix = prefixes.pop()
    tensors = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    for required in (*_HEADS, *_TRUNK):
        if required not in tensors:
            raise not_found(f"The tensor {prefix + required!r} is missing.", prefix + required, state)
    chosen = (name for name in tensors if name.startswith(("heads.", "trunk.")))
    return {name: tensors[name].detach() for name in chosen}


# Single clients out of a sum over clients, which secure aggregation does not hide when heads are linear. The sum of the
# clients' changes is `Σ gᵢ mᵢᵀ`. Codes of different clients are different keys: with more hidden units than clients and
# the codes known, each gᵢ is solved for. A client's code follows from its embedding, which one round without secure
# aggregation gives away. A malicious server needs no such round: a trunk of thresholds along one direction makes codes
# that the sum's columns can be told apart by.


def singular_gradient(change: HypernetworkChange) -> Tensor:
    """Return the direction that most of the heads' change goes in, `(P,)`: the best under noise without a code."""
    vector: Tensor = torch.linalg.eigh(change.gram).eigenvectors[:, -1]
    # A code ends with 1, which stands for the bias, so its sign is known.
    return change.heads @ (vector * (1 if vector[-1] >= 0 else -1))


def separate_clients(change: HypernetworkChange, codes: Tensor) -> Tensor:
    """Return each client's gradient from the sum or average of their updates; for one client, the matched filter."""
    units = change.heads.shape[1] - 1
    if codes.ndim != 2 or codes.shape[1] != units or len(codes) > units + 1:
        raise UsageError(f"Codes of shape {tuple(codes.shape)} do not separate a sum over {units} units.")
    keys = torch.cat([codes.double(), torch.ones(len(codes), 1, dtype=torch.float64)], dim=1)
    opened: Tensor = change.heads @ torch.linalg.pinv(keys)
    return opened.T


def threshold_trunk(state: Tensors, *, seed: int) -> dict[str, Tensor]:
    """Return a state whose trunk makes hidden unit j the part of `u · v` above the j-th of H thresholds."""
    # The thresholds are quantiles of the standard normal distribution, from which embeddings are drawn. The heads stay
    # honest, so no check of generated weights sees anything.
    if any(name.endswith("trunk.1.weight") for name in state):
        raise UsageError("Thresholds can be written only into a trunk of one layer, and this trunk has more layers.")
    malicious = {name: tensor.detach().clone() for name, tensor in state.items()}
    for name, tensor in malicious.items():
        if name.endswith("trunk.0.weight"):
            direction = torch.randn(tensor.shape[1], generator=seeds.torch_generator(seed, "direction"))
            tensor.copy_((direction / direction.norm()).expand_as(tensor))
        elif name.endswith("trunk.0.bias"):
            tensor.copy_(-_thresholds(len(tensor)))
    return malicious


def read_thresholds(change: HypernetworkChange) -> Tensor:
    """Return what clients between neighboring thresholds sent, `(H - 2, P)`: single gradients where there is one."""
    # A unit's column of the sum is `Σ gᵢ max(u · vᵢ - tⱼ, 0)`, piecewise linear in tⱼ with a bend at every client. So
    # second differences are zero but at the clients. A client between two thresholds bends two of them, both in its
    # direction.
    columns = change.gradient["heads.weight"].T
    slopes = (columns[:-1] - columns[1:]) / _thresholds(len(columns)).double().diff()[:, None]
    return slopes[:-1] - slopes[1:]


def _thresholds(count: int) -> Tensor:
    quantiles: Tensor = torch.special.ndtri((torch.arange(count) + 0.5) / count)
    return quantiles


# Labels: with cross-entropy the gradient of the last layer's bias is the mean over the batch of probabilities less the
# one-hot label. For one image its only negative entry is the label (iDLG), for a batch it tells how often each occurs.


def label_of_one(gradient: Tensor) -> int:
    """Return the label of a single image, exactly (iDLG).

    Source: Zhao et al. 2020, "iDLG", section 3.2. Row c of the weight's gradient is (p_c - y_c) features: the label's
    row points against all others.
    """
    towards = gradient if gradient.ndim == 1 else _alignment(gradient)
    labels = (towards < 0).nonzero().flatten().tolist()
    if len(labels) != 1:
        raise UsageError(
            f"{len(labels)} classes have the sign of a label, but in the gradient of one image exactly one class has "
            "it.",
            cure="Use label_counts for a batch. A difference of parameters points against the gradient: negate it. "
            "In a command, give --sent difference and --lr, or --labels.",
        )
    return int(labels[0])


def label_counts(bias_gradient: Tensor, n: int, *, probabilities: Tensor | None = None) -> Tensor:
    """Estimate how often each class occurs in a batch.

    The count of class c is `n (mean probability of c - gradient of c)`. The mean probabilities are not known to the
    server: give what its model says on similar images. Where they are right, the counts are exact.

    Source: The exact identity behind the label estimates of Yin et al. 2021, "See through Gradients", section 3.1.
    """
    classes = len(bias_gradient)
    expected = torch.full_like(bias_gradient, 1 / classes) if probabilities is None else probabilities
    if bias_gradient.ndim != 1 or expected.shape != bias_gradient.shape or n < 1:
        raise UsageError(f"Labels of {n} images cannot be counted from a gradient of {tuple(bias_gradient.shape)}.")
    estimate = (n * (expected - bias_gradient)).double()
    sure = (bias_gradient < 0).long()
    counts = sure if int(sure.sum()) <= n else torch.zeros_like(sure)
    # Each image is assigned to the class whose gradient is least explained so far.
    for _ in range(n - int(counts.sum())):
        counts[int((estimate - counts).argmax())] += 1
    return counts


def labels_of_update(
    local_update: LocalUpdate, params: Tensors, observed: Tensors, *, shape: tuple[int, ...], seed: int
) -> Tensor:
    """Estimate a batch's labels from an update, whether it is a gradient or a difference of parameters.

    Raises:
        NameNotFound: The update has no bias of the model's last linear layer.
        UsageError: The update of one image does not have the sign of one label, or is zero.
    """
    probabilities, gradient = _last_layer(local_update, params, observed, shape, seed)
    if shape[0] == 1:
        return torch.tensor([label_of_one(gradient)], device=gradient.device)
    counts = label_counts(gradient, shape[0], probabilities=probabilities)
    return torch.arange(len(counts), device=gradient.device).repeat_interleave(counts)


def doubt_of_labels(
    local_update: LocalUpdate, params: Tensors, observed: Tensors, *, shape: tuple[int, ...], seed: int
) -> float:
    """Return how badly estimated labels explain an update: the mean distance of class counts from whole numbers.

    Near 0 where the client trained as `local_update` does and the model says of unknown images what it says of
    the client's; 0.15 and more where the loss or the rate is another, or the model is trained so far that the estimate
    is a guess. 0 for one image, whose label is exact.
    """
    if shape[0] == 1:
        return 0.0
    probabilities, gradient = _last_layer(local_update, params, observed, shape, seed)
    counts = label_counts(gradient, shape[0], probabilities=probabilities)
    return float((shape[0] * (probabilities - gradient) - counts).abs().mean())


def _last_layer(
    local_update: LocalUpdate, params: Tensors, observed: Tensors, shape: tuple[int, ...], seed: int
) -> tuple[Tensor, Tensor]:
    """Return what the model says of images that it does not know, and the gradient of the last bias."""
    # The update is imitated for random images, once as class 0 and once as class 1: that shows its sign and scale, and
    # what the model says of images that it does not know. For one image and one step the label is exact.
    missing = NameNotFound(
        "The update contains no bias of the model's last linear layer, from which labels could be read.",
        cure="Give the labels (--labels).",
    )
    names = list(_biases(observed))
    if not names:
        raise missing
    like = next(iter(params.values()))
    images = torch.randn(shape, generator=seeds.torch_generator(seed, "labels")).to(like)
    labels = torch.zeros(shape[0], dtype=torch.int64, device=like.device)
    first, second = (local_update(params, (images, labels + other)) for other in (0, 1))
    for name in names:
        if name not in first:
            continue
        # For gradients the two are p - (1, 0, ...) and p - (0, 1, ...); for small steps, the same times a scale. So
        # that they differ in the first two classes alone, in opposite directions; other layers differ everywhere.
        one, two = first[name].detach(), second[name].detach()
        change = two - one
        if change[0] * change[1] >= 0 or change[2:].norm() > 0.5 * change[:2].norm():
            continue
        probabilities = one / change[0]
        probabilities[0] += 1
        gradient = observed[name].to(one) / change[0]
        if not gradient.any():
            raise UsageError(
                f"The update's {name!r} is zero, so that it shows no labels.",
                cure="Give the update of a client that trained, or the labels (--labels).",
            )
        return probabilities, gradient
    raise missing


def _biases(observed: Tensors) -> Iterator[str]:
    """Names of vectors whose layer has a matrix of as many rows, at least two; the last first."""
    for name in reversed(list(observed)):
        weight = observed.get(f"{name.removesuffix('bias')}weight")
        bias = observed[name]
        if name.endswith("bias") and weight is not None and weight.ndim == 2 and 1 < len(bias) == len(weight):
            yield name


def _alignment(weight_gradient: Tensor) -> Tensor:
    """For each row, against which side of the common line it points: negative for the label's row alone."""
    if weight_gradient.ndim != 2 or len(weight_gradient) < 3:
        raise UsageError(
            f"A weight gradient of shape {tuple(weight_gradient.shape)} does not determine the label.",
            cure="Give a matrix of at least three classes, the gradient of the bias, or the labels (--labels).",
        )
    # For the label, |p - 1| equals the sum of p over all other classes, so its row is the longest.
    longest = weight_gradient[weight_gradient.norm(dim=1).argmax()]
    return -(weight_gradient @ longest)


# Rows and singular values below this share of the largest one consist of rounding errors.
_ABSENT = 1e-5


@torch.no_grad()
def read_text(body: nn.Module, params: Mapping[str, Tensor], gradient: Mapping[str, Tensor], length: int) -> Tensor:
    """Return the likeliest token at each place by the gradient of a body that begins with an embedding of tokens.

    Of a batch, one of the tokens that stand there. The gradient is known up to one factor.

    Source: Petrov et al., DAGER (arXiv 2405.15586), its first layer; that an embedding's rows name the tokens is older
    (Melis et al., arXiv 1805.04049).
    """
    calls = _calls(body, params, torch.ones(1, length, dtype=torch.long))
    tokens = next((f"{name}.weight" for name, given in calls.items() if given.shape == (1, length)), None)
    layer = next((name for name, given in calls.items() if given.ndim == 3 and _weight(body, name) in gradient), None)
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
    tokens_at_places: Tensor = present[outside.argmin(0)]
    return tokens_at_places


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
