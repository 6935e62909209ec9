"""The arithmetic of lossy blobs as torch operations, as on a GPU: the bits of `codec.decode`, and the same refusals.

The sections are decoded by the CPU's codec here.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from blobs_under_test import mutated
from hypothesis import given, settings
from hypothesis import strategies as st

from netweight import codec, errors
from netweight.codec import cuda
from netweight.errors import CorruptBlob, Unsupported

GOLDEN = Path(__file__).parents[1] / "golden"
MANIFEST = json.loads((GOLDEN / "manifest.json").read_text())


def decode(blob):
    blob = torch.from_numpy(np.frombuffer(blob, np.uint8).copy())
    layout = cuda.lossy_layout_of(blob)
    tensor, damaged = cuda.decode_lossy(blob, layout, lambda section, its: codec.decode(section))
    if damaged:
        raise CorruptBlob("the arithmetic says so")
    return tensor


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def weights(seed, count, dtype):
    """Weights of many sizes, with what rounding cannot keep among them."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=draw) * torch.exp(3 * torch.randn(count, generator=draw))
    odd = torch.rand(count, generator=draw) < 0.02
    special = torch.tensor(
        [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3e-39, -65504.0, 1e-7, 3e38, -3.39e38]
    )
    values[odd] = special[torch.randint(len(special), (int(odd.sum()),), generator=draw)]
    return values.to(dtype)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(0, 3000),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    st.integers(0, 6),
    st.sampled_from([None, 1, 3, 512, 1 << 40]),
    st.sampled_from(["corrected", "reference"]),
)
def test_the_same_bits_as_on_the_host(seed, count, dtype, mantissa_bits, block_size, fidelity):
    weight = weights(seed, count, dtype)
    fidelity = fidelity if dtype == torch.bfloat16 else "corrected"
    blob = codec.encode_lossy(
        weight, mantissa_bits=mantissa_bits, block_size=block_size, fidelity=fidelity, chunk_log2=10
    )
    if codec.is_lossy(blob):
        assert bits(decode(blob)).equal(bits(codec.decode(blob)))


def test_shapes_and_kept_numbers():
    weight = weights(1, 6000, torch.bfloat16).reshape(30, 200)
    blob = codec.encode_lossy(weight, mantissa_bits=3)
    layout = cuda.lossy_layout_of(torch.from_numpy(np.frombuffer(blob, np.uint8).copy()))
    assert layout.gaps is not None
    assert (layout.dtype, layout.shape, layout.nbytes, layout.size) == (torch.bfloat16, (30, 200), 12000, len(blob))
    assert decode(blob).shape == (30, 200)


def test_golden_files():
    for name, expected in MANIFEST["accept"].items():
        blob = (GOLDEN / "accept" / f"{name}.nwt").read_bytes()
        if blob[:3] == b"NWL":
            assert hashlib.sha256(bits(decode(blob)).numpy().tobytes()).hexdigest() == expected["sha256"], name
    refused = 0
    for name, expected in MANIFEST["refuse"].items():
        blob = (GOLDEN / "refuse" / f"{name}.nwt").read_bytes()
        if blob[:3] == b"NWL" and "digest" not in expected["message"]:
            with pytest.raises(getattr(errors, expected["error"])):
                decode(blob)
            refused += 1
    assert refused > 5


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**31))
def test_damaged_blobs_are_refused_as_on_the_host(seed):
    rng = np.random.default_rng(seed)
    good = [codec.encode_lossy(weights(seed + i, 2000, torch.bfloat16), mantissa_bits=2) for i in range(2)]
    blob = mutated(good[0], good[1], rng)
    if blob[:3] != b"NWL":
        return
    try:
        expected = codec.decode(blob)
    except (CorruptBlob, Unsupported) as error:
        with pytest.raises(type(error)):
            decode(blob)
    else:
        assert bits(decode(blob)).equal(bits(expected))
