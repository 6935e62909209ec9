"""The audit of a federation: what a server observes under a threat model, what it reconstructs, and the report."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from netweight.attacks.gradient_inversion.analytic import (
    HypernetworkChange,
    RecoveredGradient,
    hypernetwork_tensors,
    read_text,
    read_thresholds,
    separate_clients,
    singular_gradient,
    threshold_trunk,
)
from netweight.attacks.gradient_inversion.chains import Imprinted, imprint
from netweight.attacks.gradient_inversion.matching import Bounds
from netweight.core import progress as shown
from netweight.core import seeds
from netweight.core.progress import QUIET, Progress
from netweight.errors import Unsupported, UsageError
from netweight.methods.federate.accounting import Guarantee
from netweight.methods.federate.algorithms.hyperfl import rows_of_body
from netweight.methods.federate.averaging import aggregate
from netweight.methods.federate.engine import Round, Run
from netweight.methods.federate.local_model import LocalModel
from netweight.methods.federate.method import Client, Method, prefixed
from netweight.methods.federate.protections import Hardened
from netweight.methods.federate.reconstruction import Candidates, Evidence, Search, nearest_pair, reconstruct
from netweight.methods.federate.settings import LocalTraining
from netweight.methods.federate.task import ClientData, Task
from netweight.methods.federate.task_privacy import task_guarantee
from netweight.methods.federate.updates import Tensors, Update, dense_tensors
from netweight.metrics.images import psnr, ssim
from netweight.metrics.intervals import ends_if_enough
from netweight.nn.hypernetwork import hidden_code
from netweight.report.audit import of_treatment
from netweight.report.finding import Column, Figure, Finding, Section, Table
from netweight.report.plots import image_grid, lines
from netweight.report.report import Report
from netweight.report.text import Conclusion, Criterion, Words

# How far the recovered gradient may be nearer to a client's than the published aggregate is.
MARGIN_COSINE = 0.05
# How far reconstructions may be above the better of a random and the average image of the other clients, in dB.
MARGIN_PSNR = 1.0
# How much of a text may be read beyond what the most frequent tokens of the other clients give.
MARGIN_TOKENS = 0.1
SSIM_WINDOW = 11  # pixels of the side of the window in which SSIM compares
# Logit by which a server that fishes makes its class unlikely, so that images of others find nothing to correct.
_UNLIKELY = 20.0


_SERVERS = {
    "honest": "", "malicious": ", malicious server", "thresholds": ", server with thresholds",
    "fishing": ", server that fishes for one class",
}  # fmt: skip


@final
@dataclass(frozen=True)
class ThreatModel:
    """Assumptions about what the server sees."""

    batch_size: int = 1  # examples per local step
    local_steps: int = 1  # local steps that train what is shared, all on the same examples if there are no others
    examples: int | None = None  # examples that the client holds; None for as many as a batch
    # Clients whose updates the server sees only as their average: 1 for none, more under secure aggregation.
    summed_over: int = 1
    # "honest" sends what training gave; "malicious" sends a hypernetwork made to print images into updates,
    # "thresholds" one whose trunk tells the clients of a sum apart, "fishing" a classifier to which one class alone
    # makes a difference.
    server: Literal["honest", "malicious", "thresholds", "fishing"] = "honest"
    asked: int = 1  # how often the same state is asked, where every answer has other noise
    known: bool = False  # whether the server knows the clients' embeddings, from a round that it saw in the clear
    # Attack the first round, from the method's initial state, rather than one more round of the trained federation.
    first_round: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        if min(self.batch_size, self.local_steps, self.summed_over, self.asked) < 1 or (self.examples or 1) < 1:
            raise UsageError(f"There is no such threat model: {self}.", cure="All numbers are at least 1.")

    @property
    def held(self) -> int:
        """Number of examples that the client trains on."""
        return self.examples or self.batch_size

    @property
    def label(self) -> str:
        """In words, for tables."""
        steps = f"{self.local_steps} step{'s' * (self.local_steps > 1)} of batch {self.batch_size}"
        steps += f", sum of {self.summed_over} clients" if self.summed_over > 1 else ""
        steps += _SERVERS[self.server]
        steps += f", asked {self.asked} times" if self.asked > 1 else ""
        steps += ", embeddings known" if self.known else ""
        return steps + (", first round" if self.first_round else "")


@final
@dataclass(frozen=True)
class Observation:
    """A server's observation of one client, and the truth that it does not see."""

    client: int  # its number
    sent: Tensors  # what the server sent: tensors by name
    trap: Imprinted | None  # what a malicious server needs to read the answer; None for an honest one
    updates: tuple[Update, ...]  # the updates whose average the server sees: the client's own, or those of a secure sum
    images: Tensor  # the client's inputs, shape `(n, …)`; truth
    labels: Tensor  # their targets; truth. Shape `(n,)`.
    gradient: Tensor  # the gradient of its loss on its examples by the body that it began with, shape `(P,)`; truth
    movement: Tensor  # how its body moved in the whole round, shape `(P,)`; truth
    codes: Tensor | None  # hidden codes of the clients summed, shape `(k, H)`, its own first; None without hypernetwork

    def received(self) -> dict[str, Tensor]:
        """Return what the server sees come back, low-rank matrices made whole."""
        if len(self.updates) > 1:
            return aggregate(self.sent, self.updates)
        return dense_tensors(self.updates[0].tensors, self.sent)


