"""Whole models that run compressed: equal to the last bit, with no decoded weight kept, and refusals before changes."""

import copy
import math
import weakref

import pytest
import torch
from models_under_test import Conv1D, Picture, Tied, differing, pair, same, stack, step
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import netweight
from netweight import CompressedTensor, codec
from netweight.codec import DecodeQueue, Decoding, fixed
from netweight.errors import AlreadyCompressed, NameNotFound, Unsupported, UsageError
from netweight.methods.compress.runtime import functional

IDS = torch.randint(0, 300, (3, 7), generator=torch.Generator().manual_seed(3))
PICTURE = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("make", "x"), [(Tied, IDS), (Picture, PICTURE)])
def test_outputs_and_gradients_are_equal_to_the_last_bit(make, x, dtype):
    dense, model = pair(make, dtype)
    x = x.to(dtype) if x.is_floating_point() else x
    for one, other in zip(step(dense, x), step(model, x), strict=True):
        assert same(one, other)
    assert not differing(dense, model, lambda parameter: parameter.grad)
    assert not differing(dense, model)
    with torch.no_grad():
        assert same(dense(x), model(x))
    assert sum(isinstance(p, CompressedTensor) for p in model.parameters()) >= 3


@pytest.mark.parametrize("shape", [(64,), (1, 64), (0, 64), (2, 3, 64), (2, 3, 4, 64)])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_inputs_of_any_shape_and_stride(shape, frozen, bias):
    dense, model = pair(
        lambda: nn.Sequential(nn.Linear(64, 40, bias=bias), nn.Linear(40, 64, bias=bias)), torch.bfloat16
    )
    if frozen:
        dense.requires_grad_(False), model.requires_grad_(False)
    x = torch.randn(shape).bfloat16()
    inputs = [x] if len(shape) < 2 else [x, x.transpose(0, -2), torch.randn(64, *shape[:-1]).bfloat16().movedim(0, -1)]
    for given in inputs:
        results = [
            m(v) for m, v in ((dense, given.detach().requires_grad_()), (model, given.detach().requires_grad_()))
        ]
        assert same(*results)
        seen = []
        for m in (dense, model):
            m.zero_grad()
            leaf = given.detach().requires_grad_()
            m(leaf).square().sum().backward()
            seen.append(leaf.grad)
        assert same(*seen)
        if not frozen:
            assert not differing(dense, model, lambda p: p.grad)


@pytest.mark.parametrize(
    "options", [{"padding_idx": 5}, {"padding_idx": -1}, {"max_norm": 0.9}, {"scale_grad_by_freq": True}]
)
def test_options_of_embeddings(options):
    dense, model = pair(lambda: nn.Sequential(nn.Embedding(300, 64, **options)))
    ids = torch.cat([IDS, torch.tensor([[5, 5, 299, 0, 0, 1, 2]])])
    assert same(step(dense, ids)[0], step(model, ids)[0])
    assert not differing(dense, model, lambda p: p.grad)
    assert not differing(dense, model)


def test_an_embedding_decodes_only_touched_chunks(monkeypatch):
    dense, model = pair(lambda: nn.Sequential(nn.Embedding(4096, 128)), torch.bfloat16)
    assert codec.info(model[0].weight.stored.blob).chunks == 32
    decoded = []
    fill = codec.fill
    monkeypatch.setattr(codec, "decode", None)
    monkeypatch.setattr(codec, "fill", lambda out, *part, **how: decoded.append(len(out)) or fill(out, *part, **how))
    ids = torch.tensor([[7, 4000, 9], [4000, 2048, 8]])
    assert same(dense(ids), model(ids))
    assert decoded == [3, 1, 1]
    assert model(torch.empty(2, 0, dtype=torch.long)).shape == (2, 0, 128)
    monkeypatch.undo()
    everything = torch.randperm(4096)
    assert same(dense(everything), model(everything))
    with pytest.raises(IndexError):
        model(torch.tensor([4096]))


def test_no_decoded_weight_lives_longer_than_its_layer(monkeypatch):
    """Counts live storages: after forward none is left, and in either direction only one at a time is alive."""
    alive, most, count = [], [0], [0]
    decode_payload = functional.decode_payload

    def counted(*described):
        weight = decode_payload(*described)
        alive[:] = [reference for reference in alive if not reference.expired()]
        alive.append(StorageWeakRef(weight.untyped_storage()))
        most[0], count[0] = max(most[0], len(alive)), count[0] + 1
        return weight

    monkeypatch.setattr(functional, "decode_payload", counted)
    for make, x, decodes in ((lambda: stack(10), torch.randn(4, 64), 10), (Picture, PICTURE, 4)):
        _, model = pair(make)
        count[0] = most[0] = 0
        loss = model(x.requires_grad_()).sum()
        assert count[0] == decodes
        assert all(reference.expired() for reference in alive)
        loss.backward()
        assert count[0] == 2 * decodes
        assert most[0] == 1
        assert all(reference.expired() for reference in alive)


