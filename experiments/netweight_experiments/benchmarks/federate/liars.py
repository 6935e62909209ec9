"""What lying clients cost the honest ones: each lie against each aggregator, FedAvg on Fashion-MNIST.

    NETWEIGHT_DATA=... python -m netweight_experiments.benchmarks federate.liars
    NETWEIGHT_DATA=... python -m netweight_experiments.benchmarks federate.liars --deployed --aggregators screened-mean

One of five clients lies, and two of ten; `colluding` ones are two of seven. Clients have 600 images, as in the paper's
split. In this process the paper's network is trained; `--deployed` trains the network of examples/federate by a
SuperLink and one SuperNode per client, processes of their own with TLS and registered nodes, on this machine, from the
root of the source tree; those that answer are forks of one that has imported torch. The file is written after every
cell and keeps the cells that it has, so that a run that is stopped goes on.
"""

import json
import sys
import tempfile
import time
from argparse import Namespace
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

from netweight.methods.federate import Task, train
from netweight.methods.federate.aggregators import AGGREGATORS
from netweight.methods.federate.catalog import named_method
from netweight.methods.federate.checkpoint import CHECKPOINT
from netweight.methods.federate.history import Round
from netweight.methods.federate.local_model import LocalModel
from netweight.methods.federate.malicious_clients import TARGET, triggered
from netweight.methods.federate.plan import FederationPlan
from netweight.methods.federate.settings import Federation, Lie, LocalTraining
from netweight.store import open_store
from netweight_experiments.benchmarks.script import fill

SUPPORT = Path("tests/support")


def here(lie, aggregator, given, clients, liars, seed):
    """Train one cell in this process; return task, rounds and each client's weights."""
    expected = {aggregator: {"liars": liars}} if "liars" in AGGREGATORS[aggregator].model_fields else {}
    plan = FederationPlan(
        data="fashion-mnist", method="fedavg", epochs=given.epochs, rounds=given.rounds, evaluate_every=given.rounds,
        clients=clients, liars=liars, lie=lie, aggregator=aggregator, seed=seed, **expected,
    )  # fmt: skip
    task = plan.task()
    done = train(task, plan.make_method(task), plan, workers=1)
    return task, done.rounds, done.weights


@contextmanager
def by_flower():
    """Yield what trains a cell by processes of Flower."""
    sys.path.insert(0, str(SUPPORT.resolve()))
    from flower_processes import Deployment, example_task, lying_example, wait

    with tempfile.TemporaryDirectory() as folder:
        place, online = Deployment(Path(folder), nodes=7), 0
        app = lying_example(Path(folder))

        def there(lie, aggregator, given, clients, liars, seed):
            nonlocal online
            for node in range(online, clients):
                place.register(node)
                place.start_node(node, **{"private-folder": ""})  # the run's own: each begins anew
            online = max(online, clients)
            wait(lambda: len(place.online()) == online, 900, "the nodes", every=5.0)
            work = Path(folder) / f"{seed}-{lie}-{aggregator}-{clients}"
            config = {
                "method": "fedavg", "data": "fashion-mnist", "clients": clients, "epochs": given.epochs, "seed": seed,
                "rounds": given.rounds, "aggregator": aggregator, "folder": str(work), "timeout": 600.0,
                "private-folder": str(work / "private"), "min-clients": 2,
                "lie": f"{lie} {' '.join(map(str, range(clients - liars, clients)))}" if lie else "",
            }  # fmt: skip
            for _ in range(
                5
            ):  # a machine that stands still for a minute costs a run, which goes on from its last round
                with suppress(AssertionError):
                    if place.finish(place.run(app, **config), seconds=300) == "finished:completed":
                        break
                time.sleep(10)
            else:
                raise RuntimeError(f"{work.name} did not end: {place.log('server')[-6000:]}")
            rounds = [Round.from_json(one) for one in json.loads((work / "history.json").read_text())["rounds"]]
            with open_store(work / CHECKPOINT) as store:
                state = {name.removeprefix("state|"): store.get(name) for name in store.names() if "state|" in name}
            task = example_task(config, clients)
            return task, rounds, lambda client: named_method("fedavg").weights(task, state, {})

        try:
            place.fork()
            place.start_server()
            yield there
        finally:
            place.stop()


