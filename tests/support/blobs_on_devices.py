"""Blobs decoded by netweight's CUDA kernels, on a GPU or in the emulator, against what the CPU's codec says of them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from blobs_under_test import encoded, handmade, mutated, tensor_data
from emulated_kernels import guarded

from netweight import codec
from netweight.codec import cuda
from netweight.codec.header import TORCH_NAMES
from netweight.errors import CorruptBlob, NetweightError, Unsupported

GOLDEN = Path(__file__).parents[1] / "golden"
MANIFEST = json.loads((GOLDEN / "manifest.json").read_text())
IN_TORCH = [name for name, torch_name in TORCH_NAMES.items() if torch_name and hasattr(torch, torch_name)]


def golden(folder):
    """Name, blob and what the manifest says of it, of plain blobs."""
    for name, entry in MANIFEST[folder].items():
        blob = (GOLDEN / folder / f"{name}.nwt").read_bytes()
        if not codec.is_lossy(blob):
            yield name, blob, entry


def placed(blob, device, at="end"):
    """A blob on a device; for the emulator next to a forbidden page, at any address."""
    data = np.frombuffer(blob, np.uint8)
    if torch.device(device).type == "cpu":
        return torch.from_numpy(guarded(data, at=at) if data.size else data.copy())
    return torch.from_numpy(data.copy()).to(device)


def room(layout, device, at="end"):
    """Memory for a tensor, full of rubbish; for the emulator next to a forbidden page."""
    number_bytes = layout.nbytes // max(layout.numbers, 1)
    if torch.device(device).type != "cpu" or not layout.nbytes:
        return torch.empty(layout.shape, dtype=layout.dtype, device=device)
    memory = guarded(np.full(layout.nbytes, 0xCC, np.uint8), alignment=min(max(number_bytes, 1), 2), at=at)
    return torch.from_numpy(memory).view(layout.dtype).reshape(layout.shape)


def bytes_of(tensor):
    return tensor.reshape(-1).view(torch.uint8).cpu().numpy().tobytes() if tensor.numel() else b""


def decoded(blob, device, at="end"):
    """The bytes that a blob decodes to."""
    blob = placed(blob, device, at)
    layout = cuda.layout_of(blob)
    return bytes_of(cuda.decode(blob, layout, out=room(layout, device, at)))


def assert_decoded_alike(blob, device, at="end"):
    """A blob, sound or damaged, is decoded or refused as the CPU's codec does it; digests are not compared."""
    try:
        wanted = codec.decode(blob)
    except NetweightError as error:
        with pytest.raises(type(error)):
            decoded(blob, device, at)
    else:
        assert decoded(blob, device, at) == bytes_of(wanted)


def assert_golden_blobs_are_decoded(device):
    for name, blob, entry in golden("accept"):
        if "base" in entry:
            with pytest.raises(Unsupported, match="differences"):
                decoded(blob, device)
        elif entry["dtype"] in IN_TORCH:
            assert decoded(blob, device) == codec.decode_raw(blob).tobytes(), name
        else:
            with pytest.raises(Unsupported, match=r"torch .* has no element type"):
                decoded(blob, device)


def assert_golden_blobs_are_refused(device):
    for name, blob, entry in golden("refuse"):
        if entry["message"].endswith("digest"):  # which kernels do not compare
            continue
        refusal = None
        try:
            decoded(blob, device)
        except NetweightError as error:
            refusal = type(error).__name__
        assert refusal == entry["error"], name


def damaged_blobs(rng, count):
    """Damaged blobs whose headers can still be read, of types that torch has; of `count` attempts, about half."""
    blobs = [blob for _, blob, _ in [*encoded(rng), *handmade(rng)]]
    for _ in range(count):
        blob, other = (blobs[i] for i in rng.integers(0, len(blobs), 2))
        damaged = mutated(blob, other, rng)
        try:
            info = codec.info(damaged)
        except (CorruptBlob, Unsupported):
            continue
        if info.nbytes < 1 << 24 and info.dtype in IN_TORCH:  # a damaged shape may ask for any memory
            yield damaged


SIZES = ((16_383, 14), (16_384, 14), (40_000, 15), (262_144, 18), (300_001, 18))  # one, two and four streams


def assert_streams_are_decoded(device, sizes=SIZES):
    """Every number of streams that the encoder writes, whole and partial chunks, for all sizes of numbers."""
    rng = np.random.default_rng(5)
    for count, chunk_log2 in sizes:
        for dtype in ("BF16", "F16", "F32", "F8_E4M3", "I16"):
            count_here = count if dtype == "BF16" else min(count, 50_000)
            data = tensor_data(dtype, count_here, "weights", rng)
            blob = codec.encode_raw(data, dtype, (count_here,), chunk_log2=chunk_log2)
            assert decoded(blob, device) == data, (dtype, count)


def assert_plans_decode(device):
    """Blobs of several dtypes and sizes, an empty one among them, in one launch; and damage in one of them is told."""
    rng = np.random.default_rng(6)
    cases = [("BF16", 5000, 10), ("F32", 700, 10), ("U8", 0, 10), ("F16", 20_000, 14), ("BF16", 64, 18)]
    datas = [tensor_data(dtype, count, "weights", rng) for dtype, count, _ in cases]
    blobs = [
        placed(codec.encode_raw(data, dtype, (count,), chunk_log2=chunk_log2), device)
        for data, (dtype, count, chunk_log2) in zip(datas, cases, strict=True)
    ]
    layouts = [cuda.layout_of(blob) for blob in blobs]
    plan = cuda.DecodePlan(blobs, layouts, [room(layout, device) for layout in layouts])
    for _ in range(2):
        assert [bytes_of(out) for out in plan.decode()] == datas
        for out in plan.outs:
            out.zero_()
    assert [bytes_of(out) for out in cuda.DecodePlan(blobs, layouts).decode()] == datas
    blobs[1][layouts[1].payload_at] = 77  # the mode of a plane
    status = torch.zeros(1, dtype=torch.int32, device=device)
    plan.decode(status)
    with pytest.raises(CorruptBlob, match="unknown mode"):
        cuda.raise_if_corrupt(status)
