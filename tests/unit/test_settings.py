"""`Settings`: one declaration as Python argument, command line, YAML, JSON, schema, docs table and digest."""

import dataclasses
import json
import pickle
import re
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import click
import pytest
import yaml
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BeforeValidator, DirectoryPath, Field, FilePath, NewPath

from netweight.core.digests import canonical_json, digest_config
from netweight.errors import NameNotFound, UsageError
from netweight.settings import Cli, Settings, SettingsCommand, Variants, leaves, options

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is in the dev extra")

HERE = Path(__file__)
DOCS = HERE.parents[2] / "docs"
Positive = Annotated[float, Field(gt=0)]


class Look(Settings):
    """How predictions are compared."""

    steps: int = Field(50, ge=2, description="Steps of the schedule.")
    timing: Literal["paper", "code"] = Field("paper", description="Which timestep.")


class All(Settings):
    """Every kind of field.

    More about them.
    """

    rows: FilePath = Field(description="Rows to read.")
    count: int = Field(3, ge=1, description="How many.")
    rate: float = Field(2e-5, gt=0, lt=10, description="Learning rate.")
    plain: float = Field(0.5, description="A number.")
    limit: int | None = Field(None, ge=1, description="Most steps; all by default.")
    cap: float | None = Field(1.0, gt=0, description="Largest norm.")
    kind: Literal["fast", "slow"] = Field("fast", description="Which kind.")
    bits: Literal[4, 8] = Field(8, description="Bits.")
    name: str = Field("digits", description="A name.")
    label: Annotated[str | None, Cli(short="-l", metavar="WORD")] = Field(None, description="A label.")
    chat: bool = Field(False, description="Use the chat template.")
    audit: bool = Field(True, description="Audit at the end.")
    folder: DirectoryPath | None = Field(None, description="A folder.")
    target: Path = Field(Path("out"), description="Where to.")
    fresh: NewPath | None = Field(None, description="A file to be written.")
    withhold: tuple[str, ...] = Field((), description="Categories.")
    rates: Annotated[tuple[Positive, ...] | None, Cli(comma=True, metavar="LR,LR,...")] = Field(
        None, description="Rates in place of the grid's."
    )
    also: Mapping[str, DirectoryPath] = Field({}, description="Further models.")
    weights: Mapping[str, float] = Field({}, description="Weights by term.")
    moves: tuple[tuple[str, float], ...] = Field((), description="Directions with strengths.")
    either: Literal["all"] | tuple[str, ...] = Field("all", description="Names, or all.")
    inside: Annotated[int, Cli(own=False)] = Field(7, description="Rarely changed.")
    look: Look = Field(Look(steps=20), description="How predictions are compared.")


def command(kind, **more):
    """A command of these settings; what it received, and what click says."""
    received = []

    @click.command()
    @options(kind, **more)
    def run(settings):
        received.append(settings)

    def call(*arguments):
        received.clear()
        answer = CliRunner().invoke(run, [str(part) for part in arguments], terminal_width=200)
        if isinstance(answer.exception, UsageError):
            raise answer.exception
        return received[0] if received else answer.output

    return call


words = st.text(string.ascii_letters + string.digits + "_.", min_size=1, max_size=6)
floats = st.floats(-1e6, 1e6)
positive = st.floats(1e-9, 9.5)
paths = st.sampled_from([HERE.parent, HERE.parents[1]])
VALUES = {
    "rows": st.sampled_from([HERE, HERE.with_name("test_lean_import.py")]),
    "count": st.integers(1, 99),
    "rate": positive,
    "plain": floats,
    "limit": st.none() | st.integers(1, 99),
    "cap": st.none() | positive,
    "kind": st.sampled_from(["fast", "slow"]),
    "bits": st.sampled_from([4, 8]),
    "name": st.text(string.printable, min_size=1, max_size=8).filter(lambda text: not text.startswith("-")),
    "label": st.none() | words,
    "chat": st.booleans(),
    "audit": st.booleans(),
    "folder": st.none() | paths,
    "target": words.map(Path),
    "fresh": st.none() | st.just(HERE.with_name("is-not-there")),
    "withhold": st.lists(words, max_size=3).map(tuple),
    "rates": st.none() | st.lists(positive, min_size=1, max_size=3).map(tuple),
    "also": st.dictionaries(words, paths, max_size=2),
    "weights": st.dictionaries(words, floats, max_size=2),
    "moves": st.lists(st.tuples(words, floats), max_size=2).map(tuple),
    "either": st.just("all") | st.lists(words, max_size=2).map(tuple),
    "inside": st.integers(),
    "look": st.builds(Look, steps=st.integers(2, 99), timing=st.sampled_from(["paper", "code"])),
}
everything = st.fixed_dictionaries(VALUES).map(lambda values: All(**values))


