"""Load a model and print, as JSON in bytes, what it holds and what memory the loading took.

Usage: loading_memory.py net|dense FOLDER [diffusers], a Llama or a UNet. `peak` is the private memory at its highest
above that before, sampled; `mapped` is how much more of files is mapped in the end than before.
"""

import gc
import json
import sys
import threading
import time

import torch
import transformers

import netweight
from netweight.integrations.transformers import NetweightConfig

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def resident(kind):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(kind))


def watch(found, stop):
    while not stop.is_set():
        found.append(resident("RssAnon"))
        time.sleep(0.002)


def library(name, folder):
    """How a library loads, after what it imports late and keeps, which does not count."""
    if name == "transformers":
        transformers.AutoConfig.from_pretrained(folder)
        kind = transformers.LlamaForCausalLM
    else:
        import diffusers

        import netweight.integrations.diffusers  # noqa: F401

        diffusers.logging.set_verbosity_error()
        kind = diffusers.UNet2DConditionModel
        kind.load_config(folder)
    return lambda **settings: kind.from_pretrained(folder, dtype=torch.bfloat16, **settings)


def main(how, folder, name="transformers"):
    torch.set_num_threads(1)
    settings = {} if how == "net" else {"quantization_config": NetweightConfig()}
    load = library(name, folder)

    gc.collect()
    private, mapped, found, stop = resident("RssAnon"), resident("RssFile"), [], threading.Event()
    watcher = threading.Thread(target=watch, args=(found, stop))
    watcher.start()
    model = load(**settings)
    stop.set()
    watcher.join()
    gc.collect()
    print(
        json.dumps(
            {
                "dense": 2 * sum(p.numel() for p in model.parameters()),
                "held": netweight.memory_footprint(model),
                "peak": max(found) - private,
                "mapped": resident("RssFile") - mapped,
            }
        )
    )


main(*sys.argv[1:])
