"""`netweight label --minutes`: audits that run the model, what did not fit, rows of federations, the verdict."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import warm
from click.testing import CliRunner

pytest.importorskip("transformers", reason="transformers is in the llm extra")

from tiny_llama import write

import netweight
from netweight.cli import netweight as command
from netweight.errors import UsageError
from netweight.labels import audit_process
from netweight.labels.audit_commands import AUDITS, OPTIONS
from netweight.labels.audit_process import AuditEnd
from netweight.registry import command as command_of
from netweight.report.finding import Finding, Section, Table
from netweight.report.report import Report
from netweight.report.verdict import decide
from netweight.tour import write_ciphers
from netweight.toys import checkpoint
from netweight.toys.language import cipher_world
from netweight.toys.shapes import ShapesWorld


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """The aligned miniature and prompts that it refuses and answers."""
    world, folder = cipher_world(), tmp_path_factory.mktemp("labels")
    world.save(folder / "model")
    decode = world.language.tokenizer.decode
    for name, domain in (("refused", "guard"), ("ordinary", "keep")):
        rows = [
            {"prompt": decode(list(one.prompt)), "response": decode(list(one.response[:-1]))}
            for one in world.examples(domain, 24, 0)
        ]
        write(folder / f"{name}.jsonl", rows)
    return folder


@pytest.fixture
def here(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return case


class Forked:
    """`subprocess.Popen` as audits use it, for a process that begins with the libraries imported."""

    def __init__(self, words, **how):
        assert (words[:2], how["start_new_session"]) == ([sys.executable, "-m"], True)
        self.module = words[2]

    def communicate(self, order, timeout):
        program = f"import io, os, runpy, sys; os.setsid(); sys.stdin = io.StringIO({order!r})"
        self.running = warm.start("-c", f"{program}; runpy.run_module({self.module!r}, run_name='__main__')")
        self.pid, self.wait = self.running.pid, self.running.wait
        self.wait(timeout)

    @property
    def returncode(self):
        return self.running.returncode


@pytest.fixture
def forked(monkeypatch):
    """Let audits be forks: where it is not their start that is tested."""
    monkeypatch.setattr(audit_process, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Forked}))


def rows_of(case):
    return {"refused": str(case / "refused.jsonl"), "ordinary": str(case / "ordinary.jsonl")}


def test_every_option_is_a_setting_of_the_command_that_it_is_handed_to():
    for audit in AUDITS:
        fields = command_of(audit.command).settings_class.model_fields
        assert {*audit.needs, *audit.takes, *audit.settings, *([audit.chat] if audit.chat else [])} <= set(fields)
        assert {*audit.needs, *audit.takes} <= set(OPTIONS)


def test_an_audit_fills_rows_and_decides(here, forked):
    words = [f"--{name}={path}" for name, path in rows_of(here).items()]
    ran = CliRunner().invoke(command, ["label", str(here / "model"), "--minutes", "20", *words, "--json"])
    assert ran.exit_code == 1, ran.output  # the miniature's refusal does not last
    label = netweight.Label.from_json(json.loads(ran.stdout)["label"])
    assert label.row("refusals").number == 100
    left = label.row("refusals_left")
    assert left.state == "warning"
    assert left.number < 90
    assert label.row("verdict").value.startswith("Do not publish, because the target is missed: ")
    assert [row.key for group in label.groups if group.anchor == "not-measured" for row in group.rows] == [
        "retraining", "base",
    ]  # fmt: skip
    again = netweight.label(here / "model", minutes=20, **rows_of(here))  # continues from what the first call kept
    assert again.row("refusals_left") == left


def test_what_does_not_fit_is_named_and_fails(here):
    label = netweight.label(here / "model", minutes=0.01, **rows_of(here))
    row = label.row("refusals")
    assert row.state == "not measured"
    assert row.value.startswith("did not fit in 0.01 minutes")
    assert label.row("verdict").value.startswith("Do not publish: there is no verdict, because refusals could")


def test_an_audit_that_fails_is_named_with_its_reason(here, forked):
    write(here / "few.jsonl", [{"prompt": "keep: a"}] * 20)
    label = netweight.label(here / "model", minutes=20, refused=here / "few.jsonl", ordinary=here / "ordinary.jsonl")
    assert label.row("refusals").state == "not measured"
    assert label.row("refusals").value.startswith("failed: ")


BY_KEY = {audit.key: audit for audit in AUDITS}


@pytest.fixture
def attacked(here):
    """Rows of the behavior that the miniature was aligned against, as `netweight init` writes them."""
    write_ciphers(here, pairs=8, attacked=96, seed=0)
    return here


def test_a_fine_tuning_attack_fills_rows_beside_the_base(attacked):
    """As it is typed: the label's own attack, which is as strong on the same model as its own base."""
    words = ["--harmful", str(attacked / "harmful.jsonl"), "--benign", str(attacked / "keep.jsonl")]
    model = str(attacked / "model")
    ran = CliRunner().invoke(command, ["label", model, "--base", model, *words, "--minutes", "20", "--json"])
    assert ran.exit_code == 1, ran.output
    label = netweight.Label.from_json(json.loads(ran.stdout)["label"])
    assert label.row("retraining").unit == "steps"
    assert 0 < label.row("retraining").number <= 40  # the threshold comes from the first 32 steps on the base
    assert label.row("retraining_base").number == label.row("retraining").number
    assert label.row("retraining").state == "warning"
    assert "LoRA" in label.row("retraining").basis
    assert label.row("verdict").value.startswith("Do not publish, because")
    assert "refusals" in [row.key for row in label.rows if row.state == "not measured"]


