"""What can be done in a space of drawn faces: directions, edits, delayed edits, samples and inversions, measured.

    python -m netweight_experiments.benchmarks.space.use BANK_FOLDER

BANK_FOLDER is what `python -m netweight_experiments.toys.face_bank` wrote: a bank and the people's attributes.
Everything
is a miniature: 16 × 16 pixels, a denoiser of half a million weights, attributes read by a small network. Edited are
people in the lower half of the attribute. Targets: an effect of 0.6 of the attribute's range where other attributes
change by 0.05, the prompt kept in 0.99; samples' spread 0.9 of training's; inversion of one picture 0.9 of the R² of
adapters trained on many.
"""

import time
from dataclasses import replace
from pathlib import Path

import torch

from netweight.core.environment import describe
from netweight.core.progress import QUIET
from netweight.hf.load_pipeline import text_to_image, trained_prediction
from netweight.hf.train_adapters import Subject, train_pictures
from netweight.methods.space.directions import bootstrap_cosine, fit_direction
from netweight.methods.space.edits import (
    Delay,
    Move,
    agreement,
    calibrated,
    edit,
    edit_curve,
    identity,
    perceptual_distance,
)
from netweight.methods.space.inversion import DenoisingLoss, generate_images, invert_loss
from netweight.methods.space.labels import read_labels
from netweight.methods.space.report import (
    EntanglementSubject,
    InversionSubject,
    SampleSubject,
    direction_findings,
    edit_findings,
    entangled,
    entanglement,
    inversion_findings,
    sample_findings,
)
from netweight.methods.space.sampling import ConditionalSampler, GaussianSampler, KernelSampler, MixtureSampler
from netweight.methods.space.settings import InversionSettings
from netweight.methods.space.space import WeightSpace
from netweight.store.bank.bank import AdapterBank
from netweight.toys.faces import ATTRIBUTES, GROUNDS, caption
from netweight.toys.faces_pipeline import FaceBank, embed, faces_pipeline, read_faces
from netweight_experiments.benchmarks.script import script, today, write

