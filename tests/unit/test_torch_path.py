"""The decoder of plain torch operations gives what the reference gives, and refuses what it refuses."""

import hashlib
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from blobs_under_test import BY_NAME, KINDS, LEVELS, assemble, encoded, handmade, mutated, rans_plane, tensor_data
from hypothesis import given, settings
from hypothesis import strategies as st

from netweight import codec, errors
from netweight.codec import reference, torch_path
from netweight.codec.cuda import layout_of
from netweight.codec.dtypes import TORCH_NAMES
from netweight.errors import CorruptBlob, Unsupported

GOLDEN = Path(__file__).parents[1] / "golden"
MANIFEST = json.loads((GOLDEN / "manifest.json").read_text())
TYPES = [name for name in BY_NAME if TORCH_NAMES[name]]

pytestmark = pytest.mark.filterwarnings("ignore:Compressed weights are decoded by plain torch:RuntimeWarning")


def tensor_of(blob):
    return torch.from_numpy(np.frombuffer(blob, np.uint8).copy()) if blob else torch.empty(0, dtype=torch.uint8)


def decode(blob):
    blob = tensor_of(blob)
    return torch_path.decode(blob, layout_of(blob))


def bytes_of(tensor):
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def golden(folder):
    """Names of the files that hold lossless blobs."""
    names = MANIFEST[folder]
    return [name for name in names if (GOLDEN / folder / f"{name}.nwt").read_bytes()[:3] != b"NWL"]


def test_golden_files_that_must_decode():
    decoded = 0
    for name in golden("accept"):
        expected = MANIFEST["accept"][name]
        blob = (GOLDEN / "accept" / f"{name}.nwt").read_bytes()
        if expected["dtype"] not in TYPES:
            with pytest.raises(Unsupported, match="has no element type"):
                decode(blob)
            continue
        tensor = decode(blob)
        assert list(tensor.shape) == expected["shape"]
        assert hashlib.sha256(bytes_of(tensor)).hexdigest() == expected["sha256"], name
        decoded += 1
    assert decoded > 100


def test_golden_files_that_must_be_refused():
    for name in golden("refuse"):
        expected = MANIFEST["refuse"][name]
        blob = (GOLDEN / "refuse" / f"{name}.nwt").read_bytes()
        if "digest" in expected["message"]:
            decode(blob)  # what only a digest can tell is no concern of a decoder
            continue
        with pytest.raises(getattr(errors, expected["error"])) as caught:
            decode(blob)
        assert expected["message"] in caught.value.reason, name


def test_every_split_and_number_of_streams():
    tried = 0
    for name, blob, data in handmade(np.random.default_rng(1)):
        assert bytes_of(decode(blob)) == data, name
        tried += 1
    assert tried > 100


def test_every_type_level_and_kind_in_several_chunks():
    for name, blob, data in encoded(np.random.default_rng(2)):
        if name.split("-")[0] in TYPES:
            assert bytes_of(decode(blob)) == data, name


def test_chunks_of_one_tensor_may_differ_in_everything():
    """Streams, splits and modes of neighboring chunks, and a shorter last one, which are stepped together."""
    rng = np.random.default_rng(3)
    elements = (rng.standard_normal(1024 * 9 + 77) * 30).astype(np.int16).view("<u2")
    settings_of = [(3, True, 1), (0, False, 2), (9, True, 4), (14, True, 1), (4, False, 4), (8, False, 2), (1, True, 4)]
    chunks = []
    for chunk in range(10):
        some = elements[chunk * 1024 : (chunk + 1) * 1024]
        plane = rans_plane(some, *settings_of[chunk % 7]) if chunk not in (4, 7) else None
        chunks.append(plane or b"\0" + some.tobytes())
    assert sum(chunk[0] == 3 for chunk in chunks) >= 5
    blob = assemble("U16", (len(elements),), chunks, elements.tobytes(), chunk_log2=10)
    assert bytes_of(decode(blob)) == elements.tobytes()


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(TYPES), st.integers(0, 900), st.sampled_from(KINDS), st.sampled_from(LEVELS), st.integers(0, 2**31)
)
def test_round_trips(dtype, quarter, kind, level, seed):
    data = tensor_data(dtype, 4 * quarter, kind, np.random.default_rng(seed))
    blob = codec.encode_raw(data, dtype, (4 * quarter,), level=level, chunk_log2=10)
    assert bytes_of(decode(blob)) == data


def test_more_chunks_than_are_decoded_at_a_time(monkeypatch):
    monkeypatch.setattr(torch_path, "_AT_ONCE", 1 << 12)
    weight = torch.randn(130, 100, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert decode(codec.encode(weight, chunk_log2=10)).equal(weight)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**31))
def test_damaged_blobs_are_refused_exactly_as_by_the_reference(seed):
    rng = np.random.default_rng(seed)
    good = [blob for _, blob, _ in encoded_few(rng)]
    blob = mutated(good[0], good[1], rng)
    try:
        expected = reference.decode(blob).tobytes()
        codec.dtypes.torch_dtype(codec.info(blob).dtype)
    except (CorruptBlob, Unsupported) as error:
        with pytest.raises(type(error)):
            decode(blob)
    else:
        assert bytes_of(decode(blob)) == expected


def encoded_few(rng):
    for _ in range(2):
        dtype, kind, level = rng.choice(TYPES), rng.choice(KINDS), rng.choice(LEVELS)
        count = int(rng.integers(150, 650)) * 4
        data = tensor_data(dtype, count, kind, rng)
        yield dtype, codec.encode_raw(data, dtype, (count,), level=level, chunk_log2=10), data


def test_it_says_once_why_it_runs():
    torch_path._warn_once.cache_clear()
    blob = tensor_of(codec.encode(torch.ones(4)))
    with pytest.warns(RuntimeWarning, match=r"plain torch operations.*no kernels for devices of type 'cpu'"):
        torch_path.decode(blob, layout_of(blob))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_path.decode(blob, layout_of(blob))


def test_the_layout_names_where_things_lie():
    weight = torch.randn(40, 100, generator=torch.Generator().manual_seed(2)).bfloat16()
    blob = codec.encode(weight, level="fast", chunk_log2=10)
    layout, info = layout_of(tensor_of(blob)), codec.info(blob)
    assert (layout.dtype, layout.shape, layout.nbytes, layout.numbers) == (torch.bfloat16, (40, 100), 8000, 4000)
    assert (layout.chunk_log2, layout.chunks, layout.size, layout.level) == (10, 4, len(blob), "fast")
    assert (layout.index_at, layout.payload_at) == (info.chunk_offsets[0] - 16, info.chunk_offsets[0])
