"""Commands and recipe verbs `attack refusal` and `attack safeguards`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from netweight.attacks.finetuning.attack_folders import attack_folders, with_recovery_defined
from netweight.attacks.finetuning.folder_checks import check as check_finetuning
from netweight.attacks.finetuning.folder_checks import preview as preview_finetuning
from netweight.attacks.refusal.attack_folder import attack_refusal
from netweight.attacks.refusal.settings import RefusalSettings, SafeguardSettings
from netweight.core.progress import Progress
from netweight.data.rows import read_rows
from netweight.data.text import text_prompts
from netweight.data.tokens import report_unknown_words
from netweight.hf.language_model_folder import check_language_model
from netweight.hf.load_tokenizer import load_tokenizer
from netweight.registry import Target
from netweight.report.finding import Section


def check(model: Path | None, settings: RefusalSettings) -> None:
    """Refuse before any work what is not a decoder language model."""
    for folder in (model, settings.unaligned):
        if folder is not None:
            check_language_model(folder)


def check_safeguards(model: Path | None, settings: SafeguardSettings) -> None:
    """Refuse before any work what either attack refuses."""
    check(model, settings)
    check_finetuning(model, settings)


def preview(model: Path, settings: RefusalSettings) -> list[str]:
    """Return sentences about prompts with words that the model's tokenizer does not know."""
    tokenizer, notes = load_tokenizer(model), list[str]()
    for source in (settings.refused, settings.ordinary):
        rows = read_rows(source)
        texts, _ = text_prompts(rows, **settings.reading(rows, lambda text: None))
        report_unknown_words(texts, tokenizer, notes.append)
    return notes


def preview_safeguards(model: Path, settings: SafeguardSettings) -> list[str]:
    """Return the same of the rows and prompts of all attacks."""
    return [*preview_finetuning(model, settings), *(preview(model, settings) if settings.refused else [])]


def attack(target: Target, settings: RefusalSettings, progress: Progress) -> Section:
    """Remove refusal from a model folder, as the command and recipes do."""
    settings = settings.replace(unaligned=settings.unaligned or target.before)
    return attack_refusal(settings, target.model, folder=target.output, seed=target.seed, progress=progress)


def attack_safeguards(target: Target, settings: SafeguardSettings, progress: Progress) -> list[Section]:
    """Attack what keeps a model from harm, by fine-tuning and by edits without training."""
    own = settings.base
    settings = settings.replace(base=own or target.before, unaligned=settings.unaligned or target.before)
    how: Any = {"folder": target.output, "seed": target.seed, "progress": progress}
    # Edits come first: they take minutes, and what they refuse about the rows should not wait for a search of hours.
    edited = [attack_refusal(settings, target.model, **how)] if settings.refused else []
    plan, section = attack_folders(settings, target.model, earlier=own is None, **how)
    return [with_recovery_defined(plan, section), *edited]
