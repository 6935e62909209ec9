"""Edits of a model in memory: prompts led elsewhere, neurons scaled for a block or for good, and their undoing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from netweight.core.environment import describe
from netweight.core.names import Units
from netweight.core.progress import QUIET, Progress
from netweight.errors import CorruptBlob, Unsupported, UsageError
from netweight.job import Job
from netweight.methods.forget.distil import distil
from netweight.methods.forget.layers import ValueLayer, attended, check_units, value_layers
from netweight.methods.forget.localize import Localization, read_neurons
from netweight.methods.forget.records import EditRecord
from netweight.methods.forget.settings import ClosedFormSettings, DistilSettings
from netweight.metrics.copies import CenteredPixels, described
from netweight.nn.hooks import edit_outputs
from netweight.nn.text_to_image import Batches, Text, TextToImage, generated

_CANDIDATES = 24  # ordinary prompts among which anchors are looked for
_CHECKED, _BROKEN = 8, 0.3  # images of each prompt after an edit, and the upper quartile of their NCC to those before
_DRAWN: Any = {"guidance": 3.0, "steps": 20}  # how their images are generated


def forget(
    model: TextToImage,
    prompts: Sequence[str],
    ordinary: Sequence[str],
    *,
    anchors: Sequence[str] | None = None,
    images: Tensor | None = None,
    settings: ClosedFormSettings | DistilSettings | None = None,
    folder: Job | None = None,
    progress: Progress = QUIET,
) -> EditRecord:
    """Give memorized prompts the answers of others, in a model's weights.

    Args:
        model: The model; changed in place, its dtype stays.
        prompts: Memorized prompts; all are edited together.
        ordinary: Prompts whose answers are to stay, 100 or more; the empty one stays as well.
        anchors: Prompts whose answers memorized ones get, one for each; None takes those of the last 24 ordinary
            prompts whose images are least like the memorized ones'.
        images: Memorized images to unlearn, shape `(prompts, 3, height, width)`, within 0 and 1; else the model's own.
        settings: The method: keys and values led elsewhere in closed form, which takes seconds and is the default; or
            a training, of which `TRAINED["siss"]` and `TRAINED["distil"]` are hard to undo by a search for embeddings.
        folder: A job that keeps checkpoints of a distillation, to be continued after a kill.
        progress: Reports training steps.

    Returns:
        The record, from which `undo` restores the weights.

    Raises:
        UsageError: There is no prompt, a prompt is both memorized and ordinary, or anchors are not one for each.
        Unsupported: The model has no cross-attention, or an adapter is at work in it.
        TrainingStopped: The loss of a distillation became infinite or NaN.

    Source: Gandikota et al., arXiv 2308.14761 (closed form); Lee et al., arXiv 2506.06278 (noise and distillation).
    """
    settings = settings or ClosedFormSettings()
    prompts = list(dict.fromkeys(prompts))
    both = sorted(set(prompts) & set(ordinary))
    if both or not prompts or not ordinary:
        what = f"{both[0]!r} is memorized and ordinary" if both else "There are no memorized or no ordinary prompts"
        raise UsageError(f"{what}.", cure="Give prompts to forget, and others that are to stay.")
    if anchors is not None and len(anchors) != len(prompts):
        raise UsageError(f"{len(prompts)} prompts came with {len(anchors)} anchors.", cure="Give one for each prompt.")
    before = model.digest()
    ranked = [[each] for each in anchors] if anchors is not None else _unlike(model, prompts, ordinary)
    about: dict[str, Any] = settings.to_json()
    if isinstance(settings, ClosedFormSettings):
        method = "closed-form"
        weights, found = _closed_form(model, prompts, ranked, ordinary, settings)
    else:
        method = {"anchor": "distil", "away": "esd", "unlearn": "siss"}[settings.objective]
        weights, logs = distil(
            model, prompts, [each[0] for each in ranked], ordinary, settings, images=images, folder=folder,
            progress=progress,
        )  # fmt: skip
        found = {
            "anchors": dict(zip(prompts, (each[0] for each in ranked), strict=True)),
            "measured": [asdict(log) for log in logs],
        }
    return EditRecord(Units(), 0.0, before, model.digest(), {}, prompts, describe(), weights, method, about | found)


def _described(model: TextToImage, prompts: Sequence[str], count: int = 1) -> Tensor:
    """Descriptions of the images of prompts from the first seeds, shape `(prompts, images, width)`."""
    text = model.embed(list(prompts)).rows([row for row in range(len(prompts)) for _ in range(count)])
    images = generated(model, text, [*range(count)] * len(prompts), Batches(16), **_DRAWN)
    return described(CenteredPixels(), images).reshape(len(prompts), count, -1)


def _unlike(model: TextToImage, prompts: Sequence[str], ordinary: Sequence[str]) -> list[list[str]]:
    """For each prompt, ordinary ones, those first whose image from the same noise is least correlated with its own."""
    # An anchor that looks like the memorized image would leave an edit that seems not to work, and partly does not; its
    # negative costs ordinary prompts more.
    candidates = list(dict.fromkeys(ordinary))[-_CANDIDATES:]
    alike = _described(model, prompts)[:, 0] @ _described(model, candidates)[:, 0].T
    return [[candidates[place] for place in row] for row in alike.abs().argsort(1).tolist()]


def _closed_form(
    model: TextToImage,
    prompts: Sequence[str],
    ranked: Sequence[Sequence[str]],
    kept: Sequence[str],
    settings: ClosedFormSettings,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Lead prompts to their anchors, those again with more weight and the next anchor whose images are still there."""
    wanted, tried = _described(model, prompts, _CHECKED), [0] * len(prompts)
    while True:
        anchors = [each[min(times, len(each) - 1)] for each, times in zip(ranked, tried, strict=True)]
        strength = torch.tensor([settings.weight * 2**times for times in tried])
        before = _lead_elsewhere(model, prompts, anchors, kept, settings, strength)
        alike = (_described(model, prompts, _CHECKED) * wanted).sum(2).quantile(0.75, 1)
        left = [row for row, value in enumerate(alike.tolist()) if not value <= _BROKEN]  # NaN counts as left
        if not left or max(tried) + 1 == settings.rounds:
            break
        _exchange(model.denoiser, before)
        for row in left:
            tried[row] += 1
    return before, {
        "anchors": dict(zip(prompts, anchors, strict=True)),
        "weights": dict(zip(prompts, strength.tolist(), strict=True)),
        "unresolved": [prompts[row] for row in left],
    }


