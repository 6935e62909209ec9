"""What benchmark scripts share: a file of results filled cell by cell, its heading, and tables in pages."""

import json

import pytest

from netweight.errors import UsageError
from netweight_experiments.benchmarks import script


def test_cells_of_a_file_are_measured_once(tmp_path, capsys):
    output, asked = tmp_path / "results" / "one.json", []

    def cell(name):
        return name, lambda: asked.append(name) or {"of": name}

    script.fill(output, {"what": "a try"}, "cells", [cell("a"), cell("b")])
    script.fill(output, {"what": "another"}, "cells", [cell("b"), cell("c")])
    assert asked == ["a", "b", "c"]
    written = json.loads(output.read_text())
    assert written == {"what": "another", "cells": {name: {"of": name} for name in "abc"}}
    assert capsys.readouterr().out.count("{'of':") == 3


def test_what_a_stopped_script_has_measured_is_kept(tmp_path):
    output = tmp_path / "one.json"

    def stopped():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        script.fill(output, {}, "arms", [("first", lambda: 1), ("second", stopped)])
    assert json.loads(output.read_text())["arms"] == {"first": 1}


def test_a_file_says_where_it_comes_from(tmp_path):
    parser = script.script("A measurement.\n\nMore of it.", "space/tries")
    parser.add_argument("--count", type=int, default=3)
    given = parser.parse_args([])
    assert given.output.parent.name == "space"
    assert given.output.name == f"tries-{script.today()}.json"
    found = script.origin("a measurement", given)
    assert (found["what"], found["options"]) == ("a measurement", {"count": 3})
    assert found["date"].startswith(script.today()[:4])
    assert "python" in found["environment"]


def test_a_table_is_put_between_its_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- a -->\nold\n<!-- end -->\nafter\n")
    for text in ("| new |", "| newer |"):
        script.put(page, "<!-- a -->", "<!-- end -->", text)
        assert page.read_text() == f"before\n<!-- a -->\n{text}\n<!-- end -->\nafter\n"
    with pytest.raises(UsageError, match="has no place for the table") as caught:
        script.put(page, "<!-- b -->", "<!-- end -->", "x")
    assert "<!-- b -->" in caught.value.cure


def test_the_most_memory_is_more_than_what_is_held():
    from netweight.metrics.memory import private_bytes

    assert script.peak_bytes() >= private_bytes()
