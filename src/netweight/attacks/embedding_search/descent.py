"""Attacks on a text-to-image model as walks that are evaluated and reported alike, and the error that they lower."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from netweight.attacks.embedding_search.settings import PredictionKind, SearchSettings, Start
from netweight.core.seeds import torch_generator
from netweight.errors import Unsupported, UsageError
from netweight.nn.lora import AddedLowRank
from netweight.nn.text_to_image import (
    Batches,
    OpenTextToImage,
    Prediction,
    Text,
    TextToImage,
    denoised,
    generated,
    most_rows,
    recomputed,
)


class Walk(ABC):
    """Values that an attack changes step by step, in rows that end one by one."""

    steps: int | None = None
    """Largest number of steps; None takes that of the settings."""

    def __init__(self, model: TextToImage, settings: SearchSettings) -> None:
        self._model, self._settings = model, settings
        self.taken = 0

    @property
    def model(self) -> TextToImage:
        """The model that is attacked."""
        return self._model

    @abstractmethod
    def text(self, rows: Sequence[int]) -> Text:
        """Return the present embeddings of some rows; no gradient flows."""

    @abstractmethod
    def step(self, rows: Sequence[int]) -> list[float]:
        """Take a step with some rows, and return their errors; the others stay where they are."""

    def distance(self, row: int) -> float:
        """Return how far a row has moved from its start, as a share of that."""
        return 0.0

    def changed(self) -> AbstractContextManager[None]:
        """Attack for a block; the model is as before after it."""
        return weights_fixed(self._model.denoiser)

    @property
    def guidances(self) -> tuple[float, ...]:
        """The guidance scales at which images are compared."""
        return self._settings.every_guidance

    def images(self, rows: Sequence[int], seeds: Sequence[int], batches: Batches, guidance: float) -> Tensor:
        """Generate an image of each row from its seed; a row may come several times."""
        steps = self._settings.generation_steps
        return generated(self._model, self.text(rows), seeds, batches, guidance=guidance, steps=steps)


class Descent(Walk):
    """Adam on many embeddings at once, a row each; rows may stop at any step."""

    # `latents`: shape `(rows, channels, height, width)`

    def __init__(
        self, model: TextToImage, latents: Tensor, start: Text, settings: SearchSettings, seeds: Sequence[int],
        rates: Sequence[float] | None = None,
    ) -> None:  # fmt: skip
        # `rates`: of each row; None takes the first of the settings for all
        if not len(latents) == len(start) == len(seeds):
            raise UsageError(f"{len(latents)} targets came with {len(start)} starts and {len(seeds)} seeds.")
        super().__init__(model, settings)
        self._latents, self._start = latents.detach(), start
        self._seeds = tuple(seeds)
        self._schedule = model.timesteps(settings.generation_steps)
        states = start.states.detach().float()
        self._unit = states.square().mean((1, 2), keepdim=True).sqrt().clamp_min(1e-12)
        # One parameter per row: Adam passes over those that have no gradient, which is how rows leave.
        self._moved = [nn.Parameter(torch.zeros_like(row)) for row in states]
        chosen = self._rates = list(rates or [settings.lr] * len(start))
        self._optimizer = torch.optim.Adam(
            [{"params": [row], "lr": lr} for row, lr in zip(self._moved, chosen, strict=True)]
        )
        self._batches = Batches(most_rows(model, len(start) * settings.draws, gradients=True))

    def text(self, rows: Sequence[int]) -> Text:
        with torch.no_grad():
            moved = torch.stack([self._moved[row] for row in rows])
        return self._text(list(rows), moved)

    def distance(self, row: int) -> float:
        """Return the root mean square of what was added to a row's embedding, as a share of that of its start."""
        return float(self._moved[row].detach().square().mean().sqrt())

    def step(self, rows: Sequence[int]) -> list[float]:
        noise_samples = self._settings.draws
        drawn = [self._draw(row) for row in rows]
        latents = self._latents[list(rows)].repeat_interleave(noise_samples, 0)
        noise, times = (torch.cat(part).to(latents.device) for part in zip(*drawn, strict=True))
        moved = torch.stack([self._moved[row].detach() for row in rows]).requires_grad_()
        errors = torch.zeros(len(rows))
        gradient = torch.zeros_like(moved)

        def work(part: slice) -> None:
            owner = torch.arange(part.start, part.stop, device=moved.device) // noise_samples
            text = self._text([rows[place] for place in owner.tolist()], moved[owner])
            losses = denoising_error(
                self._model, latents[part], noise[part], times[part], text, self._settings.error
            )  # fmt: skip
            gradient.add_(torch.autograd.grad(losses.sum() / noise_samples, moved)[0])
            errors.index_add_(0, owner.cpu(), losses.detach().cpu() / noise_samples)

        with recomputed(self._model):
            self._batches.work(work, len(latents))
        self._follow(rows, gradient)
        return errors.tolist()

    def _draw(self, row: int) -> tuple[Tensor, Tensor]:
        generator = torch_generator(self._seeds[row], "draws", self.taken)
        count = self._settings.draws
        noise = torch.randn(count, *self._latents.shape[1:], generator=generator)
        return noise, self._schedule.cpu()[torch.randint(len(self._schedule), (count,), generator=generator)]

    def _text(self, rows: list[int], moved: Tensor) -> Text:
        start = self._start.rows(rows)
        states = start.states.detach().float() + self._unit[rows] * moved
        return replace(start, states=states.to(start.states.dtype))

    def _follow(self, rows: Sequence[int], gradient: Tensor) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        for place, row in enumerate(rows):
            self._moved[row].grad = gradient[place]
        share = 1.0
        if self._settings.schedule == "cosine":
            # The mean of the shares over all steps is 1.
            share = 1 + math.cos(math.pi * self.taken / self._settings.steps)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * share
        self._optimizer.step()
        self.taken += 1
        if self._settings.radius is None:
            return
        with torch.no_grad():
            for row in rows:
                length = self.distance(row)
                if length > self._settings.radius:
                    self._moved[row].mul_(self._settings.radius / length)


