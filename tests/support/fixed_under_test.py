"""Weights for the fixed-length form, a slow reader written from its description, and its kernels on the emulator."""

import emulated_kernels
import pytest
import torch
from emulated_kernels import guarded

from netweight.codec.cuda import fixed_products, launching

PROCESSORS = 132


def weights(rows, columns, seed=0, *, odd=0.02, scale=0.02):
    """bf16 as it is trained, and about `odd` of all numbers of any bit pattern."""
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(rows, columns, generator=generator) * scale).bfloat16()
    bits = torch.randint(-(1 << 15), 1 << 15, (rows, columns), generator=generator, dtype=torch.int16)
    chosen = torch.rand(rows, columns, generator=generator) < odd
    return bits.where(chosen, weight.view(torch.int16)).view(torch.bfloat16)


def same(one, other):
    """Whether two bf16 tensors are equal bit for bit, NaN and zeros included."""
    return one.shape == other.shape and torch.equal(one.view(torch.int16), other.view(torch.int16))


def number(content, at, size):
    return int.from_bytes(content[at : at + size], "little")


def read_weight(payload, row, column):
    """The bits of one weight, found as the description says."""
    content = bytes(payload.tolist())
    rows, columns, escapes, base = number(content, 16, 8), number(content, 24, 8), number(content, 32, 8), content[13]
    across = -(-columns // 64)
    first_at = 128 + -(-rows // 16) * across * 1536
    for i in range(number(content, first_at + 4 * row, 4), number(content, first_at + 4 * row + 4, 4)):
        escape = number(content, first_at + 4 * (rows + 1) + 4 * i, 4)
        assert i < escapes
        if escape & 0xFFFF == column:
            return escape >> 16
    tile = 128 + 1536 * (row // 16 * across + column // 64)
    h, g, t, q, p, e = row % 16 // 8, row % 8, column % 64 // 16, column % 16 // 4, column % 4 // 2, column % 2
    lane = 4 * g + t
    half = number(content, tile + 512 * (q // 2) + 16 * lane + 4 * (2 * (q % 2) + p), 4) >> 16 * e
    mantissa, sign = (half >> 8 & 127, half >> 7 & 1) if h else (half & 127, half >> 15 & 1)
    codes, start = number(content, tile + 1024 + 16 * lane + 4 * q, 4), 7 + 4 * (h + 2 * p + 4 * e)
    code = sum((codes >> (start + i) % 32 & 1) << i for i in range(4))
    return sign << 15 | (base + code - 1 if code else 0) << 7 | mantissa


@pytest.fixture
def launched(monkeypatch):
    """Runs the kernels on the CPU, arguments between forbidden pages, both ways round; lists what was launched."""
    names = []

    def launch(file, entry, grid, block, arguments, *, device):
        names.append(entry)
        results = []
        for at, backwards in (("end", False), ("start", True)):
            copies = [
                guarded(argument.reshape(-1).view(torch.uint8).numpy(), alignment=16, at=at)
                if isinstance(argument, torch.Tensor)
                else argument
                for argument in arguments
            ]
            emulated_kernels.launch(file, entry, grid, block, copies, backwards=backwards)
            results.append(copies)
        for argument, one, other in zip(arguments, *results, strict=True):
            if isinstance(argument, torch.Tensor):
                assert (one == other).all(), f"{entry} gives another result when threads run the other way round"
                memory, result = argument.detach().view(-1).view(torch.uint8), torch.from_numpy(one)
                if not torch.equal(memory, result):  # what a kernel only reads must not seem to be written
                    memory.copy_(result)

    monkeypatch.setattr(launching, "launch", launch)
    monkeypatch.setattr(launching, "multiprocessors", lambda index: PROCESSORS)
    monkeypatch.setattr(fixed_products, "runs_on", lambda device: True)
    return names
