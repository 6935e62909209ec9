"""The compressed parameter as a tensor: writes, views, copies, files, and what it refuses."""

import copy
import io
import pickle
from collections import deque

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from models_under_test import Tied, bits, pair, same, stack
from torch import nn

import netweight
from netweight import CompressedTensor, codec
from netweight.errors import DenseOnly, UsageError
from netweight.methods.compress.runtime import storage
from netweight.methods.compress.runtime.storage import CompressedStorage, blob_of, pack


def two(shape=(48, 64), dtype=torch.bfloat16, seed=0):
    dense = nn.Parameter((torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype))
    return dense, nn.Parameter(CompressedTensor.of(dense.detach()))


def set_data_through(w):
    w.data = w.data + 1


WRITES = {
    "element": lambda w: w.__setitem__((1, 2), 3.0),
    "row": lambda w: w.__setitem__(1, 0.5),
    "column from column": lambda w: w.__setitem__((slice(None), 3), w[:, 2]),
    "mask": lambda w: w.__setitem__(w > 0, 1.0),
    "flat view": lambda w: w.view(-1)[5:9].fill_(2),
    "transposed": lambda w: w.t()[0].mul_(2),
    "data": lambda w: w.data.copy_(w.data * 1.5),
    "data of data": lambda w: w.data.data[3].zero_(),
    "set data": set_data_through,
    "in place through data": lambda w: exec("w.data += 1", {"w": w}),
    "halves": lambda w: w.chunk(2)[0].add_(w.chunk(2)[1]),
    "rows": lambda w: w.unbind(0)[7].neg_(),
    "detached": lambda w: w.detach().clamp_(0, 0.01),
    "strided": lambda w: w[::2, 1::3].permute(1, 0).diagonal().fill_(9),
    "init": lambda w: torch.nn.init.zeros_(w),
    "copy": lambda w: w.copy_(torch.arange(w.numel()).view(w.shape)),
    "broadcast copy": lambda w: w.copy_(torch.tensor(1.0)),
    "foreach": lambda w: torch._foreach_mul_([w, w.view(-1)[:10]], 1.5),
    "out": lambda w: torch.add(w, 1, out=w),
}


@pytest.mark.parametrize("name", WRITES)
def test_every_way_to_write_is_seen(name):
    dense, compressed = two()
    alias, x = compressed.detach(), torch.randn(3, 64).bfloat16()
    with torch.no_grad():
        F.linear(x, compressed)
        assert compressed.stored.decoded is not None  # it is small
        for weight in (dense, compressed):
            WRITES[name](weight)
        assert same(F.linear(x, dense), F.linear(x, compressed))
    assert same(dense, compressed)
    assert same(dense, alias)
    assert type(compressed) is CompressedTensor
    assert isinstance(compressed, nn.Parameter)


def test_reading_is_like_reading_a_dense_tensor():
    dense, compressed = two()
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    for read in (
        lambda w: w[3:7, ::2], lambda w: w.t().contiguous(), lambda w: x @ w.t(), lambda w: w.sum(0),
        lambda w: torch.cat([w, w]), lambda w: w.to(torch.float64), lambda w: w.expand(2, 48, 64), lambda w: w.view(-1),
        lambda w: torch.zeros_like(w), lambda w: w.new_ones(3), lambda w: w.clone(), lambda w: w.unflatten(0, (6, 8)),
        lambda w: w.abs().max(),
    ):  # fmt: skip
        assert same(read(dense), read(compressed))
    assert compressed[2].stride() == dense[2].stride()
    assert "3136 bytes" not in repr(compressed[2])
    assert str(compressed.payload.numel()) in repr(compressed)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.int8, torch.bool]
)
def test_every_bit_pattern_of_every_dtype_stays(dtype):
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (40 * 50 * size,), dtype=torch.uint8)
    dense = raw.view(dtype).view(40, 50)
    assert torch.equal(bits(CompressedTensor.of(dense)), raw)


