"""Damaged lossy blobs: refused, or decoded alike everywhere; never a wrong tensor unnoticed."""

import numpy as np
import pytest
import xxhash
from blobs_under_test import mutated, with_check, with_index
from rounding_under_test import sections_of, with_lossy_check, with_sections

from netweight import codec
from netweight.codec import Precision
from netweight.errors import CorruptBlob, Unsupported

PATHS = [*dict.fromkeys([*codec.available_paths(), "python"])]
MUTATIONS = 6_000
LARGEST = 1 << 20


def some_blobs():
    rng = np.random.default_rng(0)
    for dtype in ("BF16", "F16", "F32"):
        for bits in (0, 3, 6):
            for block in (None, 1, 32, 512):
                values = (rng.standard_normal(900) * 0.02).astype("<f4")
                values[rng.integers(0, 900, 12)] = rng.choice([np.nan, np.inf, 0, -0.0, 1e-42], 12)
                data = values.astype("<f2").tobytes() if dtype == "F16" else values.tobytes()
                data = values.view("<u2")[1::2].tobytes() if dtype == "BF16" else data
                yield codec.encode_raw(data, dtype, (30, 30), precision=Precision(bits, block))


def outcome(blob, path):
    """The decoded bytes, or the kind of refusal."""
    try:
        return codec.decode_raw(blob, path=path).tobytes()
    except (CorruptBlob, Unsupported) as error:
        return type(error)


def declared(blob):
    try:
        return codec.info(blob).nbytes
    except (CorruptBlob, Unsupported):
        return 0


def damaged(blobs, rng):
    """One of the blobs damaged anywhere; or only one of its sections, its own checks made to fit again."""
    original, other = (blobs[i] for i in rng.integers(0, len(blobs), 2))
    if rng.random() < 0.3:
        return with_lossy_check(mutated(original, other, rng))
    sections = sections_of(original)
    which = int(rng.choice([i for i, section in enumerate(sections) if section]))
    repair = (bytes, with_check, with_index)[int(rng.integers(0, 3))]
    sections[which] = repair(mutated(sections[which], sections[0], rng))
    return with_sections(original, sections)


def test_damage_is_refused_or_decoded_alike_on_all_paths():
    blobs, rng = list(some_blobs()), np.random.default_rng(100)
    assert all(map(codec.is_lossy, blobs))
    decoded = refused = 0
    for number in range(MUTATIONS):
        blob = damaged(blobs, rng)
        if declared(blob) > LARGEST:
            continue
        paths = PATHS if number % 10 == 0 else codec.available_paths()
        results = [outcome(blob, path) for path in paths]
        assert all(result == results[0] for result in results), number
        refused += isinstance(results[0], type)
        if isinstance(results[0], type):
            continue
        decoded += 1
        right = f"xxh3-128:{xxhash.xxh3_128_hexdigest(results[0])}" == codec.info(blob).digest
        try:
            assert codec.decode_raw(blob, check=True).tobytes() == results[0]
            assert right
        except CorruptBlob:
            assert not right
    assert refused > MUTATIONS // 2
    assert decoded > MUTATIONS // 20


@pytest.mark.parametrize("size", [0, 1, 3, 8, 27, 35, 36, 40])
def test_what_is_cut_short_is_refused(size):
    blob = next(some_blobs())
    with pytest.raises(CorruptBlob):
        codec.info(blob[:size])
    with pytest.raises(CorruptBlob):
        codec.decode(blob[:size])
