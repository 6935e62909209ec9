"""Train a defense whole, be killed in the midst of it, or go on from there: each in a program of its own.

A process with threads must not fork, and bits are compared between programs that begin alike.

Usage: killed_immunization.py DEFENSE FOLDER whole|killed|resumed. "whole" and "resumed" write `OF.safetensors` beside
FOLDER; "killed" dies by SIGKILL before its eleventh step.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from decoders_under_test import SHORT, decoder, some_pairs
from safetensors.torch import save_file

from netweight.data.tokens import Example
from netweight.methods.immunize import train as training


def die_before_the_eleventh_step():
    taken, step = [], training._Training._step

    def counted(self):
        taken.append(1)
        if len(taken) == 11:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self)

    training._Training._step = counted


if __name__ == "__main__":
    defense, folder, manner = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    if manner == "resumed":
        torch.manual_seed(99)  # nothing may come from torch's own generator
    if manner == "killed":
        die_before_the_eleventh_step()
    model = decoder("gpt2")  # with dropout
    kept = [Example((1,), (5, 6))] * 3
    where = None if manner == "whole" else folder
    training.immunize(model, some_pairs(10), kept, defense=defense, settings=SHORT, folder=where)
    save_file(dict(model.named_parameters()), folder.with_name(f"{manner}.safetensors"))
