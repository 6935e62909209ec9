"""The runtime of compressed models on a device, on one that the CPU pretends to be: see `pretended_device.py`."""

import copy
import io
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models_under_test import Picture, Tied, differing, pair, same, stack, step
from pretended_device import CPU, Event, pretend
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import netweight
from netweight import codec
from netweight.codec import cuda
from netweight.codec.cuda import encoding, launching
from netweight.codec.header import read_index, torch_dtype
from netweight.errors import CorruptBlob, OutOfMemory, UsageError
from netweight.methods.compress.runtime import cuda as device
from netweight.methods.compress.runtime import fsdp, storage
from netweight.methods.compress.runtime import model as model_in_memory
from netweight.methods.compress.runtime.storage import CompressedStorage, blob_of

IDS = torch.randint(0, 300, (3, 7), generator=torch.Generator().manual_seed(3))
PICTURE = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))
ROWS = torch.randn(4, 64, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def counts(monkeypatch):
    return pretend(monkeypatch)


def assert_steps_alike(dense, model, x):
    for one, other in zip(step(dense, x), step(model, x), strict=True):
        assert same(one, other)
    assert not differing(dense, model, lambda parameter: parameter.grad)


# ---- passes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("make", "x"), [(Tied, IDS), (Picture, PICTURE), (stack, ROWS)])
def test_outputs_and_gradients_are_equal_to_the_last_bit(counts, make, x, dtype):
    dense, model = pair(make, dtype)
    x = x.to(dtype) if x.is_floating_point() else x
    assert_steps_alike(dense, model, x)
    with netweight.decode_ahead() as ahead:
        for _ in range(3):
            assert_steps_alike(dense, model, x)
    assert ahead.hits > 3
    with torch.no_grad():
        assert same(dense(x), model(x))


def test_from_the_second_pass_on_the_host_waits_for_nothing(counts):
    dense, model = pair(Tied, torch.bfloat16)
    copies = copy.deepcopy(model)  # their bytes are as if they came from a file: nobody here encoded them
    step(copies, IDS)
    assert counts.waited == counts.looked == 3  # embedding and head are one weight
    with netweight.decode_ahead():
        for _ in range(3):
            assert_steps_alike(dense, copies, IDS)
    assert counts.waited == counts.looked == 3
    step(model, IDS)
    assert counts.waited == counts.looked == 3  # what was encoded on the device is known


def test_rounded_weights(counts):
    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)).to(dtype)
        model[0].weight.data[3, 5] = float("inf")
        model[0].weight.data[3, 6] = 1e-40
        report = netweight.compress_(model, mantissa_bits=2)
        dense = copy.deepcopy(model)
        netweight.decompress_(dense)
        assert len(report.compressed) == 2
        for layer in model:
            assert same(layer.weight, codec.decode(layer.weight.stored.blob))
        x = ROWS.to(dtype)
        with torch.no_grad(), netweight.decode_ahead() as ahead:
            for _ in range(3):
                assert same(dense(x), model(x))
        assert ahead.hits > 2


def test_what_keeps_a_weight_gets_one_of_its_own(counts):
    """Second derivatives, checkpoints, and weights used outside of their layers, while buffers are filled again."""
    dense, model = pair(stack)
    with netweight.decode_ahead():
        for m in (dense, model, dense, model):
            m.requires_grad_(False)
            x = ROWS.clone().requires_grad_()
            (slope,) = torch.autograd.grad(m(x).sigmoid().sum(), x, create_graph=True)
            slope.square().sum().backward()
            m.slope = slope.detach(), x.grad
            m.requires_grad_(True)
        assert all(same(one, other) for one, other in zip(dense.slope, model.slope, strict=True))
        for m in (dense, model, dense, model):
            m.zero_grad()
            x = ROWS.clone().requires_grad_()
            kept = m[1].weight.t() @ m[2].weight.detach()
            checkpoint(m, x, use_reentrant=False).square().sum().backward()
            kept.sum().backward()
            m.slope = kept.detach(), x.grad
        assert all(same(one, other) for one, other in zip(dense.slope, model.slope, strict=True))
        assert not differing(dense, model, lambda parameter: parameter.grad)