def test_frozen_layers_keep_no_input_and_first_layers_no_weight():
    _, model = pair(stack)
    model[1].weight.requires_grad_(False)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model(torch.randn(2, 64)).sum()
    assert [t.dtype for t in saved] == [
        torch.float32,
        torch.uint8,
        torch.float32,
        torch.uint8,
        torch.float32,
        torch.uint8,
    ]


def test_autocast_casts_as_with_dense_weights():
    dense, model = pair(
        lambda: nn.Sequential(nn.Embedding(300, 64), nn.Linear(64, 64), Conv1D(64, 64), nn.Linear(64, 64))
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = [step(m, IDS)[0] for m in (dense, model)]
    assert results[1].dtype == torch.bfloat16
    assert same(*results)
    assert not differing(dense, model, lambda p: p.grad)
    dense, model = pair(Picture)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same(dense(PICTURE), model(PICTURE))


def test_activation_checkpointing():
    dense, model = pair(stack)
    x = torch.randn(4, 64, requires_grad=True)
    for m in (dense, model):
        checkpoint_sequential(m, 2, x, use_reentrant=False).square().sum().backward()
    assert not differing(dense, model, lambda p: p.grad)


def test_plain_optimizers_work_on_compressed_weights():
    dense, model = pair(Tied)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=False) for m in (dense, model)]
    for _ in range(3):
        for m, optimizer in zip((dense, model), optimizers, strict=True):
            step(m, IDS)
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            optimizer.step()
    assert not differing(dense, model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_layers_have_no_graph_break_and_are_not_compiled_each_step():
    torch._dynamo.reset()
    dense, model = pair(Tied)
    for m in (dense, model):  # compiled arithmetic may differ from eager arithmetic, so both
        m.compile(fullgraph=True, backend="aot_eager_decomp_partition")
    optimizer, dense_optimizer = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, dense))
    for number in range(4):
        assert same(step(dense, IDS)[0], step(model, IDS)[0])
        optimizer.step(), dense_optimizer.step()
        if number == 1:
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert not differing(dense, model)


def test_decoding_ahead_changes_nothing_and_keeps_three_weights_at_most(monkeypatch):
    dense, model = pair(lambda: stack(6))
    decoded, pending, most = [], [], [0]
    fill, add, result = codec.fill, DecodeQueue.add, Decoding.result

    def count():
        decoded[:] = [reference for reference in decoded if not reference.expired()]
        pending[:] = [reference for reference in pending if reference() is not None]
        most[0] = max(most[0], len(decoded) + len(pending))

    def counted(weight):
        decoded.append(StorageWeakRef(weight.untyped_storage()))
        count()
        return weight

    def counted_add(queue, blob):
        decoding = add(queue, blob)
        pending.append(weakref.ref(decoding))
        count()
        return decoding

    def counted_result(decoding):
        pending[:] = [reference for reference in pending if reference() is not decoding]
        return counted(result(decoding))

    monkeypatch.setattr(codec, "fill", lambda *args, **kwargs: counted(fill(*args, **kwargs)))
    monkeypatch.setattr(DecodeQueue, "add", counted_add)
    monkeypatch.setattr(Decoding, "result", counted_result)
    x = torch.randn(4, 64, requires_grad=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (dense, model)]
    with netweight.decode_ahead() as ahead:
        for _ in range(4):
            assert same(step(dense, x)[0], step(model, x)[0])
            assert not differing(dense, model, lambda p: p.grad)
            [optimizer.step() for optimizer in optimizers]
    assert ahead.hits > 30
    assert most[0] == 3
    assert not differing(dense, model)
    count()
    assert not decoded
    assert not pending


