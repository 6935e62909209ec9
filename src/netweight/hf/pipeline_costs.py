"""Plans of work on a text-to-image pipeline, before it begins: time and memory, measured on one of each kind.

A command says of which parts its work consists, as `Stage`s: how many predictions of the denoiser, with or without
gradients, how many pictures to decode or encode, how many prompts to embed. `measured_plan` runs one of each on the
opened pipeline and multiplies. Other work on the machine changes the times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from netweight.core import quantities
from netweight.core.linked_folders import files_below
from netweight.registry import PrintedTable, Result

if TYPE_CHECKING:
    from torch import Tensor

    from netweight.hf.load_pipeline import PipelineModel
    from netweight.nn.text_to_image import Text

# Latents that are measured together, where one alone takes less than so many seconds.
_TOGETHER, _QUICK = 8, 0.5
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@final
@dataclass(frozen=True)
class Stage:
    """A part of a command's work, and how often it asks the pipeline's networks."""

    name: str
    """Name of the step, in a few words."""
    predictions: int = 0
    """Latents that the denoiser is run on without gradients; guidance above 1 makes two of each."""
    gradients: int = 0
    """Latents that it is run on forwards and backwards."""
    decoded: int = 0
    """Latents that become pictures."""
    encoded: int = 0
    """Pictures that become latents."""
    prompts: int = 0
    """Prompts that are embedded."""
    more: bool = False
    """True if it may take more than this, since its results decide how long it goes on."""

    @classmethod
    def images(cls, name: str, count: int, *, guidance: float, steps: int, more: bool = False) -> Stage:
        """Return the stage in which so many images are generated."""
        return cls(name, predictions=count * steps * (2 if guidance > 1 else 1), decoded=count, more=more)


@final
@dataclass(frozen=True)
class UnitCosts:
    """Seconds that one of each kind takes on this machine."""

    prediction: float
    """A latent through the denoiser."""
    gradient: float
    """A latent through the denoiser forwards and backwards, in float32; 0 where no stage asks for it."""
    decoding: float
    """A picture from its latents."""
    encoding: float
    """The latents of a picture."""
    prompt: float
    """A prompt through the text encoders."""


@final
@dataclass(frozen=True)
class CostPlan:
    """Time and memory of a command's work."""

    stages: tuple[Stage, ...]
    """Stages of the work, in order."""
    units: UnitCosts
    """Measured cost of one unit of each kind of work."""
    seconds: tuple[float, ...]
    """Stage → estimated duration in seconds."""
    memory: int | None
    """Most bytes of memory at once; None where they cannot be measured."""

    @property
    def total(self) -> float:
        """Seconds of all stages."""
        return sum(self.seconds)

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return {
            "stages": [
                {**asdict(stage), "seconds": round(seconds, 3)}
                for stage, seconds in zip(self.stages, self.seconds, strict=True)
            ],
            "seconds": round(self.total, 3), "memory": self.memory, "units": asdict(self.units),
        }  # fmt: skip

    def result(self, sentences: Sequence[str] = ()) -> Result:
        """Return the plan as the result of a command that was asked for nothing else."""
        rows = [
            (stage.name, stage.predictions or "", stage.gradients or "", stage.decoded or "",
             ("at least " if stage.more else "") + quantities.duration(seconds))
            for stage, seconds in zip(self.stages, self.seconds, strict=True)
        ]  # fmt: skip
        least = "at least " if any(stage.more for stage in self.stages) else "about "
        lines: list[str | PrintedTable] = [
            PrintedTable(("step", "predictions", "with gradients", "pictures", "time"), rows)
        ]
        lines.append(
            f"Nothing was done. All steps together take {least}{quantities.duration(self.total)} on this machine."
        )
        if self.memory is not None:
            lines.append(f"The most memory at once is about {quantities.size(self.memory)}.")
        lines += [
            "One unit of each kind of work was measured just now. Other programs on the machine change the times.",
            *sentences,
        ]
        return Result(lines, payload={"plan": self.to_json()})


def folder_bytes(folder: Path) -> int:
    """Return the size of all files of a folder, in bytes."""
    return sum(file.stat().st_size for file in files_below(folder))