def test_autocast_and_other_orders_of_layers(counts):
    dense, model = pair(stack)
    with netweight.decode_ahead(), torch.no_grad():
        for order in ([0, 1, 2, 3], [0, 1, 2, 3], [3, 1, 0], [2, 2, 2], [0, 1, 2, 3]):
            results = []
            for m in (dense, model):
                x = ROWS
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    for layer in order:
                        x = m[layer](x)
                results.append(x)
            assert same(*results)


def test_inference_mode_and_others_in_turn(counts):
    dense, model = pair(stack)
    with torch.inference_mode():
        status = device.Status(CPU, Event)
        tensor = model[0].weight.to("cpu", copy=True)
        assert same(tensor, dense[0].weight)
    status.count(torch.tensor(True))
    with pytest.raises(CorruptBlob):
        status.check()
    assert device.decoder_of(CPU).nbytes(tensor.payload) == 64 * 64 * 4
    with netweight.decode_ahead():
        for mode in (torch.inference_mode(), torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
            with mode:
                assert same(model(ROWS), dense(ROWS))


def test_a_compiled_layer(counts):
    dense, model = pair(lambda: nn.Sequential(nn.Linear(64, 64)))
    layer = torch.compile(model[0], backend="aot_eager", fullgraph=True)
    with netweight.decode_ahead():
        for _ in range(2):
            assert_steps_alike(dense, nn.Sequential(layer), ROWS)


def test_a_failed_product_gives_its_buffer_back(counts):
    dense, model = pair(stack)
    with torch.no_grad(), netweight.decode_ahead() as ahead:
        model(ROWS)
        for _ in range(5):
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                model[0](ROWS[:, :-1].contiguous())
        before = ahead.hits
        for _ in range(2):
            assert same(dense(ROWS), model(ROWS))
        assert ahead.hits > before + 4


# ---- training and what leaves the device -----------------------------------------------------------------------------


def test_training_encodes_on_the_device(counts):
    dense, model = pair(stack, torch.bfloat16)
    x = ROWS.bfloat16()
    step(model, x)
    optimizers = [torch.optim.SGD(dense.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)]
    with netweight.decode_ahead():
        for _ in range(3):
            assert_steps_alike(dense, model, x)
            for optimizer in optimizers:
                optimizer.step()
    assert not differing(dense, model)
    assert counts.waited == counts.looked == 0
    assert not any(read_index(blob_of(layer.weight.payload)).checks.any() for layer in model)


def test_layerwise_training_is_that_of_the_dense_model(counts):
    dense, model = pair(Tied)
    optimizers = [netweight.LayerwiseOptimizer(m, torch.optim.AdamW, lr=0.01) for m in (dense, model)]
    with netweight.decode_ahead():
        for _ in range(3):
            for m in (dense, model):
                m(IDS).square().mean().backward()
    assert [optimizer.steps for optimizer in optimizers] == [3, 3]
    assert not differing(dense, model)


def test_payloads_lie_side_by_side(counts, monkeypatch):
    monkeypatch.setattr(model_in_memory, "_TOGETHER", 16_000)
    dense, model = pair(lambda: nn.Sequential(*stack(6), nn.Linear(64, 300)), torch.bfloat16)
    payloads = [layer.weight.payload for layer in model]
    segments = [payload.untyped_storage().data_ptr() for payload in payloads]
    assert [segments.count(each) for each in segments] == [2, 2, 2, 2, 2, 2, 1]
    assert all(payload.data_ptr() % 512 == segment % 512 for payload, segment in zip(payloads, segments, strict=True))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (dense, model)]
    for _ in range(2):
        assert_steps_alike(dense, model, ROWS.bfloat16())
        for optimizer in optimizers:
            optimizer.step()
    assert not differing(dense, model)
    assert not differing(dense, pickle.loads(pickle.dumps(model)))


def checkpointed(model, x):
    for layer in model:
        x = checkpoint(lambda given, layer=layer: layer(torch.tanh(given)), x, use_reentrant=False)
    return x


