"""One small model of each kind that there is, compressed beside dense; all of them as a study."""

import copy
import json
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip("peft", reason="peft is not installed")

from families import COLUMNS, FAMILIES, PAGE, compiling, in_page, tried

import netweight

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
# Of each kind one, with the columns in which it has found most.
FAST = {
    "GPT-2": ("training", "saving", "LoRA"),
    "Llama, tied": ("saving", "LoRA", "compiling"),
    "Qwen3-MoE": ("generate", "saving"),
    "Mamba": ("generate", "training"),
    "ALBERT": ("saving", "LoRA"),
    "T5": ("generate", "saving"),
    "ConvNeXt": ("training", "saving"),
    "HuBERT": ("training", "LoRA"),
    "CLIP": ("training", "saving"),
    "conditional U-Net": ("training", "saving", "LoRA"),
}


@pytest.mark.parametrize("name", FAST)
def test_compressed_is_dense_to_the_last_bit(name, tmp_path):
    assert set(tried(FAMILIES[name], tmp_path, ("forward", *FAST[name])).values()) == {"same"}


@pytest.mark.study
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_gives_the_dense_results(name, tmp_path):
    found = tried(FAMILIES[name], tmp_path)
    assert {how.split(":")[0] for how in found.values()} <= {"same", "–", "refused"}, found


@pytest.mark.study
@pytest.mark.parametrize("name", ["GPT-2", "Llama", "Qwen3", "BERT", "T5", "Mamba", "ViT", "CLIP", "ResNet"])
def test_inductor_gives_the_dense_bits_where_it_rounds_as_eager_code_does(name, monkeypatch, tmp_path):
    import torch._inductor.config

    monkeypatch.setattr(torch._inductor.config, "emulate_precision_casts", True)  # else bits depend on what it fuses
    dense = FAMILIES[name].make().eval()
    compressed = copy.deepcopy(dense)
    netweight.compress_(compressed)
    assert not compiling(FAMILIES[name], dense, compressed, tmp_path, backend="inductor")


@pytest.mark.skipif(not PAGE.is_file(), reason="docs are not here: outside a source tree")
def test_the_page_has_the_table_of_the_latest_result():
    rows = json.loads(max(RESULTS.glob("families-*.json")).read_text())["rows"]
    assert rows.keys() == FAMILIES.keys()
    assert all(row.keys() == COLUMNS.keys() for row in rows.values())
    assert in_page(rows, PAGE.read_text()) == PAGE.read_text()
