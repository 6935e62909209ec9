"""What one lying client of five costs the honest ones: each lie against each aggregator, FedAvg on Fashion-MNIST.

    NETWEIGHT_DATA=... python -m netweight_experiments.benchmarks.federate.liars

Two of seven for colluding ones. Clients of 600 images, as in the paper's split, one local epoch. The file is written
after every cell and keeps the cells that it has.
"""

import json
from typing import get_args

from netweight.core.environment import describe
from netweight.methods.federate import train
from netweight.methods.federate.defenses import TARGET, triggered
from netweight.methods.federate.folder import FederationPlan
from netweight.methods.federate.settings import Aggregator, Lie
from netweight.methods.federate.task import LocalModel
from netweight_experiments.benchmarks.script import script, today, write


def run(lie, aggregator, rounds, clients, liars):
    """Train one cell; return the honest clients' accuracies in percent and how often liars and others were named."""
    plan = FederationPlan(
        data="fashion-mnist", method="fedavg", epochs=1, rounds=rounds, evaluate_every=rounds, clients=clients,
        liars=liars, lie=lie, aggregator=aggregator,
    )  # fmt: skip
    task = plan.task()
    done = train(task, plan.make_method(task), plan, workers=1)
    lying = set(task.clients[-liars:]) if lie else set()
    honest = [client for client in task.clients[:-liars]]
    last = done.rounds[-1]
    odd = [(set(r.suspects) | set(r.refused)) for r in done.rounds]
    found = {
        "before": round(100 * sum(last.before[c] for c in honest) / len(honest), 2),
        "after": round(100 * sum(last.after[c] for c in honest) / len(honest), 2),
        "liars named, share of rounds": round(sum(lying <= names for names in odd) / rounds, 2) if lie else None,
        "honest clients named, per round": round(sum(len(names - lying) for names in odd) / rounds, 2),
    }
    if lie == "backdoor":
        found["taken for the target, percent"] = round(100 * _taken_for_the_target(task, done, honest), 2)
    return found


def _taken_for_the_target(task, done, honest):
    model, shares = LocalModel(task), []
    for client in honest:
        images, labels = task.client(client).test
        others = labels != TARGET
        marked = triggered(images[others])
        weights = done.weights(client)
        shares.append(model.accuracy(weights.body, weights.head, (marked, labels[others] * 0 + TARGET)))
    return sum(shares) / len(shares)


def main():
    parser = script(__doc__, "federated/liars")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--aggregators", nargs="+", choices=get_args(Aggregator), default=list(get_args(Aggregator)))
    given = parser.parse_args()
    found = {"what": __doc__.splitlines()[0], "date": today(), "rounds": given.rounds, "environment": describe()}
    found["cells"] = json.loads(given.output.read_text())["cells"] if given.output.exists() else {}
    for lie in (None, *get_args(Lie)):
        for clients, liars in ((7, 2),) if lie == "colluding" else ((5, 1), (7, 2)) if lie is None else ((5, 1),):
            for aggregator in given.aggregators:
                name = f"{lie or 'honest'}, {liars} of {clients}, {aggregator}"
                if name not in found["cells"]:
                    found["cells"][name] = run(lie, aggregator, given.rounds, clients, liars)
                    write(given.output, found)
                    print(name, found["cells"][name], flush=True)


if __name__ == "__main__":
    main()
