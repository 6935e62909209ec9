import json
import re

import jsonschema
import pytest
from report_under_test import findings, report_of_everything

from netweight.core import declared
from netweight.errors import UsageError
from netweight.report import Finding, audit
from netweight.report.audit import declare_audits
from netweight.report.finding import Chapter, Figure, Section, Table
from netweight.report.numbers import format_number
from netweight.report.page import render
from netweight.report.report import MAX_BYTES, Report, json_schema, parse_report, read_report, rewrite
from netweight.report.verdict import decide

pytest.importorskip("matplotlib", reason="matplotlib is in the evidence extra")


@pytest.fixture(scope="module")
def document():
    return report_of_everything()


@pytest.fixture(scope="module")
def page(document):
    return render(document)


def test_report_json_fits_its_schema_by_an_independent_validator(document):
    jsonschema.Draft202012Validator.check_schema(json_schema())
    data = json.loads(document.dump())
    jsonschema.validate(data, json_schema())
    data["sections"][0]["findings"][0]["value"] = "1.5"
    with pytest.raises(jsonschema.ValidationError, match=r"1\.5"):
        jsonschema.validate(data, json_schema())


def test_report_json_both_ways_loses_nothing(document):
    again = parse_report(document.dump(), where="here")
    assert again == document
    assert [repr(part) for part in again.sections[0].findings] == [repr(f) for f in findings()]
    assert render(again) == render(document)


def test_writing_leaves_two_files_and_the_page_can_be_made_again(tmp_path):
    page = report_of_everything().write(tmp_path / "new" / "folder")
    folder = page.parent
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "report.json"]
    before = page.read_text()
    page.unlink()
    assert rewrite(folder) == page
    assert page.read_text() == before
    assert read_report(folder).sections[0].title == "First"


def test_the_page_is_one_file_that_loads_nothing_and_runs_nothing(page):
    assert "<script" not in page.replace("&lt;script&gt;", "")
    assert not re.search(r"(src|href)=\"(?!#|data:)", page.replace('xlink:href="#', ""))
    assert not re.search(r"url\((?!#)", page)
    assert "default-src 'none'" in page
    assert "Mind &lt;b&gt;this&lt;/b&gt;." in page


def test_ids_are_unique_and_every_anchor_leads_somewhere(page):
    ids = re.findall(r"\bid=\"([^\"]+)\"", page)
    assert len(ids) == len(set(ids))
    for target in re.findall(r"href=\"#([^\"]+)\"", page):
        assert target in ids


def test_every_number_is_shown_with_interval_n_unit_seed_and_verdict_in_words(page):
    for text in ("1.512 to 1.514", "≥ 1.513", "✓ met", "✗ missed", "? not measured", "– no target", "seeds 1, 2."):
        assert text in page
    assert "123\u2009456\u2009789" in page
    assert "not a number" in page
    assert "1.000 × 10^\u22129" in page
    assert "xxh3-128:0f0f" in page
    assert "packages.torch" in page


def test_a_value_that_misses_its_target_is_never_shown_as_the_target(page):
    assert re.search(r"just missed.*?1\.51297?<", page, re.DOTALL)


def test_verdicts(document):
    verdict = decide(document.sections[0])
    kind, text = verdict.outcome, verdict.sentence
    assert kind == "failed"
    assert text == (
        "2 of 5 targets are missed: just missed is 1.51297 (target: at least 1.513); diverged loss is not a number "
        "nats (target: at most 3)."
    )
    assert (lambda v: (v.outcome, v.publish))(decide(document.sections[1])) == (
        "passed",
        "Publish, because the target is met.",
    )
    assert decide(document.sections[2]).outcome == "none"


def test_a_target_that_was_not_measured_fails(page):
    section = Report("t", environment={}).section("s", [Finding("x", None, target=1)]).sections[0]
    assert decide(section).publish == ("Do not publish: there is no verdict, because x could not be measured.")


def test_what_is_left_to_do_follows_from_the_findings():
    def left(*findings):
        page = render(Report("r").add(Section("s", findings)))
        return re.findall(r"<li>(.*?)</li>", page.partition('id="next"')[2].partition("</section>")[0])

    aimed = {"better": "higher", "target": 2.0}
    missed, met, absent = Finding("a", 1.0, **aimed), Finding("b", 3.0, **aimed), Finding("c", None, **aimed)
    assert left(met) == []
    assert left(missed, met) == ["Missed targets, to be met or to be stated in the model card: s: a."]
    assert left(absent) == ["Targets that were not measured: s: c."]
    assert left(Finding("d", 1.0, seeds=(5,))) == [
        "Runs to be repeated with other seeds: all findings are from one seed."
    ]
    assert left(Finding("d", 1.0, seeds=(5, 6))) == []
    many = [Finding(f"n{number}", 1.0, **aimed) for number in range(5)]
    assert left(*many)[0].endswith("s: n2; and 2 more.")


