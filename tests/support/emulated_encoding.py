"""Puts the emulator in the place of the GPU for the CUDA encoder, with forbidden pages around all memory."""

from functools import partial

import emulated_kernels
import numpy as np
import torch

from netweight.codec.cuda import encoding, launching


def emulate(monkeypatch, *, backwards=False):
    """Until the test ends, CPU tensors are encoded by the CUDA kernels' own source; see `emulated_kernels.launch`."""
    emulated_kernels.require_compiler()
    monkeypatch.setattr(launching, "launch", partial(emulated_kernels.launch, backwards=backwards))
    monkeypatch.setattr(encoding, "_has_kernels", lambda device: True)
    monkeypatch.setattr(encoding, "_memory", lambda size, device: guarded_bytes(size))


def guarded_bytes(size):
    """A U8 tensor full of rubbish with forbidden pages before and, but for up to 15 bytes, behind it."""
    return torch.from_numpy(emulated_kernels.guarded(np.full(size, 0xA5, np.uint8), alignment=16))


def guarded_tensor(data, dtype, shape=None):
    """A tensor of given bytes, between forbidden pages as `guarded_bytes`."""
    array = np.frombuffer(data, np.uint8)
    guarded = torch.from_numpy(emulated_kernels.guarded(array, alignment=16)).view(dtype)
    return guarded if shape is None else guarded.reshape(shape)
