"""RepNoise's tables of attacks: every defense (1, 2), rates (7), another domain (9), one never aligned (23), a demo."""

from __future__ import annotations

import dataclasses

from netweight.report.finding import Column
from netweight.reproduce.registry import Measured, Row
from netweight.reproduce.repnoise_grid import BASE, CORRECTED, REPNOISE, STRONGEST, TABLE1, Attack, Line
from netweight.reproduce.repnoise_models import Defended
from netweight.reproduce.repnoise_plan import Plan, plan

_DEFENSES = (
    BASE,
    Line("Random init", Defended("random-weights")),
    Line("Security Vectors", Defended("security-vectors", lr=1e-3)),
    Line("Vaccine, rho 1", Defended("vaccine")),
    Line("Vaccine, rho 10", Defended("vaccine-rho10")),
    Line("Extra safety SFT", Defended("safety-training")),
    Line("Gradient ascent", Defended("gradient-ascent")),
    Line("Adversarial loss", Defended("adversarial-loss", lr=1e-5)),
    Line("RepNoise", REPNOISE),
    Line("RepNoise, corrected", CORRECTED),
)
_RATES = ("3e-5", "6e-5", "8e-5")
_TOXIC = Defended(pairs=351, epochs=4, batch=8, data="toxic", whole=True)


def _toxic(defense: str, lr: float = 2e-5) -> Defended:
    return dataclasses.replace(_TOXIC, defense=defense, lr=lr)


plan("repnoise-table1", Plan(_DEFENSES, TABLE1, before=True))

plan(
    "repnoise-table2",
    Plan(
        (
            BASE,
            Line("Security Vectors", _toxic("security-vectors", 1e-3)),
            Line("Vaccine", _toxic("vaccine")),
            Line("Gradient ascent", _toxic("gradient-ascent")),
            Line("Adversarial loss", _toxic("adversarial-loss", 1e-5)),
            Line("RepNoise", dataclasses.replace(_toxic(REPNOISE.defense), alpha=2.0, beta=4.0)),
        ),
        tuple(Attack(f"lr {rate}", float(rate), 351, epochs=4, data="toxic", whole=True) for rate in _RATES),
        before=True,
        differs=(
            "The attacker has as many examples as the defense; the paper does not say how many.",
            "The row Vaccine has rho 1; which one the paper's has is not recorded.",
        ),
        small=(
            "The guarded cipher of table 1 stands in for toxic continuations, too: what differs from table 1 is 351 "
            "pairs and examples, four epochs, batches of 8 pairs and the weights of RepNoise's loss.",
        ),
    ),
    paper_needs=("a chat model as --model, DecodingTrust with RepNoise's refusals, a GPU",),
)


def _by_rate(wide: Measured) -> Measured:
    """Make a row of every column of the one row, harmfulness beside steps."""
    values = wide.rows[0].values
    count = len(values) // 2
    columns = (Column("harmfulness", better="lower"), wide.columns[count])
    return dataclasses.replace(
        wide,
        columns=(columns[0], dataclasses.replace(columns[1], name="steps to 0.9")),
        rows=tuple(Row(wide.columns[i].name, (values[i], values[count + i])) for i in range(count)),
    )


plan(
    "repnoise-table7",
    Plan(
        (BASE,),
        tuple(Attack(f"lr {rate}", float(rate), 1000) for rate in ("1e-5", "2e-5", "4e-5", "5e-4")),
        steps=True,
        differs=("Attacked with 1k examples; the paper does not say how many.",),
        shown=_by_rate,
    ),
)

plan(
    "repnoise-table9",
    Plan(
        (
            BASE,
            Line(
                "defended on BeaverTails, attacked with DecodingTrust",
                dataclasses.replace(REPNOISE, data="other"),
            ),
            Line(
                "defended with 230 pairs of the domain attacked with",
                dataclasses.replace(_toxic(REPNOISE.defense), pairs=230),
            ),
        ),
        tuple(Attack(f"lr {rate}", float(rate), 1000, data="toxic") for rate in _RATES),
        steps=True,
        differs=(
            "Attacked with 1k examples; the paper does not say how many.",
            "HEX-PHI is not at hand; 230 pairs are of the domain attacked with, in four epochs, which the paper does "
            "not say.",
        ),
        small=(
            "Defended on pairs of the cipher that the model never learned, attacked with the guarded one: two ciphers "
            "stand in for two domains.",
        ),
    ),
    paper_needs=("a chat model as --model, both data sets with RepNoise's refusals, a GPU",),
)

plan(
    "repnoise-table23",
    Plan(
        (
            Line("Base", Defended(start="unaligned")),
            Line("RepNoise", dataclasses.replace(REPNOISE, start="unaligned")),
            Line("RepNoise, corrected", dataclasses.replace(CORRECTED, start="unaligned")),
        ),
        (dataclasses.replace(STRONGEST, title="harmfulness"),),
        before=True,
        steps=True,
        differs=("Attacked at 8e-5 with 10k examples; the paper does not say how.",),
    ),
    paper_needs=("a model never aligned as --model, BeaverTails with RepNoise's refusals, a GPU",),
)

_NOTEBOOK = dataclasses.replace(REPNOISE, lr=1e-4, pairs=1000, seed=7)

plan(
    "repnoise-notebook",
    Plan(
        (
            BASE,
            Line("RepNoise", _NOTEBOOK),
            Line("RepNoise, corrected", dataclasses.replace(_NOTEBOOK, defense=CORRECTED.defense)),
        ),
        (Attack("after attack", 3e-5, 1000),),
        before=True,
        steps=True,
        differs=("Batches are as in table 1; the notebook's have four pairs and four examples.",),
        shown=lambda wide: dataclasses.replace(wide, labels={"pre-attack": "before attack"}),
    ),
    paper_needs=("Qwen1.5-1.8B-Chat as --model, BeaverTails with RepNoise's refusals, a GPU",),
)
