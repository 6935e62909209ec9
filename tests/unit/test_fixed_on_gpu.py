"""The fixed-length form on a GPU; skipped where there is none."""

import copy

import pytest
import torch
import torch.nn.functional as F
from fixed_under_test import same, weights
from torch import nn

import netweight
from netweight.codec.cuda import fixed_products
from netweight.codec.fixed import check_fixed, decode_fixed, encode_fixed

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not fixed_products.runs_on(torch.device("cuda", 0)),
    reason="there is no GPU that the kernels of the fixed-length form run on",
)
SHAPES = [(17, 65), (384, 1536), (1024, 4096), (100, 8200)]


@pytest.mark.parametrize("shape", SHAPES)
def test_encoding_and_decoding_are_those_of_the_cpu(shape):
    weight = weights(*shape)
    payload = encode_fixed(weight.cuda())
    assert torch.equal(payload.cpu(), encode_fixed(weight))
    check_fixed(payload)
    assert same(fixed_products.decode(payload, *shape).cpu(), weight)
    assert same(decode_fixed(payload).cpu(), weight)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", [1, 5, 8, 16, 17, 32, 64, 65, 257])
def test_products(shape, batch):
    rows, columns = shape
    weight = weights(rows, columns, odd=0).cuda()
    weight.view(-1)[::1000] = 70.0
    x, bias = torch.randn(batch, columns, device="cuda").bfloat16(), torch.randn(rows, device="cuda").bfloat16()
    payload = encode_fixed(weight)
    y = fixed_products.linear(x, payload, rows, columns, bias)
    assert same(y, fixed_products.linear(x, payload, rows, columns, bias))
    if batch > fixed_products.MOST_FUSED:  # decoded, and torch's product, whose sums may be rounded to bf16 in between
        assert same(y, F.linear(x, weight, bias))
        return
    exact = F.linear(x.double(), weight.double(), bias.double())
    size = F.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
    # Tensor cores cut off bits below the largest product that they add up at a time: 4 times fp32's rounding.
    assert ((y.double() - exact).abs() <= exact.abs() * 2**-8 + size * columns * 2**-22).all()


def test_models_multiply_and_train():
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).bfloat16().cuda()
    model = copy.deepcopy(dense)
    assert netweight.compress_(model, prefer="speed").fixed == ("0.weight", "2.weight")
    x = torch.randn(4, 256, device="cuda").bfloat16()
    with torch.no_grad():
        assert torch.allclose(model(x).float(), dense(x).float(), rtol=2**-6, atol=1e-2)
    optimizer = netweight.LayerwiseOptimizer(model, torch.optim.SGD, lr=0.01)
    model(x).square().mean().backward()
    optimizer.step()
    assert model[0].weight.stored.fixed
    captured = torch.cuda.CUDAGraph()
    with torch.no_grad():
        model(x)
        with torch.cuda.graph(captured):
            y = model(x)
        captured.replay()
        assert same(y.cpu(), model(x).cpu())