def alone(given, clients, liars, seed):
    """Mean accuracy, in percent, of a deployment's honest clients by themselves, in this process."""
    from flower_processes import example_task

    whole = example_task({"data": "fashion-mnist", "seed": seed}, clients)
    task = Task(whole.body, whole.head, {client: whole.client(client) for client in range(clients - liars)})
    settings = Federation(rounds=given.rounds, evaluate_every=given.rounds, seed=seed)
    method = named_method("fedavg", training=LocalTraining(epochs=given.epochs))
    return round(100 * train(task, method, settings, workers=1).rounds[-1].mean_after, 2)


def measured(lie, liars, task, rounds, weights):
    """Return the honest clients' accuracies in percent and how often liars and others were named."""
    lying = set(task.clients[-liars:]) if lie else set()
    honest = [client for client in task.clients[:-liars]]
    last = rounds[-1]
    odd = [(set(r.suspects) | set(r.refusals)) for r in rounds]
    found = {
        "before": round(100 * sum(last.before[c] for c in honest) / len(honest), 2),
        "after": round(100 * sum(last.after[c] for c in honest) / len(honest), 2),
        "liars named, share of rounds": round(sum(lying <= names for names in odd) / len(rounds), 2) if lie else None,
        "honest clients named, per round": round(sum(len(names - lying) for names in odd) / len(rounds), 2),
    }
    found["taken for the target, percent"] = round(100 * _taken_for_the_target(task, weights, honest), 2)
    return found


def _taken_for_the_target(task, weights, honest):
    model, shares = LocalModel(task), []
    for client in honest:
        images, labels = task.client(client).test
        others = labels != TARGET
        marked = triggered(images[others])
        own = weights(client)
        shares.append(model.accuracy(own.body, own.head, (marked, labels[others] * 0 + TARGET)))
    return sum(shares) / len(shares)


def cells(given):
    """Yield what is to be measured, one aggregator after the other: seed, lie, clients, liars, aggregator."""
    for aggregator in given.aggregators:
        for liars, clients in given.federations:
            for seed in given.seeds:
                for lie in (None, *given.lies):
                    if lie != "colluding":
                        yield seed, lie, clients, liars, aggregator
        # Over Flower the honest ones alone, trained here, stand for a federation of seven without liars.
        if "colluding" in given.lies:
            for seed in given.seeds:
                for lie in ("colluding",) if given.deployed else (None, "colluding"):
                    yield seed, lie, 7, 2, aggregator


def main(
    *,
    rounds: int = 8,
    epochs: int = 1,
    seeds: tuple[int, ...] = (520, 521, 522),
    deployed: bool = False,
    federations: tuple[str, ...] = ("1/5", "2/10"),
    lies: tuple[Lie, ...] = ("knowing",),
    aggregators: tuple[str, ...] = tuple(AGGREGATORS),
    output: Path,
):
    sizes = [tuple(int(part) for part in one.split("/")) for one in federations]
    given = Namespace(
        rounds=rounds, epochs=epochs, seeds=seeds, lies=lies, aggregators=aggregators, deployed=deployed,
        federations=sizes,
    )  # fmt: skip
    with by_flower() if deployed else nullcontext(here) as trained:

        def measure(seed, lie, clients, liars, aggregator):
            got = measured(lie, liars, *trained(lie, aggregator, given, clients, liars, seed))
            return got | ({"after, honest ones alone": alone(given, clients, liars, seed)} if deployed else {})

        named = {
            f"{lie or 'honest'}, {liars} of {clients}, {aggregator}, seed {seed}": partial(
                measure, seed, lie, clients, liars, aggregator
            )
            for seed, lie, clients, liars, aggregator in cells(given)
        }
        yield from fill(output, "cells", named.items())
