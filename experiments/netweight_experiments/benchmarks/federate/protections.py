"""Protections of clients under attack and their cost in accuracy: HyperFL on Fashion-MNIST, by informed attackers.

    NETWEIGHT_DATA=... python -m netweight_experiments.benchmarks federate.protections

measures the table of docs/gradient-inversion-results.md; `--accuracy` trains each protection from one seed and
schedule. The attacks are those of `netweight federate audit --threat`, on the first round, whose state is the method's
start. Secure sums change nothing but the rounding of what clients send (docs/secure-sums.md), which is done here in one
process in the same steps; the protocol itself is tested elsewhere. A run that is stopped goes on from its last round in
`--work`; the file is written after every arm and keeps the arms that it has.
"""

import json
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Annotated

import torch

from netweight.core import seeds
from netweight.core.progress import Progress
from netweight.methods.federate import train
from netweight.methods.federate.engine import TrainedFederation
from netweight.methods.federate.exposure import exposure
from netweight.methods.federate.exposure_report import exposure_findings
from netweight.methods.federate.method import Method
from netweight.methods.federate.plan import FederationPlan
from netweight.methods.federate.threats import ThreatModel
from netweight.methods.federate.updates import dense_tensors
from netweight_experiments.benchmarks.script import RESULTS, fill

CLIP, TARGET_RANGE = 2.0, 2**22  # of plugins/flower/secure_sum.py and of Flower's SecAgg+
SUMS = "secure sums, refusal, at least 60 steps"
ROUNDS = 40
STEPS = 60  # 5 epochs of 600 images in batches of 50: the paper's schedule
ARMS = {
    "plain": {},
    SUMS: {"refuse": True, "minimum_steps": STEPS},
    "noise 0.01": {"noise": 0.01, "clip": 1.0},
    "noise 0.003": {"noise": 0.003, "clip": 1.0},
}
STEP = {"first_round": True}
SUM = {**STEP, "summed_over": 20}
# Protection, settings of the federation, what the server does, the accuracy arm that says what it costs.
ROWS = (
    ("none", {}, STEP, "plain"),
    ("none", {}, {**STEP, "batch_size": 50}, "plain"),
    ("none", {}, {**STEP, "batch_size": 8, "server": "imprint"}, "plain"),
    ("none, FedAvg", {"method": "fedavg"}, {**STEP, "batch_size": 50}, None),
    ("none, FedAvg", {"method": "fedavg"}, {**STEP, "batch_size": 50, "server": "fishing"}, None),
    ("at least 60 steps", {"minimum_steps": STEPS},
     {**STEP, "batch_size": 50, "local_steps": STEPS, "examples": 600}, SUMS),
    *((f"noise σ = {noise} × clip", {"noise": noise}, {**STEP, "knows_embeddings": True}, f"noise {noise}")
      for noise in (0.001, 0.003, 0.01, 0.03)),
    ("noise σ = 0.01 × clip", {"noise": 0.01}, {**STEP, "knows_embeddings": True, "queries": 4}, "noise 0.01"),
    ("noise σ = 0.01 × clip, no limit of answers", {"noise": 0.01},
     {**STEP, "knows_embeddings": True, "queries": 20}, "noise 0.01"),
    ("secure sum", {}, SUM, SUMS),
    ("secure sum", {}, {**SUM, "knows_embeddings": True}, SUMS),
    ("secure sum", {}, {**SUM, "server": "thresholds"}, SUMS),
    ("refusal", {"refuse": True}, {**STEP, "batch_size": 50, "server": "imprint"}, SUMS),
    ("secure sum, refusal", {"refuse": True}, {**SUM, "batch_size": 50, "server": "thresholds"}, SUMS),
)  # fmt: skip


def attacked(data, changes, threat, images, seed):
    """Attack the first round under a protection; return what it gives away, as JSON."""
    plan = FederationPlan(data=data, **{"method": "hyperfl", **changes})
    task = plan.task()
    method = plan.make_method(task)
    private = {client: method.private_start(task, client, seed=plan.seed) for client in task.clients}
    run = TrainedFederation(task, method, method.start(task, seed=plan.seed), private, (), plan.seed)
    found = exposure(run, ThreatModel(**threat), updates=images, summed_over=len(task.clients), seed=seed)
    kept = ("cosines", "aggregate", "psnr", "ssim", "average_psnr", "random_psnr")
    values = {name: list(getattr(found, name)) for name in kept}
    findings = [one.to_json() for one in exposure_findings([found], seed=seed)]
    words = {"threat": asdict(found.threat), "label": found.label, "attack": found.attack}
    words["verdict"] = list(found.verdict)
    return {**words, **values, "findings": findings}


