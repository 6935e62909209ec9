"""What the README shows is run: its Python, and every `netweight` command in its console blocks that needs a model."""

import contextlib
import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from netweight import cli

README = Path(__file__).parents[2] / "README.md"
pytestmark = pytest.mark.skipif(not README.is_file(), reason="README.md is not here: outside a source tree")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.S)


def commands(language):
    lines = [line.removeprefix("$ ") for line in "".join(blocks(language)).splitlines()]
    return [words[1:] for words in (shlex.split(line, comments=True) for line in lines) if words[0] == "netweight"]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """The folder in which the README's console commands ran, and what each of them answered."""
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    made = tmp_path_factory.mktemp("Größe zwei")
    with contextlib.chdir(made):
        return made, [
            (arguments, CliRunner().invoke(cli.netweight, arguments, catch_exceptions=False))
            for arguments in commands("console")
        ]


@pytest.fixture(scope="module")
def folder(answers):
    """What the console commands left, which the README's other blocks take for granted."""
    return answers[0]


def test_the_commands_work_in_their_order(answers):
    folder, given = answers
    assert ["init", "."] in commands("console")
    for arguments, answer in given:
        assert answer.exit_code == 0 or arguments == ["doctor"], answer.output
    model, restored = folder / "my-model", folder / "restored"
    assert (restored / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator:UserWarning")
def test_the_python_works(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for code in blocks("python"):
        exec(compile(code, str(README), "exec"), {})


def test_the_files_that_other_commands_name_are_there(folder, monkeypatch):
    """Those take minutes together and are run from a wheel (tests/study/test_pages_from_a_wheel.py)."""
    monkeypatch.chdir(folder)
    made = set()
    for arguments in commands("sh"):
        named = [each for each in arguments if Path(each).suffix in (".jsonl", ".csv", ".txt", ".yaml")]
        assert [each for each in named if not Path(each).is_file()] == []
        for each in made:
            Path(each).mkdir(exist_ok=True)
        understood(arguments)
        made |= {each for each in arguments if re.fullmatch(r"[a-z-]+", each)}


def understood(arguments):
    command, context = cli.netweight, None
    while isinstance(command, click.Group):
        context = click.Context(command, info_name=command.name, parent=context)
        _, command, arguments = command.resolve_command(context, arguments)
    command.make_context(command.name, list(arguments), parent=context)


def test_its_pictures_are_there():
    text = README.read_text()
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert all((README.parent / picture).is_file() for picture in pictures)
