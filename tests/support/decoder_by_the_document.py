"""A decoder that follows docs/format.md and shares no code with the library; it checks what it reads."""

# By number: bytes of an element's number, numbers of an element (in eighths, for types below a byte), exponent.
TYPES = {n: (1, 8, False) for n in (1, 2, 3, 6)} | {n: (1, 8, True) for n in (4, 5, 7, 8)}
TYPES |= {9: (2, 8, False), 10: (2, 8, False), 11: (2, 8, True), 12: (2, 8, True), 13: (4, 8, False), 14: (4, 8, False)}
TYPES |= {
    15: (4, 8, True),
    16: (8, 8, True),
    17: (8, 8, False),
    18: (8, 8, False),
    19: (4, 16, True),
    20: (8, 16, True),
}
TYPES |= {21: (2, 16, True), 22: (1, 4, False), 23: (1, 6, False), 24: (1, 6, False)}


class Bytes:
    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, n):
        assert self.at + n <= len(self.data)
        self.at += n
        return self.data[self.at - n : self.at]

    def number(self, n):
        return int.from_bytes(self.take(n), "little")

    def numbers(self, count, width):
        return [self.number(width) for _ in range(count)]

    def varint(self):
        value = shift = 0
        while True:
            byte = self.number(1)
            value, shift = value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value


# ---- the check -------------------------------------------------------------------------------------------------------


def times(x, y):
    product = 0
    while y:
        product, x, y = product ^ x * (y & 1), (x << 1) ^ 0x11B * (x >> 7), y >> 1
    return product


INVERSE = [0] + [next(y for y in range(256) if times(x, y) == 1) for x in range(1, 256)]
SUBSTITUTE = [
    0x63 ^ x ^ (x << 1 | x >> 7) & 255 ^ (x << 2 | x >> 6) & 255 ^ (x << 3 | x >> 5) & 255 ^ (x << 4 | x >> 4) & 255
    for x in INVERSE
]
MIX = [[times(factor, s) for s in SUBSTITUTE] for factor in (1, 2, 3)]


def aes(state):
    out = bytearray(16)
    for c in range(4):
        a = [state[4 * ((c + r) % 4) + r] for r in range(4)]
        for r in range(4):
            out[4 * c + r] = MIX[1][a[r]] ^ MIX[2][a[(r + 1) % 4]] ^ MIX[0][a[(r + 2) % 4]] ^ MIX[0][a[(r + 3) % 4]]
    return bytes(out)


def xor(a, b):
    return bytes(x ^ y for x, y in zip(a, b, strict=True))


def check(data):
    states = [bytes(range(16 * k, 16 * k + 16)) for k in range(16)]
    padded = data + bytes(-len(data) % 256)
    for start in range(0, len(padded), 256):
        states = [xor(aes(s), padded[start + 16 * k : start + 16 * k + 16]) for k, s in enumerate(states)]
    f = len(data).to_bytes(8, "little") + bytes(8)
    for state in states:
        f = xor(aes(f), state)
    return aes(aes(aes(f)))[:8]


# ---- planes ----------------------------------------------------------------------------------------------------------


def fields(data, bits):
    whole = int.from_bytes(data, "little")
    return [whole >> (i * bits) & ((1 << bits) - 1) for i in range(64)]


def split(source, width):
    byte = source.number(1)
    raw, floats = byte & 127, byte >> 7
    assert raw < 8 * width
    if not floats:
        return raw, lambda s, r: s << raw | r, lambda v: v & ((1 << raw) - 1)
    low = (1 << (raw - 1)) - 1

    def place(s, r):
        return s << (raw - 1) | r & low | (r >> (raw - 1)) << (8 * width - 1)

    return raw, place, lambda v: v & low | (v >> (8 * width - 1)) << (raw - 1)


def runs_of(source, width):
    symbols = []
    for _ in range(source.number(width)):
        first, length = source.number(2), source.number(width)
        symbols += range(first, first + length)
    return symbols


def slots_of(pairs):
    return [(symbol, f, k) for symbol, f in pairs for k in range(f)]


def patches(source, streams, words, put):
    rare = source.numbers(source.number(1), 2)
    for g in range(streams):
        position, left = -1, words[g]
        while left:
            word, left = source.number(2), left - 1
            position += (word & 4095) + 1
            code = word >> 12
            if code == 14:
                put(g, position, source.number(2))
                left -= 1
            elif code < 14:
                put(g, position, rare[code])


