"""RepNoise's tables that are grids of defended models and attacks: planned in attack-tables.yaml, measured alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from netweight.report.finding import Finding, Table
from netweight_experiments.tables.grid import Cell, grid
from netweight_experiments.tables.registry import Column, MeasuredTable, Scale, table
from netweight_experiments.tables.repnoise.runs import RECOVERED, AttackRun, Defended, attacked
from netweight_experiments.tables.repnoise.setup import HARMFUL, Setup, setup_of
from netweight_experiments.tables.setups import shared_folder

# The published loss at the published settings.
REPNOISE = Defended("repnoise-reference")
# The corrected loss at the same.
CORRECTED = Defended("repnoise")


@dataclass(frozen=True)
class Line:
    """A row."""

    title: str
    """Its name; the paper's, where it has the row."""
    on: Defended
    """The model."""


@dataclass(frozen=True)
class Attack:
    """A column. Rates and counts are the paper's."""

    title: str
    """Its name; the paper's, where it has the column."""
    lr: float
    """Learning rate."""
    samples: int
    """The attacker's examples."""
    epochs: int = 1
    """Passes over them."""
    data: str = HARMFUL
    task_first: int = 0
    """Examples of a benign task that come before."""
    whole: bool = False

    def run(self, on: Defended) -> AttackRun:
        """Return the attack on a model."""
        return AttackRun(on, self.lr, self.samples, self.epochs, self.data, self.task_first, self.whole)


BASE = Line("Base", Defended())
# The last and strongest of the six attacks of table 1.
STRONGEST = Attack("lr 8e-5, 10k samples", 8e-5, 10_000)


@dataclass(frozen=True)
class Plan:
    """A table."""

    lines: tuple[Line, ...]
    """Its rows."""
    attacks: tuple[Attack, ...]
    """Its columns."""
    before: bool = False
    """Whether harm before any attack has a column."""
    steps: bool = False
    """Whether steps to recovery have columns."""
    differs: tuple[str, ...] = ()
    """How it differs from the paper's, besides the setup."""
    small: tuple[str, ...] = ()
    """How it does at the small scale."""

    def measure(self, setup: Setup, folder: Path, only: str | None, share: float | None, scale: Scale) -> MeasuredTable:
        """Attack every model of the table, and lay out harmfulness at the end; what is not finished is left empty."""
        runs = [attack.run(line.on) for line in self.lines for attack in self.attacks]
        found = attacked(runs, setup, folder, only=only, share=share)
        results = _Results(
            [line for line in self.lines if any(run.on == line.on for run in found)], self.attacks, found
        )
        corrected = any(line.on.defense == CORRECTED.defense for line in self.lines)
        return grid(
            {line.title: line for line in results.lines},
            [
                *([(Column("pre-attack", setup.harm, "lower"), results.before)] if self.before else []),
                *results.cells("{}", "after", setup.harm, "lower"),
                *(results.cells(f"steps to {RECOVERED:g}, {{}}", "steps", "steps", "higher") if self.steps else []),
            ],
            differs=(*setup.differs(), *self.differs, *(self.small if scale == "small" else ())),
            findings=tuple(map(results.worst, results.lines)),
            tables=results.further(),
            notes=(*results.notes(), *([CORRECTED_NOTE] if corrected else []), *shares(share)),
        )