def test_views_in_inference_mode():
    dense, w = two()
    with torch.inference_mode():
        for read in (lambda w: w.t() @ w, lambda w: w[3], lambda w: w.chunk(2)[1], lambda w: w.detach().view(-1)):
            assert same(read(w), read(dense))
        w[1].fill_(2.0)
        dense[1].fill_(2.0)
    assert same(w, dense)
    assert not w.detach().is_inference()
    w.sum().backward()  # still a leaf as any other


def test_like_without_decoding(monkeypatch):
    _, compressed = two()
    monkeypatch.setattr(codec, "fill", None)
    for make in (torch.empty_like, torch.zeros_like, torch.ones_like, torch.randn_like):
        assert make(compressed).shape == compressed.shape
    compressed.detach(), compressed.clone(), copy.deepcopy(compressed), compressed.t(), compressed[1:3]


@pytest.mark.parametrize(
    "use",
    [lambda w: w.numpy(), lambda w: w.t_(), lambda w: w.resize_(3, 3), lambda w: w.squeeze_()],
)
def test_what_needs_dense_memory_is_refused_by_name(use):
    _, compressed = two()
    with pytest.raises(DenseOnly, match=r"no dense memory for .*dense\(\)"):
        use(compressed.detach())


def test_safetensors_writes_dense_weights(tmp_path):
    dense, model = pair(stack)
    for each, name in ((dense, "dense"), (model, "compressed")):
        safetensors.torch.save_model(each, str(tmp_path / name))
    assert (tmp_path / "dense").read_bytes() == (tmp_path / "compressed").read_bytes()
    _, tied = pair(Tied)
    with pytest.raises(RuntimeError, match="share memory"):
        safetensors.torch.save_file(tied.state_dict(), tmp_path / "tied")


def test_the_storage_is_an_address_and_no_more():
    _, compressed = two()
    place = compressed.detach().storage()
    assert place.data_ptr() == compressed.data_ptr()
    with pytest.raises(DenseOnly, match=r"no dense memory for storage\(\)"):
        place.tolist()
    with pytest.raises(DenseOnly, match=r"no dense memory for storage\(\)"):
        place[0]


def test_a_part_of_a_weight_takes_no_other_data():
    _, compressed = two()
    with pytest.raises(DenseOnly, match="a part of a compressed one"):
        compressed.detach()[3:5].data = torch.zeros(3, 3)


def test_copies_are_independent_and_tied_ones_stay_tied():
    _, model = pair(Tied)
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.embed.weight
    with torch.no_grad():
        twin.embed.weight.zero_()
    assert model.head.weight.abs().sum() > 0
    assert not twin.head.weight.any()


@pytest.mark.parametrize(
    "change", [lambda m: m.half(), lambda m: m.to(torch.float64), lambda m: m.to("cpu"), lambda m: m.bfloat16()]
)
def test_conversions_of_a_model(change):
    dense, model = pair(Tied)
    change(dense), change(model)
    ids = torch.randint(0, 300, (2, 5))
    assert same(dense(ids), model(ids))
    assert type(model.up.weight) is CompressedTensor
    assert isinstance(model.up.weight, nn.Parameter)
    assert model.head.weight.stored is model.embed.weight.stored


def test_hooks_survive_conversions_and_can_be_removed():
    _, model = pair(stack)
    seen = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append("after"))
    handles = [parameter.register_hook(lambda _: seen.append("before")) for parameter in model.parameters()]
    x = torch.randn(2, 64)
    for expected in (16, 16, 8):
        model.to(torch.float32)
        seen.clear()
        model(x).sum().backward()
        assert len(seen) == expected
        if expected == 16 and model.training:
            model.eval()
        else:
            [handle.remove() for handle in handles]


def test_state_dicts_of_both_forms_load_into_both_kinds_of_model():
    dense, model = pair(Tied, torch.bfloat16)
    ids = torch.randint(0, 300, (2, 5))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    assert len(file.getbuffer()) < 0.95 * sum(p.nbytes for p in dense.state_dict().values())
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded["head.weight"].stored is loaded["embed.weight"].stored
    for state in (loaded, netweight.dense_state_dict(model), dense.state_dict()):
        for target in pair(Tied, torch.bfloat16, seed=9):
            assert not same(target(ids), dense(ids))
            target.load_state_dict(state)
            assert same(target(ids), dense(ids))
    assigned = pair(Tied, torch.bfloat16, seed=9)[0]
    assigned.load_state_dict(loaded, assign=True)
    assert same(assigned(ids), dense(ids))