def denoising_error(
    model: TextToImage, latents: Tensor, noise: Tensor, timestep: Tensor, text: Text, kind: PredictionKind
) -> Tensor:
    """Return the mean squared error of one denoising per latent."""
    prediction = model.predict(model.add_noise(latents, noise, timestep), timestep, text)
    return difference(model, prediction, Prediction(noise, latents), timestep, kind)


def difference(
    model: TextToImage, prediction: Prediction, target: Prediction, timestep: Tensor, kind: PredictionKind
) -> Tensor:
    """Return the mean squared difference of two predictions for the same noisy latents."""
    first, second = (chosen(model, one, timestep, kind) for one in (prediction, target))
    return (first - second).float().square().flatten(1).mean(1)


def chosen(model: TextToImage, prediction: Prediction, timestep: Tensor, kind: PredictionKind) -> Tensor:
    """Return the noise, the sample, or the velocity that follows from both."""
    if kind != "velocity":
        return prediction.noise if kind == "noise" else prediction.sample
    # The protocol has no noise levels; what it adds to ones and to zeros gives them.
    ones, zeros = torch.ones_like(prediction.sample), torch.zeros_like(prediction.sample)
    signal, level = model.add_noise(ones, zeros, timestep), model.add_noise(zeros, ones, timestep)
    # Of diffusion the divisor is 1; of flow matching, two velocities differ by what two directions from the sample to
    # the noise differ.
    return (signal * prediction.noise - level * prediction.sample) / (signal.square() + level.square())


@contextmanager
def weights_fixed(module: nn.Module, *, but: Collection[nn.Parameter] = ()) -> Iterator[None]:
    """Take no gradients of a module's weights in a block, which spares the memory that they would need.

    `but`: weights of which gradients are taken.
    """
    marked = {parameter: parameter.requires_grad for parameter in module.parameters()}
    trained = {id(parameter) for parameter in but}
    try:
        for parameter in marked:
            parameter.requires_grad_(id(parameter) in trained)
        yield
    finally:
        for parameter, before in marked.items():
            parameter.requires_grad_(before)


# ---- further attacks: by the text encoder's input, by words, from the picture, by training ---------------------------

# Rank of the LoRA factors.
_RANK = 4
_QUARTERS = 4  # embeddings by timestep
# Number of words of a typed prompt.
_WORDS = 8
# Exchanges of words that are tried in a step.
_CANDIDATES = 8
# For each place, candidates are drawn from the words of the steepest descent.
_NEAREST = 16
# The noise level to which a target is noised, as a share of the steps of its generation.
_LEVEL = 0.9


