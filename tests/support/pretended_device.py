"""The CPU as if it were a CUDA device: netweight's kernels run in the emulator, its runtime as it would on a GPU.

Two streams are there, too: what is asked of the side stream is done as late as events allow, and a buffer is full of
rubbish from the moment in which it may be decoded into again. What reads a weight too early or too late so reads
something else. `simulated_streams.py` tries other orders.
"""

from functools import partial

import emulated_kernels
import torch
from emulated_encoding import emulate

from netweight.codec import cuda
from netweight.codec.cuda import launching
from netweight.methods.compress.runtime import cuda as device
from netweight.methods.compress.runtime import prefetch as ahead
from netweight.methods.compress.runtime.prefetch import SideStream

CPU = torch.device("cpu")


class Event:
    """Comes when the side stream has come to it; those of the computing stream, which is the CPU, have come."""

    def __init__(self, place=0):
        self.place = place

    def query(self):
        return True


class Machine:
    """See the head of this file."""

    def __init__(self, decoder):
        self.decoder, self.asked, self.done = decoder, [], 0

    def captures(self):
        return False

    def mark(self):
        return Event()

    def mark_aside(self):
        return Event(self.done + len(self.asked))

    def wait(self, event):
        while self.done < event.place:
            self.asked.pop(0)()
            self.done += 1

    def wait_aside(self, event):
        pass

    def allocate(self, nbytes):
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8)

    def nbytes(self, payload):
        return self.decoder.nbytes(payload)

    def decode_aside(self, payload, memory):
        memory.fill_(0xFF)
        layout = device._found(payload).layout
        self.asked.append(partial(self.decoder.weight, payload, memory))
        return memory[: layout.nbytes].view(layout.dtype).view(layout.shape)


class Counts:
    """What was asked of the pretended device."""

    def __init__(self):
        self.waited = 0  # decodings that the host waited for
        self.looked = 0  # headers that it read
        self.chunks = []  # of each decoding


def pretend(monkeypatch):
    """Treat the CPU as a CUDA device until the test ends; gives counts of what is asked of it."""
    emulate(monkeypatch)
    monkeypatch.setattr(launching, "launch", emulated_kernels.launch)
    monkeypatch.setattr(cuda, "unavailable_because", lambda: None)
    monkeypatch.setattr(device, "handles", lambda payload: True)
    counts = Counts()

    def run(blob, layout, *, out=None, status=None, decode=cuda.decode):
        counts.waited += status is None
        counts.chunks.append(layout.chunks)
        return decode(blob, layout, out=out, status=status)

    def look(*given, layout_of=cuda.layout_of):
        counts.looked += 1
        return layout_of(*given)

    monkeypatch.setattr(cuda, "layout_of", look)
    monkeypatch.setattr(cuda, "decode", run)
    decoder = device.Decoder(device.Status(CPU, Event))
    monkeypatch.setattr(device, "_decoders", {CPU: decoder})
    monkeypatch.setattr(ahead, "side_stream_of", lambda of: SideStream(Machine(decoder)))
    return counts
