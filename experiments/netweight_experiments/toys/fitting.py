"""Training of small models on the spot: from a seed, resumable after a kill, stopped when held-out loss stops falling.

Batches are a function of the step alone, so a resumed run sees what an uninterrupted one would have seen. `fit` is for
language models, `fit_denoiser` for denoisers.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from netweight.core.digests import canonical_json, digest_config
from netweight.core.names import Select
from netweight.core.progress import QUIET, Progress, silent_bars
from netweight.core.seeds import derive, torch_generator
from netweight.errors import TrainingStopped, UsageError
from netweight.hf.load_language_model import ABOUT
from netweight.job import Job
from netweight.report.report import write_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# State of the job in the folder of a training that is not finished.
CHECKPOINT = "training.safetensors"


def finished(folder: Path, about: Any) -> dict[str, Any] | None:
    """Return what came of a training that is finished, or None."""
    file = folder / ABOUT
    if not file.exists():
        return None
    known = json.loads(file.read_text(encoding="utf-8"))
    if known["of"] != digest_config(about):
        raise UsageError(
            f"{folder} holds a model that was trained otherwise.", cure="Remove it, or use another folder."
        )
    outcome: dict[str, Any] = known["outcome"]
    return outcome


def record(folder: Path, about: Any, outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Write how a model was trained and what came of it, for `finished`; return the latter as that does."""
    written = json.loads(canonical_json({"of": digest_config(about), "about": about, "outcome": outcome}))
    write_text(folder / ABOUT, json.dumps(written, indent=1, sort_keys=True) + "\n")
    known: dict[str, Any] = written["outcome"]
    return known


def keep(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, about: Any, outcome: dict[str, Any]
) -> dict[str, Any]:
    """Write a trained model as a folder that transformers loads, then drop the state of its training."""
    with silent_bars():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    known = record(folder, about, outcome)
    (folder / CHECKPOINT).unlink(missing_ok=True)
    return known


@dataclass(frozen=True)
class Schedule:
    """How to train."""

    steps: int
    """Most optimizer steps; the learning rate falls to a tenth along a half cosine over all of them."""
    learning_rate: float = 1e-3
    """AdamW's, after warm-up."""
    warmup: int = 100
    """Steps over which it rises from 0."""
    weight_decay: float = 0.1
    """AdamW's, for matrices; norms and biases decay by nothing."""
    check_every: int = 100
    """Steps between two looks at the held-out loss, each with a checkpoint."""
    patience: int = 4
    """Looks in a row without a new best after which training stops."""
    seed: int = 0
    """Seed of dropout; initialization and batches have their own."""


@dataclass(frozen=True)
class Fit:
    """What training came to; the model holds the weights of the best look."""

    steps: int
    """Steps that were made."""
    best_step: int
    """The step whose weights were kept."""
    held_out: float
    """Held-out loss there, in nats."""
    curve: tuple[tuple[int, float, float], ...] = field(repr=False)
    """Step, mean training loss since the look before, held-out loss; one entry per look."""

    @property
    def overfits(self) -> bool:
        """Whether the last look was worse than the best one."""
        return self.curve[-1][2] > self.held_out

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return asdict(self) | {"overfits": self.overfits}


def fit(
    model: nn.Module,
    batch_of: Callable[[int], Mapping[str, Tensor]],
    held_out: Callable[[nn.Module], float],
    schedule: Schedule,
    folder: Path,
    *,
    progress: Progress = QUIET,
    description: str = "train",
) -> Fit:
    """Train a model of transformers that returns a `loss`, by AdamW in fp32 under bf16 autocast."""
    optimizer = torch.optim.AdamW(_groups(model, schedule.weight_decay), lr=1.0, betas=(0.9, 0.95), fused=True)
    with (
        _job(folder, schedule, model, optimizer) as (job, state, best),
        progress.task(description, schedule.steps, unit="steps") as task,
        torch.random.fork_rng(devices=[]),
    ):
        task.update(state["step"])
        while state["step"] < schedule.steps and not _finished(state["curve"], schedule):
            state["losses"] += _step(model, optimizer, batch_of(state["step"]), state["step"], schedule)
            state["step"] += 1
            task.update()
            if state["step"] % schedule.check_every == 0 or state["step"] == schedule.steps:
                model.eval()
                _note(state, held_out(model))
                if min(entry[2] for entry in state["curve"]) == state["curve"][-1][2]:
                    best = {name: value.clone() for name, value in model.state_dict().items()}
                _save(job, state, optimizer, model=model.state_dict(), best=best)
                task.describe(f"{description}, held-out loss {state['curve'][-1][2]:.3f}")
    model.load_state_dict(best)
    model.eval()
    curve = tuple((int(step), float(loss), float(out)) for step, loss, out in state["curve"])
    best_step, _, least = min(curve, key=lambda entry: entry[2])
    return Fit(state["step"], best_step, least, curve)