def test_a_checkpointed_update_decodes_each_weight_twice(counts):
    dense, model = pair(stack, torch.bfloat16)
    optimizers = [netweight.LayerwiseOptimizer(m, torch.optim.SGD, lr=0.1) for m in (dense, model)]
    x = ROWS.bfloat16().requires_grad_()
    for _ in range(2):
        counts.chunks.clear()
        for m in (dense, model):
            checkpointed(m, x).square().mean().backward()
        assert len(counts.chunks) == 2 * len(model)
    assert [optimizer.steps for optimizer in optimizers] == [2, 2]
    assert not differing(dense, model)
    assert not storage.recent(x.device)._weights


def test_a_backward_pass_keeps_no_more_weights_than_it_may(counts, monkeypatch):
    dense, model = pair(stack, torch.bfloat16)
    x, held = ROWS.bfloat16().requires_grad_(), []
    monkeypatch.setitem(storage._RECENT_BYTES, "cpu", 2 * dense[0].weight.nbytes)
    for layer in model:
        layer.weight.register_hook(lambda gradient: held.append(len(storage.recent(x.device)._weights)))
    assert_steps_alike(dense, model, x)
    assert max(held) == 2
    assert not storage.recent(x.device)._weights


@pytest.mark.parametrize("bad", [0, 1, 3])
def test_a_gradient_found_bad_when_the_next_is_complete_updates_nothing_more(counts, bad):
    _, model = pair(stack, torch.bfloat16)
    netweight.LayerwiseOptimizer(model, torch.optim.SGD, lr=0.1)
    before = [layer.weight.dense() for layer in model]
    model[bad].weight.register_hook(lambda gradient: gradient * torch.nan)
    with pytest.raises(netweight.errors.BadGradient, match=rf"gradient of {bad}\.weight"):
        model(ROWS.bfloat16()).square().mean().backward()
    for place, layer in enumerate(model):
        assert layer.weight.dense().equal(before[place]) == (place <= bad)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_backward_pass_that_fails_leaves_no_gradient_to_the_next(counts):
    dense, model = pair(stack, torch.bfloat16)
    optimizers = [netweight.LayerwiseOptimizer(m, torch.optim.SGD, lr=0.1) for m in (dense, model)]

    def fail(gradient):
        raise RuntimeError("out of memory")

    handle = model[1].bias.register_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(ROWS.bfloat16()).square().mean().backward()
    handle.remove()
    with torch.no_grad():
        for p, q in zip(dense.parameters(), model.parameters(), strict=True):
            p.copy_(q.dense() if isinstance(q, netweight.CompressedTensor) else q)
    for m in (dense, model):
        m(ROWS.bfloat16()).square().mean().backward()
    assert [optimizer.steps for optimizer in optimizers] == [1, 1]
    assert not differing(dense, model)


def test_what_leaves_the_device_has_its_checks(counts, tmp_path):
    dense, model = pair(stack, torch.bfloat16)
    with torch.no_grad():
        for m in (dense, model):
            m[0].weight.add_(1)
    weight = model[0].weight
    assert not read_index(blob_of(weight.payload)).checks.any()
    expected = codec.encode(dense[0].weight, chunk_log2=weight.stored.chunk_log2, gpu_modes=True)  # as devices write it
    assert bytes(weight.stored.blob) == expected
    assert bytes(blob_of(weight.to("cpu", copy=True).payload)) == expected
    assert bytes(blob_of(pickle.loads(pickle.dumps(weight)).payload)) == expected
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert bytes(blob_of(torch.load(file, weights_only=True)["0.weight"].payload)) == expected
    netweight.save_checkpoint(tmp_path / "now.safetensors", model)
    other = copy.deepcopy(model)
    netweight.load_checkpoint(tmp_path / "now.safetensors", other)
    assert not differing(dense, other)


def test_copies_of_a_weight_are_looked_at_once(counts):
    """As weights are that come from the CPU for their layer, pass after pass."""
    weight = torch.randn(64, 64)
    kept = copy.deepcopy(netweight.CompressedTensor.of(weight))
    for _ in range(3):
        assert same(kept.to("cpu", copy=True).dense(), weight)
    assert counts.looked == counts.waited == 1
    with torch.no_grad():
        kept.copy_(weight + 1)
    assert same(kept.to("cpu", copy=True).dense(), weight + 1)
    assert counts.looked == counts.waited == 1


