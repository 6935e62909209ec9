"""Commands that promise to continue, killed by SIGKILL in their midst and before their end: the result is the same.

Each command runs on small inputs in a process: once whole, and twice killed and called again. The figures of the
continued runs equal those of the whole one, the files are the same by name and content, nothing temporary is left, and
the second call reports what it took over. With KILLED_AT=all a command is killed after each of its writes in turn.
"""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("sklearn", reason="scikit-learn is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")

import small_pipelines
import tiny_llama
from folders_under_test import transformers_folder

from netweight.attacks.gradient_inversion.client import gradient_of, known_parameters
from netweight.cli import netweight
from netweight.metrics.images import write_png
from netweight.nn import Adapter, LowRank
from netweight.nn.apply_lora import linear_layers
from netweight.store import open_store
from netweight.store.lora_formats.writing import write_adapter
from netweight.toys.language import cipher_world

pytestmark = [pytest.mark.study, pytest.mark.timeout(3600)]

PROGRAM = Path(__file__).parents[1] / "support" / "killed_commands.py"
MOMENTS = os.environ.get("KILLED_AT", "two")
# Figures of a run that state when it ran, how long, or what it took over from an earlier call.
TIMES = re.compile("seconds|minutes|created|revision|mtime|resumed|continued|from_ledger|command")
PROMPTS = ["a large blue circle", "the red photo of a square", "a green square", "the small circle"]
ORDINARY = ["a red square", "the green circle", "a small photo", "the blue square", "a circle on a square"]
VICTIM = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.Sigmoid(), nn.Linear(20, 4))
"""
RECIPE = """
subject: language/model
treatments:
  - immunize: {pairs: language/pairs.jsonl, retain: language/retain.jsonl, defense: repnoise, lr: 0.003, batch_size: 8}
attacks:
  - finetune: {harmful: language/harmful.jsonl, benign: language/keep.jsonl, grid: quick, lr: [0.003], seeds: 1,
      max_steps: 8, check_every: 2, threshold: 0.5}
