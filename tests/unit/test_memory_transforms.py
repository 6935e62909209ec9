"""Function transforms (torch.func) through compressed layers, and memory formats: results are the dense layer's."""

import copy

import pytest
import torch
from models_under_test import Conv1D, differing, pair, same
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vmap

import netweight
from netweight import CompressedTensor
from netweight.errors import Unsupported

LAYERS = {
    "linear": (lambda: nn.Linear(64, 48), (5, 4, 64)),
    "linear of vectors": (lambda: nn.Linear(64, 48), (5, 64)),
    "transposed linear": (lambda: Conv1D(48, 64), (5, 4, 64)),
    "conv2d": (lambda: nn.Conv2d(8, 16, 3, padding=1), (5, 2, 8, 9, 9)),
    "conv1d": (lambda: nn.Conv1d(8, 16, 3), (5, 2, 8, 9)),
    "embedding": (lambda: nn.Embedding(300, 64), None),
}


@pytest.fixture(params=list(LAYERS))
def case(request):
    make, shape = LAYERS[request.param]
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(shape, generator=generator) if shape else torch.randint(0, 300, (5, 4), generator=generator)
    return pair(make), x


def squares(model):
    return lambda x: model(x).square().sum()


def test_mapping_over_inputs(case):
    models, x = case
    along_second = x.swapdims(0, 1)
    for mapped in (lambda m: vmap(m)(x), lambda m: vmap(vmap(m))(x[None]), lambda m: vmap(m, in_dims=1)(along_second)):
        for context in (torch.enable_grad(), torch.no_grad()):
            with context:
                assert same(*(mapped(model) for model in models))
    for model in models:
        model.zero_grad()
        vmap(model)(x).square().sum().backward()
    assert not differing(*models, lambda p: p.grad)
    assert isinstance(models[1].weight, CompressedTensor)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own, for jvp
def test_differentiating_by_inputs(case):
    models, x = case
    if not x.is_floating_point():
        pytest.skip("an embedding's inputs are integers")
    for of in (
        lambda m: grad(squares(m))(x[0]),
        lambda m: vmap(grad(squares(m)))(x),
        lambda m: jacrev(lambda v: m(v).sum(-1))(x[0]),
        lambda m: jvp(m, (x[0],), (x[1],))[1],
    ):
        assert same(*(of(model) for model in models))
    results = []
    for model in models:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x[0], x[1])
            results.append(torch.autograd.forward_ad.unpack_dual(model(dual)).tangent)
    assert same(*results)


def test_differentiating_by_weights(case):
    models, x = case
    results = []
    for model in models:
        weights = {name: p.detach() for name, p in model.named_parameters()}

        def loss(weights, x, model=model):
            return functional_call(model, weights, (x,)).square().sum()

        results.append([*grad(loss)(weights, x[0]).values(), *vmap(grad(loss), in_dims=(None, 0))(weights, x).values()])
    assert all(same(one, other) for one, other in zip(*results, strict=True))


# ---- memory formats --------------------------------------------------------------------------------------------------


def picture():
    return nn.Sequential(
        nn.Conv2d(32, 64, 3), nn.GroupNorm(8, 64), nn.SiLU(), nn.Conv2d(64, 16, 1), nn.Conv2d(16, 8, 3)
    )


def run(model, x):
    """Output, gradients of input and parameters."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = model(x)
    y.square().mean().backward()
    return [y, x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_weights", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("of_inputs", [torch.contiguous_format, torch.channels_last])
def test_memory_formats_are_kept(dtype, of_weights, of_inputs):
    torch.manual_seed(0)
    dense = picture().to(dtype).to(memory_format=of_weights)
    x = torch.randn(2, 32, 14, 14).to(dtype).to(memory_format=of_inputs)
    before, after = copy.deepcopy(dense), copy.deepcopy(dense).to(memory_format=torch.contiguous_format)
    netweight.compress_(before)
    netweight.compress_(after)
    after.to(memory_format=of_weights)
    for model in (before, after, copy.deepcopy(before)):
        for one, other in zip(run(dense, x), run(model, x), strict=True):
            assert same(one, other)
            assert one.stride() == other.stride()
        assert [p.stride() for p in model.parameters()] == [p.stride() for p in dense.parameters()]
        with torch.no_grad():
            model[0].weight[1].mul_(2), dense[0].weight[1].mul_(2)
            assert same(model(x), dense(x))
            model[0].weight[1].mul_(0.5), dense[0].weight[1].mul_(0.5)
    netweight.decompress_(before)
    assert [p.stride() for p in before.parameters()] == [p.stride() for p in dense.parameters()]
    assert not differing(dense, before)


def test_other_layouts_of_linear_weights_are_kept():
    torch.manual_seed(0)
    dense = nn.Linear(96, 64)
    dense.weight = nn.Parameter(torch.randn(96, 64).t())
    model = copy.deepcopy(dense)
    netweight.compress_(model)
    assert model.weight.stride() == (1, 64)
    for x in (torch.randn(5, 96), torch.randn(1, 96)):
        assert all(same(one, other) for one, other in zip(run(dense, x), run(model, x), strict=True))


def test_second_derivatives_of_inputs_are_the_dense_models_and_those_of_weights_are_refused():
    dense, model = pair(lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 48)))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(5))

    def penalty(m, point):
        (slope,) = torch.autograd.grad(m(point).sum(), point, create_graph=True)
        return slope.square().sum()

    points = [x.clone().requires_grad_() for _ in range(2)]
    ours, theirs = (torch.autograd.grad(penalty(m, p), p)[0] for m, p in zip((model, dense), points, strict=True))
    assert same(ours, theirs)
    with pytest.raises(Unsupported, match=r"Second derivatives.*decompress_"):
        penalty(model, points[0]).backward()
    model.requires_grad_(False)
    dense.requires_grad_(False)
    for m, point in zip((model, dense), points, strict=True):
        penalty(m, point).backward()
    assert same(points[0].grad, points[1].grad)


def test_nested_gradients_of_weights_are_the_dense_models():
    dense, model = pair(lambda: nn.Linear(64, 48))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(6))

    def of(m):
        def slope(weights):
            return grad(lambda x: functional_call(m, weights, (x,)).square().sum())(x).square().sum()

        return grad(slope)(dict(m.named_parameters()))

    ours, theirs = of(model), of(dense)
    assert all(same(ours[name], theirs[name]) for name in theirs)
