import pytest

from netweight.errors import NameNotFound, UsageError
from netweight.report import (
    Column,
    Finding,
    Section,
    Table,
    audit,
    missing_audits,
    register_audit,
    register_treatment,
    run_audits,
)
from netweight.report.audit import of_treatment
from netweight.report.report import Report


@pytest.fixture(autouse=True)
def empty_register(monkeypatch):
    monkeypatch.setattr(audit, "_NAMED", {})
    monkeypatch.setattr(audit, "_AUDITS", {})


def test_a_treatment_runs_its_audits_in_order_and_what_is_left_out_is_known():
    register_treatment("shrink", audits=("identity", "speed"))

    @register_audit("shrink", "identity")
    def identity(subject, config, *, seed, progress):
        return [Finding(f"{subject} {config}", seed, seeds=(seed,))]

    assert audit.unwritten_audits("shrink") == ("speed",)
    register_audit("shrink", "speed")(lambda subject, config, *, seed, progress: [Finding("speed", 2)])
    assert audit.unwritten_audits("shrink") == ()
    found = run_audits("shrink", "model", "config", seed=3)
    assert list(found) == ["identity", "speed"]
    assert found["identity"].findings == (Finding("model config", 3, seeds=(3,)),)
    assert missing_audits("shrink", found) == ()
    assert missing_audits("shrink", run_audits("shrink", 0, 0, seed=0, only=["speed"])) == ("identity",)


def test_an_audit_returns_a_section_and_the_report_says_what_did_not_run():
    register_treatment("shrink", audits=("identity", "speed"))
    table = Table("Sizes", ["name", Column("size", "MB")], [["a", 1.5]])

    @register_audit("shrink", "identity")
    def identity(run, settings, *, seed, progress):
        return Section("Bit for bit", [Finding("same", True, target=True)], tables=[table], question="Is it?")

    section = run_audits("shrink", "model", None, seed=0)["identity"]
    assert section.tables == (table,)
    report = Report("t", environment={}).add(of_treatment(section, "shrink", ["identity"]))
    assert report.sections[0].missing_audits == ("speed",)


def test_no_treatment_without_an_audit():
    with pytest.raises(UsageError, match="No treatment without its audit"):
        register_treatment("shrink", audits=())


def test_wrong_names_are_answered_with_the_right_ones():
    register_treatment("shrink", audits=("identity",))
    with pytest.raises(NameNotFound, match="shrink"):
        audit.audits_of("shrnk")
    with pytest.raises(NameNotFound, match="identity"):
        register_audit("shrink", "identty")
    with pytest.raises(NameNotFound, match="no audit 'speed'"):
        run_audits("shrink", 0, 0, seed=0, only=["speed"])


def test_a_second_registration_is_refused_unless_it_is_the_same():
    register_treatment("shrink", audits=("identity",))
    register_treatment("shrink", audits=("identity",))
    with pytest.raises(UsageError, match="Declare it once"):
        register_treatment("shrink", audits=("other",))

    def identity(subject, config, *, seed, progress):
        return []

    register_audit("shrink", "identity")(identity)
    register_audit("shrink", "identity")(identity)
    with pytest.raises(UsageError, match="twice"):
        register_audit("shrink", "identity")(lambda *_, **__: [])
