"""Safetensors files made to do harm, and a program that opens each with each command and measures time and memory.

Run as a program: `python hostile_files.py FOLDER`. It prints a line of JSON for each file and command.
"""

import base64
import json
import re
import struct
import sys
import time
import zlib
from pathlib import Path

import numpy

from netweight import codec
from netweight.codec.header import BY_NAME, HeaderWriter
from netweight.errors import NetweightError
from netweight.methods.compress.compress_folder import compress_folder, decompress_folder
from netweight.methods.compress.inspect import inspect_tensors
from netweight.methods.compress.verify import verify
from netweight.store.reader import open_store
from netweight.store.safetensors import KEY, Description, Original

BIG = (1 << 62) - 1


def raw(header, data=b""):
    """A safetensors file of header bytes, or of the header's value, and data."""
    if not isinstance(header, bytes):
        header = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(header)) + header + data


def tensor(dtype="F32", shape=(4,), start=0, stop=16):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def compressed(blobs, originals, **changes):
    """A file with these blobs, described as the originals say; `changes` are made to the description."""
    about = json.loads(Description.of(originals, None).to_json()) | changes
    entries, at = {"__metadata__": {KEY: json.dumps(about)}}, 0
    for name, blob in blobs.items():
        entries[f"{name}.net"] = tensor("U8", [len(blob)], at, at + len(blob))
        at += len(blob)
    return raw(entries, b"".join(blobs.values()))


def zeros(numbers, *, chunk_log2=22, spoil=None):
    """A blob of so many U64 zeros; `spoil` changes the bytes of its chunks."""
    writer = HeaderWriter(BY_NAME["U64"], (numbers,), 1, chunk_log2)
    chunk = codec.ChunkEncoder("U64", (1 << chunk_log2,), chunk_log2=chunk_log2).prepare(bytes(8 << chunk_log2))[1]
    chunks = [writer.add(chunk) for _ in range(numbers >> chunk_log2)]
    if spoil is not None:
        chunks = [spoil(at, bytes(chunk)) for at, chunk in enumerate(chunks)]
    return b"".join((writer.header(), *chunks))


def of(blob, shape):
    return Original("U64", shape, codec.info(blob).digest)


def one(blob, numbers, *, behind=b""):
    return compressed({"a": blob + behind}, {"a": of(blob, (numbers,))})


def many_of(blob, numbers, count):
    """So many tensors with the same blob."""
    original = of(blob, (numbers,))
    return compressed({f"t{at}": blob for at in range(count)}, {f"t{at}": original for at in range(count)})


def random_of(seed, size):
    return numpy.random.default_rng(seed).bytes(size)


def spoiled(at, chunk):
    return chunk[:-1] + bytes([chunk[-1] ^ 0x55])


def many_bad(count):
    """Tensors of which every first chunk is damaged."""
    blob = codec.encode_raw(random_of(7, 4096), "U8", (4096,))
    bad = bytes(blob[:-1]) + bytes([blob[-1] ^ 1])
    info = Original("U8", (4096,), codec.info(blob).digest)
    return compressed({f"t{at}": bad for at in range(count)}, {f"t{at}": info for at in range(count)})


def described(blob, **changes):
    return compressed({"a": blob}, {"a": of(blob, (1024,))}, **changes)


def small():
    return zeros(1024, chunk_log2=10)


