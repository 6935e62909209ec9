"""What docs/data.md, "Images for federated learning" shows is run, on few pictures where it loads many."""

import re
from pathlib import Path

import numpy as np
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="docs are not here: outside a source tree")


def examples(containing):
    part = PAGE.read_text().split("\n## Images for federated learning\n")[1].split("\n## ")[0]
    found = [code for code in re.findall(r"```python\n(.*?)```", part, re.S) if containing in code]
    assert found, containing
    return found


def run(containing):
    for code in examples(containing):
        names = {}
        exec(compile(code, str(PAGE), "exec"), names)
    return names


def test_every_example_is_run_here():
    assert len(examples("")) == sum(
        len(examples(kind)) for kind in ('load("digits")', "my-pictures", 'load("cifar10")')
    )


def test_the_digits_work():
    pytest.importorskip("sklearn", reason="scikit-learn is in the evidence extra")
    names = run('load("digits")')
    assert len(names["task"].clients) == 5


def test_a_folder_and_a_datasets_object_work(tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason="datasets is in the federated extra")
    image = pytest.importorskip("PIL.Image", reason="Pillow is in the federated extra")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for kind in ("a", "b"):
        (tmp_path / "my-pictures" / kind).mkdir(parents=True)
        for number in range(5):
            pixels = np.full((40, 30, 3), 20 * number, np.uint8)
            image.fromarray(pixels).save(tmp_path / "my-pictures" / kind / f"{number}.png")
    assert run("my-pictures")["images"].classes == ("a", "b")


def test_cifar_and_its_backbone_work(data_folder, tmp_path, monkeypatch):
    weights = data_folder / "weights" / "cifar10_resnet20.safetensors"
    tests = sorted((data_folder / "cifar10_jpeg").glob("test-*.parquet"))
    if not weights.is_file() or not tests:
        pytest.skip("NETWEIGHT_DATA contains no weights/cifar10_resnet20.safetensors or no cifar10_jpeg")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is in the federated extra")
    (tmp_path / "cifar10_jpeg").mkdir()
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / weights.name).symlink_to(weights)
    for split in ("train", "test"):
        parquet.write_table(
            parquet.read_table(tests[0]).slice(0, 2000), tmp_path / "cifar10_jpeg" / f"{split}-0.parquet"
        )
    monkeypatch.setenv("NETWEIGHT_DATA", str(tmp_path))
    monkeypatch.setenv("NETWEIGHT_CACHE", str(tmp_path / "cache"))
    names = run('load("cifar10")')
    assert names["body"](names["public"]).shape == (256, 64)
