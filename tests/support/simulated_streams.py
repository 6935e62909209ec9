"""A device with two streams that run their work in any order that events allow, and that notices every misuse.

`Device` is a machine for `SideStream`. Work is queued by the host and done by `step`, a random piece at a time; each
decoding, product and write is two pieces, so that they overlap where nothing keeps them apart. Memory that is freed is
used again at once, as a caching allocator does.
"""

import random
import weakref

import torch

from netweight.methods.compress.runtime.prefetch import SideStream


class Misuse(AssertionError):
    """Memory was read or written while it must not be."""


class Event:
    """Comes when the stream that it was recorded on has come to it."""

    def __init__(self):
        self.done = False

    def query(self):
        return self.done


class Block:
    """A piece of device memory: what it holds, and who is at it."""

    def __init__(self, size, name=""):
        self.size, self.name, self.content, self.readers, self.writers = size, name, None, 0, 0

    def begin_reading(self, wanted):
        if self.writers or self.content != wanted:
            raise Misuse(f"{wanted} is read where {self.content} is, {self.writers} writing")
        self.readers += 1

    def end_reading(self, wanted):
        self.readers -= 1
        if self.content != wanted:
            raise Misuse(f"{wanted} became {self.content} while it was read")

    def begin_writing(self):
        if self.readers or self.writers:
            raise Misuse(f"{self.content} is written while {self.readers} read and {self.writers} write it")
        self.writers += 1
        self.content = None

    def end_writing(self, content):
        self.writers -= 1
        self.content = content


class Device:
    """See the head of this file.

    Args:
        seed: Of the order in which work is done.
        without: Names of methods that do nothing, to see that their lack is noticed.
    """

    def __init__(self, seed, without=()):
        self.random = random.Random(seed)
        self.without = without
        self.queues = {"computing": [], "side": []}
        self.buffers = {}  # id of a buffer's tensor -> its block
        self.free = []
        self.payloads = {}  # id of a payload -> its block
        self.capturing = False

    # ---- what SideStream asks for ----

    def captures(self):
        return self.capturing

    def mark(self):
        return self._mark("computing")

    def mark_aside(self):
        return self._mark("side")

    def wait(self, event):
        if "wait" not in self.without:
            self.queues["computing"].append((lambda: event.done, lambda: None))

    def wait_aside(self, event):
        if "wait_aside" not in self.without:
            self.queues["side"].append((lambda: event.done, lambda: None))

    def allocate(self, nbytes):
        fitting = [block for block in self.free if block.size >= nbytes]
        block = self.random.choice(fitting) if fitting else Block(nbytes)
        if fitting:
            self.free.remove(block)
        memory = torch.empty(nbytes, dtype=torch.uint8)
        self.buffers[id(memory.untyped_storage())] = block
        weakref.finalize(memory.untyped_storage(), self.free.append, block)
        return memory

    def nbytes(self, payload):
        return self.payloads[id(payload)].size

    def decode_aside(self, payload, memory):
        source, target = self.payloads[id(payload)], self.buffers[id(memory.untyped_storage())]
        wanted = self.held(payload)
        self._ask("side", lambda: (source.begin_reading(wanted), target.begin_writing()))
        if self.free:  # working memory, which the allocator takes from what is free
            working = self.random.choice(self.free)
            self._ask("side", working.begin_writing)
            self._ask("side", lambda: working.end_writing(None))
        self._ask("side", lambda: (source.end_reading(wanted), target.end_writing(wanted)))
        return memory[:1]

    # ---- what a test does ----

    def payload(self, name, size):
        """A payload whose weight has `size` bytes; once freed, the computing stream uses its memory for anything."""
        payload = torch.zeros(1, dtype=torch.uint8)
        block = Block(size, name)
        block.content = (name, 0)
        self.payloads[id(payload)] = block
        weakref.finalize(payload, self._scribble, block)
        return payload

    def held(self, payload):
        """What a payload will hold when all that was asked so far is done."""
        return self.payloads[id(payload)].name, payload._version

    def write(self, payload, side):
        """Ask the computing stream to write a payload, as `CompressedStorage` does."""
        if "let_go" not in self.without:
            side.let_go(payload)
        block = self.payloads[id(payload)]
        torch.autograd.graph.increment_version(payload)
        self._overwrite(block, self.held(payload))

    def multiply(self, loan, payload):
        """Ask the computing stream for a product with a weight that is lent."""
        block, wanted = self.buffers[id(loan.weight.untyped_storage())], self.held(payload)
        self._ask("computing", lambda: block.begin_reading(wanted))
        self._ask("computing", lambda: block.end_reading(wanted))

    def step(self, pieces):
        """Do up to so many pieces of work."""
        for _ in range(pieces):
            ready = [queue for queue in self.queues.values() if queue and queue[0][0]()]
            if not ready:
                return
            self.random.choice(ready).pop(0)[1]()

    def finish(self):
        """Do all that is left; fails if the streams wait for each other."""
        while any(self.queues.values()):
            before = sum(map(len, self.queues.values()))
            self.step(1)
            if sum(map(len, self.queues.values())) == before:
                raise Misuse("the streams wait for each other")

    def _mark(self, stream):
        event = Event()
        self._ask(stream, lambda: setattr(event, "done", True))
        return event

    def _ask(self, stream, piece):
        self.queues[stream].append((lambda: True, piece))

    def _overwrite(self, block, content):
        self._ask("computing", block.begin_writing)
        self._ask("computing", lambda: block.end_writing(content))

    def _scribble(self, block):
        self._overwrite(block, None)


def train(device, *, layers=4, passes=6):
    """A random program of passes over a model on a simulated device, done bit by bit in a random order.

    Returns:
        How many weights were lent, and how many of them had been foreseen.
    """
    draw = device.random
    weights = [device.payload(f"{layer}-0", draw.choice([10, 10, 20, 40])) for layer in range(layers)]
    side = SideStream(device)
    hits = lent = 0
    for number in range(passes):
        order = list(range(layers))
        if draw.random() < 0.3:
            draw.shuffle(order)
        for direction in ("forward", "backward"):
            for layer in order if direction == "forward" else order[::-1]:
                lent += _product(device, side, weights[layer], direction)
                if direction == "backward" and draw.random() < 0.5:
                    if draw.random() < 0.2:  # it outgrew its payload
                        weights[layer] = device.payload(f"{layer}-{number + 1}", draw.choice([10, 20, 60]))
                    else:
                        device.write(weights[layer], side)
                device.step(draw.randrange(6))
        if draw.random() < 0.2:
            side.close()
            hits += side.hits
            side = SideStream(device)
    side.close()
    device.finish()
    return lent, hits + side.hits


def _product(device, side, payload, direction):
    """One layer; at times two at once, as in two threads. Returns how many weights were lent."""
    loans = [(side.lend(payload, direction), payload)]
    device.step(device.random.randrange(4))
    if device.random.random() < 0.1:
        loans.append((side.lend(payload, direction), payload))
        loans.append((side.lend(payload, direction), payload))
    given = 0
    for loan, its in loans:
        if loan is not None:
            device.multiply(loan, its)
            given += 1
    device.step(device.random.randrange(4))
    for loan, _ in loans:
        if loan is not None:
            loan.give_back()
    return given
