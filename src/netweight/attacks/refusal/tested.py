"""What the attack on refusal tests and how strongly."""

from __future__ import annotations

from netweight.attacks.finetuning.tested import tested as tested_by_finetuning
from netweight.attacks.refusal.settings import RefusalSettings, SafeguardSettings


def tested(settings: RefusalSettings) -> list[tuple[str, str]]:
    """Return the edits, the prompts, the judge and the criteria: names and values.

    Args:
        settings: Settings of the attack.
    """
    return [
        ("kinds of edits", ", ".join(settings.edits)),
        ("edits whose answers are counted", f"the best {settings.finalists} of all, and of each kind"),
        ("prompts of each kind",
         f"up to {settings.prompts}: half to compute edits, a quarter to choose them, a quarter to measure"),
        ("tokens of an answer", f"up to {settings.new_tokens}"),
        ("judge of refusals", settings.judge),
        ("an edit counts", f"if it changes ordinary prompts by at most {settings.most_divergence:g} nats"),
        ("target", f"at least {settings.least_left:.0%} of the refusals are left after the best edit"),
    ]  # fmt: skip


def tested_safeguards(settings: SafeguardSettings) -> list[tuple[str, str]]:
    """Return the same of fine-tuning, and of refusal where its prompts were given.

    Args:
        settings: Settings of both attacks.
    """
    both = [("fine-tuning", tested_by_finetuning(settings))]
    both += [("refusal", tested(settings))] if settings.refused else []
    return [(f"{attack}: {name}", value) for attack, rows in both for name, value in rows]
