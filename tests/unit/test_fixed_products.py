"""Products of bf16 weights with few rows of inputs: torch's order of adding, on every code path, plain and fixed."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fixed_under_test import same, weights

import netweight
from netweight import codec
from netweight.codec import fixed
from netweight.codec.backend import compiled
from netweight.codec.fixed import SummationOrder, decode_fixed, encode_fixed
from netweight.errors import CorruptBlob, UsageError

pytestmark = pytest.mark.skipif(compiled is None, reason="built without a compiler")
PATHS = compiled.product_paths() if compiled is not None else []
SUMS = SummationOrder("sums", 64)
in_blocks = pytest.mark.skipif(
    compiled is None or not compiled.multiplies_in_blocks(), reason="this processor has no dot products of bf16 pairs"
)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def in_pairs(weight, x, bias, width):
    """Pairs in sequence, the odd column of a pair first, in blocks of columns; the blocks' sums in sequence."""
    weight, x = weight.float().numpy(), x.float().numpy()
    total = np.zeros((len(x), len(weight)), np.float32)
    for start in range(0, weight.shape[1], width):
        block = np.zeros_like(total)
        for even in range(start, min(start + width, weight.shape[1]), 2):
            for column in (even + 1, even):  # a product of two bf16 numbers is exact in fp32
                block = block + x[:, None, column] * weight[None, :, column]
        total = total + block
    found = torch.from_numpy(total)
    return (found if bias is None else found + bias.float()).bfloat16()


def in_tiles(weight, x, bias):
    """In blocks of 32 columns: the even ones in sequence, the odd ones likewise, and the sum of both added."""
    weight, x = weight.float().numpy(), x.float().numpy()
    total = np.zeros((len(x), len(weight)), np.float32)
    for start in range(0, weight.shape[1], 32):
        halves = np.zeros((2, *total.shape), np.float32)
        for column in range(start, min(start + 32, weight.shape[1])):
            halves[column % 2] = halves[column % 2] + x[:, None, column] * weight[None, :, column]
        total = total + (halves[0] + halves[1])
    found = torch.from_numpy(total)
    return (found if bias is None else found + bias.float()).bfloat16()


def by_the_description(weight, x, bias, sums):
    """Partial sums by column, then added by halves, all in fp32."""
    terms = x.float().numpy()[:, None] * weight.float().numpy()[None]
    partial = np.zeros((*terms.shape[:2], sums), np.float32)
    for start in range(0, terms.shape[2], sums):
        partial = partial + terms[..., start : start + sums]
    while partial.shape[2] > 1:
        half = partial.shape[2] // 2
        partial = partial[..., :half] + partial[..., half:]
    total = torch.from_numpy(partial[..., 0])
    return (total if bias is None else total + bias.float()).bfloat16()


