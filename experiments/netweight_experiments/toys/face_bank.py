"""Trains banks of adapters of drawn people: `python -m netweight_experiments.toys.face_bank FOLDER --people 1000`.

People are trained in groups, one forward pass for each group, and groups are spread over local processes or a Ray
cluster. What is trained is remembered group by group, so that a run that was stopped goes on where it was. FOLDER then
holds the bank, the people's attributes as labels.csv, and training.json: by what, in what time, and how far adapters
draw the people whom they were trained on.
"""

from __future__ import annotations

import functools
import json
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

import click
import torch

from netweight.core.digests import digest_config
from netweight.core.engines import Engine, local_processes
from netweight.core.progress import QUIET, Progress
from netweight.errors import NetweightError, TrainingStopped, UsageError
from netweight.hf.load_language_model import ABOUT
from netweight.job import Job
from netweight.methods.space.labels import read_labels
from netweight.nn.lora import AdapterStack
from netweight.nn.train_lora import AdapterRecipe
from netweight.report.report import write_text
from netweight.store.bank.bank import AdapterBank
from netweight.store.bank.shards import BankWriter
from netweight.toys.drawn_pictures import WORLDS
from netweight.toys.faces_pipeline import FACES_FOLDER, FaceBank, faces_pipeline
from netweight_experiments.toys.drawn_worlds import identity_fidelity, person_name, write_labels
from netweight_experiments.toys.fitting import finished, record

if TYPE_CHECKING:
    from netweight.hf.load_pipeline import PipelineModel


# People, spread over the bank, of whom pictures are drawn for the record.
_MEASURED = 64


@final
@dataclass(frozen=True)
class _Group:
    """People who are trained together."""

    bank: FaceBank
    """What they are part of, whatever its size."""
    base: str
    """Digest of the pipeline's denoiser."""
    numbers: tuple[int, ...]
    """Theirs."""


def train_bank(
    folder: Path,
    bank: FaceBank = FaceBank(),
    *,
    base: Path = FACES_FOLDER,
    at_once: int = 32,
    compress: bool = False,
    engine: Engine = local_processes,
    progress: Progress = QUIET,
) -> dict[str, Any]:
    """Train a bank into a folder, or find it trained; a smaller one of the same recipe grows."""
    model = _model(str(base))
    digest = model.digest()
    about = {"bank": bank.about, "base": digest}
    known = finished(folder, about)
    if known is not None and known["people"] >= bank.people:
        return known
    (folder / "groups").mkdir(parents=True, exist_ok=True)
    groups = _groups(bank, digest, range(known["people"] if known else 0, bank.people), at_once)
    trained = _trained(folder, groups, base, engine, progress)
    with BankWriter(folder / "bank", compress=compress, base=f"{bank.world}s-diffusion") as writer:
        for group in groups:
            part = AdapterBank.open(_part(folder, group))
            if part.names[0] not in writer:  # a run that was stopped while it wrote may have added it
                writer.add_stack(part.names, part.stack(0, len(part)))
    numbers = range(bank.people)
    write_labels(
        folder / "labels.csv", [person_name(number) for number in numbers], bank.faces(numbers), world=bank.world
    )
    outcome = {
        "people": bank.people,
        "cpu_seconds": round(sum(one["cpu_seconds"] for one in trained) + (known or {}).get("cpu_seconds", 0), 1),
        "loss": statistics.mean(loss for one in trained for loss in one["losses"]),
        "digest": AdapterBank.open(folder / "bank").digest,
        "fidelity": _fidelity(model, folder, bank),
    }
    found = record(folder, about, outcome)
    shutil.rmtree(folder / "groups")
    (folder / "runs.jsonl").unlink(missing_ok=True)
    return found


def excerpt(source: Path, destination: Path, people: int, *, world: str = "face") -> None:
    """Write the first people of a trained bank as a small one: factors rounded to bf16, and compressed."""
    bank = AdapterBank.open(source / "bank")
    if not 0 < people <= len(bank):
        raise UsageError(f"{people} of {len(bank)} people cannot be taken.", cure="Choose fewer, or train more.")
    stack, names = bank.stack(0, people), bank.names[:people]
    rounded = AdapterStack(
        {name: value.bfloat16() for name, value in stack.down.items()},
        {name: value.bfloat16() for name, value in stack.up.items()},
        stack.scale,
        stack.ranks,
    )
    destination.mkdir(parents=True, exist_ok=True)
    with BankWriter(destination / "bank", compress=True, base=bank.base) as writer:
        writer.add_stack(names, rounded)
    attributes = WORLDS[world].attributes
    labels = read_labels(source / "labels.csv", bank.names, columns=attributes)
    values = torch.stack([labels[name].values[:people] for name in attributes], 1)
    write_labels(destination / "labels.csv", names, values, world=world)
    about = json.loads((source / ABOUT).read_text(encoding="utf-8")) | {"excerpt": people}
    write_text(destination / ABOUT, json.dumps(about, indent=1, sort_keys=True) + "\n")


