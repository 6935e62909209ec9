"""The kernels on a real GPU, where there is one: what the emulator's tests assert, and what only a GPU can show."""

import blobs_on_devices as on_devices
import numpy as np
import pytest
import torch
from blobs_under_test import handmade, tensor_data

from netweight import codec
from netweight.codec import cuda

reason = cuda.unavailable_because()
pytestmark = pytest.mark.skipif(reason is not None, reason=f"CUDA kernels cannot run here: {reason}")
DEVICE = "cuda"


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_golden_blobs_are_decoded():
    on_devices.assert_golden_blobs_are_decoded(DEVICE)


def test_golden_blobs_are_refused():
    on_devices.assert_golden_blobs_are_refused(DEVICE)


def test_streams_are_decoded():
    on_devices.assert_streams_are_decoded(DEVICE)


def test_plans_decode():
    on_devices.assert_plans_decode(DEVICE)


def test_every_split_and_number_of_streams():
    for name, blob, data in handmade(np.random.default_rng(3)):
        assert on_devices.decoded(blob, DEVICE) == data, name


@pytest.mark.parametrize("chunk_log2", [15, 18])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_large_tensors_are_decoded(dtype, chunk_log2):
    data = tensor_data(dtype, 1 << 24, "weights", np.random.default_rng(8))
    blob = codec.encode_raw(data, dtype, (4096, 4096), level="fast", chunk_log2=chunk_log2, threads=8)
    assert on_devices.decoded(blob, DEVICE) == data


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_what_is_damaged_is_refused_as_the_codec_does_it():
    for damaged in on_devices.damaged_blobs(np.random.default_rng(12), 1500):
        on_devices.assert_decoded_alike(damaged, DEVICE)


def test_decoding_does_not_wait_and_follows_the_stream():
    data = torch.randn(1 << 20).to(torch.bfloat16)
    blob = on_devices.placed(codec.encode(data), DEVICE)
    layout, status = cuda.layout_of(blob), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        copy = torch.zeros_like(blob)
        torch.cuda._sleep(50_000_000)  # the copy is late, and decoding has to wait for it
        copy.copy_(blob)
        out = cuda.decode(copy, layout, status=status)
        assert not stream.query()
    stream.synchronize()
    cuda.raise_if_corrupt(status)
    assert torch.equal(out.cpu(), data)


def test_a_decoder_can_be_captured_in_a_graph():
    data = torch.randn(100_000).to(torch.bfloat16)
    blob = on_devices.placed(codec.encode(data), DEVICE)
    layout, status = cuda.layout_of(blob), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    out = cuda.decode(blob, layout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda.decode(blob, layout, out=out, status=status)
    out.zero_()
    graph.replay()
    assert torch.equal(out.cpu(), data)
