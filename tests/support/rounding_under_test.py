"""What lossy coding must give, told a second time: with frexp and rint in float64 instead of bits of float32.

And lossy blobs taken apart and put together, to damage them on purpose.
"""

import struct
from itertools import pairwise

import numpy as np
import xxhash

from netweight.codec.header import varint

MANTISSA = {"BF16": 7, "F16": 10, "F32": 23}
LARGEST = {"BF16": 255 * 2.0**120, "F16": 65504.0, "F32": float(np.finfo(np.float32).max)}
STORED = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}


def values_of(data, dtype):
    """The numbers in a tensor's bytes as float64."""
    stored = np.frombuffer(data, STORED[dtype])
    with np.errstate(invalid="ignore"):  # signaling NaNs
        return (stored.astype("<u4") << 16).view("<f4").astype(np.float64) if dtype == "BF16" else stored.astype("<f8")


def kept(numbers, bits, half_up=False):
    """Numbers rounded to so many mantissa bits, however small or large they are."""
    fraction, exponent = np.frexp(numbers)
    whole = np.ldexp(fraction, bits + 1)
    if half_up:
        whole = np.sign(whole) * np.floor(np.abs(whole) + 0.5)
    elif bits:
        whole = np.rint(whole)
    else:  # without a mantissa it is the exponent, biased as that of float32, that must become even
        up = (np.abs(whole) > 1.5) | ((np.abs(whole) == 1.5) & (exponent % 2 == 1))
        whole = np.sign(whole) * np.where(whole == 0, 0, 1 + up)
    return np.ldexp(whole, exponent - bits - 1)


def expected(data, dtype, bits, block, fidelity):
    """What a tensor must decode to, and which of its numbers must be kept exactly."""
    weights = values_of(data, dtype)
    size, own = np.abs(weights), MANTISSA[dtype]
    with np.errstate(all="ignore"):
        factors = np.ones(len(weights))
        if block is not None:
            usable = np.where(np.isfinite(size) & (size >= 2.0**-126), size, 0)
            largest = np.maximum.reduceat(usable, np.arange(0, len(usable), block))
            fraction = np.where(largest > 0, np.frexp(largest)[0] * 2, 1.0)
            factors = np.repeat(np.floor(fraction * 256) / 256, min(block, len(weights)))[: len(weights)]
        quotients = weights / factors
        if fidelity == "reference":
            quotients = kept(quotients, own) if block is not None else quotients
            symbols = kept(quotients, bits, half_up=True)
        else:
            symbols = kept(quotients, bits)
        product = symbols * factors  # exact in float64
        found = kept(product, own)
        if dtype == "F16":  # whose subnormal numbers have fewer bits
            found = np.where(np.abs(product) < 2.0**-14, np.rint(product * 2.0**24) * 2.0**-24, found)
        found = np.where(np.abs(found) > LARGEST[dtype], np.sign(found) * np.inf, found)
        bound = 1 / (2 ** (bits + 1) + 1)
        if block is not None and dtype != "F32":
            last = 1 + 1 / (2 ** (own + 1) + 1)
            bound = (1 + bound) * last ** (2 if fidelity == "reference" else 1) - 1
        exact = ~np.isfinite(weights) | (np.abs(quotients) < 2.0**-126) | (size < 2.0**-126)
        if fidelity == "corrected":
            exact |= ~np.isfinite(found) | (np.abs(found - weights) > bound * size * (1 + 1e-12))
    exact &= weights != 0
    return np.where(exact, weights, found), exact, bound


def change(data, decoded, dtype):
    """The largest relative change of a number that is not zero and finite before and after; zeros must stay zeros."""
    before, after = values_of(data, dtype), values_of(decoded, dtype)
    assert ((before == 0) == (after == 0)).all()
    assert (np.signbit(before) == np.signbit(after)).all()
    usual = np.isfinite(before) & (before != 0)
    with np.errstate(invalid="ignore"):
        return float((np.abs(after - before)[usual] / np.abs(before[usual])).max(initial=0.0))


# ---- blobs -----------------------------------------------------------------------------------------------------------


def fields_of(blob):
    """Where the variable part of a lossy blob's header starts and its numbers: shape, block size, four lengths."""
    at, numbers = 36, []
    for _ in range(blob[7] + 5):
        value, shift, byte = 0, 0, 128
        while byte >= 128:
            if at == len(blob) or shift == 63:
                return None
            byte = blob[at]
            value |= (byte & 127) << shift
            at, shift = at + 1, shift + 7
        numbers.append(value)
    return at, numbers


def with_lossy_check(blob):
    """The same lossy blob with a header check that fits, if its header can be read so far."""
    found = fields_of(blob) if len(blob) >= 36 else None
    if found is None:
        return blob
    check = xxhash.xxh3_64_intdigest(blob[:24] + blob[28 : found[0]]) & 0xFFFFFFFF
    return blob[:24] + struct.pack("<I", check) + blob[28:]


def with_sections(blob, sections, **changes):
    """A lossy blob with other sections, and with other numbers in its header: `block` or `shape`."""
    _, numbers = fields_of(blob)
    dimensions = blob[7]
    shape = changes.get("shape", numbers[:dimensions])
    numbers = [*shape, changes.get("block", numbers[dimensions]), *map(len, sections)]
    head = blob[:7] + bytes((len(shape),)) + blob[8:36] + b"".join(map(varint, numbers))
    return with_lossy_check(head + b"".join(sections))


def sections_of(blob):
    """The four sections of a lossy blob: words, normalizers, gaps, kept weights."""
    at, numbers = fields_of(blob)
    ends = np.cumsum([at, *numbers[-4:]]).tolist()
    return [blob[start:stop] for start, stop in pairwise(ends)]
