"""Rows of a label about a federation: what a server could reconstruct, the privacy budget, clients that were named.

All of it is read from the folder: the plan of `netweight federate run` or the history of a Flower server, and the
report that the run or `netweight federate audit` wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from netweight.core.quantities import many, percent
from netweight.errors import CorruptBlob, NetweightError
from netweight.labels.audit_commands import verdict_group
from netweight.labels.identify_subject import LabelSubject, canonical
from netweight.labels.label import Row, RowGroup
from netweight.report.finding import Finding, Section
from netweight.report.report import read_report
from netweight.report.verdict import decide, mark_of

_REPORT = "report.json"
_AUDIT = "netweight federate audit"
# The option of `netweight label` that requests this audit.
_OPTION = "--minutes"
# The table of a report that names clients.
_NAMED = "Clients left out or suspicious"


def federation_groups(subject: LabelSubject) -> list[RowGroup]:
    """Return the rows about a federation, and the verdict of its report.

    Args:
        subject: The folder of the federation.

    Raises:
        CorruptBlob: It holds a report that cannot be read.
    """
    sections = _sections_of(subject.path / _REPORT)
    rows = [
        *_plan_rows(subject),
        *_accuracy_rows(sections),
        *_audit_rows(sections, complete=_shows_privacy(subject, sections)),
        *_client_rows(subject, sections),
    ]
    basis = "the run's history" if "rounds" in subject.config and _is_history(subject) else "the run's plan"
    groups = [RowGroup(
        title="Federation", anchor="federation", rows=tuple(rows), basis=f"{basis} and report",
    )]  # fmt: skip
    return [*groups, verdict_group(decide(sections))] if sections else groups


def _is_history(subject: LabelSubject) -> bool:
    return isinstance(subject.config.get("rounds"), list)


def _sections_of(file: Path) -> Sequence[Section]:
    if not file.is_file():
        return ()
    try:
        return read_report(file.parent).sections
    except (NetweightError, ValueError) as error:
        raise CorruptBlob(f"{file} cannot be read: {error}", cure=f"Write it again: {_AUDIT} {file.parent}.") from None


def _plan_rows(subject: LabelSubject) -> Iterator[Row]:
    plan = subject.config
    yield Row(key="method", title="Method", value=canonical(plan.get("method", "not stated")))
    if _is_history(subject):
        rounds = [each for each in plan["rounds"] if isinstance(each, dict)]
        clients = {client for each in rounds for client in (each.get("after") or {})}
        yield Row(key="clients", title="Clients that reported", value=f"{len(clients):,}", number=len(clients))
        yield Row(key="rounds", title="Rounds", value=f"{len(rounds):,}", number=len(rounds))
    else:
        yield Row(key="clients", title="Clients", value=canonical(plan.get("clients", "not stated")))
        yield Row(key="rounds", title="Rounds planned", value=canonical(plan.get("rounds", "not stated")))


def _findings(sections: Sequence[Section], start: str) -> list[Finding]:
    return [each for section in sections for each in section.findings if each.name.startswith(start)]


def _accuracy_rows(sections: Sequence[Section]) -> Iterator[Row]:
    for each in _findings(sections, "accuracy of the personal model")[:1]:
        if each.value is not None:
            yield Row(
                key="accuracy", title="Accuracy of personal models", value=percent(float(each.value) / 100),
                number=float(each.value), unit="percent", basis=f"mean over {many(each.n or 0, 'client')}",
            )  # fmt: skip


def _shows_privacy(subject: LabelSubject, sections: Sequence[Section]) -> bool:
    """Return whether a report would show noise: one of a Flower server's history alone does not."""
    return bool(sections) and (not _is_history(subject) or bool(_findings(sections, "gradient recovered, ")))


