"""What it costs and saves to train and run a model compressed: measured, written to results/ as JSON.

    python -m netweight_experiments.benchmarks compress.models

The model is a Llama of about 100 million parameters (width 1024, vocabulary 4096, 7 layers), bf16, drawn from
N(0, 0.02), made by transformers. It is trained by SGD and by AdamW:

plain        the torch optimizer on a dense model
checkpointed the same with non-reentrant activation checkpointing, as all that follow have
layerwise    LayerwiseOptimizer on the dense model, in the manner of LOMO
compressed   LayerwiseOptimizer on a compressed model, AdamW's states compressed, too
partly       the same, the last two layers without a checkpoint
activations  the same, with activations compressed, too (compress_activations, compress_recomputed)

Each row of the result states memory and speed of one way against the same baseline. All of them take the loss in eight
parts, each in a checkpoint, so that its fp32 logits are not the peak.

peak, counted   Most bytes of tensors alive at once during a training step after the first, counted by a dispatch mode
                that sees every tensor as it is made, the compressed parameters' payloads included. Bytes objects of the
                encoder are not tensors and are not counted.
peak, sampled   RssAnon of a fresh process, sampled twice a millisecond during two steps after one step to warm up,
                less what it was before the model was made: everything private to the process.
speed           Both contenders in one process, one after another in every round; ratios of times within rounds, their
                median and range. Times are the processor's, all threads included, since other programs disturb these
                least; with a second thread at work they are those that pass. Tokens per second are those of `generate`
                with its cache, prompt included.
fixed           In tokens per second, the model with prefer="speed": its linear weights in the fixed-length form.
small layers    Microseconds of a Linear of 64 x 64 and of one token's embedding (32,000 x 512) without gradients, and
                what compression adds to them.
saving          RssAnon while `save_pretrained` writes the model as a compressed folder, less what it was before, in a
                fresh process that has saved a tiny model. The target is the largest weight and a tenth.

All with one torch thread, unless two are named. "decode ahead" lets a second thread, the codec's own, decode the next
layers: the dense model has no use for that thread, a model with two torch threads has.
"""

import copy
import gc
import json
import statistics
import tempfile
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import netweight
from netweight_experiments.benchmarks.script import load
from netweight_experiments.memory import PrivateMemory, TensorLedger, in_fresh_process, private_bytes
from netweight_experiments.timing import in_turns, ratios

PARTS = ("memory", "training", "inference", "small", "saving")
OPTIMIZERS = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}
WAYS = ("plain", "checkpointed", "layerwise", "compressed", "partly", "activations")
COMPRESSED = ("compressed", "partly", "activations")
PARTLY = 2  # layers whose activations are kept, not computed again, in the way "partly"
VARIANTS = tuple(f"{way} {optimizer}" for optimizer in OPTIMIZERS for way in WAYS)
# optimizer: its baseline, most of the baseline's memory, least of its speed
TARGETS = {"SGD": ("plain", 0.50, 0.85), "AdamW": ("checkpointed", 0.60, 0.85)}


def make_model(arguments, compressed=False, prefer="memory"):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=arguments.layers,
        num_attention_heads=16,
        vocab_size=4096,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    report = netweight.compress_(model, prefer=prefer) if compressed else None
    return model, report


def part_of_loss(logits, labels):
    return F.cross_entropy(logits.float(), labels, reduction="sum")


def loss_in_parts(logits, labels, vocab_size, **_):
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].flatten()
    pairs = zip(logits.view(-1, vocab_size).chunk(8), labels.chunk(8), strict=True)
    return sum(checkpoint(part_of_loss, *pair, use_reentrant=False) for pair in pairs) / (labels != -100).sum()


def make_training(variant, arguments):
    way, name = variant.split()
    model, _ = make_model(arguments, way in COMPRESSED)
    model.loss_function = loss_in_parts
    context = {"context_fn": netweight.compress_recomputed} if way == "activations" else {}
    if way != "plain":
        model.activation_checkpointing_enable({"use_reentrant": False, **context})
    if way == "partly":
        for layer in model.model.layers[-PARTLY:]:
            layer.gradient_checkpointing = False
    model.train()
    if way in ("plain", "checkpointed"):
        optimizer = OPTIMIZERS[name](model.parameters(), lr=1e-3)
    else:
        states = "compressed" if way in COMPRESSED else "dense"
        optimizer = netweight.LayerwiseOptimizer(model, OPTIMIZERS[name], lr=1e-3, states=states)
    ids = torch.randint(0, 4096, (arguments.batch, arguments.length), generator=torch.Generator().manual_seed(1))

    def step():
        with netweight.compress_activations() if way == "activations" else nullcontext():
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return model, optimizer, step


