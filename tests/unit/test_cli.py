"""The command line's conventions: exit codes, where messages go, JSON for machines."""

import functools
import json
import logging
import re
import shlex
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from netweight import cli, errors
from netweight.cli import output_option
from netweight.cli.generate import _Generated
from netweight.registry import commands


@pytest.fixture
def call():
    def invoke(*arguments):
        return CliRunner().invoke(cli.netweight, list(arguments))

    return invoke


@functools.cache
def help_of(name):
    """The answer to `netweight NAME --help`, which several tests read."""
    return CliRunner().invoke(cli.netweight, [*name.split(), "--help"])


EVERY = [*(name for name in cli.OWN if name != "publish"), *commands(), "space", "forget", "federate", "attack"]


@pytest.mark.parametrize("name", EVERY)
def test_every_command_exists_and_has_help(name):
    answer = help_of(name)
    assert answer.exit_code == 0
    assert answer.stdout.startswith(f"Usage: netweight {name}")
    if name in commands() and " " not in name:
        assert " ".join(commands()[name].line.split()) in " ".join(help_of("").stdout.split())


@pytest.mark.parametrize("name", list(commands()))
def test_every_registered_command_has_an_example_that_parses(name):
    """The options of an example exist, and it gives all that is required; the files of it need not."""
    registered = commands()[name]
    words = shlex.split(registered.example)
    assert words[: 1 + len(registered.words)] == ["netweight", *registered.words]
    command = _Generated(registered)
    for parameter in command.params:
        if isinstance(parameter.type, click.Path):
            parameter.type = click.STRING
    command.make_context(name, words[1 + len(registered.words) :])


def test_the_help_lists_what_needs_another_package_only_where_it_is_there(call, monkeypatch):
    assert "tour" in call("--help").stdout
    monkeypatch.setattr(cli, "_installed", lambda name: False)
    shown = call("--help").stdout
    assert not any(name in shown.split() for name in ("tour", "reproduce", "benchmark"))
    assert "needs the package netweight-toys" in call("tour").stderr


@pytest.mark.parametrize("name", ["", *(name for name in EVERY if name != "benchmark")])  # for clones, as its help says
def test_the_help_names_no_file_that_an_installation_lacks(name):
    """A wheel holds no pages; and the sentences of lists are whole."""
    shown = help_of(name).stdout
    assert not re.search(r"\bdocs/\S+", shown)
    assert not re.search(r"[a-z,]\.\.\.$", shown, re.M)


def test_the_help_imports_neither_torch_nor_pydantic():
    program = (
        "import sys\nfrom netweight.cli import netweight\n"
        "try:\n    netweight.main([{}])\nexcept SystemExit:\n    pass\n"
        "assert not {{'torch', 'pydantic', 'numpy', 'transformers'}} & set(sys.modules), sorted(sys.modules)"
    )
    for arguments in ("'--help'", "'space', '--help'", "'attack', '--help'"):
        subprocess.run([sys.executable, "-c", program.format(arguments)], check=True, capture_output=True)


def test_an_unknown_command_is_answered_with_the_nearest(call):
    answer = call("docto")
    assert answer.exit_code == 2
    assert "There is no command 'docto'. Nearest: doctor" in answer.stderr


def test_a_verbose_command_logs_and_says_where_an_error_comes_from(monkeypatch, call):
    @click.command()
    def trial():
        logging.getLogger("netweight.trial").info("under way")
        raise errors.UsageError("Broken.")

    named(monkeypatch, trial)
    monkeypatch.setattr(logging, "basicConfig", lambda **how: None)  # pytest has the root's handlers
    ours = logging.getLogger("netweight")
    level = ours.level
    try:
        answer = call("-v", "trial")
        assert ours.level == logging.INFO
    finally:
        ours.setLevel(level)
    assert answer.exit_code == 2
    assert "Traceback (most recent call last)" in answer.stderr
    assert answer.stderr.endswith("Error: Broken. [UsageError]\n")
    assert "Traceback" not in call("trial").stderr


@pytest.mark.parametrize("name", ["run", "report"])
def test_schemas_are_printed(call, name):
    assert json.loads(call(name, "--schema").stdout)["$schema"].startswith("https://json-schema.org")