def further(
    model: TextToImage, kind: Start, prompt: str, image: Tensor, latents: Tensor, unrelated: Sequence[str],
    settings: SearchSettings, others: Sequence[tuple[str, Tensor]], seed: int,
) -> tuple[Walk, Sequence[float | None]]:  # fmt: skip
    """Make an attack on a target; return it with the learning rate of each of its rows."""
    if kind in ("relearn", "relearn-few", "relearn-one", "lora", "zeroed"):
        shown = [(prompt, image)] if kind == "relearn-one" else list(others)[: 2 if kind == "relearn-few" else None]
        if not shown:
            raise UsageError(
                f"The attack {kind!r} trains on other memorized pictures, and only one was given.",
                cure='Give two targets or more, or choose "relearn-one".',
            )
        rate = settings.relearning * (10 if kind == "lora" else 1)
        return Relearning(model, kind, prompt, shown, settings, rate, seed), [rate]
    if kind == "sampled":
        walk = OtherSampling(model, prompt, settings)
        return walk, [None] * len(walk.ways)
    opened = _opened(model, kind)
    if kind == "timed":
        return TimedEmbeddings(opened, prompt, latents, settings, seed), settings.every_rate
    if kind == "soft":
        start = next((other for other in unrelated if other != prompt), "")
        return SoftTokens(opened, latents, start, settings, seed), settings.every_rate
    if kind == "typed":
        return TypedTokens(opened, latents, settings, seed), [None]
    return FromPicture(opened, prompt, latents, settings, inverted=kind == "inverted"), [None]


def _opened(model: TextToImage, kind: Start) -> OpenTextToImage:
    if not isinstance(model, OpenTextToImage):
        raise Unsupported(
            f"The attack {kind!r} needs a pipeline with a text encoder and a decoder; {model.name} is a "
            f"{type(model).__name__}.",
            cure="Leave it out of the starts.",
        )
    return model


@final
class SoftTokens(Descent):
    """Adam on what the text encoder reads in place of an unrelated prompt's token embeddings."""

    def __init__(
        self, model: OpenTextToImage, latents: Tensor, prompt: str, settings: SearchSettings, seed: int
    ) -> None:
        self._prompt, self._opened = prompt, model
        count = len(settings.every_rate)
        start = Text(model.token_embeddings([prompt] * count))
        super().__init__(model, latents.repeat(count, 1, 1, 1), start, settings, [seed] * count, settings.every_rate)

    def _text(self, rows: list[int], moved: Tensor) -> Text:
        return self._opened.embed([self._prompt] * len(rows), super()._text(rows, moved).states)


@final
class TimedEmbeddings(Descent):
    """Adam on four embeddings together, one for each quarter of the timesteps, from the target's prompt."""

    # An embedding that serves all timesteps has to do two things at once: draw the layout, and then the details.

    def __init__(
        self, model: OpenTextToImage, prompt: str, latents: Tensor, settings: SearchSettings, seed: int
    ) -> None:
        self._opened = model
        count = len(settings.every_rate)
        start = model.embed([prompt] * (count * _QUARTERS))
        super().__init__(
            model, latents.repeat(len(start), 1, 1, 1), start, settings,
            [seed + row % _QUARTERS for row in range(len(start))],
            [rate for rate in settings.every_rate for _ in range(_QUARTERS)],
        )  # fmt: skip
        places = torch.arange(len(self._schedule)) * _QUARTERS // len(self._schedule)
        self._quarter = {int(time): int(place) for time, place in zip(self._schedule, places, strict=True)}

    def text(self, rows: Sequence[int]) -> Text:
        return super().text([row * _QUARTERS for row in rows])

    def distance(self, row: int) -> float:
        """Return the largest change of the four."""
        return max(super(TimedEmbeddings, self).distance(each) for each in self._members(row))

    def step(self, rows: Sequence[int]) -> list[float]:
        members = [member for row in rows for member in self._members(row)]
        errors = super().step(members)
        return [sum(errors[place * _QUARTERS : (place + 1) * _QUARTERS]) / _QUARTERS for place in range(len(rows))]

    def _draw(self, row: int) -> tuple[Tensor, Tensor]:
        noise, _ = super()._draw(row)
        own = [time for time, quarter in self._quarter.items() if quarter == row % _QUARTERS] or [*self._quarter]
        generator = torch_generator(self._seeds[row], "times", self.taken)
        picked = torch.randint(len(own), (len(noise),), generator=generator).tolist()
        return noise, torch.tensor([own[place] for place in picked])

    @torch.no_grad()
    def images(self, rows: Sequence[int], seeds: Sequence[int], batches: Batches, guidance: float) -> Tensor:
        model = self._opened
        latents = model.initial_noise(seeds)
        texts = [super(TimedEmbeddings, self).text([row * _QUARTERS + at for row in rows]) for at in range(_QUARTERS)]
        times = self._schedule.to(latents.device)
        chosen = [texts[self._quarter[int(time)]] for time in times]
        return model.to_images(denoised(model, latents, times, chosen, guidance))

    @staticmethod
    def _members(row: int) -> range:
        return range(row * _QUARTERS, (row + 1) * _QUARTERS)