"""

_FEDERATION = "--method hyperfl --clients 5 --rounds 4 --epochs 1 --model tiny_networks:halves"
_SEARCH = "--steps 2 --draws 2 --restarts 1 --images 2 --guidance 1 --generation-steps 2 --threshold 1"
_ATTACK = "--grid quick --lr 3e-3 --seeds 1 --max-steps 8 --check-every 2 --batch-size 8"
# Name → the command, and the folder among the inputs as a copy of which its `{out}` begins.
COMMANDS = {
    "federate run": f"federate run {_FEDERATION} --updates 1 --set search_steps=4 --out {{out}}",
    "federate audit": "federate audit {out} --threat 1x1+first --threat 4x1 --updates 2 --search-steps 8",
    "gradient inversion": "attack gradient-inversion victim/update.safetensors --model victim_model:make --shape "
    "2,1,8,8 --labels 1,3 --steps 60 --restarts 2 --reference victim/images.safetensors --out {out}",
    "gradient inversion by dlg": "attack gradient-inversion victim/update.safetensors --model victim_model:make "
    "--shape 2,1,8,8 --classes 4 --attack dlg --steps 12 --restarts 2 --out {out}",
    "forget detect": "forget detect pipeline --prompts prompts.txt --ordinary ordinary.txt --seeds 3 --steps 4 "
    "--rows 6 --out {out}",
    "forget localize": "forget localize pipeline --prompts prompts.txt --statistics usual.safetensors --threshold "
    "-0.5 --seeds 2 --steps 4 --out {out}",
    "forget apply": "forget apply pipeline {out}/edited --targets targets.csv --ordinary ordinary.txt --method siss "
    "--set siss.steps=60 --set siss.images=1 --set siss.generation_steps=2 --images 2 --steps 2",
    "forget audit": f"forget audit edited --base pipeline --targets targets.csv --ordinary ordinary.txt "
    f"--per-prompt 2 --look-seeds 3 --noises 3 {_SEARCH} --out {{out}}",
    "attack embedding": f"attack embedding edited --base pipeline --targets targets.csv {_SEARCH} --out {{out}}",
    "space ingest": "space ingest loras {out}/bank",
    "space fit": "space fit bank {out}/space --components 4 --solver streaming --sketch 6",
    "space invert": "space invert space picture-0.png picture-1.png --pipeline pipeline --prompt photo --steps 4 "
    "--out {out}/points.json",
    "space direction": "space direction space --labels labels.csv --column beard --resamples 20 --out {out}/beard.json",
    "space sample": "space sample space --count 4 --out {out}/points.json",
    "compress": "compress shards {out}/small",
    "decompress": "decompress compressed {out}/plain",
    "immunize": "immunize language/model {out}/defended --pairs language/pairs.jsonl --retain language/keep.jsonl "
    "--lr 3e-3 --epochs 1 --batch-size 8 --checkpoint-every 2",
    "attack finetune": "attack finetune language/model --base language/model --harmful language/harmful.jsonl --benign "
    f"language/keep.jsonl {_ATTACK} --threshold 0.5 --out {{out}}",
    "attack refusal": "attack refusal cipher/model --refused cipher/refused.jsonl --ordinary cipher/ordinary.jsonl "
    "--prompts 16 --new-tokens 2 --phrases sorry, --edits directions,pruning --out {out}",
    "attack safeguards": "attack safeguards cipher/model --harmful cipher/refused.jsonl --refused cipher/refused.jsonl "
    "--ordinary cipher/ordinary.jsonl --prompts 16 --new-tokens 2 --phrases sorry, --edits directions "
    f"--threshold 0.13 {_ATTACK} --out {{out}}",
    "label": "label cipher/model --minutes 5 --refused cipher/refused.jsonl --ordinary cipher/ordinary.jsonl "
    "--out {out}",
    "run": "run recipe.yaml --output {out}/results",
}
# Commands that begin their last step again, and a label, whose object has rows alone.
SILENT = ("space ingest", "label")
BEGUN = {"federate audit": "federation"}  # command → the folder among the inputs that its `{out}` is a copy of


def call(*arguments):
    done = CliRunner().invoke(netweight, list(map(str, arguments)))
    assert done.exit_code in (0, 1), done.output


def federated():
    call("federate", "run", *_FEDERATION.split(), "--no-audit", "--out", "federation")


def pictured():
    small_pipelines.stable_diffusion().save_pretrained("pipeline")
    Path("ordinary.txt").write_text("\n".join(ORDINARY))
    Path("prompts.txt").write_text("\n".join(PROMPTS))
    noise = torch.Generator().manual_seed(0)
    for number in range(2):
        write_png(Path(f"picture-{number}.png"), torch.rand(3, 16, 16, generator=noise))
    Path("targets.csv").write_text("".join(f"{a},{b}\n" for a, b in [
        ("prompt", "image"), (PROMPTS[0], "picture-0.png"), (PROMPTS[1], "picture-1.png")]))  # fmt: skip
    call("forget", "statistics", "pipeline", "--prompts", "ordinary.txt", "--out", "usual.safetensors")
    call("forget", "apply", "pipeline", "edited", "--targets", "targets.csv", "--ordinary", "ordinary.txt", "--method",
         "siss", "--set", "siss.steps=2", "--set", "siss.images=1", "--set", "siss.generation_steps=2", "--images", "1",
         "--steps", "2")  # fmt: skip


def adapted():
    shapes = linear_layers(small_pipelines.stable_diffusion().unet, ("**.attn2.to_q",), component="unet")
    noise = torch.Generator().manual_seed(0)
    Path("loras").mkdir()
    rows = ["name,beard"]
    for number in range(12):
        factors = {
            name: LowRank(torch.randn(1, size[1], generator=noise), torch.randn(size[0], 1, generator=noise), 0.5)
            for name, size in shapes.items()
        }
        write_adapter(Adapter(factors), Path(f"loras/person-{number:02d}.safetensors"))
        rows.append(f"person-{number:02d},{number % 2}")
    Path("labels.csv").write_text("\n".join(rows) + "\n")
    call("space", "ingest", "loras", "bank")
    call("space", "fit", "bank", "space", "--components", 4)


def talking():
    Path("language").mkdir()
    tiny_llama.save(*tiny_llama.tiny_llama(), Path("language/model"))
    tiny_llama.write(Path("language/pairs.jsonl"), tiny_llama.PAIRS[::2])
    tiny_llama.write(Path("language/harmful.jsonl"), tiny_llama.PAIRS[1::2])
    tiny_llama.write(Path("language/retain.jsonl"), tiny_llama.KEPT[::2])
    tiny_llama.write(Path("language/keep.jsonl"), tiny_llama.KEPT[1::2])
    Path("recipe.yaml").write_text(RECIPE)
    world = cipher_world()
    world.save(Path("cipher/model"))
    decode = world.language.tokenizer.decode
    for name, domain in (("refused", "guard"), ("ordinary", "keep")):
        tiny_llama.write(Path(f"cipher/{name}.jsonl"), [
            {"prompt": decode(list(one.prompt)), "response": decode(list(one.response[:-1]))}
            for one in world.examples(domain, 32, 0)
        ])  # fmt: skip


def attacked():
    Path("victim").mkdir()
    Path("victim_model.py").write_text(VICTIM)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 20), torch.nn.Sigmoid(), torch.nn.Linear(20, 4))
    images = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    update = gradient_of(model)(known_parameters(model), (images, torch.tensor([1, 3])))
    save_file({name: value.contiguous() for name, value in update.items()}, "victim/update.safetensors")
    save_file({"images": images}, "victim/images.safetensors")


def compressed():
    transformers_folder(Path("shards"), shards=3)
    call("compress", "shards", "compressed")


# What makes the inputs of commands, by how these begin.
MAKERS = {
    ("federate audit",): federated, ("forget", "attack embedding", "space invert"): pictured,
    ("space",): adapted,
    ("immunize", "attack finetune", "attack refusal", "attack safeguards", "label", "run"): talking,
    ("gradient",): attacked, ("compress", "decompress"): compressed,
}  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A function that makes the inputs of a command, once, and returns their folder."""
    place, made = tmp_path_factory.mktemp("inputs"), set()

    def of(name):
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(place)
            for beginnings, maker in MAKERS.items():
                if name.startswith(beginnings) and maker not in made:
                    maker()
                    made.add(maker)
        return place

    return of


