"""`netweight attack`: adversaries on their own, for any model. `finetune` and `embedding` have files of their own."""

from __future__ import annotations

import importlib
import importlib.util
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netweight.cli import FINDING_FAILED
from netweight.cli.attack_embedding import embedding
from netweight.cli.attack_finetune import finetune
from netweight.cli.output import Output, output_option
from netweight.core.progress import QUIET, Progress
from netweight.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from netweight.attacks.gradient_inversion.client import LocalUpdate

_PATH = click.Path(path_type=Path, exists=True)


@click.group()
def attack() -> None:
    """Attack a model or an update, to see what it gives away."""


attack.add_command(embedding)
attack.add_command(finetune)


@attack.command("gradient-inversion")
@click.option("--model", required=True, metavar="MODULE:NAME", help="A module, or a function that makes one.")
@click.option("--update", "observed", required=True, type=_PATH, help="What the client sent, as .safetensors.")
@click.option(
    "--params", type=_PATH, help="What the client started from; by default the weights the model is made with."
)
@click.option("--shape", required=True, metavar="N,C,H,W", help="Shape of the client's batch.")
@click.option("--labels", metavar="L,L,...", help="The labels, if they are known; else they are recovered.")
@click.option("--classes", type=click.IntRange(2), help="Number of classes, for dlg without labels.")
@click.option(
    "--attack", "kind", type=click.Choice(["ig", "dlg", "rog", "first-layer"]), default="ig", show_default=True,
    help="ig: cosine and total variation; dlg: squared distance, labels too; rog: a coarse latent; "
    "first-layer: without a search.",
)  # fmt: skip
@click.option("--layer", help="Name of the first layer, for first-layer.")
@click.option(
    "--sent", type=click.Choice(["gradient", "difference"]), default="gradient", show_default=True,
    help="A gradient of one batch, or the parameters after local SGD minus those before.",
)  # fmt: skip
@click.option("--lr", type=click.FloatRange(0, min_open=True), help="The client's learning rate, for a difference.")
@click.option("--local-steps", type=click.IntRange(1), default=1, show_default=True, help="The client's local steps.")
@click.option("--batch-size", type=click.IntRange(1), help="Images per local step; all by default.")
@click.option("--momentum", default=0.0, show_default=True, help="The client's momentum.")
@click.option("--weight-decay", default=0.0, show_default=True, help="The client's weight decay.")
@click.option("--mean", default="0", show_default=True, metavar="M,...", help="Mean the client subtracts, per channel.")
@click.option("--std", default="1", show_default=True, metavar="S,...", help="Deviation it divides by, per channel.")
@click.option("--steps", type=click.IntRange(1), help="Steps of the search; each attack has its own default.")
@click.option("--restarts", type=click.IntRange(1), default=1, show_default=True, help="Starting points.")
@click.option("--total-variation", type=click.FloatRange(0), help="Weight of the smoothness that ig asks for.")
@click.option("--seed", default=0, show_default=True, help="Seed of the starting points.")
@click.option("--reference", type=_PATH, help="The true images, within 0 and 1, to measure against (.safetensors).")
@click.option("--lpips-backbone", type=_PATH, help="Weights of AlexNet or VGG-16, for LPIPS.")
@click.option("--lpips-heads", type=_PATH, help="Heads of LPIPS 0.1.")
@click.option("--max-psnr", type=float, help="Exit with 1 if the mean PSNR is above this many dB.")
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder for the results.")
@output_option
@click.pass_context
def gradient_inversion(context: click.Context, /, output: Output, **options: Any) -> None:
    """Reconstruct private images from the update a client sent.

    The model's code is imported from the current folder or from what is installed, and is run. OUT receives the images
    as PNG files, and a report.

    Exits with 1 if --max-psnr is given and the reconstruction is better than that.
    """
    import torch

    from netweight.attacks.gradient_inversion.client import known_parameters
    from netweight.attacks.gradient_inversion.registry import run_attack
    from netweight.attacks.gradient_inversion.report import findings_of, in_order, write_findings

    _check(options)
    shape = _shape(options["shape"])
    mean, std = _normalization(options["mean"], options["std"], shape)
    reference = _reference(options["reference"], shape)
    labels = None if options["labels"] is None else torch.tensor(_numbers(options["labels"], "--labels", int))
    if labels is not None and len(labels) != shape[0]:
        raise UsageError(f"{len(labels)} labels were given for {shape[0]} images.")
    model = _model(options["model"], options["params"])
    _try(model, shape)
    seed = options["seed"]
    found = run_attack(
        options["kind"],
        _client(model, options),
        known_parameters(model),
        _tensors(options["observed"]),
        shape=shape,
        labels=labels,
        bounds=(-mean / std, (1 - mean) / std),
        progress=QUIET if output.as_json else Progress(),
        **{key: options[key] for key in ("classes", "layer", "steps", "restarts", "total_variation", "seed")},
    )
    images = (found.images.cpu().float() * std + mean).clamp(0, 1)
    order = torch.arange(len(images)) if reference is None else in_order(images, reference)
    images = images[order]
    findings = findings_of(
        found, images, reference, max_psnr=options["max_psnr"], backbone=options["lpips_backbone"],
        heads=options["lpips_heads"], seed=seed,
    )  # fmt: skip
    page = write_findings(
        options["out"], found, images, reference, findings, command=shlex.join(["netweight", *sys.argv[1:]]),
        inputs=_digests(options), seed=seed,
    )  # fmt: skip
    labels_found = found.labels.cpu()[order]
    labels_found = labels_found if labels_found.ndim == 1 else labels_found.argmax(1)
    output.line(f"{found.attack}: {len(images)} images, labels {', '.join(map(str, labels_found.tolist()))}", bold=True)
    output.findings(findings, met="allowed", missed="NOT ALLOWED")
    output.line(f"Images and report: {page}")
    output.result({
        "attack": found.attack,
        "labels": labels_found.tolist(),
        "findings": [finding.to_json() for finding in findings],
        "report": str(page),
    })  # fmt: skip
    if any(finding.passed is False for finding in findings):
        context.exit(FINDING_FAILED)