def test_a_whole_model_can_be_pickled():
    _, model = pair(Tied)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    ids = torch.randint(0, 300, (2, 5))
    assert same(again(ids), model(ids))
    assert again.head.weight is again.embed.weight
    again.half()


def test_no_more_small_weights_stay_decoded_than_may(monkeypatch):
    monkeypatch.setattr(storage, "_MOST_SMALL", 2)
    monkeypatch.setattr(storage, "_small", deque())
    weights, x = [two(seed=seed)[1] for seed in range(4)] + [two((512, 64))[1]], torch.randn(2, 64).bfloat16()
    with torch.no_grad():
        for weight in weights:
            F.linear(x, weight)
    assert [weight.stored.decoded is not None for weight in weights] == [False, False, True, True, False]
    assert copy.deepcopy(weights[3]).stored.decoded is None
    assert pickle.loads(pickle.dumps(weights[3].stored)).decoded is None


def test_sharing_between_processes():
    dense, compressed = two()
    with torch.no_grad():
        F.linear(torch.randn(2, 64).bfloat16(), compressed)
    assert not compressed.is_shared()
    assert compressed.share_memory_() is compressed
    assert compressed.is_shared()
    assert same(compressed, dense)
    with torch.no_grad():
        F.linear(torch.randn(2, 64).bfloat16(), compressed)
        assert compressed.stored.decoded is None  # other processes may write
        compressed.mul_(2)
        with pytest.raises(UsageError, match="became larger than the memory that it shares"):
            compressed.view(torch.int16).random_()


def test_a_change_seldom_changes_the_payloads_size():
    dense, compressed = two((256, 256))
    payload = compressed.payload
    assert payload.nbytes <= 0.67 * dense.nbytes
    with torch.no_grad():
        for step in range(5):
            noise = torch.randn(dense.shape, generator=torch.Generator().manual_seed(step)) * 1e-3
            compressed.add_(noise.bfloat16())
            dense.add_(noise.bfloat16())
    assert compressed.payload is payload
    assert same(compressed, dense)
    with torch.no_grad():
        compressed.copy_(torch.randint(-32768, 32767, dense.shape, dtype=torch.int16).view(torch.bfloat16))
    assert compressed.payload is not payload


def test_payloads_hold_a_blob_a_length_and_zeros():
    blob = codec.encode(torch.randn(100))
    payload = pack(blob)
    assert blob_of(payload).tobytes() == blob
    assert int.from_bytes(payload[:8].numpy().tobytes(), "little") == len(blob)
    assert not payload[8 + len(blob) :].any()
    box = CompressedStorage.of(torch.randn(100), level="fast", chunk_log2=12)
    box.write(torch.zeros(100))
    assert codec.info(box.blob).level == "fast"
    assert codec.info(box.blob).chunk_log2 == 12
    assert not box.payload[8 + len(box.blob) :].any()


def test_a_write_between_forward_and_backward_is_noticed_as_with_dense_weights():
    _, model = pair(stack)
    loss = model(torch.randn(2, 64)).sum()
    with torch.no_grad():
        model[3].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_compiled_graphs_are_kept_by_what_they_depend_on():
    """torch asks for this before it keeps a compiled graph on disk, and warns where it is missing."""
    weights = [torch.randn(8, 8, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    one, other = (CompressedTensor.of(weight)._stable_hash_for_caching() for weight in weights)
    assert one == other  # values are not compiled in
    assert one != CompressedTensor.of(weights[0].bfloat16())._stable_hash_for_caching()
    assert one != CompressedTensor.of(weights[0][:4])._stable_hash_for_caching()
    assert one != CompressedTensor.of(weights[0])[1:]._stable_hash_for_caching()
