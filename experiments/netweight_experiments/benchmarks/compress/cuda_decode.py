"""How fast blobs are decoded on an NVIDIA GPU: measured, written to results/ as JSON.

    python -m netweight_experiments.benchmarks.compress.cuda_decode

Tensors are drawn from N(0, 0.02). Rates are bytes of the decoded tensor, 10^9 a second; "of copy" is the share of what
a copy of the tensor on the device reaches. Everything is decoded once before, and compared with what was encoded.

one       One tensor in a launch, at each size of chunks: smaller chunks give more warps something to do.
block     The seven matrices of a transformer's block of width 4096 in one launch (`DecodePlan`).
call      Microseconds until `decode` returns, with a status and an output given: what Python and the driver take.

Times are medians of the runs, taken with events on the stream. Between runs 256 MB are written, so that neither blob
nor output lies in the L2 cache, as in a model that is larger than it.
"""

import json
import statistics
import time

import torch

from netweight import codec
from netweight.codec import cuda
from netweight.core.environment import describe
from netweight_experiments.benchmarks.script import script, write

SIZES = {"small": (1024, 1024), "attention": (4096, 4096), "feed-forward": (11008, 4096), "embedding": (128_000, 4096)}
BLOCK = ((4096, 4096),) * 2 + ((1024, 4096),) * 2 + ((14_336, 4096),) * 3
CHUNKS = (14, 15, 16, 17, 18)


def median_seconds(run, runs, device):
    """The median time of `run` on the stream, with cold caches."""
    rubbish = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(runs):
        rubbish.fill_(1)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        seconds.append(start.elapsed_time(stop) / 1000)
    return statistics.median(seconds)


def encoded(tensor, chunk_log2, device):
    """A tensor's blob on the device, and its layout."""
    blob = codec.encode(tensor, chunk_log2=chunk_log2, threads=8)
    there = torch.frombuffer(bytearray(blob), dtype=torch.uint8).to(device)
    return there, cuda.layout_of(there)


def one(dtype, shape, chunk_log2, runs, device):
    """One tensor: its ratio, rates, and the time of a call."""
    tensor = (torch.randn(shape) * 0.02).to(dtype)
    blob, layout = encoded(tensor, chunk_log2, device)
    out = cuda.decode(blob, layout)
    assert torch.equal(out.cpu(), tensor), "a tensor did not come back"
    copy, status = torch.empty_like(out), torch.zeros(1, dtype=torch.int32, device=device)
    seconds = median_seconds(lambda: cuda.decode(blob, layout, out=out, status=status), runs, device)
    copying = median_seconds(lambda: copy.copy_(out), runs, device)
    started = time.perf_counter()
    for _ in range(100):
        cuda.decode(blob, layout, out=out, status=status)
    call = (time.perf_counter() - started) / 100
    cuda.raise_if_corrupt(status)
    rate = tensor.nbytes / seconds / 1e9
    return {
        "ratio": tensor.nbytes / blob.numel(), "GB/s": rate, "of copy": copying / seconds, "call us": call * 1e6,
    }  # fmt: skip


def block(dtype, chunk_log2, runs, device):
    """The matrices of a block, in one launch and one by one."""
    blobs, layouts = zip(*(encoded((torch.randn(s) * 0.02).to(dtype), chunk_log2, device) for s in BLOCK), strict=True)
    plan, status = cuda.DecodePlan(blobs, layouts), torch.zeros(1, dtype=torch.int32, device=device)

    def one_by_one():
        for blob, layout, out in zip(blobs, layouts, plan.outs, strict=True):
            cuda.decode(blob, layout, out=out, status=status)

    nbytes = sum(layout.nbytes for layout in layouts)
    together = median_seconds(lambda: plan.decode(status), runs, device)
    apart = median_seconds(one_by_one, runs, device)
    cuda.raise_if_corrupt(status)
    return {"one launch GB/s": nbytes / together / 1e9, "one by one GB/s": nbytes / apart / 1e9}


def main():
    parser = script(__doc__, "cuda-decode")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    reason = cuda.unavailable_because()
    if reason is not None:
        parser.exit(2, f"{reason}\n")
    device = torch.device(options.device)
    rows = []
    for chunk_log2 in CHUNKS:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for name, shape in SIZES.items():
                row = one(dtype, shape, chunk_log2, options.runs, device)
                rows.append({"dtype": str(dtype), "tensor": name, "chunk_log2": chunk_log2, **row})
                print(json.dumps(rows[-1]), flush=True)
        row = block(torch.bfloat16, chunk_log2, options.runs, device)
        rows.append({"dtype": "torch.bfloat16", "tensor": "block", "chunk_log2": chunk_log2, **row})
        print(json.dumps(rows[-1]), flush=True)
    gpu = {"gpu": torch.cuda.get_device_name(device), "runs": options.runs}
    write(options.output, {"environment": describe(gpu), "rows": rows})


if __name__ == "__main__":
    main()
