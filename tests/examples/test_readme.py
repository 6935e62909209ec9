"""What the README shows is run: its Python, and every `netweight` command in its console blocks that needs a model."""

import re
import shlex
import shutil
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from netweight import cli

README = Path(__file__).parents[2] / "README.md"
pytestmark = pytest.mark.skipif(not README.is_file(), reason="README.md is not here: outside a source tree")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.S)


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A small model under the name that the README uses, in the current folder."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my-model"
    folder.mkdir()
    save_file({"weight": torch.randn(32, 32).to(torch.bfloat16)}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text("{}")
    shutil.copytree(folder, tmp_path / "my-finetune")
    return folder


def test_the_commands_work_in_their_order(model):
    commands = [shlex.split(line[2:], comments=True) for line in "".join(blocks("console")).splitlines()]
    ours = [command[1:] for command in commands if command[0] == "netweight"]
    assert ["compress", "my-model", "my-model-net"] in ours
    for arguments in ours:
        answer = CliRunner().invoke(cli.netweight, arguments, catch_exceptions=False)
        assert answer.exit_code == 0 or arguments == ["doctor"], answer.output
    assert (model.parent / "restored" / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator:UserWarning")
def test_the_python_works(model):
    for code in blocks("python"):
        if "transformers import" in code:
            pytest.importorskip("transformers", reason="transformers is not installed")
        if "diffusers import" in code:
            pytest.importorskip("diffusers", reason="diffusers is not installed")
            pytest.importorskip("accelerate", reason="accelerate is not installed")
        exec(compile(code, str(README), "exec"), {})


def test_the_other_commands_are_understood(model):
    """They take hours or models that nobody has here: their names and options, with files that are there."""
    for line in "".join(blocks("sh")).splitlines():
        for words in line.split("&&"):
            _, *arguments = shlex.split(words, comments=True)
            for name in arguments:
                if name.endswith((".jsonl", ".csv", ".txt")):
                    Path(name).touch()
                elif re.fullmatch(r"[a-z-]+", name):
                    Path(name).mkdir(exist_ok=True)
            understood(arguments)


def understood(arguments):
    command, context = cli.netweight, None
    while isinstance(command, click.Group):
        context = click.Context(command, info_name=command.name, parent=context)
        _, command, arguments = command.resolve_command(context, arguments)
    command.make_context(command.name, list(arguments), parent=context)


def test_every_command_is_in_the_index():
    shown = set(re.findall(r"^\| `netweight (\w+)", (README.parent / "docs" / "index.md").read_text(), re.M))
    assert shown == set(cli.COMMANDS)


def test_it_is_short_and_its_pictures_are_there():
    text = README.read_text()
    assert len(text.split()) <= 900
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert len(pictures) >= 3
    assert all((README.parent / picture).is_file() for picture in pictures)
