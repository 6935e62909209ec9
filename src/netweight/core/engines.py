"""Engines: where the runs of `Job.map` happen. A plain function each, so that others can be added anywhere.

An engine runs one function on many items and yields `(index of the item, Outcome)` as the runs end, in any order:
`in_process`, `local_processes`, or a cluster of Ray:

    with ray_cluster("auto") as engine:
        for result in job.map(fn, configs, engine=engine): ...

What a job remembers does not depend on the engine, so that runs begun on one machine go on in a cluster. Workers
must have netweight and see the same files under the same paths.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, Protocol, TypeVar, cast, final

from netweight.core.files import usable_cores
from netweight.core.lazy import library
from netweight.errors import UsageError

C = TypeVar("C")


@final
@dataclass(frozen=True)
class Outcome:
    """How one run ended, as an engine reports it."""

    value: Any  # what the function returned; None if it failed
    error: str | None  # the traceback, or what is known of a worker that died; None if the run succeeded
    seconds: float  # wall-clock time of the run


class Engine(Protocol):
    """Runs `fn` on each item, somewhere, and yields `(index of the item, Outcome)` as they end, in any order."""

    def __call__(self, fn: Callable[[C], Any], items: Sequence[C], /) -> Iterator[tuple[int, Outcome]]:
        """Run all items; a failure is an `Outcome` with an error, never an exception."""
        ...


def _run_one(fn: Callable[[C], Any], item: C) -> Outcome:
    """Run one item; whatever it raises becomes the outcome's error, save a wish to stop the whole process."""
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


def _leave_with_parent() -> None:
    """End this worker as soon as its parent is gone, so that a killed study leaves nothing running behind it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def limit_threads(threads: int) -> None:
    """Compute with so many threads in this process, also in what is imported later."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)


@dataclass(frozen=True)
class _Told:
    """What a run told before its end."""

    value: Any


_pipe: Connection | None = None  # of a worker, to its parent


def tell(value: Any) -> None:
    """Hand a value over from within a run of `local_processes`, before it ends; elsewhere nothing happens."""
    if _pipe is not None:
        _pipe.send(_Told(value))


# What takes seconds to import, and starts no threads.
_LARGE = ("torch", "transformers.models.llama.modeling_llama", "peft")


def _context(imports: Sequence[str]) -> BaseContext:
    """Workers are forks of a process that has imported large libraries once and done nothing else."""
    # Elsewhere libraries that are imported may not survive a fork, or there is none; a socket's path has 107 bytes.
    if sys.platform != "linux" or len(os.fsencode(tempfile.gettempdir())) > 70:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*(name for name in _LARGE if name in sys.modules), *imports])
    return context


def _work(pipe: Connection, threads: int, environment: dict[str, str]) -> None:
    """Serve runs in a worker process: receive a pickled `(fn, item)`, answer with an `Outcome`, until stopped."""
    global _pipe
    _pipe = pipe
    os.environ.clear()
    os.environ.update(environment)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then stops its workers
    limit_threads(threads)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        while True:
            pipe.send_bytes(answer(attempt(pipe.recv_bytes())))


def answer(outcome: Outcome, *, dumps: Callable[[Any], bytes] = pickle.dumps) -> bytes:
    """Pickle an outcome in a worker; one that does not pickle has failed."""
    try:
        return dumps(outcome)
    except Exception:
        return dumps(Outcome(None, f"The run's value cannot be pickled.\n{traceback.format_exc()}", 0.0))


def attempt(task: bytes) -> Outcome:
    """Unpickle a task in a worker and run it; a task that cannot be unpickled here has failed."""
    try:
        fn, item = pickle.loads(task)
    except Exception:
        return Outcome(None, traceback.format_exc(), 0.0)
    return _run_one(fn, item)


class _Worker:
    """One worker process and this side of its pipe."""

    def __init__(self, threads: int, imports: Sequence[str]) -> None:
        context = _context(imports)
        self.pipe, theirs = context.Pipe()
        # Not a daemon, because a run may need processes of its own (data loaders); hence the care at exit.
        self.process: BaseProcess = context.Process(target=_work, args=(theirs, threads, dict(os.environ)))  # type: ignore[attr-defined]
        self.process.start()
        atexit.register(self.stop)
        theirs.close()
        self.index: int | None = None
        self.started = 0.0

    def give(self, index: int, task: bytes) -> None:
        """Hand over a task; a worker that is dead already is noticed when its answer is taken."""
        self.index, self.started = index, time.perf_counter()
        try:
            self.pipe.send_bytes(task)
        except BrokenPipeError:
            self.process.join()

    def take(self) -> Outcome | _Told | None:
        """Take the answer that is ready, or what the run tells; None if the worker died instead."""
        try:
            answer = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            return None
        assert isinstance(answer, Outcome | _Told)
        return answer

    def obituary(self) -> Outcome:
        """Describe the death of this worker as the outcome of the run that it was doing."""
        self.process.join()
        self.stop()
        code = self.process.exitcode or 0
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        return Outcome(None, f"The worker process {how} during this run.", time.perf_counter() - self.started)

    def stop(self) -> None:
        """End the process: at once if it is at work, else as a process ends that has nothing to do."""
        atexit.unregister(self.stop)
        self.pipe.close()
        if self.index is None:
            self.process.join(5)
        self.process.terminate()
        self.process.join()


