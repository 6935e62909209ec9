"""The registration of `netweight attack finetune`; it imports nothing heavy."""

from typing import Any

from netweight.registry import Attack, lazy

FINETUNE: Attack[Any] = Attack(
    "finetune",
    lazy("netweight.attacks.finetuning.settings:FolderAttack"),
    attack=lazy("netweight.attacks.finetuning.attack_folders:attack"),
    title="Fine-tuning attacks",
    summary="Fine-tune a language model on harmful rows, and report how many steps recover the behavior.",
    description="MODEL is a folder of a transformers model, or its id on the hub, and is not changed. 20 % of the "
    "prompts are held out to measure recovery. Without --base, a defense cannot be judged. OUT "
    "receives attacks.jsonl, from which a second call continues, and a report.",
    example="netweight attack finetune defended --base my-model --harmful harmful.jsonl --out attacks",
    check=lazy("netweight.attacks.finetuning.folder_checks:check"),
    tested=lazy("netweight.attacks.finetuning.tested:tested"),
    preview=lazy("netweight.attacks.finetuning.folder_checks:preview"),
)
