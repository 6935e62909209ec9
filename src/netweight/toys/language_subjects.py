"""Small worlds as subjects of fine-tuning attacks: the aligned model, a defended one, and the controls.

The guarded domain is the harmful one, the kept domain is the ability, and the new domain is the benign task. Sweeps
name `undefended_subject` for the undefended model and the controls, and `defended_subject` for what `defend_world`
made.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from netweight.attacks.finetuning.subject import Domain, Subject
from netweight.core.names import not_found
from netweight.core.progress import QUIET, Progress
from netweight.errors import NameNotFound, UsageError
from netweight.methods.immunize.defense import DefenseSettings
from netweight.methods.immunize.record import Record
from netweight.methods.immunize.settings import TrainingSettings
from netweight.methods.immunize.train import immunize
from netweight.toys.language import SmallWorld, cipher_world, opened, speaker_world, write_weights

if TYPE_CHECKING:
    from torch import nn
    from transformers import LlamaForCausalLM


# The defense of a small world where none is named.
DEFENSE = "repnoise"
# How it is trained: a model this small takes a larger rate than the paper's.
DEFENSE_SETTINGS = TrainingSettings(lr=1e-3, batch_size=24, measure_every=10)
# Pairs, and as many rows of the kept cipher.
DEFENSE_ROWS = 300 * 24

Control = Literal["aligned", "random weights", "relearn ceiling"]
WorldName = Literal["ciphers", "content", "speakers"]
WORLDS = get_args(WorldName)


def world_named(name: WorldName = "ciphers", folder: str | Path | None = None) -> SmallWorld:
    """Open a small world."""
    if name not in WORLDS:
        raise NameNotFound(f"There is no world {name!r}.", cure=f"The worlds are {', '.join(WORLDS)}.")
    if folder is None and name == "ciphers":
        return cipher_world()
    if folder is None:
        raise UsageError(
            f"The models of the world {name} do not come with netweight.",
            cure=f"Train them, `python -m netweight_experiments.toys.small_world {name} FOLDER`, and name the folder.",
        )
    if name == "speakers":
        return speaker_world(folder)
    world = cipher_world(folder=folder, by_content=name == "content")
    seed = world.record["about"]["language"]["seed"]
    return cipher_world(seed, folder=world.folder, by_content=name == "content")


def subject_of_world(
    world: SmallWorld,
    model: nn.Module,
    *,
    harmful: Literal["guard", "new"] = "guard",
    samples: int = 4096,
    held_out: int = 64,
    reference_ability: float | None = None,
    task_threshold: float | None = None,
    seed: int = 0,
) -> Subject:
    """Make a subject of a model that lives in a small world."""

    def domain(name: Literal["guard", "new"], threshold: float | None = None) -> Domain:
        return Domain(world.examples(name, samples, seed), world.held_out(name, held_out, seed), threshold=threshold)

    return Subject(
        model,
        {"harmful": domain(harmful), "task": domain("new", task_threshold)},
        world.pad_id,
        benign=world.examples("keep", samples, seed),
        reference_ability=reference_ability,
        ordinary=world.held_out("keep", held_out, seed),
    )


def undefended_subject(
    model: Control = "aligned", *, world: WorldName = "ciphers", folder: str | None = None, seed: int = 0, **data: Any
) -> Subject:
    """Make an undefended subject or a control of a small world, `data` as of `subject_of_world`: a factory."""
    controls = get_args(Control)
    if model not in controls:
        raise not_found(f"There is no model {model!r}.", model, controls)
    opened_world = world_named(world, folder)
    victim = opened_world.random_model(seed) if model == "random weights" else opened_world.base()
    harmful: Literal["guard", "new"] = "new" if model == "relearn ceiling" else "guard"
    return subject_of_world(opened_world, victim, harmful=harmful, seed=seed, **data)


def defend_world(
    file: str | Path,
    world: SmallWorld,
    *,
    defense: str | DefenseSettings = DEFENSE,
    seed: int = 42,
    rows: int | None = None,
    after: str | Path | None = None,
    progress: Progress = QUIET,
    **training: Any,
) -> tuple[LlamaForCausalLM, Record]:
    """Train a defense into a small world's model, as `DEFENSE_SETTINGS` or `training` says; write weights in bf16.

    `after` names weights that this wrote, of a defense that came before.
    """
    count = rows or DEFENSE_ROWS
    model = world.base() if after is None else opened(world.language.shape, Path(after))
    record = immunize(
        model,
        world.pairs(count, seed),
        world.retained(count, seed),
        defense=defense,
        settings=DEFENSE_SETTINGS.replace(seed=seed, **training),
        pad_id=world.pad_id,
        progress=progress,
    )
    write_weights(model, Path(file))
    return opened(world.language.shape, Path(file)), record


def defended_subject(file: str, *, world: WorldName = "ciphers", folder: str | None = None, **data: Any) -> Subject:
    """Make a subject of what `defend_world` wrote, `data` as of `subject_of_world`: a factory for sweeps."""
    opened_world = world_named(world, folder)
    return subject_of_world(opened_world, opened(opened_world.language.shape, Path(file)), **data)
