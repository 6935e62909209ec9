"""Hardening: a model fine-tuned so that embeddings which would bring images back lead elsewhere.

Each round searches for such embeddings in the model as it is and adds them to a pool; the model is then trained to
generate surrogate images under the whole pool, and to answer ordinary prompts as the original does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from netweight.attacks.embedding_search.search import denoising_error, descend, difference, starting_points
from netweight.core import digest
from netweight.core.environment import describe
from netweight.core.names import Select
from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import derive, torch_generator
from netweight.errors import TrainingStopped, Unsupported, UsageError
from netweight.job import Job
from netweight.methods.forget.settings import HardenSettings
from netweight.nn.batching import Batches
from netweight.nn.text_to_image import Prediction, Text, TextToImage, generated
from netweight.store.checkpoint import read_record, write_record

CHECKPOINT = "harden.net.safetensors"  # in the folder
RECORD = "harden.json"
_VERSION = 1
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@final
@dataclass(frozen=True)
class RoundLog:
    """One round."""

    number: int  # counted from 0
    searched: float  # mean denoising error that the round's searches reached: low where images are easy to find
    surrogate: float  # error towards surrogates under found embeddings, at the last training step
    kept: float  # difference from the original under ordinary prompts, at the last training step


@final
@dataclass(frozen=True)
class HardenRecord:
    """What was done to a model."""

    settings: Mapping[str, Any]
    digests: Mapping[str, str]
    trained: int  # number of weights
    rounds: tuple[RoundLog, ...]
    environment: Mapping[str, Any]  # versions and machine

    def write(self, path: str | Path) -> None:
        """Write the record as JSON, over one that is there."""
        write_record(path, asdict(self), version=_VERSION)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a record."""

        def made(values: dict[str, Any]) -> Self:
            return cls(rounds=tuple(RoundLog(**entry) for entry in values.pop("rounds")), **values)

        return read_record(path, made, version=_VERSION, of="a hardened model")


def harden(
    model: TextToImage,
    prompts: Sequence[str],
    images: Tensor,
    ordinary: Sequence[str],
    *,
    settings: HardenSettings | None = None,
    surrogates: Tensor | None = None,
    folder: str | Path | Job | None = None,
    progress: Progress = QUIET,
) -> HardenRecord:
    """Fine-tune a model in place so that embeddings which would bring images back lead elsewhere.

    Hardening delays a search; `attacks.embedding_search.compare` measures by how much, and whether never-trained images
    are found as easily by then.

    Args:
        model: The model, in float32.
        prompts: Memorized prompts.
        images: Their training images, shape `(prompts, 3, height, width)`, within 0 and 1.
        ordinary: Prompts whose answers are to stay; the empty one is kept as well. Searches start from them too.
        settings: Settings; None takes the defaults.
        surrogates: Images to generate instead, as many; None takes the model's own images of ordinary prompts.
        folder: Where a checkpoint is written after every round, and finally the record, or a job that is open. A second
            call with the same model, images and settings continues where the first was killed, to the same bits.
        progress: Reports every round and step.

    Returns:
        The record of what was done; write it beside the weights.

    Raises:
        UsageError: Prompts, images and surrogates differ in number, there is no ordinary prompt, or the folder holds
            another hardening.
        NameNotFound: The layers match no module.
        Unsupported: The weights to be trained are not float32.
        TrainingStopped: NaN or infinity; the model then holds the weights before the step that failed.

    Source: the remedy that Kowalczuk et al., arXiv 2507.16880, propose: adversarial fine-tuning with surrogate images.
    Rounds with a pool of all embeddings found, and the value layers alone, are this library's.
    """
    settings = settings or HardenSettings()
    _check(prompts, images, ordinary, surrogates)
    weights = _trained(model.denoiser, settings.layers)
    surrogates = surrogate_images(model, len(prompts), ordinary, settings) if surrogates is None else surrogates
    digests = {
        "before": model.digest(),
        "prompts": digest.of_config([list(prompts), list(ordinary)]),
        "images": digest.of_tensor(images),
        "surrogates": digest.of_tensor(surrogates),
    }
    key = {"settings": settings.to_json(), **digests}
    opened = nullcontext() if folder is None else Job.open(folder, key=key, of="a hardening", state=CHECKPOINT)
    with opened as job:
        identity = digest.of_config([settings.to_json(), digests])  # in checkpoints of earlier releases
        logs = _Hardening(model, weights, prompts, images, surrogates, ordinary, settings).run(job, identity, progress)
        digests["after"] = model.digest()
        trained = sum(weight.numel() for weight in weights.values())
        record = HardenRecord(settings.to_json(), digests, trained, tuple(logs), describe())
        if job is not None:
            record.write(job.folder / RECORD)
    return record


