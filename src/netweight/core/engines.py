"""Engines, which execute the runs of `Job.map`. Each is a plain function, so that others can be added anywhere.

An engine runs one function on many items and yields `(index of the item, Outcome)` as the runs end, in any order:
`in_process`, `local_processes`, or a cluster of Ray:

    with ray_cluster("auto") as engine:
        for result in job.map(fn, configs, engine=engine): ...

What a job remembers does not depend on the engine, so that runs begun on one machine go on in a cluster. Workers
must have netweight and see the same files under the same paths.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import queue
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from multiprocessing.context import AuthenticationError, BaseContext
from typing import Any, NoReturn, Protocol, TypeVar, cast, final

from netweight.core import quiet
from netweight.core.lazy import library
from netweight.core.threads import usable_cores
from netweight.errors import UsageError

C = TypeVar("C")


@final
@dataclass(frozen=True)
class Outcome:
    """Outcome of one run, as an engine reports it."""

    value: Any
    """Return value of the function; None if it failed."""
    error: str | None
    """The traceback, or how the worker process died; None if the run succeeded."""
    seconds: float
    """Wall-clock time of the run."""


class Engine(Protocol):
    """Runs `fn` on each item, somewhere, and yields `(index of the item, Outcome)` as they end, in any order."""

    def __call__(self, fn: Callable[[C], Any], items: Sequence[C], /) -> Iterator[tuple[int, Outcome]]:
        """Run all items; a failure is an `Outcome` with an error, never an exception."""
        ...


def _run_one(fn: Callable[[C], Any], item: C) -> Outcome:
    """Run one item; an exception becomes the outcome's error; KeyboardInterrupt and SystemExit propagate."""
    started = time.perf_counter()
    try:
        value, error = fn(item), None
    except Exception:
        value, error = None, traceback.format_exc()
    return Outcome(value, error, time.perf_counter() - started)


def in_process(fn: Callable[[C], Any], items: Sequence[C], /) -> Iterator[tuple[int, Outcome]]:
    """Run items one after another in this process: an engine for debugging, and for functions that do not pickle."""
    for index, item in enumerate(items):
        yield index, _run_one(fn, item)


def limit_threads(threads: int) -> None:
    """Compute with so many threads in this process, also in what is imported later."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)


# ---- pickled tasks and outcomes, which cross to another process ------------------------------------------------------


def pickled_tasks(
    fn: Callable[[C], Any], items: Sequence[C], *, dumps: Callable[[Any], bytes] = pickle.dumps
) -> list[bytes]:
    """Pickle the runs of a function on items, as tasks for `run_pickled`."""
    try:
        return [dumps((fn, item)) for item in items]
    except Exception as error:
        raise UsageError(
            f"{getattr(fn, '__qualname__', fn)!r} cannot be sent to worker processes: {error}.",
            cure="Define it and its configuration's type at the top level of a module, or use engine=in_process.",
        ) from error


def run_pickled(task: bytes, *, dumps: Callable[[Any], bytes] = pickle.dumps) -> bytes:
    """Run a pickled task in a worker and pickle its outcome; what does not unpickle or pickle there has failed."""
    try:
        fn, item = pickle.loads(task)
    except Exception:
        return dumps(Outcome(None, traceback.format_exc(), 0.0))
    outcome = _run_one(fn, item)
    try:
        return dumps(outcome)
    except Exception:
        error = f"The result of the task cannot be pickled.\n{traceback.format_exc()}"
        return dumps(Outcome(None, error, outcome.seconds))


# ---- worker processes on this machine --------------------------------------------------------------------------------


class _Parent:
    """A worker's connection to the process that started it, for values that a run sends before it ends."""

    connection: Connection | None = None
    address: tuple[Any, bytes] | None = None
    """Address at which the parent listens, and the key that it requires; None in other processes."""
    # Index of the item that the worker runs.
    index = 0
    lock = threading.Lock()


def send_message(value: Any) -> None:
    """Send a value from a run of `local_processes` to its `on_message`, before the run ends.

    It returns when the parent has the value, so that no message is lost or comes after the outcome. In a process that
    is not a worker nothing happens.
    """
    if _Parent.address is None:
        return
    # Another thread also reports progress.
    with _Parent.lock:
        if _Parent.connection is None:
            address, key = _Parent.address
            _Parent.connection = Client(address, authkey=key)
        _Parent.connection.send((_Parent.index, value))
        _Parent.connection.recv()


