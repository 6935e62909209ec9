"""Decoding on a side stream: whatever order the streams run in, no product reads anything but its own weight."""

import pytest
import torch
from simulated_streams import Device, Misuse, train

from netweight.methods.compress.runtime.prefetch import SideStream


def test_no_order_of_the_streams_mixes_up_weights():
    lent = hits = 0
    for seed in range(120):
        some, foreseen = train(Device(seed))
        lent, hits = lent + some, hits + foreseen
    assert lent > 120 * 40
    assert hits > lent / 5


@pytest.mark.parametrize("lacking", ["wait", "wait_aside", "let_go"])
def test_the_simulation_notices_each_precaution_that_is_left_out(lacking):
    noticed = 0
    for seed in range(60):
        try:
            train(Device(seed, without=(lacking,)))
        except Misuse:
            noticed += 1
    assert noticed > 5


def test_a_pass_that_repeats_itself_is_foreseen_but_for_its_first_time():
    device = Device(1)
    weights = [device.payload(str(layer), 8) for layer in range(5)]
    side = SideStream(device)
    for _ in range(3):
        for payload in weights:
            loan = side.lend(payload, "forward")
            device.multiply(loan, payload)
            loan.give_back()
    assert side.hits == 9  # in the second pass all but the first layer, whose predecessor was new
    device.finish()


def test_buffers_are_two_and_as_large_as_the_largest_weight():
    device = Device(2)
    weights = [device.payload(str(size), size) for size in (5, 30, 7, 30, 9)]
    made, allocate = [], device.allocate
    device.allocate = lambda nbytes: made.append(nbytes) or allocate(nbytes)
    side = SideStream(device)
    for _ in range(4):
        for payload in weights:
            loan = side.lend(payload, "forward")
            device.multiply(loan, payload)
            loan.give_back()
            device.finish()
    alive = [block for block in device.buffers.values() if block not in device.free]
    assert made.count(30) == 2
    assert len(made) <= 4
    assert sum(block.size for block in alive) <= 60
    side.close()
    assert side.lend(weights[0], "forward") is None


def test_what_cannot_be_lent_is_left_to_others():
    device = Device(3)
    payload, other = device.payload("a", 8), device.payload("b", 8)
    side = SideStream(device)
    loans = [side.lend(payload, "forward"), side.lend(other, "forward")]
    assert all(loans)
    assert side.lend(payload, "forward") is None  # both buffers are taken
    for loan in loans:
        loan.give_back()
    device.capturing = True
    assert side.lend(payload, "forward") is None
    device.capturing = False
    device.nbytes = lambda payload: None
    assert side.lend(payload, "forward") is None  # it was never looked at


def test_without_memory_for_a_buffer_nothing_is_lent():
    device = Device(4)
    payload = device.payload("a", 8)

    def full(nbytes):
        raise torch.OutOfMemoryError("full")

    allocate, device.allocate = device.allocate, full
    side = SideStream(device)
    assert side.lend(payload, "forward") is None
    device.allocate = allocate
    assert side.lend(payload, "forward") is not None
