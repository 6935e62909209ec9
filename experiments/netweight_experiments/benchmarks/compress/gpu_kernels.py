"""How fast kernels decode and encode bf16 matrices on an NVIDIA GPU, and start: written to results/ as JSON.

    python -m netweight_experiments.benchmarks compress.gpu_kernels

Matrices are drawn from N(0, 0.02); rates are of their dense bytes, 10^9 a second, medians of replays of a CUDA graph
that goes through more of them than caches hold; "a block's seven" are those of Llama-3 8B in one launch. What is
decoded is compared with what was encoded first. "us per layer" is what a small Linear layer takes when nothing waits
for the GPU, that is in Python and in starting kernels: dense, fixed-length and in the codec's form.
"""

import statistics
import time

import torch
from torch import nn

import netweight
from netweight.codec import cuda
from netweight_experiments.cuda_graphs import captured, seconds

SIZES = ((1024, 4096), (4096, 4096), (14336, 4096), (16384, 16384))
CHUNKS = (14, 15, 18)
WORK = 1 << 28  # bytes that a graph goes through
FORMS = ("dense", "fixed", "codec")


def rate(run, nbytes, rounds, device):
    """GB/s of what goes through these dense bytes."""
    replay = captured(run, device)
    return round(nbytes / statistics.median(seconds(replay, device) for _ in range(rounds)) / 1e9, 1)


def measure(shape, chunk_log2, rounds, device):
    """Rates of decoding and encoding, and the ratio."""
    count = max(1, WORK // (2 * shape[0] * shape[1]))
    dense = [(torch.randn(shape, device=device) * 0.02).bfloat16() for _ in range(count)]
    blobs = [cuda.encode(weight, chunk_log2=chunk_log2, checks=False) for weight in dense]
    layouts = [cuda.layout_of(blob) for blob in blobs]
    outs = [cuda.decode(blob, layout) for blob, layout in zip(blobs, layouts, strict=True)]
    for out, weight in zip(outs, dense, strict=True):
        assert torch.equal(out.view(torch.int16), weight.view(torch.int16)), "a matrix did not come back"
    status = torch.zeros(1, dtype=torch.int32, device=device)
    size = 8 + cuda.largest_blob(dense[0], chunk_log2=chunk_log2)
    payload = torch.empty(size, dtype=torch.uint8, device=device)

    def decode():
        for blob, layout, out in zip(blobs, layouts, outs, strict=True):
            cuda.decode(blob, layout, out=out, status=status)

    def encode():
        for weight in dense:
            cuda.encode_into(weight, payload, chunk_log2=chunk_log2, status=status, checks=False)

    nbytes = sum(weight.nbytes for weight in dense)
    rates = {name: rate(run, nbytes, rounds, device) for name, run in (("decode", decode), ("encode", encode))}
    return {**rates, "ratio": dense[0].nbytes / blobs[0].numel()}


def one_launch(chunk_log2, rounds, device):
    """Rate of decoding the weights of a transformer's block together."""
    shapes = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 3
    dense = [(torch.randn(shape, device=device) * 0.02).bfloat16() for shape in shapes]
    blobs = [cuda.encode(weight, chunk_log2=chunk_log2, checks=False) for weight in dense]
    plan = cuda.DecodePlan(blobs, [cuda.layout_of(blob) for blob in blobs])
    status = torch.zeros(1, dtype=torch.int32, device=device)
    found = rate(lambda: plan.decode(status), sum(weight.nbytes for weight in dense), rounds, device)
    for out, weight in zip(plan.outs, dense, strict=True):
        assert torch.equal(out.view(torch.int16), weight.view(torch.int16)), "a matrix did not come back"
    return found


@torch.inference_mode()
def starting(rounds, device):
    """Microseconds that a layer's call takes on the host."""
    layers = {
        form: nn.Sequential(*(nn.Linear(256, 256, False) for _ in range(200))).bfloat16().to(device) for form in FORMS
    }
    netweight.compress_(layers["fixed"], prefer="speed")
    netweight.compress_(layers["codec"])
    x = torch.zeros(1, 256, dtype=torch.bfloat16, device=device)

    def started():  # when nothing waits for the GPU any more
        torch.cuda.synchronize(device)
        return time.perf_counter()

    times = {form: [] for form in FORMS}
    for _ in range(rounds + 2):
        for form, model in layers.items():
            before = started()
            model(x)
            times[form].append((time.perf_counter() - before) / len(model))
    return {form: round(1e6 * statistics.median(taken[2:]), 2) for form, taken in times.items()}


def main(*, device: str = "cuda:0", rounds: int = 9):
    reason, place = cuda.unavailable_because(), torch.device(device)
    if reason is not None:
        raise SystemExit(reason)
    found = {}
    for rows, columns in SIZES:
        for chunk_log2 in CHUNKS:
            key = f"{rows} x {columns}, chunks of 2**{chunk_log2}"
            found[key] = measure((rows, columns), chunk_log2, rounds, place)
            print(key, found[key], flush=True)
    found["a block's seven, chunks of 2**15"] = {"decode": one_launch(15, rounds, place)}
    name = torch.cuda.get_device_name(place)
    return {"device": name, "GB/s": found, "us per layer": starting(rounds, place)}
