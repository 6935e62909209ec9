"""What memory loading a model takes: a program that prints it as JSON, in bytes, and a function that runs it.

Usage: loading_memory.py transformers|diffusers PLACE, a Llama or a UNet in PLACE/net, compressed, and in PLACE/dense,
which is compressed while loading. `peak` is the private memory at its highest above that before, sampled, and
`saving` the same of `save_pretrained` afterwards; `mapped` is what is left in memory of the folder's mapped files.
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time

import torch
import transformers

import netweight
from netweight.plugins.transformers import NetweightConfig


def measured(name, place):
    """What `main` prints, for each folder, of a process of its own."""
    answer = subprocess.run(
        [sys.executable, __file__, name, str(place)],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
        check=False,
        timeout=300,
    )
    assert answer.returncode == 0, answer.stderr
    return [json.loads(line) for line in answer.stdout.splitlines() if line.startswith('{"dense"')]


def resident(kind):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(kind))


def mapped_of(folder):
    """Bytes of a folder's files that are mapped and in memory."""
    total, of_folder = 0, False
    with open("/proc/self/smaps") as mappings:
        for line in mappings:
            first, *rest = line.split(maxsplit=5)
            if "-" in first:
                of_folder = len(rest) == 5 and rest[4].startswith(folder)
            elif of_folder and first == "Rss:":
                total += int(rest[0]) * 1024
    return total


def watch(found, stop):
    while not stop.is_set():
        found.append(resident("RssAnon"))
        time.sleep(0.002)


def library(name, folder):
    """A model's class, after its library has imported what it imports late and keeps, which does not count."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if name == "transformers":
        transformers.AutoConfig.from_pretrained(folder)
        return transformers.LlamaForCausalLM
    import diffusers

    import netweight.plugins.diffusers  # noqa: F401

    diffusers.logging.set_verbosity_error()
    diffusers.UNet2DConditionModel.load_config(folder)
    return diffusers.UNet2DConditionModel


def peak_of(run):
    """What `run` returns, and the private memory at its highest above that before."""
    gc.collect()
    private, found, stop = resident("RssAnon"), [], threading.Event()
    watcher = threading.Thread(target=watch, args=(found, stop))
    watcher.start()
    result = run()
    stop.set()
    watcher.join()
    return result, max(found) - private


def load(kind, folder, **settings):
    model, peak = peak_of(lambda: kind.from_pretrained(folder, dtype=torch.bfloat16, **settings))
    gc.collect()
    held, mapped = netweight.memory_footprint(model), mapped_of(folder)
    with tempfile.TemporaryDirectory(dir=os.path.dirname(folder)) as saved:
        _, saving = peak_of(lambda: model.save_pretrained(f"{saved}/again"))
    dense = 2 * sum(p.numel() for p in model.parameters())
    print(json.dumps({"dense": dense, "held": held, "peak": peak, "mapped": mapped, "saving": saving}), flush=True)


def main(name, place):
    torch.set_num_threads(1)
    kind = library(name, f"{place}/dense")
    for folder, settings in (("net", {}), ("dense", {"quantization_config": NetweightConfig()})):
        child = os.fork()  # each from the same start, imports done once
        if not child:
            load(kind, f"{place}/{folder}", **settings)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
