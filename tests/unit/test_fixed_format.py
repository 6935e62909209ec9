"""The fixed-length form: every bit pattern comes back, the bytes are those described, and damage is refused."""

import pytest
import torch
from fixed_under_test import read_weight, same, weights

from netweight.codec import fixed
from netweight.codec.fixed import check_fixed, decode_fixed, encode_fixed, is_fixed, read_layout
from netweight.errors import CorruptBlob, Unsupported


@pytest.mark.parametrize("shape", [(1, 32), (1, 70), (37, 150), (16, 64), (32, 128), (17, 65), (384, 384), (3, 5000)])
def test_matrices_of_any_size_come_back(shape):
    weight = weights(*shape)
    payload = encode_fixed(weight)
    assert is_fixed(payload)
    assert same(decode_fixed(payload), weight)
    assert check_fixed(payload).size == payload.numel()
    assert payload.numel() % 16 == 0
    assert same(decode_fixed(torch.nn.functional.pad(payload, (0, 100))), weight)


def test_every_bit_pattern_comes_back():
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    weight = weights(512, 4096, odd=0)
    weight[:, ::32] = patterns[torch.randperm(1 << 16)].view(512, 128)
    assert same(decode_fixed(encode_fixed(weight)), weight)


def test_the_bytes_are_as_described():
    weight = weights(37, 150)
    weight[5, 7], weight[36, 149], weight[20, 100] = -0.0, float("nan"), float("-inf")
    payload = encode_fixed(weight)
    found = [[read_weight(payload, row, column) for column in range(0, 150, 3)] for row in range(37)]
    assert same(torch.tensor(found).to(torch.int16).view(torch.bfloat16), weight[:, ::3].contiguous())
    head = bytes(payload[:40].tolist())
    assert head[:8] == (payload.numel() - 8).to_bytes(8, "little")
    assert head[8:13] == b"NWF\1\1"
    assert [int.from_bytes(head[at : at + 8], "little") for at in (16, 24)] == [37, 150]


def test_rows_and_columns_that_fill_up_tiles_are_zeros():
    weight = weights(17, 65, odd=0)
    layout = read_layout(payload := encode_fixed(weight))
    tiles = payload[128 : layout.first_at].view(2, 2, 1536)
    nonzero = (tiles[1, 1] != 0).sum()  # one weight is in it
    assert 1 <= nonzero <= 3


def test_trained_weights_take_little_more_than_12_bits():
    payload = encode_fixed(weights(1024, 1024, odd=0))
    layout = read_layout(payload)
    assert 12 < payload.numel() * 8 / 2**20 < 12.05
    assert layout.escapes < 2**20 / 2000


def test_zeros_are_no_escapes():
    weight = weights(64, 256, odd=0)
    weight[torch.rand(64, 256) < 0.9] = 0.0
    weight[torch.rand(64, 256) < 0.1] = -0.0
    payload = encode_fixed(weight)
    assert read_layout(payload).escapes < 5
    assert same(decode_fixed(payload), weight)
    assert same(decode_fixed(encode_fixed(torch.zeros(16, 64).bfloat16())), torch.zeros(16, 64).bfloat16())


@pytest.mark.parametrize(("scale", "base"), [(1e-37, 1), (3e-39, None), (1.5e4, 128), (1e6, None)])
def test_very_small_and_very_large_weights(scale, base):
    weight = torch.full((32, 64), scale).bfloat16() * torch.linspace(0.5, 1, 64).bfloat16()
    if base is None:  # subnormal, and beyond what kernels multiply with
        with pytest.raises(Unsupported, match="exponents outside"):
            encode_fixed(weight)
    else:
        payload = encode_fixed(weight)
        assert same(decode_fixed(payload), weight)
        assert read_layout(payload).base <= base


def test_views_are_encoded_as_what_they_show():
    weight = weights(100, 130)
    assert same(decode_fixed(encode_fixed(weight.t())), weight.t().contiguous())
    assert torch.equal(encode_fixed(weight[10:30, 5:]), encode_fixed(weight[10:30, 5:].clone()))


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(16, 64, dtype=torch.float16),
        torch.zeros(16, 64),
        torch.zeros(64, dtype=torch.bfloat16),
        torch.zeros(2, 16, 64, dtype=torch.bfloat16),
        torch.zeros(0, 64, dtype=torch.bfloat16),
        torch.zeros(1, (1 << 16) + 1, dtype=torch.bfloat16),
        weights(64, 64, odd=0.1),
    ],
)
def test_what_has_no_fixed_length_form_is_refused(weight):
    with pytest.raises(Unsupported, match="fixed-length form"):
        encode_fixed(weight)


