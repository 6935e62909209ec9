"""What clients' protections cost in accuracy: HyperFL on Fashion-MNIST with each, from the same seed and schedule.

    NETWEIGHT_DATA=... python -m netweight_experiments.benchmarks.federate.protections

Secure sums change nothing but the rounding of what clients send (docs/flower.md), which is done here in one process in
the same steps; the protocol itself is tested elsewhere. A run that is stopped goes on from its last round in `--work`;
the file is written after every arm and keeps the arms that it has.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from netweight.core import seeds
from netweight.core.environment import describe
from netweight.core.progress import Progress
from netweight.methods.federate import train
from netweight.methods.federate.defenses import dense_tensors
from netweight.methods.federate.folder import FederationPlan
from netweight.methods.federate.method import Method
from netweight_experiments.benchmarks.script import script, today, write

CLIP, TARGET_RANGE = 2.0, 2**22  # of integrations/flower/secure_sum.py and of Flower's SecAgg+
STEPS = 60  # 5 epochs of 600 images in batches of 50: the paper's schedule
ARMS = {
    "plain": {},
    "secure sums, refusal, at least 60 steps": {"refuse": True, "minimum_steps": STEPS},
    "noise 0.01": {"noise": 0.01, "clip": 1.0},
    "noise 0.003": {"noise": 0.003, "clip": 1.0},
}


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
        received = {client.number: client.received for client in clients}
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
    plan = FederationPlan(data="fashion-mnist", rounds=rounds, evaluate_every=5, **ARMS[arm])
    task = plan.task()
    method = plan.make_method(task)
    if arm.startswith("secure sums"):
        method = Summed(method)
    done = train(task, method, plan.settings(), folder=work / arm, save_every=5, progress=Progress("auto"))
    curve = {r.round: [round(100 * r.mean_before, 2), round(100 * r.mean_after, 2)] for r in done.rounds if r.after}
    return {"before and after": curve, "missing": sum(len(r.refused) for r in done.rounds)}


def main():
    parser = script(__doc__, "federated/protections-accuracy")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--work", type=Path, default=Path("runs/protections"))
    given = parser.parse_args()
    found = {"what": __doc__.splitlines()[0], "date": today(), "seed": FederationPlan.seed, "environment": describe()}
    found["arms"] = json.loads(given.output.read_text())["arms"] if given.output.exists() else {}
    for arm in given.arms:
        found["arms"][arm] = run(arm, given.rounds, given.work)
        write(given.output, found)
        print(arm, found["arms"][arm], flush=True)


if __name__ == "__main__":
    main()