FILES = {
    # sizes that few bytes declare
    "2 TB in 1.5 MB": lambda: one(zeros(1 << 38), 1 << 38),
    "2 TB, and 4 MB of noise behind": lambda: one(zeros(1 << 38), 1 << 38, behind=random_of(1, 4_000_000)),
    "2 TB of damaged chunks": lambda: one(zeros(1 << 38, spoil=spoiled), 1 << 38),
    "16 GB in 31 KB": lambda: one(zeros(1 << 31), 1 << 31),
    "256 MB a tensor, of many": lambda: many_of(zeros(1 << 25), 1 << 25, 64),
    "damaged in every chunk": lambda: one(zeros(1 << 25, chunk_log2=14, spoil=spoiled), 1 << 25),
    "2,000 damaged tensors": lambda: many_bad(2000),
    # numbers of tensors, names and metadata
    "400,000 empty tensors": lambda: raw({f"t{at}": tensor(shape=[0], stop=0) for at in range(400_000)}),
    "400,000 names with escapes": lambda: raw(
        json.dumps({f"t{at}": tensor(shape=[0], stop=0) for at in range(400_000)})
        .replace('"dtype"', '"d\\u0074ype"').encode()
    ),
    "a name of 20 MB": lambda: raw({"n" * 20_000_000: tensor()}, bytes(16)),
    "a million entries of metadata": lambda: raw({"__metadata__": {str(at): "" for at in range(1_000_000)}}),
    "a shape of a million sizes": lambda: raw({"a": tensor(shape=[1] * 1_000_000, stop=4)}, bytes(4)),
    "metadata that are numbers": lambda: raw({"__metadata__": {"a": 1}, "a": tensor()}, bytes(16)),
    # shapes
    "0 by 2^62, sixty times": lambda: raw({"a": tensor(shape=[0, *[BIG] * 60], stop=0)}),
    "0 by 2^61 by 2": lambda: raw({"a": tensor(shape=[0, 1 << 61, 2], stop=0)}),
    "2^61 by 0 by 2^61": lambda: raw({"a": tensor(shape=[1 << 61, 0, 1 << 61], stop=0)}),
    "65 dimensions": lambda: raw({"a": tensor(shape=[1] * 65, stop=4)}, bytes(4)),
    "a product that wraps": lambda: raw({"a": tensor(shape=[1 << 32, 1 << 32], stop=0)}),
    "a shape of true": lambda: raw({"a": tensor(shape=[True, 4])}, bytes(16)),
    "a size of 1e3": lambda: raw(b'{"a":{"dtype":"F32","shape":[4e0],"data_offsets":[0,16]}}', bytes(16)),
    "a size of 4,000 digits": lambda: raw({"a": tensor(shape=[10**4000])}, bytes(16)),
    "4-bit numbers that end within a byte": lambda: raw({"a": tensor("F4", [3], 0, 2)}, bytes(2)),
    # offsets
    "offsets that overlap": lambda: raw({"a": tensor(), "b": tensor(start=8, stop=24)}, bytes(24)),
    "offsets with a hole": lambda: raw({"a": tensor(), "b": tensor(start=32, stop=48)}, bytes(48)),
    "offsets backwards": lambda: raw({"a": tensor(start=16, stop=0)}, bytes(16)),
    "three offsets": lambda: raw({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16, 16]}}, bytes(16)),
    "data cut short": lambda: raw({"a": tensor()}, bytes(15)),
    "data after the end": lambda: raw({"a": tensor()}, bytes(17)),
    # lengths of the header
    "an empty file": lambda: b"",
    "seven bytes": lambda: bytes(7),
    "a header of 2^63": lambda: struct.pack("<Q", 1 << 63) + b"{}",
    "a header of 99 MB that is not there": lambda: struct.pack("<Q", 99_000_000) + b"{}",
    "a header of 60 MB of spaces": lambda: raw(b"{" + b" " * 60_000_000 + b"}x"),
    "a header of brackets": lambda: raw(b"[" * 1_000_000),
    # our description
    "a description that inflates to 256 MB": lambda: described(
        small(), header=base64.b64encode(zlib.compress(bytes(1 << 28), 9)).decode()
    ),
    "digests of 10 MB": lambda: described(small(), digests="A" * 10_000_000),
    "digests of 30 MB": lambda: described(small(), digests="A" * 30_000_000),
    "digests of 19 MB, with escapes": lambda: described(small(), digests="\\" * 4_700_000),
    "metadata of 19 MB": lambda: raw(
        {"__metadata__": {"a": "n" * 19_000_000, "b": "\\"}, "a": tensor(stop=15)}, bytes(16)
    ),
    "a newer version": lambda: described(small(), version=99),
    "equal to a file elsewhere": lambda: described(small(), same={"a": ["../../etc/passwd", "a"]}),
    "equal to itself": lambda: compressed(
        {"a": codec.encode_raw(bytes(8192), "U64", (1024,), base=bytes(8192))},
        {"a": of(codec.encode_raw(bytes(8192), "U64", (1024,), base=bytes(8192)), (1024,))},
        same={"a": ["", "a"]},
    ),
    "a base outside": lambda: compressed(
        {"a": codec.encode_raw(bytes(8192), "U64", (1024,), base=bytes(8192))},
        {"a": of(codec.encode_raw(bytes(8192), "U64", (1024,), base=bytes(8192)), (1024,))},
        base={"name": "../../../etc", "within": ".", "links": 1, "digest": ""},
    ),
    "a chain of a million bases": lambda: described(
        small(), base={"name": "b", "within": ".", "links": 1_000_000, "digest": ""}
    ),
    # blobs
    "a blob of one byte": lambda: compressed({"a": b"N"}, {"a": of(small(), (1024,))}),
    "a blob of noise": lambda: compressed({"a": random_of(3, 5000)}, {"a": of(small(), (1024,))}),
    "another tensor's blob": lambda: compressed(
        {"a": codec.encode_raw(random_of(5, 8192), "U64", (1024,))}, {"a": of(small(), (1024,))}
    ),
    "a blob without its end": lambda: compressed({"a": small()[:-9]}, {"a": of(small(), (1024,))}),
}  # fmt: skip


def opened(path):
    with open_store(path) as store:
        return [store.info(name) for name in store.names()]


def works(path, scratch):
    return {
        "open": lambda: opened(path),
        "inspect": lambda: list(inspect_tensors(path)),
        "verify": lambda: [finding for finding in verify(path, threads=1) if finding.passed is False],
        "decompress": lambda: decompress_folder(path, scratch, threads=1, overwrite=True),
        "compress": lambda: compress_folder(path, scratch, threads=1, overwrite=True),
    }


def peak():
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def held():
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def main(folder):
    folder = Path(folder)
    sound = folder / "sound.safetensors"  # with which everything is imported, and the codec's memory made
    sound.write_bytes(one(zeros(1 << 20, chunk_log2=14), 1 << 20))
    for verb, work in works(sound, folder / "scratch.safetensors").items():
        if verb != "compress":
            work()
    for name in FILES:
        path = folder / f"{name}.safetensors"
        for verb, work in works(path, folder / "scratch.safetensors").items():
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            before, started = held(), time.process_time()
            try:
                found = work()
                error = "" if not (verb == "verify" and found) else "named by verify"
            except NetweightError as refusal:
                error = type(refusal).__name__
            except Exception as bug:
                error = f"BUG {type(bug).__name__}: {bug}"
            spent = time.process_time() - started
            print(json.dumps([name, verb, error, spent, peak() - before]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
