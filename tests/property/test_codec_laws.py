import numpy as np
import pytest
import torch
from blobs_under_test import BY_NAME, KINDS, LEVELS, handmade, repeated, skewed, tensor_data
from hypothesis import given, settings
from hypothesis import strategies as st

from netweight import codec
from netweight.errors import CorruptBlob, UsageError

PATHS = [*dict.fromkeys([*codec.available_paths(), "python"])]
TORCH_DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bfloat16, torch.float16,
    torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
shapes = st.one_of(
    st.just(()),
    st.integers(0, 6000).map(lambda n: (n,)),
    st.lists(st.integers(0, 24), min_size=2, max_size=4).map(tuple),
)
seeds = st.integers(0, 2**32 - 1)


@given(
    st.sampled_from(list(BY_NAME)), st.integers(0, 900), st.sampled_from(KINDS), st.sampled_from(LEVELS),
    st.sampled_from([None, 10, 11, 22]), st.integers(1, 4), seeds,
)  # fmt: skip
def test_what_is_encoded_is_decoded_and_all_paths_agree(dtype, quads, kind, level, chunk_log2, threads, seed):
    data = tensor_data(dtype, 4 * quads, kind, np.random.default_rng(seed))
    blobs = {
        codec.encode_raw(data, dtype, (quads, 4), level=level, chunk_log2=chunk_log2, threads=threads, path=path)
        for path in PATHS
    }
    assert len(blobs) == 1
    blob = blobs.pop()
    for path in PATHS:
        assert codec.decode_raw(blob, check=True, path=path, threads=threads).tobytes() == data


@given(
    st.sampled_from(list(BY_NAME)), st.integers(0, 900), st.sampled_from(KINDS), st.sampled_from(LEVELS),
    st.sampled_from([0.0, 0.01, 0.5, 1.0]), st.sampled_from([None, 10, 11]), seeds,
)  # fmt: skip
def test_differences_are_decoded_with_their_base_alone(dtype, quads, kind, level, changed, chunk_log2, seed):
    rng = np.random.default_rng(seed)
    base = tensor_data(dtype, 4 * quads, kind, rng)
    data = np.frombuffer(base, "u1") + (rng.random(len(base)) < changed) * rng.integers(0, 3, len(base))
    data = data.astype("u1").tobytes()
    settings = {"level": level, "chunk_log2": chunk_log2}
    blobs = {codec.encode_raw(data, dtype, (quads, 4), base=base, path=path, **settings) for path in PATHS}
    assert len(blobs) == 1
    blob = blobs.pop()
    assert codec.info(blob).base_digest == codec.digest_of(base, dtype, chunk_log2=chunk_log2)
    assert codec.info(blob).digest == codec.digest_of(data, dtype, chunk_log2=chunk_log2)
    for path in PATHS:
        assert codec.decode_raw(blob, base=base, check=True, path=path).tobytes() == data
        with pytest.raises(UsageError, match="base"):
            codec.decode_raw(blob, path=path)
        if len(data):
            with pytest.raises(UsageError, match="size"):
                codec.decode_raw(blob, base=base[1:], path=path)


@given(
    st.sampled_from(list(BY_NAME)), st.integers(0, 1200), st.sampled_from(KINDS), st.booleans(),
    st.sampled_from(PATHS), seeds,
)  # fmt: skip
def test_chunks_one_by_one_are_the_whole(dtype, quads, kind, based, path, seed):
    data = tensor_data(dtype, 4 * quads, kind, np.random.default_rng(seed))
    base = bytes(byte ^ (i % 7 == 0) for i, byte in enumerate(data)) if based else None
    encoder = codec.ChunkEncoder(dtype, (quads, 4), chunk_log2=10, path=path, base=based)
    size = encoder.chunk_bytes
    parts = [slice(i * size, (i + 1) * size) for i in range(encoder.chunks)]
    chunks = [encoder.encode(data[part], base[part] if base else None) for part in parts]
    blob = encoder.header() + b"".join(chunks)
    assert blob == codec.encode_raw(data, dtype, (quads, 4), chunk_log2=10, base=base)
    assert len(encoder.header()) == encoder.header_size == codec.header_size(blob, len(blob))
    decoder = codec.ChunkDecoder(blob[: encoder.header_size], len(blob), path=path)
    assert decoder.info.digest == encoder.digest
    for number, (part, chunk) in enumerate(zip(parts, chunks, strict=True)):
        of_base = base[part] if base else None
        assert decoder.decode(number, chunk, base=of_base).tobytes() == data[part]
        if base and of_base != bytes(len(of_base)) and chunk[0] == 18:
            with pytest.raises(CorruptBlob, match="base"):
                decoder.decode(number, chunk, base=bytes(byte ^ 1 for byte in of_base))