def spelled(settings):
    """Command line arguments for settings: a field's own option where that can say its value, else --set."""
    plain = settings.to_json()
    for leaf in leaves(type(settings)):
        value = plain
        for name in leaf.path:
            value = value[name]
        if value == (leaf.field.default if leaf.path[0] != "look" else object()):
            continue
        if not leaf.cli.own or value in (None, [], {}) or leaf.place == "either":
            yield from ("--set", f"{leaf.place}={'null' if value is None else json.dumps(value)}")
        elif isinstance(value, bool):
            yield leaf.flag if value else leaf.flag.replace("--", "--no-")
        elif leaf.cli.comma:
            yield from (leaf.flag, ",".join(map(str, value)))
        elif isinstance(value, dict):
            for name, each in value.items():
                yield from (leaf.flag, f"{name}={each}")
        elif isinstance(value, list):
            for each in value:
                yield from (leaf.flag, *(each if isinstance(each, list) else [each]))
        else:
            yield from (leaf.flag, value)


def test_every_kind_of_field_has_a_strategy():
    assert list(VALUES) == list(All.model_fields)


@given(everything)
def test_settings_come_back_from_json_yaml_and_the_command_line(settings):
    plain = settings.to_json()
    assert All.of(json.loads(json.dumps(plain))) == settings
    assert All.of(yaml.safe_load(yaml.safe_dump(plain))) == settings
    assert command(All)(*spelled(settings)) == settings
    again = All.of(plain)
    assert hash(again) == hash(settings)
    assert again.digest() == settings.digest() == digest_config(settings)
    jsonschema.Draft202012Validator(All.json_schema()).validate(plain)


@given(everything, st.sampled_from(list(VALUES)), st.data())
def test_replace_changes_one_field_and_checks_it(settings, name, data):
    value = data.draw(VALUES[name])
    changed = settings.replace(**{name: value})
    assert getattr(changed, name) == value
    assert changed.replace(**{name: getattr(settings, name)}) == settings
    with pytest.raises(UsageError, match="count: must be at least 1, not 0"):
        settings.replace(count=0)


def test_the_digest_is_that_of_a_dataclass_with_the_same_fields():
    @dataclasses.dataclass(frozen=True)
    class Inner:
        steps: int = 50

    @dataclasses.dataclass(frozen=True)
    class Old:
        path: Path = Path("a/b")
        names: frozenset[str] = frozenset({"b", "a", "c"})
        rates: tuple[float, ...] = (1e-5, 1.0)
        most: int | None = None
        inner: Inner = Inner()
        by_name: Mapping[str, Path] = dataclasses.field(default_factory=lambda: {"x": Path("y")})

    class NewInner(Settings):
        steps: int = 50

    class New(Settings):
        path: Path = Path("a/b")
        names: frozenset[str] = frozenset({"b", "a", "c"})
        rates: tuple[float, ...] = (1e-5, 1.0)
        most: int | None = None
        inner: NewInner = NewInner()
        by_name: Mapping[str, Path] = {"x": Path("y")}

    assert digest_config(New()) == digest_config(Old())
    assert canonical_json({"step": [New()]}) == canonical_json({"step": [Old()]})
    assert New.of(New().to_json()) == New()


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(UsageError) as refused:
        All(rows="nothing", count=0, kidn="slow", look={"step": 3, "timing": "late"})
    assert str(refused.value).splitlines() == [
        "5 settings are wrong:",
        "  rows: 'nothing' is not an existing file.",
        "  count: must be at least 1, not 0.",
        "  look.timing: must be 'paper' or 'code', not 'late'.",
        "  look.step: there is no such key. Nearest: steps, timing.",
        "  kidn: there is no such key. Nearest: kind, plain.",
    ]
    with pytest.raises(UsageError, match=r"^treatments\.0\.all\.rows: is missing\.$"):
        All.of({}, where="treatments.0.all")
    with pytest.raises(UsageError, match=r"^treatments\.0\.all: must be a mapping of names to values"):
        All.of(3, where="treatments.0.all")
    problems = []
    assert All.checked({"rates": [1, 0]}, "a.", problems) is None
    assert problems == ["a.rows: is missing.", "a.rates.1: must be greater than 0, not 0."]