@final
class TypedTokens(Walk):
    """Words that a person can type; each step exchanges one, where the gradient says that it helps."""

    # Source: Zou et al., arXiv 2307.15043 (greedy coordinate gradient); Zhang et al., arXiv 2310.11868, on diffusion.

    def __init__(self, model: OpenTextToImage, latents: Tensor, settings: SearchSettings, seed: int) -> None:
        super().__init__(model, settings)
        self._opened, self._latents, self._seed = model, latents, seed
        self._schedule = model.timesteps(settings.generation_steps)
        self._words, self._table = model.vocabulary()
        self._first = torch.randint(len(self._words), (_WORDS,), generator=torch_generator(seed, "words")).tolist()
        self._typed = self._first

    def text(self, rows: Sequence[int]) -> Text:
        return self._opened.embed([self._prompt(self._typed)] * len(rows))

    def distance(self, row: int) -> float:
        """Return the share of words that were exchanged."""
        return float(sum(now != old for now, old in zip(self._typed, self._first, strict=True))) / _WORDS

    def step(self, rows: Sequence[int]) -> list[float]:
        generator, draws = torch_generator(self._seed, "draws", self.taken), self._settings.draws
        noise = torch.randn(draws, *self._latents.shape[1:], generator=generator).to(self._latents)
        times = self._schedule[torch.randint(len(self._schedule), (draws,), generator=generator)]
        gains = self._gains(noise, times)
        tried = [self._typed]
        for _ in range(_CANDIDATES):
            place = int(torch.randint(_WORDS, (1,), generator=generator))
            best = gains[place].topk(min(_NEAREST, len(self._words))).indices
            word = int(best[torch.randint(len(best), (1,), generator=generator)])
            tried.append([word if place == at else token for at, token in enumerate(self._typed)])
        with torch.no_grad():
            text = self._opened.embed([self._prompt(words) for words in tried])
            text = text.rows([row for row in range(len(tried)) for _ in range(draws)])
            errors = self._errors(noise.repeat(len(tried), 1, 1, 1), times.repeat(len(tried)), text)
        means = errors.reshape(len(tried), draws).mean(1)
        self._typed = tried[int(means.argmin())]
        self.taken += 1
        return [float(means.min())] * len(rows)

    def _prompt(self, words: Sequence[int]) -> str:
        return " ".join(self._words[word] for word in words)

    def _gains(self, noise: Tensor, times: Tensor) -> Tensor:
        """Return how much each word in each place would lower the error, to first order: shape `(places, words)`."""
        prompt = [self._prompt(self._typed)]
        tokens = self._opened.token_embeddings(prompt).requires_grad_()
        first = int((tokens[0].detach() == self._table[self._typed[0]]).all(-1).nonzero()[0])
        text = self._opened.embed(prompt, tokens).rows([0] * len(noise))
        (gradient,) = torch.autograd.grad(self._errors(noise, times, text).mean(), tokens)
        return -(gradient[0, first : first + _WORDS] @ self._table.T)

    def _errors(self, noise: Tensor, times: Tensor, text: Text) -> Tensor:
        latents = self._latents.expand(len(noise), -1, -1, -1)
        return denoising_error(self._model, latents, noise, times, text, self._settings.error)


class _Prompted(Walk):
    """Images of the target's prompt, without a step."""

    steps = 0

    def __init__(self, model: TextToImage, prompt: str, settings: SearchSettings) -> None:
        super().__init__(model, settings)
        self._prompt = prompt

    def text(self, rows: Sequence[int]) -> Text:
        return self._model.embed([self._prompt] * len(rows))

    def step(self, rows: Sequence[int]) -> list[float]:
        raise AssertionError("no step was made")


