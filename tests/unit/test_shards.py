"""Models of which a shard is missing are refused, by whatever command reads them."""

import json

import pytest
import torch
from safetensors.torch import save_file

from netweight.cli import main
from netweight.errors import CorruptBlob
from netweight.store.reader import open_store
from netweight.store.shards import missing_shards


@pytest.mark.parametrize(
    ("names", "indexed", "missing"),
    [
        (["model.safetensors"], [], []),
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], [], []),
        (["model-00002-of-00003.safetensors"], [], ["model-00001-of-00003", "model-00003-of-00003"]),
        (["m-00001-of-000002.safetensors"], [], ["m-00002-of-000002"]),  # widths differ where there are many
        (["m-00000-of-00002.safetensors"], [], ["m-00001-of-00002"]),  # counted from 0
        (["m-00001-of-00002.safetensors"], ["m-00002-of-00002.safetensors"], ["m-00002-of-00002"]),
        ([], ["other.safetensors"], ["other"]),
        (["a-00001-of-00001.safetensors", "b-00001-of-00002.safetensors"], [], ["b-00002-of-00002"]),
    ],
)
def test_missing_shards_are_found_by_the_index_and_by_numbers(names, indexed, missing):
    assert missing_shards(names, indexed=indexed) == [f"{name}.safetensors" for name in missing]


def test_a_variants_shards_are_counted_apart():
    names = ["m-00001-of-00002.fp16.safetensors", "m-00001-of-00001.safetensors"]
    assert missing_shards(names) == ["m-00002-of-00002.fp16.safetensors"]


@pytest.fixture
def incomplete(tmp_path):
    """A folder of transformers that has the first of three shards and no index."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"layer.weight": torch.randn(8, 8).bfloat16()}, folder / "model-00001-of-00003.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def test_a_folder_without_an_index_is_not_taken_for_whole(incomplete):
    with pytest.raises(CorruptBlob, match=r"incomplete: it lacks model-00002-of-00003.safetensors and 1 more"):
        open_store(incomplete)


@pytest.mark.parametrize("command", [["inspect"], ["compress"], ["label"]])
def test_commands_refuse_it(incomplete, command, tmp_path, capsys):
    arguments = [*command, str(incomplete)] + ([str(tmp_path / "out")] if command == ["compress"] else [])
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 3
    error = capsys.readouterr().err
    assert "is incomplete: it lacks model-00002-of-00003.safetensors and 1 more" in error
    assert "Fetch the missing files" in error
    assert not (tmp_path / "out").exists()