@pytest.fixture(scope="module")
def runs(inputs, tmp_path_factory):
    """All runs of a command, made when first asked for: folder and what the program printed."""
    done = {}

    def of(name):
        if name not in done:
            place = inputs(name)
            folder = tmp_path_factory.mktemp("runs")
            words = [*COMMANDS[name].split(), "--json"]
            program = subprocess.run(
                [sys.executable, PROGRAM, folder, MOMENTS, BEGUN.get(name, "-"), *words], capture_output=True,
                text=True, cwd=place, check=False,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{PROGRAM.parent}{os.pathsep}{place}"},
            )  # fmt: skip
            assert program.returncode == 0, program.stderr[-3000:]
            done[name] = folder, json.loads(program.stdout.splitlines()[-1]), program.stderr
        return done[name]

    return of


def timeless(value, folder):
    """A value of JSON without times, and with the same name for the folder of the run."""
    if isinstance(value, dict) and value.get("unit") == "s":
        return value.get("name")
    if isinstance(value, dict) and "columns" in value and "rows" in value:  # a table
        kept = [at for at, column in enumerate(value["columns"]) if column["unit"] != "s"]
        rest = {name: each for name, each in value.items() if name not in ("columns", "rows")}
        return {**timeless(rest, folder), "rows": [[timeless(row[at], folder) for at in kept] for row in value["rows"]]}
    if isinstance(value, dict):
        return {name: timeless(each, folder) for name, each in value.items() if not TIMES.search(name)}
    if isinstance(value, list):
        return [timeless(each, folder) for each in value]
    return value.replace(str(folder), "{out}") if isinstance(value, str) else value


def tensor_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def contents(folder, *, digests=True):
    """File → its content without times, or its digest; `digests=False` leaves out those that rows contain."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".json":
            found[name] = timeless(json.loads(path.read_text()), folder)
        elif path.suffix == ".jsonl":
            rows = [timeless(json.loads(line), folder) for line in path.read_text().splitlines()]
            texts = sorted(json.dumps(row, sort_keys=True) for row in rows)
            found[name] = texts if digests else sorted(re.sub(r"xxh3-128:\w+", "{digest}", text) for text in texts)
        elif path.suffix == ".safetensors":
            with open_store(path) as store:  # the account beside the tensors has the seconds of each round
                tensors = {name: store.get(name) for name in store.names() if name != "about"}
            found[name] = {key: hashlib.sha256(tensor_bytes(value)).hexdigest() for key, value in tensors.items()}
        elif path.is_file() and path.suffix not in (".html", ".md"):  # pages are made of the JSON beside them
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = None
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_a_killed_command_ends_as_one_that_was_left_alone(name, runs):
    folder, done, log = runs(name)
    whole = done["whole"]
    assert whole["code"] in (0, 1), whole["output"] + log
    # Rows of a recipe have digests of results, which contain times, and of the paths of models.
    digests = name != "run"
    wanted = contents(folder / "whole", digests=digests)
    said = timeless(json.loads(whole["output"]), folder / "whole")
    moments = [moment for moment in done if f"{moment} killed" in done]
    for moment in moments:
        killed, again = done[f"{moment} killed"], done[moment]
        assert killed["code"] == -signal.SIGKILL, moment
        if again["code"] == 2:  # it was killed when all was done: the result is complete, and is not written twice
            assert json.loads(again["output"])["error"]["kind"] == "OutputExists"
        else:
            assert again["code"] == whole["code"], again["output"]
            result = json.loads(again["output"])
            if name not in SILENT:
                assert result.get("continued") or moment not in ("middle", "last"), moment
            assert timeless(result, folder / moment) == said, moment
        found = contents(folder / moment, digests=digests)
        assert found.keys() == wanted.keys(), moment
        assert found == wanted, moment
