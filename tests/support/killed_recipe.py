"""Run a recipe of the toy treatment in children that are killed in their n-th call, for every n; a program of its own.

Usage: killed_recipe.py RECIPE OUTPUT, all in the current folder. After every kill the recipe is run again to its end,
in another child. Prints the calls of each such second run, a line each.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

import toy_treatment

from netweight.recipes import Plan, read_recipe, run
from netweight.registry import register

register(toy_treatment.REPEAT)


class Calls(list):
    """Calls that end this process when there are so many."""

    def __init__(self, most):
        super().__init__()
        self.most = most

    def append(self, call):
        if len(self) == self.most:
            os.kill(os.getpid(), signal.SIGKILL)
        super().append(call)


def in_a_child(recipe, most):
    """Run the recipe; return the child's exit status, its calls are in the file `calls`."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            toy_treatment.CALLS = Calls(most)
            run(Plan.of(read_recipe(recipe)))
            Path("calls").write_text(" ".join(toy_treatment.CALLS))
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(recipe, output):
    Plan.of(read_recipe(recipe))  # imports what all children need, once
    for moment in range(len(toy_treatment.ALL_MOMENTS)):
        shutil.rmtree(output, ignore_errors=True)
        assert in_a_child(recipe, moment) == -signal.SIGKILL, f"not killed at {moment}"
        assert in_a_child(recipe, -1) == 0, f"not resumed after {moment}"
        print(Path("calls").read_text())


if __name__ == "__main__":
    main(*sys.argv[1:])
