"""Extracting, resizing and merging adapters beside other tools on the same files: error and processor time, as JSON.

    python -m netweight_experiments.benchmarks space.daily_jobs --work FOLDER [--rounds 5] [--sd-scripts CHECKOUT]

A Llama of eight layers with random weights, and one with differences that fall off as trained ones do. The error is
that of the change, ‖ΔW − BA‖ / ‖ΔW‖ over all linear layers, from files read back by safetensors alone. Time is that of
the work without imports, median over rounds, in turn. LyCORIS, mergekit and sd-scripts are left out, and said to be,
where they are not installed.
"""

import importlib
import json
import logging
import re
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from netweight.methods.space.converting import convert_file
from netweight.methods.space.extraction import extract_files
from netweight.methods.space.merging import merge_files
from netweight.methods.space.settings import ConvertSettings, ExtractSettings, MergeSettings

WIDTH, LAYERS, RANK, SMALL = 512, 8, 16, 4


def models(folder):
    """A model and two that were changed, as folders."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS, num_attention_heads=8
    ))  # fmt: skip
    base.save_pretrained(folder / "base")
    clean = {name: value.clone() for name, value in base.state_dict().items()}
    for number in (1, 2):
        for name, value in base.named_parameters():
            if value.ndim == 2 and "layers" in name:
                left, right = (torch.linalg.qr(torch.randn(side, 64)).Q for side in value.shape)
                value.data = clean[name] + left @ torch.diag(torch.arange(1, 65.0) ** -1) @ right.T
        base.save_pretrained(folder / f"tuned-{number}")


def changes(folder, number=1):
    """The differences themselves."""
    one, two = (load_file(folder / name / "model.safetensors") for name in ("base", f"tuned-{number}"))
    return {name.removesuffix(".weight"): two[name] - one[name] for name in one if "proj" in name}


def adapter(path):
    """Changes of a file of peft's layout, by safetensors and its settings alone."""
    found = load_file(path / "adapter_model.safetensors")
    config = json.loads((path / "adapter_config.json").read_text())
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    dense = {}
    for name in (name for name in found if "lora_A" in name):
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")

        def told(patterns, usual, module=module):
            return next((value for key, value in patterns.items() if module.endswith(key.strip("^$"))), usual)

        alpha = told(alphas, config["lora_alpha"]) / told(ranks, config["r"])
        dense[module] = alpha * found[name.replace("lora_A", "lora_B")].float() @ found[name].float()
    return dense


def error(found, wanted):
    """‖found − wanted‖ / ‖wanted‖; what is missing counts whole."""
    lost = sum(
        float((found.get(name, torch.zeros(())) - value).double().square().sum()) for name, value in wanted.items()
    )
    return (lost / sum(float(value.double().square().sum()) for value in wanted.values())) ** 0.5


def extract_ours(work):
    extract_files(work / "base", work / "tuned-1", work / "ours-1", ExtractSettings(rank=RANK), overwrite=True)
    return lambda: adapter(work / "ours-1")


def extract_mergekit(work):
    command = importlib.import_module("mergekit.scripts.extract_lora").main
    shutil.rmtree(work / "mergekit", ignore_errors=True)
    done = CliRunner().invoke(
        command, ["--model", str(work / "tuned-1"), "--base-model", str(work / "base"), "--out-path",
                  str(work / "mergekit"), "--max-rank", str(RANK), "--skip-undecomposable"],
    )  # fmt: skip
    if done.exit_code:
        raise done.exception or RuntimeError(done.output)
    return lambda: adapter(work / "mergekit")


def extract_lycoris(work):
    extract = importlib.import_module("lycoris.utils").extract_linear
    found = {}
    for name, change in changes(work).items():
        down, up = extract(change, "fixed", RANK)[0][:2]
        found |= {f"{name}.lora_down.weight": down.contiguous(), f"{name}.lora_up.weight": up.contiguous()}
    return of_kohya(found, work / "lycoris.safetensors")


def resize_ours(work):
    convert_file(work / "ours-1", work / "ours-small", ConvertSettings(rank=SMALL), overwrite=True)
    return lambda: adapter(work / "ours-small")


def sd_scripts_module(name, scripts):
    """A module of sd-scripts' checkout; of its library of models, which no tensor needs, only names."""
    if scripts is None:
        raise ImportError("no checkout of sd-scripts was named")
    stub = mock.MagicMock(is_safetensors=lambda path: True)
    stub.train_util, stub.model_util = stub, stub
    sys.modules |= {"library": stub, "library.model_util": stub, "library.utils": stub, "lora": stub}
    sys.path.insert(0, str(scripts))
    return importlib.import_module(f"networks.{name}")