def test_level_max_and_settings_go_to_the_encoder(counts):
    weight = torch.randn(100, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    for level, chunk_log2 in (("fast", 10), ("max", None), ("default", 12)):
        box = CompressedStorage.of(weight, level=level, chunk_log2=chunk_log2)
        assert bytes(box.blob) == codec.encode(weight, level=level, chunk_log2=box.chunk_log2, gpu_modes=True)
        box.write(weight * 2)
        assert bytes(box.blob) == codec.encode(weight * 2, level=level, chunk_log2=box.chunk_log2, gpu_modes=True)
    assert counts.looked == 0


def test_a_write_without_memory_leaves_the_weight_as_it_was(counts, monkeypatch):
    weight = torch.randn(300, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    box = CompressedStorage.of(weight, chunk_log2=10)
    memory, left = encoding._memory, []

    def limited(size, place):
        if not left:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        left.pop()
        return memory(size, place)

    monkeypatch.setattr(encoding, "_memory", limited)
    for allowed in range(5):
        left[:] = [None] * allowed
        with pytest.raises(OutOfMemory, match=r"shape \(300, 64\)"):
            box.write(weight * 2)
        assert same(box.dense(), weight)
    left[:] = [None] * 5  # what kernels pass on, and the working memory of all waves
    box.write(weight * 2)
    assert same(box.dense(), weight * 2)


def test_a_weight_that_outgrows_its_payload(counts):
    weight = torch.zeros(64, 64)
    box = CompressedStorage.of(weight)
    assert same(device.decoder_of(CPU).weight(box.payload), weight)
    noise = torch.randn(64, 64)
    box.write(noise)
    assert same(device.decoder_of(CPU).weight(box.payload), noise)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["BF16", "F32", "F64", "C64", "I8", "BOOL", "F8_E5M2", "C32"]),
    st.lists(st.integers(0, 40), max_size=3),
    st.sampled_from([None, 10]),
)
def test_layouts_of_what_was_encoded_here_are_those_that_one_would_read(dtype, shape, chunk_log2):
    tensor = torch.zeros(shape, dtype=torch_dtype(dtype))
    encoded = codec.encode(tensor, chunk_log2=chunk_log2, gpu_modes=True)
    blob = torch.from_numpy(np.frombuffer(encoded, np.uint8).copy())
    made, read = cuda.layout_of_encoded(blob, tensor, chunk_log2=chunk_log2), cuda.layout_of(blob)
    assert made == read
    assert made.starts.equal(read.starts)


def test_pieces_of_a_gather_are_decoded_in_one_launch(counts, monkeypatch):
    weight = torch.randn(13, 40, generator=torch.Generator().manual_seed(4)).bfloat16()
    padded = [weight[:5], weight[5:10], torch.cat([weight[10:], torch.zeros(2, 40).bfloat16()])]
    buffers = []
    for rows, piece in zip((5, 5, 3), padded, strict=True):
        stored = CompressedStorage.of(piece)
        stored.wire = fsdp._Wire(capacity=4096)
        (buffer,), _ = fsdp.before_gather(stored, rows, SimpleNamespace(get_group=lambda: None))
        buffers.append(buffer)
    pieces, launched = torch.stack(buffers), []
    launch = launching.launch
    monkeypatch.setattr(launching, "launch", lambda *given, **more: (launched.append(given[1]), launch(*given, **more)))
    _, *described = fsdp._described(pieces)
    dense = torch.empty_like(weight)
    fsdp._decode_all(pieces, *described, torch.bfloat16, dense)
    assert same(dense, weight)
    assert launched == ["decode_chunks"]
    assert counts.looked == counts.waited == 0
    pieces[1, 114] = 200  # the mode of its first plane
    fsdp._decode_all(pieces, *described, torch.bfloat16, dense)
    with pytest.raises(CorruptBlob):
        netweight.check_device()


