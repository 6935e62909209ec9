"""RepNoise's ablations: frozen parts (6), the loss (14, 15), rate, epochs, noise, seed and pairs (16 to 20)."""

from __future__ import annotations

import dataclasses
from statistics import median
from typing import Any

from netweight.report.finding import Finding
from netweight.reproduce.registry import Measured
from netweight.reproduce.repnoise_grid import CORRECTED, REPNOISE, STRONGEST, TABLE1, Line
from netweight.reproduce.repnoise_models import Defended
from netweight.reproduce.repnoise_plan import Plan, plan

_HARMFULNESS = dataclasses.replace(STRONGEST, title="harmfulness")
_WEAK, _MANY, _MIDDLE, _, _FAST, _ = TABLE1
_SEEDS = (42, 7, 17)
_NOT_SAID = "Attacked at 8e-5 with 10k examples, which the paper does not say."
_PARTS = ("LM head", "last layer", "layers 20-31", "layers 10-20", "layers 0-10")


def _with(on: Defended = REPNOISE, **changes: Any) -> Defended:
    return dataclasses.replace(on, **changes)


def _lines(*rows: tuple[str, Defended]) -> tuple[Line, ...]:
    return tuple(Line(title, on) for title, on in rows)


plan(
    "repnoise-table6",
    Plan(
        _lines(
            ("nothing frozen", REPNOISE),
            *((f"{part} frozen", _with(frozen=part)) for part in _PARTS),
            ("every layer frozen", _with(frozen="every layer")),
        ),
        (_WEAK, _MANY, _MIDDLE),
        steps=True,
        small=(
            "Of 4 blocks 2 and 3 stand for layers 20-31 of 32, 1 and 2 for 10-20, 0 and 1 for 0-10. Layers are read as "
            "numbers; the published code freezes all where 0-10 is asked for, hence the row of every layer.",
        ),
    ),
)

plan(
    "repnoise-table14",
    Plan(
        _lines(
            ("RepNoise", REPNOISE),
            ("without noise", _with(beta=0.0)),
            ("without ascent", _with(alpha=0.0)),
            ("RepNoise, corrected", CORRECTED),
            ("corrected, without noise", _with(CORRECTED, beta=0.0)),
            ("corrected, without ascent", _with(CORRECTED, alpha=0.0)),
        ),
        (_WEAK, _FAST, STRONGEST),
        steps=True,
    ),
)

plan(
    "repnoise-table15",
    Plan(
        _lines(
            ("RepNoise, corrected", CORRECTED),
            ("without mask", _with(CORRECTED, loss="no mask")),
            ("without layer-wise ascent", _with(CORRECTED, loss="no lens")),
        ),
        (STRONGEST, _WEAK),
        steps=True,
        differs=(
            "Both are ablations of the corrected loss: the published one has neither switch. Without mask prompts "
            "count as answers do, on both sides of a pair.",
        ),
    ),
)

plan(
    "repnoise-table16",
    Plan(
        _lines(("defence lr 2e-5", REPNOISE), ("defence lr 4e-5", _with(lr=4e-5))),
        (STRONGEST,),
        steps=True,
    ),
)

plan(
    "repnoise-table17",
    Plan(
        _lines(("1 epoch", REPNOISE), ("2 epochs", _with(epochs=2))),
        (_HARMFULNESS,),
        steps=True,
        differs=(_NOT_SAID, "Epochs are the defense's; the paper does not say whose."),
    ),
)

plan(
    "repnoise-table18",
    Plan(
        _lines(
            ("beta 0", _with(beta=0.0)),
            ("beta 1e-4", _with(beta=1e-4)),
            ("beta 0.001", REPNOISE),
            ("beta 0.01", _with(beta=0.01)),
            ("beta 4", _with(beta=4.0)),
        ),
        (_HARMFULNESS,),
        steps=True,
        differs=(_NOT_SAID,),
    ),
)


def _with_spread(measured: Measured) -> Measured:
    """Add what three seeds say together: median and worst of the steps, which harm at the end may hide."""
    findings = []
    for kind, corrected in (("RepNoise", False), ("RepNoise, corrected", True)):
        rows = [row for row in measured.rows if row.name.startswith("corrected") == corrected]
        harm = [float(value) for row in rows if (value := row.values[0]) is not None]
        if len(harm) == len(_SEEDS):
            findings.append(
                Finding(
                    f"harmfulness by seed, median, {kind}",
                    median(harm),
                    better="lower",
                    n=len(harm),
                    seeds=_SEEDS,
                    detail={"each": harm, "steps to 0.9, null if never": [row.values[1] for row in rows]},
                )
            )
    return dataclasses.replace(measured, findings=(*measured.findings, *findings))


plan(
    "repnoise-table19",
    Plan(
        _lines(
            *((f"seed {seed}", _with(seed=seed)) for seed in _SEEDS),
            *((f"corrected, seed {seed}", _with(CORRECTED, seed=seed)) for seed in _SEEDS),
        ),
        (STRONGEST,),
        steps=True,
        shown=_with_spread,
    ),
)

plan(
    "repnoise-table20",
    Plan(
        _lines(
            *(
                (f"{count} pairs", _with(pairs=number))
                for count, number in (("1k", 1000), ("2.5k", 2500), ("5k", 5000))
            ),
            ("10k pairs", REPNOISE),
        ),
        (_FAST, STRONGEST),
        steps=True,
    ),
)
