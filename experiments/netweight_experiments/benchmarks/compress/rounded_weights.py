"""Lossy blobs measured: bits per weight beside their entropy, the change of weights, and the speed of decoding.

    python -m netweight_experiments.benchmarks compress.rounded_weights

The weights are the matrices of all-MiniLM-L6-v2 as bf16, and 16.8 million drawn from N(0, 0.02). For each number of
kept mantissa bits and each block size:

bits      Bits per weight of the whole blobs.
entropy   The order-0 entropy of words (sign, exponent and kept bits together), tensor by tensor, and besides it the
          bits of the normalizers as they are stored.
change    The largest relative change of a weight, and the bound.
decode    Bytes of weights per second into memory of the caller's, one thread: the median over rounds; and the ratio to
          decoding the same weights from lossless blobs in the same rounds, with its range.
"""

import statistics

import torch
from safetensors.torch import load_file

from netweight import codec
from netweight.codec import lossy
from netweight.toys import minilm
from netweight_experiments.benchmarks.compress.codec_data import order_0
from netweight_experiments.timing import Case, interleave

SEED = 0
SETTINGS = [(bits, block) for bits in (0, 1, 3) for block in (None, 512, 64, 32)]


def weights():
    """The sets of tensors by name."""
    stored = load_file(minilm.weights_file())
    matrices = [tensor.bfloat16() for tensor in stored.values() if tensor.dim() >= 2 and tensor.is_floating_point()]
    drawn = torch.randn(1 << 24, generator=torch.Generator().manual_seed(SEED)) * 0.02
    return {"all-MiniLM-L6-v2, bf16": matrices, "N(0, 0.02), bf16": [drawn.bfloat16()]}


def sizes(tensors, blobs):
    """Bits per weight of lossy blobs, of what an ideal order-0 coder would need, and what was changed."""
    count = sum(tensor.numel() for tensor in tensors)
    infos = [codec.info(blob) for blob in blobs]
    headers = [lossy.read_header(blob) for blob in blobs]
    words = sum(order_0(codec.decode_raw(header.words.tobytes()).view("<u2")) for header in headers)
    normalizers = sum(8 * len(header.normalizers) for header in headers if header.normalizers is not None)
    return {
        "bits per weight": round(8 * sum(map(len, blobs)) / count, 4),
        "entropy of words": round(words / count, 4),
        "normalizers": round(normalizers / count, 4),
        "bound": infos[0].bound,
        "largest change": max(info.worst_change for info in infos),
    }


def measure(name, tensors, rounds):
    """All figures of one set of tensors."""
    nbytes = sum(tensor.nbytes for tensor in tensors)
    outs = [torch.empty_like(tensor) for tensor in tensors]

    def decoding(blobs):
        return lambda _: [codec.decode_into(blob, out) for blob, out in zip(blobs, outs, strict=True)]

    lossless = [codec.encode(tensor) for tensor in tensors]
    found, cases = {}, [Case("lossless", decoding(lossless))]
    for bits, block in SETTINGS:
        blobs = [codec.encode_lossy(tensor, mantissa_bits=bits, block_size=block) for tensor in tensors]
        key = f"{bits} bits, {f'blocks of {block}' if block else 'no normalizers'}"
        found[key] = sizes(tensors, blobs)
        cases.append(Case(key, decoding(blobs)))
    times = interleave(cases, repeats=rounds, seed=SEED)
    for key, entry in found.items():
        ratios = [a / b for a, b in zip(times["lossless"].cpu, times[key].cpu, strict=True)]
        entry["decode, GB/s of CPU time"] = round(nbytes / statistics.median(times[key].cpu) / 1e9, 2)
        entry["decode, times lossless"] = [round(f(ratios), 3) for f in (statistics.median, min, max)]
    bits = round(8 * 8 * sum(map(len, lossless)) / nbytes / 4, 4)
    speed = round(nbytes / statistics.median(times["lossless"].cpu) / 1e9, 2)
    return {"lossless": {"bits per weight": bits, "decode, GB/s of CPU time": speed}, "rounded": found}


def main(*, rounds: int = 7):
    return {name: measure(name, tensors, rounds) for name, tensors in weights().items()}
