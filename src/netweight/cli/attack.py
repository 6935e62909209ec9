"""`netweight attack finetune`: how long a language model resists fine-tuning on what it is not to do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from netweight.attacks.embedding_search.settings import FolderSearch
from netweight.attacks.finetuning.settings import FolderAttack
from netweight.attacks.gradient_inversion.settings import InversionSettings
from netweight.attacks.refusal.settings import RefusalSettings, SafeguardSettings
from netweight.cli import (
    FINDING_FAILED,
    FOLDER,
    OUTPUT_FOLDER,
    Output,
    command_line,
    end_attack,
    new_report,
    output_option,
)
from netweight.core.lazy import import_named
from netweight.errors import UsageError
from netweight.settings import Settings, options

if TYPE_CHECKING:
    from torch import Tensor, nn

    from netweight.attacks.gradient_inversion.client import LocalUpdate


@click.group()
def attack() -> None:
    """Attack a model or an update, to see what it gives away."""


def _command(
    name: str, settings: type[Settings], *, seed: str, model: bool = True
) -> Callable[[Callable[..., None]], click.Command]:
    """An attack's command: settings, seed, folder for results, form of output and, but for updates, a MODEL folder."""

    def decorate(function: Callable[..., None]) -> click.Command:
        folder = click.option("--out", required=True, type=OUTPUT_FOLDER, help="Folder for the results.")
        seeded = click.option("--seed", default=0, show_default=True, help=seed)
        function = options(settings)(seeded(folder(output_option(click.pass_context(function)))))
        return attack.command(name)(click.argument("model", type=FOLDER)(function) if model else function)

    return decorate


@_command("finetune", FolderAttack, seed="Seed of the held-out rows and of the intervals.")
def finetune(
    context: click.Context, /, model: Path, settings: FolderAttack, out: Path, seed: int, output: Output
) -> None:
    """Fine-tune MODEL on harmful rows, in many ways, and count the steps until it does what it is not to do.

    MODEL is a folder of transformers and stays as it is. A fifth of the prompts is held out and looked at; without
    --base there is nothing to compare with. OUT receives attacks.jsonl, from which a second call continues, and a
    report.

    Exits with 1 if a finding fails.
    """
    from netweight.attacks.finetuning.folder import SweepPlan, attack_folders
    from netweight.attacks.finetuning.sweep import ATTACKS

    def announce(plan: SweepPlan) -> None:
        named = ", ".join(subject.name for subject in plan.subjects)
        output.line(f"{len(plan.attacks)} attacks on: {named}. Recovered: {plan.recovered}")

    progress = output.progress
    plan, section = attack_folders(settings, model, folder=out, seed=seed, progress=progress, planned=announce)
    report = new_report(
        f"Fine-tuning attacks on {model.name}", f"Recovered means: {plan.recovered}.", seed=seed, files=settings.files
    )
    report.add(section)
    end_attack(
        context, output, report, section.findings, out=out, verdicts=[section.conclusion],
        result={"threshold": plan.goal.threshold, "verdict": section.conclusion,
                "ledger": str(out / f"{ATTACKS}.jsonl")},
    )  # fmt: skip


@_command("embedding", FolderSearch, seed="First seed of the searches, and that of the intervals.")
def embedding(
    context: click.Context, /, model: Path, settings: FolderSearch, out: Path, seed: int, output: Output
) -> None:
    """Search for text embeddings that make MODEL, an edited diffusion pipeline, generate memorized images again.

    The same searches are made in the pipeline before its edit and for images that were never trained on, which show
    what the search generates by itself. OUT receives searches.jsonl, from which a second call
    continues, the embeddings and images of every search, and a report.

    Exits with 1 if a finding fails.
    """
    from netweight.attacks.embedding_search.folder import prepare
    from netweight.attacks.embedding_search.report import search_section, verdict
    from netweight.attacks.embedding_search.search import SEARCHES

    prepared = prepare(settings, model)
    names = ", ".join(subject.name for subject in prepared.subjects)
    planted, controls = len(prepared.pairs), len(prepared.targets) - len(prepared.pairs)
    output.line(f"{planted} memorized images and {controls} controls, searched in: {names}.")
    progress = output.progress
    found = prepared.compare(range(seed, seed + settings.seeds), folder=out, progress=progress)
    report = new_report(
        f"Search for embeddings in {model.name}", f"Brought back means: {prepared.goal}.", seed=seed,
        files=settings.files,
    )  # fmt: skip
    section = search_section(found, prepared.targets, prepared.wanted, folder=out, seed=seed)
    report.add(section)
    verdicts = {name: verdict(found, name)[1] for name in found.subjects}
    end_attack(
        context, output, report, section.findings, out=out,
        verdicts=[f"{name}: {words}" for name, words in verdicts.items()],
        result={"verdicts": verdicts, "ledger": str(out / f"{SEARCHES}.jsonl")},
    )  # fmt: skip


