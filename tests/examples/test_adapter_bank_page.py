"""What docs/adapter-bank.md and docs/adapter-files.md show is run."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from adapters_under_test import random_adapter
from click.testing import CliRunner

from netweight import cli, write_adapter

PAGE = Path(__file__).parents[2] / "docs" / "adapter-bank.md"
DETAILS = PAGE.with_name("adapter-files.md")
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="the page is not here: outside a source tree")


NAMES = ["person-00000", "person-00001", "person-00002"]


def test_the_page_works_in_its_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    for number, name in enumerate(NAMES):
        write_adapter(random_adapter(number), f"my-loras/{name}")
    text, scope = PAGE.read_text(), {}
    for code in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(compile(code, str(PAGE), "exec"), scope)
    for line in "".join(re.findall(r"```console\n(.*?)```", text, re.S)).splitlines():
        if line.startswith("$ cp -r "):
            shutil.copytree(*line.split()[3:])
            continue
        answer = CliRunner().invoke(cli.netweight, shlex.split(line[2:])[1:], catch_exceptions=False)
        assert answer.exit_code == 0, answer.output
    assert scope["bank"].names == NAMES


def test_the_python_of_the_details_works_in_its_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope: dict = {}
    for code in re.findall(r"```python\n(.*?)```", DETAILS.read_text(), re.S):
        exec(compile(code, str(DETAILS), "exec"), scope)
    assert (tmp_path / "bank-of-mine" / "bank.json").is_file()
