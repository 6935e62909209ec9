"""Baking a LoRA of rank 16 into a model of a billion parameters: processor time beside `cp`, memory, and equality.

    python -m netweight_experiments.benchmarks space.bake --work FOLDER [--rounds 5] [--compressed] [--peers]

The model is a Llama with random weights, in bf16 shards of at most 1 GB; the LoRA changes all linear layers of its
blocks. In each round, `bake` and `cp -r` of the folder take turns, after the source was read into the system's cache.
Processor time is user and system time; that of bake is without imports and includes reading the result back. Memory is
the largest resident size of a process that bakes once, and how much of it came after the imports.

`--compressed` bakes the compressed folder into a compressed one. `--peers` compares the weights with peft's
`merge_and_unload`, and those of a U-Net and a Flux transformer with `fuse_lora` of diffusers, as the largest difference
relative to the largest change.
"""

import json
import multiprocessing
import resource
import shutil
import statistics
import subprocess
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from netweight_experiments.benchmarks.script import load

RANK, SHARD = 16, 10**9
LLAMA = dict(vocab_size=32_000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=21,
             num_attention_heads=32, num_key_value_heads=4, tie_word_embeddings=False)  # fmt: skip
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def model(folder):
    """A Llama with random weights in bf16 shards, whose tensors are made one by one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**LLAMA, dtype="bfloat16")
    with torch.device("meta"):
        shapes = {name: tuple(one.shape) for name, one in LlamaForCausalLM(config).named_parameters()}
    draw, shards, size = torch.Generator().manual_seed(0), [{}], 0
    for name, shape in shapes.items():
        weight = (torch.randn(shape, generator=draw) * 0.02).bfloat16()
        size += weight.nbytes
        if size > SHARD:
            shards, size = [*shards, {}], weight.nbytes
        shards[-1][name] = weight
    folder.mkdir(parents=True)
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for name, tensors in zip(names, shards, strict=True):
        save_file(tensors, folder / name, {"format": "pt"})
    places = {key: name for name, tensors in zip(names, shards, strict=True) for key in tensors}
    total = sum(one.nbytes for tensors in shards for one in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return shapes


def lora(folder, shapes):
    """A LoRA of all linear layers of the blocks, as peft saves it."""
    draw = torch.Generator().manual_seed(1)
    tensors = {}
    for name, (rows, columns) in ((name, shape) for name, shape in shapes.items() if len(shape) == 2):
        if name.split(".")[-2] in TARGETS:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(RANK, columns, generator=draw) / columns**0.5
            tensors[f"{module}.lora_B.weight"] = torch.randn(rows, RANK, generator=draw) * 0.01
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(TARGETS),
                "task_type": "CAUSAL_LM", "bias": "none"}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def seconds(usage):
    return usage.ru_utime + usage.ru_stime


def warmed(source, target):
    """Bring a folder's files into the system's cache, and remove the target."""
    shutil.rmtree(target, ignore_errors=True)
    for file in source.iterdir():
        with open(file, "rb", buffering=0) as content:
            while content.read(1 << 20):
                pass


def copied(source, target):
    """Processor time of `cp -r`."""
    warmed(source, target)
    before = seconds(resource.getrusage(resource.RUSAGE_CHILDREN))
    subprocess.run(["cp", "-r", source, target], check=True)
    return seconds(resource.getrusage(resource.RUSAGE_CHILDREN)) - before


def baked_here(work, source, target):
    """User and system time of baking in this process."""
    from netweight.methods.space.baking import bake_model

    warmed(source, target)
    before = resource.getrusage(resource.RUSAGE_SELF)
    bake_model(source, [str(work / "lora")], target)
    now = resource.getrusage(resource.RUSAGE_SELF)
    return now.ru_utime - before.ru_utime, now.ru_stime - before.ru_stime


def bake_here(work, source, target, threads, results):
    """Bake in this process, whose time and memory are measured."""
    torch.set_num_threads(threads)
    import diffusers  # noqa: F401  so that its import is not measured
    from transformers import LlamaForCausalLM  # noqa: F401

    from netweight.methods.space.baking import bake_model

    imported, before = peak(), resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    made = bake_model(source, [str(work / "lora")], target)
    wall, now = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    results.put({
        "user_s": now.ru_utime - before.ru_utime, "system_s": now.ru_stime - before.ru_stime, "wall_s": wall,
        "whole_process_s": seconds(now), "peak_mb": peak(), "peak_after_imports_mb": peak() - imported,
        "modules": made.modules, "copied": made.copied,
    })  # fmt: skip


def peak():
    """Largest resident size of this process so far, in megabytes."""
    status = Path("/proc/self/status").read_text("ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1e3


def baked(work, source, target, threads):
    warmed(source, target)
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    process = spawn.Process(target=bake_here, args=(work, source, target, threads, results))
    process.start()
    found = results.get()
    process.join()
    return found


def against_peft(work):
    """The largest difference of a weight from that of peft's merge in fp32, relative to the largest change."""
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    from netweight.store.reader import open_store

    whole = LlamaForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
    merged = PeftModel.from_pretrained(whole, work / "lora").merge_and_unload()
    return compared(merged.state_dict(), work / "model", work / "baked", open_store)