@torch.no_grad()
def _lead_elsewhere(
    model: TextToImage,
    prompts: Sequence[str],
    anchors: Sequence[str],
    kept: Sequence[str],
    settings: ClosedFormSettings,
    weights: Tensor,
) -> dict[str, Tensor]:
    """Give the tokens of each prompt the keys and values of its anchor's; return the weights as they were, by name."""
    # Source: Gandikota et al., arXiv 2308.14761, equation 7, for keys as well as values and with one weight for all:
    # W' minimizes Σ |W'k − Wk|² (kept tokens) + mean of weight · |W'b − Wa|² (memorized b, anchor a) + ridge |W' − W|².
    names = {id(module): name for name, module in model.denoiser.named_modules()}
    texts = [model.embed(list(each)) for each in (prompts, anchors, [*kept, ""])]
    before: dict[str, Tensor] = {}
    for layer in value_layers(model.denoiser, scope="all").values():
        memorized, anchor, ordinary = (attended(model.denoiser, layer, text).double() for text in texts)
        shares = (weights / len(weights) / memorized.shape[1]).to(memorized)[:, None, None]
        change = _change(memorized, anchor, shares, _tokens(ordinary, texts[2]), settings.ridge)
        for module in (layer.attention.to_k, layer.module):
            name = f"{names[id(module)]}.weight"
            before[name] = _led(module, change, name)
    return before


