"""Edits of two attributes, on people, noises and by a reader that nothing was fitted, calibrated or chosen with.

    python -m netweight_experiments.benchmarks space.edits BANK BANK BANK --work FOLDER [--seeds 0 1 2]

A BANK is a folder of `python -m netweight_experiments.toys.face_bank`. In every bank and for every seed, 48 people or
a third are set aside. Directions are fitted to the labels of the others. Measured is the effect where the other seven
attributes have changed by .05 of their range, on people set aside who have little of the attribute, four noises of
their own, by another network that was trained from another seed. A corrected edit sees the model that it edits, through
the package's reader and other noises; no label of these people. What a run found is kept in FOLDER. Settings were
chosen on people of the bank in the package, who are fitted here, but never edited.
"""

import statistics
from pathlib import Path
from typing import Any

import torch

from netweight import AdapterBank, WeightSpace
from netweight.hf.load_pipeline import text_to_image
from netweight.job import Job
from netweight.methods.space.directions import fit_direction
from netweight.methods.space.edits import COST_TARGET, EditCurve, corrected_steps
from netweight.methods.space.inversion import generate_differentiably, generate_images
from netweight.methods.space.labels import LabelColumn, Labels, read_labels
from netweight.methods.space.settings import CorrectionSettings
from netweight.metrics.intervals import t_interval
from netweight.toys.faces import ATTRIBUTES, GROUNDS, caption
from netweight.toys.faces_pipeline import FACES_BANK, faces_pipeline, read_faces
from netweight_experiments.benchmarks.space.samples import reader

EDITED, STEPS, EVALUATED, MOST = ("beard", "width"), 8, 48, 8
CHOSEN_WITH = 71  # the seed that the settings were chosen with, on the bank in the package
# Of the farthest model for the encoder, of the step for corrected ones.
STRENGTHS = {"encoder": [0.75, 1.25, 1.75, 2.5], "corrected": [0.5, 0.75, 1.0, 1.3, 1.7]}
RANGES = [2.0] * len(ATTRIBUTES)  # every attribute reaches from -1 to 1
CAPTIONS = [caption(ground) for ground in GROUNDS][:4]


def people(folder, seed):
    """A bank's space, labels, the people set aside, and the others."""
    space = WeightSpace.fit(AdapterBank.open(folder / "bank"), halves=False)
    labels = read_labels(folder / "labels.csv", space.names)
    drawn, before = (
        torch.randperm(len(space.names), generator=torch.Generator().manual_seed(1000 + each)).tolist()
        for each in (seed, CHOSEN_WITH)
    )
    seen = set(before[:EVALUATED]) if folder.resolve() == FACES_BANK.parent.resolve() else set()
    aside = [row for row in drawn if row not in seen][: min(EVALUATED, len(drawn) // 3)]
    return space, labels, aside, [row for row in drawn if row not in aside]


def steps_of(model, space, labels, others, points, name, seed):
    """The plain encoder's step, and one corrected for each point; nothing here knows of labels of the points."""
    columns = {each: LabelColumn(each, labels[each].values[others]) for each in ATTRIBUTES}
    part = Labels(tuple(labels.names[row] for row in others), columns)
    fitted = [
        fit_direction(space.scores[others], part, each, confounders=[one for one in ATTRIBUTES if one != each], folds=0)
        for each in ATTRIBUTES
    ]

    def generate(moved, seeds):
        return generate_differentiably(model, space, moved, seeds, prompts=CAPTIONS, guidance=1.0, steps=STEPS)

    found = corrected_steps(
        generate, lambda images: read_faces(images).attributes, points, fitted, name, CorrectionSettings(),
        ranges=RANGES, deviations=space.scores[others].std(0), seed=seed,
    )  # fmt: skip
    return {"encoder": fitted[ATTRIBUTES.index(name)].step(1.0, "reach"), "corrected": found}


def measured(model, space, labels, aside, others, name, network, seed):
    """Effect and costs of each kind of edit on people set aside."""
    little = [row for row in aside if labels[name].values[row] < 0][:MOST]
    noises = torch.randint(1 << 31, (4,), generator=torch.Generator().manual_seed(7_000_000 + seed)).tolist()
    points, index = space.scores[little].double(), ATTRIBUTES.index(name)
    rest = [place for place in range(len(ATTRIBUTES)) if place != index]

    def seen(moved):
        images = generate_images(model, space, moved.float(), CAPTIONS, noises, guidance=1.0, steps=STEPS)
        return (
            network(images.flatten(0, 1))[:, : len(ATTRIBUTES)].double().view(len(moved), -1, len(ATTRIBUTES)).mean(1)
        )

    before = seen(points)
    for kind, step in steps_of(model, space, labels, others, points, name, seed).items():
        strengths = STRENGTHS[kind]
        changes = [(seen(points + strength * step) - before) / 2 for strength in (0.0, *strengths)]
        curve = EditCurve(
            name, torch.tensor([0.0, *strengths]), "raw", torch.stack([each[:, index] for each in changes]),
            torch.stack([each[:, rest].abs().mean(1) for each in changes]), kind,
        )  # fmt: skip
        yield {"kind": kind, "people": len(little), "effect": curve.effect_at(COST_TARGET), "strengths": strengths,
               "effects": curve.effects.mean(1).tolist(), "costs": curve.costs.mean(1).tolist()}  # fmt: skip


def summary(rows):
    """By attribute and kind, over runs and over banks' means."""
    found = {}
    for name in dict.fromkeys(row["attribute"] for row in rows):
        for kind in dict.fromkeys(row["kind"] for row in rows):
            chosen = [row for row in rows if (row["attribute"], row["kind"]) == (name, kind)]
            banks = [
                statistics.mean(row["effect"] for row in chosen if row["bank"] == bank)
                for bank in dict.fromkeys(row["bank"] for row in chosen)
            ]
            if len(chosen) > 1 and len(banks) > 1:
                means = {"runs": t_interval([row["effect"] for row in chosen]), "banks": t_interval(banks)}
                found[f"{name}, {kind}"] = {
                    of: {"mean": one.estimate, "ci95": list(one.ci95), "n": one.n} for of, one in means.items()
                }
    return found


def main(banks: tuple[Path, ...], /, *, work: Path, seeds: tuple[int, ...] = (0, 1, 2), reader_steps: int = 300):
    network, explained = reader(work, reader_steps)
    model = text_to_image(faces_pipeline())
    about = {"settings": CorrectionSettings().to_json(), "reader": {"r_squared": explained}}
    with Job.open(work, shared=True) as job:
        rows: list[dict[str, Any]] = []
        for seed in seeds:
            for folder in banks:
                space, labels, aside, others = people(folder, seed)
                for name in EDITED:
                    at = {"bank": folder.name, "seed": seed, "attribute": name}
                    known = job.recorded("edits", at)
                    if known is None:
                        new = measured(model, space, labels, aside, others, name, network, seed)
                        known = {"rows": [at | row for row in new]}
                        job.record("edits", known, key=at)
                    rows += known["rows"]
                    print(*(f"{at} {row['kind']}: {row['effect']:.3f}" for row in known["rows"]), sep="\n", flush=True)
                yield about | {"summary": summary(rows), "rows": rows}
