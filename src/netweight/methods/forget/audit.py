"""The audits of forgetting: how prompts were told apart, which neurons were found, what is painted and found again.

Importing this module declares the treatment `forget` and registers its audits. The first two need no image and say
nothing of any; `images` says what an edit suppresses; `embedding search` whether an adversary gets it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from netweight.attacks.embedding_search.comparison import Comparison
from netweight.attacks.embedding_search.findings import Wanted, search_findings
from netweight.core.progress import Progress
from netweight.methods.forget.detection import Score, Threshold, roc
from netweight.methods.forget.images import ImagesConfig, image_findings
from netweight.methods.forget.painting import Painted
from netweight.methods.forget.results import Localization
from netweight.report.audit import register_audit, register_treatment
from netweight.report.finding import Finding

__all__ = [
    "DETECTION",
    "IMAGES",
    "NEURONS",
    "SEARCH",
    "TREATMENT",
    "DetectionSubject",
    "detection_findings",
    "neuron_findings",
    "painted",
    "searched",
]

TREATMENT = "forget"
DETECTION, NEURONS, IMAGES, SEARCH = "detection", "neurons", "images", "embedding search"
"""Names of the audits."""

register_treatment(TREATMENT, audits=(DETECTION, NEURONS, IMAGES, SEARCH))


@final
@dataclass(frozen=True)
class DetectionSubject:
    """Scores of two kinds of prompts.

    Attributes:
        memorized: Of prompts that are known or suspected to be memorized.
        ordinary: Of others, which the threshold was not calibrated on.
        threshold: The threshold.
    """

    memorized: Sequence[Score]
    ordinary: Sequence[Score]
    threshold: Threshold


@register_audit(TREATMENT, DETECTION)
def detection_findings(subject: DetectionSubject, config: object, *, seed: int, progress: Progress) -> list[Finding]:
    """Return how well noise differences, and Wen's norm beside them, tell memorized prompts from ordinary ones.

    Args:
        subject: The scores.
        config: Not looked at.
        seed: Not used: nothing is drawn.
        progress: Not used.

    Raises:
        UsageError: A side has no score.
    """
    limit = subject.threshold
    count = len(subject.memorized) + len(subject.ordinary)
    similar = roc([each.similarity for each in subject.memorized], [each.similarity for each in subject.ordinary])
    norms = roc([each.wen for each in subject.memorized], [each.wen for each in subject.ordinary])
    found = sum(each.similarity > limit.value for each in subject.memorized) / len(subject.memorized)
    alarms = sum(each.similarity > limit.value for each in subject.ordinary) / len(subject.ordinary)
    about = {"threshold": limit.to_json()}
    return [
        Finding("AUC of noise differences", similar.auc, n=count, better="higher", baseline=norms.auc),
        Finding("AUC of Wen's norm", norms.auc, n=count, better="higher"),
        Finding("memorized prompts found", found, n=len(subject.memorized), better="higher", detail=about),
        Finding("ordinary prompts taken for memorized", alarms, n=len(subject.ordinary), better="lower", detail=about),
    ]


@register_audit(TREATMENT, NEURONS)
def neuron_findings(subject: Sequence[Localization], config: object, *, seed: int, progress: Progress) -> list[Finding]:
    """Return how many neurons were found, how many of them are different ones, and for which prompts none sufficed.

    Args:
        subject: Localizations.
        config: Not looked at.
        seed: Not used.
        progress: Not used.
    """
    named = {
        status: [each.prompt for each in subject if each.status == status]
        for status in ("resolved", "unresolved", "not memorized", "failed")
    }
    searched = [each for each in subject if each.status in ("resolved", "unresolved")]
    counts = sorted(len(each.neurons) for each in searched)
    together = len({unit for each in searched for unit in each.neurons})
    sets = len({each.neurons for each in searched if len(each.neurons)})
    middle = None if not counts else (counts[(len(counts) - 1) // 2] + counts[len(counts) // 2]) / 2
    why = {} if counts else {"reason": "no prompt is memorized"}
    return [
        Finding("neurons per prompt, median", middle, n=len(counts) or None, detail={"each": counts, **why}),
        Finding("different neurons of all prompts", together, n=len(counts) or None),
        Finding("different sets of neurons", sets, n=len(counts) or None),
        *(
            Finding(f"prompts {status}", len(prompts), n=len(subject) or None, detail={"prompts": prompts})
            for status, prompts in named.items()
        ),
    ]


@register_audit(TREATMENT, IMAGES)
def painted(subject: Painted, config: ImagesConfig, *, seed: int, progress: Progress) -> list[Finding]:
    """Return what became of memorized and of ordinary prompts' images.

    Args:
        subject: Images before and after the edit.
        config: How they are compared.
        seed: Of the intervals.
        progress: Not used: the images are there.

    Raises:
        UsageError: There is no memorized prompt, or images differ in size or number.
        MissingExtra: scipy is not installed.
    """
    return image_findings(subject, config, seed=seed)


@register_audit(TREATMENT, SEARCH)
def searched(subject: Comparison, config: Wanted, *, seed: int, progress: Progress) -> list[Finding]:
    """Return what searches for embeddings found in the edited model, the original and controls beside.

    Args:
        subject: The searches.
        config: Which model is which, and what is asked.
        seed: Of the intervals.
        progress: Not used: the searches have been made.

    Raises:
        UsageError: A subject that is named was not searched.
        MissingExtra: scipy is not installed.
    """
    return search_findings(subject, config, seed=seed)
