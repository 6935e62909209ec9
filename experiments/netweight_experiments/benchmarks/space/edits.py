"""Edits of two attributes, judged image by image by a reader that nothing was fitted, calibrated or chosen with.

    python -m netweight_experiments.benchmarks space.edits BANK ... --work FOLDER

Of every person, in both directions, at several strengths: how often images show the attribute (read above 0), how far
it moved, how far the worst of the seven other attributes moved, and how alike the images stay (the cosine of the
reader's features between the edited and the unedited image of one noise). Readings are clipped to -1 to 1, and changes
are shares of that range, so that an effect of 1 is from one end to the other. What another person's image of that noise
has is beside: of identity, the cosine; of the attribute, the frequency among people who have it.

People are set aside: directions are fitted to the labels of the others. A corrected edit sees the model that it edits
through the package's reader and other noises. A Concept Slider (Gandikota et al., arXiv 2311.12092) is trained from
pairs of drawings that differ in the attribute alone, with three learning rates, and is added to the model of a person.
Each of its trainings has as much processor time as the corrected edits of these people. FOLDER keeps the reader.
"""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from netweight.methods.space.directions import fit_direction
from netweight.methods.space.edits import corrected_steps
from netweight.methods.space.inversion import generate_differentiably
from netweight.methods.space.labels import LabelColumn, Labels, read_labels
from netweight.methods.space.settings import CorrectionSettings
from netweight.nn.train_lora import AdapterRecipe
from netweight.toys.drawn_pictures import ATTRIBUTES
from netweight.toys.faces_pipeline import LAYERS, read_faces
from netweight_experiments.benchmarks.space.reading import CAPTIONS, STEPS, Reading, random_rows
from netweight_experiments.tables.w2w.edits import SlidSpace
from netweight_experiments.tables.w2w.openers import face_pairs, train_sliders

EDITED, ASIDE, SEED = ("beard", "width"), 48, 1003
# Of the farthest model for the encoder, of the step for corrected ones, of the trained adapter for sliders.
STRENGTHS = {"encoder": [0.75, 1.5, 2.5], "corrected": [0.5, 1.0, 1.5]}
SLIDER_STRENGTHS = [0.5, 1.0, 1.5, 2.0, 3.0, 4.0]
SLIDER_RATES, TIMED_STEPS = (0.003, 0.01, 0.03), 5
RANGES = [2.0] * len(ATTRIBUTES)  # every attribute reaches from -1 to 1


def directions(reading: Reading, labels, others):
    """A direction of each attribute, fitted to the others' labels."""
    columns = {each: LabelColumn(each, labels[each].values[others]) for each in ATTRIBUTES}
    part = Labels(tuple(labels.names[row] for row in others), columns)
    scores = reading.space.scores[others]
    return [
        fit_direction(scores, part, each, confounders=[one for one in ATTRIBUTES if one != each], folds=0)
        for each in ATTRIBUTES
    ]


def edits_of(reading: Reading, fitted, points, name, sign, deviations, seeds):
    """Return the edits of an attribute up (sign 1) or down (-1): kind, strengths, processor seconds, and images."""
    index = ATTRIBUTES.index(name)
    turned = [sign if place == index else 1.0 for place in range(len(ATTRIBUTES))]
    lines = [replace(line, vector=turn * line.vector) for line, turn in zip(fitted, turned, strict=True)]

    def generate(moved, seeds):
        return generate_differentiably(
            reading.model, reading.space, moved, seeds, prompts=CAPTIONS[: len(seeds)], guidance=1.0, steps=STEPS
        )

    def read(images):
        return read_faces(images).attributes * torch.tensor(turned)

    began = time.process_time()
    corrected = corrected_steps(
        generate, read, points, lines, name, CorrectionSettings(), ranges=RANGES, deviations=deviations, seed=0
    )
    budget = time.process_time() - began
    for kind, step, spent in (("encoder", lines[index].step(1.0, "reach"), None), ("corrected", corrected, budget)):
        yield (
            kind, STRENGTHS[kind], {"cpu_seconds": spent},
            lambda strength, step=step: reading.images(points + strength * step, seeds),
        )  # fmt: skip
    for rate in SLIDER_RATES:
        slider, about = slider_within(reading, name, rate, budget)
        yield (
            "slider", SLIDER_STRENGTHS, about,
            lambda strength, slider=slider: reading.images(
                points, seeds, space=SlidSpace(reading.space, slider, sign * strength)
            ),
        )  # fmt: skip


