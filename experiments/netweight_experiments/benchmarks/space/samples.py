"""How far the attributes of samples spread, by a reader, noises, models and draws that nothing was chosen with.

    python -m netweight_experiments.benchmarks space.samples [BANK ...] --work FOLDER

The default sampler, pairs, and its factor were chosen with the package's reader, on noises 0 to 3, on 48 people of the
bank in the package. Here another network (wider kernels, GELU, no layer of the same size) from another seed reads,
pictures have noises 1000 to 1003, models are others than those people, and draws are of seeds 7 to 9. A
BANK is a folder of `python -m netweight_experiments.toys.face_bank`; by default the few hundred people in the package.
Spread is the standard deviation of an attribute over samples by that over models, averaged over attributes; its
interval is a t-interval over draws, and banks where there are several. FOLDER keeps the reader.
"""

import math
import statistics
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from netweight import AdapterBank, WeightSpace
from netweight.core.progress import Progress
from netweight.hf.load_pipeline import text_to_image
from netweight.methods.space.inversion import generate_images
from netweight.methods.space.labels import read_labels
from netweight.methods.space.points import ConditionalSampler, GaussianSampler, PairSampler
from netweight.metrics.intervals import t_interval
from netweight.toys.faces import FACES, GROUNDS, caption
from netweight.toys.faces_pipeline import FACES_BANK, faces_pipeline
from netweight_experiments.toys import face_reading
from netweight_experiments.toys.drawn_worlds import r_squared

NOISES, DRAWS, STEPS, READER_SEED = (1000, 1001, 1002, 1003), (7, 8, 9), 8, 90210
CHOSEN_ON = 48  # people that the sampler was chosen on: the first of the permutation of seed 0


class OtherReader(nn.Module):
    """A network unlike the package's that reads attributes off pictures."""

    def __init__(self):
        super().__init__()
        answers = len(FACES.attributes) + len(FACES.nuisances) + len(FACES.grounds)
        self.body = nn.Sequential(
            nn.Conv2d(3, 24, 5, padding=2), nn.GELU(), nn.Conv2d(24, 48, 4, stride=2, padding=1), nn.GELU(),
            nn.Conv2d(48, 64, 4, stride=2, padding=1), nn.GELU(), nn.Flatten(),
            nn.Linear(64 * (FACES.side // 4) ** 2, 192), nn.GELU(), nn.Linear(192, answers),
        )  # fmt: skip

    def forward(self, pictures):
        return self.body(pictures * 2 - 1)


def reader(folder, steps):
    """The other reader, trained once, and its R² on strangers."""
    file, network = folder / f"reader-{steps}.safetensors", OtherReader()
    if not file.is_file():
        face_reading.fit(network, steps, READER_SEED, FACES, Progress())
        folder.mkdir(parents=True, exist_ok=True)
        save_file(network.state_dict(), file)
    network.load_state_dict(load_file(file))
    network.requires_grad_(False)
    pictures, measured, _ = face_reading.pictures(2000, READER_SEED, FACES, first=-1)
    explained = r_squared(measured, network(pictures)[:, : measured.shape[1]])
    return network, dict(zip(FACES.attributes, explained.tolist(), strict=False))


def measured(folder, network, count, progress):
    """Rows of a bank: sampler, draw, spread of each attribute, and how near the nearest model is."""
    bank = AdapterBank.open(folder / "bank")
    space = WeightSpace.fit(bank)
    labels, model = read_labels(folder / "labels.csv", space.names), text_to_image(faces_pipeline())
    order = torch.randperm(len(bank), generator=torch.Generator().manual_seed(0))
    own = folder.resolve() == FACES_BANK.parent.resolve()
    unseen = order[CHOSEN_ON if own else 0 :][:count]

    def read(scores):
        captions = [caption(ground) for ground in GROUNDS][: len(NOISES)]
        images = generate_images(model, space, scores, captions, list(NOISES), guidance=1.0, steps=STEPS)
        said = network(images.flatten(0, 1))[:, : len(FACES.attributes)]
        return said.view(len(scores), len(NOISES), -1).mean(1)

    scores = space.scores
    samplers = {
        "pairs": PairSampler.fit(scores),
        "gaussian": GaussianSampler.fit(scores),
        "conditional, emphasis 1.5": ConditionalSampler.fit(scores, labels, emphasis=1.5),
    }
    models, apart = read(scores[unseen]).std(0), torch.cdist(scores, scores).fill_diagonal_(math.inf).min(1).values
    rows = []
    for name, sampler in samplers.items():
        for seed in DRAWS:
            points = sampler.draw(count, seed=seed)
            spread = read(points).std(0) / models
            nearest = torch.cdist(points, scores).min(1).values / apart.median()
            rows.append(
                {"bank": folder.name, "sampler": name, "draw": seed, "models": len(bank), "compared": len(unseen),
                 "spread": float(spread.mean()),
                 "attributes": dict(zip(FACES.attributes, spread.tolist(), strict=True)),
                 "nearest": float(nearest.median()), "closest": float(nearest.min())}
            )  # fmt: skip
            progress.note(f"{folder.name} {name} {seed}: {rows[-1]['spread']:.3f}, nearest {rows[-1]['nearest']:.2f}")
    return rows


def summary(rows):
    """Each sampler's mean spread with its interval over draws and banks."""
    found = {}
    for name in dict.fromkeys(row["sampler"] for row in rows):
        values = [row["spread"] for row in rows if row["sampler"] == name]
        spread = t_interval(values)
        nearest = statistics.mean(row["nearest"] for row in rows if row["sampler"] == name)
        closest = min(row["closest"] for row in rows if row["sampler"] == name)
        found[name] = {"spread": spread.estimate, "ci95": list(spread.ci95), "n": spread.n, "nearest": nearest,
                       "closest": closest}  # fmt: skip
    return found


def main(banks: tuple[Path, ...] = (FACES_BANK.parent,), /, *, work: Path, count: int = 64, reader_steps: int = 1000):
    network, explained = reader(work, reader_steps)
    progress = Progress()
    rows = [row for folder in banks for row in measured(folder, network, count, progress)]
    about = {"banks": [path.name for path in banks], "reader": {"seed": READER_SEED, "r_squared": explained}}
    return about | {"summary": summary(rows), "rows": rows}