@_command("refusal", RefusalSettings, seed="Seed of the order of prompts.")
def refusal(
    context: click.Context, /, model: Path, settings: RefusalSettings, seed: int, out: Path, output: Output
) -> None:
    """Remove refusal from MODEL without training, in many ways, and measure what is left of it.

    Directions are taken out of every layer's output, neurons switched off, a base mixed in. Every edit is measured and
    undone; nothing of an edited model is written. OUT receives a report.

    Exits with 1 if a finding fails.
    """
    from netweight.attacks.refusal.folder import attack_refusal

    section = attack_refusal(settings, model, seed=seed, progress=output.progress)
    report = new_report(f"Refusal of {model.name}", section.intro, seed=seed, files=settings.files)
    report.add(section)
    end_attack(
        context, output, report, section.findings, out=out, verdicts=[section.conclusion],
        result={"verdict": section.conclusion},
    )  # fmt: skip


@_command("safeguards", SafeguardSettings, seed="Seed of held-out rows, orders of prompts and intervals.")
@click.option("--card", is_flag=True, help="Say in MODEL/README.md what was found.")
def safeguards(
    context: click.Context, /, model: Path, settings: SafeguardSettings, seed: int, out: Path, card: bool,
    output: Output,
) -> None:  # fmt: skip
    """Attack what keeps MODEL from harm, in all ways that are known here: what did it take to break, at what cost?

    Searches for the fine-tuning attack that needs fewest steps, beside the base, random weights and a domain that was
    never learned where these are given, and removes refusal without training. OUT receives attacks.jsonl, from which a
    second call continues, and one report.

    Exits with 1 if a finding fails.
    """
    from netweight.attacks.finetuning.folder import attack_folders
    from netweight.attacks.refusal.folder import attack_refusal

    progress = output.progress
    plan, section = attack_folders(settings, model, folder=out, seed=seed, progress=progress)
    sections = [section]
    if settings.refused:
        sections.append(attack_refusal(settings, model, seed=seed, progress=progress))
    verdicts = [each.conclusion for each in sections]
    report = new_report(f"Safeguards of {model.name}", " ".join(verdicts), seed=seed, files=settings.files)
    for each in sections:
        report.add(each)
    if card:
        from netweight.plugins.model_card import add_evidence

        report.write(out)
        output.line(f"Card: {add_evidence(model, out)}")
    end_attack(
        context, output, report, [finding for each in sections for finding in each.findings], out=out,
        verdicts=verdicts, result={"recovered": plan.recovered, "verdicts": verdicts},
    )  # fmt: skip


@_command("gradient-inversion", InversionSettings, seed="Seed of the starting points.", model=False)
def gradient_inversion(
    context: click.Context, /, settings: InversionSettings, seed: int, out: Path, output: Output
) -> None:
    """Reconstruct private images from the update a client sent.

    The model's code is imported from the current folder or from what is installed, and is run. OUT receives the images
    as PNG files, and a report.

    Exits with 1 if --max-psnr is given and the reconstruction is better than that.
    """
    import torch

    from netweight.attacks.gradient_inversion.client import known_parameters
    from netweight.attacks.gradient_inversion.matching import run_attack
    from netweight.attacks.gradient_inversion.report import findings_of, in_order, write_findings
    from netweight.core.files import digest_file
    from netweight.report.plots import check_figures

    check_figures()
    shape = settings.shape
    mean, std = (torch.tensor(values).reshape(-1, 1, 1) for values in (settings.mean, settings.std))
    reference = _reference(settings.reference, shape)
    model = _model(settings.model, settings.params)
    _try(model, shape)
    found = run_attack(
        settings.attack, _client(model, settings), known_parameters(model), _tensors(settings.update), shape=shape,
        labels=None if settings.labels is None else torch.tensor(settings.labels), classes=settings.classes,
        layer=settings.layer, bounds=(-mean / std, (1 - mean) / std), steps=settings.steps, restarts=settings.restarts,
        total_variation=settings.total_variation, seed=seed, progress=output.progress,
    )  # fmt: skip
    images = (found.images.cpu().float() * std + mean).clamp(0, 1)
    order = torch.arange(len(images)) if reference is None else in_order(images, reference)
    images = images[order]
    findings = findings_of(
        found, images, reference, max_psnr=settings.max_psnr, backbone=settings.lpips_backbone,
        heads=settings.lpips_heads, seed=seed,
    )  # fmt: skip
    page = write_findings(
        out, found, images, reference, findings, command=command_line(),
        inputs={path.name: digest_file(path) for path in settings.files}, seed=seed,
    )  # fmt: skip
    labels = found.labels.cpu()[order]
    labels = labels if labels.ndim == 1 else labels.argmax(1)
    output.line(f"{found.attack}: {len(images)} images, labels {', '.join(map(str, labels.tolist()))}", bold=True)
    output.findings(findings, met="allowed", missed="NOT ALLOWED")
    output.line(f"Images and report: {page}")
    output.result({
        "attack": found.attack,
        "labels": labels.tolist(),
        "findings": [finding.to_json() for finding in findings],
        "report": str(page),
    })  # fmt: skip
    if any(finding.passed is False for finding in findings):
        context.exit(FINDING_FAILED)


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

    if "" not in sys.path:
        sys.path.insert(0, "")  # the current folder, as `python -m` has it
    made = import_named(where, "--model")
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


def _client(model: nn.Module, settings: InversionSettings) -> LocalUpdate:
    from netweight.attacks.gradient_inversion.client import gradient_of, sgd_difference

    if settings.lr is None:
        return gradient_of(model)
    return sgd_difference(
        model, lr=settings.lr, steps=settings.local_steps, batch_size=settings.batch_size, momentum=settings.momentum,
        weight_decay=settings.weight_decay,
    )  # fmt: skip