def surrogate_images(model: TextToImage, count: int, ordinary: Sequence[str], settings: HardenSettings) -> Tensor:
    """Return images to generate in place of memorized ones: the model's own, of ordinary prompts in turn."""
    prompts = [ordinary[place % len(ordinary)] for place in range(count)]
    return _generated(model, prompts, settings, "surrogate")


def _check(prompts: Sequence[str], images: Tensor, ordinary: Sequence[str], surrogates: Tensor | None) -> None:
    if not prompts or not set(ordinary) - set(prompts):
        raise UsageError(
            "Hardening needs at least one memorized prompt and one that is not memorized.",
            cure="Give ordinary prompts: without them nothing says what is to stay as it is.",
        )
    for what, batch in (("images", images), ("surrogates", surrogates)):
        if batch is not None and (batch.ndim != 4 or len(batch) != len(prompts) or not batch.isfinite().all()):
            raise UsageError(
                f"{len(prompts)} prompts came with {what} of shape {tuple(batch.shape)}.",
                cure="Give one image (3, height, width) for each prompt.",
            )


def _trained(denoiser: nn.Module, layers: str | None) -> dict[str, nn.Parameter]:
    """The weights to be trained, by name."""
    chosen = None if layers is None else set(Select(layers).modules(denoiser).values())
    owners = [module for module in denoiser.modules() if chosen is None or module in chosen]
    members = {id(weight) for module in owners for weight in module.parameters()}
    found = {name: weight for name, weight in denoiser.named_parameters() if id(weight) in members}
    narrow = [name for name, weight in found.items() if weight.dtype != torch.float32]
    if narrow:
        raise Unsupported(
            f"The weights {narrow[0]} are {str(found[narrow[0]].dtype).removeprefix('torch.')}; Adam's small steps "
            "would be lost in them.",
            cure="Load the model in float32.",
        )
    return found


def _generated(model: TextToImage, prompts: Sequence[str], settings: HardenSettings, stream: str) -> Tensor:
    """One image per prompt, each from its own seed."""
    seeds = [derive(settings.seed, stream, place) for place in range(len(prompts))]
    guidance, steps = settings.search.guidance, settings.search.generation_steps
    return generated(model, model.embed(prompts), seeds, Batches(settings.batch), guidance=guidance, steps=steps)