def test_the_version(call):
    assert call("--version").stdout == f"netweight {cli.netweight_version()}\n"


def named(monkeypatch, command):
    """Put a command into the table under the name `trial`."""
    module = type(sys)("netweight_trial")
    module.trial = command
    monkeypatch.setitem(sys.modules, "netweight_trial", module)
    monkeypatch.setitem(cli.OWN, "trial", ("netweight_trial:trial", "Only for this test."))


@pytest.mark.parametrize("kind", [kind for kind in vars(errors).values() if isinstance(kind, type)])
def test_errors_become_messages_and_exit_codes(monkeypatch, call, kind):
    @click.command()
    @output_option
    def trial(output):
        raise kind("The thing is broken.", cure="Mend it.")

    named(monkeypatch, trial)
    answer = call("trial")
    assert answer.exit_code == kind.exit_code
    assert answer.exit_code in (2, 3)
    assert answer.stderr == f"Error: The thing is broken. Mend it. [{kind.__name__}]\n"
    assert answer.stdout == ""
    answer = call("trial", "--json")
    assert answer.exit_code == kind.exit_code
    assert json.loads(answer.stdout) == {
        "error": {"kind": kind.__name__, "message": "The thing is broken.", "cure": "Mend it."}
    }


def test_output_is_text_for_people_or_one_object_for_machines(monkeypatch, call):
    @click.command()
    @output_option
    def trial(output):
        output.line("hello")
        output.table(("name", "size"), [("a", 1), ("long", 1000)], indent=1)
        output.table(("name",), [])
        output.warn("careful")
        output.result({"greeting": "hello", "where": errors})

    named(monkeypatch, trial)
    answer = call("trial")
    assert answer.stdout == "hello\n name  size\n a        1\n long  1000\n"
    assert answer.stderr == "Warning: careful\n"
    answer = call("trial", "--json")
    assert json.loads(answer.stdout)["greeting"] == "hello"
    assert answer.stderr == "Warning: careful\n"


@pytest.mark.parametrize("words", [("--size", "x"), ("--sise", "1"), ("more",)])
def test_errors_of_usage_are_json_for_machines(words, monkeypatch, call):
    @click.command()
    @click.option("--size", type=int)
    @output_option
    def trial(output, size):
        raise AssertionError

    named(monkeypatch, trial)
    answer = call("trial", *words, "--json")
    assert answer.exit_code == 2
    error = json.loads(answer.stdout)["error"]
    assert (error["kind"], error["cure"]) == ("UsageError", None)
    assert error["message"] in answer.stderr
    assert call("trial", *words).stdout == ""


def test_a_command_that_is_interrupted_says_so_and_exits_with_130(monkeypatch, call):
    @click.command()
    @output_option
    def trial(output):
        raise KeyboardInterrupt

    named(monkeypatch, trial)
    answer = call("trial")
    assert (answer.exit_code, answer.stdout, answer.stderr) == (130, "", "Interrupted.\n")
    answer = call("trial", "--json")
    assert answer.exit_code == 130
    assert json.loads(answer.stdout)["error"]["kind"] == "Interrupted"


def test_a_bug_is_not_hidden(monkeypatch, call):
    @click.command()
    def trial():
        raise ZeroDivisionError

    named(monkeypatch, trial)
    assert isinstance(call("trial").exception, ZeroDivisionError)


def test_the_process_exits_with_the_code():
    program = "from netweight.cli import main; main(['run', 'no-such-recipe.yaml'])"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert answer.returncode == 2
    assert answer.stderr.startswith("Error: The recipe no-such-recipe.yaml could not be read")
    assert "Traceback" not in answer.stderr


def test_without_the_experiments_their_commands_say_where_they_are(monkeypatch, call):
    monkeypatch.setitem(sys.modules, "netweight_experiments", None)
    for name in ("reproduce", "benchmark"):
        result = call(name, "--help")
        assert result.exit_code == 2
        assert f"`netweight {name}` needs the package netweight-experiments" in result.output
        assert "pip install ./experiments" in result.output
