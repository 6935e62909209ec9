"""The view of a space: images of points along directions and components, of the adapters on a map, and of samples.

A small pipeline is handed to the page, which computes it: its U-Net, its schedule as numbers, and adapters at 8 bits.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, final

import numpy as np
import torch
from torch import Tensor, nn

from netweight.core import quantities
from netweight.core.progress import QUIET, Progress, ProgressTask
from netweight.errors import UsageError
from netweight.methods.space.gram import stack_of
from netweight.methods.space.inversion import generate_images, of_denoiser
from netweight.methods.space.labels import Labels
from netweight.methods.space.points import Direction, PairSampler, Sampler, scores_digest
from netweight.methods.space.settings import RenderSettings
from netweight.methods.space.space import WeightSpace
from netweight.methods.space.view.page import (
    AdapterMap,
    LivePipeline,
    NearestAdapters,
    Samples,
    SliderSpace,
    Traversal,
    View,
)
from netweight.nn.text_to_image import TextToImage

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Components that can be put on the map's axes.
_AXES = 4
# The most bytes that a page may contain, before base64.
_MOST_BYTES = 3_700_000
# What the page's engine reads off the weights of a U-Net, or needs not know once times are embedded.
_IRRELEVANT_CONFIG = {
    "sample_size", "in_channels", "out_channels", "down_block_types", "up_block_types", "mid_block_type",
    "block_out_channels", "layers_per_block", "transformer_layers_per_block", "cross_attention_dim",
    "attention_head_dim", "norm_num_groups", "norm_eps", "use_linear_projection", "flip_sin_to_cos", "freq_shift",
}  # fmt: skip
_BLOCKS = {"DownBlock2D", "CrossAttnDownBlock2D", "UpBlock2D", "CrossAttnUpBlock2D", "UNetMidBlock2DCrossAttn", None}
# The latents may differ by this share from the pictures to which they are decoded.
_CLOSE = 1e-3


@final
@dataclass(frozen=True, eq=False)
class Reader:
    """Network that measures attributes in images, in a page that computes them."""

    name: str
    """Description in a few words, with an article."""
    network: nn.Sequential
    """Means over squares, square convolutions, SiLU, Flatten and linear layers, of pictures within -1 and 1."""
    reads: Sequence[str]
    """Names of the first outputs."""


@final
@dataclass(frozen=True, eq=False)
class _Step:
    """Change of the scores by one standard deviation along a slider, and the slider's name."""

    name: str
    """Name of the slider."""
    kind: Literal["direction", "component"]
    vector: Tensor
    note: str


def build_view(
    model: TextToImage,
    space: WeightSpace,
    *,
    title: str,
    directions: Sequence[Direction] = (),
    labels: Labels | None = None,
    start: tuple[str, Tensor] | None = None,
    sampler: Sampler | None = None,
    reader: Reader | None = None,
    settings: RenderSettings | None = None,
    summary: str = "",
    facts: Mapping[str, str] | None = None,
    command: str | None = None,
    progress: Progress = QUIET,
) -> View:
    """Generate the images of a page.

    `start`: name and scores, shape `(k,)`, of the point that sliders begin at; None for the mean of the adapters.
    """
    settings = settings or RenderSettings()
    steps = _steps(space, directions, min(settings.components, space.components))
    if not steps:
        raise UsageError("There is no slider to show.", cure="Give a direction, or ask for components.")
    if labels is not None and tuple(labels.names) != tuple(space.names):
        raise UsageError("The labels are of other adapters than the space.", cure="Read them with space.names.")
    name, center = start or ("the mean of the adapters", torch.zeros(space.components))
    if center.shape != (space.components,) or not center.isfinite().all():
        raise UsageError(f"{name} is not a point of a space of {space.components} components.", cure="Choose another.")
    shown = _thinned(len(space.names), settings.adapters)
    sampler = sampler or PairSampler.fit(space.scores)
    drawn = sampler.draw(settings.samples, seed=settings.seed) if settings.samples else space.scores[:0]
    live = live_pipeline(model, space, settings, shown, reader)
    painted = isinstance(live, str)
    walks = [torch.stack([center + strength * step.vector for strength in settings.strengths]) for step in steps]
    total = sum(map(len, (*walks * painted, drawn, *[center[None]] * (not painted)))) * len(settings.seeds) + len(shown)
    with progress.task("Generating", total, unit="images") as task:
        images = partial(_images, model, space, settings, task)
        traversals = [
            Traversal(step.name, step.kind, settings.strengths, images(points) if painted else None, step.note)
            for step, points in zip(steps, walks, strict=True)
        ]
        samples = _samples_of(space, shown, drawn, images(drawn), settings.neighbors, sampler) if len(drawn) else None
        faces = images(space.scores[shown], seeds=1)[:, 0]
        first = None if painted else images(center[None])[0]
    return View(
        title=title,
        traversals=traversals,
        points=_map_of(space, shown, faces, labels, settings.neighbors),
        samples=samples,
        summary=" ".join(each for each in (summary, space.accuracy.warning) if each),
        reader="" if reader is None or painted else reader.name,
        facts={**_facts(model, space, name, settings), **(facts or {})},
        command=command,
        sliders=SliderSpace(
            scores_digest(space.scores), center.tolist(), {step.name: step.vector.tolist() for step in steps}
        ),
        painted=live if isinstance(live, str) else "",
        live=None if isinstance(live, str) else live,
        first=first,
    )