def multiplied(weight, x, bias, order, path, *, is_fixed=False):
    payload = encode_fixed(weight) if is_fixed else weight
    out = torch.empty(len(x), len(weight), dtype=torch.bfloat16)
    compiled.multiply(
        payload.data_ptr(), payload.numel() if is_fixed else 0, *weight.shape, x.data_ptr(), len(x),
        0 if bias is None else bias.data_ptr(), order.number, order.width, out.data_ptr(), len(weight), 1, path,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("sums", [64, 128])
def test_sums_are_added_as_described(path, sums):
    for rows, inputs, biased in ((37, 1, False), (16, 5, True)):
        weight, x, bias = drawn(rows, 384, seed=1), drawn(inputs, 384, seed=2), drawn(rows) if biased else None
        wanted, order = by_the_description(weight, x, bias, sums), SummationOrder("sums", sums)
        assert same(multiplied(weight, x, bias, order, path), wanted)
        assert same(multiplied(weight, x, bias, order, path, is_fixed=True), wanted)


@pytest.mark.parametrize("path", ["avx512", "AVX2", "neon", ""])
def test_products_that_are_not_there_are_refused_by_name(path):
    """A path of the codec, such as avx512, is not one of the products, which begin at other instructions."""
    weight, x = drawn(16, 64), drawn(1, 64)
    for refused in (
        lambda: multiplied(weight, x, None, SUMS, path),
        lambda: multiplied(weight, x, None, SUMS, path, is_fixed=True),
        lambda: compiled.multiplies_in_blocks(path),
    ):
        with pytest.raises(compiled.UnsupportedError, match=f"has no products named {path}$"):
            refused()
    assert PATHS[-1] == "portable"


@in_blocks
@pytest.mark.parametrize(
    ("rows", "columns", "inputs"), [(16, 64, 1), (37, 384, 9), (5, 1026, 3), (64, 130, 17), (1, 2, 1)]
)
@pytest.mark.parametrize("biased", [False, True])
def test_blocks_are_added_as_described(rows, columns, inputs, biased):
    weight, x, bias = drawn(rows, columns, seed=1), drawn(inputs, columns, seed=2), drawn(rows) if biased else None
    for width in (32, 512, columns):
        wanted = in_pairs(weight, x, bias, width)
        assert same(multiplied(weight, x, bias, SummationOrder("pairs", width), "auto"), wanted)
        assert same(multiplied(weight, x, bias, SummationOrder("pairs", width), "auto", is_fixed=True), wanted)
    assert same(multiplied(weight, x, bias, SummationOrder("tiles", 32), "auto"), in_tiles(weight, x, bias))
    assert same(
        multiplied(weight, x, bias, SummationOrder("tiles", 32), "auto", is_fixed=True), in_tiles(weight, x, bias)
    )


@pytest.mark.parametrize("prefer", ["memory", "speed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("biased", [True, False])
def test_inputs_that_are_not_contiguous_give_the_bits_of_the_dense_layer(prefer, dtype, biased):
    """The last positions of several sequences, from which models calculate their next tokens."""
    dense = torch.nn.Linear(512, 700, bias=biased).to(dtype)
    model = torch.nn.Sequential(torch.nn.Linear(512, 700, bias=biased).to(dtype))
    model[0].load_state_dict(dense.state_dict())
    netweight.compress_(model, prefer=prefer)
    with torch.no_grad():
        for x in (drawn(8, 5, 512)[:, -1:], drawn(512, 6).T, drawn(3, 40, 512)[:, ::2], drawn(2, 512)[0]):
            assert same(model(x.to(dtype)), dense(x.to(dtype)))


@in_blocks
def test_many_shapes_are_torchs_bit_for_bit():
    """Where a trial found torch's order, other weights of the shape agree, large and small numbers among them."""
    generator = torch.Generator().manual_seed(5)
    for rows, columns, inputs in ((48, 896, 1), (300, 4864, 2), (33, 512, 8), (1000, 1536, 1), (64, 2560, 31)):
        order = fixed.order_of(rows, columns, inputs, torch.get_num_threads(), False)
        if order is None:
            continue
        for scale in (1e-3, 1.0, 1e3):
            weight = (torch.randn(rows, columns, generator=generator) * scale).bfloat16()
            x = torch.randn(inputs, columns, generator=generator).bfloat16()
            out = torch.empty(inputs, rows, dtype=torch.bfloat16)
            fixed.multiply(weight, rows, x, None, order, out, torch.get_num_threads())
            assert same(out, F.linear(x, weight))


@pytest.mark.parametrize("odd", [0, 0.02])
@pytest.mark.parametrize("path", PATHS)
def test_the_fixed_form_is_decoded_as_torchs_operators_do(path, odd, monkeypatch):
    for shape in ((1, 1), (16, 64), (33, 130), (100, 1000)):
        weight, out = weights(*shape, odd=odd), torch.empty(shape, dtype=torch.bfloat16)
        payload = encode_fixed(weight)
        compiled.decode_fixed(payload.data_ptr(), payload.numel(), *shape, out.data_ptr(), 1, path)
        assert same(out, weight)
        with monkeypatch.context() as without:
            without.setattr(fixed, "compiled", None)
            assert same(decode_fixed(payload), weight)


def test_the_order_is_torchs_or_is_not_taken():
    for inputs, biased in ((1, False), (7, True)):
        order = fixed.order_of(300, 512, inputs, 1, biased)
        for seed in range(10):
            weight, x, bias = drawn(300, 512, seed=seed), drawn(inputs, 512, seed=99), drawn(300) if biased else None
            if order is not None:
                assert same(multiplied(weight, x, bias, order, "auto"), F.linear(x, weight, bias))
    assert fixed.order_of(300, 501, 1, 1, False) is None
    with pytest.raises(ValueError, match="added up"):
        multiplied(drawn(4, 96), drawn(1, 96), None, SUMS, "auto")


def test_what_is_not_finite_is_as_in_torch():
    weight, x = drawn(64, 128), drawn(2, 128)
    weight[0, 3], weight[1, 5], x[1, 7] = torch.inf, torch.nan, -torch.inf
    found, wanted = multiplied(weight, x, None, SUMS, "auto"), F.linear(x, weight)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.isinf(), wanted.isinf())


def test_several_threads_give_the_same_and_damage_is_named():
    weight, x = weights(100, 128, odd=0.01), drawn(3, 128)
    payload = encode_fixed(weight)
    one, three = torch.empty(2, 3, 100, dtype=torch.bfloat16)
    for out, threads in ((one, 1), (three, 3)):
        fixed.multiply(payload, 100, x, None, SUMS, out, threads, fixed=True)
    assert same(one, three)
    with pytest.raises(CorruptBlob):
        fixed.multiply(payload, 99, x, None, SUMS, one, 1, fixed=True)
    payload[fixed.read_layout(payload).first_at] = 1
    with pytest.raises(CorruptBlob):
        fixed.multiply(payload, 100, x, None, SUMS, one, 1, fixed=True)


@pytest.mark.parametrize("chunk_log2", [10, 16, 22])
@pytest.mark.parametrize(("rows", "columns"), [(700, 896), (3, 131_072), (5, 196_608), (2048, 512), (1, 128)])
def test_a_blob_is_multiplied_while_it_is_decoded(rows, columns, chunk_log2):
    """Rows cross the borders of chunks, or have several chunks of their own; any number of threads gives the bits."""
    weight, x, bias = weights(rows, columns), drawn(3, columns, seed=1), drawn(rows, seed=2)
    blob = memoryview(codec.encode(weight, chunk_log2=chunk_log2))
    for added in (None, bias):
        wanted = multiplied(weight, x, added, SUMS, "auto")
        for threads in (1, 2, 5):
            out = torch.empty(3, rows, dtype=torch.bfloat16)
            fixed.multiply_blob(blob, x, added, SUMS, out, threads, check=True)
            assert same(out, wanted)


def test_damage_of_a_blob_that_is_multiplied_is_named():
    weight, x = weights(700, 896), drawn(2, 896)
    out = torch.empty(2, 700, dtype=torch.bfloat16)
    blob = bytearray(codec.encode(weight))
    blob[len(blob) // 2] ^= 1
    for threads in (1, 3):
        with pytest.raises(CorruptBlob, match="Cannot decode a blob"):
            fixed.multiply_blob(memoryview(blob), x, None, SUMS, out, threads, check=True)
    with pytest.raises(UsageError, match="bf16 weight of this shape"):
        fixed.multiply_blob(memoryview(codec.encode(weight)), x, None, SUMS, out[:, :600], 1, check=False)


@pytest.mark.parametrize("prefer", ["memory", "speed"])
@pytest.mark.parametrize(("width", "biases"), [(1023, 1024), (2048, 1024), (1024, 1000)])
def test_what_does_not_fit_is_refused_as_by_torch(prefer, width, biases):
    model = torch.nn.Linear(1024, 1024).bfloat16()
    netweight.compress_(model, prefer=prefer)
    model.bias = torch.nn.Parameter(torch.zeros(biases).bfloat16())
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"shape|size|expand"):
        model(torch.randn(2, width).bfloat16())
