"""Commands that promise to continue, killed by SIGKILL in their midst and before their end: the result is the same.

Each command runs on small inputs in a process: once whole, and twice killed and called again. The figures of the
continued runs equal those of the whole one, the files are the same by name and content, and nothing temporary is left.
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

pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("sklearn", reason="scikit-learn is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")

import small_pipelines

from netweight.store import open_store

pytestmark = [pytest.mark.study, pytest.mark.timeout(3600)]

PROGRAM = Path(__file__).parents[1] / "support" / "killed_commands.py"
# Figures of a run that state when it ran, or how long.
TIMES = re.compile("seconds|minutes|created|revision")
PROMPTS = ["a large blue circle", "the red photo of a square", "a green square", "the small circle"]
ORDINARY = ["a red square", "the green circle", "a small photo", "the blue square", "a circle on a square"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A pipeline and prompts."""
    place = tmp_path_factory.mktemp("inputs")
    small_pipelines.stable_diffusion().save_pretrained(place / "pipeline")
    (place / "ordinary.txt").write_text("\n".join(ORDINARY))
    (place / "prompts.txt").write_text("\n".join(PROMPTS))
    return place


COMMANDS = {
    "federate run": "federate run --clients 5 --rounds 4 --epochs 1 --images 1 --set search_steps=4 "
    "--model tiny_networks:halves --out {out}",
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(inputs, tmp_path_factory):
    """All runs of a command, made when first asked for: folder and what the program printed."""
    done = {}

    def of(name):
        if name not in done:
            folder = tmp_path_factory.mktemp("runs")
            words = [*COMMANDS[name].split(), "--json"]
            program = subprocess.run(
                [sys.executable, PROGRAM, folder, *words], capture_output=True, text=True, cwd=inputs,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROGRAM.parent)},
            )  # fmt: skip
            assert program.returncode == 0, program.stderr[-3000:]
            done[name] = folder, json.loads(program.stdout.splitlines()[-1])
        return done[name]

    return of


def timeless(value, folder):
    """A value of JSON without times, and with the same name for the folder of the run."""
    if isinstance(value, dict):
        return {name: timeless(each, folder) for name, each in value.items() if not TIMES.search(name)}
    if isinstance(value, list):
        return [timeless(each, folder) for each in value]
    return value.replace(str(folder), "{out}") if isinstance(value, str) else value


def tensor_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def contents(folder):
    """File → its content without times, or its digest."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".json":
            found[name] = timeless(json.loads(path.read_text()), folder)
        elif path.suffix == ".jsonl":
            rows = [timeless(json.loads(line), folder) for line in path.read_text().splitlines()]
            found[name] = sorted(json.dumps(row, sort_keys=True) for row in rows)
        elif path.suffix == ".safetensors":
            with open_store(path) as store:  # the account beside the tensors has the seconds of each round
                tensors = {name: store.get(name) for name in store.names() if name != "about"}
            found[name] = {key: hashlib.sha256(tensor_bytes(value)).hexdigest() for key, value in tensors.items()}
        elif path.is_file() and path.suffix != ".html":  # the page is made of report.json
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = None
    return found


@pytest.mark.parametrize("manner", ["middle", "last"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_killed_command_ends_as_one_that_was_left_alone(name, manner, runs):
    folder, done = runs(name)
    whole, killed, again = done["whole"], done[f"{manner} killed"], done[manner]
    assert whole["code"] in (0, 1), whole["output"]
    assert killed["code"] == -signal.SIGKILL
    said = [timeless(json.loads(one["output"]), folder / place) for one, place in ((whole, "whole"), (again, manner))]
    if again["code"] == 2:  # it was killed when all was done: the result is complete, and is not written twice
        assert manner == "last"
        assert said[1]["error"]["kind"] == "OutputExists"
    else:
        assert again["code"] == whole["code"], again["output"]
        assert said[0] == said[1]
        assert again["writes"] < whole["writes"]
    wanted, found = contents(folder / "whole"), contents(folder / manner)
    assert found.keys() == wanted.keys()
    assert found == wanted
