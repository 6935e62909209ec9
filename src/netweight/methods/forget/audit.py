"""The audits of forgetting that need no image: how well detection tells prompts apart, and what localization found.

Importing this module declares the treatment `forget` and registers its audits, `detection` and `neurons`. Neither says
that an image is gone: that is asked of generated images and of an adversary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from netweight.core.progress import Progress
from netweight.evidence.audit import register_audit, register_treatment
from netweight.evidence.finding import Finding
from netweight.methods.forget.detection import Score, Threshold, roc
from netweight.methods.forget.results import Localization

__all__ = ["DETECTION", "NEURONS", "TREATMENT", "DetectionSubject", "detection_findings", "neuron_findings"]

TREATMENT = "forget"
DETECTION, NEURONS = "detection", "neurons"
"""Names of the audits."""

register_treatment(TREATMENT, audits=(DETECTION, NEURONS))


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