def _check(options: Mapping[str, Any]) -> None:
    """Refuse before any work what would fail, or pass unseen, after it."""
    if importlib.util.find_spec("matplotlib") is None or importlib.util.find_spec("scipy") is None:
        raise MissingExtra(
            "The report needs matplotlib and scipy, which are not installed.",
            cure='Run: pip install "netweight[evidence]"',
        )
    if options["sent"] == "difference" and options["lr"] is None:
        raise UsageError("A difference of parameters needs the client's learning rate.", cure="Give --lr.")
    local = {"lr": None, "local_steps": 1, "batch_size": None, "momentum": 0.0, "weight_decay": 0.0}
    set_ = [f"--{key.replace('_', '-')}" for key, default in local.items() if options[key] != default]
    if options["sent"] == "gradient" and set_:
        raise UsageError(
            f"{', '.join(set_)} say how the client trained, but it sent a gradient.",
            cure="Pass --sent difference if it sent how its parameters moved.",
        )
    if options["reference"] is None and (options["max_psnr"] is not None or options["lpips_backbone"] is not None):
        raise UsageError("PSNR and LPIPS compare with the true images.", cure="Give --reference.")


def _numbers(text: str, option: str, kind: type[int] | type[float]) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{option} {text!r} is no list of numbers.", cure="Write them as 1,2,3.") from error


def _shape(text: str) -> tuple[int, ...]:
    shape = tuple(_numbers(text, "--shape", int))
    if len(shape) != 4 or min(shape) < 1 or shape[1] not in (1, 3):
        raise UsageError(
            f"--shape {text} is not (n, c, h, w) of gray or color images.", cure="Write it as 1,3,32,32; c is 1 or 3."
        )
    return shape


def _normalization(mean: str, std: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Mean and deviation per channel, shape `(channels or 1, 1, 1)` each."""
    import torch

    means, deviations = _numbers(mean, "--mean", float), _numbers(std, "--std", float)
    if any(len(values) not in (1, shape[1]) for values in (means, deviations)) or min(deviations) <= 0:
        raise UsageError(
            f"--mean {mean} and --std {std} do not normalize images of {shape[1]} channels.",
            cure="Give one number, or one per channel; deviations are above 0.",
        )
    return torch.tensor(means).reshape(-1, 1, 1), torch.tensor(deviations).reshape(-1, 1, 1)


def _tensors(path: Path) -> dict[str, Tensor]:
    from netweight.store import open_store

    with open_store(path) as store:
        return {name: store.get(name) for name in store.names()}


def _reference(path: Path | None, shape: tuple[int, ...]) -> Tensor | None:
    if path is None:
        return None
    tensors = _tensors(path)
    fitting = [tensor for tensor in tensors.values() if tuple(tensor.shape) == shape]
    if len(fitting) != 1 or not fitting[0].is_floating_point() or fitting[0].min() < 0 or fitting[0].max() > 1:
        raise UsageError(
            f"{path} does not hold one tensor of shape {shape} within 0 and 1.",
            cure="Save the true images before normalization, divided by 255.",
        )
    return fitting[0].float()


def _model(where: str, params: Path | None) -> nn.Module:
    """Import and make the user's model, with the parameters the client started from."""
    from torch import nn

    module, _, attribute = where.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # the current folder, as `python -m` has it
    try:
        made: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"--model {where!r} cannot be found: {error}.", cure="Write it as MODULE:NAME.") from error
    model = made() if callable(made) and not isinstance(made, nn.Module) else made
    if not isinstance(model, nn.Module):
        raise UsageError(f"--model {where!r} is no torch module and makes none.")
    if params is not None:
        try:
            model.load_state_dict(_tensors(params))
        except RuntimeError as error:
            raise UsageError(f"{params} does not fit the model: {error}.") from error
    return model


def _try(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Refuse a shape that the model does not take, before an attack meets it somewhere inside."""
    import torch
    from torch.func import functional_call

    like = next(model.parameters(), torch.zeros(()))
    copies = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    try:
        with torch.no_grad():
            functional_call(model, copies, (torch.zeros(shape).to(like),))
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"The model does not take images of shape {shape}: {error}.") from error


def _client(model: nn.Module, options: Mapping[str, Any]) -> LocalUpdate:
    from netweight.attacks.gradient_inversion.client import gradient_of, sgd_difference

    if options["sent"] == "gradient":
        return gradient_of(model)
    settings = {key: options[key] for key in ("lr", "batch_size", "momentum", "weight_decay")}
    return sgd_difference(model, steps=options["local_steps"], **settings)


def _digests(options: Mapping[str, Any]) -> dict[str, str]:
    from netweight.core.digest import of_file

    paths = [options[key] for key in ("observed", "params", "reference", "lpips_backbone", "lpips_heads")]
    return {path.name: of_file(path) for path in paths if path is not None and path.is_file()}
