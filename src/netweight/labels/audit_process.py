"""One audit of a label in a process of its own, which is ended with all its children when its time is over.

`python -m netweight.labels.audit_process` reads what to run from standard input, a JSON object, and writes how it ended
into the file `end.json` of the audit's folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, final

from netweight.core.atomic_writes import whole_file
from netweight.errors import NetweightError
from netweight.report.finding import Section

_END = "end.json"


@final
@dataclass(frozen=True)
class AuditEnd:
    """Result of one audit."""

    outcome: Literal["ended", "late", "failed"]
    """Ended: it has sections or a payload. Late: it was stopped. Failed: `reason` says why."""
    line: str = ""
    """The command line."""
    sections: tuple[Section, ...] = ()
    """Sections with the measurements of the command."""
    payload: Mapping[str, Any] = field(default_factory=dict)
    """Values that the command writes with `--json`, beside its findings."""
    reason: str = ""
    """Reason of a failure, in a sentence."""


def run_apart(
    command: str, model: Path, folder: Path, settings: Mapping[str, Any], *, seconds: float, shown: bool
) -> AuditEnd:
    """Run a command in a process of its own, and end it when its time is over.

    Args:
        command: Its words.
        model: Its first argument.
        folder: Its `out`, where it has one, and where it leaves how it ended.
        settings: Its settings by name.
        seconds: The time that it has; where that is not above 0, nothing is started.
        shown: Whether its progress is written to standard error.

    Returns:
        How it ended.
    """
    line = f"netweight {command} {model}"
    if seconds <= 0:
        return AuditEnd("late", line)
    folder.mkdir(parents=True, exist_ok=True)
    end = folder / _END
    end.unlink(missing_ok=True)
    order = {"command": command, "model": str(model), "folder": str(folder), "settings": settings, "shown": shown}
    order["parent"] = os.getpid()
    # An end of its group of processes ends the workers that an attack started, too.
    process = subprocess.Popen(
        [sys.executable, "-m", "netweight.labels.audit_process"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        stderr=None if shown else subprocess.DEVNULL, start_new_session=os.name == "posix", text=True,
    )  # fmt: skip
    try:
        process.communicate(json.dumps(order), timeout=seconds)
    except subprocess.TimeoutExpired:
        return AuditEnd("late", line)
    finally:
        _end(process)
    if not end.is_file():
        return AuditEnd("failed", line, reason=f"its process ended with code {process.returncode}")
    value = json.loads(end.read_text(encoding="utf-8"))
    sections = tuple(Section.from_json(each) for each in value["sections"])
    return AuditEnd("failed" if value["reason"] else "ended", line, sections, value["payload"], value["reason"])


def _end(process: subprocess.Popen[str]) -> None:
    if os.name == "posix":
        # All processes of the group may have ended by themselves.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    elif process.poll() is None:
        process.kill()
    process.wait()


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def end_with_parent(parent: int) -> None:
    """End this process as soon as a label is gone: one that was killed leaves no audit running behind it.

    Args:
        parent: The label's process, by its number: it may be gone before this function is called.
    """
    first = os.getppid()

    def watch() -> None:
        while os.getppid() == first and _exists(parent):
            time.sleep(1)
        os._exit(1)

    # On other systems the number of the parent does not change.
    if os.name == "posix":
        threading.Thread(target=watch, daemon=True, name="netweight-parent").start()


def main() -> None:
    """Run what standard input asks for, and write how it ended."""
    from netweight.core.progress import QUIET, Progress
    from netweight.core.quiet import quiet_libraries
    from netweight.registry import command

    order = json.load(sys.stdin)
    end_with_parent(order["parent"])
    quiet_libraries()
    folder = Path(order["folder"])
    chosen = command(order["command"])
    out = {"out": folder} if any(each.name == "out" for each in chosen.arguments) else {}
    value: dict[str, Any] = {"sections": [], "payload": {}, "reason": ""}
    try:
        result = chosen(order["model"], progress=Progress() if order["shown"] else QUIET, **out, **order["settings"])
        value["sections"] = [section.to_json() for section in result.sections]
        value["payload"] = dict(result.payload)
    except NetweightError as error:
        # The cure of this error names options of the attack's command, which a label does not have.
        value["reason"] = error.reason
    with whole_file(folder / _END, overwrite=True) as file:
        file.write(json.dumps(value, default=str).encode())


if __name__ == "__main__":
    main()