def slider_within(reading: Reading, name, rate, budget):
    """Train a Concept Slider of an attribute for a number of processor seconds; return its changes of weights."""
    pairs = [face_pairs(name, name)]
    train = lambda steps: train_sliders(  # noqa: E731
        reading.model, pairs, AdapterRecipe(steps=steps, learning_rate=rate), layers=LAYERS
    )
    train(1)  # what is done only once is not counted
    began = time.process_time()
    train(TIMED_STEPS)
    steps = max(1, round(budget * TIMED_STEPS / (time.process_time() - began)))
    began = time.process_time()
    slider = train(steps).stack.adapter(0)
    about = {"cpu_seconds": time.process_time() - began, "steps": steps, "rate": rate}
    return {module: change.dense().float() for module, change in slider.factors.items()}, about


def rows_of(reading: Reading, bank: str, labels, people: int, noises: int):
    """Rows of a bank: attribute, direction, kind and strength, with a line for each person."""
    scores = reading.space.scores.double()
    order = random_rows(len(scores), len(scores), SEED).tolist()
    aside, others = order[:ASIDE], order[ASIDE:]
    fitted, deviations = directions(reading, labels, others), scores[others].std(0)
    seeds = torch.randint(1 << 31, (noises,), generator=torch.Generator().manual_seed(7_000_000)).tolist()
    for name in EDITED:
        index = ATTRIBUTES.index(name)
        rest = [place for place in range(len(ATTRIBUTES)) if place != index]
        values = labels[name].values
        for sign in (1, -1):
            chosen = [row for row in aside if sign * float(values[row]) < 0][:people]
            having = [row for row in aside if sign * float(values[row]) > 0][:people]
            points = scores[chosen]
            before = reading.images(points, seeds)
            said, seen = reading.attributes(before), reading.features(before)
            usual = float((reading.attributes(reading.images(scores[having], seeds))[:, :, index] * sign > 0)
                          .double().mean())  # fmt: skip
            stranger = float((seen * seen.roll(1, 0)).sum(-1).mean())
            for kind, strengths, about, draw in edits_of(reading, fitted, points, name, sign, deviations, seeds):
                for strength in strengths:
                    images = draw(strength)
                    after = reading.attributes(images)
                    change = (after - said) / 2
                    worst = change[:, :, rest].abs().mean(1).amax(1)
                    lines = {
                        "frequency": (after[:, :, index] * sign > 0).double().mean(1),
                        "effect": sign * change[:, :, index].mean(1), "worst_other": worst,
                        "others": change[:, :, rest].abs().mean((1, 2)),
                        "identity": (reading.features(images) * seen).sum(-1).mean(1),
                    }  # fmt: skip
                    yield {
                        "bank": bank, "attribute": name, "direction": "more" if sign > 0 else "less", "kind": kind,
                        "strength": strength, "people": len(chosen), "noises": noises, "made": about,
                        "mean": {key: float(value.mean()) for key, value in lines.items()},
                        "unedited_frequency": float((said[:, :, index] * sign > 0).double().mean()),
                        "frequency_of_people_who_have_it": usual, "identity_of_another_person": stranger,
                        "person": {key: value.tolist() for key, value in lines.items()},
                    }  # fmt: skip


def main(
    banks: tuple[Path, ...], /, *, work: Path, people: int = 6, noises: int = 4,
    reader_steps: int = 300,
):  # fmt: skip
    rows: list[dict[str, Any]] = []
    for folder in banks:
        reading = Reading(folder, work, reader_steps)
        labels = read_labels(folder / "labels.csv", reading.space.names)
        about = {"reader": {"r_squared": reading.explained}, "settings": CorrectionSettings().to_json()}
        for row in rows_of(reading, folder.name, labels, people, noises):
            rows.append(row)
            print({key: value for key, value in row.items() if key != "person"}, flush=True)
            yield about | {"rows": rows}