UNBROKEN = Section("s", [Finding(
    "resistance, defended", None, better="higher", target=3.0, control="held", detail={"reason": "neither recovered"}
)])  # fmt: skip


def resistance(steps, base, control="broken"):
    """The findings of a fine-tuning attack from which a label makes its rows."""
    name = "steps to recover, best attack"
    found = [Finding(f"{name}, defended", steps, baseline=base, detail={"attack": "adam", "reason": "no attack ran"})]
    if base is not None:
        ratio = steps / base if steps is not None else None
        found.append(Finding("resistance, defended", ratio, better="higher", target=3.0, control=control))
    return AuditEnd("ended", sections=(Section("s", found),))


@pytest.mark.parametrize(
    ("end", "value", "state"),
    [
        (resistance(40, 10), "40 steps", "measured"),
        (resistance(20, 10), "20 steps", "warning"),
        (resistance(float("inf"), 10), "not recovered", "measured"),
        (resistance(40, None), "no control: 40 steps, with nothing to compare", "not measured"),
        (resistance(40, 10, control="held"), "no control: the same attacks did not recover", "not measured"),
        (resistance(None, None), "no attack ran", "not measured"),
        (AuditEnd("ended"), "no attack was measured", "not measured"),
        (AuditEnd("ended", sections=(*resistance(math.inf, None).sections, UNBROKEN)), "neither", "not measured"),
    ],
)
def test_steps_are_shown_beside_a_control_alone(end, value, state):
    row = BY_KEY["retraining"].rows(end)[0]
    assert row.value.startswith(value)
    assert row.state == state


def test_memorized_prompts_of_a_pipeline_are_counted_beside_ordinary_ones(tmp_path, monkeypatch, forked):
    pytest.importorskip("diffusers", reason="diffusers is in the diffusion extra")
    monkeypatch.chdir(tmp_path)
    world = ShapesWorld()
    memorized = [world.planted[number].caption for number in (0, 3)]
    ordinary = world.ordinary_captions
    (tmp_path / "prompts.txt").write_text("\n".join([*memorized, *ordinary[48:56]]) + "\n")
    (tmp_path / "ordinary.txt").write_text("\n".join(ordinary[:48]) + "\n")
    words = ["--prompts", "prompts.txt", "--ordinary", "ordinary.txt", "--minutes", "20", "--json"]
    ran = CliRunner().invoke(command, ["label", str(checkpoint("shapes-diffusion")), *words])
    label = netweight.Label.from_json(json.loads(ran.stdout)["label"])
    row = label.row("memorized")
    assert row.value == f"{row.number:g} of 10"
    assert 2 <= row.number <= 5  # both, and few ordinary ones
    assert row.state == "warning"
    assert 0 < label.row("memorized_ordinary").number < 25
    assert ran.exit_code == 0, ran.output  # a number of prompts has no target


@pytest.mark.parametrize(
    ("flagged", "below", "state"),
    [(3, 0.8, "warning"), (2, 0.8, "measured"), (0, 1.0, "measured"), (1, 1.0, "warning")],
)
def test_memorized_prompts_deserve_attention_where_they_are_more_than_of_ordinary_ones(flagged, below, state):
    prompts = [{"memorized": number < flagged} for number in range(10)]
    rows = BY_KEY["memorized"].rows(
        AuditEnd("ended", payload={"prompts": prompts, "threshold": {"prompts_below": below}})
    )
    assert rows[0].state == state
    assert rows[1].number == pytest.approx(100 * (1 - below))


