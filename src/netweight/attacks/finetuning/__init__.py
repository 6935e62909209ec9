"""Fine-tuning as an attack: how many steps until a language model does again what was taken out of it."""

from netweight.core.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "AttackSettings": "netweight.attacks.finetuning.settings",
        "Goal": "netweight.attacks.finetuning.subject",
        "Subject": "netweight.attacks.finetuning.subject",
        "run_attack": "netweight.attacks.finetuning.attack",
    },
)
