"""Which labels a batch held, read off the gradient of the last layer's bias. Attacks call it before they search.

With cross-entropy the bias gradient is the mean over the batch of `probabilities - one-hot label`: for one image its
only negative entry is the label (iDLG), and for a batch it tells how often each class occurred.
"""

from __future__ import annotations

import torch
from torch import Tensor

from netweight.attacks.gradient_inversion.client import LocalUpdate, Tensors
from netweight.core import seeds
from netweight.errors import NameNotFound, UsageError


def label_of_one(gradient: Tensor) -> int:
    """Return the label of a single image, exactly (iDLG)."""
    # Source: Zhao et al. 2020, "iDLG", section 3.2.
    # Row c of the weight's gradient is (p_c - y_c) features: the label's row points against all others.
    towards = gradient if gradient.ndim == 1 else _alignment(gradient)
    labels = (towards < 0).nonzero().flatten().tolist()
    if len(labels) != 1:
        raise UsageError(
            f"{len(labels)} classes have the sign of a label; the gradient of one image has exactly one.",
            cure="Use label_counts for a batch; negate a difference of parameters, which points against the gradient.",
        )
    return int(labels[0])


def label_counts(bias_gradient: Tensor, n: int, *, probabilities: Tensor | None = None) -> Tensor:
    """Estimate how often each class occurs in a batch."""
    # The count of class c is `n (mean probability of c - gradient of c)`. The mean probabilities are not known to the
    # server: give what its model says on similar images. Where they are right, the counts are exact.
    # Source: the exact identity behind the label estimates of Yin et al. 2021, "See through Gradients", section 3.1.
    classes = len(bias_gradient)
    expected = torch.full_like(bias_gradient, 1 / classes) if probabilities is None else probabilities
    if bias_gradient.ndim != 1 or expected.shape != bias_gradient.shape or n < 1:
        raise UsageError(f"Labels of {n} images cannot be counted from a gradient of {tuple(bias_gradient.shape)}.")
    estimate = (n * (expected - bias_gradient)).double()
    sure = (bias_gradient < 0).long()
    counts = sure if int(sure.sum()) <= n else torch.zeros_like(sure)
    for _ in range(n - int(counts.sum())):  # each image goes to the class that lacks most
        counts[int((estimate - counts).argmax())] += 1
    return counts


def labels_of_update(
    local_update: LocalUpdate, params: Tensors, observed: Tensors, *, shape: tuple[int, ...], seed: int
) -> Tensor:
    """Estimate a batch's labels from an update, whether it is a gradient or a difference of parameters."""
    # The update is imitated for random images, once as class 0 and once as class 1: that shows its sign and scale, and
    # what the model says of images that it does not know. For one image and one step the label is exact.
    name = _last_bias(observed)
    like = params[name]
    images = torch.randn(shape, generator=seeds.torch_generator(seed, "labels")).to(like)
    labels = torch.zeros(shape[0], dtype=torch.int64, device=like.device)
    first, second = (local_update(params, (images, labels + other))[name].detach() for other in (0, 1))
    # For gradients the two are p - (1, 0, ...) and p - (0, 1, ...); for small steps, the same times a scale.
    scale = second[0] - first[0]
    probabilities = first / scale
    probabilities[0] += 1
    gradient = observed[name].to(like) / scale
    if shape[0] == 1:
        return torch.tensor([label_of_one(gradient)], device=like.device)
    counts = label_counts(gradient, shape[0], probabilities=probabilities)
    return torch.arange(len(counts), device=like.device).repeat_interleave(counts)


def _last_bias(observed: Tensors) -> str:
    """Name of the last vector whose layer has a matrix of as many rows; of at least two classes."""
    for name in reversed(list(observed)):
        weight = observed.get(f"{name.removesuffix('bias')}weight")
        bias = observed[name]
        if name.endswith("bias") and weight is not None and weight.ndim == 2 and 1 < len(bias) == len(weight):
            return name
    raise NameNotFound(
        "The update holds no bias of a last linear layer, from which labels could be read.", cure="Give the labels."
    )


def _alignment(weight_gradient: Tensor) -> Tensor:
    """For each row, against which side of the common line it points: negative for the label's row alone."""
    if weight_gradient.ndim != 2 or len(weight_gradient) < 3:
        raise UsageError(
            f"A weight gradient of shape {tuple(weight_gradient.shape)} does not tell the label.",
            cure="Give a matrix of at least three classes, or the gradient of the bias.",
        )
    longest = weight_gradient[weight_gradient.norm(dim=1).argmax()]  # |p - 1| of the label is the sum of all other p
    return -(weight_gradient @ longest)