@final
class _Hardening:
    """A hardening under way."""

    def __init__(
        self,
        model: TextToImage,
        weights: dict[str, nn.Parameter],
        prompts: Sequence[str],
        images: Tensor,
        surrogates: Tensor,
        ordinary: Sequence[str],
        settings: HardenSettings,
    ) -> None:
        self.model, self.weights, self.settings = model, weights, settings
        self.prompts, self.ordinary = list(prompts), [prompt for prompt in ordinary if prompt not in prompts]
        self.originals = {name: weight.detach().clone() for name, weight in weights.items()}
        kept = [*self.ordinary, ""]
        with torch.no_grad():
            self.targets, self.surrogates = model.to_latents(images), model.to_latents(surrogates)
            self.kept, self.kept_text = model.to_latents(_generated(model, kept, settings, "kept")), model.embed(kept)
            self.pool = Text.joined([model.embed([prompt]) for prompt in self.prompts])
        self.owners = list(range(len(self.prompts)))  # which memorized prompt each embedding of the pool belongs to
        self.optimizer = torch.optim.Adam(weights.values(), lr=settings.lr)
        self.schedule = model.timesteps(settings.search.generation_steps).cpu()
        self.logs: list[RoundLog] = []

    def run(self, job: Job | None, identity: str, progress: Progress) -> list[RoundLog]:
        """Harden to the end, from the checkpoint if there is one."""
        state = None if job is None else job.load({"identity": identity})
        if state is not None:
            self._restore(*state)
        total = self.settings.rounds * self.settings.steps
        with self._training(), progress.task("harden", total, unit="steps") as task:
            task.update(len(self.logs) * self.settings.steps)
            for number in range(len(self.logs), self.settings.rounds):
                found = self._search(number)
                for step in range(self.settings.steps):
                    surrogate, kept = self._step(number * self.settings.steps + step)
                    task.update()
                self.logs.append(RoundLog(number, found, surrogate, kept))
                task.describe(f"harden: error of searches {found:.3g}, surrogates {surrogate:.3g}, kept {kept:.3g}")
                if job is not None:
                    self._save(job, identity)
        return self.logs

    def _save(self, job: Job, identity: str) -> None:
        tensors = {f"weight|{name}": weight.detach() for name, weight in self.weights.items()}
        for name, weight in self.weights.items():
            tensors |= {f"{kind}|{name}": self.optimizer.state[weight][kind] for kind in _MOMENTS}
        tensors["pool"] = self.pool.states
        if self.pool.mask is not None:
            tensors["mask"] = self.pool.mask
        logs = [asdict(log) for log in self.logs]
        job.save({"identity": identity, "owners": self.owners, "rounds": logs}, tensors)

    @torch.no_grad()
    def _restore(self, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        for name, weight in self.weights.items():
            weight.copy_(tensors[f"weight|{name}"])
            moments = {kind: tensors[f"{kind}|{name}"] for kind in _MOMENTS}
            # Adam counts its steps on the CPU.
            self.optimizer.state[weight] = {
                kind: value if kind == "step" else value.to(weight) for kind, value in moments.items()
            }
        states, mask = self.pool.states, tensors.get("mask")
        self.pool = Text(tensors["pool"].to(states), None if mask is None else mask.to(states.device))
        self.owners, self.logs = list(about["owners"]), [RoundLog(**log) for log in about["rounds"]]

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Take gradients of the trained weights alone, for a block."""
        flags = {weight: weight.requires_grad for weight in self.model.denoiser.parameters()}
        chosen = {id(weight) for weight in self.weights.values()}
        try:
            for weight in flags:
                weight.requires_grad_(id(weight) in chosen)
            yield
        finally:
            for weight, flag in flags.items():
                weight.requires_grad_(flag)

    def _search(self, number: int) -> float:
        """Add the embeddings that a search finds in the model as it is; return their mean error."""
        texts, owners, seeds = [], [], []
        for owner, prompt in enumerate(self.prompts):
            seed = derive(self.settings.seed, "search", number, owner)
            names, text = starting_points(self.model, prompt, self.ordinary, self.settings.search, seed=seed)
            texts.append(text)
            owners += [owner] * len(names)
            seeds += [derive(seed, start, restart) for start, restart in names]
        found, errors = descend(self.model, self.targets[owners], Text.joined(texts), self.settings.search, seeds)
        self.pool = Text.joined([self.pool, found])
        self.owners += owners
        return sum(errors) / len(errors)

    def _step(self, step: int) -> tuple[float, float]:
        """Make a step; return the errors under found embeddings and under ordinary prompts before it."""
        generator = torch_generator(self.settings.seed, "step", step)
        kind = self.settings.search.error
        rows, noise, times = self._draw(len(self.kept), generator)
        noisy, text = self.model.add_noise(self.kept[rows], noise, times), self.kept_text.rows(rows)
        wanted = self._original(noisy, times, text)  # first: no graph may hold weights that are exchanged
        kept = difference(self.model, self.model.predict(noisy, times, text), wanted, times, kind).mean()
        rows, noise, times = self._draw(len(self.owners), generator)
        surrogates = self.surrogates[[self.owners[row] for row in rows]]
        surrogate = denoising_error(self.model, surrogates, noise, times, self.pool.rows(rows), kind).mean()
        loss = surrogate + self.settings.keep * kept
        if not loss.isfinite():
            raise TrainingStopped(
                f"Step {step + 1} of the hardening stopped: its loss is {float(loss.detach())}. The model holds the "
                "weights before this step.",
                cure="Lower the learning rate.",
            )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(surrogate.detach()), float(kept.detach())

    def _draw(self, count: int, generator: torch.Generator) -> tuple[list[int], Tensor, Tensor]:
        size = self.settings.batch
        rows: list[int] = torch.randint(count, (size,), generator=generator).tolist()
        noise = torch.randn(size, *self.kept.shape[1:], generator=generator).to(self.kept)
        times = self.schedule[torch.randint(len(self.schedule), (size,), generator=generator)]
        return rows, noise, times

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