PARTS = ("directions", "edits", "delays", "entanglement", "samples", "inversion")
EDITED = ("beard", "glasses", "width", "skin")
KINDS = ("encoder", "decoder", "difference", "calibrated")
STRENGTHS = [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
CALIBRATED_ON = 24  # points that directions are corrected on, which no curve is measured on
RANGE = 2.0  # every attribute reaches from -1 to 1
CAPTIONS = [caption(ground) for ground in GROUNDS]
SEEDS = list(range(len(CAPTIONS)))
STEPS = 15
STRANGERS = 977  # the seed of people who are in no bank
INVERSIONS = {
    "inversion": {},
    "inversion, prior 1e-5": {"prior": 1e-5},
    "inversion, prior 1e-3": {"prior": 1e-3},
    "inversion, not scaled": {"scaled": False, "learning_rate": 0.1},
}


class World:
    """The pipeline, a space of it, and what reads its pictures."""

    def __init__(self, options):
        self.options = options
        bank = AdapterBank.open(options.bank / "bank")
        self.space = WeightSpace.fit(bank, components=options.components)
        self.labels = read_labels(options.bank / "labels.csv", self.space.names)
        self.model = text_to_image(faces_pipeline())
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(len(bank), generator=generator)
        self.rows, apart = order[: options.points], order[options.points :][:CALIBRATED_ON]
        self.apart = apart
        self.points = self.space.scores[self.rows]

    def generate_images(self, scores, **how):
        return generate_images(self.model, self.space, scores, CAPTIONS, SEEDS, guidance=1.0, steps=STEPS, **how)

    def without(self, column):
        """Points of people in the lower half of an attribute."""
        return self.points[self.labels[column].values[self.rows] < 0]

    def read(self, scores):
        """Attributes of points, the mean over their pictures."""
        images = self.generate_images(scores)
        return read_faces(images.flatten(0, 1)).attributes.view(len(scores), len(SEEDS), -1).mean(1)

    def direction(self, column, kind, **how):
        others = [name for name in ATTRIBUTES if name != column]
        return fit_direction(self.space.scores, self.labels, column, kind=kind, confounders=others, **how)


class Reader:
    """The miniature's stand-in for a face recognition network."""

    name = "the reader's last layer but one (stand-in)"

    def __call__(self, images):
        return embed(images)


def attributes(images):
    return read_faces(images).attributes


def directions(world):
    found = []
    for kind in ("encoder", "decoder", "difference"):
        fitted = [fit_direction(world.space.scores, world.labels, name, kind=kind) for name in ATTRIBUTES]
        findings = direction_findings(fitted, None, seed=0, progress=QUIET)
        found += [replace(each, name=f"{kind}: {each.name}") for each in findings]
    for name in EDITED:
        found.append(bootstrap_cosine(world.space.scores, world.labels, name))
    return found


def calibration(world, name):
    """An encoder corrected by what it does to pictures of people whom no curve is measured on."""
    fitted = [world.direction(each, "encoder", folds=0) for each in ATTRIBUTES]
    ranges = [RANGE] * len(ATTRIBUTES)
    lower = world.apart[world.labels[name].values[world.apart] < 0]
    return calibrated(
        world.generate_images, attributes, world.space.scores[lower], world.space.scores, fitted, name, ranges=ranges
    )


def edits(world):
    keep = dict([agreement(lambda images: read_faces(images).ground, "prompt"), identity(Reader()),
                 perceptual_distance()])  # fmt: skip
    curves = []
    for name in world.options.edited:
        for kind in world.options.kinds:
            fitted = calibration(world, name) if kind == "calibrated" else world.direction(name, kind, folds=0)
            curves.append(
                edit_curve(world.generate_images, attributes, world.without(name), fitted, names=ATTRIBUTES,
                           compare=keep, ranges=[RANGE] * len(ATTRIBUTES), strengths=STRENGTHS, label=kind)
            )  # fmt: skip
    return edit_findings(curves, "prompt kept", seed=0, progress=QUIET)


def delays(world):
    """An edit of beards that begins later and later: effect, and how far pictures move."""
    fitted = world.direction("beard", "encoder", folds=0)
    points = world.without("beard")
    after = edit(points, [Move(fitted, 1.0, "reach")])
    originals = world.generate_images(points)
    before = attributes(originals.flatten(0, 1))[:, 3]
    rows = []
    for until in (1000, 800, 600, 500, 300):
        images = world.generate_images(after, delay=Delay(until), before=points)
        effect = float((attributes(images.flatten(0, 1))[:, 3] - before).mean()) / RANGE
        moved = float((images - originals).square().mean((2, 3, 4)).sqrt().mean())
        rows.append({"until": until, "effect": effect, "pixels": moved})
    return rows


def tangles(world):
    sizes = [size for size in (20, 50, 100, 200, 500) if size < len(world.space.names)] + [len(world.space.names)]
    found = entanglement(world.space.scores, world.labels, ATTRIBUTES, sizes, repeats=20)
    return entangled(EntanglementSubject(found, len(ATTRIBUTES)), None, seed=0, progress=QUIET)


def samples(world):
    scores, count = world.space.scores, world.options.points
    training = world.read(world.points)
    kernel = KernelSampler.fit(scores)
    made = {
        "gaussian": GaussianSampler.fit(scores).draw(count, seed=1),
        "kernel": kernel.draw(count, seed=1),
        "kernel, bandwidth 0.7": KernelSampler.fit(scores, bandwidth=0.7).draw(count, seed=1),
        "mixture": MixtureSampler.fit(scores).draw(count, seed=1),
        "conditional": ConditionalSampler.fit(scores, world.labels).draw(count, seed=1),
        "gaussian, factor 1.4": GaussianSampler.fit(scores, factor=1.4).draw(count, seed=1),
        "conditional, emphasis 1.5": ConditionalSampler.fit(scores, world.labels, emphasis=1.5).draw(count, seed=1),
    }
    found = [{"likeliest bandwidth": kernel.bandwidth}]
    for name, points in made.items():
        subject = SampleSubject(points, scores, world.read(points), training, ATTRIBUTES)
        found += [
            replace(each, name=f"{name}: {each.name}")
            for each in sample_findings(subject, None, seed=0, progress=QUIET)
        ]
    return found


def inversion(world):
    people = FaceBank(people=world.options.strangers, seed=STRANGERS)
    truth = people.faces(range(people.people))
    pictures = [people.photographs(number) for number in range(people.people)]
    said = trained_prediction(world.model)
    recipe, seconds = people.recipe, {}
    readings = {}
    for name, images in (("adapter of one image", 1), ("adapter of many images", people.images)):
        began = time.process_time()
        subjects = [Subject(str(n), shown[:images], tuple(words[:images])) for n, (words, shown) in enumerate(pictures)]
        fitted = train_pictures(world.model, subjects, recipe, layers=people.layers, each=people.each)
        seconds[name] = time.process_time() - began
        parts = [read_adapter(world, fitted.stack.adapter(number)) for number in range(people.people)]
        readings[name] = torch.cat(parts)
        if images > 1:
            projected = torch.stack([world.space.project(fitted.stack.adapter(n)) for n in range(people.people)])
            readings["adapter of many images, projected"] = world.read(projected)
    images = torch.stack([shown[0] for _, shown in pictures])
    prompts = [words[0] for words, _ in pictures]
    loss = DenoisingLoss(world.model, images, prompts, draws=world.options.draws, said=said)
    for name, how in INVERSIONS.items():
        began = time.process_time()
        found = invert_loss(world.space, loss, people.people, InversionSettings(steps=world.options.steps, **how))
        seconds[name] = time.process_time() - began
        readings[name] = world.read(found.scores)
    subject = InversionSubject(truth, readings, ATTRIBUTES)
    findings = inversion_findings(subject, None, seed=0, progress=QUIET)
    return [*findings, {"cpu seconds": seconds}]


def read_adapter(world, adapter):
    from netweight_experiments.toys.drawn_worlds import faces_drawn

    images = faces_drawn(world.model, adapter, samples=len(SEEDS), steps=STEPS)
    return attributes(images.flatten(0, 1)).view(1, len(SEEDS), -1).mean(1)


def main():
    parser = script(__doc__, whole=True)
    parser.add_argument("bank", type=Path)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--components", type=int)
    parser.add_argument("--points", type=int, default=64, help="points that are edited, and samples that are drawn")
    parser.add_argument("--edited", nargs="+", choices=ATTRIBUTES, default=EDITED)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--strangers", type=int, default=32, help="people who are inverted")
    parser.add_argument("--steps", type=int, default=400, help="of an inversion")
    parser.add_argument("--draws", type=int, default=4, help="noisy pictures of each at a step of an inversion")
    options = parser.parse_args()
    torch.set_num_threads(1)
    world = World(options)
    result = {
        "date": today(), "environment": describe(), "miniature": True,
        "models": len(world.space.names), "components": world.space.components, "points": options.points,
    }  # fmt: skip
    work = dict(zip(PARTS, (directions, edits, delays, tangles, samples, inversion), strict=True))
    for part in options.only:
        began = time.process_time()
        found = work[part](world)
        result[part] = [each if isinstance(each, dict) else each.to_json() for each in found]
        for each in found:
            told = each if isinstance(each, dict) else {"value": each.value, "ci95": each.ci95, "passed": each.passed}
            print(part, "" if isinstance(each, dict) else each.name, told, flush=True)
        print(f"{part}: {time.process_time() - began:.0f} CPU seconds", flush=True)
    write(options.output, result)


if __name__ == "__main__":
    main()
