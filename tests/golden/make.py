"""Writes the golden blobs: `PYTHONPATH=src:tests/support python tests/golden/make.py`.

`accept/` must decode in every release to the bytes whose digest `manifest.json` holds; `refuse/` must be refused with
the error it names. Blobs of a released version are never written anew: add to them instead.
"""

import hashlib
import json
import shutil
import struct
from pathlib import Path

import numpy as np
from blobs_under_test import BY_NAME, LEVELS, assemble, handmade, rans_plane, tensor_data, wide_plane, with_check
from rounding_under_test import sections_of, with_lossy_check, with_sections

from netweight import codec

HERE = Path(__file__).parent
SEED = 2410_20650

KIND_OF = dict(zip(BY_NAME, ["counts", "sparse", "steps", "weights", "wide"] * 5, strict=False))


def accepted(rng):
    """Name, blob and decoded bytes of every blob that must decode; `gpu-` is encoded with `gpu_modes`."""
    for dtype in BY_NAME:
        for level in LEVELS:
            kind = KIND_OF[dtype] if level == "default" else "weights" if level == "fast" else "wide"
            data = tensor_data(dtype, 1240, kind, rng)
            yield f"{dtype}-{level}", codec.encode_raw(data, dtype, (31, 40), level=level, chunk_log2=10), data
            if level in ("fast", "default"):  # which GPUs encode
                blob = codec.encode_raw(data, dtype, (31, 40), level=level, chunk_log2=10, gpu_modes=True)
                yield f"gpu-{dtype}-{level}", blob, data
    for kind in ("noise", "constant", "steps"):
        data = tensor_data("F32", 700, kind, rng)
        yield f"F32-{kind}", codec.encode_raw(data, "F32", (700,)), data
    weights = (rng.standard_normal(5000) * 0.02).astype("<f4").view("<u4")
    data = (weights & 0xFFFF0000).tobytes()
    yield "F32-really-bf16", codec.encode_raw(data, "F32", (5000,)), data
    data = (weights & 0xFFFFFC00).tobytes()
    yield "F32-zero-ended", codec.encode_raw(data, "F32", (5000,)), data
    data = (weights >> 16).astype("<u2").tobytes()
    yield "BF16-wide", codec.encode_raw(data, "BF16", (5000,), level="max"), data
    for count in (1 << 14, 1 << 18):  # as many numbers as the encoder gives two and four streams
        data = (rng.random(count) < 0.02).astype("u1").tobytes()
        yield f"BOOL-{count}", codec.encode_raw(data, "BOOL", (count,), chunk_log2=18), data
    for shape in ((), (0,), (3, 0, 2), (1,) * 20, (2, 3, 5)):
        data = tensor_data("BF16", int(np.prod(shape)), "weights", rng)
        yield f"BF16-shape-{'x'.join(map(str, shape)) or 'scalar'}", codec.encode_raw(data, "BF16", shape), data
    unusual = [*handmade(rng)]
    for name, blob, data in unusual[:: len(unusual) // 24]:
        yield f"unusual-{name}", blob, data


def rounded(rng):
    """Name, source, blob and settings of every lossy blob that must decode; sources are among those accepted."""
    for dtype in ("BF16", "F16", "F32"):
        values = (rng.standard_normal(1240) * 0.02).astype("<f4")
        values[:64] = 0.5
        values[rng.integers(64, 1240, 20)] = rng.choice([np.nan, np.inf, -np.inf, 0, -0.0, 1e-42, 65504], 20)
        data = values.astype("<f2").tobytes() if dtype == "F16" else values.tobytes()
        data = values.view("<u2")[1::2].tobytes() if dtype == "BF16" else data
        source = f"rounded-source-{dtype}"
        yield source, None, codec.encode_raw(data, dtype, (31, 40), chunk_log2=10), {}
        for fidelity in ("corrected", "reference") if dtype == "BF16" else ("corrected",):
            for bits, block in ((0, None), (0, 32), (1, 64), (2, 7), (3, 512), (4, 1), (5, 100), (6, 1 << 40)):
                settings = {"mantissa_bits": bits, "block_size": block, "fidelity": fidelity}
                blob = codec.encode_raw(data, dtype, (31, 40), chunk_log2=10, precision=codec.Precision(**settings))
                yield f"rounded-{dtype}-{bits}-{block}-{fidelity}", source, blob, settings


def replaced(data, at, new):
    """`data` with the bytes from `at` on replaced."""
    return data[:at] + bytes(new) + data[at + len(bytes(new)) :]


def refused(rng):
    """Name, blob, error and a part of its message of every blob that must be refused."""
    data = tensor_data("BF16", 600, "weights", rng)
    blob = codec.encode_raw(data, "BF16", (600,))
    for size in (0, 3, 27):
        yield f"cut-to-{size}", blob[:size], "CorruptBlob", "shorter than a header"
    yield "cut-index", blob[:32], "CorruptBlob", "ends inside the index of chunks"
    yield "cut-checks", blob[:37], "CorruptBlob", "ends inside the index of chunks"
    yield "cut-shape", blob[:28], "CorruptBlob", "ends inside the header"
    yield "cut-payload", blob[:-1], "CorruptBlob", "where its index adds up to"
    yield "longer", blob + b"\0", "CorruptBlob", "where its index adds up to"
    yield "marker", b"ZIP" + blob[3:], "CorruptBlob", "marker NWT"
    yield "check", replaced(blob, 24, b"\0\0\0\0"), "CorruptBlob", "checksum"
    at = codec.info(blob).chunk_offsets[0]
    yield "chunk-check", replaced(blob, at + 400, [blob[at + 400] ^ 1]), "CorruptBlob", "do not have the digest"
    yield "digest", with_check(replaced(blob, 8, bytes(16))), "CorruptBlob", "digest does not fit its checks"
    for name, at, value, error, part in (
        ("version", 3, 2, "Unsupported", "format version 2"),
        ("version-0", 3, 0, "Unsupported", "format version 0"),
        ("element-type", 4, 200, "Unsupported", "element type number 200"),
        ("level", 5, 4, "Unsupported", "level number 4"),
        ("flag", 5, 0x21, "Unsupported", "level number 33"),
        ("chunk-size-9", 6, 9, "CorruptBlob", "impossible chunk size"),
        ("chunk-size-23", 6, 23, "CorruptBlob", "impossible chunk size"),
        ("dimensions", 7, 65, "CorruptBlob", "number of dimensions"),
    ):
        yield name, with_check(replaced(blob, at, [value])), error, part
    yield "dimension", replaced(blob, 28, b"\xff" * 10), "CorruptBlob", "dimension in the header is too large"
    huge = replaced(blob, 28, b"\xff" * 8 + b"\x7f")
    yield "shape", huge, "Unsupported", "too large"
    yield "sub-byte", assemble("F6_E2M3", (3,), [], b""), "Unsupported", "whole bytes"
    bomb = assemble("F64", (1 << 40,), [b""], b"", chunk_log2=22)
    yield "index-beyond-end", bomb, "CorruptBlob", "ends inside the index of chunks"

    def of_chunk(chunk, dtype="U8", count=600):
        return assemble(dtype, (count,), [chunk], bytes(count))

    yield "empty-chunk", of_chunk(b""), "CorruptBlob", "ends inside a plane"
    yield "mode-without-flag", of_chunk(b"\5"), "CorruptBlob", "unknown mode"
    yield "raw", of_chunk(bytes(600)), "CorruptBlob", "ends inside a raw plane"
    yield "left-over", of_chunk(b"\1\7\7"), "CorruptBlob", "more bytes than its planes"
    yield "constant", of_chunk(b"\1"), "CorruptBlob", "ends inside a constant plane"
    yield "packed-words", of_chunk(b"\2" + bytes(600), "U16"), "CorruptBlob", "one-byte elements"
    yield "packed-width", of_chunk(b"\2" + b"\x09" + bytes(600)), "CorruptBlob", "wider than a byte"
    yield "packed-cut", of_chunk(b"\2" + b"\x88" * 5 + bytes(600)), "CorruptBlob", "ends inside a packed block"

    elements = np.minimum(rng.geometric(0.4, 600), 6).astype("u1")
    plane = rans_plane(elements, 1, False, 1)
    runs = plane[3]
    entries = 4 + 3 * runs
    symbols = sum(plane[6 + 3 * run] for run in range(runs))
    lengths = entries + symbols
    states = lengths + 6
    length = int.from_bytes(plane[lengths : lengths + 3], "little")
    rare = len(plane) - 1  # where the list of rare symbols starts: there are none
    for name, at, new, part in (
        ("split", 1, [8], "impossible raw bits"),
        ("split-signed", 1, [0x80], "impossible raw bits"),
        ("streams", 2, [3], "impossible number of streams"),
        ("table-runs", 3, [runs + 1], "frequency table"),
        ("table-empty-run", 6, [0], "symbols that cannot be"),
        ("table-symbol", 4, [0xFF, 0xFF], "symbols that cannot be"),
        ("table-zero", entries, [0], "does not add up to 256"),
        ("table-sum", entries, [plane[entries] ^ 1], "does not add up to 256"),
        ("length-beyond-end", lengths, [255, 255, 255], "ends inside an entropy-coded stream"),
        ("words-beyond-end", lengths + 3, [255, 255, 255], "ends inside patches"),
        ("state", states + 64, [0], "states are out of range"),
        ("stream", rare - 1, [plane[rare - 1] ^ 255], "does not end where it should"),
        ("rare-count", rare, [15], "list of rare symbols is too long"),
    ):
        yield f"rans-{name}", of_chunk(replaced(plane, at, new)), "CorruptBlob", part
    shorter = replaced(plane, lengths, struct.pack("<I", length - 1)[:3])
    shorter = shorter[: rare - 1] + shorter[rare:]
    yield "rans-stream-short", of_chunk(shorter), "CorruptBlob", "does not end where it should"
    longer = replaced(plane, lengths, struct.pack("<I", length + 1)[:3])
    longer = longer[:rare] + b"\0" + longer[rare:]
    yield "rans-stream-long", of_chunk(longer), "CorruptBlob", "does not end where it should"
    for name, tail, part in (
        ("place", [0, 0xE002, 0x0001], "outside its chunk"),
        ("symbol", [0, 0xE000, 0x0080], "a patch holds a symbol that cannot be"),
        ("lacking", [0, 0xE000], "lacks its symbol"),
        ("unlisted", [0, 0x1000], "not listed"),
    ):
        patch = struct.pack(f"<B{len(tail) - 1}H", *tail)
        patched = replaced(plane, lengths + 3, struct.pack("<I", len(tail) - 1)[:3])[:rare] + patch
        if name == "place":  # the skip of 4,096 puts the patch behind the last element
            patched = replaced(plane, lengths + 3, b"\3\0\0")[:rare] + struct.pack("<B3H", 0, 0xFFFF, 0xE002, 1)
        yield f"patch-{name}", of_chunk(patched), "CorruptBlob", part
    yield "patch-rare-symbol", of_chunk(plane[:rare] + b"\1\x80\0"), "CorruptBlob", "holds one that cannot be"

    plane = wide_plane(elements, 1, False)
    runs = int.from_bytes(plane[2:4], "little")
    entries = 4 + 4 * runs
    for name, at, new, part in (
        ("split", 1, [0x7F], "impossible raw bits"),
        ("table-symbol", 4, [0xFF, 0xFF], "symbols that cannot be"),
        ("table-long-run", 6, [0xFF, 0xFF], "symbols that cannot be"),
        ("table-zero", entries, [0, 0], "does not add up to 4,096"),
        ("cut", 100, [], "data ends inside"),
    ):
        damaged = replaced(plane, at, new) if new else plane[:at]
        yield f"wide-{name}", of_chunk(damaged), "CorruptBlob", part
    table = struct.pack("<BBHHHBBBB", 4, 1, 1, 0, 2, 0x88, 0, 0x88, 0)
    sizes = bytes(6)
    states = struct.pack("<I", 1 << 16) * 32
    raw = bytes(10 * 8)
    yield "wide-state", of_chunk(table + sizes + bytes(128) + raw), "CorruptBlob", "states are out of range"
    yield "wide-stream-short", of_chunk(table + sizes + states + raw), "CorruptBlob", "entropy-coded stream"


def refused_rounded(rng):
    """Name, blob, error and a part of its message of every lossy blob that must be refused."""
    values = (rng.standard_normal(700) * 0.02).astype("<f4")
    values[::100] = np.nan
    data = values.view("<u2")[1::2].tobytes()
    blob = codec.encode_raw(data, "BF16", (7, 100), precision=codec.Precision(2, 64))
    words, normalizers, gaps, kept = sections_of(blob)

    def plain(array, dtype):
        return codec.encode_raw(array.tobytes(), dtype, array.shape)

    yield "rounded-cut-to-27", blob[:27], "CorruptBlob", "shorter than a header"
    yield "rounded-cut-header", blob[:37], "CorruptBlob", "ends inside the header"
    yield "rounded-cut-section", blob[:-1], "CorruptBlob", "where they add up to"
    yield "rounded-longer", blob + b"\0", "CorruptBlob", "where they add up to"
    yield "rounded-check", replaced(blob, 24, b"\0\0\0\0"), "CorruptBlob", "checksum"
    yield "rounded-digest", with_lossy_check(replaced(blob, 8, bytes(16))), "CorruptBlob", "do not have the digest"
    for name, at, new, error, part in (
        ("version", 3, [2], "Unsupported", "version 2 of lossy blobs"),
        ("element-type", 4, [200], "Unsupported", "not known"),
        ("element-type-integer", 4, [13], "CorruptBlob", "impossible rounding"),
        ("mantissa-bits", 5, [7], "CorruptBlob", "impossible rounding"),
        ("fidelity", 6, [2], "Unsupported", "not known"),
        ("reference-of-f16", 4, [11, 2, 1], "CorruptBlob", "impossible rounding"),
        ("dimensions", 7, [65], "CorruptBlob", "number of dimensions"),
        ("change", 28, struct.pack("<d", -1), "CorruptBlob", "impossible change"),
        ("change-nan", 28, struct.pack("<d", float("nan")), "CorruptBlob", "impossible change"),
    ):
        yield f"rounded-{name}", with_lossy_check(replaced(blob, at, new)), error, part
    sections = {
        "no-words": (b"", normalizers, gaps, kept, "shorter than a header"),
        "no-normalizers": (words, b"", gaps, kept, "missing or too many"),
        "no-gaps": (words, normalizers, b"", kept, "missing or too many"),
        "words-of-bytes": (normalizers, normalizers, gaps, kept, "unexpected content"),
        "few-normalizers": (words, plain(np.zeros(10, "u1"), "U8"), gaps, kept, "unexpected content"),
        "many-kept": (
            words,
            normalizers,
            plain(np.zeros(44, "<u8"), "U64"),
            plain(np.zeros(44, "<u2"), "BF16"),
            "size",
        ),
        "none-kept": (words, normalizers, plain(np.zeros(0, "<u8"), "U64"), plain(np.zeros(0, "<u2"), "BF16"), "size"),
        "gap-too-large": (words, normalizers, plain(np.full(7, 700, "<u8"), "U64"), kept, "outside the tensor"),
        "gaps-too-large": (words, normalizers, plain(np.full(7, 100, "<u8"), "U64"), kept, "outside the tensor"),
        "word-of-infinity": (plain(np.full(700, 255 << 2, "<u2"), "U16"), normalizers, gaps, kept, "no number"),
        "word-too-large": (plain(np.full(700, 0x7FFF, "<u2"), "U16"), normalizers, gaps, kept, "no number"),
        "word-subnormal": (plain(np.full(700, 3, "<u2"), "U16"), normalizers, gaps, kept, "no number"),
    }
    for name, (*parts, message) in sections.items():
        yield f"rounded-{name}", with_sections(blob, parts), "CorruptBlob", message
    yield "rounded-shape", with_sections(blob, sections_of(blob), shape=(701,)), "CorruptBlob", "unexpected content"
    huge = with_sections(blob, sections_of(blob), shape=(1 << 61,))
    yield "rounded-huge", huge, "Unsupported", "too large"
    yield "rounded-blocks", with_sections(blob, sections_of(blob), block=100), "CorruptBlob", "unexpected content"


def accepted_kinds(rng):
    """Name, blob, decoded bytes and the base's bytes or None, of data that suit transforms and modes above 4."""

    def bf16(values):
        return (np.asarray(values, "<f4").view("<u4") >> 16).astype("<u2")

    weights = (rng.standard_normal(3000) * 0.02).astype("<f4")
    moved = weights + (rng.random(3000) < 0.4) * rng.standard_normal(3000).astype("<f4") * 1e-4
    few = rng.standard_normal(8)[rng.integers(0, 8, 3000)]
    kinds = {
        "weights": ("BF16", bf16(weights)),
        "zeros": ("F32", (weights * (rng.random(3000) < 0.1)).astype("<f4")),
        "palette": ("BF16", bf16(few)),
        "mask": ("BOOL", (rng.random(6000) < 0.02).astype("u1")),
        "runs": ("BOOL", np.tril(np.ones((80, 80), "u1"))),
        "steep": ("U8", rng.choice(4, 6000, p=[0.8, 0.1, 0.06, 0.04]).astype("u1")),
        "small": ("I16", rng.poisson(300, 3000).astype("<i2")),
        "positions": ("I64", np.arange(3000, dtype="<i8")),
        "repeated": ("I32", np.tile(np.arange(500, dtype="<i4"), 6)),
        "ids": ("I64", np.minimum(rng.zipf(1.4, 3000), 30_000).astype("<i8")),
    }
    kinds = [(f"{dtype}-{name}", dtype, data.tobytes(), None) for name, (dtype, data) in kinds.items()]
    zeros = bf16(weights * (rng.random(3000) < 0.4)).tobytes()
    kinds.append(("BF16-zeros", "BF16", zeros, None))
    for dtype, convert in {"BF16": bf16, "F16": np.float16, "F32": np.float32, "F64": np.float64}.items():
        pair = [np.ascontiguousarray(convert(values)).tobytes() for values in (moved, weights)]
        kinds.append((f"{dtype}-difference", dtype, *pair))
    counts = rng.integers(0, 1 << 30, 3000)
    near = counts + (rng.random(3000) < 0.1)
    kinds.append(("I32-difference", "I32", near.astype("<i4").tobytes(), counts.astype("<i4").tobytes()))
    for name, dtype, data, base in kinds:
        count = len(data) // BY_NAME[dtype].number_bytes
        for level in LEVELS:
            blob = codec.encode_raw(data, dtype, (count,), level=level, chunk_log2=11, base=base)
            yield f"{name}-{level}", blob, data, base
    rng = np.random.default_rng(SEED + 3)  # what follows draws as before
    weights = (rng.standard_normal(1 << 14) * 0.02).astype("<f4")
    data, base = (
        bf16(values).tobytes() for values in (weights + rng.standard_normal(1 << 14).astype("<f4") * 2e-5, weights)
    )
    for level in LEVELS:
        blob = codec.encode_raw(data, "BF16", (1 << 14,), level=level, base=base)
        yield f"BF16-classes-{level}", blob, data, base
    data = np.concatenate(
        (np.tril(np.ones((64, 64), "u1")).ravel(), np.zeros(70_000, "u1"), np.ones(9, "u1"))
    ).tobytes()
    for level in LEVELS:
        yield f"BOOL-long-runs-{level}", codec.encode_raw(data, "BOOL", (len(data),), level=level), data, None
    values = rng.standard_normal(1 << 14) * 0.02
    for value, share in ((0.0, 0.06), (-0.0, 0.03), (1.0, 0.02)):
        values[rng.random(1 << 14) < share] = value
    moments = (values**2 * 1e-3).astype("<f4")
    for dtype, data in (("BF16", bf16(values.astype("<f4"))), ("F32", values.astype("<f4")), ("F32", moments)):
        name = "one-sign" if data is moments else "repeated"
        for level in LEVELS:
            blob = codec.encode_raw(data.tobytes(), dtype, (1 << 14,), level=level)
            yield f"{dtype}-{name}-{level}", blob, data.tobytes(), None


def refused_modes(rng):
    """Name, blob, error and a part of its message of every blob with a damaged transform or mode above 4."""

    def of_chunk(chunk, dtype="U8", count=64):
        data = bytes(count * BY_NAME[dtype].number_bytes)
        return assemble(dtype, (count,), [bytes(chunk)], data, cpu_modes=True)

    nibbles = b"\0" + bytes(16)
    yield "mode", of_chunk(b"\x0a"), "CorruptBlob", "unknown mode"
    yield "palette-bytes", of_chunk(b"\7\0\0\0\1\0"), "CorruptBlob", "one-byte elements"
    yield "halves-bytes", of_chunk(b"\x08\1\0\1\0"), "CorruptBlob", "one-byte elements"
    yield "palette-number", of_chunk(b"\7\1\0\0\1\0\1\2", "U16"), "CorruptBlob", "lacks a value"
    yield "palette-cut", of_chunk(b"\7\xff\0\0\1", "U16"), "CorruptBlob", "ends inside a palette"
    yield "sparse-low-bits", of_chunk(b"\6\0" + b"\0" + bytes(15) + b"\1\1\1"), "CorruptBlob", "does not have"
    yield "sparse-beyond", of_chunk(b"\6\0\0" + bytes(15) + b"\x80\1\1", count=63), "CorruptBlob", "does not have"
    yield "sparse-rest", of_chunk(b"\6\0\0" + bytes(15) + b"\x10"), "CorruptBlob", "ends inside a plane"
    yield "sparse-left-over", of_chunk(b"\6\0" + nibbles + b"\1\1"), "CorruptBlob", "more bytes than its planes"
    deep = b"".join(b"\6\0" for _ in range(9)) + b"\1\0"
    yield "too-deep", of_chunk(deep), "CorruptBlob", "too deep"
    yield "transform-of-bytes", of_chunk(b"\x11\1\0"), "CorruptBlob", "unknown mode"
    yield "sparse-chunk-of-words", of_chunk(b"\x10\0\0" + nibbles, "U16"), "CorruptBlob", "unknown mode"
    yield "difference-without-base", of_chunk(b"\x12\1\0\0", "U16"), "CorruptBlob", "unknown mode"
    yield "classes-without-base", of_chunk(b"\x13" + bytes(10), "U16"), "CorruptBlob", "unknown mode"
    for name, pairs, part in (
        ("none", [], "impossible number of runs"),
        ("many", [4] * 17, "impossible number of runs"),
        ("short", [60, 3 << 16], "not as long"),
        ("long", [60, 5 << 16], "not as long"),
    ):
        runs = (
            b"\x14\0\1" + bytes((len(pairs), 0, 0)) + b"\0" + struct.pack(f"<{len(pairs)}H", *(p >> 16 for p in pairs))
        )
        for shift in (8, 0):
            runs += b"\0" + bytes(p >> shift & 255 for p in pairs)
        yield f"runs-{name}", of_chunk(runs), "CorruptBlob", part
    yield "runs-of-words", of_chunk(b"\x14\0\1\1\0\0", "U16"), "CorruptBlob", "unknown mode"
    listed = b"\x01\x00\x00\x80\x01\x00"  # a symbol, a value, a coarse symbol
    for name, chunk, part in (
        ("raw-bits", b"\x09\x87\2\1\1\1", "impossible raw bits"),
        ("no-raw-bits", b"\x09\0\2\1\1\1", "impossible raw bits"),
        ("no-more-bits", b"\x09\x86\0\1\1\1", "impossible raw bits"),
        ("lists", b"\x09\x86\2\x80\x40\x40", "too many symbols"),
        ("symbol", b"\x09\x86\2\1\0\0\0\x04", "symbol that cannot be"),
        ("coarse-symbol", b"\x09\x86\2\0\0\1\0\x01", "symbol that cannot be"),
        ("fields", b"\x09\x86\2\1\1\1" + listed + b"\x41\0\0\0\0\0", "more raw bits than elements"),
        ("cut", b"\x09\x86\2\1\1\1" + listed + b"\x40\0\0\0\0\0", "ends inside raw bits"),
        ("number", b"\x09\x86\2\1\1\1" + listed + bytes(6) + b"\1\3", "lacks a value or raw bits"),
        ("too-few", b"\x09\x86\2\1\1\1" + listed + b"\1" + bytes(5) + bytes(48) + b"\1\0", "lacks a value"),
        ("left-over", b"\x09\x86\2\1\1\1" + listed + b"\1" + bytes(5) + bytes(48) + b"\1\1", "left over"),
    ):
        yield f"joint-{name}", of_chunk(chunk, "U16"), "CorruptBlob", part
    yield "joint-bytes", of_chunk(b"\x09" + bytes(20)), "CorruptBlob", "one-byte elements"
    steep = b"\5\0\1\1\0\0\2"
    yield "steep-sum", of_chunk(steep + b"\xff\2" + bytes(6)), "CorruptBlob", "does not add up to 256"
    yield "steep-zero", of_chunk(steep + b"\0\xff" + bytes(6)), "CorruptBlob", "does not add up to 256"
    yield "steep-states", of_chunk(steep + b"\xff\1" + bytes(6) + bytes(128)), "CorruptBlob", "out of range"


class Golden:
    """The files and their manifest, while they are made."""

    def __init__(self):
        self.manifest = {"accept": {}, "refuse": {}}
        for folder in (*self.manifest, "bases"):
            shutil.rmtree(HERE / folder, ignore_errors=True)
            (HERE / folder).mkdir()

    def put(self, folder, name, blob, entry):
        """Write a blob of a new name."""
        assert name not in self.manifest[folder], name
        (HERE / folder / f"{name}.nwt").write_bytes(blob)
        self.manifest[folder][name] = entry

    def accept(self, name, blob, data, **more):
        """Write a blob that must decode to `data`."""
        header = codec.info(blob)
        about = {"dtype": header.dtype, "shape": list(header.shape), "level": header.level}
        self.put("accept", name, blob, {**about, "sha256": hashlib.sha256(data).hexdigest(), **more})

    def refuse(self, blobs):
        """Write blobs that must be refused."""
        for name, blob, error, part in blobs:
            self.put("refuse", name, blob, {"error": error, "message": part})


def main():
    golden = Golden()
    rng = np.random.default_rng(SEED)
    for name, blob, data in accepted(rng):
        golden.accept(name, blob, data)
    golden.refuse(refused(rng))
    rng = np.random.default_rng(SEED + 1)
    for name, source, blob, rounding in rounded(rng):
        more = {"source": source, "rounding": rounding} if source else {}
        golden.accept(name, blob, codec.decode_raw(blob, path="python"), **more)
    golden.refuse(refused_rounded(rng))
    rng = np.random.default_rng(SEED + 2)
    for name, blob, data, base in accepted_kinds(rng):
        kind = name.rsplit("-", 1)[0]
        if base is not None:
            (HERE / "bases" / kind).write_bytes(base)
        golden.accept(name, blob, data, **({} if base is None else {"base": kind}))
    golden.refuse(refused_modes(rng))
    (HERE / "manifest.json").write_text(json.dumps(golden.manifest, indent=1) + "\n")


if __name__ == "__main__":
    main()