def test_the_widest_matrix():
    weight = weights(1, 1 << 16, odd=0)
    weight[0, -1] = 1e30
    assert same(decode_fixed(encode_fixed(weight)), weight)


# ---- damage ----------------------------------------------------------------------------------------------------------


def damaged(payload, at, value):
    changed = payload.clone()
    value = value if isinstance(value, bytes) else bytes([value])
    changed[at : at + len(value)] = torch.tensor(list(value), dtype=torch.uint8)
    return changed


def test_headers_that_lie_are_refused():
    payload = encode_fixed(weights(37, 150, odd=0.01))
    for at in range(48):
        for flip in (1, 0x80):
            changed = payload.clone()
            changed[at] ^= flip
            with pytest.raises((CorruptBlob, Unsupported)):
                decode_fixed(changed)
    assert not is_fixed(damaged(payload, 8, b"NWT"))
    for cut in (0, 100, 127, payload.numel() - 16):
        with pytest.raises(CorruptBlob):
            decode_fixed(payload[:cut].clone())
    with pytest.raises(CorruptBlob):
        decode_fixed(payload.view(torch.int8))


def test_escapes_outside_their_rows_or_out_of_order_are_refused():
    weight = weights(37, 150, odd=0)
    weight[3, [10, 20]], weight[5, 149] = 1e30, 1e-30
    payload = encode_fixed(weight)
    layout = read_layout(payload)
    assert same(decode_fixed(payload), weight)
    first, listed = layout.first_at, layout.escapes_at
    two = bytes(payload[listed + 4 : listed + 8].tolist()) + bytes(payload[listed : listed + 4].tolist())
    for at, value in (
        (listed + 8, 150),
        (listed, two),
        (listed, bytes(payload[listed + 4 : listed + 8].tolist())),
        (first, 1),
        (first + 4 * 2, 3),
        (first + 4 * 37, 200),
        (first + 4 * 10 + 3, 0xFF),
    ):
        with pytest.raises(CorruptBlob):
            decode_fixed(damaged(payload, at, value))


def test_contradictions_in_tiles_are_found_by_the_full_check():
    weight = weights(16, 64, odd=0)
    weight[0, 0], weight[0, 2] = 1e30, 0.0
    payload = encode_fixed(weight)
    listed = read_layout(payload).escapes_at
    check_fixed(payload)
    for at, value in ((128, 1), (128 + 4, 1), (listed + 2, b"\x00\x3c"), (listed + 2, b"\x00\x80")):
        with pytest.raises(CorruptBlob):
            check_fixed(damaged(payload, at, value))


# ---- the native encoder ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(fixed.compiled is None, reason="needs the native module")
@pytest.mark.parametrize("odd", [0, 0.01])
@pytest.mark.parametrize("shape", [(1, 1), (1, 70), (37, 150), (16, 64), (17, 65), (384, 384), (3, 5000)])
def test_the_native_encoder_writes_the_bytes_of_the_operators(shape, odd, monkeypatch):
    weight = weights(*shape, odd=odd)
    written = {path: encoded_by(path, weight) for path in ("portable", "auto")}
    monkeypatch.setattr(fixed, "compiled", None)
    by_operators = encode_fixed(weight)
    assert all(torch.equal(payload, by_operators) for payload in written.values())


def encoded_by(path, weight):
    """A payload by the code of one set of instructions, written over bytes that are not zero."""
    payload = encode_fixed(weight)
    layout = read_layout(payload)
    head, payload = payload[:128].clone(), torch.full_like(payload, 0xA5)
    payload[:128] = head
    fixed.compiled.encode_fixed(
        weight.data_ptr(), *weight.shape, layout.base, layout.escapes, payload.data_ptr(), payload.numel(), 2, path=path
    )
    return payload


@pytest.mark.skipif(fixed.compiled is None, reason="needs the native module")
def test_the_native_encoder_refuses_a_wrong_number_of_escapes():
    weight = weights(37, 150, odd=0.01)
    payload = encode_fixed(weight)
    layout = read_layout(payload)
    for escapes in (layout.escapes - 1, layout.escapes + 1):
        with pytest.raises(Exception, match=r"do not add up|too short"):
            fixed.compiled.encode_fixed(
                weight.data_ptr(), 37, 150, layout.base, escapes, payload.data_ptr(), payload.numel(), 1
            )


def test_every_bit_pattern_is_counted_by_its_exponent():
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    counts, zeros = fixed._exponents(patterns)
    assert counts.tolist() == [256] * 256
    assert int(zeros) == 2