class Ordered(Settings):
    """Settings that must go together."""

    low: int = Field(0, description="Least.")
    high: int = Field(9, description="Most.")

    def check(self):
        """Refuse an empty range."""
        if self.low > self.high:
            raise NameNotFound("The range is empty.", cure="Give a lower low.")


class Holder(Settings):
    """Settings in settings."""

    range: Ordered = Field(Ordered(high=5), description="The range.")


def test_what_fields_must_satisfy_together():
    with pytest.raises(NameNotFound, match="The range is empty") as refused:
        Ordered(low=10)
    assert refused.value.cure == "Give a lower low."
    with pytest.raises(UsageError, match=r"^x\.range: The range is empty\. Give a lower low\.$"):
        Holder.of({"range": {"low": 6}}, where="x")  # the rest of a field's default stays
    with pytest.raises(UsageError, match=r"^range: The range is empty\. Give a lower low\.$") as alone:
        Holder(range={"low": 6})
    assert alone.value.cure == "Give a lower low."  # a program finds it apart from the reason
    assert Holder(range={"low": 4}).range == Ordered(low=4, high=5)
    assert Holder().replace(range={"low": 1}).range.high == 5


class Defense(Settings):
    """Settings of one defense."""


class Noise(Defense):
    """Turn representations to noise."""

    alpha: float = Field(1.0, ge=0)
    """Weight of the ascent."""
    lens_layers: int | None = Field(None, ge=0)
    """Layers;
    all by default."""
    fidelity: Literal["corrected", "reference"] = "corrected"
    """Whether the published code's numbers come out."""


class NoiseReference(Noise, defaults={"fidelity": "reference"}):
    """The published loss."""


class Vaccine(Defense, recommended={"lr": 1e-3}):
    """Perturb states while training."""

    rho: float = Field(1.0, gt=0)
    """Size of the perturbation."""


class Plain(Defense):
    """Train on harmless answers."""


DEFENSES = Variants(
    "defense", {name.__name__.lower(): f"{__name__}:{name.__qualname__}" for name in (Noise, Vaccine, Plain)}
)
DEFENSES.register("noise-reference", NoiseReference)


class Immunize(Settings):
    """Train a defense."""

    options_group = "Training"

    rows: Annotated[FilePath, Cli(group="Files")]
    """Pairs."""
    lr: float = Field(2e-5, gt=0)
    """Learning rate."""
    warmup: Annotated[float, Cli(own=False)] = Field(0.1, ge=0, le=1)
    """Share of the steps over which the rate rises."""
    defense: Annotated[Defense, DEFENSES] = Field("noise", validate_default=True)
    """Defense to train."""


class Several(Settings):
    """Settings that hold settings with variants."""

    first: Immunize


