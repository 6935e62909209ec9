"""The sum of clipped gradients of single examples, which differentially private SGD adds noise to.

A layer's input a and the gradient g of its output hold every example's gradient of its weights. For a linear layer
that is g aᵀ, whose norm and weighted sum need no such matrix; for a convolution it is a product over the positions. So
one backward pass gives what `by_vmap` computes example by example, for models of these two kinds of layers.
"""

from __future__ import annotations

import copy
import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import grad_and_value, vmap

from netweight.core.lazy import library
from netweight.errors import MissingExtra, Unsupported
from netweight.methods.federate.local_model import LayerState, LocalModel
from netweight.methods.federate.settings import Trains

# Inputs, shape `(n, …)`, and targets, shape `(n, …)`, of one client's step; n may be 0.
Batch = tuple[Tensor, Tensor]
_LOG = logging.getLogger(__name__)
# Largest number of single examples' gradient values to hold: a quarter of a gigabyte.
_VALUES_AT_ONCE = 2**26


@final
@dataclass(frozen=True)
class PrivateStep:
    """A client's step, whose examples' gradients are clipped over all that is trained together."""

    model: LocalModel
    """Network in its two halves."""
    body: Tensor
    """Parameters of the body, shape `(P,)`."""
    head: Tensor
    """Parameters of the head, shape `(Q,)`."""
    batch: Batch
    """Examples of the step."""
    mask: Tensor
    """Mask of the examples that count, shape `(n,)`; the others pad the batch."""
    trains: Trains
    """Halves that are trained."""
    clip: float
    """Largest norm of an example's gradient."""
    state: LayerState | None = None
    """Buffers of the client's layers."""

    def halves(self, body: Any, head: Any) -> tuple[Any, Any]:
        """Return what is said of each half, None for one that is not trained."""
        return (None if self.trains == "head" else body), (None if self.trains == "body" else head)

    def factors(self, squared: Tensor) -> tuple[Tensor, Tensor]:
        """Return norms, given their squares, and what each example's gradient is multiplied by: 0 for padding."""
        norms = squared.sqrt()
        return norms, torch.where(self.mask, self.clip / norms.clamp(min=self.clip), 0)


@final
@dataclass(frozen=True)
class ClippedGradients:
    """Clipped gradients of a batch, summed."""

    body: Tensor | None
    """Shape `(P,)`, or None if not asked for."""
    head: Tensor | None
    """Shape `(Q,)`, or None if not asked for."""
    loss: Tensor
    """Mean loss of the examples, a scalar; 0 if there is none."""
    norms: Tensor
    """Norm of each example's gradient before clipping, shape `(n,)`; of no meaning where masked."""


def clipped_sum(step: PrivateStep) -> ClippedGradients:
    """Clip each example's gradient and add them up.

    Source: Abadi et al. (arXiv 1607.00133), algorithm 1.
    """
    refuse_mixing_layers(step.model)
    at_once = max(
        1, _VALUES_AT_ONCE // sum(half.numel() for half in step.halves(step.body, step.head) if half is not None)
    )
    split = zip(*(torch.split(one, at_once) for one in (*step.batch, step.mask)), strict=True)
    parts = [_sum_of_part(replace(step, batch=(x, y), mask=mask)) for x, y, mask in split]
    return parts[0] if len(parts) == 1 else _joined(parts, [int(m.sum()) for m in torch.split(step.mask, at_once)])


def _joined(parts: Sequence[ClippedGradients], counts: Sequence[int]) -> ClippedGradients:
    """Add up the parts of a batch, in which so many examples count."""
    bodies = [part.body for part in parts if part.body is not None]
    heads = [part.head for part in parts if part.head is not None]
    losses = torch.stack([part.loss * count for part, count in zip(parts, counts, strict=True)])
    return ClippedGradients(
        torch.stack(bodies).sum(0) if bodies else None,
        torch.stack(heads).sum(0) if heads else None,
        losses.sum() / max(sum(counts), 1),
        torch.cat([part.norms for part in parts]),
    )