def test_layouts_go_to_other_devices_with_their_payloads():
    elsewhere = torch.device("meta")
    for weight, mantissa_bits in ((torch.randn(100, 64), 7), (torch.randn(100, 64), 3)):
        blob = codec.encode_lossy(weight, mantissa_bits=mantissa_bits)
        blob = torch.from_numpy(np.frombuffer(blob, np.uint8).copy())
        layout = (cuda.layout_of if mantissa_bits == 7 else cuda.lossy_layout_of)(blob)
        there = device._layout_on(layout, elsewhere)
        parts = [there] if mantissa_bits == 7 else [there.words.layout, there.normalizers.layout]
        assert all(part.starts.device == elsewhere for part in parts)
        assert there == layout


def test_weights_of_files_are_cut_anew_for_the_device(counts):
    weight = torch.randn(300, 500, generator=torch.Generator().manual_seed(1)).bfloat16()
    box = CompressedStorage.of(weight, chunk_log2=17)
    box.transcode(fixed=False)
    assert cuda.layout_of(box.payload[device.LENGTH :][: len(blob_of(box.payload))]).chunk_log2 == 14
    assert same(box.dense(), weight)
    payload = box.payload
    box.transcode(fixed=False)
    assert box.payload is payload
    for kept in ({"level": "max", "chunk_log2": 17}, {"chunk_log2": 10}):
        other = CompressedStorage.of(weight, **kept)
        other.transcode(fixed=False)
        assert other.chunk_log2 == kept["chunk_log2"]


# ---- parts of weights ------------------------------------------------------------------------------------------------


def test_one_row_of_many_decodes_no_more_than_its_chunks(counts):
    draw = torch.Generator().manual_seed(2)
    for dtype in (torch.bfloat16, torch.float32, torch.complex64, torch.int8):
        weight = (torch.randn(6, 10, 100, generator=draw) * 50).to(dtype)
        box = CompressedStorage.of(weight, chunk_log2=10)
        tensor = netweight.CompressedTensor(box)
        assert len(counts.chunks) == 0
        for row in (0, 5, 2, -1):
            assert same(tensor[row].dense(), weight[row])
        assert counts.chunks == []  # which the whole weight's decoding counts
        assert counts.waited == 0
    assert same(tensor[3][2:4].dense(), weight[3][2:4])


def test_the_first_row_of_unknown_bytes_checks_them_all(counts):
    weight = torch.randn(6, 1000).bfloat16()
    tensor = netweight.CompressedTensor(copy.deepcopy(netweight.CompressedTensor.of(weight, chunk_log2=10)).stored)
    assert same(tensor[4].dense(), weight[4])
    assert (counts.waited, counts.chunks) == (1, [6])
    assert same(tensor[5].dense(), weight[5])
    assert (counts.waited, counts.chunks) == (1, [6])


def test_an_embedding_decodes_the_chunks_of_its_rows(counts):
    dense, model = pair(lambda: nn.Embedding(5000, 64), torch.bfloat16)
    ids = torch.tensor([[3, 4999], [77, 3]])
    assert same(model(ids), dense(ids))
    assert same(step_embedding(model, ids), step_embedding(dense, ids))
    assert counts.chunks == []  # which the whole weight's decoding counts
    assert same(model(torch.arange(5000)), dense(torch.arange(5000)))
    assert len(counts.chunks) == 1
    with torch.no_grad():
        model(torch.tensor([5000]))
    with pytest.raises(IndexError, match="a row that it does not have"):
        netweight.check_device()


def step_embedding(model, ids):
    model(ids).float().square().sum().backward()
    return model.weight.grad


# ---- damage ----------------------------------------------------------------------------------------------------------


def damage(model, layer=1):
    """Damage a weight's bytes as faulty memory does: nobody knows."""
    blob = blob_of(model[layer].weight.payload)
    blob[codec.info(blob).chunk_offsets[0]] = 77  # the mode of a plane


def test_damaged_bytes_are_refused_when_they_are_first_decoded(counts):
    _, made = pair(stack)
    model = copy.deepcopy(made)
    damage(model)
    with pytest.raises(CorruptBlob, match="unknown mode"):
        model(ROWS)
    netweight.check_device()  # told already


def test_later_damage_is_told_by_check_device_and_at_the_end_of_a_block(counts):
    _, model = pair(stack)
    model(ROWS)
    netweight.check_device()
    damage(model)
    model(ROWS)
    with pytest.raises(CorruptBlob, match="on cpu was found damaged after it had been decoded well"):
        netweight.check_device()
    with pytest.raises(CorruptBlob), netweight.decode_ahead():
        model(ROWS)
    netweight.check_device("cpu")  # another check begins anew
    netweight.check_device("cuda")


