"""The stop of `federate`: sites train together on handwritten digits, and a server tries to see what they hold.

Ten sites, one seed, one attacked step: it shows what is measured and how. The attacks are honest ones and, for secure
sums, one of a server that lies; each protection is attacked by someone who knows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, final

import torch
from safetensors.torch import save_file

from netweight.attacks.gradient_inversion.analytic import heads_gradient, read_thresholds, threshold_trunk
from netweight.attacks.gradient_inversion.tailored import PeelingConfig
from netweight.core import digest
from netweight.core.seeds import torch_generator
from netweight.methods.federate.defenses import Hardened, RefusalLimits, UpdateNoise, refuse_abnormal
from netweight.methods.federate.engine import Run, train
from netweight.methods.federate.folder import FederationPlan
from netweight.methods.federate.hyperfl import rows_of_body
from netweight.methods.federate.report import (
    MARGIN_COSINE,
    MARGIN_PSNR,
    Exposure,
    Observation,
    ThreatModel,
    accuracy_findings,
    exposure,
    exposure_findings,
    exposure_table,
    observe,
    own_threat,
    read_update,
)
from netweight.methods.federate.settings import LocalTraining
from netweight.metrics.intervals import MINIMUM_FOR_BOOTSTRAP, bootstrap
from netweight.report.conclusions import Conclusion, Criterion, Words
from netweight.report.finding import Chapter, Figure, Finding, Table
from netweight.report.plots import image_grid, lines
from netweight.report.report import Report
from netweight.tour.stop import Place, Stop, handed_over

ROUNDS = 5
"""Rounds of each federation."""
IMAGES = 5
"""Sites whose update is attacked; intervals need 5."""
PEELING = PeelingConfig(softening=6, rounds=3)
"""How images are searched for: a fifth of the work that the attack does by itself."""
_SITES, _SEED = 10, 520
_NOISE = UpdateNoise(clip=1.0, multiplier=0.01)
_ONE_STEP = ThreatModel(first_round=True)
_IN_A_SUM = ThreatModel(first_round=True, summed_over=_SITES)
_FEDAVG, _HYPERFL, _NOISY, _SUMMED = "FedAvg", "HyperFL", "HyperFL, noise added", "HyperFL, in a secure sum"
_EXACT = 0.99
"""Cosine from which on a gradient counts as taken."""
_TAKEN = f"{_SUMMED}, a server that lies: single gradients taken"


def _images(name: str, threat: ThreatModel, *, needed: bool) -> Criterion:
    """Good is that reconstructions are no better than a guess that needs no update."""
    return Criterion(f"{name}: PSNR, {threat.label}", "lower", margin=MARGIN_PSNR, needed=needed)


def _judged(plain: bool, noisy: bool | None, summed: bool | None, taken: bool | None) -> Words:
    if plain:
        return "told", "No image came out of HyperFL's update here; that is no proof that none can."
    verdict = "HyperFL alone hides no image: one step gives it away, as under FedAvg."
    held = [name for name, good in (("noise", noisy), ("a secure sum", summed)) if good]
    if held:
        verdict += f" With {' or '.join(held)} it does not"
        verdict += ", but a server that lies takes the sum apart." if taken is False and summed else "."
    return "broken", verdict


_VERDICT = Conclusion(
    "tour: federate",
    [
        _images(_HYPERFL, _ONE_STEP, needed=True),
        _images(_NOISY, _ONE_STEP, needed=False),
        _images(_SUMMED, _IN_A_SUM, needed=False),
        Criterion(_TAKEN, "lower", than=0, needed=False),
    ],
    _judged,
)


def settings() -> Mapping[str, Any]:
    """Return what decides the stop's result."""
    return {
        "rounds": ROUNDS, "images": IMAGES, "peeling": asdict(PEELING), "noise": asdict(_NOISE), "sites": _SITES,
        "seed": _SEED,
    }  # fmt: skip


@final
@dataclass(frozen=True)
class _Sums:
    """What a server that lies takes out of a secure sum, and whether sites notice.

    Attributes:
        cosines: Cosine of each site's gradient with the nearest one that the server reads, one per site.
        refused: Sites that would refuse what was sent, if they looked at it.
    """

    cosines: tuple[float, ...]
    refused: int


@final
@dataclass(frozen=True)
class _Seen:
    """What the server sees.

    Attributes:
        one_step: By method, after one step on one image: the worst that a site can do.
        own: By method, cosines of the gradient read after the schedule that the federation was trained with, one per
            site, and of what the average of all sites gives away of the same gradient.
        strongest: With noise, the cosine of the update's strongest direction with the gradient: what somebody reads
            who knows of the noise.
        sums: A secure sum under a server that lies.
    """

    one_step: Mapping[str, Exposure]
    own: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]]
    strongest: tuple[float, ...]
    sums: _Sums


