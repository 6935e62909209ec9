"""Attributes, and the number of pictures that an adapter was trained on, from its weights alone.

    python -m netweight_experiments.benchmarks.space.predict BANK [BANK ...] --work FOLDER

A BANK is a folder of `python -m netweight_experiments.toys.face_bank`. FOLDER gets a bank of people who were trained on
1, 2, 4 or 12 pictures each, drawn at random and said by labels alone. Held-out R² over five folds, by the network of
`netweight space predict` and by its linear probe, for seeds of folds and networks.
"""

import statistics
from pathlib import Path

import torch

from netweight import AdapterBank
from netweight.core.environment import describe
from netweight.core.progress import Progress
from netweight.hf.load_pipeline import text_to_image
from netweight.hf.train_adapters import Subject, train_pictures
from netweight.methods.space.labels import LabelColumn, Labels, read_labels
from netweight.methods.space.predict import READERS, predict
from netweight.store.bank.write import BankWriter
from netweight.toys.faces import ATTRIBUTES
from netweight.toys.faces_pipeline import FaceBank, faces_pipeline
from netweight_experiments.benchmarks.script import now, options_of, script, write

SIZES, SEED, AT_ONCE = (1, 2, 4, 12), 613, 32


def sizes_bank(folder, people, progress):
    """A bank of people trained on few or many pictures, and the logarithm of how many."""
    chosen = [SIZES[row] for row in torch.randint(4, (people,), generator=torch.Generator().manual_seed(SEED)).tolist()]
    bank = FaceBank(people=people, seed=SEED)
    if not (folder / "bank").is_dir():
        model = text_to_image(faces_pipeline())
        with BankWriter(folder / "bank") as writer:
            for start in range(0, people, AT_ONCE):
                subjects = []
                for number in range(start, min(start + AT_ONCE, people)):
                    words, pictures = bank.photographs(number)
                    subjects.append(
                        Subject(f"{number:04d}", pictures[: chosen[number]], tuple(words[: chosen[number]]))
                    )
                fitted = train_pictures(model, subjects, bank.recipe, layers=bank.layers, each=bank.each)
                writer.add_stack(fitted.names, fitted.stack)
                progress.note(f"{start + len(subjects)} of {people} people")
    opened = AdapterBank.open(folder / "bank")
    values = torch.tensor(chosen, dtype=torch.float64).log2()
    return opened, Labels(tuple(opened.names), {"log₂ pictures": LabelColumn("log₂ pictures", values)})


def main():
    parser = script(__doc__, whole=True)
    parser.add_argument("banks", nargs="+", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--people", type=int, default=128, help="of the bank of sizes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    progress, found = Progress(), []
    banks = {folder.name: AdapterBank.open(folder / "bank") for folder in options.banks}
    known = {folder.name: read_labels(folder / "labels.csv", banks[folder.name].names) for folder in options.banks}
    banks["sizes"], known["sizes"] = sizes_bank(options.work / "sizes", options.people, progress)
    for name, bank in banks.items():
        columns = ["log₂ pictures"] if name == "sizes" else list(ATTRIBUTES)
        for seed in options.seeds:
            for each in predict(bank, known[name], columns, {}, seed=seed).findings:
                what, reader = each.name.removeprefix("held-out R² of ").split(", ")
                found.append({"bank": name, "seed": seed, "what": what, "reader": reader, "r_squared": each.value,
                              "ci95": each.ci95, "n": each.n})  # fmt: skip
            told = {
                reader: statistics.mean(
                    row["r_squared"] for row in found[-2 * len(columns) :] if row["reader"] == reader
                )
                for reader in READERS
            }
            progress.note(f"{name} {seed}: {told}")
    write(options.output, {"what": "held-out R² of what is read off weights", "when": now(),
                           "options": options_of(options), "rows": found, "environment": describe()})  # fmt: skip


if __name__ == "__main__":
    main()
