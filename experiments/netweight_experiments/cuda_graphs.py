"""Work captured in a CUDA graph, so that Python and the starting of kernels are not measured, and its time."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def captured(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return a function that does what `run` does: on a GPU from a graph, without Python between its kernels.

    Args:
        run: What is captured. It runs twice before.
        device: Where; on the CPU `run` itself is returned.
    """
    run()
    if device.type != "cuda":
        return run
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    replay: Callable[[], object] = graph.replay
    return replay


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one run, by the device's clock.

    Args:
        run: What is timed.
        device: Where it runs.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    before.record()
    run()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) / 1e3
