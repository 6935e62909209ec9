"""Every command of forgetting, and inversion, at the size of Stable Diffusion 1.4: minutes and memory on processors.

    python -m netweight_experiments.benchmarks forget.real_size

The pipeline has the shape of Stable Diffusion 1.4 (a U-Net of 860 million weights in bf16, latents of 64 × 64, CLIP's
large text encoder, the autoencoder) and random weights, so that what is measured is time and memory and nothing else:
which pictures come back says nothing. Each command is a process of its own, given as little as it takes (one memorized
pair, four ordinary prompts, two seeds, two or three scheduler steps, three stages of neurons), and begins with its
`--plan`, whose seconds stand beside those that it took. Work lies in `--work`; commands that ended are not run again,
and one that was killed continues. `--kill` ends a command once after so many seconds and starts it again, which shows
that it goes on.

The wall time of a command is that of a machine on which other work may run; processor seconds are its own.
"""

import json
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Annotated

import torch
from PIL import Image

from netweight_experiments.benchmarks.script import now

ORDINARY = ("a red square", "a blue ring on green", "two yellow boats", "an old map of the city")
MEMORIZED = "harbor lights before the october storm"
WORDS = sorted({word for text in (*ORDINARY, MEMORIZED, "photo sks person") for word in text.split()})
LIMIT = 12e9  # bytes


def tokenizer():
    """CLIP's tokenizer with a vocabulary of its size, of which a few words are whole tokens."""
    import transformers

    letters = [chr(code) + end for code in range(97, 123) for end in ("", "</w>")]
    vocab = {piece: place for place, piece in enumerate(letters)}
    merges = []
    for word in WORDS:
        left = word[0]
        for place, letter in enumerate(word[1:], start=1):
            right = letter + ("</w>" if place == len(word) - 1 else "")
            if (left, right) not in merges:
                merges.append((left, right))
                vocab.setdefault(left + right, len(vocab))
            left += right
    for place in range(len(vocab), 49406):
        vocab[f"unused{place}"] = place
    vocab |= {"<|startoftext|>": 49406, "<|endoftext|>": 49407}
    return transformers.CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=77)


def make_pipeline(folder):
    """Write a pipeline of the shape of Stable Diffusion 1.4, in bf16."""
    import diffusers
    import transformers

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    words = tokenizer()
    unet = diffusers.UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8)
    vae = diffusers.AutoencoderKL(
        block_out_channels=(128, 256, 512, 512), down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4, layers_per_block=2, latent_channels=4, sample_size=512,
    )  # fmt: skip
    encoder = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, vocab_size=49408,
            bos_token_id=words.bos_token_id, eos_token_id=words.eos_token_id,
        )
    )  # fmt: skip
    torch.set_default_dtype(torch.float32)
    pipeline = diffusers.StableDiffusionPipeline(
        unet=unet.bfloat16(), vae=vae.bfloat16(), text_encoder=encoder.bfloat16(), tokenizer=words, safety_checker=None,
        feature_extractor=None, requires_safety_checker=False,
        scheduler=diffusers.DDIMScheduler(
            beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, steps_offset=1,
            set_alpha_to_one=False,
        ),
    )  # fmt: skip
    pipeline.save_pretrained(folder)


def make_inputs(work):
    """Write what the commands are given."""
    torch.manual_seed(0)
    (work / "ordinary.txt").write_text("\n".join(ORDINARY))
    (work / "memorized.txt").write_text(MEMORIZED)
    (work / "anchors.txt").write_text(ORDINARY[0])
    (work / "targets.csv").write_text(f"prompt,image\n{MEMORIZED},picture.png\n")
    pixels = (torch.rand(64, 64, 3) * 255).to(torch.uint8).numpy()
    Image.fromarray(pixels).resize((512, 512), Image.Resampling.BICUBIC).save(work / "picture.png")


def make_space(work, netweight):
    """Write a space of four small adapters of the U-Net."""
    import peft
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel

    unet = UNet2DConditionModel.from_pretrained(work / "pipeline" / "unet", torch_dtype=torch.bfloat16)
    unet.add_adapter(peft.LoraConfig(r=1, target_modules=["attn2.to_v", "attn2.to_k"], init_lora_weights=False))
    for seed in range(4):
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, weight in unet.named_parameters():
                if "lora_" in name:
                    weight.normal_(std=0.02)
        folder = work / "adapters" / f"person-{seed}"
        layers = peft.get_peft_model_state_dict(unet)
        StableDiffusionPipeline.save_lora_weights(folder, unet_lora_layers=layers)
    for words in (["space", "ingest", "adapters", "bank"], ["space", "fit", "bank", "space"]):
        subprocess.run([netweight, *words], cwd=work, check=True)


