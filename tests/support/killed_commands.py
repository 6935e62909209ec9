"""Run a command whole, and killed in its midst and run again, in forks; a program of its own.

Usage: killed_commands.py FOLDER ARGUMENT…, where `{out}` in an argument stands for the output of a run. A fork is
killed by SIGKILL right after one of its calls that bring a checkpoint, a record or a result to the disk: the one after
the middle, and the last. The whole run writes to FOLDER/whole, the others to FOLDER/middle and FOLDER/last. Prints for
each run the exit code, how often the command wrote (-1 if it was killed), and its output, as JSON.
"""

import json
import os
import signal
import sys
from pathlib import Path

WRITES, MOST = 0, 0


def counted(function):
    def write(*arguments, **options):
        global WRITES
        result = function(*arguments, **options)
        WRITES += 1
        if WRITES == MOST:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return write


def in_a_fork(arguments, log, most=0):
    """Run the command in a fork: its exit status, the number of its writes (-1 if it was killed), its output."""
    global MOST
    child = os.fork()
    if child == 0:
        MOST = most
        code = 1
        try:
            from netweight.cli import main

            with log.open("w") as out:
                os.dup2(out.fileno(), 1)
                sys.stdout = os.fdopen(os.dup(1), "w")
                sys.argv = ["netweight", *arguments]
                try:
                    main()
                    code = 0
                except SystemExit as end:
                    code = end.code if isinstance(end.code, int) else int(end.code is not None)
                sys.stdout.flush()
            log.with_suffix(".writes").write_text(str(WRITES))
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    writes = -1 if status == -signal.SIGKILL else int(log.with_suffix(".writes").read_text())
    return {"code": status, "writes": writes, "output": log.read_text()}


def main(folder, *arguments):
    import netweight.cli  # once for all forks

    assert netweight.cli
    os.fsync = counted(os.fsync)
    os.replace = counted(os.replace)
    folder = Path(folder)

    def run(manner, name, most=0):
        place = folder / manner
        place.mkdir(exist_ok=True)
        return in_a_fork([one.replace("{out}", str(place)) for one in arguments], folder / f"{name}.log", most)

    done = {"whole": run("whole", "whole")}
    writes = done["whole"]["writes"]
    for manner, most in (("middle", writes // 2 + 1), ("last", writes)):
        done[f"{manner} killed"] = run(manner, f"{manner}-killed", most)
        done[manner] = run(manner, f"{manner}-again")
    print(json.dumps(done))


if __name__ == "__main__":
    main(*sys.argv[1:])
