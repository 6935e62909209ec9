import pytest

from netweight.core import declared
from netweight.errors import NameNotFound, UsageError
from netweight.report import Column, Finding, Section, Table, audit, missing_audits, run_audits
from netweight.report.audit import audits_of, declare_audits, of_treatment
from netweight.report.report import Report


@pytest.fixture(autouse=True)
def empty_register(monkeypatch):
    monkeypatch.setattr(audit, "AUDITS", {})
    monkeypatch.setattr(declared, "AUDITS", audit.AUDITS)


def identity(subject, config, *, seed, progress):
    return Section("Identity", [Finding(f"{subject} {config}", seed, seeds=(seed,))])


def speed(subject, config, *, seed, progress):
    return Section("Speed", [Finding("speed", 2)])


def test_a_treatment_runs_its_audits_in_order_and_what_is_left_out_is_known():
    declare_audits("shrink", {"identity": identity, "images": None, "speed": speed})
    assert audits_of("shrink") == {"identity": identity, "speed": speed}
    found = run_audits("shrink", "model", "config", seed=3)
    assert list(found) == ["identity", "speed"]
    assert found["identity"].findings == (Finding("model config", 3, seeds=(3,)),)
    assert missing_audits("shrink", found) == ("images",)
    assert missing_audits("shrink", run_audits("shrink", 0, 0, seed=0, only=["speed"])) == ("identity", "images")


def test_an_audit_returns_a_section_and_the_report_says_what_did_not_run():
    table = Table("Sizes", ["name", Column("size", "MB")], [["a", 1.5]])

    def same(run, settings, *, seed, progress):
        return Section("Bit for bit", [Finding("same", True, target=True)], tables=[table], question="Is it?")

    declare_audits("shrink", {"identity": same, "speed": speed})
    section = run_audits("shrink", "model", None, seed=0)["identity"]
    assert section.tables == (table,)
    report = Report("t", environment={}).add(of_treatment(section, "shrink", ["identity"]))
    assert report.sections[0].missing_audits == ("speed",)


def test_no_treatment_without_an_audit():
    with pytest.raises(UsageError, match="Every treatment needs an audit"):
        declare_audits("shrink", {})


def test_wrong_names_are_answered_with_the_right_ones():
    declare_audits("shrink", {"identity": identity})
    with pytest.raises(NameNotFound, match="shrink"):
        audits_of("shrnk")
    with pytest.raises(NameNotFound, match="no audit 'speed'"):
        run_audits("shrink", 0, 0, seed=0, only=["speed"])


def test_a_second_declaration_is_refused_unless_it_is_the_same():
    declare_audits("shrink", {"identity": identity})
    declare_audits("shrink", {"identity": identity})
    with pytest.raises(UsageError, match="Declare it once"):
        declare_audits("shrink", {"identity": speed})