def rans(source, width, count, steep):
    raw, place, raw_of = split(source, width)
    streams = source.number(1)
    symbols = runs_of(source, 1)
    described = source.take(len(symbols))
    if steep:
        slots = slots_of(zip(symbols, described, strict=True))
    else:
        order = sorted(zip(symbols, described, strict=True), key=lambda row: (row[1] >> 7, row[0]))
        slots = slots_of((symbol, byte & 127) for symbol, byte in order)
    assert len(slots) == 256
    lengths = [(source.number(3), source.number(3)) for _ in range(streams)]
    states = [
        [low | high << 8 for low, high in zip(source.take(64), source.take(64), strict=True)] for _ in range(streams)
    ]
    rows, low = -(-count // (64 * streams)), min(raw, 8)
    used, above = 8 * low, 8 * (raw - low)
    missing = 0 if rows == 1 else min(used, 64 - used)
    low_region = source.take(streams * (used * (rows - 1) - missing))
    upper = source.take(rows * streams * above)
    bodies = [Bytes(source.take(length)) for length, _ in lengths]
    decoded = [[] for _ in range(streams)]
    for _ in range(rows):
        for g in range(streams):
            row = []
            for i, x in enumerate(states[g]):
                symbol, f, k = slots[x & 255]
                x = f * (x >> 8) + k
                states[g][i] = x << 8 | bodies[g].number(1) if x < 256 else x
                row.append(symbol)
            decoded[g].append(row)
    assert all(body.at == len(body.data) for body in bodies)
    assert all(256 <= x <= 511 for lanes in states for x in lanes)
    out = [0] * (rows * streams * 64)
    for g in range(streams):
        ends = bytes(x & 255 for x in states[g])
        assert not any(ends[used + missing :])
        for t in range(rows):
            if t == rows - 1:
                block = ends[:used]
            elif t == rows - 2:
                start = t * streams * used + g * (used - missing)
                block = low_region[start : start + used - missing] + ends[used : used + missing]
            else:
                block = low_region[(t * streams + g) * used :][:used]
            bits = fields(block, low)
            if above:
                more = fields(upper[(t * streams + g) * above :][:above], raw - low)
                bits = [a | b << 8 for a, b in zip(bits, more, strict=True)]
            for i in range(64):
                out[(t * streams + g) * 64 + lane(i, width)] = place(decoded[g][t][i], bits[i])

    def put(g, position, symbol):
        at = (position // 64 * streams + g) * 64 + lane(position % 64, width)
        assert at < count
        out[at] = place(symbol, raw_of(out[at]))

    patches(source, streams, [words for _, words in lengths], put)
    return out[:count]


def lane(i, width):
    return i if width == 1 else ((i >> 3) & 1) * 32 + (i >> 4) * 8 + (i & 7)


def wide(source, width, count):
    raw, place, raw_of = split(source, width)
    pairs = []
    for symbol in runs_of(source, 2):
        f = source.number(1)
        pairs.append((symbol, f if f < 128 else (f & 127) << 8 | source.number(1)))
    slots = slots_of(pairs)
    assert len(slots) == 4096
    length, words = source.number(3), source.number(3)
    states, blocks, low = source.numbers(32, 4), -(-count // 64), min(raw, 8)
    bits = [f for _ in range(blocks) for f in fields(source.take(8 * low), low)]
    above = [f for _ in range(blocks) for f in fields(source.take(8 * (raw - low)), raw - low)]
    stream, out = Bytes(source.take(2 * length)), []
    for k in range(64 * blocks):
        symbol, f, rank = slots[states[k % 32] & 4095]
        x = f * (states[k % 32] >> 12) + rank
        states[k % 32] = x << 16 | stream.number(2) if x < 65536 else x
        out.append(place(symbol, bits[k] | above[k] << 8))
    assert stream.at == len(stream.data)
    assert all(x == 65536 for x in states)

    def put(_, position, symbol):
        assert position < count
        out[position] = place(symbol, raw_of(out[position]))

    patches(source, 1, [words], put)
    return out[:count]


def packed(source, count):
    blocks = -(-count // 64)
    widths = source.take(-(-blocks // 2))
    out = []
    for j in range(blocks):
        bits = widths[j // 2] >> 4 * (j % 2) & 15
        out += [f << (8 - bits) for f in fields(source.take(8 * bits), bits)]
    return out[:count]


def sparse(source, width, count, depth, read_rest):
    common = source.number(width)
    nibbles = plane(source, 1, -(-count // 4), depth - 1)
    assert not any(n & 15 for n in nibbles)
    marks = [n >> (4 + i) & 1 for n in nibbles for i in range(4)]
    assert not any(marks[count:])
    rest = iter(read_rest(sum(marks)) if any(marks) else ())
    return [next(rest) if mark else common for mark in marks[:count]]


def joint(source, count, depth):
    raw, place, _ = split(source, 2)
    coarser = source.number(1)
    assert raw >= 1
    assert coarser >= 1
    assert raw + coarser <= 8
    symbols, values, coarse = source.numbers(3, 1)
    named = source.numbers(symbols + values + coarse, 2)
    completed, sharpened = source.number(3), source.number(3)

    def bits_of(elements, bits):
        return iter([f for _ in range(-(-elements // 64)) for f in fields(source.take(8 * bits), bits)])

    lowest, middle, out = bits_of(completed, raw), bits_of(sharpened, coarser), []
    for number in plane(source, 1, count, depth - 1):
        what = named[number]
        if symbols <= number < symbols + values:
            out.append(what)
        else:
            symbol = what if number < symbols else what << coarser | next(middle)
            out.append(place(symbol, next(lowest)))
    return out


def plane(source, width, count, depth):
    assert depth >= 0
    mode = source.number(1)
    if mode == 0:
        return source.numbers(count, width)
    if mode == 1:
        return [source.number(width)] * count
    if mode == 2:
        return packed(source, count)
    if mode in (3, 5):
        return rans(source, width, count, mode == 5)
    if mode == 4:
        return wide(source, width, count)
    if mode == 6:
        return sparse(source, width, count, depth, lambda m: plane(source, width, m, depth - 1))
    if mode == 7:
        values = source.numbers(source.number(1) + 1, 2)
        return [values[i] for i in plane(source, 1, count, depth - 1)]
    if mode == 9:
        return joint(source, count, depth)
    assert mode == 8
    upper = plane(source, 1, count, depth - 1)
    return [a << 8 | b for a, b in zip(upper, plane(source, 1, count, depth - 1), strict=True)]


def planes(source, size, count, depth):
    numbers = plane(source, min(size, 2), count, depth)
    for _ in range(size - 2):
        numbers = [a << 8 | b for a, b in zip(numbers, plane(source, 1, count, depth), strict=True)]
    return numbers


def order(x, bits):
    return x ^ ((1 << (bits - 1)) - 1) if x >> (bits - 1) else x


def chunk_of(source, size, floats, count, base):
    first, mask = source.data[0], (1 << 8 * size) - 1
    if first == 17:
        source.take(1)
        numbers, total = [], 0
        for step in body(source, size, count):
            numbers.append(total := (total + step) & mask)
        return numbers
    if first == 18:
        source.take(1)
        return stepped(planes(source, size, count, 8), size, floats, base)
    if first == 19:
        source.take(1)
        return stepped(classes(source, size, base), size, floats, base)
    if first == 20 and size == 1:
        values, r = source.take(3)[1:], source.number(3)
        assert 0 < 4 * r <= count
        pairs = chunk_of(Bytes(source.take(len(source.data) - source.at)), 4, False, r, None)
        return [v for pair in pairs for v, n in zip(values, (pair & 65535, pair >> 16), strict=True) for _ in range(n)]
    return body(source, size, count)


def classes(source, size, base):
    assert size == 2
    thresholds = source.take(7)
    assert list(thresholds) == sorted(thresholds)
    of = [sum(threshold <= (b >> 7 & 255) for threshold in thresholds) for b in base]
    folded = [iter(planes(source, size, of.count(c), 8) if c in of else ()) for c in range(8)]
    return [next(folded[c]) for c in of]


def stepped(folded, size, floats, base):
    bits = 8 * size
    mask = (1 << bits) - 1
    steps = [(f >> 1) ^ -(f & 1) for f in folded]
    if not floats:
        return [(b + d) & mask for b, d in zip(base, steps, strict=True)]
    return [order((order(b, bits) + d) & mask, bits) for b, d in zip(base, steps, strict=True)]


def body(source, size, count):
    if source.data[source.at] != 16:
        return planes(source, size, count, 8)
    source.take(1)
    return sparse(source, size, count, 8, lambda m: planes(source, size, m, 7))


def decode(blob, base=b""):
    """The tensor's bytes; `base` are those of the base, if the blob has one."""
    source = Bytes(blob)
    assert source.take(4) == b"NWT\1"
    size, eighths, floats = TYPES[source.number(1)]
    flags, chunk_log2, dimensions = source.take(3)
    source.take(20)  # digest and header check
    elements = 1
    for _ in range(dimensions):
        elements *= source.varint()
    if flags & 0x80:
        source.take(16)
    count, step = elements * eighths // 8, 1 << chunk_log2
    lengths = source.numbers(-(-count // step), 4)
    checks = [source.take(8) for _ in lengths]
    out = b""
    for i, length in enumerate(lengths):
        n = min(step, count - i * step)
        below = Bytes(base[i * step * size : (i * step + n) * size]).numbers(n, size) if base else None
        chunk = Bytes(source.take(length))
        numbers = chunk_of(chunk, size, floats, n, below)
        assert chunk.at == length
        data = b"".join(number.to_bytes(size, "little") for number in numbers)
        assert check(data) == checks[i]
        out += data
    assert source.at == len(blob)
    return out
