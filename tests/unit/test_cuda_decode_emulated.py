"""The kernels that decode, run on the CPU from their own source: they must agree with the codec on every blob.

Blobs and outputs lie next to forbidden pages, so that a byte read or written too far fails a test.
"""

import blobs_on_devices as on_devices
import emulated_kernels
import numpy as np
import pytest
import torch
from blobs_on_devices import assert_decoded_alike, decoded
from blobs_under_test import KINDS, LEVELS, handmade, skewed, tensor_data
from hypothesis import given, settings
from hypothesis import strategies as st

from netweight import codec
from netweight.codec import cuda
from netweight.codec.cuda import launching
from netweight.errors import CorruptBlob, OutOfMemory, Unsupported, UsageError

seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True, scope="module")
def emulator():
    """Launches go to the emulator, the way round that a test can choose."""
    emulated_kernels.require_compiler()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launching, "launch", emulated_kernels.launch)
        yield patch


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_golden_blobs_are_decoded():
    on_devices.assert_golden_blobs_are_decoded("cpu")


def test_golden_blobs_are_refused():
    on_devices.assert_golden_blobs_are_refused("cpu")


def test_streams_are_decoded():
    on_devices.assert_streams_are_decoded("cpu")


def test_plans_decode():
    on_devices.assert_plans_decode("cpu")


def test_every_split_and_number_of_streams():
    for name, blob, data in handmade(np.random.default_rng(3)):
        assert decoded(blob, "cpu") == data, name


