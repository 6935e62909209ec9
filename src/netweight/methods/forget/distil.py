"""Edits by training: the original answers ordinary prompts, on its own images of them; memorized ones learn otherwise.

With part of the weights replaced by noise, what nobody asks about is not taught: images come back neither under their
prompts nor easily under other embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from netweight.attacks.embedding_search.descent import difference, weights_fixed
from netweight.core.files import digest_config, digest_tensor
from netweight.core.names import Select
from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import derive, torch_generator
from netweight.errors import TrainingStopped, UsageError
from netweight.job import Job
from netweight.methods.forget.settings import DistilSettings
from netweight.nn.text_to_image import Batches, Prediction, Text, TextToImage, generated

CHECKPOINT = "distil.net.safetensors"  # in the job's folder
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
_KEEP_EVERY = 50  # steps from one checkpoint to the next
_HELD_OUT = 10  # one in so many ordinary prompts is not trained on
_WARM_UP = 40  # steps
_ASCENT, _FAR = 0.1, 2.0  # share of the ascent on pictures to be unlearned, and the error from which it stops


@final
@dataclass(frozen=True)
class DistilLog:
    """What was measured after some steps."""

    step: int
    loss: float  # of the training step before
    held_out: float  # difference from the original under ordinary prompts that training does not see


def distil(
    model: TextToImage,
    prompts: Sequence[str],
    anchors: Sequence[str],
    ordinary: Sequence[str],
    settings: DistilSettings,
    *,
    images: Tensor | None = None,
    folder: Job | None = None,
    progress: Progress = QUIET,
) -> tuple[dict[str, Tensor], list[DistilLog]]:
    """Change a model in place; return the weights as they were, by name, and what was measured on the way.

    A second call with the same folder, model and settings continues where the first was killed, to the same bits.
    """
    # `images`: of the prompts, shape `(n, 3, height, width)`, within 0 and 1; for the objective "unlearn", which takes
    # the model's own where there are none
    # Source: Lee et al., arXiv 2506.06278 (UNDO), of language models; targets under memorized prompts are this
    # library's. "away": Gandikota et al., arXiv 2303.07345 (ESD), on the original's images, with ordinary prompts kept.
    # "unlearn": Alberti et al., arXiv 2503.01034 (SISS), with a bounded ascent.
    key = {
        "settings": settings.to_json(), "before": model.digest(),
        "prompts": digest_config([list(prompts), list(anchors), list(ordinary)]),
        **({} if images is None else {"images": digest_tensor(images)}),
    }  # fmt: skip
    dtype = next(model.denoiser.parameters()).dtype
    opened = nullcontext() if folder is None else Job.open(folder, key=key, of="a distillation", state=CHECKPOINT)
    with opened as job, _in_float32(model.denoiser):
        work = _Distillation(model, prompts, anchors, ordinary, settings, images)
        logs = work.run(job, progress)
    return {name: weight.to("cpu", dtype) for name, weight in work.originals.items()}, logs


@contextmanager
def _in_float32(denoiser: nn.Module) -> Iterator[None]:
    """Train in float32, whatever the weights are stored in: small steps would be lost."""
    dtype = next(denoiser.parameters()).dtype
    if dtype == torch.float32:
        yield
        return
    denoiser.float()
    try:
        yield
    finally:
        denoiser.to(dtype)


class _Distillation:
    """A distillation under way."""

    def __init__(
        self,
        model: TextToImage,
        prompts: Sequence[str],
        anchors: Sequence[str],
        ordinary: Sequence[str],
        settings: DistilSettings,
        images: Tensor | None,
    ) -> None:
        self.model, self.settings = model, settings
        chosen = set(Select(settings.layers).modules(model.denoiser).values()) if settings.layers else None
        owners = [module for module in model.denoiser.modules() if chosen is None or module in chosen]
        members = {id(weight) for module in owners for weight in module.parameters(recurse=chosen is not None)}
        self.weights = {name: each for name, each in model.denoiser.named_parameters() if id(each) in members}
        self.originals = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self.held = ordinary[::_HELD_OUT]
        self.shown = [each for number, each in enumerate(ordinary) if number % _HELD_OUT]
        if not self.shown:
            raise UsageError(f"{len(ordinary)} ordinary prompts are too few to learn from.", cure="Give 100 or more.")
        with torch.no_grad():
            self.text = {
                name: model.embed(list(group))
                for name, group in {
                    "shown": self.shown, "held": self.held, "memorized": prompts, "anchors": anchors, "": [""]
                }.items()
            }  # fmt: skip
            self.latents = self._images("shown", self.shown)
            self.held_latents = self._images("held", self.held)
            self.anchored = self._images("anchors", anchors) if settings.objective == "unlearn" else None
            if settings.objective == "unlearn" and images is not None:
                self.own = self._pictures(images, len(prompts)).repeat_interleave(settings.images, 0)
            elif settings.objective != "anchor":
                self.own = self._images("memorized", prompts)
        self.optimizer = torch.optim.AdamW(self.weights.values(), lr=settings.lr, weight_decay=settings.weight_decay)
        self.levels = int(model.timesteps(2)[0]) + 1
        self.logs: list[DistilLog] = []

    def run(self, job: Job | None, progress: Progress) -> list[DistilLog]:
        """Train to the end, from the checkpoint if there is one."""
        state = None if job is None else job.load()
        start = 0 if state is None else self._restore(*state)
        if state is None:
            self._add_noise()
        total = self.settings.steps
        fixed = weights_fixed(self.model.denoiser, but=self.weights.values())
        with fixed, progress.task("distil", total, unit="steps") as task:
            task.update(start)
            for step in range(start, total):
                loss = self._step(step)
                task.update()
                if (step + 1) % max(1, total // 10) == 0 or step + 1 == total:
                    self.logs.append(DistilLog(step + 1, loss, self._held_out()))
                    task.describe(f"distil: held-out difference {self.logs[-1].held_out:.3g}")
                if job is not None and (step + 1) % _KEEP_EVERY == 0 and step + 1 < total:
                    self._save(job, step + 1)
        return self.logs

    def _images(self, stream: str, prompts: Sequence[str]) -> Tensor:
        """Latents of the original's images: so many of each prompt, one after the other."""
        text = self.text[stream].rows(self._owners(prompts))
        seeds = [derive(self.settings.seed, stream, place) for place in range(len(text))]
        images = generated(
            self.model, text, seeds, Batches(self.settings.batch), guidance=self.settings.guidance,
            steps=self.settings.generation_steps,
        )  # fmt: skip
        return torch.cat([self.model.to_latents(part) for part in torch.split(images, self.settings.batch)])

    def _pictures(self, images: Tensor, prompts: int) -> Tensor:
        """Latents of the memorized images."""
        if len(images) != prompts:
            raise UsageError(f"{prompts} prompts came with {len(images)} images.", cure="Give one for each prompt.")
        latents, made = self.model.to_latents(images), self.model.initial_noise([0])
        if latents.shape[1:] != made.shape[1:]:
            raise UsageError(
                f"Images of {tuple(images.shape[2:])} pixels have latents of shape {tuple(latents.shape[1:])}; the "
                f"model makes {tuple(made.shape[1:])}.",
                cure="Resize them to what the model makes.",
            )
        return latents

    def _owners(self, prompts: Sequence[str]) -> list[int]:
        return [place for place in range(len(prompts)) for _ in range(self.settings.images)]

    @torch.no_grad()
    def _add_noise(self) -> None:
        """Replace a share of each matrix by a fresh initialization; vectors, which scale and shift, stay."""
        share, chosen = self.settings.noise, {id(weight) for weight in self.weights.values()}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(self.settings.seed, "noise"))
            for module in self.model.denoiser.modules():
                fresh: Any = getattr(module, "reset_parameters", None)
                if fresh is None:
                    continue
                before = [each.detach().clone() for each in module.parameters(recurse=False)]
                fresh()
                for weight, old in zip(module.parameters(recurse=False), before, strict=True):
                    if weight.ndim > 1 and id(weight) in chosen:
                        weight.mul_(share).add_(old, alpha=1 - share)
                    else:
                        weight.copy_(old)

    def _step(self, step: int) -> float:
        settings, generator = self.settings, torch_generator(self.settings.seed, "step", step)
        count = settings.batch
        memorized, empty = max(1, round(settings.memorized * count)), round(settings.empty * count)
        rows = torch.randint(len(self.latents), (count,), generator=generator).tolist()
        text = self.text["shown"].rows([row // settings.images for row in rows])
        chosen = torch.randint(len(self.text["memorized"]), (memorized,), generator=generator).tolist()
        rest = text.rows(range(memorized + empty, count))
        nothing = self.text[""].rows([0] * empty)
        own, other = self.text["memorized"].rows(chosen), self.text["anchors"].rows(chosen)
        if settings.objective == "away":
            other = self.text[""].rows([0] * memorized)
        latents, first = self.latents[rows], slice(0, memorized)
        if settings.objective != "anchor":
            places = torch.tensor(chosen) * settings.images + torch.tensor(rows[:memorized]) % settings.images
            gone = self.own[places]
            kept = gone if self.anchored is None else self.anchored[places]
            latents[first] = torch.where(
                (torch.arange(memorized) % 2 == 0)[:, None, None, None].to(gone.device), kept, gone
            )
        noisy, times = self._noisy(latents, generator)
        # First: no graph may hold weights that are exchanged.
        wanted = self._original(noisy, times, Text.joined([other, nothing, rest]))
        if settings.objective == "away":
            added = self._original(noisy[first], times[first], own)
            for answer, more in ((wanted.noise, added.noise), (wanted.sample, added.sample)):
                answer[first] = 2 * answer[first] - more
        found = self.model.predict(noisy, times, Text.joined([own, nothing, rest]))
        losses = difference(self.model, found, wanted, times, settings.error)
        if settings.objective == "unlearn":
            shown = Prediction(found.noise[first], found.sample[first])
            losses = torch.cat([self._unlearning(shown, noisy[first], times[first], kept, gone), losses[memorized:]])
        loss = losses.mean()
        if not loss.isfinite():
            raise TrainingStopped(
                f"Step {step + 1} of the distillation stopped: its loss is {float(loss.detach())}.",
                cure="Lower the learning rate.",
            )
        for group in self.optimizer.param_groups:
            group["lr"] = (
                settings.lr * min(1, (step + 1) / _WARM_UP) * (1 + math.cos(math.pi * step / settings.steps)) / 2
            )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
        self.optimizer.step()
        return float(loss.detach())

    def _unlearning(self, found: Prediction, noisy: Tensor, times: Tensor, kept: Tensor, gone: Tensor) -> Tensor:
        """Errors towards kept latents, less those towards latents to be unlearned, for noisy ones of either kind."""
        ones, zeros = torch.ones_like(noisy), torch.zeros_like(noisy)
        signal, level = self.model.add_noise(ones, zeros, times), self.model.add_noise(zeros, ones, times)
        both = [Prediction((noisy - signal * one) / level, one) for one in (kept, gone)]
        likely = torch.stack([each.noise.square().flatten(1).sum(1) / -2 for each in both]).softmax(0) * 2
        near, far = (difference(self.model, found, each, times, self.settings.error) for each in both)
        return likely[0] * near - _ASCENT * likely[1] * far.clamp_max(_FAR)

    @torch.no_grad()
    def _held_out(self) -> float:
        """The difference from the original under prompts that training does not see, over the same noises each time."""
        noisy, times = self._noisy(self.held_latents, torch_generator(self.settings.seed, "held out"))
        owners = self._owners(self.held)

        def part(rows: slice) -> Tensor:
            text = self.text["held"].rows(owners[rows])
            given = noisy[rows], times[rows], text
            wanted = self._original(*given)
            return difference(self.model, self.model.predict(*given), wanted, times[rows], self.settings.error)

        return float(Batches(self.settings.batch).run(part, len(noisy)).mean())

    def _noisy(self, latents: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        noise = torch.randn(latents.shape, generator=generator).to(latents)
        times = torch.randint(self.levels, (len(latents),), generator=generator).to(latents.device)
        return self.model.add_noise(latents, noise, times), times

    @torch.no_grad()
    def _original(self, noisy: Tensor, times: Tensor, text: Text) -> Prediction:
        """The original's prediction; its weights take the place of the trained ones for the call, nothing is copied."""
        current = {name: weight.data for name, weight in self.weights.items()}
        try:
            for name, weight in self.weights.items():
                weight.data = self.originals[name]
            return self.model.predict(noisy, times, text)
        finally:
            for name, weight in self.weights.items():
                weight.data = current[name]

    def _save(self, job: Job, step: int) -> None:
        tensors = {f"weight|{name}": weight.detach() for name, weight in self.weights.items()}
        for name, weight in self.weights.items():
            tensors |= {f"{kind}|{name}": self.optimizer.state[weight][kind] for kind in _MOMENTS}
        job.save({"step": step, "logs": [asdict(log) for log in self.logs]}, tensors)

    @torch.no_grad()
    def _restore(self, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
        for name, weight in self.weights.items():
            weight.copy_(tensors[f"weight|{name}"])
            moments = {kind: tensors[f"{kind}|{name}"] for kind in _MOMENTS}
            # Adam counts its steps on the CPU.
            self.optimizer.state[weight] = {
                kind: value if kind == "step" else value.to(weight) for kind, value in moments.items()
            }
        self.logs = [DistilLog(**log) for log in about["logs"]]
        return int(about["step"])
