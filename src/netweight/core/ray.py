"""Ray as an engine of `Job.map`: runs go to a Ray cluster, or to Ray on this machine.

    with ray_cluster("auto") as engine:
        for result in job.map(fn, configs, engine=engine): ...

What a job remembers does not depend on the engine, so that runs begun on one machine go on in a cluster. Workers
must have netweight and see the same files under the same paths.
"""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from netweight.core.engines import Engine, Outcome, answer, attempt, limit_threads, sendable
from netweight.errors import MissingExtra, UsageError

try:
    import ray
    import ray.cloudpickle as cloudpickle
    from ray.exceptions import RayError
except ImportError as error:
    raise MissingExtra(
        "The engine needs Ray, which is not installed.", cure='Run: pip install "netweight[ray]"'
    ) from error


C = TypeVar("C")


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
    given: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "ERROR"}
    if address is None and "RAY_ADDRESS" not in os.environ:
        given |= {"address": "local", "include_dashboard": False}
        if workers is not None:
            given["num_cpus"] = workers * cpus
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Tip: In future versions of Ray", FutureWarning)  # of what GPUs runs see
        try:
            ray.init(**given)
        except (ConnectionError, ValueError, RuntimeError, RayError) as error:
            raise UsageError(
                f"No Ray cluster answers at {address or os.environ.get('RAY_ADDRESS') or 'this machine'}: {error}",
                cure="Check the address, and that Ray and Python have the same versions there and here.",
            ) from error


def _serve(task: bytes, threads: int) -> bytes:
    """Do a run in a worker of Ray."""
    limit_threads(threads)
    return answer(attempt(task), dumps=cloudpickle.dumps)


def _run(
    fn: Callable[[C], Any], items: Sequence[C], /, *, workers: int | None, cpus: int, gpus: float
) -> Iterator[tuple[int, Outcome]]:
    waiting = list(enumerate(sendable(fn, items, dumps=cloudpickle.dumps)))[::-1]
    task: Any = ray.remote(_serve)
    serve = task.options(num_cpus=cpus, num_gpus=gpus, max_retries=0)
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
    try:
        said = cloudpickle.loads(ray.get(reference))
    except RayError as error:
        return Outcome(None, f"Ray lost the run's worker process: {error}", time.perf_counter() - since)
    assert isinstance(said, Outcome)
    return said
