"""Whether a sample is one person in all noises, how far samples spread, and how near the nearest model is.

    python -m netweight_experiments.benchmarks space.samples BANK ... --work FOLDER

A sample is a set of weights; its images differ by their noise. A share is that of points whose binary attribute (beard,
glasses) is read above 0 in one noise and below 0 in another, for each sampler and for trained models. Spread is the
standard deviation of an attribute's mean over samples by that over models, averaged over attributes. Nearness is the
distance to the nearest training model, divided by the models' median distance to theirs: 0 would be a copy.

Noises are 1000 and following, the reader is another network than the package's (see `reading.py`), and models are drawn
by another seed than the sampler was chosen with. FOLDER keeps the reader.
"""

import math
from pathlib import Path
from typing import Any

import torch

from netweight.methods.space.points import GaussianSampler, KernelSampler, PairSampler
from netweight.toys.drawn_pictures import BINARY, FACES
from netweight_experiments.benchmarks.space.reading import Reading, random_rows

FIRST_NOISE, DRAW, MODELS = 1000, 17, 29


def changing(read: torch.Tensor) -> dict[str, float]:
    """Share of points whose attribute is there in some noises and not in others."""
    shares = {}
    for name in BINARY:
        values = read[:, :, FACES.attributes.index(name)]
        shares[name] = float(((values.amax(1) > 0) & (values.amin(1) < 0)).double().mean())
    return shares


def rows_of(reading: Reading, bank: str, count: int, noises: int):
    """A row for trained models, and one for each sampler."""
    scores = reading.space.scores
    apart = torch.cdist(scores, scores).fill_diagonal_(math.inf).min(1).values.median()
    points = {
        "trained models": scores[random_rows(count, len(scores), MODELS)],
        "pairs of similar models (default)": PairSampler.fit(scores).draw(count, seed=DRAW),
        "pairs of any models, 1.2": PairSampler.fit(scores, neighbors=len(scores), factor=1.2).draw(count, seed=DRAW),
        "gaussian": GaussianSampler.fit(scores).draw(count, seed=DRAW),
        "kernel, 0.5": KernelSampler.fit(scores, bandwidth=0.5).draw(count, seed=DRAW),
    }
    usual = None
    for name, drawn in points.items():
        read = reading.attributes(reading.images(drawn, list(range(FIRST_NOISE, FIRST_NOISE + noises))))
        means = read.mean(1).std(0)
        usual = means if usual is None else usual
        near = torch.cdist(drawn.double(), scores.double()).min(1).values / apart
        yield {"bank": bank, "sampler": name, "points": count, "noises": noises, "changing": changing(read),
               "spread": float((means / usual).mean()), "within": float(read.std(1).mean()),
               "nearest": float(near.median()), "closest": float(near.min())}  # fmt: skip


def main(
    banks: tuple[Path, ...], /, *, work: Path, count: int = 48, noises: int = 8,
    reader_steps: int = 300,
):  # fmt: skip
    rows: list[dict[str, Any]] = []
    for folder in banks:
        reading = Reading(folder, work, reader_steps)
        about = {"reader": {"r_squared": reading.explained}, "draw": DRAW}
        for row in rows_of(reading, folder.name, count, noises):
            rows.append(row)
            print(row, flush=True)
            yield about | {"rows": rows}
