"""How small fine-tuned checkpoints become as differences from their base: sizes and times, written as JSON.

    python -m netweight_experiments.benchmarks compress.differences MODEL TEXT

MODEL is the folder of a small BERT, such as all-MiniLM-L6-v2, or of a Llama; TEXT a file of real text. The model is
trained in fp32 by AdamW: each of two neighboring lines is to find the other one among those of the batch, a Llama the
next token of eight windows. Checkpoints in bf16 are taken on the way. Each is compressed alone, as differences from the
model before training (--base), and from the checkpoint before it; each is restored and compared file by file. zstd -3
of the XOR with the base is measured beside it, and what a coder of order 0 could reach: the entropy of steps from the
base, chunk by chunk, and that given the exponent of the base's weight (which small tensors flatter: every chunk has its
own counts). Decoding is timed on one thread, into memory that exists, checked and not. AdamW's moments, in fp32, are
encoded alone and against those before.
"""

import copy
import filecmp
import json
import shutil
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy
import torch
from safetensors.torch import load_file

import netweight
from netweight import codec
from netweight.hf.load_language_model import load_causal_lm
from netweight_experiments.benchmarks.compress.codec_data import order_0
from netweight_experiments.timing import in_turns, median_ratio


def loss_of(folder, text):
    """The model of a folder in fp32, and its loss on the text by step."""
    from transformers import AutoTokenizer, BertModel

    if json.loads((folder / "config.json").read_text())["model_type"] == "bert":
        tokenizer, model = AutoTokenizer.from_pretrained(folder), BertModel.from_pretrained(folder)
        lines = [line.strip() for line in text.read_text(encoding="utf-8").splitlines() if len(line) > 60]

        def pooled(some):
            tokens = tokenizer(some, return_tensors="pt", padding=True, truncation=True, max_length=32)
            return torch.nn.functional.normalize(model(**tokens).last_hidden_state.mean(1), dim=-1)

        def loss(step):
            at = 16 * step % (len(lines) - 17)
            similar = pooled(lines[at : at + 16 : 2]) @ pooled(lines[at + 1 : at + 17 : 2]).T
            return torch.nn.functional.cross_entropy(20 * similar, torch.arange(8))

        return model.float().train(), loss
    model, tokenizer = load_causal_lm(folder)
    tokens = torch.tensor(tokenizer(text.read_text(encoding="utf-8")[:400_000])["input_ids"])

    def next_token(step):
        at = 8 * 128 * step % (len(tokens) - 8 * 128)
        windows = tokens[at : at + 8 * 128].view(8, 128)
        return model(input_ids=windows, labels=windows).loss

    return model.float().train(), next_token


def train(folder, text, place, rate, steps):
    """Yield folders in bf16 and AdamW's moments: the model as it is, then after each of the steps."""
    torch.manual_seed(0)
    model, loss = loss_of(folder, text)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for step in range(max(steps) + 1):
        if step in (0, *steps):
            target = place / f"step-{step}"
            copy.deepcopy(model).bfloat16().save_pretrained(target)
            states = optimizer.state.values()
            yield target, {key: [state[key].clone() for state in states] for key in ("exp_avg", "exp_avg_sq")}
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()


def moments_ratio(moments, before):
    """Ratio of moments encoded alone, and against those before, each decoded again and compared."""
    sizes = {"alone": 0, "against those before": 0}
    for now, then in zip(moments, before or moments, strict=True):
        for name, base in zip(sizes, (None, then if before else None), strict=True):
            blob = codec.encode(now, base=base)
            sizes[name] += len(blob)
            if not torch.equal(codec.decode(blob, base=base, check=True).view(torch.int32), now.view(torch.int32)):
                raise SystemExit("moments came back otherwise")
    total = sum(moment.nbytes for moment in moments)
    return {name: round(total / size, 3) for name, size in sizes.items()}


def restored(folder, back, base):
    """Seconds to restore a folder; refuses one that differs."""
    started = time.perf_counter()
    netweight.decompress_folder(folder, back, base=base, threads=1)
    return time.perf_counter() - started


