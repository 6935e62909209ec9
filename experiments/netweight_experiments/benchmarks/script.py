"""What benchmark scripts share: a parser with a file of results, and how results are written."""

from __future__ import annotations

import argparse
import datetime
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from netweight.core.environment import describe
from netweight.errors import UsageError

# Where results are kept, from the root of the source tree.
RESULTS = Path("benchmarks") / "results"


def script(doc: str | None, name: str = "", *, whole: bool = False) -> argparse.ArgumentParser:
    """Return a parser with `--output`: today's file of this name in `RESULTS`; by default none without a name."""
    text = str(doc) if whole else str(doc).splitlines()[0]
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / f"{name}-{today()}.json" if name else None)
    return parser


def today() -> str:
    """Return the date."""
    return datetime.date.today().isoformat()


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def load() -> list[float]:
    """Return the machine's load averages."""
    return [round(value, 2) for value in os.getloadavg()]


def origin(what: str, given: argparse.Namespace) -> dict[str, Any]:
    """Return what every file of results says of itself: what it is, when, with which options and where it was made."""
    return {"what": what, "date": now(), "options": options_of(given), "environment": describe()}


def peak_bytes() -> int:
    """Return the most memory of this process alone; what `getrusage` says begins with that of its parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def options_of(given: argparse.Namespace) -> dict[str, Any]:
    """Return the options that are no paths."""
    return {name: value for name, value in vars(given).items() if not isinstance(value, Path)}


def write(output: Path | None, result: Any, *, show: bool = False) -> None:
    """Write a result as JSON if there is a file to write, and to standard output if it is to be shown."""
    text = json.dumps(result, indent=1, ensure_ascii=False, default=str) + "\n"
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text)
    if show:
        print(text, end="")


def fill(output: Path, found: dict[str, Any], name: str, cells: Iterable[tuple[str, Callable[[], Any]]]) -> None:
    """Measure the cells that a file of results lacks under a name, and write the file after each of them."""
    found[name] = json.loads(output.read_text())[name] if output.exists() else {}
    for cell, measure in cells:
        if cell not in found[name]:
            found[name][cell] = measure()
            write(output, found)
            print(cell, found[name][cell], flush=True)


def put(page: Path, start: str, end: str, text: str) -> None:
    """Write a table between its two marks in a page."""
    head, found, rest = page.read_text(encoding="utf-8").partition(start)
    _, closed, rest = rest.partition(end)
    if not found or not closed:
        raise UsageError(f"{page} has no place for the table.", cure=f"Put {start} and {end} there.")
    page.write_text(f"{head}{start}\n{text}\n{end}{rest}", encoding="utf-8")