@final
class OtherSampling(_Prompted):
    """The target's prompt with next to no guidance and with twice as much, in half and in twice as many steps."""

    def __init__(self, model: TextToImage, prompt: str, settings: SearchSettings) -> None:
        super().__init__(model, prompt, settings)
        guidance, steps = settings.guidance, settings.generation_steps
        self.ways = [(1.0, steps), (2 * guidance, steps), (guidance, max(1, steps // 2)), (guidance, 2 * steps)]

    @property
    def guidances(self) -> tuple[float, ...]:
        """One: each way has its own."""
        return (self._settings.guidance,)

    def images(self, rows: Sequence[int], seeds: Sequence[int], batches: Batches, guidance: float) -> Tensor:
        made = []
        for row, group in itertools.groupby(zip(rows, seeds, strict=True), key=lambda pair: pair[0]):
            own, (scale, steps) = [seed for _, seed in group], self.ways[row]
            made.append(generated(self._model, self.text(own), own, batches, guidance=scale, steps=steps))
        return torch.cat(made)


@final
class FromPicture(_Prompted):
    """The target noised, or inverted to noise, and denoised under its prompt: what somebody who has it can show."""

    # Source: Song et al., arXiv 2010.02502 (deterministic steps, and their inversion).

    def __init__(
        self, model: OpenTextToImage, prompt: str, latents: Tensor, settings: SearchSettings, *, inverted: bool
    ) -> None:
        super().__init__(model, prompt, settings)
        self._opened, self._latents, self._inverted = model, latents, inverted

    @torch.no_grad()
    def images(self, rows: Sequence[int], seeds: Sequence[int], batches: Batches, guidance: float) -> Tensor:
        model, latents = self._opened, self._latents.repeat(len(seeds), 1, 1, 1)
        times, text = model.timesteps(self._settings.generation_steps), self.text(rows)
        if self._inverted:
            before = torch.zeros_like(times[0])
            for timestep in times.flip(0):
                prediction = model.predict(latents, before, text)
                latents, before = model.add_noise(prediction.sample, prediction.noise, timestep), timestep
        else:
            times = times[-max(1, round(_LEVEL * len(times))) :]
            latents = model.add_noise(latents, model.initial_noise(seeds), times[0])
        return model.to_images(denoised(model, latents, times, text, guidance))


@final
class Relearning(Walk):
    """Training on a few pictures with their prompts: of all weights, by LoRA, or of rows that an edit zeroed."""

    # Source: training where weights are zero follows arXiv 2603.06640, whose attack needs these places alone.

    def __init__(
        self, model: TextToImage, kind: Start, prompt: str, shown: Sequence[tuple[str, Tensor]],
        settings: SearchSettings, rate: float, seed: int,
    ) -> None:  # fmt: skip
        super().__init__(model, settings)
        self._kind, self._rate, self._seed = kind, rate, seed
        with torch.no_grad():
            self._own, self._shown = model.embed([prompt]), model.embed([one for one, _ in shown])
            self._latents = model.to_latents(torch.stack([image for _, image in shown]))
        self._schedule = model.timesteps(settings.generation_steps)
        matrices = [weight for weight in model.denoiser.parameters() if weight.ndim > 1]
        zeroed = {weight: (weight == 0).flatten(1).all(1) for weight in matrices} if kind == "zeroed" else {}
        self._zeroed = {weight: rows for weight, rows in zeroed.items() if rows.any()}
        if kind == "zeroed" and not self._zeroed:
            # There is no place to train.
            self.steps = 0

    def text(self, rows: Sequence[int]) -> Text:
        return self._own.rows([0] * len(rows))

    @contextmanager
    def changed(self) -> Iterator[None]:
        """Train for a block; every weight is as before after it."""
        denoiser = self._model.denoiser
        if self._kind == "lora":
            layers = [module for module in denoiser.modules() if isinstance(module, nn.Linear)]
            generator = torch_generator(self._seed, "lora")
            added = [AddedLowRank(layer.weight, _RANK, generator) for layer in layers]
            for layer, change in zip(layers, added, strict=True):
                parametrize.register_parametrization(layer, "weight", change)
            trained: list[nn.Parameter] = [weight for change in added for weight in change.parameters()]
        else:
            layers = []
            trained = list(self._zeroed or denoiser.parameters())
        before = [weight.detach().clone() for weight in trained]
        self._optimizer = torch.optim.AdamW(trained, lr=self._rate, weight_decay=0.0)
        try:
            with weights_fixed(denoiser, but=trained):
                yield
        finally:
            for layer in layers:
                parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
            with torch.no_grad():
                for weight, old in zip(trained, before, strict=True):
                    weight.copy_(old)

    def step(self, rows: Sequence[int]) -> list[float]:
        generator = torch_generator(self._seed, "draws", self.taken)
        chosen = torch.randint(len(self._latents), (self._settings.draws,), generator=generator)
        latents = self._latents[chosen]
        noise = torch.randn(latents.shape, generator=generator).to(latents)
        times = self._schedule[torch.randint(len(self._schedule), (len(chosen),), generator=generator)]
        text = self._shown.rows(chosen)
        error = denoising_error(self._model, latents, noise, times, text, self._settings.error).mean()
        self._optimizer.zero_grad(set_to_none=True)
        error.backward()  # type: ignore[no-untyped-call]
        for weight, zeroed in self._zeroed.items():
            cast(Any, weight.grad)[~zeroed] = 0
        self._optimizer.step()
        self.taken += 1
        return [float(error.detach())] * len(rows)
