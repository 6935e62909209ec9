"""Delayed injection in diffusers pipelines: adapters that begin to hold at a timestep, while an image is being made.

    pipeline.load_lora_weights("person", adapter_name="person")
    pipeline.load_lora_weights("person-with-beard", adapter_name="edited")
    with delayed_injection(pipeline, Delay(700), after="edited", before="person"):
        pipeline("a photo of sks person")

The denoiser itself is watched, not the pipeline's callback, which comes too late for the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from netweight.core.names import nearest_names
from netweight.errors import NameNotFound, Unsupported


class Schedule(Protocol):
    """What says when an edit holds; `methods.space.edits.Delay` is one."""

    def edited(self, timestep: float) -> bool:
        """Whether a step at this timestep is made with edited weights."""


@contextmanager
def delayed_injection(pipeline: Any, delay: Schedule, *, after: str, before: str | None = None) -> Iterator[None]:
    """Switch a pipeline's adapters by timestep, for a block."""
    denoiser = _denoiser(pipeline)
    _check(denoiser, after, before)
    active = list(denoiser.active_adapters())
    try:
        with switching(denoiser, delay, lambda edited: _use(denoiser, after if edited else before)):
            yield
    finally:
        denoiser.enable_adapters()
        denoiser.set_adapter(active)


@contextmanager
def switching(denoiser: Any, delay: Schedule, use: Callable[[bool], object]) -> Iterator[None]:
    """Call `use` with whether an edit holds: before the denoiser's first run in a block, and whenever that changes."""
    used: list[bool] = []

    def watch(module: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        timestep = torch.as_tensor(named["timestep"] if "timestep" in named else arguments[1])
        edited = delay.edited(float(timestep.max()))
        if used != [edited]:
            used[:] = [edited]
            use(edited)

    handle = denoiser.register_forward_pre_hook(watch, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def switch_on_step_end(delay: Schedule, *, after: str, before: str | None = None) -> Any:
    """Return a function for a pipeline's `callback_on_step_end` that does the same from the second step on."""
    # Where no hook may be put on the denoiser, such as a compiled one. Use the adapter of the first step, `before` as a
    # rule, when the pipeline is called: `pipeline.unet.set_adapter("person")`.

    def switch(pipeline: Any, step: int, timestep: Any, named: dict[str, Any]) -> dict[str, Any]:
        coming = pipeline.scheduler.timesteps[step + 1 : step + 2]
        if len(coming):
            _use(_denoiser(pipeline), after if delay.edited(float(coming[0])) else before)
        return named

    return switch


def _use(denoiser: Any, adapter: str | None) -> None:
    if adapter is None:
        denoiser.disable_adapters()
    else:
        denoiser.enable_adapters()
        denoiser.set_adapter(adapter)


def _denoiser(pipeline: Any) -> Any:
    found = getattr(pipeline, "unet", None) or getattr(pipeline, "transformer", None)
    if found is None or not hasattr(found, "set_adapter"):
        raise Unsupported(
            f"This {type(pipeline).__name__} has no denoiser that takes adapters.",
            cure="Give a diffusers pipeline with a unet or transformer.",
        )
    return found


def _check(denoiser: Any, after: str, before: str | None) -> None:
    loaded = list(getattr(denoiser, "peft_config", {}))
    for name in (after, before):
        if name is not None and name not in loaded:
            near = ", ".join(map(repr, nearest_names(name, loaded))) or "none: none was loaded"
            raise NameNotFound(f"No adapter {name!r} was loaded into the pipeline.", cure=f"The nearest are {near}.")
