"""Commands on small input, run one after another in one folder, whose `--json` the snapshots hold.

The models are files in `inputs/`, so that digests do not depend on how a library draws random weights. Everything else
is written here with numpy, torch and safetensors alone.
"""

import contextlib
import json
import os
import re
import shutil
import sys
from pathlib import Path

import numpy
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import save_file

from netweight.cli import netweight

HERE = Path(__file__).parent
RECIPES = HERE.parents[1] / "src" / "netweight" / "recipes"

ORDINARY = ["a red square", "the green circle", "a small photo", "the blue square", "a circle on a square"]
PROMPTS = ["a large blue circle", "the red photo of a square"]
NUMBERS = [f"{a}{b}" for a in "abcdefgh" for b in "ijklmn"]
PERSONS = 12
VICTIM = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Sigmoid(), nn.Linear(12, 4))
"""
COMPRESS_RECIPE = "subject: folder\ntreatments:\n  - compress: {level: max}\noutput: compress-run\n"


def normal(seed, *shape):
    """Normal numbers that are the same on every machine."""
    return torch.from_numpy(numpy.random.default_rng(seed).standard_normal(shape).astype("float32"))


def prepare(folder):
    """Write the input of all cases into an empty folder."""
    for name in ("llama", "pipeline"):
        shutil.copytree(HERE / "inputs" / name, folder / name)
    save_file({"a": (0.02 * normal(1, 64, 48)).bfloat16(), "b": 0.02 * normal(2, 100)}, folder / "one.safetensors")
    _model_folder(folder / "folder")
    _text(folder)
    _adapters(folder)
    _gradient(folder)
    published(folder / "published")
    (folder / "compress.yaml").write_text(COMPRESS_RECIPE)
    for recipe in RECIPES.glob("*.yaml"):
        text = (
            recipe.read_text().replace("base: my-pipeline", "base: pipeline").replace("base: my-model", "base: llama")
        )
        (folder / f"shipped-{recipe.name}").write_text(text.replace("components: 100", "components: 5"))
    (folder / "own_network.py").write_text((HERE.parent / "support" / "tiny_networks.py").read_text())


def _model_folder(folder):
    folder.mkdir()
    index = {}
    for part in (1, 2):
        name = f"model-0000{part}-of-00002.safetensors"
        tensors = {
            f"layers.{part}.weight": (0.02 * normal(10 + part, 64, 64)).bfloat16(),
            f"layers.{part}.bias": (0.02 * normal(20 + part, 64)).half(),
            f"layers.{part}.count": torch.arange(5) * part,
        }
        save_file(tensors, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text('{"model_type": "toy"}')


def _rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _text(folder):
    _rows(folder / "pairs.jsonl", [{"prompt": f"tell {n}", "chosen": "no", "rejected": f"bad {n}"} for n in NUMBERS])
    _rows(folder / "harmful.jsonl", [{"prompt": f"tell {n} me", "response": f"bad {n}"} for n in NUMBERS])
    for name in ("retain", "keep"):
        _rows(folder / f"{name}.jsonl", [{"prompt": f"hi {n}", "response": "good day"} for n in NUMBERS])
    _rows(folder / "task.jsonl", [{"prompt": f"sing {n}", "response": "la la la"} for n in NUMBERS])
    (folder / "ordinary.txt").write_text("\n".join(ORDINARY) + "\n")
    (folder / "prompts.csv").write_text("\n".join(["caption", *PROMPTS]) + "\n")
    from PIL import Image

    lines = ["prompt,image"]
    for number, prompt in enumerate(PROMPTS):
        pixels = numpy.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=numpy.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        lines.append(f"{prompt},{number}.png")
    (folder / "targets.csv").write_text("\n".join(lines) + "\n")


def _adapters(folder):
    """LoRAs of rank 1 for the pipeline's cross-attention, half of them moved in one direction; and their labels."""
    with safe_open(folder / "pipeline" / "unet" / "diffusion_pytorch_model.safetensors", "pt") as file:
        shapes = {
            name.removesuffix(".weight"): file.get_slice(name).get_shape()
            for name in file.keys()
            if re.search(r"attn2\.to_[qv]\.weight$", name)
        }
    (folder / "loras").mkdir()
    labels = ["name,beard,width"]
    for person in range(PERSONS):
        tensors = {}
        for place, (name, (rows, columns)) in enumerate(sorted(shapes.items())):
            up = 0.2 * normal(1000 * person + place, rows, 1) + 0.3 * (person % 2) * normal(100 + place, rows, 1)
            tensors[f"unet.{name}.lora_A.weight"] = normal(200 + place, 1, columns)
            tensors[f"unet.{name}.lora_B.weight"] = up
        save_file(tensors, folder / "loras" / f"person-{person:02d}.safetensors")
        labels.append(f"person-{person:02d},{person % 2},{person / 10}")
    (folder / "labels.csv").write_text("\n".join(labels) + "\n")