def measured_plan(
    model: PipelineModel,
    stages: Sequence[Stage],
    *,
    rows: int = 16,
    descent: PlannedDescent | None = None,
    models: int = 1,
) -> CostPlan:
    """Measure one of each kind on a pipeline, and plan stages by it.

    Args:
        model: The opened pipeline.
        stages: What the work consists of.
        rows: Most latents that the work gives to the denoiser at a time.
        descent: How gradients are taken; None where none are.
        models: How many pipelines of this size are open at a time.

    Returns:
        The plan.
    """
    import torch

    from netweight.nn.text_to_image import most_rows

    counts = {name: sum(getattr(stage, name) for stage in stages) for name in ("decoded", "encoded")}
    text = model.embed(["a photo"])
    latents, step = model.initial_noise([0]), model.timesteps(2)[0]

    def predict() -> None:
        with torch.no_grad():
            model.predict(latents, step, text)

    picture = torch.full((1, 3, *model.image_size), 0.5)
    seconds: dict[str, float] = {"prompt": _timed(lambda: model.embed(["a photo"]))[0]}
    predicts = any(stage.predictions or stage.gradients for stage in stages)
    if predicts:
        # The first prediction reads the weights, which may be in a mapped file, into memory.
        predict()
    before = _resident(model)
    seconds["prediction"], row = _timed(predict, again=False) if predicts else (0.0, 0)
    together = min(most_rows(model, rows), _TOGETHER)
    # In small networks, several predictions at a time are faster.
    if predicts and seconds["prediction"] < _QUICK and together > 1:
        latents, text = latents.repeat(together, 1, 1, 1), text.rows([0] * together)
        seconds["prediction"] = _timed(predict)[0] / together
        latents = latents[:1]
    peaks = [None if row is None else row * most_rows(model, rows)]
    kinds: dict[str, tuple[str, Callable[[], object]]] = {
        "decoding": ("decoded", lambda: model.to_images(latents)),
        "encoding": ("encoded", lambda: model.to_latents(picture)),
    }
    for name, (count, work) in kinds.items():
        seconds[name], peak = _timed(work, grad=False) if counts[count] else (0.0, 0)
        peaks.append(peak)
    seconds["gradient"] = 0.0
    if descent is not None:
        several = min(descent.rows, _TOGETHER) if seconds["prediction"] < _QUICK else 1
        seconds["gradient"], peak = _descended(
            model, descent, latents.repeat(several, 1, 1, 1), step, text.rows([0] * several)
        )
        peaks.append(peak)
    memory = None
    if before is not None and None not in peaks:
        memory = before + (models - 1) * _weights(model) + max(each for each in peaks if each is not None)
    units = UnitCosts(**seconds)
    times = tuple(
        stage.predictions * units.prediction + stage.gradients * units.gradient + stage.decoded * units.decoding
        + stage.encoded * units.encoding + stage.prompts * units.prompt
        for stage in stages
    )  # fmt: skip
    return CostPlan(tuple(stages), units, times, memory)


@final
@dataclass(frozen=True)
class PlannedDescent:
    """A descent on gradients, for the plan of its memory."""

    rows: int
    """Latents that go forwards and backwards at a time."""
    trained: int = 0
    """Number of weights that AdamW trains; with 0 gradients are those of something else, such as embeddings."""
    float32: bool = False
    """True if the denoiser is in float32 meanwhile, whatever it is stored in."""
    recomputed: bool = True
    """True if little of a pass is kept for the way back, where latents are large."""


def _descended(
    model: PipelineModel, descent: PlannedDescent, latents: Tensor, step: Tensor, text: Text
) -> tuple[float, int | None]:
    """Seconds of a latent forwards and backwards, and the bytes of memory that the whole work needs beside."""
    from netweight.nn.text_to_image import recomputed

    network = model.denoiser
    weights = list(network.parameters())
    dtype, marked = next(iter(weights)).dtype, [each for each in weights if each.requires_grad]
    count, moved = sum(each.numel() for each in weights), latents.clone().requires_grad_()

    def descend() -> None:
        model.predict(moved, step, text).sample.sum().backward()  # type: ignore[no-untyped-call]

    try:
        if descent.float32:
            network.float()
        network.requires_grad_(bool(descent.trained))
        with recomputed(model) if descent.recomputed else nullcontext():
            seconds, peak = _timed(descend, again=False)
    finally:
        for each in weights:
            each.grad = None
            each.requires_grad_(False)
        for each in marked:
            each.requires_grad_(True)
        if descent.float32:
            network.to(dtype)
    if peak is None:
        return seconds / len(latents), None
    # The pass held gradients of all weights. A training holds those of the weights that it trains, their originals and
    # two moments of each; and the whole network in float32.
    one = max(0, peak - (4 * count if descent.trained else 0))
    wider = (4 - dtype.itemsize) * count if descent.float32 else 0
    return seconds / len(latents), wider + descent.rows * one // len(latents) + 16 * descent.trained


def _weights(model: PipelineModel) -> int:
    """Bytes of the weights of a pipeline's parts."""
    import torch

    parts = [each for each in model.pipeline.components.values() if isinstance(each, torch.nn.Module)]
    return sum(each.nbytes for part in parts for each in part.parameters())


def _timed(work: Callable[[], object], *, again: bool = True, grad: bool = True) -> tuple[float, int | None]:
    """Seconds of some work, and the bytes that it needed beyond those at hand; quick work is timed a second time."""
    import torch

    _reset_peak()
    held = _peak()
    with torch.set_grad_enabled(grad):
        began = time.perf_counter()
        work()
        seconds = time.perf_counter() - began
        # The preparations of the first call are not counted.
        if again and seconds < 5:
            began = time.perf_counter()
            work()
            seconds = time.perf_counter() - began
    peak = _peak()
    return seconds, None if peak is None or held is None else max(0, peak - held)


def _resident(model: PipelineModel) -> int | None:
    import torch

    if model.device.type == "cuda":
        return int(torch.cuda.memory_allocated(model.device))
    return _status().get("VmRSS")


def _reset_peak() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    elif _RESET.exists():
        try:
            _RESET.write_text("5")
        except OSError:
            # In some containers the peak cannot be reset, so earlier peaks count as well.
            return


def _peak() -> int | None:
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return _status().get("VmHWM")


def _status() -> Mapping[str, int]:
    """Sizes of this process in bytes, as Linux reports them; empty elsewhere."""
    if not _STATUS.exists():
        return {}
    lines = (line.split() for line in _STATUS.read_text().splitlines() if line.startswith(("VmRSS", "VmHWM")))
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
