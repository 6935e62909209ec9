"""Rounded weights are those of an oracle, within the bound that is stated, on every code path."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rounding_under_test import STORED, change, expected, values_of

from netweight import codec
from netweight.codec import Precision

PATHS = [*dict.fromkeys([*codec.available_paths(), "python"])]
KINDS = [("BF16", "corrected"), ("BF16", "reference"), ("F16", "corrected"), ("F32", "corrected")]
EVERY_BF16 = np.arange(1 << 16, dtype="<u2")


def encode(data, dtype, bits, block, fidelity, **options):
    count = len(data) // STORED[dtype].itemsize
    return codec.encode_raw(data, dtype, (count,), precision=Precision(bits, block, fidelity), **options)


def weights(dtype, count, seed):
    """Weights as they are trained, and a few of any bit pattern."""
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.normal(0, rng.choice([0, 1, 4]), count)) * rng.choice([1e-6, 0.02, 1, 1e3])
    values = (rng.standard_normal(count) * scale).astype("<f4")
    odd = rng.random(count) < 0.02
    if dtype == "F16":
        with np.errstate(over="ignore"):
            values = values.astype("<f2")
        values[odd] = rng.integers(0, 1 << 16, odd.sum()).astype("<u2").view("<f2")
        return values.tobytes()
    values[odd] = rng.integers(0, 1 << 32, odd.sum()).astype("<u4").view("<f4")
    return values.view("<u2")[1::2].tobytes() if dtype == "BF16" else values.tobytes()


@pytest.mark.parametrize("fidelity", ["corrected", "reference"])
@pytest.mark.parametrize("bits", range(7))
def test_every_bf16_number_is_rounded_as_the_oracle_says(bits, fidelity):
    data = EVERY_BF16.tobytes()
    values, exact, bound = expected(data, "BF16", bits, None, fidelity)
    blob = encode(data, "BF16", bits, None, fidelity)
    decoded = np.frombuffer(codec.decode_raw(blob, check=True), "<u2")
    numbers = ~np.isnan(values)
    assert np.array_equal(values_of(decoded.tobytes(), "BF16")[numbers], values[numbers])
    assert np.array_equal(decoded[exact], EVERY_BF16[exact])  # payloads of NaN, too
    assert np.array_equal(decoded >> 15, EVERY_BF16 >> 15)
    subnormal, not_finite = 2 * 127, 2 * 128
    too_large = 0 if fidelity == "reference" else 2 * (63 if bits == 0 else 1 << (6 - bits))  # rounded up to infinity
    assert exact.sum() == subnormal + not_finite + too_large
    if fidelity == "corrected":
        assert change(data, decoded.tobytes(), "BF16") == codec.info(blob).worst_change == pytest.approx(bound)
    else:
        assert codec.info(blob).worst_change == np.inf


@pytest.mark.parametrize("fidelity", ["corrected", "reference"])
@pytest.mark.parametrize("bits", range(7))
def test_the_bound_holds_for_every_pair_of_mantissas(bits, fidelity):
    """Blocks of two: every mantissa of the largest weight with every one of the other."""
    largest, other = (grid.reshape(-1).astype("<u2") for grid in np.meshgrid(np.arange(128), np.arange(128)))
    data = np.stack([largest | 0x4000, other | 0x3F80], axis=1).tobytes()  # 2 to 4 and 1 to 2
    blob = encode(data, "BF16", bits, 2, fidelity)
    info = codec.info(blob)
    decoded = codec.decode_raw(blob, check=True).tobytes()
    assert np.array_equal(values_of(decoded, "BF16"), expected(data, "BF16", bits, 2, fidelity)[0])
    assert (
        info.worst_change == change(data, decoded, "BF16") <= info.bound == codec.relative_bound(bits, True, fidelity)
    )
    assert info.worst_change > 0.8 * info.bound  # so it says something, too
    # The largest weight of a block keeps all that its normalizer holds, which for bf16 is everything.
    before, after = (np.frombuffer(raw, "<u2")[::2] for raw in (data, decoded))
    assert np.array_equal(before, after)


@settings(max_examples=60)
@given(
    st.sampled_from(KINDS), st.integers(0, 6), st.one_of(st.none(), st.integers(1, 700), st.just(1 << 40)),
    st.integers(1, 3000), st.sampled_from(codec.LEVELS), st.sampled_from([None, 10]), st.integers(0, 2**32 - 1),
)  # fmt: skip
@example(("F16", "corrected"), 0, 1, 1, "default", None, 0)
def test_all_paths_round_as_the_oracle_says(kind, bits, block, count, level, chunk_log2, seed):
    dtype, fidelity = kind
    data = weights(dtype, count, seed)
    blobs = {encode(data, dtype, bits, block, fidelity, level=level, chunk_log2=chunk_log2, path=p) for p in PATHS}
    assert len(blobs) == 1
    blob = blobs.pop()
    results = {codec.decode_raw(blob, check=True, path=path, threads=2).tobytes() for path in PATHS}
    assert len(results) == 1
    decoded = results.pop()
    values, exact, bound = expected(data, dtype, bits, block, fidelity)
    info = codec.info(blob)
    if exact.sum() * 16 > count:
        assert not codec.is_lossy(blob)
        assert decoded == data
        return
    assert (info.mantissa_bits, info.block_size, info.fidelity) == (bits, block, fidelity)
    numbers = ~np.isnan(values)
    assert np.array_equal(values_of(decoded, dtype)[numbers], values[numbers])
    width = STORED[dtype].itemsize
    before, after = (np.frombuffer(raw, f"<u{width}") for raw in (data, decoded))
    assert np.array_equal(before[exact], after[exact])
    assert info.bound == pytest.approx(bound)
    assert info.worst_change == change(data, decoded, dtype)
    assert info.worst_change <= info.bound or (fidelity == "reference" and np.isinf(info.worst_change))


@given(
    st.sampled_from([torch.bfloat16, torch.float32]), st.integers(1, 900), st.sampled_from([None, 3, 64]),
    st.integers(10, 11), st.data(),
)  # fmt: skip
def test_any_rows_are_the_rows_of_the_whole(dtype, rows, block, chunk_log2, data):
    tensor = torch.arange(rows * 5).reshape(rows, 5).sin().to(dtype)
    tensor[::100, 0] = torch.nan
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    path = data.draw(st.sampled_from(PATHS))
    blob = codec.encode_lossy(tensor, mantissa_bits=2, block_size=block, chunk_log2=chunk_log2)
    whole = codec.decode(blob, check=True)
    assert torch.equal(codec.decode_rows(blob, start, stop, path=path).nan_to_num(9), whole[start:stop].nan_to_num(9))
    out = torch.empty_like(tensor)
    codec.decode_into(blob, out, path=path)
    assert torch.equal(out.nan_to_num(9), whole.nan_to_num(9))


@given(st.sampled_from(KINDS), st.integers(0, 6), st.sampled_from([None, 1, 64]), st.integers(0, 2**32 - 1))
def test_what_is_rounded_already_does_not_change_when_rounded_again(kind, bits, block, seed):
    dtype, fidelity = kind
    once = codec.decode_raw(encode(weights(dtype, 500, seed), dtype, bits, block, fidelity)).tobytes()
    again = encode(once, dtype, bits, block, fidelity)
    if np.isfinite(values_of(once, dtype)).all() and fidelity == "corrected":
        assert codec.decode_raw(again).tobytes() == once
