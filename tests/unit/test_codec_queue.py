"""Decoding on the codec's own thread, and on threads that the process has already."""

import os
import random

import numpy as np
import pytest
import torch

from netweight import codec
from netweight.errors import CorruptBlob, UsageError

WEIGHTS = [torch.randn(n, 300, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (1, 7, 900, 2000)]
BLOBS = [codec.encode(weight) for weight in WEIGHTS]


@pytest.fixture
def queue():
    queue = codec.DecodeQueue()
    yield queue
    queue.close()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 2, 2)])
def test_results_in_any_order_are_what_decode_gives(queue, order):
    decodings = [(i, queue.add(BLOBS[i])) for i in range(4)] + [(i, queue.add(BLOBS[i])) for i in order]
    for place in np.random.default_rng(0).permutation(len(decodings)):
        i, decoding = decodings[place]
        assert torch.equal(decoding.result(), WEIGHTS[i])


@pytest.mark.parametrize("block", [None, 7, 512])
def test_rounded_tensors_are_what_decode_gives(queue, block):
    weights = [weight.to(dtype) for weight in WEIGHTS for dtype in (torch.bfloat16, torch.float32)]
    weights[-1][::50, 3] = torch.nan  # kept exactly
    blobs = [codec.encode_lossy(weight, mantissa_bits=2, block_size=block) for weight in weights]
    assert all(map(codec.is_lossy, blobs))
    decodings = [queue.add(blob) for blob in blobs]
    for blob, decoding in zip(blobs, decodings, strict=True):
        expected, found = codec.decode(blob), decoding.result()
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    damaged = blobs[-1][:-9] + bytes(9)
    with pytest.raises(CorruptBlob):
        queue.add(damaged).result()


def test_what_was_added_can_be_had_after_closing():
    queue = codec.DecodeQueue()
    decodings = [queue.add(blob) for blob in BLOBS * 8]
    queue.close()
    for decoding, weight in zip(decodings, WEIGHTS * 8, strict=True):
        assert torch.equal(decoding.result(), weight)


def test_decodings_may_be_dropped_or_cancelled_at_any_time(queue):
    blobs = [np.frombuffer(BLOBS[3], np.uint8).copy() for _ in range(20)]
    decodings = [queue.add(blob) for blob in blobs]
    for decoding, blob in zip(decodings[::2], blobs[::2], strict=True):
        decoding.cancel()
        blob[:] = 0  # nobody reads it any more
        with pytest.raises(UsageError, match="cancelled"):
            decoding.result()
    del decodings[::2]
    assert all(torch.equal(decoding.result(), WEIGHTS[3]) for decoding in decodings)


def test_damage_is_reported_by_the_decoding_it_concerns(queue):
    damaged = bytearray(BLOBS[2])
    damaged[len(damaged) // 2 :] = random.Random(0).randbytes(len(damaged) - len(damaged) // 2)
    with pytest.raises(CorruptBlob, match="blob"):
        queue.add(b"NWT no header")
    bad, good = queue.add(bytes(damaged)), queue.add(BLOBS[2])
    assert torch.equal(good.result(), WEIGHTS[2])
    with pytest.raises(CorruptBlob, match="Cannot decode"):
        bad.result()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_uses_several_threads_of_its_own():
    """The child has the parent's thread pool in its memory, but not the threads."""
    assert torch.equal(codec.decode(BLOBS[3], threads=2), WEIGHTS[3])
    child = os.fork()
    if not child:
        code = 1
        try:
            decoded = codec.decode_raw(BLOBS[3], threads=2)
            code = 0 if decoded.tobytes() == WEIGHTS[3].view(torch.uint8).numpy().tobytes() else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