def test_later_damage_is_told_some_layers_late_without_being_asked(counts):
    _, model = pair(stack)
    model(ROWS)
    damage(model)
    with pytest.raises(CorruptBlob):
        [model(ROWS) for _ in range(10)]


def test_later_damage_of_rounded_weights_is_told(counts):
    torch.manual_seed(0)
    model = stack().bfloat16()
    netweight.compress_(model, mantissa_bits=3)
    x = ROWS.bfloat16()
    model(x)
    blob = blob_of(model[1].weight.payload)
    layout = device._found(model[1].weight.payload).layout
    words = layout.words
    blob[words.start + words.layout.payload_at] = 0  # the mode of a plane: words that stand for no number
    model(x)
    with pytest.raises(CorruptBlob):
        netweight.check_device()


def test_bytes_that_others_write_are_looked_at_again(counts):
    dense, made = pair(stack)
    model = copy.deepcopy(made)
    model(ROWS)
    assert counts.looked == 4
    payload, other = model[2].weight.payload, made[1].weight.payload
    size = min(len(payload), len(other))
    payload[:size] = other[:size]
    dense[2].weight.data.copy_(dense[1].weight.data)
    assert same(model(ROWS), dense(ROWS))
    assert (counts.looked, counts.waited) == (5, 5)
    payload.fill_(255)
    with pytest.raises(CorruptBlob, match="states a length of"):
        model(ROWS)


# ---- errors and fallbacks --------------------------------------------------------------------------------------------


@pytest.fixture
def no_kernels(monkeypatch):
    """A process whose GPU has no kernels: the bytes of what is there are the CPU's to decode and to encode."""
    monkeypatch.setattr(cuda, "unavailable_because", lambda: "NVRTC is missing.")
    device._kernels_run.cache_clear()
    yield
    device._kernels_run.cache_clear()


def test_without_kernels_payloads_on_a_gpu_are_not_handled_which_is_said_once(no_kernels):
    with FakeTensorMode():
        payload = torch.empty(64, dtype=torch.uint8, device="cuda")
    with pytest.warns(RuntimeWarning, match=r"decoded on the CPU and copied.*NVRTC is missing"):
        assert not device.handles(payload)
    assert not device.handles(payload)  # a second warning would be an error
    assert device.encode(payload, "default", None) is None


def test_without_kernels_the_cpu_decodes_and_encodes(counts, monkeypatch):
    dense, model = pair(stack, torch.bfloat16)
    monkeypatch.setattr(device, "handles", lambda payload: False)
    monkeypatch.setattr(device, "_decoders", {})
    x = ROWS.bfloat16()
    assert_steps_alike(dense, model, x)
    with netweight.decode_ahead():
        for m in (dense, model):
            with torch.no_grad():
                m[0].weight.mul_(2)
        assert_steps_alike(dense, model, x)
    assert counts.chunks == []
    assert device._decoders == {}
    assert read_index(blob_of(model[0].weight.payload)).checks.all()  # the host's encoder writes them
    netweight.check_device()
    damage(model)
    for _ in range(2):  # each decoding is checked
        with pytest.raises(CorruptBlob, match="unknown mode"):
            model(x)


def test_a_graph_cannot_be_captured_before_weights_were_looked_at(counts, monkeypatch):
    dense, made = pair(stack)
    model = copy.deepcopy(made)
    monkeypatch.setattr(device, "_is_capturing", lambda tensor: True)
    with torch.no_grad():
        with pytest.raises(UsageError, match="Run the model once before"):
            model(ROWS)
        monkeypatch.undo()
        pretend(monkeypatch)
        model(ROWS)
        monkeypatch.setattr(device, "_is_capturing", lambda tensor: True)
        assert same(model(ROWS), dense(ROWS))


def test_without_memory_the_error_says_what_it_was_for(counts, monkeypatch):
    _, model = pair(stack)

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(cuda, "decode", full)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model(ROWS)
    assert "weight of shape (64, 64)" in caught.value.__notes__[0]