def test_a_variant_is_chosen_by_name_and_its_settings_lie_under_that_name():
    call = command(Immunize, arguments=("rows",))
    assert call(HERE) == Immunize(rows=HERE) == Immunize(rows=HERE, defense=Noise())
    assert call(HERE, "--set", "noise.lens_layers=8").defense == Noise(lens_layers=8)
    chosen = call(HERE, "--defense", "noise-reference", "--lr", "1", "--set", "noise-reference.alpha=2")
    assert chosen == Immunize(rows=HERE, defense=NoiseReference(alpha=2), lr=1)
    assert chosen.defense.fidelity == "reference"
    assert chosen == Immunize(rows=HERE, lr=1, defense="noise-reference", noise_reference={"alpha": 2})
    assert chosen.replace(noise_reference={"alpha": 3}).defense.alpha == 3
    assert chosen.replace(defense="plain").defense == Plain()
    assert chosen.to_json() == {
        "rows": HERE.as_posix(), "lr": 1.0, "warmup": 0.1, "defense": "noise-reference",
        "noise-reference": {"alpha": 2.0, "lens_layers": None, "fidelity": "reference"},
    }  # fmt: skip
    assert chosen.given_json() == {
        "rows": HERE.as_posix(), "lr": 1.0, "defense": "noise-reference", "noise-reference": {"alpha": 2.0},
    }  # fmt: skip
    for settings in (chosen, call(HERE), call(HERE, "--defense", "plain"), call(HERE, "--defense", "vaccine")):
        assert Immunize.of(json.loads(json.dumps(settings.to_json()))) == settings
        assert Immunize.of(settings.given_json()) == settings == pickle.loads(pickle.dumps(settings))
        jsonschema.Draft202012Validator(Immunize.json_schema()).validate(settings.to_json())
        assert settings.digest() == digest_config(settings)


def test_a_variant_recommends_defaults_of_the_settings_around_it():
    call = command(Immunize, arguments=("rows",))
    assert call(HERE).lr == 2e-5
    assert call(HERE, "--defense", "vaccine").lr == 1e-3
    assert call(HERE, "--defense", "vaccine", "--lr", "2e-5").lr == 2e-5  # the class's default, but given
    assert "lr" not in call(HERE, "--defense", "vaccine").given
    assert call(HERE, "--defense", "vaccine").replace(defense="noise").lr == 2e-5
    assert call(HERE, "--set", "defense=vaccine").lr == 1e-3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"defense": "vacine"}, r"there is no defense 'vacine'\. Nearest: vaccine"),
        ({"defense": 3}, "there is no defense 3"),
        ({"defense": "vaccine", "noise": {}}, "noise: belongs to the defense 'noise', and the defense is 'vaccine'"),
        ({"vaccine": {"rho": 2}}, "vaccine: belongs to the defense 'vaccine', and the defense is 'noise'"),
        ({"noise": {"alpa": 1}}, r"noise\.alpa: there is no such key\. Nearest: alpha"),
        ({"noise": {"alpha": -1}}, r"noise\.alpha: must be at least 0, not -1"),
        ({"noise": 3}, "noise: must be a mapping"),
        ({"nois": {}}, r"nois: there is no such key\. Nearest: noise"),
        ({"alpha": 3}, "alpha: there is no such key"),
    ],
)
def test_wrong_variants_and_keys_are_named(values, message):
    with pytest.raises(UsageError, match=message):
        Immunize.of({"rows": HERE, **values})
    with pytest.raises(UsageError) as refused:
        Several.of({"first": {"rows": HERE, **values}}, where="steps.0")
    assert re.match(rf"steps\.0\.first\.(defense: )?{message}", str(refused.value))


def test_an_unregistered_variant_is_refused():
    class Mine(Noise):
        """One of one's own."""

    with pytest.raises(UsageError, match="Mine is not a registered defense"):
        Immunize(rows=HERE, defense=Mine())
    with pytest.raises(UsageError, match="There is a defense 'noise' already"):
        DEFENSES.register("noise", Mine)
    with pytest.raises(NameNotFound, match=r"no defense 'nose'\. Nearest: noise"):
        DEFENSES["nose"]


def test_wrong_keys_of_variants_on_the_command_line():
    call = command(Immunize, arguments=("rows",))
    assert "there is no defense 'vacine'. Nearest: vaccine" in call(HERE, "--defense", "vacine")
    for arguments, message in (
        (("--set", "alpha=1"), "there is no setting 'alpha'. Write it as noise.alpha."),
        (("--set", "noise.alpa=1"), "there is no setting 'noise.alpa'. Nearest: noise.alpha"),
        (("--defense", "vaccine", "--set", "noise.alpha=1"), "noise: belongs to the defense 'noise'"),
        (("--set", "noise.alpha=x"), "noise.alpha: must be a number, not 'x'."),
    ):
        with pytest.raises(UsageError, match=re.escape(message)):
            call(HERE, *arguments)


