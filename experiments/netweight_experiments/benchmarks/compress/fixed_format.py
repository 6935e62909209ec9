"""The fixed-length form measured on real weights, and what memory and arithmetic allow: written to results/ as JSON.

    python -m netweight_experiments.benchmarks compress.fixed_format

Measured, on the matrices of all-MiniLM-L6-v2 as bf16 and on 16.8 million weights drawn from N(0, 0.02):

bits             Bits per weight of whole payloads and blobs: the fixed-length form (4-bit codes), the codec's.
escapes          Weights of 10 000 outside the best window of 15 exponents (4-bit codes; zeros have a code of their own)
                 and of 7 (3-bit codes).
3-bit codes      Bits per weight that such codes would take: 8 + 3 and, for each escape, 8 bits for an exponent alone,
                 which must then be counted out, or 16 with its place.
fp16             The same for fp16: 11 bits of sign and mantissa, 4- or 3-bit codes, 16 bits more per escape.
encode, decode   GB/s of dense weights per CPU second, one thread, and the codec's in the same rounds.

Computed, not measured: the time of one weight in a product on several memories, as the larger of the times that memory
and arithmetic take at the rates of their data sheets. No kernel reaches these; they tell what a form is good for.

dense            2 bytes read.
fixed, fused     Its bytes read once for each 64 rows of inputs.
decoded first    Bytes read, 2 bytes written and read again, each through memory; a decoder that is slower than memory
                 waits for its own rate, stated in bytes of dense weights per second.
"""

import statistics

import torch
from safetensors.torch import load_file

from netweight import codec
from netweight.codec.fixed import decode_fixed, encode_fixed, read_layout
from netweight.toys import minilm
from netweight_experiments.timing import Case, interleave

SEED = 0
BATCHES = (1, 8, 32, 64, 128, 256, 1024, 8192)
# per second: bytes of memory, bf16 operations with fp32 sums, bytes of dense weights that a decoder gives
MEMORIES = {
    "H200": (4.8e12, 990e12, (250e9, 600e9, 1e12)),
    "A100 80 GB": (2.0e12, 312e12, (250e9, 600e9, 1e12)),
    "RTX 5090": (1.8e12, 209e12, (250e9, 600e9, 1e12)),
    "RTX 4090": (1.0e12, 165e12, (250e9, 600e9, 1e12)),
    "DDR5, 8 cores": (50e9, 2e12, (13e9, 100e9)),
}
AT_ONCE, FUSED = 64, 256  # as in netweight.codec.cuda.fixed_products


# ---- measured --------------------------------------------------------------------------------------------------------


def weights():
    """The sets of matrices by name."""
    stored = load_file(minilm.weights_file())
    matrices = {name: tensor for name, tensor in stored.items() if tensor.dim() == 2 and tensor.is_floating_point()}
    drawn = torch.randn(4096, 4096, generator=torch.Generator().manual_seed(SEED)) * 0.02
    return {"all-MiniLM-L6-v2": matrices, "N(0, 0.02)": {"4096 x 4096": drawn}}


def escapes(tensor, codes):
    """How many numbers lie outside the best window of so many exponents; zeros lie inside."""
    bits = tensor.reshape(-1).view(torch.int16)
    mantissa, largest = (7, 255) if tensor.dtype == torch.bfloat16 else (10, 31)
    counts = torch.bincount((bits[(bits & 0x7FFF) != 0] >> mantissa) & largest, minlength=largest + 1)
    return int(counts.sum() - counts.unfold(0, codes, 1).sum(1).max())


