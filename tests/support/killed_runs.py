"""Run compression in a child that is killed at its n-th step on the file system, for every n; a program of its own.

Usage: killed_runs.py SOURCE TARGET compress|decompress EXPECTED [old]. After every kill the target must be absent (or,
with `old`, the older folder), or complete; then the run is repeated and must complete. Prints the number of kill points.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

from folders_under_test import content

from netweight.methods.compress.folder import compress_folder, decompress_folder

STEPS = ("replace", "rename", "fsync", "mkdir", "unlink", "rmdir", "truncate", "fchmod")


def killed_at(step, work):
    """Fork, and kill the child at its moment number `step`: each step has one before and one after it."""
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
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def main(source, target, verb, expected, old=None):
    source, target, expected = Path(source), Path(target), content(expected)
    run = compress_folder if verb == "compress" else decompress_folder

    def prepare():
        for path in target.parent.glob(f"*{target.name}*"):
            if path != source:
                shutil.rmtree(path)
        if old is not None:
            shutil.copytree(old, target)

    step = 0
    while True:
        step += 1
        prepare()
        killed = killed_at(step, lambda: run(source, target, threads=1, overwrite=old is not None))
        found = content(target) if target.exists() else None
        allowed = [expected, None, *([content(old)] if old else [])]
        assert found in allowed, f"step {step}: the target is a mixture"
        if not killed:
            assert found == expected, f"step {step}: not killed and not complete"
            break
        if found != expected:
            run(source, target, threads=1, overwrite=old is not None)
            assert content(target) == expected, f"step {step}: the repeated run did not complete"
            left = [path.name for path in target.parent.glob(f".{target.name}*")]
            assert not left, f"step {step}: {left} left behind"
    print(step - 1)


if __name__ == "__main__":
    main(*sys.argv[1:])