def commands():
    """The command lines, by name."""
    given = "--targets targets.csv --ordinary ordinary.txt"
    small = "--steps 2 --images 1"
    training = {
        "layers": "**.attn2", "steps": 2, "batch": 4, "at_once": 1, "images": 1, "generation_steps": 2, "turned": 1,
        "compared": 1, "lr": 1e-5,
    }  # fmt: skip
    search = {"steps": 1, "draws": 1, "images": 1, "generation_steps": 2, "starts": "[original]", "looks": "[1]"}
    lines = {
        "forget statistics": "forget statistics pipeline --prompts ordinary.txt --out statistics.safetensors",
        "forget detect": "forget detect pipeline --prompts memorized.txt --ordinary ordinary.txt --out detection "
        "--seeds 2 --steps 2",
        "forget localize": "forget localize pipeline --prompts memorized.txt --statistics statistics.safetensors "
        "--out neurons --threshold 0.1 --seeds 2 --steps 2 --set localization.theta=1000 "
        "--set localization.theta_least=998 --set localization.theta_step=1",
        "forget apply --method closed-form": f"forget apply pipeline closed-form {given} {small} --anchors anchors.txt "
        "--set closed_form.images=1 --set closed_form.generation_steps=2 --set closed_form.rounds=1",
        "forget undo": "forget undo closed-form restored",
        "forget apply --method neurons": "forget apply pipeline neurons-off --neurons neurons/neurons.json --no-check",
        "space invert": "space invert space picture.png --pipeline pipeline --out points.json --prompt sks --steps 2",
        "forget apply --method siss": f"forget apply pipeline siss --method siss {given} {small} --anchors anchors.txt "
        + " ".join(f"--set siss.{key}={value}" for key, value in training.items()),
        "forget audit": f"forget audit closed-form --base pipeline {given} --out audit --per-prompt 1 --look-seeds 2 "
        "--noises 2 " + " ".join(f"--set search.search.{key}={value}" for key, value in search.items()),
    }
    return {name: line.split() for name, line in lines.items()}


def ended(netweight, words, work, kill):
    """Run a command to its end: time, peak memory, and what it printed. `kill`: end it once after so many seconds."""
    log = work / "logs" / ("-".join(words[:2]) + ".txt")
    log.parent.mkdir(exist_ok=True)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    killed = None
    peak = [0]
    for attempt in (0, 1):
        with log.open("ab") as out:
            process = subprocess.Popen([netweight, *words], cwd=work, stdout=out, stderr=subprocess.STDOUT)
            watcher = threading.Thread(target=watched, args=(process, peak))
            watcher.start()
            try:
                process.wait(kill if attempt == 0 else None)
            except subprocess.TimeoutExpired:
                killed = round(time.perf_counter() - began, 1)
                process.kill()
                process.wait()
            watcher.join()
        if killed is None or attempt:
            break
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "exit": process.returncode,
        "minutes": round((time.perf_counter() - began) / 60, 2),
        "processor_minutes": round(
            (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 60, 2
        ),
        "peak_bytes": peak[0],
        "killed_after_s": killed,
        "shown": log.read_text(errors="replace").replace("\r", "\n").strip().splitlines()[-6:],
    }  # fmt: skip


def watched(process, peak):
    """Note the most memory that a process held."""
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        try:
            lines = status.read_text().splitlines()
        except OSError:
            return
        peak[0] = max(peak[0], *(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)
        time.sleep(0.2)


def planned(netweight, words, work):
    """What `--plan` says, as JSON."""
    done = subprocess.run([netweight, *words, "--plan", "--json"], cwd=work, capture_output=True, text=True)
    try:
        return json.loads(done.stdout)["plan"]
    except (ValueError, KeyError):
        return {"error": (done.stdout + done.stderr)[-2000:]}


def page(result):
    """Return the table of docs/forget-pipelines.md, and sentences about commands that were run otherwise."""
    lines = [
        "| command | minutes | processor minutes | memory, GB | planned minutes | planned memory, GB |",
        "|---" * 6 + "|",
    ]
    notes = []
    for name, each in result["commands"].items():
        plan = each["plan"]
        time = f"{plan['seconds'] / 60:.1f}" if "seconds" in plan else "–"
        memory = f"{plan['memory'] / 1e9:.1f}" if plan.get("memory") else "–"
        measured = f"{each['minutes']:.1f}|{each['processor_minutes']:.1f}|{each['peak_bytes'] / 1e9:.1f}"
        lines.append(f"|`{name}`|{measured}|{time}|{memory}|")
        if each["killed_after_s"]:
            seconds = f"{each['killed_after_s']:.0f} seconds"
            notes.append(
                f"`{name}` was killed after {seconds} and continued by a second call. The figures are of both."
            )
        if each.get("calls") == 2:
            notes.append(
                f"`{name}` took two calls, since the first could not write its report. The figures are of both."
            )
    return "\n".join([*lines, *(f"\n{note}" for note in notes)])


def main(
    *,
    work: Path = Path("forget-real-size"),
    only: Annotated[tuple[str, ...], "commands to run, of " + ", ".join(commands())] = (),
    kill: Annotated[float, "seconds after which the training is killed and started again; 0 never"] = 0.0,
    output: Path,
):
    work.mkdir(parents=True, exist_ok=True)
    netweight = str(Path(sys.executable).parent / "netweight")
    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    if not (work / "pipeline" / "model_index.json").exists():
        make_pipeline(work / "pipeline")
    if not (work / "targets.csv").exists():
        make_inputs(work)
    found = json.loads(output.read_text())["commands"] if output.exists() else {}
    for name, words in commands().items():
        if name in found or (only and name not in only):
            continue
        if name == "space invert" and not (work / "space").exists():
            make_space(work, netweight)
        plan = planned(netweight, words, work)
        found[name] = {
            "date": now(), "line": " ".join(["netweight", *words]), "plan": plan,
            **ended(netweight, words, work, (kill or None) if "siss" in name else None),
        }  # fmt: skip
        found[name]["within_limit"] = found[name]["peak_bytes"] <= LIMIT
        print(name, {key: value for key, value in found[name].items() if key != "plan"}, flush=True)
        yield {"commands": found}