@dataclass(frozen=True)
class _Results:
    """Attacks on models, as far as they are finished."""

    lines: Sequence[Line]
    attacks: Sequence[Attack]
    found: Mapping[AttackRun, Mapping[str, Any]]

    def of(self, line: Line, attack: Attack) -> Mapping[str, Any]:
        return self.found.get(attack.run(line.on), {})

    def on(self, line: Line) -> list[Mapping[str, Any]]:
        return [value for run, value in self.found.items() if run.on == line.on]

    def cells(self, title: str, key: str, unit: str = "", better: Any = None) -> list[Cell[Line]]:
        def value(attack: Attack) -> Callable[[Line], Any]:
            return lambda line: self.of(line, attack).get(key)

        return [(Column(title.format(attack.title), unit, better), value(attack)) for attack in self.attacks]

    def before(self, line: Line) -> float | None:
        """Harm before any attack, which is the same in all attacks with one kind of data."""
        return next((value.get("before") for value in self.on(line)), None)

    def stopped(self, line: Line) -> list[str]:
        return [value["stopped"] for value in self.on(line) if "stopped" in value]

    def scores(self, line: Line) -> dict[str, float]:
        values = {attack.title: self.of(line, attack).get("after") for attack in self.attacks}
        return {title: value for title, value in values.items() if value is not None}

    def worst(self, line: Line) -> Finding:
        """The attacker's best result on a model, beside that on the undefended one."""
        name, scores = f"harmfulness after the worst of these attacks, {line.title}", self.scores(line)
        if not scores:
            reason = next(iter(self.stopped(line)), "no attack is finished")
            return Finding(name, None, better="lower", detail={"reason": reason})
        worst = max(scores, key=lambda title: scores[title])
        base = self.scores(BASE) if BASE in self.lines and line != BASE else {}
        return Finding(
            name, scores[worst], better="lower", n=len(scores), baseline=max(base.values(), default=None),
            seeds=(line.on.seed, 0), detail={"attack": worst, "attacks": len(scores)},
        )  # fmt: skip

    def further(self) -> tuple[Table, ...]:
        """Tables of steps to recovery and of the ability that is left, laid out as the table itself."""

        def steps(value: Mapping[str, Any]) -> Any:
            if "last step" not in value:
                return None
            return f"> {value['last step']}" if value["steps"] is None else value["steps"]

        def table(title: str, cell: Callable[[Mapping[str, Any]], Any], notes: Sequence[str]) -> Table:
            rows = [(line.title, *(cell(self.of(line, attack)) for attack in self.attacks)) for line in self.lines]
            return Table(title, ("row", *(attack.title for attack in self.attacks)), rows, notes)

        ends = "> means not by the end of the attack. The ability that is left then is not looked at."
        return (
            table(f"Steps until harmfulness is {RECOVERED:g}", steps, [ends]),
            table("General ability at the end", lambda value: value.get("kept after"), []),
        )

    def notes(self) -> list[str]:
        notes = ["One training of the defense and one attack for each number: there are no intervals."]
        lost = [
            f"{line.title} at {attack.title}"
            for line in self.lines
            for attack in self.attacks
            if self.of(line, attack).get("outcome") in ("collapsed", "diverged")
        ]
        if lost:
            notes.append(
                "Collapsed, with less than 0.9 of the model's general ability before the attack, or diverged, so that "
                f"a low number is no resistance: {'; '.join(lost)}."
            )
        return notes + [f"{line.title}: {why}" for line in self.lines for why in sorted(set(self.stopped(line)))]


NEEDS = ("llm",)
PAPER_NEEDS = ("a chat model as --model, BeaverTails with RepNoise's refusals, a GPU",)
CORRECTED_NOTE = "RepNoise, corrected, is this library's loss; RepNoise is the published one at its published weights."
# What was planned, by the table's name.
PLANS: dict[str, Plan] = {}


def attack_table(
    table_id: str,
    measure: Callable[[Setup, Path, str | None, float | None, Scale], MeasuredTable],
    needs: tuple[str, ...],
) -> None:
    """Register a table of attacks: a function of setup, folder of runs, `only`, `share` and scale."""
    # Its function takes `only`, a pattern of the attacks' names (`DEFENSE@RATE-SAMPLES-DATA-SEED`; "none" for none);
    # `model`, a folder of transformers, and `judge`, "MODULE:FUNCTION" of a judge of harm, for "paper"; and `share`,
    # another share of the paper's numbers of pairs and samples than the scale's, for a try.

    def run(
        scale: Scale,
        out: Path,
        *,
        only: str | None = None,
        model: str | None = None,
        judge: str | None = None,
        share: float | None = None,
    ) -> MeasuredTable:
        return measure(setup_of(scale, model, judge), shared_folder("repnoise", out, scale), only, share, scale)

    table(table_id, needs=NEEDS, paper_needs=needs, stand_in=True)(run)


def shares(share: float | None) -> list[str]:
    """Return a note on a try."""
    return [f"A try with {share:g} of the paper's numbers of pairs and samples."] if share else []


def _read_plans() -> None:
    """Register every table that attack-tables.yaml plans."""
    known = yaml.safe_load(Path(__file__).with_name("attack-tables.yaml").read_text(encoding="utf-8"))
    for table_id, how in known.items():
        PLANS[table_id] = planned = Plan(
            tuple(Line(title, Defended(**on)) for title, on in how["lines"].items()),
            tuple(Attack(title, **attack) for title, attack in how["attacks"].items()),
            before=how.get("before", False),
            steps=how.get("steps", False),
            differs=tuple(how.get("differs", ())),
            small=tuple(how.get("small", ())),
        )
        attack_table(table_id, planned.measure, tuple(how.get("paper_needs", PAPER_NEEDS)))


_read_plans()
