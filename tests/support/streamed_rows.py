"""A streaming fit in a process of its own, killed at a block of choice: streamed_rows.py FILE FOLDER KILL_AFTER."""

import json
import os
import signal
import sys

import torch

from netweight.methods.space.fit import fit_streaming
from netweight.nn import matrix
from netweight.nn.matrix import MatrixFile
from netweight.nn.pca import BasisFit

ROWS_PER_BLOCK = 20
SETTINGS = {"standardize": True, "most_passes": 3, "tolerance": 0.0}


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


if __name__ == "__main__":
    torch.set_num_threads(1)
    path, folder, blocks = sys.argv[1:]
    print(json.dumps(fit(path, folder, int(blocks))[1]))
