"""Speed of two checkouts, such as before and after a change, on tasks that both can run.

    python -m netweight_experiments.benchmarks speed.checkouts BEFORE AFTER

Both are source trees with a built native module. Each runs in a process of its own with one thread, and they take
turns, so that whatever else the machine does meets both. The ratio of each turn is after divided by before; above 1 the
second tree is slower.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, final

from netweight.errors import UsageError
from netweight_experiments.benchmarks.speed.tasks import TASKS


@final
class _Checkout:
    """The process that runs tasks with the netweight of one source tree."""

    def __init__(self, tree: Path) -> None:
        if not any((tree / "src" / "netweight" / "codec").glob("_native*.so")):
            raise UsageError(f"{tree} has no built native module.", cure="Build it: pip install --no-deps -e TREE.")
        paths = [str(tree / "src"), str(tree / "tests" / "support")]
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("tasks.py")), str(tree)], text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._tree = tree

    def seconds(self, task: str) -> float:
        """Run a task once and return how long it took."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{task}\n")
        answer = self._process.stdout.readline()
        if not answer:
            raise UsageError(
                f"{self._tree} could not run {task}.",
                cure=f"Run `echo {task} | PYTHONPATH={self._tree}/src:{self._tree}/tests/support python "
                f"{Path(__file__).with_name('tasks.py')} {self._tree}` to see the error.",
            )
        return float(answer)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main(
    before: Annotated[Path, "source tree to compare with"],
    after: Annotated[Path, "source tree that may be slower"],
    /,
    turns: Annotated[int, "measurements of each task in each tree"] = 21,
    most: Annotated[float, "largest ratio that counts as equally fast"] = 1.03,
) -> dict[str, Any]:
    """Time the tasks and return, for each, seconds in both trees and the median ratio with its quartiles."""
    trees = [_Checkout(before.resolve()), _Checkout(after.resolve())]
    rows: dict[str, Any] = {}
    try:
        for task in TASKS:
            for tree in trees:
                tree.seconds(task)
            pairs = []
            for turn in range(turns):  # who begins alternates
                order = (0, 1) if turn % 2 == 0 else (1, 0)
                times = {index: trees[index].seconds(task) for index in order}
                pairs.append((times[0], times[1]))
            ratios = [later / earlier for earlier, later in pairs]
            low, middle, high = statistics.quantiles(ratios, n=4)
            rows[task] = {
                "what": (TASKS[task].__doc__ or "").strip(),
                "seconds before": statistics.median(one for one, _ in pairs),
                "seconds after": statistics.median(two for _, two in pairs),
                "ratio": middle, "quartiles": [low, high], "slower": middle > most,
            }  # fmt: skip
            print(f"{task}: {middle:.3f} ({low:.3f} to {high:.3f}){', slower' * rows[task]['slower']}", flush=True)
    finally:
        for tree in trees:
            tree.close()
    return {"turns": turns, "tasks": rows}
