"""Cost of a defense to code: share of small programs, written by Qwen2.5-Coder-0.5B-Instruct, that pass their tests.

    python -m netweight_experiments.benchmarks language.code_answers MODEL WORK --output RESULT

MODEL is the published chat model. WORK holds the models that `language.guarded_domain` trained from it: taught a
guarded domain, and then defended. Each model is asked for the same small Python functions in the chat template of the
published model. Its most likely answer runs in a process of its own, with tests that it was not shown. Every model is
written as soon as it is measured, and a second call measures what is missing. No answer is stored.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from netweight.data.text import TextExample
from netweight.data.tokens import BELOW, Template, tokenized_prompts
from netweight.hf.generate_answers import end_tokens, generate_answers
from netweight.hf.load_language_model import context_of, load_causal_lm
from netweight.metrics.intervals import proportion
from netweight_experiments.benchmarks.language.code_runs import run_program
from netweight_experiments.benchmarks.language.guarded_domain import DEFENSES, NAMES, opened
from netweight_experiments.benchmarks.language.models import description
from netweight_experiments.benchmarks.language.programs import PROGRAMS
from netweight_experiments.benchmarks.script import fill

_BASE = "safety-training"  # what defenses are compared with
_ANSWERS = 8  # that are generated at a time


@cache
def _published(model: Path) -> tuple[Any, Any]:
    return load_causal_lm(model)


def _measure(model: Path, folder: Path | None, new_tokens: int) -> dict[str, Any]:
    """Return the outcome of every program of one model."""
    network, tokenizer = _published(model)
    ends = end_tokens(network, tokenizer)
    network = network if folder is None else opened(folder)
    texts = [TextExample(each.question, "", source="programs", where=each.name) for each in PROGRAMS]
    template: Template | Literal["chat"] = "chat" if tokenizer.chat_template else BELOW
    prompts = tokenized_prompts(texts, tokenizer, context=context_of(network, tokenizer), template=template)
    started = time.process_time()
    outcomes, tokens = {}, 0
    for first in range(0, len(PROGRAMS), _ANSWERS):
        part = slice(first, first + _ANSWERS)
        answers = generate_answers(
            network, prompts[part], new_tokens=new_tokens, ends=ends, pad_id=tokenizer.pad_token_id
        )
        for program, answer in zip(PROGRAMS[part], answers, strict=True):
            tokens += len(answer)
            text = str(tokenizer.decode(answer, skip_special_tokens=True))
            outcomes[program.name] = run_program(text, program.name, program.tests)
    return {"outcomes": outcomes, "tokens": tokens, "processor seconds": time.process_time() - started}


def main(
    model: Path, work: Path, /, *, output: Path, threads: int = 1, new_tokens: int = 96
) -> Iterator[dict[str, Any]]:
    """Measure the published model and those of WORK, at most `new_tokens` tokens of an answer."""
    folder = Path(work)
    cells = [("published model", partial(_measure, model, None, new_tokens))]
    for name in ("taught", *DEFENSES):
        if (folder / name).is_dir():
            cells.append((name, partial(_measure, model, folder / name, new_tokens)))
    for measured in fill(output, "measured", cells):
        yield {"model": description(model), "programs": len(PROGRAMS), **measured}


def page(result: dict[str, Any]) -> str:
    """Return what the page on immunization says of a result."""
    measured: Mapping[str, Any] = result["measured"]
    passed = {name: Counter(each["outcomes"].values())["passed"] for name, each in measured.items()}
    lines = [
        f"Each model was asked for the same {result['programs']} small Python functions, such as “the greatest common "
        f"divisor of two positive integers”, and its most likely answer (at most {result['options']['new_tokens']} "
        "tokens) was run against tests that it had not been shown. A program **passes** if all of its tests do. "
        f"{_meaning(measured, passed)}",
        "",
        "| model | programs that pass | 95 % interval | most frequent failure |",
        "|---|---|---|---|",
    ]
    for name in ("published model", "taught", *DEFENSES):
        if name in measured:
            outcomes = measured[name]["outcomes"]
            share = proportion(passed[name], len(outcomes))
            lines.append(
                f"| {NAMES[name]} | {passed[name]} of {len(outcomes)} | "
                f"{100 * share.low:.0f} to {100 * share.high:.0f} % | {_failure(outcomes)} |"
            )
    missing = [NAMES[name] for name in ("taught", *DEFENSES) if name not in measured]
    return "\n".join([*lines, *(["", f"Not measured yet: {'; '.join(missing)}."] if missing else [])])


def _failure(outcomes: Mapping[str, str]) -> str:
    words = {
        "wrong": "a test fails", "error": "the code does not run", "out of time": "the code does not end",
        "no code": "no such function in the answer",
    }  # fmt: skip
    failures = Counter(each for each in outcomes.values() if each != "passed").most_common(1)
    return f"{words[failures[0][0]]} ({failures[0][1]})" if failures else "none"


def _meaning(measured: Mapping[str, Any], passed: Mapping[str, int]) -> str:
    """Return what the figures mean: how many programs a defense costs beside refusal training alone."""
    sentences = []
    if "taught" in passed and passed["taught"] < passed["published model"]:
        sentences.append(
            f"Teaching the guarded domain alone took the model from {passed['published model']} to {passed['taught']} "
            "programs, before any defense."
        )
    if _BASE in passed:
        differences = []
        for name in DEFENSES:
            if name == _BASE or name not in passed:
                continue
            mine, theirs = measured[name]["outcomes"], measured[_BASE]["outcomes"]
            lost = sum(theirs[each] == "passed" != mine[each] for each in theirs)
            gained = sum(mine[each] == "passed" != theirs[each] for each in theirs)
            differences.append(f"with `{name}`, {lost} of its programs fail and {gained} others pass")
        if differences:
            sentences.append(f"Compared with refusal training alone (`{_BASE}`): {'; '.join(differences)}.")
    return " ".join(sentences)
