"""The audit of a federation: attack what a server observes, and judge what the attacks recover."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor

from netweight.attacks.gradient_inversion.analytic import (
    RecoveredGradient,
    read_text,
    read_thresholds,
    separate_clients,
    singular_gradient,
)
from netweight.attacks.gradient_inversion.matching import Bounds
from netweight.core import progress as shown
from netweight.core import seeds
from netweight.core.progress import QUIET, Progress
from netweight.errors import Unsupported
from netweight.methods.federate.engine import TrainedFederation
from netweight.methods.federate.observation import Observation, observe, read_update, update_change
from netweight.methods.federate.protections import HardenedMethod
from netweight.methods.federate.reconstruction import Candidates, Search, ServerKnowledge, nearest_pair, reconstruct
from netweight.methods.federate.threats import ThreatModel, own_threat, training_of
from netweight.metrics.images import psnr, ssim
from netweight.metrics.intervals import ends_if_enough
from netweight.report.finding import Finding
from netweight.report.text import Conclusion, Criterion, Words

# How far the recovered gradient may be nearer to a client's than the published average is.
MARGIN_COSINE = 0.05
# How far reconstructions may be above the better of a random and the average image of the other clients, in dB.
MARGIN_PSNR = 1.0
# How much of a text may be read beyond what the most frequent tokens of the other clients give.
MARGIN_TOKENS = 0.1
# Pixels of the side of the window in which SSIM compares.
SSIM_WINDOW = 11


@final
@dataclass(frozen=True)
class AuditConfig:
    """Settings of an audit."""

    threats: tuple[ThreatModel, ...] = (
        ThreatModel(first_round=True),
        ThreatModel(),
        ThreatModel(batch_size=8, first_round=True),
        ThreatModel(batch_size=8, server="imprint"),
    )
    """Threat models beside the run's own schedule."""
    further: bool = False
    """True to attack secure sums and noisy updates as well, if the method allows them."""
    updates: int = 16
    """Number of updates that are attacked in each threat model. An interval needs at least 5."""
    search: Search | None = None
    """Length of the attacks' searches; None for their defaults."""
    summed_over: int = 20
    """Number of clients in the average that takes the place of the published average."""


@final
@dataclass(frozen=True)
class Exposure:
    """Exposure under one threat model."""

    threat: ThreatModel
    """The threat model."""
    is_own: bool
    """True if this is the schedule that the run was trained with."""
    cosines: tuple[float, ...]
    """Cosine of the recovered gradient with the client's first gradient, per attacked client."""
    movements: tuple[float, ...]
    """Cosine with the movement of the client's body over the round."""
    aggregate: tuple[float, ...]
    """Cosine of the published average's gradient with the client's first one: what is given away anyway."""
    psnr: tuple[float, ...] = ()
    """PSNR in dB of the best reconstruction of each attacked update; empty if no image could be reconstructed."""
    ssim: tuple[float, ...] = ()
    """SSIM of these reconstructions, without images that are smaller than its window."""
    random_psnr: tuple[float, ...] = ()
    """PSNR in dB of a random image of another client instead, for each attacked update: a guess."""
    average_psnr: tuple[float, ...] = ()
    """PSNR in dB of the average image of the other clients instead, for each attacked update."""
    tokens: tuple[float, ...] = ()
    """Share of tokens read at their places, where inputs are text, and that of the other clients' most frequent
    tokens.
    """
    frequent: tuple[float, ...] = ()
    originals: tuple[Tensor, ...] = field(default=(), repr=False)
    """The nearest images, shape `(n, c, h, w)`, within 0 and 1."""
    reconstructions: tuple[Tensor, ...] = field(default=(), repr=False)
    """The reconstruction that is most similar to each of these images, in the same order."""
    why_no_images: str = ""
    """Reason why no image could be computed, or empty."""
    attack: str = ""
    """Name of the nearest estimate of the gradient."""
    best_attacks: tuple[str, ...] = ()
    """Name of the attack with the nearest image, for each attacked update."""
    image_attacks: tuple[str, ...] = ()
    """All attacks that searched images."""
    not_searched: tuple[str, ...] = ()
    """Attacks that fit the threat and were not run, each with the reason."""
    seconds: float = 0.0
    """Mean processor time of the image attacks for one update."""

    @property
    def label(self) -> str:
        """The threat model in words."""
        return self.threat.label + (" (this run)" if self.is_own else "")

    @property
    def guess(self) -> float:
        """PSNR of the better of two guesses that need no update: a random image and the average image, dB."""
        return max(mean_of(self.random_psnr), mean_of(self.average_psnr))

    @property
    def verdict(self) -> Words:
        """Meaning of the exposure: an outcome, and words."""
        if not self.cosines:
            return "told", self.why_no_images
        near, gain = mean_of(self.cosines), mean_of(self.psnr) - self.guess if self.psnr else None
        return _VERDICT([
            Finding("gradient", near), Finding("gradient beyond the average's", near - mean_of(self.aggregate)),
            Finding("images, clearly above a guess", gain), Finding("images above a guess", gain),
            Finding("text above a guess", mean_of(self.tokens) - mean_of(self.frequent) if self.tokens else None),
        ], searched=self._searched, below="yes" if self._surely_below else "")  # fmt: skip

    @property
    def _searched(self) -> str:
        """The image attacks and their budget, in words."""
        names = " and ".join(self.image_attacks) or "no attack"
        return f"{names}, {self.seconds:.0f} processor seconds an update"

    @property
    def _surely_below(self) -> bool:
        """True if every attack that fits was searched, and its images lie below a guess by their interval."""
        if self.not_searched or not self.psnr:
            return False
        gains = [p - max(r, a) for p, r, a in zip(self.psnr, self.random_psnr, self.average_psnr, strict=True)]
        ends = ends_if_enough(gains, seed=0)
        return ends is not None and ends[1] < 0


