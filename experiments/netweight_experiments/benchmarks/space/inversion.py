"""Inversion of one picture of strangers, beside adapters trained on one picture and on many.

    python -m netweight_experiments.benchmarks.space.inversion BANK [BANK ...] --work FOLDER

A BANK is a folder of `python -m netweight_experiments.toys.face_bank`. Strangers, one set for each bank, are in none.
Their attributes are read off new pictures, of noises that nothing was trained with, by another network than the
package's. Target: .9 of the R² of adapters trained on twelve pictures. R² does not punish copying the picture.
"""

import statistics
import time
from pathlib import Path

import torch

from netweight import AdapterBank, WeightSpace
from netweight.core.environment import describe
from netweight.core.progress import Progress
from netweight.hf.load_pipeline import text_to_image, trained_prediction
from netweight.hf.train_adapters import Subject, train_pictures
from netweight.methods.space.inversion import DenoisingLoss, generate_images, invert_loss
from netweight.methods.space.settings import InversionSettings
from netweight.toys.faces import ATTRIBUTES, GROUNDS, caption
from netweight.toys.faces_pipeline import FaceBank, faces_pipeline
from netweight_experiments.benchmarks.script import now, options_of, script, write
from netweight_experiments.benchmarks.space.samples import NOISES, reader
from netweight_experiments.toys.drawn_worlds import r_squared

STEPS, STRANGERS = 15, 977  # the first seed of people who are in no bank
CAPTIONS = [caption(ground) for ground in GROUNDS][: len(NOISES)]


def rows(folder, seed, options, model, network):
    """R² of each way to make strangers, and the processor time of making them."""
    space = WeightSpace.fit(AdapterBank.open(folder / "bank"), halves=False)
    people = FaceBank(people=options.strangers, seed=seed)
    truth = people.faces(range(people.people))
    pictures = [people.photographs(number) for number in range(people.people)]

    class Alone:
        """An adapter in place of a point."""

        def __init__(self, adapter):
            self.values = {name: change.dense().float()[None] for name, change in adapter.factors.items()}

        def changes(self, scores):
            return self.values

    def read(points, of=space):
        images = generate_images(model, of, points, CAPTIONS, list(NOISES), guidance=1.0, steps=STEPS)
        return network(images.flatten(0, 1))[:, : len(ATTRIBUTES)].view(len(points), len(NOISES), -1).mean(1)

    def row(way, said, seconds):
        values = r_squared(truth, said).tolist()
        return {"bank": folder.name, "strangers": seed, "way": way, "r_squared": statistics.mean(values),
                "attributes": dict(zip(ATTRIBUTES, values, strict=True)), "processor_s": seconds}  # fmt: skip

    for name, images in (("adapter of one picture", 1), ("adapter of 12 pictures", people.images)):
        began = time.process_time()
        subjects = [Subject(str(n), shown[:images], tuple(words[:images])) for n, (words, shown) in enumerate(pictures)]
        stack = train_pictures(model, subjects, people.recipe, layers=people.layers, each=people.each).stack
        spent, one = time.process_time() - began, torch.zeros(1, 1)
        yield row(name, torch.cat([read(one, Alone(stack.adapter(n))) for n in range(people.people)]), spent)
    began, said = time.process_time(), trained_prediction(model)
    shown, words = torch.stack([shown[0] for _, shown in pictures]), [words[0] for words, _ in pictures]
    loss = DenoisingLoss(model, shown, words, draws=options.draws, said=said)
    found = invert_loss(space, loss, people.people, InversionSettings(steps=options.steps))
    yield row("inversion of one picture", read(found.scores), time.process_time() - began)


def main():
    parser = script(__doc__, whole=True)
    parser.add_argument("banks", nargs="+", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--strangers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--draws", type=int, default=2, help="noisy pictures of each at a step of an inversion")
    parser.add_argument("--reader-steps", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    network, explained = reader(options.work, options.reader_steps)
    model, progress, found = text_to_image(faces_pipeline()), Progress(), []
    for number, folder in enumerate(options.banks):
        for row in rows(folder, STRANGERS + number, options, model, network):
            found.append(row)
            progress.note(f"{row['bank']} {row['way']}: {row['r_squared']:.3f}, {row['processor_s']:.0f} s")
    write(options.output, {"what": "inversion of one picture of strangers", "when": now(),
                           "options": options_of(options), "reader": {"r_squared": explained}, "rows": found,
                           "environment": describe()})  # fmt: skip


if __name__ == "__main__":
    main()