def refuse_mixing_layers(model: LocalModel) -> None:
    """Refuse layers in training mode that normalize over the batch or keep statistics of it."""
    for half, module in (("body", model.body), ("head", model.head)):
        for name, layer in module.named_modules():
            normalizes = isinstance(layer, nn.modules.batchnorm._BatchNorm)
            keeps = isinstance(layer, nn.modules.batchnorm._NormBase) and layer.track_running_stats
            if layer.training and (normalizes or keeps):
                raise Unsupported(
                    f"The {half}'s layer {name or type(layer).__name__!r} ({type(layer).__name__}) mixes the examples "
                    "of a batch, so that no example has a gradient of its own to clip.",
                    cure="Use a network with GroupNorm or LayerNorm, or a method without differential privacy, such as "
                    "fedavg (--method fedavg).",
                )
        rounded = {value.dtype for value in module.parameters() if value.requires_grad} & {
            torch.float16,
            torch.bfloat16,
        }
        if module.training and rounded:
            raise Unsupported(
                f"The {half}'s weights are {str(rounded.pop()).removeprefix('torch.')}: norms of gradients would be "
                "rounded so much that gradients are longer than the clipping norm, and no ε holds.",
                cure="Return the network in float32 (module.float()), or use a method without differential privacy, "
                "such as fedavg (--method fedavg).",
            )
        from_data = [name for name in model.habits.from_data if name.startswith(f"{half}.")]
        if module.training and from_data:
            raise Unsupported(
                f"The buffer {from_data[0]!r} is computed from the examples of a batch without noise: no ε holds.",
                cure="Leave the layer out of the network, or use a method without differential privacy, such as fedavg "
                "(--method fedavg).",
            )
    if (model.body.training, model.head.training) in model.habits.mixes:
        raise Unsupported(
            "The outputs of the network for an example depend on the other examples of its batch, so that no example "
            "has a gradient of its own to clip.",
            cure="Compute means and attention within each example (in torch's attention, batch_first=True), or use a "
            "method without differential privacy, such as fedavg (--method fedavg).",
        )


# For layers that vmap runs example by example, such as attention, torch would warn in every step.
torch._C._functorch._set_vmap_fallback_warning_enabled(False)  # type: ignore[attr-defined]
# Held while filters of warnings, which belong to the process, are changed.
_WARNINGS = threading.Lock()
# Ways to get gradients of single examples of a model, as far as they are not known to fail.
_WAYS: weakref.WeakKeyDictionary[LocalModel, list[Callable[[PrivateStep], ClippedGradients]]] = (
    weakref.WeakKeyDictionary()
)
# Models for which opacus was compared with one example after another.
_CHECKED: weakref.WeakSet[LocalModel] = weakref.WeakSet()
# Whether the fast way is right for what a model trains, as far as it was tried.
_FITS: weakref.WeakKeyDictionary[LocalModel, dict[Trains, bool]] = weakref.WeakKeyDictionary()


def _sum_of_part(step: PrivateStep) -> ClippedGradients:
    if not bool(step.mask.any()):
        body, head = step.halves(torch.zeros_like(step.body), torch.zeros_like(step.head))
        return ClippedGradients(body, head, step.body.new_zeros(()), step.body.new_zeros(len(step.mask)))
    if not _layers_fit(step.model, step.trains):
        return by_any_means(step)
    clipped = by_layers(step)
    assert clipped is not None
    return clipped


def _layers_fit(model: LocalModel, trains: Trains) -> bool:
    """Return True if `by_layers` is right for a model. It is tried on one worker, so that all workers agree."""
    verdicts = _FITS.setdefault(model, {})
    if model.habits.random:
        return False
    if trains not in verdicts:
        task = model.task
        x, y = (part[:8].to(model.device) for part in task.client(task.clients[0]).train)
        body, head = task.initial_body().to(model.device), task.initial_head().to(model.device)
        mask = torch.ones(len(x), dtype=torch.bool, device=model.device)
        step = PrivateStep(model, body, head, (model.place(x), y), mask, trains, 1e30, model.layer_state({}, 0))
        clipped = by_layers(step)
        verdicts[trains] = clipped is not None and _agree(clipped, by_any_means(step), mask, step.clip)
        if not verdicts[trains]:
            _LOG.info("Gradients of single examples are not read from layers for this model, which is slower.")
    return verdicts[trains]


def _agree(fast: ClippedGradients, plain: ClippedGradients, mask: Tensor, clip: float) -> bool:
    """Return True if two ways give the same result."""
    norms, others = fast.norms[mask], plain.norms[mask]
    alike = (norms - others).abs() <= 1e-3 * others
    apart = [a - b for a, b in ((fast.body, plain.body), (fast.head, plain.head)) if a is not None and b is not None]
    return bool(alike.float().mean() >= 0.75) and bool(torch.cat(apart).norm() <= 0.05 * others.clamp(max=clip).sum())


