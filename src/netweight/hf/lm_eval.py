"""Tasks of EleutherAI's lm-evaluation-harness, where it is installed: what a defense costs in general ability.

Nothing else here needs the harness. It fetches the data of its tasks itself, or reads tasks of your own from a folder.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from netweight.errors import MissingExtra, NameNotFound
from netweight.hf.load_language_model import load_causal_lm
from netweight.report.finding import Finding

# Task and metric → score, standard error, number of examples.
Scores: TypeAlias = Mapping[tuple[str, str], tuple[float, float | None, int | None]]
_Z = 1.959964  # of a normal 95 % interval around the harness's own standard error


def check_lm_eval() -> None:
    """Refuse before hours of work what would fail after them."""
    if importlib.util.find_spec("lm_eval") is None:
        raise MissingExtra("Tasks need lm-evaluation-harness, which is not installed.", cure="Run: pip install lm-eval")


def measure_tasks(
    folder: str | Path,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    device: str = "cpu",
    own: str | Path | None = None,
) -> Scores:
    """Run tasks on a model folder."""
    check_lm_eval()
    harness: Any = importlib.import_module("lm_eval")
    known: Any = importlib.import_module("lm_eval.tasks").TaskManager(include_path=None if own is None else str(own))
    unknown = [task for task in tasks if task not in known.all_tasks]
    if unknown:
        raise NameNotFound(f"lm-evaluation-harness has no task {unknown[0]!r}.", cure="See: lm-eval ls tasks")
    model, tokenizer = load_causal_lm(folder, device=device)
    wrapped = importlib.import_module("lm_eval.models.huggingface").HFLM(
        pretrained=model, tokenizer=tokenizer, batch_size=8
    )
    found = harness.simple_evaluate(
        model=wrapped, tasks=list(tasks), limit=limit, task_manager=known, bootstrap_iters=1000, log_samples=False
    )
    return _scores(found)


def _scores(found: Mapping[str, Any]) -> Scores:
    scores: dict[tuple[str, str], tuple[float, float | None, int | None]] = {}
    for task, results in found["results"].items():
        n = found.get("n-samples", {}).get(task, {}).get("effective")
        for key, value in results.items():
            metric, _, filtered = key.partition(",")
            error = results.get(f"{metric}_stderr,{filtered}")
            if filtered and not metric.endswith("_stderr") and isinstance(value, int | float):
                known = float(error) if isinstance(error, int | float) else None
                scores[task, metric if filtered == "none" else f"{metric} ({filtered})"] = float(value), known, n
    return scores


def task_findings(name: str, before: Scores, after: Scores) -> list[Finding]:
    """Put a defended model's scores beside its base's."""
    findings = []
    for (task, metric), (value, error, n) in after.items():
        ends = None if error is None else (value - _Z * error, value + _Z * error)
        base = before.get((task, metric), (None, None, None))[0]
        findings.append(Finding(f"{task} {metric}, {name}", value, ci95=ends, n=n or None, baseline=base))
    return findings
