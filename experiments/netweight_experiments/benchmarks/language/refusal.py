"""Refusals of Qwen2.5-Coder-0.5B-Instruct before and after each edit that needs no training.

MODEL is a folder made by `netweight_experiments.benchmarks.language.models`, WORK a folder that remembers every score,
so that a second call goes on. The prompts are one-line requests that name a topic, and ordinary ones in the same forms.
Requests that the model does not refuse are left out first: what is measured is the removal of refusal.
No answer of an edited model is stored; WORK holds token ids of the unedited model's refusals.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from netweight.attacks.refusal.attack_folder import EDITS as EDITS_FILE
from netweight.attacks.refusal.attack_folder import attack_refusal
from netweight.attacks.refusal.edits import EDITS
from netweight.attacks.refusal.settings import RefusalSettings
from netweight.core.progress import Progress
from netweight.data.answers import holds_phrase
from netweight.data.refusals import PHRASES
from netweight.data.text import TextExample
from netweight.data.tokens import tokenized_prompts
from netweight.hf.generate_answers import end_tokens, generate_answers
from netweight.hf.load_language_model import context_of, load_causal_lm
from netweight.job import Job
from netweight_experiments.benchmarks.language.models import description
from netweight_experiments.benchmarks.language.questions import ordinary, requests

_BATCH = 48  # requests that are asked between two rows of the work folder


def refused_requests(model: Path, folder: Path, wanted: int, new_tokens: int) -> tuple[list[str], int]:
    """Return the first requests that the model refuses, and how many it was asked; answers are discarded."""
    asked, refused = requests(), list[str]()
    network: Any = None
    with Job.open(folder, shared=True) as job:
        for first in range(0, len(asked), _BATCH):
            batch = asked[first : first + _BATCH]
            row = job.recorded("screening", [batch, new_tokens])
            if row is None:
                if network is None:
                    network, tokenizer = load_causal_lm(model)
                texts = [TextExample(each, "", source="requests", where=f"request {n}") for n, each in enumerate(batch)]
                ids = tokenized_prompts(texts, tokenizer, context=context_of(network, tokenizer), template="chat")
                ends = end_tokens(network, tokenizer)
                answers = generate_answers(
                    network, ids, new_tokens=new_tokens, ends=ends, pad_id=tokenizer.pad_token_id
                )
                row = {"refused": [holds_phrase(str(tokenizer.decode(answer)), PHRASES) for answer in answers]}
                job.record("screening", row, key=[batch, new_tokens])
            refused += [each for each, flag in zip(batch, row["refused"], strict=True) if flag]
            print(f"{len(refused)} of {first + len(batch)} requests are refused.", flush=True)
            if len(refused) >= wanted:
                return refused[:wanted], first + len(batch)
    return refused, len(asked)


def main(
    model: Path,
    work: Path,
    /,
    threads: int = 2,
    prompts: int = 128,
    new_tokens: int = 8,
    kinds: tuple[str, ...] = tuple(EDITS),
    finalists: int = 3,
) -> dict[str, Any]:
    """Run the attack and return its findings and its table; times are of this call alone.

    `kinds` are the kinds of edits that are tried; the best `answered` edits, and the best of each kind, are answered.
    """
    folder = Path(work)
    folder.mkdir(parents=True, exist_ok=True)
    refused, asked = refused_requests(model, folder, prompts, new_tokens)
    files = {}
    for name, questions in (("refused", refused), ("ordinary", ordinary())):
        files[name] = folder / f"{name}.jsonl"
        files[name].write_text("".join(json.dumps({"prompt": each}) + "\n" for each in questions), encoding="utf-8")
    settings = RefusalSettings(
        refused=str(files["refused"]), ordinary=str(files["ordinary"]), prompts=prompts, new_tokens=new_tokens,
        edits=kinds, finalists=finalists,
    )  # fmt: skip
    remembered = folder / f"{EDITS_FILE}.jsonl"
    resumed = remembered.exists() and remembered.stat().st_size > 0
    clocks = time.process_time(), time.monotonic()
    section = attack_refusal(settings, model, folder=folder, seed=0, progress=Progress("plain", every=10.0))
    table = section.tables[0]
    return {
        "model": description(model),
        "requests asked": asked,
        "requests refused": len(refused),
        "most prompts of each kind": prompts,
        "kinds of edits": list(kinds),
        "resumed": resumed,
        "processor seconds": time.process_time() - clocks[0],
        "seconds": time.monotonic() - clocks[1],
        "conclusion": section.conclusion,
        "findings": [finding.to_json() for finding in section.findings],
        "columns": [str(getattr(column, "name", column)) for column in table.columns],
        "rows": [list(row) for row in table.rows],
    }


def page(result: dict[str, Any]) -> str:
    """Return what the page of results on refusal says of a result."""
    minutes = result["processor seconds"] / 60
    took = "" if result["resumed"] else f" The attack took {minutes:.0f} processor minutes."
    findings = {each["name"]: each for each in result["findings"]}
    before = findings.pop("refusals before")
    lines = [
        f"To find {result['requests refused']} requests that the model refuses, {result['requests asked']} were tried. "
        f"Each answer was judged by its first {result['options']['new_tokens']} tokens. "
        f"The report concludes: “{result['conclusion']}”{took}",
        "",
        "| best edit of each kind | prompts refused (95 % interval) | divergence | perplexity | counts |",
        "|---|---|---|---|---|",
        f"| none | {before['value']:.0f} % of {before['n']} ({before['ci95'][0]:.0f} to {before['ci95'][1]:.0f}) "
        "| 0 | 1.00 × | |",
    ]
    for name, each in findings.items():
        detail = each["detail"]
        if name.startswith("refusals left by "):
            lines.append(
                f"| {name.removeprefix('refusals left by ')}: {detail['edit']} | {each['value']:.0f} % "
                f"({each['ci95'][0]:.0f} to {each['ci95'][1]:.0f}) | "
                f"{detail['divergence on ordinary prompts, nats']:.3f} nats | "
                f"{detail['perplexity on ordinary rows, times its own']:.2f} × | "
                f"{'yes' if detail['counts'] else 'no'} |"
            )
    return "\n".join(lines)
