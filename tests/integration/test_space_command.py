"""`netweight space ingest` and `info`: lines for people, one object for machines, exit codes."""

import json

import pytest
from adapters_under_test import TO_Q, random_adapter
from click.testing import CliRunner

from netweight import AdapterBank, write_adapter
from netweight.cli import netweight
from netweight.nn.lora import Adapter


@pytest.fixture
def source(tmp_path):
    for number in range(4):
        write_adapter(random_adapter(number), tmp_path / "loras" / str(number), layout="peft", base="shapes")
    return tmp_path / "loras"


def run(*arguments):
    return CliRunner().invoke(netweight, ["space", *map(str, arguments)])


def test_a_bank_is_made_shown_and_checked(source, tmp_path):
    done = run("ingest", source, tmp_path / "bank", "--compress")
    assert done.exit_code == 0, done.output
    assert "4 adapters of 3 modules, rank 1 to 3" in done.stdout
    shown = run("info", tmp_path / "bank", "--verify", "--json")
    values = json.loads(shown.stdout)
    bank = AdapterBank.open(tmp_path / "bank")
    assert values["names"] == ["0", "1", "2", "3"]
    assert values["digest"] == bank.digest
    assert values["base"] == "shapes"
    assert values["ranks"] == [1, 3]
    assert values["verified"]
    assert values["shapes"] == {name: list(shape) for name, shape in bank.shapes.items()}


def test_a_bad_adapter_ends_it_or_is_listed(source, tmp_path):
    factors = dict(random_adapter(9).factors)
    del factors[TO_Q]
    write_adapter(Adapter(factors), source / "bad.safetensors")
    refused = run("ingest", source, tmp_path / "bank", "--json")
    assert refused.exit_code == 2
    assert json.loads(refused.stdout)["error"]["message"].endswith(f"lacks {TO_Q}.")
    assert not (tmp_path / "bank").exists()
    done = run("ingest", source, tmp_path / "bank", "--skip-bad")
    assert done.exit_code == 0
    assert f"bad.safetensors lacks {TO_Q}" in done.stdout
    assert json.loads(run("info", tmp_path / "bank", "--json").stdout)["skipped"].keys() == {"bad"}


def test_damage_and_missing_banks_have_their_exit_codes(source, tmp_path):
    run("ingest", source, tmp_path / "bank")
    shard = next((tmp_path / "bank").glob("shard-*"))
    data = bytearray(shard.read_bytes())
    data[-30] ^= 1
    shard.write_bytes(data)
    damaged = run("info", tmp_path / "bank", "--verify")
    assert damaged.exit_code == 3
    assert shard.name in damaged.stderr
    assert run("info", tmp_path / "bank").exit_code == 0
    assert run("info", source).exit_code == 2
    assert run("ingest", source, tmp_path / "no" / "bank").exit_code == 2


def test_published_files_without_their_order(tmp_path):
    import torch

    torch.save(torch.randn(2, 99_648), tmp_path / "all_weights.pt")
    (tmp_path / "adapter_config.json").write_text('{"r": 1, "lora_alpha": 27}')
    refused = run("ingest", tmp_path, tmp_path / "bank")
    assert refused.exit_code == 2
    assert "--stable-diffusion" in refused.stderr
    done = run("ingest", tmp_path, tmp_path / "bank", "--stable-diffusion", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["adapters"] == 2
