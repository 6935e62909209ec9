"""Compressed models on a real GPU, where there is one: what `test_device_runtime.py` tries on a pretended device."""

import copy

import pytest
import torch
from models_under_test import Picture, Tied, pair, same, stack, step
from torch import nn

import netweight
from netweight import CompressedTensor, codec
from netweight.codec import cuda
from netweight.errors import CorruptBlob
from netweight.methods.compress.runtime import cuda as device
from netweight.methods.compress.runtime.storage import CompressedStorage

reason = cuda.unavailable_because()
pytestmark = pytest.mark.skipif(reason is not None, reason=f"CUDA kernels cannot run here: {reason}")

IDS = torch.randint(0, 300, (3, 7), generator=torch.Generator().manual_seed(3))
PICTURE = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))
ROWS = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def the_same_kernels_each_time():
    """Gradients of convolutions are added up in any order otherwise."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        yield


def on_gpu(make, dtype=torch.float32, index=0):
    """The same model twice on a GPU: dense, and compressed on the host and moved there."""
    dense, model = pair(make, dtype)
    return dense.to(f"cuda:{index}"), model.to(f"cuda:{index}")


def assert_steps_alike(dense, model, x):
    for one, other in zip(step(dense, x), step(model, x), strict=True):
        assert same(one.cpu(), other.cpu())
    for p, q in zip(dense.parameters(), model.parameters(), strict=True):
        assert same(p.grad.cpu(), q.grad.cpu())


def assert_alike(dense, model):
    for p, q in zip(dense.parameters(), model.parameters(), strict=True):
        q = q.dense() if isinstance(q, CompressedTensor) else q
        assert same(p.detach().cpu(), q.detach().cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("make", "x"), [(Tied, IDS), (Picture, PICTURE), (stack, ROWS)])
def test_outputs_and_gradients_are_equal_to_the_last_bit(make, x, dtype):
    dense, model = on_gpu(make, dtype)
    x = (x.to(dtype) if x.is_floating_point() else x).cuda()
    assert_steps_alike(dense, model, x)
    with netweight.decode_ahead() as ahead:
        for _ in range(4):
            assert_steps_alike(dense, model, x)
    assert ahead.hits > 4


def large():
    """Layers large enough that decoding takes longer than asking for it."""
    torch.manual_seed(0)
    layers = [nn.Linear(2048, 2048, bias=False) for _ in range(6)]
    for layer in layers:
        nn.init.normal_(layer.weight, std=0.02)
    return nn.Sequential(*layers)


def test_large_layers_decoded_ahead_many_times():
    dense, model = on_gpu(large, torch.bfloat16)
    x = torch.randn(512, 2048, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), netweight.decode_ahead() as ahead:
        wanted = dense(x)
        for _ in range(50):
            assert model(x).equal(wanted)
    assert ahead.hits > 280


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_from_the_second_pass_on_the_host_waits_for_nothing():
    dense, model = on_gpu(large, torch.bfloat16)
    x = torch.randn(64, 2048, device="cuda", dtype=torch.bfloat16)
    ids = torch.arange(20, device="cuda")
    _, tied = on_gpu(Tied)
    with torch.no_grad(), netweight.decode_ahead():
        wanted = dense(x)
        model(x), model(x), tied(ids)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            results = [model(x) for _ in range(4)]
            tied(ids)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(result.equal(wanted) for result in results)


@pytest.mark.parametrize("ahead", [False, True])
def test_training_is_that_of_the_dense_model(ahead):
    dense, model = on_gpu(stack, torch.bfloat16)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, foreach=False) for m in (dense, model)]
    x = ROWS.bfloat16().cuda()
    passes = netweight.decode_ahead() if ahead else torch.enable_grad()
    with passes:
        for _ in range(4):
            assert_steps_alike(dense, model, x)
            for optimizer in optimizers:
                optimizer.step()
    assert_alike(dense, model)


def test_layerwise_training_is_that_of_the_dense_model():
    dense, model = on_gpu(stack)
    for m in (dense, model):
        netweight.LayerwiseOptimizer(m, torch.optim.AdamW, lr=0.01)
        with netweight.decode_ahead():
            for _ in range(3):
                m(ROWS.cuda()).square().mean().backward()
    assert_alike(dense, model)


def test_blobs_encoded_on_the_gpu_are_the_hosts_when_they_leave_it():
    weight = torch.randn(700, 512, device="cuda").bfloat16()
    tensor = CompressedTensor.of(weight)
    with torch.no_grad():
        tensor.mul_(2)
    chunk_log2 = device.chunk_log2_of(weight.numel())
    assert bytes(tensor.stored.blob) == codec.encode(weight * 2, gpu_modes=True, chunk_log2=chunk_log2)
    assert same(tensor.cpu().dense(), (weight * 2).cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounded_weights(dtype):
    weight = torch.randn(300, 500) * torch.exp(3 * torch.randn(300, 500))
    weight[5, :7] = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1e-40, -65504.0, 3e38])
    for mantissa_bits in range(7):
        blob = codec.encode_lossy(weight.to(dtype), mantissa_bits=mantissa_bits)
        there = torch.frombuffer(bytearray(blob), dtype=torch.uint8).cuda()
        decoded, damaged = cuda.decode_lossy(there, cuda.lossy_layout_of(there))
        assert not damaged
        assert same(decoded.cpu(), codec.decode(blob))


@pytest.fixture
def no_kernels(monkeypatch):
    monkeypatch.setattr(cuda, "unavailable_because", lambda: "NVRTC is missing.")
    device._kernels_run.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"decoded on the CPU and copied.*NVRTC is missing"):
        yield
    device._kernels_run.cache_clear()


@pytest.mark.parametrize(("make", "x"), [(Tied, IDS), (Picture, PICTURE), (stack, ROWS)])
def test_without_kernels_bytes_go_to_the_cpu_and_weights_come_back(make, x, no_kernels):
    dense, model = on_gpu(make)
    x = x.cuda()
    assert_steps_alike(dense, model, x)
    with netweight.decode_ahead() as ahead:
        for _ in range(2):
            assert_steps_alike(dense, model, x)
    assert ahead.hits == 0


def test_without_kernels_every_kind_of_weight_comes_back(no_kernels):
    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.complex64):
        weight = (torch.randn(6, 100, 300) * 20).to(dtype).cuda()
        for level in ("fast", "default", "high", "max"):
            tensor = CompressedTensor.of(weight, level=level, chunk_log2=12)
            assert tensor.stored.payload.is_cuda
            assert same(tensor.dense().cpu(), weight.cpu())
            assert same(tensor[4].dense().cpu(), weight[4].cpu())
            assert bytes(tensor.stored.blob) == codec.encode(weight, level=level, chunk_log2=12)
    rounded = CompressedStorage.of(weight.real.contiguous(), precision=codec.Precision(3))
    assert same(rounded.dense().cpu(), codec.decode(rounded.blob))


def test_without_kernels_training_and_damage(no_kernels):
    dense, model = on_gpu(stack, torch.bfloat16)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, foreach=False) for m in (dense, model)]
    x = ROWS.bfloat16().cuda()
    for _ in range(3):
        assert_steps_alike(dense, model, x)
        for optimizer in optimizers:
            optimizer.step()
    assert_alike(dense, model)
    payload = model[1].weight.payload
    payload[device.LENGTH + codec.info(model[1].weight.stored.blob).chunk_offsets[0]] = 77
    for _ in range(2):
        with pytest.raises(CorruptBlob, match="unknown mode"):
            model(x)


def test_rows_of_a_weight():
    weight = torch.randn(6, 100, 512).bfloat16()
    tensor = CompressedTensor.of(weight, chunk_log2=12).cuda()
    for row in range(6):
        assert same(tensor[row].dense().cpu(), weight[row])


def test_damage_in_memory_is_told():
    _, model = on_gpu(stack)
    x = ROWS.cuda()
    model(x)
    netweight.check_device()
    payload = model[1].weight.payload
    layout = device._found(payload).layout
    with torch.autograd._unsafe_preserve_version_counter(payload):
        payload[device.LENGTH + layout.payload_at] = 77
    model(x)
    with pytest.raises(CorruptBlob, match="after it had been decoded well"):
        netweight.check_device("cuda")
    with pytest.raises(CorruptBlob, match="unknown mode"):
        copy.deepcopy(model)(x)


def test_a_captured_graph():
    dense, model = on_gpu(large, torch.bfloat16)
    x = torch.randn(16, 2048, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), netweight.decode_ahead():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(x), dense(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        for _ in range(3):
            x.normal_()
            graph.replay()
            assert y.equal(dense(x))


def test_memory_of_a_pass_is_that_of_two_weights():
    _, model = on_gpu(large, torch.bfloat16)
    x = torch.randn(1, 2048, device="cuda", dtype=torch.bfloat16)
    weight = 2048 * 2048 * 2
    for block, most in ((torch.no_grad(), 1.5), (netweight.decode_ahead(), 2.5)):
        with block, torch.no_grad():
            model(x)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model(x), model(x)
            assert torch.cuda.max_memory_allocated() - before < most * weight


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_two_devices():
    dense, model = on_gpu(stack)
    for m in (dense, model):
        m[2:].to("cuda:1")

    def run(m, x):
        return m[2:](m[:2](x.to("cuda:0")).to("cuda:1"))

    with torch.no_grad(), netweight.decode_ahead() as ahead:
        for _ in range(4):
            assert same(run(dense, ROWS).cpu(), run(model, ROWS).cpu())
    assert ahead.hits > 8
    assert set(device._decoders) >= {torch.device("cuda:0"), torch.device("cuda:1")}


def test_accelerate_places_layers_by_itself():
    accelerate = pytest.importorskip("accelerate")
    dense, model = pair(stack)
    places = {"0": 0, "1": "cpu", "2": torch.cuda.device_count() - 1, "3": "cpu"}
    model = accelerate.dispatch_model(model, device_map=places, main_device=0)
    dense = accelerate.dispatch_model(dense, device_map=places, main_device=0)
    with torch.no_grad(), netweight.decode_ahead():
        for _ in range(3):
            assert same(model(ROWS).cpu(), dense(ROWS).cpu())


def test_transformers_places_layers_by_itself(tmp_path):
    pytest.importorskip("transformers", minversion="5.23")
    from tiny_llama import tiny_llama
    from transformers import AutoModelForCausalLM

    import netweight.plugins.transformers

    model, _ = tiny_llama(layers=3)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    netweight.compress_folder(tmp_path / "plain", tmp_path / "net")
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", device_map="auto", dtype=torch.bfloat16)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "net", device_map="auto")
    assert any(isinstance(p, CompressedTensor) and p.is_cuda for p in loaded.parameters())
    ids = torch.arange(12, device="cuda").reshape(2, 6)
    with torch.no_grad(), netweight.decode_ahead():
        for _ in range(2):
            assert same(loaded(ids).logits.cpu(), dense(ids).logits.cpu())
