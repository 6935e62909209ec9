"""Attributes read off weights: the basis and rank of factors change nothing, and both readers are told."""

import json

import pytest
import torch
from click.testing import CliRunner

import netweight.methods.space.predict as reading
from netweight.cli import netweight
from netweight.errors import UsageError
from netweight.methods.space.labels import LabelColumn, Labels
from netweight.methods.space.predict import predict
from netweight.nn import Adapter, LowRank
from netweight.store.bank.bank import AdapterBank
from netweight.store.lora_formats.writing import write_adapter

COUNT, MODULES = 60, {"unet.a.to_q": (6, 5), "unet.b.to_v": (20, 24)}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(reading, "_STEPS", 120)
    monkeypatch.setattr(reading, "_NETWORKS", 1)


def people(draw, ranks=(1, 2)):
    """Adapters whose strength is one attribute, and whose place along one direction is another."""
    way = {name: torch.randn(rows, columns, generator=draw) for name, (rows, columns) in MODULES.items()}
    strength, place = 0.5 + torch.rand(COUNT, generator=draw), torch.randn(COUNT, generator=draw)
    found = []
    for number in range(COUNT):
        factors = {}
        for name, (rows, columns) in MODULES.items():
            rank = ranks[number % len(ranks)]
            noise = torch.randn(rows, rank, generator=draw) @ torch.randn(rank, columns, generator=draw)
            change = strength[number] * (noise + 0.8 * place[number] * way[name])
            left, sizes, right = torch.linalg.svd(change, full_matrices=False)
            factors[name] = LowRank(right[: rank + 2].clone(), left[:, : rank + 2] * sizes[: rank + 2])
        found.append(Adapter(factors))
    return found, strength, place


def turned(adapter, draw):
    """The same changes in another basis of the factors, and at twice the rank."""
    factors = {}
    for name, change in adapter.factors.items():
        turn = torch.randn(change.rank, change.rank, generator=draw) + 3 * torch.eye(change.rank)
        up, down = change.up @ turn.inverse(), turn @ change.down
        factors[name] = LowRank(torch.cat([down, down]), torch.cat([up, up], 1), change.scale / 2)
    return Adapter(factors)


@pytest.fixture
def bank(tmp_path):
    draw = torch.Generator().manual_seed(0)
    adapters, strength, place = people(draw)
    (tmp_path / "loras").mkdir()
    for number, adapter in enumerate(adapters):
        write_adapter(adapter, tmp_path / "loras" / f"{number:03d}.safetensors")
    known = ["" if number < 3 else float(place[number]) for number in range(COUNT)]
    rows = [f"{number:03d},{float(strength[number])},{known[number]}" for number in range(COUNT)]
    (tmp_path / "labels.csv").write_text("\n".join(["name,size,place", *rows]) + "\n")
    write_adapter(turned(adapters[7], draw), tmp_path / "turned.safetensors")
    return AdapterBank.ingest(tmp_path / "loras", tmp_path / "bank"), adapters, place


def run(*arguments, code=0):
    done = CliRunner().invoke(netweight, ["space", "predict", *map(str, arguments), "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def test_a_network_and_a_probe_are_told_and_unlabeled_adapters_are_read(bank, tmp_path):
    opened, _, place = bank
    told = run(opened.path, tmp_path / "turned.safetensors", tmp_path / "loras" / "007.safetensors",
               "--labels", tmp_path / "labels.csv", "--column", "size", "--column", "place")  # fmt: skip
    scores = {each["name"]: each["value"] for each in told["findings"]}
    assert scores["held-out R² of place, linear probe"] > 0.5
    # No linear probe of changes that point anywhere tells how strong they are.
    assert scores["held-out R² of size, gauge-free network"] > scores["held-out R² of size, linear probe"] + 0.2
    assert set(told["predicted"]) == {"000", "001", "002", "turned", "007"}
    one, other = told["predicted"]["turned"], told["predicted"]["007"]
    assert one == pytest.approx(other, abs=1e-3)  # the same changes in another basis and rank
    errors = [abs(told["predicted"][f"{number:03d}"]["place"] - float(place[number])) for number in range(3)]
    assert max(errors) < 1.5


def test_classes_are_read_as_chances(bank):
    opened, _, place = bank
    side = torch.where(torch.arange(COUNT) < 2, torch.nan, (place > 0).double())
    labels = Labels(tuple(opened.names), {"side": LabelColumn("side", side)})
    found = predict(opened, labels, ["side"], {}, folds=2)
    assert [each.name for each in found.findings] == [
        f"held-out AUC of side, {reader}" for reader in ("gauge-free network", "linear probe")
    ]
    assert all(0 <= found.values[name]["side"] <= 1 for name in opened.names[:2])
    wrong = Adapter({"unet.a.to_q": LowRank(torch.ones(1, 7), torch.ones(6, 1))})
    with pytest.raises(UsageError, match=r"unet.a.to_q, which the bank does not change in this shape"):
        predict(opened, labels, ["side"], {"wrong": wrong}, folds=2)
