"""Quantizers of other libraries: what they convert, the bytes they hold, what happens without them."""

import importlib.util

import pytest
import torch
from torch import nn

import netweight
from netweight.errors import MissingExtra, Unsupported
from netweight_experiments.tables.neuzip import quantizers as module
from netweight_experiments.tables.neuzip.quantizers import held_bytes, linear_layers, missing, quantize_, quantizers

BY_NAME = {quantizer.name: quantizer for quantizer in quantizers()}
ROWS, COLUMNS = 64, 256
WEIGHTS = ROWS * COLUMNS
# Bytes of one layer: numbers, then scales, zero points and tables as each library documents them.
EXPECTED = {
    "Quant INT8": WEIGHTS + 4 * ROWS,
    "Quant FP4": WEIGHTS // 2 + 4 * WEIGHTS // 64 + 4 * 16,
    "Quant NF4": WEIGHTS // 2 + 4 * WEIGHTS // 64 + 4 * 16,
    "Quant FP4^2": WEIGHTS // 2 + WEIGHTS // 64 + 4 * 16 + 4 + 4 * 1 + 4 * 256,
    "Quant NF4^2": WEIGHTS // 2 + WEIGHTS // 64 + 4 * 16 + 4 + 4 * 1 + 4 * 256,
    "torchao INT8": WEIGHTS + 4 * ROWS + ROWS,
    "torchao INT4, groups of 32": WEIGHTS // 2 + 2 * 2 * WEIGHTS // 32,
    "torchao INT4, groups of 128": WEIGHTS // 2 + 2 * 2 * WEIGHTS // 128,
}


def model(columns=COLUMNS):
    torch.manual_seed(0)
    made = nn.Sequential()
    made.add_module("first", nn.Linear(columns, ROWS, bias=False))
    made.add_module("norm", nn.LayerNorm(ROWS))
    made.add_module("lm_head", nn.Linear(ROWS, 10))
    return made.bfloat16().eval()


@pytest.mark.parametrize("name", EXPECTED)
def test_every_byte_that_a_quantizer_holds_is_counted(name):
    reason = missing(BY_NAME[name])
    if reason:
        pytest.skip(reason)
    made, dense = model(), model()
    quantize_(made, BY_NAME[name], linear_layers(made))
    inputs = torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.inference_mode():
        out, expected = made(inputs).float(), dense(inputs).float()
    assert held_bytes(made.first) == EXPECTED[name]
    assert held_bytes(made.lm_head) == held_bytes(dense.lm_head) == 2 * (ROWS * 10 + 10)
    assert 0 < (out - expected).abs().max() < 0.7 * expected.abs().max()


def test_the_list_is_what_is_tested():
    assert set(EXPECTED) == set(BY_NAME)


def test_bytes_of_dense_and_compressed_models_are_those_of_the_footprint():
    made = model()
    assert held_bytes(made) == netweight.memory_footprint(made)
    netweight.compress_(made)
    assert held_bytes(made) == netweight.memory_footprint(made)
    made.lm_head.weight = made.first.weight
    assert held_bytes(made) == netweight.memory_footprint(made)


def test_layers_that_a_library_passes_over_are_named():
    quantizer = BY_NAME["torchao INT4, groups of 128"]
    if missing(quantizer):
        pytest.skip(missing(quantizer))
    made = model(columns=96)
    with pytest.raises(Unsupported, match="left 1 of 1 layers as they are, first"):
        quantize_(made, quantizer, linear_layers(made))


def test_a_library_that_is_missing_or_broken_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"torchao is not installed .*netweight\[bench\]"):
        quantize_(model(), BY_NAME["torchao INT8"], ["first"])
    monkeypatch.undo()
    (tmp_path / "a_broken_library.py").write_text("raise AttributeError('made for another torch')")
    monkeypatch.syspath_prepend(tmp_path)
    broken = module.Quantizer("torchao INT8", "a_broken_library", "")
    assert missing(broken) == "a_broken_library cannot be imported: AttributeError: made for another torch"
