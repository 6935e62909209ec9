"""How fast tensors are encoded on an NVIDIA GPU: measured, written to results/ as JSON.

    python -m netweight_experiments.benchmarks.compress.cuda_encode

Tensors are drawn from N(0, 0.02). Rates are bytes of the tensor, 10^9 a second, of `encode_into` with a status: what
training calls. "with digest" is the same with the tensor's digest, whose last part one warp does alone. Everything is
encoded once before, and compared with the CPU's blob. Times are taken as in cuda_decode.py.
"""

import json

import torch

from netweight import codec
from netweight.codec import cuda
from netweight.core.environment import describe
from netweight_experiments.benchmarks.compress.cuda_decode import CHUNKS, SIZES, median_seconds
from netweight_experiments.benchmarks.script import script, write


def one(dtype, shape, chunk_log2, level, runs, device):
    """One tensor: its ratio and rates."""
    tensor = (torch.randn(shape) * 0.02).to(dtype)
    whole = codec.encode(tensor, level=level, chunk_log2=chunk_log2, threads=8)
    there = tensor.to(device)
    blob = cuda.encode(there, level=level, chunk_log2=chunk_log2)
    assert blob.cpu().numpy().tobytes() == whole, "the GPU's blob is not the CPU's"
    payload = torch.empty(8 + len(whole), dtype=torch.uint8, device=device)
    status = torch.zeros(1, dtype=torch.int32, device=device)

    def seconds(digest):
        def encode():
            cuda.encode_into(there, payload, level=level, chunk_log2=chunk_log2, digest=digest, status=status)

        return median_seconds(encode, runs, device)

    rates = {"GB/s": tensor.nbytes / seconds(False) / 1e9, "with digest GB/s": tensor.nbytes / seconds(True) / 1e9}
    assert not status.item(), "a blob did not fit"
    return {"ratio": tensor.nbytes / len(whole), **rates}


def main():
    parser = script(__doc__, "cuda-encode")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    reason = cuda.unavailable_because()
    if reason is not None:
        parser.exit(2, f"{reason}\n")
    device = torch.device(options.device)
    rows = []
    for level in ("fast", "default"):
        for chunk_log2 in CHUNKS:
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                for name, shape in SIZES.items():
                    row = one(dtype, shape, chunk_log2, level, options.runs, device)
                    what = {"dtype": str(dtype), "tensor": name, "level": level, "chunk_log2": chunk_log2}
                    rows.append({**what, **row})
                    print(json.dumps(rows[-1]), flush=True)
    gpu = {"gpu": torch.cuda.get_device_name(device), "runs": options.runs}
    write(options.output, {"environment": describe(gpu), "rows": rows})


if __name__ == "__main__":
    main()