def _change(memorized: Tensor, anchor: Tensor, shares: Tensor, kept: Tensor, ridge: float) -> Tensor:
    """The matrix that weights are multiplied with, from the right."""
    energy = kept.T @ kept / len(kept)
    energy += ridge * energy.diagonal().mean() * torch.eye(len(energy)).to(energy)
    led = (shares * memorized).flatten(0, 1)
    wanted, given = energy + anchor.flatten(0, 1).T @ led, energy + memorized.flatten(0, 1).T @ led
    change: Tensor = torch.linalg.solve(given, wanted, left=False)
    return change


def _tokens(states: Tensor, text: Text) -> Tensor:
    """The tokens that count, of shape `(tokens, width)`."""
    return states.flatten(0, 1) if text.mask is None else states[text.mask.bool()]


def _led(module: nn.Module, change: Tensor, name: str) -> Tensor:
    if not isinstance(module, nn.Linear):
        raise Unsupported(
            f"{name} is of a {type(module).__name__}, not of a linear layer.",
            cure="Merge adapters first (pipeline.fuse_lora(), then pipeline.unload_lora_weights()), and load without "
            "quantization.",
        )
    weight: Any = module.weight
    before: Tensor = weight.detach().cpu().clone()
    weight.copy_((weight.double() @ change).to(weight.dtype))
    return before


def deactivate(
    model: TextToImage,
    units: Units,
    *,
    factor: float = 0.0,
    thresholds: Mapping[str, Any] | None = None,
    prompts: Sequence[str] = (),
) -> EditRecord:
    """Scale neurons of a model for good; 0 switches them off.

    Args:
        model: The model; changed in place.
        units: Neurons of its value layers.
        factor: Factor that they are multiplied with.
        thresholds: Thresholds that they were found with, in words or numbers, for the record.
        prompts: Prompts that they were found for, for the record.

    Returns:
        The record, from which `undo` restores the weights.

    Raises:
        UsageError: There is no neuron, or one is not among those of the model.
        NameNotFound: A module is no value layer of the model.
        Unsupported: An adapter is at work in a layer, or the model has no cross-attention.
    """
    if not units:
        raise UsageError("There is no neuron to switch off.", cure="Localize memorized prompts first.")
    before = model.digest()
    rows = scale_rows_(model.denoiser, units, factor=factor)
    after = model.digest()
    return EditRecord(units, factor, before, after, dict(thresholds or {}), tuple(prompts), describe(), rows)


def undo(model: TextToImage, record: EditRecord) -> None:
    """Put back what an edit changed, and check that the model is as it was, bit for bit."""
    if not record.rows:
        raise UsageError(
            "The record keeps no weights, so that nobody can undo the edit.", cure="Keep the pipeline before its edit."
        )
    if model.digest() != record.after:
        raise UsageError(
            f"This is not the model that the edit left: its digest is {model.digest()}, not {record.after}.",
            cure="Undo edits in reverse order, in the dtype that they were made in.",
        )
    neurons = record.method == "neurons"
    put = partial(restore_rows_, model.denoiser, record.units) if neurons else partial(_exchange, model.denoiser)
    edited = put(record.rows)
    if model.digest() != record.before:
        put(edited)
        raise CorruptBlob("The rows of the record are not those that were there before the edit.")


