"""Blobs for tests: put together by hand, so that they use what the encoder would not choose, and damaged on purpose."""

import struct
from collections.abc import Iterator

import numpy as np
import xxhash

from netweight import codec
from netweight.codec.header import BY_CODE, BY_NAME, HAS_BASE, HAS_CPU_MODES, VERSION, varint
from netweight.codec.numpy_codec import check_of
from netweight.codec.numpy_rans import write_rans, write_wide
from netweight.codec.numpy_tables import Split, histogram, table, wide_table

LEVELS = ("fast", "default", "high", "max")


# ---- putting blobs together ------------------------------------------------------------------------------------------


def assemble(dtype, shape, chunks, data, *, cpu_modes=False, chunk_log2=18):
    """A blob of given chunks, which stand for as many parts of `data`; `cpu_modes` sets the flag for modes above 4."""
    step = BY_NAME[dtype].number_bytes << chunk_log2
    checks = b"".join(struct.pack("<Q", check_of(data[i * step : (i + 1) * step])) for i in range(len(chunks)))
    level = 1 | (HAS_CPU_MODES if cpu_modes else 0)
    fields = (b"NWT", VERSION, BY_NAME[dtype].code, level, chunk_log2, len(shape), xxhash.xxh3_128_digest(checks))
    index = b"".join(struct.pack("<I", len(chunk)) for chunk in chunks) + checks
    shape = b"".join(map(varint, shape))
    return with_check(struct.pack("<3sBBBBB16s", *fields) + bytes(4) + shape + index + b"".join(chunks))