@given(shapes, st.sampled_from(TORCH_DTYPES), st.binary(min_size=1, max_size=64), st.sampled_from(LEVELS))
def test_tensors_of_any_shape_and_bits_come_back(shape, dtype, pattern, level):
    size = int(np.prod(shape)) * dtype.itemsize
    data = bytearray((pattern * (size // len(pattern) + 1))[:size])
    if dtype == torch.bool:
        data = bytearray(byte & 1 for byte in data)
    tensor = torch.frombuffer(data, dtype=dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
    decoded = codec.decode(codec.encode(tensor, level=level), check=True)
    assert decoded.shape == tensor.shape
    assert decoded.dtype == dtype
    assert decoded.reshape(-1).view(torch.uint8).numpy().tobytes() == bytes(data)


@given(st.sampled_from([1, 2]), st.integers(1, 20_000), st.sampled_from(LEVELS), seeds)
def test_rare_symbols_are_patched_alike(width, count, level, seed):
    elements = skewed(count, width, np.random.default_rng(seed))
    blobs = {codec.encode(elements, level=level, path=path) for path in PATHS}
    assert len(blobs) == 1
    for path in PATHS:
        assert codec.decode_raw(*blobs, check=True, path=path).tobytes() == elements.tobytes()


@settings(max_examples=20)
@given(
    st.sampled_from(["BF16", "F32", "F64"]), st.sampled_from([8192, 8193, 9000, 16_500, 70_001]),
    st.lists(st.sampled_from([0.0, -0.0, 1.0, -0.5, float("inf"), 1e30]), max_size=4),
    st.sampled_from(["high", "max"]), seeds,
)  # fmt: skip
def test_repeated_values_are_coded_and_decoded_alike(dtype, count, values, level, seed):
    data = repeated(dtype, count, values, np.random.default_rng(seed))
    paths = PATHS if count < 20_000 else PATHS[:-1]  # Python takes its time
    blobs = {codec.encode_raw(data, dtype, (count,), level=level, path=path) for path in paths}
    assert len(blobs) == 1
    for path in PATHS:
        assert codec.decode_raw(*blobs, check=True, path=path).tobytes() == data


@given(st.integers(1, 3000), st.integers(10, 12), st.data())
def test_any_rows_are_the_rows_of_the_whole(rows, chunk_log2, data):
    tensor = torch.arange(rows * 5, dtype=torch.float32).reshape(rows, 5).sin()
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    path = data.draw(st.sampled_from(PATHS))
    blob = codec.encode(tensor, chunk_log2=chunk_log2)
    assert torch.equal(codec.decode_rows(blob, start, stop, path=path), tensor[start:stop])


@given(st.binary(max_size=300))
def test_bytes_that_are_no_blob_are_refused(data):
    for path in PATHS:
        with pytest.raises(CorruptBlob):
            codec.decode_raw(data, path=path)


@settings(max_examples=12)
@given(seeds)
def test_blobs_that_the_encoder_would_not_write_are_decoded(seed):
    """Every split, with one, two and four streams or the wide mode, in few elements."""
    for number, (name, blob, data) in enumerate(handmade(np.random.default_rng(seed))):
        for path in codec.available_paths():
            assert codec.decode_raw(blob, check=True, path=path).tobytes() == data, name
        if number % 8 == seed % 8:
            assert codec.decode_raw(blob, check=True, path="python").tobytes() == data, name