def one_peak(given):
    """In a process of its own: the two peaks, and the loss."""
    variant, layers, batch, length = given
    from transformers import LlamaForCausalLM  # noqa: F401  imports count as what was there before

    torch.zeros(8, 8).bfloat16() @ torch.zeros(8, 8).bfloat16()
    gc.collect()
    before = private_bytes()
    model, optimizer, step = make_training(variant, Namespace(layers=layers, batch=batch, length=length))
    step()  # the optimizer's states are made
    gc.collect()
    with TensorLedger(model, optimizer) as ledger:
        loss = step()
    with PrivateMemory() as memory:
        step()
        step()
    return {"counted": ledger.peak.nbytes, "sampled": memory.highest - before, "loss": loss}


def peaks(arguments):
    size = [arguments.layers, arguments.batch, arguments.length]
    found = {variant: in_fresh_process(one_peak, [variant, *size]) for variant in VARIANTS}
    for optimizer in OPTIMIZERS:
        if len({found[f"{way} {optimizer}"]["loss"] for way in WAYS}) > 1:
            raise SystemExit(f"With {optimizer} a compressed model computed another loss than the dense one.")
    return found


def ratio(times, contender, base, target=None):
    """How much faster the contender is than the base, round by round."""
    each = ratios(times, base, contender)
    median = statistics.median(each)
    return {
        "median": round(median, 3),
        "range": [round(min(each), 3), round(max(each), 3)],
        "target": target,
        "met": None if target is None else median >= target,
    }


def at_most(value, target):
    return {"value": round(value, 4), "target": target, "met": None if target is None else value <= target}


def training_speed(arguments, rounds):
    times = {}
    for optimizer in OPTIMIZERS:
        steps = {way: make_training(way, arguments)[2] for way in VARIANTS if way.endswith(optimizer)}
        times |= in_turns(steps, rounds)
    return {"seconds_per_step": times}


def training_rows(found, times):
    """One row per way: bytes counted, resident and steps per second, as they are and against the row's baseline."""
    rows = []
    for variant in VARIANTS:
        optimizer = variant.split()[1]
        base_way, most, least = TARGETS[optimizer]
        for way in dict.fromkeys((base_way, "plain", "checkpointed")):
            base = f"{way} {optimizer}"
            aimed = way == base_way and variant.split()[0] in COMPRESSED
            counted, resident = (found[variant][how] / found[base][how] for how in ("counted", "sampled"))
            rows.append({
                "way": variant,
                "baseline": base,
                "counted": found[variant]["counted"],
                "resident": found[variant]["sampled"],
                "steps per second": round(1 / statistics.median(times[variant]), 3),
                "counted / baseline": at_most(counted, most if aimed else None),
                "resident / baseline": round(resident, 4),
                "speed / baseline": ratio(times, variant, base, least if aimed else None),
            })  # fmt: skip
    return rows


def inference_speed(arguments, tokens, batches, rounds, one_core):
    (dense, _), (compressed, report) = make_model(arguments), make_model(arguments, compressed=True)
    fixed, also = make_model(arguments, compressed=True, prefer="speed")
    found = {
        "bytes held, against bf16": at_most(report.share, 0.665),
        "in the fixed-length form": at_most(also.share, None),
    }
    for prompt, new in (map(int, text.split("+")) for text in tokens):
        for batch in batches:
            models, target = (dense, compressed, fixed), 0.9 if batch == 1 else 0.95
            name = f"batch {batch}, {new} tokens after {prompt}"
            found[name] = generation_speed(*models, (batch, prompt), new, target, rounds, one_core)
    return found