def local_processes(
    fn: Callable[[C], Any],
    items: Sequence[C],
    /,
    *,
    workers: int | None = None,
    told: Callable[[int, Any], object] = lambda index, value: None,
    imports: Sequence[str] = (),
) -> Iterator[tuple[int, Outcome]]:
    """Run items in worker processes on this machine: the default engine."""
    # A worker lives for many runs; one that dies (out of memory, a crash in native code) fails its run only and is
    # replaced. The machine's cores are shared out among the workers. To choose their number, pass
    # `functools.partial(local_processes, workers=4)` as the engine. `told` takes what runs `tell`, as they do. Of
    # `imports`, modules that runs need, those that are installed are imported once for all workers.
    if workers is not None and workers < 1:
        raise UsageError(f"workers must be at least 1, not {workers}.")
    cores = usable_cores()
    count = min(workers or cores, len(items))
    threads = max(1, cores // max(1, count))
    waiting = list(enumerate(sendable(fn, items)))[::-1]
    pool = {worker.pipe: worker for worker in (_Worker(threads, imports) for _ in range(count))}
    try:
        for worker in pool.values():
            worker.give(*waiting.pop())
        while busy := [worker.pipe for worker in pool.values() if worker.index is not None]:
            for pipe in cast("list[Connection]", wait(busy)):
                worker = pool[pipe]
                index, outcome = cast("int", worker.index), worker.take()
                if isinstance(outcome, _Told):
                    told(index, outcome.value)
                    continue
                worker.index = None
                if outcome is None:
                    outcome = pool.pop(pipe).obituary()
                    worker = _Worker(threads, imports)
                    pool[worker.pipe] = worker
                if waiting:
                    worker.give(*waiting.pop())
                yield index, outcome
    finally:
        for worker in pool.values():
            worker.stop()


def sendable(
    fn: Callable[[C], Any], items: Sequence[C], *, dumps: Callable[[Any], bytes] = pickle.dumps
) -> list[bytes]:
    """Pickle the runs of a function on items: tasks for `attempt`."""
    try:
        return [dumps((fn, item)) for item in items]
    except Exception as error:
        raise UsageError(
            f"{getattr(fn, '__qualname__', fn)!r} cannot be sent to worker processes: {error}.",
            cure="Define it and its configuration's type at the top level of a module, or use engine=in_process.",
        ) from error


# ---- Ray -------------------------------------------------------------------------------------------------------------


def _ray() -> Any:
    return library("ray", "The engine of many machines", "ray")


@contextmanager
def ray_cluster(
    address: str | None = None, *, workers: int | None = None, cpus: int = 1, gpus: float = 0
) -> Iterator[Engine]:
    """Connect to Ray, for an engine that runs things there."""
    # A run that fails, or whose worker dies, fails alone; Ray is not asked to try it again, since the ledger will. When
    # the iteration ends early, by Ctrl-C for example, what is under way is stopped.
    if (workers is not None and workers < 1) or cpus < 1 or not gpus >= 0:
        raise UsageError(
            f"workers={workers}, cpus={cpus}, gpus={gpus} is out of range.", cure="Give at least 1, 1 and 0 of them."
        )
    ray = _ray()
    if ray.is_initialized() and address is not None:
        raise UsageError(f"Ray is connected already, so that it cannot be to {address}.", cure="Leave the address out.")
    own = not ray.is_initialized()
    if own:
        _connect(address, workers, cpus)
    try:
        yield functools.partial(_run, workers=workers, cpus=cpus, gpus=gpus)
    finally:
        if own:
            ray.shutdown()


def _connect(address: str | None, workers: int | None, cpus: int) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a Ray that is started here reports to nobody
    ray = _ray()
    given: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "ERROR"}
    if address is None and "RAY_ADDRESS" not in os.environ:
        given |= {"address": "local", "include_dashboard": False}
        if workers is not None:
            given["num_cpus"] = workers * cpus
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Tip: In future versions of Ray", FutureWarning)  # of what GPUs runs see
        try:
            ray.init(**given)
        except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            raise UsageError(
                f"No Ray cluster answers at {address or os.environ.get('RAY_ADDRESS') or 'this machine'}: {error}",
                cure="Check the address, and that Ray and Python have the same versions there and here.",
            ) from error


def _serve(task: bytes, threads: int) -> bytes:
    """Do a run in a worker of Ray."""
    limit_threads(threads)
    return answer(attempt(task), dumps=_ray().cloudpickle.dumps)


def _run(
    fn: Callable[[C], Any], items: Sequence[C], /, *, workers: int | None, cpus: int, gpus: float
) -> Iterator[tuple[int, Outcome]]:
    ray = _ray()
    waiting = list(enumerate(sendable(fn, items, dumps=ray.cloudpickle.dumps)))[::-1]
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
    """What a run said; of one whose worker died, what Ray says, and as its time that since it was handed over."""
    ray = _ray()
    try:
        said = ray.cloudpickle.loads(ray.get(reference))
    except ray.exceptions.RayError as error:
        return Outcome(None, f"Ray lost the run's worker process: {error}", time.perf_counter() - since)
    assert isinstance(said, Outcome)
    return said
