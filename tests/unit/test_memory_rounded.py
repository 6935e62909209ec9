"""Models whose weights are kept rounded: they compute what the rounded model computes, and refuse to be written."""

import copy
import io
import pickle

import pytest
import torch
from models_under_test import Picture, Tied
from torch import nn

import netweight
from netweight import codec
from netweight.errors import LossyWrite, Unsupported, UsageError

IDS = torch.randint(0, 300, (3, 7), generator=torch.Generator().manual_seed(3))


def pair(make, dtype=torch.bfloat16, **options):
    """A model with rounded weights, and a dense one with the same rounded values."""
    torch.manual_seed(0)
    model = make().to(dtype)
    report = netweight.compress_(model, **{"mantissa_bits": 2, "block_size": 64, **options})
    dense = copy.deepcopy(model)
    netweight.decompress_(dense)
    return dense, model, report


def layers():
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.LayerNorm(96), nn.Linear(96, 64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("make", "x"), [(Tied, IDS), (Picture, torch.randn(2, 3, 16, 16))])
def test_it_computes_what_the_rounded_model_computes(make, x, dtype):
    dense, model, report = pair(make, dtype)
    x = x.to(dtype) if x.is_floating_point() else x
    assert torch.equal(dense(x), model(x))
    for one in (dense, model):
        one(x).square().mean().backward()
    gradients = [{name: p.grad for name, p in one.named_parameters() if p.grad is not None} for one in (dense, model)]
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
    assert set(report.changes) == set(report.compressed)
    assert (
        0
        < report.worst_change
        <= report.bound
        == codec.relative_bound(2, dtype={torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[dtype])
    )


def test_weights_decoded_ahead_are_the_same():
    torch.manual_seed(4)
    dense, model, _ = pair(lambda: nn.Sequential(*(nn.Linear(128, 128) for _ in range(6))))
    x = torch.randn(3, 128).bfloat16()
    with torch.no_grad(), netweight.decode_ahead() as ahead:
        for _ in range(3):
            assert torch.equal(dense(x), model(x))
    assert ahead.hits > 6


def test_the_report_and_the_bytes_are_true():
    torch.manual_seed(0)
    original = layers().bfloat16()
    model = copy.deepcopy(original)
    report = netweight.compress_(model, mantissa_bits=1, block_size=32)
    assert netweight.memory_footprint(model) == report.after + sum(
        p.nbytes for n, p in original.named_parameters() if n not in report.compressed
    )
    lossless = netweight.compress_(copy.deepcopy(original))
    assert report.after < 0.6 * lossless.after
    assert (lossless.bound, lossless.worst_change, lossless.changes) == (0, 0, {})
    for name, change in report.changes.items():
        before, after = original.get_parameter(name).detach().double(), model.get_parameter(name).dense().double()
        assert float(((after - before).abs() / before.abs()).nan_to_num(0).max()) == change
    assert dict(model.named_parameters())["0.bias"].equal(original[0].bias)


def test_copies_and_state_dicts_keep_the_values():
    dense, model, _ = pair(layers)
    x = torch.randn(3, 64).bfloat16()
    expected = dense(x)
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(model).to(torch.bfloat16)]
    for bits in (0, 7):  # what loads the state may be rounded otherwise, or not at all
        torch.manual_seed(1)
        other = layers().bfloat16()
        netweight.compress_(other, mantissa_bits=bits)
        other.load_state_dict(state)
        others.append(other)
    for other in others:
        assert torch.equal(other(x), expected)
        assert other[0].weight.stored.lossy
    plain = layers().bfloat16()
    plain.load_state_dict(state)
    assert torch.equal(plain(x), expected)
    wider = copy.deepcopy(model).float()  # every bf16 number is an fp32 number
    assert torch.equal(wider[0].weight.dense(), dense[0].weight.float())


def test_checkpoints_keep_the_bytes(tmp_path):
    dense, model, _ = pair(layers)
    netweight.save_checkpoint(tmp_path / "c.safetensors", model)
    other = pair(layers, mantissa_bits=5)[1]
    netweight.load_checkpoint(tmp_path / "c.safetensors", other)
    assert torch.equal(other[0].weight.dense(), dense[0].weight)
    assert other[0].weight.stored.blob == model[0].weight.stored.blob


WRITES = {
    "copy_": lambda model: model[0].weight.data.copy_(torch.ones(96, 64)),
    "add_": lambda model: model[0].weight.data.add_(1),
    "a view": lambda model: model[0].weight.data[3].zero_(),
    "data": lambda model: setattr(model[0].weight, "data", torch.ones(96, 64).bfloat16()),
    "init": lambda model: nn.init.normal_(model[0].weight),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_are_refused_with_the_cure(write):
    dense, model, _ = pair(layers)
    with pytest.raises(LossyWrite, match=r"0\.weight of shape \(96, 64\) is stored rounded") as caught:
        write(model)
    assert "decompress_" in caught.value.cure
    assert torch.equal(model[0].weight.dense(), dense[0].weight)


def test_optimizers_are_refused():
    dense, model, _ = pair(layers)
    with pytest.raises(LossyWrite, match=r"0\.weight and 1 more cannot be trained"):
        netweight.LayerwiseOptimizer(model, torch.optim.SGD, lr=0.1)
    model(torch.randn(3, 64).bfloat16()).sum().backward()
    biases = [layer.bias.clone() for layer in model if hasattr(layer, "bias")]
    with pytest.raises(LossyWrite, match=r"3\.weight and 1 more cannot be trained.*Nothing was updated") as caught:
        torch.optim.AdamW(reversed([*model.parameters()]), lr=0.1).step()
    assert "requires_grad_(False)" in caught.value.cure
    assert all(map(torch.equal, biases, [layer.bias for layer in model if hasattr(layer, "bias")]))
    assert torch.equal(model[0].weight.dense(), dense[0].weight)
    with pytest.raises(RuntimeError, match="is stored rounded"):  # torch's own wrapping
        model.load_state_dict(dense.state_dict())


def test_adapters_train_on_a_rounded_base():
    dense, model, _ = pair(layers)
    losses = []
    for base in (dense, model):
        base.requires_grad_(False)
        torch.manual_seed(2)
        adapter = nn.Sequential(nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)).bfloat16()
        optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2)
        x = torch.randn(8, 64).bfloat16()
        for _ in range(3):
            loss = (base(x + adapter(x)) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    assert torch.equal(torch.stack(losses[:3]), torch.stack(losses[3:]))
    assert losses[0] > losses[2]
    trained = nn.Sequential(model, nn.Linear(64, 2).bfloat16())
    optimizer = netweight.LayerwiseOptimizer(trained, torch.optim.SGD, lr=0.1)  # steps what trains
    trained(x).sum().backward()
    optimizer.close()


def test_what_cannot_be_rounded_is_refused_before_anything_changes():
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64).double())
    with pytest.raises(Unsupported, match=r"1\.weight: Tensors of type F64 cannot be rounded.*Nothing was changed"):
        netweight.compress_(model, mantissa_bits=3)
    assert not any(isinstance(p, netweight.CompressedTensor) for p in model.parameters())
    with pytest.raises(Unsupported, match="reference arithmetic"):
        netweight.compress_(model, mantissa_bits=3, exclude="1", fidelity="reference")
    for options in ({"mantissa_bits": 9}, {"mantissa_bits": 3, "block_size": 0}, {"fidelity": "other"}):
        with pytest.raises(UsageError):
            netweight.compress_(model, **options)
    assert netweight.compress_(model, mantissa_bits=3, exclude="1").compressed == ("0.weight",)