@settings(max_examples=25)
@given(
    st.sampled_from(on_devices.IN_TORCH), st.integers(0, 900), st.sampled_from(KINDS), st.sampled_from(LEVELS),
    st.sampled_from([None, 10, 11]), st.sampled_from(["start", "end"]), seeds,
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_what_is_encoded_is_decoded(dtype, quads, kind, level, chunk_log2, at, seed):
    data = tensor_data(dtype, 4 * quads, kind, np.random.default_rng(seed))
    blob = codec.encode_raw(data, dtype, (quads, 4), level=level, chunk_log2=chunk_log2)
    assert decoded(blob, "cpu", at) == data


@settings(max_examples=10)
@given(st.sampled_from([1, 2]), st.integers(1, 40_000), st.sampled_from(LEVELS), seeds)
def test_rare_symbols_are_patched(width, count, level, seed):
    elements = skewed(count, width, np.random.default_rng(seed))
    assert decoded(codec.encode(elements, level=level), "cpu") == elements.tobytes()


def test_what_is_damaged_is_refused_as_the_codec_does_it():
    rng = np.random.default_rng(11)
    for damaged in on_devices.damaged_blobs(rng, 1500):
        assert_decoded_alike(damaged, "cpu", "start" if rng.integers(2) else "end")


@pytest.mark.study
@pytest.mark.parametrize("seed", range(20))
def test_much_that_is_damaged_is_refused_as_the_codec_does_it(seed):
    rng = np.random.default_rng(seed)
    for damaged in on_devices.damaged_blobs(rng, 3000):
        assert_decoded_alike(damaged, "cpu", "start" if rng.integers(2) else "end")


def test_the_order_of_threads_does_not_matter(emulator):
    def backwards(*arguments, **options):
        emulated_kernels.launch(*arguments, **options, backwards=True)

    emulator.setattr(launching, "launch", backwards)
    try:
        on_devices.assert_streams_are_decoded("cpu", ((40_000, 15),))
        for name, blob, data in handmade(np.random.default_rng(4)):
            assert decoded(blob, "cpu") == data, name
        on_devices.assert_plans_decode("cpu")
    finally:
        emulator.setattr(launching, "launch", emulated_kernels.launch)


def test_layouts_say_what_headers_say():
    tensor = torch.randn(30, 70).to(torch.bfloat16)
    blob = codec.encode(tensor, level="fast", chunk_log2=10)
    layout, info = cuda.layout_of(on_devices.placed(blob, "cpu")), codec.info(blob)
    assert (layout.dtype, layout.shape, layout.nbytes) == (torch.bfloat16, (30, 70), 4200)
    assert (layout.numbers, layout.chunk_log2, layout.chunks, layout.level) == (2100, 10, 3, "fast")
    assert (layout.size, layout.payload_at) == (len(blob), info.chunk_offsets[0])
    assert layout.index_at == layout.payload_at - 36
    assert tuple(layout.starts.tolist()) == info.chunk_offsets


def test_long_indices_are_read_whole():
    tensor = torch.zeros(1024 * 17_000, dtype=torch.uint8)  # its index does not fit what is fetched first
    layout = cuda.layout_of(on_devices.placed(codec.encode(tensor, chunk_log2=10), "cpu"))
    assert layout.chunks == 17_000
    assert layout.starts[-1] == layout.size


def test_lossy_blobs_have_no_layout():
    blob = codec.encode_lossy(torch.randn(2000).to(torch.bfloat16), mantissa_bits=2)
    with pytest.raises(Unsupported, match="lossy"):
        cuda.layout_of(on_devices.placed(blob, "cpu"))


def test_arguments_that_do_not_fit_are_told():
    blob = on_devices.placed(codec.encode(torch.arange(2000)), "cpu")
    layout = cuda.layout_of(blob)
    with pytest.raises(UsageError, match="contiguous uint8"):
        cuda.layout_of(blob.to(torch.int8))
    for out in (torch.empty(2000), torch.empty(2, 1000, dtype=torch.int64), torch.empty(4000, dtype=torch.int64)[::2]):
        with pytest.raises(UsageError, match="output must be"):
            cuda.decode(blob, layout, out=out)
    with pytest.raises(UsageError, match="the size of its layout"):
        cuda.decode(blob[:-1], layout)
    for blobs, layouts, outs in (([], [], None), ([blob], [], None), ([blob], [layout], [])):
        with pytest.raises(UsageError, match="one layout"):
            cuda.DecodePlan(blobs, layouts, outs)


def test_a_tensor_that_has_no_room_is_named(monkeypatch):
    blob = on_devices.placed(codec.encode(torch.zeros(8, 1000)), "cpu")
    layout = cuda.layout_of(blob)

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(OutOfMemory, match=r"shape \(8, 1000\), 32\.0 kB") as caught:
        cuda.decode(blob, layout)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_the_layout_names_where_things_lie():
    weight = torch.randn(40, 100, generator=torch.Generator().manual_seed(2)).bfloat16()
    blob = codec.encode(weight, level="fast", chunk_log2=10)
    layout, info = cuda.layout_of(torch.frombuffer(bytearray(blob), dtype=torch.uint8)), codec.info(blob)
    assert (layout.dtype, layout.shape, layout.nbytes, layout.numbers) == (torch.bfloat16, (40, 100), 8000, 4000)
    assert (layout.chunk_log2, layout.chunks, layout.size, layout.level) == (10, 4, len(blob), "fast")
    assert (layout.index_at, layout.payload_at) == (info.chunk_offsets[0] - 48, info.chunk_offsets[0])


@pytest.mark.parametrize(("width", "chunk_log2"), [(64, 10), (100, 10), (1500, 10), (3, 11), (4096, 10)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_decoded_from_their_chunks_alone(width, chunk_log2, dtype):
    rows = 80_000 // width
    weight = torch.randn(rows, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    blob = on_devices.placed(codec.encode(weight, chunk_log2=chunk_log2, gpu_modes=True), "cpu")
    layout, status = cuda.layout_of(blob), torch.zeros(1, dtype=torch.int32)
    ids = torch.tensor([[0, rows - 1], [rows // 3, 0]], dtype=torch.int32)
    assert torch.equal(cuda.decode_rows(blob, layout, ids, status), weight[ids])
    assert cuda.decode_rows(blob, layout, ids[:0], status).shape == (0, 2, width)
    assert not status
    assert cuda.decode_rows(blob, layout, torch.arange(rows), status) is None
    for outside in (-1, rows):
        found = cuda.decode_rows(blob, layout, torch.tensor([1, outside]), status)
        assert torch.equal(found[0], weight[1])
        assert status == cuda.NO_SUCH_ROW
    blob[int(layout.starts[0])] = 77  # the mode of a plane
    cuda.decode_rows(blob, layout, torch.tensor([0]), status.zero_())
    with pytest.raises(CorruptBlob, match="unknown mode"):
        cuda.raise_if_corrupt(status)
