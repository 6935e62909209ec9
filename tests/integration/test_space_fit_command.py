"""`netweight space fit` on banks on disk, alone and with several processes."""

import functools
import json

import pytest
import torch
from click.testing import CliRunner
from spaces_under_test import bank_of, flat, random_adapters, sharing_adapters

from netweight.cli import netweight
from netweight.core.engines import in_process, local_processes
from netweight.errors import UsageError
from netweight.methods.space.space import WeightSpace
from netweight.nn.lora import Adapter, LowRank
from netweight.store.bank.bank import AdapterBank
from netweight.store.bank.shards import BankWriter


def bank_at(path, adapters):
    with BankWriter(path) as writer:
        for number, adapter in enumerate(adapters):
            writer.add(f"person-{number}", adapter)
    return AdapterBank.open(path)


def invoke(*arguments):
    return CliRunner().invoke(netweight, ["space", "fit", *map(str, arguments)])


@pytest.fixture
def bank(tmp_path):
    return bank_at(tmp_path / "bank", random_adapters(24, dtype=torch.float32))


def test_a_bank_is_fitted_and_said(bank, tmp_path):
    done = invoke(bank.path, tmp_path / "space", "--components", 4)
    assert done.exit_code == 0, done.output
    assert "4 components of 24 adapters capture" in done.output
    assert "Agreement of the halves" in done.output
    expected = WeightSpace.fit(bank_of(random_adapters(24, dtype=torch.float32)), components=4)
    found = WeightSpace.open(tmp_path / "space", bank)
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-4, atol=1e-4)
    again = invoke(bank.path, tmp_path / "space")
    assert again.exit_code == 2
    assert "exists already" in again.output


def test_adapters_that_have_nothing_in_common_are_a_collection_and_no_space(bank, tmp_path):
    done = invoke(bank.path, tmp_path / "space", "--components", 4)
    assert "The components explain" in done.output
    assert "of adapters that they were not fitted to" in " ".join(done.output.split())


def test_a_space_knows_where_its_bank_lies(bank, tmp_path):
    together = tmp_path / "together"
    together.mkdir()
    bank.path.rename(together / "bank")
    assert invoke(together / "bank", together / "space", "--components", 3).exit_code == 0
    together.rename(tmp_path / "moved")
    space = WeightSpace.open(tmp_path / "moved" / "space")
    assert torch.isfinite(flat(space.changes(space.scores[0]))).all()
    (tmp_path / "moved" / "bank").rename(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=r"which was at \.\./bank relative to it\. Name the bank"):
        WeightSpace.open(tmp_path / "moved" / "space")
    bank_at(tmp_path / "moved" / "bank", random_adapters(24, seed=9, dtype=torch.float32))
    with pytest.raises(UsageError, match="another bank than the space was fitted to"):
        WeightSpace.open(tmp_path / "moved" / "space")


def test_machines_get_an_object(bank, tmp_path):
    done = invoke(bank.path, tmp_path / "space", "--components", 3, "--solver", "streaming", "--sketch", 6,
                  "--standalone", "--json")  # fmt: skip
    said = json.loads(done.stdout)
    assert (said["adapters"], said["components"], said["representation"]) == (24, 3, "delta")
    assert said["accuracy"]["sketch"]["captured"] > 0.5
    space = WeightSpace.open(tmp_path / "space")
    assert said["accuracy"] == json.loads(json.dumps(space.accuracy.to_json()))
    shown = CliRunner().invoke(netweight, ["space", "info", str(tmp_path / "space"), "--json"])
    assert json.loads(shown.stdout) == {key: value for key, value in said.items() if key != "written"}
    assert torch.isfinite(flat(space.changes(space.scores[0]))).all()


def test_bad_input_is_named_before_the_work(bank, tmp_path):
    for arguments, message in (
        (["--components", 24], "A bank of 24 has at most 23 principal components"),
        (["--representation", "factors"], "'person-1' has rank 2 in"),
        (["--processes", 1], "--processes"),
    ):
        done = invoke(bank.path, tmp_path / "space", *arguments)
        assert done.exit_code == 2
        assert message in done.output
    alone = bank_at(tmp_path / "alone", random_adapters(1, dtype=torch.float32))
    assert "A bank of 1 has at most 0" in invoke(alone.path, tmp_path / "space").output
    assert not (tmp_path / "space").exists()
    with pytest.raises(UsageError, match="needs a folder"):
        WeightSpace.fit(bank, components=3, engine=in_process)


def test_processes_share_the_work_in_a_folder_of_the_command_s_own(bank, tmp_path):
    done = invoke(bank.path, tmp_path / "space", "--components", 3, "--processes", 2)
    assert done.exit_code == 0, done.output
    expected = WeightSpace.fit(bank, components=3)
    torch.testing.assert_close(WeightSpace.open(tmp_path / "space", bank).scores, expected.scores, rtol=1e-4, atol=1e-4)
    assert {path.name for path in tmp_path.iterdir()} == {"bank", "space"}  # nothing of the work is left


@pytest.mark.parametrize(("how", "engine"), [
    ({"representation": "delta"}, functools.partial(local_processes, workers=2)),
    ({"representation": "delta", "solver": "streaming", "sketch": 6}, in_process),
    ({"representation": "factors", "solver": "streaming"}, in_process),
])  # fmt: skip
def test_tasks_find_what_one_finds(how, engine, tmp_path):
    bank = bank_at(tmp_path / "bank", sharing_adapters(40))
    alone = WeightSpace.fit(bank, components=3, tolerance=0.0, **how)
    found = WeightSpace.fit(bank, components=3, tolerance=0.0, engine=engine, folder=tmp_path / "work", **how)
    torch.testing.assert_close(found.scores, alone.scores, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.deviations, alone.deviations, rtol=1e-4, atol=0)
    with pytest.raises(UsageError, match="bank on disk"):
        WeightSpace.fit(bank_of(sharing_adapters(40)), components=3, engine=engine, folder=tmp_path / "none", **how)


def test_nan_in_a_bank_is_named(tmp_path):
    """A bank refuses it when it is written; one that has it all the same is refused when it is fitted."""
    good = random_adapters(6, dtype=torch.float32)
    bad = bank_of(good)
    bad.stack(2, 3).down["unet.mid.to_v"][0, 0, 1] = float("inf")
    with pytest.raises(UsageError, match=r"'person-2' contains NaN or infinity in unet\.mid\.to_v"):
        WeightSpace.fit(bad, components=2)
    zero = [Adapter({name: LowRank(one.down * 0, one.up, one.scale) for name, one in good[0].factors.items()})]
    space = WeightSpace.fit(bank_of(zero + good), components=2)
    torch.testing.assert_close(space.project(zero[0]), space.scores[0], rtol=1e-3, atol=1e-3)
