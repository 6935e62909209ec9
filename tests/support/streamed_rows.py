"""A streaming fit in processes of their own: killed at a block of choice, or two that sum over torch.distributed.

Usage: streamed_rows.py fit FILE FOLDER KILL_AFTER | distributed FILE FOLDER | space FOLDER
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from spaces_under_test import bank_of, sharing_adapters

from netweight.methods.space.fitting.streaming import ProcessGroup, fit_streaming
from netweight.methods.space.space import WeightSpace
from netweight.nn import matrix
from netweight.nn.matrix import MatrixFile
from netweight.nn.pca import BasisFit

ROWS_PER_BLOCK = 20
SETTINGS = {"standardize": True, "most": 3, "tolerance": 0.0}


class Mortal:
    """Rows whose reader is killed at a block, and that count how many were read."""

    def __init__(self, rows, blocks):
        self.shape, self._rows, self.left, self.read = rows.shape, rows, blocks, 0

    def rows(self, start, stop):
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left, self.read = self.left - 1, self.read + 1
        return self._rows.rows(start, stop)


def small_blocks(length):
    matrix._BYTES = 4 * length * ROWS_PER_BLOCK


def fit(file, folder, blocks) -> tuple[BasisFit, int]:
    rows = Mortal(MatrixFile(file), blocks)
    small_blocks(rows.shape[1])
    return fit_streaming(rows, 5, folder=folder, digest="these", save_every=0.0, **SETTINGS), rows.read


def distributed(file, folder):
    """Each process has its rows; the second one is killed once, in the second of two runs."""
    torch.distributed.init_process_group("gloo")
    workers = ProcessGroup()
    count = MatrixFile(file).shape[0]
    middle = count // 3
    rows = MatrixFile(file, 0, middle) if workers.number == 0 else MatrixFile(file, middle, count)
    small_blocks(rows.shape[1])
    found = fit_streaming(rows, 5, workers=workers, **SETTINGS)
    torch.save({"components": found.basis.components, "scores": found.scores}, folder / f"alone-{workers.number}.pt")
    kept = folder / "kept"
    fit_streaming(rows, 5, workers=workers, folder=kept, save_every=0.0, **SETTINGS)
    # As if a kill had come after the first worker kept its last pass, and before the second did.
    if workers.number == 1:
        for left in (kept / "worker-1").iterdir():
            left.unlink()
    torch.distributed.barrier()
    again = fit_streaming(rows, 5, workers=workers, folder=kept, save_every=0.0, **SETTINGS)
    torch.testing.assert_close(again.basis.components, found.basis.components, rtol=1e-4, atol=1e-5)
    for how in ({"representation": "delta"}, {"representation": "factors", "solver": "streaming"}):
        space = WeightSpace.fit(bank_of(sharing_adapters(30)), components=3, workers=workers, **how)
        torch.save(space.scores, folder / f"space-{how['representation']}-{workers.number}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, path, *rest = sys.argv[1:]
    if what == "fit":
        _, read = fit(path, rest[0], int(rest[1]))
        print(json.dumps(read))
    else:
        distributed(path, Path(rest[0]))
