"""The generic attacks by name, with their settings checked before any work. Commands and audits call it."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from torch import Tensor

from netweight.attacks.gradient_inversion.analytic import first_layer
from netweight.attacks.gradient_inversion.client import LocalUpdate, Reconstruction, Tensors
from netweight.attacks.gradient_inversion.labels import labels_of_update
from netweight.attacks.gradient_inversion.matching import Bounds, DLGConfig, MatchingConfig, ROGConfig, dlg, invert, rog
from netweight.core.progress import QUIET, Progress
from netweight.errors import UsageError

Name: TypeAlias = Literal["ig", "dlg", "rog", "first-layer"]


def run_attack(
    name: Name,
    local_update: LocalUpdate,
    params: Tensors,
    observed: Tensors,
    *,
    shape: tuple[int, ...],
    labels: Tensor | None = None,
    classes: int | None = None,
    layer: str | None = None,
    bounds: Bounds = (0.0, 1.0),
    steps: int | None = None,
    restarts: int = 1,
    total_variation: float | None = None,
    seed: int,
    progress: Progress = QUIET,
) -> Reconstruction:
    """Run one of the generic attacks."""
    _check(name, {"layer": layer, "classes": classes, "total_variation": total_variation}, labels)
    given = {"steps": steps, "total_variation": total_variation}
    search: dict[str, Any] = {"restarts": restarts, **{key: value for key, value in given.items() if value is not None}}
    about: dict[str, Any] = {"shape": shape, "seed": seed, "progress": progress}
    if name == "dlg":
        about |= {"classes": classes, "labels": labels, "config": DLGConfig(**search)}
        return dlg(local_update, params, observed, **about)
    if labels is None:
        labels = labels_of_update(local_update, params, observed, shape=shape, seed=seed)
    if name == "first-layer":
        return first_layer(observed, layer or "", shape=shape, labels=labels)
    if name == "rog":
        return rog(local_update, params, observed, labels=labels, config=ROGConfig(**search), **about)
    config = MatchingConfig(**search)
    return invert(local_update, params, observed, labels=labels, bounds=bounds, config=config, **about)


def _check(name: Name, settings: dict[str, object], labels: Tensor | None) -> None:
    """Refuse settings of other attacks, which would pass unseen, and name those that are missing."""
    owners = {"layer": "first-layer", "classes": "dlg", "total_variation": "ig"}
    for setting, value in settings.items():
        if value is not None and owners[setting] != name:
            raise UsageError(f"The setting {setting!r} belongs to the attack {owners[setting]!r}, not {name!r}.")
    if name == "first-layer" and settings["layer"] is None:
        raise UsageError("The attack 'first-layer' needs the name of the layer.", cure='Give it, such as "fc1".')
    if name == "dlg" and (labels is None) == (settings["classes"] is None):
        raise UsageError("The attack 'dlg' needs the labels or the number of classes.", cure="Give one of the two.")