def test_a_checkpoint_does_not_calculate_its_last_product_again(monkeypatch):
    torch.manual_seed(0)
    dense, model = pair(lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    decoded, read = [], functional.read
    monkeypatch.setattr(functional, "read", lambda *given: decoded.append(given[2]) or read(*given))
    x = torch.randn(4, 64)
    grads = []
    for m in (dense, model):
        y = x.clone().requires_grad_()
        checkpoint(m, y, use_reentrant=False).square().sum().backward()
        grads.append(y.grad)
    assert same(*grads)
    assert not differing(dense, model, lambda parameter: parameter.grad)
    assert decoded.count("forward") == 3  # both the first time, only the first of them again


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_what_is_compressed_and_what_it_holds():
    dense, _ = pair(Tied, torch.bfloat16)
    twin = copy.deepcopy(dense)
    report = netweight.compress_(twin)
    assert set(report.compressed) == {"embed.weight", "head.weight", "up.weight", "down.weight"}
    assert report.left_dense == {}
    assert report.before == sum(p.nbytes for p in dense.parameters() if p.dim() > 1)
    assert report.share <= 0.68
    assert twin.head.weight is twin.embed.weight
    saved = netweight.memory_footprint(dense) - netweight.memory_footprint(twin)
    assert saved == report.before - report.after
    big = nn.Sequential(nn.Linear(512, 512, bias=False)).bfloat16()
    nn.init.normal_(big[0].weight, std=0.02)
    assert netweight.compress_(big).share <= 0.665


def test_include_and_exclude():
    _, model = pair(stack, include=["0", "1"])
    assert [type(layer.weight) is CompressedTensor for layer in model] == [True, True, False, False]
    report = netweight.compress_(model, include="{2,3}", exclude="3")
    assert report.compressed == ("2.weight",)
    assert report.left_dense["3.weight"] == "excluded"
    assert report.left_dense["0.weight"] == "not included"
    with pytest.raises(NameNotFound, match="Nearest"):
        netweight.compress_(model, include="**.q_proj")
    nested = nn.Sequential(stack(), stack())
    assert len(netweight.compress_(nested, include="1").compressed) == 4
    tied = Tied()
    report = netweight.compress_(tied, exclude="head")
    assert report.left_dense == {"embed.weight": "excluded", "head.weight": "excluded"}
    assert tied.head.weight is tied.embed.weight


def test_unsupported_layers_are_listed_before_anything_changes():
    model = nn.Sequential(nn.Linear(64, 64), nn.LSTM(64, 64), nn.ConvTranspose2d(8, 8, 3), nn.LayerNorm(64))
    with pytest.raises(
        Unsupported, match=r"(?s)3 weights.*1\.weight_ih_l0.*1\.weight_hh_l0.*2\.weight of ConvTranspose2d"
    ):
        netweight.compress_(model, include="**")
    with pytest.raises(Unsupported, match="contains no plain values"):
        netweight.compress_(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, device="meta")))
    with pytest.raises(UsageError, match="level"):
        netweight.compress_(model, level="best")
    assert not any(isinstance(p, CompressedTensor) for p in model.parameters())
    report = netweight.compress_(model)
    assert report.compressed == ("0.weight",)
    assert report.left_dense["2.weight"] == "ConvTranspose2d is not a layer that can run compressed"


def test_double_compression_is_an_error_that_changes_nothing():
    _, model = pair(stack, include="0")
    with pytest.raises(AlreadyCompressed, match=r"0\.weight is compressed already"):
        netweight.compress_(model)
    assert sum(isinstance(p, CompressedTensor) for p in model.parameters()) == 1


def test_what_would_not_get_smaller_stays_dense():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(64, 64))
    model[1].weight.data = torch.randint(0, 256, (64 * 64 * 4,), dtype=torch.uint8).view(torch.float32).view(64, 64)
    report = netweight.compress_(model)
    assert report.left_dense == {"0.weight": "would not get smaller", "1.weight": "would not get smaller"}
    assert report.share == 1.0


def test_decompression_gives_the_dense_model_back():
    dense, model = pair(Tied)
    assert set(netweight.decompress_(model, exclude="up")) == {"embed.weight", "head.weight", "down.weight"}
    assert type(model.up.weight) is CompressedTensor
    assert netweight.decompress_(model, include="up") == ("up.weight",)
    assert netweight.decompress_(model) == ()
    assert model.head.weight is model.embed.weight
    assert not differing(dense, model)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert all("_apply" not in vars(module) for module in model.modules())


def test_adapters_train_on_top_and_merge():
    peft = pytest.importorskip("peft")

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            return self.b(self.a(x))

    results = []
    x = torch.randn(4, 64)
    for model in pair(Two, torch.float32):
        torch.manual_seed(1)
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["a"], r=4, init_lora_weights=False))
        y, _ = step(adapted, x)
        gradients = {name: p.grad for name, p in adapted.named_parameters() if p.grad is not None}
        merged = adapted.merge_and_unload()
        results.append((y, gradients, merged))
    (y, gradients, merged), (y2, gradients2, merged2) = results
    assert same(y, y2)
    assert gradients.keys() == gradients2.keys()
    assert all(same(gradients[name], gradients2[name]) for name in gradients)
    assert type(merged2.a.weight) is CompressedTensor
    assert not differing(merged, merged2)