def by_any_means(step: PrivateStep) -> ClippedGradients:
    """Do what `clipped_sum` does by the first way that can: vmap, opacus's own layers, one example after another."""
    ways = _WAYS.setdefault(step.model, [by_vmap, by_opacus, by_examples])
    state = step.state or LayerState()
    while True:
        own = state.snapshot()
        try:
            if ways[0] is by_opacus and step.model not in _CHECKED:
                _refuse_wrong_rows(step)
                _CHECKED.add(step.model)
            clipped = ways[0](replace(step, state=own))
            break
        except (RuntimeError, NotImplementedError, ValueError, TypeError, MissingExtra) as error:
            if len(ways) == 1:
                raise
            _LOG.info("%s cannot compute gradients of single examples of this model: %s", ways[0].__name__, error)
            ways.pop(0)
    state.random = own.random
    # These are, for example, the vectors of spectral normalization, which change with every step.
    if state.buffers:
        counted = step.mask.nonzero()[:1, 0]
        with torch.no_grad():
            step.model.loss(step.body, step.head, step.batch[0][counted], step.batch[1][counted], state)
    return clipped


def _refuse_wrong_rows(step: PrivateStep) -> None:
    """Raise unless opacus has one gradient for each example, whatever their number.

    It takes the first dimension of every layer's input for the examples. Where that is time, and as long as the batch,
    it returns gradients of points in time.
    """
    for count in (2, 3):
        rows = torch.arange(count, device=step.mask.device) % len(step.mask)
        few = replace(step, batch=(step.batch[0][rows], step.batch[1][rows]), mask=torch.ones_like(rows).bool())
        one, other = (
            way(replace(few, state=(step.state or LayerState()).snapshot())) for way in (by_opacus, by_examples)
        )
        # Where random numbers are drawn, the two ways draw others; then the shapes have to fit.
        if not step.model.habits.random and not _agree(one, other, few.mask, step.clip):
            raise ValueError("opacus computes other gradients")


def by_vmap(step: PrivateStep) -> ClippedGradients:
    """Do what `clipped_sum` does with every example's gradient as a row of a matrix, by `torch.func.vmap`."""
    shown = (step.state or LayerState()).copied()

    def loss(body: Tensor, head: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return step.model.loss(body, head, x[None], y[None], shown)

    which = {"body": (0,), "head": (1,), "both": (0, 1)}[step.trains]
    rule = vmap(grad_and_value(loss, argnums=which), in_dims=(None, None, 0, 0), randomness="different")
    with step.model.drawing(step.state or LayerState()):
        rows, losses = rule(step.body.detach(), step.head.detach(), *step.batch)
    return _clipped_rows(step, rows, losses)


def _clipped_rows(step: PrivateStep, rows: Sequence[Tensor], losses: Tensor) -> ClippedGradients:
    """Return the clipped sum of gradients, one matrix `(n, P)` for each half that is trained."""
    norms, factors = step.factors(torch.stack([part.square().sum(1) for part in rows]).sum(0))
    sums = [factors @ part for part in rows]
    return ClippedGradients(*step.halves(sums[0], sums[-1]), losses[step.mask].mean(), norms)


def by_opacus(step: PrivateStep) -> ClippedGradients:
    """Do what `clipped_sum` does by opacus's own per-sample gradients: for recurrent layers and attention.

    Raises:
        MissingExtra: Opacus is not installed.
        NotImplementedError: It has no rule for some layer.
    """
    library("opacus", "Gradients of single examples of these layers", "dp")
    from opacus import GradSampleModule
    from opacus.layers import DPGRU, DPLSTM, DPRNN

    own = {nn.GRU: DPGRU, nn.LSTM: DPLSTM, nn.RNN: DPRNN}
    model, task = step.model, step.model.task
    halves = nn.Sequential(copy.deepcopy(model.body), copy.deepcopy(model.head))
    for path, layer in list(halves.named_modules()):
        if type(layer) in own:
            parent, _, name = path.rpartition(".")
            setattr(halves.get_submodule(parent), name, _like(layer, own[type(layer)]))
    given = {f"0.{n}": v for n, v in task.body_layout.split(step.body).items()}
    given |= {f"1.{n}": v for n, v in task.head_layout.split(step.head).items()}
    parameters = dict(halves.named_parameters())
    with torch.no_grad():
        for name, value in given.items():
            parameters[name].copy_(value)
    trained = [n for n in given if n.startswith({"body": "0.", "head": "1.", "both": ""}[step.trains])]
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in trained)
    sampled = GradSampleModule(halves, batch_first=True, loss_reduction="sum")
    inputs, targets = step.batch
    with _WARNINGS, warnings.catch_warnings(), torch.enable_grad(), model.drawing(step.state or LayerState()):
        # Opacus's hooks say of first layers and of first hidden states that nothing flows back further.
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        outputs = sampled(inputs)
        losses = torch.stack([task.loss(outputs[i : i + 1], targets[i : i + 1]) for i in range(len(inputs))])
        losses.sum().backward()  # type: ignore[no-untyped-call]
    rows = {name: parameters[name].grad_sample.flatten(1) for name in trained}  # type: ignore[attr-defined]
    prefixes = [prefix for prefix in step.halves("0.", "1.") if prefix is not None]
    parts = [torch.cat([rows[name] for name in trained if name.startswith(prefix)], dim=1) for prefix in prefixes]
    sampled.remove_hooks()
    return _clipped_rows(step, parts, losses.detach())


