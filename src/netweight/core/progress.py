"""Progress of long work: a bar on a terminal, rare plain lines elsewhere, silence when asked. Any layer may use it."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, TextIO, TypeVar, final

from tqdm import tqdm

from netweight.core import quantities

Mode = Literal["auto", "bar", "plain", "off", "events"]
T = TypeVar("T")


def _amount(count: float, unit: str) -> str:
    """Write a count with its unit: bytes as kB, MB, GB; everything else as a plain number."""
    return quantities.size(count) if unit == "B" else f"{count:,.0f} {unit}"


@final
@dataclass(frozen=True)
class Event:
    """Progress of a task, or a note, as a `Progress` passes it to its listener, also between processes."""

    description: str
    """Name of the current work, or the text of the note."""
    done: int = 0
    """Units that are done."""
    total: int | None = None
    """All units; None where that is unknown."""
    unit: str = ""
    """Name of the unit; "B" for bytes."""
    seconds: float = 0.0
    """Time since the task began."""

    @property
    def seconds_left(self) -> float | None:
        """Time until the end at the pace so far; None where it is unknown."""
        return self.seconds / self.done * (self.total - self.done) if self.total and self.done else None

    def __str__(self) -> str:
        if not self.unit:
            return self.description
        if not self.total:
            return f"{self.description}: {_amount(self.done, self.unit)} in {tqdm.format_interval(self.seconds)}"
        done = _amount(self.done, self.unit) if self.unit == "B" else f"{self.done:,}"
        line = f"{self.description}: {done} of {_amount(self.total, self.unit)}"
        if not self.done:
            return f"{line}, {tqdm.format_interval(self.seconds)} so far"
        left = self.seconds_left
        return f"{line}, about {tqdm.format_interval(left)} left" if left else line


class _Pulse:
    """Reports, in the background, the newest open task of this process whenever no task has reported for its time.

    A unit of work may take an hour (one memorized prompt, one client), during which nothing calls `update`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: list[ProgressTask] = []
        self._thread: threading.Thread | None = None
        self.last = 0.0

    def add(self, task: ProgressTask) -> None:
        with self._lock:
            if not self._tasks:
                self.last = time.monotonic()
            self._tasks.append(task)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, daemon=True, name="netweight-progress")
                self._thread.start()

    def remove(self, task: ProgressTask) -> None:
        with self._lock:
            if task in self._tasks:
                self._tasks.remove(task)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._tasks:
                    self._thread = None
                    return
                task = self._tasks[-1]
                if time.monotonic() - self.last >= task.every:
                    task.report()
            time.sleep(min(1.0, task.every / 4))


_PULSE = _Pulse()


@final
class ProgressTask:
    """One piece of work under way; made by `Progress.task` and used as a context manager."""

    # The methods may be called whatever the mode; in mode `"off"` they do nothing but count.

    def __init__(
        self, description: str, total: int | None, unit: str, mode: Mode, stream: TextIO, every: float,
        listener: Callable[[Event], object] | None = None,
    ) -> None:  # fmt: skip
        self.description = description
        self.total = total
        self.unit = unit
        self.done = 0
        self._listener = listener if mode == "events" else self._print if mode == "plain" else None
        self._stream = stream
        self.every = every
        self._started = self._last_line = time.monotonic()
        self._bar: tqdm[Any] | None = None
        if mode == "bar":
            self._bar = tqdm(desc=description, total=total, unit=unit, unit_scale=unit == "B", file=stream, leave=False)

    def update(self, amount: int = 1) -> None:
        """Report that `amount` more units (bytes if the unit is `"B"`) are done."""
        self.done += amount
        if self._bar is not None:
            self._bar.update(amount)
        elif self._listener is not None and time.monotonic() - self._last_line >= self.every:
            self.report()

    def report(self) -> None:
        """Print how far the work is, or pass it to the listener."""
        if self._listener is not None:
            self._last_line = _PULSE.last = time.monotonic()
            seconds = max(time.monotonic() - self._started, 1e-9)
            self._listener(Event(self.description, self.done, self.total, self.unit, seconds))

    def _print(self, event: Event) -> None:
        print(event, file=self._stream, flush=True)

    def describe(self, description: str) -> None:
        """Change the description of the current work."""
        self.description = description
        if self._bar is not None:
            self._bar.set_description(description)

    def __enter__(self) -> Self:
        """Start the task."""
        if self._listener is not None and self.every > 0:
            _PULSE.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the task and remove its bar; an exception passes through."""
        _PULSE.remove(self)
        if self._bar is not None:
            self._bar.close()


@final
class Progress:
    """Display of progress; library code opens tasks on it."""

    # `every`: seconds between two plain lines, or events, of one task, also while no unit ends; shorter tasks print
    # nothing. With 0, every update is reported, and nothing between two updates.
    # `listener`: gets events in place of lines, such as those of a worker process.

    def __init__(
        self, mode: Mode = "auto", *, stream: TextIO | None = None, every: float = 60.0,
        listener: Callable[[Event], object] | None = None,
    ) -> None:  # fmt: skip
        self._stream = stream if stream is not None else sys.stderr
        if listener is not None:
            mode = "events"
        self.mode: Mode = mode if mode != "auto" else ("bar" if self._stream.isatty() else "plain")
        self._every = every
        self._listener = listener

    def task(self, description: str, total: int | None = None, *, unit: str = "B") -> ProgressTask:
        """Open a task."""
        return ProgressTask(description, total, unit, self.mode, self._stream, self._every, self._listener)

    def track(self, items: Iterable[T], description: str, total: int | None = None, *, unit: str = "it") -> Iterator[T]:
        """Yield `items` one by one, counting each as one unit of a task."""
        with self.task(description, total, unit=unit) as task:
            for item in items:
                yield item
                task.update()

    def note(self, text: str) -> None:
        """Print one line above any bar; nothing in mode `"off"`."""
        if self._listener is not None:
            self._listener(Event(text))
        elif self.mode != "off":
            tqdm.write(text, file=self._stream)


# A `Progress` that shows nothing: the default for library calls that were handed none.
QUIET = Progress("off")


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Keep out, for a block, what libraries say of GPUs, each other and their own deprecated calls; errors stay."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


@contextmanager
def silent_bars(*libraries: Literal["transformers", "diffusers"]) -> Iterator[None]:
    """Switch libraries' progress bars off for a block."""
    switches = [importlib.import_module(f"{library}.utils.logging") for library in libraries or ("transformers",)]
    shown = [switch for switch in switches if switch.is_progress_bar_enabled()]
    for switch in shown:
        switch.disable_progress_bar()
    try:
        yield
    finally:
        for switch in shown:
            switch.enable_progress_bar()
