"""The functions of lossy coding: what they take, what they refuse, what they say."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import xxhash

from netweight import codec
from netweight.errors import CorruptBlob, Unsupported, UsageError

PATHS = [*dict.fromkeys([*codec.available_paths(), "python"])]
WEIGHTS = (torch.randn(60, 70, generator=torch.Generator().manual_seed(5)) * 0.02).bfloat16()


def within(decoded, original, bound):
    """Whether every weight is within the bound, in exact arithmetic of float64."""
    change = (decoded.double() - original.double()).abs()
    return bool((change <= bound * original.double().abs()).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("block", [None, 64])
def test_what_a_blob_says_is_so(dtype, block):
    weights = WEIGHTS.to(dtype)
    blob = codec.encode_lossy(weights, mantissa_bits=2, block_size=block)
    info = codec.info(blob)
    assert (info.mantissa_bits, info.block_size, info.fidelity) == (2, block, "corrected")
    assert (info.shape, info.nbytes, info.level, info.version) == ((60, 70), weights.nbytes, "default", 1)
    name = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[dtype]
    assert info.dtype == name
    assert info.bound == codec.relative_bound(2, block is not None, dtype=name)
    decoded = codec.decode(blob, check=True)
    assert (decoded.dtype, decoded.shape) == (dtype, weights.shape)
    assert within(decoded, weights, info.bound)
    assert 0 < info.worst_change <= info.bound
    assert len(blob) < 0.8 * len(codec.encode(weights))
    assert codec.is_lossy(blob)
    assert not codec.is_lossy(codec.encode(weights))
    assert info.digest == f"xxh3-128:{xxhash.xxh3_128_hexdigest(decoded.view(torch.uint8).numpy())}"


def test_fewer_bits_take_fewer_bytes_and_change_more():
    infos = [codec.encode_lossy(WEIGHTS, mantissa_bits=bits, block_size=None) for bits in range(8)]
    sizes = [8 * len(blob) / WEIGHTS.numel() for blob in infos]
    assert all(0.7 < more - fewer < 1.3 for fewer, more in pairwise(sizes))
    changes = [codec.info(blob).worst_change for blob in infos]
    assert changes == sorted(changes, reverse=True)
    assert changes[-1] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.float64])
def test_all_bits_are_lossless_for_any_dtype(dtype):
    tensor = (WEIGHTS * 1000).to(dtype)
    assert codec.encode_lossy(tensor, mantissa_bits=7) == codec.encode(tensor)


@pytest.mark.parametrize("path", PATHS)
def test_odd_tensors(path):
    options = {"mantissa_bits": 1, "block_size": 32, "path": path}
    for shape in ((), (0,), (3, 0), (1,), (1,) * 10):
        tensor = torch.full(shape, -0.0123, dtype=torch.bfloat16)
        decoded = codec.decode(codec.encode_lossy(tensor, **options), check=True, path=path)
        assert decoded.shape == tensor.shape
        assert torch.equal(decoded, tensor)  # the largest weight of its block, or none
    strided = WEIGHTS.t()[::3]
    blob = codec.encode_lossy(strided, **options)
    assert blob == codec.encode_lossy(strided.contiguous(), **options)
    assert codec.encode_lossy(WEIGHTS.clone().requires_grad_(), **options) == codec.encode_lossy(WEIGHTS, **options)
    array = WEIGHTS.float().numpy()
    assert codec.encode_lossy(array, **options) == codec.encode_lossy(torch.from_numpy(array), **options)


@pytest.mark.parametrize("path", PATHS)
def test_bytes_at_odd_addresses_are_rounded_alike(path):
    data = WEIGHTS.view(torch.uint8).numpy().tobytes()
    odd = np.frombuffer(b"." + data, np.uint8)[1:]
    precision = codec.Precision(3, 64)
    blobs = {codec.encode_raw(raw, "BF16", (60, 70), precision=precision, path=path) for raw in (odd, data)}
    assert len(blobs) == 1


def test_a_tensor_of_what_cannot_be_rounded_stays_lossless():
    tensor = torch.full((100, 10), torch.nan)
    tensor[10:, :] = 1
    assert codec.is_lossy(codec.encode_lossy(torch.ones(100, 10), mantissa_bits=0))
    blob = codec.encode_lossy(tensor, mantissa_bits=0)
    info = codec.info(blob)
    assert (info.mantissa_bits, info.bound, info.worst_change, info.fidelity) == (None, 0, 0, None)
    assert torch.equal(codec.decode(blob).isnan(), tensor.isnan())


def test_special_numbers_come_back_exactly():
    tensor = torch.randn(64, 8).bfloat16()
    special = torch.tensor([0x7FC1, 0xFF81, 0x7F80, 0xFF80, 0x0000, 0x8000, 0x0001, 0x807F], dtype=torch.int32)
    tensor[5] = special.to(torch.uint16).view(torch.bfloat16)
    for fidelity in ("corrected", "reference"):
        decoded = codec.decode(codec.encode_lossy(tensor, mantissa_bits=0, block_size=16, fidelity=fidelity))
        assert torch.equal(decoded[5].view(torch.int16), tensor[5].view(torch.int16))


def test_the_largest_finite_numbers_never_become_infinite_unless_as_in_the_reference():
    tensor = torch.full((64, 8), 0x3F80, dtype=torch.int32)
    tensor[0, :2] = torch.tensor([0x7F7F, 0xFF7F])
    tensor = tensor.to(torch.uint16).view(torch.bfloat16)
    for block in (None, 8):
        decoded = codec.decode(codec.encode_lossy(tensor, mantissa_bits=3, block_size=block))
        assert torch.equal(decoded[0, :2], tensor[0, :2])
    blob = codec.encode_lossy(tensor, mantissa_bits=3, block_size=None, fidelity="reference")
    assert codec.decode(blob)[0, :2].tolist() == [float("inf"), float("-inf")]
    assert codec.info(blob).worst_change == float("inf")


def test_the_bound_in_numbers():
    assert codec.relative_bound(0, normalized=False) == 1 / 3
    assert codec.relative_bound(3, normalized=False) == 1 / 17
    assert codec.relative_bound(3, normalized=True, dtype="F32") == 1 / 17
    assert codec.relative_bound(1) == pytest.approx((1 + 1 / 5) * (1 + 1 / 257) - 1)
    assert codec.relative_bound(1, dtype="F16") == pytest.approx((1 + 1 / 5) * (1 + 1 / 2049) - 1)
    assert codec.relative_bound(1, fidelity="reference") == pytest.approx((1 + 1 / 5) * (1 + 1 / 257) ** 2 - 1)
    assert codec.relative_bound(7) == 0


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"mantissa_bits": 8}, "mantissa_bits must be .*, not 8"),
        ({"mantissa_bits": -1}, "mantissa_bits must be .*, not -1"),
        ({"mantissa_bits": 1.0}, "mantissa_bits must be .*, not 1.0"),
        ({"mantissa_bits": True}, "mantissa_bits must be .*, not True"),
        ({"mantissa_bits": 1, "block_size": 0}, "block_size must be .*, not 0"),
        ({"mantissa_bits": 1, "block_size": 2.5}, "block_size must be .*, not 2.5"),
        ({"mantissa_bits": 7, "block_size": -4}, "block_size must be .*, not -4"),
        ({"mantissa_bits": 1, "fidelity": "exact"}, "no fidelity 'exact'"),
        ({"mantissa_bits": 1, "level": "ultra"}, "no level 'ultra'"),
        ({"mantissa_bits": 1, "threads": 0}, "threads is 0"),
        ({"mantissa_bits": 1, "chunk_log2": 9}, "chunk_log2 is 9"),
    ],
)
def test_settings_out_of_range_are_refused(options, part):
    with pytest.raises(UsageError, match=part) as caught:
        codec.encode_lossy(WEIGHTS, **options)
    assert caught.value.cure


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.complex64, torch.float8_e4m3fn])
def test_other_dtypes_are_refused_by_name(dtype):
    with pytest.raises(Unsupported, match="cannot be rounded to 3 mantissa bits"):
        codec.encode_lossy(WEIGHTS.to(dtype), mantissa_bits=3)
    with pytest.raises(Unsupported, match="reference arithmetic is defined for BF16, not for F16"):
        codec.encode_lossy(WEIGHTS.half(), mantissa_bits=3, fidelity="reference")


def test_rows_and_places_are_checked():
    blob = codec.encode_lossy(WEIGHTS, mantissa_bits=3)
    assert torch.equal(codec.decode_rows(blob, 7, 9), codec.decode(blob)[7:9])
    with pytest.raises(UsageError, match="Rows 5 to 61"):
        codec.decode_rows(blob, 5, 61)
    for path in PATHS:
        with pytest.raises(UsageError, match="bytes where the tensor has 8400"):
            codec.decode_into(blob, torch.empty(60, 69, dtype=torch.bfloat16), path=path)
        out = np.empty(8400, np.uint8)
        codec.decode_into(blob, out, path=path, check=True)
        assert out.tobytes() == codec.decode_raw(blob).tobytes()
    damaged = bytearray(blob)
    damaged[-5] ^= 255
    with pytest.raises(CorruptBlob):
        codec.decode(bytes(damaged), check=True)


def test_flushing_subnormal_numbers_to_zero_changes_nothing():
    """Some programs set this for speed, thread by thread; it would change every operation on small floats."""
    generator = torch.Generator().manual_seed(8)
    tensors = [
        (torch.randn(3000, generator=generator) * 10.0 ** torch.randint(-44, 3, (3000,), generator=generator)).to(dtype)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    tensors.append(torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.float16))
    for tensor in tensors:
        for path in PATHS:
            results = []
            for flush in (False, True):
                if not torch.set_flush_denormal(flush):
                    pytest.skip("this processor cannot flush subnormal numbers to zero")
                try:
                    blob = codec.encode_lossy(tensor, mantissa_bits=2, block_size=16, path=path)
                    results.append((blob, codec.decode_raw(blob, path=path).tobytes()))
                finally:
                    torch.set_flush_denormal(False)
            assert results[0] == results[1]