def fitted(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch_of: Callable[[int], Mapping[str, Tensor]],
    held_out: Callable[[nn.Module], float],
    schedule: Schedule,
    folder: Path,
    about: Any,
    measured: Callable[[float], dict[str, Any]],
    *,
    progress: Progress = QUIET,
) -> dict[str, Any]:
    """Train a stand-in with `fit` and keep it; `measured` says more of it, given its held-out loss."""
    weights = sum(parameter.numel() for parameter in model.parameters())
    folder.mkdir(parents=True, exist_ok=True)
    what = f"train the stand-in ({weights / 1e6:.1f} M weights)"
    found = fit(model, batch_of, held_out, schedule, folder, progress=progress, description=what)
    outcome = {"fit": found.to_json(), "weights": weights, **measured(found.held_out)}
    return keep(folder, model.bfloat16(), tokenizer, about, outcome)


def _groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Mapping[str, Tensor], step: int, schedule: Schedule
) -> float:
    model.train()
    torch.manual_seed(derive(schedule.seed, "dropout", step))
    for group in optimizer.param_groups:
        group["lr"] = _rate(step, schedule, 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return _finite(loss, step)


@contextmanager
def _job(
    folder: Path, how: Schedule | DenoiserRecipe, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[Job, dict[str, Any], dict[str, Tensor]]]:
    """A training's job, where it stands, and its best weights; model and optimizer are loaded."""
    with Job.open(folder, key=asdict(how), of="a training", state=CHECKPOINT) as job:
        state, tensors = job.load() or ({"step": 0, "curve": [], "losses": 0.0, "cpu_seconds": 0.0}, {})
        parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for place, value in tensors.items():
            part, _, name = place.partition(".")
            parts[part][name] = value
        if parts:
            model.load_state_dict(parts["model"])
            moments: dict[int, dict[str, Tensor]] = defaultdict(dict)
            for name, value in parts["optimizer"].items():
                number, _, kind = name.partition(".")
                moments[int(number)][kind] = value
            optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
        yield job, state, parts["best"]


def _save(
    job: Job, state: Mapping[str, Any], optimizer: torch.optim.Optimizer, **weights: Mapping[str, Tensor]
) -> None:
    moments = {
        f"{number}.{kind}": value
        for number, kinds in optimizer.state_dict()["state"].items()
        for kind, value in kinds.items()
    }
    parts = {**weights, "optimizer": moments}
    job.save(state, ((f"{part}.{name}", value) for part, found in parts.items() for name, value in found.items()))


def _rate(step: int, how: Schedule | DenoiserRecipe, least: float) -> float:
    """The learning rate: up over the warm-up, then down to a share of it along a half cosine."""
    if step < how.warmup:
        return how.learning_rate * (step + 1) / how.warmup
    done = (step - how.warmup) / max(how.steps - how.warmup, 1)
    return how.learning_rate * (least + (1 - least) / 2 * (1 + math.cos(math.pi * done)))


def _note(state: dict[str, Any], *more: float) -> None:
    """Add to the curve the mean loss since the last look, and what was looked at."""
    since = state["step"] - (state["curve"][-1][0] if state["curve"] else 0)
    state["curve"].append([state["step"], state["losses"] / since, *more])
    state["losses"] = 0.0


def _finite(loss: Tensor, step: int) -> float:
    value = float(loss.detach())
    if not math.isfinite(value):
        raise TrainingStopped(f"Training diverged at step {step}.", cure="Choose a lower learning rate.")
    return value


def _finished(curve: list[list[float]], schedule: Schedule) -> bool:
    looks = [entry[2] for entry in curve]
    return bool(looks) and len(looks) - 1 - looks.index(min(looks)) >= schedule.patience


@dataclass(frozen=True)
class DenoiserRecipe:
    """How a denoiser is trained."""

    steps: int = 2200
    """Optimizer steps."""
    batch: int = 32
    """Pictures per step."""
    learning_rate: float = 2e-3
    """AdamW's, after warm-up; it falls to 0 along a half cosine."""
    warmup: int = 50
    """Steps over which it rises from 0."""
    average: float = 0.99
    """Weight of the old value in the running average of the weights, which is what is kept."""
    empty: float = 0.1
    """Share of captions that are replaced by the empty one, for guidance."""
    value_penalty: float = 0.01
    """Weight of the mean size of cross-attention's values."""
    keep_every: int = 200
    """Steps between two checkpoints."""
    seed: int = 20240604


def fit_denoiser(
    pipeline: Any,
    batch_of: Callable[[int], tuple[Sequence[str], Tensor]],
    recipe: DenoiserRecipe,
    folder: Path,
    *,
    progress: Progress = QUIET,
    description: str = "train",
) -> dict[str, Any]:
    """Train a pipeline's U-Net; it ends with the running average of its weights."""
    network = pipeline.unet
    average = copy.deepcopy(network)
    pair = nn.ModuleDict({"network": network, "average": average})
    optimizer = torch.optim.AdamW(network.parameters(), lr=1.0, fused=True)
    texts = _Texts(pipeline)
    values = list(Select("**.attn2.to_v").modules(network).values())
    with (
        _job(folder, recipe, pair, optimizer) as (job, state, _),
        progress.task(description, recipe.steps, unit="steps") as task,
    ):
        task.update(state["step"])
        begun = time.process_time()
        while state["step"] < recipe.steps:
            step = state["step"]
            captions, pictures = batch_of(step)
            for group in optimizer.param_groups:
                group["lr"] = _rate(step, recipe, 0.0)
            loss = _loss(pipeline, texts, values, captions, pictures, recipe, step)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            _follow(average, network, recipe.average)
            state["losses"] += _finite(loss, step)
            state["step"] = step + 1
            task.update()
            if state["step"] % recipe.keep_every == 0 or state["step"] == recipe.steps:
                now = time.process_time()
                state["cpu_seconds"] += now - begun
                begun = now
                _note(state)
                _save(job, state, optimizer, model=pair.state_dict())
                task.describe(f"{description}, loss {state['curve'][-1][1]:.4f}")
    network.load_state_dict(average.state_dict())
    return {"curve": state["curve"], "cpu_seconds": round(state["cpu_seconds"], 1)}


class _Texts:
    """A frozen text encoder's states by caption, each worked out once."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._known: dict[str, Tensor] = {}

    def __call__(self, captions: Sequence[str]) -> Tensor:
        missing = [caption for caption in dict.fromkeys(captions) if caption not in self._known]
        if missing:
            with torch.no_grad():
                found = self._pipeline.encode_prompt(missing, "cpu", 1, False)[0]
            self._known |= dict(zip(missing, found, strict=True))
        return torch.stack([self._known[caption] for caption in captions])


def _loss(
    pipeline: Any,
    texts: _Texts,
    values: Sequence[nn.Module],
    captions: Sequence[str],
    pictures: Tensor,
    recipe: DenoiserRecipe,
    step: int,
) -> Tensor:
    """Squared error of the velocity, and the mean size of the values."""
    generator = torch_generator(recipe.seed, "noise", step)
    dropped = (torch.rand(len(captions), generator=generator) < recipe.empty).tolist()
    text = texts(["" if gone else caption for caption, gone in zip(captions, dropped, strict=True)])
    clean = pictures * 2 - 1
    noise = torch.randn(clean.shape, generator=generator)
    levels = pipeline.scheduler.config.num_train_timesteps
    timesteps = torch.randint(levels, (len(clean),), generator=generator)
    noisy = pipeline.scheduler.add_noise(clean, noise, timesteps)
    wanted = pipeline.scheduler.get_velocity(clean, noise, timesteps)
    error = nn.functional.mse_loss(pipeline.unet(noisy, timesteps, text).sample, wanted)
    if not recipe.value_penalty:
        return error
    size = torch.stack([value(text).abs().mean() for value in values]).mean()
    return error + recipe.value_penalty * size


@torch.no_grad()
def _follow(average: nn.Module, network: nn.Module, kept: float) -> None:
    torch._foreach_lerp_(list(average.parameters()), list(network.parameters()), 1 - kept)
