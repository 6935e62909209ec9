"""Adapters for tests: random ones for given modules, and the modules of small models."""

import torch

from netweight.nn.lora import Adapter, LowRank

TO_Q = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
TO_OUT = "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_out.0"
PROJ_IN = "unet.mid_block.attentions.0.proj_in"
SHAPES = {TO_Q: (6, 5), TO_OUT: (4, 6), PROJ_IN: (3, 4)}


def random_adapter(seed, *, shapes=SHAPES, ranks=(2, 1, 3), scales=(0.5, 2.0, 0.7), dtype=torch.float32):
    """An adapter of random factors; ranks and scales are taken in turn."""
    stream = torch.Generator().manual_seed(seed)
    factors = {}
    for number, (name, (rows, columns)) in enumerate(shapes.items()):
        rank = ranks[number % len(ranks)]
        down = torch.randn(rank, columns, generator=stream).to(dtype)
        up = torch.randn(rows, rank, generator=stream).to(dtype)
        factors[name] = LowRank(down, up, scales[number % len(scales)])
    return Adapter(factors)


def same(one, other):
    """Whether two adapters have the same factors and scales, to the bit."""
    return one.modules == other.modules and all(
        torch.equal(one.factors[name].down, other.factors[name].down)
        and torch.equal(one.factors[name].up, other.factors[name].up)
        and one.factors[name].scale == other.factors[name].scale
        for name in one.modules
    )


def close(one, other):
    """Whether two adapters have the same changes, computed in fp64, but for one rounding to fp32 of each factor."""
    for name, change in one.factors.items():
        found = other.factors[name]
        dense = change.scale * (change.up.double() @ change.down.double())
        again = found.scale * (found.up.double() @ found.down.double())
        torch.testing.assert_close(again, dense, rtol=1e-6, atol=2e-7 * float(dense.abs().max()))
    return one.modules == other.modules


def change_size(model, names):
    """Rows and columns of the changes of a model's modules, and the kernels of its convolutions."""
    shapes, kernels = {}, {}
    for name in names:
        weight = model.get_submodule(name).weight
        shapes[name] = (weight.shape[0], weight[0].numel())
        if weight.ndim > 2:
            kernels[name] = tuple(weight.shape[2:])
    return shapes, kernels


@torch.no_grad()
def merge(model, adapter, prefix=""):
    """Add an adapter's dense changes, computed in fp64, to the weights of a model's modules."""
    for name, change in adapter.factors.items():
        if name.startswith(prefix):
            weight = model.get_submodule(name.removeprefix(prefix)).weight
            dense = change.scale * (change.up.double() @ change.down.double())
            weight += dense.reshape(weight.shape).to(weight.dtype)
