"""Images that the models of points make, many points in one batch: what audits look at and pages show.

images = paint(model, space, scores, ["a photo of a person"], seeds=[0, 1])     # (b, 2, 3, height, width)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from netweight.errors import Unsupported, UsageError
from netweight.generate.lowrank import applied
from netweight.methods.space.edits import Delay
from netweight.methods.space.inversion import Space
from netweight.probe.diffusion import TextToImage

__all__ = ["of_denoiser", "paint"]

_DENOISERS = ("unet", "transformer")


def paint(
    model: TextToImage,
    space: Space,
    scores: Tensor,
    prompts: Sequence[str],
    seeds: Sequence[int],
    *,
    guidance: float = 3.0,
    steps: int = 50,
    delay: Delay | None = None,
    before: Tensor | None = None,
    rows: int = 64,
) -> Tensor:
    """Make images of prompts with the models of points.

    Args:
        model: The base model; its weights stay as they are.
        space: The space, fitted to adapters of this model.
        scores: Points, shape `(b, k)`.
        prompts: One for all images, or one per seed.
        seeds: Of the initial noise; every point begins with the same ones, so that images can be compared.
        guidance: Scale of classifier-free guidance.
        steps: Of the scheduler.
        delay: With it, points hold from its timestep on, and those of `before` until then.
        before: Points before an edit, shape `(b, k)`; None, with a delay, for the base model alone.
        rows: Most images at a time.

    Returns:
        Shape `(b, seeds, 3, height, width)`, within 0 and 1, on the CPU.

    Raises:
        UsageError: Numbers do not fit, or the space is of another model.
        Unsupported: The space changes more than the denoiser.
    """
    if scores.ndim != 2 or not seeds or len(prompts) not in (1, len(seeds)):
        raise UsageError(
            f"Points of shape {tuple(scores.shape)} came with {len(prompts)} prompts and {len(seeds)} seeds.",
            cure="Give points (b, k) and one prompt, or one per seed.",
        )
    if before is not None and before.shape != scores.shape:
        raise UsageError(f"Points {tuple(scores.shape)} cannot follow on {tuple(before.shape)}.")
    text = model.embed(list(prompts) * (len(seeds) // len(prompts)))
    at_once = max(1, rows // len(seeds))
    found = []
    for start in range(0, len(scores), at_once):
        part = slice(start, start + at_once)
        count = len(scores[part])
        after = _own_changes(model, space, scores[part])
        then = None if before is None else _own_changes(model, space, before[part])
        groups = torch.arange(count, device=_device(model)).repeat_interleave(len(seeds))
        with _held(model.denoiser, after, then, delay, groups):
            repeated = text.rows(list(range(len(seeds))) * count)
            images = model.generate(repeated, list(seeds) * count, guidance=guidance, steps=steps)
        found.append(images.reshape(count, len(seeds), *images.shape[1:]))
    return torch.cat(found)


@contextmanager
def _held(
    denoiser: nn.Module,
    after: Mapping[str, Tensor],
    before: Mapping[str, Tensor] | None,
    delay: Delay | None,
    groups: Tensor,
) -> Iterator[None]:
    """Keep the denoiser's weights changed; with a delay as the timestep of each run has it."""
    if delay is None:
        with applied(denoiser, after, groups):
            yield
        return
    with ExitStack() as stack, ExitStack() as now:
        shown: list[bool] = []

        def look(module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            timestep = torch.as_tensor(named["timestep"] if "timestep" in named else arguments[1])
            edited = delay.edited(timestep.float().max())
            if shown != [edited]:
                shown[:] = [edited]
                now.close()
                wanted = after if edited else before
                if wanted is not None:
                    now.enter_context(applied(denoiser, wanted, groups))

        stack.callback(denoiser.register_forward_pre_hook(look, with_kwargs=True).remove)
        yield


def _own_changes(model: TextToImage, space: Space, scores: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        return of_denoiser(space.changes(scores.to(_device(model))), model.denoiser)


def _device(model: TextToImage) -> torch.device:
    return next(model.denoiser.parameters()).device


def of_denoiser(changes: Mapping[str, Tensor], denoiser: nn.Module) -> dict[str, Tensor]:
    """Return changes under the denoiser's own names, without the pipeline's name of it in front.

    Args:
        changes: Module → ΔW, shape `(…, rows, columns)`.
        denoiser: Of the pipeline.

    Raises:
        Unsupported: A change is of another part of the pipeline.
    """
    own = dict(denoiser.named_modules())
    found = {}
    for name, change in changes.items():
        part, _, rest = name.partition(".")
        if name not in own and part not in _DENOISERS:
            raise Unsupported(
                f"The space changes {name}, which is no module of the denoiser.",
                cure="Only changes of the denoiser can be painted or inverted; is the space of another model?",
            )
        found[name if name in own else rest] = change
    return found