# ---- in the work that people do --------------------------------------------------------------------------------------


CHANGES = {
    "relu": lambda y: y.relu_(),
    "element": lambda y: (y.__setitem__((0,), 0.5), y)[1],
    "masked": lambda y: (y.__setitem__(y > 0, 0.25), y)[1],
    "add": lambda y: y.add_(1),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(64, 64), lambda: nn.Linear(64, 64, bias=False), lambda: Conv1D(64, 64),
        lambda: nn.Embedding(300, 64), lambda: nn.Conv1d(3, 16, 3),
    ],
)  # fmt: skip
def test_what_a_layer_gives_may_be_changed_in_place(change, make):
    models = pair(make)
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(2))
    x = (x * 50).long().abs() if isinstance(models[0], nn.Embedding) else x
    results = []
    for model in models:
        hooked = model.register_forward_hook(lambda module, inputs, y: CHANGES[change](y))
        y = model(x)
        y.square().sum().backward()
        results.append(y)
        hooked.remove()
    assert same(*results)
    assert not differing(*models, lambda p: p.grad)


@pytest.mark.parametrize("prefer", ["memory", "speed"])
@pytest.mark.parametrize(("rows", "columns", "bias"), [(9000, 512, False), (2100, 1023, False), (5000, 384, True)])
def test_products_of_few_rows_have_the_dense_bits(monkeypatch, rows, columns, bias, prefer):
    torch.manual_seed(0)
    dense = nn.Linear(columns, rows, bias=bias).bfloat16()
    model = copy.deepcopy(dense)
    netweight.compress_(model, prefer=prefer)
    tiled, by_tiles = [], functional._product_by_tiles

    def watched(*arguments, **options):
        product = by_tiles(*arguments, **options)
        tiled.append(product is not None)
        return product

    monkeypatch.setattr(functional, "_product_by_tiles", watched)
    shapes = ((1,), (1, 1), (3, 1), (2, 8), (257,))  # the last by `linear`
    with torch.inference_mode():
        for shape in shapes:
            x = torch.randn(*shape, columns).bfloat16()
            assert same(model(x), dense(x))
    orders = [fixed.order_of(rows, columns, math.prod(shape), torch.get_num_threads(), bias) for shape in shapes[:-1]]
    assert tiled == [bool(order) for order in orders] + [False]


def test_weights_under_a_live_optimizer_stay_compressed():
    _, model = pair(stack)
    for make in (torch.optim.SGD, lambda p, lr: netweight.LayerwiseOptimizer(model, torch.optim.SGD, lr=lr)):
        optimizer = make(model.parameters(), lr=0.1)
        with pytest.raises(
            UsageError, match=r"has the parameters 0.weight, 1.weight, 2.weight, 3.weight.*Nothing was changed"
        ):
            netweight.decompress_(model)
        assert all(isinstance(layer.weight, CompressedTensor) for layer in model)
        if hasattr(optimizer, "close"):
            optimizer.close()
        del optimizer
    assert len(netweight.decompress_(model)) == 4
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(UsageError, match=r"AdamW.* has the parameters 0.weight.*Nothing was changed.*after compress_"):
        netweight.compress_(model)
    del optimizer
    assert len(netweight.compress_(model).compressed) == 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_traced_model_gives_the_same_numbers_for_other_inputs():
    dense, model = pair(Tied)
    ids, others = torch.arange(6).view(2, 3), torch.arange(100, 106).view(2, 3)
    with torch.no_grad():
        traced = torch.jit.trace(model, (ids,))
        assert same(traced(others), dense(others))


def test_data_takes_other_shapes_and_dtypes():
    dense, model = pair(lambda: nn.Linear(64, 64))
    for value in (torch.randn(80, 64), torch.randn(80, 64).bfloat16(), CompressedTensor.of(torch.randn(32, 64))):
        dense.weight.data = value.dense() if isinstance(value, CompressedTensor) else value
        model.weight.data = value
        assert isinstance(model.weight, CompressedTensor)
        assert same(model.weight, dense.weight)
        x = torch.randn(3, 64, dtype=value.dtype)
        for m in (dense, model):
            m.bias, m.weight.grad = None, None
            m(x).square().sum().backward()
        assert not differing(dense, model, lambda p: p.grad)


def test_a_model_that_is_compressed_in_inference_mode_trains_afterwards():
    dense, model = pair(stack)
    netweight.decompress_(model)
    with torch.inference_mode():
        netweight.compress_(model)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    for one in (dense, model):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        one(x).square().sum().backward()
        optimizer.step()
    assert not differing(dense, model)
