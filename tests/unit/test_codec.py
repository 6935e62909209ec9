import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from blobs_under_test import BY_NAME, KINDS, LEVELS, assemble, tensor_data, with_check

from netweight import codec
from netweight.codec import cuda, numpy_codec
from netweight.errors import CorruptBlob, NetweightError, Unsupported, UsageError

PATHS = [*dict.fromkeys([*codec.available_paths(), "python"])]
FAST_PATHS = codec.available_paths()


def normal(count, dtype=torch.bfloat16, seed=0):
    return (torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


# ---- every pattern, every shape --------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_65536_patterns(dtype, level):
    """NaN payloads, infinities, subnormals, both zeros: in order, shuffled, and as rare guests among weights."""
    patterns = torch.arange(-32768, 32768, dtype=torch.int16)
    shuffled = patterns[torch.randperm(65536, generator=torch.Generator().manual_seed(1))]
    guests = normal(1 << 20, dtype, seed=2).view(torch.int16)
    guests[torch.randperm(1 << 20, generator=torch.Generator().manual_seed(3))[:65536]] = patterns
    for bits in (patterns, shuffled, guests):
        tensor = bits.view(dtype)
        blob = codec.encode(tensor, level=level)
        for path in FAST_PATHS:
            assert codec.encode(tensor, level=level, path=path) == blob
            assert torch.equal(codec.decode(blob, check=True, path=path).view(torch.int16), bits)
        if bits is not guests:
            assert codec.encode(tensor, level=level, path="python") == blob
            assert torch.equal(codec.decode(blob, check=True, path="python").view(torch.int16), bits)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (1, 1, 1), (7, 11, 13), (2,) * 12, (1,) * 64])
def test_shapes(shape, path):
    tensor = normal(int(np.prod(shape))).reshape(shape)
    blob = codec.encode(tensor, path=path)
    decoded = codec.decode(blob, check=True, path=path)
    assert decoded.shape == tensor.shape
    assert decoded.dtype == tensor.dtype
    assert torch.equal(decoded, tensor)
    assert codec.info(blob).shape == shape


@pytest.mark.parametrize("count", [1, 2, 255, 256, 257, 1023, 1024, 1025, 16383, 16384, 16385, 262143, 262145, 300007])
def test_sizes_around_rows_streams_and_chunks(count):
    tensor = normal(count)
    blob = codec.encode(tensor)
    for path in PATHS:
        assert codec.encode(tensor, path=path) == blob
        assert torch.equal(codec.decode(blob, check=True, path=path), tensor)


def assert_same_bytes(data, dtype, level, paths):
    """Assert that all paths write the same blob of 50 × 60 elements, and read the data from it."""
    blobs = {codec.encode_raw(data, dtype, (50, 60), level=level, path=path) for path in paths}
    assert len(blobs) == 1
    for path in paths:
        assert codec.decode_raw(*blobs, check=True, path=path).tobytes() == data


