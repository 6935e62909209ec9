"""Train a defense and be killed in the midst of it; a program of its own, since a process with threads must not fork.

Usage: killed_immunization.py DEFENSE FOLDER THREADS. It dies by SIGKILL before its eleventh step.
"""

import os
import signal
import sys

import torch
from decoders_under_test import SHORT, decoder, some_pairs

from netweight.attacks.finetuning.examples import Example
from netweight.methods.immunize import training

if __name__ == "__main__":
    defense, folder, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    taken, step = [], training._Training._step

    def counted(self):
        taken.append(1)
        if len(taken) == 11:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self)

    training._Training._step = counted
    training.immunize(
        decoder("gpt2"), some_pairs(10), [Example((1,), (5, 6))] * 3, defense=defense, settings=SHORT, folder=folder
    )
