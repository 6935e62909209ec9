"""Odd inputs: every one gets a label, or a refusal that names it."""

import numpy as np
import pytest
import torch
from odd_models import LABELLED, REFUSED, W, in_the_hubs_cache, language, linked_to_itself, weights, write

from netweight.errors import NetweightError
from netweight.labels.measure import label


@pytest.mark.parametrize("name", LABELLED)
def test_gets_a_label(name, tmp_path, capsys):
    from netweight.labels.files import write_label
    from netweight.labels.terminal import lines

    path, kind = LABELLED[name](tmp_path)
    made = label(path, threads=1)
    assert made.kind.startswith(kind)
    assert all(row.value for row in made.rows)
    write_label(made, tmp_path / "out")  # reads back what it wrote
    assert all(len(line) <= 60 for line in plain(lines(made)))
    assert "must not run" not in capsys.readouterr().out


def plain(lines):
    import click

    return [click.unstyle(line) for line in lines]


@pytest.mark.filterwarnings("ignore:.*(deprecated|not recommended|TypedStorage).*")
@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_by_name(name, tmp_path, capsys):
    path, word = REFUSED[name](tmp_path)
    with pytest.raises(NetweightError) as caught:
        label(path, threads=1)
    assert word in str(caught.value)
    assert caught.value.cure
    assert "must not run" not in capsys.readouterr().out


def row(path, key):
    return label(path, threads=1).row(key)


def test_only_what_can_run_code_counts_as_code(tmp_path):
    language(tmp_path)
    weights(tmp_path)
    write(tmp_path, "tok512.bin", bytes(range(64)))
    np.savez(tmp_path / "v.npz", a=np.ones(3))
    assert row(tmp_path, "code").value == "none"
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    torch.save({"a": 1}, tmp_path / "training_args.bin")
    assert row(tmp_path, "code").detail["pickles"] == ["objects.npy", "training_args.bin"]


def test_a_snapshot_of_the_hub_has_the_name_of_its_model(tmp_path):
    assert label(in_the_hubs_cache(tmp_path), threads=1).name == "owner/name"


def test_the_same_weights_in_two_layouts_count_once(tmp_path):
    language(tmp_path)
    file = weights(tmp_path, "consolidated.safetensors")
    weights(tmp_path, "model-00001-of-00001.safetensors")
    assert row(tmp_path, "gross_weight").number == sum(each.nbytes for each in W.values())
    assert row(tmp_path, "copies").number == file.stat().st_size


def test_a_link_to_a_folder_above_is_followed_once(tmp_path):
    assert row(linked_to_itself(tmp_path), "adapters").number == 2
