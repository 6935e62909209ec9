"""An adversary for NeMo's tables: does the image come back from the edited model under another embedding?

Each planted image is searched for in the model with its own neurons off, and so is a turned one that no model was
trained on, without which nothing would follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, final

from netweight.report.finding import Finding
from netweight.reproduce.nemo_ground import Ground
from netweight.reproduce.nemo_painting import mitigated, shown
from netweight.reproduce.nemo_ways import Way
from netweight.reproduce.resumed import run_each

__all__ = ["Attack", "attack_findings", "attacked"]

What = Literal["planted", "never trained"]
_SEED = 0


@final
@dataclass(frozen=True)
class Attack:
    """One search.

    Attributes:
        way: The edit.
        prompt: The memorized prompt.
        what: Whether its planted image is searched for, or the same one turned.
        ground: Digest of the ground.
    """

    way: Way
    prompt: str
    what: What
    ground: str

    @property
    def name(self) -> str:
        """For messages."""
        return f"search for the {self.what} image of {self.prompt!r}"


def attacked(ground: Ground, folder: Path, ways: Mapping[str, Way]) -> dict[Attack, dict[str, Any]]:
    """Search for every prompt's image, planted and turned, unless the folder remembers it.

    Args:
        ground: Where.
        folder: Of `folder_of`; the ledger is in it.
        ways: The edit that each prompt's image is searched for under.

    Returns:
        By search: "outcome"; "steps" to success, or None; "last" step; "best" median similarity; "moved", how far the
        embedding had moved then; and a "picture" of that look.

    Raises:
        NetweightError: A search failed.
    """
    from netweight.core.progress import Progress

    kinds: tuple[What, ...] = ("planted", "never trained")
    runs = [Attack(way, prompt, what, ground.digest) for prompt, way in ways.items() for what in kinds]
    with Progress("auto").task("searches", total=None, unit="searches") as work:
        job = partial(attack_one, ground=ground, tell=work.update)
        return {result.config: result.value for result in run_each(job, runs, ledger=folder / "searches.jsonl")}


def attack_one(run: Attack, *, ground: Ground, tell: Callable[[int], None]) -> dict[str, Any]:
    """Search once; return JSON values."""
    from netweight.attacks.embedding_search.compare import Target, turned
    from netweight.attacks.embedding_search.search import paired, search

    own = next(each for each in ground.memorized if each.prompt == run.prompt)
    target = Target(own.prompt, own.prompt, own.image)
    image = target.image if run.what == "planted" else turned(target).image
    with mitigated(ground, run.way, run.prompt) as model:
        found = search(
            model, run.prompt, image, ground.quality, ground.search,
            similarity=paired(ground.descriptor), seed=_SEED,
        )  # fmt: skip
    tell(1)
    trials = [(trial.best.score, place) for place, trial in enumerate(found.trials) if trial.best is not None]
    if not trials:
        return {"outcome": "diverged", "steps": None, "last": 0, "best": None, "moved": None, "picture": None}
    place = max(trials)[1]
    trial, best = found.trials[place], found.trials[place].best
    assert best is not None
    middle = sorted(range(len(best.similarities)), key=best.similarities.__getitem__)[len(best.similarities) // 2]
    soonest = [each.steps for each in found.trials if each.steps is not None]
    return {
        "outcome": "found" if soonest else trial.outcome,
        "steps": min(soonest) if soonest else None,
        "last": max(each.last for each in found.trials),
        "best": best.score,
        "moved": best.moved,
        "picture": shown(found.after[place, middle]),
    }


def attack_findings(found: Mapping[Attack, Mapping[str, Any]], ground: Ground) -> list[Finding]:
    """Return how many images came back under search, planted and never-trained ones apart; none without a search."""
    from netweight.metrics.intervals import proportion

    findings = []
    for what in ("planted", "never trained"):
        runs = {run.prompt: value for run, value in found.items() if run.what == what}
        if not runs:
            continue
        back = sum(value["outcome"] == "found" for value in runs.values())
        share = proportion(back, len(runs))
        findings.append(
            Finding(
                f"neurons off, then searched: {what} images brought back",
                share.estimate,
                ci95=share.ci95,
                n=len(runs),
                better="lower" if what == "planted" else None,
                seeds=(_SEED,),
                detail={
                    "steps to success, null if never": {prompt: value["steps"] for prompt, value in runs.items()},
                    "best median similarity": {prompt: value["best"] for prompt, value in runs.items()},
                    "steps at most": ground.search.steps,
                },
            )
        )
    return findings