def make_stop(place: Place) -> Stop:
    """Train two federations on the same digits, attack them alike, and say what the server saw."""
    place.say(f"Ten sites hold 150 handwritten digits each, and train together for {ROUNDS} rounds.")
    runs = {_FEDAVG: _trained("fedavg", place), _HYPERFL: _trained("hyperfl", place)}
    after = ", ".join(f"{name} {100 * (run.rounds[-1].mean_after or 0):.1f} %" for name, run in runs.items())
    place.say(f"Accuracy at the sites, after local training: {after}.")
    seen = _seen(runs, place)
    place.say(f"A server looks at one step on one image. {_images_in_words(seen)}")
    place.say(_sums_in_words(seen.sums))
    report = Report("federate")
    _add_accuracy(report, runs)
    _add_images(report, seen)
    _add_protections(report, seen)
    models = {"the sites' average (FedAvg)": "fedavg.safetensors", "the hypernetwork (HyperFL)": "hyperfl.safetensors"}
    for file, name in zip(models.values(), (_FEDAVG, _HYPERFL), strict=True):
        save_file({key: value.contiguous() for key, value in runs[name].state.items()}, place.folder / file)
    data = [tensor for site in runs[_FEDAVG].task.clients for tensor in runs[_FEDAVG].task.client(site).train]
    inputs = {"digits, as split among sites": digest.of_config([digest.of_tensor(tensor) for tensor in data])}
    return handed_over(report, _chapter(report, seen), seeds=(_SEED,), inputs=inputs, models=models)


def _trained(method: str, place: Place) -> Run:
    plan = FederationPlan(method=method, clients=_SITES, rounds=ROUNDS, seed=_SEED)
    task = plan.task()
    return train(task, plan.make_method(task), plan, progress=place.progress)


def _seen(runs: Mapping[str, Run], place: Place) -> _Seen:
    noisy = replace(runs[_HYPERFL], method=Hardened(runs[_HYPERFL].method, _NOISE))
    looks = {
        _FEDAVG: (runs[_FEDAVG], _ONE_STEP, IMAGES), _HYPERFL: (runs[_HYPERFL], _ONE_STEP, IMAGES),
        _NOISY: (noisy, _ONE_STEP, IMAGES), _SUMMED: (runs[_HYPERFL], _IN_A_SUM, 1),
    }  # fmt: skip
    with place.progress.task("attacked updates", total=3 * IMAGES + 1, unit="updates") as work:
        one_step = {
            name: exposure(run, threat, images=images, summed_over=_SITES, seed=_SEED, peeling=PEELING, work=work)
            for name, (run, threat, images) in looks.items()
        }
    own = {name: _whole_round(run) for name, run in runs.items()}
    return _Seen(one_step, own, _strongest(noisy), _taken_apart(runs[_HYPERFL]))


def _whole_round(run: Run) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Cosines of the gradients read from one more round, and from the average of all sites, with the sites' own."""
    seen = observe(run, own_threat(run), run.task.clients, seed=_SEED)
    average = replace(seen[0], updates=tuple(one.updates[0] for one in seen))
    anyway = read_update(run, average.sent, average.received()).first
    found = [read_update(run, one.sent, one.received()).first for one in seen[:IMAGES]]
    return (
        tuple(_cosine(gradient, one) for gradient, one in zip(found, seen, strict=False)),
        tuple(_cosine(anyway, one) for one in seen[:IMAGES]),
    )


def _strongest(run: Run) -> tuple[float, ...]:
    """Cosine, signs aside, of each noisy update's first singular vector with the site's gradient."""
    seen = observe(run, _ONE_STEP, run.task.clients[:IMAGES], seed=_SEED)
    return tuple(abs(_cosine(_first_singular(run, one), one)) for one in seen)


def _first_singular(run: Run, seen: Observation) -> torch.Tensor:
    weight, bias = heads_gradient(seen.sent, seen.received(), **_rule(run))
    change = torch.cat([weight, bias[:, None]], dim=1)
    strongest: torch.Tensor = change @ torch.linalg.eigh(change.T @ change).eigenvectors[:, -1]
    return strongest