def test_help_has_groups_of_the_chosen_variant():
    @click.command(cls=SettingsCommand)
    @options(Immunize)
    @click.option("--card", is_flag=True, help="Write a card.")
    def run(settings, card):
        """Train."""

    def shown(*arguments):
        return CliRunner().invoke(run, [*arguments, "--help"], terminal_width=200).output

    text = shown()
    headings = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert headings == ["Files", "Training", "This defense: noise", "Output"]
    flat = " ".join(text.split())
    for part in (
        "--defense [noise|vaccine|plain|noise-reference]", "--lr FLOAT RANGE Learning rate. [default: 2e-05; x>0]",
        "--set warmup=NUMBER Share of the steps over which the rate rises. [default: 0.1; 0<=x<=1]",
        "--set noise.alpha=NUMBER Weight of the ascent. [default: 1.0; x>=0]", "Layers; all by default.",
        "--set noise.fidelity=corrected|reference",
    ):  # fmt: skip
        assert part in flat, part
    assert "vaccine.rho" not in text
    flat = " ".join(shown("--defense", "vaccine").split())
    assert "--set vaccine.rho=NUMBER Size of the perturbation. [default: 1.0; x>0]" in flat
    assert "[default: 0.001; x>0]" in flat
    assert "[default: vaccine]" not in flat


def test_shell_completion_offers_choices_and_keys():
    @click.command(cls=SettingsCommand)
    @options(Immunize)
    def run(settings):
        """Train."""

    def offered(arguments, incomplete):
        return [item.value for item in ShellComplete(run, {}, "run", "_X").get_completions(arguments, incomplete)]

    assert offered(["--defense"], "v") == ["vaccine"]
    assert offered(["--set"], "noise.a") == ["noise.alpha="]
    assert offered(["--defense", "vaccine", "--set"], "vac") == ["vaccine.rho="]
    assert offered(["--set"], "noise.fidelity=r") == ["noise.fidelity=reference"]


def test_tables_list_all_variants():
    table = Immunize.table()
    assert "| `--defense` | `noise`, `vaccine`, `plain`, `noise-reference` | noise | Defense to train. |" in table
    assert "| `--set noise.lens_layers=` | integer ≥ 0 |  | Layers; all by default. |" in table
    assert "| `--set noise-reference.fidelity=` | `corrected`, `reference` | reference |" in table
    assert [leaf.place for leaf in leaves(Immunize) if leaf.variant == "vaccine"] == ["vaccine.rho"]


def test_nested_settings_that_may_be_missing():
    class Private(Settings):
        noise: float = Field(ge=0, description="Noise.")
        clip: float = Field(0, ge=0, description="Largest norm.")

    class Training(Settings):
        epochs: int = Field(0, description="Passes.")
        privacy: Private | None = Field(None, description="Differential privacy; none by default.")

    call = command(Training)
    assert call() == Training(privacy=None)
    assert call("--noise", "2") == Training(privacy=Private(noise=2))
    assert call("--set", "privacy={noise: 1, clip: 3}").privacy == Private(noise=1, clip=3)
    assert "--epochs INTEGER Passes. [default: 0]" in " ".join(call("--help").split())
    with pytest.raises(UsageError, match=r"privacy\.noise: is missing"):
        call("--clip", "1")


def test_a_number_or_a_file():
    class Limit(Settings):
        threshold: Annotated[float | FilePath, Cli(metavar="FILE|NUMBER")] = Field(description="A number, or its file.")

    call = command(Limit)
    assert call("--threshold", "0.5").threshold == 0.5
    assert call("--threshold", HERE).threshold == HERE
    with pytest.raises(UsageError, match=r"threshold: 'nothing' is not an existing file\."):
        call("--threshold", "nothing")


def test_settings_travel_between_processes():
    settings = Holder(range={"low": 4})
    again = pickle.loads(pickle.dumps(settings))
    assert again == settings
    assert again.given == settings.given


