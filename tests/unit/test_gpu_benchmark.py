"""`make bench-gpu` runs to its end at tiny sizes on the CPU, writes as it goes, goes on, and skips with reasons."""

import json
import multiprocessing

import pytest
from tiny_llama import save, tiny_llama

from netweight.errors import CorruptBlob, OutputExists, UsageError
from netweight_experiments.benchmarks import script
from netweight_experiments.benchmarks.compress import gpu, model_parts
from netweight_experiments.benchmarks.compress.gpu_cells import Visit, model_folder


def visit(output, *words):
    return script.run("compress.gpu", ["--dry-run", "--device", "cpu", "--output", str(output), *words])


@pytest.fixture(scope="module", autouse=True)
def imported_once():
    """Let processes for cells be forks of one that imported large libraries, instead of importing them each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers.models.llama.modeling_llama", gpu.__name__])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu.multiprocessing, "get_context", lambda kind: context)
        yield


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """A model of transformers, compressed and in parts, as it is brought to a machine with a GPU."""
    import netweight

    place = tmp_path_factory.mktemp("brought")
    save(*tiny_llama(hidden_act="silu"), place / "model")
    netweight.compress_folder(place / "model", place / "net")
    model_parts.split(place / "net", place / "parts", megabytes=1)
    return place / "parts"


@pytest.fixture(scope="module")
def written(parts):
    """The result of a whole dry run."""
    output = parts.with_name("result.json")
    visit(output, "--model", str(parts))
    return json.loads(output.read_text())


def test_every_measurement_is_made_or_skipped_with_a_reason(written):
    cells = written["cells"]
    assert list(cells) == [cell.name for cell in gpu.cells_of(Visit("cpu", dry_run=True))]
    assert not [name for name, cell in cells.items() if "failed" in cell], cells
    skipped = {name: cell["skipped"] for name, cell in cells.items() if "skipped" in cell}
    assert skipped.pop("tests") == "a dry run"
    assert set(skipped) <= {"random 8B, NF4", "random 8B, INT8"}  # where bitsandbytes is not installed
    assert written["dry_run"] is True
    assert written["card"] == "CPU"


def test_a_real_model_gives_the_tokens_and_losses_of_the_dense_one(written):
    generated = written["cells"]["real model, generation, batch 1"]["numbers"]["ways"]
    assert [generated[name]["share of tokens equal to dense"] for name in ("dense", "fixed", "codec")] == [1, 1, 1]
    trained = written["cells"]["real model, training"]["numbers"]
    assert trained["fixed"]["losses"] == trained["codec"]["losses"] == trained["LOMO"]["losses"]
    assert set(written["ratios"]) == {
        f"random 8B, training, {form}: speed / LOMO" for form in ("fixed-length", "codec")
    }


def test_bad_input_is_named_and_leaves_weights_as_they_were(written):
    cells = {name: cell["numbers"] for name, cell in written["cells"].items() if name.startswith("bad input")}
    damaged, ended = cells["bad input, damaged weight"], cells["bad input, memory ends"]
    assert damaged["refused"]
    assert damaged["other weights as they were"]
    assert ended["refused"]
    assert ended["weights as they were"]
    assert "2.weight" in ended["message"]
    assert cells["bad input, unsupported card"]["outputs equal"]


def test_a_stopped_run_goes_on_and_tries_again_what_was_skipped(tmp_path):
    output = tmp_path / "result.json"
    visit(output, "--minutes", "0", "--only", "products", "real model, training")
    cells = json.loads(output.read_text())["cells"]
    assert {cell["skipped"] for cell in cells.values()} == {"no time was left; run the same command again"}
    visit(output, "--only", "products", "real model, training")
    cells = json.loads(output.read_text())["cells"]
    first = cells["products of many rows"]["numbers"]
    assert "make bench-gpu MODEL=" in cells["real model, training"]["skipped"]
    visit(output, "--only", "products")
    assert json.loads(output.read_text())["cells"]["products of many rows"]["numbers"] == first


def test_results_of_two_kinds_are_not_mixed_and_a_cpu_is_no_gpu(tmp_path):
    output = tmp_path / "result.json"
    output.write_text(json.dumps({"card": "NVIDIA H100", "driver": None, "dry_run": False, "cells": {}}))
    with pytest.raises(UsageError, match="of another card"):
        visit(output)
    with pytest.raises(UsageError, match="finds no GPU"):
        script.run("compress.gpu", ["--device", "cpu", "--output", str(tmp_path / "other.json")])


def test_a_measurement_over_its_limit_does_not_end_the_others():
    names = ["bad input, damaged weight", "products of many rows", "bad input, memory ends"]
    limits = {names[0]: 90.0, names[1]: 0.0, names[2]: 90.0}
    outcomes = dict(gpu._in_processes(Visit("cpu", dry_run=True), names, limits, float("inf")))
    assert outcomes[names[1]]["failed"] == "not done in 0 s"
    assert all("numbers" in outcomes[name] for name in (names[0], names[2]))


def test_a_folder_comes_back_from_its_parts_and_damage_is_noticed(tmp_path, parts):
    again = model_parts.join(parts, tmp_path / "again")
    net = parts.with_name("net")
    assert {path.name: path.read_bytes() for path in again.iterdir()} == {
        path.name: path.read_bytes() for path in net.iterdir()
    }
    assert model_parts.is_joined(parts, again)
    assert (model_folder(str(parts)) / "config.json").is_file()
    with pytest.raises(OutputExists):
        model_parts.split(net, parts)
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in parts.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    part = broken / "part-000"
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    with pytest.raises(CorruptBlob, match="Bring the parts"):
        model_parts.join(broken, tmp_path / "from-broken")
    part.unlink()
    with pytest.raises(UsageError, match="lacks 1 of 1 parts"):
        model_parts.join(broken, tmp_path / "from-broken")
