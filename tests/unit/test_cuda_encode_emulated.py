"""The CUDA encoder's bytes are those of the CPU's: its kernels run on the CPU, by the emulator."""

import re
import struct

import emulated_kernels
import numpy as np
import pytest
import torch
from blobs_on_devices import decoded as decoded_on_devices
from blobs_under_test import KINDS, tensor_data
from decoder_by_the_document import decode as by_the_document
from emulated_encoding import emulate, guarded_bytes, guarded_tensor
from emulated_kernels import KERNELS
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from netweight import codec
from netweight.codec.backend import best
from netweight.codec.cuda import encoding
from netweight.codec.header import TORCH_NAMES, HeaderWriter, read_header, torch_dtype
from netweight.codec.numpy_codec import check_of
from netweight.codec.numpy_tables import costs, gains
from netweight.errors import CorruptBlob, OutOfMemory, Unsupported, UsageError

DTYPES = [name for name, torch_name in TORCH_NAMES.items() if torch_name is not None and hasattr(torch, torch_name)]
RAW, CONSTANT, PACKED, RANS = range(4)


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    emulate(monkeypatch)


def same(tensor, **options):
    """Asserts that a tensor's blob is the CPU's, and returns it."""
    blob = encoding.encode(tensor, **options).numpy().tobytes()
    assert blob == codec.encode(tensor, **options, gpu_modes=True)
    return blob


def modes(blob):
    """Modes of the chunks' first planes."""
    return [blob[start] for start in codec.info(blob).chunk_offsets[:-1]]


def made(name, count, kind, rng):
    return guarded_tensor(tensor_data(name, count, kind, rng), torch_dtype(name))


# ---- equal bytes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["fast", "default"])
@pytest.mark.parametrize("name", DTYPES)
def test_every_type_and_kind_of_data(name, level):
    rng = np.random.default_rng(0)
    for kind in KINDS[(DTYPES.index(name) + (level == "fast")) % 2 :: 2]:  # every other; the other level has the rest
        same(made(name, int(rng.integers(600, 3000)), kind, rng), level=level, chunk_log2=10)


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025])
def test_small_tensors(count):
    rng = np.random.default_rng(count)
    for name in ("BF16", "F32", "F8_E4M3", "I64"):
        for kind in ("weights", "sparse", "noise"):
            same(made(name, count, kind, rng), chunk_log2=10)


@pytest.mark.parametrize(
    "count", [(1 << 14) - 1, 1 << 14, (1 << 16) - 1, 1 << 16, (1 << 16) + 9, (1 << 18) - 1, 1 << 18]
)
def test_sizes_at_which_streams_and_samples_change(count):
    tensor = made("BF16", count, "weights", np.random.default_rng(count))
    for level in ("fast", "default"):
        assert modes(same(tensor, level=level)) == [RANS]


def test_several_chunks_in_several_waves(monkeypatch):
    rng = np.random.default_rng(3)
    whole = codec.encode(made("F32", 10_000, "weights", rng), chunk_log2=10, gpu_modes=True)
    tensor = codec.decode(whole)
    for scratch in (1, 100_000, 1 << 28):
        monkeypatch.setattr(encoding, "SCRATCH_BYTES", scratch)
        assert same(tensor, chunk_log2=10) == whole


def test_views_shapes_and_addresses():
    base = (torch.arange(6000).reshape(60, 100) * 0.01).bfloat16()
    for tensor in (base.T, base[1:, 3:], base.reshape(-1)[1:], base[:, ::2], base.reshape(1, 60, 1, 100), base[0, 0]):
        same(tensor)
    same(torch.view_as_complex(torch.randn(300, 2)).conj())
    bytes_ = guarded_bytes(4001)
    for offset in range(8):
        same(bytes_[offset : offset + 3000])


def test_sixty_four_dimensions():
    same(torch.randn(700).bfloat16().reshape(700, *[1] * 63))


@given(
    name=st.sampled_from(DTYPES),
    kind=st.sampled_from(KINDS),
    count=st.integers(1, 5000),
    level=st.sampled_from(["fast", "default"]),
    chunk_log2=st.integers(10, 13),
    seed=st.integers(0, 1 << 32),
)
def test_any_tensor_has_the_bytes_of_the_cpu(name, kind, count, level, chunk_log2, seed):
    same(made(name, count, kind, np.random.default_rng(seed)), level=level, chunk_log2=chunk_log2)


