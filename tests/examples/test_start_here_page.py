"""What docs/start-here.md shows is run in its order, with fewer steps and rows where it would take long."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "start-here.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="docs are not here: outside a source tree")
pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("scipy", reason="scipy is in the evidence extra")

from click.testing import CliRunner  # noqa: E402

from netweight import cli  # noqa: E402

QUICKER = {
    "--updates 1": "--no-audit --epochs 1 --rounds 1",
    "--retain retain.jsonl": "--retain retain.jsonl --epochs 1",
    "--max-steps 40": "--max-steps 2 --threshold 0.5 --seeds 1",
}


def blocks():
    """Python and commands of the page, in order."""
    for language, text in re.findall(r"```(python|console)\n(.*?)```", PAGE.read_text(), re.S):
        yield from [(language, text)] if language == "python" else [(language, line) for line in text.splitlines()]


def fewer():
    """Leave in the files of `netweight init` a part of their rows and adapters, with which the same commands work."""
    for name, rows in {"pairs.jsonl": 96, "retain.jsonl": 96, "harmful.jsonl": 96, "ordinary.txt": 16}.items():
        Path(name).write_text("".join(Path(name).read_text().splitlines(keepends=True)[:rows]))
    for adapter in sorted(Path("my-loras").iterdir())[24:]:
        shutil.rmtree(adapter)


def quicker(text):
    for shown, instead in QUICKER.items():
        text = text.replace(shown, instead)
    return text


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_the_page_works_in_its_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names, commands = {}, []
    for language, text in blocks():
        if language == "python":
            exec(compile(quicker(text), str(PAGE), "exec"), names)
        elif "space view" not in text:  # half a minute of painting, and tested with its own page
            assert text.startswith("$ netweight "), text
            arguments = shlex.split(quicker(text))[2:]
            done = CliRunner().invoke(cli.netweight, arguments, catch_exceptions=False)
            missed = "attack finetune" in text and done.exit_code == 1  # a finding missed its target
            assert done.exit_code == 0 or missed, (text, done.output)
            commands.append(text.split()[2])
            if commands == ["init"]:
                fewer()
    assert commands == [
        "init", "compress", "verify", "decompress", "federate", "immunize", "attack", *["forget"] * 5, *["space"] * 4
    ]  # fmt: skip
    for file in Path("my-model").iterdir():
        assert (Path("restored") / file.name).read_bytes() == file.read_bytes()
    assert names["netweight"].memory_footprint(names["model"]) < names["netweight"].memory_footprint(names["dense"])


def test_what_is_made_quicker_is_on_the_page():
    assert all(shown in PAGE.read_text() for shown in QUICKER)
