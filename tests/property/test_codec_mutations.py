"""Damaged blobs by the ten thousand: refused, or decoded alike everywhere; never a wrong tensor unnoticed.

`fuzz/run.sh` makes more of them.
"""

import numpy as np
import pytest
from blobs_under_test import encoded, handmade, index_of, joint_blobs, mutated

from netweight import codec
from netweight.codec.backend import best
from netweight.codec.header import BY_CODE
from netweight.errors import CorruptBlob, Unsupported

PATHS = codec.available_paths()
MUTATIONS = 50_000
PARTS = 5
LARGEST = 1 << 24  # a damaged header may declare more than this machine has; that is the caller's to refuse


@pytest.fixture(scope="module")
def blobs():
    rng = np.random.default_rng(0)
    return [blob for _, blob, _ in (*handmade(rng), *encoded(rng)) if len(blob) < 4000]


def outcome(decode, blob):
    """The decoded bytes, or the kind of refusal."""
    try:
        return decode(blob).tobytes()
    except (CorruptBlob, Unsupported) as error:
        return type(error)


def declared(blob):
    try:
        return codec.info(blob).nbytes
    except (CorruptBlob, Unsupported):
        return 0


def fits(blob, content):
    """Whether decoded bytes are those of the check of every chunk."""
    step = BY_CODE[blob[4]].number_bytes << blob[6]
    checks = [best.check_of(content[start : start + step]) for start in range(0, len(content), step)]
    _, first, end = index_of(blob)
    return b"".join(check.to_bytes(8, "little") for check in checks) == blob[first:end]


@pytest.mark.parametrize("part", range(PARTS))
def test_damage_is_refused_or_decoded_alike_on_all_paths(blobs, part):
    rng = np.random.default_rng(100 + part)
    decoded = refused = 0
    for number in range(MUTATIONS // PARTS):
        original, other = (blobs[i] for i in rng.integers(0, len(blobs), 2))
        blob = mutated(original, other, rng)
        if declared(blob) > LARGEST:
            continue
        results = [outcome(lambda b, path=path: codec.decode_raw(b, path=path), blob) for path in PATHS]
        assert all(result == results[0] for result in results), (part, number)
        refused += isinstance(results[0], type)
        if isinstance(results[0], type):
            continue
        decoded += 1
        checked = outcome(lambda b: codec.decode_raw(b, check=True), blob)
        assert checked == (results[0] if fits(blob, results[0]) else CorruptBlob), (part, number)
    assert refused > MUTATIONS // PARTS // 2
    assert decoded > MUTATIONS // PARTS // 20


def test_damage_in_joint_planes_is_refused_or_decoded_alike(blobs):
    rng = np.random.default_rng(98)
    joint = list(joint_blobs(rng))
    assert all(blob[codec.info(blob).chunk_offsets[0]] == 9 for blob in joint[:2])
    decoded = 0
    for number in range(2000):
        original = joint[number % len(joint)]
        blob = mutated(original, joint[int(rng.integers(0, len(joint)))], rng)
        if number % 2:  # where the lists and the first fields are
            at = codec.info(original).chunk_offsets[0] + int(rng.integers(0, 200))
            blob = original[:at] + rng.bytes(1) + original[at + 1 :]
        if declared(blob) > 1 << 20:
            continue
        results = [outcome(lambda b, path=path: codec.decode_raw(b, path=path), blob) for path in PATHS]
        if number % 10 < 2:
            results.append(outcome(lambda b: codec.decode_raw(b, path="python"), blob))
        assert all(result == results[0] for result in results), number
        if not isinstance(results[0], type):
            decoded += 1
            checked = outcome(lambda b: codec.decode_raw(b, check=True), blob)
            assert checked == (results[0] if fits(blob, results[0]) else CorruptBlob), number
    assert decoded > 100


def test_the_decoder_in_python_refuses_the_same(blobs):
    rng = np.random.default_rng(99)
    for number in range(8000):
        original, other = (blobs[i] for i in rng.integers(0, len(blobs), 2))
        blob = mutated(original, other, rng)
        if declared(blob) > 1 << 20:
            continue
        in_python = outcome(lambda b: codec.decode_raw(b, path="python"), blob)
        assert in_python == outcome(codec.decode_raw, blob), number