def measure(model, base):
    """One checkpoint against a base, or alone."""
    net, back = model.with_name("net"), model.with_name("back")
    summary = netweight.compress_folder(model, net, base=base, threads=1)
    seconds = restored(net, back, base)
    names = sorted(path.relative_to(model) for path in model.rglob("*") if path.is_file())
    _, different, unreadable = filecmp.cmpfiles(model, back, names, shallow=False)
    if different or unreadable:
        raise SystemExit(f"{different + unreadable} came back otherwise")
    shutil.rmtree(net)
    shutil.rmtree(back)
    return {
        "ratio": round(summary.ratio, 3),
        "bytes": summary.stored_nbytes,
        "compress_s": round(summary.seconds, 3),
        "restore_s": round(seconds, 3),
    }


def against(model, base):
    """One checkpoint against another: sizes, speeds, peers and limits."""
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (model, base))
    pairs = [(ours[name], theirs[name]) for name in ours if ours[name].dtype == torch.bfloat16]
    return {
        **measure(model, base),
        "zstd -3 of the XOR, by planes": zstd_of_xor(pairs),
        "ratio at the entropy": limits(pairs),
        "decode": decode_speed(pairs),
    }


def zstd_of_xor(pairs):
    import zstandard

    xor = b"".join((ours.view(torch.int16) ^ theirs.view(torch.int16)).numpy().tobytes() for ours, theirs in pairs)
    planes = numpy.frombuffer(xor, numpy.uint8).reshape(-1, 2).T.tobytes()
    return round(len(xor) / len(zstandard.ZstdCompressor(level=3).compress(planes)), 3)


def limits(pairs):
    """Ratios at the entropy of steps: plain, and given the exponent of the base's weight."""
    bits, numbers = {"steps": 0.0, "steps given the base's exponent": 0.0}, 0
    for pair in pairs:
        ours, theirs = (tensor.view(torch.int16).numpy().ravel().astype(numpy.int32) for tensor in pair)
        steps = numpy.subtract(*(numpy.where(u < 0, -32769 - u, u) for u in (ours, theirs)))
        exponents = theirs >> 7 & 255
        for start in range(0, len(steps), 1 << 18):
            here, known = steps[start : start + (1 << 18)], exponents[start : start + (1 << 18)]
            bits["steps"] += order_0(here)
            bits["steps given the base's exponent"] += sum(order_0(here[known == e]) for e in numpy.unique(known))
        numbers += len(steps)
    return {name: round(16 * numbers / total, 2) for name, total in bits.items()}


def decode_speed(pairs, rounds=5):
    """GB/s of decoded bytes on one thread: medians, and of checked to unchecked in the same round."""
    blobs = [codec.encode(tensor, base=base) for tensor, base in pairs]
    outs = [torch.empty_like(tensor) for tensor, _ in pairs]

    def decode(check):
        for blob, out, (_, base) in zip(blobs, outs, pairs, strict=True):
            codec.decode_into(blob, out, base=base, check=check)

    seconds = in_turns({"plain": lambda: decode(False), "checked": lambda: decode(True)}, rounds)
    if not all(torch.equal(out, tensor) for out, (tensor, _) in zip(outs, pairs, strict=True)):
        raise SystemExit("tensors came back otherwise")
    nbytes = sum(out.nbytes for out in outs)
    return {
        "GB/s": round(nbytes / statistics.median(seconds["plain"]) / 1e9, 3),
        "GB/s, rounds": [round(nbytes / spent / 1e9, 3) for spent in seconds["plain"]],
        "checked per unchecked": median_ratio(seconds, "plain", "checked"),
    }


def main(model: Path, text: Path, /, *, steps: tuple[int, ...] = (10, 20, 40), rates: tuple[float, ...] = (1e-5, 2e-5)):
    found = {}
    for rate in rates:
        with tempfile.TemporaryDirectory() as place:
            taken = list(train(model, text, Path(place), rate, steps))
            base = taken[0][0]
            for (before, its_moments), (checkpoint, moments) in pairwise(taken):
                found[f"learning rate {rate}, {checkpoint.name}"] = {
                    "moments": {
                        key: moments_ratio(values, its_moments[key])
                        for key, values in moments.items()
                        if sum(value.numel() for value in values) < 1 << 22  # encoding more takes minutes
                    },
                    "alone": measure(checkpoint, None),
                    "against base": against(checkpoint, base),
                    "against the checkpoint before": against(checkpoint, before),
                }
    return {"checkpoints": found}
