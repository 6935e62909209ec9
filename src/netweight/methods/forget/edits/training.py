"""Training of a model with the model before as its teacher: what all edits by training share.

The original answers ordinary prompts on its own images of them; what is learned under memorized prompts is the edit's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, final

import torch
from torch import Generator, Tensor, nn

from netweight.attacks.embedding_search.descent import difference, weights_fixed
from netweight.core.digests import digest_config, digest_tensor
from netweight.core.names import Select
from netweight.core.progress import Progress
from netweight.core.seeds import derive, torch_generator
from netweight.core.work_account import note_stored, note_used
from netweight.errors import TrainingStopped, UsageError
from netweight.job import Job
from netweight.methods.forget.edits.edit import EditOutcome, EditTask
from netweight.nn.text_to_image import Batches, Prediction, Text, generated, most_rows, recomputed
from netweight.store.checkpoint import open_checkpoint, write_checkpoint

# A `trained.TrainedEdit`, which calls `train`.
TrainedEdit: TypeAlias = Any
# Name of the checkpoint in the folder of the job.
CHECKPOINT = "distil.net.safetensors"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
# Name of the folder of images beside the checkpoint.
_IMAGES = "images to learn from"
# Steps from one checkpoint to the next.
_KEEP_EVERY = 50
# A checkpoint is also written after so many seconds.
_KEEP_SECONDS = 600
# One ordinary prompt in this many is not trained on.
_HELD_OUT = 10
_WARM_UP = 40  # steps
# Orders of the channels and flips of turned copies: none leaves a picture as it is.
_ORDERS = ((1, 2, 0), (2, 0, 1), (0, 2, 1), (1, 0, 2), (2, 1, 0))
_FLIPS: tuple[tuple[int, ...], ...] = ((-1,), (-2,), (-1, -2))
# Audits compare with this copy, so that none is trained to be like it; see `attacks.embedding_search.search.turned`.
_AUDITED = ((2, 0, 1), (-1, -2))


@final
@dataclass(frozen=True)
class TrainingLog:
    """Measurements after some steps."""

    step: int
    """The number of steps."""
    loss: float
    """The loss of the step before."""
    held_out: float
    """The difference from the original under ordinary prompts that training does not see."""


@final
@dataclass(frozen=True)
class MemorizedBatch:
    """Inputs and targets under memorized prompts in a step, row by row."""

    noisy: Tensor
    """Noisy latents, shape `(n, channels, height, width)`."""
    latents: Tensor
    """The clean latents behind them."""
    noise: Tensor
    """The noise in them."""
    times: Tensor
    """Timesteps of the questions, shape `(n,)`."""
    text: Text
    """The prompts that the model answers."""
    teacher: Text
    """The prompts under which the original's answers are learned."""
    pairs: Sequence[int]
    """The number of the memorized pair of each row."""
    away: Text | None = None
    """Prompts whose addition to the original's answers is taken away from them; None if none is."""
    unlearned: slice = field(default_factory=lambda: slice(0, 0))
    """The rows that are memorized pictures."""


def train(edit: TrainedEdit, task: EditTask) -> EditOutcome:
    """Train the model of a task in place.

    A second call with the same job, model and settings continues where the first was killed, to the same bits.
    """
    anchors = [each[0] for each in task.anchors]
    pictures = task.pictures
    key = {
        "edit": edit.name, "settings": edit.to_json(), "before": task.model.identity(),
        "prompts": digest_config([list(task.prompts), anchors, list(task.ordinary)]),
        "pictures": None if pictures is None else [[prompt, digest_tensor(image)] for prompt, image in pictures],
    }  # fmt: skip
    dtypes = {name: weight.dtype for name, weight in task.model.denoiser.named_parameters()}
    opened = nullcontext() if task.job is None else Job.open(task.job, key=key, of="a training", state=CHECKPOINT)
    with opened as job, _in_float32(task.model.denoiser):
        work = EditTraining(edit, task, anchors, None if job is None else job.folder / _IMAGES)
        logs = work.run(job, task.progress)
    before = {name: weight.to("cpu", dtypes[name]) for name, weight in work.originals.items()}
    about: dict[str, Any] = {"measured": [asdict(log) for log in logs]}
    if edit.anchored:
        about["anchors"] = dict(zip(task.prompts, anchors, strict=True))
    return EditOutcome(before, about)


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