def table(rows, accuracy):
    """Return the table of the docs."""
    columns = (
        "protection | what the server observes | cosine of the gradient | cosine of the average | PSNR, dB | "
        "PSNR of a guess, dB | withstands this attack | accuracy lost, points"
    )
    lines = [f"| {columns} |", "|---" * 8 + "|"]
    last = {arm: list(found["before and after"].values())[-1][1] for arm, found in accuracy.items()}
    for protection, arm, threat, row in rows:
        cost = f"{last['plain'] - last[arm]:.2f}" if {arm, "plain"} <= last.keys() and arm != "plain" else ""
        label = ThreatModel(**threat).label.removesuffix(", first round")
        protection = protection.replace(" × clip", "")  # the page says of what σ is a multiple
        if not row["cosines"]:
            lines.append(f"| {protection} | {label} | the client refuses to answer | | | | yes | {cost} |")
            continue
        interval = row["findings"][0]["ci95"]
        spread = f" ({interval[0]:.3f} to {interval[1]:.3f})" if interval and interval[1] - interval[0] > 0.002 else ""
        guess = max(mean(row["random_psnr"]), mean(row["average_psnr"])) if row["psnr"] else None
        images = (f"{mean(row['psnr']):.1f}", f"{guess:.1f}") if row["psnr"] else ("", "")
        holds = {"broken": "no", "partly": "partly", "told": "yes"}[row["verdict"][0]]
        cosine, anyway = mean(row["cosines"]), mean(row["aggregate"])
        lines.append(f"| {protection} | {label} | {cosine:.3f}{spread} | {anyway:.3f} | "
                     f"{images[0]} | {images[1]} | {holds} | {cost} |")  # fmt: skip
    return "\n".join(lines)


@dataclass(frozen=True)
class Summed:
    """A method whose updates travel as they do under masks: dense changes, each rounded at random to a grid."""

    method: Method

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.method, name)

    def train(self, task, model, clients, *, round, seed):
        trained = self.method.train(task, model, clients, round=round, seed=seed)
        received = {client.number: client.message for client in clients}
        return [replace(one, update=self._rounded(one.update, received[one.update.client], seed)) for one in trained]

    def _rounded(self, update, received, seed):
        generator = seeds.torch_generator(seed, "masks", update.client, update.round)
        step, sent = 2 * CLIP / TARGET_RANGE, {}
        for name, value in dense_tensors(update.tensors, received).items():
            change = value - received[name]
            if float(change.abs().max()) > CLIP:
                raise ValueError(f"The change of {name} in round {update.round} cannot be summed.")
            sent[name] = received[name] + step * torch.floor(
                change / step + torch.rand(change.shape, generator=generator)
            )
        return replace(update, tensors=sent)


def run(arm, rounds, work):
    """Train one arm; return its curve in percent and how many updates were missing."""
    plan = FederationPlan(data="fashion-mnist", method="hyperfl", rounds=rounds, evaluate_every=5, **ARMS[arm])
    task = plan.task()
    method = plan.make_method(task)
    if arm.startswith("secure sums"):
        method = Summed(method)
    done = train(task, method, plan, folder=work / arm, save_every=5, progress=Progress("auto"))
    curve = {r.round: [round(100 * r.mean_before, 2), round(100 * r.mean_after, 2)] for r in done.rounds if r.after}
    return {"before and after": curve, "missing": sum(len(r.refusals) for r in done.rounds)}


def page(result):
    """Return the table of attacks, and of the accuracy that protections cost, from a result."""
    accuracy = json.loads(sorted(RESULTS.glob("federate*/protections-accuracy-*.json"))[-1].read_text())["arms"]
    curves = json.loads((RESULTS / "federated" / "fashion-mnist-curves.json").read_text())["runs"]
    plain = {round: values for round, *values in curves["fashion-mnist-20-hyperfl-520"]["curve"] if round <= ROUNDS}
    accuracy = {"plain": {"before and after": plain}} | accuracy
    rows = result["rows"]
    return table(
        [(name, arm, threat, rows[f"{name}: {json.dumps(threat)}"]) for name, _, threat, arm in ROWS], accuracy
    )


def main(
    *,
    accuracy: bool = False,
    images: int = 5,
    seed: int = 0,
    data: str = "fashion-mnist",
    only: Annotated[str, "only the attack rows whose name contains this"] = "",
    rounds: int = ROUNDS,
    arms: Annotated[tuple[str, ...], ARMS] = tuple(ARMS),
    work: Path = Path("runs/protections"),
    output: Path,
):
    if accuracy:
        yield from fill(output, "arms", ((arm, partial(run, arm, rounds, work)) for arm in arms))
        return
    named = {f"{row[0]}: {json.dumps(row[2])}": partial(attacked, data, *row[1:3], images, seed) for row in ROWS}
    yield from fill(output, "rows", ((name, attack) for name, attack in named.items() if only in name))
