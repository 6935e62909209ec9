"""How small fine-tuned checkpoints become as differences from their base: sizes and times, written as JSON.

    python -m netweight_experiments.benchmarks.compress.differences MODEL TEXT

MODEL is the folder of a small BERT, such as all-MiniLM-L6-v2, or of a Llama; TEXT a file of real text. The model is
trained in fp32 by AdamW: each of two neighboring lines is to find the other one among those of the batch, a Llama the
next token of eight windows. Checkpoints in bf16 are taken on the way. Each is compressed alone, as differences from the
model before training (--base), and from the checkpoint before it; each is restored and compared file by file. zstd -3
of the XOR with the base is measured beside it. AdamW's moments, in fp32, are encoded alone and against those before.
"""

import copy
import filecmp
import json
import shutil
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy
import torch
from safetensors.torch import load_file

import netweight
from netweight import codec
from netweight.codec import active_path
from netweight.core.environment import describe
from netweight.hf.load_language_model import load_causal_lm
from netweight_experiments.benchmarks.script import load, script, today, write


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


def zstd_of_xor(model, base):
    import zstandard

    ours, theirs = (load_file(folder / "model.safetensors") for folder in (model, base))
    xor = b"".join((ours[n].view(torch.int16) ^ theirs[n].view(torch.int16)).numpy().tobytes() for n in ours)
    planes = numpy.frombuffer(xor, numpy.uint8).reshape(-1, 2).T.tobytes()
    return round(len(xor) / len(zstandard.ZstdCompressor(level=3).compress(planes)), 3)


def main():
    parser = script(__doc__, "compress-differences")
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--steps", type=int, nargs="+", default=[10, 20, 40])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-5, 2e-5])
    arguments = parser.parse_args()
    found = {}
    for rate in arguments.rates:
        with tempfile.TemporaryDirectory() as place:
            taken = list(train(arguments.model, arguments.text, Path(place), rate, arguments.steps))
            base = taken[0][0]
            for (before, its_moments), (model, moments) in pairwise(taken):
                found[f"learning rate {rate}, {model.name}"] = {
                    "moments": {key: moments_ratio(moments[key], its_moments[key]) for key in moments},
                    "alone": measure(model, None),
                    "against base": measure(model, base),
                    "against the checkpoint before": measure(model, before),
                    "zstd -3 of the XOR with base, by planes": zstd_of_xor(model, base),
                }
    result = {
        "benchmark": "compress-differences",
        "date": today(),
        "load_average": load(),
        "environment": describe({"codec_path": active_path()}),
        "checkpoints": found,
    }
    write(arguments.output, result, show=True)


if __name__ == "__main__":
    main()