def sizes(tensors):
    """Bits per weight of a set of fp32 matrices, as bf16 and as fp16."""
    count = sum(tensor.numel() for tensor in tensors)
    narrow, half = [tensor.bfloat16() for tensor in tensors], [tensor.half() for tensor in tensors]
    of_4, of_3 = (sum(escapes(tensor, codes) for tensor in narrow) / count for codes in (15, 7))
    half_4, half_3 = (sum(escapes(tensor, codes) for tensor in half) / count for codes in (15, 7))
    payloads = [encode_fixed(tensor) for tensor in narrow]
    assert sum(read_layout(payload).escapes for payload in payloads) == round(of_4 * count)
    return {
        "bits per weight, fixed": round(8 * sum(map(torch.Tensor.numel, payloads)) / count, 4),
        "bits per weight, codec": round(8 * sum(len(codec.encode(tensor)) for tensor in narrow) / count, 4),
        "escapes of 10 000, 4-bit codes": round(of_4 * 1e4, 2),
        "escapes of 10 000, 3-bit codes": round(of_3 * 1e4, 2),
        "bits per weight, 3-bit codes, counted out": round(11 + 8 * of_3, 3),
        "bits per weight, 3-bit codes, with places": round(11 + 16 * of_3, 3),
        "fp16": {
            "bits per weight, codec": round(8 * sum(len(codec.encode(tensor)) for tensor in half) / count, 4),
            "bits per weight, 4-bit codes": round(15 + 16 * half_4, 3),
            "bits per weight, 3-bit codes": round(14 + 16 * half_3, 3),
        },
    }


def spread(tensors):
    """The worst and the best matrix of a set."""
    found = {
        name: (round(8 * encode_fixed(tensor.bfloat16()).numel() / tensor.numel(), 3), escapes(tensor.bfloat16(), 15))
        for name, tensor in tensors.items()
    }
    return {
        name: {"shape": list(tensors[name].shape), "bits per weight": bits, "escapes": count}
        for name, (bits, count) in sorted(found.items(), key=lambda item: item[1])
    }


def speeds(tensors, rounds):
    """GB/s of CPU time, one thread."""
    narrow = [tensor.bfloat16() for tensor in tensors]
    payloads, blobs = [encode_fixed(tensor) for tensor in narrow], [codec.encode(tensor) for tensor in narrow]
    nbytes = sum(tensor.nbytes for tensor in narrow)
    cases = [
        Case("encode, fixed", lambda _: [encode_fixed(tensor) for tensor in narrow]),
        Case("decode, fixed", lambda _: [decode_fixed(payload) for payload in payloads]),
        Case("encode, codec", lambda _: [codec.encode(tensor) for tensor in narrow]),
        Case("decode, codec", lambda _: [codec.decode(blob) for blob in blobs]),
    ]
    times = interleave(cases, repeats=rounds, seed=SEED)
    return {case.key: round(nbytes / statistics.median(times[case.key].cpu) / 1e9, 2) for case in cases}


# ---- computed --------------------------------------------------------------------------------------------------------


def relative(batch, memory, arithmetic, fixed, coded, decoders):
    """Speeds of one product against the dense one, from bytes and operations alone."""
    products = 2 * batch / arithmetic
    dense = max(2 / memory, products)
    passes = -(-batch // AT_ONCE)
    fused = max(passes * fixed / memory, products)
    found = {
        "dense, ps": dense * 1e12,
        "fixed, fused": dense / fused,
        "fixed, decoded first": dense / ((fixed + 2) / memory + dense),
    }
    for rate in decoders:
        decoding = max((coded + 2) / memory, 2 / rate)
        found[f"codec at {rate / 1e9:.0f} GB/s, decoded first"] = dense / (decoding + dense)
    return {name: round(value, 3) for name, value in found.items()}


def rooflines(fixed_bits, coded_bits):
    """For each memory and batch, speeds against dense bf16."""
    return {
        name: {
            "memory, GB/s": memory / 1e9,
            "arithmetic, TFLOP/s": arithmetic / 1e12,
            "rows of inputs": {
                str(batch): relative(batch, memory, arithmetic, fixed_bits / 8, coded_bits / 8, decoders)
                for batch in BATCHES
            },
        }
        for name, (memory, arithmetic, decoders) in MEMORIES.items()
    }


def main(*, rounds: int = 7):
    sets = weights()
    measured = {
        name: sizes(list(tensors.values())) | speeds(list(tensors.values()), rounds) for name, tensors in sets.items()
    }
    drawn = measured["N(0, 0.02)"]
    computed = rooflines(drawn["bits per weight, fixed"], drawn["bits per weight, codec"])
    return {"seed": SEED, "measured": measured, "matrices": spread(sets["all-MiniLM-L6-v2"]), "computed": computed}