def _gradient(folder):
    """A user's model, and the gradient of one image that a client sent."""
    (folder / "victim_model.py").write_text(VICTIM)
    sizes = {"1.weight": (12, 64), "1.bias": (12,), "3.weight": (4, 12), "3.bias": (4,)}
    params = {name: (0.3 * normal(i, *shape)).requires_grad_() for i, (name, shape) in enumerate(sizes.items())}
    image = torch.from_numpy(numpy.random.default_rng(7).integers(0, 256, (1, 1, 8, 8)) / 255).float()
    hidden = torch.sigmoid(image.flatten(1) @ params["1.weight"].T + params["1.bias"])
    loss = torch.nn.functional.cross_entropy(hidden @ params["3.weight"].T + params["3.bias"], torch.tensor([3]))
    gradients = torch.autograd.grad(loss, list(params.values()))
    save_file({name: value.detach() for name, value in params.items()}, folder / "params.safetensors")
    save_file(dict(zip(params, gradients, strict=True)), folder / "gradient.safetensors")
    save_file({"images": image}, folder / "truth.safetensors")


def published(folder):
    """A matrix of flattened adapters with its companions, as weights2weights published its own."""
    modules = {
        "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q": (4, 4),
        "mid_block.attentions.0.transformer_blocks.0.attn1.to_v": (5, 3),
    }
    entries = {}
    for module, (rows, columns) in modules.items():
        for side, shape in (("A", (1, columns)), ("B", (rows, 1))):
            size = torch.Size([shape[0] * shape[1]])
            entries[f"base_model.model.{module}.lora_{side}.weight"] = (size, torch.Size(shape))
    folder.mkdir()
    torch.save(normal(9, 6, sum(size[0] for size, _ in entries.values())), folder / "all_weights.pt")
    torch.save(entries, folder / "weight_dimensions.pt")
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 27, "base_model_name_or_path": "realistic-vision-v51"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


LOOK = "--seeds 3 --steps 5"
SEARCH = "--steps 1 --draws 1 --restarts 1 --images 1 --guidance 3 --generation-steps 2"
SPACE = "space --bank bank"
CLIENTS = "--clients 3 --rounds 1 --epochs 1 --workers 1 --model own_network:halves"
INVERSION = (
    "attack gradient-inversion --model victim_model:make --params params.safetensors --update gradient.safetensors "
    "--shape 1,1,8,8 --reference truth.safetensors"
)
FORGET = "--prompts prompts.csv --column caption --statistics usual.safetensors"
ATTACKED = "--harmful harmful.jsonl --benign keep.jsonl --seeds 1 --max-steps 6 --check-every 2 --lr 1e-3 --workers 1"
ATTACKED += " --grid quick"

