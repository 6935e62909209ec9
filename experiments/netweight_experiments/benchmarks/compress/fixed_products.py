"""Products with weights in the fixed-length form against dense ones on a GPU: written to results/ as JSON.

    python -m netweight_experiments.benchmarks compress.fixed_products

For each shape (rows x columns of a weight) and number of rows of inputs, in the same rounds:

dense        `torch.nn.functional.linear` with bf16 weights.
fixed        `netweight.codec.cuda.fixed_products.linear`: the fused kernels up to 256 rows, decoding first beyond.
decoded      Decoding by the kernel, then torch's product.

Each measurement multiplies with many weights one after the other, together more than caches hold (`--nbytes`), captured
in a CUDA graph so that starting kernels from Python is not measured; a number is the median of the rounds, in
microseconds per product. Besides, the bytes of the weight per second, and the speed relative to dense. Without a GPU
there is nothing to learn; `--device cpu` runs the script to the end all the same, to see that it works.
"""

import statistics
from typing import Annotated

import torch
import torch.nn.functional as F

from netweight.codec.cuda import fixed_products
from netweight.codec.fixed import encode_fixed
from netweight_experiments.cuda_graphs import captured, seconds

SEED = 0


def cases(rows, columns, batch, nbytes, device):
    """What is timed, by name: a function, and the bytes of weights that it reads."""
    generator = torch.Generator(device).manual_seed(SEED)
    count = max(1, -(-nbytes // (2 * rows * columns)))
    dense = [(torch.randn(rows, columns, generator=generator, device=device) * 0.02).bfloat16() for _ in range(count)]
    payloads = [encode_fixed(weight) for weight in dense]
    x = torch.randn(batch, columns, generator=generator, device=device).bfloat16()
    size = sum(payload.numel() for payload in payloads)
    return count, {
        "dense": (lambda: [F.linear(x, weight) for weight in dense], 2 * rows * columns * count),
        "fixed": (lambda: [fixed_products.linear(x, payload, rows, columns) for payload in payloads], size),
        "decoded": (lambda: [F.linear(x, fixed_products.decode(payload, rows, columns)) for payload in payloads], size),
    }


def measure(rows, columns, batch, nbytes, rounds, device):
    """Microseconds per product, GB/s of weights, and speeds relative to dense."""
    count, todo = cases(rows, columns, batch, nbytes, device)
    runs = {name: captured(run, device) for name, (run, _) in todo.items()}
    times = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            times[name].append(seconds(run, device) / count)
    middle = {name: statistics.median(taken[1:]) for name, taken in times.items()}
    return {
        name: {
            "us": round(taken * 1e6, 3),
            "GB/s": round(todo[name][1] / count / taken / 1e9, 1),
            "times dense": round(middle["dense"] / taken, 3),
        }
        for name, taken in middle.items()
    }


def main(
    *,
    shapes: tuple[str, ...] = ("1024x4096", "4096x4096", "14336x4096", "4096x14336", "128256x4096"),
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048),
    nbytes: Annotated[int, "of dense weights, for each measurement"] = 1 << 29,
    rounds: int = 15,
    device: str = "cuda",
):
    place = torch.device(device)
    if place.type == "cuda":
        place = torch.device("cuda", torch.cuda.current_device())
        if not fixed_products.runs_on(place):
            raise SystemExit("The kernels do not run on this GPU; netweight doctor says why.")
    found = {}
    with torch.no_grad():
        for shape in shapes:
            rows, columns = map(int, shape.split("x"))
            for batch in batches:
                key = f"{shape}, {batch} rows of inputs"
                found[key] = measure(rows, columns, batch, nbytes, rounds, place)
                print(key, found[key], flush=True)
    return {
        "seed": SEED,
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu",
        "products": found,
    }
