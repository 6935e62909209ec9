import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from netweight.errors import Unsupported, UsageError
from netweight.methods.compress import bits
from netweight.methods.compress.bits import bit_statistics, merge

# dtype -> bits of sign, exponent, mantissa; the unsigned type that holds the pattern
FLOATS = {
    torch.bfloat16: (1, 8, 7, numpy.uint16),
    torch.float16: (1, 5, 10, numpy.uint16),
    torch.float32: (1, 8, 23, numpy.uint32),
    torch.float64: (1, 11, 52, numpy.uint64),
    torch.float8_e4m3fn: (1, 4, 3, numpy.uint8),
    torch.float8_e5m2: (1, 5, 2, numpy.uint8),
}
INTEGERS = {
    torch.bool: numpy.uint8,
    torch.uint8: numpy.uint8,
    torch.int16: numpy.uint16,
    torch.int32: numpy.uint32,
    torch.int64: numpy.uint64,
}


def entropy(values):
    _, counts = numpy.unique(values, return_counts=True)
    shares = counts / counts.sum()
    return float(-(shares * numpy.log2(shares)).sum()) if len(values) else 0.0


def patterns(container, count, seed, spread):
    """Bit patterns: uniform ones, or few different ones, so that entropies are not all near their maximum."""
    rng = numpy.random.default_rng(seed)
    all_patterns = rng.integers(0, 2 ** (8 * numpy.dtype(container).itemsize), size=max(spread, 1), dtype=container)
    return all_patterns[rng.integers(0, len(all_patterns), size=count)]


def as_tensor(raw, dtype):
    if not len(raw):
        return torch.empty(0, dtype=dtype)
    return torch.from_numpy(raw.view(numpy.uint8).copy()).view(dtype)


@given(
    dtype=st.sampled_from(list(FLOATS)),
    count=st.integers(0, 300),
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([1, 3, 50, 10_000]),
)
def test_floats_against_bit_fiddling_in_numpy(dtype, count, seed, spread):
    _, exponent_bits, mantissa_bits, container = FLOATS[dtype]
    raw = patterns(container, count, seed, spread)
    wide = raw.astype(numpy.uint64)
    sign = wide >> numpy.uint64(exponent_bits + mantissa_bits)
    exponent = wide >> numpy.uint64(mantissa_bits) & numpy.uint64(2**exponent_bits - 1)
    mantissa = wide & numpy.uint64(2**mantissa_bits - 1)
    found = bit_statistics(as_tensor(raw, dtype))

    assert found.count == count
    assert found.shape == (count,)
    assert found.sign.tolist() == numpy.bincount(sign.astype(int), minlength=2).tolist()
    assert found.exponent.tolist() == numpy.bincount(exponent.astype(int), minlength=2**exponent_bits).tolist()
    top = min(12, mantissa_bits)
    kept = (mantissa >> numpy.uint64(mantissa_bits - top)).astype(int)
    assert found.mantissa.tolist() == numpy.bincount(kept, minlength=2**top).tolist()
    assert found.sign_entropy == pytest.approx(entropy(sign), abs=1e-12)
    assert found.exponent_entropy == pytest.approx(entropy(exponent), abs=1e-12)
    if mantissa_bits <= 12:
        assert found.mantissa_entropy == pytest.approx(entropy(mantissa), abs=1e-12)
    else:
        assert entropy(mantissa) - 1e-9 <= found.mantissa_entropy <= mantissa_bits
    assert found.bits_per_weight == found.sign_entropy + found.exponent_entropy + found.mantissa_entropy
    assert sum(found.shares.values()) == pytest.approx(1 if found.bits_per_weight else 0)


@given(dtype=st.sampled_from(list(INTEGERS)), count=st.integers(0, 200), seed=st.integers(0, 2**32))
def test_integers_have_mantissas_only(dtype, count, seed):
    container = INTEGERS[dtype]
    raw = patterns(container, count, seed, 20) & (1 if dtype is torch.bool else numpy.iinfo(container).max)
    found = bit_statistics(as_tensor(raw.astype(container), dtype))
    assert found.count == count
    assert found.sign_entropy == found.exponent_entropy == 0
    assert found.sign.size == found.exponent.size == 0
    assert entropy(raw) - 1e-9 <= found.mantissa_entropy <= 8 * raw.itemsize
    if raw.itemsize == 1:
        assert found.mantissa_entropy == pytest.approx(entropy(raw), abs=1e-12)
    columns = raw.view(numpy.uint8).reshape(count, raw.itemsize).T
    assert found.bytes.tolist() == [numpy.bincount(column, minlength=256).tolist() for column in columns]


@given(dtype=st.sampled_from(list(FLOATS)), sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4))
def test_merged_statistics_are_those_of_the_whole(dtype, sizes):
    container = FLOATS[dtype][3]
    raw = patterns(container, sum(sizes), 7, 1000)
    ends = numpy.cumsum(sizes)[:-1]
    merged = merge(bit_statistics(as_tensor(part, dtype)) for part in numpy.split(raw, ends))
    whole = bit_statistics(as_tensor(raw, dtype))
    assert merged.to_json(histograms=True) == whole.to_json(histograms=True)


@settings(max_examples=10)
@given(block=st.integers(1, 50))
def test_block_size_does_not_matter(block):
    tensor = torch.randn(7, 11, generator=torch.Generator().manual_seed(0))
    whole = bit_statistics(tensor)
    before = bits.BLOCK
    try:
        bits.BLOCK = block
        assert bit_statistics(tensor).to_json(histograms=True) == whole.to_json(histograms=True)
    finally:
        bits.BLOCK = before


def test_strides_shapes_gradients_and_numpy_do_not_matter():
    tensor = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    expected = bit_statistics(tensor).to_json(histograms=True)
    for same in (torch.nn.Parameter(tensor), tensor.numpy(), tensor.numpy().astype(">f4"), tensor.T.contiguous().T):
        assert bit_statistics(same).to_json(histograms=True) == expected
    assert bit_statistics(tensor.T).exponent.tolist() == bit_statistics(tensor).exponent.tolist()
    assert bit_statistics(torch.tensor(1.5)).shape == ()
    assert bit_statistics(torch.tensor(1.5)).count == 1


def test_known_entropies_of_normal_weights():
    weights = torch.randn(1 << 21, generator=torch.Generator().manual_seed(0)) * 0.02
    found = bit_statistics(weights.to(torch.bfloat16))
    assert found.exponent_entropy == pytest.approx(2.545, abs=0.005)
    assert found.exponent_only_bits == 8 + found.exponent_entropy
    widened = bit_statistics(weights.to(torch.bfloat16).float())
    assert widened.bits_per_weight == pytest.approx(found.bits_per_weight)  # fp32 that is really bf16


def test_what_has_no_such_bits_is_refused():
    with pytest.raises(Unsupported, match="complex64"):
        bit_statistics(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(UsageError, match="bfloat16"):
        merge([bit_statistics(torch.zeros(2)), bit_statistics(torch.zeros(2, dtype=torch.bfloat16))])
    with pytest.raises(UsageError, match="nothing"):
        merge([])
