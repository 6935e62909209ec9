"""Trains the reader of drawn faces, from a seed: `python -m netweight_experiments.toys.face_reading FOLDER`.

Minutes on one core; `--world vehicle` trains that of drawn vehicles. The record beside the weights has
its R² for each attribute and nuisance on people it never saw, and the share of grounds that it names right.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.nn import functional

from netweight.core.digests import digest_file
from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import derive, torch_generator
from netweight.report.report import write_text
from netweight.toys.drawn_pictures import FACES, WORLDS, DrawnWorld
from netweight.toys.faces_pipeline import RECORD, WEIGHTS, FaceReader, read_faces
from netweight.toys.language import write_weights
from netweight_experiments.toys.drawn_worlds import r_squared

_BATCH, _RATE, _HELD_OUT = 128, 4e-3, 2000
# Number of the held-out batch.
_STRANGERS = -1


def train_reader(
    folder: Path, *, steps: int = 2000, seed: int = 11, world: DrawnWorld = FACES, progress: Progress = QUIET
) -> dict[str, Any]:
    """Train the network into a folder."""
    begun = time.process_time()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "reader"))
        network = FaceReader(world)
    fit(network, steps, seed, world, progress)
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(network, folder / WEIGHTS)
    record = {
        "seed": seed,
        "steps": steps,
        "cpu_seconds": round(time.process_time() - begun, 1),
        "weights": sum(parameter.numel() for parameter in network.parameters()),
        "digest": digest_file(folder / WEIGHTS),
        "held_out": _held_out(folder, seed, world),
    }
    write_text(folder / RECORD, json.dumps(record, indent=1, sort_keys=True) + "\n")
    return record


def fit(network: nn.Module, steps: int, seed: int, world: DrawnWorld, progress: Progress) -> None:
    """Train a network that says attributes, nuisances and grounds of pictures, shape `(n, 3, side, side)`."""

    def loss(step: int) -> Tensor:
        drawn, measured, grounds = pictures(_BATCH, seed, world, first=step * _BATCH)
        # Generated pictures are never as clean as drawn ones.
        level = 0.05 * torch.rand(_BATCH, 1, 1, 1, generator=torch_generator(seed, "level", step))
        noise = torch.randn(drawn.shape, generator=torch_generator(seed, "noise", step))
        said = network(drawn + level * noise)
        error = functional.mse_loss(said[:, : measured.shape[1]], measured)
        return error + 0.1 * functional.cross_entropy(said[:, measured.shape[1] :], grounds)

    optimizer = torch.optim.AdamW(network.parameters(), lr=_RATE, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=steps, pct_start=0.1)
    for step in progress.track(range(steps), f"reader of {world.name}s", unit="steps"):
        loss(step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()


def pictures(count: int, seed: int, world: DrawnWorld, *, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pictures of as many subjects, what is to be read off them, and their grounds."""
    generator = torch_generator(seed, "pictures", first)
    subjects, changes = world.crowd(count, generator), world.changes(count, generator)
    grounds = torch.randint(len(world.grounds), (count,), generator=generator)
    return world.drawn(subjects, grounds, changes), torch.cat([subjects, changes], 1), grounds


def _held_out(folder: Path, seed: int, world: DrawnWorld) -> dict[str, Any]:
    """How the network, as it was written, reads subjects whom it never saw."""
    drawn, measured, grounds = pictures(_HELD_OUT, seed, world, first=_STRANGERS)
    found = read_faces(drawn, folder=folder, world=world)
    explained = r_squared(measured, torch.cat([found.attributes, found.nuisances], 1)).tolist()
    return {
        "n": _HELD_OUT,
        "r_squared": {name: round(r, 4) for name, r in zip(world.attributes + world.nuisances, explained, strict=True)},
        "ground": float((found.ground == grounds).double().mean()),
    }


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--steps", type=click.IntRange(1), default=2000, show_default=True, help="Of the optimizer.")
@click.option("--seed", default=11, show_default=True, help="Of initialization and pictures.")
@click.option("--world", "name", type=click.Choice(list(WORLDS)), default="face", show_default=True)
def main(folder: Path, steps: int, seed: int, name: str) -> None:
    """Train the reader of a drawn world into FOLDER, and show how well it reads."""
    record = train_reader(folder, steps=steps, seed=seed, world=WORLDS[name], progress=Progress())
    click.echo(json.dumps(record["held_out"], indent=1))


if __name__ == "__main__":
    main()
