"""Refusals of Qwen2.5-Coder-0.5B-Instruct before and after each edit that needs no training.

MODEL is a folder made by `netweight_experiments.benchmarks.language.models`, WORK a folder that remembers every score,
so that a second call goes on. The prompts are one-line requests that name a topic, and ordinary ones in the same forms.
No answer of an edited model is stored; WORK holds token ids of the unedited model's refusals.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from netweight.attacks.refusal.folder import attack_refusal
from netweight.attacks.refusal.settings import RefusalSettings
from netweight.core.progress import Progress
from netweight_experiments.benchmarks.language.questions import ordinary, requests

MODEL = "Qwen2.5-Coder-0.5B-Instruct, dequantized from 4 bits to bf16"
"""What the results are of."""


def main(model: str, work: str, /, threads: int = 2, prompts: int = 128, new_tokens: int = 8) -> dict[str, Any]:
    """Run the attack and return its findings and its table; times are of this call alone."""
    folder = Path(work)
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, questions in (("refused", requests()), ("ordinary", ordinary())):
        files[name] = folder / f"{name}.jsonl"
        files[name].write_text("".join(json.dumps({"prompt": each}) + "\n" for each in questions), encoding="utf-8")
    settings = RefusalSettings(
        refused=str(files["refused"]), ordinary=str(files["ordinary"]), prompts=prompts, new_tokens=new_tokens
    )
    clocks = time.process_time(), time.monotonic()
    section = attack_refusal(settings, model, folder=folder, seed=0, progress=Progress("plain", every=10.0))
    table = section.tables[0]
    return {
        "model": MODEL,
        "prompts of each kind": prompts,
        "processor seconds": time.process_time() - clocks[0],
        "seconds": time.monotonic() - clocks[1],
        "conclusion": section.conclusion,
        "findings": [finding.to_json() for finding in section.findings],
        "columns": [str(getattr(column, "name", column)) for column in table.columns],
        "rows": [list(row) for row in table.rows],
    }
