"""Models with weights in the fixed-length form: the same numbers, and ordinary bytes when they leave the process."""

import copy
import io
import pickle

import pytest
import torch
from fixed_under_test import launched  # noqa: F401  a fixture
from models_under_test import Tied, differing, same
from torch import nn

import netweight
from netweight import CompressedTensor, codec
from netweight.codec.fixed import is_fixed
from netweight.errors import DenseOnly, UsageError
from netweight.methods.compress.runtime.cuda import LENGTH


class Mixed(nn.Module):
    """An embedding, a convolution, and linear layers with and without a bias."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(300, 64)
        self.mix = nn.Conv1d(64, 64, 3, padding=1)
        self.up = nn.Linear(64, 200)
        self.down = nn.Linear(200, 64, bias=False)

    def forward(self, ids):
        x = self.mix(self.embed(ids).transpose(1, 2)).transpose(1, 2)
        return self.down(torch.relu(self.up(x.contiguous())))


IDS = torch.randint(0, 300, (3, 7), generator=torch.Generator().manual_seed(3))


def fixed_pair(make=Mixed, dtype=torch.bfloat16):
    """A dense model and its twin that prefers speed."""
    torch.manual_seed(0)
    dense = make().to(dtype)
    model = copy.deepcopy(dense)
    return dense, model, netweight.compress_(model, prefer="speed")


def run(model, x):
    model.zero_grad()
    y = model(x)
    y.square().mean().backward()
    return y


def fixed_names(model):
    return {name for name, p in model.named_parameters() if isinstance(p, CompressedTensor) and p.stored.fixed}


def test_linear_weights_of_bf16_are_fixed_and_others_are_not():
    dense, model, report = fixed_pair()
    assert set(report.fixed) == {"up.weight", "down.weight"} == fixed_names(model)
    assert set(report.compressed) == {"embed.weight", "mix.weight", "up.weight", "down.weight"}
    for name, weight in model.named_parameters():
        if isinstance(weight, CompressedTensor):
            assert is_fixed(weight.payload) == (name in report.fixed)
    saved = netweight.memory_footprint(dense) - netweight.memory_footprint(model)
    assert saved == report.before - report.after > 0
    assert fixed_pair(Tied)[2].fixed == ("embed.weight", "head.weight", "up.weight")
    assert fixed_pair(dtype=torch.float16)[2].fixed == ()
    big = nn.Sequential(nn.Linear(512, 512)).bfloat16()
    nn.init.normal_(big[0].weight, std=0.02)
    assert 0.75 < netweight.compress_(big, prefer="speed").share < 0.765


def test_outputs_and_gradients_are_equal_to_the_last_bit():
    dense, model, _ = fixed_pair()
    assert same(run(dense, IDS), run(model, IDS))
    assert not differing(dense, model, lambda p: p.grad)
    assert not differing(dense, model)
    with torch.no_grad():
        assert same(dense(IDS), model(IDS))
    for m in (dense, model):
        m.requires_grad_(False)
    gradients = []
    for m in (dense, model):
        x = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        m.down(m.up(x)).sum().backward()
        gradients.append(x.grad)
    assert same(*gradients)
    with torch.autocast("cpu", dtype=torch.float16):
        assert same(dense(IDS), model(IDS))


def test_functions_that_are_no_linear_layers_decode():
    dense, model, _ = fixed_pair()
    one, other = dense.up.weight, model.up.weight
    x = torch.randn(3, 64).bfloat16()
    assert same(nn.functional.embedding(IDS % 200, one), nn.functional.embedding(IDS % 200, other))
    assert same(torch.addmm(x[:, :1], x, one.t()), torch.addmm(x[:, :1], x, other.t()))
    assert same(one[5:9], other[5:9])
    assert same(one[3], other[3])
    assert same(x @ one.t(), x @ other.t())
    assert same(nn.functional.linear(x[0], one), nn.functional.linear(x[0], other))
    assert same(one.detach().float(), other.detach().float())
    with pytest.raises(DenseOnly):
        other.numpy()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_layers_have_no_graph_break_and_are_not_compiled_each_step():
    torch._dynamo.reset()
    dense, model, _ = fixed_pair()
    for m in (dense, model):
        m.compile(fullgraph=True, backend="aot_eager_decomp_partition")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (dense, model)]
    for step in range(4):
        assert same(run(dense, IDS), run(model, IDS))
        for optimizer in optimizers:
            optimizer.step()
        if step == 1:
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert not differing(dense, model)
    assert fixed_names(model) == {"up.weight", "down.weight"}


# ---- training --------------------------------------------------------------------------------------------------------


def test_training_encodes_anew_in_the_same_form():
    dense, model, _ = fixed_pair()
    optimizers = [
        torch.optim.AdamW(dense.parameters(), lr=1e-2),
        netweight.LayerwiseOptimizer(model, torch.optim.AdamW, lr=1e-2),
    ]
    for _ in range(3):
        run(dense, IDS)
        optimizers[0].step()
        model(IDS).square().mean().backward()
        optimizers[1].step()
    assert not differing(dense, model)
    assert fixed_names(model) == {"up.weight", "down.weight"}


def test_values_without_a_fixed_length_form_bring_a_weight_back_to_the_codecs():
    dense, model, _ = fixed_pair()
    before, spread = model.up.weight.payload, torch.randn(200, 64).mul(30).exp().bfloat16()
    with torch.no_grad():
        model.down.weight.mul_(3), dense.down.weight.mul_(3)
        assert model.down.weight.stored.fixed
        model.up.weight.copy_(spread), dense.up.weight.copy_(spread)
    assert model.up.weight.payload is not before
    assert not is_fixed(model.up.weight.payload)
    assert fixed_names(model) == {"down.weight"}
    assert not differing(dense, model)
    assert same(run(dense, IDS), run(model, IDS))
    with torch.no_grad():
        model.up.weight.fill_(1.0)
    assert not model.up.weight.stored.fixed
    assert netweight.set_layout_(model, "speed") == ("up.weight", "down.weight")


def test_a_graph_that_saved_a_weight_notices_a_write():
    _, model, _ = fixed_pair()
    x = torch.randn(2, 64).bfloat16().requires_grad_()
    y = model.down(model.up(x)).sum()
    with torch.no_grad():
        model.down.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


# ---- out of the process and back -------------------------------------------------------------------------------------


def test_saved_models_and_state_dicts_hold_the_codecs_form():
    dense, model, _ = fixed_pair()
    for saved, weights_only in ((model.state_dict(), True), (model, False)):
        file = io.BytesIO()
        torch.save(saved, file)
        assert (file.getvalue().count(b"NWT"), file.getvalue().count(b"NWF")) == (4, 0)
        file.seek(0)
        loaded = torch.load(file, weights_only=weights_only)
        if weights_only:
            assert loaded["up.weight"].stored.fixed
            other = Mixed().bfloat16()
            other.load_state_dict(loaded)
            assert not differing(dense, other)
            loaded, twin = fixed_pair()[1], loaded
            with torch.no_grad():
                loaded.up.weight.zero_()
            loaded.load_state_dict(twin)
        assert fixed_names(loaded) == {"up.weight", "down.weight"}
        assert not differing(dense, loaded)
    assert b"NWF" not in pickle.dumps(model)
    assert same(dense(IDS), pickle.loads(pickle.dumps(model))(IDS))


def test_blobs_are_those_of_a_model_that_prefers_memory():
    dense, model, _ = fixed_pair()
    netweight.compress_(dense)
    for (name, one), (_, other) in zip(dense.named_parameters(), model.named_parameters(), strict=True):
        if isinstance(one, CompressedTensor):
            assert bytes(one.stored.blob) == bytes(other.stored.blob), name
            assert codec.info(other.stored.blob).shape == one.shape


def test_checkpoints_go_into_either_form(tmp_path):
    dense, model, _ = fixed_pair()
    netweight.save_checkpoint(tmp_path / "c.safetensors", model)
    assert b"NWF" not in (tmp_path / "c.safetensors").read_bytes()
    twin = fixed_pair()[1]
    plain = Mixed().bfloat16()
    with torch.no_grad():
        twin.up.weight.zero_()
    for m in (twin, plain):
        netweight.load_checkpoint(tmp_path / "c.safetensors", m)
        assert not differing(dense, m)
    assert fixed_names(twin) == {"up.weight", "down.weight"}


def test_copies_and_conversions():
    dense, model, _ = fixed_pair()
    copied = copy.deepcopy(model)
    assert fixed_names(copied) == fixed_names(model)
    assert copied.up.weight.payload.data_ptr() != model.up.weight.payload.data_ptr()
    with torch.no_grad():
        copied.up.weight.zero_()
    assert not differing(dense, model)
    assert fixed_names(copy.deepcopy(model).to("cpu")) == fixed_names(model)
    wide, wide_dense = copy.deepcopy(model).float(), copy.deepcopy(dense).float()
    assert fixed_names(wide) == set()
    assert not differing(wide_dense, wide)
    assert fixed_names(nn.ParameterList([model.up.weight.clone()])) == {"0"}
    assert copy.deepcopy(model).to("meta").up.weight.is_meta
    assert set(netweight.decompress_(model)) == {"embed.weight", "mix.weight", "up.weight", "down.weight"}
    assert not differing(dense, model)
    assert all(same(a, b) for a, b in zip(dense.parameters(), model.parameters(), strict=True))


def test_shared_memory_takes_the_codecs_form():
    dense, model, _ = fixed_pair()
    model.share_memory()
    assert fixed_names(model) == set()
    assert model.up.weight.is_shared()
    assert not differing(dense, model)
    with pytest.raises(UsageError, match="shares"):
        netweight.set_layout_(model, "speed")


def test_a_model_changes_its_preference():
    dense, model, report = fixed_pair()
    footprint = netweight.memory_footprint(model)
    assert netweight.set_layout_(model, "memory") == ()
    assert netweight.memory_footprint(model) < footprint
    assert model.up.weight.payload[LENGTH : LENGTH + 3].tolist() == list(b"NWT")
    assert not differing(dense, model)
    assert netweight.set_layout_(model, "speed") == report.fixed
    assert netweight.memory_footprint(model) == footprint
    assert same(run(dense, IDS), run(model, IDS))
    assert netweight.set_layout_(dense, "speed") == ()


def test_wrong_preferences_change_nothing():
    model = Mixed().bfloat16()
    with pytest.raises(UsageError, match="preference 'size'"):
        netweight.compress_(model, prefer="size")
    with pytest.raises(UsageError, match="no fixed-length form"):
        netweight.compress_(model, prefer="speed", mantissa_bits=3)
    with pytest.raises(UsageError, match="preference"):
        netweight.set_layout_(model, "quick")
    assert not any(isinstance(p, CompressedTensor) for p in model.parameters())
    netweight.compress_(model, mantissa_bits=3)
    assert netweight.set_layout_(model, "speed") == ()


# ---- where kernels run -----------------------------------------------------------------------------------------------


def test_where_kernels_run_layers_multiply_without_decoding(launched):  # noqa: F811
    dense, model, _ = fixed_pair()
    with torch.no_grad():
        y, wanted = model(IDS), dense(IDS)
    assert launched == ["product_32", "product_32"]
    assert torch.allclose(y.float(), wanted.float(), rtol=2**-6, atol=1e-3)
    launched.clear()
    run(model, IDS)
    assert launched == ["product_32", "product_32", "decode_fixed", "decode_fixed"]
    launched.clear()
    model(IDS.repeat(13, 1))
    assert launched == ["decode_fixed", "decode_fixed"]
    assert not differing(dense, model)
