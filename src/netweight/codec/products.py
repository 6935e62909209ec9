"""Products of bf16 weights with few rows of inputs, added up in the order of torch's own, so that bits are the same.

torch adds the products of a row in 64 or 128 partial sums, by the width of the processor's vectors. The native module
does so, too, with fewer instructions, on weights that were just decoded and are in the cache yet. Which order torch
takes, here and for such a shape, is found by trying; where it is neither, torch multiplies.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

from netweight.codec.backend import compiled, in_our_words

MOST_INPUTS = 256  # rows of inputs; with more, decoding is a small part of a product
_A_FIXED_WEIGHT = in_our_words("a weight in the fixed-length form")


@cache
def sums_of(rows: int, columns: int, inputs: int, threads: int, biased: bool) -> int:
    """In how many partial sums torch adds up such a product: 64, 128, or 0 for an order that is not ours."""
    known = [sums for sums in (64, 128) if compiled is not None and columns % sums == 0]
    if not known:
        return 0
    # Terms that cancel leave nothing but the rounding errors of the order in which they were added.
    generator = torch.Generator().manual_seed(0)
    places, half = torch.randperm(columns, generator=generator), columns // 2
    noise = torch.randn(rows + half, generator=generator).bfloat16()
    other = torch.randn(inputs, half, generator=generator).bfloat16()
    window, bias = noise.as_strided((rows, half), (1, 1)), noise[:rows] if biased else None
    weight, x = torch.cat([window, -window], 1)[:, places], torch.cat([other, other], 1)[:, places]
    wanted, found = F.linear(x, weight, bias), torch.empty(inputs, rows, dtype=torch.bfloat16)
    for sums in known:
        multiply(weight, rows, x, bias, sums, found, threads)
        if torch.equal(found, wanted):
            return sums
    return 0


def multiply(
    weight: torch.Tensor, rows: int, x: torch.Tensor, bias: torch.Tensor | None, sums: int, out: torch.Tensor,
    threads: int, *, fixed: bool = False,
) -> None:  # fmt: skip
    """Fill `out`, of shape (inputs, rows), perhaps columns of another tensor, from plain or fixed-length weights."""
    with _A_FIXED_WEIGHT:
        compiled.multiply(
            weight.data_ptr(), weight.numel() if fixed else 0, rows, x.shape[1], x.data_ptr(), x.shape[0],
            0 if bias is None else bias.data_ptr(), sums, out.data_ptr(), out.stride(0), threads,
        )  # fmt: skip


def decode_fixed(payload: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Decode a payload on the CPU into a contiguous matrix."""
    (rows, columns), threads = out.shape, torch.get_num_threads()
    with _A_FIXED_WEIGHT:
        compiled.decode_fixed(payload.data_ptr(), payload.numel(), rows, columns, out.data_ptr(), threads)
    return out
