"""The kernels of the fixed-length form, run from their own source on the CPU: exact weights, products within bounds."""

import pytest
import torch
import torch.nn.functional as F
from fixed_under_test import PROCESSORS, launched, same, weights  # noqa: F401  a fixture among them

from netweight.codec import cuda
from netweight.codec.cuda import fixed_products, launching
from netweight.codec.fixed import check_fixed, decode_fixed, encode_fixed
from netweight.errors import CudaUnavailable

SHAPES = [(1, 40), (16, 64), (17, 65), (70, 200), (33, 1000), (130, 130)]


def finite_weights(rows, columns, seed=0):
    """Weights with escapes of which products exist."""
    weight = weights(rows, columns, seed, odd=0)
    places = torch.randperm(weight.numel(), generator=torch.Generator().manual_seed(seed))[: weight.numel() // 40]
    values = torch.tensor([1e4, -3.0, 1e-9, -1e-30, 5e-41]).bfloat16()
    weight.view(-1)[places] = values[places % len(values)]
    return weight


def inputs(batch, columns, seed=1):
    return torch.randn(batch, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()


def check(y, x, weight, bias=None):
    """Against the exact product: half a unit in the last place of bf16, and what rounding in fp32 can do."""
    x, w = x.double(), weight.double()
    exact, size = x @ w.T, x.abs() @ w.abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    bound = exact.abs() * 2**-8 + size * (weight.shape[1] + 2) * 2**-24
    assert y.shape == exact.shape
    assert y.dtype == torch.bfloat16
    assert ((y.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("shape", [*SHAPES, (5, 3000)])
def test_decoding_gives_every_bit(launched, shape):  # noqa: F811
    weight = weights(*shape)
    assert same(fixed_products.decode(encode_fixed(weight), *shape), weight)
    assert launched == ["decode_fixed"]


def with_room(weight):
    payload = encode_fixed(weight)
    return F.pad(payload, (0, 4 * weight.numel() // 32 + 16))


@pytest.mark.parametrize("shape", [*SHAPES[1:], (5, 3000), (2100, 64)])
def test_writing_over_a_weight_gives_the_bytes_of_the_host(launched, shape):  # noqa: F811
    weight = weights(*shape, odd=0.005)
    payload, base = with_room(weight), encode_fixed(weight)[13]
    for seed in (1, 2):
        weight, status = weights(*shape, seed, odd=0.005), torch.zeros(1, dtype=torch.int32)
        weight[0, :3] = torch.tensor([-0.0, 0.0, 0.02])
        fixed_products.overwrite(weight, payload, status)
        assert not status
        assert payload[13] == base  # the same exponents have codes
        check_fixed(payload)
        assert same(decode_fixed(payload), weight)
        alone = encode_fixed(weight)
        assert alone[13] != base or torch.equal(payload[: len(alone)], alone)
    assert launched == ["encode_fixed", "add_up_escapes", "place_escapes"] * 2


def test_what_does_not_fit_when_it_is_written_is_told(launched):  # noqa: F811
    weight = weights(40, 2000, odd=0)
    unusual = {
        "too many in a payload": (encode_fixed(weight), weights(40, 2000, odd=0.02)),
        "too many of all": (with_room(weight), weights(40, 2000, odd=0.05)),
        "too many in 16 rows": (with_room(weight), torch.cat([weights(16, 2000, odd=0.03), weight[16:]])),
    }
    for payload, other in unusual.values():
        status = torch.zeros(1, dtype=torch.int32)
        fixed_products.overwrite(other, payload, status)
        assert status == 1


@pytest.mark.parametrize("shape", [*SHAPES, (2000, 30)])
def test_rows_are_decoded_from_their_tiles_alone(launched, shape):  # noqa: F811
    weight = weights(*shape)
    payload, status = encode_fixed(weight), torch.zeros(1, dtype=torch.int32)
    ids = torch.tensor([[0, shape[0] - 1], [shape[0] // 2, 0]], dtype=torch.int32)
    for its in (status, None):
        assert same(fixed_products.gather_rows(payload, *shape, ids, its), weight[ids])
        assert fixed_products.gather_rows(payload, *shape, ids[:0], its).shape == (0, 2, shape[1])
    assert launched == ["fixed_rows"]
    assert not status
    for outside in (-1, shape[0]):
        with pytest.raises(IndexError):
            fixed_products.gather_rows(payload, *shape, torch.tensor([outside]), None)
        assert same(fixed_products.gather_rows(payload, *shape, torch.tensor([0, outside]), status)[0], weight[0])
        assert status == cuda.NO_SUCH_ROW


@pytest.mark.parametrize("batch", [1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 64])
def test_products_of_every_batch(launched, batch):  # noqa: F811
    weight, x = finite_weights(70, 200), inputs(batch, 200)
    bias = torch.randn(70).bfloat16()
    payload = encode_fixed(weight)
    for added in (None, bias):
        check(fixed_products.linear(x, payload, 70, 200, added), x, weight, added)
    assert set(launched) == {f"product_{next(most for most in (8, 16, 32, 64) if batch <= most)}"}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", [1, 20])
def test_products_of_every_shape(launched, shape, batch):  # noqa: F811
    weight, x = finite_weights(*shape), inputs(batch, shape[1])
    check(fixed_products.linear(x, encode_fixed(weight), *shape), x, weight)


@pytest.mark.parametrize(("batch", "columns"), [(1, 8200), (12, 8200), (20, 8200), (40, 2100)])
def test_columns_are_split_where_rows_do_not_occupy_the_gpu(launched, batch, columns):  # noqa: F811
    rows = 24
    weight, x = finite_weights(rows, columns), inputs(batch, columns)
    chosen = fixed_products.plan(batch, rows, columns, PROCESSORS)
    assert chosen.splits > 1
    check(fixed_products.linear(x, encode_fixed(weight), rows, columns), x, weight)
    assert launched == [chosen.entry, "finish"]


def test_sums_are_fp32(launched):  # noqa: F811
    """Halves that cancel leave what bf16 or fp16 sums would lose."""
    half, x = finite_weights(32, 128), inputs(4, 128)
    weight = torch.cat([half, half], dim=1)
    x = torch.cat([x, -x], dim=1)
    x[:, 5] += 1
    check(fixed_products.linear(x, encode_fixed(weight), 32, 256), x, weight)


def test_escapes_at_every_place_of_a_tile(launched):  # noqa: F811
    plain, x = weights(16, 64, odd=0), inputs(3, 64)
    places = torch.randperm(1024, generator=torch.Generator().manual_seed(2)).view(32, 32)
    for some in places:
        weight = plain.clone()
        weight.view(-1)[some] = torch.linspace(-9000, 9000, 32).bfloat16()
        payload = encode_fixed(weight)
        assert same(fixed_products.decode(payload, 16, 64), weight)
        check(fixed_products.linear(x, payload, 16, 64), x, weight)


def test_zeros_keep_their_sign_and_add_nothing(launched):  # noqa: F811
    weight = weights(32, 128, odd=0)
    weight[torch.rand(32, 128) < 0.8] = 0.0
    weight[torch.rand(32, 128) < 0.2] = -0.0
    payload = encode_fixed(weight)
    assert same(fixed_products.decode(payload, 32, 128), weight)
    x = inputs(2, 128)
    check(fixed_products.linear(x, payload, 32, 128), x, weight)
    assert not fixed_products.linear(x, encode_fixed(torch.zeros(32, 128).bfloat16()), 32, 128).any()


def test_numbers_that_are_not_finite_stay_in_their_rows(launched):  # noqa: F811
    weight, x = finite_weights(32, 128), inputs(5, 128)
    weight[7, 3], weight[9, 9] = float("inf"), float("nan")
    x[2, 70] = float("nan")
    y = fixed_products.linear(x, encode_fixed(weight), 32, 128)
    dense = F.linear(x.float(), weight.float())
    assert torch.equal(y.isnan(), dense.isnan())
    assert torch.equal(y.isinf(), dense.isinf())


@pytest.mark.parametrize(("batch", "kernels"), [(65, ["64", "8"]), (180, ["64", "64", "64"]), (256, ["64"] * 4)])
def test_larger_batches_are_taken_in_parts(launched, batch, kernels):  # noqa: F811
    weight, x, bias = finite_weights(24, 40), inputs(batch, 40), torch.randn(24).bfloat16()
    check(fixed_products.linear(x, encode_fixed(weight), 24, 40, bias), x, weight, bias)
    assert launched == [f"product_{kernel}" for kernel in kernels]


@pytest.mark.parametrize("shape", [(257,), (0,), (3, 90), (2, 0)])
def test_still_larger_and_empty_batches_are_torchs_own(launched, shape):  # noqa: F811
    weight, x = finite_weights(24, 40), torch.randn(*shape, 40).bfloat16()
    y = fixed_products.linear(x, encode_fixed(weight), 24, 40)
    if shape == (3, 90):
        assert launched == ["decode_fixed"]
    assert same(y, F.linear(x, weight))


def test_inputs_that_do_not_fit_are_refused_as_torch_does(launched):  # noqa: F811
    payload = encode_fixed(finite_weights(24, 64))
    good = inputs(2, 64)
    for x, bias in (
        (inputs(4, 32), None),
        (good.float(), None),
        (good, torch.zeros(23).bfloat16()),
        (good[0, 0], None),
    ):
        with pytest.raises(RuntimeError):
            fixed_products.linear(x, payload, 24, 64, bias)
    assert set(launched) == {"decode_fixed"}
    column = torch.ones(1).bfloat16()  # torch broadcasts it
    assert same(fixed_products.linear(good, payload, 24, 64, column), F.linear(good, finite_weights(24, 64), column))


def test_inputs_of_any_address_and_shape(launched):  # noqa: F811
    weight, room = finite_weights(24, 64), torch.randn(6 * 64 + 1).bfloat16()
    payload = encode_fixed(weight)
    moved = torch.cat([torch.zeros(3, dtype=torch.uint8), payload])[3:]
    odd = room[1:].view(2, 3, 64)
    y = fixed_products.linear(odd, moved, 24, 64)
    assert y.shape == (2, 3, 24)
    check(y.view(6, 24), odd.reshape(6, 64), weight)
    turned = inputs(64, 5).t()
    check(fixed_products.linear(turned, payload, 24, 64), turned.contiguous(), weight)


def test_plans_occupy_the_gpu_and_fit_the_kernels():
    for batch in (1, 8, 9, 17, 33, 64):
        for rows, columns in (
            (16, 64),
            (1024, 4096),
            (4096, 4096),
            (14336, 4096),
            (4096, 14336),
            (151936, 1024),
            (9, 9),
        ):
            chosen = fixed_products.plan(batch, rows, columns, PROCESSORS)
            rows_of_blocks = chosen.blocks // chosen.splits * chosen.row_tiles * 16
            assert rows <= rows_of_blocks < rows + chosen.row_tiles * 16
            assert 0 < chosen.warps <= (16 if batch <= 32 else 8)
            assert chosen.splits == 1 or chosen.blocks <= PROCESSORS * (1 if batch <= 8 else 2)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_120"])
def test_the_kernels_compile(architecture, monkeypatch, tmp_path):
    monkeypatch.setenv("NETWEIGHT_CACHE", str(tmp_path))
    try:
        launching.compiler_version()
    except CudaUnavailable as error:
        pytest.skip(str(error))
    code = launching.cubin("fixed.cu", architecture)
    assert code[:4] == b"\x7fELF"
    for entry in ("decode_fixed", "encode_fixed", "product_8", "product_16", "product_32", "product_64", "finish"):
        assert entry.encode() in code
