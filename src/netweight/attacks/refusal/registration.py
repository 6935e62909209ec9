"""The registrations of `netweight attack refusal` and `netweight attack safeguards`; they import nothing heavy."""

from typing import Any

from netweight.registry import Attack, lazy

_COMMANDS, _SETTINGS = "netweight.attacks.refusal.commands", "netweight.attacks.refusal.settings"

REFUSAL: Attack[Any] = Attack(
    "refusal",
    lazy(f"{_SETTINGS}:RefusalSettings"),
    attack=lazy(f"{_COMMANDS}:attack"),
    title="Refusal",
    summary="Remove refusal from a language model without training, and measure how much of it is left.",
    description="MODEL is a folder of a transformers model, or its id on the hub. Edits remove directions "
    "from the hidden states, switch neurons off, or move the weights toward the model before its alignment. Every edit "
    "is measured and undone; no edited model is written. OUT receives a report.",
    example="netweight attack refusal my-model --refused refused.jsonl --ordinary ordinary.jsonl --out refusal",
    check=lazy(f"{_COMMANDS}:check"),
    tested=lazy("netweight.attacks.refusal.tested:tested"),
    preview=lazy(f"{_COMMANDS}:preview"),
)

SAFEGUARDS: Attack[Any] = Attack(
    "safeguards",
    lazy(f"{_SETTINGS}:SafeguardSettings"),
    attack=lazy(f"{_COMMANDS}:attack_safeguards"),
    title="Safeguards",
    summary="Run all attacks on a language model's safeguards, and report the cost of breaking them.",
    description="Searches for the fine-tuning attack that needs the fewest steps, and removes refusal without "
    "training. The base, random weights and a domain that was never learned are attacked for comparison, if they are "
    "given. OUT receives attacks.jsonl, from which a second call continues, and one report.",
    example="netweight attack safeguards my-model --harmful harmful.jsonl --refused refused.jsonl "
    "--ordinary ordinary.jsonl --out safeguards",
    check=lazy(f"{_COMMANDS}:check_safeguards"),
    tested=lazy("netweight.attacks.refusal.tested:tested_safeguards"),
    preview=lazy(f"{_COMMANDS}:preview_safeguards"),
)