def test_help_says_types_ranges_and_defaults():
    text = " ".join(command(All)("--help").split())
    for part in (
        "--rows FILE Rows to read. [required]",
        "--count INTEGER RANGE How many. [default: 3; x>=1]",
        "--rate FLOAT RANGE Learning rate. [default: 2e-05; 0<x<10]",
        "--limit INTEGER RANGE Most steps; all by default. [x>=1]",
        "--kind [fast|slow] Which kind. [default: fast]",
        "-l, --label WORD A label.",
        "--chat Use the chat template. --audit / --no-audit Audit at the end. [default: audit]",
        "--folder DIRECTORY",
        "--rates LR,LR,...",
        "--also NAME=FOLDER",
        "--weights NAME=NUMBER",
        "--steps INTEGER RANGE Steps of the schedule. [default: 20; x>=2]",
        "--set KEY=VALUE Any setting, by its key in recipes.",
    ):
        assert part in text, part


def test_bad_arguments_are_named():
    call = command(All, skip=("folder",))
    rows = ("--rows", HERE)
    assert "'--rates': 'x' is not a list of numbers" in call(*rows, "--rates", "x")
    assert "'frozen' does not name a folder. Write it as NAME=FOLDER." in call(*rows, "--also", "frozen")
    assert "--folder" in call(*rows, "--folder", ".")
    for argument, reason in (
        ("insid=1", "there is no setting 'insid'. Nearest: inside"),
        ("look.timin=1", "there is no setting 'look.timin'. Nearest: look.timing"),
        ("folder=.", "there is no setting 'folder'"),
        ("inside", "--set 'inside' has no value. Write it as KEY=VALUE."),
        ("inside=[", "inside: must be an integer"),
        ("look.timing=late", "look.timing: must be 'paper' or 'code', not 'late'."),
    ):
        with pytest.raises(UsageError, match=re.escape(reason)):
            call(*rows, "--set", argument)
    with pytest.raises(UsageError, match="count was given twice"):
        call(*rows, "--count", "1", "--set", "count=2")
    assert call(*rows, "--set", "look.steps=9", "--timing", "code").look == Look(steps=9, timing="code")


def test_help_has_a_heading_for_each_group_and_shows_the_settings_of_the_chosen_method():
    class First(Settings):
        weight: Annotated[float, Cli(own=False)] = Field(1.0, description="Weight of the first.")

    class Second(Settings):
        rate: Annotated[float, Cli(own=False)] = Field(2.0, description="Rate of the second.")

    class Edit(Settings):
        option_groups: ClassVar = {"Files": ("pairs",), "Edit": ("method",)}

        pairs: str = Field("", description="Pairs.")
        method: Literal["first", "second"] = Field("first", description="Method.")
        first: Annotated[First, Cli(only_with="method=first")] = Field(First(), description="Of first.")
        second: Annotated[Second, Cli(only_with="method=second")] = Field(Second(), description="Of second.")

    @click.command(cls=SettingsCommand)
    @options(Edit)
    def edit(settings):
        click.echo(settings.second.rate)

    shown = CliRunner().invoke(edit, ["--help"]).output
    assert [line for line in shown.splitlines() if line.endswith(":")] == [
        "Files:", "Edit:", "With --method first:", "Output:"
    ]  # fmt: skip
    assert "first.weight" in shown
    assert "second.rate" not in shown
    shown = CliRunner().invoke(edit, ["--method", "second", "--help"]).output
    assert "first.weight" not in shown
    assert "With --method second:" in shown
    assert "second.rate" in shown
    assert CliRunner().invoke(edit, ["--method", "second", "--set", "second.rate=3"]).output == "3.0\n"


def test_a_type_of_its_own_and_the_environment(monkeypatch):
    def counted(value):
        return tuple(range(value)) if isinstance(value, int) else value

    class Seeds(Settings):
        seeds: Annotated[
            tuple[int, ...], BeforeValidator(counted), Cli(type=click.IntRange(2), envvar="SEEDS", name="--noises")
        ] = Field((0, 1), description="Seeds, or how many.")

    call = command(Seeds)
    assert call("--noises", "3").seeds == (0, 1, 2)
    monkeypatch.setenv("SEEDS", "4")
    assert call().seeds == (0, 1, 2, 3)
    assert Seeds.of({"seeds": [5, 7]}).seeds == (5, 7)