def _steps(space: WeightSpace, directions: Sequence[Direction], components: int) -> list[_Step]:
    steps = []
    for direction in directions:
        direction.check(space.scores)
        said = "; ".join(
            f"{finding.name.removesuffix(f' of {direction.name}')} {finding.value:.2f}"
            + (f", n = {finding.n}" if finding.n else "")
            for finding in direction.findings
            if isinstance(finding.value, float)
        )
        steps.append(_Step(direction.name, "direction", direction.step(1.0).float(), said))
    variances = space.deviations.double().square()
    for number in range(components):
        vector = torch.zeros(space.components)
        vector[number] = space.deviations[number]
        share = 100 * float(variances[number] / variances.sum())
        steps.append(
            _Step(f"component {number + 1}", "component", vector, f"{share:.1f} % of the variance in the space")
        )
    return steps


def _images(
    model: TextToImage,
    space: WeightSpace,
    settings: RenderSettings,
    task: ProgressTask,
    points: Tensor,
    seeds: int | None = None,
) -> NDArray[np.uint8]:
    """Images of points, shape `(points, seeds, height, width, 3)`; `seeds` limits the number of noises."""
    chosen, batches = settings.seeds[:seeds], []
    prompts = settings.prompts[:seeds] if len(settings.prompts) > 1 else settings.prompts
    device = next(model.denoiser.parameters()).device
    for part in torch.split(points, max(1, settings.rows // len(chosen))):
        images = generate_images(
            model, space, part.to(device), prompts, chosen, guidance=settings.guidance, steps=settings.steps,
            rows=settings.rows,
        )  # fmt: skip
        batches.append((images * 255).round().to(torch.uint8).permute(0, 1, 3, 4, 2).numpy())
        task.update(len(part) * len(chosen))
    return np.concatenate(batches)


def _facts(model: TextToImage, space: WeightSpace, start: str, settings: RenderSettings) -> dict[str, str]:
    return {
        "model": f"{model.name}, {model.digest()}",
        "adapters": f"{len(space.names)}, digest {space.bank_digest}",
        "space": f"{space.components} components",
        "sliders begin at": start,
        "prompts": "; ".join(repr(prompt) for prompt in settings.prompts),
        "seeds of the noises": ", ".join(map(str, settings.seeds)),
        "sampling": f"{settings.steps} steps, guidance {settings.guidance:g}",
    }


def _thinned(n: int, count: int) -> list[int]:
    """At most `count` of n models, evenly chosen.

    `count`: largest number, at least 1.
    """
    if count < 1:
        raise UsageError("A map needs at least one adapter.", cure="Show at least one.")
    numbers: list[int] = torch.linspace(0, n - 1, min(n, count)).round().long().tolist()
    return numbers


def _map_of(
    space: WeightSpace, shown: Sequence[int], faces: NDArray[np.uint8], labels: Labels | None, neighbors: int
) -> AdapterMap:
    """Put models on a map of the first components.

    `faces`: a picture of each, shape `(shown, height, width, 3)`.
    """
    names = [space.names[number] for number in shown]
    attributes = {} if labels is None else {name: column.values[list(shown)] for name, column in labels.columns.items()}
    scores = space.scores[list(shown)]
    fewer = f"{len(shown)} of {len(space.names)} are shown. " if len(shown) < len(space.names) else ""
    return AdapterMap(
        names,
        _coordinates(space, scores),
        [f"component {number + 1} (σ)" for number in range(min(_AXES, space.components))],
        faces,
        {name: [None if value != value else value for value in values.tolist()] for name, values in attributes.items()},
        _nearest(space, scores, shown, neighbors, themselves=True),
        f"{fewer}Its picture is generated from its point in the space of {space.components} components.",
    )


def _samples_of(
    space: WeightSpace, shown: Sequence[int], drawn: Tensor, images: NDArray[np.uint8], neighbors: int, sampler: Sampler
) -> Samples:
    """Put drawn models beside the models on the map that are nearest to them.

    `drawn`: points, shape `(n, k)`. `images`: shape `(n, noises, height, width, 3)`.
    """
    note = f"The samples were drawn by a {type(sampler).__name__}."
    return Samples(images, _nearest(space, drawn, shown, neighbors), _coordinates(space, drawn), note)


def _coordinates(space: WeightSpace, points: Tensor) -> NDArray[np.float64]:
    """First components in standard deviations; one in which no model differs is 0 everywhere."""
    axes = min(_AXES, space.components)
    scale = space.deviations[:axes].double().clamp_min(torch.finfo(torch.float32).tiny)
    coordinates: NDArray[np.float64] = (points[:, :axes].double() / scale).numpy()
    return coordinates


def _nearest(
    space: WeightSpace, points: Tensor, shown: Sequence[int], count: int, *, themselves: bool = False
) -> NearestAdapters | None:
    """Models on the map nearest to points, by the cosine of what both add to the mean of all models."""
    # Where the points are the models on the map themselves, none is its own neighbor.
    count = min(count, len(shown) - themselves)
    if count < 1:
        return None
    center = space.scores.double().mean(0)
    towards = torch.nn.functional.normalize(space.scores[list(shown)].double() - center)
    cosines = torch.nn.functional.normalize(points.double() - center) @ towards.T
    if themselves:
        cosines.fill_diagonal_(-torch.inf)
    best = cosines.topk(count)
    return NearestAdapters(best.indices.numpy(), best.values.numpy())


def live_pipeline(
    model: TextToImage, space: WeightSpace, settings: RenderSettings, shown: Sequence[int],
    reader: Reader | None = None,
) -> LivePipeline | str:  # fmt: skip
    """Return what computes pictures of any point in a page, or in words why a page cannot.

    `shown`: numbers of the adapters on the map.
    """
    pipeline: Any = getattr(model, "pipeline", None)
    if why := _unfit(pipeline, space):
        return why
    unet, basis = pipeline.unet, space.basis.combinations
    assert basis is not None  # see `_unfit`
    course = _course(model, pipeline, settings)
    if course is None:
        return "its scheduler or its autoencoder does more than the page can"
    stack = stack_of(basis.bank, 0, len(basis.weights))
    tensors = {name: _halves(value) for name, value in unet.state_dict().items() if "time_embedding" not in name}
    modules = list(of_denoiser(stack.up, unet))
    for name, full in zip(modules, stack.up, strict=True):
        if f"{name}.weight" not in tensors:
            return f"the space changes {name}"
        tensors |= _eight_bits(name, stack.up[full] * stack.scale[full][:, None, None], stack.down[full])
    tensors |= {"combinations": _halves(basis.weights), "scores": _floats(space.scores[list(shown)]), **course}
    layers, weights = _layers(reader.network) if reader else ([], {})
    config = {
        "modules": modules, "reader": layers, "guidance": settings.guidance, "levels": len(unet.down_blocks),
        "groups": unet.config.norm_num_groups, "eps": unet.config.norm_eps,
        "heads": next((each.heads for each in unet.modules() if hasattr(each, "heads")), 1),
    }  # fmt: skip
    live = LivePipeline({**tensors, **weights}, config, reader.reads if reader else ())
    return live if live.nbytes <= _MOST_BYTES else f"it would take {quantities.size(live.nbytes)} of the page"


def _unfit(pipeline: Any, space: WeightSpace) -> str:
    """Return why the engine in a page cannot compute a pipeline; empty if its configuration shows no obstacle."""
    unet = getattr(pipeline, "unet", None)
    if unet is None or type(unet).__name__ != "UNet2DConditionModel":
        return "its denoiser is not a UNet2DConditionModel"
    if (basis := space.basis.combinations) is None:
        return "components of its space are not combinations of adapters"
    if 2 * sum(each.numel() for each in unet.parameters()) > _MOST_BYTES or basis.bank.nbytes > 4 * _MOST_BYTES:
        return "its U-Net or the bank is too large"
    usual = {name: each.default for name, each in inspect.signature(type(unet)).parameters.items()}
    other = {
        name
        for name, value in unet.config.items()
        if name in usual.keys() - _IRRELEVANT_CONFIG and value != usual[name]
    }
    other |= {*unet.config.down_block_types, *unet.config.up_block_types, unet.config.mid_block_type} - _BLOCKS
    return f"its U-Net has an unusual {' and '.join(sorted(map(str, other)))}" if other else ""


@torch.no_grad()
def _course(model: TextToImage, pipeline: Any, settings: RenderSettings) -> dict[str, NDArray[Any]] | None:
    """Noises, texts, embedded times, and per step the factors of latents and prediction; None if these do not do."""
    count, prompts = len(settings.seeds), settings.prompts
    noise, scheduler = model.initial_noise(settings.seeds), copy.deepcopy(pipeline.scheduler)
    scheduler.set_timesteps(settings.steps)
    # The copy has no state of earlier steps.
    fresh = copy.deepcopy(scheduler)
    start = noise * scheduler.init_noise_sigma
    zero, rows, walked, expected = torch.zeros(1, 1, 1, 1), [], start, start
    for step in scheduler.timesteps:
        given = float(copy.deepcopy(fresh).scale_model_input(zero + 1, step))
        keep, more = (
            float(copy.deepcopy(fresh).step(prediction, step, latents, return_dict=False)[0])
            for prediction, latents in ((zero, zero + 1), (zero + 1, zero))
        )
        rows.append([given, keep, more])
        # Any prediction can be used for the comparison.
        guess = noise.roll(len(rows), -1)
        scheduler.scale_model_input(walked, step)
        walked = scheduler.step(guess, step, walked, return_dict=False)[0]
        expected = keep * expected + more * guess
    decoded = model.to_images(noise) if hasattr(model, "to_images") else noise
    exact = decoded.shape == noise.shape and (decoded - (noise / 2 + 0.5).clamp(0, 1)).abs().max() < _CLOSE
    # The comparison also refuses NaN.
    if not exact or not (walked - expected).abs().max() <= _CLOSE * expected.abs().max():
        return None
    unet = pipeline.unet
    times = torch.cat([unet.time_embedding(unet.time_proj(step[None]).to(noise)) for step in scheduler.timesteps])
    texts = model.embed(list(prompts) * (count // len(prompts))).states
    tensors = {"noise": start.permute(0, 2, 3, 1), "text": texts, "empty": model.embed([""]).states, "times": times}
    return {name: _floats(value) for name, value in {**tensors, "schedule": torch.tensor(rows)}.items()}


def _eight_bits(name: str, ups: Tensor, downs: Tensor) -> dict[str, NDArray[Any]]:
    """Factors of a module, shapes `(n, rows, rank)` and `(n, rank, columns)`, side by side, and a size of each."""
    tensors, sizes = {}, torch.ones(len(ups) * downs.shape[1])
    for part, values in (("ups", ups.permute(1, 0, 2)), ("downs", downs.permute(2, 0, 1))):
        flat = values.flatten(1).float()
        size = flat.abs().amax(0).clamp_min(torch.finfo(torch.float32).tiny) / 127
        tensors[f"{part}.{name}"] = (flat / size).round().to(torch.int8).numpy()
        sizes = sizes * size
    return {**tensors, f"sizes.{name}": _floats(sizes)}


def _layers(network: nn.Sequential) -> tuple[list[list[Any]], dict[str, NDArray[Any]]]:
    """A network's layers, each a name, and a stride where it has one; and its weights."""
    layers: list[list[Any]] = []
    tensors: dict[str, Tensor] = {}
    channels = 0
    for number, layer in enumerate(network):
        name = f"reader.{number}"
        if isinstance(layer, nn.SiLU):
            layers.append(["silu"])
        elif isinstance(layer, nn.AvgPool2d):
            layers.append(["means", layer.kernel_size])
        elif isinstance(layer, nn.Conv2d):
            layers.append([name, layer.stride[0]])
            tensors |= {f"{name}.{part}": value for part, value in layer.state_dict().items()}
            channels = layer.out_channels
        elif isinstance(layer, nn.Linear):
            layers.append([name])
            tensors |= {f"{name}.{part}": value for part, value in layer.state_dict().items()}
            # The page stores channels last, and torch flattens them first.
            if channels:
                columns = layer.weight.reshape(len(layer.weight), channels, -1).transpose(1, 2).flatten(1)
                tensors[f"{name}.weight"], channels = columns, 0
    return layers, {name: _halves(value) for name, value in tensors.items()}


def _floats(values: Tensor) -> NDArray[Any]:
    return values.detach().float().cpu().numpy().astype("<f4")


def _halves(values: Tensor) -> NDArray[Any]:
    """Numbers at 16 bits, which are exact for weights that were stored so; a convolution's channels are last."""
    values = values.permute(0, 2, 3, 1) if values.ndim == 4 else values
    return values.detach().float().cpu().numpy().astype("<f2")
