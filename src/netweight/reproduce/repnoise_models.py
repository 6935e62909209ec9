"""Models that RepNoise's tables share: undefended, or defended, trained once and kept.

They are known by the paper's rates and counts, so that a model has one name at every scale. Each has a folder, from
which a training that was stopped goes on.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from netweight.core.digest import of_config
from netweight.core.files import whole_file
from netweight.errors import TrainingStopped
from netweight.reproduce.registry import Scale
from netweight.reproduce.repnoise_ground import HARMFUL, Ground, standing_in

if TYPE_CHECKING:
    from torch import nn

    from netweight.data.examples import Pair
    from netweight.methods.immunize.defense import Defense

__all__ = ["NONE", "Defended", "defended_model", "folder_of", "taken"]

NONE = "base"
"""In place of a defense's name: the model as it is."""
STOPPED = "stopped.txt"
"""Says why a defense could not be trained to its end, so that it is not tried for each of its attacks."""


@final
@dataclass(frozen=True)
class Defended:
    """A model and its defense. Rates and counts are the paper's; the ground says what they are here.

    Attributes:
        defense: A name of `methods.immunize.catalog`, or `NONE`.
        lr: Learning rate.
        pairs: Number of pairs.
        epochs: Passes over them.
        alpha: Weight of RepNoise's ascent.
        beta: Weight of its noise; None for what is usual in its fidelity.
        data: What the pairs are of, see `Ground.pairs`.
        frozen: The part that is not trained, by its name in the paper's table 6.
        loss: "" for the whole loss, "no mask" for prompts that count as answers do, "no lens" for the ascent at the
            last layer alone.
        start: "aligned" or "unaligned".
        batch: Pairs per step; None for what is usual on the ground.
        whole: Whether the number of pairs is the paper's where the ground's share is taken.
        seed: Of pairs, noise and order.
    """

    defense: str = NONE
    lr: float = 2e-5
    pairs: int = 10_000
    epochs: int = 1
    alpha: float = 1.0
    beta: float | None = None
    data: str = HARMFUL
    frozen: str = ""
    loss: str = ""
    start: str = "aligned"
    batch: int | None = None
    whole: bool = False
    seed: int = 42

    @property
    def name(self) -> str:
        """The defense, and whatever is not usual."""
        parts = [self.defense]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default:
                shown = f"{value:g}" if isinstance(value, float) else str(value)
                parts.append(f"{field.name}={shown}".replace(" ", "-"))
        return "+".join(parts)


def folder_of(out: Path, scale: Scale) -> Path:
    """Return the folder that all tables of a scale share, beside a table's own."""
    return out.parent / f"repnoise-runs-{scale}"


def taken(number: int, share: float) -> int:
    """Return so much of a number of the paper's, at least 1 unless it is 0."""
    return max(1, round(share * number)) if number else 0


def defended_model(defended: Defended, ground: Ground, folder: Path, share: float) -> nn.Module:
    """Return a defended model: trained once, then kept in the folder; the one asked for last is at hand.

    Args:
        defended: The model and its defense.
        ground: Where.
        folder: Where defended models are kept.
        share: Share of the paper's number of pairs.

    Raises:
        TrainingStopped: The defense diverged.
    """
    return _defended(defended, ground, folder, share)


@lru_cache(maxsize=1)  # a second model might not fit beside the first
def _defended(defended: Defended, ground: Ground, folder: Path, share: float) -> nn.Module:
    from netweight.methods.immunize.baselines import hold_security_vectors
    from netweight.methods.immunize.checkpoint import CHECKPOINT

    model = ground.model(defended.start)
    if defended.defense == NONE:
        return model
    defense, pairs, kept = _parts(defended, ground, share)
    place = folder / "defended" / f"{defended.name}-{of_config([defended, share, ground.model_name])[-8:]}"
    file = place / "weights.safetensors"
    if file.exists():
        with defense.prepared(model, seed=0):
            pass
        _read(model, file)
    else:
        _train(model, defended, ground, defense, pairs, kept, place)
        _write(model, file)
        (place / CHECKPOINT).unlink(missing_ok=True)
    hold_security_vectors(model)
    model.train(False)
    return model


def _parts(defended: Defended, ground: Ground, share: float) -> tuple[Defense[Any], list[Pair], list[Any]]:
    """The defense, its pairs, and what it keeps besides."""
    from netweight.data.examples import Pair
    from netweight.methods.immunize.settings import RepNoise, named_defense
    from netweight.methods.immunize.train import defense_of

    count = taken(defended.pairs, share / ground.share if defended.whole else share)
    pairs = ground.pairs(defended.data, count, defended.seed)
    if defended.loss == "no mask":
        pairs = [Pair((), pair.prompt + pair.chosen, pair.prompt + pair.rejected) for pair in pairs]
    own = named_defense(defended.defense)[0]
    if isinstance(own, RepNoise):
        changes: dict[str, Any] = {"alpha": defended.alpha}
        changes |= {} if defended.beta is None else {"beta": defended.beta}
        changes |= {"lens_layers": 0} if defended.loss == "no lens" else {}
        own = own.replace(**changes)
    return defense_of(own), pairs, ground.retain(count, defended.seed)


def _train(
    model: nn.Module,
    defended: Defended,
    ground: Ground,
    defense: Defense[Any],
    pairs: list[Pair],
    kept: list[Any],
    place: Path,
) -> None:
    from netweight.methods.immunize.decoder import frozen
    from netweight.methods.immunize.settings import TrainingSettings
    from netweight.methods.immunize.train import immunize

    settings = TrainingSettings(
        lr=standing_in(defended.lr, ground.rate),
        epochs=defended.epochs,
        batch_size=defended.batch or ground.defense_batch,
        seed=defended.seed,
    )
    layers = defended.frozen
    part: AbstractContextManager[object] = frozen(model, ground.layers(layers)) if layers else nullcontext()
    stopped = place / STOPPED
    if stopped.exists():
        raise TrainingStopped(stopped.read_text(encoding="utf-8"))
    with part:
        try:
            immunize(model, pairs, kept, defense=defense, settings=settings, folder=place, pad_id=ground.pad_id)
        except TrainingStopped as error:
            place.mkdir(parents=True, exist_ok=True)  # training that stops at once has made none
            with whole_file(stopped) as stream:
                stream.write(error.reason.encode())
            raise


def _write(model: nn.Module, file: Path) -> None:
    from netweight.store import StoreWriter

    with StoreWriter(file, overwrite=True) as store:
        for name, value in model.named_parameters():
            store.add(name, value.detach().cpu())


def _read(model: nn.Module, file: Path) -> None:
    import torch

    from netweight.store import open_store

    with open_store(file) as store, torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(store.get(name))