def _like(layer: nn.RNNBase, kind: type[nn.Module]) -> nn.Module:
    """Return opacus's form of a recurrent layer, with the same weights."""
    about = {
        name: getattr(layer, name)
        for name in ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional")
    }
    if layer.mode == "RNN_RELU":
        about["nonlinearity"] = "relu"
    if getattr(layer, "proj_size", 0):
        raise NotImplementedError("opacus has no LSTM with projections")
    weight = layer.weight_ih_l0
    assert isinstance(weight, Tensor)
    made = kind(**about).to(weight)
    made.load_state_dict(layer.state_dict())
    return made.train(layer.training)


def by_examples(step: PrivateStep) -> ClippedGradients:
    """Do what `clipped_sum` does with one backward pass for each example: slow, and right for any model."""
    own, losses = [], []
    for x, y, counts in zip(*step.batch, step.mask, strict=True):
        body, head = step.body.detach().requires_grad_(), step.head.detach().requires_grad_()
        trained = [half for half in step.halves(body, head) if half is not None]
        if not counts:
            own.append([torch.zeros_like(half) for half in trained])
            losses.append(step.body.new_zeros(()))
            continue
        with torch.enable_grad():
            loss = step.model.loss(body, head, x[None], y[None], step.state)
        own.append(list(torch.autograd.grad(loss, trained)))
        losses.append(loss.detach())
    return _clipped_rows(step, [torch.stack(rows) for rows in zip(*own, strict=True)], torch.stack(losses))


def by_layers(step: PrivateStep) -> ClippedGradients | None:
    """Do what `clipped_sum` does from one backward pass; None if some trained parameter is not of a known layer."""
    model, task = step.model, step.model.task
    halves = [
        half
        for half in step.halves(("body.", model.body, task.body_layout), ("head.", model.head, task.head_layout))
        if half is not None
    ]
    layers: dict[str, nn.Module] = {}
    for prefix, module, layout in halves:
        owners = {name.rpartition(".")[0]: module.get_submodule(name.rpartition(".")[0]) for name in layout.names}
        if not all(is_known(layer) for layer in owners.values()):
            return None
        layers |= {prefix + name: layer for name, layer in owners.items()}
    backward = _backward(step, layers)
    if backward is None:
        return None
    gradients, loss = backward
    if any(prefix + name not in gradients for prefix, _, layout in halves for name in layout.names):
        # A hook computes the layer's weight from others, as the old spectral normalization does.
        return None
    parts = [[gradients[prefix + name] for name in layout.names] for prefix, _, layout in halves]
    norms, factors = step.factors(torch.stack([one.squared_norms() for half in parts for one in half]).sum(0))
    sums = [torch.cat([one.weighted_sum(factors) for one in half]) for half in parts]
    return ClippedGradients(*step.halves(sums[0], sums[-1]), loss, norms)


def _backward(step: PrivateStep, layers: Mapping[str, nn.Module]) -> tuple[dict[str, PerSample], Tensor] | None:
    """Return gradients by full parameter name and the mean loss; None if a layer was not called exactly once."""
    model, mask, (inputs, targets) = step.model, step.mask, step.batch
    with torch.enable_grad(), _captured(layers) as calls:
        features = model.features(step.body.detach(), inputs, step.state)
        outputs = model.classify(step.head.detach(), features, step.state)
        loss = model.task.loss(outputs[mask], targets[mask])
    if any(len(made) != 1 or made[0].inputs.shape[0] != len(inputs) for made in calls.values()):
        return None
    once = {name: made[0] for name, made in calls.items()}
    # The loss is a mean over the examples that count; an example's own gradient is not divided by their number.
    seed = mask.sum().to(loss)
    slopes = torch.autograd.grad(loss, [call.output for call in once.values()], seed, allow_unused=True)
    gradients: dict[str, PerSample] = {}
    for (name, call), gradient in zip(once.items(), slopes, strict=True):
        along = loss.new_zeros(call.shape) if gradient is None else gradient
        for own, value in layer_gradients(layers[name], call.inputs, along).items():
            gradients[f"{name.removesuffix('.')}.{own}"] = value
    return gradients, loss.detach()


