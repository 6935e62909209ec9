"""Sections as text: for the terminal and for model cards; what is left out for a single sample."""

import math

from netweight.report.finding import Finding, Section
from netweight.report.page import render
from netweight.report.report import Report
from netweight.report.text import aligned, finding_row, render_markdown

FINDINGS = [
    Finding("ratio", 1.5131, ci95=(1.512, 1.514), n=7, better="higher", target=1.5),
    Finding("steps", math.inf, ci95=(40, math.inf), n=4, unit="steps"),
    Finding("one run", 0.25, ci95=(0.01, 0.91), n=1, better="lower", target=0.1),
    Finding("LPIPS", None, detail={"reason": "no backbone"}),
    Finding("weights", 22713216),
    Finding("equal", True, target=True),
]
SECTION = Section(
    "Smaller", FINDINGS, conclusion="It is.", treatment="shrink", missing_audits=["speed"], warnings=["!"]
)


def test_rows_for_the_terminal():
    assert [finding_row(each) for each in FINDINGS] == [
        ("ratio", "1.513", "95 %: 1.512 to 1.514  met"),
        ("steps", "∞ steps", "95 %: at least 40"),
        ("one run", "0.25", "MISSED"),
        ("LPIPS", "–", "not measured: no backbone"),
        ("weights", "22\u2009713\u2009216", ""),
        ("equal", "yes", "met"),
    ]


def test_numbers_are_aligned_to_the_right_and_texts_to_the_left():
    assert aligned(("name", "size"), [("a", 5), ("long", 10)], indent=1) == [
        " name  size",
        " a        5",
        " long    10",
    ]
    assert aligned(("name",), []) == []


def test_a_section_in_a_model_card():
    lines = render_markdown(SECTION)
    assert lines[:4] == ["**Audits left out**: shrink (speed).", "", "It is.", ""]
    assert "| ratio | 1.513 | 1.512 to 1.514 | 1.500 | met |" in lines
    assert "| one run | 0.2500 |  | 0.1000 | **missed** |" in lines
    assert render_markdown(Section("empty")) == []


def test_a_single_sample_has_no_interval_on_the_page_but_in_the_json():
    report = Report("t", environment={}).add(Section("s", FINDINGS[2:3]))
    assert "0.91" in report.dump()
    assert "0.9100" not in render(report)
    assert "0.2500" in render(report)
