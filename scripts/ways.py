"""How long the way of a run is: files and functions of netweight that a command, or a call, passes through.

`python scripts/ways.py [WAY …]` runs each on small models (a minute) and prints a table; `-v` lists the files, and
`--result` writes all of it to benchmarks/results under today's date. Counted are functions that are called, in all
threads of this process; what is imported and not called is no part of the way, nor are the finders that Python asks
while it imports.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import netweight

HOME = str(Path(netweight.__file__).parent) + os.sep
GOALS = {
    "immunize": 35,
    "a federated round": 25,
    "forget localize": 20,
    "space ingest": 15,
    "compress": 14,
    "a forward pass": 6,
}


def traced(work: Callable[[], Any]) -> tuple[dict[str, int], int]:
    """Files in order of first entry, with the number of their functions that ran; how often the run changes file."""
    seen: dict[CodeType, str] = {}
    moves, last = 0, ""

    def see(frame: FrameType, event: str, _: Any) -> None:
        nonlocal moves, last
        code = frame.f_code
        named = code.co_name not in ("<module>", "find_spec")
        if event == "call" and code.co_filename.startswith(HOME) and named and code.co_flags & 2:
            file = seen.setdefault(code, code.co_filename.removeprefix(HOME))
            moves, last = moves + (file != last), file

    threading.setprofile(see)
    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    files: dict[str, int] = {}
    for file in seen.values():
        files[file] = files.get(file, 0) + 1
    return files, moves


def command(*words: str) -> Callable[[], Any]:
    """A command line of netweight, run in this process."""
    from netweight.cli import netweight as group

    return lambda: group.main([*words], standalone_mode=False)


def federated_round() -> Callable[[], Any]:
    """A round of HyperFL with three clients, from the task to the new state."""
    from netweight.data import images as data
    from netweight.methods import federate
    from netweight.methods.federate.partition import federated_images
    from netweight.methods.federate.task import small_cnn

    body, head = small_cnn(channels=1, size=28, classes=10)
    task = federate.Task(body, head, federated_images(data.load("digits"), clients=3))
    return lambda: federate.train(task, federate.HyperFL(), federate.Federation(rounds=1))


def main() -> None:
    import torch

    layer, row = torch.nn.Linear(256, 256, dtype=torch.bfloat16), torch.ones(1, 256, dtype=torch.bfloat16)
    netweight.compress_(layer)
    today = datetime.date.today().isoformat()
    result = Path("benchmarks", "results", f"ways-{today}.json").absolute()
    layer(row)  # what the first pass alone sets up is no part of it
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        asked = [name for name in GOALS if name in sys.argv] or [*GOALS]
        if {*asked} - {"a federated round", "a forward pass"}:
            command("init", ".")()
        if "forget localize" in asked:
            command(*"forget statistics my-pipeline --prompts ordinary.txt --out usual.safetensors".split())()
        ways = {
            "immunize": command(*"immunize my-model defended --pairs pairs.jsonl --batch-size 100".split()),
            "a federated round": federated_round(),
            "forget localize": command(*"forget localize my-pipeline --prompts targets.csv --statistics".split(),
                                       *"usual.safetensors --threshold 0.5 --out neurons".split()),
            "space ingest": command(*"space ingest my-loras bank".split()),
            "compress": command(*"compress my-model my-model-net".split()),
            "a forward pass": lambda: layer(row),
        }  # fmt: skip
        print(f"{'way':<18}{'files':>6}{'goal':>6}{'functions':>11}{'changes of file':>17}")
        told, measured = [], {}
        for name in asked:
            files, moves = traced(ways[name])
            functions = sum(files.values())
            told.append(f"{name:<18}{len(files):>6}{GOALS[name]:>6}{functions:>11}{moves:>17}")
            measured[name] = {"files": len(files), "goal": GOALS[name], "functions": functions,
                              "changes of file": moves, "by file": files}  # fmt: skip
            if "-v" in sys.argv:
                told += [f"    {count:>3} {file}" for file, count in files.items()]
        print("\n".join(told))
        if "--result" in sys.argv:
            what = (
                "files and functions of netweight that a run passes through; commands from the command line on, a "
                "round and a forward pass from the call on"
            )
            about = {"what": what, "date": today, "command": "python scripts/ways.py --result", "ways": measured}
            result.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