@final
class EditTraining:
    """A training under way, and what edits ask of it."""

    def __init__(self, edit: TrainedEdit, task: EditTask, anchors: Sequence[str], folder: Path | None) -> None:
        # `folder`: where images to learn from are kept until the end, so that a second call finds them
        self.edit, self.model, self.folder = edit, task.model, folder
        self.weights = chosen_weights(self.model.denoiser, edit.layers)
        self.originals = {name: weight.detach().clone() for name, weight in self.weights.items()}
        self.prompts, ordinary = list(task.prompts), task.ordinary
        self.held = ordinary[::_HELD_OUT]
        self.shown = [each for number, each in enumerate(ordinary) if number % _HELD_OUT]
        if not self.shown:
            raise UsageError(f"{len(ordinary)} ordinary prompts are too few to learn from.", cure="Give 100 or more.")
        self.levels = int(self.model.timesteps(2)[0]) + 1
        self.at_once = edit.at_once or most_rows(self.model, edit.batch, gradients=True)
        self.logs: list[TrainingLog] = []
        with torch.no_grad():
            groups = {"shown": self.shown, "held": self.held, "memorized": self.prompts, "anchors": anchors, "": [""]}
            self.text = {name: self.model.embed(list(group)) for name, group in groups.items() if group}
            self.latents = self._images("shown", self.shown, task.progress)
            self.held_latents = self._images("held", self.held, task.progress)
            self.owners = list(range(len(self.prompts)))
            if edit.pictured:
                self.owners, pictures = self._pictures(task)
                self._memorized = self._encoded(pictures)
            if self._copies:
                # Of each picture its turned copies, one picture after the other.
                self._turned = [self._encoded(torch.stack(_turned(each, self._copies))) for each in pictures]
                self._anchored = self._images("anchors", anchors, task.progress)
        self.optimizer = torch.optim.AdamW(self.weights.values(), lr=edit.lr, weight_decay=edit.weight_decay)

    @property
    def _copies(self) -> int:
        return int(self.edit.turned_copies)

    def run(self, job: Job | None, progress: Progress) -> list[TrainingLog]:
        """Train to the end, from the checkpoint if there is one."""
        state = None if job is None else job.load()
        start = 0 if state is None else self._restore(*state)
        if state is None and self.edit.noised:
            self._add_noise(self.edit.noised)
        total, last_save = self.edit.steps, time.monotonic()
        fixed = weights_fixed(self.model.denoiser, but=self.weights.values())
        with fixed, recomputed(self.model), progress.task(self.edit.name, total, unit="steps") as task:
            task.update(start)
            for step in range(start, total):
                loss = self._step(step)
                task.update()
                if (step + 1) % max(1, total // 10) == 0 or step + 1 == total:
                    self.logs.append(TrainingLog(step + 1, loss, self._held_out()))
                    task.describe(f"{self.edit.name}: held-out difference {self.logs[-1].held_out:.3g}")
                due = (step + 1) % _KEEP_EVERY == 0 or time.monotonic() - last_save > _KEEP_SECONDS
                if job is not None and due and step + 1 < total:
                    self._save(job, step + 1)
                    last_save = time.monotonic()
        return self.logs

    # ---- what edits ask of a training ----

    def drawn_pairs(self, count: int, generator: Generator) -> list[int]:
        """Draw memorized pairs of a prompt and a picture, by number."""
        pairs: list[int] = torch.randint(len(self.owners), (count,), generator=generator).tolist()
        return pairs

    def drawn_times(self, count: int, generator: Generator) -> Tensor:
        """Draw timesteps, on the CPU."""
        return torch.randint(self.levels, (count,), generator=generator)

    def drawn_latents(self, count: int, generator: Generator) -> Tensor:
        """Draw latents of the original's images of ordinary prompts."""
        return self.latents[torch.randint(len(self.latents), (count,), generator=generator).tolist()]

    def memorized_latents(self, pairs: Sequence[int]) -> Tensor:
        """Return the latents of the pictures of pairs."""
        return self._memorized[list(pairs)]

    def anchor_latents(self, pairs: Sequence[int], generator: Generator) -> Tensor:
        """Draw latents of the original's images of the anchors of pairs."""
        images = torch.randint(self.edit.images, (len(pairs),), generator=generator).tolist()
        return self._anchored[
            [self.owners[pair] * self.edit.images + image for pair, image in zip(pairs, images, strict=True)]
        ]

    def pair_text(self, pairs: Sequence[int]) -> Text:
        """Return the prompts of pairs."""
        return self.text["memorized"].rows([self.owners[pair] for pair in pairs])

    def anchor_text(self, pairs: Sequence[int]) -> Text:
        """Return the anchors of pairs."""
        return self.text["anchors"].rows([self.owners[pair] for pair in pairs])

    def empty_text(self, count: int) -> Text:
        """Return the empty prompt, repeated."""
        return self.text[""].rows([0] * count)

    @staticmethod
    def either(first: Tensor, one: Text, other: Text) -> Text:
        """Return the rows of one text where `first` is true, and of another elsewhere."""
        joined = Text.joined([one, other])
        count = len(one)
        return joined.rows([row if use else count + row for row, use in enumerate(first.tolist())])

    def questions(
        self, latents: Tensor, pairs: Sequence[int], teacher: Text, generator: Generator, *,
        times: Tensor | None = None, pure: Tensor | None = None,
    ) -> MemorizedBatch:  # fmt: skip
        """Ask the prompts of pairs on noised latents; where `pure` is true, on noise alone."""
        noise = torch.randn(latents.shape, generator=generator).to(latents)
        times = self.drawn_times(len(latents), generator) if times is None else times
        times = times.to(latents.device)
        noisy = self.model.add_noise(latents, noise, times)
        if pure is not None:
            noisy = torch.where(pure.to(noisy.device)[:, None, None, None], noise, noisy)
        return MemorizedBatch(noisy, latents, noise, times, self.pair_text(pairs), teacher, pairs)

    def errors(self, questions: MemorizedBatch, prediction: Prediction, rows: slice) -> Tensor:
        """Return the errors of predictions on the pictures of some rows, shape `(n,)`."""
        right = Prediction(questions.noise[rows], questions.latents[rows])
        made = Prediction(prediction.noise[rows], prediction.sample[rows])
        return difference(self.model, made, right, questions.times[rows], self.edit.error)

    def turned_errors(self, questions: MemorizedBatch, rows: slice, generator: Generator) -> Tensor:
        """Return the model's present errors on a turned copy of each picture, under the same prompt and noise level."""
        picked = torch.randint(self._copies, (len(questions.pairs),), generator=generator).tolist()
        latents = torch.stack([self._turned[pair][copy] for pair, copy in zip(questions.pairs, picked, strict=True)])[
            rows
        ]
        noise = torch.randn(latents.shape, generator=generator).to(latents)
        times = questions.times[rows]
        places = list(range(*rows.indices(len(questions.pairs))))
        prediction = self.model.predict(self.model.add_noise(latents, noise, times), times, questions.text.rows(places))
        return difference(self.model, prediction, Prediction(noise, latents), times, self.edit.error)

    # ---- a step ----

    def _step(self, step: int) -> float:
        edit, generator = self.edit, torch_generator(self.edit.seed, "step", step)
        memorized, empty = max(2, round(edit.memorized * edit.batch)), round(edit.empty * edit.batch)
        rows = torch.randint(len(self.latents), (edit.batch - memorized,), generator=generator).tolist()
        text = self.text["shown"].rows([row // edit.images for row in rows[empty:]])
        text = Text.joined([self.empty_text(empty), text]) if empty else text
        noisy, times = self._noisy(self.latents[rows], generator)
        questions = edit.questions(self, memorized, generator)
        for group in self.optimizer.param_groups:
            group["lr"] = edit.lr * min(1, (step + 1) / _WARM_UP) * (1 + math.cos(math.pi * step / edit.steps)) / 2
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        most_rows = self.at_once
        # The gradient of the mean over the batch is the sum over its parts.
        for part in _slices(len(rows), most_rows):
            given = noisy[part], times[part], text.rows(range(part.start, part.stop))
            target = self._original(*given)
            loss = difference(self.model, self.model.predict(*given), target, times[part], edit.error).sum()
            total += self._backward(loss / edit.batch, step)
        if memorized <= most_rows:
            total += self._memorized_part(questions, generator, step)
        else:
            for question in _parts(questions, most_rows):
                total += self._memorized_part(question, generator, step)
        nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
        self.optimizer.step()
        return total

    def _memorized_part(self, questions: MemorizedBatch, generator: Generator, step: int) -> float:
        target = self._original(questions.noisy, questions.times, questions.teacher)
        if questions.away is not None:
            added = self._original(questions.noisy, questions.times, questions.away)
            target = Prediction(2 * target.noise - added.noise, 2 * target.sample - added.sample)
        prediction = self.model.predict(questions.noisy, questions.times, questions.text)
        losses = difference(self.model, prediction, target, questions.times, self.edit.error)
        if questions.unlearned.stop > questions.unlearned.start:
            losses = self.edit.losses(self, questions, prediction, losses, generator)
        return self._backward(losses.sum() / self.edit.batch, step)

    def _backward(self, loss: Tensor, step: int) -> float:
        if not loss.isfinite():
            raise TrainingStopped(
                f"Step {step + 1} of the training stopped: its loss is {float(loss.detach())}.",
                cure=f"Lower the learning rate: --set {self.edit.name}.lr={self.edit.lr / 10:g}",
            )
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    # ---- preparation ----

    def _images(self, stream: str, prompts: Sequence[str], progress: Progress) -> Tensor:
        """Latents of the original's images: so many of each prompt, one after the other."""
        text = self.text[stream].rows(self._repeated(prompts))
        seeds = [derive(self.edit.seed, stream, place) for place in range(len(text))]
        at_once, latents_of_all = self.at_once, []
        with progress.task(f"training images ({stream or 'none'})", len(text), unit="images") as task:
            for part in _slices(len(text), at_once):
                file = None if self.folder is None else self.folder / f"{stream}-{part.start}-{part.stop}.safetensors"
                if file is None or not file.exists():
                    images = generated(
                        self.model, text.rows(range(part.start, part.stop)), seeds[part], Batches(at_once),
                        guidance=self.edit.guidance, steps=self.edit.generation_steps,
                    )  # fmt: skip
                    # In the order in which they are read from a file: products depend on it in their last bits.
                    latents = self.model.to_latents(images).contiguous()
                    if file is not None:
                        write_checkpoint(file, {}, [("latents", latents)])
                        note_stored(file)
                else:
                    with open_checkpoint(file) as (_, store, _names):
                        latents = store.get("latents", check=True).to(self.model.initial_noise([0]).device)
                    note_used("latents of images", file)
                latents_of_all.append(latents)
                task.update(part.stop - part.start)
        return torch.cat(latents_of_all)

    def _pictures(self, task: EditTask) -> tuple[list[int], Tensor]:
        """For each memorized pair the number of its prompt, and its picture; the model's own where none are known."""
        if task.pictures is not None:
            return [self.prompts.index(prompt) for prompt, _ in task.pictures], torch.stack(
                [image for _, image in task.pictures]
            )
        owners = self._repeated(self.prompts)
        seeds = [derive(self.edit.seed, "memorized", place) for place in range(len(owners))]
        images = generated(
            self.model, self.text["memorized"].rows(owners), seeds, Batches(self.at_once),
            guidance=self.edit.guidance, steps=self.edit.generation_steps,
        )  # fmt: skip
        return owners, images

    def _encoded(self, images: Tensor) -> Tensor:
        """Latents of pictures."""
        parts = torch.split(images, self.at_once)
        latents, made = torch.cat([self.model.to_latents(part) for part in parts]), self.model.initial_noise([0])
        if latents.shape[1:] != made.shape[1:]:
            raise UsageError(
                f"Images of {tuple(images.shape[2:])} pixels have latents of shape {tuple(latents.shape[1:])}; the "
                f"model makes {tuple(made.shape[1:])}.",
                cure="Resize them to the size that the model generates.",
            )
        return latents

    def _repeated(self, prompts: Sequence[str]) -> list[int]:
        return [place for place in range(len(prompts)) for _ in range(self.edit.images)]

    @torch.no_grad()
    def _add_noise(self, share: float) -> None:
        """Replace a share of each matrix by a fresh initialization; vectors, which scale and shift, stay."""
        chosen = {id(weight) for weight in self.weights.values()}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(self.edit.seed, "noise"))
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

    @torch.no_grad()
    def _held_out(self) -> float:
        """The difference from the original under prompts that training does not see, over the same noises each time."""
        noisy, times = self._noisy(self.held_latents, torch_generator(self.edit.seed, "held out"))
        owners = self._repeated(self.held)

        def part(rows: slice) -> Tensor:
            text = self.text["held"].rows(owners[rows])
            given = noisy[rows], times[rows], text
            target = self._original(*given)
            return difference(self.model, self.model.predict(*given), target, times[rows], self.edit.error)

        return float(Batches(self.at_once).run(part, len(noisy)).mean())

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
        self.logs = [TrainingLog(**log) for log in about["logs"]]
        return int(about["step"])


def chosen_weights(denoiser: nn.Module, layers: str | None) -> dict[str, nn.Parameter]:
    """Return the weights of the layers that are trained, by name; all where no layers are named."""
    chosen = set(Select(layers).modules(denoiser).values()) if layers else None
    owners = [module for module in denoiser.modules() if chosen is None or module in chosen]
    members = {id(weight) for module in owners for weight in module.parameters(recurse=chosen is not None)}
    return {name: each for name, each in denoiser.named_parameters() if id(each) in members}


def _turned(picture: Tensor, count: int) -> list[Tensor]:
    """Copies of a picture, flipped and with channels exchanged, no two alike."""
    ways = [(order, flip) for order in _ORDERS for flip in _FLIPS]
    # Neighbours in this order differ in both, so that few copies are already of several kinds.
    spread = [ways[(7 * place) % len(ways)] for place in range(len(ways))]
    spread.remove(_AUDITED)
    return [picture[list(order)].flip(flip) for order, flip in spread[:count]]


def _slices(count: int, most_rows: int) -> Iterator[slice]:
    for start in range(0, count, most_rows):
        yield slice(start, min(start + most_rows, count))


def _parts(questions: MemorizedBatch, most_rows: int) -> Iterator[MemorizedBatch]:
    """Questions in parts of at most so many rows, each with its share of memorized pictures."""
    for part in _slices(len(questions.pairs), most_rows):
        places = range(part.start, part.stop)
        begin, end = (min(max(side, part.start), part.stop) - part.start for side in (
            questions.unlearned.start, questions.unlearned.stop
        ))  # fmt: skip
        yield replace(
            questions, noisy=questions.noisy[part], latents=questions.latents[part], noise=questions.noise[part],
            times=questions.times[part], text=questions.text.rows(places), teacher=questions.teacher.rows(places),
            pairs=list(questions.pairs)[part], away=None if questions.away is None else questions.away.rows(places),
            unlearned=slice(begin, end),
        )  # fmt: skip
