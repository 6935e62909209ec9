"""A small pipeline as a page computes it: its U-Net, its schedule as numbers, and the adapters of a space at 8 bits."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from netweight.methods.space.fitting.basis import CombinationBasis
from netweight.methods.space.fitting.gram import stack_of
from netweight.methods.space.inversion import of_denoiser
from netweight.methods.space.settings import RenderSettings
from netweight.methods.space.space import WeightSpace
from netweight.methods.space.view.content import LivePipeline
from netweight.nn.text_to_image import TextToImage

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MOST = 3_700_000  # bytes that a page has room for, before base64
# What the page's engine reads off the weights of a U-Net, or needs not know once times are embedded.
_FREE = {
    "sample_size", "in_channels", "out_channels", "down_block_types", "up_block_types", "mid_block_type",
    "block_out_channels", "layers_per_block", "transformer_layers_per_block", "cross_attention_dim",
    "attention_head_dim", "norm_num_groups", "norm_eps", "use_linear_projection", "flip_sin_to_cos", "freq_shift",
}  # fmt: skip
_BLOCKS = {"DownBlock2D", "CrossAttnDownBlock2D", "UpBlock2D", "CrossAttnUpBlock2D", "UNetMidBlock2DCrossAttn", None}
_CLOSE = 1e-3  # by which latents may differ from the pictures that they are decoded to


@final
@dataclass(frozen=True, eq=False)
class Reader:
    """Measures attributes in images, in a page that computes them."""

    name: str  # what it is, in a few words, with an article
    network: nn.Sequential  # square convolutions, SiLU, Flatten and linear layers, of pictures within -1 and 1
    reads: Sequence[str]  # what its first outputs are


def live_pipeline(
    model: TextToImage, space: WeightSpace, settings: RenderSettings, shown: Sequence[int], reader: Reader | None = None
) -> LivePipeline | str:
    """Return what computes pictures of any point in a page, or in words why a page cannot."""
    # `shown`: numbers of the adapters on the map
    pipeline: Any = getattr(model, "pipeline", None)
    if why := _unfit(pipeline, space):
        return why
    unet, basis = pipeline.unet, space.basis
    assert isinstance(basis, CombinationBasis)  # see `_unfit`
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
    found = LivePipeline({**tensors, **weights}, config, reader.reads if reader else ())
    return found if found.nbytes <= _MOST else f"it would take {found.nbytes / 1e6:.1f} MB of the page"


def _unfit(pipeline: Any, space: WeightSpace) -> str:
    """Why the engine in a page cannot compute a pipeline; empty if it can, as far as its configuration tells."""
    unet = getattr(pipeline, "unet", None)
    if unet is None or type(unet).__name__ != "UNet2DConditionModel":
        return "its denoiser is no UNet2DConditionModel"
    if not isinstance(space.basis, CombinationBasis):
        return "components of its space are no combinations of adapters"
    if 2 * sum(each.numel() for each in unet.parameters()) > _MOST or space.basis.bank.nbytes > 4 * _MOST:
        return "its U-Net or the bank is too large"
    usual = {name: each.default for name, each in inspect.signature(type(unet)).parameters.items()}
    other = {name for name, value in unet.config.items() if name in usual.keys() - _FREE and value != usual[name]}
    other |= {*unet.config.down_block_types, *unet.config.up_block_types, unet.config.mid_block_type} - _BLOCKS
    return f"its U-Net has an unusual {' and '.join(sorted(map(str, other)))}" if other else ""


@torch.no_grad()
def _course(model: TextToImage, pipeline: Any, settings: RenderSettings) -> dict[str, NDArray[Any]] | None:
    """Noises, texts, embedded times, and per step the factors of latents and prediction; None if these do not do."""
    count, prompts = len(settings.seeds), settings.prompts
    noise, scheduler = model.initial_noise(settings.seeds), copy.deepcopy(pipeline.scheduler)
    scheduler.set_timesteps(settings.steps)
    fresh = copy.deepcopy(scheduler)  # without the state of former steps
    start = noise * scheduler.init_noise_sigma
    zero, rows, walked, expected = torch.zeros(1, 1, 1, 1), [], start, start
    for step in scheduler.timesteps:
        given = float(copy.deepcopy(fresh).scale_model_input(zero + 1, step))
        keep, more = (
            float(copy.deepcopy(fresh).step(found, step, latents, return_dict=False)[0])
            for found, latents in ((zero, zero + 1), (zero + 1, zero))
        )
        rows.append([given, keep, more])
        guess = noise.roll(len(rows), -1)  # any prediction will do to compare both
        scheduler.scale_model_input(walked, step)
        walked = scheduler.step(guess, step, walked, return_dict=False)[0]
        expected = keep * expected + more * guess
    decoded = model.to_images(noise) if hasattr(model, "to_images") else noise
    exact = decoded.shape == noise.shape and (decoded - (noise / 2 + 0.5).clamp(0, 1)).abs().max() < _CLOSE
    if not exact or not (walked - expected).abs().max() <= _CLOSE * expected.abs().max():  # NaN is refused, too
        return None
    unet = pipeline.unet
    times = torch.cat([unet.time_embedding(unet.time_proj(step[None]).to(noise)) for step in scheduler.timesteps])
    texts = model.embed(list(prompts) * (count // len(prompts))).states
    found = {"noise": start.permute(0, 2, 3, 1), "text": texts, "empty": model.embed([""]).states, "times": times}
    return {name: _floats(value) for name, value in {**found, "schedule": torch.tensor(rows)}.items()}


def _eight_bits(name: str, ups: Tensor, downs: Tensor) -> dict[str, NDArray[Any]]:
    """Factors of a module, shapes `(n, rows, rank)` and `(n, rank, columns)`, side by side, and a size of each."""
    found, sizes = {}, torch.ones(len(ups) * downs.shape[1])
    for part, values in (("ups", ups.permute(1, 0, 2)), ("downs", downs.permute(2, 0, 1))):
        flat = values.flatten(1).float()
        size = flat.abs().amax(0).clamp_min(torch.finfo(torch.float32).tiny) / 127
        found[f"{part}.{name}"] = (flat / size).round().to(torch.int8).numpy()
        sizes = sizes * size
    return {**found, f"sizes.{name}": _floats(sizes)}


def _layers(network: nn.Sequential) -> tuple[list[list[Any]], dict[str, NDArray[Any]]]:
    """A reader's layers, each a name, and a stride where it is a convolution; and its weights."""
    layers: list[list[Any]] = []
    tensors: dict[str, Tensor] = {}
    channels = 0
    for number, layer in enumerate(network):
        name = f"reader.{number}"
        if isinstance(layer, nn.SiLU):
            layers.append(["silu"])
        elif isinstance(layer, nn.Conv2d):
            layers.append([name, layer.stride[0]])
            tensors |= {f"{name}.{part}": value for part, value in layer.state_dict().items()}
            channels = layer.out_channels
        elif isinstance(layer, nn.Linear):
            layers.append([name])
            tensors |= {f"{name}.{part}": value for part, value in layer.state_dict().items()}
            if channels:  # the page keeps channels last, where torch flattens them first
                columns = layer.weight.reshape(len(layer.weight), channels, -1).transpose(1, 2).flatten(1)
                tensors[f"{name}.weight"], channels = columns, 0
    return layers, {name: _halves(value) for name, value in tensors.items()}


def _floats(values: Tensor) -> NDArray[Any]:
    return values.detach().float().cpu().numpy().astype("<f4")


def _halves(values: Tensor) -> NDArray[Any]:
    """Numbers at 16 bits, which are exact for weights that were stored so."""
    return values.detach().float().cpu().numpy().astype("<f2")