def test_memorized_prompts_without_a_control_are_not_measured():
    (row,) = BY_KEY["memorized"].rows(AuditEnd("ended", payload={"prompts": [{"memorized": True}], "threshold": {}}))
    assert row.state == "not measured"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"refused": "refused.jsonl", "ordinary": "ordinary.jsonl"}, "Give --minutes"),
        ({"minutes": 1}, "Give --refused and --ordinary or --harmful and --base"),
        ({"minutes": 1, "refused": "refused.jsonl"}, "Also give --ordinary"),
        ({"minutes": 1, "harmful": "refused.jsonl"}, "Also give --base"),
        ({"minutes": 1, "prompts": "refused.jsonl"}, "--prompts is for a pipeline"),
        ({"minutes": 1, "refused": "none.jsonl", "ordinary": "ordinary.jsonl"}, "none.jsonl"),
    ],
)
def test_rows_that_no_audit_can_use_are_refused_before_any_work(here, given, words):
    given = {name: str(here / value) if isinstance(value, str) else value for name, value in given.items()}
    with pytest.raises(UsageError, match=words):
        netweight.label(here / "model", **given)


def federation(folder, sections):
    folder.mkdir()
    (folder / "federation.json").write_text(json.dumps({"method": "hyperfl", "clients": 3, "rounds": 2}))
    report = Report("Federation")
    for section in sections:
        report.add(section)
    report.write(folder)


def test_a_federation_shows_what_its_report_says(tmp_path):
    inverted = Section(
        "Exposure to the server",
        [
            Finding("gradient recovered, 5 steps (this run)", 0.4, unit="cosine", better="lower", target=0.3,
                    baseline=0.2),
            Finding("PSNR, 5 steps (this run)", 11.5, n=2, unit="dB", better="lower", target=16.0, baseline=13.0),
            Finding("PSNR, 1 step of batch 1", 31.25, n=2, unit="dB", better="lower", baseline=13.0),
        ],
    )  # fmt: skip
    privacy = Section(
        "Differential privacy", [Finding("ε of one client, replaced", 8.0, better="lower", detail={"delta": 1e-5})]
    )
    named = Section(
        "Accuracy", [Finding("rounds", 2)],
        tables=[Table("Clients left out or suspicious", ("client", "reason", "rounds", "first round"),
                      [("2", "left out: not finite", 1, "1")])],
    )  # fmt: skip
    federation(tmp_path / "run", [named, privacy, inverted])
    label = netweight.label(tmp_path / "run")
    assert label.row("reconstruction").number == 11.5
    assert label.row("reconstruction_guess").number == 13
    assert label.row("reconstruction_worst").number == 31.25
    assert label.row("gradient").state == "warning"
    assert label.row("privacy").value == "8 at δ 1e-05"
    assert label.row("named").value == "1: 2"
    assert label.row("verdict").value == decide([named, privacy, inverted]).publish


def test_a_federation_without_a_report_was_not_measured(tmp_path):
    (tmp_path / "federation.json").write_text(json.dumps({"method": "fedavg"}))
    label = netweight.label(tmp_path)
    assert {row.key for row in label.rows if row.state == "not measured"} == {"reconstruction", "privacy", "named"}


def test_the_history_of_a_flower_server_is_a_federation(tmp_path):
    rounds = [{"round": 1, "after": {"0": 0.5, "1": 0.75}, "refused": {"2": "its update is not finite"}}]
    (tmp_path / "history.json").write_text(json.dumps({"method": "fedavg", "config": {}, "rounds": rounds}))
    label = netweight.label(tmp_path)
    assert label.row("clients").number == 2
    assert label.row("named").value == "1: 2"
    assert label.row("reconstruction").state == "not measured"
    report = Report("Federation over Flower")
    report.add(Section("Accuracy", [Finding("rounds", 1)]))  # as `federate report` writes it, from the history alone
    report.write(tmp_path)
    assert netweight.label(tmp_path).row("privacy").state == "not measured"


CHILD = (
    "import sys, time; from netweight.labels.audit_process import end_with_parent; end_with_parent(int(sys.argv[1])); "
    "time.sleep(60)"
)
PARENT = (
    "import os, subprocess, sys, time; "
    f"print(subprocess.Popen([sys.executable, '-c', {CHILD!r}, str(os.getpid())]).pid, flush=True); time.sleep(60)"
)


def _is_alive(process):
    """Return whether a process still runs; one that has ended and waits for its new parent does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere a process does not learn this at once")
def test_a_killed_label_leaves_no_audit_running():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        parent.kill()
    for _ in range(300):
        if not _is_alive(child):
            return
        time.sleep(0.1)
    pytest.fail("the child lives on")
