"""Loading a real language model on the CPU from its dense and its compressed folder: seconds, and resident memory.

    python -m netweight_experiments.benchmarks compress.loading MODEL --output benchmarks/results/compress/loading.json

MODEL is a folder of transformers. The two folders take turns in one process, with warm caches of the system and one
thread. "first token" is the first forward pass after loading, which compares the compressed weights with their checks.
Peaks are resident memory above that before, pages of the mapped file included.
"""

from __future__ import annotations

import gc
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any


def main(model: str, /, *, turns: int = 5) -> dict[str, Any]:
    """Load both folders in turns; return seconds, peaks and the compressed bytes."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    import netweight

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    ids = torch.arange(1, 9)[None]
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as place:
        compressed = Path(place) / "net"
        summary = netweight.compress_folder(model, compressed)
        for turn in range(turns + 1):
            for name, folder in (("dense", Path(model)), ("compressed", compressed)):
                gc.collect()
                Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
                before, wall, cpu = _resident("VmRSS"), time.perf_counter(), time.process_time()
                loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
                values = {
                    "seconds": time.perf_counter() - wall,
                    "processor seconds": time.process_time() - cpu,
                    "peak of loading": _resident("VmHWM") - before,
                }
                wall = time.perf_counter()
                with torch.inference_mode():
                    loaded(ids)
                values |= {"first token, seconds": time.perf_counter() - wall, "peak": _resident("VmHWM") - before}
                del loaded
                for key, value in values.items() if turn else ():
                    found.setdefault(name, {}).setdefault(key, []).append(value)
    medians = {name: {key: statistics.median(each) for key, each in of.items()} for name, of in found.items()}
    ratios = {key: medians["compressed"][key] / medians["dense"][key] for key in ("seconds", "processor seconds")}
    sizes = {"dense bytes": summary.nbytes, "compressed bytes": summary.stored_nbytes}
    above = medians["compressed"]["peak"] - summary.stored_nbytes
    return {
        **sizes,
        "medians": medians,
        "compressed / dense": ratios,
        "peak above compressed bytes": above,
        "all": found,
    }


def _resident(kind: str) -> int:
    """Bytes of this process by the kernel's count, `VmRSS` or `VmHWM`."""
    found = re.search(rf"{kind}:\s+(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1]) * 1024