def compared(merged, before, after, open_store):
    worst = change = 0.0
    equal = count = 0
    with open_store(before) as one, open_store(after) as two:
        for name in two.names():
            own, weight = two.get(name), merged[name]
            rounded = weight.to(own.dtype)
            equal += int(torch.equal(rounded, own))
            count += 1
            worst = max(worst, float((rounded.float() - own.float()).abs().max()))
            change = max(change, float((weight.float() - one.get(name).float()).abs().max()))
    return {"tensors": count, "equal_bit_for_bit": equal, "largest_difference": worst, "largest_change": change}


def against_diffusers(work, kind):
    """The same for a denoiser of diffusers in fp32, whose LoRA is loaded and fused."""
    import diffusers

    from netweight.methods.space.baking import bake_model
    from netweight.nn.lora import Adapter, LowRank
    from netweight.store.lora_formats.writing import write_adapter
    from netweight.store.reader import open_store

    torch.manual_seed(0)
    if kind == "unet":
        denoiser = diffusers.UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8,
                                                  block_out_channels=(256, 512, 768, 768))  # fmt: skip
    else:
        denoiser = diffusers.FluxTransformer2DModel(num_layers=2, num_single_layers=4, num_attention_heads=12,
                                                    joint_attention_dim=4096, pooled_projection_dim=768)  # fmt: skip
    part = "unet" if kind == "unet" else "transformer"
    folder = work / kind
    shutil.rmtree(folder, ignore_errors=True)
    denoiser.save_pretrained(folder / "model" / part, max_shard_size="500MB")
    factors = {}
    for name, module in denoiser.named_modules():
        if isinstance(module, torch.nn.Linear) and "attn" in name:
            down, up = torch.randn(RANK, module.in_features), torch.randn(module.out_features, RANK)
            factors[f"{part}.{name}"] = LowRank(down / module.in_features**0.5, up * 0.01)
    write_adapter(Adapter(factors), folder / "lora")
    bake_model(folder / "model" / part, [str(folder / "lora")], folder / "baked")
    denoiser.load_lora_adapter(str(folder / "lora"), prefix=part, weight_name="pytorch_lora_weights.safetensors")
    denoiser.fuse_lora()
    fused = {name.replace(".base_layer.", "."): one for name, one in denoiser.state_dict().items()
             if ".lora_" not in name}  # fmt: skip
    found = compared(fused, folder / "model" / part, folder / "baked", open_store)
    parameters = sum(one.numel() for one in fused.values())
    shutil.rmtree(folder)
    return {"kind": kind, "parameters": parameters, "modules": len(factors)} | found


def main(*, work: Path, rounds: int = 5, threads: int = 1, compressed: bool = False, peers: bool = False):
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "lora").exists():
        shutil.rmtree(work / "model", ignore_errors=True)
        lora(work / "lora", model(work / "model"))
    result = {"rank": RANK, "bytes": sum(file.stat().st_size for file in (work / "model").iterdir()), "llama": LLAMA}
    if compressed:
        from netweight.methods.compress.compress_folder import compress_folder

        if not (work / "packed").exists():
            compress_folder(work / "model", work / "packed")
        row = baked(work, work / "packed", work / "baked-packed", threads)
        shutil.rmtree(work / "baked-packed")
        return result | {"compressed": row}
    if peers:
        baked(work, work / "model", work / "baked", threads)
        found = {"peft": against_peft(work), "diffusers": [against_diffusers(work, kind) for kind in ("unet", "flux")]}
        shutil.rmtree(work / "baked")
        return result | {"peers": found}
    once = baked(work, work / "model", work / "baked", threads)
    import diffusers  # noqa: F401  so that its import is not measured
    from transformers import LlamaForCausalLM  # noqa: F401

    torch.set_num_threads(threads)
    baked_here(work, work / "model", work / "baked")  # which builds transformers' tables of names
    rows = []
    for _ in range(rounds):
        user, system = baked_here(work, work / "model", work / "baked")
        copy = copied(work / "model", work / "copy")
        rows.append({"user_s": user, "system_s": system, "cp_s": copy, "ratio": (user + system) / copy, "load": load()})
        print(rows[-1], flush=True)
    for name in ("copy", "baked"):
        shutil.rmtree(work / name)
    middle = {key: statistics.median(row[key] for row in rows) for key in ("user_s", "system_s", "cp_s", "ratio")}
    return result | {"once": once, "median": middle, "rounds": rows}
