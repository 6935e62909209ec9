"""Measures commands that compress and restore whole files: netweight's levels and lmzip.

Each command runs in a process of its own, with one thread, in turns. Times are processor times, of the user and of the
system, with the start of Python and the reading and writing of files; what is restored is compared byte by byte.

    python -m netweight_experiments.benchmarks compress.whole_files --files FILE …
"""

from __future__ import annotations

import filecmp
import importlib.util
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from netweight.core.environment import installed_version

LEVELS = ("default", "high")


def commands(file: Path, folder: Path) -> dict[str, tuple[list[str], list[str], Path, Path]]:
    """Return by contender the commands that compress and restore, and what they write."""
    found = {}
    for level in LEVELS:
        stored, restored = folder / f"{level}.safetensors", folder / f"{level}-restored.safetensors"
        run = [sys.executable, "-m", "netweight"]
        compress = [*run, "compress", str(file), str(stored), "--level", level, "--threads", "1"]
        restore = [*run, "decompress", str(stored), str(restored), "--threads", "1"]
        found[f"netweight {level}"] = (compress, restore, stored, restored)
    if importlib.util.find_spec("lmz") is not None:
        stored, restored = folder / "file.lmz", folder / "lmz-restored.safetensors"
        run = [sys.executable, "-m", "lmz"]
        compress = [*run, "compress", "-j", "1", str(file), str(stored)]
        found["lmzip"] = (compress, [*run, "decompress", "-j", "1", str(stored), str(restored)], stored, restored)
    return found


def processor_time(command: list[str]) -> float:
    """Run a command; return the seconds of processor time that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def measure(file: Path, rounds: int) -> dict[str, Any]:
    """Sizes, and processor times by round."""
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for name, (compress, restore, stored, restored) in commands(file, Path(folder)).items():
                row = rows.setdefault(name, {"compress seconds": [], "restore seconds": []})
                row["compress seconds"].append(round(processor_time(compress), 3))
                row["nbytes"] = stored.stat().st_size
                row["restore seconds"].append(round(processor_time(restore), 3))
                if not filecmp.cmp(file, restored, shallow=False):
                    raise AssertionError(f"{name} does not restore {file}")
                restored.unlink()
                stored.unlink()
    nbytes = file.stat().st_size
    for row in rows.values():
        row["ratio"] = round(nbytes / row["nbytes"], 4)
        if "lmzip" in rows:
            row["times of lmzip"] = {
                way: round(statistics.median(a / b for a, b in zip(row[way], rows["lmzip"][way], strict=True)), 3)
                for way in ("compress seconds", "restore seconds")
            }
    return {"file": f"{file.parent.name}/{file.name}", "nbytes": nbytes, "rows": rows}


def main(*, files: tuple[Path, ...], rounds: int = 3) -> Iterator[dict[str, Any]]:
    """Measure."""
    found: dict[str, Any] = {"versions": {"lmzip": installed_version("lmzip")}, "files": []}
    for file in files:
        found["files"].append(measure(file, rounds))
        print(found["files"][-1], flush=True)
        yield found