def test_real_weights(data_folder):
    for tensor in list(load_file(data_folder / "weights" / "mtcnn_rnet.safetensors").values())[:12]:
        same(tensor)
        same(tensor.bfloat16())


def test_nothing_depends_on_the_order_of_threads(monkeypatch):
    emulate(monkeypatch, backwards=True)
    rng = np.random.default_rng(5)
    for name in ("BF16", "F32", "U8", "F64"):
        for kind in KINDS:
            same(made(name, 3000, kind, rng), chunk_log2=11)
    same(made("BF16", 70_000, "wide", rng))
    same(rare_symbols(rng))


# ---- every decision --------------------------------------------------------------------------------------------------


def rare_symbols(rng, often=0.97):
    """Weights of which some have exponents that a table does not list."""
    exponents = np.where(rng.random(65_000) < often, rng.integers(120, 123, 65_000), rng.integers(1, 200, 65_000))
    bits = exponents << 7 | rng.integers(0, 128, 65_000)
    return torch.from_numpy(bits.astype("<i2")).view(torch.bfloat16)


def test_a_constant_plane():
    assert modes(same(torch.full((5000,), 1.5).bfloat16())) == [CONSTANT]
    almost = torch.full((5000,), 7, dtype=torch.uint8)
    almost[4999] = 8
    assert modes(same(almost)) != [CONSTANT]


def test_a_raw_plane():
    assert modes(same(torch.from_numpy(np.random.default_rng(0).integers(0, 256, 5000, np.uint8)))) == [RAW]


def test_a_packed_plane():
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, 20_000, np.uint8) & np.repeat(rng.choice([0, 0x80, 0xF0, 0xFF], 200), 100)
    assert modes(same(torch.from_numpy(data.astype(np.uint8)))) == [PACKED]


def test_rare_symbols_with_codes_and_literals():
    tensor = rare_symbols(np.random.default_rng(0))
    blob = same(tensor, level="fast")
    assert modes(blob) == [RANS]
    start = codec.info(blob).chunk_offsets[0]
    runs = blob[start + 3]
    symbols = sum(blob[start + 6 + 3 * i] for i in range(runs))
    lengths = start + 4 + 3 * runs + symbols
    words = [int.from_bytes(blob[lengths + at : lengths + at + 3], "little") for at in (3, 9)]
    tail = blob[-2 * sum(words) - 29 : -2 * sum(words)]
    assert tail[0] == 14  # as many symbols with codes of their own as there can be
    codes = {code >> 12 for code in struct.unpack(f"<{sum(words)}H", blob[-2 * sum(words) :])}
    assert 14 in codes


def test_patches_far_from_each_other():
    bits = np.random.default_rng(0).integers(120 << 7, 123 << 7, 65_000)
    bits[[5, 20_000, 20_001, 64_999]] = [30 << 7, 40 << 7, 50 << 7, 30 << 7]
    blob = same(torch.from_numpy(bits.astype("<i2")).view(torch.bfloat16))
    assert struct.pack("<H", 15 << 12 | 4095) in blob


def test_too_many_patches():
    rng = np.random.default_rng(0)
    often = rng.random(60_000) < 0.9
    upper = np.where(often, rng.integers(0, 2, 60_000), rng.integers(0, 256, 60_000))
    tensor = torch.from_numpy((upper << 8 | rng.integers(0, 256, 60_000)).astype("<u2"))
    assert modes(same(tensor)) == [RAW]