def _exit_with_parent() -> None:
    """End this worker as soon as its parent is gone, so that a killed study leaves nothing running behind it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


# The exit code that stands for 0: pebble takes a worker that exits with 0 in the middle of a run to be still at work.
_ZERO = 120


def _leave_with_zero_marked(leave: Callable[[int], NoReturn], code: int) -> NoReturn:
    """End this worker by `leave`, so that its parent notices."""
    leave(code or _ZERO)


def _start_worker(threads: int, environment: dict[str, str], address: tuple[Any, bytes]) -> None:
    """Prepare a worker process; pebble calls it once in each, and has Ctrl-C go to the parent alone."""
    os.environ.clear()
    os.environ.update(environment)
    _Parent.address = address
    os._exit = functools.partial(_leave_with_zero_marked, os._exit)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    limit_threads(threads)


def _work(index: int, task: bytes) -> bytes:
    """Do a run in a worker process; a run that leaves by `sys.exit` ends its worker."""
    _Parent.index = index
    try:
        return run_pickled(task)
    except SystemExit as error:
        os._exit(error.code if isinstance(error.code, int) else 1)


class _Events:
    """Ends of runs and messages of workers in one queue, in the order in which they come."""

    def __init__(self) -> None:
        # Entries are: index, value, True if the task ended.
        self.queue: queue.SimpleQueue[tuple[int, Any, bool]] = queue.SimpleQueue()
        self._listener = Listener(authkey=os.urandom(16))
        self.address = (self._listener.address, cast("bytes", self._listener._authkey))  # type: ignore[attr-defined]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except AuthenticationError:
                continue
            except (OSError, EOFError):
                # The connection was closed, or a worker ended while it connected.
                if self._listener._listener is None:  # type: ignore[attr-defined]
                    return
                continue
            threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: Connection) -> None:
        # An error of the connection means that the worker has ended.
        with contextlib.suppress(EOFError, OSError), connection:
            while True:
                self.queue.put((*connection.recv(), False))
                connection.send(None)

    def close(self) -> None:
        """Accept no more connections."""
        self._listener.close()


# What takes seconds to import, and starts no threads.
_LARGE = ("torch", "transformers.models.llama.modeling_llama", "peft")


def _context(preload: Sequence[str]) -> BaseContext:
    """Return how processes start: as forks of a process that has imported large libraries and done nothing else."""
    # Elsewhere libraries that are imported may not survive a fork, or there is none; a socket's path has 107 bytes.
    if sys.platform != "linux" or len(os.fsencode(tempfile.gettempdir())) > 70:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([quiet.__name__, *(name for name in _LARGE if name in sys.modules), *preload])
    return context


def _outcome_of(future: Future[bytes], seconds: float) -> Outcome:
    """Return how a run ended; of one whose worker died, how the worker died."""
    from pebble import ProcessExpired

    error = future.exception()
    if error is None:
        return cast("Outcome", pickle.loads(future.result()))
    if isinstance(error, ProcessExpired):
        code = 0 if error.exitcode == _ZERO else error.exitcode or 0
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        return Outcome(None, f"The worker process {how} during this task.", seconds)
    return Outcome(None, "".join(traceback.format_exception(error)), seconds)


def local_processes(
    fn: Callable[[C], Any],
    items: Sequence[C],
    /,
    *,
    workers: int | None = None,
    on_message: Callable[[int, Any], object] = lambda index, value: None,
    preload: Sequence[str] = (),
) -> Iterator[tuple[int, Outcome]]:
    """Run items in worker processes on this machine: the default engine.

    A worker lives for many runs. One that dies (out of memory, a crash in native code) fails its run only and is
    replaced. The machine's cores are divided among the workers. Stopping the iteration early stops the workers.

    Args:
        fn: A function that pickles, of one item.
        items: Values that pickle.
        workers: Number of processes, at least 1; None for one per core. Pass
            `functools.partial(local_processes, workers=4)` as an engine to choose it.
        on_message: Receives the index of an item and each value that its run passes to `send_message`.
        preload: Modules that runs need; those that are installed are imported once for all workers.

    Yields:
        The index of an item and its `Outcome`, in the order in which runs end.

    Raises:
        UsageError: `workers` is below 1, or `fn` or an item does not pickle.
    """
    from pebble import ProcessPool

    if workers is not None and workers < 1:
        raise UsageError(f"workers must be at least 1, not {workers}.")
    tasks = pickled_tasks(fn, items)
    if not tasks:
        return
    cores = usable_cores()
    count = min(workers or cores, len(items))
    threads = max(1, cores // count)
    events = _Events()
    pool = ProcessPool(
        count,
        initializer=_start_worker,
        initargs=(threads, dict(os.environ), events.address),
        context=_context(preload),
    )
    started = dict.fromkeys(range(len(tasks)), time.perf_counter())
    try:
        waiting = list(enumerate(tasks))[::-1]

        def schedule() -> None:
            index, task = waiting.pop()
            started[index] = time.perf_counter()
            future = pool.schedule(_work, args=(index, task))
            future.add_done_callback(lambda future: events.queue.put((index, future, True)))

        for _ in range(count):
            schedule()
        left = len(tasks)
        while left:
            index, value, ended = events.queue.get()
            if not ended:
                on_message(index, value)
                continue
            left -= 1
            if waiting:
                schedule()
            yield index, _outcome_of(value, time.perf_counter() - started[index])
    finally:
        pool.stop()  # type: ignore[no-untyped-call]
        pool.join()
        events.close()


# ---- Ray -------------------------------------------------------------------------------------------------------------


def _ray() -> Any:
    return library("ray", "The engine for several machines", "ray")


@contextmanager
def ray_cluster(
    address: str | None = None, *, workers: int | None = None, cpus: int = 1, gpus: float = 0
) -> Iterator[Engine]:
    """Connect to Ray, for an engine that runs things there."""
    # A run that fails, or whose worker dies, fails alone; Ray is not asked to try it again, since the ledger will. When
    # the iteration ends early, by Ctrl-C for example, what is under way is stopped.
    if (workers is not None and workers < 1) or cpus < 1 or not gpus >= 0:
        raise UsageError(
            f"workers={workers}, cpus={cpus}, gpus={gpus} is out of range.",
            cure="Give at least 1 worker, 1 CPU and 0 GPUs.",
        )
    ray = _ray()
    if ray.is_initialized() and address is not None:
        raise UsageError(
            f"Ray is connected to another cluster already and cannot be connected to {address}.",
            cure="Leave the address out.",
        )
    own = not ray.is_initialized()
    if own:
        _connect(address, workers, cpus)
    try:
        yield functools.partial(_run, workers=workers, cpus=cpus, gpus=gpus)
    finally:
        if own:
            ray.shutdown()


def _connect(address: str | None, workers: int | None, cpus: int) -> None:
    # A Ray cluster that is started here must not send usage statistics.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = _ray()
    given: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "ERROR"}
    if address is None and "RAY_ADDRESS" not in os.environ:
        given |= {"address": "local", "include_dashboard": False}
        if workers is not None:
            given["num_cpus"] = workers * cpus
    with warnings.catch_warnings():
        # Ray warns of a change in which GPUs tasks see, which does not matter here.
        warnings.filterwarnings("ignore", "Tip: In future versions of Ray", FutureWarning)
        try:
            ray.init(**given)
        except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            raise UsageError(
                f"No Ray cluster answers at {address or os.environ.get('RAY_ADDRESS') or 'this machine'}: {error}",
                cure="Check the address, and check that both machines have the same versions of Ray and Python.",
            ) from error


def _serve(task: bytes, threads: int) -> bytes:
    """Do a run in a worker of Ray."""
    limit_threads(threads)
    return run_pickled(task, dumps=_ray().cloudpickle.dumps)


def _run(
    fn: Callable[[C], Any], items: Sequence[C], /, *, workers: int | None, cpus: int, gpus: float
) -> Iterator[tuple[int, Outcome]]:
    ray = _ray()
    waiting = list(enumerate(pickled_tasks(fn, items, dumps=ray.cloudpickle.dumps)))[::-1]
    serve = ray.remote(_serve).options(num_cpus=cpus, num_gpus=gpus, max_retries=0)
    under_way: dict[Any, tuple[int, float]] = {}
    try:
        while waiting or under_way:
            while waiting and (workers is None or len(under_way) < workers):
                index, given = waiting.pop()
                under_way[serve.remote(given, cpus)] = index, time.perf_counter()
            (ended, *_), _ = ray.wait(list(under_way), num_returns=1)
            index, since = under_way.pop(ended)
            yield index, _outcome(ended, since)
    finally:
        for reference in under_way:
            ray.cancel(reference, force=True)


def _outcome(reference: Any, since: float) -> Outcome:
    """Return a run's outcome; of one whose worker died, Ray's message and the time since it was handed over."""
    ray = _ray()
    try:
        outcome = ray.cloudpickle.loads(ray.get(reference))
    except ray.exceptions.RayError as error:
        return Outcome(None, f"Ray lost the worker process of the task: {error}", time.perf_counter() - since)
    assert isinstance(outcome, Outcome)
    return outcome