def _words(
    inexact: bool, hidden: bool, unclear: bool | None, unseen: bool | None, unread: bool | None, *, searched: str,
    below: str,
) -> Words:  # fmt: skip
    text = "The update reveals no more about the client's gradient than the published average"
    if not hidden:
        text = "The update reveals more about the client's gradient than the published average"
    if not inexact:
        text = "The server computes the client's gradient exactly"
    no_image = f"the attacks recovered no image ({searched})"
    if below:
        no_image = f"the attacks recovered no image, and what they return is worse than a guess ({searched})"
    leaks = {None: "", False: f"; its images can be reconstructed ({searched})", True: f"; {no_image}"}[unclear]
    if unclear and unseen is False:
        leaks = f"; the images of the attacks are slightly better than a guess ({searched})"
    if unread is not None:
        leaks += "; the attack recovered no text" if unread else "; its text can be read"
    broken = not (inexact and hidden) or unclear is False or unread is False
    return "broken" if broken else "partly" if unclear and unseen is False else "told", f"{text}{leaks}."


_VERDICT = Conclusion(
    "federate: exposure",
    [
        Criterion("gradient", "lower", than=0.99, strict=True),
        Criterion("gradient beyond the average's", "lower", than=MARGIN_COSINE),
        Criterion("images, clearly above a guess", "lower", than=3.0, needed=False),
        Criterion("images above a guess", "lower", than=MARGIN_PSNR, needed=False),
        Criterion("text above a guess", "lower", than=MARGIN_TOKENS, needed=False),
    ],
    _words,
)


