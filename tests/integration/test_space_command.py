"""`netweight space ingest` and `info`: lines for people, one object for machines, exit codes."""

import json

import pytest
import torch
from adapters_under_test import TO_OUT, TO_Q, random_adapter
from click.testing import CliRunner
from safetensors.torch import save_file

from netweight import AdapterBank, WeightSpace, read_adapter, write_adapter
from netweight.cli import netweight
from netweight.methods.space.directions import direction_of
from netweight.methods.space.points import write_direction
from netweight.nn.lora import Adapter, LowRank


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
    factors = {**random_adapter(9).factors, TO_Q: LowRank(torch.ones(1, 7), torch.ones(6, 1))}
    write_adapter(Adapter(factors), source / "bad.safetensors")
    refused = run("ingest", source, tmp_path / "bank", "--json")
    assert refused.exit_code == 2
    assert json.loads(refused.stdout)["error"]["message"].endswith(
        f"changes {TO_Q} in shape (6, 7), the others in (6, 5)."
    )
    assert not (tmp_path / "bank").exists()
    done = run("ingest", source, tmp_path / "bank", "--skip-bad")
    assert done.exit_code == 0
    assert f"bad.safetensors changes {TO_Q} in shape" in done.output
    assert json.loads(run("info", tmp_path / "bank", "--json").stdout)["skipped"].keys() == {"bad"}


def test_a_mixed_folder_is_joined_narrowed_and_given_a_base(tmp_path):
    (tmp_path / "loras").mkdir()
    text = "text_encoder.text_model.encoder.layers.0.self_attn.q_proj"
    shapes = {TO_Q: (6, 5)}, {TO_Q: (6, 5), text: (4, 4)}, {TO_OUT: (4, 6)}
    bases = "stable-diffusion-v1-5/stable-diffusion-v1-5", "/models/v1-5-pruned-emaonly.safetensors", "me/tuned"
    for number, (shape, base) in enumerate(zip(shapes, bases, strict=True)):
        write_adapter(random_adapter(number, shapes=shape), tmp_path / "loras" / f"{number}.safetensors", base=base)
    refused = run("ingest", tmp_path / "loras", tmp_path / "bank")
    assert (refused.exit_code, "was trained on me/tuned" in refused.stderr) == (2, True)
    assert run("ingest", tmp_path / "loras", tmp_path / "usual", "--skip-bad").exit_code == 0
    usual = AdapterBank.open(tmp_path / "usual")
    assert (usual.names, usual.base, usual.modules) == (["0", "1"], bases[0], (text, TO_Q))
    assert run("ingest", tmp_path / "loras", tmp_path / "bank", "--base", "me/tuned").exit_code == 0
    bank = AdapterBank.open(tmp_path / "bank")
    assert (len(bank), bank.base, set(bank.modules)) == (3, "me/tuned", {TO_Q, TO_OUT, text})
    given = ("--base", "x", "--modules", "unet.**.to_q", "--skip-bad")
    assert run("ingest", tmp_path / "loras", tmp_path / "narrow", *given).exit_code == 0
    narrow = AdapterBank.open(tmp_path / "narrow")
    assert (narrow.modules, list(narrow.skipped)) == ((TO_Q,), ["2"])


def test_damage_and_missing_banks_have_their_exit_codes(source, tmp_path):
    run("ingest", source, tmp_path / "bank")
    assert run("fit", tmp_path / "bank", tmp_path / "fitted").exit_code == 0
    space = WeightSpace.open(tmp_path / "fitted")
    write_direction(direction_of(space.scores, torch.ones(space.components), name="x", kind="encoder"), tmp_path / "x")
    shard = next((tmp_path / "bank").glob("shard-*"))
    data = bytearray(shard.read_bytes())
    data[-30] ^= 1
    shard.write_bytes(data)
    damaged = run("info", tmp_path / "bank", "--verify")
    assert damaged.exit_code == 3
    assert shard.name in damaged.stderr
    assert run("info", tmp_path / "bank").exit_code == 3  # its table of ranks
    fitted = run("fit", tmp_path / "bank", tmp_path / "space")
    assert (fitted.exit_code, shard.name in fitted.stderr) == (3, True)
    edited = run("edit", tmp_path / "fitted", "1", "--move", f"{tmp_path / 'x'}=1", "--out", tmp_path / "moved.json")
    assert (edited.exit_code, shard.name in edited.stderr) == (3, True)
    exported = run("export", tmp_path / "fitted", "mean", tmp_path / "out")
    assert (exported.exit_code, shard.name in exported.stderr) == (3, True)
    assert run("info", source).exit_code == 2
    assert run("ingest", source, tmp_path / "no" / "bank").exit_code == 2


