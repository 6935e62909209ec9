"""Run a command whole, and killed in its midst and run again, in forks; a program of its own.

Usage: killed_commands.py FOLDER MOMENTS TEMPLATE ARGUMENT…, where `{out}` in an argument stands for the folder of a
run, which begins as a copy of the folder TEMPLATE ("-" for an empty one). A fork is killed by SIGKILL right after one
of its calls that bring a checkpoint, a record or a result to the disk. MOMENTS is "two", which are the one after the
middle and the last, or "all". The whole run works in FOLDER/whole, the others in folders named after their moment.
Prints for each run the exit code, how often the command wrote (-1 if it was killed), and its output, as JSON.
"""

import importlib
import json
import os
import shutil
import signal
import sys
import traceback
from contextlib import suppress
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
        except BaseException:
            traceback.print_exc()  # to the standard error, which the study shows
            raise
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    writes = -1 if status == -signal.SIGKILL else int(log.with_suffix(".writes").read_text())
    return {"code": status, "writes": writes, "output": log.read_text()}


def main(folder, moments, template, *arguments):
    for name in ("netweight.cli", "torch", "transformers", "diffusers"):  # once for all forks
        with suppress(ImportError):
            importlib.import_module(name)
    os.fsync = counted(os.fsync)
    os.replace = counted(os.replace)
    folder = Path(folder)

    def run(place, log, most=0):
        place = folder / place
        if not place.exists():
            place.mkdir() if template == "-" else shutil.copytree(template, place)
        return in_a_fork([one.replace("{out}", str(place)) for one in arguments], folder / f"{log}.log", most)

    done = {"whole": run("whole", "whole")}
    writes = done["whole"]["writes"]
    chosen = {"middle": writes // 2 + 1, "last": writes}
    if moments == "all":
        chosen = {str(moment): moment for moment in range(1, writes + 1)}
    for name, moment in chosen.items():
        done[f"{name} killed"] = run(name, f"{name}-killed", moment)
        done[name] = run(name, f"{name}-again")
    print(json.dumps(done))


if __name__ == "__main__":
    main(*sys.argv[1:])
