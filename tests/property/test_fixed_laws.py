"""The fixed-length form for matrices of any size and bits: what is encoded comes back, and damage does no harm."""

import torch
from fixed_under_test import launched, same, weights  # noqa: F401  a fixture among them
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from netweight.codec.cuda import fixed_products
from netweight.codec.fixed import check_fixed, decode_fixed, encode_fixed, read_layout
from netweight.errors import CorruptBlob, Unsupported

SIZES = st.tuples(st.integers(1, 70), st.integers(1, 300))
SEEDS = st.integers(0, 1 << 30)


def encoded(weight):
    """The payload, or None if the matrix has no fixed-length form."""
    try:
        return encode_fixed(weight)
    except Unsupported:
        return None


@given(SIZES, SEEDS, st.sampled_from([0, 0.01, 0.03, 0.3]), st.sampled_from([1e-38, 1e-6, 0.02, 1, 1e4, 1e30]))
def test_what_is_encoded_comes_back(size, seed, odd, scale):
    weight = weights(*size, seed, odd=odd, scale=scale)
    payload = encoded(weight)
    if payload is None:
        return
    assert same(decode_fixed(payload), weight)
    layout = check_fixed(payload)
    assert layout.escapes * 32 <= weight.numel()
    assert torch.equal(encode_fixed(decode_fixed(payload)), payload)


@given(SIZES, SEEDS)
def test_a_form_is_refused_only_where_no_base_has_few_escapes(size, seed):
    weight = weights(*size, seed, odd=0.04)
    bits = weight.view(torch.int16)
    exponents, zeros = bits >> 7 & 255, (bits & 0x7FFF) == 0
    inside = [int(((exponents >= base) & (exponents < base + 15)).sum()) for base in range(1, 129)]
    fewest = weight.numel() - max(inside) - int(zeros.sum())
    payload = encoded(weight)
    assert (payload is None) == (fewest * 32 > weight.numel())
    if payload is not None:
        assert read_layout(payload).escapes == fewest
        assert read_layout(payload).base == 1 + inside.index(max(inside))


@given(SIZES, SEEDS, st.data())
def test_damage_is_refused_or_gives_another_matrix_of_the_same_shape(size, seed, data):
    payload = encoded(weights(*size, seed, odd=0.01))
    if payload is None:
        return
    layout = read_layout(payload)
    place = data.draw(st.integers(0, payload.numel() - 1) | st.integers(layout.first_at, payload.numel() - 1))
    changed = payload.clone()
    changed[place] ^= data.draw(st.integers(1, 255))
    for read in (check_fixed, decode_fixed):
        try:
            read(changed)
        except (CorruptBlob, Unsupported):
            continue
        assert place >= 128
        assert decode_fixed(changed).shape == torch.Size(size)


@given(SIZES, SEEDS, st.integers(1, 64), st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
def test_products_are_within_what_fp32_can_do(launched, size, seed, batch, biased):  # noqa: F811
    rows, columns = size
    weight = weights(rows, columns, seed, odd=0)
    weight.view(-1)[:: max(40, weight.numel() // 7)] = 300.0
    payload = encoded(weight)
    if payload is None:  # few weights, among which 300 is not an exception
        return
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, columns, generator=generator).bfloat16()
    bias = torch.randn(rows, generator=generator).bfloat16() if biased else torch.zeros(rows).bfloat16()
    y = fixed_products.linear(x, payload, rows, columns, bias if biased else None).double()
    exact = x.double() @ weight.double().T + bias.double()
    size_of = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    assert ((y - exact).abs() <= exact.abs() * 2**-8 + size_of * (columns + 2) * 2**-24).all()