CASES = {
    "compress a file": "compress one.safetensors one.net.safetensors",
    "compress a file, rounded": "compress one.safetensors rounded.net.safetensors --mantissa-bits 2 --block-size 64",
    "compress a folder": "compress folder folder-net --level max --threads 1",
    "compress a folder, rounded": "compress folder folder-rounded --mantissa-bits 3 --fidelity reference",
    "compress a folder, a part": "compress folder folder-part --exclude *.index.json --exclude *-00002-* --level fast",
    "compress a pipeline": "compress pipeline pipeline-net --card",
    "refuse to compress nothing": "compress nowhere x",
    "refuse to write twice": "compress folder folder-net",
    "inspect a file": "inspect one.safetensors",
    "inspect a tensor": "inspect one.net.safetensors --tensor a",
    "inspect a folder": "inspect folder-net",
    "verify a file": "verify one.net.safetensors --against one.safetensors",
    "verify a folder": "verify folder-net --against folder",
    "verify a folder, rounded": "verify folder-rounded --against folder",
    "decompress a file": "decompress one.net.safetensors one.back.safetensors",
    "decompress a folder": "decompress folder-net folder-back",
    "doctor": "doctor",
    "forget statistics": "forget statistics pipeline --prompts ordinary.txt --out usual.safetensors",
    "forget detect": "forget detect pipeline --prompts prompts.csv --column caption --threshold 0.5 "
    f"{LOOK} --out found",
    "forget detect, calibrated": "forget detect pipeline --prompts ordinary.txt --ordinary ordinary.txt "
    f"{LOOK} --out calibrated",
    "forget localize": f"forget localize pipeline {FORGET} --threshold -0.5 --seeds 2 --steps 5 --out localized",
    "forget localize, reference": f"forget localize pipeline {FORGET} --threshold -0.5 --seeds 2 --steps 5 "
    "--out localized-reference --fidelity reference --timing code",
    "forget apply": "forget apply pipeline edited --neurons localized/neurons.json",
    "forget undo": "forget undo edited restored",
    "forget audit": "forget audit edited --base pipeline --targets targets.csv --ordinary ordinary.txt --per-prompt 2 "
    f"--look-seeds 2 {SEARCH} --out forget-audit",
    "forget apply, closed form": "forget apply pipeline led --targets targets.csv --ordinary ordinary.txt",
    "forget apply, distil": "forget apply pipeline distilled --method distil --targets targets.csv --ordinary "
    "ordinary.txt --distil-steps 2 --batch 4 --set distil.images=1 --set distil.generation_steps=2",
    "attack embedding": f"attack embedding edited --base pipeline --targets targets.csv {SEARCH} --threshold 0.99 "
    "--out embedding",
    "space ingest": "space ingest loras bank",
    "space ingest, compressed": "space ingest loras bank-net --compress",
    "space ingest, published": "space ingest published published-bank",
    "space info of a bank": "space info bank-net --verify",
    "space fit": "space fit bank space --components 6",
    "space fit, standalone": "space fit bank space-alone --components 3 --solver streaming --sketch 6 --standalone",
    "space fit, factors": "space fit bank space-factors --components 3 --representation factors "
    "--standardize --no-halves",
    "space info": "space info space",
    "space direction": f"{SPACE} direction --labels labels.csv --column beard --resamples 20 --out beard.json",
    "space direction, difference": f"{SPACE} direction --labels labels.csv --column beard --kind difference "
    "--resamples 20 --confounder width --out difference.json",
    "space edit": f"{SPACE} edit person-04 --move beard.json 2.5 --out edited.json",
    "space neighbors": f"{SPACE} neighbors person-03 --count 2",
    "space export": f"{SPACE} export edited.json exported-diffusers",
    "space export, kohya": f"{SPACE} export person-01 exported-kohya --layout kohya --rank 1",
    "space merge": "space merge loras/person-00.safetensors loras/person-01.safetensors exported-peft --weight 0.5 "
    "--weight -2 --layout peft",
    "space sample": f"{SPACE} sample --count 4 --sampler gaussian --out gaussian.json",
    "space sample, kernel": f"{SPACE} sample --count 4 --sampler kernel --bandwidth 0.5 --out kernel.json",
    "space predict": "space predict bank --labels labels.csv --column beard --folds 2",
    "space sample, conditional": f"{SPACE} sample --count 4 --sampler conditional --labels labels.csv --given beard=1 "
    "--out conditional.json",
    "space invert": f"{SPACE} invert 0.png --pipeline pipeline --prompt photo --steps 2 --out inverted.json",
    "space view": f"{SPACE} view --labels labels.csv --attribute beard --pipeline pipeline --prompt photo --noises 1 "
    "--components 1 --samples 1 --steps 2 --out page.html",
    "immunize": "immunize llama defended --pairs pairs.jsonl --retain retain.jsonl --lr 3e-3 --epochs 1 --card",
    "immunize, reference": "immunize llama defended-reference --pairs pairs.jsonl --retain retain.jsonl --lr 3e-3 "
    "--epochs 1 --defense repnoise-reference --freeze head --batch-size 24",
    "attack finetune": f"attack finetune llama {ATTACKED} --threshold 0.3 --out finetune",
    "attack finetune, base": f"attack finetune defended --base llama --task task.jsonl {ATTACKED} --threshold 0.3 "
    "--out finetune-base",
    "attack gradient-inversion": f"{INVERSION} --attack first-layer --layer 1 --out inversion",
    "attack gradient-inversion, ig": f"{INVERSION} --steps 5 --restarts 1 --out inversion-ig",
    "attack gradient-inversion, dlg": f"{INVERSION} --attack dlg --steps 3 --labels 3 --out inversion-dlg",
    "attack gradient-inversion, rog": f"{INVERSION} --attack rog --steps 3 --labels 3 --out inversion-rog",
    "federate run": f"federate run --method fedavg {CLIENTS} --no-audit --out federation",
    "federate run, hyperfl": f"federate run {CLIENTS} --images 1 --out federation-hyperfl",
    "federate audit": "federate audit federation --images 1 --threat 1x1",
    "run": "run compress.yaml",
    "run, remembered": "run compress.yaml --plan",
    "report": "report compress-run",
    "report on a card": "report finetune-base --card defended",
    "reproduce --list": "reproduce --list",
    "reproduce": "reproduce neuzip-fig5 --out tables",
    "benchmark codec": "benchmark codec one.safetensors --quick --repeats 1 --out benchmark.json",
}
# A shipped recipe → what it is planned for: all settings with their defaults.
PLANNED = {
    "attack-embedding": "pipeline", "attack-finetune": "defended", "federate": "digits", "forget": "pipeline",
    "immunize": "llama", "quickstart": "folder", "release-forgotten": "pipeline", "release-immunized": "llama",
    "space": "bank",
}  # fmt: skip
CASES |= {
    f"plan of {recipe}": f"run shipped-{recipe}.yaml --plan --output planned --subject {subject}"
    for recipe, subject in PLANNED.items()
}


# What a case writes that depends on the machine, or on the looks of a page: kept as its type.
LOOSE = {"benchmark codec": "rows", "space view": "nbytes", "doctor": "data"}


def arguments(case):
    """A case's command as a list; options before a subcommand's name go where click wants them."""
    words = CASES[case].split()
    if words[:2] == ["space", "--bank"]:
        words = ["space", words[3], "space", *words[1:3], *words[4:]]
    return [*words, "--json"]


@contextlib.contextmanager
def inside(folder):
    """Work in a folder from which modules can be imported."""
    before = Path.cwd()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    forget_modules(folder)
    try:
        yield
    finally:
        forget_modules(folder)
        sys.path.remove(str(folder))
        os.chdir(before)


def forget_modules(folder):
    """Unload modules that stand in the folder, and those of the same names from another test's folder."""
    for module in folder.glob("*.py"):
        sys.modules.pop(module.stem, None)


def call(folder, words):
    """Run a command in a folder: its exit code and the JSON that it wrote, with the folder's path cut out."""
    with inside(folder):
        done = CliRunner().invoke(netweight, words)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    written = done.stdout.replace(str(folder), "@")
    return {"exit": done.exit_code, "json": json.loads(written) if written.strip() else None}