def _taken_apart(run: Run) -> _Sums:
    """Send a trunk of thresholds to all sites, and read single sites out of the sum of their answers."""
    honest = run.method.start(run.task, seed=run.seed)
    private: dict[int, Mapping[str, torch.Tensor]] = {site: _with_own_embedding(run, site) for site in run.task.clients}
    lie = threshold_trunk(honest, seed=_SEED)
    seen = observe(
        replace(run, state=lie, private=private), ThreatModel(summed_over=_SITES), run.task.clients, seed=_SEED
    )
    rows = read_thresholds(seen[0].sent, seen[0].received(), **_rule(run))
    limits = RefusalLimits()
    refused = 0
    for site in run.task.clients:
        images = run.task.client(site).train[0][:50]
        sent = rows_of_body(lie, run.task.body_layout.size)
        refused += bool(
            refuse_abnormal(
                sent, body=run.task.body, embedding=private[site]["embedding"], images=images, limits=limits
            )
        )
    return _Sums(tuple(max(abs(_cosine(row, one)) for row in rows) for one in seen), refused)


def _with_own_embedding(run: Run, site: int) -> dict[str, torch.Tensor]:
    """What a site keeps, with an embedding that it drew by itself: in the paper's code all sites begin with one."""
    private = dict(run.method.private_start(run.task, site, seed=run.seed))
    embedding = private["embedding"]
    private["embedding"] = torch.randn(embedding.shape, generator=torch_generator(_SEED, "own embedding", site))
    return private


def _rule(run: Run) -> dict[str, float]:
    training = getattr(run.method, "training", LocalTraining())
    return {"lr": training.lr, "weight_decay": training.weight_decay}


def _cosine(found: torch.Tensor, seen: Observation) -> float:
    return float(torch.cosine_similarity(found.double(), seen.gradient.double(), dim=0))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _images_in_words(seen: _Seen) -> str:
    guess = seen.one_step[_FEDAVG].guess
    told = "; ".join(f"{name} {_mean(one.psnr):.1f} dB" for name, one in seen.one_step.items() if one.psnr)
    return f"Reconstructed images: {told}; a guess without any update has {guess:.1f} dB."


def _sums_in_words(sums: _Sums) -> str:
    taken = sum(cosine >= _EXACT for cosine in sums.cosines)
    return (
        f"A server that lies takes {taken} of {len(sums.cosines)} single gradients out of a secure sum; "
        f"{sums.refused} of {len(sums.cosines)} sites that look at what they are sent would refuse."
    )


def _chapter(report: Report, seen: _Seen) -> Chapter:
    outcome, verdict = _VERDICT(report.findings)
    return Chapter(
        title="federate: sites train together",
        question="Ten sites train one model and show a server no image. What can the server still see?",
        conclusion=f"{_images_in_words(seen)} {_sums_in_words(seen.sums)}",
        verdict=verdict,
        outcome=outcome,
        command="netweight tour --only federate",
        intro="FedAvg sends a network to a server, HyperFL a hypernetwork that generates one, so that the network "
        "which looks at the images stays at its site. Both are trained on scikit-learn's handwritten digits, split "
        "among ten sites. Then the server's copy of what one site sends is attacked.",
    )


def _add_accuracy(report: Report, runs: Mapping[str, Run]) -> None:
    findings = [
        replace(each, name=f"{name}: {each.name}")
        for name, run in runs.items()
        for each in accuracy_findings(run, seed=_SEED)
    ]
    curves = {
        name: ([one.round for one in run.rounds], [100 * (one.mean_after or 0) for one in run.rounds])
        for name, run in runs.items()
    }
    report.section(
        "Federated: accuracy",
        findings,
        figures=[
            lines(curves, alt="Mean accuracy of the ten sites by round.", xlabel="round", ylabel="accuracy, %",
                  caption="After local training, each on its site's own test digits; the mean of ten sites.")
        ],
        question="How well does each site's model do?",
        intro="Before: the model that a site receives. After: the same when its local training ends. Each site has its "
        "own mixture of digits. Intervals are over sites; with ten of them a difference of some points is chance.",
        conclusion="After local training: "
        + ", ".join(f"{name} {100 * (run.rounds[-1].mean_after or 0):.1f} %" for name, run in runs.items())
        + ".",
    )  # fmt: skip


def _add_images(report: Report, seen: _Seen) -> None:
    findings = [
        replace(each, name=f"{name}: {each.name}", better=None)
        for name in (_FEDAVG, _HYPERFL)
        for each in exposure_findings([seen.one_step[name]], seed=_SEED)
    ]
    findings += [
        _of_cosines(f"{name}: gradient recovered, whole round of this federation", found, _mean(anyway))
        for name, (found, anyway) in seen.own.items()
    ]
    report.section(
        "Federated: what the server sees",
        findings,
        figures=[_grid(seen)],
        tables=[_table("One step on one image", seen, (_FEDAVG, _HYPERFL))],
        question="What can be reconstructed from one site's update?",
        intro="The server is honest but curious: it knows the network, the learning rate and what it sent, and no "
        "label. One step on one image is the worst case; a gradient that is known is as good as the image. Likenesses "
        "are told as PSNR, and as SSIM, where 1 is the same image; the baseline is the better of a random and an "
        "average digit of other sites, for cosines what the published average of all sites gives away.\n\nAfter one "
        "more whole round of this federation (five passes over 150 digits) the table tells of the gradient alone; for "
        "images made of such updates run: netweight federate audit.",
        conclusion=_images_in_words(seen)
        + " "
        + " ".join(
            f"After a whole round {name} gives the gradient away with a cosine of {_mean(found):.2f}, the average of "
            f"all sites with {_mean(anyway):.2f}."
            for name, (found, anyway) in seen.own.items()
        ),
    )


