"""A search for the attack that needs the fewest steps: it changes one setting of the best attacks at a time.

Nobody can run every combination of optimizer, rate, weights, prompt format and data, and an attacker does not: he tries
many for a few steps, goes on with those that succeed, and changes one thing of the best. So does this. No run goes on
for longer than the best attack took so far, which makes later rounds cheap. `search_one` searches for attacks on one
model, `search_all` for those on several and on their controls.

Source: successive halving after Jamieson and Talwalkar, arXiv 1502.07943; what is varied after arXiv 2412.07097,
2502.05209 and 2602.06911.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, final

from netweight.attacks.finetuning.attack import parts_of
from netweight.attacks.finetuning.calibration import from_the_middle
from netweight.attacks.finetuning.changes import telling_tokens
from netweight.attacks.finetuning.optimizers import has_soap, operations_per_step
from netweight.attacks.finetuning.pace import Pace
from netweight.attacks.finetuning.settings import AttackSettings
from netweight.attacks.finetuning.subject import Goal, Subject
from netweight.attacks.finetuning.sweep import AttackOutcome, SubjectName, make_subject, sweep
from netweight.core.engines import Engine
from netweight.core.progress import QUIET, Progress
from netweight.core.quantities import duration
from netweight.errors import UsageError
from netweight.hf.load_language_model import embedding_of
from netweight.job import Job

# Each rung keeps one of this many attacks, and gives it this many times the steps.
_KEPT = 3
ROUNDS = 6  # rounds of neighbors, at most
# Attacks whose neighbors are tried, of different kinds.
_BEST = 2
# Attacks of a search that are run again, from other seeds.
FINALISTS = 3
# Learning rates of Adam on all weights.
_RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
# How many times that rate suits others, roughly: optimizers, and attacks that train few weights.
_SCALE = {"adam": 1.0, "muon": 3.0, "sgd": 100.0, "adamw": 1.0, "soap": 1.0, "lion": 0.3, "schedule-free": 3.0}
_PART_SCALE = 5.0
# Rows in each step. The learning rate is scaled with the square root of this number.
_BATCHES = (2, 4, 8, 16, 32, 64, 128, 256)
# Lengths of attacks whose rate falls to 0, as shares of the steps of the soonest attack.
_COSINE_SHARES = (0.6, 0.8, 1.0)
# Rows per step with which a search for few rows begins. Steps of fewer rows are evaluated after as many rows as these.
_FEW_ROWS = 4
# Learning rates of each kind that a search also begins with in other prompt formats.
_IN_FORMATS = 3
# Changes of one attack, each of which made it better, that are tried together in the next round.
_MOST_TOGETHER = 4
# Most of a search's time would go into scores of attacks that are far from recovery. Token accuracies on some of the
# held-out rows and on all of them hardly ever differ by more than this; if they do, a recovery is seen a little later.
_NEAR = 0.12


Cost = Literal["steps", "rows"]
"""Cost that an attacker minimizes: steps, or rows trained on; rows per step are free to him."""


def cost_of(run: AttackOutcome, cost: Cost) -> int | None:
    """Return the steps, or the rows seen, after which a run had recovered; None if it did not."""
    reached = run.result.reached
    return None if reached is None else reached.step if cost == "steps" else reached.rows


@final
@dataclass(frozen=True)
class SearchResult:
    """Results of the searches for attacks on one model."""

    best: tuple[AttackSettings, ...]
    """All that was tried, the soonest first; without a limit of steps where the rate stays."""
    runs: tuple[AttackOutcome, ...]
    """Every run, the longer ones of an attack after the shorter ones."""
    most: int
    """Steps after which an attack was given up."""
    fewest_rows: tuple[AttackSettings, ...] = ()
    """The attacks of a second search, those that see the fewest rows first; empty without one."""
    most_rows: int = 0
    """Rows after which an attack of that search was given up."""
    timed_out: bool = False
    """True if a search ended at its time limit."""

    @property
    def soonest(self) -> int | None:
        """Steps of the best attack; None if none recovered."""
        return self.least("steps")

    def least(self, cost: Cost) -> int | None:
        """Return steps or rows of the best attack; None if none recovered."""
        return _least(self.runs, cost)

    @property
    def steps(self) -> int:
        """Steps of all runs: what the search cost an attacker."""
        return sum(run.result.last_step for run in self.runs)


def first_attacks(*, seed: int = 0, rates: Sequence[float] | None = None, **fixed: Any) -> list[AttackSettings]:
    """Return what a search begins with: optimizers at rates a factor of 3 apart, and factors in place of weights."""
    common = {"schedule": "constant", "warmup": 0.0, "seed": seed, **fixed}
    made = [
        AttackSettings(optimizer=name, lr=lr * _SCALE[name], **common)
        for name in ("adam", "muon", "sgd", "lion", "schedule-free", "soap")
        if _is_possible(name, fixed.get("precision"))
        for lr in rates or _RATES
    ]
    return made + [AttackSettings(lora_rank=8, lr=lr * _PART_SCALE, **common) for lr in rates or _RATES]


def neighbors(
    settings: AttackSettings, soonest: int | None = None, *, subject: Subject, held: frozenset[str] = frozenset()
) -> list[AttackSettings]:
    """Return the attacks that differ in one thing; fields that are `held` stay.

    A rate that falls to 0 does so by the steps that the soonest attack took, or by fewer.
    """
    changes = (
        {name: each for name, each in change.items() if name not in held} for change in _changes(settings, subject)
    )
    attacks = dict.fromkeys(_evaluated_alike(settings.replace(**change), settings) for change in changes)
    if soonest is not None and "schedule" not in held:
        check = settings.check_every
        attacks |= dict.fromkeys(
            of_length(settings.replace(schedule="cosine"), max(check, int(share * soonest) // check * check))
            for share in _COSINE_SHARES
        )
    return [each for each in attacks if each != settings]


def _changes(settings: AttackSettings, subject: Subject) -> Iterator[dict[str, Any]]:
    lr = settings.lr
    yield from ({"lr": lr * factor} for factor in (0.25, 0.5, 0.7, 1.4, 2.0, 4.0))
    sizes = [size for size in _BATCHES if _has_harmful(settings.benign_share, size)]
    yield from ({"batch_size": size, "lr": lr * (size / settings.batch_size) ** 0.5} for size in sizes)
    yield from ({"template": name} for name in ("plain", *subject.formats(settings.domain)))
    for name, scale in _SCALE.items():
        if not _is_possible(name, settings.precision):
            continue
        yield {"optimizer": name, "lr": lr * scale / _SCALE[settings.optimizer]}
    if subject.benign:
        shares = (share for share in (0.0, 0.25, 0.5, 0.75, 1.0) if _has_harmful(share, settings.batch_size))
        yield from ({"benign_share": share} for share in shares)
    yield from ({"average": decay} for decay in (0.0, 0.8, 0.95))
    part = settings.lora_rank is not None or settings.trains != "all"
    yield {"lora_rank": None, "trains": "all", "lr": lr / _PART_SCALE**part}
    yield {"schedule": "constant", "max_steps": None, "epochs": 1}
    less = [{"lora_rank": 8, "trains": "all"}, {"lora_rank": 64, "trains": "all"}]
    parts = [name for name, parameters in parts_of(subject.model).items() if parameters and name != "all"]
    parts += ["prompt"] if embedding_of(subject.model) is not None else []
    less += [{"lora_rank": None, "trains": name} for name in parts]
    yield from ({**each, "lr": lr * _PART_SCALE ** (not part)} for each in less)
    if subject.benign:
        yield from ({"benign_first": steps} for steps in (0, 4))
        if telling_tokens(subject.domain(settings.domain).train, subject.benign)[0]:
            yield from ({"rows": rows} for rows in ("kept", "copied", "fresh"))
    yield from ({"loss_on": loss} for loss in ("response", "full"))
    yield from ({"clip": clip} for clip in (1.0, None))
    yield from ({"bits": bits} for bits in (None, 4))
    yield from ({"noise": noise} for noise in (0.0, 0.02, 0.1))
    yield from ({"samples": min(few, settings.samples)} for few in (16, 64))
    if subject.other is not None:
        yield from ({"of_other": share} for share in (0.0, 0.5, -0.5))


def _is_possible(optimizer: str, precision: str | None) -> bool:
    return {"soap": has_soap(), "schedule-free": precision != "rounded"}.get(optimizer, True)


def together(settings: AttackSettings, better: Sequence[AttackSettings]) -> list[AttackSettings]:
    """Return attacks that make several changes of an attack at once.

    Args:
        settings: The attack that was changed.
        better: Attacks that differ from it in one thing and were better, the best first.

    Returns:
        The two best changes together, the three best, and so on; of several changes of one thing only the best.
    """
    made: list[AttackSettings] = []
    whole, changed = settings, set[str]()
    for each in better:
        change = {name: value for name, value in each.to_json().items() if value != getattr(settings, name)}
        # A learning rate that goes with another change is scaled with it.
        what = change.keys() - {"lr", "check_every"} or change.keys() - {"check_every"}
        if what & changed or what & {"schedule", "max_steps", "epochs"}:
            continue
        lr = whole.lr * each.lr / settings.lr
        try:
            whole = whole.replace(**{**change, "lr": lr, "check_every": settings.check_every})
        except UsageError:
            # Settings refuse changes that exclude each other, such as factors and a part of the weights.
            continue
        changed |= what
        made.append(_evaluated_alike(whole, settings))
        if len(made) == _MOST_TOGETHER:
            break
    return made[1:]


def _evaluated_alike(attack: AttackSettings, before: AttackSettings) -> AttackSettings:
    """Return an attack that is evaluated after as many rows as one with other steps, where these are of few rows."""
    every = before.check_every * steps_of_few_rows(attack.batch_size) // steps_of_few_rows(before.batch_size)
    return attack.replace(check_every=max(1, every))


def steps_of_few_rows(size: int) -> int:
    """Return how many steps see the rows with which a search for few rows begins, at least 1."""
    return max(1, _FEW_ROWS // size)


def _has_harmful(benign_share: float, size: int) -> bool:
    return benign_share == 1 or round(benign_share * size) < size


def kind_of(settings: AttackSettings) -> str:
    """Return the most distinctive property of a training: "LoRA", the trained weights if not all, or the optimizer."""
    part = settings.optimizer if settings.trains == "all" else settings.trains
    return part if settings.lora_rank is None else "LoRA"


def search_one(
    subject: SubjectName,
    start: Sequence[AttackSettings],
    goal: Goal,
    *,
    most: int,
    cost: Cost = "steps",
    known: Sequence[AttackSettings] = (),
    held: frozenset[str] = frozenset(),
    rounds: int = ROUNDS,
    until: float | None = None,
    folder: str | Path | Job,
    engine: Engine,
    progress: Progress = QUIET,
    title: str = "search",
) -> SearchResult:
    """Search for the attack that reaches a goal at the least cost.

    Args:
        subject: What is attacked.
        start: What the search begins with, in all prompt formats; the limits of their steps do not matter.
        goal: When an attack has won.
        most: Steps, or rows, after which an attack is given up.
        cost: Which of both is to be small.
        known: The best attacks on other models, which are tried before `start`.
        held: Fields of the settings that are not varied.
        rounds: Most rounds of neighbors.
        until: Time on `time.monotonic` from which on no further attack begins; None for no limit.
        folder: Remembers runs, as that of a `sweep`.
        engine: Where runs happen.
        progress: Told of every attack.
        title: Name of the search, for the display of progress.

    Returns:
        What it found, the same for the same arguments unless the time was over. However short the time is, one attack
        is made.
    """
    model = make_subject(subject.factory, subject.arguments)
    goal = replace(goal, near=_NEAR, extra_checks=0)
    around = functools.partial(neighbors, subject=model, held=held)
    # The longest run of each attack. The key does not contain the limit of steps.
    runs: dict[AttackSettings, AttackOutcome] = {}
    pace, too_slow = Pace(), set[str]()

    def over() -> bool:
        return until is not None and time.monotonic() >= until

    def attack(settings: Sequence[AttackSettings], budget: int, end: float | None, name: str) -> None:
        limited = [within(each, _steps_for(each, budget, cost)) for each in settings]
        # Where time is short, attacks begin one by one, so that the clock is looked at between them.
        parts = [limited] if end is None else [[each] for each in limited]
        for number, part in enumerate(parts, start=1):
            if end is not None and runs:
                left, kind = end - time.monotonic(), kind_of(part[0])
                seconds = pace.expected(part[0], _optimizer_operations(model, part[0]))
                if left > 0 and seconds > left and kind not in too_slow:
                    too_slow.add(kind)
                    progress.note(
                        f"An attack is left out for lack of time: {part[0].label}. It would take about "
                        f"{duration(seconds)}, and {duration(left)} are left for this part of the search."
                    )
                if seconds > left:
                    continue
            begun = time.monotonic()
            task = f"{name}, part {number} of at most {len(parts)}" if len(parts) > 1 else name
            result = sweep([subject], part, goal, folder=folder, engine=engine, progress=progress, title=task)
            if len(part) == 1:
                pace.add(result.runs, time.monotonic() - begun)
            every.extend(result.runs)
            runs.update({within(run.result.settings, None): run for run in result.runs})

    every: list[AttackOutcome] = []
    ordered: list[AttackSettings] = []
    changes: dict[AttackSettings, list[AttackSettings]] = {}
    formats = () if "template" in held else model.formats(start[0].domain)
    pool = list(dict.fromkeys(within(each, None) for each in (*known, *widest_first(start, formats))))
    for turn in range(1 + rounds):
        name = f"{title}, round {turn} of at most {rounds}" if turn else f"{title}, first attacks"
        before = _least(runs.values(), cost)
        limit = most if before is None else before
        pool = [each for each in pool if each not in runs]
        done = 0
        rungs = (limit // 9, limit // 3, limit)
        for number, rung in enumerate(rungs):
            budget = min(rung, _least(runs.values(), cost) or rung)
            long_enough = pool and _steps_for(pool[0], rung, cost) >= 3 * pool[0].check_every
            if pool and budget > done and (rung == limit or long_enough):
                # Each rung gets the same share of the time that is left, so that the best attacks are also run longer.
                attack(pool, done := budget, share_of_time(until, len(rungs) - number), name)
                pool = sorted(pool, key=lambda each: _rank(runs.get(each), goal, cost))[: -(-len(pool) // _KEPT)]
        ordered = sorted(runs, key=lambda each: _rank(runs[each], goal, cost))
        leaders: dict[str, AttackSettings] = {}
        for each in ordered:
            leaders.setdefault(kind_of(each), each)
        best, soonest = list(leaders.values())[:_BEST], _least(runs.values(), "steps")
        at_once = [
            one for each, made in changes.items()
            for one in together(each, [near for near in ordered[: ordered.index(each)] if near in made])
        ]  # fmt: skip
        changes = {each: around(each, soonest) for each in best}
        turns = itertools.zip_longest(*changes.values())
        pool = list(dict.fromkeys([*at_once, *(near for turn in turns for near in turn if near is not None)]))
        if over() or (before is not None and _least(runs.values(), cost) == before):
            break
    if not ordered:
        raise UsageError("Every attack of the search failed.", cure="Read the reasons in attacks.jsonl.")
    return SearchResult(tuple(ordered), tuple(every), most, timed_out=over())


def most_attacks(start: int, searches: int, changes: int, *, rounds: int = ROUNDS) -> int:
    """Return the most attacks that so many searches can make, each of which begins with `start` attacks.

    Args:
        start: Attacks with which the first search begins, in all prompt formats. A later one also begins with the best
            of earlier ones.
        searches: Number of searches.
        changes: The most changes of one attack that a round tries, as `most_changes` counts them.
        rounds: Most rounds of each search.
    """

    def of_rungs(attacks: int) -> int:
        # Each rung keeps a share of the attacks and runs them for longer.
        second = -(-attacks // _KEPT)
        return attacks + second + -(-second // _KEPT)

    return searches * (of_rungs(start + FINALISTS * searches) + rounds * of_rungs(_BEST * changes))


def most_changes(settings: AttackSettings, subject: Subject) -> int:
    """Return the most attacks that a round of a search tries as changes of one attack."""
    # With these, no size of a batch and no share of benign rows is left out.
    widest = settings.replace(benign_share=0.0, batch_size=max(_BATCHES))
    return sum(1 for _ in _changes(widest, subject)) + len(_COSINE_SHARES) + _MOST_TOGETHER - 1


def share_of_time(until: float | None, parts: int) -> float | None:
    """Return the time on `time.monotonic` at which the next of so many equal parts of the remaining time ends."""
    if until is None:
        return None
    now = time.monotonic()
    return now + max(0.0, until - now) / parts


def widest_first(attacks: Sequence[AttackSettings], formats: Sequence[str] = ()) -> list[AttackSettings]:
    """Return attacks so that their beginning covers most: a middle learning rate of every kind, then the next.

    Kinds whose steps cost little on any processor come before those that multiply or factorize whole matrices. Attacks
    with a middle learning rate are followed by the same in other prompt `formats`.
    """
    kinds: dict[str, list[AttackSettings]] = {}
    for each in attacks:
        kinds.setdefault(kind_of(each), []).append(each)
    order = sorted(kinds.values(), key=lambda kind: kind[0].optimizer in ("muon", "soap"))
    queues = [
        [
            one for place, each in enumerate(from_the_middle(kind))
            for one in (each, *(each.replace(template=name) for name in formats if place < _IN_FORMATS))
        ]
        for kind in order
    ]  # fmt: skip
    return list(dict.fromkeys(each for turn in itertools.zip_longest(*queues) for each in turn if each is not None))


def _optimizer_operations(subject: Subject, attack: AttackSettings) -> float:
    if attack.lora_rank is not None or attack.trains == "prompt":
        return 0.0
    return operations_per_step((each.shape for each in parts_of(subject.model)[attack.trains]), attack.optimizer)


def _steps_for(attack: AttackSettings, budget: int, cost: Cost) -> int:
    """Return how many steps an attack may take of a budget of steps or rows, at least one evaluation's."""
    return budget if cost == "steps" else max(attack.check_every, budget // attack.batch_size)


def of_length(settings: AttackSettings, steps: int | None) -> AttackSettings:
    """Return an attack that goes on for so many steps, over its samples again and again; None for no limit."""
    if steps is None:
        return settings.replace(max_steps=None, epochs=1)
    epochs = -(-steps // -(-settings.samples // (settings.harmful_per_batch or settings.batch_size)))
    return settings.replace(max_steps=max(steps, settings.benign_first + 1), epochs=epochs)


def within(attack: AttackSettings, steps: int | None) -> AttackSettings:
    """Return an attack of so many steps; one whose rate falls to 0 is another attack in others, and keeps its own."""
    return attack if attack.schedule == "cosine" else of_length(attack, steps)


def _least(runs: Iterable[AttackOutcome], cost: Cost) -> int | None:
    return min((each for run in runs if (each := cost_of(run, cost)) is not None), default=None)


def _rank(run: AttackOutcome | None, goal: Goal, cost: Cost = "steps") -> tuple[bool, float, float]:
    """Recovered ones by cost and score, then by how far they got with a model that is worth having and the loss."""
    if run is None or run.result.outcome == "diverged":
        return True, math.inf, math.inf
    result = run.result
    sign = -1 if goal.lower_is_recovered else 1
    spent = cost_of(run, cost)
    if spent is not None:
        return False, spent, -sign * next(each.score for each in result.curve if each.step == result.steps)
    last, first = result.curve[-1], result.curve[0]
    ability = (
        1.0 if result.outcome == "resisted" or not last.ability or not first.ability else last.ability / first.ability
    )
    return True, -sign * last.score * min(1.0, ability), math.inf if last.loss is None else last.loss


def search_all(
    subjects: Sequence[SubjectName],
    start: Sequence[AttackSettings],
    goal: Goal,
    *,
    most: int,
    longer: int = 5,
    bounded: bool = False,
    held: frozenset[str] = frozenset(),
    until: float | None = None,
    **how: Any,
) -> dict[str, SearchResult]:
    """Search for attacks on several models: on the first for `most` steps, on others `longer` times what that took.

    Every model is searched twice, for few steps and for few rows, and controls as hard as the model in question. The
    other searches begin with the best attacks on the models before. `bounded` leaves the limit at `most`; the searches
    share the time `until` a limit; `how` is passed to `search_one`. Where the rows per step are `held`, the second
    search would be the first and is left out.
    """
    results: dict[str, SearchResult] = {}
    best: list[AttackSettings] = []
    fewest: list[AttackSettings] = []
    few = [] if "batch_size" in held else few_row_attacks(start)
    # The number of searches that remain.
    searches = number = len(subjects) * (2 if few else 1)
    most_rows = most * _FEW_ROWS
    for subject in subjects:
        end = share_of_time(until, searches)
        name = f"search {number - searches + 1} of {number}, on {subject.name} for few steps"
        by_steps = search_one(subject, start, goal, most=most, known=best, held=held, until=end, title=name, **how)
        results[subject.name] = by_steps
        searches -= 1
        if few:
            known = [*fewest, *few_row_attacks(by_steps.best[:FINALISTS])]
            end = share_of_time(until, searches)
            name = f"search {number - searches + 1} of {number}, on {subject.name} for few rows"
            by_rows = search_one(
                subject, few, goal, most=most_rows, cost="rows", known=known, held=held, until=end, title=name, **how
            )
            searches -= 1
            results[subject.name] = replace(
                by_steps, runs=(*by_steps.runs, *by_rows.runs), fewest_rows=by_rows.best, most_rows=most_rows,
                timed_out=by_steps.timed_out or by_rows.timed_out,
            )  # fmt: skip
        # What was found on one model is tried first on the next.
        found = results[subject.name]
        best = [*found.best[:FINALISTS], *best]
        fewest = [*found.fewest_rows[:FINALISTS], *fewest]
        if len(results) == 1:
            first = results[subject.name]
            if not bounded:
                steps, rows = first.least("steps"), first.least("rows")
                most = most if steps is None else longer * steps
                most_rows = most_rows if rows is None else longer * rows
    return results


def few_row_attacks(attacks: Iterable[AttackSettings]) -> list[AttackSettings]:
    """Return attacks with few rows a step, at rates that suit them."""
    factor = _FEW_ROWS**0.5
    return [
        each.replace(batch_size=_FEW_ROWS, lr=each.lr * factor / each.batch_size**0.5)
        for each in attacks
        if each.schedule != "cosine"
    ]


def finals(searched: Mapping[str, SearchResult], seeds: Sequence[int]) -> list[AttackSettings]:
    """Return the best attacks of all searches from each seed, as long as the longest of any where the rate stays."""
    # All models after the first have the same limit.
    most = list(searched.values())[-1].most
    best = dict.fromkeys(attack for result in searched.values() for attack in result.best[:FINALISTS])
    rows = dict.fromkeys(attack for result in searched.values() for attack in result.fewest_rows[:FINALISTS])
    most_rows = max(result.most_rows for result in searched.values())
    longest = {attack: max(most, most_rows // attack.batch_size) for attack in rows} | dict.fromkeys(best, most)
    return [within(attack.replace(seed=seed), steps) for attack, steps in longest.items() for seed in seeds]