@pytest.mark.parametrize("dtype", BY_NAME)
def test_every_type_level_and_path_gives_the_same_bytes(dtype):
    """Python, which is slow, meets every third kind of data of a type, each at one level, and all levels with it."""
    number = list(BY_NAME).index(dtype)
    for place, kind in enumerate(KINDS):
        data = tensor_data(dtype, 3000, kind, np.random.default_rng(7))
        for level in LEVELS:
            slow = (number + place) % 3 == 0 and LEVELS.index(level) == (number + place // 3) % len(LEVELS)
            assert_same_bytes(data, dtype, level, PATHS if slow else FAST_PATHS)


@pytest.mark.study
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", BY_NAME)
def test_python_gives_the_same_bytes_of_every_type_kind_and_level(dtype, kind):
    data = tensor_data(dtype, 3000, kind, np.random.default_rng(7))
    for level in LEVELS:
        assert_same_bytes(data, dtype, level, PATHS)


def test_patches_at_the_limit_are_refused_alike():
    """Rare symbols at the end only: the encoder, which starts there, must give up on all paths or on none."""
    rng = np.random.default_rng(1)
    for share in (0.05, 0.06, 0.08):
        values = rng.choice([0, 0, 0, 1, 1, 2], 1 << 15).astype(np.uint16)
        start = int(len(values) * (1 - share))
        values[start:] = rng.integers(0, 150, len(values) - start)
        values = values << 8 | rng.integers(0, 256, len(values)).astype(np.uint16)
        assert len({codec.encode(values, path=path) for path in PATHS}) == 1


def test_threads_and_chunk_sizes_do_not_matter_to_what_is_decoded():
    tensor = normal(100_000, torch.float32)
    for chunk_log2 in (10, 13, 17, 22):
        blobs = {codec.encode(tensor, chunk_log2=chunk_log2, threads=threads) for threads in (1, 2, 3, 4)}
        assert len(blobs) == 1
        blob = blobs.pop()
        assert codec.info(blob).chunk_log2 == chunk_log2
        assert codec.info(blob).chunks == -(-100_000 // (1 << chunk_log2))
        for threads in (1, 2, 3, 4, 300):
            assert torch.equal(codec.decode(blob, threads=threads), tensor)


# ---- what may be passed ----------------------------------------------------------------------------------------------


def test_views_and_odd_memory():
    base = normal(64 * 64).reshape(64, 64)
    complex_one = torch.randn(50, dtype=torch.complex64)
    unaligned = torch.from_numpy(np.frombuffer(b"x" + bytes(range(200)), np.uint8, 200, 1).copy()[1:199])
    views = (base.T, base[::2, 1::3], base[5:, 5:], base.flip(0), base.expand(2, 64, 64), complex_one.conj())
    for view in (*views, complex_one.conj().imag, unaligned, torch.nn.Parameter(base)):
        decoded = codec.decode(codec.encode(view), check=True)
        assert torch.equal(decoded, view.detach())
    array = np.arange(600, dtype=">f4").reshape(20, 30)
    for view in (array, array.T, array[::-1, ::2], np.asfortranarray(array)):
        assert np.array_equal(codec.decode(codec.encode(view)).numpy(), view)


def test_read_only_and_unaligned_buffers_are_taken_as_they_are():
    array = np.linspace(0, 1, 3000, dtype=np.float32)
    array.flags.writeable = False
    blob = codec.encode(array)
    shifted = memoryview(b"x" + array.tobytes())[1:]
    for path in PATHS:
        assert codec.encode_raw(shifted, "F32", [3000], path=path) == blob
        assert codec.decode_raw(memoryview(b"x" + blob)[1:], path=path).tobytes() == array.tobytes()
    for holder in (bytearray(blob), memoryview(blob), np.frombuffer(blob, np.uint8), torch.tensor(list(blob)).byte()):
        assert codec.decode_raw(holder).tobytes() == array.tobytes()


@pytest.mark.parametrize("path", PATHS)
def test_rows(path):
    tensor = normal(50 * 333).reshape(50, 333)
    blob = codec.encode(tensor, chunk_log2=10)
    for start, stop in ((0, 50), (0, 1), (49, 50), (7, 7), (50, 50), (3, 41)):
        assert torch.equal(codec.decode_rows(blob, start, stop, path=path, threads=2), tensor[start:stop])
    for start, stop in ((-1, 3), (4, 3), (0, 51)):
        with pytest.raises(UsageError, match="lie outside"):
            codec.decode_rows(blob, start, stop, path=path)
    with pytest.raises(UsageError, match="lie outside"):
        codec.decode_rows(codec.encode(torch.tensor(1.0)), 0, 0, path=path)
    assert codec.decode_rows(codec.encode(torch.empty(0, 3)), 0, 0, path=path).shape == (0, 3)
    assert codec.decode_rows(codec.encode(torch.empty(3, 0)), 1, 3, path=path).shape == (2, 0)


@pytest.mark.parametrize("path", PATHS)
def test_rows_read_only_the_chunks_they_touch(path):
    tensor = normal(4096).reshape(64, 64)
    blob = bytearray(codec.encode(tensor, chunk_log2=10))
    blob[codec.info(blob).chunk_offsets[2]] = 77  # no such mode
    assert torch.equal(codec.decode_rows(blob, 0, 32, path=path), tensor[:32])
    with pytest.raises(CorruptBlob, match="unknown mode"):
        codec.decode_rows(blob, 0, 33, path=path)


@pytest.mark.parametrize("path", PATHS)
def test_decode_into(path):
    tensor = normal(3000).reshape(60, 50)
    blob = codec.encode(tensor)
    outputs = (
        torch.empty_like(tensor),
        torch.empty(6000, dtype=torch.uint8),
        np.empty((50, 30), np.float32),
        torch.empty(1 + 6000, dtype=torch.uint8)[1:],
        torch.nn.Parameter(torch.empty(3000, dtype=torch.bfloat16)),
    )
    for out in outputs:
        codec.decode_into(blob, out, check=True, path=path)
        written = torch.as_tensor(out).detach().reshape(-1).view(torch.uint8)
        assert torch.equal(written, tensor.reshape(-1).view(torch.uint8))
    read_only = np.empty(6000, np.uint8)
    read_only.flags.writeable = False
    refused = (
        (torch.empty(2999, dtype=torch.bfloat16), "bytes where the tensor has 6000"),
        (torch.empty(3000, dtype=torch.float32), "has 12000 bytes"),
        (torch.empty(50, 60, dtype=torch.bfloat16).T, "contiguous"),
        (np.empty((12000,), np.uint8)[::2], "contiguous"),
        (read_only, "writable"),
        (torch.empty(3000, dtype=torch.bfloat16, device="meta"), "on the CPU"),
    )
    for out, reason in refused:
        with pytest.raises(UsageError, match=reason):
            codec.decode_into(blob, out, path=path)


def test_refusals_name_the_reason_and_the_cure():
    tensor = normal(10)
    blob = codec.encode(tensor)
    refused = (
        (lambda: codec.encode(tensor, level="best"), UsageError, "no level 'best'", "fast, default, high, max"),
        (lambda: codec.encode(tensor, chunk_log2=9), UsageError, "chunk_log2 is 9", "10 to 22"),
        (lambda: codec.encode(tensor, threads=0), UsageError, "threads is 0", "1 or more"),
        (lambda: codec.encode(tensor, path="sse"), UsageError, "no codec path 'sse'", "python"),
        (lambda: codec.encode_raw(b"123", "F32", [1]), UsageError, "does not fit dtype and shape", None),
        (lambda: codec.encode_raw(b"", "F32", [-1]), UsageError, "cannot have the shape", None),
        (lambda: codec.encode_raw(b"", "F32", [0] * 65), UsageError, "cannot have the shape", None),
        (lambda: codec.encode_raw(b"", "F128", [0]), Unsupported, "element type F128", "another element type"),
        (lambda: codec.encode_raw(b"", "F32", [1 << 62]), Unsupported, "too large", ""),
        (lambda: codec.encode_raw(b"123", "F6_E2M3", [3]), Unsupported, "whole bytes", ""),
        (lambda: codec.encode(np.zeros(3, "datetime64[s]")), Unsupported, "datetime64", "uint8"),
        (lambda: codec.encode(torch.eye(3).to_sparse()), UsageError, "sparse", "dense"),
        (lambda: codec.encode(torch.empty(3, device="meta")), UsageError, "meta", "dense"),
        (lambda: codec.decode(codec.encode_raw(b"123", "F4", [6])), Unsupported, "no element type F4", "decode_raw"),
        (lambda: codec.decode(blob[:-1]), CorruptBlob, "where its index adds up to", "again"),
        (lambda: codec.decode(b""), CorruptBlob, "shorter than a header", "again"),
        (lambda: codec.decode(blob[:3] + b"\3" + blob[4:]), Unsupported, "format version 3", "Update netweight"),
    )  # fmt: skip
    for call, error, reason, cure in refused:
        with pytest.raises(error) as caught:
            call()
        assert reason in caught.value.reason
        assert cure is None or cure in caught.value.cure


@pytest.mark.parametrize("path", PATHS)
def test_the_digest_is_checked_on_request(path):
    tensor = normal(2000)
    blob = bytearray(codec.encode(tensor))
    blob[codec.info(blob).chunk_offsets[0] + 900] ^= 1  # a raw bit: nothing but the digest can tell
    assert not torch.equal(codec.decode(blob, path=path), tensor)
    with pytest.raises(CorruptBlob, match="digest"):
        codec.decode(blob, check=True, path=path)
    with pytest.raises(CorruptBlob, match="digest"):
        codec.decode_into(blob, torch.empty_like(tensor), check=True, path=path)


@pytest.mark.parametrize("path", PATHS)
def test_rows_are_checked_on_request(path):
    tensor = normal(40_000).reshape(400, 100)
    blob = bytearray(codec.encode(tensor, chunk_log2=12))
    blob[codec.info(blob).chunk_offsets[3] + 900] ^= 1
    assert torch.equal(codec.decode_rows(blob, 0, 120, check=True, path=path), tensor[:120])
    codec.decode_rows(blob, 100, 140, path=path)
    with pytest.raises(CorruptBlob, match="digest"):
        codec.decode_rows(blob, 100, 140, check=True, path=path)


@pytest.mark.parametrize("path", PATHS)
def test_steps_lie_in_classes_by_the_magnitude_of_the_base(path):
    weights = normal(20_000, torch.float32)
    base, tensor = (values.bfloat16() for values in (weights, weights + 1e-3 * normal(20_000, torch.float32, seed=1)))
    blob = codec.encode(tensor, base=base, path=path)
    assert blob == codec.encode(tensor, base=base, path="python")
    first, last = codec.info(blob).chunk_offsets
    assert blob[first] == 19
    assert torch.equal(codec.decode(blob, base=base, check=True, path=path), tensor)
    damaged = blob[: first + 1] + bytes([1, 0]) + blob[first + 3 :]
    with pytest.raises(CorruptBlob, match="ascend"):
        codec.decode(damaged, base=base, path=path)
    assert last == len(blob) < tensor.nbytes / 8


def test_skewed_tensors_take_what_they_hold():
    generator = torch.Generator().manual_seed(0)
    count = 1 << 18
    share = torch.rand(count, generator=generator)
    ternary = (torch.randint(-1, 2, (count,), generator=generator) * 0.013).bfloat16()
    for tensor, bits in (
        (torch.where(share < 0.9, 0.0, normal(count)).bfloat16(), 1.6),
        (ternary, 1.62),
        (torch.where(share < 0.5, 1.0, -1.0).bfloat16(), 1.02),
        (share < 0.01, 0.09),
        (torch.arange(count), 0.01),
        (torch.arange(512).repeat(512), 0.02),
    ):
        assert 8 * len(codec.encode(tensor)) / count < bits


# ---- sizes, memory, threads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", BY_NAME)
def test_noise_grows_by_at_most_a_thousandth_and_64_bytes(dtype):
    rng = np.random.default_rng(5)
    for count in (0, 4, 64, 1000, 40_000, 600_000):
        data = tensor_data(dtype, count, "noise", rng)
        for level in LEVELS:
            blob = codec.encode_raw(data, dtype, (1, 1, 1, count), level=level)
            assert len(blob) <= len(data) * 1.001 + 64


def test_weights_shrink_as_they_should():
    weights = normal(1 << 20)
    size = 2 << 20
    assert size / len(codec.encode(weights)) > 1.52
    assert size / len(codec.encode(weights, level="max")) > 1.525
    assert len(codec.encode(weights.float())) < 1.01 * len(codec.encode(weights)) + 100  # fp32 that is really bf16
    assert len(codec.encode(torch.zeros(1 << 20))) < 200


@pytest.mark.parametrize("path", FAST_PATHS)
def test_other_threads_run_while_the_codec_works(path):
    """The codec lets go of the interpreter: another thread gets on during one call, which would else end first."""
    tensor = normal(1 << 23, torch.float32)
    blob = codec.encode(tensor, level="max")
    ticks = 0
    done = threading.Event()

    def tick():
        nonlocal ticks
        while not done.wait(0.0005):
            ticks += 1

    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        for work in (lambda: codec.encode(tensor, level="max", path=path), lambda: codec.decode(blob, path=path)):
            during = 0
            for _ in range(50):  # until it is seen, so that a busy machine does not matter
                before = ticks
                work()
                during = max(during, ticks - before)
                if during > 4:
                    break
            assert during > 4
    finally:
        done.set()
        ticker.join()


HOSTILE = """
import resource, sys
import numpy as np
from blobs_under_test import BY_NAME, assemble, with_check
from netweight import codec
from netweight.errors import CorruptBlob, Unsupported

for path in (*codec.available_paths(), "python"):  # what loads late is loaded now
    assert codec.decode_raw(codec.encode_raw(bytes(range(256)) * 8, "U8", [2048]), path=path).size == 2048
pages = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (pages + (96 << 20), resource.RLIM_INFINITY))
refused = 0
for dtype in BY_NAME:
    for shape in ((1 << 30,), (1 << 40,), (1 << 52,), (1 << 62,), (1 << 20,) * 3, (1 << 16, 1 << 16), (2,) * 64):
        for chunk_log2 in (10, 18, 22):
            for chunks in ([b""], [b"\\1\\0\\0"] * 8):
                blob = assemble(dtype, shape, chunks, b"", chunk_log2=chunk_log2)
                for path in (*codec.available_paths(), "python"):
                    try:
                        codec.decode_raw(blob, path=path)
                    except (CorruptBlob, Unsupported):
                        refused += 1
print(refused)
"""


def test_an_empty_tensor_that_torch_cannot_have_is_told():
    blob = assemble("F32", (0, 1 << 40, 1 << 40), [], b"")
    assert codec.info(blob).nbytes == 0
    with pytest.raises(Unsupported, match="torch cannot create a tensor of shape"):
        codec.decode(blob)
    with pytest.raises(Unsupported, match="torch cannot create a tensor of shape"):
        cuda.layout_of(torch.frombuffer(bytearray(blob), dtype=torch.uint8))


def test_hostile_headers_allocate_nothing():
    """Blobs of some hundred bytes that claim gigabytes and more, in a process that has 96 MiB left."""
    support = [entry for entry in sys.path if entry.endswith("support")]
    program = f"import sys; sys.path[:0] = {[*support, *sys.path]!r}\n{HOSTILE}"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert answer.stderr == ""
    assert answer.stdout.strip() == str(len(BY_NAME) * 7 * 3 * 2 * len(PATHS))


def test_hostile_planes_allocate_nothing_beyond_a_chunk():
    """Tables, streams and patches that claim to be as long as their fields allow."""
    import tracemalloc

    planes = (
        b"\3\0\1\1\0\0\3\x66\x66\x34" + b"\xff" * 6 + b"\1" * 128,
        b"\4\0" + b"\xff" * 40,
        b"\4\0\1\0\0\0\2\0\x88\0\x88\0" + b"\xff" * 6 + b"\1" * 128,
        b"\2" + b"\x88" * 100,
    )
    for plane in planes:
        blob = assemble("U8", (1 << 14,), [plane], b"")
        for path in PATHS:
            tracemalloc.start()
            with pytest.raises(CorruptBlob):
                codec.decode_raw(blob, path=path)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < 2 << 20


def test_the_pool_gives_memory_back():
    for _ in range(3):
        codec.decode(codec.encode(normal(1 << 22)))
    codec.trim_pool()
    assert codec.backend.native is None or codec.backend.native.idle_bytes() == 0


def test_headers_read_alike_natively_and_in_python():
    blob = codec.encode(normal(5000).reshape(50, 100), level="max", chunk_log2=11)
    in_python, info = numpy_codec.read_header(blob), codec.info(blob)
    assert in_python == codec.backend.best.read_header(blob)
    assert in_python[:3] == (info.dtype, info.shape, info.nbytes)
    assert info.digest == f"xxh3-chunks:{in_python[5].hex()}"
    with pytest.raises(CorruptBlob) as caught:
        codec.decode_raw(with_check(blob[:8] + bytes(16) + blob[24:]), check=True, path="python")
    assert isinstance(caught.value, NetweightError)
    assert "digest" in caught.value.reason


@pytest.mark.parametrize("rare", [0, 40])
def test_second_moments_whose_exponents_differ_much_have_the_same_bytes_on_every_path(rare):
    generator = torch.Generator().manual_seed(rare)
    drawn = torch.randn(1 << 16, generator=generator).exp().pow(9) * 1e-20  # more than 62 exponents, no signs
    moments = drawn.bfloat16()
    places = torch.randperm(len(moments), generator=generator)[:rare]
    moments[places] = (
        torch.tensor([-1e-20, -3.0, float("inf"), float("-inf"), float("nan")]).repeat(8)[:rare].bfloat16()
    )
    for level in codec.LEVELS:
        blobs = {codec.encode(moments, level=level, path=path) for path in (*codec.available_paths(), "python")}
        (blob,) = blobs
        assert torch.equal(codec.decode(blob).view(torch.int16), moments.view(torch.int16))


@pytest.mark.parametrize("zeros", [0, 0.05])
@pytest.mark.parametrize("count", [1 << 15, 70001])
def test_high_counts_values_apart_only_where_some_repeat(zeros, count):
    """Large chunks without repeated values are stored as by `default`, in mode 3; others in mode 9, joint."""
    generator = torch.Generator().manual_seed(count)
    weight = (torch.randn(count, generator=generator) * 0.02).bfloat16()
    weight[torch.rand(count, generator=generator) < zeros] = 0
    blobs = {path: codec.encode(weight, level="high", path=path) for path in (*codec.available_paths(), "python")}
    (blob,) = set(blobs.values())
    assert blob[codec.info(blob).chunk_offsets[0]] == (9 if zeros else 3)
    for path in blobs:
        assert torch.equal(codec.decode(blob, path=path).view(torch.int16), weight.view(torch.int16))


def test_joint_planes_of_many_symbols_decode_alike_on_all_paths():
    """Several values, exponents that are rare, and more numbers than registers of the vector code hold."""
    generator = torch.Generator().manual_seed(5)
    spread = torch.randn(90000, generator=generator) * torch.exp2(torch.rand(90000, generator=generator) * 40 - 20)
    weight = (spread * 0.02).bfloat16()
    for value in (0.0, -0.0, 0.125, -3.0):
        weight[torch.rand(90000, generator=generator) < 0.02] = value
    blobs = {path: codec.encode(weight, level="high", path=path) for path in (*codec.available_paths(), "python")}
    (blob,) = set(blobs.values())
    assert blob[codec.info(blob).chunk_offsets[0]] == 9
    for path in blobs:
        assert torch.equal(codec.decode(blob, path=path).view(torch.int16), weight.view(torch.int16))
