"""Run compression in a child that is killed at its n-th step on the file system, for every n; a program of its own.

Usage: killed_runs.py SOURCE TARGET compress|decompress EXPECTED [OLD], all files or all folders. After every kill the
target must be absent, or complete; with OLD, which stands there before, the target must be that or complete, and never
absent. Then the run is repeated, must complete and leave nothing beside its target. Prints the number of kill points.

With LAST in the environment, only the last so many moments are tried, from before the target is touched: for runs whose
earlier moments are the same as those of a run without OLD.

With NO_EXCHANGE in the environment two folders cannot be swapped in one step: then OLD may be absent until the next run
looks for it, but is never lost.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

from folders_under_test import content

from netweight.core import atomic_writes as atomic
from netweight.errors import OutputExists
from netweight.methods.compress.compress_folder import compress_folder, decompress_folder

STEPS = ("open", "pwrite", "replace", "rename", "fsync", "mkdir", "unlink", "rmdir", "truncate", "fchmod")


def held(path):
    """What a file or folder holds."""
    return path.read_bytes() if path.is_file() else content(path)


def killed_at(step, work):
    """Fork, and kill the child at its moment number `step`: each step has one before and one after it.

    Return whether it was killed, and the number of moments of a child that was not.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        moments = 0

        def pass_moment():
            nonlocal moments
            moments += 1
            if moments == step:
                os.kill(os.getpid(), signal.SIGKILL)

        def counting(function):
            def counted(*arguments, **options):
                pass_moment()
                result = function(*arguments, **options)
                pass_moment()
                return result

            return counted

        for name in STEPS:
            setattr(os, name, counting(getattr(os, name)))
        try:
            work()
        finally:
            os.write(writing, str(moments).encode())
            os._exit(0)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    counted = os.read(reading, 20)
    os.close(reading)
    return os.WIFSIGNALED(status), int(counted or 0)


def can_swap(place):
    folders = place / "first", place / "second"
    for folder in folders:
        folder.mkdir()
    try:
        return atomic.exchange(*folders)
    finally:
        for folder in folders:
            folder.rmdir()


def main(source, target, verb, expected, old=None):
    os.fsync = lambda descriptor: None  # a killed process loses nothing that it wrote; its moments stay
    source, target, expected = Path(source), Path(target), held(Path(expected))
    older = None if old is None else held(Path(old))
    swaps = "NO_EXCHANGE" not in os.environ and can_swap(target.parent)
    if not swaps:
        atomic.exchange = lambda first, second: False

    def run(source, target, **options):
        (compress_folder if verb == "compress" else decompress_folder)(source, target, threads=1, **options)

    def prepare():
        for path in target.parent.glob(f"*{target.name}*"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        if old is not None:
            (shutil.copytree if source.is_dir() else shutil.copyfile)(old, target)

    def refused():
        try:
            run(source, target)
        except OutputExists:
            return True
        return False

    step = first = 0
    if last := int(os.environ.get("LAST", "0")):
        prepare()
        _, moments = killed_at(0, lambda: run(source, target, overwrite=old is not None))
        step = first = moments - last
    while True:
        step += 1
        prepare()
        killed, _ = killed_at(step, lambda: run(source, target, overwrite=old is not None))
        found = held(target) if target.exists() else None
        assert step > first + 1 or (found == older and killed), "the target is touched before these moments"
        assert found in (expected, older) or (found is None and not swaps), f"step {step}: a mixture, or nothing"
        if not killed:
            assert found == expected, f"step {step}: not killed and not complete"
            break
        if found == expected or (found is None and old is not None):
            assert refused(), f"step {step}: what is there was not seen"
            assert held(target) in (expected, older), f"step {step}: lost"
        if held(target) != expected:
            run(source, target, overwrite=old is not None)
        assert held(target) == expected, f"step {step}: the repeated run did not complete"
        left = [path.name for path in target.parent.glob(f".{target.name}*")]
        assert not left, f"step {step}: {left} left behind"
    print(step - first - 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