def test_a_treatment_without_its_audit_is_shown_in_red(monkeypatch):
    monkeypatch.setattr(audit, "AUDITS", {})
    monkeypatch.setattr(declared, "AUDITS", audit.AUDITS)
    declare_audits("shrink", {"identity": None, "speed": None})
    fine = [Finding("x", 1.0, target=(0, 2))]
    report = Report("t", environment={}).section("s", fine, treatment="shrink", audits=["identity"])
    document = report
    assert decide(document.sections[0]).publish.startswith("No verdict, because audits were left out: shrink (speed)")
    page = render(document)
    assert page.count('class="warning"') == 2  # in the summary and in the section
    assert "Not all audits of this treatment were run. Missing: speed." in page
    full = Report("t", environment={}).section("s", fine, treatment="shrink", audits=["identity", "speed"])
    assert 'class="warning"' not in render(full)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data.update(surprise=1), "surprise"),
        (lambda data: data.pop("title"), "title"),
        (lambda data: data.update(netweight_report=2), "netweight_report"),
        (lambda data: data["sections"][1]["findings"][0].update(passed=False), "contradicts its numbers"),
        (lambda data: data["sections"][0]["tables"][0]["rows"].append([1]), "Table 'Wide': row 2"),
    ],
)
def test_a_report_json_that_does_not_fit_is_refused_with_the_place(tmp_path, document, change, says):
    data = json.loads(document.dump())
    change(data)
    (tmp_path / "report.json").write_text(json.dumps(data))
    with pytest.raises(UsageError, match=says):
        rewrite(tmp_path)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"])
def test_a_report_json_that_is_none_is_refused(tmp_path, content):
    (tmp_path / "report.json").write_bytes(content)
    with pytest.raises(UsageError, match=r"report\.json"):
        rewrite(tmp_path)


def test_a_missing_report_is_named(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        rewrite(tmp_path)


@pytest.mark.parametrize(
    "svg",
    [
        "<svg><script>1</script></svg>",
        '<svg><rect onload="1"/></svg>',
        '<svg><image href="http://x"/></svg>',
        '<svg><image xlink:href="data:image/svg+xml;base64,AAAA"/></svg>',
        '<svg><image xlink:href="data:image/png;base64,AAAA" onload="1"/></svg>',
        '<svg><use xlink:href="http://x"/></svg>',
        '<svg><rect style="fill:url(http://x)"/></svg>',
        "<svg><style>@import 'x'</style></svg>",
        "<p>text</p>",
    ],
)
def test_an_svg_that_could_run_or_load_something_is_refused(svg):
    report = Report("t", environment={}).section("s", [], figures=[Figure("svg", svg, "a")])
    with pytest.raises(UsageError, match="SVG figure"):
        render(report)


def test_a_page_above_the_limit_is_refused_and_nothing_is_written(tmp_path):
    figure = Figure("png", "A" * (MAX_BYTES + 1), "too large")
    with pytest.raises(UsageError, match=r"more than 5\.00 MB"):
        Report("t", environment={}).section("s", [], figures=[figure]).write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_sections_and_tables_that_cannot_be_are_refused():
    report = Report("t", environment={}).section("s", [])
    with pytest.raises(UsageError, match="'s'"):
        report.section("s", [])
    with pytest.raises(UsageError, match="Table 'x'"):
        report.section("other", [], tables=[Table("x", ["a", "b"], [[1]])])


def test_the_environment_of_this_machine_is_the_default():
    provenance = Report("t").section("s", [Finding("x", 1, seeds=(4, 2))]).provenance
    assert provenance.seeds == (2, 4)
    assert provenance.environment["python"]
    assert provenance.environment["codec_path"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (True, "yes"),
        (-1234567, "\u22121\u2009234\u2009567"),
        (0.0, "0.000"),
        (0.0123456, "0.01235"),
        (0.5, "0.5000"),
        (12.3456, "12.35"),
        (123456.7, "123\u2009457"),
        (1.5e-9, "1.500 × 10^\u22129"),
        (float("inf"), "∞"),
        ("text", "text"),
    ],
)
def test_numbers_for_people(value, text):
    assert format_number(value) == text


def chapter(title="method", **changes):
    known = {"question": "What?", "conclusion": "That <b>.", "verdict": "Broken by it.", "outcome": "broken"}
    return Chapter(title=title, command="netweight x", **{**known, **changes})


def test_chapters_gather_sections_and_head_the_summary(tmp_path):
    finding = Finding("told", 2, command="netweight x", seeds=(1,))
    report = Report("Two", environment={}).chapter(chapter("one")).section("a", [finding])
    report.add(Section("b", chapter="elsewhere")).chapter(chapter("two", outcome="holds"))
    page = report.section("c", [Finding("other", 1, command="netweight y")]).write(tmp_path).read_text()
    document = read_report(tmp_path)
    assert [section.chapter for section in document.sections] == ["one", "one", "two"]
    assert page.count("✗ Broken by it.") == 2  # in the summary and above the sections
    assert page.count("✓ Broken by it.") == 2
    assert "That &lt;b&gt;." in page
    assert page.count("netweight x") == 2  # once per chapter, and not again with each finding
    assert page.count("netweight y") == 1
    assert rewrite(tmp_path).read_text() == page


def test_sections_outside_of_chapters_are_refused():
    with pytest.raises(UsageError, match="before its first chapter"):
        Report("Two").section("a", []).chapter(chapter())
    with pytest.raises(UsageError, match="second chapter"):
        Report("Two").chapter(chapter()).chapter(chapter())
    document = Report("Two", environment={}).chapter(chapter()).section("a", [])
    text = document.dump().replace('"chapter": "method"', '"chapter": "none"')
    with pytest.raises(UsageError, match="does not belong to a chapter"):
        parse_report(text, where="it")