@torch.no_grad()
def _exchange(denoiser: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put weights in the place of a model's, and return those."""
    current = dict(denoiser.named_parameters())
    wrong = [
        name for name, value in weights.items()
        if name not in current or (current[name].shape, current[name].dtype) != (value.shape, value.dtype)
    ]  # fmt: skip
    if wrong:
        raise UsageError(
            f"The weight {wrong[0]} of the record does not fit this model.",
            cure="Restore the model that was edited, in the dtype it was edited in.",
        )
    before = {name: current[name].detach().cpu().clone() for name in weights}
    for name, value in weights.items():
        current[name].copy_(value)
    return before


@contextmanager
def deactivated(denoiser: nn.Module, units: Units, *, factor: float = 0.0) -> Iterator[None]:
    """Scale neurons while a block lasts; the weights stay as they are."""
    # Source: arXiv 2406.02366, section 3: neurons are set to 0.
    layers = value_layers(denoiser, scope="all")
    check_units(layers, units)
    with edit_outputs(
        denoiser, {name: _scaling(layers[name].width, indices, factor) for name, indices in units.items()}
    ):
        yield


@torch.no_grad()
def scale_rows_(denoiser: nn.Module, units: Units, *, factor: float = 0.0) -> dict[str, Tensor]:
    """Scale neurons for good: their rows of the weights, and their biases."""
    layers = _editable(denoiser, units)
    removed: dict[str, Tensor] = {}
    for name, indices in units.items():
        for part, parameter in layers[name].linear.named_parameters(recurse=False):
            rows = parameter.data[indices.to(parameter.device)]
            removed[f"{name}.{part}"] = rows.cpu().clone()
            # Not a product with 0, which would keep the sign of zero and leave NaN and infinities.
            parameter.data[indices.to(parameter.device)] = torch.zeros_like(rows) if factor == 0 else rows * factor
    return removed


@torch.no_grad()
def restore_rows_(denoiser: nn.Module, units: Units, removed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put rows back, bit for bit; return those that were there."""
    layers = _editable(denoiser, units)
    places = [
        (parameter, indices, f"{name}.{part}")
        for name, indices in units.items()
        for part, parameter in layers[name].linear.named_parameters(recurse=False)
    ]
    for parameter, indices, key in places:
        rows = removed.get(key)
        if rows is None or rows.shape != parameter.data[indices].shape or rows.dtype != parameter.dtype:
            raise UsageError(
                f"The rows of {key} do not fit: the model's are {str(parameter.dtype).removeprefix('torch.')}.",
                cure="Restore the model that was edited, in the dtype it was edited in.",
            )
    current = scale_rows_(denoiser, units, factor=1.0)
    for parameter, indices, key in places:
        parameter.data[indices.to(parameter.device)] = removed[key].to(parameter.device)
    return current


def _editable(denoiser: nn.Module, units: Units) -> dict[str, ValueLayer]:
    layers = value_layers(denoiser, scope="all")
    check_units(layers, units)
    adapted = [name for name in units.modules if layers[name].adapted]
    if adapted:
        raise Unsupported(
            f"An adapter is at work in {adapted[0]!r}, so that its weights are not all there is to scale.",
            cure="Merge it first: pipeline.fuse_lora(), then pipeline.unload_lora_weights().",
        )
    return layers


def _scaling(width: int, indices: Tensor, factor: float) -> Callable[[Tensor], Tensor]:
    def scale(values: Tensor) -> Tensor:
        factors = torch.ones(width, device=values.device, dtype=values.dtype)
        factors[indices.to(values.device)] = factor
        return values * factors

    return scale


def switch_off(model: TextToImage, neurons: Path, earlier: Sequence[EditRecord], *, factor: float) -> EditRecord:
    """Scale the neurons of a file in a model's weights; each once."""
    # A table of the paper's code names no layers: its lists are those of the way down and the middle.
    layers = value_layers(model.denoiser, scope="down+mid" if neurons.suffix == ".csv" else "all")
    units, found, found_in = read_neurons(neurons, layers)
    # Neurons found before an earlier edit still count: edits of several prompts follow each other.
    known = {model.digest(), *(record.before for record in earlier)}
    if found_in is not None and found_in not in known:
        raise UsageError(
            f"The neurons were found in another model: in {found_in}, not {model.digest()}.",
            cure="Localize on this model: netweight forget localize.",
        )
    for record in earlier:
        left = units - record.units  # a factor holds once
        if units and not left:
            raise UsageError(
                f"All {len(units)} neurons of {neurons} were edited before.",
                cure="Undo that edit first, or leave it at that.",
            )
        units = left
    return apply_found_(model, units, found, file=neurons.name, factor=factor)


def apply_found_(
    model: TextToImage, units: Units, found: Sequence[Localization], *, file: str, factor: float
) -> EditRecord:
    """Scale the neurons of localizations, which the record holds."""
    return deactivate(
        model, units, factor=factor, thresholds={"neurons": file, "found": [each.to_json() for each in found]},
        prompts=[each.prompt for each in found if each.neurons],
    )  # fmt: skip