def generation_speed(dense, compressed, fixed, shape, new, target, rounds, one_core):
    ids = torch.randint(0, 4096, shape, generator=torch.Generator().manual_seed(2))
    options = {
        "max_new_tokens": new,
        "min_new_tokens": new,
        "do_sample": False,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(ids),
    }

    def ahead():
        with netweight.decode_ahead():
            compressed.generate(ids, **options)

    for model in (compressed, fixed):
        if not torch.equal(dense.generate(ids, **options), model.generate(ids, **options)):
            raise SystemExit("The compressed model generated other tokens than the dense one.")
    cases = {
        "dense": lambda: dense.generate(ids, **options),
        "compressed": lambda: compressed.generate(ids, **options),
    }
    times = in_turns(cases | {"fixed": lambda: fixed.generate(ids, **options)}, rounds)
    found = {
        "seconds": times,
        "dense, tokens per second": round(shape[0] * new / statistics.median(times["dense"]), 2),
        "compressed": ratio(times, "compressed", "dense", target),
        "fixed": ratio(times, "fixed", "dense", target),
    }
    if one_core:
        return found
    ahead_times = in_turns({"dense": cases["dense"], "ahead": ahead}, rounds, clock="wall")
    torch.set_num_threads(2)
    on_two = in_turns(cases, rounds, clock="wall")
    torch.set_num_threads(1)
    return found | {
        "seconds, decode ahead": ahead_times,
        "compressed, decode ahead": ratio(ahead_times, "ahead", "dense"),
        "seconds, two torch threads": on_two,
        "compressed, two torch threads for both": ratio(on_two, "compressed", "dense"),
    }


def saving_memory(layers):
    """In a process of its own: what saving takes above the model, the first time and again."""
    model, _ = make_model(Namespace(layers=layers), compressed=True)
    tiny, _ = make_model(Namespace(layers=1), compressed=True)
    largest = max(parameter.nbytes for parameter in model.parameters())
    with tempfile.TemporaryDirectory() as place:
        tiny.save_pretrained(f"{place}/tiny")
        peaks_above = []
        for name in ("first", "again"):
            gc.collect()
            netweight.codec.trim_pool()
            before = private_bytes()
            with PrivateMemory() as memory:
                model.save_pretrained(f"{place}/{name}")
            peaks_above.append(memory.highest - before)
    return {"largest": largest, "peak": peaks_above, "peak / largest": at_most(max(peaks_above) / largest, 1.1)}


def small_layers(rounds):
    """What compression adds to a call, where calls take longer than numbers."""
    ids, found = torch.tensor([[17]]), {}
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(2, 64).to(dtype)
        for name, make, given, target in (
            ("Linear 64 x 64", lambda: torch.nn.Linear(64, 64), x, 15),
            ("one token's embedding", lambda: torch.nn.Embedding(32000, 512), ids, 30),
        ):
            dense = make().to(dtype)
            compressed = copy.deepcopy(dense)
            netweight.compress_(compressed)
            with torch.no_grad():
                cases = {
                    label: lambda layer=layer, given=given: [layer(given) for _ in range(2000)]
                    for label, layer in (("dense", dense), ("compressed", compressed))
                }
                times = in_turns(cases, rounds)
            each = {label: round(statistics.median(values) * 500, 2) for label, values in times.items()}
            added = at_most(each["compressed"] - each["dense"], target)
            found[f"{name}, {str(dtype).removeprefix('torch.')}"] = {"microseconds": each, "added": added}
    return found


def main(
    *,
    layers: int = 7,
    batch: int = 8,
    length: int = 256,
    rounds: int = 3,
    tokens: Annotated[tuple[str, ...], "tokens of a prompt + new ones"] = ("8+8", "192+64"),
    batches: Annotated[tuple[int, ...], (1, 8, 32)] = (1, 8, 32),
    parts: Annotated[tuple[str, ...], PARTS] = PARTS,
    one_core: Annotated[bool, "leave out what needs a second core"] = False,
    output: Path | None = None,
):
    from transformers.utils import logging

    logging.set_verbosity_error()
    size = Namespace(layers=layers, batch=batch, length=length)
    measures = {
        "memory": lambda: peaks(size),
        "training": lambda: training_speed(size, rounds),
        "inference": lambda: inference_speed(size, tokens, batches, rounds, one_core),
        "small": lambda: small_layers(2 * rounds + 1),
        "saving": lambda: in_fresh_process(saving_memory, layers),
    }
    result = {} if output is None or not output.exists() else json.loads(output.read_text())
    result = {part: result[part] for part in PARTS if part in result}  # parts that were measured before stay
    for part in parts:
        result[part] = measures[part]() | {"load_average": load()}
    if "memory" in result and "training" in result:
        result["rows"] = training_rows(result["memory"], result["training"]["seconds_per_step"])
    return result
