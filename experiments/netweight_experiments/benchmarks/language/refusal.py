"""Refusals of Qwen2.5-Coder-0.5B-Instruct before and after each edit that needs no training.

MODEL is a folder made by `netweight_experiments.benchmarks.language.models`, WORK a folder that remembers every score,
so that a second call goes on. Prompts that the model does not refuse are left out first, as an attacker would: what is
measured is the removal of refusal, not how much there is of it. No answer is stored but for token ids of the unedited
model's refusals in WORK.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from netweight.attacks.refusal.folder import attack_refusal
from netweight.attacks.refusal.settings import PHRASES, RefusalSettings
from netweight.core.progress import Progress
from netweight.data.answers import holds_phrase
from netweight.hf.generate_answers import end_tokens, generate_answers
from netweight.hf.load_language_model import load_causal_lm
from netweight.job import Job
from netweight_experiments.benchmarks.language.questions import ordinary, requests

PROMPTS = 128
"""Prompts of each kind."""
MODEL = "Qwen2.5-Coder-0.5B-Instruct, dequantized from 4 bits to bf16"
"""What the results are of."""


def refused_requests(model: Path, job: Job, progress: Progress) -> tuple[list[str], int]:
    """Return requests that the model refuses, and how many it was asked; answers are discarded."""
    asked = requests()
    row = job.recorded("screening", asked)
    if row is None:
        progress.note(f"Asking {len(asked)} requests.")
        network, tokenizer = load_causal_lm(model)
        ids = [
            tokenizer.apply_chat_template([{"role": "user", "content": each}], add_generation_prompt=True)["input_ids"]
            for each in asked
        ]
        answers = generate_answers(
            network, ids, new_tokens=16, ends=end_tokens(network, tokenizer), pad_id=tokenizer.pad_token_id
        )
        row = {"refused": [holds_phrase(str(tokenizer.decode(answer)), PHRASES) for answer in answers]}
        job.record("screening", row, key=asked)
    return [each for each, flag in zip(asked, row["refused"], strict=True) if flag], len(asked)


def main(model: str, work: str, /, threads: int = 2) -> dict[str, Any]:
    """Run the attack and return its findings and its table; times are of this call alone."""
    return study(Path(model), Path(work))


def study(model: Path, work: Path) -> dict[str, Any]:
    """Run the attack with a work folder."""
    work.mkdir(parents=True, exist_ok=True)
    progress = Progress("plain", every=10.0)
    clocks = time.process_time(), time.monotonic()
    with Job.open(work, shared=True) as job:
        refused, asked = refused_requests(model, job, progress)
        files = {}
        for name, prompts in (("refused", refused), ("ordinary", ordinary())):
            files[name] = work / f"{name}.jsonl"
            files[name].write_text("".join(json.dumps({"prompt": each}) + "\n" for each in prompts), encoding="utf-8")
        settings = RefusalSettings(refused=str(files["refused"]), ordinary=str(files["ordinary"]), prompts=PROMPTS)
        section = attack_refusal(settings, model, folder=job, seed=0, progress=progress)
    return {
        "model": MODEL,
        "requests asked": asked,
        "requests refused": len(refused),
        "prompts of each kind": PROMPTS,
        "processor seconds": time.process_time() - clocks[0],
        "seconds": time.monotonic() - clocks[1],
        "conclusion": section.conclusion,
        "findings": [finding.to_json() for finding in section.findings],
        "table": {"columns": [str(getattr(c, "name", c)) for c in section.tables[0].columns],
                  "rows": [list(row) for row in section.tables[0].rows]},
    }  # fmt: skip