def exposure(
    run: TrainedFederation, threat: ThreatModel, *, updates: int, summed_over: int, seed: int, is_own: bool = False,
    gradients: int = 0, search: Search | None = None, work: shown.ProgressTask | None = None,
) -> Exposure:  # fmt: skip
    """Attack `updates` updates under one threat model; compute the gradients of at least `gradients` updates."""
    low, high = _pixel_range(run)
    texts: list[tuple[float, float]] = []

    def unit(images: Tensor) -> Tensor:
        return ((images - low) / (high - low)).clamp(0, 1)

    cosines: list[tuple[float, ...]] = []
    qualities: list[tuple[float, ...]] = []
    pairs: list[tuple[Tensor, Tensor]] = []
    searches: list[tuple[str, float]] = []
    tried: dict[str, None] = {}
    left_out: dict[str, None] = {}
    why = ""
    try:
        observed = list(_observations(run, threat, max(updates, gradients), summed_over, seed))
    except Unsupported as reason:
        return Exposure(threat, is_own, (), (), (), why_no_images=str(reason))
    readings, gradients_by_attack = zip(
        *(_guesses(run, observation, threat) for observation, _ in observed), strict=True
    )
    published = [anyway for _, anyway in observed]
    observations = [observation for observation, _ in observed]
    strongest, anyway = (_strongest(by_attack, observations) for by_attack in (gradients_by_attack, published))
    for draw, (observation, _) in enumerate(observed):
        recovered = replace(readings[draw], first=gradients_by_attack[draw][strongest])
        cosines.append((
            cosine(recovered.first, observation.gradient), cosine(-recovered.gradient, observation.movement),
            cosine(published[draw][anyway], observation.gradient),
        ))  # fmt: skip
        if draw >= updates:
            continue
        try:
            if not observation.images.is_floating_point():
                texts.append(_read(run, recovered.first, observation))
            # A client whose gradient is zero sends no change, so the attacker can only guess.
            if not observation.gradient.any():
                candidates, too_large = [Candidates("guess", _another(run, observation, seed), 0.0)], list[str]()
            else:
                evidence = evidence_of(run, recovered, observation, threat, (low, high))
                candidates, too_large = reconstruct(
                    evidence, search or Search(), seed=seeds.derive(seed, "image", draw)
                )
            truth, every = unit(observation.images), [unit(one.images) for one in candidates]
            place, original, image, quality = nearest_pair(every, truth, psnr)
        except Unsupported as reason:
            why = str(reason)
        else:
            guesses = (
                nearest_pair([unit(g)], truth, psnr)[3]
                for g in (_another(run, observation, seed), _average(run, observation))
            )
            alike = ssim(image[None], original[None]) if min(image.shape[1:]) >= SSIM_WINDOW else math.nan
            qualities.append((quality, float(alike), *guesses))
            pairs.append((original, image))
            searches.append((candidates[place].attack, sum(one.seconds for one in candidates)))
            tried.update(dict.fromkeys(one.attack for one in candidates))
            left_out.update(dict.fromkeys(too_large))
        if work is not None:
            work.update(1)
    first, movement, given_anyway = zip(*cosines, strict=True)
    psnrs, ssims, random, average = zip(*qualities, strict=True) if qualities else ((), (), (), ())
    # Images smaller than the window of SSIM have none.
    ssims = tuple(value for value in ssims if not math.isnan(value))
    originals, made = zip(*pairs, strict=True) if pairs else ((), ())
    read, frequent = zip(*texts, strict=True) if texts else ((), ())
    return Exposure(
        threat, is_own, first, movement, given_anyway, psnrs, ssims, random, average, read, frequent, originals, made,
        why, strongest, tuple(name for name, _ in searches), tuple(tried), tuple(left_out),
        mean_of([seconds for _, seconds in searches]) if searches else 0.0,
    )  # fmt: skip


