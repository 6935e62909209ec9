"""What NeuZip's inference tables say, as findings: with intervals, and against the quantizers at equal memory.

Bounds are ours and are marked so; the paper gives none. Used by `neuzip_inference.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from netweight.report.finding import Finding
from netweight.reproduce.inference_rows import SEED, Outcome
from netweight.reproduce.inference_ways import BITS, BLOCKS

if TYPE_CHECKING:
    from netweight.reproduce.inference_subjects import Opened

__all__ = ["block_findings", "equal_memory_findings", "findings"]

_OURS = {"bound": "ours"}


def findings(opened: Opened, outcomes: Sequence[Outcome]) -> tuple[Finding, ...]:
    """Return the findings of table 3.

    Args:
        opened: What was measured.
        outcomes: Vanilla first.
    """
    text = opened.subject.texts[0].name
    found = [outcome for outcome in outcomes if not outcome.missing]
    vanilla, *others = found
    made = [_trained(opened.training)] if opened.training else []
    for outcome in others:
        if outcome.way.bits == 7:
            made.append(_lossless(outcome, vanilla, text))
    for outcome in others:
        way = outcome.way
        if way.bits in BITS and way.block == BLOCKS[-1] and not way.whole:
            made.append(_cost(outcome, vanilla, text))
    made += equal_memory_findings(found, text)
    return tuple(made)


def block_findings(by_way: Mapping[tuple[int, int | None, str], Outcome], text: str) -> tuple[Finding, ...]:
    """Return the findings of table 4: smallest against largest blocks, in perplexity and in bytes.

    Args:
        by_way: Outcomes by bits, block and fidelity.
        text: Name of the text.
    """
    made = []
    for bits in (0, 1):
        small, large = (by_way[bits, block, "corrected"] for block in (BLOCKS[0], BLOCKS[-1]))
        ratio = small.against(large, text)
        made.append(
            Finding(
                f"perplexity at {bits} bits, blocks of {BLOCKS[0]} over blocks of {BLOCKS[-1]}",
                ratio.estimate,
                ci95=ratio.ci95,
                n=ratio.n,
                better="lower",
                seeds=(SEED,),
                detail={"bits per weight": [small.bits, large.bits], "interval": ratio.method},
            )
        )
    return tuple(made)


def equal_memory_findings(found: Sequence[Outcome], text: str) -> tuple[Finding, ...]:
    """Compare each quantizer with the best of netweight's ways whose converted layers hold no more bytes.

    Args:
        found: Outcomes that were measured.
        text: Name of the text.
    """
    ours = [outcome for outcome in found if outcome.way.bits is not None and not outcome.way.whole]
    ours = [outcome for outcome in ours if outcome.way.fidelity == "corrected"]
    made = []
    for theirs in (outcome for outcome in found if outcome.way.quantizer):
        fitting = [outcome for outcome in ours if outcome.layers <= theirs.layers]
        name = f"perplexity of NeuZip's best way in no more bytes than {theirs.way.name}, over its perplexity"
        detail: dict[str, Any] = {"bits per weight there": theirs.bits}
        if not fitting:
            reason = "no way of NeuZip's is that small"
            made.append(Finding(name, None, better="lower", detail={**detail, "reason": reason}))
            continue
        best = min(fitting, key=lambda outcome: outcome.losses[text].mean)
        ratio = best.against(theirs, text)
        detail |= {"chosen, on the same text, among": len(fitting)}
        detail |= {"way": best.way.name, "bits per weight": best.bits, "interval": ratio.method}
        made.append(
            Finding(name, ratio.estimate, ci95=ratio.ci95, n=ratio.n, better="lower", seeds=(SEED,), detail=detail)
        )
    return tuple(made)


def _trained(training: Mapping[str, Any]) -> Finding:
    unit = "per word" if "held-out perplexity per word" in training else "per token"
    model = training[f"held-out perplexity {unit}"]
    return Finding(
        "the stand-in is trained: held-out perplexity over that of token frequencies",
        model / training[f"held-out perplexity {unit} of token frequencies"],
        better="lower",
        target=0.5,
        seeds=(SEED,),
        detail={**_OURS, "steps": training["fit"]["steps"], "overfits": training["fit"]["overfits"]},
    )


def _lossless(outcome: Outcome, vanilla: Outcome, text: str) -> Finding:
    same = all(outcome.losses[name].nats == vanilla.losses[name].nats for name in vanilla.losses)
    return Finding(
        f"{outcome.way.name}: every loss equals vanilla's to the last bit",
        same,
        n=len(vanilla.losses[text].nats),
        target=True,
        detail={"layers, × vanilla": outcome.layers / vanilla.layers, "model, × vanilla": outcome.held / vanilla.held},
    )


def _cost(outcome: Outcome, vanilla: Outcome, text: str) -> Finding:
    ratio = outcome.against(vanilla, text)
    return Finding(
        f"{outcome.way.name}: perplexity over vanilla's",
        ratio.estimate,
        ci95=ratio.ci95,
        n=ratio.n,
        better="lower",
        seeds=(SEED,),
        detail={
            "bits per weight": outcome.bits,
            "largest relative change of a weight": outcome.change,
            "interval": ratio.method,
        },
    )
