"""Gradient inversion on files: what `netweight attack gradient-inversion` and recipes do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call

from netweight.attacks.gradient_inversion.analytic import doubt_of_labels
from netweight.attacks.gradient_inversion.client import (
    LocalUpdate,
    Tensors,
    gradient_of,
    known_parameters,
    sgd_difference,
    without_buffers,
)
from netweight.attacks.gradient_inversion.matching import run_attack
from netweight.attacks.gradient_inversion.report import findings_of, in_order, inversion_section, write_images
from netweight.attacks.gradient_inversion.settings import GradientInversionSettings
from netweight.core.digests import digest_config, digest_tensor
from netweight.core.foreign_errors import running
from netweight.core.lazy import import_named
from netweight.core.progress import Progress
from netweight.errors import UsageError
from netweight.registry import Result, Target
from netweight.report.finding import Section
from netweight.report.plots import check_figures
from netweight.store import open_store

# Folder in the attack's output with the checkpoints of its searches, each in a folder named by what it depends on.
_SEARCHES = "searches"
# Settings that change how the result is reported, and not the search.
_OF_THE_REPORT = ("reference", "lpips_backbone", "lpips_heads", "max_psnr", "params")


def attack(target: Target, settings: GradientInversionSettings, progress: Progress) -> Result:
    """Reconstruct images from the update of one client, a safetensors file."""
    check_figures()
    shape, seed = settings.shape, target.seed
    mean, std = (torch.tensor(values).reshape(-1, 1, 1) for values in (settings.mean, settings.std))
    reference = _reference(settings.reference, shape)
    model = _model(settings.model, settings.params)
    _try(model, shape)
    observed, left_out = without_buffers(model, _tensors(target.model))
    place = target.output / _SEARCHES / _digest(model, observed, settings, seed)
    inversion = run_attack(
        settings.attack, _client(model, settings), known_parameters(model), observed, shape=shape,
        labels=None if settings.labels is None else torch.tensor(settings.labels), classes=settings.classes,
        layer=settings.layer, bounds=(-mean / std, (1 - mean) / std), steps=settings.steps, restarts=settings.restarts,
        total_variation=settings.total_variation, seed=seed, folder=place, progress=progress,
    )  # fmt: skip
    images = (inversion.images.cpu().float() * std + mean).clamp(0, 1)
    order = torch.arange(len(images)) if reference is None else in_order(images, reference)
    images = images[order]
    findings = findings_of(
        inversion, images, reference, max_psnr=settings.max_psnr, backbone=settings.lpips_backbone,
        heads=settings.lpips_heads, seed=seed,
    )  # fmt: skip
    write_images(target.output, images)
    labels = inversion.labels.cpu()[order]
    labels = labels if labels.ndim == 1 else labels.argmax(1)
    line = f"{inversion.attack}: {len(images)} images, labels {', '.join(map(str, labels.tolist()))}"
    section = inversion_section(inversion, images, reference, findings)
    if settings.labels is None and settings.attack != "dlg":
        section = _with_doubt(section, _client(model, settings), model, observed, shape, seed)
    lines = [line]
    if left_out:
        lines.append(f"The attack compares parameters; the update's {len(left_out)} buffers were left out.")
    return Result(lines, [section], {"attack": inversion.attack, "labels": labels.tolist()})


# Above this distance of class counts from whole numbers, estimated labels were wrong in most trials; below it, right.
_DOUBTFUL = 0.15


def _with_doubt(
    section: Section, client: LocalUpdate, model: nn.Module, observed: Tensors, shape: tuple[int, ...], seed: int
) -> Section:
    """Add a warning where labels that were estimated do not explain the update."""
    doubt = doubt_of_labels(client, known_parameters(model), observed, shape=shape, seed=seed)
    if doubt < _DOUBTFUL:
        return section
    warning = (
        "The labels may be wrong, because they do not explain the update (distance of class counts from whole numbers "
        f"{doubt:.2f}; below {_DOUBTFUL} where labels were right). They are estimated for a client that sends the "
        "gradient of the mean cross-entropy, or a difference as --lr and the other options of local training describe "
        "it, and for a model that is hardly trained. If you know the labels, give --labels."
    )
    return replace(section, warnings=(*section.warnings, warning))


def check(update: Path | None, settings: GradientInversionSettings) -> None:
    """Refuse before any work a model that cannot be imported."""
    import_named(settings.model, "--model")


def _digest(model: nn.Module, observed: Mapping[str, Tensor], settings: GradientInversionSettings, seed: int) -> str:
    """Return the digest of all that decides a search, the code of the model excepted."""
    about = {name: value for name, value in settings.to_json().items() if name not in _OF_THE_REPORT}
    weights = {name: digest_tensor(value) for name, value in model.state_dict().items()}
    update = {name: digest_tensor(value) for name, value in observed.items()}
    digest = digest_config({"settings": about, "seed": seed, "weights": weights, "update": update})
    return digest.rpartition(":")[2]


def _tensors(path: Path) -> dict[str, Tensor]:
    with open_store(path) as store:
        return {name: store.get(name) for name in store.names()}


def _reference(path: Path | None, shape: tuple[int, ...]) -> Tensor | None:
    if path is None:
        return None
    tensors = _tensors(path)
    fitting = [tensor for tensor in tensors.values() if tuple(tensor.shape) == shape]
    if len(fitting) != 1 or not fitting[0].is_floating_point() or fitting[0].min() < 0 or fitting[0].max() > 1:
        raise UsageError(
            f"{path} does not contain exactly one tensor of shape {shape} within 0 and 1.",
            cure="Save the true images before normalization, divided by 255.",
        )
    return fitting[0].float()


def _model(where: str, params: Path | None) -> nn.Module:
    """Import and make the user's model, with the parameters the client started from."""
    made = import_named(where, "--model")
    with running(f"The model {where!r}"):
        model = made() if callable(made) and not isinstance(made, nn.Module) else made
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"--model {where!r} is neither a torch module nor a function that returns one.",
            cure="Name one of them: --model MODULE:NAME.",
        )
    if params is not None:
        try:
            loaded = model.load_state_dict(_tensors(params), strict=False)
        except RuntimeError as error:
            raise UsageError(
                f"{params} does not fit the model: {error}.",
                cure="Give as --params the weights that the client started from, saved from the same --model.",
            ) from error
        missing = sorted(set(loaded.missing_keys) - {name for name, _ in model.named_buffers()})
        if missing or loaded.unexpected_keys:
            raise UsageError(
                f"{params} does not fit the model: missing {missing}, not in the model {loaded.unexpected_keys}.",
                cure="Give as --params the weights that the client started from, all of them or a state dict.",
            )
    return model


def _try(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Refuse a shape that the model does not take, before an attack meets it somewhere inside."""
    like = next(model.parameters(), torch.zeros(()))
    copies = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    try:
        with torch.no_grad():
            functional_call(model, copies, (torch.zeros(shape).to(like),))
    # The model of a user may raise anything.
    except Exception as error:
        raise UsageError(
            f"The model does not take images of shape {shape}: {error}.",
            cure="Give the shape that it was made for (--shape N,C,H,W).",
        ) from error


def _client(model: nn.Module, settings: GradientInversionSettings) -> LocalUpdate:
    if settings.lr is None:
        return gradient_of(model)
    return sgd_difference(
        model, lr=settings.lr, steps=settings.local_steps, batch_size=settings.batch_size, momentum=settings.momentum,
        weight_decay=settings.weight_decay,
    )  # fmt: skip