def index_of(blob):
    """Where the index, its checks and the chunks start; None if a decoder would not get that far."""
    element = BY_CODE.get(blob[4]) if len(blob) >= 28 else None
    if element is None or blob[6] > 40:
        return None
    at, elements = 28, 1
    for _ in range(blob[7]):
        value, shift, byte = 0, 0, 128
        while byte >= 128:
            if at == len(blob) or shift == 63:
                return None
            byte = blob[at]
            value |= (byte & 127) << shift
            at, shift = at + 1, shift + 7
        elements *= value
    chunks = -(-(elements * element.bits // 8 // element.number_bytes) >> blob[6])
    at += 16 if blob[5] & HAS_BASE else 0
    end = at + 12 * chunks
    return (at, at + 4 * chunks, end) if end <= len(blob) else None


def with_check(blob):
    """The same blob with a header check that fits, if its header can be read so far."""
    index = index_of(blob)
    if index is None:
        return blob
    check = xxhash.xxh3_64_intdigest(blob[:24] + blob[28 : index[2]]) & 0xFFFFFFFF
    return blob[:24] + struct.pack("<I", check) + blob[28:]


def with_index(blob):
    """The same blob with a last chunk that ends where the blob ends, and a header check that fits."""
    index = index_of(blob)
    if index is None or index[0] == index[1]:
        return with_check(blob)
    start, checks, end = index
    lengths = struct.unpack(f"<{(checks - start) // 4}I", blob[start:checks])
    last = len(blob) - end - sum(lengths[:-1])
    if not 0 <= last < 1 << 32:
        return with_check(blob)
    return with_check(blob[: checks - 4] + struct.pack("<I", last) + blob[checks:])


# ---- planes that the encoder would not write -------------------------------------------------------------------------


def skewed(count, width, rng):
    """Elements of which most are alike and some are anything, so that tables need patches."""
    top = 1 << 8 * width
    scale = rng.uniform(0, 0.9) ** 4 * top / 16
    values = (rng.laplace(0, scale + 0.3, count) + rng.integers(0, top)).astype(np.int64) % top
    odd = rng.random(count) < rng.choice([0, 0.01, 0.1])
    values[odd] = rng.integers(0, top, odd.sum())
    return values.astype("u1" if width == 1 else "<u2")


def rans_plane(elements, raw_bits, signed, streams):
    """A plane in the rans mode; None if this split needs too many patches."""
    split = Split(elements.dtype.itemsize, raw_bits, signed)
    counts, _ = histogram(elements, split, 1)
    return write_rans(table(counts, split, exhaustive=False), elements, streams)


def wide_plane(elements, raw_bits, signed):
    """A plane in the wide_rans mode; None if this split gives no such table or too many patches."""
    split = Split(elements.dtype.itemsize, raw_bits, signed)
    choice = wide_table(histogram(elements, split, 1)[0], split)
    return choice and write_wide(choice, elements)


def handmade(rng) -> Iterator[tuple[str, bytes, bytes]]:
    """Name, blob and tensor for every split, one plane each, of few elements."""
    for width, dtype in ((1, "U8"), (2, "U16")):
        for raw_bits in range(8 * width - 1):
            for signed in (False, True) if raw_bits else (False,):
                for streams in (0, 1, 2, 4):  # 0: the wide mode
                    count = int(rng.choice([1, 2, 63, 64, 65, 128, 129, 200, 256, 257, 300, 520, 700]))
                    elements = skewed(count, width, rng)
                    plane = (
                        rans_plane(elements, raw_bits, signed, streams)
                        if streams
                        else wide_plane(elements, raw_bits, signed)
                    )
                    if plane is None:
                        continue
                    name = f"{dtype}-{raw_bits}{'s' if signed else 'u'}-{streams or 'wide'}-{count}"
                    data = elements.tobytes()
                    yield name, assemble(dtype, (count,), [plane], data), data


# ---- tensors ---------------------------------------------------------------------------------------------------------

KINDS = ("weights", "wide", "counts", "sparse", "steps", "noise", "constant", "palette", "runs", "positions")


def tensor_data(dtype, count, kind, rng):
    """The bytes of `count` elements of a type (a multiple of 4 for types of less than a byte), of one of `KINDS`."""
    element = BY_NAME[dtype]
    size = element.number_bytes
    numbers = count * element.bits // 8 // size
    if kind in ("weights", "wide"):
        spread = 0.02 if kind == "weights" else np.exp(2 * rng.standard_normal(numbers))
        values = rng.standard_normal(numbers) * spread
        if size == 8:
            data = values.astype("<f8").tobytes()
        elif dtype in ("F16", "C32"):
            data = values.astype("<f2").tobytes()
        else:  # the upper bytes of fp32: bf16, and bytes that look like the top of a float
            data = values.astype("<f4").view("u1").reshape(-1, 4)[:, 4 - size :].tobytes()
    elif kind == "counts":
        data = rng.poisson(4, numbers).astype("<u8").view("u1").reshape(-1, 8)[:, :size].tobytes()
    elif kind == "sparse":
        values = rng.integers(0, 256, (numbers, size), np.uint8)
        data = (values * (rng.random((numbers, 1)) < 0.03)).astype(np.uint8).tobytes()
    elif kind == "steps":
        data = (rng.integers(0, 256, (numbers, size), np.uint8) & rng.choice([0xE0, 0xFC, 0xFE])).astype("u1").tobytes()
    elif kind in ("palette", "runs"):
        values = rng.integers(0, 256, (5, size), np.uint8)
        chosen = rng.choice(5, numbers, p=[0.6, 0.2, 0.1, 0.06, 0.04])
        data = values[chosen if kind == "palette" else np.sort(chosen)].tobytes()
    elif kind == "positions":
        data = (np.arange(numbers, dtype="<u8") * rng.integers(1, 9)).view("u1").reshape(-1, 8)[:, :size].tobytes()
    elif kind == "noise":
        data = rng.bytes(numbers * size)
    else:
        data = rng.bytes(size) * numbers
    return bytes(byte & 1 for byte in data) if dtype == "BOOL" else data


def encoded(rng) -> Iterator[tuple[str, bytes, bytes]]:
    """Name, blob and tensor for every element type, level and kind of data, in one to three chunks."""
    for dtype in BY_NAME:
        for level in LEVELS:
            for kind in KINDS:
                count = 4 * int(rng.integers(150, 650))
                data = tensor_data(dtype, count, kind, rng)
                blob = codec.encode_raw(data, dtype, (2, count // 2), level=level, chunk_log2=10)
                yield f"{dtype}-{level}-{kind}", blob, data


def repeated(dtype, count, values, rng):
    """The bytes of `count` floats of wide or narrow spread, of which each of `values` makes up a share."""
    numbers = rng.standard_normal(count) * 10.0 ** rng.integers(-6, 2) * np.exp(rng.choice([0, 2]) * rng.random(count))
    for value in values:
        numbers[rng.random(count) < rng.choice([0.002, 0.02, 0.1])] = value
    number = BY_NAME[dtype].number_bytes
    if number == 8:
        return numbers.astype("<f8").tobytes()
    return numbers.astype("<f4").view("u1").reshape(-1, 4)[:, 4 - number :].tobytes()


def joint_blobs(rng) -> Iterator[bytes]:
    """Blobs of whose planes some are of the mode joint, small ones."""
    for dtype in ("BF16", "BF16", "F32", "F64"):
        data = repeated(dtype, 1 << 13, (0.0, -0.0, 1.0), rng)
        yield codec.encode_raw(data, dtype, (1 << 13,), level="high")


# ---- damage ----------------------------------------------------------------------------------------------------------


def mutated(blob, other, rng):
    """A damaged copy: flipped, set, cut, spliced with `other`, stretched, or with another length or header field.

    Two times of three the index and the header check are made to fit again, so that what lies deeper is reached.
    """
    new = bytearray(blob)
    at = int(rng.integers(0, len(new)))
    kind = int(rng.integers(0, 10))
    if kind <= 1:
        for place in rng.integers(0, 8 * len(new), int(rng.integers(1, 5))).tolist():
            new[place >> 3] ^= 1 << (place & 7)
    elif kind == 2:
        new[at : at + 4] = rng.bytes(min(4, len(new) - at))
    elif kind == 3:
        del new[at:]
    elif kind == 4:
        new = new[:at] + other[int(rng.integers(0, len(other))) :]
    elif kind == 5:
        length = int(rng.integers(1, 80))
        new[at:at] = new[at : at + length]
    elif kind == 6:
        del new[at : at + int(rng.integers(1, 80))]
    elif kind == 7:  # where tables and lengths are
        index = index_of(blob)
        start = index[1] if index else 28
        for place in rng.integers(start, min(start + 100, len(new)), 2).tolist():
            new[place] = int(rng.choice([0, 1, 2, 3, 4, 63, 64, 127, 128, 255, int(rng.integers(0, 256))]))
    elif kind == 8:
        new[int(rng.integers(3, min(36, len(new))))] = int(rng.choice([0, 1, 2, 3, 4, 10, 12, 22, 64, 255]))
    else:
        new[at : at + 16] = bytes((int(rng.choice([0, 255])),)) * min(16, len(new) - at)
    repair = int(rng.integers(0, 3))
    damaged = bytes(new)
    return (damaged, with_check(damaged), with_index(damaged))[repair]
