"""Checkpoints: one layout for trainings and federations, all or nothing, opened by what they belong to alone."""

import json

import pytest
import torch

from netweight.core.atomic_writes import whole_folder
from netweight.core.records import read_record, write_record
from netweight.errors import CorruptBlob, OutputExists, UsageError
from netweight.job import Job
from netweight.methods.federate.checkpoint import Checkpoint as FederationCheckpoint
from netweight.methods.immunize.settings import TrainingSettings
from netweight.methods.immunize.train import CHECKPOINT, immunize
from netweight.store import StoreWriter, open_store
from netweight.store.checkpoint import open_checkpoint, write_checkpoint


def by_hand(path, about, tensors):
    """The layout in words: the account as bytes under "about", then the tensors in their order."""
    with StoreWriter(path, level="fast") as writer:
        writer.add("about", torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8))
        for name, value in tensors.items():
            writer.add(name, value)


def test_what_is_written_is_read_and_belongs_to_one_piece_of_work(tmp_path):
    path = tmp_path / "new" / "work.safetensors"
    tensors = {"b": torch.arange(6.0).reshape(2, 3).T, "a": torch.tensor(3)}
    for step in (1, 2):  # the second replaces the first
        write_checkpoint(path, {"of": "work", "step": step}, iter(tensors.items()))
    with open_checkpoint(path, {"of": "work"}) as (about, store, names):
        assert about == {"of": "work", "step": 2}
        assert names == ["b", "a"]
        assert all(torch.equal(store.get(name), tensors[name]) for name in names)
    with (
        pytest.raises(UsageError, match=r"work\.safetensors is another's\. Choose another folder"),
        open_checkpoint(path, {"of": "play"}, refusal="is another's"),
    ):
        pass
    with pytest.raises(UsageError, match="contains other work"), open_checkpoint(path, {"whose": None, "of": "x"}):
        pass
    with StoreWriter(tmp_path / "weights.safetensors") as writer:
        writer.add("weight", torch.zeros(2))
    with pytest.raises(CorruptBlob, match="not a checkpoint"), open_checkpoint(tmp_path / "weights.safetensors"):
        pass


def test_a_failure_on_the_way_leaves_the_older_one(tmp_path):
    path = tmp_path / "work.safetensors"
    write_checkpoint(path, {"step": 1}, [("a", torch.zeros(2))])
    before = path.read_bytes()

    def broken():
        yield "a", torch.ones(2)
        raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        write_checkpoint(path, {"step": 2}, broken())
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_trainings_and_federations_are_written_and_read_in_this_layout(tmp_path):
    """The layout of both is that of the store's checkpoints, to the byte."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from decoders_under_test import decoder, some_pairs

    model = decoder(layers=1)
    settings = TrainingSettings(batch_size=2, checkpoint_every=1)
    immunize(model, some_pairs(), settings=settings, folder=tmp_path / "training")
    with open_checkpoint(tmp_path / "training" / CHECKPOINT) as (about, store, names):
        by_hand(tmp_path / "hand", about, {name: store.get(name) for name in names})
    assert (tmp_path / "training" / CHECKPOINT).read_bytes() == (tmp_path / "hand").read_bytes()
    trained = [name for name, _ in model.named_parameters()]
    kinds = ("step", "exp_avg", "exp_avg_sq")
    assert names == [f"weight|{name}" for name in trained] + [f"{kind}|{name}" for name in trained for kind in kinds]
    assert {*about} == {"identity", "balance", "steps", "job"}
    assert {*about["steps"][1]} == {"step", "rate", "norm", "terms"}

    weight, moment = torch.randn(3, 4), torch.randn(3, 4)
    by_hand(tmp_path / "other", {"rounds": [], "attempt_answers": {}}, {"state|w": weight, "private|3|w": moment})
    with Job.open(tmp_path, state="other") as job:
        federation = FederationCheckpoint.load(job)
        assert torch.equal(federation.state["w"], weight)
        assert torch.equal(federation.private[3]["w"], moment)
    with Job.open(tmp_path, state="again") as job:
        federation.save(job)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "other").read_bytes()
    with open_store(tmp_path / "again") as store:
        assert store.names() == ["about", "state|w", "private|3|w"]


def test_a_record_is_read_by_its_version_alone(tmp_path):
    path = tmp_path / "new" / "record.json"
    write_record(path, {"steps": 3, "loss": float("inf")}, version=2)
    assert read_record(path, dict, version=2, of="work") == {"steps": 3, "loss": float("inf")}
    with pytest.raises(CorruptBlob, match="not a record of work in version 1"):
        read_record(path, dict, version=1, of="work")
    with pytest.raises(CorruptBlob, match="not a record of work in version 2"):
        read_record(path, lambda values: values["absent"], version=2, of="work")
    path.write_text("[]")
    with pytest.raises(CorruptBlob):
        read_record(path, dict, version=2, of="work")
    with pytest.raises(OutputExists):
        write_record(path, {}, version=2, overwrite=False)
    with pytest.raises(FileNotFoundError):
        read_record(tmp_path / "none.json", dict, version=2, of="work")


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "made"

    def fail():
        with whole_folder(target) as part:
            part.mkdir()
            (part / "half").touch()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []
    left = tmp_path / ".made.netweight-part"  # by a run that was killed
    left.mkdir()
    (left / "half").touch()
    with whole_folder(target) as part:
        part.mkdir()
        (part / "whole").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["made", "whole"]
    with pytest.raises(OutputExists, match="move it away"), whole_folder(target):
        pass