def _add_protections(report: Report, seen: _Seen) -> None:
    noisy, summed = seen.one_step[_NOISY], seen.one_step[_SUMMED]
    findings = [
        replace(each, name=f"{name}: {each.name}", better=None)
        for name, one in ((_NOISY, noisy), (_SUMMED, summed))
        for each in exposure_findings([one], seed=_SEED)
    ]
    findings += [
        _of_cosines(f"{_NOISY}: gradient by the update's strongest direction", seen.strongest, _mean(noisy.aggregate)),
        _of_cosines(f"{_SUMMED}, a server that lies: gradient", seen.sums.cosines, _mean(summed.aggregate)),
        Finding(_TAKEN, sum(cosine >= _EXACT for cosine in seen.sums.cosines), n=len(seen.sums.cosines), seeds=(_SEED,),
                detail={"from a cosine of": _EXACT}),
        Finding(f"{_SUMMED}, a server that lies: sites that refuse, if they look", seen.sums.refused,
                n=len(seen.sums.cosines), seeds=(_SEED,)),
    ]  # fmt: skip
    report.section(
        "Federated: protections, attacked",
        findings,
        tables=[_table("One step on one image, protected", seen, (_NOISY, _SUMMED))],
        question="Which protections hold against somebody who knows them?",
        intro=f"Noise: every site clips its update to a norm of {_NOISE.clip:g} and adds noise of "
        f"{_NOISE.multiplier:g} times that to every value. A secure sum: the server sees the average of ten sites and "
        "nothing else. The server that lies sends thresholds in place of the hypernetwork's first layer, by which the "
        "sum can be taken apart where sites have drawn embeddings of their own. Sites that look at what they are sent "
        "refuse these plain thresholds; an attacker who knows that passes. docs/gradient-inversion.md has the figures, "
        "and docs/federate.md what protections cost.",
        conclusion=f"Noise: {noisy.verdict}; read by its strongest direction the update has a cosine of "
        f"{_mean(seen.strongest):.2f} with the gradient, the average of all sites {_mean(noisy.aggregate):.2f}. "
        f"Sum, an honest server: {summed.verdict}. {_sums_in_words(seen.sums)}",
        warnings=["A secure sum protects from an honest server only."]
        if any(cosine > _mean(summed.aggregate) + MARGIN_COSINE for cosine in seen.sums.cosines)
        else [],
    )


def _table(title: str, seen: _Seen, names: Sequence[str]) -> Table:
    """The exposures of some methods, each a row of its name."""
    table = exposure_table([seen.one_step[name] for name in names])
    rows = [(name, *row[1:]) for name, row in zip(names, table.rows, strict=True)]
    return Table(title, ("method", *table.columns[1:]), rows, table.notes)


def _of_cosines(name: str, values: Sequence[float], anyway: float) -> Finding:
    ci95 = bootstrap(values, seed=_SEED).ci95 if len(values) >= MINIMUM_FOR_BOOTSTRAP else None
    return Finding(
        name, _mean(values), ci95=ci95, n=len(values), unit="cosine", baseline=anyway, seeds=(_SEED,),
        detail={"values": list(values)},
    )  # fmt: skip


def _grid(seen: _Seen) -> Figure:
    """Originals above what the server makes of each site's update."""
    first = seen.one_step[_FEDAVG]
    rows = {"a site's image": first.originals}
    rows |= {f"from {name}": one.reconstructions for name, one in seen.one_step.items() if one.reconstructions}
    most = len(first.originals)
    return image_grid(
        [
            [*(image.permute(1, 2, 0).float() for image in images), *[None] * (most - len(images))]
            for images in rows.values()
        ],
        rows=list(rows),
        columns=[f"site {number}" for number in range(1, most + 1)],
        alt="Digits that sites hold, and what the server reconstructs of each under FedAvg, HyperFL, HyperFL with "
        "noise, and HyperFL in a secure sum.",
        caption="One step on one image. Above what the sites hold, below what the server makes of what they send; a "
        "sum gives one image for all.",
        pixels=64,
    )
