"""The CUDA encoder on a real GPU, where there is one: the bytes of the CPU's encoder, and what only a GPU can show."""

import struct

import numpy as np
import pytest
import torch
from blobs_under_test import KINDS, tensor_data

from netweight import codec
from netweight.codec import cuda
from netweight.codec.cuda import encoding
from netweight.codec.header import TORCH_NAMES, torch_dtype

reason = cuda.unavailable_because()
pytestmark = pytest.mark.skipif(reason is not None, reason=f"CUDA kernels cannot run here: {reason}")
DTYPES = [name for name, torch_name in TORCH_NAMES.items() if torch_name is not None and hasattr(torch, torch_name)]


def made(name, count, kind, seed):
    data = tensor_data(name, count, kind, np.random.default_rng(seed))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(torch_dtype(name)).cuda()


def same(tensor, **options):
    blob = cuda.encode(tensor, **options)
    assert blob.device == tensor.device
    assert blob.cpu().numpy().tobytes() == codec.encode(tensor, **options, gpu_modes=True)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("level", ["fast", "default", "high", "max"])
@pytest.mark.parametrize("name", DTYPES)
def test_every_type_and_kind_of_data(name, level):
    for seed, kind in enumerate(KINDS):
        for count in (1, 64, 257, 3000, 70_000):
            same(made(name, count, kind, seed), level=level, chunk_log2=10 + seed)


@pytest.mark.parametrize("name", ["U8", "BF16", "F16", "F32", "F64"])
def test_large_tensors(name):
    for kind in KINDS:
        same(made(name, 5_000_003, kind, 7))


def test_many_waves(monkeypatch):
    tensor = made("F32", 3_000_000, "weights", 3)
    for scratch in (1, 8 << 20):
        monkeypatch.setattr(encoding, "SCRATCH_BYTES", scratch)
        same(tensor, chunk_log2=13)


def test_views():
    base = (torch.randn(600, 100, device="cuda") * 0.01).bfloat16()
    for tensor in (base.T, base[1:, 3:], base.reshape(-1)[1:], base[:, ::2], base[0, 0], base[:0]):
        same(tensor)


def test_decoding_gives_the_tensor_back():
    tensor = (torch.randn(2048, 2048, device="cuda") * 0.02).bfloat16()
    blob = cuda.encode(tensor, checks=False)
    assert torch.equal(cuda.decode(blob, cuda.layout_of(blob)), tensor)
    assert cuda.with_checks(blob).cpu().numpy().tobytes() == codec.encode(tensor, gpu_modes=True)
    assert cuda.with_checks(blob, tensor).cpu().numpy().tobytes() == codec.encode(tensor, gpu_modes=True)


def test_a_payload_is_filled_without_waiting_and_follows_the_stream():
    tensor = (torch.randn(1024, 1024) * 0.02).bfloat16()
    whole = codec.encode(tensor, gpu_modes=True)
    on_gpu, status = torch.zeros_like(tensor, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    source, payload = tensor.cuda(), torch.full((8 + len(whole) + 77,), 5, dtype=torch.uint8, device="cuda")
    cuda.encode(on_gpu)  # the kernels are loaded
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # the copy is late, and encoding has to wait for it
        on_gpu.copy_(source)
        cuda.encode_into(on_gpu, payload, checks=True, status=status)
        assert not stream.query()
    stream.synchronize()
    assert payload.cpu().numpy().tobytes() == struct.pack("<Q", len(whole)) + whole + bytes(77)
    assert status.item() == 0


def test_a_payload_that_is_too_small():
    tensor = (torch.randn(512, 512, device="cuda") * 0.02).bfloat16()
    payload, status = (
        torch.ones(1000, dtype=torch.uint8, device="cuda"),
        torch.zeros(1, dtype=torch.int32, device="cuda"),
    )
    cuda.encode_into(tensor, payload, status=status)
    assert status.item() == 1
    assert not payload.any()


def test_a_payload_can_be_filled_again_by_a_graph():
    tensor = (torch.randn(512, 512, device="cuda") * 0.02).bfloat16()
    payload = torch.empty(8 + cuda.largest_blob(tensor), dtype=torch.uint8, device="cuda")
    status = torch.zeros(1, dtype=torch.int32, device="cuda")
    cuda.encode_into(tensor, payload, status=status)  # the kernels are loaded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda.encode_into(tensor, payload, status=status)
    tensor.mul_(3)
    graph.replay()
    blob = payload[8 : 8 + int.from_bytes(payload[:8].cpu().numpy().tobytes(), "little")]
    assert torch.equal(codec.decode(blob), tensor.cpu())
