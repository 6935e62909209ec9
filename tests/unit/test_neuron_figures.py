"""Localizations and matrices as pictures: heat maps, histograms, shared neurons, a section of a report."""

import json
import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netweight.core.names import Units
from netweight.errors import UsageError
from netweight.methods.forget.localize import Localization
from netweight.methods.forget.report import counts_figure, neurons, overlap, overlap_figure
from netweight.report.plots import heat_maps, histogram
from netweight.report.report import Report
from netweight_experiments.tables.nemo.neurons import clusters

pytest.importorskip("matplotlib", reason="matplotlib is in the evidence extra")


def localized(prompt, indices, status="resolved"):
    sets = {"a": sorted(index for index in indices if index < 10), "b": sorted(i - 10 for i in indices if i >= 10)}
    return Localization(prompt, status, Units(sets), sets, sets, refined_similarity=0.2, threshold=0.4)


def drawn(figure):
    root = ET.fromstring(figure.data)
    assert root[0].text == figure.alt
    return figure.data


def test_a_heat_map_holds_its_numbers_and_leaves_gaps():
    panels = {"first": [[1.25, None], [0.5, math.nan]], "second": [[3.0, 4.0], [5.0, 6.0]]}
    data = drawn(heat_maps(panels, rows=["r", "s"], columns=["c", "d"], alt="x", xlabel="across", ylabel="down"))
    for text in ("1.25", "0.50", "6.00", "first", "second", "across", "down"):
        assert f">{text}<" in data
    assert ">nan<" not in data
    assert "<image" not in data
    one = {"only": [[7.0]]}
    assert ">7<" in drawn(heat_maps(one, rows=["r"], columns=["c"], alt="x", digits=0))
    drawn(heat_maps({"none": [[None]]}, rows=["r"], columns=["c"], alt="x"))


def test_a_histogram_names_its_groups():
    data = drawn(histogram({"ones": [1, 1, 1], "none": [], "more": [2.5]}, alt="x", xlabel="size"))
    assert "ones (n = 3)" in data
    assert "none (n" not in data


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: heat_maps({"m": [[1.0]]}, rows=["r"], columns=["c", "d"], alt="x"), "1 rows of 2 numbers"),
        (lambda: heat_maps({}, rows=["r"], columns=["c"], alt="x"), "no matrix"),
        (lambda: histogram({"none": []}, alt="x"), "all of them finite"),
        (lambda: histogram({"some": [1.0, math.inf]}, alt="x"), "all of them finite"),
    ],
)
def test_what_cannot_be_drawn_is_refused(call, says):
    with pytest.raises(UsageError, match=says):
        call()


@given(st.lists(st.frozensets(st.integers(0, 19), max_size=5), max_size=12))
def test_clusters_part_the_prompts_that_have_neurons(sets):
    found = [localized(f"prompt {number}", indices) for number, indices in enumerate(sets)]
    parts = clusters(found)
    assert sorted(each.prompt for part in parts for each in part) == sorted(e.prompt for e in found if e.neurons)
    assert [len(part) for part in parts] == sorted((len(part) for part in parts), reverse=True)
    for part in parts:
        strangers = [each for other in parts if other is not part for each in other]
        assert all(overlap(each, stranger) < 0.5 for each in part for stranger in strangers)
        assert len(part) == 1 or all(any(overlap(e, o) >= 0.5 for o in part if o is not e) for e in part)


@given(st.frozensets(st.integers(0, 19)), st.frozensets(st.integers(0, 19)))
def test_overlap_is_that_of_sets(one, other):
    expected = len(one & other) / len(one | other) if one | other else 0
    assert overlap(localized("a", one), localized("b", other)) == pytest.approx(expected)


def test_a_section_shows_counts_layers_and_every_prompt(tmp_path):
    found = [
        localized("first", {1, 12}),
        localized("second", {1}, "unresolved"),
        localized("third", (), "not memorized"),
    ]
    report = Report("Neurons")
    report.add(neurons(found, layers=["a", "b"]))
    assert {each.name: each.value for each in report.findings}["different neurons of all prompts"] == 2
    report.write(tmp_path)
    (section,) = json.loads((tmp_path / "report.json").read_text())["sections"]
    assert len(section["figures"]) == 3
    assert [row[:2] for row in section["tables"][0]["rows"]] == [
        ["first", "resolved"], ["second", "unresolved"], ["third", "not memorized"],
    ]  # fmt: skip
    assert counts_figure({"none": [found[2]]}) is None
    assert overlap_figure([found[2]]) is None