def test_published_files_without_their_order(tmp_path):
    torch.save(torch.randn(2, 99_648), tmp_path / "all_weights.pt")
    (tmp_path / "adapter_config.json").write_text('{"r": 1, "lora_alpha": 27}')
    refused = run("ingest", tmp_path, tmp_path / "bank")
    assert refused.exit_code == 2
    assert "--stable-diffusion" in refused.stderr
    done = run("ingest", tmp_path, tmp_path / "bank", "--stable-diffusion", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["adapters"] == 2


def test_copies_are_found_in_any_layout_rank_and_strength(tmp_path):
    folder = tmp_path / "loras"
    for number in range(5):
        write_adapter(random_adapter(number), folder / f"{number}", layout="peft")
    write_adapter(random_adapter(2), folder / "kohya.safetensors", layout="kohya")
    write_adapter(random_adapter(3).scaled(3.0), folder / "strong.safetensors")
    again = random_adapter(4).factors
    wide = {n: LowRank(torch.cat([c.down, c.down]), torch.cat([c.up, c.up], 1), c.scale / 2) for n, c in again.items()}
    write_adapter(Adapter(wide), folder / "wide.safetensors")
    other = random_adapter(4, shapes={TO_Q: (12, 10)})
    write_adapter(other, folder / "other.safetensors")
    (folder / "bad.safetensors").write_bytes(b"{}")
    values = json.loads(run("dedupe", folder, "--json").stdout)
    found = {each["name"]: (each["of"], round(each["cosine"], 4)) for each in values["duplicates"]}
    assert found == {"kohya": ("2", 1.0), "strong": ("3", 1.0), "wide": ("4", 1.0)}
    assert list(values["unread"]) == ["bad"]


def test_one_adapter_is_merged_into_another_layout_and_rank(source, tmp_path):
    done = run("merge", source / "1", tmp_path / "out.safetensors", "--layout", "kohya", "--rank", 1, "--json")
    assert json.loads(done.stdout)["ranks"] == [1, 1]
    factors = read_adapter(tmp_path / "out.safetensors").factors
    best = read_adapter(source / "1").truncated(1).adapter.factors
    for name, change in best.items():
        torch.testing.assert_close(factors[name].dense(), change.dense())


def test_a_difference_of_models_is_extracted(tmp_path):
    change = random_adapter(0, shapes={"model.layers.0.mlp.up_proj": (6, 5)}).factors["model.layers.0.mlp.up_proj"]
    weights = {"model.layers.0.mlp.up_proj.weight": torch.randn(6, 5), "model.norm.weight": torch.ones(5)}
    save_file(weights, tmp_path / "base.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] = weights["model.layers.0.mlp.up_proj.weight"] + change.dense()
    save_file(weights, tmp_path / "tuned.safetensors")
    pair = (tmp_path / "base.safetensors", tmp_path / "tuned.safetensors")
    done = run("extract", *pair, tmp_path / "lora", "--rank", 2, "--json")
    assert json.loads(done.stdout)["relative_error"] < 1e-5
    found = read_adapter(tmp_path / "lora").factors["model.layers.0.mlp.up_proj"]
    torch.testing.assert_close(found.dense(), change.dense(), rtol=0, atol=1e-5)
    assert run("extract", pair[0], pair[0], tmp_path / "none").exit_code == 2
