"""A hardening at rest: the checkpoint it resumes from, and the record of what was done. `robust.py` writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from netweight.attacks.embedding_search.search import denoising_error, descend, difference, joined, starting_points
from netweight.attacks.embedding_search.settings import SearchSettings
from netweight.core import digest
from netweight.core.environment import describe
from netweight.core.names import Select
from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import derive, torch_generator
from netweight.errors import TrainingStopped, Unsupported, UsageError
from netweight.nn.batching import Batches
from netweight.nn.text_to_image import Prediction, Text, TextToImage, generated
from netweight.store.checkpoint import open_checkpoint, read_record, write_checkpoint, write_record

_VERSION = 1
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@final
@dataclass(frozen=True)
class RoundLog:
    """One round."""

    number: int  # counted from 0
    searched: float  # mean denoising error that the round's searches came to: low where images are still easy to find
    surrogate: float  # error towards surrogates under found embeddings, at the last training step
    kept: float  # difference from the original under ordinary prompts, at the last training step


@final
@dataclass(frozen=True)
class HardenRecord:
    """What was done to a model."""

    settings: Mapping[str, Any]
    digests: Mapping[str, str]
    trained: int  # how many weights were trained
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


@final
@dataclass(frozen=True)
class HardenState:
    """All of a hardening between two rounds."""

    # Trained weights (`weight|name`), Adam's moments (`exp_avg|name` and so on), and the `pool` of embeddings with its
    # `mask` if it has one.
    tensors: Mapping[str, Tensor]
    owners: Sequence[int]  # which memorized prompt each embedding of the pool belongs to
    logs: Sequence[RoundLog]

    @classmethod
    def take(
        cls,
        weights: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Adam,
        pool: Text,
        owners: Sequence[int],
        logs: Sequence[RoundLog],
    ) -> Self:
        """Look at a hardening; nothing is copied."""
        tensors = {f"weight|{name}": weight.detach() for name, weight in weights.items()}
        for name, weight in weights.items():
            tensors |= {f"{kind}|{name}": optimizer.state[weight][kind] for kind in _MOMENTS}
        tensors["pool"] = pool.states
        if pool.mask is not None:
            tensors["mask"] = pool.mask
        return cls(tensors, owners, logs)

    @torch.no_grad()
    def restore(self, weights: Mapping[str, nn.Parameter], optimizer: torch.optim.Adam) -> None:
        """Set weights and optimizer to what they were."""
        for name, weight in weights.items():
            weight.copy_(self.tensors[f"weight|{name}"])
            moments = {kind: self.tensors[f"{kind}|{name}"] for kind in _MOMENTS}
            # Adam counts its steps on the CPU.
            optimizer.state[weight] = {
                kind: value if kind == "step" else value.to(weight) for kind, value in moments.items()
            }

    def pool_like(self, text: Text) -> Text:
        """Return the pool, on the device of some embeddings."""
        mask = self.tensors.get("mask")
        return Text(self.tensors["pool"].to(text.states), None if mask is None else mask.to(text.states.device))

    def save(self, path: Path, identity: str) -> None:
        """Write the state over the one before it, all or nothing."""
        about = {"identity": identity, "owners": list(self.owners), "rounds": [asdict(log) for log in self.logs]}
        write_checkpoint(path, about, self.tensors.items())

    @classmethod
    def load(cls, path: Path, identity: str) -> Self:
        """Read a state."""
        refusal = "holds a hardening of another model, other images or settings"
        with open_checkpoint(path, {"identity": identity}, refusal=refusal) as (about, store, names):
            tensors = {name: store.get(name) for name in names}
        return cls(tensors, about["owners"], [RoundLog(**log) for log in about["rounds"]])


# The checkpoint's name in the folder.
CHECKPOINT = "harden.net.safetensors"
# The record's name in the folder.
RECORD = "harden.json"


@final
@dataclass(frozen=True)
class HardenSettings:
    """How a model is hardened."""

    rounds: int = 8  # searches, each followed by training
    steps: int = 50  # training steps per round
    batch: int = 16  # latents per step under found embeddings, and as many under ordinary prompts
    lr: float = 1e-3
    keep: float = 1.0  # weight of the difference from the original under ordinary prompts
    # Which modules' weights are trained, by the grammar of `Select`; None trains all.
    layers: str | None = "**.attn2.to_v"
    # How embeddings are searched for in each round; what it says of looks and success does not matter.
    search: SearchSettings = field(default_factory=lambda: SearchSettings(steps=40))
    seed: int = 0  # random seed

    def __post_init__(self) -> None:
        """Refuse what cannot be meant, all of it at once."""
        counts = ("rounds", "steps", "batch")
        problems = [f"{name} must be at least 1, not {value}" for name in counts if (value := getattr(self, name)) < 1]
        if not self.lr > 0:
            problems.append(f"lr must be above 0, not {self.lr}")
        if not self.keep >= 0:
            problems.append(f"keep must be 0 or more, not {self.keep}")
        if problems:
            raise UsageError(f"Settings of a hardening cannot be meant: {'; '.join(problems)}.")


def surrogate_images(model: TextToImage, count: int, ordinary: Sequence[str], settings: HardenSettings) -> Tensor:
    """Return images for a model to paint in place of memorized ones: its own, of ordinary prompts in turn."""
    prompts = [ordinary[place % len(ordinary)] for place in range(count)]
    return _generated(model, prompts, settings, "surrogate")


def harden_(
    model: TextToImage,
    prompts: Sequence[str],
    images: Tensor,
    ordinary: Sequence[str],
    *,
    settings: HardenSettings | None = None,
    surrogates: Tensor | None = None,
    folder: str | Path | None = None,
    progress: Progress = QUIET,
) -> HardenRecord:
    """Fine-tune a model in place so that embeddings which would bring images back lead elsewhere.

    Hardening delays a search; `compare` of the attacks tells by how much, and whether never-trained images are found as
    easily by then.

    Args:
        model: The model, in float32.
        prompts: Memorized ones.
        images: What they are answered with, shape `(prompts, 3, height, width)`, within 0 and 1.
        ordinary: Prompts whose answers are to stay; the empty one is kept as well. Searches start from them too.
        settings: How; None takes the defaults.
        surrogates: What is to be painted instead, as many as images; None takes the model's own images of ordinary
            prompts.
        folder: Where a checkpoint is written after every round, and finally the record. A second call with the same
            original model, images and settings continues where the first one was killed, to the same bits.
        progress: Told of every round and step.

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
    identity = digest.of_config([asdict(settings), digests])
    checkpoint = None if folder is None else Path(folder) / CHECKPOINT
    hardening = _Hardening(model, weights, prompts, images, surrogates, ordinary, settings)
    logs = hardening.run(checkpoint, identity, progress)
    digests["after"] = model.digest()
    trained = sum(weight.numel() for weight in weights.values())
    record = HardenRecord(asdict(settings), digests, trained, tuple(logs), describe())
    if folder is not None:
        record.write(Path(folder) / RECORD)
    return record


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
            self.pool = joined([model.embed([prompt]) for prompt in self.prompts])
        self.owners = list(range(len(self.prompts)))
        self.optimizer = torch.optim.Adam(weights.values(), lr=settings.lr)
        self.schedule = model.timesteps(settings.search.generation_steps).cpu()

    def run(self, checkpoint: Path | None, identity: str, progress: Progress) -> list[RoundLog]:
        """Harden to the end, from the checkpoint if there is one."""
        logs: list[RoundLog] = []
        if checkpoint is not None and checkpoint.exists():
            logs = self._restore(HardenState.load(checkpoint, identity))
        total = self.settings.rounds * self.settings.steps
        with self._training(), progress.task("harden", total, unit="steps") as task:
            task.update(len(logs) * self.settings.steps)
            for number in range(len(logs), self.settings.rounds):
                found = self._search(number)
                for step in range(self.settings.steps):
                    there, kept = self._step(number * self.settings.steps + step)
                    task.update()
                logs.append(RoundLog(number, found, there, kept))
                task.describe(f"harden: error of searches {found:.3g}, surrogates {there:.3g}, kept {kept:.3g}")
                if checkpoint is not None:
                    state = HardenState.take(self.weights, self.optimizer, self.pool, self.owners, logs)
                    state.save(checkpoint, identity)
        return logs

    def _restore(self, state: HardenState) -> list[RoundLog]:
        state.restore(self.weights, self.optimizer)
        self.pool, self.owners = state.pool_like(self.pool), list(state.owners)
        return list(state.logs)

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
        """Add the embeddings that a search finds in the model as it is; their mean error."""
        texts, owners, seeds = [], [], []
        for owner, prompt in enumerate(self.prompts):
            seed = derive(self.settings.seed, "search", number, owner)
            names, text = starting_points(self.model, prompt, self.ordinary, self.settings.search, seed=seed)
            texts.append(text)
            owners += [owner] * len(names)
            seeds += [derive(seed, start, restart) for start, restart in names]
        found, errors = descend(self.model, self.targets[owners], joined(texts), self.settings.search, seeds)
        self.pool = joined([self.pool, found])
        self.owners += owners
        return sum(errors) / len(errors)

    def _step(self, step: int) -> tuple[float, float]:
        """Make a step; the errors under found embeddings and under ordinary prompts before it."""
        generator = torch_generator(self.settings.seed, "step", step)
        said = self.settings.search.error
        rows, noise, times = self._draw(len(self.kept), generator)
        noisy, text = self.model.add_noise(self.kept[rows], noise, times), self.kept_text.rows(rows)
        wanted = self._original(noisy, times, text)  # first: no graph may hold weights that are exchanged
        kept = difference(self.model, self.model.predict(noisy, times, text), wanted, times, said).mean()
        rows, noise, times = self._draw(len(self.owners), generator)
        surrogates = self.surrogates[[self.owners[row] for row in rows]]
        there = denoising_error(self.model, surrogates, noise, times, self.pool.rows(rows), said).mean()
        loss = there + self.settings.keep * kept
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
        return float(there.detach()), float(kept.detach())

    def _draw(self, count: int, generator: torch.Generator) -> tuple[list[int], Tensor, Tensor]:
        size = self.settings.batch
        rows: list[int] = torch.randint(count, (size,), generator=generator).tolist()
        noise = torch.randn(size, *self.kept.shape[1:], generator=generator).to(self.kept)
        times = self.schedule[torch.randint(len(self.schedule), (size,), generator=generator)]
        return rows, noise, times

    @torch.no_grad()
    def _original(self, noisy: Tensor, times: Tensor, text: Text) -> Prediction:
        """What the original says; its weights take the place of the trained ones for the call, nothing is copied."""
        current = {name: weight.data for name, weight in self.weights.items()}
        try:
            for name, weight in self.weights.items():
                weight.data = self.originals[name]
            return self.model.predict(noisy, times, text)
        finally:
            for name, weight in self.weights.items():
                weight.data = current[name]