def _groups(bank: FaceBank, base: str, numbers: range, at_once: int) -> list[_Group]:
    whole = replace(bank, people=0)  # so that a bank that is made larger keeps its groups
    return [_Group(whole, base, tuple(numbers[first : first + at_once])) for first in range(0, len(numbers), at_once)]


def _trained(
    folder: Path, groups: Sequence[_Group], base: Path, engine: Engine, progress: Progress
) -> list[dict[str, Any]]:
    """Train what is not trained yet; what is said of each group."""
    run = functools.partial(_train_group, folder=str(folder), base=str(base))
    found = []
    people = sum(len(group.numbers) for group in groups)
    with Job.open(folder, shared=True) as job, progress.task("people", people, unit="people") as task:
        for result in job.map(run, groups, engine=engine):
            if not result.ok:
                raise TrainingStopped(
                    f"The group of {person_name(result.config.numbers[0])} could not be trained: {result.error}",
                    cure="Run it again to go on; what was trained is kept.",
                )
            found.append(result.value)
            task.update(len(result.config.numbers))
    return found


def _train_group(group: _Group, *, folder: str, base: str) -> dict[str, Any]:
    """Train one group into a small bank of its own, in whatever process this is."""
    from netweight.hf.adapters import AdapterSubject, train_pictures

    model = _model(base)
    if model.digest() != group.base:
        raise UsageError(f"{base} holds another pipeline than before.", cure="Use the same folder everywhere.")
    begun = time.process_time()
    subjects = []
    for number in group.numbers:
        captions, pictures = group.bank.photographs(number)
        subjects.append(AdapterSubject(person_name(number), pictures, tuple(captions)))
    fitted = train_pictures(model, subjects, group.bank.recipe, layers=group.bank.layers, each=group.bank.each)
    part = _part(Path(folder), group)
    if part.exists():  # from a run that was stopped before it was remembered
        shutil.rmtree(part)
    with BankWriter(part) as writer:
        writer.add_stack(fitted.names, fitted.stack)
    return {"losses": fitted.losses.tolist(), "cpu_seconds": time.process_time() - begun}


def _part(folder: Path, group: _Group) -> Path:
    return folder / "groups" / f"{group.numbers[0]:05d}-{len(group.numbers)}-{digest_config(group)[-8:]}"


@functools.cache
def _model(base: str) -> PipelineModel:
    from netweight.hf.load_pipeline import text_to_image

    return text_to_image(faces_pipeline(base))


def _fidelity(model: PipelineModel, folder: Path, bank: FaceBank) -> dict[str, Any]:
    """How far some of a bank's adapters, as they were written, draw the people meant."""
    opened, count = AdapterBank.open(folder / "bank"), min(_MEASURED, bank.people)
    stack = opened.stack(0, count)
    measure = functools.partial(identity_fidelity, world=WORLDS[bank.world])
    return measure(model, stack, bank.faces(range(count)))


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--people", type=click.IntRange(1), default=FaceBank.people, show_default=True)
@click.option("--start", type=click.Choice(["shared", "independent"]), default="shared", show_default=True)
@click.option("--seed", default=FaceBank.seed, show_default=True, help="Of people and photographs.")
@click.option("--base", type=click.Path(exists=True, file_okay=False, path_type=Path), default=FACES_FOLDER)
@click.option("--at-once", type=click.IntRange(1), default=32, show_default=True, help="People per forward pass.")
@click.option("--workers", type=click.IntRange(1), help="Processes; one per core by default.")
@click.option("--world", "kind", type=click.Choice(list(WORLDS)), default="face", show_default=True)
@click.option("--ray", "address", help="Train on the Ray cluster at this address, or auto.")
@click.option("--compress", is_flag=True, help="Compress the bank, bit for bit.")
@click.option("--excerpt", "part", nargs=2, type=(click.Path(path_type=Path), int), help="FOLDER N: write the first N.")
def main(
    folder: Path,
    people: int,
    start: Literal["shared", "independent"],
    seed: int,
    base: Path,
    at_once: int,
    workers: int | None,
    kind: str,
    address: str | None,
    compress: bool,
    part: tuple[Path, int] | None,
) -> None:
    """Train a bank of adapters of drawn people into FOLDER, or find it trained."""
    recipe = replace(AdapterRecipe(), start=start)
    bank = FaceBank(people=people, recipe=recipe, seed=seed, world=kind)
    how: dict[str, Any] = {"base": base, "at_once": at_once, "compress": compress, "progress": Progress()}
    try:
        if address is None:
            outcome = train_bank(folder, bank, engine=functools.partial(local_processes, workers=workers), **how)
        else:
            from netweight.core.engines import ray_cluster

            with ray_cluster(address, workers=workers) as engine:
                outcome = train_bank(folder, bank, engine=engine, **how)
        if part is not None:
            excerpt(folder, *part, world=kind)
    except NetweightError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(error.exit_code)
    click.echo(json.dumps(outcome, indent=1))


if __name__ == "__main__":
    main()
