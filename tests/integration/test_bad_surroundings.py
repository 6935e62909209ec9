"""Forty columns, no home to write to, no network, names with spaces: it works, or one line says the cure."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

CLOSED = "http://127.0.0.1:9"  # nobody listens


def call(folder, *arguments, code=0, **environment):
    command = [sys.executable, "-m", "netweight", *arguments]
    done = subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "Größe zwei"
    folder.mkdir()
    save_file({"weight": torch.randn(64, 64).bfloat16()}, folder / "mein Modell.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("words", [("--help",), ("compress", "--help"), ("space", "fit", "--help"), ("run", "--help")])
def test_help_fits_into_forty_columns(tmp_path, words):
    lines = call(tmp_path, *words, COLUMNS="40").stdout.splitlines()
    assert len(lines) > 20
    options = ("  -", " " * 10)  # beside their names click leaves ten columns to what they mean
    wide = [line for line in lines if len(line) > 40 and not line.startswith(options)]
    assert wide == []
    assert max(map(len, lines)) <= 50


def test_commands_work_in_forty_columns(folder):
    call(folder, "compress", "mein Modell.safetensors", "klein.safetensors", COLUMNS="40")
    assert "weight" in call(folder, "inspect", "klein.safetensors", COLUMNS="40").stdout
    call(folder, "verify", "klein.safetensors", "--against", "mein Modell.safetensors", COLUMNS="40")


def test_nothing_needs_a_home(folder):
    homeless = {"HOME": "/dev/null/home", "XDG_CACHE_HOME": "/dev/null/cache"}
    call(folder, "compress", "mein Modell.safetensors", "klein.safetensors", **homeless)
    call(folder, "decompress", "klein.safetensors", "zurück.safetensors", **homeless)
    assert (folder / "zurück.safetensors").read_bytes() == (folder / "mein Modell.safetensors").read_bytes()
    assert json.loads(call(folder, "doctor", "--json", **homeless).stdout)["environment"]


def test_without_a_network_one_line_says_so(folder):
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is in the llm extra")
    nobody = {"HF_ENDPOINT": CLOSED, "HTTPS_PROXY": CLOSED, "HTTP_PROXY": CLOSED, "HF_HUB_CACHE": str(folder / "cache")}
    done = call(folder, "compress", "nobody/no-such-model", "klein", code=2, **nobody)
    told = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert len(told) == 1, done.stderr
    assert re.search(r"nobody/no-such-model.*(network|reach|connect|online|offline)", told[0]), told
    assert not (folder / "klein").exists()


def test_a_path_of_another_system_is_answered_by_name(folder):
    done = call(folder, "compress", r"C:\models\llama", "klein", code=2)
    assert r"C:\models\llama" in done.stderr
