"""What docs/adapter-bank.md shows is run."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from adapters_under_test import random_adapter
from click.testing import CliRunner

from netweight import cli, write_adapter

PAGE = Path(__file__).parents[2] / "docs" / "adapter-bank.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="the page is not here: outside a source tree")


def test_the_page_works_in_its_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    for number, name in enumerate(("anna", "berta", "clara")):
        write_adapter(random_adapter(number), f"loras/{name}")
    text, scope = PAGE.read_text(), {}
    for code in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(compile(code, str(PAGE), "exec"), scope)
    for line in "".join(re.findall(r"```console\n(.*?)```", text, re.S)).splitlines():
        answer = CliRunner().invoke(cli.netweight, shlex.split(line[2:])[1:], catch_exceptions=False)
        assert answer.exit_code == 0, answer.output
    assert scope["bank"].names == ["anna", "berta", "clara"]
