"""Names that programs import can be imported, wherever their home is now."""

import json
from pathlib import Path

import pytest
from snapshot_names import resolve

KEPT = json.loads((Path(__file__).parent / "public_names.json").read_text())


@pytest.mark.parametrize("name", KEPT["top"])
def test_a_name_of_netweight_stays(name):
    assert resolve(KEPT["renamed"].get(name, name)) is not None


@pytest.mark.parametrize("name", KEPT["documented"])
def test_a_name_that_the_documentation_imports_stays(name):
    assert resolve(KEPT["renamed"].get(name, name)) is not None


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.xfail(strict=True, raises=(AttributeError, ImportError)))
        if name in KEPT["missing"]
        else name
        for name in KEPT["planned"]
    ],
)
def test_a_planned_name_is_there_or_listed_as_missing(name):
    assert resolve(name) is not None


def test_what_is_missing_is_planned():
    assert {*KEPT["missing"]} <= {*KEPT["planned"]}
