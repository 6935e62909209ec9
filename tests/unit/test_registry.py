"""One registration serves the command line, recipes, their schema and Python."""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import toy_treatment
from click.testing import CliRunner
from pydantic import Field

import netweight
from netweight import cli
from netweight.core.lazy import Lazy, import_named
from netweight.errors import NameNotFound, UsageError
from netweight.recipes import Plan, read_recipe, recipe_schema, run
from netweight.registry import (
    DESTINATION,
    SOURCE,
    Argument,
    Attack,
    Command,
    Context,
    Method,
    Result,
    Target,
    commands,
    known_attacks,
    known_methods,
)
from netweight.report.finding import Finding, Section
from netweight.settings import Settings


class GuessSettings(Settings):
    """How letters are guessed."""

    letter: str = Field("a", description="What is guessed.")


SEEN: list[Target] = []


def guess(target, settings, progress):
    SEEN.append(target)
    held = settings.letter in target.model.read_text()
    return [
        Section("Letters", [Finding("guessed", held, target=False)]),
        Section("Size", [Finding("letters", len(target.model.read_text()))]),
    ]


GUESS = Attack("guess", GuessSettings, attack=guess, summary="Guess a letter.", title="Letters")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("subject").write_text("abc")
    SEEN.clear()
    toy_treatment.CALLS.clear()
    with toy_treatment.registered(GUESS):
        yield


def test_an_attack_is_a_command_a_recipe_verb_and_a_call():
    answer = CliRunner().invoke(
        cli.netweight, ["attack", "guess", "subject", "--letter", "b", "--out", "one", "--json"]
    )
    assert answer.exit_code == 1
    by_command = json.loads(answer.stdout)["findings"]
    result = netweight.command("attack guess")("subject", out="two", letter="b", seed=3)
    assert [finding.to_json() for section in result.sections for finding in section.findings] == by_command
    assert [target.seed for target in SEEN] == [0, 3]
    assert all((Path(folder) / "report.html").is_file() for folder in ("one", "two"))
    Path("recipe.yaml").write_text("subject: subject\nattacks: [guess: {letter: b}]\noutput: out\n")
    (done,) = run(Plan.of(read_recipe("recipe.yaml")))
    assert [finding.to_json() for each in done.findings.values() for finding in each] == by_command
    assert done.failed
    assert CliRunner().invoke(cli.netweight, ["run", "recipe.yaml"]).exit_code == 1
    assert "guess" in recipe_schema()["$defs"]


def test_a_method_is_called_in_python_as_on_the_command_line():
    result = netweight.command("repeat")("subject", "new", times=3)
    assert Path("new").read_text() == "abcabcabc"
    assert toy_treatment.CALLS == ["repeat", "length", "start"]
    assert [section.title for section in result.sections] == ["Length", "Start"]
    assert netweight.command("repeat")("subject", "other", audit=False).sections == ()


@pytest.mark.parametrize("audited", [True, False, None])
@pytest.mark.parametrize("audits_itself", [True, False])
def test_the_check_of_a_method_runs_whatever_the_audits(audited, audits_itself):
    ran = []
    checked = Method(
        "checked", toy_treatment.RepeatConfig, None, {"length": toy_treatment.length}, check=toy_treatment.check,
        run=lambda settings, context, source, destination, **rest: ran.append(source),
        audited=audited, audits_itself=audits_itself,
    )  # fmt: skip
    with pytest.raises(UsageError, match="Nothing is repeated 13 times"):
        checked("subject", "new", times=13)
    assert ran == []


def test_a_check_takes_the_arguments_of_the_command_that_it_names():
    seen = []
    method = Method(
        "named", toy_treatment.RepeatConfig, toy_treatment.repeat, {"length": None}, checked_arguments=("bank",),
        check=lambda source, settings, bank="that of a recipe": seen.append((source, bank)),
        run=lambda settings, context, source, destination, bank: Result(),
        arguments=(SOURCE, DESTINATION, Argument("bank", "text", option="--bank", required=False)),
    )  # fmt: skip
    method("subject", "new", bank="moved")
    method.check(Path("subject"), toy_treatment.RepeatConfig())
    assert seen == [(Path("subject"), "moved"), (Path("subject"), "that of a recipe")]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: netweight.command("attack gues"), "attack guess"),
        (lambda: netweight.command("attack guess")("subject"), "needs the argument 'out'"),
        (lambda: netweight.command("attack guess")("subject", out="x", leter="b"), "leter"),
        (lambda: netweight.command("attack guess")("subject", "x", "y"), "takes 1 positional"),
        (lambda: netweight.command("attack guess")("absent", out="x"), "There is no file or folder absent"),
    ],
)
def test_what_cannot_be_is_refused(call, says):
    with pytest.raises((UsageError, NameNotFound), match=says):
        call()


def test_both_lists_of_attacks_are_one():
    own = [point.name for point in entry_points(group="netweight.attacks") if point.dist.name == "netweight"]
    assert sorted(own) == [
        "embedding", "finetune", "gradient-inversion", "images", "refusal", "safeguards", "server"
    ]  # fmt: skip
    listed = CliRunner().invoke(cli.netweight, ["attack", "--help"]).stdout
    for verb in own:
        assert isinstance(known_attacks()[verb], Attack)
        assert f"attack {verb}" in commands()
        assert f"  {verb} " in listed


def test_every_registration_leads_somewhere():
    for registered in commands().values():
        for value in vars(registered).values():
            inner = list(value.values()) if isinstance(value, dict) else []
            for each in (value, *inner):
                if isinstance(each, Lazy):
                    assert each.value is not None, each.place
        assert registered.line.endswith("."), registered.name
        if isinstance(registered, Method):
            assert known_methods()[registered.verb] is registered


def test_a_command_without_settings_takes_arguments_alone():
    made = Command("plain", run=lambda context, **given: given, arguments=())
    assert made.run_on_paths(None, Context(), {"x": 1}) == {"x": 1}
    with pytest.raises(UsageError, match="has no argument 'y'"):
        made(y=2)


OWN = {
    "mine.py": "def make():\n    return 1\nclass Deep:\n    value = 2\n",
    "needy.py": "import surely_not_installed_anywhere\n",
    "failing.py": "raise RuntimeError('on import')\n",
}


@pytest.fixture
def modules(tmp_path):
    for name, text in OWN.items():
        Path(name).write_text(text)
    program = (
        "import sys\nfrom netweight.core.lazy import import_named\n"
        "try:\n    print(import_named(sys.argv[1], 'It'))\nexcept Exception as error:\n    print(error)"
    )

    def ask(name):
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        command = [sys.executable, "-P", "-c", program, name]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout

    return ask


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mine:make", "<function make"), ("mine:Deep.value", "2"),
        ("mine.make", "is not of the form MODULE:NAME"), ("mine:", "is not of the form MODULE:NAME"),
        ("absent:make", "there is no module 'absent' in"), ("mine:other", "mine has no 'other'"),
        ("needy:make", "needy needs surely_not_installed_anywhere, which is not installed"),
        ("failing:make", "RuntimeError in failing: on import"),
    ],
)  # fmt: skip
def test_modules_of_ones_own_are_found_in_the_current_folder(modules, name, says):
    text = modules(name)
    assert says in text
    assert ("MODULE:NAME" in text) == ("MODULE:NAME" in says)


def test_named_things_are_imported_here_too(monkeypatch, tmp_path):
    Path("mine_too.py").write_text("value = 5\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert import_named("mine_too:value", "It") == 5