def _audit_rows(sections: Sequence[Section], *, complete: bool) -> Iterator[Row]:
    yield from _reconstruction_rows(_findings(sections, "PSNR, "))
    yield from _gradient_rows(_findings(sections, "gradient recovered, "))
    yield from _text_rows(_findings(sections, "tokens recovered, "))
    budgets = _findings(sections, "ε of one ")
    if not complete and not budgets:
        yield Row(key="privacy", title="Privacy budget ε", value=_OPTION, state="not measured")
    elif not budgets:
        yield Row(key="privacy", title="Privacy budget ε", value="none: no noise is added", state="warning")
    for each in budgets:
        delta = each.detail.get("delta")
        if each.value is None:
            reasons = "; ".join(map(str, each.detail.get("caveats", ()))) or "the report states no reason"
            yield Row(key="privacy", title="Privacy budget ε", value="infinite", state="warning", basis=reasons)
        else:
            yield Row(
                key="privacy", title="Privacy budget ε", value=f"{float(each.value):.3g} at δ {delta:g}"
                if isinstance(delta, (int, float)) else f"{float(each.value):.3g}", number=float(each.value),
                basis=f"one {each.detail.get('unit', 'client')}, all rounds together", detail=dict(each.detail),
            )  # fmt: skip


def _reconstruction_rows(images: list[Finding]) -> Iterator[Row]:
    title = "Best reconstruction of an image"
    measured = [each for each in images if each.value is not None]
    if not measured:
        reason = next((str(each.detail["reason"]) for each in images if each.detail.get("reason")), _OPTION)
        yield Row(key="reconstruction", title=title, value=reason, state="not measured")
        return
    own = next((each for each in measured if each.target is not None), None)
    worst = max(measured, key=_value)
    shown = [("reconstruction", title, own or worst)]
    if own is not None and worst is not own:
        shown.append(("reconstruction_worst", "Best under other schedules", worst))
    for key, words, each in shown:
        yield Row(
            key=key, title=words, value=f"{_value(each):.1f} dB", number=_value(each), unit="dB",
            basis=f"{each.name}; mean of {many(each.n or 1, 'attacked update')}", strong=key == "reconstruction",
            state="warning" if mark_of(each) == "missed" else "measured",
        )  # fmt: skip
        if each.baseline is not None:
            guess = float(each.baseline)
            yield Row(
                key=f"{key}_guess", title="A guess without the update", value=f"{guess:.1f} dB", number=guess,
                unit="dB", indent=1,
            )  # fmt: skip


def _gradient_rows(gradients: list[Finding]) -> Iterator[Row]:
    """Return rows on the cosine between the update and the client's gradient, and that of the published average."""
    for each in gradients:
        if each.value is None or each.target is None:
            continue
        yield Row(
            key="gradient", title="Gradient in a client's update", value=f"cosine {_value(each):.2f}",
            number=_value(each), unit="cosine", basis=each.name,
            state="warning" if mark_of(each) == "missed" else "measured",
        )  # fmt: skip
        if each.baseline is not None:
            yield Row(
                key="gradient_aggregate", title="The same in the published sum", number=float(each.baseline),
                value=f"cosine {float(each.baseline):.2f}", unit="cosine", indent=1,
            )  # fmt: skip


def _value(finding: Finding) -> float:
    assert finding.value is not None
    return float(finding.value)


def _text_rows(texts: list[Finding]) -> Iterator[Row]:
    measured = [each for each in texts if each.value is not None]
    if measured:
        worst = max(measured, key=_value)
        yield Row(
            key="tokens", title="Tokens of a text recovered", value=percent(_value(worst)),
            number=100 * _value(worst), unit="percent", basis=worst.name,
            state="warning" if mark_of(worst) == "missed" else "measured",
        )  # fmt: skip


def _client_rows(subject: LabelSubject, sections: Sequence[Section]) -> Iterator[Row]:
    """Clients that rounds left out or named as suspicious."""
    if not sections and not _is_history(subject):
        yield Row(key="named", title=_NAMED, value=_OPTION, state="not measured")
        return
    tables = [table for section in sections for table in section.tables if table.title == _NAMED]
    clients = {str(row[0]) for table in tables for row in table.rows}
    if not sections:
        rounds = [each for each in subject.config["rounds"] if isinstance(each, dict)]
        clients = {
            str(client) for each in rounds for kind in ("refused", "suspects") for client in (each.get(kind) or {})
        }
    first = f": {', '.join(sorted(clients)[:5])}" if clients else ""
    yield Row(
        key="named", title=_NAMED, value=f"{len(clients)}{first}", number=len(clients),
        state="warning" if clients else "measured",
    )  # fmt: skip
