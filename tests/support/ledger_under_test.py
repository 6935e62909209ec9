"""What `test_memory_ledger.py` runs in fresh processes."""

import time

import torch

from netweight_experiments.memory import PrivateMemory, private_bytes


def allocate(sizes):
    """Hold blocks of so many MiB one after another; what the process held more than before, in MiB."""
    before = private_bytes()
    with PrivateMemory() as memory:
        for size in sizes:
            block = torch.ones(size << 18)
            time.sleep(0.02)  # held while the sampler looks: it looks twice a millisecond, and filling takes longer
            del block
    return {"peak": (memory.highest - before) / 2**20, "threads": torch.get_num_threads()}


def fail(argument):
    raise ValueError(f"no {argument}")
