"""The tour with a fraction of its work, in a process that can reach no network. Not a test itself.

Run as a program it takes the arguments of `netweight tour`; `start` runs it where there is no home to write to.
"""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path


def start(*arguments):
    """Run the tour as a process of its own: no network, no home, no data, no GPU, its output piped."""
    environment = {key: value for key, value in os.environ.items() if key not in ("NETWEIGHT_DATA", "MPLCONFIGDIR")}
    environment |= {"HOME": "/dev/null/home", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, __file__, *(str(part) for part in arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for(path, process, seconds=240.0):
    """Wait until a file is there, and fail if the process ends before."""
    end = time.monotonic() + seconds
    while not Path(path).exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.02)


def shrink():
    """Give every stop a fraction of its work."""
    from netweight.attacks.gradient_inversion.tailored import PeelingConfig
    from netweight.tour import federate, forget, immunize, space
    from netweight.toys import language_subjects as small_world_subjects

    federate.ROUNDS, federate.IMAGES, federate.PEELING = 1, 1, PeelingConfig(softening=1, rounds=1)
    forget.SEARCH_STEPS, forget.HARDENING = 2, forget.HARDENING.replace(rounds=1, steps=1)
    immunize.ATTACK_STEPS, small_world_subjects.DEFENSE_ROWS = 4, 24
    space.INVERSION_STEPS = 3


def _refuse(*arguments, **named):
    raise OSError("this process may reach no network")


if __name__ == "__main__":
    socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = _refuse
    shrink()
    from netweight.cli import main

    main(["tour", *sys.argv[1:]])