def _observations(
    run: TrainedFederation, threat: ThreatModel, count: int, summed_over: int, seed: int
) -> Iterator[tuple[Observation, Mapping[str, Tensor]]]:
    """Yield attacked updates, each with what the average of `summed_over` clients gives away of gradients anyway."""
    many = max(threat.summed_over, min(summed_over, len(run.task.clients)))
    for draw in range(-(-count // many)):
        observations = observe(run, threat, run.task.clients[:many], draw=draw, seed=seed)
        everyone = tuple({update.client: update for one in observations for update in one.updates}.values())
        published = replace(observations[0], updates=everyone)
        _, average = _guesses(run, published, ThreatModel())
        for one in observations[: count - draw * many]:
            yield one, average


def _others(run: TrainedFederation, observation: Observation) -> list[int]:
    return [number for number in run.task.clients if number != observation.client] or [observation.client]


def _average(run: TrainedFederation, observation: Observation) -> Tensor:
    """Return the average image of the other clients."""
    means = [run.task.client(number).train[0].mean(0) for number in _others(run, observation)]
    return torch.stack(means).mean(0, keepdim=True)


def _another(run: TrainedFederation, observation: Observation, seed: int) -> Tensor:
    """Return a random image of another client: what a guess looks like."""
    others, generator = _others(run, observation), seeds.torch_generator(seed, "guess", observation.client)
    inputs = run.task.client(others[int(torch.randint(len(others), (1,), generator=generator))]).train[0]
    return inputs[torch.randint(len(inputs), (1,), generator=generator)]


def _guesses(
    run: TrainedFederation, observation: Observation, threat: ThreatModel
) -> tuple[RecoveredGradient, dict[str, Tensor]]:
    """Return what is read off an update, and what each attack takes for the first gradient, by the attack's name."""
    received = observation.answer()
    change = update_change(run, observation.message, received)
    read = change.recovered() if change else read_update(run, observation.message, received)
    gradients = {"direct": read.first}
    if change is not None and observation.codes is not None:
        gradients["singular vector"] = singular_gradient(change)
        if threat.knows_embeddings:
            gradients["matched filter"] = separate_clients(change, observation.codes)[0]
        # One of these gradients is the client's. The attacker recognizes those of single clients.
        if threat.server == "thresholds":
            candidates = read_thresholds(change)
            gradients["thresholds"] = max(candidates, key=lambda one: cosine(one, observation.gradient))
    return read, gradients


def _strongest(guesses: Sequence[Mapping[str, Tensor]], observations: Sequence[Observation]) -> str:
    """Return the attack whose guesses are nearest to the truth on average; the plainest where others gain nothing."""

    def quality(name: str) -> float:
        return sum(cosine(one[name], own.gradient) for one, own in zip(guesses, observations, strict=True)) / len(
            observations
        )

    return max(guesses[0], key=lambda name: quality(name) + 1e-4 * (name == "direct"))


def evidence_of(
    run: TrainedFederation, recovered: RecoveredGradient, observation: Observation, threat: ThreatModel, bounds: Bounds
) -> ServerKnowledge:
    """Return what the server has of one client to reconstruct images from."""
    held = len(observation.images) * len(observation.updates)
    return ServerKnowledge(
        run.task, training_of(run), recovered, observation.message, observation.answer(),
        held, tuple(observation.images.shape[1:]), bounds, threat.local_steps, threat.batch_size,
        len(observation.updates), observation.trap,
    )  # fmt: skip


def _read(run: TrainedFederation, gradient: Tensor, observation: Observation) -> tuple[float, float]:
    """Return the share of tokens at their places that were read, for the nearest sequence, and that of a guess."""
    layout, length = run.task.body_layout, observation.images.shape[1]
    params = {name: value.detach() for name, value in run.task.body.named_parameters()}
    tokens = read_text(run.task.body, params, layout.split(gradient), length)
    others = torch.cat([run.task.client(number).train[0] for number in _others(run, observation)])
    shares = [(guess == observation.images).double().mean(1).max() for guess in (tokens, others.mode(0).values)]
    return float(shares[0]), float(shares[1])


def _pixel_range(run: TrainedFederation) -> tuple[float, float]:
    """Return the range of all clients' inputs: the server knows how images are normalized."""
    inputs = [run.task.client(number).train[0] for number in run.task.clients]
    return min(float(x.min()) for x in inputs), max(float(x.max()) for x in inputs)


def cosine(a: Tensor, b: Tensor) -> float:
    """Return the cosine of two vectors, computed in float64."""
    return float(torch.cosine_similarity(a.double(), b.double(), dim=0))


def mean_of(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def audit(
    run: TrainedFederation, config: AuditConfig | None = None, *, seed: int, progress: Progress = QUIET
) -> list[Exposure]:
    """Attack a federation's updates, to measure what its server could have reconstructed.

    Args:
        run: A trained federation.
        config: Threat models beside the run's own schedule, and the number of updates to attack in each.
        seed: Seed of the choice of images and of the attacks.
        progress: Where the progress is reported.

    Returns:
        One exposure per threat model, that of the run's own schedule first; `add_sections` shows them in a report.
    """
    config, own = config or AuditConfig(), own_threat(run)
    others = [*config.threats, *_further(run)] if config.further else config.threats
    threats = [(own, True), *((threat, False) for threat in others if threat != own)]
    about: Any = {
        "updates": config.updates, "summed_over": config.summed_over, "seed": seed, "search": config.search,
    }  # fmt: skip
    with progress.task("attacked updates", total=len(threats) * config.updates, unit="updates") as work:
        return [exposure(run, threat, is_own=is_own, work=work, **about) for threat, is_own in threats]


def _further(run: TrainedFederation) -> list[ThreatModel]:
    """Return threat models that take sums apart, and for methods with noise those that average it away."""
    if not any(name.endswith("heads.weight") for name in run.state):
        return []
    many = min(20, len(run.task.clients))
    sums = [
        ThreatModel(first_round=True, summed_over=many, knows_embeddings=True),
        ThreatModel(first_round=True, summed_over=many, server="thresholds"),
    ]
    noise = isinstance(run.method, HardenedMethod) and run.method.noise is not None
    repeated = [
        ThreatModel(first_round=True, knows_embeddings=True),
        ThreatModel(first_round=True, knows_embeddings=True, queries=4),
    ]
    return [*(sums if many > 1 else []), *(repeated if noise else [])]
