"""The papers' numbers as data: every file is whole, clean and what the registry expects."""

import json
import math
import re

import pytest

from netweight.errors import Unsupported
from netweight_experiments.tables import registry as module
from netweight_experiments.tables.registry import published, published_folder, published_ids

KEYS = ["id", "paper", "arxiv", "table", "title", "setup", "columns", "rows", "notes", "source"]
SETUP_KEYS = {"stated", "reference_code", "inferred", "rerun", "unknown"}
SOURCES = {"paper summary table", "paper text", "reference code", "third-party re-run"}
ARXIV = {
    "hyperfl": "2412.07187",
    "repnoise": "2405.14577",
    "nemo": "2406.02366",
    "neuzip": "2410.20650",
    "w2w": "2406.09413",
}
# Traces of UTF-8 read as Mac Roman or Latin-1, leftover markup, absolute paths.
DIRT = re.compile(
    "[\u201a\u221a\u00c3\u00e2][\u00c4\u00c2\u2020\u2122\u00ae\u00d1\u0080-\u00bf]|\ufffd|\\*\\*|<sup>|(?:^|[\\s\"'(])/[a-z]+/"
)


def texts(value):
    """Every string inside a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from texts(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from texts(item)


def strict(pairs):
    keys = [key for key, _ in pairs]
    assert len(keys) == len(set(keys)), f"duplicate key in {keys}"
    return dict(pairs)


def refuse(constant):
    raise AssertionError(f"{constant} is not allowed")


@pytest.fixture(params=published_ids())
def data(request):
    text = (published_folder() / f"{request.param}.json").read_text(encoding="utf-8")
    return json.loads(text, object_pairs_hook=strict, parse_constant=refuse) | {"file": request.param}


def test_the_head_names_table_and_paper(data):
    assert [*KEYS, "file"] == list(data)
    assert data["id"] == data["file"]
    assert data["arxiv"] == ARXIV[data["id"].split("-")[0]]
    assert data["source"] in SOURCES
    assert (data["source"] == "third-party re-run") == data["id"].startswith("nemo-")
    assert data["setup"]
    assert set(data["setup"]) <= SETUP_KEYS


def test_columns_and_rows_fit(data):
    assert data["columns"]
    assert data["rows"]
    for column in data["columns"]:
        assert list(column) == ["name", "unit", "better"]
        assert column["name"].strip()
        assert column["unit"].strip()
        assert column["better"] in ("higher", "lower", None)
    for row in data["rows"]:
        assert list(row) == ["name", "values"]
        assert len(row["values"]) == len(data["columns"])
    for part in ("columns", "rows"):
        names = [item["name"] for item in data[part]]
        assert len(names) == len(set(names))


def test_values_are_finite_numbers_or_explained_nulls(data):
    values = [value for row in data["rows"] for value in row["values"]]
    for value in values:
        assert value is None or (type(value) in (int, float) and math.isfinite(value))
    if None in values:
        assert any("null" in note.lower() or "not recorded" in note.lower() for note in data["notes"])


def test_texts_are_clean(data):
    for text in texts(data):
        assert text == text.strip() != ""
        assert not DIRT.search(text)


def test_reading_gives_what_the_file_holds(data):
    table = published(data["id"])
    assert [row.name for row in table.rows] == [row["name"] for row in data["rows"]]
    assert [list(row.values) for row in table.rows] == [row["values"] for row in data["rows"]]
    assert [column.unit for column in table.columns] == [column["unit"] for column in data["columns"]]


def test_ids_are_sorted_by_number():
    ids = published_ids()
    assert ids.index("hyperfl-table5") < ids.index("neuzip-table1") < ids.index("neuzip-table4")


def test_a_table_without_numbers_is_none():
    assert published("neuzip-fig1") is None


@pytest.mark.parametrize("content", ["", "[]", '{"id": "x"}'])
def test_a_damaged_file_is_named(tmp_path, monkeypatch, content):
    (tmp_path / "x.json").write_text(content)
    monkeypatch.setattr(module, "published_folder", lambda: tmp_path)
    with pytest.raises(Unsupported, match=r"x\.json"):
        published("x")