@pytest.mark.parametrize(("level", "stride"), [("fast", 16), ("default", 8)])
def test_a_sample_that_misleads(level, stride):
    rng = np.random.default_rng(0)
    groups = (rng.integers(90, 130, (1 << 13, 8)) << 7 | rng.integers(0, 128, (1 << 13, 8))).astype("<i2")
    runs = np.arange((1 << 13) // stride)
    groups[runs * stride + runs % stride] = 100 << 7
    tensor = torch.from_numpy(groups.reshape(-1)).view(torch.bfloat16)
    assert modes(same(tensor, level=level)) == [RANS]


def test_wide_symbols():
    rng = np.random.default_rng(0)
    same(torch.from_numpy(np.exp(rng.standard_normal(9000) * 90)))  # nearly every symbol of twelve bits


def test_logarithms_are_those_of_the_cpu():
    source = (KERNELS / "encode_table.cuh").read_text()
    for name, expected in zip(("kGain", "kBits"), (gains(), costs(256, 255)), strict=True):
        numbers = re.search(rf"{name}\[128\] = {{(.*?)}}", source, re.DOTALL)[1]
        assert [int(number) for number in numbers.split(",") if number.strip()] == expected[:128].tolist()


# ---- checks ----------------------------------------------------------------------------------------------------------

SIZES = [*range(1, 40), 63, 64, 65, 100, 255, 256, 257, 511, 512, 513, 1000, 1023, 1024]


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("chunk_bytes", [1024, 2048, 8192])
def test_checks_of_chunks_are_those_of_the_cpu(chunk_bytes, backwards):
    """Whole chunks, and last ones of any length: one number, parts of 4 and of 256 bytes, more than are read ahead."""
    rng = np.random.default_rng(chunk_bytes)
    for chunks, last in [(1, size) for size in SIZES] + [(2, 2047), (3, 1), (3, 250), (2, 1024 + 256)]:
        data = rng.integers(0, 256, (chunks - 1) * chunk_bytes + min(last, chunk_bytes), np.uint8)
        checks = emulated_kernels.guarded(np.full(chunks, 0xA5, np.uint64), alignment=8)
        arguments = [emulated_kernels.guarded(data, alignment=4), len(data), chunk_bytes, checks]
        emulated_kernels.launch("check_chunks.cu", "check_chunks", chunks, 64, arguments, backwards=backwards)
        parts = [data[start : start + chunk_bytes] for start in range(0, len(data), chunk_bytes)]
        assert checks.tolist() == [best.check_of(part) for part in parts] == [check_of(part) for part in parts]


def test_digests_of_any_number_of_checks():
    rng = np.random.default_rng(0)
    for count in [*range(1, 34), 127, 128, 129, 130]:  # short texts, and those of one KiB and more
        same(made("U8", 1024 * count - int(rng.integers(0, 1024)), "constant", rng), chunk_log2=10)


def without_checks(blob):
    """A blob as the GPU writes it when it leaves out the checks."""
    header = read_header(blob)
    writer = HeaderWriter(header.element, header.shape, header.level, header.chunk_log2)
    writer.lengths = np.diff(header.chunk_starts).tolist()
    writer.checks = [0] * len(writer.lengths)
    return writer.header() + blob[header.chunk_starts[0] :]


def test_a_blob_without_checks():
    tensor = torch.randn(5000).bfloat16()
    blob, whole = encoding.encode(tensor, checks=False).numpy(), codec.encode(tensor, gpu_modes=True)
    assert blob.tobytes() == without_checks(whole)
    assert torch.equal(codec.decode(blob), tensor)  # its header is sound
    with pytest.raises(CorruptBlob, match="do not have the digest"):
        codec.decode(blob, check=True)


@pytest.mark.parametrize("count", [1, 3, 200, 5000])
def test_checks_that_come_later(count, monkeypatch):
    tensor = made("F32", count, "weights", np.random.default_rng(count))
    blob = encoding.encode(tensor, checks=False, chunk_log2=10)
    whole = codec.encode(tensor, chunk_log2=10, gpu_modes=True)
    assert encoding.with_checks(blob).numpy().tobytes() == whole
    assert encoding.with_checks(blob, tensor).numpy().tobytes() == whole
    monkeypatch.undo()
    assert encoding.with_checks(blob).numpy().tobytes() == whole


def test_checks_that_come_later_to_thousands_of_chunks():
    tensor = made("U8", 4_500_000, "constant", np.random.default_rng(1))
    whole = codec.encode(tensor, chunk_log2=10, gpu_modes=True)
    blob = torch.frombuffer(bytearray(without_checks(whole)), dtype=torch.uint8)
    assert encoding.with_checks(blob, tensor).numpy().tobytes() == whole


def test_checks_of_nothing():
    whole = codec.encode(torch.empty(0, 3))
    blob = torch.frombuffer(bytearray(whole), dtype=torch.uint8)
    assert encoding.with_checks(blob).numpy().tobytes() == whole


@pytest.mark.parametrize("name", ["BF16", "F32", "U8"])
@pytest.mark.parametrize("count", [1, 1023, 1025, 5001])
def test_every_decoder_reads_and_checks_the_blob(name, count):
    data = tensor_data(name, count, "weights", np.random.default_rng(count))
    blob = bytes(encoding.encode(guarded_tensor(data, torch_dtype(name)), chunk_log2=10).numpy())
    assert not read_header(blob).cpu_modes
    for path in (*codec.available_paths(), "python"):
        assert codec.decode_raw(blob, check=True, path=path).tobytes() == data
    assert by_the_document(blob) == data
    assert decoded_on_devices(blob, "cpu") == data


# ---- payloads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spare", [0, 1, 500])
def test_a_payload(spare):
    tensor = (torch.randn(40, 100) * 0.02).bfloat16()
    whole = codec.encode(tensor, gpu_modes=True)
    payload = guarded_bytes(8 + len(whole) + spare)
    status = torch.zeros(1, dtype=torch.int32)
    encoding.encode_into(tensor, payload, checks=True, status=status)
    assert payload.numpy().tobytes() == struct.pack("<Q", len(whole)) + whole + bytes(spare)
    assert status.item() == 0


@pytest.mark.parametrize("missing", [1, 700, 10**6])
def test_a_payload_that_is_too_small(missing):
    tensor = (torch.randn(4, 1000) * 0.02).bfloat16()
    whole = codec.encode(tensor, chunk_log2=10, gpu_modes=True)
    payload = guarded_bytes(max(8, 8 + len(whole) - missing))
    status = torch.full((1,), 4, dtype=torch.int32)
    encoding.encode_into(tensor, payload, checks=True, chunk_log2=10, status=status)
    assert status.item() == 5
    assert not payload.any()
    with pytest.raises(UsageError, match=f"a blob of {len(whole)} needs {len(whole) + 8}"):
        encoding.encode_into(tensor, payload, checks=True, chunk_log2=10)


def test_the_largest_blob_is_noise():
    rng = np.random.default_rng(0)
    for name in ("U8", "BF16", "F32", "F64"):
        tensor = made(name, 5000, "noise", rng)
        assert len(codec.encode(tensor, chunk_log2=10, gpu_modes=True)) == encoding.largest_blob(tensor, chunk_log2=10)


# ---- the host's part -------------------------------------------------------------------------------------------------


def test_what_the_hosts_encoder_does():
    tensor = (torch.randn(5000) * 0.02).bfloat16()
    same(tensor, level="max")
    same(torch.empty(0, 1 << 40))
    whole = codec.encode(tensor, level="max", gpu_modes=True)
    payload = guarded_bytes(len(whole) + 20)
    encoding.encode_into(tensor, payload, level="max")
    assert payload.numpy().tobytes() == struct.pack("<Q", len(whole)) + whole + bytes(12)
    status = torch.zeros(1, dtype=torch.int32)
    encoding.encode_into(tensor, payload[:100], level="max", status=status)
    assert status.item() == 1


def test_a_tensor_that_is_not_on_a_gpu(monkeypatch):
    monkeypatch.undo()
    same(torch.randn(300))


def test_a_full_gpu(monkeypatch):
    def full(size, device):
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(encoding, "_memory", full)
    with pytest.raises(OutOfMemory, match=r"F32 and shape \(300,\)"):
        encoding.encode(torch.randn(300))


def test_what_cannot_be():
    tensor = torch.randn(300)
    with pytest.raises(UsageError, match="no level 'slow'"):
        encoding.encode(tensor, level="slow")
    with pytest.raises(UsageError, match="chunk_log2 is 9"):
        encoding.encode(tensor, chunk_log2=9)
    with pytest.raises(Unsupported, match="bits8"):
        encoding.encode(torch.empty(300, dtype=torch.bits8))
    for payload in (torch.zeros(90), torch.zeros(2, 90, dtype=torch.uint8), torch.zeros(7, dtype=torch.uint8)):
        with pytest.raises(UsageError, match="payload"):
            encoding.encode_into(tensor, payload)
