"""The tour with a fraction of its work, in a process that can reach no network. Not a test itself.

Run as a program it takes the arguments of `netweight tour`; `start` runs it where there is no home to write to.
"""

import os
import socket
import sys
import time
from pathlib import Path

import warm


def start(*arguments):
    """Run the tour as a process of its own: no network, no home, no data, no GPU, its output a file."""
    environment = {key: value for key, value in os.environ.items() if key not in ("NETWEIGHT_DATA", "MPLCONFIGDIR")}
    environment |= {"HOME": "/dev/null/home", "CUDA_VISIBLE_DEVICES": ""}
    return warm.start(__file__, *arguments, env=environment)


def wait_for(path, process, seconds=240.0):
    """Wait until a file is there, and fail if the process ends before."""
    end = time.monotonic() + seconds
    while not Path(path).exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.02)


def shrink():
    """Give every step a fraction of its work."""
    import yaml

    from netweight import tour

    recipe = yaml.safe_load(tour._text())
    chapters = recipe["chapters"]
    chapters["forget"]["treatments"][0]["forget"] |= {"neurons": {"seeds": 3}, "steps": 4}
    chapters["siss"]["treatments"][0]["forget"] |= {"steps": 4}
    chapters["federate"]["treatments"][0]["federate"] |= {"rounds": 1, "model": "tiny_networks:halves"}
    chapters["federate"]["attacks"][0]["server"] |= {
        "updates": 1, "softening": 1, "rounds": 1, "search_steps": 4
    }  # fmt: skip
    chapters["forget"]["attacks"][0]["embedding"]["search"] |= {"steps": 2, "draws": 1, "images": 1}
    chapters["siss"]["treatments"][0]["forget"]["siss"] |= {"steps": 2, "images": 1}
    chapters["immunize"]["attacks"][0]["finetune"] |= {"max_steps": 4, "samples": 64, "check_every": 4}
    chapters["space"]["attacks"][0]["images"] |= {"inversion_steps": 3, "steps": 3}
    text = yaml.safe_dump(recipe, sort_keys=False)
    whole = tour.write_pictures

    def fewer(folder):
        whole(folder)
        ordinary = folder / "ordinary.txt"
        ordinary.write_text("".join(ordinary.read_text().splitlines(keepends=True)[:32]))

    tour.write_pictures = fewer
    tour._text, tour._ROWS, tour._ATTACKED = lambda: text, 48, 128


def _refuse(*arguments, **named):
    raise OSError("this process may reach no network")


def _connect(self, address, *, connect=socket.socket.connect):
    """Connect to another process of this machine, through its file, and to nothing else."""
    return connect(self, address) if self.family == socket.AF_UNIX else _refuse()


if __name__ == "__main__":
    socket.socket.connect, socket.socket.connect_ex, socket.getaddrinfo = _connect, _refuse, _refuse
    shrink()
    from netweight.cli import main

    main(["tour", *sys.argv[1:]])