@dataclass(frozen=True)
class _Call:
    """One call of a layer while it was watched."""

    inputs: Tensor
    """Shape `(n, …)`."""
    output: GradientEdge
    """Edge of the layer's output in the graph of gradients."""
    shape: torch.Size
    """Shape of the output."""


@contextmanager
def _captured(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, list[_Call]]]:
    """Note every call of the layers while the block runs, by the layers' names."""
    calls: dict[str, list[_Call]] = {name: [] for name in layers}

    def noting(made: list[_Call]) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        def note(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            # Weights need no gradients: an output that does not depend on any becomes the start of a graph of its own.
            begun = output if output.requires_grad else output.detach().requires_grad_()
            made.append(_Call(inputs[0].detach(), get_gradient_edge(begun), output.shape))
            # A leaf that needs gradients cannot be changed in place, as the next layer may do, but a copy of it can.
            return begun if begun is output else begun.clone()

        return note

    handles = [layer.register_forward_hook(noting(calls[name])) for name, layer in layers.items()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


class PerSample(Protocol):
    """One parameter's gradients for n examples."""

    def squared_norms(self) -> Tensor:
        """Return each example's squared norm, shape `(n,)`."""
        ...

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return the sum of the examples' gradients times `weights`, shape `(n,)`, as a flat vector."""
        ...


@dataclass(frozen=True)
class _Products:
    """Gradients g aᵀ of a linear layer that saw one vector per example: never formed."""

    gradients: Tensor
    inputs: Tensor

    def squared_norms(self) -> Tensor:
        return self.gradients.square().sum(1) * self.inputs.square().sum(1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return ((self.gradients * weights[:, None]).T @ self.inputs).flatten()


@dataclass(frozen=True)
class _GradientRows:
    """Gradients as they are, one row per example."""

    rows: Tensor

    def squared_norms(self) -> Tensor:
        return self.rows.square().sum(1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return weights @ self.rows


@dataclass(frozen=True)
class _Kernels:
    """Gradients of a convolution's kernels with channels last, shape `(n, out, height, width, in)`."""

    kernels: Tensor

    def squared_norms(self) -> Tensor:
        return self.kernels.flatten(1).square().sum(1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = (weights @ self.kernels.flatten(1)).view(self.kernels.shape[1:])
        return total.permute(0, 3, 1, 2).flatten()


def is_known(layer: nn.Module) -> bool:
    """Return True if `layer_gradients` covers a layer: exactly Linear, or Conv2d in one group padded with zeros."""
    if type(layer) is nn.Conv2d:
        return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return type(layer) is nn.Linear


def layer_gradients(layer: nn.Module, inputs: Tensor, gradients: Tensor) -> dict[str, PerSample]:
    """Return the gradients of a known layer's weight and bias."""
    if isinstance(layer, nn.Conv2d):
        return _convolution(layer, inputs, gradients)
    if inputs.ndim == 2:
        return {"weight": _Products(gradients, inputs), "bias": _GradientRows(gradients)}
    along, features = gradients.flatten(1, -2), inputs.flatten(1, -2)
    return {"weight": _GradientRows((along.transpose(1, 2) @ features).flatten(1)), "bias": _GradientRows(along.sum(1))}


def _convolution(layer: nn.Conv2d, inputs: Tensor, gradients: Tensor) -> dict[str, PerSample]:
    along = gradients.permute(0, 2, 3, 1).flatten(1, 2)
    kernels = along.transpose(1, 2) @ _patches(layer, inputs, gradients.shape[2], gradients.shape[3])
    kernels = kernels.view(*kernels.shape[:2], *layer.kernel_size, inputs.shape[1])
    return {"weight": _Kernels(kernels), "bias": _GradientRows(along.sum(1))}


def _patches(layer: nn.Conv2d, inputs: Tensor, height: int, width: int) -> Tensor:
    """Return what each output position of a convolution sees, shape `(n, height · width, kernel · channels)`."""
    assert not isinstance(layer.padding, str)
    down, across = layer.padding
    padded = F.pad(inputs, (across, across, down, down)) if down or across else inputs
    last = padded.permute(0, 2, 3, 1).contiguous()
    of_example, of_row, of_column, of_channel = last.stride()
    (step_y, step_x), (gap_y, gap_x) = layer.stride, layer.dilation
    shape = (len(last), height, width, *layer.kernel_size, last.shape[3])
    strides = (of_example, of_row * step_y, of_column * step_x, of_row * gap_y, of_column * gap_x, of_channel)
    return last.as_strided(shape, strides).reshape(len(last), height * width, -1)
