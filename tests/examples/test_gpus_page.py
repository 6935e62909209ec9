"""What docs/gpus.md shows is run; its arithmetic is that of the kernels."""

import json
import re
from pathlib import Path

import pytest
import torch

from netweight.codec.cuda import fixed_products
from netweight_experiments.benchmarks.compress import fixed_format
from netweight_experiments.benchmarks.script import run

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "gpus.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="the page is not here: outside a source tree")


def results():
    (name,) = set(re.findall(r"\(\.\./benchmarks/results/(fixed-format-.*?\.json)\)", PAGE.read_text()))
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())


def test_the_code_works():
    torch.manual_seed(0)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    exec(compile(code, str(PAGE), "exec"), {})


def test_arithmetic_is_that_of_the_kernels():
    benchmark = vars(fixed_format)
    assert benchmark["FUSED"] == fixed_products.MOST_FUSED
    assert fixed_products.plan(benchmark["AT_ONCE"], 64, 64, 1).entry == f"product_{benchmark['AT_ONCE']}"
    memory, arithmetic, decoders = benchmark["MEMORIES"]["H200"]
    bits = [results()["measured"]["N(0, 0.02)"][f"bits per weight, {form}"] / 8 for form in ("fixed", "codec")]
    again = {str(b): benchmark["relative"](b, memory, arithmetic, *bits, decoders) for b in benchmark["BATCHES"]}
    assert again == results()["computed"]["H200"]["rows of inputs"]


def test_the_benchmark_of_products_runs_to_its_end(tmp_path):
    small = "--device cpu --shapes 32x64 20x70 --batches 1 70 --rounds 2 --nbytes 20000".split()
    run("compress.fixed_products", [*small, "--output", str(tmp_path / "products.json")])
    found = json.loads((tmp_path / "products.json").read_text())["products"]
    assert len(found) == 4
    assert all(case[name]["us"] > 0 for case in found.values() for name in ("dense", "fixed", "decoded"))
