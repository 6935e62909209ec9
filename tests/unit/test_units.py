import pytest
import torch

from netweight import Units
from netweight.errors import NameNotFound, UsageError


def test_a_set_is_sorted_free_of_repetition_and_made_of_long_tensors():
    units = Units({"b": [3, 1, 3], "a": torch.tensor([7]), "empty": []})
    assert units.modules == ["a", "b"]
    assert units["b"].tolist() == [1, 3]
    assert units["b"].dtype == torch.int64
    assert {name: found.tolist() for name, found in units.items()} == {"a": [7], "b": [1, 3]}
    assert len(units) == 3
    assert list(units) == [("a", 7), ("b", 1), ("b", 3)]
    assert ("b", 3) in units
    assert ("b", 2) not in units
    assert "b" not in units
    assert repr(units) == "<Units: 3 in 2 modules>"


def test_a_tensor_made_from_a_set_changes_nothing_in_the_set():
    units = Units({"a": [1]})
    with pytest.raises(NameNotFound, match=r"'up_blocks\.attn\.to_w'.*Nearest: up_blocks\.attn\.to_v"):
        Units({"up_blocks.attn.to_v": [1]})["up_blocks.attn.to_w"]
    with pytest.raises(NameNotFound, match="Nearest: none"):
        Units()["a"]
    assert units == Units({"a": [1]})
    assert units != "a"


@pytest.mark.parametrize("bad", [[-1], [1.5], [True], "12", 3, torch.tensor(3), torch.tensor([0.5])])
def test_indices_that_cannot_be_meant_are_refused(bad):
    with pytest.raises(UsageError, match="layer"):
        Units({"layer": bad})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 2, "units": {}}', '{"version": 1, "units": []}'])
def test_json_of_another_form_is_refused(text):
    with pytest.raises(UsageError):
        Units.from_json(text)


def test_the_json_form_is_fixed():
    text = '{"version": 1, "units": {"a": [0, 2]}}'
    assert Units({"a": [2, 0]}).to_json() == text
    assert Units.from_json(text) == Units({"a": [0, 2]})