def of_kohya(found, path):
    """Write tensors under kohya's names, and read their changes; all with alpha = rank."""
    save_file(found, path)
    ups = {name.removesuffix(".lora_up.weight"): value for name, value in found.items() if "lora_up" in name}
    return lambda: {name: up @ found[f"{name}.lora_down.weight"] for name, up in ups.items()}


def kohya(work, number):
    """One of our adapters under sd-scripts' names of tensors."""
    found, sides = load_file(work / f"ours-{number}" / "adapter_model.safetensors"), {"A": "down", "B": "up"}
    named = {name.removeprefix("base_model.model."): value for name, value in found.items()}
    return {re.sub(r"lora_([AB])", lambda side: f"lora_{sides[side[1]]}", name): one for name, one in named.items()}


def resize_sd_scripts(work, scripts):
    resize = sd_scripts_module("resize_lora", scripts).resize_lora_model
    found = resize(kohya(work, 1), SMALL, SMALL, torch.float32, "cpu", None, None, False)[0]
    return of_kohya(found, work / "resized.safetensors")


def merge_sd_scripts(work, scripts):
    merge = sd_scripts_module("svd_merge_lora", scripts).merge_lora_models
    files = [work / f"kohya-{number}.safetensors" for number in (1, 2)]
    for number, file in enumerate(files, start=1):
        save_file(kohya(work, number), file)
    return of_kohya(merge(files, [0.7, 0.5], [], RANK, RANK, None, torch.float32)[0], work / "summed.safetensors")


def merge_ours(work, method="linear", rank=RANK):
    how = MergeSettings(method=method, weights=(0.7, 0.5), rank=rank, density=0.5)
    merge_files([work / "ours-1", work / "ours-2"], work / f"merged-{method}", how, overwrite=True)
    return lambda: adapter(work / f"merged-{method}")


def merge_peft(work, method="svd"):
    from peft import PeftModel

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(work / "base"), work / "ours-1", "one")
    model.load_adapter(work / "ours-2", "two")
    more = {"density": 0.5} if method == "ties_svd" else {}
    model.add_weighted_adapter(["one", "two"], [0.7, 0.5], "both", combination_type=method, svd_rank=RANK, **more)
    model.save_pretrained(work / f"peft-{method}", selected_adapters=["both"])
    return lambda: adapter(work / f"peft-{method}" / "both")


def ties(work):
    """TIES of both changes by peft's own functions on dense matrices: what a file of rank `RANK` is to be near."""
    from peft.utils.merge_utils import ties as of_peft

    one, two = (adapter(work / f"ours-{number}") for number in (1, 2))
    return {name: of_peft([one[name], two[name]], torch.tensor([0.7, 0.5]), 0.5) for name in one}


def main(*, work: Path, rounds: int = 5, sd_scripts: Path | None = None):
    logging.disable(logging.WARNING)
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "tuned-2").exists():
        models(work)
    extract_files(work / "base", work / "tuned-2", work / "ours-2", ExtractSettings(rank=RANK), overwrite=True)
    extract_ours(work)
    one, two = (adapter(work / f"ours-{number}") for number in (1, 2))
    both = {name: 0.7 * one[name] + 0.5 * two[name] for name in one}
    jobs: dict[str, tuple[Any, dict[str, Any]]] = {
        f"extract, rank {RANK}": (changes(work), {"netweight": extract_ours, "mergekit": extract_mergekit,
                                                  "LyCORIS": extract_lycoris}),
        f"resize, rank {RANK} to {SMALL}": (one, {"netweight": resize_ours,
                                                  "sd-scripts": lambda at: resize_sd_scripts(at, sd_scripts)}),
        f"weighted sum, rank {RANK}": (both, {"netweight": merge_ours, "peft, svd": merge_peft,
                                              "sd-scripts": lambda at: merge_sd_scripts(at, sd_scripts)}),
        f"TIES, rank {RANK}": (ties(work), {"netweight": lambda at: merge_ours(at, "ties"),
                                            "peft, ties_svd": lambda at: merge_peft(at, "ties_svd")}),
    }  # fmt: skip
    rows, missing = [], {}
    for job, (wanted, tools) in jobs.items():
        times: dict[str, list[float]] = {tool: [] for tool in tools}
        errors = {}
        for _ in range(rounds):
            for tool, function in tools.items():
                if tool in missing:
                    continue
                try:
                    began = time.process_time()
                    read = function(work)
                    times[tool].append(time.process_time() - began)
                    errors[tool] = error(read(), wanted)
                except ImportError as fault:
                    missing[tool] = str(fault)
        for tool in errors:
            rows.append({"job": job, "tool": tool, "error": errors[tool], "seconds": statistics.median(times[tool]),
                         "rounds": len(times[tool])})  # fmt: skip
            print(rows[-1], flush=True)
    return {"rows": rows, "missing": missing}
