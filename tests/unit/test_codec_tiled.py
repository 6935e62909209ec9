"""Blobs that are encoded tile by tile: the same bytes as of the whole tensor, also in the memory of an older blob."""

import numpy as np
import pytest
import torch

from netweight import codec
from netweight.codec.tiled import TiledBlob
from netweight.errors import UsageError

CHUNK = 1 << 12


def values(scale, count=40_000, seed=0):
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * scale
    return drawn.bfloat16()


def noise(count):
    generator = torch.Generator().manual_seed(2)
    return torch.randint(-(1 << 15), 1 << 15, (count,), dtype=torch.int16, generator=generator).view(torch.bfloat16)


def memory_with(blob, spare):
    memory = np.zeros(len(blob) + spare, np.uint8)
    memory[: len(blob)] = np.frombuffer(blob, np.uint8)
    return memory


@pytest.mark.parametrize("level", codec.LEVELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_tiles_give_the_blob_of_the_whole_tensor(level, dtype):
    tensor = (values(50).abs() if dtype == torch.uint8 else values(1)).to(dtype).view(400, 100)
    name = {torch.bfloat16: "BF16", torch.float32: "F32", torch.uint8: "U8"}[dtype]
    tiled = TiledBlob(name, tensor.shape, level=level, chunk_log2=12)
    flat = tensor.view(-1)
    for first in range(0, flat.numel(), 3 * CHUNK):
        tiled.add(flat[first : first + 3 * CHUNK])
    memory = np.zeros(tiled.size, np.uint8)
    tiled.finish(memory)
    assert memory.tobytes() == codec.encode(tensor, level=level, chunk_log2=12)


@pytest.mark.parametrize("kind", ["alike", "smaller", "larger"])
def test_an_older_blob_is_replaced_where_it_is_and_can_be_read_ahead_of_the_tiles(kind):
    old = values(0.1)
    new = {"alike": values(1, seed=1), "smaller": torch.full_like(old, 3), "larger": noise(old.numel())}[kind]
    blob = codec.encode(old, chunk_log2=12)
    memory = memory_with(blob, spare=64)
    tiled = TiledBlob("BF16", old.shape, level="default", older=memory, size=len(blob))
    for first in range(0, old.numel(), 2 * CHUNK):
        last = min(first + 2 * CHUNK, old.numel())
        tile = codec.fill(torch.empty(last - first, dtype=torch.bfloat16), memory[: len(blob)], first, last)
        assert torch.equal(tile, old[first:last])
        tiled.add(new[first:last])
    place = memory if tiled.size <= len(memory) else np.zeros(tiled.size, np.uint8)
    tiled.finish(place)
    assert place[: tiled.size].tobytes() == codec.encode(new, chunk_log2=12)


@pytest.mark.parametrize("scale", [0, 1])
def test_chunks_that_were_not_replaced_keep_their_values(scale):
    old, new = values(0.1), values(scale, seed=1)
    blob = codec.encode(old, chunk_log2=12)
    memory = memory_with(blob, spare=4096)
    tiled = TiledBlob("BF16", old.shape, level="default", older=memory, size=len(blob))
    tiled.add(new[: 3 * CHUNK])
    tiled.keep_rest()
    tiled.finish(memory)
    wanted = torch.cat([new[: 3 * CHUNK], old[3 * CHUNK :]])
    assert memory[: tiled.size].tobytes() == codec.encode(wanted, chunk_log2=12)


@pytest.mark.parametrize("kind", ["smaller", "larger"])
@pytest.mark.parametrize("kept", [[1], [0, 2], [0, 1, 2, 3, 4], [3, 4]])
def test_tiles_that_are_kept_between_others(kind, kept):
    """Also while a tile before them waits for room, and in the last tile, which is no whole number of chunks."""
    old = values(0.1)
    new = torch.full_like(old, 3) if kind == "smaller" else noise(old.numel())
    blob = codec.encode(old, chunk_log2=12)
    memory = memory_with(blob, spare=1 << 17)
    tiled = TiledBlob("BF16", old.shape, level="default", older=memory, size=len(blob))
    wanted = old.clone()
    for at, first in enumerate(range(0, old.numel(), 2 * CHUNK)):
        last = min(first + 2 * CHUNK, old.numel())
        if at in kept:
            tiled.keep(last)
        else:
            wanted[first:last] = new[first:last]
            tiled.add(new[first:last])
    tiled.finish(memory)
    decoded = codec.decode(memory[: tiled.size], check=True)
    assert torch.equal(decoded.view(torch.int16), wanted.view(torch.int16))


def test_what_is_refused():
    tiled = TiledBlob("BF16", (40_000,), level="default", chunk_log2=12)
    tiled.add(values(1)[:100])
    with pytest.raises(UsageError, match="multiple of 4096"):
        tiled.add(values(1)[:CHUNK])
    with pytest.raises(UsageError, match="no older blob"):
        tiled.keep(CHUNK)
    blob = codec.encode(values(1), base=values(1, seed=2))
    with pytest.raises(UsageError, match="without a base"):
        TiledBlob("BF16", (40_000,), level="default", older=memory_with(blob, 0), size=len(blob))