def observe(run: Run, threat: ThreatModel, clients: Sequence[int], *, draw: int = 0, seed: int) -> list[Observation]:
    """Let clients train as the threat model says and return what the server sees of each."""
    # A client's private head is not trained on these examples before: it is as the client has it from earlier rounds.
    # Under secure aggregation the clients are summed in groups of the threat model's size, in the order given.
    if len(clients) < threat.summed_over:
        raise UsageError(f"{len(clients)} clients cannot be summed as {threat.summed_over}.")
    method = shortened(run.method, threat)
    state = method.start(run.task, seed=run.seed) if threat.first_round else run.state
    trap = _imprint(run, threat, state, seed) if threat.server == "malicious" else None
    if threat.server == "thresholds":
        state = threshold_trunk(state, seed=seed)
    if trap:  # a head that is generated after the body is left as it was
        state = {name: torch.cat([value, state[name][len(value) :]]) for name, value in trap.state.items()}
    states = _fishing(run, state) if threat.server == "fishing" else [state]
    seen = [
        _likeliest(run, [_observed(method, run, threat, number, one, trap, draw, seed) for one in states])
        for number in clients
    ]
    size = threat.summed_over
    groups = [seen[start : start + size] for start in range(0, len(seen), size)]
    if len(groups[-1]) < size:
        groups[-1] = [*groups[-2][len(groups[-1]) - size :], *groups[-1]]
    return [_in_sum(one, groups[index // size]) for index, one in enumerate(seen)]


def _in_sum(one: Observation, group: Sequence[Observation]) -> Observation:
    codes = [other.codes for other in (one, *(other for other in group if other is not one))]
    known = torch.cat([code for code in codes if code is not None]) if one.codes is not None else None
    return replace(one, updates=tuple(other.updates[0] for other in group), codes=known)


def _imprint(run: Run, threat: ThreatModel, state: Tensors, seed: int) -> Imprinted:
    """Make the hypernetwork of a malicious server, which knows images like the clients': here all their test images."""
    if not any(name.endswith("heads.weight") for name in state):
        raise Unsupported(f"The server of {run.method.name!r} sends no hypernetwork.")
    public = torch.cat([run.task.client(number).test[0] for number in run.task.clients])
    bounds = (float(public.min()), float(public.max()))
    images, bodies = max(threat.held, 2), rows_of_body(state, run.task.body_layout.size)
    return imprint(bodies, run.task.body, public=public, images=images, bounds=bounds, seed=seed)


def _fishing(run: Run, state: Tensors) -> list[dict[str, Tensor]]:
    """Return a state for each class whose classifier lets no other class's images change the body.

    Source: Wen et al. (arXiv 2202.00580), class fishing.
    """
    head, body = run.task.head, run.task.body_layout.size
    if not isinstance(head, nn.Linear):
        raise Unsupported("The head is not a linear classifier, as which a server fishes.")
    states = []
    for wanted in range(head.out_features):
        weight, bias = torch.zeros_like(head.weight), torch.zeros_like(head.bias)
        weight[wanted], bias[wanted] = head.weight.detach()[wanted], -_UNLIKELY
        chosen = {"weight": weight, "bias": bias}
        made = dict(state)
        if "head.weight" in state:
            made |= prefixed("head.", chosen)
        elif heads := [name for name in state if name.endswith("heads.bias") and len(state[name]) > body]:
            vector, name = run.task.head_layout.join(chosen), heads[0].removesuffix("bias")
            for part, rows in (("weight", 0 * state[f"{name}weight"][body:]), ("bias", vector)):
                made[name + part] = torch.cat([state[name + part][:body], rows])
        else:
            raise Unsupported(
                f"{run.method.name!r} leaves the classifier with the client: there is nothing to fish with."
            )
        states.append(made)
    return states


def _likeliest(run: Run, seen: Sequence[Observation]) -> Observation:
    """Return the answer whose first linear layer's gradient is most nearly one image's, of rank one."""

    def share(one: Observation) -> float:
        try:
            gradient = run.task.body_layout.split(read_update(run, one.sent, one.received()).first)
        except UsageError:  # nothing came back: the client has no image of this class
            return 0.0
        values = torch.linalg.svdvals(gradient[f"{linear}.weight"]).square()
        return float(values[0] / values.sum().clamp_min(1e-30))

    linear = next((name for name, module in run.task.body.named_modules() if isinstance(module, nn.Linear)), "")
    return max(seen, key=share) if len(seen) > 1 else seen[0]


def _observed(
    method: Method, run: Run, threat: ThreatModel, number: int, state: Tensors, trap: Imprinted | None, draw: int,
    seed: int,
) -> Observation:  # fmt: skip
    if run.task.habits.needs_two and min(threat.held, threat.batch_size) == 1:
        raise Unsupported("This network normalizes over the batch and is not trained on single examples.")
    task = _small_task(run.task, number, threat.held, draw, seed)
    private = method.private_start(run.task, number, seed=run.seed) if threat.first_round else run.private[number]
    client = Client(number, private, method.message(state, number))
    model = LocalModel(task)
    found = method.train(task, model, [client], round=1, seed=seed)
    if not found:
        raise Unsupported(f"Client {number} takes no part under {threat.label}: it protects itself.")
    trained = found[0]
    update = trained.update if threat.asked == 1 else _averaged(method, task, model, client, threat.asked, seed)
    weights = method.weights(run.task, client.received, private)
    inputs, targets = task.client(number).train
    model.train("body")
    body = weights.body.clone().requires_grad_()
    kept = model.layer_state(weights.statistics, seed)
    loss = model.loss(body, weights.head, model.place(inputs), targets, kept)
    (gradient,) = torch.autograd.grad(loss, body)
    movement = trained.weights.body - weights.body
    codes = None
    if "embedding" in private:
        codes = hidden_code(hypernetwork_tensors(client.received), private["embedding"])[None]
    return Observation(number, client.received, trap, (update,), inputs, targets, gradient, movement, codes)


def _averaged(method: Method, task: Task, model: LocalModel, client: Client, asked: int, seed: int) -> Update:
    """Return the mean of a client's answers to the same state."""
    total: dict[str, Tensor] = {}
    for turn in range(asked):
        own = seeds.derive(seed, "asked", turn)
        (one,) = method.train(task, model, [client], round=1, seed=own)
        for name, value in dense_tensors(one.update.tensors, client.received).items():
            total[name] = total.get(name, 0) + value / asked
    return replace(one.update, tensors=total)


def _small_task(task: Task, client: int, held: int, draw: int, seed: int) -> Task:
    data = task.client(client)
    if held > data.n:
        raise UsageError(f"Client {client} has {data.n} examples, not {held}.", cure="Ask for fewer.")
    generator = seeds.torch_generator(seed, "examples", client, draw)
    chosen = torch.randperm(data.n, generator=generator)[:held]
    small = ClientData((data.train[0][chosen], data.train[1][chosen]), data.test)
    return Task(task.body, task.head, {client: small}, task.loss)


def shortened(method: Method, threat: ThreatModel) -> Method:
    """Return the method with the threat model's batch size and steps, and without training of the head alone."""
    if isinstance(method, Hardened):  # the attacker may ask for fewer steps than the client agrees to
        return dataclasses.replace(method, method=shortened(method.method, threat))
    per_epoch = -(-threat.held // threat.batch_size)
    epochs, rest = divmod(threat.local_steps, per_epoch)
    if rest:
        raise UsageError(
            f"{threat.local_steps} steps of {threat.batch_size} are not whole passes over {threat.held} examples.",
            cure=f"Ask for a multiple of {per_epoch} steps.",
        )
    training = getattr(method, "training", None)
    if not isinstance(training, LocalTraining):
        raise Unsupported(f"The local rounds of {method.name!r} cannot be shortened.")
    changes: dict[str, Any] = {"training": training.replace(epochs=epochs, head_epochs=0, batch_size=threat.batch_size)}
    if hasattr(method, "steps"):
        changes["steps"] = threat.local_steps
    if hasattr(method, "phases"):
        kept = [phase for phase in method.phases if phase.trains != "head"]
        changes["phases"] = tuple(phase.replace(epochs=epochs) for phase in kept)
    return dataclasses.replace(method, **changes)  # type: ignore[type-var]


@final
@dataclass(frozen=True)
class AuditConfig:
    """Settings of an audit."""

    # Threat models beside the run's own schedule.
    threats: tuple[ThreatModel, ...] = (
        ThreatModel(first_round=True),
        ThreatModel(),
        ThreatModel(batch_size=8, first_round=True),
        ThreatModel(batch_size=8, server="malicious"),
    )
    further: bool = False  # whether what secure sums and noise leave is attacked as well, where they could be
    images: int = 16  # images that are reconstructed per threat model; intervals need at least 5
    search: Search | None = None  # how long the attacks search; None for their defaults
    summed_over: int = 20  # clients in the average that stands for the published aggregate


@final
@dataclass(frozen=True)
class Exposure:
    """Exposure under one threat model."""

    threat: ThreatModel  # the threat model
    is_own: bool  # whether it is the schedule that the run was trained with
    cosines: tuple[float, ...]  # cosine of the recovered gradient with the client's first gradient, per attacked client
    movements: tuple[float, ...]  # cosine with the movement of the client's body over the round
    # Cosine of the published aggregate's gradient with the client's first one: what is given away anyway.
    aggregate: tuple[float, ...]
    psnr: tuple[float, ...] = ()  # empty if none could be made
    ssim: tuple[float, ...] = ()  # likewise
    random_psnr: tuple[float, ...] = ()
    average_psnr: tuple[float, ...] = ()
    # Share of tokens read at their places, where inputs are text, and that of the other clients' most frequent tokens.
    tokens: tuple[float, ...] = ()
    frequent: tuple[float, ...] = ()
    # The nearest images, shape `(n, c, h, w)`, within 0 and 1.
    originals: tuple[Tensor, ...] = field(default=(), repr=False)
    reconstructions: tuple[Tensor, ...] = field(default=(), repr=False)
    why_no_images: str = ""  # why no image could be made, or empty
    attack: str = ""  # which estimate of the gradient was nearest
    best_attacks: tuple[str, ...] = ()
    """For each attacked update, the attack whose image was nearest."""
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
        return max(_mean(self.random_psnr), _mean(self.average_psnr))

    @property
    def verdict(self) -> Words:
        """Meaning of the exposure: an outcome, and words."""
        if not self.cosines:
            return "told", self.why_no_images
        near, gain = _mean(self.cosines), _mean(self.psnr) - self.guess if self.psnr else None
        return _VERDICT([
            Finding("gradient", near), Finding("gradient beyond the aggregate's", near - _mean(self.aggregate)),
            Finding("images, clearly above a guess", gain), Finding("images above a guess", gain),
            Finding("text above a guess", _mean(self.tokens) - _mean(self.frequent) if self.tokens else None),
        ], searched=self._searched, below="yes" if self._surely_below else "")  # fmt: skip

    @property
    def _searched(self) -> str:
        """The image attacks and their budget, in words."""
        names = " and ".join(self.image_attacks) or "no attack"
        return f"{names}, {self.seconds:.0f} processor seconds an update"

    @property
    def _surely_below(self) -> bool:
        """Whether every attack that fits was searched, and its images lie below a guess by their interval."""
        if self.not_searched or not self.psnr:
            return False
        gains = [p - max(r, a) for p, r, a in zip(self.psnr, self.random_psnr, self.average_psnr, strict=True)]
        ends = ends_if_enough(gains, seed=0)
        return ends is not None and ends[1] < 0


def _words(
    inexact: bool, hidden: bool, unclear: bool | None, unseen: bool | None, unread: bool | None, *, searched: str,
    below: str,
) -> Words:  # fmt: skip
    text = "The update reveals no more about the client's gradient than the published aggregate"
    if not hidden:
        text = "The update reveals more about the client's gradient than the published aggregate"
    if not inexact:
        text = "The server computes the client's gradient exactly"
    no_image = f"no image comes out ({searched})" if below else f"no image was found ({searched})"
    seen = {None: "", False: f"; its images can be reconstructed ({searched})", True: f"; {no_image}"}[unclear]
    if unclear and unseen is False:
        seen = f"; images leak a little ({searched})"
    if unread is not None:
        seen += "; no text comes out" if unread else "; its text can be read"
    known = not (inexact and hidden) or unclear is False or unread is False
    return "broken" if known else "partly" if unclear and unseen is False else "told", f"{text}{seen}."


_VERDICT = Conclusion(
    "federate: exposure",
    [
        Criterion("gradient", "lower", than=0.99, strict=True),
        Criterion("gradient beyond the aggregate's", "lower", than=MARGIN_COSINE),
        Criterion("images, clearly above a guess", "lower", than=3.0, needed=False),
        Criterion("images above a guess", "lower", than=MARGIN_PSNR, needed=False),
        Criterion("text above a guess", "lower", than=MARGIN_TOKENS, needed=False),
    ],
    _words,
)


def _training(run: Run) -> LocalTraining:
    training: LocalTraining = getattr(run.method, "training", LocalTraining())
    return training


def own_threat(run: Run) -> ThreatModel:
    """Return the schedule that the run was trained with, as a threat model of its smallest client."""
    training = _training(run)
    examples = min(run.task.client(number).n for number in run.task.clients)
    size = min(training.batch_size, examples)
    return ThreatModel(size, training.epochs * -(-examples // size), examples)


def exposure(
    run: Run, threat: ThreatModel, *, images: int, summed_over: int, seed: int, is_own: bool = False,
    gradients: int = 0, search: Search | None = None, work: shown.Task | None = None,
) -> Exposure:  # fmt: skip
    """Attack several clients under one threat model: all of their gradients, at least `gradients`, and some images."""
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
        observed = list(_observations(run, threat, max(images, gradients), summed_over, seed))
    except Unsupported as reason:
        return Exposure(threat, is_own, (), (), (), why_no_images=str(reason))
    read, found_by = zip(*(_guesses(run, seen, threat) for seen, _ in observed), strict=True)
    published = [anyway for _, anyway in observed]
    strongest, anyway = (_strongest(found, [seen for seen, _ in observed]) for found in (found_by, published))
    for draw, (seen, _) in enumerate(observed):
        recovered = replace(read[draw], first=found_by[draw][strongest])
        cosines.append((
            cosine(recovered.first, seen.gradient), cosine(-recovered.gradient, seen.movement),
            cosine(published[draw][anyway], seen.gradient),
        ))  # fmt: skip
        if draw >= images:
            continue
        try:
            if not seen.images.is_floating_point():
                texts.append(_read(run, recovered.first, seen))
            if not seen.gradient.any():  # a client that is certain sends nothing, and the attacker can but guess
                found, reasons = [Candidates("guess", _another(run, seen, seed), 0.0)], list[str]()
            else:
                evidence = _evidence(run, recovered, seen, threat, (low, high))
                found, reasons = reconstruct(evidence, search or Search(), seed=seeds.derive(seed, "image", draw))
            truth, every = unit(seen.images), [unit(one.images) for one in found]
            place, original, image, quality = nearest_pair(every, truth, psnr)
        except Unsupported as reason:
            why = str(reason)
        else:
            guesses = (
                nearest_pair([unit(g)], truth, psnr)[3] for g in (_another(run, seen, seed), _average(run, seen))
            )
            alike = ssim(image[None], original[None]) if min(image.shape[1:]) >= SSIM_WINDOW else math.nan
            qualities.append((quality, float(alike), *guesses))
            pairs.append((original, image))
            searches.append((found[place].attack, sum(one.seconds for one in found)))
            tried.update(dict.fromkeys(one.attack for one in found))
            left_out.update(dict.fromkeys(reason for reason in reasons if "only up to" in reason))
        if work is not None:
            work.update(1)
    first, movement, given_anyway = zip(*cosines, strict=True)
    psnrs, ssims, random, average = zip(*qualities, strict=True) if qualities else ((), (), (), ())
    ssims = tuple(value for value in ssims if not math.isnan(value))  # of images smaller than its window there is none
    originals, made = zip(*pairs, strict=True) if pairs else ((), ())
    read, frequent = zip(*texts, strict=True) if texts else ((), ())
    return Exposure(
        threat, is_own, first, movement, given_anyway, psnrs, ssims, random, average, read, frequent, originals, made,
        why, strongest, tuple(name for name, _ in searches), tuple(tried), tuple(left_out),
        _mean([seconds for _, seconds in searches]) if searches else 0.0,
    )  # fmt: skip


def _observations(
    run: Run, threat: ThreatModel, count: int, summed_over: int, seed: int
) -> Iterator[tuple[Observation, Mapping[str, Tensor]]]:
    """Yield attacked updates, each with what the average of `summed_over` clients gives away of gradients anyway."""
    many = max(threat.summed_over, min(summed_over, len(run.task.clients)))
    for draw in range(-(-count // many)):
        seen = observe(run, threat, run.task.clients[:many], draw=draw, seed=seed)
        everyone = tuple({update.client: update for one in seen for update in one.updates}.values())
        published = replace(seen[0], updates=everyone)
        _, average = _guesses(run, published, ThreatModel())
        for one in seen[: count - draw * many]:
            yield one, average


def _others(run: Run, seen: Observation) -> list[int]:
    return [number for number in run.task.clients if number != seen.client] or [seen.client]


def _average(run: Run, seen: Observation) -> Tensor:
    """Return the average image of the other clients."""
    means = [run.task.client(number).train[0].mean(0) for number in _others(run, seen)]
    return torch.stack(means).mean(0, keepdim=True)


def _another(run: Run, seen: Observation, seed: int) -> Tensor:
    """Return a random image of another client: what a guess looks like."""
    others, generator = _others(run, seen), seeds.torch_generator(seed, "guess", seen.client)
    inputs = run.task.client(others[int(torch.randint(len(others), (1,), generator=generator))]).train[0]
    return inputs[torch.randint(len(inputs), (1,), generator=generator)]


def read_update(run: Run, sent: Tensors, received: Tensors) -> RecoveredGradient:
    """Return what the server computes from what it sent and received."""
    if change := _change(run, sent, received):
        return change.recovered()
    training = _training(run)
    body = {name.removeprefix("body."): value for name, value in sent.items() if name.startswith("body.")}
    if not body:
        raise Unsupported(f"{run.method.name!r} shares nothing of the body, so there is nothing to attack.")
    layout = run.task.body_layout
    start = layout.join(body).double()
    end = layout.join({name: received[f"body.{name}"] for name in body}).double()
    gradient = (start - end) / training.lr - training.weight_decay * start
    nothing = torch.empty(0, dtype=torch.float64)
    return RecoveredGradient(gradient, gradient, nothing, nothing, start, end - start, torch.ones(1).double())


def _change(run: Run, sent: Tensors, received: Tensors) -> HypernetworkChange | None:
    """Return the change of the hypernetwork that generates the body, if the method has one."""
    if not any(name.endswith("heads.weight") for name in sent):
        return None
    training, size = _training(run), run.task.body_layout.size
    before, after = (rows_of_body(state, size) for state in (sent, received))
    return HypernetworkChange(before, after, lr=training.lr, weight_decay=training.weight_decay)


def _guesses(run: Run, seen: Observation, threat: ThreatModel) -> tuple[RecoveredGradient, dict[str, Tensor]]:
    """Return what is read off an update, and what each attack takes for the first gradient, by the attack's name."""
    received = seen.received()
    change = _change(run, seen.sent, received)
    read = change.recovered() if change else read_update(run, seen.sent, received)
    found = {"inputs": read.first}
    if change is not None and seen.codes is not None:
        found["singular vector"] = singular_gradient(change)
        if threat.known:
            found["matched filter"] = separate_clients(change, seen.codes)[0]
        if threat.server == "thresholds":  # one of these is the client's; the attacker sees which are single ones
            candidates = read_thresholds(change)
            found["thresholds"] = max(candidates, key=lambda one: cosine(one, seen.gradient))
    return read, found


def _strongest(guesses: Sequence[Mapping[str, Tensor]], seen: Sequence[Observation]) -> str:
    """Return the attack whose guesses are nearest to the truth on average; the plainest where others gain nothing."""

    def quality(name: str) -> float:
        return sum(cosine(one[name], own.gradient) for one, own in zip(guesses, seen, strict=True)) / len(seen)

    return max(guesses[0], key=lambda name: quality(name) + 1e-4 * (name == "inputs"))


def _evidence(
    run: Run, recovered: RecoveredGradient, seen: Observation, threat: ThreatModel, bounds: Bounds
) -> Evidence:
    """Return what the server has of one client to reconstruct images from."""
    held = len(seen.images) * len(seen.updates)
    return Evidence(
        run.task, _training(run), recovered, seen.sent, seen.received(), held, tuple(seen.images.shape[1:]), bounds,
        threat.local_steps, threat.batch_size, len(seen.updates), seen.trap,
    )  # fmt: skip


def _read(run: Run, gradient: Tensor, seen: Observation) -> tuple[float, float]:
    """Return the share of tokens at their places that were read, for the nearest sequence, and that of a guess."""
    layout, length = run.task.body_layout, seen.images.shape[1]
    params = {name: value.detach() for name, value in run.task.body.named_parameters()}
    found = read_text(run.task.body, params, layout.split(gradient), length)
    others = torch.cat([run.task.client(number).train[0] for number in _others(run, seen)])
    shares = [(guess == seen.images).double().mean(1).max() for guess in (found, others.mode(0).values)]
    return float(shares[0]), float(shares[1])


def _pixel_range(run: Run) -> tuple[float, float]:
    """Return the range of all clients' inputs: the server knows how images are normalized."""
    inputs = [run.task.client(number).train[0] for number in run.task.clients]
    return min(float(x.min()) for x in inputs), max(float(x.max()) for x in inputs)


def cosine(a: Tensor, b: Tensor) -> float:
    """Return the cosine of two vectors, computed in float64."""
    return float(torch.cosine_similarity(a.double(), b.double(), dim=0))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def audit(run: Run, config: AuditConfig | None = None, *, seed: int, progress: Progress = QUIET) -> list[Exposure]:
    """Attack a federation's updates: what would its server have seen?

    Args:
        run: A trained federation.
        config: Threat models beside the run's own schedule, and how many images are attacked under each.
        seed: Seed of the choice of images and of the attacks.
        progress: Where to tell how far the work is.

    Returns:
        One exposure per threat model, that of the run's own schedule first; `add_sections` shows them in a report.
    """
    config, own = config or AuditConfig(), own_threat(run)
    others = [*config.threats, *_further(run)] if config.further else config.threats
    threats = [(own, True), *((threat, False) for threat in others if threat != own)]
    about: Any = {
        "images": config.images, "summed_over": config.summed_over, "seed": seed, "search": config.search,
    }  # fmt: skip
    with progress.task("attacked updates", total=len(threats) * config.images, unit="updates") as work:
        return [exposure(run, threat, is_own=is_own, work=work, **about) for threat, is_own in threats]


def _further(run: Run) -> list[ThreatModel]:
    """Return threat models that take sums apart, and for methods with noise those that average it away."""
    if not any(name.endswith("heads.weight") for name in run.state):
        return []
    many = min(20, len(run.task.clients))
    sums = [
        ThreatModel(first_round=True, summed_over=many, known=True),
        ThreatModel(first_round=True, summed_over=many, server="thresholds"),
    ]
    noise = isinstance(run.method, Hardened) and run.method.noise is not None
    asked = [ThreatModel(first_round=True, known=True), ThreatModel(first_round=True, known=True, asked=4)]
    return [*(sums if many > 1 else []), *(asked if noise else [])]


def exposure_findings(exposures: Sequence[Exposure], *, seed: int) -> list[Finding]:
    """Return findings of each threat model; those of the run's own schedule have targets, the others are reported."""
    findings: list[Finding] = []
    for one in exposures:
        if not one.cosines:
            name = f"gradient recovered, {one.threat.label}"
            findings.append(Finding(name, None, unit="cosine", detail={"reason": one.why_no_images}))
            continue
        anyway, label = _mean(one.aggregate), one.label
        detail = {"verdict": one.verdict[1], "movement": list(one.movements), "aggregate": list(one.aggregate)}
        target = round(anyway + MARGIN_COSINE, 4) if one.is_own else None
        name = f"gradient recovered, {label}"
        findings.append(mean_finding(name, one.cosines, "cosine", seed, target=target, baseline=anyway, detail=detail))
        if one.tokens:
            guess = _mean(one.frequent)
            target = round(guess + MARGIN_TOKENS, 4) if one.is_own else None
            findings.append(mean_finding(f"tokens read, {label}", one.tokens, "", seed, target=target, baseline=guess))
            continue
        if not one.psnr:
            reason = one.why_no_images or "no image was attacked"
            findings.append(Finding(f"PSNR, {label}", None, unit="dB", detail={"reason": reason}))
            continue
        target = round(one.guess + MARGIN_PSNR, 2) if one.is_own else None
        guesses = {
            "random images": list(one.random_psnr), "average images": list(one.average_psnr),
            "attacks": list(one.image_attacks), "best": list(one.best_attacks), "not searched": list(one.not_searched),
            "processor seconds": round(one.seconds, 1),
        }  # fmt: skip
        findings += [
            mean_finding(f"PSNR, {label}", one.psnr, "dB", seed, target=target, baseline=one.guess, detail=guesses),
            *([mean_finding(f"SSIM, {label}", one.ssim, "", seed)] if one.ssim else []),
        ]
    return findings


def mean_finding(
    name: str, values: Sequence[float], unit: str, seed: int, *, target: float | None = None,
    baseline: float | None = None, detail: Mapping[str, Any] | None = None,
) -> Finding:  # fmt: skip
    """Return the finding of a mean over clients, with an interval where there are enough of them."""
    return Finding(
        name, _mean(values), ci95=ends_if_enough(values, seed=seed), n=len(values), unit=unit, better="lower",
        target=target, baseline=baseline, seeds=(seed,), detail={**(detail or {}), "values": list(values)},
    )  # fmt: skip


def exposure_table(exposures: Sequence[Exposure]) -> Table:
    """Return one row per threat model, with its verdict."""
    text = any(one.tokens for one in exposures)
    seen = (Column("tokens read", "", "lower"), Column("frequent tokens")) if text else (
        Column("PSNR", "dB", "lower"), Column("random image", "dB"), Column("average image", "dB"),
        Column("SSIM", "", "lower"),
    )  # fmt: skip
    about = ("threat model", "attack", Column("gradient, cosine", "", "lower"), Column("published aggregate, cosine"))
    columns = (*about, *seen, "verdict")
    rows = []
    for one in exposures:
        images = (one.psnr, one.random_psnr, one.average_psnr, one.ssim)
        measured = (one.cosines, one.aggregate, *((one.tokens, one.frequent) if text else images))
        rows.append(
            (one.label, one.attack, *(_mean(values) if values else None for values in measured), one.verdict[1])
        )
    notes = ("The server knows model, settings and initial state; no label is used.",)
    return Table("What the server could have seen", columns, rows, notes)


def exposure_figure(exposures: Sequence[Exposure]) -> Figure | None:
    """Draw originals above reconstructions, threat model by threat model; None if there are none."""
    shown = [one for one in exposures if one.reconstructions]
    if not shown:
        return None
    rows, names = [], []
    for one in shown:
        for name, images in (("original", one.originals), (one.threat.label, one.reconstructions)):
            rows.append([image.permute(1, 2, 0).float() for image in images[:8]])
            names.append(name)
    return image_grid(
        rows, rows=names, columns=[str(index + 1) for index in range(len(rows[0]))],
        alt="Originals and what the server reconstructs from one client's update, by threat model.",
        caption="Each reconstruction lies below the nearest of the attacked client's images.",
    )  # fmt: skip


def accuracy(run: Run, config: AuditConfig, *, seed: int, progress: Progress = QUIET) -> Section:
    """Report accuracy before and after local training in the last round."""
    return Section(
        "Accuracy", accuracy_findings(run, seed=seed), figures=[training_figure(run.rounds, run.method.name)],
        tables=[client_table(run), *odd_clients(run.rounds)], question="How well does the personalized model do?",
        intro="Before: the model that a client has from what it received and what it keeps. After: the same client's "
        "model when its local training ends. Each client counts once.",
    )  # fmt: skip


def rounds_section(rounds: Sequence[Round], method: str, *, seed: int) -> Section:
    """Report a federation from its history alone, as a Flower server keeps it.

    Args:
        rounds: The finished rounds.
        method: The method's name.
        seed: Seed of the intervals.
    """
    measured = [done for done in rounds if done.after]
    findings = [Finding("rounds", len(rounds), detail={"method": method})]
    figures = []
    if measured:
        findings = [*_accuracy_of_rounds(rounds, method, seed=seed), *findings]
        figures = [training_figure(rounds, method)]
    return Section(
        "Accuracy", findings, figures=figures, tables=odd_clients(rounds),
        question="How well does the personalized model do?",
        intro="From the history that the server of a Flower run keeps. Accuracies are what clients reported.",
    )  # fmt: skip


def gradient_inversion(run: Run, config: AuditConfig, *, seed: int, progress: Progress = QUIET) -> Section:
    """Attack the run's updates under its own schedule and other threat models."""
    return exposure_section(audit(run, config, seed=seed, progress=progress), seed=seed)


def exposure_section(exposures: Sequence[Exposure], *, seed: int) -> Section:
    """Return what an audit found."""
    figure, own = exposure_figure(exposures), next(one for one in exposures if one.is_own)
    return Section(
        "What the server could have seen", exposure_findings(exposures, seed=seed), figures=[figure] if figure else [],
        tables=[exposure_table(exposures)], question="What could the server have seen?",
        conclusion=f"This run's schedule: {own.verdict[1]}", outcome=own.verdict[0],
        intro="One client's update is attacked as an honest but curious server would: it knows the model, the settings "
        "and what it sent, and no label. Findings about the schedule of this run have targets; shorter schedules are "
        "reported to show what protects and what does not.",
    )  # fmt: skip


def promises(run: Run, delta: float) -> list[Guarantee]:
    """Return the ε of all answers of the run together, for the example or client that they say most about.

    Args:
        run: A trained federation.
        delta: δ, in (0, 1).

    Returns:
        One guarantee, or none if the method adds no noise.
    """
    found = task_guarantee(run.task, run.method, run.answers, delta)
    return [] if found is None else [found]


def _privacy(run: Run, delta: float) -> list[Section]:
    return [
        Section(
            "Differential privacy",
            [Finding(
                f"ε of one {one.unit}, {one.adjacency}", one.epsilon if math.isfinite(one.epsilon) else None,
                better="lower", detail=one.to_json(),
            )],
            question=f"How much can all answers together say about one {one.unit}?", intro=f"{one}\n\n{_COVERS}",
        )
        for one in promises(run, delta)
    ]  # fmt: skip


_COVERS = (
    "ε covers what clients send to the server. It does not cover the accuracies and losses of this report, which are "
    "computed without noise, and it holds against readers who do not know the run's seed, from which a simulation "
    "draws its noise."
)


def odd_clients(rounds: Sequence[Round]) -> list[Table]:
    """Return who was left out of rounds or looked odd, and why; none where nobody did."""
    said: dict[tuple[int, str], list[int]] = {}
    for done in rounds:
        for kind, whys in (("left out", done.refused), ("suspicious", done.suspects)):
            for client, why in whys.items():
                said.setdefault((client, f"{kind}: {why.partition(' (')[0]}"), []).append(done.round)
    rows = [(str(client), why, len(rounds), str(rounds[0])) for (client, why), rounds in sorted(said.items())]
    return [Table("Clients left out or suspicious", ("client", "what", "rounds", "first round"), rows)] if rows else []


def add_sections(
    report: Report, run: Run, exposures: Sequence[Exposure], *, seed: int, delta: float = 1e-5
) -> list[Finding]:
    """Add what was trained, and what an audit found if there was one, to a report; return all findings."""
    ran = ("accuracy", "gradient-inversion") if exposures else ("accuracy",)
    sections = [of_treatment(accuracy(run, AuditConfig(), seed=seed), "federate", ran), *_privacy(run, delta)]
    if exposures:
        sections.append(exposure_section(exposures, seed=seed))
    for section in sections:
        report.add(section)
    return [finding for section in sections for finding in section.findings]


def accuracy_findings(run: Run, *, seed: int) -> list[Finding]:
    """Return the last round's accuracy before and after local training, each the mean over its clients."""
    return _accuracy_of_rounds(run.rounds, run.method.name, seed=seed)


def _accuracy_of_rounds(rounds: Sequence[Round], method: str, *, seed: int) -> list[Finding]:
    # Intervals are over clients, not over seeds: they say how far another draw of clients might differ.
    last = next(round for round in reversed(rounds) if round.after)
    about: dict[str, Any] = {"method": method, "round": last.round}
    return [
        _mean_finding("accuracy of the received model, before local training", last.before, about, seed),
        _mean_finding("accuracy of the personal model, after local training", last.after, about, seed),
        Finding("clients left out of rounds", sum(len(round.refused) for round in rounds), detail=about),
    ]


def _mean_finding(name: str, accuracies: Mapping[int, float], about: dict[str, Any], seed: int) -> Finding:
    values = [100 * value for value in accuracies.values()]
    return Finding(
        name, _mean(values), ci95=ends_if_enough(values, seed=seed), n=len(values), unit="%", better="higher",
        seeds=(seed,), detail=about,
    )  # fmt: skip


def training_figure(rounds: Sequence[Round], method: str) -> Figure:
    """Draw accuracy by round, before and after local training."""
    measured = [round for round in rounds if round.after]
    x = [round.round for round in measured]
    series = {
        "after local training": (x, [100 * (round.mean_after or 0) for round in measured]),
        "before": (x, [100 * (round.mean_before or 0) for round in measured]),
    }
    alt = f"Mean accuracy of {method}'s clients by round, before and after local training."
    return lines(series, alt=alt, xlabel="round", ylabel="mean accuracy, %")


def client_table(run: Run) -> Table:
    """Return one row per client of the last measured round."""
    last = next(round for round in reversed(run.rounds) if round.after)
    columns = ("client", Column("examples"), Column("before", "%", "higher"), Column("after", "%", "higher"))
    rows = [
        (str(client), run.task.client(client).n, 100 * last.before[client], 100 * last.after[client])
        for client in sorted(last.after)
    ]
    return Table(f"Accuracy of each client in round {last.round}", columns, rows)
